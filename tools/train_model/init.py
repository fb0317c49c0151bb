"""Initialisation with the heads that retrieval needs, so that it emerges within minutes.

Mimetic initialisation (Trockman & Kolter 2023) in our words: in layer 0 and 1 some heads look at a
fixed offset back, driven by a constant in embedding dimension 0 and the fast rotary planes; all
other heads compare content (W_q = W_k on the slow planes) and copy it (W_o = c W_v^T).  A word with
and without a leading space starts from one embedding that differs in dimension 1 only, because an
answer repeats without the space what the document states with it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tools.train_model.model import Attention, LanguageModel, ModelConfig

CONSTANT_DIMENSION, SPACE_DIMENSION = 0, 1
FAST_PLANES = 5
SLOW_FREQUENCY = 4e-3
"""Planes that turn slower than this (radians a token) compare content over the whole context."""


@dataclass(frozen=True, slots=True)
class OffsetHead:
    """A head that looks ``tokens`` back, the more exactly the higher ``sharpness``."""

    tokens: int
    sharpness: float


OFFSET_HEADS = {
    0: tuple(OffsetHead(d, s) for d, s in ((1, 4.5), (2, 4.5), (3, 4.5), (4, 4.5), (6, 2.0))),
    1: tuple(OffsetHead(d, 2.0) for d in (5, 8, 11)),
}


@dataclass(frozen=True, slots=True)
class InitScales:
    """Magnitudes found by trial; the defaults are the recipe's."""

    embedding: float = 0.3
    constant: float = 1.0
    space: float = 0.6
    match: float = 1.2
    copy: float = 0.5
    noise: float = 0.01
    down: float = 0.5


def _orthonormal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """``rows`` orthonormal vectors of size ``columns``."""
    basis: Tensor = torch.linalg.qr(torch.randn(columns, rows, generator=generator))[0]
    return basis.T.contiguous()


def spaced_twins(vocabulary: Mapping[str, int]) -> list[tuple[int, int]]:
    """Pairs of ids (with, without a leading space) of the same text."""
    return [
        (index, vocabulary[token[1:]])
        for token, index in sorted(vocabulary.items())
        if token.startswith("Ġ") and token[1:] in vocabulary
    ]


def _init_embedding(
    model: LanguageModel,
    vocabulary: Mapping[str, int],
    scales: InitScales,
    generator: torch.Generator,
) -> None:
    weight = model.model.embed_tokens.weight
    weight.normal_(0, scales.embedding, generator=generator)
    for spaced, plain in spaced_twins(vocabulary):
        weight[plain] = weight[spaced]
    weight[:, CONSTANT_DIMENSION] = scales.constant
    weight[:, SPACE_DIMENSION] = -scales.space
    spaced_ids = [index for token, index in vocabulary.items() if token.startswith("Ġ")]
    weight[spaced_ids, SPACE_DIMENSION] = scales.space
    model.model.norm.weight.fill_(0.25)
    model.model.norm.weight[CONSTANT_DIMENSION] = 0.01


def _init_attention(
    attention: Attention,
    offset_heads: tuple[OffsetHead, ...],
    frequencies: Tensor,
    constant: float,
    scales: InitScales,
    generator: torch.Generator,
    match_scale: float = 1.0,
) -> None:
    """Set the four projections; ``constant`` is what the norm makes of the constant dimension.

    ``match_scale`` is for what matching heads copy: many layers of them make the stream grow no more than two do.
    """
    config = attention.config
    size, half, group = config.head_size, config.head_size // 2, config.heads // config.kv_heads
    slow = [plane for plane in range(half) if frequencies[plane] < SLOW_FREQUENCY]
    slow += [plane + half for plane in slow]
    query = torch.zeros(config.heads, size, config.hidden)
    key = torch.zeros(config.kv_heads, size, config.hidden)
    value = torch.stack([_orthonormal(size, config.hidden, generator) for _ in range(config.kv_heads)])
    output = torch.zeros(config.hidden, config.heads, size)
    for index in range(config.kv_heads):
        key[index, :FAST_PLANES, CONSTANT_DIMENSION] = 1 / constant
        content = _orthonormal(len(slow), config.hidden, generator)
        content[:, CONSTANT_DIMENSION] = 0
        key[index, slow] = content * scales.match
    for head in range(config.heads):
        if head < len(offset_heads):
            offset, gain = offset_heads[head].tokens, offset_heads[head].sharpness ** 2 / constant
            for plane in range(FAST_PLANES):
                angle = -offset * float(frequencies[plane])
                query[head, plane, CONSTANT_DIMENSION] = gain * math.cos(angle)
                query[head, plane + half, CONSTANT_DIMENSION] = gain * math.sin(angle)
            output[:, head] = _orthonormal(size, config.hidden, generator).T * scales.copy
        else:
            query[head, slow] = key[head // group, slow]
            output[:, head] = value[head // group].T * (scales.copy * match_scale)

    def noisy(tensor: Tensor) -> Tensor:
        return tensor + torch.randn(tensor.shape, generator=generator) * scales.noise

    attention.q_proj.weight.copy_(noisy(query.reshape(-1, config.hidden)))
    attention.k_proj.weight.copy_(noisy(key.reshape(-1, config.hidden)))
    attention.v_proj.weight.copy_(value.reshape(-1, config.hidden))
    attention.o_proj.weight.copy_(output.reshape(config.hidden, -1))


@torch.no_grad()
def build_model(config: ModelConfig, vocabulary: Mapping[str, int], seed: int) -> LanguageModel:
    """Make a model with the structured initialisation; the seed decides every weight."""
    scales = InitScales()
    generator = torch.Generator().manual_seed(seed)
    model = LanguageModel(config)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.normal_(0, 0.5 * parameter.shape[1] ** -0.5, generator=generator)
    _init_embedding(model, vocabulary, scales, generator)
    constant = scales.constant / math.sqrt(scales.embedding**2 + (scales.constant**2 + scales.space**2) / config.hidden)
    for index, block in enumerate(model.model.blocks()):
        heads = OFFSET_HEADS.get(index, ())
        match_scale = 1.0 if heads else math.sqrt(2 / max(2, config.layers - len(OFFSET_HEADS)))
        _init_attention(block.self_attn, heads, model.frequencies, constant, scales, generator, match_scale)
        block.mlp.down_proj.weight.mul_(scales.down / math.sqrt(2 * config.layers))
    return model
