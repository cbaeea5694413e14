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

The same prompts, seeds and weights for all, taking turns, so that a slow minute of the machine hits all
alike. Every comparison is paired by prompt: 1.33 ± 0.05 is a ratio of sums over the prompts and half its 95%
interval. Tokens per step are all tokens over all steps, ms/token all time over all tokens. transformers' own
methods run on the models as transformers loads them, each with its best settings.
"""
import argparse
import contextlib
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
from dataclasses import dataclass, field
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


# --- 1  Toolbox: intervals, tables, results.md, figures, time -----------------------------------------------


class Estimate(NamedTuple):
    """A value and half its 95% interval, NaN where nothing tells it."""
    value: float
    half: float = math.nan


def estimate(function, *columns):
    """A function of sums over prompts, with its interval. columns: (prompts, ...) arrays, to be summed.

    The jackknife: the value is computed anew without each prompt in turn, and how far these values scatter
    tells how far it would vary with other prompts. For a plain mean it is the usual standard error."""
    sums = [column.sum(axis=0) for column in columns]
    value = float(function(*sums))
    prompts = len(columns[0])
    if prompts < 2:
        return Estimate(value)
    without_one = []
    for i in range(prompts):
        without_one.append(function(*(total - column[i] for total, column in zip(sums, columns))))
    error = math.sqrt((prompts - 1) * np.var(without_one))
    return Estimate(value, student(prompts - 1) * error)


def student(freedom):
    """What Student's t stays within, either way, with probability 95%: to 1% from three degrees on."""
    return 1.96 + 2.37 / freedom + 2.82 / freedom**2 + 2.56 / freedom**3


def percent_more(ratio):
    return Estimate(100 * (ratio.value - 1), 100 * ratio.half)


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
        cells = [list(rows[0])]
        for row in rows:
            cells.append([show(value) for value in row.values()])
        widths = [max(map(len, column)) for column in zip(*cells)]
        rule = ["-" * (width - 1) + ":" for width in widths]
        rule[0] = "-" * widths[0]
        cells.insert(1, rule)
        lines = []
        for first, *rest in cells:
            padded = [first.ljust(widths[0])]
            padded += [cell.rjust(width) for cell, width in zip(rest, widths[1:])]
            lines.append(f"| {' | '.join(padded)} |")
        table = "\n".join(lines)
        short = " (--quick: too few to conclude anything)" if self.quick else ""
        self.say(f"**{title}{short}**\n\n{lesson}\n\n{table}")

    def panels(self, name, rows, height=5.2):
        """Axes to draw on, one for each temperature, with its rows. They become figures/NAME.png."""
        temperatures = list(dict.fromkeys(row.get("temperature", "") for row in rows))
        size = (2 + 4.8 * len(temperatures), height)
        fig, axes = pyplot().subplots(1, len(temperatures), figsize=size, squeeze=False, layout="constrained")
        for axis, temperature in zip(axes[0], temperatures):
            axis.set_title(temperature and named(temperature))
            yield axis, [row for row in rows if row.get("temperature", "") == temperature]
        handles, labels = axes[0, 0].get_legend_handles_labels()
        columns = math.ceil(len(labels) / math.ceil(len(labels) / (2 + len(temperatures))))
        fig.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
        self.folder.mkdir(parents=True, exist_ok=True)
        fig.savefig(self.folder / f"{name}.png", dpi=150)
        pyplot().close(fig)
        self.say(f"![{name}]({name}.png)")

    def save(self, seconds, device):
        """Puts this report into results.md, in place of an earlier one of the same command."""
        path = self.folder / "results.md"
        old = path.read_text(encoding="utf-8").split("\n## ")[1:] if path.exists() else []
        sections = {section.split("\n", 1)[0]: section.rstrip() + "\n" for section in old}
        title = f"`python bench.py {self.command}`"
        sections[title] = f"{title}\n\n{provenance(device)}; {seconds / 60:.1f} minutes.\n{self.text}"
        order = [f"`python bench.py {job}" for job in jobs(device, self.quick)]

        def place(title):
            return max((i for i, start in enumerate(order) if title.startswith(start)), default=99)

        command = "python bench.py all" + " --quick" * self.quick
        head = (f"# Results\n\nWritten by `{command}`. ± is half a 95% interval, by prompt. Compare within a "
                "table, not across.\n")
        self.folder.mkdir(parents=True, exist_ok=True)
        parts = [head] + [sections[title] for title in sorted(sections, key=place)]
        path.write_text("\n## ".join(parts), encoding="utf-8")


def show(value):
    """A table's cell. An estimate's two numbers have as many decimals as the larger needs."""
    if isinstance(value, Estimate):
        digits = decimals(max(abs(value.value), value.half if value.half > 0 else 0.0))
        text = f"{value.value:.{digits}f}"
        # One that is compared with itself has no interval.
        return f"{text} ± {value.half:.{digits}f}" if value.half > 0 else text
    if isinstance(value, float):
        return f"{value:.{decimals(abs(value))}f}"
    return "-" if value is None else str(value)


def decimals(size):
    if size >= 100:
        return 0
    return 2 if size >= 1 else 3


def provenance(device):
    """The day, the commit, the device and the versions, in words."""
    def git(*arguments):
        return subprocess.run(["git", *arguments], cwd=HERE, capture_output=True, text=True).stdout.strip()

    if device == "cpu":
        cpuinfo = Path("/proc/cpuinfo")
        found = re.search(r"model name\s*: (.*)", cpuinfo.read_text() if cpuinfo.exists() else "")
        name = f"{found[1] if found else 'processor'}, {os.cpu_count()} cores"
    else:
        name = torch.cuda.get_device_name(device)
    commit = git("describe", "--always", "--dirty", "--exclude=*") or "unknown"
    return (f"{time.strftime('%Y-%m-%d')}; commit {commit}; {name}; Python {platform.python_version()}, torch "
            f"{torch.__version__}, transformers {transformers.__version__}")


# A progress bar on standard error, while it is a terminal.
progress = functools.partial(tqdm, leave=False, disable=None)


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


BLACK = "#111827"
COLOURS = {"sequoia": "#15803d", "k sequences": "#ea580c", "16 sequences": "#9a3412", "2-ary": "#0891b2",
           "chain": "#be185d"}


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
    which part of a doubling to the right, so that intervals do not cover each other."""
    rows = [row for row in rows if row[name] is not None]
    sizes = [row["nodes"] for row in rows]
    moved = [size * 2**shift for size in sizes]
    values = [row[name] for row in rows]
    if isinstance(values[0], Estimate):
        heights, halves = zip(*values)
        axis.errorbar(moved, heights, yerr=halves, fmt=style, marker="o", markersize=5, elinewidth=1.2,
                      capsize=3, color=colour, label=label or name)
    else:
        axis.plot(moved, values, style, color=colour, label=label or name)
    axis.set_xscale("log", base=2)
    ticks = sizes[:: 2 if len(sizes) > 7 else 1]
    if len(ticks) >= len(axis.get_xticks(minor=False)) or not axis.get_xlabel():
        axis.set_xticks(ticks, ticks)
    axis.minorticks_off()
    axis.set_xlabel("tree size (nodes)")


# --- 2  Pairs of models, texts, and what both say of them ---------------------------------------------------


class Pair:
    """Two models as transformers loads them, and `fast`, for sequoia.py: on a CPU copies that are packed."""

    def __init__(self, target, draft):
        self.target = target.eval()
        self.draft = draft.eval()
        # All contenders decode to the same length, past any EOS.
        for model in (target, draft):
            model.config.eos_token_id = None
            model.generation_config.eos_token_id = None
            model.generation_config.pad_token_id = 0

    @functools.cached_property
    def fast(self):
        models = []
        for model in (self.target, self.draft):
            as_it_is = model.device.type != "cpu" or hasattr(model, "offloaded")
            models.append(model if as_it_is else sequoia.pack(copy.deepcopy(model)))
        return models


def pair_of(args):
    """The pair that the command line names, not packed."""
    args.tokenizer = sequoia.load_tokenizer(args)
    with mock.patch.object(sequoia, "pack", lambda model: model):
        return Pair(sequoia.load(args.target, args), sequoia.load(args.draft, args))


def texts(args, count, length):
    """`count` pieces of `length` tokens, (1, length) each, always the same, none of which overlap: from the
    file given, or from files of the standard library that the bundled pair was not trained on."""
    if args.prompts:
        files = [Path(args.prompts)]
    else:
        from tiny.train import source_files
        files = source_files(held_out=True)
    pieces = []
    for file in files:
        ids = args.tokenizer(file.read_text(encoding="utf-8", errors="ignore"))["input_ids"]
        starts = range(0, len(ids) - length + 1, length)
        pieces += [ids[start : start + length] for start in starts]
    if len(pieces) < count:
        raise ValueError(f"{args.prompts} has {len(pieces)} pieces of {length} tokens, {count} are needed")
    chosen = [pieces[i * len(pieces) // count] for i in range(count)]
    return [torch.tensor([piece], device=args.device) for piece in chosen]


def sampling(prompt, temperature, new_tokens, top_p=1.0):
    """What `generate` is told."""
    how = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": new_tokens}
    if temperature:
        return {**how, "do_sample": True, "temperature": temperature, "top_k": 0, "top_p": top_p}
    return {**how, "do_sample": False}


def decoder_for(pair, temperature, top_p=1.0):
    """A Decoder that a call of `generate` has set to sample so."""
    decoder = sequoia.Decoder(pair.target)
    prompt = torch.zeros(1, 1, dtype=torch.long, device=pair.target.device)
    pair.target.generate(prompt, custom_generate=decoder, **sampling(prompt, temperature, 1, top_p))
    return decoder


def scores_of(decoder, logits, draft):
    """A model's scores, (positions, V), as this Decoder shapes them, for its target or its draft."""
    return decoder.scores(logits, slice(None), draft)


def verified(method, scores):
    """The probabilities that a method holds the children against: a greedy one knows the token, as the
    limit of temperature 0 and where its noise is shared. (positions, V)."""
    if isinstance(method, sequoia.Greedy):
        return F.one_hot(scores.argmax(dim=1), scores.shape[1]).float()
    return scores.softmax(dim=1)


def ratios_of(method, P, q, tokens):
    """Every child's chance when it is tried, (rows, k). Noise that accepts none has all of them tried."""
    noise = torch.full(tokens.shape, math.inf, dtype=P.dtype, device=P.device)
    return method.ratios(P, q, tokens, noise)[0].clamp(max=1)


def in_turn(ratios):
    """The chance of each to be the first that is accepted, (rows, k)."""
    return ratios * F.pad((1 - ratios).cumprod(dim=1)[:, :-1], (1, 0), value=1)


# --- 3  trees: what the dynamic program finds, and what that costs (sections 3.1 and 5.2, Figure 1) ---------

# Llama-3-70B with the 8B as its draft, CNN Daily Mail.
PAPER_RATES = [0.7732, 0.1039, 0.0402, 0.0206, 0.0128, 0.0081, 0.0064, 0.0043, 0.0035, 0.0026, 0.0025,
               0.0021, 0.0016, 0.0014, 0.0010, 0.0010, 0.0010, 0.0007, 0.0007, 0.0006, 0.0007, 0.0006,
               0.0004, 0.0004, 0.0005, 0.0006, 0.0004, 0.0003, 0.0002, 0.0004, 0.0001]


def trees(args, report):
    """Expected tokens by size and shape, at the paper's acceptance rates; the dynamic program's cost."""
    largest = 1024 if args.quick else 4096
    costs = []
    for n, d, b in [(512, 12, 16), (1024, 12, 16), (512, 24, 16), (512, 12, 31), (largest, 24, 31)]:
        run = functools.partial(sequoia.expected_tokens_table, PAPER_RATES, n, d, b)
        seconds = min(timed(run)[0] for _ in range(3 if n <= 1024 else 1))
        cost = {"nodes n": n, "levels d": d, "children b": b, "seconds": seconds}
        costs.append(cost)
        cost["x first"] = seconds / costs[0]["seconds"]
    report.table("What the dynamic program takes, and that against the first row",
                 f"The steps are n² d b, and a plan asks for at most {sequoia.LARGEST} nodes. The least of "
                 "three times, of one above 1024 nodes.", costs)

    best = sequoia.expected_tokens_table(PAPER_RATES, largest, 24).max(axis=1)              # (size + 1,)
    rows = []
    for n in [2**i for i in range(3, largest.bit_length())]:
        by_k = {k: expected_tokens(tree, PAPER_RATES) for k, tree in sequences_within(n).items()}
        binary = sequoia.k_ary(2, n.bit_length() - 1)
        rows.append({"nodes": n, "sequoia": float(best[: n + 1].max()), "k sequences": max(by_k.values()),
                     "16 sequences": by_k.get(16), "2-ary": expected_tokens(binary, PAPER_RATES),
                     "chain": by_k[1]})
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
    pair = pair_of(args)
    pieces = []
    for piece in progress(texts(args, args.count, 256), "reading"):
        # The logits of both after each of its last tokens, (32, V).
        pieces.append([model(piece).logits[0, -32:].float() for model in (pair.target, pair.draft)])
    generator = torch.Generator(args.device).manual_seed(0)
    settings = list(itertools.product(args.temperatures, (1.0, 0.9) if args.quick else (1.0, 0.9, 0.8)))
    rows = []
    for temperature, top_p in progress(settings, "rejection rates"):
        decoder = decoder_for(pair, temperature, top_p)
        scores = []
        for target, draft in pieces:
            scores.append([scores_of(decoder, target, draft=False), scores_of(decoder, draft, draft=True)])
        rates = all_rejection_rates(scores, CHILDREN, generator, repeats=2)
        rates["best"] = bound(least_rejection_independent, scores, CHILDREN)
        setting = {"temperature": f"{temperature:g}", "top-p": f"{top_p:g}"}
        rows += rejection_rows(setting, rates, CHILDREN, compared=(1, 8))
    report.table(f"Rejection rate of k children, {32 * len(pieces)} positions in {len(pieces)} texts; best: "
                 "the least possible with independent children",
                 "Lower is better; `k = 8, x sequoia` compares a method's rate with sequoia's at the same "
                 "positions, below 1 where it rejects less often.", rows)

    # The likeliest 6 tokens of each position, renormalised.
    few = []
    decoder = decoder_for(pair, 1.0)
    for target, draft in pieces:
        p = scores_of(decoder, target, draft=False)
        q = scores_of(decoder, draft, draft=True)
        likeliest = (p.softmax(dim=1) + q.softmax(dim=1)).topk(6, dim=1).indices
        few.append([p.gather(1, likeliest), q.gather(1, likeliest)])
    ks = CHILDREN[:3]
    rates = all_rejection_rates(few, ks, generator, repeats=50)
    rates["best, independent"] = bound(least_rejection_independent, few, ks)
    rates["best, different"] = bound(least_rejection_different, few, ks)
    report.table("The same over 6 tokens at temperature 1; best: with independent, or different, children",
                 "What children drawn without replacement could reach at best can be computed for so few "
                 "tokens only.", rejection_rows({}, rates, ks, compared=(1, 4)))


def rejection_rows(setting, rates, ks, compared):
    """A row for each method; rates: by method, (texts, ks). Compared with sequoia for some numbers k."""
    rows = []
    for name, mine in rates.items():
        row = {**setting, "method": name}
        for i, k in enumerate(ks):
            row[f"k = {k}"] = float(mine[:, i].mean())
        for k in compared:
            i = ks.index(k)
            row[f"k = {k}, x sequoia"] = estimate(operator.truediv, mine[:, i], rates["sequoia"][:, i])
        rows.append(row)
    return rows


def all_rejection_rates(scores, ks, generator, repeats):
    """Every method's rates, (texts, ks). With one level traversal is sequoia."""
    return {name: rejection_rates(method, scores, ks, generator, repeats)
            for name, method in METHODS.items() if name != "traversal"}


def rejection_rates(method, scores, ks, generator, repeats):
    """The chance that all of k children are rejected, for each text and k, (texts, ks): the mean over
    positions, and over some draws of proposals and shared noise, of the product of 1 - ratio over the
    children. scores: for each text the target's and the draft's, (positions, V)."""
    rates = np.zeros((len(scores), len(ks)))
    for text, _ in itertools.product(range(len(scores)), range(repeats)):
        p, q = scores[text]
        if method.shared_noise:
            uniform = torch.rand(p.shape, generator=generator, dtype=torch.float64, device=p.device)
            noise = sequoia.gumbel(uniform)
            p = p + noise
            q = q + noise
        P = verified(method, p)
        tokens = method.propose(q, max(ks), generator)                                      # (rows, k)
        # SpecTr's ratios depend on how many children there are, so each k is verified by itself.
        for i, k in enumerate(ks):
            rejected = (1 - ratios_of(method, P, q, tokens[:, :k])).prod(dim=1)
            rates[text, i] += rejected.mean().item() / repeats
    return rates


def bound(least_rejection, scores, ks):
    """What a rule cannot go below, (texts, ks)."""
    rows = []
    for p, q in scores:
        P = p.double().softmax(dim=1)
        Q = q.double().softmax(dim=1)
        rows.append([least_rejection(P, Q, k) for k in ks])
    return np.array(rows)


# The best that any verification rule can do is a transport problem: of each set of children's chance as much
# as can be goes to tokens in the set, and no token gets more than P. That is a linear program, and by
# max-flow = min-cut what is left over, the rejection rate, is the largest excess of a set A of tokens,
#
#     max over A of  Pr(all children in A) - P(A),          for one child the distance ||P - Q||_1 / 2.


def least_rejection_independent(P, Q, k):
    """With independent children the excess is Q(A)^k - P(A), a convex function of the point (P(A), Q(A)), so
    the best A is an extreme one: the tokens with Q / P above a threshold. The mean over (positions, V)."""
    order = torch.where(Q > 0, Q / P, 0).argsort(dim=1, descending=True)
    P_of_A = P.gather(1, order).cumsum(dim=1)
    Q_of_A = Q.gather(1, order).cumsum(dim=1)
    return (Q_of_A**k - P_of_A).amax(dim=1).clamp(min=0).mean().item()


def least_rejection_different(P, Q, k):
    """The same for children drawn without replacement, by trying all 2^V sets."""
    V = P.shape[1]
    P = P.cpu()
    Q = Q.cpu()
    member = ((torch.arange(2**V)[:, None] >> torch.arange(V)) & 1).bool()                  # (2^V, V): A
    inside = torch.zeros(len(P), 2**V, dtype=torch.double)
    for draws in itertools.permutations(range(V), k):
        others = [token for token in range(V) if token not in draws]
        # Summed from the end, as 1 - what is drawn would cancel.
        left = Q[:, [*draws, *others]].flip(1).cumsum(dim=1).flip(1)[:, :k]
        chance = torch.where(left > 0, Q[:, draws] / left, 1 / (V - torch.arange(k))).prod(dim=1)
        inside += chance[:, None] * member[:, draws].all(dim=1)
    return (inside - P @ member.T.double()).amax(dim=1).clamp(min=0).mean().item()


# --- 5  Contenders: ways to decode a prompt, timed side by side ---------------------------------------------


class Run(NamedTuple):
    """One prompt decoded."""
    seconds: float           # of the whole call, the prompt's pass included
    tokens: int              # new ones
    yielded: int             # tokens that the counted steps added
    steps: int               # passes of the target: ours without the prompt's, which yields one token
    ms_per_step: float       # median, from the end of one to the end of the next
    tree: Tree | None = None


# Runs of one contender stand in a dictionary, by the prompt's number.


class Ours:
    """This project's decoding as a contender, with a Decoder that is kept from prompt to prompt."""

    def __init__(self, pair, temperature, tree, method="sequoia", draft=None, **kwargs):
        self.target = pair.fast[0]
        self.temperature = temperature
        self.measures = tree == "auto"
        # A planner measures for its first thirty steps or so.
        self.warm_up = 128 if self.measures else 16
        self.decoder = sequoia.Decoder(self.target, draft or pair.fast[1], tree, method, **kwargs)

    def __call__(self, prompt, new_tokens):
        steps = []
        stamps = []

        def on_step(step):
            steps.append(step)
            stamps.append(time.perf_counter())

        self.decoder.on_step = on_step
        seconds, text = timed(lambda: self.target.generate(
            prompt, custom_generate=self.decoder, **sampling(prompt, self.temperature, new_tokens)))
        yielded = sum(len(step.tokens) for step in steps)
        new = text.shape[1] - prompt.shape[1]
        return Run(seconds, new, yielded, len(steps), step_time(stamps), steps[-1].tree)

    def learn(self, prompts, args):
        """Decodes prompts for what they show its planner, which it returns."""
        torch.manual_seed(0)
        for prompt in progress(prompts, f"learning, {named(self.temperature)}"):
            self(prompt, args.new_tokens)
        # While it measures anew, as the machine has changed its speed, it knows no latency.
        while self.measures and not self.decoder.planner.measured:
            self(prompts[0], args.new_tokens)
        return self.decoder.planner


class Theirs:
    """One of transformers' own ways to decode; assistant: the settings of assisted generation."""

    def __init__(self, pair, temperature, assistant=None, **kwargs):
        self.pair = pair
        self.temperature = temperature
        self.assistant = assistant or {}
        self.kwargs = kwargs
        self.warm_up = 16
        if assistant:
            self.kwargs["assistant_model"] = pair.draft

    def __call__(self, prompt, new_tokens):
        for name, value in self.assistant.items():
            setattr(self.pair.draft.generation_config, name, value)
        stamps = []
        target = self.pair.target
        with target.register_forward_hook(lambda *_: stamps.append(time.perf_counter())):
            seconds, text = timed(lambda: target.generate(
                prompt, **sampling(prompt, self.temperature, new_tokens), **self.kwargs))
        new = text.shape[1] - prompt.shape[1]
        # The pass over the prompt also scores the first candidates.
        return Run(seconds, new, new, len(stamps), step_time(stamps))


class Shorter:
    """A contender that is too slow for so many tokens as the others."""

    def __init__(self, contender, tokens):
        self.contender = contender
        self.tokens = tokens
        self.warm_up = 8

    def __call__(self, prompt, new_tokens):
        return self.contender(prompt, min(self.tokens, new_tokens))


def step_time(stamps):
    return 1e3 * float(np.median(np.diff(stamps))) if len(stamps) > 1 else 0.0


def learnt_rates(pair, temperature, prompts, args):
    """Acceptance rates, (levels, ranks), as a tree of 32 nodes shows them."""
    return Ours(pair, temperature, (32, 8)).learn(prompts, args).rates()


# On how many of the prompts transformers' own methods run, evenly spaced: they are slow.
PEERS = 40


def interleave(contenders, prompts, args, label):
    """Every contender on every prompt, transformers' on PEERS of them, taking turns: their runs by name. A
    short run of each comes first, to warm up. All have the same seed on the same prompt."""
    for contender in contenders.values():
        contender(prompts[0], contender.warm_up)
    names = list(contenders)
    runs = {name: {} for name in names}
    every = max(1, len(prompts) // PEERS)
    for i, prompt in enumerate(progress(prompts, label)):
        turn = i % len(names)
        for name in names[turn:] + names[:turn]:
            if isinstance(contenders[name], Theirs) and i % every:
                continue
            torch.manual_seed(i)
            runs[name][i] = contenders[name](prompt, args.new_tokens)
    return runs


def column(runs, field, prompts):
    return np.array([getattr(runs[i], field) for i in prompts], dtype=float)


def tokens_per_step(runs):
    """All tokens over all steps."""
    return estimate(operator.truediv, column(runs, "yielded", runs), column(runs, "steps", runs))


def ms_per_token(runs):
    """All time over all tokens."""
    return float(1e3 * column(runs, "seconds", runs).sum() / column(runs, "tokens", runs).sum())


def times_as_fast(slow, fast):
    return compared(slow, fast, "seconds", "tokens")


def times_the_tokens(more, fewer):
    return compared(more, fewer, "yielded", "steps")


def compared(first, second, above, below):
    """The first's `above` a `below` over the second's, on the prompts that both decoded."""
    both = sorted(first.keys() & second.keys())
    columns = [column(runs, field, both) for runs in (first, second) for field in (above, below)]
    return estimate(lambda a, b, c, d: a / b / (c / d), *columns)


def ms_per_step(runs):
    return float(np.median(column(runs, "ms_per_step", runs)))


def last_tree(runs):
    return list(runs.values())[-1].tree


def fastest(variants, prompts, args):
    """A small sweep: the variant that takes the least time per token over the first two prompts."""
    few = prompts[: 1 if args.quick or args.synthetic else 2]
    runs = interleave(variants, few, args, "settings")
    best = min(variants, key=lambda name: ms_per_token(runs[name]))
    return {best: variants[best]}


# --- 6  traversal: walking from the root against verifying from the leaves ----------------------------------
#
# On the same trees, with the same tokens and the same scores of both models. What each would yield is not
# drawn but computed, and so exact for the tree at hand; only the texts and the proposals are samples.


def expected_of_walk(layout, tokens, P, q):
    """The tokens that a walk yields on average: the chances to reach each node, summed. P, q: (size, V)."""
    exists = layout.children >= 0                                                           # (size, ranks)
    children = torch.where(exists, tokens[layout.children], -1)
    chances = in_turn(ratios_of(METHODS["sequoia"], P, q, children))
    accepted = torch.ones_like(P[:, 0])
    accepted[layout.children[exists]] = chances[exists]
    return torch.where(layout.mask[:-1, :-1], accepted, 1).prod(dim=1).sum().item()


def expected_of_traversal(layout, tokens, P, q):
    """Those of traversal: each node's depth + 1 times the chance that it is the first to accept."""
    masses, _ = METHODS["traversal"].masses(layout.tree, tokens, P, q)                      # (size,)
    first = in_turn(masses[None, layout.leaves_first])[0]
    return (first * (layout.depth[layout.leaves_first] + 1)).sum().item()


EXPECTED = {"sequoia": expected_of_walk, "traversal": expected_of_traversal}


@dataclass(frozen=True, eq=False)
class Onlooker(sequoia.Method):
    """A method that decodes like its leader, and notes what each of EXPECTED says of every step."""
    leader: sequoia.Method = None
    expected: list = field(default_factory=list)

    def verify_tree(self, layout, tokens, target_scores, q, *rest):
        P = target_scores(slice(len(q))).softmax(dim=1)                                     # (size, V)
        self.expected.append([expected(layout, tokens, P, q) for expected in EXPECTED.values()])
        return self.leader.verify_tree(layout, tokens, target_scores, q, *rest)


def traversal(args, report):
    """Expected tokens per step of both on the same trees, by tree size and temperature."""
    pair = pair_of(args)
    prompts = texts(args, 2 * args.count, 128)
    rows = []
    for temperature in args.temperatures:
        # The rates are learnt from every other prompt.
        rates = learnt_rates(pair, temperature, prompts[1::2], args)
        for size in (8, 48) if args.quick else (8, 16, 32, 64, 128, 256):
            tree = optimal_tree(rates, size, min(size, 16))
            steps, walk, upward = traversal_sums(pair, temperature, tree, prompts[::2], args)
            gain = estimate(operator.truediv, upward, walk)
            rows.append({"temperature": f"{temperature:g}", "nodes": size, "levels": tree.depth,
                         "steps": int(steps.sum()), "sequoia": float(walk.sum() / steps.sum()),
                         "traversal": float(upward.sum() / steps.sum()), "gain, %": percent_more(gain)})
    report.table(f"Tokens per step on the same trees, {args.count} prompts",
                 "`gain` is what verifying from the leaves adds to the tokens of a walk; what it adds to a "
                 "step's time is not in it. An interval that contains 0 shows no gain.", rows)
    if args.save:
        temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
        for axis, _ in report.panels("traversal", [{}]):
            axis.axhline(0, color=BLACK, linewidth=1)
            for i, temperature in enumerate(temperatures):
                mine = [row for row in rows if row["temperature"] == temperature]
                shade = pyplot().get_cmap("viridis_r")(0.2 + 0.7 * i / len(temperatures))
                draw_by_size(axis, mine, "gain, %", shade, label=named(temperature), shift=0.1 * (i - 1))
            axis.set_ylabel("more tokens per step\nthan sequoia, %")


def traversal_sums(pair, temperature, tree, prompts, args):
    """By prompt the number of steps and what each of EXPECTED says of them, summed: (prompts,) each."""
    expected = []
    contenders = []
    for name in EXPECTED:
        leader = METHODS[name]
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
    pair = pair_of(args)
    prompts = texts(args, 2 * args.count, 128)
    sizes = [2**i for i in range(3, 7 if args.quick else 10)]
    rows = []
    growth = []
    for temperature in args.temperatures:
        # The rates are learnt from every other prompt.
        rates = learnt_rates(pair, temperature, prompts[1::2], args)
        optimal = []
        for size in progress(sizes, named(temperature)):
            shapes = sequences_within(size)
            k = max(shapes, key=lambda k: expected_tokens(shapes[k], rates))
            tree = optimal_tree(rates, size, min(size, 16))
            contenders = {"sequoia": Ours(pair, temperature, tree),
                          "k": Ours(pair, temperature, shapes[k], "specinfer")}
            if 16 in shapes:
                contenders[16] = Ours(pair, temperature, shapes[16], "specinfer")
            runs = interleave(contenders, prompts[::2], args, f"{size} nodes")
            optimal.append(runs["sequoia"])
            row = {"temperature": f"{temperature:g}", "nodes": size, "levels": tree.depth,
                   "expected": expected_tokens(tree, rates), "sequoia": tokens_per_step(runs["sequoia"]),
                   "k sequences": tokens_per_step(runs["k"]), "best k": k,
                   "gain, %": percent_more(times_the_tokens(runs["sequoia"], runs["k"])),
                   "16 sequences": None, "gain over 16, %": None}
            if 16 in shapes:
                row["16 sequences"] = tokens_per_step(runs[16])
                row["gain over 16, %"] = percent_more(times_the_tokens(runs["sequoia"], runs[16]))
            rows.append(row)
        growth.append({"temperature": f"{temperature:g}", "tokens more": growth_by_doubling(sizes, optimal)})
    report.table(f"Tokens per step at equal size, {args.count} prompts",
                 "`gain`: what the optimal tree yields beyond k sequences of the same size, with SpecInfer's "
                 "test; best k: of 1, 2, 4, ... 32 by expected tokens. The paper has 33% more than 16 "
                 "sequences at 512 nodes.", rows)
    report.table("What every doubling of the tree adds to a step",
                 "A straight line through tokens against the logarithm of the size: tokens that cost a "
                 "pass over twice as many nodes.", growth)
    if args.save:
        styles = {"sequoia": "-", "k sequences": "-", "16 sequences": ":"}
        for axis, mine in report.panels("scaling", rows):
            for i, (name, style) in enumerate(styles.items()):
                draw_by_size(axis, mine, name, COLOURS[name], style, shift=0.08 * (i - 1))
            axis.set_ylabel("tokens per step")


def growth_by_doubling(sizes, runs):
    """The slope of tokens per step against log2 of the size; runs: for each size."""
    tokens = np.stack([column(mine, "yielded", mine) for mine in runs], axis=1)         # (prompts, sizes)
    steps = np.stack([column(mine, "steps", mine) for mine in runs], axis=1)
    return estimate(lambda tokens, steps: np.polyfit(np.log2(sizes), tokens / steps, 1)[0], tokens, steps)


# --- 8  speed: side by side with transformers (section 5.1, Table 1) ----------------------------------------


def speed(args, report):
    """Tokens per step and ms per token of this file and its peers."""
    if args.synthetic:
        return synthetic_speed(args, report)
    pair = pair_of(args)
    prompts = texts(args, args.count, 128)
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
        taking_part[method, args.tree] = mine(sequoia.parse_tree(args.tree), method)
    return taking_part


# What a planner's choice, and a table of speeds, depends on.
TWO_CORES = ("Two cores do about ten times as many multiplications as they read weights in a second, a GPU "
             "three hundred: on two cores t(n) rises from few nodes on, and a short sequence can be as good "
             "as a tree.")


def contest(prompts, temperature, args, report, contenders):
    """A table of all contenders on all prompts. Returns the runs by name."""
    runs = interleave(contenders, prompts, args, named(temperature))
    by_name = {name: mine for (name, _), mine in runs.items()}
    rows = []
    for (name, setting), mine in runs.items():
        if setting == "auto":
            tree = last_tree(mine)
            setting = f"auto {tree.size}x{tree.depth}"
        row = {"temperature": f"{temperature:g}", "method": name, "setting": setting, "prompts": len(mine),
               "tokens/step": tokens_per_step(mine).value, "ms/token": ms_per_token(mine)}
        for peer in ("generate", "assisted", "plain"):
            row[f"x {peer}"] = times_as_fast(by_name[peer], mine)
        rows.append(row)
    report.table(f"{named(temperature)}: {len(prompts)} prompts of {prompts[0].shape[1]} tokens, "
                 f"{args.new_tokens} new ones each; auto: the last planned tree, nodes x levels; sequences: "
                 "number of length",
                 f"`x plain` is the speed against the same code without a tree, on the same prompts; where "
                 f"intervals overlap, who leads is open. {TWO_CORES}", rows)
    return by_name


# --- 9  speed --synthetic: the paper's shapes and tokens per step, with weights made on the spot ------------
#
# Both models share a random bigram core: an embedding for each token and a head, in the draft's width,
# zero-padded into the target's. To that each adds what its own random layers make of it. The more the core
# weighs the more the two agree, so its share is set, by bisection, to the paper's tokens per step. Every
# product is done; the text is noise.

# Hidden, intermediate, layers, heads, key-value heads, head_dim, vocabulary.
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
        # These are copies of what changes now.
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
        low = np.log(0.1)
        high = np.log(10)
        seen = []
        for _ in progress(range(8), f"matching {wanted} tokens per step"):
            middle = (low + high) / 2
            self.set_share(float(np.exp(middle)))
            rates = self.acceptance_rates(temperature)
            expected = expected_tokens(optimal_tree(rates, size, depth), rates)
            if expected < wanted:
                low = middle
            else:
                high = middle
            seen.append((abs(expected - wanted), middle, expected))
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
        p = scores_of(decoder, target, draft=False)
        q = scores_of(decoder, draft, draft=True)
        # What the Decoder was set to: sequoia, or greedy.
        method = decoder.method
        ratios = ratios_of(method, verified(method, p), q, method.propose(q, 32))           # (rows * new, k)
        return in_turn(ratios).mean(dim=0).cpu().numpy()


def random_llama(shape, args, device):
    hidden, intermediate, layers, heads, kv_heads, head_dim, vocabulary = shape
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim, tie_word_embeddings=False,
        max_position_embeddings=2048, initializer_range=hidden**-0.5)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype)).eval()
    for layer in model.model.layers:
        # Attention to few tokens, as in trained models.
        layer.self_attn.q_proj.weight.data.mul_(3)
    return model


class Reading:
    """A plain read of as many bytes as the target's weights, as a contender: no step can be faster."""
    warm_up = 1

    def __init__(self, size, device):
        self.buffer = torch.ones(size // 4, device=device)

    def __call__(self, *_):
        seconds = float(np.median([timed(self.buffer.sum)[0] for _ in range(7)]))
        return Run(seconds, 1, 1, 1, 1e3 * seconds)


def synthetic_speed(args, report):
    """Where a step's time goes at full scale, and how near it is to the memory's speed."""
    torch.manual_seed(0)
    shapes = [SHAPES[name] for name in SYNTHETIC[args.synthetic]]
    pair = SyntheticPair(*(random_llama(shape, args, args.device) for shape in shapes))
    prompts = [torch.randint(len(pair.core), (1, 128), device=args.device) for _ in range(args.count)]
    # A pass reads all weights but the input embedding, of which it takes a few rows.
    weights = bytes_of(pair.target) - bytes_of(pair.target.get_input_embeddings())
    reading = Reading(weights, args.device)
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
    report.table("A step's time in ms (rest: proposals, masks, Python), and the share of the memory's speed "
                 "reached",
                 "Medians of one run's steps: where a step's time goes, and how much longer it is than a "
                 "plain one, which its tokens must make up for.", splits)


def bytes_of(module):
    return sum(parameter.nbytes for parameter in module.parameters())


PARTS = ("target", "draft", "verify", "moves", "rest")


def split_step(pair, temperature, prompt, args, runs, name):
    """The parts of a step, in ms: medians over a run with a clock around each part. On a GPU, where a step is
    one graph, that run is without it and the parts are timed as graphs of their own."""
    tree = last_tree(runs[name])
    mine = Ours(pair, temperature, tree)
    spent = Counter()
    rows = []
    start = None

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
        # The first step warms up.
        if start is not None:
            rows.append({**spent, "rest": 1e3 * (now - start) - spent.total()})
        start = now
        spent.clear()

    mine.decoder.on_step = on_step
    with contextlib.ExitStack() as stack:
        for owner, attribute, part in (
                (sequoia.CachedModel, "score", None), (sequoia.CachedModel, "move", "moves"),
                (sequoia.Method, "verify_tree", "verify"), (sequoia.Greedy, "verify_tree", "verify")):
            patch = mock.patch.object(owner, attribute, clock(part, getattr(owner, attribute)))
            stack.enter_context(patch)
        stack.enter_context(mock.patch.object(sequoia.Decoder, "replay", sequoia.Decoder.program))
        how = sampling(prompt, temperature, args.new_tokens)
        mine.target.generate(prompt, custom_generate=mine.decoder, **how)
    parts = {part: float(np.median([row.get(part, 0.0) for row in rows])) for part in PARTS}
    whole = ms_per_step(runs[name])
    # On a GPU what is beside the graphs is not in the one graph.
    if args.device != "cpu":
        parts["rest"] = whole - sum(list(parts.values())[:-1])
    return {"tree": f"{tree.size}x{tree.depth}", "step": whole, **parts,
            "floor / step": ms_per_step(runs["floor"]) / whole,
            "x plain step": whole / ms_per_step(runs["plain"])}


# --- 10  planner: promised and achieved (section 4) ---------------------------------------------------------


def planner(args, report):
    """The planned tree and eleven others, predicted and measured; and what a useless draft costs. All decode
    with gumbel, so that all write the same texts: what differs is the trees."""
    pair = pair_of(args)
    prompts = texts(args, 2 * args.count, 128)
    torch.manual_seed(0)
    useless = AutoModelForCausalLM.from_config(pair.draft.config, dtype=pair.draft.dtype)
    useless = sequoia.pack(useless.to(args.device).eval())
    rows = []
    choices = []
    times = []
    for temperature in args.temperatures:
        mine = functools.partial(Ours, pair, temperature, method="gumbel")
        auto = mine("auto")
        learnt = auto.learn(prompts[1::2], args)
        rates = learnt.rates()
        latency = learnt.latency()
        chosen = sequoia.plan(rates, latency).tree
        trees = trees_around(chosen, rates, latency)
        contenders = {"plain": mine(PLAIN), "auto": auto, "useless": mine("auto", draft=useless)}
        contenders |= {name: mine(tree) for name, tree in trees.items()}
        runs = interleave(contenders, prompts[::2], args, f"trees, {named(temperature)}")
        planned = "plain"
        for name, tree in trees.items():
            if tree == chosen:
                planned = name
            tokens = expected_tokens(tree, rates)
            promised = tokens * latency.t[0] / latency.of_step(tree.size, tree.depth)
            rows.append({"temperature": f"{temperature:g}", "tree": name,
                         "planned": "<--" if tree == chosen else "",
                         "tokens/step, predicted": tokens, "achieved": tokens_per_step(runs[name]),
                         "x plain, predicted": float(promised),
                         "x plain": times_as_fast(runs["plain"], runs[name])})
        best = min(trees, key=lambda name: ms_per_token(runs[name]))
        choices.append({"temperature": f"{temperature:g}", "planned": planned, "best": best,
                        "planned / best": times_as_fast(runs[best], runs[planned]),
                        "auto / best": times_as_fast(runs[best], runs["auto"]),
                        "auto, x plain": times_as_fast(runs["plain"], runs["auto"]),
                        "useless, x plain": times_as_fast(runs["plain"], runs["useless"])})
        for size, seconds in zip(latency.sizes, latency.t):
            times.append({"temperature": f"{temperature:g}", "nodes": size, "ms": 1e3 * seconds,
                          "x one node": seconds / latency.t[0], "draft pass c, ms": 1e3 * latency.c})
    report.table(f"Predicted and achieved, {args.count} prompts",
                 "A plan promises what it was computed from, rates and times of other prompts; trees whose "
                 "intervals overlap are equally good as far as this shows.", rows)
    report.table("The planned tree's speed against the best; auto: a Decoder that may change its tree; "
                 "useless: with a random draft",
                 "Near 1 the planner has found as good a tree as any of the twelve. The best is chosen by "
                 "these same runs, which flatters it.", choices)
    report.table("t(n), a step without its draft passes, and c, as measured while decoding", TWO_CORES, times)
    if args.save:
        for axis, mine in report.panels("planner", rows, height=6.5):
            draw_promises(axis, mine)


def draw_promises(axis, rows):
    """A line for each tree: what was promised, a ring, and what was achieved, a point with its interval."""
    lines = range(len(rows))
    axis.plot([row["x plain, predicted"] for row in rows], lines, "o", markersize=9, markerfacecolor="none",
              markeredgewidth=1.5, color=BLACK, label="predicted")
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
    distance = {}
    if chosen.size > 1:
        distance[chosen] = 0.0
    for n in {max(2, round(size * 2 ** (i / 2))) for i in range(-4, 5)}:
        for d in range(max(2, depth - 2), depth + 3):
            most = sum(rates.shape[1] ** level for level in range(d))
            if d <= n <= min(latency.sizes[-1], most):
                tree = optimal_tree(rates, n, d)
                distance.setdefault(tree, abs(math.log2(n / size)) + 0.8 * abs(tree.depth - depth))
    near = sorted(distance, key=distance.get)[:9]
    trees = {}
    for tree in sorted(near, key=lambda tree: (tree.size, tree.depth)):
        trees[f"{tree.size}x{tree.depth}"] = tree
    for k, length in ((1, 3), (2, 4), (4, 4)):
        trees[f"sequences, {k} of {length}"] = sequences(k, length)
    return trees


# --- 11  offload: a target that streams from host memory (section 5.1, Table 2) -----------------------------


def offload(args, report):
    """Seconds per step and per token of a target whose layers stay in host memory."""
    torch.manual_seed(0)
    name = "1b" if args.device == "cpu" else "33b"
    count = args.layers or (4 if args.quick else SHAPES[name][2])
    target = random_llama((*SHAPES[name][:2], count, *SHAPES[name][3:]), args, "cpu")
    layer = bytes_of(target.model.layers[0])
    pair = SyntheticPair(sequoia.offload(target, args.device), random_llama(SHAPES["68m"], args, args.device))
    # How much the two have in common.
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
        few = max(8, args.new_tokens // 4)
        contenders = {"no tree": Shorter(mine(PLAIN), few), "auto": mine("auto"),
                      "5 sequences of 8": mine(sequences(5, 8), "specinfer"),
                      "16 sequences of 48": Shorter(mine(sequences(16, 48), "specinfer"), few)}
        runs = interleave(contenders, prompts, args, named(temperature))
        for name, found in runs.items():
            tree = last_tree(found)
            step = ms_per_step(found) / 1e3
            rows.append({"temperature": f"{temperature:g}", "tree": name, "nodes": tree.size,
                         "levels": tree.depth, "tokens/step": tokens_per_step(found).value, "s/step": step,
                         "s/token": ms_per_token(found) / 1e3, "copying / step": copying / step,
                         "x no tree": times_as_fast(runs["no tree"], found)})
    report.table(f"Steps of a target that streams, {args.count} prompts",
                 "The nearer `copying / step` is to 1, the less a larger tree costs; on a CPU, which only "
                 "shows the mechanism, computing takes as long as copying or longer.", rows)
    if args.device != "cpu":
        report.say(f"The most memory in use on the GPU: {torch.cuda.max_memory_allocated() / 1e9:.2f} GB.")


# --- 12  The command line -----------------------------------------------------------------------------------

COMMANDS = {command.__name__: command for command in (
    trees, speed, planner, verification, traversal, scaling, offload)}


class Amount(NamedTuple):
    """How much a command measures unless told."""
    count: int
    new_tokens: int
    temperatures: list


# Usually, and with --quick.
DEFAULTS = {
    "trees": (Amount(0, 0, []), Amount(0, 0, [])),
    "speed": (Amount(120, 128, [0.0, 0.6]), Amount(4, 64, [0.0, 0.6])),
    "speed --synthetic": (Amount(3, 128, [0.0]), Amount(2, 64, [0.0])),
    "planner": (Amount(80, 64, [0.0, 0.6]), Amount(4, 64, [0.0, 0.6])),
    "verification": (Amount(24, 0, [0.2, 0.6, 1.0]), Amount(3, 0, [0.6, 1.0])),
    "traversal": (Amount(16, 64, [0.2, 0.6, 1.0]), Amount(3, 64, [0.6, 1.0])),
    "scaling": (Amount(28, 64, [0.0, 0.6]), Amount(4, 64, [0.0, 0.6])),
    "offload": (Amount(6, 64, [0.6]), Amount(2, 32, [0.6]))}


def jobs(device, quick):
    """What `all` does, in its order."""
    pair = "1b-68m" if device == "cpu" else "7b-68m"
    if quick:
        pair = "tiny"
    return [f"{command} {pair}" if "--" in command else command for command in DEFAULTS]


def arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    tiny = os.path.relpath(sequoia.TINY)
    add("command", choices=[*COMMANDS, "all"])
    add("--target", default=f"{tiny}/target", help="a folder or hub name (the bundled target)")
    add("--draft", default=f"{tiny}/draft", help="the draft's (the bundled one)")
    add("--prompts", metavar="FILE", help="a text to cut prompts from (held-out standard library)")
    add("--save", action="store_true", help="write the tables and the figure into figures/")
    add("--quick", action="store_true", help="fewer and shorter runs; saved into figures/quick/")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(a GPU, if any)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="(bfloat16 where the processor has it)")
    add("--temperatures", type=float, nargs="+", metavar="T", help="(0 0.6; others for some commands)")
    add("--count", type=int, metavar="N", help=f"prompts (120; others for some commands); transformers' own "
        f"methods take about {PEERS} of them")
    add("--new-tokens", type=int, metavar="N", help="decoded for each prompt (128; others for some commands)")
    add("--tree", default="auto", help="speed: this file's tree, as for sequoia.py (auto)")
    add("--synthetic", choices=SYNTHETIC, help="speed: a random pair of these shapes, tuned")
    add("--layers", type=int, metavar="N", help="offload: of the target (22; 60 on a GPU; 4 with --quick)")
    args = parser.parse_args(argv)
    if args.dtype is None:
        good = args.device != "cpu" or torch.bfloat16 in sequoia.packable_dtypes()
        args.dtype = "bfloat16" if good else "float32"
    args.offload = False
    if args.command == "all":
        args.save = True
        return args
    amount = DEFAULTS["speed --synthetic" if args.synthetic else args.command][args.quick]
    for name, value in amount._asdict().items():
        setattr(args, name, getattr(args, name) or value)
    return args


def main():
    args = arguments(sys.argv[1:])
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    options = [word for word in sys.argv[1:] if word not in (args.command, "--save")]
    if args.save:
        options.append("--save")
    try:
        if args.save:
            pyplot()
        for command in jobs(args.device, args.quick) if args.command == "all" else [args.command]:
            words = [*command.split(), *options]
            mine = arguments(words)
            report = Report(words)
            print(f"\n## python bench.py {report.command}", flush=True)
            seconds, _ = timed(lambda: COMMANDS[mine.command](mine, report))
            if args.save:
                report.save(seconds, args.device)
    except (ValueError, OSError, ImportError) as error:
        print(f"bench.py: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2)


if __name__ == "__main__":
    main()
