"""Measure how fast the graphs decode, side by side with other engines on the same weights, and write it down.

usage: python bench/speed.py [options]

Every engine has a process of its own. They take turns, and all wait while one works, so what is compared was
measured within seconds. Before anything is timed, all must give the same ids. Needs the extra bench, 4 GB
of memory and about 25 minutes on 2 cores; docs/performance.md and its picture are written at the end.

examples:
  python bench/speed.py                              all of it, into docs/
  python bench/speed.py --only decoding --rounds 9   one part, to the terminal alone
  python bench/speed.py --device cuda                decoding on a GPU, into docs/performance-cuda.md
  python bench/speed.py --size small --rounds 1 --out build    a try in two minutes; its figures mean nothing
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the four files, from any folder
import engines
import training

import export_onnx
import run_onnx
from transformer import Transformer, TransformerConfig, load_checkpoint, save_checkpoint

SIZES = {
    "base": TransformerConfig(37000, 37000),
    "small": TransformerConfig(200, 200, d_model=32, n_heads=4, n_layers=2, d_ff=64),
}
SRC_LEN, MAX_LEN = 20, 40
LABELS = {
    "onnx": "our graph",
    "pytorch": "PyTorch eager",
    "ctranslate2": "CTranslate2",
    "optimum": "optimum-onnx",
}


class Work(NamedTuple):
    """A row of the table: what is decoded, and how much slower than ours each peer should be."""

    search: str
    batch: int
    precision: str
    targets: dict[str, float]


WORK = {
    "cpu": (
        Work("greedy", 1, "float32", dict(ctranslate2=1.3, pytorch=1.6, optimum=2)),
        Work("greedy", 32, "float32", dict(ctranslate2=1.6, pytorch=2, optimum=2)),
        Work("beam", 1, "float32", dict(ctranslate2=1.6, pytorch=2, optimum=2)),
        Work("beam", 16, "float32", dict(ctranslate2=1.4, pytorch=1.8, optimum=2)),
        Work("greedy", 1, "int8", dict(ctranslate2=1.4)),
        Work("greedy", 32, "int8", dict(ctranslate2=1.4)),
        Work("beam", 1, "int8", dict(ctranslate2=2)),
        Work("beam", 16, "int8", dict(ctranslate2=1.4)),
    ),
    "cuda": tuple(
        Work(search, batch, precision, dict(pytorch=1.3 if batch == 1 else 1.0, ctranslate2=1.0))
        for precision in ("float32", "float16")
        for search, batch in (("greedy", 1), ("greedy", 32), ("beam", 1), ("beam", 16))
    ),
}


# Engines that take turns


class Engine:
    """An engine in a process of its own; it loads at once, then works only while it is asked."""

    def __init__(self, name: str, *options: object) -> None:
        context = multiprocessing.get_context("spawn")
        self.name, (self.pipe, theirs) = name, context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, name, *options), daemon=True)
        self.process.start()
        theirs.close()

    def __call__(self, sources: list[list[int]], max_len: int) -> tuple[float, list[list[int]]]:
        """-> seconds from ids to ids, and the ids."""
        try:
            self.pipe.send((sources, max_len))
            return self.pipe.recv()
        except (EOFError, OSError):
            raise SystemExit(f"speed.py: {self.name} broke down; its own message is above") from None

    def close(self) -> None:
        """Let it end."""
        self.pipe.close()
        self.process.join()


def serve(pipe: Connection, name: str, *options: object) -> None:
    """What an engine's process does: load, then decode until nobody asks any more."""
    decode = engines.ENGINES[name](*options)
    while True:
        try:
            sources, max_len = pipe.recv()
        except EOFError:
            return
        started = time.perf_counter()
        ids = decode(sources, max_len)
        pipe.send((time.perf_counter() - started, ids))


class Timing(NamedTuple):
    """The seconds of every round, by engine, and the share of sources that it answers as our graph does."""

    seconds: dict[str, list[float]]
    same: dict[str, float]

    def ratio(self, peer: str) -> tuple[float, float, float]:
        """The peer's time over ours: the median, the lowest and the highest of the rounds."""
        both = zip(self.seconds[peer], self.seconds["onnx"], strict=True)
        ratios = [theirs / ours for theirs, ours in both]
        return statistics.median(ratios), min(ratios), max(ratios)

    def median(self, name: str) -> float:
        """Of the seconds of this engine."""
        return statistics.median(self.seconds[name])


def take_turns(running: dict[str, Engine], rounds: int, sources: list, max_len: int, exact: bool) -> Timing:
    """One try of each to warm up, whose ids must be the same if exact; then the rounds."""
    answers = {name: engine(sources, max_len)[1] for name, engine in running.items()}
    pairs = {name: list(zip(ids, answers["onnx"], strict=True)) for name, ids in answers.items()}
    same = {name: sum(one == other for one, other in both) / len(both) for name, both in pairs.items()}
    if exact and min(same.values()) < 1:
        raise SystemExit(f"speed.py: the engines must give the same ids as our graph; shares of rows: {same}")
    seconds = {name: [] for name in running}
    for _ in range(rounds):
        for name, engine in running.items():
            seconds[name].append(engine(sources, max_len)[0])
            time.sleep(0.2)  # its threads spin for a while after their work
    return Timing(seconds, same)


def start(names: list[str], *options: object) -> dict[str, Engine]:
    """All of these engines, loaded."""
    return {name: Engine(name, *options) for name in names}


def random_sources(config: TransformerConfig, batch: int, length: int = SRC_LEN) -> list[list[int]]:
    """Ids that are neither pad, bos nor eos; the same at every call."""
    random.seed(batch * 1000 + length)
    return [[random.randrange(3, config.src_vocab_size) for _ in range(length)] for _ in range(batch)]


# The parts of the report: each gives the lines of its section


class Bench(NamedTuple):
    """What the parts need to know."""

    folder: Path
    config: TransformerConfig
    device: str
    threads: int
    rounds: int
    peers: list[str]
    pictures: Path


def prepare(bench: Bench) -> list[str]:
    """Random weights in every engine's own format. -> what exporting and loading cost."""
    torch.manual_seed(0)
    model = Transformer(bench.config)
    with torch.no_grad():  # answers of one length: the engines' beam searches differ in what ends when
        model.projection.weight[bench.config.eos_id] = 0
    save_checkpoint(bench.folder / "model.pt", model)
    report = []
    for precision in dict.fromkeys(work.precision for work in WORK[bench.device]):
        option = ["--int8"] if precision == "int8" else ["--dtype", precision]
        out, checkpoint = bench.folder / precision, str(bench.folder / "model.pt")
        started = time.perf_counter()
        arguments = [checkpoint, "--out", str(out), "--graphs", "greedy", "beam", *option]
        if export_onnx.main(arguments):
            raise SystemExit("speed.py: the graphs could not be exported; the message is above")
        report.append(f"greedy.onnx and beam.onnx, {precision}: {time.perf_counter() - started:.0f} s")
    for peer, write in (("ctranslate2", engines.to_ctranslate2), ("optimum", engines.to_marian)):
        if peer in bench.peers:
            write(model, bench.folder / peer)
    return report


def decoding(bench: Bench) -> list[str]:
    """The table: each kind of work against every peer."""
    lines = [
        f"Source {SRC_LEN} ids, {MAX_LEN} new ids; the peer's time over ours, so more than 1 means that ours "
        "is faster: median [lowest, highest] of the rounds (target). **Bold** misses the target.",
        "",
        "| work | ours | " + " | ".join(LABELS[peer] for peer in bench.peers) + " |",
        "|---|---|" + "---|" * len(bench.peers),
    ]
    works = list(WORK[bench.device])
    for search, precision in dict.fromkeys((work.search, work.precision) for work in works):
        chosen = [work for work in works if (work.search, work.precision) == (search, precision)]
        peers = [peer for peer in bench.peers if any(peer in work.targets for work in chosen)]
        options = bench.folder, search, precision, bench.device, bench.threads
        running = start(["onnx", *peers], *options)
        for work in tqdm(chosen, f"{search} {precision}", leave=False):
            sources = random_sources(bench.config, work.batch)
            timing = take_turns(running, bench.rounds, sources, MAX_LEN, precision == "float32")
            cells = [f"{search}, batch {work.batch}, {precision}", f"{1e3 * timing.median('onnx'):.0f} ms"]
            for peer in bench.peers:
                if peer not in work.targets:
                    cells.append("-")
                    continue
                middle, lowest, highest = timing.ratio(peer)
                figure = f"{middle:.2f}" if middle >= work.targets[peer] else f"**{middle:.2f}**"
                cells.append(f"{figure} [{lowest:.2f}, {highest:.2f}] ({work.targets[peer]})")
            lines.append("| " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
        for engine in running.values():
            engine.close()
    return lines


def single_thread(bench: Bench) -> list[str]:
    """CTranslate2 may lose by its second thread: the same with one thread for all."""
    if "ctranslate2" not in bench.peers:
        return ["CTranslate2 was not measured."]
    return decoding(bench._replace(threads=1, peers=["ctranslate2"]))


def answers_that_end(bench: Bench) -> list[str]:
    """Greedy search of a batch whose rows end after 5 to 60 ids."""
    folder, longest, batch = bench.folder / "ending", 60, 32
    folder.mkdir()
    model = load_checkpoint(bench.folder / "model.pt")
    sources = random_sources(bench.config, batch)
    lengths = engines.teach_to_end(model, torch.tensor(sources), torch.linspace(5, longest, batch).long())
    save_checkpoint(folder / "model.pt", model)
    if export_onnx.main([str(folder / "model.pt"), "--out", str(folder / "float32"), "--graphs", "greedy"]):
        raise SystemExit("speed.py: greedy.onnx could not be exported; the message is above")
    names = [peer for peer in bench.peers if peer != "optimum"]
    if "ctranslate2" in names:
        engines.to_ctranslate2(model, folder / "ctranslate2")
    running = start(["onnx", *names], folder, "greedy", "float32", bench.device, bench.threads)
    timing = take_turns(running, bench.rounds, sources, longest, exact=True)
    for engine in running.values():
        engine.close()
    figures = ", ".join(f"{LABELS[name]} {timing.ratio(name)[0]:.2f}" for name in names)
    return [
        f"A batch of {batch} whose answers have {min(lengths)} to {max(lengths)} ids, "
        f"{sum(lengths) / batch:.0f} in the mean (eos was fitted to the states of the random model), greedy, "
        f"float32: {1e3 * timing.median('onnx'):.0f} ms; the peer's time over ours: {figures}. "
        "CTranslate2 drops rows that have ended; our graph can't without losing more (docs/design.md)."
    ]


def growth(bench: Bench) -> list[str]:
    """How the time of greedy search grows with the length and with the batch: a picture and a table."""
    names = ["onnx", *(peer for peer in bench.peers if peer != "optimum")]
    running = start(names, bench.folder, "greedy", "float32", bench.device, bench.threads)
    small = bench.config != SIZES["base"]
    axes = {
        "source and answer, ids (batch 1)": [
            (1, n, n) for n in ((16, 64) if small else (16, 64, 128, 256, 512))
        ],
        f"batch (source {SRC_LEN}, answer {MAX_LEN} ids)": [
            (n, SRC_LEN, MAX_LEN) for n in ((1, 4) if small else (1, 4, 16, 64))
        ],
    }
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, plots = pyplot.subplots(1, 2, figsize=(9, 3.6))
    lines = ["![time an id, by length and by batch](performance.png)", ""]
    for plot, (label, sizes) in zip(plots, axes.items(), strict=True):
        lines += [
            f"| {label} | " + " | ".join(LABELS[name] for name in names) + " |",
            "|---|" + "---|" * len(names),
        ]
        times = {name: [] for name in names}
        for batch, src_len, max_len in tqdm(sizes, label, leave=False):
            sources = random_sources(bench.config, batch, src_len)
            timing = take_turns(running, min(bench.rounds, 3), sources, max_len, exact=True)
            for name in names:
                times[name].append(1e3 * timing.median(name) / max_len / batch)
        along = [size[0] if len({size[0] for size in sizes}) > 1 else size[2] for size in sizes]
        for i, size in enumerate(along):
            lines.append(
                f"| {size} | " + " | ".join(f"{times[name][i]:.2f} ms an id" for name in names) + " |"
            )
        lines.append("")
        for name in names:
            plot.plot(along, times[name], marker="o", label=LABELS[name])
        plot.set(xscale="log", yscale="log", xlabel=label, ylabel="milliseconds an id", xticks=along)
        plot.set_xticks(along, map(str, along))
        plot.minorticks_off()
        plot.grid(alpha=0.3)
    plots[0].legend()
    figure.tight_layout()
    figure.savefig(bench.pictures / "performance.png", dpi=120)
    for engine in running.values():
        engine.close()
    return lines


def roofline(bench: Bench) -> list[str]:
    """How near greedy search is to what the machine can do: its memory at batch 1, its arithmetic at 32."""
    torch.set_num_threads(bench.threads)
    model = Transformer(bench.config)
    once = [
        weight
        for layer in model.decoder
        for name, weight in layer.named_parameters()
        if "cross_attn.w_" not in name
    ]
    once += [
        weight
        for layer in model.decoder
        for weight in (layer.cross_attn.w_q.weight, layer.cross_attn.w_o.weight)
    ]
    n_weights = sum(weight.numel() for weight in once) + model.projection.weight.numel()
    n_products = sum(weight.numel() for weight in once if weight.dim() == 2) + model.projection.weight.numel()

    def best(work: Callable[[], object], times: int = 10) -> float:
        seconds = []
        for _ in range(times):
            started = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - started)
        return min(seconds)

    matrix, vector = torch.randn(n_weights // 512, 512), torch.randn(512)
    readers = {"torch's matrix times vector": lambda: matrix @ vector, "torch's amax": lambda: matrix.amax()}
    fastest, reader = min((best(work), name) for name, work in readers.items())
    bandwidth = matrix.numel() * 4 / fastest
    square = torch.randn(2048, 2048)
    peak = 2048**3 / best(lambda: square @ square)
    running = start(["onnx"], bench.folder, "greedy", "float32", bench.device, bench.threads)
    step = {}
    for batch in (1, 32):
        sources = random_sources(bench.config, batch)
        seconds = {
            n: take_turns(running, bench.rounds, sources, n, exact=True).median("onnx") for n in (1, 41)
        }
        step[batch] = (seconds[41] - seconds[1]) / 40
    running["onnx"].close()
    least = n_weights * 4 / bandwidth, 32 * n_products / peak
    return [
        f"A step reads {4e-6 * n_weights:.0f} MB of weights, and multiplies each row by "
        f"{1e-6 * n_products:.1f} million of them.",
        "",
        "| greedy, float32 | a step | at least | share |",
        "|---|---|---|---|",
        f"| batch 1, bound by memory: {1e-9 * bandwidth:.1f} GB/s ({reader} of as many bytes) "
        f"| {1e3 * step[1]:.2f} ms | {1e3 * least[0]:.2f} ms | {least[0] / step[1]:.0%} |",
        f"| batch 32, bound by arithmetic: {1e-9 * peak:.0f} billion products a second (2048 x 2048 squared) "
        f"| {1e3 * step[32]:.2f} ms | {1e3 * least[1]:.2f} ms | {least[1] / step[32]:.0%} |",
    ]


LOADING = """
import re, resource, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import run_onnx

def memory(kind):  # bytes; ru_maxrss is inherited from the parent on Linux
    status = Path("/proc/self/status")
    if status.exists():
        return int(re.search(kind + r":\\s+(\\d+)", status.read_text())[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

before = memory("VmRSS")
started = time.perf_counter()
session = run_onnx.load(sys.argv[2], "cpu", int(sys.argv[3]))
print(time.perf_counter() - started, memory("VmHWM") - before)
"""


def loading(bench: Bench) -> list[str]:
    """Seconds and memory that a session of each graph takes: medians over fresh processes."""
    lines = [
        "| graph | file | loading | peak of memory over file |",
        "|---|---|---|---|",
    ]
    for precision in ("float32", "int8"):
        for search in ("greedy", "beam"):
            path = bench.folder / precision / f"{search}.onnx"
            command = [sys.executable, "-c", LOADING, str(Path(run_onnx.__file__).parent), str(path)]
            runs = [
                subprocess.run(
                    [*command, str(bench.threads)], capture_output=True, text=True, check=True
                ).stdout
                for _ in range(bench.rounds)
            ]
            seconds, peak = (statistics.median(float(run.split()[i]) for run in runs) for i in (0, 1))
            size = path.stat().st_size
            lines.append(
                f"| {search}.onnx, {precision} | {size / 1e6:.1f} MB | {seconds:.2f} s | {peak / size:.2f} |"
            )
    return lines


def placement(bench: Bench) -> list[str]:
    """From ONNX Runtime's profile: what is copied between host and device, and what the CPU runs."""
    import onnxruntime as ort

    lines = [
        "| graph | copies a step, as a share of the caches | kinds of node on the CPU |",
        "|---|---|---|",
    ]
    config = bench.config
    caches = 2 * config.n_layers * MAX_LEN // 2 * config.d_model * 4
    for search in ("greedy", "beam"):
        options = ort.SessionOptions()
        options.enable_profiling, options.log_severity_level = True, 4
        options.profile_file_prefix = str(bench.folder / search)
        provider = run_onnx.PROVIDERS[bench.device]
        session = ort.InferenceSession(
            str(bench.folder / "float32" / f"{search}.onnx"), options, providers=[provider]
        )
        src = run_onnx.pad(random_sources(config, 1), run_onnx.metadata(session))
        run_onnx.search((session,), src, MAX_LEN)
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
        nodes = [event for event in events if event.get("cat") == "Node" and "provider" in event["args"]]
        copied = sum(
            int(node["args"]["output_size"]) for node in nodes if "Memcpy" in node["args"]["op_name"]
        )
        on_cpu = Counter(
            node["args"]["op_name"] for node in nodes if node["args"]["provider"].startswith("CPU")
        )
        beams = 4 if search == "beam" else 1
        kinds = ", ".join(sorted(on_cpu)) or "none"
        lines.append(f"| {search}.onnx | {copied / MAX_LEN / (caches * beams):.2%} | {kinds} |")
    return lines


def training_parts(bench: Bench) -> list[str]:
    """A step against torch's own layers, and the time until the copy task is learned."""
    return training.report(bench.config == SIZES["base"], bench.threads, bench.rounds)


# The report


def machine() -> str:
    """What this was measured on, in a line."""
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        models = [
            line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")
        ]
        name = models[0].split(":")[1].strip() if models else name
    if torch.cuda.is_available():
        name += f", {torch.cuda.get_device_name()}"
    return f"{name}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"


def versions() -> str:
    """Of all that takes part."""
    names = (
        "torch",
        "onnxruntime",
        "onnxruntime-gpu",
        "ctranslate2",
        "optimum-onnx",
        "transformers",
        "numpy",
    )
    found = []
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


INTRODUCTION = """# Performance

Written by `{command}` on {today}; measure where you deploy rather than trust it.
Machine: {machine}; {threads} threads for every engine. Versions: {versions}.

What is timed: from lists of ids to lists of ids, the encoder included, loading left out. All engines hold the
same weights (the base model of the paper, random), each in a process of its own; they take turns, {rounds}
rounds, and before that all must give the same ids (in int8 they may differ). The machine is shared and noisy,
so read the ratios rather than the milliseconds.
"""

CUDA_IS_ELSEWHERE = """
## CUDA

`make bench-cuda` measures the same searches on a GPU, in float32 (TF32 off) and float16, beside PyTorch and
CTranslate2 on CUDA, and what is copied between host and device; it writes performance-cuda.md beside this
file. Where that file is missing, nobody has run it yet and the figures are open.
"""

PARTS = {
    "decoding": ("Decoding", decoding),
    "single-thread": ("One thread each", single_thread),
    "ending": ("Answers that end at different lengths", answers_that_end),
    "growth": ("Growth with length and batch", growth),
    "roofline": ("Distance to the machine's limits", roofline),
    "loading": ("Loading", loading),
    "training": ("Training", training_parts),
    "placement": ("Copies and placement", placement),
}


def main(argv: list[str] | None = None) -> int:
    """Measure and write. 0: done; 1: an engine broke down or gave other ids; 2: an option can't be used."""
    usage, examples = __doc__.split("examples:")
    parser = argparse.ArgumentParser("speed.py", argparse.SUPPRESS, usage, "examples:" + examples)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    docs = Path(__file__).resolve().parent.parent / "docs"
    option = parser.add_argument
    option("--only", nargs="+", choices=PARTS, help="these parts, to the terminal alone")
    option("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    option("--rounds", type=int, default=5, metavar="N", help="default: 5")
    option(
        "--threads",
        type=int,
        default=os.cpu_count(),
        metavar="N",
        help="of every engine (default: all cores)",
    )
    option("--size", choices=SIZES, default="base", help="of the model (default: base)")
    option("--peers", nargs="*", choices=list(LABELS)[1:], help="default: all that are installed")
    option("--out", type=Path, default=docs, metavar="DIR", help="folder of the report (default: docs)")
    options = parser.parse_args(argv)
    if options.rounds < 1 or options.threads < 1:
        parser.error(f"--rounds is {options.rounds}, --threads {options.threads}; both must be at least 1")
    on_cuda = options.device == "cuda"
    if on_cuda and ((reason := run_onnx.why_no_cuda()) or not torch.cuda.is_available()):
        parser.error(f"--device cuda can't be had: {reason or 'this torch is built without it'}")
    peers = options.peers
    if peers is None:
        needs = {"ctranslate2": "ctranslate2", "pytorch": "torch", "optimum": "optimum.onnxruntime"}
        peers = [peer for peer in needs if has(needs[peer]) and not (on_cuda and peer == "optimum")]
    names = options.only or (["decoding", "placement"] if on_cuda else [n for n in PARTS if n != "placement"])
    options.out.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "bench/speed.py", *(sys.argv[1:] if argv is None else argv)])
    facts = dict(command=command, today=date.today(), machine=machine(), versions=versions())
    text = INTRODUCTION.format(**facts, threads=options.threads, rounds=options.rounds)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        size = SIZES[options.size]
        bench = Bench(Path(folder), size, options.device, options.threads, options.rounds, peers, options.out)
        exporting = prepare(bench)
        for name in names:
            title, part = PARTS[name]
            print(f"\n## {title}", flush=True)
            lines = part(bench)
            print("\n".join(lines), flush=True)
            text += f"\n## {title}\n\n" + "\n".join(lines) + "\n"
    text += "\n## Exporting, with proof\n\n" + "; ".join(exporting) + ".\n"
    text += "" if on_cuda else CUDA_IS_ELSEWHERE
    if not options.only:
        path = options.out / ("performance-cuda.md" if on_cuda else "performance.md")
        path.write_text(text, encoding="utf-8")
        print(f"\nwrote {path}")
    return 0


def has(module: str) -> bool:
    """Is it installed?"""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    sys.exit(main())
