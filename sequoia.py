"""Sequoia: tree speculative decoding, lossless, in one file.

A small draft model proposes a tree of tokens, the target model scores the whole tree in one forward pass, and a
verification rule keeps a path of it, so that every token has exactly the target's distribution. A memory-bound target
reads its weights once a step, whether it scores one token or sixty-four: the tokens accepted per step are the speedup.

This is the method of "Sequoia: Scalable and Robust Speculative Decoding" (NeurIPS 2024, arXiv 2402.12374):

    paper            here                         where
    T                Tree, tree                   section 3.1, a token tree; the root is the last token of the text
    P[k], p_k        acceptance_rates[k - 1]      Definition 3.2, the chance that the k-th child is accepted
    F(T)             expected_tokens              Proposition 3.4
    T[n, d, b]       the dynamic program          equation 1, and the appendix for bounded depth d
    P, Q             target_probs, draft_probs    Algorithm 2, the distributions after one text
    R, D             residual, draft              Algorithm 2, what is left of P and Q after rejections
    t(n), c          Latency                      section 4, seconds of a target pass over n tokens, of a draft pass

Left out: training drafts, batched serving (a batch is decoded row by row), recurrent and encoder-decoder models.

    python sequoia.py                                            # decodes with the bundled pair
    target.generate(**inputs, custom_generate=sequoia.decode, draft=draft)     # in your own code
"""
import argparse
import functools
import inspect
import json
import os
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers import StoppingCriteriaList, StopStringCriteria
from transformers.cache_utils import Cache, StaticLayer
from transformers.generation import (GenerateDecoderOnlyOutput, MinPLogitsWarper, TemperatureLogitsWarper,
                                     TopKLogitsWarper, TopPLogitsWarper)


# ----------------------------------------------------------------------------------------------------------------------
# 1  Token trees (section 3.1)


@dataclass(frozen=True)
class Tree:
    """The shape of a token tree: for each node, the index of its parent.

    Nodes stand in level order: the root first (its parent is -1), every parent before its children, siblings together
    in rank order (the draft's first choice first). So the parents never decrease, and one tuple says everything:

    >>> print(Tree([-1, 0, 0, 0, 1, 1, 4]))
    0─┬─1─┬─4──6
      │   └─5
      ├─2
      └─3
    """
    parents: tuple[int, ...]

    def __post_init__(self):
        parents = tuple(int(parent) for parent in self.parents)
        object.__setattr__(self, "parents", parents)
        if not parents or parents[0] != -1:
            raise ValueError(f"a tree starts with its root, whose parent is -1; got parents {parents[:8]}")
        for node in range(1, len(parents)):
            if not max(0, parents[node - 1]) <= parents[node] < node:
                raise ValueError(f"nodes must be in level order: the parent of node {node} must be at least node "
                                 f"{node - 1}'s and below {node}; got {parents[node]} after {parents[node - 1]}")

    @classmethod
    def from_paths(cls, paths) -> "Tree":
        """The tree with these nodes, each given by the ranks from the root down: (0,), (1,), (0, 0) are the root's first
        two children and the first one's first child. The root itself, (), may be left out. This is how Medusa and others
        publish their trees."""
        nodes = sorted({tuple(path) for path in paths} | {()}, key=lambda path: (len(path), path))
        index = {path: i for i, path in enumerate(nodes)}
        for path in nodes[1:]:
            needed = path[:-1] + (path[-1] - 1,) if path[-1] else path[:-1]
            if needed not in index:
                raise ValueError(f"path {path} needs {needed}: its parent and its elder siblings must be in the tree")
        return cls(tuple(index[path[:-1]] if path else -1 for path in nodes))

    def paths(self) -> list[tuple[int, ...]]:
        """Every node but the root as its ranks from the root down, in level order; the inverse of `from_paths`."""
        paths = [()]
        for node in range(1, self.size):
            paths.append(paths[self.parents[node]] + (self.ranks[node],))
        return paths[1:]

    @property
    def size(self) -> int:
        """The number of nodes, the root included."""
        return len(self.parents)

    @property
    def depth(self) -> int:
        """The number of levels, the root's included."""
        return self.depths[-1] + 1

    @functools.cached_property
    def depths(self) -> tuple[int, ...]:
        """The level of each node; the root is on level 0."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @functools.cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """The children of each node, in rank order."""
        children = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], 1):
            children[parent].append(node)
        return tuple(map(tuple, children))

    @functools.cached_property
    def ranks(self) -> tuple[int, ...]:
        """The position of each node among its siblings, from 0; the root's is 0."""
        return (0,) + tuple(node - self.children[parent][0] for node, parent in enumerate(self.parents[1:], 1))

    @functools.cached_property
    def mask(self) -> Tensor:
        """Who may attend to whom, (size, size) bool: mask[i, j] where j is i or an ancestor of i."""
        mask = torch.eye(self.size, dtype=torch.bool)
        for node, parent in enumerate(self.parents[1:], 1):
            mask[node] |= mask[parent]
        return mask

    def draw(self, labels) -> str:
        """The tree as text, one line for each leaf, its nodes shown by these labels."""
        lines = []
        def visit(node, line, indent):
            line, indent = line + labels[node], indent + " " * len(labels[node])
            *elder, youngest = self.children[node] or [None]
            if youngest is None:
                lines.append(line)
            elif not elder:
                visit(youngest, line + "──", indent + "  ")
            else:
                for i, child in enumerate(elder):
                    visit(child, line + "─┬─" if i == 0 else indent + " ├─", indent + " │ ")
                visit(youngest, indent + " └─", indent + "   ")
        visit(0, "", "")
        return "\n".join(lines)

    def __str__(self):
        return self.draw([str(node) for node in range(self.size)])


def chain(length: int) -> Tree:
    """The root and one sequence of `length` tokens: plain speculative decoding."""
    return sequences(1, length)


def sequences(k: int, length: int) -> Tree:
    """The root and `k` separate sequences of `length` tokens, SpecInfer's tree: 5x8 has 41 nodes."""
    _at_least_one(k=k, length=length)
    return Tree((-1,) + (0,) * k + tuple(range(1, k * (length - 1) + 1)))


def k_ary(k: int, depth: int) -> Tree:
    """The full tree of `depth` levels in which every node above the last has `k` children, Medusa's tree."""
    _at_least_one(k=k, depth=depth)
    inner = sum(k**level for level in range(depth - 1))
    return Tree((-1,) + tuple(node // k for node in range(inner * k)))


def _at_least_one(**values):
    for name, value in values.items():
        if value != int(value) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value}")


# ----------------------------------------------------------------------------------------------------------------------
# 2  Tree construction: the dynamic program (section 3.1, equation 1; appendix, bounded depth and 2-D rates)


def expected_tokens(tree: Tree, acceptance_rates) -> float:
    """F(T), the tokens that verifying the tree yields on average: the sum over its nodes of the product of the acceptance
    rates on the way there (Proposition 3.4). A child beyond the last rate is never accepted. Rates as in `optimal_tree`."""
    rates = _check_rates(acceptance_rates)
    rates = np.pad(rates, ((0, 0), (0, max(0, tree.size - rates.shape[1]))))
    score = [1.0]
    for node, parent in enumerate(tree.parents[1:], 1):
        level = min(tree.depths[parent], len(rates) - 1)
        score.append(score[parent] * rates[level, tree.ranks[node]])
    return float(sum(score))


def expected_tokens_table(acceptance_rates, size: int, depth: int, max_branch: int | None = None) -> np.ndarray:
    """G(n, d), the expected tokens of the best tree of exactly n nodes on at most d levels, for every n and d at once:
    (size + 1, depth + 1) float64, -inf where there is no such tree. Arguments as in `optimal_tree`."""
    program = _DynamicProgram(acceptance_rates, size, depth, max_branch)
    return np.stack([program.best(0, levels).value for levels in range(depth + 1)], axis=1)


def optimal_tree(acceptance_rates, size: int, depth: int | None = None, max_branch: int | None = None) -> Tree:
    """The tree of exactly `size` nodes, on at most `depth` levels and with at most `max_branch` children a node, with the
    most expected tokens.

    acceptance_rates: (ranks,), the chance that a node's first, second, ... child is accepted; or (levels, ranks), rates[d]
    for the children of a node on level d, the last row holding for all deeper levels. They need not decrease.
    Raises ValueError for rates that are no probabilities and for a size that no such tree can have.

    >>> optimal_tree([0.6, 0.2, 0.1], size=5).paths()
    [(0,), (1,), (0, 0), (0, 0, 0)]
    """
    _at_least_one(size=size)
    program = _DynamicProgram(acceptance_rates, size, depth, max_branch)
    depth = depth or program.levels_that_matter()
    parents, queue = [-1], deque([(0, 0, size)])                     # (node, its level, the size of its subtree)
    while queue:
        node, level, n = queue.popleft()
        subtrees = program.best(level, depth - level).split(n)
        queue.extend((len(parents) + i, level + 1, m) for i, m in enumerate(subtrees))
        parents.extend([node] * len(subtrees))
    return Tree(parents)


class _DynamicProgram:
    """Best subtrees by the level of their root and the levels they may have, each solved once."""

    def __init__(self, acceptance_rates, size, depth, max_branch):
        _at_least_one(size=size, depth=1 if depth is None else depth, max_branch=1 if max_branch is None else max_branch)
        self.rates, self.size, self.solved = _check_rates(acceptance_rates)[:, :max_branch], size, {}
        branch, largest = self.rates.shape[1], size if depth is None else 1
        for _ in range(1, depth or 1):
            largest = min(largest * branch + 1, size)
        if largest < size or branch == 0 and size > 1:
            raise ValueError(f"no tree of {size} nodes has {depth} levels and at most {branch} children a node (one child "
                             f"for each rate, up to max_branch): the largest has {largest if branch else 1}")

    def best(self, level: int, depth: int) -> "_Subtrees":
        """The best subtrees of every size, rooted on `level`, with at most `depth` levels."""
        level = min(level, len(self.rates) - 1)
        if (level, depth) not in self.solved:
            for lower in range(1, depth - (len(self.rates) - 1 - level)):      # the shared last row first, bottom up: a
                self.best(len(self.rates) - 1, lower)                          # chain of 4,096 levels needs no recursion
            self.solved[level, depth] = _Subtrees(self.rates[level], self.size, depth and self.best(level + 1, depth - 1))
        return self.solved[level, depth]

    def levels_that_matter(self) -> int:
        """The depth beyond which no tree of up to this size gets better: an unbounded depth needs no more levels."""
        last, levels = len(self.rates) - 1, 1
        while levels < self.size and not np.array_equal(self.best(last, levels).value, self.best(last, levels + 1).value):
            levels += 1
        return last + levels


class _Subtrees:
    """T(n, b) for one level: the best trees of n nodes whose root has b children, from `below`, the best subtrees that can
    hang from it. With P the level's acceptance rates and G the values below, the recursion is one max-plus convolution

        T(n, b) = max over m of  T(n - m, b - 1) + P[b] G(m)                                  (equation 1)

    for each child b, which gets m nodes; without levels (`below` is 0) there is no tree, with one level only the root."""

    def __init__(self, rates, size, below):
        root = np.full(size + 1, -np.inf)
        root[1:2] = 1.0 if below != 0 else -np.inf
        by_branch, self.given = [root], []                                        # T(., b), and the maximising m
        if below and below.value[1:].max(initial=-np.inf) > 0:
            for rate in rates:
                gain = np.where(np.isneginf(below.value), -np.inf, rate * np.maximum(below.value, 0))
                value, given = _max_plus(by_branch[-1], gain)
                by_branch.append(value)
                self.given.append(given)
        self.value = np.max(by_branch, axis=0)                                                       # G(n), (size + 1,)
        self.branch = np.argmax(by_branch, axis=0)

    def split(self, n: int) -> list[int]:
        """The sizes of the children's subtrees in the best tree of n nodes, in rank order."""
        sizes = []
        for given in reversed(self.given[: self.branch[n]]):
            sizes.append(int(given[n]))
            n -= sizes[-1]
        return sizes[::-1]


def _max_plus(a: np.ndarray, b: np.ndarray, block: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """c[n] = max over m of a[n - m] + b[m], and the m that attains it. In blocks of n that stay in the processor's cache."""
    size = len(a)
    c, best = np.empty(size), np.empty(size, dtype=np.int16 if size < 2**15 else np.int32)
    shifted = np.concatenate([np.full(size, -np.inf), a])
    for start in range(0, size, block):
        stop = min(start + block, size)
        rows = np.lib.stride_tricks.sliding_window_view(shifted[start + size - stop + 1: stop + size], stop)  # [i, j]:
        sums = rows + b[stop - 1::-1]                                             # a[start + i - m], m = stop - 1 - j
        j = sums.argmax(axis=1)
        best[start:stop] = stop - 1 - j
        c[start:stop] = sums[np.arange(stop - start), j]
    return c, best


def _check_rates(acceptance_rates) -> np.ndarray:
    rates = np.asarray(acceptance_rates, dtype=np.float64)
    if rates.ndim not in (1, 2) or rates.size == 0 and rates.ndim == 2:
        raise ValueError(f"acceptance_rates must have shape (ranks,) or (levels, ranks), got {rates.shape}")
    if not np.isfinite(rates).all() or (rates < 0).any() or (rates > 1).any():
        raise ValueError("acceptance_rates must be finite and in [0, 1]: the chance that the k-th child is accepted")
    if (total := rates.sum(axis=-1).max()) > 1 + 1e-6:
        raise ValueError(f"the acceptance_rates of one level sum to {total:.4f}; at most one child is accepted, so at most 1")
    return np.atleast_2d(rates)


# ----------------------------------------------------------------------------------------------------------------------
# 3  Sampling (section 3.2, Algorithm 2 line 5)


def sample_without_replacement(probs: Tensor, k: int, generator: torch.Generator | None = None) -> Tensor:
    """k different tokens, (..., V) -> (..., k): the first drawn from `probs`, each next one from what is left of it,
    renormalised; once its mass is used up, uniformly from the tokens not yet drawn.

    With E exponential noise, sorting p / E draws all k at once: token i comes first with probability p_i. Tokens of
    probability 0 come last, in the order of their noise: subtle, since without it they would come in the order of their
    index, which is not the uniform draw that `verify` accounts for."""
    noise = torch.empty_like(probs).exponential_(generator=generator)
    return torch.where(probs > 0, probs / noise, -noise).topk(k).indices


def sample_with_replacement(probs: Tensor, k: int, generator: torch.Generator | None = None) -> Tensor:
    """k independent tokens, (..., V) -> (..., k)."""
    rows = probs.reshape(-1, probs.shape[-1])
    return torch.multinomial(rows, k, replacement=True, generator=generator).reshape(*probs.shape[:-1], k)


def most_likely(probs: Tensor, k: int, generator: torch.Generator | None = None) -> Tensor:
    """The k most likely tokens, (..., V) -> (..., k): what sampling without replacement becomes at temperature 0."""
    return probs.topk(k).indices


def sample(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One token of each row, (..., V) -> (...)."""
    return sample_without_replacement(probs, 1, generator)[..., 0]


# ----------------------------------------------------------------------------------------------------------------------
# 4  Verification of a node's children (sections 2.2 and 3.2, Algorithm 2)
#
# All methods share one scheme: the children are tried in turn, child i is accepted if noise_i < ratio_i, and if none is, the
# token is drawn from the residual. They differ in the ratios and in the residual, so that is what each of them computes:
#
#     ratios(target_probs (rows, V), draft_probs (rows, V), tokens (rows, k), with_child, noise) -> (rows, k), (rows, V)
#
# Rows may have different numbers of children if those with more come first: `with_child[i]` says how many leading rows have a
# child of rank i; tokens that do not exist are -1 and their ratio is 0. The tree fixes all shapes, so a CUDA graph can hold
# the whole of it. On a CPU the loop ends once the noise says that every row has accepted.


def _ratios_in_turn(target_probs, draft_probs, tokens, with_child, noise, replacement):
    """Algorithm 2, whose blue lines (a rejected token leaves the draft) are those under `if not replacement`."""
    residual, draft, untried = target_probs.clone(), draft_probs.clone(), torch.ones_like(draft_probs)
    ratios = torch.zeros(tokens.shape, dtype=residual.dtype, device=residual.device)
    for i, n in enumerate(with_child):
        token, R, D = tokens[:n, i : i + 1], residual[:n], draft[:n]                             # (n, 1), (n, V), (n, V)
        p, q = R.gather(1, token), D.gather(1, token)
        ratios[:n, i : i + 1] = torch.where(p > 0, p / q, 0)                                     # R[s] / D[s]
        if noise is not None and noise.device.type == "cpu" and (noise < ratios).any(dim=1).all():
            break
        residual[:n] = _normalise((R - D).clamp(min=0), otherwise=R)                             # R <- norm(max(R - D, 0))
        if not replacement:
            untried[:n].scatter_(1, token, 0)
            draft[:n] = _normalise(D.scatter(1, token, 0), otherwise=_normalise(untried[:n], otherwise=D))
    return ratios, residual


def _normalise(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Rows scaled to sum 1, (rows, V); the row of `otherwise` where all weights are 0."""
    total = weights.sum(dim=1, keepdim=True)
    return torch.where(total > 0, weights / total, otherwise)


def _ratios_of_spectr(target_probs, draft_probs, tokens, with_child, noise):
    """k-sequential selection (SpecTr, arXiv 2310.15141, Algorithm 3): every child's ratio is P / (rho Q), with the smallest
    division factor rho, between 1 and k, for which the residual is nowhere negative."""
    P, Q, k = target_probs, draft_probs, (tokens >= 0).sum(dim=1, keepdim=True).clamp(min=1)     # k: (rows, 1)
    def tries(beta):                       # the children tried on average, (1 - (1 - beta)^k) / beta, beta one's chance
        return torch.where(beta > 1e-6, (1 - (1 - beta).clamp(min=0) ** k) / beta, k.to(P.dtype))
    low, high = torch.ones_like(k, dtype=P.dtype), k.to(P.dtype)
    for _ in range(50 if P.dtype == torch.float64 else 25):
        rho = (low + high) / 2
        enough = tries(torch.minimum(P / rho, Q).sum(dim=1, keepdim=True)) <= rho
        low, high = torch.where(enough, low, rho), torch.where(enough, rho, high)
    taken = torch.minimum(P / high, Q)
    residual = _normalise((P - tries(taken.sum(dim=1, keepdim=True)) * taken).clamp(min=0), otherwise=P)
    p, q = P.gather(1, tokens.clamp(min=0)), Q.gather(1, tokens.clamp(min=0))
    return torch.where((tokens >= 0) & (p > 0), p / (high * q), 0), residual


def _ratios_of_naive(target_probs, draft_probs, tokens, with_child, noise):
    """The target's own sample, accepted where it is among the children: each child's ratio is its share of what the
    children before it, and those that repeat it, left over."""
    exists = (tokens >= 0) & ~(tokens[:, :, None] == tokens[:, None, :]).tril(-1).any(dim=2)
    p = torch.where(exists, target_probs.gather(1, tokens.clamp(min=0)), 0)
    residual = target_probs.scatter_add(1, tokens.clamp(min=0), -p).clamp(min=0)
    left = p.flip(1).cumsum(dim=1).flip(1) + residual.sum(dim=1, keepdim=True)
    return torch.where(p > 0, p / left, 0), _normalise(residual, otherwise=target_probs)


@dataclass(frozen=True)
class Method:
    """How a node's children are drawn, and how they are verified: losslessly for what is drawn that way."""
    propose: Callable
    ratios: Callable

    def verify(self, target_probs, draft_probs, tokens, generator=None, with_child=None):
        """Which child is accepted, if any, and which token follows: target_probs, draft_probs (..., V), tokens (..., k) ->
        rank (...), -1 for none, and token (...). Over proposals and noise the token is distributed as target_probs."""
        shape, rows = tokens.shape[:-1], [x.reshape(-1, x.shape[-1]) for x in (target_probs, draft_probs, tokens)]
        target_probs, draft_probs, tokens = rows
        noise = torch.rand(tokens.shape, generator=generator, dtype=target_probs.dtype, device=tokens.device)
        with_child = with_child or [len(tokens)] * tokens.shape[1]
        ratios, residual = self.ratios(target_probs, draft_probs, tokens, with_child, noise)
        accepted = noise < ratios                                                                # (rows, k)
        rank = torch.where(accepted.any(dim=1), accepted.to(torch.uint8).argmax(dim=1), -1)
        token = torch.where(rank >= 0, tokens.gather(1, rank.clamp(min=0)[:, None])[:, 0], sample(residual, generator))
        return rank.reshape(shape), token.reshape(shape)


METHODS = {
    "sequoia": Method(sample_without_replacement, functools.partial(_ratios_in_turn, replacement=False)),
    "specinfer": Method(sample_with_replacement, functools.partial(_ratios_in_turn, replacement=True)),
    "spectr": Method(sample_with_replacement, _ratios_of_spectr),
    "naive": Method(sample_with_replacement, _ratios_of_naive),
    "topk": Method(most_likely, _ratios_of_naive),
}


def find_method(name: str) -> Method:
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; there are {', '.join(METHODS)}")
    return METHODS[name]


def sample_and_verify(target_probs: Tensor, draft_probs: Tensor, k: int, method: str = "sequoia",
                      generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Proposes k children from draft_probs and verifies them against target_probs, for every row of a batch.

    target_probs, draft_probs: (..., V), rows that sum to 1. Returns (rank, token), (...) each: the accepted child's rank, -1
    where none was accepted, and the token put out, which is distributed exactly as target_probs. Raises ValueError for
    negative or NaN probabilities, rows that do not sum to 1, shapes that differ, k outside 1 .. V, an unknown method.

    >>> P, Q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.2, 0.5, 0.3])
    >>> rank, token = sample_and_verify(P.expand(100_000, 3), Q.expand(100_000, 3), k=2)
    >>> bool(((token.bincount() / 100_000 - P).abs() < 0.01).all())
    True
    """
    if target_probs.shape != draft_probs.shape or target_probs.ndim < 1:
        raise ValueError(f"target_probs {tuple(target_probs.shape)} and draft_probs {tuple(draft_probs.shape)} must have "
                         f"one shape, (..., V)")
    for name, probs in (("target_probs", target_probs), ("draft_probs", draft_probs)):
        if not (probs >= 0).all() or not ((probs.sum(dim=-1) - 1).abs() < 1e-3).all():
            raise ValueError(f"{name} must be probabilities: no NaN, none negative, every row summing to 1")
    if not 1 <= k <= target_probs.shape[-1]:
        raise ValueError(f"k must be from 1 to the vocabulary's size {target_probs.shape[-1]}, got {k}")
    chosen = find_method(method)
    return chosen.verify(target_probs, draft_probs, chosen.propose(draft_probs, k, generator), generator)
