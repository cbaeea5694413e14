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
    P[k], p_k        acceptance_rates[k - 1]     Definition 3.2, the chance that child k is the one accepted
    F(T)             expected_tokens             Proposition 3.4
    T[n, d, b]       with_children[b][n]         equation 1; appendix for depth d; G(n, d) for the best b
    P, Q             P, Q                        Algorithm 2, target's and draft's distributions after a text
    log P, log Q     p, q: scores                logarithms of probabilities up to a constant, -inf for 0
    R, D             R (residual), D             Algorithm 2, what rejections have left of P and of Q
    t(n), c          Latency                     section 4, seconds: a step without draft passes; a draft pass

Sections 1 to 6 are the method, 7 plans, 8 makes passes fast or small, 9 is the command line. Each needs those
above it. Besides, section 4 is given section 5's Layout, 6 asks 7 for trees, and 8 marks models: `recorded`,
a faster form of the pass, or `offloaded`. Left out: training drafts, batched serving, recurrent models.

    python sequoia.py                                            # decodes with the bundled pair
    target.generate(**inputs, custom_generate=sequoia.decode, draft=draft)     # in your own code
"""
import argparse, contextlib, functools, gc, inspect, math, os, sys, threading, time, warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, Cache, DynamicCache
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers import PrefixConstrainedLogitsProcessor, SynthIDTextWatermarkLogitsProcessor
from transformers.generation import GenerateDecoderOnlyOutput

def _refuse(found, reason):
    if found:
        raise ValueError(reason)

# --- 1  Token trees (section 3.1) ---------------------------------------------------------------------------
@dataclass(frozen=True)
class Tree:
    """The shape of a token tree: for each node, the index of its parent.

    Nodes stand in level order: the root first (its parent is -1), parents before children, siblings together
    in rank order (the draft's first choice first). So parents never decrease, levels and siblings are slices.

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
        _refuse(parents[:1] != (-1,), f"a tree starts with its root, whose parent is -1; got {parents[:8]}")
        depths = [0]
        ranks = [0]
        children = [[]]
        for node, parent in enumerate(parents[1:], start=1):
            least = max(0, parents[node - 1])
            _refuse(not least <= parent < node, f"not in level order: node {node} has the parent {parent}")
            depths.append(depths[parent] + 1)
            ranks.append(len(children[parent]))
            children[parent].append(node)
            children.append([])
        # Subtle: the instance is frozen, its dictionary is not.
        vars(self).update(parents=parents, size=len(parents), depth=depths[-1] + 1, depths=tuple(depths),
                          ranks=tuple(ranks), children=tuple(map(tuple, children)))

    @classmethod
    def from_paths(cls, paths):
        """The inverse of `paths`. Raises ValueError where a parent or an elder sibling is missing."""
        nodes = sorted(sorted({(), *map(tuple, paths)}), key=len)
        tree = cls([-1] + [nodes.index(path[:-1]) for path in nodes[1:]])
        _refuse(tree.paths() != nodes[1:], f"an elder sibling is missing among the paths {nodes[1:]}")
        return tree

    def paths(self):
        """Every node but the root as its ranks from the root down, in level order."""
        paths = [()]
        for node in range(1, self.size):
            paths.append((*paths[self.parents[node]], self.ranks[node]))
        return paths[1:]

    @functools.cached_property
    def mask(self):
        """Who may attend to whom, (size, size) bool: mask[i, j] where j is i or an ancestor of i."""
        mask = np.eye(self.size, dtype=bool)
        for node in range(1, self.size):
            mask[node] |= mask[self.parents[node]]
        return torch.from_numpy(mask)

    def draw(self, labels, node=0, margin=""):
        """A node and all below it as text; labels: (size,), margin: before each line but the first."""
        text = labels[node]
        margin += " " * len(text)
        for child in self.children[node]:
            last = child == self.children[node][-1]
            if self.ranks[child] == 0:
                text += "───" if last else "─┬─"
            else:
                text += "\n" + margin + (" └─" if last else " ├─")
            text += self.draw(labels, child, margin + ("   " if last else " │ "))
        return text

    def __str__(self):
        return self.draw([str(node) for node in range(self.size)])

NO_TREE = Tree([-1])         # the root alone: plain decoding

def chain(length):
    """The root and one sequence of `length` tokens: plain speculative decoding."""
    return sequences(1, length)

def sequences(k, length):
    """The root and `k` separate sequences of `length` tokens, SpecInfer's tree: 5 of 8 have 41 nodes."""
    return Tree([-1] + [max(0, node - k) for node in range(1, k * length + 1)])

def k_ary(k, depth):
    """The full tree of `depth` levels: every node above the last level has `k` children."""
    return Tree([-1] + [child // k for child in range(sum(k**level for level in range(1, depth)))])

# --- 2  Tree construction: the dynamic program (section 3.1, equation 1; appendix) --------------------------
def expected_tokens(tree, acceptance_rates):
    """F(T), the tokens that a step with this tree yields on average (Proposition 3.4): the sum over its nodes
    of the product of the acceptance rates on the way from the root. Rates as in `optimal_tree`.

    Why a sum: a step yields a token for each accepted node, and the target's own, for which the root counts.
    An expected count is the sum of the chances, however they depend on one another. Why products: a node is
    accepted after all its ancestors, at a rate taken to be the same whichever those are (Definition 3.2)."""
    rates = _check_rates(acceptance_rates)
    chance = [1.0]
    for node, parent in enumerate(tree.parents[1:], start=1):
        level = min(tree.depths[parent], len(rates) - 1)
        rank = tree.ranks[node]
        chance.append(chance[parent] * rates[level, rank] if rank < rates.shape[1] else 0.0)
    return float(sum(chance))

def expected_tokens_table(acceptance_rates, size, depth):
    """G(n, d), the expected tokens of the best tree of exactly n nodes on at most d levels, for all n and d:
    (size + 1, depth + 1) float64, -inf where there is no such tree. Arguments as in `optimal_tree`."""
    best_subtrees = _best_subtrees(acceptance_rates, size)
    columns = [best_subtrees(0, d).G for d in range(1, depth + 1)]
    return np.stack([np.full(size + 1, -np.inf), *columns], axis=1)

def optimal_tree(acceptance_rates, size, depth=None):
    """The tree of `size` nodes on at most `depth` levels that has the most expected tokens.

    acceptance_rates: (ranks,), the chance that a node's 1st, 2nd, ... child is the one accepted, falling or
    not; or (levels, ranks), by the node's level, the last row for all deeper ones. A node has up to `ranks`
    children. Raises ValueError for rates that are no probabilities and sizes that no such tree can have.

    >>> optimal_tree([0.6, 0.2, 0.1], size=5).paths()
    [(0,), (1,), (0, 0), (0, 0, 0)]"""
    depth = size if depth is None else depth
    _refuse(min(size, depth) < 1, f"size and depth must be at least 1, got {size} and {depth}")
    best_subtrees = _best_subtrees(acceptance_rates, size)
    # From level `bottom` on rates repeat, so G(d) alone gives G(d + 1): once equal, always equal.
    bottom = len(np.atleast_2d(acceptance_rates)) - 1
    levels = 1
    while levels < depth and (best_subtrees(bottom, levels).G != best_subtrees(bottom, levels + 1).G).any():
        levels += 1
    depth = min(depth, bottom + levels)
    possible = np.isfinite(best_subtrees(0, depth).G).nonzero()[0]
    _refuse(size not in possible, f"no such tree has {size} nodes: the largest has {possible.max()}")
    parents = [-1]
    nodes = [(0, size)]          # each node's level and its subtree's size; grows while it is read
    for node, (level, n) in enumerate(nodes):
        best = best_subtrees(min(level, bottom), depth - level)
        sizes = []
        # Equation 1 backwards, from the last child to the first.
        for last_child in reversed(best.last_child[: best.children[n]]):
            sizes.insert(0, int(last_child[n]))
            n -= sizes[0]
        nodes += [(level + 1, m) for m in sizes]
        parents += [node] * len(sizes)
    return Tree(parents)

class _BestSubtrees(NamedTuple):
    """The best subtrees whose root is on a given level, with at most so many levels, by nodes: 0 .. size."""
    G: np.ndarray            # (size + 1,) their expected tokens, -inf where there is no such subtree
    children: np.ndarray     # (size + 1,) the number of their root's children
    last_child: list         # last_child[b - 1][n]: with b children and n nodes, how many the b-th child gets

def _best_subtrees(acceptance_rates, size):
    """A function of a level and a number of levels: the _BestSubtrees rooted there. With n nodes, and b
    children of their root, of which the b-th is accepted with the chance rate_b, their value is

        with_children[b][n] = max over m of  with_children[b - 1][n - m] + rate_b G(m)          (equation 1)

    where the b-th child gets m nodes, worth G(m) at best, one level below. with_children[0][1] is 1, the root
    alone. As G is kept, d levels of b children cost d b size^2 additions at most for each row of rates."""
    rates = _check_rates(acceptance_rates)
    n = np.arange(size + 1)
    n_minus_m = n[:, None] - n

    @functools.cache
    def best_subtrees(level, depth):
        leaf = np.where(n == 1, 1.0, -np.inf)
        with_children = [leaf]
        last_child = []
        if depth > 1:
            below = best_subtrees(min(level + 1, len(rates) - 1), depth - 1).G
            for rate in rates[level]:
                # Subtle: a rate of 0 times a value of -inf would be NaN.
                gain = np.where(below > 0, rate * below.clip(0), -np.inf)
                # Subtle: a negative n - m finds the -inf at the end.
                fewer = np.append(with_children[-1], np.full(size, -np.inf))
                sums = fewer[n_minus_m] + gain                                  # (size + 1, size + 1)
                last_child.append(sums.argmax(axis=1))
                with_children.append(sums.max(axis=1))
        return _BestSubtrees(np.max(with_children, axis=0), np.argmax(with_children, axis=0), last_child)
    return best_subtrees

def _check_rates(acceptance_rates):
    rates = np.atleast_2d(np.asarray(acceptance_rates, dtype=np.float64))
    _refuse(not ((rates >= 0).all() and rates.sum(axis=1).max() < 1 + 1e-6),
            f"acceptance_rates must be from 0 to 1, and sum to at most 1 on each level; got {rates}")
    return rates

# --- 3  Sampling (section 3.2, Algorithm 2 line 5) ----------------------------------------------------------
# Probabilities travel as scores: float32 logarithms, which do not underflow at low temperatures.
RULED_OUT = -math.inf

def uniform(like, generator):
    """Random numbers u from 0 to 1, shaped as `like`. Subtle: below, the token of least -log u / p is drawn.
    As sum p = 1 the least is about 1, so a token of p = 1e-9 needs a -log u of 1e-9. Float32's u ends 6e-8
    short of 1: it would never be drawn. With 53 bits u ends 1e-16 short."""
    return torch.rand(like.shape, generator=generator, dtype=torch.float64, device=like.device)

def gumbel(u):
    """Gumbel noise from such numbers: -log E for E = -log u, which is exponential."""
    return -(-u.log()).float().log()

def sample_without_replacement(scores, k, generator=None):
    """Draws k different tokens a row, (rows, V) -> (rows, k); -1 where none is left, or scores are NaN.

    Why the largest sums of score and Gumbel noise do it: a score is log p, so the largest log p_i - log E_i
    are the smallest E_i / p_i. Those are arrivals at rate p_i: token i is first with probability p_i / sum p.
    Arrivals have no memory, so the next is drawn likewise among the others."""
    return most_likely(scores + gumbel(uniform(scores, generator)), k)

def sample_with_replacement(scores, k, generator=None):
    """k independent tokens a row, (rows, V) -> (rows, k), -1 where none is possible."""
    return torch.cat([sample_without_replacement(scores, 1, generator) for _ in range(k)], dim=1)

def most_likely(scores, k, generator=None):
    """The k most likely tokens, the likeliest first, (rows, V) -> (rows, k), -1 where fewer are possible."""
    best = scores.topk(min(k, scores.shape[1]))
    tokens = torch.where(best.values > RULED_OUT, best.indices, -1)
    missing = k - tokens.shape[1]
    return nn.functional.pad(tokens, (0, missing), value=-1) if missing else tokens

def shared_noise(seed, positions, vocabulary):
    """Gumbel noise for what follows each position, (positions, V): a function of seed (1,), position and
    token. These are hashed to 64 bits by the finaliser of splitmix64, the same on every device."""
    tokens = torch.arange(vocabulary, device=positions.device)
    x = seed + positions[:, None] * -7046029254386353131 + tokens * -3335678366873096957
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        # Subtle: >> of int64 brings the sign in from the left, where splitmix64 has zeros.
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * factor
    # 52 bits, so that adding one half, which avoids 0 and 1, is exact. Left out: splitmix64's last shift.
    return gumbel(((x >> 12 & (1 << 52) - 1).double() + 0.5) * 2.0**-52)

# --- 4  Verification (sections 2.2 and 3.2, Algorithm 2) ----------------------------------------------------
# Algorithm 2 and its kin try the children of a node in turn, from the root down. A child is accepted if its
# noise, uniform in [0, 1), is less than its ratio, R[s] / D[s] for Algorithm 2. If none is, the token comes
# from the residual, what rejections have left of the target. `Matching` and `Traversal` decide otherwise.
#
# Why Algorithm 2 is lossless. One child, drawn from Q, is t and accepted with probability
# Q[t] min(P[t] / Q[t], 1) = min(P[t], Q[t]), and rejected with 1 - sum min(P, Q) = sum max(P - Q, 0). The
# residual, max(P - Q, 0) normalised, then gives each token what is missing of P. Several children: whichever
# token was rejected, the others must yield the same R, the residual. They are drawn from D, the draft without
# that token: the same task with one child less. With none left R itself is drawn: induction does it.
#
# The cover property: with all of the vocabulary as children, one is always accepted. A rejected token had
# R[s] < D[s], so the next residual gives it nothing: what is left of the target is among the tokens not yet
# tried, and on the last of them R = D = 1. With replacement a rejected token may come again, in vain. Towards
# temperature 0 children become the draft's likeliest tokens in order; with replacement, copies of one.

def verify_one_node(P, Q, tokens, noise):
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

# From here on a row is a node: P and scores q (rows, V), tokens and noise (rows, k) -> ratios (rows, k),
# residual (rows, V). The draft stays scores: probabilities could underflow once the tried tokens are removed.
# A child that does not exist, as a node has fewer or processors rule out the rest, has token -1 and ratio 0.

def normalise(left, otherwise):
    """What is left of a target, as a distribution, (rows, V); `otherwise` where rounding leaves nothing."""
    total = left.sum(dim=1, keepdim=True)
    return torch.where(total > 0, left / total, otherwise)

def ratios_in_turn(P, q, tokens, noise, replacement=False):
    """Algorithm 2. With replacement the rejected token stays in the draft, which is SpecInfer."""
    R = P
    ratios = torch.zeros_like(noise)
    for i, s in enumerate(tokens.split(1, dim=1)):
        exists = s >= 0                                                                         # (rows, 1)
        s = s.clamp(min=0)
        D = q.softmax(dim=1)
        ratios[:, i : i + 1] = torch.where(exists, R.gather(1, s) / D.gather(1, s), 0)
        # Once every row has accepted, R is not needed: a CPU can look, and save the rest.
        if P.is_cpu and (noise < ratios).any(dim=1).all():
            break
        R = torch.where(exists, normalise((R - D).clamp(min=0), otherwise=R), R)
        q = q if replacement else q.scatter(1, s, RULED_OUT)
    return ratios, R

def ratios_of_spectr(P, q, tokens, noise):
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
    return ratios, normalise((P - high * Q).clamp(min=0), otherwise=P)

@dataclass(frozen=True)
class Method:
    """How a node's children are proposed and verified."""
    propose: Callable                               # a function as in section 3
    ratios: Callable = None                         # one of the two above
    draw: Callable = sample_without_replacement     # of the token after the path, from its scores
    shared_noise: bool = False                      # whether all scores come with their position's noise

    def verify(self, p, q, tokens, generator=None):
        """Scores p, q (rows, V), tokens (rows, k) -> accepted rank or -1, (rows,), residual's scores."""
        noise = uniform(tokens, generator)
        ratios, residual = self.ratios(p.softmax(dim=1), q, tokens, noise)
        # The maximum of bools is found at the first that is true.
        accepted, rank = (noise < ratios).max(dim=1)
        return torch.where(accepted, rank, -1), residual.log()

    def verify_tree(self, layout, tokens, target_scores, q, generator=None, static=False):
        """The walk from the root to accepted children: its last node and the token that follows, (1,) each.
        layout: section 5's. tokens: (size + 1,). target_scores: from a slice of nodes to their scores,
        (nodes, V); a walk asks only for those that it visits. q: (size, V). If `static`, all nodes are
        verified at once, which is more work, and the path found by a mask: a CUDA graph cannot branch."""
        if static:
            children = tokens[layout.children].masked_fill(layout.no_child, -1)             # (size, ranks)
            rank, residual = self.verify(target_scores(slice(len(q))), q, children, generator)
            # A node is rejected if it is not its parent's choice. The root's entry means nothing.
            rejected = layout.rank != rank[layout.parent]
            # Cut off: it or an ancestor below the root is rejected. The rest is one path, the last its end.
            cut_off = (layout.ancestors & rejected).any(dim=1)
            node = layout.nodes.masked_fill(cut_off, 0).amax(dim=0, keepdim=True)
            return node, self.draw(residual[node], 1, generator)[:, 0]
        node = 0
        # As scores. Before any rejection all of the target is left.
        residual = target_scores(slice(0, 1))
        while children := layout.tree.children[node]:
            proposed = tokens[None, children[0] : children[-1] + 1]
            rank, residual = self.verify(residual, q[node, None], proposed, generator)
            if rank < 0:
                break
            node = children[rank]
            residual = target_scores(slice(node, node + 1))
        return layout.nodes[node, None], self.draw(residual, 1, generator)[:, 0]

class Matching(Method):
    """The target draws its own token, whatever was proposed: lossless with any children. A child that is this
    token is accepted. `naive` draws children from the draft, `topk` takes its likeliest.

    With draw=most_likely this is greedy decoding. With shared noise added to all scores, too, it is
    sampling, by "Gumbel coupling" (arXiv 2408.07978): the likeliest token by score plus Gumbel noise is a
    sample (see `sample_without_replacement`). The draft's likeliest, with the same noise, often are the same.
    Sharing is right here, as the target's scores and the noise alone choose the token, and no two positions
    of a text have the same noise. Algorithm 2 cannot share: its test needs noise that is independent of the
    proposal, and the noise that chose it is not. Seed and position name the noise, so a seed names a text,
    whatever the tree, the draft or the speed, but for rounding.

    What it costs: with d = sum |P - Q| / 2, Algorithm 2 accepts one child with probability 1 - d. Gumbel
    coupling does with (1 - d) / (1 + d) or more, as its paper proves."""

    def verify(self, p, q, tokens, generator=None):
        choice = self.draw(p, 1, generator)
        accepted, rank = (tokens == choice).max(dim=1)
        certain = torch.where(torch.arange(p.shape[1], device=p.device) == choice, 0, RULED_OUT)
        return torch.where(accepted, rank, -1), certain

class Traversal(Method):
    """Traversal verification (arXiv 2505.12398), leaves first: what is below a child can still save it.

    Say the draft gives the two tokens of a chain 0.8 and 0.4, the target 0.4 and 0.8. Their ratios are 0.5
    and 2, so the walk accepts both with 0.5 * 1. But both models give the pair 0.32, so it could always be
    accepted. The walk cuts each ratio at 1, traversal the product so far.

    At every node Algorithm 2 decides, with one more outcome: failure. The root's target never fails, and no
    draft proposes failure. A child s is to be accepted with chance m = min(R[s] / D[s], 1). Not noise
    decides, but Algorithm 2 at s, with the target m P' for the tokens, P' being the model's after s, and
    1 - m for failure. Being lossless, it succeeds with chance m: the path goes through s, and on by P'. Else
    s is rejected. After its last child a node draws from its residual: failure, or a token, ending the path.

    So targets are set from the root down, and outcomes settled from the leaves up. As Algorithm 2 is lossless
    for any target, each node yields its own: the root, the model's. In the example m is 0.5, then
    min(0.5 * 2, 1) = 1: the second token never fails, which saves the first.

    On a chain the path goes through a node if it does not fail: with chance m. Let a walk get to it with
    chance a, and its child t have the ratio r = P'[t] / D[t]. The walk gets to the child with min(a r, a);
    traversal, as R = m P', with min(m r, 1). At the root a = m = 1, so by induction a <= m: the expected
    tokens, sums of these chances, are never fewer. On a branched tree they are mostly more, as measured. On
    one level, in `verify`, it is Algorithm 2."""

    def verify_tree(self, layout, tokens, target_scores, q, generator=None, static=False):
        """As `Method.verify_tree`. Children and elder siblings stand first: the first success is the end."""
        nodes, chance, residual = self.endings(layout, tokens, target_scores(slice(len(q))).softmax(dim=1), q)
        first = (uniform(chance, generator) < chance).max(dim=0, keepdim=True).indices
        return nodes[first], self.draw(residual[first].log(), 1, generator)[:, 0]

    def endings(self, layout, tokens, P, q):
        """The nodes in the order of their turns, children first, (size,). Each one's chance of a token, if
        all its children have failed, (size,), and the tokens' residual, not normalised, (size, V)."""
        # The last column is failure's.
        R = nn.functional.pad(P, (0, 1))                                                # (size, V + 1)
        q = nn.functional.pad(q, (0, 1), value=RULED_OUT)
        children = tokens[layout.children].masked_fill(layout.no_child, -1)             # (size, ranks)
        for level in layout.levels:
            proposed = children[level.parents, : level.width]
            # Infinite noise accepts no child: this gives all ratios, and the residual after the last.
            never = R.new_full(proposed.shape, math.inf)
            ratios, R[level.parents] = ratios_in_turn(R[level.parents], q[level.parents], proposed, never)
            m = ratios.take(level.chosen).clamp(max=1)[:, None]                         # (children, 1)
            R[level.children] = torch.cat([m * P[level.children], 1 - m], dim=1)
        nodes = layout.children_first
        residual = R[nodes, :-1]
        failure = R[nodes, -1]
        success = residual.sum(dim=1)
        # Subtle: the quotient is exactly 1 for the root, the last, and no small chance is rounded to 0. Where
        # no token is possible `residual` is NaN, and the draw will give -1.
        chance = torch.where(success.isnan(), 1 - failure, success / (success + failure))
        return nodes, chance, residual

METHODS = {
    "sequoia": Method(sample_without_replacement, ratios_in_turn),
    "specinfer": Method(sample_with_replacement, functools.partial(ratios_in_turn, replacement=True)),
    "spectr": Method(sample_with_replacement, ratios_of_spectr),
    "naive": Matching(sample_with_replacement),
    "topk": Matching(most_likely),
    "traversal": Traversal(sample_without_replacement, ratios_in_turn),
    "gumbel": Matching(most_likely, draw=most_likely, shared_noise=True),
}
GREEDY = Matching(most_likely, draw=most_likely)     # at temperature 0, whatever the method's name

def sample_and_verify(P, Q, k, method="sequoia", generator=None):
    """Proposes k children a row from the draft's Q and verifies them against the target's P, (rows, V) each.
    Returns (rank, token), (rows,) each: the accepted child's rank or -1, and the token, distributed exactly
    as P. Raises ValueError for an unknown method, k outside 1 .. V and rows that are no probabilities."""
    both = torch.stack([P, Q]).double()
    fine = both.min() >= 0 and ((both.sum(dim=2) - 1).abs() < 1e-2).all()
    _refuse(not fine or method not in METHODS or not 1 <= k <= P.shape[1],
            f"needs rows of probabilities, k from 1 to V and a method of {', '.join(METHODS)}")
    chosen = METHODS[method]
    noise = gumbel(uniform(P, generator)) if chosen.shared_noise else 0
    p, q = both.log() + noise
    tokens = chosen.propose(q, k, generator)
    rank, residual = chosen.verify(p, q, tokens, generator)
    outcomes = torch.cat([tokens, chosen.draw(residual, 1, generator)], dim=1)              # (rows, k + 1)
    # Subtle: rank -1 finds the last outcome.
    return rank, outcomes[torch.arange(len(P), device=P.device), rank]

# --- 5  The tree on the device: indices, mask, cache --------------------------------------------------------
# The root is the text's last token, which no model has seen: the earlier ones fill the first slots of the KV
# cache. `base` is the root's slot and position. Node i stands in slot base + i, at position base + its depth.
# The mask, x, shows a node the text, its ancestors and itself. Node 3 is below 1. Node 2 is accepted:
#     slot         0 .. base-2    base-1     base    base+1   base+2      base+3
#     before       the text       node -1    root    node 1   node 2      node 3
#     position     0 .. base-2    base-1     base    base+1   base+1      base+2
#     node -1      x              x
#     root         x              x          x
#     node 1       x              x          x       x
#     node 2       x              x          x                x
#     node 3       x              x          x       x                    x
#     after        the text ............     root    node 2   next root   free
# An entry moves to the slot of its position, by which its key was rotated. Node -1 is the token before the
# root: the prompt's last, then the last accepted node or, if none was, the old root. The draft is not fed
# leaves: if node -1 was one, its entry is missing. So the draft is fed it with each root, at worst in vain.
# Index -1 finds it, stored last: tokens, slots and positions have size + 1 entries.

class Level(NamedTuple):
    """What growing one level takes. On the right, for the four nodes above: levels 0 and 1."""
    parents: Tensor      # (parents,) its nodes with children                          [0]        [1]
    fed: Tensor          # what the draft is fed: those, and node -1 with the root     [-1, 0]    [1]
    width: int           # how many are proposed to each: the most that one has        2          1
    chosen: Tensor       # (children,) which of all these proposals are taken          [0, 1]     [0]
    children: slice      # the nodes that they become, the next level                  1:3        3:4

class Layout:
    """A tree as index tensors: all that the tree alone decides."""

    def __init__(self, tree, device):
        tensor = functools.partial(torch.tensor, device=device, dtype=torch.long)
        # A table of rows of several lengths, which -1 fills up.
        table = functools.partial(nn.utils.rnn.pad_sequence, batch_first=True, padding_value=-1)
        self.tree = tree
        self.parent = tensor(tree.parents)
        self.rank = tensor(tree.ranks)
        self.offset = tensor([*range(tree.size), -1])                                   # (size + 1,)
        self.nodes = self.offset[:-1]
        self.depth = tensor([*tree.depths, -1])                                         # (size + 1,)
        # Each node's ancestors and itself, without the root.
        self.ancestors = nn.functional.pad(tree.mask[:, 1:], (1, 0)).to(device)         # (size, size)
        # Rows: the nodes, node -1. Columns: the nodes, what is beyond the tree (False), the text (True).
        self.mask = nn.functional.pad(tree.mask, (0, 2, 0, 1)).to(device)               # (size + 1, size + 2)
        self.mask[:, -1] = True
        self.levels = []
        for depth in range(tree.depth - 1):
            parents = [node for node, d in enumerate(tree.depths) if d == depth and tree.children[node]]
            children = table([torch.tensor(tree.children[node]) for node in parents])   # (parents, width)
            chosen = (children.flatten() >= 0).nonzero()[:, 0].to(device)
            places = slice(int(children[0, 0]), int(children.max()) + 1)
            fed = parents if depth else [-1, 0]
            self.levels.append(Level(tensor(parents), tensor(fed), children.shape[1], chosen, places))
        self.children = table([torch.tensor(children or [-1]) for children in tree.children]).to(device)
        self.no_child = self.children < 0                                               # (size, ranks), both
        # Each node after all that is below it: sorted by its path and `size`, which is above any rank.
        path = [(), *tree.paths()]
        self.children_first = tensor(sorted(range(tree.size), key=lambda node: (*path[node], tree.size)))
        # From the root to each node, then -1 as padding: `move` copies node -1's entry to free slots.
        self.paths = table([row.nonzero()[:, 0] for row in tree.mask]).to(device)       # (size, depth)

class TreeCache(Cache):
    """Each layer's keys and values in turn, (1, heads, capacity, head_dim) each, written at any slots. As
    masks and positions are given, transformers asks it for nothing but `update`."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        visible = []
        for entry, states in zip(self.entries[2 * layer_idx :], (key_states, value_states)):
            entry.index_copy_(2, self.slots, states)
            visible.append(entry.narrow(2, 0, self.visible))
        return visible

# How many of a prompt's tokens are scored again to see whether a model is fit for trees.
PROBED = 6

class CachedModel:
    """A transformers model with a KV cache that grows. It is fed a text, then nodes of trees."""

    def __init__(self, model):
        self.model = model
        self.windows = attention_windows(model)
        self.context = context_of(model)
        self.vocabulary = model.get_input_embeddings().num_embeddings
        self.cache = TreeCache(layers=[])
        # All keys and values, for one operation to move: (entries, most heads, capacity, widest head_dim).
        self.store = torch.empty(0, 0, 0, 0)
        self.shapes = []         # each entry's heads and head_dim

    def feed(self, text, capacity):
        """Feeds a text, (length,), by the model's ordinary pass, with room for `capacity` tokens. The logits
        after each of its last tokens, (up to PROBED, V)."""
        prefill = DynamicCache()
        # A draft's vocabulary may be padded to a shorter length than its target's.
        ids = text.clamp(max=self.vocabulary - 1)[None]
        output = self.model(input_ids=ids, past_key_values=prefill, use_cache=True, logits_to_keep=PROBED)
        fed = [entry for layer in prefill.layers for entry in (layer.keys, layer.values)]
        if not self.shapes:
            self.shapes = [(entry.shape[1], entry.shape[3]) for entry in fed]
            heads, width = map(max, zip(*self.shapes))
            self.store = fed[0].new_zeros(len(fed), heads, 0, width)
        self.reserve(capacity)
        for ours, theirs in zip(self.entries, fed):
            ours[:, :, : len(text)] = theirs
            # A NaN that an earlier text left would show through any mask.
            ours[:, :, len(text) :] = 0
        return output.logits[0, -PROBED:]

    def reserve(self, capacity):
        """Makes room for so many tokens, and keeps what is there."""
        # Subtle: padding by nothing would copy, and a graph would hold the old memory.
        if capacity > self.store.shape[2]:
            self.store = nn.functional.pad(self.store, (0, 0, 0, capacity - self.store.shape[2]))
        self.entries = [entry[None, :heads, :, :width]
                        for entry, (heads, width) in zip(self.store, self.shapes)]

    def place(self, layout, base, visible):
        """Places a tree behind the text: its root at `base`, (1,), in a cache of which the first `visible`
        slots take part. Makes the mask drawn above for each window, additive, (1, 1, size + 1, visible)."""
        self.slots = base + layout.offset                                                # (size + 1,)
        positions = base + layout.depth
        slots = torch.arange(visible, device=base.device)
        # Each slot's column of layout.mask: its node, `size` beyond the tree, or -1, the last, for the text.
        node = (slots - base).clamp(-1, layout.tree.size)
        self.masks = []
        for window in self.windows.values():
            seen = layout.mask[:, node]                                                  # (size + 1, visible)
            if window:
                # The text's positions are its slots. Beyond the tree any will do: it is not seen.
                position = torch.where(node < 0, slots, positions[node])
                seen = seen & (positions[:, None] - position < window)
            self.masks.append(torch.where(seen, 0.0, RULED_OUT).to(self.store.dtype)[None, None])
        # Nodes beyond the context share its last position: a target's text ends there, a draft only guesses.
        self.positions = positions.clamp(max=self.context - 1)

    def score(self, tokens, nodes):
        """One pass over some nodes: the tree's tokens (size + 1,), an index of nodes -> logits (nodes, V)."""
        return getattr(self.model, "recorded", self.forward)(*self.inputs(tokens, nodes))

    def inputs(self, tokens, nodes):
        # A child that does not exist is -1.
        ids = tokens[nodes].clamp(0, self.vocabulary - 1)[None]
        masks = [mask[:, :, nodes] for mask in self.masks]
        return ids, self.positions[None, nodes], self.slots[nodes], *masks, *self.entries

    def forward(self, ids, positions, slots, *masks_and_entries):
        """The pass as a function of tensors alone, so that it can be recorded."""
        masks = masks_and_entries[: len(self.windows)]
        self.cache.entries = masks_and_entries[len(self.windows) :]
        self.cache.slots = slots
        self.cache.visible = masks[0].shape[-1]
        mask = masks[0] if len(masks) == 1 else dict(zip(self.windows, masks))
        return self.model(input_ids=ids, position_ids=positions, attention_mask=mask,
                          past_key_values=self.cache, use_cache=True).logits[0]

    def move(self, path):
        """Copies these nodes' entries, (depth,), aside, then to the tree's first slots, in all layers."""
        self.store.index_copy_(2, self.slots[: len(path)], self.store.index_select(2, self.slots[path]))

def attention_windows(model):
    """Each kind of attention layer's window or None. Raises ValueError if a configuration rules out trees."""
    name = type(model).__name__
    _refuse(not isinstance(model, transformers.PreTrainedModel) or model.get_output_embeddings() is None,
            f"needs a language model as transformers loads it, not compiled and not its name; got {name}")
    config = model.config.get_text_config(decoder=True)
    # If all layers are alike, a model may name no kind: call it sliding. A window of None is full attention.
    kinds = dict.fromkeys(getattr(config, "layer_types", None) or ["sliding_attention"])
    needed = {"position_ids", "past_key_values", "logits_to_keep"}
    # GPT-Neo's own mask counts slots. The probe cannot see that in bfloat16.
    _refuse(model.config.is_encoder_decoder or model._is_stateful or config.model_type == "gpt_neo"
            or kinds.keys() - {"full_attention", "sliding_attention"}
            or needed - inspect.signature(model.forward).parameters.keys(),
            f"{name} cannot verify a tree: each layer must have full or sliding attention by position")
    attention = model.config._attn_implementation
    _refuse(attention not in ("eager", "sdpa"), f"{name} takes no tree: attn_implementation='sdpa' would")
    devices = {weight.device for weight in model.parameters()}
    _refuse(len(devices) > 1 and not hasattr(model, "offloaded"), f"{name} must be on one device: {devices}")
    window = getattr(config, "sliding_window", None)
    return {kind: window if kind == "sliding_attention" else None for kind in kinds}

def context_of(model):
    """The most tokens that a model can be fed. Past its short length longrope rotates all earlier keys anew,
    for which transformers feeds the text again. A tree cannot: the short length is the context."""
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    # One for all layers, or one for each kind of layer.
    for parameters in (rope, *rope.values()):
        if isinstance(parameters, dict) and parameters.get("rope_type") == "longrope":
            return parameters["original_max_position_embeddings"]
    return getattr(config, "max_position_embeddings", None) or sys.maxsize

# --- 6  Decoding --------------------------------------------------------------------------------------------
class Step(NamedTuple):
    """What one step did."""
    tree: Tree
    node_tokens: list        # (size,) each node's token, the root's first; -1 for a child that does not exist
    path: list               # the accepted nodes below the root, in order
    token: int               # the target's own token, which follows them

    @property
    def tokens(self):
        """The tokens that this step adds to the text."""
        return [self.node_tokens[node] for node in self.path] + [self.token]

# Processors shape the draft too: one like the target is accepted more. Any draft is lossless, if the same
# scores propose and verify. In a draft's, CUTS lower tokens by FAR_BELOW, to come last: the target may keep
# them.
CUTS = (TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
FAR_BELOW = 50
# All others may read the text. They are called node by node, which is slower, and no CUDA graph can hold it.
TEXT_FREE = (TemperatureLogitsWarper, *CUTS)
# Processors that count on one call a token.
STATEFUL = (transformers.UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)
# Settings that ask for another decoding or output. A streamer comes by functools.partial (section 9).
UNABLE = ("assistant_early_exit", "assistant_model", "constraints", "dola_layers", "force_words_ids",
          "output_attentions", "output_hidden_states", "output_logits", "output_scores", "penalty_alpha",
          "prompt_lookup_num_tokens", "streamer", "use_mtp")
# Arguments of a model that change no text.
HARMLESS = {"attention_mask", "input_ids", "logits_to_keep", "use_cache"}

class Decoder:
    """Decodes with a target and a draft, behind transformers' generate:

        target.generate(**inputs, custom_generate=Decoder(target, draft), do_sample=True, temperature=0.6)

    draft: a model of the same vocabulary. tree: a Tree; (size, depth), the best tree of that shape; or
    "auto", the fastest for pair and machine. method: a name from METHODS, or a Method. generator: by default
    torch's own; processes sharing a target seed theirs alike. on_step: called with each Step; a text's first
    one or two tokens have none. cuda_graph: record the step on a GPU. A Decoder keeps caches, plan and graph:
    models must not change, and texts come one at a time. Raises ValueError for what it cannot work with."""

    def __init__(self, target, draft=None, tree="auto", method="sequoia", generator=None, on_step=None,
                 cuda_graph=True):
        tree = NO_TREE if draft is None and tree == "auto" else tree
        _refuse(tree != "auto" and not isinstance(tree, Tree | tuple),
                f"tree must be a Tree, (size, depth) or 'auto', got {tree!r}")
        self.given_method = METHODS.get(method, method)
        _refuse(not isinstance(self.given_method, Method),
                f"method must be one of {', '.join(METHODS)}, got {method!r}")
        self.tree = tree
        self.target = CachedModel(target)
        self.draft = None if tree == NO_TREE else CachedModel(draft)
        self.models = [self.target, self.draft] if self.draft else [self.target]
        self.generator = generator
        self.on_step = on_step or (lambda step: None)
        self.device = target.device
        # A model that is shared among ranks or offloaded needs the host in its pass.
        self.sharded = (getattr(target, "tp_size", None) or 1) > 1
        hosted = self.sharded or any(hasattr(one.model, "offloaded") for one in self.models)
        self.cuda_graph = cuda_graph and self.device.type == "cuda" and not hosted
        self.layout = self.sampling = None
        self.capacity = 0
        self.probed = False
        self.in_use = threading.Lock()
        self.base, self.seed = torch.zeros(2, 1, dtype=torch.long, device=self.device)
        self.tokens = torch.zeros(2, dtype=torch.long, device=self.device)

    def __call__(self, model, input_ids, logits_processor, stopping_criteria, generation_config,
                 streamer=None, **arguments):
        """What `generate` calls: (rows, length) ids -> (rows, longer), row by row, padded where a row has
        ended; a time limit is for all rows together. Stopping criteria are checked after every token.
        Processors, for both models, must be functions of ids and scores, without memory. Raises ValueError
        for NaN logits and requests that this cannot do, RuntimeError while it decodes another text."""
        if not self.in_use.acquire(blocking=False):
            raise RuntimeError("this Decoder is in use: one text at a time")
        try:
            ids = input_ids.to(self.device)
            mask = arguments.get("attention_mask")
            mask = torch.ones_like(ids) if mask is None else mask.to(self.device).long()
            self.check(model, ids, mask, logits_processor, generation_config, arguments)
            self.prepare(logits_processor, generation_config)
            if streamer is not None:
                streamer.put(ids.cpu())
            rows = []
            self.rows = len(ids)
            for self.row, text in enumerate(ids):
                self.processors = [of_row(processor, self.row) for processor in logits_processor]
                for token in self.tokens_after(text, padding=int((mask[self.row] == 0).sum())):
                    _refuse(token < 0, "the models gave NaN logits, or the processors left no token possible")
                    text = torch.cat([text, text.new_tensor([token])])
                    if streamer is not None:
                        streamer.put(text[-1:].cpu())
                    if stopping_criteria(text[None], None).all():
                        break
                rows.append(text)
            if streamer is not None:
                streamer.end()
        finally:
            self.in_use.release()
        out = nn.utils.rnn.pad_sequence(rows, True, int(generation_config._pad_token_tensor or 0))
        return GenerateDecoderOnlyOutput(sequences=out) if generation_config.return_dict_in_generate else out

    def check(self, model, ids, mask, processors, config, arguments):
        """Raises ValueError for a call whose text might not be generate's."""
        # `generate` hands over some arguments. Its frame, known by its `assistant_model`, has all.
        caller = inspect.currentframe().f_back
        while caller and "assistant_model" not in caller.f_code.co_varnames:
            caller = caller.f_back
        given = dict(caller.f_locals) if caller else {}
        settings = vars(config) | given
        unable = {name for name in UNABLE if settings.get(name)}
        # What generate has prepared itself, such as position_ids, is as it should be.
        user_gave = {name for name, value in given.get("kwargs", arguments).items() if value is not None}
        unable |= user_gave & arguments.keys() - HARMLESS
        if self.draft or len(ids) > 1:
            unable |= {type(one).__name__ for one in processors if isinstance(one, STATEFUL)}
        _refuse(unable, f"unable to do {', '.join(sorted(unable))}")
        _refuse((config.num_beams or 1) > 1, "unable to do num_beams")
        _refuse(config.cache_implementation == "quantized", "unable to do a quantized cache")
        _refuse(model is not self.target.model, "this Decoder was made for another target")
        _refuse(ids.shape[1] == 0, "the prompt is empty")
        _refuse(config.max_length > self.target.context + 1,
                f"the target takes up to {self.target.context} tokens; the prompt has {ids.shape[1]}, "
                f"and with new ones the text up to {config.max_length}")
        _refuse(not 0 <= ids.min() <= ids.max() < self.target.vocabulary,
                f"token ids must be from 0 to {self.target.vocabulary - 1}, got {ids.min()} to {ids.max()}")
        _refuse(mask.shape != ids.shape or not mask[:, -1].all() or (mask != (mask.cumsum(dim=1) > 0)).any(),
                "a row of the attention_mask must be zeros, then ones: padding stands on the left")

    def prepare(self, processors, config):
        """Takes over what a call wants. Another way of sampling needs another plan and another graph."""
        self.method = self.given_method if config.do_sample else GREEDY
        self.reads_text = any(type(one) not in TEXT_FREE for one in processors)
        self.static = self.cuda_graph and not self.reads_text
        settings = [(type(one), dict(vars(one))) for one in processors if type(one) in TEXT_FREE]
        sampling = (self.method, self.reads_text, settings)
        if sampling != self.sampling:
            self.layout = None
            self.planner = Planner(self.tree, self.target.vocabulary)
            self.sampling = sampling

    @torch.inference_mode()
    def tokens_after(self, text, padding):
        """Yields the tokens after a text, (length,). Its first `padding` are for the processors alone."""
        logits = self.begin(text, padding)
        yield self.draw_root(logits[-1:])
        if not self.probed:
            yield self.probe(logits)
        while True:
            beyond = self.draft and len(self.text) >= self.draft.context
            self.use(NO_TREE if beyond else self.planner.next_tree())
            begun = time.perf_counter()
            step = self.step()
            seconds = [time.perf_counter() - begun]
            if self.sharded:
                # All ranks plan by rank 0's clock.
                torch.distributed.broadcast_object_list(seconds, src=0)
            # Untimed: a tree's first step, which warms up, and if static its second, which is recorded.
            self.planner.learn(step, seconds[0] if self.steps > 1 + self.static else None)
            self.on_step(step)
            # A token of -1 means NaN or none possible: refused, if the text goes on so far.
            yield from step.tokens

    def begin(self, text, padding):
        """Feeds a text to the target. Its logits after each of the last tokens, (up to PROBED, V)."""
        if self.method.shared_noise:
            self.seed.random_(generator=self.generator)
        # The text up to node -1, of which the target has all entries. The root comes next: tokens[0].
        self.padding, self.text = text[:padding], text[padding:]
        self.base.fill_(len(self.text))
        self.draft_is_fed = False
        self.reserve(0)
        logits = self.target.feed(self.text, self.capacity)
        self.vocabulary = logits.shape[1]
        if self.layout is None:
            self.use(NO_TREE)
        self.tokens[-1] = text[-1]
        return logits

    def reserve(self, nodes):
        """Makes room for the text and so many nodes. Caches double, which gives up a recorded graph."""
        needed = len(self.text) + nodes
        if needed > self.capacity:
            self.graph = None
            capacity = 64 * math.ceil(max(needed, 2 * self.capacity, 192) / 64)
            for model in self.models:
                model.reserve(capacity)
            self.capacity = capacity

    def draw_root(self, logits):
        """Draws the token after node -1, from logits (1, V): the root of the next tree."""
        if self.method.shared_noise:
            self.noise = shared_noise(self.seed, self.base - 1, self.vocabulary)
        self.tokens[:1] = self.method.draw(self.scores(logits, slice(-1, None)), 1, self.generator)[:, 0]
        return int(self.tokens[0])

    def probe(self, logits):
        """Shows whether a target can be trusted with trees. One that masks by slot, or numbers positions its
        own way, would silently give another text. So the prompt's last tokens are scored again, in a tree,
        beside decoys. They must score as in the prompt's own pass (logits, (known, V)), but for rounding, or
        it is a ValueError. The new root, at their end, was never scored: its scores draw the next token."""
        known = len(logits)
        tokens = torch.cat([self.text[-known:], self.tokens[:1]])                       # (known + 1,)
        # Beside each token stands a decoy, the token before it: so slots run ahead of positions.
        pairs = torch.stack([tokens[1:], tokens[:-1]], dim=1)
        layout = Layout(sequences(2, known), self.device)
        # Nodes 0, 1, 3, 5, ..: the path to the last node but one, where the first sequence ends.
        real = layout.paths[-2]
        self.reserve(layout.tree.size)
        self.target.place(layout, self.base - known, self.capacity)
        scored = self.target.score(torch.cat([tokens[:1], pairs.flatten()]), layout.nodes)[real]
        # The median, as a mixture of experts may round a token to another expert.
        difference = ((scored[:-1] - logits).float().norm(dim=1) / logits.float().norm(dim=1)).median()
        _refuse(not difference < torch.finfo(self.target.model.dtype).eps ** 0.5,
                f"{type(self.target.model).__name__} cannot verify a tree: scores differ by {difference:.1%}")
        # After a shorter prompt the next text is probed, too.
        self.probed = known == PROBED
        self.target.move(real)
        self.tokens[-1] = self.tokens[0]
        self.text = torch.cat([self.text, self.tokens[:1]])
        self.base += 1
        return self.draw_root(scored[-1:])

    def use(self, tree):
        """Takes a tree for the steps to come, and makes all ready for one."""
        self.reserve(tree.size)
        if self.layout is None or tree != self.layout.tree:
            # If memory runs out in between, this makes the next text begin with a new layout.
            self.layout = self.graph = None
            # The root's token, room for the others, node -1's.
            self.tokens = torch.cat([self.tokens[:1].expand(tree.size), self.tokens[-1:]])
            self.q = torch.zeros(tree.size, self.vocabulary, device=self.device)
            self.steps = 0
            self.layout = Layout(tree, self.device)
        if self.layout.levels and not self.draft_is_fed:
            self.draft.feed(self.text, self.capacity)

    def step(self):
        """One step, as the host sees it."""
        self.steps += 1
        program = self.replay if self.static and self.steps > 1 else self.program
        # If static, the step's one copy to the host.
        node, token, *tokens, _ = program().tolist()
        tree = self.layout.tree
        path = tree.mask[node].nonzero().flatten().tolist()
        step = Step(tree, tokens, path[1:], token)
        # The old root and the accepted nodes. The token after them is the new root.
        self.text = torch.cat([self.text, self.text.new_tensor(tokens[:1] + step.tokens[:-1])])
        # A step without a tree leaves the draft behind.
        self.draft_is_fed = bool(self.layout.levels)
        return step

    def program(self):
        """One step on the device: (size + 3,), the last accepted node, the token after it, all tokens. If
        `static`, shapes are fixed and no value goes to the host: a CUDA graph can hold it."""
        layout, tokens = self.layout, self.tokens
        models = self.models if layout.levels else [self.target]
        # 1. The tree takes its place behind the text.
        visible = self.capacity if self.static else len(self.text) + layout.tree.size
        for model in models:
            model.place(layout, self.base, visible)
        if self.method.shared_noise:
            positions = self.base + layout.nodes[: layout.tree.depth]
            self.noise = shared_noise(self.seed, positions, self.vocabulary)            # (depth, V)
        # 2. The draft grows it level by level: a pass over a level's parents proposes their children.
        for depth, level in enumerate(layout.levels):
            logits = self.draft.score(tokens, level.fed)[-len(level.parents) :]
            q = self.scores(logits, level.parents, level=depth)                         # (parents, V)
            self.q[level.parents] = q
            proposals = self.method.propose(q, level.width, self.generator)             # (parents, width)
            torch.take(proposals, level.chosen, out=tokens[level.children])
        # What is below a child that does not exist does not exist either.
        missing = (layout.ancestors & (tokens[:-1] < 0)).any(dim=1)
        tokens[:-1].masked_fill_(missing, -1)
        # 3. The target scores it in one pass.
        logits = self.target.score(tokens, slice(layout.tree.size))                     # (size, V)
        # 4. Verification finds the path to keep and the token after it.
        node, token = self.method.verify_tree(layout, tokens, lambda nodes: self.scores(logits[nodes], nodes),
                                              self.q, self.generator, self.static)
        # NaN would else pass for a rejection or a child that does not exist. The maximum of NaN is NaN.
        token = torch.where((self.q.max() + logits.max()).isnan(), -1, token)
        report = torch.cat([node, token, tokens])
        # 5. The entries of the accepted nodes move up behind the text.
        path = layout.paths[node][0]                                                    # (depth,)
        for model in models:
            model.move(path)
        # 6. The last accepted node is the next node -1, the token the next root.
        tokens[-1:] = tokens[node]
        tokens[:1] = token
        self.base += layout.depth[node] + 1
        return report

    def replay(self):
        """Records a tree's second step as a CUDA graph, replayed until the tree or the capacity changes."""
        if self.graph is None:
            graph = torch.cuda.CUDAGraph()
            try:
                if self.generator is not None:
                    graph.register_generator_state(self.generator)
                with torch.cuda.device(self.device), torch.cuda.graph(graph):
                    self.report = self.program()
            except RuntimeError as error:
                warnings.warn(f"decoding goes on without a CUDA graph: {error}")
                self.cuda_graph = self.static = False
                return self.program()
            self.graph = graph
        self.graph.replay()
        return self.report

    def scores(self, logits, nodes, level=None):
        """A model's scores after these nodes, an index of them, (nodes, V): float32, over the target's
        vocabulary, as the processors shape them. level: that of a draft's nodes."""
        draft = level is not None
        scores = logits.float()
        # Negative padding cuts off what only the draft's vocabulary has.
        missing = self.vocabulary - logits.shape[1]
        scores = nn.functional.pad(scores, (0, missing), value=RULED_OUT) if missing else scores
        if self.reads_text:
            nodes_and_scores = zip(self.layout.offset[nodes], scores.split(1))
            scores = torch.cat([self.processed_after(node, row, draft) for node, row in nodes_and_scores])
        else:
            scores = self.processed(None, scores, draft)
        if self.method.shared_noise:
            # A row for each depth, for all nodes of a draft's level. `draw_root` has one row, [-1].
            scores = scores + self.noise[level if draft else self.layout.depth[nodes]]
        return scores

    def processed_after(self, node, scores, draft):
        """The scores after one node, (1, V), processed with the text up to it."""
        path = self.layout.mask[node, :-2].nonzero()[:, 0]
        text = torch.cat([self.padding, self.text, self.tokens[path]])[None]
        # Below a child that does not exist nothing is used, and a processor may not know what to say.
        if (text < 0).any():
            return scores
        # Some processors know the rows of the batch that they were made for.
        return self.processed(text.repeat(self.rows, 1), scores.repeat(self.rows, 1), draft)[self.row, None]

    def processed(self, text, scores, draft):
        """Scores after a text, (rows, length), if they read one, as the processors shape them, (rows, V)."""
        for processor in self.processors:
            shaped = processor(text, scores)
            if draft and type(processor) in CUTS:
                shaped = torch.where(shaped > RULED_OUT, shaped, scores - FAR_BELOW)
            scores = shaped
        return scores

def of_row(processor, row):
    """A processor for one row of a batch: a grammar is told that row's number for all copies of its text."""
    if type(processor) is not PrefixConstrainedLogitsProcessor:
        return processor
    allowed = processor._prefix_allowed_tokens_fn
    return PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row, ids), num_beams=1)

def decode(model, input_ids, draft=None, tree="auto", method="sequoia", generator=None, on_step=None,
           cuda_graph=True, **rest):
    """A Decoder made for one call, with a Decoder's options. The rest is what `generate` prepares."""
    return Decoder(model, draft, tree, method, generator, on_step, cuda_graph)(model, input_ids, **rest)

# --- 7  The hardware-aware planner (section 4) --------------------------------------------------------------
# Acceptance rates before any evidence: a decent draft, a power law in the rank.
PRIOR = 0.6 / np.arange(1, 33) ** 2
# The most nodes of a planned tree, and twice the levels of a binary tree with so many.
LARGEST, DEEPEST = 256, 18
# Noise only adds to a time. So a tree's time is the least of three steps with it, later of the last eight.
FEW, MANY = 3, 8

class Latency(NamedTuple):
    """Measured seconds: t(n) of a step without its draft passes, by tree size n; c of a draft pass."""
    sizes: list
    t: list
    c: float

    def of_step(self, size, depth):
        return np.interp(size, self.sizes, self.t) + (depth - 1) * self.c

class Plan(NamedTuple):
    """A tree and what it promises: tokens and seconds a step, and how many times the speed of no tree."""
    tree: Tree
    tokens: float
    seconds: float
    speedup: float

def plan(rates, latency):
    """The tree of n nodes on d levels that maximises G(n, d) / (t(n) + (d - 1) c), over all sizes up to the
    largest timed one and depths up to DEEPEST. rates: as in `optimal_tree`."""
    largest = latency.sizes[-1]
    tokens = expected_tokens_table(rates, largest, DEEPEST)[1:, 1:].clip(0)             # (largest, DEEPEST)
    n, d = np.mgrid[1 : largest + 1, 1 : DEEPEST + 1]
    seconds = latency.of_step(n, d)
    pace = tokens / seconds
    best = np.unravel_index(pace.argmax(), pace.shape)
    return Plan(optimal_tree(rates, n[best], d[best]), tokens[best], seconds[best], pace[best] * latency.t[0])

class Planner:
    """Chooses a Decoder's trees. It times trees while the first steps decode, then plans. A plan made at step
    i is due again at step 2 i, or 32 if that is later, with c timed anew. All is timed anew when steps take
    another time than planned. shape: as a Decoder's tree; a Tree is kept. plan: the last Plan, if any."""

    def __init__(self, shape, vocabulary):
        self.shape = shape
        self.prior = PRIOR[:vocabulary]
        # How often the k-th children of nodes on a level were tried, and accepted: (levels, ranks) each.
        self.tried, self.accepted = np.zeros((2, 4, len(self.prior)))
        self.plan = None
        self.patience = 0        # for how many steps it does not measure anew
        self.measure_anew()
        if isinstance(shape, tuple):
            # Such a tree may be impossible: said before the first token.
            optimal_tree(self.prior, *shape)

    def measure_anew(self):
        self.steps = 0           # since then
        self.due = 0             # the step at which it plans again; 0: as soon as all trials are timed
        self.seconds = {}        # by tree: the times of the last steps with it
        # Trees to time, a decent one first. The third has 8 nodes, too, but takes 7 draft passes, not 3.
        self.trials = [optimal_tree(self.prior, 8, 4), NO_TREE, chain(7)]

    def next_tree(self):
        if isinstance(self.shape, Tree):
            return self.shape
        if self.shape == "auto":
            if 0 < self.due <= self.steps:
                # `learn` checks the planned tree alone, not c: the two trees that give c are timed again.
                del self.seconds[self.trials[0]], self.seconds[self.trials[2]]
                self.due = 0
            for tree in self.trials:
                if len(self.seconds.get(tree, ())) < FEW:
                    return tree
        if self.steps >= self.due:
            self.due = max(32, 2 * self.steps)
            self.tree = self.planned() if self.shape == "auto" else optimal_tree(self.rates(), *self.shape)
        return self.tree

    def planned(self):
        """The planned tree, if a size up to a quarter larger is timed. Else t(n) just above is a guess, so
        a tree to time: half way to the next larger timed size, or of double size, up to LARGEST."""
        latency = self.latency()
        rates = self.rates()[:, :16]                 # a node hardly ever has use for more children
        self.plan = plan(rates, latency)
        size = self.plan.tree.size
        larger = min([n for n in latency.sizes if n > size], default=3 * size)
        between = (size + larger) // 2               # 2 * size by default
        if larger <= size + (size + 3) // 4 or between > LARGEST:
            return self.plan.tree
        self.due = 0
        # Deep enough for a binary tree: a small vocabulary may allow no other.
        depth = max(self.plan.tree.depth + 1, between.bit_length())
        self.trials.append(optimal_tree(rates, between, depth))
        return self.trials[-1]

    def latency(self):
        """t(n) and c: a step with n nodes on d levels takes t(n) + (d - 1) c. So 8 levels less 4 are 4 c."""
        step = {tree: min(times) for tree, times in self.seconds.items() if len(times) >= FEW}
        branched, root, straight = self.trials[:3]
        c = max(0.0, (step[straight] - step[branched]) / 4)
        t = {}
        for tree, seconds in step.items():
            # A pass over more tokens takes no less than one over a single token.
            without_draft = max(step[root], seconds - (tree.depth - 1) * c)
            t[tree.size] = min(without_draft, t.get(tree.size, math.inf))
        return Latency(sorted(t), [t[size] for size in sorted(t)], c)

    def learn(self, step, seconds):
        """Learns from a step: which children a walk to its end tries, and its seconds, None if uncounted."""
        self.steps += 1
        path = [0, *step.path]
        for level, node in enumerate(path):
            row = min(level, 3)
            for rank, child in enumerate(step.tree.children[node][: len(self.prior)]):
                if step.node_tokens[child] < 0:
                    break
                self.tried[row, rank] += 1
                if child in path:
                    self.accepted[row, rank] += 1
                    break
        if seconds is None:
            return
        times = [*self.seconds.get(step.tree, ()), seconds][-MANY:]
        self.seconds[step.tree] = times
        if self.plan and len(times) == MANY and step.tree == self.plan.tree:
            # The machine's speed has changed or the forecast was wrong. Patience keeps measuring rare.
            if not 0.7 < min(times) / self.plan.seconds < 1.4 and self.steps >= self.patience:
                self.measure_anew()
                self.patience = 200
                # These times are new: they correct the next forecast for this tree.
                self.seconds[step.tree] = times

    def rates(self):
        """The acceptance rates, (levels, ranks): the chance that a child is accepted when tried, times the
        chance that it is tried. A lower level's prior is the level above, worth eight tries."""
        # The prior divided by the chance to be tried: that no child before was accepted.
        when_tried = self.prior / (1 - self.prior.cumsum() + self.prior)
        rows = []
        for tried, accepted in zip(self.tried, self.accepted):
            when_tried = (accepted + 8 * when_tried) / (tried + 8)
            is_tried = np.cumprod(1 - when_tried) / (1 - when_tried)
            rows.append(when_tried * is_tried)
        return np.stack(rows)

# --- 8  Passes: packed and recorded on a CPU; weights that stream past a small GPU --------------------------
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
    """Prepares a model on a CPU for decoding, in place, and returns it: packs its linear layers, and records
    its pass, which halves a small model's time. It cannot be trained, saved, loaded or used by two threads at
    once any more. On a GPU, offloaded, or of a dtype that oneDNN cannot take it stays as it is. Raises
    ValueError if it cannot verify a tree, or if packing, for which torch has no public operators, changes its
    numbers by more than rounding.

    A recording is a TorchScript trace: the operators that one run called, to run on other tensors, of other
    lengths too, without Python. What Python decided in that run, such as a mixture's experts or some rotary
    embeddings' angles, is decided for good. So a trace is given up unless bit-equal on other inputs."""
    unfit = {"recorded", "offloaded"} & vars(model).keys() or model.device.type != "cpu"
    if unfit or model.dtype not in packable_dtypes():
        return model
    cached = CachedModel(model)
    model.requires_grad_(False)
    cached.feed(torch.arange(4), capacity=32)
    layout = Layout(k_ary(2, 4), "cpu")
    examples = []
    # The first is recorded. The second has more nodes behind a longer text, at the context's end.
    for base, nodes, ahead in ((4, 3, 0), (16, 15, 10**6)):
        cached.place(layout, torch.tensor([base]), base + layout.tree.size)
        cached.positions = (cached.positions + ahead).clamp(max=cached.context - 1)
        examples.append(cached.inputs(torch.arange(7, 23), layout.nodes[:nodes]))

    def outputs(forward):
        return [forward(*inputs) for inputs in examples]

    before = torch.cat(outputs(cached.forward))
    # The module to trace. It holds the packed weights as buffers: oneDNN's tensors cannot be constants.
    recording = nn.Module()
    recording.forward = cached.forward
    for i, layer in enumerate(model.modules()):
        if type(layer) is nn.Linear:
            pack_linear(layer)
            recording.register_buffer(f"weight_{i}", layer.weight)
    packed = outputs(cached.forward)
    _refuse(not (torch.cat(packed) - before).norm() <= torch.finfo(model.dtype).eps ** 0.5 * before.norm(),
            f"oneDNN gives other numbers for {type(model).__name__}: load it anew, and do not pack it")
    model.recorded = cached.forward
    # A model of which there is no trace, or no equal one, runs packed.
    with contextlib.suppress(RuntimeError, AttributeError), warnings.catch_warnings(action="ignore"):
        frozen = torch.jit.freeze(torch.jit.trace(recording.eval(), examples[0], check_trace=False))

        def recorded(*inputs):
            # Else it would be optimised anew for every new shape.
            with torch.jit.optimized_execution(False):
                return frozen.forward(*inputs)

        if all(map(torch.equal, outputs(recorded), packed)):
            model.recorded = recorded
    return model

@torch.no_grad()
def offload(model, device, resident=0):
    """Moves a model larger than a device to it, in place. The weights of its decoder layers, but for the
    first `resident` ones, stay in host memory, pinned for a GPU. While a layer is computed from a copy on the
    device, the next is copied: the device holds two. Two threads cannot use it at once."""
    cuda = torch.device(device).type == "cuda"
    stream = torch.cuda.Stream(device) if cuda else None
    layers = next(m for m in model.get_decoder().modules() if isinstance(m, nn.ModuleList))[resident:]
    host = {}            # by weight of these layers: what stays in host memory
    copies = {}          # by layer: the copies of its weights on the device

    def fetch(layer):
        if layer not in copies:
            copies[layer] = {w: host[w].to(device, non_blocking=True, copy=True) for w in layer.parameters()}

    def give(layer, tensors):
        for weight in layer.parameters():
            weight.data = tensors[weight]

    def before(following, layer, _):
        # Waits for both streams: this layer's copy is complete, and nothing on the device reads the others
        # any more, so that their memory may be used again.
        if cuda:
            torch.cuda.synchronize(device)
        for other in copies.keys() - {layer}:
            give(other, host)
            del copies[other]
        fetch(layer)
        give(layer, copies[layer])
        # This copy goes on while the layer is computed.
        with torch.cuda.stream(stream):
            fetch(following)

    for layer, following in zip(layers, [*layers[1:], *layers[:1]]):
        for weight in layer.parameters():
            host[weight] = weight.data.pin_memory() if cuda else weight.data
            weight.data = host[weight]
        layer.register_forward_pre_hook(functools.partial(before, following))
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor not in host:
            tensor.data = tensor.data.to(device)
    model.offloaded = True
    return model.eval().requires_grad_(False)

# --- 9  Front doors: generate, and the command line ---------------------------------------------------------
def generate(target, draft, input_ids, *, streamer=None, tokenizer=None, stop_strings=None,
             stopping_criteria=(), **kwargs):
    """`target.generate` by `decode`, with what transformers keeps from it: a streamer, and stop_strings."""
    criteria = transformers.StoppingCriteriaList(stopping_criteria)
    if stop_strings:
        criteria.append(transformers.StopStringCriteria(tokenizer, stop_strings))
    return target.generate(input_ids, draft=draft, stopping_criteria=criteria,
                           custom_generate=functools.partial(decode, streamer=streamer), **kwargs)

TINY = Path(__file__).resolve().parent / "tiny"
PROMPT = 'class Stack:\n    """A last-in, first-out collection."""\n\n    def __init__(self):'
RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
EXAMPLES = """examples:
  python sequoia.py --prompt "import os" --temperature 0 --explain
  python sequoia.py --target meta-llama/Llama-2-7b-hf --draft JackFram/llama-68m --prompt @question.txt"""

def arguments(argv):
    parser = argparse.ArgumentParser("sequoia.py", description="Decodes text as the target would, faster.",
                                     epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", default=TINY / "target", help="folder or hub name (%(default)s)")
    add("--draft", default=TINY / "draft", help="a small model, same tokens (%(default)s)")
    add("--prompt", default=PROMPT, help="text to go on from, or @FILE (a class)")
    add("--max-new-tokens", type=int, default=128, help="in tokens (%(default)s)")
    add("--temperature", type=float, default=0.6, help="0 is greedy, 1 the model's own (%(default)s)")
    add("--top-p", type=float, help="keep the likeliest tokens with this probability together, 0 to 1 (all)")
    add("--top-k", type=int, help="keep so many likeliest tokens (all)")
    add("--seed", type=int, default=0, help="same seed and tree, same text; gumbel: any tree (%(default)s)")
    add("--method", default="sequoia", choices=METHODS, help="of drawing and verifying (%(default)s)")
    add("--tree", type=tree_shape, default="auto", help="auto (fastest), NODESxLEVELS or none (%(default)s)")
    add("--device", default=f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu",
        help="(a GPU if there is one)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="(bfloat16 where the processor has it)")
    add("--offload", action="store_true", help="stream the target's layers from memory, on a CPU from files")
    add("--explain", action="store_true", help="draw each step's tree, the accepted path in [brackets]")
    return parser.parse_args(argv)

def tree_shape(spec):
    """What a Decoder takes, for a tree described as auto, NODESxLEVELS or none."""
    if spec in ("auto", "none"):
        return NO_TREE if spec == "none" else spec
    size, depth = spec.split("x")
    return int(size), int(depth)

def read(kind, name, **kwargs):
    """`kind.from_pretrained(name)`, of which all errors, and damaged files raise any, become a ValueError."""
    try:
        return kind.from_pretrained(name, **kwargs)
    except Exception as error:
        raise ValueError(f"cannot load {name} (no network, wrong name, damaged files?): "
                         f"{type(error).__name__} {error}") from error

def load(name, args, large=False):
    """A model on the chosen device, packed on a CPU. A large one is offloaded, or shared among torchrun's
    ranks. Raises ValueError for files that lack weights or have other shapes: none runs with random ones."""
    sharded = large and RANKS > 1
    offloaded = large and args.offload
    mapped = offloaded and args.device == "cpu"
    distributed = transformers.distributed.DistributedConfig(tp_size=RANKS) if sharded else None
    usual = "bfloat16" if args.device != "cpu" or torch.bfloat16 in packable_dtypes() else "float32"
    # Weights that keep their files' dtype are mapped, and the system pages them in and out.
    dtype = args.dtype or ("auto" if mapped else usual)
    model, found = read(AutoModelForCausalLM, name, dtype=dtype, output_loading_info=True,
                        ignore_mismatched_sizes=True, distributed_config=distributed)
    lost = [*found["missing_keys"], *found["mismatched_keys"]]
    _refuse(lost, f"cannot load {name}: {len(lost)} weights missing or of other shapes: {lost[:1]}")
    if offloaded and not mapped:
        return offload(model, args.device)
    return model if sharded or mapped else pack(model.to(args.device))

def load_tokenizer(args):
    """The target's tokenizer. Models know ids alone: the draft's are the same, but for added special ones."""
    target = read(AutoTokenizer, args.target)
    draft = target if args.tree == NO_TREE else read(AutoTokenizer, args.draft)
    differing = {token for token, _ in target.get_vocab().items() ^ draft.get_vocab().items()}
    added = [*target.added_tokens_decoder.values(), *draft.added_tokens_decoder.values()]
    special = {token.content for token in added if token.special}
    _refuse(differing - special, f"{args.target} and {args.draft} have different tokens")
    if differing:
        warnings.warn("the tokenizers differ in added special tokens, which the draft will not guess")
    return target

def decode_prompt(args):
    tokenizer = load_tokenizer(args)
    from_file = args.prompt.startswith("@")
    text = Path(args.prompt[1:]).read_text(encoding="utf-8") if from_file else args.prompt
    ids = tokenizer(text, return_tensors="pt")["input_ids"].long().to(args.device)
    draft = None if args.tree == NO_TREE else load(args.draft, args)
    target = load(args.target, args, large=True)
    steps = []
    explain = args.explain and not RANK

    def on_step(step):
        steps.append(step)
        if explain:
            words = [repr(tokenizer.decode([max(token, 0)]))[1:-1] for token in step.node_tokens]
            for node in (0, *step.path):
                words[node] = f"[{words[node]}]"
            print(f"step {len(steps)} adds {tokenizer.decode(step.tokens)!r}\n{step.tree.draw(words)}\n")

    generator = torch.Generator(args.device).manual_seed(args.seed)
    decoder = Decoder(target, draft, args.tree, args.method, generator, on_step)
    streamer = None if args.explain or RANK else transformers.TextStreamer(tokenizer)
    begun = time.perf_counter()
    out = target.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=args.temperature != 0,
        custom_generate=functools.partial(decoder, streamer=streamer), temperature=args.temperature or None,
        top_k=args.top_k or 0, top_p=args.top_p, max_new_tokens=args.max_new_tokens)
    seconds = time.perf_counter() - begun
    if explain:
        print(tokenizer.decode(out[0]))
    if not RANK:
        summarise(args, decoder, steps, out.shape[1] - ids.shape[1], seconds)
    if RANKS > 1:
        torch.distributed.destroy_process_group()

def summarise(args, decoder, steps, count, seconds):
    """Says on standard error what a text of `count` tokens cost."""
    say = functools.partial(print, file=sys.stderr)
    tree = decoder.layout.tree
    found = decoder.planner.plan
    seed = f", seed {args.seed}" if args.temperature else ""
    per_step = sum(len(step.tokens) for step in steps) / max(1, len(steps))
    say(f"\ntokens {count}, steps {len(steps)}, seconds {seconds:.1f}: {per_step:.2f} tokens a step, "
        f"{count / seconds:.1f} a second\ntree {tree.size}x{tree.depth}, method {args.method}, temperature "
        f"{args.temperature:g}{seed}, {decoder.target.model.dtype} on {args.device}")
    say("logits processors, the target's own included:", [type(one).__name__ for one in decoder.processors])
    if found:
        say(f"plan, from measured times: {found.tokens:.2f} tokens a step, {found.speedup:.2f} times no tree")

def main(argv=None):
    """Returns the exit code: 0, 2 for a wrong request, 130 after Ctrl-C."""
    # Else Python looks for garbage among a million imported objects, above all when it ends: half a second.
    gc.freeze()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.formatwarning = lambda message, *_: f"sequoia.py: {message}\n"
    try:
        decode_prompt(arguments(argv))
        return 0
    except KeyboardInterrupt:
        return 130
    # A device that is not there is a RuntimeError, or an AssertionError where torch has no CUDA at all.
    except (ValueError, OSError, RuntimeError, AssertionError) as error:
        print(f"sequoia.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 2

if __name__ == "__main__":
    sys.exit(main())
