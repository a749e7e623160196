"""Run the ONNX graphs of export_onnx.py: ids in, ids out. Needs numpy and onnxruntime, neither torch nor onnx.

usage: python run_onnx.py GRAPH [IDS ...] [options]

GRAPH is the folder that holds encoder.onnx and decoder.onnx. A source is given as arguments, or one a
line on standard input; eos is appended where it is missing, as in training. Each answer is one line.

examples:
  python run_onnx.py onnx 5 6 7
  printf '5 6 7\n8 9\n' | python run_onnx.py onnx --max-len 30
  python run_onnx.py onnx 5 6 7 --provider cuda --check copy.pt
"""

import argparse
import ctypes
import importlib.metadata
import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime as ort

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
Sessions = tuple[ort.InferenceSession, ort.InferenceSession]  # encoder, decoder


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


def load(
    path: str | Path, provider: str = "cpu", threads: int = 0, tf32: bool = True
) -> ort.InferenceSession:
    """A session of one of our graphs on that provider and no other. ValueError says what is wrong.

    threads: for one operator, 0 = all cores. tf32: let CUDA round the factors of float32 products to 10 bits.
    """
    if not Path(path).is_file():
        raise ValueError(f"{path} is no file: python export_onnx.py CHECKPOINT writes the graphs")
    if provider not in PROVIDERS:
        raise ValueError(f"provider is {provider!r}, but must be one of {', '.join(PROVIDERS)}")
    if provider == "cuda" and (reason := why_no_cuda()):
        raise ValueError(f"CUDA can't be had: {reason}")
    if provider == "cuda" and hasattr(ort, "preload_dlls"):
        ort.preload_dlls()  # CUDA and cuDNN from their wheels
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # its errors come as exceptions, or below
    wanted = (PROVIDERS[provider], {"use_tf32": str(int(tf32))} if provider == "cuda" else {})
    try:
        session = ort.InferenceSession(str(path), options, providers=[wanted])
    except Exception as error:  # onnxruntime has no common class for them
        raise ValueError(f"{path} can't be loaded: {' '.join(str(error).split())[:200]}") from error
    if session.get_providers()[0] != PROVIDERS[provider]:
        mend = "pip install onnxruntime-gpu[cuda,cudnn]"
        raise ValueError(f"CUDA can't be had: its libraries are missing or of another version: {mend}")
    if "graph" not in metadata(session):
        raise ValueError(f"{path} is no graph of export_onnx.py: its metadata has no 'graph'")
    return session


def load_pair(folder: str | Path, provider: str = "cpu", threads: int = 0, tf32: bool = True) -> Sessions:
    """encoder.onnx and decoder.onnx of a folder."""
    sessions = tuple(
        load(Path(folder) / f"{kind}.onnx", provider, threads, tf32) for kind in ("encoder", "decoder")
    )
    for session, kind in zip(sessions, ("encoder", "decoder"), strict=True):
        if metadata(session)["graph"] != kind:
            raise ValueError(f"{folder}/{kind}.onnx is a graph of another kind: {metadata(session)['graph']}")
    return sessions


def metadata(session: ort.InferenceSession) -> dict[str, str]:
    """What export_onnx.py wrote into the file: graph, pad_id, bos_id, eos_id, src_vocab_size and more."""
    return session.get_modelmeta().custom_metadata_map


def pad(sources: list[list[int]], facts: dict[str, str], raw: bool = False) -> np.ndarray:
    """Lists of ids -> (B, S) int64; eos is appended where it is missing, unless raw. ValueError names a bad id."""
    n_ids, eos_id = int(facts["src_vocab_size"]), int(facts["eos_id"])
    sources = [list(source) if raw or source[-1:] == [eos_id] else [*source, eos_id] for source in sources]
    for source in sources:
        for token in source:
            if not isinstance(token, (int, np.integer)) or not 0 <= token < n_ids:
                raise ValueError(f"id {token!r} must be an integer in the vocabulary, 0 to {n_ids - 1}")
    if not sources or not all(sources):
        raise ValueError("a source is empty: it must hold at least one id")
    src = np.full((len(sources), max(map(len, sources))), int(facts["pad_id"]), dtype=np.int64)
    for row, source in zip(src, sources, strict=True):
        row[: len(source)] = source
    return src


def bind_and_run(session: ort.InferenceSession, feeds: dict) -> dict[str, ort.OrtValue]:
    """Run on values that stay on the session's device: {name: array or OrtValue} -> {name: OrtValue}."""
    device = "cuda" if session.get_providers()[0] == PROVIDERS["cuda"] else "cpu"
    binding = session.io_binding()
    for name, value in feeds.items():
        if isinstance(value, ort.OrtValue):
            binding.bind_ortvalue_input(name, value)
        else:
            binding.bind_cpu_input(name, value)
    for output in session.get_outputs():
        binding.bind_output(output.name, "cpu" if output.name == "logits" else device)
    session.run_with_iobinding(binding)
    return dict(zip((output.name for output in session.get_outputs()), binding.get_outputs(), strict=True))


def greedy(
    sessions: Sessions | str | Path, sources: np.ndarray | list[list[int]], max_len: int
) -> np.ndarray:
    """Greedy search by encoder and decoder: (B, S) ids, or lists of them -> tokens (B, <= max_len) int64.

    The recipe for any language: every output feeds the input of the same name, present_* feeds past_*.
    """
    encoder, decoder = sessions if isinstance(sessions, tuple) else load_pair(sessions)
    facts = metadata(decoder)
    src = pad(
        sources if isinstance(sources, list) else list(sources), facts, raw=not isinstance(sources, list)
    )
    if max_len < 1:
        raise ValueError(f"max_len is {max_len}, but must be at least 1")
    values = {"src": src, **bind_and_run(encoder, {"src": src})}
    tokens = np.full((len(src), 1), int(facts["bos_id"]), dtype=np.int64)
    while tokens.shape[1] <= max_len:
        ended = (tokens == int(facts["eos_id"])).any(axis=1)
        if ended.all():
            break
        values["tgt"] = np.ascontiguousarray(tokens[:, -1:])
        outputs = bind_and_run(decoder, {feed.name: values[feed.name] for feed in decoder.get_inputs()})
        token = outputs.pop("logits").numpy()[:, -1].argmax(axis=-1)
        tokens = np.concatenate((tokens, np.where(ended, int(facts["pad_id"]), token)[:, None]), axis=1)
        values |= {name.replace("present_", "past_"): value for name, value in outputs.items()}
    return tokens[:, 1:]


def check(folder: Path, checkpoint: str, provider: str, threads: int, src: np.ndarray, max_len: int) -> str:
    """Compare with PyTorch, TF32 off; the only place that needs torch. ValueError if they differ."""
    import torch

    from transformer import greedy_search, load_checkpoint

    sessions, model = load_pair(folder, provider, threads, tf32=False), load_checkpoint(checkpoint)
    dtype = metadata(sessions[1])["dtype"]
    model.to(getattr(torch, dtype))
    tokens, expected = greedy(sessions, src, max_len), greedy_search(model, torch.from_numpy(src), max_len)
    if not np.array_equal(tokens, expected.numpy()):
        raise ValueError(f"tokens differ from PyTorch's: {tokens.tolist()}, not {expected.tolist()}")
    tgt = np.concatenate((np.full((len(src), 1), model.config.bos_id), tokens[:, :-1]), axis=1)
    feeds = {"src": src, **bind_and_run(sessions[0], {"src": src}), "tgt": tgt}
    logits = bind_and_run(sessions[1], {i.name: feeds[i.name] for i in sessions[1].get_inputs()})[
        "logits"
    ].numpy()
    with torch.no_grad():
        difference = np.abs(logits - model(torch.from_numpy(src), torch.from_numpy(tgt)).numpy()).max()
    if dtype == "float32" and not difference <= 1e-4:
        raise ValueError(f"logits differ from PyTorch's by {difference:.1e}, more than 1e-4")
    return f"equal to PyTorch: {tokens.size} tokens, {dtype} logits within {difference:.1e}"


def read_sources(arguments: list[str]) -> list[list[int]]:
    """One source of the arguments, or one a line of standard input. ValueError names the line."""
    lines = [" ".join(arguments)] if arguments else sys.stdin.read().splitlines()
    if not lines:
        raise ValueError("no source: give ids as arguments, or one source a line on standard input")
    sources = []
    for number, line in enumerate(lines, start=1):
        try:
            sources.append([int(word) for word in line.split()])
        except ValueError as error:
            raise ValueError(f"line {number}: {line!r} must be ids, integers with spaces between") from error
        if not sources[-1]:
            raise ValueError(f"line {number} is empty: it must hold at least one id")
    return sources


def main(argv: list[str] | None = None) -> int:
    """Answer every source. 0: done; 1: a check failed; 2: something can't be used or had."""
    usage, examples = __doc__.split("examples:")
    parser = argparse.ArgumentParser("run_onnx.py", argparse.SUPPRESS, usage, "examples:" + examples)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("graph", metavar="GRAPH", type=Path, help="folder with encoder.onnx and decoder.onnx")
    parser.add_argument("ids", metavar="IDS", nargs="*", help="one source; else standard input is read")
    parser.add_argument("--provider", choices=PROVIDERS, default="cpu", help="where to run (default: cpu)")
    parser.add_argument("--threads", type=int, default=0, help="for one operator (default: all cores)")
    parser.add_argument(
        "--max-len", type=int, help="ids of an answer, eos included (default: source + 50, 6.1)"
    )
    parser.add_argument("--raw", action="store_true", help="append no eos to the sources")
    parser.add_argument("--check", metavar="CHECKPOINT", help="compare with PyTorch; exit 1 if they differ")
    parser.add_argument("--time", metavar="N", type=int, default=0, help="time N runs after 3 to warm up")
    options = parser.parse_args(argv)
    try:
        sessions = load_pair(options.graph, options.provider, options.threads)
        facts = metadata(sessions[1])
        src = pad(read_sources(options.ids), facts, options.raw)
        max_len = src.shape[1] + 50 if options.max_len is None else options.max_len
        tokens = greedy(sessions, src, max_len)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    for row in tokens:
        print(*(token for token in row if token != int(facts["pad_id"])))
    print(f"{len(src)} sources, greedy on {sessions[1].get_providers()[0]}", file=sys.stderr)
    if options.time:
        seconds = []
        for _ in range(3 + options.time):
            started = time.perf_counter()
            greedy(sessions, src, max_len)
            seconds.append(time.perf_counter() - started)
        median = float(np.median(seconds[3:]))
        what = f"encoder and {tokens.shape[1]} steps for {len(src)} sources, copies to and from the device included"
        print(f"median of {options.time} runs after 3 to warm up, {what}: {median:.4f} s, "
              f"{tokens.size / median:.0f} tokens/s")  # fmt: skip
    if options.check:
        try:
            print(check(options.graph, options.check, options.provider, options.threads, src, max_len))
        except (ValueError, OSError) as error:
            print(f"run_onnx.py: check failed: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
