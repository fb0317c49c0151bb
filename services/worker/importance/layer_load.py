"""The reads of one layer of one prefix, each timed and counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from services.worker.importance.bytes_read import BytesRead, ReadKind
from services.worker.importance.prefix_source import PrefixSource


@dataclass(frozen=True, slots=True)
class LayerOutcome:
    """The reads of one layer of one request, and how long computation waited for them.

    ``needed_bytes`` are those of the K and V that the layer attended over, without the keys that it chose by.
    ``keys_s`` went into keys for choosing, ``chosen_s`` into what was chosen.
    """

    layer: int
    needed_bytes: int
    keys_s: float
    chosen_s: float

    @property
    def stall_s(self) -> float:
        """Seconds for which computation waited."""
        return self.keys_s + self.chosen_s


class LayerLoad:
    """The reads of one layer; computation waits for them, and :meth:`outcome` says for how long."""

    def __init__(self, source: PrefixSource, layer: int, counts: BytesRead, clock: Callable[[], float]) -> None:
        """Read ``layer`` from ``source``, and add the bytes to ``counts``.

        ``clock`` returns seconds, by which waits are measured.
        """
        self._source, self._layer, self._counts, self._clock = source, layer, counts, clock
        self._needed_bytes = 0
        self._keys_s = self._chosen_s = 0.0

    def probe_keys(self, heads: Sequence[int], start: int, layers: int = 1) -> torch.Tensor:
        """Return K, perhaps rounded, of tokens from ``start`` to the prefix's end, ``[len(heads), n, head_dim]``.

        ``layers`` is as in :meth:`PrefixSource.probe_keys`.
        """
        began = self._clock()
        keys, nbytes = self._source.probe_keys(self._layer, heads, start, layers)
        self._keys_s += self._clock() - began
        self._counts.add(ReadKind.PROBE_KEYS, nbytes)
        return keys

    def keys(self, start: int) -> torch.Tensor:
        """Return K of all heads, of tokens from ``start`` to the prefix's end, ``[kv_heads, n, head_dim]``."""
        began = self._clock()
        keys = self._source.keys(self._layer, start)
        self._keys_s += self._clock() - began
        self._counts.add(ReadKind.FALLBACK_KEYS, keys.nbytes)
        return keys

    def kv(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return K and V of all heads, ``[2, kv_heads, n, head_dim]``; tokens int64 ``[n]``, ascending."""
        return self._read(ReadKind.CHOSEN, self._source.gather, tokens)

    def values(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return V, ``[kv_heads, n, head_dim]``, where each head has tokens of its own.

        tokens is int64 ``[kv_heads, n]``, each row ascending.
        """
        return self._read(ReadKind.FALLBACK_VALUES, self._source.values_by_head, tokens)

    def outcome(self) -> LayerOutcome:
        """Return the outcome of this layer's reads so far."""
        return LayerOutcome(self._layer, self._needed_bytes, self._keys_s, self._chosen_s)

    def _read(
        self, kind: ReadKind, read: Callable[[int, torch.Tensor], torch.Tensor], tokens: torch.Tensor
    ) -> torch.Tensor:
        began = self._clock()
        found = read(self._layer, tokens)
        self._chosen_s += self._clock() - began
        self._counts.add(kind, found.nbytes)
        self._needed_bytes += found.nbytes
        return found
