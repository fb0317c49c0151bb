"""A model worker: executes plans as the real one must, on pages that hold tokens instead of tensors."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shared import codec
from shared.ids import chain_page, chain_root
from shared.kept_texts import KeptTexts
from shared.messages import worker_events
from shared.messages import worker_plans as plans
from shared.messages.base import pack_int32, unpack_int32
from tests.stateful.model_hidden import Saving, restored_tokens
from tests.stateful.model_pages import EOS, HostPool, Page, WrongKv, next_token
from tests.stateful.model_sparse import check_chosen, check_order, lossy_root, read_in_part

if TYPE_CHECKING:
    from tests.stateful.cell_model import CellModel


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
    saving: Saving | None = None
    has_read_sparse: bool = False
    chains: dict[int, list[bytes]] = field(default_factory=dict)  # Identities of pages, by the token they begin behind.

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]


class ModelWorker:
    """Executes plans in order, one RunBatch a step, and decodes on its own. Promotions run beside all that."""

    def __init__(self, cell: CellModel, worker_id: str, incarnation: str, node: str, pages: int) -> None:
        self.cell = cell
        self.worker_id, self.incarnation, self.node, self.pages = worker_id, incarnation, node, pages
        self.memory: dict[int, Page] = {}
        self.inbox: deque[plans.WorkerPlan] = deque()
        self.outbox: deque[codec.Input] = deque()
        self.requests: dict[str, RunningRequest] = {}
        self.hosts: dict[str, HostPool] = {}
        self.hidden_pools: dict[str, HostPool] = {}
        self.saved_late: deque[worker_events.HiddenSaved] = deque()  # To be said when there is nothing to do.
        self.restored_tokens = 0
        self.neighbours: dict[str, ModelWorker] = {}
        self.fails_neighbour_loads = False
        self.fails_sparse_reads = False
        self.sparse_tokens = 0
        self.promotions: deque[tuple[plans.PromotePages, HostPool | None]] = deque()
        self.last_plan = 0
        self.is_dismissed = False
        self.is_draining = False
        self.has_left = False
        self.finishes_before_batch_done = False
        self.prefilled_tokens = 0
        self.batches_ahead = 0
        self.fail_next_chunk_of: str | None = None
        self.texts = KeptTexts()
        self.missed: dict[str, int] = {}  # Attempts that were not admitted because a text is missing.
        self.adapters: dict[str, None] = {}  # Loaded, by digest.

    # Plans.

    def receive(self, plan: plans.WorkerPlan) -> None:
        if self.has_left:
            return
        assert plan.number == self.last_plan + len(self.inbox) + 1, "a plan is missing"
        self.inbox.append(plan)

    def step(self) -> bool:
        """Execute plans up to and with the next RunBatch, and one decode step; returns whether anything was done."""
        if self.has_left:
            return False
        worked = False
        if self.saved_late and not self.inbox and not self.requests:
            self.outbox.append(self.saved_late.popleft())
            worked = True
        batch: plans.WorkerPlan | None = None
        while self.inbox and batch is None:
            plan = self.inbox.popleft()
            self.last_plan = plan.number
            worked = True
            if isinstance(plan.order, plans.RunBatch):
                batch = plan
            else:
                self._execute(plan.order)
        if batch is not None:
            self._run_ahead_of(batch)
        decoding = [name for name, request in self.requests.items() if self._is_decoding(request)]
        finished: list[codec.Input] = []
        if batch is not None and isinstance(batch.order, plans.RunBatch) and batch.order.fill_bubble:
            for name in decoding:
                self._decode(name, finished)
        done = self._run_batch(batch, finished) if batch is not None else None
        for name in decoding:
            worked |= self._decode(name, finished)
        if done is not None and not self.finishes_before_batch_done:
            self.outbox.append(done)
        self.outbox.extend(finished)
        if done is not None and self.finishes_before_batch_done:
            self.outbox.append(done)
        return worked

    def _run_ahead_of(self, plan: plans.WorkerPlan) -> None:
        """Carry out what may go ahead of a batch that is only loading, whole batches among it."""
        batch = plan.order
        assert isinstance(batch, plans.RunBatch)
        if not batch.bubble_prefill:
            return
        assert batch.loads, "a bubble without a load"
        parts: tuple[Any, ...] = (*batch.chunks, *batch.loads, *batch.restores)
        named = {part.request_id for part in parts}
        while self.inbox:
            order = self.inbox[0].order
            match order:
                case plans.RunBatch():
                    if order.loads or order.restores or any(chunk.request_id in named for chunk in order.chunks):
                        return
                case plans.AdmitRequest() | plans.ExtendLease() | plans.PreemptRequest() | plans.AbortRequest():
                    if order.request_id in named:
                        return
                case plans.PromotePages():
                    pass
                case _:
                    return
            ahead = self.inbox.popleft()
            self.last_plan = ahead.number
            if isinstance(order, plans.RunBatch):
                finished: list[codec.Input] = []
                self.outbox.append(self._run_batch(ahead, finished))
                self.outbox.extend(finished)
                self.batches_ahead += 1
            else:
                self._execute(order)

    def _execute(self, order: object) -> None:
        match order:
            case plans.AdmitRequest():
                self._admit_told(order)
            case plans.ExtendLease():
                request = self._known(order.request_id, order.attempt)
                if request is not None:
                    request.pages += unpack_int32(order.pages)
                    used = [page for page in request.pages if page >= 0]
                    assert len(set(used)) == len(used), "a page is in one table twice"
                    assert not order.hidden_pages or request.saving is not None, "a lease that is not there is extended"
                    if request.saving is not None and order.hidden_pages:
                        request.saving.extend(order.hidden_pages)
            case plans.PreemptRequest():
                request = self._known(order.request_id, order.attempt)
                if request is not None:
                    del self.requests[order.request_id]
                    said = worker_events.RequestPreempted(
                        worker_id=self.worker_id,
                        incarnation=self.incarnation,
                        request_id=order.request_id,
                        attempt=order.attempt,
                        output=pack_int32(request.output),
                    )
                    self.outbox.extend(self._leave(request, said))
                elif self.missed.pop(order.request_id, 0) == order.attempt:
                    self._say(worker_events.RequestPreempted, order, output=b"")
            case plans.AbortRequest():
                if self._known(order.request_id, order.attempt) is not None:
                    self._end(order.request_id, order.reason, self.outbox)
                elif self.missed.pop(order.request_id, 0) == order.attempt:
                    self._say(worker_events.RequestFinished, order, reason=order.reason, output=b"")
            case plans.PromotePages():
                self._forbid_promoting(unpack_int32(order.device_pages))
                self.promotions.append((order, self.hosts.get(order.storage_id)))
            case plans.AttachHostPool():
                pools = self.hidden_pools if order.handle.geometry.is_hidden else self.hosts
                pools[order.storage_id] = self.cell.host_pools[order.handle.name]
            case plans.DetachHostPool():
                assert self.hosts.pop(order.storage_id, None) or order.storage_id in self.hidden_pools
                self.hidden_pools.pop(order.storage_id, None)
            case plans.AttachNeighbour():
                assert order.worker_id not in self.neighbours, "a neighbour is attached twice"
                self.neighbours[order.worker_id] = self.cell.known_workers[order.worker_id, order.worker_incarnation]
            case plans.DetachNeighbour():
                assert self.neighbours.pop(order.worker_id).incarnation == order.worker_incarnation
            case plans.AttachAdapter():
                self._attach_adapter(order)
            case plans.DetachAdapter():
                self._detach_adapter(order)
            case plans.LeaveCell():
                self._leave_cell()
            case plans.Dismiss():
                self.is_dismissed = True
            case _:
                raise AssertionError(f"unknown order {order}")

    def drain(self, grace_ms: int) -> None:
        """Ask to leave."""
        self.is_draining = True
        said = worker_events.WorkerDraining(worker_id=self.worker_id, incarnation=self.incarnation, grace_ms=grace_ms)
        self.outbox.append(said)

    def _leave_cell(self) -> None:
        """End: what it still has is forgotten, and what was saved is told before."""
        assert self.is_draining, "told to leave without having asked"
        self.has_left = True
        self.outbox.extend(self.saved_late)
        self.outbox.append(worker_events.WorkerLeft(worker_id=self.worker_id, incarnation=self.incarnation))
        self.inbox.clear()
        self.requests.clear()
        self.promotions.clear()
        self.saved_late.clear()

    def _attach_adapter(self, order: plans.AttachAdapter) -> None:
        """Adapters in folders that begin with "bad" cannot be loaded."""
        assert order.digest not in self.adapters, "an adapter is attached twice"
        fault, lacks_room = "no such adapter" if order.path.startswith("bad") else "", False
        if not fault and len(self.adapters.keys() - {order.replaces}) >= self.cell.most_adapters:
            fault, lacks_room = "no room", True
        if not fault:
            self.adapters[order.digest] = None
        self.outbox.append(
            worker_events.AdapterAttached(
                worker_id=self.worker_id,
                incarnation=self.incarnation,
                attach_id=order.attach_id,
                digest=order.digest,
                fault=fault,
                lacks_room=lacks_room,
            )
        )

    def _detach_adapter(self, order: plans.DetachAdapter) -> None:
        used = [request.admit.adapter for request in self.requests.values()]
        assert order.digest not in used, "an adapter is detached under a request"
        self.adapters.pop(order.digest, None)

    def _admit_told(self, told: plans.AdmitRequest) -> None:
        order = self.texts.take(told)
        if order is not None:
            self._admit(order)
            return
        assert told.base is not None
        self._say(worker_events.TextMissing, told, text=told.base.text)
        self.missed[told.request_id] = told.attempt
        if told.hidden_lease is not None:
            lease_id = told.hidden_lease.lease_id
            self.outbox.append(
                worker_events.HiddenSaved(
                    worker_id=self.worker_id, incarnation=self.incarnation, lease_id=lease_id, chunks=0, tokens=b""
                )
            )

    def _admit(self, order: plans.AdmitRequest) -> None:
        assert order.request_id not in self.requests, "admitted twice"
        submit = self.cell.submitted[order.request_id]
        tokens = unpack_int32(order.tokens)
        pages = unpack_int32(order.pages)
        size = self.cell.page_size
        assert tokens[: order.prompt_tokens] == unpack_int32(submit.prompt)
        assert len(pages) * size >= len(tokens), "the page table does not cover the tokens"
        assert len(pages) * size < order.prompt_tokens + submit.sampling.max_tokens + size, "pages beyond any answer"
        chosen = unpack_int32(order.sparse.pages) if order.sparse is not None else []
        used = [page for page in pages + chosen if page >= 0]
        assert len(set(used)) == len(used), "a page is in one table twice"
        assert order.sparse is not None or len(used) == len(pages)
        assert order.cached_tokens % size == 0
        assert order.adapter == submit.adapter, "another adapter than was asked for"
        if order.adapter:
            assert order.adapter in self.adapters, "admitted where the adapter is not loaded"
            assert order.hidden_lease is None, "hidden states of an adapter restore nothing"
        assert order.cached_tokens < len(tokens), "nothing is left to compute"
        fetched = (order.lent_tokens, order.disk_tokens, order.remote_tokens)
        found = (order.device_tokens, order.host_tokens, order.neighbour_tokens, *fetched)
        assert min(found) >= 0
        exact = order.cached_tokens if order.sparse is None else order.sparse.start
        assert sum(found) == min(exact, order.prompt_tokens)
        if not submit.cache.read or submit.sampling.prompt_logprobs is not None:
            assert order.cached_tokens == 0
        request = RunningRequest(
            order, submit.namespace, tokens, order.prompt_tokens, pages, computed=order.cached_tokens
        )
        if order.sparse is not None:
            assert submit.cache.importance == order.sparse.importance, "lossy KV for who did not allow it"
            assert order.hidden_lease is None, "lossy hidden states are saved"
            check_order(request, order.sparse, size)
        known = self.cell.ever_computed
        for index in range(exact // size):
            assert self._identity(request, index) in known, "a hit on what was never computed"
        if order.hidden_lease is not None:
            request.saving = self._saving(request, order.hidden_lease)
        self.requests[order.request_id] = request

    def _saving(self, request: RunningRequest, lease: plans.HiddenLease) -> Saving:
        assert lease.depth >= request.computed, "a lease for what is not computed"
        last = lease.depth // self.cell.page_size - 1
        assert lease.depth <= len(request.tokens), "nobody knows what a lease goes on from"
        assert lease.parent == self._identity(request, last), "a lease goes on from elsewhere"
        return Saving(lease, self.hidden_pools.get(lease.storage_id), self.cell.page_size)

    def _leave(self, request: RunningRequest, said: codec.Input) -> list[codec.Input]:
        """What is said when a sequence ends: that its hidden states were saved comes before, behind, or much later."""
        if request.saving is None:
            return [said]
        saved = request.saving.answer(self.worker_id, self.incarnation)
        if saved.lease_id % 3 == 0:
            self.saved_late.append(saved)
            return [said]
        return [saved, said] if saved.lease_id % 3 == 1 else [said, saved]

    def _known(self, request_id: str, attempt: int) -> RunningRequest | None:
        request = self.requests.get(request_id)
        return request if request is not None and request.admit.attempt == attempt else None

    # Steps.

    def _run_batch(self, plan: plans.WorkerPlan, finished: list[codec.Input]) -> worker_events.BatchDone:
        batch = plan.order
        assert isinstance(batch, plans.RunBatch)
        failures = []
        unloaded: dict[int, None] = {}  # Device pages that some load of this batch should have filled.
        for load in batch.loads:
            failure = self._load(load, unloaded)
            if failure is not None:
                failures.append(failure)
        failed, refused, restored = [], [], 0
        read: list[Any] = []
        unread = []
        for restore in batch.restores:
            assert restore.request_id not in [chunk.request_id for chunk in batch.chunks]
            request = self._known(restore.request_id, restore.attempt)
            if request is None or request.has_failed or any(page in unloaded for page in self._read(request, restore)):
                failed.append(restore.request_id)
            elif self._restore(request, restore):
                restored += restore.end - restore.start
            else:
                request.has_failed = True
                failed.append(restore.request_id)
                refused.append(restore.request_id)
        for chunk in batch.chunks:
            request = self._known(chunk.request_id, chunk.attempt)
            if request is not None and self.fail_next_chunk_of == chunk.request_id:
                request.has_failed, self.fail_next_chunk_of = True, None
            if request is not None and any(
                page in unloaded for page in request.pages[: -(-chunk.start // self.cell.page_size)]
            ):
                request.has_failed = True
            if request is not None and not request.has_failed and not self._read_sparse(request, read):
                request.has_failed = True
                unread.append(chunk.request_id)
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
            restored_tokens=restored,
            restore_us=restored // 10 + 1 if restored else 0,
            restores_refused=tuple(refused),
            sparse_refused=tuple(unread),
            sparse_loaded=tuple(read),
        )

    def _read_sparse(self, request: RunningRequest, read: list[worker_events.SparseLoaded]) -> bool:
        """Read what a request's first chunk stands on, if that is sparse; returns whether it could be read."""
        if request.admit.sparse is None or request.has_read_sparse:
            return True
        loaded = read_in_part(self, request)
        if loaded is not None:
            read.append(loaded)
        request.has_read_sparse = loaded is not None
        return request.has_read_sparse

    def _read(self, request: RunningRequest, restore: plans.RestoreChunk) -> list[int]:
        """Device pages on which a restoration stands."""
        return request.pages[: restore.start // self.cell.page_size]

    def _restore(self, request: RunningRequest, restore: plans.RestoreChunk) -> bool:
        """Make KV of hidden pages, verifying each; returns whether all were good."""
        assert restore.start == request.computed, "a restoration leaves a gap"
        assert restore.end < len(request.tokens), "nothing is left to compute"
        tokens = restored_tokens(restore, self.hidden_pools.get(restore.storage_id), self.cell.page_size)
        if tokens is None:
            return False
        assert tokens == request.tokens[restore.start : restore.end], "a restoration of other tokens"
        self._check_prefix(request, restore.start)
        self._write(request, restore.start, restore.end)
        request.computed = restore.end
        self.restored_tokens += len(tokens)
        return True

    def _load(self, load: plans.PageLoad, unloaded: dict[int, None]) -> worker_events.LoadFailure | None:
        """Copy pages up, verifying each; on a mismatch whoever stands on a bad page fails, and the owner does.

        It takes place even if its request is gone: others of the batch may stand on these pages.
        """
        if load.neighbour_id:
            return self._load_from_neighbour(load, unloaded)
        pool = self.hosts.get(load.storage_id)
        self._forbid_promoting(unpack_int32(load.device_pages))
        bad = dict.fromkeys(self._copy_up(pool, load))
        if not bad:
            return None
        pairs = zip(unpack_int32(load.host_pages), unpack_int32(load.device_pages), strict=True)
        unloaded.update(dict.fromkeys(device for host, device in pairs if host in bad))
        request = self._known(load.request_id, load.attempt)
        if request is not None:
            request.has_failed = True
        return worker_events.LoadFailure(
            storage_id=load.storage_id, host_pages=pack_int32(bad), reason="checksum mismatch"
        )

    def _load_from_neighbour(self, load: plans.PageLoad, unloaded: dict[int, None]) -> worker_events.LoadFailure | None:
        """Copy pages of another device; nothing but the scheduler vouches for what they hold."""
        neighbour = self.neighbours.get(load.neighbour_id)
        assert neighbour is not None, "a load from a neighbour that was not attached"
        assert neighbour.incarnation == load.neighbour_incarnation
        assert not load.storage_id
        device_pages = unpack_int32(load.device_pages)
        self._forbid_promoting(device_pages)
        is_there = self.cell.workers.get(load.neighbour_id) is neighbour
        if self.fails_neighbour_loads or not is_there:
            unloaded.update(dict.fromkeys(device_pages))
            for page in device_pages:
                self.memory[page] = Page(b"garbage", [])
            request = self._known(load.request_id, load.attempt)
            if request is not None:
                request.has_failed = True
            return worker_events.LoadFailure(
                storage_id="", host_pages=load.host_pages, reason="not mapped", neighbour_id=load.neighbour_id
            )
        for index, (theirs, mine) in enumerate(zip(unpack_int32(load.host_pages), device_pages, strict=True)):
            found = neighbour.memory.get(theirs)
            if found is None or found.identity() != load.identities[index * 16 : (index + 1) * 16]:
                raise WrongKv(f"{load.neighbour_id} page {theirs} holds {found}, which is not what was to be copied")
            self.memory[mine] = Page(found.before, list(found.tokens))
        return None

    def _copy_up(self, pool: HostPool | None, order: plans.PageLoad | plans.PromotePages) -> list[int]:
        """Copy host pages to device pages; returns the host pages that did not verify, which must have rotted."""
        bad = []
        triples = zip(
            unpack_int32(order.host_pages),
            unpack_int32(order.device_pages),
            [order.identities[i : i + 16] for i in range(0, len(order.identities), 16)],
            strict=True,
        )
        for host_page, device_page, identity in triples:
            page = None if pool is None else pool.memory.get(host_page)
            if page is None or page.is_corrupt or page.identity() != identity:
                bad.append(host_page)
                self.memory[device_page] = Page(b"garbage", [])
            else:
                self.memory[device_page] = Page(page.before, list(page.tokens))
        if bad and (pool is None or not all(host in pool.memory and pool.memory[host].is_corrupt for host in bad)):
            raise WrongKv(f"host pages {bad} do not hold what the scheduler thinks")
        return bad

    def promote(self, *, is_ok: bool = True) -> bool:
        """Carry out the oldest promotion, or fail to; returns whether there was one."""
        if not self.promotions:
            return False
        order, pool = self.promotions.popleft()
        bad: list[int] = []
        if is_ok and pool is not None and self.hosts.get(order.storage_id) is pool:
            bad = self._copy_up(pool, order)
            is_ok = not bad
        else:
            is_ok = False
            for page in unpack_int32(order.device_pages):
                self.memory[page] = Page(b"garbage", [])
        self.outbox.append(
            worker_events.PagesPromoted(
                worker_id=self.worker_id,
                incarnation=self.incarnation,
                promotion_id=order.promotion_id,
                ok=is_ok,
                bad_host_pages=pack_int32(bad),
            )
        )
        return True

    def _forbid_promoting(self, pages: list[int]) -> None:
        """Nothing but its promotion touches a page that is being promoted."""
        for order, _ in self.promotions:
            both = set(unpack_int32(order.device_pages)).intersection(pages)
            assert not both, f"{self.worker_id} pages {both} are used under a promotion"

    def _prefill(self, request: RunningRequest, chunk: plans.PrefillChunk, finished: list[codec.Input]) -> None:
        assert chunk.start == request.computed, "a chunk leaves a gap"
        assert chunk.start < chunk.end <= len(request.tokens)
        self._check_prefix(request, chunk.start)
        self._write(request, chunk.start, chunk.end)
        if request.saving is not None:
            request.saving.capture(chunk.start, request.tokens[chunk.start : chunk.end])
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
        if request.saving is not None:
            request.saving.capture(position, request.tokens[position : position + 1])
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
        said = worker_events.RequestFinished(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            request_id=name,
            attempt=request.admit.attempt,
            reason=reason,  # type: ignore[arg-type]
            output=pack_int32(request.output),
        )
        into.extend(self._leave(request, said))

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
        size = self.cell.page_size
        sparse = request.admit.sparse
        root, first = chain_root(request.namespace), 0
        if sparse is not None and (index + 1) * size >= sparse.end:
            root, first = lossy_root(request), sparse.end
        # Tokens are only ever added, so a page that is whole stays as it is.
        chain = request.chains.setdefault(first, [root])
        wanted = max(0, index + 1 - first // size)
        while len(chain) <= wanted:
            start = first + (len(chain) - 1) * size
            tokens = request.tokens[start : start + size]
            assert len(tokens) == size, "a page that is not whole has no identity yet"
            chain.append(chain_page(chain[-1], pack_int32(tokens)))
        return chain[wanted]

    def _check_prefix(self, request: RunningRequest, end: int) -> None:
        """Attention is about to read the KV of tokens [0, end): each page must hold exactly those."""
        size = self.cell.page_size
        before = chain_root(request.namespace)
        sparse = request.admit.sparse
        check_chosen(self, request)
        for index in range(-(-end // size)):
            if sparse is not None and sparse.start <= index * size < sparse.end:
                before = lossy_root(request)
                continue
            tokens = request.tokens[index * size : min(end, (index + 1) * size)]
            page = self.memory.get(request.pages[index])
            if page is None or page.before != before or page.tokens[: len(tokens)] != tokens:
                raise WrongKv(f"{self.worker_id} page {request.pages[index]} holds {page}, not {tokens}")
            if len(tokens) == size:
                before = page.identity()

    def _write(self, request: RunningRequest, start: int, end: int) -> None:
        size = self.cell.page_size
        self._forbid_promoting(request.pages[start // size : -(-end // size)])
        for position in range(start, end):
            index, offset = divmod(position, size)
            number = request.pages[index]
            if offset == 0:
                above = self._identity(request, index - 1)
                self.memory[number] = Page(above, [])
            page = self.memory[number]
            page.tokens = [*page.tokens[:offset], request.tokens[position]]
            if offset == size - 1 and request.admit.sparse is None:
                self.cell.ever_computed.add(page.identity())
