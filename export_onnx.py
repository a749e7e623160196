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

from __future__ import annotations

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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from functools import cache, partial
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, pad

from transformer import (
    State,
    Transformer,
    TransformerConfig,
    beam_search,
    greedy_search,
    load_checkpoint,
    padding_mask,
    require,
)

with suppress(ImportError):  # main says what is missing, and how to get it
    import numpy as np
    import onnx
    import onnx_ir
    import onnxruntime as ort
    from onnx_ir import DataType, Model, Value
    from onnx_ir.passes.common import (
        ClearMetadataAndDocStringPass,
        CommonSubexpressionEliminationPass,
        NameFixPass,
        RemoveUnusedNodesPass,
    )
    from onnxscript import GraphBuilder, OpBuilder
    from tqdm import tqdm

    import run_onnx

OPSET, IR_VERSION = 18, 8  # the first IR that knows this opset: the oldest runtimes load it
REFUSED = {"Attention", "Dropout", "If", "IsNaN", "Scan", "SequenceEmpty", "SequenceInsert", "Trilu"}
TRACED = (2, 7, 5, 11)  # batch, src_len, tgt_len or new_len, past_len: neither 0 nor 1, and all different
PROVED = (  # likewise; none of these was traced
    (1, 1, 1, 0), (1, 2, 2, 1), (2, 7, 1, 0), (2, 7, 5, 2), (3, 5, 8, 7), (3, 8, 4, 0), (8, 3, 1, 11),
    (8, 13, 6, 1), (1, 64, 512, 0), (2, 512, 1, 64), (1, 512, 3, 509),
)  # fmt: skip
SEARCHED = tuple(  # batch, src_len, max_len, 0: 240 sources
    (batch, 1 + 2 * n, (1, 2, 64)[n % 3], 0) for n in range(12) for batch in (1, 3, 16)
)
TOLERANCE = dict(float32=1e-4, float16=5e-3, int8=0.1)  # the largest difference; where rounded, a share
LARGEST = 2**31 - 2**20  # bytes of weights in one file; protobuf ends at 2 GB
END = 2**63 - 1  # where a Slice goes to the end
LOWEST = torch.finfo(torch.float32).min  # the score of an empty place


class Failed(Exception):
    """The exporter could not do it, or a graph does not keep its contract or does not equal PyTorch."""


# What is exported


class Matrix(nn.Module):
    """A weight as the graphs store it, once: (in, out), a table of ids as (V, d_model), for lookups too.

    torch's exporter leaves it (out, in), and adds a transposed copy or leaves transposing to the runtime.
    In int8 a column has a scale, what it is multiplied by is rounded to 8 bits as it comes, and as no
    operator multiplies by a transposed integer matrix, tables are (d_model, V).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, is_table: bool, int8: bool) -> None:
        super().__init__()
        self.is_table, self.bias = is_table, bias
        matrix = weight.detach() if is_table and not int8 else weight.detach().T.contiguous()
        scale = Matrix.scale_int8(matrix) if int8 else None
        self.register_buffer("matrix", (matrix / scale).round().to(torch.int8) if int8 else matrix)
        self.register_buffer("scale", scale)

    @staticmethod
    def scale_int8(matrix: Tensor) -> Tensor:
        """(in, out) -> (out,): what one step of 8 bits stands for.

        Without VNNI, processors add the products of two rows in 16 bits: 255 * (127 + 1) still fits.
        """
        pairs = pad(matrix, (0, 0, 0, matrix.size(0) % 2)).unflatten(0, (-1, 2))
        most = torch.maximum(pairs.relu().sum(1), (-pairs).relu().sum(1)).amax(0)  # of one sign
        return (most / 127).clamp(min=torch.finfo(matrix.dtype).tiny)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, in) -> (B, T, out), or ids (B, T) -> (B, T, d_model)."""
        if not x.is_floating_point():
            return self.look_up(x)
        if self.scale is not None:
            product = self.multiply_int8(x)
            return product if self.bias is None else product + self.bias
        if self.bias is None and not self.is_table:
            return x @ self.matrix
        factors = (x.flatten(0, 1), self.matrix, *([] if self.bias is None else [self.bias]))
        out = self.matrix.size(0 if self.is_table else 1)
        product = torch.onnx.ops.symbolic(
            "Gemm", factors, {"transB": int(self.is_table)}, dtype=x.dtype, shape=(factors[0].size(0), out)
        )
        return product.view(x.size(0), x.size(1), out)

    def look_up(self, ids: Tensor) -> Tensor:
        """(B, T) -> (B, T, d_model)."""
        if self.scale is None:
            return embedding(ids, self.matrix)
        shape = (self.matrix.size(0), *ids.shape)
        columns = torch.onnx.ops.symbolic(
            "Gather", (self.matrix, ids), {"axis": 1}, dtype=torch.int8, shape=shape
        )
        return columns.permute(1, 2, 0).float() * embedding(ids, self.scale[:, None])

    def multiply_int8(self, x: Tensor) -> Tensor:
        """(B, T, in) -> (B, T, out)."""
        x_int8, x_scale, x_zero = torch.onnx.ops.symbolic_multi_out(
            "DynamicQuantizeLinear",
            (x,),
            dtypes=(torch.uint8, x.dtype, torch.uint8),
            shapes=(x.shape, (), ()),
        )
        shape, factors = (*x.shape[:-1], self.matrix.size(1)), (x_int8, self.matrix, x_zero)
        product = torch.onnx.ops.symbolic("MatMulInteger", factors, dtype=torch.int32, shape=shape)
        return product.float() * (x_scale * self.scale)


class Part(nn.Module):
    """One of several products with the same x, which are computed as one."""

    def __init__(self, whole: Matrix, number: int, n_parts: int) -> None:
        super().__init__()
        self.whole, self.number, self.n_parts = whole, number, n_parts

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, in) -> (B, T, out)."""
        return self.whole(x).chunk(self.n_parts, dim=-1)[self.number]


def stored(model: Transformer, int8: bool) -> Transformer:
    """A copy whose weights are each a Matrix; tied ones are one, and so are those that multiply the same."""
    model, kept = copy.deepcopy(model), {}
    together = [(layer.self_attn, ("w_q", "w_k", "w_v")) for layer in (*model.encoder, *model.decoder)]
    for attn, names in together + [(layer.cross_attn, ("w_k", "w_v")) for layer in model.decoder]:
        weight = torch.cat([getattr(attn, name).weight for name in names])
        whole = Matrix(weight, None, is_table=False, int8=int8)
        for number, name in enumerate(names):
            setattr(attn, name, Part(whole, number, len(names)))
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, (nn.Linear, nn.Embedding)):
                is_table = parent is model  # both embeddings and the projection, tied or not
                matrix = Matrix(child.weight, getattr(child, "bias", None), is_table, int8)
                setattr(parent, name, kept.setdefault(child.weight, matrix))
    return model


def halves(caches: list) -> tuple[list, list]:
    """What Encoder gives, one by one or in pairs -> cross_*, past_*."""
    return caches[: len(caches) // 2], caches[len(caches) // 2 :]


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
        cross, past = halves(list(zip(caches[::2], caches[1::2], strict=True)))
        state = State(padding_mask(src, self.model.config.pad_id), cross, past)
        logits, state = self.model.step(tgt, state)
        return [logits, *(part for pair in state.past for part in pair)]


class Beams(Decoder):
    """Decoder for the hypotheses of beam search: they are the queries, and attend to one pool of keys.

    A step adds a key a hypothesis to the pool; ancestors says whose history a key belongs to. So no cache
    is ever reordered, and memory is not repeated.
    """

    def forward(self, alive: Tensor, ancestors: Tensor, src: Tensor, *caches: Tensor) -> list[Tensor]:
        """(B, K, 1 + P), bool (B, K, K P), (B, S), caches -> logits (B, K, V), ancestors, present_*."""
        model, (batch, beam_size, length) = self.model, alive.shape
        x = model.embed(model.tgt_embedding, alive[:, :, -1].reshape(-1, 1), length - 1)
        x = x.reshape(batch, beam_size, -1)
        own = torch.eye(beam_size, dtype=torch.bool).expand(batch, -1, -1)
        ancestors, present = torch.cat((ancestors, own), dim=2), []
        src_mask, mask = padding_mask(src, model.config.pad_id), ancestors[:, None]
        cross, past = halves(list(zip(caches[::2], caches[1::2], strict=True)))
        for layer, (past_key, past_value), memory in zip(model.decoder, past, cross, strict=True):
            key, value = layer.self_attn.keys_values(x)
            present.append((torch.cat((past_key, key), dim=2), torch.cat((past_value, value), dim=2)))
            x = layer(x, present[-1], mask, memory, src_mask)
        return [model.projection(x), ancestors, *(part for pair in present for part in pair)]


Axes = tuple[str | int, ...]  # a name is a dynamic axis, a number a fixed one


class Graph(NamedTuple):
    """The contract of one file: what it equals in PyTorch, its inputs and outputs in order: {name: axes}."""

    reference: Callable
    inputs: dict[str, Axes]
    outputs: dict[str, Axes]


def graphs(model: Transformer, beam_size: int = 4, alpha: float = 0.6) -> dict[str, Graph]:
    """The table of docs/onnx.md, and beams, which only beam is composed of. Caches have four axes."""
    config = model.config
    heads, d_k, n_ids = config.n_heads, config.d_model // config.n_heads, config.tgt_vocab_size

    def caches(kind: str, length: str | int) -> dict[str, Axes]:
        names = [f"{kind}_{part}_{layer}" for layer in range(config.n_layers) for part in ("key", "value")]
        return {name: ("batch", heads, length, d_k) for name in names}

    src, max_len = {"src": ("batch", "src_len")}, {"max_len": ()}
    tgt, new = {"tgt": ("batch", "tgt_len")}, {"tgt": ("batch", "new_len")}
    logits, new_logits = ({"logits": ("batch", length, n_ids)} for length in ("tgt_len", "new_len"))
    cross, past = caches("cross", "src_len"), caches("past", "past_len")
    present, tokens = caches("present", "total_len"), {"tokens": ("batch", "tgt_len")}
    beams = {"tokens": ("batch", beam_size, "tgt_len"), "scores": ("batch", beam_size)}
    alive = {"alive": ("batch", beam_size, "tgt_len")}
    options = dict(beam_size=beam_size, alpha=alpha)
    return {
        "forward": Graph(model, src | tgt, logits),
        "encoder": Graph(Encoder(model), src, cross | caches("past", 0)),
        "decoder": Graph(Decoder(model), new | src | cross | past, new_logits | present),
        "beams": Graph(
            Beams(model),
            alive | {"past_ancestors": ("batch", beam_size, "past_len")} | src | cross | past,
            {"logits": ("batch", beam_size, n_ids)}
            | {"present_ancestors": ("batch", beam_size, "total_len")}
            | present,
        ),
        "greedy": Graph(lambda *ids: greedy_search(model, *ids), src | max_len, tokens),
        "beam": Graph(lambda *ids: beam_search(model, *ids, **options), src | max_len, beams),
    }


# How it becomes a graph


def example(graph: Graph, model: Transformer, sizes: tuple[int, ...], seed: int = 0) -> list:
    """Random inputs of sizes as in PROVED. Sources are ragged; of 3 or more the last is only padding."""
    batch, src_len, tgt_len, past_len = sizes
    sizes = dict(batch=batch, src_len=src_len, tgt_len=tgt_len, new_len=tgt_len, past_len=past_len)
    random, config, inputs = torch.Generator().manual_seed(seed), model.config, []
    for name, axes in graph.inputs.items():
        shape = [sizes[axis] if isinstance(axis, str) else axis for axis in axes]
        if name == "max_len":
            inputs.append(tgt_len)
        elif name == "past_ancestors":
            inputs.append(torch.randint(2, shape, generator=random).bool())
        elif len(shape) < 4:
            inputs.append(torch.randint(config.src_vocab_size, shape, generator=random))
        else:
            inputs.append(torch.randn(shape, generator=random).to(model.encoder[0].norm_ffn.weight.dtype))
        if name == "src":
            lengths = torch.tensor([[max(src_len - 2 * row, 1)] for row in range(batch)])
            lengths[2:][-1:] = 0
            inputs[-1].masked_fill_(torch.arange(src_len) >= lengths, config.pad_id)
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


def trace(name: str, graph: Graph, model: Transformer) -> Model:
    """The graph as ONNX; a weight is named as in the model, any other constant after the graph."""
    dynamic = [
        {i: axis for i, axis in enumerate(axes) if isinstance(axis, str)} for axes in graph.inputs.values()
    ]
    n_ids = sum(len(axes) < 4 for axes in graph.inputs.values())
    caches = [tuple(dynamic[n_ids:])] if len(dynamic) > n_ids else []  # *caches is one argument
    with quiet():
        onnx_model = torch.onnx.export(
            graph.reference,
            tuple(example(graph, model, TRACED)),
            dynamo=True,
            opset_version=OPSET,
            input_names=list(graph.inputs),
            output_names=list(graph.outputs),
            dynamic_shapes=(*dynamic[:n_ids], *caches),
            verbose=False,
        ).model
    for value, axes in zip(onnx_model.graph.outputs, graph.outputs.values(), strict=True):
        dims = zip(value.shape, axes, strict=True)  # a sum of lengths gets its name
        value.shape = onnx_ir.Shape(axis if "+" in str(dim) else dim for dim, axis in dims)
    weights = graph.reference.state_dict()
    for key, value in list(onnx_model.graph.initializers.items()):
        value.name = key.removeprefix("model.") if key in weights else f"{name}.{key}"
    return onnx_model


def call(op: OpBuilder, traced: Model, *inputs: Value) -> list[Value]:
    """The nodes of a traced graph, once more, where op builds; its weights go to the outermost graph."""
    graph, outermost = traced.graph.clone(), op.builder.root.graph
    for value in (value for node in graph for value in node.outputs):
        value.shape = None  # its batch is not this graph's: there may be beams
    for name, weight in list(graph.initializers.items()):
        del graph.initializers[name]
        if name in outermost.initializers:
            onnx_ir.convenience.replace_all_uses_with(weight, outermost.initializers[name])
        else:
            outermost.register_initializer(weight)
    return op.call_inline(onnx_ir.Function("", graph.name, graph=graph, attributes=[]), *inputs)


def loop(op: OpBuilder, max_len: Value, body: Callable, *state: Value) -> list:
    """Run body(op, number of the step, *state) -> whether to go on, *next state; at most max_len times."""
    inputs = [onnx_ir.val("number", DataType.INT64, []), onnx_ir.val("going_on", DataType.BOOL, [])]
    inputs += [onnx_ir.val(f"state_{i}", value.dtype) for i, value in enumerate(state)]
    outputs = [onnx_ir.val(f"next_{i}", value.dtype) for i, value in enumerate(inputs[1:])]
    graph = op.builder.subgraph(lambda op, number, _, *state: body(op, number, *state), inputs, outputs)
    inside = set(graph.inputs)
    for node in list(graph):  # what no step changes is computed once, before
        if inside.isdisjoint(node.inputs):
            graph.remove(node)
            op.builder.graph.append(node)
        inside.update(node.outputs if node.graph is graph else ())
    for value in (value for node in graph for value in node.outputs):
        value.name = f"step/{value.name}"  # OpenVINO drops inputs of a body that shares a name with its graph
    return op.Loop(max_len, True, *state, body=graph, _outputs=len(state))


def top(op: OpBuilder, scores: Value, n_best: int, n_ids: int) -> list[Value]:
    """(B, K, V) -> the best scores and their ids, 2 x (B, K, n_best), best first, ties to the lower id.

    They stand in the n_best blocks with the highest maxima: only these are sorted, not all of V.
    """
    widths = [width for width in range(2, n_ids // n_best + 1) if n_ids % width == 0]
    if not widths:
        return op.TopK(scores, [n_best], _outputs=2)
    width = min(widths, key=lambda width: abs(width - math.sqrt(n_ids)))
    blocks = op.Reshape(scores, [0, 0, n_ids // width, width])
    _, block = op.TopK(op.ReduceMax(blocks, [3], keepdims=0), [n_best], _outputs=2)
    block, _ = op.TopK(block, [n_best], largest=0, _outputs=2)  # in their order, for ties
    within = op.GatherElements(blocks, op.Expand(op.Unsqueeze(block, [3]), [1, 1, 1, width]), axis=2)
    best, index = op.TopK(op.Reshape(within, [0, 0, n_best * width]), [n_best], _outputs=2)
    block = op.GatherElements(block, op.Div(index, width), axis=2)
    return [best, op.Add(op.Mul(block, width), op.Mod(index, width))]


def greedy(op: OpBuilder, inputs: list[Value], traced: Callable, config: TransformerConfig) -> list[Value]:
    """greedy_search in ONNX operators: src, max_len -> tokens."""
    src, max_len = inputs
    cross, past = halves(call(op, traced("encoder"), src))

    def step(op, number, tokens, ended, *past):
        logits, *past = call(op, traced("decoder"), op.Slice(tokens, [-1], [END], [1]), src, *cross, *past)
        _, token = top(op, logits, 1, config.tgt_vocab_size)
        token = op.Where(ended, config.pad_id, op.Squeeze(token, [2]))
        ended = op.Or(ended, op.Equal(token, config.eos_id))
        goes_on = op.Equal(op.ReduceMin(op.Cast(ended, to=DataType.INT64), keepdims=0), 0)
        return goes_on, op.Concat(tokens, token, axis=1), ended, *past

    column = op.Concat(op.Shape(src, end=1), [1], axis=0)
    tokens, *_ = loop(op, max_len, step, op.Expand(config.bos_id, column), op.Expand(False, column), *past)
    return [op.Slice(tokens, [1], [END], [1])]


def beam(
    op: OpBuilder,
    inputs: list[Value],
    traced: Callable,
    config: TransformerConfig,
    beam_size: int,
    alpha: float,
) -> list[Value]:
    """beam_search in ONNX operators: src, max_len -> tokens, scores.

    ids (B, 2 beam, 1 + length) are the hypotheses that have ended, then those alive; scores alike. A step
    looks at the best 2 beam ids of each hypothesis, since none but these can be of the row's best 2 beam.
    """
    src, max_len = inputs
    n_best = min(2 * beam_size, config.tgt_vocab_size)
    n_rows = op.Shape(src, end=1)
    row = op.Unsqueeze(op.Range(0, op.Squeeze(n_rows), 1), [1])  # (B, 1)
    cross, past = halves(call(op, traced("encoder"), src))
    first_alive, first_of_three = op.Mul(row, beam_size), op.Mul(row, 3 * beam_size)
    pads = op.Expand(config.pad_id, op.Concat(n_rows, [beam_size, 1], axis=0))

    def penalty(op, length):
        return op.Pow(op.Div(op.Add(op.Cast(length, to=DataType.FLOAT), 5.0), 6.0), alpha)

    def step(op, number, ids, scores, ancestors, *past):
        ids.shape = onnx_ir.Shape([None, 2 * beam_size, None])  # MNN's converter dies where it has to guess
        (ended, alive), (done, sums) = (op.Split(x, axis=1, num_outputs=2, _outputs=2) for x in (ids, scores))
        logits, ancestors, *past = call(op, traced("beams"), alive, ancestors, src, *cross, *past)
        logits = op.Cast(logits, to=DataType.FLOAT)  # (B, beam, V)
        best, token = top(op, logits, n_best, config.tgt_vocab_size)
        likeliest = [op.Slice(x, [0], [1], [2]) for x in (best, token)]
        likeliest[1] = op.Log(op.GatherElements(op.Softmax(logits, axis=-1), likeliest[1], axis=2))
        log_probs = op.Add(op.Sub(best, likeliest[0]), op.Add(likeliest[1], op.Unsqueeze(sums, [2])))
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
        ancestors = op.Gather(op.Flatten(ancestors, axis=2), op.GatherElements(parent, on, axis=1))
        return op.Equal(op.ReduceMin(done, keepdims=0), LOWEST), ids, scores, ancestors, *past

    ids = op.Expand(config.bos_id, op.Concat(n_rows, [2 * beam_size, 1], axis=0))
    scores = [LOWEST] * beam_size + [0.0] + [LOWEST] * (beam_size - 1)
    scores = op.Expand(scores, op.Concat(n_rows, [1], axis=0))
    ancestors = op.Expand(True, op.Concat(n_rows, [beam_size, 0], axis=0))
    ids, scores, *_ = loop(op, max_len, step, ids, scores, ancestors, *past)
    ids = op.Slice(ids, [1], [END], [2])
    done, sums = op.Split(scores, axis=1, num_outputs=2, _outputs=2)
    unended = op.Where(op.Greater(sums, LOWEST), op.Div(sums, penalty(op, op.Shape(ids, start=2))), LOWEST)
    scores = op.Concat(done, unended, axis=1)
    turn = [-float(i) for i in range(2 * beam_size)]  # in this order, but the empty places come last
    _, place = op.TopK(op.Where(op.Greater(scores, LOWEST), turn, LOWEST), [beam_size], _outputs=2)
    scores = op.GatherElements(scores, place, axis=1)
    tokens = op.Gather(op.Flatten(ids, axis=2), op.Add(op.Mul(row, 2 * beam_size), place))
    return [op.Where(op.Equal(op.Unsqueeze(scores, [2]), LOWEST), config.pad_id, tokens), scores]


def forward(op: OpBuilder, inputs: list[Value], traced: Callable, config: TransformerConfig) -> list[Value]:
    """src, tgt -> logits: all of tgt is one step from the empty past."""
    src, tgt = inputs
    return call(op, traced("decoder"), tgt, src, *call(op, traced("encoder"), src))[:1]


def build(name: str, graph: Graph, traced: Callable, config: TransformerConfig, *beams: float) -> Model:
    """The graph of this name, of those that traced(name) gives; nothing of this machine is left in it."""
    inputs = [onnx_ir.val(key, DataType.INT64, axes) for key, axes in graph.inputs.items()]
    built = onnx_ir.Graph(inputs, [], nodes=[], opset_imports={"": OPSET}, name=name)
    composers = dict(forward=forward, greedy=greedy, beam=partial(beam, beam_size=beams[0], alpha=beams[1]))
    if name not in composers:
        built = traced(name).graph.clone()
    else:
        outputs = composers[name](GraphBuilder(built).op, inputs, traced, config)
        for value, (key, axes) in zip(outputs, graph.outputs.items(), strict=True):
            value.name, value.shape = key, onnx_ir.Shape(axes)
            built.outputs.append(value)
    onnx_model = Model(built, ir_version=IR_VERSION)
    tidy = onnx_ir.passes.Sequential(
        CommonSubexpressionEliminationPass(),
        RemoveUnusedNodesPass(),
        NameFixPass(),
        ClearMetadataAndDocStringPass(),
    )
    return tidy(onnx_model).model


# Contract, proof, publication


def keeps_contract(graph: Graph, onnx_model: Model, model: Transformer) -> None:
    """Failed unless names, axes and operators are as promised, and each weight is there once."""
    for kind, promised in (("inputs", graph.inputs), ("outputs", graph.outputs)):
        found = {
            value.name: tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape)
            for value in getattr(onnx_model.graph, kind)
        }
        if list(found.items()) != list(promised.items()):
            raise Failed(f"{kind} are {found}, but must be {promised}")
    nodes = list(onnx_model.graph.all_nodes())
    if {node.domain for node in nodes} != {""} or onnx_model.opset_imports != {"": OPSET}:
        raise Failed(f"opsets are {onnx_model.opset_imports}, but must be the standard one, {OPSET}, alone")
    if refused := REFUSED & {node.op_type for node in nodes}:
        raise Failed(f"operators {sorted(refused)} are there, but must not be: some runtime lacks them")
    weights = [value.const_value for value in onnx_model.graph.initializers.values()]
    n_stored = sum(weight.size for weight in weights if len(weight.shape) > 1)
    n_unique = sum(weight.numel() for weight in model.parameters() if weight.dim() > 1)
    if n_stored > n_unique + 1000:
        raise Failed(f"matrices of {n_stored:,} numbers are stored for {n_unique:,}: a weight is there twice")


def runner(path: Path, level: ort.GraphOptimizationLevel) -> Callable:
    """ONNX Runtime on the CPU, optimised to this level: inputs in order -> outputs in order."""
    options = ort.SessionOptions()
    options.graph_optimization_level, options.log_severity_level = level, 4
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(*inputs: np.ndarray) -> list[np.ndarray]:
        feeds = zip(session.get_inputs(), inputs, strict=True)
        half = "tensor(float16)"
        return session.run(None, {i.name: x.astype(np.float16) if i.type == half else x for i, x in feeds})

    return run


def prove(graph: Graph, model: Transformer, dtype: str, runners: list[Callable]) -> tuple[float, float]:
    """-> how far any runner is from PyTorch's float32 at most, the share of searches with the same tokens.

    float32: Failed where tokens differ, unless their scores are equal to 1e-5 and so show a tie.
    float16 and int8 round, so tokens may differ, and the distance is a share of the root mean square.
    """
    farthest, alike, exact = 0.0, [], dtype == "float32"
    for seed, sizes in enumerate(SEARCHED if "max_len" in graph.inputs else PROVED):
        inputs = example(graph, model, sizes, seed)
        with torch.no_grad():
            expected = graph.reference(*inputs)
        expected = [x.numpy() for x in ((expected,) if isinstance(expected, Tensor) else expected)]
        for run in runners:
            outputs, same = run(*map(np.asarray, inputs)), np.full(sizes[0], True)
            if "tokens" in graph.outputs:
                same = same_tokens(outputs[0], expected[0], model.config.pad_id)
                alike.extend(same)
                scores = outputs[-1][~same], expected[-1][~same]
                if exact and not same.all() and (len(outputs) == 1 or difference(*scores) > 1e-5):
                    raise Failed(f"other tokens than PyTorch's for {inputs[0][~same][0].tolist()}, {sizes}")
            for name, output, wanted in zip(graph.outputs, outputs, expected, strict=True):
                if name != "tokens":
                    if output.shape != wanted.shape:
                        raise Failed(f"{name} is {output.shape}, not {wanted.shape}: {sizes}")
                    distance = difference(output[same], wanted[same], relative=not exact)
                    farthest = max(farthest, distance)
    if farthest > TOLERANCE[dtype]:
        raise Failed(f"differs from PyTorch by {farthest:.1e}, but {TOLERANCE[dtype]:.1e} is allowed")
    return farthest, sum(alike) / len(alike) if alike else 1.0


def difference(one: np.ndarray, other: np.ndarray, relative: bool = False) -> float:
    """The largest difference, or root mean square over other's; infinite where either is not finite."""
    if not (np.isfinite(one).all() and np.isfinite(other).all()):
        return math.inf
    apart = one.astype(np.float64) - other
    if relative:
        return float(np.linalg.norm(apart) / max(np.linalg.norm(other[other > LOWEST]), 1e-9))
    return float(np.abs(apart).max(initial=0.0))


def same_tokens(tokens: np.ndarray, expected: np.ndarray, pad_id: int) -> np.ndarray:
    """2 x (B, ..., T) -> (B,): is a source's answer the same, whatever padding follows it?"""
    longest, both = max(tokens.shape[-1], expected.shape[-1]), []
    for ids in (tokens, expected):
        padding = [(0, 0)] * (ids.ndim - 1) + [(0, longest - ids.shape[-1])]
        both.append(np.pad(ids, padding, constant_values=pad_id).reshape(len(ids), -1))
    return (both[0] == both[1]).all(axis=1)


def share(models: Iterable[Model], weights: set[str], folder: Path) -> None:
    """Put the weights of all graphs into one file, named after its content: no export spoils another."""
    values = [
        value for model in models for value in model.graph.initializers.values() if value.name in weights
    ]
    tensors, digest = {value.name: value.const_value for value in values}, hashlib.sha256()
    for tensor in tensors.values():
        digest.update(tensor.tobytes())
    name = f"weights-{digest.hexdigest()[:12]}.data"
    external = onnx_ir.external_data.convert_tensors_to_external(list(tensors.values()), folder, name)
    external = dict(zip(tensors, external, strict=True))
    for value in values:
        value.const_value = external[value.name]


def export(
    model: Transformer,
    out: Path,
    names: list[str],
    facts: dict[str, str],
    dtype: str = "float32",
    beam_size: int = 4,
    alpha: float = 0.6,
    shared_weights: bool = False,
) -> list[str]:
    """Trace, check, prove, publish into out; all of the graphs or none. -> a line of the report for each."""
    pair, report, name = {"encoder", "decoder"} <= set(names), [], names[0]
    progress = tqdm(total=2 * len(names) + pair, unit="", disable=not sys.stderr.isatty(), leave=False)

    def say(what: str) -> None:
        progress.set_description(what)
        progress.update()
        if progress.disable:
            print(what, file=sys.stderr, flush=True)

    out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".unproved-", dir=out))
    try:
        model = copy.deepcopy(model).eval().to(torch.float16 if dtype == "float16" else torch.float32)
        source = stored(model, dtype == "int8")
        table, built = graphs(source, beam_size, alpha), {}
        traced = cache(lambda name: trace(name, table[name], source))
        for name in names:
            say(f"{name}: tracing")
            built[name] = build(name, table[name], traced, model.config, beam_size, alpha)
            keeps_contract(table[name], built[name], model)
            more = dict(beam_size=str(beam_size), alpha=str(alpha)) if name == "beam" else {}
            built[name].metadata_props.update(facts | {"graph": name, "dtype": dtype} | more)
        stores = [part.graph.initializers.values() for part in built.values()]
        if (
            shared_weights
            or max(sum(value.const_value.nbytes for value in store) for store in stores) > LARGEST
        ):
            share(built.values(), set(source.state_dict()), folder)
        table = graphs(model.float(), beam_size, alpha)
        for name in names:
            path = folder / f"{name}.onnx"
            onnx_ir.save(built[name], path)
            say(f"{name}: proving, optimised and not")
            onnx.checker.check_model(str(path), full_check=True)
            levels = ort.GraphOptimizationLevel.ORT_DISABLE_ALL, ort.GraphOptimizationLevel.ORT_ENABLE_ALL
            farthest, alike = prove(table[name], model, dtype, [runner(path, level) for level in levels])
            n_ops = Counter(node.op_type for node in built[name].graph.all_nodes())
            size, told = path.stat().st_size / 1e6, f"{farthest:10.1e} {alike:9.2%}"
            report.append(f"{name:8} {out / path.name!s:24} {size:8.2f} MB {n_ops.total():5} nodes {told}")
            report.append("         " + ", ".join(f"{op} {n}" for op, n in n_ops.most_common()))
        if pair:
            say("encoder and decoder: proving greedy search, step by step")
            sessions = run_onnx.load_search(folder)
            _, alike = prove(table["greedy"], model, dtype, [partial(run_onnx.search, sessions)])
            report.append(f"encoder and decoder, step by step: greedy_search's tokens for {alike:.2%}")
        for file in folder.iterdir():
            os.replace(file, out / file.name)
    except OSError:  # a full disk, not a failed proof
        raise
    except Exception as error:  # of torch, onnx and onnxruntime too, which have no class in common
        cause = " ".join(str(error.__cause__ or error).split())
        raise Failed(f"{name}.onnx is not published: {cause[:400]}") from error
    finally:
        progress.close()
        shutil.rmtree(folder, ignore_errors=True)
    return report


def main(argv: list[str] | None = None) -> int:
    """Export and prove. 0: all graphs are published; 1: one failed, so none is; 2: bad input."""
    usage, examples = __doc__.split("examples:")
    parser = argparse.ArgumentParser("export_onnx.py", argparse.SUPPRESS, usage, "examples:" + examples)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    names = ("forward", "encoder", "decoder", "greedy", "beam")
    option = parser.add_argument
    option("checkpoint", metavar="CHECKPOINT", type=Path, help="from train_copy.py or save_checkpoint")
    option("--out", type=Path, default=Path("onnx"), metavar="DIR", help="folder (default: onnx)")
    option("--graphs", nargs="+", choices=names, default=names, help="which (default: all)")
    option("--beam-size", type=int, default=4, metavar="N", help="of beam.onnx (default: 4)")
    option("--alpha", type=float, default=0.6, metavar="A", help="its length penalty (default: 0.6)")
    option("--dtype", choices=("float32", "float16"), default="float32", help="default: float32")
    option(
        "--int8", action="store_true", help="weights in 8 bits, a scale a column; activations as they come"
    )
    option("--shared-weights", action="store_true", help="one file of weights for all graphs")
    options = parser.parse_args(argv)
    needed = ("onnx", "onnxscript", "onnxruntime", "numpy", "tqdm")
    if missing := [package for package in needed if importlib.util.find_spec(package) is None]:
        parser.error(f"not installed: {', '.join(missing)}. Try: pip install {' '.join(missing)}")
    try:
        require(options.beam_size >= 1, "--beam-size", options.beam_size, "at least 1")
        require(0 <= options.alpha < math.inf, "--alpha", options.alpha, "finite, at least 0")
        require(
            not options.int8 or options.dtype == "float32", "--dtype", options.dtype, "float32 with --int8"
        )
        model = load_checkpoint(options.checkpoint)
        facts = {field: str(value) for field, value in vars(model.config).items()}
        facts |= dict(opset=str(OPSET), torch_version=torch.__version__)
        facts["checkpoint_sha256"] = hashlib.sha256(options.checkpoint.read_bytes()).hexdigest()
        dtype, names = "int8" if options.int8 else options.dtype, list(dict.fromkeys(options.graphs))
        settings = dtype, options.beam_size, options.alpha, options.shared_weights
        report = export(model, options.out, names, facts, *settings)
    except Failed as error:
        print(f"export_onnx.py: failed: {error}", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print("graph    file                         size        nodes    difference, same tokens")
    print("\n".join(report))
    print(f"published; next: python run_onnx.py {options.out} 5 6 7 --check {options.checkpoint}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
