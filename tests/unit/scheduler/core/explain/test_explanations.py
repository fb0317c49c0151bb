"""What the core remembers of admissions: where a prompt came from, why the rest was computed, what it waited for."""

import random
from collections import OrderedDict
from typing import Any

import pytest

from services.scheduler.core import decode_state, encode_state, find_admissions
from services.scheduler.core.cache.holdings import written
from services.scheduler.core.cache.prefix_tree import Node
from services.scheduler.core.explain.explanations import overlay
from services.scheduler.core.explain.recollection import (
    MOST_ADMISSIONS,
    MOST_ATTEMPTS,
    MOST_DEPARTED,
    MOST_WAITS,
    Recollection,
)
from shared.messages.cell_events import FlushCache, WorkerLost
from shared.messages.explanations import Admission, GetAdmissions, PromptSpan, Wait
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell
from tests.unit.scheduler.core.fetching import CHUNK, PAGE, prompt
from tests.unit.scheduler.core.reading_in_part import QUARTER, put_in_parts, sparse_cell
from tests.unit.scheduler.core.sharing_nodes import two_nodes

DOCUMENT = list(range(100, 140))
"""Ten pages of four tokens."""


def explained(cell: CellModel, request_id: str) -> Admission:
    """The last attempt of a request, as the core tells it."""
    return find_admissions(cell.state, GetAdmissions(request_ids=(request_id,))).admissions[-1]


def spans(cell: CellModel, request_id: str) -> list[tuple[int, int, str, str]]:
    return [(span.start, span.end, span.source, span.reason) for span in explained(cell, request_id).prompt]


def asked(cell: CellModel, tokens: list[int], **options: Any) -> list[tuple[int, int, str, str]]:
    """A request is served; what was made of its prompt."""
    name = cell.serve(tokens, **{"max_tokens": 1} | options)
    return spans(cell, name)


def test_a_new_prompt_was_never_stored(make_cell: MakeCell) -> None:
    """Its last token, which ends a page, is computed in any case."""
    cell = make_cell()

    assert asked(cell, DOCUMENT) == [(0, 36, "computed", "never_stored"), (36, 40, "computed", "last_token")]
    assert asked(cell, [*DOCUMENT, 7, 8]) == [(0, 40, "device", ""), (40, 42, "computed", "partial_chunk")]
    assert asked(cell, [*DOCUMENT, 7]) == [(0, 40, "device", ""), (40, 41, "computed", "last_token")]


@pytest.mark.parametrize("hints", [{"read": False}, {"prompt_logprobs": 1}])
def test_who_reads_no_cache_opted_out(make_cell: MakeCell, hints: dict[str, int]) -> None:
    """All of it, the end included."""
    cell = make_cell()
    asked(cell, DOCUMENT)

    assert asked(cell, DOCUMENT, **hints) == [(0, 40, "computed", "opted_out")]


def test_another_namespace_is_told_apart_from_nothing(make_cell: MakeCell) -> None:
    """The newest namespaces are looked into."""
    cell = make_cell()
    asked(cell, DOCUMENT, salt="a")

    assert asked(cell, DOCUMENT, salt="b")[0] == (0, 36, "computed", "other_salt")


def test_what_was_evicted_is_told_as_far_as_it_was_the_same(make_cell: MakeCell) -> None:
    """By the very tokens: behind where they differ, nothing was stored. With tier, policy and time."""
    cell = make_cell(pages=16)
    asked(cell, DOCUMENT)
    gone_ns = cell.time_ns
    asked(cell, [5] * 60)
    name = cell.serve([*DOCUMENT[:20], *[9] * 20], max_tokens=1)

    assert spans(cell, name) == [
        (0, 20, "computed", "evicted"), (20, 36, "computed", "never_stored"), (36, 40, "computed", "last_token"),
    ]  # fmt: skip
    span = explained(cell, name).prompt[0]
    assert (span.departure, span.tier, span.policy) == ("evicted", "device", "lru")
    assert gone_ns <= span.at_ns <= cell.time_ns


def test_what_left_in_parts_is_told_in_parts(make_cell: MakeCell) -> None:
    """The end of a document goes before its beginning, and each part says when."""
    cell = make_cell(pages=16)
    asked(cell, DOCUMENT)
    asked(cell, [5] * 44)
    asked(cell, [6] * 56)

    found = asked(cell, DOCUMENT)

    assert found[-1] == (36, 40, "computed", "last_token")
    assert {reason for _, _, _, reason in found[:-1]} == {"evicted"}
    assert found[-2][1] == 36


def test_what_host_memory_refused_was_not_admitted(make_cell: MakeCell) -> None:
    """Selective admission asks for a frequency that one use does not have."""
    cell = make_cell(pages=16, host_pages=64, admission="selective", admission_frequency=4)
    asked(cell, DOCUMENT)
    asked(cell, [5] * 60)

    assert asked(cell, DOCUMENT)[0][2:] == ("computed", "not_admitted")


def test_a_copy_in_host_memory_is_a_source_and_an_eviction_from_there_a_reason(make_cell: MakeCell) -> None:
    """Where it was last."""
    cell = make_cell(pages=16, host_pages=16)
    asked(cell, DOCUMENT)
    asked(cell, [5] * 60)
    assert asked(cell, DOCUMENT)[0][2:] == ("host", "")
    for token in (6, 7, 8):
        asked(cell, [token] * 60)

    name = cell.serve(DOCUMENT, max_tokens=1)

    assert explained(cell, name).prompt[0].reason == "evicted"
    assert explained(cell, name).prompt[0].tier == "host"


def test_what_came_from_another_node_is_a_source_of_its_own(make_cell: MakeCell) -> None:
    """It counts as such in usage, too; the next one finds it on the device."""
    cell = two_nodes(make_cell)
    cell.lose_worker("worker-a")

    assert asked(cell, prompt(3))[0] == (0, 3 * CHUNK, "lent", "")
    assert (cell.admitted[-1].lent_tokens, cell.admitted[-1].host_tokens) == (3 * CHUNK, 0)
    assert cell.state.counters["hit_tokens_lent"] == 3 * CHUNK
    assert asked(cell, prompt(3))[0] == (0, 3 * CHUNK, "device", "")


def test_a_flush_is_no_policys_decision(make_cell: MakeCell) -> None:
    """It is told as an order."""
    cell = make_cell()
    asked(cell, DOCUMENT)
    cell.feed(FlushCache(call_id="1"))
    name = cell.submit(DOCUMENT, max_tokens=1)

    assert explained(cell, name).prompt[0].departure == "flushed"


def test_a_lost_worker_takes_its_cache_along(make_cell: MakeCell) -> None:
    """And a device that the worker of a request does not reach is told as such."""
    cell = make_cell(workers=2, neighbour_loads=False)
    name = cell.serve(DOCUMENT, max_tokens=1)
    holder = explained(cell, name).worker_id
    other = "worker-1" if holder == "worker-0" else "worker-0"
    cell.workers.pop(holder)
    worker = cell.state.workers[holder]
    cell.feed(WorkerLost(worker_id=holder, incarnation=worker.incarnation))
    again = cell.submit(DOCUMENT, max_tokens=1)

    assert explained(cell, again).worker_id == other
    assert explained(cell, again).prompt[0].departure == "lost"


def test_waits_are_told_with_their_times(make_cell: MakeCell) -> None:
    """A request that waited for another was deferred from its look on until the other had computed."""
    cell = make_cell(page_size=64, pages=2048, lease_tokens=64, max_batch_tokens=8192)
    document = [position % 10 for position in range(2048)]
    cell.submit([*document, *[50] * 12], max_tokens=1, request_id="first")
    cell.serve([*document, *[51] * 12], max_tokens=1, request_id="second")

    admission = explained(cell, "second")

    (wait,) = admission.waits
    assert wait.kind == "deferral"
    assert admission.accepted_ns <= wait.start_ns < wait.end_ns <= admission.admitted_ns
    assert spans(cell, "second") == [(0, 2048, "device", ""), (2048, 2060, "computed", "partial_chunk")]
    assert explained(cell, "first").waits == ()
    assert cell.state.recollection is not None
    assert cell.state.recollection.waits == {}


def test_past_its_deadline_a_deferred_request_says_so(make_cell: MakeCell) -> None:
    """It computes what the other was about to bring."""
    cell = make_cell(page_size=64, pages=2048, lease_tokens=64, max_batch_tokens=8192, defer_deadline_ms=500)
    document = [position % 10 for position in range(2048)]
    cell.submit([*document, *[50] * 12], max_tokens=1, request_id="first")
    cell.submit([*document, *[51] * 12], max_tokens=1, request_id="second")
    (timer,) = cell.timers
    cell.fire(timer)

    assert spans(cell, "second")[0] == (0, 2048, "computed", "deadline")


def test_what_is_read_in_part_is_sparse_and_what_stands_on_it_is_never_cached(make_cell: MakeCell) -> None:
    """An exact request behind it is told why it found only the prefix."""
    cell = sparse_cell(make_cell)
    document = list(range(1000, 1000 + 8 * PAGE))
    put_in_parts(cell, document)
    tail = list(range(2 * PAGE + 3))
    lossy = cell.serve([*document, *tail], max_tokens=1, importance=QUARTER)
    exact = cell.serve([*document, *tail], max_tokens=1)

    end = len(document)
    assert spans(cell, lossy)[0] == (0, end, "sparse", "")
    assert spans(cell, exact)[0] == (0, end, "disk", "")
    assert spans(cell, exact)[1][3] == "other_fidelity"


@pytest.mark.parametrize("seed", range(4))
def test_spans_cover_the_prompt_and_agree_with_usage(make_cell: MakeCell, seed: int) -> None:
    """Whatever happens in small pools: in order, without a gap, and with the counts that the worker is told."""
    rng = random.Random(seed)
    cell = make_cell(pages=40, host_pages=24, workers=2, admission=rng.choice(["all", "selective"]), defer_tokens=8)
    for number in range(120):
        document = [rng.randrange(6)] * rng.randrange(1, 60)
        cell.submit([*document, number], max_tokens=rng.randrange(1, 5), salt=rng.choice("aab"))
        if rng.random() < 0.4:
            cell.round()
        for order in cell.admitted[-3:]:
            assert cell.state.recollection is not None
            if order.request_id not in cell.state.recollection.admissions:
                continue
            admission = explained(cell, order.request_id)
            if admission.attempt != order.attempt:
                continue
            end = 0
            found: dict[Any, Any] = {}
            for span in admission.prompt:
                assert span.start == end < span.end
                assert (span.source == "computed") == bool(span.reason)
                end = span.end
                found[span.source] = found.get(span.source, 0) + span.end - span.start
            assert end == order.prompt_tokens
            assert found.get("device", 0) == order.device_tokens
            assert found.get("host", 0) == order.host_tokens
            assert found.get("neighbour", 0) == order.neighbour_tokens
    cell.drain()


def test_a_snapshot_holds_nothing_of_it(make_cell: MakeCell) -> None:
    """Behind one the core says of what was used before that it does not know how it left."""
    cell = make_cell(pages=16, host_pages=0)
    asked(cell, DOCUMENT)
    asked(cell, [5] * 60)
    before = encode_state(cell.state)
    cell.state = decode_state(before)

    assert cell.state.recollection == Recollection(is_whole=False)
    assert encode_state(cell.state) == before
    assert asked(cell, DOCUMENT)[0][2:] == ("computed", "unknown")
    assert asked(cell, [77] * 40)[0][2:] == ("computed", "never_stored")


def test_restored_tokens_are_no_longer_computed() -> None:
    """Chunk after chunk, and only those."""
    before = (
        PromptSpan(start=0, end=8, source="device"),
        PromptSpan(start=8, end=40, source="computed", reason="pending"),
        PromptSpan(start=40, end=42, source="computed", reason="partial_chunk"),
    )
    after = overlay(overlay(before, 8, 16), 16, 32)

    assert [(span.start, span.end, span.source, span.reason) for span in after] == [
        (0, 8, "device", ""), (8, 32, "hidden", ""), (32, 40, "computed", "pending"),
        (40, 42, "computed", "partial_chunk"),
    ]  # fmt: skip


def test_what_is_remembered_is_bounded() -> None:
    """By number and by bytes of tokens, the oldest first; then it is no longer all."""
    memory = Recollection()
    for number in range(MOST_DEPARTED + 5):
        memory.note_departed(number, bytes(16), "evicted", "host", "lru", number)
    assert (len(memory.departed), memory.is_whole) == (MOST_DEPARTED, False)
    assert 4 not in memory.departed
    memory.note_departed(-1, bytes(16 * 2**20), "evicted", "host", "lru", 1)
    assert (list(memory.departed), memory.departed_bytes) == ([-1], 16 * 2**20)

    for number in range(MOST_ADMISSIONS + 5):
        for attempt in range(1, MOST_ATTEMPTS + 3):
            admission = Admission(request_id=str(number), attempt=attempt, worker_id="w", accepted_ns=1, admitted_ns=2)
            memory.note_admitted(admission)
    assert len(memory.admissions) == MOST_ADMISSIONS
    assert [kept.attempt for kept in memory.admissions["99"]] == [1, 4, 5, 6]

    for number in range(MOST_WAITS + 5):
        memory.note_wait("r", Wait(kind="deferral", start_ns=2 * number, end_ns=2 * number + 1))
    assert len(memory.waits["r"]) == MOST_WAITS
    assert memory.waits["r"][-1].end_ns == 2 * (MOST_WAITS + 4) + 1


def test_what_leaves_together_is_remembered_as_if_it_left_one_by_one() -> None:
    """Of more than can be remembered, the last; what would be forgotten at once is not even written down."""
    nodes = [
        Node(id=number, parent=1, label=bytes(12), record=written(number, 0)) for number in range(MOST_DEPARTED + 40)
    ]
    together, apart = Recollection(), Recollection()
    together.note_gone(nodes, "lost", "device", "lru", 5)
    for node in nodes:
        apart.note_gone([node], "lost", "device", "lru", 5)

    assert together == apart
    assert not together.is_whole


def test_forgetting_the_oldest_does_not_look_at_those_before() -> None:
    """A plain dictionary finds its first entry behind the places of all that were deleted before it."""
    assert isinstance(Recollection().departed, OrderedDict)
