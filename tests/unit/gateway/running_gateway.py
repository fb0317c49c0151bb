"""A gateway with its real routes and shell, beside a scripted cell on an in-memory bus."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
from starlette.types import ASGIApp

from services.gateway.app import build_app
from services.gateway.bootstrap import callers_of, compose, fidelity_rules
from services.gateway.config import GatewayConfig
from services.gateway.connections import Connections
from services.gateway.gateway import Gateway
from services.gateway.http_server import bind, make_server
from services.gateway.model_facts import ModelFacts, SamplingDefaults
from services.gateway.shell import GatewayShell
from services.gateway.tokenizer import Tokenizer
from shared.lifecycle import Lifecycle
from shared.messages.requests import SubmitRequest
from shared.model_files import load_config
from tests.memory_bus import MemoryBroker, MemoryBus
from tests.unit.gateway.scripted_cell import ScriptedCell, Step
from tests.waiting import until

JSON = {"content-type": "application/json"}
"""Of requests whose body is given as bytes."""

MODEL_DIR = Path(__file__).resolve().parents[3] / "models" / "thermocline-mha"

FACTS = ModelFacts(
    name="test-model",
    fingerprint="0123456789abcdef0123456789abcdef",
    answer_fingerprint="89abcdef0123456789abcdef01234567",
    vocab_size=load_config(MODEL_DIR)["vocab_size"],
    max_context=512,
    defaults=SamplingDefaults(),
    created=1_700_000_000,
    eos_token_ids=(2,),
)


_tokenizers: list[Tokenizer] = []


def tokenizer() -> Tokenizer:
    """The bundled model's tokenizer, loaded once."""
    if not _tokenizers:
        _tokenizers.append(Tokenizer(MODEL_DIR, threads=1))
    return _tokenizers[0]


def says(text: str) -> Callable[[SubmitRequest], Sequence[Step]]:
    """A script whose every answer is ``text``, token by token."""
    ids = tokenizer().encode_now(text, add_special_tokens=False)
    steps = [(token, tokenizer().decode([token])) for token in ids]
    return lambda request: steps


@dataclass
class Harness:
    """The parts that a test touches. ``client`` talks to the application without a network, or over HTTP."""

    gateway: Gateway
    cell: ScriptedCell
    bus: MemoryBus
    app: ASGIApp
    client: httpx.AsyncClient
    life: Lifecycle
    connections: Connections
    base_url: str = ""

    def placed(self, request: SubmitRequest) -> int:
        """Tokens of a running request that the gateway has."""
        choice = self.gateway.dispatcher.pending.get(request.request_id)
        return choice.assembly.next_index if choice is not None else 0

    def taken(self, request: SubmitRequest) -> int:
        """Those of them that were written to the client."""
        choice = self.gateway.dispatcher.pending.get(request.request_id)
        return choice.assembly.next_index - choice.assembly.waiting_tokens if choice is not None else 0

    async def heard(self) -> None:
        """Wait until the gateway has heard the cell's status."""
        await self.cell.announce()
        await until(lambda: not self.gateway.reasons_not_ready())


@contextlib.asynccontextmanager
async def running_gateway(
    script: Callable[[SubmitRequest], Sequence[Step]] | None = None,
    *,
    over_http: bool = False,
    facts: ModelFacts = FACTS,
    max_payload: int = 1024 * 1024,
    limits_clock: Callable[[], float] = time.monotonic,
    model_tokenizer: Tokenizer | None = None,
    broker: MemoryBroker | None = None,
    **settings: object,
) -> AsyncIterator[Harness]:
    """``settings`` change the configuration. ``over_http``: a real uvicorn server on a free port. What callers may do
    each minute grows with ``limits_clock``, in seconds. ``model_tokenizer`` is by default that of the bundled model;
    ``broker`` is one that outlives the gateway. Earlier answers are waited for, however busy the machine is.
    """
    broker = broker or MemoryBroker(max_payload=max_payload)
    bus, cell_bus = broker.connect("gateway"), broker.connect("cell")
    cell = ScriptedCell(cell_bus, script)
    await cell.start()
    config = msgspec.convert(
        {"model": str(MODEL_DIR), "id": "gw", "answer_lookup_ms": 20_000} | settings, GatewayConfig
    )
    fidelity = fidelity_rules(config, facts.fingerprint)
    gateway = compose(
        config, bus, facts, model_tokenizer or tokenizer(), "beef0001", fidelity, callers_of(config, limits_clock)
    )
    app = build_app(gateway)
    shell = GatewayShell(gateway, "beef0001")
    life = Lifecycle()
    connections = config.connections()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(cell_bus.close)
        stack.push_async_callback(bus.close)
        stack.push_async_callback(cell.close)
        if over_http:
            sock = bind("127.0.0.1", 0)
            server = make_server(app, connections)
            port = sock.getsockname()[1]
            serving = asyncio.create_task(shell.serve(server, sock, life))
            await until(lambda: server.started)

            async def stop() -> None:
                life.stop()
                await serving

            stack.push_async_callback(stop)
            base_url = f"http://127.0.0.1:{port}"
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=base_url, timeout=60, headers=JSON))
        else:
            await stack.enter_async_context(shell.running())
            base_url = "http://gateway"
            transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
            client = await stack.enter_async_context(
                httpx.AsyncClient(transport=transport, base_url=base_url, timeout=60, headers=JSON)
            )
        harness = Harness(gateway, cell, bus, app, client, life, connections, base_url)
        await harness.heard()
        yield harness
