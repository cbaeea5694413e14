"""Sequoia: tree speculative decoding, lossless, in one file.

A small draft model proposes a tree of tokens, the target model scores the whole tree in one forward pass, and
a verification rule keeps a path of it, so that every token has exactly the target's distribution. A target
bound by memory reads its weights once a step, whether it scores one token or sixty-four: a step that yields
three tokens is three times as fast. Two things limit it: the draft runs once for each level below the root,
and a large tree is not free, as the target computes longer than it reads. With t(n) seconds for a step of n
nodes and c for a draft pass, a tree on d levels is F(T) t(1) / (t(n) + (d - 1) c) times as fast as no tree.

The method is "Sequoia: Scalable and Robust Speculative Decoding" (NeurIPS 2024, arXiv 2402.12374):

    paper            here                        where
    T                Tree, tree                  section 3.1, a token tree; its root is the text's last token
    P[k], p_k        acceptance_rates[k - 1]     Definition 3.2, the chance that the k-th child is accepted
    F(T)             expected_tokens             Proposition 3.4
    T[n, d, b]       T[b][n] in _best_subtrees   equation 1; appendix for depth d; over all b it is G(n, d)
    P, Q             P, Q; Decoder.probs         Algorithm 2, target's and draft's distributions after a text
    R, D             R (residual), D             Algorithm 2, what rejections have left of P and of Q
    t(n), c          Latency                     section 4, seconds: a step less draft passes; a draft pass

Sections 1 to 6 are the method: token trees, the dynamic program, sampling, verification, the tree on the
device, decoding. 7 plans, 8 makes passes fast or small, 9 is the command line. Each uses what stands above
it; only the decoder calls the planner. Left out: training drafts, batched serving, recurrent models.

    python sequoia.py                                            # decodes with the bundled pair
    target.generate(**inputs, custom_generate=sequoia.decode, draft=draft)     # in your own code
"""
import argparse
import functools
import inspect
import operator
import os
import re
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers import StoppingCriteriaList, StopStringCriteria, TextStreamer
from transformers.cache_utils import Cache, StaticLayer
from transformers.distributed import DistributedConfig
from transformers.generation import GenerateDecoderOnlyOutput


# --- 1  Token trees (section 3.1) ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Tree:
    """The shape of a token tree: for each node, the index of its parent.

    Nodes stand in level order: the root first (its parent is -1), parents before children, siblings together
    in rank order (the draft's first choice first). So parents never decrease; else it is a ValueError.

    >>> print(Tree([-1, 0, 0, 0, 1, 1, 4]))
    0─┬─1─┬─4──6
      │   └─5
      ├─2
      └─3

    size, depth: the numbers of nodes and levels, the root's included. depths, ranks, children, (size,): each
    node's level, its position among its siblings, from 0, and its children in rank order."""
    parents: tuple[int, ...]

    def __post_init__(self):
        parents, depths, ranks, children = tuple(map(operator.index, self.parents)), [0], [0], [[]]
        if parents[:1] != (-1,):
            raise ValueError(f"a tree starts with its root, whose parent is -1; got parents {parents[:8]}")
        for node, (elder, parent) in enumerate(zip(parents, parents[1:]), 1):
            if not max(0, elder) <= parent < node:
                raise ValueError(f"nodes must be in level order: the parent of node {node} must be from "
                                 f"{max(0, elder)} to {node - 1}, got {parent}")
            depths.append(depths[parent] + 1)
            ranks.append(len(children[parent]))
            children[parent].append(node)
            children.append([])
        # The instance is frozen, its dictionary is not.
        vars(self).update(parents=parents, size=len(parents), depth=depths[-1] + 1, depths=tuple(depths),
                          ranks=tuple(ranks), children=tuple(map(tuple, children)))

    @classmethod
    def from_paths(cls, paths) -> "Tree":
        """The inverse of `paths`: (0,), (1,), (0, 0) are the root's first two children and the first one's
        first child. Raises ValueError where a parent or an elder sibling is missing."""
        nodes = sorted({tuple(path) for path in paths} | {()}, key=lambda path: (len(path), path))
        for path in nodes[1:]:
            needed = path[:-1] + (path[-1] - 1,) if path[-1] else path[:-1]
            if needed not in nodes:
                raise ValueError(f"path {path} needs {needed}, its parent or elder sibling, in the tree")
        return cls([nodes.index(path[:-1]) if path else -1 for path in nodes])

    def paths(self) -> list[tuple[int, ...]]:
        """Every node but the root as its ranks from the root down, in level order."""
        paths = [()]
        for parent, rank in zip(self.parents[1:], self.ranks[1:]):
            paths.append((*paths[parent], rank))
        return paths[1:]

    @functools.cached_property
    def mask(self) -> Tensor:
        """Who may attend to whom, (size, size) bool: mask[i, j] where j is i or an ancestor of i."""
        mask = np.eye(self.size, dtype=bool)
        for node, parent in enumerate(self.parents[1:], 1):
            mask[node] |= mask[parent]
        return torch.from_numpy(mask)

    def draw(self, labels) -> str:
        """The tree as text, a line for each leaf, its nodes shown by these labels, (size,) strings."""
        # Each entry: a node, what stands before it on its line, and on the lines below.
        lines, stack = [], [(0, "", "")]
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
    """The full tree of `depth` levels in which every node above the last has `k` children."""
    _at_least_one(k=k, depth=depth)
    return Tree([-1] + [node // k for node in range(sum(k**level for level in range(1, depth)))])


def _at_least_one(**values):
    for name, value in values.items():
        if value is not None and (not isinstance(value, (int, np.integer)) or value < 1):
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


# --- 2  Tree construction: the dynamic program (section 3.1, equation 1; appendix) --------------------------


def expected_tokens(tree: Tree, acceptance_rates) -> float:
    """F(T), the tokens that a step with this tree yields on average (Proposition 3.4): the sum over its nodes
    of the product of the acceptance rates on the way from the root. Rates as in `optimal_tree`.

    Why a sum: a step yields a token for each node that verification reaches. The root stands for the target's
    own token, which ends the path. A node is reached if all on the way to it are accepted. The expected
    number of events that happen is the sum of their chances, however they depend on one another."""
    rates, chance = _check_rates(acceptance_rates), [1.0]
    for node, parent in enumerate(tree.parents[1:], 1):
        level, rank = min(tree.depths[parent], len(rates) - 1), tree.ranks[node]
        chance.append(chance[parent] * rates[level, rank] if rank < rates.shape[1] else 0.0)
    return float(sum(chance))


def expected_tokens_table(acceptance_rates, size: int, depth: int, max_branch=None) -> np.ndarray:
    """G(n, d), the expected tokens of the best tree of exactly n nodes on at most d levels, for all n and d:
    (size + 1, depth + 1) float64, -inf where there is no such tree. Arguments as in `optimal_tree`."""
    best = _best_subtrees(acceptance_rates, size, depth, max_branch)
    return np.stack([np.full(size + 1, -np.inf), *(best(0, d)[0] for d in range(1, depth + 1))], axis=1)


def optimal_tree(acceptance_rates, size: int, depth: int | None = None, max_branch=None) -> Tree:
    """The tree of exactly `size` nodes, on at most `depth` levels and with at most `max_branch` children a
    node, that has the most expected tokens.

    acceptance_rates: (ranks,), the chance that a node's first, second, ... child is accepted; or (levels,
    ranks), rates[d] for the children of a node on level d, the last row for all deeper levels too. They need
    not decrease. Raises ValueError for rates that are no probabilities and sizes that no such tree can have.

    >>> optimal_tree([0.6, 0.2, 0.1], size=5).paths()
    [(0,), (1,), (0, 0), (0, 0, 0)]
    """
    best = _best_subtrees(acceptance_rates, size, depth, max_branch)
    # From the last row's level down a table follows from that with a level less: two equal, and all are.
    last, more = len(np.atleast_2d(acceptance_rates)) - 1, 1
    while more < min(size, depth or size) and (best(last, more)[0] != best(last, more + 1)[0]).any():
        more += 1
    depth = min(depth or last + more, last + more)
    possible = np.isfinite(best(0, depth)[0]).nonzero()[0]
    if size not in possible:
        raise ValueError(f"no such tree has {size} nodes: the largest has {possible.max()}")
    parents, nodes = [-1], [(0, size)]
    # The list of each node's level and its subtree's size grows while it is read.
    for node, (level, n) in enumerate(nodes):
        _, branch, given = best(min(level, last), depth - level)
        subtrees = []
        for b in reversed(range(branch[n])):
            subtrees.insert(0, int(given[b][n]))
            n -= subtrees[0]
        nodes.extend((level + 1, m) for m in subtrees)
        parents.extend([node] * len(subtrees))
    return Tree(parents)


def _best_subtrees(acceptance_rates, size, depth, max_branch) -> Callable:
    """A function of a level and a number of levels: the best subtrees rooted on that level, of n nodes for
    all n up to `size`. With b children of their root, and P its level's acceptance rates, their value is

        T(n, b) = max over m of  T(n - m, b - 1) + P[b] G(m)                                  (equation 1)

    where the b-th child gets m nodes, and G(m) is the maximum over b on the level below. The function returns
    G(n) and the b that attains it, (size + 1,) each, and each child's m, (children, size + 1). One child
    costs n^2 additions, all m for all n (half would do, m <= n): so trees of up to d levels and b children a
    node cost d b n^2, for each row of rates."""
    _at_least_one(size=size, depth=depth, max_branch=max_branch)
    rates = _check_rates(acceptance_rates)[:, :max_branch]
    n_minus_m = np.subtract.outer(np.arange(size + 1), np.arange(size + 1))

    @functools.cache
    def best(level, depth):
        T, given = [np.full(size + 1, -np.inf)], []
        # T(1, 0): the root alone.
        T[0][1] = 1.0
        # The last row holds for all deeper levels.
        G = best(min(level + 1, len(rates) - 1), depth - 1)[0] if depth > 1 else None
        for rate in rates[level] if depth > 1 else ():
            # Subtle: a rate of 0 times a value of -inf would be NaN.
            gain = np.where(G > 0, rate * G.clip(0), -np.inf)
            # sums[n, m] = T(n - m, b - 1) + P[b] G(m). A negative n - m finds the -inf at the end.
            sums = np.append(T[-1], np.full(size, -np.inf))[n_minus_m] + gain
            given.append(sums.argmax(axis=1))
            T.append(sums.max(axis=1))
        return np.max(T, axis=0), np.argmax(T, axis=0), given
    return best


def _check_rates(acceptance_rates) -> np.ndarray:
    rates = np.asarray(acceptance_rates, dtype=np.float64)
    if rates.ndim not in (1, 2) or rates.shape[:-1] == (0,) or not ((0 <= rates) & (rates <= 1)).all():
        raise ValueError(f"acceptance_rates must be finite, in [0, 1], of shape (ranks,) or (levels, ranks), "
                         f"got {rates.shape}")
    if (total := rates.sum(axis=-1).max()) > 1 + 1e-6:
        raise ValueError(f"the acceptance_rates of a level sum to {total:.4f}, but at most one is accepted")
    return np.atleast_2d(rates)


# --- 3  Sampling (section 3.2, Algorithm 2 line 5) ----------------------------------------------------------

# What a draft gives every token at least. It counts only where nothing else is left.
EPSILON = 1e-30


def sample_without_replacement(probs: Tensor, k: int, generator: torch.Generator | None = None) -> Tensor:
    """k different tokens a row, (rows, V) -> (rows, k), each drawn from what the earlier ones leave.

    Why sorting exponential noise does it: with E_i exponential, E_i / p_i is an arrival time, and token i
    comes first with probability p_i / sum p. Arrivals have no memory, so the next is drawn likewise among the
    others. Subtle: noise of 24 bits would hardly draw a token of probability below 6e-8, hence float64."""
    log = torch.rand(probs.shape, generator=generator, dtype=torch.float64, device=probs.device).log_()
    return (log / (probs + EPSILON)).topk(k).indices


def sample_with_replacement(probs: Tensor, k: int, generator: torch.Generator | None = None) -> Tensor:
    """k independent tokens a row, (rows, V) -> (rows, k), -1 where none is possible or there is a NaN. The
    rows need not sum to 1. Subtle: torch.multinomial makes the host wait, which a CUDA graph cannot hold."""
    cumulated = probs.cumsum(dim=1, dtype=torch.float64)
    total = cumulated[:, -1:]
    uniform = torch.rand((len(probs), k), generator=generator, dtype=torch.float64, device=probs.device)
    tokens = torch.searchsorted(cumulated, uniform * total, right=True).clamp_(max=probs.shape[1] - 1)
    return torch.where(total > 0, tokens, -1)


def most_likely(probs: Tensor, k: int, generator: torch.Generator | None = None) -> Tensor:
    """The k most likely tokens, (rows, V) -> (rows, k)."""
    return probs.topk(k).indices


# --- 4  Verification (sections 2.2 and 3.2, Algorithm 2) ----------------------------------------------------
#
# The children of a node are tried in turn. Child i is accepted if noise_i < ratio_i. If none is, the token is
# drawn from the residual, what the rejections have left of the target. Methods differ in how children are
# proposed, in the ratios and in the residual.
#
# Why Algorithm 2 is lossless. One child, drawn from Q: it is t and accepted with probability
# Q[t] min(P[t] / Q[t], 1) = min(P[t], Q[t]). It is rejected with probability sum max(P - Q, 0), and then the
# residual, max(P - Q, 0) normalised, gives each token what is missing: the two add up to P. Several children:
# after a rejection the residual takes the place of P, and the draft without the rejected token that of Q. By
# induction the other children yield that residual exactly, so by the case of one child all together yield P.
#
# The cover property: with as many different children as tokens, one is always accepted. A rejected token had
# R[s] < D[s], so the next residual gives it nothing: what is left of the target is among the tokens not yet
# tried, and the last of them has ratio 1. With replacement a rejected token may come again, in vain.
#
# As the temperature goes to 0, children drawn without replacement become the draft's likeliest tokens in
# order, the limit that greedy decoding is; with replacement they become copies of one token.


def verify_one_node(P: Tensor, Q: Tensor, tokens: Tensor, noise: Tensor) -> tuple[int, Tensor]:
    """Algorithm 2, plainly, for one node: P, Q (V,), tokens, noise (k,). The accepted child's rank, or -1,
    and the residual (V,), from which the token is then drawn. What follows is tested against it."""
    R, D = P, Q
    for i, s in enumerate(tokens):
        if noise[i] < R[s] / D[s]:
            return i, R
        R = (R - D).clamp(min=0)
        R = R / R.sum()
        D = D.index_fill(0, s, 0)
        D = D / D.sum()
    return -1, R


# From here on one row is one node: P, Q (rows, V), tokens, noise (rows, k) -> ratios (rows, k), residual
# (rows, V). Where a node has fewer than k children its last tokens are -1, and their ratios 0.


def ratios_in_turn(P, Q, tokens, noise, replacement=False):
    """Algorithm 2. With replacement the rejected token stays in the draft, which is SpecInfer."""
    R, D, ratios = P, Q + EPSILON, torch.zeros_like(noise)
    for i, s in enumerate(tokens.split(1, dim=1)):
        exists, s = s >= 0, s.clamp(min=0)                                                      # (rows, 1)
        ratios[:, i : i + 1] = torch.where(exists, R.gather(1, s) / D.gather(1, s), 0)
        # A CPU can look whether every row has accepted, and save the rest.
        if P.is_cpu and (noise < ratios).any(dim=1).all():
            break
        left = (R - D).clamp(min=0)
        total = left.sum(dim=1, keepdim=True)
        # Where rounding leaves nothing, the residual stays as it was.
        R = torch.where(exists & (total > 0), left / total, R)
        D = D if replacement else without(D, s)
    return ratios, R


def without(D, s):
    """The draft (rows, V) without a token (rows, 1), renormalised."""
    D = D.scatter(1, s, 0)
    return D / D.sum(dim=1, keepdim=True)


def ratios_of_spectr(P, Q, tokens, noise):
    """K-sequential selection (SpecTr, arXiv 2310.15141, Algorithm 3): every child's ratio is P / (rho Q).

    One try accepts token t with probability min(P[t] / rho, Q[t]), and any token with their sum, beta. Of up
    to k tries, (1 - (1 - beta)^k) / beta are made on average. So t is accepted with tries * min(P[t] / rho,
    Q[t]), which must not exceed P[t]: tries <= rho is enough. That holds for rho = k. A smaller rho accepts
    more, so bisection goes down from k as far as it holds. What is then missing of P is the residual."""
    k = (tokens >= 0).sum(dim=1, keepdim=True)                                                  # (rows, 1)
    def tries(beta):
        return torch.where(beta > 1e-6, (1 - (1 - beta).clamp(min=0) ** k) / beta, k.to(P.dtype))
    low, high = torch.ones_like(k, dtype=P.dtype), k.clamp(min=1).to(P.dtype)
    for _ in range(50 if P.dtype == torch.float64 else 25):
        rho = (low + high) / 2
        enough = tries(torch.minimum(P / rho, Q).sum(dim=1, keepdim=True)) <= rho
        low, high = torch.where(enough, low, rho), torch.where(enough, rho, high)
    taken, s = torch.minimum(P / high, Q), tokens.clamp(min=0)
    left = (P - tries(taken.sum(dim=1, keepdim=True)) * taken).clamp(min=0)
    total, p = left.sum(dim=1, keepdim=True), P.gather(1, s)
    ratios = torch.where((tokens >= 0) & (p > 0), p / (high * Q.gather(1, s)), 0)
    return ratios, torch.where(total > 0, left / total, P)


def ratios_of_naive(P, Q, tokens, noise):
    """The target's own sample, accepted if it is a child: a ratio is its share of what is left of P."""
    s, repeated = tokens.clamp(min=0), (tokens[:, :, None] == tokens[:, None, :]).tril(-1).any(dim=2)
    p = torch.where((tokens >= 0) & ~repeated, P.gather(1, s), 0)
    residual = P.scatter_add(1, s, -p).clamp(min=0)
    total = residual.sum(dim=1, keepdim=True)
    left = p.flip(1).cumsum(dim=1).flip(1) + total
    return torch.where(p > 0, p / left, 0), torch.where(total > 0, residual / total, P)


@dataclass(frozen=True)
class Method:
    """How a node's children are proposed, and how those are verified without loss."""
    propose: Callable
    ratios: Callable

    def verify(self, P, Q, tokens, generator=None):
        """The accepted child's rank, -1 where none is, (rows,), and the residual (rows, V)."""
        noise = torch.rand(tokens.shape, generator=generator, dtype=P.dtype, device=P.device)
        ratios, residual = self.ratios(P, Q, tokens, noise)
        accepted, first = (noise < ratios).max(dim=1)
        return torch.where(accepted, first, -1), residual

    def verify_tree(self, layout, tokens, target_probs, Q, generator=None, static=False):
        """The walk from the root to accepted children: its last node and the token that follows, (1,) each.

        layout: section 5's. tokens: (size + 1,), the nodes'. target_probs: from a range of nodes to their
        distributions, (nodes, V). Q: (size, V). The walk verifies the nodes that it visits. If `static`, all
        are verified at once and the walk follows their ranks: no shape, no branch depends on the outcome."""
        if static:
            proposed = torch.where(layout.children >= 0, tokens[layout.children], -1)       # (size, ranks)
            rank, residual = self.verify(target_probs(range(len(Q))), Q, proposed, generator)
            node = layout.nodes[:1]
            for _ in layout.levels:
                node = layout.onward[node, rank[node]]
            return node, sample_with_replacement(residual[node], 1, generator)[:, 0]
        node, residual = 0, target_probs(range(1))
        while children := layout.tree.children[node]:
            proposed = tokens[None, children[0] : children[-1] + 1]
            rank, residual = self.verify(residual, Q[node : node + 1], proposed, generator)
            if rank < 0:
                break
            node = children[rank]
            residual = target_probs(range(node, node + 1))
        return tokens.new_tensor([node]), sample_with_replacement(residual, 1, generator)[:, 0]


class Greedy(Method):
    """The limit of temperature 0: the target's top token follows, and is accepted if it is a child."""

    def verify_tree(self, layout, tokens, target_scores, Q, generator=None, static=False):
        """As `Method.verify_tree`, by comparisons alone. Of the scores only the largest counts."""
        best = target_scores(range(len(Q))).max(dim=1)
        choice = torch.where(best.values > -torch.inf, best.indices, -1)                        # (size,)
        right = (tokens[:-1] == choice[layout.parent]) | (layout.parent < 0)
        # A node is reached if it and its ancestors are right. The deepest such node ends the path.
        reached = (right | ~layout.mask[:-1, :-1]).all(dim=1)
        node = torch.where(reached, layout.depth[:-1], -1).argmax(dim=0, keepdim=True)
        return node, choice[node]


class Traversal(Method):
    """Traversal verification (arXiv 2505.12398): from the leaves to the root, so that a child which would be
    rejected alone can be accepted for what comes below it.

    On a chain the walk reaches a node with the product of min(ratio, 1), and wastes what a ratio exceeds 1.
    The mass a of a node, the chance that the path ends there or below, keeps that: a child's is
    min(a R[t] / D[t], 1). So it is at least the walk's probability, and as the expected tokens are a sum over
    nodes, on a chain traversal never yields fewer on average. In a tree that branches it mostly yields more,
    but a branch may end the path early with mass that the walk would have left to the next.

    If a child and all below it are rejected, its parent may still be accepted. The child takes min(a R, D) of
    a R, and left = max(a R - D, 0) remains, with sum s. So it takes a - s in all and is rejected with 1 - a +
    s. Of that s is still the parent's: its mass becomes s / (s + 1 - a), its residual left / s. So the path
    ends at the parent or below with a - s + s = a, as its mass said."""

    def verify_tree(self, layout, tokens, target_probs, Q, generator=None, static=False):
        """As `Method.verify_tree`. Children come before their parent, and the first that accepts wins."""
        P = target_probs(range(len(Q)))
        rows = self.sweep(layout.tree, tokens[:, None, None], P[:, None], Q[:, None], 0, P.new_ones(1, 1))
        nodes, mass, residual = zip(*rows)
        mass, residual = torch.cat(mass), torch.cat(residual)                           # (size, 1), (size, V)
        noise = torch.rand(mass.shape, generator=generator, dtype=mass.dtype, device=mass.device)
        first = (noise < mass).max(dim=0).indices
        node = torch.stack([layout.nodes[node] for node in nodes])[first]
        return node, sample_with_replacement(residual[first], 1, generator)[:, 0]

    def sweep(self, tree, tokens, P, Q, node, mass):
        """Yields each node below this one, then itself: node, mass (rows, 1), residual (rows, V). A row is
        one draw of the tree's tokens, (size, rows, 1)."""
        R, D = P[node], Q[node] + EPSILON
        for child in tree.children[node]:
            exists, s = tokens[child] >= 0, tokens[child].clamp(min=0)
            ratio = torch.where(exists, R.gather(1, s) / D.gather(1, s), 0)
            yield from self.sweep(tree, tokens, P, Q, child, (mass * ratio).clamp(max=1))
            left = (mass * R - D).clamp(min=0)
            total = left.sum(dim=1, keepdim=True)
            # Subtle: where nothing is left, s / (s + 1 - a) is 0, or at a = 1 it is 0 / 0, and means 1.
            rest = torch.where(total > 0, total / (total + (1 - mass)), mass.floor())
            R, D = torch.where(exists & (total > 0), left / total, R), without(D, s)
            mass = torch.where(exists, rest, mass)
        yield node, mass, R


METHODS = {
    "sequoia": Method(sample_without_replacement, ratios_in_turn),
    "specinfer": Method(sample_with_replacement, functools.partial(ratios_in_turn, replacement=True)),
    "spectr": Method(sample_with_replacement, ratios_of_spectr),
    "naive": Method(sample_with_replacement, ratios_of_naive),
    "topk": Method(most_likely, ratios_of_naive),
    "traversal": Traversal(sample_without_replacement, ratios_in_turn),
}
# At temperature 0, whatever the method's name.
GREEDY = Greedy(most_likely, ratios=None)


def sample_and_verify(P: Tensor, Q: Tensor, k: int, method: str = "sequoia",
                      generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Proposes k children a row from the draft's distributions Q, and verifies them against the target's P,
    (rows, V) each. Returns (rank, token), (rows,) each: the accepted child's rank, -1 where none was, and the
    emitted token, which is distributed exactly as P. Raises ValueError for an unknown method, other shapes, k
    outside 1 .. V, and rows that are no probabilities.

    >>> P, Q = torch.tensor([[0.7, 0.2, 0.1]]), torch.tensor([[0.2, 0.5, 0.3]])
    >>> rank, token = sample_and_verify(P.expand(100_000, 3), Q.expand(100_000, 3), k=2)
    >>> bool(((token.bincount() / 100_000 - P).abs() < 0.01).all())
    True
    """
    if method not in METHODS or P.ndim != 2 or P.shape != Q.shape or not 1 <= k <= P.shape[1]:
        raise ValueError(f"needs a method of {', '.join(METHODS)}, one shape (rows, V), k from 1 to V; got "
                         f"{method}, {tuple(P.shape)}, {tuple(Q.shape)}, {k}")
    if not all((x >= 0).all() and ((x.sum(dim=1) - 1).abs() < 1e-3).all() for x in (P, Q)):
        raise ValueError("P and Q must be probabilities: no NaN, none negative, every row summing to 1")
    P, Q = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (P, Q))
    tokens = METHODS[method].propose(Q, k, generator)
    rank, residual = METHODS[method].verify(P, Q, tokens, generator)
    either = torch.cat([tokens, sample_with_replacement(residual, 1, generator)], dim=1)
    return rank, either.gather(1, rank.where(rank >= 0, k)[:, None])[:, 0]


# --- 5  The tree on the device: indices, mask, cache --------------------------------------------------------
#
# The text so far fills the first slots of the KV cache, all but its last token: that is the root of the tree,
# and no model has seen it yet. `base` is the root's slot and position. Node i stands in slot base + i, at
# position base + its depth: siblings share a position. The mask shows a node the text, its ancestors and
# itself. A step with nodes 1 and 2 below the root and 3 below 1, which accepts node 2:
#
#     slot         0 .. base-2    base-1     base    base+1   base+2   base+3
#     before       the text       node -1    root    node 1   node 2   node 3
#     position     0 .. base-2    base-1     base    base+1   base+1   base+2
#     after        the text ............     root    node 2   free, the slot of the next root
#
# Node -1 is the token before the root. The draft is fed it again with the root: it may have been a leaf of
# the last tree, which a draft is never fed, so that its entry is missing. It is the root's parent, -1, and
# where Python finds index -1: at the end of tokens, slots, positions and mask, which have size + 1 entries.


class Layout:
    """A tree as index tensors: all that the tree alone decides."""

    def __init__(self, tree: Tree, device):
        tensor = functools.partial(torch.tensor, device=device, dtype=torch.long)
        self.tree, self.nodes, self.parent = tree, tensor(range(tree.size)), tensor(tree.parents)
        self.offset, self.depth = tensor([*range(tree.size), -1]), tensor([*tree.depths, -1])   # (size + 1,)
        self.mask = nn.functional.pad(tree.mask, (0, 1, 0, 1)).to(device)       # (size + 1, size + 1)
        # For each level: its nodes with children; what the draft is fed for them, node -1 with the root; the
        # most children of one; all their children, the next level; which of the proposals those are. In the
        # tree drawn above, level 1: [1], [1], 2, nodes 4 and 5, [0, 1].
        self.levels = []
        for depth in range(tree.depth - 1):
            nodes = [i for i in range(tree.size) if tree.depths[i] == depth and tree.children[i]]
            below = [i for i in range(tree.size) if tree.depths[i] == depth + 1]
            width = max(tree.ranks[i] for i in below) + 1
            proposal = [nodes.index(tree.parents[i]) * width + tree.ranks[i] for i in below]
            fed, children = tensor(nodes if depth else [-1, 0]), slice(below[0], below[-1] + 1)
            self.levels.append((tensor(nodes), fed, width, children, tensor(proposal)))
        most = max([1, *map(len, tree.children)])
        self.children = tensor([[*c, *[-1] * (most - len(c))] for c in tree.children])  # (size, ranks)
        # Where the walk goes on to, by rank. Rank -1, the last column, is the node itself.
        self.onward = torch.cat([self.children, self.nodes[:, None]], dim=1)            # (size, ranks + 1)
        # From the root to each node, which is repeated to fill its row.
        paths = [row.nonzero()[:, 0].tolist() for row in tree.mask]
        self.paths = tensor([path + path[-1:] * (tree.depth - len(path)) for path in paths])   # (size, depth)


class TreeLayer(StaticLayer):
    """One layer's keys and values, (1, heads, capacity, head_dim), written at any slots."""

    def update(self, key_states, value_states, *args, **kwargs):
        self.keys.index_copy_(2, self.slots, key_states)
        self.values.index_copy_(2, self.slots, value_states)
        return self.keys[:, :, : self.visible], self.values[:, :, : self.visible]


class CachedModel:
    """A transformers model with a KV cache of fixed capacity, fed with a prompt, then with nodes of trees."""

    def __init__(self, model, capacity: int):
        config = model.config.get_text_config(decoder=True)
        self.model, self.capacity, self.windows = model, capacity, attention_windows(model)
        self.vocabulary = model.get_input_embeddings().num_embeddings
        self.last_position = (getattr(config, "max_position_embeddings", None) or sys.maxsize) - 1
        self.layers = [TreeLayer(max_cache_len=0) for _ in range(config.num_hidden_layers)]
        self.cache, self.entries = Cache(layers=self.layers), ()

    def feed(self, prompt: Tensor) -> Tensor:
        """Feeds a prompt, (length,), with transformers' own masks and cache. The logits after it, (V,)."""
        known = prompt.clamp(max=self.vocabulary - 1)[None]
        prefill, last = DynamicCache(), {"logits_to_keep": 1} if self.model._supports_logits_to_keep() else {}
        output = self.model(input_ids=known, past_key_values=prefill, use_cache=True, **last)
        entries = [entry for layer in prefill.layers for entry in (layer.keys, layer.values)]
        if not self.entries:
            # Entries of one shape share a buffer, so that one operation moves them all.
            shapes = [(entry.shape[1], self.capacity, entry.shape[3]) for entry in entries]
            self.buffers = {shape: entries[0].new_zeros(shapes.count(shape), *shape) for shape in set(shapes)}
            views = {shape: iter(buffer.split(1)) for shape, buffer in self.buffers.items()}
            self.entries = tuple(next(views[shape]) for shape in shapes)
        for ours, theirs in zip(self.entries, entries):
            ours[:, :, : len(prompt)] = theirs
            # A NaN that an earlier text left would show through any mask.
            ours[:, :, len(prompt) :] = 0
        return output.logits[0, -1]

    def place(self, layout: Layout, base: Tensor, visible: int):
        """Places a tree in a cache of which the first slots are visible: its slots and positions, (size +
        1,), and for each window an additive mask, (1, 1, size + 1, visible)."""
        slots, positions = torch.arange(visible, device=base.device), base + layout.depth
        # The node in each slot. Those before the root and beyond the tree get -1, which no node sees.
        node = (slots - base).clamp(-1, layout.tree.size)
        seen, zero = (slots < base) | layout.mask[:, node], self.entries[0].new_zeros(())
        distance = positions[:, None] - torch.where(slots < base, slots, positions[node])
        near = [seen & (distance < window) if window else seen for window in self.windows.values()]
        self.masks = [torch.where(one, zero, -torch.inf)[None, None] for one in near]
        self.slots, self.positions = base + layout.offset, positions.clamp(max=self.last_position)

    def score(self, tokens: Tensor, nodes: Tensor) -> Tensor:
        """One pass over some nodes: the tree's tokens (size + 1,), which (nodes,) -> logits (nodes, V)."""
        return getattr(self.model, "recording", self.run)(*self.inputs(tokens, nodes))

    def inputs(self, tokens, nodes):
        masks = (mask[:, :, nodes] for mask in self.masks)
        return tokens[nodes], self.positions[nodes], self.slots[nodes], *masks, *self.entries

    def run(self, tokens, positions, slots, *masks_and_entries):
        """The pass as a function of tensors alone, so that it can be recorded."""
        masks, entries = masks_and_entries[: len(self.windows)], masks_and_entries[len(self.windows) :]
        for layer, keys, values in zip(self.layers, entries[::2], entries[1::2]):
            layer.keys, layer.values, layer.slots, layer.visible = keys, values, slots, masks[0].shape[-1]
        mask = masks[0] if len(masks) == 1 else dict(zip(self.windows, masks))
        # A padded vocabulary may be shorter than the target's, and a child that does not exist is -1.
        known = tokens.clamp(0, self.vocabulary - 1)[None]
        return self.model(input_ids=known, position_ids=positions[None], attention_mask=mask,
                          past_key_values=self.cache, use_cache=True).logits[0]

    def move(self, source: Tensor, destination: Tensor):
        """Moves the entries of some slots, (slots,) each, in every layer."""
        for buffer in self.buffers.values():
            buffer.index_copy_(2, destination, buffer.index_select(2, source))


def attention_windows(model) -> dict[str, int | None]:
    """Each kind of attention layer's sliding window, or None. Raises ValueError if no tree can be scored."""
    config, text = model.config, model.config.get_text_config(decoder=True)
    kinds = dict.fromkeys(getattr(text, "layer_types", None) or ["sliding_attention"])
    if (config.is_encoder_decoder or model._is_stateful or getattr(text, "alibi", False)
            or "position_ids" not in inspect.signature(model.forward).parameters
            or kinds.keys() - {"full_attention", "sliding_attention"}
            or config._attn_implementation not in ("sdpa", "eager")):
        raise ValueError(f"{type(model).__name__} cannot verify a tree: it must be decoder-only, with "
                         f"position_ids, and full or sliding attention in every layer, by 'sdpa' or 'eager'")
    window = getattr(text, "sliding_window", None)
    return {kind: window if kind == "sliding_attention" else None for kind in kinds}


# --- 6  Decoding --------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """What one step did."""
    tree: Tree
    node_tokens: list        # (size,) each node's token, the root's first; -1 for a child that does not exist
    path: list               # the accepted nodes below the root, in order
    token: int               # the target's own token, which follows them

    @property
    def tokens(self) -> list:
        """The tokens that this step adds to the text."""
        return [self.node_tokens[node] for node in self.path] + [self.token]


# Processors that look at the scores alone.
HISTORY_FREE = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)


class Decoder:
    """Decodes with a target and a draft, behind transformers' generate:

        target.generate(**inputs, custom_generate=Decoder(target, draft), do_sample=True, temperature=0.6)

    draft: a model over the same vocabulary. tree: a Tree; (size, depth), for the best tree of that shape; or
    "auto", for the fastest with this pair on this machine. method: a name from METHODS, or a Method.
    generator: the source of randomness, by default torch's own. on_step: called with each Step. cuda_graph:
    on a GPU, record the step. It keeps caches, plan and CUDA graph from text to text: the models must not
    change. Raises ValueError for models, a tree or a method that it cannot work with."""

    def __init__(self, target, draft=None, tree="auto", method="sequoia", generator=None, on_step=None,
                 cuda_graph=True):
        self.tree = Tree([-1]) if draft is None and tree == "auto" else tree
        self.models = [target] if self.tree == Tree([-1]) else [target, draft]
        self.given_method = method if isinstance(method, Method) else METHODS.get(method)
        shaped = self.tree == "auto" or isinstance(self.tree, Tree | tuple)
        if not shaped or self.given_method is None or None in self.models:
            raise ValueError(f"needs a Tree, (size, depth) or 'auto'; a draft, if the tree is more than its "
                             f"root; a method of {', '.join(METHODS)}; got {tree!r} and {method!r}")
        self.generator, self.on_step, self.device = generator, on_step or (lambda step: None), target.device
        # A model that is shared among ranks or offloaded needs the host in its pass.
        self.sharded = (getattr(target, "tp_size", None) or 1) > 1
        hosted = self.sharded or any(hasattr(model, "offloaded") for model in self.models)
        self.cuda_graph = cuda_graph and self.device.type == "cuda" and not hosted
        self.capacity, self.sampling, self.latency, self.plan = 0, None, None, None

    @torch.inference_mode()
    def __call__(self, model, input_ids, logits_processor, stopping_criteria, generation_config,
                 streamer=None, **model_kwargs):
        """(rows, length) ids -> (rows, longer) ids, row by row. `generate`, which calls it, hands over the
        processors, for both models, and the stopping criteria, which are checked after every token. Raises
        ValueError for what `generate` can be told and this cannot do, and for NaN logits."""
        self.prepare(model, input_ids, logits_processor, generation_config, model_kwargs)
        mask, rows = model_kwargs.get("attention_mask"), []
        put = streamer.put if streamer else lambda ids: None
        put(input_ids.cpu())
        for i, row in enumerate(input_ids):
            self.row, ids = (i, len(input_ids)), row[None].cpu()
            for token in self.tokens_after(row if mask is None else row[mask[i].bool()], row[None]):
                if token < 0:
                    raise ValueError("the models gave NaN logits, or the processors left no token possible")
                ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
                put(ids[0, -1:])
                if stopping_criteria(ids, None).all():
                    break
            rows.append(ids[0])
        if streamer:
            streamer.end()
        # An ordinary tensor, which may be changed.
        with torch.inference_mode(False):
            padding = int(generation_config._pad_token_tensor or 0)
            ids = nn.utils.rnn.pad_sequence(rows, True, padding).to(input_ids.device)
        return GenerateDecoderOnlyOutput(sequences=ids) if generation_config.return_dict_in_generate else ids

    def prepare(self, model, input_ids, processors, config, model_kwargs):
        """Takes over what a call wants. Another way of sampling needs another plan and another graph."""
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
        if model is not self.models[0] or not 1 <= input_ids.shape[1] < config.max_length <= context + 1:
            raise ValueError(f"needs the target it was made for, and text within its context, 1 to {context} "
                             f"tokens; got {input_ids.shape[1]}, with new ones {config.max_length}")
        unable = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
        past = model_kwargs.get("past_key_values")
        if ("inputs_embeds" in model_kwargs or past is not None and past.get_seq_length() > 0
                or (config.num_beams or 1) > 1 or any(getattr(config, name) for name in unable)):
            raise ValueError("unable to do inputs_embeds, filled past_key_values, num_beams > 1, "
                             + ", ".join(unable))
        self.processors, self.greedy = processors, not config.do_sample
        self.method = GREEDY if self.greedy else self.given_method
        self.reads_history = any(type(one) not in HISTORY_FREE for one in processors)
        self.static = self.cuda_graph and not self.reads_history
        numbers = [vars(one) for one in processors if type(one) in HISTORY_FREE]
        if self.sampling != (sampling := (self.greedy, self.reads_history, numbers)):
            self.sampling, self.layout, self.latency, self.acceptance = sampling, None, None, Acceptance()
        size = self.tree[0] if isinstance(self.tree, tuple) else getattr(self.tree, "size", LARGEST)
        if (capacity := -(-(config.max_length + size + 1) // 256) * 256) > self.capacity:
            self.target, *self.draft = [CachedModel(model, capacity) for model in self.models]
            self.base, self.tokens = torch.zeros(3, dtype=torch.long, device=self.device).split([1, 2])
            self.capacity, self.layout = capacity, None

    def tokens_after(self, prompt, history):
        """The text's tokens, one at a time, for as long as they are wanted. prompt: (length,), as the models
        see it; history: (1, any length), as the processors see it, padding included."""
        if self.tree == "auto" and self.latency is None:
            self.latency = measure(self, prompt, history)
        yield self.begin(prompt, history)
        while True:
            # Planned again when as much again has been seen.
            if self.layout is None or self.acceptance.steps >= self.due:
                self.due = max(64, 2 * self.acceptance.steps)
                self.use(self.tree if isinstance(self.tree, Tree) else best_tree(self))
            step = self.step()
            self.on_step(step)
            yield from step.tokens

    def begin(self, prompt, history) -> int:
        """Feeds a prompt and draws the first token, as a step would with a tree of the root alone."""
        logits = [model.feed(prompt) for model in (self.target, *self.draft)][0][None]      # (1, V)
        self.history, self.length, self.vocabulary = history, len(prompt), logits.shape[1]
        P, root = self.probs(logits, [None]), Layout(Tree([-1]), self.device)
        _, first = self.method.verify_tree(root, self.tokens[:2], lambda nodes: P, P, self.generator)
        self.tokens[:1], self.tokens[-1:] = first, prompt[-1:]
        self.base.fill_(self.length)
        return int(first)

    def use(self, tree: Tree):
        """Takes a tree for the steps to come."""
        if self.layout is None or tree != self.layout.tree:
            self.tokens = self.tokens[[0] * tree.size + [-1]]                               # (size + 1,)
            self.Q = torch.zeros(tree.size, self.vocabulary, device=self.device)
            self.layout, self.graph, self.steps = Layout(tree, self.device), None, 0

    def step(self) -> Step:
        """One step, as the host sees it."""
        self.steps += 1
        run = self.replay if self.static and self.steps > 2 else self.program
        # If static, the step's one copy to the host.
        node, token, *tokens, _ = run().tolist()
        path = self.layout.tree.mask[node].nonzero()[1:, 0].tolist()
        step = Step(self.layout.tree, tokens, path, token)
        self.length += len(step.tokens)
        if self.reads_history:
            # The old root and the accepted nodes. The token after them is the new root.
            known = self.tokens.new_tensor([tokens[:1] + step.tokens[:-1]])
            self.history = torch.cat([self.history, known], dim=1)
        self.acceptance.count(step)
        return step

    def program(self) -> Tensor:
        """One step on the device: (size + 3,), the last accepted node, the token after it, all tokens.

        If `static`, its shapes are fixed and no value goes to the host: a CUDA graph can hold it."""
        layout, models = self.layout, (self.target, *self.draft)
        # 1. The tree takes its place behind the text.
        for model in models:
            model.place(layout, self.base, self.capacity if self.static else self.length + layout.tree.size)
        # 2. The draft grows it level by level: a pass over a level's parents proposes their children.
        for parents, fed, width, children, proposal in layout.levels:
            logits = self.draft[0].score(self.tokens, fed)[-len(parents) :]
            Q = self.Q[parents] = self.probs(logits, parents)                               # (parents, V)
            proposals = self.method.propose(Q, width, self.generator)                       # (parents, width)
            if self.reads_history:
                # What the processors have ruled out does not exist, nor does anything below it.
                possible = Q.gather(1, proposals.clamp(min=0)) > (-torch.inf if self.greedy else 0)
                exists = (self.tokens[parents, None] >= 0) & possible
                proposals = torch.where(exists, proposals, -1)
            self.tokens[children] = proposals.take(proposal)
        # 3. The target scores it in one pass.
        logits = self.target.score(self.tokens, layout.nodes)                               # (size, V)
        # 4. Verification finds the path to keep and the token after it.
        node, token = self.method.verify_tree(
            layout, self.tokens, lambda nodes: self.probs(logits[nodes.start : nodes.stop], nodes), self.Q,
            self.generator, self.static)
        token = torch.where(self.Q.sum().isnan(), -1, token)
        report = torch.cat([node, token, self.tokens])
        # 5. The entries of the accepted nodes move up behind the text.
        path = layout.paths[node][0]                                                        # (depth,)
        for model in models:
            model.move(self.base + path, self.base + layout.offset[: len(path)])
        # 6. The last accepted node is the next node -1, the token the next root.
        self.tokens[-1:], self.tokens[:1] = self.tokens[node], token
        self.base += layout.depth[node] + 1
        return report

    def replay(self) -> Tensor:
        """The third step with a tree is recorded as a CUDA graph, which is replayed ever after. Two have run
        before, and warmed the libraries up."""
        if self.graph is None:
            graph = torch.cuda.CUDAGraph()
            if self.generator is not None:
                graph.register_generator_state(self.generator)
            with torch.cuda.graph(graph):
                self.report = self.program()
            self.graph = graph
        self.graph.replay()
        return self.report

    def probs(self, logits, nodes):
        """A model's distributions after these nodes, or after the prompt for [None]: (nodes, V) float32 over
        the target's vocabulary. If greedy, scores, of which only the order counts. Processors that read the
        history see each node's own path, one by one."""
        scores = logits.float()
        if missing := self.vocabulary - logits.shape[1]:
            scores = nn.functional.pad(scores, (0, missing), value=-torch.inf)
        if self.reads_history:
            scores = torch.stack([self.processed(row, node) for row, node in zip(scores, nodes)])
        else:
            for processor in self.processors:
                scores = processor(self.history, scores)
        return scores if self.greedy else scores.softmax(dim=1)

    def processed(self, scores, node):
        """The scores after one node, (V,), processed with the text up to it."""
        path = [] if node is None else self.layout.tree.mask[node].nonzero()[:, 0]
        text, (index, rows) = torch.cat([self.history, self.tokens[None, path]], dim=1), self.row
        # Below a child that does not exist nothing is used, and a processor may not know what to say.
        if (text < 0).any():
            return scores
        # Some processors know the rows of the batch that they were made for.
        return self.processors(text.repeat(rows, 1), scores.repeat(rows, 1))[index]


def decode(model, input_ids, logits_processor, stopping_criteria, generation_config, streamer=None,
           draft=None, tree="auto", method="sequoia", generator=None, on_step=None, cuda_graph=True, **rest):
    """A Decoder made for one call: target.generate(**inputs, custom_generate=sequoia.decode, draft=draft).
    draft, tree, method, generator, on_step, cuda_graph: a Decoder's. The rest is what `generate` prepares."""
    call = model, input_ids, logits_processor, stopping_criteria, generation_config, streamer
    return Decoder(model, draft, tree, method, generator, on_step, cuda_graph)(*call, **rest)


# --- 7  The hardware-aware planner (section 4) --------------------------------------------------------------

# Acceptance rates before any evidence: a decent draft, a power law in the rank. And the most nodes of a plan.
PRIOR, LARGEST = 0.6 / np.arange(1, 33) ** 2, 256


class Acceptance:
    """How often the k-th children of nodes on a level were tried, and accepted: (levels, ranks) each."""

    def __init__(self, levels: int = 4):
        self.steps, (self.tried, self.accepted) = 0, np.zeros((2, levels, len(PRIOR)))

    def count(self, step: Step):
        """Counts the children that a walk to this step's end would have tried and accepted."""
        for depth, (node, child) in enumerate(zip([0, *step.path], [*step.path, None])):
            children, level = step.tree.children[node], min(depth, len(self.tried) - 1)
            tried = len(children) if child is None else child - children[0] + 1
            self.tried[level, :tried] += 1
            self.accepted[level, tried - 1 : tried] += child is not None
        self.steps += 1

    def rates(self, weight: float = 8.0) -> np.ndarray:
        """The acceptance rates, (levels, ranks): the chance that a child is accepted when tried, times the
        chance that it is tried. A level's prior is the level above, and counts like `weight` tries."""
        rows, when_tried = [], PRIOR / (1 - np.concatenate([[0], PRIOR.cumsum()[:-1]]))
        for tried, accepted in zip(self.tried, self.accepted):
            when_tried = (accepted + weight * when_tried) / (tried + weight)
            rows.append(when_tried * np.cumprod([1, *(1 - when_tried[:-1])]))
        return np.stack(rows)


class Latency(NamedTuple):
    """Measured seconds: t(n) of a step without its draft passes, by tree size n; c of a level of a chain."""
    sizes: list
    t: list
    c: float
    spent: float = 0.0       # on measuring

    def of_step(self, size, depth):
        return np.interp(size, self.sizes, self.t) + (depth - 1) * self.c


class Plan(NamedTuple):
    """A tree and what it promises: tokens a step, and how many times the speed of plain decoding."""
    tree: Tree
    tokens: float
    speedup: float


def plan(rates, latency: Latency) -> Plan:
    """The tree of n nodes on d levels that maximises G(n, d) / (t(n) + (d - 1) c), up to 2%, over sizes up to
    the largest timed one and depths up to twice a binary tree's. rates: as in `optimal_tree`."""
    largest = latency.sizes[-1]
    # A node of so small a tree hardly ever has use for more children.
    rates = np.atleast_2d(rates)[:, : max(8, largest // 8)]
    G = expected_tokens_table(rates, largest, min(largest, 2 * largest.bit_length()))[1:, 1:].clip(0)
    n, d = np.mgrid[1 : G.shape[0] + 1, 1 : G.shape[1] + 1]
    speedup = G * latency.t[0] / latency.of_step(n, d)
    # Of the depths within 2% of the best the deepest: it shows more of how often deep nodes are accepted.
    depth = int((speedup.max(axis=0) > 0.98 * speedup.max()).nonzero()[0][-1])
    best = int(speedup[:, depth].argmax()), depth
    return Plan(optimal_tree(rates, best[0] + 1, depth + 1), float(G[best]), float(speedup[best]))


def best_tree(decoder: Decoder) -> Tree:
    """The best by what was counted: of the shape that was given, or of all."""
    rates = decoder.acceptance.rates()[:, : decoder.vocabulary]
    if decoder.tree != "auto":
        return optimal_tree(rates, *decoder.tree)
    decoder.plan = plan(rates, decoder.latency)
    return decoder.plan.tree


def measure(decoder: Decoder, prompt: Tensor, history: Tensor) -> Latency:
    """Times whole steps after the prompt's last 64 tokens: with n nodes on d levels one takes t(n) + (d - 1)
    c. The texts are thrown away, what they show of the acceptance is counted. The trees take turns, as a
    machine's speed drifts, for a second or 30 plain steps, whichever is longer. They grow until a step takes
    2.5 times as long as a plain one: beyond that, time grows faster than tokens."""
    def clock():
        if decoder.device.type == "cuda":
            torch.cuda.synchronize(decoder.device)
        now = torch.tensor(time.perf_counter(), dtype=torch.float64, device=decoder.device)
        if decoder.sharded:
            # All ranks plan by rank 0's clock.
            torch.distributed.broadcast(now, src=0)
        return now.item()

    def visit(tree):
        """Two steps more with this tree, after some to warm up: on a GPU the third records."""
        decoder.begin(prompt[-64:], history)
        decoder.use(tree)
        for i in range(-3 if decoder.static else -1, 2):
            begun = clock()
            decoder.step()
            if i >= 0:
                seconds.setdefault(tree, []).append(clock() - begun)

    def late():
        return clock() - start > max(1, 30 * np.median(seconds[plain]))

    seconds, start, plain = {}, clock(), Tree([-1])
    for tree in (plain, chain(1), chain(5)):
        visit(tree)
    for size in (4, 8, 16, 32, 64, 128, 256):
        # A slow target has times for 16 nodes all the same.
        if size > 16 and (late() or np.median(seconds[tree]) > 2.5 * np.median(seconds[plain])):
            break
        tree = optimal_tree(PRIOR[: decoder.vocabulary], size, size.bit_length())
        visit(tree)
    while not late():
        visit(min(seconds, key=lambda tree: len(seconds[tree])))
    step = {tree: float(np.median(times)) for tree, times in seconds.items()}
    c = max(0.0, (step.pop(chain(5)) - step.pop(chain(1))) / 4)
    t = np.array([time - (tree.depth - 1) * c for tree, time in step.items()])
    # Noise only adds to a time. So a tree takes no longer than the fastest larger one.
    t = np.minimum.accumulate(t[::-1])[::-1]
    # What one text has shown counts a quarter of what the texts to come will show.
    counts = decoder.acceptance
    counts.steps, counts.tried, counts.accepted = 0, counts.tried / 4, counts.accepted / 4
    decoder.layout = None
    return Latency([tree.size for tree in step], t.tolist(), c, clock() - start)


# --- 8  Passes: packed and recorded on a CPU; weights that stream past a small GPU --------------------------


def packed_product(x: Tensor, weight: Tensor, bias: Tensor | None):
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@torch.no_grad()
def pack(model, rows: int = 16):
    """Prepares a model on a CPU for decoding, in place, and returns it: lays out the weights of its linear
    layers for oneDNN, the CPU's matrix library, and passes over about `rows` tokens, and records its pass.
    Its numbers change by rounding. It cannot be trained, saved or changed any more. On a GPU, offloaded, or
    of a dtype that oneDNN cannot take it stays as it is. Raises ValueError if it cannot verify a tree."""
    dtypes = [torch.float32, torch.bfloat16][: 1 + torch.ops.mkldnn._is_mkldnn_bf16_supported()]
    attention_windows(model)
    done = {"recording", "offloaded"} & vars(model).keys()
    if done or model.device.type != "cpu" or model.dtype not in dtypes:
        return model
    parent = {layer: one for one in model.requires_grad_(False).modules() for layer in one.children()
              if type(layer) is nn.Linear}
    given, groups = {}, {}
    hook = nn.modules.module.register_module_forward_pre_hook(
        lambda layer, inputs: given.setdefault(layer, inputs[0]) if layer in parent else None)
    model(torch.zeros(1, 2, dtype=torch.long))
    hook.remove()
    # Layers of one parent with the same input, such as queries, keys and values, in the order of calls.
    for layer in {**given, **parent}:
        groups.setdefault((parent[layer], id(given.get(layer, layer)), layer.bias is None), []).append(layer)
    model.recording = record(model, [join(layers, rows) for layers in groups.values()])
    return model


def join(layers, rows) -> Tensor:
    """Makes one product of linear layers with the same input. Returns its packed weight."""
    sizes, waiting = [layer.out_features for layer in layers], []
    weight = torch.ops.mkldnn._reorder_linear_weight(torch.cat([layer.weight for layer in layers]), rows)
    bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
    # A trace cannot take the empty list in the product, a script can.
    product = torch.jit.script(packed_product)

    def first(x):
        """The first layer's output. Those of the others wait for them."""
        y, *waiting[:] = product(x, weight, bias).split(sizes, dim=-1)
        return y

    for layer in layers:
        layer.forward = first if layer is layers[0] else lambda x: waiting.pop(0)
        # Its own weight takes no more memory.
        del layer.weight
        layer.weight = weight
    return weight


def record(model, weights) -> Callable:
    """The model's pass as a TorchScript trace, which runs the same operators without Python: about half the
    time of a small model's pass. A trace holds the operators of one run. Mixtures of experts take others for
    other tokens, some rotary embeddings for other positions. So it is compared, bit for bit, with the plain
    pass on other inputs. Where they differ, or there can be no trace, this is the plain pass."""
    small, layout = CachedModel(model, capacity=32), Layout(k_ary(2, 4), "cpu")
    small.feed(torch.arange(4))

    def example(base, nodes, ahead=0):
        small.place(layout, torch.tensor([base]), base + layout.tree.size)
        small.positions = small.positions + ahead
        return small.inputs(torch.arange(base, base + layout.tree.size + 1), torch.arange(nodes))

    def run(*inputs):
        # Subtle: a trace cannot hold packed weights, so they are inputs, which nothing reads.
        return small.run(*inputs[: len(inputs) - len(weights)])

    def recording(*inputs):
        # Else it would be optimised anew for every new shape.
        with torch.jit.optimized_execution(False):
            return traced(*inputs, *weights)

    try:
        with warnings.catch_warnings(action="ignore"):
            graph = torch.jit.trace(run, (*example(4, 3), *weights), check_trace=False).graph
        for name in ("erase_shape_information", "inline", "cse", "constant_propagation", "peephole", "dce"):
            getattr(torch._C, f"_jit_pass_{name}")(graph)
        traced = torch._C._create_function_from_graph("forward", graph)
        far = min(small.last_position, 10**6) - 8
        others = [example(4, 15), example(5, 7), example(14, 2), example(16, 4), example(4, 3, far)]
        if all(torch.equal(recording(*inputs), small.run(*inputs)) for inputs in others):
            return recording
    except (RuntimeError, AttributeError):
        pass
    return small.run


@torch.no_grad()
def offload(model, device, resident: int = 0):
    """Moves a model to a device, in place, all but the weights of its decoder layers, for a target larger
    than the device. Those stay in host memory, pinned for a GPU. Two sets of buffers on the device take them
    in turns: while a layer is computed from one, the next is copied to the other. resident: how many layers
    stay on the device all the same, and one more if the rest are odd. Raises ValueError for a packed or
    offloaded model, one without a list of layers, and layers that share weights."""
    device, count = torch.device(device), model.config.get_text_config(decoder=True).num_hidden_layers
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not lists or {"recording", "offloaded"} & vars(model).keys():
        raise ValueError(f"{type(model).__name__} is packed or offloaded, or has no list of {count} layers")
    layers, cuda = lists[0][resident + (count - resident) % 2 :], device.type == "cuda"
    weights, stored, buffers, held = [list(layer.parameters()) for layer in layers], [], {}, {}
    streaming = {id(weight) for layer in weights for weight in layer}
    uses = [id(p) for _, p in model.named_parameters(remove_duplicate=False) if id(p) in streaming]
    if len(uses) > len(streaming):
        raise ValueError(f"{type(model).__name__} has layers that share weights")
    stream = torch.cuda.Stream(device) if cuda else None

    def fetch(i):
        """Starts to copy layer i to its buffers, unless it is there."""
        if held.get(i % 2) != i:
            if cuda:
                # The layer that used these buffers last has been computed.
                stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for weight, source in zip(weights[i], stored[i]):
                    weight.data.copy_(source, non_blocking=True)
            held[i % 2] = i

    def before(i, *_):
        """Layer i is about to be computed."""
        fetch(i)
        if cuda:
            torch.cuda.current_stream(device).wait_stream(stream)
        fetch((i + 1) % len(layers))

    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in streaming:
            tensor.data = tensor.data.to(device)
    for i, layer in enumerate(weights):
        stored.append([weight.data.pin_memory() if cuda else weight.data for weight in layer])
        for j, weight in enumerate(layer):
            buffer = buffers.setdefault((i % 2, j, weight.shape), torch.empty_like(weight, device=device))
            weight.data = buffer.data
        layers[i].register_forward_pre_hook(functools.partial(before, i))
    model.offloaded = True
    return model.eval().requires_grad_(False)


# --- 9  Front doors: generate, and the command line ---------------------------------------------------------


def generate(target, draft, input_ids, *, streamer=None, tokenizer=None, stop_strings=None,
             stopping_criteria=(), **kwargs):
    """`target.generate(input_ids, custom_generate=decode, draft=draft, ...)` with what transformers does not
    pass on to a custom loop: a streamer, and stop_strings with their tokenizer."""
    stops = [StopStringCriteria(tokenizer, stop_strings)] if stop_strings is not None else []
    return target.generate(input_ids, custom_generate=functools.partial(decode, streamer=streamer),
                           draft=draft, stopping_criteria=StoppingCriteriaList([*stopping_criteria, *stops]),
                           **kwargs)


TINY = Path(__file__).resolve().parent / "tiny"
PROMPT = 'class Stack:\n    """A last-in, first-out collection."""\n\n    def __init__(self):'
# Which of torchrun's processes this is, and how many there are.
RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def arguments(argv=None):
    """What the command line says. Raises ValueError for numbers out of range."""
    parser = argparse.ArgumentParser("sequoia.py", description="Decodes text as the target would, faster.")
    add, gpu = parser.add_argument, f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    add("--target", default=os.path.relpath(TINY / "target"), help="folder or hub name (the bundled target)")
    add("--draft", default=os.path.relpath(TINY / "draft"), help="a small model, same tokens (the bundled)")
    add("--prompt", default=PROMPT, help="text to go on from, or @FILE (a class)")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="(128)")
    add("--temperature", type=float, default=0.6, metavar="T", help="0 is greedy (0.6)")
    add("--top-p", type=float, metavar="P", help="keep the likeliest tokens with this probability together")
    add("--top-k", type=int, metavar="K", help="keep the K likeliest tokens")
    add("--seed", type=int, default=0, help="the same seed and tree give the same text (0)")
    add("--method", default="sequoia", choices=METHODS, help="how children are drawn and verified (sequoia)")
    add("--tree", default="auto", help="auto (the fastest for pair and machine), SIZExDEPTH (the best of "
        "that shape), or none, which is plain decoding (auto)")
    add("--device", default=gpu if torch.cuda.is_available() else "cpu", help="(a GPU if there is one)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="(bfloat16 where the processor has it)")
    add("--offload", action="store_true", help="stream the target's layers from memory, on a CPU from files")
    add("--explain", action="store_true", help="draw each step's tree, the accepted path in [brackets]")
    args = parser.parse_args(argv)
    for name, least, most in (("max_new_tokens", 1, 2**31), ("temperature", 0, 100), ("top_k", 1, 2**31),
                              ("top_p", 1e-9, 1), ("seed", 0, 1e18)):
        if (value := getattr(args, name)) is not None and not least <= value <= most:
            raise ValueError(f"--{name.replace('_', '-')} must be from {least} to {most}, got {value}")
    args.tree = parse_tree(args.tree)
    return args


def parse_tree(spec: str) -> "Tree | str | tuple[int, ...]":
    """What a Decoder takes, for a tree described as auto, SIZExDEPTH or none."""
    if spec in ("auto", "none"):
        return Tree([-1]) if spec == "none" else spec
    if not re.fullmatch("[1-9][0-9]*x[1-9][0-9]*", spec):
        raise ValueError(f"--tree must be auto, SIZExDEPTH such as 16x6, or none; got {spec!r}")
    return tuple(map(int, spec.split("x")))


def read(kind, name: str, **kwargs):
    """`kind.from_pretrained(name)`, of which all errors, and damaged files raise any, become a ValueError."""
    try:
        return kind.from_pretrained(name, **kwargs)
    except Exception as error:
        reason = " ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
        raise ValueError(f"cannot load {name} (no network, wrong name, damaged files?): {reason}") from error


def load(name: str, args, large: bool = False):
    """A model on the chosen device, packed on a CPU. A large one is offloaded, or shared among torchrun's
    ranks. Raises ValueError for files that lack weights or have other shapes: none runs with random ones."""
    sharded, mapped = large and RANKS > 1, large and args.offload and args.device == "cpu"
    good = args.device != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    # Weights that keep their files' dtype are mapped, and the system pages them in and out.
    dtype = args.dtype or ("auto" if mapped else "bfloat16" if good else "float32")
    kwargs = {"distributed_config": DistributedConfig(tp_size=RANKS)} if sharded else {}
    model, found = read(AutoModelForCausalLM, name, dtype=dtype, output_loading_info=True,
                        ignore_mismatched_sizes=True, **kwargs)
    if lost := sorted(found["missing_keys"]) + [key for key, *_ in found["mismatched_keys"]]:
        raise ValueError(f"cannot load {name}: {len(lost)} weights missing or of other shapes: {lost[0]}")
    if large and args.offload and not mapped:
        return offload(model, args.device)
    return model.eval() if mapped or sharded else pack(model.to(args.device).eval())


def load_tokenizer(args):
    """The target's tokenizer. The draft's must have the same tokens, but for added special ones."""
    target = read(AutoTokenizer, args.target)
    draft = target if args.tree == Tree([-1]) else read(AutoTokenizer, args.draft)
    special = {str(x) for one in (target, draft) for x in one.added_tokens_decoder.values() if x.special}
    differing = {token for token, _ in target.get_vocab().items() ^ draft.get_vocab().items()}
    if differing - special:
        raise ValueError(f"{args.target} and {args.draft} have different tokens; a draft needs its target's")
    if differing:
        warnings.warn("the tokenizers differ in added special tokens, which the draft will not guess")
    return target


def run(args) -> int:
    """Loads, decodes, prints. Returns the exit code."""
    if RANKS > 1:
        torch.distributed.init_process_group("nccl" if args.device.startswith("cuda") else "gloo")
    tokenizer, text, steps, stamps, code = load_tokenizer(args), args.prompt, [], [], 0
    if text.startswith("@"):
        text = Path(text[1:]).read_text(encoding="utf-8")
    ids = tokenizer(text, return_tensors="pt")["input_ids"].long().to(args.device)
    draft = None if args.tree == Tree([-1]) else load(args.draft, args)
    target = load(args.target, args, large=True)

    def on_step(step):
        steps.append(step)
        stamps.append(time.perf_counter())
        if args.explain and not RANK:
            texts = [repr(tokenizer.decode([max(token, 0)]))[1:-1] for token in step.node_tokens]
            labels = [f"[{text}]" if node in (0, *step.path) else text for node, text in enumerate(texts)]
            print(f"step {len(steps)} adds {tokenizer.decode(step.tokens)!r}\n{step.tree.draw(labels)}\n")

    generator = torch.Generator(args.device).manual_seed(args.seed)
    decoder = Decoder(target, draft, args.tree, args.method, generator, on_step)
    loop = functools.partial(decoder, streamer=None if args.explain or RANK else TextStreamer(tokenizer))
    try:
        out = target.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=args.temperature > 0, custom_generate=loop,
            temperature=args.temperature or None, top_k=args.top_k or 0, top_p=args.top_p,
            max_new_tokens=args.max_new_tokens)
        count = out.shape[1] - ids.shape[1]
    except KeyboardInterrupt:
        code, count = 130, sum(len(step.tokens) for step in steps)
    if not RANK:
        summarise(args, decoder, steps, stamps, count)
    if RANKS > 1:
        torch.distributed.destroy_process_group()
    return code


def summarise(args, decoder, steps, stamps, count):
    """Prints what the text cost."""
    tree, tokens = steps[-1].tree if steps else Tree([-1]), [len(step.tokens) for step in steps]
    pace = sum(tokens[1:]) / (stamps[-1] - stamps[0]) if len(steps) > 1 else 0.0
    print(f"\n{count} tokens in {len(steps)} steps, {sum(tokens) / max(1, len(steps)):.2f} tokens a step, "
          f"{pace:.0f} a second\ntree: {tree.size} nodes on {tree.depth} levels; method: {args.method}, "
          f"temperature {args.temperature:g}, seed {args.seed}, {decoder.models[0].dtype} on {args.device}")
    if decoder.plan:
        print("plan: {1:.2f} tokens a step, {2:.2f} times plain decoding; from measured times, so a seed "
              "alone does not repeat the text".format(*decoder.plan))
        if len(steps) > 8 and np.median(np.diff(stamps)) > 2 * decoder.latency.of_step(tree.size, tree.depth):
            print("steps took more than twice as long as planned: is the processor busy with other work?")


def main(argv=None) -> int:
    """Returns the exit code: 0, 2 for a wrong request, 130 after Ctrl-C."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.formatwarning = lambda message, *_: f"sequoia.py: {message}\n"
    try:
        return run(arguments(argv))
    # A device that is not there is a RuntimeError, or an AssertionError where torch has no CUDA at all.
    except (ValueError, OSError, RuntimeError, AssertionError) as error:
        print(f"sequoia.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
