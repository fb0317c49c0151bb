"""A whole cell under virtual time: the real core among simulated processes, and what happens to it from outside."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import partial

from services.gateway.pending import Choice
from services.scheduler.core import CellState
from shared.codec import Input, Published
from shared.messages import cell_events, worker_events
from shared.messages.requests import SubmitRequest
from shared.messages.status import Heartbeat
from shared.messages.tokens import TokenBatch
from tests.simulation.contents import Broken, HostPool
from tests.simulation.disk import Disk
from tests.simulation.faults import happen
from tests.simulation.gateway_process import GatewayProcess
from tests.simulation.process import Process
from tests.simulation.releases import RELEASES
from tests.simulation.scenario import Arrival, Scenario
from tests.simulation.scheduler_process import History, SchedulerProcess
from tests.simulation.storage_process import StorageProcess
from tests.simulation.streams import InputStream, Link, OutputStream
from tests.simulation.submission import submission
from tests.simulation.virtual_clock import Action, VirtualClock
from tests.simulation.worker_process import WorkerProcess

TICK_US = 500_000
RESTART_US = 1_000_000
GATEWAYS = 2
PATIENCE_US = 500_000_000
"""So long after the last thing from outside everything must have ended: longer than every timeout there is."""


class WaitsForEver(Broken):
    """Something had not ended when everything must have."""


class Cell:
    """Everything that there is. ``submitted`` are all requests so far, by id."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.chance = random.Random(f"{scenario.seed}/cell")
        self.clock = VirtualClock()
        self.inputs = InputStream(self.clock)
        self.inputs.on_append = self._wake_schedulers
        self.outputs = OutputStream()
        self.link = Link(self.clock, scenario.rates, random.Random(f"{scenario.seed}/link"))
        # Of its own, so that what is said of the dead changes no other message's luck.
        self.obituaries = Link(self.clock, scenario.rates, random.Random(f"{scenario.seed}/obituaries"))
        self.workers: dict[str, WorkerProcess] = {}
        self.storages: dict[str, StorageProcess] = {}
        self.strays: list[Process] = []  # Incarnations that live on although another took their place.
        self.gateways: list[GatewayProcess] = []  # Where clients go; those that are gone are replaced.
        self.all_gateways: list[GatewayProcess] = []
        self.devices: dict[tuple[str, str], WorkerProcess] = {}  # A mapping of a device outlives its process.
        self.host_pools: dict[str, HostPool] = {}
        self.disks: dict[str, Disk] = {}
        self.remote = Disk(1_000_000)
        self.is_remote_away = False
        self.is_broker_away = False
        self.seen: Counter[str] = Counter()  # What happened, beyond what the core counts.
        self.submitted: dict[str, SubmitRequest] = {}
        self.arrivals: dict[str, Arrival] = {}
        self.lossy: set[str] = set()  # Requests that had a sparse prefix in some attempt.
        self.failures: dict[str, int] = {}  # Of each request: chunks and loads that failed, workers that died.
        self.outcomes: dict[str, tuple[GatewayProcess, Choice]] = {}
        self.incarnations = 0
        self.last_fault_ns = self.clock.now_ns
        self.history = History()
        self.release = RELEASES[0]  # Of the scheduler that is started next.
        self.schedulers: list[SchedulerProcess] = []  # Those that run, and behind them the one that was started last.

    @property
    def scheduler(self) -> SchedulerProcess:
        """The scheduler that was the last to speak."""
        return self.schedulers[-1]

    @property
    def state(self) -> CellState:
        """What is known by whoever has come furthest."""
        return self._foremost.fold.state

    @property
    def _foremost(self) -> SchedulerProcess:
        return max(reversed(self.schedulers), key=lambda scheduler: scheduler.fold.position)

    def run(self) -> None:
        """Let everything happen until the cell is at rest. Raises :class:`Broken` and what the core raises."""
        shape = self.scenario.shape
        self.start_scheduler()
        for number in range(GATEWAYS):
            self.start_gateway(number)
        for number in range(shape.nodes if shape.host_pages else 0):
            self.disks[f"storage-{number}"] = Disk(shape.disk_chunks)
            self.start_storage(f"storage-{number}")
        for number in range(shape.workers):
            self.start_worker(f"worker-{number}")
        begun_ns = self.clock.now_ns
        last_us = 0
        for arrival in self.scenario.arrivals:
            self.clock.at(begun_ns + arrival.at_us * 1_000, partial(self.arrive, arrival))
            last_us = max(last_us, arrival.at_us)
        for fault in self.scenario.faults:
            self.clock.at(begun_ns + fault.at_us * 1_000, partial(happen, self, fault))
            last_us = max(last_us, fault.at_us + fault.lasts_us)
        self.last_fault_ns = begun_ns + last_us * 1_000
        self._tick(0)
        until_ns = self.last_fault_ns + PATIENCE_US * 1_000
        while not self._is_at_rest():
            if self.clock.now_ns > until_ns:
                raise WaitsForEver(f"still under way: {self.under_way()}")
            self.clock.step()

    # Members.

    def start_scheduler(self, *, snapshots_back: int = 0) -> None:
        """A scheduler, whether or not an earlier one still runs."""
        scheduler = SchedulerProcess(self, self._incarnation("scheduler"), self.history, self.release)
        self.schedulers = [*(other for other in self.schedulers if other.is_running), scheduler]
        scheduler.start(snapshots_back=snapshots_back)

    def note_start(self, scheduler: SchedulerProcess) -> None:
        """A scheduler speaks from now on, maybe long after it was started: those before it are superseded."""
        self.schedulers = [*(other for other in self.schedulers if other is not scheduler), scheduler]

    def lists(self, kind: str, name: str, incarnation: str) -> bool:
        """Whether nobody has given this incarnation up, as far as anybody knows: then its pages are its own."""
        return self._foremost.lists(kind, name, incarnation)

    def is_confirmed(self, kind: str, name: str, incarnation: str) -> bool:
        """Whether the active scheduler says now that it counts on this incarnation; it may not be there to ask.

        One that was superseded answers nothing: it has no lead any more.
        """
        return self.scheduler.can_answer and self.scheduler.lists(kind, name, incarnation)

    def start_worker(self, name: str) -> None:
        """A new incarnation of a worker, on the node that its number stands for."""
        node = f"node-{int(name.split('-')[1]) % self.scenario.shape.nodes}"
        worker = WorkerProcess(self, name, self._incarnation(name), node)
        self.workers[name] = worker
        self.devices[name, worker.incarnation] = worker
        worker.start()

    def start_storage(self, name: str) -> None:
        """A new incarnation of a storage."""
        storage = StorageProcess(self, name, self._incarnation(name), f"node-{name.split('-')[1]}")
        self.storages[name] = storage
        storage.start()

    def start_gateway(self, place: int) -> None:
        """A gateway, in the place of the last one there."""
        gateway = GatewayProcess(self, str(place), self._incarnation(f"gateway-{place}"))
        self.gateways[place : place + 1] = [gateway]
        self.all_gateways.append(gateway)

    def restart(self, process: Process, after_us: float = RESTART_US) -> None:
        """Have a process that ended started again after a while, unless somebody else does."""
        self.clock.after(after_us, lambda: self._start_again(process))

    def _start_again(self, process: Process) -> None:
        if not any(member is process for member in self.members()):
            return
        if isinstance(process, GatewayProcess):
            self.start_gateway(int(process.place))
        elif isinstance(process, WorkerProcess):
            self.start_worker(process.name)
        else:
            self.start_storage(process.name)

    def replace(self, process: Process) -> None:
        """Have another incarnation started although this one lives, as after a partition of whoever starts them."""
        if any(member is process for member in self.members()):
            self.strays.append(process)
            self._start_again(process)

    def members(self) -> Sequence[Process]:
        """The latest incarnation of everybody."""
        return [*self.workers.values(), *self.storages.values(), *self.gateways]

    def processes(self) -> Sequence[Process]:
        """Everything that runs."""
        found = [*self.members(), *self.strays, *self.schedulers]
        return [process for process in found if process.is_running]

    def _incarnation(self, name: str) -> str:
        self.incarnations += 1
        return f"{name}-{self.incarnations}"

    # Messages.

    def publish(self, target: str, output: Published) -> None:
        """An output goes to its target over core NATS."""
        kind, name = target.split("/")
        found: dict[str, Process | None] = {
            "worker": self.workers.get(name),
            "storage": self.storages.get(name),
            "gateway": next((gateway for gateway in self.gateways if gateway.name == name), None),
        }
        process = found[kind]
        if process is not None:
            self._send("out", process, lambda: process.hear(output))  # type: ignore[attr-defined]

    def send_tokens(self, gateway_id: str, batch: TokenBatch) -> None:
        """Tokens go to a gateway over core NATS, if the worker can reach it."""
        gateway = next((gateway for gateway in self.gateways if gateway.name == gateway_id), None)
        if gateway is not None and not self.devices[batch.worker_id, batch.incarnation].is_cut_off:
            self._send(f"tokens/{batch.incarnation}", gateway, lambda: gateway.hear_tokens(batch))

    def _send(self, channel: str, process: Process, action: Action, link: Link | None = None) -> None:
        """A core message to a process, which hears it unless it is lost or cut off by then."""

        def arrive() -> None:
            if not process.is_cut_off:
                process.do(action)

        (link or self.link).send(f"{channel}/{process.incarnation}", arrive)

    def _tick(self, number: int) -> None:
        """Twice a second: heartbeats, status, and now and then a look at the streams."""
        self.strays = [process for process in self.strays if process.is_running]
        for process in [*self.members(), *self.strays]:
            if process.can_answer:
                if number % 2 == 0:
                    self._beat(process)
                if number % 10 == 0:
                    process.catch_up()
            process.do(process.tick)
        for scheduler in self.schedulers:
            if scheduler.is_running and not scheduler.is_frozen:
                scheduler.tick()
                self.show_status(scheduler)
        self.clock.after(TICK_US, lambda: self._tick(number + 1))

    def _beat(self, process: Process) -> None:
        heartbeat = Heartbeat(kind=process.kind, id=process.name, incarnation=process.incarnation)  # type: ignore[arg-type]
        for scheduler in self.schedulers:
            self._send(f"beat/{process.incarnation}", scheduler, lambda scheduler=scheduler: scheduler.beat(heartbeat))  # type: ignore[misc]

    def note_end(self, worker: WorkerProcess) -> None:
        """A worker's process has ended: a storage of its node may see it, whichever incarnation that is."""
        for process in [*self.storages.values(), *self.strays]:
            if isinstance(process, StorageProcess) and process.node == worker.node and process.is_running:
                process.see_end(worker)

    def tell_gone(self, storage: StorageProcess, worker: WorkerProcess) -> None:
        """A storage says that a worker has ended, over core NATS and if it can be heard."""
        if storage.is_cut_off:
            return
        heartbeat = Heartbeat(kind="worker", id=worker.name, incarnation=worker.incarnation, is_gone=True)
        for scheduler in self.schedulers:
            hear = partial(scheduler.beat, heartbeat)
            self._send(f"gone/{storage.incarnation}", scheduler, hear, self.obituaries)

    def show_status(self, scheduler: SchedulerProcess) -> None:
        """A scheduler tells every worker and storage who is listed, if it can be heard."""
        if scheduler.is_cut_off or not scheduler.is_known:
            return
        epoch, seq = scheduler.fold.state.epoch, scheduler.fold.position
        for process in [*self.workers.values(), *self.storages.values(), *self.strays]:
            is_listed = scheduler.lists(process.kind, process.name, process.incarnation)
            see = partial(process.see_status, is_listed=is_listed, epoch=epoch, seq=seq)
            self._send(f"status/{scheduler.incarnation}", process, see)

    def _wake_schedulers(self) -> None:
        for scheduler in self.schedulers:
            scheduler.wake()

    # Requests.

    def arrive(self, arrival: Arrival) -> None:
        """A client asks a gateway, unless that is away."""
        gateway = self.gateways[arrival.gateway % len(self.gateways)]
        if gateway.can_answer:  # A gateway without the broker refuses at once, and one that is frozen never accepts.
            message = submission(arrival, gateway.name)
            self.arrivals[arrival.request_id] = arrival
            gateway.submit(message)
            if arrival.cancel_after_us:
                gateway.later(arrival.cancel_after_us, lambda: gateway.cancel(arrival.request_id))

    def ask(self, message: Input) -> None:
        """An operator asks for something, by way of a gateway that has the broker."""
        if not self.is_broker_away:
            self.inputs.append(message)

    # What is noticed.

    def note_folded(self, message: Input | None, outputs: Sequence[object]) -> None:
        """The core folded an input for the first time."""
        if isinstance(message, worker_events.WorkerLeft | cell_events.WorkerLost | worker_events.WorkerJoined):
            # Whose worker it was is known no more; the bound on failures is generous.
            for request_id in self.submitted:
                self.note_failure(request_id)

    def note_failure(self, request_id: str) -> None:
        """Something happened that may count as a failure of a request."""
        self.failures[request_id] = self.failures.get(request_id, 0) + 1

    def note_ended(self, gateway: GatewayProcess, choice: Choice) -> None:
        """A client has its answer, or an error."""
        if choice.request_id in self.outcomes:
            raise Broken(f"{choice.request_id} ended twice")
        self.outcomes[choice.request_id] = (gateway, choice)

    # Rest.

    def under_way(self) -> dict[str, object]:
        """What has not ended."""
        state = self.state
        open_choices = [name for gateway in self.gateways if gateway.is_running for name in gateway.choices]
        found: dict[str, object] = {
            "choices": open_choices,
            "requests": {name: request.state.value for name, request in state.requests.items()},
            "unfolded": len(self.inputs.messages) - self.scheduler.fold.position,
            "unlisted": [member.incarnation for member in self.members() if self._is_forgotten(member)],
            "batches": [batch.plan for worker in state.workers.values() for batch in worker.work.batches],
            "promotions": [worker.worker_id for worker in state.workers.values() if worker.moves.promotion is not None],
            "pins": list(state.pins),
        }
        for name in ("transfers", "saves", "fetches", "leases", "hidden_saves", "hidden_fetches", "late_reads"):
            found[name] = list(getattr(state, name))
        if not self.scheduler.is_running:
            found["scheduler"] = "does not run"
        return {name: value for name, value in found.items() if value}

    def _is_forgotten(self, member: Process) -> bool:
        """Whether it runs, and the cell does not count on it."""
        return (
            member.kind != "gateway"
            and member.is_running
            and not self.lists(member.kind, member.name, member.incarnation)
        )

    def _is_at_rest(self) -> bool:
        return self.clock.now_ns > self.last_fault_ns + 2_000_000_000 and not self.under_way()
