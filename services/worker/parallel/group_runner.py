"""The runner of rank 0: its steps are those of the whole model, and this process computes a share of each."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from services.worker.importance.important_prefix import ImportantPrefix
from services.worker.importance.kept_kv import KeptInPages
from services.worker.kv.device_pool import DevicePool
from services.worker.parallel.choices import TellingChoices
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
    PrefixInPart,
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
    """The group in place of ``engine.model_runner.ModelRunner``, for paged steps alone. Not thread-safe."""

    def __init__(self, runner: ModelRunner, pool: GroupPool, ranks: Ranks, model: RankModel) -> None:
        """``runner`` computes rank 0's share, over the first part of ``pool``."""
        self._runner, self._ranks, self._model = runner, ranks, model
        self.pool: DevicePool = pool
        self.weight_bytes: list[int] = []  # Bytes of each rank's parameters.
        self.proofs = NOTHING_TO_PROVE  # Those of all ranks' GPUs together.
        self.max_context = runner.max_context
        self.vocab_size = runner.vocab_size
        self.eos_token_ids = runner.eos_token_ids
        self.model_bytes = runner.model_bytes  # This rank's: the others read theirs at the same time.
        self.lookup_obstacle = "sums over ranks round by how many rows there are, so proposals could change tokens"
        self._steps = 0
        self.mixes_adapters = False  # A group serves no adapters.
        self.launcher: None = None  # The other ranks are told the tokens of a step.
        self._restoring: RankRestoring | None = None
        self._prefixes = model.prefixes(runner)
        self._numbers: dict[ImportantPrefix, int] = {}  # Of prefixes that the other ranks know.
        self._prefixes_opened = 0
        self._ended: list[int] = []  # Numbers of prefixes of whose end the other ranks are not told yet.

    @property
    def geometry(self) -> KvGeometry:
        """Sizes of whole pages, with the heads of all ranks."""
        return self.pool.geometry

    @property
    def model(self) -> Any:
        """Rank 0's share of the Hugging Face model."""
        return self._runner.model

    @property
    def state_slots(self) -> StateSlots:
        """Slots for layer states within pages, see ``ModelRunner``: a request has the same slot in all ranks."""
        return self._runner.state_slots

    @property
    def ranks(self) -> int:
        """Number of ranks, this one included."""
        return self._model.share.ranks

    @property
    def parts(self) -> GroupPool:
        """The pool, for movers of its pages."""
        assert isinstance(self.pool, GroupPool)
        return self.pool

    @property
    def rank_pids(self) -> dict[int, int]:
        """Process ids of the other ranks, by rank."""
        return self._ranks.pids

    @property
    def attention(self) -> AttentionBackend:
        """Not available: raises InvariantViolated, because a group computes paged steps only."""
        raise InvariantViolated("a group computes paged steps only")

    def paged_step(self, meta: ForwardMeta) -> PagedStep:
        """Raise InvariantViolated, see :meth:`run`."""
        raise InvariantViolated("a group computes paged steps only")

    def run(
        self, ids: torch.Tensor, positions: torch.Tensor, step: AttentionStep, last_rows: torch.Tensor
    ) -> torch.Tensor:
        """Raise InvariantViolated: no order describes other steps to the other ranks."""
        raise InvariantViolated("a group computes paged steps only")

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, meta: ForwardMeta, last_rows: torch.Tensor
    ) -> torch.Tensor:
        """Compute a step in all ranks, see ``ModelRunner.forward``.

        Raises what the step's gate raises, GroupLost, and nothing else: a rank that fails in the middle of a step
        leaves the others in it.
        """
        return self.forward_in_part(ids, positions, meta, last_rows, {})

    def forward_in_part(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        meta: ForwardMeta,
        last_rows: torch.Tensor,
        prefixes: Mapping[int, ImportantPrefix],
    ) -> torch.Tensor:
        """Compute a step in which segments of ``meta`` attend over a part of their prefixes, by a segment's number.

        What layers choose is kept in pages of the group's pool (``KeptInPages``). Raises SelectionFailed, too, for a
        prefix that cannot be chosen or read; see ``importance_step.ImportanceStep``.
        """
        self._steps += 1
        gate = None
        if meta.gate is not None:
            gate = TellingGate(meta.gate, self._steps, self.geometry.layers, self._ranks.tell)
        in_part = tuple(self._in_part(segment, prefix) for segment, prefix in prefixes.items())
        order = step_order(self._steps, ids, positions, meta, last_rows, in_part=in_part, ended=self._ended)
        self._ended = []
        by_number = {self._numbers[prefix]: prefix for prefix in prefixes.values()}
        choices = TellingChoices(self._steps, by_number, gate, self._ranks.tell)
        self._ranks.tell(order)
        with self._losing(f"step {self._steps}"):
            meta = replace(meta, gate=gate)
            logits = self._prefixes.forward(order, ids, positions, meta, last_rows, choices.choose)
        if gate is not None:
            gate.settle()
        choices.settle()
        return logits

    def let_go_of_prefix(self, prefix: ImportantPrefix) -> None:
        """Forget a prefix whose request has ended; the other ranks are told with the next step."""
        number = self._numbers.pop(prefix, None)
        if number is not None:
            self._ended.append(number)

    def prove_projection(self, staging_bytes: int) -> KvProjection:
        """Prove in every rank that its KV follows from hidden states, and return rank 0's projection.

        ``staging_bytes`` of each rank's device hold shards of hidden states. Raises HiddenStatesUnsupported.
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
        """Return how many tokens are restored at once, see :class:`RankRestoring`; 0 where nothing is restored."""
        return 0 if self._restoring is None else self._restoring.rows_at_once(page_size)

    def restore(
        self, pages: HiddenPages, segment: Segment, recomputed: int, ids: Sequence[int], loads: LayerGate | None
    ) -> None:
        """Restore the segment's tokens from ``pages`` in all ranks at once.

        The tokens are whole pages with these ``ids``. The first ``recomputed`` layers are restored from tokens. Raises
        PiecesRefused where a rank cannot trust its shard, what ``loads`` raises, and GroupLost.
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
        with self._losing(f"restoration {self._steps}"):
            fault = self._restoring.run(order, gate, KvOfParts(pages, self.parts.parts, segment.pages[first:last]))
        if gate is not None:
            gate.settle()
        if fault:
            raise PiecesRefused(fault)

    def let_go_of_hidden(self) -> None:
        """Release, in every rank, a hidden pool that has ended."""
        if self._restoring is not None:
            self._restoring.let_go()
            self._ranks.tell(LetGoHidden())

    def settle(self) -> None:
        """Return when the pools of all ranks hold what steps have written, see ``ModelRunner.settle``.

        A step ends with a sum over the ranks, which each rank joins after its own last write. Raises GroupLost for
        errors of the device.
        """
        with self._losing(f"step {self._steps}"):
            self._runner.settle()

    def warm_up(self) -> None:
        """Run a prefill and decode steps in all ranks, see ``model_runner.warm_up``."""
        warm_up(self)

    def on_lost(self, callback: Callable[[GroupLost], object]) -> None:
        """Call ``callback`` once, on any thread, when the group cannot compute any more."""
        self._ranks.on_lost(callback)

    def close(self) -> None:
        """End the ranks, then free all memory."""
        self._ranks.close()
        if self._restoring is not None:
            self._restoring.close()
        self._model.close()
        self.pool.close()

    def _in_part(self, segment: int, prefix: ImportantPrefix) -> PrefixInPart:
        """Return the order for a prefix over which a segment attends; a new prefix gets a number."""
        assert isinstance(prefix.kept, KeptInPages)
        if prefix not in self._numbers:
            self._prefixes_opened += 1
            self._numbers[prefix] = self._prefixes_opened
        return PrefixInPart(
            number=self._numbers[prefix],
            segment=segment,
            start=prefix.start,
            end=prefix.end,
            pages=pack_int32(prefix.kept.pages),
        )

    @contextlib.contextmanager
    def _losing(self, what: str) -> Iterator[None]:
        """Lose the group where ``what`` fails in this rank, as the others stay in it."""
        try:
            yield
        except GroupLost:
            raise
        except Exception as error:
            raise self._ranks.lose(f"{what}: {type(error).__name__}: {error}") from error


def end_when_lost(runner: GroupRunner, life: Lifecycle) -> None:
    """End this process when its group cannot compute any more; a supervisor starts it again.

    There is nothing to drain: its requests continue at another worker.
    """
    loop = asyncio.get_running_loop()

    def end() -> None:
        life.hurrying.set()
        life.stop(EXIT_FAILED)

    def on_lost(_: GroupLost) -> None:
        # The loop may have ended meanwhile.
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
    """Load a model as ``start.ranks`` ranks and prove that the group serves it exactly.

    ``start`` is rank 0's order, without a port. ``pages``, ``device_kv_bytes`` and ``sizer`` are as in
    ``ModelRunner.load``, for the group as a whole; without any of them every rank measures what its device has left of
    ``room``, and the least counts. ``launch`` starts the processes of the other ranks.

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
        except Exception as error:  # Mostly of a collective: the rank that failed has reported why.
            raise ranks.reason() or error from error
        undo.pop_all()
    group.weight_bytes, group.proofs = weights, proofs
    return group


def _meet(model: RankModel, ranks: Ranks, store: Any, *, through_host: bool) -> None:
    """Have all ranks join the collectives, once each has its weights."""
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
    """Return the pages of the group's pool."""
    if pages is None and device_kv_bytes is None and sizer is None and room is not None:
        ranks.tell(
            MeasureRoom(fraction=room.fraction, tokens=room.tokens, rows=room.rows, reserve_bytes=room.reserve_bytes)
        )
        own = model.measure_room(room)
        return min([own, *(each.pages for each in ranks.collect(RankMeasured))])
    layout, planes = model.layout, model.layout.whole
    count = pages_of(
        model.model,
        planes,
        model.longest,
        lambda pool: model.runner(pool, vocab_size=0),
        pages=pages,
        device_kv_bytes=device_kv_bytes,
        sizer=sizer,
    )
    # Bytes are those of all ranks, and several may keep copies of the same.
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
