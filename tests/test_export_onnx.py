"""export_onnx.py: the contract of the graphs, the proof, and that it can fail."""

import builtins
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
from helpers import small_model

import export_onnx
import transformer
from export_onnx import PROVED, TRACED, Failed, example, graphs, prove, trace
from transformer import save_checkpoint

KINDS = ["forward", "encoder", "decoder"]


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
    }
    for kind, (inputs, outputs) in expected.items():
        loaded = session(exported[0] / f"{kind}.onnx")
        assert [(i.name, i.shape) for i in loaded.get_inputs()] == list(inputs.items())
        assert [(o.name, o.shape) for o in loaded.get_outputs()] == list(outputs.items())
        for value in (*loaded.get_inputs(), *loaded.get_outputs()):
            assert value.type == ("tensor(int64)" if value.name in ("src", "tgt") else "tensor(float)")


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_portable_and_say_what_they_are(exported, kind):
    folder, _, model, report = exported
    proto = onnx.load(folder / f"{kind}.onnx")
    assert proto.ir_version <= 10 and [(o.domain, o.version) for o in proto.opset_import] == [("", 18)]
    ops = {node.op_type for node in proto.graph.node}
    assert {node.domain for node in proto.graph.node} == {""} and not proto.functions
    assert not ops & {"Attention", "Dropout", "If", "IsNaN", "Loop", "Scan", "Trilu"}
    facts = {entry.key: entry.value for entry in proto.metadata_props}
    assert facts["graph"] == kind and facts["dtype"] == "float32" and facts["opset"] == "18"
    for field, value in vars(model.config).items():
        assert facts[field] == str(value)
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
    assert shapes.count((16, 29)) == 1 and shapes.count((29, 16)) == 0  # the tied matrix
    if kind == "forward":
        stored = sum(int(np.prod(shape)) for shape in shapes)
        assert stored <= sum(weight.numel() for weight in model.parameters()) + 100
    constants = {node.input[1] for node in proto.graph.node if node.op_type == "Reshape"}
    for weight in proto.graph.initializer:  # no traced size is a target of a Reshape
        if weight.name in constants:
            assert not set(onnx.numpy_helper.to_array(weight).tolist()) & set(TRACED.values())


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
        src, tgt = example(graph, model, dict(batch=batch, src_len=src_len, tgt_len=tgt_len), batch)
        (logits,) = loaded.run(None, {"src": src.numpy(), "tgt": tgt.numpy()})
        with torch.no_grad():
            expected = model(src, tgt).numpy()
        np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0, equal_nan=False)


def test_a_file_runs_alone_and_under_another_name(exported, tmp_path):
    path = tmp_path / "renamed.onnx"
    path.write_bytes((exported[0] / "forward.onnx").read_bytes())
    session(path).run(None, {"src": np.ones((1, 2), dtype=np.int64), "tgt": np.ones((1, 3), dtype=np.int64)})


def test_the_proof_covers_what_was_never_traced():
    traced = tuple(TRACED[axis] for axis in ("batch", "src_len", "tgt_len", "past_len"))
    assert traced not in PROVED
    assert {1, 2, 3, 8} <= {batch for batch, *_ in PROVED} and {0, 1} <= {past for *_, past in PROVED}
    sources = {src_len for _, src_len, *_ in PROVED}
    assert min(sources) == 1 and 7 in sources and 512 in sources and len(set(TRACED.values())) == len(TRACED)


def test_half_precision_is_proved_in_half_precision(exported, tmp_path):
    options = ["--dtype", "float16", "--graphs", "encoder", "decoder"]
    assert export(exported[1], tmp_path / "onnx", *options)[0] == 0
    for kind in ("encoder", "decoder"):
        path = tmp_path / "onnx" / f"{kind}.onnx"
        assert path.stat().st_size < 0.75 * (exported[0] / f"{kind}.onnx").stat().st_size
        assert session(path).get_outputs()[0].type == "tensor(float16)"


# Behaviour


def test_a_model_in_training_is_exported_without_dropout_and_stays_in_training(tmp_path):
    model = small_model(dropout=0.5).train()
    report = export_onnx.export(model, tmp_path, ["encoder"], {})
    assert model.training and model.encoder[0].dropout.training and "Dropout" not in "".join(report)


@pytest.fixture(scope="module")
def encoder_graph():
    model = small_model(1)
    graph = graphs(model)["encoder"]
    return model, graph, trace(graph, model)


@pytest.fixture
def traced(encoder_graph, tmp_path, monkeypatch):
    """A checkpoint whose encoder need not be traced again."""
    save_checkpoint(tmp_path / "model.pt", encoder_graph[0])
    monkeypatch.setattr(export_onnx, "trace", lambda graph, model: encoder_graph[2])
    return tmp_path / "model.pt"


def test_a_graph_that_differs_is_not_published(traced, tmp_path, monkeypatch, capsys):
    """Weights are changed between saving and proof: what is in the file is no longer the model."""
    real, out = export_onnx.prove, tmp_path / "onnx"
    out.mkdir()
    (out / "encoder.onnx").write_bytes(b"of yesterday")

    def change_then_prove(graph, model, path):
        with torch.no_grad():
            model.encoder[0].ffn.w_1.bias += 1e-2
        return real(graph, model, path)

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
    other = graph._replace(module=graphs(small_model(1, n_heads=4))["encoder"].module)
    with pytest.raises(Failed, match="cross_key_0 is float32"):
        prove(other, model, tmp_path / "encoder.onnx")


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
    assert "torch's exporter: no such operator: aten::frobnicate" in last
    assert not list((tmp_path / "onnx").iterdir())


def test_the_search_is_proved_too(exported, monkeypatch):
    folder, _, model, _ = exported
    export_onnx.prove_search(model, folder, 0.0)
    monkeypatch.setattr(export_onnx, "greedy_search", lambda model, src, max_len: src[:, :1])
    with pytest.raises(Failed, match="other tokens than PyTorch"):
        export_onnx.prove_search(model, folder, 0.0)


def test_a_second_export_is_quiet_and_gives_the_same_bytes(exported, capfd, tmp_path):
    status, report = export(exported[1], tmp_path, "--graphs", "encoder")
    captured = capfd.readouterr()
    assert status == 0 and captured.out == ""
    assert captured.err.splitlines() == [
        "encoder: tracing",
        "encoder: proving at 11 shapes, optimised and not",
    ]
    assert re.search(r"encoder .*encoder\.onnx .* MB +\d+ nodes +\d\.\de-0\d\n +MatMul \d+, ", report)
    assert (tmp_path / "encoder.onnx").read_bytes() == (exported[0] / "encoder.onnx").read_bytes()


# Bad input


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["nowhere.pt"], ["nowhere.pt", "train_copy.py"]),
        (["model.pt", "--graphs", "greedier"], ["greedier"]),
        (["model.pt", "--dtype", "int3"], ["int3"]),
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


def test_more_than_2_gb_goes_into_a_second_file(exported, tmp_path, monkeypatch):
    """With the limit lowered: both files are published, and run from another folder."""
    monkeypatch.setattr(export_onnx, "LARGEST", 1000)
    assert export(exported[1], tmp_path / "onnx", "--graphs", "encoder")[0] == 0
    (tmp_path / "onnx").rename(tmp_path / "moved")
    assert sorted(file.name for file in (tmp_path / "moved").iterdir()) == [
        "encoder.onnx",
        "encoder.onnx.data",
    ]
    inputs = {"src": np.ones((1, 2), dtype=np.int64)}
    expected = session(exported[0] / "encoder.onnx").run(None, inputs)[0]
    np.testing.assert_array_equal(session(tmp_path / "moved" / "encoder.onnx").run(None, inputs)[0], expected)


@pytest.mark.slow
def test_base_size(tmp_path):
    """The base model with 37,000 ids: each file within 2 % of its parameters' bytes, and the proof holds."""
    torch.manual_seed(0)
    model = transformer.Transformer(transformer.TransformerConfig(37000, 37000))
    save_checkpoint(tmp_path / "base.pt", model)
    status, report = export(tmp_path / "base.pt", tmp_path / "onnx")
    assert status == 0, report
    n_bytes = 4 * sum(weight.numel() for weight in model.parameters())
    assert abs((tmp_path / "onnx" / "forward.onnx").stat().st_size / n_bytes - 1) < 0.02
    decoder = [weight for layer in model.decoder for name, weight in layer.named_parameters()
               if not name.startswith(("cross_attn.w_k", "cross_attn.w_v"))]  # fmt: skip
    n_bytes = 4 * (sum(weight.numel() for weight in decoder) + model.projection.weight.numel())
    assert abs((tmp_path / "onnx" / "decoder.onnx").stat().st_size / n_bytes - 1) < 0.02
