"""The same files in other runtimes: the same work for all, in one session a graph, against PyTorch.

A runtime that isn't installed is skipped; REQUIRE_RUNTIMES=1 makes that a failure for those that CI has.
WRITE_RUNTIMES=1 writes docs/runtimes.md from what was found. What each needs: docs/runtimes.md.
"""

import importlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from conftest import export
from helpers import ending_model, ragged
from runtimes import onnx_runtime

from export_onnx import TOLERANCE, difference
from transformer import Transformer, beam_search, greedy_search, save_checkpoint

DOCUMENT = Path(__file__).parents[1] / "docs" / "runtimes.md"
Run = Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]  # a driver's load(path) gives one


class Runtime(NamedTuple):
    module: str  # of tests/runtimes/
    driver: str = ""  # a name in it, where it holds several
    forced: bool = True  # by REQUIRE_RUNTIMES


RUNTIMES = {
    "ONNX Runtime, Python": Runtime("onnx_runtime"),
    "onnx ReferenceEvaluator": Runtime("reference"),
    "OpenVINO": Runtime("open_vino"),
    "MNN": Runtime("mnn"),
    "OpenCV": Runtime("open_cv"),
    "tract": Runtime("tract_rs"),
    "tinygrad": Runtime("tiny_grad", forced=False),  # minutes, and needs clang
    "ONNX Runtime, Node.js": Runtime("javascript", "onnxruntime_node"),
    "ONNX Runtime Web, Node.js": Runtime("javascript", "onnxruntime_web"),
    "ONNX Runtime Web, Chromium": Runtime("javascript", "chromium"),
}
DTYPES = {"float32": (), "int8": ("--int8",), "float16": ("--dtype", "float16")}
REFUSALS = [  # (runtime, works, dtypes, its words, or ours if it is wrong)
    ("MNN", "forward, encoder + decoder, greedy, beam", "int8", "the converter ended with -11"),
    ("OpenCV", "forward, encoder + decoder, greedy, beam", "float16", "scale must match input type"),
    ("tract", "forward", "float32, int8", "Undetermined symbol in expression"),
    ("tract", "forward, encoder + decoder", "float16", "Output mismatch after rewiring expansion"),
    ("tract", "greedy, beam", "float32, int8, float16", "Unimplemented(Loop)"),
    ("tinygrad", "greedy, beam", "float32, int8, float16", "op='Loop' is not supported"),
]
REFUSED = {
    (runtime, work, dtype): words
    for runtime, works, dtypes, words in REFUSALS
    for work in works.split(", ")
    for dtype in dtypes.split(", ")
}


# The work


def forward(load: Callable[[str], Run], model: Transformer) -> Iterator[tuple]:
    """Batch and both lengths change from call to call; sources are ragged, one is padding only."""
    run = load("forward")
    for lengths, tgt_len in [
        ([1], 1),
        ([7, 3], 5),
        ([2, 0, 9], 8),
        ([13, *range(7)], 6),
        ([64], 70),
        ([1], 1),
    ]:
        src, tgt = source(model, lengths), source(model, [tgt_len] * len(lengths))
        logits = run({"src": src.numpy(), "tgt": tgt.numpy()})["logits"]
        with torch.no_grad():  # never around a yield: it would hold for whoever runs in between
            expected = model(src, tgt).numpy()
        yield "logits", logits, expected


def stepping(load: Callable[[str], Run], model: Transformer) -> Iterator[tuple]:
    """From an empty past through lengths 1 to 40, again, then other batches and several ids a step.

    OpenVINO gave wrong numbers from key length 16 on after a first inference of length 1, where no mask
    stood between the product and the softmax.
    """
    encoder, decoder = load("encoder"), load("decoder")
    for lengths, sizes in [([7, 4], [1] * 40), ([7, 4], [1] * 40), ([1, 9, 0], [5, 1, 3, 1]), ([3], [17, 1])]:
        src, tgt = source(model, lengths), source(model, [sum(sizes)] * len(lengths))
        with torch.no_grad():
            expected = model(src, tgt).numpy()
        values, start = {"src": src.numpy(), **encoder({"src": src.numpy()})}, 0
        for size in sizes:
            outputs = decoder(values | {"tgt": tgt[:, start : start + size].numpy()})
            yield "logits", outputs.pop("logits"), expected[:, start : start + size]
            values |= {name.replace("present_", "past_"): value for name, value in outputs.items()}
            start += size


SEARCHES = [
    ([5], 1),
    ([5, 2, 8], 12),
    ([1], 2),
    ([6, 0, 3, 9, 4], 40),
    ([2], 40),
    ([5], 1),
]  # lengths, max_len


def greedy(load: Callable[[str], Run], model: Transformer) -> Iterator[tuple]:
    run = load("greedy")
    for lengths, max_len in SEARCHES:
        src = source(model, lengths)
        outputs = run({"src": src.numpy(), "max_len": np.array(max_len)})
        yield "tokens", outputs["tokens"], greedy_search(model, src, max_len).numpy()


def beam(load: Callable[[str], Run], model: Transformer) -> Iterator[tuple]:
    run = load("beam")
    for lengths, max_len in SEARCHES:
        src = source(model, lengths)
        outputs = run({"src": src.numpy(), "max_len": np.array(max_len)})
        tokens, scores = (output.numpy() for output in beam_search(model, src, max_len))
        yield "tokens", outputs["tokens"], tokens
        yield "scores", outputs["scores"], scores


WORK = {"forward": forward, "encoder + decoder": stepping, "greedy": greedy, "beam": beam}


def source(model: Transformer, lengths: list[int]) -> torch.Tensor:
    """Ragged random sources with this model's special ids."""
    config = model.config
    src = ragged(lengths, config.src_vocab_size - 3, seed=sum(lengths)) + 3
    src[src == 2 + 3] = config.eos_id
    src[src == 0 + 3] = config.pad_id
    return src


def largest_difference(pairs: Iterator[tuple], dtype: str) -> float:
    """AssertionError where it is too much, or tokens differ."""
    farthest = 0.0
    for what, output, expected in pairs:
        assert output.shape == expected.shape, what
        if what == "tokens":
            np.testing.assert_array_equal(output, expected)
        else:
            farthest = max(farthest, difference(output, expected, relative=dtype != "float32"))
    assert farthest <= TOLERANCE[dtype], f"differs by {farthest:.1e}"
    return farthest


# Who does it


@pytest.fixture(scope="session")
def model() -> Transformer:
    """Random, with unusual special ids, and an eos that it likes to say."""
    return ending_model(0, spread=1.2, vocab_size=29, pad_id=3, bos_id=5)


@pytest.fixture(scope="session")
def files(model, tmp_path_factory) -> Callable[[str], Path]:
    """-> folder of all five graphs of this dtype."""
    folders, checkpoint = {}, tmp_path_factory.mktemp("runtimes") / "model.pt"
    save_checkpoint(checkpoint, model)

    def folder(dtype: str) -> Path:
        if dtype not in folders:
            folders[dtype] = checkpoint.parent / dtype
            assert export(checkpoint, folders[dtype], *DTYPES[dtype])[0] == 0
        return folders[dtype]

    return folder


@pytest.fixture(scope="session")
def found() -> Iterator[dict]:
    """(runtime, work, dtype) -> the largest difference, or the error's text; written down in the end."""
    results: dict[tuple[str, str, str], float | str] = {}
    yield results
    if os.environ.get("WRITE_RUNTIMES") == "1":
        DOCUMENT.write_text(document(results), encoding="utf-8")


def driver_of(title: str):
    """The driver, or skip; fail where this runtime must be there."""
    runtime = RUNTIMES[title]
    try:
        driver = importlib.import_module(f"runtimes.{runtime.module}")
        driver = getattr(driver, runtime.driver) if runtime.driver else driver
        installed(driver)
        return driver
    except (ImportError, OSError) as error:
        if runtime.forced and os.environ.get("REQUIRE_RUNTIMES") == "1":
            pytest.fail(f"{title} is missing: {error}")
        pytest.skip(f"{title} is not installed: {error}")


def installed(driver) -> tuple[str, int]:
    """-> version and bytes of its package."""
    if hasattr(driver, "installed"):
        return driver.installed()
    package = importlib.metadata.distribution(driver.PACKAGE)
    paths = map(Path, map(package.locate_file, package.files or []))
    return package.version, sum(path.stat().st_size for path in paths if path.is_file())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("title", RUNTIMES)
def test_it_does_the_work(title, work, dtype, files, model, found):
    """float32 as PyTorch does; int8 and float16, which round, as ONNX Runtime, on which they were proved."""
    driver, folder, key = driver_of(title), files(dtype), (title, work, dtype)

    def done_by(runtime) -> Iterator[tuple]:
        return WORK[work](lambda name: runtime.load(folder / f"{name}.onnx"), model)

    def pairs() -> Iterator[tuple]:
        if dtype == "float32":
            yield from done_by(driver)
        else:
            for (what, output, _), (_, other, _) in zip(done_by(driver), done_by(onnx_runtime), strict=True):
                yield what, output, other

    if key in REFUSED:
        with pytest.raises(Exception, match=re.escape(REFUSED[key])) as refusal:  # if it doesn't: good news
            largest_difference(pairs(), dtype)
        found[key] = " ".join(str(refusal.value).split("Stack backtrace")[0].split())
    else:
        found[key] = largest_difference(pairs(), dtype)


def test_the_work_ends_early_too(model):
    """In some searches all rows have eos before max_len, in some they don't."""
    for search in (greedy_search, lambda *work: beam_search(*work)[0]):
        widths = [(search(model, source(model, lengths), n).size(-1), n) for lengths, n in SEARCHES if n > 2]
        assert any(width < n for width, n in widths) and any(width == n for width, n in widths), widths


# docs/runtimes.md

INTRODUCTION = """# The graphs in other runtimes

Written by `WRITE_RUNTIMES=1 make runtimes` on {date}, Python {python}, {platform}: do not edit.
Each runtime does the same work, in one session or compiled model a graph, with batches and lengths that
change from call to call: the teacher-forced model; encoder and decoder stepped from an empty past through
length 1 to 40 and again from empty; greedy and beam search, with ragged padding and rows that end before
max_len. In float32 tokens are equal to PyTorch's and numbers within 1e-4. In int8 and float16, which round,
tokens are equal to those of ONNX Runtime in Python, where the exporter proved the same files.

"""
COLUMNS = ("runtime", "version", "size", *WORK, "int8", "float16", "largest difference")


def document(found: dict) -> str:
    rows, notes, refusals = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"], [], {}
    for title in RUNTIMES:
        mine = {key[1:]: result for key, result in found.items() if key[0] == title}
        if not mine:
            continue
        driver = driver_of(title)
        version, size = installed(driver)

        def cell(dtype: str, *works: str, mine=mine, title=title) -> str:
            refused = [work for work in works if isinstance(mine.get((work, dtype)), str)]
            for work in refused:
                refusal = refusals.setdefault((title, REFUSED[title, work, dtype]), ([], mine[work, dtype]))
                refusal[0].append(f"{work}, {dtype}")
            done = [work for work in works if isinstance(mine.get((work, dtype)), float)]
            return "yes" if len(done) == len(works) else ", ".join(done) or ("no" if refused else "-")

        cells = [cell("float32", work) for work in WORK] + [
            cell(dtype, *WORK) for dtype in ("int8", "float16")
        ]
        farthest = max(
            (d for (_, t), d in mine.items() if t == "float32" and isinstance(d, float)), default=None
        )
        cells.append("-" if farthest is None else f"{farthest:.1e}")
        rows.append(f"| {title} | {driver.PACKAGE} {version} | {size / 1e6:.0f} MB | {' | '.join(cells)} |")
        notes.append(f"- **{title}**: {driver.NOTES}.")
    text = INTRODUCTION.format(
        date=date.today(), python=sys.version.split()[0], platform=sys.platform
    ) + "\n".join(rows)
    text += (
        "\n\n" + "Size: the package alone, as installed. Largest difference: of float32 logits and scores.\n"
    )
    text += "\n## Notes\n\n" + "\n".join(notes) + "\n"
    if refusals:
        text += "\n## What is refused\n\nTested to be refused still, so that we notice when it changes.\n\n"
        text += "".join(
            f"- **{title}** ({'; '.join(works)}): `{error[:300]}`\n"
            for (title, _), (works, error) in refusals.items()
        )
    return text
