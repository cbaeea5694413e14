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
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import sequoia
from sequoia import (METHODS, Decoder, Tree, chain, expected_tokens, expected_tokens_table, k_ary,
                     optimal_tree, sample_and_verify, sample_with_replacement, sequences)

settings.register_profile("sequoia", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("sequoia")
# The tensors are small. On busy cores threads would wait for each other.
torch.set_num_threads(1)
ROOT = Path(sequoia.__file__).parent
# Those whose chances can be summed up. With shared noise the outcome is a function of the noise alone.
SUMMED_UP = [name for name, method in METHODS.items() if not method.shared_noise]


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """The command line sets how warnings look and how much transformers says. Every test starts anew."""
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    verbosity = transformers.utils.logging.get_verbosity()
    yield
    transformers.utils.logging.set_verbosity(verbosity)


def seeded(seed, device="cpu"):
    return torch.Generator(device).manual_seed(seed)


def test_docstring_examples_run():
    results = doctest.testmod(sequoia)
    assert results.attempted > 0 and results.failed == 0


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
    assert tree.paths() == [(0,), (1,), (2,), (0, 0), (0, 1), (0, 0, 0)]
    # An immutable value.
    same = Tree(np.array(tree.parents))
    assert tree == same and hash(tree) == hash(same)
    assert tree != chain(6)
    with pytest.raises(dataclasses.FrozenInstanceError):
        tree.parents = (-1,)


def test_from_paths_inverts_paths():
    shuffle = random.Random(0).shuffle
    for tree in SMALL_TREES:
        paths = tree.paths()
        shuffle(paths)
        assert Tree.from_paths(paths) == tree
        assert Tree.from_paths([(), *map(list, paths)]) == tree


def test_mask_shows_a_node_its_ancestors_and_itself():
    for tree in SMALL_TREES:
        for node, row in enumerate(tree.mask.tolist()):
            seen = {node}
            while (node := tree.parents[node]) >= 0:
                seen.add(node)
            assert {i for i, visible in enumerate(row) if visible} == seen


def test_drawing_shows_the_tree():
    assert str(Tree([-1])) == "0" and str(chain(3)) == "0──1──2──3"
    assert str(sequences(2, 2)) == ("0─┬─1──3\n"
                                    "  └─2──4")
    words = ["the", "cat", "dog", "sat", "is", "ran"]
    assert Tree([-1, 0, 0, 1, 1, 2]).draw(words) == ("the─┬─cat─┬─sat\n"
                                                     "    │     └─is\n"
                                                     "    └─dog──ran")
    # Every tree's own: the Catalan numbers 1, 1, 2, 5, 14, 42, 132 and 429 of them.
    drawings = {tree.draw("o" * tree.size) for tree in SMALL_TREES}
    assert len(drawings) == len(SMALL_TREES) == 626


def test_chain_sequences_and_k_ary_have_their_shapes():
    assert chain(3) == k_ary(1, 4) == Tree([-1, 0, 1, 2]) and k_ary(5, 1) == Tree([-1])
    assert sequences(2, 3) == Tree([-1, 0, 0, 1, 2, 3, 4])
    assert k_ary(2, 3) == Tree([-1, 0, 0, 1, 1, 2, 2])
    paths = {(i, *[0] * length) for i in range(5) for length in range(8)}
    assert set(sequences(5, 8).paths()) == paths
    paths = [path for level in range(1, 5) for path in product(range(3), repeat=level)]
    assert set(k_ary(3, 5).paths()) == set(paths)


# --- 2  Tree construction: the dynamic program (section 3.1, equation 1; appendix) --------------------------


def score(path, rates):
    """f(v), Definition 3.3: the product of the rates on the way. The last row is for all deeper levels."""
    return math.prod(rates[min(level, len(rates) - 1)][rank] for level, rank in enumerate(path))


def best_first(rates, size, depth=math.inf):
    """The tree of the `size` nodes with the highest scores, taken one by one. Where rates never rise with
    rank, a node's parent and elder siblings score at least as high, so that they are there before it."""
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


@given(acceptance_rates(), st.none() | st.integers(1, 8), st.none() | st.integers(1, 5))
def test_optimal_tree_equals_brute_force(rates, depth, max_branch):
    branch = min(max_branch or 8, rates.shape[-1])
    levels = depth or 8
    best = np.full((9, levels + 1), -np.inf)
    for tree in SMALL_TREES:
        if max(map(len, tree.children)) <= branch and tree.depth <= levels:
            value = 1 + sum(score(path, np.atleast_2d(rates)) for path in tree.paths())
            assert math.isclose(value, expected_tokens(tree, rates), abs_tol=1e-12)
            best[tree.size, tree.depth:] = np.maximum(best[tree.size, tree.depth:], value)
    np.testing.assert_allclose(expected_tokens_table(rates, 8, levels, max_branch), best, atol=1e-12)
    largest = np.flatnonzero(best[:, -1] > 0).max()
    for size in range(1, 9):
        if size > largest:
            with pytest.raises(ValueError, match=f"largest has {largest}$"):
                optimal_tree(rates, size, depth, max_branch)
            continue
        tree = optimal_tree(rates, size, depth, max_branch)
        assert tree.size == size and tree.depth <= levels
        assert max(map(len, tree.children)) <= branch
        assert math.isclose(expected_tokens(tree, rates), best[size, -1], abs_tol=1e-12)


@pytest.mark.parametrize("rates, depth", [
    ([sequoia.PRIOR], None), ([sequoia.PRIOR], 10), ([[2.0**-k for k in range(1, 20)]], 8),
    ([[0.5, 0.2, 0.1, 0.1], [0.9, 0.1, 0, 0], [0.3, 0.3, 0.3, 0.1]], 12)])
def test_optimal_tree_equals_best_first_search_at_768_nodes(rates, depth):
    greedy = best_first(rates, 768, depth or math.inf)
    tree = optimal_tree(rates, 768, depth)
    assert tree.size == greedy.size == 768
    assert tree.depth <= (depth or 768)
    assert expected_tokens(tree, rates) == pytest.approx(expected_tokens(greedy, rates), abs=1e-9)


def test_a_child_beyond_the_last_rate_is_never_accepted_and_deep_trees_need_no_recursion():
    assert expected_tokens(Tree([-1, 0, 0, 2]), [0.5]) == 1.5
    assert expected_tokens(chain(2), []) == 1 and optimal_tree([1.0], 1200) == chain(1199)


WHOLE = "whole number of at least 1"
NO_TREES = [
    (Tree, [()], "root"), (Tree, [(0,)], "root"),
    *[(Tree, [parents], "level order") for parents in (
        (-1, -1), (-1, 1), (-1, 0, 2), (-1, 0, 1, 0), (-1, 0, 0, 2, 1))],
    (Tree.from_paths, [[(0, 0)]], r"\(0,\)"), (Tree.from_paths, [[(1,)]], "elder sibling"),
    (Tree.from_paths, [[(0,), (0, 2)]], "elder sibling"), (Tree.from_paths, [[(-1,)]], "elder sibling"),
    (chain, [0], WHOLE), (sequences, [0, 3], WHOLE), (sequences, [3, 0], WHOLE), (k_ary, [0, 2], WHOLE),
    (k_ary, [2, 0], WHOLE), (k_ary, [1.5, 2], WHOLE), (expected_tokens, [chain(1), [1.1]], r"in \[0, 1\]")]
for _call in (optimal_tree, expected_tokens_table):
    for _bounds in ((0, 3), (-3, 3), (2.5, 3), (3, 0), (3, -1), (3, 3, 0)):
        NO_TREES.append((_call, [[0.5, 0.25], *_bounds], WHOLE))
    for _rates, _message in (
            ([0.5, -0.1], "in .0, 1."), ([1.1], "in .0, 1."), ([0.5, np.nan], "finite"), ([np.inf], "finite"),
            ([0.6, 0.5], "sum to 1.1"), ([[0.6, 0.1], [0.6, 0.5]], "sum to 1.1"), (0.5, r"shape .* got \(\)"),
            (np.zeros((2, 2, 2)), r"got \(2, 2, 2\)"), (np.zeros((0, 3)), r"got \(0, 3\)")):
        NO_TREES.append((_call, [_rates, 3, 3], _message))


@pytest.mark.parametrize("call, arguments, message", NO_TREES)
def test_what_makes_no_tree_is_an_error_that_says_why(call, arguments, message):
    with pytest.raises(ValueError, match=message):
        call(*arguments)


@pytest.mark.parametrize("rates, bounds, largest", [
    ([0.5, 0.25], dict(depth=1), 1), ([0.5, 0.25], dict(depth=3), 7),
    ([0.5, 0.25], dict(depth=3, max_branch=1), 3), ([], {}, 1)])
def test_a_size_that_no_tree_can_have_is_an_error_that_names_the_largest(rates, bounds, largest):
    assert optimal_tree(rates, largest, **bounds).size == largest
    with pytest.raises(ValueError, match=f"largest has {largest}$"):
        optimal_tree(rates, largest + 1, **bounds)


# --- 3  Sampling (section 3.2, Algorithm 2 line 5) ----------------------------------------------------------


def all_proposals(name, draft_probs, k):
    """Every sequence of k proposals that a method makes from draft_probs (V,), (sequences, k), with their
    chances. Each is drawn from the draft, or from what the earlier ones leave of it, -1 for nothing."""
    propose = METHODS[name].propose
    if propose is sequoia.most_likely:
        return propose(draft_probs.log()[None], k), torch.ones(1, dtype=torch.float64)
    repeats = propose is sample_with_replacement
    found = [((), 1.0)]
    for _ in range(k):
        longer = []
        for sequence, chance in found:
            left = {token: p for token, p in enumerate(draft_probs.tolist())
                    if p > 0 and (repeats or token not in sequence)}
            total = sum(left.values())
            for token, p in left.items():
                longer.append(((*sequence, token), chance * p / total))
            if not left:
                longer.append(((*sequence, -1), chance))
        found = longer
    proposals, chances = zip(*found)
    return torch.tensor(proposals), torch.tensor(chances, dtype=torch.float64)


def chi_square_tail(observed, expected):
    """The chance of counts at least as far from the expected ones; 0 if something impossible was observed.
    Neighbouring bins are merged until at least 10 counts are expected in each."""
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


def test_chi_square_tail_is_the_textbooks():
    # Two standard deviations, 0.0455.
    assert chi_square_tail([60, 40], [50, 50]) == pytest.approx(math.erfc(2**0.5), rel=1e-9)
    three = math.exp(-(100 / 30 + 100 / 40) / 2)
    assert chi_square_tail([20, 30, 50], [30, 30, 40]) == pytest.approx(three, rel=1e-9)
    assert chi_square_tail([9, 1, 90], [1, 9, 90]) == 1
    assert chi_square_tail([99, 1], [100, 0]) == 0


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("draft_probs", [[0.5, 0.3, 0.15, 0.05], [0.7, 0.3, 0, 0], [0, 0, 1, 0], [0.25] * 4])
def test_each_proposal_is_distributed_as_the_draft_without_the_earlier_ones(name, draft_probs):
    """Over all sequences of V proposals: also those past the draft's support, of which there are none."""
    n = 100_000
    draft_probs = torch.tensor(draft_probs, dtype=torch.float32)
    tokens = METHODS[name].propose(draft_probs.log().expand(n, 4), 4, seeded(0))
    if METHODS[name].propose is sequoia.most_likely:
        # Which of equals comes first does not matter.
        likeliest = draft_probs.sort(descending=True).values.expand(n, 4)
        assert torch.where(tokens >= 0, draft_probs[tokens], 0).equal(likeliest)
        return
    # Each sequence as a number of base 5.
    powers = 5 ** torch.arange(4)
    possible, chances = all_proposals(name, draft_probs.double(), 4)
    expected = torch.zeros(5**4, dtype=torch.float64)
    expected[((possible + 1) * powers).sum(dim=1)] = n * chances
    observed = ((tokens + 1) * powers).sum(dim=1).bincount(minlength=5**4)
    assert chi_square_tail(observed, expected) > 1e-9


# --- 4  Verification of a node's children (sections 2.2 and 3.2, Algorithm 2) -------------------------------


def distribution(weights):
    weights = torch.as_tensor(weights, dtype=torch.float64)
    return weights / weights.sum()


@st.composite
def pairs_of_distributions(draw):
    """A target's and a draft's distribution over 2 to 4 tokens, in all the relations that make trouble."""
    vocab = draw(st.integers(2, 4))
    weights = st.lists(st.integers(1, 20) | st.just(1e-6), min_size=vocab, max_size=vocab)
    which = st.lists(st.booleans(), min_size=vocab, max_size=vocab).map(np.array)
    target = np.array(draw(weights), dtype=float)
    draft = np.array(draw(weights), dtype=float)
    relation = draw(st.sampled_from(["positive", "with zeros", "equal", "nearly equal", "disjoint",
                                     "one-hot target", "one-hot draft"]))
    if relation == "with zeros":
        target[~draw(which)] = 0
        draft[~draw(which)] = 0
    elif relation == "equal":
        draft = target
    elif relation == "nearly equal":
        draft = target * (1 + 1e-10 * draft)
    elif relation == "disjoint":
        parted = draw(which)
        target = target * parted
        draft = draft * ~parted
    elif relation == "one-hot target":
        target = np.eye(vocab)[draw(st.integers(0, vocab - 1))]
    elif relation == "one-hot draft":
        draft = np.eye(vocab)[draw(st.integers(0, vocab - 1))]
    assume(target.any() and draft.any())
    return distribution(target), distribution(draft)


def ratios_of(name, P, Q, tokens, noise=math.inf):
    """A method's ratios (rows, k) and residual (rows, V). With infinite noise all are computed."""
    return METHODS[name].ratios(P, Q.log(), tokens, torch.full(tokens.shape, noise, dtype=P.dtype))


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
        ratios, residual = sequoia.ratios_in_turn(P, q, tokens, noise)
        ranks, scores = method.verify(p, q, tokens, seeded(9))
        assert len(set(ranks.tolist())) == k + 1
        torch.testing.assert_close(scores.exp(), residual)
        for row in range(len(P)):
            rank, R = sequoia.verify_one_node(P[row], Q[row], tokens[row], noise[row])
            accepted = (noise[row] < ratios[row]).nonzero().flatten().tolist()
            assert rank == ranks[row] == (accepted or [-1])[0]
            if rank < 0:
                torch.testing.assert_close(R, residual[row])
            # A row alone may end early, which changes nothing.
            one = slice(row, row + 1)
            alone, _ = sequoia.ratios_in_turn(P[one], q[one], tokens[one], noise[one])
            assert (noise[row] < alone[0]).nonzero().flatten().tolist()[:1] == accepted[:1]


@given(pairs_of_distributions())
def test_one_child_is_accepted_as_often_as_optimal_transport_allows(pair):
    P, Q = pair
    optimal = 1 - (P - Q).abs().sum() / 2
    for name in ("sequoia", "specinfer", "spectr"):
        _, accepted = outcome(name, P, Q, 1)
        torch.testing.assert_close(accepted.sum(), optimal, rtol=0, atol=1e-6)


@given(pairs_of_distributions())
def test_spectr_accepts_as_often_as_its_best_division_factor(pair):
    """Selection by each of many factors: those are lossless whose residual is nowhere negative."""
    P, Q = pair
    k = 3
    factors = torch.linspace(1, k, 2001, dtype=torch.float64)[:, None]
    taken = torch.minimum(P / factors, Q)
    rejected = 1 - taken.sum(dim=1, keepdim=True)
    tries = sum(rejected**i for i in range(k))
    lossless = (P - tries * taken >= -1e-12).all(dim=1)
    best = (1 - rejected[lossless] ** k).max()
    _, accepted = outcome("spectr", P, Q, k)
    assert accepted.sum().item() == pytest.approx(best.item(), abs=2e-3)


@given(pairs_of_distributions())
def test_sequoia_and_topk_always_accept_when_the_children_cover_the_target(pair):
    P, Q = pair
    possible = int((Q > 0).sum())
    inside = distribution(torch.where(Q > 0, P + 0.01, 0))
    covered = [(inside, possible), (inside, len(Q))]
    if possible == len(Q):
        covered.append((P, len(Q)))
    for name, (target_probs, k) in product(("sequoia", "topk"), covered):
        _, accepted = outcome(name, target_probs, Q, k)
        assert accepted.sum().item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("name, accepted", [
    ("sequoia", 1), ("topk", 1), ("specinfer", 0.75), ("spectr", 0.75), ("naive", 0.75)])
def test_methods_that_repeat_a_child_do_not_cover(name, accepted):
    """The paper's counter-example: with chance 1/4 both children are the token that the target never says.
    And where target and draft agree topk and naive reject a child, which optimal transport would not."""
    both = distribution([0.6, 0.4])
    least = dict(topk=0.6, naive=0.6**2 + 0.4**2)
    assert outcome(name, both, both, 1)[1].item() == pytest.approx(least.get(name, 1))
    found = outcome(name, distribution([1, 0]), distribution([1, 1]), 2)[1].sum().item()
    assert found == pytest.approx(accepted)


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
    """Target and draft prefer opposite ends of the vocabulary, so that an error tilts the counts from end to
    end, which merging neighbours cannot hide."""
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
    "target 0 at draft tokens": ([0, 0, 0.5, 0.5], [0.4, 0.3, 0.2, 0.1]),
    "disjoint": ([0.3, 0.7, 0, 0], [0, 0, 0.5, 0.5]),
    "equal": ([0.4, 0.3, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1]),
    "one-hot target": ([0, 0, 1, 0], [0.4, 0.3, 0.2, 0.1]),
    "one-hot draft": ([0.4, 0.3, 0.2, 0.1], [0, 0, 1, 0]),
    "different one-hots": ([0, 0, 1, 0], [0, 1, 0, 0]),
    "underflow at temperature 0.05": tuple((torch.tensor(logits) / 0.05).softmax(0).tolist() for logits in (
        [8.0, 7.9, 3.0, -9.0], [3.0, 7.9, 2.7, -9.0])),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("hazard", HAZARDS)
def test_output_distribution_survives(hazard, name):
    P, Q = torch.tensor(HAZARDS[hazard], dtype=torch.float32)
    for k in (1, 2, 4):
        counts = count_tokens(name, P, Q, k, 10_000, seeded(k))
        assert chi_square_tail(counts, 10_000 * distribution(P)) > 1e-9


@pytest.mark.parametrize("name", METHODS)
def test_the_accepted_rank_points_at_the_token(name, monkeypatch):
    P, Q = random_rows(1000)
    proposed = []

    def propose(*arguments):
        proposed.append(METHODS["as it is"].propose(*arguments))
        return proposed[-1]

    monkeypatch.setitem(METHODS, "as it is", METHODS[name])
    monkeypatch.setitem(METHODS, "watched", dataclasses.replace(METHODS[name], propose=propose))
    rank, token = sample_and_verify(P, Q, 3, "watched", seeded(0))
    accepted = rank >= 0
    assert rank.shape == token.shape == (1000,) and 0 < accepted.sum() < 1000
    assert proposed[0][accepted, rank[accepted]].equal(token[accepted])


@pytest.mark.parametrize("name", METHODS)
def test_rows_with_fewer_children_are_verified_as_if_alone(name):
    children = (4, 0, 3, 2, 2, 1)
    P, Q = random_rows(6)
    tokens = METHODS[name].propose(Q.log(), 4, seeded(0))
    for row, k in enumerate(children):
        tokens[row, k:] = -1
    ratios, residual = ratios_of(name, P, Q, tokens)
    for row, k in enumerate(children):
        one = slice(row, row + 1)
        k_or_one = max(k, 1)
        alone = ratios_of(name, P[one], Q[one], tokens[one, :k_or_one])
        torch.testing.assert_close((ratios[one, :k_or_one], residual[one]), alone)
        assert (ratios[row, k:] == 0).all()
        if k == 0:
            torch.testing.assert_close(residual[row], P[row])


HALF = torch.full((3, 2), 0.5)
NAN = torch.tensor([[0.5, math.nan]])
NEGATIVE = torch.tensor([[1.5, -0.5]])


@pytest.mark.parametrize("arguments, message", [
    ((NAN, HALF[:1], 1), "no NaN"), ((HALF[:1], NAN, 1), "no NaN"), ((NEGATIVE, HALF[:1], 1), "negative"),
    ((HALF[:1], NEGATIVE, 1), "negative"), ((HALF * 2, HALF, 1), "to 1"), ((HALF, HALF * 0, 1), "to 1"),
    ((HALF, HALF, 3), "k from 1 to V.*3$"), ((HALF, HALF, 0), "k from 1 to V.*0$"),
    ((HALF, HALF[:1], 1), "one shape"), ((HALF[0], HALF[0], 1), "one shape"),
    ((HALF, HALF, 1, "medusa"), "sequoia, specinfer.* medusa")])
def test_what_cannot_be_verified_is_an_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        sample_and_verify(*arguments)


# --- 4b  Verification of a whole tree (section 3.2; traversal: arXiv 2505.12398) ----------------------------
#
# A model is a table for each depth, (V**depth, V): its distributions after every path, whose tokens, read as
# a number of base V, give the row. `tokens` are those of a tree's nodes, -1 where a child does not exist; the
# root's, 0, plays no part.


@st.composite
def trees_and_models(draw, trees=tuple(tree for tree in SMALL_TREES if tree.size <= 6)):
    """A tree, a target and a draft over 2 or 3 tokens. What follows a path is one of a few distributions: so
    target and draft are at times equal, nearly equal, disjoint or one-hot, and differ from path to path."""
    vocab = draw(st.integers(2, 3))
    weight = st.sampled_from([0, 1e-6, 1, 1 + 1e-10, 3, 7])
    weights = st.lists(weight, min_size=vocab, max_size=vocab).filter(any)
    choices = draw(st.lists(weights, min_size=2, max_size=6))
    some = torch.stack([distribution(choice) for choice in choices])
    tree = draw(st.sampled_from([tree for tree in trees if max(map(len, tree.children)) <= vocab]))
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
        order = sequoia.Layout(tree, "cpu").leaves_first.tolist()
        for i, proposal in enumerate(tokens):
            mass, following[i] = METHODS[name].masses(tree, proposal, P[i], Q[i].log())
            free = 1.0
            for node in order:
                last[i, node] = free * mass[node]
                free *= 1 - mass[node]
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
        # Texts that have ended go on as the target would.
        text = text.flatten()[:, None] * probs
        exact = exact.flatten()[:, None] * probs
        for node in range(tree.size):
            if tree.depths[node] == depth:
                text.index_add_(0, number[:, node], ends[:, node])
    torch.testing.assert_close(text, exact, rtol=0, atol=1e-6)


@given(trees_and_models([*map(chain, range(1, 6)), sequences(2, 1), sequences(3, 1)]))
def test_traversal_of_a_chain_yields_at_least_the_walks_tokens_and_of_one_level_the_same(case):
    """On average over all that can be proposed. Of branching trees this is not true."""
    tree, target, draft = case
    tokens, chances = all_tokens_of_a_tree("traversal", tree, draft)
    P = distributions_at(tree, tokens, target)
    Q = distributions_at(tree, tokens, draft)
    yields = torch.tensor(tree.depths) + 1.0
    ends = {name: chances @ outcomes(name, tree, tokens, P, Q)[0] for name in ("traversal", "sequoia")}
    assert ends["traversal"] @ yields.double() > ends["sequoia"] @ yields.double() - 1e-6
    if tree.depth <= 2:
        torch.testing.assert_close(ends["traversal"], ends["sequoia"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", [*METHODS.values(), sequoia.GREEDY], ids=[*METHODS, "greedy"])
@pytest.mark.parametrize("static", [False, True])
def test_a_child_that_does_not_exist_is_never_accepted(method, static):
    """The root's second child is missing, and all below it. The target would take whatever stands there."""
    layout = sequoia.Layout(Tree([-1, 0, 0, 1, 2]), "cpu")
    # Node -1's token at the end.
    tokens = torch.tensor([0, 1, -1, 2, -1, 0])
    q = torch.zeros(5, 3)
    generator = seeded(0)
    for wanted in range(3):
        p = torch.eye(3)[[wanted, 2, 0, 0, 0]].log()
        for _ in range(20):
            found = method.verify_tree(layout, tokens, p.__getitem__, q, generator, static)
            assert torch.cat(found).tolist() == ([3, 0] if wanted == 1 else [0, wanted])


# --- 5  Tree attention and the KV cache ---------------------------------------------------------------------

SMALL = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             max_position_embeddings=256, bos_token_id=1, eos_token_id=None, pad_token_id=0)
GQA = dict(SMALL, num_key_value_heads=2)
GPT2 = dict(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=None,
            pad_token_id=0)
ARCHITECTURES = {
    "llama": lambda: transformers.LlamaConfig(**GQA),
    "qwen2": lambda: transformers.Qwen2Config(**GQA),
    "qwen2 with a window": lambda: transformers.Qwen2Config(
        **GQA, use_sliding_window=True, sliding_window=12, max_window_layers=1),
    "qwen3": lambda: transformers.Qwen3Config(**GQA, head_dim=8),
    "mistral": lambda: transformers.MistralConfig(**GQA, sliding_window=12),
    "mixtral": lambda: transformers.MixtralConfig(**GQA, sliding_window=12, num_local_experts=4),
    "phi3": lambda: transformers.Phi3Config(**GQA, sliding_window=12),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**SMALL),
    "gpt2": lambda: transformers.GPT2Config(**GPT2),
    "opt": lambda: transformers.OPTConfig(**SMALL, ffn_dim=48, word_embed_proj_dim=32),
    "falcon": lambda: transformers.FalconConfig(**SMALL),
    "gemma2": lambda: transformers.Gemma2Config(**GQA, head_dim=8, sliding_window=12),
    "gemma3": lambda: transformers.Gemma3TextConfig(**GQA, head_dim=8, sliding_window=12),
    "gpt-oss": lambda: transformers.GptOssConfig(
        **GQA, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=12,
        layer_types=["sliding_attention", "full_attention"]),
}


def make_pair(config, sharpness=3.0, difference=0.05, seed=0):
    """A random target whose distributions are far from flat, and a draft near it."""
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
    return make_pair(ARCHITECTURES["llama"]())


def prompt_of(length, vocabulary=64, seed=0):
    return torch.randint(2, vocabulary, (1, length), generator=seeded(seed))


def as_it_is(decoder):
    return decoder


def static(decoder):
    """A decoder whose steps have fixed shapes, as on a GPU, where they are recorded."""
    decoder.cuda_graph = True
    decoder.replay = decoder.program
    return decoder


def at_once(ids, scores, **kwargs):
    return torch.ones(len(ids), dtype=torch.bool)


def started(decoder, prompt, **arguments):
    """A decoder after a prompt. Returns the logits that its next token is to be drawn from, too."""
    arguments = dict(max_new_tokens=50, top_k=0, do_sample=False, stopping_criteria=[at_once]) | arguments
    decoder.target.model.generate(prompt, custom_generate=decoder, **arguments)
    return decoder, decoder.begin(prompt[0], padding=0)


def with_tree(decoder, logits, tree):
    """Just before the first step with a tree. Returns the token that is its root."""
    root = decoder.draw_root(logits[-1:])
    decoder.use(tree)
    return root


BUSHY = optimal_tree([0.5, 0.2, 0.1], 14, 5)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss"])
@torch.inference_mode()
def test_tree_attention_equals_one_path_at_a_time(name, monkeypatch):
    """In a step's own pass. Gemma 3 and GPT-OSS have windows of 12, which the prompt of 30 exceeds."""
    target, draft = make_pair(ARCHITECTURES[name]())
    decoder, logits = started(Decoder(target, draft, BUSHY), prompt_of(30))
    with_tree(decoder, logits, BUSHY)
    passes = []
    scored = sequoia.CachedModel.score

    def score(model, tokens, nodes):
        logits = scored(model, tokens, nodes)
        passes.append((model.model, tokens.tolist(), nodes.tolist(), logits))
        return logits

    monkeypatch.setattr(sequoia.CachedModel, "score", score)
    decoder.step()
    assert len(passes) == BUSHY.depth and passes[-1][0] is target
    assert passes[0][2] == [-1, 0]
    for model, tokens, nodes, logits in passes:
        for node, row in zip(nodes, logits):
            text = prompt_of(30)[0].tolist()
            if node >= 0:
                text += [tokens[i] for i in range(BUSHY.size) if BUSHY.mask[node, i]]
            torch.testing.assert_close(row, model(torch.tensor([text])).logits[0, -1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
@torch.inference_mode()
def test_cache_after_steps_equals_fresh_prefill(name):
    """Both models' entries, up to that of node -1, which in the draft is written with the next root: after
    the probe, steps with a tree, plain steps, which the draft does not see, and a tree again."""
    target, draft = make_pair(ARCHITECTURES[name]())
    decoder, logits = started(Decoder(target, draft, BUSHY), prompt_of(20))
    text = prompt_of(20)[0].tolist()
    text.append(decoder.draw_root(logits[-1:]))
    text.append(decoder.probe(logits))
    for tree in (BUSHY, Tree([-1]), chain(3)):
        decoder.use(tree)
        for _ in range(4):
            text += decoder.step().tokens
    assert len(text) > 40 and decoder.text().tolist() == text[:-1]
    assert decoder.length == int(decoder.base) == len(text) - 1
    for model, known in ((decoder.target, len(text) - 1), (decoder.draft, len(text) - 2)):
        fresh = sequoia.CachedModel(model.model)
        fresh.feed(torch.tensor(text), len(text))
        assert len(model.entries) == len(fresh.entries) == 4
        for ours, theirs in zip(model.entries, fresh.entries):
            torch.testing.assert_close(ours[:, :, :known], theirs[:, :, :known], atol=1e-4, rtol=1e-4)


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
    "sequoia": (3_000, 5, "sequoia", {}),
    "top-p": (3_000, 6, "sequoia", dict(top_p=0.8)),
    "min-p": (3_000, 6, "sequoia", dict(min_p=0.15)),
    "temperature and top-k": (2_000, 6, "sequoia", dict(temperature=1.5, top_k=4)),
    "repetition penalty": (2_000, 4, "sequoia", dict(repetition_penalty=1.7)),
    **{name: (2_000, 4, name, {}) for name in METHODS if name != "sequoia"},
}


@pytest.mark.parametrize("case, fixed", [*product(JOINT, [False]), *product(METHODS, [True])])
@torch.inference_mode()
def test_joint_distribution_of_three_tokens_equals_enumeration(case, fixed):
    """Through the real step. The first token comes from the prompt's pass, the others from trees; one decoder
    starts anew each time."""
    runs, vocabulary, method, arguments = JOINT[case]
    config = transformers.GPT2Config(vocab_size=vocabulary, n_embd=32, n_layer=1, n_head=4, n_positions=64,
                                     bos_token_id=None, eos_token_id=None)
    target, draft = map(sequoia.pack, make_pair(config, sharpness=6.0, difference=1.5, seed=3))
    # Most children are not at the root, nor at a level's first node.
    tree = Tree([-1, 0, 0, 1, 1, 2, 2, 2])
    prompt = prompt_of(4, vocabulary)
    decoder = Decoder(target, draft, tree, method, seeded(0))
    if fixed:
        static(decoder)
    decoder, logits = started(decoder, prompt, do_sample=True, **arguments)
    assert decoder.static == fixed
    counts = collections.Counter()
    accepted = 0
    for run in range(runs):
        if run < 200:
            logits = decoder.begin(prompt[0], padding=0)
        else:
            # As `begin` leaves it, without the prompt's pass.
            decoder.seed.random_(generator=decoder.generator)
            decoder.base.fill_(4)
            decoder.length = 4
            decoder.new = []
            decoder.tokens[-1] = prompt[0, -1]
        text = [with_tree(decoder, logits, tree)]
        while len(text) < 3:
            step = decoder.step()
            text += step.tokens
            accepted += len(step.path)
        counts[tuple(text[:3])] += 1
    # Else the draft's tokens would not matter.
    assert accepted > runs / 4
    processors = transformers.LogitsProcessorList(decoder.processors)
    exact = enumerate_texts(target, prompt, 3, processors)
    assert set(counts) <= set(exact)
    observed = [counts[text] for text in exact]
    expected = [runs * p for p in exact.values()]
    assert chi_square_tail(observed, expected) > 1e-9


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_equals_plain_generate(name):
    """For every architecture, with windows of 12 tokens and a text of 60, step by step and static."""
    target, draft = make_pair(ARCHITECTURES[name]())
    arguments = dict(max_new_tokens=30, do_sample=False)
    expected = target.generate(prompt_of(30), **arguments)
    for tree, prepared in product((Tree([-1]), (16, 5), sequences(3, 4)), (as_it_is, static)):
        steps = []
        decoder = prepared(Decoder(target, draft, tree, on_step=steps.append))
        out = target.generate(prompt_of(30), custom_generate=decoder, **arguments)
        assert torch.equal(out, expected) and decoder.static == (prepared is static)
        # A draft this near must save steps. The first two tokens are no step's.
        if tree == Tree([-1]):
            assert len(steps) == 28
        else:
            assert len(steps) < 20
    # To the end of the context: GPT-2 has no embedding beyond, and deeper nodes must not ask for one.
    expected = target.generate(prompt_of(240), max_length=256, do_sample=False)
    out = sequoia.generate(target, draft, prompt_of(240), max_length=256, do_sample=False, tree=(9, 6))
    assert torch.equal(out, expected)


class NothingOnTheCPU(TorchDispatchMode):
    """No operator takes or makes a tensor on the CPU: in a CUDA graph that would be a copy, and an error."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, out))
        assert not any(torch.is_tensor(leaf) and leaf.is_cpu for leaf in leaves), operator
        return out


# There are no float32 experts on the device without values.
ON_META = [("llama", method, greedy) for method in METHODS for greedy in (False, True)] + [
    (name, "sequoia", False) for name in ARCHITECTURES if name not in ("llama", "mixtral", "gpt-oss")]


@pytest.mark.parametrize("name, method, greedy", ON_META)
@torch.inference_mode()
def test_a_static_step_never_asks_the_host(name, method, greedy):
    """What a CUDA graph records must not depend on any value: on the device "meta" there are none, so that
    whoever asks for one fails."""
    decoder = static(Decoder(*make_pair(ARCHITECTURES[name]()), BUSHY, method))
    sampling = {} if greedy else dict(do_sample=True, temperature=0.6, top_k=20, top_p=0.9, min_p=0.1)
    decoder, logits = started(decoder, prompt_of(10), **sampling)
    with_tree(decoder, logits, BUSHY)
    tensors = [(model, name) for model in decoder.models for name in ("model", "entries", "stores")]
    tensors += [(decoder, name) for name in ("base", "tokens", "seed")]
    for owner, name in tensors:
        setattr(owner, name, tree_map(lambda x: x.to("meta"), getattr(owner, name)))
    decoder.layout = None
    decoder.device = torch.device("meta")
    for tree in (Tree([-1]), Tree([-1, 0, 0, 1, 1, 1, 2, 3]), BUSHY):
        decoder.use(tree)
        with NothingOnTheCPU():
            report = decoder.program()
        assert decoder.static and report.is_meta
        assert report.shape == (3 + tree.size,)


class Operators(TorchDispatchMode):
    """Counts operators, but for views, which launch nothing, and while it is paused."""
    VIEWS = ("slice", "select", "view", "expand", "unsqueeze", "squeeze", "split", "unbind", "t", "transpose",
             "detach", "alias", "permute", "as_strided", "_unsafe_view", "split_with_sizes", "lift_fresh")
    count = 0
    paused = False

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += not self.paused and operator.__name__.split(".")[0] not in self.VIEWS
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("do_sample, most", [(False, 150), (True, 550)])
@torch.inference_mode()
def test_a_static_step_of_128_nodes_has_few_operators_outside_its_passes(llama, monkeypatch, do_sample, most):
    tree = optimal_tree(sequoia.PRIOR, 128, 10)
    operators = Operators()
    scored = sequoia.CachedModel.score
    sampling = dict(do_sample=True, temperature=0.6) if do_sample else {}
    decoder, logits = started(static(Decoder(*llama, tree)), prompt_of(10), **sampling)
    with_tree(decoder, logits, tree)

    def score(*arguments):
        operators.paused = True
        logits = scored(*arguments)
        operators.paused = False
        return logits

    monkeypatch.setattr(sequoia.CachedModel, "score", score)
    with operators:
        decoder.step()
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


def test_greedy_equals_plain_generate_on_held_out_prompts(bundled):
    """One decoder for each tree takes all prompts, the planned one included."""
    target, draft, plain, tokenizer = bundled
    decoders = [Decoder(target, draft, tree) for tree in ("auto", (64, 8), sequences(5, 8), Tree([-1]))]
    decoders += [Decoder(target), Decoder(target, None, Tree([-1]))]
    for prompt in held_out_prompts(tokenizer, 128):
        arguments = dict(max_new_tokens=24, do_sample=False, pad_token_id=0)
        expected = plain.generate(prompt, **arguments)
        for decoder in decoders:
            out = target.generate(prompt, custom_generate=decoder, **arguments)
            assert torch.equal(out, expected), decoder.tree


@pytest.mark.parametrize("generator", [None, seeded(1)])
@pytest.mark.parametrize("prepared", [as_it_is, static])
def test_noise_is_fresh_every_step(llama, monkeypatch, generator, prepared):
    """No step draws the numbers of an earlier one (the authors' code draws once a prompt)."""
    drawn = []
    rand = torch.rand

    def watched(*arguments, **kwargs):
        noise = rand(*arguments, **kwargs)
        drawn.append(float(noise.flatten()[0]))
        return noise

    monkeypatch.setattr(torch, "rand", watched)
    decoder = prepared(Decoder(*llama, (6, 3), generator=generator))
    llama[0].generate(prompt_of(8), custom_generate=decoder, max_new_tokens=40, do_sample=True)
    assert len(drawn) > 10 and len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("tree", [(9, 4), sequences(2, 3), Tree([-1])])
def test_the_same_seed_gives_the_same_text(llama, tree):
    def text(seed):
        return sequoia.generate(*llama, prompt_of(8), max_new_tokens=100, do_sample=True, tree=tree,
                                generator=seeded(seed)).tolist()
    assert text(1) == text(1) != text(2)


def recorded(decoder):
    """A stand-in for a CUDA graph: it holds on to the memory and the settings that it was recorded with."""
    graphs = []

    def memory():
        held = [(model.entries, model.stores) for model in decoder.models]
        held += [decoder.tokens, decoder.base, decoder.q, decoder.seed]
        return [tensor.data_ptr() for tensor in tree_leaves(held)]

    def replay():
        if decoder.graph is None:
            decoder.graph = (memory(), decoder.layout, decoder.processors, decoder.method)
            graphs.append(decoder.graph)
        held, layout, processors, method = decoder.graph
        assert held == memory() and layout is decoder.layout
        now = (decoder.processors, decoder.method)
        decoder.processors, decoder.method = processors, method
        report = decoder.program()
        decoder.processors, decoder.method = now
        return report

    decoder.cuda_graph = True
    decoder.replay = replay
    return decoder, graphs


@torch.inference_mode()
def test_one_decoder_takes_text_after_text_and_records_once_for_a_cache(llama):
    """Shorter, longer, and so long that the caches must grow. What an earlier text left in them never shows,
    as after one that ended in an overflow, and a graph never uses memory that has been given up."""
    decoder, graphs = recorded(Decoder(*llama, Tree([-1, 0, 0, 1, 1, 2, 3])))
    cases = ((20, 60, 1), (9, 40, 1), (31, 90, 1), (20, 256, 2), (9, 40, 2), (1, 40, 2),
             (230, 256, 2), (9, 40, 2))
    for length, max_length, expected_graphs in cases:
        for model in decoder.models:
            for store in tree_leaves(model.stores):
                store.fill_(torch.nan)
        prompt = prompt_of(length, seed=length)
        arguments = dict(max_length=max_length, do_sample=False)
        out = llama[0].generate(prompt, custom_generate=decoder, **arguments)
        assert torch.equal(out, llama[0].generate(prompt, **arguments))
        assert len(graphs) == expected_graphs


def test_a_prompt_of_one_token_is_decoded_before_and_after_others(llama):
    """Where the text before has fed the draft, has ended before it could, or does not exist."""
    expected = llama[0].generate(prompt_of(1), max_new_tokens=20, do_sample=False)
    for before in ((), (20,), (2,), (1, 2)):
        decoder = Decoder(*llama, (9, 4))
        for count in before:
            llama[0].generate(prompt_of(10), custom_generate=decoder, max_new_tokens=count, do_sample=False)
        out = llama[0].generate(prompt_of(1), custom_generate=decoder, max_new_tokens=20, do_sample=False)
        assert torch.equal(out, expected), before


@pytest.mark.parametrize("where", ["feed", "take", "score", "move"])
@pytest.mark.parametrize("tree", [(9, 4), "auto"])
def test_a_text_that_is_interrupted_leaves_the_decoder_right(llama, where, tree, monkeypatch):
    """Broken off in the first call of a part of the step, in the second, and in a later one."""
    working = getattr(sequoia.CachedModel, where)
    decoder = Decoder(*llama, tree)
    arguments = dict(max_new_tokens=20, do_sample=False)
    for last in (1, 2, 7):
        calls = []

        def interrupted(*args):
            calls.append(1)
            if len(calls) == last:
                raise KeyboardInterrupt
            return working(*args)

        def interrupted_feed(self, text, capacity, keep=1):
            return interrupted(self, text, capacity, keep)

        monkeypatch.setattr(sequoia.CachedModel, where, interrupted_feed if where == "feed" else interrupted)
        prompt = prompt_of(10, seed=last)
        with contextlib.suppress(KeyboardInterrupt):
            llama[0].generate(prompt, custom_generate=decoder, **arguments)
            assert len(calls) < last
        monkeypatch.setattr(sequoia.CachedModel, where, working)
        out = llama[0].generate(prompt, custom_generate=decoder, **arguments)
        assert torch.equal(out, llama[0].generate(prompt, **arguments))


class Without(transformers.TemperatureLogitsWarper):
    """One of a user's own, whose settings are no numbers."""

    def __init__(self, token):
        super().__init__(1.0)
        self.tokens = torch.tensor([token])

    def __call__(self, input_ids, scores):
        return scores.index_fill(1, self.tokens, -torch.inf)


def test_a_decoder_kept_over_calls_gives_the_text_a_fresh_one_gives(llama):
    """Whatever way of sampling the call before asked for, and with a graph that holds on to it."""
    generator = torch.Generator()
    tree = sequences(2, 3)
    kept, graphs = recorded(Decoder(*llama, tree, generator=generator))
    changes = [{}, {}, dict(temperature=0.5), dict(temperature=0.5, top_p=0.8), dict(top_k=9), dict(top_k=8),
               dict(do_sample=False), dict(repetition_penalty=1.5), dict(bad_words_ids=[[3]]), {},
               dict(bad_words_ids=[[4]]), *[dict(logits_processor=[Without(token)]) for token in (5, 6)], {}]
    for i, change in enumerate(changes):
        fresh = static(Decoder(*llama, tree, generator=generator))
        # The probe is a step more, which draws on the generator.
        fresh.probed = kept.probed
        texts = []
        for decoder in (kept, fresh):
            generator.manual_seed(i)
            arguments = dict(max_new_tokens=24, custom_generate=decoder, do_sample=True) | change
            texts.append(llama[0].generate(prompt_of(6 + 3 * i % 8), **arguments).tolist())
        assert texts[0] == texts[1], change
    assert 4 <= len(graphs) < len(changes)


def test_vocabularies_padded_to_different_lengths():
    target, draft = make_pair(ARCHITECTURES["llama"]())
    expected = target.generate(prompt_of(10), max_new_tokens=20, do_sample=False)
    for size in (60, 80):
        draft.resize_token_embeddings(size)
        arguments = dict(max_new_tokens=20, tree=(9, 4))
        out = sequoia.generate(target, draft, prompt_of(10), do_sample=False, **arguments)
        assert torch.equal(out, expected)
        for method in METHODS:
            out = sequoia.generate(target, draft, prompt_of(10), do_sample=True, method=method, **arguments)
            assert out.shape == (1, 30) and out.max() < 64


@pytest.mark.parametrize("broken", [0, 1])
@pytest.mark.parametrize("do_sample", [False, True])
def test_nan_logits_are_an_error_and_leave_nothing_behind(broken, do_sample):
    target, draft = make_pair(ARCHITECTURES["llama"]())
    expected = target.generate(prompt_of(10), do_sample=False, max_new_tokens=20)
    weight = next((target, draft)[broken].parameters()).data
    whole = weight.clone()
    for method, prepared in product(METHODS, (as_it_is, static)):
        decoder = prepared(Decoder(target, draft, (9, 4), method))
        arguments = dict(custom_generate=decoder, max_new_tokens=20)
        for _ in range(2):
            weight.fill_(math.nan)
            with pytest.raises(ValueError, match="NaN"):
                target.generate(prompt_of(10), do_sample=do_sample, **arguments)
            weight.copy_(whole)
            out = target.generate(prompt_of(10), do_sample=False, **arguments)
            assert torch.equal(out, expected)


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@needs_cuda
@pytest.mark.parametrize("tree", [Tree([-1]), (16, 5), k_ary(2, 4)])
@pytest.mark.parametrize("method", METHODS)
def test_texts_with_and_without_a_graph_are_identical_and_one_graph_serves_all(tree, method, monkeypatch):
    graphs = []
    graph = torch.cuda.CUDAGraph
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graphs.append(graph()) or graphs[-1])
    target, draft = (model.cuda() for model in make_pair(ARCHITECTURES["llama"]()))
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


def test_eos_and_max_new_tokens_inside_an_accepted_run_end_the_text(llama):
    for count, do_sample in product((1, 2, 7, 40), (True, False)):
        arguments = dict(max_new_tokens=count, do_sample=do_sample)
        plain = sequoia.generate(*llama, prompt_of(10), tree=(16, 5), **arguments)[0]
        assert len(plain) == 10 + count
    for end in set(plain[10:].tolist()):
        arguments = dict(max_new_tokens=40, do_sample=False, eos_token_id=end, pad_token_id=0)
        out = sequoia.generate(*llama, prompt_of(10), tree=(16, 5), **arguments)
        assert torch.equal(out, llama[0].generate(prompt_of(10), **arguments))


PROCESSED = [
    dict(repetition_penalty=1.5), dict(no_repeat_ngram_size=2), dict(bad_words_ids=[[5], [7, 9]]),
    dict(min_new_tokens=15, eos_token_id=list(range(2, 40))), dict(suppress_tokens=list(range(20, 50))),
    dict(forced_eos_token_id=3), dict(begin_suppress_tokens=list(range(30))),
    dict(sequence_bias=[[[11], 8.0], [[11, 12], 9.0]]), dict(encoder_repetition_penalty=1.4),
    dict(exponential_decay_length_penalty=(3, 1.5), eos_token_id=4),
    dict(prefix_allowed_tokens_fn=lambda i, ids: list(range(2 + len(ids) % 5, 64, 2)))]


@pytest.mark.parametrize("arguments", PROCESSED, ids=lambda arguments: next(iter(arguments)))
def test_every_logits_processor_sees_each_nodes_own_path(llama, arguments):
    arguments = dict(arguments, max_new_tokens=25, do_sample=False, pad_token_id=0)
    decoder = static(Decoder(*llama, (16, 5)))
    out = llama[0].generate(prompt_of(10), custom_generate=decoder, **arguments)
    assert torch.equal(out, llama[0].generate(prompt_of(10), **arguments))


@pytest.mark.parametrize("method", METHODS)
def test_a_grammar_is_never_asked_what_it_has_ruled_out(llama, method):
    """Where few tokens are allowed the tree's further children are impossible: asked about them it raises."""
    follows = {5: [6, 7], 6: [7], 7: [5, 8, 9], 8: [5], 9: [9, 5]}

    def allowed(row, ids):
        return [5] if len(ids) == 10 else follows[int(ids[-1])]

    arguments = dict(max_new_tokens=30, prefix_allowed_tokens_fn=allowed)
    expected = llama[0].generate(prompt_of(10), do_sample=False, **arguments)
    for do_sample in (False, True):
        decoder = Decoder(*llama, k_ary(3, 4), method, seeded(0))
        out = llama[0].generate(prompt_of(10), custom_generate=decoder, do_sample=do_sample, **arguments)
        assert do_sample or torch.equal(out, expected)
        text = out[0, 10:].tolist()
        assert text[0] == 5
        assert all(after in follows[before] for before, after in pairwise(text))


def test_drop_in_for_generate(llama):
    target, draft = llama
    arguments = dict(max_new_tokens=20, custom_generate=sequoia.decode, draft=draft, tree=(9, 4))
    out = target.generate(prompt_of(10), do_sample=True, num_return_sequences=3, **arguments)
    assert out.shape == (3, 30) and len(set(map(tuple, out.tolist()))) > 1
    # An ordinary tensor, though it was made in inference mode.
    out += 1
    out = target.generate(prompt_of(10), do_sample=False, return_dict_in_generate=True, **arguments)
    assert torch.equal(out.sequences, target.generate(prompt_of(10), do_sample=False, max_new_tokens=20))

    def at_17(ids, scores, **kwargs):
        return torch.full((len(ids),), ids.shape[1] >= 17)

    out = target.generate(prompt_of(10), do_sample=False, stopping_criteria=[at_17], **arguments)
    assert out.shape == (1, 17)


def test_left_padded_batch_equals_generate(llama):
    rows = [prompt_of(length, seed=length)[0].tolist() for length in (5, 9, 12)]
    ids = torch.tensor([[0] * (12 - len(row)) + row for row in rows])
    inputs = dict(input_ids=ids, attention_mask=(ids > 0).long())
    decoder = Decoder(*llama, (9, 4))
    for arguments in (dict(), dict(eos_token_id=list(range(2, 12))), dict(repetition_penalty=1.3),
                      dict(prefix_allowed_tokens_fn=lambda row, ids: range(2 + row, 64, 3))):
        arguments.update(max_new_tokens=20, do_sample=False, pad_token_id=0)
        out = llama[0].generate(**inputs, custom_generate=decoder, **arguments)
        assert torch.equal(out, llama[0].generate(**inputs, **arguments))


def test_streamer_gets_what_generate_gives_it(llama):
    ours = []
    theirs = []
    arguments = dict(max_new_tokens=12, do_sample=False)

    def streamer(put):
        return SimpleNamespace(put=lambda ids: put(ids.flatten().tolist()), end=lambda: put("end"))

    sequoia.generate(*llama, prompt_of(10), tree=(9, 4), streamer=streamer(ours.append), **arguments)
    llama[0].generate(prompt_of(10), streamer=streamer(theirs.append), **arguments)
    assert ours == theirs and ours[-1] == "end"


def test_stop_string_inside_an_accepted_run_ends_the_text(bundled):
    target, draft, plain, tokenizer = bundled
    ids = tokenizer("import os\n\ndef main(", return_tensors="pt")["input_ids"]
    arguments = dict(max_new_tokens=40, do_sample=False, stop_strings="\n", tokenizer=tokenizer)
    out = sequoia.generate(target, draft, ids, tree=(16, 5), **arguments)
    assert torch.equal(out, plain.generate(ids, **arguments))
    assert out.shape[1] < ids.shape[1] + 40


def encoder_decoder():
    sizes = dict(vocab_size=64, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))


def recurrent():
    sizes = dict(vocab_size=64, hidden_size=16, num_hidden_layers=1)
    return transformers.MambaForCausalLM(transformers.MambaConfig(**sizes))


def test_what_cannot_be_decoded_is_a_clear_error(llama):
    for arguments, message in (
            (dict(num_beams=2), "num_beams"), (dict(tree="12"), "'12'"), (dict(tree=(100, 2)), "largest"),
            (dict(output_scores=True, return_dict_in_generate=True), "scores"), (dict(tree=[-1, 0]), "Tree"),
            (dict(method="magic"), "magic")):
        with pytest.raises(ValueError, match=message):
            sequoia.generate(*llama, prompt_of(10), max_new_tokens=5, do_sample=True, **arguments)
    for tree in (k_ary(2, 3), (9, 4)):
        with pytest.raises(ValueError, match="a draft"):
            Decoder(llama[0], None, tree)
    with pytest.raises(ValueError, match="up to 256 tokens"):
        sequoia.generate(*llama, prompt_of(257), max_new_tokens=5)
    with pytest.raises(ValueError, match="another target"):
        llama[0].generate(prompt_of(10), custom_generate=Decoder(*llama[::-1]))
    for model in (encoder_decoder(), recurrent()):
        for target, draft in ((model, llama[1]), (llama[0], model)):
            with pytest.raises(ValueError, match=f"{type(model).__name__} .*tree"):
                Decoder(target, draft)


# --- 7  The planner -----------------------------------------------------------------------------------------


def test_acceptance_rates_approach_the_true_ones():
    """Counts from trees whose children are accepted by known chances, the root's by others. The error of
    20,000 counts is below 0.02; a false alarm (5 standard errors) below 1e-6."""
    true = np.array([[0.3, 0.3, 0.1], [0.5, 0.2, 0.1]])
    tree = k_ary(3, 4)
    rng = np.random.default_rng(0)
    planner = sequoia.Planner(tree, vocabulary=64, warm_up=0)
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
        planner.learn(sequoia.Step(tree, [0] * tree.size, path, 0), seconds=1.0)
    assert np.abs(planner.rates()[:2, :3] - true).max() < 0.02


def test_the_plan_is_the_deepest_within_1_percent_of_the_best_of_all_sizes_and_depths():
    """Of depths up to twice that of a binary tree of the largest size, 7."""
    rates = sequoia.PRIOR[:8]
    sizes = [1, 4, 16, 64]
    table = expected_tokens_table(rates, 64, 14)
    for t, c in (([1.0, 1.02, 1.1, 1.4], 0.05), ([1.0, 1.0, 1.0, 3.0], 0.3), ([1.0, 4.0, 16.0, 64.0], 1.0)):
        times = np.interp(range(65), sizes, t)
        promised = table[1:, 1:].clip(0) / (times[1:, None] + c * np.arange(14))
        found = sequoia.plan(rates, sequoia.Latency(sizes, t, c))
        near = (promised.max(axis=0) > 0.99 * promised.max()).nonzero()[0][-1]
        assert found.tree.depth == near + 1
        assert found.speedup == pytest.approx(promised[:, near].max())
    assert found.tree == Tree([-1]) and found.speedup == 1


# --- 8  Passes ----------------------------------------------------------------------------------------------


def both_texts(target, draft):
    """One greedy and one sampled."""
    texts = []
    for do_sample in (False, True):
        out = sequoia.generate(target, draft, prompt_of(30), do_sample=do_sample, generator=seeded(0),
                               max_new_tokens=25, tree=(9, 4))
        texts.append(out.tolist())
    return texts


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_and_recorded_output_equals_plain_output(name):
    pair = make_pair(ARCHITECTURES[name]())
    expected = both_texts(*pair)
    for model in pair:
        assert sequoia.pack(model) is model and sequoia.pack(model) is model
    assert both_texts(*pair) == expected
    out = pair[0].generate(prompt_of(30), max_new_tokens=25, do_sample=False)
    assert out.tolist() == expected[0]


def test_a_pass_that_depends_on_its_tokens_is_not_recorded():
    """A loop over the experts that were hit makes a trace of one run wrong for the next: it is found out."""
    config = transformers.MixtralConfig(**GQA, num_local_experts=4, experts_implementation="eager")
    pair = make_pair(config)
    expected = both_texts(*pair)
    sequoia.pack(pair[0])
    assert both_texts(*pair) == expected and pair[0].recorded.__name__ == "forward"
    other = sequoia.pack(make_pair(ARCHITECTURES["llama"]())[0])
    assert other.recorded.__name__ != "forward"


def test_an_error_in_a_recorded_pass_is_an_error():
    """And no crash of the process: what freezes a trace can leave call stacks that point to freed memory."""
    model = sequoia.CachedModel(sequoia.pack(make_pair(ARCHITECTURES["llama"]())[0]))
    model.feed(torch.arange(4), capacity=32)
    layout = sequoia.Layout(chain(3), "cpu")
    model.take(sequoia.place(layout, torch.tensor([4]), visible=32))
    ids, positions, slots, *others = model.inputs(torch.arange(5), layout.nodes)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            model.model.recorded(ids, positions, slots[:2], *others)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("name", ["llama", "gpt-neox", "gpt2", "mistral"])
def test_offloaded_output_equals_resident_output(name, device):
    """For any number of layers that stay, two models at once, and after passes that were broken off."""
    config = ARCHITECTURES[name]()
    config.num_hidden_layers = 5
    pair = make_pair(config)

    def texts(target, draft):
        decoder = Decoder(target, draft, (9, 4))
        out = []
        for do_sample in (False, True):
            decoder.generator = seeded(0, device)
            text = target.generate(prompt_of(30).to(device), custom_generate=decoder, max_new_tokens=20,
                                   do_sample=do_sample)
            out.append(text.tolist())
        return out

    target, draft = (copy.deepcopy(model).to(device) for model in pair)
    expected = texts(target, draft)
    for resident in (0, 1, 2, 5):
        streaming = sequoia.offload(copy.deepcopy(pair[0]), device, resident)
        assert sequoia.pack(streaming) is streaming
        assert not hasattr(streaming, "recorded")
        # Of the layers that stream, two are on the device at a time.
        layers = next(m for m in streaming.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 5)
        layers = layers[resident + (5 - resident) % 2 :]
        held = {p.untyped_storage().data_ptr(): p.nbytes for layer in layers for p in layer.parameters()}
        assert sum(held.values()) == sum(p.nbytes for layer in layers[:2] for p in layer.parameters())
        assert texts(streaming, draft) == expected
    both = [sequoia.offload(copy.deepcopy(model), device) for model in pair]
    assert texts(*both) == expected
    for again in (both[0], sequoia.pack(copy.deepcopy(pair[0]))) if device == "cpu" else both:
        with pytest.raises(ValueError, match="packed or offloaded"):
            sequoia.offload(again, device)

    def interrupt(*_):
        raise KeyboardInterrupt

    for module in [module for module in both[0].modules() if isinstance(module, torch.nn.Linear)][::3]:
        with module.register_forward_pre_hook(interrupt), pytest.raises(KeyboardInterrupt):
            both[0](prompt_of(30).to(device))
    assert texts(*both) == expected


def run_main(capfd, *arguments):
    """The exit code, the text on standard output, and what stands on standard error."""
    code = sequoia.main(list(arguments))
    captured = capfd.readouterr()
    return code, captured.out.removesuffix("\n"), captured.err


def cost_of(err):
    """The numbers of tokens and steps that the summary names; there is no other line before it."""
    tokens, steps = re.match(r"\n(\d+) tokens? in (\d+) steps?, ", err).groups()
    return int(tokens), int(steps)


RANKS = """
import os, sys, sequoia
arguments = sys.argv[1:]
for temperature in ("0", "0.6"):
    assert sequoia.main([*arguments, "--temperature", temperature]) == 0
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
step = sequoia.Decoder.step
calls = []
def dying(self):
    calls.append(1)
    if len(calls) == 3 and sequoia.RANK == 1:
        os._exit(7)
    return step(self)
sequoia.Decoder.step = dying
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
    assert silence == ""
    assert err.count("\n16 tokens in ") == 2
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
    assert "\033" not in err
    assert "tree: 8 nodes on 4 levels; method: sequoia" in err and "plan: " not in err
    code, out, err = run_main(capfd, *arguments, "--temperature", "0", "--explain")
    assert code == 0
    assert cost_of(err) == (20, steps)
    assert "─" in out and f"step {steps} " in out
    assert f"step {steps + 1} " not in out
    assert out.endswith(f"\n\n{expected}")
    texts = [run_main(capfd, *arguments, "--seed", seed)[1] for seed in "001"]
    assert texts[0] == texts[1] != texts[2]


def test_the_planned_tree_is_greedily_the_same_text_and_says_that_it_was_measured(capfd):
    arguments = ("--max-new-tokens", "300", "--temperature", "0", "--dtype", "float32")
    _, plain, err = run_main(capfd, *arguments, "--tree", "none")
    assert "plan: " not in err
    _, planned, err = run_main(capfd, *arguments)
    assert planned == plain and cost_of(err)[0] == 300
    assert "plan: " in err
    _, offloaded, err = run_main(capfd, *arguments, "--offload", "--tree", "9x4")
    assert offloaded == plain and cost_of(err)[0] == 300


@pytest.mark.parametrize("where", ["prepare", "begin", "step"])
@pytest.mark.parametrize("tree", ["8x4", "auto"])
def test_ctrl_c_prints_what_there_is_and_exits_130(capfd, monkeypatch, where, tree):
    working = getattr(Decoder, where)
    calls = []

    def interrupted(self, *arguments):
        calls.append(1)
        if len(calls) > 3 or where != "step":
            raise KeyboardInterrupt
        return working(self, *arguments)

    monkeypatch.setattr(Decoder, where, interrupted)
    code, text, err = run_main(capfd, "--tree", tree)
    assert code == 130
    assert cost_of(err)[1] == (3 if where == "step" else 0)


LLAMA = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             max_position_embeddings=256, bos_token_id=None, eos_token_id=None, pad_token_id=0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Models of two layers with the bundled tokenizer: a good one, and damaged copies by name."""
    root = tmp_path_factory.mktemp("models")
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "tiny" / "target")
    torch.manual_seed(0)

    def save(name, model):
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)

    save("good", transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=len(tokenizer), **LLAMA)))
    save("encoder-decoder", encoder_decoder())
    save("recurrent", recurrent())
    config = json.loads((root / "good" / "config.json").read_text())
    weights = (root / "good" / "model.safetensors").read_bytes()
    files = {
        "cut short": weights[: len(weights) // 2], "cut by a byte": weights[:-1], "empty": b"",
        "garbage": b"\x93NUMPY" * 999, "cut in its header": weights[:40], "missing": None}
    configs = {
        "more layers": dict(num_hidden_layers=4), "wider": dict(intermediate_size=64),
        "unknown": dict(model_type="medusa"), "other vocabulary": dict(vocab_size=777),
        "no type": dict(model_type=None), "no heads": dict(num_attention_heads=0)}
    others = ("bad json", "empty json", "no config", "no tokenizer", "bad tokenizer", "ordinary", "special")
    for name in (*files, *configs, *others):
        shutil.copytree(root / "good", root / name)
    for name, content in files.items():
        path = root / name / "model.safetensors"
        path.unlink() if content is None else path.write_bytes(content)
    for name, change in configs.items():
        (root / name / "config.json").write_text(json.dumps(config | change))
    (root / "bad json" / "config.json").write_text('{"model_type": "llama",')
    (root / "empty json" / "config.json").write_text("")
    (root / "no config" / "config.json").unlink()
    (root / "no tokenizer" / "tokenizer.json").unlink()
    (root / "bad tokenizer" / "tokenizer.json").write_text("{")
    tokenizer.add_tokens(["<|other|>"], special_tokens=True)
    tokenizer.save_pretrained(root / "special")
    other = json.loads((root / "ordinary" / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = other["model"]["vocab"]
    first, second = [token for token in vocab if len(token) > 3][:2]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (root / "ordinary" / "tokenizer.json").write_text(json.dumps(other), encoding="utf-8")
    (root / "empty.txt").write_bytes(b"")
    (root / "binary.txt").write_bytes(b"\xff\xfe\x00\x80")
    return root


BAD_MODELS = ["cut short", "cut by a byte", "empty", "garbage", "cut in its header", "missing", "more layers",
              "wider", "unknown", "other vocabulary", "no type", "no heads", "bad json", "empty json", "none",
              "no config", "no tokenizer", "bad tokenizer", "encoder-decoder", "recurrent", "ordinary"]
BAD_TREES = ["", "banana", "12", "9x", "x4", "9x4x2", "9*4", "-9x4", "0x4", "9x0", "1.5x3", "nanx3", "x:auto",
             "kary:2x3", "sequences:3x2", "auto:2x3", "100x2", "2x1", "Tree"]
BAD_NUMBERS = {
    "--temperature": ["-1", "nan", "inf", "-inf", "1e9"], "--top-p": ["-0.5"], "--top-k": ["-3"],
    "--max-new-tokens": ["0", "-5", "99999999999"], "--seed": ["18446744073709551616"]}
# What argparse itself refuses, with a usage text.
BAD_WORDS = {"--top-k": "many", "--temperature": "warm", "--max-new-tokens": "1.5", "--seed": "x",
             "--method": "magic", "--dtype": "int8", "--nonsense": "1"}
BAD_DEVICES = ["banana", "meta", "cpu:x", "", *["cuda", "cuda:0"] * (not torch.cuda.is_available())]
BAD_PROMPTS = ["", "@", "@FOLDER", "@FOLDER/empty.txt", "@FOLDER/binary.txt", "@FOLDER/none.txt",
               "x = 1\n" * 500]
BAD_REQUESTS = {
    **{f"{kind} {name}{' offloaded' * len(more)}": [f"--{kind}", f"FOLDER/{name}", *more]
       for kind, name, more in product(("target", "draft"), BAD_MODELS, ([], ["--offload"]))},
    **{f"tree {tree}": [f"--tree={tree}"] for tree in BAD_TREES},
    **{f"{name} {value}": [f"{name}={value}"] for name, values in BAD_NUMBERS.items() for value in values},
    **{f"{name} {value}": [name, value] for name, value in BAD_WORDS.items()},
    **{f"device {name}": ["--device", name] for name in BAD_DEVICES},
    **{f"prompt {text[-9:]!r}": ["--prompt", text] for text in BAD_PROMPTS},
    "a hub name of no form": ["--target", "a/b/c"]}


@pytest.mark.parametrize("request_", BAD_REQUESTS)
def test_bad_input_is_one_line_and_exit_code_2(folders, capfd, request_):
    """Wrong requests, and damaged models as target and as draft, offloaded or not: never a traceback, never a
    text decoded with random weights."""
    arguments = [word.replace("FOLDER", str(folders)) for word in BAD_REQUESTS[request_]]
    good = [f"--target={folders / 'good'}", f"--draft={folders / 'good'}", "--tree=3x2", "--max-new-tokens=4"]
    try:
        code, out, err = run_main(capfd, *good, *arguments)
    except SystemExit as exit:
        assert exit.code == 2 and "usage: sequoia.py" in capfd.readouterr().err
        assert request_.split()[0] in BAD_WORDS
        return
    assert code == 2 and err.startswith("sequoia.py: ")
    assert len(err.splitlines()) == 1
    # The prompt may be there already.
    assert sequoia.PROMPT.startswith(out)


@pytest.mark.parametrize("kind", ["target", "draft"])
def test_a_bundled_model_with_fewer_layers_than_its_configuration_names_a_weight(capfd, tmp_path, kind):
    shutil.copytree(ROOT / "tiny" / kind, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    layers = config["num_hidden_layers"]
    (tmp_path / "config.json").write_text(json.dumps(config | dict(num_hidden_layers=layers + 2)))
    code, out, err = run_main(capfd, f"--{kind}", str(tmp_path), "--tree", "3x2")
    assert code == 2 and out == ""
    assert len(err.splitlines()) == 1 and f"model.layers.{layers}." in err


def test_tokenizers_that_differ_in_added_special_tokens_are_accepted_with_a_line(folders, capfd):
    for target, draft in (("good", "special"), ("special", "good"), ("good", "good")):
        arguments = [f"--target={folders / target}", f"--draft={folders / draft}"]
        with warnings.catch_warnings(record=True) as warned:
            code, _, err = run_main(capfd, *arguments, "--tree=3x2", "--max-new-tokens=4")
            lines = [warnings.formatwarning(one.message, UserWarning, "sequoia.py", 1) for one in warned
                     if one.category is UserWarning]
        assert code == 0 and cost_of(err)[0] == 4
        assert len(lines) == (target != draft)
        assert all(re.fullmatch("sequoia.py: .*special tokens.*\n", line) for line in lines)
    # Without a tree nothing is asked of the draft.
    assert run_main(capfd, f"--target={folders / 'ordinary'}", "--tree=none", "--max-new-tokens=4")[0] == 0


def test_importing_is_silent_and_cheap():
    """Neither plots nor statistics nor any model's code are loaded."""
    code = ("import sys, sequoia; loaded = sys.modules; assert not {'matplotlib', 'scipy', 'pandas', "
            "'transformers.models.llama.modeling_llama'} & set(loaded), 'too much'")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_readme_examples_run(monkeypatch):
    """Every Python block of the README, in order, in one namespace; the tree it shows is the one it says; the
    tests it names are here."""
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
