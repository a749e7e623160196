"""The reference evaluator of the onnx package: the standard's own Python, operator by operator."""

from onnx.reference import ReferenceEvaluator

PACKAGE = "onnx"
NOTES = "slow, made for reading: it shows that the files mean what the standard says"


def load(path):
    evaluator = ReferenceEvaluator(str(path))
    return lambda feeds: dict(zip(evaluator.output_names, evaluator.run(None, feeds), strict=True))
