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
        keys = self._source.keys(self._layer, heads, start, self._source.end)
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
        """V where each head has tokens of its own, ``[kv_heads, n, head_dim]``; int64 ``[kv_heads, n]``, ascending.

        Of what was read ahead only V serves: K of all tokens was read anyway. What it lacks is one read of all heads,
        because each read is a call; heads that lack less than another one read some of theirs again.
        """
        if self._landed is None:
            return self._read_values(tokens)
        is_here, columns = self._landed.find(tokens)
        lacking = int((~is_here).sum(dim=1).max())
        again = is_here.to(torch.int8).argsort(dim=1, stable=True)[:, :lacking].sort(dim=1).values
        read = self._read_values(tokens.gather(1, again))
        values = read.new_empty(*tokens.shape, read.shape[2])
        values[is_here] = self._landed.kv[1, is_here.nonzero()[:, 0], columns]
        values.scatter_(1, again[:, :, None].expand_as(read), read)
        self._hit(values.nbytes - read.nbytes)
        return values

    def outcome(self) -> LayerOutcome:
        """Return the outcome of this layer's loading."""
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

    def _read_values(self, tokens: torch.Tensor) -> torch.Tensor:
        began = self._clock()
        values = self._source.values_by_head(self._layer, tokens)
        self._on_demand_s += self._clock() - began
        self._counts.add(ReadKind.FALLBACK_VALUES, values.nbytes)
        self._needed_bytes += values.nbytes
        return values

    def _hit(self, nbytes: int) -> None:
        self._hit_bytes += nbytes
        self._needed_bytes += nbytes
