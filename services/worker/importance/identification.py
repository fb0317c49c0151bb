"""Which prefix tokens matter to a request, found with the keys of a few probe heads (IMPRESS 4.3, HyperInfer IV-B).

What a head reads of a prefix is its K and V, so under GQA a *probe head* is a KV head: its keys serve all query heads
of its group, reading them costs the same for one of these as for all, and therefore all of them vote, by the sum of
their weights. Query heads that vote each by itself found no more (``docs/results/what-did-not-work.md``).

Where the paper is silent:

- weights are those of real attention: the softmax runs over the prefix, what lies before it and the request's own
  tokens;
- the choice is made once, with the rows of the request's first step, and serves its later steps too;
- sets that are identical are accepted even where the threshold is 1, because then there is nothing to vote about;
- a layer whose probe heads disagree reads all keys, and every KV head takes the tokens that itself finds most
  important.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.worker.importance.metrics import Metric
from services.worker.importance.selection import Choice, most_important, vote
from services.worker.importance.similarity import ALPHA, mean_similarity, similarity_threshold
from shared.errors import ConfigError
from shared.importance import PROBE_HEADS

SINKS_OR_CHUNKS = "attention over a part of a prefix knows neither sinks nor chunks"
"""Why rows of some models cannot attend over a part of a prefix."""

MOST_WEIGHTS = 2**25
"""Most attention weights in memory at a time, 128 MiB of float32, if one query row has no more."""


@dataclass(frozen=True, slots=True)
class ProbeUnit:
    """One voter: query heads ``[first_query, end_query)`` with the keys of ``kv_head``."""

    first_query: int
    end_query: int
    kv_head: int


@dataclass(frozen=True, slots=True)
class ProbeHeads:
    """The first ``count`` KV heads of each layer; fewer where the model has fewer."""

    count: int = PROBE_HEADS

    def __post_init__(self) -> None:
        """Raise ConfigError unless there is a probe head."""
        if self.count < 1:
            raise ConfigError(f"importance needs a probe head, not {self.count}")

    def units(self, query_heads: int, kv_heads: int) -> tuple[ProbeUnit, ...]:
        """Return the voters of a model with these heads."""
        return head_units(query_heads, kv_heads)[: self.count]


def head_units(query_heads: int, kv_heads: int) -> tuple[ProbeUnit, ...]:
    """Every KV head with its group."""
    group = query_heads // kv_heads
    return tuple(ProbeUnit(head * group, (head + 1) * group, head) for head in range(kv_heads))


def heads_read(units: tuple[ProbeUnit, ...]) -> tuple[int, ...]:
    """Return the KV heads whose keys these voters need, ascending."""
    return tuple(sorted({unit.kv_head for unit in units}))


def are_apart(heads: Sequence[int]) -> bool:
    """Return whether storages keep the keys of these KV heads apart, as codes (:mod:`key_codes`)."""
    return max(heads) < PROBE_HEADS


@dataclass(frozen=True, slots=True)
class Rows:
    """The request's new tokens in one layer.

    query ``[heads, T, head_dim]`` at positions ``context .. context + T - 1``; the others as
    :class:`~services.worker.engine.attention.AttentionCall` has them. ``unserved`` is why they cannot attend over a
    part of a prefix; "" if they can.
    """

    query: torch.Tensor
    context: int
    scaling: float
    window: int | None
    softcap: float | None
    unserved: str = ""

    def first_visible(self) -> int:
        """Return the first position that any of the rows can see."""
        return 0 if self.window is None else max(0, self.context - self.window + 1)


def measure_importance(
    rows: Rows, keys: torch.Tensor, positions: torch.Tensor, prefix: int, units: tuple[ProbeUnit, ...], metric: Metric
) -> torch.Tensor:
    """Return the importance of the first ``prefix`` of ``keys`` for each unit, float32 ``[units, prefix]``.

    keys ``[units, n, head_dim]``: each unit's own, of the prefix and then of all else that the rows see; positions
    int64 ``[n]``.
    """
    importance = keys.new_zeros(len(units), prefix, dtype=torch.float32)
    # Groups are alike within a reading, so that the queries of all units are one tensor.
    queries = torch.stack([rows.query[unit.first_query : unit.end_query] for unit in units]).float()
    transposed = keys.float().transpose(1, 2)[:, None]
    count = queries.shape[2]
    step = max(1, MOST_WEIGHTS // (queries.shape[0] * queries.shape[1] * keys.shape[1]))
    for start in range(count - 1 if metric.is_of_last_row else 0, count, step):
        block = queries[:, :, start : start + step]
        scores = (block @ transposed) * rows.scaling
        if rows.softcap is not None:
            scores = rows.softcap * torch.tanh(scores / rows.softcap)
        at = torch.arange(rows.context + start, rows.context + start + block.shape[2], device=keys.device)[:, None]
        seen = positions <= at
        if rows.window is not None:
            seen &= positions > at - rows.window
        weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        importance = metric.fold(importance, weights[..., :prefix])
    return metric.finish(importance)


@dataclass(frozen=True, slots=True)
class Identification:
    """``tokens`` int64 ``[count]``, ascending: the voted set with what is kept regardless, positions in the prefix.

    ``accepted``: it serves all heads. Else every head is to choose for itself (:func:`choose_by_head`), and ``tokens``
    is only what the probe heads made of it.
    """

    tokens: torch.Tensor
    similarity: float
    threshold: float
    accepted: bool


def identify(importance: torch.Tensor, start: int, choice: Choice, alpha: float = ALPHA) -> Identification:
    """Return the set of one layer. importance float32 ``[units, n]`` of tokens ``start .. start + n - 1``."""
    scores = importance[:, choice.candidates.to(importance.device) - start]
    sets = most_important(scores, choice.count)
    similarity = mean_similarity(sets)
    threshold = similarity_threshold(choice.count, len(choice.candidates), alpha)
    voted = choice.candidates.to(scores.device)[vote(sets, scores)]
    return Identification(choice.with_kept(voted), similarity, threshold, similarity > threshold or similarity == 1.0)


def choose_by_head(importance: torch.Tensor, start: int, choice: Choice) -> torch.Tensor:
    """Return the fallback: the tokens that each unit finds most important, int64 ``[units, count]``.

    Each row is ascending.
    """
    candidates = choice.candidates.to(importance.device)
    return choice.with_kept(candidates[most_important(importance[:, candidates - start], choice.count)])
