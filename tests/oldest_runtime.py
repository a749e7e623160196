"""Do the graphs run on a release of onnxruntime? No test for pytest: it installs that release by itself.

usage: python tests/oldest_runtime.py CHECKPOINT [VERSION ...]

Exports the checkpoint, lets PyTorch answer at every shape of the proof, then lets each release (1.15.0, the
first for Python 3.11, if none is named) do so in an environment of its own; prints the largest difference.
"""

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMPARE = """
import sys
import numpy as np
sys.path.insert(0, sys.argv[1])
import run_onnx
worst = 0.0
for file in sorted(__import__("pathlib").Path(sys.argv[2]).glob("*.npz")):
    data = np.load(file)
    session = run_onnx.load(sys.argv[2] + "/" + file.stem.split("-")[0] + ".onnx")
    names = [output.name for output in session.get_outputs()]
    outputs = session.run(names, {feed.name: data[feed.name] for feed in session.get_inputs()})
    for name, output in zip(names, outputs):
        wanted = data["expected_" + name]
        assert output.shape == wanted.shape, (file, name)
        worst = max(worst, float(np.abs(output - wanted).max(initial=0.0)))
tokens = run_onnx.greedy(sys.argv[2], [[5, 6, 7, 2], [8, 2]], 20)
assert (tokens == np.load(sys.argv[2] + "/tokens.npy")).all()
print(f"onnxruntime {run_onnx.ort.__version__}: tokens equal, largest difference {worst:.1e}")
sys.exit(worst > 1e-4)
"""


def main() -> int:
    """0: every release gives PyTorch's numbers within 1e-4 and its tokens."""
    sys.path.insert(0, str(ROOT))
    import numpy as np
    import torch

    import export_onnx
    from transformer import greedy_search, load_checkpoint

    if len(sys.argv) < 2:
        sys.exit(__doc__)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        if export_onnx.main([sys.argv[1], "--out", folder]):
            return 1
        model = load_checkpoint(sys.argv[1])
        for kind, graph in export_onnx.graphs(model).items():
            for number, (batch, src_len, tgt_len, past_len) in enumerate(export_onnx.PROVED):
                sizes = dict(
                    batch=batch, src_len=src_len, tgt_len=tgt_len, new_len=tgt_len, past_len=past_len
                )
                inputs = export_onnx.example(graph, model, sizes, number)
                outputs = export_onnx.outputs_of(graph.module, inputs)
                arrays = dict(zip(graph.inputs, (x.numpy() for x in inputs), strict=True))
                arrays |= {f"expected_{n}": x for n, x in zip(graph.outputs, outputs, strict=True)}
                np.savez(Path(folder) / f"{kind}-{number}.npz", **arrays)
        src = torch.tensor([[5, 6, 7, 2], [8, 2, model.config.pad_id, model.config.pad_id]])
        np.save(Path(folder) / "tokens.npy", greedy_search(model, src, 20).numpy())
        for version in sys.argv[2:] or ["1.15.0"]:
            environment = Path(folder) / f"venv-{version}"
            venv.create(environment, with_pip=True)
            python = environment / ("Scripts" if sys.platform == "win32" else "bin") / "python"
            wanted = [f"onnxruntime=={version}", "numpy<2"]
            subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True)
            failed |= subprocess.run([python, "-c", COMPARE, ROOT, folder]).returncode
    return failed


if __name__ == "__main__":
    sys.exit(main())
