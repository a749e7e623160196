"""The benchmark itself: its turns and ratios, its converters, its report; not what it measures."""

import importlib.util
import shutil

import engines
import pytest
import speed
import torch
from helpers import ragged, small_model

import export_onnx
from transformer import greedy_search, load_checkpoint, save_checkpoint


class Fake:
    """An engine that needs no process: it says how long it took."""

    def __init__(self, *seconds, ids=((7, 8), (9,))):
        self.seconds, self.ids = list(seconds), [list(row) for row in ids]

    def __call__(self, sources, max_len):
        return self.seconds.pop(0), self.ids


def test_ratios_are_of_the_same_round():
    running = dict(onnx=Fake(9, 1, 2, 4), pytorch=Fake(9, 3, 2, 16))
    timing = speed.take_turns(running, 3, [[1], [2]], 5, exact=True)
    assert timing.seconds == dict(onnx=[1, 2, 4], pytorch=[3, 2, 16])  # the first try warmed up
    assert timing.ratio("pytorch") == (3, 1, 4) and timing.median("onnx") == 2


def test_nothing_is_timed_before_all_give_the_same_ids():
    other = [(7, 8), (10,)]
    running = dict(onnx=Fake(1, 1), pytorch=Fake(1, 1, ids=other))
    with pytest.raises(SystemExit, match=r"same ids.*'pytorch': 0\.5"):
        speed.take_turns(running, 1, [[1], [2]], 5, exact=True)
    running = dict(onnx=Fake(1, 1), pytorch=Fake(1, 1, ids=other))  # int8 may differ; it is said how often
    assert speed.take_turns(running, 1, [[1], [2]], 5, exact=False).same == dict(onnx=1, pytorch=0.5)


def test_an_engine_that_breaks_down_is_named(tmp_path, capfd):
    engine = speed.Engine("onnx", tmp_path, "greedy", "float32", "cpu", 1)
    with pytest.raises(SystemExit, match="onnx broke down"):
        engine([[5, 6]], 3)
    engine.close()
    assert "greedy.onnx is no file" in capfd.readouterr().err


def test_copies_and_placement_are_read_from_the_profile(exported, tmp_path):
    graphs, _, model, _ = exported
    shutil.copytree(graphs, tmp_path / "float32")
    bench = speed.Bench(tmp_path, model.config, "cpu", 1, 1, [], tmp_path)
    greedy, beam = speed.placement(bench)[2:]
    assert greedy.startswith("| greedy.onnx | 0.00% | ") and beam.startswith("| beam.onnx | 0.00% | ")
    assert "MatMul" in greedy and "TopK" in beam  # on this provider all of them


def test_eos_is_fitted_so_that_answers_end_at_different_lengths():
    model, src = small_model(3, vocab_size=29, d_model=64, n_heads=4), ragged([6, 3, 1, 5], vocab_size=29)
    lengths = engines.teach_to_end(model, src, torch.tensor([2, 5, 8, 12]))
    tokens = greedy_search(model, src, 12)
    assert lengths == [int((row != 0).sum()) for row in tokens] and len(set(lengths)) > 1


@pytest.mark.parametrize("options", [["--rounds", "0"], ["--device", "cuda"], ["--only", "nothing"]])
def test_bad_options_are_one_line_and_2(options, capsys, monkeypatch):
    monkeypatch.setattr(speed.run_onnx, "why_no_cuda", lambda: "there is none")
    with pytest.raises(SystemExit) as stopped:
        speed.main(options)
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert options[0].strip("-") in line.lower()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, module, write",
    [
        ("ctranslate2", "ctranslate2", engines.to_ctranslate2),
        ("optimum", "optimum", engines.to_marian),
        ("pytorch", "torch", None),
        ("onnx", "onnxruntime", None),
    ],
)
def test_every_engine_decodes_as_the_model_does(trained, tmp_path, name, module, write):
    """The copy model: unlike a random one, it says something else at every step."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed: it is in the extra bench")
    model = load_checkpoint(trained[0])
    save_checkpoint(tmp_path / "model.pt", model)
    if name == "onnx":
        export_onnx.main([str(tmp_path / "model.pt"), "--out", str(tmp_path / "float32")])
    if write:
        write(model, tmp_path / name)
    sources = [[token, *range(5, 5 + token % 9), 2] for token in range(3, 36)]
    for search in ("greedy", "beam"):
        decode = engines.ENGINES[name](tmp_path, search, "float32", "cpu", 1)
        assert decode(sources, 20) == sources


@pytest.mark.slow
def test_the_report_is_written(tmp_path):
    options = ["--size", "small", "--rounds", "1", "--peers", "pytorch", "--out", str(tmp_path)]
    assert speed.main(options) == 0
    report = (tmp_path / "performance.md").read_text(encoding="utf-8")
    for title, _ in speed.PARTS.values():
        assert (f"## {title}\n" in report) == (title != "Copies and placement")
    assert (tmp_path / "performance.png").stat().st_size > 10_000
