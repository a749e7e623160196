"""Turn a checkpoint into ONNX graphs, prove that they equal PyTorch, and only then publish them.

usage: python export_onnx.py CHECKPOINT [options]

examples:
  python export_onnx.py copy.pt                          forward, encoder and decoder into onnx/
  python export_onnx.py copy.pt --graphs forward --out .
  python export_onnx.py copy.pt --dtype float16 --out onnx16

forward.onnx is the model as it trains; encoder.onnx and decoder.onnx are for decoding step by step with a
cache of keys and values. docs/onnx.md says what goes in and comes out.
"""

import argparse
import copy
import hashlib
import importlib.util
import logging
import os
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from transformer import State, Transformer, greedy_search, load_checkpoint, padding_mask

with suppress(ImportError):  # main says what is missing, and how to get it
    import numpy as np
    import onnx
    import onnx_ir
    import onnxruntime as ort
    from tqdm import tqdm

    import run_onnx

OPSET, IR_VERSION = 18, 8  # the first IR that knows this opset: the oldest runtimes load it
REFUSED = {"Attention", "Dropout", "If", "IsNaN", "Scan", "SequenceEmpty", "SequenceInsert", "Trilu"}
TRACED = dict(batch=2, src_len=7, tgt_len=5, new_len=3, past_len=11)  # neither 0 nor 1, and all different
PROVED = (  # batch, src_len, tgt_len and new_len, past_len; none of these was traced
    (1, 1, 1, 0), (1, 2, 2, 1), (2, 7, 1, 0), (2, 7, 5, 2), (3, 5, 8, 7), (3, 8, 4, 0), (8, 3, 1, 11),
    (8, 13, 6, 1), (1, 64, 512, 0), (2, 512, 1, 64), (1, 512, 3, 509),
)  # fmt: skip
N_SEARCHED, TOLERANCE = 200, 1e-4  # sources of the search; difference that float32 may have
LARGEST = 2**31 - 2**20  # bytes of weights in one file; protobuf ends at 2 GB


class Failed(Exception):
    """The exporter could not do it, or a graph does not keep its contract or does not equal PyTorch."""


class Encoder(nn.Module):
    """src -> what decoding needs: projected memory and an empty past, layer by layer."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, src: Tensor) -> list[Tensor]:
        """(B, S) -> cross_*, then past_*."""
        state = self.model.start(src)
        return [part for pair in state.cross + state.past for part in pair]


class Decoder(nn.Module):
    """One step: the new ids, the source (for its mask) and the caches -> logits and the longer caches."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, tgt: Tensor, src: Tensor, *caches: Tensor) -> list[Tensor]:
        """(B, N), (B, S), cross_* and past_* -> logits (B, N, V), present_*."""
        pairs = list(zip(caches[::2], caches[1::2], strict=True))
        cross, past = pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]
        state = State(padding_mask(src, self.model.config.pad_id), cross, past)
        logits, state = self.model.step(tgt, state)
        return [logits, *(part for pair in state.past for part in pair)]


Axes = tuple[str | int, ...]  # a name is a dynamic axis, a number a fixed one


class Graph(NamedTuple):
    """The contract of one file: a module, and its inputs and outputs in order: {name: axes}. Ids have two."""

    module: nn.Module
    inputs: dict[str, Axes]
    outputs: dict[str, Axes]


def graphs(model: Transformer) -> dict[str, Graph]:
    """The table of DESIGN: what each graph is, takes and gives."""
    config = model.config
    heads, d_k, n_ids = config.n_heads, config.d_model // config.n_heads, config.tgt_vocab_size

    def caches(kind: str, length: str | int) -> dict[str, Axes]:
        names = [f"{kind}_{part}_{layer}" for layer in range(config.n_layers) for part in ("key", "value")]
        return {name: ("batch", heads, length, d_k) for name in names}

    src, cross = {"src": ("batch", "src_len")}, caches("cross", "src_len")
    logits = {name: {"logits": ("batch", name, n_ids)} for name in ("tgt_len", "new_len")}
    past, present = caches("past", "past_len"), caches("present", "total_len")
    return {
        "forward": Graph(model, src | {"tgt": ("batch", "tgt_len")}, logits["tgt_len"]),
        "encoder": Graph(Encoder(model), src, cross | caches("past", 0)),
        "decoder": Graph(
            Decoder(model), {"tgt": ("batch", "new_len")} | src | cross | past, logits["new_len"] | present
        ),
    }


def example(graph: Graph, model: Transformer, sizes: dict[str, int], seed: int = 0) -> list[Tensor]:
    """Random inputs of these sizes. Sources are ragged; of 3 or more the last is only padding."""
    random = torch.Generator().manual_seed(seed)
    config, inputs = model.config, []
    for name, axes in graph.inputs.items():
        shape = [sizes[axis] if isinstance(axis, str) else axis for axis in axes]
        if len(shape) == 2:
            ids = torch.randint(config.src_vocab_size, shape, generator=random)
            if name == "src":
                length = torch.tensor([[max(shape[1] - 2 * row, 1)] for row in range(shape[0])])
                length[2:][-1:] = 0
                ids = ids.masked_fill(torch.arange(shape[1]) >= length, config.pad_id)
            inputs.append(ids)
        else:
            inputs.append(torch.randn(shape, generator=random).to(model.projection.weight.dtype))
    return inputs


@contextmanager
def quiet() -> Iterator[None]:
    """The exporter's chatter is held back; its errors are not."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def trace(graph: Graph, model: Transformer) -> "onnx_ir.Model":
    """The graph as ONNX, with nothing of this machine in it. Failed says why it can't be had."""
    dynamic = [
        {i: axis for i, axis in enumerate(axes) if isinstance(axis, str)} for axes in graph.inputs.values()
    ]
    n_ids = sum(len(axes) == 2 for axes in graph.inputs.values())
    caches = [tuple(dynamic[n_ids:])] if len(dynamic) > n_ids else []  # *caches is one argument
    try:
        with quiet():
            onnx_model = torch.onnx.export(
                graph.module,
                tuple(example(graph, model, TRACED)),
                dynamo=True,
                opset_version=OPSET,
                input_names=list(graph.inputs),
                output_names=list(graph.outputs),
                dynamic_shapes=(*dynamic[:n_ids], *caches),
                verbose=False,
            ).model
    except Exception as error:  # of many kinds
        cause = " ".join(str(error.__cause__ or error).split())
        raise Failed(f"torch's exporter: {cause[:300]}") from error
    onnx_model.ir_version = IR_VERSION
    for value, axes in zip(onnx_model.graph.outputs, graph.outputs.values(), strict=True):
        sums = [dim for dim in value.shape if not isinstance(dim, int) and "+" in str(dim.value)]
        value.shape = onnx_ir.Shape(
            axis if dim in sums else dim for dim, axis in zip(value.shape, axes, strict=True)
        )
    if model.config.tie_embeddings:
        tie(onnx_model)
    values = (value for node in onnx_model.graph for value in node.outputs)
    for part in (
        onnx_model.graph,
        *onnx_model.graph,
        *onnx_model.graph.initializers.values(),
        *onnx_model.graph.inputs,
        *values,
    ):
        part.metadata_props.clear()  # stack traces, with local paths
        part.doc_string = None
    return onnx_model


def tie(onnx_model: "onnx_ir.Model") -> None:
    """Store the matrix of section 3.4 once, (d_model, V), for the lookups as well as the projection.

    The exporter leaves it (V, d_model), and adds a transposed copy to the file or leaves it to the runtime.
    """
    graph = onnx_model.graph
    lookups = [node for node in graph if node.op_type == "Gather" and len(node.inputs[0].shape) == 2]
    matrix = lookups[0].inputs[0]
    tied = onnx_ir.val("tied", const_value=onnx_ir.tensor(matrix.const_value.numpy().T.copy(), name="tied"))
    tied.shape, tied.dtype = tied.const_value.shape, tied.const_value.dtype
    graph.register_initializer(tied)
    for node in lookups:
        columns = onnx_ir.node("Gather", [tied, node.inputs[1]], attributes={"axis": 1})
        rows = onnx_ir.node("Transpose", [columns.outputs[0]], attributes={"perm": [1, 2, 0]})
        rows.outputs[0].shape, rows.outputs[0].dtype = node.outputs[0].shape, node.outputs[0].dtype
        graph.insert_before(node, [columns, rows])
        onnx_ir.convenience.replace_all_uses_with(node.outputs, rows.outputs)
        graph.remove(node, safe=True)
    if logits := [value for value in graph.outputs if value.name == "logits"]:
        projection = logits[0].producer()
        transposed = projection.inputs[1]
        projection.replace_input_with(1, tied)
        if transposed.producer() is None:
            del graph.initializers[transposed.name]
        else:
            graph.remove(transposed.producer(), safe=True)
    del graph.initializers[matrix.name]


def keeps_contract(graph: Graph, onnx_model: "onnx_ir.Model", model: Transformer) -> None:
    """Failed unless names, axes and operators are as promised, and each weight is there once."""
    for kind, promised in (("inputs", graph.inputs), ("outputs", graph.outputs)):
        found = {
            value.name: tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape)
            for value in getattr(onnx_model.graph, kind)
        }
        if list(found.items()) != list(promised.items()):
            raise Failed(f"{kind} are {found}, but must be {promised}")
    domains = {node.domain for node in onnx_model.graph} | set(onnx_model.opset_imports)
    if domains != {""} or onnx_model.opset_imports[""] != OPSET or onnx_model.functions:
        raise Failed(f"opsets are {onnx_model.opset_imports}, but must be the standard one, {OPSET}, alone")
    if refused := REFUSED & {node.op_type for node in onnx_model.graph}:
        raise Failed(f"operators {sorted(refused)} are there, but must not be: some runtime lacks them")
    n_stored = sum(weight.const_value.size for weight in onnx_model.graph.initializers.values())
    n_unique = sum(weight.numel() for weight in model.parameters())
    if n_stored > n_unique + 1000 + model.config.d_model:  # shapes, masks, frequencies
        raise Failed(
            f"{n_stored:,} numbers are stored, but the model has only {n_unique:,}: a weight is there twice"
        )


def prove(graph: Graph, model: Transformer, path: Path) -> tuple[float, float]:
    """-> the largest difference from PyTorch over all of PROVED, optimised or not; PyTorch's rounding.

    Failed if it is above 1e-4 in float32. In half precision both round: as much as PyTorch loses to
    its own float32 on the same inputs, either may lose, in opposite directions; so twice that is allowed.
    """
    sessions = []
    for level in (ort.GraphOptimizationLevel.ORT_DISABLE_ALL, ort.GraphOptimizationLevel.ORT_ENABLE_ALL):
        options = ort.SessionOptions()
        options.graph_optimization_level, options.log_severity_level = level, 4
        sessions.append(ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]))
    exact = copy.deepcopy(graph.module).float() if model.projection.weight.dtype != torch.float32 else None
    largest, rounding = 0.0, 0.0
    for seed, (batch, src_len, tgt_len, past_len) in enumerate(PROVED):
        sizes = dict(batch=batch, src_len=src_len, tgt_len=tgt_len, new_len=tgt_len, past_len=past_len)
        inputs = example(graph, model, sizes, seed)
        expected = outputs_of(graph.module, inputs)
        if exact is not None:
            truth = outputs_of(exact, [x.float() if x.is_floating_point() else x for x in inputs])
            rounding = max(
                rounding, *(difference(one, other) for one, other in zip(expected, truth, strict=True))
            )
        for session in sessions:
            outputs = session.run(
                list(graph.outputs), dict(zip(graph.inputs, map(Tensor.numpy, inputs), strict=True))
            )
            for name, output, wanted in zip(graph.outputs, outputs, expected, strict=True):
                if output.shape != wanted.shape or output.dtype != wanted.dtype:
                    raise Failed(
                        f"{name} is {output.dtype}{output.shape}, not {wanted.dtype}{wanted.shape}: {sizes}"
                    )
                largest = max(largest, difference(output, wanted))
    allowed = TOLERANCE if exact is None else 2 * rounding
    if largest > allowed:
        raise Failed(f"differs from PyTorch by {largest:.1e}, but {allowed:.1e} is allowed")
    return largest, rounding


def outputs_of(module: nn.Module, inputs: list[Tensor]) -> list["np.ndarray"]:
    """The module's outputs, in order, as arrays."""
    with torch.no_grad():
        outputs = module(*inputs)
    return [output.numpy() for output in ([outputs] if isinstance(outputs, Tensor) else outputs)]


def difference(one: "np.ndarray", other: "np.ndarray") -> float:
    """The largest absolute difference, computed in float64; infinite where either is not finite."""
    if not (np.isfinite(one).all() and np.isfinite(other).all()):
        return float("inf")
    return float(np.abs(one.astype(np.float64) - other).max(initial=0.0))


def prove_search(model: Transformer, folder: Path, rounding: float) -> None:
    """Failed unless encoder and decoder, step by step, give greedy_search's tokens on random sources.

    Where half precision chooses another id, PyTorch's own logits of both must be within twice the rounding.
    """
    random, sessions = torch.Generator().manual_seed(0), run_onnx.load_pair(folder)
    for _ in range(0, N_SEARCHED, 20):
        lengths = torch.randint(1, 20, (20,), generator=random).tolist()
        sources = [
            torch.randint(model.config.src_vocab_size, (n,), generator=random).tolist() for n in lengths
        ]
        src = torch.from_numpy(run_onnx.pad(sources, run_onnx.metadata(sessions[1])))
        found = run_onnx.greedy(sessions, sources, 24)
        for row, (ours, theirs) in enumerate(zip(found, greedy_search(model, src, 24).numpy(), strict=True)):
            unequal = [
                place for place, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other
            ]
            if unequal:
                ids = theirs[: unequal[0] + 1].copy()
                tgt = torch.from_numpy(np.insert(ids[:-1], 0, model.config.bos_id))[None]
                logits = outputs_of(model, [src[row : row + 1], tgt])[0][0, -1].astype(np.float64)
                if abs(logits[ids[-1]] - logits[ours[unequal[0]]]) > 2 * rounding:
                    raise Failed(f"the search finds other tokens than PyTorch for {sources[row]}")


def export(model: Transformer, out: Path, names: list[str], facts: dict[str, str]) -> list[str]:
    """Trace, check, prove, publish into out; all of the graphs or none. -> a line of the report for each."""
    was_training, report, rounding = model.training, [], 0.0
    can_search = {"encoder", "decoder"} <= set(names)
    progress = tqdm(total=2 * len(names) + can_search, unit="", disable=not sys.stderr.isatty(), leave=False)

    def say(what: str) -> None:
        progress.set_description(what)
        progress.update()
        if progress.disable:
            print(what, file=sys.stderr, flush=True)

    out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".unproved-", dir=out))
    try:
        table = graphs(model.eval())
        for name in names:
            say(f"{name}: tracing")
            onnx_model = trace(table[name], model)
            keeps_contract(table[name], onnx_model, model)
            onnx_model.metadata_props.update(facts | {"graph": name})
            path = folder / f"{name}.onnx"
            n_bytes = sum(weight.const_value.nbytes for weight in onnx_model.graph.initializers.values())
            onnx_ir.save(onnx_model, path, external_data=f"{name}.onnx.data" if n_bytes > LARGEST else None)
            say(f"{name}: proving at {len(PROVED)} shapes, optimised and not")
            onnx.checker.check_model(str(path), full_check=True)
            worst, lost = prove(table[name], model, path)
            rounding = max(rounding, lost)
            n_ops = Counter(node.op_type for node in onnx_model.graph)
            size = sum(file.stat().st_size for file in folder.glob(f"{name}.onnx*")) / 1e6
            report.append(
                f"{name:8} {out / path.name!s:24} {size:8.2f} MB {n_ops.total():5} nodes {worst:10.1e}"
            )
            report.append("         " + ", ".join(f"{op} {n}" for op, n in n_ops.most_common()))
        if can_search:
            say(f"encoder and decoder: greedy search of {N_SEARCHED} sources")
            prove_search(model, folder, rounding)
            report.append(f"encoder, decoder step by step: greedy_search's tokens on {N_SEARCHED} sources")
        for file in folder.iterdir():
            os.replace(file, out / file.name)
    except OSError:  # a full disk, not a failed proof
        raise
    except Exception as error:  # of torch, onnx and onnxruntime too, which have no class in common
        raise Failed(f"{name}.onnx is not published: {' '.join(str(error).split())[:400]}") from error
    finally:
        progress.close()
        model.train(was_training)
        shutil.rmtree(folder, ignore_errors=True)
    return report


def main(argv: list[str] | None = None) -> int:
    """Export and prove. 0: all graphs are published; 1: one failed, so none is; 2: bad input."""
    usage, examples = __doc__.split("examples:")
    parser = argparse.ArgumentParser("export_onnx.py", argparse.SUPPRESS, usage, "examples:" + examples)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    names = ("forward", "encoder", "decoder")
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", type=Path, help="from train_copy.py or save_checkpoint"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("onnx"), metavar="DIR", help="folder (default: onnx)"
    )
    parser.add_argument("--graphs", nargs="+", choices=names, default=names, help="which (default: all)")
    parser.add_argument("--dtype", choices=("float32", "float16"), default="float32", help="default: float32")
    options = parser.parse_args(argv)
    needed = ("onnx", "onnxscript", "onnxruntime", "numpy", "tqdm")
    if missing := [package for package in needed if importlib.util.find_spec(package) is None]:
        parser.error(f"not installed: {', '.join(missing)}. Try: pip install {' '.join(missing)}")
    try:
        model = load_checkpoint(options.checkpoint).to(getattr(torch, options.dtype))
        config = {field: str(value) for field, value in vars(model.config).items()}
        facts = config | {
            "dtype": options.dtype,
            "opset": str(OPSET),
            "torch_version": torch.__version__,
            "checkpoint_sha256": hashlib.sha256(options.checkpoint.read_bytes()).hexdigest(),
        }
        report = export(model, options.out, list(dict.fromkeys(options.graphs)), facts)
    except Failed as error:
        print(f"export_onnx.py: failed: {error}", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print("graph    file                         size        nodes    largest difference from PyTorch")
    print("\n".join(report))
    print(f"published; next: python run_onnx.py {options.out} 5 6 7 --check {options.checkpoint}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
