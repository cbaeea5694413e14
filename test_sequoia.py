"""The guarantees of sequoia.py, as tests; `python -m pytest -k quick` runs at least one of every guarantee.
Exact tests go through every case. Statistical tests are seeded and fail if their counts have a chance below
1e-9, so a false alarm from any of them has a chance below 1e-6."""
import ast, collections, contextlib, copy, doctest, functools, itertools, json, math, os, re, runpy, shutil
import socket, subprocess, sys, warnings, weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from hypothesis import example, given, settings, strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from pytest import approx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers import TemperatureLogitsWarper as Temperature

import bench, sequoia
from sequoia import (METHODS, NO_TREE, NONE, Decoder, Planner, Step, Tree, chain, expected_tokens, k_ary,
                     optimal_tree, sample_and_verify, sequences, step_plainly, verify_one_node)
from sequoia import RULED_OUT, AcceptanceRates, CachedModel, Sampling, TreeStep, never_ruled_out

settings.register_profile("sequoia", deadline=None, derandomize=True, max_examples=40, database=None)
settings.load_profile("sequoia")
torch.set_num_threads(1)            # on busy cores threads would wait for each other
CHANCE = 1e-9
each_method = pytest.mark.parametrize("name", METHODS)
BY_RATIOS = [name for name, method in METHODS.items() if not method.choose]
ROOT = Path(sequoia.__file__).parent
TOKENIZER = transformers.AutoTokenizer.from_pretrained(ROOT / "tiny" / "target")
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")     # nothing replaces it
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

def quick(test):
    """Marks a test for `-k quick`, which looks at names and at attributes."""
    test.quick = True
    return test

def some_quick(cases, *chosen):
    """Cases of which the chosen ones are run by `-k quick`, too."""
    return [pytest.param(case, id=f"{case}-quick" if case in chosen else str(case)) for case in cases]

def seeded(seed, device="cpu"):
    return torch.Generator(device).manual_seed(seed)

# --- 1  Token trees (section 3.1) ---------------------------------------------------------------------------
# All trees of up to 7 nodes: parents never decrease, and each stands before its children.
SMALL_TREES = []
for size in range(7):
    for parents in itertools.combinations_with_replacement(range(size), size):
        if all(parent <= i for i, parent in enumerate(parents)):
            SMALL_TREES.append(Tree([NONE, *parents]))
LATE = Tree([-1, 0, 0, 1, 2, 2, 2])      # a level's parents differ in their numbers of children
EARLY = Tree([-1, 0, 0, 1, 1, 1, 2])
BUSHY = optimal_tree([0.5, 0.2, 0.1], 14, 5)
ABREAST = sequences(3, 4)               # a node's number is far from its level, and leaves are far behind

@quick
def test_exercise_3_siblings_never_see_each_other_but_every_node_sees_its_ancestors_and_itself():
    for tree in SMALL_TREES:
        for node, parent in enumerate(tree):
            path = [*tree.paths[parent], node] if node else [0]
            assert tree.paths[node] == path
            assert tree.mask[node].nonzero()[:, 0].tolist() == path
            assert tree.children[node] == [child for child in range(tree.size) if tree[child] == node]

def test_what_makes_no_tree_is_an_error_that_says_why():
    for parents, reason in (([], "starts with its root"), ([0], "starts with its root"), ([-1, -1], "node 1"),
                            ([-1, 1], "node 1"), ([-1, 0, 1, 0], "level order: node 3 has the parent 0")):
        with pytest.raises(ValueError, match=reason):
            Tree(parents)

# --- 2  Sampling (section 3.2, Algorithm 2 line 5) ----------------------------------------------------------
def distribution(weights):
    weights = torch.as_tensor(weights, dtype=torch.float64)
    return weights / weights.sum(dim=-1, keepdim=True)

def scores_of(Q):
    return never_ruled_out(Q.log())

class EveryRun:
    """Stands in for all random numbers. Runs a program once for every sequence of its random choices."""

    def results(self, program):
        """Yields the chance and the result of each run."""
        self.scripts = [()]
        for self.script in self.scripts:        # which grow
            self.chosen = ()
            self.chance = 1.0
            with mock.patch.multiple(sequoia, uniform=self.uniform, gumbel_noise=lambda u: u, draw=self.draw,
                                     most_likely=self.draw_different):
                result = program()
            yield self.chance, result

    def choose(self, chances):
        """A choice between 0, 1, ...: in this run the first possible one, in later runs the others."""
        if len(self.chosen) == len(self.script):
            first, *others = [i for i, chance in enumerate(chances) if chance > 1e-12]
            self.script += (first,)
            self.scripts += [(*self.chosen, other) for other in others]
        choice = self.script[len(self.chosen)]
        self.chosen += (choice,)
        self.chance *= float(chances[choice])
        return choice

    def draw(self, weights, u):
        rows = [[self.choose(distribution(row)) for _ in range(self.shape[1])] for row in weights]
        return torch.tensor(rows)

    def draw_different(self, scores, k):
        """What scores plus noise would draw, (rows, k)."""
        tokens = torch.full((len(scores), k), NONE)
        for i, row in enumerate(scores.clone()):
            for rank in range(k):
                if row.max() > RULED_OUT:
                    tokens[i, rank] = self.choose(row.double().softmax(dim=0))
                row[tokens[i, rank]] = RULED_OUT
        return tokens

    # Now the random numbers: any part of them is like the whole, and u < ratio has the chance min(ratio, 1).
    def uniform(self, rows, n, **_):
        self.shape = rows, n
        return self

    def __getitem__(self, index):
        return self

    def __lt__(self, ratio):
        chances = ratio.nan_to_num(nan=0.0).clamp(0, 1)
        answers = [self.choose([1 - chance, chance]) for chance in chances.flatten().tolist()]
        return torch.tensor(answers).view(ratio.shape).bool()

    def __radd__(self, scores):
        return torch.atleast_2d(scores)

    def __format__(self, spec):
        return "u"

def chi_square_tail(observed, expected):
    """The chance of counts so far from the expected ones. Neighbours are merged until 10 are expected."""
    observed = np.asarray(observed, dtype=np.float64)
    expected = np.asarray(expected, dtype=np.float64)
    if observed[expected == 0].any():
        return 0.0
    starts = [0]
    for i in range(len(expected)):
        if expected[starts[-1] : i].sum() >= 10 and expected[i:].sum() >= 10:
            starts.append(i)
    observed = np.add.reduceat(observed, starts)
    expected = np.add.reduceat(expected, starts)
    statistic = ((observed - expected) ** 2 / expected).sum()
    halves = torch.tensor([max(len(starts) - 1, 1) / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(*halves).item()

@quick
def test_the_first_of_equals_is_the_likeliest_and_where_too_few_are_possible_the_row_ends_with_none():
    for size in (4, 8, 16, 50_000):
        scores = torch.zeros(1, size)
        scores[:, 0] = RULED_OUT
        assert sequoia.most_likely(scores, 1).item() == 1
    scores = torch.tensor([[1.0, 4, 2, 3], [RULED_OUT, 0, RULED_OUT, 1], [math.nan] * 4])
    assert sequoia.most_likely(scores, 1).tolist() == [[1], [3], [NONE]]
    assert sequoia.most_likely(scores, 3).tolist() == [[1, 3, 2], [3, 1, NONE], 3 * [NONE]]

@quick
def test_draws_follow_the_weights_even_tiny_ones_and_never_fall_on_a_token_without_any():
    weights = torch.tensor([[0.0, 3, 0, 5, 2, 0], [0] * 6, [math.nan] * 6])
    tokens = sequoia.draw(weights, sequoia.uniform(3, 50_000, generator=seeded(0)))
    assert chi_square_tail(tokens[0].bincount(minlength=6), 5000 * weights[0]) > CHANCE
    assert (tokens[1:] == NONE).all()
    u = torch.tensor([[0.0, 1 - 2.0**-38, 1 - 2.0**-53]], dtype=torch.float64)
    assert sequoia.draw(weights[:1], u).tolist() == [[1, 4, 4]]
    assert sequoia.draw(torch.tensor([[1.0, 2.0**-40]]), u).tolist() == [[0, 0, 1]]
    many = sequoia.uniform(1, 1000, generator=seeded(0))
    assert (many * 2**24 % 1).std() > 0.2
    assert sequoia.gumbel_noise(u).max().item() == approx(53 * math.log(2))        # all 53 bits count

# --- 3  One node and one step, plainly, 5  Many nodes at once, and 10  Other methods ------------------------
@st.composite
def targets_and_drafts(draw):
    vocabulary = draw(st.integers(2, 4))
    weight = st.sampled_from([0, 1e-6, 1, 1 + 1e-10, 3, 7])
    rows = st.lists(weight, min_size=vocabulary, max_size=vocabulary).filter(any).map(distribution)
    return draw(rows), draw(rows), draw(st.integers(1, vocabulary))

HALVES, ONE = distribution([1, 1]), distribution([1, 0])

PLAINLY = pytest.param("plainly", id="exercise_1-quick")

@pytest.mark.parametrize("name", [PLAINLY, *some_quick(BY_RATIOS, "sequoia")])
@given(targets_and_drafts())
@example((distribution([3, 7, 0]), distribution([0, 0, 1]), 2))
@example((distribution([3, 7, 1, 1]), distribution([0, 7, 0, 1]), 4))
@example((distribution([3, 7, 1]), distribution([3, 7, 1]), 1))
@example((ONE, HALVES, 2))
@example((distribution([0, 1, 1]), distribution([1, 1e-10, 0]), 2))
def test_one_nodes_token_has_exactly_the_targets_distribution(name, case):
    """Accepted tokens and the residual add up to it. One child is accepted as often as optimal transport
    allows. And Sequoia covers, by the whole vocabulary, or by a draft's only tokens, if they hold P's."""
    P, Q, k = case
    log_Q = scores_of(Q)[None]
    run = EveryRun()

    def program():
        if name == "plainly":
            tokens = run.draw_different(log_Q, k)
            rank, R = verify_one_node(P, Q, tokens[0], run)
        else:
            tokens = METHODS[name].propose(log_Q, k, run.uniform)
            rank, R = METHODS[name].verify(P[None], log_Q, tokens, run)
        is_accepted = rank != NONE
        last = distribution(torch.eye(len(P))[tokens[0, rank]] if is_accepted else R)
        return torch.cat([last.view(-1), torch.tensor([float(is_accepted)])])

    found = torch.zeros(len(P) + 1, dtype=torch.float64)
    for chance, last in run.results(program):
        found += chance * last
    torch.testing.assert_close(found[:-1], P, rtol=0, atol=1e-9)
    if k == 1:
        assert found[-1] == approx(torch.minimum(P, Q).sum().item(), abs=1e-6)
    if name in ("plainly", "sequoia") and (k == len(P) or (Q > 0).sum() <= k and not (P[Q == 0]).any()):
        assert found[-1] == approx(1)

@quick
def test_the_papers_examples_of_how_others_lack_cover_or_optimal_transport():
    for p, q, k, chances in (
            (1.0, 0.5, 2, dict(sequoia=1, topk=1, specinfer=0.75, spectr=0.75)),
            (0.9, 0.5, 2, dict(sequoia=1, specinfer=0.8, spectr=0.815037)),
            (0.6, 0.6, 1, dict(sequoia=1, specinfer=1, topk=0.6, naive=0.52))):
        P = torch.tensor([p, 1 - p]).expand(99_999, 2)
        Q = torch.tensor([q, 1 - q]).expand(99_999, 2)
        for name, chance in chances.items():
            rank, _ = sample_and_verify(P, Q, k, name, seeded(0))
            accepted = (rank != NONE).sum().item()
            expected = 99_999 * chance
            assert chi_square_tail([accepted, 99_999 - accepted], [expected, 99_999 - expected]) > CHANCE

@quick
def test_where_rounding_alone_rejects_the_token_is_drawn_from_the_target():
    P = HALVES[None]
    for name in BY_RATIOS:
        rank, weights = METHODS[name].verify(P, P.log(), torch.tensor([[0]]), u=torch.tensor([[1.0]]))
        assert rank == NONE
        assert distribution(weights).equal(P)

def random_rows(rows, vocabulary=6, zeros=0.0, seed=1):
    """Target and draft distributions, (rows, V) each, far from each other, with exact zeros in either."""
    scores, hidden = torch.rand(2, 2, rows, vocabulary, generator=seeded(seed), dtype=torch.float64)
    zero = (hidden < zeros) & (scores < scores.amax(dim=-1, keepdim=True))
    return scores.mul(6).masked_fill(zero, RULED_OUT).softmax(dim=-1)

@quick
@each_method
def test_ten_thousand_targets_and_drafts_with_zeros(name):
    for V, k in ((2, 2), (3, 1), (3, 2), (4, 1), (4, 3)):
        P, Q = random_rows(2000, V, zeros=0.4, seed=10 * V + k).repeat_interleave(10, dim=1)
        rank, token = sample_and_verify(P, Q, k, name, seeded(0))
        assert rank.unique().tolist()[-k:] == [*range(k)]
        is_more = Q > P         # apart where the draft gives a token more than the target, and where less
        observed = token + V * is_more.gather(1, token[:, None])[:, 0]
        expected = torch.cat([P * ~is_more, P * is_more], dim=1).sum(dim=0)
        assert chi_square_tail(observed.bincount(minlength=2 * V), expected) > CHANCE

# --- 4  The best tree (section 3.1, Algorithm 1) ------------------------------------------------------------
shares = arrays(float, array_shapes(max_dims=2, max_side=5), elements=st.integers(0, 9))
# 1-D or 2-D, with zeros and sums of 1 among them.
acceptance_rates = shares.map(lambda n: n[..., :-1] / n.sum(axis=-1, keepdims=True).clip(1))

@quick
@given(acceptance_rates, st.integers(1, 7))
@example(np.array([1e-3, 1e-7, 1e-7]), 3)
@example(np.float32([0.6, 0.0]), 7)
@example(np.array([]), 7)
@example(np.array([[0.1, 0.1], [0.6, 0.3]]), 7)
def test_no_other_tree_of_that_size_and_depth_has_more_expected_tokens(rates, depth):
    padded = np.pad(np.atleast_2d(rates), ((0, 0), (0, 6)))     # beyond the last rate nothing is accepted
    padded = np.pad(padded, ((0, 6), (0, 0)), mode="edge")      # the last row is for all deeper levels
    allowed = []
    best = {}
    for tree in SMALL_TREES:
        value = 0.0
        for path in tree.paths:
            ranks = [tree.ranks[node] for node in path[1:]]
            value += padded[range(len(ranks)), ranks].prod()    # f(v), Definition 3.3
        assert expected_tokens(tree, rates) == approx(value)
        if tree.depth <= depth and max(map(len, tree.children)) <= rates.shape[-1]:
            allowed.append(tree)
            best[tree.size] = max(value, best.get(tree.size, 0))
    for size in range(1, 8):
        if size in best:
            tree = optimal_tree(rates, size, depth if depth < 7 else None)
            assert tree.size == size
            assert tree in allowed
            assert expected_tokens(tree, rates) == approx(best[size])
        else:
            with pytest.raises(ValueError, match=f"size={size} is too large: .* has {max(best)}$"):
                optimal_tree(rates, size, depth)

@quick
def test_chains_sequences_and_k_ary_trees_have_the_closed_forms_of_section_4():
    rates = np.array([0.5, 0.2, 0.1])
    for k, total in ((1, 0.5), (2, 0.7), (3, 0.8)):
        assert expected_tokens(sequences(k, 80), rates) == approx(1 + total / 0.5)
        assert expected_tokens(k_ary(k, 5), rates) == approx((1 - total**5) / (1 - total))
    assert expected_tokens(chain(5), rates) == approx((1 - 0.5**6) / 0.5)
    assert k_ary(3, 1) == NO_TREE

# --- 6  Logits processors -----------------------------------------------------------------------------------
@quick
def test_truncation_removes_a_targets_tokens_but_only_lowers_a_drafts():
    for cut in (TopKLogitsWarper(2), TopPLogitsWarper(0.8), MinPLogitsWarper(0.4)):
        processed = Sampling(METHODS["sequoia"], [Temperature(0.5), cut]).processed
        logits = torch.tensor([[3.0, 1.0, 2.9, -math.inf]])
        kept = processed(None, logits, is_draft=False)
        assert kept.tolist() == [[6.0, RULED_OUT, approx(5.8), RULED_OUT]]
        kept = processed(None, logits, is_draft=True)
        assert kept.tolist() == [[0, -104, approx(-0.2), -1e9]]         # above the likeliest's

@quick
def test_only_logits_are_rounded_and_what_a_draft_says_is_finite_and_above_what_was_rejected():
    for temperature in (1e-30, 1e-9, 0.7, 50.0):
        processed = Sampling(METHODS["sequoia"], [Temperature(temperature)]).processed
        said = torch.tensor([[2.9, -math.inf, math.inf, math.nan, -3e38]]).bfloat16()
        assert (processed(None, said, is_draft=True).abs() < -sequoia.TRIED).all()
        said = said[:, :2]
        scores = processed(None, said, is_draft=False)
        assert scores.equal(processed(None, said.float(), is_draft=False))

# The first two are equal; in the draft's also the next two, and the target's second likeliest, far below.
TIES = [([20.0, 20, 19, 3], [20.0, 20, 19, 3]), ([3.0, 20, 20, 3], [20.0, 5, 5, 5])]
TIES += [([20.0, 20, 3, 3], [3.0, 20, 20, 20]), ([2000.0, 2e-6, 1e-6, 3], [2000.0, 1e-6, 2e-6, 3])]

@quick
@each_method
def test_exact_ties_are_drawn_by_their_chances_also_near_temperature_0(name):
    """Where scores are so far apart that a float32 sum with noise would have no bits left for the noise."""
    rand = partial(sequoia.uniform, generator=seeded(0))
    temperatures = 1e-20, 1e-8, 1e-6, 1e-3, 1.0
    for (logits, draft_logits), k, temperature in itertools.product(TIES, (1, 2, 3), temperatures):
        sampling = Sampling(METHODS[name], [Temperature(temperature)])
        scores = sampling.processed(None, torch.tensor([logits]), is_draft=False)
        log_Q = sampling.processed(None, torch.tensor([draft_logits]), is_draft=True).expand(5000, 4)
        tokens = sampling.method.propose(log_Q, k, rand)
        P = sampling.method.target_P(scores.expand(5000, 4), rand)
        rank, weights = sampling.method.verify(P, log_Q, tokens, rand(5000, k))
        tokens = torch.cat([tokens, sequoia.draw(weights, rand(5000, 1))], dim=1)[range(5000), rank]
        expected = 5000 * (torch.tensor(logits, dtype=torch.float64) / temperature).softmax(dim=0)
        assert chi_square_tail(tokens.bincount(minlength=4), expected) > CHANCE

@quick
def test_a_processor_gets_each_nodes_own_text_and_none_that_has_ended_but_a_prompt_may_close_with_an_end():
    sampling = Sampling(METHODS["sequoia"], [lambda ids, scores: scores + ids.sum()], end_tokens=[9])
    text = torch.tensor([5, 9])
    tree = Tree([-1, 0, 0, 0, 1, 2])
    tokens = torch.tensor([9, 2, 9, NONE, 3, 4, 5, NONE])
    scores = sampling.node_scores(torch.zeros(6, 1), False, torch.arange(6), tree, tokens, text)
    assert scores[:, 0].tolist() == [5 + 9, 5 + 9 + 2, 0, 0, 5 + 9 + 2 + 3, 0]

# --- 7  The tree in a model's cache, and 8  The step on a device --------------------------------------------
SMALL = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
SMALL |= dict(max_position_embeddings=512, bos_token_id=1, eos_token_id=None, pad_token_id=0)
GQA = dict(SMALL, num_key_value_heads=2)
HEAD = dict(GQA, head_dim=8)
WINDOW = dict(GQA, sliding_window=12)
GEMMA = dict(HEAD, sliding_window=12)
TWO_KINDS = dict(GEMMA, layer_types=["sliding_attention", "full_attention"])
YARN = dict(rope_type="yarn", factor=2.0, rope_theta=1e4, original_max_position_embeddings=256)
ROBERTA = dict(SMALL, is_decoder=True)
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
# By the name of a model_type, which words may follow.
ARCHITECTURES = dict(llama=GQA, qwen2=GQA, qwen3=HEAD, phi3=WINDOW, mistral=WINDOW, gpt_neox=SMALL)
ARCHITECTURES |= dict(falcon=SMALL, gemma2=GEMMA, gemma3_text=TWO_KINDS, roberta=ROBERTA)
ARCHITECTURES["roberta without padding"] = dict(ROBERTA, pad_token_id=None)
ARCHITECTURES["gpt2"] = dict(SMALL, max_position_embeddings=256)
ARCHITECTURES["opt"] = dict(SMALL, ffn_dim=48, word_embed_proj_dim=32)
ARCHITECTURES["mixtral"] = dict(WINDOW, **EXPERTS)
ARCHITECTURES["qwen2 with a window"] = dict(WINDOW, use_sliding_window=True, max_window_layers=1)
ARCHITECTURES["gpt_oss"] = dict(TWO_KINDS, rope_parameters=YARN, **EXPERTS)
LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12)
ARCHITECTURES["deepseek_v3"] = dict(SMALL, num_key_value_heads=4, first_k_dense_replace=2, **LATENT)
LAYER_INPUT = dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=64)
ARCHITECTURES["gemma4_text"] = dict(TWO_KINDS, global_head_dim=16, **LAYER_INPUT)

# One of each kind of attention, position and entry: these go through the tests of single steps.
STEPPED = ("llama", "gpt2", "mistral", "gemma3_text", "gpt_oss", "deepseek_v3", "gemma4_text")

def config_of(name, **changes):
    # The text of a random model that is tied to its embeddings would repeat one token.
    given = dict(ARCHITECTURES[name], tie_word_embeddings=False) | changes
    return transformers.AutoConfig.for_model(name.split()[0], **given)

def make_pair(name, difference=0.25, seed=0, **changes):
    """A random target whose distributions are far from flat, and a draft near it."""
    torch.manual_seed(seed)
    target = transformers.AutoModelForCausalLM.from_config(config_of(name, **changes)).eval()
    draft = copy.deepcopy(target)
    for p, q in zip(target.parameters(), draft.parameters()):
        if p.ndim > 1:
            p.data *= 4
            q.data = p.data + difference * p.std() * torch.randn_like(p)
    for model in (target, draft):
        model.get_output_embeddings().weight.data *= 4
    return target, draft

def text_of(length, vocabulary=64, seed=0):
    return torch.randint(2, vocabulary, (length,), generator=seeded(seed))

def fed(model, text):
    """A model with a cache that holds a text."""
    cached = CachedModel(model.requires_grad_(False))
    cached.prefill(text)
    return cached

@quick
@pytest.mark.parametrize("name", STEPPED)
def test_tree_attention_equals_one_path_at_a_time(name):
    """Of nodes in any order, and previous. Windows are shorter than the text, and than the tree."""
    window = dict(sliding_window=3) if "sliding_window" in ARCHITECTURES[name] else {}
    model, _ = make_pair(name, **window)
    text = text_of(30)
    tokens = torch.cat([text[-1:], text_of(12, seed=1), text[-2:-1]])       # of the root, nodes, and previous
    nodes = torch.randperm(14, generator=seeded(0))
    place = sequoia.Layout(ABREAST, "cpu").place(torch.tensor([29]), 192)
    logits = fed(model, text[:-1]).node_logits(tokens, nodes, place)
    for node, row in zip(nodes.tolist(), logits):
        path = tokens[ABREAST.paths[node]] if node < 13 else tokens[:0]
        alone = torch.cat([text[:-1], path])
        expected = model(alone[None]).logits[0, -1]
        torch.testing.assert_close(row, expected, atol=2e-3, rtol=1e-3)

class EmulatedGraph(TorchDispatchMode):
    """A CUDA graph on a CPU. While it is captured, operators are noted with the memory they use, and what
    they change is undone afterwards. A replay runs them on that memory again, so whatever Python knew in the
    capture, it knows for good: sizes, addresses, values, and generators that were not registered."""

    def __init__(self):
        super().__init__()
        self.calls = []
        self.before = {}         # by address: memory, and its contents before an operator first took it
        self.states = {}

    def register_generator_state(self, generator):
        self.states[generator] = generator.get_state()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for value in filter(torch.is_tensor, tree_leaves((args, kwargs))):
            storage = value.untyped_storage()
            if storage.data_ptr() not in self.before:
                self.before[storage.data_ptr()] = storage, storage.clone()
        out = operator(*args, **kwargs)
        self.calls.append((operator, args, kwargs, out))
        return out

    @contextlib.contextmanager
    def capture(self, *memory_and_stream, capture_error_mode):
        with self:
            yield
        for storage, contents in self.before.values():
            storage.copy_(contents)
        for generator, state in self.states.items():
            generator.set_state(state)

    def replay(self):
        for operator, args, kwargs, out in self.calls:
            for old, new in zip(tree_leaves(out), tree_leaves(operator(*args, **kwargs))):
                if torch.is_tensor(old) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

def call_again(run, *arguments):
    run.graph = mock.Mock(replay=lambda: setattr(run, "result", run.on_device(*arguments)))

@contextlib.contextmanager
def form_of(name):
    """Steps as on a CPU; as a GPU would capture them, but called again; or captured."""
    capture = TreeStep.capture if name == "captured" else call_again
    with mock.patch.multiple(torch.cuda, CUDAGraph=EmulatedGraph, graph=EmulatedGraph.capture,
                             current_stream=mock.Mock(), stream=contextlib.nullcontext):
        with mock.patch.object(TreeStep, "capture", capture):
            yield

def scores_by(model, sampling, is_draft):
    """A function from a text to a model's scores after it. Greedy is Algorithm 2 at temperatures near 0."""
    def scores(text):
        logits = model(text[None]).logits[:, -1]
        found = sampling.processed(text[None], logits, is_draft)[0].double()
        return found if sampling.method is METHODS["sequoia"] else found * 1e6
    return scores

@torch.inference_mode()
def assert_steps_as_plainly(models, text, sampling, form, seed):
    """A text's steps add the plain step's tokens, and leave both caches as fresh ones, which lack the next
    root, and the draft's also previous. Without noise all children are the draft's choices after a path."""
    target, draft = models
    generator, again = seeded(seed), seeded(seed)
    p = scores_by(target.model, sampling, is_draft=False)
    q = scores_by(draft.model, sampling, is_draft=True)
    static = form != "host" and not sampling.reads_text
    for model in models:
        model.store.fill_(math.nan)             # what an earlier text left must not show
        model.prefill(text[:-1])
    for tree in (LATE, EARLY, BUSHY, ABREAST):
        run = TreeStep(tree, models, generator, static)
        for _ in range(2):
            with form_of(form):
                step = run(text, sampling)
            expected = step_plainly(p, q, text, tree, again)
            assert step.tokens == expected.tolist()
            if sampling.method is sequoia.GREEDY:
                tokens = torch.tensor(step.node_tokens)
                for path, children in zip(tree.paths, tree.children):
                    if children:
                        scores = q(torch.cat([text, tokens[path[1:]]]))
                        assert tokens[children].equal(scores.topk(len(children)).indices)
            text = torch.cat([text, expected])
            for model, known in ((target, text[:-1]), (draft, text[:-2])):
                found = model.store[:, :, : len(known)]
                fresh = fed(model.model, known).store[:, :, : len(known)]
                torch.testing.assert_close(found, fresh, atol=1e-5, rtol=1e-5)
        assert isinstance(run.graph, EmulatedGraph) == (static and form == "captured")

repetition = transformers.RepetitionPenaltyLogitsProcessor(1.5)
SHAPED = [[Temperature(0.7)], [Temperature(1.5), TopPLogitsWarper(0.8)], [TopKLogitsWarper(5)]]
SHAPED += [[MinPLogitsWarper(0.1)], [repetition]]

@pytest.mark.parametrize("name", some_quick(STEPPED, "gemma4_text"))
@pytest.mark.parametrize("form", ["host", "static", "captured"])
def test_a_step_adds_what_the_plain_step_adds_and_leaves_caches_as_a_fresh_pass_would(name, form):
    window = dict(sliding_window=3) if form == "captured" and name in ("mistral", "gemma3_text") else {}
    # In float64, where ties are rare. But these experts take none.
    dtype = torch.float32 if name in ("gpt_oss", "deepseek_v3") else torch.float64
    models = [CachedModel(model.to(dtype)) for model in make_pair(name, difference=0.5, **window)]
    methods = METHODS["sequoia"], sequoia.GREEDY        # which the plain step can follow token by token
    shaped = SHAPED if name == "llama" else SHAPED[:1]
    for seed, given in enumerate(itertools.product(methods, shaped)):
        assert_steps_as_plainly(models, text_of(20 - seed), Sampling(*given), form, seed)

# A model is a table for each level, (V**level, V); a path's tokens, as digits of base V, give the row.
def row_of(tables, path):
    V = tables[0].shape[1]
    return tables[len(path)].view([V] * (len(path) + 1))[tuple(path)]

def continued(start, tables):
    """The distribution, (V**levels,), of texts that begin with `start` and then go on by these tables."""
    chances = torch.ones(1, dtype=torch.float64)
    for level, P in enumerate(tables):
        following = torch.eye(P.shape[1])[start[level]] if level < len(start) else P
        chances = (chances[:, None] * following).flatten()
    return chances

class TableModel:
    """Stands in for a CachedModel whose text does not matter: a row of a table follows each path."""
    store = torch.zeros(0, 0, 64, 0)
    agree = staticmethod(lambda values: values)

    def __init__(self, tables):
        self.tables = tables
        self.vocabulary = tables[0].shape[1]

    def node_logits(self, tokens, nodes, place):
        # What a node sees are a text of one token, in slot 0, then the root, and then its path.
        _, _, mask, _ = place
        paths = [row.nonzero()[2:, 0] - 1 for row in mask[nodes] == 0]
        tokens = tokens.clamp(min=0)
        return torch.stack([row_of(self.tables, tokens[path].tolist()) for path in paths]).log()

@pytest.mark.parametrize("name", some_quick(["plainly", *METHODS], "plainly", "sequoia"))
def test_a_steps_text_has_exactly_the_targets_distribution(name):
    """Over all proposals, all outcomes of all tries, and all last tokens; then the target itself goes on."""
    text = torch.tensor([0, 0])                 # its last token is the root
    trees = [Tree([-1, 0, 0]), Tree([-1, 0, 0, 1])] + [Tree([-1, 0, 0, 0, 2])] * (name != "spectr")     # slow
    for tree, static in itertools.product(trees, {False, name in BY_RATIOS}):
        tables = [random_rows(3**level, 3, zeros=0.3, seed=14 + level) for level in range(tree.depth)]
        target, draft = zip(*tables)

        def plainly():
            p = lambda ids: row_of(target, ids[2:].tolist()).log()
            q = lambda ids: scores_of(row_of(draft, ids[2:].tolist())).float()      # of any dtype
            return step_plainly(p, q, text, tree).tolist()

        def by_tables():
            step = TreeStep(tree, [TableModel(target), TableModel(draft)], static=static)
            step.capture = mock.Mock()
            return step(text, Sampling(METHODS[name], [])).tokens

        found = 0
        for chance, tokens in EveryRun().results(plainly if name == "plainly" else by_tables):
            found = found + chance * continued(tokens, target)
        torch.testing.assert_close(found, continued([], target), rtol=0, atol=1e-6)

class NothingOnTheCPU(TorchDispatchMode):
    """No operator takes or makes a tensor on the CPU: in a CUDA graph that would be a copy, and an error."""
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, out))
        assert not any(torch.is_tensor(leaf) and leaf.is_cpu for leaf in leaves), operator
        return out

@each_method
def test_a_static_step_takes_nothing_from_the_host(name):
    models = [fed(model, text_of(9)) for model in make_pair("gemma3_text")]
    for cached in models:                       # on a device that holds no values, so that none can be read
        cached.model.to("meta")
        cached.store = cached.store.to("meta")
    sampling = Sampling(METHODS[name], sum(SHAPED[:4], []))
    for tree in (NO_TREE, LATE, BUSHY):
        step = TreeStep(tree, models, static=True)
        step.rand = mock.Mock(side_effect=step.rand)
        with NothingOnTheCPU():
            result = step.on_device(torch.zeros(10, dtype=torch.long, device="meta"), sampling)
        assert result.shape == (2 + tree.size,)
        if name in ("naive", "topk"):
            assert mock.call(tree.size, 1) in step.rand.mock_calls          # a number for each node's token

@needs_cuda
@each_method
def test_captured_steps_equal_the_same_steps_called_again_on_a_gpu(name):
    sampling = Sampling(METHODS[name], [Temperature(0.7)])
    pair = [model.cuda() for model in make_pair("llama")]
    texts = []
    for capture in (call_again, TreeStep.capture):
        text = text_of(20).cuda()
        run = TreeStep(BUSHY, [fed(model, text[:-1]) for model in pair], seeded(0, "cuda"), static=True)
        with mock.patch.object(TreeStep, "capture", capture):
            for _ in range(12):
                text = torch.cat([text, text.new_tensor(run(text, sampling).tokens)])
        texts.append(text.tolist())
    assert run.graph
    assert texts[0] == texts[1]

# --- 9  The planner (section 4.1) ---------------------------------------------------------------------------
@quick
def test_acceptance_rates_count_children_that_were_not_missing_and_are_made_to_fall():
    acceptance = AcceptanceRates()
    assert acceptance.rates() == approx(sequoia.PRIOR)
    had = acceptance.had.copy()
    # The root's second child is accepted, and none of that node's; then its first is rejected, and alone.
    for tokens, path in ((7 * [5], [2]), ([5, 7, NONE, 9, 9, 9, 9], [])):
        acceptance.learn(Step(k_ary(2, 3), tokens, path, 0, 1.0))
    acceptance.learn(Step(sequences(20, 1), 21 * [5], [20], 0, 1.0))            # more than it counts
    assert [*(acceptance.had - had)[:3]] == [4, 3, 1]
    assert [*(acceptance.accepted - 1.5)[:3]] == [0, 1, 0]
    acceptance.had[:3] += 1e6
    acceptance.accepted[:3] += [2e5, 5e5, 1e5]
    assert acceptance.rates()[:3] == approx([0.2, 0.2, 0.1], abs=1e-4)

# The paper's, of Llama-3-70B with the 8B as its draft; and a draft that is right less often below the root.
PAPER_RATES = np.array([[0.7732, 0.1039, 0.0402, 0.0206, 0.0128, 0.0081, 0.0064, 0.0043, 0.0035, 0.0026]])
RATES = np.array([[0.65, 0.12, 0.05, 0.03, 0.02], [0.6, 0.1, 0.05, 0.03, 0.02]])
# t(n), c, acceptance rates, steps, and the least part of the best tree's pace.
MACHINES = {"flat to 800": (lambda n: max(1.0, n / 800), 0.002, PAPER_RATES, 600, 0.97)}
MACHINES["flat"] = (lambda n: 1.0), 0.5, RATES, 400, 0.97
MACHINES["linear"] = (lambda n: 0.98 + 0.02 * n), 0.02, RATES, 200, 0.97
MACHINES["kinked"] = (lambda n: max(1.0, n / 48)), 0.1, RATES, 200, 0.95
MACHINES["no tree pays"] = float, 1.0, RATES, 200, 1

def best_pace(t, c, rates, size):
    """Of all trees of up to `size` nodes and 24 levels. The likeliest nodes always form a tree, the best."""
    paces = []
    chances = level_chances = np.ones(1)
    for level in range(24):
        tokens = chances.cumsum()
        paces += [tokens[n - 1] / (t(n) + c * level) for n in range(1, len(tokens) + 1)]
        level_chances = np.outer(level_chances, rates[min(level, len(rates) - 1)])
        level_chances = np.sort(level_chances, axis=None)[-size:]
        chances = np.sort(np.append(chances, level_chances))[::-1][:size]
    return max(paces)

def pace(tree, t, c, rates):
    return expected_tokens(tree, rates) / (t(tree.size) + c * (tree.depth - 1))

@quick
def test_the_plan_is_the_best_of_all_trees():
    sizes = np.array([1, 4, 16, 64])
    k = np.arange(1, 9)
    machines = [(1 + c * (sizes - 1), c) for c in (0.001, 0.003, 0.01, 0.03, 0.1, 1.0)]
    for rates in (0.6 / k**2, 0.2 / k**0.5, np.array([0.4333, 0.4027, 0.1205, 0.0374])):
        for t, c in [([1.0, 1.02, 1.1, 1.4], 0.05), *machines]:
            seconds = partial(np.interp, xp=sizes, fp=t)
            tree = sequoia.plan(rates, sizes, t, c)
            assert pace(tree, seconds, c, rates) == approx(best_pace(seconds, c, rates[None], 64))
        assert tree == NO_TREE
    assert sequoia.plan(np.array([0.99]), [1, 64], [1.0, 1.0], 0.0) == chain(23)

def all_steps(planner, count, seconds=lambda tree: 1.0, accepted=lambda tree: [], **left):
    """The trees of a planner's next steps. seconds, accepted: a step's time, and its path."""
    trees = []
    for _ in range(count):
        tree = planner.next_tree(**left)
        planner.learn(Step(tree, [0] * tree.size, accepted(tree), 0, seconds(tree)))
        trees.append(tree)
    return trees

def simulated(name, is_noisy=False, seed=0):
    t, c, rates, steps, _ = MACHINES[name]
    rng = np.random.default_rng(seed)
    planner = Planner("auto")

    def seconds(tree):
        noise = 0.1 * rng.exponential() + 2 * (rng.random() < 0.05) + 0.3 * (planner.steps < 20)
        return (t(tree.size) + c * (tree.depth - 1)) * (1 + noise * is_noisy)

    def accepted(tree):
        path = [0]
        while True:
            row = rates[min(len(path), len(rates)) - 1]
            rank = row.cumsum().searchsorted(rng.random())
            children = tree.children[path[-1]]
            if rank >= min(len(children), len(row)):
                return path[1:]
            path.append(children[rank])

    all_steps(planner, steps, seconds, accepted)
    return planner

def test_a_planner_knows_the_machine_and_finds_the_best_of_all_trees():
    for name, (t, c, rates, _, least) in MACHINES.items():
        planner = simulated(name)
        assert pace(planner.tree, t, c, rates) >= least * best_pace(t, c, rates, 1024)
        sizes, times, draft_seconds = planner.latency()
        assert draft_seconds == approx(c, rel=0.01)
        assert times == approx([t(size) for size in sizes], rel=0.01)

@pytest.mark.parametrize("name", some_quick(["flat", "linear", "kinked"], "linear"))
def test_planners_on_a_noisy_machine_mostly_come_near(name):
    *machine, _, _ = MACHINES[name]
    paces = [pace(simulated(name, True, seed).tree, *machine) for seed in range(6)]
    assert np.mean(paces) > 0.82 * pace(simulated(name).tree, *machine)

@quick
def test_trials_and_new_plans_are_timed_three_times_and_old_times_are_dropped_at_doubling_steps():
    """So slow first times are forgotten, and with them the trees that are no longer used."""
    planner = Planner("auto")
    trials = planner.trials
    plans = [chain(6), chain(3)]
    promised = lambda tree, rates: 9.0 if tree == plans[0] else 2.0 if tree == chain(6) else 1.0

    def seconds(tree):
        seen.append(tree)
        return 1.0 if seen.count(tree) > 1 else 9.0

    seen = []
    with mock.patch.multiple(sequoia, plan=lambda *args: plans[0], expected_tokens=promised):
        assert all_steps(planner, 12, seconds) == [tree for tree in (*trials, chain(6)) for _ in range(3)]
        del plans[0]
        assert all_steps(planner, 12 + 3, seconds) == 12 * [chain(6)] + trials
        assert planner.tree == chain(3)
        assert all_steps(planner, 21 + 3, seconds) == 21 * [chain(3)] + trials
        assert all_steps(planner, 45, seconds) == 45 * [chain(3)]
    assert {max(planner.seconds[tree]) for tree in trials} == {1.0}
    all_steps(planner, 256)
    assert not planner.seconds[chain(6)]

@quick
@pytest.mark.parametrize("size", [4, 7, 12])
def test_any_plan_is_timed_at_once_and_may_be_half_as_large_again_as_the_largest_timed_tree(size):
    """A time between two sizes is a guess: in float32 on a CPU two nodes may take as long as eight."""
    planner = Planner("auto")
    best = sequoia.likeliest_tree(sequoia.PRIOR, size, 5)
    asked = mock.Mock(return_value=best)
    promised = lambda tree, rates: 9.0 if tree == best else 1.0
    with mock.patch.multiple(sequoia, plan=asked, expected_tokens=promised):
        assert all_steps(planner, 15)[9:] == 6 * [best]
    _, sizes, times, c = asked.call_args_list[0].args
    assert sizes == [1, 8, 12]
    assert [*times, c] == pytest.approx([1.0, 1.0, 1.0, 0.0], abs=1e-6)
    assert size in asked.call_args_list[1].args[1]
    assert asked.call_count == 2

@quick
def test_after_a_look_at_a_step_without_a_tree_the_faster_of_both_is_used_and_a_plan_needs_more_steps():
    first = Planner("auto").tree
    child = first.children[0][0]
    both = [child, first.children[child][0]]
    for path, slow, plan in (([], 1.8, NO_TREE), (both, 1.5, first), (both, 9.0, NO_TREE)):
        seconds = lambda tree: slow if tree == first else 1.0
        accepted = lambda tree: path[: tree.depth - 1]
        trees = all_steps(Planner("auto"), 12, seconds, accepted, tokens_left=70)
        assert trees == 3 * [NO_TREE] + 3 * [first] + 6 * [plan]
    assert all_steps(Planner("auto"), 35, tokens_left=26) == 34 * [first] + [NO_TREE]

@quick
def test_a_shape_is_planned_again_at_doubling_steps_and_a_tree_stays():
    shaped, stays = Planner((8, 4)), Planner(LATE)
    trees = all_steps(shaped, 100)
    assert {*all_steps(stays, 20)} == {LATE}
    assert trees[0] == optimal_tree(sequoia.PRIOR, 8, 4)
    assert trees[0] != trees[24]
    assert {i for i in range(1, 100) if trees[i] != trees[i - 1]} <= {3, 6, 24, 48, 96}

@quick
def test_sequences_are_timed_only_where_enough_tokens_are_left_to_gain_their_time_back():
    for cost, plan, begun in ((1, 1, 54), (4, 1, 444), (1, 0, 184)):
        planner = Planner("auto")
        *timed, straight = planner.trials
        planner.tree = planner.trials[plan]     # 0 is none: then twice as many must be left
        planner.seconds |= {tree: 3 * [1.0] for tree in timed}
        planner.steps = begun - 1
        assert planner.next_tree(76, cost) == planner.tree
        planner.steps += 1
        assert planner.next_tree(76, cost) == straight

@quick
@pytest.mark.parametrize("straight, c", [(9.0, 1.0), (4.0, 0.0)])
def test_sequences_tell_a_draft_pass_which_takes_no_less_than_nothing_and_the_least_time_counts(straight, c):
    planner = Planner("auto")
    for tree, seconds in zip((*planner.trials, k_ary(2, 3)), (3.0, 5.0, straight, 7.0)):
        planner.seconds[tree] += [20.0, seconds, 10.0]
    planner.seconds[chain(2)]                                   # all of its times have been dropped
    sizes, t, found = planner.latency()
    assert sizes == [1, 7, 8]
    assert [*t, found] == pytest.approx([3.0, 7.0 - 2 * c, straight - 7 * c, c], abs=1e-6)
    del planner.seconds[planner.trials[1]]
    assert planner.latency()[2] == 0

any_rates = st.lists(st.sampled_from([0.9, 0.6, 0.5, 0.3, 0.25, 0.1, 1e-3]), min_size=1, max_size=6)
falling = any_rates.map(lambda rates: np.array(sorted(rates, reverse=True)))

@quick
@given(falling, st.integers(1, 60), st.integers(1, 8))
@example(np.array([0.5, 0.5]), 13, 5)
@example(0.6 / np.arange(1, 17) ** 2, 256, 12)
@example(np.array([1.0, 0.6, 0.6, 0.36]), 40, 6)
def test_exercise_4_the_likeliest_nodes_are_algorithm_1s_tree_also_among_equals(rates, size, depth):
    tree = sequoia.likeliest_tree(rates, size, depth)
    assert tree.depth <= depth
    assert tree.size == min(size, sum(len(rates) ** level for level in range(depth)))       # all there are
    best = optimal_tree(rates, tree.size, depth)
    assert expected_tokens(tree, rates) == approx(expected_tokens(best, rates), rel=1e-9)

@pytest.fixture(scope="module")
def llama():
    return make_pair("llama")

@pytest.fixture(scope="module")
def bundled():
    load = partial(transformers.AutoModelForCausalLM.from_pretrained, dtype=torch.float32)
    return load(ROOT / "tiny" / "target"), load(ROOT / "tiny" / "draft")

def prompt_of(length, vocabulary=64, seed=0):
    return text_of(length, vocabulary, seed)[None]

def plain_text(target, prompt, **arguments):
    return target.generate(prompt, **dict(do_sample=False) | arguments)

def assert_as_generate(decoder, prompt, **arguments):
    """Greedily a Decoder writes `generate`'s text. Returns its steps."""
    steps = []
    decoder.on_step = steps.append
    found = decoder.generate(prompt, **dict(do_sample=False) | arguments)
    assert found.equal(plain_text(decoder.target.model, prompt, **arguments))
    return steps

class Captured(Decoder):
    """Its steps have fixed shapes, as on a GPU. What then happens to them, `form_of` says."""
    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.cuda_graph = True

# --- 11  Decoding, and 12  What is refused ------------------------------------------------------------------
@pytest.mark.parametrize("name", some_quick(ARCHITECTURES, "llama", "gemma4_text"))
def test_greedy_text_is_generates_on_every_architecture_with_every_tree_also_traced(name):
    """Windows are 12 tokens wide, and the text grows to 50, so most of it lies behind a window."""
    pair = make_pair(name, difference=0.05)
    for tree in (NO_TREE, sequences(3, 3), BUSHY, "auto"):
        steps = assert_as_generate(Decoder(*pair, tree), prompt_of(26), max_new_tokens=24)
        # A draft this near must save steps, because otherwise its cache is wrong.
        assert len(steps) == 24 if tree == NO_TREE else len(steps) < 18
    traced = [sequoia.pack(model) for model in pair]
    assert len(steps) >= len(assert_as_generate(Decoder(*traced, BUSHY), prompt_of(26), max_new_tokens=24))

@pytest.mark.parametrize("length", some_quick([1, 5, 6, 245, 250, 255, 256, 257], 1, 5, 6, 256))
def test_prompts_shorter_than_the_probe_and_around_the_caches_capacity(llama, length):
    assert_as_generate(Decoder(*llama, (9, 4)), prompt_of(length), max_new_tokens=14)

@quick
def test_a_decoder_kept_over_texts_gives_what_a_fresh_one_gives_and_is_freed_with_its_caches(llama):
    changes = [{}, dict(temperature=0.5), dict(temperature=0.5, top_p=0.8), dict(top_k=9), dict(top_k=8),
               dict(do_sample=False), dict(repetition_penalty=1.5), dict(bad_words_ids=[[3]]), {}]
    generator = torch.Generator()
    kept = Captured(*llama, sequences(2, 3), generator=generator)
    for i, change in enumerate(changes):
        given = dict(do_sample=True, max_new_tokens=12) | change
        texts = []
        for decoder in (Captured(*llama, sequences(2, 3), generator=generator), kept):
            generator.manual_seed(i)
            with form_of("captured"):
                texts.append(decoder.generate(prompt_of(6 + 90 * (i % 4), seed=i), **given))
        assert texts[0].equal(texts[1]), change
    assert len(kept.planners) == 7
    cache = weakref.ref(kept.target)
    del kept, decoder                           # at once, because the next call may need the memory
    assert cache() is None

@quick
def test_a_graph_is_kept_over_texts_and_captured_again_only_when_the_caches_grow(llama):
    """It goes on with the old memory, which would lose the text. Room for a call's text is made at once."""
    counted = mock.patch.object(TreeStep, "capture", autospec=True, side_effect=TreeStep.capture)
    memory = mock.Mock(side_effect=EmulatedGraph.capture)
    with form_of("captured"), counted as capture, mock.patch.object(torch.cuda, "graph", memory):
        for lengths, captures in (((12, 40, 230), 2), ((230, 12), 1)):
            decoder = Captured(*llama, BUSHY)
            capture.reset_mock()
            for length in lengths:
                assert_as_generate(decoder, prompt_of(length), max_new_tokens=30)
            assert capture.call_count == captures
    assert memory.call_args.kwargs == dict(capture_error_mode="thread_local")

@pytest.mark.parametrize("kind", [Decoder, Captured])
def test_auto_with_its_trials_writes_generates_text_and_captures_trees_only_for_longer_texts(llama, kind):
    """After a step without a tree the draft lacks its token, so it must be fed it, or would guess badly."""
    decoder = kind(llama[0], llama[0])
    trees = set()
    for length in (8, 33, 20):
        with form_of("static"):
            steps = assert_as_generate(decoder, prompt_of(length), max_new_tokens=200)
        for step in steps[1:]:
            assert len(step.tokens) == step.tree.depth      # the target is the draft, if its cache is right
            trees.add(step.tree)
    assert {NO_TREE, chain(7)} < trees if kind is Decoder else len(trees) == 1

def test_a_drafts_vocabulary_and_context_do_not_change_the_text():
    target, draft = make_pair("llama")
    for size in (60, 70):
        draft.resize_token_embeddings(size)
        with pytest.warns(UserWarning, match=rf"draft's .* are \({size}, 512\), the target's \(64, 512\)"):
            decoder = Decoder(target, draft, sequences(61, 1))
        steps = assert_as_generate(decoder, prompt_of(10), max_new_tokens=16)
        for step in steps[1:]:
            # Nothing is proposed beyond the target's vocabulary, and what the draft lacks comes last.
            assert max(step.node_tokens) < 64
            assert max(step.node_tokens[:61]) < size
    short = make_pair("gpt2", max_position_embeddings=32)[1]
    for length, tree in ((5, "auto"), (31, sequences(2, 5)), (60, (9, 4))):
        with pytest.warns(UserWarning, match=r"context are \(64, 32\).* longer texts go on without a tree"):
            assert_as_generate(Decoder(target, short, tree), prompt_of(length), max_new_tokens=30)

@quick
def test_a_text_is_never_longer_than_asked_for(llama):
    for tree, count in itertools.product(("auto", "16x5", chain(6)), (1, 2, 3, 4, 7, 12)):
        decoder = Decoder(llama[0], llama[0], tree)
        steps = assert_as_generate(decoder, prompt_of(10), max_new_tokens=count)
        assert len(steps) == 1 + math.ceil((count - 1) / steps[-1].tree.depth)

@quick
def test_criteria_and_a_streamer_get_every_token_and_a_criterion_or_eos_ends_an_accepted_run(llama):
    decoder = Decoder(llama[0], llama[0], chain(5))             # whole paths are accepted
    prompt = prompt_of(10)
    plain = plain_text(llama[0], prompt, max_new_tokens=30)[0].tolist()
    at_15 = mock.Mock(side_effect=lambda ids, scores: torch.tensor([ids.shape[1] >= 15]))
    streamer = mock.Mock()
    configured = transformers.GenerationConfig(max_new_tokens=30)
    out = decoder.generate(prompt, configured, stopping_criteria=[at_15], streamer=streamer)
    assert out[0].tolist() == plain[:15]
    assert at_15.call_count == 5
    streamed = [call.args[0].tolist() for call in streamer.put.call_args_list]
    assert streamed == [[plain[:10]], *[[token] for token in plain[10:15]]]
    streamer.end.assert_called_once_with()
    # A limit beyond the context is no wish, so programs may always pass one.
    steps = assert_as_generate(decoder, prompt, max_new_tokens=2000, eos_token_id=plain[13])
    assert steps[-1].tokens[2] == plain[13]
    assert decoder.report.steps == len(steps)

def test_a_stop_string_inside_an_accepted_run_ends_the_text(bundled):
    ids = TOKENIZER("import os\n\ndef main(", return_tensors="pt").input_ids
    decoder = Decoder(bundled[0], bundled[0], chain(5))
    criteria = transformers.StoppingCriteriaList([transformers.MaxTimeCriteria(1e9)])
    configured = transformers.GenerationConfig(stop_strings=["\n"])
    common = dict(max_new_tokens=30, tokenizer=TOKENIZER, stopping_criteria=criteria)
    for given in (dict(generation_config=configured), dict(stop_strings="\n"), dict(stop_strings=[":", "("]),
                  dict(stop_strings="\0\0")):
        assert_as_generate(decoder, ids, **common, **given)
        assert len(criteria) == 1               # a caller's list stays as it is
        assert (decoder.report.tokens == 30) == ("\0\0" in given.values())

def test_a_draft_of_other_tokens_is_a_warning_that_says_how_many_and_writes_the_targets_text(folders, capfd):
    model = transformers.AutoModelForCausalLM.from_pretrained(folders / "good")
    renamed = transformers.AutoTokenizer.from_pretrained(folders / "renamed")
    decoder = Decoder(model, model, (9, 4))
    with pytest.warns(UserWarning, match="tokenizer differs in 2 tokens, as in 'a'"):
        assert_as_generate(decoder, prompt_of(9), max_new_tokens=9, tokenizer=TOKENIZER,
                           assistant_tokenizer=renamed)
    with pytest.warns(UserWarning, match="tokenizer differs in 2 tokens"):
        run_main(capfd, *USUAL, f"--target={folders / 'good'}", f"--draft={folders / 'renamed'}")

def test_both_ways_in_take_what_a_tokenizer_gives_and_what_says_nothing_and_return_what_is_asked_for():
    target, draft = make_pair("gpt2")
    target.transformer.wte.weight.data[0] = 0       # which GPT-2 adds to embeddings where a token's type is 0
    prompt = prompt_of(10)
    greedy = dict(max_new_tokens=12, do_sample=False)
    expected = plain_text(target, prompt, **greedy)
    encoded = dict(input_ids=prompt, attention_mask=torch.ones(1, 10).long(), pixel_values=None,
                   position_ids=torch.arange(10)[None], token_type_ids=torch.zeros(1, 10).long())
    decoder = Decoder(target, draft)
    for inputs in (prompt.int(), encoded, transformers.BatchEncoding(encoded)):
        found = decoder.generate(inputs, use_cache=False, num_beams=1, custom_generate=None, **greedy)
        assert found.equal(expected)
    out = sequoia.generate(target, encoded, assistant_model=draft, prompt_lookup_num_tokens=3,
                           return_dict_in_generate=True, **greedy)
    assert out.sequences.equal(expected)
    options = dict(tree="none", method="topk", generator=seeded(0), on_step=print, cuda_graph=False)
    with mock.patch.object(sequoia, "Decoder") as made:
        sequoia.generate(target, encoded, assistant_model=draft, **options)
    assert made.call_args.args == (target, draft, *options.values())

def test_a_target_may_score_fewer_tokens_than_it_embeds_and_autocast_may_narrow_its_entries():
    target, draft = make_pair("llama")
    target.lm_head = torch.nn.Linear(32, 60, bias=False)
    assert_as_generate(Decoder(target, draft, (9, 4)), prompt_of(10, 60), max_new_tokens=12)
    for do_sample in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            decoder = Decoder(*make_pair("llama"), (9, 4))
            assert decoder.generate(prompt_of(10), do_sample=do_sample, max_new_tokens=12).shape == (1, 22)
    assert_as_generate(decoder, prompt_of(10), max_new_tokens=12)           # in its own precision again

OF_32 = dict(rope_theta=1e4, original_max_position_embeddings=32, factor=4.0)
# A configuration's max_position_embeddings, its other positions, and the context.
ROPES = {"yarn": (64, dict(OF_32, rope_type="yarn"), 128)}
ROPES["linear"] = (32, dict(rope_theta=1e4, rope_type="linear", factor=4.0), 128)
ROPES["longrope"] = (128, dict(OF_32, rope_type="longrope", short_factor=[1] * 4, long_factor=[4] * 4), 32)
ROPES["without a factor"] = (64, dict(OF_32, rope_type="yarn", factor=None), 64)

@pytest.mark.parametrize("name", some_quick(ROPES, "yarn"))
def test_a_text_ends_one_token_behind_the_context(name):
    """Because the last token is never fed. Past longrope's a cache would have to rotate its keys anew."""
    most, rope, context = ROPES[name]
    target, draft = make_pair("llama", max_position_embeddings=most, rope_parameters=rope)
    decoder = Decoder(target, draft, sequences(3, 4))
    for length in (context - 12, context):
        expected = plain_text(target, prompt_of(length), max_length=context + 1)
        with pytest.warns(UserWarning, match=f"ends early, .* the target's context of {context} tokens"):
            text = decoder.generate(prompt_of(length), max_length=context + 20, do_sample=False)
        assert text.equal(expected)
    with pytest.raises(ValueError, match=f"a prompt of {context + 1} tokens, .* context is {context}"):
        decoder.generate(prompt_of(context + 1), max_new_tokens=1)
    kinds = dict(full_attention=rope, sliding_attention=dict(rope_type="default", rope_theta=1e4))
    gemma = dict(max_position_embeddings=most, rope_parameters=kinds, layer_types=[*kinds])
    assert sequoia.context_of(config_of("gemma3_text", **gemma)) == context
    for unlimited in (-1, None):
        assert sequoia.context_of(SimpleNamespace(max_position_embeddings=unlimited)) == sys.maxsize

@torch.inference_mode()
def test_texts_of_four_tokens_have_the_targets_distribution():
    """The vocabulary has three tokens, so that the target alone can score all 81 texts."""
    target, draft = make_pair("gpt2", difference=1.5, seed=3, vocab_size=3, bos_token_id=None)
    prompt = torch.tensor([[1, 2, 1, 2]])
    following = torch.cartesian_prod(*4 * [torch.arange(3)])
    texts = torch.cat([prompt.expand(81, -1), following], dim=1)
    P = target(texts).logits[:, 3:-1].softmax(dim=2)
    chances = P.gather(2, following[:, :, None]).prod(dim=1)[:, 0]
    found = torch.zeros(81)
    steps = []
    tree = Tree([-1, 0, 0, 1, 1, 2])
    decoder = Decoder(sequoia.pack(target), sequoia.pack(draft), tree, "sequoia", seeded(0), steps.append)
    for _ in range(400):
        text = decoder.generate(prompt, do_sample=True, max_new_tokens=4)
        found[(texts == text).all(dim=1)] += 1
    assert sum(len(step.path) for step in steps) > 200
    assert chi_square_tail(found, 400 * chances) > CHANCE

@quick
def test_near_temperature_0_a_decoder_draws_the_targets_best_tokens_by_chance_where_they_are_equal():
    """Two of four tokens, so both are half of a text, and each follows each in a quarter."""
    target, draft = make_pair("llama", vocab_size=4, bos_token_id=None)
    for model, best in ((target, [1, 2]), (draft, [2, 3])):
        rows = torch.zeros(4, 32)
        rows[best] = 1.0
        model.lm_head.weight.data = rows
        model.model.norm.forward = torch.ones_like          # so logits are 32 or 0 after any text
    decoder = Decoder(target, draft, Tree([-1, 0, 0, 1, 1, 2]), generator=seeded(0))
    text = decoder.generate(torch.tensor([[1]]), do_sample=True, temperature=1e-6, max_new_tokens=400)[0, 1:]
    pairs = (4 * text[:-1] + text[1:]).bincount(minlength=16)
    assert chi_square_tail(pairs, 99.75 * np.isin(range(16), [5, 6, 9, 10])) > CHANCE

def sevens_end(row, ids):
    """A grammar in which 7 ends a text, and behind it, or after a missing child, there is nothing to say."""
    assert not {7, NONE} & {*ids[12:].tolist()}
    return [7, 11, 13] if len(ids) > 17 else [10 + len(ids), 20 + len(ids)]

@quick
@pytest.mark.parametrize("given", [
    dict(prefix_allowed_tokens_fn=sevens_end, eos_token_id=[5, 7]),
    dict(logits_processor=[lambda ids, scores: scores.neg_()]),
    dict(min_new_tokens=15, eos_token_id=list(range(2, 40)))], ids=["grammar", "in place", "no early end"])
def test_processors_that_read_the_text_give_generates_text_with_every_tree(llama, given):
    for tree in (NO_TREE, BUSHY, "auto"):
        steps = assert_as_generate(Decoder(*llama, tree), prompt_of(12), max_new_tokens=24, **given)
        assert tree == NO_TREE or any(step.path for step in steps)      # they shape proposals, too

def small_model(kind, **changes):
    config = getattr(transformers, f"{kind}Config")(**SMALL | changes)
    return transformers.AutoModelForCausalLM.from_config(config).eval()

def changed(model, **attributes):
    model.__class__ = type("Changed", (type(model),), attributes)
    return model

RISING = torch.arange(12)[None]
SCORES = ["output_attentions", "output_hidden_states", "output_logits", "output_scores"]
# By the words that refuse it: what is given.
on_three_devices = lambda self: iter([mock.Mock(is_cuda=place != "cpu", device=torch.device(place))
                                      for place in ("cuda:0", "cuda:1", "cpu")])
REFUSED = {"no draft: pass assistant_model=draft": dict(assistant_model=None)}
REFUSED["it has an encoder"] = dict(model=small_model("Llama", is_encoder_decoder=True))
REFUSED["MambaForCausalLM cannot .*: it is recurrent"] = dict(assistant_model=small_model("Mamba"))
REFUSED["GPTNeo.* own way"] = dict(model=small_model("GPTNeo", attention_types=[[["global"], 2]]))
REFUSED["'sdpa'"] = dict(model=small_model("Llama", attn_implementation="flex_attention"))
REFUSED[r"in training mode: call its eval\(\)"] = dict(assistant_model=small_model("Llama").train())
REFUSED["language model of transformers, got LlamaModel"] = dict(model=small_model("Llama").model)
REFUSED[r"Sequential: give .* merge_and_unload\(\), a compiled"] = dict(model=torch.nn.Sequential())
REFUSED["OpenAIGPT.* does not keep one KV entry"] = dict(model=small_model("OpenAIGPT"))
REFUSED["3 ranks cannot share its KV heads"] = dict(model=changed(small_model("Llama"), tp_size=3))
REFUSED["share it by torchrun"] = dict(model=changed(small_model("Llama"), parameters=on_three_devices))
REFUSED["first weights are on a disk"] = dict(model=small_model("Llama").to("meta"))
REFUSED["on cuda:1, .* on cpu"] = dict(assistant_model=changed(small_model("Llama"), _sequoia_probed="sdpa",
                                                           device=torch.device("cuda:1")))
REFUSED["^not supported: several texts"] = dict(inputs=prompt_of(12).expand(2, 12))
REFUSED |= {name: {name: True} for name in SCORES}
REFUSED["stop strings, either"] = dict(stop_strings="x")
REFUSED["this attention_mask"] = dict(attention_mask=RISING)
REFUSED["beam_search"] = dict(num_beams=2)
REFUSED["position_ids$"] = dict(attention_mask=torch.ones(1, 13))
REFUSED["guidance_scale"] = dict(guidance_scale=0.5)
REFUSED["this position_ids"] = dict(position_ids=RISING // 2)
REFUSED["not supported: token_type_ids, which changes"] = dict(token_type_ids=torch.zeros_like(RISING))
REFUSED["the ids of one text.*got None"] = dict(inputs=None, inputs_embeds=torch.rand(1, 12, 32))
REFUSED[r"length\), .*got tensor\(\[\]"] = dict(inputs=RISING[:, :0])
REFUSED["length.*got 'import os'"] = dict(inputs="import os")
REFUSED[r"length\), .*got tensor\(\[2"] = dict(inputs=torch.tensor([2, 3]))
REFUSED["SynthID"] = dict(watermarking_config=transformers.SynthIDTextWatermarkingConfig(5, 9 * [5]))
REFUSED["a cache of your own"] = dict(past_key_values=transformers.DynamicCache())
REFUSED["ruled out every token"] = dict(logits_processor=[lambda ids, scores: scores.fill_(-torch.inf)])

@quick
@pytest.mark.parametrize("words", REFUSED)
def test_an_unfit_model_and_what_would_give_another_text_are_refused_in_words(words):
    target, draft = make_pair("gpt2")
    given = dict(model=target, assistant_model=draft, inputs=prompt_of(12), tree=(9, 4), max_new_tokens=8)
    with pytest.raises(ValueError, match=words):
        sequoia.generate(**given | REFUSED[words])

@pytest.mark.parametrize("method", some_quick(METHODS, "sequoia"))
def test_a_targets_nan_is_an_error_that_names_it_and_a_drafts_only_costs_speed(method):
    pair = make_pair("llama")
    decoder = Decoder(*pair, Tree([-1, 0, 0, 1, 2]), method, seeded(0))
    prompt = prompt_of(10)
    plain = plain_text(pair[0], prompt, max_new_tokens=16)
    for model, at_once, do_sample in itertools.product(pair, (True, False), (True, False)):
        assert_as_generate(decoder, prompt, max_new_tokens=8)
        weight = model.lm_head.weight.data
        whole = weight.clone()
        decoder.on_step = lambda step: weight.fill_(torch.nan)
        if at_once:
            weight.fill_(torch.nan)
        decode = partial(decoder.generate, prompt, do_sample=do_sample, max_new_tokens=16)
        if model is pair[0]:
            with pytest.raises(ValueError, match="the target's logits are NaN"):
                decode()
        else:
            assert decode().equal(plain) or do_sample
        weight.copy_(whole)

# What models do in their own way with what a pass is given. Where that is a text, no positions are given.
def counts_on(given):
    """Takes only the first position and counts on from there, which is right for plain decoding."""
    if given["position_ids"] is not None:
        given["position_ids"] = given["position_ids"][:, :1] + torch.arange(given["input_ids"].shape[1])

def numbers_from_2(given):
    if given["position_ids"] is None:
        given["position_ids"] = torch.arange(2, 2 + given["input_ids"].shape[1])[None]

def sees_siblings(given):
    """Shows every token all that stand before it in the cache, so a node also sees its elder siblings."""
    assert "logits_to_keep" not in given
    mask = given.get("attention_mask")
    if mask is not None:
        rows, columns = mask.shape[2:]
        given["attention_mask"] = torch.full_like(mask, -torch.inf).triu(columns - rows + 1)

def forgets_far_slots(given):
    mask = given.get("attention_mask")
    if mask is not None:
        slots = torch.arange(mask.shape[3])
        own = ((mask == 0) * slots).amax(dim=3, keepdim=True)
        given["attention_mask"] = mask.masked_fill(slots < own - 20, -torch.inf)

@quick
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", [counts_on, numbers_from_2, sees_siblings, forgets_far_slots])
def test_the_probe_refuses_a_model_that_masks_or_counts_in_its_own_way(way, dtype):
    target, draft = make_pair("llama")
    prepare = draft.to(dtype).prepare_inputs_for_generation
    draft.prepare_inputs_for_generation = lambda *ids, **rest: dict(prepare(*ids, **rest), position_ids=None)
    draft._supports_logits_to_keep = lambda: False              # as code from a hub often does not
    draft.register_forward_pre_hook(lambda model, args, given: way(given), with_kwargs=True)
    for pair in ((draft,), (target, draft)):
        with pytest.raises(ValueError, match="Llama.* cannot verify a tree: a pass"):
            Decoder(*pair, tree="none")

def test_in_bfloat16_a_trained_model_passes_the_probe_which_is_made_once_for_each_kind_of_attention():
    target = transformers.AutoModelForCausalLM.from_pretrained(ROOT / "tiny" / "target", dtype=torch.bfloat16)
    with mock.patch.object(sequoia, "probe", wraps=sequoia.probe) as probe:
        for kind in ("sdpa", "eager"):
            target.set_attn_implementation(kind)
            for length in (2, 14):
                assert_as_generate(Decoder(target, tree="none"), prompt_of(length, 4096), max_new_tokens=8)
    assert probe.call_count == 2

BIASED_BY_SLOT = dict(d_model=64, n_heads=4, n_layers=2, expansion_ratio=2, initializer_range=0.15)
COUNTS = dict(d_model=64, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=96, init_std=0.3,
              is_encoder_decoder=False, forced_eos_token_id=None)
COUNTS_TOO = dict(is_decoder=True, initializer_range=0.3)

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind, given", [("Mpt", BIASED_BY_SLOT), ("Bart", COUNTS), ("RoFormer", COUNTS_TOO)])
def test_the_probe_refuses_biases_by_slot_and_counted_positions_in_all_dtypes(kind, given, dtype):
    for seed in range(8):
        torch.manual_seed(seed)
        with pytest.raises(ValueError, match=f"{kind}.* cannot verify a tree: a pass"):
            sequoia.checked(small_model(kind, **given).to(dtype))

@quick
def test_after_a_capture_that_fails_there_is_one_warning_no_other_attempt_and_the_text_goes_on(llama):
    error = RuntimeError("operation not permitted when stream is capturing")
    decoder = Captured(*llama, "auto")
    with mock.patch.object(torch.cuda, "CUDAGraph", side_effect=error) as attempt:
        with pytest.warns(UserWarning, match="without a CUDA graph: operation .* capturing") as caught:
            steps = assert_as_generate(decoder, prompt_of(12), max_new_tokens=280)
        assert_as_generate(decoder, prompt_of(12), max_new_tokens=20)
    assert len(caught) == 1
    assert attempt.call_count == 2              # the step's, and the one that makes generators usable again
    assert {NO_TREE, chain(7)} < {step.tree for step in steps}  # trials, as they need no capture

@quick
def test_on_a_gpu_a_larger_tree_comes_first_and_another_must_be_worth_its_graph():
    gpu = mock.Mock(device=torch.device("cuda:0"), parameters=list)
    with mock.patch.object(sequoia, "checked", lambda model: mock.Mock(model=model, vocabulary=1, context=1)):
        planner, shaped = [Decoder(gpu, gpu, tree).planners["some sampling"] for tree in ("auto", (8, 4))]
    assert (planner.tree.size, planner.tree.depth) == (64, 6)
    assert planner.trials == [NO_TREE, planner.tree, sequences(3, 21)]
    assert planner.next_tree(tokens_left=76, trial_cost=4) == planner.tree
    first = shaped.tree
    shaped.seconds[first] += [1.0]
    shaped.acceptance = mock.Mock(rates=lambda: np.array([0.99, 0.01]))
    for gain, stays in ((1.04, True), (1.06, False)):
        with mock.patch.object(sequoia, "expected_tokens", lambda tree, rates: 1 if tree == first else gain):
            shaped.plan_again()
        assert (shaped.tree == first) == stays

@needs_cuda
@pytest.mark.parametrize("generator", [None, seeded(0, "cuda" if torch.cuda.is_available() else "cpu")])
def test_after_a_capture_that_cuda_broke_off_numbers_are_drawn_and_graphs_captured(generator):
    target, draft = (model.cuda() for model in make_pair("llama"))
    norm = target.model.norm
    waits = mock.Mock(side_effect=lambda x: type(norm).forward(norm, x) if x.sum().item() else None)
    for forward in (waits, partial(type(norm).forward, norm)):
        norm.forward = forward
        decoder = Decoder(target, draft, (9, 4), generator=generator)
        with warnings.catch_warnings(record=True, action="always") as caught:
            assert_as_generate(decoder, prompt_of(12).cuda(), max_new_tokens=14)
            decoder.generate(prompt_of(12).cuda(), do_sample=True, max_new_tokens=14)
        said = [str(one.message) for one in caught if "without a CUDA graph" in str(one.message)]
        assert len(said) == 2 * (forward is waits)
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        assert 0 <= torch.rand(1, generator=generator, device="cuda") < 1

@quick
def test_no_node_stands_behind_a_contexts_end():
    short, long = make_pair("gpt2")[0], make_pair("llama")[0]
    for length, draft, last in ((20, short, chain(6)), (246, short, NO_TREE), (246, long, NO_TREE)):
        decoder = Captured(short, draft, chain(6))
        with form_of("static"):
            steps = assert_as_generate(decoder, prompt_of(length), max_new_tokens=11)
        assert steps[1].tree == chain(6)
        assert steps[-1].tree == last

@quick
def test_a_report_adds_up_and_steps_are_timed_without_what_feeds_the_prompt():
    """On a clock that passes move: the target's by a second, the draft's by a tenth."""
    target, draft = make_pair("llama")
    passes = collections.Counter()
    for model in (target, draft):
        model.register_forward_hook(lambda model, *_: passes.update([model]))
    decoder = Decoder(target, draft, chain(3))
    with mock.patch.object(sequoia.time, "perf_counter", lambda: passes[target] + 0.1 * passes[draft]):
        first, *others = steps = assert_as_generate(decoder, prompt_of(12), max_new_tokens=90)
    assert (first.seconds, first.tree) == (0.0, NO_TREE)
    seconds = 1.1                       # the prompt's passes
    for step in others:
        assert step.seconds == pytest.approx(0.9 + 0.1 * step.tree.depth)
        seconds += step.seconds
    assert decoder.report == (90, len(steps), pytest.approx(seconds), chain(3))
    assert f": {90 / len(steps):.2f} tokens per step, {90 / seconds:.1f} per second" in str(decoder.report)

@quick
def test_a_folder_with_this_file_makes_generate_decode_with_trees(bundled, tmp_path, monkeypatch):
    target, draft = bundled
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    (tmp_path / "custom_generate").mkdir()
    shutil.copy(sequoia.__file__, tmp_path / "custom_generate" / "generate.py")
    given = dict(TOKENIZER("import os\n", return_tensors="pt"), max_new_tokens=20, tokenizer=TOKENIZER,
                 stop_strings=["("])
    steps = []
    out = target.generate(**given, custom_generate=str(tmp_path), trust_remote_code=True,
                          assistant_model=draft, tree=chain(3), on_step=steps.append)
    assert out.equal(target.generate(**given))
    assert max(step.tree.size for step in steps) == 4

# --- 13  Passes ---------------------------------------------------------------------------------------------
@quick
@pytest.mark.skipif(not sequoia.PACKS, reason="no bfloat16 here")
@torch.inference_mode()
def test_layers_are_packed_with_biases_and_once_if_shared_but_not_those_with_a_forward_of_their_own():
    """In bfloat16. The draft has the target's first layer, as in LayerSkip, and its head."""
    target, draft = pair = [model.bfloat16() for model in make_pair("qwen2")]
    first = target.model.layers[0]
    first.self_attn.q_proj.bias.data.normal_()
    changed(first.mlp.up_proj, forward=lambda self, x: 2 * torch.nn.Linear.forward(self, x))
    draft.model.layers = target.model.layers[:1]
    draft.lm_head = target.lm_head
    expected = [model(prompt_of(30)).logits for model in pair]
    for model in 2 * pair:                      # a second time does no harm
        assert hasattr(sequoia.pack(model), "_sequoia_pass")
    assert all(layer.weight.is_mkldnn for layer in target.modules() if type(layer) is torch.nn.Linear)
    for model, logits in zip(pair, expected):
        torch.testing.assert_close(model(prompt_of(30)).logits, logits, atol=0.1, rtol=0.1)
        assert_as_generate(Decoder(model, tree="none"), prompt_of(30), max_new_tokens=20)

@quick
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_trace_that_is_right_for_its_own_example_alone_is_given_up(dtype):
    def lost_writes(trace, store, *inputs):
        with mock.patch.object(torch.Tensor, "index_copy_", lambda stored, *_: stored):
            return model.forward_of(store, *inputs)

    def constant(trace, store, tokens, nodes, slots, positions, *places):
        return trace(store, tokens, nodes, slots, positions * 0 + 4, *places)

    def more_nodes(trace, *inputs):
        return trace(*inputs) * (1 + (len(inputs[2]) > 3))

    for spoilt in (lost_writes, constant, more_nodes, None):
        model = make_pair("llama")[0].to(dtype)
        model.forward_of = CachedModel(model).forward
        run_of = lambda trace: SimpleNamespace(forward=partial(spoilt, trace) if spoilt else trace)
        said = pytest.warns(UserWarning, match="cannot be traced") if spoilt else contextlib.nullcontext()
        with mock.patch.object(torch.jit, "freeze", run_of), said:
            sequoia.pack(model)
        assert hasattr(model, "_sequoia_pass") == (not spoilt)

@pytest.mark.skipif(not sequoia.PACKS, reason="no bfloat16 here")
def test_packing_that_changes_numbers_is_an_error_and_where_torch_cannot_pack_a_model_is_only_traced():
    def pack_wrongly(layer):
        layer.weight[0] *= 1 + 0.5 * (layer.out_features == 64)         # in one layer of fifteen

    with mock.patch.object(sequoia, "pack_linear", pack_wrongly):
        with pytest.raises(ValueError, match="numbers of LlamaForCausalLM.* load it again, without pack"):
            sequoia.pack(make_pair("llama")[0].bfloat16())
        with mock.patch.object(sequoia, "PACKS", False):
            assert hasattr(sequoia.pack(make_pair("llama")[0].bfloat16()), "_sequoia_pass")

@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text"])
def test_offloaded_output_is_the_same_also_after_a_pass_that_ctrl_c_broke_off(name, device):
    prompt = prompt_of(30).to(device)
    expected = [model.to(device)(prompt).logits for model in make_pair(name)]
    target, draft = pair = [sequoia.offload(model, device) for model in make_pair(name)]
    assert sequoia.offload(draft, device) is draft              # a second time does no harm
    *_, last = next(module for module in target.modules() if isinstance(module, torch.nn.ModuleList))
    home = {name: weight.data_ptr() for name, weight in target.named_parameters()}
    assert_as_generate(Decoder(*pair, (9, 4)), prompt, max_new_tokens=20)
    for register in (last.register_forward_pre_hook, last.register_forward_hook):
        with register(mock.Mock(side_effect=KeyboardInterrupt)), pytest.raises(KeyboardInterrupt):
            target(prompt)
        torch.testing.assert_close([model(prompt).logits for model in pair], expected)
    # At most the last layer's copy is left on the device.
    away = [name for name, weight in target.named_parameters() if weight.data_ptr() != home[name]]
    assert all(".1." in name for name in away)

def test_a_target_with_a_layer_on_a_disk_writes_generates_text_and_pack_leaves_that_layer_alone(tmp_path):
    pytest.importorskip("accelerate", reason="transformers needs accelerate for device maps")
    pair = make_pair("llama")
    pair[0].save_pretrained(tmp_path / "target")
    places = dict.fromkeys(["model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"], "cpu")
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    for dtype, tree in ((torch.float32, (9, 4)), (torch.bfloat16, "none")):
        mapped = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "target", dtype=dtype, device_map=places, offload_folder=tmp_path)
        assert_as_generate(Decoder(mapped, pair[1], tree), prompt_of(20), max_new_tokens=12)
        with pytest.warns(UserWarning, match="cannot be traced"):
            sequoia.pack(mapped)
        assert_as_generate(Decoder(mapped, pair[1], tree), prompt_of(20), max_new_tokens=12)

# --- Ranks that share a target ------------------------------------------------------------------------------
# What each of two ranks runs. They have other clocks and other random numbers; their drafts disagree, as if
# by rounding; and only rank 0 runs out of time. Where ranks wait for each other, they end after 100 seconds.
ON_A_RANK = """
import faulthandler, itertools, json, os, random, sys, types, torch, transformers, sequoia
faulthandler.dump_traceback_later(100, exit=True)
rank = int(os.environ["RANK"])
random.seed(rank)
torch.manual_seed(rank)
clock = itertools.accumulate(iter(random.random, None))
sequoia.time = types.SimpleNamespace(perf_counter=lambda: next(clock))
sequoia.TOKENS_FOR_TRIALS = 0, 0, 0
load = transformers.AutoModelForCausalLM.from_pretrained
target = sequoia.pack(load("target", distributed_config={"tp_plan": "auto"}))
draft = load("draft")
draft.lm_head.weight.data = draft.lm_head.weight.data.roll(rank, 0)
made = []
for tree, how in (("9x4", {}), ("auto", {"do_sample": True}), ("none", {"max_time": rank})):
    steps = []
    decoder = sequoia.Decoder(target, draft, tree, on_step=steps.append)
    text = decoder.generate(torch.arange(2, 12)[None], max_new_tokens=60, **how)[0].tolist()
    made.append([text, steps])
with open(f"{rank}.json", "w") as file:
    json.dump(made, file)
sys.exit(sequoia.main(["--tree", "9x4", "--max-new-tokens", "9"]))
"""

def test_ranks_that_share_a_target_take_the_same_steps_to_the_text_of_one_process(tmp_path):
    pytest.importorskip("accelerate", reason="transformers needs accelerate for tensor parallelism")
    pair = make_pair("llama")
    for model, name in zip(pair, ("target", "draft")):
        model.save_pretrained(tmp_path / name)
    (tmp_path / "on_a_rank.py").write_text(ON_A_RANK)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    given = dict(os.environ, PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    printed = subprocess.check_output([*torchrun, "on_a_rank.py"], cwd=tmp_path, env=given, text=True)
    assert printed.count("import os\n") == 1            # only rank 0 prints the command line's text
    made, others = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert made == others
    (greedy, _), (_, steps), (short, _) = made
    expected = plain_text(pair[0], torch.arange(2, 12)[None], max_new_tokens=60)
    assert greedy == expected[0].tolist()
    assert short == greedy[:11]
    assert len({tuple(tree) for tree, *_ in steps}) > 3                 # auto tried trees

# --- 14  The command line -----------------------------------------------------------------------------------
def run_main(capfd, *arguments):
    code = sequoia.main(list(arguments))
    out, err = capfd.readouterr()
    return code, out.removesuffix("\n"), err

@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Models of two layers with the bundled tokenizer: a good one, and others by what they have or lack."""
    root = tmp_path_factory.mktemp("models")
    target, _ = make_pair("llama", vocab_size=len(TOKENIZER), bos_token_id=None)
    for name in ("good", "chat", "more layers", "wider", "renamed"):
        target.save_pretrained(root / name)
        TOKENIZER.save_pretrained(root / name)
    for name, change in (("more layers", {"num_hidden_layers": 4}), ("wider", {"intermediate_size": 64})):
        path = root / name / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    path = root / "renamed" / "tokenizer.json"
    words = json.loads(path.read_text())
    ids = words["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    path.write_text(json.dumps(words))
    (root / "chat" / "chat_template.jinja").write_text(
        "{{ messages[0].role }}:{{ messages[0].content }}{% if add_generation_prompt %}<it>{% endif %}")
    return root

USUAL = ("--max-new-tokens", "16", "--prompt", "import ", "--dtype", "float32")

def test_what_is_printed_is_generates_text_and_on_a_terminal_alone_also_progress(bundled, capfd):
    transformers.utils.logging.enable_progress_bar()
    with mock.patch.object(sys.stderr, "isatty", lambda: True):
        run_main(capfd, "--top-p=2")
    assert transformers.utils.logging.is_progress_bar_enabled()
    ids = TOKENIZER("import ", return_tensors="pt").input_ids
    expected = TOKENIZER.decode(plain_text(bundled[0], ids, max_new_tokens=16)[0])
    for more in ([], ["--tree=none"], ["--tree=8x4", "--offload", "--compare"]):
        code, text, err = run_main(capfd, *USUAL, "--temperature", "0", *more)
        assert (code, text) == (0, expected)
        assert re.match(r"\ntokens 16, steps \d+, seconds ", err)
    _, ours, alone, ratio = map(float, re.findall(r"([\d.]+) (?:tokens per|per|times that)", err))
    assert "tree 8x4" in err and ratio == pytest.approx(ours / alone, rel=0.02)

def test_a_seed_names_the_text_with_a_fixed_tree_and_tokens_are_cut_only_as_the_options_say(folders, capfd):
    given = (*USUAL, f"--target={folders / 'good'}", f"--draft={folders / 'good'}", "--tree=8x4")
    with mock.patch.object(sequoia, "Sampling", side_effect=Sampling) as made:
        texts = [run_main(capfd, *given, "--seed", seed)[1] for seed in "001"]
        run_main(capfd, *given, "--temperature=0.5", "--top-k=7", "--top-p=0.9")
    assert texts[0] == texts[1] != texts[2]
    plain, *_, (temperature, top_k, top_p) = [call.args[1] for call in made.call_args_list]
    assert (temperature.temperature, top_k.top_k, top_p.top_p) == (0.5, 7, 0.9)
    assert [type(one) for one in plain] == [Temperature]

def test_explain_draws_trees_of_the_drafts_first_choices_and_writes_the_same_greedy_text(bundled, capfd):
    given = (*USUAL, "--max-new-tokens=5", "--tree=8x4")
    greedy = run_main(capfd, *given, "--temperature=0")[1]
    out = run_main(capfd, *given, "--temperature=0.01", "--explain")[1]                 # nearly greedy
    parts = re.split(r"^adds (.*)\n+", out + "\n", flags=re.MULTILINE)
    steps = parts[:-1:2]
    added = "".join(map(ast.literal_eval, parts[1::2]))
    assert ("import " + added).startswith(greedy)
    assert 2 <= len(steps) <= 5
    drawn = r"(    ){0,3}['\"].*['\"]\n"
    tried = r".*: R .* / D .* = .*: (accepted|rejected)\n"
    for step in steps:
        assert re.fullmatch(f"({drawn}){{8}}({tried})*.* is drawn from what is left, with R 1.00\n", step)
    children = re.findall(r"^    (\S.*)", steps[0], flags=re.MULTILINE)
    ids = TOKENIZER("import ", return_tensors="pt").input_ids
    best = bundled[1](ids).logits[0, -1].topk(len(children)).indices
    assert len(children) > 1
    assert children == [repr(TOKENIZER.decode(token)) for token in best]

def test_chat_puts_the_prompt_through_the_template_and_prints_the_answer_alone(folders, capfd):
    chat = f"--target={folders / 'chat'}"
    code, text, _ = run_main(capfd, *USUAL, chat, "--tree=none", "--temperature=0", "--chat")
    target = transformers.AutoModelForCausalLM.from_pretrained(folders / "chat")
    ids = TOKENIZER("user:import <it>", return_tensors="pt").input_ids
    answer = plain_text(target, ids, max_new_tokens=16)[0, ids.shape[1] :]
    assert (code, text) == (0, TOKENIZER.decode(answer, skip_special_tokens=True))

# The arguments after those for a good pair, and the words of the one line that they cause.
BAD_REQUESTS = {
    "--top-p=1.5": "--top-p", "--top-p=0": "top-p", "--temperature=-1": "at least", "--top-k=-4": "at least",
    "--max-new-tokens=0": "max_new", "--temperature=nan": "at least", "--tree=16x0": "not a Tree.*16x0",
    "--prompt=": "no tokens", "--prompt=\udcff": "surrogates", "--seed=123456789012345678901": "[Oo]verflow",
    "--tree=16x1": "too large", "--tree=1024x2": "too large", "--tree=banana": "LEVELS.*banana",
    "--tree=5x16": "levels <= nodes", "--tree=1025x7": "<= 1024", "--method=magic": "sequoia, spec",
    f"--draft={ROOT / 'tiny' / 'draft'}": "give the target's --draft", "--device=fast": "fast",
    "--dtype=int7": "bfloat16", "--chat": "chat template",
    "--explain --top-k=5": "no .*-k", "--explain --method=topk": "needs", "--explain --compare": "no --comp",
    "--explain --temperature=0": "> 0", "--target=/no/such": "/no/such",
    "--target=FOLDER/more layers": "18 weights missing or of other shapes: .*layers.[23]",
    "--draft=FOLDER/wider": "6 weights missing.* shapes"}

@pytest.mark.parametrize("words", some_quick(BAD_REQUESTS, *[*BAD_REQUESTS][:6], "--draft=FOLDER/wider"))
def test_a_bad_request_is_one_line_and_exit_code_2_mostly_before_weights_are_loaded(folders, capfd, words):
    good = [f"--target={folders / 'good'}", f"--draft={folders / 'good'}", "--tree=3x2", "--max-new-tokens=4"]
    given = [word.replace("FOLDER", str(folders)) for word in re.split(" (?=--)", words)]
    with mock.patch.object(sequoia, "load", wraps=sequoia.load) as load:
        code, out, err = run_main(capfd, *good, *given)
    assert (code, len(err.splitlines()), load.called) == (2, 1, "FOLDER" in words)
    assert re.match(f"sequoia.py: \\w+: .*{BAD_REQUESTS[words]}", err)

def test_the_exit_code_is_2_for_what_the_parser_refuses_and_130_after_ctrl_c(capfd):
    for words, code in (("--seed=x", "2"), ("--magic", "2"), ("--help", "0")):
        with pytest.raises(SystemExit, match=code):
            sequoia.main([words])
        out, err = capfd.readouterr()
        assert len(err.splitlines()) == (code == "2")
    for name, default in sequoia.decode_prompt.__kwdefaults__.items():          # out is now the help
        told, = re.findall(rf"^    (?:--[\w-]+, )?--{name.replace('_', '-')}[ ,].*", out, re.MULTILINE)
        assert default is False or name in "target draft prompt device dtype" or f"({default}" in told
    with mock.patch.object(Decoder, "generate", side_effect=KeyboardInterrupt):
        assert run_main(capfd, "--tree=none") == (130, "", "")
    with mock.patch.object(sys, "argv", ["sequoia.py", "--top-p=2"]), pytest.raises(SystemExit, match="2"):
        runpy.run_path(sequoia.__file__, run_name="__main__")

@pytest.mark.parametrize("words", ["--tree=none", "--explain"])
def test_a_closed_pipe_is_no_error(words, capfd):
    reader, writer = os.pipe()
    os.close(reader)
    with pytest.raises(BrokenPipeError), open(writer, "w") as pipe, mock.patch.object(sys, "stdout", pipe):
        code, _, err = run_main(capfd, words, "--max-new-tokens=2")
        left = sys.stdout                       # which Python would write to at its end
    assert (code, err, left) == (0, "", None)

@quick
def test_a_copy_is_silent_reads_no_environment_and_says_what_it_lacks(capfd, monkeypatch, tmp_path):
    path = shutil.copy(sequoia.__file__, tmp_path / "copied.py")
    # torch itself asks the environment how to look for a GPU.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with mock.patch.object(os, "environ", None), warnings.catch_warnings(action="error"):
        copied = runpy.run_path(path)
    assert capfd.readouterr() == ("", "")
    assert copied["main"]([]) == 2
    assert str(tmp_path / "tiny" / "target") in capfd.readouterr().err

def test_the_promised_names_and_the_licence_are_there_and_the_docstrings_examples_print_what_is_shown():
    promised = """Decoder METHODS NONE NO_TREE Planner Step Tree chain expected_tokens generate k_ary offload
        optimal_tree pack plan sample_and_verify sequences step_plainly verify_one_node"""
    assert set(sequoia.__all__) == set(promised.split())
    assert "MIT" in sequoia.__doc__
    failed, attempted = doctest.testmod(sequoia)
    assert failed == 0 < attempted

# --- bench.py -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", METHODS)
def test_the_benchs_chance_of_each_child_is_that_of_all_outcomes(name):
    method = METHODS[name]
    run = EveryRun()
    for seed, tokens in itertools.product(range(4), ([2, 0, 1], [2, 0, 2])):
        if name in (*BY_RATIOS[1:], "naive") or tokens[2] == 1:     # others never draw a token twice
            p, q = random_rows(1, 4, seed=seed).log()
            tokens = torch.tensor([tokens])
            found = torch.zeros(4, dtype=torch.float64)
            for chance, rank in run.results(
                    lambda: method.verify(method.target_P(p, run.uniform), q, tokens, run)[0].item()):
                found[rank] += chance
            assert bench.chances_of(method, p, q, tokens)[0].tolist() == pytest.approx(found[:3].tolist())

def test_an_estimate_is_a_ratio_of_sums_with_the_interval_of_the_jackknife():
    """That of a mean is Student's: 2.262 times the standard error of ten numbers."""
    mine, other = np.array([[1.0], [2.0], [3.0]]), np.array([[2.0], [4.0], [6.0]])
    assert bench.over(mine, other) == pytest.approx((2.0, 0.0))
    column = np.random.default_rng(0).random((10, 1))
    mean = bench.estimate(lambda total, count: total[0] / count[0], column, np.ones((10, 1)))
    assert mean.value == pytest.approx(column.mean())
    assert bench.show(bench.Estimate(1.0, 0.0)) == "1.00"
    assert bench.show(bench.Estimate(1.0, 0.25)) == "1.00 ± 0.25"
    assert mean.half == pytest.approx(2.262 * column.std(ddof=1) / 10**0.5, rel=0.01)

def test_a_contests_verdict_names_the_fastest_and_keeps_the_ratios_that_readme_quotes(capsys):
    report = bench.Report(None)
    paces = {"generate": 8.0, "no tree": 4.0, "sequences": 1.0, "sequoia": 2.0}
    best = {name: np.array([[pace, 10, 5]] * 3) for name, pace in paces.items()}
    bench.verdict(best, "greedy", report)
    said = capsys.readouterr().out
    assert "the fastest was `sequences`, 8.00 times as fast as `generate` and 2.00 times" in said
    assert "`sequoia`. `sequoia` was 2.00 times as fast as no tree. So this draft pays" in said
    assert report.numbers["greedy/sequoia / sequences"].value == 0.5
    assert report.numbers["greedy/sequoia"].value == 4.0
    assert bench.with_numbers("<!--greedy/pace--><!---->", report.numbers) == "<!--greedy/pace-->1<!---->"

@quick
def test_readmes_numbers_are_those_that_the_bench_wrote_down_and_a_changed_digit_shows():
    text = (ROOT / "README.md").read_text("utf-8")
    numbers = json.loads((ROOT / "figures" / "numbers.json").read_text("utf-8"))
    assert bench.with_numbers(text, numbers) == text
    for name, shown in re.findall(r"(<!--[^>]+-->)([^<]*\d[^<]*)<!---->", text):
        other = shown.translate(str.maketrans("0123456789", "1234567890"))
        changed = text.replace(f"{name}{shown}<!---->", f"{name}{other}<!---->")
        assert bench.with_numbers(changed, numbers) == text != changed

def test_the_readmes_examples_run_in_order_and_print_what_is_shown(monkeypatch, capsys, tmp_path):
    """Among files as a clone has them. A plain block right behind an example is what it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    for name in ("tiny", "sequoia.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    without_times = partial(re.sub, r"\d+\.\d+(?= (and \d+\.\d+ )?seconds)", "...")
    text = (ROOT / "README.md").read_text("utf-8")
    blocks = re.findall(r"```python\n(.*?)```(?:\n\n```\n(.*?)```)?", text, re.DOTALL)
    assert blocks
    namespace = {}
    for block, shown in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
        assert without_times(capsys.readouterr().out) == without_times(shown) or not shown
