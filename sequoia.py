"""Sequoia: tree speculative decoding, lossless, in one file.

A small draft model proposes a tree of tokens, the target model scores the whole tree in one forward pass, and a
verification rule keeps a path of it, so that every token has exactly the target's distribution. A memory-bound target
reads its weights once a step, whether it scores one token or sixty-four: the tokens accepted per step are the speedup.

This is the method of "Sequoia: Scalable and Robust Speculative Decoding" (NeurIPS 2024, arXiv 2402.12374):

    paper            here                         where
    T                Tree, tree                   section 3.1, a token tree; the root is the last token of the text
    P[k], p_k        acceptance_rates[k - 1]      Definition 3.2, the chance that the k-th child is accepted
    F(T)             expected_tokens              Proposition 3.4
    T[n, d, b]       T(n, b) in _Subtrees         equation 1, and the appendix for bounded depth d; over all b, G(n, d)
    P, Q             target_probs, draft_probs    Algorithm 2, the distributions after one text
    R, D             residual, D                  Algorithm 2, what is left of P and Q after rejections
    t(n), c          Latency                      section 4, seconds of a step of n nodes less its draft passes, of one pass

Left out: training drafts, batched serving (a batch is decoded row by row), recurrent and encoder-decoder models.

    python sequoia.py                                            # decodes with the bundled pair
    target.generate(**inputs, custom_generate=sequoia.decode, draft=draft)     # in your own code
"""
import argparse
import contextlib
import functools
import hashlib
import inspect
import json
import logging
import os
import sys
import time
import warnings
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Callable, NamedTuple
from unittest import mock

import numpy as np
import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers import StoppingCriteriaList, StopStringCriteria
from transformers.cache_utils import Cache, StaticLayer
from transformers.distributed import DistributedConfig
from transformers.generation import (EosTokenCriteria, GenerateDecoderOnlyOutput, MaxLengthCriteria, MinPLogitsWarper,
                                     TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)


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
        if any(parent != given for parent, given in zip(parents, self.parents)):
            raise ValueError(f"parents must be whole numbers, got {list(self.parents)[:8]}")
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
        with torch.inference_mode(False):                                # an ordinary tensor, whoever asks first
            mask = torch.eye(self.size, dtype=torch.bool)
        for node, parent in enumerate(self.parents[1:], 1):
            mask[node] |= mask[parent]
        return mask

    def draw(self, labels) -> str:
        """The tree as text, one line for each leaf, its nodes shown by these labels."""
        lines, stack = [], [(0, "", "")]             # a node, what stands before it on its line, and on the lines below
        while stack:
            node, line, below = stack.pop()
            line, below = line + labels[node], below + " " * len(labels[node])
            *elder, youngest = self.children[node] or [None]
            if youngest is None:
                lines.append(line)
            elif not elder:
                stack.append((youngest, line + "──", below + "  "))
            else:
                stack.append((youngest, below + " └─", below + "   "))
                stack.extend((child, below + " ├─", below + " │ ") for child in reversed(elder[1:]))
                stack.append((elder[0], line + "─┬─", below + " │ "))
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
        if not isinstance(value, (int, np.integer)) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


# ----------------------------------------------------------------------------------------------------------------------
# 2  Tree construction: the dynamic program (section 3.1, equation 1; appendix, bounded depth and 2-D rates)


def expected_tokens(tree: Tree, acceptance_rates) -> float:
    """F(T), the tokens that verifying the tree yields on average: the sum over its nodes of the product of the acceptance
    rates on the way there (Proposition 3.4). A child beyond the last rate is never accepted. Rates as in `optimal_tree`."""
    rates, score = _check_rates(acceptance_rates), [1.0]
    for node, parent in enumerate(tree.parents[1:], 1):
        level, rank = min(tree.depths[parent], len(rates) - 1), tree.ranks[node]
        score.append(score[parent] * rates[level, rank] if rank < rates.shape[1] else 0.0)
    return float(sum(score))


def expected_tokens_table(acceptance_rates, size: int, depth: int, max_branch: int | None = None) -> np.ndarray:
    """G(n, d), the expected tokens of the best tree of exactly n nodes on at most d levels, for every n and d at once:
    (size + 1, depth + 1) float64, -inf where there is no such tree. Arguments as in `optimal_tree`."""
    program = _DynamicProgram(acceptance_rates, size, depth, max_branch)
    return np.stack([np.full(size + 1, -np.inf)] + [program.best(0, d).value for d in range(1, depth + 1)], axis=1)


def optimal_tree(acceptance_rates, size: int, depth: int | None = None, max_branch: int | None = None) -> Tree:
    """The tree of exactly `size` nodes, on at most `depth` levels and with at most `max_branch` children a node, with the
    most expected tokens.

    acceptance_rates: (ranks,), the chance that a node's first, second, ... child is accepted; or (levels, ranks), rates[d]
    for the children of a node on level d, the last row holding for all deeper levels. They need not decrease.
    Raises ValueError for rates that are no probabilities and for a size that no such tree can have.

    >>> optimal_tree([0.6, 0.2, 0.1], size=5).paths()
    [(0,), (1,), (0, 0), (0, 0, 0)]
    """
    program = _DynamicProgram(acceptance_rates, size, depth, max_branch)
    depth = depth or program.levels_that_matter()
    possible = np.isfinite(program.best(0, depth).value).nonzero()[0]
    if size not in possible:
        largest = int(possible.max())
        raise ValueError(f"no tree of {size} nodes has at most {depth} levels and {program.rates.shape[1]} children a node "
                         f"(one for each rate, up to max_branch): the largest has {largest}")
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

    def best(self, level: int, depth: int) -> "_Subtrees":
        """The best subtrees of every size, rooted on `level`, with at most `depth` levels."""
        level = min(level, len(self.rates) - 1)
        if (level, depth) not in self.solved:
            for lower in range(1, depth - (len(self.rates) - 1 - level)):      # bottom up: no recursion 4,096 levels deep
                self.best(len(self.rates) - 1, lower)
            below = self.best(level + 1, depth - 1) if depth > 1 else None
            self.solved[level, depth] = _Subtrees(self.rates[level], self.size, below)
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

    for each child b, which gets m nodes."""

    def __init__(self, rates, size, below):
        self.given, by_branch = [], [np.full(size + 1, -np.inf)]                  # the maximising m, and T(., b)
        by_branch[0][1] = 1.0                                                     # T(1, 0): the root alone
        for rate in rates if below else ():
            gain = np.where(below.value > 0, rate * below.value.clip(0), -np.inf)     # subtle: 0 times -inf would be NaN
            value, given = _max_plus(by_branch[-1], gain)
            by_branch.append(value)
            self.given.append(given)
        self.value = np.max(by_branch, axis=0)                                    # G(n) = max over b of T(n, b), (size + 1,)
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
        rows = np.lib.stride_tricks.sliding_window_view(shifted[start + size - stop + 1: stop + size], stop)
        sums = rows + b[stop - 1::-1]                    # [i, j]: a[n - m] + b[m], where n = start + i, m = stop - 1 - j
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

    With E exponential noise, sorting E / p draws all k at once: token i comes first with probability p_i. Subtle: 24 random
    bits would never draw a token of probability below 6e-8, hence float64."""
    log = torch.rand(probs.shape, generator=generator, dtype=torch.float64, device=probs.device).log_()     # -E
    return (log / (probs + EPSILON)).topk(k).indices


EPSILON = 1e-30          # more probability for each token of a draft drawn from without replacement, lost in rounding where
                         # there is any: so what is left is never nothing, and uniform once the draft's own mass is used up


def sample_with_replacement(probs: Tensor, k: int, generator: torch.Generator | None = None) -> Tensor:
    """k independent tokens, (..., V) -> (..., k): where uniform numbers fall among the cumulative probabilities. Subtle:
    torch.multinomial would ask the host whether these are probabilities, which a CUDA graph cannot hold."""
    cumulated = probs.cumsum(dim=-1, dtype=torch.float64)
    uniform = torch.rand((*probs.shape[:-1], k), generator=generator, dtype=torch.float64, device=probs.device)
    return torch.searchsorted(cumulated, uniform * cumulated[..., -1:], right=True).clamp_(max=probs.shape[-1] - 1)


def most_likely(probs: Tensor, k: int, generator: torch.Generator | None = None) -> Tensor:
    """The k most likely tokens, (..., V) -> (..., k): what sampling without replacement becomes at temperature 0."""
    return probs.topk(k).indices


def sample(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One token of each row, (..., V) -> (...)."""
    return sample_with_replacement(probs, 1, generator)[..., 0]


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
    """Algorithm 2. Its blue lines, by which a rejected token leaves the draft, are the call of `_without`."""
    residual, ratios = target_probs, target_probs.new_zeros(tokens.shape)
    D = draft_probs if replacement else draft_probs + EPSILON
    for i, n in enumerate(with_child):
        token, R = tokens[:n, i : i + 1], residual[:n]                                           # (n, 1), (n, V); D: (n, V)
        ratios[:n, i : i + 1] = R.gather(1, token) / D.gather(1, token)                          # R[s] / D[s]
        if noise is not None and noise.is_cpu and (noise < ratios).any(dim=1).all():
            break
        R = _normalise((R - D).clamp(min=0), otherwise=R)                                        # R <- norm(max(R - D, 0))
        residual = R if n == len(residual) else torch.cat([R, residual[n:]])
        n = [*with_child, 0][i + 1]                                                              # the rows with one more child
        D = D[:n] if replacement or not n else _without(D[:n], token[:n])
    return ratios, residual


def _without(draft: Tensor, rejected: Tensor) -> Tensor:
    """The draft (rows, V) without a rejected token (rows, 1), renormalised."""
    left = draft.scatter(1, rejected, 0)
    return left / left.sum(dim=1, keepdim=True)


def _normalise(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Rows scaled to sum 1, (rows, V); the row of `otherwise` where all weights are 0."""
    total = weights.sum(dim=1, keepdim=True)
    return torch.where(total > 0, weights / total, otherwise)


def _ratios_of_spectr(target_probs, draft_probs, tokens, with_child, noise):
    """k-sequential selection (SpecTr, arXiv 2310.15141, Algorithm 3): every child's ratio is P / (rho Q), with the smallest
    division factor rho, between 1 and k, for which the residual is nowhere negative."""
    P, Q, k = target_probs, draft_probs, (tokens >= 0).sum(dim=1, keepdim=True)                 # k: (rows, 1)
    def tries(beta):                       # the children tried on average, (1 - (1 - beta)^k) / beta, beta one's chance
        return torch.where(beta > 1e-6, (1 - (1 - beta).clamp(min=0) ** k) / beta, k.to(P.dtype))
    low, high = torch.ones_like(k, dtype=P.dtype), k.clamp(min=1).to(P.dtype)
    for _ in range(50 if P.dtype == torch.float64 else 25):
        rho = (low + high) / 2
        large = tries(torch.minimum(P / rho, Q).sum(dim=1, keepdim=True)) <= rho
        low, high = torch.where(large, low, rho), torch.where(large, rho, high)
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


class Families(NamedTuple):
    """Some nodes of a tree and their children, those with the most children first: what verification is indexed by."""
    nodes: Tensor        # (nodes,)
    child: Tensor        # (nodes, most children), -1 where there is none
    exists: Tensor       # (children,) where in the flattened `child` there is one, and
    children: Tensor     # (children,) which
    with_child: list     # for each rank, how many of the nodes have a child of that rank

    @classmethod
    def of(cls, tree: Tree, nodes, device):
        nodes = sorted((node for node in nodes if tree.children[node]), key=lambda node: -len(tree.children[node]))
        most = len(tree.children[nodes[0]]) if nodes else 0
        child = torch.tensor([[*tree.children[node], *[-1] * (most - len(tree.children[node]))] for node in nodes],
                             device=device, dtype=torch.long).reshape(len(nodes), most)
        exists = (child.flatten() >= 0).nonzero()[:, 0]
        return cls(torch.tensor(nodes, device=device, dtype=torch.long), child, exists, child.flatten()[exists],
                   (child >= 0).sum(dim=0).tolist())


class TreeLayout:
    """A tree as index tensors on a device: everything a step needs that the tree alone decides."""

    def __init__(self, tree: Tree, device):
        self.tree = tree
        self.levels = [Families.of(tree, [node for node in range(tree.size) if tree.depths[node] == level], device)
                       for level in range(tree.depth - 1)]
        self.inner = Families.of(tree, range(tree.size), device)                     # of all levels together
        by_level = [node for level in self.levels for node in level.nodes.tolist()]
        self.row = torch.tensor([by_level.index(node) for node in self.inner.nodes.tolist()], device=device, dtype=torch.long)
        self.row_in_level = {node: row for level in self.levels for row, node in enumerate(level.nodes.tolist())}
        self.paths = [row.nonzero()[1:, 0].tolist() for row in tree.mask]            # below the root, the node itself last
        padded = [path + [node] * (tree.depth - 1 - len(path)) for node, path in enumerate(self.paths)]      # its end repeated
        self.padded_paths = torch.tensor(padded, device=device, dtype=torch.long)    # (size, depth - 1)
        self.depth = torch.tensor(tree.depths, device=device)                        # (size,)
        self.parent = torch.tensor([max(parent, 0) for parent in tree.parents], device=device)       # (size,), the root's: 0
        order, stack = [], [0]                                                       # the root, its last child's subtree, ...
        while stack:
            order.append(stack.pop())
            stack.extend(tree.children[order[-1]])
        self.post_order = torch.tensor(order[::-1], device=device)                   # ... backwards: a node after all below it


@dataclass(frozen=True)
class Method:
    """How a node's children are drawn, and how they are verified: losslessly for what is drawn that way."""
    propose: Callable
    ratios: Callable

    def verify(self, target_probs, draft_probs, tokens, generator=None, with_child=None, observe=None):
        """Which child is accepted, if any, and which token follows: target_probs, draft_probs (rows, V), tokens (rows, k) ->
        rank (rows,), -1 for none, and token (rows,). Over proposals and noise the token is distributed as target_probs."""
        noise = torch.rand(tokens.shape, generator=generator, dtype=target_probs.dtype, device=tokens.device)
        with_child = with_child or [len(tokens)] * tokens.shape[1]
        ratios, residual = self.ratios(target_probs, draft_probs, tokens, with_child, noise)
        accepted, first = (noise < ratios).max(dim=1)                            # whether any child is, and the first of them
        rank, token = torch.where(accepted, first, -1), tokens.gather(1, first[:, None])[:, 0]
        if not (accepted.is_cpu and accepted.all()):
            token = torch.where(accepted, token, sample(residual, generator))
        if observe:
            observe(self, target_probs, draft_probs, tokens, noise, ratios, rank, token)
        return rank, token

    def verify_tree(self, layout, tokens, target_probs, draft_probs, generator=None, static=False, observe=None):
        """Which node of a tree is the last accepted one, and which token follows it, (1,) each.

        tokens: (size,) of the nodes; target_probs: a function from a range of nodes to their distributions, (nodes, V);
        draft_probs: for each level, (nodes, V) in the order of `layout.levels`. The walk goes from the root to accepted
        children. It asks for what it visits, or, `static`, verifies all nodes at once and then follows pointers, so that
        nothing depends on the outcome but numbers."""
        if static:
            return self._walk_static(layout, tokens, target_probs, draft_probs, generator)
        node, tree = 0, layout.tree
        while children := tree.children[node]:
            row = layout.row_in_level[node]
            rank, token = self.verify(target_probs(range(node, node + 1)), draft_probs[tree.depths[node]][row : row + 1],
                                      tokens[None, children[0] : children[-1] + 1], generator, observe=observe)
            if (rank := int(rank)) < 0:
                return tokens.new_tensor([node]), token
            node = children[rank]
        return tokens.new_tensor([node]), sample(target_probs(range(node, node + 1)), generator)

    def _walk_static(self, layout, tokens, target_probs, draft_probs, generator):
        target_probs = target_probs(range(layout.tree.size))                                     # (size, V)
        following, node = sample(target_probs, generator), torch.zeros_like(tokens[:1])          # a leaf's token: the target's
        if draft_probs:
            nodes, child = layout.inner.nodes, layout.inner.child
            proposed = torch.where(child >= 0, tokens[child], -1)
            rank, token = self.verify(target_probs[nodes], torch.cat(draft_probs)[layout.row], proposed, generator,
                                      layout.inner.with_child)
            following = following.scatter(0, nodes, token)
            chosen = torch.where(rank >= 0, child.gather(1, rank.clamp(min=0)[:, None])[:, 0], nodes)
            onward = torch.arange(len(tokens), device=tokens.device).scatter(0, nodes, chosen)   # itself, where it ends
            for _ in range(layout.tree.depth.bit_length()):
                onward = onward[onward]                                                          # twice as far
            node = onward[:1]
        return node, following.gather(0, node)


class Greedy(Method):
    """What every method becomes as the temperature goes to 0: the target's top token is emitted, accepted if it is a child."""

    def verify_tree(self, layout, tokens, target_probs, draft_probs, generator=None, static=False, observe=None):
        """As the walk of all methods, with nothing but comparisons."""
        if observe:
            return super().verify_tree(layout, tokens, target_probs, draft_probs, generator, static, observe)
        if static:
            choice = target_probs(range(layout.tree.size)).argmax(dim=1)                         # (size,)
            right = (tokens == choice[layout.parent]) | (layout.depth == 0)                      # is it its parent's choice?
            node = torch.where(right[layout.padded_paths].all(dim=1), layout.depth, -1).argmax(dim=0, keepdim=True)
            return node, choice[node]
        node, proposed = 0, tokens.tolist()
        while True:
            token = int(target_probs(range(node, node + 1)).argmax())
            accepted = [child for child in layout.tree.children[node] if proposed[child] == token]
            if not accepted:
                return tokens.new_tensor([node]), tokens.new_tensor([token])
            node = accepted[0]


class Traversal(Method):
    """Traversal verification (arXiv 2505.12398): from the leaves to the root, so that a child that would be rejected alone can
    be accepted for what comes below it. On a chain it is block verification (arXiv 2403.10444), on one level Algorithm 2."""

    def verify_tree(self, layout, tokens, target_probs, draft_probs, generator=None, static=False, observe=None):
        """Each node accepts with the mass that the sweep gives it; the first in post-order wins, the root if no other does.
        observe is called with (self, layout, tokens, mass, noise, residual, node, token)."""
        mass, residual = self.sweep(layout, tokens, target_probs(range(layout.tree.size)), draft_probs)
        noise = torch.rand(mass.shape, generator=generator, dtype=mass.dtype, device=mass.device)
        accepted = (noise < mass)[layout.post_order]
        node = layout.post_order.gather(0, accepted.max(dim=0, keepdim=True).indices)
        token = sample(residual[node], generator)
        if observe:
            observe(self, layout, tokens, mass, noise, residual, node, token)
        return node, token

    def sweep(self, layout, tokens, target_probs, draft_probs):
        """Every node's acceptance mass (size,) and residual (size, V), in one sweep down the levels: a child's own mass, and
        what is left of its parent's as if the child and all below it were rejected."""
        residual = target_probs.clone()                                                          # (size, V)
        mass = torch.ones_like(residual[:, 0])                                                   # (size,), the root's stays 1
        for level, probs in zip(layout.levels, draft_probs):
            D, proposed = probs + EPSILON, tokens[level.child]                                   # (nodes, V), (nodes, ranks)
            for rank, n in enumerate(level.with_child):
                nodes, child = level.nodes[:n], level.child[:n, rank]
                a, R, token = mass[nodes, None], residual[nodes], proposed[:n, rank : rank + 1]  # (n, 1), (n, V), (n, 1)
                p, q = a * R.gather(1, token), D.gather(1, token)
                mass[child] = (p / q).clamp_(max=1)[:, 0]                                        # a R[t] / D[t]
                left = (a * R - D).clamp(min=0)
                s = left.sum(dim=1, keepdim=True)
                mass[nodes] = torch.where(s > 0, s / (s + (1 - a)), a.floor())[:, 0]             # 0 / 0, at a = 1, being 1
                residual[nodes] = torch.where(s > 0, left / s, R)
                n = [*level.with_child, 0][rank + 1]                                             # those with one more child
                D = _without(D[:n], token[:n])
        return mass, residual


METHODS = {
    "sequoia": Method(sample_without_replacement, functools.partial(_ratios_in_turn, replacement=False)),
    "specinfer": Method(sample_with_replacement, functools.partial(_ratios_in_turn, replacement=True)),
    "spectr": Method(sample_with_replacement, _ratios_of_spectr),
    "naive": Method(sample_with_replacement, _ratios_of_naive),
    "topk": Method(most_likely, _ratios_of_naive),
    "traversal": Traversal(sample_without_replacement, functools.partial(_ratios_in_turn, replacement=False)),
}


GREEDY = Greedy(most_likely, _ratios_of_naive)           # at temperature 0, whatever the method's name


def find_method(name: str) -> Method:
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; there are {', '.join(METHODS)}")
    return METHODS[name]


def sample_and_verify(target_probs: Tensor, draft_probs: Tensor, k: int, method: str = "sequoia",
                      generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Proposes k children from draft_probs and verifies them against target_probs, for every row of a batch.

    target_probs, draft_probs: (..., V), rows that sum to 1. Returns (rank, token), (...) each: the accepted child's rank, -1
    where none was accepted, and the emitted token, which is distributed exactly as target_probs. Raises ValueError for
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
    chosen, batch = find_method(method), target_probs.shape[:-1]
    P, Q = (probs.reshape(-1, probs.shape[-1]).to(torch.promote_types(probs.dtype, torch.float32))
            for probs in (target_probs, draft_probs))
    rank, token = chosen.verify(P, Q, chosen.propose(Q, k, generator), generator)
    return rank.reshape(batch), token.reshape(batch)


# ----------------------------------------------------------------------------------------------------------------------
# 5  Tree attention and the KV cache
#
# The prefix occupies the cache's first slots and the nodes of the tree those behind it, in level order. A node's position is
# its depth, its slot its index: siblings share a position, and the mask lets each node see the prefix and its own path only.
# After a step the entries of the accepted path move up behind the prefix, and everything beyond is overwritten by the next.


class Frame:
    """A tree behind a prefix, with the node before its root, the *stem*: the last token whose entries are in the target's
    cache. The draft is fed stem and root together, since the stem may have been a leaf, which a draft is never fed. Node i of
    the tree is node i + 1 here; slots and positions count from the stem's."""

    def __init__(self, tree: Tree, device):
        self.size, stem = tree.size + 1, Tree((-1,) + tuple(parent + 1 for parent in tree.parents))
        self.slots, self.depths = torch.arange(self.size, device=device), torch.tensor(stem.depths, device=device)   # (size,)
        seen = nn.functional.pad(torch.where(stem.mask, 0.0, -torch.inf), (0, 1), value=-torch.inf)
        self.bias = nn.functional.pad(seen, (1, 0)).to(device)          # (size, before the stem | each node | beyond)

    def place(self, base: Tensor, all_slots: Tensor, last: Tensor) -> "Place":
        """Where the nodes stand if the stem has slot and position `base`, among these slots (visible,). Nodes beyond the
        text's `last` position, which will not be emitted, share that position: a later one may have no embedding."""
        slots, positions = base + self.slots, torch.minimum(base + self.depths, last)
        bias = self.bias.index_select(1, (all_slots - base).clamp(-1, self.size) + 1)
        return Place(slots, positions, all_slots, bias)


class Place(NamedTuple):
    """Where a tree's nodes stand in the cache."""
    slots: Tensor            # (size,)
    positions: Tensor        # (size,)
    all_slots: Tensor        # (visible,) those of the prefix, which are its positions too, of the nodes, and maybe beyond
    bias: Tensor             # (size, visible) 0 where a node sees a slot, else -inf

    def masks(self, nodes, windows, dtype) -> list[Tensor]:
        """The additive mask of some nodes, (1, 1, nodes, visible), for each of these sliding windows, None where there is
        none: the bias, and -inf for what stands further back than the window."""
        bias = self.bias[nodes]
        def within(window):
            key_positions = self.all_slots.index_copy(0, self.slots, self.positions)                     # (visible,)
            return bias.masked_fill(self.positions[nodes][:, None] - key_positions >= window, -torch.inf)
        masks = [within(window) if window else bias for window in windows]
        return [mask[None, None].to(dtype) for mask in masks]


class TreeLayer(StaticLayer):
    """One layer's keys and values, (1, heads, capacity, head_dim), written at any slots and seen from the first on."""

    def __init__(self, reader: "CachedModel"):
        super().__init__(max_cache_len=0)
        self.reader, self.is_initialized = reader, True

    def update(self, key_states, value_states, *args, **kwargs):
        self.keys.index_copy_(2, self.reader.slots, key_states)
        self.values.index_copy_(2, self.reader.slots, value_states)
        return self.keys[:, :, : self.reader.visible], self.values[:, :, : self.reader.visible]


class CachedModel:
    """A transformers model and its KV cache, fed with a prompt and then with nodes of trees; then with another prompt."""

    def __init__(self, model):
        check_model(model)
        self.model, self.dtype, self.windows = model, model.dtype, attention_windows(model.config)
        self.vocabulary = model.get_input_embeddings().num_embeddings
        self.layers, self.buffers, self.capacity = [], [], 0
        self.slots, self.visible = None, None                                           # the current pass's

    @torch.no_grad()
    def feed(self, prompt: Tensor, keep: int = 1):
        """Feeds a prompt, (length,), the ordinary way. `logits` are those of its last `keep` positions, (keep, V)."""
        known = prompt.clamp(max=self.vocabulary - 1)                                   # a padded vocabulary may be shorter
        prefill, limit = DynamicCache(), {"logits_to_keep": keep} if self.model._supports_logits_to_keep() else {}
        self.logits = self.model(input_ids=known[None], past_key_values=prefill, use_cache=True, **limit).logits[0, -keep:]
        entries = [entry for layer in prefill.layers for entry in (layer.keys, layer.values)]       # (1, heads, length, dim)
        if not self.layers:
            groups = {}
            for i, entry in enumerate(entries):             # entries of one shape share a buffer, to be moved by one operation
                groups.setdefault(entry.shape, []).append(i)
            self.groups = list(groups.values())
            self.buffers = [torch.cat([entries[i][:, :, :0] for i in group]) for group in self.groups]
            self.cache = Cache(layers=[TreeLayer(self) for _ in prefill.layers])
            self.layers = self.cache.layers                 # last, should this be interrupted
        self.reserve(len(prompt))
        for buffer, group in zip(self.buffers, self.groups):
            torch.cat([entries[i] for i in group], out=buffer[:, :, : len(prompt)])
            buffer[:, :, len(prompt) :] = 0                  # a NaN of an earlier text would show through any mask

    def reserve(self, capacity: int):
        """Makes room for at least this many slots; what is there stays."""
        if capacity > self.capacity:
            grown = [old.new_zeros(*old.shape[:2], capacity, old.shape[3]) for old in self.buffers]
            for new, old in zip(grown, self.buffers):                                            # (entries, heads, slots, dim)
                new[:, :, : old.shape[2]] = old
            views = {i: view for buffer, group in zip(grown, self.groups) for view, i in zip(buffer.split(1), group)}
            self.buffers, self.entries, self.capacity = grown, tuple(views[i] for i in range(len(views))), capacity

    def __call__(self, tokens: Tensor, place: Place, nodes: Tensor) -> Tensor:
        """One pass over some of the nodes in their place: (size,) token ids of all, (nodes,) which -> (nodes, V) logits."""
        return getattr(self.model, "recording", self.run)(tokens, nodes, place, self.entries)

    def run(self, tokens, nodes, place, entries):
        """The pass as a function of tensors only; entries: the keys and values of each layer in turn."""
        place, known = Place(*place), tokens[nodes].clamp(max=self.vocabulary - 1)
        masks = place.masks(nodes, self.windows.values(), self.dtype)
        self.slots, self.visible = place.slots[nodes], masks[0].shape[-1]
        for i, layer in enumerate(self.layers):
            layer.keys, layer.values = entries[2 * i], entries[2 * i + 1]
        logits = self.model(input_ids=known[None], position_ids=place.positions[nodes][None], use_cache=True,
                            attention_mask=masks[0] if len(masks) == 1 else dict(zip(self.windows, masks)),
                            past_key_values=self.cache).logits[0]
        for layer in self.layers:                                        # they may be another CachedModel's
            layer.keys = layer.values = None
        return logits

    def move(self, source: Tensor, destination: Tensor):
        """Moves the entries of some slots, (slots,) each, in every layer."""
        for buffer in self.buffers:
            buffer.index_copy_(2, destination, buffer.index_select(2, source))


def enough(nodes: Tensor) -> Tensor:
    """What to feed for these nodes, (nodes,), they themselves last. Subtle: a CPU's matrix library takes longer over one or
    two rows than over three to six, by up to a half. So one or two are padded to four with copies of the first, which write
    the same entries to the same slots."""
    return nodes if len(nodes) > 2 or not nodes.is_cpu else torch.cat([nodes[:1].expand(4 - len(nodes)), nodes])


def attention_windows(config) -> dict[str, int | None]:
    """The sliding window of each kind of attention layer, None where it sees everything."""
    config = config.get_text_config(decoder=True)
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if not kinds:
        return {"all": window}
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise ValueError(f"a {config.model_type} model has {', '.join(sorted(unknown))} layers, which cannot take a tree of "
                         f"tokens back; only full and sliding-window attention can be verified as a tree")
    return {kind: window if kind == "sliding_attention" else None for kind in dict.fromkeys(kinds)}


def check_model(model):
    """Raises ValueError for a model that cannot verify a tree."""
    config, name = model.config, type(model).__name__
    if config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder model; trees of tokens need a decoder-only model")
    if model._is_stateful or "position_ids" not in inspect.signature(model.forward).parameters or getattr(config, "alibi", 0):
        raise ValueError(f"{name} is recurrent or does not take position_ids; trees of tokens need a decoder-only model "
                         f"with attention in every layer and explicit positions")
    if config._attn_implementation not in ("sdpa", "eager"):
        raise ValueError(f"{name} uses {config._attn_implementation} attention, which takes no tree mask; load it with "
                         f"attn_implementation='sdpa'")


# ----------------------------------------------------------------------------------------------------------------------
# 6  The decoding step


class Step(NamedTuple):
    """What one step did."""
    tree: Tree
    node_tokens: list        # (size,) the token of each node, the root's first
    path: list               # the accepted nodes below the root, in order
    token: int               # the token after them: the target's own

    @property
    def tokens(self) -> list:
        """The tokens this step adds to the text."""
        return [self.node_tokens[node] for node in self.path] + [self.token]


CUTTING = (TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)         # they rule out all but the likeliest tokens
HISTORY_FREE = (TemperatureLogitsWarper, *CUTTING)


class Decoder:
    """Decodes texts: the prompt once, then step by step. Each step grows a tree with the draft, runs the target over all of
    it in one pass, verifies, and keeps the entries of the accepted path."""

    def __init__(self, target, draft, device, method="sequoia", processors=(), greedy=False, generator=None, cuda_graph=True,
                 observe=None):
        self.target, self.draft = CachedModel(target), draft and CachedModel(draft)
        self.asked = "greedy" if greedy else method                      # "auto": the planner says which is faster
        self.processors, self.greedy, self.generator, self.observe = processors, greedy, generator, observe
        self.needs_history = any(type(processor) not in HISTORY_FREE for processor in processors)
        self.sharded = (getattr(target, "tp_size", None) or 1) > 1       # among the ranks of torchrun, see `join_ranks`
        self.whole = not self.sharded and not hasattr(target, "stream")  # whether a CUDA graph can hold a whole step
        self.cuda_graph, self.planted, self.room = cuda_graph, None, 0
        self.capturable = cuda_graph and not hasattr(draft, "stream")    # until it is found that it cannot be
        models = [(model, model.dtype) for model in (target, draft) if model is not None]
        self.made_from = [models, device, self.asked, numbers_of(processors), generator, cuda_graph, observe, self.whole]
        zeros = functools.partial(torch.zeros, dtype=torch.long, device=device)
        self.base, self.last = zeros(1), zeros(1)                        # (1,) the stem's slot, the text's last position
        self.tokens = zeros(2)                                           # of stem and root; once planted, (frame.size,)
        self.peaks, self.ruled = [], {}                                  # rows' largest scores, (rows,); what `processed` gave

    def begin(self, prompt, history, max_length, row_of_batch=(0, 1), keep=1):
        """Feeds the prompt and draws the first token. prompt: (length,) ids as the models see them; history: (1, any length)
        ids as the processors see them, padding included; max_length: of the history; row_of_batch: which row of how many;
        keep: positions of the prompt whose logits are kept, to learn from."""
        for model in filter(None, (self.target, self.draft)):
            model.feed(prompt, keep)
        self.method = GREEDY if self.greedy else find_method("sequoia" if self.asked == "auto" else self.asked)
        self.vocabulary, self.history, self.row_of_batch = self.target.logits.shape[-1], history, row_of_batch
        self.length, self.limit = len(prompt) - 1, max_length - history.shape[1] + len(prompt)
        self.base.fill_(self.length)                                     # of which `length` is the host's own copy
        self.last.fill_(self.limit - 1)                                  # `limit`: tokens that the whole text may have
        self.static, self.peaks = False, []                              # here the host walks from node to node
        first = self.agree(sample(self.target_probs(self.target.logits[-1:], []), self.generator))
        self.tokens[:2], self.first = torch.cat([prompt[-1:], first]), int(first)
        self.expect(self.healthy())
        self.static = not (prompt.is_cpu or self.needs_history or self.observe)

    def plant(self, tree: Tree):
        """Takes this tree for the steps to come. What was prepared for it in a text of like length stays as it is."""
        if (branch := max(map(len, tree.children))) > self.vocabulary:
            raise ValueError(f"the tree has a node with {branch} children, but there are only {self.vocabulary} tokens")
        room = self.limit + tree.size + 1
        if self.static:                                                  # one for all texts of about this length
            room = -(-room // 256) * 256
            room = self.room if room < self.room <= 2 * room else room
        models = list(filter(None, (self.target, self.draft)))
        for model in models:
            model.reserve(room + 1)                                      # compiled passes rely on seeing less than there is
        planted = tree, self.method, room, [model.capacity for model in models]       # a cache that grows stands elsewhere
        if planted == self.planted:                                      # all is prepared, by a text of like length
            return
        self.prepared = self.planted = None
        self.room, self.all_slots = room, torch.arange(room, device=self.base.device)
        self.layout, self.frame = TreeLayout(tree, self.base.device), Frame(tree, self.base.device)
        self.tokens = torch.cat([self.tokens[:2], self.tokens.new_zeros(tree.size - 1)])
        fed = [level.nodes + 1 for level in self.layout.levels]          # in the frame's numbers
        fed[:1] = [nn.functional.pad(root, (1, 0)) for root in fed[:1]]  # with the root the draft is fed the stem
        self.fed, self.judged, self.planted = list(map(enough, fed)), enough(self.frame.slots[1:]), planted

    def tokens_with(self, tree, planner, on_step=None):
        """The tokens after the prompt, one at a time, for as long as they are asked for."""
        yield self.first
        self.plant(planner.tree(self, tree))
        while True:
            step = self.step()
            if on_step is not None:
                on_step(step)
            yield from step.tokens
            if better := planner.learn(step, tree):
                self.plant(better)

    def step(self) -> Step:
        """Grow the tree, run the target over it, verify, keep the accepted path."""
        self.prepared = self.prepared or self.prepare()
        healthy, node, token, *node_tokens = self.prepared().tolist()            # the step's one copy to the host
        self.expect(healthy)
        step = Step(self.layout.tree, node_tokens, self.layout.paths[node], token)
        self.length += len(step.tokens)
        if self.needs_history:
            known = step.node_tokens[:1] + step.tokens[:-1]                      # the root; the last token is the next root
            self.history = torch.cat([self.history, self.tokens.new_tensor([known])], dim=1)
        return step

    def program(self) -> Tensor:
        """A step, but for what it means to the host. Where it is static its shapes are fixed and it never asks the host
        anything, so that a CUDA graph can hold it."""
        return self.judge(*self.grow())

    def grow(self) -> tuple[Place, list[Tensor], list[Tensor]]:
        """The first half: fills in the tree's tokens, level by level. Returns where the tree stands, the draft's
        distributions, (nodes, V) a level, and each row's largest score."""
        used = slice(None if self.static else self.length + self.frame.size)     # the host sees the slots in use, no more
        levels, place, self.peaks = [], self.frame.place(self.base, self.all_slots[used], self.last), []
        for depth, level in enumerate(self.layout.levels):
            logits = self.draft(self.tokens, place, self.fed[depth])[-len(level.nodes):]
            levels.append(self.draft_probs(logits, level.nodes))
            proposals = self.method.propose(levels[-1], level.child.shape[1], self.generator)            # as level.child
            self.tokens[1:][level.children] = proposals.take(level.exists)
        return place, levels, self.peaks

    def judge(self, place, draft_probs, peaks) -> Tensor:
        """The second half: the target's pass, verification, and what is kept. Returns (3 + tree.size,) whether all went well,
        the last accepted node, the token after it, and the nodes' tokens."""
        self.peaks = [*peaks]
        self.agree(self.tokens)
        logits = self.target(self.tokens, place, self.judged)[-self.layout.tree.size:]                   # (tree.size, V)
        node, token = map(self.agree, self.verify(logits, draft_probs))
        report = torch.cat([self.healthy(), node, token, self.tokens[1:]])
        self.keep(place, node, token)
        return report

    def verify(self, logits, draft_probs) -> tuple[Tensor, Tensor]:
        """The last accepted node and the token after it, (1,) each."""
        def target_probs(nodes):
            return self.target_probs(logits[nodes.start : nodes.stop], nodes)
        return self.method.verify_tree(self.layout, self.tokens[1:], target_probs, draft_probs, self.generator, self.static,
                                       self.observe)

    def keep(self, place, node, token):
        """Moves the accepted nodes' entries behind the root's; the last accepted node is the next stem, the token its root."""
        path = self.layout.padded_paths[node][0]                                                         # (depth - 1,)
        path = path if self.static else path[: self.layout.tree.depths[node]]
        if len(path):
            source, destination = place.slots[path + 1], place.slots[2 : len(path) + 2]
            for model in filter(None, (self.target, self.draft)):
                model.move(source, destination)
        self.tokens[:2] = torch.cat([self.tokens[node + 1], token])
        self.base += self.layout.depth[node] + 1

    def draft_probs(self, logits, nodes):
        """The draft's distribution after these nodes of one level, (rows, V). What top-p and its like cut off keeps a
        thousandth of its probability: so once the rest is used up it is drawn, and not any token at all."""
        probs = self.scores(logits, nodes).softmax(dim=1)
        if self.needs_history or not any(isinstance(processor, CUTTING) for processor in self.processors):
            return probs
        return 0.999 * probs + 0.001 * self.scores(logits, nodes, without=CUTTING).softmax(dim=1)

    def target_probs(self, logits, nodes):
        """The target's distribution after these nodes, (rows, V): one-hot when greedy. The draft's is not, and its children
        are its most likely tokens, which is what every method's proposals become as the temperature goes to 0."""
        scores = self.scores(logits, nodes)
        if not self.greedy:
            return scores.softmax(dim=1)
        return torch.zeros_like(scores).scatter_(1, scores.argmax(dim=1, keepdim=True), 1)

    def scores(self, logits, nodes, without=()):
        """The processed float32 scores, (rows, V), of these nodes. Tokens the target lacks are cut off, those the draft lacks
        get -inf. Processors that look at the history see each node's own path, one by one; `without` leaves out others."""
        missing = self.vocabulary - logits.shape[-1]
        scores = logits.float() if missing == 0 else nn.functional.pad(logits.float(), (0, missing), value=-torch.inf)
        if not self.needs_history:
            for processor in self.processors:                            # the list itself would inspect each one's signature
                scores = scores if isinstance(processor, without) else processor(self.history, scores)
        else:
            scores = torch.cat([self.processed(node, one[None]) for node, one in zip([*map(int, nodes)] or [None], scores)])
        self.peaks.append(scores.amax(dim=1))
        return scores

    def processed(self, node, scores):
        """The scores (1, V) after a node, or after the prompt, by processors that look at the history, in the batch they were
        made for. Of a path that they have ruled out they are not asked, and need not know: nothing on it can be accepted."""
        history = self.history[0]
        if node is not None:
            path, parent = self.layout.paths[node], self.layout.tree.parents[node]
            if parent >= 0 and self.ruled[parent][0, self.tokens[1 + node]] == -torch.inf:
                self.ruled[node] = torch.full_like(scores, -torch.inf)
                return scores
            history = torch.cat([history, self.tokens[1:][[0, *path]]])
        row, batch = self.row_of_batch
        self.ruled[node] = self.processors(history.repeat(batch, 1), scores.repeat(batch, 1))[row : row + 1]
        return self.ruled[node]

    def healthy(self) -> Tensor:
        """Whether every row so far has a token that is possible, (1,)."""
        return (torch.cat(self.peaks) > -torch.inf).all(dim=0, keepdim=True)

    def expect(self, healthy):
        if not healthy:
            raise ValueError("the models gave NaN logits, or the processors left no token possible")

    def prepare(self) -> Callable:
        """The step as it is run over and over: on a GPU as one CUDA graph, or where the host has a part in the target's pass
        (its layers stream, or ranks share it) with one that grows the tree."""
        if self.whole:
            return self.captured(self.program)
        grow = self.captured(self.grow)
        return lambda: self.judge(*grow())

    def captured(self, run: Callable) -> Callable:
        """`run` as a CUDA graph, where that can be. It is tried out first, on a side stream, and the state restored."""
        if not (self.static and self.tokens.is_cuda and self.capturable):
            return run
        device, graph = self.tokens.device, torch.cuda.CUDAGraph()
        generator, side = self.generator or torch.cuda.default_generators[device.index or 0], torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.stream(side):
                self.try_out(run, generator)
            if self.generator is not None:
                graph.register_generator_state(self.generator)
            with torch.cuda.graph(graph, stream=side):
                result = run()
        except RuntimeError as error:
            self.capturable = False
            warnings.warn(f"this step cannot be a CUDA graph and runs without: {str(error).splitlines()[0]}")
            return run
        finally:
            torch.cuda.current_stream(device).wait_stream(side)
        return lambda: graph.replay() or result

    def try_out(self, run, generator):
        """Runs it twice, the second time so that waiting for the host is an error: in a capture it could not be mended."""
        random = generator.get_state()
        try:
            for mode in ("default", "error"):
                torch.cuda.set_sync_debug_mode(mode)
                with self.rehearsal():
                    run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
            generator.set_state(random)

    @contextlib.contextmanager
    def rehearsal(self, seed=None):
        """What is run in here leaves the text where it was; with a seed of its own the text's random numbers too."""
        base, stem_and_root, generator, observe = self.base.clone(), self.tokens[:2].clone(), self.generator, self.observe
        self.generator = generator if seed is None else torch.Generator(base.device).manual_seed(seed)
        self.observe = None
        try:
            yield
        finally:
            self.base.copy_(base)
            self.tokens[:2] = stem_and_root
            self.generator, self.observe = generator, observe

    def agree(self, value):
        """Rank 0's value, on every rank that has a share of the target: so all of them take the same tokens."""
        if self.sharded and isinstance(value, Tensor):
            torch.distributed.broadcast(value, src=0)
        elif self.sharded:
            torch.distributed.broadcast_object_list(box := [value], src=0)
            value = box[0]
        return value

    def clock(self) -> float:
        """Seconds, when the device has done what it was given; on all ranks rank 0's."""
        if self.base.is_cuda:
            torch.cuda.synchronize(self.base.device)
        return self.agree(time.perf_counter())


def numbers_of(processors) -> list:
    """What kind of processors these are, and the numbers that they were given."""
    return [[type(processor).__name__, *(value for value in vars(processor).values() if isinstance(value, (int, float)))]
            for processor in processors]


# ----------------------------------------------------------------------------------------------------------------------
# 7  Passes: packed and recorded for a CPU, compiled for a GPU; weights that stream past a small device, or are shared out


class PackedLinear(nn.Module):
    """Linear layers that take the same input, such as those of queries, keys and values, as one product, with the weight laid
    out once for oneDNN, the CPU's matrix library: the same numbers, at the memory's speed. Plain PyTorch lays it out anew at
    every call, or reads it at half that speed."""

    def __init__(self, layers: list, rows: int):
        super().__init__()
        self.sizes, self.bias = [layer.out_features for layer in layers], None
        weight = layers[0].weight.detach() if len(layers) == 1 else torch.cat([layer.weight.detach() for layer in layers])
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, rows)                         # opaque, not a parameter
        if layers[0].bias is not None:
            self.bias = torch.cat([layer.bias.detach() for layer in layers])

    def forward(self, x):
        """The first layer's output; those of the others wait for them."""
        y = (_scripted_linear() if torch.jit.is_tracing() else _packed_linear)(x, self.weight, self.bias)
        self.input, (first, *self.waiting) = x, y.split(self.sizes, dim=-1) if len(self.sizes) > 1 else (y,)
        return first


class Waiting(nn.Module):
    """A layer whose output has been computed by an earlier sibling."""

    def __init__(self, packed: PackedLinear):
        super().__init__()
        self.packed = [packed]                                           # in a list: not a child of this module

    def forward(self, x):
        assert x is self.packed[0].input
        return self.packed[0].waiting.pop(0)


def _packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None):
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@functools.cache
def _scripted_linear():
    return torch.jit.script(_packed_linear)                              # a trace cannot take the empty list, a script can


def pack(model, rows: int = 16):
    """Prepares a model for decoding, in place, and returns it. A packed model cannot be trained or saved, and must not be
    changed.

    On a CPU it packs all linear layers, for passes over about `rows` tokens, and records the forward pass. Each layer's plain
    weight is dropped as soon as it is packed (a tied embedding keeps its own). Without oneDNN, or for a dtype it cannot take,
    the model stays as it is. On a GPU it compiles the forward pass, which takes a while."""
    supported = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and (
        model.dtype == torch.float32 or model.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if hasattr(model, "recording") or hasattr(model, "stream"):
        return model
    if model.device.type == "cuda":
        model.recording = compiled(model)
    elif supported and model.device.type == "cpu":
        model.requires_grad_(False)
        for parent, names in siblings(model):
            layers = [getattr(parent, name) for name in names]
            setattr(parent, names[0], packed := PackedLinear(layers, rows))
            for name in names[1:]:
                setattr(parent, name, Waiting(packed))
        model.recording = record(model)
    return model


@torch.no_grad()
def siblings(model) -> list[tuple]:
    """The model's linear layers as (parent, names); together those of one parent that a pass gives the very same tensor."""
    owner = {layer: (parent, name) for parent in model.modules() for name, layer in parent.named_children()
             if type(layer) is nn.Linear}
    given, groups = {}, {}
    hooks = [layer.register_forward_pre_hook(lambda layer, inputs: given.setdefault(layer, inputs[0])) for layer in owner]
    model(torch.zeros(1, 2, dtype=torch.long))
    for hook in hooks:
        hook.remove()
    for layer, x in (given | {layer: layer for layer in owner if layer not in given}).items():      # in the order of calls
        parent, name = owner[layer]
        groups.setdefault((parent, id(x), layer.bias is None), []).append(name)
    return [(parent, names) for (parent, *_), names in groups.items()]


def trial(model) -> tuple["CachedModel", Callable]:
    """A small cache to try passes out with, and a function of (nodes, stem): the inputs of a pass over the first `nodes` nodes
    of a binary tree whose stem has slot `stem`. A pass sees at most 32 of the 33 slots."""
    scratch, frame = CachedModel(model), Frame(k_ary(2, 4), model.device)
    scratch.feed(torch.arange(4, device=model.device))
    scratch.reserve(33)

    def example(nodes, stem):
        tokens = torch.randint(scratch.vocabulary, (frame.size,), generator=torch.Generator().manual_seed(stem))
        slots = torch.arange(32, device=model.device)
        place = frame.place(slots[stem : stem + 1], slots[: stem + frame.size], slots[-1:])
        return tokens.to(model.device), slots[1 : 1 + nodes], place, scratch.entries
    return scratch, example


@torch.no_grad()
def record(model):
    """The model's forward pass as a TorchScript trace, which runs the same operators without Python: about half the time of
    a small model's pass. Returns the plain pass where that cannot be done.

    A trace holds the operators of one run. To be sure that they are those of every run, and do not depend on the tokens (as
    those of a mixture of experts do), it is compared with the plain pass on other tokens and other shapes, bit for bit."""
    (scratch, example), weights = trial(model), tuple(m.weight for m in model.modules() if isinstance(m, PackedLinear))

    def run(*inputs):                                    # subtle: the last are the weights; a trace cannot hold opaque tensors
        return scratch.run(*inputs[:-1])

    with warnings.catch_warnings(), contextlib.suppress(RuntimeError, AttributeError):
        warnings.simplefilter("ignore")                                  # that traces are deprecated, and may not generalise
        with mock.patch.dict(os.environ, TRANSFORMERS_SDPA_FORCE_GQA="1"):         # keys that heads share are not repeated
            traced = torch.jit.trace(run, (*example(3, 3), weights), check_trace=False)
        for simplify in ("erase_shape_information", "inline", "cse", "constant_propagation", "peephole", "dce"):
            getattr(torch._C, f"_jit_pass_{simplify}")(traced.graph)
        replay = functools.partial(_replay, torch._C._create_function_from_graph("forward", traced.graph), weights)
        others = example(15, 4), example(7, 5), example(2, 14)
        if all(torch.equal(replay(*inputs), scratch.run(*inputs)) for inputs in others):
            return replay
    return scratch.run


def _replay(traced, weights, *inputs):
    with torch.jit.optimized_execution(False):                           # else it optimises anew for every new shape
        return traced(*inputs, weights)


@torch.inference_mode()
def compiled(model, backend: str = "inductor"):
    """The model's forward pass by torch.compile, which makes few operators of the many small ones between its products: each
    costs a GPU some time, in a graph too. It rounds less often than the plain pass, so in bfloat16 a near tie may fall the
    other way. It is compiled twice, for one node and for any number. Returns the plain pass where that cannot be done."""
    scratch, example = trial(model)
    fast = torch.compile(scratch.run, dynamic=True, backend=backend)

    @torch._dynamo.config.patch(recompile_limit=256)                     # subtle: all models' passes are counted together
    @torch.fx.experimental._config.patch(use_duck_shape=False)           # and sizes equal in the example need not stay so
    def run(*inputs):
        return fast(*inputs)
    try:
        for nodes in (3, 1):
            run(*example(nodes, 16))
    except RuntimeError as error:
        reason = " ".join(str(error).splitlines()[:2])
        warnings.warn(f"{type(model).__name__} cannot be compiled and runs as it is: {reason}")
        return scratch.run
    return run


# The rest of this section is for targets larger than the device. Their decoder layers *stream*: the weights of one are brought
# into a buffer on the device while those before it compute, and others take their place. Or they are *sharded*: every process
# that torchrun has started, a rank, holds its share of each layer.


class Stream:
    """Brings the weights of layers to the device in turn, round and round, ahead of their use. The n-th layer used, counted
    over all passes, is number n % len(layers), and comes by way of buffer n % len(buffers).

    layers: each one's parameters. copy(i, buffer) starts to copy layer i's weights into a buffer, after the copies started
    before and after the work that the device has been given, which may still need what is there; it returns a function that
    waits for it."""

    def __init__(self, layers: list[list[nn.Parameter]], copy, device, buffers: int):
        self.layers, self.copy, self.used, self.coming = layers, copy, 0, {}
        size = max(map(flat_size, layers))
        self.buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(buffers)]
        for parameters in layers:
            self.point(parameters, self.buffers[0])                      # for the shapes, and to own nothing

    def point(self, parameters, buffer):
        for parameter, view in zip(parameters, views(buffer, parameters)):
            parameter.data = view

    def fill(self):
        """Starts to copy the layers that come next, into every buffer that is free."""
        for n in range(self.used, self.used + len(self.buffers)):
            if n not in self.coming:
                self.coming[n] = self.copy(n % len(self.layers), self.buffers[n % len(self.buffers)])

    def before(self, i: int, *_):
        """Layer i is about to be used."""
        if self.used % len(self.layers) != i:                            # a pass was broken off: begin again, with this layer
            self.used, self.coming = self.used + (i - self.used) % len(self.layers), {}
        self.fill()
        coming, self.coming = self.coming, {}                            # should waiting fail, all is copied anew next time
        coming.pop(self.used)()
        self.coming = coming
        self.point(self.layers[i], self.buffers[self.used % len(self.buffers)])

    def after(self, i: int, *_):
        """Layer i has been used, and its buffer is free."""
        self.used += 1
        self.fill()


def flat_size(parameters) -> int:
    """The bytes of a layer in one piece, each weight at a multiple of 256."""
    return sum(-(-parameter.nbytes // 256) * 256 for parameter in parameters)


def views(flat: Tensor, parameters) -> list[Tensor]:
    """A layer's weights as views of the piece that holds them, (bytes,) uint8."""
    pieces = flat[: flat_size(parameters)].split([flat_size([parameter]) for parameter in parameters])
    return [piece[: p.nbytes].view(p.dtype).view(p.shape) for piece, p in zip(pieces, parameters)]


def offload(model, device, resident: int | str = "auto", buffers: int = 2):
    """Moves a model to the device, all but its decoder layers: their weights stay in host memory and stream from there, pass
    after pass. Changes the model in place and returns it.

    resident: how many layers, from the first, live on the device as embeddings, norms and head do; "auto": as many as fit into
    its free memory, on a CPU none. buffers: layers on the device beside those, one in use and the others on their way.
    Raises ValueError for an unknown device, a packed model, one without a list of decoder layers."""
    return stream_layers(model, check_streaming(device, resident, buffers), resident, buffers, model.dtype, files=[])


def load_offloaded(name: str, dtype: torch.dtype, device, resident: int | str = "auto", buffers: int = 2):
    """Loads a model from a folder or hub name and offloads it: to a GPU from host memory, on a CPU from its safetensors files,
    so that it may be larger than all memory; what is stored in another dtype is converted as it comes. The other arguments
    are `offload`'s. Raises ValueError for files that lack some of its weights."""
    device, config, as_type = check_streaming(device, resident, buffers), AutoConfig.from_pretrained(name), dtype
    if device.type == "cpu":                     # subtle: transformers maps only weights that keep their file's dtype;
        config.dtype, as_type = None, "auto"     # "auto" keeps it if the configuration names none
    try:
        model, found = AutoModelForCausalLM.from_pretrained(name, config=config, dtype=as_type, output_loading_info=True,
                                                            ignore_mismatched_sizes=True)
    except SafetensorError as error:
        raise ValueError(f"the files of {name} are cut short, or no safetensors: {error}") from error
    if lost := sorted(found["missing_keys"]) + [key for key, *_ in found["mismatched_keys"]]:
        raise ValueError(f"the files of {name} lack {len(lost)} of the model's weights, or have other shapes: {lost[0]}, ...")
    return stream_layers(model, device, resident, buffers, dtype, mapped_files())


def check_streaming(device, resident, buffers) -> torch.device:
    if (device := find_device(device)).type not in ("cpu", "cuda"):
        raise ValueError(f"layers stream to a cpu or cuda device, not to {device}")
    if resident != "auto" and not (isinstance(resident, int) and resident >= 0):
        raise ValueError(f"resident must be auto or a number of layers, got {resident!r}")
    _at_least_one(buffers=buffers)
    return device


@torch.no_grad()
def stream_layers(model, device, resident, buffers, dtype, files):
    """`offload`, with what has the model's dtype converted to this one, and read from these files where it is mapped from
    them."""
    layers, stored = decoder_layers(model), model.dtype
    layers = layers[layers_that_fit(model, layers, device, buffers) if resident == "auto" else resident :]
    streaming, inside = [list(layer.parameters()) for layer in layers], {*layers.modules()}
    staying = {p for module in model.modules() if module not in inside for p in module.parameters(recurse=False)}
    if staying.intersection(sum(streaming, [])):
        raise ValueError(f"{type(model).__name__} has weights that decoder layers share with what does not stream")
    sources = [[source_of(parameter.data, files) for parameter in parameters] for parameters in streaming]

    def empty(parameter, shape, device="cpu"):
        return torch.empty(shape, dtype=dtype if parameter.dtype == stored else parameter.dtype, device=device)
    for parameter in staying:
        parameter.data = source_of(parameter.data, files)(empty(parameter, parameter.shape, device))
    for parameter in sum(streaming, []):
        parameter.data = empty(parameter, ()).expand(parameter.shape)                            # takes no memory

    def fill(i, flat):
        for source, view in zip(sources[i], views(flat, streaming[i])):
            source(view)
    if streaming:
        copy = copies_by_gpu(streaming, sources, fill, device) if device.type == "cuda" else copies_by_thread(fill)
        model.stream = Stream(streaming, copy, device, buffers)
    for i, layer in enumerate(layers):
        layer.register_forward_pre_hook(functools.partial(model.stream.before, i))
        layer.register_forward_hook(functools.partial(model.stream.after, i))
    return model.to(device).eval().requires_grad_(False)


def decoder_layers(model) -> nn.ModuleList:
    if hasattr(model, "recording") or hasattr(model, "stream"):
        raise ValueError("a packed or offloaded model cannot be offloaded; load it anew")
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(f"{type(model).__name__} has no list of {count} decoder layers that could be offloaded")


def layers_that_fit(model, layers, device, buffers) -> int:
    """How many layers can live in a GPU's free memory, beside the buffers and all that does not stream."""
    def size(module):
        return sum(parameter.nbytes for parameter in module.parameters())
    free = 0.8 * torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0          # the rest: caches, activations
    return max(0, int((free - size(model) + size(layers)) / max(map(size, layers))) - buffers)


def copies_by_gpu(streaming, sources, fill, device) -> Callable:
    """A Stream's `copy` to a GPU: it fetches each layer from one piece of pinned host memory by itself, while it computes."""
    pieces, stream, pinned = [], torch.cuda.Stream(device), True
    for i, parameters in enumerate(streaming):
        pieces.append(torch.empty(flat_size(parameters), dtype=torch.uint8))
        pinned = pinned and pin(pieces[i])
        fill(i, pieces[i])
        sources[i].clear()                                               # frees the memory it came from

    def copy(i, buffer):
        stream.wait_stream(torch.cuda.current_stream(device))            # the layer that used this buffer has been computed
        with torch.cuda.stream(stream):
            buffer[: len(pieces[i])].copy_(pieces[i], non_blocking=True)
            copied = stream.record_event()
        return lambda: torch.cuda.current_stream(device).wait_event(copied)
    return copy


def pin(memory: Tensor) -> bool:
    """Pins host memory, so that a GPU reads it by itself; torch's own pinned memory comes in powers of two. Returns whether
    that could be done."""
    if error := int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)):
        warnings.warn(f"no more host memory can be pinned (CUDA error {error}), so copies are slower")
    return not error


def copies_by_thread(fill) -> Callable:
    """A Stream's `copy` on a CPU. What goes wrong in the thread is raised where the layer is waited for."""
    thread = ThreadPoolExecutor(max_workers=1)
    return lambda i, buffer: thread.submit(fill, i, buffer).result


def mapped_files() -> list[tuple[int, int, int, str]]:
    """The files in this process's memory: first address, end, place in the file, path. Empty where there is no /proc."""
    maps = Path("/proc/self/maps")
    lines = [line.split(maxsplit=5) for line in maps.read_text().splitlines()] if maps.exists() else []
    return [(*(int(address, 16) for address in line[0].split("-")), int(line[2], 16), line[5])
            for line in lines if len(line) == 6 and os.path.isfile(line[5])]


def source_of(tensor: Tensor, files) -> Callable[[Tensor], Tensor]:
    """A function that fills another tensor with these values and returns it. What is mapped from one of these files is read
    from there at every call: so it does not stay in this process's memory."""
    address = tensor.data_ptr()
    for start, end, place, path in files:
        if start <= address < end and tensor.is_contiguous():
            return functools.partial(read_from, path, place + address - start, tensor.dtype)
    return lambda into: into.copy_(tensor)


def read_from(path: str, place: int, dtype: torch.dtype, into: Tensor) -> Tensor:
    """Fills a tensor from a place in a file, where its values stand in this dtype."""
    direct = into.dtype == dtype and into.device.type == "cpu"
    values = into if direct else torch.empty(into.shape, dtype=dtype)
    with open(path, "rb") as file:
        file.seek(place)
        if file.readinto(values.reshape(-1).view(torch.uint8).numpy()) < values.nbytes:
            raise ValueError(f"{path} is cut short: it ends before byte {place + values.nbytes}")
    return into if direct else into.copy_(values)


def find_device(name) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:                      # an AssertionError where torch has no CUDA at all
        raise ValueError(f"there is no device {name}: {str(error).splitlines()[0]}") from error


def join_ranks(device: str) -> str:
    """Where torchrun has started several processes, this one joins the others. Returns the device that is its own."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        if device.startswith("cuda"):
            device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(device)
        backend = "nccl" if device.startswith("cuda") else "gloo"
        torch.distributed.init_process_group(backend, timeout=timedelta(minutes=10))
    find_device(device)
    return device


def load_sharded(name: str, dtype: torch.dtype):
    """This rank's share of a model, by transformers' tensor parallelism. Raises ValueError where heads cannot be shared."""
    ranks, config = torch.distributed.get_world_size(), AutoConfig.from_pretrained(name).get_text_config(decoder=True)
    for kind in ("num_attention_heads", "num_key_value_heads"):
        if (getattr(config, kind, None) or 0) % ranks:
            raise ValueError(f"{name} has {getattr(config, kind)} {kind}, which {ranks} ranks cannot share evenly")
    parallel = DistributedConfig(tp_size=ranks)
    return AutoModelForCausalLM.from_pretrained(name, dtype=dtype, distributed_config=parallel)


# ----------------------------------------------------------------------------------------------------------------------
# 8  The hardware-aware planner (section 4)


PRIOR = 0.6 / np.arange(1, 33) ** 2          # acceptance rates before any evidence: a decent draft, a power law in the rank


class Acceptance:
    """Accepted over tried, counted by level and rank. What is not known yet is filled in from the prior, which counts like
    `prior_weight` children tried."""

    def __init__(self, prior_weight: float = 8.0):
        self.prior, self.prior_weight = PRIOR, prior_weight
        self.tried, self.accepted = np.zeros((2, 24, len(PRIOR)))        # (levels, ranks) each

    def count(self, level: int, children: int, rank: int):
        """A node on this level had this many children, of which the one of this rank was accepted; -1: none was."""
        level, seen = min(level, len(self.tried) - 1), min(children if rank < 0 else rank + 1, len(self.prior))
        self.tried[level, :seen] += 1
        if 0 <= rank < seen:
            self.accepted[level, rank] += 1

    def count_step(self, step: Step):
        """All that one step has shown."""
        node = 0
        for level, child in enumerate(step.path + [None]):
            if children := step.tree.children[node]:
                self.count(level, len(children), -1 if child is None else child - children[0])
            node = child

    def rates(self, levels: int | None = None) -> np.ndarray:
        """The acceptance rates: P[k], the chance that child k is accepted, is the chance that it is when tried times the
        chance that it is tried. (ranks,) over all levels together; or (levels, ranks), where what is known of a level is the
        prior of the next: a path that was right so far tends to go on being right."""
        tried, accepted = self.tried[:levels], self.accepted[:levels]
        if levels is None:
            tried, accepted = tried.sum(axis=0, keepdims=True), accepted.sum(axis=0, keepdims=True)
        when_tried = [self.prior / (1 - np.concatenate([[0], self.prior.cumsum()[:-1]]))]
        for n, hits in zip(tried, accepted):
            when_tried.append((hits + self.prior_weight * when_tried[-1]) / (n + self.prior_weight))
        when_tried = np.stack(when_tried[1:])
        reached = np.pad(np.cumprod(1 - when_tried, axis=1), ((0, 0), (1, 0)), constant_values=1)[:, :-1]
        return when_tried[0] * reached[0] if levels is None else when_tried * reached


def measure_acceptance(target_probs: Tensor, draft_probs: Tensor, method: Method = METHODS["sequoia"], children: int = 4,
                       generator=None, acceptance: Acceptance | None = None, text: Tensor | None = None) -> Acceptance:
    """Teacher-forced acceptance: at every position of a text, (positions, V) each, children are proposed and verified.

    text: (positions,) the token that follows each position. Where it is the one accepted, the next position is a level
    deeper: so after a run of n such positions one has been seen on all levels from 0 to n: a tree may begin at any of them."""
    acceptance, run = acceptance or Acceptance(), 0
    proposals = method.propose(draft_probs, min(children, target_probs.shape[1]), generator)
    ranks, tokens = method.verify(target_probs, draft_probs, proposals, generator)
    right = ((ranks >= 0) & (tokens == (-1 if text is None else text))).tolist()
    for rank, goes_on in zip(ranks.tolist(), right):
        for level in range(run + 1):
            acceptance.count(level, proposals.shape[1], rank)
        run = min(run + 1, len(acceptance.tried) - 1) if goes_on else 0
    return acceptance


class Latency(NamedTuple):
    """Measured seconds: t(n), of a step without its draft passes, by tree size; c, of growing one level, by its width."""
    sizes: list
    target: list
    widths: list
    draft: list

    def step(self, size, depth):
        """Seconds of a step, for arrays of tree sizes n and depths d: t(n) + (d - 1) c, as the root's level is not grown."""
        width = (size - 1) / np.maximum(depth - 1, 1)
        return np.interp(size, self.sizes, self.target) + (depth - 1) * np.interp(width, self.widths, self.draft)

    def speedup(self, tree: Tree, acceptance_rates) -> float:
        """What a tree promises over plain decoding."""
        return expected_tokens(tree, acceptance_rates) / self.step(tree.size, tree.depth) * self.step(1, 1)


def measure_latency(decoder: Decoder, budget: float = 1.5) -> Latency:
    """Times both halves of this decoder's steps, with trees of 1 and 8 nodes; then, until `budget` seconds are used up, with
    larger ones while the target takes less than one and a half times as long as for one node (beyond that, tokens grow more
    slowly than time), and with those between. Medians; and since noise only adds to a time, none is longer than that of a
    larger tree."""
    target, draft, spent = {}, {}, []

    def measure(size):
        tree, times = optimal_tree(PRIOR, size, min(size, 2 + size.bit_length())), []
        decoder.plant(tree)
        grow = decoder.captured(decoder.grow)
        grown = grow()
        def rest():
            return decoder.judge(*grown)
        judge = decoder.captured(rest) if decoder.whole else rest
        while len(times) < 3 or len(times) < 16 and np.sum(times) < 0.1:
            with decoder.rehearsal():
                begun = decoder.clock()
                grown = grow()
                half = decoder.clock()
                judge()
                times.append((half - begun, decoder.clock() - half))
        spent.append(np.sum(times))                                      # without what it took to prepare
        grow_seconds, target[size] = np.median(times[1:], axis=0).tolist()
        if size > 1:
            draft[(size - 1) / (tree.depth - 1)] = grow_seconds / (tree.depth - 1)

    def in_time():
        return sum(spent) < max(budget, 30 * target[1])                  # a slow target is worth more patience

    for size in (1, 8):
        measure(size)
    while (largest := max(target)) < 1024 and target[largest] < 1.5 * target[1] and in_time():
        measure(2 * largest)
    for size in (4, 6, 12, 2):
        if size < largest and in_time():
            measure(size)
    rising = [np.minimum.accumulate([times[x] for x in sorted(times)[::-1]])[::-1].tolist() for times in (target, draft)]
    return Latency(sorted(target), rising[0], sorted(draft), rising[1])


def faster_method(decoder: Decoder, tree: Tree, latency: Latency) -> str:
    """On average traversal verification never yields fewer tokens than Sequoia's, but it looks at every node: it is chosen
    where that costs less than a hundredth of a step. Both are timed on one tree and its logits, in turns."""
    decoder.plant(tree)
    with decoder.rehearsal():
        place, draft_probs, _ = decoder.grow()
        logits = decoder.target(decoder.tokens, place, decoder.frame.slots[1:])
        runs, seconds = {}, {"sequoia": [], "traversal": []}
        def verify():
            decoder.peaks = []                                           # as at the start of a step
            return decoder.verify(logits, draft_probs)
        for _ in range(11):
            for name, times in seconds.items():
                decoder.method = METHODS[name]
                runs[name] = runs.get(name) or decoder.captured(verify)
                start = decoder.clock()
                runs[name]()
                times.append(decoder.clock() - start)
    cost = np.median(seconds["traversal"]) - np.median(seconds["sequoia"])
    return "traversal" if cost < 0.01 * latency.step(tree.size, tree.depth) else "sequoia"


@dataclass(frozen=True)
class Plan:
    """The tree that promises the most tokens a second, and why."""
    tree: Tree
    tokens_per_step: float
    speedup: float                # over plain decoding
    runner_up: str

    def __str__(self):
        if self.tree.size == 1:
            return f"no tree: speculation does not pay here (runner-up: {self.runner_up})"
        return (f"{self.tree.size} nodes on {self.tree.depth} levels: {self.tokens_per_step:.2f} tokens a step expected, "
                f"{self.speedup:.2f} times plain decoding (runner-up: {self.runner_up})")


def plan(rates, latency: Latency, max_depth: int | None = None, max_branch: int | None = None) -> Plan:
    """The tree size n and depth d that maximise G(n, d) / (t(n) + (d - 1) c), over all sizes up to the largest timed one and
    all depths, by default up to twice a binary tree's, at once."""
    size = latency.sizes[-1]
    table = expected_tokens_table(rates, size, min(max_depth or 2 * size.bit_length(), size), max_branch)[1:, 1:]
    n, d = np.mgrid[1 : table.shape[0] + 1, 1 : table.shape[1] + 1]
    speed = np.where(table > 0, table, 0) / latency.step(n, d) * latency.step(1, 1)
    best = np.unravel_index(speed.argmax(), speed.shape)
    others = np.where(d == d[best], 0, speed)
    other = np.unravel_index(others.argmax(), speed.shape)
    return Plan(optimal_tree(rates, int(n[best]), int(d[best]), max_branch), float(table[best]), float(speed[best]),
                f"{n[other]}x{d[other]}, {speed[other]:.2f} times")


class Planner:
    """Chooses the trees for a pair on this machine, from the times it has measured and the acceptance it has counted.

    The times are kept in `file`, by default one for each pair, machine and way of sampling in the user's cache folder: they
    are measured once, and the same seed gives the same trees and so the same text. With them the `method` is kept that was
    found faster, where there was a choice. What is counted stays with this object unless `save` is called. `replan`: measure
    again. `adapt`: choose again, as the text grows, where another tree promises 3% more. From one call to the next it also
    keeps the decoder: on a GPU a step is recorded once for many texts. Meanwhile the models must not be changed; and it is for
    one call at a time."""

    def __init__(self, file=None, adapt: bool = True, replan: bool = False):
        self.file, self.adapt, self.replan = file and Path(file), adapt, replan
        self.acceptance, self.latency, self.method, self.chosen = Acceptance(), None, None, None
        self.steps, self.due, self.seconds = 0, 0, 0.0                   # steps seen, when to plan again, seconds of measuring
        self.decoder = None

    def reuse(self, decoder: Decoder) -> Decoder:
        """The decoder of an earlier call, with its caches and recorded step, if it was made from the same; else this one."""
        if self.decoder is None or self.decoder.needs_history or self.decoder.made_from != decoder.made_from:
            self.decoder = decoder
        return self.decoder

    def tree(self, decoder: Decoder, spec) -> Tree:
        """The tree for a text whose prompt this decoder has read: the one given, the best of all ("auto"), or the best of a
        size and depth. Where the method is to be chosen, the decoder gets it here."""
        if isinstance(spec, Tree):
            return spec
        self.max_branch = min(len(PRIOR), decoder.vocabulary)
        if spec == "auto":
            if self.latency is None:
                with decoder.rehearsal(seed=0):
                    self.restore(decoder)
            if decoder.asked == "auto" and self.method:
                decoder.method = METHODS[self.method]
        if not decoder.needs_history and self.acceptance.tried[0, 0] < 256:
            with decoder.rehearsal(seed=0):                              # the same whether times were measured or read
                self.look_at_prompt(decoder)
        if spec != "auto":
            return optimal_tree(self.acceptance.rates(levels=4), *map(int, spec.split("x")), max_branch=self.max_branch)
        self.choose()
        return self.chosen.tree

    def look_at_prompt(self, decoder):
        """What the logits of the prompt's own pass show, which counts while little else is known."""
        target_probs = decoder.target_probs(decoder.target.logits, [])                           # (positions, V)
        draft_probs = decoder.draft_probs(decoder.draft.logits, [])
        text = torch.cat([decoder.history[0], decoder.tokens[1:2]])[-len(target_probs):]         # what follows each position
        measure_acceptance(target_probs, draft_probs, decoder.method, 4, decoder.generator, self.acceptance, text)

    def learn(self, step: Step, spec) -> Tree | None:
        """Counts what a step has shown. Returns a better tree to go on with, where there is one."""
        self.acceptance.count_step(step)
        self.steps += 1
        return self.choose() if spec == "auto" else None

    def choose(self) -> Tree | None:
        """Plans, the first time and then whenever as much again has been seen. Returns the tree if it is a new one."""
        if self.chosen is None or self.adapt and self.steps >= self.due:
            self.due = self.steps + min(512, max(128, self.steps))
            best, rates = self.best(), self.acceptance.rates(levels=4)
            if self.steps > 1024:                                        # what was long ago counts less and less
                self.acceptance.tried, self.acceptance.accepted = self.acceptance.tried / 2, self.acceptance.accepted / 2
            if self.chosen is None or best.speedup > 1.03 * self.latency.speedup(self.chosen.tree, rates):
                self.chosen = best
                return best.tree

    def best(self) -> Plan:
        """The plan as things stand, with no more children a node than so small or large trees have use for."""
        max_branch = min(self.max_branch, 10 if self.latency.sizes[-1] <= 64 else 32)
        return plan(self.acceptance.rates(levels=4), self.latency, max_branch=max_branch)

    def restore(self, decoder):
        """Takes times, counts and method from the file; where it has none for just this, measures them, and keeps them."""
        self.made_for, kept = made_for(decoder), None
        self.file = self.file or file_for(self.made_for)
        if not self.replan and self.file.exists():
            try:
                kept = read_plan(self.file, self.made_for, self.acceptance.tried.shape)
            except (OSError, ValueError, KeyError, TypeError) as error:
                warnings.warn(f"the plan in {self.file} cannot be used and is measured anew: {type(error).__name__} {error}")
        if kept := decoder.agree(kept):
            self.latency, (self.acceptance.tried, self.acceptance.accepted), self.method = kept
        else:
            start = time.perf_counter()
            self.latency = measure_latency(decoder)
            self.method = faster_method(decoder, self.best().tree, self.latency) if decoder.asked == "auto" else None
            self.seconds = time.perf_counter() - start
            self.save()

    def save(self):
        """Keeps the times, and what was counted up to now, in the file; whole or not at all."""
        kept = {"made for": self.made_for, "latency": self.latency._asdict(), "method": self.method,
                "counts": [self.acceptance.tried.tolist(), self.acceptance.accepted.tolist()]}
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            half = self.file.with_suffix(f".{os.getpid()}")
            half.write_text(json.dumps(kept))
            half.replace(self.file)
        except OSError as error:
            warnings.warn(f"the plan cannot be kept: {error}")


def made_for(decoder: Decoder) -> dict:
    """All that a decoder's times and acceptance depend on, but for the text."""
    device = decoder.base.device
    device = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    models = [[one.model.config.name_or_path, one.model.num_parameters(), str(one.dtype), hasattr(one.model, "stream")]
              for one in (decoder.target, decoder.draft)]
    return dict(models=models, device=device, method=decoder.asked, sampling=numbers_of(decoder.processors),
                versions=[torch.__version__, transformers.__version__])


def file_for(made_for: dict) -> Path:
    """Where a plan is kept by default. A new version of a library replaces it."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sequoia"
    name = json.dumps({key: value for key, value in made_for.items() if key != "versions"})
    return folder / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"


def read_plan(file: Path, made_for: dict, shape) -> tuple[Latency, np.ndarray, str | None]:
    """What `Planner.save` has kept, the counts (2, *shape). Raises an error for what is damaged or made for something else."""
    kept = json.loads(file.read_text())
    if kept["made for"] != made_for:
        raise ValueError("it was made for other models, another machine, way of sampling or version")
    latency, counts = Latency(**kept["latency"]), np.array(kept["counts"], dtype=np.float64)
    for x, seconds in (latency[:2], latency[2:]):
        if not (len(x) == len(seconds) > 0 and min(seconds) > 0 and (np.diff(x) > 0).all() and np.isfinite(seconds).all()):
            raise ValueError("its times are not times")
    if counts.shape != (2, *shape) or not ((0 <= counts[1]) & (counts[1] <= counts[0])).all():
        raise ValueError("its counts are not counts")
    if (kept["method"] in ("sequoia", "traversal")) != (made_for["method"] == "auto"):
        raise ValueError("its method is not one to choose from")
    return latency, counts, kept["method"]


# ----------------------------------------------------------------------------------------------------------------------
# 9  decode, the loop behind model.generate


@torch.inference_mode()                          # not no_grad, which costs every one of a pass's thousand operators more
def decode(model, input_ids, logits_processor, stopping_criteria, generation_config, streamer=None, draft=None, tree="auto",
           method="auto", generator=None, planner=None, on_step=None, observe=None, cuda_graph=True, **model_kwargs):
    """Tree speculative decoding, to be handed to transformers:

        target.generate(**inputs, custom_generate=sequoia.decode, draft=draft, do_sample=True, temperature=0.6)

    draft: a model over the same vocabulary. tree: a Tree, or what `parse_tree` reads; "auto" is planned for this pair and
    machine. method: a name from METHODS; "auto" is traversal where the planner finds it faster, else sequoia. generator: where
    the randomness comes from, by default torch's own. planner: a Planner, to learn from one call to the next. on_step: called
    with each Step; observe: with each verification of a node's children, as `Method.verify` does, or of a tree, as `Traversal`
    does. cuda_graph: on a GPU, record the step once and replay it. The rest is what `generate` prepares: its processors shape
    both models' distributions, its stopping criteria are asked after every token. A batch is decoded row by row. Raises
    ValueError for what cannot be decoded this way."""
    config, limit = generation_config, getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if config.num_beams not in (None, 1):
        raise ValueError(f"tree speculation samples or is greedy; num_beams must be 1, got {config.num_beams}")
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, name, None):
            raise ValueError(f"{name}=True is not supported: a step's passes do not line up with the emitted tokens")
    if "inputs_embeds" in model_kwargs or (past := model_kwargs.get("past_key_values")) and past.get_seq_length() > 0:
        raise ValueError("tree speculation starts from input_ids alone; got inputs_embeds or a filled past_key_values")
    if input_ids.shape[1] == 0:
        raise ValueError("the prompt is empty; give it at least one token")
    if limit and input_ids.shape[1] > limit:
        raise ValueError(f"the prompt has {input_ids.shape[1]} tokens, but the model's context only {limit}; shorten it")
    tree, planner = parse_tree("none" if draft is None and tree == "auto" else tree), planner or Planner()
    if draft is None and tree != Tree([-1]):
        raise ValueError("a tree of more than its root needs a draft model; pass draft=..., or tree='none'")
    decoder = planner.reuse(Decoder(model, draft, input_ids.device, method, logits_processor, not config.do_sample, generator,
                                    cuda_graph, observe))
    mask = model_kwargs.get("attention_mask")
    if streamer is not None:
        streamer.put(input_ids.cpu())
    rows, ended = [], stop_check(stopping_criteria, input_ids.device)
    for i, row in enumerate(input_ids):
        prompt = row if mask is None else row[mask[i].bool()]
        decoder.begin(prompt, row[None], config.max_length, (i, len(input_ids)), keep=64)
        text = row.tolist()
        for token in decoder.tokens_with(tree, planner, on_step):
            text.append(token)
            if streamer is not None:
                streamer.put(torch.tensor([token]))
            if ended(text):
                break
        rows.append(text)
    if streamer is not None:
        streamer.end()
    pad, length = int(config._pad_token_tensor or 0), max(map(len, rows))
    with torch.inference_mode(False):                                    # an ordinary tensor, which may be changed
        output = torch.tensor([row + [pad] * (length - len(row)) for row in rows], device=input_ids.device)
    return GenerateDecoderOnlyOutput(sequences=output) if config.return_dict_in_generate else output


def stop_check(criteria, device) -> Callable[[list], bool]:
    """Whether a text has ended, asked after every token: so what every call has, a length and ends of sequence, is looked up
    in Python, and only other criteria are given tensors."""
    lengths = [one.max_length for one in criteria if type(one) is MaxLengthCriteria]
    ends = {int(end) for one in criteria if type(one) is EosTokenCriteria for end in one.eos_token_id.flatten()}
    others = StoppingCriteriaList(one for one in criteria if type(one) not in (MaxLengthCriteria, EosTokenCriteria))
    return lambda text: (text[-1] in ends or len(text) >= min(lengths, default=sys.maxsize)
                         or len(others) > 0 and bool(others(torch.tensor([text], device=device), None).all()))


def generate(target, draft, input_ids, *, streamer=None, tokenizer=None, stop_strings=None, stopping_criteria=(), **kwargs):
    """`target.generate(input_ids, custom_generate=decode, draft=draft, ...)` with what transformers does not pass on to a
    custom loop: a streamer, and stop_strings with their tokenizer."""
    criteria = StoppingCriteriaList(stopping_criteria)
    if stop_strings is not None:
        if tokenizer is None:
            raise ValueError("stop_strings need the tokenizer; pass tokenizer=...")
        criteria.append(StopStringCriteria(tokenizer, stop_strings))
    return target.generate(input_ids, custom_generate=functools.partial(decode, streamer=streamer), draft=draft,
                           stopping_criteria=criteria, **kwargs)


def parse_tree(spec) -> "Tree | str":
    """A tree from its description: sequences:KxL, kary:KxD, none (the root alone: plain decoding). auto and SIZExDEPTH stay
    text, since the optimal tree depends on the pair."""
    if isinstance(spec, Tree) or spec == "auto":
        return spec
    if spec == "none":
        return Tree([-1])
    kind, _, numbers = str(spec).rpartition(":")
    try:
        a, b = map(int, numbers.split("x"))
        _at_least_one(size=a, depth=b)
        return {"": "{}x{}".format, "sequences": sequences, "kary": k_ary}[kind](a, b)
    except (KeyError, ValueError) as error:
        raise ValueError(f"a tree is auto, SIZExDEPTH, sequences:KxL, kary:KxD or none, got {spec!r}") from error


# ----------------------------------------------------------------------------------------------------------------------
# 10  The command line


RANK, RANKS = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))     # of torchrun
TINY = Path(__file__).resolve().parent / "tiny"
PROMPT = 'class Stack:\n    """A last-in, first-out collection."""\n\n    def __init__(self):'


def arguments(argv=None):
    """What the command line says."""
    parser = argparse.ArgumentParser(
        prog="sequoia.py", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Decodes text with a target model, sped up by a draft model's tree of tokens. The text is distributed\n"
                    "exactly as the target's own; greedy, it is the same text.",
        epilog="python sequoia.py\n"
               "python sequoia.py --temperature 0 --compare\n"
               "python sequoia.py --target meta-llama/Llama-2-7b-hf --draft JackFram/llama-68m --prompt @question.txt")
    add = parser.add_argument
    add("command", nargs="?", default="decode", choices=("decode", "plan"), help="decode a prompt, or only plan: time the "
        "pair, count on the prompt and its continuation what is accepted, show the curves, and keep the plan (decode)")
    add("--target", default=os.path.relpath(TINY / "target"), help="the model to decode with: a folder or hub name (bundled)")
    add("--draft", default=os.path.relpath(TINY / "draft"), help="the small model that proposes, of the same tokens (bundled)")
    add("--prompt", default=PROMPT, help="the text to go on from, @FILE, or - for standard input (the head of a Python class)")
    add("--chat", action="store_true", help="put the prompt through the target's chat template, as the user's turn")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="(128)")
    add("--temperature", type=float, default=0.6, metavar="T", help="0 is greedy (0.6)")
    add("--top-p", type=float, metavar="P", help="keep the likeliest tokens that have this much probability together")
    add("--top-k", type=int, metavar="K", help="keep the K likeliest tokens")
    add("--min-p", type=float, metavar="P", help="keep tokens at least this likely, relative to the likeliest")
    add("--seed", type=int, default=0, help="the same seed and plan give the same text (0)")
    add("--method", default="auto", choices=["auto", *METHODS], help="how a node's children are drawn and verified (auto: "
                                                                     "traversal where the plan finds it faster, else sequoia)")
    add("--tree", default="auto", help="auto (planned for the pair and the machine), SIZExDEPTH (the optimal tree of that "
                                       "many nodes and levels), sequences:KxL, kary:KxD, or none: plain decoding (auto)")
    add("--plan", metavar="FILE", help="where the measured times are kept (a file for each pair in the user's cache folder)")
    add("--replan", action="store_true", help="measure the times again, and keep what this text shows of the acceptance")
    add("--no-adapt", dest="adapt", action="store_false", help="do not plan again as evidence comes in")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(cuda where there is one, else cpu)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="(bfloat16 where the processor has it, else float32)")
    add("--offload", action="store_true", help="stream the target's layers: to a GPU from host memory, on a CPU from disk")
    add("--offload-buffers", type=int, default=2, metavar="N", help="layers on the device at a time (2)")
    add("--offload-resident", default="auto", metavar="N", help="layers kept on the device (auto: all that fit; CPU: none)")
    add("--compile", action="store_true", help="on a GPU, compile both models' passes: a longer start, shorter steps")
    add("--no-cuda-graph", dest="cuda_graph", action="store_false", help="on a GPU, run each step operator by operator")
    add("--show-tree", action="store_true", help="draw each step's tree with its tokens, the accepted path in [brackets]")
    add("--explain", action="store_true", help="slow motion: every child tried, its chances, the random number that decided")
    add("--compare", action="store_true", help="also time transformers' generate and assisted generation, and plain decoding")
    add("--json", action="store_true", help="print one JSON object and nothing else")
    args = parser.parse_args(argv)
    for name, least in (("max_new_tokens", 1), ("temperature", 0), ("top_k", 1)):
        if (value := getattr(args, name)) is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    for name in ("top_p", "min_p"):
        if (value := getattr(args, name)) is not None and not 0 < value <= 1:
            raise ValueError(f"--{name.replace('_', '-')} must be above 0 and at most 1, got {value}")
    if args.offload_resident.isdigit():
        args.offload_resident = int(args.offload_resident)
    if args.compare and (args.offload or RANKS > 1):
        raise ValueError("--compare needs the whole target on one device; leave out --offload and torchrun, or --compare")
    if args.offload and RANKS > 1:
        raise ValueError("--offload is for one process; under torchrun the target is shared out instead")
    parse_tree(args.tree)
    return args


def read_prompt(args, tokenizer) -> Tensor:
    """The prompt's token ids, (1, length)."""
    text = args.prompt
    if text == "-":
        text = sys.stdin.read()
    elif text.startswith("@"):
        text = Path(text[1:]).read_text(encoding="utf-8")
    if args.chat:
        if not tokenizer.chat_template:
            raise ValueError(f"--chat needs a chat template, and the tokenizer of {args.target} has none")
        turns = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=not args.chat)["input_ids"].long()
    if ids.shape[1] == 0:
        raise ValueError("the prompt is empty; give it at least one token of text")
    return ids.to(args.device)


def load(name: str, args, say, packed: bool = True, large: bool = False):
    """A model in evaluation mode on the chosen device; on a CPU its weights packed. A large one is offloaded, or shared out
    among torchrun's ranks, if that is asked for."""
    say(f"loading {name}")
    dtype = args.dtype or ("bfloat16" if args.device != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32")
    try:
        config = AutoConfig.from_pretrained(name)
        if config.is_encoder_decoder:
            raise ValueError(f"{name} is an encoder-decoder model; trees of tokens need a decoder-only model")
        dtype = getattr(torch, dtype)
        if large and args.offload:
            model = load_offloaded(name, dtype, args.device, args.offload_resident, args.offload_buffers)
        elif large and RANKS > 1:
            model = load_sharded(name, dtype)
        else:
            model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(args.device).eval()
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"cannot load {name}: {reason} (no network, a gated repository, or a wrong name?)") from error
    check_model(model)
    worth = args.compile or model.device.type == "cpu"
    return pack(model) if packed and worth and not (large and RANKS > 1) else model


def load_tokenizer(args, say=lambda text: None):
    """The target's tokenizer; the draft's must have the same tokens."""
    tokenizers = []
    for name in dict.fromkeys((args.target, args.draft)):
        if name.startswith((".", "/", "~")) and not Path(name).expanduser().is_dir():
            raise ValueError(f"there is no folder {name}; give one in Hugging Face format, or a hub name such as org/model")
        say(f"loading the tokenizer of {name}")
        try:
            tokenizers.append(AutoTokenizer.from_pretrained(name))
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(f"cannot load the tokenizer of {name}: {reason} (no network, or a wrong name?)") from error
    if tokenizers[0].get_vocab() != tokenizers[-1].get_vocab():
        raise ValueError(f"{args.target} and {args.draft} have different tokenizers; a draft must share its target's tokens")
    return tokenizers[0]


class Printer:
    """A streamer that prints text as it is accepted; on a terminal the draft's tokens in colour. It remembers the steps."""

    def __init__(self, tokenizer, stream=None, color=False, show_tree=False, explain=False):
        self.tokenizer, self.stream, self.color, self.show_tree, self.explain = tokenizer, stream, color, show_tree, explain
        self.steps, self.stamps, self.ids, self.pending, self.from_draft = [], [], None, [], 0
        self.start = time.perf_counter()
        self.walked = []                                                 # for `explain`: the texts of this step's nodes so far

    def on_step(self, step: Step):
        self.steps.append(step)
        self.stamps.append(time.perf_counter())
        self.from_draft = len(step.path)
        last = step.path[-1] if step.path else 0
        if self.explain:
            if self.walked and not step.tree.children[last]:
                childless, drawn = self.text(step.node_tokens[last]), self.text(step.token)
                print(f"  {childless} has no children: {drawn} is drawn from the target")
            print(f"step {len(self.steps)} emits {' '.join(map(self.text, step.tokens))}\n")
            self.walked = []
        if self.show_tree:
            accepted = {0, *step.path}
            texts = [self.text(token)[1:-1] for token in step.node_tokens]
            labels = [f"[{text}]" if node in accepted else text for node, text in enumerate(texts)]
            print(f"step {len(self.steps)}: {len(step.path)} accepted, then {self.text(step.token)}")
            print(step.tree.draw(labels), end="\n\n")

    def text(self, token):
        return repr(self.tokenizer.decode([int(token)]))

    def observe(self, method, *what):
        """Prints what happened: at a node, child by child; with traversal in a tree, node by node."""
        (self.observe_tree if isinstance(method, Traversal) else self.observe_node)(method, *what)

    def observe_node(self, method, target_probs, draft_probs, tokens, noise, ratios, rank, token):
        self.walked = self.walked or [self.text(self.ids[-1])]
        residual, draft = target_probs, draft_probs + EPSILON
        print(f"  after {self.walked[-1]}")
        for i, child in enumerate(tokens[0, : tokens.shape[1] if rank < 0 else int(rank) + 1]):
            print(f"    child {self.text(child):<14} target {residual[0, child]:.3f}  draft {draft[0, child]:.3f}  ratio "
                  f"{ratios[0, i]:6.3f}  random {noise[0, i]:.3f}  {'accepted' if i == rank else 'rejected'}")
            if i == rank:
                self.walked.append(self.text(child))
            elif method.ratios is not _ratios_of_spectr or i == tokens.shape[1] - 1:     # SpecTr has one residual, at the end
                residual = method.ratios(target_probs, draft_probs, tokens[:, : i + 1], [1] * (i + 1), None)[1]
                print(f"          left of the target: {self.likeliest(residual[0])}")
                if method.propose is sample_without_replacement:
                    draft = _without(draft, tokens[:, i : i + 1])
        if rank < 0:
            print(f"    no child is left: {self.text(token)} is drawn from what is left of the target")

    def observe_tree(self, method, layout, tokens, mass, noise, residual, node, token):
        print(f"  after {self.text(tokens[0])}, from the leaves up: the first to accept wins")
        for one in layout.post_order.tolist():
            path = " ".join(self.text(tokens[i]) for i in layout.paths[one]) or "the root"
            print(f"    {path:<30} mass {mass[one]:.3f}  random {noise[one]:.3f}  {'accepted' if one == node else 'rejected'}")
            if one == node:
                break
        print(f"          left of the target: {self.likeliest(residual[int(node)])}, of which {self.text(token)} is drawn")

    def likeliest(self, probs, k: int = 3):
        best = zip(*(x.tolist() for x in probs.topk(k)))
        return "  ".join(f"{self.text(token)} {p:.3f}" for p, token in best if p > 0)

    def put(self, value):
        if self.ids is None:                                             # the prompt
            self.ids = []
            return
        token, drafted = int(value), self.from_draft > 0
        self.from_draft -= drafted
        if self.explain and not self.ids:
            print(f"{self.text(token)} is drawn from the target: the prompt's own pass gives the first token\n")
        self.ids.append(token)
        self.pending.append(token)
        text = self.tokenizer.decode(self.pending)
        if not text.endswith("\ufffd"):                                  # half a character: wait for the rest of it
            self.pending = []
            if self.stream and not self.show_tree and not self.explain:
                print(f"\033[32m{text}\033[0m" if drafted and self.color else text, end="", flush=True, file=self.stream)

    def end(self):
        self.seconds = time.perf_counter() - self.start


def main(argv=None) -> int:
    """Returns the exit code: 0, 1 where another of torchrun's ranks has failed, 2 for a wrong request, 130 after Ctrl-C."""
    try:
        with contextlib.redirect_stdout(open(os.devnull, "w") if RANK else sys.stdout):
            code = run(arguments(argv))
        if RANKS > 1:
            torch.distributed.destroy_process_group()
        return code
    except (ValueError, OSError) as error:
        print(f"sequoia.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if RANKS == 1:
            raise
        print(f"sequoia.py: rank {RANK} cannot go on (has another ended?): {str(error).splitlines()[0]}", file=sys.stderr)
        return 1


def run(args) -> int:
    be_quiet()
    args.device = join_ranks(args.device)
    say = (lambda text: None) if args.json or RANK else functools.partial(print, file=sys.stderr, flush=True)
    tokenizer = load_tokenizer(args, say)
    ids = read_prompt(args, tokenizer)
    drafting = args.tree != "none" or args.command == "plan"
    draft = load(args.draft, args, say) if drafting else None            # first: what it leaves free is the target's
    target = load(args.target, args, say, large=True)
    sampling = sampling_of(args, ids, target)
    planner = Planner(args.plan, args.adapt, args.replan or args.command == "plan")
    generator = torch.Generator(args.device)                             # one, so that the planner can keep the decoder

    def decode_once(tree, printer=None, planner=planner, **changed):
        return generate(target, draft, ids, tree=tree, method=args.method, planner=planner, cuda_graph=args.cuda_graph,
                        generator=generator.manual_seed(args.seed), streamer=printer, on_step=printer and printer.on_step,
                        observe=printer.observe if printer and args.explain else None, **{**sampling, **changed})

    stream = None if args.json or args.command == "plan" else sys.stdout
    printer = Printer(tokenizer, stream, sys.stdout.isatty() and "NO_COLOR" not in os.environ, args.show_tree, args.explain)
    interrupted = False
    try:
        if stream:
            print(tokenizer.decode(ids[0]), end="\n\n" if args.explain or args.show_tree else "", flush=True)
        decode_once("auto" if args.command == "plan" else args.tree, printer)
    except KeyboardInterrupt:
        printer.end()
        interrupted = True
    if planner.latency and planner.replan:
        planner.save()
    if args.command == "plan" and not interrupted:
        return print_plan(args, planner)
    result = summary(args, printer, planner, tokenizer, target)
    if args.compare and not interrupted:
        result.update(compare(args, ids, sampling, decode_once, say))
    if args.json:
        print(json.dumps(result))
    else:
        print_summary(result, planner)
    return 130 if interrupted else 0


def be_quiet():
    """What the libraries say is left out: a hub out of reach is one line of ours, at the end."""
    transformers.utils.logging.set_verbosity_error()
    warnings.formatwarning = lambda message, *_: f"sequoia.py: {message}\n"
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()


GREEDILY = dict(do_sample=False, temperature=None, top_p=None, top_k=None, min_p=None)


def sampling_of(args, ids, target) -> dict:
    """What transformers' generate is told. Raises ValueError for a prompt that fills the target's context."""
    context = getattr(target.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    if ids.shape[1] >= context:
        raise ValueError(f"the prompt has {ids.shape[1]} tokens, but the model's context only {context}; shorten it")
    sampling = dict(do_sample=True, temperature=args.temperature, top_p=args.top_p, top_k=args.top_k or 0, min_p=args.min_p)
    return dict(sampling if args.temperature else GREEDILY, attention_mask=torch.ones_like(ids),
                max_new_tokens=min(args.max_new_tokens, context - ids.shape[1]))


def summary(args, printer, planner, tokenizer, target) -> dict:
    steps, ids, seconds = printer.steps, printer.ids or [], printer.seconds - planner.seconds
    tree = steps[-1].tree if steps else Tree([-1])
    each = float(np.median(np.diff(printer.stamps))) if len(steps) > 1 else None                # without the prompt's pass
    return dict(
        text=tokenizer.decode(ids), token_ids=ids, new_tokens=len(ids), steps=len(steps),
        tokens_per_step=sum(len(step.tokens) for step in steps) / max(1, len(steps)), seconds=seconds,
        step_seconds=each, planning_seconds=planner.seconds, tokens_per_second=len(ids) / seconds,
        tree=dict(size=tree.size, depth=tree.depth, paths=tree.paths()),
        acceptance_rates=[round(float(rate), 4) for rate in planner.acceptance.rates()],
        method=planner.method or args.method.replace("auto", "sequoia"), temperature=args.temperature, seed=args.seed,
        device=args.device, dtype=str(target.dtype)[6:], plan=planner.chosen and str(planner.chosen))


COMPARED = dict(generate="transformers' generate", assisted="its assisted generation", plain="plain decoding here, no tree")


def print_summary(result, planner):
    tree = result["tree"]
    print(f"\n\n{result['new_tokens']} tokens in {result['steps']} steps, {result['tokens_per_step']:.2f} tokens a step, "
          f"{result['tokens_per_second']:.1f} tokens a second")
    print(f"tree: {tree['size']} nodes on {tree['depth']} levels; method: {result['method']}, temperature "
          f"{result['temperature']:g}, seed {result['seed']}, {result['dtype']} on {result['device']}")
    if result["plan"]:
        measured = f", measured in {planner.seconds:.1f} s and kept" if planner.seconds else ""
        print(f"plan: {result['plan']}{measured}")
        promised = planner.latency.step(tree["size"], tree["depth"])
        if not 0.5 < (slower := (result["step_seconds"] or promised) / promised) < 2:
            print(f"a step took {slower:.1f} times as long as when the plan was made; --replan measures again")
    for name, rival in COMPARED.items():
        if name in result:
            speed, times = result[name]["tokens_per_second"], result[f"speedup_over_{name}"]
            print(f"{times:6.2f} times {rival}, which makes {speed:.1f} tokens a second")
    if "greedy_identical" in result:
        print(f"greedy output {'identical to' if result['greedy_identical'] else 'differs from'} transformers' generate")


def print_plan(args, planner) -> int:
    best, latency, rates = planner.best(), planner.latency, planner.acceptance.rates()
    if args.json:
        print(json.dumps(dict(latency=latency._asdict(), acceptance_rates=rates.tolist(), size=best.tree.size,
                              depth=best.tree.depth, paths=best.tree.paths(), tokens_per_step=best.tokens_per_step,
                              speedup=best.speedup, runner_up=best.runner_up, file=str(planner.file))))
        return 0
    for label, values, form in (("target: tokens in a pass", latency.sizes, ".0f"), ("        ms", latency.target, ".2f"),
                                ("draft: tokens on a level", latency.widths, ".1f"), ("       ms", latency.draft, ".2f"),
                                ("acceptance: child", range(1, 9), ".0f"), ("            rate", rates[:8], ".3f")):
        print(f"{label:<26}" + "".join(f"{1e3 * value if label.endswith('ms') else value:>8{form}}" for value in values))
    print(f"\n{best}\n\n{best.tree}\n\nkept in {planner.file}")
    return 0


def compare(args, ids, sampling, decode_once, say, rounds: int = 3) -> dict:
    """Times this file against transformers on the models as it loads them, in turns; medians of tokens a second."""
    target, draft = (load(name, args, say, packed=False) for name in (args.target, args.draft))
    def theirs(**kwargs):
        torch.manual_seed(args.seed)
        return target.generate(ids, **{**sampling, **kwargs})
    plain = Planner()
    runs = dict(generate=theirs, assisted=lambda: theirs(assistant_model=draft),
                plain=lambda: decode_once("none", planner=plain), tree=lambda: decode_once(args.tree))
    speeds = {name: [] for name in runs}
    for _ in range(rounds + 1):                                          # the first round warms up
        for name, run_once in runs.items():
            start = time.perf_counter()
            tokens = run_once().shape[1] - ids.shape[1]
            speeds[name].append(tokens / (time.perf_counter() - start))
    speeds = {name: float(np.median(values[1:])) for name, values in speeds.items()}
    result = {name: dict(tokens_per_second=speeds[name]) for name in COMPARED}
    result.update({f"speedup_over_{name}": speeds["tree"] / speeds[name] for name in COMPARED})
    result["greedy_identical"] = torch.equal(decode_once(args.tree, **GREEDILY), theirs(**GREEDILY))
    return result


if __name__ == "__main__":
    sys.exit(main())
