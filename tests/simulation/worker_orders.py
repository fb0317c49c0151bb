"""The plans of a simulated worker but for steps: what each order does with its sequences, pools and promotions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.codec import Input
from shared.messages import worker_events
from shared.messages import worker_plans as plans
from shared.messages.base import pack_int32, unpack_int32
from shared.messages.tokens import TokenItem
from tests.simulation.contents import GARBAGE, HostPool, require
from tests.simulation.sequence import Saving, Sequence
from tests.simulation.steps import copy_up

if TYPE_CHECKING:
    from tests.simulation.worker_process import WorkerProcess


def carry_out(worker: WorkerProcess, order: plans.WorkerOrder) -> None:
    """Do what an order says, between two steps."""
    match order:
        case plans.AdmitRequest():
            whole = worker.texts.take(order)
            require(whole is not None, f"{order.request_id} refers to a text that is not kept")
            assert whole is not None
            _admit(worker, whole)
        case plans.ExtendLease():
            sequence = worker.known(order.request_id, order.attempt)
            if sequence is not None:
                sequence.extend(order)
        case plans.PreemptRequest():
            sequence = worker.known(order.request_id, order.attempt)
            if sequence is not None:
                _preempt(worker, sequence)
        case plans.AbortRequest():
            sequence = worker.known(order.request_id, order.attempt)
            if sequence is not None:
                _abort(worker, sequence, order.reason)
        case plans.PromotePages():
            _promote(worker, order)
        case plans.AttachHostPool():
            pools = worker.hidden_pools if order.handle.geometry.is_hidden else worker.hosts
            pools[order.storage_id] = worker.cell.host_pools[order.handle.name]
        case plans.DetachHostPool():
            worker.hosts.pop(order.storage_id, None)
            worker.hidden_pools.pop(order.storage_id, None)
        case plans.AttachNeighbour():
            require(order.worker_id not in worker.neighbours, "a neighbour is attached twice")
            worker.neighbours[order.worker_id] = worker.cell.devices[order.worker_id, order.worker_incarnation]
        case plans.DetachNeighbour():
            gone = worker.neighbours.pop(order.worker_id)
            require(gone.incarnation == order.worker_incarnation, "another neighbour is detached")
        case plans.LeaveCell():
            worker.leave()
        case plans.Dismiss():
            worker.end()
        case _:
            raise AssertionError(f"unknown order {order}")


def _admit(worker: WorkerProcess, order: plans.AdmitRequest) -> None:
    submit = worker.cell.submitted[order.request_id]
    size = worker.cell.scenario.shape.page_size
    require(order.request_id not in worker.sequences, f"{order.request_id} is admitted twice")
    sequence = Sequence(order, submit.namespace, size, worker.memory)
    exact = order.cached_tokens if order.sparse is None else order.sparse.start
    require(order.tokens.startswith(submit.prompt), f"{order.request_id} is admitted with another prompt")
    require(len(sequence.pages) * size >= len(sequence.tokens), "a page table does not cover the tokens")
    require(order.cached_tokens < len(sequence.tokens), "nothing is left to compute")
    require(order.cached_tokens % size == 0, "a hit ends within a page")
    require(exact == 0 or (submit.cache.read and submit.sampling.prompt_logprobs is None), "an unwanted hit")
    if order.sparse is not None:
        require(submit.cache.importance == order.sparse.importance, "lossy KV for who did not allow it")
        require(order.hidden_lease is None, "lossy hidden states are saved")
        worker.cell.lossy.add(order.request_id)
    sequence.check_table()
    if order.hidden_lease is not None:
        pool = worker.hidden_pools.get(order.hidden_lease.storage_id)
        above = sequence.above(order.hidden_lease.depth // size)
        require(order.hidden_lease.parent == above, "a hidden lease goes on from elsewhere")
        sequence.saving = Saving(order.hidden_lease, pool, size)
    worker.sequences[order.request_id] = sequence
    worker.recall(sequence)


def _preempt(worker: WorkerProcess, sequence: Sequence) -> None:
    del worker.sequences[sequence.request_id]
    worker.retire(sequence.request_id)
    said = worker_events.RequestPreempted(
        **worker.who(),
        request_id=sequence.request_id,
        attempt=sequence.admit.attempt,
        output=pack_int32(sequence.output),
    )
    for event in _with_hidden(worker, sequence, said):
        worker.say(event)


def _abort(worker: WorkerProcess, sequence: Sequence, reason: str) -> None:
    item = TokenItem(
        request_id=sequence.request_id,
        attempt=sequence.admit.attempt,
        index=len(sequence.output),
        tokens=(),
        finish=reason,  # type: ignore[arg-type]
    )
    worker.tell_gateway(sequence, item)
    for event in end_sequence(worker, sequence, reason):
        worker.say(event)


def end_sequence(worker: WorkerProcess, sequence: Sequence, reason: str) -> list[Input]:
    """Forget a sequence that is over; returns what is to be said of it."""
    del worker.sequences[sequence.request_id]
    said = worker_events.RequestFinished(
        **worker.who(),
        request_id=sequence.request_id,
        attempt=sequence.admit.attempt,
        reason=reason,  # type: ignore[arg-type]
        output=pack_int32(sequence.output),
    )
    return _with_hidden(worker, sequence, said)


def _with_hidden(worker: WorkerProcess, sequence: Sequence, said: Input) -> list[Input]:
    """What is said when a sequence ends: that its hidden states were saved comes before or behind, or a while later."""
    if sequence.saving is None:
        return [said]
    saved = sequence.saving.answer(worker.name, worker.incarnation)
    place = worker.chance.randrange(3)
    if place == 2:
        worker.later(worker.chance.randint(100, 50_000), lambda: worker.say(saved))
        return [said]
    return [saved, said] if place else [said, saved]


def _promote(worker: WorkerProcess, order: plans.PromotePages) -> None:
    pages = unpack_int32(order.device_pages)
    worker.forbid_promoting(pages)
    worker.promoting |= dict.fromkeys(pages)
    pool = worker.hosts.get(order.storage_id)
    worker.later(worker.chance.randint(50, 20_000), lambda: _end_promotion(worker, order, pages, pool))


def _end_promotion(worker: WorkerProcess, order: plans.PromotePages, pages: list[int], pool: HostPool | None) -> None:
    for page in pages:
        del worker.promoting[page]
    is_mapped = pool is not None and worker.hosts.get(order.storage_id) is pool
    bad = copy_up(worker, order, pool) if is_mapped else []
    is_ok = is_mapped and not bad and worker.chance.random() >= worker.cell.scenario.rates.bad_loads
    if not is_ok:
        worker.memory.update(dict.fromkeys(pages, GARBAGE))
    worker.say(
        worker_events.PagesPromoted(
            **worker.who(), promotion_id=order.promotion_id, ok=is_ok, bad_host_pages=pack_int32(bad)
        )
    )
