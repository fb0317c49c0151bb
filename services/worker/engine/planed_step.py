"""One step in service over a pool whose plane map is not the identity: see :mod:`services.worker.engine.paged_step`.

A layer's KV heads lie in parts (:class:`~services.worker.kv.planes.Part`), and each is attended to as if it were a
layer of its own, with the query heads that read it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.nn.functional import pad

from services.worker.engine.attention import AttentionCall
from services.worker.engine.forward_meta import ForwardMeta
from services.worker.engine.paged_step import AttentionBackend, write_rows
from services.worker.kv.device_pool import DevicePool
from services.worker.kv.planes import Part, SharedKept


class PlanesStep(ABC):
    """An :class:`~services.worker.engine.attention.AttentionStep` over parts.

    All rows of a layer are written before any is read.
    """

    def __init__(self, pool: DevicePool) -> None:
        """Keep K and V in the parts of ``pool``, by its plane map."""
        self._pool = pool
        self._planes = pool.planes

    @abstractmethod
    def _write_heads(self, call: AttentionCall) -> None:
        """Write K and V of one part of a layer into their slots."""

    @abstractmethod
    def _write_latents(self, call: AttentionCall) -> None:
        """Write a layer's latents into their slots."""

    @abstractmethod
    def _attend_part(self, call: AttentionCall) -> torch.Tensor:
        """Return attention to one part, which is written: [T, heads, value_dim of the part]."""

    @abstractmethod
    def _await_layer(self, layer: int) -> None:
        """Return once every plane that ``layer`` reads is loaded."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Write the call's K and V part by part, wait for the layer's loads, and attend to each part."""
        calls = list(_calls(call, self._planes.parts_of(call.layer)))
        if not isinstance(self._planes.layers[call.layer].kept, SharedKept):
            for each in calls:
                self._write_heads(each) if each.latents is None else self._write_latents(each)
        self._await_layer(call.layer)
        if call.latents is not None:
            return self._attend_part(calls[0])
        return torch.cat([self._attend_part(each) for each in calls], dim=1)[:, :, : call.value_dim]


class PlanedStep(PlanesStep):
    """An ordinary step, by a backend, behind the gate of its loads."""

    def __init__(self, meta: ForwardMeta, pool: DevicePool, backend: AttentionBackend) -> None:
        """Have ``backend``, which attends over ``pool`` part by part, prepare the step that ``meta`` describes."""
        super().__init__(pool)
        self._meta = meta
        self._attention = backend.for_step(meta)

    def _write_heads(self, call: AttentionCall) -> None:
        write_rows(self._pool.k(call.layer), call.key, self._meta)
        write_rows(self._pool.v(call.layer), call.value, self._meta)

    def _write_latents(self, call: AttentionCall) -> None:
        write_rows(self._pool.k(call.layer), call.key, self._meta)

    def _await_layer(self, layer: int) -> None:
        if self._meta.gate is not None:
            self._meta.gate.wait(self._planes.last_unit(layer))

    def _attend_part(self, call: AttentionCall) -> torch.Tensor:
        return self._attention(call)


def _calls(call: AttentionCall, parts: tuple[Part, ...]) -> Iterator[AttentionCall]:
    """Yield ``call`` a part at a time, as wide as the heads of the part are in their planes."""
    if call.latents is not None:
        yield replace(call, layer=parts[0].number)
        return
    group = call.query.shape[1] // call.key.shape[1]
    for part in parts:
        end = part.first_head + part.heads
        yield replace(
            call,
            layer=part.number,
            query=_widened(call.query[:, part.first_head * group : end * group], part.dim),
            key=_widened(call.key[:, part.first_head : end], part.dim),
            value=_widened(call.value[:, part.first_head : end], part.dim),
            sinks=None if call.sinks is None else call.sinks[part.first_head * group : end * group],
        )


def _widened(heads: torch.Tensor, dim: int) -> torch.Tensor:
    """Return heads [1, heads, T, up to dim] as [1, heads, T, dim], padded with zeros."""
    return heads if heads.shape[-1] == dim else pad(heads, (0, dim - heads.shape[-1]))
