"""Tokens go to each gateway in order, at most once, and never hold anything up."""

from __future__ import annotations

import asyncio

from services.worker.token_sender import TokenSender
from shared import subjects
from shared.bus.protocol import Delivery
from shared.codec import decode
from shared.messages.tokens import TokenBatch, TokenItem
from tests.memory_bus import MemoryBroker, MemoryBus


def item(index: int, *, request_id: str = "r", text: str = "") -> TokenItem:
    return TokenItem(request_id=request_id, attempt=1, index=index, tokens=(index,), text=text)


def batch(step: int, *items: TokenItem) -> TokenBatch:
    return TokenBatch(worker_id="w", incarnation="inc", step=step, items=items)


class Gateway:
    """Collects what arrives on one gateway's subject."""

    def __init__(self) -> None:
        self.batches: list[TokenBatch] = []

    async def hear(self, delivery: Delivery) -> None:
        self.batches.append(decode(delivery.data, TokenBatch))


async def set_up(
    *, max_payload: int = 2**20, capacity: int = 10
) -> tuple[MemoryBus, TokenSender, list[Gateway], list[TokenItem]]:
    broker = MemoryBroker(max_payload=max_payload)
    worker, reader = broker.connect("worker"), broker.connect("gateways")
    gateways = [Gateway(), Gateway()]
    for number, gateway in enumerate(gateways):
        await reader.subscribe(subjects.tokens(f"g{number}"), gateway.hear)
    too_large: list[TokenItem] = []
    return worker, TokenSender(worker, capacity=capacity, on_too_large=too_large.append), gateways, too_large


async def settle(gateways: list[Gateway]) -> None:
    """Let the deliveries be handled."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_each_gateway_gets_its_own_messages_in_order() -> None:
    """One message per gateway and step."""
    _, sender, gateways, _ = await set_up()
    sender.put("g0", batch(1, item(0), item(0, request_id="q")))
    sender.put("g1", batch(1, item(0, request_id="p")))
    sender.put("g0", batch(2, item(1)))

    await sender.flush()
    await settle(gateways)

    assert [one.step for one in gateways[0].batches] == [1, 2]
    assert [one.step for one in gateways[1].batches] == [1]
    assert len(gateways[0].batches[0].items) == 2


async def test_no_message_overtakes_one_that_waits() -> None:
    """Whatever the connection has no room for is sent before what is put later, when there is room again."""
    bus, sender, gateways, _ = await set_up()
    bus.has_room = False
    sender.put("g0", batch(1, item(0)))
    bus.has_room = True
    sender.put("g0", batch(2, item(1)))
    running = asyncio.create_task(sender.run())
    await settle(gateways)
    sender.put("g0", batch(3, item(2)))
    await settle(gateways)
    running.cancel()

    assert [one.step for one in gateways[0].batches] == [1, 2, 3]


async def test_without_a_broker_messages_are_dropped() -> None:
    """The gateway asks for them later; the worker goes on."""
    bus, sender, gateways, _ = await set_up()
    bus.disconnect()
    sender.put("g0", batch(1, item(0)))
    await sender.flush()
    bus.reconnect()
    sender.put("g0", batch(2, item(1)))

    await sender.flush()
    await settle(gateways)

    assert [one.step for one in gateways[0].batches] == [2]


async def test_the_queue_is_bounded() -> None:
    """The oldest messages give way where the connection takes none."""
    bus, sender, gateways, _ = await set_up(capacity=3)
    bus.has_room = False
    for step in range(6):
        sender.put("g0", batch(step, item(step)))

    await sender.flush()
    await settle(gateways)

    assert [one.step for one in gateways[0].batches] == [3, 4, 5]


async def test_a_message_that_is_too_large_is_split() -> None:
    """All items arrive, in order."""
    _, sender, gateways, too_large = await set_up(max_payload=500)
    sender.put("g0", batch(1, *(item(0, request_id=f"r{number}", text="x" * 100) for number in range(8))))

    await sender.flush()
    await settle(gateways)

    names = [one.request_id for sent in gateways[0].batches for one in sent.items]
    assert names == [f"r{number}" for number in range(8)]
    assert too_large == []


async def test_an_item_that_no_message_can_carry_ends_its_request() -> None:
    """The gateway learns of an error, and the worker is told to stop the request."""
    _, sender, gateways, too_large = await set_up(max_payload=500)
    huge = item(3, text="x" * 1000)
    sender.put("g0", batch(1, item(0, request_id="q"), huge))

    await sender.flush()
    await settle(gateways)

    assert too_large == [huge]
    last = gateways[0].batches[-1].items[0]
    assert (last.request_id, last.index, last.finish) == ("r", 3, "error")
    assert "does not fit" in last.error
