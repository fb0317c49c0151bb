"""A Llama decoder for training: the state dict has the names Hugging Face's Llama uses.

Shapes: B rows, T tokens, D hidden, H query heads, K key/value heads, E head size.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

QUERY_BLOCK_TOKENS = 128


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes of a model; ``kv_heads < heads`` makes it grouped-query."""

    vocabulary: int = 2560
    hidden: int = 192
    layers: int = 4
    heads: int = 6
    kv_heads: int = 6
    head_size: int = 32
    feed_forward: int = 512
    rope_theta: float = 500_000.0
    context_tokens: int = 4096
    norm_epsilon: float = 1e-5

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


VARIANTS = {
    "mha": ModelConfig(kv_heads=6),
    "gqa": ModelConfig(kv_heads=3),
    "deep-mha": ModelConfig(layers=12, kv_heads=6, feed_forward=384),
    "deep-gqa": ModelConfig(layers=12, kv_heads=3, feed_forward=384),
}
"""The deep ones are not shipped: they show what loading by importance does to a model with many layers."""


class RMSNorm(nn.Module):
    """Root-mean-square normalisation of the last dimension."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.epsilon)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Apply rotary positions to ``x [B, H, T, E]``; angles are ``[B, 1, T, E/2]``."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal softmax attention, ``[B, H, T, E]`` each.

    On a CPU in bfloat16 plain matrix products by blocks of queries beat the fused kernel; each
    block skips the keys that lie in its future.
    """
    if query.is_cuda or query.dtype != torch.bfloat16:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    tokens = query.shape[2]
    query = query * query.shape[-1] ** -0.5
    outputs = []
    for start in range(0, tokens, QUERY_BLOCK_TOKENS):
        end = min(start + QUERY_BLOCK_TOKENS, tokens)
        scores = query[:, :, start:end] @ key[:, :, :end].transpose(-1, -2)
        future = scores.new_full((end - start, end - start), -1e4).triu(1)
        scores = scores + functional.pad(future, (start, 0))
        outputs.append(scores.softmax(-1) @ value[:, :, :end])
    return torch.cat(outputs, 2) if len(outputs) > 1 else outputs[0]


class Attention(nn.Module):
    """Rotary self-attention with ``kv_heads`` key/value heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        wide, narrow = config.heads * config.head_size, config.kv_heads * config.head_size
        self.q_proj = nn.Linear(config.hidden, wide, bias=False)
        self.k_proj = nn.Linear(config.hidden, narrow, bias=False)
        self.v_proj = nn.Linear(config.hidden, narrow, bias=False)
        self.o_proj = nn.Linear(wide, config.hidden, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        config, (rows, tokens, _) = self.config, x.shape

        def split(y: Tensor) -> Tensor:
            return y.view(rows, tokens, -1, config.head_size).transpose(1, 2)

        query, key, value = split(self.q_proj(x)), split(self.k_proj(x)), split(self.v_proj(x))
        cosine, sine = cosine.to(query.dtype), sine.to(query.dtype)
        query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
        group = config.heads // config.kv_heads
        if group > 1:
            key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        mixed = causal_attention(query, key, value)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(rows, tokens, -1))
        return out


class FeedForward(nn.Module):
    """The gated feed-forward layer of Llama."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.feed_forward, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.feed_forward, bias=False)
        self.down_proj = nn.Linear(config.feed_forward, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden, config.norm_epsilon)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.norm_epsilon)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cosine, sine)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Embedding, layers and the final norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.norm_epsilon)

    def blocks(self) -> list[Block]:
        """The layers, first to last."""
        return [layer for layer in self.layers if isinstance(layer, Block)]


class LanguageModel(nn.Module):
    """The whole model; the output projection is the embedding (tied)."""

    frequencies: Tensor
    """Radians a token of each rotary plane, ``[E/2]``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        planes = torch.arange(0, config.head_size, 2) / config.head_size
        self.register_buffer("frequencies", config.rope_theta**-planes, persistent=False)

    def hidden(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Final hidden states ``[B, T, D]`` of ``ids [B, T]``; positions default to 0, 1, 2..."""
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
        angles = (positions[..., None].float() * self.frequencies)[:, None]
        cosine, sine = angles.cos(), angles.sin()
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, cosine, sine)
        out: Tensor = self.model.norm(x)
        return out

    def project(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states ``[..., D]``."""
        return functional.linear(hidden, self.model.embed_tokens.weight)

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits ``[B, T, vocabulary]``."""
        return self.project(self.hidden(ids, positions))
