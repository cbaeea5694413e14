"""The tables and figures of the paper, measured here, each by one command:

    python bench.py trees           # token trees, their expected tokens by size, what finding them costs      Figure 1
    python bench.py verification    # rejection rate by number of children, for every method                section 3.2
    python bench.py scaling         # tokens per step by tree size, in real decoding                        section 5.2
    python bench.py speed           # side by side with transformers: tokens per step, ms per token             Table 1
    python bench.py planner         # the planner's promises against what was achieved                        section 4
    python bench.py offload         # a target that streams from host memory or disk                          Table 2
    python bench.py all --quick     # everything, in under ten minutes on two cores

`speed --synthetic 7b-68m` needs no weights: it makes a pair of the paper's shapes, with its acceptance, on the spot.
Every command takes any pair (`--target --draft`, by default the bundled one) and any text (`--prompts`), prints tables
in Markdown and ends with one line of JSON. With `--figures` it also draws `figures/COMMAND.png`; needs matplotlib.

Rules of the comparison: the same prompts and weights for all, interleaved, so that a slow minute of the machine hits
all alike; medians; transformers' own methods on the models as transformers loads them, each with its best settings.
"""
import argparse
import contextlib
import copy
import functools
import importlib.util
import itertools
import json
import math
import os
import re
import resource
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import safetensors.torch
import torch
import transformers
from tqdm import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig, TemperatureLogitsWarper, TopPLogitsWarper

import sequoia

HERE = Path(__file__).parent


# ----------------------------------------------------------------------------------------------------------------------
# 1  Toolbox: tables, figures, progress, time


COLOURS = {"sequoia": "#15803d", "specinfer": "#ea580c", "spectr": "#7c3aed", "naive": "#a16207", "topk": "#2563eb",
           "traversal": "#0d9488", "k-ary": "#0891b2", "chain": "#be185d", "generate": "#6b7280", "assisted": "#dc2626", "lookup": "#ca8a04",
           "plain": "#9ca3af", "best": "#111827", "memory floor": "#111827"}
TREE_OF = {"sequences": "specinfer", "sequences 5x8": "specinfer", "16 sequences": "specinfer",
           "k sequences": "specinfer", "2-ary": "k-ary", "paper's tree": "sequoia", "too large": "sequoia"}


def colour(name: str) -> str:
    """One colour for each method, in every figure; a tree has that of the method it is the tree of."""
    return COLOURS.get(TREE_OF.get(name, name), "#d1d5db")


def table(title: str, rows: list[dict]) -> list[dict]:
    """Prints rows, dictionaries with the same keys, as a Markdown table under its title, and returns them."""
    def show(value):
        if isinstance(value, float):
            return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"
        return "-" if value is None else str(value)

    columns = [[key, *(show(row[key]) for row in rows)] for key in rows[0]]
    widths = [max(map(len, column)) for column in columns]
    columns = [[cell.rjust(width) if i else cell.ljust(width) for cell in column]
               for i, (column, width) in enumerate(zip(columns, widths))]
    header, *lines = zip(*columns)
    rule = ["-" * (width - 1) + (":" if i else "-") for i, width in enumerate(widths)]
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, rule, *lines)]
    print(f"\n**{title}**\n", *lines, sep="\n", flush=True)
    return rows


def progress(steps, label: str):
    """A progress bar on standard error, while it is a terminal."""
    return tqdm(steps, desc=label, leave=False, disable=None)


def pyplot():
    """Matplotlib, which only the figures need."""
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError:
        raise ValueError("--figures needs matplotlib, which is not installed: pip install matplotlib") from None
    matplotlib.use("Agg")
    matplotlib.rcParams.update({
        "font.size": 14, "lines.linewidth": 2.5, "axes.spines.top": False, "axes.spines.right": False,
        "axes.grid": True, "grid.alpha": 0.25, "legend.frameon": False, "legend.fontsize": 12})
    return importlib.import_module("matplotlib.pyplot")


@contextlib.contextmanager
def figure(name: str, panels: int = 1, share: bool = False):
    """A list of axes to draw on, which are then written to figures/NAME.png."""
    fig, axes = pyplot().subplots(1, panels, figsize=(2 + 4.6 * panels, 4.8), sharey=share, squeeze=False,
                                  layout="constrained")
    yield list(axes[0])
    (HERE / "figures").mkdir(exist_ok=True)
    fig.savefig(HERE / "figures" / f"{name}.png", dpi=150)
    print(f"\nwritten: figures/{name}.png", flush=True)


def draw_curves(axes, rows: list[dict], x: str, names: dict, label: str):
    """Columns of a table, with a line style each, against its column x, on a logarithmic axis."""
    for name, style in names.items():
        points = [(row[x], row[name]) for row in rows if row[name] is not None]
        axes.plot(*zip(*points), style, color=colour(name), label=name)
    axes.set_xscale("log", base=2)
    ticks = [row[x] for row in rows][:: 2 if len(rows) > 7 else 1]
    axes.set_xticks(ticks, ticks)
    axes.minorticks_off()
    axes.set_xlabel(label)


def draw_by_temperature(name: str, rows: list[dict], share: bool = False):
    """Axes to draw on, one after the other, for the rows of each temperature, which come with them."""
    temperatures = sorted({row["temperature"] for row in rows})
    with figure(name, panels=len(temperatures), share=share) as axes:
        for axis, temperature in zip(axes, temperatures):
            axis.set_title(named(temperature))
            yield axis, [row for row in rows if row["temperature"] == temperature]


def named(temperature: float) -> str:
    return f"temperature {temperature:g}" if temperature else "greedy"


def timed(function):
    """The seconds that a call takes, the device's work included, and what it returns."""
    synchronise()
    start = time.perf_counter()
    result = function()
    synchronise()
    return time.perf_counter() - start, result


def synchronise():
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


# ----------------------------------------------------------------------------------------------------------------------
# 2  Pairs of models, and texts


class Pair:
    """A target and a draft as transformers loads them, for its own methods, and `fast`: the same two made ready for
    sequoia.py, on a CPU copies with packed weights, on a GPU compiled if that is asked for."""

    def __init__(self, target, draft, compiled=False):
        self.target, self.draft, self.compiled = target.eval(), draft.eval(), compiled
        for model in (target, draft):                        # all contenders decode to the same length, past any EOS
            model.config.eos_token_id = model.generation_config.eos_token_id = None
            model.generation_config.pad_token_id = 0

    @functools.cached_property
    def fast(self):
        pair = self.target, self.draft
        if self.target.device.type == "cpu":
            return tuple(sequoia.pack(copy.deepcopy(model)) for model in pair)
        return tuple(map(sequoia.pack, pair)) if self.compiled else pair             # transformers' own passes stay as they are


def pair_of(args) -> Pair:
    """The pair that the command line names, loaded once."""
    if not hasattr(args, "pair"):
        args.tokenizer = sequoia.load_tokenizer(args)
        load = functools.partial(sequoia.load, args=args, say=lambda text: None, packed=False)
        args.pair = Pair(load(args.target), load(args.draft), args.compile)
    return args.pair


def texts(args, count: int, length: int) -> list[torch.Tensor]:
    """`count` pieces of `length` tokens, (1, length) each, always the same: from the middle of files of the standard
    library that the bundled pair was not trained on (several of a file where there are too few), or evenly spaced from
    the file given."""
    if args.prompts:
        ids = args.tokenizer(Path(args.prompts).read_text(encoding="utf-8"))["input_ids"]
        starts, sources = np.linspace(0, len(ids) - length, count), [ids] * count
        if len(ids) < length + count:
            raise ValueError(f"{args.prompts} has {len(ids)} tokens; {count} texts of {length} need {length + count}")
    else:
        from tiny.train import source_files
        files = [path.read_text(encoding="utf-8", errors="ignore") for path in source_files(held_out=True)]
        files = [text for text in files if len(text) > 12 * length]                              # long enough in tokens
        each = -(-count // len(files))                                               # pieces of a file
        sources = [args.tokenizer(files[i // each * len(files) * each // count])["input_ids"] for i in range(count)]
        starts = [max(0, len(ids) - length) * (i % each + 1) / (each + 1) for i, ids in enumerate(sources)]
    pieces = [ids[int(start) : int(start) + length] for ids, start in zip(sources, starts)]
    return [torch.tensor([piece], device=args.device) for piece in pieces]


@torch.no_grad()
def teacher_forced(pair: Pair, pieces, keep: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Both models' logits at the last `keep` positions of each text, (positions, V) float32; V: tokens both know."""
    logits = [torch.cat([model(piece).logits[0, -keep:].float() for piece in progress(pieces, "reading")])
              for model in (pair.target, pair.draft)]
    known = min(x.shape[1] for x in logits)
    return logits[0][:, :known], logits[1][:, :known]


def probabilities(logits, temperature: float, top_p: float = 1.0):
    return TopPLogitsWarper(top_p)(None, TemperatureLogitsWarper(temperature)(None, logits)).softmax(dim=1)


# ----------------------------------------------------------------------------------------------------------------------
# 3  trees: what the dynamic program finds, and what that costs (sections 3.1 and 5.2, Figure 1)


PAPER_RATES = [0.7732, 0.1039, 0.0402, 0.0206, 0.0128, 0.0081, 0.0064, 0.0043, 0.0035, 0.0026, 0.0025, 0.0021, 0.0016,
               0.0014, 0.0010, 0.0010, 0.0010, 0.0007, 0.0007, 0.0006, 0.0007, 0.0006, 0.0004, 0.0004, 0.0005, 0.0006,
               0.0004, 0.0003, 0.0002, 0.0004, 0.0001]            # Llama-3-70B with the 8B as its draft, CNN Daily Mail


def trees(args):
    """Trees for the paper's acceptance rates, their expected tokens by size and shape, the dynamic program's cost."""
    drawn = [sequoia.optimal_tree(PAPER_RATES, size, min(size, 12)) for size in args.nodes]
    for tree in drawn:
        expected = sequoia.expected_tokens(tree, PAPER_RATES)
        print(f"\n**{tree.size} nodes on at most 12 levels: {expected:.2f} expected tokens**\n\n```\n{tree}\n```")
    largest = 1024 if args.quick else 4096
    costs = [cost_of_construction(*shape) for shape in progress([(768, 18, 31), (largest, 24, 31)], "constructing")]
    table("The dynamic program: time and peak memory", costs)
    shapes = [(512, 12, 16), (256, 12, 16), (1024, 12, 16), (512, 6, 16), (512, 24, 16), (512, 12, 8), (512, 12, 31)]
    growth = [min((cost_of_construction(*shape) for _ in range(3)), key=lambda cost: cost["seconds"])
              for shape in progress(shapes, "growth")]
    growth = [{**cost, "times the first": cost["seconds"] / growth[0]["seconds"]} for cost in growth]
    table("Its growth with n, d and b", growth)

    best = sequoia.expected_tokens_table(PAPER_RATES, largest, 24).max(axis=1)                            # (size + 1,)
    rows = []
    for n in [2**i for i in range(3, largest.bit_length())]:
        by_k = {k: sequoia.expected_tokens(sequences_within(n, k), PAPER_RATES) for k in (1, 2, 4, 8, 16, 32) if k < n}
        rows.append({"nodes": n, "sequoia": float(best[: n + 1].max()), "k sequences": max(by_k.values()),
                     "16 sequences": by_k.get(16), "2-ary": full_tree(2, n), "4-ary": full_tree(4, n),
                     "chain": by_k[1]})
    table("Expected tokens per step by tree size; k sequences: the best k", rows)
    if args.figures:
        with figure("trees", panels=2) as (left, right):
            draw_curves(left, rows, "nodes", {"sequoia": "-", "k sequences": "-", "16 sequences": ":", "2-ary": "-",
                                              "chain": "-"}, "tree size (nodes)")
            left.set_ylabel("expected tokens per step")
            left.legend()
            draw_tree(right, drawn[-1])
    return {"cost": costs, "growth": growth, "expected_tokens": rows}


def sequences_within(n: int, k: int) -> sequoia.Tree:
    """k sequences of equal length, of n nodes at most with the root."""
    return sequoia.sequences(k, (n - 1) // k)


def full_tree(k: int, n: int) -> float:
    """The expected tokens of the largest full k-ary tree of at most n nodes."""
    depth = next(d for d in range(1, n + 1) if sum(k**level for level in range(d + 1)) > n)
    return sequoia.expected_tokens(sequoia.k_ary(k, depth), PAPER_RATES)


def cost_of_construction(n: int, d: int, b: int) -> dict:
    """Timed by itself, then run again to watch its memory, which takes time of its own."""
    run = functools.partial(sequoia.expected_tokens_table, PAPER_RATES, n, d, b)
    seconds, _ = timed(run)
    tracemalloc.start()
    run()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {"nodes n": n, "levels d": d, "children b": b, "seconds": seconds, "peak MB": peak / 1e6}


def draw_tree(axes, tree):
    leaves, left = [0] * tree.size, [0.0] * tree.size                  # each subtree is as wide as its number of leaves
    for node in reversed(range(tree.size)):
        leaves[node] = sum(leaves[child] for child in tree.children[node]) or 1
    for children, start in zip(tree.children, left):
        for child in children:
            left[child], start = start, start + leaves[child]
    x = [start + width / 2 for start, width in zip(left, leaves)]
    for edge in list(enumerate(tree.parents))[1:]:
        axes.plot([x[node] for node in edge], [tree.depths[node] for node in edge], color="#9ca3af", lw=1, zorder=1)
    axes.scatter(x, tree.depths, s=26, color=colour("sequoia"), zorder=2)
    axes.set(ylabel="level", title=f"{tree.size} nodes on {tree.depth} levels", xticks=[])
    axes.invert_yaxis()


# ----------------------------------------------------------------------------------------------------------------------
# 4  verification: rejection rates (sections 3.2 and 5.3)


METHODS = ("sequoia", "specinfer", "spectr", "naive", "topk")
CHILDREN = (1, 2, 4, 8, 16, 32)


def verification(args):
    """How often all k children are rejected, for each method, temperature and top-p, and how often they must be."""
    temperatures = args.temperatures or [0.2, 0.6, 1.0]
    target, draft = teacher_forced(pair_of(args), texts(args, 1 if args.quick else 4, 256), keep=128)
    generator = torch.Generator(args.device).manual_seed(args.seed)
    curves = {}                                                             # (temperature, top-p): {method: rates by k}
    cuts = (1.0, 0.9) if args.quick else (1.0, 0.9, 0.8)
    for temperature, top_p in progress(list(itertools.product(temperatures, cuts)), "rejection rates"):
        P, Q = (probabilities(logits, temperature, top_p) for logits in (target, draft))
        Q = 0.999 * Q + 0.001 * probabilities(draft, temperature)           # as sequoia.Decoder.draft_probs
        curves[temperature, top_p] = {name: rejection_rates(name, P, Q, CHILDREN, generator) for name in METHODS}
        curves[temperature, top_p]["best"] = [least_rejection_independent(P, Q, k) for k in CHILDREN]
    rows = [{"temperature": t, "top-p": p, "method": name, "exponent": power_law(rates),
             **{f"k = {k}": rate for k, rate in zip(CHILDREN, rates)}}
            for (t, p), by_method in curves.items() for name, rates in by_method.items()]
    table(f"Rejection rate of k children at {len(target)} positions; exponent: b in a fit to a / k^b; best: the least "
          f"that any rule could reject, given independent children", rows)
    small = rejections_of_six(target, draft, generator)
    table("The same over 6 tokens, the likeliest of each position, renormalised, at temperature 1; best: the least "
          "that any rule could reject, given independent children or children drawn without replacement", small)
    if args.figures:
        with figure("verification", panels=2, share=True) as axes:                  # two, to be read at half a page's width
            axes[0].figure.set_size_inches(8.4, 4.6)
            for axis, temperature in zip(axes, (min(temperatures), max(temperatures))):
                by_k = [{"k": k, **dict(zip(curves[temperature, 1.0], rates))}
                        for k, rates in zip(CHILDREN, zip(*curves[temperature, 1.0].values()))]
                draw_curves(axis, by_k, "k", dict.fromkeys(METHODS, "-") | {"best": "--"}, "children k")
                axis.lines[-1].set_label("best, if independent")
                axis.set(title=named(temperature), yscale="log")
                axis.set_yticks([0.1, 0.2, 0.5, 1], ["0.1", "0.2", "0.5", "1"])
                axis.minorticks_off()
            axes[0].set_ylabel("chance that all are rejected")
            axes[0].legend(loc="lower left")
    return {"positions": len(target), "rejection": rows, "six_tokens": small} | traversal_gains(args)


def rejection_rates(name: str, P, Q, ks, generator, repeats: int = 16) -> list[float]:
    """The chance that all of k children are rejected, for each k: the mean over positions, and over some draws of the
    proposals, of the product of 1 - ratio over the children: the accept tests are exact. P, Q: (positions, V)."""
    method, rows, total = sequoia.METHODS[name], max(1, 2**18 // P.shape[1]), torch.zeros(max(ks), device=P.device)
    for p, q in zip((P.repeat(repeats, 1)).split(rows), Q.repeat(repeats, 1).split(rows)):
        tokens = method.propose(q, max(ks), generator)                                                       # (rows, k)
        # subtle: only SpecTr's ratios depend on how many children there are; those of the others are there for every k
        for k in ks if name == "spectr" else ks[-1:]:
            ratios, _ = method.ratios(p, q, tokens[:, :k], [len(p)] * k, None)
            rejected = (1 - ratios).clamp(min=0).cumprod(dim=1).sum(dim=0)                                        # (k,)
            total[k - 1 if name == "spectr" else slice(None)] += rejected[-1] if name == "spectr" else rejected
    return [(total[k - 1] / (repeats * len(P))).item() for k in ks]


def power_law(rates) -> float | None:
    """b in r_k = a / k^b, by least squares on the logarithms (Definition 3.6)."""
    points = [(k, rate) for k, rate in zip(CHILDREN, rates) if rate > 1e-6]
    return float(-np.polyfit(*np.log(np.array(points).T), 1)[0]) if len(points) > 1 else None


# The best that any verification rule can do is a transport problem: of each set of children's chance as much as can be
# goes to tokens in the set, and no token gets more than P. That is a linear program, and by max-flow = min-cut what is
# left over, the rejection rate, is the largest excess of a set A of tokens,
#
#     max over A of  Pr(all children in A) - P(A),                       for one child the distance ||P - Q||_1 / 2.


def least_rejection_independent(P, Q, k: int) -> float:
    """With independent children the excess is Q(A)^k - P(A), a convex function of the point (P(A), Q(A)), so the best A
    is an extreme one: the tokens with Q / P above a threshold. Exact for every V. The mean over (positions, V)."""
    order = torch.where(Q > 0, Q / P, 0).argsort(dim=1, descending=True)
    P_of_A, Q_of_A = (x.double().gather(1, order).cumsum(dim=1) for x in (P, Q))                        # (positions, V)
    return (Q_of_A**k - P_of_A).amax(dim=1).clamp(min=0).mean().item()


def least_rejection_different(P, Q, k: int) -> float:
    """The same for children drawn without replacement, by trying all 2^V sets. The mean over (positions, V)."""
    P, Q, V = P.double().cpu(), Q.double().cpu(), P.shape[1]
    member = ((torch.arange(2**V)[:, None] >> torch.arange(V)) & 1).bool()                                # (2^V, V): A
    inside = torch.zeros(len(P), 2**V, dtype=torch.double)
    for draws in itertools.permutations(range(V), k):
        others = [token for token in range(V) if token not in draws]
        left = Q[:, [*draws, *others]].flip(1).cumsum(dim=1).flip(1)[:, :k]        # summed, as 1 - what is drawn would cancel
        chance = torch.where(left > 0, Q[:, draws] / left, 1 / (V - torch.arange(k))).prod(dim=1)        # (positions,)
        inside += chance[:, None] * member[:, draws].all(dim=1)
    return (inside - P @ member.T.double()).amax(dim=1).clamp(min=0).mean().item()


def rejections_of_six(target_logits, draft_logits, generator) -> list[dict]:
    P, Q = probabilities(target_logits, 1.0), probabilities(draft_logits, 1.0)
    likeliest, ks = (P + Q).topk(6, dim=1).indices, (1, 2, 3)
    P, Q = (x.gather(1, likeliest) / x.gather(1, likeliest).sum(dim=1, keepdim=True) for x in (P, Q))
    rates = {name: rejection_rates(name, P, Q, ks, generator, repeats=50) for name in METHODS}
    rates["best, independent"] = [least_rejection_independent(P, Q, k) for k in ks]
    rates["best, different"] = [least_rejection_different(P, Q, k) for k in ks]
    return [{"method": name, **{f"k = {k}": rate for k, rate in zip(ks, row)}} for name, row in rates.items()]


# Walking from the root against traversal from the leaves, on the same trees: the same tokens with the same probabilities
# of both models. What each would yield is not drawn but computed, and so exact for the tree at hand; only the texts, and the
# draft's proposals, are samples. What was really decoded stands beside it.


class Onlooker:
    """A method that decodes like its leader, and at every step notes what each of EXPECTED says of this step's tree."""

    def __init__(self, leader: str):
        self.leader, self.propose = sequoia.METHODS[leader], sequoia.METHODS[leader].propose
        self.expected, self.inputs = [], []                                            # of every step, of the first few

    def verify_tree(self, layout, tokens, target_probs, draft_probs, *args):
        everywhere = target_probs(range(layout.tree.size))                                                 # (size, V)
        self.expected.append([expected(layout, tokens, everywhere, draft_probs) for expected in EXPECTED.values()])
        if len(self.inputs) < 8:
            self.inputs.append((layout, tokens.clone(), target_probs, draft_probs))
        return self.leader.verify_tree(layout, tokens, target_probs, draft_probs, *args)


def expected_of_walk(layout, tokens, target_probs, draft_probs) -> float:
    """The tokens that a walk from the root yields on average: the chances to reach each node, summed."""
    nodes, child, exists, children, with_child = layout.inner
    proposed = torch.where(child >= 0, tokens[child], -1)
    ratios, _ = sequoia.METHODS["sequoia"].ratios(target_probs[nodes], torch.cat(draft_probs)[layout.row], proposed,
                                                  with_child, None)                                        # (nodes, k)
    rejected = (1 - ratios).clamp(min=0)
    tried = torch.cat([torch.ones_like(rejected[:, :1]), rejected.cumprod(dim=1)[:, :-1]], dim=1)
    accepted = torch.ones_like(target_probs[:, 0]).scatter(0, children, (tried * (1 - rejected)).flatten()[exists])
    return torch.where(layout.tree.mask.to(accepted.device), accepted, 1).prod(dim=1).sum().item()


def expected_of_traversal(layout, tokens, target_probs, draft_probs) -> float:
    """The tokens that traversal yields on average: each node's depth + 1 times the chance that it is the first to accept."""
    mass = sequoia.METHODS["traversal"].sweep(layout, tokens, target_probs, draft_probs)[0][layout.post_order]
    none_before = torch.cat([torch.ones_like(mass[:1]), (1 - mass).cumprod(dim=0)[:-1]])
    return (mass * none_before * (layout.depth[layout.post_order] + 1)).sum().item()


EXPECTED = {"sequoia": expected_of_walk, "traversal": expected_of_traversal}


def traversal_gains(args):
    """Tokens per step of both on the same trees, by tree size and temperature, and the milliseconds of each."""
    pair, temperatures = pair_of(args), args.temperatures or ([0.6, 1.0] if args.quick else [0.2, 0.6, 0.8, 1.0, 1.2])
    sizes, prompts = (8, 48) if args.quick else (8, 16, 32, 48, 64, 128, 256), texts(args, 2 * args.count, 128)
    rows, inputs, middle = [], {}, temperatures[len(temperatures) // 2]
    for temperature in temperatures:
        planner = sequoia.Planner()                                        # learns the rates from every other prompt
        torch.manual_seed(args.seed)
        for prompt in progress(prompts[1::2], f"acceptance, {named(temperature)}"):
            ours(pair, temperature, "32x8", planner=planner)(prompt, args.new_tokens)
        rates = planner.acceptance.rates()
        for size in sizes:
            tree, expected, decoded = sequoia.optimal_tree(rates, size, min(size, 16)), [], {name: [] for name in EXPECTED}
            for prompt in progress(prompts[::2], f"{named(temperature)}, {size} nodes"):
                onlookers = {name: Onlooker(name) for name in EXPECTED}
                for name, onlooker in onlookers.items():
                    decoded[name] += watch(args, prompt, temperature, tree, onlooker)
                expected.append(np.sum([step for one in onlookers.values() for step in one.expected], axis=0))
            if temperature == middle:
                inputs[size] = onlookers["traversal"].inputs
            steps, (gain, error) = sum(map(len, decoded.values())), gain_of_second(expected)
            rows.append({"temperature": temperature, "nodes": size, "levels": tree.depth, "steps": steps,
                         **dict(zip(EXPECTED, (np.sum(expected, axis=0) / steps).tolist())),
                         "gain, %": 100 * gain, "+-": 100 * error,
                         **{f"{name} decoded": float(np.mean(lengths)) for name, lengths in decoded.items()}})
    table(f"Tokens per step on the same trees, {args.count} prompts: expected over the verification's random numbers; +-: "
          f"half the gain's 95% interval, by prompt; decoded: achieved, each on texts of its own, so far noisier", rows)
    times = [{"nodes": size, "levels": steps[0][0].tree.depth, **milliseconds(steps)} for size, steps in inputs.items()]
    table(f"Milliseconds of verifying one tree, {named(middle)}, medians; static: the program of fixed shapes that a CUDA "
          f"graph holds, here without one", times)
    if args.figures:
        draw_gains(rows)
    return {"traversal": rows, "milliseconds": times}


def watch(args, prompt, temperature: float, tree, onlooker) -> list[int]:
    """Decodes a prompt under an onlooker's eyes, half as long as others do, since it takes two; the tokens of every step."""
    steps, (target, draft) = [], pair_of(args).fast
    torch.manual_seed(args.seed)
    with mock.patch.dict(sequoia.METHODS, watched=onlooker):
        sequoia.generate(target, draft, prompt, tree=tree, method="watched", cuda_graph=False,
                         on_step=lambda step: steps.append(len(step.tokens)),
                         **sampling(prompt, temperature, max(2, args.new_tokens // 2)))
    return steps


def gain_of_second(sums) -> tuple[float, float]:
    """By which share the second of two columns exceeds the first, (prompts, 2), and half the 95% interval of it: of a
    ratio of sums over prompts, since the steps of one prompt depend on each other. 1.96 + 2.4 / freedom: Student's t."""
    first, second = np.array(sums).T
    gain, freedom = second.sum() / first.sum() - 1, max(1, len(first) - 1)
    spread = np.sqrt(len(first) / freedom * ((second - (1 + gain) * first) ** 2).sum()) / first.sum()
    return gain, (1.96 + 2.4 / freedom) * spread


def milliseconds(inputs, rounds: int = 5) -> dict:
    """Of verifying some trees by both methods and both ways, in turns: the medians."""
    ways, taken = list(itertools.product((False, True), EXPECTED)), {}
    for _, one, (static, name) in itertools.product(range(rounds), inputs, ways):
        seconds, _ = timed(lambda: sequoia.METHODS[name].verify_tree(*one, None, static))
        taken.setdefault(f"{name}, static" if static else name, []).append(1e3 * seconds)
    return {name: float(np.median(times)) for name, times in taken.items()}


def draw_gains(rows):
    with figure("traversal") as [axis]:
        temperatures = sorted({row["temperature"] for row in rows})
        for i, temperature in enumerate(temperatures):
            mine = [row for row in rows if row["temperature"] == temperature]
            size, gain, error = (np.array([row[name] for row in mine]) for name in ("nodes", "gain, %", "+-"))
            shade = pyplot().get_cmap("viridis_r")(0.15 + 0.8 * i / len(temperatures))
            axis.plot(size, gain, "o-", color=shade, label=named(temperature))
            axis.fill_between(size, gain - error, gain + error, color=shade, alpha=0.15, linewidth=0)
        axis.axhline(0, color=COLOURS["best"], linewidth=1)
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks := [n for n in size.tolist() if n != 48 or 64 not in size], ticks)
        axis.minorticks_off()
        axis.set(xlabel="tree size (nodes)", ylabel="more tokens per step\nthan sequoia, %")
        axis.legend(reverse=True)


# ----------------------------------------------------------------------------------------------------------------------
# 5  Contenders: ways to decode a prompt, timed side by side


class Run(NamedTuple):
    """One prompt decoded."""
    ms_per_token: float               # of the whole call, the prompt's pass included
    tokens_per_step: float            # for each pass of the target after the prompt's
    ms_per_step: float                # median, from the end of one to the end of the next
    tree: sequoia.Tree | None = None


def sampling(prompt, temperature: float, new_tokens: int) -> dict:
    chosen = dict(do_sample=True, temperature=temperature, top_k=0, top_p=1.0) if temperature else dict(do_sample=False)
    return dict(attention_mask=torch.ones_like(prompt), max_new_tokens=new_tokens, **chosen)


def ours(pair: Pair, temperature: float, tree, method: str = "sequoia", planner=None, draft=None):
    """This project's decoding as a contender, a function of (prompt, new_tokens) that returns a Run."""
    planner, target = planner or sequoia.Planner(), pair.fast[0]
    draft = None if tree == "none" else draft or pair.fast[1]

    def run(prompt, new_tokens):
        steps, stamps = [], []

        def on_step(step):
            steps.append(step)
            stamps.append(time.perf_counter())

        seconds, text = timed(lambda: sequoia.generate(
            target, draft, prompt, tree=tree, method=method, planner=planner, on_step=on_step,
            **sampling(prompt, temperature, new_tokens)))
        tokens = float(np.mean([len(step.tokens) for step in steps]))
        return Run(1e3 * seconds / (text.shape[1] - prompt.shape[1]), tokens, step_time(stamps), steps[-1].tree)
    return run


def theirs(pair: Pair, temperature: float, assistant: dict | None = None, **kwargs):
    """One of transformers' own ways to decode as a contender; assistant: the settings of assisted generation."""
    if assistant is not None:
        kwargs["assistant_model"] = pair.draft

    def run(prompt, new_tokens):
        for name, value in (assistant or {}).items():
            setattr(pair.draft.generation_config, name, value)
        stamps = []
        with pair.target.register_forward_hook(lambda *_: stamps.append(time.perf_counter())):
            seconds, text = timed(lambda: pair.target.generate(
                prompt, **sampling(prompt, temperature, new_tokens), **kwargs))
        new = text.shape[1] - prompt.shape[1]
        return Run(1e3 * seconds / new, (new - 1) / max(1, len(stamps) - 1), step_time(stamps))
    return run


def step_time(stamps) -> float:
    return 1e3 * float(np.median(np.diff(stamps))) if len(stamps) > 1 else 0.0


def interleave(contenders: dict, prompts, args, label: str) -> dict[object, list[Run]]:
    """Every contender on every prompt, taking turns; a short run of each first, to warm up and to plan."""
    names, runs = list(contenders), {name: [] for name in contenders}
    turns = [(i, names[(i + j) % len(names)]) for i in range(len(prompts)) for j in range(len(names))]
    for i, name in progress([(None, name) for name in names] + turns, label):
        if i is None:
            contenders[name](prompts[0], min(16, args.new_tokens))
        else:
            torch.manual_seed(args.seed + i)
            runs[name].append(contenders[name](prompts[i], args.new_tokens))
    return runs


def median(runs, field: str = "ms_per_token") -> float:
    return float(np.median([getattr(run, field) for run in runs]))


def speedup(slow, fast) -> float:
    """How many times faster, prompt by prompt; the median."""
    return float(np.median([a.ms_per_token / b.ms_per_token for a, b in zip(slow, fast)]))


def tokens_per_step(runs) -> float:
    return float(np.mean([run.tokens_per_step for run in runs]))


def fastest(variants: dict, prompts, args, label: str):
    """A small sweep: the variant with the least time per token over the first two prompts, after its name."""
    runs = interleave(variants, prompts[: 1 if args.quick or args.synthetic else 2], args, label)
    name = min(runs, key=lambda name: median(runs[name]))
    return name, variants[name]


# ----------------------------------------------------------------------------------------------------------------------
# 6  scaling: tokens per step by tree size (section 5.2)


def scaling(args):
    """Tokens per step in real decoding: the optimal tree against k sequences of its size verified by SpecInfer."""
    pair, temperatures = pair_of(args), args.temperatures or [0.0, 0.6]
    prompts, sizes = texts(args, 2 * args.count, 128), [2**i for i in range(3, 8 if args.quick else 10)]
    rows, fits = [], []
    for temperature in temperatures:
        planner = sequoia.Planner()                                        # learns the rates from every other prompt
        for prompt in progress(prompts[1::2], f"acceptance, {named(temperature)}"):
            ours(pair, temperature, "32x8", planner=planner)(prompt, args.new_tokens)
        rates = planner.acceptance.rates()
        for size in progress(sizes, named(temperature)):
            shapes = {k: sequences_within(size, k) for k in (1, 2, 4, 8, 16, 32) if k < size}
            k = max(shapes, key=lambda k: sequoia.expected_tokens(shapes[k], rates))
            tree = sequoia.optimal_tree(rates, size, min(size, 16))
            measure = functools.partial(decoded, pair, temperature, prompts[::2], args)
            mine, best = measure(tree, "sequoia"), measure(shapes[k], "specinfer")
            sixteen = measure(shapes[16], "specinfer") if 16 in shapes else None
            rows.append({"temperature": temperature, "nodes": size, "levels": tree.depth,
                         "expected": sequoia.expected_tokens(tree, rates), "sequoia": mine, "k sequences": best,
                         "best k": k, "gain, %": 100 * (mine / best - 1), "16 sequences": sixteen,
                         "gain over 16, %": sixteen and 100 * (mine / sixteen - 1)})
        achieved = np.array([row["sequoia"] for row in rows if row["temperature"] == temperature])
        slope, start = np.polyfit(np.log(sizes), achieved, 1)
        fits.append({"temperature": temperature, "tokens per step": f"{start:.2f} + {slope:.2f} ln n",
                     "largest error": float(np.abs(start + slope * np.log(sizes) - achieved).max())})
    table(f"Tokens per step at equal size, {args.count} prompts (the paper, at 512: 33% more than 16 sequences)", rows)
    table("Growth with the number of nodes n", fits)
    if args.figures:
        for axis, mine in draw_by_temperature("scaling", rows, share=True):
            draw_curves(axis, mine, "nodes", {"sequoia": "o-", "k sequences": "o-", "16 sequences": "o:"},
                        "tree size (nodes)")
            axis.set_ylabel("tokens per step")
            axis.legend()
    return {"scaling": rows, "growth": fits}


def decoded(pair, temperature, prompts, args, tree, method) -> float:
    """The tokens per step of this tree, over all prompts."""
    torch.manual_seed(args.seed)
    return tokens_per_step([ours(pair, temperature, tree, method)(prompt, args.new_tokens) for prompt in prompts])


# ----------------------------------------------------------------------------------------------------------------------
# 7  speed: side by side with transformers (section 5.1, Table 1)


PAPER_SPEED = """
    target      draft   temperature  tree    x generate  tokens/step  ms/token  5x8: x generate  5x8: tokens/step
    Llama2-7B   JF68M   0            128x10  4.04        5.08         6.0       3.45             3.96
    Llama2-7B   JF68M   0.6          128x7   3.18        3.92         7.6       2.47             2.97
    Llama2-13B  JF68M   0            64x9    3.73        4.20         8.4       3.30             3.64
    Llama2-13B  JF68M   0.6          64x7    3.19        3.57         9.8       2.48             2.87
    Vicuna-33B  SL1.3B  0            64x6    2.27        4.28         23.4      1.83             3.86
    Vicuna-33B  SL1.3B  0.6          64x6    2.19        4.16         24.3      1.64             3.53"""


def speed(args):
    """Tokens per step and ms per token of this file and its peers."""
    if args.synthetic:
        return synthetic_speed(args)
    pair, prompts, rows, swept = pair_of(args), texts(args, args.count, 128), [], []
    for temperature in args.temperatures or [0.0, 0.6]:
        rows += contest(prompts, temperature, args, contenders_for(pair, prompts, temperature, args))[0]
        if args.sweep:
            swept += sweep(pair, prompts[:2], temperature, args)
    header, *lines = [re.split("  +", line.strip()) for line in PAPER_SPEED.strip().splitlines()]
    paper = table("The paper's own (A100, C4), for comparison", [dict(zip(header, line)) for line in lines])
    if args.figures:
        draw_speed("speed", rows)
    return {"device": describe(pair), "measured": rows, "sweep": swept, "paper": paper}


def contenders_for(pair, prompts, temperature, args) -> dict:
    """All who take part, by (name, setting); the peers, and k sequences, with the best of their settings."""
    mine, peer = functools.partial(ours, pair, temperature), functools.partial(theirs, pair, temperature)
    names = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
    tried = [(2, "constant", 0.0), (4, "constant", 0.0), (5, "heuristic", 0.4)] if args.quick else \
        itertools.product((2, 4, 8), ("constant", "heuristic"), (0.0, 0.4))
    best_assisted = fastest({"{} {} {}".format(*values): peer(assistant=dict(zip(names, values))) for values in tried},
                            prompts, args, "settings of assisted generation")
    best_lookup = fastest({f"{n} tokens": peer(prompt_lookup_num_tokens=n) for n in (2, 4, 10)},
                          prompts, args, "settings of prompt lookup")
    best_sequences = fastest({kxl: mine(f"sequences:{kxl}", "specinfer") for kxl in ("1x3", "2x4", "4x4", "8x8")},
                             prompts, args, "k sequences")
    taking_part = {("generate", ""): peer(), ("assisted", best_assisted[0]): best_assisted[1],
                   ("lookup", best_lookup[0]): best_lookup[1], ("plain", "no tree"): mine("none"),
                   ("sequences", best_sequences[0]): best_sequences[1],
                   ("sequences 5x8", ""): mine("sequences:5x8", "specinfer")}
    if temperature:                                                      # greedy, topk and sequoia are one and the same
        taking_part |= {(method, args.tree): mine(args.tree, method) for method in ("topk", "traversal")}
    return taking_part | {("sequoia", args.tree): mine(args.tree)}


def contest(prompts, temperature, args, contenders: dict) -> tuple[list[dict], dict]:
    """All contenders on all prompts: the table's rows, and the runs by name."""
    runs, rows = interleave(contenders, prompts, args, named(temperature)), []
    by_name = {name: runs[name, setting] for name, setting in runs}
    for (name, setting), mine in runs.items():
        tree, tokens = mine[-1].tree, tokens_per_step(mine)
        low, high = np.percentile([run.ms_per_token for run in mine], (25, 75))
        against = {f"x {other}": speedup(by_name[other], mine) for other in ("generate", "assisted", "plain")}
        setting = f"auto {tree.size}x{tree.depth}" if setting == "auto" else setting
        rows.append({"method": name, "temperature": temperature, "setting": setting, "tokens/step": tokens,
                     "ms/token": median(mine), "quartiles": f"{low:.2f} - {high:.2f}", **against,
                     "conversion": against["x plain"] / tokens if tree else None})
    table(f"{named(temperature)}: {len(prompts)} prompts of {prompts[0].shape[1]} tokens, {args.new_tokens} new ones "
          f"each; conversion: speedup over plain decoding / tokens per step", rows)
    return rows, by_name


def sweep(pair, prompts, temperature, args) -> list[dict]:
    """SpecInfer's trees of k sequences of length L, as the paper sweeps them: times transformers' generate."""
    lengths, grid = (1, 2, 4, 8, 16), itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8, 16))
    contenders = {(k, n): ours(pair, temperature, sequoia.sequences(k, n), "specinfer") for k, n in grid if k * n <= 64}
    runs = interleave({"generate": theirs(pair, temperature)} | contenders, prompts, args, "sweep")
    rows = [{"k": k, **{f"L = {n}": speedup(runs["generate"], runs[k, n]) if (k, n) in runs else None for n in lengths}}
            for k in lengths]
    return table(f"k sequences of length L, {named(temperature)}: times generate (the paper's best of 29, on an A100: "
                 f"8x8, 3.70 greedy and 2.42 at 0.6, where Sequoia has 4.04 and 3.18)", rows)


def describe(pair) -> str:
    device, dtype = pair.target.device, str(pair.target.dtype).removeprefix("torch.")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} CPU cores"
    return f"{name}, {dtype}, torch {torch.__version__}, transformers {transformers.__version__}"


def draw_speed(name: str, rows):
    for axis, mine in draw_by_temperature(name, rows):
        methods = [row["method"] for row in mine]
        draw_bars(axis, methods, [row["x generate"] for row in mine], methods, "%.2f", "times transformers' generate")


def draw_bars(axis, labels: list, values: list, methods: list, form: str, label: str):
    """A horizontal bar for each value, in the colour of its method, the first one on top."""
    axis.bar_label(axis.barh(labels, values, color=list(map(colour, methods))), fmt=form, padding=3)
    axis.set_xlabel(label)
    axis.margins(x=0.15)
    axis.grid(axis="y", visible=False)
    axis.invert_yaxis()


# ----------------------------------------------------------------------------------------------------------------------
# 8  speed --synthetic: the paper's shapes and tokens per step, with weights made on the spot
#
# Both models share a random bigram core: an embedding for each token and a head, in the draft's width, zero-padded
# into the target's. To that each adds what its own random layers make of it. The more the core weighs the more the two
# agree, so its share is set, by bisection, to the paper's tokens per step. Every product is done; the text is noise.


SHAPES = {           # hidden, intermediate, layers, heads, key-value heads, head_dim, vocabulary
    "7b": (4096, 11008, 32, 32, 32, 128, 32000), "68m": (768, 3072, 2, 12, 12, 64, 32000),
    "1b": (2048, 5632, 22, 32, 4, 64, 32000), "13b": (5120, 13824, 40, 40, 40, 128, 32000),
    "33b": (6656, 17920, 60, 52, 52, 128, 32000), "1.3b": (2048, 5504, 24, 16, 16, 128, 32000),
    "tiny target": (256, 512, 12, 4, 4, 64, 4096), "tiny draft": (144, 384, 1, 4, 4, 32, 4096)}
LLAMA_7B = {0.0: (128, 10, 5.08), 0.6: (128, 7, 3.92)}            # by temperature the paper's tree and tokens per step
SYNTHETIC = {"7b-68m": ("7b", "68m", LLAMA_7B), "13b-68m": ("13b", "68m", {0.0: (64, 9, 4.20), 0.6: (64, 7, 3.57)}),
             "33b-1.3b": ("33b", "1.3b", {0.0: (64, 6, 4.28), 0.6: (64, 6, 4.16)}),
             "1b-68m": ("1b", "68m", LLAMA_7B), "tiny": ("tiny target", "tiny draft", LLAMA_7B)}      # not in the paper
SHARPNESS = 6.0      # the standard deviation of the logits: distributions about as sharp as a trained model's


class SyntheticPair(Pair):
    """Two random Llama models with a common core."""

    def __init__(self, target, draft, compiled=False):
        super().__init__(target, draft, compiled)
        self.core, head = torch.randn(2, draft.config.vocab_size, draft.config.hidden_size, device=draft.device)
        for model in (self.target, self.draft):
            model.get_input_embeddings().weight.data.zero_()
            model.get_output_embeddings().weight.data.zero_()[:, : head.shape[1]] = head

    @torch.no_grad()
    def set_share(self, share: float):
        """Sets the core's size relative to what the layers add, which grows with the root of their number."""
        self.__dict__.pop("fast", None)                                        # copies of what changes now
        probe = torch.arange(64, device=self.core.device)[None]
        for model in (self.target, self.draft):
            scale, norm = share * model.config.num_hidden_layers**0.5, model.model.norm.weight
            model.get_input_embeddings().weight[:, : self.core.shape[1]] = scale * self.core
            norm.fill_(1)
            norm.fill_(SHARPNESS / model(probe).logits.float().std().item())

    def tune(self, temperature: float, size: int, depth: int, wanted: float, rounds: int) -> float:
        """Sets the share with which the optimal tree yields `wanted` tokens per step. Returns what it does yield."""
        low, high, seen = np.log(0.1), np.log(10), []
        for _ in progress(range(rounds), f"matching {wanted} tokens per step"):
            share = float(np.exp((low + high) / 2))
            self.set_share(share)
            rates = self.acceptance_rates(temperature)
            expected = sequoia.expected_tokens(sequoia.optimal_tree(rates, size, depth), rates)
            low, high = (np.log(share), high) if expected < wanted else (low, np.log(share))
            seen.append((abs(expected - wanted), share, expected))
        self.set_share(min(seen)[1])
        return min(seen)[2]

    @torch.no_grad()
    def acceptance_rates(self, temperature: float, rows: int = 16, prompt: int = 16, new: int = 32):
        """Measured along texts of the target's own, after prompts that are the same every time: (ranks,)."""
        torch.manual_seed(0)
        ids = torch.randint(len(self.core), (rows, prompt), device=self.core.device)
        output = self.target.generate(ids, **sampling(ids, temperature, new), return_dict_in_generate=True,
                                      output_logits=True)
        target = torch.stack(output.logits, dim=1).float().flatten(0, 1)                               # (rows * new, V)
        draft = self.draft(output.sequences).logits[:, prompt - 1 : -1].float().flatten(0, 1)
        if temperature:
            P, Q, method = probabilities(target, temperature), probabilities(draft, temperature), "sequoia"
        else:
            P, Q, method = torch.zeros_like(target).scatter_(1, target.argmax(1, True), 1), draft.softmax(dim=1), "topk"
        seen = sequoia.Acceptance(prior_weight=1)
        return sequoia.measure_acceptance(P, Q, sequoia.METHODS[method], children=32, acceptance=seen).rates()


def llama_config(shape):
    hidden, intermediate, layers, heads, kv_heads, head_dim, vocabulary = shape
    return LlamaConfig(vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, head_dim=head_dim,
                       num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
                       max_position_embeddings=2048, tie_word_embeddings=False, initializer_range=hidden**-0.5)


def random_llama(shape, device: str, dtype: torch.dtype):
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(llama_config(shape), dtype=dtype)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data.mul_(3)                     # attention to few tokens, as in trained models
    return model


def synthetic_speed(args):
    """Where a step's time goes at full scale, and how near it is to the memory's speed."""
    target, draft, by_temperature = SYNTHETIC[args.synthetic]
    torch.manual_seed(args.seed)
    models = (random_llama(SHAPES[name], args.device, getattr(torch, args.dtype)) for name in (target, draft))
    pair = SyntheticPair(*models, args.compile)
    prompts = [torch.randint(len(pair.core), (1, 128), device=args.device) for _ in range(args.count)]
    weights, rows, splits = bytes_read(pair.target), [], []
    read = reader(weights, args.device)
    floor = read()
    print(f"\nSynthetic pair {args.synthetic}: random weights in real shapes. {describe(pair)}. A pass of the target "
          f"reads {weights / 1e9:.3f} GB; to read only takes {floor:.2f} ms ({weights / floor / 1e6:.0f} GB/s).")
    for temperature in args.temperatures or [0.0, 0.6]:
        if temperature not in by_temperature:
            raise ValueError(f"the paper has tokens per step for the temperatures 0 and 0.6 only, got {temperature:g}")
        size, depth, wanted = by_temperature[temperature]
        expected = pair.tune(temperature, size, depth, wanted, rounds=7 if args.quick else 9)
        print(f"\n{named(temperature)}: {wanted} tokens per step wanted of {size}x{depth}, tuned to {expected:.2f}.")
        mine = functools.partial(ours, pair, temperature)
        contenders = contenders_for(pair, prompts, temperature, args) | {
            ("memory floor", "weights read"): lambda prompt, new_tokens: Run(milliseconds := read(), 1.0, milliseconds),
            ("paper's tree", f"{size}x{depth}"): mine(f"{size}x{depth}"),
            ("slow draft", "the target itself, 1x3"): mine("sequences:1x3", draft=pair.fast[0])}
        if args.device != "cpu":                                   # for a CPU the paper's own tree is too large already
            contenders["too large", f"512x{depth}"] = mine(f"512x{depth}")
        more, runs = contest(prompts, temperature, args, contenders)
        rows += more
        splits += [{"temperature": temperature, "method": name, **split_step(
                        pair, temperature, prompts[0], args, runs, name, read)}
                   for name in ("plain", "sequoia", "paper's tree", "sequences 5x8", "too large") if name in runs]
    table("A step's time in ms (rest: proposals, masks, Python), and the share of the memory's speed reached", splits)
    if args.figures:
        draw_speed(f"speed-{args.synthetic}", rows)
        draw_split(f"step-{args.synthetic}", splits)
    return {"device": describe(pair), "synthetic": args.synthetic, "floor_ms": floor, "measured": rows, "steps": splits}


def bytes_read(model) -> int:
    """The weights that one pass reads, in bytes: all but the input embedding, of which it takes a few rows."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return sum(p.nbytes for p in model.parameters()) - (0 if embedding is head else embedding.nbytes)


def reader(size: int, device: str):
    """A function that takes the time, in ms, in which the device reads so many bytes: the median of a few sums over a buffer of
    that size, of 4 GiB at most. It is called in between, since other users of the memory come and go."""
    buffer = torch.ones(min(size, 2**32) // 4, device=device)
    return lambda: 1e3 * float(np.median([timed(buffer.sum)[0] for _ in range(7)])) * size / buffer.nbytes


PARTS = {"target": "#15803d", "draft": "#86efac", "verify": "#ea580c", "moves": "#2563eb", "rest": "#d1d5db"}


def split_step(pair, temperature, prompt, args, runs, name, read) -> dict:
    """The parts of a step, in ms: medians over the steps of a run with a clock around each part; and the whole without
    clocks, as in the contest. On CUDA, where a step is one graph, that run is without it and the parts are timed as
    graphs of their own. The weights are read before and after that run: their time over the target's."""
    spent, rows, tree, start, before = Counter(), [], runs[name][-1].tree, None, read()
    target, draft, no_graph = *pair.fast, {} if args.device == "cpu" else {"cuda_graph": False}

    def clock(part, function):
        @functools.wraps(function)
        def clocked(*arguments, **kwargs):
            call = functools.partial(function, *arguments, **kwargs)
            seconds, result = timed(call)
            if part != "moves" and args.device != "cpu":            # moving twice is not the same as moving once
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    call()
                seconds = min(timed(graph.replay)[0] for _ in range(3))
            spent[part] += 1e3 * seconds
            return result
        return clocked

    def on_step(step):
        nonlocal start
        now = time.perf_counter()
        if start is not None:                                       # the first step comes with the prompt, and warms up
            rows.append({**spent, "rest": 1e3 * (now - start) - spent.total()})
        start = now
        spent.clear()

    places = [(target, "recording" if hasattr(target, "recording") else "forward", "target"),
              (draft, "recording" if hasattr(draft, "recording") else "forward", "draft"),
              (sequoia.Decoder, "verify", "verify"), (sequoia.CachedModel, "move", "moves")]
    with contextlib.ExitStack() as stack:
        for owner, attribute, part in places:
            stack.enter_context(mock.patch.object(owner, attribute, clock(part, getattr(owner, attribute))))
        sequoia.generate(target, draft if tree.size > 1 else None, prompt, tree=tree, on_step=on_step,
                         **sampling(prompt, temperature, args.new_tokens), **no_graph)
    parts = {part: float(np.median([row.get(part, 0.0) for row in rows])) for part in PARTS}
    whole, floor = (median(runs[one], "ms_per_step") for one in (name, "memory floor"))
    if args.device != "cpu":                                        # what is beside the graphs is not in the one graph
        parts["rest"] = whole - sum(list(parts.values())[:-1])
    return {"tree": f"{tree.size}x{tree.depth}", "step": whole, **parts, "floor / step": floor / whole,
            "floor / target": (before + read()) / 2 / parts["target"],
            "x plain step": whole / median(runs["plain"], "ms_per_step")}


def draw_split(name: str, splits):
    for axis, mine in draw_by_temperature(name, splits):
        left, labels = np.zeros(len(mine)), [f"{row['method']}\n{row['tree']}" for row in mine]
        for part, shade in PARTS.items():
            width = np.maximum([row[part] for row in mine], 0)
            axis.barh(labels, width, left=left, color=shade, label=part)
            left += width
        floor = mine[0]["floor / step"] * mine[0]["step"]
        axis.axvline(floor, color=COLOURS["memory floor"], linestyle="--", linewidth=1.5, label="memory floor")
        axis.set_xlabel("ms per step")
        axis.grid(axis="y", visible=False)
        axis.invert_yaxis()
        axis.legend()


# ----------------------------------------------------------------------------------------------------------------------
# 9  planner: promised and achieved (section 4)


def planner(args):
    """Tokens per step and speedup over plain decoding, predicted and measured, around the planned tree."""
    pair, prompts, rows = pair_of(args), texts(args, 2 * args.count, 128), []
    temperatures = args.temperatures or [0.0, 0.6]
    for temperature in temperatures:
        chooser = sequoia.Planner()
        for prompt in progress(prompts[1::2], f"planning, {named(temperature)}"):
            ours(pair, temperature, "auto", args.method, planner=chooser)(prompt, args.new_tokens)
        rows += around_the_plan(pair, temperature, chooser, prompts[::2], args)
    table("Predicted and achieved around the planned tree", rows)
    latency, rates = chooser.latency, chooser.acceptance.rates()
    sizes = speed_by_size(pair, latency, rates, temperatures[-1], prompts, args)
    starts = [hard_start(pair, temperature, prompts, args) for temperature in temperatures]
    table("Hard starts: a draft of random weights; a planner that began with a useless draft's rates, after so many tokens "
          "against one that has learnt; and seconds of planning, the first time and every other", starts)
    times = [{"model": model, "tokens": n, "ms": 1e3 * seconds, "x one token": seconds / all_seconds[0]}
             for model, counts, all_seconds in (("target", latency.sizes, latency.target),
                                                ("draft", latency.widths, latency.draft))
             for n, seconds in zip(counts, all_seconds)]
    table("t(n), as the planner measures it: a step without its draft passes, and one draft pass, over n tokens", times)
    if args.figures:
        draw_planner(rows, sizes, times, temperatures)
    return {"device": describe(pair), "around": rows, "sizes": sizes, "starts": starts, "latency": times}


def around_the_plan(pair, temperature, chooser, prompts, args):
    """What a planner that has learnt predicts for its tree and for others near it, and what they achieve on these prompts."""
    latency, rates, tree = chooser.latency, chooser.acceptance.rates(), chooser.chosen.tree
    centre = (tree.size, tree.depth) if tree.size > 1 else (8, 4)
    sizes = np.geomspace(centre[0] / 2, min(4 * centre[0], latency.sizes[-1]), 5).round().astype(int).tolist()
    largest = {d: sum(len(rates) ** level for level in range(d)) for d in range(2, centre[1] + 2)}
    shapes = {(n, d) for n in sizes for d in range(centre[1] - 1, centre[1] + 2) if d <= n <= largest.get(d, 0)}
    around = [sequoia.optimal_tree(rates, *shape) for shape in sorted(shapes | {centre})]
    around = {(tree.size, tree.depth): tree for tree in around}                      # some need fewer levels than they may
    contenders = {"plain": ours(pair, temperature, "none")}
    contenders |= {shape: ours(pair, temperature, tree, args.method) for shape, tree in around.items()}
    runs = interleave(contenders, prompts, args, named(temperature))
    return [{"temperature": temperature, "nodes": n, "levels": d, "planned": "<--" if (n, d) == centre else "",
             "tokens/step predicted": sequoia.expected_tokens(tree, rates),
             "tokens/step achieved": tokens_per_step(runs[n, d]),
             "x plain predicted": latency.speedup(tree, rates),
             "x plain achieved": speedup(runs["plain"], runs[n, d])} for (n, d), tree in around.items()]


def draw_planner(rows, sizes, times, temperatures):
    """Speedups predicted and achieved, speedup by tree size, and t(n)."""
    with figure("planner", panels=3) as (left, middle, right):
        for temperature, marker in zip(temperatures, "osv^"):
            mine = [row for row in rows if row["temperature"] == temperature]
            promised, achieved = ([row[f"x plain {kind}"] for row in mine] for kind in ("predicted", "achieved"))
            left.plot(promised, achieved, marker, markersize=8, color=colour("sequoia"), alpha=0.7, label=named(temperature))
        left.axline((1, 1), slope=1, color=COLOURS["best"], linestyle="--", linewidth=1)
        left.set(xlabel="predicted speedup over plain", ylabel="achieved")
        left.legend()
        for name, shade in (("planned", "sequoia"), ("free", "specinfer")):
            middle.plot([row["nodes"] for row in sizes], [row[f"x plain, depth {name}"] for row in sizes], "o-",
                        color=colour(shade), label=f"depth {name}")
        middle.set_xscale("log", base=2)
        middle.set(xlabel="tree size (nodes)", ylabel="speedup over plain", title=named(temperatures[-1]))
        middle.legend()
        for model, name in (("target", "sequoia"), ("draft", "specinfer")):
            mine = [row for row in times if row["model"] == model]
            right.plot([row["tokens"] for row in mine], [row["ms"] for row in mine], "o-", color=colour(name), label=model)
        right.set(xlabel="tokens in a pass", ylabel="ms", ylim=(0, None))
        right.legend()


def speed_by_size(pair, latency, rates, temperature, prompts, args) -> list[dict]:
    """Speedup over plain decoding by tree size: the optimal tree of free depth, and of the depth that the times ask for."""
    sizes, trees = [n for n in (2, 4, 8, 16, 32, 64) if n <= latency.sizes[-1]], {}
    for n in sizes:
        trees[n, "free"] = sequoia.optimal_tree(rates, n)
        shapes = [sequoia.optimal_tree(rates, n, d) for d in range(2, trees[n, "free"].depth + 1)
                  if n <= sum(len(rates) ** level for level in range(d))]
        trees[n, "planned"] = max(shapes, key=lambda tree: sequoia.expected_tokens(tree, rates) / latency.step(n, tree.depth))
    contenders = {"plain": ours(pair, temperature, "none")}
    contenders |= {name: ours(pair, temperature, tree) for name, tree in trees.items()}
    runs = interleave(contenders, prompts[::2][: args.count], args, "depth free and planned")
    rows = [{"nodes": n, **{f"levels, {kind}": trees[n, kind].depth for kind in ("planned", "free")},
             **{f"x plain, depth {kind}": speedup(runs["plain"], runs[n, kind]) for kind in ("planned", "free")}} for n in sizes]
    return table(f"Speedup by tree size, with the depth planned and with it free; {named(temperature)}", rows)


def hard_start(pair, temperature, prompts, args) -> dict:
    """How little a useless draft costs, and how soon a planner forgets what was wrong. Prompts take turns: odd ones teach."""
    torch.manual_seed(args.seed)
    useless = AutoModelForCausalLM.from_config(pair.draft.config, dtype=pair.draft.dtype).to(args.device).eval()
    useless = sequoia.pack(useless) if args.device == "cpu" else useless
    with tempfile.TemporaryDirectory() as folder:
        doubtful, learnt, misled = (sequoia.Planner(Path(folder) / name) for name in ("doubtful", "learnt", "misled"))
        misled.acceptance.prior = np.full_like(misled.acceptance.prior, 0.02)
        auto = functools.partial(ours, pair, temperature, "auto")
        contenders = {"plain": ours(pair, temperature, "none"), "useless": auto(planner=doubtful, draft=useless),
                      "learnt": auto(planner=learnt), "misled": auto(planner=misled)}
        first, enough = sequoia.Planner(Path(folder) / "first"), -(-500 // args.new_tokens)
        auto(planner=first)(prompts[0], 8)
        for prompt in prompts[1::2]:
            contenders["learnt"](prompt, args.new_tokens)
        for prompt in prompts[1::2][:enough]:
            contenders["misled"](prompt, args.new_tokens)
        seconds, _ = timed(lambda: sequoia.plan(learnt.acceptance.rates(levels=4), learnt.latency, max_branch=10))
        runs = interleave(contenders, prompts[::2], args, f"hard starts, {named(temperature)}")
    return {"temperature": temperature, "useless draft: x plain": speedup(runs["plain"], runs["useless"]),
            "misled: tokens seen": enough * args.new_tokens, "misled: x learnt": speedup(runs["learnt"], runs["misled"]),
            "first plan, s": first.seconds, "another, s": seconds}


# ----------------------------------------------------------------------------------------------------------------------
# 10  offload: a target that streams (section 5.1, Table 2)


def offload(args):
    """Seconds per step and per token of a target that streams, from host memory to a GPU or from disk to a CPU."""
    started, dtype = peak_memory(args.device), getattr(torch, args.dtype)
    torch.manual_seed(args.seed)
    with tempfile.TemporaryDirectory() as folder, \
            mock.patch.object(sequoia, "read_from", read_cold) if args.cold else contextlib.nullcontext():
        size, draft = write_llama(Path(folder), args)
        before = peak_memory(args.device)
        pair = StreamingPair(sequoia.load_offloaded(folder, dtype, args.device, args.resident, args.buffers),
                             random_llama(draft, args.device, dtype))
        pair.set_share(args.share)
        streamed = sum(map(sequoia.flat_size, pair.target.stream.layers))
        bandwidth = streamed / copy_seconds(pair.target.stream)
        layers, streaming = pair.target.config.num_hidden_layers, len(pair.target.stream.layers)
        print(f"\n{describe(pair)}. A target of {size / 1e9:.2f} GB: {streaming} of {layers} layers, {streamed / 1e9:.2f} GB, "
              f"stream in every pass, through {args.buffers} buffers; copying alone does {bandwidth / 1e9:.2f} GB/s"
              f"{', the cache of files not used' * args.cold}.", flush=True)
        prompts = [torch.randint(len(pair.core), (1, 32), device=args.device) for _ in range(min(2, args.count))]
        rows = [row for temperature in args.temperatures or [0.6]
                for row in streaming_steps(pair, temperature, prompts, streamed, bandwidth, args)]
        memory = {"before": started, "peak": 1e9 * rows[1]["peak GB"], "target": size}
        peer = accelerate_seconds(folder, dtype, prompts[0], args)
    table(f"Steps of a target that streams; conversion: times no tree / tokens per step; peak GB: up to here; "
          f"{len(prompts)} prompts", rows)
    print(f"\nPeak memory, with no tree and the planned one, {memory['peak'] / 1e9:.2f} GB: {memory['peak'] / size:.2f} of the "
          f"target's size. Of it {started / 1e9:.2f} GB before there was a model, {before / 1e9:.2f} with writing the target.")
    if peer:
        print(f"accelerate's cpu_offload: {peer:.3f} s a token, {peer / rows[0]['s/token']:.2f} times no tree's.")
    if args.figures:
        for axis, mine in draw_by_temperature("offload", rows):
            draw_bars(axis, [f"{row['tree']}, {row['nodes']} node{'s' * (row['nodes'] > 1)}" for row in mine],
                      [row["s/token"] for row in mine],
                      ["specinfer" if "x" in row["tree"] else "sequoia" for row in mine], "%.3f", "seconds a token")
    return {"device": describe(pair), "bandwidth": bandwidth, "measured": rows, "memory": memory, "accelerate": peer}


def streaming_steps(pair, temperature, prompts, streamed, bandwidth, args):
    """A row for no tree, the planned one, and sequences, at one temperature; streamed: bytes a step, bandwidth: a second."""
    rows = []
    for tree in progress(["none", "auto", "sequences:5x8", "sequences:16x48"], named(temperature)):
        method = "specinfer" if tree.startswith("sequences") else "sequoia"
        run, tokens = ours(pair, temperature, tree, method), max(24, args.new_tokens)
        tokens = max(8, tokens // 4) if tree in ("none", "sequences:16x48") else tokens              # their tokens are slow
        if tree == "auto":
            run(prompts[0], 8)                                                     # plans, which counts for no prompt
        torch.manual_seed(args.seed)
        runs = [run(prompt, tokens) for prompt in prompts]
        step, yielded, planned = median(runs, "ms_per_step") / 1e3, tokens_per_step(runs), runs[-1].tree
        rows.append({"tree": tree.removeprefix("sequences:"), "temperature": temperature, "nodes": planned.size,
                     "levels": planned.depth, "tokens/step": yielded, "s/step": step, "s/token": step / yielded,
                     "GB streamed": streamed / 1e9, "share of bandwidth": streamed / step / bandwidth,
                     "peak GB": peak_memory(args.device) / 1e9})
        rows[-1]["x no tree"] = rows[0]["s/token"] / rows[-1]["s/token"]
        rows[-1]["conversion"] = rows[-1]["x no tree"] / yielded
    return rows


class StreamingPair(SyntheticPair):
    """A pair whose target streams: what the core changes, embedding, head and last norm, is resident."""

    @functools.cached_property
    def fast(self):
        return self.target, sequoia.pack(copy.deepcopy(self.draft))                 # on a GPU `pack` changes nothing


def write_llama(folder: Path, args) -> tuple[int, tuple]:
    """Writes a random target of `--size-gb`, layer by layer: only one is in memory. Returns its bytes, and a draft's shape."""
    dtype, wanted = getattr(torch, args.dtype), args.size_gb * 1e9
    name, draft = ("33b", SHAPES["68m"]) if wanted > 2e10 else ("1b", (512, 1536, 1, 8, 8, 64, 4096))
    shape = list(SHAPES[name])
    shape[-1] = draft[-1]
    with torch.device("meta"):
        layer, rest = (sum(p.nbytes for p in AutoModelForCausalLM.from_config(llama_config(
            (*shape[:2], layers, *shape[3:])), dtype=dtype).parameters()) for layers in (1, 0))
        shape[2] = math.ceil((wanted - rest) / (layer - rest))
        model = AutoModelForCausalLM.from_config(llama_config(shape), dtype=dtype)
    parts = {f"layer-{i}": (f"model.layers.{i}.", part) for i, part in enumerate(model.model.layers)}
    files, model.model.layers = {}, torch.nn.ModuleList()
    for file, (prefix, part) in progress([*parts.items(), ("rest", ("", model))], "writing the target"):
        tensors = {}
        for key, like in part.state_dict().items():
            scale = shape[0]**-0.5 * (3 if "q_proj" in key else 1)
            make = torch.randn if like.ndim > 1 else torch.ones
            tensors[prefix + key] = make(like.shape, dtype=dtype, device=args.device).mul_(scale if like.ndim > 1 else 1).cpu()
        safetensors.torch.save_file(tensors, folder / f"{file}.safetensors", {"format": "pt"})
        files.update(dict.fromkeys(tensors, f"{file}.safetensors"))
    model.config.save_pretrained(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    os.sync()
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")), draft


def copy_seconds(stream) -> float:
    """The least time in which a stream copies all its layers, with nothing else to do."""
    def copy_all():
        for i in range(len(stream.layers)):
            wait = stream.copy(i, stream.buffers[i % len(stream.buffers)])      # the last one is there when all are
        wait()
    seconds = min(timed(copy_all)[0] for _ in range(3))
    stream.coming = {}                            # what was in the buffers is overwritten
    return seconds


def read_cold(path, place, dtype, into, read_from=sequoia.read_from):
    """sequoia.read_from the disk itself, as it is for a target larger than memory: what was read is dropped from the system's
    cache of files."""
    into = read_from(path, place, dtype, into)
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return into


def peak_memory(device: str) -> int:
    """The most bytes in use so far: on a GPU of its memory, else of this process."""
    if device == "cpu":
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return torch.cuda.max_memory_allocated()


def accelerate_seconds(folder, dtype, prompt, args) -> float | None:
    """Seconds per token of transformers' generate on the same files with accelerate's cpu_offload, if it is installed."""
    if importlib.util.find_spec("accelerate") is None:
        return None
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    importlib.import_module("accelerate").cpu_offload(model, execution_device=torch.device(args.device))
    stamps = []
    with model.register_forward_hook(lambda *_: synchronise() or stamps.append(time.perf_counter())):
        model.generate(prompt, **sampling(prompt, 0.0, 6), eos_token_id=None, pad_token_id=0)
    return step_time(stamps) / 1e3


# ----------------------------------------------------------------------------------------------------------------------
# 11  The command line


COMMANDS = {command.__name__: command for command in (trees, verification, scaling, speed, planner, offload)}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("command", choices=[*COMMANDS, "all"])
    add("--target", default=str(sequoia.TINY / "target"), help="folder or hub name of the target (the bundled one)")
    add("--draft", default=str(sequoia.TINY / "draft"), help="of the draft (the bundled one)")
    add("--prompts", metavar="FILE", help="a text to take prompts from (held-out files of the standard library)")
    add("--figures", action="store_true", help="also write figures/COMMAND.png; needs matplotlib")
    add("--quick", action="store_true", help="fewer and shorter runs")
    add("--seed", type=int, default=0, help="(0)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(cuda where there is one, else cpu)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="(bfloat16 where the processor has it, or float32)")
    add("--compile", action="store_true", help="on a GPU, compile this file's passes")
    add("--temperatures", type=float, nargs="+", metavar="T", help="(0 0.6; for verification 0.2 0.6 1)")
    add("--count", type=int, metavar="N", help="prompts (10; 3 with --quick)")
    add("--new-tokens", type=int, metavar="N", help="decoded for each prompt (128; 64 with --quick)")
    add("--nodes", type=int, nargs="+", default=[16, 64], metavar="N", help="trees: sizes to draw (16 64)")
    add("--tree", default="auto", help="speed: this file's tree, as for sequoia.py (auto)")
    add("--method", default="sequoia", choices=sequoia.METHODS, help="planner: how trees are verified (sequoia)")
    add("--sweep", action="store_true", help="speed: also k sequences of length L, over a grid of both")
    add("--synthetic", choices=SYNTHETIC, help="speed: a pair of these shapes, random, with the paper's acceptance")
    add("--size-gb", type=float, metavar="GB", help="offload: of the target's weights (2; 0.3 with --quick)")
    add("--buffers", type=int, default=2, metavar="N", help="offload: layers on the device at a time (2)")
    add("--resident", default="auto", metavar="N", help="offload: layers that stay on the device (auto)")
    add("--cold", action="store_true", help="offload: read from the disk itself, not from the system's cache of files")
    add("--share", type=float, default=8.0, metavar="X", help="offload: how much target and draft have in common (8)")
    args = parser.parse_args()
    args.resident = int(args.resident) if args.resident.isdigit() else args.resident
    args.size_gb = args.size_gb or (0.3 if args.quick else 2)
    has_bfloat16 = args.device != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    args.dtype = args.dtype or ("bfloat16" if has_bfloat16 else "float32")
    args.count = args.count or (3 if args.quick else 10)
    args.new_tokens = args.new_tokens or (64 if args.quick else 128)
    return args


def main():
    args = arguments()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        if args.figures:
            pyplot()                                                                # better missed now than at the end
        chosen = COMMANDS if args.command == "all" else {args.command: COMMANDS[args.command]}
        results = {name: command(args) for name, command in chosen.items()}
    except (ValueError, OSError) as error:
        print(f"bench.py: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2)
    result = results if args.command == "all" else results[args.command]
    print("\n" + json.dumps(json.loads(json.dumps(result), parse_float=lambda text: round(float(text), 4))))


if __name__ == "__main__":
    main()
