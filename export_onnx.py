"""Turn a checkpoint into ONNX graphs, prove that they equal PyTorch, and only then publish them.

usage: python export_onnx.py CHECKPOINT [options]

examples:
  python export_onnx.py copy.pt                          all five graphs into onnx/
  python export_onnx.py copy.pt --graphs beam --beam-size 8 --alpha 1
  python export_onnx.py copy.pt --int8 --out onnx8       weights in 8 bits: a quarter of the size
  python export_onnx.py copy.pt --shared-weights         one file of weights for all graphs

greedy.onnx and beam.onnx hold the whole search: ids in, ids out. forward.onnx is the model as it trains;
encoder.onnx and decoder.onnx are for a search of your own. docs/onnx.md says what goes in and comes out.
"""

import argparse
import copy
import hashlib
import importlib.util
import logging
import math
import os
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from transformer import State, Transformer, beam_search, greedy_search, load_checkpoint, padding_mask, require

with suppress(ImportError):  # main says what is missing, and how to get it
    import numpy as np
    import onnx
    import onnx_ir
    import onnxruntime as ort
    from onnx_ir.passes.common import (
        ClearMetadataAndDocStringPass,
        CommonSubexpressionEliminationPass,
        NameFixPass,
        RemoveUnusedNodesPass,
    )
    from onnxscript import GraphBuilder
    from tqdm import tqdm

    import run_onnx

    BOOL, FLOAT, INT64 = onnx_ir.DataType.BOOL, onnx_ir.DataType.FLOAT, onnx_ir.DataType.INT64

OPSET, IR_VERSION = 18, 8  # the first IR that knows this opset: the oldest runtimes load it
REFUSED = {"Attention", "Dropout", "If", "IsNaN", "Scan", "SequenceEmpty", "SequenceInsert", "Trilu"}
TRACED = (2, 7, 5, 11)  # batch, src_len, tgt_len or new_len, past_len: neither 0 nor 1, and all different
PROVED = (  # likewise; none of these was traced
    (1, 1, 1, 0), (1, 2, 2, 1), (2, 7, 1, 0), (2, 7, 5, 2), (3, 5, 8, 7), (3, 8, 4, 0), (8, 3, 1, 11),
    (8, 13, 6, 1), (1, 64, 512, 0), (2, 512, 1, 64), (1, 512, 3, 509),
)  # fmt: skip
SEARCHED = tuple(  # batch, src_len, max_len: 240 sources
    (batch, 1 + 2 * n, (1, 2, 64)[n % 3]) for n in range(12) for batch in (1, 3, 16)
)
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "int8": 0.1}  # absolute; relative to the largest where rounded
LARGEST = 2**31 - 2**20  # bytes of weights in one file; protobuf ends at 2 GB
END = 2**63 - 1  # where a Slice goes to the end
LOWEST = torch.finfo(torch.float32).min  # the score of an empty place


class Failed(Exception):
    """The exporter could not do it, or a graph does not keep its contract or does not equal PyTorch."""


# What is exported


class Matrix(nn.Module):
    """A weight as the graphs store it: once, (in, out), for products as well as for looking columns up.

    torch's exporter leaves it (out, in), and adds a transposed copy or leaves transposing to the runtime.
    int8: a scale a column; what it is multiplied by is rounded to 8 bits as it comes.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, int8: bool) -> None:
        super().__init__()
        matrix, self.bias = weight.detach().T.contiguous(), bias
        scale = (matrix.abs().amax(0) / 127).clamp(min=torch.finfo(matrix.dtype).tiny) if int8 else None
        self.register_buffer("matrix", (matrix / scale).round().to(torch.int8) if int8 else matrix)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, in) -> (B, T, out), or ids (B, T) -> (B, T, in)."""
        matrix, scale, symbolic = self.matrix, self.scale, torch.onnx.ops.symbolic
        if not x.is_floating_point():
            shape = (matrix.size(0), *x.shape)
            columns = symbolic("Gather", (matrix, x), dict(axis=1), dtype=matrix.dtype, shape=shape)
            columns = columns.permute(1, 2, 0)
            if scale is None:
                return columns
            return columns.float() * symbolic("Gather", (scale, x), dtype=scale.dtype, shape=x.shape)[..., None]
        if scale is None:
            product = x @ matrix
        else:
            types, shapes = (torch.uint8, x.dtype, torch.uint8), (x.shape, (), ())
            rounded, x_scale, zero = torch.onnx.ops.symbolic_multi_out(
                "DynamicQuantizeLinear", (x,), dtypes=types, shapes=shapes
            )
            shape = (*x.shape[:-1], matrix.size(1))
            product = symbolic("MatMulInteger", (rounded, matrix, zero), dtype=torch.int32, shape=shape)
            product = product.float() * (x_scale * scale)
        return product if self.bias is None else product + self.bias


def stored(model: Transformer, int8: bool) -> Transformer:
    """A copy whose weights are Matrix; those that are one stay one."""
    model, kept = copy.deepcopy(model), {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, (nn.Linear, nn.Embedding)):
                weight, bias = child.weight, getattr(child, "bias", None)
                setattr(parent, name, kept.setdefault(weight, Matrix(weight, bias, int8)))
    return model


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
    """The contract of one file: what computes it in PyTorch, its inputs and outputs in order: {name: axes}."""

    reference: Callable
    inputs: dict[str, Axes]
    outputs: dict[str, Axes]


def graphs(model: Transformer, beam_size: int = 4, alpha: float = 0.6) -> dict[str, Graph]:
    """The table of docs/onnx.md: what each graph is, takes and gives. Ids have two axes, max_len none."""
    config = model.config
    heads, d_k, n_ids = config.n_heads, config.d_model // config.n_heads, config.tgt_vocab_size

    def caches(kind: str, length: str | int) -> dict[str, Axes]:
        names = [f"{kind}_{part}_{layer}" for layer in range(config.n_layers) for part in ("key", "value")]
        return {name: ("batch", heads, length, d_k) for name in names}

    src, search = {"src": ("batch", "src_len")}, {"src": ("batch", "src_len"), "max_len": ()}
    cross, past, present = caches("cross", "src_len"), caches("past", "past_len"), caches("present", "total_len")
    tgt, new = {"tgt": ("batch", "tgt_len")}, {"tgt": ("batch", "new_len")}
    beams = {"tokens": ("batch", beam_size, "tgt_len"), "scores": ("batch", beam_size)}
    return {
        "forward": Graph(model, src | tgt, {"logits": ("batch", "tgt_len", n_ids)}),
        "encoder": Graph(Encoder(model), src, cross | caches("past", 0)),
        "decoder": Graph(
            Decoder(model), new | src | cross | past, {"logits": ("batch", "new_len", n_ids)} | present
        ),
        "greedy": Graph(lambda src, max_len: greedy_search(model, src, int(max_len)), search, {"tokens": ("batch", "tgt_len")}),
        "beam": Graph(lambda src, n: beam_search(model, src, int(n), beam_size, alpha), search, beams),
    }


# How it becomes a graph


def example(graph: Graph, model: Transformer, sizes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    """Random inputs of these sizes, a row of PROVED. Sources are ragged; of 3 or more the last is only padding."""
    random = torch.Generator().manual_seed(seed)
    batch, src_len, tgt_len, past_len = sizes
    sizes = dict(batch=batch, src_len=src_len, tgt_len=tgt_len, new_len=tgt_len, past_len=past_len)
    config, inputs = model.config, []
    for name, axes in graph.inputs.items():
        shape = [sizes[axis] if isinstance(axis, str) else axis for axis in axes]
        if name == "max_len":
            inputs.append(torch.tensor(tgt_len))
        elif len(shape) == 2:
            ids = torch.randint(config.src_vocab_size, shape, generator=random)
            if name == "src":
                length = torch.tensor([[max(src_len - 2 * row, 1)] for row in range(batch)])
                length[2:][-1:] = 0
                ids = ids.masked_fill(torch.arange(src_len) >= length, config.pad_id)
            inputs.append(ids)
        else:
            inputs.append(torch.randn(shape, generator=random))
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


def trace(kind: str, graph: Graph, model: Transformer) -> "onnx_ir.Model":
    """The graph as ONNX, its weights named as in the model. Failed says why it can't be had."""
    axes = [{i: axis for i, axis in enumerate(axes) if isinstance(axis, str)} for axes in graph.inputs.values()]
    n_ids = sum(len(axes) == 2 for axes in graph.inputs.values())
    caches = [tuple(axes[n_ids:])] if len(axes) > n_ids else []  # *caches is one argument
    dtype = model.encoder[0].norm_self.weight.dtype
    inputs = [x.to(dtype) if x.is_floating_point() else x for x in example(graph, model, TRACED)]
    try:
        with quiet():
            onnx_model = torch.onnx.export(
                graph.reference,
                tuple(inputs),
                dynamo=True,
                opset_version=OPSET,
                input_names=list(graph.inputs),
                output_names=list(graph.outputs),
                dynamic_shapes=(*axes[:n_ids], *caches),
                verbose=False,
            ).model
    except Exception as error:  # of many kinds
        cause = " ".join(str(error.__cause__ or error).split())
        raise Failed(f"torch's exporter: {cause[:300]}") from error
    for value, axes in zip(onnx_model.graph.outputs, graph.outputs.values(), strict=True):
        sums = [dim for dim in value.shape if not isinstance(dim, int) and "+" in str(dim.value)]
        value.shape = onnx_ir.Shape(
            axis if dim in sums else dim for dim, axis in zip(value.shape, axes, strict=True)
        )
    weights = graph.reference.state_dict()
    for name, value in list(onnx_model.graph.initializers.items()):
        value.name = name.removeprefix("model.") if name in weights else f"{kind}.{name}"
    return onnx_model


def call(op: "OpBuilder", traced: "onnx_ir.Model", *inputs: "onnx_ir.Value") -> list["onnx_ir.Value"]:
    """The nodes of a traced graph, once more, where op builds; its weights go to the outermost graph."""
    graph, outermost = traced.graph.clone(), op.builder.root.graph
    for name, weight in list(graph.initializers.items()):
        del graph.initializers[name]
        if name in outermost.initializers:
            onnx_ir.convenience.replace_all_uses_with(weight, outermost.initializers[name])
        else:
            outermost.register_initializer(weight)
    return op.call_inline(onnx_ir.Function("", graph.name, graph=graph, attributes=[]), *inputs)


def loop(op: "OpBuilder", max_len: "onnx_ir.Value", body: Callable, *state: "onnx_ir.Value") -> list:
    """Loop: body takes op, the number of the step and the state, and gives whether to go on and the next state."""
    inputs = [onnx_ir.val("number", INT64, []), onnx_ir.val("going_on", BOOL, [])]
    inputs += [onnx_ir.val(f"state_{i}", value.dtype) for i, value in enumerate(state)]
    outputs = [onnx_ir.val(f"next_{i}", value.dtype) for i, value in enumerate(inputs[1:])]
    graph = op.builder.subgraph(lambda op, number, _, *state: body(op, number, *state), inputs, outputs)
    return op.Loop(max_len, True, *state, body=graph, _outputs=len(state))


def greedy(op, src, max_len, encoder, decoder, config) -> list["onnx_ir.Value"]:
    """greedy_search in ONNX operators."""
    caches = call(op, encoder, src)
    cross, past = caches[: len(caches) // 2], caches[len(caches) // 2 :]

    def step(op, number, tokens, ended, *past):
        logits, *past = call(op, decoder, op.Slice(tokens, [-1], [END], [1]), src, *cross, *past)
        token = op.Where(ended, config.pad_id, op.ArgMax(logits, axis=-1, keepdims=0))
        ended = op.Or(ended, op.Equal(token, config.eos_id))
        goes_on = op.Equal(op.ReduceMin(op.Cast(ended, to=INT64), keepdims=0), 0)
        return goes_on, op.Concat(tokens, token, axis=1), ended, *past

    column = op.Concat(op.Shape(src, end=1), [1], axis=0)
    tokens, *_ = loop(op, max_len, step, op.Expand(config.bos_id, column), op.Expand(False, column), *past)
    return [op.Slice(tokens, [1], [END], [1])]


def beam(op, src, max_len, encoder, decoder, config, beam_size, alpha) -> list["onnx_ir.Value"]:
    """beam_search in ONNX operators. A beam's own best 2 beam_size ids hold all that can be of the row's best.

    ids (B, 2 beam, 1 + length) are the hypotheses that have ended, then those alive; scores (B, 2 beam) likewise.
    """
    n_best = min(2 * beam_size, config.tgt_vocab_size)
    n_rows = op.Shape(src, end=1)
    row = op.Unsqueeze(op.Range(0, op.Squeeze(n_rows), 1), [1])  # (B, 1)
    repeated = op.Reshape(op.Expand(row, [1, beam_size]), [-1])  # (B beam,): rows, each beam_size times
    src, *caches = (op.Gather(value, repeated) for value in (src, *call(op, encoder, src)))
    cross, past = caches[: len(caches) // 2], caches[len(caches) // 2 :]
    first_alive, first_of_three = op.Mul(row, beam_size), op.Mul(row, 3 * beam_size)
    pads = op.Expand(config.pad_id, op.Concat(n_rows, [beam_size, 1], axis=0))

    def penalty(op, length):
        return op.Pow(op.Div(op.Add(op.Cast(length, to=FLOAT), 5.0), 6.0), alpha)

    def step(op, number, ids, scores, *past):
        (ended, alive), (done, sums) = (op.Split(x, axis=1, num_outputs=2, _outputs=2) for x in (ids, scores))
        tgt = op.Flatten(op.Slice(alive, [-1], [END], [2]), axis=2)
        logits, *past = call(op, decoder, tgt, src, *cross, *past)  # (B beam, 1, V)
        logits = op.Cast(logits, to=FLOAT)
        best, token = op.TopK(logits, [n_best], _outputs=2)
        log_probs = op.Sub(best, op.ReduceLogSumExp(logits, [-1]))
        log_probs = op.Add(op.Reshape(sums, [-1, 1, 1]), log_probs)
        best, index = op.TopK(op.Reshape(log_probs, [-1, beam_size * n_best]), [2 * beam_size], _outputs=2)
        token = op.GatherElements(op.Reshape(token, [-1, beam_size * n_best]), index, axis=1)  # (B, 2 beam)
        parent = op.Add(first_alive, op.Div(index, n_best))
        ends = op.Equal(token, config.eos_id)
        has_room = op.Equal(op.ReduceMin(done, [1]), LOWEST)  # a full row has stopped
        joins = op.And(op.And(ends, has_room), op.Greater(best, LOWEST))
        joining = op.Where(joins, op.Div(best, penalty(op, op.Add(number, 1))), LOWEST)
        joining = op.Slice(joining, [0], [beam_size], [1])
        done, keep = op.TopK(op.Concat(done, joining, axis=1), [beam_size], _outputs=2)
        sums, on = op.TopK(op.Where(ends, -math.inf, best), [beam_size], _outputs=2)
        grown = op.Concat(op.Gather(op.Flatten(alive, axis=2), parent), op.Unsqueeze(token, [2]), axis=2)
        three = op.Concat(op.Concat(ended, pads, axis=2), grown, axis=1)  # (B, 3 beam, 1 + length)
        kept = op.Add(first_of_three, op.Concat(keep, op.Add(on, beam_size), axis=1))
        ids, scores = op.Gather(op.Flatten(three, axis=2), kept), op.Concat(done, sums, axis=1)
        source = op.Reshape(op.GatherElements(parent, on, axis=1), [-1])
        past = [op.Gather(value, source) for value in past]
        return op.Equal(op.ReduceMin(done, keepdims=0), LOWEST), ids, scores, *past

    ids = op.Expand(config.bos_id, op.Concat(n_rows, [2 * beam_size, 1], axis=0))
    scores = [LOWEST] * beam_size + [0.0] + [LOWEST] * (beam_size - 1)
    scores = op.Expand(scores, op.Concat(n_rows, [1], axis=0))
    ids, scores, *_ = loop(op, max_len, step, ids, scores, *past)
    ids = op.Slice(ids, [1], [END], [2])
    done, sums = op.Split(scores, axis=1, num_outputs=2, _outputs=2)
    unended = op.Where(op.Greater(sums, LOWEST), op.Div(sums, penalty(op, op.Shape(ids, start=2))), LOWEST)
    scores = op.Concat(done, unended, axis=1)
    _, place = op.TopK(op.Cast(op.Greater(scores, LOWEST), to=FLOAT), [beam_size], _outputs=2)  # empty ones last
    scores = op.GatherElements(scores, place, axis=1)
    tokens = op.Gather(op.Flatten(ids, axis=2), op.Add(op.Mul(row, 2 * beam_size), place))
    return [op.Where(op.Equal(op.Unsqueeze(scores, [2]), LOWEST), config.pad_id, tokens), scores]


def build(model: Transformer, names: list[str], int8: bool, beam_size: int, alpha: float) -> Iterator[tuple]:
    """-> name, ONNX graph, for each of names; what is traced for one serves the next."""
    model, config = stored(model, int8), model.config
    table, traced = graphs(model, beam_size, alpha), {}

    def part(name: str) -> "onnx_ir.Model":
        return traced[name] if name in traced else traced.setdefault(name, trace(name, table[name], model))

    for name in names:
        inputs = [onnx_ir.val(key, INT64, axes) for key, axes in table[name].inputs.items()]
        graph = onnx_ir.Graph(inputs, [], nodes=[], opset_imports={"": OPSET}, name=name)
        op = GraphBuilder(graph).op
        if name == "greedy":
            outputs = greedy(op, *inputs, part("encoder"), part("decoder"), config)
        elif name == "beam":
            outputs = beam(op, *inputs, part("encoder"), part("decoder"), config, beam_size, alpha)
        else:
            graph = part(name).graph.clone()
            outputs = []
        for value, (key, axes) in zip(outputs, table[name].outputs.items(), strict=bool(outputs)):
            value.name, value.shape = key, onnx_ir.Shape(axes)
            graph.outputs.append(value)
        onnx_model = onnx_ir.Model(graph, ir_version=IR_VERSION)
        for tidy in (CommonSubexpressionEliminationPass(), RemoveUnusedNodesPass(), NameFixPass(), ClearMetadataAndDocStringPass()):
            tidy(onnx_model)
        yield name, onnx_model
