"""A simulated cell whose every step is watched: what its core says must be what a real cell could carry out."""

from __future__ import annotations

from typing import Any

from services.scheduler.core import CellState, SetTimer, Stamped, check_invariants, pending_timers
from shared.messages import storage_events, storage_plans, worker_events
from shared.messages import worker_plans as plans
from shared.messages.base import unpack_int32
from thermocline.simulate.__main__ import parser, prepare
from thermocline.simulate.simulation import Simulation


def simulation(*arguments: str) -> Simulation:
    """What the command line would run."""
    return prepare(parser().parse_args(list(arguments)))


class Watch:
    """Checks the protocol between core, workers and storages, and the core's invariants now and then."""

    def __init__(self, watched: Simulation, *, invariants_every: int) -> None:
        self.watched = watched
        self.invariants_every = invariants_every
        state = watched.cell.state  # Members joined before anybody could watch.
        self.plans: dict[str, int] = {
            **{name: worker.number for name, worker in state.workers.items()},
            **{name: storage.number for name, storage in state.storages.items()},
        }
        self.batches: set[tuple[str, int]] = set()
        self.promotions: set[tuple[str, int]] = set()
        self.transfers: set[int] = set()
        self.saves: set[int] = set()
        self.fetches: set[int] = set()
        self.admitted: dict[str, int] = {}
        self.finished: set[str] = set()
        self.last_ns = 0
        watched.cell.watch = self.see

    @property
    def state(self) -> CellState:
        return self.watched.cell.state

    def see(self, stamped: Stamped, outputs: list[Any]) -> None:
        assert stamped.time_ns >= self.last_ns, "time went back"
        self.last_ns = stamped.time_ns
        self._hear(stamped.input)
        for output in outputs:
            if isinstance(output, plans.WorkerPlan | storage_plans.StoragePlan):
                self._plan(output)
            elif isinstance(output, SetTimer):
                assert output.at_ns > stamped.time_ns
        if stamped.seq % self.invariants_every == 0:
            check_invariants(self.state)

    def _hear(self, message: Any) -> None:
        match message:
            case worker_events.BatchDone():
                self.batches.remove((message.worker_id, message.plan))
                assert not message.failed
                assert message.stall_us <= message.compute_us
            case worker_events.PagesPromoted():
                self.promotions.remove((message.worker_id, message.promotion_id))
            case storage_events.BackupDone():
                self.transfers.remove(message.transfer_id)
            case storage_events.ChunksSaved():
                self.saves.remove(message.save_id)
            case storage_events.ChunksFetched():
                assert message.fetch_id in self.fetches, "a fetch that nobody ordered"
                if message.is_over:
                    self.fetches.remove(message.fetch_id)
            case worker_events.RequestFinished():
                assert message.request_id not in self.finished, "finished twice"
                self.finished.add(message.request_id)

    def _plan(self, plan: Any) -> None:
        target = plan.worker_id if isinstance(plan, plans.WorkerPlan) else plan.storage_id
        assert plan.number == self.plans.get(target, 0) + 1, "a plan is missing"
        self.plans[target] = plan.number
        match plan.order:
            case plans.AdmitRequest():
                assert plan.order.request_id not in self.finished
                assert plan.order.attempt > self.admitted.get(plan.order.request_id, 0)
                self.admitted[plan.order.request_id] = plan.order.attempt
                pages = unpack_int32(plan.order.pages)
                assert len(set(pages)) == len(pages), "a page is in one table twice"
            case plans.RunBatch():
                tokens = sum(chunk.end - chunk.start for chunk in plan.order.chunks)
                assert 0 < tokens <= self.state.config.max_batch_tokens
                self.batches.add((target, plan.number))
            case plans.PromotePages():
                self.promotions.add((target, plan.order.promotion_id))
            case storage_plans.BackupPages():
                self.transfers.add(plan.order.transfer_id)
            case storage_plans.SaveChunks():
                self.saves.add(plan.order.save_id)
            case storage_plans.FetchChunks():
                self.fetches.add(plan.order.fetch_id)

    def check_end(self) -> None:
        """Everything was answered, and at rest every page is free or cached."""
        check_invariants(self.state)
        assert not self.batches
        assert not self.promotions
        assert not self.transfers
        assert not self.saves
        assert not self.fetches
        assert not self.state.requests
        assert not pending_timers(self.state)
        figures = self.watched.cell.figures
        assert figures.finished == len(self.finished) == figures.submitted - sum(figures.failed.values())
        for worker in self.state.workers.values():
            assert worker.pool.free + worker.pool.cached == worker.pool.total
            assert worker.pool.locked == 0
        for storage in self.state.storages.values():
            assert storage.pool is not None
            assert storage.pool.free + storage.pool.cached == storage.pool.total
