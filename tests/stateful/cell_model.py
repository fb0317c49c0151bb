"""A whole cell around the scheduler's core, without processes: model workers, storages and gateways.

Nothing happens by itself: the caller says which worker steps, which event is delivered, which timer fires, so
that any interleaving can be driven. :meth:`CellModel.drain` runs everything until the cell is idle.
"""

from __future__ import annotations

from typing import Any

import msgspec

import services.scheduler.policies  # noqa: F401  Model cells can be told to use its policies and schedules.
from services.scheduler.core import (
    CancelTimer,
    Output,
    SetTimer,
    Stamped,
    check_invariants,
    new_state,
    pending_timers,
    status,
    step,
)
from shared import codec
from shared.chunks import chunk_bytes
from shared.compact_messages import compact_request
from shared.ids import DIGEST_BYTES, TOKEN_BYTES
from shared.messages import cell_events, gateway_notices, requests, storage_events, storage_plans, worker_events
from shared.messages import worker_plans as plans
from shared.messages.base import pack_int32
from shared.messages.cell_events import CellConfig
from shared.messages.pools import PoolHandle
from shared.messages.requests import PromptBase
from shared.prompt_chain import block_digests
from tests.stateful.model_disk import ModelDisk
from tests.stateful.model_gateway import ModelGateway
from tests.stateful.model_pages import MODEL, HostPool, expected_output, geometry, namespace
from tests.stateful.model_sparse import copy_in_parts
from tests.stateful.model_storage import ModelStorage
from tests.stateful.model_worker import ModelWorker

__all__ = ["MODEL", "CellModel", "ModelGateway", "ModelStorage", "ModelWorker", "NotIdle", "geometry", "namespace"]


def abridged(message: requests.SubmitRequest, base_tokens: int) -> requests.SubmitRequest:
    """A request whose prompt is told by its first tokens' digest, whole blocks, and the rest."""
    cut = base_tokens * TOKEN_BYTES
    base = PromptBase(digest=block_digests(message.namespace, message.prompt[:cut])[-DIGEST_BYTES:], tokens=base_tokens)
    return msgspec.structs.replace(message, prompt=b"", base=base, tail=message.prompt[cut:])


class NotIdle(AssertionError):
    """The cell came to rest with work left."""


class CellModel:
    """The core's state and everything around it. Each ``feed`` is one step of the fold.

    ``config`` is said first; without one the cell has no settings until they are fed.
    """

    def __init__(self, config: CellConfig | None = None, *, page_size: int = 4, lease_threshold: int = 2) -> None:
        self.state = new_state()
        self.page_size = page_size
        self.lease_threshold = lease_threshold
        self.seq = 0
        self.time_ns = 1_000_000_000
        self.log: list[Stamped] = []
        self.outputs: list[list[Output]] = []
        self.workers: dict[str, ModelWorker] = {}
        self.known_workers: dict[tuple[str, str], ModelWorker] = {}
        self.storages: dict[str, ModelStorage] = {}
        self.host_pools: dict[str, HostPool] = {}  # By name; a mapped pool outlives its storage.
        self.disks: dict[str, ModelDisk] = {}  # By storage id; a disk outlives its storage.
        self.hidden_disks: dict[str, ModelDisk] = {}  # What of them holds hidden states.
        self.sparse_disks: dict[str, dict[bytes, None]] = {}  # What of them can be read in part.
        self.remote = ModelDisk(room=1_000)  # One object store for all.
        self.hidden_remote = ModelDisk(room=1_000)  # What of it holds hidden states.
        self.kept_tokens = 0  # Of workers that join from now on.
        self.takes_compact = False  # The same of workers and storages; then requests are told in compact form too.
        self.restoration: worker_events.RestorationCosts | None = None  # Of workers that join from now on.
        self.reads_no_parts = ""  # The same.
        self.gateways: dict[str, ModelGateway] = {}
        self.submitted: dict[str, requests.SubmitRequest] = {}
        self._checked: dict[str, list[int]] = {}  # What of each answer was found to be right.
        self.timers: dict[str, int] = {}
        self.most_adapters = 99  # Of a worker; one that leaves for another does not count.
        self.ever_computed: set[bytes] = set()
        self.admitted: list[plans.AdmitRequest] = []
        self.incarnations = 0
        self.steps_a_check = 1  # Invariants are checked after so many steps.
        if config is not None:
            self.feed(cell_events.CellConfigured(config=config))

    # The fold.

    def feed(self, message: codec.Input) -> list[Output]:
        """Append an input, step, check every invariant if it is time to, and hand the outputs on."""
        self.seq += 1
        self.time_ns += 1_000_000
        stamped = Stamped(self.seq, self.time_ns, codec.decode_input(codec.encode(message)))
        self.log.append(stamped)
        outputs = step(self.state, stamped)
        if self.seq % self.steps_a_check == 0:
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
                    device = self.state.workers[output.worker_id].device
                    own = 0 if device is None else device.max_batch_tokens
                    assert tokens <= (self.state.config.max_batch_tokens or own or CellConfig().max_batch_tokens)
                    assert tokens or output.order.restores
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
                restoration=self.restoration,
                kept_tokens=self.kept_tokens,
                takes_compact=self.takes_compact,
                reads_no_parts=self.reads_no_parts,
            )
        )
        return worker

    def lose_worker(self, worker_id: str) -> None:
        """Kill a worker; what it had said and was not delivered is lost."""
        worker = self.workers.pop(worker_id)
        self.feed(cell_events.WorkerLost(worker_id=worker_id, incarnation=worker.incarnation))

    def add_storage(
        self,
        storage_id: str,
        *,
        node: str = "node",
        pages: int = 32,
        disk_chunks: int = 0,
        has_remote: bool = False,
        hidden_pages: int = 0,
        keeps_sparse: bool = False,
        shares: str = "",
        disk_bytes_per_s: float = 1e9,
        shapes: bytes = b"",
        handover_bytes: int = 0,
    ) -> ModelStorage:
        """Start a storage (a new incarnation if there was one), with a disk for so many chunks in either form, which
        was measured; ``shapes`` are digests of the geometries of chunks that it announces.
        """
        self.incarnations += 1
        storage = ModelStorage(self, storage_id, f"{storage_id}-{self.incarnations}", node, pages)
        self.storages[storage_id] = storage
        self.disks.setdefault(storage_id, ModelDisk()).room = disk_chunks
        self.hidden_disks.setdefault(storage_id, ModelDisk()).room = disk_chunks
        self.sparse_disks.setdefault(storage_id, {})
        storage.has_remote, storage.hidden_pages, storage.keeps_sparse = has_remote, hidden_pages, keeps_sparse
        self.feed(
            storage_events.StorageJoined(
                storage_id=storage_id,
                incarnation=storage.incarnation,
                node=node,
                host_bytes=pages,
                disk_bytes=disk_chunks * chunk_bytes(geometry(self.page_size)),
                has_remote=has_remote,
                hidden_bytes=hidden_pages,
                keeps_sparse=keeps_sparse,
                shares=shares,
                disk_measured_bytes_per_s=disk_bytes_per_s if disk_chunks else 0.0,
                shapes=shapes,
                handover_bytes=handover_bytes,
                takes_compact=self.takes_compact,
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
        tenant: str = "",
        max_queued: int = 0,
        deadline_ms: int = 0,
        key_id: str = "",
        read: bool = True,
        write: bool = True,
        prompt_logprobs: int | None = None,
        seed: int = 0,
        ignore_eos: bool = False,
        importance: requests.Importance | None = None,
        quota: requests.CacheQuota | None = None,
        leases: tuple[requests.Lease, ...] = (),
        max_leased_tokens: int = 0,
        returns_in_ms: int = 0,
        base_tokens: int = 0,
        adapter: str = "",
    ) -> str:
        """Submit a request, the first ``base_tokens`` of its prompt by reference; returns its id."""
        request_id = request_id or f"request-{len(self.submitted) + 1}"
        message = requests.SubmitRequest(
            request_id=request_id,
            gateway_id=gateway_id,
            namespace=namespace(salt, adapter),
            prompt=pack_int32(tokens),
            sampling=requests.SamplingParams(
                max_tokens=max_tokens, seed=seed, prompt_logprobs=prompt_logprobs, ignore_eos=ignore_eos
            ),
            priority=priority,
            tenant=tenant,
            max_queued=max_queued,
            deadline_ms=deadline_ms,
            cache=requests.CacheHints(
                read=read,
                write=write,
                importance=importance,
                leases=leases,
                max_leased_tokens=max_leased_tokens,
                returns_in_ms=returns_in_ms,
            ),
            key_id=key_id,
            quota=quota,
            adapter=adapter,
        )
        gateway = self.gateway(gateway_id)
        if request_id not in self.submitted:
            self.submitted[request_id] = message
            gateway.open[request_id] = message
            gateway.tokens[request_id] = []
            gateway.attempts[request_id] = 1
        told = abridged(message, base_tokens) if base_tokens else message
        self.feed(compact_request(told) if self.takes_compact else told)
        return request_id

    def serve(self, tokens: list[int], **options: Any) -> str:
        """Submit a request and run until nothing moves; returns its id."""
        request_id = self.submit(tokens, **options)
        self.drain()
        return request_id

    def send_whole(self, gateway_id: str) -> bool:
        """Let a gateway answer its oldest PromptWanted; returns whether there was one."""
        gateway = self.gateway(gateway_id)
        if not gateway.wanted:
            return False
        request = gateway.open.get(gateway.wanted.popleft().request_id)
        if request is not None:
            self.feed(request)
        return True

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
        message = process.outbox.popleft()
        self.feed(message)
        if isinstance(message, worker_events.WorkerLeft) and self.workers.get(message.worker_id) is process:
            del self.workers[message.worker_id]
        if isinstance(message, storage_events.StorageLeft) and self.storages.get(message.storage_id) is process:
            del self.storages[message.storage_id]
        return True

    def fire(self, timer_id: str) -> None:
        """Let a pending timer come due."""
        self.time_ns = max(self.time_ns, self.timers.pop(timer_id))
        self.feed(cell_events.TimerFired(timer_id=timer_id))

    def round(self) -> bool:
        """Let everything move once; returns whether anything did."""
        due = [name for name in ("strike", "flush", "renew") if name in self.timers]
        for timer_id in due:
            self.fire(timer_id)
        moved = bool(due)
        for storage in list(self.storages.values()):
            moved |= storage.step()
            moved |= storage.fetch()
            moved |= storage.keeps_sparse and copy_in_parts(storage)
            moved |= self.deliver(storage)
        for worker in list(self.workers.values()):
            moved |= worker.step()
            moved |= worker.promote()
            while self.deliver(worker):
                moved = True
        for gateway in list(self.gateways.values()):
            moved |= self.answer_resume(gateway.gateway_id)
            moved |= self.send_whole(gateway.gateway_id)
        return moved

    def drain(self, rounds: int = 5000, *, steps_a_check: int = 1) -> None:
        """Run until nothing moves, then check that nothing is left, no request, no lease, no lock, and all answers."""
        self.steps_a_check = steps_a_check
        for _ in range(rounds):
            if self.round():
                continue
            if not (self.workers and self.state.requests and self.state.late_reads):
                break
            # What a lost worker may still read is locked until a time, and a request may have to wait for it.
            self.fire(next(iter(self.state.late_reads)))
        else:
            raise NotIdle("the cell never comes to rest")
        self.steps_a_check = 1
        check_invariants(self.state)
        if self.workers and self.state.requests:
            left = {name: request.state.value for name, request in self.state.requests.items()}
            raise NotIdle(f"requests are stuck: {left}")
        for pool in status(self.state, "model").pools:
            assert pool.free + pool.cached + pool.leased == pool.total
            assert pool.leased == 0, f"{pool.owner} leaks {pool.leased} pages"
        self._check_answers()

    def _check_answers(self) -> None:
        """Every request got exactly the tokens that the model would give it alone, or the first of them."""
        for gateway in self.gateways.values():
            for request_id, tokens in gateway.tokens.items():
                if tokens != self._checked.get(request_id, []):
                    expected = expected_output(self.submitted[request_id])
                    assert tokens == expected[: len(tokens)], f"{request_id} got wrong tokens"
                    self._checked[request_id] = tokens.copy()
