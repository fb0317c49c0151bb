"""Defects that the simulation must find: each breaks one rule of the core, as a slip of the pen would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from services.scheduler.core.cache import insertion
from services.scheduler.core.cache import victims as trimming
from services.scheduler.core.cache.page_pool import PagePool
from services.scheduler.core.cache.prefix_tree import Node
from services.scheduler.core.cache.residency import split_node, unlock_path
from services.scheduler.core.fold import machine, timers
from services.scheduler.core.fold.snapshot import decode_state
from services.scheduler.core.lifecycle import ADMITTED
from services.scheduler.core.members import membership
from services.scheduler.core.queue import completion
from services.scheduler.core.request import Request
from services.scheduler.core.state import Worker
from services.scheduler.core.step import Step
from services.scheduler.core.tiers import saves
from services.scheduler.core.tiers.loads import settle_loads
from services.scheduler.core.tiers.under_way import Save
from services.scheduler.core.tiers.writes import sequence_computed
from shared.membership import Listing
from shared.messages import worker_events
from shared.messages.requests import SubmitRequest
from tests.simulation import properties, scheduler_process

Patch = pytest.MonkeyPatch


def unlocking_is_skipped(patch: Patch) -> None:
    """What a save has read stays locked for ever."""
    patch.setattr(saves, "unlock_path", lambda state, node, worker: None)


def lock_ends_with_the_deadline(patch: Patch) -> None:
    """A save that is late is thought to read nothing any more."""

    def expire(step: Step, save: Save) -> None:
        saves.expire_save(step, save)
        worker = step.state.workers.get(save.worker_id)
        if worker is not None and save.node:
            unlock_path(step.state, step.state.tree.nodes[save.node], worker)
        save.worker_id, save.node = "", 0

    patch.setattr(timers, "expire_save", expire)


def leases_of_the_lost_are_kept(patch: Patch) -> None:
    """Pages that a worker was writing hidden states to stay leased when it is gone."""
    patch.setattr(membership, "drop_leases_of_worker", lambda step, worker: None)


def pages_are_released_twice(patch: Patch) -> None:
    """A request that ends gives back its pages, and then once more."""
    release = PagePool.release

    def twice(pool: PagePool, pages: bytes) -> None:
        release(pool, pages)
        release(pool, pages)

    patch.setattr(PagePool, "release", twice)


def attempt_is_ignored(patch: Patch) -> None:
    """What a worker says of an earlier attempt is taken for news of this one."""

    def runs_at(step: Step, worker: Worker, request_id: str, attempt: int) -> Request | None:
        request = step.state.requests.get(request_id)
        if request is None or request.state not in ADMITTED or request.worker_id != worker.worker_id:
            return None
        return request

    patch.setattr(machine, "_runs_at", runs_at)


def repeated_request_is_accepted(patch: Patch) -> None:
    """A request that is known already is taken for another one."""
    submit = machine.HANDLERS[SubmitRequest]

    def accept(step: Step, message: SubmitRequest) -> None:
        step.state.requests.pop(message.request_id, None)
        submit(step, message)

    patch.setitem(machine.HANDLERS, SubmitRequest, accept)


def failed_loads_are_believed(patch: Patch) -> None:
    """A batch is taken to have loaded everything."""
    settle = settle_loads

    def believe(step: Step, worker: Worker, batch: Any, message: worker_events.BatchDone) -> None:
        settle(step, worker, batch, structs.replace(message, failed=(), load_failures=()))

    patch.setattr(completion, "settle_loads", believe)


def lossy_pages_are_shared(patch: Patch) -> None:
    """What stands on a sparse prefix is saved for others."""
    wanted = sequence_computed

    def forget(step: Step, worker: Worker, request: Request, tokens: bytes, known: int, end: Node | None) -> None:
        sparse, request.sparse.span = request.sparse.span, None
        wanted(step, worker, request, tokens, known, end)
        request.sparse.span = sparse

    patch.setattr(completion, "sequence_computed", forget)
    patch.setattr(insertion, "_may_share", lambda request: request.submit.cache.write and not request.is_poisoned)


def snapshot_forgets_timers(patch: Patch) -> None:
    """A scheduler that was restored from a snapshot waits for nothing."""
    decode = decode_state

    def forget(data: bytes) -> Any:
        state = decode(data)
        state.timers = {}
        return state

    patch.setattr(scheduler_process, "decode_state", forget)
    patch.setattr(properties, "decode_state", forget)


def chance_decides(patch: Patch) -> None:
    """A deadline depends on something that is no input."""
    set_timer, calls = Step.set_timer, [0]

    def jitter(step: Step, timer_id: str, kind: Any, subject: str, delay_ms: int) -> str:
        calls[0] += 1
        return set_timer(step, timer_id, kind, subject, delay_ms + calls[0] % 3)

    patch.setattr(Step, "set_timer", jitter)


def ends_are_forgotten(patch: Patch) -> None:
    """That a request is refused is never told to its gateway."""
    to_gateway = Step.to_gateway

    def swallow(step: Step, gateway_id: str, word: Any) -> None:
        if getattr(word, "code", "") not in ("queue_full", "context_length_exceeded"):
            to_gateway(step, gateway_id, word)

    patch.setattr(Step, "to_gateway", swallow)


def cut_nodes_vanish_whole(patch: Patch) -> None:
    """Of a node that is cut for an eviction, the part that stays is forgotten with the part that goes."""
    cut = split_node

    def forget(state: Any, node: Any, pages: int) -> Any:
        upper = cut(state, node, pages)
        state.tree.nodes.pop(node.id)
        return upper

    patch.setattr(trimming, "split_node", forget)


def who_was_never_listed_is_never_lost(patch: Patch) -> None:
    """Only who saw itself listed learns that it was given up."""
    see = Listing.see

    def only_listed(listing: Listing, *, is_listed: bool, epoch: int, seq: int, stored_seq: int) -> bool:
        return see(listing, is_listed=is_listed, epoch=epoch, seq=seq, stored_seq=0)

    patch.setattr(Listing, "see", only_listed)


DEFECTS: dict[Callable[[Patch], None], int] = {
    unlocking_is_skipped: 1,
    lock_ends_with_the_deadline: 68,
    leases_of_the_lost_are_kept: 53,
    pages_are_released_twice: 0,
    attempt_is_ignored: 523,
    repeated_request_is_accepted: 11,
    failed_loads_are_believed: 16,
    lossy_pages_are_shared: 40,
    snapshot_forgets_timers: 1,
    chance_decides: 0,
    ends_are_forgotten: 18,
    cut_nodes_vanish_whole: 7,
    who_was_never_listed_is_never_lost: 28,
}
"""Each with the first seed that finds it, so that a test need not begin from 0."""
