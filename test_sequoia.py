"""The guarantees of sequoia.py, as tests: slow, obvious oracles beside the fast code.

Exact tests enumerate every case. Statistical tests are seeded, and fail if what they see has a chance below 1e-9: a
false alarm from any of them has a chance below 1e-6.
"""
import argparse
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
import subprocess
import sys
import warnings
from itertools import pairwise, permutations, product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import bench
import sequoia
from sequoia import (METHODS, Tree, chain, expected_tokens, expected_tokens_table, k_ary, optimal_tree,
                     sample_and_verify, sequences)

settings.register_profile("sequoia", deadline=None, derandomize=True, max_examples=100)
settings.load_profile("sequoia")

torch.set_num_threads(1)                        # the tensors are small; on busy cores threads would wait for each other

FULL = bool(os.environ.get("FULL"))             # FULL=1 pytest: wide vocabularies with all their samples, hours on CPU
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# The paper's acceptance vector (Llama3-70B, Llama3-8B, CNN Daily): measured, so it does not quite decrease.
PAPER_RATES = [0.7732, 0.1039, 0.0402, 0.0206, 0.0128, 0.0081, 0.0064, 0.0043, 0.0035, 0.0026, 0.0025, 0.0021, 0.0016,
               0.0014, 0.001, 0.001, 0.001, 0.0007, 0.0007, 0.0006, 0.0007, 0.0006, 0.0004, 0.0004, 0.0005, 0.0006,
               0.0004, 0.0003, 0.0002, 0.0004, 0.0001]
PAPER_SORTED = sorted(PAPER_RATES, reverse=True)


@pytest.fixture(autouse=True, scope="session")
def cache_folder(tmp_path_factory):
    """The planner's files are kept here, not in the user's own folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def test_docstring_examples_run():
    results = doctest.testmod(sequoia)
    assert results.attempted > 0 and results.failed == 0


# ----------------------------------------------------------------------------------------------------------------------
# 1  Token trees (section 3.1)


def all_trees(size):
    """Every tree of `size` nodes: the parents never decrease, and stand before their children."""
    if size == 1:
        return [Tree([-1])]
    return [Tree((*tree.parents, parent)) for tree in all_trees(size - 1)
            for parent in range(max(0, tree.parents[-1]), size - 1)]


SMALL_TREES = [tree for size in range(1, 9) for tree in all_trees(size)]


def test_small_trees_are_counted_by_the_catalan_numbers():
    assert [len(all_trees(size)) for size in range(1, 9)] == [1, 1, 2, 5, 14, 42, 132, 429]
    assert len(set(SMALL_TREES)) == 626


def test_a_tree_knows_its_shape():
    tree = Tree([-1, 0, 0, 0, 1, 1, 4])
    assert (tree.size, tree.depth) == (7, 4)
    assert tree.depths == (0, 1, 1, 1, 2, 2, 3)
    assert tree.ranks == (0, 0, 1, 2, 0, 1, 0)
    assert tree.children == ((1, 2, 3), (4, 5), (), (), (6,), (), ())
    assert tree.paths() == [(0,), (1,), (2,), (0, 0), (0, 1), (0, 0, 0)]


def test_a_tree_is_an_immutable_value():
    tree = Tree([-1, 0, 0])
    assert tree == Tree(np.array([-1, 0, 0])) and hash(tree) == hash(Tree((-1, 0, 0))) and tree != chain(2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        tree.parents = (-1,)


@pytest.mark.parametrize("parents", [(), (0,), (-1, -1), (-1, 1), (-1, 0, 2), (-1, 0, 1, 0), (-1, 0, 0, 2, 1)])
def test_parents_out_of_level_order_are_an_error(parents):
    with pytest.raises(ValueError, match="root" if len(parents) < 2 else "level order"):
        Tree(parents)


def test_from_paths_inverts_paths():
    shuffle = random.Random(0).shuffle
    for tree in SMALL_TREES:
        paths = tree.paths()
        shuffle(paths)
        assert Tree.from_paths(paths) == Tree.from_paths([(), *map(list, paths)]) == tree


@pytest.mark.parametrize("paths, missing", [([(0, 0)], r"\(0,\)"), ([(1,)], r"\(0,\)"), ([(0,), (0, 2)], r"\(0, 1\)"),
                                            ([(-1,)], r"\(-2,\)")])
def test_a_path_without_parent_or_elder_sibling_is_an_error(paths, missing):
    with pytest.raises(ValueError, match=f"needs {missing}"):
        Tree.from_paths(paths)


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


def test_drawing_tells_every_tree_apart():
    assert len({tree.draw("o" * tree.size) for tree in SMALL_TREES}) == len(SMALL_TREES)


def test_drawing_stays_readable_at_64_nodes():
    tree = optimal_tree(PAPER_RATES, 64, depth=12)
    lines = str(tree).splitlines()
    assert len(lines) == tree.children.count(()) and max(map(len, lines)) <= 5 * tree.depth       # a line for each leaf
    assert sorted(map(int, re.findall(r"\d+", str(tree)))) == list(range(64))


def test_chain_sequences_and_k_ary_have_their_shapes():
    assert chain(3) == Tree([-1, 0, 1, 2])
    assert sequences(2, 3) == Tree([-1, 0, 0, 1, 2, 3, 4])
    assert k_ary(2, 3) == Tree([-1, 0, 0, 1, 1, 2, 2]) and k_ary(5, 1) == Tree([-1]) and k_ary(1, 4) == chain(3)
    assert set(sequences(5, 8).paths()) == {(i, *[0] * length) for i in range(5) for length in range(8)}
    assert set(k_ary(3, 5).paths()) == {path for level in range(1, 5) for path in product(range(3), repeat=level)}


@pytest.mark.parametrize("shape, bounds", [(chain, [0]), (sequences, [0, 3]), (sequences, [3, 0]), (k_ary, [0, 2]),
                                           (k_ary, [2, 0]), (k_ary, [1.5, 2])])
def test_shapes_below_one_are_an_error(shape, bounds):
    with pytest.raises(ValueError, match="whole number of at least 1"):
        shape(*bounds)


# ----------------------------------------------------------------------------------------------------------------------
# 2  Tree construction: the dynamic program (section 3.1, equation 1; appendix, bounded depth and 2-D rates)


def score(path, rates):
    """f(v), Definition 3.3: the product of the rates on the way. rates: a row a level, the last for all deeper ones."""
    return math.prod(rates[min(level, len(rates) - 1)][rank] for level, rank in enumerate(path))


def best_first(rates, size, depth=math.inf):
    """The tree of the `size` nodes with the highest scores, taken one by one: where rates never rise with rank, a
    node's parent and elder siblings score at least as high as it does, so that they are there before it."""
    taken, frontier = [], [(-1.0, ())]                                                              # (-score, path)
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
    rates = np.array(weights)[:, :ranks] / np.sum(weights, axis=1, keepdims=True)     # the last share: all are rejected
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
    ([PAPER_SORTED], None), ([PAPER_SORTED], 10), ([[2.0**-k for k in range(1, 20)]], 8),
    ([[0.5, 0.2, 0.1, 0.1], [0.9, 0.1, 0, 0], [0.3, 0.3, 0.3, 0.1]], 12)])
def test_optimal_tree_equals_best_first_search_at_768_nodes(rates, depth):
    greedy, tree = best_first(rates, 768, depth or math.inf), optimal_tree(rates, 768, depth)
    assert tree.size == greedy.size == 768 and tree.depth <= (depth or 768)
    assert expected_tokens(tree, rates) == pytest.approx(expected_tokens(greedy, rates), abs=1e-9)


def test_best_first_is_not_optimal_where_rates_rise_and_the_dynamic_program_is():
    rates = [0.3, 0.01, 0.69]                                  # the good third child stands behind a bad second one
    assert best_first([rates], 4) == chain(3) and expected_tokens(chain(3), rates) == pytest.approx(1.417)
    assert optimal_tree(rates, 4) == k_ary(3, 2) and expected_tokens(k_ary(3, 2), rates) == pytest.approx(2)


@pytest.mark.parametrize("rates", [PAPER_RATES, [PAPER_RATES, PAPER_RATES[::-1], PAPER_SORTED]])
def test_value_of_the_tree_is_the_tables_entry(rates):
    table = expected_tokens_table(rates, 768, 18)
    assert table.shape == (769, 19)
    for size, depth in [(1, 1), (2, 2), (64, 12), (128, 10), (767, 17), (768, 18)]:
        assert abs(expected_tokens(optimal_tree(rates, size, depth), rates) - table[size, depth]) < 1e-9
    assert (table[:, 0] == -np.inf).all() and table[32, 2] > 1 and table[33, 2] == -np.inf   # 31 children fill 2 levels


def test_a_child_beyond_the_last_rate_is_never_accepted():
    assert expected_tokens(Tree([-1, 0, 0, 2]), [0.5]) == 1.5 and expected_tokens(chain(2), []) == 1


def test_deep_trees_need_no_recursion():
    assert optimal_tree([1.0], 1200) == chain(1199)


@given(st.floats(0, 0.95), st.floats(0, 1), st.integers(1, 60))
def test_other_shapes_stay_below_the_papers_bounds(first, share, length):
    rates = [first, share * (0.98 - first)]
    bound = 1 / (1 - first)
    assert expected_tokens(chain(length), rates) == pytest.approx((1 - first ** (length + 1)) * bound)
    assert expected_tokens(chain(length), rates) <= bound * (1 + 1e-12)
    assert expected_tokens(sequences(2, length), rates) < bound + 1
    depth, either = length % 10 + 1, sum(rates)             # the paper's 1 / (1 - P2), where P2 is: one of two accepted
    assert expected_tokens(k_ary(2, depth), rates) == pytest.approx(sum(either**level for level in range(depth)))
    assert expected_tokens(k_ary(2, depth), rates) <= 1 / (1 - either) * (1 + 1e-12)


def test_the_optimal_tree_outgrows_the_bounds_of_other_shapes():
    bound = 1 / (1 - PAPER_RATES[0]) + 1
    optimal = expected_tokens_table(PAPER_RATES, 768, 18)[768, 18]
    assert expected_tokens(sequences(31, 100), PAPER_RATES) < bound < optimal


@pytest.mark.parametrize("b", [0.5, 1, 2])
def test_growth_is_logarithmic_for_power_law_rejection(b):
    size, ranks, depth = 1024, 32, 12
    rejection = np.arange(1, ranks + 1) ** -float(b)             # r_k = 1 / k^b, the most that Definition 3.5 allows: a
    rates = -np.diff(rejection, prepend=1)                       # first child is never accepted
    value = expected_tokens_table(rates, size, depth)[:, -1]
    n = np.arange(16, size + 1)
    assert (value[n] >= b * np.log(n) / (10 * np.log(np.log(n)))).all()
    for k, levels in product(range(1, ranks + 1), range(1, depth + 1)):             # the proof: no k-ary tree is better
        if sum(k**level for level in range(levels)) <= size:
            k_ary_value = sum((1 - rejection[k - 1]) ** level for level in range(levels))
            assert value[k_ary(k, levels).size] >= k_ary_value - 1e-9


@pytest.mark.parametrize("rates, message", [
    ([0.5, -0.1], r"in \[0, 1\]"), ([1.1], r"in \[0, 1\]"), ([0.5, np.nan], "finite"), ([np.inf], "finite"),
    ([0.6, 0.5], "sum to 1.1"), ([[0.6, 0.1], [0.6, 0.5]], "sum to 1.1"),
    (0.5, r"shape .* got \(\)"), (np.zeros((2, 2, 2)), r"got \(2, 2, 2\)"), (np.zeros((0, 3)), r"got \(0, 3\)")])
def test_rates_that_are_no_probabilities_are_an_error(rates, message):
    for function, arguments in ((expected_tokens, (chain(1), rates)), (optimal_tree, (rates, 3)),
                                (expected_tokens_table, (rates, 3, 3))):
        with pytest.raises(ValueError, match=message):
            function(*arguments)


@pytest.mark.parametrize("bad", [dict(size=0), dict(size=-3), dict(size=2.5), dict(depth=0), dict(depth=-1),
                                 dict(max_branch=0)])
def test_bounds_below_one_are_an_error(bad):
    (name, value), = bad.items()
    for call in (optimal_tree, expected_tokens_table):
        with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1, got {value}"):
            call([0.5, 0.25], **{"size": 3, "depth": 3, **bad})


@pytest.mark.parametrize("rates, bounds, largest", [
    ([0.5, 0.25], dict(depth=1), 1), ([0.5, 0.25], dict(depth=3), 7), ([0.5, 0.25], dict(depth=3, max_branch=1), 3),
    ([], {}, 1)])
def test_a_size_that_no_tree_can_have_is_an_error_that_names_the_largest(rates, bounds, largest):
    assert optimal_tree(rates, largest, **bounds).size == largest
    with pytest.raises(ValueError, match=f"largest has {largest}$"):
        optimal_tree(rates, largest + 1, **bounds)


# ----------------------------------------------------------------------------------------------------------------------
# 3  Sampling (section 3.2, Algorithm 2 line 5)


def all_proposals(name, draft_probs, k):
    """Every sequence of k proposals that a method makes from draft_probs (V,), (sequences, k), and their chances.

    Each is drawn from the draft, or from what the earlier ones leave of it; uniformly once no mass is left."""
    propose, vocab = METHODS[name].propose, range(len(draft_probs))
    if propose is sequoia.most_likely:
        return propose(draft_probs[None], k), torch.ones(1, dtype=torch.float64)
    repeats = propose is sequoia.sample_with_replacement
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
    """The chance of counts at least as far from the expected ones; 0 if something impossible was observed. Neighbouring
    bins are merged until at least 10 counts are expected in each."""
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
    freedom = max(len(starts) - 1, 1)
    return torch.special.gammaincc(torch.tensor(freedom / 2, dtype=torch.float64), torch.tensor(statistic / 2)).item()


def test_chi_square_tail_is_the_textbooks():
    assert chi_square_tail([60, 40], [50, 50]) == pytest.approx(math.erfc(2**0.5), rel=1e-9)         # 2 sigma, 0.0455
    assert chi_square_tail([20, 30, 50], [30, 30, 40]) == pytest.approx(math.exp(-(100 / 30 + 100 / 40) / 2), rel=1e-9)
    assert chi_square_tail([9, 1, 90], [1, 9, 90]) == 1 and chi_square_tail([99, 1], [100, 0]) == 0


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("draft_probs", [[0.5, 0.3, 0.15, 0.05], [0.7, 0.3, 0, 0], [0, 0, 1, 0], [0.25] * 4])
def test_each_proposal_is_distributed_as_the_draft_without_the_earlier_ones(name, draft_probs):
    """Over all sequences of V proposals: also those past the draft's support, which are uniform over what is left."""
    draft_probs, n, powers = torch.tensor(draft_probs, dtype=torch.float32), 100_000, 4 ** torch.arange(4)
    tokens = METHODS[name].propose(draft_probs.expand(n, 4), 4, torch.Generator().manual_seed(0))
    if name == "topk":                                           # which of equals comes first does not matter
        assert draft_probs[tokens].equal(draft_probs.sort(descending=True).values.expand(n, 4))
        return
    possible, chances = all_proposals(name, draft_probs.double(), 4)
    expected = torch.zeros(4**4, dtype=torch.float64).index_put_(((possible * powers).sum(1),), n * chances)
    assert chi_square_tail((tokens * powers).sum(1).bincount(minlength=4**4), expected) > 1e-9


# ----------------------------------------------------------------------------------------------------------------------
# 4  Verification of a node's children (sections 2.2 and 3.2, Algorithm 2)


def distribution(weights):
    weights = torch.as_tensor(weights, dtype=torch.float64)
    return weights / weights.sum()


@st.composite
def pairs_of_distributions(draw):
    """A target's and a draft's distribution over 2 to 4 tokens, in all the relations that make trouble."""
    vocab = draw(st.integers(2, 4))
    weights = st.lists(st.integers(1, 20) | st.just(1e-6), min_size=vocab, max_size=vocab)
    which = st.lists(st.booleans(), min_size=vocab, max_size=vocab).map(np.array)                   # some of the tokens
    target, draft = np.array([draw(weights), draw(weights)], dtype=float)
    relation = draw(st.sampled_from(["positive", "with zeros", "equal", "nearly equal", "disjoint", "one-hot target",
                                     "one-hot draft"]))
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


def outcome(name, target_probs, draft_probs, k):
    """What verifying k children comes to, exactly: the distribution of the emitted token (V,), and each child's chance
    to be the accepted one (k,). The sum over all proposals; a test `noise < ratio` passes with chance min(ratio, 1)."""
    tokens, chances = all_proposals(name, draft_probs, k)
    rows = target_probs.expand(len(tokens), -1), draft_probs.expand(len(tokens), -1)
    ratios, residual = METHODS[name].ratios(*rows, tokens, [len(tokens)] * k, None)
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


def algorithm_2(target_probs, draft_probs, tokens, blue):
    """Algorithm 2 as printed, with its blue lines or without (SpecInfer): each child's chance to be the accepted one
    (k,), and each token's to be drawn from the residual (V,)."""
    R, D, S, accepted, rejected = target_probs.numpy(), draft_probs.numpy().copy(), set(), [], 1.0
    for s in tokens:
        ratio = min(R[s] / D[s], 1)
        accepted.append(rejected * ratio)
        rejected *= 1 - ratio
        if rejected == 0:
            return accepted + [0] * (len(tokens) - len(accepted)), 0 * R
        left = np.maximum(R - D, 0)
        R = left / left.sum() if left.any() else R        # nothing left: a rejection by rounding alone, of chance 1e-16
        if blue:
            D[s] = 0
            S.add(s)
            if D.sum() == 0 and len(S) < len(D):
                D = np.array([float(t not in S) for t in range(len(D))])
            D = D / max(D.sum(), 1e-300)                                           # all tokens tried: the end, D is 0
    return accepted, rejected * R


@pytest.mark.parametrize("name", ["sequoia", "specinfer"])
@given(pairs_of_distributions())
def test_verification_equals_algorithm_2_line_by_line(name, pair):
    tokens, _ = all_proposals(name, pair[1], len(pair[1]))
    n, k = tokens.shape
    ratios, residual = METHODS[name].ratios(pair[0].expand(n, -1), pair[1].expand(n, -1), tokens, [n] * k, None)
    for row in range(n):
        passes = ratios[row].clamp(max=1)
        reached = torch.cat([torch.ones(1), (1 - passes).cumprod(0)])
        accepted, rest = algorithm_2(*pair, tokens[row].tolist(), blue=name == "sequoia")
        np.testing.assert_allclose(reached[:-1] * passes, accepted, atol=1e-6)
        np.testing.assert_allclose(reached[-1] * residual[row], rest, atol=1e-6)


@given(pairs_of_distributions())
def test_one_child_is_accepted_as_often_as_optimal_transport_allows(pair):
    optimal = 1 - (pair[0] - pair[1]).abs().sum() / 2
    for name in ("sequoia", "specinfer", "spectr"):
        torch.testing.assert_close(outcome(name, *pair, 1)[1].sum(), optimal, rtol=0, atol=1e-6)


@given(pairs_of_distributions())
def test_spectr_accepts_as_often_as_its_best_division_factor(pair):
    """k-sequential selection for each of many factors: those whose residual is nowhere negative are lossless."""
    (P, Q), k = pair, 3
    factors = torch.linspace(1, k, 2001, dtype=torch.float64)[:, None]
    taken = torch.minimum(P / factors, Q)                                                            # (factors, V)
    rejected = 1 - taken.sum(dim=1, keepdim=True)                                                    # by one test
    tries = sum(rejected**i for i in range(k))
    lossless = (P - tries * taken >= -1e-12).all(dim=1)
    best = (1 - rejected[lossless] ** k).max()
    assert outcome("spectr", P, Q, k)[1].sum().item() == pytest.approx(best.item(), abs=2e-3)


def test_topk_and_naive_accept_less_than_optimal_transport():
    """The paper's counter-example: target and draft agree, and yet a child is rejected."""
    both = distribution([0.6, 0.4])
    assert outcome("topk", both, both, 1)[1].item() == pytest.approx(0.6)
    assert outcome("naive", both, both, 1)[1].item() == pytest.approx(0.6**2 + 0.4**2)


@given(pairs_of_distributions())
def test_sequoia_and_topk_always_accept_when_the_children_cover_the_target(pair):
    target_probs, draft_probs = pair
    for name in ("sequoia", "topk"):
        assert outcome(name, target_probs, draft_probs, len(draft_probs))[1].sum().item() == pytest.approx(1, abs=1e-6)
        target_inside = distribution(torch.where(draft_probs > 0, target_probs + 0.01, 0))
        support = int((draft_probs > 0).sum())
        assert outcome(name, target_inside, draft_probs, support)[1].sum().item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("name, accepted", dict(sequoia=1, topk=1, specinfer=0.75, spectr=0.75, naive=0.75).items())
def test_methods_that_repeat_a_child_do_not_cover(name, accepted):
    """The paper's counter-example: with chance 1/4 both children are the token that the target never says."""
    assert outcome(name, distribution([1, 0]), distribution([1, 1]), 2)[1].sum().item() == pytest.approx(accepted)


def count_tokens(name, target_probs, draft_probs, k, samples, generator):
    """How often each token is emitted in `samples` runs of verification, (V,), through the vectorised code: as many rows
    at once as a CPU's cache holds, which is several times faster than more."""
    counts, rows = torch.zeros(len(target_probs), dtype=torch.long), 2 ** (18 if DEVICE == "cpu" else 23) // len(target_probs)
    for start in range(0, samples, rows):
        n = min(rows, samples - start)
        _, token = sample_and_verify(target_probs.expand(n, -1), draft_probs.expand(n, -1), k, name, generator)
        counts += token.bincount(minlength=len(counts)).cpu()
    return counts


@pytest.mark.parametrize("vocab", [2, 4, 16, 4096, 32_000])
@pytest.mark.parametrize("name", METHODS)
def test_output_distribution_equals_target(name, vocab):
    """200,000 samples or 10 V, or the share of them that a CPU draws in seconds. Target and draft prefer opposite ends
    of the vocabulary, so that an error tilts the counts from end to end, which merging neighbours cannot hide."""
    samples = max(200_000, 10 * vocab)
    if not FULL and DEVICE == "cpu":
        samples = min(samples, 2**24 // vocab)
    generator, place = torch.Generator(DEVICE).manual_seed(vocab), torch.linspace(0, 1, vocab, device=DEVICE)
    noise = torch.rand(2, vocab, generator=generator, device=DEVICE) + 0.1
    target_weights, draft_weights = noise[0] * torch.exp(-4 * place), noise[1] * torch.exp(-4 * (1 - place))
    target_weights[vocab - vocab // 4:] = 0
    draft_weights[: vocab // 8] = 0
    target_probs, draft_probs = target_weights / target_weights.sum(), draft_weights / draft_weights.sum()
    counts = count_tokens(name, target_probs, draft_probs, min(3, vocab), samples, generator)
    assert chi_square_tail(counts, samples * distribution(target_probs.cpu())) > 1e-9


HAZARDS = {
    "draft 0 at target tokens": ([0.4, 0.3, 0.2, 0.1], [0, 0, 0.5, 0.5]),
    "target 0 at draft tokens": ([0, 0, 0.5, 0.5], [0.4, 0.3, 0.2, 0.1]),
    "disjoint": ([0.3, 0.7, 0, 0], [0, 0, 0.5, 0.5]),
    "equal": ([0.4, 0.3, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1]),
    "one-hot target": ([0, 0, 1, 0], [0.4, 0.3, 0.2, 0.1]),
    "one-hot draft": ([0.4, 0.3, 0.2, 0.1], [0, 0, 1, 0]),
    "different one-hots": ([0, 0, 1, 0], [0, 1, 0, 0]),
    "underflow at temperature 0.05": tuple((torch.tensor(logits) / 0.05).softmax(0).tolist() for logits in (
        [8.0, 7.9, 3.0, -9.0], [3.0, 7.9, 2.7, -9.0])),               # exp(-98) is subnormal in float32, exp(-338) is 0
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("hazard", HAZARDS)
def test_output_distribution_survives(hazard, name):
    target_probs, draft_probs = torch.tensor(HAZARDS[hazard], dtype=torch.float32)
    for k in (1, 2, 4):
        counts = count_tokens(name, target_probs, draft_probs, k, 10_000, torch.Generator().manual_seed(k))
        assert chi_square_tail(counts, 10_000 * distribution(target_probs)) > 1e-9


@pytest.mark.parametrize("name", METHODS)
def test_output_distribution_survives_a_vocabulary_of_128_256(name):
    likely, vocab = torch.tensor([5, 70_000, 128_255]), 128_256
    target_probs, draft_probs = torch.zeros(vocab), torch.full((vocab,), 0.5 / vocab)
    target_probs[likely] = torch.tensor([0.5, 0.25, 0.25])
    draft_probs[likely[1:]] += 0.25
    counts = count_tokens(name, target_probs, draft_probs, 2, 64, torch.Generator().manual_seed(0))
    assert counts.sum() == 64 and chi_square_tail(counts, 64 * distribution(target_probs)) > 1e-9


@pytest.mark.parametrize("name", METHODS)
def test_leading_dimensions_are_a_batch(name):
    wanted = torch.randint(5, (2, 3, 4), generator=torch.Generator().manual_seed(0))
    target_probs, draft_probs = torch.eye(5)[wanted], torch.full((2, 3, 4, 5), 0.2)
    rank, token = sample_and_verify(target_probs, draft_probs, 3, name, torch.Generator().manual_seed(0))
    assert token.equal(wanted) and rank.shape == wanted.shape


def random_rows(rows):
    """Target and draft distributions over 6 tokens, (rows, 6) each, far from each other and from uniform."""
    return (6 * torch.rand(2, rows, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).softmax(dim=-1)


@pytest.mark.parametrize("name", METHODS)
def test_noise_is_fresh_at_every_call_and_repeats_with_the_seed(name):
    method, (target_probs, draft_probs), generator = METHODS[name], random_rows(500), torch.Generator().manual_seed(0)
    tokens, again = (method.propose(draft_probs, 2, generator) for _ in range(2))
    ranks, others = (method.verify(target_probs, draft_probs, tokens, generator)[0] for _ in range(2))
    assert not ranks.equal(others) and (name == "topk" or not tokens.equal(again))
    first, second = (sample_and_verify(target_probs, draft_probs, 2, name, generator.manual_seed(1)) for _ in range(2))
    assert first[0].equal(second[0]) and first[1].equal(second[1])


@pytest.mark.parametrize("name", METHODS)
def test_the_accepted_rank_points_at_the_token(name):
    generator, (target_probs, draft_probs) = torch.Generator().manual_seed(0), random_rows(1000)
    tokens = METHODS[name].propose(draft_probs, 3, generator)
    rank, token = METHODS[name].verify(target_probs, draft_probs, tokens, generator)
    accepted = rank >= 0
    assert 0 < accepted.sum() and tokens[accepted, rank[accepted]].equal(token[accepted])


@pytest.mark.parametrize("name", METHODS)
def test_ending_early_changes_no_outcome(name):
    n, (target_probs, draft_probs) = 100, random_rows(100)
    tokens = METHODS[name].propose(draft_probs, 3, torch.Generator().manual_seed(2))
    noise = torch.rand(n, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    ratios, residual = METHODS[name].ratios(target_probs, draft_probs, tokens, [n] * 3, None)
    for row in range(n):
        one = slice(row, row + 1)
        early, rest = METHODS[name].ratios(target_probs[one], draft_probs[one], tokens[one], [1] * 3, noise[one])
        accepted = (noise[one] < ratios[one]).any()
        assert (noise[one] < early).byte().argmax() == (noise[one] < ratios[one]).byte().argmax()
        assert (noise[one] < early).any() == accepted and (accepted or rest.equal(residual[one]))


@pytest.mark.parametrize("name", METHODS)
def test_rows_with_fewer_children_are_verified_as_if_alone(name):
    children, with_child = (4, 3, 2, 2, 1), [5, 4, 2, 1]      # each row's children; rows with a child of rank 0, 1, ...
    target_probs, draft_probs = random_rows(5)
    tokens = METHODS[name].propose(draft_probs, 4, torch.Generator().manual_seed(0))
    for row, k in enumerate(children):
        tokens[row, k:] = -1
    ratios, residual = METHODS[name].ratios(target_probs, draft_probs, tokens, with_child, None)
    for row, k in enumerate(children):
        alone = slice(row, row + 1)
        expected = METHODS[name].ratios(target_probs[alone], draft_probs[alone], tokens[alone, :k], [1] * k, None)
        torch.testing.assert_close((ratios[alone, :k], residual[alone]), expected)
        assert (ratios[row, k:] == 0).all()


@pytest.mark.parametrize("name", METHODS)
def test_output_distribution_equals_target_for_rows_with_fewer_children(name):
    n, generator = 20_000, torch.Generator().manual_seed(0)
    target_probs, draft_probs = torch.tensor([0.3, 0.1, 0.2, 0, 0.4]), torch.tensor([0.05, 0.3, 0.15, 0.1, 0.4])
    tokens = METHODS[name].propose(draft_probs.expand(3 * n, 5), 3, generator)
    tokens[n:, 2] = tokens[2 * n:, 1] = -1                                              # three children, two, one
    rank, token = METHODS[name].verify(target_probs.expand(3 * n, 5), draft_probs.expand(3 * n, 5), tokens, generator,
                                       with_child=[3 * n, 2 * n, n])
    for k, ranks, output in zip((3, 2, 1), rank.split(n), token.split(n)):
        assert ranks.max() == k - 1
        assert chi_square_tail(output.bincount(minlength=5), n * distribution(target_probs)) > 1e-9


def test_a_walk_yields_the_expected_tokens_of_its_tree():
    """Proposition 3.4, by Monte Carlo. With one target and one draft distribution everywhere the positional acceptance
    assumption holds, with the rates that the enumeration gives. False alarm: 6 standard errors, 2e-9."""
    target_probs, draft_probs = distribution([0.4, 0.3, 0.2, 0.1]), distribution([0.2, 0.5, 0.1, 0.2])
    rates = outcome("sequoia", target_probs, draft_probs, 3)[1]
    tree, walks, generator = optimal_tree(rates, 24), 50_000, torch.Generator().manual_seed(0)
    child = torch.full((tree.size, 4), -1)                                 # by node and rank; the last column: rejected
    for node, children in enumerate(tree.children):
        child[node, : len(children)] = torch.tensor(children, dtype=torch.long)
    node, tokens = torch.zeros(walks, dtype=torch.long), torch.ones(walks, dtype=torch.float64)
    for _ in range(tree.depth):
        rank, _ = sample_and_verify(target_probs.expand(walks, 4), draft_probs.expand(walks, 4), 3, generator=generator)
        node = torch.where(node >= 0, child[node, rank], -1)
        tokens += node >= 0
    assert abs(tokens.mean() - expected_tokens(tree, rates)) < 6 * tokens.std() / walks**0.5


@pytest.mark.parametrize("repeats, least_rejection", [
    (True, bench.least_rejection_independent), (False, bench.least_rejection_different)])
@settings(max_examples=25)
@given(pairs_of_distributions(), st.integers(1, 3))
def test_least_rejection_is_the_transport_programs(repeats, least_rejection, pair, k):
    """What a benchmark's methods are measured against, as min-cut formulas there, by linear programming here: of each
    sequence of children's chance as much as can be goes to one of them, and no token gets more than the target's."""
    optimize = pytest.importorskip("scipy.optimize")
    target_probs, draft_probs = pair
    k = k if repeats else min(k, len(target_probs))
    sequences, chances = all_proposals("specinfer" if repeats else "sequoia", draft_probs, k)
    limits = [[float(i == row) for row in range(len(sequences)) for _ in range(k)] for i in range(len(sequences))]
    limits += [[float(token == child) for child in sequences.flatten().tolist()] for token in range(len(target_probs))]
    found = optimize.linprog([-1] * k * len(sequences), limits, chances.tolist() + target_probs.tolist())
    assert least_rejection(target_probs[None], draft_probs[None], k) == pytest.approx(1 + found.fun, abs=1e-7)


HALF, NAN = torch.full((3, 2), 0.5), torch.tensor([0.5, math.nan])


@pytest.mark.parametrize("arguments, message", [
    ((NAN, HALF[0], 1), "target_probs must be .* NaN"), ((HALF[0], NAN, 1), "draft_probs must be .* NaN"),
    ((torch.tensor([1.5, -0.5]), HALF[0], 1), "target_probs must be .* negative"),
    ((HALF[0], torch.tensor([1.5, -0.5]), 1), "draft_probs must be .* negative"),
    ((HALF * 2, HALF, 1), "target_probs must be .* summing to 1"), ((HALF, HALF * 0, 1), "draft_probs .* summing to 1"),
    ((HALF, HALF, 3), "size 2, got 3"), ((HALF, HALF, 0), "got 0"),
    ((HALF, HALF[0], 1), r"\(3, 2\) and draft_probs \(2,\)"), ((HALF[0, 0], HALF[0, 0], 1), "one shape"),
    ((HALF, HALF, 1, "medusa"), "unknown method 'medusa'; there are sequoia, specinfer, spectr, naive, topk")])
def test_what_cannot_be_verified_is_an_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        sample_and_verify(*arguments)


# ----------------------------------------------------------------------------------------------------------------------
# 4b  Verification of a whole tree (section 3.2; traversal: arXiv 2505.12398)
#
# A model is a table for each depth, (V**depth, V): its distributions after every path, whose tokens, read as a number
# of base V, give the row. `tokens` are those of a tree's nodes; the root's, 0, plays no part.


@st.composite
def trees_and_models(draw, trees=tuple(tree for tree in SMALL_TREES if tree.size <= 6)):
    """A tree, a target and a draft over 2 or 3 tokens. What follows a path is one of a few distributions, so that
    target and draft are at times equal, nearly equal, disjoint or one-hot, and differ from path to path."""
    vocab = draw(st.integers(2, 3))
    weights = st.lists(st.sampled_from([0, 1e-6, 1, 1 + 1e-10, 3, 7]), min_size=vocab, max_size=vocab).filter(any)
    some = torch.stack([distribution(choice) for choice in draw(st.lists(weights, min_size=2, max_size=6))])
    tree = draw(st.sampled_from([tree for tree in trees if max(map(len, tree.children)) <= vocab]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    return tree, *random_models(some, tree.depth, generator)


def random_models(some, depth, generator):
    rows = [torch.randint(len(some), (2, some.shape[1] ** level), generator=generator) for level in range(depth)]
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


def draft_of_levels(layout, draft_probs):
    """(size, V) -> what verification takes: for each level, the rows of its nodes that have children."""
    return [draft_probs[level.nodes] for level in layout.levels]


def all_tokens_of_a_tree(name, tree, draft):
    """All that a method can propose in a tree, (proposals, size), and the chances, (proposals,)."""
    vocab = len(draft[0][0])
    @functools.cache
    def proposals(depth, number, k):
        return list(zip(*(part.tolist() for part in all_proposals(name, draft[depth][number], k))))
    def number(tokens, node):
        return 0 if node == 0 else number(tokens, tree.parents[node]) * vocab + tokens[node]
    found = [([0], 1.0)]                                       # level order: a node's children are the next to be known
    for node, children in enumerate(tree.children):
        if children:
            found = [(tokens + more, chance * p) for tokens, chance in found
                     for more, p in proposals(tree.depths[node], number(tokens, node), len(children))]
    tokens, chances = zip(*found)
    return torch.tensor(tokens), torch.tensor(chances, dtype=torch.float64)


def copies_of(tree, n):
    """A layout of n copies of a tree, one behind another, so that a single sweep serves them all."""
    forest = SimpleNamespace(size=n * tree.size, children=[tuple(copy * tree.size + child for child in children)
                                                           for copy in range(n) for children in tree.children])
    levels = [[copy * tree.size + node for copy in range(n) for node in range(tree.size) if tree.depths[node] == depth]
              for depth in range(tree.depth - 1)]
    return SimpleNamespace(tree=forest, levels=[sequoia.Families.of(forest, nodes, "cpu") for nodes in levels])


def outcomes(name, tree, tokens, target_probs, draft_probs):
    """Verification in closed form: each node's chance to be the last accepted one, (n, size), and the distribution of
    the token that follows it, (n, size, V). The code computes the masses or the ratios, and the residuals."""
    if name == "traversal":
        layout, flat = copies_of(tree, len(tokens)), [x.flatten(0, 1) for x in (tokens, target_probs, draft_probs)]
        mass, residual = METHODS[name].sweep(layout, *flat[:2], draft_of_levels(layout, flat[2]))
        order = sequoia.TreeLayout(tree, "cpu").post_order
        mass, last = mass.reshape(tokens.shape), torch.zeros(tokens.shape, dtype=torch.float64)
        passed = torch.cat([torch.ones_like(mass[:, :1]), (1 - mass[:, order]).cumprod(dim=1)], dim=1)
        last[:, order] = passed[:, :-1] * mass[:, order]
        return last, residual.reshape(target_probs.shape)
    last, following = torch.ones(tokens.shape, dtype=torch.float64), target_probs.clone()
    for node, children in enumerate(tree.children):           # `last`: the chance to be reached, then that to end there
        if children:
            ratios, following[:, node] = METHODS[name].ratios(target_probs[:, node], draft_probs[:, node],
                                                              tokens[:, children], [len(tokens)] * len(children), None)
            for child, ratio in zip(children, ratios.clamp(max=1).T):
                last[:, child] = last[:, node] * ratio
                last[:, node] *= 1 - ratio
    return last, following


@pytest.mark.parametrize("name", METHODS)
@given(trees_and_models())
def test_joint_distribution_of_the_text_equals_the_targets_exactly(name, case):
    """All proposals, all outcomes: the path, the token that follows, then the target's own, to the tree's depth."""
    tree, target, draft = case
    tokens, chances = all_tokens_of_a_tree(name, tree, draft)
    target_probs, draft_probs = (distributions_at(tree, tokens, model) for model in (target, draft))
    last, following = outcomes(name, tree, tokens, target_probs, draft_probs)
    number = numbers_of_paths(tree, tokens, vocab=len(target[0][0]))
    ends = chances[:, None, None] * last[..., None] * following                               # (proposals, size, V)
    text, exact = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    for depth, probs in enumerate(target):                     # texts that have ended go on as the target would
        text, exact = (joint.flatten()[:, None] * probs for joint in (text, exact))
        for node in range(tree.size):
            if tree.depths[node] == depth:
                text.index_add_(0, number[:, node], ends[:, node])
    torch.testing.assert_close(text, exact, rtol=0, atol=1e-6)


def propose_tree(name, tree, draft, generator):
    """The tokens of one tree, drawn node by node, (size,)."""
    tokens = torch.zeros(tree.size, dtype=torch.long)
    for node, children in enumerate(tree.children):
        if children:
            draft_probs = distributions_at(tree, tokens, draft)[node]
            tokens[list(children)] = METHODS[name].propose(draft_probs, len(children), generator)
    return tokens


def leaf_by_leaf(tree, tokens, target_probs, draft_probs, noise):
    """Traversal verification in the paper's own order: the first leaf is accepted with its whole path, or deleted,
    which leaves its parent with another mass, residual and draft. Returns the node and what the next token is from."""
    children, mass = [list(children) for children in tree.children], {0: 1.0}
    R, D, tried = target_probs.clone(), draft_probs.clone(), [[] for _ in children]
    while True:
        leaf = 0
        while children[leaf]:
            parent, leaf = leaf, children[leaf][0]
            t = tokens[leaf]
            if leaf not in mass:                                            # seen for the first time
                mass[leaf] = min(1.0, float(mass[parent] * R[parent, t] / D[parent, t]))
        if leaf == 0 or noise[leaf] < mass[leaf]:
            return leaf, R[leaf]
        children[parent].remove(leaf)
        tried[parent].append(t)
        left = (mass[parent] * R[parent] - D[parent]).clamp(min=0)
        s = float(left.sum())
        R[parent] = left / s if s > 0 else R[parent]
        mass[parent] = s / (s + (1 - mass[parent])) if s > 0 else 0.0       # with 0 it will be deleted, too
        D[parent, t] = 0
        if D[parent].sum() == 0 and len(tried[parent]) < len(D[parent]):
            D[parent] = 1
            D[parent, tried[parent]] = 0
        D[parent] /= D[parent].sum().clamp(min=1e-300)                      # all tokens tried: the end, D is 0


@given(trees_and_models())
def test_traversal_equals_the_papers_order_leaf_by_leaf(case):
    """With the same random number for each node: the same node, what may follow it, and the token drawn from that."""
    (tree, target, draft), layout, method = case, sequoia.TreeLayout(case[0], "cpu"), METHODS["traversal"]
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        tokens, state = propose_tree("traversal", tree, draft, generator), generator.get_state()
        target_probs, draft_probs = (distributions_at(tree, tokens, model) for model in (target, draft))
        rows = layout, tokens, lambda nodes: target_probs[list(nodes)], draft_of_levels(layout, draft_probs)
        node, token = method.verify_tree(*rows, generator)
        noise = torch.rand(tree.size, generator=generator.set_state(state), dtype=torch.float64)
        expected, following = leaf_by_leaf(tree, tokens, target_probs, draft_probs, noise)
        assert node.tolist() == [expected]
        assert token.equal(sequoia.sample(following[None], generator))
        _, residual = method.sweep(layout, tokens, target_probs, rows[3])
        torch.testing.assert_close(residual[expected], following, rtol=0, atol=1e-9)


def sweep(tree, target, draft, seed=0):
    """Tokens proposed in a tree, what the models say after each node, and the masses and residuals of traversal."""
    layout = sequoia.TreeLayout(tree, "cpu")
    tokens = propose_tree("traversal", tree, draft, torch.Generator().manual_seed(seed))
    target_probs, draft_probs = (distributions_at(tree, tokens, model) for model in (target, draft))
    found = METHODS["traversal"].sweep(layout, tokens, target_probs, draft_of_levels(layout, draft_probs))
    return tokens, target_probs, draft_probs, *found


@given(trees_and_models([chain(length) for length in range(1, 6)]))
def test_traversal_of_a_chain_equals_block_verification(case):
    """Algorithm 2 of arXiv 2403.10444: the last i with noise_i <= h_i is accepted; its residual is drawn from next."""
    tokens, M_b, M_s, mass, residual = sweep(*case)
    last, p = len(tokens) - 1, 1.0                             # M_s after the last token plays no part
    for i in range(last + 1):
        if i > 0:
            p = min(float(p * M_b[i - 1, tokens[i]] / M_s[i - 1, tokens[i]]), 1.0)
        left = (p * M_b[i] - M_s[i]).clamp(min=0)
        s = float(left.sum())
        if i == last:
            h, following = p, M_b[i]
        elif s == 0:                                           # 0 / 0 if p is 1: then token i + 1 is accepted surely
            continue
        else:
            h, following = s / (s + (1 - p)), left / s
        assert mass[i].item() == pytest.approx(h, abs=1e-9)
        if mass[i] > 0:
            torch.testing.assert_close(residual[i], following, rtol=0, atol=1e-9)


@given(trees_and_models([sequences(k, 1) for k in range(1, 4)]))
def test_traversal_of_one_level_equals_sequoia(case):
    tokens, target_probs, draft_probs, mass, residual = sweep(*case)
    ratios, rest = METHODS["sequoia"].ratios(target_probs[:1], draft_probs[:1], tokens[None, 1:], [1] * len(tokens[1:]),
                                             None)
    assert mass.equal(torch.cat([torch.ones(1), ratios[0].clamp(max=1)]))
    assert residual.equal(torch.cat([rest, target_probs[1:]]))


@given(st.integers(0, 2**32), st.sampled_from([0, 1e-7, 1e-6, 1e-4]))
def test_masses_are_chances_where_target_and_draft_differ_by_rounding(seed, difference):
    """In float32, where s + 1 is 1."""
    generator = torch.Generator().manual_seed(seed)
    draft_probs = torch.rand(1, 16, generator=generator)
    target_probs = draft_probs * (1 + difference * torch.randn(1, 16, generator=generator))
    target_probs, draft_probs = (probs / probs.sum() for probs in (target_probs, draft_probs))
    layout = sequoia.TreeLayout(Tree([-1, 0, 0, 0, 1, 1]), "cpu")
    method, tokens = METHODS["traversal"], torch.zeros(6, dtype=torch.long)
    tokens[1:4], tokens[4:] = (method.propose(draft_probs[0], k, generator) for k in (3, 2))
    mass, residual = method.sweep(layout, tokens, target_probs.expand(6, -1), [draft_probs, draft_probs])
    assert mass[0] == 1 and (0 <= mass).all() and (mass <= 1).all()
    torch.testing.assert_close(residual.sum(dim=1), torch.ones(6))


TREE = Tree([-1, 0, 0, 1, 1, 2, 2, 2])    # most children not at the root, nor at a level's first node
SOME = torch.stack([distribution(weights) for weights in ([7, 2, 1], [1, 4, 1], [0, 2, 3], [2, 3, 2], [1, 0, 5])])


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_node_and_token_have_their_exact_chances_in_walk_and_static_program(name, static):
    generator, runs = torch.Generator().manual_seed(11), 500
    layout, (target, draft) = sequoia.TreeLayout(TREE, "cpu"), random_models(SOME, TREE.depth, generator)
    tokens = propose_tree(name, TREE, draft, generator)
    target_probs, draft_probs = (distributions_at(TREE, tokens, model) for model in (target, draft))
    last, following = outcomes(name, TREE, tokens[None], target_probs[None], draft_probs[None])
    chances, counts = last[0, :, None] * following[0], torch.zeros(TREE.size, 3)
    for _ in range(runs):
        node, token = METHODS[name].verify_tree(layout, tokens, lambda nodes: target_probs[list(nodes)],
                                                draft_of_levels(layout, draft_probs), generator, static=static)
        counts[node, token] += 1
    assert chi_square_tail(counts.flatten(), runs * chances.flatten()) > 1e-9


@pytest.mark.parametrize("method", [*METHODS.values(), sequoia.GREEDY], ids=[*METHODS, "greedy"])
def test_a_long_path_is_followed_to_where_it_ends(method):
    """Down chains of which the draft was right up to a node, for every such node."""
    for length, static in product(range(1, 10), (False, True)):
        layout, tokens, certain = sequoia.TreeLayout(sequoia.chain(length), "cpu"), torch.arange(length + 1), torch.eye(length + 2)
        for right in range(length + 1):
            target_probs = certain[[*range(1, right + 1)] + [length + 1] * (length + 1 - right)]
            node, token = method.verify_tree(layout, tokens, lambda nodes: target_probs[list(nodes)],
                                             [certain[i : i + 1] for i in range(1, length + 1)], static=static)
            assert (node, token) == (right, length + 1)


def test_joint_distribution_of_the_text_equals_the_targets_through_traversal():
    generator, runs = torch.Generator().manual_seed(2), 2000
    layout, (target, draft) = sequoia.TreeLayout(TREE, "cpu"), random_models(SOME, TREE.depth, generator)
    counts, exact = torch.zeros(27), torch.ones(1, dtype=torch.float64)
    for _ in range(runs):
        tokens = propose_tree("traversal", TREE, draft, generator)
        target_probs, draft_probs = (distributions_at(TREE, tokens, model) for model in (target, draft))
        node, token = METHODS["traversal"].verify_tree(layout, tokens, lambda nodes: target_probs[list(nodes)],
                                                       draft_of_levels(layout, draft_probs), generator)
        number = numbers_of_paths(TREE, tokens, 3)[node] * 3 + token
        for depth in range(TREE.depths[node] + 1, TREE.depth):
            number = number * 3 + sequoia.sample(target[depth][number], generator)
        counts[number] += 1
    for probs in target:
        exact = exact.flatten()[:, None] * probs
    assert chi_square_tail(counts, runs * exact.flatten()) > 1e-9


@settings(max_examples=30)
@given(trees_and_models())
def test_the_benchmarks_expected_tokens_are_those_of_all_outcomes(case):
    (tree, target, draft), layout = case, sequoia.TreeLayout(case[0], "cpu")
    assume(tree.size > 1)
    tokens = propose_tree("traversal", tree, draft, torch.Generator().manual_seed(0))
    target_probs, draft_probs = (distributions_at(tree, tokens, model) for model in (target, draft))
    for name, expected in bench.EXPECTED.items():
        last, _ = outcomes(name, tree, tokens[None], target_probs[None], draft_probs[None])
        found = expected(layout, tokens, target_probs, draft_of_levels(layout, draft_probs))
        assert found == pytest.approx((last[0] * (layout.depth + 1)).sum().item(), abs=1e-9)


# ----------------------------------------------------------------------------------------------------------------------
# 5  Tree attention and the KV cache

TINY = Path(sequoia.__file__).parent / "tiny"
SMALL = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             max_position_embeddings=256, bos_token_id=1, eos_token_id=None, pad_token_id=0)
GQA = dict(SMALL, num_key_value_heads=2)
ARCHITECTURES = {
    "llama": lambda: transformers.LlamaConfig(**GQA),
    "qwen2": lambda: transformers.Qwen2Config(**GQA),
    "qwen2 with a window": lambda: transformers.Qwen2Config(**GQA, use_sliding_window=True, sliding_window=12,
                                                            max_window_layers=1),
    "qwen3": lambda: transformers.Qwen3Config(**GQA, head_dim=8),
    "mistral": lambda: transformers.MistralConfig(**GQA, sliding_window=12),
    "mixtral": lambda: transformers.MixtralConfig(**GQA, sliding_window=12, num_local_experts=4),
    "phi3": lambda: transformers.Phi3Config(**GQA, sliding_window=12),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**SMALL),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=256, bos_token_id=1,
                                            eos_token_id=None, pad_token_id=0),
    "opt": lambda: transformers.OPTConfig(vocab_size=64, hidden_size=32, ffn_dim=48, num_hidden_layers=2, bos_token_id=1,
                                          num_attention_heads=4, max_position_embeddings=256, word_embed_proj_dim=32,
                                          eos_token_id=None, pad_token_id=0),
    "falcon": lambda: transformers.FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                                                bos_token_id=1, eos_token_id=None, pad_token_id=0),
    "gemma2": lambda: transformers.Gemma2Config(**GQA, head_dim=8, sliding_window=12),
    "gemma3": lambda: transformers.Gemma3TextConfig(**GQA, head_dim=8, sliding_window=12),
    "gpt-oss": lambda: transformers.GptOssConfig(**GQA, head_dim=8, num_local_experts=4, num_experts_per_tok=2,
                                                 sliding_window=12, layer_types=["sliding_attention", "full_attention"]),
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
    return torch.randint(2, vocabulary, (1, length), generator=torch.Generator().manual_seed(seed))


def decoder_for(target, draft, prompt, **kwargs):
    settings = dict(processors=transformers.LogitsProcessorList(), generator=torch.Generator().manual_seed(0))
    decoder = sequoia.Decoder(target, draft, prompt.device, **{**settings, **kwargs})
    decoder.begin(prompt[0], prompt, max_length=100)
    return decoder


def target_processors(model, **sampling):
    """What transformers makes of these settings."""
    return model._get_logits_processor(transformers.GenerationConfig(do_sample=True, **sampling), input_ids_seq_length=4, device="cpu")


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss"])
@torch.no_grad()
def test_tree_attention_equals_one_path_at_a_time(name):
    """Gemma 3 and GPT-OSS have windows of 12, which the prompt of 30 exceeds; GPT-OSS has eager attention."""
    target, draft = make_pair(ARCHITECTURES[name]())
    prompt, tree = prompt_of(30), optimal_tree([0.5, 0.2, 0.1], 14, 5)
    decoder = decoder_for(target, draft, prompt)
    decoder.plant(tree)
    place, _, _ = decoder.grow()
    logits = decoder.target(decoder.tokens, place, decoder.frame.slots[1:])
    for node in range(tree.size):
        text = torch.cat([prompt[0], decoder.tokens[1:][[0, *decoder.layout.paths[node]]]])[None]
        torch.testing.assert_close(logits[node], target(text).logits[0, -1], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_few_nodes_are_fed_as_four_and_score_the_same(llama):
    decoder = decoder_for(*llama, prompt_of(20))
    decoder.plant(optimal_tree([0.5, 0.2, 0.1], 9, 4))
    place, _, _ = decoder.grow()
    for nodes in ([1], [2, 5], [3, 4, 7], [6, 1, 2, 9, 8]):
        nodes = torch.tensor(nodes)
        fed = sequoia.enough(nodes)
        assert fed[-len(nodes):].tolist() == nodes.tolist() and set(fed.tolist()) == set(nodes.tolist()) and len(fed) > 2
        expected = decoder.target(decoder.tokens, place, nodes)
        entries = [entry.clone() for entry in decoder.target.entries]
        torch.testing.assert_close(decoder.target(decoder.tokens, place, fed)[-len(nodes):], expected, atol=1e-5, rtol=1e-5)
        for before, after in zip(entries, decoder.target.entries):
            torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_cache_after_steps_equals_fresh_prefill(llama):
    """Both models' entries up to the stem's, where the draft's own entry may be missing: it is written with the next root."""
    prompt, text = prompt_of(20), []
    decoder = decoder_for(*llama, prompt)
    decoder.plant(optimal_tree([0.5, 0.2, 0.1], 14, 5))
    text = prompt[0].tolist() + [decoder.first]
    for _ in range(6):
        text += decoder.step().tokens
    assert len(text) > 30 and decoder.length == int(decoder.base) == len(text) - 2
    for model, known in ((decoder.target, len(text) - 1), (decoder.draft, len(text) - 2)):
        fresh = sequoia.CachedModel(model.model)
        fresh.feed(torch.tensor(text))
        fresh.reserve(64)
        for ours, theirs in zip(model.entries, fresh.entries):
            torch.testing.assert_close(ours[:, :, :known], theirs[:, :, :known], atol=1e-4, rtol=1e-4)


def test_models_that_cannot_verify_a_tree_are_named():
    cases = {"encoder-decoder": transformers.T5ForConditionalGeneration(transformers.T5Config(
                 vocab_size=64, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)),
             "recurrent": transformers.MambaForCausalLM(transformers.MambaConfig(
                 vocab_size=64, hidden_size=16, num_hidden_layers=1))}
    for reason, model in cases.items():
        with pytest.raises(ValueError, match=reason):
            sequoia.check_model(model)


# ----------------------------------------------------------------------------------------------------------------------
# 6  The decoding step


def enumerate_texts(target, prompt, length, processors):
    """The exact probability of every continuation of this length, from the model alone: a dictionary of tuples."""
    texts = {(): 1.0}
    for _ in range(length):
        rows = torch.tensor([prompt[0].tolist() + list(text) for text in texts])
        probs = processors(rows, target(rows).logits[:, -1].float()).softmax(-1)
        texts = {text + (token,): p * probs[i, token].item() for i, (text, p) in enumerate(texts.items())
                 for token in range(probs.shape[1]) if probs[i, token] > 0}
    return texts


JOINT = {   # name: (runs, vocabulary, method, arguments of generate)
    "sampling": (20_000, 5, "sequoia", {}),
    "top-p": (4_000, 6, "sequoia", dict(top_p=0.8)),
    "min-p": (4_000, 6, "sequoia", dict(min_p=0.15)),
    "repetition penalty": (4_000, 4, "sequoia", dict(repetition_penalty=1.7)),
    "specinfer": (2_000, 4, "specinfer", {}),
    "spectr": (2_000, 4, "spectr", {}),
    "naive": (2_000, 4, "naive", {}),
    "topk": (2_000, 4, "topk", {}),
    "traversal": (2_000, 4, "traversal", {}),
}


@pytest.mark.parametrize("case, static", [(case, False) for case in JOINT] + [("specinfer", True), ("sampling", True), ("traversal", True)])
@torch.inference_mode()
def test_joint_distribution_of_three_tokens_equals_enumeration(case, static):
    """Through the real step, cache and mask included; static is the program of fixed shapes that a CUDA graph records. The first token comes from the prompt's pass, the others from trees;
    one decoder starts anew each time."""
    runs, vocabulary, method, arguments = JOINT[case]
    runs = 2_000 if static else runs
    config = transformers.GPT2Config(vocab_size=vocabulary, n_embd=32, n_layer=1, n_head=4, n_positions=64, bos_token_id=None, eos_token_id=None)
    target, draft = map(sequoia.pack, make_pair(config, sharpness=6.0, difference=1.5, seed=3))
    prompt, acceptance = prompt_of(4, vocabulary), sequoia.Acceptance()
    processors = target_processors(target, **{"top_k": 0, **arguments})
    decoder = decoder_for(target, draft, prompt, method=method, processors=processors)
    decoder.static = static
    decoder.plant(Tree([-1, 0, 0, 0, 1, 1, 2]))
    start, first_probs = (decoder.base.clone(), decoder.length, prompt), decoder.target_probs(decoder.target.logits, [])
    counts = collections.Counter()
    for _ in range(runs):
        decoder.base, decoder.length, decoder.history = start[0].clone(), *start[1:]      # the prompt again
        decoder.tokens[:2] = torch.cat([prompt[0, -1:], sequoia.sample(first_probs, decoder.generator)])
        text = [int(decoder.tokens[1])]
        while len(text) < 3:
            step = decoder.step()
            acceptance.count_step(step)
            text += step.tokens
        counts[tuple(text[:3])] += 1
    exact = enumerate_texts(target, prompt, 3, processors)
    assert set(counts) <= set(exact)
    observed, probs = ([table[text] for text in exact] for table in (counts, exact))
    assert chi_square_tail(observed, [runs * p for p in probs]) > 1e-9
    assert acceptance.accepted.sum() > runs / 4, "the draft's tokens must matter for this test to mean something"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_equals_plain_generate(name):
    """For every architecture, with windows of 12 tokens and a text of 60."""
    target, draft = make_pair(ARCHITECTURES[name]())
    prompt = prompt_of(30)
    expected = target.generate(prompt, max_new_tokens=30, do_sample=False)
    for tree in ("none", "16x5", "sequences:3x4"):
        steps = []
        out = sequoia.generate(target, draft, prompt, max_new_tokens=30, do_sample=False, tree=tree, on_step=steps.append)
        assert torch.equal(out, expected)
        assert tree == "none" or len(steps) < 20, "a draft this near must save steps"


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss"])
def test_static_program_is_greedy_too(name):
    target, draft = make_pair(ARCHITECTURES[name]())
    expected = target.generate(prompt_of(30), max_new_tokens=30, do_sample=False)[0, 30:].tolist()
    for tree in (Tree([-1]), optimal_tree([0.5, 0.2, 0.1], 14, 5), sequences(3, 4)):
        decoder = decoder_for(target, draft, prompt_of(30), greedy=True)
        decoder.static = True
        decoder.plant(tree)
        text = [decoder.first]
        with torch.no_grad():
            while len(text) < 30:
                text += decoder.step().tokens
        assert text[:30] == expected


def on_meta(value):
    """All tensors in here as tensors of a device without values."""
    if isinstance(value, sequoia.Families):
        return sequoia.Families(*map(on_meta, value))
    return list(map(on_meta, value)) if isinstance(value, list) else value.to("meta") if torch.is_tensor(value) else value


STEPS = [("llama", method, greedy) for method in METHODS for greedy in (False, True)] + [
    (name, "sequoia", False) for name in ARCHITECTURES if name not in ("llama", "mixtral", "gpt-oss")]   # no float32 experts there


class NothingOnTheCPU(TorchDispatchMode):
    """No operator takes or makes a tensor on the CPU: in a CUDA graph that would be a copy, and an error."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        assert not any(torch.is_tensor(leaf) and leaf.is_cpu for leaf in tree_leaves((args, kwargs, out))), operator
        return out


@pytest.mark.parametrize("name, method, greedy", STEPS)
@torch.no_grad()
def test_a_static_step_never_asks_the_host(name, method, greedy, monkeypatch):
    """What a CUDA graph records must not depend on any value: here there are none, so that whoever asks for one fails."""
    pair, prompt, layout = make_pair(ARCHITECTURES[name]()), prompt_of(10), sequoia.TreeLayout
    processors = [] if greedy else target_processors(pair[0], temperature=0.6, top_k=20, top_p=0.9, min_p=0.1)
    decoder = decoder_for(*pair, prompt, method=method, processors=processors, greedy=greedy, generator=None)
    for model in (decoder.target, decoder.draft):
        model.model.to("meta")
        model.buffers = on_meta(model.buffers)
    decoder.static = True
    vars(decoder).update({name: on_meta(getattr(decoder, name)) for name in ("base", "last", "tokens")})

    def layout_on_meta(tree, device):                                    # a layout is made with the values at hand
        made = layout(tree, "cpu")
        vars(made).update({key: on_meta(value) for key, value in vars(made).items()})
        return made
    monkeypatch.setattr(sequoia, "TreeLayout", layout_on_meta)
    for tree in (Tree([-1]), Tree([-1, 0, 0, 1, 1, 1, 2, 3])):
        decoder.plant(tree)
        with NothingOnTheCPU():
            report = decoder.program()
        assert report.is_meta and report.shape == (3 + tree.size,)


def test_greedy_equals_plain_generate_on_held_out_prompts():
    plain, target, draft = (transformers.AutoModelForCausalLM.from_pretrained(TINY / name, dtype=torch.float32).eval()
                            for name in ("target", "target", "draft"))
    target, draft = sequoia.pack(target), sequoia.pack(draft)
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY / "target")
    planner = sequoia.Planner()
    for prompt in bench.texts(argparse.Namespace(prompts=None, tokenizer=tokenizer, device="cpu"), 20, 128):
        expected = plain.generate(prompt, max_new_tokens=20, do_sample=False)
        for tree in ("auto", "64x8", "sequences:5x8", "none"):
            out = sequoia.generate(target, draft, prompt, max_new_tokens=20, do_sample=False, tree=tree, planner=planner)
            assert torch.equal(out, expected), tree


@pytest.mark.parametrize("generator", [None, torch.Generator().manual_seed(1)])
def test_noise_is_fresh_every_step(llama, monkeypatch, generator):
    """No step draws the numbers of an earlier one (the authors' code draws once a prompt)."""
    drawn, rand = [], torch.rand
    monkeypatch.setattr(torch, "rand", lambda *args, **kwargs: drawn.append(rand(*args, **kwargs)) or drawn[-1])
    sequoia.generate(*llama, prompt_of(8), max_new_tokens=40, do_sample=True, tree="6x3", generator=generator)
    values = [float(noise.flatten()[0]) for noise in drawn]
    assert len(values) > 10 and len(set(values)) == len(values)


@pytest.mark.parametrize("tree", ["auto", "9x4", "none"])
def test_the_same_seed_gives_the_same_text(llama, tree):
    def text(seed):
        return sequoia.generate(*llama, prompt_of(8), max_new_tokens=100, do_sample=True, tree=tree,
                                generator=torch.Generator().manual_seed(seed)).tolist()
    assert text(1) == text(1) != text(2)


@torch.inference_mode()
def test_a_compiled_pass_serves_all_trees():
    """Once made, in one piece, for a single node and for any number: no tree, prompt or length has it compiled again. Here
    without the generation of code, and the target is its own draft."""
    graphs, backend, config = [], torch._dynamo.lookup_backend("aot_eager"), ARCHITECTURES["gemma3"]()
    config.head_dim = 16                                                 # as many as it is tried out with tokens
    model, prompt, new = make_pair(config)[0], prompt_of(30), dict(max_new_tokens=30, do_sample=False)
    model.recording = sequoia.compiled(model, lambda *graph: graphs.append(graph) or backend(*graph))
    compiled, expected = len(graphs), model.generate(prompt, **new)
    for tree in ("none", "16x5", "sequences:3x4"):
        assert torch.equal(sequoia.generate(model, model, prompt, tree=tree, **new), expected)
    decoder = decoder_for(model, model, prompt, greedy=True)
    decoder.static = True                                                # as on a GPU: a pass sees all there is room for
    decoder.plant(Tree([-1, 0, 0, 1]))
    assert decoder.step().tokens == expected[0, 31:34].tolist()
    assert len(graphs) == compiled >= 2 and not torch._dynamo.utils.counters["graph_break"]


def test_what_cannot_be_compiled_runs_as_it_is(llama):
    def backend(graph, inputs):
        raise RuntimeError("no compiler")
    with pytest.warns(UserWarning, match="no compiler"):
        run = sequoia.compiled(llama[0], backend)
    assert run.__func__ is sequoia.CachedModel.run


@torch.no_grad()
def test_one_decoder_takes_text_after_text_and_records_once(llama, monkeypatch):
    """Shorter, longer, and so long that the cache must grow; broken off in mid-step too, or after the first token. What an
    earlier text left in the cache never shows, and what was recorded is never in a cache that has been given up."""
    prepared, tree = [], Tree([-1, 0, 0, 1, 1, 2, 3])
    prepare = sequoia.Decoder.prepare
    def memory(decoder):
        return [entry.data_ptr() for model in (decoder.target, decoder.draft) for entry in model.entries]
    monkeypatch.setattr(sequoia.Decoder, "prepare", lambda self: prepared.append(memory(self)) or prepare(self))
    decoder = decoder_for(*llama, prompt_of(5), greedy=True)
    for length, max_length, recorded in ((20, 60, 1), (9, 40, 1), (31, 90, 1), (20, 250, 2), (9, 40, 2), (600, 601, 2), (9, 40, 3)):
        for buffer in decoder.target.buffers + decoder.draft.buffers:
            buffer.fill_(torch.nan)                                      # as after a text that ended in an overflow
        prompt = prompt_of(length, seed=length)
        decoder.begin(prompt[0], prompt, max_length)
        decoder.static, text = True, [decoder.first]                     # as on a GPU
        if length + 1 == max_length:
            continue
        decoder.plant(tree)
        while len(text) < 20:
            text += decoder.step().tokens
        decoder.grow()
        assert text[:20] == llama[0].generate(prompt, max_new_tokens=20, do_sample=False)[0, length:].tolist()
        assert len(prepared) == recorded and prepared[-1] == memory(decoder)


def test_a_planner_keeps_the_decoder_for_the_same_way_of_sampling(llama):
    """And only for that: every text is the one that a planner of its own gives."""
    class Without(transformers.TemperatureLogitsWarper):
        """One of a user's own, whose settings are no numbers."""
        def __init__(self, token):
            super().__init__(1.0)
            self.tokens = torch.tensor([token])

        def __call__(self, input_ids, scores):
            return scores.index_fill(1, self.tokens, -torch.inf)
    kept, planner = [], sequoia.Planner()
    def text(planner, prompt, **arguments):
        torch.manual_seed(0)
        return sequoia.generate(*llama, prompt, max_new_tokens=20, tree=arguments.pop("tree", "sequences:2x3"), planner=planner,
                                **{"do_sample": True, **arguments}).tolist()
    changes = [{}, {}, dict(tree="kary:2x3"), dict(temperature=0.5), dict(temperature=0.5, top_p=0.8), dict(do_sample=False),
               dict(repetition_penalty=1.5), dict(repetition_penalty=1.5), dict(bad_words_ids=[[3]]), dict(bad_words_ids=[[4]]),
               dict(method="traversal"), dict(method="naive"), dict(generator=torch.Generator().manual_seed(1)),
               dict(logits_processor=[Without(5)]), dict(logits_processor=[Without(6)]), {}]
    for i, change in enumerate(changes):
        prompt = prompt_of(6 + 3 * i % 8)
        seed_again = {"generator": torch.Generator().manual_seed(1)} if "generator" in change else {}
        assert text(planner, prompt, **change) == text(sequoia.Planner(), prompt, **{**change, **seed_again})
        kept.append(planner.decoder)
    assert kept[0] is kept[1] is kept[2] and len(set(map(id, kept))) == len(changes) - 2


@pytest.mark.parametrize("where", ["Cache", "TreeLayer"])
def test_an_interrupted_start_can_be_repeated(llama, where, monkeypatch):
    planner, working = sequoia.Planner(), getattr(sequoia, where)
    def interrupted(*arguments, **kwargs):
        raise KeyboardInterrupt
    for replacement in (interrupted, working):
        monkeypatch.setattr(sequoia, where, replacement)
        with pytest.raises(KeyboardInterrupt) if replacement is interrupted else contextlib.nullcontext():
            out = sequoia.generate(*llama, prompt_of(10), max_new_tokens=20, do_sample=False, tree="9x4", planner=planner)
    assert torch.equal(out, llama[0].generate(prompt_of(10), max_new_tokens=20, do_sample=False))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("tree", ["none", "16x5", "kary:2x4"])
def test_graph_and_eager_outputs_are_identical(tree):
    target, draft = (model.cuda() for model in make_pair(ARCHITECTURES["llama"]()))
    for do_sample in (False, True):
        texts = [sequoia.generate(target, draft, prompt_of(20).cuda(), max_new_tokens=60, do_sample=do_sample, tree=tree,
                                  cuda_graph=graph, generator=torch.Generator("cuda").manual_seed(0)) for graph in (True, False)]
        assert torch.equal(*texts)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("compiled", [False, True])
def test_one_graph_serves_text_after_text(compiled, monkeypatch):
    """With a planner that is kept, and with compiled passes: the texts are those of transformers, and only the first records."""
    graphs, graph = [], torch.cuda.CUDAGraph
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graphs.append(graph()) or graphs[-1])
    models, planner = [model.cuda() for model in make_pair(ARCHITECTURES["llama"]())], sequoia.Planner()
    if compiled:
        models = list(map(sequoia.pack, models))
    for length in (20, 9, 31, 20):
        prompt, new = prompt_of(length, seed=length).cuda(), dict(max_new_tokens=30, do_sample=False)
        out = sequoia.generate(*models, prompt, tree="kary:2x4", planner=planner, **new)
        assert torch.equal(out, models[0].generate(prompt, **new))
    assert len(graphs) == 1


def test_vocabularies_padded_to_different_lengths():
    target, draft = make_pair(ARCHITECTURES["llama"]())
    for size in (60, 80):
        draft.resize_token_embeddings(size)
        expected = target.generate(prompt_of(10), max_new_tokens=20, do_sample=False)
        out = sequoia.generate(target, draft, prompt_of(10), max_new_tokens=20, do_sample=False, tree="9x4")
        assert torch.equal(out, expected)


def test_nan_logits_are_an_error():
    for broken in (0, 1):
        pair = make_pair(ARCHITECTURES["llama"]())
        next(pair[broken].parameters()).data.fill_(float("nan"))
        for do_sample in (False, True):
            with pytest.raises(ValueError, match="NaN"):
                sequoia.generate(*pair, prompt_of(10), max_new_tokens=20, do_sample=do_sample, tree="9x4")


# ----------------------------------------------------------------------------------------------------------------------
# 7  Where the weights are


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_output_equals_plain_output(name):
    target, draft = make_pair(ARCHITECTURES[name]())
    def text():
        return sequoia.generate(target, draft, prompt_of(30), max_new_tokens=30, do_sample=True, tree="9x4",
                                generator=torch.Generator().manual_seed(0)).tolist()
    plain = text()
    sequoia.pack(target), sequoia.pack(draft)
    assert hasattr(target, "recording") and text() == plain


def test_a_pass_that_depends_on_its_tokens_is_not_recorded():
    """A loop over the experts that were hit makes a trace of one run wrong for the next: it must be found out."""
    config = transformers.MixtralConfig(**GQA, num_local_experts=4, experts_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    assert sequoia.pack(model).recording.__func__ is sequoia.CachedModel.run
    llama = transformers.AutoModelForCausalLM.from_config(ARCHITECTURES["llama"]()).eval()
    assert sequoia.pack(llama).recording.func is sequoia._replay


DEEP = dict(GQA, num_hidden_layers=5)
STREAMED = {                                    # what may go wrong: tied weights, biases, windows, buffers, layers that differ
    "llama": lambda: transformers.LlamaConfig(**DEEP),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**dict(SMALL, num_hidden_layers=5)),
    "gemma3": lambda: transformers.Gemma3TextConfig(**DEEP, head_dim=8, sliding_window=12, sliding_window_pattern=3),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=5, n_head=4, n_positions=256, bos_token_id=1,
                                            eos_token_id=None, pad_token_id=0),
}


def both_texts(target, draft):
    """One greedy and one sampled."""
    return [sequoia.generate(target, draft, prompt_of(30), max_new_tokens=20, do_sample=do_sample, tree="9x4",
                             generator=torch.Generator().manual_seed(0)).tolist() for do_sample in (False, True)]


def streamed_case(name, folder, **kwargs):
    """A draft, a function that loads its target anew in one of two ways, and the texts of the target as it is."""
    target, draft = make_pair(STREAMED[name]())
    target.save_pretrained(folder, **kwargs)

    def load(source, resident=0, buffers=2):
        if source == "disk":
            return sequoia.load_offloaded(folder, torch.float32, "cpu", resident, buffers)
        return sequoia.offload(copy.deepcopy(target), "cpu", resident, buffers)
    return draft, load, both_texts(target, draft)


class Early:
    """A thread that has done each job as soon as it is given: what is overwritten too early is overwritten."""

    def __init__(self, max_workers):
        pass

    def submit(self, function, *arguments):
        result = function(*arguments)
        return SimpleNamespace(result=lambda: result)


class Late:
    """A thread that does nothing before it is waited for: what is used too early is not there."""

    def __init__(self, max_workers):
        self.jobs = []

    def submit(self, function, *arguments):
        job = functools.partial(function, *arguments)
        self.jobs.append(job)

        def result():
            while job in self.jobs:
                self.jobs.pop(0)()
        return SimpleNamespace(result=result)


@pytest.mark.parametrize("source", ["memory", "disk"])
@pytest.mark.parametrize("name", STREAMED)
def test_offloaded_output_equals_resident_output(name, source, tmp_path, monkeypatch):
    """Greedy and sampled, for numbers of streaming layers (5, 3, 1) that the buffers do not divide, and none."""
    draft, load, texts = streamed_case(name, tmp_path)
    for thread in (Early, Late):
        monkeypatch.setattr(sequoia, "ThreadPoolExecutor", thread)
        for resident, buffers in ((0, 2), (2, 2), (4, 3), (5, 2)):
            model = load(source, resident, buffers)
            assert both_texts(model, draft) == texts
            assert hasattr(model, "stream") == (resident < 5) and sequoia.pack(model) is model
            assert model.get_input_embeddings().weight.numel() and (model.device.type, model.dtype) == ("cpu", torch.float32)
    monkeypatch.undo()
    model = load(source)
    assert both_texts(model, draft) == texts
    assert torch.equal(model.generate(prompt_of(30), max_new_tokens=20, do_sample=False), torch.tensor(texts[0]))


def test_two_models_stream_at_once(tmp_path):
    _, load, _ = streamed_case("gpt2", tmp_path)
    target, draft = make_pair(STREAMED["llama"]())
    texts = both_texts(target, draft), both_texts(target, load("memory", 5))
    sequoia.offload(target, "cpu"), sequoia.offload(draft, "cpu", resident=1, buffers=3)
    assert (both_texts(target, draft), both_texts(target, load("disk"))) == texts


@pytest.mark.parametrize("source", ["memory", "disk"])
@torch.no_grad()
def test_after_a_pass_broken_off_the_next_is_right(source, tmp_path):
    """Broken off before, in and after every layer, and while one is waited for."""
    draft, load, _ = streamed_case("llama", tmp_path)
    model, prompt = load(source, buffers=3), prompt_of(30)
    expected = load(source, resident=5)(prompt).logits

    def interrupt(*_):
        raise KeyboardInterrupt
    for layer in model.model.layers:
        for place in (layer, layer.mlp):
            for register in (place.register_forward_pre_hook, place.register_forward_hook):
                with register(interrupt), pytest.raises(KeyboardInterrupt):
                    model(prompt)
                assert torch.equal(model(prompt).logits, expected)
    start = model.stream.copy
    for n in range(12):
        lost = iter([False] * n + [True])

        def losing(i, buffer):
            wait = start(i, buffer)
            return lambda: interrupt() if next(lost, False) else wait()
        model.stream.copy = losing
        with pytest.raises(KeyboardInterrupt):
            for _ in range(5):
                model(prompt)
        assert torch.equal(model(prompt).logits, expected)


@torch.no_grad()
def test_memory_is_bounded_by_the_buffers(tmp_path):
    """All tensors alive in any layer together: what is resident, the buffers, and less than one layer more."""
    model, _ = make_pair(transformers.LlamaConfig(**dict(DEEP, hidden_size=128, intermediate_size=512, num_hidden_layers=8)))
    model.save_pretrained(tmp_path, max_shard_size="2MB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    layer = sum(p.nbytes for p in model.model.layers[0].parameters())
    resident, expected = sum(p.nbytes for p in model.parameters()) - 8 * layer, model(prompt_of(5)).logits
    del model

    def alive():
        storages = [x.untyped_storage() for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.device.type == "cpu"}.values())
    gc.collect()
    before = alive()
    for buffers in (1, 3):
        model, seen = sequoia.load_offloaded(tmp_path, torch.float32, "cpu", buffers=buffers), []
        for module in model.model.layers:
            module.mlp.register_forward_hook(lambda *_: seen.append(alive() - before))
        assert torch.equal(model(prompt_of(5)).logits, expected)
        assert len(seen) == 8 and buffers * layer < max(seen) < resident + (buffers + 1) * layer
        del model
        gc.collect()


@torch.no_grad()
def test_weights_are_found_under_other_names_and_converted(tmp_path):
    """A tied weight by its other name, names without the base model's prefix, another dtype: as transformers loads them."""
    for name, rename in (("gpt2", {"transformer.wte.weight": "lm_head.weight"}), ("gpt2", "transformer."), ("gpt-neox", {})):
        make_pair(STREAMED[name]())[0].bfloat16().save_pretrained(tmp_path)
        tensors, metadata = safetensors.torch.load_file(tmp_path / "model.safetensors"), {"format": "pt"}
        named = {rename.get(key, key) if isinstance(rename, dict) else key.removeprefix(rename): x for key, x in tensors.items()}
        safetensors.torch.save_file(named, tmp_path / "model.safetensors", metadata)
        expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        model = sequoia.load_offloaded(tmp_path, torch.float32, "cpu")
        assert model.generation_config.to_dict() == expected.generation_config.to_dict()
        assert torch.equal(model(prompt_of(30)).logits, expected(prompt_of(30)).logits)
    target, _ = make_pair(STREAMED["llama"]())                       # a configuration that says less than the files hold
    target.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    model = sequoia.load_offloaded(tmp_path, torch.float32, "cpu")
    assert torch.equal(model(prompt_of(30)).logits, target(prompt_of(30)).logits)


def test_weights_changed_since_they_were_loaded_stream_as_they_are_now(tmp_path):
    target, draft = make_pair(STREAMED["llama"]())
    target.save_pretrained(tmp_path)
    target = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)             # maps the file, which does not change
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.mul_(1.1)
    texts = both_texts(target, draft)
    assert both_texts(sequoia.offload(target, "cpu"), draft) == texts


def test_what_streams_must_not_be_shared_with_what_stays():
    target, _ = make_pair(STREAMED["llama"]())
    target.model.norm.weight = target.model.layers[2].input_layernorm.weight
    with pytest.raises(ValueError, match="share"):
        sequoia.offload(target, "cpu")


def test_tied_layers_stream(tmp_path):
    target, draft = make_pair(STREAMED["llama"]())
    target.model.layers[3].mlp.up_proj.weight = target.model.layers[1].mlp.up_proj.weight
    texts = both_texts(target, draft)
    assert both_texts(sequoia.offload(target, "cpu"), draft) == texts


@torch.no_grad()
def test_a_file_that_changes_while_decoding_is_an_error_and_not_a_hang(tmp_path):
    draft, load, texts = streamed_case("llama", tmp_path)
    path, model = tmp_path / "model.safetensors", load("disk")
    content = path.read_bytes()
    for damage, message in ((path.unlink, "model.safetensors"), (lambda: os.truncate(path, len(content) // 2), "cut short")):
        damage()
        for _ in range(2):
            with pytest.raises((ValueError, OSError), match=message):
                both_texts(model, draft)
        path.write_bytes(content)
        assert both_texts(model, draft) == texts


def test_the_command_line_streams_and_reports_a_file_cut_short(capsys, monkeypatch, tmp_path):
    for file in (TINY / "target").iterdir():
        shutil.copy(file, tmp_path)
    arguments = ("--target", str(tmp_path), "--max-new-tokens", "12", "--tree", "16x5", "--json")
    expected = json.loads(run_main(capsys, *arguments)[1])
    offload = ("--offload", "--offload-buffers", "3", "--offload-resident", "1")
    assert json.loads(run_main(capsys, *arguments, *offload)[1])["token_ids"] == expected["token_ids"]
    step, path = sequoia.Decoder.step, next(tmp_path.glob("*.safetensors"))

    def cut(self):
        os.truncate(path, path.stat().st_size // 2)
        return step(self)
    monkeypatch.setattr(sequoia.Decoder, "step", cut)
    for _ in range(2):                                                   # in the midst of decoding, then from the start
        code, out, err = run_main(capsys, *arguments, *offload)
        last = err.strip().splitlines()[-1]
        assert code == 2 and "cut short" in last and last.startswith("sequoia.py: ") and "Traceback" not in err
    code, _, err = run_main(capsys, "--device", "banana", "--offload")
    assert code == 2 and "banana" in err and "Traceback" not in err


def test_what_cannot_be_offloaded_is_an_error(tmp_path):
    target, _ = make_pair(STREAMED["llama"]())
    for arguments, message in ((("banana",), "no device banana"), (("meta",), "cpu or cuda"), (("cpu", -1), "resident"),
                               (("cpu", "all"), "resident"), (("cpu", 0, 0), "buffers")):
        with pytest.raises(ValueError, match=message):
            sequoia.offload(target, *arguments)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no device cuda"):
            sequoia.offload(target, "cuda")
    target.save_pretrained(tmp_path)
    for model in (sequoia.pack(copy.deepcopy(target)), sequoia.offload(copy.deepcopy(target), "cpu")):
        with pytest.raises(ValueError, match="packed or offloaded"):
            sequoia.offload(model, "cpu")
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    lost = tensors.pop("model.layers.2.mlp.up_proj.weight")
    for present in ({}, {"model.layers.2.mlp.up_proj.weight": lost[:-1].clone()}):
        safetensors.torch.save_file({**tensors, **present}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match="model.layers.2.mlp.up_proj.weight"):
            sequoia.load_offloaded(tmp_path, torch.float32, "cpu")
    for damaged in (b"", b"short", b"x" * 1000, (tmp_path / "model.safetensors").read_bytes()[:-1]):
        (tmp_path / "model.safetensors").write_bytes(damaged)
        with pytest.raises(ValueError, match="cut short"):
            sequoia.load_offloaded(tmp_path, torch.float32, "cpu")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(OSError, match="model.safetensors"):
        sequoia.load_offloaded(tmp_path, torch.float32, "cpu")


@pytest.mark.parametrize("error", [0, 2])
def test_without_memory_to_pin_it_falls_back_and_says_so(monkeypatch, error):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *arguments: error))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert sequoia.pin(torch.zeros(8)) == (error == 0)
    assert ["pinned" in str(one.message) for one in warned] == [True] * (error > 0)


def test_growing_by_a_graph_and_the_rest_without_is_the_same_step(llama):
    """As on a GPU where the target streams: a replay fills in what growing returned when it was captured."""
    texts = []
    for by_graph in (False, True):
        decoder = decoder_for(*llama, prompt_of(30))
        decoder.static, decoder.whole, text = True, False, []
        with torch.no_grad():
            decoder.plant(optimal_tree([0.5, 0.2, 0.1], 14, 5))
            if by_graph:
                def captured(run):
                    random, tokens = decoder.generator.get_state(), decoder.tokens.clone()
                    recorded = run()
                    decoder.generator.set_state(random), decoder.tokens.copy_(tokens)

                    def tensors(grown):
                        return [*grown[0], *grown[1], *grown[2]]

                    def replay():
                        for old, new in zip(tensors(recorded), tensors(run())):
                            old.copy_(new)
                        decoder.peaks = None
                        return recorded
                    return replay
                decoder.captured = captured
            while len(text) < 40:
                text += decoder.step().tokens
        texts.append(text[:40])
    assert texts[0] == texts[1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", STREAMED)
def test_offloaded_output_equals_resident_output_on_cuda(name, tmp_path):
    target, draft = make_pair(STREAMED[name]())
    target.save_pretrained(tmp_path)
    target.cuda(), draft.cuda()

    def texts(model):
        return [sequoia.generate(model, draft, prompt_of(30).cuda(), max_new_tokens=40, do_sample=do_sample, tree="9x4",
                                 generator=torch.Generator("cuda").manual_seed(0)).tolist() for do_sample in (False, True)]
    expected = texts(target)
    for resident, buffers in ((0, 2), (1, 3), (0, 1), ("auto", 2)):
        assert texts(sequoia.load_offloaded(tmp_path, torch.float32, "cuda", resident, buffers)) == expected


RANKS = """
import os, sys, sequoia
arguments = sys.argv[1:]
for temperature in ("0", "0.6"):
    assert sequoia.main([*arguments, "--temperature", temperature, "--json"]) == 0
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


def test_two_ranks_take_one_processs_tokens_and_one_that_dies_ends_the_other(capsys):
    """Over gloo; greedy, then sampled by a tree that rank 0 has planned, then with a rank that dies in its third step."""
    pytest.importorskip("accelerate", reason="transformers' tensor parallelism needs it")
    arguments = ("--max-new-tokens", "24", "--dtype", "float32", "--tree", "16x5")
    expected = [json.loads(run_main(capsys, *arguments, "--temperature", t, "--json")[1])["token_ids"] for t in ("0", "0.6")]
    ranks = [subprocess.Popen(
        [sys.executable, "-c", RANKS, *arguments], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        cwd=Path(sequoia.__file__).parent, env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
                                                "MASTER_ADDR": "localhost", "MASTER_PORT": "29731", "OMP_NUM_THREADS": "1"})
        for rank in range(2)]
    (out, err), (silence, _) = (rank.communicate(timeout=120) for rank in ranks)
    texts = [json.loads(line)["token_ids"] for line in out.splitlines() if line.startswith("{")]
    assert texts == expected and silence == ""
    assert [rank.returncode for rank in ranks] == [1, 7]
    assert err.strip().splitlines()[-1].startswith("sequoia.py: rank 0 cannot go on") and "Traceback" not in err


def test_heads_that_ranks_cannot_share_are_an_error(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    with pytest.raises(ValueError, match="4 num_attention_heads, which 3 ranks"):
        sequoia.load_sharded(str(TINY / "target"), torch.float32)


# ----------------------------------------------------------------------------------------------------------------------
# 8  The planner


def test_acceptance_rates_approach_the_true_ones():
    """Counts from trees whose children are accepted by known chances; the error of 20,000 counts is below 0.02, a false alarm
    (5 standard errors) below 1e-6."""
    true, tree, rng = np.array([0.5, 0.2, 0.1]), k_ary(3, 4), np.random.default_rng(0)
    acceptance = sequoia.Acceptance()
    for _ in range(20_000):
        path, node = [], 0
        while tree.children[node] and (rank := rng.choice(4, p=[*true, 1 - true.sum()])) < 3:
            path.append(node := tree.children[node][rank])
        acceptance.count_step(sequoia.Step(tree, [0] * tree.size, path, 0))
    assert np.abs(acceptance.rates()[:3] - true).max() < 0.02
    assert np.abs(acceptance.rates(levels=3)[:2, :3] - true).max() < 0.02


def test_measured_acceptance_equals_the_exact_chance():
    """At k = 1 it is 1 - ||P - Q||_1 / 2; 20,000 positions, five standard errors."""
    P, Q = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.2, 0.5, 0.3])
    acceptance = sequoia.measure_acceptance(P.expand(20_000, 3), Q.expand(20_000, 3), children=2,
                                            generator=torch.Generator().manual_seed(0))
    assert abs(acceptance.rates()[0] - 0.6) < 0.02


def test_the_plan_is_the_best_on_curves_where_it_is_known():
    rates, sizes = [0.8], list(range(1, 65))
    free = sequoia.Latency(sizes, [1.0] * 64, [1], [0.0])                     # nothing costs anything: the largest chain
    assert sequoia.plan(rates, free, max_depth=64).tree == chain(63)
    costly = sequoia.Latency(sizes, [float(n) for n in sizes], [1], [1.0])    # a node costs as much as a step: no tree
    assert sequoia.plan(rates, costly).tree.size == 1 and sequoia.plan(rates, costly).speedup == 1
    rates, c = np.array([0.5, 0.2, 0.1]), 0.1                                 # in between: try all pairs
    latency = sequoia.Latency(sizes, [1 + 0.01 * n for n in sizes], [1], [c])
    table = expected_tokens_table(rates, 64, 12)
    best = max((table[n, d] / (1 + 0.01 * n + (d - 1) * c), n, d) for n in sizes for d in range(1, 13) if table[n, d] > 0)
    chosen = sequoia.plan(rates, latency)
    assert (chosen.tree.size, chosen.speedup) == (best[1], pytest.approx(best[0] * 1.01))


def planner_of(llama, file, counted=0, **kwargs):
    """A planner that has planned for one text, and the text."""
    planner = sequoia.Planner(file, **kwargs)
    text = sequoia.generate(*llama, prompt_of(16), max_new_tokens=40, do_sample=True, planner=planner,
                            generator=torch.Generator().manual_seed(3))
    return planner, text.tolist()


def test_times_are_measured_once_and_kept(llama, tmp_path, monkeypatch):
    first, text = planner_of(llama, tmp_path / "a" / "plan.json")
    monkeypatch.setattr(sequoia, "measure_latency", None)                     # would fail if it were called again
    second, again = planner_of(llama, tmp_path / "a" / "plan.json")
    assert second.latency == first.latency and second.chosen == first.chosen and again == text
    assert os.listdir(tmp_path / "a") == ["plan.json"]                        # nothing half-written is left


@pytest.mark.parametrize("cost, chosen", [(0.0, "traversal"), (0.009, "traversal"), (0.011, "sequoia")])
def test_traversal_is_chosen_where_its_sweep_costs_little(llama, tmp_path, monkeypatch, cost, chosen):
    """On a clock that only its sweep moves, by this many of the seconds that a step takes; then the choice is kept and used."""
    now, sweep, used = [0.0], sequoia.Traversal.sweep, []

    def slow_sweep(*args):
        now[0] += cost
        used.append(1)
        return sweep(*args)
    monkeypatch.setattr(sequoia, "measure_latency", lambda decoder: sequoia.Latency([1, 8], [1.0, 1.0], [1.0], [1e-6]))
    monkeypatch.setattr(sequoia.Decoder, "clock", lambda decoder: now[0])
    monkeypatch.setattr(sequoia.Traversal, "sweep", slow_sweep)
    planner, text = planner_of(llama, tmp_path / "plan.json")
    assert planner.method == chosen
    monkeypatch.setattr(sequoia, "faster_method", None)                       # would fail if it were asked again
    used.clear()
    again, same_text = planner_of(llama, tmp_path / "plan.json")
    assert again.method == chosen and same_text == text and bool(used) == (chosen == "traversal")


def test_a_planner_that_has_seen_greedy_text_may_sample(llama, tmp_path):
    planner = sequoia.Planner(tmp_path / "plan.json")
    for do_sample in (False, True):
        sequoia.generate(*llama, prompt_of(16), max_new_tokens=8, do_sample=do_sample, planner=planner)
    assert planner.method is None                                             # and is Sequoia's then


def test_a_plan_with_other_settings_is_another_file(llama, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for kwargs in (dict(temperature=0.5), dict(temperature=0.7), dict(method="topk"), dict(do_sample=False)):
        sequoia.generate(*llama, prompt_of(16), max_new_tokens=2, **dict(do_sample=True) | kwargs)
    assert len(list((tmp_path / "sequoia").iterdir())) == 4


def spoil(change):
    def spoiled(text):
        kept = json.loads(text)
        change(kept)
        return json.dumps(kept)
    return spoiled


@pytest.mark.parametrize("hazard", [
    lambda text: "", lambda text: text[:100], lambda text: "[]", lambda text: "{}", lambda text: '{"made for": 3}',
    spoil(lambda kept: kept.pop("latency")), spoil(lambda kept: kept["latency"].update(target=[-1.0])),
    spoil(lambda kept: kept["latency"]["target"].pop()), spoil(lambda kept: kept["latency"].update(sizes=[])),
    spoil(lambda kept: kept["latency"]["target"].__setitem__(0, math.nan)), spoil(lambda kept: kept.update(counts=[[1], [2]])),
    spoil(lambda kept: kept["latency"].update(sizes=[3, 2, 1])), spoil(lambda kept: kept["made for"].update(versions=["1.0", "5.0"])),
    spoil(lambda kept: kept["made for"].update(models=["another"])), spoil(lambda kept: kept.pop("method")),
    spoil(lambda kept: kept.update(method="topk"))])
def test_a_file_that_cannot_be_used_is_measured_anew_with_one_warning(llama, tmp_path, hazard, monkeypatch):
    file, known = tmp_path / "plan.json", sequoia.Latency([1, 8], [1.0, 1.1], [1.0, 2.0], [0.1, 0.1])
    monkeypatch.setattr(sequoia, "measure_latency", lambda decoder: known)
    monkeypatch.setattr(sequoia, "faster_method", lambda *_: "traversal")
    planner_of(llama, file)
    good = file.read_text()
    file.write_text(hazard(good))
    with pytest.warns(UserWarning, match="measured anew") as warned:
        planner, _ = planner_of(llama, file)
    assert len(warned) == 1 and "\n" not in str(warned[0].message)
    assert planner.latency == known and json.loads(file.read_text()) == json.loads(good)


def test_a_folder_that_cannot_be_written_is_one_warning(llama, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.warns(UserWarning, match="cannot be kept"):
        planner_of(llama, tmp_path / "file" / "plan.json")


def test_replan_measures_again_and_keeps_what_was_counted(llama, tmp_path, monkeypatch):
    planner_of(llama, tmp_path / "plan.json")
    measured = []
    monkeypatch.setattr(sequoia, "measure_latency", lambda decoder: measured.append(1) or sequoia.Latency([1, 8], [1.0, 1.1], [1.0], [0.1]))
    planner, _ = planner_of(llama, tmp_path / "plan.json", replan=True)
    planner.save()
    kept = json.loads((tmp_path / "plan.json").read_text())
    assert measured == [1] and kept["latency"]["sizes"] == [1, 8] and np.sum(kept["counts"]) > 0
    assert np.array_equal(planner_of(llama, tmp_path / "plan.json", adapt=False)[0].acceptance.tried.shape, planner.acceptance.tried.shape)


def test_a_planner_adapts_to_what_it_sees_unless_told_not_to():
    """A prior that expects much of second children, and a text in which first children go on and on."""
    latency = sequoia.Latency([1, 64], [1.0, 2.0], [1.0, 8.0], [0.02, 0.02])
    for adapt in (True, False):
        planner = sequoia.Planner(adapt=adapt)
        planner.latency, planner.max_branch = latency, 8
        planner.acceptance.prior = np.array([0.1, 0.5, 0.1])
        planner.acceptance.tried, planner.acceptance.accepted = np.zeros((2, 24, 3))
        first = planner.choose()
        for _ in range(200):
            tree = planner.chosen.tree
            path = [node for node in range(1, tree.size) if not any(tree.ranks[i] for i in range(tree.size) if tree.mask[node, i])]
            better = planner.learn(sequoia.Step(tree, [0] * tree.size, path, 0), "auto")
            assert better is None or adapt and better == planner.chosen.tree
        deepest = expected_tokens(planner.chosen.tree, [1.0])
        assert (deepest > expected_tokens(first, [1.0]) + 2) == adapt


# ----------------------------------------------------------------------------------------------------------------------
# 9  decode, behind model.generate


@pytest.mark.parametrize("count", [1, 2, 7, 30])
def test_exactly_max_new_tokens(llama, count):
    for do_sample in (False, True):
        assert sequoia.generate(*llama, prompt_of(10), max_new_tokens=count, do_sample=do_sample, tree="16x5").shape[1] == 10 + count


def test_eos_inside_an_accepted_run_ends_the_text(llama):
    target, draft = llama
    plain = target.generate(prompt_of(10), max_new_tokens=40, do_sample=False)[0]
    for end in set(plain[10:].tolist()):
        expected = target.generate(prompt_of(10), max_new_tokens=40, do_sample=False, eos_token_id=end, pad_token_id=0)
        out = sequoia.generate(target, draft, prompt_of(10), max_new_tokens=40, do_sample=False, tree="16x5", eos_token_id=end,
                               pad_token_id=0)
        assert torch.equal(out, expected)


PROCESSED = [dict(repetition_penalty=1.5), dict(no_repeat_ngram_size=2), dict(min_new_tokens=15, eos_token_id=list(range(2, 40))),
             dict(bad_words_ids=[[5], [7, 9]]), dict(suppress_tokens=list(range(20, 50))), dict(forced_eos_token_id=3),
             dict(begin_suppress_tokens=list(range(30))), dict(sequence_bias=[[[11], 8.0], [[11, 12], 9.0]]),
             dict(exponential_decay_length_penalty=(3, 1.5), eos_token_id=4), dict(encoder_repetition_penalty=1.4),
             dict(prefix_allowed_tokens_fn=lambda i, ids: list(range(2 + len(ids) % 5, 64, 2)))]


@pytest.mark.parametrize("arguments", PROCESSED, ids=lambda arguments: next(iter(arguments)))
def test_every_logits_processor_sees_each_nodes_own_path(llama, arguments):
    target, draft = llama
    arguments = dict(arguments, max_new_tokens=25, do_sample=False, pad_token_id=0)
    out = target.generate(prompt_of(10), custom_generate=sequoia.decode, draft=draft, tree="16x5", **arguments)
    assert torch.equal(out, target.generate(prompt_of(10), **arguments))


@pytest.mark.parametrize("method", ["sequoia", "traversal", "topk"])
def test_a_grammar_is_never_asked_what_it_has_ruled_out(llama, method):
    """Where few tokens are allowed the tree's further children are impossible ones, about which it knows nothing."""
    follows = {5: [6, 7], 6: [7], 7: [5, 8, 9], 8: [5], 9: [9, 5]}
    def grammar(i, ids):
        return [5] if len(ids) == 10 else follows[int(ids[-1])]         # a KeyError for all else
    arguments = dict(max_new_tokens=30, prefix_allowed_tokens_fn=grammar)
    expected = llama[0].generate(prompt_of(10), do_sample=False, **arguments)
    assert torch.equal(sequoia.generate(*llama, prompt_of(10), do_sample=False, tree="kary:3x4", **arguments), expected)
    text = sequoia.generate(*llama, prompt_of(10), do_sample=True, tree="kary:3x4", method=method, **arguments)[0, 10:].tolist()
    assert text[0] == 5 and all(after in follows[before] for before, after in pairwise(text))


def test_without_a_draft_it_decodes_plainly(llama):
    planner = sequoia.Planner()
    for draft in (None, llama[1], None):
        out = sequoia.generate(llama[0], draft, prompt_of(10), max_new_tokens=20, do_sample=False, planner=planner)
        assert torch.equal(out, llama[0].generate(prompt_of(10), max_new_tokens=20, do_sample=False))
        planner.due = 0                                                  # plans again at the next step, if it may


def test_drop_in_for_generate(llama):
    target, draft = llama
    arguments = dict(max_new_tokens=20, custom_generate=sequoia.decode, draft=draft, tree="9x4")
    out = target.generate(prompt_of(10), do_sample=True, num_return_sequences=3, **arguments)
    assert out.shape == (3, 30) and len(set(map(tuple, out.tolist()))) > 1
    out += 1                                         # an ordinary tensor, though it was made in inference mode
    out = target.generate(prompt_of(10), do_sample=False, return_dict_in_generate=True, **arguments)
    assert torch.equal(out.sequences, target.generate(prompt_of(10), do_sample=False, max_new_tokens=20))
    class UntilLength(transformers.StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((len(input_ids),), input_ids.shape[1] >= 17)
    out = target.generate(prompt_of(10), do_sample=False, stopping_criteria=[UntilLength()], **arguments)
    assert out.shape == (1, 17)


def test_left_padded_batch_equals_generate(llama):
    target, draft = llama
    rows = [prompt_of(length, seed=length)[0].tolist() for length in (5, 9, 12)]
    ids = torch.tensor([[0] * (12 - len(row)) + row for row in rows])
    inputs = dict(input_ids=ids, attention_mask=torch.tensor([[0] * (12 - len(row)) + [1] * len(row) for row in rows]))
    for arguments in (dict(), dict(eos_token_id=list(range(2, 12))), dict(repetition_penalty=1.3)):
        arguments.update(max_new_tokens=20, do_sample=False, pad_token_id=0)
        out = target.generate(**inputs, custom_generate=sequoia.decode, draft=draft, tree="9x4", **arguments)
        assert torch.equal(out, target.generate(**inputs, **arguments))


class Collector(transformers.generation.BaseStreamer):
    def __init__(self):
        self.values, self.ended = [], False

    def put(self, value):
        self.values.append(value.flatten().tolist())

    def end(self):
        self.ended = True


def test_streamer_gets_what_generate_gives_it(llama):
    target, draft = llama
    ours, theirs = Collector(), Collector()
    sequoia.generate(target, draft, prompt_of(10), max_new_tokens=12, do_sample=False, tree="9x4", streamer=ours)
    target.generate(prompt_of(10), max_new_tokens=12, do_sample=False, streamer=theirs)
    assert ours.values == theirs.values and ours.ended


def test_stop_string_inside_an_accepted_run_ends_the_text():
    target, draft = (transformers.AutoModelForCausalLM.from_pretrained(TINY / name, dtype=torch.float32).eval()
                     for name in ("target", "draft"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY / "target")
    ids = tokenizer("import os\n\ndef main(", return_tensors="pt")["input_ids"]
    arguments = dict(max_new_tokens=40, do_sample=False, tokenizer=tokenizer, stop_strings=["\n"], pad_token_id=0)
    out = sequoia.generate(target, draft, ids, tree="16x5", **arguments)
    assert torch.equal(out, target.generate(ids, **arguments)) and out.shape[1] < ids.shape[1] + 40


def test_what_cannot_be_decoded_is_a_clear_error(llama):
    target, draft = llama
    for arguments, message in ((dict(num_beams=2), "num_beams"), (dict(output_scores=True, return_dict_in_generate=True), "output_scores"),
                               (dict(tree="12"), "SIZExDEPTH"), (dict(tree="kary:0x2"), "kary"), (dict(tree="9x"), "SIZExDEPTH"), (dict(tree="x:auto"), "SIZExDEPTH"),
                               (dict(tree="100x2"), "largest"), (dict(method="magic"), "magic"), (dict(tree="kary:65x2"), "64 tokens")):
        with pytest.raises(ValueError, match=message):
            sequoia.generate(target, draft, prompt_of(10), max_new_tokens=5, do_sample=True, **arguments)
    for tree in ("kary:2x3", "9x4"):
        with pytest.raises(ValueError, match="needs a draft"):
            sequoia.generate(target, None, prompt_of(10), max_new_tokens=5, tree=tree)
    with pytest.raises(ValueError, match="context only 256"):
        sequoia.generate(target, draft, prompt_of(257), max_new_tokens=5)


def test_a_text_up_to_the_end_of_the_context():
    """GPT-2 has no embedding beyond its last position: the tree's deeper nodes must not ask for one."""
    target, draft = make_pair(ARCHITECTURES["gpt2"]())
    expected = target.generate(prompt_of(200), max_length=256, do_sample=False)
    assert torch.equal(sequoia.generate(target, draft, prompt_of(200), max_length=256, do_sample=False, tree="9x6"), expected)


# ----------------------------------------------------------------------------------------------------------------------
# 10  The command line


def run_main(capsys, *arguments):
    code = sequoia.main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_json_is_one_object_and_nothing_else(capsys):
    code, out, err = run_main(capsys, "--json", "--max-new-tokens", "20", "--tree", "16x5")
    result = json.loads(out)
    assert code == 0 and result["new_tokens"] == len(result["token_ids"]) == 20 and result["tree"]["size"] == 16
    assert set(result) >= {"text", "steps", "tokens_per_step", "seconds", "tokens_per_second", "acceptance_rates", "method",
                           "temperature", "seed", "device", "dtype"}
    tree = Tree.from_paths(result["tree"]["paths"])
    assert (tree.size, tree.depth) == (result["tree"]["size"], result["tree"]["depth"])


def test_the_command_line_gives_the_same_text_twice(capsys):
    first, second = (json.loads(run_main(capsys, "--json", "--max-new-tokens", "60")[1]) for _ in range(2))
    assert first["text"] == second["text"] and first["tree"] == second["tree"]
    assert second["planning_seconds"] == 0


def test_plan_shows_the_curves_and_keeps_the_plan(capsys, tmp_path):
    arguments = ("--max-new-tokens", "20", "--plan", str(tmp_path / "plan.json"))
    code, out, _ = run_main(capsys, "plan", *arguments)
    assert code == 0 and "tokens in a pass" in out and "acceptance" in out and "kept in" in out
    code, out, _ = run_main(capsys, "plan", "--json", *arguments)
    result, kept = json.loads(out), json.loads((tmp_path / "plan.json").read_text())
    assert code == 0 and result["latency"] == kept["latency"] and np.sum(kept["counts"]) > 0
    assert Tree.from_paths(result["paths"]).size == result["size"]


def test_comparison_reports_all_speeds(capsys):
    code, out, _ = run_main(capsys, "--json", "--max-new-tokens", "10", "--tree", "8x4", "--compare", "--dtype", "float32")
    result = json.loads(out)
    assert code == 0 and result["greedy_identical"] is True
    for name in ("generate", "assisted", "plain"):
        assert result[name]["tokens_per_second"] > 0 and result["speedup_over_" + name] > 0


def test_printed_text_is_the_text_and_the_tree_is_drawn(capsys):
    arguments = ("--max-new-tokens", "20", "--tree", "8x4", "--prompt", "import ")
    text = json.loads(run_main(capsys, *arguments, "--json")[1])["text"]
    code, out, _ = run_main(capsys, *arguments)
    assert code == 0 and out.startswith("import " + text) and "tokens a step" in out and "\033" not in out
    assert "─" in run_main(capsys, *arguments, "--show-tree")[1]


@pytest.mark.parametrize("arguments, message", [
    (["--target", "./nowhere"], "no folder"), (["--temperature", "-1"], "temperature"), (["--tree", "banana"], "SIZExDEPTH"),
    (["--prompt", ""], "empty"), (["--prompt", "@nowhere.txt"], "nowhere.txt"), (["--prompt", "x = 1\n" * 2000], "context"),
    (["--chat"], "chat template"), (["--top-p", "2"], "top-p"), (["--max-new-tokens", "0"], "max-new-tokens")])
def test_bad_input_is_one_line_and_exit_code_2(capsys, arguments, message):
    code, out, err = run_main(capsys, *arguments)
    last = err.strip().splitlines()[-1]
    assert code == 2 and message in last and last.startswith("sequoia.py: ") and "Traceback" not in err


def test_different_tokenizers_are_an_error_that_names_both(capsys, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY / "draft")
    tokenizer.add_tokens(["<|other|>"])
    tokenizer.save_pretrained(tmp_path)
    code, _, err = run_main(capsys, "--draft", str(tmp_path))
    assert code == 2 and str(tmp_path) in err and "tiny" in err


def test_ctrl_c_prints_what_there_is_and_exits_130(capsys, monkeypatch):
    step, calls = sequoia.Decoder.step, []
    def interrupted(self):
        calls.append(1)
        if len(calls) > 3:
            raise KeyboardInterrupt
        return step(self)
    monkeypatch.setattr(sequoia.Decoder, "step", interrupted)
    code, out, _ = run_main(capsys, "--tree", "8x4")
    assert code == 130 and "in 3 steps" in out


def test_importing_is_silent():
    code = "import sys, sequoia; assert 'matplotlib' not in sys.modules and 'scipy' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(sequoia.__file__).parent)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_readme_examples_run(monkeypatch):
    """Every Python block of the README, in order, in one namespace; and the tree that it shows is the one it says."""
    root = Path(sequoia.__file__).parent
    monkeypatch.chdir(root)
    text = (root / "README.md").read_text(encoding="utf-8")
    namespace, blocks = {}, re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 4 and f"```\n{optimal_tree([0.6, 0.2, 0.1], size=16, depth=6)}\n```" in text
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    assert abs(float((namespace["token"] == 0).float().mean()) - 0.7) < 0.01                            # P of the README


def test_the_readmes_exercises_name_tests_and_code_that_exist():
    root = Path(sequoia.__file__).parent
    text = (root / "README.md").read_text(encoding="utf-8")
    tests, code = (root / "test_sequoia.py").read_text(encoding="utf-8"), (root / "sequoia.py").read_text(encoding="utf-8")
    named = re.findall(r"`(test_\w+)`", text)
    assert len(named) >= 6 and all(f"def {name}(" in tests for name in named)
    exercises = text.split("## Six exercises")[1].split("\n## ")[0]
    assert len(re.findall(r"^\d\. ", exercises, re.MULTILINE)) == 6
    for name in re.findall(r"`(_?[a-z]\w+)`", exercises):
        assert name in code or name in tests, name


def test_help_names_every_method_and_tree(capsys):
    with pytest.raises(SystemExit):
        sequoia.main(["--help"])
    text = capsys.readouterr().out
    assert all(word in text for word in (*METHODS, "SIZExDEPTH", "sequences:KxL", "kary:KxD", "--compare", "--explain"))
    assert len(text.splitlines()) <= 80
