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
from itertools import pairwise, permutations, product
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
    return [Tree((*tree.parents, parent)) for tree in all_trees(size - 1)
            for parent in range(max(0, tree.parents[-1]), size - 1)]


SMALL_TREES = [tree for size in range(1, 9) for tree in all_trees(size)]


def test_a_tree_knows_its_shape():
    tree = Tree([-1, 0, 0, 0, 1, 1, 4])
    assert (tree.size, tree.depth) == (7, 4)
    assert tree.depths == (0, 1, 1, 1, 2, 2, 3)
    assert tree.ranks == (0, 0, 1, 2, 0, 1, 0)
    assert tree.children == ((1, 2, 3), (4, 5), (), (), (6,), (), ())
    assert tree.paths() == [(0,), (1,), (2,), (0, 0), (0, 1), (0, 0, 0)]
    # An immutable value.
    same = Tree(np.array(tree.parents))
    assert tree == same and hash(tree) == hash(same) and tree != chain(6)
    with pytest.raises(dataclasses.FrozenInstanceError):
        tree.parents = (-1,)


def test_from_paths_inverts_paths():
    shuffle = random.Random(0).shuffle
    for tree in SMALL_TREES:
        paths = tree.paths()
        shuffle(paths)
        assert Tree.from_paths(paths) == Tree.from_paths([(), *map(list, paths)]) == tree


def test_mask_shows_a_node_its_ancestors_and_itself():
    for tree in SMALL_TREES:
        for node, row in enumerate(tree.mask.tolist()):
            seen = {node}
            while (node := tree.parents[node]) >= 0:
                seen.add(node)
            assert {i for i, visible in enumerate(row) if visible} == seen


def test_drawing_shows_the_tree():
    assert str(Tree([-1])) == "0"
    assert str(chain(3)) == "0──1──2──3"
    assert str(sequences(2, 2)) == ("0─┬─1──3\n"
                                    "  └─2──4")
    words = ["the", "cat", "dog", "sat", "is", "ran"]
    assert Tree([-1, 0, 0, 1, 1, 2]).draw(words) == ("the─┬─cat─┬─sat\n"
                                                     "    │     └─is\n"
                                                     "    └─dog──ran")
    # Every tree's own: the Catalan numbers 1, 1, 2, 5, 14, 42, 132 and 429 of them.
    assert len({tree.draw("o" * tree.size) for tree in SMALL_TREES}) == len(SMALL_TREES) == 626


def test_chain_sequences_and_k_ary_have_their_shapes():
    assert chain(3) == k_ary(1, 4) == Tree([-1, 0, 1, 2]) and k_ary(5, 1) == Tree([-1])
    assert sequences(2, 3) == Tree([-1, 0, 0, 1, 2, 3, 4]) and k_ary(2, 3) == Tree([-1, 0, 0, 1, 1, 2, 2])
    assert set(sequences(5, 8).paths()) == {(i, *[0] * length) for i in range(5) for length in range(8)}
    paths = [path for level in range(1, 5) for path in product(range(3), repeat=level)]
    assert set(k_ary(3, 5).paths()) == set(paths)


# --- 2  Tree construction: the dynamic program (section 3.1, equation 1; appendix) --------------------------


def score(path, rates):
    """f(v), Definition 3.3: the product of the rates on the way. The last row is for all deeper levels."""
    return math.prod(rates[min(level, len(rates) - 1)][rank] for level, rank in enumerate(path))


def best_first(rates, size, depth=math.inf):
    """The tree of the `size` nodes with the highest scores, taken one by one. Where rates never rise with
    rank, a node's parent and elder siblings score at least as high, so that they are there before it."""
    taken, frontier = [], [(-1.0, ())]
    while len(taken) < size:
        path = heapq.heappop(frontier)[1]
        taken.append(path)
        first_child, next_sibling = (*path, 0), (*path[:-1], path[-1] + 1) if path else ()
        for path in filter(None, (first_child, next_sibling)):
            if len(path) < depth and path[-1] < len(rates[0]):
                heapq.heappush(frontier, (-score(path, rates), path))
    return Tree.from_paths(taken)


@st.composite
def acceptance_rates(draw):
    """1-D or 2-D rates, sorted or not, zeros and sums of 1 among them."""
    levels, ranks = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    weights = draw(st.lists(st.lists(st.integers(0, 9), min_size=ranks + 1, max_size=ranks + 1).filter(any),
                            min_size=levels, max_size=levels))
    # The last share is the chance that all are rejected.
    rates = np.array(weights)[:, :ranks] / np.sum(weights, axis=1, keepdims=True)
    if draw(st.booleans()):
        rates = -np.sort(-rates, axis=1)
    return rates[0] if levels == 1 and draw(st.booleans()) else rates


@given(acceptance_rates(), st.none() | st.integers(1, 8), st.none() | st.integers(1, 5))
def test_optimal_tree_equals_brute_force(rates, depth, max_branch):
    branch, levels = min(max_branch or 8, rates.shape[-1]), depth or 8
    best = np.full((9, levels + 1), -np.inf)
    for tree in SMALL_TREES:
        if max(map(len, tree.children)) <= branch and tree.depth <= levels:
            value = 1 + sum(score(path, np.atleast_2d(rates)) for path in tree.paths())
            assert math.isclose(value, expected_tokens(tree, rates), abs_tol=1e-12)
            best[tree.size, tree.depth:] = np.maximum(best[tree.size, tree.depth:], value)
    largest = np.flatnonzero(best[:, -1] > 0).max()
    np.testing.assert_allclose(expected_tokens_table(rates, 8, levels, max_branch), best, atol=1e-12)
    for size in range(1, 9):
        if size > largest:
            with pytest.raises(ValueError, match=f"largest has {largest}$"):
                optimal_tree(rates, size, depth, max_branch)
            continue
        tree = optimal_tree(rates, size, depth, max_branch)
        assert tree.size == size and tree.depth <= levels and max(map(len, tree.children)) <= branch
        assert math.isclose(expected_tokens(tree, rates), best[size, -1], abs_tol=1e-12)


@pytest.mark.parametrize("rates, depth", [
    ([sequoia.PRIOR], None), ([sequoia.PRIOR], 10), ([[2.0**-k for k in range(1, 20)]], 8),
    ([[0.5, 0.2, 0.1, 0.1], [0.9, 0.1, 0, 0], [0.3, 0.3, 0.3, 0.1]], 12)])
def test_optimal_tree_equals_best_first_search_at_768_nodes(rates, depth):
    greedy, tree = best_first(rates, 768, depth or math.inf), optimal_tree(rates, 768, depth)
    assert tree.size == greedy.size == 768 and tree.depth <= (depth or 768)
    assert expected_tokens(tree, rates) == pytest.approx(expected_tokens(greedy, rates), abs=1e-9)


def test_a_child_beyond_the_last_rate_is_never_accepted_and_deep_trees_need_no_recursion():
    assert expected_tokens(Tree([-1, 0, 0, 2]), [0.5]) == 1.5 and expected_tokens(chain(2), []) == 1
    assert optimal_tree([1.0], 1200) == chain(1199)


TABLE, OPTIMAL, WHOLE = expected_tokens_table, optimal_tree, "whole number of at least 1"


@pytest.mark.parametrize("call, arguments, message", [
    (Tree, [()], "root"), (Tree, [(0,)], "root"), *[(Tree, [parents], "level order") for parents in (
        (-1, -1), (-1, 1), (-1, 0, 2), (-1, 0, 1, 0), (-1, 0, 0, 2, 1))],
    (Tree.from_paths, [[(0, 0)]], r"needs \(0,\)"), (Tree.from_paths, [[(1,)]], r"needs \(0,\)"),
    (Tree.from_paths, [[(0,), (0, 2)]], r"needs \(0, 1\)"), (Tree.from_paths, [[(-1,)]], r"needs \(-2,\)"),
    (chain, [0], WHOLE), (sequences, [0, 3], WHOLE), (sequences, [3, 0], WHOLE), (k_ary, [0, 2], WHOLE),
    (k_ary, [2, 0], WHOLE), (k_ary, [1.5, 2], WHOLE),
    *[(call, [[0.5, 0.25], *bounds], WHOLE) for call in (OPTIMAL, TABLE) for bounds in (
        (0, 3), (-3, 3), (2.5, 3), (3, 0), (3, -1), (3, 3, 0))],
    *[(call, [rates, 3, 3], message) for call in (OPTIMAL, TABLE) for rates, message in (
        ([0.5, -0.1], "in .0, 1."), ([1.1], "in .0, 1."), ([0.5, np.nan], "finite"), ([np.inf], "finite"),
        ([0.6, 0.5], "sum to 1.1"), ([[0.6, 0.1], [0.6, 0.5]], "sum to 1.1"), (0.5, r"shape .* got \(\)"),
        (np.zeros((2, 2, 2)), r"got \(2, 2, 2\)"), (np.zeros((0, 3)), r"got \(0, 3\)"))],
    (expected_tokens, [chain(1), [1.1]], r"in \[0, 1\]")])
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
    chances. Each is drawn from the draft, or from what the earlier ones leave of it, or at last uniformly."""
    propose, vocab = METHODS[name].propose, range(len(draft_probs))
    if propose is sequoia.most_likely:
        return propose(draft_probs[None], k), torch.ones(1, dtype=torch.float64)
    repeats = propose is sample_with_replacement

    def chance(sequence):
        chance, draft = 1.0, draft_probs.tolist()
        for i, token in enumerate(sequence):
            if sum(draft) == 0:
                draft = [float(other not in sequence[:i]) for other in range(len(draft))]
            chance *= draft[token] / sum(draft)
            if not repeats:
                draft[token] = 0.0
        return chance

    found = product(vocab, repeat=k) if repeats else permutations(vocab, k)
    found = {sequence: chance(sequence) for sequence in found}
    found = {sequence: chance for sequence, chance in found.items() if chance > 0}
    return torch.tensor(list(found)), torch.tensor(list(found.values()), dtype=torch.float64)


def chi_square_tail(observed, expected):
    """The chance of counts at least as far from the expected ones; 0 if something impossible was observed.
    Neighbouring bins are merged until at least 10 counts are expected in each."""
    observed, expected = (np.asarray(counts, dtype=np.float64) for counts in (observed, expected))
    if observed[expected == 0].any():
        return 0.0
    starts, total = [0], 0.0
    for i, count in enumerate(expected):
        total += count
        if total >= 10 and expected[i + 1:].sum() >= 10:
            starts.append(i + 1)
            total = 0.0
    observed, expected = np.add.reduceat(observed, starts), np.add.reduceat(expected, starts)
    statistic = ((observed - expected) ** 2 / expected).sum()
    halves = torch.tensor([max(len(starts) - 1, 1) / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(*halves).item()


def test_chi_square_tail_is_the_textbooks():
    # Two standard deviations, 0.0455.
    assert chi_square_tail([60, 40], [50, 50]) == pytest.approx(math.erfc(2**0.5), rel=1e-9)
    three = math.exp(-(100 / 30 + 100 / 40) / 2)
    assert chi_square_tail([20, 30, 50], [30, 30, 40]) == pytest.approx(three, rel=1e-9)
    assert chi_square_tail([9, 1, 90], [1, 9, 90]) == 1 and chi_square_tail([99, 1], [100, 0]) == 0


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("draft_probs", [[0.5, 0.3, 0.15, 0.05], [0.7, 0.3, 0, 0], [0, 0, 1, 0], [0.25] * 4])
def test_each_proposal_is_distributed_as_the_draft_without_the_earlier_ones(name, draft_probs):
    """Over all sequences of V proposals: also those past the draft's support, uniform over what is left."""
    draft_probs, n, powers = torch.tensor(draft_probs, dtype=torch.float32), 100_000, 4 ** torch.arange(4)
    tokens = METHODS[name].propose(draft_probs.expand(n, 4), 4, seeded(0))
    if name == "topk":
        # Which of equals comes first does not matter.
        assert draft_probs[tokens].equal(draft_probs.sort(descending=True).values.expand(n, 4))
        return
    possible, chances = all_proposals(name, draft_probs.double(), 4)
    expected = torch.zeros(4**4, dtype=torch.float64).index_put_(((possible * powers).sum(1),), n * chances)
    assert chi_square_tail((tokens * powers).sum(1).bincount(minlength=4**4), expected) > 1e-9


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
    target, draft = np.array([draw(weights), draw(weights)], dtype=float)
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
        target, draft = target * parted, draft * ~parted
    elif relation == "one-hot target":
        target = np.eye(vocab)[draw(st.integers(0, vocab - 1))]
    elif relation == "one-hot draft":
        draft = np.eye(vocab)[draw(st.integers(0, vocab - 1))]
    assume(target.any() and draft.any())
    return distribution(target), distribution(draft)


def ratios_of(name, P, Q, tokens, noise=math.inf):
    """A method's ratios (rows, k) and residual (rows, V). With infinite noise all are computed."""
    return METHODS[name].ratios(P, Q, tokens, torch.full(tokens.shape, noise, dtype=P.dtype))


def outcome(name, target_probs, draft_probs, k):
    """What verifying k children comes to, exactly: the distribution of the emitted token (V,), and each
    child's chance to be the accepted one (k,). `noise < ratio` has the chance min(ratio, 1)."""
    tokens, chances = all_proposals(name, draft_probs, k)
    rows = target_probs.expand(len(tokens), -1), draft_probs.expand(len(tokens), -1)
    ratios, residual = ratios_of(name, *rows, tokens)
    output, accepted = torch.zeros_like(target_probs), torch.zeros(k, dtype=torch.float64)
    for i in range(k):
        passes = chances * ratios[:, i].clamp(max=1)
        output.index_add_(0, tokens[:, i], passes)
        accepted[i] = passes.sum()
        chances = chances - passes
    return output + chances @ residual, accepted


@pytest.mark.parametrize("name", METHODS)
@given(pairs_of_distributions())
def test_output_distribution_equals_target_exactly(name, pair):
    for k in range(1, len(pair[0]) + 1):
        torch.testing.assert_close(outcome(name, *pair, k)[0], pair[0], rtol=0, atol=1e-6)


def random_rows(rows):
    """Target and draft distributions over 6 tokens, (rows, 6) each, far from each other and from uniform."""
    generator = seeded(1)
    return (6 * torch.rand(2, rows, 6, generator=generator, dtype=torch.float64)).softmax(dim=-1)


def test_the_plain_algorithm_for_one_node_equals_the_fast_one_row_by_row():
    """With the same noise: the same rank and residual, through the ratios and through Method.verify."""
    P, Q = random_rows(500)
    for k in (1, 3, 5):
        tokens = METHODS["sequoia"].propose(Q, k, seeded(k))
        noise = torch.rand(tokens.shape, generator=seeded(9), dtype=P.dtype)
        ratios, residual = sequoia.ratios_in_turn(P, Q, tokens, noise)
        ranks, rest = METHODS["sequoia"].verify(P, Q, tokens, seeded(9))
        assert len(set(ranks.tolist())) == k + 1 and rest.equal(residual)
        for row in range(len(P)):
            rank, R = sequoia.verify_one_node(P[row], Q[row], tokens[row], noise[row])
            accepted = (noise[row] < ratios[row]).nonzero().flatten().tolist()
            assert rank == ranks[row] == (accepted or [-1])[0]
            if rank < 0:
                torch.testing.assert_close(R, residual[row])
            # A row alone may end early, which changes nothing.
            one = slice(row, row + 1)
            alone, _ = sequoia.ratios_in_turn(P[one], Q[one], tokens[one], noise[one])
            assert (noise[row] < alone[0]).nonzero().flatten().tolist()[:1] == accepted[:1]


@given(pairs_of_distributions())
def test_one_child_is_accepted_as_often_as_optimal_transport_allows(pair):
    optimal = 1 - (pair[0] - pair[1]).abs().sum() / 2
    for name in ("sequoia", "specinfer", "spectr"):
        torch.testing.assert_close(outcome(name, *pair, 1)[1].sum(), optimal, rtol=0, atol=1e-6)


@given(pairs_of_distributions())
def test_spectr_accepts_as_often_as_its_best_division_factor(pair):
    """Selection by each of many factors: those are lossless whose residual is nowhere negative."""
    (P, Q), k = pair, 3
    factors = torch.linspace(1, k, 2001, dtype=torch.float64)[:, None]
    taken = torch.minimum(P / factors, Q)
    rejected = 1 - taken.sum(dim=1, keepdim=True)
    tries = sum(rejected**i for i in range(k))
    lossless = (P - tries * taken >= -1e-12).all(dim=1)
    best = (1 - rejected[lossless] ** k).max()
    assert outcome("spectr", P, Q, k)[1].sum().item() == pytest.approx(best.item(), abs=2e-3)


@given(pairs_of_distributions())
def test_sequoia_and_topk_always_accept_when_the_children_cover_the_target(pair):
    P, Q = pair
    inside = distribution(torch.where(Q > 0, P + 0.01, 0))
    for name in ("sequoia", "topk"):
        for case in ((P, Q, len(Q)), (inside, Q, int((Q > 0).sum()))):
            assert outcome(name, *case)[1].sum().item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("name, accepted", [
    ("sequoia", 1), ("topk", 1), ("specinfer", 0.75), ("spectr", 0.75), ("naive", 0.75)])
def test_methods_that_repeat_a_child_do_not_cover(name, accepted):
    """The paper's counter-example: with chance 1/4 both children are the token that the target never says.
    And where target and draft agree topk and naive reject a child, which optimal transport would not."""
    both, least = distribution([0.6, 0.4]), dict(topk=0.6, naive=0.6**2 + 0.4**2)
    assert outcome(name, both, both, 1)[1].item() == pytest.approx(least.get(name, 1))
    found = outcome(name, distribution([1, 0]), distribution([1, 1]), 2)[1].sum().item()
    assert found == pytest.approx(accepted)


def count_tokens(name, target_probs, draft_probs, k, samples, generator):
    """How often each token is emitted in `samples` runs, (V,), as many at once as a CPU's cache holds."""
    counts, rows = torch.zeros(len(target_probs), dtype=torch.long), max(1, 2**18 // len(target_probs))
    for start in range(0, samples, rows):
        pair = (probs.expand(min(rows, samples - start), -1) for probs in (target_probs, draft_probs))
        counts += sample_and_verify(*pair, k, name, generator)[1].bincount(minlength=len(counts))
    return counts


@pytest.mark.parametrize("vocab", [2, 4, 16, 4096, 128_256])
@pytest.mark.parametrize("name", METHODS)
def test_output_distribution_equals_target(name, vocab):
    """Target and draft prefer opposite ends of the vocabulary, so that an error tilts the counts from end to
    end, which merging neighbours cannot hide."""
    samples = min(200_000, 2**22 // vocab)
    generator, place = seeded(vocab), torch.linspace(0, 1, vocab)
    noise = torch.rand(2, vocab, generator=generator) + 0.1
    target_weights, draft_weights = noise[0] * torch.exp(-4 * place), noise[1] * torch.exp(-4 * (1 - place))
    target_weights[vocab - vocab // 4:] = 0
    draft_weights[: vocab // 8] = 0
    target_probs, draft_probs = target_weights / target_weights.sum(), draft_weights / draft_weights.sum()
    counts = count_tokens(name, target_probs, draft_probs, min(3, vocab), samples, generator)
    assert chi_square_tail(counts, samples * distribution(target_probs)) > 1e-9


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
    target_probs, draft_probs = torch.tensor(HAZARDS[hazard], dtype=torch.float32)
    for k in (1, 2, 4):
        counts = count_tokens(name, target_probs, draft_probs, k, 10_000, seeded(k))
        assert chi_square_tail(counts, 10_000 * distribution(target_probs)) > 1e-9


@pytest.mark.parametrize("name", METHODS)
def test_the_accepted_rank_points_at_the_token(name):
    P, Q = random_rows(1000)
    tokens = METHODS[name].propose(Q, 3, seeded(0))
    rank, token = sample_and_verify(P, Q, 3, name, seeded(0))
    accepted = rank >= 0
    assert rank.shape == token.shape == (1000,) and 0 < accepted.sum() < 1000
    assert tokens[accepted, rank[accepted]].equal(token[accepted])


@pytest.mark.parametrize("name", METHODS)
def test_rows_with_fewer_children_are_verified_as_if_alone(name):
    children = (4, 0, 3, 2, 2, 1)
    target_probs, draft_probs = random_rows(6)
    tokens = METHODS[name].propose(draft_probs, 4, seeded(0))
    for row, k in enumerate(children):
        tokens[row, k:] = -1
    ratios, residual = ratios_of(name, target_probs, draft_probs, tokens)
    for row, k in enumerate(children):
        alone = slice(row, row + 1)
        expected = ratios_of(name, target_probs[alone], draft_probs[alone], tokens[alone, : max(k, 1)])
        torch.testing.assert_close((ratios[alone, : max(k, 1)], residual[alone]), expected)
        assert (ratios[row, k:] == 0).all()
        assert k or torch.allclose(residual[row], target_probs[row])


HALF, NAN, NEGATIVE = torch.full((3, 2), 0.5), torch.tensor([[0.5, math.nan]]), torch.tensor([[1.5, -0.5]])


@pytest.mark.parametrize("arguments, message", [
    ((NAN, HALF[:1], 1), "NaN"), ((HALF[:1], NAN, 1), "NaN"), ((NEGATIVE, HALF[:1], 1), "negative"),
    ((HALF[:1], NEGATIVE, 1), "negative"), ((HALF * 2, HALF, 1), "to 1"), ((HALF, HALF * 0, 1), "to 1"),
    ((HALF, HALF, 3), "k .*3"), ((HALF, HALF, 0), "k .*0"), ((HALF, HALF[:1], 1), "one shape"),
    ((HALF[0], HALF[0], 1), "one shape"), ((HALF, HALF, 1, "medusa"), "sequoia, specinfer.* medusa")])
def test_what_cannot_be_verified_is_an_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        sample_and_verify(*arguments)


# --- 4b  Verification of a whole tree (section 3.2; traversal: arXiv 2505.12398) ----------------------------
#
# A model is a table for each depth, (V**depth, V): its distributions after every path, whose tokens, read as
# a number of base V, give the row. `tokens` are those of a tree's nodes; the root's, 0, plays no part.


@st.composite
def trees_and_models(draw, trees=tuple(tree for tree in SMALL_TREES if tree.size <= 6)):
    """A tree, a target and a draft over 2 or 3 tokens. What follows a path is one of a few distributions: so
    target and draft are at times equal, nearly equal, disjoint or one-hot, and differ from path to path."""
    vocab, weight = draw(st.integers(2, 3)), st.sampled_from([0, 1e-6, 1, 1 + 1e-10, 3, 7])
    weights = st.lists(weight, min_size=vocab, max_size=vocab).filter(any)
    some = torch.stack([distribution(choice) for choice in draw(st.lists(weights, min_size=2, max_size=6))])
    tree = draw(st.sampled_from([tree for tree in trees if max(map(len, tree.children)) <= vocab]))
    generator = seeded(draw(st.integers(0, 2**32)))
    return tree, *random_models(some, tree.depth, generator)


def random_models(some, depth, generator):
    shapes = [(2, some.shape[1] ** level) for level in range(depth)]
    rows = [torch.randint(len(some), shape, generator=generator) for shape in shapes]
    return [some[target] for target, _ in rows], [some[draft] for _, draft in rows]


def numbers_of_paths(tree, tokens, vocab):
    """(..., size) -> (..., size), the row of each node in its depth's table."""
    number = torch.zeros_like(tokens)
    for node in range(1, tree.size):
        number[..., node] = number[..., tree.parents[node]] * vocab + tokens[..., node]
    return number


def distributions_at(tree, tokens, tables):
    """What a model says after each node: tokens (..., size) -> (..., size, V)."""
    number = numbers_of_paths(tree, tokens, tables[0].shape[1])
    return torch.stack([tables[tree.depths[node]][number[..., node]] for node in range(tree.size)], dim=-2)


def verify_tree(method, layout, tokens, P, Q, generator=None, static=False):
    """A tree's verification as the step asks for it: with node -1's token at the end."""
    tokens = torch.cat([tokens, tokens.new_zeros(1)])
    return method.verify_tree(layout, tokens, lambda nodes: P[list(nodes)], Q, generator, static)


def all_tokens_of_a_tree(name, tree, draft):
    """All that a method can propose in a tree, (proposals, size), and the chances, (proposals,)."""
    vocab = len(draft[0][0])

    @functools.cache
    def proposals(depth, number, k):
        return list(zip(*(part.tolist() for part in all_proposals(name, draft[depth][number], k))))

    def number(tokens, node):
        return 0 if node == 0 else number(tokens, tree.parents[node]) * vocab + tokens[node]

    # In level order a node's children are the next to be known.
    found = [([0], 1.0)]
    for node, children in enumerate(tree.children):
        if children:
            found = [(tokens + more, chance * p) for tokens, chance in found
                     for more, p in proposals(tree.depths[node], number(tokens, node), len(children))]
    tokens, chances = zip(*found)
    return torch.tensor(tokens), torch.tensor(chances, dtype=torch.float64)


def outcomes(name, tree, tokens, P, Q):
    """Verification in closed form: each node's chance to be the last accepted one, (n, size), and the
    distribution of the token that follows it, (n, size, V)."""
    if name == "traversal":
        free, last, following = torch.ones(len(tokens), 1), torch.zeros(tokens.shape).double(), P.clone()
        rows = tokens.T[..., None], P.transpose(0, 1), Q.transpose(0, 1)
        for node, mass, following[:, node] in METHODS[name].sweep(tree, *rows, 0, free.double()):
            last[:, node], free = (free * mass)[:, 0], free * (1 - mass)
        return last, following
    # `last` is a node's chance to be reached, then that to end there.
    last, following = torch.ones(tokens.shape, dtype=torch.float64), P.clone()
    for node, children in enumerate(tree.children):
        if children:
            ratios, following[:, node] = ratios_of(name, P[:, node], Q[:, node], tokens[:, children])
            for child, ratio in zip(children, ratios.clamp(max=1).T):
                last[:, child] = last[:, node] * ratio
                last[:, node] *= 1 - ratio
    return last, following


@pytest.mark.parametrize("name", METHODS)
@given(trees_and_models())
def test_joint_distribution_of_the_text_equals_the_targets_exactly(name, case):
    """All proposals, all outcomes: the path, the token that follows, then the target's own, to the depth."""
    tree, target, draft = case
    tokens, chances = all_tokens_of_a_tree(name, tree, draft)
    P, Q = (distributions_at(tree, tokens, model) for model in (target, draft))
    last, following = outcomes(name, tree, tokens, P, Q)
    number = numbers_of_paths(tree, tokens, vocab=len(target[0][0]))
    ends = chances[:, None, None] * last[..., None] * following
    text, exact = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    for depth, probs in enumerate(target):
        # Texts that have ended go on as the target would.
        text, exact = (joint.flatten()[:, None] * probs for joint in (text, exact))
        for node in range(tree.size):
            if tree.depths[node] == depth:
                text.index_add_(0, number[:, node], ends[:, node])
    torch.testing.assert_close(text, exact, rtol=0, atol=1e-6)


@given(trees_and_models([*map(chain, range(1, 6)), sequences(2, 1), sequences(3, 1)]))
def test_traversal_of_a_chain_yields_at_least_the_walks_tokens_and_of_one_level_the_same(case):
    """On average over all that can be proposed. Of branching trees this is not true."""
    tree, target, draft = case
    tokens, chances = all_tokens_of_a_tree("traversal", tree, draft)
    P, Q = (distributions_at(tree, tokens, model) for model in (target, draft))
    ends = [chances @ outcomes(name, tree, tokens, P, Q)[0] for name in ("traversal", "sequoia")]
    traversal, walk = (end @ (torch.tensor(tree.depths) + 1.0).double() for end in ends)
    assert traversal > walk - 1e-6 and (tree.depth > 2 or torch.allclose(*ends, atol=1e-6))


@pytest.mark.parametrize("method", [*METHODS.values(), sequoia.GREEDY], ids=[*METHODS, "greedy"])
@pytest.mark.parametrize("static", [False, True])
def test_a_child_that_does_not_exist_is_never_accepted(method, static):
    """The root's second child is missing, and all below it. The target would take whatever stands there."""
    tree, generator = Tree([-1, 0, 0, 1, 2]), seeded(0)
    tokens, Q = torch.tensor([0, 1, -1, 2, -1]), torch.full((5, 3), 1 / 3)
    for wanted in range(3):
        P = torch.eye(3)[[wanted, 2, 0, 0, 0]]
        for _ in range(20):
            node, token = verify_tree(method, sequoia.Layout(tree, "cpu"), tokens, P, Q, generator, static)
            assert (node, token) in ([(3, 0)] if wanted == 1 else [(0, wanted)])


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
    target, draft = (transformers.AutoModelForCausalLM.from_config(config).eval() for _ in range(2))
    for p, q in zip(target.parameters(), draft.parameters()):
        if p.ndim > 1:
            p.data *= sharpness
        q.data = p.data + difference * p.std() * torch.randn_like(p) if p.ndim > 1 else p.data.clone()
    return target, draft


@pytest.fixture(scope="module")
def llama():
    return make_pair(ARCHITECTURES["llama"]())


def prompt_of(length, vocabulary=64, seed=0):
    return torch.randint(2, vocabulary, (1, length), generator=seeded(seed))


def static(decoder):
    """A decoder whose steps have fixed shapes, as on a GPU, where they are recorded."""
    decoder.cuda_graph, decoder.replay = True, decoder.program
    return decoder


def at_once(ids, scores, **kwargs):
    return torch.ones(len(ids), dtype=torch.bool)


def started(decoder, prompt, tree, **arguments):
    """A decoder after a prompt, just before its first step with a tree. Returns the first token, too."""
    arguments = dict(max_new_tokens=50, top_k=0, do_sample=False, stopping_criteria=[at_once]) | arguments
    decoder.models[0].generate(prompt, custom_generate=decoder, **arguments)
    first = decoder.begin(prompt[0], prompt)
    decoder.use(tree)
    return decoder, first


BUSHY = optimal_tree([0.5, 0.2, 0.1], 14, 5)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss"])
@torch.inference_mode()
def test_tree_attention_equals_one_path_at_a_time(name, monkeypatch):
    """In a step's own pass. Gemma 3 and GPT-OSS have windows of 12, which the prompt of 30 exceeds."""
    target, draft = make_pair(ARCHITECTURES[name]())
    decoder, _ = started(Decoder(target, draft, BUSHY), prompt_of(30), BUSHY)
    passes, scored = [], sequoia.CachedModel.score

    def score(model, tokens, nodes):
        passes.append((model.model, tokens.tolist(), nodes.tolist(), scored(model, tokens, nodes)))
        return passes[-1][-1]

    monkeypatch.setattr(sequoia.CachedModel, "score", score)
    decoder.step()
    assert passes[-1][0] is target and len(passes) == BUSHY.depth and passes[0][2] == [-1, 0]
    for model, tokens, nodes, logits in passes:
        for node, row in zip(nodes, logits):
            path = [tokens[i] for i in range(BUSHY.size) if BUSHY.mask[node, i]] if node >= 0 else []
            text = prompt_of(30)[0].tolist() + path
            torch.testing.assert_close(row, model(torch.tensor([text])).logits[0, -1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
@torch.inference_mode()
def test_cache_after_steps_equals_fresh_prefill(name):
    """Both models' entries, up to that of node -1, which in the draft is written with the next root."""
    target, draft = make_pair(ARCHITECTURES[name]())
    decoder, first = started(Decoder(target, draft, BUSHY), prompt_of(20), BUSHY)
    text = [*prompt_of(20)[0].tolist(), first]
    for _ in range(7):
        text += decoder.step().tokens
    assert len(text) > 30 and decoder.length == int(decoder.base) == len(text) - 1
    for model, known in ((decoder.target, len(text) - 1), (decoder.draft[0], len(text) - 2)):
        fresh = sequoia.CachedModel(model.model, len(text))
        fresh.feed(torch.tensor(text))
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
        texts = {text + (token,): p * probs[i, token].item() for i, (text, p) in enumerate(texts.items())
                 for token in range(probs.shape[1]) if probs[i, token] > 0}
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
    tree, prompt = Tree([-1, 0, 0, 1, 1, 2, 2, 2]), prompt_of(4, vocabulary)
    decoder = Decoder(target, draft, tree, method, seeded(0))
    started(static(decoder) if fixed else decoder, prompt, tree, do_sample=True, **arguments)
    assert decoder.static == fixed
    begin, counts = (decoder.base.clone(), prompt, 4), collections.Counter()
    first = enumerate_texts(target, prompt, 1, decoder.processors)
    first = torch.tensor([[first.get((token,), 0.0) for token in range(vocabulary)]])
    for run in range(runs):
        if run < 200:
            text = [decoder.begin(prompt[0], prompt)]
        else:
            # As `begin` leaves it, without the prompt's pass.
            decoder.base, decoder.history, decoder.length = begin[0].clone(), *begin[1:]
            text = sample_with_replacement(first, 1, decoder.generator)[0].tolist()
            decoder.tokens[0], decoder.tokens[-1] = text[0], prompt[0, -1]
        while len(text) < 3:
            text += decoder.step().tokens
        counts[tuple(text[:3])] += 1
    # Else the draft's tokens would not matter.
    assert decoder.acceptance.accepted.sum() > runs / 4
    exact = enumerate_texts(target, prompt, 3, decoder.processors)
    assert set(counts) <= set(exact)
    observed, probs = ([table[text] for text in exact] for table in (counts, exact))
    assert chi_square_tail(observed, [runs * p for p in probs]) > 1e-9


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_equals_plain_generate(name):
    """For every architecture, with windows of 12 tokens and a text of 60, step by step and static."""
    target, draft = make_pair(ARCHITECTURES[name]())
    arguments = dict(max_new_tokens=30, do_sample=False)
    expected = target.generate(prompt_of(30), **arguments)
    for tree in (Tree([-1]), (16, 5), sequences(3, 4)):
        for prepared in (lambda decoder: decoder, static):
            steps = []
            decoder = prepared(Decoder(target, draft, tree, on_step=steps.append))
            assert torch.equal(target.generate(prompt_of(30), custom_generate=decoder, **arguments), expected)
            assert decoder.static == (prepared is static)
            # A draft this near must save steps.
            assert len(steps) < (30 if tree == Tree([-1]) else 20)
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
    started(decoder, prompt_of(10), BUSHY, **sampling)
    for owner, name in product((decoder.target, *decoder.draft), ("model", "entries", "buffers")):
        setattr(owner, name, tree_map(lambda x: x.to("meta"), getattr(owner, name)))
    decoder.base, decoder.tokens = decoder.base.to("meta"), decoder.tokens.to("meta")
    decoder.layout, decoder.device = None, torch.device("meta")
    for tree in (Tree([-1]), Tree([-1, 0, 0, 1, 1, 1, 2, 3]), BUSHY):
        decoder.use(tree)
        with NothingOnTheCPU():
            report = decoder.program()
        assert decoder.static and report.is_meta and report.shape == (3 + tree.size,)


class Operators(TorchDispatchMode):
    """Counts operators, but for views, which launch nothing, and while it is paused."""
    VIEWS = ("slice", "select", "view", "expand", "unsqueeze", "squeeze", "split", "unbind", "t", "transpose",
             "detach", "alias", "permute", "as_strided", "_unsafe_view", "split_with_sizes", "lift_fresh")
    count, paused = 0, False

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += not self.paused and operator.__name__.split(".")[0] not in self.VIEWS
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("do_sample, most", [(False, 130), (True, 550)])
@torch.inference_mode()
def test_a_static_step_of_128_nodes_has_few_operators_outside_its_passes(llama, monkeypatch, do_sample, most):
    tree, operators, scored = optimal_tree(sequoia.PRIOR, 128, 10), Operators(), sequoia.CachedModel.score
    sampling = dict(do_sample=True, temperature=0.6) if do_sample else {}
    decoder, _ = started(static(Decoder(*llama, tree)), prompt_of(10), tree, **sampling)

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
@pytest.mark.parametrize("prepared", [lambda decoder: decoder, static], ids=["walk", "static"])
def test_noise_is_fresh_every_step(llama, monkeypatch, generator, prepared):
    """No step draws the numbers of an earlier one (the authors' code draws once a prompt)."""
    drawn, rand = [], torch.rand
    monkeypatch.setattr(torch, "rand", lambda *a, **kwargs: drawn.append(rand(*a, **kwargs)) or drawn[-1])
    decoder = prepared(Decoder(*llama, (6, 3), generator=generator))
    llama[0].generate(prompt_of(8), custom_generate=decoder, max_new_tokens=40, do_sample=True)
    values = [float(noise.flatten()[0]) for noise in drawn]
    assert len(values) > 10 and len(set(values)) == len(values)


@pytest.mark.parametrize("tree", [(9, 4), sequences(2, 3), Tree([-1])])
def test_the_same_seed_gives_the_same_text(llama, tree):
    def text(seed):
        return sequoia.generate(*llama, prompt_of(8), max_new_tokens=100, do_sample=True, tree=tree,
                                generator=seeded(seed)).tolist()
    assert text(1) == text(1) != text(2)


def recorded(decoder):
    """A stand-in for a CUDA graph: it holds on to the memory and the settings that it was recorded with."""
    graphs = []

    def held():
        held = [(model.entries, model.buffers) for model in (decoder.target, *decoder.draft)]
        held += [decoder.tokens, decoder.base, decoder.Q]
        return [tensor.data_ptr() for tensor in tree_leaves(held)]

    def replay():
        if decoder.graph is None:
            decoder.graph = held(), decoder.layout, decoder.processors, decoder.method, decoder.greedy
            graphs.append(decoder.graph)
        memory, layout, *settings = decoder.graph
        assert memory == held() and layout is decoder.layout
        now = decoder.processors, decoder.method, decoder.greedy
        decoder.processors, decoder.method, decoder.greedy = settings
        report = decoder.program()
        decoder.processors, decoder.method, decoder.greedy = now
        return report

    decoder.cuda_graph, decoder.replay = True, replay
    return decoder, graphs


@torch.inference_mode()
def test_one_decoder_takes_text_after_text_and_records_once_for_a_cache(llama):
    """Shorter, longer, and so long that the caches must grow. What an earlier text left in them never shows,
    as after one that ended in an overflow, and a graph never uses memory that has been given up."""
    decoder, graphs = recorded(Decoder(*llama, Tree([-1, 0, 0, 1, 1, 2, 3])))
    cases = ((20, 60, 1), (9, 40, 1), (31, 90, 1), (20, 256, 2), (9, 40, 2), (230, 256, 2), (9, 40, 2))
    for length, max_length, expected_graphs in cases:
        for model in (decoder.target, *decoder.draft) if decoder.capacity else ():
            for buffer in tree_leaves(model.buffers):
                buffer.fill_(torch.nan)
        prompt, arguments = prompt_of(length, seed=length), dict(max_length=max_length, do_sample=False)
        out = llama[0].generate(prompt, custom_generate=decoder, **arguments)
        assert torch.equal(out, llama[0].generate(prompt, **arguments))
        assert len(graphs) == expected_graphs


@pytest.mark.parametrize("where", ["feed", "place", "score", "move"])
@pytest.mark.parametrize("tree", [(9, 4), "auto"])
def test_a_text_that_is_interrupted_leaves_the_decoder_right(llama, where, tree, monkeypatch):
    """Broken off in the first call of a part of the step, in the second, and in a later one."""
    working, decoder = getattr(sequoia.CachedModel, where), Decoder(*llama, tree)
    arguments = dict(max_new_tokens=20, do_sample=False)
    for last in (1, 2, 7):
        calls = []

        def interrupted(*args):
            calls.append(1)
            if len(calls) == last:
                raise KeyboardInterrupt
            return working(*args)

        monkeypatch.setattr(sequoia.CachedModel, where, interrupted)
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
    generator, tree = torch.Generator(), sequences(2, 3)
    kept, graphs = recorded(Decoder(*llama, tree, generator=generator))
    changes = [{}, {}, dict(temperature=0.5), dict(temperature=0.5, top_p=0.8), dict(top_k=9), dict(top_k=8),
               dict(do_sample=False), dict(repetition_penalty=1.5), dict(bad_words_ids=[[3]]), {},
               dict(bad_words_ids=[[4]]), *[dict(logits_processor=[Without(token)]) for token in (5, 6)], {}]
    for i, change in enumerate(changes):
        texts = []
        for decoder in (kept, Decoder(*llama, tree, generator=generator)):
            generator.manual_seed(i)
            arguments = dict(max_new_tokens=24, custom_generate=decoder, do_sample=True) | change
            if decoder is not kept:
                static(decoder)
            texts.append(llama[0].generate(prompt_of(6 + 3 * i % 8), **arguments).tolist())
        assert texts[0] == texts[1], change
    assert 4 <= len(graphs) < len(changes)


def test_vocabularies_padded_to_different_lengths():
    target, draft = make_pair(ARCHITECTURES["llama"]())
    for size in (60, 80):
        draft.resize_token_embeddings(size)
        expected = target.generate(prompt_of(10), max_new_tokens=20, do_sample=False)
        for do_sample in (False, True):
            arguments = dict(max_new_tokens=20, do_sample=do_sample, tree=(9, 4))
            out = sequoia.generate(target, draft, prompt_of(10), **arguments)
            assert torch.equal(out, expected) or do_sample and out.max() < 64


@pytest.mark.parametrize("broken", [0, 1])
@pytest.mark.parametrize("do_sample", [False, True])
def test_nan_logits_are_an_error_and_leave_nothing_behind(broken, do_sample):
    pair = make_pair(ARCHITECTURES["llama"]())
    for method in METHODS:
        decoder = Decoder(*pair, (9, 4), method)
        arguments = dict(custom_generate=decoder, max_new_tokens=20)
        weight = next(pair[broken].parameters()).data
        whole = weight.clone()
        for prepared in (lambda decoder: decoder, static):
            weight.fill_(math.nan)
            with pytest.raises(ValueError, match="NaN"):
                pair[0].generate(prompt_of(10), do_sample=do_sample, **arguments)
            weight.copy_(whole)
            out = pair[0].generate(prompt_of(10), do_sample=False, **arguments)
            assert torch.equal(out, pair[0].generate(prompt_of(10), do_sample=False, max_new_tokens=20))
            prepared(decoder)


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@needs_cuda
@pytest.mark.parametrize("tree", [Tree([-1]), (16, 5), k_ary(2, 4)])
@pytest.mark.parametrize("method", METHODS)
def test_texts_with_and_without_a_graph_are_identical_and_one_graph_serves_all(tree, method, monkeypatch):
    graphs, graph = [], torch.cuda.CUDAGraph
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graphs.append(graph()) or graphs[-1])
    target, draft = (model.cuda() for model in make_pair(ARCHITECTURES["llama"]()))
    generator = torch.Generator("cuda")
    decoders = [Decoder(target, draft, tree, method, generator, cuda_graph=graph) for graph in (True, False)]
    for do_sample, length in product((False, True), (20, 9, 31, 20)):
        texts, prompt = [], prompt_of(length, seed=length).cuda()
        arguments = dict(max_new_tokens=60, do_sample=do_sample)
        for decoder in decoders:
            generator.manual_seed(0)
            texts.append(target.generate(prompt, custom_generate=decoder, **arguments))
        assert torch.equal(*texts)
        assert do_sample or torch.equal(texts[0], target.generate(prompt, **arguments))
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
    out = llama[0].generate(prompt_of(10), custom_generate=static(Decoder(*llama, (16, 5))), **arguments)
    assert torch.equal(out, llama[0].generate(prompt_of(10), **arguments))


@pytest.mark.parametrize("method", METHODS)
def test_a_grammar_is_never_asked_what_it_has_ruled_out(llama, method):
    """Where few tokens are allowed the tree's further children are impossible: asked about them it raises."""
    follows = {5: [6, 7], 6: [7], 7: [5, 8, 9], 8: [5], 9: [9, 5]}
    arguments = dict(max_new_tokens=30, prefix_allowed_tokens_fn=lambda row, ids: (
        [5] if len(ids) == 10 else follows[int(ids[-1])]))
    expected = llama[0].generate(prompt_of(10), do_sample=False, **arguments)
    for do_sample in (False, True):
        decoder = Decoder(*llama, k_ary(3, 4), method, seeded(0))
        out = llama[0].generate(prompt_of(10), custom_generate=decoder, do_sample=do_sample, **arguments)
        assert do_sample or torch.equal(out, expected)
        text = out[0, 10:].tolist()
        assert text[0] == 5 and all(after in follows[before] for before, after in pairwise(text))


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
    ours, theirs, arguments = [], [], dict(max_new_tokens=12, do_sample=False)

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
    assert torch.equal(out, plain.generate(ids, **arguments)) and out.shape[1] < ids.shape[1] + 40


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
    with pytest.raises(ValueError, match="1 to 256"):
        sequoia.generate(*llama, prompt_of(257), max_new_tokens=5)
    with pytest.raises(ValueError, match="target"):
        llama[0].generate(prompt_of(10), custom_generate=Decoder(*llama[::-1]))
    config = transformers.GenerationConfig(max_length=20)
    for model in (encoder_decoder(), recurrent()):
        for target, draft in ((model, llama[1]), (llama[0], model)):
            with pytest.raises(ValueError, match=f"{type(model).__name__} .*tree"):
                Decoder(target, draft)(target, prompt_of(10), [], [], config)


# --- 7  The planner -----------------------------------------------------------------------------------------


def test_acceptance_rates_approach_the_true_ones():
    """Counts from trees whose children are accepted by known chances, the root's by others. The error of
    20,000 counts is below 0.02; a false alarm (5 standard errors) below 1e-6."""
    true = np.array([[0.3, 0.3, 0.1], [0.5, 0.2, 0.1]])
    tree, rng, acceptance = k_ary(3, 4), np.random.default_rng(0), sequoia.Acceptance()
    for _ in range(20_000):
        path, node = [], 0
        while children := tree.children[node]:
            rates = true[min(len(path), 1)]
            if (rank := rng.choice(4, p=[*rates, 1 - rates.sum()])) == 3:
                break
            path.append(node := children[rank])
        acceptance.count(sequoia.Step(tree, [0] * tree.size, path, 0))
    assert np.abs(acceptance.rates()[:2, :3] - true).max() < 0.02


def test_the_plan_is_the_deepest_within_2_percent_of_the_best_of_all_sizes_and_depths():
    rates, sizes = sequoia.PRIOR[:8], [1, 4, 16, 64]
    for t, c in (([1.0, 1.02, 1.1, 1.4], 0.05), ([1.0, 1.0, 1.0, 3.0], 0.3), ([1.0, 4.0, 16.0, 64.0], 1.0)):
        table, times = expected_tokens_table(rates, 64, 64), np.interp(range(65), sizes, t)
        promised = table[1:, 1:].clip(0) / (times[1:, None] + c * np.arange(64))
        found = sequoia.plan(rates, sequoia.Latency(sizes, t, c))
        near = (promised.max(axis=0) > 0.98 * promised.max()).nonzero()[0][-1]
        assert found.tree.depth == near + 1 and found.speedup == pytest.approx(promised[:, near].max())
    assert found.tree == Tree([-1]) and found.speedup == 1


@pytest.mark.parametrize("t_1, largest", [(0.01, 64), (0.1, 64), (1.0, 64)])
def test_measuring_finds_the_times_of_steps_and_stays_within_its_budget(llama, t_1, largest, monkeypatch):
    """On a clock that only steps move: t(n) doubles at 128 nodes, a level costs a tenth of a plain step. The
    texts measured with are thrown away."""
    now, step = [0.0], Decoder.step
    monkeypatch.setattr(sequoia.time, "perf_counter", lambda: now[0])

    def slow(self):
        tree = self.layout.tree
        now[0] += t_1 * ((1 if tree.size < 128 else 2) + 0.1 * (tree.depth - 1))
        return step(self)

    monkeypatch.setattr(Decoder, "step", slow)
    decoder, seen = Decoder(*llama, on_step=lambda step: seen.append((step, now[0]))), []
    out = llama[0].generate(prompt_of(30), custom_generate=decoder, max_new_tokens=40, do_sample=False)
    assert torch.equal(out, llama[0].generate(prompt_of(30), max_new_tokens=40, do_sample=False))
    latency, expected = decoder.latency, {n: t_1 * (1 if n < 128 else 2) for n in decoder.latency.sizes}
    assert latency.sizes[0] == 1 and max(latency.sizes) >= largest
    assert latency.t == pytest.approx(list(expected.values())) and latency.c == pytest.approx(t_1 / 10)
    # The clock stood there at the end of the first step of the text.
    assert 0 < seen[0][1] < 1.5 * max(1, 30 * t_1)
    assert sum(len(one.tokens) for one, _ in seen) >= 39 and decoder.plan.tree.size > 4
    assert decoder.acceptance.tried.sum() > sum(len(one.path) for one, _ in seen)


# --- 8  Passes ----------------------------------------------------------------------------------------------


def both_texts(target, draft):
    """One greedy and one sampled."""
    arguments = dict(max_new_tokens=25, tree=(9, 4))
    return [sequoia.generate(target, draft, prompt_of(30), do_sample=do_sample, generator=seeded(0),
                             **arguments).tolist() for do_sample in (False, True)]


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
    assert both_texts(*pair) == expected and pair[0].recording.__name__ == "run"
    assert sequoia.pack(make_pair(ARCHITECTURES["llama"]())[0]).recording.__name__ != "run"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("name", ["llama", "gpt-neox", "gpt2", "mistral"])
def test_offloaded_output_equals_resident_output(name, device):
    """For any number of layers that stay, two models at once, and after passes that were broken off."""
    config = ARCHITECTURES[name]()
    config.num_hidden_layers = 5
    pair = make_pair(config)
    target, draft = (copy.deepcopy(model).to(device) for model in pair)

    def texts(target, draft):
        decoder, out = Decoder(target, draft, (9, 4)), []
        for do_sample in (False, True):
            decoder.generator = seeded(0, device)
            out.append(target.generate(prompt_of(30).to(device), custom_generate=decoder, max_new_tokens=20,
                                       do_sample=do_sample).tolist())
        return out

    expected = texts(target, draft)
    for resident in (0, 1, 2, 5):
        streaming = sequoia.offload(copy.deepcopy(pair[0]), device, resident)
        assert sequoia.pack(streaming) is streaming and not hasattr(streaming, "recording")
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
    code = sequoia.main(list(arguments))
    captured = capfd.readouterr()
    return code, captured.out, captured.err


def text_of(out):
    """What `sequoia.py` has printed: the text, and the numbers of tokens and steps."""
    text, tokens, steps = re.match(r"(.*)\n\n(\d+) tokens in (\d+) steps, ", out, re.DOTALL).groups()
    return text, int(tokens), int(steps)


RANKS = """
import os, sys, sequoia
arguments = sys.argv[1:]
for temperature in ("0", "0.6"):
    assert sequoia.main([*arguments, "--temperature", temperature]) == 0
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
step, calls = sequoia.Decoder.step, []
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
    texts = [text_of(run_main(capfd, *arguments, f"--temperature={t}")[1])[0] for t in (0, 0.6)]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(min(free.getsockname()[1], 65_000))
    settings = dict(WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=port, OMP_NUM_THREADS="1")
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    ranks = [subprocess.Popen([sys.executable, "-c", RANKS, *arguments], **pipes, env={
        **os.environ, **settings, "RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]
    (out, err), (silence, _) = (rank.communicate(timeout=300) for rank in ranks)
    assert all(out.count(f"{text}\n\n16 tokens in ") == 1 for text in texts) and silence == ""
    assert ranks[0].returncode in (1, 2) and ranks[1].returncode == 7
    assert err.strip().splitlines()[-1].startswith("sequoia.py: ") and "Traceback" not in err


# --- 9  The command line ------------------------------------------------------------------------------------


def test_what_is_printed_is_generates_text_and_explain_draws_its_trees(capfd):
    arguments = ("--max-new-tokens", "20", "--tree", "8x4", "--prompt", "import ", "--dtype", "float32")
    code, out, err = run_main(capfd, *arguments, "--temperature", "0")
    target, tokenizer = (kind.from_pretrained(ROOT / "tiny" / "target")
                         for kind in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer))
    ids = tokenizer("import ", return_tensors="pt")["input_ids"]
    expected = tokenizer.decode(target.float().generate(ids, max_new_tokens=20, do_sample=False)[0])
    text, tokens, steps = text_of(out)
    assert (code, err, text, tokens) == (0, "", expected, 20) and "\033" not in out
    assert "tree: 8 nodes on 4 levels; method: sequoia" in out
    code, out, err = run_main(capfd, *arguments, "--temperature", "0", "--explain")
    assert code == 0 and err == "" and "─" in out and f"step {steps} " in out
    texts = [text_of(run_main(capfd, *arguments, "--seed", seed)[1])[0] for seed in "001"]
    assert texts[0] == texts[1] != texts[2]


def test_the_planned_tree_is_greedily_the_same_text_and_says_that_it_was_measured(capfd):
    arguments = ("--max-new-tokens", "40", "--temperature", "0", "--dtype", "float32")
    plain, planned, offloaded = (run_main(capfd, *arguments, *more)[1]
                                 for more in (("--tree", "none"), (), ("--offload", "--tree", "9x4")))
    assert text_of(planned)[:2] == text_of(offloaded)[:2] == text_of(plain)[:2]
    assert "plan: " in planned and "plan: " not in plain


@pytest.mark.parametrize("where", ["prepare", "begin", "step"])
@pytest.mark.parametrize("tree", ["8x4", "auto"])
def test_ctrl_c_prints_what_there_is_and_exits_130(capfd, monkeypatch, where, tree):
    working, calls = getattr(Decoder, where), []

    def interrupted(self, *arguments):
        calls.append(1)
        if len(calls) > 3 or where != "step":
            raise KeyboardInterrupt
        return working(self, *arguments)

    monkeypatch.setattr(Decoder, where, interrupted)
    code, out, err = run_main(capfd, "--tree", tree)
    assert code == 130 and err == "" and f"in {3 if (where, tree) == ('step', '8x4') else 0} steps" in out


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
    for name, content in (("empty.txt", b""), ("binary.txt", b"\xff\xfe\x00\x80")):
        (root / name).write_bytes(content)
    return root


BAD_MODELS = ["cut short", "cut by a byte", "empty", "garbage", "cut in its header", "missing", "more layers",
              "wider", "unknown", "other vocabulary", "no type", "no heads", "bad json", "empty json", "none",
              "no config", "no tokenizer", "bad tokenizer", "encoder-decoder", "recurrent", "ordinary"]
BAD_TREES = ["", "banana", "12", "9x", "x4", "9x4x2", "9*4", "-9x4", "0x4", "9x0", "1.5x3", "nanx3", "x:auto",
             "kary:2x3", "sequences:3x2", "auto:2x3", "100x2", "2x1", "Tree"]
BAD_NUMBERS = {
    "--temperature": ["-1", "nan", "inf", "-inf", "1e9"], "--top-p": ["0", "2", "nan", "-0.5"],
    "--top-k": ["0", "-3"], "--max-new-tokens": ["0", "-5", "99999999999"],
    "--seed": ["-1", "18446744073709551616"]}
# What argparse itself refuses, with a usage text.
BAD_WORDS = {"--top-k": "many", "--temperature": "warm", "--max-new-tokens": "1.5", "--seed": "x",
             "--method": "magic", "--dtype": "int8", "--nonsense": "1"}
BAD_DEVICES = ["banana", "meta", "cpu:x", "", *["cuda", "cuda:0"] * (not torch.cuda.is_available())]
BAD_REQUESTS = {
    **{f"{kind} {name}{' offloaded' * len(more)}": [f"--{kind}", f"FOLDER/{name}", *more]
       for kind, name, more in product(("target", "draft"), BAD_MODELS, ([], ["--offload"]))},
    **{f"tree {tree}": [f"--tree={tree}"] for tree in BAD_TREES},
    **{f"{name} {value}": [f"{name}={value}"] for name, values in BAD_NUMBERS.items() for value in values},
    **{f"{name} {value}": [name, value] for name, value in BAD_WORDS.items()},
    **{f"device {name}": ["--device", name] for name in BAD_DEVICES},
    **{f"prompt {text[-9:]!r}": ["--prompt", text] for text in (
        "", "@", "@FOLDER", *[f"@FOLDER/{name}.txt" for name in ("empty", "binary", "none")],
        "x = 1\n" * 500)},
    "a hub name of no form": ["--target", "a/b/c"]}


@pytest.mark.parametrize("request_", BAD_REQUESTS)
def test_bad_input_is_one_line_and_exit_code_2(folders, capfd, monkeypatch, request_):
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
    assert code == 2 and "tokens in" not in out and err.startswith("sequoia.py: ")
    assert len(err.splitlines()) == 1 and "Traceback" not in err and len(BAD_REQUESTS) >= 60


@pytest.mark.parametrize("kind", ["target", "draft"])
def test_a_bundled_model_with_fewer_layers_than_its_configuration_names_a_weight(capfd, tmp_path, kind):
    shutil.copytree(ROOT / "tiny" / kind, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    layers = config["num_hidden_layers"]
    (tmp_path / "config.json").write_text(json.dumps(config | dict(num_hidden_layers=layers + 2)))
    code, out, err = run_main(capfd, f"--{kind}", str(tmp_path), "--tree", "3x2")
    assert code == 2 and out == "" and len(err.splitlines()) == 1 and f"model.layers.{layers}." in err


def test_tokenizers_that_differ_in_added_special_tokens_are_accepted_with_a_line(folders, capfd):
    arguments = ["--tree=3x2", "--max-new-tokens=4"]
    for pair in (("good", "special"), ("special", "good"), ("good", "good")):
        names = [f"--{kind}={folders / name}" for kind, name in zip(("target", "draft"), pair)]
        with warnings.catch_warnings(record=True) as warned:
            code, out, err = run_main(capfd, *names, *arguments)
            lines = [warnings.formatwarning(one.message, UserWarning, "sequoia.py", 1) for one in warned
                     if one.category is UserWarning]
        assert code == 0 and text_of(out)[1] == 4 and err == ""
        assert len(lines) == (pair != ("good", "good"))
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
    text, namespace = (ROOT / "README.md").read_text(encoding="utf-8"), {}
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 4 and f"```\n{optimal_tree([0.6, 0.2, 0.1], size=16, depth=6)}\n```" in text
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    tests = Path(__file__).read_text(encoding="utf-8")
    assert all(f"def {name}(" in tests for name in re.findall(r"`(test_\w+)`", text))

