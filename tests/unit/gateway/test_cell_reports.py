"""What a gateway tells routers of its cell."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from services.gateway.cell_reports import EMPTY_FOR, FIRST_TOKEN_BYTES, MOST_TOLD_BYTES, CellReports, capacity_tokens
from services.gateway.held_heads import unpack_heads
from services.gateway.prompt_heads import Head, asked_of
from services.gateway.router.cells import Cells
from shared import subjects
from shared.bus.protocol import Delivery
from shared.codec import decode, encode
from shared.messages.cells import HEAD_BYTES, CellHeads, CellLoad, HeadsWanted
from shared.messages.status import PoolStatus, StorageBudget
from tests.unit.gateway.running_gateway import Harness, running_gateway, says
from tests.unit.gateway.scripted_cell import cell_status
from tests.waiting import until

BODY = {"messages": [{"role": "user", "content": "a long text that many ask about " * 20}], "max_tokens": 4}


class Listener:
    """Hears what is told, and gives it to a router's cells."""

    def __init__(self) -> None:
        self.heads: list[CellHeads] = []
        self.loads: list[CellLoad] = []
        self.cells = Cells(["lisbon"])

    async def on_heads(self, delivery: Delivery) -> None:
        self.heads.append(decode(delivery.data, CellHeads))
        self.cells.hear_heads(self.heads[-1], 0.0)

    async def on_load(self, delivery: Delivery) -> None:
        self.loads.append(decode(delivery.data, CellLoad))
        self.cells.hear_load(self.loads[-1], 0.0)

    async def listen(self, harness: Harness) -> None:
        await harness.bus.subscribe(subjects.CELLS_HEADS, self.on_heads)
        await harness.bus.subscribe(subjects.CELLS_LOAD, self.on_load)


def reports(harness: Harness) -> CellReports:
    found = harness.gateway.reports
    assert found is not None
    return found


async def hears(harness: Harness, *, nodes: int, **changes: Any) -> None:
    """Announce a status, and wait until the gateway has it."""
    await harness.cell.announce(nodes=nodes, **changes)
    await until(lambda: harness.gateway.cell.status is not None and harness.gateway.cell.status.nodes == nodes)


async def test_an_answered_prompt_is_told_with_the_load() -> None:
    """A router that hears it matches the whole head, and knows how busy the cell is."""
    listener = Listener()
    async with running_gateway(says("yes"), cell="lisbon") as harness:
        await listener.listen(harness)
        response = await harness.client.post("/v1/chat/completions", json=BODY)
        await harness.cell.announce(workers=3, running=2, queued=1, nodes=1)
        await until(lambda: len(harness.gateway.cell.worker_ids()) == 3)
        # It began to listen behind the first whole summary, so it asks for another as routers do.
        await harness.bus.publish(subjects.heads_wanted("lisbon"), encode(HeadsWanted(cell="lisbon")))
        await until(lambda: any(told.is_first for told in listener.heads))
        await reports(harness).tell()
        await until(lambda: bool(listener.loads) and listener.loads[-1].workers == 3)
    head = asked_of(msgspec.json.encode(BODY), "test-model").head  # The request names no model.
    load = listener.loads[-1]

    assert response.status_code == 200
    assert listener.cells.index.matches(head) == {"lisbon": head.depths[-1]}
    assert (load.cell, load.running, load.queued, load.models) == ("lisbon", 2, 1, ("test-model",))
    assert load.heads_number == listener.heads[-1].number
    assert listener.cells.wanting() == []


@pytest.mark.parametrize("extra", [{"cache": {"write": False}}, {"cache": {"read": False}}])
async def test_what_leaves_the_cache_alone_is_not_told(extra: dict[str, object]) -> None:
    """A request that may not read or write the cache says nothing of it."""
    async with running_gateway(says("yes"), cell="lisbon") as harness:
        response = await harness.client.post("/v1/chat/completions", json=BODY | extra)
        held = len(reports(harness).held)

    assert response.status_code == 200
    assert held == 0


async def test_a_gateway_without_a_cell_tells_nothing() -> None:
    """And looks at no body twice."""
    listener = Listener()
    async with running_gateway(says("yes")) as harness:
        await listener.listen(harness)
        await harness.client.post("/v1/chat/completions", json=BODY)

    assert harness.gateway.reports is None
    assert not listener.heads
    assert not listener.loads


async def test_a_whole_summary_comes_in_parts_to_whoever_wants_it() -> None:
    """Every head once, numbered, the first part marked."""
    listener = Listener()
    count = MOST_TOLD_BYTES // HEAD_BYTES + 10
    async with running_gateway(says("yes"), cell="lisbon") as harness:
        await harness.bus.subscribe(subjects.CELLS_HEADS, listener.on_heads)
        await hears(harness, nodes=1)
        digests = tuple(range(1, count + 1))
        depths = tuple(range(10, 10 * count + 1, 10))
        reports(harness).held.note(Head(digests, depths, 10 * count), count, 0)
        await harness.bus.publish(subjects.heads_wanted("lisbon"), encode(HeadsWanted(cell="lisbon")))
        await until(lambda: bool(listener.heads) and _is_whole(listener.heads, count))

    assert listener.cells.index.count("lisbon") == count


def _is_whole(heads: Sequence[CellHeads], count: int) -> bool:
    """Whether the last whole summary is complete; changes may be told before and behind it."""
    firsts = [place for place, told in enumerate(heads) if told.is_first]
    if not firsts:
        return False
    told = heads[firsts[-1] : firsts[-1] + heads[firsts[-1]].more + 1]
    found = [digest for part in told for digest in unpack_heads(part.added)]
    assert [part.number for part in told] == list(range(told[0].number, told[0].number + len(told)))
    return len(told) == 2 and sorted(found) == list(range(1, count + 1))


async def test_work_is_told_as_what_was_asked_for_and_what_was_found() -> None:
    """Prompt tokens of this gateway's requests, less those that were refused, and the scheduler's count of hits."""
    listener = Listener()
    async with running_gateway(says("yes"), cell="lisbon") as harness:
        await listener.listen(harness)
        usage = (await harness.client.post("/v1/chat/completions", json=BODY)).json()["usage"]
        await hears(harness, nodes=1, counters={"hit_tokens_device": 5, "hit_tokens_disk": 7, "preemptions": 9})
        await reports(harness).tell()
        await until(lambda: bool(listener.loads) and listener.loads[-1].found_tokens > 0)
    load = listener.loads[-1]

    assert load.asked_tokens == usage["prompt_tokens"]
    assert load.found_tokens == 12
    assert load.token_bytes != FIRST_TOKEN_BYTES


async def test_a_request_without_a_token_is_no_work() -> None:
    """What was sent for it is taken back when its client has gone."""
    async with running_gateway(cell="lisbon") as harness:
        listener = Listener()
        await listener.listen(harness)
        asking = asyncio.create_task(harness.client.post("/v1/chat/completions", json=BODY))
        await until(lambda: harness.gateway.slots.used == 1 and bool(harness.cell.submitted))
        await reports(harness).tell()
        await until(lambda: bool(listener.loads) and listener.loads[-1].asked_tokens > 0)
        asking.cancel()
        await until(lambda: harness.gateway.slots.used == 0)
        await reports(harness).tell()
        await until(lambda: listener.loads[-1].asked_tokens == 0)


async def test_an_empty_cell_is_believed() -> None:
    """When the scheduler has no node and no chunk, nothing is held: as after a flush."""
    async with running_gateway(says("yes"), cell="lisbon") as harness:
        await harness.client.post("/v1/chat/completions", json=BODY)
        held = reports(harness).held
        await hears(harness, nodes=1, seq=2)
        await reports(harness).tell()
        before = len(held)
        await hears(harness, nodes=0, seq=3)
        for _ in range(EMPTY_FOR):
            await reports(harness).tell()

    assert before > 0
    assert len(held) == 0


def test_a_cells_capacity_is_that_of_its_pools_and_disks() -> None:
    """An object store has no bound, and a cell without pages has none that is known."""
    pools = (
        PoolStatus(owner="w", tier="device", total=10, free=0, cached=0, leased=0),
        PoolStatus(owner="s", tier="host", total=20, free=0, cached=0, leased=0),
        PoolStatus(owner="s", tier="state", total=99, free=0, cached=0, leased=0),
    )
    status = cell_status(pools=pools, page_bytes=100, budgets=(StorageBudget(storage_id="s", disk=1000),))
    remote = msgspec.structs.replace(status, budgets=(StorageBudget(storage_id="s", has_remote=True),))

    assert capacity_tokens(status) == (10 + 20 + 10) * 16
    assert capacity_tokens(remote) is None
    assert capacity_tokens(msgspec.structs.replace(status, page_bytes=0)) is None
