"""The guarantees of sequoia.py, as tests: slow, obvious oracles beside the fast code.
`python -m pytest -k quick` runs one test or more of every guarantee.
Exact tests go through every case. Statistical tests are seeded and fail if their counts have a chance below
1e-9, so a false alarm from any of them has a chance below 1e-6."""
import collections, contextlib, copy, dataclasses, doctest, functools, gc, heapq, importlib.util, inspect
import itertools, json, math, os, random, re, runpy, shutil, sys, warnings, weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from hypothesis import example, given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import sequoia
from sequoia import (METHODS, NO_TREE, NONE, Decoder, Planner, Step, Tree, chain, expected_tokens, k_ary,
                     optimal_tree, sample_and_verify, sequences, step_plainly, verify_one_node)
from sequoia import GREEDY, RULED_OUT, CachedModel, Layout, Sampling, TreeStep, never_ruled_out

settings.register_profile("sequoia", deadline=None, derandomize=True, max_examples=60, database=None)
settings.load_profile("sequoia")
# On busy cores threads would wait for each other.
torch.set_num_threads(1)
CHANCE = 1e-9
ROOT = Path(sequoia.__file__).parent
TOKENIZER = transformers.AutoTokenizer.from_pretrained(ROOT / "tiny" / "target")
# TorchScript traces passes on a CPU. It is deprecated, but nothing replaces it yet.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

def quick(test):
    """Marks a test for `-k quick`, which looks at names and at attributes."""
    test.quick = True
    return test

def some_quick(cases, *chosen):
    """Cases of which the chosen ones are run by `-k quick`, too."""
    return [pytest.param(case, id=f"{case}-quick" if case in chosen else str(case)) for case in cases]

@pytest.fixture(autouse=True)
def restored():
    """The command line sets how much transformers says and how many threads there are. Tests start anew."""
    verbosity = transformers.utils.logging.get_verbosity()
    yield
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity(verbosity)
    transformers.utils.logging.enable_progress_bar()

def seeded(seed, device="cpu"):
    return torch.Generator(device).manual_seed(seed)

# --- 1  Token trees (section 3.1) ---------------------------------------------------------------------------
def all_trees(size):
    """Every tree of `size` nodes: parents never decrease, and each stands before its children."""
    if size == 1:
        return [NO_TREE]
    return [Tree((*tree, parent)) for tree in all_trees(size - 1)
            for parent in range(max(0, tree[-1]), size - 1)]

SMALL_TREES = [tree for size in range(1, 8) for tree in all_trees(size)]
# The second child has more children than the first, so a level's parents differ in their numbers of children.
LATE = Tree([-1, 0, 0, 1, 2, 2, 2])
BUSHY = optimal_tree([0.5, 0.2, 0.1], 14, 5)
# Here a node's number is far from its level, and its leaves are far from its first nodes.
ABREAST = sequences(3, 4)

@quick
def test_a_tree_knows_its_shape():
    tree = Tree([-1, 0, 0, 0, 1, 1, 4])
    assert (tree.size, tree.depth) == (7, 4)
    assert tree.depths == [0, 1, 1, 1, 2, 2, 3]
    assert tree.ranks == [0, 0, 1, 2, 0, 1, 0]
    assert tree.children == [[1, 2, 3], [4, 5], [], [], [6], [], []]
    assert {tree, Tree(np.array(tree)), LATE} == {tree, LATE}
    assert tree.drawing("abcdefg").split() == ["a", "b", "e", "g", "f", "c", "d"]
    assert str(Tree([-1, 0, 0, 1])).split("\n") == ["0", "    1", "        3", "    2"]
    assert str(sequences(12, 1)).split() == [str(node) for node in range(13)]
    assert sequences(2, 3) == Tree([-1, 0, 0, 1, 2, 3, 4])
    assert k_ary(2, 3) == Tree([-1, 0, 0, 1, 1, 2, 2])
    assert k_ary(3, 1) == chain(0) == NO_TREE
    assert k_ary(1, 4) == chain(3)

@quick
def test_siblings_never_see_each_other_but_every_node_sees_its_ancestors_and_itself():
    # All shapes are there, because ordered trees are counted by Catalan numbers.
    sizes = [tree.size for tree in SMALL_TREES]
    assert [*collections.Counter(sizes).values()] == [1, 1, 2, 5, 14, 42, 132]
    for tree in SMALL_TREES:
        for node, row in enumerate(tree.mask.tolist()):
            above = [node]
            while above[0] != 0:
                above.insert(0, tree[above[0]])
            assert tree.paths[node] == above
            assert [other for other, is_seen in enumerate(row) if is_seen] == above

@pytest.mark.parametrize("parents, reason", [
    ([], "starts with its root"), ([0], "starts with its root"), ([-1, -1], "level order: node 1"),
    ([-1, 1], "level order: node 1"), ([-1, 0, 1, 0], "level order: node 3 has the parent 0")])
def test_what_makes_no_tree_is_an_error_that_says_why(parents, reason):
    with pytest.raises(ValueError, match=reason):
        Tree(parents)

# --- 2  Sampling (section 3.2, Algorithm 2 line 5) ----------------------------------------------------------
def distribution(weights):
    weights = torch.as_tensor(weights, dtype=torch.float64)
    return weights / weights.sum(dim=-1, keepdim=True)

def scores_of(Q):
    return never_ruled_out(Q.log())

def all_proposals(Q, k, replacement):
    """All sequences of k tokens that can be drawn from Q, (V,), and their chances. Without replacement, the
    tokens without a chance come after all others, each as likely as the next."""
    tokens = range(len(Q))
    found = itertools.product(tokens, repeat=k) if replacement else itertools.permutations(tokens, k)
    proposals = []
    chances = []
    for sequence in found:
        chance = 1.0
        D = Q.clone()
        rest = torch.ones_like(Q)
        for token in sequence:
            chance *= D[token] / D.sum()
            if not replacement:
                rest[token] = 0
                D[token] = 0
                D = D if D.sum() > 0 else rest.clone()
        if chance > 0:
            proposals.append(sequence)
            chances.append(chance)
    return torch.tensor(proposals), torch.stack(chances)

def chi_square_tail(observed, expected):
    """The chance of counts so far from the expected ones. Neighbours are merged until 10 are expected."""
    observed = np.asarray(observed, dtype=np.float64)
    expected = np.asarray(expected, dtype=np.float64)
    if observed[expected == 0].any():
        return 0.0
    starts = [0]
    total = 0.0
    for i, count in enumerate(expected):
        total += count
        if total >= 10 and expected[i + 1 :].sum() >= 10:
            starts.append(i + 1)
            total = 0.0
    observed = np.add.reduceat(observed, starts)
    expected = np.add.reduceat(expected, starts)
    statistic = ((observed - expected) ** 2 / expected).sum()
    halves = torch.tensor([max(len(starts) - 1, 1) / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(*halves).item()

WITH_REPLACEMENT = ("specinfer", "spectr", "naive")
FIRST_CHOICES = ("topk", "gumbel")

def random_for(seed):
    return partial(sequoia.uniform, generator=seeded(seed))

@quick
@pytest.mark.parametrize("name", ["sequoia", "specinfer"])
def test_the_largest_scores_plus_noise_are_drawn_without_replacement_and_specinfers_with_it(name):
    n = 50_000
    for Q in distribution([[10, 6, 3, 1], [7, 3, 0, 0], [0, 0, 1, 0], [1, 1, 1, 1]]):
        tokens = METHODS[name].propose(scores_of(Q).expand(n, 4), 4, random_for(0))
        sequences_, chances = all_proposals(Q, 4, name in WITH_REPLACEMENT)
        powers = 4 ** torch.arange(4)
        expected = torch.zeros(4**4, dtype=torch.float64)
        expected[sequences_ @ powers] = n * chances
        assert chi_square_tail((tokens @ powers).bincount(minlength=4**4), expected) > CHANCE

@quick
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("k", [1, 2, 4])
def test_where_fewer_tokens_are_possible_than_children_the_row_ends_with_none(name, k):
    """With replacement a possible token comes again instead."""
    q = torch.tensor([[0.0, RULED_OUT, 1, RULED_OUT], [RULED_OUT] * 4, [math.nan] * 4])
    tokens = METHODS[name].propose(q, k, random_for(0))
    assert tokens.shape == (3, k)
    assert (tokens[1:] == NONE).all()
    if name in WITH_REPLACEMENT:
        assert set(tokens[0].tolist()) <= {0, 2}
    else:
        assert sorted(tokens[0, :2].tolist()) in ([0, 2], [0], [2])
        assert (tokens[0, 2:] == NONE).all()

@quick
def test_whatever_a_draft_says_its_scores_stay_finite_at_any_temperature():
    said = torch.tensor([[math.nan, math.inf, -math.inf, 3.0]])
    for temperature in (1e-9, 0.1, 50):
        assert (never_ruled_out(said) / temperature).softmax(dim=1).sum() == pytest.approx(1)

@quick
def test_the_first_of_equals_is_the_likeliest():
    for size in (4, 8, 16, 50_000):
        scores = torch.zeros(1, size)
        scores[:, 0] = RULED_OUT
        assert sequoia.most_likely(scores, 1).item() == 1
    assert sequoia.most_likely(torch.tensor([[1.0, 4, 2, 3]]), 3).tolist() == [[1, 3, 2]]

@quick
def test_draws_follow_the_weights_and_never_fall_on_a_token_without_any():
    weights = torch.tensor([[0.0, 3, 0, 5, 2, 0], [0] * 6, [math.nan] * 6])
    tokens = sequoia.draw(weights, sequoia.uniform(3, 50_000, seeded(0)))
    assert chi_square_tail(tokens[0].bincount(minlength=6), 5000 * weights[0]) > CHANCE
    assert (tokens[1:] == NONE).all()
    extremes = torch.tensor([[0.0, 2.0**-53, 1 - 2.0**-53]], dtype=torch.float64)
    assert set(sequoia.draw(weights[:1], extremes)[0].tolist()) == {1, 4}

def test_random_numbers_have_53_bits_and_noise_keeps_them():
    """Multiples of 2^-24, as float32 has them, would be too far apart."""
    assert (sequoia.uniform(1, 1000, seeded(0)) * 2**24 % 1).std() > 0.2
    largest = torch.tensor(1 - 2.0**-53, dtype=torch.float64)
    assert sequoia.gumbel_noise(largest).item() == pytest.approx(53 * math.log(2))

@quick
def test_a_token_of_a_tiny_chance_is_drawn_because_sums_are_in_float64():
    weights = torch.tensor([[1.0, 2.0**-40]])
    u = torch.tensor([[1 - 2.0**-42, 1 - 2.0**-38]], dtype=torch.float64)
    assert sequoia.draw(weights, u).tolist() == [[1, 0]]

# --- 3  One node and one step, plainly ----------------------------------------------------------------------
# A model is a table for each level, (V**level, V): its distributions after every path of that length, whose
# tokens, read as digits of base V, give the row.

def table_models(vocabulary, depth, seed, zeros=0.0):
    """A target's and a draft's tables."""
    levels = [random_rows(vocabulary**level, vocabulary, zeros, seed + level) for level in range(depth)]
    return [P for P, _ in levels], [Q for _, Q in levels]

def random_rows(rows, vocabulary=6, zeros=0.0, seed=1):
    """Target and draft distributions, (rows, V) each, far from each other, with exact zeros in either."""
    scores, hidden = torch.rand(2, 2, rows, vocabulary, generator=seeded(seed), dtype=torch.float64)
    zero = (hidden < zeros) & (scores < scores.amax(dim=-1, keepdim=True))
    return scores.mul(6).masked_fill(zero, RULED_OUT).softmax(dim=-1)

def row_of(tables, path):
    number = functools.reduce(lambda number, token: number * tables[0].shape[1] + token, path, 0)
    return tables[len(path)][number]

def continued(start, tables):
    """The distribution of texts of len(tables) tokens that begin with `start` and then go on by these tables,
    (V**levels,)."""
    chances = torch.ones(1, dtype=torch.float64)
    for level, P in enumerate(tables):
        following = torch.eye(P.shape[1])[start[level]] if level < len(start) else P
        chances = (chances[:, None] * following).flatten()
    return chances

class EveryRun:
    """Stands in for all random numbers. Runs a program once for every sequence of its random choices."""

    def results(self, program):
        """Yields the chance and the result of each run."""
        self.scripts = [()]
        while self.scripts:
            self.script = self.scripts.pop()
            self.chosen = ()
            self.chance = 1.0
            with mock.patch.multiple(sequoia, uniform=self.uniform, gumbel_noise=lambda u: u, draw=self.draw,
                                     most_likely=self.draw_different):
                result = program()
            yield self.chance, result

    def choose(self, chances):
        """A choice between 0, 1, ...: in the first run the likeliest one, in the others the rest."""
        chances = [float(chance) for chance in chances]
        if len(self.chosen) == len(self.script):
            possible = sorted(range(len(chances)), key=chances.__getitem__)
            self.script += (possible.pop(),)
            self.scripts += [(*self.chosen, other) for other in possible if chances[other] > 1e-12]
        choice = self.script[len(self.chosen)]
        self.chosen += (choice,)
        self.chance *= chances[choice]
        return choice

    def draw(self, weights, u):
        rows = [[self.choose(distribution(row)) for _ in range(self.shape[1])] for row in weights]
        return torch.tensor(rows)

    def draw_different(self, scores, k):
        """What scores plus noise would draw, (rows, k)."""
        rows = []
        for row in scores.clone():
            rows.append([])
            for _ in range(k):
                is_possible = row.max() > RULED_OUT
                token = self.choose(row.double().softmax(dim=0)) if is_possible else NONE
                rows[-1].append(token)
                row[token if is_possible else slice(0)] = RULED_OUT
        return torch.tensor(rows)

    # Now the random numbers: any part of them is like the whole, and u < ratio has the chance min(ratio, 1).
    def uniform(self, rows, n, generator=None, device=None):
        self.shape = rows, n
        return self

    def __getitem__(self, index):
        return self

    def __lt__(self, ratio):
        chances = [min(chance, 1.0) if chance > 0 else 0.0 for chance in ratio.flatten().tolist()]
        answers = [self.choose([1 - chance, chance]) for chance in chances]
        return torch.tensor(answers).view(ratio.shape).bool()

    def __radd__(self, scores):
        return torch.atleast_2d(scores)

    def __format__(self, spec):
        return "u"

def weights_of(vocabulary):
    weight = st.sampled_from([0, 1e-6, 1, 1 + 1e-10, 3, 7])
    return st.lists(weight, min_size=vocabulary, max_size=vocabulary).filter(any).map(distribution)

@st.composite
def targets_and_drafts(draw):
    """P, Q, (V,), and a number of children."""
    vocabulary = draw(st.integers(2, 5))
    k = draw(st.integers(1, min(vocabulary, 3)))
    return draw(weights_of(vocabulary)), draw(weights_of(vocabulary)), k

@quick
@given(targets_and_drafts())
def test_one_nodes_token_has_exactly_the_targets_distribution(case):
    """Summed up over all proposals and all outcomes of all tries."""
    P, Q, k = case
    run = EveryRun()

    def program():
        tokens = run.draw_different(scores_of(Q)[None], k)[0]
        rank, R = verify_one_node(P, Q, tokens, run)
        if rank == NONE:
            return run.choose(R)
        return tokens[rank]

    found = torch.zeros_like(P)
    for chance, token in run.results(program):
        found[token] += chance
    torch.testing.assert_close(found, P, rtol=0, atol=1e-9)

@quick
@pytest.mark.parametrize("zeros", [0, 0.4])
def test_a_plain_steps_text_has_exactly_the_targets_distribution(zeros):
    """After the step's tokens the target itself goes on, up to the length that the step may add at most."""
    for tree in (chain(2), Tree([-1, 0, 0, 1, 2]), Tree([-1, 0, 0, 2, 2])):
        target, draft = table_models(3, tree.depth, seed=3, zeros=zeros)
        # A text's first token is not part of the path.
        p = lambda text: row_of(target, text[1:].tolist()).log()
        q = lambda text: scores_of(row_of(draft, text[1:].tolist()))
        found = 0
        for chance, added in EveryRun().results(lambda: step_plainly(p, q, torch.tensor([0]), tree)):
            found = found + chance * continued(added.tolist(), target)
        torch.testing.assert_close(found, continued([], target), rtol=0, atol=1e-9)

@quick
def test_a_plain_step_takes_a_drafts_scores_of_any_dtype_down_to_700_below_the_highest():
    """Probabilities in float32 would end at e^-104. The target wants the draft's second token and its third,
    and only the second is proposed."""
    p = lambda text: torch.tensor([RULED_OUT, 0.0, 0.0])
    q = lambda text: torch.tensor([0.0, -300.0, -600.0])
    steps = [step_plainly(p, q, torch.tensor([0]), Tree([-1, 0, 0]), seeded(seed)) for seed in range(40)]
    assert 10 < sum(step[0] == 2 for step in steps) < 30

def test_what_a_plain_step_says_are_the_numbers_of_its_tries():
    """The worked example above `verify_one_node`: b is rejected by 3/7, and a is then sure to be accepted."""
    P, Q = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.7, 0.1]])
    said = []
    tokens = torch.tensor([1, 0])
    rank, _ = verify_one_node(P, Q, tokens, torch.tensor([0.5, 0.9]), said.append, "abc".__getitem__)
    assert rank == 1
    assert said[0] == "b: R 0.30 / D 0.70 = 0.43, u 0.50: rejected"
    assert said[1].startswith("a: R 0.75 / D 0.67 = 1.1")

# --- 4  The best tree (section 3.1, Algorithm 1) ------------------------------------------------------------
@st.composite
def acceptance_rates(draw):
    """1-D or 2-D rates, sorted or not, with zeros and sums of 1 among them."""
    ranks = draw(st.integers(1, 4))
    shares = st.lists(st.integers(0, 9), min_size=ranks + 1, max_size=ranks + 1).filter(any)
    weights = np.array(draw(st.lists(shares, min_size=1, max_size=3)))
    rates = (weights / weights.sum(axis=1, keepdims=True))[:, :ranks]
    if draw(st.booleans()):
        rates = -np.sort(-rates, axis=1)
    return rates[0] if len(rates) == 1 and draw(st.booleans()) else rates

def chance_of(path, tree, rates):
    """f(v), Definition 3.3: the product of the rates on the way. The last row is for all deeper levels."""
    rows = [rates[min(level, len(rates) - 1)] for level in range(len(path))]
    return math.prod(row[tree.ranks[node]] for row, node in zip(rows, path[1:]))

@quick
@given(acceptance_rates(), st.integers(1, 7))
@example(np.array([1e-3, 1e-7, 1e-7]), 3)
@example(np.array([0.6, 0.0]), 2)
@example(np.array([[0.1, 0.1], [0.6, 0.3]]), 7)
def test_no_other_tree_of_that_size_and_depth_has_more_expected_tokens(rates, depth):
    most_children = rates.shape[-1]
    best = {}
    for tree in SMALL_TREES:
        if tree.depth <= depth and max(map(len, tree.children)) <= most_children:
            value = sum(chance_of(path, tree, np.atleast_2d(rates)) for path in tree.paths)
            assert expected_tokens(tree, rates) == pytest.approx(value)
            best[tree.size] = max(value, best.get(tree.size, 0))
    for size in range(1, 8):
        if size in best:
            tree = optimal_tree(rates, size, depth)
            assert tree.size == size
            assert tree.depth <= depth
            assert max(map(len, tree.children)) <= most_children
            assert expected_tokens(tree, rates) == pytest.approx(best[size])
        else:
            with pytest.raises(ValueError, match=f"largest has {max(best)}$"):
                optimal_tree(rates, size, depth)

def test_a_child_beyond_the_last_rate_is_never_accepted_and_depth_is_free_by_default():
    for rates, depth, most in (([], None, 1), ([0.5], 0, 1), ([0.5, 0.5], 2, 3)):
        with pytest.raises(ValueError, match=f"size=5 is too large: .* largest has {most}$"):
            optimal_tree(rates, 5, depth)
    assert expected_tokens(Tree([-1, 0, 0, 2]), [0.5]) == 1.5
    assert expected_tokens(chain(2), []) == 1
    assert expected_tokens(Tree([-1, 0, 0, 1, 3]), [0.6, 0.2, 0.1]) == pytest.approx(2.376)
    assert optimal_tree([1.0], 200) == chain(199)

# --- 5  Many nodes at once, and 8  Other methods ------------------------------------------------------------
BY_RATIOS = [name for name, method in METHODS.items() if method.target_P is sequoia.distribution]

@quick
@pytest.mark.parametrize("name", BY_RATIOS)
@given(targets_and_drafts())
@settings(max_examples=40)
def test_accepted_tokens_and_the_residual_add_up_to_the_target_exactly(name, case):
    """Over all proposals and all outcomes of all tries."""
    P, Q, k = case
    proposals, chances = all_proposals(Q, k, name in WITH_REPLACEMENT)
    run = EveryRun()
    found = torch.zeros_like(P)
    for tokens, proposed in zip(proposals, chances):
        program = partial(METHODS[name].verify, P[None], scores_of(Q)[None], tokens[None], run)
        for chance, (rank, R) in run.results(program):
            last = torch.eye(len(P))[tokens[int(rank)]] if rank < k else distribution(R[0])
            found += proposed * chance * last
    torch.testing.assert_close(found, P, rtol=0, atol=1e-6)

# 10,000 of P, Q and k, by vocabulary and k, where a third of all chances are 0.
TASKS = {(V, k): random_rows(1112, V, zeros=0.4, seed=10 * V + k)
         for V in (2, 3, 4) for k in range(1, V + 1)}

@quick
@pytest.mark.parametrize("name", METHODS)
def test_ten_thousand_targets_and_drafts_with_zeros(name):
    """Each method yields P, by 10 samples of each. Where all tokens are proposed, or all that Q gives a
    chance and P's are among those, one is accepted. A single one is as often as optimal transport allows."""
    for (V, k), (P, Q) in TASKS.items():
        is_proposed = (Q > 0) & ((Q > 0).sum(dim=1, keepdim=True) <= k) | (k == V)
        covers = (is_proposed | (P == 0)).all(dim=1)
        P, Q, covers = (rows.repeat_interleave(10, dim=0) for rows in (P, Q, covers))
        rank, token = sample_and_verify(P, Q, k, name, seeded(0))
        assert (P.gather(1, token[:, None]) > 0).all()
        assert rank.unique().tolist()[-k:] == list(range(k))
        assert covers.any()
        if name not in WITH_REPLACEMENT:
            assert (rank[covers] >= 0).all()
        if k == 1 and name in BY_RATIOS:
            optimal = torch.minimum(P, Q).sum()
            expected = torch.stack([len(P) - optimal, optimal])
            assert chi_square_tail((rank + 1).bincount(minlength=2), expected) > CHANCE
        # Apart where the draft gives a token more or less than the target, and the most of all tokens.
        kind = (Q > P) + 2 * (Q == Q.amax(dim=1, keepdim=True))
        observed = (kind.gather(1, token[:, None])[:, 0] * V + token).bincount(minlength=4 * V)
        expected = torch.stack([P * (kind == i) for i in range(4)]).sum(dim=1).flatten()
        assert chi_square_tail(observed, expected) > CHANCE

@quick
def test_the_numbers_of_many_nodes_are_those_of_the_plain_algorithm_row_by_row():
    """With the same random numbers: the same rank and residual, never NaN, for all 10,000."""
    for (V, k), (P, Q) in TASKS.items():
        q = scores_of(Q)
        tokens = METHODS["sequoia"].propose(q, k, random_for(k))
        u = sequoia.uniform(*tokens.shape, seeded(9))
        found, residual = METHODS["sequoia"].verify(P, q, tokens, u)
        ranks = []
        for row in range(len(P)):
            rank, R = verify_one_node(P[row], Q[row], tokens[row], u[row])
            ranks.append(k if rank == NONE else rank)
            if rank == NONE:
                assert not R.isnan().any()
                torch.testing.assert_close(distribution(residual[row]), R, atol=1e-12, rtol=1e-6)
        assert found.tolist() == ranks

@quick
@pytest.mark.parametrize("name", BY_RATIOS)
def test_missing_children_take_nothing_from_the_target_and_are_never_accepted(name):
    """Two tokens are possible for the draft, so that after them none is left for its third child. As an index
    that stands for the first token, which the draft cannot give, but the target may want."""
    verify = METHODS[name].verify
    q = torch.tensor([[0, 0.3, 0.7, 0]], dtype=torch.float64).log()
    for P in random_rows(50, vocabulary=4, zeros=0.3)[0][:, None]:
        for u in torch.tensor([[1.0, 1, 0, 0], [0.5, 1, 0, 0], [1, 0.5, 0, 0]])[:, None]:
            rank, R = verify(P, q, torch.tensor([[1, 2]]), u[:, :2])
            padded_rank, padded_R = verify(P, q, torch.tensor([[1, 2, NONE, NONE]]), u)
            # Even a random number of 0 accepts no missing child.
            assert padded_rank == (rank if rank < 2 else 4)
            torch.testing.assert_close(padded_R, R, rtol=1e-12, atol=1e-15)
            assert not R.isnan().any()

@quick
def test_a_missing_child_is_no_match_even_if_the_target_draws_the_first_token():
    wanted = torch.tensor([[1.0, 0, 0], [0, 0, 1.0]])
    tokens = torch.tensor([[1, NONE], [2, NONE]])
    rank, R = GREEDY.verify(wanted, None, tokens, None)
    assert rank.tolist() == [2, 0]
    assert R[0].equal(wanted[0])

def test_gumbels_child_is_accepted_as_often_as_is_exact():
    """Token j is both models' if E_j / P_j and E_j / Q_j are the least: 1 / sum max(P_i / P_j, Q_i / Q_j)."""
    for P, Q in zip(*random_rows(6)):
        chance = sum(1 / torch.maximum(P / P[j], Q / Q[j]).sum() for j in range(6))
        distance = (P - Q).abs().sum() / 2
        assert chance > (1 - distance) / (1 + distance)
        rank, _ = sample_and_verify(P.expand(10_000, -1), Q.expand(10_000, -1), 1, "gumbel", seeded(0))
        observed = (rank + 1).bincount(minlength=2)
        assert chi_square_tail(observed, [10_000 * (1 - chance), 10_000 * chance]) > CHANCE

@quick
def test_shared_noise_depends_on_the_seed_and_the_position_alone():
    def noise_of(seed, position, vocabulary=500):
        ids, scores = torch.zeros(1, position).long(), torch.zeros(1, vocabulary)
        return sequoia.shared_noise(seed)(ids, scores)[0]

    assert noise_of(7, 3).equal(noise_of(7, 3))
    assert noise_of(7, 3, 90).equal(noise_of(7, 3)[:90])
    different = [noise_of(seed, position) for seed in (0, 1, 2**62 - 1) for position in range(1, 200)]
    assert len(torch.cat(different).unique()) > 0.99 * 597 * 500

# --- 5b  Logits processors ----------------------------------------------------------------------------------
@quick
@pytest.mark.parametrize("kind, value", [("TopK", 2), ("TopP", 0.8), ("MinP", 0.4)])
def test_truncation_removes_a_targets_tokens_but_only_lowers_a_drafts(kind, value):
    processor = getattr(transformers, f"{kind}LogitsWarper")(value)
    logits = torch.tensor([[3.0, 1.0, 2.9, -math.inf]])
    temperature = transformers.TemperatureLogitsWarper(0.5)
    sampling = Sampling(METHODS["sequoia"], [temperature, processor])
    shaped = [6.0, RULED_OUT, pytest.approx(5.8), RULED_OUT]
    assert sampling.processed(None, logits, False).tolist() == [shaped]
    lowered = [6.0, 2 - sequoia.FAR_BELOW, pytest.approx(5.8), -2000 - sequoia.FAR_BELOW]
    assert sampling.processed(None, logits, True).tolist() == [lowered]
    # Of a model in bfloat16 the logits alone are rounded.
    warm = Sampling(METHODS["sequoia"], [transformers.TemperatureLogitsWarper(0.7)])
    rounded = logits.bfloat16()
    assert warm.processed(None, rounded, False).equal(warm.processed(None, rounded.float(), False))
    # Any other processor also rules out a draft's tokens.
    forbid = lambda ids, scores: scores.index_fill(1, torch.tensor(0), RULED_OUT)
    reading = Sampling(METHODS["sequoia"], [temperature, processor, forbid])
    # Ways of sampling that differ in anything have plans of their own.
    ways = [sampling, warm, reading, Sampling(GREEDY, [temperature, processor]), Sampling(GREEDY, [])]
    assert len({way.settings for way in ways}) == 5
    scores = reading.processed(torch.tensor([[5]]), logits, True)
    assert scores.tolist() == [[RULED_OUT, *lowered[1:]]]

@quick
def test_a_processor_gets_each_nodes_own_text_and_none_that_has_ended():
    """It is not asked behind an end or a missing child."""
    asked = []

    def processor(ids, scores):
        asked.append(ids[0].tolist())
        return scores + 1

    sampling = Sampling(METHODS["sequoia"], [processor], ends=[9])
    assert sampling.reads_text
    # The root may be such an end, because a prompt may close with one.
    tree = Tree([-1, 0, 0, 0, 0, 1, 2, 4])
    tokens = torch.tensor([9, 2, 1, 9, NONE, 3, 4, 3, 9, NONE])
    logits = torch.arange(16.0).view(8, 2)
    text = torch.tensor([5, 7, 9])
    scores = sampling.node_scores(logits, False, torch.arange(8), tree, tokens, text)
    assert asked == [[5, 7, 9], [5, 7, 9, 2], [5, 7, 9, 1], [5, 7, 9, 2, 3], [5, 7, 9, 1, 4]]
    is_asked = torch.tensor([[1], [1], [1], [0], [0], [1], [1], [0]])
    assert scores.equal(logits + is_asked)

# --- 6  The tree in a model's cache, and the step on a device -----------------------------------------------
@quick
def test_a_layout_is_as_its_docstring_prints_it():
    layout = Layout(Tree([-1, 0, 0, 1]), "cpu")
    assert layout.offsets.tolist() == [[0, 1, 2, 3, -1], [0, 1, 1, 2, -1]]
    rows = ["xx....", "xxx...", "xx.x..", "xxx.x.", "x....."]
    assert layout.mask.tolist() == [[0.0 if sign == "x" else RULED_OUT for sign in row] for row in rows]
    assert layout.children.tolist() == [[1, 2, -1], [3, -1, -1], [-1, -1, -1], [-1, -1, -1]]
    first, second = [[part.tolist() for part in level] for level in layout.passes]
    assert first == [[0], [4, 0], [[1, 2]]]
    assert second == [[1], [1], [[3]]]
    *_, children = Layout(LATE, "cpu").passes[1]
    assert children.tolist() == [[3, -1, -1], [4, 5, 6]]

SMALL = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             max_position_embeddings=512, bos_token_id=1, eos_token_id=None, pad_token_id=0)
GQA = dict(SMALL, num_key_value_heads=2)
HEAD = dict(GQA, head_dim=8)
WINDOW = dict(GQA, sliding_window=12)
GEMMA = dict(HEAD, sliding_window=12)
TWO_KINDS = dict(GEMMA, layer_types=["sliding_attention", "full_attention"])
GPT2 = dict(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=None,
            pad_token_id=0)
YARN = dict(rope_type="yarn", factor=2.0, rope_theta=1e4, original_max_position_embeddings=256)
ROBERTA = dict(SMALL, is_decoder=True)
ARCHITECTURES = {
    "llama": ("Llama", GQA), "qwen2": ("Qwen2", GQA), "qwen3": ("Qwen3", HEAD), "phi3": ("Phi3", WINDOW),
    "mistral": ("Mistral", WINDOW), "gpt-neox": ("GPTNeoX", SMALL), "gpt2": ("GPT2", GPT2),
    "falcon": ("Falcon", SMALL), "gemma2": ("Gemma2", GEMMA), "gemma3": ("Gemma3Text", TWO_KINDS),
    "roberta": ("Roberta", ROBERTA), "roberta without padding": ("Roberta", dict(ROBERTA, pad_token_id=None))}
ARCHITECTURES["qwen2 with a window"] = ("Qwen2", dict(WINDOW, use_sliding_window=True, max_window_layers=1))
ARCHITECTURES["opt"] = ("OPT", dict(SMALL, ffn_dim=48, word_embed_proj_dim=32))
ARCHITECTURES["mixtral"] = ("Mixtral", dict(WINDOW, num_local_experts=4))
ARCHITECTURES["gpt-oss"] = ("GptOss", dict(TWO_KINDS, num_local_experts=4, num_experts_per_tok=2,
                                           rope_parameters=YARN))
# Keys unlike values, and layers unlike layers.
ARCHITECTURES["deepseek-v3"] = ("DeepseekV3", dict(
    SMALL, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12,
    num_key_value_heads=4, moe_intermediate_size=16, n_routed_experts=4, n_group=1, topk_group=1,
    num_experts_per_tok=2, first_k_dense_replace=2))
ARCHITECTURES["gemma4"] = ("Gemma4Text", dict(
    TWO_KINDS, global_head_dim=16, hidden_size_per_layer_input=8, vocab_size_per_layer_input=64))

# One of each kind of attention, position and entry: these go through the tests of single steps.
STEPPED = ("llama", "gpt2", "mistral", "gemma3", "gpt-oss", "deepseek-v3", "gemma4")
# Their experts take no float64.
MIXTURES = ("gpt-oss", "deepseek-v3")

def config_of(name, **changes):
    kind, given = ARCHITECTURES[name]
    # The text of a random model that is tied to its embeddings would repeat one token.
    return getattr(transformers, f"{kind}Config")(**dict(given, tie_word_embeddings=False) | changes)

def make_pair(name, difference=0.25, seed=0, **changes):
    """A random target whose distributions are far from flat, and a draft near it."""
    config = config_of(name, **changes)
    torch.manual_seed(seed)
    target = transformers.AutoModelForCausalLM.from_config(config).eval()
    draft = transformers.AutoModelForCausalLM.from_config(config).eval()
    for p, q in zip(target.parameters(), draft.parameters()):
        if p.ndim > 1:
            p.data *= 4
            q.data = p.data + difference * p.std() * torch.randn_like(p)
        else:
            q.data = p.data.clone()
    for model in (target, draft):
        model.get_output_embeddings().weight.data *= 4
    return target, draft

def exact_pair(name, **changes):
    """In float64, where ties are rare."""
    pair = make_pair(name, difference=0.5, **changes)
    return pair if name in MIXTURES else [model.double() for model in pair]

def model_with_window(name, window):
    changes = dict(sliding_window=window) if window else {}
    return make_pair(name, **changes)[0]

def text_of(length, vocabulary=64, seed=0):
    return torch.randint(2, vocabulary, (length,), generator=seeded(seed))

def fed(model, text, capacity=256):
    """A model with a cache that holds a text."""
    cached = CachedModel(model)
    cached.reserve(capacity)
    with torch.inference_mode():
        cached.prefill(text)
    return cached

@quick
@pytest.mark.parametrize("name, window", [("llama", 0), ("gemma3", 12), ("gpt-oss", 12), ("mistral", 3),
                                          ("gpt2", 0), ("deepseek-v3", 0), ("gemma4", 4)])
@torch.inference_mode()
def test_tree_attention_equals_one_path_at_a_time(name, window):
    """Of nodes in any order, and previous. Windows are shorter than the text, or than the tree."""
    model = model_with_window(name, window)
    text = text_of(30)
    cached = fed(model, text[:-1])
    layout = Layout(ABREAST, "cpu")
    # The nodes' tokens. The root's and that of previous are the text's last.
    tokens = torch.cat([text[-1:], text_of(12, seed=1), text[-2:-1]])
    nodes = torch.randperm(14, generator=seeded(0))
    place = layout.place(torch.tensor([29]), 192)
    logits = cached.logits(tokens, nodes, place)
    for node, row in zip(nodes.tolist(), logits):
        path = tokens[ABREAST.paths[node]] if node < 13 else tokens[:0]
        alone = torch.cat([text[:-1], path])
        torch.testing.assert_close(row, model(alone[None]).logits[0, -1], atol=2e-3, rtol=1e-3)

@torch.inference_mode()
def test_a_prefill_gives_the_last_tokens_logits_and_a_cache_that_grows_keeps_its_entries():
    model = make_pair("llama")[0]
    cached = CachedModel(model)
    for length in (1, 2, 200):
        logits = cached.prefill(text_of(length), 4)
        torch.testing.assert_close(logits, model(text_of(length)[None]).logits[0, -4:])
    before = cached.store
    cached.reserve(256)
    # A captured graph goes on with this memory.
    assert cached.store is before
    cached.reserve(257)
    assert cached.store.shape[2] == 512
    assert_cached(cached, text_of(200))

class EmulatedGraph(TorchDispatchMode):
    """A CUDA graph on a CPU. While it is captured, operators are noted with the memory they use, and their
    writes are undone afterwards. A replay runs them on that memory again, so whatever Python knew in the
    capture, it knows for good: sizes, addresses, values. Before each replay the memory made in the capture is
    filled with garbage. To read a value, which a GPU forbids, is an error, and so is to draw from a generator
    that is not registered."""
    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "equal")

    def __init__(self):
        super().__init__()
        self.calls = []
        self.before = {}         # by address: memory that was there, and its contents
        self.pool = {}           # by address: memory made in the capture
        self.generators = [torch.default_generator]

    def register_generator_state(self, generator):
        self.generators.append(generator)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if operator.__name__.split(".")[0] in self.FORBIDDEN or not self.knows(kwargs.get("generator")):
            raise RuntimeError(f"operation not permitted when stream is capturing: {operator}")
        for storage in storages((args, kwargs)):
            if storage.data_ptr() not in self.pool and storage.data_ptr() not in self.before:
                self.before[storage.data_ptr()] = storage, storage.clone()
        out = operator(*args, **kwargs)
        for storage in storages(out):
            if storage.data_ptr() not in self.before:
                self.pool[storage.data_ptr()] = storage
        self.calls.append((operator, args, kwargs, out))
        return out

    def knows(self, generator):
        # An operator is given another object for the same generator.
        known = [one.get_state() for one in self.generators]
        return generator is None or any(map(generator.get_state().equal, known))

    @contextlib.contextmanager
    def capture(self):
        states = [generator.get_state() for generator in self.generators]
        with self:
            yield
        for storage, contents in self.before.values():
            storage.copy_(contents)
        for generator, state in zip(self.generators, states):
            generator.set_state(state)

    def replay(self):
        for storage in self.pool.values():
            # NaN as a float, and -1 as an integer.
            torch.tensor([], dtype=torch.uint8).set_(storage).fill_(255)
        for operator, args, kwargs, out in self.calls:
            for old, new in zip(tree_leaves(out), tree_leaves(operator(*args, **kwargs))):
                if torch.is_tensor(old) and old.data_ptr() != new.data_ptr():
                    assert old.shape == new.shape
                    old.copy_(new)

def storages(values):
    found = [value.untyped_storage() for value in tree_leaves(values) if torch.is_tensor(value)]
    return [storage for storage in found if storage.nbytes()]

@contextlib.contextmanager
def form_of(name):
    """Steps as on a CPU; as a GPU would capture them, but called again; or captured."""
    capture = TreeStep.capture if name == "captured" else lambda *arguments: None
    with mock.patch.multiple(torch.cuda, CUDAGraph=EmulatedGraph, graph=EmulatedGraph.capture,
                             current_stream=mock.Mock(), stream=contextlib.nullcontext):
        with mock.patch.object(TreeStep, "capture", capture):
            yield

def scores_by(model, sampling, is_draft=False, vocabulary=64):
    """A function from a text to a model's scores after it, by an ordinary pass. Greedy is Algorithm 2 at a
    temperature towards 0, and so is gumbel with its noise."""
    def scores(text):
        known = model.get_input_embeddings().num_embeddings
        logits = model(text.clamp(max=known - 1)[None]).logits[:, -1]
        # A draft's vocabulary may have another length.
        missing = logits.new_full((1, max(0, vocabulary - known)), RULED_OUT)
        logits = torch.cat([logits[:, :vocabulary], missing], dim=1)
        found = sampling.processed(text[None], logits, is_draft)[0]
        return found.double() if sampling.method is METHODS["sequoia"] else found.double() * 1e6
    return scores

def sampling_of(name, processors, seed):
    """With the noise of a text, if both models share some."""
    noise = [sequoia.shared_noise(seed)] if name == "gumbel" else []
    return Sampling(METHODS.get(name, GREEDY), [*processors, *noise])

def assert_cached(cached, text):
    """The cache holds what a fresh pass over the text would have put there."""
    fresh = fed(cached.model, text)
    assert len(fresh.store) == 4
    found, expected = cached.store[:, :, : len(text)], fresh.store[:, :, : len(text)]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)

@torch.inference_mode()
def assert_steps_as_plainly(models, prompt, trees, sampling, form, seed):
    """A text's steps add the tokens of the plain step, and leave both caches as fresh ones: the target's with
    all but the next root, the draft's also without the token before it, which it may not have been fed."""
    target, draft = models
    generator, again = seeded(seed), seeded(seed)
    p = scores_by(target.model, sampling)
    q = scores_by(draft.model, sampling, is_draft=True)
    static = form != "host" and not sampling.reads_text
    for model in models:
        # What an earlier text left must not show.
        model.reserve(256)
        model.store.fill_(math.nan)
    text = prompt
    run = None
    calls = collections.Counter()
    for model in models:
        model.prefill(text[:-1])
    for tree in trees:
        if run is None or run.tree != tree:
            run = TreeStep(tree, models, generator, static)
        with form_of(form):
            step = run(text, sampling)
        expected = step_plainly(p, q, text, tree, again)
        assert step.tokens == expected.tolist()
        text = torch.cat([text, expected])
        assert_cached(target, text[:-1])
        assert_cached(draft, text[:-2])
        # The first call of a step warms up, and the second one captures it.
        calls[run] += 1
        assert (run.graph is not None) == (static and form == "captured" and calls[run] > 1)

Temperature = transformers.TemperatureLogitsWarper
SHAPED = [[Temperature(0.7)], [Temperature(1.5), transformers.TopPLogitsWarper(0.8)],
          [transformers.TopKLogitsWarper(5)], [transformers.MinPLogitsWarper(0.1)],
          [transformers.RepetitionPenaltyLogitsProcessor(1.5)]]
# Those that the plain step can follow token by token.
PLAIN = ("sequoia", "gumbel", "greedy")
SOME_TREES = 4 * [LATE] + 3 * [chain(4)] + 3 * [BUSHY] + 2 * [ABREAST]

@pytest.mark.parametrize("name", some_quick(STEPPED, "gemma4"))
@pytest.mark.parametrize("form", ["host", "static", "captured"])
def test_a_step_adds_what_the_plain_step_adds_and_leaves_caches_as_a_fresh_pass_would(name, form):
    """From the same random numbers, over texts that the same caches take one after the other."""
    window = dict(sliding_window=3) if form == "captured" and name in ("mistral", "gemma3") else {}
    models = [CachedModel(model) for model in exact_pair(name, **window)]
    sampling = Sampling(METHODS["sequoia"], SHAPED[0])
    assert_steps_as_plainly(models, text_of(20), SOME_TREES, sampling, form, seed=1)
    if name == "llama":
        choice = random.Random(0).choice
        for seed, processors in enumerate(SHAPED, start=2):
            for method in PLAIN:
                trees = 3 * [choice(SMALL_TREES[-100:])] + 2 * [choice(SMALL_TREES)]
                sampling = sampling_of(method, processors, seed)
                assert_steps_as_plainly(models, text_of(seed), trees, sampling, form, seed)

# Its last token is the root.
ROOT_TEXT = torch.tensor([0, 0])

class TableModel:
    """Stands in for a CachedModel whose text does not matter: a row of a table follows each path."""
    store = torch.zeros(0, 0, 64, 0)

    def __init__(self, tables):
        self.tables = tables
        self.vocabulary = tables[0].shape[1]

    def logits(self, tokens, nodes, place):
        # What a node sees are a text of one token, in slot 0, then the root, and then its path.
        _, _, mask, _ = place
        paths = [row.nonzero()[2:, 0] - 1 for row in mask[nodes] == 0]
        tokens = tokens.clamp(min=0)
        return torch.stack([row_of(self.tables, tokens[path].tolist()) for path in paths]).log()

    def move(self, path, slots):
        pass

def grammar(ids, scores):
    """After an even token only the first two are allowed, where the tree has three children."""
    return scores if ids[0, -1] % 2 else scores.index_fill(1, torch.tensor([2, 3]), RULED_OUT)

def by_grammar(tables):
    """The same tables under that grammar. With four tokens, even rows follow even tokens."""
    shaped = [P.log() for P in tables]
    for scores in shaped:
        scores[::2, 2:] = RULED_OUT
    return [scores.softmax(dim=1) for scores in shaped]

@pytest.mark.parametrize("name", some_quick(["sequoia", "specinfer", "spectr", "naive", "topk"], "sequoia"))
@torch.inference_mode()
def test_a_steps_text_has_exactly_the_targets_distribution(name):
    """All proposals, all outcomes of all tries, and all last tokens; then the target itself goes on."""
    trees = [Tree([-1, 0, 0]), Tree([-1, 0, 0, 1]), Tree([-1, 0, 0, 0, 2])]
    for tree, is_free in itertools.product(trees, (True, False)):
        target, draft = table_models(3 if is_free else 4, tree.depth, seed=2, zeros=0.3 * is_free)
        exact = target if is_free else by_grammar(target)
        sampling = Sampling(METHODS[name], [] if is_free else [grammar])
        models = [TableModel(target), TableModel(draft)]
        found = 0
        for chance, result in EveryRun().results(lambda: TreeStep(tree, models)(ROOT_TEXT, sampling)):
            found = found + chance * continued(result.tokens, exact)
        torch.testing.assert_close(found, continued([], exact), rtol=0, atol=1e-6)

@pytest.mark.parametrize("form", ["host", "static"])
@pytest.mark.parametrize("name", [pytest.param("sequoia", id="sequoia-quick"), *list(METHODS)[1:]])
@torch.inference_mode()
def test_random_numbers_of_a_step_are_independent_where_they_meet(name, form):
    """A level must not use those of another level, nor a child its sibling's."""
    tree = Tree([-1, 0, 0, 1, 1, 2, 2])
    target, draft = table_models(3, tree.depth, seed=5)
    generator = seeded(0)
    rows = []
    with form_of(form):
        step = TreeStep(tree, [TableModel(target), TableModel(draft)], generator, form == "static")
        for number in range(1500):
            sampling = sampling_of(name, [], number)
            step.static &= not sampling.reads_text
            result = step(ROOT_TEXT, sampling)
            rows.append(continued(result.tokens, target))
    texts = torch.stack(rows).multinomial(1, generator=generator)[:, 0]
    assert sum(len(row.nonzero()) == 1 for row in rows) > 5
    assert chi_square_tail(texts.bincount(minlength=27), 1500 * continued([], target)) > CHANCE

@quick
@torch.inference_mode()
def test_static_and_host_walks_find_the_same_path_on_every_small_tree():
    """To leaves, to late children, and past missing children, which a draft of NaN leaves."""
    levels = collections.Counter()
    for seed, tree in enumerate(tree for tree in SMALL_TREES if tree.depth < 6):
        target, draft = models = [TableModel(tables) for tables in table_models(6, tree.depth, seed)]
        for Q in draft.tables[1:]:
            Q[seed % 3 :: 3] = math.nan
        sampling = Sampling(METHODS[BY_RATIOS[seed % 3]], [])
        host = TreeStep(tree, models, seeded(seed))(ROOT_TEXT, sampling)
        static = TreeStep(tree, models, seeded(seed), static=True)(ROOT_TEXT, sampling)
        assert host[:4] == static[:4]
        levels[len(host.path)] += 1
    assert min(levels[0], levels[1], levels[2]) > 10

# Gumbel without its noise, which depends on the text's length, is greedy decoding.
EVERY_METHOD = [pytest.param(method, id=name.replace("gumbel", "greedy")) for name, method in METHODS.items()]

class NothingOnTheCPU(TorchDispatchMode):
    """No operator takes or makes a tensor on the CPU: in a CUDA graph that would be a copy, and an error."""
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, out))
        assert not any(torch.is_tensor(leaf) and leaf.is_cpu for leaf in leaves), operator
        return out

@pytest.mark.parametrize("method", EVERY_METHOD)
@torch.inference_mode()
def test_a_static_step_takes_nothing_from_the_host(method):
    pair = make_pair("gemma3")
    models = [fed(model, text_of(9)) for model in pair]
    steps = [TreeStep(tree, models, static=True) for tree in (NO_TREE, LATE, BUSHY)]
    for model in pair:
        model.to("meta")
    for step in steps:
        for owner in (step, *models):
            moved = tree_map(lambda x: x.to("meta") if torch.is_tensor(x) else x, vars(owner))
            vars(owner).update(moved)
        step.rand = partial(sequoia.uniform, device="meta")
        sampling = Sampling(method, [one for processors in SHAPED[:4] for one in processors])
        text = torch.zeros(10, dtype=torch.long, device="meta")
        with NothingOnTheCPU():
            result = step.on_device(text, sampling)
        assert result.is_meta
        assert result.shape == (2 + step.tree.size,)

@needs_cuda
@pytest.mark.parametrize("method", EVERY_METHOD)
@torch.inference_mode()
def test_captured_steps_equal_the_same_steps_called_again_on_a_gpu(method):
    pair = [model.cuda() for model in make_pair("llama")]
    prompt = text_of(20).cuda()
    texts = []
    for form in ("host", "static", "captured"):
        models = [fed(model, prompt[:-1]) for model in pair]
        run = TreeStep(BUSHY, models, seeded(0, "cuda"), form != "host")
        text = prompt
        with contextlib.nullcontext() if form == "captured" else mock.patch.object(TreeStep, "capture"):
            for _ in range(12):
                step = run(text, Sampling(method, [Temperature(0.7)]))
                text = torch.cat([text, text.new_tensor(step.tokens)])
        assert (run.graph is not None) == (form == "captured")
        texts.append(text.tolist())
    assert texts[1] == texts[2]
    # A host draws the target's own tokens node by node.
    assert texts[0] == texts[1] or method.target_P is sequoia.token_drawn

# --- 7  The planner (section 4.1) ---------------------------------------------------------------------------
def walk_by_rates(tree, rates, rng):
    """The path of a step whose children are accepted by these chances, (levels, ranks)."""
    path = []
    node = 0
    while children := tree.children[node]:
        row = rates[min(tree.depths[node], len(rates) - 1)]
        rank = rng.choice(len(row) + 1, p=[*row, max(0.0, 1 - row.sum())])
        if rank >= min(len(children), len(row)):
            return path
        node = children[rank]
        path.append(node)
    return path

@quick
@pytest.mark.parametrize("true", [[0.5, 0.2, 0.1], [0.3, 0.3, 0.1], [0.2, 0.5, 0.1]])
def test_acceptance_rates_approach_the_true_ones_but_are_made_to_fall(true):
    """0.02 is 5 standard errors of 20,000 counts."""
    tree = k_ary(3, 4)
    rng = np.random.default_rng(0)
    planner = Planner(tree)
    for _ in range(20_000):
        path = walk_by_rates(tree, np.array([true]), rng)
        planner.learn(Step(tree, [0] * tree.size, path, 0, 1.0))
    assert np.abs(planner.rates()[:3] - np.minimum.accumulate(true)).max() < 0.02
    assert (np.diff(planner.rates()) <= 0).all()

def test_a_missing_child_was_not_tried():
    """Where a grammar allows one token in two of three steps: a second child is as good as where it is."""
    tree = k_ary(2, 3)
    planner = Planner(tree)
    planner.trials.append(tree)
    for i in range(3000):
        tokens = [5, 7, NONE, NONE, NONE, NONE, NONE] if i % 3 else [5, 7, 8, 9, 10, 11, 12]
        planner.learn(Step(tree, tokens, [] if i % 3 else [2], 0, 1.0 + i))
    # The root's first child was tried 3,000 times, and in 1,000 steps node 2's two.
    assert [planner.tried[rank] for rank in range(3)] == [4000, 2000, 0]
    assert [planner.accepted[rank] for rank in range(3)] == [0, 1000, 0]
    # The last times are kept.
    assert [*planner.seconds[tree]] == [1.0 + i for i in range(3000 - sequoia.TIMINGS, 3000)]

@quick
@pytest.mark.parametrize("rates", [0.6 / np.arange(1, 9) ** 2, 0.2 / np.arange(1, 9) ** 0.5],
                         ids=["steep", "flat"])
def test_the_plan_is_the_best_of_all_sizes_and_depths(rates):
    # Nine nodes are the most that two levels hold.
    trees = [NO_TREE] + [optimal_tree(rates, size, 2) for size in range(2, 10)]
    trees += [optimal_tree(rates, size, depth) for size in range(3, 41) for depth in range(3, 13)]
    expected = [expected_tokens(tree, rates) for tree in trees]
    machines = [([1.0, 1.02, 1.1, 1.4], 0.05), ([1.0, 1.0, 1.0, 3.0], 0.3)]
    # From nodes that cost nearly nothing to nodes that cost a whole step.
    for seconds in (0.001, 0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 1.0):
        machines.append(([1 + seconds * n for n in (0, 3, 15, 39)], seconds))
    for t, c in machines:
        def promised(tree, tokens):
            return tokens / (np.interp(tree.size, [1, 4, 16, 40], t) + c * (tree.depth - 1))

        best = max(map(promised, trees, expected))
        found = sequoia.plan(rates, [1, 4, 16, 40], t, c)
        assert promised(found, expected_tokens(found, rates)) == pytest.approx(best)
    assert found == NO_TREE

# The paper's, of Llama-3-70B with the 8B as its draft; and a draft that is right less often below the root.
PAPER_RATES = np.array([[0.7732, 0.1039, 0.0402, 0.0206, 0.0128, 0.0081, 0.0064, 0.0043, 0.0035, 0.0026]])
RATES = np.array([[0.65, 0.12, 0.05, 0.03, 0.02], [0.6, 0.1, 0.05, 0.03, 0.02]])
# t(n), c, acceptance rates, steps, and the least part of the best tree's pace.
MACHINES = {"flat to 800": (lambda n: max(1.0, n / 800), 0.002, PAPER_RATES, 600, 0.97),
    "flat": (lambda n: 1.0, 0.5, RATES, 400, 0.97),
    "linear": (lambda n: 0.98 + 0.02 * n, 0.02, RATES, 200, 0.97),
    "kinked": (lambda n: max(1.0, n / 48), 0.1, RATES, 200, 0.95),
    "no tree pays": (lambda n: float(n), 1.0, RATES, 200, 1)}

def no_noise(rng, step):
    return 1.0

def noise(rng, step):
    """It only adds: mostly a little, in one step of twenty a lot, and to all of the first."""
    return 1 + 0.1 * rng.exponential() + 2 * (rng.random() < 0.05) + 0.3 * (step < 20)

@functools.cache
def simulated(name, noise, seed=0):
    """A planner after these steps, the steps, and by their number each plan's trials and latencies."""
    t, c, rates, steps, _ = MACHINES[name]
    rng = np.random.default_rng(seed)
    planner = Planner("auto")
    done = []
    planned = {}
    latency = Planner.latency

    def noted_latency(planner):
        planned[len(done)] = [*planner.trials], latency(planner)
        return planned[len(done)][1]

    with mock.patch.object(Planner, "latency", noted_latency):
        for number in range(1, steps + 1):
            tree = planner.next_tree()
            seconds = (t(tree.size) + c * (tree.depth - 1)) * noise(rng, number)
            step = Step(tree, [0] * tree.size, walk_by_rates(tree, rates, rng), 0, seconds)
            planner.learn(step)
            done.append(step)
    return planner, done, planned

def pace(tree, name):
    t, c, rates, *_ = MACHINES[name]
    return expected_tokens(tree, rates) / (t(tree.size) + c * (tree.depth - 1))

def chances_of_the_likeliest(rates, depth, count):
    """The chances of the likeliest nodes of at most `depth` levels, one after another. As chances fall from
    parent to child and from sibling to sibling, the first n always form a tree, so it is the best one."""
    chances = []
    waiting = [(-1.0, 0)]
    while waiting and len(chances) < count:
        chance, level = heapq.heappop(waiting)
        chances.append(-chance)
        if level + 1 < depth:
            for rate in rates[min(level, len(rates) - 1)]:
                heapq.heappush(waiting, (chance * rate, level + 1))
    return np.array(chances)

def test_a_plan_keeps_the_likeliest_nodes_where_a_level_has_more_than_it_may():
    rates = np.array([0.4333, 0.4027, 0.1205, 0.0374])
    best = 0.0
    for depth in range(1, 25):
        expected = chances_of_the_likeliest(rates[None], depth, 64).cumsum()
        n = np.arange(1, len(expected) + 1)
        best = max(best, (expected / (1 + 0.0087 * (n - 1) + 0.0035 * (depth - 1))).max())
    tree = sequoia.plan(rates, [1, 64], [1, 1 + 0.0087 * 63], 0.0035)
    seconds = 1 + 0.0087 * (tree.size - 1) + 0.0035 * (tree.depth - 1)
    assert expected_tokens(tree, rates) / seconds == pytest.approx(best)

@pytest.mark.parametrize("name", MACHINES)
def test_a_planner_knows_the_machine_and_finds_the_best_of_all_trees(name):
    """Of up to 1,024 nodes on up to 24 levels."""
    t, c, rates, steps, least = MACHINES[name]
    planner, done, planned = simulated(name, no_noise)
    best = 0.0
    for depth in range(1, 25):
        expected = chances_of_the_likeliest(rates, depth, 1024).cumsum()
        times = np.array([t(n) + c * (depth - 1) for n in range(1, len(expected) + 1)])
        best = max(best, (expected / times).max())
    assert pace(planner.tree, name) >= least * best
    _, (sizes, times, draft_seconds) = planned[max(planned)]
    assert sizes[0] == 1
    assert draft_seconds == pytest.approx(c, rel=0.01)
    assert times == pytest.approx([t(size) for size in sizes], rel=0.01)

@pytest.mark.parametrize("name", ["flat", pytest.param("linear", id="linear-quick"), "kinked"])
def test_planners_on_a_noisy_machine_mostly_come_near(name):
    found = [simulated(name, noise, seed=seed) for seed in range(3)]
    mean = np.mean([pace(planner.tree, name) for planner, _, _ in found])
    assert mean > 0.85 * pace(simulated(name, no_noise)[0].tree, name)
    c = np.median([planned[max(planned)][1][2] for _, _, planned in found])
    assert c == pytest.approx(MACHINES[name][1], abs=0.08, rel=0.4)

@quick
def test_plans_come_at_doubling_steps_and_few_steps_are_trials():
    _, done, planned = simulated("flat", no_noise)
    trees = [step.tree for step in done]
    counts = collections.Counter(trees)
    assert sum(count for _, count in counts.most_common()[4:]) <= 60
    assert sequoia.TIMINGS < counts[NO_TREE] <= 2 * sequoia.TIMINGS + len(planned)
    steps = [*planned]
    assert 5 <= len(steps) <= 20
    assert steps[-1] > 150
    assert all(later - step <= 5 or later >= 2 * step for step, later in zip(steps, steps[1:]))
    # What a plan compares was timed just before it.
    trials = planned[steps[-1]][0]
    assert trees[steps[-1] - 3 : steps[-1]] == trials[:3]
    assert trials[1:3] == [NO_TREE, chain(7)]

@quick
def test_a_shape_is_planned_again_at_doubling_steps_and_a_tree_stays():
    planner = Planner((8, 4))
    trees = []
    for _ in range(100):
        trees.append(planner.next_tree())
        # First children are always accepted, so their siblings are worth less and less.
        path = walk_by_rates(trees[-1], np.ones((1, 1)), np.random.default_rng(0))
        planner.learn(Step(trees[-1], [0] * 8, path, 0, 1.0))
        assert Planner(LATE).next_tree() == LATE
    assert trees[0] == optimal_tree(Planner(LATE).rates(), 8, 4)
    assert {i for i in range(1, 100) if trees[i] != trees[i - 1]} <= {16, 32, 64}
    assert {(tree.size, tree.depth) for tree in trees} == {(8, 4)}
    assert trees[16] != trees[0]

@quick
def test_trials_come_only_where_a_plan_would_still_pay():
    """In short texts "auto" is its first tree, until the steps of several texts are enough for trials."""
    planner = Planner("auto")
    trees = []
    for _ in range(70):
        trees.append(planner.next_tree(20))
        planner.learn(Step(trees[-1], [0] * trees[-1].size, [], 0, 1.0))
    before = sequoia.WORTH_TRIALS - 20
    assert set(trees[:before]) == {trees[0]}
    assert trees[0].size == 8
    assert trees[before : before + 4] == 4 * [NO_TREE]

@quick
def test_a_planner_does_not_wait_for_a_trial_that_short_texts_never_finish():
    """Where a text can get five tokens, a trial of eight levels is always cut, and a cut one is not timed."""
    planner = Planner("auto")
    for _ in range(100):
        tree = planner.next_tree(5)
        assert tree.depth <= 5
        planner.learn(Step(tree, [0] * tree.size, [], 0, 1.0))
    assert planner.next_tree(100) == chain(7)

@quick
def test_a_size_to_try_doubles_the_timed_ones_up_to_the_limit_or_lies_between_two_of_them():
    assert sequoia.size_to_try(600, [1, 512]) == 1024
    assert sequoia.size_to_try(1024, [1, 512, 1024]) is None
    assert sequoia.size_to_try(7, [1, 8, 16]) is None
    assert sequoia.size_to_try(12, [1, 12, 40]) == 26
    # Where not even eight nodes pay, none is tried.
    assert sequoia.size_to_try(1, [1, 8]) is None
    assert sequoia.size_to_try(1, [1, 20]) == 10

@quick
def test_a_slow_first_time_is_forgotten_before_the_next_plan():
    planner = Planner("auto")
    seen = []

    def plan(rates, sizes, t, c):
        seen.append((t[0], len(planner.seconds[NO_TREE])))
        return chain(2)

    with mock.patch.object(sequoia, "plan", plan):
        for number in range(200):
            tree = planner.next_tree()
            is_first = not planner.seconds[tree] and number < 20
            planner.learn(Step(tree, [0] * tree.size, [], 0, 9.0 if is_first else 1.0))
    assert len(seen) > 3
    assert seen[0][0] == 1.0
    assert {count for _, count in seen} == {sequoia.TIMINGS}
    assert max(planner.seconds[NO_TREE]) == 1.0

def test_more_nodes_take_no_less_time_and_a_draft_pass_none_below_zero():
    planner = Planner("auto")
    planner.trials.append(k_ary(2, 3))
    for tree, seconds in zip(planner.trials, (2.0, 3.0, 1.0, 2.0)):
        planner.seconds[tree] += 4 * [seconds]
    sizes, t, c = planner.latency()
    assert sizes == [1, 7, 8]
    assert [*t] == [3.0, 3.0, 3.0]
    assert c == 0.0

@pytest.fixture(scope="module")
def llama():
    return make_pair("llama")

@pytest.fixture(scope="module")
def bundled():
    """The bundled pair in float32, as it is, and its tokenizer."""
    load = partial(transformers.AutoModelForCausalLM.from_pretrained, dtype=torch.float32)
    return load(ROOT / "tiny" / "target"), load(ROOT / "tiny" / "draft"), TOKENIZER

def prompt_of(length, vocabulary=64, seed=0):
    return torch.randint(2, vocabulary, (1, length), generator=seeded(seed))

def plain_text(target, prompt, **arguments):
    return target.generate(prompt, **dict(do_sample=False) | arguments)

def assert_as_generate(decoder, prompt, **arguments):
    """Greedily a Decoder writes `generate`'s text, which is returned."""
    expected = plain_text(decoder.target.model, prompt, **copy.deepcopy(arguments))
    found = decoder.generate(prompt, **dict(do_sample=False) | arguments)
    assert found.equal(expected)
    assert found.dtype == expected.dtype
    return expected

@contextlib.contextmanager
def static_steps():
    """Steps of fixed shapes, as a GPU would capture them, but on a CPU, and called again instead of replayed.
    Yields the list of those that would be captured."""
    captured = []
    made = Decoder.__init__

    def static(self, *given, **named):
        made(self, *given, **named)
        self.cuda_graph = True

    with mock.patch.object(Decoder, "__init__", static):
        with mock.patch.object(sequoia.TreeStep, "capture", lambda step, *given: captured.append(step)):
            yield captured

FORMS = {"host": contextlib.nullcontext, "static": static_steps}
BUSHY_9 = Tree([-1, 0, 0, 0, 1, 1, 2, 4, 4, 7])
TREES = [NO_TREE, chain(4), sequences(3, 3), BUSHY_9, "auto"]

# --- 9  Decoding: greedy text -------------------------------------------------------------------------------
@pytest.mark.parametrize("name", some_quick(ARCHITECTURES, "llama", "gemma4", "gpt-oss", "roberta"))
def test_greedy_text_is_generates_on_every_architecture_with_every_tree(name):
    """Windows are 12 tokens wide, and the text grows to 50, so most of it lies behind a window."""
    target, draft = make_pair(name, difference=0.05)
    for tree in TREES:
        steps = []
        decoder = Decoder(target, draft, tree, on_step=steps.append)
        assert_as_generate(decoder, prompt_of(26), max_new_tokens=24)
        # A draft this near must save steps, because otherwise its cache is wrong.
        assert len(steps) == 24 if tree == NO_TREE else len(steps) < 18
    assert decoder.probed

@pytest.mark.parametrize("name", some_quick(ARCHITECTURES, "llama", "gemma3"))
def test_in_bfloat16_no_tree_gives_generates_text_because_the_probe_leaves_nothing_behind(name):
    """Bit for bit: a tree's pass rounds otherwise, so one entry of the probe's would soon change a text. The
    windows are wide, because generate's cache lets go of what is behind one, and so adds in another order."""
    changes = {"sliding_window": 256} if "sliding_window" in ARCHITECTURES[name][1] else {}
    target = make_pair(name, **changes)[0].bfloat16()
    for seed in range(3):
        decoder = Decoder(target, tree="none")
        assert_as_generate(decoder, prompt_of(9 + 8 * seed, seed=seed), max_new_tokens=24)
        assert decoder.probed

@pytest.mark.parametrize("length", some_quick([1, 2, 5, 6, 7, 245, 250, 255, 256, 257], 1, 5, 6, 256))
def test_prompts_shorter_than_the_probe_and_around_the_caches_capacity(llama, length):
    decoder = Decoder(*llama, (9, 4))
    assert_as_generate(decoder, prompt_of(length), max_new_tokens=14)
    # A prompt that is too short to tell much leaves the probe to the next one.
    assert decoder.probed == (length >= 6)
    assert_as_generate(decoder, prompt_of(9), max_new_tokens=4)
    assert decoder.probed

@quick
@pytest.mark.parametrize("form", FORMS)
def test_a_decoder_kept_over_texts_gives_what_a_fresh_one_gives(llama, form):
    """Whatever the call before asked for, because another way of sampling has another planner and step."""
    generator = torch.Generator()
    changes = [{}, {}, dict(temperature=0.5), dict(temperature=0.5, top_p=0.8), dict(top_k=9), dict(top_k=8),
               dict(do_sample=False), dict(repetition_penalty=1.5), dict(bad_words_ids=[[3]]), {}]
    planners = []
    with FORMS[form]():
        kept = Decoder(*llama, sequences(2, 3), generator=generator)
        for i, change in enumerate(changes):
            texts = []
            for model in (kept.target, kept.draft):
                # What an earlier text left must never show.
                model.store = torch.full_like(model.store, torch.nan)
            for decoder in (kept, Decoder(*llama, sequences(2, 3), generator=generator)):
                generator.manual_seed(i)
                prompt = prompt_of(6 + 90 * (i % 4), seed=i)
                texts.append(decoder.generate(prompt, **dict(do_sample=True, max_new_tokens=12) | change))
            assert texts[0].equal(texts[1]), change
            planners.append(len(kept.planners))
    assert planners == [1, 1, 2, 3, 4, 5, 6, 7, 7, 7]

@quick
def test_a_step_is_captured_again_when_the_caches_grow(llama):
    """A graph goes on with the memory that it was captured with, so the old one would lose the text."""
    decoder = Decoder(*llama, BUSHY_9)
    decoder.cuda_graph = True
    capture = mock.Mock(side_effect=TreeStep.capture)
    with form_of("captured"), mock.patch.object(TreeStep, "capture", lambda *given: capture(*given)):
        assert_as_generate(decoder, prompt_of(230), max_new_tokens=40)
    assert capture.call_count == 2
    assert decoder.target.store.shape[2] == 512

def test_auto_with_all_its_trials_writes_generates_text(llama):
    """More than 64 tokens pay for trials, so trees of several shapes, and none, follow one another. After a
    step without a tree the draft lacks its token, so it must be fed again, or it would guess badly."""
    steps = []
    decoder = Decoder(llama[0], llama[0], on_step=steps.append)
    for length in (8, 33):
        assert_as_generate(decoder, prompt_of(length), max_new_tokens=90)
    assert {NO_TREE, chain(7)} < {step.tree for step in steps}
    for step in steps:
        # The draft is the target, so every guess is right as long as its cache is.
        assert len(step.tokens) == step.tree.depth

@quick
def test_where_steps_are_captured_trials_come_only_in_longer_texts(llama):
    """Because each of a trial's trees is captured, which takes as long as several steps."""
    for form, are_trials in (("host", True), ("static", False)):
        steps = []
        with FORMS[form]():
            decoder = Decoder(*llama, on_step=steps.append)
            assert_as_generate(decoder, prompt_of(8), max_new_tokens=80)
        trees = {step.tree for step in steps[1:] if step.tree.size == 8 or step.tree == NO_TREE}
        assert (NO_TREE in trees) == are_trials
        assert len(trees) == 1 + 2 * are_trials

def test_a_drafts_vocabulary_context_and_mode_do_not_change_the_text(llama):
    """One padded to another length, one whose context ends early, one whose dropout only costs speed."""
    target, draft = make_pair("llama")
    for size in (60, 70):
        draft.resize_token_embeddings(size)
        steps = []
        decoder = Decoder(target, draft, sequences(61, 1), on_step=steps.append)
        assert_as_generate(decoder, prompt_of(10), max_new_tokens=16)
        for step in steps[1:]:
            # Nothing is proposed beyond the target's vocabulary, and what the draft lacks comes last.
            children = step.node_tokens[1:]
            assert len({*children}) == step.tree.size - 1
            assert max(step.node_tokens) < 64
            assert all(token < size for token in children[:60])
    short = make_pair("gpt2", n_positions=32)[1]
    for length, tree in ((5, (9, 4)), (31, sequences(2, 5)), (32, "auto"), (33, (9, 4)), (60, "auto")):
        assert_as_generate(Decoder(target, short, tree), prompt_of(length), max_new_tokens=30)
    restless = make_pair("gpt2", resid_pdrop=0.9)[1].train()
    assert_as_generate(Decoder(target, restless, (9, 4)), prompt_of(12), max_new_tokens=16)

# --- 9  Decoding: the end of a text -------------------------------------------------------------------------
@quick
def test_eos_inside_an_accepted_run_ends_the_text(llama):
    plain = plain_text(llama[0], prompt_of(10), max_new_tokens=30)[0]
    steps = []
    # The draft is the target, so whole paths are accepted.
    decoder = Decoder(llama[0], llama[0], chain(5), on_step=steps.append)
    inside = 0
    for end in set(plain[10:].tolist()):
        text = assert_as_generate(decoder, prompt_of(10), max_new_tokens=30, eos_token_id=end, pad_token_id=0)
        inside += steps[-1].tokens[-1] != end
    assert inside >= 4
    # One of several ends, and one that the model's own configuration names.
    ends = plain[[13, 21]].tolist()
    assert_as_generate(decoder, prompt_of(10), max_new_tokens=30, eos_token_id=ends, pad_token_id=0)
    with mock.patch.object(llama[0].generation_config, "eos_token_id", ends[1]):
        assert_as_generate(decoder, prompt_of(10), max_new_tokens=30)

@quick
@pytest.mark.parametrize("tree", ["auto", "16x5", chain(6)], ids=["auto", "16x5", "chain"])
def test_a_text_is_never_longer_than_asked_for_and_trees_are_cut_at_its_end(llama, tree):
    """A level that would stand behind the end is drafted for nothing, so it is cut, in each of the steps."""
    for count in (1, 2, 3, 4, 7, 12):
        steps = []
        decoder = Decoder(llama[0], llama[0], tree, on_step=steps.append)
        text = assert_as_generate(decoder, prompt_of(10), max_new_tokens=count)
        left = count
        for step in steps:
            assert step.tree.depth <= left
            left -= len(step.tokens)
        assert left == 0
        assert text.shape == (1, 10 + count)

@quick
def test_criteria_are_asked_after_every_token_and_end_the_text_there(llama):
    asked = []

    def at_17(ids, scores, **kwargs):
        asked.append(ids[0].tolist())
        return torch.full((len(ids),), ids.shape[1] >= 17)

    decoder = Decoder(llama[0], llama[0], chain(5))
    plain = plain_text(llama[0], prompt_of(10), max_new_tokens=30)[0].tolist()
    out = decoder.generate(prompt_of(10), do_sample=False, max_new_tokens=30, stopping_criteria=[at_17])
    assert out[0].tolist() == plain[:17]
    assert asked == [plain[:length] for length in range(11, 18)]
    out = decoder.generate(prompt_of(10), max_new_tokens=30, max_time=0.0, stopping_criteria=[at_17])
    assert out.shape == (1, 11)

@quick
def test_a_stop_string_inside_an_accepted_run_ends_the_text(bundled):
    target, draft, tokenizer = bundled
    ids = tokenizer("import os\n\ndef main(", return_tensors="pt").input_ids
    for near, words in ((draft, "\n"), (target, ["\n"]), (target, [":", "("]), (target, "\0\0")):
        decoder = Decoder(target, near, chain(5))
        text = assert_as_generate(decoder, ids, max_new_tokens=30, stop_strings=words, tokenizer=tokenizer)
        assert (text.shape[1] < ids.shape[1] + 30) == (words != "\0\0")
    with pytest.raises(ValueError, match="tokenizer"):
        Decoder(target, draft).generate(ids, max_new_tokens=4, stop_strings="\n")

@quick
def test_a_streamer_gets_the_prompt_and_then_every_token(llama):
    given = []
    streamer = SimpleNamespace(put=lambda ids: given.append(ids), end=lambda: given.append("end"))
    out = Decoder(*llama, (9, 4)).generate(prompt_of(10), max_new_tokens=20, streamer=streamer)
    assert given.pop() == "end" and given[0].equal(prompt_of(10))
    assert [ids.tolist() for ids in given[1:]] == [[token] for token in out[0, 10:].tolist()]

def test_both_ways_in_take_what_a_tokenizer_gives_and_return_what_is_asked_for(llama):
    target, draft = llama
    expected = plain_text(target, prompt_of(10), max_new_tokens=12)
    greedy = dict(max_new_tokens=12, do_sample=False)
    encoded = dict(input_ids=prompt_of(10), attention_mask=torch.ones(1, 10).long())
    decoder = Decoder(target, draft)
    for inputs in (prompt_of(10), prompt_of(10).int(), encoded, transformers.BatchEncoding(encoded)):
        assert decoder.generate(inputs, **greedy).equal(expected)
    out = sequoia.generate(target, encoded, assistant_model=draft, return_dict_in_generate=True, **greedy)
    assert out.sequences.equal(expected)
    options = dict(tree="none", method="topk", generator=seeded(0), on_step=print, cuda_graph=False)
    with mock.patch.object(sequoia, "Decoder") as made:
        sequoia.generate(target, encoded, assistant_model=draft, **options)
    assert made.call_args.args == (target, draft, *options.values())
    for given, named in (([draft], {}), ([], dict(draft=draft))):
        with pytest.raises(ValueError, match="no draft: pass it by name, .*assistant_model=draft"):
            sequoia.generate(target, encoded, *given, **named)

@quick
def test_the_end_of_the_context_is_an_error_only_if_the_text_gets_there():
    """A limit is no wish, so programs may always pass a large one."""
    target, draft = make_pair("llama", max_position_embeddings=64)
    plain = plain_text(target, prompt_of(12), max_new_tokens=12)[0]
    end = next(int(token) for token in plain[20:] if token not in plain[:20])
    decoder = Decoder(target, draft, (9, 4))
    text = assert_as_generate(decoder, prompt_of(12), max_new_tokens=2000, eos_token_id=end, pad_token_id=0)
    assert text.shape[1] < 25
    # The last token is never fed, so it may stand one behind the context.
    assert_as_generate(decoder, prompt_of(50), max_length=65)
    assert_as_generate(decoder, prompt_of(64), max_length=65)
    for length in (50, 64):
        with pytest.raises(ValueError, match="fills the target's context of 64 tokens"):
            decoder.generate(prompt_of(length), max_length=66)

OF_32 = dict(rope_theta=1e4, original_max_position_embeddings=32)
ROPES = {"yarn": dict(OF_32, rope_type="yarn", factor=4.0),
         "linear": dict(rope_theta=1e4, rope_type="linear", factor=4.0),
         "longrope": dict(OF_32, rope_type="longrope", short_factor=[1.0] * 4, long_factor=[4.0] * 4)}

@pytest.mark.parametrize("kind", ROPES)
def test_scaled_positions_lengthen_the_context_but_longropes_ends_at_its_switch(kind):
    """Qwen's recipe leaves max_position_embeddings at the original length. Past its short length longrope
    would rotate all earlier keys anew, which a cache does not follow, so the text must not get there, and
    nodes behind the switch must not switch a pass."""
    rope = ROPES[kind]
    context = 32 if kind == "longrope" else 128
    most = 128 if kind == "longrope" else 32
    target, draft = make_pair("llama", max_position_embeddings=most, rope_parameters=rope)
    decoder = Decoder(target, draft, sequences(3, 4))
    for length in (20, context - 12):
        assert_as_generate(decoder, prompt_of(length), max_length=context + 1)
    with pytest.raises(ValueError, match=f"context of {context} tokens"):
        decoder.generate(prompt_of(20), max_length=context + 2)
    # The factor counts from the original length, where one is named, and never shortens the context.
    for factor, expected in ((4.0, 1024), (1.5, 512)):
        long = dict(rope, factor=factor, original_max_position_embeddings=256)
        config = config_of("llama", max_position_embeddings=512, rope_parameters=long)
        assert kind != "yarn" or sequoia.context_of(config) == expected
    # With one rope for each kind of layer the shortest one counts.
    kinds = dict(full_attention=rope, sliding_attention=dict(rope_type="default", rope_theta=1e4))
    gemma = dict(max_position_embeddings=most, rope_parameters=kinds, layer_types=[*kinds])
    assert Decoder(make_pair("gemma3", **gemma)[0], tree="none").target.context == context

# --- 9  Decoding: sampled text ------------------------------------------------------------------------------
@pytest.mark.parametrize("method, form", [
    pytest.param("sequoia", "host", id="sequoia-quick"), ("sequoia", "static"), ("specinfer", "host"),
    ("spectr", "static"), ("naive", "static"), ("topk", "host"), ("gumbel", "static")])
@torch.inference_mode()
def test_texts_of_four_tokens_have_the_targets_distribution(method, form):
    """With the prompt's pass, trees that are cut at the end, and caches that entries move in. The vocabulary
    has three tokens, so that the target alone can score all 81 texts."""
    target, draft = make_pair("gpt2", difference=1.5, seed=3, vocab_size=3, n_layer=1, bos_token_id=None)
    prompt = torch.tensor([0, 1, 2, 1])
    following = torch.cartesian_prod(*4 * [torch.arange(3)])
    logits = target(torch.cat([prompt.expand(81, -1), following], dim=1)).logits[:, 3:-1]
    chances = logits.softmax(dim=2).gather(2, following[:, :, None]).prod(dim=1)[:, 0]
    with FORMS[form]():
        # Traced, because that is faster.
        pair = sequoia.pack(target), sequoia.pack(draft)
        steps = []
        tree = Tree([-1, 0, 0, 1, 1, 2])
        decoder = Decoder(*pair, tree, method, seeded(0), steps.append)
        found = []
        for number in range(400):
            sampling = sampling_of(method, [], number)
            following = decoder.tokens_after(prompt, sampling, Planner(tree), max_length=8)
            tokens = [*itertools.islice(following, 4)]
            found.append(torch.tensor(tokens) @ torch.tensor([27, 9, 3, 1]))
    assert sum(len(step.path) for step in steps) > 200
    assert chi_square_tail(torch.stack(found).bincount(minlength=81), 400 * chances) > 1e-9

@quick
@pytest.mark.parametrize("form", FORMS)
def test_with_gumbel_a_seed_names_the_text_and_the_next_one_whatever_the_tree(llama, form):
    """Nor does the draft matter, or its vocabulary. The second text's seed comes from the same generator, so
    no tree may take random numbers from it."""
    other = make_pair("llama", difference=0.6, vocab_size=60)[1]
    sampled = dict(do_sample=True, temperature=0.8, top_p=0.95, max_new_tokens=20)
    texts = []
    with FORMS[form]():
        for tree, draft in ((NO_TREE, None), (chain(3), llama[1]), (BUSHY_9, other), ("auto", llama[1])):
            decoder = Decoder(llama[0], draft, tree, "gumbel", seeded(1))
            texts.append([decoder.generate(prompt_of(n), **sampled).tolist() for n in (8, 8, 30)])
    assert all(found == texts[0] for found in texts)
    assert texts[0][0] != texts[0][1]

@pytest.mark.parametrize("method", METHODS)
def test_a_generator_and_a_tree_name_the_text_and_noise_is_fresh_in_every_step(llama, method):
    """Noise drawn once for a prompt would repeat, so an almost flat target would repeat its tokens."""
    texts = []
    for other in (1, 2):
        torch.manual_seed(other)
        decoder = Decoder(*llama, (9, 4), method, seeded(5))
        texts.append(decoder.generate(prompt_of(8), do_sample=True, temperature=1e6, max_new_tokens=40))
    assert texts[0].equal(texts[1])
    assert len(texts[0][0, 8:].unique()) > 20
    # Noise comes after the temperature, so near 0 it changes nothing.
    cold = decoder.generate(prompt_of(8), do_sample=True, temperature=1e-6, max_new_tokens=10)
    assert cold.equal(plain_text(llama[0], prompt_of(8), max_new_tokens=10))

# --- 9  Decoding: what generate may be asked for ------------------------------------------------------------
def sevens_end(row, ids):
    """A grammar in which 7 ends a text, and behind it, or after a missing child, there is nothing to say."""
    assert 7 not in ids[12:]
    assert NONE not in ids
    return [7, 11, 13] if len(ids) > 17 else [10 + len(ids), 20 + len(ids)]

def rolled(ids, scores):
    """Would be an error for a text that is longer than asked for."""
    return scores.roll([*range(24)][ids.shape[1] - 12]).double()

def mask_of(*zeros):
    return torch.ones(1, 12).long().index_fill(1, torch.tensor(zeros).long(), 0)

# Processors that read the text see each node's own. The last ones say nothing, so they are passed over.
ALLOWED = {
    "bad words": dict(bad_words_ids=[[5], [7, 9], [60, 2]]), "no repetition": dict(no_repeat_ngram_size=2),
    "repetition penalty": dict(repetition_penalty=1.5), "bias": dict(sequence_bias=[[[11, 12], 9.0]]),
    "allowed": dict(prefix_allowed_tokens_fn=lambda row, ids: list(range(2 + len(ids) % 5, 64, 2))),
    "grammar": dict(prefix_allowed_tokens_fn=sevens_end, eos_token_id=7, pad_token_id=0),
    "no early end": dict(min_new_tokens=15, eos_token_id=list(range(2, 40)), pad_token_id=0),
    "watermark": dict(watermarking_config=transformers.WatermarkingConfig(bias=4.0)),
    "own": dict(logits_processor=[rolled]), "positions": dict(position_ids=torch.arange(12)[None]),
    "token types": dict(token_type_ids=mask_of(*range(12)), attention_mask=mask_of()),
    "tuning": dict(use_cache=False, prompt_lookup_num_tokens=3, num_beams=1, pixel_values=None)}

@pytest.mark.parametrize("name", some_quick(ALLOWED, "grammar", "no early end", "token types", "positions"))
def test_what_generate_may_be_given_gives_its_text_with_every_tree(name):
    usual = {} if name in ("token types", "tuning") else ALLOWED[name]
    target, draft = make_pair("gpt2")
    expected = plain_text(target, prompt_of(12), max_new_tokens=24, **usual)
    for tree in (NO_TREE, BUSHY_9, "auto"):
        steps = []
        decoder = Decoder(target, draft, tree, on_step=steps.append)
        out = decoder.generate(prompt_of(12), do_sample=False, max_new_tokens=24, **ALLOWED[name])
        assert out.equal(expected)
        # Proposals are shaped, too, so trees still help.
        assert tree == NO_TREE or any(step.path for step in steps)

@pytest.mark.parametrize("method", METHODS)
def test_where_a_grammar_leaves_fewer_tokens_than_children_the_rest_is_missing(llama, method):
    """And nobody is asked about a missing child, or about what is below it."""
    few = [list(range(10, 64)), [5, 6]]

    def allowed(row, ids):
        assert len(ids) == 10 or int(ids[-1]) in few[1 - len(ids) % 2]
        return few[len(ids) % 2]

    steps = []
    decoder = Decoder(*llama, Tree([-1, 0, 0, 0, 1, 2, 3, 3]), method, seeded(0), steps.append)
    out = decoder.generate(prompt_of(10), do_sample=True, max_new_tokens=30, prefix_allowed_tokens_fn=allowed)
    assert all(int(token) in few[i % 2] for i, token in enumerate(out[0, 10:]))
    # Only those that draw with replacement may say one token twice instead.
    replaces = METHODS[method].propose is sequoia.propose_independent
    assert replaces or sum(step.node_tokens[3:4] == [NONE] for step in steps) > 2

NEVER = [lambda ids, scores: scores.fill_(-torch.inf)]
# By the error's words: the arguments, among them the prompt and what a Decoder is made of.
REFUSED = {
    "^not supported: several texts": dict(prompt=prompt_of(12).expand(2, 12)),
    "several texts": dict(do_sample=True, num_return_sequences=3), "beam_search": dict(num_beams=2),
    "output_scores": dict(output_scores=True), "output_logits": dict(output_logits=True),
    "output_attentions": dict(output_attentions=True), "guidance_scale": dict(guidance_scale=0.5),
    "output_hidden_states": dict(output_hidden_states=True), "banana": dict(banana=1),
    "^not supported: attention_mask": dict(attention_mask=mask_of(0, 1)), "inputs_embeds": dict(
        inputs_embeds=torch.ones(1, 12, 32)),
    "attention_mask like these": dict(attention_mask=mask_of(5)), "got str": dict(draft="x"),
    "token_type_ids like these": dict(token_type_ids=mask_of(3)), "'9x'$": dict(tree="9x"),
    "^not supported: position_ids": dict(position_ids=torch.arange(3, 15)[None]),
    "position_ids like these": dict(position_ids=torch.arange(12).flip(0)[None]),
    "a cache of your own": dict(past_key_values=transformers.DynamicCache()),
    "up to 1024 nodes": dict(tree="1025x7"), "100 is too large": dict(tree=(100, 2)),
    "got .0, 2.": dict(tree=(0, 2)), "2 is too large": dict(tree=(2, 0)), "got None": dict(tree=None),
    "fills the target's context of 256 tokens": dict(max_new_tokens=246),
    "sequoia, specinfer, .* got 'magic'": dict(method="magic"),
    "ruled out every token": dict(logits_processor=NEVER)}

@quick
@pytest.mark.parametrize("words", REFUSED)
def test_what_would_give_another_text_is_refused_in_words(words):
    target, draft = make_pair("gpt2")
    given = dict(do_sample=False, max_new_tokens=8) | REFUSED[words]
    prompt = given.pop("prompt", prompt_of(12))
    made = dict(draft=draft, tree=(9, 4), method="topk")
    made |= {name: given.pop(name) for name in {*made} & {*given}}
    with pytest.raises(ValueError, match=words):
        Decoder(target, **made).generate(prompt, **given)

def small_model(kind, **changes):
    config = getattr(transformers, f"{kind}Config")(**SMALL | changes)
    return transformers.AutoModelForCausalLM.from_config(config).eval()

NEO = dict(num_layers=2, num_heads=4, window_size=12, attention_types=[[["global", "local"], 1]])
T5 = dict(vocab_size=64, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
def piped(model):
    return transformers.pipeline("text-generation", model, tokenizer=TOKENIZER)

# By the words that refuse it: how a fit model becomes one that cannot be a target.
UNFIT = {
    "it has an encoder": lambda fit: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)),
    "recurrent": lambda fit: small_model("Mamba"),
    "Bloom.* cannot verify a tree": lambda fit: small_model("Bloom"),
    "GPTNeo.* its mask counts slots": lambda fit: small_model("GPTNeo", **NEO),
    "Falcon.* its mask counts slots": lambda fit: small_model("Falcon", alibi=True),
    "'sdpa'": lambda fit: fit.set_attn_implementation("flex_attention") or fit,
    r"in training mode: call its eval\(\)": lambda fit: fit.train(),
    "language model of transformers, got LlamaModel": lambda fit: fit.model,
    r"Sequential: give .* merge_and_unload\(\)": torch.nn.Sequential,
    "got OptimizedModule. .* a compiled model's _orig_mod": torch.compile,
    "got TextGenerationPipeline. .* a pipeline's model": piped,
    "a loaded language model .* got str": lambda fit: "a/name"}

@quick
@pytest.mark.parametrize("words", UNFIT)
def test_an_unfit_target_or_a_wrapper_is_refused_with_what_to_do(llama, words):
    unfit = UNFIT[words](make_pair("llama")[0])
    with pytest.raises(ValueError, match=words):
        sequoia.generate(unfit, prompt_of(9), assistant_model=llama[1], max_new_tokens=4)

class HubModel(transformers.LlamaForCausalLM):
    """Its forward cannot leave out logits, as code from a hub often cannot."""
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, **rest):
        assert "logits_to_keep" not in rest
        return super().forward(input_ids, attention_mask, position_ids, past_key_values, **rest)

@quick
def test_a_forward_without_logits_to_keep_decodes():
    torch.manual_seed(0)
    target = HubModel(config_of("llama")).eval()
    for length in (1, 4, 12):
        assert_as_generate(Decoder(target, target, (9, 4)), prompt_of(length), max_new_tokens=10)

# --- 9  Decoding: NaN, the probe, the graph, the report -----------------------------------------------------
@pytest.mark.parametrize("fine_steps", [0, 3])
@pytest.mark.parametrize("method", some_quick(METHODS, "sequoia", "gumbel"))
def test_a_targets_nan_is_an_error_that_names_it_and_a_drafts_only_costs_speed(method, fine_steps):
    """Whether it comes at once or later. And either leaves nothing behind for the next text."""
    for broken, do_sample in ((0, False), (0, True), (1, False), (1, True)):
        pair = make_pair("llama")
        plain = plain_text(pair[0], prompt_of(10), max_new_tokens=16)
        weight = pair[broken].lm_head.weight.data
        whole = weight.clone()
        steps = []

        def spoil(step):
            steps.append(step)
            if len(steps) > fine_steps:
                weight.fill_(torch.nan)

        decoder = Decoder(*pair, Tree([-1, 0, 0, 1, 2]), method, seeded(0), spoil)
        if fine_steps == 0:
            weight.fill_(torch.nan)
        is_error = pytest.raises(ValueError, match="the target's logits are NaN")
        with is_error if broken == 0 else contextlib.nullcontext():
            out = decoder.generate(prompt_of(10), do_sample=do_sample, max_new_tokens=16)
            assert out.shape == (1, 26) and (do_sample or out.equal(plain))
        weight.copy_(whole)
        decoder.on_step = lambda step: None
        assert_as_generate(decoder, prompt_of(10), max_new_tokens=8)

@quick
@pytest.mark.parametrize("name", ["llama", "gemma3", "roberta", "deepseek-v3"])
@torch.inference_mode()
def test_the_probe_leaves_the_caches_bit_for_bit_as_it_found_them(name):
    target = CachedModel(make_pair(name)[0].bfloat16())
    for length in (1, 3, 6, 20, 252):
        text = text_of(length)
        logits = target.prefill(text, sequoia.PROBE_TOKENS)
        # The probe may need room, which is empty at first.
        target.reserve(length + len(logits))
        before = target.store.clone()
        sequoia.probe(target, text, logits)
        assert target.store.equal(before)

class CountsOn(transformers.GPT2LMHeadModel):
    """Takes only the first position and counts on from there, which is right for plain decoding."""
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **rest):
        counted = position_ids[:, :1] + torch.arange(input_ids.shape[1])
        return super().forward(input_ids, attention_mask=attention_mask, position_ids=counted, **rest)

class SeesSiblings(transformers.LlamaForCausalLM):
    """Shows every token all that stand before it in the cache, so a node also sees its elder siblings."""
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **rest):
        if torch.is_tensor(attention_mask) and attention_mask.ndim == 4:
            rows, columns = attention_mask.shape[2:]
            attention_mask = torch.full_like(attention_mask, -torch.inf).triu(columns - rows + 1)
        return super().forward(input_ids, attention_mask, position_ids, **rest)

@quick
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [CountsOn, SeesSiblings])
def test_the_probe_refuses_a_model_that_masks_or_counts_in_its_own_way(kind, dtype):
    fit = make_pair("gpt2" if kind is CountsOn else "llama")[0]
    target = kind(fit.config).eval()
    target.load_state_dict(fit.state_dict())
    for length in (9, 40):
        steps = []
        decoder = Decoder(target.to(dtype), tree="none", on_step=steps.append)
        with pytest.raises(ValueError, match=f"{kind.__name__} cannot verify a tree: distributions"):
            decoder.generate(prompt_of(length), do_sample=False, max_new_tokens=4)
        # The caller already has the first token, which is right, but no other one.
        assert len(steps) == 1

def test_the_probe_passes_a_trained_model_in_bfloat16():
    target = transformers.AutoModelForCausalLM.from_pretrained(ROOT / "tiny" / "target", dtype=torch.bfloat16)
    for seed in range(20):
        decoder = Decoder(target, tree="none")
        assert_as_generate(decoder, prompt_of(2 + seed, 4096, seed), max_new_tokens=2)

@quick
def test_a_capture_that_fails_is_one_warning_and_the_text_goes_on(llama):
    error = RuntimeError("operation not permitted when stream is capturing")
    with mock.patch.object(torch.cuda, "CUDAGraph", side_effect=error):
        decoder = Decoder(*llama, (9, 4))
        decoder.cuda_graph = True
        with pytest.warns(UserWarning, match="without a CUDA graph: operation .* capturing") as caught:
            assert_as_generate(decoder, prompt_of(12), max_new_tokens=14)
    assert len(caught) == 1

@needs_cuda
@pytest.mark.parametrize("generator", [None, seeded(0, "cuda" if torch.cuda.is_available() else "cpu")])
def test_after_a_capture_that_cuda_broke_off_numbers_are_drawn_and_graphs_captured(generator):
    target, draft = (model.cuda() for model in make_pair("llama"))
    norm = target.model.norm
    waits = mock.Mock(side_effect=lambda x: type(norm).forward(norm, x) if x.sum().item() else None)
    for forward in (waits, partial(type(norm).forward, norm)):
        norm.forward = forward
        decoder = Decoder(target, draft, (9, 4), generator=generator)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert_as_generate(decoder, prompt_of(12).cuda(), max_new_tokens=14)
            decoder.generate(prompt_of(12).cuda(), do_sample=True, max_new_tokens=14)
        said = [str(one.message) for one in caught if "without a CUDA graph" in str(one.message)]
        assert len(said) == 2 * (forward is waits)
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        assert 0 <= torch.rand(1, generator=generator, device="cuda") < 1

@quick
def test_a_tree_with_a_graph_is_not_cut_but_no_node_stands_behind_a_contexts_end():
    """Another tree's step, without a graph, would take longer than one that goes beyond the text's end."""
    target, draft = make_pair("gpt2")[0], make_pair("llama")[0]
    for length, draft, last in ((20, target, chain(6)), (246, target, NO_TREE), (246, draft, NO_TREE)):
        steps = []
        with static_steps():
            decoder = Decoder(target, draft, chain(6), on_step=steps.append)
            assert_as_generate(decoder, prompt_of(length), max_new_tokens=11)
        assert steps[1].tree == chain(6)
        assert steps[-1].tree == last

def test_a_kept_decoder_keeps_its_graph_over_texts(llama):
    """Because a capture takes longer than many steps."""
    with static_steps() as captured:
        decoder = Decoder(*llama, BUSHY_9)
        for length in (12, 40, 9):
            assert_as_generate(decoder, prompt_of(length), max_new_tokens=40)
    assert len({*captured}) == 1

@quick
def test_a_report_adds_up_and_steps_are_timed_without_what_feeds_the_prompt(llama, monkeypatch):
    """On a clock that passes move: by 1 for the target's, a tenth for the draft's, 100 for a prompt's."""
    now = [0.0]

    def moving(name, seconds):
        call = getattr(sequoia.CachedModel, name)

        def moved(cached, *given):
            now[0] += seconds[cached.model]
            return call(cached, *given)

        monkeypatch.setattr(sequoia.CachedModel, name, moved)

    moving("forward", {llama[0]: 1.0, llama[1]: 0.1})
    moving("prefill", dict.fromkeys(llama, 100))
    monkeypatch.setattr(sequoia.time, "perf_counter", lambda: now[0])
    steps = []
    decoder = Decoder(*llama, on_step=steps.append)
    decoder.generate(prompt_of(10), do_sample=False, max_new_tokens=90)
    first, *others = steps
    assert first.seconds is None and first.tree == NO_TREE and len(first.tokens) == 1
    assert all(step.seconds == pytest.approx(0.9 + 0.1 * step.tree.depth) for step in others)
    report = decoder.report
    assert report[:2] == (90, len(steps)) and report.tree == [*decoder.planners.values()][0].tree
    fed = sum(step.tree.depth > 1 >= last.tree.depth for last, step in zip(steps, others))
    # And a pass of the probe's.
    assert report.seconds == pytest.approx(100 * (1 + fed) + sum(step.seconds for step in others) + 1)
    assert str(report).startswith(f"tokens 90, steps {len(steps)}, seconds {report.seconds:.1f}: "
                                  f"{90 / len(steps):.2f} tokens per step, {90 / report.seconds:.1f} per")

def test_caches_are_freed_with_their_decoder(llama):
    """At once, because the next call may need the memory."""
    decoder = Decoder(*llama, (9, 4))
    decoder.generate(prompt_of(10), max_new_tokens=20)
    caches = [weakref.ref(decoder.target), weakref.ref(decoder.draft)]
    gc.disable()
    del decoder
    gc.enable()
    assert [cache() for cache in caches] == [None, None]

@quick
def test_a_folder_with_this_file_makes_generate_decode_with_trees(bundled, tmp_path, monkeypatch):
    target, draft, tokenizer = bundled
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    (tmp_path / "custom_generate").mkdir()
    shutil.copy(sequoia.__file__, tmp_path / "custom_generate" / "generate.py")
    steps = []
    ours = dict(custom_generate=str(tmp_path), trust_remote_code=True, assistant_model=draft, tree=chain(3),
                on_step=steps.append)
    for more in (dict(), dict(stop_strings=["("], tokenizer=tokenizer)):
        given = dict(tokenizer("import os\n", return_tensors="pt"), max_new_tokens=20, **more)
        streamed = []
        streamer = SimpleNamespace(put=lambda ids: streamed.extend(ids.flatten().tolist()), end=list)
        out = target.generate(**given, **ours, streamer=streamer)
        assert out.equal(target.generate(**given))
        assert streamed == out[0].tolist()
    assert max(step.tree.size for step in steps) == 4

# --- 10  Passes ---------------------------------------------------------------------------------------------
def both_texts(target, draft):
    """A greedy and a sampled text."""
    texts = []
    for do_sample in (False, True):
        # An offloaded model has no graph, and a tree with one is not cut, so it draws more random numbers.
        decoder = Decoder(target, draft, (9, 4), generator=seeded(0, target.device), cuda_graph=False)
        prompt = prompt_of(30).to(target.device)
        texts.append(decoder.generate(prompt, do_sample=do_sample, max_new_tokens=20).tolist())
    return texts

def is_traced(model):
    return hasattr(model, "_sequoia_pass")

needs_packing = pytest.mark.skipif(not sequoia.PACKS, reason="no bfloat16 here")

@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_and_traced_output_equals_plain_output(name):
    pair = make_pair(name)
    for weight_name, weight in [*pair[0].named_parameters(), *pair[1].named_parameters()]:
        if weight_name.endswith("bias"):
            weight.data.normal_(std=0.1)
    expected = both_texts(*pair)
    for model in pair:
        assert sequoia.pack(model) is model
    assert both_texts(*pair) == expected
    assert plain_text(pair[0], prompt_of(30), max_new_tokens=20).tolist() == expected[0]

@quick
@needs_packing
def test_packed_and_traced_gives_the_numbers_of_packed_and_packing_twice_packs_once():
    """In bfloat16, where every layer is packed, whatever its size."""
    pair = [sequoia.pack(model.bfloat16()) for model in make_pair("llama")]
    assert all(layer.weight.is_mkldnn for layer in pair[0].modules() if type(layer) is torch.nn.Linear)
    assert all(map(is_traced, pair))
    run = pair[0]._sequoia_pass
    assert sequoia.pack(pair[0]) is pair[0]
    assert pair[0]._sequoia_pass is run
    traced = both_texts(*pair)
    for model in pair:
        # Without its trace a packed model is run by Python.
        del model._sequoia_pass
    assert both_texts(*pair) == traced

@quick
@needs_packing
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shared", ["first layers", "head", "everything"])
@torch.inference_mode()
def test_models_that_share_layers_are_packed_once_and_both_decode(shared, dtype):
    """A draft of the target's first layers, as LayerSkip has it, or with its head, or the target itself."""
    target = make_pair("llama", num_hidden_layers=3)[0].to(dtype)
    draft = make_pair("llama", num_hidden_layers=2)[1].to(dtype)
    draft.lm_head = target.lm_head
    if shared == "first layers":
        draft.model.layers = target.model.layers[:2]
    if shared == "everything":
        draft = target
    expected = [model(prompt_of(30)).logits for model in (target, draft)]
    text = plain_text(target, prompt_of(30), max_new_tokens=20)
    decoder = Decoder(sequoia.pack(target), sequoia.pack(draft), (9, 4))
    out = decoder.generate(prompt_of(30), do_sample=False, max_new_tokens=20)
    # Packed bfloat16 rounds otherwise, so the text may differ.
    assert out.shape == (1, 50) and (out.equal(text) or dtype == torch.bfloat16)
    for model, logits in zip((target, draft), expected):
        torch.testing.assert_close(model(prompt_of(30)).logits, logits, atol=0.1, rtol=0.1)

@needs_packing
def test_a_layer_with_a_forward_of_its_own_is_not_packed():
    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    pair = [model.bfloat16() for model in make_pair("llama")]
    pair[0].model.layers[0].mlp.up_proj.__class__ = Doubled
    expected = pair[0](prompt_of(20)).logits
    sequoia.pack(pair[0])
    assert not pair[0].model.layers[0].mlp.up_proj.weight.is_mkldnn
    torch.testing.assert_close(pair[0](prompt_of(20)).logits, expected, atol=0.1, rtol=0.1)

@quick
def test_a_pass_that_depends_on_its_tokens_is_not_traced():
    """A loop over the experts that were hit makes a trace of one run wrong for the next: it is found out."""
    pair = make_pair("mixtral", experts_implementation="eager")
    expected = both_texts(*pair)
    sequoia.pack(pair[0])
    assert both_texts(*pair) == expected
    assert not is_traced(pair[0])
    assert is_traced(sequoia.pack(make_pair("llama")[0]))

@quick
@needs_packing
@torch.no_grad()
def test_a_packed_layer_keeps_its_bias():
    for bias in (True, False):
        layer = torch.nn.Linear(32, 48, bias).bfloat16()
        x = torch.randn(1, 5, 32, generator=seeded(0)).bfloat16()
        expected = layer(x)
        sequoia.pack_linear(layer)
        torch.testing.assert_close(layer(x), expected, atol=0.02, rtol=0.02)

def test_where_torch_cannot_pack_weights_a_model_is_only_traced(monkeypatch):
    monkeypatch.setattr(sequoia, "PACKS", False)
    model = sequoia.pack(make_pair("llama")[0].bfloat16())
    assert is_traced(model)
    assert not any(weight.is_mkldnn for weight in model.parameters())

@needs_packing
def test_a_trace_that_is_right_for_its_own_example_alone_is_given_up():
    """That example has three nodes; for more of them the numbers here are wrong."""
    def spoilt(trace):
        def forward(store, tokens, nodes, *rest):
            return trace(store, tokens, nodes, *rest) + (len(nodes) > 3)

        return SimpleNamespace(forward=forward)

    with mock.patch.object(torch.jit, "freeze", spoilt):
        assert not is_traced(sequoia.pack(make_pair("llama")[0].bfloat16()))
    assert is_traced(sequoia.pack(make_pair("llama")[0].bfloat16()))

@needs_packing
def test_packing_that_changes_numbers_is_an_error(monkeypatch):
    """By more than rounding, in one layer of fifteen."""
    pack_linear = sequoia.pack_linear

    def wrong(layer):
        layer.weight[0] *= 1 + 0.5 * (layer.out_features == 64)
        pack_linear(layer)

    monkeypatch.setattr(sequoia, "pack_linear", wrong)
    with pytest.raises(ValueError, match="numbers (for|of) LlamaForCausalLM.* load it again, without pack"):
        sequoia.pack(make_pair("llama")[0].bfloat16())

@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("name, layers", [("llama", 1), ("llama", 4), ("gpt2", 4), ("gemma3", 2)])
def test_offloaded_output_is_the_same_also_after_a_pass_that_ctrl_c_broke_off(name, layers, device):
    pair = make_pair(name, **{"n_layer" if name == "gpt2" else "num_hidden_layers": layers})
    target, draft = (copy.deepcopy(model).to(device) for model in pair)
    expected = both_texts(target, draft)
    both = [sequoia.offload(copy.deepcopy(model).train(), device) for model in pair]
    *_, last = next(m for m in both[0].modules() if isinstance(m, torch.nn.ModuleList))
    home = {name: weight.data_ptr() for name, weight in both[0].named_parameters()}
    assert not both[0].training
    assert both_texts(both[0], draft) == expected
    assert both_texts(*both) == expected
    for register in (last.register_forward_pre_hook, last.register_forward_hook):
        with register(mock.Mock(side_effect=KeyboardInterrupt)), pytest.raises(KeyboardInterrupt):
            both[0](prompt_of(30).to(device))
        assert both_texts(*both) == expected
    # At most the last layer's copy is left on the device.
    away = [name for name, weight in both[0].named_parameters() if weight.data_ptr() != home[name]]
    assert all(f".{layers - 1}." in name for name in away)

# --- 11  The command line -----------------------------------------------------------------------------------
def run_main(capfd, *arguments):
    capfd.readouterr()
    code = sequoia.main(list(arguments))
    out, err = capfd.readouterr()
    return code, out.removesuffix("\n"), err

@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Models of two layers with the bundled tokenizer: good ones, and others by what they have or lack."""
    root = tmp_path_factory.mktemp("models")
    tokenizer = copy.deepcopy(TOKENIZER)
    target, draft = make_pair("llama", vocab_size=len(tokenizer), bos_token_id=None)

    def save(name, model=target):
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
        return root / name

    save("other", draft)
    weights = (save("good") / "model.safetensors").read_bytes()
    config = json.loads((root / "good" / "config.json").read_text())
    for name, changes in {"more layers": dict(num_hidden_layers=4), "wider": dict(intermediate_size=64),
                          "unknown": dict(model_type="medusa")}.items():
        (save(name) / "config.json").write_text(json.dumps(config | changes))
    (save("cut short") / "model.safetensors").write_bytes(weights[:-1])
    (save("no weights") / "model.safetensors").unlink()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}" \
                              "{% if add_generation_prompt %}<assistant>{% endif %}"
    save("chat")
    tokenizer.add_tokens(["another"])
    save("other tokens")
    words = json.loads((root / "good" / "tokenizer.json").read_text())
    ids = words["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (save("renamed") / "tokenizer.json").write_text(json.dumps(words))
    return root

USUAL = ("--max-new-tokens", "16", "--prompt", "import ", "--dtype", "float32")

@quick
def test_what_is_printed_is_generates_text(bundled, capfd):
    target, _, tokenizer = bundled
    ids = tokenizer("import ", return_tensors="pt").input_ids
    expected = tokenizer.decode(plain_text(target, ids, max_new_tokens=16)[0])
    for more in ([], ["--tree=none"], ["--tree=8x4", "--offload"]):
        code, text, err = run_main(capfd, *USUAL, "--temperature", "0", *more)
        assert (code, text) == (0, expected)
        assert re.match(r"\ntokens 16, steps \d+, seconds ", err) and "\033" not in err
    assert "tree 8x4" in err

def test_options_shape_the_text_and_a_seed_names_it_with_gumbel_or_a_fixed_tree(folders, capfd):
    given = (*USUAL, f"--target={folders / 'good'}", f"--draft={folders / 'other'}", "--tree=8x4")
    texts = [run_main(capfd, *given, "--seed", seed)[1] for seed in "001"]
    assert texts[0] == texts[1] != texts[2]
    texts = [run_main(capfd, *given, "--method=gumbel", f"--tree={tree}")[1] for tree in ("none", "8x4")]
    assert texts[0] == texts[1]
    greedy = run_main(capfd, *given, "--temperature=0")[1]
    for option in ("--top-k=1", "--top-p=0.0001", "--temperature=0.0001"):
        assert run_main(capfd, *given, option)[1] == greedy

def test_tokens_are_cut_as_the_options_say_and_by_default_not_at_all(capfd):
    """A model's own default of 50 likeliest tokens must not come in."""
    made = []
    with mock.patch.object(sequoia, "Sampling", lambda *given: made.append(given) or Sampling(*given)):
        for cuts in (["--top-p", "0.9", "--top-k", "7"], []):
            assert sequoia.main(["--explain", "--max-new-tokens", "1", *cuts]) == 0
    (_, cutting, _), (_, plain, _) = made
    assert [vars(one).get("top_p") or vars(one).get("top_k") for one in cutting] == [None, 7, 0.9]
    assert [type(one) for one in plain] == [Temperature]

@quick
def test_explain_draws_each_tree_and_its_greedy_text_is_the_greedy_text(capfd):
    given = (*USUAL, "--max-new-tokens=5", "--temperature=0", "--tree=8x4")
    greedy = run_main(capfd, *given)[1]
    code, out, _ = run_main(capfd, *given, "--explain")
    *steps, text = re.split(r"^adds .*\n\n", out, flags=re.MULTILINE)
    assert code == 0 and text == greedy and 2 <= len(steps) <= 5
    for step in steps:
        # The tree's eight nodes, indented by level; then what happened to children; then the last token.
        *tried, last = step.splitlines()[8:]
        drawn = step.splitlines()[:8]
        indents = [len(line) - len(line.lstrip()) for line in drawn]
        assert indents[:2] == [0, 4] and max(indents) <= 12 and all(line[-1] in "'\"" for line in drawn)
        assert all(re.search(r": R .* / D .* = .*: (accepted|rejected)$", line) for line in tried)
        assert last.endswith("is drawn from what is left, with R 1.00")

@quick
def test_explain_proposes_a_greedy_drafts_first_choices(bundled, capfd):
    """Not just its first and then any others, as a draft at nearly 0 degrees would."""
    target, draft, tokenizer = bundled
    ids = tokenizer("import ", return_tensors="pt").input_ids
    best = [repr(tokenizer.decode(token)) for token in draft(ids).logits[0, -1].topk(3).indices]
    out = run_main(capfd, *USUAL, "--max-new-tokens=1", "--temperature=0", "--tree=4x2", "--explain")[1]
    assert [line.strip() for line in out.splitlines()[1:4]] == best

def test_chat_puts_the_prompt_through_the_template_and_without_one_is_an_error(folders, capfd):
    pair = [f"--{kind}={folders / 'chat'}" for kind in ("target", "draft")]
    code, text, _ = run_main(capfd, *USUAL, *pair, "--temperature=0", "--chat")
    ids = TOKENIZER("<user>import <assistant>", return_tensors="pt").input_ids
    target = transformers.AutoModelForCausalLM.from_pretrained(folders / "chat")
    assert (code, text) == (0, TOKENIZER.decode(plain_text(target, ids, max_new_tokens=16)[0]))
    pair = [f"--{kind}={folders / 'good'}" for kind in ("target", "draft")]
    code, text, err = run_main(capfd, *USUAL, *pair, "--chat")
    assert code == 2
    assert text == ""
    assert re.match(r"sequoia.py: .*chat.template.*\n$", err)

# The arguments after those for a good pair, and the words of the one line that they cause.
BAD_REQUESTS = {
    "--top-p=1.5": "--top-p", "--top-p=nan": "--top-p", "--top-p=0": "--top-p", "--top-k=-3": "--top-k",
    "--temperature=inf": "--temperature", "--temperature=nan": "--temperature", "--seed=-1": "--seed",
    "--temperature=-1": "--temp", "--seed=12345678901234567890123": "--seed", "--method=magic": "magic",
    "--max-new-tokens=0": "--max-new-tokens", "--max-new-tokens=1000": "fills the target's context of 512",
    "--tree=banana": "tree must be .*banana", "--tree=": "tree must be", "--tree=100x2": "too large",
    "--device=banana": "banana", "--dtype=int7": "int7", "--target=/no/such/folder": "/no/such/folder",
    "--prompt=": "", "--draft=FOLDER/unknown": "medusa",
    "--target=FOLDER/more layers": "18 weights missing or of other shapes: .*layers.[23]",
    "--draft=FOLDER/wider": "6 weights missing or of other shapes", "--target=FOLDER/cut short": "",
    "--draft=FOLDER/no weights": "safetensors", "--draft=FOLDER/other tokens": "different tokens",
    "--target=FOLDER/other tokens": "different tokens", "--draft=FOLDER/renamed": "different tokens"}

@pytest.mark.parametrize("words", some_quick(BAD_REQUESTS, *[*BAD_REQUESTS][:10], "--draft=FOLDER/wider"))
def test_a_bad_request_is_one_line_and_exit_code_2(folders, capfd, words):
    good = [f"--target={folders / 'good'}", f"--draft={folders / 'good'}", "--tree=3x2", "--max-new-tokens=4"]
    code, out, err = run_main(capfd, *good, words.replace("FOLDER", str(folders)))
    assert code == 2 and len(err.splitlines()) == 1
    assert re.match(f"sequoia.py: \\w+: .*{BAD_REQUESTS[words]}", err)

def test_what_the_parser_refuses_ends_with_2_and_help_says_what_a_seed_fixes(capfd):
    for words, code in (("--seed=x", 2), ("--top-p=x", 2), ("--nonsense=1", 2), ("--help", 0)):
        with pytest.raises(SystemExit, match=str(code)):
            sequoia.main([words])
    told = " ".join(capfd.readouterr().out.split())
    with mock.patch.object(sys, "argv", ["sequoia.py", "--top-p=2"]), pytest.raises(SystemExit, match="2"):
        runpy.run_path(sequoia.__file__, run_name="__main__")
    assert "names the text with --method gumbel or a fixed --tree" in told
    assert "--chat" in told

def test_ctrl_c_exits_130(folders, capfd, monkeypatch):
    monkeypatch.setattr(Decoder, "generate", mock.Mock(side_effect=KeyboardInterrupt))
    good = [f"--target={folders / 'good'}", f"--draft={folders / 'good'}"]
    assert run_main(capfd, *good) == (130, "", "")

@pytest.mark.parametrize("is_terminal", [True, False])
def test_downloads_and_loading_show_their_progress_on_a_terminal_alone(is_terminal, capfd, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    sequoia.main(["--top-p=2"])
    assert transformers.utils.logging.is_progress_bar_enabled() == is_terminal

@quick
def test_a_copy_is_silent_reads_no_environment_and_says_what_it_lacks(capfd, monkeypatch, tmp_path):
    path = shutil.copy(sequoia.__file__, tmp_path / "copied.py")
    spec = importlib.util.spec_from_file_location("copied", path)
    copied = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "copied", copied)
    # torch itself asks the environment how to look for a GPU.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with mock.patch.object(os, "environ", None), warnings.catch_warnings(action="error"):
        spec.loader.exec_module(copied)
    assert capfd.readouterr() == ("", "")
    assert copied.main([]) == 2
    assert "no bundled pair beside this copy: give --target and --draft" in capfd.readouterr().err

def test_the_names_that_are_promised_are_there_and_the_licence_is_named():
    promised = """Decoder METHODS NONE NO_TREE Planner Step Tree chain expected_tokens generate k_ary offload
        optimal_tree pack plan sample_and_verify sequences step_plainly verify_one_node"""
    assert set(sequoia.__all__) == set(promised.split())
    assert all(hasattr(sequoia, name) for name in sequoia.__all__)
    assert "MIT" in sequoia.__doc__
    assert " ".join(METHODS) == "sequoia specinfer spectr naive topk gumbel"

def test_the_docstrings_examples_print_what_is_shown():
    results = doctest.testmod(sequoia)
    assert results.attempted > 0
    assert results.failed == 0

README = ROOT / "README.md"

def without_times(text):
    return re.sub(r"\d+\.\d+(?= (and \d+\.\d+ )?seconds)", "...", text)

@pytest.mark.skipif(not README.exists(), reason="a copy without its README")
def test_the_readmes_examples_run_in_order_and_print_what_is_shown(monkeypatch, capsys, tmp_path):
    """Among files as a clone has them. A plain block right behind an example is what it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    for name in ("tiny", "sequoia.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    blocks = re.findall(r"```python\n(.*?)```(?:\n\n```\n(.*?)```)?", README.read_text("utf-8"), re.DOTALL)
    assert blocks
    namespace = {}
    for block, shown in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
        assert without_times(capsys.readouterr().out) == without_times(shown) or not shown
