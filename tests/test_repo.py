"""Rules of the house: who may import whom, how long a file may be, and that README says what is so."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import nodes_of

ROOT = Path(__file__).parents[1]
CAPS = {"transformer.py": 340, "train_copy.py": 170, "export_onnx.py": 730, "run_onnx.py": 255}
ARROWS = {
    "transformer.py": {"torch"},
    "train_copy.py": {"torch", "tqdm", "transformer"},
    "run_onnx.py": {"numpy", "onnxruntime", "torch", "transformer"},  # the last two inside check alone
    "export_onnx.py": {
        "torch",
        "numpy",
        "onnx",
        "onnx_ir",
        "onnxruntime",
        "onnxscript",
        "tqdm",
        "transformer",
        "run_onnx",
    },
}
FILES = sorted(ARROWS)
TOP_LEVEL = {
    *FILES, "bench", "tests", "docs", "examples", ".ci",
    "README.md", "LICENSE", "Makefile", "pyproject.toml", "constraints.txt", ".gitignore",
}  # fmt: skip


def tracked() -> list[str]:
    return subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("name", FILES)
def test_imports_run_up_the_list_only(name):
    assert imports(ROOT / name) - sys.stdlib_module_names == ARROWS[name]


def test_run_onnx_imports_torch_in_its_check_alone():
    top = ast.parse((ROOT / "run_onnx.py").read_text(encoding="utf-8")).body
    names = {alias.name for node in top if isinstance(node, ast.Import) for alias in node.names}
    assert not names & {"torch", "onnx", "transformer"} and not [
        n for n in top if isinstance(n, ast.ImportFrom) and n.module == "transformer"
    ]


@pytest.mark.parametrize("name", FILES)
def test_a_file_stays_under_its_cap(name):
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= CAPS[name]


def test_the_top_level_holds_nothing_else():
    assert {Path(name).parts[0] for name in tracked() if name} == TOP_LEVEL


@pytest.mark.parametrize("name", FILES)
def test_public_functions_have_docstrings_and_types_and_no_assert(name):
    tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    for node in (item for holder in (tree, *classes) for item in holder.body):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            arguments = [arg for arg in node.args.args + node.args.kwonlyargs if arg.arg != "self"]
            assert ast.get_docstring(node) and node.returns, node.name
            assert all(arg.annotation for arg in arguments), node.name


def test_the_architecture_is_built_from_scratch():
    source = (ROOT / "transformer.py").read_text(encoding="utf-8")
    for shortcut in (
        "nn.Transformer",
        "nn.MultiheadAttention",
        "scaled_dot_product_attention",
        "flex_attention",
    ):
        assert shortcut not in source


# README


README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_readme_is_short_and_its_files_exist():
    assert len(README.splitlines()) < 150
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target


def test_readmes_python_runs(tmp_path, monkeypatch):
    """In order, in one namespace, as a reader would paste it."""
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for block in blocks("python"):
        exec(block, namespace)
    assert len(blocks("python")) >= 3
    assert namespace["classes"].shape == (2, 5) and namespace["next_ids"].shape == (2, 3, 37)


def test_readmes_shell_commands_run(tmp_path, exported):
    """Those about ONNX, on the graphs and the checkpoint of the other tests."""
    lines = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("python ")]
    assert len(lines) >= 4
    for line in lines:
        words = line.split("#")[0].split("<")[0].split()
        names = {"onnx": exported[0], "copy.pt": exported[1]}
        names |= {f"onnx/{kind}.onnx": exported[0] / f"{kind}.onnx" for kind in ("greedy", "beam")}
        command = [sys.executable, str(ROOT / words[1]), *(str(names.get(word, word)) for word in words[2:])]
        if words[1] == "export_onnx.py":
            command += ["--graphs", "encoder"]  # all of them stand in the fixture already
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, input="5 6 7\n8 9\n")
        assert done.returncode == 0, (line, done.stderr)


def test_readmes_symbols_exist():
    """The paper-to-code table names what is there."""
    source = "".join((ROOT / name).read_text(encoding="utf-8") for name in FILES)
    table = README.split("## The paper")[1].split("\n## ")[0]
    names = re.findall(r"`(\w+)`", table)
    assert len(names) > 12
    for name in names:
        assert re.search(rf"\b{name}\b", source), name


def test_the_operators_in_docs_are_those_in_the_graphs(exported):
    onnx = pytest.importorskip("onnx")
    documented = re.search(
        r"(\d+) operators: (.*?)\.\n", (ROOT / "docs" / "onnx.md").read_text(encoding="utf-8"), re.DOTALL
    )
    graphs = [onnx.load(path).graph for path in exported[0].glob("*.onnx")]
    found = {node.op_type for graph in graphs for node in nodes_of(graph)}
    assert set(re.findall(r"\w+", documented[2])) == found and int(documented[1]) == len(found)
