"""Draw what the Transformer works with: its positional encoding, and the attention of a trained copy model.

usage: python examples/plots.py [CHECKPOINT] [--out DIR]

examples:
  python train_copy.py && python examples/plots.py copy.pt
  python examples/plots.py copy.pt --out pictures
"""

import argparse
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from train_copy import copy_batch  # noqa: E402
from transformer import (  # noqa: E402
    MultiHeadAttention,
    Transformer,
    attention,
    load_checkpoint,
    positional_encoding,
)


def attention_weights(model: Transformer, src: torch.Tensor, tgt: torch.Tensor) -> dict[str, torch.Tensor]:
    """(1, S), (1, T) -> the weights (H, Q, K) of every attention, by its name in the model."""
    weights, hooks = {}, []
    for name, module in model.named_modules():
        if isinstance(module, MultiHeadAttention):

            def keep(module, inputs, output, name=name):
                x, kv, mask = inputs
                weights[name] = attention(module.heads(module.w_q(x)), *kv, mask)[1][0]

            hooks.append(module.register_forward_hook(keep))
    with torch.no_grad():
        model(src, tgt)
    for hook in hooks:
        hook.remove()
    return weights


def plot_positions(path: Path) -> None:
    """A heat map of 100 positions by 128 dimensions, section 3.5."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    image = axes.imshow(
        positional_encoding(torch.arange(100), 128), cmap="RdBu", aspect="auto", vmin=-1, vmax=1
    )
    axes.set(xlabel="dimension (even: sine, odd: cosine)", ylabel="position", title="Positional encoding")
    figure.colorbar(image)
    figure.savefig(path, dpi=110)


def plot_attention(path: Path, model: Transformer) -> None:
    """Every head of the last layers, while the model copies one sequence."""
    from matplotlib import pyplot as plt

    src, tgt = copy_batch(model.config, 1, range(12, 13), torch.Generator().manual_seed(2))
    weights = attention_weights(model, src, tgt[:, :-1])
    names = {model.config.bos_id: "bos", model.config.eos_id: "eos"}
    src_labels, tgt_labels = ([names.get(i, str(i)) for i in ids[0].tolist()] for ids in (src, tgt[:, :-1]))
    last, n_heads = model.config.n_layers - 1, model.config.n_heads
    rows = {
        f"encoder.{last}.self_attn": ("encoder self-attention", src_labels, src_labels),
        f"decoder.{last}.self_attn": ("decoder self-attention", tgt_labels, tgt_labels),
        f"decoder.{last}.cross_attn": ("cross-attention", tgt_labels, src_labels),
    }
    size = (4.2 * n_heads, 4 * len(rows))
    figure, grid = plt.subplots(len(rows), n_heads, figsize=size, squeeze=False, layout="constrained")
    for axes_row, (name, (title, queries, keys)) in zip(grid, rows.items(), strict=True):
        for head, axes in enumerate(axes_row):
            axes.imshow(weights[name][head], cmap="viridis", vmin=0, vmax=1)
            axes.set(title=f"{title}, head {head + 1}", xlabel="attends to", ylabel="from")
            axes.set_xticks(range(len(keys)), keys)
            axes.set_yticks(range(len(queries)), queries)
    figure.savefig(path, dpi=80)


def main(argv: list[str] | None = None) -> int:
    """Draw both pictures. 2: something is missing."""
    usage, examples = __doc__.split("examples:")
    parser = argparse.ArgumentParser("plots.py", argparse.SUPPRESS, usage, "examples:" + examples)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "checkpoint", nargs="?", default="copy.pt", help="from train_copy.py (default: copy.pt)"
    )
    parser.add_argument(
        "--out", default=ROOT / "docs", type=Path, help="folder (default: docs/ of the project)"
    )
    options = parser.parse_args(argv)
    try:
        import matplotlib

        matplotlib.use("Agg")  # draws into files, on a machine without a screen too
    except ImportError:
        parser.error("matplotlib is not installed: pip install matplotlib")
    try:
        model = load_checkpoint(options.checkpoint)
        options.out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    plot_positions(options.out / "positional_encoding.png")
    plot_attention(options.out / "attention.png", model)
    print(f"wrote {options.out / 'positional_encoding.png'} and {options.out / 'attention.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
