"""One rank's share of the model, from the checkpoint to a runner. Every rank takes these steps in this order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from services.worker.engine.gpu_room import CudaMemory, DeviceMemory, RoomWish, measure_room
from services.worker.engine.model_faults import refusing
from services.worker.engine.model_loading import (
    expected_windows,
    load_config,
    max_context_tokens,
    model_bytes_of,
    own_context,
    tell,
)
from services.worker.engine.model_runner import NOTHING_TO_PROVE, ModelRunner, pack_layers
from services.worker.engine.probe import Verification, find_geometry
from services.worker.kv.device_pool import DevicePool
from services.worker.kv.planes import identity_map
from services.worker.parallel.collectives import Collectives
from services.worker.parallel.division import Share, check_divisible, kv_heads_of
from services.worker.parallel.loading import connect, dtype_of, load_share
from services.worker.parallel.orders import StartRank
from services.worker.parallel.rank_restoring import RankRestoring
from services.worker.proving.device import prove_device
from services.worker.proving.part import Part
from services.worker.proving.parts import parts_of
from services.worker.proving.shape import expected_shape
from services.worker.proving.table import ProofTable, ServedShape
from shared.errors import InvariantViolated, UnsupportedModel
from shared.messages.pools import KvGeometry

# torch leaves these functions without types.
_cuda: Any = torch.cuda


class RankModel:
    """Its weights are loaded when it is made, which needs no other rank."""

    def __init__(
        self, start: StartRank, prove: Callable[[ServedShape, Sequence[Part]], ProofTable] = prove_device
    ) -> None:
        """``prove`` is called on a GPU. Raises OperatorError with the reason why this rank cannot serve."""
        self._start = start
        self.share = Share(start.rank, start.ranks)
        self.device = torch.device("cpu" if start.device == "cpu" else f"{start.device}:{start.first_gpu + start.rank}")
        if self.device.type == "cuda":
            _cuda.set_device(self.device)
        if start.threads:
            torch.set_num_threads(start.threads)
        self.config = load_config(Path(start.model_dir))
        self.context = max_context_tokens(self.config, start.max_context_tokens)
        self.longest = own_context(self.config) or self.context
        # Before weights are read, which takes ranks differently long: the ranks prove collectives together.
        self.proofs = NOTHING_TO_PROVE
        if self.device.type == "cuda":
            self.proofs = prove(self._shape(), parts_of(ranks=start.ranks))
        with refusing(self.config.model_type, "loaded"):
            self.model = load_share(
                Path(start.model_dir), self.config, self.share, dtype=start.dtype, device=self.device
            )
        tell(self.model, self.config, self.context)
        self.weight_bytes = model_bytes_of(self.model)
        self._collectives: Collectives | None = None
        self._part: KvGeometry | None = None

    @property
    def part(self) -> KvGeometry:
        """The geometry of this rank's part of a page; known after :meth:`join`."""
        if self._part is None:
            raise InvariantViolated("the rank has not joined its group")
        return self._part

    def _shape(self) -> ServedShape:
        """What :meth:`join` will find, by the configuration. Raises ConfigError where the model does not divide."""
        start, config = self._start, self.config
        check_divisible(config, start.ranks)
        return expected_shape(
            config,
            expected_windows(config),
            dtype=dtype_of(config, start.dtype),
            page_size=start.page_size,
            device=self.device,
            share=self.share,
            store_port=start.store_port,
        )

    def join(self, store: Any, *, through_host: bool = False) -> None:
        """Meet the other ranks and run two tokens through the model. Raises TransportError, UnsupportedModel."""
        start = self._start
        timeout_s = start.timeout_ms / 1e3
        self._collectives = Collectives.join(
            store, start.rank, start.ranks, self.device, timeout_s, through_host=through_host
        )
        with refusing(self.config.model_type, "probed"):
            connect(self.model, self.config, self.share, self._collectives)
            part = find_geometry(self.model, expected_windows(self.config), start.page_size, self.context)
        heads = len(self.share.kv_heads(kv_heads_of(self.config)))
        if part.kv_heads != heads:
            raise UnsupportedModel(f"{type(self.model).__name__} has {part.kv_heads} KV heads in a rank, not {heads}")
        self._part = part

    def measure_room(self, wish: RoomWish, memory: DeviceMemory | None = None) -> int:
        """Pages that this rank's device has room for; every rank calls this at the same time. Raises ConfigError."""
        room = measure_room(self.model, identity_map(self.part), self.context, wish, memory or CudaMemory(self.device))
        return room.pages(self.part.page_bytes)

    def make_pool(self, pages: int) -> DevicePool:
        """This rank's part of the device pool."""
        return DevicePool.create(self.part, pages, device=self.device, shm_prefix=self._start.shm_prefix)

    def expect(self, tokens: int) -> Verification:
        """What the model gives by its own attention; afterwards it is made as fast as it can be."""
        with refusing(self.config.model_type, "verified"):
            expected = Verification(self.model, tokens, expected_windows(self.config))
            if self.device.type == "cpu":
                pack_layers(self.model)
        return expected

    def runner(self, pool: DevicePool, vocab_size: int) -> ModelRunner:
        """What computes steps of this rank over ``pool``."""
        return ModelRunner(self.model, pool, vocab_size=vocab_size, context=self.context, proofs=self.proofs)

    def restoring(self, runner: ModelRunner, staging_bytes: int) -> RankRestoring:
        """What restores KV in this rank; every rank calls this at the same time. Raises HiddenStatesUnsupported."""
        if self._collectives is None:
            raise InvariantViolated("the rank has not joined its group")
        return RankRestoring(
            runner,
            self._collectives,
            self.share,
            staging_bytes=staging_bytes,
            timeout_s=self._start.timeout_ms / 1e3,
        )

    def close(self) -> None:
        """Leave the group; idempotent."""
        if self._collectives is not None:
            self._collectives.close()
