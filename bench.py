"""Measures what README and figures/results.md say. Each question has one command:

    python bench.py trees           # how many tokens per step the best trees promise, by size
    python bench.py predict         # the paper's speed-ups, and a plan, computed from data sheets
    python bench.py step            # pictures of one rejection, and of one real step: tree and mask
    python bench.py speed           # side by side with transformers, with --target and --draft any pair
    python bench.py speed --synthetic 1b-68m       # the same with random models of these shapes
    python bench.py offload         # the same with a target that is streamed from host memory
    python bench.py planner         # what the planner promised, and what was achieved
    python bench.py acceptance      # how often the first, second, ... child is accepted, or all are rejected
    python bench.py scaling         # tokens per step by tree size, against separate sequences
    python bench.py robustness      # tokens per step of one tree, by temperature and top-p
    python bench.py all             # everything, into figures/results.md, the pictures beside it, and README

Other commands than all write to figures/quick, and so does --quick, which takes seconds and decides nothing.
All methods take turns on the same prompts, seeds and weights. 1.33 ± 0.05 is a ratio of sums over prompts
and half its 95% interval, which is paired: it tells how much other prompts would move the ratio."""
import argparse, copy, functools, json, math, os, re, subprocess, sys, time
from operator import truediv
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
import transformers
from torch.nn.functional import pad
from tqdm import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig, TemperatureLogitsWarper

import sequoia
from sequoia import METHODS, NO_TREE, Decoder, expected_tokens, optimal_tree, sequences, verify_one_node

HERE = Path(__file__).resolve().parent
PAPER = json.loads((HERE / "figures" / "paper.json").read_text(encoding="utf-8"))

# --- 1  Intervals and tables --------------------------------------------------------------------------------
class Estimate(NamedTuple):
    """A value and half its 95% interval."""
    value: float
    half: float

def estimate(function, *columns):
    """A function of the sums of columns, (prompts, ...) each, with its interval. By the jackknife: how far
    the values without one prompt scatter tells how far other prompts would move it."""
    sums = [column.sum(axis=0) for column in columns]
    freedom = len(columns[0]) - 1
    without_one = [function(*(total - column[i] for total, column in zip(sums, columns)))
                   for i in range(freedom + 1)]
    # The range of Student's t for 95%, to 1% from three degrees of freedom on.
    t = 1.96 + 2.37 / freedom + 2.82 / freedom**2 + 2.56 / freedom**3
    return Estimate(float(function(*sums)), t * math.sqrt(freedom * np.var(without_one)))

def show(value):
    """A table's cell. An estimate's two numbers have equally many decimals."""
    if isinstance(value, Estimate):
        text = show(value.value)
        digits = len(text.partition(".")[2])
        return f"{text} ± {value.half:.{digits}f}" if value.half > 0 else text
    if isinstance(value, float):
        return f"{value:.{0 if abs(value) >= 100 else 2}f}"
    return "-" if value is None else str(value)

class Report:
    """The tables and pictures of a run, printed and written to a folder. numbers: README's, by name."""
    def __init__(self, folder):
        self.folder = folder
        self.text = ""
        self.numbers = {}

    def say(self, text):
        print(f"{text}\n", flush=True)
        self.text += f"{text}\n\n"
        if self.folder:
            # After every table, so that a run that is broken off leaves what it has found.
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "results.md").write_text(self.text.rstrip() + "\n", encoding="utf-8")

    def table(self, title, lesson, rows):
        """Rows, dictionaries with the same keys, as a Markdown table below its title and its lesson."""
        cells = [list(rows[0]), *([show(value) for value in row.values()] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*cells)]
        cells.insert(1, ["-" * (width - 1) + ":" for width in widths])
        cells[1][0] = "-" * widths[0]
        lines = [f"**{title}**\n\n{' '.join(lesson.split())}\n"]
        for first, *others in cells:
            padded = [cell.rjust(width) for cell, width in zip(others, widths[1:])]
            lines.append(f"| {' | '.join([first.ljust(widths[0]), *padded])} |")
        self.say("\n".join(lines))

    def picture(self, name, draw, *args):
        """Saves the figure that draw(*args) returns, with its last axis's legend below it."""
        if not matplotlib:
            return print(f"bench.py: no {name}.png, as matplotlib is missing", file=sys.stderr)
        fig = draw(*args)
        handles = fig.axes[-1].get_legend_handles_labels()
        fig.legend(*handles, loc="outside lower center", ncols=6, frameon=False)
        fig.savefig(self.folder / f"{name}.png", dpi=200)
        self.say(f"![{name}]({name}.png)")

def provenance(device):
    """The commit, the day, the machine and the versions, in words."""
    git = functools.partial(subprocess.run, cwd=HERE, capture_output=True, text=True)
    commit = git(["git", "rev-parse", "--short", "HEAD"]).stdout.strip() or "unknown"
    changed = git(["git", "status", "--porcelain"]).stdout.strip()
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text() if info.exists() else "")
    name = torch.cuda.get_device_name(device) if device != "cpu" else [*names, "processor"][0]
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return (f"Commit {commit}{'+' if changed else ''}, {time.strftime('%Y-%m-%d')}, {name}, "
            f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f} before, {versions}.")

def with_numbers(readme, numbers):
    """README with a run's numbers in its marks, as <!--greedy/kept-->1.75<!---->. ± asks for intervals."""
    def marked(mark):
        value = numbers[mark[1].removesuffix(" ±")]
        if isinstance(value, (list, Estimate)):
            value = show(Estimate(*value) if mark[1].endswith("±") else value[0])
        return f"<!--{mark[1]}-->{value}<!---->"
    return re.sub("<!--([^>]+)-->[^<]*<!---->", marked, readme)

def named(temperature):
    return f"temperature {temperature:g}" if temperature else "greedy"

# --- 2  Pictures --------------------------------------------------------------------------------------------
BLACK, GREY, GREEN, RED, BLUE, ORANGE = "#111827", "#9ca3af", "#15803d", "#dc2626", "#2563eb", "#ea580c"
try:
    import matplotlib
    from matplotlib.figure import Figure
    matplotlib.rcParams.update({
        "font.size": 10.5, "axes.titlesize": "medium", "figure.titlesize": "medium", "lines.linewidth": 1.8,
        "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True, "axes.spines.top": False,
        "axes.spines.right": False})
except ImportError:
    matplotlib = None                   # then there are none

def panels(height, titles, **kwargs):
    """A figure as wide as README's text, so that it is shown at its own size, and its axes side by side."""
    fig = Figure(figsize=(8.6, height), layout="constrained")
    axes = fig.subplots(1, len(titles), squeeze=False, **kwargs)[0]
    for axis, title in zip(axes, titles):
        axis.set_title(title)
    return fig, axes

def draw_by_column(rows, x, y, styles, scale="linear"):
    """A table's columns against column x, with their intervals, a panel for each temperature. y: the name of
    their axis. styles: colours and lines. scale: "log" makes a power law a straight line."""
    temperatures = dict.fromkeys(row["temperature"] for row in rows)
    fig, axes = panels(3.9, [named(temperature) for temperature in temperatures], sharey=True)
    for axis, temperature in zip(axes, temperatures):
        mine = [row for row in rows if row["temperature"] == temperature]
        for i, (column, (colour, line)) in enumerate(styles.items()):
            heights, halves = zip(*(row[column] for row in mine))
            places = [row[x] * 1.06 ** (i - 1) for row in mine]       # side by side, so that bars can be seen
            axis.errorbar(places, heights, halves, fmt=line, marker="o", markersize=4, elinewidth=1.2,
                          capsize=2, color=colour, label=column)
        axis.set_xscale("log", base=2)
        ticks = [row[x] for row in mine]
        axis.set_xticks(ticks, ticks)
        axis.set_xlabel(x)
    # All panels share it, so this has to wait until all are drawn.
    axes[0].set(ylabel=y, yscale=scale, ylim=(0 if scale == "linear" else None, None))
    if scale == "log":
        axes[0].minorticks_off()
        axes[0].set_yticks([0.1, 0.2, 0.4, 0.8], ["0.1", "0.2", "0.4", "0.8"])
    return fig

# --- 3  Pairs of models, texts and requests -----------------------------------------------------------------
class Pair:
    """Two models as transformers loads them, and `fast`, for sequoia.py: on a CPU copies that are packed."""
    def __init__(self, target, draft, packs=True):
        self.slow = [target.eval(), draft.eval()]
        self.packs = packs and target.device.type == "cpu"
        for model in self.slow:         # all contenders decode to the same length, past any EOS
            model.config.eos_token_id = None
            model.generation_config.eos_token_id = None
            model.generation_config.pad_token_id = 0

    @functools.cached_property
    def fast(self):
        return [sequoia.pack(model) for model in copy.deepcopy(self.slow)] if self.packs else self.slow

def pair_of(args):
    args.tokenizer = transformers.AutoTokenizer.from_pretrained(args.target)
    return Pair(*(sequoia.load(name, dtype=args.dtype).to(args.device) for name in (args.target, args.draft)))

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
        raise ValueError(f"the text has {len(pieces)} pieces of {length} tokens, not {count}: lower --count")
    return [torch.tensor([pieces[i * len(pieces) // count]], device=args.device) for i in range(count)]

def request(prompt, temperature, new_tokens, top_p=1.0):
    how = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": new_tokens, "do_sample": False}
    if temperature:
        how |= {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": top_p}
    return how

# --- 4  trees: what the dynamic program finds (section 3.1; Figures 1 and 6) --------------------------------
# Llama-3-70B-Instruct with the 8B as its draft, on CNN news: the only rates that the paper prints (Figure 5).
PAPER_RATES = PAPER["acceptance_rates_llama3_70b_8b_cnn"]

def trees(args, report):
    rows = []
    for n in tqdm([2**i for i in range(3, 8 if args.quick else 11)], "trees", disable=None):
        tree = optimal_tree(PAPER_RATES, n, min(n, sequoia.MAX_LEVELS))
        found = {"sequoia": tree, "k sequences": best_sequences(n, PAPER_RATES),
                 "binary tree": sequoia.k_ary(2, n.bit_length() - 1), "one sequence": sequoia.chain(n - 1)}
        rows.append({"nodes": n} | {name: expected_tokens(tree, PAPER_RATES) for name, tree in found.items()})
    report.table(f"Expected tokens per step by tree size, on up to {sequoia.MAX_LEVELS} levels", """Computed,
        so exact, at the acceptance rates that the paper prints. With every doubling the optimal tree gains
        about as much again, while sequences stop gaining. k: the best of 1, 2, 4, ... 32.""", rows)
    report.picture("trees", draw_trees)

def draw_trees():
    """A first child stands straight below its parent. A node's area is its chance of acceptance."""
    drawn = [optimal_tree(PAPER_RATES, n) for n in (8, 16, 32, 64)]
    titles = [f"{tree.size} nodes\n{expected_tokens(tree, PAPER_RATES):.2f} per step" for tree in drawn]
    fig, axes = panels(4, titles, sharey=True, width_ratios=[4 + tree.children.count([]) for tree in drawn])
    for axis, tree in zip(axes, drawn):
        columns = {}
        column = 0
        for path in sorted(tree.paths):                 # those below a node after it
            node = path[-1]
            column += tree.ranks[node] > 0
            columns[node] = column
            y = len(path) - 1
            if node:
                axis.plot([columns[path[-2]], column, column], [y - 1, y - 1, y], color=GREY, linewidth=1)
            chance = math.prod(PAPER_RATES[tree.ranks[node]] for node in path[1:])
            axis.scatter(column, y, 2 + 70 * chance, color=GREEN, zorder=3)
        likely = ", ".join(f"{rate:.2f}" for rate in PAPER_RATES[:4])
        label = f"a node: the larger, the likelier it is accepted, at the paper's rates of {likely}, ..."
        axis.scatter([], [], 60, color=GREEN, label=label)
        axis.axis("off")
        axis.set_xlim(-2, column + 2)
    axis.invert_yaxis()
    return fig

def best_sequences(n, rates):
    """Sequences of equal length, of at most n nodes with the root: the best number of them."""
    found = [sequences(k, (n - 1) // k) for k in (1, 2, 4, 8, 16, 32) if k < n]
    return max(found, key=lambda tree: expected_tokens(tree, rates))

# --- 5  predict: the paper's tables from data sheets (section 4.1; Tables 1 to 4) ---------------------------
# Width, width inside the MLP, layers, heads, heads of keys, their width, vocabulary.
SHAPES = PAPER["shapes"] | {"1B": (2048, 5632, 22, 32, 4, 64, 32000), "tiny": (256, 512, 12, 4, 4, 64, 4096),
                            "tinier": (144, 384, 1, 4, 4, 32, 4096)}

class Machine(NamedTuple):
    """What the time of a pass depends on."""
    read: float              # bytes of weights per second, from its memory or, streamed, the host's
    multiply: float          # multiplications per second, in bfloat16
    kernels: float = 0.0     # seconds per layer of small kernels: norms, rotations, masks
    launch: float = 0.0      # seconds per layer in which Python launches kernels

    def seconds(self, model, n):
        """A pass over n tokens: reading and multiplying go on together, and launching beside them."""
        width, inner, layers, heads, key_heads, head, vocabulary = SHAPES[model]
        layer = width * head * 2 * (heads + key_heads) + 3 * width * inner
        weights = layers * layer + width * vocabulary            # all but the embedding
        busy = max(2 * weights / self.read, n * weights / self.multiply)
        return max(busy + self.kernels * layers, self.launch * layers)

# The share that GPUs reach of their data sheets: an A100 80GB PCIe and an L40.
REACHED = 0.8
A100 = Machine(REACHED * 1.935e12, REACHED * 156e12)
# Two numbers are the paper's: the time of its draft's pass beyond reading the weights (0.5 ms, 2 layers), and
# the time that transformers take for a layer of the 7B, launched by Python (24.2 ms, 32 layers).
KERNELS = (0.5e-3 - A100.seconds("JF68M", 1)) / 2
LAUNCH = 24.2e-3 / 32
A100 = A100._replace(kernels=KERNELS)
L40 = Machine(REACHED * 0.864e12, REACHED * 90.5e12, KERNELS)
# By the paper's table: where the target's pass and the draft's run.
PLACES = {"on_device_a100": (A100._replace(launch=LAUNCH), A100),
          "on_device_l40": (L40._replace(launch=LAUNCH), L40),
          "offloading_l40": (L40._replace(read=REACHED * 32e9), L40)}

def predict(args, report):
    rows = []
    for table, (machine, drafting) in PLACES.items():
        for values in PAPER[table]["rows"]:
            row = dict(zip(PAPER[table]["columns"], values))
            size = row["tree_size"]
            depth = row["tree_depth"]
            # The paper counts d draft passes for d levels.
            seconds = machine.seconds(row["target"], size) + depth * drafting.seconds(row["draft"], 1)
            predicted = row["tokens_per_step"] * machine.seconds(row["target"], 1) / seconds
            rows.append({"table": table, "pair": f"{row['target']}, {row['draft']}",
                         "temperature": row["temperature"], "texts": row["dataset"],
                         "tree": f"{size}x{depth}", "tokens/step": row["tokens_per_step"],
                         "speed-up": row["speedup"], "predicted": predicted,
                         "off, %": 100 * (predicted / row["speedup"] - 1)})
    report.table("PREDICTION, nothing here is measured: the paper's tables 1 to 4 from data sheets", f"""A
        pass takes the longer of reading the weights and multiplying, each at {REACHED:.0%} of the data sheet,
        and {1e3 * KERNELS:.2f} ms per layer of small kernels. On chip the target's takes at least
        {1e3 * LAUNCH:.2f} ms per layer, in which Python launches it. (Both overheads are fitted to times that
        the paper gives.) Offloaded, weights cross a link of 32 GB/s. Left out are attention to the text,
        verification, moving caches, and sampling. Trees and tokens per step are the paper's.""", rows)
    report.picture("planner", draw_plan)

def draw_plan():
    """What the planner weighs, for trees of as many levels as the best one."""
    target, draft = PLACES["on_device_a100"]
    t = [target.seconds("Llama2-7B", n) for n in range(1, sequoia.MAX_NODES + 1)]
    c = draft.seconds("JF68M", 1)
    best = sequoia.plan(sequoia.PRIOR, range(1, len(t) + 1), t, c)
    sizes = sorted({best.size, *(2**i for i in range(11))})
    drawn = [optimal_tree(sequoia.PRIOR, n, min(n, best.depth)) for n in sizes]
    tokens = np.array([expected_tokens(tree, sequoia.PRIOR) for tree in drawn])
    seconds = np.array([t[tree.size - 1] + (tree.depth - 1) * c for tree in drawn])
    curves = {"F(n): tokens per step": tokens, "t(n) + (d - 1) c: ms per step": 1e3 * seconds,
              "their quotient: tokens per second": tokens / seconds}
    fig, axes = panels(3.5, curves)
    for axis, y in zip(axes, curves.values()):
        axis.plot(sizes, y, color=GREEN, label=f"trees on up to d = {best.depth} levels")
        axis.plot(best.size, y[sizes.index(best.size)], "o", color=RED, label=f"the plan: n = {best.size}")
        axis.set_xscale("log", base=2)
        axis.set(xlabel="nodes, n", xticks=[1, 4, 16, 64, 256, 1024], ylim=(0, 1.1 * y.max()))
        axis.xaxis.set_major_formatter("{x:.0f}")
    fig.suptitle("Computed by bench.py predict, not measured: t(n) and c of Llama-2-7B and a 68M draft\n"
                 "on an A100, and F(n) for acceptance rates of 0.6 / k², the planner's first guess")
    return fig

# --- 6  Contenders: ways to decode a prompt, timed side by side ---------------------------------------------
# A contender's runs are an array, (prompts, 3): the seconds of a call, the tokens that its steps added, and
# these steps: passes of the target, ours without the prompt's. All write equally many tokens.

def over(mine, other):
    """How many times another's speed."""
    return estimate(truediv, other[:, 0], mine[:, 0])

def tokens_per_step(mine):
    return estimate(truediv, mine[:, 1], mine[:, 2])

class Ours:
    """Decoding by sequoia.py. kept: whether one Decoder has all prompts."""
    def __init__(self, models, temperature, tree, method="sequoia", kept=True, top_p=1.0):
        self.temperature = temperature
        self.kept = kept
        self.top_p = top_p
        self.new = functools.partial(Decoder, *models, tree, method)
        self.decoder = self.new()
        self.warm_up = 8 if tree == "auto" and kept else 1       # texts, as a planner first times some trees

    def __call__(self, prompt, new_tokens):
        steps = []
        start = time.perf_counter()
        if not self.kept:
            self.decoder = self.new()
        self.decoder.on_step = steps.append
        # Reading the text waits for the device.
        how = request(prompt, self.temperature, new_tokens, self.top_p)
        self.decoder.generate(prompt, **how).tolist()
        seconds = time.perf_counter() - start
        self.planner, = self.decoder.planners.values()          # one, as all prompts are sampled alike
        return seconds, sum(len(step.tokens) for step in steps[1:]), len(steps) - 1

    def learn(self, prompts):
        """Decodes prompts, and if the planner is free, as many more texts as it needs for a plan."""
        for prompt in tqdm(prompts, "learning", disable=None):
            self(prompt, 64)
        while self.planner.shape == "auto" and not self.planner.latency()[2]:
            self(prompts[0], 64)

class Theirs:
    """One of transformers' own ways to decode. assistant: the settings of assisted generation."""
    warm_up = 1

    def __init__(self, models, temperature, assistant=None, **kwargs):
        self.target, self.draft = models
        self.temperature = temperature
        self.assistant = assistant or {}
        self.kwargs = kwargs | ({"assistant_model": self.draft} if assistant else {})

    def __call__(self, prompt, new_tokens):
        for name, value in self.assistant.items():
            setattr(self.draft.generation_config, name, value)
        passes = []
        how = request(prompt, self.temperature, new_tokens)
        start = time.perf_counter()
        with self.target.register_forward_hook(lambda *_: passes.append(1)):
            self.target.generate(prompt, **how, **self.kwargs).tolist()
        return time.perf_counter() - start, new_tokens, len(passes)

def interleave(contenders, prompts, args, label):
    """Every contender on every prompt, in turns, with the prompt's seed, after a first text, by name."""
    for contender in contenders.values():
        # At least a whole text, because a GPU sets up each size and length when it meets it first.
        for _ in range(contender.warm_up):
            contender(prompts[0], args.new_tokens)
    names = list(contenders)
    runs = {name: [] for name in names}
    for i, prompt in enumerate(tqdm(prompts, label, disable=None)):
        turn = i % len(names)
        for name in names[turn:] + names[:turn]:
            torch.manual_seed(i)
            runs[name].append(contenders[name](prompt, args.new_tokens))
    return {name: np.array(mine, dtype=float) for name, mine in runs.items()}

# --- 7  speed: side by side with transformers (section 4.1, Table 1) ----------------------------------------
# Who takes part in several settings. Assisted generation: the fastest two of eight on the bundled pair.
ASSISTED = ((5, "constant", 0.4), (2, "heuristic", 0.4))
ASSISTED_NAMES = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
SPECINFER = ((1, 3), (2, 4), (4, 4), (5, 8))                     # how many sequences, and their length

def speed(args, report):
    if args.synthetic:
        return synthetic_speed(args, report)
    pair = pair_of(args)
    prompts = texts(args, args.count, 128)
    best = {value: contest(pair, prompts, value, args, report) for value in args.temperatures}
    report.picture("speed", draw_speed, best)

def verdict(best, which, report):
    """Says in words which setting was the fastest, and whether a draft pays. README quotes the ratios."""
    fastest, second = sorted(best, key=lambda name: best[name][:, 0].sum())[:2]
    pays = over(best["sequoia"], best["no tree"])
    answer = "pays" if pays.value - pays.half > 1 else "may or may not pay"
    if pays.value + pays.half < 1:
        answer = "does not pay: use tree='none'"
    ahead = show(over(best[fastest], best["generate"])), show(over(best[fastest], best[second]))
    report.say(f"{which}: the fastest was `{fastest}`, {ahead[0]} times as fast as `generate` and {ahead[1]} "
               f"times as fast as `{second}`. `sequoia` was {show(pays)} times as fast as no tree. So this "
               f"draft {answer}.")
    for name, runs in best.items():
        report.numbers[f"{which}/{name}"] = over(runs, best["generate"])
        report.numbers[f"{which}/sequoia / {name}"] = over(best["sequoia"], runs)
    seconds, tokens, _ = best["generate"].sum(axis=0)
    report.numbers[f"{which}/pace"] = f"{tokens / seconds:.0f}"

def contenders_for(pair, temperature, args):
    """All who take part, by (name, setting)."""
    found = {("generate", ""): Theirs(pair.slow, temperature)}
    if args.device != "cpu":                             # which transformers compiles
        found["static generate", ""] = Theirs(pair.slow, temperature, cache_implementation="static")
    for setting in ASSISTED:
        words = " ".join(map(str, setting))
        assistant = dict(zip(ASSISTED_NAMES, setting))
        found["assisted", words] = Theirs(pair.slow, temperature, assistant)
        if pair.packs:
            found["assisted, packed", words] = Theirs(pair.fast, temperature, assistant)
    for n in () if args.synthetic else (4, 10):          # a synthetic text is noise, without repetitions
        found["prompt lookup", f"{n} tokens"] = Theirs(pair.slow, temperature, prompt_lookup_num_tokens=n)
    found["one call", args.tree] = Ours(pair.slow, temperature, args.tree, kept=False)
    if pair.packs:
        found["kept", args.tree] = Ours(pair.slow, temperature, args.tree)
    found["no tree", ""] = Ours(pair.fast, temperature, NO_TREE)
    for k, length in SPECINFER:
        shape = sequences(k, length)
        found["sequences", f"{k} of {length}"] = Ours(pair.fast, temperature, shape, "specinfer")
    for method in ("topk", "sequoia") if temperature else ("sequoia",):    # greedy, all are alike
        found[method, args.tree] = Ours(pair.fast, temperature, args.tree, method)
    if args.synthetic:
        # The paper's, which adds 5.08 tokens per step greedy, 7B with 68M on C4.
        found["sequoia, the paper's tree", "128x10"] = Ours(pair.fast, temperature, (128, 10))
    return found

def contest(pair, prompts, temperature, args, report):
    """A table of all contenders on all prompts. Returns the fastest setting's runs, by name."""
    contenders = contenders_for(pair, temperature, args)
    runs = interleave(contenders, prompts, args, named(temperature))
    best = {}
    which = ", ".join(filter(None, (args.synthetic, named(temperature))))
    for (name, setting), mine in runs.items():
        if name not in best or over(mine, best[name]).value > 1:
            best[name] = mine
            report.numbers[f"{which}/{name} setting"] = setting
    rows = []
    for (name, setting), mine in runs.items():
        if setting == "auto":
            tree = contenders[name, setting].planner.tree
            setting = f"auto {tree.size}x{tree.depth}"
        rows.append({"method": name, "setting": setting, "tokens/step": tokens_per_step(mine),
                     "ms/token": 1e3 * mine[:, 0].mean() / args.new_tokens}
                    | {f"x {peer}": over(mine, best[peer])
                       for peer in ("generate", "assisted", "no tree", "sequences")})
    title = f"{which}: {args.count} prompts of 128 tokens, {args.new_tokens} new ones each, {args.dtype}"
    report.table(title, """`generate`, `assisted`, `prompt lookup`: transformers' own. `one call`: a Decoder
        for each prompt. `kept`: one for all. Below it: one for all and, on a CPU, packed models (not if
        streamed). `sequences`: SpecInfer's trees and method. `auto`: the last planned tree. `x`: times the
        speed of that one, in its fastest setting here. Where intervals overlap, who leads is open.""", rows)
    verdict(best, which, report)
    return best

def draw_speed(best):
    fig, axes = panels(4.2, [named(temperature) for temperature in best], sharex=True, sharey=True)
    names = [*reversed(max(best.values(), key=len))][:-1]               # all but generate, from the bottom
    labels = {"sequences": "SpecInfer's sequences, packed", "no tree": "no tree, packed",
              "topk": "topk, packed\n(greedy: as sequoia)", "sequoia": "sequoia, packed"}
    for axis, runs in zip(axes, best.values()):
        for line, name in enumerate(names):
            if name in runs:
                value, half = over(runs[name], runs["generate"])
                colour = GREY if name.startswith(("assisted", "prompt")) else GREEN
                bar = axis.barh(line, value, xerr=half, color=colour, alpha=0.75)
                axis.bar_label(bar, fmt="{:.2f}", padding=3)
        axis.axvline(1, color=BLACK, linewidth=1)
        axis.set_xlabel("times the speed of generate")
    for colour, owner in ((GREY, "transformers' own"), (GREEN, "sequoia.py")):
        axis.plot([], [], "s", color=colour, label=owner)
    axis.set_yticks(range(len(names)), [labels.get(name, name) for name in names])
    axis.margins(x=0.15)
    axis.set_xlim(0, None)
    return fig

# --- 8  speed --synthetic, offload: large models' shapes, the paper's tokens per step, random weights -------
# Both models share a random bigram core, an embedding for each token and a head in the draft's width, and add
# what their own random layers make of it. Every product is done, but the text is noise. The more the core
# weighs, the more the two agree. With these shares, by temperature, found by bisection for the first two
# pairs, a tree of the paper's size and depth adds about as many tokens per step as the paper's, the 7B on C4.
SHARES = {0.0: 10.0, 0.6: 6.8}
SYNTHETIC = {"7b-68m": ("Llama2-7B", "JF68M"), "1b-68m": ("1B", "JF68M"), "tiny": ("tiny", "tinier")}

@torch.no_grad()
def join(models, share):
    """Gives two random models a common core, of this size relative to what the layers add, which grows with
    the root of their number."""
    draft = models[1]
    shape = 2, draft.config.vocab_size, draft.config.hidden_size
    core, head = torch.randn(shape, device=draft.device)
    for model in models:
        embedding = model.get_input_embeddings().weight.data.zero_()
        embedding[:, : core.shape[1]] = share * model.config.num_hidden_layers**0.5 * core
        model.get_output_embeddings().weight.data.zero_()[:, : head.shape[1]] = head
        logits = model(torch.arange(64, device=draft.device)[None]).logits
        # Of deviation 6: distributions about as sharp as a trained model's.
        model.model.norm.weight.data.fill_(6 / logits.float().std().item())

def random_llama(name, args, device):
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "head_dim", "vocab_size")
    config = LlamaConfig(**dict(zip(names, SHAPES[name])), tie_word_embeddings=False,
                         max_position_embeddings=2048, initializer_range=SHAPES[name][0] ** -0.5)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype)).eval()
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data.mul_(3)               # attention to few tokens, as in trained ones
    return model

def synthetic_speed(args, report):
    """The contest at full scale. With the command offload the target is streamed from host memory; on a CPU
    copying it stands in for the link."""
    large, small = SYNTHETIC[args.synthetic]
    streams = args.command == "offload"
    for temperature in args.temperatures:
        if temperature not in SHARES:
            raise ValueError(f"--synthetic knows the temperatures 0 and 0.6 only, got {temperature:g}")
        torch.manual_seed(0)
        target = random_llama(large, args, "cpu" if streams else args.device)
        if streams:
            target = sequoia.offload(target, args.device)
        draft = random_llama(small, args, args.device)
        join([target, draft], SHARES[temperature])
        prompts = torch.randint(target.config.vocab_size, (args.count, 1, 128), device=args.device)
        # A target that streams cannot be packed.
        contest(Pair(target, draft, packs=not streams), prompts, temperature, args, report)

# --- 9  planner: promised and achieved (section 4.1; appendix, Figures 7 and 8) -----------------------------
def planner(args, report):
    pair = pair_of(args)
    prompts = texts(args, 2 * args.count, 128)
    rows = []
    for temperature in args.temperatures:
        auto = Ours(pair.fast, temperature, "auto")
        auto.learn(prompts[1::2])
        sizes, t, c = auto.planner.latency()
        rates = auto.planner.acceptance.rates()
        chosen = sequoia.plan(rates, sizes, t, c)
        shapes = {"no tree": NO_TREE, f"{chosen.size}x{chosen.depth}, planned": chosen}
        shapes |= {f"{n}x{depth}": optimal_tree(rates, n, depth) for n, depth in ((4, 3), (8, 4), (16, 5))}
        shapes |= {f"{n}, any depth": optimal_tree(rates, n) for n in (8, 16, 64)}
        shapes |= {f"sequences, {k} of {length}": sequences(k, length) for k, length in SPECINFER[:3]}
        contenders = {name: Ours(pair.fast, temperature, tree) for name, tree in shapes.items()}
        contenders["goes on planning"] = auto
        runs = interleave(contenders, prompts[::2], args, named(temperature))
        for name, mine in runs.items():
            tree = shapes.get(name, chosen)
            tokens = expected_tokens(tree, rates)
            seconds = np.interp(tree.size, sizes, t) + (tree.depth - 1) * c
            promised = tokens * t[0] / seconds if tree.size <= sizes[-1] else None
            rows.append({"temperature": temperature, "tree": name, "tokens/step, predicted": tokens,
                         "achieved": tokens_per_step(mine), "x no tree, predicted": promised,
                         "x no tree": over(mine, runs["no tree"])})
        times = ", ".join(f"{size}: {1e3 * seconds:.2f}" for size, seconds in zip(sizes, t))
        report.say(f"{named(temperature)}, in ms: t(n), by n, {times}; a draft pass, c, {1e3 * c:.2f}.")
    report.table(f"Predicted and achieved, {args.count} prompts, {args.new_tokens} new tokens each", """A
        plan promises what follows from rates and times of other prompts, so there is no promise beyond the
        sizes timed then. `goes on planning`: promised is the first plan. `any depth`: the tree of a size with
        the most tokens per step, however many draft passes it takes.""", rows)

# --- 10  acceptance: how often children are accepted (Definition 3.2; 3.2 and 4.2.2; Figures 3 and 5) -------
CHILDREN = (1, 2, 4, 8, 16, 32)

@torch.inference_mode()
def acceptance(args, report):
    """The pair's acceptance vector, which `optimal_tree` takes, and how often each method rejects all."""
    models = pair_of(args).slow
    logits = [[model(text).logits[0, -128:] for model in models] for text in texts(args, args.count, 256)]
    rows = []
    for temperature in args.temperatures:
        sampling = sequoia.Sampling(METHODS["sequoia"], [TemperatureLogitsWarper(temperature)])
        chances = []                                    # Sequoia's, for each text: (children,)
        rates = {name: [] for name in METHODS}          # of rejection, for each text: (ks,)
        for target, draft in tqdm(logits, named(temperature), disable=None):
            p = sampling.processed(None, target, False)                             # scores, (128, V)
            q = sampling.processed(None, draft, True)
            for name, method in METHODS.items():
                generator = torch.Generator(args.device).manual_seed(0)
                uniform = functools.partial(sequoia.uniform, generator=generator, device=args.device)
                tokens = method.propose(q, max(CHILDREN), uniform)
                # SpecTr's ratios depend on how many children there are, so each k is verified by itself.
                of_k = [chances_of(method, p, q, tokens[:, :k]).double().mean(dim=0) for k in CHILDREN]
                rates[name].append([1 - chance.sum().item() for chance in of_k])
                if name == "sequoia":
                    chances.append(of_k[-1].tolist())
        vector = np.mean(chances, axis=0)
        rejected = (1 - vector.cumsum()).clip(1e-9)
        slope, _ = np.polyfit(np.log(range(1, 1 + len(vector))), np.log(rejected), 1)
        report.say(f"{named(temperature)}: acceptance_rates = {vector.round(4).tolist()}, b = {-slope:.2f}")
        for i, k in enumerate(CHILDREN):
            row = {"temperature": temperature, "children": k}
            of_k = {name: np.array(rate)[:, i] for name, rate in rates.items()}
            row |= {name: estimate(truediv, rate, np.ones(len(rate))) for name, rate in of_k.items()}
            row |= {f"{name} / sequoia": estimate(truediv, of_k[name], of_k["sequoia"])
                    for name in ("specinfer", "topk")}
            rows.append(row)
    report.table(f"How often all children are rejected, 128 positions in each of {args.count} texts", """Lower
        is better. Exact for the children proposed. `/`: a ratio of rates at the same positions. Above: how
        often Sequoia's first, second, ... child is the accepted one. All of k are rejected about as often as
        k^-b (Definition 3.5), by a line fitted to the logarithms.""", rows)
    report.picture("verification", draw_by_column, rows, "children", "rejection rate", {
        "sequoia": (GREEN, "-"), "specinfer": (ORANGE, "-"), "topk": (BLUE, "--"),
        "naive": (GREY, ":")}, "log")

def chances_of(method, p, q, tokens):
    """The chance of each child to be the accepted one, (rows, k), from scores."""
    draws = method.choose is sequoia.propose_independent
    P = p.softmax(dim=1) if draws else method.target_P(p, None)
    if method.verify is sequoia.verify_by_matching:
        # The target draws its token from P, and a child that repeats an older sibling is never the first.
        repeated = (tokens[:, :, None] == tokens[:, None, :]).tril(-1).any(dim=2)
        return torch.where(repeated, 0, P.gather(1, tokens))
    # In place of random numbers, something that notes the ratios it is compared with, and accepts nothing.
    u = mock.MagicMock(noted=[])
    u.__getitem__.return_value = u
    u.__lt__.side_effect = lambda ratio: u.noted.append(ratio) or ratio < 0
    method.verify(P, q, tokens, u)
    accepted = torch.cat(u.noted, dim=1).nan_to_num(0, posinf=1).clamp(max=1)       # 0 / 0 is NaN
    return accepted * pad((1 - accepted).cumprod(dim=1)[:, :-1], (1, 0), value=1)

# --- 11  scaling, robustness: tokens per step (section 4.2; Figure 4, Table 8) ------------------------------
def compare(contenders, prompts, args, label):
    """Cells of a row: everyone's tokens per step, and the first's as times those of the others."""
    runs = interleave(contenders, prompts, args, label)
    first, *others = runs
    ratios = {f"{first} / {name}": estimate(truediv, runs[name][:, 2], runs[first][:, 2]) for name in others}
    return {name: tokens_per_step(mine) for name, mine in runs.items()} | ratios

def scaling(args, report):
    pair = pair_of(args)
    prompts = texts(args, 2 * args.count, 128)
    rows = []
    for temperature in args.temperatures:
        learner = Ours(pair.fast, temperature, (32, 8))
        learner.learn(prompts[1::2])                    # from every other prompt
        rates = learner.planner.acceptance.rates()
        for size in (8, 32) if args.quick else (8, 32, 128, 512):
            straight = best_sequences(size, rates)
            tree = optimal_tree(rates, size, min(size, 16))
            both = {"sequoia": (tree, "sequoia"), "k sequences": (straight, "sequoia"),
                    "k, specinfer": (straight, "specinfer"), "topk": (tree, "topk")}
            contenders = {name: Ours(pair.fast, temperature, *how) for name, how in both.items()}
            rows.append({"temperature": temperature, "nodes": size, "levels": tree.depth,
                         "k": straight.branching, "expected": expected_tokens(tree, rates)}
                        | compare(contenders, prompts[::2], args, f"{named(temperature)}, {size} nodes"))
            if temperature == 0.6:
                report.numbers["scaling"] = rows[-1]["sequoia / k sequences"]  # at last of the largest size
    report.table(f"Tokens per step, {args.count} prompts, {args.new_tokens} new tokens each", """
        expected, sequoia: the optimal tree. k: of 1, 2, 4, ... 32 by expected tokens. `k, specinfer`: these
        sequences, drawn and verified by SpecInfer's method. topk: the optimal tree by that method. The paper
        has up to 1.33 times the tokens of 16 sequences, at 512 nodes and temperature 0.6.""", rows)
    report.picture("scaling", draw_by_column, rows, "nodes", "tokens per step", {
        "sequoia": (GREEN, "-"), "k sequences": (ORANGE, "-"), "k, specinfer": (BLUE, "--")})

def robustness(args, report):
    pair = pair_of(args)
    prompts = texts(args, args.count, 128)
    tree = optimal_tree(sequoia.PRIOR, 32, 6)
    rows = []
    for temperature, top_p in [(value, 1.0) for value in args.temperatures] + [(1.0, 0.8), (1.0, 0.9)]:
        contenders = {name: Ours(pair.fast, temperature, tree, name, top_p=top_p)
                      for name in ("sequoia", "specinfer", "topk")}
        rows.append({"temperature": temperature, "top-p": top_p}
                    | compare(contenders, prompts, args, f"{named(temperature)}, top-p {top_p:g}"))
    report.table(f"Tokens per step of 32x6, {args.count} prompts, {args.new_tokens} new tokens each",
                 "The same tree in all rows and columns, so only the method and the sampling differ.", rows)

# --- 12  step: pictures of one rejection and of one real step -----------------------------------------------
KINDS = {"the text": BLACK, "accepted": GREEN, "rejected": RED, "not tried": GREY, "the target's own": BLUE}

def draw_algorithm2():
    """The rejection of b in the tables of sequoia.py's section 3."""
    P, Q = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.7, 0.1]])
    b = torch.tensor([1])
    _, R = verify_one_node(P, Q, b, torch.ones(1))
    D = Q.index_fill(0, b, 0)
    pairs = {"The first child:\nP and Q": (P, Q),
             "The second, after b was rejected:\nR, the residual, and D, Q without b": (R, D / D.sum())}
    fig, axes = panels(3.4, pairs, sharey=True)
    for axis, pair in zip(axes, pairs.values()):
        for place, values, colour, label in zip((-0.2, 0.2), pair, (BLUE, ORANGE), ("target", "draft")):
            bars = axis.bar(np.arange(3) + place, values, 0.38, color=colour, label=label)
            axis.bar_label(bars, fmt="{:.2f}")
        axis.bar(range(3), torch.minimum(*pair), 0.78, color=GREEN, label="accepted, the smaller of the two")
        axis.set_xticks(range(3), "abc")
        axis.margins(y=0.1)
    return fig

def step(args, report):
    """A step with a rejection and two accepted children or more, and what both models said of each."""
    report.picture("algorithm2", draw_algorithm2)
    pair = pair_of(args)
    method = METHODS["sequoia"]
    noted = []
    steps = []

    def verify(P, q, tokens, u):
        said = []
        verify_one_node(P[0], q[0].softmax(dim=0), tokens[0], u[0], said.append)
        noted.extend([float(number) for number in re.findall("[RD] ([.0-9]+)", line)] for line in said)
        return method.verify(P, q, tokens, u)

    def on_step(step):
        # Children were tried in this order, up to the accepted one.
        tried = [child for node, last in zip((0, *step.path), (*step.path, math.inf))
                 for child in step.tree.children[node] if child <= last]
        steps.append((step, dict(zip(tried, noted))))
        noted.clear()

    with mock.patch.dict(METHODS, sequoia=method._replace(verify=verify)):
        # A GPU would try all nodes at once, as a graph, in which nothing can be noted.
        decoder = Decoder(*pair.fast, optimal_tree([0.6, 0.2, 0.1], 8, 4), on_step=on_step, cuda_graph=False)
    for i, prompt in enumerate(tqdm(texts(args, args.count, 128), "looking for a step", disable=None)):
        torch.manual_seed(i)
        steps.clear()
        decoder.generate(prompt, **request(prompt, args.temperatures[0], args.new_tokens))
        for step, tried in steps:
            words = [args.tokenizer.decode(max(token, 0)) for token in (*step.node_tokens, step.token)]
            # No rejection that was sure, no acceptance that surprises, and no token that is hard to draw.
            telling = len(tried) > len(step.path) >= 2 and list(tried)[-1] in step.path
            telling &= all(R > (0.3 if child in step.path else 0.02) for child, (R, _) in tried.items())
            drawable = all(re.fullmatch(r" ?[!-~]{1,10}", word) for word in words) and len(words[-1]) > 3
            drawable &= (words[0] + words[-1]).replace(" ", "").isalpha()
            if telling and drawable:
                report.say("A child is accepted with the chance target / draft: their probabilities, in what "
                           "earlier rejections have left of both.")
                return report.picture("step", draw_step, step, tried, words)
    raise ValueError("no step with a rejection and two accepted children was found: raise --count")

def draw_step(step, tried, words):
    """The nodes from top to bottom, those below a node after it; on the right what each of them sees."""
    tree = step.tree
    fig, (axis,) = panels(4.6, [""])
    paths = [*tree.paths, [*tree.paths[step.path[-1]], tree.size]]
    order = sorted(range(len(paths)), key=paths.__getitem__)
    row = {node: line for line, node in enumerate(order)}
    for node, path in enumerate(paths):
        kind = "accepted" if node in step.path else "rejected" if node in tried else "not tried"
        kind = "the text" if node == 0 else "the target's own" if node == tree.size else kind
        colour = KINDS[kind]
        x = 1.5 * len(path)
        y = row[node]
        if node:
            axis.plot([x - 1.5, x - 1.5, x], [row[path[-2]], y, y], color=colour,
                      zorder=1 + (kind != "not tried"))
        word = words[node].replace(" ", "␣")
        axis.text(x, y, f"{node} {word}" if node < tree.size else word, va="center", ha="center",
                  color=colour, family="monospace", zorder=9,
                  bbox={"boxstyle": "round", "fc": "white", "ec": colour})
        if node in tried:
            axis.text(7.6, y, "target {:.2f}  draft {:.2f}".format(*tried[node]), va="center", color=colour)
        # The new token was not in the pass, so it has no row in the mask. All see the text before, here -1.
        for other in range(-1, tree.size) if node < tree.size else ():
            axis.barh(y, 0.5, left=13.1 + 0.6 * other, color=colour if other in (-1, *path) else "#eef0f3")
    for kind, colour in KINDS.items():
        axis.plot([], [], "s", color=colour, label=kind)
    for x, title in ((0.8, "the tree"), (7.6, "its probabilities"), (12.5, "the mask (text, nodes 0 to 7)")):
        axis.text(x, -1, title, va="center", weight="bold")
    axis.set(xlim=(0.5, 18.4), ylim=(len(paths) - 0.4, -1.4))
    axis.axis("off")
    return fig

# --- 13  The command line -----------------------------------------------------------------------------------
# Prompts, new tokens of each, temperatures.
DEFAULTS = {
    "step": (40, 64, [0.6]), "speed": (32, 128, [0.0, 0.6]), "speed --synthetic": (2, 64, [0.0]),
    "offload": (2, 32, [0.0]), "planner": (24, 64, [0.0, 0.6]), "acceptance": (60, 0, [0.2, 0.6, 1.0]),
    "scaling": (14, 32, [0.2, 0.6, 1.0]), "robustness": (20, 48, [0.2, 0.4, 0.6, 0.8, 1.0])}
COMMANDS = {one.__name__: one for one in (trees, predict, step, speed, planner, acceptance, scaling,
                                          robustness)} | {"offload": synthetic_speed}

def arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("command", choices=[*COMMANDS, "all"])
    add("--target", default=str(sequoia.TINY / "target"), help="a folder or hub name (the bundled target)")
    add("--draft", default=str(sequoia.TINY / "draft"), help="the draft's (the bundled one)")
    add("--prompts", metavar="FILE", help="a text to cut prompts from (held-out standard library)")
    add("--quick", action="store_true", help="fewer and shorter runs")
    add("--device", default=sequoia.DEVICE, help="(a GPU, if any)")
    add("--dtype", default=sequoia.DTYPE, choices=("float32", "bfloat16", "float16"),
        help="(bfloat16 where the processor has it)")
    add("--temperatures", type=float, nargs="+", metavar="T", help="(0 0.6; others for some commands)")
    add("--count", type=int, metavar="N", help="prompts (40; others for some commands)")
    add("--new-tokens", type=int, metavar="N", help="for each prompt (128; others for some commands)")
    add("--tree", default="auto", help="speed: this file's tree, as for sequoia.py (auto)")
    add("--synthetic", choices=SYNTHETIC, help="speed, offload: a random pair of these shapes")
    args = parser.parse_args(argv)
    if args.device != "cpu" and args.command == "speed":        # where there is time for more
        DEFAULTS["speed --synthetic"] = 8, 128, [0.0, 0.6]
    if any(given is not None and given < least for given, least in ((args.count, 2), (args.new_tokens, 1))):
        parser.error("--count must be at least 2, because one prompt has no interval, and --new-tokens 1")
    name = "speed --synthetic" if args.command == "speed" and args.synthetic else args.command
    defaults = DEFAULTS.get(name, (0, 0, []))
    if args.quick and name != "step":
        defaults = 2, 24, defaults[2]
    for option, value in zip(("count", "new_tokens", "temperatures"), defaults):
        setattr(args, option, getattr(args, option) or value)
    if args.command == "offload":
        args.synthetic = args.synthetic or ("tiny" if args.quick else "1b-68m")
    if args.command in ("acceptance", "scaling", "robustness") and 0 in args.temperatures:
        parser.error(f"{args.command} needs --temperatures above 0: greedy, all methods are the same")
    return args

def main(argv):
    args = arguments(argv)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    is_full = args.command == "all" and not args.quick
    folder = HERE / "figures" / ("" if is_full else "quick")
    jobs = [[args.command]]
    if args.command == "all":
        jobs = [[name] for name in COMMANDS]
        jobs.insert(4, ["speed", "--synthetic", "tiny" if args.quick else "1b-68m"])
    options = [word for word in argv if word != args.command]
    try:
        report = Report(folder)
        origin = provenance(args.device)
        report.say(f"# Results\n\nWritten by `python bench.py {' '.join(argv)}`. {origin} "
                   f"± is half a 95% interval. Compare within a table, not across.")
        for job in jobs:
            report.say(f"## `python bench.py {' '.join(job + options)}`")
            mine = arguments(job + options)
            start = time.perf_counter()
            COMMANDS[mine.command](mine, report)
            report.say(f"This took {(time.perf_counter() - start) / 60:.1f} minutes.")
        if args.command == "all":
            numbers = report.numbers | {"run": origin.partition(", load")[0]}
            (folder / "numbers.json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
            readme = HERE / "README.md"
            text = with_numbers(readme.read_text(encoding="utf-8"), numbers)
            if is_full:                 # a quick run only finds out whether a number is missing
                readme.write_text(text, encoding="utf-8")
    except (ValueError, OSError, ImportError) as error:
        print(f"bench.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
