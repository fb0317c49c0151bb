"""Attention of a captured step over a pool whose plane map is not the identity: static_batch's, part by part."""

from __future__ import annotations

import torch

from services.worker.engine.attention import AttentionCall
from services.worker.engine.decode_shapes import DecodeShape
from services.worker.engine.planed_step import PlanesStep
from services.worker.engine.static_batch import Kernels, StaticBatch, StaticStep
from services.worker.kv.device_pool import DevicePool
from services.worker.kv.planes import latent_ranks


class StaticPlanesStep(PlanesStep):
    """A :class:`~services.worker.engine.planed_step.PlanesStep` over the first rows of a static batch, by kernels.

    It attends to latents in the absorbed form, as all single rows do.
    """

    def __init__(self, batch: StaticBatch, shape: DecodeShape, pool: DevicePool, kernels: Kernels) -> None:
        """Read the first ``shape.rows`` rows of ``batch``, which is filled before every replay."""
        super().__init__(pool)
        self._parts = StaticStep(batch, shape, pool, kernels)
        self._kernels = kernels
        self._ranks = latent_ranks(pool.planes)

    def _write_heads(self, call: AttentionCall) -> None:
        self._parts.write(call)

    def _write_latents(self, call: AttentionCall) -> None:
        self._kernels.latent_write(call.key[0].transpose(0, 1), self._pool.k(call.layer), self._parts.slots)

    def _await_layer(self, layer: int) -> None:
        """Return at once: steps with loads are not captured."""

    def _attend_part(self, call: AttentionCall) -> torch.Tensor:
        if call.latents is None:
            return self._parts.attend_written(call)
        absorbed = call.latents.absorbed(call)
        return call.latents.values(
            self._kernels.latent_attention(
                absorbed.query[0].transpose(0, 1),
                self._pool.k(call.layer),
                self._parts.paged,
                rank=self._ranks[call.layer],
                **call.scoring,
            )
        )
