"""Sequoia: tree speculative decoding, lossless, in one file.

A small draft model proposes a tree of tokens. The target model scores all of it in one forward pass. A
verification rule keeps one path, so that every token has exactly the target's distribution. A target bound by
memory reads its weights once a step, for one token or for sixty-four. So more tokens a step make it faster.
The price is a draft pass of c seconds for each level below the root, and slower target passes beyond some
size. If a tree T of n nodes on d levels yields F(T) tokens a step, and a step takes t(n) + (d - 1) c seconds,
decoding is F(T) t(1) / (t(n) + (d - 1) c) times as fast.

The method is "Sequoia: Scalable and Robust Speculative Decoding" (NeurIPS 2024, arXiv 2402.12374):

    paper            here                        where in the paper, and what it is
    T                Tree, tree                  section 3.1, a token tree; its root is the text's last token
    P[k], p_k        acceptance_rates[k - 1]     Definition 3.2, child k's chance once its parent is accepted
    F(T)             expected_tokens             Proposition 3.4
    T[n, b]          with_children               Algorithm 1; section 4.1's G(n, d) is its maximum on d levels
    P, Q             P, Q                        Algorithm 2, target's and draft's distributions after a text
    log P, log Q     p, q: scores                logarithms of probabilities up to a constant, -inf for 0
    R, D             R (residual), D             Algorithm 2, what rejections have left of P and of Q
    t(n), c          Latency                     section 4.1, seconds: a step less draft passes; a draft pass

Sections 1 to 6 are the method, 7 plans, 8 decodes behind transformers' generate, 9 makes passes fast or
small, 10 is the command line. Each can be read after those above it. NONE, -1, means no parent, no child, no
token. Left out: training drafts, batched serving (a batch's rows are decoded one after another), recurrent
models. What a change of a section must keep, and the tests notice:

    1, 2   no tree of its size and depth has more expected tokens than the optimal one
    3      tokens are proposed as the draft gives them, with or without those before
    4      for any target, draft and number of children the token is distributed as the target
    5      a node's logits are those of its path alone; accepted entries are those of a fresh pass
    6      a step adds what `step_plainly` adds, by the same random numbers, also in its form for a GPU
    7      on simulated machines, noisy ones too, the planned tree comes near the fastest
    8      but for rounding the text is that of `generate`, or it is an error, unless a processor hides state
    9      offloaded, a pass gives the same numbers; packed, but for rounding; traced, exactly the packed ones

    python sequoia.py                                            # decodes with the bundled pair
    sequoia.generate(target, inputs, assistant_model=draft)      # in your own code
"""
import argparse, contextlib, gc, inspect, math, os, re, sys, threading, time, warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Callable, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers import PrefixConstrainedLogitsProcessor

# As an index NONE is the last entry: what is read or written there has one more than there are nodes.
NONE = -1

# --- 1  Token trees (section 3.1) ---------------------------------------------------------------------------
# Trees of the same parents are equal, and have the same hash: they are keys of dictionaries. Their attributes
# are never changed.
@dataclass(unsafe_hash=True)
class Tree:
    """The shape of a token tree: for each node, the index of its parent.

    Nodes stand in level order: the root first (its parent is NONE), parents before children, siblings
    together in rank order (the draft's first choice first). So parents never decrease, and a level's nodes,
    like a node's children, have consecutive numbers.

    >>> print(Tree([-1, 0, 0, 0, 1, 1, 4]))
    0─┬─1─┬─4───6
      │   └─5
      ├─2
      └─3

    size, depth: the numbers of nodes and levels, the root's included. For each node: depths, its level;
    ranks, its place among its siblings, from 0; children, in rank order. Another order is a ValueError."""
    parents: tuple[int, ...]

    def __post_init__(self):
        parents = tuple(self.parents)
        if parents[:1] != (NONE,):
            raise ValueError(f"a tree starts with its root, whose parent is -1; got {parents[:8]}")
        depths = [0]
        ranks = [0]
        children = [[]]
        for node, parent in enumerate(parents[1:], start=1):
            if not max(0, parents[node - 1]) <= parent < node:
                raise ValueError(f"not in level order: node {node} has the parent {parent}")
            depths.append(depths[parent] + 1)
            ranks.append(len(children[parent]))
            children[parent].append(node)
            children.append([])
        self.parents = parents
        self.size = len(parents)
        self.depth = depths[-1] + 1
        self.depths = tuple(depths)
        self.ranks = tuple(ranks)
        self.children = tuple(map(tuple, children))

    @classmethod
    def from_paths(cls, paths):
        """The inverse of `paths`. Raises ValueError where a parent or an elder sibling is missing."""
        nodes = sorted(sorted({(), *map(tuple, paths)}), key=len)
        for *parent, rank in nodes[1:]:
            needed = (*parent, rank - 1) if rank else tuple(parent)
            if needed not in nodes:
                raise ValueError(f"the path {(*parent, rank)} needs the path {needed}, which is missing")
        return cls([NONE] + [nodes.index(path[:-1]) for path in nodes[1:]])

    def paths(self):
        """Every node but the root as its ranks from the root down, in level order."""
        paths = [()]
        for node in range(1, self.size):
            paths.append((*paths[self.parents[node]], self.ranks[node]))
        return paths[1:]

    @cached_property
    def mask(self):
        """Who may attend to whom, (size, size) bool: mask[i, j] where j is i or an ancestor of i."""
        mask = np.eye(self.size, dtype=bool)
        for node in range(1, self.size):
            mask[node] |= mask[self.parents[node]]
        return torch.from_numpy(mask)

    def drawing(self, labels, node=0, margin=""):
        """A node and all below it as text; labels: (size,), margin: before each line but the first."""
        text = labels[node]
        margin += " " * len(text)
        for child in self.children[node]:
            last = child == self.children[node][-1]
            if self.ranks[child]:
                text += "\n" + margin + (" └─" if last else " ├─")
            else:
                text += "───" if last else "─┬─"
            text += self.drawing(labels, child, margin + ("   " if last else " │ "))
        return text

    def __str__(self):
        return self.drawing([str(node) for node in range(self.size)])

NO_TREE = Tree([NONE])         # the root alone: plain decoding

def chain(length):
    """The root and one sequence of `length` tokens: plain speculative decoding."""
    return sequences(1, length)

def sequences(k, length):
    """The root and `k` separate sequences of `length` tokens, SpecInfer's tree: 5 of 8 have 41 nodes."""
    return Tree([NONE] + [max(0, node - k) for node in range(1, k * length + 1)])

def k_ary(k, depth):
    """The full tree of `depth` levels: every node above the last level has `k` children."""
    return Tree([NONE] + [child // k for child in range(sum(k**level for level in range(1, depth)))])

# --- 2  Tree construction: the dynamic program (section 3.1, Algorithm 1; appendix) -------------------------
def expected_tokens(tree, acceptance_rates):
    """F(T), the tokens that a step with this tree yields on average (Proposition 3.4): the sum over its nodes
    of the product of the acceptance rates on the way from the root. Rates as in `optimal_tree`.

    Why a sum: a step yields a token for each accepted node, and the target's own, for which the root counts.
    An expected count is the sum of the chances, however they depend on one another. Why products: a node is
    accepted after all its ancestors, at a rate taken to be the same whichever those are (Definition 3.1)."""
    rates = checked_rates(acceptance_rates)
    chance = [1.0]
    for parent, rank in zip(tree.parents[1:], tree.ranks[1:]):
        level = min(tree.depths[parent], len(rates) - 1)
        chance.append(chance[parent] * rates[level, rank] if rank < rates.shape[1] else 0.0)
    return float(sum(chance))

def expected_tokens_table(acceptance_rates, size, depth):
    """G(n, d), the expected tokens of the best tree of exactly n nodes on at most d levels, for all n and d:
    (size + 1, depth + 1) float64, -inf where there is no such tree. Arguments as in `optimal_tree`."""
    return BestTrees(acceptance_rates, size, depth).table(depth)

def optimal_tree(acceptance_rates, size, depth=None):
    """The tree of `size` nodes on at most `depth` levels that has the most expected tokens.

    acceptance_rates: (ranks,), the chance that a node's 1st, 2nd, ... child is the one accepted, falling or
    not; or (levels, ranks), by the node's level, the last row for all deeper ones. A node has up to `ranks`
    children. Raises ValueError for rates that are no probabilities and sizes that no such tree can have.

    >>> optimal_tree([0.6, 0.2, 0.1], size=5).paths()
    [(0,), (1,), (0, 0), (0, 0, 0)]"""
    depth = size if depth is None else depth
    return BestTrees(acceptance_rates, size, depth).tree(size, depth)

class BestTrees:
    """The best trees of all sizes up to `size` on up to `depth` levels, by dynamic programming (Algorithm 1).

    Say a subtree has n nodes, and its root b children. The b-th child's own subtree gets m of the nodes. The
    child is accepted with the chance rate_b, and then its subtree is worth G(m), whatever the others are.
    Its elders' subtrees and the root have the other n - m nodes. So the most that n nodes are worth is

        with_children[b][n] = max over m of  with_children[b - 1][n - m] + rate_b G(m)

    where with_children[0] is the root alone: 1 for n = 1, else impossible, -inf. G(m) is the most over all b,
    on one level less. A root on level i has row i's rates, and its children the next row's, or again the
    last. So this is done for 1, 2, ... levels, and for each row: size^2 additions for each of its rates.

        self.with_children[d][b][row, n]        self.G[d][row, n], the maximum over b

    Nothing is possible on 0 levels. The lists end where one more level changes nothing, as then none does."""

    def __init__(self, acceptance_rates, size, depth):
        if min(size, depth) < 1:
            raise ValueError(f"size and depth must be at least 1, got {size} and {depth}")
        # Subtle: 0 times a G(m) of -inf, for what is impossible, would be NaN.
        self.rates = checked_rates(acceptance_rates).clip(1e-99)                            # (rows, ranks)
        impossible = np.full((len(self.rates), size + 1), -np.inf)
        alone = impossible.copy()
        alone[:, 1] = 1
        self.with_children = [[impossible], [alone]]
        self.G = [impossible, alone]
        # All m are weighed at once. padded is `size` entries of -inf, then a table. fewer is a view of it:
        # fewer[row, n, m] is the table's entry for n - m nodes, and -inf where m > n.
        padded = np.full((len(alone), 2 * size + 1), -np.inf)
        fewer = np.lib.stride_tricks.sliding_window_view(padded, size + 1, axis=1)[:, :, ::-1]
        below = [*range(1, len(alone)), -1]                         # the children's row, by their parent's
        while len(self.G) <= depth:
            G = self.G[-1][below][:, None]                          # (rows, 1, size + 1)
            tables = [alone]
            for rate in self.rates.T:
                padded[:, size:] = tables[-1]
                tables.append((fewer + rate[:, None, None] * G).max(axis=2))
            best = np.max(tables, axis=0)
            if (best == self.G[-1]).all():
                break
            self.with_children.append(tables)
            self.G.append(best)

    def table(self, depth):
        """See `expected_tokens_table`."""
        # More levels than there are in G change nothing.
        return np.stack([self.G[min(d, len(self.G) - 1)][0] for d in range(depth + 1)], axis=1)

    def tree(self, size, depth):
        """See `optimal_tree`."""
        depth = min(depth, len(self.G) - 1)
        largest = np.isfinite(self.G[depth][0]).sum()
        if size > largest:
            raise ValueError(f"no such tree has {size} nodes: the largest has {largest}")
        # Each node's parent, its level and its subtree's size. The list grows while it is read.
        nodes = [(NONE, 0, size)]
        last = len(self.rates) - 1
        for node, (_, level, n) in enumerate(nodes):
            row = min(level, last)
            tables = [table[row] for table in self.with_children[depth - level]]
            G = self.G[depth - level - 1][min(level + 1, last)]
            eldest = len(nodes)
            # The recursion backwards, from the last child to the first, which comes before the others.
            for b in range(np.argmax([table[n] for table in tables]), 0, -1):
                m = 1 + np.argmax(tables[b - 1][n - 1 : 0 : -1] + self.rates[row, b - 1] * G[1:n])
                nodes.insert(eldest, (node, level + 1, m))
                n -= m
        return Tree(parent for parent, _, _ in nodes)

def checked_rates(acceptance_rates):
    rates = np.atleast_2d(np.asarray(acceptance_rates, dtype=np.float64))
    if not ((rates >= 0).all() and rates.sum(axis=1).max() < 1 + 1e-6):
        raise ValueError(f"acceptance_rates must be from 0 to 1, on each level at most 1 in sum; got {rates}")
    return rates

# --- 3  Sampling (section 3.2, Algorithm 2 line 5) ----------------------------------------------------------
# What models say travels as scores: logarithms of probabilities up to a constant, which do not underflow at
# low temperatures. Models' logits are converted to float32 first.
RULED_OUT = -math.inf

def uniform(like, generator):
    """Random numbers from 0 to 1, shaped as `like`, of 53 bits."""
    return torch.rand(like.shape, generator=generator, dtype=torch.float64, device=like.device)

def exponential(u):
    """Exponential random numbers, E = -log u, from numbers u that are uniform between 0 and 1.

    Why u has 53 bits: below, the token of least E / p is drawn. As sum p = 1 the least is about 1, so a token
    of p = 1e-9 needs an E of 1e-9. Float32's u ends 6e-8 short of 1: it would never be drawn."""
    return -u.log().float()

def sample_without_replacement(scores, k, generator=None):
    """Draws k different tokens a row, (rows, V) -> (rows, k); NONE where none is left, or scores are NaN.

    Why the largest differences do it: a score is log p, so the largest log p_i - log E_i are the smallest
    E_i / p_i. Those are arrivals at rate p_i: token i is first with probability p_i / sum p. Arrivals have no
    memory, so the next is drawn likewise among the others. (-log E is called Gumbel noise.)"""
    return most_likely(scores - exponential(uniform(scores, generator)).log(), k)

def sample_with_replacement(scores, k, generator=None):
    """k independent tokens a row, (rows, V) -> (rows, k), NONE where none is possible."""
    return torch.cat([sample_without_replacement(scores, 1, generator) for _ in range(k)], dim=1)

def most_likely(scores, k, generator=None):
    """The k most likely tokens, the likeliest first, (rows, V) -> (rows, k); NONE if fewer are possible. It
    takes a generator as the other two do, and needs none."""
    # Of equal scores `max` takes the first, as `argmax` does, and `topk` any.
    best = scores.max(dim=1, keepdim=True) if k == 1 else scores.topk(min(k, scores.shape[1]))
    tokens = torch.where(best.values > RULED_OUT, best.indices, NONE)
    return pad(tokens, (0, k - tokens.shape[1]), value=NONE) if k > tokens.shape[1] else tokens

def never_ruled_out(q):
    """A draft's logits, (rows, V), at least -1000. Tokens to which the draft gives probability 0 are then
    proposed after all others, each as likely, as in Algorithm 2, lines 12 to 15: the target may want them.
    A temperature above 20 brings them within reach of the noise, which is as lossless."""
    return q.clamp(min=-1000)

def shared_noise(seed, positions, vocabulary):
    """Gumbel noise for what follows each position, (positions, V): a function of seed (1,), position and
    token. These are hashed to 64 bits by the finaliser of splitmix64 without its last shift, in integers,
    which are the same on every device. Their logarithms may be rounded otherwise on another."""
    tokens = torch.arange(vocabulary, device=positions.device)
    x = seed + positions[:, None] * -7046029254386353131 + tokens * -3335678366873096957
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        # Subtle: >> of int64 brings the sign in from the left, where splitmix64 has zeros.
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * factor
    # 52 bits, so that adding one half, which avoids 0 and 1, is exact.
    u = ((x >> 12 & (1 << 52) - 1).double() + 0.5) * 2.0**-52
    return -exponential(u).log()

# --- 4  Verification of one node's children (sections 2.2 and 3.2, Algorithm 2) -----------------------------
# Algorithm 2 and its kin try the children of a node in turn. A child is accepted if its random number u,
# uniform in [0, 1), is less than its ratio, R[s] / D[s] for Algorithm 2. If none is, the token comes from the
# residual, what rejections have left of the target. `Matching` decides otherwise.
#
# Why Algorithm 2 is lossless. One child, drawn from Q, is t and accepted with probability
# Q[t] min(P[t] / Q[t], 1) = min(P[t], Q[t]), and rejected with 1 - sum min(P, Q) = sum max(P - Q, 0). The
# residual, max(P - Q, 0) normalised, then gives each token what is missing of P. Several children: whichever
# token was rejected, the others must yield the same R, the residual. They are drawn from D, the draft without
# that token: the same task with one child less. With none left R itself is drawn: induction does it.
#
# The cover property (Theorem 3.7): with k different children, one is always accepted if they are all the
# tokens to which the draft gives a chance, and the target gives none to others; or if they are the whole
# vocabulary. A rejected token had R[s] < D[s], so the next residual gives it nothing: what is left of the
# target is among the tokens not yet tried. On the last of them R = D = 1. With replacement a rejected token
# may come again, in vain. Where the draft gives a chance to fewer than k, the rest come last, all alike: see
# `never_ruled_out`. The optimal transport property: a single child is accepted with the chance
# sum min(P, Q), the most of any rule.
#
# Towards temperature 0 children become the draft's likeliest tokens in order, or with replacement copies of
# one.

def verify_one_node(P, Q, tokens, u, say=lambda line: None):
    """Algorithm 2, plainly, for one node: P, Q (V,), tokens, u (k,). Returns the accepted child's rank and R;
    or NONE and the residual R, (V,), from which the token is then drawn. What follows is tested against it.
    say: called with a line of text for each child that is tried."""
    R, D = P, Q
    for i, s in enumerate(tokens):
        ratio = R[s] / D[s]
        accepted = u[i] < ratio
        say(f"token {s}: R {R[s]:.2f} / D {D[s]:.2f} = {ratio:.2f}, u {u[i]:.2f}: "
            f"{'accepted' if accepted else 'rejected'}")
        if accepted:
            return i, R
        R = (R - D).clamp(min=0)
        R = R / R.sum()
        D = D.index_fill(0, s, 0)
        if D.sum() == 0:
            # Lines 12 to 15: uniform over what was not rejected.
            D = torch.ones_like(D).index_fill(0, tokens[: i + 1], 0)
        D = D / D.sum()
    return NONE, R

# From here on a row is a node: P, R (rows, V), scores q (rows, V), tokens and u (rows, k) -> ratios (rows, k)
# and residuals (rows, V), not normalised. The draft stays scores: probabilities could underflow once the
# tried tokens are removed. A child may not exist, as a node has fewer, or processors rule out the rest. Its
# token is below 0, and its ratio 0. Its younger siblings do not exist either.

def ratios_in_turn(P, q, tokens, replacement=False):
    """Algorithm 2: each child's ratio if all before it are rejected, and the residual if all are. With
    replacement the tokens before a child stay in the draft that it is drawn from, which is SpecInfer."""
    rows, k = tokens.shape
    s = tokens.clamp(min=0)[:, :, None]                                                 # (rows, k, 1)
    D = q[:, None].expand(-1, k, -1)                                                    # (rows, k, V)
    if not replacement:
        # Child i is drawn without tokens 0 to i - 1.
        D = D.scatter_add(2, s.mT.expand(-1, k, -1), q.new_full((rows, k, k), RULED_OUT).tril(-1))
    # What does not exist takes nothing from R.
    D = D.softmax(dim=2).masked_fill_(tokens[:, :, None] < 0, 0)
    # R is not normalised here. Its sum, by which the plain version divides it, goes to D.
    R = [P]
    sums = []
    for D_of_child in D.unbind(dim=1):
        sums.append(R[-1].sum(dim=1, keepdim=True))
        # max(R - sum(R) D, 0)
        R.append(torch.addcmul(R[-1], sums[-1], D_of_child, value=-1).clamp_(min=0))
    R_of_s = torch.stack(R[:-1], dim=1).gather(2, s)                                    # (rows, k, 1)
    scale = torch.stack(sums, dim=1) * D.gather(2, s)
    # A quotient 0 / 0, or R / 0 for what does not exist, becomes 0.
    ratios = (R_of_s / scale).nan_to_num(posinf=0)[:, :, 0]
    return ratios, R[-1]

def ratios_of_spectr(P, q, tokens):
    """K-sequential selection (SpecTr, arXiv 2310.15141, Algorithm 3): every child's ratio is P / (rho Q).

    One try accepts token t with probability min(P[t] / rho, Q[t]), and any token with their sum, beta. Some
    try of k accepts with 1 - (1 - beta)^k, and what it accepts is t with min(P[t] / rho, Q[t]) / beta. Let
    rho be such that 1 - (1 - beta)^k = rho beta. Then t is accepted with rho min(P[t] / rho, Q[t]), which is
    min(P[t], rho Q[t]). The rest of P is max(P - rho Q, 0): in sum 1 - rho beta, the chance that all tries
    fail. Bisection finds rho: as it grows, 1 - (1 - beta)^k falls, and rho beta, the sum of min(P, rho Q),
    rises. At rho = 0 the second is 0. At rho = k it is k beta: at least the first, by the union bound."""
    Q = q.softmax(dim=1)
    # Without children k and rho are 0, beta may be NaN, and the residual is P.
    k = (tokens >= 0).sum(dim=1, keepdim=True).double()                                         # (rows, 1)
    low, high = torch.zeros_like(k), k
    for _ in range(50):
        rho = (low + high) / 2
        beta = torch.minimum(P / rho, Q).sum(dim=1, keepdim=True)
        enough = 1 - (1 - beta) ** k <= rho * beta
        low, high = torch.where(enough, low, rho), torch.where(enough, rho, high)
    s = tokens.clamp(min=0)
    ratios = torch.where(tokens >= 0, P.gather(1, s) / (high * Q.gather(1, s)), 0)
    return ratios, (P - high * Q).clamp(min=0)

@dataclass(frozen=True)
class Method:
    """How a node's children are proposed and verified: `begin` for a node, `verify` for its children,
    `last_token` for the node at which the path ends."""
    propose: Callable                               # a function as in section 3
    ratios: Callable = None                         # one of the two above; `Matching` has none
    draw: Callable = sample_without_replacement     # of the target's token, from its scores
    shared_noise: bool = False                      # whether all scores come with their position's noise
    leaves_first: bool = False                      # whether section 6's `traverse` verifies a tree

    def begin(self, p, generator):
        """What is left of nodes' targets before a child is tried: scores (nodes, V) -> (nodes, V)."""
        return p.softmax(dim=1)

    def verify(self, left, q, tokens, u):
        """Which children are accepted, (rows, k), of which the first counts, and what is left if none is."""
        ratios, residual = self.ratios(left, q, tokens)
        return u < ratios, residual

    def last_token(self, residual, left, generator):
        """The token that follows the accepted ones, (rows,): from the residual, or from what was left before
        where rounding leaves nothing of that."""
        R = torch.where(residual.sum(dim=1, keepdim=True) > 0, residual, left)
        return self.draw(R.log(), 1, generator)[:, 0]

class Matching(Method):
    """The target draws its own token, whatever was proposed: lossless with any children. A child that is this
    token is accepted. `naive` draws children from the draft, `topk` takes its likeliest. What is left of a
    target, before and after its children are tried, is its own token, (nodes, 1).

    With draw=most_likely this is greedy decoding. With shared noise added to all scores, too, it is
    sampling, by "Gumbel coupling" (arXiv 2408.07978): the likeliest token by score plus Gumbel noise is a
    sample (see `sample_without_replacement`). The draft's likeliest, with the same noise, often are the same.
    Sharing is right here, as the target's scores and the noise alone choose the token, and no two positions
    of a text have the same noise. Algorithm 2 cannot share: its test needs random numbers that are
    independent of the proposal, and the noise that chose it is not. Seed and position name the noise, so a
    seed fixes the text, whatever the tree, the draft or the speed, but for rounding.

    What it costs: with d = sum |P - Q| / 2, Algorithm 2 accepts one child with probability 1 - d. Gumbel
    coupling does with (1 - d) / (1 + d) or more, as its paper proves."""

    def begin(self, p, generator):
        return self.draw(p, 1, generator)

    def verify(self, left, q, tokens, u):
        # What does not exist is not accepted, though a target for which no token is possible draws NONE.
        return (tokens == left) & (tokens >= 0), left

    def last_token(self, residual, left, generator):
        return left[:, 0]

METHODS = {
    "sequoia": Method(sample_without_replacement, ratios_in_turn),
    "specinfer": Method(sample_with_replacement, partial(ratios_in_turn, replacement=True)),
    "spectr": Method(sample_with_replacement, ratios_of_spectr),
    "naive": Matching(sample_with_replacement),
    "topk": Matching(most_likely),
    "traversal": Method(sample_without_replacement, ratios_in_turn, leaves_first=True),
    "gumbel": Matching(most_likely, draw=most_likely, shared_noise=True),
}
GREEDY = Matching(most_likely, draw=most_likely)     # at temperature 0, whatever the method's name

def sample_and_verify(P, Q, k, method="sequoia", generator=None):
    """Proposes k children a row from the draft's Q and verifies them against the target's P, (rows, V) each.
    Returns (rank, token), (rows,) each: the accepted child's rank or NONE, and the token, distributed exactly
    as P. method: a name from METHODS. k: from 1 to V."""
    chosen = METHODS[method]
    noise = -exponential(uniform(P, generator)).log() if chosen.shared_noise else 0
    p = P.double().log() + noise
    q = never_ruled_out(Q.double().log()) + noise
    tokens = chosen.propose(q, k, generator)
    left = chosen.begin(p, generator)
    accepted, residual = chosen.verify(left, q, tokens, uniform(tokens, generator))
    # The maximum of bools is found at the first that is true.
    found, rank = accepted.max(dim=1)
    last = chosen.last_token(residual, left, generator)
    token = torch.where(found, tokens.gather(1, rank[:, None])[:, 0], last)
    return torch.where(found, rank, NONE), token

# --- 5  The tree in a model's cache: indices, mask, entries -------------------------------------------------
# A KV cache has a slot for each token. The tree's root is the text's last token, which no model has seen, and
# the tokens before it fill the first slots. `base` is the root's slot, and its position in the text. Node i
# stands in slot base + i, at position base + its depth: siblings share a position, never a slot.
#
# With the root the draft is fed the token before it, called previous, in slot base - 1: the node that was
# accepted last, or the old root. If it was a leaf, the draft has not been fed it, and writes its entry now.
# Else it writes the same entry again. The target has been fed all nodes.
#
# A tree of four nodes: 1 and 2 are the root's children, 3 is below 1. x marks what the mask shows to each:
# the text, its ancestors and itself. Then node 2 is accepted, and the entries move:
#
#     slot         0 .. base-2    base-1      base    base+1   base+2      base+3
#     before       the text       previous    root    node 1   node 2      node 3
#     position     0 .. base-2    base-1      base    base+1   base+1      base+2
#     root         x              x           x
#     node 1       x              x           x       x
#     node 2       x              x           x                x
#     node 3       x              x           x       x                    x
#     previous     x              x
#     after        the text       the text    root    node 2   free        free
#
# An entry moves to the slot of its position, by which its key was rotated. The next root, the token that
# follows node 2, comes to slot base + 2. Node 2 is then previous.

class Level(NamedTuple):
    """What growing one level takes. On the right, for the four nodes above: levels 0 and 1."""
    expanded: Tensor     # (expanded,) its nodes that have children                    [0]        [1]
    fed: Tensor          # what the draft is fed: those; before the root also previous [4, 0]     [1]
    children: Tensor     # (expanded, width) each one's, then NONE                     [[1, 2]]   [[3]]

class Layout:
    """A tree as index tensors: all that the tree alone decides. offsets, depths and mask have an entry for
    each node and a last one, at the index `size`, for previous. children has a last row, of NONE alone, which
    is read at the index NONE."""

    def __init__(self, tree, device):
        tensor = partial(torch.tensor, device=device, dtype=torch.long)
        size = tree.size
        self.tree = tree
        self.nodes = tensor(range(size))
        self.offsets = tensor([*range(size), -1])               # of its slot from base        (size + 1,)
        self.depths = tensor([*tree.depths, -1])                # of its position from base    (size + 1,)
        # Which nodes each may attend to: previous to none, as its own slot counts as text.
        self.mask = pad(tree.mask, (0, 0, 0, 1)).to(device)                                 # (size + 1, size)
        # Each node's children in rank order, then NONE.
        self.children = pad_sequence([tensor(row) for row in (*tree.children, ())], True, NONE)
        self.levels = []
        for depth in range(tree.depth - 1):
            expanded = [node for node in range(size) if tree.depths[node] == depth and tree.children[node]]
            fed = expanded if depth else [size, 0]
            children = pad_sequence([tensor(tree.children[node]) for node in expanded], True, NONE)
            self.levels.append(Level(tensor(expanded), tensor(fed), children))
        # Each node after all that is below it: sorted by its path and `size`, which is above any rank.
        path = [(), *tree.paths()]
        self.children_first = tensor(sorted(range(size), key=lambda node: (*path[node], size)))
        # From the root to each node, then zeros: with them `move` copies the root's entry to free slots.
        paths = [row.nonzero()[:, 0] for row in tree.mask]
        self.paths = pad_sequence(paths, True).to(device)                               # (size, depth)

class Placed(NamedTuple):
    """Where a tree stands in a model's cache."""
    slots: Tensor        # (size + 1,)
    positions: Tensor    # (size + 1,)
    masks: list          # the mask drawn above for each kind of layer, additive, (1, 1, size + 1, slots)

class PassCache(transformers.Cache):
    """What transformers' attention writes to and reads from in one pass. As masks and positions are given, it
    asks for nothing but `update`."""

    def __init__(self, store, slots, visible):
        super().__init__(layers=[])
        self.store = store           # a `CachedModel`'s
        self.slots = slots           # where to write
        self.visible = visible       # how many slots are read

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        both = []
        for number, states in enumerate((key_states, value_states), start=2 * layer_idx):
            entry = self.store[number, None, : states.shape[1], :, : states.shape[3]]
            entry.index_copy_(2, self.slots, states)
            both.append(entry[:, :, : self.visible])
        return both

class CachedModel:
    """A transformers model with a KV cache that grows. It is fed a text, then nodes of trees."""

    def __init__(self, model):
        self.model = model
        config = model.config.get_text_config(decoder=True)
        self.windows = attention_windows(config)
        self.context = context_of(config)
        self.vocabulary = model.get_input_embeddings().num_embeddings
        # Each layer's keys, then its values, in one tensor, for one operation to move them all:
        # (2 * layers, most heads, capacity, widest head_dim).
        self.store = torch.empty(0, 0, 0, 0)

    def feed(self, text, last=1):
        """Feeds a text, (length,), by the model's ordinary pass. There must be room, see `grow`. The logits
        after its last tokens, so many or all, (up to last, V)."""
        prefill = transformers.DynamicCache()
        # A draft's vocabulary may be padded to a shorter length than its target's.
        ids = text.clamp(max=self.vocabulary - 1)[None]
        output = self.model(input_ids=ids, past_key_values=prefill, use_cache=True, logits_to_keep=last)
        fed = [entry[0] for layer in prefill.layers for entry in (layer.keys, layer.values)]
        if not len(self.store):
            heads, width = (max(entry.shape[dim] for entry in fed) for dim in (0, 2))
            self.store = fed[0].new_zeros(len(fed), heads, self.store.shape[2], width)
        # A NaN that an earlier text left would show through any mask.
        self.store.zero_()
        for stored, entry in zip(self.store, fed):
            stored[: entry.shape[0], : len(text), : entry.shape[2]] = entry
        return output.logits[0]

    def grow(self, capacity):
        """Makes room for so many tokens, and keeps what is there."""
        missing = capacity - self.store.shape[2]
        # Subtle: padding by nothing would copy, and a graph would go on with the old memory.
        if missing > 0:
            self.store = pad(self.store, (0, 0, 0, missing))

    def place(self, layout, base, visible):
        """Places a tree behind the text: its root at `base`, (1,), in a cache of which the first `visible`
        slots take part."""
        slots = base + layout.offsets
        positions = base + layout.depths
        all_slots = torch.arange(visible, device=base.device)
        masks = []
        for window in self.windows.values():
            # All are shown the text, and of the tree what its mask says.
            seen = (all_slots < base).repeat(len(slots), 1)                             # (size + 1, visible)
            seen[:, slots[:-1]] = layout.mask
            if window:
                # The text's positions are its slots. Those of free slots do not matter: they are not seen.
                all_positions = all_slots.index_copy(0, slots[:-1], positions[:-1])
                seen &= positions[:, None] - all_positions < window
            masks.append(torch.where(seen, 0.0, RULED_OUT).to(self.store)[None, None])
        # Nodes beyond the context share its last position: a target's text ends there, a draft only guesses.
        return Placed(slots, positions.clamp(max=self.context - 1), masks)

    def logits(self, tokens, nodes, placed):
        """One pass over some of a tree's nodes: tokens (size + 1,), an index of nodes -> (nodes, V)."""
        # A model that was prepared by `pack` (section 9) has a pass of its own.
        return getattr(self.model, "_sequoia_pass", self.forward)(*self.inputs(tokens, nodes, placed))

    def inputs(self, tokens, nodes, placed):
        # A child that does not exist is -1.
        ids = tokens[nodes].clamp(0, self.vocabulary - 1)[None]
        masks = [mask[:, :, nodes] for mask in placed.masks]
        return ids, placed.positions[None, nodes], placed.slots[nodes], self.store, *masks

    def forward(self, ids, positions, slots, store, *masks):
        """The pass as a function of tensors alone, so that it can be traced."""
        cache = PassCache(store, slots, visible=masks[0].shape[-1])
        mask = masks[0] if len(masks) == 1 else dict(zip(self.windows, masks))
        return self.model(input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=cache,
                          use_cache=True).logits[0]

    def move(self, path, placed):
        """Copies these nodes' entries, (nodes,), aside, then to the tree's first slots, in all layers."""
        self.store.index_copy_(2, placed.slots[: len(path)], self.store.index_select(2, placed.slots[path]))

def attention_windows(config):
    """Each kind of attention layer's window, or None."""
    window = getattr(config, "sliding_window", None)
    # A model whose layers are all alike may name no kind.
    kinds = getattr(config, "layer_types", None) or ["every layer"]
    return {kind: None if kind == "full_attention" else window for kind in kinds}

def context_of(config):
    """The most tokens that a model can be fed. Past its short length longrope rotates all earlier keys anew,
    for which transformers feeds the text again. A tree cannot: the short length is the context."""
    rope = getattr(config, "rope_parameters", None) or {}
    # One for all layers, or one for each kind of layer.
    for parameters in (rope, *rope.values()):
        if isinstance(parameters, dict) and parameters.get("rope_type") == "longrope":
            return parameters["original_max_position_embeddings"]
    return getattr(config, "max_position_embeddings", None) or sys.maxsize

# --- 6  One step: plainly, then on the device ---------------------------------------------------------------
def step_plainly(target, draft, text, tree, generator=None, say=lambda line: None):
    """The whole method in one function, without caches, masks or batches: the tokens that one step adds.

    target, draft: functions from a text, (length,), to the scores of the token after it, (V,), a draft's all
    finite (see `never_ruled_out`). say: see `verify_one_node`. What follows does the same for more methods,
    and faster. It is tested against this. Greedy decoding is the limit for scores divided by a temperature
    towards 0. Draft's scores that lie more than 700 below the highest must be equal, as `never_ruled_out`
    makes those below -1000: in float64 they all are probability 0."""
    # 1. The draft grows the tree. Each node with children proposes them; their texts come in level order.
    texts = [text]
    drafts = []
    for node in range(tree.size):
        drafts.append(draft(texts[node]).double())
        if tree.children[node]:
            proposed = sample_without_replacement(drafts[node][None], len(tree.children[node]), generator)
            texts += [torch.cat([texts[node], token]) for token in proposed.T]
    # 2. The target scores every node's text. Below, that is one pass.
    targets = [target(node_text) for node_text in texts]
    # 3. Algorithm 2 walks from the root, as long as a child is accepted. On each level it tries the children
    # of one node. So a random number for each level and rank is enough.
    u = uniform(torch.zeros(tree.depth, max(map(len, tree.children))), generator)
    node = 0
    while True:
        children = tree.children[node]
        tokens = torch.tensor([texts[child][-1] for child in children], dtype=torch.long)
        P = targets[node].softmax(dim=0)
        Q = drafts[node].softmax(dim=0)
        rank, R = verify_one_node(P, Q, tokens, u[tree.depths[node]], say)
        if rank == NONE:
            break
        node = children[rank]
    # 4. One more token comes from what rejections have left of the target.
    last = sample_without_replacement(R.log()[None], 1, generator)[0]
    say(f"token {int(last)} is drawn from R = {[round(p, 2) for p in R.tolist()]}")
    return torch.cat([texts[node][len(text) :], last])

# Step 3, for a tree whose scores are tensors. Both `walk` and `traverse` return the path's last node and the
# token that follows it, (1,) each. layout: section 5's. tokens: (size + 1,), the last NONE. target: from an
# index of nodes to what `method.begin` gives for them. q: the draft's scores, (size, V). `traverse` never
# branches, whether static or not.

def walk(method, layout, tokens, target, q, generator=None, static=False):
    """From the root to accepted children. A CUDA graph cannot branch: if `static`, the loop goes on after a
    rejection with NONE, which has no children. Then node, left and residual stay as they are."""
    # As in `step_plainly`, a random number for each level and rank. `Matching` reads none. In their place it
    # gets an array of their shape, as a number drawn would make gumbel's next seed depend on the tree.
    u = layout.children[: layout.tree.depth]
    if method.ratios:
        u = uniform(u, generator)
    # at is node, or NONE after a rejection. residual is what rejections of node's children leave of left.
    node = at = layout.nodes[:1]
    left = residual = target(node)
    for level, u_of_level in zip(layout.levels, u):
        width = level.children.shape[1]
        children = layout.children[at, :width]                                              # (1, width)
        accepted, residual = method.verify(residual, q[node], tokens[children], u_of_level[:width])
        # The maximum of bools is found at the first that is true.
        found, rank = accepted.max(dim=1)
        if not static and not found:
            break
        at = torch.where(found, children[0, rank], NONE)
        # Children have larger numbers, and NONE is less than any.
        node = torch.maximum(node, at)
        left = target(node)
        residual = torch.where(found, left, residual)
    return node, method.last_token(residual, left, generator)

def traverse(method, layout, tokens, target, q, generator=None, static=False):
    """Traversal verification (arXiv 2505.12398), leaves first: what is below a child can still save it.

    Say a chain's two tokens are x, then y. The draft gives them 0.8 and 0.4, the target 0.4 and 0.8. Their
    ratios are 0.5 and 2, so the walk accepts both with chance 0.5 * 1. But both models give the pair 0.32, so
    it could always be accepted. The walk cuts each ratio at 1, traversal the product so far.

    How: the walk accepts a child s at once, with chance m = min(R[s] / D[s], 1). Traversal puts that off. It
    adds an outcome to the tokens, failure, which no draft proposes, and gives s a target of its own: m P' for
    the tokens, P' being the model's after s, and 1 - m for failure. Towards that target Algorithm 2 weighs
    the children of s, as towards any other. If all of them fail, s draws from its residual: a token, with
    which the path ends at s, or failure, and the next child of its parent has its turn. In the example:

        node    its token, the draft it is from    m                  its target: x, y, failure
        root                                                          0.4  0.6  0
        1       x,  0.8 0.2                        0.4 / 0.8 = 0.5    0.1  0.4  0.5 (P' is 0.2 0.8)
        2       y,  0.6 0.4                        0.4 / 0.4 = 1      failure 0, as m is 1

    Node 2 never fails, so both tokens are always accepted. `endings` finds targets and residuals, which do
    not depend on what is drawn, from the root down. Here outcomes are drawn from the leaves up.

    Why lossless: Algorithm 2 yields any target. So s fails with chance 1 - m, with which Algorithm 2 at its
    parent rejects it, and else yields tokens by P'. From the leaves up each node yields its own target, at
    last the root, which cannot fail, the model's.

    Why never fewer tokens on average, on a chain: the path goes through a node with chance m. Let a walk get
    there with chance a, and its child t have the ratio r = P'[t] / D[t]. The walk gets to t with min(a r, a),
    traversal, as R = m P', with min(m r, 1). At the root a = m = 1, so by induction a <= m. On a branched
    tree there are mostly more, too: `bench.py verification` measures it. For a root and its children alone it
    is Algorithm 2."""
    P = target(layout.nodes)
    chance, residual = endings(method, layout, tokens, P, q)
    turns = layout.children_first
    first = (uniform(chance, generator) < chance[turns]).max(dim=0, keepdim=True).indices
    node = turns[first]
    return node, method.last_token(residual[node], P[node], generator)

def endings(method, layout, tokens, P, q):
    """For `traverse`: each node's chance to draw a token once its children have failed, (size,), and the
    residual from which it does, not normalised, (size, V)."""
    # A row of R is a node's target, over the tokens and, last, failure: at first the model's P', and once its
    # children are weighed its residual. No draft proposes failure: weighing takes nothing from it. m is the
    # chance above. Children that only pad a level, NONE, are written to an extra last row, which is dropped.
    R = pad(P, (0, 1, 0, 1))                                                            # (size + 1, V + 1)
    q = pad(q, (0, 1), value=RULED_OUT)
    m = R.new_ones(len(R))
    for nodes, _, children in layout.levels:
        ratios, R[nodes] = method.ratios(R[nodes], q[nodes], tokens[children])
        m[children] = ratios.clamp(max=1)
        R[children, :-1] *= m[children, None]
        R[children, -1] = 1 - m[children]
    success = R[:, :-1].sum(dim=1)
    # Subtle: the quotient is exactly 1 for the root, and no small chance is rounded to 0. It is NaN where no
    # token is possible, for which the draw will give NONE, and where rounding leaves nothing.
    chance = success / (success + R[:, -1])
    return torch.where(chance.isnan(), m, chance)[:-1], R[:-1, :-1]

class Step(NamedTuple):
    """What one step did."""
    tree: Tree
    node_tokens: list                # (size,) each node's token, NONE for a child that does not exist
    path: list                       # the accepted nodes below the root, in order
    token: int                       # the one that follows them, from the target or what is left of it
    seconds: float | None            # what it took; None for a prompt's pass, and as GPUs warm up

    @property
    def tokens(self):
        """The tokens that this step adds to the text."""
        return [self.node_tokens[node] for node in self.path] + [self.token]

    def tried(self):
        """Each child that a walk along the path would have tried, in order, as (parent, child)."""
        for node in (0, *self.path):
            for child in self.tree.children[node]:
                if self.node_tokens[child] < 0:
                    break
                yield node, child
                if child in self.path:
                    break

# Processors shape the draft too: a draft shaped like the target is accepted more. Any draft is lossless, if
# the same scores propose and verify. The tokens that CUTS would take from a draft are lowered by FAR_BELOW:
# they come last, as the target may keep them.
CUTS = (TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
FAR_BELOW = 100
# All but these may read the text, are called node by node, which is slower, and cannot be recorded.
TEXT_FREE = (TemperatureLogitsWarper, *CUTS)

class Sampling:
    """How a row of a call samples: its method, and the processors that shape both models' scores."""

    def __init__(self, method, processors, padding=(), row=0, rows=1, criteria=()):
        self.method = method
        self.processors = [of_row(processor, row) for processor in processors]
        self.padding = padding       # tokens before the text, for the processors alone
        self.row = row               # of a batch of so many rows
        self.rows = rows
        # The tokens and the length that end a text.
        self.ends = {token for one in criteria if isinstance(one, transformers.EosTokenCriteria)
                     for token in one.eos_token_id.tolist()}
        self.max_length = getattr(criteria, "max_length", None) or sys.maxsize
        self.attributes = set()      # of the processors, as `check_memory` has seen them printed
        text_free = [(type(one), dict(vars(one))) for one in processors if type(one) in TEXT_FREE]
        self.reads_text = len(text_free) < len(processors)
        # A plan is valid for these alone, and so is a recorded step. A processor that reads the text is not
        # among them: a changed one keeps the plan, and no step is recorded with it.
        self.settings = (method, self.reads_text, text_free)

    def scores(self, logits, text=None, paths=None, draft=False):
        """A model's scores after some paths, (paths, V): float32. Paths begin with the text's last token. If
        no processor reads them, they need not be given."""
        scores = logits.float()
        if draft:
            scores = never_ruled_out(scores)
        if self.reads_text:
            return torch.cat([self.processed_after(text, *one, draft) for one in zip(paths, scores.split(1))])
        return self.processed(None, scores, draft)

    def check_memory(self, logits, text, path):
        """Raises ValueError if processors, as printed, have changed since the last path, or if a second call
        after this one, with any logits, (1, V), changes them or their scores. What counts its calls, or
        follows the text by itself, would count and follow a tree's nodes."""
        chances = []
        for _ in range(2):
            chances.append(self.scores(logits, text, [path]).softmax(dim=1))
            values = [value for one in self.processors for value in getattr(one, "__dict__", {}).values()]
            # An attribute may be an object with attributes. Of a large array only the ends are printed.
            inner = [getattr(value, "__dict__", None) for value in values]
            sums = [value.sum() for value in values if isinstance(value, Tensor | np.ndarray)]
            self.attributes.add(repr([values, inner, sums]))
        # On a GPU a sum may be rounded otherwise from call to call.
        alike = torch.allclose(*chances, atol=1e-3, equal_nan=True)
        if not alike or len(self.attributes) > 1:
            raise ValueError(f"not supported: a logits processor with a memory. From call to call one gives "
                             f"other scores, or changes its attributes: {names_of(self.processors)}")

    def processed_after(self, text, path, scores, draft):
        text = torch.cat([text.new_tensor(self.padding), text[:-1], path])
        # Below a child that does not exist, and where the text has ended, nothing is used, and a processor
        # may not know what to say.
        ended = len(text) >= self.max_length or self.ends.intersection(path[1:].tolist())
        if ended or (path < 0).any():
            return scores
        # Some processors know how many rows their batch has. They get so many copies of this text, and this
        # row's answer is taken.
        shown = text.repeat(self.rows, 1)
        scores = self.processed(shown, scores.repeat(self.rows, 1), draft)[self.row, None]
        if not shown[0].equal(text):
            raise ValueError("not supported: a logits processor that changes the text")
        return scores

    def processed(self, text, scores, draft):
        for processor in self.processors:
            shaped = processor(text, scores).float()
            if draft and type(processor) in CUTS:
                shaped = torch.where(shaped > RULED_OUT, shaped, scores - FAR_BELOW)
            scores = shaped
        return scores

def names_of(objects):
    return [getattr(one, "__name__", type(one).__name__) for one in objects]

def of_row(processor, row):
    """A processor for one row of a batch: a grammar is told that row's number for all copies of its text."""
    if type(processor) is not PrefixConstrainedLogitsProcessor:
        return processor
    allowed = processor._prefix_allowed_tokens_fn
    return PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row, ids), num_beams=1)

class TreeStep:
    """The step with one tree: draft, score, verify, keep. It is made anew for another tree, for another way
    of sampling, and for larger caches, as a recorded one goes on with the old memory. A call depends on
    nothing that an earlier one has left in its tensors.

    vocabulary: of the target's logits. seed: of shared noise, (1,). static: shapes are fixed, and no value
    goes to the host while it runs, so that a CUDA graph can hold it: the second call records it."""

    def __init__(self, tree, target, draft, vocabulary, seed, generator, static):
        self.layout = Layout(tree, seed.device)
        self.target = target
        self.draft = draft
        self.models = [target, draft] if self.layout.levels else [target]
        self.seed = seed
        self.generator = generator
        self.static = static
        self.base = torch.zeros_like(seed)
        # The nodes' tokens, then that of previous.
        self.tokens = seed.new_zeros(tree.size + 1)
        # The draft's scores after each node.
        self.q = torch.zeros(tree.size, vocabulary, dtype=torch.float32, device=seed.device)
        # The target's: a function from an index of nodes, kept for section 10's `tried_children`.
        self.p = None
        self.calls = 0
        self.graph = None
        self.result = None           # where the graph writes what `program` returns

    def __call__(self, text, sampling, logits=None):
        """One step after a text, (length,). The target has seen all before its last token, the root. A draft
        may lack previous. logits: the target's for each node, (size, V), if known, as a prompt's pass gives
        the root's."""
        begun = time.perf_counter()
        self.base.fill_(len(text) - 1)
        self.tokens[:1] = text[-1:]
        # A text of one token has no previous. The root stands in its place, and is not used there.
        self.tokens[-1:] = text[-2:][:1]
        self.calls += 1
        # Not timed are a prompt's pass, a GPU's first call, which warms up, and if static the recorded one.
        usual = logits is None and self.calls > self.seed.is_cuda + self.static
        if self.static and self.calls == 2:
            self.record(text, sampling)
        if self.graph is None:
            result = self.program(text, sampling, logits)
        else:
            self.graph.replay()
            result = self.result
        # If static, the step's one copy to the host.
        node, token, *tokens = result.tolist()
        tree = self.layout.tree
        for child, parent in enumerate(tree.parents[1:], start=1):
            # What is below a child that does not exist does not exist either.
            if tokens[parent] < 0:
                tokens[child] = NONE
        path = tree.mask[node].nonzero()[1:, 0].tolist()
        return Step(tree, tokens, path, token, time.perf_counter() - begun if usual else None)

    def record(self, text, sampling):
        try:
            graph = torch.cuda.CUDAGraph()
            if self.generator is not None:
                graph.register_generator_state(self.generator)
            with torch.cuda.device(self.base.device), torch.cuda.graph(graph):
                self.result = self.program(text, sampling)
            self.graph = graph
        except RuntimeError as error:
            warnings.warn(f"decoding goes on without a CUDA graph: {error}")
            self.static = False

    def program(self, text, sampling, logits=None):
        """The step on the device: the last accepted node, the next token, the nodes' tokens, (size + 2,)."""
        layout, tokens, method = self.layout, self.tokens, sampling.method
        size, vocabulary = self.q.shape

        def scores(logits, nodes, draft=False):
            """A model's scores after these nodes, an index of them, (nodes, V)."""
            # From the root, the text's last token, to each node.
            paths = (tokens[:-1][layout.mask[node]] for node in nodes)
            return sampling.scores(logits, text, paths, draft)

        def noisy(p, nodes):
            return p + noise[nodes] if method.shared_noise else p

        # 1. The tree takes its place behind the text.
        visible = self.target.store.shape[2] if self.static else len(text) - 1 + size
        placed = [model.place(layout, self.base, visible) for model in self.models]
        if method.shared_noise:
            positions = self.base + layout.nodes[: layout.tree.depth]
            noise = shared_noise(self.seed, positions, vocabulary)[layout.depths[:size]]        # (size, V)
        # 2. The draft grows it level by level: a pass over a level's parents proposes their children.
        for expanded, fed, children in layout.levels:
            guesses = self.draft.logits(tokens, fed, placed[-1])[-len(expanded) :]
            missing = vocabulary - guesses.shape[1]
            # A draft's vocabulary may be padded to another length than its target's. If longer, it is cut.
            if missing:
                guesses = pad(guesses, (0, missing), value=RULED_OUT)
            q = self.q[expanded] = scores(guesses, expanded, draft=True)                # (expanded, V)
            # Proposals beyond a node's children go to NONE, previous's entry, which is not read any more.
            tokens[children] = method.propose(noisy(q, expanded), children.shape[1], self.generator)
        tokens[-1].fill_(NONE)
        # 3. The target scores it in one pass.
        if logits is None:
            logits = self.target.logits(tokens, slice(size), placed[0])                 # (size, V)
        # 4. Verification finds the path to keep and the token after it.
        self.p = lambda nodes: scores(logits[nodes], nodes)

        def target(nodes):
            return method.begin(noisy(self.p(nodes), nodes), self.generator)

        if self.static:
            # Of all nodes at once, to be looked up. Else `walk` asks for one after the other.
            target = target(layout.nodes).__getitem__
        verify = traverse if method.leaves_first else walk
        node, token = verify(method, layout, tokens, target, self.q, self.generator, self.static)
        # NaN would else pass for a rejection or a child that does not exist. The maximum of NaN is NaN.
        token = torch.where((self.q.max() + logits.max()).isnan(), NONE, token)
        # 5. The entries of the accepted nodes move up behind the text.
        path = layout.paths[node][0]                                                    # (depth,)
        for model, place in zip(self.models, placed):
            model.move(path, place)
        return torch.cat([node, token, tokens[:-1]])

# --- 7  The hardware-aware planner (section 4.1) ------------------------------------------------------------
# How often a first, second, ... child is accepted when it is tried, before any evidence: a decent draft, a
# power law in the rank. It counts as much as PRIOR_TRIES tries.
PRIOR = 0.6 / np.arange(1, 33) ** 0.8
PRIOR_TRIES = 4
# The most nodes and levels of a planned tree, and children of a node in it; the nodes also of a given shape.
LARGEST, DEEPEST, WIDEST = 1024, 24, 16
# A tree counts as timed after FEW steps with it, NO_TREE after twice as many. The last MANY are remembered.
FEW, MANY = 3, 60

class Latency(NamedTuple):
    """Measured seconds: t(n) of a step without its draft passes, by tree size n; c of a draft pass."""
    sizes: list      # rising, from 1 on
    t: list
    c: float

    def of_step(self, size, depth):
        return np.interp(size, self.sizes, self.t) + (depth - 1) * self.c

class Plan(NamedTuple):
    """A tree and what it promises: tokens and seconds a step, and how many times the speed of no tree. The
    times that are planned with are free of noise. On a noisy machine they are too short, the promise too
    high."""
    tree: Tree
    tokens: float
    seconds: float
    speedup: float

def plan(rates, latency):
    """The tree of n nodes on d levels that maximises G(n, d) / (t(n) + (d - 1) c), over all sizes up to the
    largest timed one and depths up to DEEPEST. rates: as in `optimal_tree`."""
    largest = latency.sizes[-1]
    best_trees = BestTrees(rates, largest, DEEPEST)
    tokens = best_trees.table(DEEPEST)[1:, 1:]                                            # (largest, DEEPEST)
    n, d = np.mgrid[1 : largest + 1, 1 : DEEPEST + 1]
    seconds = latency.of_step(n, d)
    pace = tokens / seconds
    best = np.unravel_index(pace.argmax(), pace.shape)
    return Plan(best_trees.tree(n[best], d[best]), tokens[best], seconds[best], pace[best] * latency.t[0])

def noiseless(seconds):
    """What some steps of one kind take without the noise, which only adds to a time."""
    return float(np.quantile(seconds, 0.1))

def seconds_to_plan(size):
    """About what a plan over so many sizes takes, with a trial tree of double size. This is a formula, fitted
    to measured times, and no clock: all ranks must plan alike."""
    return min(DEEPEST, size) * min(WIDEST, size) * (7e-6 + 2.5e-9 * size**2)

class Planner:
    """Chooses the tree of each step, for all texts that are sampled alike. steps: counted over all of them.
    tree: the best so far; steps that try others leave it. plan: the last Plan. What it does with a shape:

    A Tree stays. For (size, depth) the best tree is found anew at steps 16, 32, 64, ..., by the acceptance
    rates known then. For "auto" three trees are tried first, FEW steps or more each, and timed. Then the best
    tree of all sizes up to the largest timed one is planned. If t(n) is a guess near its size, a tree of
    another size is tried, and it plans again. If not, the next plan comes after as many steps as there were.
    A plan of "auto" waits until it takes less than 2% of the time decoded."""

    def __init__(self, shape):
        self.shape = shape
        # How often the root's k-th children were tried, and accepted, and those of all other nodes.
        self.tried, self.accepted = np.zeros((2, 2, len(PRIOR)))
        self.seconds = {}        # by tree: what the last steps with it took
        self.decoded = 0.0       # what all timed steps took
        self.steps = 0
        self.due = 16            # the step from which on it tries trees, and then plans
        self.plan = None
        self.tree = shape
        self.trials = []
        if isinstance(shape, tuple):
            self.tree = optimal_tree(self.rates(), *shape)
        elif shape == "auto":
            # A decent tree, none, and one that has 8 nodes, too, but takes 7 draft passes, not 3.
            self.trials = [optimal_tree(self.rates(), 8, 4), NO_TREE, chain(7)]
            self.tree = self.trials[0]
            self.due = 0

    def next_tree(self):
        """The tree for the next step."""
        if self.steps >= self.due:
            for tree in self.trials:
                # What all trees are compared with is timed twice as often.
                if len(self.seconds.get(tree, ())) < (2 * FEW if tree == NO_TREE else FEW):
                    return tree
            if isinstance(self.shape, tuple):
                self.tree = optimal_tree(self.rates(), *self.shape)
                self.due = 2 * self.steps
            elif self.shape == "auto":
                self.replan()
        return self.tree

    def replan(self):
        """Sets the tree for the next steps, and what is tried before it."""
        largest = max(tree.size for tree in self.seconds)
        if seconds_to_plan(largest) > 0.02 * self.decoded:
            return
        rates = self.rates()[:, :WIDEST]
        latency = self.latency()
        self.plan = plan(rates, latency)
        self.tree = self.plan.tree
        size = self.tree.size
        next_timed = min([n for n in latency.sizes if n > size], default=size)
        # The best may lie beyond the timed sizes. LARGEST is 8, the first one, doubled seven times.
        if 2 * size > largest and largest < LARGEST:
            trial = 2 * largest
        # No size near it is timed: t(size) is a guess.
        elif next_timed > size + max(3, size // 3):
            trial = (size + next_timed) // 2
        else:
            self.due = 2 * self.steps
            # Each of the first three trees loses its oldest time, which may have been slow. Before the next
            # plan `next_tree` has a new one taken where too few are left.
            for tree in self.trials[:3]:
                self.seconds[tree].pop(0)
            return
        # Deep enough for a binary tree.
        self.trials.append(optimal_tree(rates, trial, max(self.tree.depth + 1, trial.bit_length())))

    def latency(self):
        """t(n) and c: a step with n nodes on d levels takes t(n) + (d - 1) c. The first and third trial have
        one size, and the third more levels, of which each takes c."""
        branched, _, straight = self.trials[:3]
        longer = noiseless(self.seconds[straight]) - noiseless(self.seconds[branched])
        c = max(0.0, longer / (straight.depth - branched.depth))
        without_draft = {}           # by size
        for tree, seconds in self.seconds.items():
            without_draft.setdefault(tree.size, []).extend(np.array(seconds) - (tree.depth - 1) * c)
        sizes = sorted(without_draft)
        # A pass over fewer tokens takes no longer, and one over a single token the least.
        shortest = np.minimum.accumulate([noiseless(without_draft[size]) for size in sizes[::-1]])[::-1]
        return Latency(sizes, shortest.clip(noiseless(self.seconds[NO_TREE])).tolist(), c)

    def learn(self, step):
        """Learns from a step which children a walk to its end would have tried, and what steps take."""
        self.steps += 1
        for node, child in step.tried():
            row, rank = min(node, 1), step.tree.ranks[child]
            if rank < len(PRIOR):
                self.tried[row, rank] += 1
                self.accepted[row, rank] += child in step.path
        if step.seconds:
            self.seconds[step.tree] = [*self.seconds.get(step.tree, ()), step.seconds][-MANY:]
            self.decoded += step.seconds

    def speedup_of(self, steps):
        """How many times the speed of no tree these steps had; None before the first plan of "auto"."""
        steps = [step for step in steps if step.seconds]
        if steps and self.plan:
            tokens = sum(len(step.tokens) for step in steps)
            seconds = sum(step.seconds for step in steps)
            # Not `noiseless`: the steps that it is compared with have their noise, too.
            return float(np.median(self.seconds[NO_TREE])) * tokens / seconds

    def rates(self):
        """The acceptance rates of the root's children and of all others', (2, ranks): the chance that a child
        is accepted when tried, times the chance that it is tried."""
        prior = PRIOR
        rows = []
        for tried, accepted in zip(self.tried, self.accepted):
            when_tried = []
            elder = 1
            for guess, n, k in zip(prior, tried, accepted):
                # A child is hardly accepted more often than its elder.
                elder = (k + PRIOR_TRIES * min(guess, elder)) / (n + PRIOR_TRIES)
                when_tried.append(elder)
            when_tried = np.array(when_tried)
            # The chance that all elders fail: the product up to the child, without its own factor.
            is_tried = np.cumprod(1 - when_tried) / (1 - when_tried)
            rows.append(when_tried * is_tried)
            # What the root's children show is the prior of all others'.
            prior = when_tried
        return np.stack(rows)

# --- 8  Decoding, behind transformers' generate -------------------------------------------------------------
# What is here decodes a whole text, and keeps transformers' contract: but for rounding a call gives what
# `generate` would, or an error names what is not supported, as far as processors and criteria show it.

# Settings that ask for another decoding or output.
UNABLE = ("assistant_early_exit", "constraints", "dola_layers", "force_words_ids", "output_attentions",
          "output_hidden_states", "output_logits", "output_scores", "penalty_alpha",
          "prompt_lookup_num_tokens", "token_healing", "use_mtp")
# What `generate` itself hands over.
PREPARED = ("attention_mask", "logits_to_keep", "past_key_values", "position_ids", "streamer", "use_cache")
# Criteria that look at each row of a batch by itself.
BY_ROW = (transformers.MaxLengthCriteria, transformers.MaxTimeCriteria, transformers.EosTokenCriteria,
          transformers.StopStringCriteria)
# What a model's pass must take.
NEEDED = {"position_ids", "past_key_values", "logits_to_keep"}
# What decides how `generate` goes on from token to token.
LOOP = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_prefill", "_sample")
# How many of a first prompt's last tokens are scored again.
PROBED = 6

def check_fit(model):
    """Raises ValueError if a model's kind or configuration rules out trees, with all reasons. Of what these
    do not say `probe` finds out the most, by a model's numbers."""
    name = type(model).__name__
    if not isinstance(model, transformers.PreTrainedModel) or model.get_output_embeddings() is None:
        raise ValueError(f"needs a language model as transformers loads it, not compiled and not its name; "
                         f"got {name}")
    config = model.config.get_text_config(decoder=True)
    kinds = {*(getattr(config, "layer_types", None) or ())} - {"full_attention", "sliding_attention"}
    missing = NEEDED - inspect.signature(model.forward).parameters.keys()
    own = [method for method in LOOP if hasattr(model, method) and is_foreign(getattr(model, method))]
    # Layers that checkpoint in training keep no cache.
    checkpointing = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    devices = {str(weight.device) for weight in model.parameters()}
    reasons = {
        "it has an encoder": model.config.is_encoder_decoder,
        "it is recurrent": model._is_stateful,
        # The probe cannot see that in bfloat16.
        "its mask counts slots, not positions": config.model_type == "gpt_neo",
        "ALiBi counts slots, not positions": getattr(config, "alibi", False),
        f"it has layers of {kinds}": kinds,
        f"its forward takes no {missing}": missing,
        f"it overrides {own}": own,
        "load it with attn_implementation='sdpa'": model.config._attn_implementation not in ("eager", "sdpa"),
        "set its config.output_router_logits=False": getattr(config, "output_router_logits", False),
        "call its eval()": model.training and checkpointing,
        f"it must be on one device, not {devices}":
            len(devices) > 1 and not hasattr(model, "_sequoia_offloaded")}
    reasons = [reason for reason, holds in reasons.items() if holds]
    if reasons:
        raise ValueError(f"{name} cannot verify a tree: {'; '.join(reasons)}")

def is_foreign(function):
    """Whether a method or hook was written outside torch, transformers, accelerate and `offload`."""
    function = inspect.unwrap(getattr(function, "func", function))
    module = getattr(function, "__globals__", {}).get("__name__", "")
    # `offload` may be that of a copy of this file.
    own = getattr(function, "__qualname__", "").startswith("offload.<locals>.")
    return not own and not module.startswith(("torch.", "transformers.", "accelerate."))

def tree_shape(tree):
    """A Tree, (size, depth) or "auto", from one of these, "SIZExDEPTH" or "none"."""
    if tree == "auto":
        return tree
    # A Tree may come from a copy of this file, as transformers makes one of a folder's.
    if hasattr(tree, "parents"):
        return Tree(tree.parents)
    if tree == "none":
        return NO_TREE
    shape = tuple(tree) if isinstance(tree, list) else tree
    if isinstance(tree, str) and re.fullmatch(r"\d+x\d+", tree):
        shape = tuple(map(int, tree.split("x")))
    if not isinstance(shape, tuple) or [*map(type, shape)] != [int, int] or shape[0] > LARGEST:
        raise ValueError(f"tree must be a Tree, 'auto', 'none', (nodes, levels) or 'NODESxLEVELS', as 16x5, "
                         f"of up to {LARGEST} nodes; got {tree!r}")
    return shape

class Report(NamedTuple):
    """What a Decoder's last call came to. Printed, it is a line that ends with a verdict on the pair."""
    tokens: int              # written
    steps: int               # the passes of the target that yielded them, that over the prompt included
    seconds: float           # of the whole call
    tree: Tree               # the planner's last choice
    used: int                # how many of the steps had this tree
    speedup: float | None    # achieved after the prompt, in times the speed of no tree, once one is planned

    def __str__(self):
        if self.tree == NO_TREE:
            verdict = "no tree is used"
        elif self.speedup is None:
            verdict = "not compared with no tree"
        else:
            verdict = f"about {self.speedup:.1f} times the speed of no tree"
        return (f"tokens {self.tokens}, steps {self.steps}, seconds {self.seconds:.1f}: "
                f"{self.tokens / self.steps:.2f} tokens a step, {self.tokens / self.seconds:.1f} a second; "
                f"tree {self.tree.size}x{self.tree.depth} in {self.used} of them: {verdict}")

class Decoder:
    """Decodes with a target and a draft, behind transformers' generate:

        decoder = Decoder(target, draft)
        decoder.generate(inputs, do_sample=True, temperature=0.6)
        target.generate(**inputs, custom_generate=decoder, do_sample=True, temperature=0.6)     # the same

    draft        a model of the same vocabulary; not needed for the tree "none"
    tree         a Tree; (size, depth) or "16x5", the best tree of that shape; "auto", the fastest for the
                 pair and the machine; "none"
    method       a name from METHODS, or a Method
    generator    by default torch's own; processes that share a target seed theirs alike
    on_step      called with each Step; a text's first is the prompt's pass
    cuda_graph   record the step on a GPU

    A Decoder keeps caches, plan and graph: models must not change, and texts come one at a time. report: a
    Report on its last call. Raises ValueError for what it cannot work with."""

    def __init__(self, target, draft=None, tree="auto", method="sequoia", generator=None, on_step=None,
                 cuda_graph=True):
        self.tree = tree_shape(tree)
        if draft is None and self.tree != NO_TREE:
            raise ValueError("no draft: pass assistant_model=draft, or beside custom_generate=sequoia.decode "
                             "draft=draft; or tree='none', which needs none")
        models = [target] if self.tree == NO_TREE else [target, draft]
        for model in models:
            check_fit(model)
        self.method = METHODS.get(method) if isinstance(method, str) else method
        if not isinstance(self.method, Method):
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
        self.models = [CachedModel(model) for model in models]
        self.target = self.models[0]
        # Without a draft this is the target, and no step drafts.
        self.draft = self.models[-1]
        sizes = sorted(model.vocabulary for model in self.models)
        if sizes[0] < 0.9 * sizes[-1]:
            raise ValueError(f"target and draft must have one vocabulary, got {sizes} tokens")
        devices = [model.device for model in models]
        if devices[0] != devices[-1]:
            raise ValueError(f"target and draft must be on one device: {devices}")
        self.generator = generator
        self.on_step = on_step or (lambda step: None)
        # A model that is shared among ranks or offloaded needs the host in its pass.
        self.sharded = (getattr(target, "tp_size", None) or 1) > 1
        hosted = self.sharded or any(hasattr(model, "_sequoia_offloaded") for model in models)
        self.cuda_graph = cuda_graph and target.device.type == "cuda" and not hosted
        self.seed = torch.zeros(1, dtype=torch.long, device=target.device)
        self.in_use = threading.Lock()
        self.capacity = 0
        self.probed = False
        # Raises ValueError for an impossible shape.
        self.planner = Planner(self.tree)
        self.sampling = self.tree_step = self.made_for = self.report = None

    def generate(self, inputs=None, generation_config=None, *, streamer=None, tokenizer=None,
                 stopping_criteria=None, **kwargs):
        """`target.generate` with its arguments, but for another draft. inputs: ids, (rows, length), or all
        that a tokenizer returns. Streamers and tokenizers, which transformers keeps from a custom_generate,
        arrive here."""
        for name in ("assistant_model", "assistant_tokenizer"):
            if kwargs.get(name) is not None:
                raise ValueError(f"not supported: {name}. A Decoder has its draft, which needs the target's "
                                 f"tokenizer")
        if isinstance(inputs, Mapping):
            kwargs = {**inputs, **kwargs}
            inputs = None
        if not isinstance(kwargs.get("input_ids", inputs), Tensor | None):
            raise ValueError("inputs must be ids: what a tokenizer returns with return_tensors='pt'")
        model = self.target.model
        criteria = transformers.StoppingCriteriaList(stopping_criteria or ())
        # What the call leaves open its configuration decides, and what that leaves open the model's.
        stop_strings = kwargs.get("stop_strings")
        for config in (generation_config, model.generation_config):
            if stop_strings is None:
                stop_strings = getattr(config, "stop_strings", None)
        # Without a tokenizer `generate` says that it needs one.
        if stop_strings is not None and tokenizer is not None:
            # As in `generate`, criteria of the caller's that are of this type take precedence.
            stop = [transformers.StopStringCriteria(tokenizer, stop_strings)]
            criteria = model._merge_criteria_processor_list(stop, criteria)
            kwargs["stop_strings"] = None
        return model.generate(inputs, generation_config, stopping_criteria=criteria,
                              custom_generate=partial(self, streamer=streamer), **kwargs)

    def __call__(self, model, input_ids, logits_processor, stopping_criteria, generation_config,
                 **arguments):
        """What `generate` calls: (rows, length) ids -> (rows, longer), row by row, padded where a row has
        ended; a time limit is for all rows together. With return_dict_in_generate these are `sequences`, and
        there is no cache beside them. Stopping criteria are checked after every token. Processors must be
        functions of a row's ids and scores. With a draft or in a batch those that read the text are called
        twice more after each step, which shows most that have a memory. Raises ValueError for NaN logits and
        requests that this cannot do, RuntimeError while it decodes another text."""
        if not self.in_use.acquire(blocking=False):
            raise RuntimeError("this Decoder is in use: one text at a time")
        try:
            begun = time.perf_counter()
            if input_ids.dtype not in (torch.int32, torch.int64):
                raise ValueError(f"ids must be integers, got {input_ids.dtype}")
            ids = input_ids.to(self.seed.device).long()
            mask = arguments.get("attention_mask")
            mask = torch.ones_like(ids) if mask is None else mask.to(ids.device).long()
            self.check(model, ids, mask, stopping_criteria, generation_config, arguments)
            streamer = arguments.get("streamer")
            stream = (lambda ids: None) if streamer is None else streamer.put
            stream(ids.cpu())
            method = self.method if generation_config.do_sample else GREEDY
            rows = []
            steps = []
            for row, text in enumerate(ids):
                sampling = Sampling(method, logits_processor, text[mask[row] == 0].tolist(), row, len(ids),
                                    stopping_criteria)
                rows.append(self.decode_row(text, sampling, stopping_criteria, stream, steps))
            if streamer is not None:
                streamer.end()
            tokens = sum(map(len, rows)) - ids.numel()
            tree = self.planner.tree
            used = sum(step.tree == tree for step in steps)
            self.report = Report(tokens, len(steps), time.perf_counter() - begun, tree, used,
                                 self.planner.speedup_of(steps))
        finally:
            self.in_use.release()
        out = pad_sequence(rows, True, int(generation_config._pad_token_tensor or 0))
        if generation_config.return_dict_in_generate:
            return transformers.generation.GenerateDecoderOnlyOutput(sequences=out)
        return out

    def decode_row(self, text, sampling, stopping_criteria, stream, steps):
        """A row and the tokens that follow, (longer,), until a criterion ends it. Its steps are appended."""
        for step in self.steps_after(text[len(sampling.padding) :], sampling):
            self.on_step(step)
            steps.append(step)
            for token in step.tokens:
                if token < 0:
                    raise ValueError("the models gave NaN logits, or the processors left no token possible")
                text = torch.cat([text, text.new_tensor([token])])
                stream(text[-1:].cpu())
                shown = text[None].clone()
                ends = stopping_criteria(shown, None)
                if not shown[0].equal(text):
                    raise ValueError("not supported: a stopping criterion that changes the text")
                if ends:
                    return text

    def check(self, model, ids, mask, criteria, config, arguments):
        """Raises ValueError for a call that, by its arguments, might not give generate's text."""
        if model is not self.target.model:
            raise ValueError("this Decoder was made for another target")
        counted = mask.cumsum(dim=1)
        positions = arguments.get("position_ids")
        # Where there is padding they do not matter.
        usual = positions is None or mask.shape == positions.shape[-2:] and (
            (positions.to(ids.device) + 1 == counted) | (mask == 0)).all()
        # A hook that tells passes apart, by their tokens or their number, gives another text in a tree.
        hooks = [hook for module in model.modules()
                 for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())]
        unable = {name: getattr(config, name, None) for name in UNABLE}
        # What was not given arrives as None, or as an empty dictionary.
        unable |= {name: name not in PREPARED for name, value in arguments.items()
                   if value is not None and value != {}}
        unable |= {
            "past_key_values": getattr(arguments.get("past_key_values"), "_is_user_defined", False),
            # `generate` makes them from the mask, and keeps a mask of ones to itself.
            "these position_ids, or this shape of attention_mask": not usual,
            "num_beams": (config.num_beams or 1) > 1,
            # Its processor has a cache, which follows the calls.
            "guidance_scale": (getattr(config, "guidance_scale", None) or 1) != 1
                              and (len(self.models) > 1 or len(ids) > 1),
            "a quantized cache": config.cache_implementation == "quantized",
            "torch.autocast": torch.is_autocast_enabled(ids.device.type),
            "forward hooks on the target": any(map(is_foreign, hooks))}
        # Beams have made a row several.
        if len(ids) > 1 and not unable["num_beams"]:
            # Without an EOS token `generate` lets a row that a criterion has ended go on to the others' end.
            by_row = BY_ROW if any(hasattr(one, "eos_token_id") for one in criteria) else BY_ROW[:2]
            unable |= {f"{type(one).__name__} in a batch": type(one) not in by_row for one in criteria}
            unable["a streamer in a batch"] = arguments.get("streamer") is not None
        unable = sorted(name for name, found in unable.items() if found)
        if unable:
            raise ValueError(f"not supported: {', '.join(unable)}")
        known = (ids >= 0) & (ids < self.target.vocabulary)
        if not known.all() or not known.any():
            raise ValueError(f"a prompt is one token or more, ids from 0 to {self.target.vocabulary - 1}; "
                             f"got {ids[~known].tolist()}")
        if mask.shape != ids.shape or not mask[:, -1].all() or (mask != (counted > 0)).any():
            raise ValueError("a row of the attention_mask must be zeros, then ones: padding is on the left")
        if criteria.max_length > self.target.context + 1:
            raise ValueError(f"the target takes up to {self.target.context} tokens; the prompt has "
                             f"{ids.shape[1]}, and with new ones the text up to {criteria.max_length}")

    @torch.inference_mode()
    def steps_after(self, text, sampling):
        """Yields the Steps after a text, (length,). The first is the prompt's pass, a step without a tree."""
        if self.sampling is not None and sampling.settings != self.sampling.settings:
            # Another way of sampling has other acceptance rates.
            self.planner = Planner(self.tree)
        self.sampling = sampling
        if sampling.method.shared_noise:
            self.seed.random_(generator=self.generator)
        self.make_room(len(text))
        logits = self.target.feed(text, PROBED)
        # Without a draft a single row's processors are called as `generate` calls them.
        checks_memory = sampling.reads_text and (len(self.models) > 1 or sampling.rows > 1)
        if checks_memory:
            sampling.check_memory(logits[-1:], text, text[-1:])
        # The prompt's pass has scored the root. What is left is to draw, for which no pass is needed.
        first = TreeStep(NO_TREE, self.target, self.draft, logits.shape[1], self.seed, self.generator,
                         static=False)
        step = first(text, sampling, logits[-1:])
        yield step
        # The first token does not wait for this.
        if not self.probed:
            self.probe(text, logits)
        draft_is_fed = False
        while True:
            text = torch.cat([text, text.new_tensor(step.tokens)])
            tree = self.planner.next_tree()
            if len(text) > self.draft.context:
                tree = NO_TREE
            tree_step = self.step_with(tree, len(text), logits.shape[1], sampling)
            if tree.depth > 1 and not draft_is_fed:
                self.draft.feed(text[:-1])
                # Reading a value waits for the GPU, so that the step is timed alone.
                self.seed.tolist()
            # A step without a tree does not feed the draft.
            draft_is_fed = tree.depth > 1
            step = tree_step(text, sampling)
            if checks_memory:
                # Before the step's tokens are known outside.
                path = text.new_tensor([text[-1], *step.tokens])
                sampling.check_memory(logits[-1:], text, path)
            if self.sharded:
                # All ranks plan by rank 0's clock.
                seconds = [step.seconds]
                torch.distributed.broadcast_object_list(seconds, src=0)
                step = step._replace(seconds=seconds[0])
            self.planner.learn(step)
            yield step

    def make_room(self, tokens):
        """Makes room for so many tokens. Caches double."""
        if tokens > self.capacity:
            self.capacity = 64 * math.ceil(max(tokens, 2 * self.capacity, 192) / 64)
        for model in self.models:
            model.grow(self.capacity)

    def step_with(self, tree, length, vocabulary, sampling):
        """The TreeStep for this tree behind a text of this length: the last one, if it was made for these."""
        self.make_room(length + tree.size)
        made_for = tree, sampling.settings, self.capacity
        if made_for != self.made_for:
            # The old step's memory is free before the new one's is taken.
            self.tree_step = self.made_for = None
            static = self.cuda_graph and not sampling.reads_text
            self.tree_step = TreeStep(tree, self.target, self.draft, vocabulary, self.seed, self.generator,
                                      static)
            self.made_for = made_for
        return self.tree_step

    def probe(self, text, logits):
        """Raises ValueError if the target cannot be trusted with trees. One that masks by slot, numbers
        positions its own way, or treats a pass's last token or a short pass in another way, would silently
        give another text. So the prompt's last tokens are scored again: in a tree beside decoys, and the last
        one also in a pass of its own. Both must give the distributions of the prompt's pass, logits
        (known, V): the last token's, and half of all, but for rounding. For bfloat16 18% is let pass, which
        may hide a slight mistake, for float32 0.07%."""
        P = torch.cat([logits, logits[-1:]]).float().softmax(dim=1)
        spread = (P - P.mean(dim=1, keepdim=True)).norm(dim=1).clamp(min=1e-30)
        # Each token stands twice. The nodes 0, 2, 4, ... are the prompt's own. 1, 3, 5, ... are decoys, each
        # one level below the same token. So slots run ahead of positions, and the last node that is fed is a
        # decoy. The tree's last node has no token.
        twice = text[-len(logits) :].repeat_interleave(2)
        layout = Layout(sequences(2, len(logits)), text.device)
        own = layout.nodes[:-1:2]
        self.make_room(len(text) + len(twice))
        placed = self.target.place(layout, self.seed.new_tensor([len(text) - len(logits)]), self.capacity)
        again = self.target.logits(twice, layout.nodes[:-1], placed)[::2]
        alone = self.target.logits(twice, own[-1:], placed)
        # The prompt's own entries return to their slots.
        self.target.move(own, placed)
        differences = (torch.cat([again, alone]).float().softmax(dim=1) - P).norm(dim=1) / spread
        # A mixture of experts may round a token to another expert. So half of them must agree, and the last.
        found = torch.stack([differences.median(), *differences[-2:]]).max()
        # Models in float64 compute some numbers in float32.
        dtype = self.target.model.dtype
        if not found < 2 * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps) ** 0.5:
            raise ValueError(f"{type(self.target.model).__name__} cannot verify a tree: distributions after "
                             f"the same tokens differ by {found:.1%} in one, more than {dtype} should round "
                             f"(float32 rounds least)")
        # After a shorter prompt the next text is probed, too.
        self.probed = len(logits) == PROBED

def decode(model, input_ids, draft=None, tree="auto", method="sequoia", generator=None, on_step=None,
           cuda_graph=True, **rest):
    """A Decoder made for one call, with a Decoder's options. The rest is what `generate` prepares."""
    return Decoder(model, draft, tree, method, generator, on_step, cuda_graph)(model, input_ids, **rest)

def generate(model, inputs=None, generation_config=None, *, assistant_model=None, tree="auto",
             method="sequoia", generator=None, on_step=None, cuda_graph=True, **kwargs):
    """`model.generate` with all of its arguments, by a Decoder made for one call:

        sequoia.generate(target, inputs, assistant_model=draft, max_new_tokens=40, do_sample=True)

    model                       the target, a causal language model of transformers
    inputs                      ids, (rows, length), or all that a tokenizer returns
    assistant_model             the draft; not needed with tree="none"
    streamer, stop_strings      as in `generate`; stop_strings need tokenizer=, too
    tree, method, generator, on_step, cuda_graph        see `Decoder`

    Returns what `generate` returns: (rows, longer) ids, or with return_dict_in_generate `sequences`. Raises
    ValueError for what cannot be done, as beams, scores, logits, hidden states and caches of the caller's.

    As custom_generate/generate.py in a folder, this file is found by
    `model.generate(..., custom_generate=folder, trust_remote_code=True)`."""
    decoder = Decoder(model, assistant_model, tree, method, generator, on_step, cuda_graph)
    return decoder.generate(inputs, generation_config, **kwargs)

# --- 9  Passes: packed and traced on a CPU; weights that stream past a small GPU ----------------------------
# Layers of so many weights or fewer are not packed: in float32 oneDNN's product would be slower.
SMALL = {torch.float32: 2**20, torch.bfloat16: 0}

def packable_dtypes():
    """The dtypes that oneDNN, the CPU's matrix library, can pack. A build without it has no such operator."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return ()
    both = (torch.float32, torch.bfloat16)
    return both if torch.ops.mkldnn._is_mkldnn_bf16_supported() else both[:1]

def packed_product(x, weight, bias: Tensor | None):
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

def pack_linear(layer):
    # In the order in which oneDNN reads it, for passes over about 16 tokens.
    packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight, 16)
    # A trace cannot take the empty list in the product, a script can.
    product = torch.jit.script(packed_product)
    # This frees the old weight, unless an embedding shares it.
    del layer.weight
    layer.register_buffer("weight", packed)
    layer.forward = lambda x: product(x, layer.weight, layer.bias)

@torch.no_grad()
def pack(model):
    """Prepares a model on a CPU for decoding, in place, and returns it: packs its linear layers (in float32
    large ones alone), and traces its pass, which about halves a small model's time. It is not to be changed,
    saved, loaded, moved or used by two threads at once any more. Packed, on a GPU, offloaded, or of a dtype
    that oneDNN cannot take it stays as it is. Raises ValueError if it cannot verify a tree, or if packing,
    for which torch has no public operators, changes its numbers by more than rounding.

    A TorchScript trace holds the operators that one run called, to run on other tensors, of other lengths
    too, without Python. What Python decided in that run, such as a mixture's experts or some rotary
    embeddings' angles, is decided for good. So a trace is given up unless bit-equal on other inputs."""
    check_fit(model)
    unfit = {"_sequoia_pass", "_sequoia_offloaded"} & vars(model).keys() or model.device.type != "cpu"
    if unfit or model.dtype not in packable_dtypes():
        return model
    cached = CachedModel(model)
    model.requires_grad_(False)
    cached.grow(32)
    cached.feed(torch.arange(4))
    layout = Layout(k_ary(2, 4), "cpu")
    examples = []
    # The first is traced. The second has more nodes and later slots, at the latest positions of the context.
    for base, nodes, ahead in ((4, 3, 0), (16, 15, 10**6)):
        placed = cached.place(layout, torch.tensor([base]), base + layout.tree.size)
        placed = placed._replace(positions=(placed.positions + ahead).clamp(max=cached.context - 1))
        examples.append(cached.inputs(torch.arange(7, 23), layout.nodes[:nodes], placed))

    def outputs(forward):
        # What a pass reads it has written itself: a trace might have lost that.
        cached.store.zero_()
        return [forward(*inputs) for inputs in examples]

    before = torch.cat(outputs(cached.forward))
    # The module to trace: the pass and the packed weights. As constants a trace could not hold them.
    traced = nn.Module()
    traced.forward = cached.forward
    for i, layer in enumerate(model.modules()):
        if type(layer) is nn.Linear and layer.weight.numel() > SMALL[model.dtype]:
            pack_linear(layer)
            traced.register_buffer(f"weight_{i}", layer.weight)
    packed = outputs(cached.forward)
    if not (torch.cat(packed) - before).norm() <= torch.finfo(model.dtype).eps ** 0.5 * before.norm():
        raise ValueError(f"oneDNN gives other numbers for {type(model).__name__}: load it anew, without pack")
    # The pass that `CachedModel.logits` runs in place of its own; and the sign that a model is packed.
    model._sequoia_pass = cached.forward
    # A model of which there is no trace, or no equal one, runs packed.
    with contextlib.suppress(RuntimeError, AttributeError), warnings.catch_warnings(action="ignore"):
        frozen = torch.jit.freeze(torch.jit.trace(traced.eval(), examples[0], check_trace=False))
        # Else it would be optimised anew for every new shape.
        run = torch.jit.optimized_execution(False)(frozen.forward)
        if all(map(torch.equal, outputs(run), packed)):
            model._sequoia_pass = run
    return model

@torch.no_grad()
def offload(model, device, resident=0):
    """Moves a model larger than a device to it, in place. The weights of its decoder layers, but for the
    first `resident` ones, stay in host memory, pinned for a GPU. While a layer is computed from a copy on the
    device, the next is copied: besides all else it holds two layers. Two threads cannot use it at once."""
    decoder = model.get_decoder()
    stacks = [module for module in decoder.modules() if isinstance(module, nn.ModuleList)]
    if not stacks or hasattr(model, "_sequoia_pass"):
        raise ValueError(f"cannot offload {type(model).__name__}: it is packed, or shows no list of layers")
    layers = stacks[0][resident:]
    stream = torch.cuda.Stream(device) if torch.device(device).type == "cuda" else None
    host = {}            # by weight of these layers: what stays in host memory

    def fetch(layer):
        for weight in layer.parameters():
            weight.data = host[weight].to(device, non_blocking=True, copy=True)

    def let_go(weights):
        for weight in weights:
            weight.data = host[weight]

    def before(number, layer, _):
        # Waits for both streams: this layer's copy is complete, and nothing on the device reads the one
        # before it any more, so that its memory may be used again.
        if stream:
            torch.cuda.synchronize(device)
        if number == 0:
            # A pass that Ctrl-C broke off may have left some.
            let_go(host)
            fetch(layer)
        else:
            let_go(layers[number - 1].parameters())
        # The next layer's copy goes on while this one is computed.
        with torch.cuda.stream(stream):
            for following in layers[number + 1 : number + 2]:
                fetch(following)

    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(partial(before, number))
        for weight in layer.parameters():
            host[weight] = weight.data = weight.data.pin_memory() if stream else weight.data
    # Whoever changes weights between two passes finds those in host memory, and they are copied anew. The
    # device may still read the last layer's copy. Its memory stays with the stream that copied it, in which
    # nothing is copied before `before` has waited.
    decoder.register_forward_hook(lambda *_: let_go(host), always_call=True)
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor not in host:
            tensor.data = tensor.data.to(device)
    model._sequoia_offloaded = True
    return model.eval().requires_grad_(False)

# --- 10  The command line -----------------------------------------------------------------------------------
TINY = Path(__file__).resolve().parent / "tiny"
PROMPT = ('import threading\n\n\nclass Counter:\n    """A counter that threads share."""\n\n'
          '    def __init__(self, start=0):')
RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
EXAMPLES = """examples:
  python sequoia.py --prompt "import os" --temperature 0 --explain
  python sequoia.py --target meta-llama/Llama-2-7b-hf --draft JackFram/llama-68m --prompt @question.txt"""

def arguments(argv):
    parser = argparse.ArgumentParser("sequoia.py", description="Decodes text as the target would, faster.",
                                     epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)

    def refuse(message):
        raise ValueError(f"{message} (see --help)")

    parser.error = refuse
    add = parser.add_argument
    add("--target", default=TINY / "target", help="folder or hub name (%(default)s)")
    add("--draft", default=TINY / "draft", help="a small model, same tokens (%(default)s)")
    add("--prompt", default=PROMPT, help="text to go on from, or @FILE, as @/dev/stdin (a class's start)")
    add("--max-new-tokens", type=int, default=128, help="in tokens, from 1 (%(default)s)")
    add("--temperature", type=float, default=0.6, help="0 is greedy, 1 the model's own (%(default)s)")
    add("--top-p", type=float, help="keep the likeliest tokens of this probability together (1, all)")
    add("--top-k", type=int, default=0, help="keep so many likeliest tokens (0, all)")
    add("--seed", type=int, default=0, help="fixes the text, by gumbel in float32 for any tree (%(default)s)")
    add("--method", default="sequoia", choices=METHODS, help="of drawing and verifying (%(default)s)")
    add("--tree", default="auto", help="auto (fastest), NODESxLEVELS or none (%(default)s)")
    add("--device", default=f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu",
        help="(a GPU if there is one)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="(bfloat16 where the processor has it)")
    add("--offload", action="store_true", help="stream the target's layers from memory, on a CPU from files")
    add("--explain", action="store_true",
        help="draw each step's tree, the accepted path in [brackets], and what models said")
    args = parser.parse_args(argv)
    args.tree = tree_shape(args.tree)
    if args.offload and RANKS > 1:
        refuse("--offload is for one process, not for torchrun's")
    return args

def load(name, args, large=False):
    """A model on the chosen device, packed on a CPU. A large one, the target, is shared among torchrun's
    ranks, or with --offload streamed: to a GPU by `offload`, on a CPU from its files, not packed. Raises
    ValueError for files that lack weights or have other shapes, which transformers would fill with random
    numbers."""
    sharded = large and RANKS > 1
    offloaded = large and args.offload
    on_cpu = torch.device(args.device).type == "cpu"
    mapped = offloaded and on_cpu
    distributed = transformers.distributed.DistributedConfig(tp_size=RANKS) if sharded else None
    usual = "bfloat16" if not on_cpu or torch.bfloat16 in packable_dtypes() else "float32"
    # Weights that keep their files' dtype are mapped, and the system pages them in and out.
    dtype = args.dtype or ("auto" if mapped else usual)
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        name, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True,
        distributed_config=distributed)
    lost = [*found["missing_keys"], *found["mismatched_keys"]]
    if lost:
        raise ValueError(f"cannot load {name}: {len(lost)} weights missing or of other shapes: {lost[:1]}")
    if offloaded and not mapped:
        return offload(model, args.device)
    return model if sharded or mapped else pack(model.to(args.device))

def load_tokenizer(args):
    """The target's tokenizer. Models know ids alone: the draft's are the same, but for added special ones."""
    target = transformers.AutoTokenizer.from_pretrained(args.target)
    draft = target if args.tree == NO_TREE else transformers.AutoTokenizer.from_pretrained(args.draft)
    differing = {token for token, _ in target.get_vocab().items() ^ draft.get_vocab().items()}
    added = [*target.added_tokens_decoder.values(), *draft.added_tokens_decoder.values()]
    if differing - {token.content for token in added if token.special}:
        raise ValueError(f"{args.target} and {args.draft} have different tokens")
    if differing:
        warnings.warn("the tokenizers differ in added special tokens, which the draft will not guess")
    return target

def decode_prompt(args):
    tokenizer = load_tokenizer(args)
    text = args.prompt
    if text.startswith("@"):
        text = Path(text[1:]).read_text(encoding="utf-8")
    ids = tokenizer(text, return_tensors="pt")["input_ids"].long().to(args.device)
    draft = None if args.tree == NO_TREE else load(args.draft, args)
    target = load(args.target, args, large=True)
    generator = torch.Generator(args.device).manual_seed(args.seed)
    decoder = Decoder(target, draft, args.tree, args.method, generator)
    if args.explain:
        decoder.on_step = partial(explain, decoder, tokenizer)
    streamer = None if args.explain or RANK else transformers.TextStreamer(tokenizer)
    out = decoder.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=args.temperature != 0, streamer=streamer,
        temperature=args.temperature or None, top_k=args.top_k, top_p=args.top_p,
        max_new_tokens=args.max_new_tokens)
    if not RANK:
        if args.explain:
            print(tokenizer.decode(out[0]))
        how = f"{args.method}, seed {args.seed}" if args.temperature else "greedy"
        print(f"\n{decoder.report}\nmethod {how}, temperature {args.temperature:g}, "
              f"{target.dtype} on {args.device}, logits processors: "
              f"{names_of(decoder.sampling.processors)}", file=sys.stderr)
    if RANKS > 1:
        torch.distributed.destroy_process_group()

def tried_children(decoder, step):
    """Yields (child, draft, target) for the children that a Decoder's last step tried: what both models gave
    its token. With the method sequoia that is D and R after the rejections before it: the child was accepted
    with the chance R / D."""
    for node, child in step.tried():
        if step.tree.ranks[child] == 0:
            R = decoder.tree_step.p(decoder.seed.new_tensor([node]))[0].softmax(dim=0)
            q = decoder.tree_step.q[node]
        token = step.node_tokens[child]
        D = q.softmax(dim=0)
        yield child, D[token], R[token]
        if decoder.sampling.method == METHODS["sequoia"]:
            R = (R - D).clamp(min=0)
            R = R / R.sum()
            q = q.index_fill(0, decoder.seed.new_tensor(token), RULED_OUT)

def explain(decoder, tokenizer, step):
    """Prints what a step did: its tree, and for each child that a walk would try what both models say."""
    words = [repr(tokenizer.decode(token))[1:-1] if token >= 0 else "-" for token in step.node_tokens]
    reasons = "" if step.tree.size > 1 else "no tree: nothing is proposed\n"
    for child, given, wanted in tried_children(decoder, step):
        verdict = "accepted" if child in step.path else "rejected"
        reasons += f"'{words[child]}': draft {given:.3f}, target {wanted:.3f}: {verdict}\n"
    for node in (0, *step.path):
        words[node] = f"[{words[node]}]"
    if not RANK:
        print(f"{step.tree.drawing(words)}\n{reasons}the target's own: {tokenizer.decode(step.token)!r}\n"
              f"adds {tokenizer.decode(step.tokens)!r}\n")

def leave_busy_cores():
    """Takes no more threads than there are cores on which no other process computes, where the system tells:
    threads that wait for a core hold up all others, at every operator."""
    loadavg = Path("/proc/loadavg")
    # Its fourth word counts the threads that compute now, this one among them.
    busy = int(loadavg.read_text().split()[3].split("/")[0]) - 1 if loadavg.exists() else 0
    torch.set_num_threads(max(1, min(torch.get_num_threads(), os.cpu_count() - busy)))

def main(argv=None):
    """Returns the exit code: 0, 2 after an error, 130 after Ctrl-C."""
    # Else Python looks for garbage among a million imported objects, above all when it ends: half a second.
    gc.freeze()
    leave_busy_cores()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.formatwarning = lambda message, *_: f"sequoia.py: {message}\n"
    try:
        decode_prompt(arguments(argv))
        return 0
    except KeyboardInterrupt:
        return 130
    # Damaged files and devices that are not there raise errors of any kind.
    except Exception as error:
        print(f"sequoia.py: {type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2

if __name__ == "__main__":
    sys.exit(main())
