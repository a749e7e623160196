"""Rules of the house: who may import whom, how long a file may be, and that README says what is so."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CAPS = {"transformer.py": 340, "train_copy.py": 170, "export_onnx.py": 420, "run_onnx.py": 200}
ARROWS = {
    "transformer.py": {"torch"},
    "train_copy.py": {"torch", "tqdm", "transformer"},
}
FILES = sorted(ARROWS)
TOP_LEVEL = {
    *FILES, "tests", "docs", "examples", ".ci",
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


@pytest.mark.parametrize("name", FILES)
def test_a_file_stays_under_its_cap(name):
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= CAPS[name]


def test_the_top_level_holds_nothing_else():
    assert {Path(name).parts[0] for name in tracked() if name} == TOP_LEVEL


@pytest.mark.parametrize("name", FILES)
def test_public_functions_have_docstrings_and_types_and_no_assert(name):
    tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Assert)
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            if node.name != "checked":
                assert ast.get_docstring(node), node.name
            arguments = [
                arg
                for arg in node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                if arg.arg != "self"
            ]
            assert node.returns is not None and all(arg.annotation for arg in arguments), node.name


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


def test_readmes_symbols_exist():
    """The paper-to-code table names what is there."""
    source = "".join((ROOT / name).read_text(encoding="utf-8") for name in FILES)
    table = README.split("## The paper")[1].split("\n## ")[0]
    names = re.findall(r"`(\w+)`", table)
    assert len(names) > 12
    for name in names:
        assert re.search(rf"\b{name}\b", source), name
