"""What this project does, measured here, beside what the paper published. Each question has one command:

    python bench.py trees           # the best trees' expected tokens by size
    python bench.py predict         # the paper's speed-ups, mostly from data sheets
    python bench.py step            # a picture of one step
    python bench.py speed           # side by side with transformers: tokens per step, ms per token
    python bench.py planner         # the planner's promises against what was achieved
    python bench.py verification    # methods: rejection rates, and tokens per step on one fixed tree
    python bench.py scaling         # tokens per step by tree size, of optimal trees and of k sequences
    python bench.py all             # everything, into figures/; with --quick shortened, which decides nothing

`speed --target A --draft B` compares on any pair. `speed --synthetic 7b-68m` makes random models of such
shapes, which yield the paper's tokens a step; `--offload` streams its target. All print Markdown tables. With
`--save` they replace their section of figures/results.md, and draw. figures/paper.json: published numbers.

All take turns on the same prompts, seeds and weights. Comparisons are paired by prompt: 1.33 ± 0.05 is a
ratio of sums over prompts and half its 95% interval. Tokens per step are all tokens over all steps, but in
`verification` and `scaling` a mean over all positions of a text: a tenth more, as decoding skips easy ones.
"""
import argparse, copy, functools, importlib, itertools, json, math, os, platform, re, subprocess, sys, time
from dataclasses import dataclass
from operator import truediv
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, TemperatureLogitsWarper, TopPLogitsWarper

import sequoia
from sequoia import METHODS, NO_TREE, Tree, expected_tokens, expected_tokens_table, optimal_tree, sequences

HERE = Path(__file__).parent
PAPER = json.loads((HERE / "figures" / "paper.json").read_text(encoding="utf-8"))
BLACK, GREY, GREEN, RED, BLUE = "#111827", "#9ca3af", "#15803d", "#dc2626", "#2563eb"
ORANGE, BROWN, TEAL, PINK, VIOLET = "#ea580c", "#9a3412", "#0891b2", "#be185d", "#7c3aed"
TWO_CORES = ("While they read a weight two cores do about ten multiplications, a GPU one to three hundred: "
             "on two cores t(n) rises soon, and a short sequence can be as good as a tree.")

# --- 1  Toolbox: progress, intervals, tables, results.md, figures, time -------------------------------------
LAST_SAID = [-math.inf]

def progress(items, label):
    """Goes through items, and says on stderr how far it is: a line a minute, where that is a file."""
    items = list(items)
    terminal = sys.stderr.isatty()
    for i, item in enumerate(items):
        if time.monotonic() - LAST_SAID[0] > (1 if terminal else 60):
            LAST_SAID[0] = time.monotonic()
            line = f"{label}: {i} of {len(items)}"
            print(line.ljust(78), file=sys.stderr, flush=True, end="\r" if terminal else "\n")
        yield item

class Estimate(NamedTuple):
    """A value and half its 95% interval, NaN where nothing tells it."""
    value: float
    half: float = math.nan

def estimate(function, *columns):
    """A function of the sums of columns, (prompts, ...) each, with its interval. By the jackknife: how far
    the values without one prompt scatter tells how far other prompts would move it, for a mean as usual."""
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
        lesson = " ".join(lesson.split())
        cells = [list(rows[0])] + [[show(value) for value in row.values()] for row in rows]
        widths = [max(map(len, column)) for column in zip(*cells)]
        rule = ["-" * widths[0]] + ["-" * (width - 1) + ":" for width in widths[1:]]
        lines = []
        for first, *rest in [cells[0], rule, *cells[1:]]:
            padded = [cell.rjust(width) for cell, width in zip(rest, widths[1:])]
            lines.append(f"| {' | '.join([first.ljust(widths[0]), *padded])} |\n")
        title += " (--quick: decides nothing)" * self.quick
        self.say(f"**{title}**\n\n{lesson}\n\n{''.join(lines).rstrip()}")

    def panels(self, name, rows, height=5.2, ncols=3):
        """Axes to draw on, one for each temperature, with its rows. They become figures/NAME.png."""
        temperatures = list(dict.fromkeys(row.get("temperature", "") for row in rows))
        fig, axes = pyplot().subplots(1, len(temperatures), figsize=(2 + 4.8 * len(temperatures), height),
                                      squeeze=False, layout="constrained")
        for axis, temperature in zip(axes[0], temperatures):
            axis.set_title(temperature and named(temperature))
            yield axis, [row for row in rows if row.get("temperature", "") == temperature]
        labels = axes[0, 0].get_legend_handles_labels()
        fig.legend(*labels, loc="outside lower center", ncols=ncols, frameon=False)
        self.picture(name, fig)

    def picture(self, name, fig):
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
        quick = " --quick" * self.quick
        order = [f"`python bench.py {job}{quick}`" for job in jobs(device, self.quick)]
        known = sorted(sections, key=lambda title: order.index(title) if title in order else 99)
        head = (f"# Results\n\nWritten by `python bench.py all{quick}`. ± is half a 95% interval. Compare "
                "within a table, not across.\n")
        path.write_text("\n## ".join([head, *(sections[title] for title in known)]), encoding="utf-8")

def show(value):
    """A table's cell. An estimate's two numbers have as many decimals as the first needs."""
    if isinstance(value, Estimate):
        text = show(value.value)
        digits = len(text.partition(".")[2])
        return f"{text} ± {value.half:.{digits}f}" if value.half > 0 else text
    if isinstance(value, float):
        if math.isnan(value):
            return "-"
        decimals = 0 if abs(value) >= 100 else 2 if abs(value) >= 0.995 else 3
        return f"{value:.{decimals}f}"
    return "-" if value is None else str(value)

def provenance(device):
    """The day, the commit, the device and the versions, in words."""
    git = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(git, cwd=HERE, capture_output=True, text=True).stdout.strip() or "unknown"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return (f"{time.strftime('%Y-%m-%d')}; commit {commit}; {device_name(device)}; "
            f"Python {platform.python_version()}, {versions}")

def device_name(device):
    if device != "cpu":
        return torch.cuda.get_device_name(device)
    words = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = re.findall(r"model name\s*: (.*)", words)
    return f"{[*names, 'processor'][0]}, {os.cpu_count()} cores"

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

def draw_by_size(axis, rows, styles):
    """A table's columns against its nodes, with their intervals. styles: colour and line by column."""
    for i, (name, (colour, line)) in enumerate(styles.items()):
        known = [row for row in rows if row[name] is not None]
        heights, halves = zip(*(row[name] for row in known))
        bars = halves if np.isfinite(halves).any() else None
        shift = 2 ** (0.08 * (i - 1)) if bars else 1
        axis.errorbar([row["nodes"] * shift for row in known], heights, yerr=bars, fmt=line, marker="o",
                      markersize=5, elinewidth=1.2, capsize=3, color=colour, label=name)
    log_axis(axis, [row["nodes"] for row in rows][:: 2 if len(rows) > 7 else 1], "tree size (nodes)")

def log_axis(axis, ticks, label):
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, ticks)
    axis.minorticks_off()
    axis.set_xlabel(label)

# --- 2  Pairs of models, texts, and what both say of them ---------------------------------------------------
class Pair:
    """Two models as transformers loads them, and `fast`, for sequoia.py: on a CPU copies that are packed."""

    def __init__(self, target, draft, pack=True):
        self.target, self.draft = target.eval(), draft.eval()
        self.pack = pack and target.device.type == "cpu"
        # All contenders decode to the same length, past any EOS.
        for model in (target, draft):
            model.config.eos_token_id = model.generation_config.eos_token_id = None
            model.generation_config.pad_token_id = 0

    @functools.cached_property
    def fast(self):
        both = self.target, self.draft
        return [*map(sequoia.pack, copy.deepcopy(both))] if self.pack else both

def pair_of(args):
    """The pair that the command line names, not packed."""
    args.tokenizer = sequoia.load_tokenizer(args)
    with mock.patch.object(sequoia, "pack", lambda model: model):
        return Pair(sequoia.load(args.target, args), sequoia.load(args.draft, args))

def texts(args, count, length):
    """`count` pieces of `length` tokens, (1, length) each, always the same, none of which overlap: from the
    file given, or from files of the standard library that the bundled pair has not seen."""
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

def request(prompt, temperature, new_tokens, top_p=1.0):
    """What `generate` is told."""
    how = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": new_tokens, "do_sample": False}
    if temperature:
        how |= {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": top_p}
    return how

def sampling(temperature, top_p=1.0):
    """What sequoia.py makes of such a request. Its `scores` shapes logits, (positions, V), of both models."""
    warpers = [TemperatureLogitsWarper(temperature), TopPLogitsWarper(top_p)]
    return sequoia.Sampling(METHODS["sequoia"], warpers)

def verified(method, p):
    """What a method verifies against, (positions, V): a greedy one, as with shared noise, knows the token."""
    if method.draw is sequoia.most_likely:
        return F.one_hot(p.argmax(dim=1), p.shape[1]).float()
    return p.softmax(dim=1)

def chances_of(method, P, q, tokens):
    """Each child's chance to be the one that is accepted, (rows, k)."""
    if isinstance(method, sequoia.Matching):
        repeated = (tokens[:, :, None] == tokens[:, None, :]).tril(-1).any(dim=2)
        return torch.where((tokens >= 0) & ~repeated, P.gather(1, tokens.clamp(min=0)), 0)
    return in_turn(method.ratios(P, q, tokens)[0].clamp(max=1))

def in_turn(ratios):
    """The chance of each to be the first that is accepted, (rows, k)."""
    return ratios * F.pad((1 - ratios).cumprod(dim=1)[:, :-1], (1, 0), value=1)

# --- 3  trees: what the dynamic program finds (section 3.1; Figures 1, 6) -----------------------------------
# Llama-3-70B-Instruct with the 8B as its draft, on CNN news: the only rates that the paper prints (Figure 5).
PAPER_RATES = PAPER["acceptance_rates_llama3_70b_8b_cnn"]

def trees(args, report):
    """Expected tokens by size and shape, at the paper's acceptance rates."""
    largest = 512 if args.quick else 2048
    seconds, table = timed(lambda: expected_tokens_table(PAPER_RATES, largest, 24))
    report.say(f"To find the best trees of up to {largest} nodes on up to 24 levels took {seconds:.1f} s.")
    best = table.max(axis=1)                                                                # (size + 1,)
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
        for axis, _ in report.panels("trees", rows):
            styles = {"sequoia": (GREEN, "-"), "k sequences": (ORANGE, "-"), "16 sequences": (BROWN, ":"),
                      "2-ary": (TEAL, "-"), "chain": (PINK, "--")}
            draw_by_size(axis, rows, styles)
            axis.set_ylabel("expected tokens per step")

def sequences_within(n):
    """k sequences of equal length, of at most n nodes with the root, by k."""
    return {k: sequences(k, (n - 1) // k) for k in (1, 2, 4, 8, 16, 32) if k < n}

# --- 4  predict: the paper's tables from data sheets (section 4.1; Tables 1 to 4, Figure 8) -----------------
# Width, width inside the MLP, layers, heads, heads of keys, their width, vocabulary.
SHAPES = PAPER["shapes"] | {"1B": (2048, 5632, 22, 32, 4, 64, 32000), "tiny": (256, 512, 12, 4, 4, 64, 4096),
                            "tinier": (144, 384, 1, 4, 4, 32, 4096)}

def weights(shape):
    """How many weights a pass of a model reads: all but its embedding."""
    width, inner, layers, heads, key_heads, head, vocabulary = shape
    return layers * (width * head * 2 * (heads + key_heads) + 3 * width * inner) + width * vocabulary

class Machine(NamedTuple):
    """What a pass depends on."""
    read: float              # bytes of weights a second, from its memory or, streamed, the host's
    multiply: float          # multiplications a second, in bfloat16
    kernels: float = 0.0     # seconds a layer of small kernels: norms, rotations, masks
    launch: float = 0.0      # seconds a layer in which Python launches kernels, if no graph holds them

    def seconds(self, model, n):
        """A pass over n tokens: reading and multiplying go on together, and launching beside them."""
        shape = SHAPES[model]
        busy = max(2 * weights(shape) / self.read, n * weights(shape) / self.multiply)
        return max(busy + self.kernels * shape[2], self.launch * shape[2])

# What GPUs reach of their data sheets, an A100 80GB PCIe, an L40 and an H100 SXM.
REACHED = 0.8
A100 = Machine(REACHED * 1.935e12, REACHED * 156e12)
# Two numbers are the paper's: what its draft's pass takes beyond reading the weights (0.5 ms, 2 layers); and
# what transformers take for a layer of the 7B, launched by Python (24.2 ms, 32 layers).
KERNELS = (0.5e-3 - A100.seconds("JF68M", 1)) / 2
LAUNCH = 24.2e-3 / 32
A100 = A100._replace(kernels=KERNELS)
L40 = Machine(REACHED * 0.864e12, REACHED * 90.5e12, KERNELS)
H100 = Machine(REACHED * 3.35e12, REACHED * 495e12, KERNELS)
STREAMED_L40 = L40._replace(read=REACHED * 32e9)
# As `speed --synthetic 1b-68m` measured on an AMD EPYC.
CPU = Machine(31e9, 1.7e11)
# By the paper's table: where the target's pass and the draft's run, the largest tree, SpecInfer's tree.
PLACES = {"on_device_a100": (A100._replace(launch=LAUNCH), A100, 256, (5, 8)),
          "on_device_l40": (L40._replace(launch=LAUNCH), L40, 256, (5, 8)),
          "offloading_l40": (STREAMED_L40, L40, 1024, (16, 48))}
SETTINGS = {"A100, launched by Python": ("Llama2-7B", "JF68M", A100._replace(launch=LAUNCH), A100),
            "A100, one graph": ("Llama2-7B", "JF68M", A100, A100),
            "H100, one graph": ("Llama2-7B", "JF68M", H100, H100), "two cores": ("1B", "JF68M", CPU, CPU),
            "L40, offloaded": ("Llama3-70B-Instruct", "Llama3-8B-Instruct", STREAMED_L40, L40)}

def latency_of(target, draft, machine, drafting, largest):
    """t(n) and c. The paper counts d draft passes for d levels, `plan` d - 1: one c more is in each t(n)."""
    c = drafting.seconds(draft, 1)
    sizes = range(1, largest + 1)
    return sequoia.Latency(sizes, np.array([machine.seconds(target, n) + c * (n > 1) for n in sizes]), c)

def power_law(b):
    """Rates with which k children, up to 16, are all rejected with the chance 1 / (k + 1)^b: the bound of
    Definition 3.5, 1 / k^b, with k + 1 for k, as the first child would else never be accepted."""
    k = np.arange(1, 17)
    return k**-b - (k + 1) ** -b

@functools.cache
def best_by_exponent(size, depth):
    """Exponents of the power law, and what the best tree of this shape yields with each."""
    exponents = np.linspace(0.5, 3, 11)
    return exponents, [expected_tokens_table(power_law(b), size, depth)[size, depth] for b in exponents]

def published(table):
    """Rows of the paper's tables, with the exponent at which the tree yields its tokens a step."""
    for values in PAPER[table]["rows"]:
        row = dict(zip(PAPER[table]["columns"], values))
        exponents, tokens = best_by_exponent(row["tree_size"], row["tree_depth"])
        yield row | {"b": float(np.interp(row["tokens_per_step"], tokens, exponents))}

def predict(args, report):
    """The paper's tables, computed; and speed-ups by tree size on five machines."""
    rows = [predicted_row(table, row) for table in PLACES for row in published(table)]
    report.table("PREDICTION, nothing here is measured: the paper's tables 1 to 4 from data sheets", f"""A
        pass takes the longer of reading the weights and multiplying, each at {REACHED:.0%} of the data sheet,
        and {1e3 * KERNELS:.2f} ms a layer of small kernels (from the paper's 0.5 ms for its draft's pass). On
        chip the target's takes {1e3 * LAUNCH:.2f} ms a layer at least, in which Python launches it (from the
        paper's 24.2 ms for the 7B's 32 layers on the A100, taken for the L40, too). Offloaded, weights cross
        a link of 32 GB/s. Left out: attention to the text, verification, moving caches, sampling. `bare`:
        memory and multiplications alone. That fails on the A100: the paper's speed-ups ask that the 7B's pass
        over 128 tokens takes about as long as over one, as if launching took longer than both, though the
        paper speaks of CUDA graphs. On the L40 they ask for the longer of reading and multiplying for the 7B,
        for the sum of both for the 13B. b: rates are a power law fitted to the row's tokens a step, which are
        the paper's; the published rates fall more slowly, b is 2.14 at the first child, 1.4 at the 31st.
        SpecInfer's trees are given the same rates: those of its rule are not published. `x SpecInfer's`: by
        its published speed-up. planned: of up to 256 nodes (offloaded 1024).""", rows)
    for table in PLACES:
        errors = [row["off, %"] for row in rows if row["table"] == table]
        report.say(f"{table}: predicted speed-ups are {min(errors):+.1f}% to {max(errors):+.1f}% off.")
    machines_by_size(args, report)

def predicted_row(table, row):
    machine, drafting, largest, rival = PLACES[table]
    target, draft, tokens = row["target"], row["draft"], row["tokens_per_step"]
    shape = row["tree_size"], row["tree_depth"]
    rates = power_law(row["b"])
    latency = latency_of(target, draft, machine, drafting, largest)
    ms = 1e3 * latency.of_step(*shape) / tokens
    bare = [one._replace(kernels=0.0, launch=0.0) for one in (machine, drafting)]
    bare_ms = 1e3 * latency_of(target, draft, *bare, largest).of_step(*shape) / tokens
    tree = sequoia.plan(rates, latency).tree
    off = 1e3 * latency.t[0] / ms / row["speedup"]
    rivals = sequences(*rival)
    rival_ms = 1e3 * latency.of_step(rivals.size, rivals.depth) / expected_tokens(rivals, rates)
    name = "specinfer_{}x{}_".format(*rival)
    return {"table": table, "pair": f"{target}, {draft}", "T": f"{row['temperature']:g}",
            "texts": row["dataset"], "tree": "{}x{}".format(*shape), "tokens/step": tokens, "b": row["b"],
            "SpecInfer's": row[name + "tokens_per_step"], "predicted": expected_tokens(rivals, rates),
            "ms/token": row.get("ms_per_token", 1e3 * row.get("s_per_token", math.nan)), "as predicted": ms,
            "bare": bare_ms, "speed-up": row["speedup"], "by prediction": off * row["speedup"],
            "off, %": 100 * (off - 1), "x SpecInfer's": row["speedup"] / row[name + "speedup"],
            "x, predicted": rival_ms / ms, "planned": f"{tree.size}x{tree.depth}"}

def machines_by_size(args, report):
    """One draft on five machines: t(n), c, the best tree, and speed-ups by tree size."""
    largest = 256 if args.quick else 1024
    tokens = expected_tokens_table(PAPER_RATES[:16], largest, sequoia.DEEPEST)
    n, d = np.mgrid[2 : largest + 1, 2 : sequoia.DEEPEST + 1]
    rows = []
    curves = {}
    for name, (target, draft, machine, drafting) in SETTINGS.items():
        latency = latency_of(target, draft, machine, drafting, largest)
        speedups = tokens[n, d].clip(0) * latency.t[0] / latency.of_step(n, d)              # (sizes, depths)
        curves[f"{name}: {target}, {draft}"] = speedups.max(axis=1)
        best = np.unravel_index(speedups.argmax(), speedups.shape)
        rows.append({"machine": name, "multiplications a weight": 2 * machine.multiply / machine.read,
                     "t(1), ms": 1e3 * latency.t[0], "t(n) < 2 t(1) to": sum(latency.t < 2 * latency.t[0]),
                     "c, ms": 1e3 * latency.c, "tree": f"{n[best]}x{d[best]}", "x plain": speedups.max()})
    report.table("PREDICTION: five machines, all with the published acceptance rates", """The more
        multiplications are free while a weight is read, the larger the tree that pays.""", rows)
    if args.save:
        fig, axis = pyplot().subplots(figsize=(9, 5.6), layout="constrained")
        for (name, curve), colour in zip(curves.items(), (GREEN, "#65a30d", TEAL, ORANGE, VIOLET)):
            axis.plot(range(2, largest + 1), curve, color=colour, label=name)
        log_axis(axis, [2**i for i in range(1, largest.bit_length())], "tree size (nodes)")
        axis.axhline(1, color=BLACK, linestyle="--", linewidth=1)
        axis.set_ylabel("times plain decoding")
        axis.set_title("Predicted from data sheets, not measured", loc="left")
        axis.legend(frameon=False, fontsize=11)
        report.picture("predict", fig)

# --- 5  Contenders: ways to decode a prompt, timed side by side ---------------------------------------------
class Run(NamedTuple):
    """One prompt decoded."""
    seconds: float           # of the whole call, the prompt's pass included
    tokens: int              # new ones
    yielded: int             # tokens that the counted steps added
    steps: int               # passes of the target: ours without the prompt's, which yields one token
    tree: Tree | None = None

class Runs(list):
    """One contender's runs, a prompt each. Sums are over prompts."""

    def column(self, field):
        return np.array([getattr(run, field) for run in self], dtype=float)

    def tokens_per_step(self):
        return estimate(truediv, self.column("yielded"), self.column("steps"))

    def tokens_per_second(self):
        return estimate(truediv, self.column("tokens"), self.column("seconds"))

    def ms_per_token(self):
        return 1e3 / self.tokens_per_second().value

    def over(self, other):
        """How many times another's speed."""
        columns = [runs.column(name) for runs in (self, other) for name in ("tokens", "seconds")]
        return estimate(lambda a, b, c, d: a / b / (c / d), *columns)

class Ours:
    """This project's decoding. packed: whether the models are; kept: whether one Decoder has all prompts."""

    def __init__(self, pair, temperature, tree, method="sequoia", draft=None, packed=True, kept=True):
        self.target, own = pair.fast if packed else (pair.target, pair.draft)
        self.temperature, self.kept, self.measures = temperature, kept, tree == "auto"
        self.new = functools.partial(sequoia.Decoder, self.target, draft or own, tree, method)
        self.decoder = self.new()

    def __call__(self, prompt, new_tokens):
        steps = []
        self.decoder = self.decoder if self.kept else self.new()
        self.decoder.on_step = steps.append
        how = request(prompt, self.temperature, new_tokens)
        seconds, text = timed(lambda: self.target.generate(prompt, custom_generate=self.decoder, **how))
        yielded = sum(len(step.tokens) for step in steps[1:])
        return Run(seconds, text.shape[1] - prompt.shape[1], yielded, len(steps) - 1, steps[-1].tree)

    def learn(self, prompts):
        """Decodes prompts for what they show its planner, which it returns."""
        torch.manual_seed(0)
        for prompt in progress(prompts, f"learning, {named(self.temperature)}"):
            self(prompt, 64)
        while self.measures and self.decoder.planner.plan is None:
            self(prompts[0], 64)
        return self.decoder.planner

class Theirs:
    """One of transformers' own ways to decode; assistant: the settings of assisted generation."""

    def __init__(self, pair, temperature, assistant=(), packed=False, **kwargs):
        self.target, self.draft = pair.fast if packed else (pair.target, pair.draft)
        self.temperature = temperature
        self.assistant = dict(assistant)
        self.kwargs = {**kwargs, "assistant_model": self.draft} if assistant else kwargs

    def __call__(self, prompt, new_tokens):
        for name, value in self.assistant.items():
            setattr(self.draft.generation_config, name, value)
        passes = []
        how = request(prompt, self.temperature, new_tokens)
        with self.target.register_forward_hook(lambda *_: passes.append(1)):
            seconds, text = timed(lambda: self.target.generate(prompt, **how, **self.kwargs))
        new = text.shape[1] - prompt.shape[1]
        return Run(seconds, new, new, len(passes))

def interleave(contenders, prompts, args, label):
    """Every contender on every prompt, in turns, with the prompt's seed, after a short run: runs by name."""
    for contender in contenders.values():
        contender(prompts[0], 128 if getattr(contender, "measures", False) else 16)
    names = list(contenders)
    runs = {name: Runs() for name in names}
    for i, prompt in enumerate(progress(prompts, label)):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            torch.manual_seed(i)
            runs[name].append(contenders[name](prompt, args.new_tokens))
    return runs

# --- 6  speed: side by side with transformers (section 4.1, Table 1) ----------------------------------------
# Who takes part in several settings. Assisted generation: number of tokens, schedule, least confidence; the
# fastest two of eight on the bundled pair. Lookup: number of tokens. SpecInfer: sequences and their length.
ASSISTED = ((5, "constant", 0.4), (2, "heuristic", 0.4))
LOOKUP = (4, 10)
SPECINFER = ((1, 3), (2, 4), (4, 4), (5, 8))
PEERS = ("generate", "assisted", "assisted, packed", "plain", "specinfer")
# Whom the picture shows, and its words for them.
BARS = {"generate": "generate", "assisted": "assisted", "lookup": "prompt\nlookup",
        "door 1": "one call:\nsequoia", "assisted, packed": "packed:\nassisted",
        "plain": "packed:\nno tree", "specinfer": "packed:\nspecinfer", "sequoia": "packed:\nsequoia"}

def speed(args, report):
    """Tokens per step and ms per token of this file and its peers."""
    if args.synthetic:
        return synthetic_speed(args, report)
    pair, prompts = pair_of(args), texts(args, args.count, 128)
    report.say(f"Target {args.target}, draft {args.draft}, {args.dtype}.")
    paces = {}
    for temperature in args.temperatures:
        best = contest(prompts, temperature, args, report, contenders_for(pair, temperature, args))
        paces[temperature] = {name: best[name].tokens_per_second() for name in BARS if name in best}
    if args.save and paces.keys() <= {0.0, 0.6}:
        draw_paces(args, report, paces)

def contenders_for(pair, temperature, args):
    """All who take part, by (name, setting)."""
    mine = functools.partial(Ours, pair, temperature)
    peer = functools.partial(Theirs, pair, temperature)
    taking_part = {("generate", ""): peer(), ("plain", "no tree"): mine(NO_TREE)}
    names = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
    for name, setting in itertools.product(("assisted", "assisted, packed")[: 1 + pair.pack], ASSISTED):
        words = " ".join(map(str, setting))
        taking_part[name, words] = peer(assistant=zip(names, setting), packed="packed" in name)
    # A synthetic text is noise, of which nothing can be looked up.
    for n in () if args.synthetic else LOOKUP:
        taking_part["lookup", f"{n} tokens"] = peer(prompt_lookup_num_tokens=n)
    for k, length in SPECINFER:
        taking_part["specinfer", f"{k} of {length}"] = mine(sequences(k, length), "specinfer")
    # Greedy, all of this file's methods are one and the same, and specinfer's children differ.
    for method in ("topk", "traversal", "gumbel", "sequoia") if temperature else ("sequoia",):
        taking_part[method, args.tree] = mine(args.tree, method)
    taking_part["kept, not packed", args.tree] = mine(args.tree, packed=False)
    taking_part["door 1", args.tree] = mine(args.tree, packed=False, kept=False)
    return taking_part

def contest(prompts, temperature, args, report, contenders):
    """A table of all contenders on all prompts. Returns the runs by name, the fastest of several."""
    runs = interleave(contenders, prompts, args, named(temperature))
    # The fastest of a name is the last, and so the one that stays.
    by_speed = sorted(runs, key=lambda who: -runs[who].ms_per_token())
    best = {name: runs[name, setting] for name, setting in by_speed}
    rows = []
    for (name, setting), mine in runs.items():
        tree = mine[-1].tree
        row = {"temperature": f"{temperature:g}", "method": name,
               "setting": f"auto {tree.size}x{tree.depth}" if setting == "auto" else setting,
               "tokens/step": mine.tokens_per_step().value, "ms/token": mine.ms_per_token(),
               "tokens/s": mine.tokens_per_second()}
        rows.append(row | {f"x {peer}": mine.over(best[peer]) for peer in PEERS if peer in best})
    report.table(f"{named(temperature)}: {len(prompts)} prompts of {prompts[0].shape[1]} tokens, "
                 f"{args.new_tokens} new ones each; auto: the last planned tree, nodes x levels", f"""`x
        plain`: the speed against the same code without a tree. `x assisted`, `x specinfer`: against the
        fastest of these here, which the same runs choose, in its favour. Where intervals overlap, who leads
        is open. {TWO_CORES}""", rows)
    return best

def predicted_paces(temperature):
    """Tokens a second of an A100, as in `predict`, with the rates of the paper's row for the 7B and C4."""
    row = next(row for row in published("on_device_a100") if row["temperature"] == temperature)
    rates = power_law(row["b"])
    latency = latency_of("Llama2-7B", "JF68M", A100, A100, 256)

    def pace(tree):
        return Estimate(expected_tokens(tree, rates) / latency.of_step(tree.size, tree.depth))

    return {"plain": Estimate(1 / latency.t[0]),
            "specinfer": max(pace(sequences(*shape)) for shape in SPECINFER),
            "sequoia": pace(sequoia.plan(rates, latency).tree)}

def draw_paces(args, report, measured):
    """Bars of tokens a second: measured on this machine, and predicted for an A100."""
    predicted = {temperature: predicted_paces(temperature) for temperature in measured}
    fig, axes = pyplot().subplots(1, 2, figsize=(13, 5), layout="constrained", width_ratios=(2, 1))
    titles = (f"Measured: {device_name(args.device)}", "PREDICTED: an A100, 7B with 68M")
    for axis, title, paces in zip(axes, titles, (measured, predicted)):
        for i, (temperature, found) in enumerate(paces.items()):
            heights, halves = zip(*found.values())
            places = np.arange(len(found)) + 0.4 * i
            bars = axis.bar(places, heights, 0.4, yerr=halves if paces is measured else None,
                            color=(GREEN, "#86efac")[i % 2], edgecolor="white", label=named(temperature),
                            hatch="//" if paces is predicted else None, error_kw={"lw": 1.2, "capsize": 3})
            axis.bar_label(bars, fmt="%.0f", padding=3, fontsize=10)
        words = [BARS[name] if paces is measured else BARS[name].split("\n")[-1] for name in found]
        axis.set_xticks(np.arange(len(found)) + 0.2, words)
        axis.set_title(title, loc="left", fontsize=13)
    axes[0].set_ylabel("tokens a second")
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    report.say("`generate`, `assisted`, `lookup`: transformers' own. `door 1`, in the figure one call: a "
               "Decoder for each prompt. Others: one for all. `specinfer`: the best of four trees. Right: as "
               "computed by `predict`, a step one CUDA graph.")
    report.picture("speed", fig)

# --- 7  speed --synthetic: large models' shapes, the paper's tokens per step, weights made on the spot ------
# Both models share a random bigram core, an embedding for each token and a head in the draft's width, and add
# what their own random layers make of it. Every product is done; the text is noise. The more the core weighs
# the more the two agree. With these shares, by temperature, found by bisection for the first two pairs, a
# tree of the paper's size and depth yields about as many tokens a step as the paper's, the 7B on C4.
SHARES = {0.0: 10.0, 0.6: 6.8}
SYNTHETIC = {"7b-68m": ("Llama2-7B", "JF68M"), "1b-68m": ("1B", "JF68M"), "tiny": ("tiny", "tinier")}

class SyntheticPair(Pair):
    """Two random Llama models with a common core."""

    def __init__(self, target, draft, pack=True):
        super().__init__(target, draft, pack)
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

def random_llama(name, args, device):
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "head_dim", "vocab_size")
    config = LlamaConfig(**dict(zip(names, SHAPES[name])), tie_word_embeddings=False,
                         max_position_embeddings=2048, initializer_range=SHAPES[name][0] ** -0.5)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype)).eval()
    for layer in model.model.layers:
        # Attention to few tokens, as in trained models.
        layer.self_attn.q_proj.weight.data.mul_(3)
    return model

def synthetic_speed(args, report):
    """The contest at full scale, and how near a step is to the memory's speed, or to that of the link."""
    torch.manual_seed(0)
    large, small = SYNTHETIC[args.synthetic]
    home = "cpu" if args.offload else args.device
    target = random_llama(large, args, home)
    target = sequoia.offload(target, args.device) if args.offload else target
    # A target that streams cannot be copied, to be packed.
    pair = SyntheticPair(target, random_llama(small, args, args.device), pack=not args.offload)
    prompts = [torch.randint(len(pair.core), (1, 128), device=args.device) for _ in range(args.count)]
    size = weights(SHAPES[large]) * target.dtype.itemsize
    # An eighth of the weights, to have room for two.
    buffer = torch.ones(size // 8, dtype=torch.uint8, device=home, pin_memory=home != args.device)
    arrived = torch.empty_like(buffer, device=args.device, pin_memory=False)
    move = functools.partial(arrived.copy_, buffer) if args.offload else buffer.view(torch.float32).sum
    floor = 8e3 * float(np.median([timed(move)[0] for _ in range(9)]))
    report.say(f"Synthetic pair {args.synthetic}, {args.dtype}. The least that a step can take: to "
               f"{'copy' if args.offload else 'read'} the target's {size / 1e9:.3f} GB takes {floor:.2f} ms, "
               f"{size / floor / 1e6:.0f} GB/s.")
    for temperature in args.temperatures:
        if temperature not in SHARES:
            raise ValueError(f"--synthetic knows the temperatures 0 and 0.6 only, got {temperature:g}")
        pair.set_share(SHARES[temperature])
        *_, size, depth, _, tokens, _, _, _ = PAPER["on_device_a100"]["rows"][temperature > 0]
        contenders = contenders_for(pair, temperature, args)
        contenders["paper's size", f"{size}x{depth}"] = Ours(pair, temperature, (size, depth))
        contest(prompts, temperature, args, report, contenders)
        report.say(f"`paper's size`: the size and depth of the paper's tree, with {tokens} tokens a step.")

# --- 8  planner: promised and achieved (section 4.1; appendix, Figures 7 and 8) -----------------------------
def planner(args, report):
    """The planned tree and others, predicted and measured; and what a useless draft costs. All decode with
    gumbel, so that all write the same texts: what differs is the trees."""
    pair, prompts = pair_of(args), texts(args, 2 * args.count, 128)
    torch.manual_seed(0)
    useless = AutoModelForCausalLM.from_config(pair.draft.config, dtype=pair.draft.dtype)
    useless = sequoia.pack(useless.to(args.device).eval())
    rows = []
    for temperature in args.temperatures:
        mine = functools.partial(Ours, pair, temperature, method="gumbel")
        auto = mine("auto")
        learnt = auto.learn(prompts[1::2])
        rates, latency = learnt.rates()[:, :16], learnt.latency()
        trees = trees_around(sequoia.plan(rates, latency).tree, rates)
        contenders = {"plain": mine(NO_TREE), **{name: mine(tree) for name, tree in trees.items()},
                      "goes on planning": auto, "with a useless draft": mine("auto", draft=useless)}
        runs = interleave(contenders, prompts[::2], args, f"trees, {named(temperature)}")
        best = min(trees, key=lambda name: runs[name].ms_per_token())
        for name in list(contenders)[1:]:
            tokens = promised = None
            if name in trees:
                tokens = expected_tokens(trees[name], rates)
                seconds = latency.of_step(trees[name].size, trees[name].depth)
                timed_so_far = trees[name].size <= latency.sizes[-1]
                promised = float(tokens * latency.t[0] / seconds) if timed_so_far else None
            rows.append({"temperature": f"{temperature:g}", "tree": name, "tokens/step, predicted": tokens,
                         "achieved": runs[name].tokens_per_step(), "x plain, predicted": promised,
                         "x plain": runs[name].over(runs["plain"]), "x best": runs[name].over(runs[best])})
        times = [f"{size}: {1e3 * seconds:.2f}" for size, seconds in zip(latency.sizes, latency.t)]
        report.say(f"{named(temperature)}, measured while decoding, in ms: t(n), a step's time without draft "
                   f"passes, by n, {', '.join(times)}; a draft pass, c, {1e3 * latency.c:.2f}.")
    report.table(f"Predicted and achieved, {args.count} prompts, {args.new_tokens} new tokens each", f"""All
        decode with gumbel. A plan promises what follows from rates and times of other prompts; where
        intervals overlap, who leads is open. `any depth`: the trees of a size with the most tokens a step,
        however many draft passes they take; the paper's Figure 7 compares the planned one with these. `x
        best`: against the fastest tree, which the same runs choose. {TWO_CORES}""", rows)
    if args.save:
        # A line for each tree: what was promised, a ring, and what was achieved, a point with its interval.
        for axis, mine in report.panels("planner", rows, height=6.5):
            lines = range(len(mine))
            axis.plot([row["x plain, predicted"] for row in mine], lines, "o", markersize=9, fillstyle="none",
                      color=BLACK, label="predicted")
            achieved, halves = zip(*(row["x plain"] for row in mine))
            axis.errorbar(achieved, lines, xerr=halves, fmt="o", capsize=3, color=GREEN, label="achieved")
            axis.axvline(1, color=BLACK, linestyle="--", linewidth=1, label="no tree")
            axis.set_yticks(lines, [row["tree"] for row in mine])
            axis.set(xlabel="times plain decoding", ylim=(len(mine) - 0.5, -0.5))

def trees_around(chosen, rates):
    """By name: the planned tree, four beside it, three of sequences, and four of any depth."""
    size, depth = (chosen.size, chosen.depth) if chosen.size > 1 else (8, 4)
    trees = {f"{chosen.size}x{chosen.depth}, planned": chosen}
    for n, d in ((size // 2, depth - 1), (size, depth - 1), (size, depth + 1), (2 * size, depth)):
        # Two levels have room for a root and its children.
        if 2 <= d <= n <= 1 + rates.shape[1] * (d - 1):
            trees[f"{n}x{d}"] = optimal_tree(rates, n, d)
    trees |= {f"sequences, {k} of {length}": sequences(k, length) for k, length in SPECINFER[:3]}
    return trees | {f"{n}, any depth": optimal_tree(rates, n) for n in (8, 16, 32, 64)}

# --- 9  verification: rejection rates, and all methods on one tree (sections 3.2 and 4.2.2, Figure 3) -------
CHILDREN = (1, 2, 4, 8, 16, 32)
COLOURS = {"sequoia": GREEN, "specinfer": ORANGE, "spectr": "#ca8a04", "naive": GREY, "topk": BLUE,
           "gumbel": VIOLET}

@torch.no_grad()
def verification(args, report):
    """How often all k children are rejected, and tokens per step on one tree, by temperature and top-p."""
    pair, prompts = pair_of(args), texts(args, args.count, 256)
    # Both models' after each of the last tokens, (32, V).
    logits = [[model(text).logits[0, -32:] for model in (pair.target, pair.draft)]
              for text in progress(prompts, "reading")]
    settings = list(itertools.product(args.temperatures, (1.0, 0.9) if args.quick else (1.0, 0.9, 0.8)))
    rows = [row for setting in progress(settings, "rejection rates") for row in rejections(logits, *setting)]
    report.table(f"Rejection rate of k children, 32 positions in each of {len(logits)} texts", """Lower is
        better. b: the exponent of the power law C / k^b nearest to the rates, large where they fall fast (the
        paper's has C = 1). What top-p cuts from the draft is proposed last, in the draft's proportions, not
        uniformly (Algorithm 2, lines 12 to 15). `x sequoia`: against its rate at these positions.""", rows)
    if args.save:
        rows = [row for row in rows if row["top-p"] == "1"]
        for axis, mine in report.panels("verification", rows):
            draw_rejections(axis, mine)
    one_tree(args, report, pair, [text[:, :128] for text in prompts], logits, settings)

def rejections(logits, temperature, top_p):
    """A table's rows for one temperature and top-p."""
    generator = torch.Generator(logits[0][0].device).manual_seed(0)
    shaped = sampling(temperature, top_p)
    scores = [(shaped.scores(target), shaped.scores(draft, draft=True)) for target, draft in logits]
    rates = {name: rejection_rates(method, scores, generator) for name, method in METHODS.items()
             if not method.leaves_first}
    for name, mine in rates.items():
        row = {"temperature": f"{temperature:g}", "top-p": f"{top_p:g}", "method": name}
        row |= {f"k = {k}": float(mine[:, i].mean()) for i, k in enumerate(CHILDREN)}
        row["b"] = estimate(lambda sums: -np.polyfit(np.log(CHILDREN), np.log(sums), deg=1)[0], mine)
        row |= {f"k = {CHILDREN[i]}, x sequoia": estimate(truediv, mine[:, i], rates["sequoia"][:, i])
                for i in (0, 3)}
        yield row

def rejection_rates(method, scores, generator, repeats=2):
    """The chance that all of k children are rejected, (texts, ks). scores: each text's, of both models."""
    rates = np.zeros((len(scores), len(CHILDREN)))
    for text, _ in itertools.product(range(len(scores)), range(repeats)):
        p, q = scores[text]
        if method.shared_noise:
            noise = -sequoia.exponential(sequoia.uniform(p, generator)).log()
            p, q = p + noise, q + noise
        P = verified(method, p)
        tokens = method.propose(q, max(CHILDREN), generator)                                # (rows, k)
        # SpecTr's ratios depend on how many children there are, so each k is verified by itself.
        for i, k in enumerate(CHILDREN):
            accepted = chances_of(method, P, q, tokens[:, :k]).sum(dim=1)
            rates[text, i] += (1 - accepted).mean().item() / repeats
    return rates

def draw_rejections(axis, rows):
    """As the paper's Figure 3 (WikiText-103), with more methods."""
    # Where lines meet, a later one is thinner and its marker smaller, so that all are seen.
    for i, row in enumerate(rows):
        rates = [row[f"k = {k}"] for k in CHILDREN]
        axis.plot(CHILDREN, rates, "-o", markersize=10 - 1.4 * i, linewidth=5 - 0.8 * i,
                  color=COLOURS.get(row["method"], BLACK), label=row["method"])
        if row["method"] == "sequoia":
            b = row["b"].value
            C = np.exp(np.mean(np.log(rates)) + b * np.mean(np.log(CHILDREN)))
            axis.plot(CHILDREN, C / np.array(CHILDREN) ** b, "--", color=BLACK, linewidth=1, zorder=9,
                      label="sequoia's power law")
            axis.text(1, min(rates), f"sequoia: {C:.2f} / k^{b:.2f}", color=GREEN)
    axis.set(yscale="log", ylabel="rejection rate")
    axis.set_yticks((0.1, 0.2, 0.4, 0.8), ("0.1", "0.2", "0.4", "0.8"))
    log_axis(axis, CHILDREN, "children k")

# Tokens per step of trees, for methods side by side: all go through the same texts, a token a step. In every
# step the draft grows the tree, and what the method would yield of it is not drawn but computed.

def expected_yield(method, layout, tokens, p, q):
    """The tokens that a step yields on average, given its tokens, (size + 1,), and scores (size, V)."""
    tree = layout.tree
    P = verified(method, p)
    if method.leaves_first:
        # Each node's depth + 1 times the chance that it is the first to accept.
        turns, (chances, _) = layout.children_first, sequoia.endings(method, layout, tokens, P, q)
        return (in_turn(chances[turns][None])[0] * (layout.depths[turns] + 1)).sum().item()
    # A walk: the chances to reach each node, summed. Nodes with equally many children go together.
    accepted = torch.ones_like(P[:, 0])
    for count in set(map(len, tree.children)) - {0}:
        rows = [node for node in range(tree.size) if len(tree.children[node]) == count]
        children = torch.tensor([tree.children[node] for node in rows])                     # (rows, count)
        accepted[children] = chances_of(method, P[rows], q[rows], tokens[children]).to(P.dtype)
    return torch.where(tree.mask.to(P.device), accepted, 1).prod(dim=1).sum().item()

@dataclass(frozen=True, eq=False)
class Onlooker(sequoia.Method):
    """Draws the tokens of a given text, one a step, and notes what `judge` would have made of each tree."""
    judge: sequoia.Method = None
    seen: list = None

    def begin(self, p, generator):
        return p

def look_on(method, layout, tokens, target, q, *rest, walk=sequoia.walk):
    """In place of sequoia.walk, for an Onlooker."""
    if isinstance(method, Onlooker):
        method.seen.append(expected_yield(method.judge, layout, tokens, target(layout.nodes), q))
        return layout.nodes[:1], method.draw()[:, 0]
    return walk(method, layout, tokens, target, q, *rest)

sequoia.walk = look_on

def yields(pair, how, contenders, prompts):
    """What trees with methods yield: a mean over the steps of each text, (texts,), for each name. how:
    temperature, new tokens, top-p. The texts are the target's own, written by the first decoder."""
    left = []
    seen = []
    found = {name: [] for name in contenders}
    decoders = {"": sequoia.Decoder(*pair.fast, NO_TREE)}
    for name, (tree, method) in contenders.items():
        judge = METHODS[method]
        onlooker = Onlooker(judge.propose, draw=lambda *_: left.pop(0), shared_noise=judge.shared_noise,
                            judge=judge, seen=seen)
        decoders[name] = sequoia.Decoder(*pair.fast, tree, onlooker, cuda_graph=False)
    for i, prompt in enumerate(prompts):
        for name, decoder in decoders.items():
            torch.manual_seed(i)
            seen.clear()
            out = pair.fast[0].generate(prompt, custom_generate=decoder, **request(prompt, *how))
            if name:
                found[name].append(np.mean(seen))
            left[:] = out[0, prompt.shape[1] :, None, None]
    return {name: np.array(column) for name, column in found.items()}

def mean_of(column):
    return estimate(lambda total: total / len(column), column)

def over_positions(args):
    return (f"Means over {args.new_tokens} positions in each of {args.count} texts of the target's own: "
            "about a tenth more than decoding yields, which jumps over the easy ones.")

def one_tree(args, report, pair, prompts, logits, settings):
    """As Figure 4, right (128x6, CNN Daily; speed-ups), and Table 8: methods on a tree planned for 0.6."""
    shaped = sampling(0.6)
    p, q = (shaped.scores(torch.cat(both), draft=i == 1) for i, both in enumerate(zip(*logits)))
    rates = chances_of(shaped.method, p.softmax(dim=1), q, shaped.method.propose(q, 32)).mean(dim=0)
    tree = optimal_tree(rates.cpu(), 64, 7)
    rows = []
    for temperature, top_p in progress(settings, "one tree"):
        contenders = {name: (tree, name) for name in ("sequoia", "traversal", "specinfer", "topk", "gumbel")}
        found = yields(pair, (temperature, args.new_tokens, top_p), contenders, prompts)
        row = {"temperature": f"{temperature:g}", "top-p": f"{top_p:g}"}
        row |= {name: mean_of(column) for name, column in found.items()}
        rows.append(row | {f"sequoia / {name}": estimate(truediv, found["sequoia"], column)
                           for name, column in found.items() if name != "sequoia"})
    table = PAPER["top_p_tokens_per_step"]["rows"]
    report.table(f"Tokens per step on one tree, 64x{tree.depth}", f"""{over_positions(args)} All methods
        stand before the same texts, and what they yield is computed, so a quotient's interval is narrower
        than its parts'. The paper has up to 1.65 times SpecInfer's speed and 1.27 times top-k's by
        temperature (7B with JF68M, 128 nodes). Tokens a step by top-p, of sequoia, SpecInfer, top-k:
        {'; '.join(f'{p}: {a}, {b}, {c}' for p, a, b, c in table)}.""", rows)

# --- 10  scaling: tokens per step by tree size (section 4.2.1, Figure 4) ------------------------------------
def scaling(args, report):
    """Tokens per step of the optimal tree and of k sequences, with Sequoia's rule and with SpecInfer's."""
    pair, prompts = pair_of(args), texts(args, 2 * args.count, 128)
    rows = []
    for temperature in args.temperatures:
        # The rates are learnt from every other prompt.
        rates = Ours(pair, temperature, (32, 8)).learn(prompts[1::2]).rates()
        sizes = [2**i for i in range(3, 7 if args.quick else 10)]
        for size in progress(sizes, f"{named(temperature)}, sizes"):
            shapes = sequences_within(size)
            k = max(shapes, key=lambda k: expected_tokens(shapes[k], rates))
            tree = optimal_tree(rates, size, min(size, 16))
            rivals = {"k sequences": (k, "sequoia"), "k, SpecInfer's rule": (k, "specinfer"),
                      "16 sequences": (16, "sequoia"), "16, SpecInfer's rule": (16, "specinfer")}
            contenders = {"sequoia": (tree, "sequoia"), "traversal": (tree, "traversal")}
            contenders |= {name: (shapes[k], rule) for name, (k, rule) in rivals.items() if k in shapes}
            found = yields(pair, (temperature, args.new_tokens), contenders, prompts[::2])
            mine = found["sequoia"]
            row = {"temperature": f"{temperature:g}", "nodes": size, "levels": tree.depth, "best k": k,
                   "expected": expected_tokens(tree, rates), "sequoia": mean_of(mine)}
            for name in rivals:
                row[name] = mean_of(found[name]) if name in found else None
                row[f"over {name}"] = estimate(truediv, mine, found[name]) if name in found else None
            rows.append(row | {"traversal / sequoia": estimate(truediv, found["traversal"], mine)})
    report.table("Tokens per step at equal size", f"""{over_positions(args)} `over`: how many times as many
        the optimal tree yields. The paper verifies all by Sequoia's rule, and has up to 1.33 times as many as
        16 sequences, at 512 nodes and temperature 0.6 (13B with JF68M, any depth): see `over 16 sequences`.
        With SpecInfer's rule tree and rule differ. best k: of 1, 2, 4, ... 32 by expected tokens.""", rows)
    if args.save:
        for axis, mine in report.panels("scaling", rows, ncols=2):
            draw_by_size(axis, mine, {"sequoia": (GREEN, "-"), "k sequences": (ORANGE, "-"),
                                      "k, SpecInfer's rule": (PINK, "--"), "16 sequences": (BROWN, ":")})
            axis.set_ylabel("tokens per step")

# --- 11  step: a picture of one step ------------------------------------------------------------------------
def step(args, report):
    """A step with rejections and two accepted children or more, and what both models said of each."""
    pair = pair_of(args)
    temperature = args.temperatures[0]
    decoder = sequoia.Decoder(*pair.fast, optimal_tree([0.6, 0.2, 0.1], 8, 4))

    def noted(found):
        steps.append((found, [(child, float(given), float(wanted))
                              for child, given, wanted in sequoia.tried_children(decoder, found)]))

    decoder.on_step = noted
    for i, prompt in enumerate(progress(texts(args, args.count, 128), "looking for a step")):
        torch.manual_seed(i)
        steps = []
        text = pair.fast[0].generate(prompt, custom_generate=decoder, **request(prompt, temperature, 64))[0]
        length = prompt.shape[1]
        for found, tried in steps:
            words = [args.tokenizer.decode([max(token, 0)]) for token in (*found.node_tokens, found.token)]
            # A close rejection, then an acceptance, after a word; and no token that is hard to draw.
            close = len(tried) > len(found.path) >= 2 and min(target for _, _, target in tried) > 0.05
            drawable = words[0][1:].isalpha() and all(re.fullmatch(r" ?[!-~]{1,10}", word) for word in words)
            if close and tried[-1][0] in found.path and drawable:
                return show_step(args, report, found, tried, words, args.tokenizer.decode(text[:length]))
            length += len(found.tokens)
    raise ValueError("no step with a rejection and two accepted children was found")

def show_step(args, report, found, tried, words, before):
    """A table, and the tree from left to right: a column for each level, a row for each leaf."""
    rows = [{"node": node, "token": f"`{words[node]!r}`", "draft": draft, "target": target,
             "chance": min(1.0, target / draft), "": "accepted" if node in found.path else "rejected"}
            for node, draft, target in tried]
    added = "".join(words[node] for node in (*found.path, -1))
    report.table(f"One step, {named(args.temperatures[0])}, after `{before[-40:]!r}`", f"""Each child that was
        tried, in order. draft, target: its probabilities in what rejections have left of both; it is accepted
        with the chance target / draft. The step adds `{added!r}`.""", rows)
    if not args.save:
        return
    # The target's own token stands below the last accepted node, after its children.
    paths = [(), *found.tree.paths()]
    paths.append((*paths[found.path[-1]], found.tree.size))
    below = {path: [other for other in paths if other and other[:-1] == path] for path in paths}
    leaves = sorted(path for path in paths if not below[path])
    row = {path: float(i) for i, path in enumerate(leaves)}
    for path in sorted(paths, key=len, reverse=True):
        if below[path]:
            row[path] = float(np.mean([row[other] for other in below[path]]))
    tried = {node: both for node, *both in tried}
    fig, axis = pyplot().subplots(figsize=(9, 1.3 + 0.85 * len(leaves)), layout="constrained")
    kinds = {"not tried": GREY, "rejected": RED, "accepted": GREEN, "the target's own": BLUE}
    kinds["the text"] = BLACK
    for node, path in enumerate(paths):
        kind = "rejected" if node in tried else "not tried" if node < found.tree.size else "the target's own"
        kind = "accepted" if node in found.path else kind if node else "the text"
        colour, x, y = kinds[kind], len(path), row[path]
        if path:
            start = row[path[:-1]]
            axis.plot([x - 1, x - 0.5, x - 0.5, x], [start, start, y, y], color=colour,
                      zorder=list(kinds).index(kind))
        axis.text(x, y, repr(words[node])[1:-1].replace(" ", "␣"), ha="center", va="center", color=colour,
                  family="monospace", zorder=9, bbox={"boxstyle": "round", "fc": "white", "ec": colour})
        if node in tried:
            axis.text(x, y + 0.26, "draft {:.2f}\ntarget {:.2f}".format(*tried[node]), ha="center", va="top",
                      fontsize=10, color=colour, linespacing=1.1)
    handles = [axis.plot([], [], "s", color=colour, label=kind)[0] for kind, colour in kinds.items()]
    fig.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=12)
    axis.set_title(f"after ... {before[-44:]!r}\ndraft, target: what rejections before have left of their "
                   f"probabilities", loc="left", fontsize=12)
    axis.set(xlim=(-0.4, max(map(len, paths)) + 0.4), ylim=(len(leaves) - 0.1, -0.4))
    axis.axis("off")
    report.picture("step", fig)

# --- 12  The command line -----------------------------------------------------------------------------------
COMMANDS = {one.__name__: one for one in (trees, predict, step, speed, planner, verification, scaling)}
# Prompts, new tokens of each, temperatures; and the same with --quick.
DEFAULTS = {
    "trees": ((0, 0, []), (0, 0, [])), "predict": ((0, 0, []), (0, 0, [])),
    "step": ((40, 0, [0.6]), (40, 0, [0.6])),
    "speed": ((45, 128, [0.0, 0.6]), (4, 64, [0.0, 0.6])),
    "speed --synthetic": ((3, 64, [0.0]), (2, 48, [0.0])),
    "planner": ((30, 64, [0.0, 0.6]), (4, 48, [0.0, 0.6])),
    "verification": ((28, 8, [0.2, 0.6, 1.0]), (4, 8, [0.6, 1.0])),
    "scaling": ((18, 8, [0.2, 0.6, 1.0]), (4, 8, [0.6]))}

def jobs(device, quick):
    """What `all` does, in its order."""
    pair = "tiny" if quick else "1b-68m" if device == "cpu" else "7b-68m"
    names = [*DEFAULTS, "speed --synthetic --offload"]
    return [name.replace("--synthetic", f"--synthetic {pair}") for name in names]

def arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add, tiny = parser.add_argument, os.path.relpath(sequoia.TINY)
    add("command", choices=[*COMMANDS, "all"])
    add("--target", default=f"{tiny}/target", help="a folder or hub name (the bundled target)")
    add("--draft", default=f"{tiny}/draft", help="the draft's (the bundled one)")
    add("--prompts", metavar="FILE", help="a text to cut prompts from (held-out standard library)")
    add("--save", action="store_true", help="write the tables and the figures into figures/")
    add("--quick", action="store_true", help="fewer and shorter runs; saved into figures/quick/")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(a GPU, if any)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="(bfloat16 where the processor has it)")
    add("--temperatures", type=float, nargs="+", metavar="T", help="(0 0.6; others for some commands)")
    add("--count", type=int, metavar="N", help="prompts (45; others for some commands)")
    add("--new-tokens", type=int, metavar="N", help="decoded for each prompt (128; others for some commands)")
    add("--tree", default="auto", help="speed: this file's tree, as for sequoia.py (auto)")
    add("--synthetic", choices=SYNTHETIC, help="speed: a random pair of these shapes, tuned")
    add("--offload", action="store_true", help="speed --synthetic: stream the target from host memory")
    args = parser.parse_args(argv)
    good = args.device != "cpu" or torch.bfloat16 in sequoia.packable_dtypes()
    args.dtype = args.dtype or ("bfloat16" if good else "float32")
    args.save = args.save or args.command == "all"
    defaults = DEFAULTS.get("speed --synthetic" if args.synthetic else args.command, ((), ()))[args.quick]
    if any(number is not None and number < 1 for number in (args.count, args.new_tokens)):
        parser.error("--count and --new-tokens are at least 1")
    for name, value in zip(("count", "new_tokens", "temperatures"), defaults):
        setattr(args, name, getattr(args, name) or value)
    return args

def main():
    args = arguments(sys.argv[1:])
    if args.quick:
        print("--quick: as short as can be, to see that the command works. It decides nothing.", flush=True)
    sequoia.leave_busy_cores()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    options = [word for word in sys.argv[1:] if word not in (args.command, "--save")] + ["--save"] * args.save
    origin = provenance(args.device)         # before anything is written
    try:
        if args.save:
            pyplot()
        for command in jobs(args.device, args.quick) if args.command == "all" else [args.command]:
            words = [*command.split(), *options]
            mine = arguments(words)
            report = Report(words)
            report.folder.mkdir(parents=True, exist_ok=True)
            print(f"\n## python bench.py {report.command}", flush=True)
            if mine.command in ("verification", "scaling") and 0 in mine.temperatures:
                raise ValueError(f"{command} needs temperatures above 0: greedy, all methods are one")
            seconds, _ = timed(lambda: COMMANDS[mine.command](mine, report))
            if args.save:
                report.save(seconds, args.device, origin)
    except (ValueError, OSError, ImportError) as error:
        print(f"bench.py: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2)

if __name__ == "__main__":
    main()
