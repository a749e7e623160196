"""ONNX Runtime in Python, on its CPU provider."""

import run_onnx

PACKAGE = "onnxruntime"
NOTES = "what run_onnx.py uses; the exporter proves every file on it"


def load(path):
    session = run_onnx.load(path)
    names = [output.name for output in session.get_outputs()]
    return lambda feeds: dict(zip(names, session.run(names, feeds), strict=True))
