"""The encoder-decoder Transformer of "Attention Is All You Need" (Vaswani et al., 2017, arXiv:1706.03762).

Read it downwards beside the paper; numbers such as 3.2.1 are its sections. torch gives tensors, gradients,
Linear, Embedding, LayerNorm and Dropout; all else stands written out.

    model = Transformer(TransformerConfig(src_vocab_size=37000, tgt_vocab_size=37000))
    logits = model(src, tgt)                                # to train: tgt begins with bos
    tokens, scores = beam_search(model, src, max_len=50)    # to translate

Shapes: B batch, S source length, T target length, Q query and K key length, N new ids of a step, P past ids,
H heads, V target vocabulary; d_k = d_model / H. Ids are int64, batch first. Masks are bool: True may attend.
"""

import math
import os
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, fields
from functools import wraps
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

KeyValue = tuple[Tensor, Tensor]  # projected and split into heads: 2 x (B, H, length, d_k)


def require(condition: bool, name: str, value: object, rule: str) -> None:
    """Raise ValueError with the name, the value and the rule unless the condition holds."""
    if not condition:
        raise ValueError(f"{name} is {value!r}, but must be {rule}")


@dataclass(frozen=True)
class TransformerConfig:
    """All that defines a model; the defaults are the base model of Table 3. ValueError if out of range."""

    src_vocab_size: int
    tgt_vocab_size: int
    d_model: int = 512
    n_heads: int = 8
    n_layers: int = 6  # N: so many in the encoder, and as many in the decoder
    d_ff: int = 2048
    dropout: float = 0.1  # P_drop
    pad_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    tie_embeddings: bool = True  # 3.4: both embeddings and the projection share one matrix

    def __post_init__(self) -> None:
        for field, value in zip(fields(self), astuple(self), strict=True):
            require(isinstance(value, (field.type, int)), field.name, value, f"of type {field.type.__name__}")
            is_size = field.name.startswith(("src_", "tgt_", "d_", "n_"))
            require(value >= 1 or not is_size, field.name, value, "at least 1")
        rule = f"even, for pairs of sine and cosine, and a multiple of n_heads, {self.n_heads}"
        require(self.d_model % math.lcm(2, self.n_heads) == 0, "d_model", self.d_model, rule)
        require(0 <= self.dropout < 1, "dropout", self.dropout, "at least 0 and less than 1")
        sizes, ids = (self.src_vocab_size, self.tgt_vocab_size), (self.pad_id, self.bos_id, self.eos_id)
        usable = len(set(ids)) == 3 and min(ids) >= 0 and max(ids) < min(sizes)
        require(usable, "(pad_id, bos_id, eos_id)", ids, f"3 different ids in 0 to {min(sizes) - 1}")
        tieable = sizes[0] == sizes[1] or not self.tie_embeddings
        require(tieable, "(src_vocab_size, tgt_vocab_size)", sizes, "equal where tie_embeddings is True")


class State(NamedTuple):
    """What decoding of one batch of sources needs between steps; a list has one (key, value) a layer."""

    src_mask: Tensor  # (B, 1, 1, S)
    cross: list[KeyValue]  # of memory, (B, H, S, d_k)
    past: list[KeyValue]  # of the target so far, (B, H, P, d_k)


class Transformer(nn.Module):
    """Figure 1. forward trains; encode and decode are its halves; start and step decode N ids at a time."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.src_embedding = nn.Embedding(config.src_vocab_size, config.d_model)
        self.tgt_embedding = nn.Embedding(config.tgt_vocab_size, config.d_model)
        self.encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.n_layers))
        self.decoder = nn.ModuleList(DecoderLayer(config) for _ in range(config.n_layers))
        self.projection = nn.Linear(config.d_model, config.tgt_vocab_size, bias=False)
        self.dropout = nn.Dropout(config.dropout)
        if config.tie_embeddings:
            self.tgt_embedding.weight = self.projection.weight = self.src_embedding.weight
        for matrix in (weight for weight in self.parameters() if weight.dim() == 2):
            nn.init.xavier_uniform_(
                matrix
            )  # the paper is silent on initial weights: these are tensor2tensor's
        for embedding in (self.src_embedding, self.tgt_embedding):  # unit variance once scaled in embed
            nn.init.normal_(embedding.weight, std=config.d_model**-0.5)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        """(B, S), (B, T) -> logits (B, T, V). tgt begins with bos (3.1); i predicts tgt[:, i + 1]."""
        return self.decode(tgt, *self.encode(src))

    def encode(self, src: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S) -> memory (B, S, d_model), src_mask (B, 1, 1, S). 3.1, the left of Figure 1."""
        x, src_mask = self.embed(self.src_embedding, src), padding_mask(src, self.config.pad_id)
        for layer in self.encoder:
            x = layer(x, src_mask)
        return x, src_mask

    def decode(self, tgt: Tensor, memory: Tensor, src_mask: Tensor) -> Tensor:
        """(B, T), (B, S, d_model), (B, 1, 1, S) -> logits (B, T, V). 3.1, the right of Figure 1."""
        mask = causal_mask(tgt.size(1), tgt.size(1), tgt.device)  # hides padding too: it stands on the right
        x = self.embed(self.tgt_embedding, tgt)
        for layer in self.decoder:
            x = layer(x, layer.self_attn.keys_values(x), mask, layer.cross_attn.keys_values(memory), src_mask)
        return self.projection(x)

    def start(self, src: Tensor) -> State:
        """(B, S) -> the state before the first step: memory projected once for all, an empty past."""
        memory, src_mask = self.encode(src)
        cross = [layer.cross_attn.keys_values(memory) for layer in self.decoder]
        return State(src_mask, cross, past=[(key[:, :, :0], value[:, :, :0]) for key, value in cross])

    def step(self, tgt: Tensor, state: State) -> tuple[Tensor, State]:
        """The next ids (B, N) -> logits (B, N, V), the state after them. Equals decode, in any chunks."""
        past_len = state.past[0][0].size(2)
        mask = causal_mask(tgt.size(1), past_len + tgt.size(1), tgt.device)
        x, present = self.embed(self.tgt_embedding, tgt, past_len), []
        for layer, (past_key, past_value), cross in zip(self.decoder, state.past, state.cross, strict=True):
            key, value = layer.self_attn.keys_values(x)
            present.append((torch.cat((past_key, key), dim=2), torch.cat((past_value, value), dim=2)))
            x = layer(x, present[-1], mask, cross, state.src_mask)
        return self.projection(x), state._replace(past=present)

    def embed(self, embedding: nn.Embedding, ids: Tensor, past_len: int = 0) -> Tensor:
        """(B, T) -> (B, T, d_model): scaled embedding plus position, 3.4 and 3.5; dropout on the sum, 5.4."""
        x = embedding(ids) * math.sqrt(self.config.d_model)
        positions = torch.arange(past_len, past_len + ids.size(1), device=ids.device)
        return self.dropout(x + positional_encoding(positions, self.config.d_model).to(x.dtype))


class EncoderLayer(nn.Module):
    """3.1: two sub-layers, each LayerNorm(x + Dropout(Sublayer(x))); the norm comes last (post-norm)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.self_attn = MultiHeadAttention(config.d_model, config.n_heads)
        self.ffn = FeedForward(config.d_model, config.d_ff)
        self.norm_self, self.norm_ffn = nn.LayerNorm(config.d_model), nn.LayerNorm(config.d_model)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """(B, S, d_model), mask to (B, H, S, S) -> (B, S, d_model)."""
        x = self.norm_self(x + self.dropout(self.self_attn(x, self.self_attn.keys_values(x), mask)))
        return self.norm_ffn(x + self.dropout(self.ffn(x)))


class DecoderLayer(nn.Module):
    """3.1: three sub-layers. It is given keys and values and never learns whether they are fresh or kept."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.self_attn = MultiHeadAttention(config.d_model, config.n_heads)
        self.cross_attn = MultiHeadAttention(config.d_model, config.n_heads)
        self.ffn = FeedForward(config.d_model, config.d_ff)
        self.norm_self, self.norm_cross, self.norm_ffn = (nn.LayerNorm(config.d_model) for _ in range(3))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, kv: KeyValue, mask: Tensor, src_kv: KeyValue, src_mask: Tensor) -> Tensor:
        """(B, Q, d_model), kv of the target, length K, and src_kv of memory, length S -> (B, Q, d_model)."""
        x = self.norm_self(x + self.dropout(self.self_attn(x, kv, mask)))
        x = self.norm_cross(x + self.dropout(self.cross_attn(x, src_kv, src_mask)))
        return self.norm_ffn(x + self.dropout(self.ffn(x)))


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Equation 1, 3.2.1: (B, H, Q, d_k), 2 x (B, H, K, d_k) -> (B, H, Q, d_k), weights (B, H, Q, K)."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    # The paper fills with minus infinity; the lowest number hides as well, and no row of only padding is NaN.
    weights = torch.where(mask, scores, torch.finfo(scores.dtype).min).softmax(dim=-1)
    return weights @ v, weights


class MultiHeadAttention(nn.Module):
    """3.2.2: the heads attend side by side. w_q, w_k and w_v each hold the matrices of all heads."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.w_q, self.w_k, self.w_v, self.w_o = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))

    def heads(self, x: Tensor) -> Tensor:
        """(B, T, d_model) -> (B, H, T, d_k)."""
        return x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)

    def keys_values(self, x: Tensor) -> KeyValue:
        """(B, K, d_model) -> key, value (B, H, K, d_k): what forward attends to."""
        return self.heads(self.w_k(x)), self.heads(self.w_v(x))

    def forward(self, x: Tensor, kv: KeyValue, mask: Tensor) -> Tensor:
        """(B, Q, d_model), 2 x (B, H, K, d_k), mask to (B, H, Q, K) -> (B, Q, d_model)."""
        output, _ = attention(self.heads(self.w_q(x)), *kv, mask)
        return self.w_o(output.transpose(1, 2).flatten(2))  # Concat(head_1, ..., head_h) W^O


def padding_mask(ids: Tensor, pad_id: int) -> Tensor:
    """(B, K) -> (B, 1, 1, K): hides padding as a key; what it computes as a query, nobody reads. 3.2.3"""
    return (ids != pad_id)[:, None, None, :]


def causal_mask(q_len: int, k_len: int, device: torch.device | str | None = None) -> Tensor:
    """-> (Q, K): the queries are the last q_len of k_len positions; none attends to a later one. 3.2.3"""
    return torch.arange(k_len, device=device) <= torch.arange(k_len - q_len, k_len, device=device)[:, None]


class FeedForward(nn.Module):
    """3.3, equation 2: FFN(x) = max(0, x W_1 + b_1) W_2 + b_2."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.w_1, self.w_2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d_model) -> (B, T, d_model)."""
        return self.w_2(self.w_1(x).relu())


def positional_encoding(positions: Tensor, d_model: int) -> Tensor:
    """(T,) -> (T, d_model) float32: sin(pos / 10000^(2i / d_model)) at 2i, the cosine at 2i + 1. 3.5"""
    rates = torch.tensor([10000 ** (-i / d_model) for i in range(0, d_model, 2)], dtype=torch.float32)
    angles = positions[..., None].float() * rates.to(positions.device)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)


def inference(search: Callable) -> Callable:
    """Decorate a search: check its input, turn dropout and gradients off, then restore the model's mode."""

    @torch.no_grad()
    @wraps(search)
    def checked(model: Transformer, src: Tensor, max_len: int, *args: object, **kwargs: object) -> object:
        require(src.dtype in (torch.int64, torch.int32), "src.dtype", src.dtype, "int64 or int32, for ids")
        require(src.dim() == 2 and src.numel() > 0, "src.shape", (*src.shape,), "(B, S), with no size 0")
        ids, n_ids = (int(src.min()), int(src.max())), model.config.src_vocab_size
        require(
            ids[0] >= 0 and ids[1] < n_ids, "(min, max) of src", ids, f"in the vocabulary, 0 to {n_ids - 1}"
        )
        require(isinstance(max_len, int) and max_len >= 1, "max_len", max_len, "a whole number, at least 1")
        was_training = model.training
        try:
            return search(model.eval(), src, max_len, *args, **kwargs)
        finally:
            model.train(was_training)

    return checked


@inference
def greedy_search(model: Transformer, src: Tensor, max_len: int) -> Tensor:
    """(B, S) -> tokens (B, <= max_len): always the likeliest next id, until every row has ended.

    Tokens leave bos out, hold eos, then pad, and are as long as the longest row needs; max_len counts eos.
    """
    pad_id, bos_id, eos_id = model.config.pad_id, model.config.bos_id, model.config.eos_id
    state, tokens = model.start(src), src.new_full((len(src), 1), bos_id)
    while tokens.size(1) <= max_len and not (ended := (tokens == eos_id).any(1)).all():
        logits, state = model.step(tokens[:, -1:], state)
        token = logits[:, -1].argmax(-1).masked_fill(ended, pad_id)
        tokens = torch.cat((tokens, token[:, None]), dim=1)
    return tokens[:, 1:]


@inference
def beam_search(
    model: Transformer, src: Tensor, max_len: int, beam_size: int = 4, alpha: float = 0.6
) -> tuple[Tensor, Tensor]:
    """(B, S) -> tokens (B, beam, <= max_len) as in greedy_search, scores (B, beam), the best first. 6.1

    What ends with eos scores log-probability / ((5 + length) / 6)^alpha; with beam_size of them a row stops.
    If max_len comes first, those still alive follow; a place that stays empty holds pad and the lowest float.
    """
    require(isinstance(beam_size, int) and beam_size >= 1, "beam_size", beam_size, "an integer, at least 1")
    require(0 <= alpha < math.inf, "alpha", alpha, "finite, at least 0")
    pad_id, bos_id, eos_id = model.config.pad_id, model.config.bos_id, model.config.eos_id
    row, lowest = torch.arange(len(src), device=src.device)[:, None], torch.finfo(torch.float32).min
    alive = src.new_full((len(src), beam_size, 1), bos_id)  # ids (B, beam, 1 + length)
    sums = pad(0.0 * row, (0, beam_size - 1), value=lowest)  # their log-probabilities (B, beam): at first one
    finished, done = alive, torch.full_like(sums, lowest)  # those that ended: ids and scores, shaped alike
    state = model.start(src.repeat_interleave(beam_size, dim=0))
    for length in range(1, max_len + 1):
        logits, state = model.step(alive[:, :, -1].reshape(-1, 1), state)
        log_probs = logits[:, -1].float().log_softmax(-1).unflatten(0, (-1, beam_size))  # (B, beam, V)
        best, index = top((sums[:, :, None] + log_probs).flatten(1), 2 * beam_size)  # (B, 2 beam)
        parent, token = index // log_probs.size(2), index % log_probs.size(2)
        grown = torch.cat((alive[row, parent], token[:, :, None]), dim=2)
        ends, penalty = token == eos_id, ((5 + length) / 6) ** alpha
        joins = ends & (best > lowest) & (done == lowest).any(1, keepdim=True)  # a full row has stopped
        joining = torch.where(joins, best / penalty, lowest)[:, :beam_size]
        done, keep = top(torch.cat((done, joining), dim=1), beam_size)
        finished = torch.cat((pad(finished, (0, 1), value=pad_id), grown[:, :beam_size]), dim=1)[row, keep]
        sums, keep = top(best.masked_fill(ends, -math.inf), beam_size)
        alive, parent = grown[row, keep], parent.gather(1, keep)
        if (done > lowest).all():
            break
        source = (row * beam_size + parent).flatten()
        state = state._replace(past=[(key[source], value[source]) for key, value in state.past])
    scores = torch.cat((done, torch.where(sums > lowest, sums / penalty, lowest)), dim=1)
    place = (scores == lowest).sort(dim=1, stable=True).indices[:, :beam_size]  # moves the empty to the end
    scores, tokens = scores.gather(1, place), torch.cat((finished, alive), dim=1)[row, place]
    return tokens[:, :, 1:].masked_fill(scores[:, :, None] == lowest, pad_id), scores


def top(scores: Tensor, n_best: int) -> tuple[Tensor, Tensor]:
    """(B, n) -> the best scores and their indices, 2 x (B, n_best), best first, ties to the lower index."""
    values, index = scores.topk(n_best, dim=1)
    if (scores >= values[:, -1:]).sum() > values.numel():  # a tie at the edge, where topk takes any
        index = scores.sort(dim=1, descending=True, stable=True).indices[:, :n_best]
    index = index.sort(dim=1).values
    values, order = scores.gather(1, index).sort(dim=1, descending=True, stable=True)
    return values, index.gather(1, order)


def save_checkpoint(path: str | os.PathLike, model: Transformer, **extra: object) -> None:
    """Write configuration, weights and extra plain values beside path, then move the whole into place."""
    model = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped
    part = Path(f"{path}.{os.getpid()}.part")
    try:
        torch.save(dict(config=asdict(model.config), weights=model.state_dict(), **extra), part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def load_checkpoint(path: str | os.PathLike) -> Transformer:
    """The model, in eval mode, on the CPU, in its dtype. ValueError if path is no checkpoint of one."""
    if not Path(path).exists():
        raise FileNotFoundError(f"no checkpoint at {path}: python train_copy.py writes one")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)  # whatever it holds, no code is run
        model = Transformer(TransformerConfig(**saved["config"]))
        model.to(saved["weights"]["projection.weight"].dtype).load_state_dict(saved["weights"])
    except Exception as error:  # torch.load raises many kinds
        reason = " ".join(f"{type(error).__name__}: {error}".split()).split(". ")[0][:200]
        raise ValueError(f"{path} is no checkpoint of this model: {reason}") from error
    return model.eval()
