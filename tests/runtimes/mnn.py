"""MNN on the CPU. It is converted by the library: the console script installs packages and reports usage."""

import subprocess
import sys
import tempfile

import MNN
import MNN.expr
import numpy as np
from helpers import names_of

PACKAGE = "mnn"
NOTES = (
    "ids are int32; convert with `_tools.mnnconvert`, not the console script, which installs packages and "
    "reports usage; run with `MNN.nn.load_module_from_file`"
)
CONVERT = "import sys, MNN, _tools; _tools.mnnconvert(['MNNConvert', *sys.argv[1:]])"


def load(path):
    inputs, outputs = names_of(path)
    with tempfile.TemporaryDirectory() as folder:
        converted = f"{folder}/graph.mnn"
        arguments = ["-f", "ONNX", "--modelFile", str(path), "--MNNModel", converted]
        done = subprocess.run([sys.executable, "-c", CONVERT, *arguments], capture_output=True, text=True)
        if done.returncode:  # a signal: it crashes on what it doesn't know
            raise RuntimeError(f"the converter ended with {done.returncode}")
        module = MNN.nn.load_module_from_file(converted, inputs, outputs)

    def run(feeds):
        results = module.onForward([variable(feeds[name]) for name in inputs])
        return dict(zip(outputs, map(array, results), strict=True))

    return run


def variable(value: np.ndarray):
    is_float = value.dtype == np.float32
    result = MNN.expr.placeholder([*value.shape], MNN.expr.NCHW, MNN.expr.float if is_float else MNN.expr.int)
    if value.size:
        result.write(value.astype(np.float32 if is_float else np.int32))
    return result


def array(result) -> np.ndarray:
    return np.array(result.read()) if 0 not in result.shape else np.zeros(result.shape, np.float32)
