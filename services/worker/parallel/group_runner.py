"""Rank 0's side of a group: the ``forward`` of a whole model; this process computes a share."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import torch

from services.worker.engine.attention import AttentionStep
from services.worker.engine.forward_meta import ForwardMeta, LayerGate, Segment, pages_for
from services.worker.engine.gpu_room import RoomWish
from services.worker.engine.model_runner import (
    NOTHING_TO_PROVE,
    ModelRunner,
    PoolSizer,
    pages_of,
    probe_tokens,
    warm_up,
)
from services.worker.engine.paged_step import AttentionBackend, PagedStep
from services.worker.engine.states.running import StateSlots
from services.worker.kv.device_pool import DevicePool
from services.worker.parallel.collectives import make_store
from services.worker.parallel.gates import TellingGate
from services.worker.parallel.group_lost import GroupLost
from services.worker.parallel.group_pool import GroupPool, PartOfPool, attach_part
from services.worker.parallel.kv_of_parts import KvOfParts
from services.worker.parallel.orders import (
    JoinGroup,
    LetGoHidden,
    MakePool,
    MeasureRoom,
    ProveHidden,
    RankLoaded,
    RankMeasured,
    RankProven,
    RankReady,
    RestoreRows,
    StartRank,
    step_order,
)
from services.worker.parallel.rank_model import RankModel
from services.worker.parallel.rank_restoring import RankRestoring, check_order
from services.worker.parallel.ranks import Launch, Ranks, launch_process
from services.worker.proving.device import group_proofs
from services.worker.proving.parts import COLLECTIVES
from services.worker.restore.hidden_page_source import HiddenPages
from services.worker.restore.projection import KvProjection
from services.worker.restore.refusals import HiddenStatesUnsupported, PiecesRefused
from shared.errors import InvariantViolated, OperatorError
from shared.lifecycle import EXIT_FAILED, Lifecycle
from shared.messages.base import pack_int32
from shared.messages.pools import KvGeometry


class GroupRunner:
    """What the worker asks of ``engine.model_runner.ModelRunner``, for paged steps. Not thread-safe."""

    def __init__(self, runner: ModelRunner, pool: GroupPool, ranks: Ranks, model: RankModel) -> None:
        """``runner`` computes rank 0's share, over the first part of ``pool``."""
        self._runner, self._ranks, self._model = runner, ranks, model
        self.pool: DevicePool = pool
        self.weight_bytes: list[int] = []  # Of the parameters of each rank.
        self.proofs = NOTHING_TO_PROVE  # Of the GPUs of all ranks together.
        self.max_context = runner.max_context
        self.vocab_size = runner.vocab_size
        self.eos_token_ids = runner.eos_token_ids
        self.model_bytes = runner.model_bytes  # Of this rank: the others read theirs meanwhile.
        self.lookup_obstacle = "sums over ranks round by how many rows there are, so proposals could change tokens"
        self._steps = 0
        self.mixes_adapters = False  # It serves none.
        self.launcher: None = None  # The other ranks are told the tokens of a step.
        self._restoring: RankRestoring | None = None

    @property
    def geometry(self) -> KvGeometry:
        return self.pool.geometry

    @property
    def model(self) -> Any:
        """Rank 0's share of the model."""
        return self._runner.model

    @property
    def state_slots(self) -> StateSlots:
        """See ``ModelRunner.state_slots``: every rank has the states of a request in the same slot."""
        return self._runner.state_slots

    @property
    def ranks(self) -> int:
        return self._model.share.ranks

    @property
    def parts(self) -> GroupPool:
        """The pool, for what moves its pages."""
        assert isinstance(self.pool, GroupPool)
        return self.pool

    @property
    def rank_pids(self) -> dict[int, int]:
        """Processes of the other ranks, by rank."""
        return self._ranks.pids

    @property
    def attention(self) -> AttentionBackend:
        raise InvariantViolated("a group computes paged steps only")

    def paged_step(self, meta: ForwardMeta) -> PagedStep:
        """Not to be had: see :meth:`run`."""
        raise InvariantViolated("a group computes paged steps only")

    def run(
        self, ids: torch.Tensor, positions: torch.Tensor, step: AttentionStep, last_rows: torch.Tensor
    ) -> torch.Tensor:
        """Not to be had: the other ranks could not be told what another kind of step does."""
        raise InvariantViolated("a group computes paged steps only")

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, meta: ForwardMeta, last_rows: torch.Tensor
    ) -> torch.Tensor:
        """See ``ModelRunner.forward``. Raises what the step's gate raises, GroupLost, and nothing else: a rank that
        fails in the middle of a step leaves the others in it.
        """
        self._steps += 1
        gate = None
        if meta.gate is not None:
            gate = TellingGate(meta.gate, self._steps, self.geometry.layers, self._ranks.tell)
        self._ranks.tell(step_order(self._steps, ids, positions, meta, last_rows))
        try:
            logits = self._runner.forward(ids, positions, replace(meta, gate=gate), last_rows)
        except GroupLost:
            raise
        except Exception as error:
            raise self._ranks.lose(f"step {self._steps}: {type(error).__name__}: {error}") from error
        if gate is not None:
            gate.settle()
        return logits

    def prove_projection(self, staging_bytes: int) -> KvProjection:
        """Return what knows the shape of hidden states and sees them in rank 0, once every rank has proven that its KV
        follows from them. ``staging_bytes`` of each rank's device hold shards of hidden states. Raises
        HiddenStatesUnsupported.
        """
        self._ranks.tell(ProveHidden(vocab_size=self.vocab_size, staging_bytes=staging_bytes))
        fault = ""
        try:
            self._restoring = self._model.restoring(self._runner, staging_bytes)
        except HiddenStatesUnsupported as error:
            fault = error.message
        faults = [fault, *(each.fault for each in self._ranks.collect(RankProven))]
        if self._restoring is None or any(faults):
            self._restoring = None
            raise HiddenStatesUnsupported(next(filter(None, faults)))
        return self._restoring.projection

    def rows_at_once(self, page_size: int) -> int:
        """See :meth:`RankRestoring.rows_at_once`; 0 where nothing is restored."""
        return 0 if self._restoring is None else self._restoring.rows_at_once(page_size)

    def restore(
        self, pages: HiddenPages, segment: Segment, recomputed: int, ids: Sequence[int], loads: LayerGate | None
    ) -> None:
        """Restore the segment's tokens, whole pages with these ``ids``, from ``pages``, in all ranks at once; the first
        ``recomputed`` layers from tokens.

        Raises PiecesRefused where a rank cannot trust its shard, what ``loads`` raises, and GroupLost.
        """
        if self._restoring is None:
            raise HiddenStatesUnsupported("this group cannot restore KV from hidden states")
        self._steps += 1
        geometry = pages.geometry
        order = RestoreRows(
            number=self._steps,
            handle=pages.handle,
            hidden_pages=pack_int32(pages.numbers),
            identities=pages.identities.tobytes(),
            recomputed=recomputed,
            start=segment.context,
            end=segment.length,
            pages=pack_int32(segment.pages[: pages_for(segment.length, geometry.page_size)]),
            ids=pack_int32(np.array(ids, dtype=np.int32)),
            waits=loads is not None,
        )
        check_order(order)
        gate = None
        if loads is not None:
            gate = TellingGate(loads, self._steps, self.geometry.layers, self._ranks.tell)
        first, last = segment.context // geometry.page_size, segment.length // geometry.page_size
        self._ranks.tell(order)
        try:
            fault = self._restoring.run(order, gate, KvOfParts(pages, self.parts.parts, segment.pages[first:last]))
        except GroupLost:
            raise
        except Exception as error:
            raise self._ranks.lose(f"restoration {self._steps}: {type(error).__name__}: {error}") from error
        if gate is not None:
            gate.settle()
        if fault:
            raise PiecesRefused(fault)

    def let_go_of_hidden(self) -> None:
        """Release a hidden pool that is gone in every rank."""
        if self._restoring is not None:
            self._restoring.let_go()
            self._ranks.tell(LetGoHidden())

    def settle(self) -> None:
        """See ``ModelRunner.settle``, of the pools of all ranks: a step ends with a sum over the ranks, which each
        rank joins behind its own last write. Raises GroupLost for what the device raises.
        """
        try:
            self._runner.settle()
        except GroupLost:
            raise
        except Exception as error:
            raise self._ranks.lose(f"step {self._steps}: {type(error).__name__}: {error}") from error

    def warm_up(self) -> None:
        """See ``model_runner.warm_up``."""
        warm_up(self)

    def on_lost(self, callback: Callable[[GroupLost], object]) -> None:
        """Call ``callback`` once, on any thread, when the group cannot compute any more."""
        self._ranks.on_lost(callback)

    def close(self) -> None:
        """End the ranks, then give all memory back."""
        self._ranks.close()
        if self._restoring is not None:
            self._restoring.close()
        self._model.close()
        self.pool.close()


def end_when_lost(runner: GroupRunner, life: Lifecycle) -> None:
    """Let a group that cannot compute any more take this process with it, which a supervisor starts anew. There is
    nothing to drain: what runs goes on at another worker.
    """
    loop = asyncio.get_running_loop()

    def end() -> None:
        life.hurrying.set()
        life.stop(EXIT_FAILED)

    def on_lost(_: GroupLost) -> None:
        # A loop that has ended meanwhile has nothing left to be told.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(end)

    runner.on_lost(on_lost)


def load_group(
    start: StartRank,
    *,
    device_kv_bytes: int | None,
    pages: int | None,
    sizer: PoolSizer | None = None,
    room: RoomWish | None = None,
    launch: Launch = launch_process,
) -> GroupRunner:
    """Load a model as ``start.ranks`` ranks and prove that the group serves it exactly. ``start`` is rank 0's order,
    without a port. ``pages``, ``device_kv_bytes`` and ``sizer`` are as in ``ModelRunner.load``, for the group as a
    whole; without any of them every rank finds out what its device has left of ``room``, and the least counts.
    ``launch`` starts the processes of the other ranks.

    Raises OperatorError with the reason why it cannot be served, naming the rank if it is not this one.
    """
    timeout_s = start.timeout_ms / 1e3
    with contextlib.ExitStack() as undo:
        store = make_store(timeout_s)
        starts = [msgspec.structs.replace(start, rank=rank, store_port=store.port) for rank in range(start.ranks)]
        ranks = Ranks(starts[1:], timeout_s=timeout_s, launch=launch)
        undo.callback(ranks.close)
        model = RankModel(starts[0])
        undo.callback(model.close)
        loaded = ranks.collect(RankLoaded)
        weights = [model.weight_bytes, *(each.weight_bytes for each in loaded)]
        proofs = group_proofs(model.proofs, [each.proofs for each in loaded])
        try:
            _meet(model, ranks, store, through_host=proofs.way(COLLECTIVES) == "through the host")
            count = _pages(model, ranks, device_kv_bytes=device_kv_bytes, pages=pages, sizer=sizer, room=room)
            group = _prove(model, ranks, undo, count)
        except OperatorError:
            raise
        except Exception as error:  # Of a collective, mostly: the rank that failed has told why.
            raise ranks.reason() or error from error
        undo.pop_all()
    group.weight_bytes, group.proofs = weights, proofs
    return group


def _meet(model: RankModel, ranks: Ranks, store: Any, *, through_host: bool) -> None:
    """All ranks join the collectives, once each has its weights."""
    ranks.tell(JoinGroup(through_host=through_host))
    model.join(store, through_host=through_host)


def _pages(
    model: RankModel,
    ranks: Ranks,
    *,
    device_kv_bytes: int | None,
    pages: int | None,
    sizer: PoolSizer | None,
    room: RoomWish | None,
) -> int:
    """Pages of the group's pool."""
    if pages is None and device_kv_bytes is None and sizer is None and room is not None:
        ranks.tell(
            MeasureRoom(fraction=room.fraction, tokens=room.tokens, rows=room.rows, reserve_bytes=room.reserve_bytes)
        )
        own = model.measure_room(room)
        return min([own, *(each.pages for each in ranks.collect(RankMeasured))])
    layout, planes = model.layout, model.layout.whole
    count = pages_of(model.model, planes, model.longest, pages=pages, device_kv_bytes=device_kv_bytes, sizer=sizer)
    # Bytes are those of all ranks, and several may keep the same.
    return count if pages is not None else count * planes.geometry.page_bytes // layout.group_page_bytes


def _prove(model: RankModel, ranks: Ranks, undo: contextlib.ExitStack, count: int) -> GroupRunner:
    """Make the pool of ``count`` pages in all ranks, and prove that the group computes what the model does."""
    layout = model.layout
    page_size = layout.whole.geometry.page_size
    tokens = probe_tokens(model.model, count, page_size, model.longest, has_states=bool(model.states))
    own = model.make_pool(count)
    undo.callback(own.close)
    ranks.tell(MakePool(pages=count, probe_tokens=tokens))
    ready = ranks.collect(RankReady)
    parts = [PartOfPool.of_rank(0, layout, own)]
    pool = GroupPool(layout.whole, parts, [own.handle(), *(each.for_cell for each in ready)])
    undo.callback(pool.close)
    for rank, each in enumerate(ready, start=1):
        pool.parts.append(PartOfPool.of_rank(rank, layout, attach_part(each.for_group)))
    expected = model.expect(tokens)
    runner = model.runner(own, expected.vocab_size)
    group = GroupRunner(runner, pool, ranks, model)
    expected.check(group.forward, pages=count, page_size=page_size)
    return group
