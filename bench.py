"""The tables and figures of the paper, measured here, each by one command:

    python bench.py trees           # the best trees' expected tokens by size, and what finding them costs
    python bench.py verification    # rejection rate by number of children, for every method
    python bench.py traversal       # what verifying from the leaves gains over walking from the root
    python bench.py scaling         # tokens per step by tree size, in real decoding
    python bench.py speed           # side by side with transformers: tokens per step, ms per token
    python bench.py planner         # the planner's promises against what was achieved
    python bench.py offload         # a target that streams from host memory
    python bench.py all             # everything, into figures/results.md and figures/*.png
    python bench.py all --quick     # everything, shortened to minutes, into figures/quick/

`speed --target A --draft B` compares on any pair. `speed --synthetic 7b-68m` needs no weights: it makes a
pair of the paper's shapes, with its acceptance, on the spot. Every command prints Markdown tables. With
`--save` it replaces its own section of figures/results.md; four draw a figure, which needs matplotlib.

The same prompts and weights for all, interleaved, so that a slow minute of the machine hits all alike;
medians; transformers' own methods on the models as transformers loads them, each with its best settings.
"""
import argparse
import contextlib
import copy
import functools
import importlib
import itertools
import math
import os
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
from transformers import AutoModelForCausalLM, LlamaConfig, TemperatureLogitsWarper, TopPLogitsWarper

import sequoia

HERE = Path(__file__).parent


# --- 1  Toolbox: tables, results.md, figures, time ----------------------------------------------------------

class Report:
    """What a command finds: printed, and kept for figures/results.md."""

    def __init__(self, words: list[str]):
        self.command = " ".join(word for word in words if word not in ("--save", "--quick"))
        self.folder, self.text = HERE / "figures" / ("quick" if "--quick" in words else ""), ""

    def say(self, text: str):
        print(f"\n{text}", flush=True)
        self.text += f"\n{text}\n"

    def table(self, title: str, rows: list[dict]):
        """Rows, dictionaries with the same keys, as a Markdown table under its title."""
        cells = [list(rows[0]), *([show(value) for value in row.values()] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*cells)]
        cells.insert(1, ["-" * (width - 1) + (":" if i else "-") for i, width in enumerate(widths)])
        lines = (" | ".join(cell.rjust(width) if i else cell.ljust(width)
                            for i, (cell, width) in enumerate(zip(row, widths))) for row in cells)
        self.say(f"**{title}**\n\n" + "\n".join(f"| {line} |" for line in lines))

    def panels(self, name: str, rows: list[dict]):
        """Axes to draw on, one for each temperature, with its rows; they become figures/NAME.png."""
        temperatures = list(dict.fromkeys(row.get("temperature", "") for row in rows))
        fig, axes = pyplot().subplots(1, len(temperatures), figsize=(2 + 4.6 * len(temperatures), 4.8),
                                      squeeze=False, layout="constrained")
        for axis, temperature in zip(axes[0], temperatures):
            axis.set_title(temperature and named(temperature))
            yield axis, [row for row in rows if row.get("temperature", "") == temperature]
        self.folder.mkdir(parents=True, exist_ok=True)
        fig.savefig(self.folder / f"{name}.png", dpi=150)
        pyplot().close(fig)
        self.say(f"![{name}]({name}.png)")

    def save(self, seconds: float, device: str):
        """Puts this report into results.md, in place of an earlier one of the same command."""
        path, title = self.folder / "results.md", f"`python bench.py {self.command}`"
        old = path.read_text(encoding="utf-8").split("\n## ")[1:] if path.exists() else []
        sections = {section.split("\n", 1)[0]: section.rstrip() + "\n" for section in old}
        sections[title] = f"{title}\n\n{provenance(device)}; {seconds / 60:.1f} minutes.\n{self.text}"
        order = [f"`python bench.py {job}`" for job in jobs(device)]
        head = "# Results\n\nWritten by `python bench.py all`. Compare within a table, not across.\n"
        self.folder.mkdir(parents=True, exist_ok=True)
        path.write_text("\n## ".join([head, *(sections[name] for name in sorted(
            sections, key=lambda name: order.index(name) if name in order else 99))]), encoding="utf-8")


def show(value) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"
    return "-" if value is None else str(value)


def provenance(device: str) -> str:
    """The day, the commit, the device and the versions, in words."""
    def git(*arguments):
        return subprocess.run(["git", *arguments], cwd=HERE, capture_output=True, text=True).stdout.strip()
    words = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    found = re.search(r"model name\s*: (.*)", words)
    name = f"{found[1] if found else 'processor'}, {os.cpu_count()} cores"
    name = name if device == "cpu" else torch.cuda.get_device_name(device)
    commit = git("describe", "--always", "--dirty", "--exclude=*") or "unknown"
    return (f"{time.strftime('%Y-%m-%d')}; commit {commit}; {name}; torch {torch.__version__}, transformers "
            f"{transformers.__version__}")


# A progress bar on standard error, while it is a terminal.
progress = functools.partial(tqdm, leave=False, disable=None)


def named(temperature) -> str:
    return f"temperature {float(temperature):g}" if float(temperature) else "greedy"


def timed(function):
    """The seconds that a call takes, the device's work included, and what it returns."""
    wait = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    wait()
    start = time.perf_counter()
    result = function()
    wait()
    return time.perf_counter() - start, result


def colour(name: str) -> str:
    known = {"sequoia": "#15803d", "sequences": "#ea580c", "2-ary": "#0891b2", "chain": "#be185d"}
    return next((known[word] for word in name.split() if word in known), "#111827")


@functools.cache
def pyplot():
    """Matplotlib, which only the figures need."""
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"font.size": 14, "lines.linewidth": 2.5, "axes.grid": True, "grid.alpha": 0.3,
                                "axes.spines.top": False, "axes.spines.right": False})
    return importlib.import_module("matplotlib.pyplot")


def draw_curves(axis, rows: list[dict], x: str, names: dict, xlabel: str, ylabel: str):
    """Columns of a table against its column x, on a logarithmic axis; names: their line styles."""
    for name, style in names.items():
        points = [(row[x], row[name]) for row in rows if row[name] is not None]
        axis.plot(*zip(*points), style, color=colour(name), label=name)
    axis.set_xscale("log", base=2)
    ticks = [row[x] for row in rows][:: 2 if len(rows) > 7 else 1]
    axis.set_xticks(ticks, ticks)
    axis.minorticks_off()
    axis.set(xlabel=xlabel, ylabel=ylabel)
    axis.legend()


# --- 2  Pairs of models, and texts --------------------------------------------------------------------------

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
        return tuple(model if model.device.type != "cpu" or hasattr(model, "offloaded") else
                     sequoia.pack(copy.deepcopy(model)) for model in (self.target, self.draft))


def pair_of(args) -> Pair:
    """The pair that the command line names, not packed."""
    args.tokenizer = sequoia.load_tokenizer(args)
    with mock.patch.object(sequoia, "pack", lambda model: model):
        return Pair(*(sequoia.load(name, args) for name in (args.target, args.draft)))


def texts(args, count: int, length: int) -> list[torch.Tensor]:
    """`count` pieces of `length` tokens, (1, length) each, always the same: from files of the standard
    library that the bundled pair was not trained on, or evenly spaced from the file given."""
    if args.prompts:
        ids = args.tokenizer(Path(args.prompts).read_text(encoding="utf-8"))["input_ids"]
        starts, sources = np.linspace(0, len(ids) - length, count), [ids] * count
        if len(ids) < length + count:
            raise ValueError(f"{args.prompts} has {len(ids)} tokens, {count} texts need {length + count}")
    else:
        from tiny.train import source_files
        files = [path.read_text(encoding="utf-8", errors="ignore") for path in source_files(held_out=True)]
        # Those that are long enough in tokens, and the number of pieces of each.
        files = [text for text in files if len(text) > 12 * length]
        each = -(-count // len(files))
        chosen = [files[i // each * len(files) * each // count] for i in range(count)]
        sources = [args.tokenizer(text)["input_ids"] for text in chosen]
        starts = [max(0, len(ids) - length) * (i % each + 1) / (each + 1) for i, ids in enumerate(sources)]
    pieces = [ids[int(start) : int(start) + length] for ids, start in zip(sources, starts)]
    return [torch.tensor([piece], device=args.device) for piece in pieces]


def probabilities(logits, temperature: float, top_p: float = 1.0):
    return TopPLogitsWarper(top_p)(None, TemperatureLogitsWarper(temperature)(None, logits)).softmax(dim=1)


# --- 3  trees: what the dynamic program finds, and what that costs (sections 3.1 and 5.2, Figure 1) ---------

# Llama-3-70B with the 8B as its draft, CNN Daily Mail.
PAPER_RATES = [0.7732, 0.1039, 0.0402, 0.0206, 0.0128, 0.0081, 0.0064, 0.0043, 0.0035, 0.0026, 0.0025,
               0.0021, 0.0016, 0.0014, 0.0010, 0.0010, 0.0010, 0.0007, 0.0007, 0.0006, 0.0007, 0.0006,
               0.0004, 0.0004, 0.0005, 0.0006, 0.0004, 0.0003, 0.0002, 0.0004, 0.0001]


def trees(args, report):
    """Expected tokens by size and shape, at the paper's acceptance rates; the dynamic program's cost."""
    largest, costs = 1024 if args.quick else 4096, []
    for n, d, b in [(512, 12, 16), (1024, 12, 16), (512, 24, 16), (512, 12, 31), (largest, 24, 31)]:
        run = functools.partial(sequoia.expected_tokens_table, PAPER_RATES, n, d, b)
        seconds = min(timed(run)[0] for _ in range(3 if n <= 1024 else 1))
        costs.append({"nodes n": n, "levels d": d, "children b": b, "seconds": seconds})
        costs[-1]["x first"] = seconds / costs[0]["seconds"]
    report.table("What the dynamic program takes, and that against the first row", costs)

    best, rows = sequoia.expected_tokens_table(PAPER_RATES, largest, 24).max(axis=1), []        # (size + 1,)
    for n in [2**i for i in range(3, largest.bit_length())]:
        by_k = {k: sequoia.expected_tokens(tree, PAPER_RATES) for k, tree in sequences_within(n).items()}
        rows.append({"nodes": n, "sequoia": float(best[: n + 1].max()), "k sequences": max(by_k.values()),
                     "16 sequences": by_k.get(16),
                     "2-ary": sequoia.expected_tokens(sequoia.k_ary(2, n.bit_length() - 1), PAPER_RATES),
                     "chain": by_k[1]})
    report.table("Expected tokens per step by tree size; k sequences: the best k", rows)
    if args.save:
        names = {"sequoia": "-", "k sequences": "-", "16 sequences": ":", "2-ary": "-", "chain": "-"}
        for axis, _ in report.panels("trees", rows):
            draw_curves(axis, rows, "nodes", names, "tree size (nodes)", "expected tokens per step")


def sequences_within(n: int) -> dict[int, sequoia.Tree]:
    """k sequences of equal length, of at most n nodes with the root, by k."""
    return {k: sequoia.sequences(k, (n - 1) // k) for k in (1, 2, 4, 8, 16, 32) if k < n}


# --- 4  verification: rejection rates (sections 3.2 and 5.3) ------------------------------------------------

METHODS = ("sequoia", "specinfer", "spectr", "naive", "topk")
CHILDREN = (1, 2, 4, 8, 16, 32)


@torch.no_grad()
def verification(args, report):
    """How often all k children are rejected, by method, temperature and top-p, and how often they must be."""
    pair, pieces = pair_of(args), texts(args, args.count, 256)
    logits = [torch.cat([model(piece).logits[0, -128:].float() for piece in progress(pieces, "reading")])
              for model in (pair.target, pair.draft)]                                       # (positions, V)
    known, rows, names = min(len(x[0]) for x in logits), [], [f"k = {k}" for k in CHILDREN]
    target, draft = (x[:, :known] for x in logits)
    generator = torch.Generator(args.device).manual_seed(0)
    settings = itertools.product(args.temperatures, (1.0, 0.9) if args.quick else (1.0, 0.9, 0.8))
    for temperature, top_p in progress(list(settings), "rejection rates"):
        P, Q = (probabilities(logits, temperature, top_p) for logits in (target, draft))
        # As sequoia.Decoder.draft_probs.
        Q = 0.999 * Q + 0.001 * probabilities(draft, temperature)
        by_method = {name: rejection_rates(name, P, Q, CHILDREN, generator) for name in METHODS}
        by_method["best"] = [least_rejection_independent(P, Q, k) for k in CHILDREN]
        rows += [{"temperature": f"{temperature:g}", "top-p": f"{top_p:g}", "method": name,
                  **dict(zip(names, rates))} for name, rates in by_method.items()]
    report.table(f"Rejection rate of k children at {len(target)} positions; best: the least possible with "
                 "independent children", rows)
    # The likeliest 6 tokens of each position, renormalised.
    P, Q = probabilities(target, 1.0), probabilities(draft, 1.0)
    likeliest, ks = (P + Q).topk(6, dim=1).indices, CHILDREN[:3]
    P, Q = (x.gather(1, likeliest) / x.gather(1, likeliest).sum(dim=1, keepdim=True) for x in (P, Q))
    by_method = {name: rejection_rates(name, P, Q, ks, generator, repeats=50) for name in METHODS}
    by_method["best, independent"] = [least_rejection_independent(P, Q, k) for k in ks]
    by_method["best, different"] = [least_rejection_different(P, Q, k) for k in ks]
    report.table("The same over 6 tokens at temperature 1; best: with independent, or different, children",
                 [{"method": name, **dict(zip(names, rates))} for name, rates in by_method.items()])


def rejection_rates(name: str, P, Q, ks, generator, repeats: int = 16) -> list[float]:
    """The chance that all of k children are rejected, for each k: the mean over positions, and over some
    draws of the proposals, of the product of 1 - ratio over the children. P, Q: (positions, V)."""
    method, rows = sequoia.METHODS[name], max(1, 2**18 // P.shape[1])
    total = torch.zeros(max(ks), device=P.device)
    for p, q in zip(P.repeat(repeats, 1).split(rows), Q.repeat(repeats, 1).split(rows)):
        tokens = method.propose(q, max(ks), generator)                                      # (rows, k)
        # SpecTr's ratios depend on how many children there are, so each k is verified by itself.
        for k in ks:
            total[k - 1] += (1 - ratios_of(method, p, q, tokens[:, :k])).prod(dim=1).sum()
    return [(total[k - 1] / (repeats * len(P))).item() for k in ks]


def ratios_of(method, P, Q, tokens):
    """Every child's chance when it is tried, (rows, k). Noise that accepts none has all of them tried."""
    noise = torch.full(tokens.shape, math.inf, dtype=P.dtype, device=P.device)
    return method.ratios(P, Q, tokens, noise)[0].clamp(max=1)


def in_turn(ratios):
    """The chance of each to be the first that is accepted, (rows, k)."""
    return ratios * F.pad((1 - ratios).cumprod(dim=1)[:, :-1], (1, 0), value=1)


# The best that any verification rule can do is a transport problem: of each set of children's chance as much
# as can be goes to tokens in the set, and no token gets more than P. That is a linear program, and by
# max-flow = min-cut what is left over, the rejection rate, is the largest excess of a set A of tokens,
#
#     max over A of  Pr(all children in A) - P(A),          for one child the distance ||P - Q||_1 / 2.


def least_rejection_independent(P, Q, k: int) -> float:
    """With independent children the excess is Q(A)^k - P(A), a convex function of the point (P(A), Q(A)), so
    the best A is an extreme one: the tokens with Q / P above a threshold. The mean over (positions, V)."""
    order = torch.where(Q > 0, Q / P, 0).argsort(dim=1, descending=True)
    P_of_A, Q_of_A = (x.double().gather(1, order).cumsum(dim=1) for x in (P, Q))
    return (Q_of_A**k - P_of_A).amax(dim=1).clamp(min=0).mean().item()


def least_rejection_different(P, Q, k: int) -> float:
    """The same for children drawn without replacement, by trying all 2^V sets."""
    P, Q, V = P.double().cpu(), Q.double().cpu(), P.shape[1]
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
    ms_per_token: float               # of the whole call, the prompt's pass included
    tokens_per_step: float            # for each pass of the target after the prompt's
    ms_per_step: float                # median, from the end of one to the end of the next
    tree: sequoia.Tree | None = None


def sampling(prompt, temperature: float, new_tokens: int) -> dict:
    chosen = dict(do_sample=True, temperature=temperature, top_k=0) if temperature else dict(do_sample=False)
    return dict(attention_mask=torch.ones_like(prompt), max_new_tokens=new_tokens, **chosen)


class Ours:
    """This project's decoding as a contender, with a Decoder that is kept from prompt to prompt."""

    def __init__(self, pair: Pair, temperature: float, tree, method="sequoia", draft=None, **kwargs):
        self.target, self.temperature = pair.fast[0], temperature
        if isinstance(tree, str):
            kind, _, shape = tree.rpartition(":")
            tree = sequoia.sequences(*map(int, shape.split("x"))) if kind else sequoia.parse_tree(tree)
        self.decoder = sequoia.Decoder(self.target, draft or pair.fast[1], tree, method, **kwargs)

    def __call__(self, prompt, new_tokens: int) -> Run:
        steps, stamps = [], []
        self.decoder.on_step = lambda step: (steps.append(step), stamps.append(time.perf_counter()))
        seconds, text = timed(lambda: self.target.generate(
            prompt, custom_generate=self.decoder, **sampling(prompt, self.temperature, new_tokens)))
        new, tokens = text.shape[1] - prompt.shape[1], float(np.mean([len(step.tokens) for step in steps]))
        return Run(1e3 * seconds / new, tokens, step_time(stamps), steps[-1].tree)

    def learn(self, prompts, args) -> sequoia.Decoder:
        """Decodes prompts for what they show of the acceptance."""
        torch.manual_seed(0)
        for prompt in progress(prompts, f"learning, {named(self.temperature)}"):
            self(prompt, args.new_tokens)
        return self.decoder


def theirs(pair: Pair, temperature: float, assistant: dict | None = None, **kwargs):
    """One of transformers' own ways to decode; assistant: the settings of assisted generation."""
    kwargs |= {} if assistant is None else {"assistant_model": pair.draft}

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
    for name in names:
        contenders[name](prompts[0], min(16, args.new_tokens))
    for i, j in progress(list(itertools.product(range(len(prompts)), range(len(names)))), label):
        name = names[(i + j) % len(names)]
        torch.manual_seed(i)
        runs[name].append(contenders[name](prompts[i], args.new_tokens))
    return runs


def median(runs, field: str = "ms_per_token") -> float:
    return float(np.median([getattr(run, field) for run in runs]))


def speedup(slow, fast) -> float:
    """How many times faster, prompt by prompt; the median."""
    return float(np.median([a.ms_per_token / b.ms_per_token for a, b in zip(slow, fast)]))


def tokens_per_step(runs) -> float:
    return float(np.mean([run.tokens_per_step for run in runs]))


def fastest(variants: dict, prompts, args) -> dict:
    """A small sweep: the variant that takes the least time per token over the first two prompts."""
    runs = interleave(variants, prompts[: 1 if args.quick or args.synthetic else 2], args, "settings")
    best = min(variants, key=lambda name: median(runs[name]))
    return {best: variants[best]}


# --- 6  traversal: walking from the root against verifying from the leaves ----------------------------------
#
# On the same trees, with the same tokens and the same probabilities of both models. What each would yield is
# not drawn but computed, and so exact for the tree at hand; only the texts and the proposals are samples.

def expected_of_walk(layout, tokens, P, Q) -> float:
    """The tokens that a walk yields on average: the chances to reach each node, summed. P, Q: (size, V)."""
    exists = layout.children >= 0                                                           # (size, ranks)
    ratios = ratios_of(sequoia.METHODS["sequoia"], P, Q, torch.where(exists, tokens[layout.children], -1))
    accepted = torch.ones_like(P[:, 0])
    accepted[layout.children[exists]] = in_turn(ratios)[exists]
    return torch.where(layout.mask[:-1, :-1], accepted, 1).prod(dim=1).sum().item()


def expected_of_sweep(layout, tokens, P, Q) -> float:
    """Those of traversal: each node's depth + 1 times the chance that it is the first to accept."""
    free, expected, rows = 1.0, 0.0, (tokens[:, None, None], P[:, None], Q[:, None])
    for node, mass, _ in sequoia.METHODS["traversal"].sweep(layout.tree, *rows, 0, Q.new_ones(1, 1)):
        expected += free * mass.item() * (layout.tree.depths[node] + 1)
        free *= 1 - mass.item()
    return expected


EXPECTED = {"sequoia": expected_of_walk, "traversal": expected_of_sweep}


@dataclass(frozen=True)
class Onlooker(sequoia.Method):
    """A method that decodes like its leader, and notes what each of EXPECTED says of every step."""
    leader: sequoia.Method
    expected: list

    def verify_tree(self, layout, tokens, target_probs, Q, *args):
        # A text's first token is drawn by a tree of one node.
        if layout.tree.size > 1:
            P = target_probs(range(layout.tree.size))                                       # (size, V)
            self.expected.append([expected(layout, tokens, P, Q) for expected in EXPECTED.values()])
        return self.leader.verify_tree(layout, tokens, target_probs, Q, *args)


def traversal(args, report):
    """Expected tokens per step of both on the same trees, by tree size and temperature."""
    pair, prompts, rows = pair_of(args), texts(args, 2 * args.count, 128), []
    for temperature in args.temperatures:
        # The rates are learnt from every other prompt.
        rates = Ours(pair, temperature, (32, 8)).learn(prompts[1::2], args).acceptance.rates()
        for size in (8, 48) if args.quick else (8, 16, 32, 64, 128, 256):
            tree, sums = sequoia.optimal_tree(rates, size, min(size, 16)), []
            for prompt in progress(prompts[::2], f"{named(temperature)}, {size} nodes"):
                expected = []
                # Half of the text is decoded by one of them, half by the other.
                for leader in map(sequoia.METHODS.get, EXPECTED):
                    onlooker = Onlooker(leader.propose, leader.ratios, leader, expected)
                    mine = Ours(pair, temperature, tree, onlooker, cuda_graph=False)
                    torch.manual_seed(0)
                    mine(prompt, -(-args.new_tokens // 2))
                sums.append([len(expected), *np.sum(expected, axis=0)])
            steps, walk, sweep = np.array(sums).T
            gain, error = gain_of_second(walk, sweep)
            rows.append({"temperature": f"{temperature:g}", "nodes": size, "levels": tree.depth,
                         "steps": int(steps.sum()), "sequoia": walk.sum() / steps.sum(),
                         "traversal": sweep.sum() / steps.sum(), "gain, %": 100 * gain, "+-": 100 * error})
    report.table(f"Tokens per step on the same trees, {args.count} prompts; +-: half a 95% interval", rows)
    if args.save:
        for axis, _ in report.panels("traversal", [{}]):
            for i, t in enumerate(dict.fromkeys(row["temperature"] for row in rows)):
                mine = [row for row in rows if row["temperature"] == t]
                draw_curves(axis, mine, "nodes", {"gain, %": "o-"}, "tree size (nodes)",
                            "more tokens per step\nthan sequoia, %")
                axis.lines[-1].set(color=pyplot().get_cmap("viridis_r")(0.15 + 0.16 * i), label=named(t))
            axis.axhline(0, color="#111827", linewidth=1)
            axis.legend(reverse=True)


def gain_of_second(first, second) -> tuple[float, float]:
    """By which share the second's sums over prompts exceed the first's, and half the 95% interval of this
    ratio, as the steps of a prompt depend on each other. 1.96 + 2.4 / freedom: Student's t."""
    gain, freedom = second.sum() / first.sum() - 1, max(1, len(first) - 1)
    spread = np.sqrt(len(first) / freedom * ((second - (1 + gain) * first) ** 2).sum()) / first.sum()
    return gain, (1.96 + 2.4 / freedom) * spread


# --- 7  scaling: tokens per step by tree size (section 5.2) -------------------------------------------------

def scaling(args, report):
    """Tokens per step in real decoding: the optimal tree against k sequences verified by SpecInfer."""
    pair, prompts, rows, fits = pair_of(args), texts(args, 2 * args.count, 128), [], []
    sizes = [2**i for i in range(3, 7 if args.quick else 10)]

    def decoded(tree, method):
        mine = Ours(pair, temperature, tree, method)
        torch.manual_seed(0)
        return tokens_per_step([mine(prompt, args.new_tokens) for prompt in prompts[::2]])

    for temperature in args.temperatures:
        # The rates are learnt from every other prompt.
        rates = Ours(pair, temperature, (32, 8)).learn(prompts[1::2], args).acceptance.rates()
        for size in progress(sizes, named(temperature)):
            shapes = sequences_within(size)
            k = max(shapes, key=lambda k: sequoia.expected_tokens(shapes[k], rates))
            tree = sequoia.optimal_tree(rates, size, min(size, 16))
            mine, best = decoded(tree, "sequoia"), decoded(shapes[k], "specinfer")
            sixteen = decoded(shapes[16], "specinfer") if 16 in shapes else None
            rows.append({"temperature": f"{temperature:g}", "nodes": size, "levels": tree.depth,
                         "expected": sequoia.expected_tokens(tree, rates), "sequoia": mine,
                         "k sequences": best, "best k": k, "gain, %": 100 * (mine / best - 1),
                         "16 sequences": sixteen, "gain over 16, %": sixteen and 100 * (mine / sixteen - 1)})
        slope, start = np.polyfit(np.log(sizes), [row["sequoia"] for row in rows[-len(sizes) :]], 1)
        fits.append({"temperature": f"{temperature:g}", "tokens per step": f"{start:.2f} + {slope:.2f} ln n"})
    report.table(f"Tokens per step at equal size, {args.count} prompts (the paper, at 512: 33% more than 16 "
                 f"sequences)", rows)
    report.table("Growth with the number of nodes n", fits)
    if args.save:
        for axis, mine in report.panels("scaling", rows):
            draw_curves(axis, mine, "nodes", {"sequoia": "o-", "k sequences": "o-", "16 sequences": "o:"},
                        "tree size (nodes)", "tokens per step")


# --- 8  speed: side by side with transformers (section 5.1, Table 1) ----------------------------------------

def speed(args, report):
    """Tokens per step and ms per token of this file and its peers."""
    if args.synthetic:
        return synthetic_speed(args, report)
    pair, prompts = pair_of(args), texts(args, args.count, 128)
    report.say(f"Target {args.target}, draft {args.draft}, {args.dtype}.")
    for temperature in args.temperatures:
        contest(prompts, temperature, args, report, contenders_for(pair, prompts, temperature, args))


def contenders_for(pair, prompts, temperature, args) -> dict:
    """All who take part, by (name, setting); the peers with the best of their settings."""
    mine, peer = functools.partial(Ours, pair, temperature), functools.partial(theirs, pair, temperature)
    names = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
    settings = itertools.product((2, 5), ("constant", "heuristic"), (0.0, 0.4))
    assisted = {("assisted", "{} {} {}".format(*each)): peer(assistant=dict(zip(names, each)))
                for each in settings}
    lookup = {("lookup", f"{n} tokens"): peer(prompt_lookup_num_tokens=n) for n in (2, 4, 10)}
    taking_part = {("generate", ""): peer(), ("plain", "no tree"): mine("none"),
                   **fastest(assisted, prompts, args), **fastest(lookup, prompts, args)}
    for shape in ("1x3", "2x4", "4x4", "5x8"):
        taking_part["sequences", shape] = mine(f"sequences:{shape}", "specinfer")
    # Greedy, all methods are one and the same.
    for method in ("topk", "traversal", "sequoia") if temperature else ("sequoia",):
        taking_part[method, args.tree] = mine(args.tree, method)
    return taking_part


def contest(prompts, temperature, args, report, contenders: dict) -> dict:
    """A table of all contenders on all prompts. Returns the runs by name."""
    runs, rows = interleave(contenders, prompts, args, named(temperature)), []
    by_name, peers = {name: mine for (name, _), mine in runs.items()}, ("generate", "assisted", "plain")
    for (name, setting), mine in runs.items():
        tree = mine[-1].tree
        low, high = np.percentile([run.ms_per_token for run in mine], (25, 75)).tolist()
        rows.append({"temperature": f"{temperature:g}", "method": name,
                     "setting": f"auto {tree.size}x{tree.depth}" if setting == "auto" else setting,
                     "tokens/step": tokens_per_step(mine), "ms/token": median(mine),
                     "quartiles": f"{show(low)} - {show(high)}",
                     **{f"x {peer}": speedup(by_name[peer], mine) for peer in peers}})
    report.table(f"{named(temperature)}: {len(prompts)} prompts of {prompts[0].shape[1]} tokens, "
                 f"{args.new_tokens} new ones each; auto: the last planned tree", rows)
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
    def set_share(self, share: float):
        """Sets the core's size relative to what the layers add, which grows with the root of their number."""
        # These are copies of what changes now.
        self.__dict__.pop("fast", None)
        probe = torch.arange(64, device=self.core.device)[None]
        for model in (self.target, self.draft):
            scale, norm = share * model.config.num_hidden_layers**0.5, model.model.norm.weight
            model.get_input_embeddings().weight.data[:, : self.core.shape[1]] = scale * self.core
            norm.data.fill_(1)
            # Logits of deviation 6: distributions about as sharp as a trained model's.
            norm.data.fill_(6 / model(probe).logits.float().std().item())

    def tune(self, temperature: float, size: int, depth: int, wanted: float) -> float:
        """Finds the share with which the optimal tree yields `wanted` tokens. Returns what it does yield."""
        low, high, seen = np.log(0.1), np.log(10), []
        for _ in progress(range(8), f"matching {wanted} tokens per step"):
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
        """Along texts of the target's own, after prompts that are the same every time: (ranks,)."""
        ids = torch.arange(rows * prompt, device=self.core.device).reshape(rows, prompt)
        torch.manual_seed(0)
        output = self.target.generate(ids, **sampling(ids, temperature, new), return_dict_in_generate=True,
                                      output_logits=True)
        target = torch.stack(output.logits, dim=1).float().flatten(0, 1)                    # (rows * new, V)
        draft = self.draft(output.sequences).logits[:, prompt - 1 : -1].float().flatten(0, 1)
        # Greedy is the limit of the one method, topk at a very low temperature of the other.
        P, Q = probabilities(target, temperature or 1e-4), probabilities(draft, temperature or 1.0)
        method = sequoia.METHODS["sequoia" if temperature else "topk"]
        ratios = ratios_of(method, P, Q, method.propose(Q, 32))                             # (rows * new, k)
        return in_turn(ratios).mean(dim=0).cpu().numpy()


def random_llama(shape, args, device: str):
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


def synthetic_speed(args, report):
    """Where a step's time goes at full scale, and how near it is to the memory's speed."""
    torch.manual_seed(0)
    shapes = [SHAPES[name] for name in SYNTHETIC[args.synthetic]]
    pair = SyntheticPair(*(random_llama(shape, args, args.device) for shape in shapes))
    prompts = [torch.randint(len(pair.core), (1, 128), device=args.device) for _ in range(args.count)]
    # A pass reads all weights but the input embedding, of which it takes a few rows.
    weights = bytes_of(pair.target) - bytes_of(pair.target.get_input_embeddings())
    buffer, splits = torch.ones(weights // 4, device=args.device), []

    def read():
        return 1e3 * float(np.median([timed(buffer.sum)[0] for _ in range(7)]))

    floor = read()
    report.say(f"Synthetic pair {args.synthetic}, {args.dtype}. To read the target's "
               f"{weights / 1e9:.3f} GB takes {floor:.2f} ms ({weights / floor / 1e6:.0f} GB/s).")
    for temperature in args.temperatures:
        if temperature not in PAPER:
            raise ValueError(f"--synthetic knows the temperatures 0 and 0.6 only, got {temperature:g}")
        size, depth, wanted = PAPER[temperature]
        expected = pair.tune(temperature, size, depth, wanted)
        report.say(f"{named(temperature)}: {wanted} tokens per step wanted, tuned to {expected:.2f}.")
        mine = functools.partial(Ours, pair, temperature)
        contenders = contenders_for(pair, prompts, temperature, args) | {
            ("floor", "weights read"): lambda prompt, new_tokens: Run(ms := read(), 1.0, ms),
            ("paper's tree", f"{size}x{depth}"): mine(f"{size}x{depth}"),
            ("slow draft", "target, 1x3"): mine("sequences:1x3", draft=pair.fast[0])}
        runs = contest(prompts, temperature, args, report, contenders)
        splits += [{"temperature": f"{temperature:g}", "method": name, **split_step(
                        pair, temperature, prompts[0], args, runs, name)}
                   for name in ("plain", "sequoia", "paper's tree")]
    report.table("A step's time in ms (rest: proposals, masks, Python), and the share of the memory's speed "
                 "reached", splits)


def bytes_of(module) -> int:
    return sum(p.nbytes for p in module.parameters())


PARTS = ("target", "draft", "verify", "moves", "rest")


def split_step(pair, temperature, prompt, args, runs, name) -> dict:
    """The parts of a step, in ms: medians over a run with a clock around each part. On a GPU, where a step is
    one graph, that run is without it and the parts are timed as graphs of their own."""
    spent, rows, tree, start = Counter(), [], runs[name][-1].tree, None
    mine = Ours(pair, temperature, tree)

    def clock(part, function):
        def clocked(self, *arguments):
            seconds, result = timed(lambda: function(self, *arguments))
            # Moving twice is not the same as moving once.
            if mine.decoder.static and part != "moves" and start is not None:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    function(self, *arguments)
                seconds = min(timed(graph.replay)[0] for _ in range(3))
            spent[part or ("target" if self.model is pair.fast[0] else "draft")] += 1e3 * seconds
            return result
        return clocked

    def on_step(step):
        nonlocal start
        now = time.perf_counter()
        # The first step comes with the prompt, and warms up.
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
    whole = median(runs[name], "ms_per_step")
    # On a GPU what is beside the graphs is not in the one graph.
    if args.device != "cpu":
        parts["rest"] = whole - sum(list(parts.values())[:-1])
    return {"tree": f"{tree.size}x{tree.depth}", "step": whole, **parts,
            "floor / step": median(runs["floor"]) / whole,
            "x plain step": whole / median(runs["plain"], "ms_per_step")}


# --- 10  planner: promised and achieved (section 4) ---------------------------------------------------------

def planner(args, report):
    """The planned tree and eleven others, predicted and measured; and what a useless draft costs."""
    pair, prompts, rows, choices = pair_of(args), texts(args, 2 * args.count, 128), [], []
    for temperature in args.temperatures:
        mine = functools.partial(Ours, pair, temperature)
        auto = mine("auto")
        decoder = auto.learn(prompts[1::2], args)
        latency, rates = decoder.latency, decoder.acceptance.rates()
        (sizes, t, c, spent), chosen = latency, sequoia.plan(rates, latency).tree
        trees = trees_around(chosen, rates, latency)
        torch.manual_seed(0)
        useless = AutoModelForCausalLM.from_config(pair.draft.config, dtype=pair.draft.dtype)
        useless = sequoia.pack(useless.to(args.device).eval())
        contenders = {"plain": mine("none"), "auto": auto, "useless": mine("auto", draft=useless),
                      **{name: mine(tree) for name, tree in trees.items()}}
        runs = interleave(contenders, prompts[::2], args, f"trees, {named(temperature)}")
        found = {name: speedup(runs["plain"], runs[name]) for name in runs}
        for name, tree in trees.items():
            tokens = sequoia.expected_tokens(tree, rates)
            promised = tokens * t[0] / latency.of_step(tree.size, tree.depth)
            rows.append({"temperature": f"{temperature:g}", "tree": name, "planned": "<--" * (tree == chosen),
                         "tokens/step, predicted": tokens, "achieved": tokens_per_step(runs[name]),
                         "x plain, predicted": promised, "x plain": found[name]})
        best = max(trees, key=found.get)
        planned = next((name for name, tree in trees.items() if tree == chosen), "plain")
        choices.append({"temperature": f"{temperature:g}", "planned": planned, "x plain": found[planned],
                        "best": best, "best, x plain": found[best],
                        "planned / best": speedup(runs[best], runs[planned]),
                        "auto / best": speedup(runs[best], runs["auto"]),
                        "useless, x plain": found["useless"], "measuring, s": spent})
    report.table(f"Predicted and achieved, {args.count} prompts", rows)
    report.table("The planned tree against the best; auto: a Decoder that may change its tree; useless: "
                 "with a random draft", choices)
    report.table(f"t(n), a step without draft passes, as measured at the start; c is {1e3 * c:.2f} ms",
                 [{"nodes": n, "ms": 1e3 * s, "x one node": s / t[0]} for n, s in zip(sizes, t)])
    if args.save:
        for axis, mine in report.panels("planner", rows):
            for row in mine:
                point, size = (row["x plain, predicted"], row["x plain"]), 14 if row["planned"] else 7
                axis.plot(*point, "o", color=colour(f"{row['tree']} sequoia"), markersize=size)
                axis.annotate(row["tree"], point, xytext=(6, 4), textcoords="offset points", fontsize=8)
            axis.axline((1, 1), slope=1, color=colour(""), linestyle="--", linewidth=1)
            axis.set(xlabel="times plain decoding, predicted", ylabel="achieved (large: the planned tree)")


def trees_around(chosen, rates, latency) -> dict[str, sequoia.Tree]:
    """The planned tree, eight near it, and three of sequences."""
    size, depth = (chosen.size, chosen.depth) if chosen.size > 1 else (8, 4)
    found, ranks = {chosen: 0.0} if chosen.size > 1 else {}, rates.shape[1]
    for n in {max(2, round(size * 2 ** (i / 2))) for i in range(-4, 5)}:
        for d in range(max(2, depth - 2), depth + 3):
            if d <= n <= min(latency.sizes[-1], sum(ranks**level for level in range(d))):
                tree = sequoia.optimal_tree(rates, n, d)
                found.setdefault(tree, abs(math.log2(n / size)) + 0.8 * abs(tree.depth - depth))
    near = sorted(sorted(found, key=found.get)[:9], key=lambda tree: (tree.size, tree.depth))
    return {f"{tree.size}x{tree.depth}": tree for tree in near} | {
        f"sequences {k}x{length}": sequoia.sequences(k, length) for k, length in ((1, 3), (2, 4), (4, 4))}


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
    trees, rows = ("none", "auto", "sequences:5x8", "sequences:16x48"), []
    for temperature, tree in itertools.product(args.temperatures, trees):
        mine = Ours(pair, temperature, tree, "specinfer" if tree.startswith("sequences") else "sequoia")
        # Plans, which counts for no prompt.
        mine(prompts[0], 8)
        torch.manual_seed(0)
        # Tokens without a tree, or with one too large, are slow.
        tokens = max(8, args.new_tokens // 4) if tree in ("none", "sequences:16x48") else args.new_tokens
        runs = [mine(prompt, tokens) for prompt in prompts]
        step, yielded, last = median(runs, "ms_per_step") / 1e3, tokens_per_step(runs), runs[-1].tree
        rows.append({"temperature": f"{temperature:g}", "tree": tree.replace(":", " "), "nodes": last.size,
                     "levels": last.depth, "tokens/step": yielded, "s/step": step, "s/token": step / yielded,
                     "copying / step": copying / step})
        slow = rows[-1] if tree == "none" else slow
        rows[-1]["x no tree"] = slow["s/token"] / rows[-1]["s/token"]
    report.table(f"Steps of a target that streams, {args.count} prompts", rows)
    if args.device != "cpu":
        report.say(f"The most memory in use on the GPU: {torch.cuda.max_memory_allocated() / 1e9:.2f} GB.")


# --- 12  The command line -----------------------------------------------------------------------------------

COMMANDS = {command.__name__: command for command in (
    trees, verification, traversal, scaling, speed, planner, offload)}
# Prompts, new tokens of each, temperatures; and the same with --quick.
DEFAULTS = {
    "trees": ((0, 0, []), (0, 0, [])),
    "speed": ((10, 128, [0.0, 0.6]), (3, 64, [0.0, 0.6])),
    "speed --synthetic": ((3, 128, [0.0]), (2, 64, [0.0])),
    "planner": ((24, 64, [0.0, 0.6]), (4, 64, [0.0, 0.6])),
    "verification": ((4, 0, [0.2, 0.6, 1.0]), (1, 0, [0.6, 1.0])),
    "traversal": ((10, 64, [0.2, 0.6, 0.8, 1.0, 1.2]), (3, 64, [0.6, 1.0])),
    "scaling": ((20, 64, [0.0, 0.6]), (4, 64, [0.0, 0.6])),
    "offload": ((2, 64, [0.6]), (1, 32, [0.6]))}


def jobs(device: str, quick: bool = False) -> list[str]:
    """What `all` does, in its order."""
    pair = "tiny" if quick else "1b-68m" if device == "cpu" else "7b-68m"
    return [f"{command} {pair}" if "--" in command else command for command in DEFAULTS]


def arguments(argv: list[str]):
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
    add("--count", type=int, metavar="N", help="prompts (10; others for some commands)")
    add("--new-tokens", type=int, metavar="N", help="decoded for each prompt (128; others for some commands)")
    add("--tree", default="auto", help="speed: this file's tree, as for sequoia.py (auto)")
    add("--synthetic", choices=SYNTHETIC, help="speed: a random pair of these shapes, tuned")
    add("--layers", type=int, metavar="N", help="offload: of the target (22; 60 on a GPU; 4 with --quick)")
    args = parser.parse_args(argv)
    good = args.device != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    args.dtype = args.dtype or ("bfloat16" if good else "float32")
    args.offload, args.save = False, args.save or args.command == "all"
    defaults = DEFAULTS.get("speed --synthetic" if args.synthetic else args.command, ([], []))[args.quick]
    for name, value in zip(("count", "new_tokens", "temperatures"), defaults):
        setattr(args, name, getattr(args, name) or value)
    return args


def main():
    args = arguments(sys.argv[1:])
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    options = [word for word in sys.argv[1:] if word not in (args.command, "--save")] + ["--save"] * args.save
    try:
        if args.save:
            pyplot()
        for command in jobs(args.device, args.quick) if args.command == "all" else [args.command]:
            words = [*command.split(), *options]
            mine, report = arguments(words), Report(words)
            print(f"\n## python bench.py {report.command}", flush=True)
            seconds, _ = timed(lambda: COMMANDS[mine.command](mine, report))
            if args.save:
                report.save(seconds, args.device)
    except (ValueError, OSError, ImportError) as error:
        print(f"bench.py: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2)


if __name__ == "__main__":
    main()
