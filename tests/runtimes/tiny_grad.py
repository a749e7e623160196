"""tinygrad on the CPU, whose kernels clang compiles."""

import os

import numpy as np

os.environ.setdefault("DEV", "CPU")  # before it is imported: it would take a GPU
from tinygrad import Tensor
from tinygrad.nn.onnx import OnnxRunner

PACKAGE = "tinygrad"
NOTES = "needs clang; a runner holds the shapes that it was first given, so each shape needs a new one"


def load(path):
    def run(feeds):
        runner = OnnxRunner(str(path))
        outputs = runner({name: Tensor(value) for name, value in feeds.items()})
        return {name: np.array(value.numpy()) for name, value in outputs.items()}

    return run
