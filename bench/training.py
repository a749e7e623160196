"""Training speed: a step against torch's own nn.Transformer, and the time until copying is learned."""

from __future__ import annotations

import math
import statistics
import time

import torch
from torch import Tensor, nn

from train_copy import copy_batch, exact_match, learning_rate, loss
from transformer import Transformer, TransformerConfig, positional_encoding

ANNOTATED = (
    312  # s of training until The Annotated Transformer's copy example had 92.5 %: 2 cores, measured apart
)
LEARNED = 0.925


class TorchTransformer(nn.Module):
    """nn.Transformer with what it lacks: the tied embedding, positions, and the projection."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.src_vocab_size, config.d_model)
        sizes = config.d_model, config.n_heads, config.n_layers, config.n_layers, config.d_ff, config.dropout
        self.transformer = nn.Transformer(*sizes, batch_first=True)
        self.dropout = nn.Dropout(config.dropout)

    def embed(self, ids: Tensor) -> Tensor:
        """(B, T) -> (B, T, d_model)."""
        positions = positional_encoding(torch.arange(ids.size(1)), self.config.d_model)
        return self.dropout(self.embedding(ids) * math.sqrt(self.config.d_model) + positions)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        """(B, S), (B, T) -> logits (B, T, V)."""
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.size(1), dtype=torch.bool)
        padding = src == self.config.pad_id
        options = dict(src_key_padding_mask=padding, memory_key_padding_mask=padding, tgt_mask=mask)
        x = self.transformer(self.embed(src), self.embed(tgt), tgt_is_causal=True, **options)
        return x @ self.embedding.weight.T


def seconds_of_steps(config: TransformerConfig, batch: int, length: int, rounds: int) -> list[list[float]]:
    """Ours and torch's take turns at a step: forward, loss, backward, Adam. -> the seconds of each."""
    torch.manual_seed(0)
    models = Transformer(config).train(), TorchTransformer(config).train()
    optimizers = [torch.optim.Adam(model.parameters(), fused=True) for model in models]
    src, tgt = (torch.randint(3, config.src_vocab_size, (batch, length + extra)) for extra in (0, 1))
    seconds = [[], []]
    for turn in range(rounds + 1):
        for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            started = time.perf_counter()
            value = loss(model(src, tgt[:, :-1]), tgt[:, 1:], config.pad_id, label_smoothing=0.1)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            if turn:  # the first warms up
                seconds[i].append(time.perf_counter() - started)
    return seconds


def seconds_to_copy(seed: int, n_ids: int = 10, every: int = 25, most: int = 4000) -> tuple[float, int]:
    """The model and recipe of train_copy.py, on sequences of 10 ids out of 10, until 92.5 % of 1,000 unseen
    ones come back exactly. -> seconds of training, steps; the time of checking is not counted.
    """
    torch.manual_seed(seed)
    config = TransformerConfig(n_ids + 3, n_ids + 3, d_model=32, n_heads=2, n_layers=2, d_ff=128)
    model, lengths, data = (
        Transformer(config).train(),
        range(n_ids, n_ids + 1),
        torch.Generator().manual_seed(seed),
    )
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9, fused=True)
    unseen = copy_batch(config, 1000, lengths, torch.Generator().manual_seed(seed + 2**32))[0]
    seconds = 0.0
    for step in range(1, most + 1):
        started = time.perf_counter()
        optimizer.param_groups[0]["lr"] = learning_rate(step, config.d_model, warmup_steps=400)
        src, tgt = copy_batch(config, 32, lengths, data)
        value = loss(model(src, tgt[:, :-1]), tgt[:, 1:], config.pad_id, label_smoothing=0.1)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        seconds += time.perf_counter() - started
        if step % every == 0 and exact_match(model, unseen) >= LEARNED:
            return seconds, step
    raise SystemExit(f"training.py: {LEARNED:.1%} was not reached in {most} steps")


def report(is_base: bool, threads: int, rounds: int) -> list[str]:
    """The section of docs/performance.md; unless is_base, of a small model, to try it."""
    torch.set_num_threads(threads)
    sizes = dict() if is_base else dict(d_model=32, n_heads=4, n_layers=2, d_ff=64)
    vocab_size = 8000 if is_base else 100
    ours, theirs = seconds_of_steps(TransformerConfig(vocab_size, vocab_size, **sizes), 16, 32, rounds)
    ratios = [other / own for own, other in zip(ours, theirs, strict=True)]
    runs = [seconds_to_copy(seed) for seed in range(3)]
    slowest = max(seconds for seconds, _ in runs)
    return [
        f"A step (batch 16, lengths 32, vocabulary {vocab_size:,}, the loss of 5.4, Adam): "
        f"{1e3 * statistics.median(ours):.0f} ms; torch.nn.Transformer's time over ours "
        f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}] (target 1).",
        "",
        "Copying 10 ids, until 92.5 % of 1,000 unseen sequences are exact (seeds 0, 1, 2): "
        + ", ".join(f"{seconds:.1f} s ({steps} steps)" for seconds, steps in runs)
        + f". The Annotated Transformer's own example took {ANNOTATED} s on 2 cores (measured apart): "
        f"{ANNOTATED / slowest:.0f} times the slowest of these (target 10).",
    ]
