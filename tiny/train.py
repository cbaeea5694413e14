"""Makes the bundled pair: a target and a draft, both Llama-shaped, trained on the Python standard library's own source.

    python tiny/train.py --minutes 90        # on two CPU cores; a GPU is used where there is one

Three steps, each taken up again where it was cut off: a byte-level BPE tokenizer; the target, on next tokens; the draft,
distilled from the target (it learns the target's whole distribution at every position). Files are held out by the
checksum of their name, so every reader of every Python version holds out the same ones.
"""
import argparse
import json
import math
import sysconfig
import time
import zlib
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).parent
STDLIB = Path(sysconfig.get_path("stdlib"))
SKIP = {"site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__"}     # not source, or only tables
END = "<|endoftext|>"
SHAPES = {
    "target": dict(hidden_size=256, intermediate_size=512, num_hidden_layers=12, num_attention_heads=4, head_dim=64),
    "draft": dict(hidden_size=144, intermediate_size=384, num_hidden_layers=1, num_attention_heads=4, head_dim=32),
}


def source_files(held_out):
    """The standard library's files, as a sorted list of paths: those held out from training, or all the others."""
    files = (path.relative_to(STDLIB) for path in STDLIB.rglob("*.py"))
    chosen = [f for f in files if not SKIP & set(f.parts) and (zlib.crc32(f.as_posix().encode()) % 32 == 0) == held_out]
    return [STDLIB / f for f in sorted(chosen)]


def make_tokenizer(texts, size=4096):
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=size, special_tokens=[END], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, bos_token=END, eos_token=END)


def encode(tokenizer, paths):
    """All files as one stream of token ids, each ending with END: (tokens,)."""
    texts = [path.read_text(encoding="utf-8", errors="ignore") + END for path in paths]
    return torch.tensor([token for ids in tokenizer(texts)["input_ids"] for token in ids])


def windows(stream, count, length, generator):
    starts = torch.randint(len(stream) - length - 1, (count,), generator=generator)
    rows = torch.stack([stream[s : s + length + 1] for s in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]                                                     # (count, length) each


def optimizers(model, rate):
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [torch.optim.Muon(matrices, lr=rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)]


def train(name, model, loss_of, stream, minutes, batch, args, device):
    """Trains until the minutes are used up; the learning rate falls linearly with them. Resumes from the checkpoint."""
    rate = 4e-3
    optims = optimizers(model, rate)
    generator = torch.Generator().manual_seed(args.seed)
    step, used, checkpoint = 0, 0.0, HERE / "checkpoint.pt"
    if checkpoint.exists() and (saved := torch.load(checkpoint, weights_only=True))["name"] == name:
        model.load_state_dict(saved["model"])
        for optim, state in zip(optims, saved["optims"]):
            optim.load_state_dict(state)
        generator.set_state(saved["generator"])
        step, used = saved["step"], saved["used"]
    bar = tqdm(total=round(minutes, 1), desc=name, bar_format="{l_bar}{bar}| {n:.1f}/{total} min {postfix}")
    average, last_save = None, used
    while used < minutes:
        start, progress = time.monotonic(), used / minutes
        for group in (group for optim in optims for group in optim.param_groups):
            group["lr"] = rate * min(1, (step + 1) / 50) * max(0.01, 1 - progress)
        length = 512 if progress < 0.8 else 1024                                 # the last fifth learns long contexts
        inputs, labels = windows(stream, batch * 512 // length, length, generator)
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(model, inputs.to(device), labels.to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optim in optims:
            optim.step()
            optim.zero_grad()
        step, average = step + 1, loss.item() if average is None else 0.95 * average + 0.05 * loss.item()
        used += (time.monotonic() - start) / 60
        bar.set_postfix_str(f"step {step} loss {average:.3f}")
        bar.update(min(used, minutes) - bar.n)
        if used - last_save > 3:
            last_save = used
            state = dict(name=name, model=model.state_dict(), optims=[o.state_dict() for o in optims],
                         generator=generator.get_state(), step=step, used=used)
            torch.save(state, checkpoint.with_suffix(".tmp"))
            checkpoint.with_suffix(".tmp").replace(checkpoint)
    bar.close()
    checkpoint.unlink(missing_ok=True)


def next_token_loss(model, inputs, labels):
    return cross_entropy(model(inputs).logits.float().flatten(0, 1), labels.flatten())


def distillation_loss(target):
    """Cross-entropy of the draft against the target's distribution: their KL divergence up to a constant."""
    def loss_of(model, inputs, labels):
        with torch.no_grad():
            wanted = target(inputs).logits.float().flatten(0, 1).softmax(-1)             # (tokens, vocab)
        return cross_entropy(model(inputs).logits.float().flatten(0, 1), wanted)
    return loss_of


@torch.no_grad()
def evaluate(model, stream, device, target=None, length=512, count=64):
    """Held-out loss in nats per token and, given the target, how often both have the same most likely token."""
    inputs, labels = windows(stream, count, length, torch.Generator().manual_seed(0))
    loss = agree = 0.0
    for x, y in zip(inputs.to(device).split(8), labels.to(device).split(8)):
        logits = model(x).logits.float()
        loss += cross_entropy(logits.flatten(0, 1), y.flatten()).item() * len(x) / count
        if target is not None:
            agree += (logits.argmax(-1) == target(x).logits.argmax(-1)).float().mean().item() * len(x) / count
    return loss, agree


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=90, help="training time in all, two thirds of it the target's (90)")
    parser.add_argument("--batch", type=int, default=12, help="sequences of 512 tokens a step, half as many for the draft (12)")
    parser.add_argument("--seed", type=int, default=0, help="(0)")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    files, held_out_files = source_files(held_out=False), source_files(held_out=True)
    if (HERE / "target" / "tokenizer.json").exists():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(HERE / "target")
    else:
        tokenizer = make_tokenizer(path.read_text(encoding="utf-8", errors="ignore") for path in files)
        tokenizer.save_pretrained(HERE / "target")
        tokenizer.save_pretrained(HERE / "draft")
    stream, held_out = encode(tokenizer, files), encode(tokenizer, held_out_files)
    print(f"{len(files)} files, {len(stream):,} tokens; held out {len(held_out_files)} files, {len(held_out):,} tokens")

    def make(name, share, batch, loss_of, against=None):
        """The finished model of that name: loaded where it is there already, else trained and saved in bfloat16."""
        folder = HERE / name
        if (folder / "model.safetensors").exists():
            return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
        config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=1024, tie_word_embeddings=True,
                             bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, **SHAPES[name])
        model = LlamaForCausalLM(config).to(device)
        train(name, model, loss_of, stream, args.minutes * share, batch, args, device)
        model.to(torch.bfloat16).save_pretrained(folder)
        loss, agree = evaluate(model.float(), held_out, device, against)
        size = sum(p.numel() for p in model.parameters())
        print(json.dumps({"model": name, "parameters": size, "held_out_loss": round(loss, 3), "agreement": round(agree, 3)}))
        return model

    target = make("target", 2 / 3, args.batch, next_token_loss).eval()
    draft = make("draft", 1 / 3, args.batch // 2, distillation_loss(target), target)
    prompt = tokenizer("def read(self, size=-1):\n", return_tensors="pt").to(device)
    for model in (target, draft):
        print("---\n" + tokenizer.decode(model.generate(**prompt, max_new_tokens=80, do_sample=True, temperature=0.6)[0]))


if __name__ == "__main__":
    main()
