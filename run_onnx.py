"""Run the graphs of export_onnx.py on ONNX Runtime: ids in, ids out. Needs numpy and onnxruntime alone.

usage: python run_onnx.py GRAPH [IDS ...] [options]

GRAPH is greedy.onnx, beam.onnx, or the folder of encoder.onnx and decoder.onnx. A source is given as
arguments, or one a line on standard input; eos is appended where it is missing, as in training. An answer
is one line; of beam.onnx one a hypothesis, score and ids, the best first, then an empty line.

examples:
  python run_onnx.py onnx/beam.onnx 5 6 7
  python run_onnx.py onnx/greedy.onnx --max-len 30 < sources.txt
  python run_onnx.py onnx 5 6 7 --provider cuda --check copy.pt
"""

import argparse
import ctypes
import importlib.metadata
import sys
import timeit
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime as ort

Session = ort.InferenceSession
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


def why_no_cuda() -> str | None:
    """What keeps ONNX Runtime from CUDA, and the line that mends it; None if nothing is known to."""
    wheels = {d.metadata["Name"].lower() for d in importlib.metadata.distributions() if d.metadata["Name"]}
    reinstall = "pip uninstall -y onnxruntime onnxruntime-gpu, then pip install onnxruntime-gpu"
    if {"onnxruntime", "onnxruntime-gpu"} <= wheels:
        return f"onnxruntime and onnxruntime-gpu are both installed and overwrite each other: {reinstall}"
    if PROVIDERS["cuda"] not in ort.get_available_providers():
        return f"this onnxruntime is the wheel for CPUs only: {reinstall}"
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return "this machine has no NVIDIA GPU, or no driver for it: --provider cpu runs without"
    return None


def load(path: str | Path, provider: str = "cpu", threads: int = 0, tf32: bool = True) -> Session:
    """A session of one of our graphs on this provider and no other. ValueError says what is wrong.

    threads: for one operator, 0 = all cores. tf32: let CUDA round the factors of float32 products to 10 bits.
    """
    if not Path(path).is_file():
        raise ValueError(f"{path} is no file: python export_onnx.py CHECKPOINT writes the graphs")
    if provider == "cuda" and (reason := why_no_cuda()):
        raise ValueError(f"CUDA can't be had: {reason}")
    if provider == "cuda" and hasattr(ort, "preload_dlls"):
        ort.preload_dlls()  # CUDA and cuDNN from their wheels
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4  # errors come as exceptions
    settings = {"use_tf32": str(int(tf32))} if provider == "cuda" else {}
    try:
        session = Session(str(path), options, providers=[(PROVIDERS[provider], settings)])
    except Exception as error:  # onnxruntime has no common class for them
        raise ValueError(f"{path} can't be loaded: {' '.join(str(error).split())[:200]}") from error
    if session.get_providers()[0] != PROVIDERS[provider]:
        raise ValueError("CUDA can't be had: libraries are missing: pip install onnxruntime-gpu[cuda,cudnn]")
    return session


def load_search(path: str | Path, *options: object) -> tuple[Session, ...]:
    """greedy.onnx or beam.onnx, or both encoder.onnx and decoder.onnx of a folder; options as for load."""
    wanted = {Path(path): ("greedy", "beam")}
    if Path(path).suffix != ".onnx":
        wanted = {Path(path) / f"{kind}.onnx": (kind,) for kind in ("encoder", "decoder")}
    sessions = tuple(load(file, *options) for file in wanted)
    for session, (file, kinds) in zip(sessions, wanted.items(), strict=True):
        kind = metadata(session).get("graph", "one without our metadata")
        if kind not in kinds:
            raise ValueError(
                f"{file} is a graph of another kind, {kind}; here {' or '.join(kinds)} is needed"
            )
    return sessions


def metadata(session: Session) -> dict[str, str]:
    """What export_onnx.py wrote into the file: graph, pad_id, bos_id, eos_id, src_vocab_size and more."""
    return session.get_modelmeta().custom_metadata_map


def pad(sources: list[list[int]] | np.ndarray, facts: dict[str, str]) -> np.ndarray:
    """Lists of ids, or rows of them -> (B, S) int64, padded on the right. ValueError names a bad id."""
    n_ids = int(facts["src_vocab_size"])
    if len(sources) == 0 or not all(map(len, sources)):
        raise ValueError("no source, or an empty one: give ids as arguments or on standard input")
    for token in (token for source in sources for token in source):
        if not isinstance(token, (int, np.integer)) or not 0 <= token < n_ids:
            raise ValueError(f"id {token!r} must be an integer in the vocabulary, 0 to {n_ids - 1}")
    src = np.full((len(sources), max(map(len, sources))), int(facts["pad_id"]), dtype=np.int64)
    for row, source in zip(src, sources, strict=True):
        row[: len(source)] = source
    return src


def bind_and_run(session: Session, values: dict) -> dict[str, ort.OrtValue]:
    """Run on those values, {name: array or OrtValue}, that are its inputs -> outputs, kept on the device."""
    device = "cuda" if session.get_providers()[0] == PROVIDERS["cuda"] else "cpu"
    binding = session.io_binding()
    for name in (feed.name for feed in session.get_inputs()):
        is_bound = isinstance(values[name], ort.OrtValue)
        (binding.bind_ortvalue_input if is_bound else binding.bind_cpu_input)(name, values[name])
    for output in session.get_outputs():
        binding.bind_output(output.name, "cpu" if output.name == "logits" else device)
    session.run_with_iobinding(binding)
    return dict(zip((output.name for output in session.get_outputs()), binding.get_outputs(), strict=True))


def search(sessions: tuple[Session, ...], src: np.ndarray, max_len: int) -> list[np.ndarray]:
    """(B, S) -> [tokens (B, <= max_len)], of beam.onnx [tokens (B, beam, <= max_len), scores (B, beam)]."""
    if max_len < 1:
        raise ValueError(f"max_len is {max_len}, but must be at least 1")
    if len(sessions) == 2:
        return [greedy(*sessions, src, max_len)]
    return sessions[0].run(None, {"src": src, "max_len": np.array(max_len)})


def greedy(encoder: Session, decoder: Session, src: np.ndarray, max_len: int) -> np.ndarray:
    """Greedy search step by step, the recipe for any language: (B, S) -> tokens (B, <= max_len) int64.

    Every output feeds the input of the same name, present_* feeds past_*.
    """
    facts = metadata(decoder)
    values = {"src": src, **bind_and_run(encoder, {"src": src})}
    tokens = np.full((len(src), 1), int(facts["bos_id"]), dtype=np.int64)
    while tokens.shape[1] <= max_len and not (ended := (tokens == int(facts["eos_id"])).any(axis=1)).all():
        values["tgt"] = np.ascontiguousarray(tokens[:, -1:])
        outputs = bind_and_run(decoder, values)
        token = outputs.pop("logits").numpy()[:, -1].argmax(axis=-1)
        tokens = np.concatenate((tokens, np.where(ended, int(facts["pad_id"]), token)[:, None]), axis=1)
        values |= {name.replace("present_", "past_"): value for name, value in outputs.items()}
    return tokens[:, 1:]


def answers(pad_id: int, tokens: np.ndarray, *scores: np.ndarray) -> list[str]:
    """A text for each source: ids without padding; of beam.onnx a line a hypothesis, with its score."""
    lines = [" ".join(map(str, ids[ids != pad_id])) for ids in tokens.reshape(-1, tokens.shape[-1])]
    if scores:
        lines = [f"{score:.4f}\t{line}\n" for score, line in zip(scores[0].flat, lines, strict=True)]
    n_best = len(lines) // len(tokens)
    return ["".join(lines[start : start + n_best]) for start in range(0, len(lines), n_best)]


def check(sessions: tuple[Session, ...], checkpoint: str, batches: list[tuple]) -> bool:
    """Print how batches, (src, max_len, outputs), compare with PyTorch; torch is needed here alone."""
    import torch

    from transformer import beam_search, greedy_search, load_checkpoint

    facts, n_other, farthest, what = metadata(sessions[-1]), 0, 0.0, ""
    dtype, pad_id = facts["dtype"], int(facts["pad_id"])
    model = load_checkpoint(checkpoint).to(torch.float16 if dtype == "float16" else torch.float32).float()
    for src, max_len, (tokens, *numbers) in batches:
        ids, wanted = torch.from_numpy(src), []
        if numbers:
            options = int(facts["beam_size"]), float(facts["alpha"])
            expected, *wanted = beam_search(model, ids, max_len, *options)
            what = "scores"
        else:
            expected = greedy_search(model, ids, max_len)
        if len(sessions) == 2:
            tgt = torch.nn.functional.pad(expected[:, :-1], (1, 0), value=model.config.bos_id)
            values = {"src": src, "tgt": tgt.numpy(), **bind_and_run(sessions[0], {"src": src})}
            numbers = [bind_and_run(sessions[1], values)["logits"].numpy()]
            with torch.no_grad():
                wanted, what = [model(ids, tgt)], "logits"
        pairs = zip(answers(pad_id, tokens), answers(pad_id, expected.numpy()), strict=True)
        n_other += sum(ours != theirs for ours, theirs in pairs)
        for ours, theirs in zip(numbers, wanted, strict=True):
            farthest = max(farthest, float(np.abs(ours - theirs.numpy()).max()))
    verdict = f"DIFFER from PyTorch's for {n_other} sources" if n_other else "are equal to PyTorch's"
    print(f"check: tokens {verdict}" + (f"; {dtype} {what} differ by {farthest:.1e} at most" if what else ""))
    return dtype != "float32" or (n_other == 0 and farthest <= 1e-4)


def read_sources(arguments: list[str]) -> list[list[int]]:
    """One source of the arguments, or one a line of standard input. ValueError names the line."""
    lines = [" ".join(arguments)] if arguments else sys.stdin.read().splitlines()
    sources = []
    for number, line in enumerate(lines, start=1):
        try:
            sources.append([int(word) for word in line.split()])
        except ValueError:
            sources.append([])
        if not sources[-1]:
            raise ValueError(f"line {number}, {line!r}, must hold ids: integers with spaces between")
    return sources


def batched(sources: list[list[int]], size: int) -> Iterator[list[int]]:
    """Indices of size sources of similar length at a time; of 50 batches in a row, the shortest first."""
    for start in range(0, len(sources), 50 * size):
        window = range(start, min(start + 50 * size, len(sources)))
        window = sorted(window, key=lambda i: len(sources[i]))
        yield from (window[first : first + size] for first in range(0, len(window), size))


def main(argv: list[str] | None = None) -> int:
    """Answer every source. 0: done; 1: the check failed; 2: something can't be used or had."""
    usage, examples = __doc__.split("examples:")
    parser = argparse.ArgumentParser("run_onnx.py", argparse.SUPPRESS, usage, "examples:" + examples)
    parser.formatter_class, option = argparse.RawDescriptionHelpFormatter, parser.add_argument
    option("graph", metavar="GRAPH", type=Path, help="greedy.onnx, beam.onnx, or the folder of the graphs")
    option("ids", metavar="IDS", nargs="*", help="one source; else standard input is read")
    option("--provider", choices=PROVIDERS, default="cpu", help="default: cpu")
    option("--threads", type=int, default=0, help="for one operator (default: all cores)")
    option("--batch", metavar="N", type=int, default=32, help="sources at a time (default: 32)")
    option("--max-len", metavar="N", type=int, help="of an answer, with eos (default, 6.1: its batch + 50)")
    option("--raw", action="store_true", help="append no eos")
    option("--check", metavar="CHECKPOINT", help="compare with PyTorch, with TF32 off")
    option("--time", metavar="N", type=int, default=0, help="time N runs, after 3 to warm up")
    options = parser.parse_intermixed_args(argv)
    try:
        if options.batch < 1:
            raise ValueError(f"--batch is {options.batch}, but must be at least 1")
        sessions = load_search(options.graph, options.provider, options.threads, not options.check)
        facts, sources = metadata(sessions[-1]), read_sources(options.ids)
        eos_id, pad_id = int(facts["eos_id"]), int(facts["pad_id"])
        sources = [ids if options.raw or ids[-1] == eos_id else [*ids, eos_id] for ids in sources]
        padded = pad(sources, facts)  # says what is wrong before any work
        batches, texts, n_printed, n_done = [], {}, 0, 0
        for chosen in batched(sources, options.batch):
            src = padded[:, : max(len(sources[i]) for i in chosen)][chosen]
            max_len = src.shape[1] + 50 if options.max_len is None else options.max_len
            batches.append((src, max_len, search(sessions, src, max_len)))
            texts |= zip(chosen, answers(pad_id, *batches[-1][2]), strict=True)
            while n_printed in texts:  # in the order in which the sources came
                print(texts.pop(n_printed))
                n_printed += 1
            n_done += len(chosen)
            if sys.stderr.isatty() and not sys.stdout.isatty() and len(sources) > options.batch:
                bar = "#" * (40 * n_done // len(sources))
                print(f"\r[{bar:40}] {n_done:,} of {len(sources):,}", end="", file=sys.stderr)
        kind = "beam search" if facts["graph"] == "beam" else "greedy search"
        print(f"sources: {len(sources)}; {kind} on {sessions[-1].get_providers()[0]}", file=sys.stderr)
        if options.time:
            work = [batch[:2] for batch in batches]
            run = lambda: [search(sessions, *batch) for batch in work]  # noqa: E731
            median = np.median(timeit.repeat(run, number=1, repeat=3 + options.time)[3:])
            n_ids = sum(outputs[0].size for _, _, outputs in batches)
            what = f"batches of {len(batches[0][0])}, with copies to and from the device"
            print(f"time: {median:.4f} s, {n_ids / median:.0f} tokens/s; {options.time} runs after 3, {what}")
        return 0 if not options.check or check(sessions, options.check, batches) else 1
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
