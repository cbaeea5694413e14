"""Measures what README and figures/results.md say. Each question has one command:

    python bench.py trees           # how many tokens per step the best trees promise, by size
    python bench.py predict         # the paper's speed-ups, computed from data sheets
    python bench.py step            # a picture of one real step: tree, mask, and what was accepted
    python bench.py speed           # side by side with transformers, with --target and --draft any pair
    python bench.py speed --synthetic 1b-68m       # the same with random models of these shapes
    python bench.py offload         # the same with a target that is streamed from host memory
    python bench.py planner         # what the planner promised, and what was achieved
    python bench.py acceptance      # how often the first, second, ... child is accepted, by temperature
    python bench.py verification    # how often the methods reject all children
    python bench.py scaling         # tokens per step by tree size, against separate sequences
    python bench.py robustness      # tokens per step of one tree, by temperature and top-p
    python bench.py all             # everything, into figures/results.md, the pictures beside it, and README

A section alone prints its tables. With --quick it takes seconds, decides nothing and writes figures/quick.
All methods take turns on the same prompts, seeds and weights. 1.33 ± 0.05 is a ratio of sums over prompts
and half its 95% interval, which is paired: it tells how much other prompts would move the ratio."""
import argparse, copy, functools, importlib.util, json, math, os, re, subprocess, sys, time
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
    """A value and half its 95% interval, NaN where nothing tells it."""
    value: float
    half: float = math.nan

def estimate(function, *columns):
    """A function of the sums of columns, (prompts, ...) each, with its interval. By the jackknife: how far
    the values without one prompt scatter tells how far other prompts would move it."""
    sums = [column.sum(axis=0) for column in columns]
    freedom = len(columns[0]) - 1
    if freedom < 1:
        return Estimate(float(function(*sums)))
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
    """The tables and pictures of a run: printed, and if there is a folder, also written there."""
    def __init__(self, folder):
        self.folder = folder
        self.text = ""
        self.numbers = {}               # what README quotes, by name
        self.draws = folder is not None and importlib.util.find_spec("matplotlib") is not None
        if folder and not self.draws:
            print("bench.py: no pictures, as matplotlib is missing: pip install matplotlib", file=sys.stderr)

    def say(self, text):
        print(f"{text}\n", flush=True)
        self.text += f"{text}\n\n"
        if self.folder:
            # After every table, so that a run that is broken off leaves what it has found.
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "results.md").write_text(self.text.rstrip() + "\n", encoding="utf-8")

    def table(self, title, lesson, rows):
        """Rows, dictionaries with the same keys, as a Markdown table below its title and its lesson."""
        cells = [list(rows[0])]
        for row in rows:
            cells.append([show(value) for value in row.values()])
        widths = [max(map(len, column)) for column in zip(*cells)]
        cells.insert(1, ["-" * (width - 1) + ":" for width in widths])
        cells[1][0] = "-" * widths[0]
        lines = [f"**{title}**\n\n{' '.join(lesson.split())}\n"]
        for first, *others in cells:
            padded = [cell.rjust(width) for cell, width in zip(others, widths[1:])]
            lines.append(f"| {' | '.join([first.ljust(widths[0]), *padded])} |")
        self.say("\n".join(lines))

    def picture(self, name, fig, axis, ncols=6):
        """Saves a figure, with an axis's legend below it."""
        handles = axis.get_legend_handles_labels()
        fig.legend(*handles, loc="outside lower center", ncols=ncols, frameon=False)
        fig.savefig(self.folder / f"{name}.png", dpi=200)
        pyplot().close(fig)
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
    return f"temperature {float(temperature):g}" if float(temperature) else "greedy"

# --- 2  Pictures, if matplotlib is there --------------------------------------------------------------------
BLACK, GREY, GREEN, RED, BLUE = "#111827", "#9ca3af", "#15803d", "#dc2626", "#2563eb"
ORANGE, TEAL, PINK = "#ea580c", "#0891b2", "#be185d"

@functools.cache
def pyplot():
    import matplotlib
    matplotlib.use("Agg")
    matplotlib.rcParams.update({
        "font.size": 11, "axes.titlesize": 11, "legend.fontsize": 10.5, "xtick.labelsize": 10,
        "ytick.labelsize": 10, "lines.linewidth": 1.8, "axes.grid": True, "grid.alpha": 0.3,
        "axes.spines.top": False, "axes.spines.right": False})
    from matplotlib import pyplot
    return pyplot

def panels(rows, height):
    """A figure as wide as README's text, so that it is shown at its own size, and for each temperature of a
    table its axis and rows."""
    groups = {}
    for row in rows:
        groups.setdefault(row.get("temperature"), []).append(row)
    subplots = functools.partial(pyplot().subplots, squeeze=False, layout="constrained", sharey=True)
    fig, axes = subplots(1, len(groups), figsize=(8.6, height))
    for axis, temperature in zip(axes[0], groups):
        axis.set_title("" if temperature is None else named(temperature))
    return fig, list(zip(axes[0], groups.values()))

def draw_by_column(report, name, rows, x, y, styles, scale="linear"):
    """A table's columns against column x, with their intervals. y: their axis. styles: colours and lines."""
    fig, found = panels(rows, 3.9)
    for axis, mine in found:
        for i, (column, (colour, line)) in enumerate(styles.items()):
            heights, halves = zip(*(row[column] for row in mine))
            has_bars = np.isfinite(halves).all()
            # Side by side, as bars at one place would hide each other.
            places = [row[x] * (1.06 ** (i - 1) if has_bars else 1) for row in mine]
            axis.errorbar(places, heights, yerr=halves if has_bars else None, fmt=line, marker="o",
                          markersize=4, elinewidth=1.2, capsize=2, color=colour, label=column)
        axis.set_xscale("log", base=2)
        ticks = [row[x] for row in mine][:: 1 + len(mine) // 7]
        axis.set_xticks(ticks, ticks)
        axis.set_xlabel(x)
    # All panels share it, so this has to wait until all are drawn.
    found[0][0].set(ylabel=y, yscale=scale, ylim=(0 if scale == "linear" else None, None))
    report.picture(name, fig, axis)

# --- 3  Pairs of models, texts and requests -----------------------------------------------------------------
class Pair:
    """Two models as transformers loads them, and `fast`, for sequoia.py: on a CPU copies that are packed."""
    def __init__(self, target, draft, packs=True):
        self.slow = [target.eval(), draft.eval()]
        self.packs = packs and target.device.type == "cpu"
        # All contenders decode to the same length, past any EOS.
        for model in self.slow:
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
        of_sequences = {k: expected_tokens(rival, PAPER_RATES) for k, rival in sequences_within(n).items()}
        binary = sequoia.k_ary(2, n.bit_length() - 1)
        found = {"sequoia": expected_tokens(tree, PAPER_RATES), "k sequences": max(of_sequences.values()),
                 "binary tree": expected_tokens(binary, PAPER_RATES), "one sequence": of_sequences[1]}
        rows.append({"nodes": n} | {name: Estimate(value) for name, value in found.items()})
    report.table(f"Expected tokens per step by tree size, on up to {sequoia.MAX_LEVELS} levels", """Computed,
        so exact, at the acceptance rates that the paper prints. With every doubling the optimal tree gains
        about as much again, while sequences stop gaining. k: the best of 1, 2, 4, ... 32.""", rows)
    if report.draws:
        draw_by_column(report, "trees", rows, "nodes", "tokens per step", {
            "sequoia": (GREEN, "-"), "k sequences": (ORANGE, "-"), "binary tree": (TEAL, "-"),
            "one sequence": (PINK, "--")})

def sequences_within(n):
    """k sequences of equal length, of at most n nodes with the root, by k."""
    return {k: sequences(k, (n - 1) // k) for k in (1, 2, 4, 8, 16, 32) if k < n}

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
                         "temperature": f"{row['temperature']:g}", "texts": row["dataset"],
                         "tree": f"{size}x{depth}", "tokens/step": row["tokens_per_step"],
                         "speed-up": row["speedup"], "predicted": predicted,
                         "off, %": 100 * (predicted / row["speedup"] - 1)})
    report.table("PREDICTION, nothing here is measured: the paper's tables 1 to 4 from data sheets", f"""A
        pass takes the longer of reading the weights and multiplying, each at {REACHED:.0%} of the data sheet,
        and {1e3 * KERNELS:.2f} ms per layer of small kernels. On chip the target's takes at least
        {1e3 * LAUNCH:.2f} ms per layer, in which Python launches it. (Both overheads are fitted to times that
        the paper gives.) Offloaded, weights cross a link of 32 GB/s. Left out are attention to the text,
        verification, moving caches, and sampling. Trees and tokens per step are the paper's.""", rows)

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
    def __init__(self, models, temperature, tree, method="sequoia", kept=True):
        self.temperature = temperature
        self.kept = kept
        self.top_p = 1.0
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
        """Decodes prompts, and returns what was timed: sizes, t, c."""
        with mock.patch.object(sequoia, "plan", wraps=sequoia.plan) as plan:
            for prompt in tqdm(prompts, "learning", disable=None):
                self(prompt, 64)
            while self.planner.shape == "auto" and not plan.called:
                self(prompts[0], 64)
        return self.planner.latency() if plan.called else None

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
    best = {}
    for temperature in args.temperatures:
        best[temperature] = contest(pair, prompts, temperature, args, report)
    everyone = max(best.values(), key=len)
    rows = []
    pairs = [(name, "generate") for name in everyone] + [("sequoia", name) for name in everyone]
    for mine, other in dict.fromkeys([*pairs, ("one call", "assisted"), ("kept", "assisted")]):
        row = {"speed": f"{mine} / {other}"}
        for temperature, found in best.items():
            known = mine in found and other in found
            row[named(temperature)] = over(found[mine], found[other]) if known else None
        if mine != other:
            rows.append(row)
    report.table("What the speed is made of", """The fastest setting of each. `no tree / generate` is what
        packing and tracing give, `sequoia / no tree` what the tree gives; they multiply to `sequoia /
        generate`.""", rows)
    if report.draws:
        draw_speed(report, best, list(everyone)[1:])

def verdict(best, which, report):
    """Says in words which setting was the fastest, and whether a draft pays. README quotes the ratios."""
    fastest = min(best, key=lambda name: best[name][:, 0].sum())
    pays = over(best["sequoia"], best["no tree"])
    answer = "pays" if pays.value - pays.half > 1 else "may or may not pay"
    if pays.value + pays.half < 1:
        answer = "does not pay: use tree='none'"
    ahead = show(over(best[fastest], best["generate"])), show(over(best[fastest], best["sequoia"]))
    report.say(f"{which}: the fastest was `{fastest}`, {ahead[0]} times as fast as `generate` and {ahead[1]} "
               f"times as fast as `sequoia`, which is {show(pays)} times as fast as no tree. So this draft "
               f"{answer}.")
    for name, runs in best.items():
        report.numbers[f"{which}/{name}"] = over(runs, best["generate"])
        report.numbers[f"{which}/sequoia / {name}"] = over(best["sequoia"], runs)
    generate = best["generate"]
    report.numbers[f"{which}/pace"] = f"{generate[:, 1].sum() / generate[:, 0].sum():.0f}"

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
        row = {"temperature": f"{temperature:g}", "method": name, "setting": setting,
               "tokens/step": tokens_per_step(mine), "ms/token": 1e3 * mine[:, 0].mean() / args.new_tokens}
        for peer in ("generate", "assisted", "no tree", "sequences"):
            row[f"x {peer}"] = over(mine, best[peer])
        rows.append(row)
    report.table(f"{named(temperature)}: {len(prompts)} prompts of {prompts[0].shape[1]} tokens, "
                 f"{args.new_tokens} new ones each, {args.dtype}", """`generate`, `assisted`, `prompt lookup`:
        transformers' own. `one call`: a Decoder for each prompt. `kept`: one for all. Below it: one for all
        and, on a CPU, packed models (not if streamed). `sequences`: SpecInfer's trees and method. `auto`: the
        last planned tree. `x`: times the speed of that one, in its fastest setting here, which the same runs
        choose, in its favour. Where intervals overlap, who leads is open.""", rows)
    verdict(best, which, report)
    return best

def draw_speed(report, best, names):
    fig, found = panels([{"temperature": temperature} for temperature in best], 4.2)
    widest = max(sum(over(mine, runs["generate"])) for runs in best.values() for mine in runs.values())
    packed = "no tree", "sequences", "topk", "sequoia"
    for (axis, _), runs in zip(found, best.values()):
        for line, name in enumerate(reversed(names)):
            if name in runs:
                value, half = over(runs[name], runs["generate"])
                colour = GREY if name.startswith(("assisted", "prompt")) else GREEN
                axis.barh(line, value, color=colour, alpha=0.75, xerr=half, error_kw={"lw": 1.2})
                axis.text(0.05, line, f"{value:.2f}", va="center", fontsize=10)
        axis.axvline(1, color=BLACK, linewidth=1)
        axis.set(xlabel="times the speed of generate", xlim=(0, 1.05 * widest))
        axis.grid(axis="y", visible=False)
    labels = [f"{name}, packed" if name in packed else name for name in reversed(names)]
    axis.set_yticks(range(len(names)), labels)
    for colour, owner in ((GREY, "transformers' own"), (GREEN, "sequoia.py")):
        axis.plot([], [], "s", color=colour, label=owner)
    report.picture("speed", fig, axis)

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
        models = [target, random_llama(small, args, args.device)]
        join(models, SHARES[temperature])
        prompts = torch.randint(target.config.vocab_size, (args.count, 1, 128), device=args.device)
        # A target that streams cannot be packed.
        contest(Pair(*models, packs=not streams), prompts, temperature, args, report)

# --- 9  planner: promised and achieved (section 4.1; appendix, Figures 7 and 8) -----------------------------
def planner(args, report):
    """The planned tree and others, predicted and measured, and the price of a useless draft."""
    pair = pair_of(args)
    prompts = texts(args, 2 * args.count, 128)
    torch.manual_seed(0)
    useless = AutoModelForCausalLM.from_config(pair.slow[1].config, dtype=pair.slow[1].dtype)
    useless = sequoia.pack(useless.to(args.device).eval())
    rows = []
    for temperature in args.temperatures:
        auto = Ours(pair.fast, temperature, "auto")
        sizes, t, c = auto.learn(prompts[1::2])
        rates = auto.planner.acceptance.rates()
        shapes = trees_around(sequoia.plan(rates, sizes, t, c), rates)
        contenders = {name: Ours(pair.fast, temperature, tree) for name, tree in shapes.items()}
        contenders["goes on planning"] = auto
        contenders["a useless draft"] = Ours([pair.fast[0], useless], temperature, "auto")
        runs = interleave(contenders, prompts[::2], args, named(temperature))
        for name in contenders:
            tokens = promised = None
            if name in shapes:
                tree = shapes[name]
                tokens = expected_tokens(tree, rates)
                seconds = np.interp(tree.size, sizes, t) + (tree.depth - 1) * c
                promised = tokens * t[0] / seconds if tree.size <= sizes[-1] else None
            rows.append({"temperature": f"{temperature:g}", "tree": name, "tokens/step, predicted": tokens,
                         "achieved": tokens_per_step(runs[name]), "x no tree, predicted": promised,
                         "x no tree": over(runs[name], runs["no tree"])})
        times = ", ".join(f"{size}: {1e3 * seconds:.2f}" for size, seconds in zip(sizes, t))
        report.say(f"{named(temperature)}, in ms: t(n), by n, {times}; a draft pass, c, {1e3 * c:.2f}.")
    report.table(f"Predicted and achieved, {args.count} prompts, {args.new_tokens} new tokens each", """A
        plan promises what follows from rates and times of other prompts, so there is no
        promise beyond the sizes timed then. Where intervals overlap, who leads is open. `any depth`: the tree
        of a size with the most tokens per step, however many draft passes it takes.""", rows)

def trees_around(chosen, rates):
    """By name: no tree, the planned one, four beside it, three of sequences, and three of any depth."""
    size, depth = (chosen.size, chosen.depth) if chosen.size > 1 else (8, 4)
    shapes = {"no tree": NO_TREE, f"{chosen.size}x{chosen.depth}, planned": chosen}
    for n, d in ((size // 2, depth - 1), (size, depth - 1), (size, depth + 1), (2 * size, depth)):
        if 2 <= d <= n <= 1 + len(rates) * (d - 1):
            shapes[f"{n}x{d}"] = optimal_tree(rates, n, d)
    shapes |= {f"sequences, {k} of {length}": sequences(k, length) for k, length in SPECINFER[:3]}
    return shapes | {f"{n}, any depth": optimal_tree(rates, n) for n in (8, 16, 64)}

# --- 10  acceptance: how often each child is the accepted one (Definition 3.2; Figures 3 and 5) -------------
@torch.inference_mode()
def acceptance(args, report):
    """The pair's acceptance vector, which `optimal_tree` takes."""
    vectors = {}
    for temperature, p, q in both_scores(pair_of(args), args):
        tokens = propose(METHODS["sequoia"], q, max(CHILDREN))
        chances = chances_of(METHODS["sequoia"], p, q, tokens).double().mean(dim=0).numpy()    # (children,)
        vectors.setdefault(temperature, []).append(chances)
    ranks = np.arange(1, max(CHILDREN) + 1)
    rows = [{"child": rank} for rank in ranks.tolist()]
    slopes = []
    for temperature, mine in vectors.items():
        for row, column in zip(rows, np.transpose(mine)):
            row[named(temperature)] = estimate(lambda total: total / args.count, column)
        rejected = (1 - np.mean(mine, axis=0).cumsum()).clip(1e-9)
        slope, _ = np.polyfit(np.log(ranks), np.log(rejected), 1)
        slopes.append(f"{-slope:.2f} ({named(temperature)})")
    report.table(f"How often each child is the accepted one, 128 positions each of {args.count} texts", f"""
        Exact for the children proposed. The chance that all of k children are rejected falls about like k^-b
        (Definition 3.5). Lines fitted to the logarithms give b = {", ".join(slopes)}.""", rows)

def both_scores(pair, args):
    """Yields a temperature, and both models' scores after each of a text's last tokens, (128, V)."""
    logits = [[model(text).logits[0, -128:] for model in pair.slow] for text in texts(args, args.count, 256)]
    for temperature in args.temperatures:
        sampling = sequoia.Sampling(METHODS["sequoia"], [TemperatureLogitsWarper(temperature)])
        for target, draft in tqdm(logits, named(temperature), disable=None):
            yield temperature, sampling.processed(None, target, False), sampling.processed(None, draft, True)

def propose(method, q, k):
    generator = torch.Generator(q.device).manual_seed(0)
    return method.propose(q, k, functools.partial(sequoia.uniform, generator=generator, device=q.device))

# --- 11  verification: how often all children are rejected (sections 3.2 and 4.2.2, Figure 3) ---------------
CHILDREN = (1, 2, 4, 8, 16, 32)

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

@torch.inference_mode()
def verification(args, report):
    found = {}                          # by temperature and method: (texts, ks)
    for temperature, p, q in both_scores(pair_of(args), args):
        for name, method in METHODS.items():
            tokens = propose(method, q, max(CHILDREN))                                      # (rows, k)
            # SpecTr's ratios depend on how many children there are, so each k is verified by itself.
            accepted = [chances_of(method, p, q, tokens[:, :k]).sum(dim=1).mean().item() for k in CHILDREN]
            found.setdefault(temperature, {}).setdefault(name, []).append(1 - np.array(accepted))
    rows = []
    for temperature, rates in found.items():
        for i, k in enumerate(CHILDREN):
            row = {"temperature": f"{temperature:g}", "children": k}
            for name, mine in rates.items():
                row[name] = estimate(lambda total: total / args.count, np.array(mine)[:, i])
            for name in ("specinfer", "topk"):
                row[f"{name} / sequoia"] = estimate(truediv, np.array(rates[name])[:, i],
                                                    np.array(rates["sequoia"])[:, i])
            rows.append(row)
    report.table(f"How often all children are rejected, 128 positions in each of {args.count} texts", """Lower
        is better. Exact for the children proposed. `/`: a ratio of rates at the same positions.""", rows)
    if report.draws:
        draw_by_column(report, "verification", rows, "children", "rejection rate", {
            "sequoia": (GREEN, "-"), "specinfer": (ORANGE, "-"), "topk": (BLUE, "--"), "naive": (GREY, ":")},
            scale="log")                # where a power law is a straight line

# --- 12  scaling: tokens per step by tree size (section 4.2.1, Figure 4) ------------------------------------
def scaling(args, report):
    pair = pair_of(args)
    prompts = texts(args, 2 * args.count, 128)
    rows = []
    for temperature in args.temperatures:
        learner = Ours(pair.fast, temperature, (32, 8))
        learner.learn(prompts[1::2])                    # from every other prompt
        rates = learner.planner.acceptance.rates()
        for size in (8, 32) if args.quick else (8, 32, 128, 512):
            shapes = sequences_within(size)
            k = max(shapes, key=lambda k: expected_tokens(shapes[k], rates))
            tree = optimal_tree(rates, size, min(size, 16))
            both = {"sequoia": (tree, "sequoia"), "k sequences": (shapes[k], "sequoia"),
                    "k, specinfer": (shapes[k], "specinfer"), "topk": (tree, "topk")}
            contenders = {name: Ours(pair.fast, temperature, *how) for name, how in both.items()}
            runs = interleave(contenders, prompts[::2], args, f"{named(temperature)}, {size} nodes")
            row = {"temperature": f"{temperature:g}", "nodes": size, "levels": tree.depth, "k": k,
                   "expected": expected_tokens(tree, rates)}
            row |= {name: tokens_per_step(mine) for name, mine in runs.items()}
            for name in list(both)[1:]:
                row[f"sequoia / {name}"] = estimate(truediv, runs[name][:, 2], runs["sequoia"][:, 2])
            rows.append(row)
            if row["temperature"] == "0.6":
                report.numbers["scaling"] = row["sequoia / k sequences"]       # at last of the largest size
    report.table(f"Tokens per step, {args.count} prompts, {args.new_tokens} new tokens each", """
        expected, sequoia: the optimal tree. k: of 1, 2, 4, ... 32 by expected tokens. `k, specinfer`: these
        sequences, drawn and verified by SpecInfer's method. topk: the optimal tree by that method. The paper
        has up to 1.33 times the tokens of 16 sequences, at 512 nodes and temperature 0.6.""", rows)
    if report.draws:
        draw_by_column(report, "scaling", rows, "nodes", "tokens per step", {
            "sequoia": (GREEN, "-"), "k sequences": (ORANGE, "-"), "k, specinfer": (PINK, "--")})

# --- 13  robustness: one tree by temperature and top-p (section 4.2.2, Figure 4; Table 8) -------------------
def robustness(args, report):
    """Tokens per step of the same 32 nodes, by three methods."""
    pair = pair_of(args)
    prompts = texts(args, args.count, 128)
    tree = optimal_tree(sequoia.PRIOR, 32, 6)
    rows = []
    settings = [(temperature, 1.0) for temperature in args.temperatures] + [(1.0, 0.8), (1.0, 0.9)]
    methods = "sequoia", "specinfer", "topk"
    for temperature, top_p in settings:
        contenders = {name: Ours(pair.fast, temperature, tree, name) for name in methods}
        for contender in contenders.values():
            contender.top_p = top_p
        runs = interleave(contenders, prompts, args, f"{named(temperature)}, top-p {top_p:g}")
        row = {"temperature": f"{temperature:g}", "top-p": f"{top_p:g}"}
        row |= {name: tokens_per_step(mine) for name, mine in runs.items()}
        for name in methods[1:]:
            row[f"sequoia / {name}"] = estimate(truediv, runs[name][:, 2], runs["sequoia"][:, 2])
        rows.append(row)
    report.table(f"Tokens per step of 32x6, {args.count} prompts, {args.new_tokens} new tokens each",
                 "The same tree in all rows and columns, so only the method and the sampling differ.", rows)

# --- 14  step: a picture of one real step -------------------------------------------------------------------
KINDS = {"the text": BLACK, "accepted": GREEN, "rejected": RED, "not tried": GREY, "the target's own": BLUE}

def step(args, report):
    """A step with a rejection and two accepted children or more, and what both models said of each."""
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
        # They were tried in this order, up to the accepted one.
        siblings = [step.tree.children[node] for node in (0, *step.path)]
        tried = [child for children, end in zip(siblings, [*step.path, math.inf])
                 for child in children if child <= end]
        steps.append((step, dict(zip(tried, noted))))
        noted.clear()

    with mock.patch.dict(METHODS, sequoia=method._replace(verify=verify)):
        # A GPU would try all nodes at once, as a graph, in which nothing can be noted.
        decoder = Decoder(*pair.fast, optimal_tree([0.6, 0.2, 0.1], 8, 4), on_step=on_step, cuda_graph=False)
    for i, prompt in enumerate(tqdm(texts(args, args.count, 128), "looking for a step", disable=None)):
        torch.manual_seed(i)
        steps.clear()
        text = decoder.generate(prompt, **request(prompt, args.temperatures[0], args.new_tokens))[0]
        length = prompt.shape[1]
        for step, tried in steps:
            words = [args.tokenizer.decode(max(token, 0)) for token in (*step.node_tokens, step.token)]
            # No rejection that was sure, no acceptance that surprises, and no token that is hard to draw.
            telling = len(tried) > len(step.path) >= 2 and list(tried)[-1] in step.path
            drawable = all(re.fullmatch(r" ?[!-~]{1,10}", word) for word in words) and len(words[-1]) > 3
            drawable &= (words[0] + words[-1]).replace(" ", "").isalpha()
            telling &= all(R > (0.3 if child in step.path else 0.02) for child, (R, _) in tried.items())
            if telling and drawable:
                return show_step(report, step, tried, words, args.tokenizer.decode(text[:length]))
            length += len(step.tokens)
    raise ValueError("no step with a rejection and two accepted children was found: raise --count")

def show_step(report, step, tried, words, before):
    """The nodes from top to bottom, those below a node after it; on the right what each of them sees."""
    tree = step.tree
    added = "".join(words[node] for node in (*step.path, -1))
    report.say(f"One step after `{before[-40:]!r}` adds `{added!r}`. A child is accepted with the chance "
               f"target / draft: their probabilities, in what earlier rejections have left of both.")
    if not report.draws:
        return
    fig, ((axis, _),) = panels([{}], 4.6)
    paths = [*tree.paths, [*tree.paths[step.path[-1]], tree.size]]
    order = sorted(range(len(paths)), key=paths.__getitem__)
    row = {node: line for line, node in enumerate(order)}
    columns = [*range(tree.size)]                       # in level order, as everywhere in the file
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
        # The new token was not in the pass, so it has no row in the mask. All see the text before.
        for other in ["text", *columns] if node < tree.size else ():
            x = 13.5 + 0.6 * columns.index(other) if other in columns else 12.5
            shade = colour if other in ("text", *path) else "#eef0f3"
            axis.add_patch(pyplot().Rectangle((x, y - 0.4), 0.5 + 0.4 * (other == "text"), 0.8, color=shade))
    for kind, colour in KINDS.items():
        axis.plot([], [], "s", color=colour, label=kind)
    for x, title in ((0.8, "the tree"), (7.6, "its probabilities"), (12.5, "the mask (text, nodes 0 to 7)")):
        axis.text(x, -1, title, va="center", weight="bold")
    axis.set(xlim=(0.5, 18.4), ylim=(len(paths) - 0.4, -1.4))
    axis.axis("off")
    report.picture("step", fig, axis)

# --- 15  The command line -----------------------------------------------------------------------------------
# Prompts, new tokens of each, temperatures.
DEFAULTS = {
    "step": (40, 64, [0.6]), "speed": (36, 128, [0.0, 0.6]), "speed --synthetic": (2, 64, [0.0]),
    "offload": (2, 32, [0.0]), "planner": (24, 64, [0.0, 0.6]), "acceptance": (60, 0, [0.2, 0.6, 1.0]),
    "verification": (60, 0, [0.2, 0.6, 1.0]), "scaling": (14, 32, [0.2, 0.6, 1.0]),
    "robustness": (20, 48, [0.2, 0.4, 0.6, 0.8, 1.0])}
COMMANDS = {one.__name__: one for one in (trees, predict, step, speed, planner, acceptance, verification,
                                          scaling, robustness)}
COMMANDS["offload"] = synthetic_speed

def arguments(argv):
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("command", choices=[*COMMANDS, "all"])
    add("--target", default=str(sequoia.TINY / "target"), help="a folder or hub name (the bundled target)")
    add("--draft", default=str(sequoia.TINY / "draft"), help="the draft's (the bundled one)")
    add("--prompts", metavar="FILE", help="a text to cut prompts from (held-out standard library)")
    add("--quick", action="store_true", help="fewer and shorter runs, written to figures/quick")
    add("--device", default=sequoia.DEVICE, help="(a GPU, if any)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="(bfloat16 where the processor has it)")
    add("--temperatures", type=float, nargs="+", metavar="T", help="(0 0.6; others for some commands)")
    add("--count", type=int, metavar="N", help="prompts (40; others for some commands)")
    add("--new-tokens", type=int, metavar="N", help="for each prompt (128; others for some commands)")
    add("--tree", default="auto", help="speed: this file's tree, as for sequoia.py (auto)")
    add("--synthetic", choices=SYNTHETIC, help="speed, offload: a random pair of these shapes")
    args = parser.parse_args(argv)
    args.dtype = args.dtype or sequoia.DTYPE
    if args.device != "cpu" and args.command == "speed":        # where there is time for more
        DEFAULTS["speed --synthetic"] = 8, 128, [0.0, 0.6]
    if any(number is not None and number < 1 for number in (args.count, args.new_tokens)):
        parser.error("--count and --new-tokens must be at least 1")
    name = "speed --synthetic" if args.command == "speed" and args.synthetic else args.command
    defaults = DEFAULTS.get(name, (0, 0, []))
    if args.quick and name != "step":
        defaults = 2, 24, defaults[2]
    for option, value in zip(("count", "new_tokens", "temperatures"), defaults):
        setattr(args, option, getattr(args, option) or value)
    if args.command == "offload":
        args.synthetic = args.synthetic or ("tiny" if args.quick else "1b-68m")
    if args.command in ("acceptance", "verification", "scaling", "robustness") and 0 in args.temperatures:
        parser.error(f"{args.command} needs --temperatures above 0: greedy, all methods are the same")
    return args

def main(argv):
    args = arguments(argv)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    jobs = [[args.command]]
    folder = HERE / "figures" / "quick" if args.quick else None
    if args.command == "all":
        jobs = [[name] for name in COMMANDS]
        jobs.insert(4, ["speed", "--synthetic", "tiny" if args.quick else "1b-68m"])
        folder = folder or HERE / "figures"
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
            if not args.quick:
                readme.write_text(text, encoding="utf-8")
    except (ValueError, OSError, ImportError) as error:
        print(f"bench.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
