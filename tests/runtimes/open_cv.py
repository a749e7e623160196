"""OpenCV's own engine of its dnn module."""

import cv2
import numpy as np
import onnx

PACKAGE = "opencv-python-headless"
NOTES = "name the engine: `readNetFromONNX(path, engine=cv2.dnn.ENGINE_OPENCV)`"


def load(path):
    graph = onnx.load(path, load_external_data=False).graph
    net = cv2.dnn.readNetFromONNX(str(path), engine=cv2.dnn.ENGINE_OPENCV)
    names = [output.name for output in graph.output]

    def run(feeds):
        for name, value in feeds.items():
            net.setInput(value, name)
        return {name: np.array(value) for name, value in zip(names, net.forward(names), strict=True)}

    return run
