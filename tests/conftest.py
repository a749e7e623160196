"""Graphs are exported once for all tests."""

import contextlib
import hashlib
import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import small_model

import export_onnx
from transformer import save_checkpoint


@pytest.fixture(scope="session", autouse=True)
def trace_once():
    """Tracing is slow and always gives the same: what was traced before is not traced again."""
    real, known = export_onnx.trace, {}

    def trace(name, graph, model):
        weights = (weight.numpy(force=True).tobytes() for weight in model.state_dict().values())
        key = (name, model.config, str(graph.inputs), hashlib.sha256(b"".join(weights)).digest())
        if key not in known:
            known[key] = real(name, graph, model)
        return known[key]

    export_onnx.trace = trace
    yield
    export_onnx.trace = real


@pytest.fixture(autouse=True)
def gradients_stay_on():
    """A generator that yields within torch.no_grad() can leave them off for every later test."""
    yield
    assert torch.is_grad_enabled()


def export(checkpoint, out, *options) -> tuple[int, str]:
    """Run export_onnx.py: -> exit status, what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = export_onnx.main([str(checkpoint), "--out", str(out), *options])
    return status, printed.getvalue()


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """(checkpoint, the finished process) of `python train_copy.py`, run in a folder of its own."""
    folder = tmp_path_factory.mktemp("trained")
    command = [sys.executable, str(Path(__file__).parents[1] / "train_copy.py"), "--device", "cpu"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    return folder / "copy.pt", done


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """(folder of the graphs, checkpoint, model, report): random weights, unusual special ids."""
    folder = tmp_path_factory.mktemp("exported")
    model = small_model(1, spread=1.2, vocab_size=29, pad_id=3, bos_id=5, eos_id=4)
    save_checkpoint(folder / "model.pt", model)
    status, report = export(folder / "model.pt", folder / "onnx")
    assert status == 0
    return folder / "onnx", folder / "model.pt", model, report
