"""One layer of one prefix being loaded: every read timed and counted, what was read ahead merged with what was not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from services.worker.importance.bytes_read import BytesRead, ReadKind
from services.worker.importance.prefix_source import PrefixSource
from services.worker.importance.speculation import Flight, Landed, LayerOutcome


class LayerLoad:
    """Reads of ``layer``. They hold the computation up, and say by :meth:`outcome` for how long."""

    def __init__(self, source: PrefixSource, layer: int, counts: BytesRead, clock: Callable[[], float]) -> None:
        self._source, self._layer, self._counts, self._clock = source, layer, counts, clock
        self._landed: Landed | None = None
        self._speculated_bytes = self._needed_bytes = self._hit_bytes = 0
        self._keys_s = self._wait_s = self._on_demand_s = 0.0

    def keys(self, kind: ReadKind, heads: Sequence[int], start: int) -> torch.Tensor:
        """K of tokens from ``start`` to the prefix's end, ``[len(heads), n, head_dim]``."""
        began = self._clock()
        keys = self._source.keys(self._layer, heads, start, self._source.tokens)
        self._keys_s += self._clock() - began
        self._counts.add(kind, keys.nbytes)
        return keys

    def land(self, flight: Flight, deadline_s: float) -> None:
        """Wait for what was read ahead for this layer, and use it from here on if it arrives."""
        began = self._clock()
        self._landed = flight.land(deadline_s)
        self._wait_s += self._clock() - began
        self._speculated_bytes += flight.nbytes

    def kv(self, tokens: torch.Tensor) -> torch.Tensor:
        """K and V of all heads, ``[2, kv_heads, n, head_dim]``; tokens int64 ``[n]``, ascending."""
        if self._landed is None:
            return self._gather(tokens)
        is_here, columns = self._landed.find(tokens)
        missed = self._gather(tokens[~is_here])
        kv = missed.new_empty(*missed.shape[:2], len(tokens), missed.shape[3])
        kv[:, :, is_here] = self._landed.kv[:, :, columns]
        kv[:, :, ~is_here] = missed
        self._hit(len(columns) * self._source.token_bytes)
        return kv

    def values(self, tokens: torch.Tensor) -> torch.Tensor:
        """V where each head has tokens of its own, ``[kv_heads, n, head_dim]``; int64 ``[kv_heads, n]``, ascending."""
        return torch.stack([self._head_values(head, tokens[head]) for head in range(self._source.kv_heads)])

    def outcome(self) -> LayerOutcome:
        """What this layer's loading came to."""
        return LayerOutcome(
            layer=self._layer,
            needed_bytes=self._needed_bytes,
            speculated_bytes=self._speculated_bytes,
            hit_bytes=self._hit_bytes,
            on_demand_bytes=self._needed_bytes - self._hit_bytes,
            keys_s=self._keys_s,
            wait_s=self._wait_s,
            on_demand_s=self._on_demand_s,
            ahead_s=0.0 if self._landed is None else self._landed.seconds,
        )

    def _gather(self, tokens: torch.Tensor) -> torch.Tensor:
        began = self._clock()
        kv = self._source.gather(self._layer, tokens)
        self._on_demand_s += self._clock() - began
        self._counts.add(ReadKind.ON_DEMAND, kv.nbytes)
        self._needed_bytes += kv.nbytes
        return kv

    def _head_values(self, head: int, tokens: torch.Tensor) -> torch.Tensor:
        """V of one head, ``[n, head_dim]``. Of what was read ahead only V serves: K of all tokens was read anyway."""
        if self._landed is None:
            return self._read_values(head, tokens)
        is_here, columns = self._landed.find(tokens)
        missed = self._read_values(head, tokens[~is_here])
        value = missed.new_empty(len(tokens), missed.shape[1])
        value[is_here] = self._landed.kv[1, head, columns]
        value[~is_here] = missed
        self._hit(value.nbytes - missed.nbytes)
        return value

    def _read_values(self, head: int, tokens: torch.Tensor) -> torch.Tensor:
        began = self._clock()
        values = self._source.values(self._layer, head, tokens)
        self._on_demand_s += self._clock() - began
        self._counts.add(ReadKind.FALLBACK_VALUES, values.nbytes)
        self._needed_bytes += values.nbytes
        return values

    def _hit(self, nbytes: int) -> None:
        self._hit_bytes += nbytes
        self._needed_bytes += nbytes
