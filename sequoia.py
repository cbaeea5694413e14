"""Sequoia: lossless speculative decoding with token trees, in one file.

A large model reads all of its weights to write a single token, and that reading is what takes the time:
scoring a few dozen tokens in one pass often costs little more. So a small *draft* model guesses a tree of
possible continuations, and the large *target* model scores all of them in one pass. A verification rule then
keeps one path and adds one more token. It is lossless: a token's distribution is the target's own.

For example, after "the cat" the draft may propose this tree of five nodes on three levels. The target accepts
" sat" and " on", and adds " my", so one pass of the target has written three tokens:

    " cat"─┬─" sat"─┬─" on"          accepted: " sat", then " on"
           │        └─" by"          the target's own: " my"
           └─" was"

Which tree is best rests on an assumption: that the chance of a child to be accepted depends on its rank among
its siblings (and on its level) alone, not on the text (Definition 3.1). The text is right without it. The
method is "Sequoia: Scalable and Robust Speculative Decoding" (NeurIPS 2024, arXiv 2402.12374):

    paper        here                      what it is, and where the paper defines it
    T            Tree, tree                a token tree; its root is the text's last token (paper 3.1)
    p_k          acceptance_rates[k - 1]   chance that the k-th child is the accepted one (Definition 3.2)
    F(T)         expected_tokens           tokens per step, on average (Proposition 3.4)
    Algorithm 1  optimal_tree              the tree of n nodes on up to d levels with the largest F(T)
    P, Q         P, Q                      the two models' next-token probabilities, (V,) (Algorithm 2)
    log P, log Q scores, log_Q             log-probabilities up to a constant; -inf means impossible
    R, D         R (residual), D           what rejections have left of P and of Q (Algorithm 2)
    t(n), c      t, c                      seconds: of a step's other parts; of a draft pass (paper 4.1)

    python sequoia.py                                            # section 14: decodes with the bundled pair
    sequoia.generate(target, inputs, assistant_model=draft)      # in your own code

Sections 1 to 3 are the idea, 4 is the best tree, 5 to 8 are the fast step, 9 chooses trees, 10 has other
methods, and 11 to 14 are what callers use. "Must hold" says what test_sequoia.py checks.

Left out: training a draft, batches, recurrent and encoder-decoder models, ALiBi, devices without float64,
hooks of your own, and logits processors that remember earlier calls. Needs Python 3.11, torch 2.11 and
transformers 5.17, or later ones. MIT licence, copyright (c) 2026 the sequoia.py authors."""
import argparse, sys, time, warnings
from collections import defaultdict, namedtuple
from contextlib import suppress
from functools import lru_cache, partial
from heapq import heappop, heappush
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad

__all__ = """Decoder METHODS NONE NO_TREE Planner Step Tree chain expected_tokens generate k_ary offload
             optimal_tree pack plan sample_and_verify sequences step_plainly verify_one_node""".split()

NONE = -1              # no parent, child, rank or token

# --- 1  Token trees (paper 3.1) -----------------------------------------------------------------------------
class Tree(tuple):
    """The shape of a token tree, as the tuple of its nodes' parents.

    Nodes stand in level order: the root first (its parent is NONE), then level by level, siblings together
    and the draft's first choice first. So the children of a node have consecutive numbers.

    >>> print(Tree([-1, 0, 0, 1]))
    0
        1
            3
        2

    size, depth, branching: the numbers of nodes, of levels, and of a node's children at most. For each node:
    level_of, 0 for the root; ranks, its place among its siblings, from 0; children; paths, the nodes from the
    root to it; mask, (size, size) bool, which nodes it sees: those on its path."""

    def __init__(self, parents):                # `tuple.__new__` has made them the elements of self
        if self[:1] != (NONE,):
            raise ValueError(f"a tree starts with its root, whose parent is -1; got {self[:8]}")
        self.size = len(self)
        self.mask = torch.eye(self.size, dtype=torch.bool)
        self.ranks = [0]
        self.paths = [[0]]
        self.children = [[] for _ in self]
        for node, parent in enumerate(self[1:], start=1):
            if not max(0, self[node - 1]) <= parent < node:         # in level order parents never fall
                raise ValueError(f"not in level order: node {node} has the parent {parent}")
            self.mask[node] |= self.mask[parent]
            self.ranks.append(len(self.children[parent]))
            self.paths.append([*self.paths[parent], node])
            self.children[parent].append(node)
        self.level_of = [len(path) - 1 for path in self.paths]
        self.depth = len(self.paths[-1])
        self.branching = max(map(len, self.children))

    def picture(self, labels):
        """A line for each node, below its parent's line and indented. labels: (size,)."""
        return "\n".join("    " * (len(path) - 1) + f"{label}"
                         for path, label in sorted(zip(self.paths, labels)))

    def __str__(self):
        return self.picture(range(self.size))

NO_TREE = Tree([NONE])         # the root alone: plain decoding

def chain(length):
    """The root and one sequence of `length` tokens: plain speculative decoding."""
    return sequences(1, length)

def sequences(k, length):
    """`k` sequences of `length` tokens, SpecInfer's tree: sequences(2, 2) is Tree([-1, 0, 0, 1, 2])."""
    return Tree([NONE] + [max(0, node - k) for node in range(1, k * length + 1)])

def k_ary(k, depth):
    """The full tree of `depth` levels, `k` children each: k_ary(2, 3) is Tree([-1, 0, 0, 1, 1, 2, 2])."""
    return Tree([NONE] + [(node - 1) // k for node in range(1, sum(k**level for level in range(depth)))])

# --- 2  Sampling (paper 3.2, Algorithm 2 line 5) ------------------------------------------------------------
# Scores are log-probabilities up to a constant, because probabilities would underflow at low temperatures.
# A draft's scores fall into grades, each so far below the last that a softmax sees only the best one left:
LOWERED_BY = 100        # subtracted where top-k, top-p or min-p cut a token: it is proposed after all others
LOWEST = -1e9           # the draft says that it is impossible: proposed last, because the target may want it
TRIED = -3e38           # it was rejected: never again, but finite, because a softmax of nothing would be NaN
RULED_OUT = -torch.inf  # the target's alone: impossible, and never drawn

uniform = partial(torch.rand, dtype=torch.float64)      # (rows, n) random numbers, 0 <= u < 1, of 53 bits

def gumbel_noise(u):
    """Noise that turns choosing into sampling: the k largest of scores + noise are k different tokens, drawn
    one after another without replacement. u: uniform random numbers, one for each token.

    Let token i arrive after a random time E_i / p_i, where E_i = -log u_i is exponentially distributed. Then
    i is the first to arrive with probability p_i / sum p, and as such arrivals have no memory, the next one
    is drawn in the same way from the other tokens. The smallest E / p is the largest log p - log E. The 53
    bits of u matter: to arrive first, p = 1e-9 needs an E near 1e-9. A float32 u gives none below 6e-8."""
    E = -u.log()
    return -E.float().log()

def most_likely(scores, k):
    """The k tokens of the highest scores, the highest first, (rows, V) -> (rows, k); then NONE if too few."""
    # Among equal scores `max` takes the first, as the argmax of `generate` does. `topk` may take any of them.
    best = scores.max(dim=1, keepdim=True) if k == 1 else scores.topk(k)
    return torch.where(best.values > RULED_OUT, best.indices, NONE)

def draw(weights, u):
    """Draws tokens independently, with replacement: weights, (rows, V), and random numbers u, (rows, k) ->
    (rows, k). A row without any weight gives NONE. The running sums cut the line from 0 to the total into
    pieces: token i owns all points x with sums[i - 1] <= x < sums[i]. So u * total is in no empty piece."""
    sums = weights.cumsum(dim=1, dtype=torch.float64)
    total = sums[:, -1:]
    return torch.where(total > 0, torch.searchsorted(sums, u * total, right=True), NONE)

def never_ruled_out(log_Q, lowest=LOWEST):
    """Scores, (rows, V), from `lowest` to 0, the best token's. So once all of a draft's others are rejected,
    the tokens of probability 0 are equally likely (Algorithm 2, lines 12 to 15)."""
    return (log_Q - log_Q.amax(dim=-1, keepdim=True)).clamp_(min=lowest)

# --- 3  One node and one step, plainly (paper 2.2 and 3.2, Algorithm 2) -------------------------------------
# Must hold here and in 2, 5, 6 and 10: every token follows the target's distribution, for any draft and tree.
# Algorithm 2 tries a node's children one by one. Why is that lossless? First one child, and three tokens:
#
#     token                       a    b    c    sum
#     the target wants P          .5   .3   .2   1
#     the draft proposes by Q     .2   .7   .1   1
#     accepted: min(P, Q)         .2   .3   .1   .6     because a child t is accepted with min(P[t] / Q[t], 1)
#     residual: max(P - Q, 0)     .3   0    .1   .4     and this sum is the chance of a rejection
#     together                    .5   .3   .2   1      = P
#
# So after a rejection the token must be drawn from the residual, divided by its sum. With several children
# that is the next one's task, which is the same again, with R, the residual, for P, and with D, the draft
# without the rejected token, for Q. Say that b was rejected:
#
#     the token must follow R     .75  0    .25  1      the residual above / .4
#     the draft proposes by D     .67  0    .33  1      Q without b / .3
#     accepted: min(R, D)         .67  0    .25  .92
#     residual: max(R - D, 0)     .08  0    0    .08    and so on; after the last child it gives the token
#     together                    .75  0    .25  1      = R
#
# Sequoia is robust (Theorem 3.7), which means two things. (Section 10 has methods that lack one of them.)
# Optimal transport: a single child is accepted with the chance sum of min(P, Q), and no lossless rule has a
# larger one. This counts at high temperatures, where P and Q overlap.
# Cover: if the children include all tokens with P > 0, one of them is accepted. This counts at low
# temperatures, where few tokens are likely. Why? A rejected token had R < D, so the next R is 0 there. If all
# of these tokens but one were rejected, R is 1 at the last one, and 1 / D is at least 1. (The children
# include them if k = V, or if Q allows only k tokens, which are then all proposed, and P no others.)

def verify_one_node(P, Q, tokens, u, say=lambda line: None, word=int):
    """Algorithm 2 for one node. P, Q: (V,); tokens and uniform random numbers u: (k,).

    Returns (rank, None) if a child is accepted; otherwise (NONE, R), and the token is then to be drawn from
    R, the residual, (V,). Once nothing is left of D, all tokens not tried yet are equally likely in it.
    say: is given a line of text for each child tried, where word(token) names it."""
    R, D = P, Q
    for rank, s in enumerate(tokens):
        ratio = R[s] / D[s]
        accepted = u[rank] < ratio
        say(f"{word(s)!r}: R {R[s]:.2f} / D {D[s]:.2f} = {ratio:.2f}, u {u[rank]:.2f}: "
            f"{'accepted' if accepted else 'rejected'}")
        if accepted:
            return rank, None
        R = (R - D).clamp(min=0)
        R = R / R.sum()
        D = D.index_fill(0, s, 0)
        if D.sum() == 0:                    # lines 12 to 15
            D = torch.ones_like(D).index_fill(0, tokens[: rank + 1], 0)
        D = D / D.sum()
    return NONE, R

def step_plainly(target, draft, text, tree, generator=None, say=lambda line: None, word=int):
    """The whole method in one function, without caches, masks or batches: the tokens that one step adds. The
    rest of the file does the same, faster, and is tested against it.

    target, draft: functions from a text, ids (length,), to the scores of the next token, (V,). The draft's
    must be finite and within 700 of the highest, because a lower one's softmax is 0, and Algorithm 2 divides
    by it. No node may have more children than there are tokens. say, word: see `verify_one_node`."""
    rand = partial(uniform, generator=generator, device=text.device)
    # 1. The draft grows the tree. Each node with children proposes them, so texts come in level order.
    texts = [text]
    Q = {}
    noise = []
    for node, children in enumerate(tree.children):
        if children:
            log_Q = draft(texts[node]).double()
            Q[node] = log_Q.softmax(dim=0)
            if tree.level_of[node] == len(noise):         # the first parent on its level
                # The nodes of a level share noise, which is faster. Step 3 reaches at most one of them, and
                # as noise and u of earlier levels alone decide which one, its own noise is then still fresh.
                noise.append(gumbel_noise(rand(1, len(log_Q))))
            proposed = most_likely(log_Q + noise[-1], len(children))
            texts += [torch.cat([texts[node], token]) for token in proposed[0].split(1)]
    say(tree.picture([f"{word(node_text[-1])!r}" for node_text in texts]))
    # 2. The target scores every node's text. (Section 8 does this in one pass.)
    scores = [target(node_text) for node_text in texts]
    # 3. Algorithm 2 walks down from the root, as long as a child is accepted.
    u = rand(tree.size, tree.branching)
    node = 0
    while True:
        children = tree.children[node]
        tokens = text.new_tensor([texts[child][-1] for child in children])
        # At a leaf there is nothing to try, so R is P.
        rank, R = verify_one_node(scores[node].softmax(dim=0), Q.get(node), tokens, u[node], say, word)
        if rank == NONE:
            break
        node = children[rank]
    # 4. One more token is drawn from what rejections have left of the target.
    last = draw(R[None], rand(1, 1))[0]
    say(f"{word(last)!r} is drawn from what is left, with R {R[last].item():.2f}")
    return torch.cat([texts[node][len(text) :], last])

# --- 4  The best tree (paper 3.1, Algorithm 1) --------------------------------------------------------------
def expected_tokens(tree, acceptance_rates):
    """F(T), the tokens that a step adds on average (Proposition 3.4). acceptance_rates: see `optimal_tree`.

    A step adds one token for each accepted node and one of the target's own, which we count at the root. So
    F(T) is the sum of the nodes' chances. If a rate depends on the rank (and the level) alone (Definition
    3.1), a chance is the product of the rates on its path. For `optimal_tree([0.6, 0.2, 0.1], size=5)`:

        1.00─┬─0.60───0.36───0.22        1.00 + 0.60 + 0.20 + 0.36 + 0.22 = 2.38 tokens per step
             └─0.20

    For a fixed shape F(T) has a limit. With p, the first rate, and s, the sum of the first k, these are:

        a chain            1 / (1 - p)            for rates of 0.6, 0.2, 0.1: 2.5
        k sequences        1 + s / (1 - p)        for k = 3: 3.25
        a k-ary tree       1 / (1 - s)            for k = 3: 10, but of 3^d nodes

    The best trees have no limit, if all of k children are rejected with a chance of at most k^-b (a power
    law, Definition 3.5): then F(T) grows at least like b log n / log log n (Theorem 3.6)."""
    rates = np.atleast_2d(acceptance_rates)
    chance = [1.0]
    for parent, rank in zip(tree[1:], tree.ranks[1:]):
        row = rates[min(tree.level_of[parent], len(rates) - 1)]
        chance.append(chance[parent] * row[rank] if rank < len(row) else 0.0)
    return sum(chance)

def optimal_tree(acceptance_rates, size, depth=None):
    """The tree of `size` nodes on at most `depth` levels that has the most expected tokens (Algorithm 1).

    acceptance_rates: (ranks,), the chance that an accepted node's 1st, 2nd, ... child is accepted, which need
    not fall; or (levels, ranks), row i for the children of nodes on level i, and the last row also further
    down. Raises ValueError if no tree with these ranks and levels is that large.

    Let below[n] be the most expected tokens that n nodes can add below an accepted node, as its children and
    their descendants, and best[n] the same if only children of this rank and later ones may be used, where
    later[n] is best[n] of the next rank. Of the n nodes, let the child of this rank and its descendants take
    m. So with row for the level's rates, and -inf where n nodes have no place:

        best[n] = max over m of value[n, m], where
        value[n, m] = row[rank] * (1 + below[m - 1]) + later[n - m]

    and below is best of the first rank, one level up. We go from the last level up, and from the last rank
    back, so both terms are known. For example, with rates of 0.6 and 0.2 two nodes go into the first child's
    line, 0.6 * (1 + 0.6) = 0.96, because two siblings would add 0.6 + 0.2 = 0.8."""
    rates = np.atleast_2d(acceptance_rates).clip(1e-30)         # because 0 times -inf would be NaN
    depth = min(size, depth or size)
    no_child = np.full(size, -np.inf)                   # where no node has a place, only n = 0 is possible
    no_child[0] = 0.0
    below = no_child
    best_m = {}
    for level in reversed(range(depth - 1)):
        row = rates[min(level, len(rates) - 1)]
        later = no_child
        for rank in reversed(range(len(row))):
            best = no_child.copy()
            for n in range(1, size):
                value = row[rank] * (1 + below[:n]) + later[:n][::-1]           # for m = 1, 2, .. n
                best_m[level, rank, n] = 1 + value.argmax()
                best[n] = value.max()
            later = best
        below = later
    if below[-1] == -np.inf:
        raise ValueError(f"size={size} is too large: with these rates and levels the largest has "
                         f"{np.isfinite(below).sum()}")
    # Each node's parent, its level, and how many nodes are below it. The list grows while it is read.
    nodes = [(NONE, 0, size - 1)]
    for node, (_, level, remaining) in enumerate(nodes):
        rank = 0
        while remaining > 0:
            taken = best_m[level, rank, remaining]
            nodes.append((node, level + 1, taken - 1))
            remaining -= taken
            rank += 1
    return Tree(parent for parent, _, _ in nodes)

# --- 5  Many nodes at once ----------------------------------------------------------------------------------
# From here on a row is a node: P, R and the draft's scores log_Q are (rows, V), tokens and u (rows, k). If a
# node has fewer children than the widest of these rows, or none are left to propose, the others are *missing
# children*: their token is NONE, they come last, and they are never accepted.

def propose_different(log_Q, k, rand):
    """Draws k different children in each row. rand(rows, n): random numbers, (rows, n), or shared, (1, n)."""
    # Near temperature 0 scores are so far apart that a float32 sum would have no bits left for the noise.
    return most_likely(log_Q.double() + gumbel_noise(rand(*log_Q.shape)), k)

def verify_nodes(P, log_Q, tokens, u, replacement=False):
    """`verify_one_node` in rows. Returns the accepted children's ranks, (rows,), and weights, (rows, V), from
    which a row of rank NONE draws. replacement: whether a rejected token stays in the draft (SpecInfer)."""
    R = P
    accepted = []
    for rank in range(tokens.shape[1]):
        token = tokens[:, rank, None]                                                       # (rows, 1)
        # Of a missing child D is 0, so R stays. (Token 0 becomes TRIED for it, but only missing ones follow.)
        exists = token != NONE
        s = token.clamp(min=0)
        # When all that the draft allows is TRIED, only tokens at LOWEST are left, all alike: lines 12 to 15.
        D = log_Q.softmax(dim=1) * exists
        accepted.append(exists & (u[:, rank, None] < R.gather(1, s) / D.gather(1, s)))
        R = (R - D).clamp(min=0) + 1e-20 * P    # so that P returns where rounding left nothing
        R = R / R.sum(dim=1, keepdim=True)
        if len(P) == 1 and accepted[-1]:        # a single row need not try its other children
            break
        if not replacement:
            log_Q = log_Q.scatter(1, s, TRIED)
    return first_accepted(torch.cat(accepted, dim=1)), R

def first_accepted(accepted):
    """The rank of the first accepted child in each row, (rows, k) -> (rows,), or NONE."""
    found, rank = accepted.max(dim=1)           # among equals the first
    return torch.where(found, rank, NONE)

class Method(namedtuple("Method", "propose verify choose", defaults=[None])):
    """How children are proposed and verified: by the two functions above, or by those of section 10.

    propose     log_Q, k, rand -> tokens, (rows, k)
    verify      P, log_Q, tokens, u -> ranks and weights
    choose      others than Sequoia draw the target's token first, by this, and accept a child if equal"""

    def target_P(self, scores, rand):
        """P from the target's scores, (rows, V). If it has chosen a token, P is 1 there and 0 elsewhere."""
        if not self.choose:
            return scores.softmax(dim=1)
        token = self.choose(scores, 1, rand)
        return (torch.arange(scores.shape[1], device=scores.device) == token).to(scores)

# --- 6  Logits processors -----------------------------------------------------------------------------------
# Before a target's logits become P, transformers' *logits processors* shape them: temperature, top-p and the
# like. They shape the draft, too, because a draft shaped like the target is accepted more often. But a token
# that a truncating one cuts from the draft is only lowered, because the target may keep it. Processors that
# might look at the text need a call for each node, which is slow, and cannot be captured.
TRUNCATING = transformers.TopKLogitsWarper, transformers.TopPLogitsWarper, transformers.MinPLogitsWarper
TEXT_BLIND = transformers.TemperatureLogitsWarper, *TRUNCATING

class Sampling:
    """A method, and the logits processors that shape both models' scores. Each is a function of ids,
    (1, length), and scores, (1, V), so a node at a time is shaped, after its own text. But if all are in
    TEXT_BLIND, they are given None for ids, and scores of many nodes at once, (rows, V)."""

    def __init__(self, method, processors, end_tokens=None):
        self.method = method
        self.processors = processors
        self.end_tokens = {NONE, *np.ravel(end_tokens)}
        blind = [processor for processor in processors if type(processor) in TEXT_BLIND]
        self.reads_text = blind != processors
        # Calls of one key share a plan and graphs. (With processors that read the text there is no graph.)
        self.key = method, self.reads_text, *[(type(each), *vars(each).values()) for each in blind]

    def node_scores(self, logits, is_draft, nodes, tree, tokens, text):
        """The scores after some nodes of a tree, from a model's logits, (rows, V) each. A processor that
        reads a text is given `text`, which ends with the root, and the tokens from there to the node."""
        if not self.reads_text:
            return self.processed(None, logits, is_draft)
        rows = []
        for row, node in zip(logits.float().split(1), nodes.tolist()):
            added = tokens[tree.paths[node][1:]]
            # No score at or below an end or a missing child is used, and a grammar's processor might raise.
            if not self.end_tokens.intersection(added.tolist()):
                row = self.processed(torch.cat([text, added])[None], row, is_draft)
            rows.append(row)
        return torch.cat(rows)

    def processed(self, ids, logits, is_draft):
        """logits, (rows, V), as scores that the processors have shaped. ids: see above."""
        scores = logits.float()
        for processor in self.processors:
            shaped = processor(ids, scores).float()
            if is_draft and type(processor) in TRUNCATING:
                shaped = torch.where(shaped > RULED_OUT, shaped, scores - LOWERED_BY)
            scores = shaped
        return never_ruled_out(scores.nan_to_num()) if is_draft else scores     # NaN must not end the text

# --- 7  The tree in a model's cache -------------------------------------------------------------------------
# Must hold: a node's logits depend on its path alone, and moved entries equal a fresh pass's.
# How can one pass score a whole tree? All nodes go into the KV cache side by side. Each gets the position it
# would have in a text of its own, and the mask shows it just that text: what precedes the tree, and its path.
#
# The root is the text's last token, which no model has been fed yet. `base` is its slot in the cache and also
# its position, because the tokens before it fill the slots 0 to base - 1. Node i gets the slot base + i, but
# the position base + its level, which the nodes of a level share. For example (x marks what is seen):
#
#     0─┬─1───3    slot                    0 .. base-2   base-1     base   base+1   base+2   base+3
#       └─2        holds                   the text      previous   root   node 1   node 2   node 3
#                  at position             0 .. base-2   base-1     base   base+1   base+1   base+2
#
#                  previous sees           x             x
#                  the root sees           x             x          x
#                  node 1 sees             x             x          x      x
#                  node 2 sees             x             x          x               x
#                  node 3 sees             x             x          x      x                 x
#
#                  if node 2 is accepted   the text      the text   root   node 2   free     free
#
# Accepted entries move up, so that slot and position agree again: node 2 goes to base + 1, the position for
# which its key was rotated. The next root then gets the slot base + 2. *Previous*, the token before it, may
# have been a leaf, and then the draft's cache lacks its entry, because the draft is not fed leaves, which
# propose nothing. So each step's first draft pass feeds previous, too, and may write its entry again.

class Layout:
    """Everything about a step that the tree alone decides, as tensors. For the tree above:

        tokens, by index:    0 root   1 node   2 node   3 node   4 previous   5 unread   -1 NONE
        (padded children are written to unread, and what a missing child's index, -1, reads is always NONE)

        offsets    [[0, 1, 2, 3, -1],             slot minus base; the last column is for previous
                    [0, 1, 1, 2, -1]]             position minus base, likewise
        mask       [[0, 0, -inf, -inf, ..], ..]   0 if seen, (size + 1, size + 2); columns: see `place`
        children   [[1, 2, -1], [3, -1, -1], ..]  in rank order, and after them at least one NONE
        paths      [[0, 4, 4], [0, 1, 4], ..]     from the root to each node, padded with previous
        passes     what grows the tree, level by level. Three tensors for each pass, here for two passes:

            parents      [0]        [1]      the nodes of a level that have children
            fed          [4, 0]     [1]      the draft is fed these: the parents, and first also previous
            proposed     [[1, 2]]   [[3]]    where each parent's children go, padded with unread"""

    def __init__(self, tree, device):
        tensor = partial(torch.tensor, device=device)
        def padded(rows, padding):
            return tensor([*zip_longest(*rows, fillvalue=padding)]).T       # zip_longest gives columns

        self.tree = tree
        self.previous = tree.size
        self.nodes = tensor(range(tree.size))
        self.offsets = tensor([[*range(tree.size), -1], [*tree.level_of, -1]])
        seen = pad(tree.mask, (1, 1, 0, 1))     # columns for all slots before and after; a row for previous
        seen[:, 0] = True
        self.mask = torch.where(seen, 0.0, RULED_OUT).to(device)
        self.children = padded([[*children, NONE] for children in tree.children], NONE)
        self.paths = padded(tree.paths, self.previous)
        self.passes = []
        for level in range(tree.depth - 1):
            parents = [i for i in range(tree.size) if tree.level_of[i] == level and tree.children[i]]
            proposed = padded([tree.children[node] for node in parents], tree.size + 1)
            self.passes.append((tensor(parents), tensor(parents if level else [self.previous, 0]), proposed))

    def place(self, base, reach):
        """Where the tree stands with its root in slot `base`, a number or (1,), if passes read the first
        `reach` slots: the slots and the positions of the nodes and of previous, (size + 1,) each; their mask,
        (size + 1, reach), 0 if seen, else -inf; and, for windows, the read slots' positions, (reach,)."""
        slots, positions = base + self.offsets
        read = torch.arange(reach, device=slots.device)
        # The mask's column for each slot: 0 before base, 1 + i for node i, and the last one after the nodes.
        columns = (read - base + 1).clamp(0, self.tree.size + 1)
        read_positions = read.index_copy(0, slots[:-1], positions[:-1])     # elsewhere a slot is its position
        return slots, positions, self.mask[:, columns], read_positions

def context_of(config):
    """The most tokens that a model can be fed."""
    context = max(0, getattr(config, "max_position_embeddings", None) or 0) or sys.maxsize  # -1 is no limit
    given = getattr(config, "rope_parameters", None) or {}
    for rope in (given, *given.values()):       # one for all layers, or one for each kind of layer
        if isinstance(rope, dict) and rope.get("rope_type") in ("linear", "yarn", "longrope"):
            # linear and yarn stretch the original length by a factor, if one is given. But beyond it longrope
            # would rotate all keys again, and cached ones are rotated already, so there it is the limit.
            factor = 1 if rope["rope_type"] == "longrope" else rope.get("factor")
            if factor:
                return int(factor * rope.get("original_max_position_embeddings", context))
    return context

class CachedModel:
    """A transformers model with a KV cache of its own, which is fed a text first, and then nodes of trees.
    store: the first layer's keys, its values, the second layer's keys, and so on, padded to one shape so that
    one operation can move them all, (2 * layers, most heads, capacity, largest head size)."""

    def __init__(self, model):
        self.model = model
        config = model.config.get_text_config(decoder=True)
        self.context = context_of(config)
        self.window = getattr(config, "sliding_window", None)
        self.layer_types = getattr(config, "layer_types", None)     # None where one mask is for all layers
        # What the head scores. Some models embed a few more ids.
        self.vocabulary = getattr(model.get_output_embeddings(), "out_features", config.vocab_size)
        self.store = torch.empty(0, 0, 0, 0)            # until the first text only its capacity counts

    def agree(self, values):
        """Rank 0's values, a tensor or a number, on all *ranks*: the processes of torchrun that share a model
        by tensor parallelism. They must feed it the same tokens, but have clocks, random numbers and drafts
        of their own."""
        if self.model.tp_size:
            values = torch.as_tensor(values, device=self.model.device)
            torch.distributed.broadcast(values, 0)
        return values

    def reserve(self, length):
        """Makes room for a text of this length, and keeps what is there. Returns the capacity."""
        # Only if needed, because `pad` always copies, and a captured graph goes on with the old memory.
        while length > self.store.shape[2]:
            self.store = pad(self.store, (0, 0, 0, max(256, self.store.shape[2])))
        return self.store.shape[2]

    def prefill(self, text, last=1, **arguments):
        """Feeds a text, (length,), in the pass that `generate` would make with these arguments for the model.
        Returns the logits of at most `last` tokens."""
        if self.model._supports_logits_to_keep():
            arguments["logits_to_keep"] = last
        arguments.setdefault("position_ids", torch.arange(len(text), device=text.device)[None])
        cache = transformers.DynamicCache()             # made without a configuration it keeps all entries
        inputs = self.model.prepare_inputs_for_generation(
            text[None], past_key_values=cache, use_cache=True, is_first_iteration=True, **arguments)
        output = self.model(**inputs, return_dict=True)
        if {layer.get_seq_length() for layer in cache.layers} != {len(text)}:
            raise ValueError("it does not keep one KV entry for each token in each layer")
        entries = [states for layer in cache.layers for states in (layer.keys, layer.values)]
        capacity = self.reserve(len(text))
        if not len(self.store):                         # the first text shows how large entries are
            _, heads, _, head_size = np.max([states.shape for states in entries], axis=0)
            dtype = torch.promote_types(entries[0].dtype, self.model.dtype)     # autocast narrows some
            self.store = entries[0].new_empty(len(entries), heads, capacity, head_size, dtype=dtype)
        self.store.zero_()      # because NaN may be left, and a masked slot has weight 0, but 0 * NaN is NaN
        for stored, states in zip(self.store, entries):
            stored[: states.shape[1], : len(text), : states.shape[3]] = states[0]
        return output.logits[0, -last:]                 # because not every model can leave out the others

    def node_logits(self, tokens, nodes, place):
        """One pass over some nodes of a tree, (nodes,) -> (nodes, V). tokens: all nodes' and more."""
        run = getattr(self.model, "_sequoia_pass", self.forward)        # `pack` may leave a faster one
        return run(self.store, tokens, nodes, *place)

    def forward(self, store, tokens, nodes, slots, positions, mask, read_positions):
        """`node_logits` as a function of tensors alone, for `pack` to trace. The store is one of them, as
        `reserve` may make a new one, and a trace would go on with what it has seen."""
        cache = TreeCache(store, slots[nodes], read_positions.shape[0])
        full = windowed = mask[nodes][None, None].to(store)                     # (1, 1, nodes, reach)
        if self.window:
            windowed = full.masked_fill(positions[nodes, None] - read_positions >= self.window, RULED_OUT)
        masks = {"full_attention": full, "sliding_attention": windowed}
        # A missing child has no id, and a draft's vocabulary may be shorter than the target's.
        ids = tokens[nodes].clamp(0, self.vocabulary - 1)[None]
        return self.model(input_ids=ids, position_ids=positions[nodes][None], past_key_values=cache,
                          attention_mask=masks if self.layer_types else windowed).logits[0]

class TreeCache(transformers.Cache):
    """What a pass over nodes gets for its KV cache: a CachedModel's store, of which it writes some slots, and
    then reads the first `reach`. A model that is given masks and positions only calls `update`: in each layer
    with rotated keys, and values, (1, heads, nodes, head size) each. It attends to what it gets back."""

    def __init__(self, store, written, reach):
        super().__init__(layers=[])
        self.store = store
        self.written = written          # (nodes,)
        self.reach = reach

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        read = []
        for index, states in enumerate((key_states, value_states), start=2 * layer_idx):
            stored = self.store[index, None, : states.shape[1], :, : states.shape[3]]       # a view
            stored.index_copy_(2, self.written, states.to(stored))
            read.append(stored[:, :, : self.reach].to(states))
        return read

# --- 8  The step on a device --------------------------------------------------------------------------------
# Must hold: from the same random numbers it adds what `step_plainly` adds, also as a CUDA graph.
class Step(namedtuple("Step", "tree node_tokens path token seconds")):
    """What one step did: its tree; the nodes' tokens, a list, (size,), NONE for a missing child; path, the
    accepted nodes below the root; the token after them; its seconds, in a first step without the prompt's."""

    @property
    def tokens(self):
        """The tokens that this step adds to the text, which may end before the last of them."""
        return [self.node_tokens[node] for node in self.path] + [self.token]

def walk(layout, try_children):
    """Step 3 of `step_plainly`: the last accepted node, (1,), and weights for the token after it, (1, V).
    try_children(rows, k) tries the first k children of these rows, as `verify_nodes` does."""
    node = 0
    while True:
        row = slice(node, node + 1)
        children = layout.tree.children[node]
        rank, weights = try_children(row, len(children))
        if rank == NONE:
            return layout.nodes[row], weights
        node = children[rank]

def walk_in_graph(layout, try_children):
    """`walk` for a CUDA graph, which cannot branch: all nodes' children are tried at once, and a node without
    an accepted child is followed by itself. If only node 1 of section 7 is accepted: 0, 1, 1."""
    rank, weights = try_children(slice(None), layout.tree.branching)
    child = layout.children[layout.nodes, rank]         # where the rank is NONE, the last column's, NONE
    following = torch.where(child == NONE, layout.nodes, child)                 # here [1, 1, 2, 3]
    node = layout.nodes[:1]
    for _ in range(layout.tree.depth - 1):
        node = following[node]
    return node, weights[node]

class TreeStep:
    """The step with one tree: draft, score, verify, keep. models: the target and the draft. static: whether
    `on_device` has fixed shapes and reads no value back, so that it can be captured as a CUDA graph."""

    def __init__(self, tree, models, generator=None, static=False, memory=()):
        device = models[0].store.device
        self.layout = Layout(tree, device)
        self.models = models
        self.generator = generator
        self.rand = partial(uniform, generator=generator, device=device)
        self.static = static
        self.memory = memory
        self.base = self.layout.nodes.new_zeros(1)
        self.tokens = self.layout.nodes.new_full([tree.size + 3], NONE)     # nodes, previous, unread, NONE
        self.graph = None

    def __call__(self, text, sampling, logits=None):
        """One step after a text. The target's cache lacks its last token, the draft's up to two. logits: what
        the target says after the text, (1, V), if that is known (for a step without a tree)."""
        begun = time.perf_counter()
        self.base.fill_(len(text) - 1)
        self.tokens[0] = text[-1]
        self.tokens[self.layout.previous] = text[-2:][0]            # of a text of one token, that one
        if self.graph:
            self.graph.replay()
        else:
            self.result = self.on_device(text, sampling, logits)
        node, token, *node_tokens = self.result.tolist()            # if static, the one copy to the host
        seconds = float(self.models[0].agree(time.perf_counter() - begun))  # or ranks would plan other trees
        if self.static and not self.graph:              # this call was the warm-up
            self.capture(text, sampling)
        return Step(self.layout.tree, node_tokens, self.layout.tree.paths[node][1:], token, seconds)

    def on_device(self, text, sampling, logits=None):
        """The last accepted node, the next token, and all nodes' tokens, in one tensor, (2 + size,). A static
        step may not use the text's values or length, because a graph goes on with those of its capture."""
        target, _ = self.models
        layout = self.layout
        scores_of = partial(sampling.node_scores, tree=layout.tree, tokens=self.tokens, text=text)
        # 0. The tree takes its place after the text. A static step has fixed shapes, so it reads free slots,
        # too, which the mask hides. So do all on a GPU: there torch 2.11 took 100 ms to set up a new length.
        reach = target.store.shape[2] if self.static or text.is_cuda else len(text) - 1 + layout.tree.size
        place = layout.place(self.base, reach)
        # 1. The draft grows it.
        log_Q = self.grow(place, sampling.method, scores_of)
        # 2. The target scores it, in one pass. (Ranks, see `agree`, must feed it the same, and add the same.)
        if logits is None:
            logits = target.node_logits(target.agree(self.tokens), layout.nodes, place)     # (size, V)
        # 3. Algorithm 2 walks down from the root.
        u = self.rand(len(logits), layout.tree.branching)
        def try_children(rows, k):
            """Tries the first k children of some nodes. rows: a slice, of one node or of all."""
            scores = scores_of(logits[rows], is_draft=False, nodes=layout.nodes[rows])
            P = sampling.method.target_P(scores, self.rand)
            if not k:
                return NONE, P                  # at a leaf
            tokens = self.tokens[layout.children[rows, :k]]
            return sampling.method.verify(P, log_Q[rows], tokens, u[rows, :k])

        node, weights = (walk_in_graph if self.static else walk)(layout, try_children)
        # 4. One more token is drawn.
        token = draw(weights, self.rand(1, 1))[:, 0]
        result = target.agree(torch.cat([node, token, self.tokens[layout.nodes]]))
        # 5. The accepted nodes' entries move up behind the root, in both caches. (A path that is padded with
        # previous leaves copies of it in slots that are free anyway.)
        path = layout.paths[result[:1]][0]                                                  # (depth,)
        slots, *_ = place
        for model in self.models if layout.passes else ():
            entries = model.store.index_select(2, slots[path])
            model.store.index_copy_(2, slots[: len(path)], entries)
        return result

    def grow(self, place, method, scores_of):
        """Fills in the nodes' tokens: a draft pass over the parents of a level gives all their children.
        Returns the draft's scores, log_Q, (size, V), in the rows of parents."""
        target, draft = self.models
        # Nobody reads the rows of leaves, but a graph verifies them, too.
        new = self.tokens.new_zeros if self.static else self.tokens.new_empty
        log_Q = new(self.layout.tree.size, target.vocabulary, dtype=torch.float32)
        for parents, fed, proposed in self.layout.passes:
            logits = draft.node_logits(self.tokens, fed, place)[-len(parents) :]        # without previous's
            # A draft's vocabulary may be padded to another length. (A negative padding cuts.)
            logits = pad(logits, (0, target.vocabulary - logits.shape[1]), value=RULED_OUT)
            scores = scores_of(logits, is_draft=True, nodes=parents)
            log_Q.index_copy_(0, parents, scores)
            # The nodes of a level share a row of random numbers, see `step_plainly`.
            self.tokens[proposed] = method.propose(scores, proposed.shape[1], lambda rows, n: self.rand(1, n))
        return log_Q

    def capture(self, text, sampling):
        try:
            self.graph, self.result = self.record(partial(self.on_device, text, sampling))
        except RuntimeError as error:
            warnings.warn(f"decoding goes on without a CUDA graph: {error}")
            self.static = False
            # A failed capture leaves torch's generators unusable until one succeeds, as this simple one does.
            with suppress(RuntimeError):
                self.record(self.base.clone)

    def record(self, work):
        graph = torch.cuda.CUDAGraph()
        if self.generator:
            graph.register_generator_state(self.generator)
        # The outer context restores device and stream, which a failed capture leaves changed.
        # ("thread_local", because otherwise what another thread allocates would break the capture.)
        with torch.cuda.stream(torch.cuda.current_stream(self.base.device)), \
                torch.cuda.graph(graph, *self.memory, capture_error_mode="thread_local"):
            return graph, work()

# --- 9  The planner (paper 4.1) -----------------------------------------------------------------------------
# Must hold: on simulated machines, even noisy ones, the planner's tree comes near the fastest.
# A larger tree adds more tokens per step, but the step takes longer. So the planner counts how often children
# are accepted, which gives F(T) for any tree, and times steps with a few trees, which gives t(n) and c. Then
# it takes the tree with the most tokens per second, F(T) / (t(n) + (d - 1) c), or none at all.
MAX_NODES = 1024                        # of a tree that is planned, or given by its shape
MAX_LEVELS = 24                         # of a tree from `plan`
PRIOR = 0.6 / np.arange(1, 17) ** 2     # a guess for a decent draft: how often the k-th child is accepted
PRIOR_WEIGHT = 1.5                      # each guess counts as so many accepted children
# What "auto" times first: no tree, a tree, and sequences of the tree's size, whose draft passes tell c. On a
# GPU 64 nodes take hardly longer than 8. (A chain of 63 would take 63 draft passes.)
CPU_TRIALS = [NO_TREE, optimal_tree(PRIOR, 8, 4), chain(7)]
GPU_TRIALS = [NO_TREE, optimal_tree(PRIOR, 64, 6), sequences(3, 21)]
TIMINGS = 3                             # a tree's time is the least of so many
# Trials lose time, which other tokens must gain back: those that are left, and one for each step so far.
TOKENS_FOR_TRIALS = 60, 60, 130         # so many make each of them worth its time
CAPTURE_COST = 60                       # times as many where each tree must be captured first

def likeliest_tree(rates, size, depth):
    """`optimal_tree` in milliseconds, for rates, (ranks,), that fall; the largest if none has this size.

    As rates are at most 1 and fall, no node is likelier than its parent or elder sibling. So the likeliest
    nodes always form a tree, and as F(T) is the sum of chances, it is the best one of that size."""
    paths = []                                      # from the root, as ranks; each is a node
    waiting = [(-1.0, ())]                          # the children of these nodes; `heappop` takes the least
    while waiting and len(paths) < size:
        chance, path = heappop(waiting)
        paths.append(path)
        if len(path) < depth - 1:
            for rank, rate in enumerate(rates):
                heappush(waiting, (chance * rate, (*path, rank)))
    # Sorted by length, and then by ranks, paths are in level order.
    number = {path: node for node, path in enumerate(sorted(paths, key=lambda path: (len(path), path)))}
    return Tree(number[path[:-1]] if path else NONE for path in number)

def plan(rates, sizes, t, c):
    """The tree that adds most tokens per second, of up to the largest size, or none.

    rates: (ranks,), falling. sizes: rising from 1. t: t(n) for these, in seconds. c: of a draft pass.

    For d = 1, 2, ... levels it keeps the largest chances of nodes, sorted. Their sum up to n is F of the best
    tree of n nodes (see `likeliest_tree`), so one array answers for all n."""
    options = []                                    # tokens per second, n, d
    chances = np.ones(1)                            # the root's
    for depth in range(1, MAX_LEVELS + 1):
        n = np.arange(1, len(chances) + 1)
        tokens_per_second = chances.cumsum() / (np.interp(n, sizes, t) + (depth - 1) * c)
        options.append((tokens_per_second.max(), n[tokens_per_second.argmax()], depth))
        # With one more level the nodes are the root and all of their children.
        chances = np.sort(np.append(1.0, np.outer(chances, rates)))[::-1][: sizes[-1]]
    return likeliest_tree(rates, *max(options)[1:])

class AcceptanceRates:
    """Counts how often a node had a first, second, ... child, and how often that was the accepted one."""

    def __init__(self):
        self.accepted = np.full_like(PRIOR, PRIOR_WEIGHT)
        self.had = self.accepted / PRIOR

    def learn(self, step):
        for node in (0, *step.path):
            for rank, child in enumerate(step.tree.children[node][: len(PRIOR)]):
                self.had[rank] += step.node_tokens[child] != NONE
                self.accepted[rank] += child in step.path

    def rates(self):
        """p_1, p_2, ..., which are made to fall, as `likeliest_tree` needs it."""
        return np.minimum.accumulate(self.accepted / self.had)

class Planner:
    """Chooses the tree of each step by what earlier steps have shown, over all texts that are sampled alike.
    shape: a Tree; (nodes, levels), the best of that shape; or "auto", the fastest. tree: the plan.

    Each tree that is used is timed three times, and whenever one has its times, the planner plans again. Each
    time that the number of steps has doubled, every tree's oldest time is dropped, so the trials are timed
    once more, and trees that are no longer used are forgotten. For example, with 8x4 for 8 nodes on 4 levels:

        none none none  8x4 8x4 8x4  8x8 8x8 8x8     the trials; 8x8 is a chain
        12x4 12x4 12x4  18x4 18x4 18x4               two plans, which took longer than was hoped
        8x3 8x3 8x3 8x3 ...                          the third, which did not, so it stays
        none  8x4  8x8  8x3 8x3 8x3 ...              the trials again, and a plan, here the same"""

    def __init__(self, shape, on_gpu=False):
        self.shape = shape
        self.least_gain = 1.05 if on_gpu else 1.02      # of another tree, which a GPU must capture
        self.acceptance = AcceptanceRates()
        self.seconds = defaultdict(list)                # by tree: its times, the oldest first
        self.steps = 0
        self.renewal = 24                               # the step at which times are dropped next
        self.trials = []
        if shape == "auto":
            self.trials = GPU_TRIALS if on_gpu else CPU_TRIALS
            self.tree = self.trials[1]
        else:
            self.tree = shape if isinstance(shape, Tree) else optimal_tree(PRIOR, *shape)

    def next_tree(self, tokens_left=np.inf, trial_cost=1):
        """The tree of the next step. tokens_left: in the text. trial_cost: of a trial's step, in steps."""
        if self.tree == NO_TREE:                # then trials lose most, so they wait longer
            trial_cost *= 2
        for tree, tokens in zip(self.trials, TOKENS_FOR_TRIALS):
            if len(self.seconds[tree]) < TIMINGS and self.steps + tokens_left >= trial_cost * tokens:
                return tree
        return self.tree

    def learn(self, step):
        self.steps += 1
        self.acceptance.learn(step)
        if self.steps == self.renewal:
            self.renewal *= 2
            for seconds in self.seconds.values():
                del seconds[:1]
        seconds = self.seconds[step.tree]
        if len(seconds) < TIMINGS:
            seconds.append(step.seconds)
            if len(seconds) == TIMINGS and not isinstance(self.shape, Tree):
                self.plan_again()

    def plan_again(self):
        rates = self.acceptance.rates()
        sizes, t, c = self.latency()
        def tokens_per_second(tree):
            return expected_tokens(tree, rates) / (np.interp(tree.size, sizes, t) + (tree.depth - 1) * c)

        if self.shape != "auto":
            tree = likeliest_tree(rates, *self.shape)
        elif c:
            # Let us hope that half as many nodes again as the largest timed size take no longer. A plan is
            # timed by being used, and so corrected: in float32 on a CPU two nodes may take as long as eight.
            tree = plan(rates, [*sizes, min(3 * sizes[-1] // 2, MAX_NODES)], [*t, t[-1]], c)
        else:                   # as c is unknown, no other tree's time can be told
            tree = max(self.trials[:2], key=tokens_per_second)
        if tokens_per_second(tree) > self.least_gain * tokens_per_second(self.tree):
            self.tree = tree

    def latency(self):
        """The timed sizes, t(n) for each, and c, 0 if unknown. As noise only adds, the least time counts."""
        least = {tree: min(seconds) for tree, seconds in self.seconds.items() if seconds}
        c = 0.0
        _, first, straight = self.trials or 3 * [None]
        if first in least and straight in least:    # both of one size, so only draft passes differ
            c = max(1e-9, (least[straight] - least[first]) / (straight.depth - first.depth))
        t = {tree.size: least[tree] - (tree.depth - 1) * c for tree in sorted(least, key=len)}
        return [*t], [*t.values()], c

    def __str__(self):
        times = ", ".join(f"{tree.size}x{tree.depth} {1e3 * min(seconds):.1f}"
                          for tree, seconds in self.seconds.items() if seconds)
        *_, c = self.latency()
        c = f"; of a draft pass {1e3 * c:.1f}" if c else ""
        return (f"first, second, third child accepted {self.acceptance.rates()[:3].round(2)}; "
                f"least ms of a step: {times or 'none timed'}{c}")

# --- 10  Other methods --------------------------------------------------------------------------------------
# SpecInfer and SpecTr draw children with replacement, and so lack cover: with P = (1, 0), Q = (.5, .5) and
# two children both are the second token in 1 of 4 cases, and are rejected. naive and topk match the target's
# own token, and lack optimal transport: with P = Q = (.6, .4) and one child they accept it with .52 and .6.
def propose_independent(log_Q, k, rand):
    """Draws k independent children in each row, as SpecInfer does."""
    return draw(log_Q.softmax(dim=1), rand(len(log_Q), k))

def propose_likeliest(log_Q, k, rand):
    return most_likely(log_Q, k)

def verify_by_spectr(P, log_Q, tokens, u):
    """K-sequential selection (SpecTr, arXiv 2310.15141, Algorithm 3): every child has the ratio P / (rho Q).

        a child is token t, and is accepted             min(P[t] / rho, Q[t]); beta is the sum over t
        one of k children is accepted                   A = 1 - (1 - beta)^k
        if rho = A / beta, token t is the accepted one  min(P[t], rho Q[t])
        the residual is what t then lacks               max(P[t] - rho Q[t], 0), in sum 1 - A

    Bisection finds rho: as it grows to k, A falls, and rho beta rises to k beta, which is at least A."""
    Q = log_Q.softmax(dim=1)
    exists = tokens != NONE
    k = exists.sum(dim=1, keepdim=True).to(P)                                               # (rows, 1)
    rho = width = k                             # without children 0, so the residual is P
    for _ in range(50):                         # the solution is in (rho - width, rho]
        width = width / 2
        lower = rho - width
        beta = torch.minimum(P / lower, Q).sum(dim=1, keepdim=True)
        rho = torch.where(1 - (1 - beta) ** k <= lower * beta, lower, rho)
    s = tokens.clamp(min=0)
    ratio = P.gather(1, s) / (rho * Q.gather(1, s))
    return first_accepted(exists & (u < ratio)), (P - rho * Q).clamp(min=0) + 1e-20 * P

def verify_by_matching(P, log_Q, tokens, u):
    """Where the target has chosen its own token, P is 1 for it. A child that is this token is accepted. If
    none is, P gives the token itself. That is lossless for any children."""
    return first_accepted((P.gather(1, tokens.clamp(min=0)) > 0) & (tokens != NONE)), P

# Without sampling every method becomes this one, because all choose the likeliest tokens.
GREEDY = Method(propose_likeliest, verify_by_matching, propose_likeliest)
METHODS = {
    "sequoia": Method(propose_different, verify_nodes),
    "specinfer": Method(propose_independent, partial(verify_nodes, replacement=True)),
    "spectr": Method(propose_independent, verify_by_spectr),
    "naive": Method(propose_independent, verify_by_matching, propose_independent),
    "topk": Method(propose_likeliest, verify_by_matching, propose_independent)}

def sample_and_verify(P, Q, k, method="sequoia", generator=None):
    """Proposes k children in each row from the draft's Q and verifies them against the target's P, (rows, V)
    each. Returns the accepted child's rank or NONE, and the token, distributed exactly as P, (rows,) each."""
    method = METHODS[method]
    rand = partial(uniform, generator=generator, device=P.device)
    log_Q = never_ruled_out(Q.log())
    tokens = method.propose(log_Q, k, rand)
    rank, weights = method.verify(method.target_P(P.log(), rand), log_Q, tokens, rand(len(P), k))
    tokens = torch.cat([tokens, draw(weights, rand(len(P), 1))], dim=1)
    return rank, tokens[range(len(P)), rank]        # at NONE the last one, which was drawn

# --- 11  Decoding, behind transformers' generate ------------------------------------------------------------
# Must hold here and in 12: the text of `generate`, or its distribution, up to rounding; or an error.
# A call goes through these, of which the third is transformers' own:
#     generate(target, inputs, assistant_model=draft, ...)     makes a Decoder for one call
#         Decoder.generate                                     makes itself the call's custom_generate
#             target.generate                                  prepares ids, processors, stopping criteria
#                 Decoder.__call__                             adds tokens until a criterion is met
#                     Decoder.tokens_after                     plans and runs one TreeStep after another

def tree_shape(tree):
    """Turns "NODESxLEVELS" into (nodes, levels), and "none" into NO_TREE. Others stay as they are."""
    if tree == "auto":
        return tree
    if tree == "none":
        return NO_TREE
    if hasattr(tree, "ranks"):          # a Tree, perhaps of another copy of this file (see `generate`)
        return Tree(tree)
    with suppress(TypeError, ValueError):
        nodes, levels = map(int, tree.split("x") if isinstance(tree, str) else tree)
        if 0 < levels <= nodes <= MAX_NODES:
            return nodes, levels
    raise ValueError(f"not a Tree, auto, none or NODESxLEVELS, levels <= nodes <= {MAX_NODES}: {tree!r}")

class Report(namedtuple("Report", "tokens steps seconds tree")):
    """A Decoder's last call: new tokens; steps, first the prompt's pass; seconds; and the planner's tree."""

    def __str__(self):
        return (f"tokens {self.tokens}, steps {self.steps}, seconds {self.seconds:.1f}: "
                f"{self.tokens / self.steps:.2f} tokens per step, {self.tokens / self.seconds:.1f} per "
                f"second, tree {self.tree.size}x{self.tree.depth}")

class Decoder:
    """Decodes one text after another, each by a call as `decoder.generate(inputs, max_new_tokens=100)`.

    draft        a model of the same tokens; not needed if the tree is "none"
    tree         a Tree; (nodes, levels) or "16x5", the best tree of that shape; "none"; or "auto", the
                 fastest, which begins with 8 nodes (on a GPU 64). But texts of 60 tokens or more begin with
                 steps without a tree, and those of 130 also try others (on a GPU 60 times as many).
    method       a name from METHODS
    generator    torch's own by default
    on_step      is called with each Step; a text's first is the prompt's pass
    cuda_graph   whether a GPU captures the step

    It keeps caches, plan and graph, so its models must not change (`pack` them before), and texts come one at
    a time. Logits processors must be functions of ids and scores alone, because they are also called for
    nodes that are then rejected. `report`: a Report on the last call. Raises ValueError for unfit models."""

    def __init__(self, target, draft=None, tree="auto", method="sequoia", generator=None, on_step=None,
                 cuda_graph=True):
        shape = tree_shape(tree)
        refuse({f"method must be one of {', '.join(METHODS)}, got {method!r}": method not in METHODS,
                "no draft: pass assistant_model=draft or tree='none'": draft is None and shape != NO_TREE})
        self.method = METHODS[method]
        self.on_step = on_step
        draft = draft or target                 # because without a tree nothing is drafted
        models = checked(target), checked(draft)
        self.target, self.draft = models
        if draft.device != target.device:
            raise ValueError(f"the draft is on {draft.device}, but the target on {target.device}")
        self.planners = defaultdict(partial(Planner, shape, target.device.type == "cuda"))  # by sampling.key
        if self.draft.vocabulary != self.target.vocabulary or self.draft.context < self.target.context:
            warnings.warn(f"the draft's tokens and context are {self.draft.vocabulary, self.draft.context}, "
                          f"the target's {self.target.vocabulary, self.target.context}: others are not "
                          f"guessed, and longer texts go on without a tree")
        # A pass of several ranks, or with weights on the host, needs the host.
        self.cuda_graph = cuda_graph and not target.tp_size and all(p.is_cuda for p in target.parameters())
        # Graphs share memory and a stream, as they never run at once. (torch's own stream is on one device.)
        memory = (torch.cuda.graph_pool_handle(), torch.cuda.Stream(target.device)) if self.cuda_graph else ()
        # Steps are kept for their graphs. A graph is valid for one tree, capacity and way of sampling (key).
        self.step_for = lru_cache(16)(lambda tree, static, capacity, key:
                                      TreeStep(tree, models, generator, static, memory))

    def generate(self, inputs=None, generation_config=None, *, tokenizer=None, assistant_tokenizer=None,
                 stopping_criteria=(), **kwargs):
        """`target.generate` with its arguments. inputs: ids, (1, length), or all that a tokenizer returns."""
        kwargs = {**(inputs if hasattr(inputs, "keys") else {"input_ids": inputs}), **kwargs}
        ids = kwargs.get("input_ids")
        if not (torch.is_tensor(ids) and ids.ndim == 2 and ids.numel()):
            raise ValueError(f"inputs must be the ids of one text, a tensor (1, length), got {ids!r:.50}")
        model = self.target.model
        stop_strings = (kwargs.get("stop_strings") or getattr(generation_config, "stop_strings", None)
                        or model.generation_config.stop_strings)
        criteria = list(stopping_criteria or ())
        # `generate` hands no tokenizer or streamer on to a custom_generate, so they are used here.
        if stop_strings and tokenizer:
            criteria.append(transformers.StopStringCriteria(tokenizer, stop_strings))
            kwargs["stop_strings"] = None       # or `generate` would ask for the tokenizer, too
        if tokenizer and assistant_tokenizer:
            warn_of_other_tokens(tokenizer, assistant_tokenizer)
        kwargs["custom_generate"] = partial(self, streamer=kwargs.get("streamer"))
        return model.generate(generation_config=generation_config, stopping_criteria=criteria, **kwargs)

    # cuDNN, which torch 2.11 prefers on an H200, takes 100 ms and more for each new number of nodes.
    @sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
    def __call__(self, model, input_ids, logits_processor, stopping_criteria, generation_config,
                 streamer=None, **arguments):
        """What `generate` calls: ids, (1, length) -> (1, longer)."""
        begun = time.perf_counter()
        sampling = Sampling(self.method if generation_config.do_sample else GREEDY, logits_processor,
                            generation_config.eos_token_id)
        planner = self.planners[sampling.key]
        steps_before = planner.steps
        text = input_ids[0].to(model.device, torch.long)
        ids = input_ids.long().cpu()        # because after every token a criterion's answer is waited for
        try:
            given = check_call(self.target, input_ids, generation_config, arguments)
            for token in self.tokens_after(text, sampling, planner, generation_config.max_length, **given):
                if token == NONE:
                    raise ValueError("the target's logits are NaN, or the processors ruled out every token")
                ids = pad(ids, (0, 1), value=token)
                if streamer:
                    streamer.put(torch.tensor([token]))
                # After every token, because accepted ones may go on behind the end.
                if self.target.agree(stopping_criteria(ids, None)):
                    break
        finally:                                # an error, too, comes after the text that there is
            if streamer:
                streamer.end()
        ids = ids.to(input_ids.device)
        self.report = Report(ids.shape[1] - input_ids.shape[1], 1 + planner.steps - steps_before,
                             time.perf_counter() - begun, planner.tree)
        if generation_config.return_dict_in_generate:
            return transformers.generation.GenerateDecoderOnlyOutput(sequences=ids)
        return ids

    @torch.inference_mode()
    def tokens_after(self, text, sampling, planner, max_length, **given):
        """Yields the tokens after a text, (length,), one by one. The caller must stop at max_length, because
        the last step may go on behind it. given: arguments for the model's pass over the text."""
        target, draft = self.target, self.draft
        logits = target.prefill(text, **given)          # the first step, which needs no tree
        # A pass over a tree takes no such arguments, as token types, so they may change nothing.
        if given and not logits.equal(target.prefill(text)):
            raise ValueError(f"not supported: {', '.join(given)}, which changes the text")
        step = self.step_for(NO_TREE, False, 0, None)(text, sampling, logits)
        while True:
            if self.on_step:
                self.on_step(step)
            yield from step.tokens
            text = torch.cat([text, text.new_tensor(step.tokens)])
            # The last token need not be fed, so a text may be longer by one than the context.
            left = min(max_length, target.context + 1) - len(text)
            if left <= 0:
                warnings.warn(f"the text ends early, at the target's context of {target.context} tokens")
                return
            static = self.cuda_graph and not sampling.reads_text
            tree = planner.next_tree(left, CAPTURE_COST if static else 1)
            if len(text) - 1 + tree.depth > min(target.context, draft.context):
                tree = NO_TREE
            # Steps without a tree do not feed the draft, so before the next one with a tree it gets the text.
            if step.tree == NO_TREE and tree != NO_TREE:
                # (Ids are clamped as in `forward`. `cpu` waits, or a GPU would add this to the step's time.)
                draft.prefill(text[:-1].clamp(max=draft.vocabulary - 1)).cpu()
            # Also for the next tokens, because a graph is captured again where a cache has grown.
            capacity = target.reserve(len(text) + min(left, 256) + tree.size)
            draft.reserve(capacity)
            run = self.step_for(tree, static, capacity, sampling.key)
            step = run(text, sampling)
            self.cuda_graph &= run.static == static     # if its capture failed, that was the last attempt
            planner.learn(step)

def generate(model, inputs=None, generation_config=None, *, assistant_model=None, tree="auto",
             method="sequoia", generator=None, on_step=None, cuda_graph=True, **kwargs):
    """`model.generate` with its arguments, by a Decoder made for one call.

    inputs: the ids of one text, (1, length), or all that a tokenizer returns. For the others see `Decoder`.
    Returns the whole text's ids, (1, longer), or `sequences` in a dict. Raises ValueError for anything that
    cannot be done, such as beams. transformers also finds it in a folder's custom_generate/generate.py."""
    return Decoder(model, assistant_model, tree, method, generator, on_step, cuda_graph).generate(
        inputs, generation_config, **kwargs)

# --- 12  What is refused ------------------------------------------------------------------------------------
def refuse(reasons, words=""):
    """Raises ValueError, with these words before it, for the first of the reasons that holds."""
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(words + reason)

def checked(model):
    """A model's CachedModel. Raises ValueError if it cannot be fed trees."""
    name = type(model).__name__
    if not isinstance(model, transformers.PreTrainedModel) or model.get_output_embeddings() is None:
        raise ValueError(f"needs a language model of transformers, got {name}: give from_pretrained's, a PEFT"
                         f" model's merge_and_unload(), a compiled model's _orig_mod, or a pipeline's model")
    config = model.config.get_text_config(decoder=True)
    attention = model.config._attn_implementation
    reasons = {
        "it has an encoder": model.config.is_encoder_decoder,
        "it is recurrent": model._is_stateful,
        "it masks in its own way": config.model_type in ("doge", "gpt_neo"),     # in texts too long to probe
        "it is in training mode: call its eval()": model.training,
        "it is spread over several GPUs: share it by torchrun":
            len({weight.device for weight in model.parameters() if weight.is_cuda}) > 1,
        "its first weights are on a disk": model.device.type == "meta",
        f"{model.tp_size} ranks cannot share its KV heads evenly":
            getattr(config, "num_key_value_heads", 0) % (model.tp_size or 1),
        "load it with attn_implementation='sdpa'": attention not in ("eager", "sdpa")}
    refuse(reasons, f"{name} cannot verify a tree: ")
    cached = CachedModel(model)
    if getattr(model, "_sequoia_probed", None) != attention:    # because it takes three passes, only once
        try:
            probe(cached)
        except Exception as error:              # of any kind, where a model masks or caches in its own way
            raise ValueError(f"{name} cannot verify a tree: {error}") from error
        model._sequoia_probed = attention
    return cached

@torch.no_grad()
def probe(cached):
    """Raises ValueError if a model gets trees wrong, because it masks by slot, or counts positions otherwise.
    Feeds a text, which ends with a, b, c here, and then those again, as a tree, which must give their logits:

        a─┬─x───y        Other tokens, which the last branch must not see. There are more such branches, so
          └─b───c        that the last one stands in slots far from its positions."""
    model = cached.model
    layout = Layout(sequences(4, 5), model.device)
    tree = layout.tree
    base = tree.size - tree.depth               # fewer tokens before the tree would hide faults
    # Ids from the middle of the vocabulary, because ids near 0 may have a meaning, as padding.
    text = (cached.vocabulary // 2 + layout.nodes) % cached.vocabulary
    logits = cached.prefill(text, tree.depth)
    path = layout.paths[-1]
    tokens = text[base:][tree.level_of] + 1
    tokens[path] = text[base:]
    place = layout.place(base, base + tree.size)
    passes = layout.nodes.split([1, tree.size - 1])         # because a pass may treat one node differently
    again = torch.cat([cached.node_logits(tokens, nodes, place) for nodes in passes])[path]
    coarse = torch.float32 if torch.get_float32_matmul_precision() == "highest" else torch.bfloat16
    rounding = max(torch.finfo(dtype).eps for dtype in (coarse, logits.dtype, model.dtype))
    # Scores far below the best say nothing. (Some models give such to ids that pad the vocabulary.)
    again, logits = (never_ruled_out(each.float(), -100) for each in (again, logits))
    # The mean of the nodes, because rounding may send a token to another expert.
    difference = ((again - logits).std(dim=1) / logits.std(dim=1)).mean()
    # Allowed: 5.3% in bfloat16, 1.9% in float16, 0.02% in float32, and in float64, as angles may be float32.
    # Of 236 small models the right ones had up to 0.54, 0.12 and 0.0001%, all but two of the wrong over 7%.
    if difference > 0.6 * rounding**0.5:            # NaN is left to decoding, where a draft's does no harm
        raise ValueError(f"a pass over one changes its logits by {difference:.1%}, too much for rounding")

def warn_of_other_tokens(tokenizer, assistant_tokenizer):
    """Warns if a draft's tokenizer differs. The models only know ids, so such tokens are guessed wrong."""
    other = dict(tokenizer.get_vocab().items() ^ assistant_tokenizer.get_vocab().items())
    if other:
        warnings.warn(f"the draft's tokenizer differs in {len(other)} tokens, as in {min(other)!r}: slower")

def check_call(target, ids, config, arguments):
    """Raises ValueError for a call that might not give the text of `generate`. Returns those of the arguments
    that say more about a prompt than its ids; `tokens_after` sees whether they change anything."""
    given = {name: value for name, value in arguments.items()
             if name not in ("logits_to_keep", "past_key_values", "use_cache") and value not in (None, {})}
    mode = config.get_generation_mode().value
    length = ids.shape[1]
    reasons = {
        mode: mode not in ("greedy_search", "sample", "assisted_generation"),
        "guidance_scale": config.guidance_scale not in (None, 1),
        "several texts": len(ids) > 1,
        f"a prompt of {length} tokens, as the target's context is {target.context}": length > target.context,
        "a cache of your own": getattr(arguments.get("past_key_values"), "_is_user_defined", False),
        "SynthID's watermark, because it remembers calls":
            isinstance(config.watermarking_config, transformers.SynthIDTextWatermarkingConfig)}
    for name in "output_attentions output_hidden_states output_logits output_scores".split():
        reasons[name] = getattr(config, name)   # because none of these outputs is made here
    # What a text without padding has, which is what a pass without these two takes for granted.
    for name, usual in (("attention_mask", torch.ones(length)), ("position_ids", torch.arange(length))):
        value = given.pop(name, usual).to(usual)
        reasons[f"this {name}"] = value.shape[-1] != length or (value != usual).any()
    refuse(reasons, "not supported: ")
    return given

# --- 13  Faster passes on a CPU, and models larger than a GPU -----------------------------------------------
# Must hold: offloaded, the same numbers; packed and traced, the same up to rounding.
mkldnn = torch.ops.mkldnn
# Whether oneDNN, the CPU's matrix library, can pack bfloat16 weights here. Not every build of torch has it.
PACKS = hasattr(mkldnn, "_linear_pointwise") and mkldnn._is_mkldnn_bf16_supported()

def packed_product(x, weight, bias: Tensor | None):            # TorchScript needs the annotation
    return mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

def pack_linear(layer):
    packed = mkldnn._reorder_linear_weight(layer.weight, 16)    # in oneDNN's order for about 16 tokens
    product = torch.jit.script(packed_product)  # because a trace cannot record its empty list
    del layer.weight
    layer.register_buffer("weight", packed)
    layer.forward = lambda x: product(x, layer.weight, layer.bias)

@torch.no_grad()
def pack(model):
    """Prepares a model on a CPU for decoding, in place, and returns it: packs its linear layers, if they are
    in bfloat16, and traces its pass, which about halves a small model's time. Afterwards do not change, save,
    load or move the model, nor share it between threads. A model on a GPU is returned unchanged. Raises
    ValueError for an unfit model, and if packing changes its numbers."""
    cached = checked(model)
    if model.device.type != "cpu" or model.tp_size:
        return model
    text = torch.arange(7, 23) % cached.vocabulary          # (ids near 0 may have a meaning, as padding)
    before = cached.prefill(text, len(text))
    for layer in model.modules():
        # One has a forward of its own if it is packed already, as part of another model, or is on a disk.
        if PACKS and type(layer) is nn.Linear and "forward" not in vars(layer) \
                and layer.weight.dtype == torch.bfloat16:
            pack_linear(layer)
    errors = (cached.prefill(text, len(text)) - before).norm(dim=1) / before.norm(dim=1)
    if not errors.max() < torch.finfo(model.dtype).eps ** 0.5:  # because rounding grows with a model's depth
        raise ValueError(f"oneDNN changes the numbers of {type(model).__name__}: load it again, without pack")
    # A TorchScript trace holds the operators that one run called, and runs them without Python. What Python
    # decided in that run is then final, perhaps by the lengths of its text, its cache and its tree.
    module = nn.ModuleList([model]).eval()      # or weights would be constants, which packed ones cannot be
    module.forward = cached.forward
    layout = Layout(k_ary(2, 2), "cpu")
    example = pad(cached.store, (0, 0, 0, 8)), text, layout.nodes, *layout.place(4, 4 + layout.tree.size)
    with suppress(Exception), warnings.catch_warnings(action="ignore"):
        trace = torch.jit.freeze(torch.jit.trace(module, example, check_trace=False))
        model._sequoia_pass = torch.jit.optimized_execution(False)(trace.forward)  # or it compiles each shape
        probe(cached)       # raises if the trace is wrong for others, or lost its writes to the cache
        return model
    vars(model).pop("_sequoia_pass", None)
    warnings.warn(f"{type(model).__name__} cannot be traced, so its passes go on in Python")
    return model

def offload(model, device):
    """Lets a GPU run a model that is too large for it, in place. Layers stay in host memory, pinned, and each
    is copied to be computed. Copying takes most of the time, so hundreds of nodes cost hardly any more."""
    def copy(layer, *_):
        layer.to(device, non_blocking=True)

    def release(layer, *_):
        for weight in layer.parameters():
            weight.data = weight.host

    lists = (module for module in model.get_decoder().modules() if isinstance(module, nn.ModuleList))
    for layer in next(lists, ()):       # without a list of layers all of the model goes to the device
        for weight in layer.parameters():
            weight.host = weight.data.pin_memory() if torch.cuda.is_available() else weight.data
        release(layer)
        layer.register_forward_pre_hook(copy)
        layer.register_forward_hook(release, always_call=True)      # also after an error in the layer
    for tensor in (*model.parameters(), *model.buffers()):
        if not hasattr(tensor, "host"):
            tensor.data = tensor.data.to(device)
    return model

# --- 14  The command line -----------------------------------------------------------------------------------
# The parameters of `decode_prompt` are the options, with their defaults, and its docstring is the help. It
# looks at options and tokens first, because their errors should not have to wait for weights.
TINY = Path(__file__).parent / "tiny"
PROMPT = ('import os\n\n\ndef find_files(directory, pattern):\n'
          '    """Yield the names of all files in a directory that match a pattern."""\n    for name in')
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = "bfloat16" if DEVICE == "cuda" or PACKS else "float32"
stream_layers = offload         # its other name, because --offload is an option

def load(name, **how):
    """A model. Raises ValueError if weights are missing, as transformers would fill in random numbers."""
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        name, output_loading_info=True, ignore_mismatched_sizes=True, **how)
    lost = loading["missing_keys"] | loading["mismatched_keys"]
    if lost:
        raise ValueError(f"cannot load {name}: {len(lost)} weights missing or of other shapes: {[*lost][:1]}")
    return model

def decode_prompt(*, target=f"{TINY}/target", draft=f"{TINY}/draft", prompt=PROMPT, chat=False,
                  max_new_tokens=96, temperature=0.6, top_p=1.0, top_k=0, seed=0, method="sequoia",
                  tree="auto", device=DEVICE, dtype=DTYPE, offload=False, compare=False, explain=False,
                  trust_remote_code=False, debug=False):
    """Continues a text: a small draft guesses a tree of tokens, the target verifies all of it in one pass.
    In brackets is the value of an option that is not given. Those without brackets take no value.

    python sequoia.py --target meta-llama/Llama-2-7b-hf --draft JackFram/llama-68m --prompt "Once upon a time"

    --target, --draft      folders or hub names of two models with the same tokens (the bundled pair)
    --prompt               the text to continue (a short program)
    --chat                 put the prompt through the chat template, and print the answer alone
    --max-new-tokens       how many tokens to add (96)
    --temperature          0 is greedy, 1 the model's own (0.6)
    --top-p, --top-k       keep the likeliest tokens of this probability together (1.0); or so many (0: all)
    --seed                 repeats a text with a fixed --tree, as auto goes by the clock (0)
    --method               how children are drawn and verified: specinfer, spectr, naive, topk, or (sequoia)
    --tree                 none; NODESxLEVELS, as 16x5; or the fastest (auto)
    --device, --dtype      cpu or cuda:1, ... (a GPU, if any); float32, float16, or bfloat16 (if possible)
    --offload              stream the target's layers from host memory
    --compare              also time `generate` with the same target (on a CPU packed, too), once
    --explain              print whole steps by `step_plainly`, slowly, with one tree
    --trust-remote-code    run code that comes with the models
    --debug                show an error's traceback"""
    first_tree = Planner(tree_shape(tree)).tree         # these lines raise for what cannot be used
    refuse({"--temperature and --top-k must be at least 0": not temperature >= 0 or top_k < 0,
            "--top-p must be above 0 and at most 1": not 0 < top_p <= 1,
            f"--method must be one of {', '.join(METHODS)}": method not in METHODS,
            "--dtype must be float32, bfloat16 or float16": dtype not in ("float32", "bfloat16", "float16"),
            "give the target's --draft, too, or --tree none": tree != "none"
                and draft == f"{TINY}/draft" and "tiny/target" not in target,
            "--explain needs method sequoia, --temperature > 0, and no --compare, --top-p, --top-k": explain
                and (compare or method != "sequoia" or not temperature or top_p < 1 or top_k)})
    config = transformers.GenerationConfig(max_new_tokens=max_new_tokens, do_sample=temperature > 0,
                                           temperature=temperature, top_p=top_p, top_k=top_k)
    torch.empty(0, device=device)
    torch.manual_seed(seed)
    prompt.encode()
    tokens = partial(transformers.AutoTokenizer.from_pretrained, trust_remote_code=trust_remote_code)
    tokenizer = tokens(target)
    if tree != "none":
        warn_of_other_tokens(tokenizer, tokens(draft))
    inputs = tokenizer(prompt, return_tensors="pt")
    refuse({"--chat: the target's tokenizer has no chat template": chat and not tokenizer.chat_template})
    if chat:
        inputs = tokenizer.apply_chat_template([{"role": "user", "content": prompt}],
                                               add_generation_prompt=True, return_tensors="pt")
    length = inputs.input_ids.numel()
    refuse({"the prompt has no tokens": not length})
    # Ranks share the target. It comes before the draft, because loading it makes a rank's own GPU its "cuda".
    load_as = partial(load, dtype=dtype, trust_remote_code=trust_remote_code)
    ranks = {"tp_plan": "auto"} if torch.distributed.is_torchelastic_launched() else None
    target = load_as(target, distributed_config=ranks)
    draft = None if tree == "none" else pack(load_as(draft).to(device))
    target = stream_layers(target, device) if offload else pack(target.to(device))
    inputs = inputs.to(target.device)
    if target.tp_size and torch.distributed.get_rank():
        sys.stdout = None               # only rank 0 prints; the others may still report an error
    if explain:
        return print_steps(target, draft, inputs.input_ids[0], first_tree, tokenizer.decode, config)
    decoder = Decoder(target, draft, tree, method)
    decoder.generate(inputs, config, streamer=transformers.TextStreamer(
        tokenizer, skip_prompt=chat, skip_special_tokens=chat))
    lines = [decoder.report, *(decoder.planners.values() if draft else ())]
    if compare:
        begun = time.perf_counter()
        added = target.generate(**inputs, generation_config=config)[0, length:]
        took = time.perf_counter() - begun
        lines.append(f"generate alone: {len(added) / took:.1f} tokens per second; the speed above is "
                     f"{decoder.report.tokens * took / decoder.report.seconds / len(added):.2f} times that")
    if sys.stdout:
        print("", *lines, sep="\n", file=sys.stderr)

def print_steps(target, draft, text, tree, word, config):
    """Decodes by `step_plainly`, without caches, and prints each step."""
    def scores_of(model):               # as `step_plainly` asks of a draft
        return lambda ids: never_ruled_out(model(ids[None]).logits[0, -1].double() / config.temperature, -700)

    end = len(text) + config.max_new_tokens
    while len(text) < end:
        added = step_plainly(scores_of(target), scores_of(draft), text, tree, say=print, word=word)
        print(f"adds {word(added)!r}\n", flush=True)    # a closed pipe must not wait for Python's end
        text = torch.cat([text, added])

@torch.inference_mode()
def main(argv=None):
    """Returns the exit code: 0, 2 after an error, 130 after Ctrl-C."""
    transformers.logging.set_verbosity_error()
    if not sys.stderr.isatty():         # a long download must not be silent, but a log file needs no bars
        transformers.logging.disable_progress_bar()
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=decode_prompt.__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in decode_prompt.__kwdefaults__.items():
        how = {"action": "store_true"} if default is False else {"type": type(default), "default": default}
        parser.add_argument(f"--{name.replace('_', '-')}", help=argparse.SUPPRESS, **how)
    options = parser.parse_args(argv)
    try:
        decode_prompt(**vars(options))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:             # nobody reads on, as after `| head`
        sys.stdout = None
    except Exception as error:          # damaged files, missing devices and the like raise any kind
        if options.debug:
            raise
        print(f"sequoia.py: {type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0

if __name__ == "__main__":
    sys.exit(main())
