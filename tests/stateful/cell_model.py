"""A whole cell around the scheduler's core, without processes: model workers, storages and gateways.

The models execute plans as the real processes must, on pages that hold tokens instead of tensors. A page of a
device or host pool holds the identity of the page before it and its own tokens, which is all that its KV depends
on; so every read of a wrong, stale or half-written page is seen, and raises :class:`WrongKv`.

Nothing happens by itself: the caller says which worker steps, which event is delivered, which timer fires, so
that any interleaving can be driven. :meth:`CellModel.drain` runs everything until the cell is idle.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field

from services.scheduler.core import (
    CancelTimer,
    SetTimer,
    Stamped,
    check_invariants,
    new_state,
    pending_timers,
    status,
    step,
)
from shared import codec
from shared.ids import chain_page, chain_root, namespace_digest
from shared.messages import cell_events, gateway_notices, requests, storage_events, storage_plans, worker_events
from shared.messages import worker_plans as plans
from shared.messages.base import pack_int32, unpack_int32
from shared.messages.cell_events import CellConfig
from shared.messages.pools import KvGeometry, PoolHandle

EOS = 0
VOCABULARY = 11
MODEL = "model-1"


class WrongKv(AssertionError):
    """Something read KV that is not what its identity says."""


class NotIdle(AssertionError):
    """The cell came to rest with work left."""


def namespace(salt: str = "") -> str:
    """A namespace of the model."""
    return namespace_digest(MODEL, salt=salt)


def geometry(page_size: int) -> KvGeometry:
    """The geometry of every pool of a model cell."""
    return KvGeometry(layers=1, kv_heads=1, head_dim=1, page_size=page_size, dtype="float32")


def next_token(seed: int, tokens: list[int]) -> int:
    """What the model samples after ``tokens``: a pure function, so that a resumed request goes on alike."""
    digest = hashlib.blake2b(pack_int32([seed, *tokens]), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCABULARY


def expected_output(submit: requests.SubmitRequest) -> list[int]:
    """All tokens that a request must get, whatever happens on the way."""
    tokens = unpack_int32(submit.prompt)
    output: list[int] = []
    while len(output) < submit.sampling.max_tokens:
        if output and output[-1] == EOS and not submit.sampling.ignore_eos:
            break
        output.append(next_token(submit.sampling.seed, tokens + output))
    return output


@dataclass
class Page:
    """KV of one page: the identity of everything before it, and the tokens so far."""

    before: bytes
    tokens: list[int]
    is_corrupt: bool = False

    def identity(self) -> bytes:
        return chain_page(self.before, pack_int32(self.tokens))


@dataclass
class RunningRequest:
    """A request as its worker knows it."""

    admit: plans.AdmitRequest
    namespace: str
    tokens: list[int]
    prompt_tokens: int
    pages: list[int]
    computed: int
    has_failed: bool = False
    asked_at: int = -1  # Pages held when it last asked for a lease.

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]


@dataclass
class HostPool:
    """A storage's pool, and the storage that made it."""

    storage_id: str
    incarnation: str
    pages: int
    memory: dict[int, Page] = field(default_factory=dict)


class ModelWorker:
    """Executes plans in order, one RunBatch a step, and decodes on its own."""

    def __init__(self, cell: CellModel, worker_id: str, incarnation: str, node: str, pages: int) -> None:
        self.cell = cell
        self.worker_id, self.incarnation, self.node, self.pages = worker_id, incarnation, node, pages
        self.memory: dict[int, Page] = {}
        self.inbox: deque[plans.WorkerPlan] = deque()
        self.outbox: deque[codec.Input] = deque()
        self.requests: dict[str, RunningRequest] = {}
        self.hosts: dict[str, HostPool] = {}
        self.last_plan = 0
        self.is_dismissed = False
        self.finishes_before_batch_done = False
        self.prefilled_tokens = 0
        self.fail_next_chunk_of: str | None = None

    # Plans.

    def receive(self, plan: plans.WorkerPlan) -> None:
        assert plan.number == self.last_plan + len(self.inbox) + 1, "a plan is missing"
        self.inbox.append(plan)

    def step(self) -> bool:
        """Execute plans up to and with the next RunBatch, and one decode step; returns whether anything was done."""
        worked = False
        batch: plans.WorkerPlan | None = None
        while self.inbox and batch is None:
            plan = self.inbox.popleft()
            self.last_plan = plan.number
            worked = True
            if isinstance(plan.order, plans.RunBatch):
                batch = plan
            else:
                self._execute(plan.order)
        decoding = [name for name, request in self.requests.items() if self._is_decoding(request)]
        finished: list[codec.Input] = []
        done = self._run_batch(batch, finished) if batch is not None else None
        for name in decoding:
            worked |= self._decode(name, finished)
        if done is not None and not self.finishes_before_batch_done:
            self.outbox.append(done)
        self.outbox.extend(finished)
        if done is not None and self.finishes_before_batch_done:
            self.outbox.append(done)
        return worked

    def _execute(self, order: object) -> None:
        match order:
            case plans.AdmitRequest():
                self._admit(order)
            case plans.ExtendLease():
                request = self._known(order.request_id, order.attempt)
                if request is not None:
                    request.pages += unpack_int32(order.pages)
                    assert len(set(request.pages)) == len(request.pages), "a page is in one table twice"
            case plans.PreemptRequest():
                request = self._known(order.request_id, order.attempt)
                if request is not None:
                    del self.requests[order.request_id]
                    self._say(worker_events.RequestPreempted, order, output=pack_int32(request.output))
            case plans.AbortRequest():
                if self._known(order.request_id, order.attempt) is not None:
                    self._end(order.request_id, order.reason, self.outbox)
            case plans.AttachHostPool():
                self.hosts[order.storage_id] = self.cell.host_pools[order.handle.name]
            case plans.DetachHostPool():
                del self.hosts[order.storage_id]
            case plans.Dismiss():
                self.is_dismissed = True
            case _:
                raise AssertionError(f"unknown order {order}")

    def _admit(self, order: plans.AdmitRequest) -> None:
        assert order.request_id not in self.requests, "admitted twice"
        submit = self.cell.submitted[order.request_id]
        tokens = unpack_int32(order.tokens)
        pages = unpack_int32(order.pages)
        size = self.cell.page_size
        assert tokens[: order.prompt_tokens] == unpack_int32(submit.prompt)
        assert len(pages) * size >= len(tokens), "the page table does not cover the tokens"
        assert len(pages) * size < order.prompt_tokens + submit.sampling.max_tokens + size, "pages beyond any answer"
        assert len(set(pages)) == len(pages), "a page is in one table twice"
        assert order.cached_tokens % size == 0
        assert order.cached_tokens < len(tokens), "nothing is left to compute"
        assert order.device_tokens + order.host_tokens <= order.prompt_tokens
        assert order.device_tokens + order.host_tokens == min(order.cached_tokens, order.prompt_tokens)
        if not submit.cache.read or submit.sampling.prompt_logprobs is not None:
            assert order.cached_tokens == 0
        request = RunningRequest(
            order, submit.namespace, tokens, order.prompt_tokens, pages, computed=order.cached_tokens
        )
        known = self.cell.ever_computed
        for index in range(order.cached_tokens // size):
            assert self._identity(request, index) in known, "a hit on what was never computed"
        self.requests[order.request_id] = request

    def _known(self, request_id: str, attempt: int) -> RunningRequest | None:
        request = self.requests.get(request_id)
        return request if request is not None and request.admit.attempt == attempt else None

    # Steps.

    def _run_batch(self, plan: plans.WorkerPlan, finished: list[codec.Input]) -> worker_events.BatchDone:
        batch = plan.order
        assert isinstance(batch, plans.RunBatch)
        failures = []
        for load in batch.loads:
            failure = self._load(load)
            if failure is not None:
                failures.append(failure)
        failed = []
        for chunk in batch.chunks:
            request = self._known(chunk.request_id, chunk.attempt)
            if request is not None and self.fail_next_chunk_of == chunk.request_id:
                request.has_failed, self.fail_next_chunk_of = True, None
            if request is None or request.has_failed:
                failed.append(chunk.request_id)
                continue
            self._prefill(request, chunk, finished)
        return worker_events.BatchDone(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            plan=plan.number,
            failed=tuple(failed),
            load_failures=tuple(failures),
        )

    def _load(self, load: plans.PageLoad) -> worker_events.LoadFailure | None:
        """Copy pages up, verifying each; on a mismatch the request fails."""
        request = self._known(load.request_id, load.attempt)
        if request is None:
            return None
        pool = self.hosts.get(load.storage_id)
        bad = []
        triples = zip(
            unpack_int32(load.host_pages),
            unpack_int32(load.device_pages),
            [load.identities[i : i + 16] for i in range(0, len(load.identities), 16)],
            strict=True,
        )
        for host_page, device_page, identity in triples:
            page = None if pool is None else pool.memory.get(host_page)
            if page is None or page.is_corrupt or page.identity() != identity:
                bad.append(host_page)
                self.memory[device_page] = Page(b"garbage", [])
            else:
                self.memory[device_page] = Page(page.before, list(page.tokens))
        if not bad:
            return None
        if pool is None or not all(host in pool.memory and pool.memory[host].is_corrupt for host in bad):
            raise WrongKv(f"host pages {bad} do not hold what the scheduler thinks")
        request.has_failed = True
        return worker_events.LoadFailure(
            storage_id=load.storage_id, host_pages=pack_int32(bad), reason="checksum mismatch"
        )

    def _prefill(self, request: RunningRequest, chunk: plans.PrefillChunk, finished: list[codec.Input]) -> None:
        assert chunk.start == request.computed, "a chunk leaves a gap"
        assert chunk.start < chunk.end <= len(request.tokens)
        self._check_prefix(request, chunk.start)
        self._write(request, chunk.start, chunk.end)
        request.computed = chunk.end
        self.prefilled_tokens += chunk.end - chunk.start
        if chunk.end == len(request.tokens):
            self._sample(chunk.request_id, request, finished)

    def _is_decoding(self, request: RunningRequest) -> bool:
        return request.computed == len(request.tokens) - 1 and len(request.tokens) > len(request.admit.tokens) // 4

    def _decode(self, name: str, finished: list[codec.Input]) -> bool:
        """Feed the last sampled token, if there is a page for it."""
        request = self.requests.get(name)
        if request is None:
            return False
        position = request.computed
        if position // self.cell.page_size >= len(request.pages):
            return self._ask_lease(name, request)
        self._check_prefix(request, position)
        self._write(request, position, position + 1)
        request.computed += 1
        self._sample(name, request, finished)
        if name in self.requests:
            self._ask_lease(name, request)
        return True

    def _ask_lease(self, name: str, request: RunningRequest) -> bool:
        room = len(request.pages) * self.cell.page_size - len(request.tokens)
        if room > self.cell.lease_threshold or request.asked_at == len(request.pages):
            return False
        if len(request.pages) * self.cell.page_size >= request.prompt_tokens + request.admit.sampling.max_tokens:
            return False
        request.asked_at = len(request.pages)
        self._say(worker_events.LeaseRequested, request.admit, generated=len(request.output))
        return True

    def _sample(self, name: str, request: RunningRequest, finished: list[codec.Input]) -> None:
        token = next_token(request.admit.sampling.seed, request.tokens)
        index = len(request.output)
        request.tokens.append(token)
        gateway = self.cell.gateways.get(request.admit.gateway_id)
        if gateway is not None:
            gateway.take_token(name, request.admit.attempt, index, token)
        is_eos = token == EOS and not request.admit.sampling.ignore_eos
        if is_eos or len(request.output) >= request.admit.sampling.max_tokens:
            if gateway is not None:
                gateway.take_end(name, request.admit.attempt)
            self._end(name, "stop" if is_eos else "length", finished)

    def _end(self, name: str, reason: str, into: deque[codec.Input] | list[codec.Input]) -> None:
        request = self.requests.pop(name)
        gateway = self.cell.gateways.get(request.admit.gateway_id)
        if gateway is not None:
            gateway.take_end(name, request.admit.attempt)
        into.append(
            worker_events.RequestFinished(
                worker_id=self.worker_id,
                incarnation=self.incarnation,
                request_id=name,
                attempt=request.admit.attempt,
                reason=reason,  # type: ignore[arg-type]
                output=pack_int32(request.output),
            )
        )

    def _say(self, kind: type, order: object, **fields: object) -> None:
        self.outbox.append(
            kind(
                worker_id=self.worker_id,
                incarnation=self.incarnation,
                request_id=order.request_id,  # type: ignore[attr-defined]
                attempt=order.attempt,  # type: ignore[attr-defined]
                **fields,
            )
        )

    # Pages.

    def _identity(self, request: RunningRequest, index: int) -> bytes:
        """The identity that page ``index`` of the request must have; -1 is the root."""
        digest = chain_root(request.namespace)
        size = self.cell.page_size
        for start in range(0, (index + 1) * size, size):
            digest = chain_page(digest, pack_int32(request.tokens[start : start + size]))
        return digest

    def _check_prefix(self, request: RunningRequest, end: int) -> None:
        """Attention is about to read the KV of tokens [0, end): each page must hold exactly those."""
        size = self.cell.page_size
        before = chain_root(request.namespace)
        for index in range(-(-end // size)):
            tokens = request.tokens[index * size : min(end, (index + 1) * size)]
            page = self.memory.get(request.pages[index])
            if page is None or page.before != before or page.tokens[: len(tokens)] != tokens:
                raise WrongKv(f"{self.worker_id} page {request.pages[index]} holds {page}, not {tokens}")
            if len(tokens) == size:
                before = page.identity()

    def _write(self, request: RunningRequest, start: int, end: int) -> None:
        size = self.cell.page_size
        for position in range(start, end):
            index, offset = divmod(position, size)
            number = request.pages[index]
            if offset == 0:
                above = self._identity(request, index - 1)
                self.memory[number] = Page(above, [])
            page = self.memory[number]
            page.tokens = [*page.tokens[:offset], request.tokens[position]]
            if offset == size - 1:
                self.cell.ever_computed.add(page.identity())


class ModelStorage:
    """Makes its host pool and copies device pages into it."""

    def __init__(self, cell: CellModel, storage_id: str, incarnation: str, node: str, pages: int) -> None:
        self.cell = cell
        self.storage_id, self.incarnation, self.node, self.pages = storage_id, incarnation, node, pages
        self.pool: HostPool | None = None
        self.devices: dict[tuple[str, str], ModelWorker] = {}
        self.inbox: deque[storage_plans.StoragePlan] = deque()
        self.outbox: deque[codec.Input] = deque()
        self.last_plan = 0

    def receive(self, plan: storage_plans.StoragePlan) -> None:
        assert plan.number == self.last_plan + len(self.inbox) + 1, "a plan is missing"
        self.inbox.append(plan)

    def step(self, *, backups_succeed: bool = True) -> bool:
        """Execute the next plan; returns whether there was one."""
        if not self.inbox:
            return False
        plan = self.inbox.popleft()
        self.last_plan = plan.number
        match plan.order:
            case storage_plans.CreateHostPool():
                self._create(plan.order.geometry)
            case storage_plans.AttachDevicePool():
                key = (plan.order.worker_id, plan.order.worker_incarnation)
                worker = self.cell.known_workers[key]
                self.devices[key] = worker
            case storage_plans.DetachDevicePool():
                self.devices.pop((plan.order.worker_id, plan.order.worker_incarnation), None)
            case storage_plans.BackupPages():
                self._backup(plan.order, backups_succeed)
        return True

    def _create(self, wanted: KvGeometry) -> None:
        self.pool = HostPool(self.storage_id, self.incarnation, self.pages)
        self.cell.host_pools[self.incarnation] = self.pool
        handle = PoolHandle(
            kind="shm", layout="page_first", name=self.incarnation, nbytes=0, pages=self.pages, geometry=wanted
        )
        self.outbox.append(
            storage_events.HostPoolCreated(storage_id=self.storage_id, incarnation=self.incarnation, handle=handle)
        )

    def _backup(self, order: storage_plans.BackupPages, succeeds: bool) -> None:
        assert self.pool is not None
        device = self.devices.get((order.worker_id, order.worker_incarnation))
        is_ok = succeeds and device is not None
        pairs = zip(unpack_int32(order.device_pages), unpack_int32(order.host_pages), strict=True)
        for index, (device_page, host_page) in enumerate(pairs):
            identity = order.identities[index * 16 : (index + 1) * 16]
            if device is not None:
                page = device.memory.get(device_page)
                if page is None or page.identity() != identity:
                    raise WrongKv(f"{order.worker_id} page {device_page} was reused under a backup")
            if is_ok and device is not None:
                page = device.memory[device_page]
                self.pool.memory[host_page] = Page(page.before, list(page.tokens))
            else:
                self.pool.memory[host_page] = Page(b"half-written", [], is_corrupt=True)
        self.outbox.append(
            storage_events.BackupDone(
                storage_id=self.storage_id,
                incarnation=self.incarnation,
                transfer_id=order.transfer_id,
                ok=is_ok,
                error="" if is_ok else "made to fail",
            )
        )


class ModelGateway:
    """Keeps what its requests were told, and answers ResumeNeeded."""

    def __init__(self, gateway_id: str) -> None:
        self.gateway_id = gateway_id
        self.open: dict[str, requests.SubmitRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.attempts: dict[str, int] = {}
        self.ended: dict[str, str] = {}  # "finished" or an error code.
        self.resumes: deque[gateway_notices.ResumeNeeded] = deque()
        self.last_notice = 0

    def take_token(self, request_id: str, attempt: int, index: int, token: int) -> None:
        """A token from a worker; repeats are dropped, gaps and changes are faults."""
        if request_id in self.ended or attempt < self.attempts[request_id]:
            return
        self.attempts[request_id] = attempt
        tokens = self.tokens[request_id]
        assert index <= len(tokens), "a gap in the tokens"
        if index == len(tokens):
            tokens.append(token)
        assert tokens[index] == token, "a token changed"

    def take_end(self, request_id: str, attempt: int) -> None:
        if request_id in self.open and attempt >= self.attempts[request_id]:
            self.ended.setdefault(request_id, "finished")
            self.open.pop(request_id, None)

    def receive(self, notice: gateway_notices.GatewayNotice) -> None:
        assert notice.number == self.last_notice + 1, "a notice is missing"
        self.last_notice = notice.number
        word = notice.word
        if isinstance(word, gateway_notices.RequestFailed):
            if word.request_id in self.open:
                self.ended[word.request_id] = word.code
                del self.open[word.request_id]
        else:
            self.resumes.append(word)


class CellModel:
    """The core's state and everything around it. Each ``feed`` is one step of the fold."""

    def __init__(self, config: CellConfig | None = None, *, page_size: int = 4, lease_threshold: int = 2) -> None:
        self.state = new_state()
        self.page_size = page_size
        self.lease_threshold = lease_threshold
        self.seq = 0
        self.time_ns = 1_000_000_000
        self.log: list[Stamped] = []
        self.outputs: list[list[object]] = []
        self.workers: dict[str, ModelWorker] = {}
        self.known_workers: dict[tuple[str, str], ModelWorker] = {}
        self.storages: dict[str, ModelStorage] = {}
        self.host_pools: dict[str, HostPool] = {}  # By name; a mapped pool outlives its storage.
        self.gateways: dict[str, ModelGateway] = {}
        self.submitted: dict[str, requests.SubmitRequest] = {}
        self.timers: dict[str, int] = {}
        self.ever_computed: set[bytes] = set()
        self.admitted: list[plans.AdmitRequest] = []
        self.incarnations = 0
        if config is not None:
            self.feed(cell_events.CellConfigured(config=config))

    # The fold.

    def feed(self, message: codec.Input) -> list[object]:
        """Append an input, step, check every invariant, and hand the outputs on."""
        self.seq += 1
        self.time_ns += 1_000_000
        stamped = Stamped(self.seq, self.time_ns, codec.decode_input(codec.encode(message)))
        self.log.append(stamped)
        outputs: list[object] = list(step(self.state, stamped))
        check_invariants(self.state)
        self.outputs.append(outputs)
        for output in outputs:
            self._hand_on(output)
        assert {timer.timer_id: timer.at_ns for timer in pending_timers(self.state)} == self.timers
        return outputs

    def _hand_on(self, output: object) -> None:
        match output:
            case SetTimer():
                self.timers[output.timer_id] = output.at_ns
            case CancelTimer():
                del self.timers[output.timer_id]
            case plans.WorkerPlan():
                if isinstance(output.order, plans.AdmitRequest):
                    self.admitted.append(output.order)
                if isinstance(output.order, plans.RunBatch):
                    tokens = sum(chunk.end - chunk.start for chunk in output.order.chunks)
                    assert 0 < tokens <= self.state.config.max_batch_tokens
                worker = self.known_workers[output.worker_id, output.incarnation]
                worker.receive(output)
            case storage_plans.StoragePlan():
                storage = self.storages.get(output.storage_id)
                if storage is not None and storage.incarnation == output.incarnation:
                    storage.receive(output)
            case gateway_notices.GatewayNotice():
                self.gateway(output.gateway_id).receive(output)
            case _:
                raise AssertionError(f"unknown output {output}")

    # Members.

    def add_worker(
        self, worker_id: str, *, node: str = "node", pages: int = 16, max_context: int = 1_000_000
    ) -> ModelWorker:
        """Start a worker (a new incarnation if there was one)."""
        self.incarnations += 1
        worker = ModelWorker(self, worker_id, f"{worker_id}-{self.incarnations}", node, pages)
        self.workers[worker_id] = worker
        self.known_workers[worker_id, worker.incarnation] = worker
        handle = PoolHandle(
            kind="shm",
            layout="layer_first",
            name=worker.incarnation,
            nbytes=0,
            pages=pages,
            geometry=geometry(self.page_size),
        )
        self.feed(
            worker_events.WorkerJoined(
                worker_id=worker_id,
                incarnation=worker.incarnation,
                node=node,
                model=MODEL,
                pool=handle,
                max_context=max_context,
            )
        )
        return worker

    def lose_worker(self, worker_id: str) -> None:
        """Kill a worker; what it had said and was not delivered is lost."""
        worker = self.workers.pop(worker_id)
        self.feed(cell_events.WorkerLost(worker_id=worker_id, incarnation=worker.incarnation))

    def add_storage(self, storage_id: str, *, node: str = "node", pages: int = 32) -> ModelStorage:
        """Start a storage (a new incarnation if there was one)."""
        self.incarnations += 1
        storage = ModelStorage(self, storage_id, f"{storage_id}-{self.incarnations}", node, pages)
        self.storages[storage_id] = storage
        self.feed(
            storage_events.StorageJoined(
                storage_id=storage_id, incarnation=storage.incarnation, node=node, host_bytes=pages
            )
        )
        return storage

    def lose_storage(self, storage_id: str) -> None:
        """Kill a storage."""
        storage = self.storages.pop(storage_id)
        self.feed(cell_events.StorageLost(storage_id=storage_id, incarnation=storage.incarnation))

    def gateway(self, gateway_id: str) -> ModelGateway:
        """The gateway of this id, made on first use."""
        return self.gateways.setdefault(gateway_id, ModelGateway(gateway_id))

    # Requests.

    def submit(
        self,
        tokens: list[int],
        *,
        request_id: str | None = None,
        max_tokens: int = 4,
        salt: str = "",
        gateway_id: str = "gateway",
        priority: int = 0,
        deadline_ms: int = 0,
        read: bool = True,
        write: bool = True,
        prompt_logprobs: int | None = None,
        seed: int = 0,
        ignore_eos: bool = False,
    ) -> str:
        """Submit a request; returns its id."""
        request_id = request_id or f"request-{len(self.submitted) + 1}"
        message = requests.SubmitRequest(
            request_id=request_id,
            gateway_id=gateway_id,
            namespace=namespace(salt),
            prompt=pack_int32(tokens),
            sampling=requests.SamplingParams(
                max_tokens=max_tokens, seed=seed, prompt_logprobs=prompt_logprobs, ignore_eos=ignore_eos
            ),
            priority=priority,
            deadline_ms=deadline_ms,
            cache=requests.CacheHints(read=read, write=write),
        )
        gateway = self.gateway(gateway_id)
        if request_id not in self.submitted:
            self.submitted[request_id] = message
            gateway.open[request_id] = message
            gateway.tokens[request_id] = []
            gateway.attempts[request_id] = 1
        self.feed(message)
        return request_id

    def cancel(self, request_id: str) -> None:
        """The client goes away."""
        gateway_id = self.submitted[request_id].gateway_id
        self.feed(requests.CancelRequest(request_id=request_id, gateway_id=gateway_id))

    def answer_resume(self, gateway_id: str) -> bool:
        """Let a gateway answer its oldest ResumeNeeded; returns whether there was one."""
        gateway = self.gateway(gateway_id)
        if not gateway.resumes:
            return False
        needed = gateway.resumes.popleft()
        if needed.request_id not in gateway.open:
            self.feed(requests.CancelRequest(request_id=needed.request_id, gateway_id=gateway_id))
            return True
        gateway.attempts[needed.request_id] = needed.attempt
        self.feed(
            requests.ResumeRequest(
                request_id=needed.request_id,
                gateway_id=gateway_id,
                attempt=needed.attempt,
                output=pack_int32(gateway.tokens[needed.request_id]),
            )
        )
        return True

    # Progress.

    def deliver(self, process: ModelWorker | ModelStorage) -> bool:
        """Append the oldest event of a process; returns whether there was one."""
        if not process.outbox:
            return False
        self.feed(process.outbox.popleft())
        return True

    def fire(self, timer_id: str) -> None:
        """Let a pending timer come due."""
        self.time_ns = max(self.time_ns, self.timers.pop(timer_id))
        self.feed(cell_events.TimerFired(timer_id=timer_id))

    def round(self) -> bool:
        """Let everything move once; returns whether anything did."""
        moved = False
        for storage in list(self.storages.values()):
            moved |= storage.step()
            moved |= self.deliver(storage)
        for worker in list(self.workers.values()):
            moved |= worker.step()
            while self.deliver(worker):
                moved = True
        for gateway in list(self.gateways.values()):
            moved |= self.answer_resume(gateway.gateway_id)
        return moved

    def drain(self, rounds: int = 5000) -> None:
        """Run until nothing moves, then check that nothing is left: no request, no lease, no lock."""
        for _ in range(rounds):
            if not self.round():
                break
        else:
            raise NotIdle("the cell never comes to rest")
        if self.workers and self.state.requests:
            left = {name: request.state.value for name, request in self.state.requests.items()}
            raise NotIdle(f"requests are stuck: {left}")
        for pool in status(self.state, "model").pools:
            assert pool.free + pool.cached + pool.leased == pool.total
            assert pool.leased == 0, f"{pool.owner} leaks {pool.leased} pages"

    def check_answers(self) -> None:
        """Every request that finished of itself got exactly the tokens that the model would give it alone."""
        for gateway in self.gateways.values():
            for request_id, tokens in gateway.tokens.items():
                expected = expected_output(self.submitted[request_id])
                assert tokens == expected[: len(tokens)], f"{request_id} got wrong tokens"
