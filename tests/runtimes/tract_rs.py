"""tract, in Rust, through its Python package."""

import numpy as np
import onnx
import tract

PACKAGE = "tract"
NOTES = "lengths are symbols of the model, so one model serves them all"


def load(path):
    graph = onnx.load(path, load_external_data=False).graph
    model = tract.onnx().load(str(path))
    runnable = model.into_model().into_runnable()

    def run(feeds):
        outputs = runnable.run([feeds[value.name] for value in graph.input])
        return {value.name: np.array(out.to_numpy()) for value, out in zip(graph.output, outputs, strict=True)}

    return run
