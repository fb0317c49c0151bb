"""Attention of questions over the tokens that a method keeps of their prefix, and over themselves.

Plain torch over KV gathered from the device pool: every layer passes its view to the method, gathers the chosen tokens
for each question and KV head, and attends to no other token of the prefix. Keys are stored after RoPE, so a kept token
stays at its own position. Scores and softmax are float32 whatever the model's type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from services.worker.engine.attention import AttentionCall
from services.worker.evaluation.packed_questions import PackedQuestions
from services.worker.evaluation.selection import Chosen, LayerView, Selection
from services.worker.importance.key_codes import rounded as rounded_key
from services.worker.kv.device_pool import DevicePool
from services.worker.kv.float8 import from_float8, rounded
from shared.errors import InvariantViolated, UnsupportedModel


class PooledPrefix:
    """The KV of a prefix in pages of the device pool."""

    def __init__(self, pool: DevicePool, pages: npt.NDArray[np.int64], tokens: int) -> None:
        """Read the first ``tokens`` tokens of ``pages``, int64 [ceil(tokens / page_size)], in the prefix's order."""
        self.tokens = tokens
        self._pool = pool
        self._pages = torch.from_numpy(pages).to(pool.device)
        self.is_rounded = pool.geometry.is_rounded

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of a layer, float32 ``[kv_heads, tokens, head_dim]`` each; copies."""
        halves = self._pool.k(layer), self._pool.v(layer)
        key, value = (half[self._pages].flatten(0, 1)[: self.tokens].transpose(0, 1) for half in halves)
        if self.is_rounded:
            head_dim = self._pool.geometry.head_dim
            return from_float8(key, head_dim, torch.float32), from_float8(value, head_dim, torch.float32)
        return key.float().contiguous(), value.float().contiguous()


class KeptAttention:
    """An attention step for one batch of questions about a prefix.

    ``readings`` are the method's answers: for each layer, for each question.
    """

    def __init__(
        self, prefix: PooledPrefix, packed: PackedQuestions, numbers: Sequence[int], selection: Selection
    ) -> None:
        """Attend for the questions of ``packed``, laid out behind ``prefix``; ``selection`` chooses in each layer.

        ``numbers`` are the questions' places among all about this prefix.
        """
        self.readings: list[list[Chosen]] = []
        self._prefix = prefix
        self._packed = packed
        self._numbers = tuple(numbers)
        self._selection = selection

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return ``[T, heads, head_dim]``, for rows in the order of the batch.

        Raises UnsupportedModel for layers with sinks or chunks, which methods that choose tokens do not know.
        """
        if call.sinks is not None or call.chunk is not None:
            raise UnsupportedModel("what a choice of tokens costs is not measured with attention sinks or chunks")
        packed, heads, kv_heads = self._packed, call.query.shape[1], call.key.shape[1]
        query = _by_question(call.query, packed, kv_heads)  # [Q, KV heads, group, R, head_dim]
        halves = (rounded(half) if self._prefix.is_rounded else half for half in (call.key, call.value))
        own_key, own_value = (_by_question(half, packed, kv_heads)[:, :, 0] for half in halves)
        key, value = self._prefix.kv(call.layer)
        own = self._own_scores(call, query, own_key)

        def weigh(is_rounded: bool) -> list[torch.Tensor]:
            return self._weights(call, query, rounded_key(key) if is_rounded else key, own)

        chosen = self._choose(call, weigh)
        self.readings.append(chosen)
        kept = _stacked(chosen, kv_heads, key.device)
        if kept is None:
            scores, values = self._whole_scores(call, query, key), value[None]
        else:
            at = torch.arange(kv_heads, device=key.device)[None, :, None]
            scores, values = self._kept_scores(call, query, key[at, kept], kept), value[at, kept]
        output = _attend(scores, own, values, own_value)
        flat = call.query.new_empty(call.query.shape[2], heads, call.query.shape[3])
        flat[packed.rows[packed.valid]] = output[packed.valid].to(flat.dtype)
        return flat

    def _choose(self, call: AttentionCall, weigh: Callable[[bool], list[torch.Tensor]]) -> list[Chosen]:
        span = self._first_visible(call), self._prefix.tokens
        if span[0] == span[1]:  # The window has left the prefix behind: there is nothing to choose.
            return [Chosen(None, 0.0) for _ in self._numbers]
        heads = call.query.shape[1], call.key.shape[1]
        return self._selection.choose(LayerView(call.layer, span, heads, self._numbers, weigh))

    def _weights(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, own: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return :attr:`LayerView.weights`. A question's rows come first, and see nothing of its answers."""
        counts = self._packed.asking.sum(dim=1).tolist()
        most = max(counts)
        scores = self._whole_scores(call, query[:, :, :, :most], key)
        both = torch.cat([scores, own[:, :, :, :most]], dim=-1)
        visible = slice(self._first_visible(call), self._prefix.tokens)
        weights = torch.softmax(both, dim=-1)[..., visible].flatten(1, 2)
        return [of_one[:, :count] for of_one, count in zip(weights, counts, strict=True)]

    def _first_visible(self, call: AttentionCall) -> int:
        """Return the first token of the prefix that any question sees in this layer."""
        if call.window is None:
            return 0
        return min(self._prefix.tokens, max(0, self._prefix.tokens - call.window + 1))

    def _whole_scores(self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return scores against all of the prefix, [Q, kv_heads, group, R, S]; key [kv_heads, S, head_dim]."""
        questions, kv_heads, group, rows, head_dim = query.shape
        # One product for each KV head over all questions, because they share its keys.
        flat = query.transpose(0, 1).reshape(kv_heads, -1, head_dim)
        scores = torch.bmm(flat, key.transpose(1, 2)).view(kv_heads, questions, group, rows, -1).transpose(0, 1)
        every = torch.arange(key.shape[1], device=key.device)[None, None]
        return self._limited(call, scores, every)

    def _kept_scores(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, kept: torch.Tensor
    ) -> torch.Tensor:
        """Return scores against each question's kept tokens; key [Q, kv_heads, k, head_dim], kept [Q, kv_heads, k]."""
        scores = torch.einsum("qngrd,qnkd->qngrk", query, key)
        return self._limited(call, scores, kept)

    def _limited(self, call: AttentionCall, scores: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """Apply the layer's scale, soft cap and sliding window to scores."""
        scores = _scaled(call, scores)
        if call.window is None:
            return scores
        places = self._places()[:, : scores.shape[3]]
        distance = places[:, None, :, None] - kept[:, :, None, :]
        return scores.masked_fill((distance >= call.window)[:, :, None], float("-inf"))

    def _own_scores(self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return scores of a question's rows against one another, float32 [Q, kv_heads, group, R, R]."""
        scores = _scaled(call, torch.einsum("qngrd,qntd->qngrt", query, key))
        seen = self._packed.visible
        if call.window is not None:
            places = self._places()
            # A row that pads is visible to itself alone, at distance 0.
            seen = seen & (places[:, :, None] - places[:, None, :] < call.window)
        return scores.masked_fill(~seen[:, None, None], float("-inf"))

    def _places(self) -> torch.Tensor:
        """Return positions in the context of every place, int64 [Q, R]."""
        return self._packed.positions[self._packed.rows]


def _stacked(chosen: Sequence[Chosen], kv_heads: int, device: torch.device) -> torch.Tensor | None:
    """Return the chosen tokens of all questions, int64 [Q, kv_heads, k], or None where they are all of the prefix."""
    sets = [one.tokens for one in chosen if one.tokens is not None]
    if not sets:
        return None
    if len(sets) != len(chosen) or any(one.shape[-1] != sets[0].shape[-1] for one in sets):
        raise InvariantViolated("a method must keep equally many tokens for all questions about a prefix")
    return torch.stack([one.expand(kv_heads, -1) for one in sets]).to(device)


def _by_question(tensor: torch.Tensor, packed: PackedQuestions, kv_heads: int) -> torch.Tensor:
    """Return ``[1, heads, T, head_dim]`` as float32 ``[Q, kv_heads, heads / kv_heads, R, head_dim]``."""
    rows = tensor[0].transpose(0, 1)[packed.rows].float()
    questions, places, heads, head_dim = rows.shape
    return rows.view(questions, places, kv_heads, heads // kv_heads, head_dim).permute(0, 2, 3, 1, 4)


def _scaled(call: AttentionCall, scores: torch.Tensor) -> torch.Tensor:
    scores = scores * call.scaling
    return scores if call.softcap is None else call.softcap * torch.tanh(scores / call.softcap)


def _attend(scores: torch.Tensor, own: torch.Tensor, value: torch.Tensor, own_value: torch.Tensor) -> torch.Tensor:
    """Return the attention over kept and own tokens together, float32 [Q, R, heads, head_dim].

    value [Q or 1, kv_heads, k, d].
    """
    weights = torch.softmax(torch.cat([scores, own], dim=-1), dim=-1)
    kept = scores.shape[-1]
    output = weights[..., :kept] @ value[:, :, None] + weights[..., kept:] @ own_value[:, :, None]
    questions, kv_heads, group, rows, head_dim = output.shape
    return output.permute(0, 3, 1, 2, 4).reshape(questions, rows, kv_heads * group, head_dim)
