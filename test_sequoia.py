"""The guarantees of sequoia.py, as tests: slow, obvious oracles beside the fast code.
Exact tests enumerate every case. Statistical tests are seeded, and fail if what they see has a chance below
1e-9: a false alarm from any of them has a chance below 1e-6.
"""
import collections
import contextlib
import copy
import dataclasses
import doctest
import functools
import gc
import heapq
import json
import math
import os
import random
import re
import shutil
import socket
import statistics
import subprocess
import sys
import warnings
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import bench
import sequoia
from sequoia import (METHODS, Decoder, Tree, chain, expected_tokens, expected_tokens_table, k_ary,
                     optimal_tree, sample_and_verify, sample_with_replacement, sequences)

settings.register_profile("sequoia", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("sequoia")
# On busy cores threads would wait for each other.
torch.set_num_threads(1)
ROOT = Path(sequoia.__file__).parent
# Those whose children are accepted by ratios, so that chances can be summed up.
SUMMED_UP = [name for name, method in METHODS.items() if method.ratios]


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """The command line sets how warnings look and how much transformers says. Every test starts anew."""
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    verbosity = transformers.utils.logging.get_verbosity()
    yield
    transformers.utils.logging.set_verbosity(verbosity)


class Tape(TorchDispatchMode):
    """Notes a graph's operators while they are captured. What a GPU forbids then is an error: values that go
    to the host, and shapes that depend on values."""
    FORBIDDEN = ("local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal")

    def __init__(self, graph):
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = operator.__name__.split(".")[0].strip("_")
        masks = [x for x in tree_leaves(args[1:]) if torch.is_tensor(x) and x.dtype == torch.bool]
        if name in self.FORBIDDEN or name == "index" and masks:
            raise RuntimeError(f"operation not permitted when stream is capturing: {operator}")
        given = {place(x) for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)}
        writes = []
        for i, argument in enumerate(operator._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                writes += tree_leaves(args[i] if i < len(args) else kwargs.get(argument.name))
        for tensor in writes:
            self.graph.remember(tensor)
        out = operator(*args, **kwargs)
        made = [x for x in tree_leaves(out) if torch.is_tensor(x) and place(x) not in given]
        self.graph.pool |= {place(x): x.untyped_storage() for x in made}
        if writes or made:
            self.graph.calls.append((operator, args, kwargs, [] if writes else made))
        return out


def place(tensor):
    return tensor.untyped_storage().data_ptr()


class GraphOnTheCPU:
    """A stand-in for a CUDA graph. Its capture changes nothing. A replay runs the captured operators again, on
    the same memory: it would show any value or shape that Python has decided at the capture. What they made
    is overwritten before each replay."""
    made = []

    def __init__(self):
        self.calls = []          # operator, its arguments, and which tensors it makes
        self.pool = {}           # by address, the memory made in the capture
        self.before = {}         # by address, memory that was there, and a copy
        self.generators = [torch.default_generator]
        self.replays = 0
        GraphOnTheCPU.made.append(self)

    def register_generator_state(self, generator):
        self.generators.append(generator)

    def remember(self, tensor):
        if torch.is_tensor(tensor) and place(tensor) not in {*self.pool, *self.before}:
            self.before[place(tensor)] = (tensor.untyped_storage(), tensor.untyped_storage().clone())

    @contextlib.contextmanager
    def capture(self):
        states = [generator.get_state() for generator in self.generators]
        with Tape(self):
            yield
        for storage, copied in self.before.values():
            storage.copy_(copied)
        for generator, state in zip(self.generators, states):
            generator.set_state(state)

    def replay(self):
        self.replays += 1
        for storage in self.pool.values():
            # All ones: NaN, or -1.
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(255)
        for operator, args, kwargs, made in self.calls:
            out = operator(*args, **kwargs)
            for old, new in zip(made, tree_leaves(out)):
                assert old.shape == new.shape and old.dtype == new.dtype
                old.copy_(new)


@pytest.fixture(autouse=True)
def graphs(request, monkeypatch):
    """The graphs captured in a test, in their order. Tests that need CUDA have CUDA's."""
    if "skipif" not in request.keywords:
        monkeypatch.setattr(torch.cuda, "CUDAGraph", GraphOnTheCPU)
        monkeypatch.setattr(torch.cuda, "graph", GraphOnTheCPU.capture)
        monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    GraphOnTheCPU.made.clear()
    return GraphOnTheCPU.made


def seeded(seed, device="cpu"):
    return torch.Generator(device).manual_seed(seed)


# --- 1  Token trees (section 3.1) ---------------------------------------------------------------------------


def all_trees(size):
    """Every tree of `size` nodes: the parents never decrease, and stand before their children."""
    if size == 1:
        return [Tree([-1])]
    found = []
    for tree in all_trees(size - 1):
        for parent in range(max(0, tree.parents[-1]), size - 1):
            found.append(Tree((*tree.parents, parent)))
    return found


SMALL_TREES = [tree for size in range(1, 9) for tree in all_trees(size)]


def test_a_tree_knows_its_shape():
    tree = Tree([-1, 0, 0, 0, 1, 1, 4])
    assert tree.size == 7 and tree.depth == 4
    assert tree.depths == (0, 1, 1, 1, 2, 2, 3) and tree.ranks == (0, 0, 1, 2, 0, 1, 0)
    assert tree.children == ((1, 2, 3), (4, 5), (), (), (6,), (), ())
    assert sequences(2, 3) == Tree([-1, 0, 0, 1, 2, 3, 4])
    assert k_ary(2, 3) == Tree([-1, 0, 0, 1, 1, 2, 2])
    assert hash(tree) == hash(Tree(np.array(tree.parents)))


def test_paths_and_masks_are_those_of_the_tree():
    shuffle = random.Random(0).shuffle
    for tree in SMALL_TREES:
        paths = tree.paths()
        shuffle(paths)
        assert Tree.from_paths(paths) == tree == Tree.from_paths([(), *map(list, paths)])
        # A node sees its ancestors and itself.
        for node, row in enumerate(tree.mask.tolist()):
            seen = {node}
            while (node := tree.parents[node]) >= 0:
                seen.add(node)
            assert {i for i, visible in enumerate(row) if visible} == seen


# --- 2  Tree construction: the dynamic program (section 3.1, equation 1; appendix) --------------------------


def score(path, rates):
    """f(v), Definition 3.3: the product of the rates on the way. The last row is for all deeper levels."""
    return math.prod(rates[min(level, len(rates) - 1)][rank] for level, rank in enumerate(path))


def best_first(rates, size, depth=math.inf):
    """The nodes with the highest scores, one by one. While rates fall with rank, parents come before them."""
    taken = []
    frontier = [(-1.0, ())]
    while len(taken) < size:
        path = heapq.heappop(frontier)[1]
        taken.append(path)
        found = [(*path, 0)]
        if path:
            next_sibling = (*path[:-1], path[-1] + 1)
            found.append(next_sibling)
        for path in found:
            if len(path) < depth and path[-1] < len(rates[0]):
                heapq.heappush(frontier, (-score(path, rates), path))
    return Tree.from_paths(taken)


@st.composite
def acceptance_rates(draw):
    """1-D or 2-D rates, sorted or not, zeros and sums of 1 among them."""
    levels = draw(st.integers(1, 3))
    ranks = draw(st.integers(1, 4))
    shares = st.lists(st.integers(0, 9), min_size=ranks + 1, max_size=ranks + 1).filter(any)
    weights = draw(st.lists(shares, min_size=levels, max_size=levels))
    # The last share is the chance that all are rejected.
    rates = np.array(weights)[:, :ranks] / np.sum(weights, axis=1, keepdims=True)
    if draw(st.booleans()):
        rates = -np.sort(-rates, axis=1)
    if levels == 1 and draw(st.booleans()):
        return rates[0]
    return rates


@given(acceptance_rates(), st.none() | st.integers(1, 8))
def test_optimal_tree_equals_brute_force(rates, depth):
    branch = rates.shape[-1]
    levels = depth or 8
    best = np.full((9, levels + 1), -np.inf)
    for tree in SMALL_TREES:
        if max(map(len, tree.children)) <= branch and tree.depth <= levels:
            value = 1 + sum(score(path, np.atleast_2d(rates)) for path in tree.paths())
            assert math.isclose(value, expected_tokens(tree, rates), abs_tol=1e-12)
            best[tree.size, tree.depth:] = np.maximum(best[tree.size, tree.depth:], value)
    np.testing.assert_allclose(expected_tokens_table(rates, 8, levels), best, atol=1e-12)
    largest = np.flatnonzero(best[:, -1] > 0).max()
    for size in range(1, 9):
        if size > largest:
            with pytest.raises(ValueError, match=f"largest has {largest}$"):
                optimal_tree(rates, size, depth)
            continue
        tree = optimal_tree(rates, size, depth)
        assert tree.size == size and tree.depth <= levels and max(map(len, tree.children)) <= branch
        assert math.isclose(expected_tokens(tree, rates), best[size, -1], abs_tol=1e-12)


@pytest.mark.parametrize("rates, depth", [
    ([sequoia.PRIOR], None), ([sequoia.PRIOR], 10), ([[2.0**-k for k in range(1, 20)]], 8),
    ([[0.5, 0.2, 0.1, 0.1], [0.9, 0.1, 0, 0], [0.3, 0.3, 0.3, 0.1]], 12)])
def test_optimal_tree_equals_best_first_search_at_768_nodes(rates, depth):
    greedy = best_first(rates, 768, depth or math.inf)
    tree = optimal_tree(rates, 768, depth)
    assert tree.size == greedy.size == 768 and tree.depth <= (depth or 768)
    assert expected_tokens(tree, rates) == pytest.approx(expected_tokens(greedy, rates), abs=1e-9)


def test_a_child_beyond_the_last_rate_is_never_accepted_and_deep_trees_need_no_recursion():
    assert expected_tokens(Tree([-1, 0, 0, 2]), [0.5]) == 1.5
    assert expected_tokens(chain(2), []) == 1 and optimal_tree([1.0], 150) == chain(149)


NO_TREES = [
    (Tree, [()], "root"), (Tree, [(0,)], "root"),
    (Tree, [(-1, 0, 1, 0)], "level order"), (Tree.from_paths, [[(0, 0)]], r"\(0,\)"),
    (Tree.from_paths, [[(0,), (0, 2)]], "elder sibling"), (Tree.from_paths, [[(-1,)]], "elder sibling"),
    (optimal_tree, [[0.5], 0], "at least 1"), (optimal_tree, [[0.5], 3, 0], "at least 1"),
    (expected_tokens, [chain(1), [1.1]], "from 0 to 1"), (optimal_tree, [[], 2], "largest has 1$")]
for _call in (optimal_tree, expected_tokens_table):
    for _rates, _message in (
            ([0.5, -0.1], "from 0 to 1"), ([0.5, np.nan], "from 0"), ([np.inf], "from 0"),
            ([[0.6, 0.1], [0.6, 0.5]], "at most 1 in sum"), (np.zeros((0, 3)), "zero-size")):
        NO_TREES.append((_call, [_rates, 3, 3], _message))


@pytest.mark.parametrize("call, arguments, message", NO_TREES)
def test_what_makes_no_tree_is_an_error_that_says_why(call, arguments, message):
    with pytest.raises(ValueError, match=message):
        call(*arguments)


# --- 3  Sampling (section 3.2, Algorithm 2 line 5) ----------------------------------------------------------


def scores_of_draft(Q):
    return sequoia.never_zero(Q.log())


def all_proposals(name, draft_probs, k):
    """All sequences of k proposals from draft_probs (V,), (sequences, k), -1 for none, and their chances."""
    propose = METHODS[name].propose
    if propose is sequoia.most_likely:
        return propose(scores_of_draft(draft_probs)[None], k), torch.ones(1, dtype=torch.float64)
    repeats = propose is sample_with_replacement
    found = [((), 1.0)]
    for _ in range(k):
        longer = []
        for sequence, chance in found:
            left = {token: p for token, p in enumerate(draft_probs.tolist())
                    if p > 0 and (repeats or token not in sequence)}
            if not left:
                # What the draft gives no chance comes last, all alike.
                left = {token: 1.0 for token in range(len(draft_probs)) if token not in sequence}
            total = sum(left.values())
            for token, p in left.items():
                longer.append(((*sequence, token), chance * p / total))
        found = longer
    proposals, chances = zip(*found)
    return torch.tensor(proposals), torch.tensor(chances, dtype=torch.float64)


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
        if total >= 10 and expected[i + 1:].sum() >= 10:
            starts.append(i + 1)
            total = 0.0
    observed = np.add.reduceat(observed, starts)
    expected = np.add.reduceat(expected, starts)
    statistic = ((observed - expected) ** 2 / expected).sum()
    halves = torch.tensor([max(len(starts) - 1, 1) / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(*halves).item()


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("draft_probs", [[0.5, 0.3, 0.15, 0.05], [0.7, 0.3, 0, 0], [0, 0, 1, 0], [0.25] * 4])
def test_each_proposal_is_distributed_as_the_draft_without_the_earlier_ones(name, draft_probs):
    """Over all sequences of V proposals: also those past the draft's support, of which there are none."""
    n = 100_000
    draft_probs = torch.tensor(draft_probs, dtype=torch.float32)
    tokens = METHODS[name].propose(scores_of_draft(draft_probs).expand(n, 4), 4, seeded(0))
    if METHODS[name].propose is sequoia.most_likely:
        likeliest = draft_probs.sort(descending=True).values.expand(n, 4)
        assert torch.where(tokens >= 0, draft_probs[tokens], 0).equal(likeliest)
        return
    powers = 5 ** torch.arange(4)
    possible, chances = all_proposals(name, draft_probs.double(), 4)
    expected = torch.zeros(5**4, dtype=torch.float64)
    expected[((possible + 1) * powers).sum(dim=1)] = n * chances
    observed = ((tokens + 1) * powers).sum(dim=1).bincount(minlength=5**4)
    assert chi_square_tail(observed, expected) > 1e-9


def test_shared_noise_is_uniform_and_independent_over_positions_tokens_and_seeds():
    seeds = torch.tensor([0, 1, 2, -1, 2**62, 12345])
    noise = torch.stack([sequoia.shared_noise(seed[None], torch.arange(200), 500) for seed in seeds])
    # Uniform numbers, (seeds, positions, tokens). The hash of three zeros is 0, its number rounds to 1.
    uniform = (-torch.expm1(-(-noise.double()).exp())).clamp(max=1 - 1e-9)
    bins = (uniform * 16).long()
    for dim, distance in product(range(3), (1, 2, 3)):
        count = uniform.shape[dim] - distance
        first = bins.narrow(dim, 0, count)
        pairs = (first * 16 + bins.narrow(dim, distance, count)).flatten().bincount(minlength=256)
        assert chi_square_tail(pairs, np.full(256, first.numel() / 256)) > 1e-9
    # Neither sums nor multiples of the three stand for one another.
    assert len(noise.unique()) > 0.98 * noise.numel()


def test_the_smallest_noise_keeps_its_precision(monkeypatch):
    """Of 10^7: the least is below 3e-6 but for a chance of e^-30. Multiples of 2^-24 would be far apart."""
    drawn = []
    gumbel = sequoia.gumbel
    monkeypatch.setattr(sequoia, "gumbel", lambda uniform: drawn.append(gumbel(uniform)) or drawn[-1])
    sequoia.sample_without_replacement(torch.zeros(10, 1_000_000), 1, seeded(0))
    sequoia.shared_noise(torch.tensor([7]), torch.arange(10), 1_000_000)
    assert len(drawn) == 2
    for noise in drawn:
        exponential = (-noise).exp()
        least = exponential[exponential < 1e-4].double()
        tenths = (least * 2**24 % 1 * 10).long().bincount(minlength=10)
        assert exponential.min() < 3e-6
        assert chi_square_tail(tenths, np.full(10, len(least) / 10)) > 1e-9


# --- 4  Verification of a node's children (sections 2.2 and 3.2, Algorithm 2) -------------------------------


def distribution(weights):
    weights = torch.as_tensor(weights, dtype=torch.float64)
    return weights / weights.sum()


def weights_of(vocab):
    weight = st.sampled_from([0, 1e-6, 1, 1 + 1e-10, 3, 7])
    return st.lists(weight, min_size=vocab, max_size=vocab).filter(any).map(distribution)


@st.composite
def pairs_of_distributions(draw):
    """A target's and a draft's over 2 to 4 tokens: with zeros, one-hot, equal, nearly equal, disjoint."""
    vocab = draw(st.integers(2, 4))
    P = draw(weights_of(vocab))
    Q = draw(weights_of(vocab))
    relation = draw(st.sampled_from(["any", "equal", "nearly equal", "disjoint"]))
    if relation == "equal":
        Q = P
    elif relation == "nearly equal":
        Q = distribution(P * (1 + 1e-10 * Q))
    elif relation == "disjoint" and (P == 0).any():
        Q = distribution(P == 0)
    return P, Q


def ratios_of(name, P, Q, tokens):
    """A method's ratios (rows, k) and residual (rows, V). With infinite noise all are computed."""
    return METHODS[name].ratios(P, scores_of_draft(Q), tokens)


def outcome(name, P, Q, k):
    """What verifying k children comes to, exactly: the distribution of the emitted token (V,), and each
    child's chance to be the accepted one (k,). `noise < ratio` has the chance min(ratio, 1)."""
    tokens, chances = all_proposals(name, Q, k)
    rows = len(tokens)
    ratios, residual = ratios_of(name, P.expand(rows, -1), Q.expand(rows, -1), tokens)
    assert (ratios[tokens < 0] == 0).all()
    output = torch.zeros_like(P)
    accepted = torch.zeros(k, dtype=torch.float64)
    for i in range(k):
        passes = chances * ratios[:, i].clamp(max=1)
        output.index_add_(0, tokens[:, i].clamp(min=0), passes)
        accepted[i] = passes.sum()
        chances = chances - passes
    return output + chances @ residual, accepted


@pytest.mark.parametrize("name", SUMMED_UP)
@given(pairs_of_distributions())
def test_output_distribution_equals_target_exactly(name, pair):
    P, Q = pair
    for k in range(1, len(P) + 1):
        output, _ = outcome(name, P, Q, k)
        torch.testing.assert_close(output, P, rtol=0, atol=1e-6)


def random_rows(rows):
    """Target and draft distributions over 6 tokens, (rows, 6) each, far from each other and from uniform."""
    scores = torch.rand(2, rows, 6, generator=seeded(1), dtype=torch.float64)
    return (6 * scores).softmax(dim=-1)


def test_the_plain_algorithm_for_one_node_equals_the_fast_one_row_by_row():
    """With the same noise: the same rank and residual, through the ratios and through Method.verify."""
    P, Q = random_rows(500)
    p, q = torch.stack([P, Q]).log()
    method = METHODS["sequoia"]
    for k in (1, 3, 5):
        tokens = method.propose(q, k, seeded(k))
        noise = torch.rand(tokens.shape, generator=seeded(9), dtype=P.dtype)
        ratios, residual = sequoia.ratios_in_turn(P, q, tokens)
        accepted, scores = method.verify(p, q, tokens, noise, static=True)
        ranks = torch.where(accepted.any(dim=1), accepted.int().argmax(dim=1), -1)
        assert len(set(ranks.tolist())) == k + 1
        torch.testing.assert_close(scores.exp(), residual)
        for row in range(len(P)):
            rank, R = sequoia.verify_one_node(P[row], Q[row], tokens[row], noise[row])
            accepted = (noise[row] < ratios[row]).nonzero().flatten().tolist()
            assert rank == ranks[row] == (accepted or [-1])[0]
            if rank < 0:
                torch.testing.assert_close(R, residual[row])
            one = slice(row, row + 1)
            alone, _ = sequoia.ratios_in_turn(P[one], q[one], tokens[one], noise[one])
            assert (noise[row] < alone[0]).nonzero().flatten().tolist()[:1] == accepted[:1]


@given(pairs_of_distributions())
def test_one_child_is_accepted_as_often_as_optimal_transport_allows_and_all_that_cover_always(pair):
    P, Q = pair
    optimal = 1 - (P - Q).abs().sum() / 2
    for name in ("sequoia", "specinfer", "spectr"):
        _, accepted = outcome(name, P, Q, 1)
        torch.testing.assert_close(accepted.sum(), optimal, rtol=0, atol=1e-6)
    inside = distribution(torch.where(Q > 0, P + 0.01, 0))
    for k in (int((Q > 0).sum()), len(Q)):
        _, accepted = outcome("sequoia", inside, Q, k)
        assert accepted.sum().item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("name", ["naive", "topk"])
def test_matching_emits_what_the_target_alone_draws(name):
    method = METHODS[name]
    p, q = random_rows(500).log()
    rows = torch.arange(500)
    tokens = method.propose(q, 3, seeded(1))
    for static in (False, True):
        left = method.unverified(p.__getitem__, rows, seeded(2), static)(rows)
        accepted, left = method.verify(left, q, tokens, None, static)
        drawn = method.draw(p, 1, seeded(2))
        assert torch.equal(method.last_token(left, None), drawn[:, 0])
        assert torch.equal(accepted, tokens == drawn) and accepted.any(dim=0).all()


def outcomes_of_gumbel(P, Q, k):
    """Pr(rank, token), (k + 1, V), k for none. Token j is the target's if E_j / P_j comes first; its rank
    counts those whose E_i / Q_i is sooner than E_j / Q_j: products of exponentials of E_j are integrated."""
    V = len(P)
    exact = np.zeros((V, V))
    for j in (P > 0).nonzero()[0]:
        # Each term: how many come sooner in the draft, the coefficient and the rate in E_j.
        terms = [(0, 1.0, 1.0)]
        for i in set(range(V)) - {j}:
            a = P[i] / P[j]
            # What the draft gives no chance comes last, all alike.
            b = Q[i] / Q[j] if Q[j] > 0 else np.inf if Q[i] > 0 else 1.0
            later = max(a, b)
            others = [(0, 1.0, later)] if later < np.inf else []
            if b > a:
                others += [(1, 1.0, a), (1, -1.0, b)]
            terms = [(m + n, c * d, r + s) for (m, c, r), (n, d, s) in product(terms, others)]
        for rank, coefficient, rate in terms:
            exact[rank, j] += coefficient / rate
    accepted = exact[:k]
    return np.vstack([accepted, exact.sum(axis=0) - accepted.sum(axis=0)])


@pytest.mark.parametrize("k", [1, 2, 4])
def test_gumbels_ranks_and_tokens_have_their_exact_chances(k):
    rows = [(P.numpy(), Q.numpy()) for P, Q in zip(*random_rows(4))]
    rows.append((np.array([0.5, 0.3, 0.2, 0]), np.array([0, 0.1, 0.6, 0.3])))
    for seed, (P, Q) in enumerate(rows):
        exact = outcomes_of_gumbel(P, Q, k)
        np.testing.assert_allclose(exact.sum(axis=0), P, atol=1e-12)
        distance = np.abs(P - Q).sum() / 2
        assert k > 1 or exact[0].sum() > (1 - distance) / (1 + distance) - 1e-12
        pair = [torch.tensor(probs).expand(100_000, -1) for probs in (P, Q)]
        rank, token = sample_and_verify(*pair, k, "gumbel", seeded(seed))
        observed = torch.zeros(k + 1, len(P)).index_put_((rank, token), torch.ones(1), accumulate=True)
        assert chi_square_tail(observed.flatten(), 100_000 * np.maximum(exact, 0).flatten().round(12)) > 1e-9


@pytest.mark.parametrize("temperature", [0.05, 0.01, 0.005])
def test_four_children_at_low_temperatures_cover_as_greedys_four(temperature):
    """Exactly, given the children: 1 less the product of the chances to be rejected. Rows are the same."""
    logits = torch.randn(1000, 2000, generator=seeded(0)) * 3
    drafts = logits + torch.randn(1000, 2000, generator=seeded(1))
    cover = (drafts.topk(4).indices == logits.argmax(dim=1, keepdim=True)).any(dim=1).double().mean()
    q = (drafts / temperature).double()
    tokens = sequoia.sample_without_replacement(q, 4, seeded(2))
    P = (logits / temperature).double().softmax(dim=1)
    ratios, _ = METHODS["sequoia"].ratios(P, q, tokens)
    accepted = 1 - (1 - ratios.clamp(max=1)).prod(dim=1).mean()
    assert 0.5 < cover < 0.95 and abs(accepted - cover) < 0.01


def count_tokens(name, P, Q, k, samples, generator):
    """How often each token is emitted in `samples` runs, (V,), as many at once as a CPU's cache holds."""
    vocab = len(P)
    counts = torch.zeros(vocab, dtype=torch.long)
    most = max(1, 2**18 // vocab)
    for start in range(0, samples, most):
        rows = min(most, samples - start)
        _, token = sample_and_verify(P.expand(rows, -1), Q.expand(rows, -1), k, name, generator)
        counts += token.bincount(minlength=vocab)
    return counts


@pytest.mark.parametrize("vocab", [2, 4, 16, 4096, 128_256])
@pytest.mark.parametrize("name", METHODS)
def test_output_distribution_equals_target(name, vocab):
    """Target and draft prefer opposite ends: so an error tilts the counts, which merging cannot hide."""
    samples = min(200_000, 2**22 // vocab)
    generator = seeded(vocab)
    place = torch.linspace(0, 1, vocab)
    P, Q = torch.rand(2, vocab, generator=generator) + 0.1
    P *= torch.exp(-4 * place)
    Q *= torch.exp(-4 * (1 - place))
    P[vocab - vocab // 4:] = 0
    Q[: vocab // 8] = 0
    counts = count_tokens(name, P / P.sum(), Q / Q.sum(), min(3, vocab), samples, generator)
    assert chi_square_tail(counts, samples * distribution(P)) > 1e-9


# At temperature 0.05 exp(-98) is subnormal in float32, and exp(-338) is 0.
HAZARDS = {
    "draft 0 at target tokens": ([0.4, 0.3, 0.2, 0.1], [0, 0, 0.5, 0.5]),
    "disjoint": ([0.3, 0.7, 0, 0], [0, 0, 0.5, 0.5]), "one-hot target": ([0, 0, 1, 0], [0.4, 0.3, 0.2, 0.1]),
    "underflow at temperature 0.05": tuple((torch.tensor(logits) / 0.05).softmax(0).tolist() for logits in (
        [8.0, 7.9, 3.0, -9.0], [3.0, 7.9, 2.7, -9.0]))}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("hazard", HAZARDS)
def test_output_distribution_survives(hazard, name):
    P, Q = torch.tensor(HAZARDS[hazard], dtype=torch.float32)
    for k in (1, 2, 4):
        counts = count_tokens(name, P, Q, k, 10_000, seeded(k))
        assert chi_square_tail(counts, 10_000 * distribution(P)) > 1e-9


@pytest.mark.parametrize("name", METHODS)
def test_the_accepted_rank_points_at_the_token(name, monkeypatch):
    """And rows of bfloat16, which sum to 1 but for rounding, are taken as what they are."""
    P, Q = (rows.bfloat16() for rows in random_rows(1000))
    proposed = []

    def propose(*arguments):
        proposed.append(METHODS[name].propose(*arguments))
        return proposed[-1]

    monkeypatch.setitem(METHODS, "watched", dataclasses.replace(METHODS[name], propose=propose))
    rank, token = sample_and_verify(P, Q, 3, "watched", seeded(0))
    accepted = rank >= 0
    assert rank.shape == token.shape == (1000,) and 0 < accepted.sum() < 1000
    assert proposed[0][accepted, rank[accepted]].equal(token[accepted])
    plain = sample_and_verify(P.float(), Q.float(), 3, name, seeded(0))
    assert torch.equal(torch.stack([rank, token]), torch.stack(plain))


# --- 4b  Verification of a whole tree (section 3.2; traversal: arXiv 2505.12398) ----------------------------
#
# A model is a table for each depth, (V**depth, V): its distributions after every path, whose tokens, read as
# a number of base V, give the row. `tokens` are the nodes', -1 where a child does not exist, 0 for the root.


@st.composite
def trees_and_models(draw, trees=SMALL_TREES):
    """A tree, a target and a draft over 2 or 3 tokens. What follows a path is one of a few distributions."""
    vocab = draw(st.integers(2, 3))
    some = torch.stack(draw(st.lists(weights_of(vocab), min_size=2, max_size=6)))
    tree = draw(st.sampled_from([
        tree for tree in trees if tree.size <= 6 and max(map(len, tree.children)) <= vocab]))
    generator = seeded(draw(st.integers(0, 2**32)))
    target = []
    draft = []
    for level in range(tree.depth):
        rows = torch.randint(len(some), (2, vocab**level), generator=generator)
        target.append(some[rows[0]])
        draft.append(some[rows[1]])
    return tree, target, draft


def numbers_of_paths(tree, tokens, vocab):
    """(proposals, size) -> (proposals, size), the row of each node in its depth's table."""
    number = torch.zeros_like(tokens)
    for node in range(1, tree.size):
        # No text ends at a node that does not exist, or below.
        number[:, node] = number[:, tree.parents[node]] * vocab + tokens[:, node].clamp(min=0)
    return number


def distributions_at(tree, tokens, tables):
    """What a model says after each node: tokens (proposals, size) -> (proposals, size, V)."""
    number = numbers_of_paths(tree, tokens, tables[0].shape[1])
    found = [tables[tree.depths[node]][number[:, node]] for node in range(tree.size)]
    return torch.stack(found, dim=1)


def all_tokens_of_a_tree(name, tree, draft):
    """All that a method can propose in a tree, (proposals, size), and the chances, (proposals,)."""
    vocab = len(draft[0][0])

    @functools.cache
    def proposals(depth, number, k):
        return list(zip(*(part.tolist() for part in all_proposals(name, draft[depth][number], k))))

    def number(tokens, node):
        return 0 if node == 0 else number(tokens, tree.parents[node]) * vocab + tokens[node]

    found = [([0], 1.0)]
    for node, children in enumerate(tree.children):
        if children:
            longer = []
            for tokens, chance in found:
                below = [([-1] * len(children), 1.0)]
                if tokens[node] >= 0:
                    below = proposals(tree.depths[node], number(tokens, node), len(children))
                # In level order a node's children are the next to be known.
                longer += [(tokens + more, chance * p) for more, p in below]
            found = longer
    tokens, chances = zip(*found)
    return torch.tensor(tokens), torch.tensor(chances, dtype=torch.float64)


def outcomes(name, tree, tokens, P, Q):
    """Verification in closed form: each node's chance to be the last accepted one, (proposals, size), and the
    distribution of the token that follows it, (proposals, size, V)."""
    last = torch.zeros(tokens.shape, dtype=torch.float64)
    following = P.clone()
    if name == "traversal":
        layout = sequoia.Layout(tree, "cpu")
        for i, proposal in enumerate(tokens):
            free = 1.0
            for node, chance, residual in zip(*METHODS[name].endings(layout, proposal, P[i], scores_of_draft(Q[i]))):
                if chance > 0:
                    following[i, node] = residual / residual.sum()
                last[i, node] = free * chance
                free *= 1 - chance
        return last, following
    # `last` is a node's chance to be reached, then that to end there.
    last[:, 0] = 1
    for node, children in enumerate(tree.children):
        if children:
            ratios, following[:, node] = ratios_of(name, P[:, node], Q[:, node], tokens[:, children])
            for child, ratio in zip(children, ratios.clamp(max=1).T):
                last[:, child] = last[:, node] * ratio
                last[:, node] *= 1 - ratio
    return last, following


@pytest.mark.parametrize("name", SUMMED_UP)
@given(trees_and_models())
def test_joint_distribution_of_the_text_equals_the_targets_exactly(name, case):
    """All proposals, all outcomes: the path, the token that follows, then the target's own, to the depth."""
    tree, target, draft = case
    tokens, chances = all_tokens_of_a_tree(name, tree, draft)
    P = distributions_at(tree, tokens, target)
    Q = distributions_at(tree, tokens, draft)
    last, following = outcomes(name, tree, tokens, P, Q)
    number = numbers_of_paths(tree, tokens, vocab=len(target[0][0]))
    ends = chances[:, None, None] * last[..., None] * following
    text = torch.zeros(1, dtype=torch.float64)
    exact = torch.ones(1, dtype=torch.float64)
    for depth, probs in enumerate(target):
        text = text.flatten()[:, None] * probs
        exact = exact.flatten()[:, None] * probs
        for node in range(tree.size):
            if tree.depths[node] == depth:
                text.index_add_(0, number[:, node], ends[:, node])
    torch.testing.assert_close(text, exact, rtol=0, atol=1e-6)


@given(trees_and_models([chain(length) for length in range(1, 6)]))
def test_traversal_of_a_chain_yields_at_least_the_walks_tokens_on_average(case):
    """Of branching trees this is not true."""
    tree, target, draft = case
    tokens, chances = all_tokens_of_a_tree("traversal", tree, draft)
    P = distributions_at(tree, tokens, target)
    Q = distributions_at(tree, tokens, draft)
    yields = torch.tensor(tree.depths).double() + 1
    ends = [chances @ outcomes(name, tree, tokens, P, Q)[0] @ yields for name in ("traversal", "sequoia")]
    assert ends[0] > ends[1] - 1e-6


@pytest.mark.parametrize("method", [*METHODS.values(), sequoia.GREEDY], ids=[*METHODS, "greedy"])
@pytest.mark.parametrize("static", [False, True])
def test_a_child_that_does_not_exist_is_never_accepted(method, static):
    """Nor is what is below, though the target would. Where no token is possible, after node 3, it is -1."""
    layout = sequoia.Layout(Tree([-1, 0, 0, 1, 2]), "cpu")
    tokens = torch.tensor([0, 1, -1, 2, -1])
    q = torch.zeros(5, 3)
    generator = seeded(0)
    for wanted in range(3):
        p = torch.eye(4, 3)[[wanted, 2, 0, 3, 0]].log()
        for _ in range(20):
            found = method.verify_tree(layout, tokens, p.__getitem__, q, generator, static)
            assert torch.cat(found).tolist() == ([3, -1] if wanted == 1 else [0, wanted])


# --- 5  Tree attention and the KV cache ---------------------------------------------------------------------

SMALL = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             max_position_embeddings=256, bos_token_id=1, eos_token_id=None, pad_token_id=0)
GQA = dict(SMALL, num_key_value_heads=2)
HEAD = dict(GQA, head_dim=8)
WINDOW = dict(GQA, sliding_window=12)
GEMMA = dict(HEAD, sliding_window=12)
TWO_KINDS = dict(GEMMA, layer_types=["sliding_attention", "full_attention"])
MLA = dict(SMALL, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12)
GPT2 = dict(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=None,
            pad_token_id=0)
LONG = transformers.LlamaConfig(**GQA | dict(max_position_embeddings=2**16))
# Models whose entries have two shapes: keys unlike values, and layers unlike layers.
TWO_SHAPES = ("deepseek-v3", "gemma4")
ARCHITECTURES = {
    "llama": ("Llama", GQA), "qwen2": ("Qwen2", GQA), "qwen3": ("Qwen3", HEAD), "phi3": ("Phi3", WINDOW),
    "mistral": ("Mistral", WINDOW), "gpt-neox": ("GPTNeoX", SMALL), "gpt2": ("GPT2", GPT2),
    "falcon": ("Falcon", SMALL), "gemma2": ("Gemma2", GEMMA), "gemma3": ("Gemma3Text", GEMMA)}
ARCHITECTURES["qwen2 with a window"] = ("Qwen2", dict(WINDOW, use_sliding_window=True, max_window_layers=1))
ARCHITECTURES["opt"] = ("OPT", dict(SMALL, ffn_dim=48, word_embed_proj_dim=32))
ARCHITECTURES["mixtral"] = ("Mixtral", dict(WINDOW, num_local_experts=4))
ARCHITECTURES["gpt-oss"] = ("GptOss", dict(TWO_KINDS, num_local_experts=4, num_experts_per_tok=2))
ARCHITECTURES["deepseek-v3"] = ("DeepseekV3", dict(
    MLA, num_key_value_heads=4, moe_intermediate_size=16, n_routed_experts=4, n_group=1, topk_group=1,
    num_experts_per_tok=2, first_k_dense_replace=2))
ARCHITECTURES["gemma4"] = ("Gemma4Text", dict(
    TWO_KINDS, global_head_dim=16, hidden_size_per_layer_input=8, vocab_size_per_layer_input=64))
FURTHER = {
    "MiniCPM3": MLA, "Cohere2": WINDOW, "Olmo3": WINDOW, "Granite": GQA, "SmolLM3": GQA, "Exaone4": WINDOW,
    "GPTBigCode": GPT2, "BioGpt": SMALL}
FURTHER["Phi"] = dict(SMALL, partial_rotary_factor=0.5)
FURTHER["GPTJ"] = dict(GPT2, rotary_dim=4)
FURTHER["Bert"] = dict(SMALL, is_decoder=True)
FURTHER["Llama"] = dict(GQA, rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=1e4))


def config_of(name):
    kind, settings = ARCHITECTURES.get(name) or (name, FURTHER[name])
    return getattr(transformers, f"{kind}Config")(**settings)


def make_pair(config, sharpness=3.0, difference=0.05, seed=0):
    """A random target whose distributions are far from flat, and a draft near it. config: or its name."""
    if isinstance(config, str):
        config = config_of(config)
    torch.manual_seed(seed)
    target = transformers.AutoModelForCausalLM.from_config(config).eval()
    draft = transformers.AutoModelForCausalLM.from_config(config).eval()
    for p, q in zip(target.parameters(), draft.parameters()):
        if p.ndim > 1:
            p.data *= sharpness
            q.data = p.data + difference * p.std() * torch.randn_like(p)
        else:
            q.data = p.data.clone()
    return target, draft


@pytest.fixture(scope="module")
def llama():
    return make_pair("llama")


def assisted(target, draft, ids, **arguments):
    return sequoia.generate(target, ids, assistant_model=draft, **arguments)


def prompt_of(length, vocabulary=64, seed=0):
    return torch.randint(2, vocabulary, (1, length), generator=seeded(seed))


def as_it_is(decoder):
    return decoder


def at_once(ids, scores, **kwargs):
    return torch.ones(len(ids), dtype=torch.bool)


def static(decoder):
    """A decoder whose steps have fixed shapes and are recorded, as on a GPU."""
    decoder.cuda_graph = True
    return decoder


def tree_step(pair, tree, text, method="sequoia", generator=None, static=False, capacity=256):
    """A step with a tree on models that have seen a text, (length,), but its last token."""
    models = [sequoia.CachedModel(model) for model in pair]
    for model in models:
        model.feed(text[:-1], capacity)
    seed = torch.tensor([5])
    return sequoia.TreeStep(tree, *models, models[0].vocabulary, seed, generator, static)


def ordinary(model):
    """From a text, (length,), to the logits after it, (V,), by the model's ordinary pass."""
    return lambda text: model(text[None]).logits[0, -1].float()


BUSHY = optimal_tree([0.5, 0.2, 0.1], 14, 5)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss"])
@torch.inference_mode()
def test_tree_attention_equals_one_path_at_a_time(name, monkeypatch):
    """In a step's own pass. Gemma 3 and GPT-OSS have windows of 12, which the prompt of 30 exceeds."""
    pair = make_pair(name)
    text = prompt_of(30)[0]
    step = tree_step(pair, BUSHY, text)
    passes = []
    logits_of = sequoia.CachedModel.logits

    def logits(model, tokens, nodes, placed):
        found = logits_of(model, tokens, nodes, placed)
        nodes = range(BUSHY.size) if isinstance(nodes, slice) else nodes.tolist()
        passes.append((model.model, tokens.tolist(), nodes, found))
        return found

    monkeypatch.setattr(sequoia.CachedModel, "logits", logits)
    step(text, sequoia.Sampling(sequoia.GREEDY, []))
    assert len(passes) == BUSHY.depth and passes[-1][0] is pair[0]
    # The first is fed the token before the root, too.
    assert passes[0][2] == [BUSHY.size, 0]
    for model, tokens, nodes, found in passes:
        for node, row in zip(nodes, found):
            above = text[:-1]
            if node < BUSHY.size:
                above = torch.cat([above, torch.tensor(tokens)[:-1][BUSHY.mask[node]]])
            torch.testing.assert_close(row, ordinary(model)(above), atol=1e-4, rtol=1e-4)


def assert_cached(model, text):
    """A model's cache holds a text, (length,), as a fresh prompt's pass would leave it."""
    fresh = sequoia.CachedModel(model.model)
    fresh.feed(text, len(text))
    assert len(model.entries) == len(fresh.entries) > 0
    for ours, theirs in zip(model.entries, fresh.entries):
        torch.testing.assert_close(ours[:, :, : len(text)], theirs[:, :, : len(text)], atol=1e-4, rtol=1e-4)


RICH = {name: None for name in ("llama", "gemma3", "gpt2")}


def rich_pair(name):
    """A pair whose sampled texts are rich, and whose draft's later children are accepted, too."""
    if RICH[name] is None:
        RICH[name] = make_pair(name, sharpness=2.0, difference=1.0, seed=1)
    return RICH[name]


def test_rich_pairs_have_rich_texts_and_accept_every_rank():
    for name in RICH:
        ranks = collections.Counter()
        steps = []
        decoder = Decoder(*rich_pair(name), k_ary(3, 4), generator=seeded(0), on_step=steps.append)
        out = rich_pair(name)[0].generate(prompt_of(8), custom_generate=decoder, max_new_tokens=150,
                                          do_sample=True, top_k=0)
        for step in steps:
            ranks.update(step.tree.ranks[node] for node in step.path)
        assert len(set(out[0, 8:].tolist())) > 25
        assert min(ranks[0], ranks[1]) >= 5, (name, ranks)


TREES = st.builds(lambda choices: Tree(functools.reduce(
    lambda parents, share: [*parents, max(0, parents[-1]) + int(share * (len(parents) - max(0, parents[-1])))],
    choices, [-1])), st.lists(st.floats(0, 0.999), max_size=12))


def as_plain(name, pair, seed):
    """What `step_plainly` is given for a method: greedy and gumbel are Algorithm 2 at a temperature near 0, of
    scores to which gumbel adds the noise that a position owns."""
    functions = []
    for model in pair:
        def scores(text, model=model):
            found = ordinary(model)(text)
            if name == "gumbel":
                found = found + sequoia.shared_noise(seed, torch.tensor([len(text) - 1]), len(found))[0]
            return found if name == "sequoia" else found / 1e-6
        functions.append(scores)
    return functions


@pytest.mark.parametrize("name", ["sequoia", "gumbel", "greedy"])
@settings(max_examples=25)
@given(tree=TREES, seed=st.integers(0, 2**31), length=st.integers(2, 20), form=st.booleans(),
       pair=st.sampled_from(list(RICH)))
@torch.inference_mode()
def test_a_step_adds_the_plain_steps_tokens_and_leaves_the_cache_of_a_fresh_pass(name, tree, seed, length, form, pair):
    """For the same random numbers, on random trees, step after step, walking and static."""
    if max(map(len, tree.children)) > 60:
        return
    models = rich_pair(pair)
    text = prompt_of(length, seed=seed % 97)[0]
    method = METHODS.get(name, sequoia.GREEDY)
    step = tree_step(models, tree, text, static=form, generator=seeded(seed))
    plain = seeded(seed)
    for _ in range(3):
        expected = sequoia.step_plainly(*as_plain(name, models, step.seed), text, tree, plain)
        found = step(text, sequoia.Sampling(method, []))
        assert found.tokens == expected.tolist()
        text = torch.cat([text, expected])
        assert_cached(step.target, text[:-1])
        if tree.depth > 1:
            # The draft is fed no leaves, so the last one's entry may be missing.
            assert_cached(step.draft, text[:-2])


# --- 6  Decoding --------------------------------------------------------------------------------------------


def enumerate_texts(target, prompt, length, processors):
    """The exact probability of every continuation of this length, from the model alone: {tuple: chance}."""
    texts = {(): 1.0}
    for _ in range(length):
        rows = torch.tensor([prompt[0].tolist() + list(text) for text in texts])
        probs = processors(rows, target(rows).logits[:, -1].float()).softmax(-1)
        longer = {}
        for (text, chance), row in zip(texts.items(), probs.tolist()):
            for token, p in enumerate(row):
                if p > 0:
                    longer[(*text, token)] = chance * p
        texts = longer
    return texts


# By case: runs, vocabulary, method, arguments of generate.
JOINT = {
    "sequoia": (3_000, 5, "sequoia", {}), "top-p": (3_000, 6, "sequoia", dict(top_p=0.8)),
    "min-p": (3_000, 6, "sequoia", dict(min_p=0.15)),
    "temperature and top-k": (2_000, 6, "sequoia", dict(temperature=1.5, top_k=4)),
    "repetition penalty": (2_000, 4, "sequoia", dict(repetition_penalty=1.7)),
    **{name: (2_000, 4, name, {}) for name in METHODS if name != "sequoia"}}


@pytest.mark.parametrize("case, fixed", [*product(JOINT, [False]), ("sequoia", True), ("gumbel", True)])
@torch.inference_mode()
def test_joint_distribution_of_three_tokens_equals_enumeration(case, fixed):
    """Through the real step. The tree's root is a leaf of the step before, where the draft must be fed it."""
    runs, vocabulary, method, arguments = JOINT[case]
    config = transformers.GPT2Config(vocab_size=vocabulary, n_embd=32, n_layer=1, n_head=4, n_positions=64,
                                     bos_token_id=None, eos_token_id=None)
    pair = make_pair(config, sharpness=6.0, difference=1.5, seed=3)
    if not fixed:
        pair = [sequoia.pack(model) for model in pair]
    decoder = Decoder(*pair, "none", method)
    prompt = prompt_of(4, vocabulary)
    how = dict(max_new_tokens=1, do_sample=True, top_k=0) | arguments
    pair[0].generate(prompt, custom_generate=decoder, **how)
    sampling = decoder.sampling
    generator = seeded(0)
    step = tree_step(pair, Tree([-1, 0, 0, 1, 1, 2, 2, 2]), prompt[0], generator=generator, static=fixed, capacity=64)
    counts = collections.Counter()
    accepted = 0
    for _ in range(runs):
        step.seed.random_(generator=generator)
        text = prompt[0]
        while len(text) < 7:
            found = step(text, sampling)
            accepted += len(found.path)
            text = torch.cat([text, torch.tensor(found.tokens)])
        counts[tuple(text[4:7].tolist())] += 1
    assert accepted > runs / 4 and (step.graph is not None) == fixed
    exact = enumerate_texts(pair[0], prompt, 3, transformers.LogitsProcessorList(sampling.processors))
    assert set(counts) <= set(exact)
    assert chi_square_tail([counts[text] for text in exact], [runs * p for p in exact.values()]) > 1e-9


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_equals_plain_generate(name, graphs):
    """For every architecture, with windows of 12 tokens and a text of 60, step by step and recorded."""
    target, draft = make_pair(name)
    arguments = dict(max_new_tokens=30, do_sample=False)
    expected = target.generate(prompt_of(30), **arguments)
    for tree, prepared in product((Tree([-1]), (16, 5), sequences(3, 4)), (as_it_is, static)):
        steps = []
        decoder = prepared(Decoder(target, draft, tree, on_step=steps.append))
        out = target.generate(prompt_of(30), custom_generate=decoder, **arguments)
        assert torch.equal(out, expected)
        assert len(set(decoder.target.shapes)) == 1 + (name in TWO_SHAPES)
        # A draft this near must save steps.
        assert len(steps) == 30 if tree == Tree([-1]) else len(steps) < 21
    assert len(graphs) == 3 and min(graph.replays for graph in graphs) > 3
    # To the end of the context: GPT-2 has no embedding beyond, and deeper nodes must not ask for one.
    expected = target.generate(prompt_of(240), max_length=256, do_sample=False)
    out = assisted(target, draft, prompt_of(240), max_length=256, do_sample=False, tree=(9, 6))
    assert torch.equal(out, expected)


@pytest.mark.parametrize("method", ["sequoia", "specinfer", "spectr", "traversal", "gumbel", "greedy"])
def test_texts_with_and_without_a_recorded_step_are_equal(method, graphs):
    """On Decoders that are kept over texts whose caches grow."""
    pair = rich_pair("llama")
    how = dict(do_sample=method != "greedy", temperature=0.9, top_k=20, top_p=0.95, min_p=0.01)
    how = how if how["do_sample"] else dict(do_sample=False)
    generators = [torch.Generator() for _ in range(2)]
    decoders = [prepared(Decoder(*pair, BUSHY, METHODS.get(method, "sequoia"), generator))
                for prepared, generator in zip((as_it_is, static), generators)]
    for length, new in ((20, 30), (9, 20), (150, 60), (20, 30)):
        texts = []
        for decoder, generator in zip(decoders, generators):
            generator.manual_seed(length)
            texts.append(pair[0].generate(prompt_of(length), custom_generate=decoder, max_new_tokens=new, **how))
        assert torch.equal(*texts)
    # One for each capacity of the caches.
    assert len(graphs) == 2 and min(graph.replays for graph in graphs) > 3


class Operators(TorchDispatchMode):
    """Counts operators, but for views, which launch nothing, and while it is paused."""
    VIEWS = ("slice", "select", "view", "expand", "unsqueeze", "squeeze", "split", "unbind", "t", "transpose",
             "detach", "alias", "permute", "as_strided", "_unsafe_view", "split_with_sizes", "lift_fresh")
    count = 0
    paused = False

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        name = operator.__name__.split(".")[0]
        # A conversion to the type that a tensor has returns the tensor.
        self.count += not self.paused and name not in self.VIEWS and not (args and out is args[0])
        return out


@pytest.mark.parametrize("method, most", [("greedy", 200), ("gumbel", 250), ("sequoia", 950)])
@torch.inference_mode()
def test_a_static_step_has_few_operators_outside_its_passes(monkeypatch, method, most):
    text = prompt_of(10)[0]
    step = tree_step(make_pair("llama"), optimal_tree(sequoia.PRIOR, 128, 10), text, static=True)
    step.base.fill_(9)
    operators = Operators()
    logits_of = sequoia.CachedModel.logits

    def logits(*arguments):
        operators.paused = True
        found = logits_of(*arguments)
        operators.paused = False
        return found

    monkeypatch.setattr(sequoia.CachedModel, "logits", logits)
    processors = [] if method == "greedy" else [transformers.TemperatureLogitsWarper(0.6)]
    with operators:
        step.program(text, sequoia.Sampling(METHODS.get(method, sequoia.GREEDY), processors))
    assert 20 < operators.count <= most


@pytest.fixture(scope="module")
def bundled():
    """The bundled pair, packed, its target once more as it is, and their tokenizer."""
    def load(name):
        kind = transformers.AutoModelForCausalLM
        return kind.from_pretrained(ROOT / "tiny" / name, dtype=torch.float32).eval()

    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "tiny" / "target")
    return sequoia.pack(load("target")), sequoia.pack(load("draft")), load("target"), tokenizer


def held_out_prompts(tokenizer, length):
    """From the middle of files of Python's own library."""
    for module in (heapq, statistics, json.decoder, collections):
        text = Path(module.__file__).read_text(encoding="utf-8")
        yield tokenizer(text[len(text) // 2 :], return_tensors="pt")["input_ids"][:, :length]


def text_of_seed(target, draft, tree, prompt, seed, prepared=as_it_is, **arguments):
    decoder = prepared(Decoder(target, draft, tree, "gumbel", seeded(seed)))
    return target.generate(prompt, custom_generate=decoder, **arguments)[0].tolist()


@pytest.mark.parametrize("name", ["bundled", "llama", "gemma3"])
def test_a_seed_names_the_text(bundled, name):
    """With every tree, draft and program; of a batch the first row takes the generator's first seed."""
    if name == "bundled":
        target, draft, _, tokenizer = bundled
        prompt = next(held_out_prompts(tokenizer, 40))
        torch.manual_seed(0)
        other = transformers.AutoModelForCausalLM.from_config(draft.config).eval()
    else:
        target, draft = make_pair(name)
        prompt = prompt_of(30)
        other = make_pair(name, difference=0.3)[1]
    for case, (temperature, top_p, seed) in enumerate(((0.6, 1, 0), (0.6, 0.9, 1), (1, 1, 2), (1, 0.9, 0))):
        arguments = dict(temperature=float(temperature), top_p=float(top_p), max_new_tokens=24,
                         do_sample=True, top_k=0, pad_token_id=0)
        plain = text_of_seed(target, None, Tree([-1]), prompt, seed, **arguments)
        for i, tree in enumerate((Tree([-1]), sequences(1, 3), (8, 4), (64, 10), "auto")):
            given = (draft, other)[(i + case) % 2]
            prepared = (as_it_is, static)[(i + case // 2) % 2]
            text = text_of_seed(target, given, tree, prompt, seed, prepared, **arguments)
            assert text == plain, (tree, case)
        rows = torch.cat([prompt, prompt.flip(1)])
        assert text_of_seed(target, draft, (8, 4), rows, seed, **arguments) == plain
        assert text_of_seed(target, draft, (8, 4), prompt, seed + 9, **arguments) != plain
        parts = []
        streamer = SimpleNamespace(put=lambda ids: parts.extend(ids.flatten().tolist()), end=list)
        assisted(target, draft, prompt, tree=(8, 4), method="gumbel", generator=seeded(seed),
                         streamer=streamer, **arguments)
        assert parts == plain


@torch.inference_mode()
def test_top_p_does_not_lose_the_drafts_tail(bundled):
    """The best tree of 64x10 yields at most 7% less than without top-p (30% less where the tail is cut)."""
    prompts = list(held_out_prompts(bundled[3], 128))
    logits = [torch.cat([model(text).logits[0] for text in prompts]) for model in bundled[:2]]
    tokens = []
    for top_p in (1.0, 0.8):
        how = dict(do_sample=True, temperature=0.2, top_p=top_p)
        decoder = Decoder(*bundled[:2], (8, 4))
        bundled[0].generate(prompts[0], custom_generate=decoder, max_new_tokens=1, top_k=0, **how)
        P = decoder.sampling.scores(logits[0]).softmax(dim=1)
        q = decoder.sampling.scores(logits[1], draft=True)
        children = decoder.method.propose(q, 32, seeded(0))
        ratios = decoder.method.ratios(P, q, children)[0].clamp(max=1)
        earlier = torch.nn.functional.pad((1 - ratios).cumprod(dim=1)[:, :-1], (1, 0), value=1)
        rates = (ratios * earlier).mean(dim=0).numpy()
        tokens.append(expected_tokens(optimal_tree(rates, 64, 10), rates))
    assert tokens[1] > 0.93 * tokens[0] > 1.5


@pytest.mark.parametrize("method", METHODS)
def test_below_a_child_that_does_not_exist_there_is_none_and_no_grammar_is_asked_about_it(llama, method):
    few = [list(range(10, 64)), [5, 6]]

    def allowed(row, ids):
        assert len(ids) == 10 or int(ids[-1]) in few[1 - len(ids) % 2]
        return few[len(ids) % 2]

    steps = []
    decoder = Decoder(*llama, Tree([-1, 0, 0, 0, 1, 2, 3, 3]), method, seeded(0), steps.append)
    llama[0].generate(prompt_of(10), custom_generate=decoder, do_sample=True, max_new_tokens=30,
                      prefix_allowed_tokens_fn=allowed)
    missing = 0
    for step, node in product(steps[1:], range(1, 8)):
        if step.node_tokens[step.tree.parents[node]] < 0:
            assert step.node_tokens[node] < 0
            missing += 1
    # Those with replacement repeat a child instead.
    assert missing or METHODS[method].propose is sample_with_replacement


@pytest.mark.parametrize("prepared", [as_it_is, static])
def test_noise_is_fresh_every_step(llama, monkeypatch, prepared):
    """No step draws the numbers of an earlier one (the authors' code draws once a prompt)."""
    drawn = []
    rand = torch.rand
    monkeypatch.setattr(torch, "rand", lambda *a, **kwargs: drawn.append(rand(*a, **kwargs)) or drawn[-1])
    decoder = prepared(Decoder(*llama, (6, 3), generator=seeded(1)))
    llama[0].generate(prompt_of(8), custom_generate=decoder, max_new_tokens=60, do_sample=True)
    values = [float(noise.flatten()[0]) for noise in drawn]
    assert len(values) > 10 and len(set(values)) == len(values)


@torch.inference_mode()
def test_one_decoder_takes_text_after_text_and_records_once_for_a_cache(llama, graphs):
    """Caches grow. What an earlier text left in them never shows."""
    decoder = static(Decoder(*llama, Tree([-1, 0, 0, 1, 1, 2, 3])))
    cases = ((20, 60, 1), (9, 40, 1), (31, 90, 1), (20, 256, 2), (9, 40, 2), (1, 40, 2), (230, 256, 2),
             (9, 40, 2), (9, 10, 2), (1, 40, 2))
    for length, max_length, expected_graphs in cases:
        for model in (decoder.target, decoder.draft):
            model.store.fill_(torch.nan)
        prompt = prompt_of(length, seed=length)
        arguments = dict(max_length=max_length, do_sample=False)
        out = llama[0].generate(prompt, custom_generate=decoder, **arguments)
        assert torch.equal(out, llama[0].generate(prompt, **arguments))
        assert len(graphs) == expected_graphs


@pytest.mark.parametrize("where", ["feed", "grow", "place", "logits", "move"])
@pytest.mark.parametrize("tree", [(9, 4), "auto"])
def test_a_text_that_is_interrupted_leaves_the_decoder_right(llama, where, tree, monkeypatch):
    """Broken off in the first call of a part of the step, in the second, and in a later one."""
    working = getattr(sequoia.CachedModel, where)
    decoder = Decoder(*llama, tree)
    arguments = dict(max_new_tokens=20, do_sample=False)
    for last in (1, 2, 7):
        calls = []

        def interrupted(*args, **kwargs):
            calls.append(1)
            if len(calls) == last:
                raise KeyboardInterrupt
            return working(*args, **kwargs)

        monkeypatch.setattr(sequoia.CachedModel, where, interrupted)
        prompt = prompt_of(10, seed=last)
        with contextlib.suppress(KeyboardInterrupt):
            llama[0].generate(prompt, custom_generate=decoder, **arguments)
            assert len(calls) < last
        monkeypatch.setattr(sequoia.CachedModel, where, working)
        out = llama[0].generate(prompt, custom_generate=decoder, **arguments)
        assert torch.equal(out, llama[0].generate(prompt, **arguments))


def test_a_decoder_kept_over_calls_gives_the_text_a_fresh_one_gives(llama):
    """Whatever way of sampling the call before asked for, and with a graph that holds on to it."""
    generator = torch.Generator()
    tree = sequences(2, 3)
    kept = static(Decoder(*llama, tree, generator=generator))
    changes = [{}, {}, dict(temperature=0.5), dict(temperature=0.5, top_p=0.8), dict(top_k=9), dict(top_k=8),
               dict(do_sample=False), dict(repetition_penalty=1.5), dict(bad_words_ids=[[3]]), {},
               dict(bad_words_ids=[[4]]), {}]
    for i, change in enumerate(changes):
        texts = []
        for decoder in (kept, static(Decoder(*llama, tree, generator=generator))):
            generator.manual_seed(i)
            arguments = dict(max_new_tokens=24, custom_generate=decoder, do_sample=True) | change
            texts.append(llama[0].generate(prompt_of(6 + 3 * i % 8), **arguments).tolist())
        assert texts[0] == texts[1], change


def test_vocabularies_padded_to_different_lengths():
    target, draft = make_pair("llama")
    expected = target.generate(prompt_of(10), max_new_tokens=20, do_sample=False)
    for size in (60, 70):
        draft.resize_token_embeddings(size)
        steps = []
        ours = dict(max_new_tokens=20, do_sample=False, tree=sequences(61, 1), on_step=steps.append)
        assert torch.equal(assisted(target, draft, prompt_of(10), **ours), expected)
        # Nothing is proposed beyond the target's. What the draft does not have comes last.
        for step in steps:
            assert max(step.node_tokens[1:], default=0) < 64 and -1 not in step.node_tokens
        for method in METHODS:
            ours = dict(max_new_tokens=20, do_sample=True, tree=(9, 4), method=method)
            out = assisted(target, draft, prompt_of(10), **ours)
            assert out.shape == (1, 30) and out.max() < 64


@pytest.mark.parametrize("broken", [0, 1])
@pytest.mark.parametrize("do_sample", [False, True])
def test_nan_logits_are_an_error_and_leave_nothing_behind(broken, do_sample):
    """Nor is a text refused that ends where no token is possible any more."""
    pair = make_pair("llama")
    end = transformers.SuppressTokensAtBeginLogitsProcessor(range(64), 30)
    expected = pair[0].generate(prompt_of(10), do_sample=False, max_new_tokens=20)

    def spoil(module, inputs, output):
        if next(fine, None) is None:
            output.logits.fill_(math.nan)

    for method in METHODS:
        decoder = Decoder(*pair, Tree([-1, 0, 1, 1, 2]), method)
        arguments = dict(custom_generate=decoder, max_new_tokens=20)
        for passes, processors in ((0, [end]), (4, [])):
            fine = iter(range(passes))
            with pair[broken].register_forward_hook(spoil), pytest.raises(ValueError, match="NaN"):
                pair[0].generate(prompt_of(10), do_sample=do_sample, **arguments)
            out = pair[0].generate(prompt_of(10), do_sample=False, logits_processor=processors, **arguments)
            assert torch.equal(out, expected)


@pytest.mark.parametrize("tree", [(9, 4), sequences(2, 5), "auto"], ids=str)
@pytest.mark.parametrize("length", [5, 31, 32, 33, 60])
def test_a_draft_whose_context_ends_gives_way_to_plain_steps(llama, tree, length):
    draft = make_pair(transformers.GPT2Config(**GPT2 | dict(n_positions=32)))[1]
    arguments = dict(max_new_tokens=50, do_sample=False)
    expected = llama[0].generate(prompt_of(length), **arguments)
    for prepared in (as_it_is, static):
        decoder = prepared(Decoder(llama[0], draft, tree))
        out = llama[0].generate(prompt_of(length), custom_generate=decoder, **arguments)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("kind", ["Phi3", "Gemma3Text"])
def test_a_text_may_come_up_to_the_switch_of_longrope_and_not_beyond(kind):
    """With a tree of five levels: nodes beyond the switch must not switch the pass."""
    rope = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 4, long_factor=[4.0] * 4,
                original_max_position_embeddings=40)
    settings = dict(GQA, original_max_position_embeddings=40, rope_parameters=rope)
    if kind == "Gemma3Text":
        kinds = dict(full_attention=rope, sliding_attention=dict(rope_type="default", rope_theta=1e4))
        settings = dict(HEAD, sliding_window=12, layer_types=[*kinds], rope_parameters=kinds)
    target, draft = make_pair(getattr(transformers, f"{kind}Config")(**settings))
    ours = dict(do_sample=False, custom_generate=sequoia.decode, draft=draft, tree=sequences(3, 4))
    for length in (20, 40):
        expected = target.generate(prompt_of(length), max_length=41, do_sample=False)
        assert torch.equal(target.generate(prompt_of(length), max_length=41, **ours), expected)
    with pytest.raises(ValueError, match="up to 40 tokens; the prompt has 20, .* up to 42"):
        target.generate(prompt_of(20), max_length=42, **ours)


def test_caches_are_as_large_as_the_text_and_a_chain_of_1100_needs_no_recursion():
    """The caches, where max_new_tokens slots would be 26 MB."""
    target, draft = make_pair(LONG)
    arguments = dict(max_new_tokens=50_000, do_sample=False, pad_token_id=0)
    arguments["eos_token_id"] = int(target.generate(prompt_of(12), max_new_tokens=1, do_sample=False)[0, -1])
    decoder = Decoder(target, draft)
    assert target.generate(prompt_of(12), custom_generate=decoder, **arguments).shape == (1, 13)
    assert 0 < decoder.target.store.nbytes + decoder.draft.store.nbytes <= 2**18
    arguments = dict(max_new_tokens=4, do_sample=True, tree=chain(1100))
    for method in ("sequoia", "traversal"):
        assert assisted(target, draft, prompt_of(8), method=method, **arguments).shape == (1, 12)


def test_a_capture_that_fails_is_one_warning_and_generates_text(llama, monkeypatch):
    def capture(graph):
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(torch.cuda, "graph", capture)
    decoder = Decoder(*llama, (9, 4))
    decoder.cuda_graph = True
    arguments = dict(max_new_tokens=40, do_sample=False)
    with pytest.warns(UserWarning, match="without a CUDA graph: operation .* capturing") as caught:
        for seed in range(3):
            out = llama[0].generate(prompt_of(12, seed=seed), custom_generate=decoder, **arguments)
            assert torch.equal(out, llama[0].generate(prompt_of(12, seed=seed), **arguments))
    assert 1 <= len(caught) <= 6


def test_a_streamer_gets_every_token_when_it_is_there_and_the_first_after_one_pass(llama):
    passes = []
    given = []
    streamer = SimpleNamespace(put=lambda ids: given.append((len(passes), ids.flatten().tolist())),
                               end=lambda: given.append("end"))
    with llama[0].register_forward_hook(lambda *_: passes.append(1)):
        out = assisted(*llama, prompt_of(10), max_new_tokens=24, do_sample=False, streamer=streamer)
    assert given.pop() == "end"
    counts, ids = zip(*given)
    # The prompt comes first. Every pass yields a token, but for the two of the probe, after the first token.
    assert ids[0] == prompt_of(10)[0].tolist() and sum(ids, []) == out[0].tolist()
    assert counts[:2] == (0, 1) and set(counts) == {0, 1, *range(4, len(passes) + 1)} and len(counts) == 25


def test_a_decoder_in_use_takes_no_second_text(llama):
    decoder = Decoder(*llama, (9, 4))
    refused = []

    def enter(ids, scores, **kwargs):
        with pytest.raises(RuntimeError, match="in use"):
            llama[0].generate(prompt_of(9), max_new_tokens=9, custom_generate=decoder)
        refused.append(1)
        return torch.zeros(1, dtype=torch.bool)

    arguments = dict(max_new_tokens=9, do_sample=False)
    expected = llama[0].generate(prompt_of(12), **arguments)
    for criteria in ([enter], []):
        ours = dict(arguments, custom_generate=decoder, stopping_criteria=criteria)
        assert torch.equal(llama[0].generate(prompt_of(12), **ours), expected)
    assert len(refused) == 9


NEO = transformers.GPTNeoConfig(**SMALL | dict(num_layers=2, num_heads=4, window_size=12),
                                attention_types=[[["global", "local"], 1]])
T5 = transformers.T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
PAIR = make_pair("gpt2")
LLAMA = make_pair("llama")[1]
UNFIT = [transformers.T5ForConditionalGeneration(T5)]
UNFIT += [make_pair("llama")[0] for _ in range(2)]
for _config in (NEO, transformers.BloomConfig(**SMALL), transformers.MambaConfig(**SMALL),
                transformers.OpenAIGPTConfig(**GPT2)):
    UNFIT.append(transformers.AutoModelForCausalLM.from_config(_config))
UNFIT[1].model.layers[1].to("meta")
UNFIT[2].config._attn_implementation = "flex_attention"


@pytest.mark.parametrize("model", UNFIT, ids=lambda model: type(model).__name__)
def test_a_model_that_is_not_fit_for_trees_is_refused_by_its_name(model):
    for target, draft in ((model, LLAMA), (LLAMA, model)):
        with pytest.raises(ValueError, match=f"{type(model).__name__} .*(tree|must be on one device)"):
            Decoder(target, draft)


def probed(target, draft):
    decoder = Decoder(target, draft, (9, 4))
    out = target.generate(prompt_of(20), custom_generate=decoder, max_new_tokens=12, do_sample=False)
    assert decoder.probed
    return out


@pytest.mark.parametrize("name", [*ARCHITECTURES, *FURTHER])
def test_the_probe_passes_models_that_are_fit_in_both_dtypes(name):
    target, draft = make_pair(name)
    expected = target.generate(prompt_of(20), max_new_tokens=12, do_sample=False)
    assert torch.equal(probed(target, draft), expected)
    target.bfloat16()
    probed(target, draft.bfloat16())
    # Some models give float32 logits whatever they compute in.
    target.register_forward_hook(lambda module, inputs, output: output | dict(logits=output.logits.float()))
    probed(target, draft)


ROBERTA = transformers.RobertaConfig(**SMALL, is_decoder=True)


@pytest.mark.parametrize("config, dtype", [
    (ROBERTA, torch.float32), (ROBERTA, torch.bfloat16), (NEO, torch.float32), (None, torch.float32),
    (None, torch.bfloat16)])
def test_the_probe_refuses_what_masks_or_counts_in_its_own_way(config, dtype, monkeypatch):
    """GPT-Neo's name is known. Here the probe alone finds it."""
    monkeypatch.setattr(sequoia, "attention_windows", lambda model: {"full_attention": None})
    target, draft = make_pair(config or config_of("llama"))
    if config is None:
        # A last layer whose mask is dropped.
        layer = target.model.layers[-1].self_attn
        layer.register_forward_pre_hook(lambda *given: (given[1], given[2] | dict(attention_mask=None)),
                                        with_kwargs=True)
    with pytest.raises(ValueError, match=f"{type(target).__name__} cannot verify a tree: distributions differ"):
        probed(target.to(dtype), draft.to(dtype))


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@needs_cuda
@pytest.mark.parametrize("tree", [Tree([-1]), (16, 5), k_ary(2, 4)])
@pytest.mark.parametrize("method", METHODS)
def test_texts_with_and_without_a_graph_are_identical_and_one_graph_serves_all(tree, method, monkeypatch):
    graphs = []
    graph = torch.cuda.CUDAGraph
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graphs.append(graph()) or graphs[-1])
    target, draft = (model.cuda() for model in make_pair("llama"))
    generator = torch.Generator("cuda")
    decoders = [Decoder(target, draft, tree, method, generator, cuda_graph=graph) for graph in (True, False)]
    for do_sample, length in product((False, True), (20, 9, 31, 20)):
        texts = []
        prompt = prompt_of(length, seed=length).cuda()
        arguments = dict(max_new_tokens=60, do_sample=do_sample)
        for decoder in decoders:
            generator.manual_seed(0)
            texts.append(target.generate(prompt, custom_generate=decoder, **arguments))
        assert torch.equal(*texts)
        if not do_sample:
            assert torch.equal(texts[0], target.generate(prompt, **arguments))
    assert len(graphs) <= 3


# --- 6b  Behind model.generate ------------------------------------------------------------------------------


def test_eos_inside_an_accepted_run_ends_the_text(llama):
    plain = llama[0].generate(prompt_of(10), max_new_tokens=40, do_sample=False)[0]
    for end in set(plain[10:].tolist()):
        arguments = dict(max_new_tokens=40, do_sample=False, eos_token_id=end, pad_token_id=0)
        out = assisted(*llama, prompt_of(10), tree=(16, 5), **arguments)
        assert torch.equal(out, llama[0].generate(prompt_of(10), **arguments))


def test_drop_in_for_generate(llama):
    target, draft = llama
    arguments = dict(max_new_tokens=20, custom_generate=sequoia.decode, draft=draft, tree=(9, 4))
    out = target.generate(prompt_of(10), do_sample=True, num_return_sequences=3, **arguments)
    assert out.shape == (3, 30) and len(set(map(tuple, out.tolist()))) > 1
    out += 1
    out = target.generate(prompt_of(10), do_sample=False, return_dict_in_generate=True, **arguments)
    assert torch.equal(out.sequences, target.generate(prompt_of(10), do_sample=False, max_new_tokens=20))

    def at_17(ids, scores, **kwargs):
        return torch.full((len(ids),), ids.shape[1] >= 17)

    out = target.generate(prompt_of(10), do_sample=False, stopping_criteria=[at_17], **arguments)
    assert out.shape == (1, 17)
    with pytest.raises(ValueError, match="another target"):
        target.generate(prompt_of(10), custom_generate=Decoder(draft, target))


def test_left_padded_batch_equals_generate(llama):
    """Each row has its own grammar, end, padding and, where there is no time, a first token."""
    rows = [prompt_of(length, seed=length)[0].tolist() for length in (5, 9, 12)]
    ids = torch.tensor([[0] * (12 - len(row)) + row for row in rows])
    inputs = dict(input_ids=ids, attention_mask=(ids > 0).long())
    end = int(llama[0].generate(**inputs, max_new_tokens=4, do_sample=False)[0, -1])
    decoder = Decoder(*llama, (9, 4))

    def allowed(row, text):
        assert text[:12].equal(ids[row])
        return [(3 * int(text[-1]) + row) % 64, 7 + row, 9]

    for arguments in (dict(), dict(repetition_penalty=1.3), dict(prefix_allowed_tokens_fn=allowed),
                      dict(max_time=0.0), dict(eos_token_id=end)):
        arguments.update(max_new_tokens=20, do_sample=False, pad_token_id=33)
        out = llama[0].generate(**inputs, custom_generate=decoder, **arguments)
        assert torch.equal(out, llama[0].generate(**inputs, **arguments))
        assert ("max_time" in arguments) == (out.shape[1] == 13)
    assert 33 in out[:, -1]


def test_stop_string_inside_an_accepted_run_ends_the_text(bundled):
    target, draft, plain, tokenizer = bundled
    ids = tokenizer("import os\n\ndef main(", return_tensors="pt")["input_ids"]
    arguments = dict(max_new_tokens=40, do_sample=False, stop_strings="\n", tokenizer=tokenizer)
    out = assisted(target, draft, ids, tree=(16, 5), **arguments)
    assert torch.equal(out, plain.generate(ids, **arguments)) and out.shape[1] < ids.shape[1] + 40


def mask(*padding):
    return torch.ones(1, 12).long().index_fill(1, torch.tensor(padding).long(), 0)


DEAF = transformers.TextStreamer(None, skip_prompt=True)
PLAIN = dict(tree="auto", draft=None)
TWO_ROWS = torch.cat([prompt_of(12), prompt_of(12, seed=1)])
SYNTH_ID = transformers.SynthIDTextWatermarkingConfig(ngram_len=5, keys=[3, 5, 7])
GREEN = transformers.WatermarkingConfig(bias=4.0)
STOP = transformers.GenerationConfig(stop_strings=["a"])
# What is given to generate, as draft, tree and method, or prompt; and the error's words, or generate's text.
TEXT = None
CALLS = [({name: value}, name) for name, value in dict(
        pixel_values=torch.zeros(1, 3, 8, 8), position_ids=torch.arange(3, 15)[None],
        inputs_embeds=torch.ones(1, 12, 32), banana=1, dola_layers="low", num_beams=2, force_words_ids=[[5]],
        past_key_values=transformers.DynamicCache(), prompt_lookup_num_tokens=3,
        output_scores=True, output_attentions=True).items()]
CALLS += [(given, TEXT) for given in (
        dict(pixel_values=None), dict(assistant_model=LLAMA), dict(tree="9x4"), dict(use_cache=False), PLAIN, dict(PLAIN, guidance_scale=1.5),
        dict(watermarking_config=GREEN), dict(prompt=prompt_of(1)), dict(tree=sequences(70, 2)),
        dict(logits_processor=[lambda i, p: p.roll(1)]), dict(prompt=prompt_of(12).int()),
        dict(attention_mask=mask(0, 1)), dict(cache_implementation="static"))]
# Processors that read the text see each node's own path.
CALLS += [(dict(given, max_new_tokens=25), TEXT) for given in (
        dict(repetition_penalty=1.5), dict(no_repeat_ngram_size=2), dict(bad_words_ids=[[5], [7, 9]]),
        dict(min_new_tokens=15, eos_token_id=list(range(2, 40))), dict(sequence_bias=[[[11, 12], 9.0]]),
        dict(prefix_allowed_tokens_fn=lambda i, ids: list(range(2 + len(ids) % 5, 64, 2))))]
CALLS += [(dict(attention_mask=given), "on the left") for given in (mask(3), 0 * mask(), 2 * mask(0))]
CALLS += [
    (dict(guidance_scale=1.5), "Guidance"), (dict(PLAIN, guidance_scale=1.5, prompt=TWO_ROWS), "Guidance"),
    (dict(watermarking_config=SYNTH_ID), "SynthID"), (dict(prompt=prompt_of(12)[:, :0]), "is empty"),
    (dict(prompt=torch.tensor([[-1, 64]])), "0 to 63, got -1 to 64"),
    (dict(penalty_alpha=0.6, top_k=4), "penalty_alpha"), (dict(generation_config=STOP), "tokenizer"),
    (dict(max_new_tokens=300), "up to 256 .* has 12, .* 312"), (dict(draft=None), "got NoneType"),
    (dict(cache_implementation="quantized"), "quant"), (dict(draft="name"), "name; got str"),
    (dict(draft=LLAMA.model), "language model .* LlamaModel"), (dict(method="x"), "got 'x'"),
    (dict(draft=torch.compile(LLAMA)), "compiled .* OptimizedModule"), (dict(tree="9x"), "tree must"),
    (dict(tree=(100, 2)), "no such tree has 100 nodes")]


@pytest.mark.parametrize("given, words", CALLS, ids=[",".join(given) for given, _ in CALLS])
def test_an_unusual_call_gives_generates_text_or_says_what_is_wrong(given, words):
    """Before the first step."""
    target, draft = PAIR
    steps = []
    given = dict(max_new_tokens=20, do_sample=False) | given
    prompt = given.pop("prompt", prompt_of(12))
    ours = dict(draft=draft, tree=(9, 4), on_step=steps.append, custom_generate=sequoia.decode)
    for name in ("draft", "tree", "method"):
        ours[name] = given.pop(name, ours.get(name, "sequoia"))
    if words is TEXT:
        expected = target.generate(prompt, **copy.deepcopy(given))
        assert torch.equal(target.generate(prompt, **ours, **given), expected) and steps
        return
    with pytest.raises((ValueError, RuntimeError, ImportError, NotImplementedError), match=words):
        target.generate(prompt, **ours, **given)
    assert not steps


# --- 7  The planner -----------------------------------------------------------------------------------------


def test_acceptance_rates_approach_the_true_ones():
    """The root's children are accepted by other chances. 0.02 is 5 standard errors of 20,000 counts."""
    true = np.array([[0.3, 0.3, 0.1], [0.5, 0.2, 0.1]])
    tree = k_ary(3, 4)
    rng = np.random.default_rng(0)
    planner = sequoia.Planner(tree, vocabulary=64)
    for _ in range(20_000):
        path = []
        node = 0
        while children := tree.children[node]:
            rates = true[min(len(path), 1)]
            rank = rng.choice(4, p=[*rates, 1 - rates.sum()])
            if rank == 3:
                break
            node = children[rank]
            path.append(node)
        planner.learn(sequoia.Step(tree, [0] * tree.size, path, 0, 1.0), counts=True)
    assert np.abs(planner.rates()[:2, :3] - true).max() < 0.02


def test_the_plan_is_the_best_of_all_sizes_and_depths():
    """Of depths up to 18, twice that of a binary tree of 256 nodes."""
    rates = sequoia.PRIOR[:8]
    sizes = [1, 4, 16, 64]
    table = expected_tokens_table(rates, 64, 24)
    for t, c in (([1.0, 1.02, 1.1, 1.4], 0.05), ([1.0, 1.0, 1.0, 3.0], 0.3), ([1.0, 4.0, 16.0, 64.0], 1.0)):
        times = np.interp(range(65), sizes, t)
        promised = table[1:, 1:].clip(0) / (times[1:, None] + c * np.arange(24))
        found = sequoia.plan(rates, sequoia.Latency(sizes, t, c))
        assert found.speedup == pytest.approx(promised.max())
        assert promised[found.tree.size - 1, found.tree.depth - 1] == pytest.approx(promised.max())
    assert found.tree == Tree([-1]) and found.speedup == 1


# The paper's, of Llama-3-70B with the 8B as its draft.
PAPER_RATES = [0.7732, 0.1039, 0.0402, 0.0206, 0.0128, 0.0081, 0.0064, 0.0043, 0.0035, 0.0026, 0.0025, 0.0021]
# t(n), c, and the least part of the best tree's pace.
MACHINES = {
    "flat to 800": (lambda n: max(1.0, n / 800), 0.002, 0.97, 400), "flat": (lambda n: 1.0, 0.5, 0.97, 100),
    "linear": (lambda n: 0.98 + 0.02 * n, 0.02, 0.96, 60), "slow drafts": (lambda n: 0.98 + 0.02 * n, 0.5, 0.96, 60),
    "kinked": (lambda n: max(1.0, n / 48), 0.1, 0.95, 60),
    "kinked between timed sizes": (lambda n: max(1.0, n / 40), 0.1, 0.95, 60), "no tree pays": (lambda n: n, 1.0, 0.97, 60)}


def simulated(rates, t, c, steps, noise, seed):
    """A planner after so many steps on a machine that takes t(n) + (d - 1) c and noise, which only adds; and
    the seconds of these steps."""
    rng = np.random.default_rng(seed)
    planner = sequoia.Planner("auto", vocabulary=32_000)
    total = 0.0
    for _ in range(steps):
        tree = planner.next_tree()
        path = []
        node = 0
        while children := tree.children[node]:
            chances = rates[: len(children)]
            rank = rng.choice(len(chances) + 1, p=[*chances, 1 - sum(chances)])
            if rank == len(chances):
                break
            node = children[rank]
            path.append(node)
        seconds = (t(tree.size) + (tree.depth - 1) * c) * (1 + noise * rng.exponential())
        total += seconds
        planner.learn(sequoia.Step(tree, [0] * tree.size, path, 0, seconds), counts=True)
    return planner, total


@pytest.mark.parametrize("noise", [0, 0.1])
@pytest.mark.parametrize("name", MACHINES)
def test_the_planner_ends_near_the_best_of_all_trees(name, noise, monkeypatch):
    """With noise within a fifth of it, of three runs the middle one."""
    t, c, least, steps = MACHINES[name]
    planning = []
    cost = sequoia.seconds_to_plan
    plan = sequoia.plan
    monkeypatch.setattr(sequoia, "plan", lambda rates, latency: planning.append(
        cost(latency.sizes[-1])) or plan(rates, latency))
    G = expected_tokens_table(PAPER_RATES, 1024, 24)[1:, 1:].clip(0)
    best = (G / (np.array([t(n) for n in range(1, 1025)])[:, None] + c * np.arange(24))).max()
    found = []
    for seed in range(3):
        planning.clear()
        planner, total = simulated(PAPER_RATES, t, c, steps, noise, seed)
        # At most 2% each, and each twice as late as the one before.
        assert sum(planning) < 0.04 * total
        tree = planner.tree
        found.append(expected_tokens(tree, PAPER_RATES) / (t(tree.size) + (tree.depth - 1) * c) / best)
    assert sorted(found)[1] > least - (0.2 if noise else 0), found


# --- 8  Passes ----------------------------------------------------------------------------------------------


def both_texts(target, draft):
    """One greedy and one sampled."""
    texts = []
    for do_sample in (False, True):
        out = assisted(target, draft, prompt_of(30).to(target.device), do_sample=do_sample,
                               generator=seeded(0, target.device), max_new_tokens=25, tree=(9, 4))
        texts.append(out.tolist())
    return texts


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_and_recorded_output_equals_plain_output(name):
    pair = make_pair(name)
    expected = both_texts(*pair)
    for model in pair:
        assert sequoia.pack(model) is model and sequoia.pack(model) is model
    assert both_texts(*pair) == expected
    assert pair[0].generate(prompt_of(30), max_new_tokens=25, do_sample=False).tolist() == expected[0]


def test_a_pass_that_depends_on_its_tokens_is_not_recorded():
    """A loop over the experts that were hit makes a trace of one run wrong for the next: it is found out."""
    config = transformers.MixtralConfig(**GQA, num_local_experts=4, experts_implementation="eager")
    pair = make_pair(config)
    expected = both_texts(*pair)
    sequoia.pack(pair[0])
    assert both_texts(*pair) == expected and pair[0]._sequoia_pass.__name__ == "forward"
    assert sequoia.pack(make_pair("llama")[0])._sequoia_pass.__name__ != "forward"


def test_a_torch_without_onednns_operators_decodes_unpacked(capfd, monkeypatch):
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    assert run_main(capfd, "--max-new-tokens", "8", "--tree", "8x4")[0] == 0


def test_an_error_in_a_recorded_pass_is_an_error():
    """And no crash of the process: what freezes a trace can leave call stacks that point to freed memory."""
    model = sequoia.CachedModel(sequoia.pack(make_pair("llama")[0]))
    model.feed(torch.arange(4), capacity=32)
    placed = model.place(sequoia.Layout(chain(3), "cpu"), torch.tensor([4]), visible=32)
    ids, positions, slots, *others = model.inputs(torch.arange(5), torch.arange(4), placed)
    for wrong in 3 * [(ids, positions, slots[:2]), (ids + 10**6, positions, slots)]:
        with pytest.raises(RuntimeError):
            model.model._sequoia_pass(*wrong, *others)


@pytest.mark.skipif(not sequoia.packable_dtypes(), reason="nothing is packed here")
def test_a_packed_model_is_neither_saved_nor_loaded_and_one_without_values_stays(llama, tmp_path):
    packed = sequoia.pack(copy.deepcopy(llama[0]))
    for call, given in ((packed.save_pretrained, tmp_path), (packed.load_state_dict, llama[0].state_dict())):
        with pytest.raises(RuntimeError):
            call(given)
    assert sequoia.pack(copy.deepcopy(llama[0]).to("meta")).lm_head.weight.is_meta
    with pytest.raises(ValueError, match="one device"):
        sequoia.pack(UNFIT[1])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("name", ["llama", "gpt-neox", "gpt2", "mistral"])
def test_offloaded_output_equals_resident_output(name, device):
    """For any number of layers that stay, two models at once, and after passes that were broken off."""
    config = config_of(name)
    config.num_hidden_layers = 5
    pair = make_pair(config)
    target, draft = (copy.deepcopy(model).to(device) for model in pair)
    expected = both_texts(target, draft)

    def matrices(found):
        """The bytes of tensors in a weight matrix's shape, which no result of a pass over 30 tokens has."""
        return sum(x.nbytes for x in found if type(x) is torch.Tensor and x.dim() == 2 and min(x.shape) > 30)

    for resident in (0, 1, 2, 4, 5):
        streaming = sequoia.offload(copy.deepcopy(pair[0]), device, resident)
        assert sequoia.pack(streaming) is streaming and not hasattr(streaming, "_sequoia_pass")
        ours, theirs = (next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 5)
                        for model in (streaming, pair[0]))
        held = [matrices(gc.get_objects())]
        with ours[4].register_forward_hook(lambda *_: held.append(matrices(gc.get_objects()))):
            streaming(prompt_of(30).to(device))
        # The last layer has a copy, until another is due.
        copied = theirs[resident:][-1:]
        assert held[1] - held[0] == matrices(p.data for layer in copied for p in layer.parameters())
        assert both_texts(streaming, draft) == expected
        # Weights that are loaded between two passes count.
        streaming.load_state_dict(pair[1].state_dict())
        assert both_texts(streaming, draft) == both_texts(draft, draft)
        streaming.load_state_dict(pair[0].state_dict())
        saved = streaming.state_dict()
        assert all(saved[key].cpu().equal(value) for key, value in pair[0].cpu().state_dict().items())
    both = [sequoia.offload(copy.deepcopy(model), device) for model in pair]
    assert both_texts(*both) == expected

    def interrupt(*_):
        raise KeyboardInterrupt

    for module in [module for module in both[0].modules() if isinstance(module, torch.nn.Linear)][::3]:
        with module.register_forward_pre_hook(interrupt), pytest.raises(KeyboardInterrupt):
            both[0](prompt_of(30).to(device))
    assert both_texts(*both) == expected


def run_main(capfd, *arguments):
    """The exit code, the text on standard output, and what stands on standard error."""
    capfd.readouterr()
    code = sequoia.main(list(arguments))
    out, err = capfd.readouterr()
    return code, out.removesuffix("\n"), err


def cost_of(err):
    """The numbers of tokens and steps that the summary names; there is no other line before it."""
    return tuple(map(int, re.match(r"\ntokens (\d+), steps (\d+), seconds ", err).groups()))


RANKS = """
import os, sys, sequoia
arguments = sys.argv[1:]
for temperature in ("0", "0.6"):
    assert sequoia.main([*arguments, "--temperature", temperature]) == 0
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
def dying(self, *given, calls=[], step=sequoia.TreeStep.__call__):
    calls.append(1)
    if len(calls) == 3 and sequoia.RANK == 1:
        os._exit(7)
    return step(self, *given)
sequoia.TreeStep.__call__ = dying
sys.exit(sequoia.main(arguments))
"""


def test_two_ranks_take_one_processs_tokens_and_one_that_dies_ends_the_other(capfd):
    """Over gloo: greedy, then sampled, then with a rank that dies in its third step."""
    pytest.importorskip("accelerate", reason="transformers' tensor parallelism needs it")
    arguments = ("--max-new-tokens", "16", "--dtype", "float32", "--tree", "16x5")
    texts = [run_main(capfd, *arguments, f"--temperature={t}")[1] for t in (0, 0.6)]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(min(free.getsockname()[1], 65_000))
    settings = dict(WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=port, OMP_NUM_THREADS="1")
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    ranks = []
    for rank in "01":
        environment = {**os.environ, **settings, "RANK": rank, "LOCAL_RANK": rank}
        ranks.append(subprocess.Popen([sys.executable, "-c", RANKS, *arguments], **pipes, env=environment))
    out, err = ranks[0].communicate(timeout=300)
    silence, _ = ranks[1].communicate(timeout=300)
    assert out.startswith(f"{texts[0]}\n{texts[1]}\n")
    assert silence == "" and err.count("\ntokens 16, steps ") == 2
    assert ranks[0].returncode in (1, 2) and ranks[1].returncode == 7
    assert err.strip().splitlines()[-1].startswith("sequoia.py: ") and "Traceback" not in err


# --- 9  The command line ------------------------------------------------------------------------------------


def test_what_is_printed_is_generates_text_and_explain_draws_its_trees(capfd):
    arguments = ("--max-new-tokens", "20", "--tree", "8x4", "--prompt", "import ", "--dtype", "float32")
    target = transformers.AutoModelForCausalLM.from_pretrained(ROOT / "tiny" / "target").float()
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "tiny" / "target")
    ids = tokenizer("import ", return_tensors="pt")["input_ids"]
    expected = tokenizer.decode(target.generate(ids, max_new_tokens=20, do_sample=False)[0])
    code, text, err = run_main(capfd, *arguments, "--temperature", "0")
    tokens, steps = cost_of(err)
    assert (code, text, tokens) == (0, expected, 20)
    assert "last tree 8x4: no step without a tree was timed\nmethod sequoia" in err and "\033" not in err
    code, out, err = run_main(capfd, *arguments, "--temperature", "0", "--explain")
    assert code == 0 and cost_of(err) == (20, steps)
    assert "─" in out and out.count("\nadds ") == steps and out.endswith(f"\n\n{expected}")
    # Greedy, what is accepted is what the target likes best.
    verdicts = re.findall(r"the draft gives ([01].\d+), the target ([01].\d+), (accepted|rejected)\n", out)
    assert {"accepted", "rejected"} == {word for _, _, word in verdicts}
    assert all(float(P) > 1 / 4096 for _, P, word in verdicts if word == "accepted")
    texts = [run_main(capfd, *arguments, "--seed", seed)[1] for seed in "001"]
    assert texts[0] == texts[1] != texts[2]


def test_the_planned_tree_is_greedily_the_same_text_and_says_that_it_was_measured(capfd):
    arguments = ("--max-new-tokens", "300", "--temperature", "0", "--dtype", "float32")
    _, plain, err = run_main(capfd, *arguments, "--tree", "none")
    assert "no tree is used" in err
    _, planned, err = run_main(capfd, *arguments)
    assert planned == plain and cost_of(err)[0] == 300 and "times the speed of no tree" in err
    _, offloaded, err = run_main(capfd, *arguments, "--offload", "--tree", "9x4")
    assert offloaded == plain and cost_of(err)[0] == 300


@pytest.mark.parametrize("where", ["check", "first_step", "program_for"])
@pytest.mark.parametrize("tree", ["8x4", "auto"])
def test_ctrl_c_exits_130(capfd, monkeypatch, where, tree):
    working = getattr(Decoder, where)
    calls = []

    def interrupted(self, *arguments):
        calls.append(1)
        if len(calls) > 3 or where != "program_for":
            raise KeyboardInterrupt
        return working(self, *arguments)

    monkeypatch.setattr(Decoder, where, interrupted)
    code, text, err = run_main(capfd, "--tree", tree)
    assert code == 130 and err == "" and (where != "program_for" or text.startswith(sequoia.PROMPT))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Models of two layers with the bundled tokenizer: a good one, and damaged copies by name."""
    root = tmp_path_factory.mktemp("models")
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "tiny" / "target")
    torch.manual_seed(0)

    def save(name, model):
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)

    config = transformers.LlamaConfig(**SMALL | dict(vocab_size=len(tokenizer), bos_token_id=None))
    save("good", transformers.LlamaForCausalLM(config))
    save("encoder-decoder", UNFIT[0])
    save("recurrent", UNFIT[5])
    tokenizer.add_tokens(["<|other|>"], special_tokens=True)
    config = json.loads((root / "good" / "config.json").read_text())
    weights = (root / "good" / "model.safetensors").read_bytes()
    other = json.loads((root / "good" / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = other["model"]["vocab"]
    first, second = [token for token in vocab if len(token) > 3][:2]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    damage = {
        "model.safetensors": {
            "cut short": weights[: len(weights) // 2], "cut by a byte": weights[:-1], "empty": b"",
            "garbage": b"\x93NUMPY" * 999, "cut in its header": weights[:40], "missing": None},
        "config.json": {"bad json": b'{"model_type": "llama",', "empty json": b"", "no config": None},
        "tokenizer.json": {
            "no tokenizer": None, "bad tokenizer": b"{", "ordinary": json.dumps(other).encode()},
        "generation_config.json": {"special": b'{"repetition_penalty": 1.3}'}}
    for name, change in {
            "more layers": dict(num_hidden_layers=4), "wider": dict(intermediate_size=64),
            "unknown": dict(model_type="medusa"), "other vocabulary": dict(vocab_size=777),
            "no type": dict(model_type=None), "no heads": dict(num_attention_heads=0)}.items():
        damage["config.json"][name] = json.dumps(config | change).encode()
    for file, contents in damage.items():
        for name, content in contents.items():
            shutil.copytree(root / "good", root / name)
            path = root / name / file
            path.unlink() if content is None else path.write_bytes(content)
    tokenizer.save_pretrained(root / "special")
    (root / "empty.txt").write_bytes(b"")
    (root / "binary.txt").write_bytes(b"\xff\xfe\x00\x80")
    return root


BAD_MODELS = ["cut short", "cut by a byte", "empty", "garbage", "cut in its header", "missing", "more layers",
              "wider", "unknown", "other vocabulary", "no type", "no heads", "bad json", "empty json", "none",
              "no config", "no tokenizer", "bad tokenizer", "encoder-decoder", "recurrent", "ordinary"]
BAD_TREES = ["", "banana", "12", "9x", "x4", "9x4x2", "-9x4", "0x4", "9x0", "1.5x3", "100x2", "2x1", "Tree"]
BAD_NUMBERS = {"--temperature": ["-1", "nan"], "--top-p": ["-0.5"], "--top-k": ["-3"],
               "--max-new-tokens": ["0", "99999999999"], "--seed": ["18446744073709551616"]}
# What argparse itself refuses, with a usage text.
BAD_WORDS = {"--top-k": "many", "--temperature": "warm", "--max-new-tokens": "1.5", "--seed": "x",
             "--method": "magic", "--dtype": "int8", "--nonsense": "1"}
BAD_DEVICES = ["banana", "meta", "cpu:x", "", *["cuda", "cuda:0"] * (not torch.cuda.is_available())]
BAD_PROMPTS = ["", "@", "@FOLDER", "@FOLDER/empty.txt", "@FOLDER/binary.txt", "@FOLDER/none.txt", "x\n" * 999]
BAD_REQUESTS = {"a hub name of no form": ["--target", "a/b/c"]}
for _kind, _name, _more in product(("target", "draft"), BAD_MODELS, ([], ["--offload"])):
    BAD_REQUESTS[f"{_kind} {_name}{' offloaded' * len(_more)}"] = [f"--{_kind}", f"FOLDER/{_name}", *_more]
for _name, _values in BAD_NUMBERS.items():
    BAD_REQUESTS |= {f"{_name} {value}": [f"{_name}={value}"] for value in _values}
BAD_REQUESTS |= {f"tree {tree}": [f"--tree={tree}"] for tree in BAD_TREES}
BAD_REQUESTS |= {f"{name} {value}": [name, value] for name, value in BAD_WORDS.items()}
BAD_REQUESTS |= {f"device {name}": ["--device", name] for name in BAD_DEVICES}
BAD_REQUESTS |= {f"prompt {text[-9:]!r}": ["--prompt", text] for text in BAD_PROMPTS}


@pytest.mark.parametrize("request_", BAD_REQUESTS)
def test_bad_input_is_one_line_and_exit_code_2(folders, capfd, request_):
    """Never a traceback, never a text decoded with random weights."""
    arguments = [word.replace("FOLDER", str(folders)) for word in BAD_REQUESTS[request_]]
    good = [f"--target={folders / 'good'}", f"--draft={folders / 'good'}", "--tree=3x2", "--max-new-tokens=4"]
    code, out, err = run_main(capfd, *good, *arguments)
    assert code == 2 and err.startswith("sequoia.py: ") and len(err.splitlines()) == 1
    assert "more layers" not in request_ or re.search("model.layers.[23].", err)
    assert sequoia.PROMPT.startswith(out)


def test_other_special_tokens_and_what_a_generation_config_adds_are_accepted_with_a_line(folders, capfd):
    for target, draft in (("good", "special"), ("special", "good"), ("good", "good")):
        arguments = [f"--target={folders / target}", f"--draft={folders / draft}"]
        with warnings.catch_warnings(record=True) as warned:
            code, _, err = run_main(capfd, *arguments, "--tree=3x2", "--max-new-tokens=4")
            lines = [warnings.formatwarning(one.message, UserWarning, "sequoia.py", 1) for one in warned
                     if one.category is UserWarning]
        assert code == 0 and cost_of(err)[0] == 4
        # Nothing else: an unset --top-k keeps all tokens.
        added = "'RepetitionPenaltyLogitsProcessor', " * (target == "special")
        assert re.findall("processors: (.*)", err) == [f"[{added}'TemperatureLogitsWarper']"]
        assert len(lines) == (target != draft)
        assert all(re.fullmatch("sequoia.py: .*special tokens.*\n", line) for line in lines)
    assert run_main(capfd, f"--target={folders / 'ordinary'}", "--tree=none", "--max-new-tokens=4")[0] == 0


def test_importing_is_silent_and_cheap():
    """Neither plots nor statistics nor any model's code are loaded."""
    code = ("import sys, sequoia; loaded = sys.modules; assert not {'matplotlib', 'scipy', 'pandas', "
            "'transformers.models.llama.modeling_llama'} & set(loaded), 'too much'")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_examples_run(monkeypatch):
    """The docstrings' and the README's. The tree that it shows is the one it says, its tests are here."""
    results = doctest.testmod(sequoia)
    assert results.attempted > 0 and results.failed == 0
    monkeypatch.chdir(ROOT)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"```\n{optimal_tree([0.6, 0.2, 0.1], size=16, depth=6)}\n```" in text
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 4
    namespace = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    tests = Path(__file__).read_text(encoding="utf-8")
    assert all(f"def {name}(" in tests for name in re.findall(r"`(test_\w+)`", text))
