"""Three cells of a tiny model, each with its own broker, behind a router: conversations stay, shared prefixes meet, and
when the gateway of a cell is killed the others answer, with the same tokens, until it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.gateway.router.relay import CELL_HEADER
from shared import subjects
from shared.bus.nats_bus import connect
from shared.bus.protocol import Bus, Delivery
from tests.checkpoints import VOCAB_SIZE
from tests.integration.conftest import Checkpoints
from tests.nats_server import NatsServer
from tests.reference import Reference
from tests.several_cells import SeveralCells, cells_of, hub_config, leaf_config, several_cells
from tests.waiting import until
from thermocline.supervisor.config import SupervisorConfig
from thermocline.supervisor.ports import free_port

pytestmark = pytest.mark.integration

NAMES = ("lisbon", "porto", "faro")
DOCUMENT_TOKENS = 256
ANSWER_TOKENS = 8


class Asking:
    """Asks through a router, and compares every answer with the model's own."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._rng = random.Random(11)

    def document(self) -> list[int]:
        return [self._rng.randrange(8, VOCAB_SIZE) for _ in range(DOCUMENT_TOKENS)]

    def longer(self, prompt: list[int]) -> list[int]:
        """The prompt with a question whose answer no rounding decides."""
        return self._reference.decided(
            lambda: [*prompt, *(self._rng.randrange(8, VOCAB_SIZE) for _ in range(12))], ANSWER_TOKENS
        )

    async def ask(self, client: httpx.AsyncClient, prompt: list[int]) -> tuple[str, dict[str, Any]]:
        """The cell that answered, and the answer, which has been checked."""
        response = await client.post(
            "/v1/completions",
            json={"prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "return_token_ids": True},
        )
        assert response.status_code == httpx.codes.OK, response.text
        answer: dict[str, Any] = response.json()
        assert answer["choices"][0]["token_ids"] == self._reference.greedy(prompt, ANSWER_TOKENS)
        return response.headers[CELL_HEADER.decode()], answer


@pytest.fixture
def cells(tmp_path: Path, checkpoints: Checkpoints) -> Iterator[SeveralCells]:
    model, _ = checkpoints["llama"]
    settings = SupervisorConfig(
        model=str(model), dtype="float32", threads=1, device_kv_bytes=2**22, host_kv_bytes=2**24, page_size=16
    )
    with several_cells(tmp_path, NAMES, settings) as found:
        yield found


@pytest.fixture
def asking(checkpoints: Checkpoints) -> Asking:
    return Asking(checkpoints["llama"][1])


async def test_three_cells_behind_a_router(cells: SeveralCells, asking: Asking) -> None:
    """One story, because the cells take long to start."""
    async with cells.router() as client:
        homes = await _conversations_stay(client, asking)
        document, home = await _prefixes_meet(client, asking)
        await _another_router_knows(cells, asking, document, home)
        await _a_killed_cell_falls_back(cells, client, asking, document, home)
        await _it_comes_back(client, asking, home)

    assert len(set(homes)) > 1


async def test_only_a_cells_own_heads_and_load_leave_it(tmp_path: Path) -> None:
    """Neither its inputs, status and calls, nor what it says in another cell's name, reach the hub or other cells."""
    leaf_port = free_port()
    with contextlib.ExitStack() as stack:
        servers = {"hub": NatsServer(tmp_path / "hub", config=hub_config(NAMES, leaf_port))}
        servers |= {
            name: NatsServer(tmp_path / name, name=name, config=leaf_config(name, leaf_port)) for name in NAMES[:2]
        }
        for server in servers.values():
            stack.enter_context(server)
        hub, lisbon, porto = [
            await connect((url,), "test")
            for url in (f"nats://router:router@127.0.0.1:{servers['hub'].port}", *(servers[n].url for n in NAMES[:2]))
        ]
        at_hub = await _subjects_heard(hub, "tc.cells.>")
        at_lisbon = await _subjects_heard(lisbon, "tc.cells.>", "tc.in.>", "tc.status", "tc.rpc.>")
        secret = ("tc.in.request.g", "tc.status", "tc.rpc.scheduler.status", subjects.cell_load("lisbon", "g"))
        try:
            # The leaf connects while we ask; what is published behind the first arrival is told in order.
            while subjects.cell_load("porto", "g") not in at_hub:
                await porto.publish(subjects.cell_load("porto", "g"), b"1")
                await asyncio.sleep(0.02)
            for subject in (*secret, subjects.cell_load("porto", "last")):
                await porto.publish(subject, b"2")
            await until(lambda: subjects.cell_load("porto", "last") in at_hub)
            await lisbon.publish(subjects.cell_load("lisbon", "last"), b"3")
            await until(lambda: subjects.cell_load("lisbon", "last") in at_lisbon)
        finally:
            for bus in (hub, lisbon, porto):
                await bus.close()

    assert not set(secret) & set(at_hub)
    assert set(at_lisbon) == {subjects.cell_load("lisbon", "last")}


async def _subjects_heard(bus: Bus, *subscribed: str) -> list[str]:
    """Subjects of what is heard, as the list grows."""
    heard: list[str] = []

    async def hear(delivery: Delivery) -> None:
        heard.append(delivery.subject)

    for subject in subscribed:
        await bus.subscribe(subject, hear)
    return heard


async def _conversations_stay(client: httpx.AsyncClient, asking: Asking) -> list[str]:
    """At least six of them, and as many as it takes until two cells have one: chance may send the first few to one."""
    homes: list[str] = []
    while len(homes) < 6 or (len(set(homes)) < 2 and len(homes) < 60):
        prompt, turns = asking.document(), []
        for _ in range(3):
            prompt = asking.longer(prompt)
            cell, answer = await asking.ask(client, prompt)
            turns.append((cell, answer["usage"]["prompt_tokens_details"]["cached_tokens"]))
            prompt = [*prompt, *answer["choices"][0]["token_ids"]]
        assert len({cell for cell, _ in turns}) == 1
        assert all(cached >= DOCUMENT_TOKENS for _, cached in turns[1:])
        homes.append(turns[0][0])
    return homes


async def _prefixes_meet(client: httpx.AsyncClient, asking: Asking) -> tuple[list[int], str]:
    document = asking.document()
    found = [await asking.ask(client, asking.longer(document)) for _ in range(4)]

    assert len({cell for cell, _ in found}) == 1
    return document, found[0][0]


async def _another_router_knows(cells: SeveralCells, asking: Asking, document: list[int], home: str) -> None:
    """By what the document's cell tells, which begins with all that it holds: this router has sent nothing yet."""
    async with cells.router(id="another") as client:
        async with asyncio.timeout(60):
            while not any(cell["heads"] for cell in await cells_of(client) if cell["name"] == home):
                await asyncio.sleep(0.05)
        cell, answer = await asking.ask(client, asking.longer(document))

    assert cell == home
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= DOCUMENT_TOKENS


async def _a_killed_cell_falls_back(
    cells: SeveralCells, client: httpx.AsyncClient, asking: Asking, document: list[int], home: str
) -> None:
    """Requests that wait there when it dies are answered by others, and rightly."""
    prompts = [asking.longer(document) for _ in range(6)]
    cells.cells[home].kill("gateway", signal.SIGSTOP)  # It takes requests, and answers none.
    asked = [asyncio.create_task(asking.ask(client, prompt)) for prompt in prompts]
    async with asyncio.timeout(60):
        while not 0 < await _in_flight(client, home) == sum(not each.done() for each in asked):
            await asyncio.sleep(0.02)
    cells.cells[home].kill("gateway")
    answered = await asyncio.gather(*asked)

    assert home not in {cell for cell, _ in answered}


async def _in_flight(client: httpx.AsyncClient, name: str) -> int:
    """How many requests a router waits for at a cell."""
    return sum(cell["in_flight"] for cell in await cells_of(client) if cell["name"] == name)


async def _it_comes_back(client: httpx.AsyncClient, asking: Asking, home: str) -> None:
    """Its supervisor starts the gateway again, and prompts go there without being sent."""
    async with asyncio.timeout(120):
        while not all(cell["is_open"] for cell in await cells_of(client)):
            await asyncio.sleep(0.05)
        while (await asking.ask(client, asking.longer(asking.document())))[0] != home:
            pass
