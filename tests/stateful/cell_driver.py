"""Everything that can be done to a model cell, as methods with plain arguments, and how it must end.

A hypothesis machine and seeded random walks share it. An ``index`` picks one of what there is.
"""

from __future__ import annotations

from typing import Any

import msgspec

from services.scheduler.core import Stamped, decode_state, encode_state, new_state, status, step
from services.scheduler.core.cache.eviction import POLICIES
from shared import codec
from shared.kept_texts import KeptTexts
from shared.messages import cell_events, requests, storage_events, worker_events
from shared.messages.cell_events import CellConfig
from tests.stateful.cell_model import CellModel, ModelStorage, ModelWorker, namespace
from tests.stateful.model_hidden import COSTS

TROUBLES = (
    "worker_dies",
    "worker_starts",
    "chunk_fails",
    "storage_dies",
    "storage_starts",
    "page_rots",
    "every_page_rots",
    "every_page_rots",
    "every_page_rots",
    "gateway_dies",
    "chunk_rots",
    "chunk_is_gone",
    "disk_is_gone",
    "neighbours_fail",
)
HIDDEN_TROUBLES = ("hidden_page_rots", "every_hidden_page_rots", "hidden_chunk_rots", "hidden_is_gone")
"""What else can happen where hidden states are kept."""

SPARSE_TROUBLES = ("sparse_reads_fail", "sparse_chunk_is_gone")
"""What else can happen where chunks are read in part."""

DRAINS = ("worker_drains", "drain_timer")
"""A worker is asked to end, and a part of its grace is over."""

NOISES = (
    "cancel",
    "timer",
    "fetch_timer",
    "fetch_timer",
    "submit_again",
    "old_message",
    "old_message",
    "restart",
    "resume",
)
GATEWAYS = ("gateway-a", "gateway-b")

VARIANTS: dict[str, Any] = {
    "policy": tuple(POLICIES),
    "admission": ("all", "all", "all", "selective", "selective", "none"),
    "admission_frequency": (1, 2),
    "promotion": ("off", "hotness", "hotness", "recency", "frequency", "depth"),
    "promotion_tokens": (0, 16, 8192),
    "schedule": ("balanced", "balanced", "lpm", "fcfs"),
    "defer_tokens": (0, 2, 2, 20),
    "load_compute_ratio": (0.0, 0.5),
    "fair_share": (True, True, False),
    "max_queued_per_tenant": (0, 0, 2),
    "aging_requests": (1, 8),
    "bubble_filling": (True, False),
    "prefetch_wait": ("best_effort", "deadline", "deadline", "deadline", "full"),
    "prefetch_fraction": (0.5, 0.5, 1.0, 0.1),
    "prefetch_deadline_ms": (2_000, 1),
    "min_prefetch_tokens": (1, 1, 100),
    "neighbour_loads": (True, True, False),
    "host_writes": ("on_evict", "on_evict", "through", "selective"),
    "copies_at_rest": (False, True),
    "disk_writes": ("through", "through", "selective", "on_evict", "off"),
}
"""Settings by which decisions differ, and what a random cell may have; what stands here twice is twice as likely."""

STEPS_A_CHECK = 16
"""Once nothing is done to a cell any more it mostly computes, token after token, and what a step breaks stays broken:
the end of a walk checks the invariants after so many steps, instead of each.
"""

# A join that comes again for an incarnation that is gone would be a process that rose from the dead.
_NEVER_REPEATED = (worker_events.WorkerJoined, storage_events.StorageJoined)


def as_bytes(output: object) -> bytes:
    """An output in a form that compares by the byte."""
    return codec.encode(output) if isinstance(output, msgspec.Struct) else repr(output).encode()


def replay(log: list[Stamped], cut: int) -> tuple[list[list[bytes]], bytes]:
    """Outputs of a whole log, and the last state, by a fold that was stopped after ``cut`` inputs and restored."""
    state = new_state()
    outputs = []
    for number, stamped in enumerate(log):
        if number == cut:
            data = encode_state(state)
            state = decode_state(data)
            assert encode_state(state) == data
        outputs.append([as_bytes(output) for output in step(state, stamped)])
    return outputs, encode_state(state)


def page_of(kind: int, size: int) -> list[int]:
    """Tokens of a page. Those of kind 1 go on from what fits into three bytes to what needs four."""
    return [kind * (2**24 - 8) + place for place in range(size)]


class CellDriver:
    """A model cell, with one storage or none."""

    def __init__(
        self,
        config: CellConfig,
        *,
        page_size: int,
        workers: int,
        pages: int,
        host_pages: int,
        disk_chunks: int = 0,
        has_remote: bool = False,
        hidden_pages: int = 0,
        keeps_sparse: bool = False,
        kept_tokens: int = 0,
        takes_compact: bool = False,
    ) -> None:
        self.cell = CellModel(config, page_size=page_size)
        self.cell.kept_tokens, self.cell.takes_compact = kept_tokens, takes_compact
        self.cell.restoration = COSTS if hidden_pages else None
        self.hidden_pages, self.keeps_sparse = hidden_pages, keeps_sparse
        self.pages, self.host_pages = pages, host_pages
        self.disk_chunks, self.has_remote = disk_chunks, has_remote
        if host_pages:
            self._add_storage()
        for number in range(workers):
            self.cell.add_worker(f"worker-{number}", pages=pages)

    def submit(self, shape: list[int], tail: int, max_tokens: int, **options: object) -> None:
        """A prompt of whole pages of few kinds, so that prefixes are shared often, and a few tokens more."""
        size = self.cell.page_size
        tokens = [token for kind in shape for token in page_of(kind, size)] + [7] * min(tail, size)
        ratio = options.pop("ratio", None)
        if ratio is not None:
            options["importance"] = requests.Importance(ratio=ratio, recent_tokens=len(shape))  # type: ignore[arg-type]
        options["key_id"] = "5a" * 16 if options.get("salt") else ""
        self.cell.submit(
            tokens,
            max_tokens=max_tokens * (size // 4 + 1),
            seed=len(self.cell.submitted) % 3,
            **options,  # type: ignore[arg-type]
        )

    # Work goes on.

    def everything_moves(self, rounds: int) -> None:
        for _ in range(rounds):
            self.cell.round()

    def worker_steps(self, index: int, steps: int, finishes_before_batch_done: bool) -> None:
        if self.cell.workers:
            worker = self._worker(index)
            worker.finishes_before_batch_done = finishes_before_batch_done
            for _ in range(steps):
                worker.step()

    def worker_promotes(self, index: int, is_ok: bool) -> None:
        if self.cell.workers:
            self._worker(index).promote(is_ok=is_ok)

    def worker_is_heard(self, index: int, events: int) -> None:
        if self.cell.workers:
            worker = self._worker(index)
            for _ in range(events):
                self.cell.deliver(worker)

    def storage_steps(self, is_heard: bool, backups_succeed: bool) -> None:
        storage = self.cell.storages.get("storage")
        if storage is not None:
            storage.step(backups_succeed=backups_succeed, saves_succeed=backups_succeed)
            if is_heard:
                self.cell.deliver(storage)

    def storage_fetches(self, index: int, chunks: int, is_heard: bool, is_ok: bool) -> None:
        storage = self.cell.storages.get("storage")
        if storage is not None:
            storage.fetch(index=index, chunks=chunks, error="" if is_ok else "made to fail")
            if is_heard:
                self.cell.deliver(storage)

    # Things go wrong.

    def trouble(self, kind: str, index: int) -> None:
        cell = self.cell
        storage = cell.storages.get("storage")
        if kind == "worker_dies" and cell.workers:
            cell.lose_worker(self._worker(index).worker_id)
        elif kind == "worker_starts":
            name = f"worker-{index % 2}"
            cell.workers.pop(name, None)
            cell.add_worker(name, pages=self.pages + index % 3)
        elif kind == "worker_drains" and cell.workers:
            worker = self._worker(index)
            if not worker.is_draining:
                worker.drain(grace_ms=(0, 1_000)[index % 2])
        elif kind == "drain_timer":
            waits = [name for name in cell.timers if name.startswith("drain.")]
            if waits:
                cell.fire(waits[index % len(waits)])
        elif kind == "chunk_fails" and cell.workers:
            worker = self._worker(index)
            if worker.requests:
                worker.fail_next_chunk_of = list(worker.requests)[index % len(worker.requests)]
        elif kind == "storage_dies" and storage is not None:
            cell.lose_storage("storage")
        elif kind == "storage_starts" and self.host_pages:
            cell.storages.pop("storage", None)
            self._add_storage()
        elif kind == "page_rots" and storage is not None and storage.pool is not None and storage.pool.memory:
            memory = storage.pool.memory
            memory[list(memory)[index % len(memory)]].is_corrupt = True
        elif kind == "every_page_rots" and storage is not None and storage.pool is not None:
            for page in storage.pool.memory.values():
                page.is_corrupt = True
        elif kind == "neighbours_fail" and cell.workers:
            worker = self._worker(index)
            worker.fails_neighbour_loads = not worker.fails_neighbour_loads
        elif kind == "chunk_rots" and storage is not None and storage.disk.chunks:
            chunks = list(storage.disk.chunks.values())
            chunks[index % len(chunks)][0].is_corrupt = True
        elif kind == "chunk_is_gone" and storage is not None and storage.disk.chunks:
            del storage.disk.chunks[list(storage.disk.chunks)[index % len(storage.disk.chunks)]]
        elif kind == "disk_is_gone" and storage is not None:
            storage.disk.chunks.clear()
        elif kind == "sparse_reads_fail" and cell.workers:
            worker = self._worker(index)
            worker.fails_sparse_reads = not worker.fails_sparse_reads
        elif kind == "sparse_chunk_is_gone" and storage is not None and storage.sparse_disk:
            del storage.sparse_disk[list(storage.sparse_disk)[index % len(storage.sparse_disk)]]
        elif kind in HIDDEN_TROUBLES and storage is not None:
            self._trouble_with_hidden(kind, index, storage)
        elif kind == "gateway_dies":
            cell.feed(cell_events.GatewayLost(gateway_id=GATEWAYS[index % 2]))

    def texts_are_lost(self, index: int) -> None:
        """Against all promises a worker forgets what it was to keep."""
        if self.cell.workers:
            self._worker(index).texts = KeptTexts()

    def _trouble_with_hidden(self, kind: str, index: int, storage: ModelStorage) -> None:
        memory = storage.hidden_pool.memory if storage.hidden_pool is not None else {}
        chunks = storage.hidden_disk.chunks
        if kind == "hidden_page_rots" and memory:
            memory[list(memory)[index % len(memory)]].is_corrupt = True
        elif kind == "every_hidden_page_rots":
            for page in memory.values():
                page.is_corrupt = True
        elif kind == "hidden_chunk_rots" and chunks:
            chunks[list(chunks)[index % len(chunks)]][0].is_corrupt = True
        elif kind == "hidden_is_gone":
            chunks.clear()

    def noise(self, kind: str, index: int) -> None:
        cell = self.cell
        known = list(cell.state.requests)
        if kind == "cancel" and known:
            cell.cancel(known[index % len(known)])
        elif kind == "timer" and cell.timers:
            cell.fire(list(cell.timers)[index % len(cell.timers)])
        elif kind == "fetch_timer":
            kinds = ("prefetch.",) if index % 2 else ("prefetch.", "fetch.")
            waits = [name for name in cell.timers if name.startswith(kinds)]
            if waits:
                cell.fire(waits[index % len(waits)])
        elif kind == "lease_timer":
            waits = [name for name in cell.timers if name.startswith("lease.")]
            if waits:
                cell.fire(waits[index % len(waits)])
        elif kind == "cache_lease_timer":
            waits = [name for name in cell.timers if name.startswith("cache_lease.")]
            if waits:
                cell.fire(waits[index % len(waits)])
        elif kind == "submit_again" and known:
            cell.submit([1], request_id=known[index % len(known)], gateway_id=GATEWAYS[index % 2])
        elif kind == "old_message":
            self._repeat_old_message(index)
        elif kind == "restart":
            cell.state = decode_state(encode_state(cell.state))
        elif kind == "resume":
            cell.answer_resume(GATEWAYS[index % 2])

    def _repeat_old_message(self, index: int) -> None:
        old = [item.input for item in self.cell.log if not isinstance(item.input, _NEVER_REPEATED)]
        message = old[-1 - index % len(old)]
        if isinstance(message, requests.SubmitRequest) and message != self.cell.submitted[message.request_id]:
            return  # It was refused because of the original, which may be over by now.
        if not isinstance(message, cell_events.TimerFired) or message.timer_id not in self.cell.timers:
            self.cell.feed(message)

    def flush(self, tiers: tuple[str, ...], salt: str | None) -> None:
        name = "" if salt is None else namespace(salt)
        self.cell.feed(cell_events.FlushCache(call_id="call", tiers=tiers, namespace=name))

    def configure(self, host_tier: bool, max_batch_tokens: int, **variant: object) -> None:
        config = CellConfig(
            host_tier=host_tier,
            max_batch_tokens=max_batch_tokens,
            lease_tokens=4,
            **variant,  # type: ignore[arg-type]
        )
        self.cell.feed(cell_events.CellConfigured(config=config))

    def _add_storage(self) -> None:
        self.cell.add_storage(
            "storage",
            pages=self.host_pages,
            disk_chunks=self.disk_chunks,
            has_remote=self.has_remote,
            hidden_pages=self.hidden_pages,
            keeps_sparse=self.keeps_sparse,
        )

    def _worker(self, index: int) -> ModelWorker:
        return list(self.cell.workers.values())[index % len(self.cell.workers)]

    # The end.

    def finish(self) -> None:
        """Let everything end, and check that nothing is left, lost or different in a replay."""
        cell = self.cell
        if not cell.workers:
            cell.add_worker("worker-0", pages=self.pages)
        cell.drain(steps_a_check=STEPS_A_CHECK)
        if not cell.workers:  # The last one was on its way out.
            cell.add_worker("worker-0", pages=self.pages)
            cell.drain(steps_a_check=STEPS_A_CHECK)
        for timer_id in list(cell.state.late_reads):
            cell.fire(timer_id)
        while leases := list(cell.state.cache_leases.leases.values()):
            cell.fire(leases[0].timer_id)
        assert not cell.state.cache_leases.nodes
        assert not cell.state.cache_leases.accounts
        assert not cell.state.cache_leases.pending
        assert not cell.state.requests
        assert not cell.state.transfers
        assert not cell.state.fetches
        assert not cell.state.saves
        assert not cell.state.leases
        assert not cell.state.hidden_saves
        assert not cell.state.hidden_fetches

        cell.feed(cell_events.FlushCache(call_id="last"))
        while cell.timers.keys() & {"flush", "strike"}:
            cell.round()
        for pool in status(cell.state, "model").pools:
            assert pool.free == pool.total
        assert cell.state.tree.nodes == {}

        outputs, state = replay(cell.log, len(cell.log) // 2)
        assert outputs == [[as_bytes(output) for output in each] for each in cell.outputs]
        assert state == encode_state(cell.state)
