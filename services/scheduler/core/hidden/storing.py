"""Which form of a prefix is worth keeping below the device: what would be read back is what should be written.

The partition that restores soonest says it (HCache 4.1.2): layers that would be computed from tokens need not be kept
at all, and the others are kept in one form each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from services.scheduler.core.hidden.partition import (
    LayerTimes,
    Partition,
    best_partition,
    kv_only,
    layer_times,
    tokens_only,
)

if TYPE_CHECKING:
    from services.scheduler.core.hidden.layer_costs import LayerCosts

StoredForm = Literal["kv", "hidden", "mix", "nothing"]

_WORTH_STORING = 0.9
"""Restoring from a copy must take at most this part of what computing takes: writing it costs something, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storing:
    """Layers [0, ``partition.tokens``) are not kept, the next ``partition.hidden`` as hidden states, the rest as KV."""

    form: StoredForm
    partition: Partition
    token_bytes: float  # All layers of a token, as kept.
    kv_token_bytes: float  # The same if all were KV.
    explanation: str


def worth_storing(
    costs: LayerCosts, *, tokens: int, bytes_per_us: float, may_keep_hidden: bool = True, context: int = 0
) -> Storing:
    """What to keep of ``tokens`` tokens that are restored over a link of this speed.

    ``may_keep_hidden`` is False where a worker cannot restore from hidden states.
    """
    times = layer_times(costs, tokens, bytes_per_us, context=context)
    if not may_keep_hidden:
        times = LayerTimes(
            io_kv=times.io_kv,
            io_hidden=times.io_kv,
            compute_hidden=times.compute_hidden,
            compute_tokens=times.compute_tokens,
        )
    best = best_partition(costs.layers, times, ends_early=True)
    computed = tokens_only(costs.layers, times)
    kv_bytes = costs.layers * costs.kv_bytes
    if best.time_us > computed.time_us * _WORTH_STORING:
        said = f"computing it takes {computed.time_us / 1e3:.1f} ms, no copy is worth its room"
        return Storing(form="nothing", partition=computed, token_bytes=0.0, kv_token_bytes=kv_bytes, explanation=said)
    return Storing(
        form=_form(best),
        partition=best,
        token_bytes=best.hidden * costs.hidden_bytes + best.kv * costs.kv_bytes,
        kv_token_bytes=kv_bytes,
        explanation=_said(costs, best, kv_only(costs.layers, times), may_keep_hidden=may_keep_hidden),
    )


def _form(best: Partition) -> StoredForm:
    if best.hidden and best.kv:
        return "mix"
    return "hidden" if best.hidden else "kv"


def _said(costs: LayerCosts, best: Partition, as_kv: Partition, *, may_keep_hidden: bool) -> str:
    text = f"{best.tokens} layers from tokens, {best.hidden} from hidden states, {best.kv} as KV"
    if not may_keep_hidden:
        text += "; the worker restores nothing from hidden states"
    elif not costs.hidden_is_smaller:
        ratio = costs.hidden_bytes / costs.kv_bytes
        text += f"; a hidden state has {ratio:.1f} times the bytes of KV in this model, so none are kept"
    return f"{text}: {best.time_us / 1e3:.1f} ms, all as KV {as_kv.time_us / 1e3:.1f} ms"
