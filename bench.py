"""The tables and figures of the paper, measured here, each by one command:

    python bench.py trees           # the best trees' expected tokens by size, and what finding them costs
    python bench.py speed           # side by side with transformers: tokens per step, ms per token
    python bench.py planner         # the planner's promises against what was achieved
    python bench.py verification    # rejection rate by number of children, for every method
    python bench.py traversal       # what verifying from the leaves gains over walking from the root
    python bench.py scaling         # tokens per step by tree size, in real decoding
    python bench.py offload         # a target that streams from host memory
    python bench.py all             # everything, into figures/results.md and figures/*.png
    python bench.py all --quick     # everything, shortened to minutes, into figures/quick/

`speed --target A --draft B` compares on any pair. `speed --synthetic 7b-68m` needs no weights: it makes a
pair of the paper's shapes, with its acceptance, on the spot. Every command prints Markdown tables. With
`--save` it replaces its own section of figures/results.md; four draw a figure, which needs matplotlib.

The same prompts, seeds and weights for all, taking turns, so that a slow minute hits all alike. Comparisons
are paired by prompt: 1.33 ± 0.05 is a ratio of sums over prompts and half its 95% interval. Tokens per step
are all tokens over all steps, ms/token all time over all tokens. transformers' own methods run on the models
as transformers loads them, each with its best settings.
"""
import argparse
import copy
import functools
import importlib
import itertools
import math
import operator
import os
import platform
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from tqdm import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig

import sequoia
from sequoia import METHODS, Tree, expected_tokens, optimal_tree, sequences

HERE = Path(__file__).parent
PLAIN = Tree([-1])
# On how many of its prompts `speed` runs all but plain decoding and sequoia, evenly spaced.
PEERS = 80
progress = functools.partial(tqdm, leave=False, disable=None)
BLACK = "#111827"
COLOURS = {"sequoia": "#15803d", "k sequences": "#ea580c", "16 sequences": "#9a3412", "2-ary": "#0891b2",
           "chain": "#be185d"}
TWO_CORES = ("While they read a weight two cores do about ten multiplications, a GPU three hundred: on two "
             "cores t(n) rises soon, and a short sequence can be as good as a tree.")


# --- 1  Toolbox: intervals, tables, results.md, figures, time -----------------------------------------------

class Estimate(NamedTuple):
    """A value and half its 95% interval, NaN where nothing tells it."""
    value: float
    half: float = math.nan


def estimate(function, *columns):
    """A function of the sums of columns, (prompts,) each, with its interval. By the jackknife: how far the
    values without one prompt scatter tells how far other prompts would move it, for a mean as usual."""
    value = float(function(*(column.sum(axis=0) for column in columns)))
    freedom = len(columns[0]) - 1
    if freedom < 1:
        return Estimate(value)
    without_one = [function(*(column.sum(axis=0) - column[i] for column in columns))
                   for i in range(freedom + 1)]
    # What Student's t stays within with probability 95%, to 1% from three degrees of freedom on.
    t = 1.96 + 2.37 / freedom + 2.82 / freedom**2 + 2.56 / freedom**3
    return Estimate(value, t * math.sqrt(freedom * np.var(without_one)))


class Report:
    """What a command finds: printed, and kept for figures/results.md."""

    def __init__(self, words):
        self.command = " ".join(word for word in words if word != "--save")
        self.quick = "--quick" in words
        self.folder = HERE / "figures" / ("quick" if self.quick else "")
        self.text = ""

    def say(self, text):
        print(f"\n{text}", flush=True)
        self.text += f"\n{text}\n"

    def table(self, title, lesson, rows):
        """Rows, dictionaries with the same keys, as a Markdown table under its title and what it teaches."""
        cells = [list(rows[0])] + [[show(value) for value in row.values()] for row in rows]
        widths = [max(map(len, column)) for column in zip(*cells)]
        rule = ["-" * widths[0]] + ["-" * (width - 1) + ":" for width in widths[1:]]
        lines = []
        for first, *rest in [cells[0], rule, *cells[1:]]:
            padded = [cell.rjust(width) for cell, width in zip(rest, widths[1:])]
            lines.append(f"| {' | '.join([first.ljust(widths[0]), *padded])} |\n")
        title += " (--quick: fewer and shorter runs)" * self.quick
        self.say(f"**{title}**\n\n{lesson}\n\n{''.join(lines).rstrip()}")

    def panels(self, name, rows, height=5.2):
        """Axes to draw on, one for each temperature, with its rows. They become figures/NAME.png."""
        temperatures = list(dict.fromkeys(row.get("temperature", "") for row in rows))
        fig, axes = pyplot().subplots(1, len(temperatures), figsize=(2 + 4.8 * len(temperatures), height),
                                      squeeze=False, layout="constrained")
        for axis, temperature in zip(axes[0], temperatures):
            axis.set_title(temperature and named(temperature))
            yield axis, [row for row in rows if row.get("temperature", "") == temperature]
        labels = axes[0, 0].get_legend_handles_labels()
        fig.legend(*labels, loc="outside lower center", ncols=3, frameon=False)
        fig.savefig(self.folder / f"{name}.png", dpi=150)
        pyplot().close(fig)
        self.say(f"![{name}]({name}.png)")

    def save(self, seconds, device, origin):
        """Puts this report into results.md, in place of an earlier one of the same command."""
        path = self.folder / "results.md"
        old = path.read_text(encoding="utf-8").split("\n## ")[1:] if path.exists() else []
        sections = {section.split("\n", 1)[0]: section.rstrip() + "\n" for section in old}
        title = f"`python bench.py {self.command}`"
        sections[title] = f"{title}\n\n{origin}; {seconds / 60:.1f} minutes.\n{self.text}"
        order = [f"`python bench.py {job}{' --quick' * self.quick}`" for job in jobs(device, self.quick)]
        known = sorted(sections, key=lambda title: order.index(title) if title in order else 99)
        parts = [f"# Results\n\nWritten by `python bench.py all{' --quick' * self.quick}`. ± is half a 95% "
                 "interval. Compare within a table, not across.\n"]
        parts += [sections[title] for title in known]
        path.write_text("\n## ".join(parts), encoding="utf-8")


def show(value):
    """A table's cell. An estimate's two numbers have as many decimals as the first needs."""
    if isinstance(value, Estimate):
        text = show(value.value)
        digits = len(text.partition(".")[2])
        return f"{text} ± {value.half:.{digits}f}" if value.half > 0 else text
    if isinstance(value, float):
        if abs(value) >= 100:
            return f"{value:.0f}"
        return f"{value:.2f}" if abs(value) >= 0.995 else f"{value:.3f}"
    return "-" if value is None else str(value)


def provenance(device):
    """The day, the commit, the device and the versions, in words."""
    words = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    found = re.search(r"model name\s*: (.*)", words)
    name = f"{found[1] if found else 'processor'}, {os.cpu_count()} cores"
    if device != "cpu":
        name = torch.cuda.get_device_name(device)
    git = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(git, cwd=HERE, capture_output=True, text=True).stdout.strip() or "unknown"
    return (f"{time.strftime('%Y-%m-%d')}; commit {commit}; {name}; Python {platform.python_version()}, "
            f"torch {torch.__version__}, transformers {transformers.__version__}")


def named(temperature):
    return f"temperature {float(temperature):g}" if float(temperature) else "greedy"


def timed(function):
    """The seconds that a call takes, the device's work included, and what it returns."""
    wait = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    wait()
    start = time.perf_counter()
    result = function()
    wait()
    return time.perf_counter() - start, result


@functools.cache
def pyplot():
    """Matplotlib, which only the figures need."""
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"font.size": 13, "lines.linewidth": 2, "axes.grid": True, "grid.alpha": 0.3,
                                "axes.spines.top": False, "axes.spines.right": False})
    return importlib.import_module("matplotlib.pyplot")


def draw_by_size(axis, rows, name, colour, style="-", label=None, shift=0.0):
    """A table's column against its nodes, on a logarithmic axis, estimates with their intervals. shift: by
    which part of a doubling to the right, so that intervals do not overlap."""
    ticks = [row["nodes"] for row in rows][:: 2 if len(rows) > 7 else 1]
    rows = [row for row in rows if row[name] is not None]
    heights, halves = zip(*(row[name] for row in rows))
    axis.errorbar([row["nodes"] * 2**shift for row in rows], heights, yerr=halves, fmt=style, marker="o",
                  markersize=5, elinewidth=1.2, capsize=3, color=colour, label=label or name)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, ticks)
    axis.minorticks_off()
    axis.set_xlabel("tree size (nodes)")


# --- 2  Pairs of models, texts, and what both say of them ---------------------------------------------------

class Pair:
    """Two models as transformers loads them, and `fast`, for sequoia.py: on a CPU copies that are packed."""

    def __init__(self, target, draft):
        self.target, self.draft = target.eval(), draft.eval()
        # All contenders decode to the same length, past any EOS.
        for model in (target, draft):
            model.config.eos_token_id = model.generation_config.eos_token_id = None
            model.generation_config.pad_token_id = 0

    @functools.cached_property
    def fast(self):
        if self.target.device.type != "cpu":
            return self.target, self.draft
        return [model if hasattr(model, "offloaded") else sequoia.pack(copy.deepcopy(model))
                for model in (self.target, self.draft)]


def pair_of(args):
    """The pair that the command line names, not packed."""
    args.tokenizer = sequoia.load_tokenizer(args)
    with mock.patch.object(sequoia, "pack", lambda model: model):
        return Pair(sequoia.load(args.target, args), sequoia.load(args.draft, args))


def texts(args, count, length):
    """`count` pieces of `length` tokens, (1, length) each, always the same, none of which overlap: from the
    file given, or from files of the standard library that the bundled pair was not trained on."""
    files = [Path(args.prompts or ".")]
    if not args.prompts:
        from tiny.train import source_files
        files = source_files(held_out=True)
    pieces = []
    for file in files:
        ids = args.tokenizer(file.read_text(encoding="utf-8", errors="ignore"))["input_ids"]
        pieces += [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
    if len(pieces) < count:
        raise ValueError(f"needs a text of {count} pieces of {length} tokens, got {len(pieces)}")
    return [torch.tensor([pieces[i * len(pieces) // count]], device=args.device) for i in range(count)]


def sampling(prompt, temperature, new_tokens, top_p=1.0):
    """What `generate` is told."""
    how = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": new_tokens, "do_sample": False}
    if temperature:
        how |= {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": top_p}
    return how


def decoder_for(pair, temperature, top_p=1.0):
    """A Decoder that a call of `generate` has set to sample so."""
    decoder = sequoia.Decoder(pair.target)
    prompt = torch.zeros(1, 1, dtype=torch.long, device=pair.target.device)
    pair.target.generate(prompt, custom_generate=decoder, **sampling(prompt, temperature, 1, top_p))
    return decoder


def scores_of(decoder, logits, draft):
    """A model's scores, (positions, V), as this Decoder shapes them, for its target or its draft."""
    return decoder.scores(logits, slice(None), level=0 if draft else None)


def verified(method, scores):
    """What a method verifies against, (positions, V): a greedy one, as with shared noise, knows the token."""
    if method.draw is sequoia.most_likely:
        return F.one_hot(scores.argmax(dim=1), scores.shape[1]).float()
    return scores.softmax(dim=1)


def chances_of(method, P, q, tokens):
    """Each child's chance to be the one that is accepted, (rows, k)."""
    if isinstance(method, sequoia.Matching):
        repeated = (tokens[:, :, None] == tokens[:, None, :]).tril(-1).any(dim=2)
        return torch.where((tokens >= 0) & ~repeated, P.gather(1, tokens.clamp(min=0)), 0)
    noise = torch.full(tokens.shape, math.inf, dtype=P.dtype, device=P.device)
    return in_turn(method.ratios(P, q, tokens, noise)[0].clamp(max=1))


def in_turn(ratios):
    """The chance of each to be the first that is accepted, (rows, k)."""
    return ratios * F.pad((1 - ratios).cumprod(dim=1)[:, :-1], (1, 0), value=1)


# --- 3  trees: what the dynamic program finds, and what that costs (sections 3.1 and 5.2, Figure 1) ---------

# Llama-3-70B with the 8B as its draft, CNN Daily Mail.
PAPER_RATES = [0.7732, 0.1039, 0.0402, 0.0206, 0.0128, 0.0081, 0.0064, 0.0043, 0.0035, 0.0026, 0.0025, 0.0021,
               0.0016, 0.0014, 0.001, 0.001, 0.001, 0.0007, 0.0007, 0.0006, 0.0007, 0.0006, 0.0004, 0.0004,
               0.0005, 0.0006, 0.0004, 0.0003, 0.0002, 0.0004, 0.0001]


def trees(args, report):
    """Expected tokens by size and shape, at the paper's acceptance rates; the dynamic program's cost."""
    largest = 1024 if args.quick else 4096
    costs = []
    for n, d, b in [(512, 12, 16), (1024, 12, 16), (512, 24, 16), (512, 12, 31), (largest, 24, 31)]:
        run = functools.partial(sequoia.expected_tokens_table, PAPER_RATES[:b], n, d)
        seconds = min(timed(run)[0] for _ in range(3 if n <= 1024 else 1))
        costs.append({"nodes n": n, "levels d": d, "children b": b, "seconds": seconds})
        costs[-1]["x first"] = seconds / costs[0]["seconds"]
    report.table("What the dynamic program takes, and that against the first row",
                 f"It makes n² d b additions; a plan asks for {sequoia.LARGEST} nodes at most.", costs)
    best = sequoia.expected_tokens_table(PAPER_RATES, largest, 24).max(axis=1)              # (size + 1,)
    rows = []
    for n in [2**i for i in range(3, largest.bit_length())]:
        by_k = {k: Estimate(expected_tokens(tree, PAPER_RATES)) for k, tree in sequences_within(n).items()}
        binary = expected_tokens(sequoia.k_ary(2, n.bit_length() - 1), PAPER_RATES)
        rows.append({"nodes": n, "sequoia": Estimate(best[: n + 1].max()), "k sequences": max(by_k.values()),
                     "16 sequences": by_k.get(16), "2-ary": Estimate(binary), "chain": by_k[1]})
    report.table("Expected tokens per step by tree size; k sequences: the best k",
                 "Computed, so exact: with every doubling the optimal tree gains about as much again, while "
                 "sequences stop gaining.", rows)
    if args.save:
        styles = {"sequoia": "-", "k sequences": "-", "16 sequences": ":", "2-ary": "-", "chain": "--"}
        for axis, _ in report.panels("trees", rows):
            for name, style in styles.items():
                draw_by_size(axis, rows, name, COLOURS[name], style)
            axis.set_ylabel("expected tokens per step")


def sequences_within(n):
    """k sequences of equal length, of at most n nodes with the root, by k."""
    return {k: sequences(k, (n - 1) // k) for k in (1, 2, 4, 8, 16, 32) if k < n}


# --- 4  verification: rejection rates (sections 3.2 and 5.3) ------------------------------------------------

CHILDREN = (1, 2, 4, 8, 16, 32)


@torch.no_grad()
def verification(args, report):
    """How often all k children are rejected, by method, temperature and top-p, and how often they must be."""
    if 0 in args.temperatures:
        raise ValueError("verification needs temperatures above 0: greedy, all methods are one")
    pair = pair_of(args)
    logits = []
    for text in progress(texts(args, args.count, 256), "reading"):
        # Both models' after each of its last tokens, (32, V).
        logits.append([model(text).logits[0, -32:] for model in (pair.target, pair.draft)])
    generator = torch.Generator(args.device).manual_seed(0)
    settings = itertools.product(args.temperatures, (1.0, 0.9) if args.quick else (1.0, 0.9, 0.8))
    rows = []
    for temperature, top_p in progress(list(settings), "rejection rates"):
        decoder = decoder_for(pair, temperature, top_p)
        scores = [(scores_of(decoder, target, draft=False), scores_of(decoder, draft, draft=True))
                  for target, draft in logits]
        rates = {name: rejection_rates(method, scores, generator) for name, method in METHODS.items()
                 if name != "traversal"}
        rates["best"] = np.array([[least_rejection(p, q, k) for k in CHILDREN] for p, q in scores])
        for name, mine in rates.items():
            row = {"temperature": f"{temperature:g}", "top-p": f"{top_p:g}", "method": name}
            row |= {f"k = {k}": float(mine[:, i].mean()) for i, k in enumerate(CHILDREN)}
            for i in (0, 3):
                ratio = estimate(operator.truediv, mine[:, i], rates["sequoia"][:, i])
                row[f"k = {CHILDREN[i]}, x sequoia"] = ratio
            rows.append(row)
    report.table(f"Rejection rate of k children, {32 * len(logits)} positions in {len(logits)} texts",
                 "Lower is better; `k = 8, x sequoia` compares a method's rate with sequoia's at the same "
                 "positions. best: the least that is possible with independent children.", rows)


def rejection_rates(method, scores, generator, repeats=2):
    """The chance that all of k children are rejected, a mean over positions and draws of proposals and shared
    noise, (texts, ks). scores: each text's, of both models."""
    rates = np.zeros((len(scores), len(CHILDREN)))
    for text, _ in itertools.product(range(len(scores)), range(repeats)):
        p, q = scores[text]
        if method.shared_noise:
            noise = sequoia.gumbel(sequoia.uniform(p, generator))
            p, q = p + noise, q + noise
        P = verified(method, p)
        tokens = method.propose(q, max(CHILDREN), generator)                                    # (rows, k)
        # SpecTr's ratios depend on how many children there are, so each k is verified by itself.
        for i, k in enumerate(CHILDREN):
            accepted = chances_of(method, P, q, tokens[:, :k]).sum(dim=1)
            rates[text, i] += (1 - accepted).mean().item() / repeats
    return rates


# The best that any verification rule can do is a transport problem: of each set of children's chance as much
# as can be goes to tokens in the set, and no token gets more than P. By max-flow = min-cut what is left over,
# the rejection rate, is the largest excess of a set A of tokens,
#
#     max over A of  Pr(all children in A) - P(A),          for one child the distance ||P - Q||_1 / 2.


def least_rejection(p, q, k):
    """With independent children the excess is Q(A)^k - P(A), a convex function of the point (P(A), Q(A)), so
    the best A is an extreme one: the tokens with Q / P above a threshold. The mean over (positions, V)."""
    P, Q = p.double().softmax(dim=1), q.double().softmax(dim=1)
    order = torch.where(Q > 0, Q / P, 0).argsort(dim=1, descending=True)
    P_of_A = P.gather(1, order).cumsum(dim=1)
    Q_of_A = Q.gather(1, order).cumsum(dim=1)
    return (Q_of_A**k - P_of_A).amax(dim=1).clamp(min=0).mean().item()


# --- 5  Contenders: ways to decode a prompt, timed side by side ---------------------------------------------

class Run(NamedTuple):
    """One prompt decoded."""
    seconds: float           # of the whole call, the prompt's pass included
    tokens: int              # new ones
    yielded: int             # tokens that the counted steps added
    steps: int               # passes of the target: ours without the prompt's, which yields one token
    stamps: list             # when each of them was over
    tree: Tree | None = None


class Runs(dict):
    """One contender's runs, by the prompt's number. Sums are over prompts."""

    def column(self, field, prompts=None):
        return np.array([getattr(self[i], field) for i in prompts or self], dtype=float)

    def tokens_per_step(self):
        return estimate(operator.truediv, self.column("yielded"), self.column("steps"))

    def ms_per_token(self):
        return float(1e3 * self.column("seconds").sum() / self.column("tokens").sum())

    def ms_per_step(self):
        """The median, from the end of one to the end of the next."""
        return 1e3 * float(np.median(np.concatenate([np.diff(run.stamps) for run in self.values()])))

    def last_tree(self):
        return list(self.values())[-1].tree

    def over(self, other, above="tokens", below="seconds"):
        """How many times another's speed, on the prompts that both decoded; or its tokens per step."""
        both = sorted(self.keys() & other.keys())
        columns = [runs.column(name, both) for runs in (self, other) for name in (above, below)]
        return estimate(lambda a, b, c, d: a / b / (c / d), *columns)

    def gain_over(self, other):
        """How many per cent more tokens per step."""
        ratio = self.over(other, "yielded", "steps")
        return Estimate(100 * (ratio.value - 1), 100 * ratio.half)


class Ours:
    """This project's decoding, with a Decoder kept from prompt to prompt; share: of the tokens, if slow."""

    def __init__(self, pair, temperature, tree, method="sequoia", draft=None, share=1, **kwargs):
        self.target, self.temperature = pair.fast[0], temperature
        self.share, self.measures = share, tree == "auto"
        self.decoder = sequoia.Decoder(self.target, draft or pair.fast[1], tree, method, **kwargs)

    def __call__(self, prompt, new_tokens):
        new_tokens, steps, stamps = math.ceil(new_tokens * self.share), [], []
        self.decoder.on_step = lambda step: (steps.append(step), stamps.append(time.perf_counter()))
        seconds, text = timed(lambda: self.target.generate(
            prompt, custom_generate=self.decoder, **sampling(prompt, self.temperature, new_tokens)))
        yielded = sum(len(step.tokens) for step in steps)
        return Run(seconds, text.shape[1] - prompt.shape[1], yielded, len(steps), stamps, steps[-1].tree)

    def learn(self, prompts, args):
        """Decodes prompts for what they show its planner, which it returns."""
        torch.manual_seed(0)
        for prompt in progress(prompts, f"learning, {named(self.temperature)}"):
            self(prompt, args.new_tokens)
        # While it measures anew, as the machine has changed its speed, it knows no latency.
        while self.measures and not self.decoder.planner.due:
            self(prompts[0], args.new_tokens)
        return self.decoder.planner


class Theirs:
    """One of transformers' own ways to decode; assistant: the settings of assisted generation."""

    def __init__(self, pair, temperature, assistant=None, **kwargs):
        self.pair, self.temperature = pair, temperature
        self.assistant = assistant or {}
        self.kwargs = {**kwargs, "assistant_model": pair.draft} if assistant else kwargs

    def __call__(self, prompt, new_tokens):
        for name, value in self.assistant.items():
            setattr(self.pair.draft.generation_config, name, value)
        target, stamps = self.pair.target, []
        with target.register_forward_hook(lambda *_: stamps.append(time.perf_counter())):
            seconds, text = timed(lambda: target.generate(
                prompt, **sampling(prompt, self.temperature, new_tokens), **self.kwargs))
        new = text.shape[1] - prompt.shape[1]
        # The pass over the prompt also scores the first candidates.
        return Run(seconds, new, new, len(stamps), stamps)


def interleave(contenders, prompts, args, label, seldom=()):
    """Every contender on every prompt, those named in `seldom` on about PEERS, taking turns: their runs by
    name. A short run of each comes first, to warm up. All have the same seed on the same prompt."""
    for contender in contenders.values():
        # A planner measures for its first forty steps or so.
        contender(prompts[0], 128 if getattr(contender, "measures", False) else 16)
    names = list(contenders)
    runs = {name: Runs() for name in names}
    every = math.ceil(len(prompts) / PEERS)
    for i, prompt in enumerate(progress(prompts, label)):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            if name in seldom and i % every:
                continue
            torch.manual_seed(i)
            runs[name][i] = contenders[name](prompt, args.new_tokens)
    return runs


def fastest(variants, prompts, args):
    """A small sweep: the variant that takes the least time per token over the first two prompts."""
    runs = interleave(variants, prompts[: 1 if args.quick or args.synthetic else 2], args, "settings")
    best = min(variants, key=lambda name: runs[name].ms_per_token())
    return {best: variants[best]}


# --- 6  traversal: walking from the root against verifying from the leaves ----------------------------------
#
# On the same trees, with the same tokens and the same scores of both models. What each would yield is not
# drawn but computed, and so exact for the tree at hand; only the texts and the proposals are samples.

def expected_of_walk(layout, tokens, P, q):
    """The tokens that a walk yields on average: the chances to reach each node, summed. P, q: (size, V)."""
    exists = layout.children >= 0                                                           # (size, ranks)
    chances = chances_of(METHODS["sequoia"], P, q, torch.where(exists, tokens[layout.children], -1))
    accepted = torch.ones_like(P[:, 0])
    accepted[layout.children[exists]] = chances[exists]
    return torch.where(layout.mask[:-1, :-2], accepted, 1).prod(dim=1).sum().item()


def expected_of_traversal(layout, tokens, P, q):
    """Those of traversal: each node's depth + 1 times the chance that it is the first to accept."""
    nodes, masses, _ = METHODS["traversal"].endings(layout, tokens, P, q)
    return (in_turn(masses[None])[0] * (layout.depth[nodes] + 1)).sum().item()


EXPECTED = {"sequoia": expected_of_walk, "traversal": expected_of_traversal}


@dataclass(frozen=True, eq=False)
class Onlooker(sequoia.Method):
    """A method that decodes like its leader, and notes what each of EXPECTED says of every step."""
    leader: sequoia.Method = None
    expected: list = None

    def verify_tree(self, layout, tokens, target_scores, q, *rest):
        P = target_scores(slice(len(q))).softmax(dim=1)                                     # (size, V)
        self.expected.append([expected(layout, tokens, P, q) for expected in EXPECTED.values()])
        return self.leader.verify_tree(layout, tokens, target_scores, q, *rest)


def traversal(args, report):
    """Expected tokens per step of both on the same trees, by tree size and temperature."""
    pair, prompts = pair_of(args), texts(args, 2 * args.count, 128)
    rows = []
    for temperature in args.temperatures:
        # The rates are learnt from every other prompt.
        rates = Ours(pair, temperature, (32, 8)).learn(prompts[1::2], args).rates()
        for size in (8, 48) if args.quick else (8, 16, 32, 64, 128, 256):
            tree = optimal_tree(rates, size, min(size, 16))
            steps, walk, upward = traversal_sums(pair, temperature, tree, prompts[::2], args)
            gain = estimate(lambda upward, walk: 100 * (upward / walk - 1), upward, walk)
            rows.append({"temperature": f"{temperature:g}", "nodes": size, "levels": tree.depth,
                         "steps": int(steps.sum()), "sequoia": float(walk.sum() / steps.sum()),
                         "traversal": float(upward.sum() / steps.sum()), "gain, %": gain})
    report.table(f"Tokens per step on the same trees, {args.count} prompts",
                 "`gain` is what verifying from the leaves adds to the tokens of a walk; what it adds to a "
                 "step's time is not in it. An interval that contains 0 shows no gain.", rows)
    if args.save:
        for axis, _ in report.panels("traversal", [{}]):
            axis.axhline(0, color=BLACK, linewidth=1)
            for i, temperature in enumerate(args.temperatures):
                mine = [row for row in rows if row["temperature"] == f"{temperature:g}"]
                shade = pyplot().get_cmap("viridis_r")(0.2 + 0.7 * i / len(args.temperatures))
                draw_by_size(axis, mine, "gain, %", shade, label=named(temperature), shift=0.1 * (i - 1))
            axis.set_ylabel("more tokens per step\nthan sequoia, %")


def traversal_sums(pair, temperature, tree, prompts, args):
    """By prompt the number of steps and what each of EXPECTED says of them, summed: (prompts,) each."""
    expected, contenders = [], []
    for leader in map(METHODS.get, EXPECTED):
        onlooker = Onlooker(leader.propose, leader.ratios, leader=leader, expected=expected)
        contenders.append(Ours(pair, temperature, tree, onlooker, cuda_graph=False))
    sums = []
    for i, prompt in enumerate(progress(prompts, f"{named(temperature)}, {tree.size} nodes")):
        expected.clear()
        # Half of the text is decoded by one of them, half by the other.
        for contender in contenders:
            torch.manual_seed(i)
            contender(prompt, math.ceil(args.new_tokens / 2))
        sums.append([len(expected), *np.sum(expected, axis=0)])
    return np.array(sums).T


# --- 7  scaling: tokens per step by tree size (section 5.2) -------------------------------------------------

def scaling(args, report):
    """Tokens per step in real decoding: the optimal tree against k sequences verified by SpecInfer."""
    pair, prompts = pair_of(args), texts(args, 2 * args.count, 128)
    sizes = [2**i for i in range(3, 7 if args.quick else 10)]
    rows = []
    for temperature in args.temperatures:
        # The rates are learnt from every other prompt.
        rates = Ours(pair, temperature, (32, 8)).learn(prompts[1::2], args).rates()
        for size in progress(sizes, named(temperature)):
            shapes = sequences_within(size)
            k = max(shapes, key=lambda k: expected_tokens(shapes[k], rates))
            tree = optimal_tree(rates, size, min(size, 16))
            contenders = {"sequoia": Ours(pair, temperature, tree),
                          "k sequences": Ours(pair, temperature, shapes[k], "specinfer")}
            if 16 in shapes:
                contenders["16 sequences"] = Ours(pair, temperature, shapes[16], "specinfer")
            runs = interleave(contenders, prompts[::2], args, f"{size} nodes")
            mine = runs["sequoia"]
            row = {"temperature": f"{temperature:g}", "nodes": size, "levels": tree.depth, "best k": k,
                   "expected": expected_tokens(tree, rates), "sequoia": mine.tokens_per_step()}
            for name, gain in (("k sequences", "gain, %"), ("16 sequences", "gain over 16, %")):
                row[name] = runs[name].tokens_per_step() if name in runs else None
                row[gain] = mine.gain_over(runs[name]) if name in runs else None
            rows.append(row)
    report.table(f"Tokens per step at equal size, {args.count} prompts",
                 "`gain`: what the optimal tree yields beyond k sequences of the same size, with SpecInfer's "
                 "test; best k: of 1, 2, 4, ... 32 by expected tokens. The paper has 33% more than 16 "
                 "sequences at 512 nodes.", rows)
    if args.save:
        styles = {"sequoia": "-", "k sequences": "-", "16 sequences": ":"}
        for axis, mine in report.panels("scaling", rows):
            for i, (name, style) in enumerate(styles.items()):
                draw_by_size(axis, mine, name, COLOURS[name], style, shift=0.08 * (i - 1))
            axis.set_ylabel("tokens per step")


# --- 8  speed: side by side with transformers (section 5.1, Table 1) ----------------------------------------

def speed(args, report):
    """Tokens per step and ms per token of this file and its peers."""
    if args.synthetic:
        return synthetic_speed(args, report)
    pair, prompts = pair_of(args), texts(args, args.count, 128)
    report.say(f"Target {args.target}, draft {args.draft}, {args.dtype}.")
    for temperature in args.temperatures:
        contest(prompts, temperature, args, report, contenders_for(pair, prompts, temperature, args))


def contenders_for(pair, prompts, temperature, args):
    """All who take part, by (name, setting); the peers with the best of their settings."""
    mine = functools.partial(Ours, pair, temperature)
    peer = functools.partial(Theirs, pair, temperature)
    names = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
    assisted = {}
    for setting in itertools.product((2, 5), ("constant", "heuristic"), (0.0, 0.4)):
        assisted["assisted", " ".join(map(str, setting))] = peer(assistant=dict(zip(names, setting)))
    lookup = {("lookup", f"{n} tokens"): peer(prompt_lookup_num_tokens=n) for n in (2, 4, 10)}
    taking_part = {("generate", ""): peer(), ("plain", "no tree"): mine(PLAIN),
                   **fastest(assisted, prompts, args), **fastest(lookup, prompts, args)}
    for k, length in ((1, 3), (2, 4), (4, 4), (5, 8)):
        taking_part["sequences", f"{k} of {length}"] = mine(sequences(k, length), "specinfer")
    # Greedy, all methods are one and the same.
    for method in ("topk", "traversal", "gumbel", "sequoia") if temperature else ("sequoia",):
        taking_part[method, args.tree] = mine(sequoia.tree_shape(args.tree), method)
    return taking_part


def contest(prompts, temperature, args, report, contenders):
    """A table of all contenders on all prompts. Returns the runs by name."""
    seldom = [name for name in contenders if name[0] not in ("plain", "sequoia")]
    runs = interleave(contenders, prompts, args, named(temperature), seldom)
    by_name = {name: mine for (name, _), mine in runs.items()}
    rows = []
    for (name, setting), mine in runs.items():
        if setting == "auto":
            tree = mine.last_tree()
            setting = f"auto {tree.size}x{tree.depth}"
        row = {"temperature": f"{temperature:g}", "method": name, "setting": setting, "prompts": len(mine),
               "tokens/step": mine.tokens_per_step().value, "ms/token": mine.ms_per_token()}
        row |= {f"x {peer}": mine.over(by_name[peer]) for peer in ("generate", "assisted", "plain")}
        rows.append(row)
    report.table(f"{named(temperature)}: {len(prompts)} prompts of {prompts[0].shape[1]} tokens, "
                 f"{args.new_tokens} new ones each; auto: the last planned tree, nodes x levels",
                 "`x plain`: the speed against the same code without a tree, on the prompts that both have; "
                 f"where intervals overlap, who leads is open. {TWO_CORES}", rows)
    return by_name


# --- 9  speed --synthetic: the paper's shapes and tokens per step, with weights made on the spot ------------
#
# Both models share a random bigram core, an embedding for each token and a head in the draft's width, and add
# what their own random layers make of it. The more the core weighs the more the two agree: its share is set,
# by bisection, to the paper's tokens per step. Every product is done; the text is noise.

SHAPES = {
    "7b": (4096, 11008, 32, 32, 32, 128, 32000), "68m": (768, 3072, 2, 12, 12, 64, 32000),
    "1b": (2048, 5632, 22, 32, 4, 64, 32000), "33b": (6656, 17920, 60, 52, 52, 128, 32000),
    "tiny target": (256, 512, 12, 4, 4, 64, 4096), "tiny draft": (144, 384, 1, 4, 4, 32, 4096)}
SYNTHETIC = {"7b-68m": ("7b", "68m"), "1b-68m": ("1b", "68m"), "tiny": ("tiny target", "tiny draft")}
# By temperature the paper's tree for Llama-2-7B and its tokens per step.
PAPER = {0.0: (128, 10, 5.08), 0.6: (128, 7, 3.92)}


class SyntheticPair(Pair):
    """Two random Llama models with a common core."""

    def __init__(self, target, draft):
        super().__init__(target, draft)
        shape = 2, draft.config.vocab_size, draft.config.hidden_size
        self.core, head = torch.randn(shape, device=draft.device)
        for model in (self.target, self.draft):
            model.get_input_embeddings().weight.data.zero_()
            model.get_output_embeddings().weight.data.zero_()[:, : head.shape[1]] = head

    @torch.no_grad()
    def set_share(self, share):
        """Sets the core's size relative to what the layers add, which grows with the root of their number."""
        vars(self).pop("fast", None)
        probe = torch.arange(64, device=self.core.device)[None]
        for model in (self.target, self.draft):
            scale = share * model.config.num_hidden_layers**0.5
            model.get_input_embeddings().weight.data[:, : self.core.shape[1]] = scale * self.core
            norm = model.model.norm.weight
            norm.data.fill_(1)
            # Logits of deviation 6: distributions about as sharp as a trained model's.
            norm.data.fill_(6 / model(probe).logits.float().std().item())

    def tune(self, temperature, size, depth, wanted):
        """Finds the share with which the optimal tree yields `wanted` tokens. Returns what it does yield."""
        middle, seen = 0.0, []
        for half in progress([2.0**-i for i in range(1, 9)], f"matching {wanted} tokens per step"):
            self.set_share(float(np.exp(middle)))
            rates = self.acceptance_rates(temperature)
            expected = expected_tokens(optimal_tree(rates, size, depth), rates)
            seen.append((abs(expected - wanted), middle, expected))
            middle += half * math.copysign(math.log(10), wanted - expected)
        _, nearest, expected = min(seen)
        self.set_share(float(np.exp(nearest)))
        return expected

    @torch.no_grad()
    def acceptance_rates(self, temperature, rows=16, prompt=16, new=32):
        """Along texts of the target's own, after prompts that are the same every time: (ranks,)."""
        ids = torch.arange(rows * prompt, device=self.core.device).reshape(rows, prompt)
        torch.manual_seed(0)
        output = self.target.generate(ids, **sampling(ids, temperature, new), return_dict_in_generate=True,
                                      output_logits=True)
        target = torch.stack(output.logits, dim=1).float().flatten(0, 1)                    # (rows * new, V)
        draft = self.draft(output.sequences).logits[:, prompt - 1 : -1].float().flatten(0, 1)
        decoder = decoder_for(self, temperature)
        p, q = scores_of(decoder, target, draft=False), scores_of(decoder, draft, draft=True)
        method = decoder.method
        chances = chances_of(method, verified(method, p), q, method.propose(q, 32))         # (rows * new, k)
        return chances.mean(dim=0).cpu().numpy()


def random_llama(shape, args, device):
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "head_dim", "vocab_size")
    config = LlamaConfig(**dict(zip(names, shape)), tie_word_embeddings=False, max_position_embeddings=2048,
                         initializer_range=shape[0] ** -0.5)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype)).eval()
    for layer in model.model.layers:
        # Attention to few tokens, as in trained models.
        layer.self_attn.q_proj.weight.data.mul_(3)
    return model


def synthetic_speed(args, report):
    """Where a step's time goes at full scale, and how near it is to the memory's speed."""
    torch.manual_seed(0)
    shapes = [SHAPES[name] for name in SYNTHETIC[args.synthetic]]
    pair = SyntheticPair(*(random_llama(shape, args, args.device) for shape in shapes))
    prompts = [torch.randint(len(pair.core), (1, 128), device=args.device) for _ in range(args.count)]
    read = set(pair.target.parameters()) - {pair.target.get_input_embeddings().weight}
    weights = sum(weight.nbytes for weight in read)
    buffer = torch.ones(weights // 4, device=args.device)

    def reading(*_):
        seconds = float(np.median([timed(buffer.sum)[0] for _ in range(7)]))
        return Run(seconds, 1, 1, 1, [0.0, seconds])

    floor = reading().seconds
    report.say(f"Synthetic pair {args.synthetic}, {args.dtype}. To read the target's "
               f"{weights / 1e9:.3f} GB takes {1e3 * floor:.2f} ms ({weights / floor / 1e9:.0f} GB/s).")
    splits = []
    for temperature in args.temperatures:
        if temperature not in PAPER:
            raise ValueError(f"--synthetic knows the temperatures 0 and 0.6 only, got {temperature:g}")
        size, depth, wanted = PAPER[temperature]
        expected = pair.tune(temperature, size, depth, wanted)
        report.say(f"{named(temperature)}: {wanted} tokens per step wanted, tuned to {expected:.2f}.")
        mine = functools.partial(Ours, pair, temperature)
        contenders = contenders_for(pair, prompts, temperature, args)
        contenders["floor", "weights read"] = reading
        contenders["paper's tree", f"{size}x{depth}"] = mine((size, depth))
        contenders["slow draft", "target, 1 of 3"] = mine(sequences(1, 3), "specinfer", pair.fast[0])
        runs = contest(prompts, temperature, args, report, contenders)
        for name in ("plain", "sequoia", "paper's tree"):
            parts = split_step(pair, temperature, prompts[0], args, runs, name)
            splits.append({"temperature": f"{temperature:g}", "method": name, **parts})
    report.table("A step's time in ms, and the share of the memory's speed reached",
                 "Medians of one run: where the time goes (rest: proposals, masks, Python), and how many "
                 "plain steps a step costs, which its tokens must make up for.", splits)


def split_step(pair, temperature, prompt, args, runs, name):
    """The parts of a step, in ms: medians over a run with a clock around each part. On a GPU, where a step is
    one graph, that run is without it and the parts are timed as graphs of their own."""
    tree = runs[name].last_tree()
    mine = Ours(pair, temperature, tree)
    spent, rows, start = Counter(), [], None

    def clock(part, function):
        def clocked(self, *arguments):
            seconds, result = timed(lambda: function(self, *arguments))
            # Moving twice is not the same as moving once.
            if mine.decoder.static and part != "moves" and start is not None:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    function(self, *arguments)
                seconds = min(timed(graph.replay)[0] for _ in range(3))
            model = "target" if getattr(self, "model", None) is pair.fast[0] else "draft"
            spent[part or model] += 1e3 * seconds
            return result
        return clocked

    def on_step(step):
        nonlocal start
        now = time.perf_counter()
        if start is not None:
            rows.append({**spent, "rest": 1e3 * (now - start) - spent.total()})
        start = now
        spent.clear()

    mine.decoder.on_step = on_step
    model, matching = sequoia.CachedModel, sequoia.Matching
    with (mock.patch.multiple(model, score=clock(None, model.score), move=clock("moves", model.move)),
          mock.patch.object(sequoia.Method, "verify_tree", clock("verify", sequoia.Method.verify_tree)),
          mock.patch.object(matching, "verify_tree", clock("verify", matching.verify_tree)),
          mock.patch.object(sequoia.Decoder, "replay", sequoia.Decoder.program)):
        how = sampling(prompt, temperature, args.new_tokens)
        mine.target.generate(prompt, custom_generate=mine.decoder, **how)
    parts = {part: float(np.median([row.get(part, 0.0) for row in rows]))
             for part in ("target", "draft", "verify", "moves", "rest")}
    whole = runs[name].ms_per_step()
    if args.device != "cpu":
        parts["rest"] = whole - sum(list(parts.values())[:-1])
    return {"tree": f"{tree.size}x{tree.depth}", "step": whole, **parts,
            "floor / step": runs["floor"].ms_per_step() / whole,
            "x plain step": whole / runs["plain"].ms_per_step()}


# --- 10  planner: promised and achieved (section 4) ---------------------------------------------------------

def planner(args, report):
    """The planned tree and eleven others, predicted and measured; and what a useless draft costs. All decode
    with gumbel, so that all write the same texts: what differs is the trees."""
    pair, prompts = pair_of(args), texts(args, 2 * args.count, 128)
    torch.manual_seed(0)
    useless = AutoModelForCausalLM.from_config(pair.draft.config, dtype=pair.draft.dtype)
    useless = sequoia.pack(useless.to(args.device).eval())
    rows, choices, times = [], [], []
    for temperature in args.temperatures:
        mine = functools.partial(Ours, pair, temperature, method="gumbel")
        auto = mine("auto")
        learnt = auto.learn(prompts[1::2], args)
        rates, latency = learnt.rates()[:, :16], learnt.latency()
        chosen = sequoia.plan(rates, latency).tree
        trees = trees_around(chosen, rates, latency)
        contenders = {"plain": mine(PLAIN), "auto": auto, "useless": mine("auto", draft=useless)}
        contenders |= {name: mine(tree) for name, tree in trees.items()}
        runs = interleave(contenders, prompts[::2], args, f"trees, {named(temperature)}")
        for name, tree in trees.items():
            tokens = expected_tokens(tree, rates)
            promised = None
            if tree.size <= latency.sizes[-1]:
                promised = float(tokens * latency.t[0] / latency.of_step(tree.size, tree.depth))
            rows.append({"temperature": f"{temperature:g}", "tree": name, "planned": "<--" * (tree == chosen),
                         "tokens/step, predicted": tokens, "achieved": runs[name].tokens_per_step(),
                         "x plain, predicted": promised, "x plain": runs[name].over(runs["plain"])})
        best = min(trees, key=lambda name: runs[name].ms_per_token())
        planned = next((name for name, tree in trees.items() if tree == chosen), "plain")
        choices.append({"temperature": f"{temperature:g}", "planned": planned, "best": best,
                        "planned / best": runs[planned].over(runs[best]),
                        "auto / best": runs["auto"].over(runs[best]),
                        "auto, x plain": runs["auto"].over(runs["plain"]),
                        "useless, x plain": runs["useless"].over(runs["plain"])})
        for size, seconds in zip(latency.sizes, latency.t):
            times.append({"temperature": f"{temperature:g}", "nodes": size, "ms": 1e3 * seconds,
                          "x one node": seconds / latency.t[0], "draft pass c, ms": 1e3 * latency.c})
    report.table(f"Predicted and achieved, {args.count} prompts",
                 "A plan promises what it was computed from, rates and times of other prompts; where "
                 "intervals overlap, who leads is open.", rows)
    report.table("The planned tree's speed against the best",
                 "Near 1 the planner has found as good a tree as any of the twelve; the same runs choose the "
                 "best, which flatters it. auto: the tree may change; useless: a random draft.", choices)
    report.table("t(n), a step without its draft passes, and c, as measured while decoding", TWO_CORES, times)
    if args.save:
        for axis, mine in report.panels("planner", rows, height=6.5):
            draw_promises(axis, mine)


def draw_promises(axis, rows):
    """A line for each tree: what was promised, a ring, and what was achieved, a point with its interval."""
    lines = range(len(rows))
    axis.plot([row["x plain, predicted"] for row in rows], lines, "o", markersize=9, fillstyle="none",
              color=BLACK, label="predicted")
    achieved, halves = zip(*(row["x plain"] for row in rows))
    axis.errorbar(achieved, lines, xerr=halves, fmt="o", markersize=6, capsize=3, elinewidth=1.5,
                  color=COLOURS["sequoia"], label="achieved")
    axis.axvline(1, color=BLACK, linestyle="--", linewidth=1, label="no tree")
    axis.set_yticks(lines, [row["tree"] for row in rows])
    for label, row in zip(axis.get_yticklabels(), rows):
        if row["planned"]:
            label.set(fontweight="bold", color=COLOURS["sequoia"])
    axis.invert_yaxis()
    axis.set_xlabel("times plain decoding\n(bold: the planned tree)")


def trees_around(chosen, rates, latency):
    """The planned tree, eight near it, and three of sequences, by name."""
    size, depth = (chosen.size, chosen.depth) if chosen.size > 1 else (8, 4)
    distance = {chosen: 0.0} if chosen.size > 1 else {}
    for n in {max(2, round(size * 2 ** (i / 2))) for i in range(-4, 5)}:
        for d in range(max(2, depth - 2), depth + 3):
            if d <= n <= min(latency.sizes[-1], sum(rates.shape[1] ** level for level in range(d))):
                tree = optimal_tree(rates, n, d)
                distance.setdefault(tree, abs(math.log2(n / size)) + 0.8 * abs(tree.depth - depth))
    near = sorted(sorted(distance, key=distance.get)[:9], key=lambda tree: (tree.size, tree.depth))
    trees = {f"{tree.size}x{tree.depth}": tree for tree in near}
    for k, length in ((1, 3), (2, 4), (4, 4)):
        trees[f"sequences {k} of {length}"] = sequences(k, length)
    return trees


# --- 11  offload: a target that streams from host memory (section 5.1, Table 2) -----------------------------

def offload(args, report):
    """Seconds per step and per token of a target whose layers stay in host memory."""
    torch.manual_seed(0)
    name = "1b" if args.device == "cpu" else "33b"
    count = args.layers or (4 if args.quick else SHAPES[name][2])
    target = random_llama((*SHAPES[name][:2], count, *SHAPES[name][3:]), args, "cpu")
    layer = sum(p.nbytes for p in target.model.layers[0].parameters())
    pair = SyntheticPair(sequoia.offload(target, args.device), random_llama(SHAPES["68m"], args, args.device))
    pair.set_share(8.0)
    piece = torch.ones(layer, dtype=torch.uint8, pin_memory=args.device != "cpu")
    buffer = torch.empty_like(piece, device=args.device, pin_memory=False)
    copying = count * min(timed(lambda: buffer.copy_(piece))[0] for _ in range(9))
    report.say(f"{count} layers, {count * layer / 1e9:.2f} GB of {args.dtype}, stream to "
               f"{args.device} in every pass; copying alone takes {copying:.3f} s, "
               f"{count * layer / copying / 1e9:.2f} GB/s.")
    prompts = [torch.randint(len(pair.core), (1, 32), device=args.device) for _ in range(args.count)]
    rows = []
    for temperature in args.temperatures:
        mine = functools.partial(Ours, pair, temperature)
        contenders = {"no tree": mine(PLAIN, share=1 / 4), "auto": mine("auto"),
                      "5 sequences of 8": mine(sequences(5, 8), "specinfer"),
                      "16 sequences of 48": mine(sequences(16, 48), "specinfer", share=1 / 4)}
        runs = interleave(contenders, prompts, args, named(temperature))
        for name, found in runs.items():
            tree, step = found.last_tree(), found.ms_per_step() / 1e3
            rows.append({"temperature": f"{temperature:g}", "tree": name, "nodes": tree.size,
                         "levels": tree.depth, "tokens/step": found.tokens_per_step().value, "s/step": step,
                         "s/token": found.ms_per_token() / 1e3, "copying / step": copying / step,
                         "x no tree": found.over(runs["no tree"])})
    report.table(f"Steps of a target that streams, {args.count} prompts",
                 "The nearer `copying / step` is to 1, the less a larger tree costs; on a CPU, which only "
                 "shows the mechanism, computing takes as long as copying or longer.", rows)
    if args.device != "cpu":
        report.say(f"The most memory in use on the GPU: {torch.cuda.max_memory_allocated() / 1e9:.2f} GB.")


# --- 12  The command line -----------------------------------------------------------------------------------

COMMANDS = {command.__name__: command for command in (
    trees, speed, planner, verification, traversal, scaling, offload)}
# Prompts, new tokens of each, temperatures; and the same with --quick.
DEFAULTS = {
    "trees": ((0, 0, []), (0, 0, [])),
    "speed": ((330, 128, [0.0, 0.6]), (4, 64, [0.0, 0.6])),
    "speed --synthetic": ((2, 128, [0.0]), (2, 64, [0.0])),
    "planner": ((30, 64, [0.0, 0.6]), (4, 64, [0.0, 0.6])),
    "verification": ((28, 0, [0.2, 0.6, 1.0]), (3, 0, [0.6, 1.0])),
    "traversal": ((12, 64, [0.2, 0.6, 1.0]), (3, 64, [0.6, 1.0])),
    "scaling": ((10, 64, [0.0, 0.6]), (4, 64, [0.0, 0.6])),
    "offload": ((4, 64, [0.6]), (2, 32, [0.6]))}


def jobs(device, quick):
    """What `all` does, in its order."""
    full = "1b-68m" if device == "cpu" else "7b-68m"
    pair = "tiny" if quick else full
    return [f"{command} {pair}" if "--" in command else command for command in DEFAULTS]


def arguments(argv):
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add, tiny = parser.add_argument, os.path.relpath(sequoia.TINY)
    add("command", choices=[*COMMANDS, "all"])
    add("--target", default=f"{tiny}/target", help="a folder or hub name (the bundled target)")
    add("--draft", default=f"{tiny}/draft", help="the draft's (the bundled one)")
    add("--prompts", metavar="FILE", help="a text to cut prompts from (held-out standard library)")
    add("--save", action="store_true", help="write the tables and the figure into figures/")
    add("--quick", action="store_true", help="fewer and shorter runs; saved into figures/quick/")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(a GPU, if any)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="(bfloat16 where the processor has it)")
    add("--temperatures", type=float, nargs="+", metavar="T", help="(0 0.6; others for some commands)")
    add("--count", type=int, metavar="N", help=f"prompts (330; {PEERS} for most; others elsewhere)")
    add("--new-tokens", type=int, metavar="N", help="decoded for each prompt (128; others for some commands)")
    add("--tree", default="auto", help="speed: this file's tree, as for sequoia.py (auto)")
    add("--synthetic", choices=SYNTHETIC, help="speed: a random pair of these shapes, tuned")
    add("--layers", type=int, metavar="N", help="offload: of the target (22; 60 on a GPU; 4 with --quick)")
    args = parser.parse_args(argv)
    good = args.device != "cpu" or torch.bfloat16 in sequoia.packable_dtypes()
    args.dtype = args.dtype or ("bfloat16" if good else "float32")
    args.offload, args.save = False, args.save or args.command == "all"
    defaults = DEFAULTS.get("speed --synthetic" if args.synthetic else args.command, ((), ()))[args.quick]
    for name, value in zip(("count", "new_tokens", "temperatures"), defaults):
        setattr(args, name, getattr(args, name) or value)
    return args


def main():
    args = arguments(sys.argv[1:])
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    options = [word for word in sys.argv[1:] if word not in (args.command, "--save")] + ["--save"] * args.save
    # Before anything is written.
    origin = provenance(args.device)
    try:
        if args.save:
            pyplot()
        for command in jobs(args.device, args.quick) if args.command == "all" else [args.command]:
            words = [*command.split(), *options]
            mine = arguments(words)
            report = Report(words)
            report.folder.mkdir(parents=True, exist_ok=True)
            print(f"\n## python bench.py {report.command}", flush=True)
            seconds, _ = timed(lambda: COMMANDS[mine.command](mine, report))
            if args.save:
                report.save(seconds, args.device, origin)
    except (ValueError, OSError, ImportError) as error:
        print(f"bench.py: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2)


if __name__ == "__main__":
    main()
