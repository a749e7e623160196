"""export_onnx.py: the contract of the graphs, the proof, and that it can fail."""

import builtins
import dataclasses
import errno
import itertools
import os
import re

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from conftest import export
from helpers import body_of, ending_model, nodes_of, ragged, small_model

import export_onnx
import transformer
from export_onnx import PROVED, SEARCHED, TRACED, Failed, example, graphs, prove, trace
from train_copy import copy_batch
from transformer import greedy_search, load_checkpoint, save_checkpoint

KINDS = ["forward", "encoder", "decoder", "greedy", "beam"]


def session(path):
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


# The contract


def test_inputs_outputs_and_axes_are_the_documented_ones(exported):
    """Written out once more, by hand: the table of docs/onnx.md for 2 layers, 2 heads, d_k 8, 29 ids."""
    pairs = [f"{part}_{layer}" for layer in (0, 1) for part in ("key", "value")]
    cross = {f"cross_{pair}": ["batch", 2, "src_len", 8] for pair in pairs}
    past = {f"past_{pair}": ["batch", 2, "past_len", 8] for pair in pairs}
    present = {f"present_{pair}": ["batch", 2, "total_len", 8] for pair in pairs}
    empty = {f"past_{pair}": ["batch", 2, 0, 8] for pair in pairs}
    src = {"src": ["batch", "src_len"]}
    expected = {
        "forward": (src | {"tgt": ["batch", "tgt_len"]}, {"logits": ["batch", "tgt_len", 29]}),
        "encoder": (src, cross | empty),
        "decoder": (
            {"tgt": ["batch", "new_len"]} | src | cross | past,
            {"logits": ["batch", "new_len", 29]} | present,
        ),
        "greedy": (src | {"max_len": []}, {"tokens": ["batch", "tgt_len"]}),
        "beam": (
            src | {"max_len": []},
            {"tokens": ["batch", 4, "tgt_len"], "scores": ["batch", 4]},
        ),
    }
    ids = ("src", "tgt", "max_len", "tokens")
    for kind, (inputs, outputs) in expected.items():
        loaded = session(exported[0] / f"{kind}.onnx")
        assert [(i.name, i.shape) for i in loaded.get_inputs()] == list(inputs.items())
        assert [(o.name, o.shape) for o in loaded.get_outputs()] == list(outputs.items())
        for value in (*loaded.get_inputs(), *loaded.get_outputs()):
            assert value.type == ("tensor(int64)" if value.name in ids else "tensor(float)")


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_portable_and_say_what_they_are(exported, kind):
    folder, _, model, report = exported
    proto = onnx.load(folder / f"{kind}.onnx")
    assert proto.ir_version <= 10 and [(o.domain, o.version) for o in proto.opset_import] == [("", 18)]
    nodes = list(nodes_of(proto.graph))
    ops = {node.op_type for node in nodes}
    assert {node.domain for node in nodes} == {""} and not proto.functions
    assert not ops & {"Attention", "Dropout", "If", "IsNaN", "Scan", "Trilu"}
    assert ("Loop" in ops) == (kind in ("greedy", "beam"))
    facts = {entry.key: entry.value for entry in proto.metadata_props}
    assert facts["graph"] == kind and facts["dtype"] == "float32" and facts["opset"] == "18"
    for field, value in vars(model.config).items():
        assert facts[field] == str(value)
    assert (facts.get("beam_size"), facts.get("alpha")) == (("4", "0.6") if kind == "beam" else (None, None))
    assert len(facts["checkpoint_sha256"]) == 64 and facts["torch_version"] == torch.__version__
    content = (folder / f"{kind}.onnx").read_bytes()
    here = (os.getcwd().encode(), os.path.expanduser("~").encode(), b"site-packages", b".py", b"File ")
    for trace_of_here in here:
        assert trace_of_here not in content
    assert f"{kind}" in report and all(op in report for op in ops)


@pytest.mark.parametrize("kind", KINDS)
def test_each_weight_is_stored_once(exported, kind):
    proto, model = onnx.load(exported[0] / f"{kind}.onnx"), exported[2]
    shapes = [tuple(weight.dims) for weight in proto.graph.initializer]
    assert shapes.count((29, 16)) == 1 and shapes.count((16, 29)) == 0  # the tied matrix
    if kind == "forward":
        stored = sum(int(np.prod(shape)) for shape in shapes)
        assert stored <= sum(weight.numel() for weight in model.parameters()) + 100
    constants = {node.input[1] for node in nodes_of(proto.graph) if node.op_type == "Reshape"}
    for weight in proto.graph.initializer:  # no traced size is a target of a Reshape
        if weight.name in constants:
            sizes = set(onnx.numpy_helper.to_array(weight).tolist()) - {model.config.n_heads}
            assert not sizes & set(TRACED)


def test_the_step_does_not_project_memory_again(exported):
    """C5: cross keys and values are inputs, and no product reads anything of d_model and source length."""
    proto = onnx.shape_inference.infer_shapes(onnx.load(exported[0] / "decoder.onnx"))
    shapes = {
        v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in proto.graph.value_info
    }
    products = [name for node in proto.graph.node if node.op_type == "MatMul" for name in node.input]
    assert not [name for name in products if shapes.get(name, [])[1:] == ["src_len", 16]]


def test_an_untied_model_and_other_sizes_export(tmp_path):
    model = transformer.Transformer(
        transformer.TransformerConfig(17, 23, d_model=24, n_heads=3, n_layers=1, d_ff=8, tie_embeddings=False)
    )
    save_checkpoint(tmp_path / "model.pt", model)
    assert export(tmp_path / "model.pt", tmp_path, "--graphs", "decoder")[0] == 0
    decoder = session(tmp_path / "decoder.onnx")
    assert decoder.get_outputs()[0].shape == ["batch", "new_len", 23]
    assert decoder.get_inputs()[2].shape == ["batch", 3, "src_len", 8]


# Numbers


@pytest.mark.parametrize("batch", [1, 2, 3, 8])
def test_forward_equals_pytorch_at_every_length(exported, batch):
    folder, _, model, _ = exported
    loaded, graph = session(folder / "forward.onnx"), graphs(model)["forward"]
    lengths = [1, 2, 5, 7, 8, 64] + ([512] if batch == 2 else [])
    for src_len, tgt_len in itertools.product(lengths, lengths):
        src, tgt = example(graph, model, (batch, src_len, tgt_len, 0), batch)
        (logits,) = loaded.run(None, {"src": src.numpy(), "tgt": tgt.numpy()})
        with torch.no_grad():
            expected = model(src, tgt).numpy()
        np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0, equal_nan=False)


def test_a_file_runs_alone_and_under_another_name(exported, tmp_path):
    path = tmp_path / "renamed.onnx"
    path.write_bytes((exported[0] / "forward.onnx").read_bytes())
    session(path).run(None, {"src": np.ones((1, 2), dtype=np.int64), "tgt": np.ones((1, 3), dtype=np.int64)})


def test_the_proof_covers_what_was_never_traced():
    assert TRACED not in PROVED and len(set(TRACED)) == 4 and not set(TRACED) & {0, 1}
    assert {1, 2, 3, 8} <= {batch for batch, *_ in PROVED} and {0, 1} <= {past for *_, past in PROVED}
    sources = {src_len for _, src_len, *_ in PROVED}
    assert min(sources) == 1 and 7 in sources and 512 in sources
    assert {(batch, n) for batch, _, n, _ in SEARCHED} == set(itertools.product((1, 3, 16), (1, 2, 64)))
    assert sum(batch for batch, *_ in SEARCHED) >= 200


def test_half_precision_is_proved_in_half_precision(exported, tmp_path):
    assert export(exported[1], tmp_path / "onnx", "--dtype", "float16", "--graphs", "decoder", "beam")[0] == 0
    for kind in ("decoder", "beam"):
        path = tmp_path / "onnx" / f"{kind}.onnx"
        weights = [w for w in onnx.load(path).graph.initializer if np.prod(w.dims) >= 16 * 16]
        assert {w.data_type for w in weights} == {onnx.TensorProto.FLOAT16}
        floats = [o.type for o in session(path).get_outputs() if o.type != "tensor(int64)"]
        assert set(floats) <= {"tensor(float)" if kind == "beam" else "tensor(float16)"}


# The search inside the graph


class Composer:
    """Composes any search of a model; what it is composed of is traced once."""

    def __init__(self, model, int8=False):
        self.model, self.source = model, export_onnx.stored(model, int8)

    def __call__(self, folder, name, *beams):
        beams = beams or (4, 0.6)
        graph, table = graphs(self.model, *beams)[name], graphs(self.source, *beams)

        def traced(part):
            return export_onnx.trace(part, table[part], self.source)

        onnx_model = export_onnx.build(name, graph, traced, self.model.config, *beams)
        export_onnx.keeps_contract(graph, onnx_model, self.model)
        export_onnx.onnx_ir.save(onnx_model, folder / f"{name}.onnx")
        onnx.checker.check_model(str(folder / f"{name}.onnx"), full_check=True)
        return graph, folder / f"{name}.onnx"


@pytest.fixture(scope="module")
def composers(trained):
    """A model that ends early or late; one whose beams tie and wander; one that has learned."""
    return dict(
        ending=Composer(ending_model(5, vocab_size=29)),
        random=Composer(small_model(2, spread=0.3, n_layers=1)),
        trained=Composer(load_checkpoint(trained[0])),
    )


SETTINGS = [
    pytest.param(*setting, marks=[] if setting in QUICK else pytest.mark.slow)
    for QUICK in [(("ending", 2, 0.6), ("random", 8, 0.0), ("trained", 4, 1.0))]
    for setting in itertools.product(("ending", "random", "trained"), (1, 2, 4, 8), (0.0, 0.6, 1.0))
]


@pytest.mark.parametrize("name, beam_size, alpha", SETTINGS)
def test_beam_search_in_the_graph_is_pytorchs(composers, tmp_path, name, beam_size, alpha):
    """240 sources: batch 1, 3, 16, ragged, some only padding; max_len 1, 2, 64; one session."""
    graph, path = composers[name](tmp_path, "beam", beam_size, alpha)
    runner = export_onnx.runner(path, ort.GraphOptimizationLevel.ORT_ENABLE_ALL)
    farthest, alike = prove(graph, composers[name].model, "float32", [runner])
    assert farthest <= 1e-4 and alike > 0.99  # what differs are ties, or prove had failed


@pytest.mark.parametrize("name", ["ending", "random", "trained"])
def test_greedy_search_in_the_graph_is_pytorchs_and_beam_1(composers, tmp_path, name):
    graph, path = composers[name](tmp_path, "greedy")
    model, greedy = composers[name].model, session(path)
    runner = export_onnx.runner(path, ort.GraphOptimizationLevel.ORT_ENABLE_ALL)
    assert prove(graph, model, "float32", [runner]) == (0.0, 1.0)
    _, path = composers[name](tmp_path, "beam", 1, 0.6)
    beam = session(path)
    for seed, sizes in enumerate(SEARCHED):
        src, max_len = example(graph, model, sizes, seed)
        feeds = {"src": src.numpy(), "max_len": np.array(max_len)}
        np.testing.assert_array_equal(beam.run(None, feeds)[0][:, 0], greedy.run(None, feeds)[0])


def test_searches_end_early_late_at_once_and_not_at_all(composers):
    """What the tests above rest on: the models really do all of that."""
    model = composers["ending"].model
    lengths = set()
    for seed, sizes in enumerate(SEARCHED):
        src, _ = example(graphs(model)["greedy"], model, sizes, seed)
        ends = greedy_search(model, src, 64) == model.config.eos_id
        lengths |= {int(row.int().argmax()) + 1 if row.any() else None for row in ends}
    assert {None, 1, 2} < lengths and len(lengths) >= 6


def test_a_row_is_answered_alike_alone_and_in_any_batch(composers, tmp_path):
    _, path = composers["ending"](tmp_path, "beam", 4, 0.6)
    loaded, pad_id = session(path), composers["ending"].model.config.pad_id
    src = ragged([9, 4, 7, 1, 2, 9], seed=5).numpy()
    feeds = {"src": src, "max_len": np.array(20)}
    tokens, scores = loaded.run(None, feeds)
    for row in range(len(src)):
        alone = {"src": src[row : row + 1, : (src[row] != pad_id).sum()], "max_len": np.array(20)}
        for others in (alone, {"src": src[[row, 0, 4]], "max_len": np.array(20)}):
            found, found_scores = loaded.run(None, others)
            assert export_onnx.same_tokens(found[:1], tokens[row : row + 1], pad_id).all()
            np.testing.assert_allclose(found_scores[0], scores[row], atol=1e-5)


@pytest.mark.parametrize("kind", ["greedy", "beam"])
def test_100_calls_of_changing_shape(exported, kind):
    folder, _, model, _ = exported
    loaded, rng = session(folder / f"{kind}.onnx"), np.random.default_rng(0)
    for _ in range(100):
        src, max_len = (
            rng.integers(0, 29, (rng.integers(1, 6), rng.integers(1, 40))),
            int(rng.integers(1, 12)),
        )
        outputs = loaded.run(None, {"src": src, "max_len": np.array(max_len)})
        expected = graphs(model)[kind].reference(torch.from_numpy(src), max_len)
        expected = [expected] if kind == "greedy" else expected
        np.testing.assert_array_equal(outputs[0], expected[0].numpy())
        for output, wanted in zip(outputs[1:], expected[1:], strict=True):
            np.testing.assert_allclose(output, wanted.numpy(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("beam_size, vocab_size", [(1, 30), (3, 13), (20, 30)])
def test_ties_go_to_the_lower_id(tmp_path, beam_size, vocab_size):
    """Every id is as likely as any other, and there may be fewer ids than candidates; 13 has no blocks."""
    model = small_model(n_layers=1, vocab_size=vocab_size)
    with torch.no_grad():
        model.projection.weight.zero_()
    graph, path = Composer(model)(tmp_path, "beam", beam_size, 0.6)
    runner = export_onnx.runner(path, ort.GraphOptimizationLevel.ORT_ENABLE_ALL)
    for sizes in ((1, 4, 1, 0), (2, 4, 2, 0), (3, 4, 5, 0)):
        src, max_len = example(graph, model, sizes)
        outputs, (tokens, scores) = runner(src.numpy(), np.array(max_len)), graph.reference(src, max_len)
        np.testing.assert_array_equal(outputs[0], tokens.numpy())
        np.testing.assert_allclose(outputs[1], scores.numpy(), atol=1e-5)


@pytest.mark.parametrize("n_ids", [2, 7, 12, 36, 350, 1024])
@pytest.mark.parametrize("n_best", [1, 2, 8])
def test_the_best_are_found_in_the_best_blocks(n_ids, n_best):
    """top against a stable sort, with hardly any two ids alike, with many, and with all."""
    n_best = min(n_best, n_ids)
    scores = export_onnx.onnx_ir.val("scores", export_onnx.DataType.FLOAT, ["batch", "beam", n_ids])
    graph = export_onnx.onnx_ir.Graph([scores], [], nodes=[], opset_imports={"": 18}, name="top")
    graph.outputs.extend(export_onnx.top(export_onnx.GraphBuilder(graph).op, scores, n_best, n_ids))
    model = export_onnx.onnx_ir.to_proto(export_onnx.Model(graph, ir_version=8))
    run = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run
    for n_levels in (10**6, 3, 1):
        values = np.random.default_rng(0).integers(0, n_levels, (3, 2, n_ids)).astype(np.float32)
        best, ids = run(None, {"scores": values})
        np.testing.assert_array_equal(ids, np.argsort(-values, axis=-1, kind="stable")[..., :n_best])
        np.testing.assert_array_equal(best, np.take_along_axis(values, ids, axis=-1))


def test_no_name_of_a_loops_body_is_used_outside(exported):
    """OpenVINO would drop the body's inputs, and onnx's checker does not notice."""
    for kind in ("greedy", "beam"):
        graph = onnx.load(exported[0] / f"{kind}.onnx").graph
        body = body_of(graph)
        outside = {name for node in graph.node for name in node.output}
        outside |= {value.name for value in (*graph.input, *graph.initializer)}
        inside = [value.name for value in body.input]
        inside += [name for node in body.node for name in node.output if name]
        assert not outside & set(inside) and len(inside) == len(set(inside)) and not body.initializer


def test_nothing_in_a_loops_body_is_the_same_at_every_step(exported):
    """Of what reads only constants and values from outside, nothing is left inside."""
    for kind in ("greedy", "beam"):
        graph = onnx.load(exported[0] / f"{kind}.onnx").graph
        body = body_of(graph)
        inside = {value.name for value in body.input} | {name for node in body.node for name in node.output}
        assert not [node.name for node in body.node if inside.isdisjoint(node.input)]
        products = [node.input for node in body.node if node.op_type in ("MatMul", "Gemm")]
        assert (
            len(products) == 2 * (1 + 1 + 1 + 1 + 2 + 4) + 1
        )  # 2 layers: qkv, o, q, o, FFN, attention; logits


@pytest.mark.parametrize("change", ["alpha", "eos_id"])
def test_a_search_that_is_not_pytorchs_is_not_published(exported, tmp_path, monkeypatch, capsys, change):
    real = export_onnx.beam

    def wrong(op, inputs, traced, config, beam_size, alpha):
        if change == "eos_id":
            config = dataclasses.replace(config, eos_id=7)
        return real(op, inputs, traced, config, beam_size, alpha + (change == "alpha"))

    monkeypatch.setattr(export_onnx, "beam", wrong)
    assert export(exported[1], tmp_path / "onnx", "--graphs", "beam")[0] == 1
    assert "beam.onnx is not published: " in capsys.readouterr().err
    assert not list((tmp_path / "onnx").iterdir())


# int8 and shared weights


def test_int8_weights_are_8_bits_everywhere(exported, tmp_path):
    status, report = export(exported[1], tmp_path / "onnx", "--int8", "--graphs", "greedy", "beam")
    assert status == 0
    for kind in ("greedy", "beam"):
        proto = onnx.load(tmp_path / "onnx" / f"{kind}.onnx")
        matrices = {w.name: w.data_type for w in proto.graph.initializer if np.prod(w.dims) >= 16 * 16}
        assert set(matrices.values()) == {onnx.TensorProto.INT8}
        nodes = list(nodes_of(proto.graph))
        products = [node for node in nodes if node.op_type == "MatMul"]
        assert not {name for node in products for name in node.input} & set(matrices)
        rounded = [node.input[0] for node in nodes if node.op_type == "DynamicQuantizeLinear"]
        assert len(rounded) == len(set(rounded)) < sum(node.op_type == "MatMulInteger" for node in nodes)
        assert (
            kind in report
            and {"dtype": "int8"}.items() <= {e.key: e.value for e in proto.metadata_props}.items()
        )


@pytest.mark.parametrize("rows", [1, 6, 7])
def test_int8_products_never_saturate(rows):
    """Processors without VNNI add the products of two rows, 255 times a weight at most, in 16 bits."""
    weight = torch.randn(50, rows, generator=torch.Generator().manual_seed(0))
    weight[0] = 0
    weight[1], weight[2] = 0.3, -0.3
    stored = export_onnx.Matrix(weight, None, False, int8=True)
    assert ((stored.matrix * stored.scale).T - weight).abs().amax(1).le(0.501 * stored.scale).all()
    pairs = np.pad(stored.matrix.numpy().astype(int), ((0, rows % 2), (0, 0))).reshape(-1, 2, 50)
    for sign in (1, -1):
        sums = (sign * pairs).clip(0).sum(1)
        assert 255 * sums.max() < 2**15
        assert sums.max() in (126, 127, 128)  # all of the room is used


def test_int8_still_copies(trained, tmp_path):
    """Exact match of the copy task before and after, 500 unseen sequences."""
    model = load_checkpoint(trained[0])
    src, _ = copy_batch(model.config, 500, range(1, 21), torch.Generator().manual_seed(5))
    _, path = Composer(model, int8=True)(tmp_path, "greedy")
    (tokens,) = session(path).run(None, {"src": src.numpy(), "max_len": np.array(src.shape[1])})
    before = greedy_search(model, src, src.shape[1]).numpy()
    exact = [
        export_onnx.same_tokens(ids, src.numpy(), model.config.pad_id).mean() for ids in (before, tokens)
    ]
    assert exact[0] >= 0.999 and exact[1] >= 0.99, exact


def test_graphs_share_one_file_of_weights_that_moves_with_them(exported, tmp_path):
    assert export(exported[1], tmp_path / "onnx", "--shared-weights")[0] == 0
    (tmp_path / "onnx").rename(tmp_path / "moved")
    (weights,) = (tmp_path / "moved").glob("weights-*.data")
    n_bytes = 4 * sum(weight.numel() for weight in exported[2].parameters())
    assert abs(weights.stat().st_size / n_bytes - 1) < 0.03
    assert len(list((tmp_path / "moved").iterdir())) == 6
    for kind in KINDS:
        alone = tmp_path / kind
        alone.mkdir()
        for file in (tmp_path / "moved" / f"{kind}.onnx", weights):
            (alone / file.name).write_bytes(file.read_bytes())
        graph = graphs(exported[2])[kind]
        inputs = example(graph, exported[2], (2, 5, 3, 4))
        feeds = {name: np.asarray(x) for name, x in zip(graph.inputs, inputs, strict=True)}
        for output, wanted in zip(
            session(alone / f"{kind}.onnx").run(None, feeds),
            session(exported[0] / f"{kind}.onnx").run(None, feeds),
            strict=True,
        ):
            np.testing.assert_array_equal(output, wanted)


def test_a_later_export_spoils_no_earlier_one(exported, tmp_path):
    """Two models in one folder: each graph keeps the weights it was proved with."""
    assert export(exported[1], tmp_path, "--graphs", "encoder", "--shared-weights")[0] == 0
    before = (tmp_path / "encoder.onnx").read_bytes()
    save_checkpoint(tmp_path / "model.pt", small_model(1, n_layers=1))
    assert export(tmp_path / "model.pt", tmp_path, "--graphs", "encoder", "--shared-weights")[0] == 0
    assert len(list(tmp_path.glob("weights-*.data"))) == 2
    (tmp_path / "encoder.onnx").write_bytes(before)
    feeds = {"src": np.array([[7, 8, 9]])}
    for output, wanted in zip(
        session(tmp_path / "encoder.onnx").run(None, feeds),
        session(exported[0] / "encoder.onnx").run(None, feeds),
        strict=True,
    ):
        np.testing.assert_array_equal(output, wanted)


# Behaviour


def test_a_model_in_training_is_exported_without_dropout_and_stays_in_training(tmp_path):
    model = small_model(dropout=0.5).train()
    report = export_onnx.export(model, tmp_path, ["encoder"], {})
    assert model.training and model.encoder[0].dropout.training and "Dropout" not in "".join(report)


@pytest.fixture(scope="module")
def encoder_graph():
    model = small_model(1)
    graph = graphs(model)["encoder"]
    source = export_onnx.stored(model, False)
    return model, graph, trace("encoder", graphs(source)["encoder"], source)


@pytest.fixture
def traced(encoder_graph, tmp_path, monkeypatch):
    """A checkpoint whose encoder need not be traced again."""
    save_checkpoint(tmp_path / "model.pt", encoder_graph[0])
    monkeypatch.setattr(export_onnx, "trace", lambda name, graph, model: encoder_graph[2])
    return tmp_path / "model.pt"


def test_a_graph_that_differs_is_not_published(traced, tmp_path, monkeypatch, capsys):
    """Weights are changed between saving and proof: what is in the file is no longer the model."""
    real, out = export_onnx.prove, tmp_path / "onnx"
    out.mkdir()
    (out / "encoder.onnx").write_bytes(b"of yesterday")

    def change_then_prove(graph, model, *options):
        with torch.no_grad():
            model.encoder[0].ffn.w_1.bias += 1e-2
        return real(graph, model, *options)

    monkeypatch.setattr(export_onnx, "prove", change_then_prove)
    assert export(traced, out, "--graphs", "encoder")[0] == 1
    error = capsys.readouterr().err
    assert "encoder.onnx is not published: differs from PyTorch by" in error and "1.0e-04 is allowed" in error
    assert [file.name for file in out.iterdir()] == ["encoder.onnx"]
    assert (out / "encoder.onnx").read_bytes() == b"of yesterday"


def test_nan_is_no_agreement():
    assert export_onnx.difference(np.array([np.nan]), np.array([np.nan])) == np.inf


def test_a_fixed_axis_a_lost_input_and_a_second_copy_are_noticed(encoder_graph):
    model, graph, onnx_model = encoder_graph
    fixed = graph._replace(inputs={"src": ("batch", 7)})
    with pytest.raises(Failed, match="inputs are"):
        export_onnx.keeps_contract(fixed, onnx_model, model)
    with pytest.raises(Failed, match="outputs are"):
        export_onnx.keeps_contract(
            graph._replace(outputs=graph.outputs | {"lost": ("batch",)}), onnx_model, model
        )
    with pytest.raises(Failed, match="a weight is there twice"):
        export_onnx.keeps_contract(graph, onnx_model, small_model(1, d_ff=2, n_layers=1, d_model=8))


def test_a_wrong_shape_is_noticed(encoder_graph, tmp_path):
    model, graph, onnx_model = encoder_graph
    export_onnx.onnx_ir.save(onnx_model, tmp_path / "encoder.onnx")
    runner = export_onnx.runner(tmp_path / "encoder.onnx", ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
    other = graph._replace(reference=graphs(small_model(1, n_heads=4))["encoder"].reference)
    with pytest.raises(Failed, match=r"cross_key_0 is \(1, 2, 1, 8\), not \(1, 4, 1, 4\)"):
        prove(other, model, "float32", [runner])


def test_a_graph_that_a_runtime_refuses_is_a_failed_proof(traced, tmp_path, monkeypatch, capsys):

    def refuses(*args, **kwargs):
        raise ort.capi.onnxruntime_pybind11_state.RuntimeException("Non-zero status\ncode returned")

    monkeypatch.setattr(export_onnx, "prove", refuses)
    assert export(traced, tmp_path / "onnx", "--graphs", "encoder")[0] == 1
    assert "encoder.onnx is not published: Non-zero status code returned" in capsys.readouterr().err
    assert not list((tmp_path / "onnx").iterdir())


def test_the_exporters_error_is_one_line(tmp_path, monkeypatch, capsys):
    save_checkpoint(tmp_path / "model.pt", small_model())

    def breaks(*args, **kwargs):
        raise RuntimeError("no such operator:\n  aten::frobnicate")

    monkeypatch.setattr(torch.onnx, "export", breaks)
    assert export(tmp_path / "model.pt", tmp_path / "onnx")[0] == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert "forward.onnx is not published: no such operator: aten::frobnicate" in last
    assert not list((tmp_path / "onnx").iterdir())


def test_stepping_by_hand_is_proved_too(exported, monkeypatch, capsys, tmp_path):
    real = export_onnx.run_onnx.greedy
    monkeypatch.setattr(export_onnx.run_onnx, "greedy", lambda *options: real(*options) + 1)
    assert export(exported[1], tmp_path / "onnx", "--graphs", "encoder", "decoder")[0] == 1
    assert "other tokens than PyTorch's for [" in capsys.readouterr().err


def test_a_second_export_is_quiet_and_gives_the_same_bytes(exported, capfd, tmp_path):
    status, report = export(exported[1], tmp_path, "--graphs", "encoder")
    captured = capfd.readouterr()
    assert status == 0 and captured.out == ""
    assert captured.err.splitlines() == [
        "encoder: tracing",
        "encoder: proving, optimised and not",
    ]
    assert re.search(
        r"encoder .*encoder\.onnx .* MB +\d+ nodes +\d\.\de-0\d +100.00%\n +Reshape \d+, Transpose \d+, ",
        report,
    )
    assert (tmp_path / "encoder.onnx").read_bytes() == (exported[0] / "encoder.onnx").read_bytes()


# Bad input


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["nowhere.pt"], ["nowhere.pt", "train_copy.py"]),
        (["model.pt", "--graphs", "greedier"], ["greedier"]),
        (["model.pt", "--dtype", "int3"], ["int3"]),
        (["model.pt", "--beam-size", "0"], ["--beam-size", "0", "at least 1"]),
        (["model.pt", "--alpha", "-1"], ["--alpha", "-1.0", "at least 0"]),
        (["model.pt", "--int8", "--dtype", "float16"], ["--dtype", "float16", "float32 with --int8"]),
        (["broken.pt"], ["broken.pt", "no checkpoint"]),
        (["model.pt", "--out", "model.pt"], ["model.pt"]),
    ],
)
def test_bad_input_is_one_line_and_2(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_checkpoint("model.pt", small_model())
    (tmp_path / "broken.pt").write_bytes(b"no")
    with pytest.raises(SystemExit) as caught:
        export_onnx.main(arguments)
    error = capsys.readouterr().err
    assert caught.value.code == 2 and error.count("\n") == 1 and all(word in error for word in words)


def test_a_missing_package_is_said_before_any_work(monkeypatch, capsys):
    find = export_onnx.importlib.util.find_spec
    monkeypatch.setattr(
        export_onnx.importlib.util, "find_spec", lambda n: None if n == "onnxscript" else find(n)
    )
    with pytest.raises(SystemExit) as caught:
        export_onnx.main(["nowhere.pt"])
    assert caught.value.code == 2 and "pip install onnxscript" in capsys.readouterr().err


def test_a_full_disk_leaves_nothing_behind(traced, tmp_path, monkeypatch, capsys):
    real = builtins.open

    class Full:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def write(self, data):
            self.file.write(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")

    def full(path, mode="r", *args, **kwargs):
        file = real(path, mode, *args, **kwargs)
        return Full(file) if str(path).endswith(".onnx") and "w" in mode else file

    monkeypatch.setattr(builtins, "open", full)
    with pytest.raises(SystemExit) as caught:
        export_onnx.main([str(traced), "--out", str(tmp_path / "onnx"), "--graphs", "encoder"])
    assert caught.value.code == 2 and "No space left" in capsys.readouterr().err
    assert not list((tmp_path / "onnx").iterdir())


def test_more_than_2_gb_goes_into_a_second_file(traced, tmp_path, monkeypatch):
    """With the limit lowered: both files are published, and run from another folder."""
    monkeypatch.setattr(export_onnx, "LARGEST", 1000)
    assert export(traced, tmp_path / "onnx", "--graphs", "encoder")[0] == 0
    (tmp_path / "onnx").rename(tmp_path / "moved")
    assert len(list((tmp_path / "moved").iterdir())) == 2 and list(
        (tmp_path / "moved").glob("weights-*.data")
    )
    session(tmp_path / "moved" / "encoder.onnx").run(None, {"src": np.ones((1, 2), dtype=np.int64)})


@pytest.mark.slow
def test_base_size(tmp_path):
    """The base model with 37,000 ids: its numbers hold, each weight is stored once, int8 is a quarter."""
    torch.manual_seed(0)
    model = transformer.Transformer(transformer.TransformerConfig(37000, 37000))
    save_checkpoint(tmp_path / "base.pt", model)
    n_bytes = 4 * sum(weight.numel() for weight in model.parameters())
    status, report = export(tmp_path / "base.pt", tmp_path / "onnx")
    assert status == 0, report
    for kind in ("forward", "greedy", "beam"):
        assert abs((tmp_path / "onnx" / f"{kind}.onnx").stat().st_size / n_bytes - 1) < 0.02
    decoder = [weight for layer in model.decoder for name, weight in layer.named_parameters()
               if not name.startswith(("cross_attn.w_k", "cross_attn.w_v"))]  # fmt: skip
    decoder_bytes = 4 * (sum(weight.numel() for weight in decoder) + model.projection.weight.numel())
    assert abs((tmp_path / "onnx" / "decoder.onnx").stat().st_size / decoder_bytes - 1) < 0.02
    status, report = export(tmp_path / "base.pt", tmp_path / "int8", "--int8", "--graphs", "greedy")
    assert status == 0 and (tmp_path / "int8" / "greedy.onnx").stat().st_size < 0.3 * n_bytes
    share = float(re.search(r"greedy .* (\d+\.\d+)%", report)[1])
    assert share > 50, report  # random weights: the likeliest ids lie close together
    status, _ = export(
        tmp_path / "base.pt", tmp_path / "shared", "--shared-weights", "--graphs", "encoder", "greedy"
    )
    total = sum(file.stat().st_size for file in (tmp_path / "shared").iterdir())
    assert status == 0 and abs(total / n_bytes - 1) < 0.03
