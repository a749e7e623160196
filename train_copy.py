"""Train transformer.py to copy, with the recipe of the paper, and check that it does.

usage: python train_copy.py [options]

Random ids go in, the same must come out: source <ids> eos, target bos <ids> eos. A correct model
learns it in seconds; one with a wrong mask, shift or position does not. Break one and see.

examples:
  python train_copy.py                                      train, check, write copy.pt
  python train_copy.py --seed 3 --out seed3.pt              from other weights, on other data
  python train_copy.py --max-len 40 --d-model 64 --steps 4000
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from transformer import Transformer, TransformerConfig, greedy_search, require, save_checkpoint

PROMISE, N_TESTED = 0.999, 2000  # exact match, on so many unseen sequences
N_AVERAGED = 10  # checkpoints (6.1: 5 for the base model, 20 for the big one)
OPTIONS = {
    "--d-model": (32, "width; an even multiple of --n-heads"),
    "--n-heads": (2, "attention heads"),
    "--n-layers": (2, "layers in the encoder, and in the decoder"),
    "--d-ff": (128, "inner width of the feed-forward network"),
    "--dropout": (0.1, "P_drop"),
    "--vocab-size": (36, "ids, with pad 0, bos 1 and eos 2"),
    "--min-len": (1, "ids in the shortest sequence"),
    "--max-len": (20, "ids in the longest"),
    "--batch-size": (32, "sequences a step"),
    "--steps": (1600, "steps of training"),
    "--warmup-steps": (400, "steps until the learning rate is at its peak"),
    "--seed": (0, "of weights and data: same seed, same machine, same numbers"),
    "--out": ("copy.pt", "where the checkpoint goes"),
}


def learning_rate(step: int, d_model: int, warmup_steps: int) -> float:
    """5.3, equation 3: linear warm-up, then the inverse square root. Steps count from 1; 0 is taken as 1."""
    step = max(step, 1)
    return d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5)


def loss(logits: Tensor, targets: Tensor, pad_id: int, label_smoothing: float) -> Tensor:
    """5.4: (B, T, V), (B, T) -> cross entropy in nats, the mean over all targets that are not padding.

    label_smoothing is the part of each target that is spread evenly over V. With nothing but padding it is 0.
    """
    log_probs = logits.float().log_softmax(dim=-1)
    likelihood = log_probs.gather(-1, targets[..., None]).squeeze(-1)
    smoothed = (1 - label_smoothing) * likelihood + label_smoothing * log_probs.mean(dim=-1)
    real = targets != pad_id  # padding is no prediction: it would only teach the model to pad
    return -torch.where(real, smoothed, 0.0).sum() / real.sum().clamp(min=1)


def copy_batch(config: TransformerConfig, size: int, lengths: range, rng: torch.Generator) -> list[Tensor]:
    """-> src (B, longest + 1) of <ids> eos, tgt (B, longest + 2) of bos <ids> eos; then pad. On the CPU."""
    special = (config.pad_id, config.bos_id, config.eos_id)
    ids = torch.tensor([token for token in range(config.src_vocab_size) if token not in special])
    ids = ids[torch.randint(len(ids), (size, lengths.stop), generator=rng)]
    length = torch.randint(lengths.start, lengths.stop, (size, 1), generator=rng)
    place = torch.arange(lengths.stop)
    src = ids.masked_fill(place == length, config.eos_id).masked_fill(place > length, config.pad_id)
    return [src, torch.cat((torch.full_like(length, config.bos_id), src), dim=1)]


def average(state_dicts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """6.1: the mean of the last checkpoints' weights."""
    return {name: torch.stack([one[name] for one in state_dicts]).mean(dim=0) for name in state_dicts[0]}


def exact_match(model: Transformer, src: Tensor) -> float:
    """(B, S) -> the share of rows copied without a fault, eos included, by free-running greedy decode."""
    tokens = greedy_search(model, src, max_len=src.size(1))
    tokens = torch.nn.functional.pad(tokens, (0, src.size(1) - tokens.size(1)), value=model.config.pad_id)
    return (tokens == src).all(dim=1).float().mean().item()


def train(config: TransformerConfig, options: argparse.Namespace) -> tuple[Transformer, list[dict]]:
    """-> the model, and its weights at the last checkpoints. Progress goes to stderr."""
    torch.manual_seed(options.seed)
    model = Transformer(config).to(options.device).train()
    if options.compile:
        model.compile()  # in place, so the names in the checkpoint stay as they are
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9, fused=True)
    lengths, data = range(options.min_len, options.max_len + 1), torch.Generator().manual_seed(options.seed)
    sample = copy_batch(config, 200, lengths, data)[0].to(options.device)
    every, checkpoints = max(options.steps // 50, 1), []
    progress = tqdm(range(1, options.steps + 1), unit="step", disable=not sys.stderr.isatty())
    for step in progress:
        rate = learning_rate(step, config.d_model, options.warmup_steps)
        optimizer.param_groups[0]["lr"] = rate
        src, tgt = (ids.to(options.device) for ids in copy_batch(config, options.batch_size, lengths, data))
        # Teacher forcing: all positions at once, each given bos and the true ids before the one it predicts.
        value = loss(model(src, tgt[:, :-1]), tgt[:, 1:], config.pad_id, label_smoothing=0.1)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        if (options.steps - step) % every == 0:
            weights = {name: weight.clone() for name, weight in model.state_dict().items()}
            checkpoints = [*checkpoints[1 - N_AVERAGED :], weights]
        if step % (5 * every) == 0:
            exact = exact_match(model, sample)
            status = f"loss {value.item():.3f}, learning rate {rate:.1e}, exact match {exact:.1%}"
            progress.set_postfix_str(status)
            if progress.disable:
                print(f"step {step} of {options.steps}: {status}", file=sys.stderr, flush=True)
    return model, checkpoints


def check(options: argparse.Namespace) -> TransformerConfig:
    """The configuration; also settles the device. ValueError, before any work, if an option can't be used."""
    for name in ("min_len", "batch_size", "steps", "warmup_steps"):
        require(getattr(options, name) >= 1, name, getattr(options, name), "at least 1")
    require(options.max_len >= options.min_len, "max_len", options.max_len, f"at least {options.min_len}")
    require(options.vocab_size >= 4, "vocab_size", options.vocab_size, "at least 4: pad, bos, eos and one id")
    has = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if options.device == "auto":
        options.device = next(device for device in has if has[device])
    require(has[options.device], "device", options.device, "one that this machine and this torch have")
    folder = Path(options.out).absolute().parent
    usable = os.access(folder, os.W_OK) and folder.is_dir() and not Path(options.out).is_dir()
    require(usable, "out", options.out, "a file, in a folder that exists and can be written to")
    sizes = (options.d_model, options.n_heads, options.n_layers, options.d_ff, options.dropout)
    return TransformerConfig(options.vocab_size, options.vocab_size, *sizes)


def main(argv: list[str] | None = None) -> int:
    """Train, check, write. 0: the promise is kept; 1: it is missed; 2: an option can't be used."""
    started, (usage, examples) = time.perf_counter(), __doc__.split("examples:")
    parser = argparse.ArgumentParser("train_copy.py", argparse.SUPPRESS, usage, "examples:" + examples)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for name, (default, what) in OPTIONS.items():
        parser.add_argument(name, type=type(default), default=default, help=f"{what} (default: {default})")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto")
    parser.add_argument("--compile", action="store_true", help="with torch.compile (needs a C++ compiler)")
    options = parser.parse_args(argv)
    try:
        config = check(options)
    except ValueError as error:
        parser.error(str(error))

    model, checkpoints = train(config, options)
    unseen = torch.Generator().manual_seed(options.seed + 2**32)
    src, _ = copy_batch(config, N_TESTED, range(options.min_len, options.max_len + 1), unseen)
    last = exact_match(model, src.to(options.device))
    model.load_state_dict(average(checkpoints))
    exact = exact_match(model, src.to(options.device))
    task = dict(vocab_size=options.vocab_size, min_len=options.min_len, max_len=options.max_len)
    save_checkpoint(options.out, model, steps=options.steps, seed=options.seed, **task)

    print(f"exact match of {N_TESTED:,} unseen sequences, by free-running greedy decode:")
    print(f"  weights of the last step           {last:8.2%}")
    print(f"  average of the last {len(checkpoints):2} checkpoints  {exact:8.2%}")
    verdict, rule = ("PASSED", "at least") if exact >= PROMISE else ("FAILED", "less than")
    print(f"{verdict}: {exact:.2%} is {rule} {PROMISE:.1%}, after {time.perf_counter() - started:.0f} s")
    print(f"wrote {options.out}; next: python export_onnx.py {options.out}")
    return 0 if exact >= PROMISE else 1


if __name__ == "__main__":
    sys.exit(main())
