"""Two real schedulers on the in-process bus under virtual time, one worker and one gateway, and inputs that are poison.

The core raises for an input that is poison, half way through, wherever it is folded. A scheduler that ends by that is
started again. The worker computes nothing and answers at once; given up, it joins again as another incarnation.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from services.scheduler import core
from services.scheduler.config import SchedulerConfig
from services.scheduler.fold import StepFailed
from services.scheduler.shell import Shell
from shared import subjects
from shared.bus.protocol import Delivery, StreamLimits
from shared.codec import Input, decode, decode_published, encode
from shared.lifecycle import Lifecycle
from shared.membership import Listing
from shared.messages.base import pack_int32
from shared.messages.gateway_notices import GatewayNotice, RequestFailed, ResumeNeeded
from shared.messages.requests import CancelRequest, ResumeRequest
from shared.messages.status import CellStatus, Heartbeat, Kind
from shared.messages.worker_events import BatchDone, RequestFinished
from shared.messages.worker_plans import AbortRequest, AdmitRequest, RunBatch, WorkerPlan
from tests.memory_bus import MemoryBroker
from tests.scripted_cell import START_NS, submit, worker_joined

GATEWAY, WORKER = "gw", "w1"


class Poison:
    """The first input of each of these types from that sequence on. All who fold come to the same ones, in order."""

    def __init__(self, wanted: list[tuple[type[Input], int]], monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: dict[int, Input] = {}
        self._wanted = list(wanted)
        self._step = core.step
        monkeypatch.setattr(core, "step", self.step)

    def step(self, state: core.CellState, stamped: core.Stamped) -> list[core.Output]:
        """As the core's, but for poison it raises behind a change of the state."""
        for kind, from_seq in self._wanted:
            if isinstance(stamped.input, kind) and stamped.seq >= from_seq and stamped.seq not in self.found:
                self._wanted.remove((kind, from_seq))
                self.found[stamped.seq] = stamped.input
                break
        if stamped.seq in self.found:
            state.last_seq, state.epoch = stamped.seq, 10_000
            raise KeyError("poisoned")
        return self._step(state, stamped)


class Scheduler:
    """A scheduler and its supervisor: what ends by a failed step is started again after ``restart_s``."""

    def __init__(self, cell: PoisonedCell, name: str, restart_s: float) -> None:
        self.deaths = 0
        self._cell, self._name, self._restart_s = cell, name, restart_s
        self.shell = self._new_shell()
        self.running = asyncio.create_task(self._run())

    def _new_shell(self) -> Shell:
        bus = self._cell.broker.connect(self._name)
        config = SchedulerConfig(id=self._name, check_invariants_every=7, snapshot_every_inputs=40)
        return Shell(
            bus,
            config,
            f"{self._name}-{self.deaths}",
            release="this one",
            wall_clock_ns=self._cell.wall_ns,
            monotonic_ns=self._cell.monotonic_ns,
        )

    async def _run(self) -> None:
        while True:
            try:
                await self.shell.run(Lifecycle())
            except StepFailed:
                self.deaths += 1
                await asyncio.sleep(self._restart_s)
                self.shell = self._new_shell()

    @property
    def state(self) -> core.CellState | None:
        """What it has folded; None while it restores."""
        restored = self.shell._follower.restored
        return restored.fold.state if restored is not None else None


class PoisonedCell:
    """Everything that there is. ``outcomes`` says how each request ended: "finished", or the code of its error."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.broker = MemoryBroker(clock=self.wall_ns)
        self.bus = self.broker.connect("others")
        self.outcomes: dict[str, str] = {}
        self.schedulers: list[Scheduler] = []
        self.lives = 0  # Of the worker.
        self._listing = Listing()
        self._joined_seq = 0
        self._admitted: dict[str, AdmitRequest] = {}
        self._heard: dict[str, int] = {}  # Number of the last output, by incarnation of the target.
        self._tasks: list[asyncio.Task[None]] = []

    def monotonic_ns(self) -> int:
        return int(asyncio.get_running_loop().time() * 1e9)

    def wall_ns(self) -> int:
        return START_NS + self.monotonic_ns()

    async def start(self) -> None:
        """Both schedulers, the worker and the gateway."""
        await self.bus.ensure_streams(StreamLimits())
        self.schedulers = [Scheduler(self, name, self.chance.uniform(0.1, 2.0)) for name in ("first", "second")]
        await self.bus.subscribe(subjects.STATUS, self._see_status)
        await self._join()
        for work in (self._obey, self._hear, self._beat):
            self._tasks.append(asyncio.create_task(work()))

    async def load(self, requests: int) -> None:
        """Requests with shared prefixes, one after the other; some are cancelled."""
        prefixes = [[self.chance.randrange(1000) for _ in range(48)] for _ in range(3)]
        for number in range(requests):
            tail = [self.chance.randrange(1000) for _ in range(self.chance.randrange(1, 60))]
            request_id = f"r{number}"
            await self._tell(subjects.request_input(GATEWAY), submit(request_id, self.chance.choice(prefixes) + tail))
            if self.chance.random() < 0.1:
                await self._tell(
                    subjects.request_input(GATEWAY), CancelRequest(request_id=request_id, gateway_id=GATEWAY)
                )
            await asyncio.sleep(self.chance.uniform(0.0, 0.05))

    async def rest(self, requests: int, timeout_s: float = 120.0) -> None:
        """Wait until every request has ended and both schedulers know that."""
        async with asyncio.timeout(timeout_s):
            while not (len(self.outcomes) == requests and all(map(self._is_idle, self.schedulers))):
                await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """End all of it."""
        tasks = [*self._tasks, *(scheduler.running for scheduler in self.schedulers)]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.result()

    def _is_idle(self, scheduler: Scheduler) -> bool:
        last_seq = self.broker.stream(subjects.INPUTS_STREAM).last_seq
        state = scheduler.state
        return state is not None and not state.requests and scheduler.shell._follower.position == last_seq

    async def _tell(self, subject: str, message: Input) -> None:
        await self.bus.append(subject, encode(message))

    # -- the worker ---------------------------------------------------------------------------------------------

    @property
    def _incarnation(self) -> str:
        return f"life-{self.lives}"

    async def _join(self) -> None:
        self.lives += 1
        self._admitted.clear()
        self._listing, self._joined_seq = Listing(), 0
        joined = encode(worker_joined(WORKER, self._incarnation))
        self._joined_seq = await self.bus.append(subjects.worker_input(WORKER), joined)

    async def _see_status(self, delivery: Delivery) -> None:
        status = decode(delivery.data, CellStatus)
        is_listed = any(worker.incarnation == self._incarnation for worker in status.workers)
        if self._listing.see(is_listed=is_listed, epoch=status.epoch, seq=status.seq, stored_seq=self._joined_seq):
            await self._join()

    async def _obey(self) -> None:
        """Do each plan once, in order."""
        async for stored in self.bus.follow(subjects.OUTPUTS_STREAM, subject=subjects.worker_output(WORKER)):
            plan = decode_published(stored.data)
            assert isinstance(plan, WorkerPlan)
            if plan.incarnation == self._incarnation and self._is_new(plan.incarnation, plan.number):
                for answer in self._answers(plan):
                    await self._tell(subjects.worker_input(WORKER), answer)

    def _is_new(self, target: str, number: int) -> bool:
        last = self._heard.get(target, 0)
        assert number <= last + 1, f"{target} was not told output {last + 1}"
        self._heard[target] = max(last, number)
        return number > last

    def _answers(self, plan: WorkerPlan) -> list[Input]:
        order = plan.order
        place: dict[str, Any] = {"worker_id": plan.worker_id, "incarnation": plan.incarnation}
        if isinstance(order, AdmitRequest):
            self._admitted[order.request_id] = order
        elif isinstance(order, AbortRequest) and self._admitted.pop(order.request_id, None) is not None:
            self.outcomes.setdefault(order.request_id, "cancelled")
            return [
                RequestFinished(
                    **place, request_id=order.request_id, attempt=order.attempt, reason="cancelled", output=b""
                )
            ]
        elif isinstance(order, RunBatch):
            chunks = [chunk for chunk in order.chunks if chunk.request_id in self._admitted]
            ended = [c for c in chunks if c.end == len(self._admitted[c.request_id].tokens) // 4]
            return [
                BatchDone(**place, plan=plan.number),
                *(self._finish(place, chunk.request_id, chunk.attempt) for chunk in ended),
            ]
        return []

    def _finish(self, place: dict[str, Any], request_id: str, attempt: int) -> RequestFinished:
        admitted = self._admitted.pop(request_id)
        self.outcomes.setdefault(request_id, "finished")
        output = pack_int32(range(admitted.sampling.max_tokens))
        return RequestFinished(**place, request_id=request_id, attempt=attempt, reason="length", output=output)

    # -- the gateway --------------------------------------------------------------------------------------------

    async def _hear(self) -> None:
        """A request that has ended for its client is cancelled where the scheduler asks to go on with it."""
        async for stored in self.bus.follow(subjects.OUTPUTS_STREAM, subject=subjects.gateway_output(GATEWAY)):
            notice = decode_published(stored.data)
            assert isinstance(notice, GatewayNotice)
            if not self._is_new(GATEWAY, notice.number):
                continue
            word = notice.word
            if isinstance(word, RequestFailed):
                self.outcomes.setdefault(word.request_id, word.code)
            elif isinstance(word, ResumeNeeded):
                names: dict[str, Any] = {"request_id": word.request_id, "gateway_id": GATEWAY}
                answer: Input = (
                    CancelRequest(**names)
                    if word.request_id in self.outcomes
                    else ResumeRequest(**names, attempt=word.attempt)
                )
                await self._tell(subjects.request_input(GATEWAY), answer)

    async def _beat(self) -> None:
        while True:
            beats: list[tuple[Kind, str, str]] = [("worker", WORKER, self._incarnation), ("gateway", GATEWAY, "only")]
            for kind, name, incarnation in beats:
                heartbeat = Heartbeat(kind=kind, id=name, incarnation=incarnation)
                await self.bus.publish(subjects.heartbeat(kind, name), encode(heartbeat))
            await asyncio.sleep(1.0)
