"""What workers report."""

from typing import Any

import msgspec
import pytest

from services.scheduler.policies.thermocline import ThermoclinePolicy
from shared.messages.base import pack_int32
from shared.messages.worker_events import BatchDone, FinishedToo, RequestFinished
from shared.messages.worker_plans import PreemptRequest, RunBatch
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell, orders


def finish(cell: CellModel, name: str, output: list[int], reason: Any = "stop") -> RequestFinished:
    """A worker's RequestFinished."""
    return RequestFinished(
        worker_id="worker-0",
        incarnation=cell.workers["worker-0"].incarnation,
        request_id=name,
        attempt=1,
        reason=reason,
        output=pack_int32(output),
    )


def test_one_message_tells_of_several_ends(make_cell: MakeCell) -> None:
    """Each is over; what is stale among them is counted, and those who wait get all the places in one batch."""
    cell = make_cell(max_running=2)
    for name in ("a", "b", "c", "d"):
        cell.submit([ord(name)] * 4, max_tokens=8, request_id=name)
    (plan,) = [batch.plan for batch in cell.state.workers["worker-0"].work.batches][:1]
    cell.feed(BatchDone(worker_id="worker-0", incarnation=cell.workers["worker-0"].incarnation, plan=plan))

    others = (
        FinishedToo(request_id="gone", attempt=1, reason="stop", output=b""),
        FinishedToo(request_id="b", attempt=1, reason="length", output=pack_int32([5, 6])),
    )
    said = cell.feed(msgspec.structs.replace(finish(cell, "a", [7, 8]), others=others))

    assert [[chunk.request_id for chunk in batch.chunks] for batch in orders(said, RunBatch)] == [["c", "d"]]
    assert set(cell.state.requests) == {"c", "d"}
    assert cell.state.counters["stale_inputs"] == 1


def test_prompt_and_output_are_cached_but_the_last_token(make_cell: MakeCell) -> None:
    """KV of the last sampled token was never computed."""
    cell = make_cell(page_size=1)
    cell.serve([1, 2, 3], max_tokens=4, ignore_eos=True)

    assert cell.state.workers["worker-0"].pool.cached == 3 + 3


def test_a_next_turn_finds_the_last_answer(make_cell: MakeCell) -> None:
    """A conversation's prompt contains the answer before; its pages are reused."""
    cell = make_cell(page_size=1)
    cell.serve([1, 2, 3], max_tokens=4, ignore_eos=True, request_id="a")
    answer = cell.gateways["gateway"].tokens["a"]

    cell.serve([1, 2, 3, *answer, 50])

    assert cell.admitted[1].cached_tokens == 6


@pytest.mark.parametrize(
    ("reason", "output", "cached"), [("cancelled", [], 0), ("error", [5, 6, 7], 0), ("stop", [5, 6, 7], 8)]
)
def test_only_what_was_certainly_computed_is_cached(
    make_cell: MakeCell, reason: Any, output: list[int], cached: int
) -> None:
    """An end before the first chunk was reported, or after an error, leaves nothing behind."""
    cell = make_cell()
    cell.submit([1] * 6, max_tokens=8, request_id="a")

    cell.feed(finish(cell, "a", output, reason))

    assert cell.state.workers["worker-0"].pool.cached * 4 == cached
    assert cell.state.workers["worker-0"].pool.leased == 0


def test_a_batch_may_be_answered_after_the_end_of_its_request(make_cell: MakeCell) -> None:
    """BatchDone for a request that is gone changes nothing."""
    cell = make_cell()
    cell.submit([1] * 6, max_tokens=8, request_id="a")
    cell.feed(finish(cell, "a", [5, 6, 7]))
    cached = cell.state.workers["worker-0"].pool.cached
    (batch,) = cell.state.workers["worker-0"].work.batches

    cell.feed(BatchDone(worker_id="worker-0", incarnation=cell.workers["worker-0"].incarnation, plan=batch.plan))

    assert cell.state.workers["worker-0"].work.batches == []
    assert cell.state.workers["worker-0"].pool.cached == cached


def test_a_failed_chunk_starts_its_request_again(make_cell: MakeCell) -> None:
    """The attempt is preempted and a new one planned; chunks sent meanwhile cannot count."""
    cell = make_cell(max_batch_tokens=4, batches_ahead=3)
    cell.submit([1] * 12, request_id="a")
    cell.workers["worker-0"].fail_next_chunk_of = "a"
    cell.drain()

    assert [order.attempt for order in cell.admitted] == [1, 2]
    assert sum(len(orders(outputs, PreemptRequest)) for outputs in cell.outputs) == 1
    assert cell.gateways["gateway"].ended == {"a": "finished"}


def test_a_request_that_fails_too_often_is_given_up(make_cell: MakeCell) -> None:
    """max_attempts bounds the starts."""
    cell = make_cell(max_attempts=3)
    cell.submit([1] * 4, request_id="a")
    for _ in range(50):
        cell.workers["worker-0"].fail_next_chunk_of = "a"
        cell.round()
    cell.drain()

    assert [order.attempt for order in cell.admitted] == [1, 2, 3]
    assert cell.gateways["gateway"].ended == {"a": "attempts_exhausted"}
    assert cell.state.workers["worker-0"].pool.free == 32


def test_eviction_policies_hear_how_long_each_answer_is(make_cell: MakeCell) -> None:
    """Those of the device and of its node's host pool, of the request that the tokens were computed for."""
    cell = make_cell(policy="thermocline", page_size=1, pages=64, host_pages=64, host_writes="through")
    cell.submit([1, 2, 3], max_tokens=4, ignore_eos=True)
    cell.serve([7, 8, 9, 10], max_tokens=30, ignore_eos=True)

    assert len(cell.state.orders) == 2
    for order in cell.state.orders.values():
        assert isinstance(order, ThermoclinePolicy)
        contexts = order.prefixes.contexts
        used_by = [context for node, context in zip(order.prefixes.node, order.prefixes.context, strict=True) if node]
        assert {(contexts.prompt[context], contexts.answer[context]) for context in used_by} == {(3, 4), (4, 30)}
        assert not order.running
