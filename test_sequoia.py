"""The guarantees of sequoia.py, as tests: slow, obvious oracles beside the fast code.
`python -m pytest -k quick` runs one test or more of every guarantee.
Exact tests go through every case. Statistical tests are seeded and fail if their counts have a chance below
1e-9, so a false alarm from any of them has a chance below 1e-6."""
import ast, collections, contextlib, doctest, functools, heapq, itertools, json, math, os, re, runpy, shutil
import socket, subprocess, sys, warnings, weakref
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
from torch.utils._pytree import tree_leaves

import bench, sequoia
from sequoia import (METHODS, NO_TREE, NONE, Decoder, Planner, Step, Tree, chain, expected_tokens, k_ary,
                     optimal_tree, sample_and_verify, sequences, step_plainly, verify_one_node)
from sequoia import RULED_OUT, AcceptanceRates, CachedModel, Sampling, TreeStep, never_ruled_out

settings.register_profile("sequoia", deadline=None, derandomize=True, max_examples=40, database=None)
settings.load_profile("sequoia")
torch.set_num_threads(1)            # on busy cores threads would wait for each other
CHANCE = 1e-9
BY_RATIOS = [name for name, method in METHODS.items() if not method.choose]
Temperature = transformers.TemperatureLogitsWarper
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
LATE = Tree([-1, 0, 0, 1, 2, 2, 2])      # a level's parents differ in their numbers of children
EARLY = Tree([-1, 0, 0, 1, 1, 1, 2])
BUSHY = optimal_tree([0.5, 0.2, 0.1], 14, 5)
ABREAST = sequences(3, 4)               # a node's number is far from its level, and leaves are far behind

@quick
def test_exercise_3_siblings_never_see_each_other_but_every_node_sees_its_ancestors_and_itself():
    for tree in SMALL_TREES:
        for node, parent in enumerate(tree):
            path = [*tree.paths[parent], node] if node else [0]
            assert tree.paths[node] == path
            assert tree.mask[node].nonzero()[:, 0].tolist() == path

@quick
def test_a_tree_knows_its_shape():
    tree = Tree([-1, 0, 0, 0, 1, 1, 4])
    assert tree.children == [[1, 2, 3], [4, 5], [], [], [6], [], []]
    assert tree.picture("abcdefg").split() == ["a", "b", "e", "g", "f", "c", "d"]
    assert sequences(2, 3) == Tree([-1, 0, 0, 1, 2, 3, 4])
    assert k_ary(2, 3) == Tree([-1, 0, 0, 1, 1, 2, 2])
    assert (k_ary(1, 4), k_ary(3, 1)) == (chain(3), NO_TREE)

def test_what_makes_no_tree_is_an_error_that_says_why():
    for parents, reason in (([], "starts with its root"), ([0], "starts with its root"), ([-1, -1], "node 1"),
                            ([-1, 1], "node 1"), ([-1, 0, 1, 0], "level order: node 3 has the parent 0")):
        with pytest.raises(ValueError, match=reason):
            Tree(parents)

# --- 2  Sampling (section 3.2, Algorithm 2 line 5) ----------------------------------------------------------
def distribution(weights):
    weights = torch.as_tensor(weights, dtype=torch.float64)
    return weights / weights.sum(dim=-1, keepdim=True)

def scores_of(Q):
    return never_ruled_out(Q.log())

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
        """A choice between 0, 1, ...: in this run the first possible one, in later runs the others."""
        if len(self.chosen) == len(self.script):
            first, *others = [i for i, chance in enumerate(chances) if chance > 1e-12]
            self.script += (first,)
            self.scripts += [(*self.chosen, other) for other in others]
        choice = self.script[len(self.chosen)]
        self.chosen += (choice,)
        self.chance *= float(chances[choice])
        return choice

    def draw(self, weights, u):
        rows = [[self.choose(distribution(row)) for _ in range(self.shape[1])] for row in weights]
        return torch.tensor(rows)

    def draw_different(self, scores, k):
        """What scores plus noise would draw, (rows, k)."""
        tokens = torch.full((len(scores), k), NONE)
        for i, row in enumerate(scores.clone()):
            for rank in range(k):
                if row.max() > RULED_OUT:
                    tokens[i, rank] = self.choose(row.double().softmax(dim=0))
                row[tokens[i, rank]] = RULED_OUT
        return tokens

    # Now the random numbers: any part of them is like the whole, and u < ratio has the chance min(ratio, 1).
    def uniform(self, rows, n, **_):
        self.shape = rows, n
        return self

    def __getitem__(self, index):
        return self

    def __lt__(self, ratio):
        chances = ratio.nan_to_num(nan=0.0).clamp(0, 1)
        answers = [self.choose([1 - chance, chance]) for chance in chances.flatten().tolist()]
        return torch.tensor(answers).view(ratio.shape).bool()

    def __radd__(self, scores):
        return torch.atleast_2d(scores)

    def __format__(self, spec):
        return "u"

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

@quick
@pytest.mark.parametrize("name", ["sequoia", "specinfer"])
def test_the_largest_scores_plus_noise_are_drawn_without_replacement_and_specinfers_with_it(name):
    propose = METHODS[name].propose
    powers = 4 ** torch.arange(4)
    for Q in distribution([[10, 6, 3, 1], [7, 3, 0, 0], [0, 0, 1, 0], [1, 1, 1, 1]]):
        rand = partial(sequoia.uniform, generator=seeded(0))
        tokens = propose(scores_of(Q).expand(50_000, 4), 4, rand)
        run = EveryRun()
        expected = torch.zeros(4**4, dtype=torch.float64)
        for chance, row in run.results(partial(propose, scores_of(Q)[None], 4, run.uniform)):
            expected[row @ powers] += 50_000 * chance
        assert chi_square_tail((tokens @ powers).bincount(minlength=4**4), expected) > CHANCE

@quick
def test_the_first_of_equals_is_the_likeliest_and_where_too_few_are_possible_the_row_ends_with_none():
    for size in (4, 8, 16, 50_000):
        scores = torch.zeros(1, size)
        scores[:, 0] = RULED_OUT
        assert sequoia.most_likely(scores, 1).item() == 1
    scores = torch.tensor([[1.0, 4, 2, 3], [RULED_OUT, 0, RULED_OUT, 1], [math.nan] * 4])
    assert sequoia.most_likely(scores, 1).tolist() == [[1], [3], [NONE]]
    assert sequoia.most_likely(scores, 3).tolist() == [[1, 3, 2], [3, 1, NONE], 3 * [NONE]]

@quick
def test_draws_follow_the_weights_even_tiny_ones_and_never_fall_on_a_token_without_any():
    weights = torch.tensor([[0.0, 3, 0, 5, 2, 0], [0] * 6, [math.nan] * 6])
    tokens = sequoia.draw(weights, sequoia.uniform(3, 50_000, generator=seeded(0)))
    assert chi_square_tail(tokens[0].bincount(minlength=6), 5000 * weights[0]) > CHANCE
    assert (tokens[1:] == NONE).all()
    u = torch.tensor([[0.0, 1 - 2.0**-38, 1 - 2.0**-53]], dtype=torch.float64)
    assert sequoia.draw(weights[:1], u).tolist() == [[1, 4, 4]]
    assert sequoia.draw(torch.tensor([[1.0, 2.0**-40]]), u).tolist() == [[0, 0, 1]]

def test_random_numbers_have_53_bits_and_noise_keeps_them():
    assert (sequoia.uniform(1, 1000, generator=seeded(0)) * 2**24 % 1).std() > 0.2
    largest = torch.tensor(1 - 2.0**-53, dtype=torch.float64)
    assert sequoia.gumbel_noise(largest).item() == pytest.approx(53 * math.log(2))

# --- 3  One node and one step, plainly, 5  Many nodes at once, and 10  Other methods ------------------------
@st.composite
def targets_and_drafts(draw):
    """P, Q, (V,), and a number of children."""
    vocabulary = draw(st.integers(2, 4))
    weight = st.sampled_from([0, 1e-6, 1, 1 + 1e-10, 3, 7])
    rows = st.lists(weight, min_size=vocabulary, max_size=vocabulary).filter(any).map(distribution)
    return draw(rows), draw(rows), draw(st.integers(1, vocabulary))

HALVES, ONE = distribution([1, 1]), distribution([1, 0])

@quick
@pytest.mark.parametrize("name", [pytest.param("plainly", id="exercise_1"), *BY_RATIOS])
@given(targets_and_drafts())
@example((distribution([3, 7, 0]), distribution([0, 0, 1]), 2))
@example((distribution([3, 7, 1, 1]), distribution([0, 7, 0, 1]), 4))
@example((distribution([3, 7, 1]), distribution([3, 7, 1]), 1))
@example((ONE, HALVES, 2))
@example((distribution([0, 1, 1]), distribution([1, 1e-10, 0]), 2))
def test_one_nodes_token_has_exactly_the_targets_distribution(name, case):
    """Accepted tokens and the residual add up to it, over all proposals and all outcomes of all tries. One
    child is accepted as often as optimal transport allows. And Sequoia covers: it accepts one of k children
    if they are the whole vocabulary, or if the draft knows only k tokens, and these hold the target's."""
    P, Q, k = case
    log_Q = scores_of(Q)[None]
    run = EveryRun()

    def program():
        if name == "plainly":
            tokens = run.draw_different(log_Q, k)
            rank, R = verify_one_node(P, Q, tokens[0], run)
        else:
            tokens = METHODS[name].propose(log_Q, k, run.uniform)
            rank, R = METHODS[name].verify(P[None], log_Q, tokens, run)
        is_accepted = rank != NONE
        last = distribution(torch.eye(len(P))[tokens[0, rank]] if is_accepted else R)
        return torch.cat([last.view(-1), torch.tensor([float(is_accepted)])])

    found = torch.zeros(len(P) + 1, dtype=torch.float64)
    for chance, last in run.results(program):
        found += chance * last
    torch.testing.assert_close(found[:-1], P, rtol=0, atol=1e-9)
    if k == 1:
        assert found[-1] == pytest.approx(torch.minimum(P, Q).sum().item(), abs=1e-6)
    if name in ("plainly", "sequoia") and (k == len(P) or (Q > 0).sum() <= k and not (P[Q == 0]).any()):
        assert found[-1] == pytest.approx(1)

@quick
@pytest.mark.parametrize("P, Q, k, chances", [
    (ONE, HALVES, 2, dict(sequoia=1, topk=1, specinfer=0.75, spectr=0.75)),
    (distribution([9, 1]), HALVES, 2, dict(sequoia=1, specinfer=0.8, spectr=0.815037)),
    (distribution([6, 4]), distribution([6, 4]), 1, dict(sequoia=1, specinfer=1, topk=0.6, naive=0.52))])
def test_the_papers_examples_of_how_others_lack_cover_or_optimal_transport(P, Q, k, chances):
    for name, expected in chances.items():
        if name in ("topk", "naive"):           # `EveryRun` would draw the likeliest tokens, too
            rank, _ = sample_and_verify(P.expand(9999, 2), Q.expand(9999, 2), k, name, seeded(0))
            assert (rank != NONE).double().mean().item() == pytest.approx(expected, abs=0.02)
            continue
        runs = EveryRun().results(lambda: sample_and_verify(P[None], Q[None], k, name)[0].item() != NONE)
        assert sum(chance * accepted for chance, accepted in runs) == pytest.approx(expected)

@quick
@pytest.mark.parametrize("name", BY_RATIOS)
def test_where_rounding_alone_rejects_the_token_is_drawn_from_the_target(name):
    P = torch.tensor([[0.5, 0.5]])
    too_large = torch.tensor([[1.0]])
    rank, weights = METHODS[name].verify(P, P.log(), torch.tensor([[0]]), too_large)
    assert rank == NONE
    assert distribution(weights).equal(P)

def random_rows(rows, vocabulary=6, zeros=0.0, seed=1):
    """Target and draft distributions, (rows, V) each, far from each other, with exact zeros in either."""
    scores, hidden = torch.rand(2, 2, rows, vocabulary, generator=seeded(seed), dtype=torch.float64)
    zero = (hidden < zeros) & (scores < scores.amax(dim=-1, keepdim=True))
    return scores.mul(6).masked_fill(zero, RULED_OUT).softmax(dim=-1)

@quick
@pytest.mark.parametrize("name", METHODS)
def test_ten_thousand_targets_and_drafts_with_zeros(name):
    """Each method yields P, by 10 samples of each. Where all tokens are proposed, or all that Q gives a
    chance and P's are among those, one is accepted. A single one is as often as optimal transport allows."""
    for V, k in ((2, 2), (3, 1), (3, 2), (4, 1), (4, 3)):
        P, Q = random_rows(2000, V, zeros=0.4, seed=10 * V + k).repeat_interleave(10, dim=1)
        rank, token = sample_and_verify(P, Q, k, name, seeded(0))
        assert rank.unique().tolist()[-k:] == [*range(k)]
        if name in ("sequoia", "topk"):
            is_proposed = (Q > 0) & ((Q > 0).sum(dim=1, keepdim=True) <= k) | (k == V)
            covers = (is_proposed | (P == 0)).all(dim=1)
            assert (rank[covers] >= 0).all()
        accepted = torch.minimum(P, Q).sum(dim=1)
        if k == 1 and name in BY_RATIOS:
            expected = torch.stack([1 - accepted, accepted]).sum(dim=1)
            assert chi_square_tail((rank + 1).bincount(minlength=2), expected) > CHANCE
        # Apart where the draft gives a token more than the target, and where less.
        is_more = Q > P
        observed = token + V * is_more.gather(1, token[:, None])[:, 0]
        expected = torch.cat([P * ~is_more, P * is_more], dim=1).sum(dim=0)
        assert chi_square_tail(observed.bincount(minlength=2 * V), expected) > CHANCE

# --- 4  The best tree (section 3.1, Algorithm 1) ------------------------------------------------------------
@st.composite
def acceptance_rates(draw):
    """1-D or 2-D, with zeros and sums of 1 among them."""
    ranks = draw(st.integers(1, 4))
    shares = st.lists(st.integers(0, 9), min_size=ranks + 1, max_size=ranks + 1).filter(any)
    weights = np.array(draw(st.lists(shares, min_size=1, max_size=3)))
    rates = distribution(weights).numpy()[:, :ranks]
    return rates[0] if len(rates) == 1 else rates

def chance_of(path, tree, rates):
    """f(v), Definition 3.3: the product of the rates on the way. The last row is for all deeper levels."""
    rows = [rates[min(level, len(rates) - 1)] for level in range(len(path))]
    return math.prod(row[tree.ranks[node]] for row, node in zip(rows, path[1:]))

@quick
@given(acceptance_rates(), st.integers(1, 7))
@example(np.array([1e-3, 1e-7, 1e-7]), 3)
@example(np.float32([0.6, 0.0]), 2)
@example(np.array([]), 7)
@example(np.array([[0.1, 0.1], [0.6, 0.3]]), 7)
def test_no_other_tree_of_that_size_and_depth_has_more_expected_tokens(rates, depth):
    most_children = rates.shape[-1]
    padded = np.pad(np.atleast_2d(rates), ((0, 0), (0, 6)))     # beyond the last rate nothing is accepted
    best = {}
    for tree in SMALL_TREES:
        value = sum(chance_of(path, tree, padded) for path in tree.paths)
        assert expected_tokens(tree, rates) == pytest.approx(value)
        if tree.depth <= depth and max(map(len, tree.children)) <= most_children:
            best[tree.size] = max(value, best.get(tree.size, 0))
    for size in range(1, 8):
        if size in best:
            tree = optimal_tree(rates, size, depth if depth < 7 else None)
            assert tree.size == size
            assert tree.depth <= depth
            assert max(map(len, tree.children)) <= most_children
            assert expected_tokens(tree, rates) == pytest.approx(best[size])
        else:
            with pytest.raises(ValueError, match=f"size={size} is too large: .* has {max(best)}$"):
                optimal_tree(rates, size, depth)

@quick
def test_chains_sequences_and_k_ary_trees_have_limits_and_the_best_trees_of_a_power_law_have_none():
    """The closed forms of section 4, and Theorem 3.6 for b = 1."""
    rates = np.array([0.5, 0.2, 0.1])
    for k, total in ((1, 0.5), (2, 0.7), (3, 0.8)):
        assert expected_tokens(sequences(k, 80), rates) == pytest.approx(1 + total / 0.5)
        assert expected_tokens(k_ary(k, 5), rates) == pytest.approx((1 - total**5) / (1 - total))
    assert expected_tokens(chain(80), rates) == pytest.approx(1 / 0.5)
    ranks = np.arange(1, 400)
    power_law = 1 / ranks - 1 / (ranks + 1)                 # k children are all rejected with 1 / (k + 1)
    best = [expected_tokens(sequoia.likeliest_tree(power_law, n, 99), power_law) for n in (16, 64, 256, 1024)]
    growth = [math.log(n) / math.log(math.log(n)) for n in (16, 64, 256, 1024)]
    assert min(np.diff(np.divide(best, growth))) > 0
    assert best[-1] > 1 + 1 / (1 - power_law[0])                # the limit of sequences, and a chain's is 2

# --- 6  Logits processors -----------------------------------------------------------------------------------
@quick
@pytest.mark.parametrize("kind, value", [("TopK", 2), ("TopP", 0.8), ("MinP", 0.4)])
def test_truncation_removes_a_targets_tokens_but_only_lowers_a_drafts(kind, value):
    cut = getattr(transformers, f"{kind}LogitsWarper")(value)
    processed = Sampling(METHODS["sequoia"], [Temperature(0.5), cut]).processed
    logits = torch.tensor([[3.0, 1.0, 2.9, -math.inf]])
    kept = processed(None, logits, is_draft=False)
    assert kept.tolist() == [[6.0, RULED_OUT, pytest.approx(5.8), RULED_OUT]]
    kept = processed(None, logits, is_draft=True)           # above the likeliest's
    assert kept.tolist() == [[0, -104, pytest.approx(-0.2), -1e9]]

@quick
@pytest.mark.parametrize("temperature", [1e-30, 1e-9, 0.7, 50.0])
def test_only_logits_are_rounded_and_what_a_draft_says_is_finite_and_above_what_was_rejected(temperature):
    processed = Sampling(METHODS["sequoia"], [Temperature(temperature)]).processed
    said = torch.tensor([[2.9, -math.inf, math.inf, math.nan, -3e38]]).bfloat16()
    assert (processed(None, said, is_draft=True).abs() < -sequoia.TRIED).all()
    scores = processed(None, said[:, :2], is_draft=False)
    assert scores.equal(processed(None, said[:, :2].float(), is_draft=False))

# The first two are equal; in the draft's also the next two, and the target's second likeliest, far below.
TIES = [([20.0, 20, 19, 3], [20.0, 20, 19, 3]), ([3.0, 20, 20, 3], [20.0, 5, 5, 5]),
        ([20.0, 20, 3, 3], [3.0, 20, 20, 20]), ([2000.0, 2e-6, 1e-6, 3], [2000.0, 1e-6, 2e-6, 3])]

@quick
@pytest.mark.parametrize("temperature", [1e-20, 1e-8, 1e-6, 1e-3, 1.0])
@pytest.mark.parametrize("name", METHODS)
def test_exact_ties_are_drawn_by_their_chances_also_near_temperature_0(name, temperature):
    """Where scores are so far apart that a float32 sum with noise would have no bits left for the noise."""
    sampling = Sampling(METHODS[name], [Temperature(temperature)])
    rand = partial(sequoia.uniform, generator=seeded(0))
    for (logits, draft_logits), k in itertools.product(TIES, (1, 2, 3)):
        scores = sampling.processed(None, torch.tensor([logits]), is_draft=False)
        log_Q = sampling.processed(None, torch.tensor([draft_logits]), is_draft=True).expand(5000, 4)
        tokens = sampling.method.propose(log_Q, k, rand)
        P = sampling.method.target_P(scores.expand(5000, 4), rand)
        rank, weights = sampling.method.verify(P, log_Q, tokens, rand(5000, k))
        tokens = torch.cat([tokens, sequoia.draw(weights, rand(5000, 1))], dim=1)[range(5000), rank]
        expected = 5000 * (torch.tensor(logits, dtype=torch.float64) / temperature).softmax(dim=0)
        assert chi_square_tail(tokens.bincount(minlength=4), expected) > CHANCE

@quick
def test_a_processor_gets_each_nodes_own_text_and_none_that_has_ended_but_a_prompt_may_close_with_an_end():
    sampling = Sampling(METHODS["sequoia"], [lambda ids, scores: scores + ids.sum()], end_tokens=[9])
    text = torch.tensor([5, 9])
    tree = Tree([-1, 0, 0, 0, 1, 2])
    tokens = torch.tensor([9, 2, 9, NONE, 3, 4, 5, NONE])
    scores = sampling.node_scores(torch.zeros(6, 1), False, torch.arange(6), tree, tokens, text)
    assert scores[:, 0].tolist() == [5 + 9, 5 + 9 + 2, 0, 0, 5 + 9 + 2 + 3, 0]

# --- 7  The tree in a model's cache, and 8  The step on a device --------------------------------------------
SMALL = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             max_position_embeddings=512, bos_token_id=1, eos_token_id=None, pad_token_id=0)
GQA = dict(SMALL, num_key_value_heads=2)
HEAD = dict(GQA, head_dim=8)
WINDOW = dict(GQA, sliding_window=12)
GEMMA = dict(HEAD, sliding_window=12)
TWO_KINDS = dict(GEMMA, layer_types=["sliding_attention", "full_attention"])
YARN = dict(rope_type="yarn", factor=2.0, rope_theta=1e4, original_max_position_embeddings=256)
ROBERTA = dict(SMALL, is_decoder=True)
ARCHITECTURES = {
    "llama": ("Llama", GQA), "qwen2": ("Qwen2", GQA), "qwen3": ("Qwen3", HEAD), "phi3": ("Phi3", WINDOW),
    "mistral": ("Mistral", WINDOW), "gpt-neox": ("GPTNeoX", SMALL), "falcon": ("Falcon", SMALL),
    "gemma2": ("Gemma2", GEMMA), "gemma3": ("Gemma3Text", TWO_KINDS), "roberta": ("Roberta", ROBERTA)}
ARCHITECTURES["roberta without padding"] = ("Roberta", dict(ROBERTA, pad_token_id=None))
ARCHITECTURES["gpt2"] = ("GPT2", dict(SMALL, max_position_embeddings=256))
ARCHITECTURES["opt"] = ("OPT", dict(SMALL, ffn_dim=48, word_embed_proj_dim=32))
ARCHITECTURES["mixtral"] = ("Mixtral", dict(WINDOW, num_local_experts=4))
ARCHITECTURES["qwen2 with a window"] = ("Qwen2", dict(WINDOW, use_sliding_window=True, max_window_layers=1))
ARCHITECTURES["gpt-oss"] = ("GptOss", dict(TWO_KINDS, num_local_experts=4, num_experts_per_tok=2,
                                           rope_parameters=YARN))
ARCHITECTURES["deepseek-v3"] = ("DeepseekV3", dict(
    SMALL, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12,
    num_key_value_heads=4, moe_intermediate_size=16, n_routed_experts=4, n_group=1, topk_group=1,
    num_experts_per_tok=2, first_k_dense_replace=2))
ARCHITECTURES["gemma4"] = ("Gemma4Text", dict(
    TWO_KINDS, global_head_dim=16, hidden_size_per_layer_input=8, vocab_size_per_layer_input=64))

# One of each kind of attention, position and entry: these go through the tests of single steps.
STEPPED = ("llama", "gpt2", "mistral", "gemma3", "gpt-oss", "deepseek-v3", "gemma4")

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
@pytest.mark.parametrize("name", STEPPED)
@torch.inference_mode()
def test_tree_attention_equals_one_path_at_a_time(name):
    """Of nodes in any order, and previous. Windows are shorter than the text, and than the tree."""
    window = dict(sliding_window=3) if "sliding_window" in ARCHITECTURES[name][1] else {}
    model, _ = make_pair(name, **window)
    text = text_of(30)
    # The nodes' tokens. The root's and that of previous are the text's last.
    tokens = torch.cat([text[-1:], text_of(12, seed=1), text[-2:-1]])
    nodes = torch.randperm(14, generator=seeded(0))
    place = sequoia.Layout(ABREAST, "cpu").place(torch.tensor([29]), 192)
    logits = fed(model, text[:-1]).node_logits(tokens, nodes, place)
    for node, row in zip(nodes.tolist(), logits):
        path = tokens[ABREAST.paths[node]] if node < 13 else tokens[:0]
        alone = torch.cat([text[:-1], path])
        torch.testing.assert_close(row, model(alone[None]).logits[0, -1], atol=2e-3, rtol=1e-3)

class EmulatedGraph(TorchDispatchMode):
    """A CUDA graph on a CPU. While it is captured, operators are noted with the memory they use, and what
    they change is undone afterwards. A replay runs them on that memory again, so whatever Python knew in the
    capture, it knows for good: sizes, addresses, values, and generators that were not registered."""

    def __init__(self):
        super().__init__()
        self.calls = []
        self.before = {}         # by address: memory that was there, and its contents
        self.made = set()        # the addresses of memory that was not
        self.states = {}

    def register_generator_state(self, generator):
        self.states[generator] = generator.get_state()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for storage in storages((args, kwargs)):
            if storage.data_ptr() not in self.made:
                self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        out = operator(*args, **kwargs)
        self.made |= {storage.data_ptr() for storage in storages(out)} - self.before.keys()
        self.calls.append((operator, args, kwargs, out))
        return out

    @contextlib.contextmanager
    def capture(self, *memory_and_stream, capture_error_mode):
        with self:
            yield
        for storage, contents in self.before.values():
            storage.copy_(contents)
        for generator, state in self.states.items():
            generator.set_state(state)

    def replay(self):
        for operator, args, kwargs, out in self.calls:
            for old, new in zip(tree_leaves(out), tree_leaves(operator(*args, **kwargs))):
                if torch.is_tensor(old) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

def storages(values):
    found = [value.untyped_storage() for value in tree_leaves(values) if torch.is_tensor(value)]
    return [storage for storage in found if storage.nbytes()]

def call_again(run, *arguments):
    run.graph = mock.Mock(replay=lambda: setattr(run, "result", run.on_device(*arguments)))

@contextlib.contextmanager
def form_of(name):
    """Steps as on a CPU; as a GPU would capture them, but called again; or captured."""
    capture = TreeStep.capture if name == "captured" else call_again
    with mock.patch.multiple(torch.cuda, CUDAGraph=EmulatedGraph, graph=EmulatedGraph.capture,
                             current_stream=mock.Mock(), stream=contextlib.nullcontext):
        with mock.patch.object(TreeStep, "capture", capture):
            yield

def scores_by(model, sampling, is_draft):
    """A function from a text to a model's scores after it. Greedy is Algorithm 2 at temperatures near 0."""
    def scores(text):
        logits = model(text[None]).logits[:, -1]
        found = sampling.processed(text[None], logits, is_draft)[0].double()
        return found if sampling.method is METHODS["sequoia"] else found * 1e6
    return scores

@torch.inference_mode()
def assert_steps_as_plainly(models, text, sampling, form, seed):
    """A text's steps add the tokens of the plain step, and leave both caches as fresh ones: the target's with
    all but the next root, the draft's also without the token before it, which it may not have been fed."""
    target, draft = models
    generator, again = seeded(seed), seeded(seed)
    p = scores_by(target.model, sampling, is_draft=False)
    q = scores_by(draft.model, sampling, is_draft=True)
    static = form != "host" and not sampling.reads_text
    for model in models:
        model.reserve(256)
        model.store.fill_(math.nan)             # what an earlier text left must not show
        model.prefill(text[:-1])
    for tree, calls in ((LATE, 2), (EARLY, 2), (chain(4), 2), (BUSHY, 2), (ABREAST, 2)):
        run = TreeStep(tree, models, generator, static)
        for number in range(calls):
            with form_of(form):
                step = run(text, sampling)
            assert (step.seconds is None) == (static and not number)
            expected = step_plainly(p, q, text, tree, again)
            assert step.tokens == expected.tolist()
            text = torch.cat([text, expected])
            for model, known in ((target, text[:-1]), (draft, text[:-2])):
                found = model.store[:, :, : len(known)]
                fresh = fed(model.model, known).store[:, :, : len(known)]
                torch.testing.assert_close(found, fresh, atol=1e-5, rtol=1e-5)
        assert isinstance(run.graph, EmulatedGraph) == (static and form == "captured")

SHAPED = [[Temperature(0.7)], [Temperature(1.5), transformers.TopPLogitsWarper(0.8)],
          [transformers.TopKLogitsWarper(5)], [transformers.MinPLogitsWarper(0.1)],
          [transformers.RepetitionPenaltyLogitsProcessor(1.5)]]

@pytest.mark.parametrize("name", some_quick(STEPPED, "gemma4"))
@pytest.mark.parametrize("form", ["host", "static", "captured"])
def test_a_step_adds_what_the_plain_step_adds_and_leaves_caches_as_a_fresh_pass_would(name, form):
    """From the same random numbers, over texts that the same caches take one after the other."""
    window = dict(sliding_window=3) if form == "captured" and name in ("mistral", "gemma3") else {}
    # In float64, where ties are rare. But these experts take none.
    dtype = torch.float32 if name in ("gpt-oss", "deepseek-v3") else torch.float64
    models = [CachedModel(model.to(dtype)) for model in make_pair(name, difference=0.5, **window)]
    cases = [("sequoia", SHAPED[0])]
    if name == "llama":
        # All methods that the plain step can follow token by token.
        cases = itertools.product(("sequoia", "greedy"), SHAPED)
    for seed, (method, processors) in enumerate(cases):
        sampling = Sampling(METHODS.get(method, sequoia.GREEDY), processors)
        assert_steps_as_plainly(models, text_of(20 - seed), sampling, form, seed)

@quick
@torch.inference_mode()
def test_each_nodes_children_are_the_drafts_own_choices_after_its_path():
    """Also where its siblings have more children, or fewer."""
    models = [fed(model, text_of(19)) for model in make_pair("llama")]
    for tree in (LATE, EARLY, BUSHY, ABREAST):
        text = text_of(20)
        step = TreeStep(tree, models)(text, Sampling(sequoia.GREEDY, []))
        for node, children in enumerate(tree.children):
            path = torch.tensor([step.node_tokens[i] for i in tree.paths[node][1:]], dtype=torch.long)
            logits = models[1].model(torch.cat([text, path])[None]).logits[0, -1]
            assert [step.node_tokens[i] for i in children] == logits.topk(len(children)).indices.tolist()

# A model is a table for each level, (V**level, V): its distributions after every path of that length, whose
# tokens, read as digits of base V, give the row.
def row_of(tables, path):
    number = 0
    for token in path:
        number = number * tables[0].shape[1] + token
    return tables[len(path)][number]

def continued(start, tables):
    """The distribution of texts of len(tables) tokens that begin with `start` and then go on by these tables,
    (V**levels,)."""
    chances = torch.ones(1, dtype=torch.float64)
    for level, P in enumerate(tables):
        following = torch.eye(P.shape[1])[start[level]] if level < len(start) else P
        chances = (chances[:, None] * following).flatten()
    return chances

class TableModel:
    """Stands in for a CachedModel whose text does not matter: a row of a table follows each path."""
    store = torch.zeros(0, 0, 64, 0)
    agree = staticmethod(lambda values: values)

    def __init__(self, tables):
        self.tables = tables
        self.vocabulary = tables[0].shape[1]

    def node_logits(self, tokens, nodes, place):
        # What a node sees are a text of one token, in slot 0, then the root, and then its path.
        _, _, mask, _ = place
        paths = [row.nonzero()[2:, 0] - 1 for row in mask[nodes] == 0]
        tokens = tokens.clamp(min=0)
        return torch.stack([row_of(self.tables, tokens[path].tolist()) for path in paths]).log()

def choosy(ids, scores):
    """After an even token a model may say only its two likeliest, where the tree has three children."""
    least = scores.topk(2).values[:, 1:]
    return scores if ids[0, -1] % 2 else scores.masked_fill(scores < least, RULED_OUT)

def made_choosy(tables):
    """With four tokens, the rows of even numbers follow even tokens."""
    made = []
    for P in tables:
        rows = [choosy(torch.tensor([[number]]), row) for number, row in enumerate(P.log().split(1))]
        made.append(torch.cat(rows).softmax(dim=1))
    return made

@pytest.mark.parametrize("name", some_quick(["plainly", *METHODS], "plainly", "sequoia"))
@torch.inference_mode()
def test_a_steps_text_has_exactly_the_targets_distribution(name):
    """All proposals, all outcomes of all tries, and all last tokens; then the target itself goes on. Missing
    children take nothing from it, and are never accepted, though the target may want what a draft may not."""
    text = torch.tensor([0, 0])                 # its last token is the root
    trees = [Tree([-1, 0, 0]), Tree([-1, 0, 0, 1]), Tree([-1, 0, 0, 0, 2])]
    for tree, V, static in itertools.product(trees, (3, 4), {False, name in BY_RATIOS}):
        # Three tokens that may have no chance, or four and a choosy grammar.
        zeros = 0.3 if V == 3 else 0.0
        tables = [random_rows(V**level, V, zeros, 14 + level) for level in range(tree.depth)]
        target, draft = zip(*tables)
        exact = target if V == 3 else made_choosy(target)
        sampling = Sampling(METHODS.get(name), [] if V == 3 else [choosy])

        def plainly():
            p = lambda ids: row_of(exact, ids[2:].tolist()).log()
            q = lambda ids: scores_of(row_of(draft, ids[2:].tolist())).float()      # of any dtype
            return step_plainly(p, q, text, tree).tolist()

        def by_tables():
            step = TreeStep(tree, [TableModel(target), TableModel(draft)], static=static)
            step.capture = mock.Mock()
            return step(text, sampling).tokens

        found = 0
        for chance, tokens in EveryRun().results(plainly if name == "plainly" else by_tables):
            found = found + chance * continued(tokens, exact)
        torch.testing.assert_close(found, continued([], exact), rtol=0, atol=1e-6)

@torch.inference_mode()
def test_a_step_adds_the_expected_tokens_where_acceptance_depends_on_the_rank_alone():
    """Here the child of rank r is always token r, and the target wants it with a chance of its own."""
    rates = [0.5, 0.2, 0.2]
    rows = distribution([[5, 2, 2, 1], [8, 4, 2, 1]])
    tables = [[row.expand(4**level, 4) for level in range(5)] for row in rows]
    in_order = METHODS["topk"]._replace(propose=lambda log_Q, k, rand: torch.arange(k).expand(len(log_Q), k))
    for tree in (tree for tree in SMALL_TREES if tree.size < 6 and tree.branching < 4):
        def program():
            step = TreeStep(tree, [*map(TableModel, tables)])
            return len(step(torch.tensor([0, 0]), Sampling(in_order, [])).tokens)

        runs = EveryRun().results(program)
        assert sum(chance * count for chance, count in runs) == pytest.approx(expected_tokens(tree, rates))

class NothingOnTheCPU(TorchDispatchMode):
    """No operator takes or makes a tensor on the CPU: in a CUDA graph that would be a copy, and an error."""
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, out))
        assert not any(torch.is_tensor(leaf) and leaf.is_cpu for leaf in leaves), operator
        return out

@pytest.mark.parametrize("name", METHODS)
@torch.inference_mode()
def test_a_static_step_takes_nothing_from_the_host(name):
    """On a device that holds no values, so that none can be read."""
    models = [fed(model, text_of(9)) for model in make_pair("gemma3")]
    for cached in models:
        cached.model.to("meta")
        cached.store = cached.store.to("meta")
    sampling = Sampling(METHODS[name], sum(SHAPED[:4], []))
    for tree in (NO_TREE, LATE, BUSHY):
        step = TreeStep(tree, models, static=True)
        step.rand = mock.Mock(side_effect=step.rand)
        with NothingOnTheCPU():
            result = step.on_device(torch.zeros(10, dtype=torch.long, device="meta"), sampling)
        assert result.shape == (2 + tree.size,)
        if name in ("naive", "topk"):
            assert mock.call(tree.size, 1) in step.rand.mock_calls          # a number for each node's token

@needs_cuda
@pytest.mark.parametrize("name", METHODS)
@torch.inference_mode()
def test_captured_steps_equal_the_same_steps_called_again_on_a_gpu(name):
    sampling = Sampling(METHODS[name], [Temperature(0.7)])
    pair = [model.cuda() for model in make_pair("llama")]
    texts = []
    for capture in (call_again, TreeStep.capture):
        text = text_of(20).cuda()
        models = [fed(model, text[:-1]) for model in pair]
        run = TreeStep(BUSHY, models, seeded(0, "cuda"), static=True)
        with mock.patch.object(TreeStep, "capture", capture):
            for _ in range(12):
                text = torch.cat([text, text.new_tensor(run(text, sampling).tokens)])
        texts.append(text.tolist())
    assert run.graph
    assert texts[0] == texts[1]

# --- 9  The planner (section 4.1) ---------------------------------------------------------------------------
@quick
@pytest.mark.parametrize("true", [[0.5, 0.2, 0.1], [0.2, 0.5, 0.1]])
def test_acceptance_rates_approach_the_true_ones_but_are_made_to_fall(true):
    acceptance = AcceptanceRates()
    acceptance.had[:3] += 1e6
    acceptance.accepted[:3] += 1e6 * np.array(true)
    assert acceptance.rates()[:3] == pytest.approx(np.minimum.accumulate(true), abs=1e-4)
    assert AcceptanceRates().rates() == pytest.approx(sequoia.PRIOR)
    bad = AcceptanceRates()
    bad.had[0] += 12                    # which lowers the guesses for later children, too
    assert bad.rates()[:2] == pytest.approx(2 * [1.5 / 14.5])

@quick
def test_rates_count_children_that_were_not_missing_and_the_accepted_ones_of_those():
    acceptance = AcceptanceRates()
    # The root's second child is accepted, and none of that node's; then its first is rejected, and alone.
    for tokens, path in ((7 * [5], [2]), ([5, 7, NONE, 9, 9, 9, 9], [])):
        acceptance.learn(Step(k_ary(2, 3), tokens, path, 0, 1.0))
    acceptance.learn(Step(sequences(20, 1), 21 * [5], [20], 0, 1.0))            # more than it counts
    assert [*(acceptance.had - AcceptanceRates().had)[:3]] == [4, 3, 1]
    assert [*(acceptance.accepted - 1.5)[:3]] == [0, 1, 0]

# The paper's, of Llama-3-70B with the 8B as its draft; and a draft that is right less often below the root.
PAPER_RATES = np.array([[0.7732, 0.1039, 0.0402, 0.0206, 0.0128, 0.0081, 0.0064, 0.0043, 0.0035, 0.0026]])
RATES = np.array([[0.65, 0.12, 0.05, 0.03, 0.02], [0.6, 0.1, 0.05, 0.03, 0.02]])
# t(n), c, acceptance rates, steps, and the least part of the best tree's pace.
MACHINES = {"flat to 800": (lambda n: max(1.0, n / 800), 0.002, PAPER_RATES, 600, 0.97),
    "flat": (lambda n: 1.0, 0.5, RATES, 400, 0.97),
    "linear": (lambda n: 0.98 + 0.02 * n, 0.02, RATES, 200, 0.97),
    "kinked": (lambda n: max(1.0, n / 48), 0.1, RATES, 200, 0.95),
    "no tree pays": (lambda n: float(n), 1.0, RATES, 200, 1)}

def best_pace(t, c, rates, size):
    """The most tokens per second, of all trees of up to `size` nodes on up to 24 levels. As chances fall from
    parent to child and from sibling to sibling, the likeliest nodes always form a tree, which is the best."""
    best = 0.0
    for depth in range(1, 25):
        tokens = 0.0
        n = 0
        waiting = [(-1.0, 0)]
        while waiting and n < size:
            chance, level = heapq.heappop(waiting)
            tokens -= chance
            n += 1
            best = max(best, tokens / (t(n) + c * (depth - 1)))
            if level + 1 < depth:
                for rate in rates[min(level, len(rates) - 1)]:
                    heapq.heappush(waiting, (chance * rate, level + 1))
    return best

def pace(tree, t, c, rates):
    return expected_tokens(tree, rates) / (t(tree.size) + c * (tree.depth - 1))

@quick
@pytest.mark.parametrize("rates", [
    0.6 / np.arange(1, 9) ** 2, 0.2 / np.arange(1, 9) ** 0.5, np.array([0.4333, 0.4027, 0.1205, 0.0374])])
def test_the_plan_is_the_best_of_all_trees(rates):
    sizes = [1, 4, 16, 64]
    machines = [(1 + cost * np.array([0, 3, 15, 63]), cost) for cost in (0.001, 0.003, 0.01, 0.03, 0.1, 1.0)]
    for t, c in [([1.0, 1.02, 1.1, 1.4], 0.05), *machines]:
        seconds = partial(np.interp, xp=sizes, fp=t)
        tree = sequoia.plan(rates, sizes, t, c)
        assert pace(tree, seconds, c, rates) == pytest.approx(best_pace(seconds, c, rates[None], 64))
    assert tree == NO_TREE
    assert sequoia.plan(np.array([0.99]), [1, 64], [1.0, 1.0], 0.0) == chain(23)

def walk_by_rates(tree, rates, rng):
    """The path of a step whose children are accepted by these chances, (levels, ranks)."""
    path = [0]
    while True:
        children = tree.children[path[-1]]
        row = rates[min(len(path), len(rates)) - 1]
        rank = row.cumsum().searchsorted(rng.random())
        if rank >= min(len(children), len(row)):
            return path[1:]
        path.append(children[rank])

@functools.cache
def simulated(name, is_noisy=False, seed=0):
    t, c, rates, steps, _ = MACHINES[name]
    rng = np.random.default_rng(seed)
    planner = Planner("auto")
    for number in range(steps):
        tree = planner.next_tree()
        noise = 0.1 * rng.exponential() + 2 * (rng.random() < 0.05) + 0.3 * (number < 20)
        seconds = (t(tree.size) + c * (tree.depth - 1)) * (1 + noise * is_noisy)
        planner.learn(Step(tree, [0] * tree.size, walk_by_rates(tree, rates, rng), 0, seconds))
    return planner

@pytest.mark.parametrize("name", MACHINES)
def test_a_planner_knows_the_machine_and_finds_the_best_of_all_trees(name):
    *machine, steps, least = MACHINES[name]
    t, c, _ = machine
    planner = simulated(name)
    assert pace(planner.tree, *machine) >= least * best_pace(*machine, 1024)
    sizes, times, draft_seconds = planner.latency()
    assert draft_seconds == pytest.approx(c, rel=0.01)
    assert times == pytest.approx([t(size) for size in sizes], rel=0.01)

@pytest.mark.parametrize("name", some_quick(["flat", "linear", "kinked"], "linear"))
def test_planners_on_a_noisy_machine_mostly_come_near(name):
    *machine, _, _ = MACHINES[name]
    paces = [pace(simulated(name, True, seed).tree, *machine) for seed in range(6)]
    assert np.mean(paces) > 0.82 * pace(simulated(name).tree, *machine)

def all_steps(planner, count, seconds=lambda tree: 1.0, path=()):
    """The trees of a planner's next steps, if all of them take such times and accept this path."""
    trees = []
    for _ in range(count):
        trees.append(planner.next_tree())
        planner.learn(Step(trees[-1], [0] * trees[-1].size, [*path], 0, seconds(trees[-1])))
    return trees

@quick
@pytest.mark.parametrize("best", [chain(6), NO_TREE])
def test_plans_come_at_doubling_steps_right_after_trials_and_slow_first_times_are_forgotten(best):
    """First 9 trials, then their 3 trees where steps have doubled."""
    planner = Planner("auto")
    trials = planner.trials
    found = []
    seen = []

    def plan(rates, sizes, t, c):
        found.append(planner.steps)
        assert {len(planner.seconds[tree]) for tree in trials} == {sequoia.TIMINGS}
        return best

    def seconds(tree):
        seen.append(tree)
        return 1.0 if seen.count(tree) > 1 else 9.0

    promise = mock.patch.object(sequoia, "expected_tokens", lambda tree, rates: 9.0 if tree == best else 1.0)
    with mock.patch.object(sequoia, "plan", plan), promise:
        trees = all_steps(planner, 100, seconds)
    assert found == [9, 21, 45, 93]
    assert trees[:9] == [tree for tree in trials for _ in range(3)]
    assert trees[found[-1] - 3 : found[-1]] == trials
    assert {max(planner.seconds[tree]) for tree in trials} == {1.0}

@quick
def test_a_plan_whose_size_was_not_timed_is_timed_at_once_and_may_be_half_as_large_again_as_those():
    """A time between two sizes is a guess: in float32 on a CPU two nodes may take as long as eight."""
    for size, timed in ((4, 3), (7, 9), (12, 3)):
        planner = Planner("auto")
        best = sequoia.likeliest_tree(sequoia.PRIOR, size, 5)
        asked = mock.Mock(return_value=best)
        promised = lambda tree, rates: 9.0 if tree == best else 1.0
        with mock.patch.multiple(sequoia, plan=asked, expected_tokens=promised):
            assert all_steps(planner, 19)[9 : 9 + timed] == timed * [best]
        assert asked.call_args_list[0].args[1:] == ([1, 8, 12], [1.0, 1.0, 1.0], 0.0)
        assert asked.call_count == (2 if timed == 3 else 1)

@quick
def test_after_a_look_at_a_step_without_a_tree_the_faster_of_both_is_used_and_a_plan_needs_more_steps():
    """In each step, as rates are learned. A text of 60 tokens is worth a look, one of 200 all trials."""
    first = Planner("auto").tree
    child = first.children[0][0]
    both = [child, first.children[child][0]]
    for path, slow, plan in (([], 1.8, "none"), (both, 1.5, "first"), (both, 9.0, "none")):
        planner = Planner("auto")
        trees = []
        for _ in range(12):
            trees.append(planner.next_tree(tokens_left=70))
            accepted = path[: trees[-1].depth - 1]
            planner.learn(Step(trees[-1], 8 * [0], accepted, 0, slow if trees[-1] == first else 1.0))
        assert trees[:4] == 3 * [first] + [NO_TREE]
        assert {*trees[4:]} == {NO_TREE if plan == "none" else first}
    short = Planner("auto")
    for _ in range(9):
        short.learn(Step(first, 8 * [0], [], 0, 1.0))
        assert short.next_tree(26) == first

@quick
def test_a_shape_is_planned_again_at_doubling_steps_and_a_tree_stays():
    shaped, stays = Planner((8, 4)), Planner(LATE)
    trees = all_steps(shaped, 100)
    assert {*all_steps(stays, 20)} == {LATE}
    assert trees[0] == optimal_tree(sequoia.PRIOR, 8, 4)
    assert trees[0] != trees[16]
    assert {i for i in range(1, 100) if trees[i] != trees[i - 1]} <= {3, 11, 22, 44, 88}

@quick
@pytest.mark.parametrize("cost, begun", [(1, 92), (4, 482)])
def test_trials_come_only_where_enough_steps_are_left_to_gain_their_time_back(cost, begun):
    """Until then the first tree is used, and timed."""
    planner = Planner("auto")
    first = planner.tree
    planner.seconds[NO_TREE] += [9.0]                           # as if at a text's end, and slow
    timed = Step(first, [0] * 8, [], 0, 1.0)
    for _ in range(begun):
        assert planner.next_tree(76, cost) == first
        planner.learn(timed)
    planner.learn(Step(NO_TREE, [0], [], 0, None))              # without a time it was no trial
    assert planner.next_tree(76, cost) == NO_TREE

def test_fewer_nodes_take_no_more_time_and_a_draft_pass_none_below_zero():
    planner = Planner("auto")
    for tree, seconds in zip((*planner.trials, k_ary(2, 3), chain(1)), (2.0, 3.0, 1.0, 2.0, 9.0)):
        planner.seconds[tree] += [20.0, seconds, 10.0]
    planner.seconds[chain(2)] += 2 * [0.1]                      # not timed often enough
    sizes, t, c = planner.latency()
    assert sizes == [1, 2, 7, 8]
    assert [*t] == [1.0, 1.0, 1.0, 1.0]
    assert c == 0.0

falling = st.lists(st.sampled_from([0.9, 0.6, 0.5, 0.3, 0.25, 0.1, 1e-3]), min_size=1, max_size=6).map(
    lambda rates: np.array(sorted(rates, reverse=True)))

@quick
@given(falling, st.integers(1, 60), st.integers(1, 8))
@example(np.array([0.5, 0.5]), 13, 5)
@example(0.6 / np.arange(1, 17) ** 2, 256, 12)
@example(np.array([1.0, 0.6, 0.6, 0.36]), 40, 6)
def test_exercise_4_the_likeliest_nodes_are_algorithm_1s_tree_also_among_equals(rates, size, depth):
    tree = sequoia.likeliest_tree(rates, size, depth)
    assert tree.depth <= depth
    assert tree.size == min(size, sum(len(rates) ** level for level in range(depth)))       # all there are
    best = optimal_tree(rates, tree.size, depth)
    assert expected_tokens(tree, rates) == pytest.approx(expected_tokens(best, rates), rel=1e-9)

@pytest.fixture(scope="module")
def llama():
    return make_pair("llama")

@pytest.fixture(scope="module")
def bundled():
    load = partial(transformers.AutoModelForCausalLM.from_pretrained, dtype=torch.float32)
    return load(ROOT / "tiny" / "target"), load(ROOT / "tiny" / "draft")

def prompt_of(length, vocabulary=64, seed=0):
    return text_of(length, vocabulary, seed)[None]

def plain_text(target, prompt, **arguments):
    return target.generate(prompt, **dict(do_sample=False) | arguments)

def assert_as_generate(decoder, prompt, **arguments):
    """Greedily a Decoder writes `generate`'s text. Returns its steps."""
    steps = []
    decoder.on_step = steps.append
    found = decoder.generate(prompt, **dict(do_sample=False) | arguments)
    assert found.equal(plain_text(decoder.target.model, prompt, **arguments))
    return steps

class Captured(Decoder):
    """Its steps have fixed shapes, as on a GPU. What then happens to them, `form_of` says."""
    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.cuda_graph = True

# --- 11  Decoding: greedy and sampled text ------------------------------------------------------------------
@pytest.mark.parametrize("name", some_quick(ARCHITECTURES, "llama", "gemma4", "gpt-oss", "roberta"))
def test_greedy_text_is_generates_on_every_architecture_with_every_tree(name):
    """Windows are 12 tokens wide, and the text grows to 50, so most of it lies behind a window."""
    pair = make_pair(name, difference=0.05)
    for tree in (NO_TREE, sequences(3, 3), BUSHY, "auto"):
        steps = assert_as_generate(Decoder(*pair, tree), prompt_of(26), max_new_tokens=24)
        # A draft this near must save steps, because otherwise its cache is wrong.
        assert len(steps) == 24 if tree == NO_TREE else len(steps) < 18

@pytest.mark.parametrize("length", some_quick([1, 5, 6, 245, 250, 255, 256, 257], 1, 5, 6, 256))
def test_prompts_shorter_than_the_probe_and_around_the_caches_capacity(llama, length):
    decoder = Decoder(*llama, (9, 4))
    assert_as_generate(decoder, prompt_of(length), max_new_tokens=14)

@quick
def test_a_decoder_kept_over_texts_gives_what_a_fresh_one_gives(llama):
    """Whatever the call before asked for, because another way of sampling has another planner and graph."""
    changes = [{}, dict(temperature=0.5), dict(temperature=0.5, top_p=0.8), dict(top_k=9), dict(top_k=8),
               dict(do_sample=False), dict(repetition_penalty=1.5), dict(bad_words_ids=[[3]]), {}]
    generator = torch.Generator()
    kept = Captured(*llama, sequences(2, 3), generator=generator)
    for i, change in enumerate(changes):
        given = dict(do_sample=True, max_new_tokens=12) | change
        texts = []
        for decoder in (kept, Captured(*llama, sequences(2, 3), generator=generator)):
            generator.manual_seed(i)
            with form_of("captured"):
                texts.append(decoder.generate(prompt_of(6 + 90 * (i % 4), seed=i), **given))
        assert texts[0].equal(texts[1]), change
    assert len(kept.planners) == 7

@quick
def test_a_graph_is_kept_over_texts_and_captured_again_only_when_the_caches_grow(llama):
    """A capture takes longer than many steps. But it goes on with old memory, which would lose the text."""
    decoder = Captured(*llama, BUSHY)
    counted = mock.patch.object(TreeStep, "capture", autospec=True, side_effect=TreeStep.capture)
    with form_of("captured"), counted as capture:
        for length, captures in ((12, 1), (40, 1), (230, 2)):
            assert_as_generate(decoder, prompt_of(length), max_new_tokens=40)
            assert capture.call_count == captures

@quick
@pytest.mark.parametrize("kind", [Decoder, Captured])
def test_auto_with_its_trials_writes_generates_text_and_captures_trees_only_for_longer_texts(llama, kind):
    """After a step without a tree the draft lacks its token, so it must be fed again, or it would guess
    badly. And as each tree of a trial is captured, a trial takes as long as several steps."""
    decoder = kind(llama[0], llama[0])
    trees = set()
    for length in (8, 33, 20):
        with form_of("static"):
            steps = assert_as_generate(decoder, prompt_of(length), max_new_tokens=200)
        for step in steps[1:]:
            assert len(step.tokens) == step.tree.depth      # the target is the draft, if its cache is right
            trees.add(step.tree)
    assert {NO_TREE, chain(7)} < trees if kind is Decoder else len(trees) == 1

def test_a_drafts_vocabulary_and_context_do_not_change_the_text():
    """One padded to another length, and one that ends early."""
    target, draft = make_pair("llama")
    for size in (60, 70):
        draft.resize_token_embeddings(size)
        with pytest.warns(UserWarning, match=rf"draft's .* are \({size}, 512\), the target's \(64, 512\)"):
            decoder = Decoder(target, draft, sequences(61, 1))
        steps = assert_as_generate(decoder, prompt_of(10), max_new_tokens=16)
        for step in steps[1:]:
            # Nothing is proposed beyond the target's vocabulary, and what the draft lacks comes last.
            assert max(step.node_tokens) < 64
            assert max(step.node_tokens[:61]) < size
    short = make_pair("gpt2", max_position_embeddings=32)[1]
    for length, tree in ((5, "auto"), (31, sequences(2, 5)), (60, (9, 4))):
        with pytest.warns(UserWarning, match=r"context are \(64, 32\).* longer texts go on without a tree"):
            assert_as_generate(Decoder(target, short, tree), prompt_of(length), max_new_tokens=30)

@quick
def test_eos_inside_an_accepted_run_ends_the_text(llama):
    """A limit beyond the context is no wish, so programs may always pass one."""
    plain = plain_text(llama[0], prompt_of(10), max_new_tokens=30)[0, 10:].tolist()
    decoder = Decoder(llama[0], llama[0], chain(5))             # whole paths are accepted
    inside = 0
    for end in {*plain}:
        steps = assert_as_generate(decoder, prompt_of(10), max_new_tokens=2000, eos_token_id=end)
        inside += steps[-1].tokens[-1] != end
    assert inside >= 4

@quick
def test_a_text_is_never_longer_than_asked_for(llama):
    """Although whole paths are accepted, also in the last step."""
    for tree, count in itertools.product(("auto", "16x5", chain(6)), (1, 2, 3, 4, 7, 12)):
        decoder = Decoder(llama[0], llama[0], tree)
        steps = assert_as_generate(decoder, prompt_of(10), max_new_tokens=count)
        assert len(steps) == 1 + math.ceil((count - 1) / steps[-1].tree.depth)

@quick
def test_criteria_and_a_streamer_get_every_token_one_by_one_and_a_criterion_ends_the_text(llama):
    plain = plain_text(llama[0], prompt_of(10), max_new_tokens=30)[0].tolist()
    at_17 = mock.Mock(side_effect=lambda ids, scores: torch.tensor([ids.shape[1] >= 17]))
    streamer = mock.Mock()
    decoder = Decoder(llama[0], llama[0], chain(5))
    out = decoder.generate(prompt_of(10), do_sample=False, max_new_tokens=30, stopping_criteria=[at_17],
                           streamer=streamer)
    assert out[0].tolist() == plain[:17]
    assert at_17.call_count == 7
    streamed = [call.args[0].tolist() for call in streamer.put.call_args_list]
    assert streamed == [[plain[:10]], *[[token] for token in plain[10:17]]]
    streamer.end.assert_called_once_with()

@quick
def test_a_stop_string_inside_an_accepted_run_ends_the_text(bundled):
    ids = TOKENIZER("import os\n\ndef main(", return_tensors="pt").input_ids
    decoder = Decoder(bundled[0], bundled[0], chain(5))
    criteria = transformers.StoppingCriteriaList()
    for words in ("\n", [":", "("], "\0\0"):
        assert_as_generate(decoder, ids, max_new_tokens=30, stop_strings=words, tokenizer=TOKENIZER,
                           stopping_criteria=criteria)
        assert not criteria                     # a caller's list stays as it is
        assert (decoder.report.tokens < 30) == (words != "\0\0")
    configured = transformers.GenerationConfig(stop_strings=["\n"], max_new_tokens=30, do_sample=False)
    expected = bundled[0].generate(ids, configured, tokenizer=TOKENIZER)
    assert decoder.generate(ids, configured, tokenizer=TOKENIZER).equal(expected)
    assert decoder.report.tokens < 30
    with pytest.raises(ValueError, match="stop strings.* `tokenizer`"):
        decoder.generate(ids, configured)

def test_a_draft_of_other_tokens_is_a_warning_that_says_how_many_and_writes_the_targets_text(folders, capfd):
    model = transformers.AutoModelForCausalLM.from_pretrained(folders / "good")
    renamed = transformers.AutoTokenizer.from_pretrained(folders / "renamed")
    decoder = Decoder(model, model, (9, 4))
    with pytest.warns(UserWarning, match="tokenizer differs in 2 tokens, as in 'a'"):
        assert_as_generate(decoder, prompt_of(9), max_new_tokens=9, tokenizer=TOKENIZER,
                           assistant_tokenizer=renamed)
    with pytest.warns(UserWarning, match="tokenizer differs in 2 tokens"):
        given = (f"--target={folders / 'good'}", f"--draft={folders / 'renamed'}")
        assert run_main(capfd, *USUAL, *given)[0] == 0

def test_both_ways_in_take_what_a_tokenizer_gives_and_what_says_nothing_and_return_what_is_asked_for():
    target, draft = make_pair("gpt2")
    greedy = dict(max_new_tokens=12, do_sample=False)
    expected = plain_text(target, prompt_of(10), **greedy)
    encoded = dict(input_ids=prompt_of(10), attention_mask=torch.ones(1, 10).long(), pixel_values=None,
                   position_ids=torch.arange(10)[None])
    for inputs in (prompt_of(10).int(), encoded, transformers.BatchEncoding(encoded)):
        given = dict(use_cache=False, num_beams=1, custom_generate=None, **greedy)
        assert Decoder(target, draft).generate(inputs, **given).equal(expected)
    out = sequoia.generate(target, encoded, assistant_model=draft, prompt_lookup_num_tokens=3,
                           return_dict_in_generate=True, **greedy)
    assert out.sequences.equal(expected)
    options = dict(tree="none", method="topk", generator=seeded(0), on_step=print, cuda_graph=False)
    with mock.patch.object(sequoia, "Decoder") as made:
        sequoia.generate(target, encoded, assistant_model=draft, **options)
    assert made.call_args.args == (target, draft, *options.values())

class TakesTypes(transformers.LlamaForCausalLM):
    """Adds to embeddings what token types say, which is nothing where they are 0."""
    def forward(self, input_ids=None, mm_token_type_ids=None, **rest):
        embeddings = self.get_input_embeddings()(input_ids)
        if mm_token_type_ids is not None:
            embeddings = embeddings + mm_token_type_ids[:, :, None]
        return super().forward(inputs_embeds=embeddings, **rest)

def test_an_argument_that_changes_nothing_in_the_prompts_pass_is_passed_over_and_any_other_refused():
    target, draft = make_pair("llama")
    target.__class__ = TakesTypes
    decoder = Decoder(target, draft, (9, 4))
    types = torch.zeros(1, 10).long()
    assert_as_generate(decoder, prompt_of(10), max_new_tokens=12, mm_token_type_ids=types)
    with pytest.raises(ValueError, match="mm_token_type_ids, which changes the text"):
        decoder.generate(prompt_of(10), mm_token_type_ids=types + 1)

def test_a_target_may_score_fewer_tokens_than_it_embeds_and_autocast_may_narrow_its_entries():
    target, draft = make_pair("llama")
    target.lm_head = torch.nn.Linear(32, 60, bias=False)
    assert_as_generate(Decoder(target, draft, (9, 4)), prompt_of(10, 60), max_new_tokens=12)
    for do_sample in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            decoder = Decoder(*make_pair("llama"), (9, 4))
            assert decoder.generate(prompt_of(10), do_sample=do_sample, max_new_tokens=12).shape == (1, 22)
    assert_as_generate(decoder, prompt_of(10), max_new_tokens=12)           # in its own precision again

OF_32 = dict(rope_theta=1e4, original_max_position_embeddings=32, factor=4.0)
# A configuration's max_position_embeddings, its other positions, and the context.
ROPES = {"yarn": (64, dict(OF_32, rope_type="yarn"), 128),
         "linear": (32, dict(rope_theta=1e4, rope_type="linear", factor=4.0), 128),
         "longrope": (128, dict(OF_32, rope_type="longrope", short_factor=[1] * 4, long_factor=[4] * 4), 32)}

@pytest.mark.parametrize("name", some_quick(ROPES, "yarn"))
def test_a_text_ends_one_token_behind_the_context(name):
    """Because the last token is never fed. Past longrope's a cache would have to rotate its keys anew."""
    most, rope, context = ROPES[name]
    target, draft = make_pair("llama", max_position_embeddings=most, rope_parameters=rope)
    decoder = Decoder(target, draft, sequences(3, 4))
    for length in (20, context - 12, context):
        assert_as_generate(decoder, prompt_of(length), max_length=context + 1)
        with pytest.warns(UserWarning, match=f"ends early, .* the target's context of {context} tokens"):
            ended = decoder.generate(prompt_of(length), max_length=context + 20, do_sample=False)
        assert ended.equal(plain_text(target, prompt_of(length), max_length=context + 1))
    with pytest.raises(ValueError, match=f"a prompt of {context + 1} tokens, .* context is {context}"):
        decoder.generate(prompt_of(context + 1), max_new_tokens=1)
    kinds = dict(full_attention=rope, sliding_attention=dict(rope_type="default", rope_theta=1e4))
    gemma = dict(max_position_embeddings=most, rope_parameters=kinds, layer_types=[*kinds])
    assert sequoia.context_of(config_of("gemma3", **gemma)) == context

def test_a_context_may_be_unlimited_or_stretched_by_a_factor_that_nobody_says():
    for most in (-1, None):
        assert sequoia.context_of(SimpleNamespace(max_position_embeddings=most)) == sys.maxsize
    rope = dict(OF_32, rope_type="yarn", factor=None)
    assert_as_generate(Decoder(*make_pair("llama", max_position_embeddings=64, rope_parameters=rope), (9, 4)),
                       prompt_of(20), max_length=65)

@pytest.mark.parametrize("method", some_quick(METHODS, "sequoia"))
@torch.inference_mode()
def test_texts_of_four_tokens_have_the_targets_distribution(method):
    """With the prompt's pass, trees that go on behind the end, and caches that entries move in. The
    vocabulary has three tokens, so that the target alone can score all 81 texts."""
    target, draft = make_pair("gpt2", difference=1.5, seed=3, vocab_size=3, bos_token_id=None)
    prompt = torch.tensor([0, 1, 2, 1])
    following = torch.cartesian_prod(*4 * [torch.arange(3)])
    texts = torch.cat([prompt.expand(81, -1), following], dim=1)
    P = target(texts).logits[:, 3:-1].softmax(dim=2)
    chances = P.gather(2, following[:, :, None]).prod(dim=1)[:, 0]
    tree = Tree([-1, 0, 0, 1, 1, 2])
    steps = []
    decoder = Decoder(sequoia.pack(target), sequoia.pack(draft), tree, method, seeded(0), steps.append)
    found = torch.zeros(81)
    for _ in range(400):
        made = decoder.tokens_after(prompt, Sampling(METHODS[method], []), Planner(tree), 8)
        a, b, c, d = itertools.islice(made, 4)
        found[27 * a + 9 * b + 3 * c + d] += 1
    assert sum(len(step.path) for step in steps) > 200
    assert chi_square_tail(found, 400 * chances) > CHANCE

@quick
def test_near_temperature_0_a_decoder_draws_the_targets_best_tokens_by_chance_where_they_are_equal():
    """Two of four tokens, so both are half of a text, and each follows each in a quarter."""
    target, draft = make_pair("llama", vocab_size=4, bos_token_id=None)
    for model, best in ((target, [1, 2]), (draft, [2, 3])):
        rows = torch.zeros(4, 32)
        rows[best] = 1.0
        model.lm_head.weight.data = rows
        model.model.norm.forward = torch.ones_like          # so logits are 32 or 0 after any text
    decoder = Decoder(target, draft, Tree([-1, 0, 0, 1, 1, 2]), generator=seeded(0))
    text = decoder.generate(torch.tensor([[1]]), do_sample=True, temperature=1e-6, max_new_tokens=400)[0, 1:]
    pairs = (4 * text[:-1] + text[1:]).bincount(minlength=16)
    assert chi_square_tail(pairs, 99.75 * np.isin(range(16), [5, 6, 9, 10])) > CHANCE

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
    assert_as_generate(decoder, prompt_of(8), do_sample=True, temperature=1e-6, max_new_tokens=10)

# --- 11  Decoding, and 12  What is refused ------------------------------------------------------------------
def sevens_end(row, ids):
    """A grammar in which 7 ends a text, and behind it, or after a missing child, there is nothing to say."""
    assert 7 not in ids[12:]
    assert NONE not in ids
    return [7, 11, 13] if len(ids) > 17 else [10 + len(ids), 20 + len(ids)]

@quick
@pytest.mark.parametrize("given", [
    dict(prefix_allowed_tokens_fn=sevens_end, eos_token_id=[5, 7]),
    dict(logits_processor=[lambda ids, scores: scores.neg_()]),
    dict(min_new_tokens=15, eos_token_id=list(range(2, 40)))], ids=["grammar", "in place", "no early end"])
def test_processors_that_read_the_text_give_generates_text_with_every_tree(llama, given):
    """They see each node's own. And they shape proposals, too, so trees still help."""
    for tree in (NO_TREE, BUSHY, "auto"):
        steps = assert_as_generate(Decoder(*llama, tree), prompt_of(12), max_new_tokens=24, **given)
        assert tree == NO_TREE or any(step.path for step in steps)

def small_model(kind, **changes):
    config = getattr(transformers, f"{kind}Config")(**SMALL | changes)
    return transformers.AutoModelForCausalLM.from_config(config).eval()

def elsewhere(model):
    model._sequoia_probed = "sdpa"
    model.__class__ = type("Elsewhere", (type(model),), dict(device=torch.device("cuda:1")))
    return model

RISING = torch.arange(12)[None]
T5 = transformers.T5Config(d_model=16, num_layers=1)
SCORES = ["output_attentions", "output_hidden_states", "output_logits", "output_scores"]
# By the words that refuse it: what is given.
REFUSED = {
    "it has an encoder": dict(model=transformers.T5ForConditionalGeneration(T5)),
    "MambaForCausalLM cannot verify a tree: it is recurrent": dict(assistant_model=small_model("Mamba")),
    "GPTNeo.* masks in its own way": dict(model=small_model("GPTNeo", attention_types=[[["global"], 2]])),
    "Falcon.* cannot verify": dict(model=small_model("Falcon", alibi=True)),
    "'sdpa'": dict(model=small_model("Llama", attn_implementation="flex_attention")),
    r"in training mode: call its eval\(\)": dict(assistant_model=make_pair("gpt2")[1].train()),
    "language model of transformers, got LlamaModel": dict(model=small_model("Llama").model),
    r"Sequential: give .* merge_and_unload\(\), a compiled": dict(model=torch.nn.Sequential()),
    "no draft: pass assistant_model=draft": dict(assistant_model=None),
    "^not supported: several texts": dict(inputs=prompt_of(12).expand(2, 12)),
    **{name: {name: True} for name in SCORES}, "stop strings, either": dict(stop_strings="x"),
    "this attention_mask": dict(attention_mask=RISING), "beam_search": dict(num_beams=2),
    "position_ids$": dict(attention_mask=torch.ones(1, 13)),
    "guidance_scale": dict(guidance_scale=0.5), "this position_ids": dict(position_ids=RISING // 2),
    # GPT-2 adds the embedding of token 0 where these are 0.
    "not supported: token_type_ids, which changes": dict(token_type_ids=torch.zeros_like(RISING)),
    "the ids of one text.*got None": dict(inputs=None, inputs_embeds=torch.rand(1, 12, 32)),
    r"length\), .*got tensor\(\[\]": dict(inputs=RISING[:, :0]),
    "length.*got 'import os'": dict(inputs="import os"),
    r"length\), .*got \[\[5": dict(inputs=[[5]]),
    r"length\), .*got tensor\(\[2": dict(inputs=torch.tensor([2, 3])),
    "its first weights are on a disk": dict(model=make_pair("gpt2")[0].to("meta")),
    "the draft is on cuda:1, but the target on cpu": dict(assistant_model=elsewhere(make_pair("gpt2")[1])),
    "SynthID": dict(watermarking_config=transformers.SynthIDTextWatermarkingConfig(5, 9 * [5])),
    "OpenAIGPT.* does not keep one KV entry": dict(model=small_model("OpenAIGPT")),
    "4 ranks cannot share its KV heads evenly": dict(model=small_model("Llama", num_key_value_heads=2)),
    "over several GPUs: share it by torchrun": dict(model=small_model("Llama")),
    "CpmAnt.* does not keep": dict(model=small_model("CpmAnt", prompt_types=32, dim_head=8, dim_ff=48)),
    "a cache of your own": dict(past_key_values=transformers.DynamicCache()),
    "ruled out every token": dict(logits_processor=[lambda ids, scores: scores.fill_(-torch.inf)])}

REFUSED["4 ranks cannot share its KV heads evenly"]["model"]._tp_size = 4
REFUSED["over several GPUs: share it by torchrun"]["model"].parameters = lambda: iter([
    mock.Mock(is_cuda=place != "cpu", device=torch.device(place)) for place in ("cuda:0", "cuda:1", "cpu")])

@quick
@pytest.mark.parametrize("words", REFUSED)
def test_an_unfit_model_and_what_would_give_another_text_are_refused_in_words(words):
    target, draft = make_pair("gpt2")
    given = dict(model=target, assistant_model=draft, inputs=prompt_of(12), tree=(9, 4), max_new_tokens=8)
    with pytest.raises(ValueError, match=words):
        sequoia.generate(**given | REFUSED[words])

# --- 11  Decoding: NaN, the probe, the graph, the report ----------------------------------------------------
@pytest.mark.parametrize("broken", [0, 1], ids=["target", "draft"])
@pytest.mark.parametrize("method", some_quick(METHODS, "sequoia"))
def test_a_targets_nan_is_an_error_that_names_it_and_a_drafts_only_costs_speed(method, broken):
    """Whether it comes at once or later. And either leaves nothing behind for the next text."""
    pair = make_pair("llama")
    weight = pair[broken].lm_head.weight.data
    whole = weight.clone()
    decoder = Decoder(*pair, Tree([-1, 0, 0, 1, 2]), method, seeded(0))
    plain = plain_text(pair[0], prompt_of(10), max_new_tokens=16)
    for at_once, do_sample in itertools.product((True, False), (True, False)):
        assert_as_generate(decoder, prompt_of(10), max_new_tokens=8)
        decoder.on_step = lambda step: weight.fill_(torch.nan)
        if at_once:
            weight.fill_(torch.nan)
        is_error = pytest.raises(ValueError, match="the target's logits are NaN")
        with is_error if broken == 0 else contextlib.nullcontext():
            out = decoder.generate(prompt_of(10), do_sample=do_sample, max_new_tokens=16)
            assert out.shape == (1, 26)
            assert do_sample or out.equal(plain)
        weight.copy_(whole)

class CountsOn(transformers.GPT2LMHeadModel):
    """Takes only the first position and counts on from there, which is right for plain decoding."""
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **rest):
        counted = position_ids[:, :1] + torch.arange(input_ids.shape[1])
        return super().forward(input_ids, attention_mask=attention_mask, position_ids=counted, **rest)

class NumbersItself(transformers.GPT2LMHeadModel):
    """Wants no positions in `generate`, where it numbers the tokens from 2 on."""
    def prepare_inputs_for_generation(self, *given, **named):
        inputs = super().prepare_inputs_for_generation(*given, **named)
        inputs["position_ids"] = None
        return inputs

    def forward(self, input_ids=None, position_ids=None, past_key_values=None, **rest):
        if position_ids is None:
            past = past_key_values.get_seq_length()
            position_ids = torch.arange(past + 2, past + 2 + input_ids.shape[1])[None]
        return super().forward(input_ids, position_ids=position_ids, past_key_values=past_key_values, **rest)

class SeesSiblings(transformers.LlamaForCausalLM):
    """Shows every token all that stand before it in the cache, so a node also sees its elder siblings. Nor
    can its forward leave out logits, as code from a hub often cannot."""
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **rest):
        assert "logits_to_keep" not in rest
        if torch.is_tensor(attention_mask) and attention_mask.ndim == 4:
            rows, columns = attention_mask.shape[2:]
            attention_mask = torch.full_like(attention_mask, -torch.inf).triu(columns - rows + 1)
        return super().forward(input_ids, attention_mask, position_ids, **rest)

class ForgetsFarSlots(transformers.LlamaForCausalLM):
    """Loses sight of what stands more than 20 slots before a token."""
    def forward(self, input_ids=None, attention_mask=None, **rest):
        if torch.is_tensor(attention_mask) and attention_mask.ndim == 4:
            slots = torch.arange(attention_mask.shape[3])
            own = ((attention_mask == 0) * slots).amax(dim=3, keepdim=True)
            attention_mask = attention_mask.masked_fill(slots < own - 20, -torch.inf)
        return super().forward(input_ids, attention_mask, **rest)

@quick
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name, kind", [
    ("gpt2", CountsOn), ("gpt2", NumbersItself), ("llama", SeesSiblings), ("llama", ForgetsFarSlots)])
def test_the_probe_refuses_a_model_that_masks_or_counts_in_its_own_way(name, kind, dtype):
    """Also as a draft, which could not hurt the text, but would be useless."""
    target, draft = make_pair(name)
    draft.to(dtype).__class__ = kind
    for given in ((draft,), (target, draft)):
        with pytest.raises(ValueError, match=f"{kind.__name__} cannot verify a tree: a pass"):
            Decoder(*given, tree="none")

def test_in_bfloat16_a_trained_model_passes_the_probe_which_is_made_once_for_each_kind_of_attention():
    """Without a tree the text is then `generate`'s bit for bit."""
    target = transformers.AutoModelForCausalLM.from_pretrained(ROOT / "tiny" / "target", dtype=torch.bfloat16)
    with mock.patch.object(sequoia, "probe", wraps=sequoia.probe) as probe:
        for kind in ("sdpa", "eager"):
            target.set_attn_implementation(kind)
            for seed in range(4):
                prompt = prompt_of(2 + 6 * seed, 4096, seed)
                assert_as_generate(Decoder(target, tree="none"), prompt, max_new_tokens=8)
    assert probe.call_count == 2

LINEAR_BIASES = dict(d_model=64, n_heads=4, n_layers=2, expansion_ratio=2, initializer_range=0.15)
BART = dict(d_model=64, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=96, init_std=0.3,
            is_encoder_decoder=False, forced_eos_token_id=None)
ROFORMER = dict(is_decoder=True, initializer_range=0.3)

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind, given", [("Mpt", LINEAR_BIASES), ("Bart", BART), ("RoFormer", ROFORMER)])
def test_the_probe_refuses_biases_by_slot_and_counted_positions_in_all_dtypes(kind, given, dtype):
    for seed in range(8):
        torch.manual_seed(seed)
        with pytest.raises(ValueError, match=f"{kind}.* cannot verify a tree: a pass"):
            sequoia.checked(small_model(kind, **given).to(dtype))

@quick
def test_after_a_capture_that_fails_there_is_one_warning_no_other_attempt_and_the_text_goes_on(llama):
    error = RuntimeError("operation not permitted when stream is capturing")
    decoder = Captured(*llama, "auto")
    with mock.patch.object(torch.cuda, "CUDAGraph", side_effect=error) as attempt:
        with pytest.warns(UserWarning, match="without a CUDA graph: operation .* capturing") as caught:
            steps = assert_as_generate(decoder, prompt_of(12), max_new_tokens=200)
        assert_as_generate(decoder, prompt_of(12), max_new_tokens=20)
    assert len(caught) == 1
    assert attempt.call_count == 2              # the step's, and the one that makes generators usable again
    assert {NO_TREE, chain(7)} < {step.tree for step in steps}  # trials, as they need no capture

@quick
def test_each_tree_is_captured_once_in_the_decoders_pool_and_stream_and_not_again_in_a_call(llama):
    """A text of 250 tokens fills the first cache, but room for the next tokens is made at once."""
    decoder = Captured(*llama, (9, 4))
    counted = mock.patch.object(TreeStep, "capture", autospec=True, side_effect=TreeStep.capture)
    memory = mock.Mock()
    with form_of("captured"), counted as capture, mock.patch.object(torch.cuda, "graph", memory):
        memory.side_effect = EmulatedGraph.capture
        for length in (200, 60):
            assert_as_generate(decoder, prompt_of(length), max_new_tokens=100)
    trees = [call.args[0].layout.tree for call in capture.call_args_list]
    assert len(trees) == len({*trees})
    assert memory.call_args.kwargs == dict(capture_error_mode="thread_local")

@quick
def test_on_a_gpu_a_larger_tree_comes_first_and_none_and_sequences_of_its_size_are_timed_with_it():
    gpu = mock.Mock(device=torch.device("cuda:0"), parameters=list)
    with mock.patch.object(sequoia, "checked", lambda model: mock.Mock(model=model, vocabulary=1, context=1)):
        planner = Decoder(gpu, gpu).planners["some sampling"]
    assert (planner.tree.size, planner.tree.depth) == (64, 6)
    assert planner.trials == [planner.tree, NO_TREE, sequences(3, 21)]
    assert planner.next_tree(tokens_left=76, trial_cost=4) == planner.tree

@quick
def test_where_a_tree_must_be_worth_its_graph_it_is_replaced_only_for_more_than_five_percent_more_tokens():
    planner = Planner((8, 4), on_gpu=True)
    planner.steps = 8
    first = planner.tree
    for gain, stays in ((1.04, True), (1.06, False)):
        promise = lambda tree, rates: 1.0 if tree == first else gain
        with mock.patch.object(sequoia, "expected_tokens", promise):
            planner.plan_again(np.array([0.99, 0.01]))
        assert (planner.tree == first) == stays

@needs_cuda
@pytest.mark.parametrize("generator", [None, seeded(0, "cuda" if torch.cuda.is_available() else "cpu")])
def test_after_a_capture_that_cuda_broke_off_numbers_are_drawn_and_graphs_captured(generator):
    target, draft = (model.cuda() for model in make_pair("llama"))
    norm = target.model.norm
    waits = mock.Mock(side_effect=lambda x: type(norm).forward(norm, x) if x.sum().item() else None)
    for forward in (waits, partial(type(norm).forward, norm)):
        norm.forward = forward
        decoder = Decoder(target, draft, (9, 4), generator=generator)
        with warnings.catch_warnings(record=True, action="always") as caught:
            assert_as_generate(decoder, prompt_of(12).cuda(), max_new_tokens=14)
            decoder.generate(prompt_of(12).cuda(), do_sample=True, max_new_tokens=14)
        said = [str(one.message) for one in caught if "without a CUDA graph" in str(one.message)]
        assert len(said) == 2 * (forward is waits)
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        assert 0 <= torch.rand(1, generator=generator, device="cuda") < 1

@quick
def test_no_node_stands_behind_a_contexts_end():
    """But some may stand behind the text's."""
    short, long = make_pair("gpt2")[0], make_pair("llama")[0]
    for length, draft, last in ((20, short, chain(6)), (246, short, NO_TREE), (246, long, NO_TREE)):
        decoder = Captured(short, draft, chain(6))
        with form_of("static"):
            steps = assert_as_generate(decoder, prompt_of(length), max_new_tokens=11)
        assert steps[1].tree == chain(6)
        assert steps[-1].tree == last

@quick
def test_a_report_adds_up_and_steps_are_timed_without_what_feeds_the_prompt():
    """On a clock that passes move: the target's by a second, the draft's by a tenth."""
    pair = make_pair("llama")
    passes = collections.Counter()
    for model in pair:
        model.register_forward_hook(lambda model, *_: passes.update([model]))
    decoder = Decoder(*pair)
    with mock.patch.object(sequoia.time, "perf_counter", lambda: passes[pair[0]] + 0.1 * passes[pair[1]]):
        first, *others = steps = assert_as_generate(decoder, prompt_of(12), max_new_tokens=90)
    assert first.seconds is None
    assert first.tree == NO_TREE
    assert all(step.seconds == pytest.approx(0.9 + 0.1 * step.tree.depth) for step in others)
    report = decoder.report
    assert report.tokens == 90
    assert report.steps == len(steps)
    assert report.tree == [*decoder.planners.values()][0].tree
    # The prompt's pass, the steps, and the draft's passes over a text.
    fed = sum(step.tree.depth > 1 >= last.tree.depth for last, step in zip(steps, others))
    assert report.seconds == pytest.approx(1 + sum(step.seconds for step in others) + 0.1 * fed)
    assert f": {90 / len(steps):.2f} tokens per step, {90 / report.seconds:.1f} per second" in str(report)

def test_caches_are_freed_with_their_decoder(llama):
    """At once, because the next call may need the memory."""
    decoder = Decoder(*llama, (9, 4))
    decoder.generate(prompt_of(10), max_new_tokens=20)
    cache = weakref.ref(decoder.target)
    del decoder
    assert cache() is None

@quick
def test_a_folder_with_this_file_makes_generate_decode_with_trees(bundled, tmp_path, monkeypatch):
    target, draft = bundled
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    (tmp_path / "custom_generate").mkdir()
    shutil.copy(sequoia.__file__, tmp_path / "custom_generate" / "generate.py")
    given = dict(TOKENIZER("import os\n", return_tensors="pt"), max_new_tokens=20, tokenizer=TOKENIZER,
                 stop_strings=["("])
    steps = []
    out = target.generate(**given, custom_generate=str(tmp_path), trust_remote_code=True,
                          assistant_model=draft, tree=chain(3), on_step=steps.append)
    assert out.equal(target.generate(**given))
    assert max(step.tree.size for step in steps) == 4

# --- 13  Passes ---------------------------------------------------------------------------------------------
def both_texts(target, draft):
    """A greedy and a sampled text."""
    texts = []
    for do_sample in (False, True):
        # An offloaded model has no graph, and a graph draws random numbers for all nodes.
        decoder = Decoder(target, draft, (9, 4), generator=seeded(0, target.device), cuda_graph=False)
        prompt = prompt_of(30).to(target.device)
        texts.append(decoder.generate(prompt, do_sample=do_sample, max_new_tokens=20).tolist())
    return texts

@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_and_traced_output_equals_plain_output(name):
    pair = make_pair(name)
    expected = both_texts(*pair)
    for model in pair:
        assert sequoia.pack(model) is model
    assert both_texts(*pair) == expected

@quick
@pytest.mark.skipif(not sequoia.PACKS, reason="no bfloat16 here")
@torch.inference_mode()
def test_layers_are_packed_with_biases_and_once_if_shared_but_not_those_with_a_forward_of_their_own():
    """In bfloat16. The draft has the target's first layer, as in LayerSkip, and its head."""
    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    target, draft = pair = [model.bfloat16() for model in make_pair("qwen2")]
    first = target.model.layers[0]
    first.self_attn.q_proj.bias.data.normal_()
    first.mlp.up_proj.__class__ = Doubled
    draft.model.layers = target.model.layers[:1]
    draft.lm_head = target.lm_head
    expected = [model(prompt_of(30)).logits for model in pair]
    for model in 2 * pair:                      # a second time does no harm
        assert hasattr(sequoia.pack(model), "_sequoia_pass")
    assert all(layer.weight.is_mkldnn for layer in target.modules() if type(layer) is torch.nn.Linear)
    for model, logits in zip(pair, expected):
        torch.testing.assert_close(model(prompt_of(30)).logits, logits, atol=0.1, rtol=0.1)
        # Both decode, and what was traced gives the same as what Python runs.
        assert_as_generate(Decoder(model, tree="none"), prompt_of(30), max_new_tokens=20)

@quick
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_trace_that_is_right_for_its_own_example_alone_is_given_up(dtype):
    """One that lost its writes, one whose positions are constants, and one wrong for more nodes than its
    three. Another holds a loop over the experts that its one run hit."""
    def lost_writes(trace, store, *inputs):
        with mock.patch.object(torch.Tensor, "index_copy_", lambda stored, *_: stored):
            return model.forward_of(store, *inputs)

    def constant(trace, store, tokens, nodes, slots, positions, *places):
        return trace(store, tokens, nodes, slots, positions * 0 + 4, *places)

    def more_nodes(trace, *inputs):
        return trace(*inputs) * (1 + (len(inputs[2]) > 3))

    for spoilt in (lost_writes, constant, more_nodes, None):
        model = make_pair("llama")[0].to(dtype)
        model.forward_of = CachedModel(model).forward
        with mock.patch.object(torch.jit, "freeze", lambda trace: SimpleNamespace(
                forward=partial(spoilt, trace) if spoilt else trace)):
            with pytest.warns(UserWarning) if spoilt else contextlib.nullcontext():
                assert hasattr(sequoia.pack(model), "_sequoia_pass") == (not spoilt)
    pair = make_pair("mixtral", experts_implementation="eager")
    expected = both_texts(*pair)
    with pytest.warns(UserWarning):
        assert not hasattr(sequoia.pack(pair[0]), "_sequoia_pass")
    assert both_texts(*pair) == expected

@pytest.mark.skipif(not sequoia.PACKS, reason="no bfloat16 here")
def test_packing_that_changes_numbers_is_an_error_and_where_torch_cannot_pack_a_model_is_only_traced():
    def pack_wrongly(layer):
        """By more than rounding, in one layer of fifteen."""
        layer.weight[0] *= 1 + 0.5 * (layer.out_features == 64)

    with mock.patch.object(sequoia, "pack_linear", pack_wrongly):
        with pytest.raises(ValueError, match="numbers of LlamaForCausalLM.* load it again, without pack"):
            sequoia.pack(make_pair("llama")[0].bfloat16())
        with mock.patch.object(sequoia, "PACKS", False):
            assert hasattr(sequoia.pack(make_pair("llama")[0].bfloat16()), "_sequoia_pass")

@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_offloaded_output_is_the_same_also_after_a_pass_that_ctrl_c_broke_off(name, device):
    expected = both_texts(*[model.to(device) for model in make_pair(name)])
    target, draft = [sequoia.offload(model, device) for model in make_pair(name)]
    assert sequoia.offload(draft, device) is draft              # a second time does no harm
    *_, last = next(module for module in target.modules() if isinstance(module, torch.nn.ModuleList))
    home = {name: weight.data_ptr() for name, weight in target.named_parameters()}
    assert both_texts(target, draft) == expected
    for register in (last.register_forward_pre_hook, last.register_forward_hook):
        with register(mock.Mock(side_effect=KeyboardInterrupt)), pytest.raises(KeyboardInterrupt):
            target(prompt_of(30).to(device))
        assert both_texts(target, draft) == expected
    # At most the last layer's copy is left on the device.
    away = [name for name, weight in target.named_parameters() if weight.data_ptr() != home[name]]
    assert all(".1." in name for name in away)

def test_a_target_with_a_layer_on_a_disk_writes_generates_text_and_pack_leaves_that_layer_alone(tmp_path):
    pytest.importorskip("accelerate", reason="transformers needs accelerate for device maps")
    pair = make_pair("llama")
    pair[0].save_pretrained(tmp_path / "target")
    places = dict.fromkeys(["model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"], "cpu")
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    for dtype, tree in ((torch.float32, (9, 4)), (torch.bfloat16, "none")):
        mapped = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "target", dtype=dtype, device_map=places, offload_folder=tmp_path)
        assert_as_generate(Decoder(mapped, pair[1], tree), prompt_of(20), max_new_tokens=12)
        with pytest.warns(UserWarning, match="cannot be traced"):
            sequoia.pack(mapped)
        assert_as_generate(Decoder(mapped, pair[1], tree), prompt_of(20), max_new_tokens=12)

# --- Ranks that share a target ------------------------------------------------------------------------------
# What each of two ranks runs. They have other clocks and other random numbers; their
# drafts disagree, as if by rounding; and only rank 0 runs out of time.
ON_A_RANK = """
import itertools, json, os, random, sys, types, torch, transformers, sequoia
torch.set_num_threads(1)
rank = int(os.environ["RANK"])
random.seed(rank)
torch.manual_seed(rank)
clock = itertools.accumulate(iter(random.random, None))
sequoia.time = types.SimpleNamespace(perf_counter=lambda: next(clock))
sequoia.WORTH_TRIALS = sequoia.WORTH_A_LOOK = 0
load = transformers.AutoModelForCausalLM.from_pretrained
target = sequoia.pack(load("target", distributed_config={"tp_plan": "auto"}))
draft = load("draft")
draft.lm_head.weight.data = draft.lm_head.weight.data.roll(rank, 0)
for tree, how in (("9x4", {}), ("auto", {"do_sample": True}), ("none", {"max_time": rank})):
    steps = []
    decoder = sequoia.Decoder(target, draft, tree, on_step=steps.append)
    text = decoder.generate(torch.arange(2, 12)[None], max_new_tokens=60, **how)[0].tolist()
    print(json.dumps([text, steps]))
sys.exit(sequoia.main(["--tree", "9x4", "--max-new-tokens", "9"]))
"""

def test_ranks_that_share_a_target_take_the_same_steps_to_the_text_of_one_process(tmp_path):
    pytest.importorskip("accelerate", reason="transformers needs accelerate for tensor parallelism")
    pair = make_pair("llama", num_hidden_layers=2)
    for model, name in zip(pair, ("target", "draft")):
        model.save_pretrained(tmp_path / name)
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    given = dict(os.environ, PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1",
                 MASTER_ADDR="localhost", MASTER_PORT=str(port), WORLD_SIZE="2", TORCHELASTIC_RUN_ID="test")
    ranks = [subprocess.Popen([sys.executable, "-c", ON_A_RANK], cwd=tmp_path, text=True,
                              stdout=subprocess.PIPE, env=dict(given, RANK=rank, LOCAL_RANK=rank))
             for rank in "01"]
    try:
        printed, others = (rank.communicate(timeout=120)[0].splitlines() for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()                         # where they wait for each other
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert printed[:3] == others                # only rank 0 prints the command line's text
    assert printed[3] == "import os"
    (greedy, _), (_, steps), (short, _) = map(json.loads, others)
    expected = pair[0].generate(torch.arange(2, 12)[None], max_new_tokens=60, do_sample=False)
    assert greedy == expected[0].tolist()
    assert len({tuple(tree) for tree, *_ in steps}) > 3                 # auto tried trees
    assert short == greedy[:11]

# --- 14  The command line -----------------------------------------------------------------------------------
def run_main(capfd, *arguments):
    code = sequoia.main(list(arguments))
    out, err = capfd.readouterr()
    return code, out.removesuffix("\n"), err

@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Models of two layers with the bundled tokenizer: a good one, and others by what they have or lack."""
    root = tmp_path_factory.mktemp("models")
    target, _ = make_pair("llama", vocab_size=len(TOKENIZER), bos_token_id=None)
    for name in ("good", "chat", "more layers", "wider", "unknown", "renamed"):
        target.save_pretrained(root / name)
        TOKENIZER.save_pretrained(root / name)
    config = json.loads((root / "good" / "config.json").read_text())
    for name, changes in {"more layers": dict(num_hidden_layers=4), "wider": dict(intermediate_size=64),
                          "unknown": dict(model_type="medusa")}.items():
        (root / name / "config.json").write_text(json.dumps(config | changes))
    words = json.loads((root / "good" / "tokenizer.json").read_text())
    ids = words["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (root / "renamed" / "tokenizer.json").write_text(json.dumps(words))
    template = "{{ messages[0].role }}:{{ messages[0].content }}{% if add_generation_prompt %}<it>{% endif %}"
    (root / "chat" / "chat_template.jinja").write_text(template)
    return root

USUAL = ("--max-new-tokens", "16", "--prompt", "import ", "--dtype", "float32")

@quick
def test_what_is_printed_is_generates_text_and_on_a_terminal_alone_also_progress(bundled, capfd):
    transformers.utils.logging.enable_progress_bar()
    with mock.patch.object(sys.stderr, "isatty", lambda: True):
        run_main(capfd, "--top-p=2")
    assert transformers.utils.logging.is_progress_bar_enabled()
    ids = TOKENIZER("import ", return_tensors="pt").input_ids
    expected = TOKENIZER.decode(plain_text(bundled[0], ids, max_new_tokens=16)[0])
    for more in ([], ["--tree=none"], ["--tree=8x4", "--offload"]):
        code, text, err = run_main(capfd, *USUAL, "--temperature", "0", *more)
        assert (code, text) == (0, expected)
        assert re.match(r"\ntokens 16, steps \d+, seconds ", err)
    assert "tree 8x4" in err

def test_a_seed_names_the_text_with_a_fixed_tree(folders, capfd):
    given = (*USUAL, f"--target={folders / 'good'}", f"--draft={folders / 'good'}", "--tree=8x4")
    texts = [run_main(capfd, *given, "--seed", seed)[1] for seed in "001"]
    assert texts[0] == texts[1] != texts[2]

def test_tokens_are_cut_as_the_options_say_and_by_default_not_at_all(capfd):
    """A model's own default of 50 likeliest tokens must not come in."""
    with mock.patch.object(sequoia, "Sampling", side_effect=Sampling) as made:
        for cuts in (["--temperature=0.5", "--top-k=7", "--top-p=0.9"], []):
            assert sequoia.main(["--tree=none", "--max-new-tokens=1", *cuts]) == 0
    (temperature, top_k, top_p), plain = [call.args[1] for call in made.call_args_list]
    assert temperature.temperature == 0.5
    assert (top_k.top_k, top_p.top_p) == (7, 0.9)
    assert [type(one) for one in plain] == [Temperature]

@quick
def test_explain_draws_trees_of_the_drafts_first_choices_and_writes_the_same_greedy_text(bundled, capfd):
    given = (*USUAL, "--max-new-tokens=5", "--tree=8x4")
    greedy = run_main(capfd, *given, "--temperature=0")[1]
    code, out, _ = run_main(capfd, *given, "--temperature=0.01", "--explain")           # nearly greedy
    added = "".join(map(ast.literal_eval, re.findall("^adds (.*)", out, flags=re.MULTILINE)))
    assert code == 0
    assert ("import " + added).startswith(greedy)
    *steps, _ = re.split(r"^adds .*\n+", out + "\n", flags=re.MULTILINE)
    assert 2 <= len(steps) <= 5
    drawn = r"(    ){0,3}['\"].*['\"]\n"
    tried = r".*: R .* / D .* = .*: (accepted|rejected)\n"
    for step in steps:
        assert re.fullmatch(f"({drawn}){{8}}({tried})*.* is drawn from what is left, with R 1.00\n", step)
    children = re.findall(r"^    (\S.*)", steps[0], flags=re.MULTILINE)
    ids = TOKENIZER("import ", return_tensors="pt").input_ids
    best = bundled[1](ids).logits[0, -1].topk(len(children)).indices
    assert children == [repr(TOKENIZER.decode(token)) for token in best] and len(best) > 1

def test_chat_puts_the_prompt_through_the_template_and_prints_the_answer_alone(folders, capfd):
    given = (f"--target={folders / 'chat'}", "--tree=none", "--temperature=0", "--chat")
    code, text, _ = run_main(capfd, *USUAL, *given)
    target = transformers.AutoModelForCausalLM.from_pretrained(folders / "chat")
    ids = TOKENIZER("user:import <it>", return_tensors="pt").input_ids
    answer = plain_text(target, ids, max_new_tokens=16)[0, ids.shape[1] :]
    assert (code, text) == (0, TOKENIZER.decode(answer, skip_special_tokens=True))

# The arguments after those for a good pair, and the words of the one line that they cause.
BAD_REQUESTS = {
    "--top-p=1.5": "top_p", "--temperature=-1": "temperature", "--seed=123456789012345678901": "[Oo]verflow",
    "--max-new-tokens=0": "max_new_tokens", "--prompt=": "no tokens", "--prompt=\udcff": "surrogates",
    "--top-k=-4": "top_k", "--tree=16x0": "tree must be .*16x0", "--tree=16x1": "too large",
    "--tree=1024x2": "too large", f"--draft={ROOT / 'tiny' / 'draft'}": "give the target's --draft",
    "--tree=banana": "tree must be .*banana", "--tree=0x2": "tree must be .*0x2", "--tree=100x2": "too large",
    "--tree=1025x7": "of up to 1024 nodes", "--dtype=int7": "int7", "--chat": "chat.template",
    "--explain --top-k=5": "all tokens", "--explain --method=topk": "Algorithm 2.* --method",
    "--explain --temperature=0": "Algorithm 2.* above 0",
    "--target=/no/such": "/no/such", "--device=banana": "banana", "--draft=FOLDER/unknown": "medusa",
    "--target=FOLDER/more layers": "18 weights missing or of other shapes: .*layers.[23]",
    "--draft=FOLDER/wider": "6 weights missing.* shapes"}

@pytest.mark.parametrize("words", some_quick(BAD_REQUESTS, *[*BAD_REQUESTS][:6], "--draft=FOLDER/wider"))
def test_a_bad_request_is_one_line_and_exit_code_2_and_most_are_found_before_weights_are_loaded(
        folders, capfd, words):
    good = [f"--target={folders / 'good'}", f"--draft={folders / 'good'}", "--tree=3x2", "--max-new-tokens=4"]
    given = [word.replace("FOLDER", str(folders)) for word in re.split(" (?=--)", words)]
    with mock.patch.object(sequoia, "load", wraps=sequoia.load) as load:
        code, out, err = run_main(capfd, *good, *given)
    assert (code, len(err.splitlines())) == (2, 1)
    assert not load.called or re.match("--(dtype|(target|draft)=FOLDER)", words)
    assert re.match(f"sequoia.py: \\w+: .*{BAD_REQUESTS[words]}", err)

def test_the_exit_code_is_2_for_what_the_parser_refuses_and_130_after_ctrl_c(capfd):
    for words, code, out, err in (("--seed=x", 2, 0, 1), ("--method=magic", 2, 0, 1), ("--help", 0, 40, 0)):
        with pytest.raises(SystemExit, match=str(code)):
            sequoia.main([words])
        printed = capfd.readouterr()
        assert len(printed.out.splitlines()) >= out
        assert len(printed.err.splitlines()) == err
    with mock.patch.object(sys, "argv", ["sequoia.py", "--top-p=2"]), pytest.raises(SystemExit, match="2"):
        runpy.run_path(sequoia.__file__, run_name="__main__")
    capfd.readouterr()
    with mock.patch.object(Decoder, "generate", side_effect=KeyboardInterrupt):
        assert run_main(capfd, "--tree=none") == (130, "", "")

def test_a_closed_pipe_is_no_error():
    """Whether what is printed waits in a buffer or not."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    for words in (["--tree=none", "--max-new-tokens=200"], ["--explain", "--max-new-tokens=2"]):
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run([sys.executable, sequoia.__file__, *words], stdout=writer, text=True,
                              stderr=subprocess.PIPE, env=environment)
        os.close(writer)
        assert (done.returncode, "Error" in done.stderr) == (0, False)

@quick
def test_a_copy_is_silent_reads_no_environment_and_says_what_it_lacks(capfd, monkeypatch, tmp_path):
    path = shutil.copy(sequoia.__file__, tmp_path / "copied.py")
    # torch itself asks the environment how to look for a GPU.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with mock.patch.object(os, "environ", None), warnings.catch_warnings(action="error"):
        copied = runpy.run_path(path)
    assert capfd.readouterr() == ("", "")
    assert copied["main"]([]) == 2
    assert str(tmp_path / "tiny" / "target") in capfd.readouterr().err

def test_the_promised_names_and_the_licence_are_there_and_the_docstrings_examples_print_what_is_shown():
    promised = """Decoder METHODS NONE NO_TREE Planner Step Tree chain expected_tokens generate k_ary offload
        optimal_tree pack plan sample_and_verify sequences step_plainly verify_one_node"""
    assert set(sequoia.__all__) == set(promised.split())
    assert "MIT" in sequoia.__doc__
    failed, attempted = doctest.testmod(sequoia)
    assert failed == 0 < attempted

# --- bench.py -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", METHODS)
def test_the_benchs_chance_of_each_child_is_that_of_all_outcomes(name):
    method = METHODS[name]
    run = EveryRun()
    for seed, tokens in itertools.product(range(4), ([2, 0, 1], [2, 0, 2])):
        if name in (*BY_RATIOS[1:], "naive") or tokens[2] == 1:     # others never draw a token twice
            p, q = random_rows(1, 4, seed=seed).log()
            tokens = torch.tensor([tokens])
            found = torch.zeros(4, dtype=torch.float64)
            for chance, rank in run.results(
                    lambda: method.verify(method.target_P(p, run.uniform), q, tokens, run)[0].item()):
                found[rank] += chance
            assert bench.chances_of(method, p, q, tokens)[0].tolist() == pytest.approx(found[:3].tolist())

def test_an_estimate_is_a_ratio_of_sums_with_the_interval_of_the_jackknife():
    """That of a mean is Student's: 2.262 times the standard error of ten numbers."""
    mine, other = np.array([[1.0], [2.0], [3.0]]), np.array([[2.0], [4.0], [6.0]])
    assert bench.over(mine, other) == pytest.approx((2.0, 0.0))
    column = np.random.default_rng(0).random((10, 1))
    mean = bench.estimate(lambda total, count: total[0] / count[0], column, np.ones((10, 1)))
    assert mean.value == pytest.approx(column.mean())
    assert bench.show(bench.Estimate(1.0, 0.0)) == "1.00"
    assert bench.show(bench.Estimate(1.0, 0.25)) == "1.00 ± 0.25"
    assert mean.half == pytest.approx(2.262 * column.std(ddof=1) / 10**0.5, rel=0.01)

def test_a_contests_verdict_names_the_fastest_and_keeps_the_ratios_that_readme_quotes(capsys):
    report = bench.Report(None)
    paces = {"generate": 8.0, "no tree": 4.0, "sequences": 1.0, "sequoia": 2.0}
    best = {name: np.array([[pace, 10, 5]] * 3) for name, pace in paces.items()}
    bench.verdict(best, "greedy", report)
    said = capsys.readouterr().out
    assert "the fastest was `sequences`, 8.00 times as fast as `generate` and 2.00 times" in said
    assert "2.00 times as fast as no tree. So this draft pays" in said
    assert report.numbers["greedy/sequoia / sequences"].value == 0.5
    assert report.numbers["greedy/sequoia"].value == 4.0
    assert bench.with_numbers("<!--greedy/pace--><!---->", report.numbers) == "<!--greedy/pace-->1<!---->"

@quick
def test_readmes_numbers_are_those_that_the_bench_wrote_down_and_a_changed_digit_shows():
    text = (ROOT / "README.md").read_text("utf-8")
    numbers = json.loads((ROOT / "figures" / "numbers.json").read_text("utf-8"))
    assert bench.with_numbers(text, numbers) == text
    for mark in re.findall(r"<!--[^>]+-->[^<]*\d[^<]*<!---->", text):
        name, shown = re.match("(<!--[^>]+-->)(.*)<!---->", mark, re.DOTALL).groups()
        other = shown.translate(str.maketrans("0123456789", "1234567890"))
        changed = text.replace(mark, f"{name}{other}<!---->")
        assert bench.with_numbers(changed, numbers) == text != changed

@pytest.mark.skipif(not (ROOT / "README.md").exists(), reason="a copy without its README")
def test_the_readmes_examples_run_in_order_and_print_what_is_shown(monkeypatch, capsys, tmp_path):
    """Among files as a clone has them. A plain block right behind an example is what it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    for name in ("tiny", "sequoia.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    without_times = partial(re.sub, r"\d+\.\d+(?= (and \d+\.\d+ )?seconds)", "...")
    text = (ROOT / "README.md").read_text("utf-8")
    blocks = re.findall(r"```python\n(.*?)```(?:\n\n```\n(.*?)```)?", text, re.DOTALL)
    assert blocks
    namespace = {}
    for block, shown in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
        assert without_times(capsys.readouterr().out) == without_times(shown) or not shown
