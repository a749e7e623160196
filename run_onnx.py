"""Run the graphs of export_onnx.py on ONNX Runtime: ids in, ids out. Needs numpy and onnxruntime alone.

usage: python run_onnx.py GRAPH [IDS ...] [options]

GRAPH is the folder of encoder.onnx and decoder.onnx. A source is given as arguments, or one a line on
standard input; eos is appended where it is missing, as in training. Each answer is one line.

examples:
  python run_onnx.py onnx 5 6 7
  python run_onnx.py onnx --max-len 30 < sources.txt
  python run_onnx.py onnx 5 6 7 --provider cuda --check copy.pt
"""

import argparse
import ctypes
import importlib.metadata
import sys
import timeit
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
    kind = metadata(session).get("graph", "one without our metadata")
    if kind != Path(path).stem:
        raise ValueError(f"{path} is a graph of another kind: {kind}")
    return session


def load_pair(folder: str | Path, *options: object) -> tuple[Session, Session]:
    """encoder.onnx and decoder.onnx of a folder; options as for load."""
    if Path(folder).is_file():
        raise ValueError(f"{folder} is one graph; give the folder that holds encoder.onnx and decoder.onnx")
    return tuple(load(Path(folder) / name, *options) for name in ("encoder.onnx", "decoder.onnx"))


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


def greedy(sessions: tuple | str | Path, sources: list[list[int]] | np.ndarray, max_len: int) -> np.ndarray:
    """Greedy search by (encoder, decoder), or their folder: (B, S) -> tokens (B, <= max_len) int64.

    The recipe for any language: every output feeds the input of the same name, present_* feeds past_*.
    """
    encoder, decoder = sessions if isinstance(sessions, tuple) else load_pair(sessions)
    facts = metadata(decoder)
    src = pad(sources, facts)
    if max_len < 1:
        raise ValueError(f"max_len is {max_len}, but must be at least 1")
    values = {"src": src, **bind_and_run(encoder, {"src": src})}
    tokens = np.full((len(src), 1), int(facts["bos_id"]), dtype=np.int64)
    while tokens.shape[1] <= max_len and not (ended := (tokens == int(facts["eos_id"])).any(axis=1)).all():
        values["tgt"] = np.ascontiguousarray(tokens[:, -1:])
        outputs = bind_and_run(decoder, values)
        token = outputs.pop("logits").numpy()[:, -1].argmax(axis=-1)
        tokens = np.concatenate((tokens, np.where(ended, int(facts["pad_id"]), token)[:, None]), axis=1)
        values |= {name.replace("present_", "past_"): value for name, value in outputs.items()}
    return tokens[:, 1:]


def check(sessions: tuple, checkpoint: str, src: np.ndarray, tokens: np.ndarray, max_len: int) -> bool:
    """Print how tokens and logits compare with PyTorch's; only here torch is needed. -> equal?"""
    import torch

    from transformer import greedy_search, load_checkpoint

    dtype, torch_src = metadata(sessions[1])["dtype"], torch.from_numpy(src)
    model = load_checkpoint(checkpoint).to(getattr(torch, dtype))
    expected = greedy_search(model, torch_src, max_len).numpy()
    tgt = np.insert(expected[:, :-1], 0, model.config.bos_id, axis=1)
    values = {"src": src, "tgt": tgt, **bind_and_run(sessions[0], {"src": src})}
    logits = bind_and_run(sessions[1], values)["logits"].numpy()
    with torch.no_grad():
        difference = np.abs(logits - model(torch_src, torch.from_numpy(tgt)).numpy()).max()
    same = np.array_equal(tokens, expected)
    verdict = "are equal to" if same else "DIFFER from"
    print(f"check: tokens {verdict} PyTorch's; {dtype} logits differ by {difference:.1e} at most")
    return same and (dtype != "float32" or difference <= 1e-4)


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


def main(argv: list[str] | None = None) -> int:
    """Answer every source. 0: done; 1: the check failed; 2: something can't be used or had."""
    usage, examples = __doc__.split("examples:")
    parser = argparse.ArgumentParser("run_onnx.py", argparse.SUPPRESS, usage, "examples:" + examples)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("graph", metavar="GRAPH", type=Path, help="folder of encoder.onnx and decoder.onnx")
    parser.add_argument("ids", metavar="IDS", nargs="*", help="one source; else standard input is read")
    parser.add_argument("--provider", choices=PROVIDERS, default="cpu", help="default: cpu")
    parser.add_argument("--threads", type=int, default=0, help="for one operator (default: all cores)")
    parser.add_argument("--max-len", type=int, help="of an answer, with eos (default, 6.1: source + 50)")
    parser.add_argument("--raw", action="store_true", help="append no eos")
    parser.add_argument("--check", metavar="CHECKPOINT", help="compare with PyTorch, with TF32 off")
    parser.add_argument("--time", metavar="N", type=int, default=0, help="time N runs, after 3 to warm up")
    options = parser.parse_intermixed_args(argv)
    try:
        sessions = load_pair(options.graph, options.provider, options.threads, not options.check)
        facts = metadata(sessions[1])
        sources, eos_id = read_sources(options.ids), int(facts["eos_id"])
        src = pad([ids if options.raw or ids[-1] == eos_id else [*ids, eos_id] for ids in sources], facts)
        max_len = src.shape[1] + 50 if options.max_len is None else options.max_len
        tokens = greedy(sessions, src, max_len)
        for row in tokens:
            print(*(token for token in row if token != int(facts["pad_id"])))
        print(f"batch of {len(src)}, greedy search on {sessions[1].get_providers()[0]}", file=sys.stderr)
        if options.time:
            runs = timeit.repeat(lambda: greedy(sessions, src, max_len), number=1, repeat=3 + options.time)
            median = np.median(runs[3:])
            what = f"batch {len(src)}: encoder, {tokens.shape[1]} steps, copies to and from the device"
            speed = f"{median:.4f} s, {tokens.size / median:.0f} tokens/s"
            print(f"time: {speed}; {options.time} runs after 3, {what}")
        return 0 if not options.check or check(sessions, options.check, src, tokens, max_len) else 1
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
