"""The engines that speed.py compares: each is given a folder, loads what it needs and decodes ids to ids.

prepare(folder) writes the same weights in each engine's own format: checkpoint, ONNX graphs, CTranslate2's
model, Marian for optimum-onnx. load(...) -> decode(sources, max_len) -> the first hypothesis of each source.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the four files, from any folder
import run_onnx
from transformer import (
    DecoderLayer,
    Transformer,
    beam_search,
    greedy_search,
    load_checkpoint,
    positional_encoding,
)

LONGEST = 1024  # positions in the tables of the engines that need one
Decode = Callable[[list[list[int]], int], list[list[int]]]


def cut(tokens: np.ndarray, eos_id: int) -> list[list[int]]:
    """(B, T) -> each row up to its eos: padding follows, which optimum's beam search fills with eos."""
    return [row[: row.index(eos_id) + 1] if eos_id in row else row for row in tokens.tolist()]


def teach_to_end(model: Transformer, src: torch.Tensor, lengths: torch.Tensor) -> list[int]:
    """Fit the row of eos so that greedy search of these sources ends at about these lengths -> at which.

    Least squares, on the states before the projection: eos must win at the end and lose before it.
    """
    states, eos_id = [], model.config.eos_id
    hook = model.projection.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0][:, -1]))
    with torch.no_grad():
        model.projection.weight[eos_id] = 0
    greedy_search(model, src, int(lengths.max()))
    hook.remove()
    x = torch.stack(states, dim=1).double()  # (B, T, d_model)
    highest = (x @ model.projection.weight.detach().double().T).amax(dim=-1)
    place, end = torch.arange(x.size(1)), lengths[:, None] - 1
    wanted = highest + torch.where(place == end, 5.0, -5.0)
    weight = torch.where(place == end, 30.0, torch.where(place < end, 1.0, 0.0)).sqrt()
    a, b = (x * weight[..., None]).flatten(0, 1), (wanted * weight).flatten()
    fitted = torch.linalg.solve(a.T @ a + 0.1 * torch.eye(x.size(2), dtype=torch.double), a.T @ b)
    with torch.no_grad():
        model.projection.weight[eos_id] = fitted.float()
    return [
        len(ids) for ids in cut(greedy_search(model, src, int(lengths.max())).numpy(), model.config.eos_id)
    ]


# Ours


def load_onnx(folder: Path, search: str, precision: str, device: str, threads: int) -> Decode:
    """greedy.onnx or beam.onnx on ONNX Runtime: the file's whole search is one call."""
    session = run_onnx.load(folder / precision / f"{search}.onnx", device, threads, tf32=False)
    facts = run_onnx.metadata(session)

    def decode(sources: list[list[int]], max_len: int) -> list[list[int]]:
        tokens = run_onnx.search((session,), run_onnx.pad(sources, facts), max_len)[0]
        return cut(tokens if search == "greedy" else tokens[:, 0], int(facts["eos_id"]))

    return decode


def load_pytorch(folder: Path, search: str, precision: str, device: str, threads: int) -> Decode:
    """transformer.py itself, eager, with its cache."""
    torch.set_num_threads(threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    model = load_checkpoint(folder / "model.pt").to(device, getattr(torch, precision))
    facts = {field: str(value) for field, value in vars(model.config).items()}

    def decode(sources: list[list[int]], max_len: int) -> list[list[int]]:
        src = torch.from_numpy(run_onnx.pad(sources, facts)).to(device)
        tokens = (
            greedy_search(model, src, max_len)
            if search == "greedy"
            else beam_search(model, src, max_len)[0][:, 0]
        )
        return cut(tokens.cpu().numpy(), model.config.eos_id)

    return decode


# CTranslate2


def to_ctranslate2(model: Transformer, folder: Path) -> None:
    """Our weights as its TransformerSpec: q, k and v are one matrix there, and so are k and v of memory."""
    from ctranslate2.specs import TransformerSpec
    from ctranslate2.specs.common_spec import Activation

    config, joined = model.config, lambda *linears: torch.cat([linear.weight for linear in linears])
    spec = TransformerSpec.from_config(
        config.n_layers, config.n_heads, pre_norm=False, activation=Activation.RELU
    )
    positions = positional_encoding(torch.arange(LONGEST), config.d_model)
    for part, layers, embedding in (
        (spec.encoder, model.encoder, model.src_embedding),
        (spec.decoder, model.decoder, model.tgt_embedding),
    ):
        part.scale_embeddings, part.position_encodings.encodings = True, positions
        table = part.embeddings[0] if isinstance(part.embeddings, list) else part.embeddings
        table.weight = embedding.weight
        for to, layer in zip(part.layer, layers, strict=True):
            attn, norms = layer.self_attn, [(to.self_attention.layer_norm, layer.norm_self)]
            products = [
                (to.self_attention.linear[0], joined(attn.w_q, attn.w_k, attn.w_v), None),
                (to.self_attention.linear[1], attn.w_o.weight, None),
            ]
            if isinstance(layer, DecoderLayer):
                attn = layer.cross_attn
                norms.append((to.attention.layer_norm, layer.norm_cross))
                products.append((to.attention.linear[0], attn.w_q.weight, None))
                products.append((to.attention.linear[1], joined(attn.w_k, attn.w_v), None))
                products.append((to.attention.linear[2], attn.w_o.weight, None))
            norms.append((to.ffn.layer_norm, layer.norm_ffn))
            products.append((to.ffn.linear_0, layer.ffn.w_1.weight, layer.ffn.w_1.bias))
            products.append((to.ffn.linear_1, layer.ffn.w_2.weight, layer.ffn.w_2.bias))
            for norm, ours in norms:
                norm.gamma, norm.beta = ours.weight, ours.bias
            for linear, weight, bias in products:
                linear.weight = weight
                if bias is not None:
                    linear.bias = bias
    spec.decoder.projection.weight = model.projection.weight
    vocabularies = [[str(i) for i in range(n)] for n in (config.src_vocab_size, config.tgt_vocab_size)]
    spec.register_source_vocabulary(vocabularies[0])
    spec.register_target_vocabulary(vocabularies[1])
    names = dict(
        bos_token=config.bos_id,
        eos_token=config.eos_id,
        decoder_start_token=config.bos_id,
        unk_token=config.pad_id,
    )
    for name, token in names.items():
        setattr(spec.config, name, str(token))
    spec.validate()
    folder.mkdir()
    spec.save(str(folder))


def load_ctranslate2(folder: Path, search: str, precision: str, device: str, threads: int) -> Decode:
    """Its Translator, all sources as one batch."""
    import ctranslate2

    translator = ctranslate2.Translator(
        str(folder / "ctranslate2"), device=device, compute_type=precision, intra_threads=threads
    )
    beam_size = 1 if search == "greedy" else 4

    def decode(sources: list[list[int]], max_len: int) -> list[list[int]]:
        results = translator.translate_batch(
            [[str(token) for token in source] for source in sources],
            beam_size=beam_size,
            num_hypotheses=beam_size,
            length_penalty=0.6,
            max_decoding_length=max_len,
            min_decoding_length=0,
            return_end_token=True,
        )
        return [[int(token) for token in result.hypotheses[0]] for result in results]

    return decode


# optimum-onnx


def to_marian(model: Transformer, folder: Path) -> None:
    """Our weights as a MarianMTModel, whose biases of attention are then zero; exported by optimum."""
    from transformers import MarianConfig, MarianMTModel

    config = model.config
    marian = MarianMTModel(
        MarianConfig(
            vocab_size=config.tgt_vocab_size,
            d_model=config.d_model,
            encoder_layers=config.n_layers,
            decoder_layers=config.n_layers,
            encoder_attention_heads=config.n_heads,
            decoder_attention_heads=config.n_heads,
            encoder_ffn_dim=config.d_ff,
            decoder_ffn_dim=config.d_ff,
            activation_function="relu",
            scale_embedding=True,
            max_position_embeddings=LONGEST,
            pad_token_id=config.pad_id,
            bos_token_id=config.bos_id,
            eos_token_id=config.eos_id,
            decoder_start_token_id=config.bos_id,
            forced_eos_token_id=None,
        )
    ).eval()
    renamed = {"self_attn": "self_attn", "cross_attn": "encoder_attn"}
    renamed = {
        f"{ours}.w_{letter}": f"{its}.{'out' if letter == 'o' else letter}_proj"
        for ours, its in renamed.items()
        for letter in "qkvo"
    }
    renamed |= {"ffn.w_1": "fc1", "ffn.w_2": "fc2", "norm_self": "self_attn_layer_norm"}
    renamed |= {"norm_cross": "encoder_attn_layer_norm", "norm_ffn": "final_layer_norm"}
    halved = torch.arange(config.d_model).view(-1, 2).T.flatten()  # its sines come first, then all cosines
    shared = model.src_embedding.weight.detach()[:, halved]
    weights = {name: torch.zeros_like(value) for name, value in marian.state_dict().items()}
    for side in ("encoder", "decoder"):
        for i, layer in enumerate(getattr(model, side)):
            for name, value in layer.state_dict().items():
                module, kind = name.rsplit(".", 1)
                reads = module.endswith(("w_q", "w_k", "w_v", "w_1")) and kind == "weight"
                value = value[:, halved] if reads else value if module == "ffn.w_1" else value[halved]
                weights[f"model.{side}.layers.{i}.{renamed[module]}.{kind}"] = value
        weights[f"model.{side}.embed_tokens.weight"] = shared
        weights[f"model.{side}.embed_positions.weight"] = positional_encoding(
            torch.arange(LONGEST), config.d_model
        )[:, halved]
    weights["model.shared.weight"] = weights["lm_head.weight"] = shared
    marian.load_state_dict(weights)
    marian.save_pretrained(folder / "marian")
    command = [sys.executable, "-m", "optimum.exporters.onnx", "--model", str(folder / "marian")]
    command += ["--task", "text2text-generation-with-past", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"optimum could not export: {done.stderr[-500:]}")


def load_optimum(folder: Path, search: str, precision: str, device: str, threads: int) -> Decode:
    """generate() of ORTModelForSeq2SeqLM: a loop in Python over its merged decoder."""
    import onnxruntime as ort
    from optimum.onnxruntime import ORTModelForSeq2SeqLM

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    torch.set_num_threads(threads)
    model = ORTModelForSeq2SeqLM.from_pretrained(
        folder / "optimum", session_options=options, provider=run_onnx.PROVIDERS[device]
    )
    pad_id = model.config.pad_token_id
    facts = dict(pad_id=pad_id, src_vocab_size=model.config.vocab_size)

    def decode(sources: list[list[int]], max_len: int) -> list[list[int]]:
        src = torch.from_numpy(run_onnx.pad(sources, facts)).to(device)
        options = (
            dict(num_beams=1)
            if search == "greedy"
            else dict(num_beams=4, length_penalty=0.6, early_stopping=True)
        )
        tokens = model.generate(
            input_ids=src,
            attention_mask=(src != pad_id).long(),
            max_new_tokens=max_len,
            do_sample=False,
            **options,
        )
        return cut(tokens[:, 1:].cpu().numpy(), model.config.eos_token_id)

    return decode


ENGINES = {
    "onnx": load_onnx,
    "pytorch": load_pytorch,
    "ctranslate2": load_ctranslate2,
    "optimum": load_optimum,
}
