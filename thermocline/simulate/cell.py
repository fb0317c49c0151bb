"""A simulated cell: the scheduler's real core, and around it virtual workers, storages and a gateway.

The core folds one input after another, as it does on the stream, and takes modelled time for each; messages take
modelled time both ways. Nothing fails here: no worker and no message is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from services.scheduler.core import CancelTimer, SetTimer, Stamped, new_state, step
from services.scheduler.outside import of_config
from shared.codec import Input
from shared.errors import InternalError
from shared.ids import namespace_digest
from shared.messages import cell_events, gateway_notices, requests, storage_events, storage_plans, worker_events
from shared.messages import worker_plans as plans
from shared.messages.cell_events import CellConfig
from shared.messages.pools import PoolHandle
from thermocline.simulate.cost import Costs
from thermocline.simulate.disk import VirtualDisk
from thermocline.simulate.events import NS_PER_S, EventQueue, to_ns
from thermocline.simulate.figures import RequestFigures
from thermocline.simulate.link import Channel, Link
from thermocline.simulate.profiles import HardwareProfile, ModelProfile
from thermocline.simulate.storage import VirtualStorage
from thermocline.simulate.timers import Timers
from thermocline.simulate.tokens import Span, TokenMaker
from thermocline.simulate.worker import VirtualWorker
from thermocline.simulate.workloads import Asked

_GATEWAY = "gateway"
_START_NS = NS_PER_S  # 0 means "no time" in messages.


@dataclass(frozen=True, slots=True)
class CellShape:
    """The parts of a cell and their sizes. Device tokens are per worker, host and disk tokens per node."""

    workers: int = 1
    workers_per_node: int = 8
    page_size: int = 16
    device_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    network_gb_s: float = 0.0  # Rate at which nodes read one another's host memory; 0 is not at all.
    max_context: int = 1 << 24


@dataclass(slots=True)
class _Open:
    """A request that has not ended."""

    asked: Asked
    sent_ns: int
    is_counted: bool = False  # Its first admission is in the figures.
    first_token_ns: int = 0


class SimulatedCell:
    """A cell in virtual time, which ``queue`` advances. ``send`` requests; ``answered`` is called when one ends."""

    def __init__(
        self,
        shape: CellShape,
        config: CellConfig,
        hardware: HardwareProfile,
        model: ModelProfile,
        costs: Costs,
        queue: EventQueue,
        *,
        remembers: bool = False,
    ) -> None:
        """With ``remembers`` the core keeps records that explain its choices, as a live scheduler's does."""
        self.state = new_state(remembers=remembers)
        self.queue = queue
        self.figures = RequestFigures()
        self.answered: Callable[[Asked], None] = lambda asked: None
        self.watch: Callable[[Stamped, list[Any]], None] | None = None  # Called after every step of the fold.
        self.workers: dict[str, VirtualWorker] = {}
        self.storages: dict[str, VirtualStorage] = {}
        self.inputs = 0
        self.open: dict[str, _Open] = {}
        self._tokens = TokenMaker()
        self._room = min(shape.max_context, shape.device_tokens)
        self._namespace = namespace_digest(model.name)
        self._message_ns = to_ns(hardware.cell.message_us / 1e6)
        self._gateway_ns = to_ns(hardware.cell.gateway_us / 1e6)
        self._scheduler_ns = to_ns(hardware.cell.scheduler_us / 1e6)
        self._scheduler_free_ns = 0
        self._timers = Timers(queue, self._fire)
        if queue.now_ns < _START_NS:
            queue.now_ns = _START_NS
        self.fold(cell_events.CellConfigured(config=config))
        self._start(shape, hardware, model, costs)

    def _start(self, shape: CellShape, hardware: HardwareProfile, model: ModelProfile, costs: Costs) -> None:
        """Join storages and workers. A node without room for host KV has no storage."""
        geometry = model.geometry(shape.page_size)
        links = [Link(self.queue, full_duplex=hardware.link.full_duplex) for _ in range(shape.workers)]
        for node in range(-(-shape.workers // shape.workers_per_node)):
            members = range(node * shape.workers_per_node, min(shape.workers, (node + 1) * shape.workers_per_node))
            if shape.host_tokens >= shape.page_size:
                disk = VirtualDisk(shape.disk_tokens, geometry, hardware, self.queue)
                near = {f"worker-{number}": links[number] for number in members}
                self._add_storage(node, shape, costs, near, disk)
            for number in members:
                name = f"worker-{number}"
                self.workers[name] = VirtualWorker(name, f"{name}-1", costs, links[number], self.queue, self)
                pages = shape.device_tokens // shape.page_size
                handle = PoolHandle(
                    kind="shm",
                    layout="layer_first",
                    name=name,
                    nbytes=pages * geometry.page_bytes,
                    pages=pages,
                    geometry=geometry,
                )
                self.fold(
                    worker_events.WorkerJoined(
                        worker_id=name,
                        incarnation=f"{name}-1",
                        node=f"node-{node}",
                        model=model.name,
                        pool=handle,
                        max_context=shape.max_context,
                    )
                )

    def _add_storage(
        self, node: int, shape: CellShape, costs: Costs, links: dict[str, Link], disk: VirtualDisk
    ) -> None:
        name, pages = f"storage-{node}", shape.host_tokens // shape.page_size
        rate = shape.network_gb_s * 1e9
        network = Channel(self.queue) if rate else None
        self.storages[name] = VirtualStorage(name, f"{name}-1", pages, costs, links, disk, self.tell, network, rate)
        self.fold(
            storage_events.StorageJoined(
                storage_id=name,
                incarnation=f"{name}-1",
                node=f"node-{node}",
                host_bytes=pages,
                disk_bytes=disk.nbytes,
                shares="network" if rate else "",
            )
        )

    # -- requests ---------------------------------------------------------------------------------------------

    def send(self, asked: Asked) -> None:
        """Send a client's request at the current virtual time."""
        self.figures.submitted += 1
        request_id = f"r{self.figures.submitted}"
        self.open[request_id] = _Open(asked, self.queue.now_ns)
        message = self.message_of(request_id, asked)
        self.queue.at(self.queue.now_ns + self._gateway_ns // 2 + self._message_ns, self.fold, message)

    def message_of(self, request_id: str, asked: Asked) -> requests.SubmitRequest:
        """Return the gateway's message to the scheduler for a request.

        A prompt beyond a worker's room is cut to one token more than that, which the core refuses as well.
        """
        return requests.SubmitRequest(
            request_id=request_id,
            gateway_id=_GATEWAY,
            namespace=self._namespace,
            prompt=self._tokens.prompt(_first(asked.spans, self._room + 1)),
            sampling=requests.SamplingParams(max_tokens=asked.answer.tokens, ignore_eos=True),
            received_ns=self.queue.now_ns,
            cache=_hints(asked),
        )

    def sampled_first(self, request_id: str) -> None:
        """Record the time of the first token, at the first attempt that has one."""
        request = self.open[request_id]
        if not request.first_token_ns:
            request.first_token_ns = self.queue.now_ns + self._gateway_ns - self._gateway_ns // 2
            self.figures.ttft_ms.add((request.first_token_ns - request.sent_ns) / 1e6)

    def output_of(self, request_id: str, tokens: int) -> bytes:
        """Return the first ``tokens`` output tokens of a request, packed int32."""
        return self._tokens.prompt((self.open[request_id].asked.answer._replace(tokens=tokens),))

    def _finished(self, message: worker_events.RequestFinished) -> None:
        """Record that the client has its last token."""
        request = self.open.pop(message.request_id)
        figures, now_ns = self.figures, self.queue.now_ns + self._gateway_ns - self._gateway_ns // 2
        tokens = len(message.output) // 4
        figures.finished += 1
        figures.output_tokens += tokens
        figures.latency_ms.add((now_ns - request.sent_ns) / 1e6)
        if tokens > 1:
            figures.tpot_ms.add((now_ns - request.first_token_ns) / (tokens - 1) / 1e6)
        self.queue.at(now_ns, self.answered, request.asked)

    def _failed(self, word: gateway_notices.RequestFailed) -> None:
        request = self.open.pop(word.request_id)
        self.figures.failed[word.code] = self.figures.failed.get(word.code, 0) + 1
        self.queue.at(self.queue.now_ns, self.answered, request.asked)

    def _admitted(self, order: plans.AdmitRequest) -> None:
        request = self.open.get(order.request_id)
        if request is None or request.is_counted:
            return
        request.is_counted = True
        self.figures.input_tokens += order.prompt_tokens
        self.figures.device_tokens += order.device_tokens
        self.figures.host_tokens += order.host_tokens
        self.figures.disk_tokens += order.disk_tokens
        self.figures.neighbour_tokens += order.neighbour_tokens
        self.figures.lent_tokens += order.lent_tokens

    # -- the fold ---------------------------------------------------------------------------------------------

    def tell(self, messages: list[Any]) -> None:
        """Send events of a worker or storage to the scheduler."""
        for message in messages:
            if isinstance(message, worker_events.RequestFinished):
                self._finished(message)
        self.queue.at(self.queue.now_ns + self._message_ns, self._fold_all, messages)

    def _fold_all(self, messages: list[Input]) -> None:
        for message in messages:
            self.fold(message)

    def fold(self, message: Input) -> None:
        """Append an input to the stream; the core takes it after the earlier ones.

        Raises InternalError where a policy, schedule or admission from outside tries to end the process.
        """
        self.inputs += 1
        stamped = Stamped(self.inputs, self.queue.now_ns, message)
        try:
            outputs = step(self.state, stamped)
        except SystemExit as error:
            # Only classes from outside could do that, and it would end the command without a word.
            named = ", ".join(of_config(self.state.config)) or f"policy {self.state.config.policy}"
            raise InternalError(f"{named}: its code called for the end of the process, by {error!r}") from error
        if self.watch is not None:
            self.watch(stamped, outputs)
        self._scheduler_free_ns = max(self._scheduler_free_ns, self.queue.now_ns) + self._scheduler_ns
        if outputs:
            self.hand_on(outputs, self._scheduler_free_ns + self._message_ns)

    def hand_on(self, outputs: list[Any], arrival_ns: int) -> None:
        """Deliver plans at ``arrival_ns``, those of one target together, and set or cancel timers."""
        deliveries: dict[str, list[tuple[int, Any]]] = {}
        for output in outputs:
            if isinstance(output, plans.WorkerPlan):
                if isinstance(output.order, plans.AdmitRequest):
                    self._admitted(output.order)
                deliveries.setdefault(output.worker_id, []).append((output.number, output.order))
            elif isinstance(output, SetTimer):
                self._timers.set(output.timer_id, output.at_ns)
            elif isinstance(output, CancelTimer):
                self._timers.cancel(output.timer_id)
            elif isinstance(output, storage_plans.StoragePlan):
                deliveries.setdefault(output.storage_id, []).append((output.number, output.order))
            elif isinstance(output.word, gateway_notices.RequestFailed):
                self.queue.at(arrival_ns, self._failed, output.word)
            else:
                raise InternalError(f"nothing fails here, and yet the core says {output.word}")
        for target, orders in deliveries.items():
            receiver = self.workers.get(target) or self.storages[target]
            self.queue.at(arrival_ns, receiver.deliver, orders)

    def _fire(self, timer_id: str) -> None:
        self.fold(cell_events.TimerFired(timer_id=timer_id))


def _first(spans: Iterable[Span], tokens: int) -> Iterator[Span]:
    """Yield the spans of the first ``tokens`` tokens."""
    for span in spans:
        if tokens <= 0:
            return
        yield span._replace(tokens=min(span.tokens, tokens))
        tokens -= span.tokens


_MOST_LEASED = 1 << 40
"""No limit for the only tenant of a simulation."""


def _hints(asked: Asked) -> requests.CacheHints:
    if not asked.returns_in_s:
        return requests.CacheHints()
    returns_in_ms = max(1, round(asked.returns_in_s * 1000))
    return requests.CacheHints(returns_in_ms=returns_in_ms, max_leased_tokens=_MOST_LEASED)
