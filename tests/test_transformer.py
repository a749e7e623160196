"""transformer.py against independent oracles: torch's own layers, the paper's formulas, brute force."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    LOWEST,
    brute_force,
    ending_model,
    log_probs,
    penalty,
    plain_beam,
    ragged,
    same_hypotheses,
    small_model,
)
from torch import nn

import transformer
from transformer import (
    DecoderLayer,
    EncoderLayer,
    FeedForward,
    MultiHeadAttention,
    Transformer,
    TransformerConfig,
    attention,
    beam_search,
    causal_mask,
    greedy_search,
    load_checkpoint,
    padding_mask,
    positional_encoding,
    save_checkpoint,
)

CONFIG = TransformerConfig(13, 13, d_model=16, n_heads=2, n_layers=2, d_ff=32, dropout=0.0)
BATCH, SRC_LEN, TGT_LEN, D_MODEL, HEADS, D_K = 3, 7, 5, 16, 2, 8


@pytest.fixture
def double():
    """New tensors and modules are float64 inside the test."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def close(one, other, tolerance=1e-9):
    torch.testing.assert_close(one, other, atol=tolerance, rtol=0, equal_nan=False)


# The configuration


def test_the_default_is_the_base_model():
    config = TransformerConfig(37000, 37000)
    assert (config.d_model, config.n_heads, config.n_layers, config.d_ff) == (512, 8, 6, 2048)
    assert config.dropout == 0.1 and config.tie_embeddings


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(src_vocab_size=0), ["src_vocab_size", "0", "at least 1"]),
        (dict(tgt_vocab_size=-3), ["tgt_vocab_size", "-3", "at least 1"]),
        (dict(d_model=0), ["d_model", "0"]),
        (dict(d_model=15, n_heads=3), ["d_model", "15", "even"]),
        (dict(d_model=10, n_heads=4), ["d_model", "10", "multiple of n_heads", "4"]),
        (dict(d_model=16.0), ["d_model", "16.0", "int"]),
        (dict(n_heads=0), ["n_heads", "0", "at least 1"]),
        (dict(n_layers=0), ["n_layers", "0", "at least 1"]),
        (dict(d_ff="32"), ["d_ff", "'32'", "int"]),
        (dict(dropout=1.0), ["dropout", "1.0", "less than 1"]),
        (dict(dropout=-0.1), ["dropout", "-0.1"]),
        (dict(dropout=math.nan), ["dropout", "nan"]),
        (dict(dropout="a lot"), ["dropout", "a lot", "float"]),
        (dict(pad_id=13), ["pad_id", "13", "0 to 12"]),
        (dict(bos_id=-1), ["bos_id", "-1", "0 to 12"]),
        (dict(eos_id=1), ["eos_id", "(0, 1, 1)", "different"]),
        (dict(tgt_vocab_size=14), ["tgt_vocab_size", "(13, 14)", "equal", "tie_embeddings"]),
        (dict(tie_embeddings="yes"), ["tie_embeddings", "yes", "bool"]),
    ],
)
def test_a_bad_configuration_names_field_value_and_rule(change, words):
    fields = dict(src_vocab_size=13, tgt_vocab_size=13, d_model=16, n_heads=2, n_layers=1, d_ff=8) | change
    with pytest.raises(ValueError) as caught:
        TransformerConfig(**fields)
    for word in words:
        assert word in str(caught.value)


# million parameters, Table 3; the vocabulary is shared, "about 37000 tokens" (5.1)
TABLE_3 = {
    "base": (dict(), 65),
    "N=2": (dict(n_layers=2), 36),
    "N=4": (dict(n_layers=4), 50),
    "N=8": (dict(n_layers=8), 80),
    "d_model 256": (dict(d_model=256), 28),
    "d_model 1024": (dict(d_model=1024), 168),
    "d_ff 1024": (dict(d_ff=1024), 53),
    "d_ff 4096": (dict(d_ff=4096), 90),
    "big": (dict(d_model=1024, n_heads=16, d_ff=4096), 213),
}


def n_parameters(vocab_size, **options):
    with torch.device("meta"):
        model = Transformer(TransformerConfig(vocab_size, vocab_size, **options))
    return sum(weight.numel() for weight in model.parameters()) / 1e6


def test_parameter_counts_of_table_3(capsys):
    def errors(vocab_size):
        return {
            row: n_parameters(vocab_size, **options) / paper - 1 for row, (options, paper) in TABLE_3.items()
        }

    at_37000 = errors(37000)
    # big is said to be of 213 million, and fits only smaller vocabularies; it is left out of the choice
    best = min(range(38000, 45000, 1000), key=lambda size: max(map(abs, list(errors(size).values())[:-1])))
    at_best = errors(best)
    with capsys.disabled():
        print(f"\nmillion parameters   paper   37,000 ids   {best:,} ids, which fit Table 3 best")
        for row, (options, paper) in TABLE_3.items():
            counts = [f"{n_parameters(size, **options):6.1f}" for size in (37000, best)]
            print(f"{row:20} {paper:5} {counts[0]} {at_37000[row]:+.1%}  {counts[1]} {at_best[row]:+.1%}")
    assert all(abs(error) < 0.07 for error in at_37000.values())
    assert 40000 <= best <= 42000
    assert all(abs(error) < 0.01 for row, error in at_best.items() if row != "big")


# Against torch's own


def random_mask(*shape):
    mask = torch.rand(shape) < 0.6
    mask[..., 0] = True  # torch gives NaN where a row has nothing to attend to
    return mask


def copy_attention(theirs: nn.MultiheadAttention, ours: MultiHeadAttention) -> None:
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat((ours.w_q.weight, ours.w_k.weight, ours.w_v.weight)))
        theirs.out_proj.weight.copy_(ours.w_o.weight)
        for bias in (theirs.in_proj_bias, theirs.out_proj.bias):
            if bias is not None:
                bias.zero_()


def copy_layer(theirs, ours) -> None:
    """Weights of our EncoderLayer or DecoderLayer into torch's; norms get random ones."""
    norms = [ours.norm_self, ours.norm_ffn]
    copy_attention(theirs.self_attn, ours.self_attn)
    if isinstance(ours, DecoderLayer):
        norms.insert(1, ours.norm_cross)
        copy_attention(theirs.multihead_attn, ours.cross_attn)
    pairs = [(theirs.linear1, ours.ffn.w_1), (theirs.linear2, ours.ffn.w_2)]
    for number, norm in enumerate(norms, start=1):
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
        pairs.append((getattr(theirs, f"norm{number}"), norm))
    for their, our in pairs:
        their.load_state_dict(our.state_dict())


def same_gradients(theirs: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]) -> None:
    for name in ours:
        assert ours[name].grad is not None and ours[name].grad.abs().sum() > 0, name
        close(ours[name].grad, theirs[name].grad)


@pytest.mark.parametrize(
    "mask_shape", [(1, 1, TGT_LEN, SRC_LEN), (BATCH, 1, 1, SRC_LEN), (BATCH, HEADS, TGT_LEN, SRC_LEN)]
)
def test_attention_is_torchs(double, mask_shape):
    q, *kv = (torch.randn(BATCH, HEADS, n, D_K, requires_grad=True) for n in (TGT_LEN, SRC_LEN, SRC_LEN))
    mask = random_mask(*mask_shape)
    output, weights = attention(q, *kv, mask)
    assert output.shape == (BATCH, HEADS, TGT_LEN, D_K) and weights.shape == (BATCH, HEADS, TGT_LEN, SRC_LEN)
    expected = F.scaled_dot_product_attention(q, *kv, attn_mask=mask)
    close(output, expected)
    close(weights.sum(-1), torch.ones(BATCH, HEADS, TGT_LEN))
    assert not weights.masked_select(~mask).any()
    direction = torch.randn_like(output)
    for one, other in zip(
        torch.autograd.grad((output * direction).sum(), [q, *kv]),
        torch.autograd.grad((expected * direction).sum(), [q, *kv]),
        strict=True,
    ):
        close(one, other)


def test_a_row_with_nothing_to_attend_to_is_finite(double):
    q, k, v = (torch.randn(1, 1, 3, D_K, requires_grad=True) for _ in range(3))
    output, weights = attention(q, k, v, torch.zeros(3, 3, dtype=torch.bool))
    close(weights, torch.full((1, 1, 3, 3), 1 / 3))
    output.sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in (q, k, v))


def test_multi_head_attention_is_torchs(double):
    ours = MultiHeadAttention(D_MODEL, HEADS)
    theirs = nn.MultiheadAttention(D_MODEL, HEADS, bias=False, batch_first=True)
    copy_attention(theirs, ours)
    x, memory = torch.randn(BATCH, TGT_LEN, D_MODEL), torch.randn(BATCH, SRC_LEN, D_MODEL)
    mask = random_mask(TGT_LEN, SRC_LEN)
    key, value = ours.keys_values(memory)
    assert key.shape == value.shape == (BATCH, HEADS, SRC_LEN, D_K)
    output = ours(x, (key, value), mask)
    expected, _ = theirs(x, memory, memory, attn_mask=~mask)
    assert output.shape == (BATCH, TGT_LEN, D_MODEL)
    close(output, expected)
    direction = torch.randn_like(output)
    (output * direction).sum().backward()
    (expected * direction).sum().backward()
    in_grads = theirs.in_proj_weight.grad.chunk(3)
    for weight, grad in zip((ours.w_q, ours.w_k, ours.w_v), in_grads, strict=True):
        close(weight.weight.grad, grad)
    close(ours.w_o.weight.grad, theirs.out_proj.weight.grad)


def torch_layer(kind):
    options = dict(dim_feedforward=32, dropout=0.0, batch_first=True, norm_first=False)
    return kind(D_MODEL, HEADS, **options)


def test_encoder_layer_is_torchs(double):
    ours, theirs = EncoderLayer(CONFIG), torch_layer(nn.TransformerEncoderLayer)
    copy_layer(theirs, ours)
    inputs = {name: torch.randn(BATCH, SRC_LEN, D_MODEL) for name in ("ours", "theirs")}
    inputs["theirs"] = inputs["ours"].clone()
    for x in inputs.values():
        x.requires_grad_()
    src_mask = padding_mask(ragged([7, 4, 1]), 0)
    output = ours(inputs["ours"], src_mask)
    expected = theirs(inputs["theirs"], src_key_padding_mask=~src_mask[:, 0, 0])
    close(output, expected)
    direction = torch.randn_like(output)
    (output * direction).sum().backward()
    (expected * direction).sum().backward()
    same_gradients(
        dict(x=inputs["theirs"], w_1=theirs.linear1.weight, norm=theirs.norm1.weight, last=theirs.norm2.bias,
             w_o=theirs.self_attn.out_proj.weight),
        dict(x=inputs["ours"], w_1=ours.ffn.w_1.weight, norm=ours.norm_self.weight, last=ours.norm_ffn.bias,
             w_o=ours.self_attn.w_o.weight),
    )  # fmt: skip


def test_decoder_layer_is_torchs(double):
    ours, theirs = DecoderLayer(CONFIG), torch_layer(nn.TransformerDecoderLayer)
    copy_layer(theirs, ours)
    x, memory = torch.randn(BATCH, TGT_LEN, D_MODEL), torch.randn(BATCH, SRC_LEN, D_MODEL)
    xs, memories = ([tensor.clone().requires_grad_() for _ in range(2)] for tensor in (x, memory))
    src_mask, mask = padding_mask(ragged([7, 4, 1]), 0), causal_mask(TGT_LEN, TGT_LEN)
    output = ours(
        xs[0], ours.self_attn.keys_values(xs[0]), mask, ours.cross_attn.keys_values(memories[0]), src_mask
    )
    expected = theirs(xs[1], memories[1], tgt_mask=~mask, memory_key_padding_mask=~src_mask[:, 0, 0])
    close(output, expected)
    direction = torch.randn_like(output)
    (output * direction).sum().backward()
    (expected * direction).sum().backward()
    same_gradients(
        dict(x=xs[1], memory=memories[1], w_2=theirs.linear2.weight, norm=theirs.norm2.weight,
             w_o=theirs.multihead_attn.out_proj.weight),
        dict(x=xs[0], memory=memories[0], w_2=ours.ffn.w_2.weight, norm=ours.norm_cross.weight,
             w_o=ours.cross_attn.w_o.weight),
    )  # fmt: skip


def test_the_whole_model_is_a_stack_of_torchs_layers(double):
    model = Transformer(CONFIG)
    encoder = nn.TransformerEncoder(torch_layer(nn.TransformerEncoderLayer), 2, enable_nested_tensor=False)
    decoder = nn.TransformerDecoder(torch_layer(nn.TransformerDecoderLayer), 2)
    for stack, ours in ((encoder, model.encoder), (decoder, model.decoder)):
        for their_layer, our_layer in zip(stack.layers, ours, strict=True):
            copy_layer(their_layer, our_layer)
    src, tgt = ragged([7, 4, 1]), ragged([5, 5, 5], seed=1)

    def embed(ids):
        positions = positional_encoding(torch.arange(ids.size(1)), D_MODEL).double()
        return F.embedding(ids, model.src_embedding.weight) * 4 + positions  # sqrt(d_model) = 4

    memory = encoder(embed(src), src_key_padding_mask=src == 0)
    later = torch.ones(5, 5).triu(1).bool()
    x = decoder(embed(tgt), memory, tgt_mask=later, memory_key_padding_mask=src == 0)
    close(model(src, tgt), x @ model.src_embedding.weight.T)


def test_feed_forward_is_equation_2(double):
    ffn, x = FeedForward(D_MODEL, 32), torch.randn(BATCH, TGT_LEN, D_MODEL)
    hidden = torch.clamp(x @ ffn.w_1.weight.T + ffn.w_1.bias, min=0)
    close(ffn(x), hidden @ ffn.w_2.weight.T + ffn.w_2.bias)


@pytest.mark.parametrize("d_model", [2, 16, 512])
def test_positions_are_the_papers_formula(d_model):
    positions = [0, 1, 2, 17, 63, 511]
    table = positional_encoding(torch.tensor(positions), d_model)
    assert table.shape == (len(positions), d_model) and table.dtype == torch.float32
    for row, pos in zip(table.tolist(), positions, strict=True):
        for i in range(d_model // 2):
            angle = pos / 10000 ** (2 * i / d_model)
            assert abs(row[2 * i] - math.sin(angle)) < 1e-4 and abs(row[2 * i + 1] - math.cos(angle)) < 1e-4


# Masks and what they hide


def test_masks_say_true_where_one_may_attend():
    assert torch.equal(causal_mask(4, 4), torch.ones(4, 4).tril().bool())
    assert causal_mask(2, 5).int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert causal_mask(1, 6).all() and causal_mask(1, 6).shape == (1, 6)
    assert padding_mask(torch.tensor([[5, 6, 0], [0, 0, 0]]), 0).tolist() == [
        [[[True, True, False]]],
        [[[False] * 3]],
    ]


def test_no_future_id_changes_an_output():
    model, src = small_model(), ragged([6, 3])
    tgt = torch.randint(3, 13, (2, 8))
    before = model(src, tgt)
    for position in range(8):
        changed = tgt.clone()
        changed[:, position:] = torch.randint(3, 13, (2, 8 - position))
        changed[:, position] = (tgt[:, position] - 2) % 10 + 3  # unlike before
        after = model(src, changed)
        close(after[:, :position], before[:, :position], 0)
        assert (after[:, position] - before[:, position]).abs().max() > 1e-3


def test_padding_of_either_side_changes_no_output():
    model, src, tgt = small_model(), ragged([6, 3, 1]), torch.randint(3, 13, (3, 4))
    before = model(src, tgt)
    close(model(F.pad(src, (0, 10)), tgt), before, 1e-5)
    close(model(src, F.pad(tgt, (0, 10)))[:, :4], before, 1e-5)
    for row, length in enumerate([6, 3, 1]):
        close(model(src[row : row + 1, :length], tgt[row : row + 1])[0], before[row], 1e-5)


@pytest.mark.parametrize("fill", [float("-inf"), torch.finfo(torch.float32).min, -1e4])
def test_what_the_padding_embeds_to_reaches_no_output(fill, monkeypatch):
    def filled(q, k, v, mask):
        weights = (q @ k.mT / math.sqrt(q.size(-1))).masked_fill(~mask, fill).softmax(-1)
        return weights @ v, weights

    monkeypatch.setattr(transformer, "attention", filled)
    model, src, tgt = small_model(tie_embeddings=False), ragged([6, 3]), torch.randint(3, 13, (2, 4))
    before = model(src, tgt)
    with torch.no_grad():
        model.src_embedding.weight[0] += 5
    close(model(src, tgt), before, 1e-5)


def test_a_source_of_padding_only_is_finite_and_harms_no_neighbour():
    model, src = small_model().train(), ragged([6, 0, 3])
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    tgt = torch.randint(3, 13, (3, 4))
    logits = model(src, tgt)
    F.cross_entropy(logits.flatten(0, 1), tgt.flatten()).backward()
    assert logits.isfinite().all() and all(weight.grad.isfinite().all() for weight in model.parameters())
    close(model(src[[0, 2]], tgt[[0, 2]]), logits[[0, 2]], 1e-6)
    tokens, scores = beam_search(model, src, max_len=6)
    assert scores.isfinite().all() and tokens.shape[:2] == (3, 4)


# Shapes, steps, devices, dtypes


def test_shapes_are_those_of_the_docstrings():
    model, src, tgt = small_model(), ragged([7, 4, 1]), torch.randint(3, 13, (3, 5))
    memory, src_mask = model.encode(src)
    assert memory.shape == (3, 7, 16) and src_mask.shape == (3, 1, 1, 7) and src_mask.dtype == torch.bool
    assert model.decode(tgt, memory, src_mask).shape == model(src, tgt).shape == (3, 5, 13)
    assert model.embed(model.src_embedding, src).shape == (3, 7, 16)
    assert model.encoder[0](memory, src_mask).shape == memory.shape
    assert model.encoder[0].self_attn.heads(memory).shape == (3, 2, 7, 8)
    state = model.start(src)
    assert len(state.past) == len(state.cross) == 2 and torch.equal(state.src_mask, src_mask)
    assert all(part.shape == (3, 2, 0, 8) for pair in state.past for part in pair)
    assert all(part.shape == (3, 2, 7, 8) for pair in state.cross for part in pair)
    logits, state = model.step(tgt, state)
    assert logits.shape == (3, 5, 13) and all(
        part.shape == (3, 2, 5, 8) for pair in state.past for part in pair
    )
    assert causal_mask(2, 5).shape == (2, 5)


@pytest.mark.parametrize("chunks", [[1] * 8, [8], [4, 1, 3], [1, 7], [3, 3, 2]])
def test_steps_in_any_chunks_equal_decode(chunks):
    model, src, tgt = small_model(), ragged([6, 3, 1]), torch.randint(3, 13, (3, 8))
    state, logits = model.start(src), []
    for chunk in tgt.split(chunks, dim=1):
        new, state = model.step(chunk, state)
        logits.append(new)
    close(torch.cat(logits, dim=1), model(src, tgt), 1e-5)


def test_a_step_leaves_the_state_that_it_was_given_as_it_was():
    model, src = small_model(), ragged([6, 3])
    state = model.start(src)
    first, _ = model.step(torch.tensor([[1], [1]]), state)
    again, _ = model.step(torch.tensor([[1], [1]]), state)
    close(first, again, 0)


def test_positions_have_no_end():
    model = small_model()
    assert model(torch.randint(3, 13, (1, 600)), torch.randint(3, 13, (1, 513))).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs_forward_and_backward(dtype):
    model, src, tgt = small_model().to(dtype), ragged([6, 0, 3]), torch.randint(3, 13, (3, 5))
    logits = model(src, tgt)
    assert logits.dtype == dtype
    F.cross_entropy(logits.float().flatten(0, 1), tgt.flatten()).backward()
    assert logits.isfinite().all() and all(weight.grad.isfinite().all() for weight in model.parameters())
    tokens, scores = beam_search(model, src, max_len=5)
    assert scores.dtype == torch.float32 and scores.isfinite().all() and tokens.dtype == torch.int64


def test_autocast_runs_forward_and_backward():
    model, src, tgt = small_model(), ragged([6, 0, 3]), torch.randint(3, 13, (3, 5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(src, tgt)
        greedy_search(model, src, max_len=5)
    assert logits.dtype == torch.bfloat16
    close(logits.float(), model(src, tgt), 0.1)
    F.cross_entropy(logits.float().flatten(0, 1), tgt.flatten()).backward()
    assert all(weight.grad.isfinite().all() for weight in model.parameters())


def test_everything_is_made_on_the_device_of_the_ids():
    with torch.device("meta"):
        model = Transformer(CONFIG)
        src, tgt = torch.zeros(2, 7, dtype=torch.int64), torch.zeros(2, 5, dtype=torch.int64)
    assert model(src, tgt).device.type == "meta"  # a tensor made on the CPU would not mix with these
    assert model.step(tgt, model.start(src))[0].device.type == "meta"


def test_dropout_stands_where_the_paper_puts_it():
    model = small_model(dropout=0.25).train()
    seen = []
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda module, args, output: seen.append((args[0].shape, module.p)))
    model(ragged([7]), torch.randint(3, 13, (1, 5)))
    # each sum of embedding and position, and each sub-layer: 2 in an encoder layer, 3 in a decoder layer
    assert seen == [((1, 7, 16), 0.25)] * (1 + 2 * 2) + [((1, 5, 16), 0.25)] * (1 + 2 * 3)


@pytest.mark.parametrize("strict", [True, False])
def test_torch_export_takes_it_as_it_is(strict):
    model, batch, lengths = (
        small_model(),
        torch.export.Dim("batch"),
        [torch.export.Dim(n) for n in ("src_len", "tgt_len")],
    )
    shapes = {"src": {0: batch, 1: lengths[0]}, "tgt": {0: batch, 1: lengths[1]}}
    example = (torch.randint(3, 13, (3, 7)), torch.randint(3, 13, (3, 5)))
    program = torch.export.export(model, example, dynamic_shapes=shapes, strict=strict)
    src, tgt = ragged([2, 9]), torch.randint(3, 13, (2, 4))
    close(program.module()(src, tgt), model(src, tgt), 1e-5)


# Weights


def test_tied_weights_are_one_tensor_and_stay_one(tmp_path):
    def weights(model):
        return {
            id(weight)
            for weight in (model.src_embedding.weight, model.tgt_embedding.weight, model.projection.weight)
        }

    model = small_model()
    save_checkpoint(tmp_path / "model.pt", model)
    for other in (
        model,
        copy.deepcopy(model),
        model.to(torch.float64),
        load_checkpoint(tmp_path / "model.pt"),
    ):
        assert len(weights(other)) == 1
    assert len(weights(small_model(tie_embeddings=False))) == 3
    Transformer(TransformerConfig(13, 14, d_model=16, n_heads=2, n_layers=1, d_ff=8, tie_embeddings=False))


def test_every_weight_learns():
    model = small_model()
    model(ragged([6, 3]), torch.randint(3, 13, (2, 5))).square().sum().backward()
    assert all(weight.grad.abs().sum() > 0 for weight in model.parameters())
    assert not any(name.endswith("bias") for name, _ in model.named_parameters() if "attn" in name)


# Search


def row_of(result, row, eos_id):
    """One row's answer without the padding that its batch mates caused."""
    tokens, scores = result
    hypotheses = [(ids.tolist(), score.item()) for ids, score in zip(tokens[row], scores[row], strict=True)]
    return [(ids[: ids.index(eos_id) + 1] if eos_id in ids else ids, score) for ids, score in hypotheses]


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_beam_as_wide_as_the_tree_is_brute_force(seed, alpha):
    model = small_model(seed, vocab_size=4, spread=1.5, d_model=8, d_ff=16)
    src, max_len = ragged([3], vocab_size=4), 3
    everything = brute_force(model, src, max_len, alpha)
    assert len(everything) == 1 + 3 + 9 * 4
    beam_size = 45  # wider than the tree: no row stops, and places stay empty
    tokens, scores = beam_search(model, src, max_len, beam_size, alpha)
    same_hypotheses(tokens[0], scores[0], everything)
    assert (scores[0, len(everything) :] == LOWEST).all()


@pytest.mark.parametrize("beam_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("spread", [1.0, 1.6])
def test_beams_are_those_of_the_plain_second_implementation(beam_size, spread):
    lengths = [6, 3, 1, 5]
    src, ended = ragged(lengths), 0
    for seed in range(4):
        model = ending_model(seed, spread)
        for max_len, alpha in ((1, 0.6), (2, 0.0), (9, 0.6), (9, 1.0)):
            tokens, scores = beam_search(model, src, max_len, beam_size, alpha)
            for row, length in enumerate(lengths):
                expected = plain_beam(model, src[row : row + 1, :length], max_len, beam_size, alpha)
                same_hypotheses(tokens[row], scores[row], expected)
            ended += int((tokens == model.config.eos_id).any(-1).sum())
            assert (tokens != 0).any(dim=(0, 1))[-1]  # no longer than the longest needs
    assert ended > 10  # else the test would say nothing of endings


def test_ties_go_to_the_lower_index():
    model = small_model(vocab_size=9)
    nn.init.zeros_(model.projection.weight)  # every id is equally likely, at every step
    assert greedy_search(model, ragged([4], 9), 3).tolist() == [[0, 0, 0]]
    for beam_size in (1, 2, 4, 7):
        tokens, scores = beam_search(model, ragged([4, 2], 9), 3, beam_size)
        for row in range(2):
            same_hypotheses(tokens[row], scores[row], plain_beam(model, ragged([4], 9), 3, beam_size, 0.6))


def test_top_takes_the_lower_index_of_equals():
    torch.manual_seed(0)
    for n_values in (1, 2, 5, 1000):
        scores = torch.randint(n_values, (4, 50)).float()
        values, index = transformer.top(scores, 7)
        for row in range(4):
            expected = sorted(range(50), key=lambda i: (-scores[row, i].item(), i))[:7]
            assert index[row].tolist() == expected and values[row].tolist() == scores[row, expected].tolist()


@pytest.mark.parametrize("spread", [1.0, 1.6])
def test_beam_1_is_greedy_and_greedy_is_the_slow_way(spread):
    src = ragged([6, 3, 1, 5])
    for seed in range(6):
        model = ending_model(seed, spread)
        for max_len in (1, 2, 12):
            tokens = greedy_search(model, src, max_len)
            assert torch.equal(beam_search(model, src, max_len, beam_size=1)[0][:, 0], tokens)
            for row in range(4):
                ids = []
                while len(ids) < max_len and (not ids or ids[-1] != model.config.eos_id):
                    values = log_probs(model, src[row : row + 1], ids)
                    ids.append(values.index(max(values)))
                assert tokens[row].tolist() == ids + [0] * (tokens.size(1) - len(ids))
            assert tokens.size(1) <= max_len


def test_a_rows_answer_is_the_same_alone_and_in_any_batch():
    lengths, model = [6, 3, 1, 5, 9, 2], ending_model(3)
    eos_id = model.config.eos_id
    src = ragged(lengths)
    together = beam_search(model, src, 10)
    for row, length in enumerate(lengths):
        alone = row_of(beam_search(model, src[row : row + 1, :length], 10), 0, eos_id)
        for (ids, score), (expected, value) in zip(row_of(together, row, eos_id), alone, strict=True):
            assert ids[: len(expected)] == expected and abs(score - value) < 1e-4
        assert row_of(beam_search(model, src[[row, 0, 4]], 10), 0, eos_id)[0][0] == alone[0][0]


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_scores_are_the_teacher_forced_log_probability_over_the_penalty(alpha):
    model, src = ending_model(3), ragged([6, 3, 1, 5])
    tokens, scores = beam_search(model, src, 8, 4, alpha)
    for row in range(4):
        for ids, score in row_of((tokens, scores), row, model.config.eos_id):
            logits = model(src[row : row + 1], torch.tensor([[1, *ids[:-1]]]))
            total = logits.log_softmax(-1)[0, range(len(ids)), ids].sum().item()
            assert abs(score - total / penalty(len(ids), alpha)) < 1e-4


def test_search_ignores_the_models_mode_and_restores_it():
    model, src = small_model(dropout=0.5), ragged([6, 3])
    expected = greedy_search(model, src, 8), beam_search(model, src, 8)[0]
    model.train()
    assert torch.equal(greedy_search(model, src, 8), expected[0])
    assert torch.equal(beam_search(model, src, 8)[0], expected[1])
    assert model.training and model.encoder[0].dropout.training
    assert not beam_search(model, src, 8)[1].requires_grad
    with pytest.raises(ValueError, match="alpha"):
        beam_search(model, src, 8, alpha=-1.0)
    assert model.training


@pytest.mark.parametrize("search", [greedy_search, beam_search])
@pytest.mark.parametrize(
    "src, max_len, words",
    [
        (torch.tensor([[3, 13]]), 5, ["src", "13", "0 to 12"]),
        (torch.tensor([[3, -1]]), 5, ["src", "-1", "0 to 12"]),
        (torch.tensor([[3.0, 4.0]]), 5, ["src.dtype", "float32", "int64"]),
        (torch.tensor([[True]]), 5, ["src.dtype", "bool"]),
        (torch.tensor([3, 4]), 5, ["src.shape", "(2,)"]),
        (torch.zeros(1, 0, dtype=torch.int64), 5, ["src.shape", "(1, 0)"]),
        (torch.zeros(0, 3, dtype=torch.int64), 5, ["src.shape", "(0, 3)"]),
        (torch.tensor([[3, 4]]), 0, ["max_len", "0", "at least 1"]),
        (torch.tensor([[3, 4]]), 2.5, ["max_len", "2.5", "whole"]),
    ],
)
def test_a_search_refuses_what_it_cannot_read(search, src, max_len, words):
    with pytest.raises(ValueError) as caught:
        search(small_model(), src, max_len)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "option", [dict(beam_size=0), dict(beam_size=1.5), dict(alpha=math.nan), dict(alpha=math.inf)]
)
def test_beam_search_refuses_options_out_of_range(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        beam_search(small_model(), ragged([3]), 5, **option)


def test_int32_ids_are_ids():
    model, src = small_model(), ragged([6, 3])
    assert torch.equal(greedy_search(model, src.int(), 6), greedy_search(model, src, 6))
    assert torch.equal(beam_search(model, src.int(), 6)[0], beam_search(model, src, 6)[0])


# Checkpoints


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_holds_the_model_and_the_extra_fields(tmp_path, dtype):
    model, path = small_model(bos_id=7, eos_id=8).to(dtype), tmp_path / "model.pt"
    save_checkpoint(path, model, steps=3, task="copy")
    loaded = load_checkpoint(str(path))
    src, tgt = ragged([6, 3]), torch.randint(3, 13, (2, 5))
    assert loaded.config == model.config and not loaded.training
    close(loaded(src, tgt), model(src, tgt), 0)
    saved = torch.load(path, weights_only=True)
    assert saved["steps"] == 3 and saved["task"] == "copy" and isinstance(saved["config"], dict)
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt"]


def test_a_compiled_model_is_saved_under_plain_names(tmp_path):
    model = small_model()
    save_checkpoint(tmp_path / "model.pt", torch.compile(model))
    close(load_checkpoint(tmp_path / "model.pt").projection.weight, model.projection.weight, 0)


def test_a_failed_save_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "model.pt"
    save_checkpoint(path, small_model())
    before = path.read_bytes()
    with pytest.raises((AttributeError, pickle.PicklingError)):
        save_checkpoint(path, small_model(1), extra=lambda: None)
    assert path.read_bytes() == before and [file.name for file in tmp_path.iterdir()] == ["model.pt"]


class RunsCode:
    def __reduce__(self):
        return print, ("this code must not run",)


def test_what_is_no_checkpoint_is_refused(tmp_path, capsys):
    model, path = small_model(), tmp_path / "model.pt"
    with pytest.raises(FileNotFoundError, match=r"nowhere\.pt"):
        load_checkpoint(tmp_path / "nowhere.pt")
    save_checkpoint(path, model)
    whole = path.read_bytes()
    saved = torch.load(path, weights_only=True)
    unknown = saved | {"config": saved["config"] | {"n_experts": 8}}
    odd = saved | {"config": saved["config"] | {"d_model": 15}}
    incomplete = saved | {"weights": {k: v for k, v in saved["weights"].items() if "norm" not in k}}
    cases = {
        "truncated": (whole[: len(whole) // 2], ""),
        "empty": (b"", ""),
        "text": (b"not a checkpoint at all\n" * 40, ""),
        "code": (RunsCode(), "Weights only"),
        "a list": ([1, 2], ""),
        "no config": ({"weights": saved["weights"]}, "config"),
        "unknown field": (unknown, "n_experts"),
        "odd": (odd, "d_model is 15"),
        "incomplete": (incomplete, "norm_self"),
    }
    for name, (content, word) in cases.items():
        path = tmp_path / f"{name}.pt"
        path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
        with pytest.raises(ValueError) as caught:
            load_checkpoint(path)
        message = str(caught.value)
        assert path.name in message and word in message and "\n" not in message, message
    with pytest.raises(ValueError, match="no checkpoint"):
        load_checkpoint(tmp_path)
    assert "must not run" not in capsys.readouterr().out
