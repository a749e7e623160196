"""Break the Transformer on purpose, one famous bug at a time, and see which check notices.

Each bug below was shipped by somebody, and most of them still learn something: the loss falls, the samples
look plausible, and the last few per cent never come. A bug is a replacement in the source of transformer.py;
the broken copy must fail the check that is named beside it, and the real one must pass every check.

To try one by hand: make the change in transformer.py, then run `python train_copy.py`, then `pytest tests`.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

SOURCE = Path(__file__).parents[1].joinpath("transformer.py").read_text(encoding="utf-8")
SRC = torch.tensor([[5, 6, 7, 8, 2], [9, 4, 2, 0, 0]])  # ragged: the second source is two ids shorter
TGT = torch.tensor([[1, 5, 6, 7, 8, 3], [1, 9, 4, 11, 3, 7]])


def load(source: str) -> ModuleType:
    """A module of its own from this source."""
    module = importlib.util.module_from_spec(
        importlib.util.spec_from_loader("broken_transformer", loader=None)
    )
    sys.modules[module.__name__] = module  # dataclass looks its module up there
    try:
        exec(compile(source, "broken_transformer.py", "exec"), module.__dict__)
    finally:
        del sys.modules[module.__name__]
    return module


def model_of(t: ModuleType, **options) -> nn.Module:
    torch.manual_seed(0)
    return t.Transformer(
        t.TransformerConfig(13, 13, d_model=16, n_heads=2, n_layers=2, d_ff=32, **options)
    ).eval()


def same(one, other):
    torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


# The checks: each asserts one thing that is true of every correct Transformer.


def heads_are_torchs(t):
    ours, theirs = t.MultiHeadAttention(16, 2), nn.MultiheadAttention(16, 2, bias=False, batch_first=True)
    in_proj = torch.cat((ours.w_q.weight, ours.w_k.weight, ours.w_v.weight))
    theirs.load_state_dict({"in_proj_weight": in_proj, "out_proj.weight": ours.w_o.weight})
    x = torch.randn(2, 5, 16)
    mask = torch.ones(5, 5).tril().bool()
    same(ours(x, ours.keys_values(x), mask), theirs(x, x, x, attn_mask=~mask)[0])


def layers_are_post_norm(t):
    layer, x, mask = model_of(t).encoder[0], torch.randn(2, 5, 16), torch.ones(5, 5).bool()
    x_1 = layer.norm_self(x + layer.self_attn(x, layer.self_attn.keys_values(x), mask))
    same(layer(x, mask), layer.norm_ffn(x_1 + layer.ffn(x_1)))


def future_ids_are_hidden(t):
    model, changed = model_of(t), TGT.clone()
    changed[:, 3:] = 12
    same(model(SRC, changed)[:, :3], model(SRC, TGT)[:, :3])


def padding_is_hidden(t):
    model, wider = model_of(t), nn.functional.pad(SRC, (0, 3))
    same(model(wider, TGT), model(SRC, TGT))
    same(model(SRC[1:, :3], TGT[1:]), model(SRC, TGT)[1:])


def real_ids_are_seen(t):
    model, changed = model_of(t), SRC.clone()
    changed[:, 0] = 12
    assert (model(changed, TGT) - model(SRC, TGT)).abs().amax(dim=(1, 2)).min() > 0.01


def only_padding_is_finite(t):
    assert model_of(t)(torch.zeros_like(SRC), TGT).isfinite().all()


def order_matters(t):
    model = model_of(t)
    assert (model.encode(SRC[:1].flip(1))[0] - model.encode(SRC[:1])[0].flip(1)).abs().max() > 0.01
    assert (model(SRC, TGT.flip(1)).flip(1) - model(SRC, TGT)).abs().max() > 0.01


def embeddings_are_scaled(t):
    model = model_of(t)
    positions = torch.arange(5)[:, None] / 10000 ** (torch.arange(0, 16, 2) / 16)
    encoding = torch.stack((positions.sin(), positions.cos()), dim=-1).flatten(1)
    same(model.embed(model.src_embedding, SRC), model.src_embedding.weight[SRC] * 4 + encoding)  # sqrt(16)


def every_layer_has_parameters(t):
    ffn = 2 * 16 * 32 + 32 + 16
    encoder, decoder = 4 * 16 * 16 + ffn + 2 * 32, 8 * 16 * 16 + ffn + 3 * 32  # matrices, ffn, norms
    assert sum(weight.numel() for weight in model_of(t).parameters()) == 13 * 16 + 2 * (encoder + decoder)


def a_step_equals_decode(t):
    model, logits = model_of(t), []
    state = model.start(SRC)
    for ids in TGT.split([1, 3, 2], dim=1):
        new, state = model.step(ids, state)
        logits.append(new)
    same(torch.cat(logits, dim=1), model(SRC, TGT))


def search_drops_nothing_out(t):
    model = model_of(t, dropout=0.5)
    expected = t.greedy_search(model, SRC, 12)
    assert torch.equal(t.greedy_search(model.train(), SRC, 12), expected)


def beam_1_is_greedy(t):
    model = model_of(t)
    with torch.no_grad():
        model.projection.weight.mul_(2)
    tokens, _ = t.beam_search(model, SRC, 12, beam_size=1)
    assert torch.equal(tokens[:, 0], t.greedy_search(model, SRC, 12))


def ends_are_noticed(t):
    free = t.greedy_search(model_of(t, eos_id=12), SRC, 6)
    model = model_of(t, eos_id=int(free[0, 2]))  # the same weights, but what came third now ends a row
    tokens = t.greedy_search(model, SRC[:1], 6)[0].tolist()
    end = tokens.index(model.config.eos_id)
    assert tokens == free[0, : end + 1].tolist()


def scores_are_teacher_forced(t):
    lengths = set()
    for eos_id in (3, 5, 8, 11):
        model = model_of(t, eos_id=eos_id)
        tokens, scores = t.beam_search(model, SRC[:1], 8, beam_size=8)
        for ids, score in zip(tokens[0].tolist(), scores[0].tolist(), strict=True):
            ids = ids[: ids.index(eos_id) + 1] if eos_id in ids else ids
            log_probs = model(SRC[:1], torch.tensor([[1, *ids[:-1]]])).log_softmax(-1)[
                0, range(len(ids)), ids
            ]
            assert abs(log_probs.sum() / ((5 + len(ids)) / 6) ** 0.6 - score) < 1e-4
            lengths.add(len(ids))
    assert len(lengths) > 1


BUGS = [
    # what went wrong, the line, the line with the bug, the check that notices
    (
        "heads merged in the wrong order",
        "output.transpose(1, 2).flatten(2)",
        "output.reshape(x.shape)",
        heads_are_torchs,
    ),
    (
        "heads split in the wrong order",
        "(self.n_heads, -1)).transpose(1, 2)",
        "(-1, self.n_heads)).movedim(-1, 1)",
        heads_are_torchs,
    ),
    ("scores not divided by sqrt(d_k)", " / math.sqrt(q.size(-1))", "", heads_are_torchs),
    (
        "scores divided by sqrt(d_model)",
        "math.sqrt(q.size(-1))",
        "math.sqrt(q.size(1) * q.size(-1))",
        heads_are_torchs,
    ),
    ("softmax over the queries", ".softmax(dim=-1)", ".softmax(dim=-2)", heads_are_torchs),
    ("mask inverted", "torch.where(mask,", "torch.where(~mask,", future_ids_are_hidden),
    ("mask on queries instead of keys", "[:, None, None, :]", "[:, None, :, None]", padding_is_hidden),
    ("padding mask left out", "(ids != pad_id)", "(ids == ids)", padding_is_hidden),
    ("masked with minus infinity", "torch.finfo(scores.dtype).min", "-math.inf", only_padding_is_finite),
    (
        "causal mask off by one: sees the answer",
        ") <= torch.arange(k_len",
        ") <= 1 + torch.arange(k_len",
        future_ids_are_hidden,
    ),
    (
        "causal mask off by one: blind to itself",
        ") <= torch.arange(k_len",
        ") < torch.arange(k_len",
        future_ids_are_hidden,  # the first id may attend to nothing, and so averages everything
    ),
    (
        "causal mask square, then cut",
        "torch.arange(k_len - q_len, k_len, ",
        "torch.arange(q_len, ",
        a_step_equals_decode,
    ),
    ("position left out", "x + positional_encoding(", "x + 0 * positional_encoding(", order_matters),
    ("sine and cosine in two halves", "dim=-1).flatten(-2)", "dim=-2).flatten(-2)", embeddings_are_scaled),
    (
        "position starts again at each step",
        "torch.arange(past_len, past_len + ids",
        "torch.arange(ids",
        a_step_equals_decode,
    ),
    ("sqrt(d_model) forgotten", " * math.sqrt(self.config.d_model)", "", embeddings_are_scaled),
    (
        "norm before the sub-layer",
        "return self.norm_ffn(x + self.dropout(self.ffn(x)))",
        "return x + self.dropout(self.ffn(self.norm_ffn(x)))",
        layers_are_post_norm,
    ),
    (
        "norm of the sub-layer only",
        "self.norm_self(x + self.dropout(self.self_attn(x, self.self_attn",
        "x + self.norm_self(self.dropout(self.self_attn(x, self.self_attn",
        layers_are_post_norm,
    ),
    ("layers in a plain list", "nn.ModuleList(", "list(", every_layer_has_parameters),
    (
        "one layer, N times",
        "nn.ModuleList(DecoderLayer(config) for _ in range(config.n_layers))",
        "nn.ModuleList([DecoderLayer(config)] * config.n_layers)",
        every_layer_has_parameters,
    ),
    ("embeddings not tied", "if config.tie_embeddings:", "if False:", every_layer_has_parameters),
    (
        "decoder does not read the source",
        "self.cross_attn(x, src_kv, src_mask)",
        "self.self_attn(x, kv, mask)",
        real_ids_are_seen,
    ),
    (
        "cache joined in the wrong order",
        "torch.cat((past_key, key), dim=2)",
        "torch.cat((key, past_key), dim=2)",
        a_step_equals_decode,
    ),
    ("dropout left on in search", "search(model.eval(),", "search(model,", search_drops_nothing_out),
    ("beams share one cache", "key[source], value[source]", "key, value", scores_are_teacher_forced),
    (
        "length penalty without the length",
        "((5 + length) / 6)",
        "((5 + max_len) / 6)",
        scores_are_teacher_forced,
    ),
    (
        "end of sequence not noticed",
        "ended := (tokens == eos_id)",
        "ended := (tokens == pad_id)",
        ends_are_noticed,
    ),
]
CHECKS = sorted({check for *_, check in BUGS}, key=lambda check: check.__name__)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_real_one_passes(check):
    check(load(SOURCE))


@pytest.mark.parametrize("bug, line, broken, check", BUGS, ids=[bug[0].replace(" ", "_") for bug in BUGS])
def test_the_bug_is_noticed(bug, line, broken, check):
    assert SOURCE.count(line) >= 1, f"transformer.py no longer says {line!r}: bring this bug up to date"
    module = load(SOURCE.replace(line, broken))
    with pytest.raises((AssertionError, RuntimeError, IndexError, ValueError)):
        check(module)
