"""Makes the bundled pair: a target and a draft, both Llama-shaped, which write Python.

    python tiny/train.py                # trains what is missing, or goes on from tiny/checkpoint.pt
    python tiny/train.py --more target  # trains the finished target on, from its weights; then --more draft
    python tiny/train.py --evaluate     # measures the pair on the held-out files

Three steps, each taken up again where it was cut off: a byte-level BPE tokenizer; the target, on next tokens; the draft,
distilled from the target (it learns the target's whole distribution at every position). Files are held out by the
checksum of their name, so every reader of every Python version holds out the same ones.
"""
import argparse
import math
import re
import shutil
import sysconfig
import time
import zlib
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from torch.nn.functional import cross_entropy, pad
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

HERE = Path(__file__).parent
CHECKPOINT, WRITTEN = HERE / "checkpoint.pt", HERE / "written.pt"
STDLIB, SITE = Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))
SKIP = {"site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__"}     # not source, or only tables
# Of the requirements and what they require: those that tiny/README.md lists with their licences.
PACKAGES = ("filelock setuptools mpmath networkx jinja2 markupsafe fsspec huggingface_hub click httpx2 httpcore2 anyio "
            "idna h11 truststore yaml tokenizers typer pydantic pydantic_core annotated_types typing_inspection rich "
            "markdown_it mdurl pygments safetensors _pytest iniconfig pluggy sortedcontainers numpy sympy torch torchgen "
            "functorch transformers").split()
SKIP_PACKAGES = SKIP | {"tests", "benchmarks", "_vendor", "_numpy", "generated", "_generated"}
GENERATED = re.compile(r"(?i)auto-?(matically)?[- ]?generated|generated (by|from|with|file)|do not edit")
# How many times the target reads the standard library while it reads the packages once.
COPIES = 5
# Tokens a step, and at a time; the learning rate before it falls; CPU seconds between checkpoints.
BATCH, PART, RATE, SAVE = 8192, 2048, 4e-3, 300
END = "<|endoftext|>"
SHAPES = {
    "target": dict(hidden_size=256, intermediate_size=512, num_hidden_layers=12, num_attention_heads=4, head_dim=64),
    "draft": dict(hidden_size=144, intermediate_size=384, num_hidden_layers=1, num_attention_heads=4, head_dim=32),
}


def read(path):
    return path.read_text(encoding="utf-8", errors="ignore")


def source_files(held_out):
    """The standard library's files, as a sorted list of paths: those held out from training, or all the others."""
    files = (path.relative_to(STDLIB) for path in STDLIB.rglob("*.py"))
    chosen = [f for f in files if not SKIP & set(f.parts) and (zlib.crc32(f.as_posix().encode()) % 32 == 0) == held_out]
    return [STDLIB / f for f in sorted(chosen)]


def package_files():
    """The packages' files, without tests, generated files, tables, and files of which most lines stand in one before."""
    def lines(path):
        return [line for line in map(str.strip, read(path).splitlines()) if len(line) > 20]

    known = {line for held_out in (True, False) for path in source_files(held_out) for line in lines(path)}
    chosen = []
    for path in (path for package in PACKAGES for path in sorted((SITE / package).rglob("*.py"))):
        text, own = read(path), lines(path)
        table = sum(map(str.isalpha, text)) < len(re.sub(r"\s", "", text)) / 2
        copied = sum(line in known for line in own) > len(own) / 2
        if own and not (table or copied or SKIP_PACKAGES & set(path.parts[len(SITE.parts):]) or GENERATED.search(text[:1500])):
            known.update(own)
            chosen.append(path)
    return chosen


def make_tokenizer(texts, size=4096):
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=size, special_tokens=[END], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, bos_token=END, eos_token=END)


def encode(tokenizer, paths):
    """All files as one stream of token ids, each ending with END: (tokens,)."""
    return torch.cat([torch.tensor(tokenizer(read(path) + END)["input_ids"], dtype=torch.int16) for path in paths])


def windows(stream, first, count, length):
    """Rows `first` to `first + count` of an endless series that covers the stream evenly: (count, length + 1)."""
    places = torch.arange(first, first + count, dtype=torch.float64) * (math.sqrt(5) - 1) / 2 % 1
    starts = (places * (len(stream) - length - 1)).long()
    return stream[starts[:, None] + torch.arange(length + 1)].long()


def causal_attention(module, queries, keys, values, mask, scaling, chunk=128, **_):
    """Attention that leaves out most of what is masked: each chunk of queries sees the keys up to its own end."""
    outputs, hidden = [], torch.full((chunk, chunk), -math.inf, dtype=queries.dtype, device=queries.device).triu(1)
    for i in range(0, queries.shape[2], chunk):
        scores = scaling * queries[:, :, i : i + chunk] @ keys[:, :, : i + chunk].transpose(2, 3) + pad(hidden, (i, 0))
        outputs.append(scores.float().softmax(-1).to(queries.dtype) @ values[:, :, : i + chunk])
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None


def optimizers(named):
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms."""
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed" in name]
    return [torch.optim.Muon(matrices, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0)]


def train(name, model, loss_of, streams, saved, report, args):
    """Trains at a constant rate, which falls linearly to 0 over the last tokens. Goes on from a checkpoint's state `saved`.

    The model computes in bfloat16. The optimizers work on float32 weights beside it.
    """
    total, end = (1e6 * millions[list(SHAPES).index(name)] for millions in (args.tokens, args.end))
    named = [(n, p.detach().float().clone().requires_grad_()) for n, p in model.named_parameters()]
    pairs = [(p, weights) for p, (_, weights) in zip(model.parameters(), named)]
    optims, seen, used = optimizers(named), 0, 0.0
    if "seen" in saved:
        for (_, weights), loaded in zip(pairs, saved["masters"]):
            weights.data.copy_(loaded)
        for optim, state in zip(optims, saved["optims"]):
            optim.load_state_dict(state)
        seen, used = saved["seen"], saved["used"]
    model.bfloat16()
    # Twice as fast on a CPU, where it needs a C++ compiler.
    step = torch.compile(loss_of, dynamic=False) if shutil.which("g++") else loss_of
    average, last, start = None, used, time.process_time() - used
    while seen < total:
        for p, weights in pairs:
            p.data.copy_(weights)
        for group in (group for optim in optims for group in optim.param_groups):
            group["lr"] = RATE * min(1, (seen + BATCH) / 1e6, (total - seen) / end)
        # Long contexts are dear on a CPU and soon learnt, and the standard library is what is measured: both come last.
        ending = seen >= total - end
        stream, length = (streams[1], 512) if ending else (streams[0], 256)
        rows = windows(stream, seen // length, BATCH // length, length)
        loss = 0.0
        for some in rows.to(args.device).split(PART // length):
            part = step(model, some[:, :-1], some[:, 1:]) * len(some) / len(rows)
            part.backward()
            loss += part.item()
        for p, weights in pairs:
            weights.grad, p.grad = p.grad.float(), None
        torch.nn.utils.clip_grad_norm_([weights for _, weights in pairs], 1.0)
        for optim in optims:
            optim.step()
        seen, used = seen + BATCH, time.process_time() - start
        average = loss if average is None else 0.98 * average + 0.02 * loss
        if used - last > SAVE or seen >= total:
            last = used
            torch.save(dict(name=name, masters=[weights.data for _, weights in pairs], seen=seen, used=used,
                            optims=[optim.state_dict() for optim in optims]), CHECKPOINT.with_suffix(".tmp"))
            CHECKPOINT.with_suffix(".tmp").replace(CHECKPOINT)
            print(f"{time.strftime('%F %T')} {name}: {seen / 1e6:.2f} million tokens, {used:.0f} CPU seconds, "
                  f"rate {group['lr']:.5f}, loss {average:.3f}; held out {report(model)}", flush=True)
    for p, weights in pairs:
        p.data.copy_(weights)


def next_token_loss(model, inputs, labels):
    return cross_entropy(model(inputs, use_cache=False).logits.float().flatten(0, 1), labels.flatten())


def distillation_loss(target):
    """Cross-entropy of the draft against the target's distribution, at temperatures 1 and 0.6: KL divergences up to constants."""
    def loss_of(model, inputs, labels):
        with torch.no_grad():
            wanted = target(inputs, use_cache=False).logits.float().flatten(0, 1)           # (tokens, vocab)
        logits = model(inputs, use_cache=False).logits.float().flatten(0, 1)
        return sum(cross_entropy(logits / t, (wanted / t).softmax(-1)) for t in (1.0, 0.6)) / 2
    return loss_of


def write(stream, temperature, device, pieces=2048, known=32, length=256, batch=128):
    """Text by the target, in pieces that go on from the first `known` tokens of a window of the stream: (tokens,)."""
    target, texts = AutoModelForCausalLM.from_pretrained(HERE / "target", dtype=torch.bfloat16).to(device), []
    for first in range(0, pieces, batch):
        heads = windows(stream, first, batch, known - 1).to(device)
        texts.append(target.generate(heads, attention_mask=torch.ones_like(heads), do_sample=True, top_k=0,
                                     temperature=temperature, min_length=length, max_length=length))
    return torch.cat(texts).flatten().to("cpu", torch.int16)


@torch.no_grad()
def evaluate(model, stream, device, target=None, length=512, every=1):
    """Loss in nats a token, over windows of a stream and, given the target, how often both rank the same token first."""
    rows = stream.long().unfold(0, length + 1, length)[::every].to(device)
    loss = agree = 0.0
    for part in rows.split(4):
        logits = model(part[:, :-1], use_cache=False).logits.float()
        loss += cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()).item() * len(part) / len(rows)
        if target is not None:
            same = logits.argmax(-1) == target(part[:, :-1], use_cache=False).logits.argmax(-1)
            agree += same.float().mean().item() * len(part) / len(rows)
    return loss, agree


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tokens", type=float, nargs=2, default=(60, 20), help="in millions, of the target and the draft (60 20)")
    add("--end", type=float, nargs=2, default=(15, 10), help="of them at a falling rate (15 10)")
    add("--more", choices=list(SHAPES), help="train this finished model on, from its weights")
    add("--evaluate", action="store_true", help="train nothing")
    args = parser.parse_args()
    args.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    AttentionInterface.register("causal", causal_attention)

    files, held_out_files = source_files(held_out=False), source_files(held_out=True)
    if (HERE / "target" / "tokenizer.json").exists():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(HERE / "target")
    else:
        tokenizer = make_tokenizer(map(read, files))
        tokenizer.save_pretrained(HERE / "target")
        tokenizer.save_pretrained(HERE / "draft")
    held_out = encode(tokenizer, held_out_files)
    share = len(held_out) / sum(len(read(path)) for path in held_out_files)              # tokens a character
    saved = {"name": args.more}
    if CHECKPOINT.exists() and not args.evaluate:
        saved = torch.load(CHECKPOINT, weights_only=True)

    def streams(name):
        """What a model is trained on: before its rate falls, and then."""
        library = encode(tokenizer, files)
        if name == "target":
            return torch.cat([library] * COPIES + [encode(tokenizer, package_files())]), library
        if not WRITTEN.exists():
            torch.save(torch.cat([write(library, temperature, args.device) for temperature in (0.6, 1.0)]), WRITTEN)
        return [torch.cat([library] + [torch.load(WRITTEN)] * 6)] * 2

    def make(name, loss_of, against=None):
        """The model of that name: as it is where it is finished, else trained and saved in bfloat16."""
        def report(model, every=4):
            loss, agree = evaluate(model, held_out, args.device, against, every=every)
            text = f"{loss:.3f} nats a token, {loss * share:.4f} a character"
            return text if against is None else f"{text}, top token the target's at {agree:.1%}"

        folder, options = HERE / name, dict(dtype=torch.float32, attn_implementation="causal")
        if finished := (folder / "model.safetensors").exists():
            model = AutoModelForCausalLM.from_pretrained(folder, **options).to(args.device)
        else:
            config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=1024, tie_word_embeddings=True,
                                 bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, **SHAPES[name])
            model = AutoModelForCausalLM.from_config(config, **options).to(args.device)
        if not args.evaluate and (saved["name"] == name or not finished):
            if against is not None:
                against.bfloat16()
            train(name, model, loss_of, streams(name), saved if saved["name"] == name else {}, report, args)
            model.save_pretrained(folder)
            CHECKPOINT.unlink()
        elif not args.evaluate:
            return model
        size = sum(p.numel() for p in model.parameters())
        for each in filter(None, (model, against)):
            each.float()
        print(f"{name}: {size:,} parameters, held out {report(model, every=1)}", flush=True)
        return model

    target = make("target", next_token_loss).eval()
    make("draft", distillation_loss(target), target)
    if not args.evaluate:
        WRITTEN.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
