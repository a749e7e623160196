"""run_onnx.py: what it finds equals PyTorch, and what it is given wrong it refuses."""

import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import run_onnx
from run_onnx import load, load_search, main, pad, search
from transformer import beam_search, greedy_search

ROOT = Path(__file__).parents[1]
FACTS = {"src_vocab_size": "29", "pad_id": "3"}  # of the graphs exported for the tests
needs_cuda = pytest.mark.skipif(
    not os.environ.get("REQUIRE_CUDA") and run_onnx.why_no_cuda() is not None,
    reason=f"no CUDA here: {run_onnx.why_no_cuda()}",
)


def sources(n_rows: int, longest: int = 20, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 29, rng.integers(1, longest + 1)).tolist() for _ in range(n_rows)]


@pytest.mark.parametrize("graph", ["", "greedy.onnx"])
def test_greedy_is_pytorchs_greedy_on_200_sources(exported, graph):
    folder, _, model, _ = exported
    sessions = load_search(folder / graph)
    for start in range(10):
        src = pad(sources(20, seed=start), FACTS)
        for max_len in (1, 2, 30):
            expected = greedy_search(model, torch.from_numpy(src), max_len).numpy()
            np.testing.assert_array_equal(search(sessions, src, max_len)[0], expected)


def test_pad_takes_lists_and_arrays():
    batch = sources(3)
    src = pad(batch, FACTS)
    assert src.dtype == np.int64 and [[i for i in row if i != 3] for row in src.tolist()] == [
        [i for i in row if i != 3] for row in batch
    ]
    np.testing.assert_array_equal(pad(src.astype(np.int32), FACTS), src)


def test_several_new_ids_after_any_past_equal_forward(exported):
    """C17, A10: prefixes in one step, from the empty past that the encoder returns and from a longer one."""
    folder, _, model, _ = exported
    encoder, decoder = load_search(folder)
    src = pad(sources(3), run_onnx.metadata(encoder))
    tgt = np.random.default_rng(1).integers(0, 29, (3, 21))
    with torch.no_grad():
        expected = model(torch.from_numpy(src), torch.from_numpy(tgt)).numpy()
    for chunks in ([21], [4, 17], [1] * 21, [6, 1, 3, 11]):
        values = {"src": src, **run_onnx.bind_and_run(encoder, {"src": src})}
        logits, start = [], 0
        for n_new in chunks:
            values["tgt"] = np.ascontiguousarray(tgt[:, start : start + n_new])
            outputs = run_onnx.bind_and_run(decoder, values)
            logits.append(outputs.pop("logits").numpy())
            values |= {name.replace("present_", "past_"): value for name, value in outputs.items()}
            start += n_new
        np.testing.assert_allclose(np.concatenate(logits, axis=1), expected, atol=1e-4, rtol=0)


def test_bound_equals_unbound_for_64_steps(exported):
    """C2: the same loop with plain feeds."""
    encoder, decoder = load_search(exported[0])
    facts = run_onnx.metadata(encoder)
    src = pad(sources(4), facts)
    names = [output.name for output in encoder.get_outputs()]
    values = {"src": src, **dict(zip(names, encoder.run(None, {"src": src}), strict=True))}
    tokens = np.full((4, 1), int(facts["bos_id"]))
    for _ in range(64):
        values["tgt"] = tokens[:, -1:].copy()
        names = [output.name for output in decoder.get_outputs()]
        outputs = dict(
            zip(names, decoder.run(None, {i.name: values[i.name] for i in decoder.get_inputs()}), strict=True)
        )
        ended = (tokens == int(facts["eos_id"])).any(axis=1)
        token = np.where(ended, int(facts["pad_id"]), outputs.pop("logits")[:, -1].argmax(-1))
        tokens = np.concatenate((tokens, token[:, None]), axis=1)
        values |= {name.replace("present_", "past_"): value for name, value in outputs.items()}
    (bound,) = search((encoder, decoder), src, 64)
    np.testing.assert_array_equal(bound, tokens[:, 1 : 1 + bound.shape[1]])


@pytest.mark.parametrize("graph", ["", "beam.onnx"])
def test_memory_stands_still_over_500_decodes(exported, graph):
    """C8: random lengths, the same sessions."""
    resource = pytest.importorskip("resource", reason="this system has no resource module")
    sessions, rng = load_search(exported[0] / graph), np.random.default_rng(0)
    for number in range(500):
        search(sessions, rng.integers(0, 29, (2, rng.integers(1, 60))), int(rng.integers(1, 6)))
        if number == 100:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 1.05 * before


def test_neither_torch_nor_onnx_is_needed(exported, tmp_path):
    """Nor anything else but numpy and onnxruntime, from any folder."""
    code = (
        "import sys\n"
        "for name in ('torch', 'onnx', 'onnx_ir', 'onnxscript', 'google.protobuf', 'tqdm'):\n"
        "    sys.modules[name] = None\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "import run_onnx\n"
        f"sys.exit(run_onnx.main([{str(exported[0])!r}, '5', '6', '7', '--max-len', '4']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "sources: 1; greedy search on CPUExecutionProvider\n"


# The command line


def test_ids_go_in_and_ids_come_out(exported, monkeypatch, capsys):
    folder, _, model, _ = exported
    assert main([str(folder), "7", "8", "9", "--max-len", "6"]) == 0
    expected = greedy_search(model, torch.tensor([[7, 8, 9, 4]]), 6)[0].tolist()  # eos, 4, is appended
    assert capsys.readouterr().out.split() == [str(token) for token in expected if token != 3]
    monkeypatch.setattr("sys.stdin", io.StringIO("7 8 9\n11 4\n"))
    assert main([str(folder), "--max-len", "6", "--raw"]) == 0
    lines = capsys.readouterr().out.splitlines()
    expected = greedy_search(model, torch.tensor([[7, 8, 9], [11, 4, 3]]), 6).tolist()
    assert [list(map(int, line.split())) for line in lines] == [
        [t for t in row if t != 3] for row in expected
    ]


def test_beam_prints_the_n_best_with_scores(exported, capsys):
    folder, _, model, _ = exported
    assert main([str(folder / "beam.onnx"), "7", "8", "9", "--max-len", "6"]) == 0
    tokens, scores = beam_search(model, torch.tensor([[7, 8, 9, 4]]), 6)
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert lines.pop() == [""] and len(lines) == 4
    for (score, ids), expected, row in zip(lines, scores[0].tolist(), tokens[0].tolist(), strict=True):
        assert abs(float(score) - expected) < 1e-3 and ids.split() == [str(t) for t in row if t != 3]


@pytest.mark.parametrize("graph", ["", "greedy.onnx", "beam.onnx"])
def test_many_sources_are_answered_in_the_order_of_the_input(exported, graph, monkeypatch, capsys):
    """350 in batches of 3, more than one window: each answer is that of its source alone."""
    batch = sources(350, seed=3)
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(" ".join(map(str, ids)) + "\n" for ids in batch)))
    assert main([str(exported[0] / graph), "--max-len", "7", "--batch", "3", "--raw"]) == 0
    found = capsys.readouterr().out.split("\n\n" if graph == "beam.onnx" else "\n")[:-1]
    sessions = load_search(exported[0] / graph)
    for ids, text in zip(batch, found, strict=True):
        if set(ids) != {3}:  # padding alone has no meaning
            alone = run_onnx.answers(3, *search(sessions, pad([ids], FACTS), 7))[0]
            assert [line.split("\t")[-1] for line in text.splitlines()] == [
                line.split("\t")[-1] for line in alone.splitlines()
            ]


def test_a_terminal_sees_how_far_it_is(exported, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("5 6\n" * 100))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert main([str(exported[0] / "greedy.onnx"), "--max-len", "3"]) == 0
    assert f"\r[{'#' * 40}] 100 of 100" in capsys.readouterr().err


def test_a_search_runs_alone_and_under_another_name(exported, tmp_path):
    path = tmp_path / "renamed.onnx"
    path.write_bytes((exported[0] / "beam.onnx").read_bytes())
    assert main([str(path), "7", "8", "--max-len", "5", "--check", str(exported[1])]) == 0


@pytest.mark.parametrize(
    "graph, words",
    [("", "; float32 logits differ"), ("greedy.onnx", ""), ("beam.onnx", "; float32 scores differ")],
)
def test_check_and_time_say_what_they_found(exported, graph, words, capsys):
    folder, checkpoint, _, _ = exported
    arguments = ["7", "8", "--max-len", "6", "--check", str(checkpoint), "--time", "2"]
    assert main([str(folder / graph), *arguments]) == 0
    out = capsys.readouterr().out
    assert f"tokens are equal to PyTorch's{words}" in out
    assert "tokens/s; 2 runs after 3, batches of 1" in out


def test_check_fails_with_another_checkpoint(exported, tmp_path, capsys):
    from helpers import small_model

    from transformer import save_checkpoint

    other = small_model(7, spread=1.2, vocab_size=29, pad_id=3, bos_id=5, eos_id=4)
    save_checkpoint(tmp_path / "other.pt", other)
    assert main([str(exported[0]), "7", "8", "--max-len", "6", "--check", str(tmp_path / "other.pt")]) == 1
    assert "DIFFER" in capsys.readouterr().out


def broken(folder, tmp_path):
    """A folder with each kind of bad encoder."""
    for name in ("truncated", "foreign", "swapped", "text"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "decoder.onnx").write_bytes((folder / "decoder.onnx").read_bytes())
    whole = (folder / "encoder.onnx").read_bytes()
    (tmp_path / "truncated" / "encoder.onnx").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text" / "encoder.onnx").write_text("not a graph")
    (tmp_path / "swapped" / "encoder.onnx").write_bytes((folder / "forward.onnx").read_bytes())
    proto = onnx.load(folder / "encoder.onnx")
    del proto.metadata_props[:]
    onnx.save(proto, tmp_path / "foreign" / "encoder.onnx")


@pytest.mark.parametrize(
    "arguments, stdin, words",
    [
        (["ONNX", "29"], "", ["29", "0 to 28"]),
        (["ONNX", "--", "-1"], "", ["-1", "0 to 28"]),
        (["ONNX", "1.5"], "", ["1.5", "integers"]),
        (["ONNX", "x"], "", ["'x'", "integers"]),
        (["ONNX"], "", ["no source", "standard input"]),
        (["ONNX"], "5 6\n\n7\n", ["line 2", "integers"]),
        (["ONNX"], "5 6\n5 x\n", ["line 2", "'5 x'"]),
        (["ONNX", "5", "--max-len", "0"], "", ["max_len", "0", "at least 1"]),
        (["ONNX", "5", "--provider", "tpu"], "", ["tpu", "cuda"]),
        (["ONNX", "5", "--check", "nowhere.pt"], "", ["nowhere.pt"]),
        (["ONNX/decoder.onnx", "5"], "", ["decoder.onnx", "another kind, decoder", "greedy or beam"]),
        (["ONNX/beam.onnx", "29"], "", ["29", "0 to 28"]),
        (["ONNX/beam.onnx", "5", "--max-len", "0"], "", ["max_len", "0", "at least 1"]),
        (["ONNX", "5", "--batch", "0"], "", ["--batch", "0", "at least 1"]),
        (["nowhere", "5"], "", ["encoder.onnx", "export_onnx.py"]),
        (["nowhere/beam.onnx", "5"], "", ["nowhere", "beam.onnx is no file", "export_onnx.py"]),
        (["truncated", "5"], "", ["encoder.onnx", "can't be loaded"]),
        (["text", "5"], "", ["encoder.onnx", "can't be loaded"]),
        (["swapped", "5"], "", ["another kind", "forward"]),
        (["foreign", "5"], "", ["another kind", "without our metadata"]),
    ],
)
def test_bad_input_is_one_line_and_2(exported, arguments, stdin, words, tmp_path, monkeypatch, capsys):
    broken(exported[0], tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
    with pytest.raises(SystemExit) as caught:
        main([argument.replace("ONNX", str(exported[0])) for argument in arguments])
    error = capsys.readouterr().err
    assert caught.value.code == 2 and len(error.splitlines()[-1]) < 500
    assert error.count("\n") == 1 + ("--check" in arguments), error  # the answer stands before a failed check
    for word in words:
        assert word in error


@pytest.mark.parametrize(
    "bad", [[[1.5]], [["5"]], [[]], [], np.array([[0.5]]), np.zeros((0, 3), dtype=np.int64)]
)
def test_pad_refuses_what_are_no_ids(bad):
    with pytest.raises(ValueError, match=r"id|empty"):
        pad(bad, FACTS)


# CUDA


def refused(monkeypatch, capsys, exported) -> str:
    with pytest.raises(SystemExit) as caught:
        main([str(exported[0]), "5", "--provider", "cuda"])
    error = capsys.readouterr().err
    assert caught.value.code == 2 and error.count("\n") == 1 and "CUDA can't be had" in error
    return error


@pytest.mark.skipif(run_onnx.why_no_cuda() is None, reason="this machine has CUDA")
def test_cuda_that_is_not_there_is_never_replaced(monkeypatch, capsys, exported):
    assert "pip" in refused(monkeypatch, capsys, exported)


class Wheel:
    def __init__(self, name):
        self.metadata = {"Name": name}


def test_each_reason_has_its_line(monkeypatch, capsys, exported):
    """The CPU wheel, both wheels, no driver, missing libraries: told apart, each with what mends it."""
    only = lambda *names: monkeypatch.setattr("importlib.metadata.distributions", lambda: map(Wheel, names))  # noqa: E731
    only("onnxruntime", "onnxruntime-gpu")
    assert "both installed" in refused(monkeypatch, capsys, exported)
    only("onnxruntime")
    monkeypatch.setattr(run_onnx.ort, "get_available_providers", lambda: ["CPUExecutionProvider"])
    assert "for CPUs only" in refused(monkeypatch, capsys, exported)
    only("onnxruntime-gpu")
    monkeypatch.setattr(
        run_onnx.ort, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
    )

    def no_driver(name):
        raise OSError("no such library")

    monkeypatch.setattr(run_onnx.ctypes, "CDLL", no_driver)
    assert "no NVIDIA GPU" in refused(monkeypatch, capsys, exported)
    monkeypatch.setattr(run_onnx.ctypes, "CDLL", lambda name: None)
    monkeypatch.setattr(run_onnx.ort, "preload_dlls", lambda: None, raising=False)
    if "CUDAExecutionProvider" not in run_onnx.ort.get_all_providers() or run_onnx.why_no_cuda() is None:
        real = run_onnx.Session
        monkeypatch.setattr(
            run_onnx,
            "Session",
            lambda path, options, providers: real(path, options, ["CPUExecutionProvider"]),
        )
        assert "libraries are missing" in refused(monkeypatch, capsys, exported)


@needs_cuda
def test_cuda_equals_pytorch(exported):
    folder, _, model, _ = exported
    for tf32 in (False, True):
        sessions = load_search(folder, "cuda", 0, tf32)
        assert all(session.get_providers()[0] == "CUDAExecutionProvider" for session in sessions)
        for seed in range(5):
            batch = sources(20, seed=seed)
            src = torch.from_numpy(pad(batch, run_onnx.metadata(sessions[0])))
            np.testing.assert_array_equal(
                search(sessions, pad(batch, FACTS), 30)[0], greedy_search(model, src, 30).numpy()
            )
    loaded = load(folder / "forward.onnx", "cuda", tf32=False)
    src, tgt = pad(sources(4), run_onnx.metadata(loaded)), np.random.default_rng(0).integers(0, 29, (4, 17))
    with torch.no_grad():
        expected = model(torch.from_numpy(src), torch.from_numpy(tgt)).numpy()
    np.testing.assert_allclose(loaded.run(None, {"src": src, "tgt": tgt})[0], expected, atol=1e-4, rtol=0)
