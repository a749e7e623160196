"""OpenCV's own engine of its dnn module."""

import cv2
import numpy as np
from helpers import names_of

PACKAGE = "opencv-python-headless"
NOTES = "name the engine: `readNetFromONNX(path, engine=cv2.dnn.ENGINE_OPENCV)`"


def load(path):
    _, outputs = names_of(path)
    net = cv2.dnn.readNetFromONNX(str(path), engine=cv2.dnn.ENGINE_OPENCV)

    def run(feeds):
        for name, value in feeds.items():
            net.setInput(value, name)
        return {name: np.array(value) for name, value in zip(outputs, net.forward(outputs), strict=True)}

    return run
