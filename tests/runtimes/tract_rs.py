"""tract, in Rust, through its Python package."""

import numpy as np
import onnx
import tract

PACKAGE = "tract"
NOTES = "step encoder and decoder: one model serves all lengths; the searches hold a Loop, which it lacks"


def load(path):
    graph = onnx.load(path, load_external_data=False).graph
    inputs, names = ([value.name for value in values] for values in (graph.input, graph.output))
    runnable = tract.onnx().load(str(path)).into_model().into_runnable()

    def run(feeds):
        outputs = runnable.run([feeds[name] for name in inputs])
        return {name: np.array(output.to_numpy()) for name, output in zip(names, outputs, strict=True)}

    return run
