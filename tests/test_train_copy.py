"""train_copy.py: the recipe against its formulas, and the script as a learner runs it."""

import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import ragged, small_model

from train_copy import average, copy_batch, exact_match, learning_rate, loss, main
from transformer import load_checkpoint

ROOT = Path(__file__).parents[1]
SMALL = ["--d-model", "16", "--n-layers", "1", "--d-ff", "16", "--steps", "12", "--device", "cpu"]


def test_learning_rate_is_equation_3():
    for d_model, warmup_steps in ((512, 4000), (32, 400), (64, 1)):
        rates = {step: learning_rate(step, d_model, warmup_steps) for step in range(1, 3 * warmup_steps + 2)}
        for step, rate in rates.items():
            assert rate == pytest.approx(d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5))
        assert max(rates, key=rates.get) == warmup_steps  # the peak
        assert rates[1] > 0 and learning_rate(0, d_model, warmup_steps) > 0


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("n_padded", [0, 3, 10])
def test_loss_is_torchs_cross_entropy(smoothing, n_padded):
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 13, requires_grad=True)
    targets = torch.randint(1, 13, (2, 5))
    targets.flatten()[10 - n_padded :] = 0
    value = loss(logits, targets, pad_id=0, label_smoothing=smoothing)
    (grad,) = torch.autograd.grad(value, logits)
    if n_padded == 10:
        assert value == 0 and not grad.any()  # defined: nothing to learn from
        return
    flat = logits.flatten(0, 1), targets.flatten()
    expected = F.cross_entropy(*flat, ignore_index=0, label_smoothing=smoothing)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(grad, torch.autograd.grad(expected, logits)[0])


def test_logits_at_padding_change_no_loss():
    logits, targets = torch.randn(1, 3, 13), torch.tensor([[4, 2, 0]])
    before = loss(logits, targets, 0, 0.1)
    logits[0, 2] = 1e9
    assert loss(logits, targets, 0, 0.1) == before


def test_the_loss_is_stable_where_probabilities_vanish():
    value = loss(torch.tensor([[[0.0, 1e4, -1e4]]]), torch.tensor([[2]]), 0, 0.1)
    assert value.isfinite() and value == pytest.approx(0.9 * 2e4 + 0.1 * (1e4 + 0 + 2e4) / 3)


def test_the_gradient_of_a_batch_is_that_of_its_halves():
    model, src = small_model().double(), ragged([9, 6, 2, 1])
    tgt = torch.cat((torch.ones(4, 1, dtype=torch.int64), src), dim=1)

    def gradients(parts):
        model.zero_grad()
        for rows, width in parts:
            part = tgt[rows, : width + 1]
            value = loss(model(src[rows, :width], part[:, :-1]), part[:, 1:], 0, 0.1)
            (value * (part[:, 1:] != 0).sum()).backward()  # each mean, times what it is the mean of
        return {name: weight.grad.clone() for name, weight in model.named_parameters()}

    whole = gradients([(slice(0, 4), 9)])
    halves = gradients([(slice(0, 2), 9), (slice(2, 4), 2)])  # the second half needs less padding
    for name, grad in whole.items():
        torch.testing.assert_close(halves[name], grad, atol=1e-5, rtol=1e-5)


def test_copy_batch_is_what_it_says():
    config = small_model(pad_id=3, bos_id=0, eos_id=5).config
    src, tgt = copy_batch(config, 500, range(1, 8), torch.Generator().manual_seed(0))
    assert src.shape == (500, 8) and tgt.shape == (500, 9) and src.dtype == tgt.dtype == torch.int64
    lengths = set()
    for source, target in zip(src.tolist(), tgt.tolist(), strict=True):
        end = source.index(5)
        assert not {0, 3, 5} & set(source[:end]) and source[end + 1 :] == [3] * (7 - end)
        assert target == [0, *source]  # bos in training is bos in decoding
        lengths.add(end)
    assert lengths == set(range(1, 8))
    assert {*src.flatten().tolist()} == set(range(13)) - {0}


def test_average_is_the_mean():
    states = [small_model(seed).state_dict() for seed in range(3)]
    mean = average(states)
    for name in states[0]:
        torch.testing.assert_close(mean[name], (states[0][name] + states[1][name] + states[2][name]) / 3)
    model = small_model()
    model.load_state_dict(mean)
    assert model.projection.weight is model.src_embedding.weight


def test_exact_match_counts_whole_rows(monkeypatch):
    src = torch.tensor([[4, 5, 2], [4, 2, 0], [5, 2, 0], [6, 6, 2]])
    said = torch.tensor([[4, 5, 2], [4, 2, 0], [6, 2, 0], [6, 2, 0]])
    monkeypatch.setattr("train_copy.greedy_search", lambda model, src, max_len: said)
    assert exact_match(small_model(), src) == 0.5
    monkeypatch.setattr("train_copy.greedy_search", lambda model, src, max_len: said[:, :2])
    assert exact_match(small_model(), src) == 0.25  # only the row that needs no third id


# The script


def test_the_copy_task_is_learned_from_any_folder(trained):
    path, done = trained
    assert done.returncode == 0, done.stdout + done.stderr
    average_of, last = (
        float(re.search(rf"{words}.* (\S+)%", done.stdout)[1]) for words in ("average", "last step")
    )
    assert "PASSED" in done.stdout and average_of >= 99.9 and last <= 100
    assert re.search(r"step 320 of 1600: loss \S+, learning rate \S+, exact match \S+%", done.stderr)
    assert "\r" not in done.stderr  # plain lines where there is no terminal
    assert "copy.pt" in done.stdout and "next: python" in done.stdout
    readme = (
        (ROOT / "README.md").read_text(encoding="utf-8").split("<!-- output of: python train_copy.py -->")[1]
    )
    shapes = [re.sub(r"[\d.,]+(e-\d+)?", "#", line) for line in (done.stderr + done.stdout).splitlines()]
    for line in readme.split("```")[1].splitlines()[1:]:
        assert re.sub(r"[\d.,]+(e-\d+)?", "#", line) in shapes, line  # what README shows is what one sees
    saved = torch.load(path, weights_only=True)
    assert (saved["vocab_size"], saved["min_len"], saved["max_len"], saved["steps"]) == (36, 1, 20, 1600)
    model = load_checkpoint(path)
    assert model.config.n_layers >= 2 and model.config.src_vocab_size >= 33
    src, _ = copy_batch(model.config, 1000, range(1, 21), torch.Generator().manual_seed(12345))
    assert exact_match(model, src) >= 0.999


def test_same_seed_same_numbers(tmp_path):
    for name in ("one.pt", "two.pt"):
        assert main([*SMALL, "--out", str(tmp_path / name)]) == 1
    assert main([*SMALL, "--seed", "1", "--out", str(tmp_path / "other.pt")]) == 1
    one, two, other = (load_checkpoint(tmp_path / f"{n}.pt").state_dict() for n in ("one", "two", "other"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["projection.weight"], other["projection.weight"])


def test_a_missed_promise_is_said_with_its_numbers(tmp_path, capsys):
    assert main([*SMALL, "--out", str(tmp_path / "copy.pt")]) == 1
    out = capsys.readouterr().out
    assert re.search(r"FAILED: \d+\.\d+% is less than 99\.9%", out) and (tmp_path / "copy.pt").exists()


def test_a_compiled_run_writes_a_checkpoint_that_loads(tmp_path, monkeypatch):
    """Without generating C++, which the slow test does: what counts here is that names stay plain."""
    real = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: real(module, backend="aot_eager"))
    assert main([*SMALL, "--compile", "--out", str(tmp_path / "copy.pt")]) == 1
    load_checkpoint(tmp_path / "copy.pt")


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="there is no C++ compiler")
def test_a_run_compiled_to_c_plus_plus_writes_a_checkpoint_that_loads(tmp_path):
    assert main([*SMALL, "--compile", "--out", str(tmp_path / "copy.pt")]) == 1
    load_checkpoint(tmp_path / "copy.pt")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--d-model", "33"], ["d_model", "33", "even"]),
        (["--d-model", "x"], ["--d-model", "'x'", "int"]),
        (["--n-heads", "0"], ["n_heads", "0", "at least 1"]),
        (["--dropout", "1"], ["dropout", "1.0", "less than 1"]),
        (["--steps", "0"], ["steps", "0", "at least 1"]),
        (["--min-len", "0"], ["min_len", "0", "at least 1"]),
        (["--min-len", "5", "--max-len", "4"], ["max_len", "4", "at least 5"]),
        (["--vocab-size", "3"], ["vocab_size", "3", "at least 4"]),
        (["--device", "tpu"], ["--device", "tpu", "cuda"]),
        (["--out", "nowhere/copy.pt"], ["out", "nowhere", "exists"]),
        (["--out", "."], ["out", "'.'", "a file"]),
        (["--stpes", "10"], ["--stpes"]),
    ],
)
def test_a_bad_option_is_one_line_and_2(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    error = capsys.readouterr().err
    assert caught.value.code == 2 and error.count("\n") == 1 and not list(tmp_path.iterdir())
    for word in words:
        assert word in error


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_device_that_is_not_there_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--device", "cuda"])
    assert "device is 'cuda'" in capsys.readouterr().err


def test_help_shows_defaults_and_examples(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    out = capsys.readouterr().out
    assert caught.value.code == 0 and "python train_copy.py --seed 3" in out and "(default: copy.pt)" in out
