"""onnxruntime-node and onnxruntime-web: a process of Node.js runs the graphs, asked in lines of JSON.

Needs Node.js, `npm ci --ignore-scripts` in this folder and, for a page, Chromium.
"""

import base64
import json
import shutil
import subprocess
from functools import cached_property
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


class Refused(Exception):
    """The runtime's own words."""


def pack(array: np.ndarray) -> dict:
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"type": str(array.dtype), "dims": list(array.shape), "data": data}


def unpack(packed: dict) -> np.ndarray:
    return np.frombuffer(base64.b64decode(packed["data"]), packed["type"]).reshape(packed["dims"])


def installed(package: str) -> tuple[str, int]:
    """-> version and bytes of an npm package. OSError says what is missing."""
    if shutil.which("node") is None:
        raise FileNotFoundError("no Node.js")
    folder = FOLDER / "node_modules" / package
    version = json.loads((folder / "package.json").read_text(encoding="utf-8"))["version"]
    return version, sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def browser() -> str:
    """The path of Chromium. OSError where it is missing."""
    if (path := next(filter(None, map(shutil.which, BROWSERS)), None)) is None:
        raise FileNotFoundError(f"no browser: none of {', '.join(BROWSERS)}")
    return path


class JavaScript:
    """A driver: one process, many sessions. OSError says what is missing."""

    def __init__(self, package: str, notes: str, script: str, *arguments: str) -> None:
        self.PACKAGE, self.NOTES, self.script, self.arguments = package, notes, script, arguments

    def installed(self) -> tuple[str, int]:
        if self.script == "chromium.mjs":
            browser()
        return installed(self.PACKAGE)

    @cached_property
    def process(self) -> subprocess.Popen:
        command = ["node", str(FOLDER / self.script), *self.arguments]
        if self.script == "chromium.mjs":
            command.append(browser())
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8", cwd=FOLDER
        )

    def ask(self, **request: object) -> object:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        if not (line := self.process.stdout.readline()):
            raise Refused(f"the process ended with exit status {self.process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise Refused(answer["error"])
        return answer["answer"]

    def load(self, path: Path):
        session = self.ask(path=str(path))

        def run(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            packed = {name: pack(array) for name, array in feeds.items()}
            outputs = self.ask(session=session, feeds=packed)
            return {name: unpack(output) for name, output in outputs.items()}

        return run


BIG = "int64 is BigInt64Array: `BigInt64Array.from(ids, BigInt)`"
onnxruntime_node = JavaScript("onnxruntime-node", BIG, "node.mjs", "onnxruntime-node")
onnxruntime_web = JavaScript("onnxruntime-web", BIG, "node.mjs", "onnxruntime-web")
chromium = JavaScript("onnxruntime-web", BIG, "chromium.mjs")
