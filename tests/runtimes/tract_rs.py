"""tract, in Rust, through its Python package."""

import numpy as np
import tract
from helpers import names_of

PACKAGE = "tract"
NOTES = "step encoder and decoder: one model serves all lengths; the searches hold a Loop, which it lacks"


def load(path):
    inputs, outputs = names_of(path)
    runnable = tract.onnx().load(str(path)).into_model().into_runnable()

    def run(feeds):
        results = runnable.run([feeds[name] for name in inputs])
        return {name: np.array(result.to_numpy()) for name, result in zip(outputs, results, strict=True)}

    return run
