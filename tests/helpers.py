"""What several tests use: small models, ragged batches, and slow, plain searches to compare with."""

import itertools
import math

import onnx
import torch

from transformer import Transformer, TransformerConfig, beam_search

LOWEST = torch.finfo(torch.float32).min


def small_model(seed: int = 0, vocab_size: int = 13, spread: float = 1.0, **options) -> Transformer:
    """A random model in eval mode; spread > 1 makes its predictions peaked, so that searches end."""
    torch.manual_seed(seed)
    options = dict(d_model=16, n_heads=2, n_layers=2, d_ff=32) | options
    model = Transformer(TransformerConfig(vocab_size, vocab_size, **options)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(spread)
    return model


def ending_model(seed: int, spread: float = 1.0, **options) -> Transformer:
    """A small model whose eos is an id that it likes to say: half of its hypotheses end, early or late."""
    free = beam_search(small_model(seed, spread=spread, **options), ragged([6, 3, 1, 5], seed=seed), 6)[0]
    liked = free[(free != 0) & (free != 1)].mode().values.item()
    return small_model(seed, spread=spread, eos_id=liked, **options)


def names_of(path) -> tuple[list[str], list[str]]:
    """-> the names of an ONNX file's inputs and of its outputs, in their order."""
    graph = onnx.load(path, load_external_data=False).graph
    return [value.name for value in graph.input], [value.name for value in graph.output]


def body_of(graph):
    """The body of the one Loop of an ONNX graph."""
    (body,) = [node.attribute[0].g for node in graph.node if node.op_type == "Loop"]
    return body


def nodes_of(graph):
    """All nodes of an ONNX graph, those inside Loop bodies too."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from nodes_of(attribute.g)


def ragged(lengths: list[int], vocab_size: int = 13, seed: int = 0) -> torch.Tensor:
    """Random sources of these lengths, eos last, padded on the right: (B, longest)."""
    torch.manual_seed(seed)
    src = torch.randint(3, vocab_size, (len(lengths), max(lengths)))
    for row, length in enumerate(lengths):
        src[row, length:] = 0
        if length:
            src[row, length - 1] = 2
    return src


def log_probs(model: Transformer, src: torch.Tensor, prefix: list[int]) -> list[float]:
    """Of every next id after the prefix, for one source (1, S): the whole prefix is decoded again."""
    with torch.no_grad():
        logits = model(src, torch.tensor([[model.config.bos_id, *prefix]]))
    return logits[0, -1].float().log_softmax(-1).tolist()


def penalty(length: int, alpha: float) -> float:
    return ((5 + length) / 6) ** alpha


def plain_beam(model, src, max_len, beam_size, alpha) -> list[tuple[list[int], float]]:
    """The definition of beam search, word for word, for one source (1, S): [(ids, score)], the best first."""
    eos = model.config.eos_id
    alive: list[tuple[list[int], float] | None] = [([], 0.0)] + [None] * (beam_size - 1)
    finished: list[tuple[list[int], float]] = []
    for length in range(1, max_len + 1):
        candidates = []  # (log-probability, index, ids); None marks what grows from an empty place
        for place, hypothesis in enumerate(alive):
            if hypothesis is not None:
                ids, total = hypothesis
                for token, value in enumerate(log_probs(model, src, ids)):
                    candidates.append((total + value, (place, token), [*ids, token]))
        candidates.sort(key=lambda candidate: (-candidate[0], candidate[1]))
        candidates = candidates[: 2 * beam_size]
        for total, _, ids in candidates[:beam_size]:
            if ids[-1] == eos:
                finished.append((ids, total / penalty(length, alpha)))
        finished.sort(key=lambda hypothesis: -hypothesis[1])
        finished = finished[:beam_size]
        going_on = [(ids, total) for total, _, ids in candidates if ids[-1] != eos][:beam_size]
        alive = going_on + [None] * (beam_size - len(going_on))
        if len(finished) == beam_size:
            break
    rest = [(ids, total / penalty(max_len, alpha)) for ids, total in filter(None, alive)]
    return (finished + rest)[:beam_size]


def brute_force(model, src, max_len, alpha) -> list[tuple[list[int], float]]:
    """All that end within max_len ids, the best first, then all that have not ended by then, likewise."""
    eos, n_ids = model.config.eos_id, model.config.tgt_vocab_size
    others = [token for token in range(n_ids) if token != eos]
    ended, unended = [], []
    for length in range(1, max_len + 1):
        for body in itertools.product(others, repeat=length - 1):
            for last in range(n_ids) if length == max_len else [eos]:
                ids = [*body, last]
                total = sum(log_probs(model, src, ids[:i])[ids[i]] for i in range(length))
                (ended if last == eos else unended).append((ids, total / penalty(length, alpha)))
    return [*sorted(ended, key=lambda h: -h[1]), *sorted(unended, key=lambda h: -h[1])]


def same_hypotheses(tokens, scores, expected, pad_id=0, tolerance=1e-4) -> None:
    """Assert that one row, (beam, T) and (beam,), holds the expected [(ids, score)], then empty places."""
    for place, (row, score) in enumerate(zip(tokens.tolist(), scores.tolist(), strict=True)):
        ids, value = expected[place] if place < len(expected) else ([], LOWEST)
        assert row == ids + [pad_id] * (len(row) - len(ids)), (place, row, ids)
        assert score == value or math.isclose(score, value, abs_tol=tolerance), (place, score, value)
