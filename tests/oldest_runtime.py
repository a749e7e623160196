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
for file in sorted(__import__("pathlib").Path(sys.argv[2]).glob("*-[0-9]*.npz")):
    data = np.load(file)
    session = run_onnx.load(sys.argv[2] + "/" + file.stem.split("-")[0] + ".onnx")
    names = [output.name for output in session.get_outputs()]
    outputs = session.run(names, {feed.name: data[feed.name] for feed in session.get_inputs()})
    for name, output in zip(names, outputs):
        wanted = data["expected_" + name]
        assert output.shape == wanted.shape, (file, name)
        worst = max(worst, float(np.abs(output - wanted).max(initial=0.0)))
src = np.load(sys.argv[2] + "/src.npy")
for name in ("", "/greedy.onnx", "/beam.onnx"):
    found = run_onnx.search(run_onnx.load_search(sys.argv[2] + name), src, 20)
    expected = np.load(sys.argv[2] + f"/{'beam' if 'beam' in name else 'greedy'}-found.npz")
    assert (found[0] == expected["tokens"]).all()
    if "beam" in name:
        worst = max(worst, float(np.abs(found[1] - expected["scores"]).max()))
print(f"onnxruntime {run_onnx.ort.__version__}: tokens equal, largest difference {worst:.1e}")
sys.exit(worst > 1e-4)
"""


def main() -> int:
    """0: every release gives PyTorch's numbers within 1e-4 and its tokens."""
    sys.path.insert(0, str(ROOT))
    import numpy as np
    import torch

    import export_onnx
    from transformer import beam_search, greedy_search, load_checkpoint

    if len(sys.argv) < 2:
        sys.exit(__doc__)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        if export_onnx.main([sys.argv[1], "--out", folder]):
            return 1
        model = load_checkpoint(sys.argv[1])
        table = export_onnx.graphs(model)
        for kind in ("forward", "encoder", "decoder"):
            for number, sizes in enumerate(export_onnx.PROVED):
                inputs = export_onnx.example(table[kind], model, sizes, number)
                with torch.no_grad():
                    outputs = table[kind].reference(*inputs)
                outputs = [outputs] if kind == "forward" else outputs
                arrays = dict(zip(table[kind].inputs, (x.numpy() for x in inputs), strict=True))
                arrays |= {
                    f"expected_{n}": x.numpy() for n, x in zip(table[kind].outputs, outputs, strict=True)
                }
                np.savez(Path(folder) / f"{kind}-{number}.npz", **arrays)
        pad_id = model.config.pad_id
        src = torch.tensor([[5, 6, 7, 2], [8, 2, pad_id, pad_id]])
        np.save(Path(folder) / "src.npy", src.numpy())
        tokens, scores = beam_search(model, src, 20)
        np.savez(Path(folder) / "beam-found.npz", tokens=tokens.numpy(), scores=scores.numpy())
        np.savez(Path(folder) / "greedy-found.npz", tokens=greedy_search(model, src, 20).numpy())
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
