"""examples/web and examples/node: a browser is clicked through, and the twelve lines are run.

Skipped where Node.js, its packages or Chromium are missing; REQUIRE_RUNTIMES=1 makes that a failure.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import export
from runtimes import javascript

import run_onnx

EXAMPLES = Path(__file__).parents[1] / "examples"
PICTURE = EXAMPLES.parent / "docs" / "web.png"
SOURCE = "5 6 7 8 9"


def node_modules(package: str) -> Path:
    try:
        javascript.installed(package)
    except OSError as error:
        (pytest.fail if os.environ.get("REQUIRE_RUNTIMES") == "1" else pytest.skip)(str(error))
    return javascript.FOLDER / "node_modules"


@pytest.fixture(scope="module")
def graphs(trained, tmp_path_factory) -> Path:
    """greedy.onnx and beam.onnx of the copy model."""
    folder = tmp_path_factory.mktemp("copy")
    assert export(trained[0], folder, "--graphs", "greedy", "beam")[0] == 0
    return folder


def answer(graph: Path, *options: str) -> tuple[str, str]:
    """What run_onnx.py prints, and what it complains of."""
    command = [sys.executable, run_onnx.__file__, str(graph), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout, done.stderr


def test_twelve_lines_of_node(graphs, tmp_path):
    (tmp_path / "node_modules").symlink_to(node_modules("onnxruntime-node"))
    script = shutil.copy(EXAMPLES / "node" / "greedy.mjs", tmp_path)
    assert len(Path(script).read_text(encoding="utf-8").splitlines()) <= 12
    command = ["node", script, str(graphs / "greedy.onnx"), *SOURCE.split(), "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == answer(graphs / "greedy.onnx", *SOURCE.split())[0] == f"{SOURCE} 2\n", done.stderr


@pytest.fixture(scope="module")
def saw(graphs, tmp_path_factory) -> dict:
    """What a person sees who clicks through the page, served by `python -m http.server` as README says."""
    modules, site = node_modules("onnxruntime-web"), tmp_path_factory.mktemp("site")
    try:
        browser = javascript.browser()
    except OSError as error:
        (pytest.fail if os.environ.get("REQUIRE_RUNTIMES") == "1" else pytest.skip)(str(error))
    shutil.copytree(
        EXAMPLES / "web", site / "examples" / "web", ignore=shutil.ignore_patterns("node_modules")
    )
    (site / "examples" / "web" / "node_modules").symlink_to(modules)
    (site / "onnx").symlink_to(graphs)
    command = [
        sys.executable,
        "-u",
        "-m",
        "http.server",
        "0",
        "--bind",
        "127.0.0.1",
        "--directory",
        str(site),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            port = server.stdout.readline().split(" port ")[1].split()[0]
            url = f"http://127.0.0.1:{port}/examples/web/"
            picture = PICTURE if os.environ.get("WRITE_RUNTIMES") == "1" else site / "web.png"
            click = ["node", str(javascript.FOLDER / "click.mjs"), browser, url, str(picture)]
            done = subprocess.run(click, capture_output=True, text=True, timeout=120)
        finally:
            server.terminate()
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_page_answers_as_run_onnx_does(saw, graphs):
    assert saw["problems"] == []
    assert saw["loaded"].startswith("greedy.onnx: ") and saw["beamLoaded"].startswith("beam.onnx: ")
    assert [" ".join(ids) for ids in saw["greedy"]["answers"]] == [f"{SOURCE} 2", "11 12 2"]
    assert " ms a token" in saw["greedy"]["status"] and saw["greedy"]["wrong"] == ""
    assert [" ".join(ids) for ids in saw["short"]["answers"]] == ["5 6"]
    lines = [
        line.split("\t") for line in answer(graphs / "beam.onnx", *SOURCE.split())[0].split("\n") if line
    ]
    assert [" ".join(cells[1:]) for cells in saw["beam"]["answers"]] == [ids for _, ids in lines]
    scores = [float(cells[0]) for cells in saw["beam"]["answers"]]
    assert scores == pytest.approx([float(score) for score, _ in lines], abs=2e-4)
    assert scores == sorted(scores, reverse=True) and len(scores) == 4
    assert saw["metadata"] == run_onnx.metadata(run_onnx.load(graphs / "beam.onnx"))


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("outside", ["5", "99"]),
        ("word", ["5", "x"]),
        ("zero", ["5", "6", "--max-len", "0"]),
        ("nothing", [""]),
    ],
)
def test_the_page_complains_as_run_onnx_does(saw, graphs, key, options):
    error = answer(graphs / "greedy.onnx", *options)[1]
    assert saw[key]["wrong"] == "wrong"
    assert error.endswith(f"error: {saw[key]['status']}\n") and saw[key]["status"]


def test_the_page_refuses_what_is_no_graph(saw):
    assert "mine.onnx" in saw["noGraph"] or "no ONNX file" in saw["noGraph"]
