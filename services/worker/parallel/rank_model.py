"""One rank's share of the model, from the checkpoint to a runner. Every rank calls these methods in this order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from services.worker.engine.device_checks import check_device
from services.worker.engine.found_model import check_attends_itself
from services.worker.engine.gpu_room import CudaMemory, DeviceMemory, RoomWish, measure_room
from services.worker.engine.model_faults import AttendsOtherwise, refusing
from services.worker.engine.model_loading import (
    expected_windows,
    load_config,
    max_context_tokens,
    model_bytes_of,
    own_context,
    tell,
)
from services.worker.engine.model_runner import NOTHING_TO_PROVE, ModelRunner, pack_layers
from services.worker.engine.own_attention import attend_itself, own_forward
from services.worker.engine.probe import FoundKept, LayoutProbe, Verification, find_kept, find_own_kept
from services.worker.engine.states.layers import StateModule, find_state_modules, state_layers
from services.worker.engine.states.page_sizes import PAGE_TOKENS
from services.worker.kv.device_pool import DevicePool
from services.worker.parallel.collectives import Collectives
from services.worker.parallel.division import Share, check_divisible
from services.worker.parallel.group_layout import GroupLayout, group_layout
from services.worker.parallel.loading import connect, dtype_of, has_sinks, load_share
from services.worker.parallel.orders import StartRank
from services.worker.parallel.rank_prefixes import JoinedHeads, RankPrefixes
from services.worker.parallel.rank_restoring import RankRestoring
from services.worker.parallel.shared_linears import JoinedNorm
from services.worker.proving.device import prove_device
from services.worker.proving.part import Part
from services.worker.proving.parts import parts_of
from services.worker.proving.shape import expected_shape
from services.worker.proving.table import ProofTable, ServedShape
from services.worker.restore.refusals import HiddenStatesUnsupported
from shared.errors import InvariantViolated, UnsupportedModel
from shared.messages.pools import KvGeometry

# torch leaves these functions without types.
_cuda: Any = torch.cuda


class RankModel:
    """One rank's share of the model. Its weights are loaded when it is made, which needs no other rank."""

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
        # Before weights are read, which takes some ranks longer: the ranks prove collectives together.
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
        self._layout: GroupLayout | None = None
        self.states: tuple[StateModule, ...] = ()

    @property
    def layout(self) -> GroupLayout:
        """How pages of the group are divided into parts; raises InvariantViolated before :meth:`join`."""
        if self._layout is None:
            raise InvariantViolated("the rank has not joined its group")
        return self._layout

    @property
    def part(self) -> KvGeometry:
        """The geometry of this rank's part of a page; known after :meth:`join`."""
        return self.layout.part.geometry

    def _shape(self) -> ServedShape:
        """Return the shape that :meth:`join` will find. Raises ConfigError where the model does not divide."""
        start, config = self._start, self.config
        check_divisible(config, start.ranks)
        shape = expected_shape(
            config,
            expected_windows(config),
            dtype=dtype_of(config, start.dtype),
            page_size=start.page_size or PAGE_TOKENS,
            device=self.device,
            share=self.share,
            store_port=start.store_port,
            kv_dtype=start.kv_dtype,
        )
        return msgspec.structs.replace(shape, has_sinks=has_sinks(config, self.share))

    def join(self, store: Any, *, through_host: bool = False) -> None:
        """Join the other ranks and run two tokens through the model. Raises TransportError, UnsupportedModel."""
        start = self._start
        timeout_s = start.timeout_ms / 1e3
        self._collectives = Collectives.join(
            store, start.rank, start.ranks, self.device, timeout_s, through_host=through_host
        )
        with refusing(self.config.model_type, "probed"):
            connect(self.model, self.config, self.share, self._collectives)
            found = self._find_kept()
        layout = group_layout(found, self.config, start.ranks, start.page_size)
        self._layout = layout.rounded() if start.kv_dtype == "fp8" else layout
        check_device(self._layout.whole, self.device.type)

    def _find_kept(self) -> FoundKept:
        """Find what layers keep, by our attention or by the model's own. Every rank runs the same passes, or fails."""
        windows = expected_windows(self.config)
        try:
            with refusing(self.config.model_type, "probed", AttendsOtherwise):
                self.states = find_state_modules(self.model, LayoutProbe())
                return find_kept(self.model, windows, self.context, self.states)
        except AttendsOtherwise as error:
            check_attends_itself(self.config, windows, error)
            reason = error
        if state_layers(self.config):
            raise UnsupportedModel(
                f"{self.config.model_type} attends by code of its own beside layers with states, which no group "
                f"divides: {reason.message}"
            )
        attend_itself(self.model)
        found = find_own_kept(self.model, len(windows))
        if not found.is_latents:
            raise UnsupportedModel(
                f"{self.config.model_type} attends by code of its own to K and V of heads, which no group divides: "
                f"{reason.message}"
            )
        return found

    def measure_room(self, wish: RoomWish, memory: DeviceMemory | None = None) -> int:
        """Return how many pages fit on this rank's device; all ranks call it at once. Raises ConfigError."""
        room = measure_room(
            lambda pool: self.runner(pool, vocab_size=0),
            self.layout.part,
            self.context,
            self.device,
            wish,
            memory or CudaMemory(self.device),
        )
        return room.pages(self.part.page_bytes)

    def make_pool(self, pages: int) -> DevicePool:
        """Make this rank's part of the device pool."""
        return DevicePool.create(
            self.part, pages, device=self.device, shm_prefix=self._start.shm_prefix, planes=self.layout.part
        )

    def expect(self, tokens: int) -> Verification:
        """Compute the logits of the model's own attention, for verification; then pack the model's layers on a CPU."""
        with refusing(self.config.model_type, "verified"):
            attention: str = self.model.config._attn_implementation
            windows = expected_windows(self.config)
            expected = Verification(self.model, tokens, windows, attention, is_rounded=self.part.is_rounded)
            if self.device.type == "cpu":
                pack_layers(self.model)
        return expected

    def runner(self, pool: DevicePool, vocab_size: int) -> ModelRunner:
        """Return the runner of this rank's steps over ``pool``."""
        return ModelRunner(
            self.model,
            pool,
            vocab_size=vocab_size,
            context=self.context,
            fused=own_forward(self.model, pool, model_bytes=self.weight_bytes),
            proofs=self.proofs,
            states=self.states,
        )

    def restoring(self, runner: ModelRunner, staging_bytes: int) -> RankRestoring:
        """Return this rank's restoration of KV; all ranks call it at once. Raises HiddenStatesUnsupported."""
        if self._collectives is None:
            raise InvariantViolated("the rank has not joined its group")
        if any(isinstance(module, JoinedNorm) for module in self.model.modules()):
            raise HiddenStatesUnsupported("norms over the heads of all ranks need all of them in every projection")
        return RankRestoring(
            runner,
            self._collectives,
            self.share,
            staging_bytes=staging_bytes,
            timeout_s=self._start.timeout_ms / 1e3,
        )

    def prefixes(self, runner: ModelRunner) -> RankPrefixes:
        """Return the prefixes that this rank attends to in part."""
        if self._collectives is None:
            raise InvariantViolated("the rank has not joined its group")
        heads = JoinedHeads(self._collectives, self.share, self.layout.whole.geometry.kv_heads)
        return RankPrefixes(runner, heads)

    def close(self) -> None:
        """Leave the group; idempotent."""
        if self._collectives is not None:
            self._collectives.close()
