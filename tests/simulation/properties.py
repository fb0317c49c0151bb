"""What must be true of a cell that has come to rest, whatever went wrong on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.gateway.pending import Choice
from services.scheduler.core import check_invariants, decode_state, encode_state, new_state, status
from services.scheduler.fold import Fold
from shared.codec import decode_input
from shared.messages.cell_events import FlushCache, GatewayLost, UnpinPrefix
from shared.messages.requests import SubmitRequest
from tests.simulation.at_rest import check_sizes
from tests.simulation.contents import Broken, require, sampled
from tests.simulation.releases import deciding
from tests.simulation.scheduler_process import as_bytes
from tests.stateful.model_pages import EOS, expected_output

if TYPE_CHECKING:
    from tests.simulation.cell import Cell


def check_end(cell: Cell) -> None:
    """Everything that must hold at the end. Empties the cell's caches on the way. Raises :class:`Broken`."""
    check_invariants(cell.state)
    check_sizes(cell.state)
    _check_outcomes(cell)
    _check_pools(cell, is_flushed=False)
    for pin_id in list(cell.state.pins):
        cell.inputs.append(UnpinPrefix(pin_id=pin_id))
    cell.inputs.append(FlushCache(call_id="last"))
    while cell.scheduler.fold.position < len(cell.inputs.messages):
        require(cell.clock.step(), "the last inputs are never folded")
    _check_pools(cell, is_flushed=True)
    require(not cell.state.tree.nodes, "nodes are left that stand for nothing")
    _check_replay(cell)


def _check_pools(cell: Cell, *, is_flushed: bool) -> None:
    """Every page is free or cached; after a flush, free."""
    for pool in status(cell.state, "scheduler").pools:
        require(pool.free + pool.cached + pool.leased == pool.total, f"{pool.owner} miscounts its pages")
        require(pool.leased == 0, f"{pool.owner} leaks {pool.leased} pages")
        require(not is_flushed or pool.free == pool.total, f"{pool.owner} keeps {pool.cached} pages after a flush")


def _check_outcomes(cell: Cell) -> None:
    """Every request ended once, with the right tokens or an error that something justifies."""
    lost = {
        message.gateway_id
        for message in (decode_input(item.data) for item in cell.inputs.messages)
        if isinstance(message, GatewayLost)
    }
    alive = {gateway.name for gateway in cell.all_gateways if gateway.is_running}
    for request_id, submit in cell.submitted.items():
        if submit.gateway_id not in alive:
            continue  # Its client was cut off, and sees nothing more.
        outcome = cell.outcomes.get(request_id)
        require(outcome is not None, f"{request_id} never ended")
        assert outcome is not None
        choice = outcome[1]
        _check_tokens(cell, submit, choice)
        if choice.failure is not None:
            why = justification(cell, submit, choice.failure.code, is_lost=submit.gateway_id in lost)
            require(bool(why), f"{request_id} ended with {choice.failure.code} for no reason: {choice.failure}")


def _check_tokens(cell: Cell, submit: SubmitRequest, choice: Choice) -> None:
    """The client has the tokens that the model gives a request that is alone in the world, or the first of them."""
    tokens = choice.assembly.tokens
    if submit.request_id not in cell.lossy:
        expected = expected_output(submit)
        require(tokens == expected[: len(tokens)], f"{submit.request_id} got {tokens}, and not {expected}")
        require(choice.failure is not None or tokens == expected, f"{submit.request_id} got a part of its answer")
        return
    before = list(cell.arrivals[submit.request_id].prompt)
    for token in tokens:
        may_be = [sampled(submit.sampling.seed, before, is_lossy=lossy) for lossy in (False, True)]
        require(token in may_be, f"{submit.request_id} got a token that follows from nothing")
        before.append(token)
    ends = bool(tokens) and tokens[-1] == EOS and not submit.sampling.ignore_eos
    is_whole = ends or len(tokens) == submit.sampling.max_tokens
    require(choice.failure is not None or is_whole, f"{submit.request_id} got a part of its answer")


def justification(cell: Cell, submit: SubmitRequest, code: str, *, is_lost: bool) -> str:
    """Why a request may end with this error, or ""."""
    scenario, arrival = cell.scenario, cell.arrivals[submit.request_id]
    config = scenario.config
    room = scenario.shape.device_pages * scenario.shape.page_size
    kinds = {fault.kind for fault in scenario.faults}
    reasons = {
        "queue_full": config.max_queued < len(scenario.arrivals),
        "tenant_queue_full": config.max_queued_per_tenant > 0,
        "deadline_exceeded": arrival.deadline_ms > 0,
        "cancelled": arrival.cancel_after_us > 0 or is_lost,
        "attempts_exhausted": cell.failures.get(submit.request_id, 0) >= config.max_attempts,
        "context_length_exceeded": submit.prompt_tokens + submit.sampling.max_tokens > room,
        "service_unavailable": "clock_is_set" in kinds,  # The time to say from where to resume passes in a moment.
    }
    return code if reasons.get(code, False) else ""


def _check_replay(cell: Cell) -> None:
    """The recorded inputs lead to the recorded bytes, also for a fold that was restored half way."""
    life = next((life for life in reversed(cell.history.lives) if life.epoch), cell.history.lives[0])
    begun = life.folded_from
    state = new_state()
    state.epoch = life.epoch
    fold = Fold(state, position=begun, time_ns=life.time_ns)
    half = (begun + len(cell.inputs.messages)) // 2
    for message in cell.inputs.messages[begun:]:
        if message.seq == half:
            data = encode_state(fold.state)
            fold = Fold(decode_state(data), position=fold.position, time_ns=fold.time_ns)
            require(encode_state(fold.state) == data, "a snapshot is another one when it was read")
        with deciding(cell.history.life_of(message.seq).release):
            folded = fold.apply(message)
        if [as_bytes(output) for output in folded.outputs] != cell.history.record[message.seq - 1]:
            raise Broken(f"input {message.seq} leads to other outputs in a replay")
    require(encode_state(fold.state) == encode_state(cell.state), "a replay ends in another state")
