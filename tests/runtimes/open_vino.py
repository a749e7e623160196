"""OpenVINO on the CPU."""

import openvino

PACKAGE = "openvino"
NOTES = (
    "compile with `INFERENCE_PRECISION_HINT` = `f32`: the default may compute in bfloat16 or float16; "
    "copy outputs, the next inference reuses their memory"
)


def load(path):
    compiled = openvino.Core().compile_model(str(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    def run(feeds):
        results = compiled(feeds)
        return {output.any_name: results[output].copy() for output in compiled.outputs}

    return run
