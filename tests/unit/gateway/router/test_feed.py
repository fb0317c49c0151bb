"""The receiver of cells' reports: a hub that dies, hangs or refuses, and cells that publish nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import nats.errors
import pytest

from services.gateway.router import bootstrap, feed
from services.gateway.router.bootstrap import compose
from services.gateway.router.cells import STALE_S
from services.gateway.router.config import RouterConfig
from services.gateway.router.feed import Feed
from services.gateway.router.parts import Router
from services.gateway.router.views import cells_view, health_view
from shared import subjects
from shared.bus.protocol import Handler, Subscription
from shared.codec import encode
from shared.errors import ConfigError, Unavailable
from shared.lifecycle import Lifecycle
from shared.messages.cells import CellLoad
from shared.metrics import render
from tests.memory_bus import MemoryBroker, MemoryBus
from tests.unit.gateway.router.scripted_gateway import ScriptedGateway
from tests.waiting import until
from thermocline.supervisor.ports import free_port

CELLS = ("a=http://127.0.0.1:1", "b=http://127.0.0.1:2")


class Hub:
    """A hub whose connections, and whose subscriptions, fail by the given errors, first to last, and then work."""

    def __init__(self, *, connecting: tuple[Exception, ...] = (), subscribing: tuple[Exception, ...] = ()) -> None:
        self.broker = MemoryBroker()
        self.connecting = list(connecting)
        self.subscribing = list(subscribing)
        self.made: list[MemoryBus] = []
        self.closed = 0
        self.subscribed: set[str] = set()

    @property
    def is_heard(self) -> bool:
        """Whether loads that are told from now on arrive."""
        return bool(self.made) and self.made[-1].is_connected and subjects.CELLS_LOAD in self.subscribed

    async def connect_with(self, settings: object, name: str, *, timeout_s: float) -> MemoryBus:
        if self.connecting:
            raise self.connecting.pop(0)
        bus = self.broker.connect(name)
        self.made.append(bus)
        subscribe, close = bus.subscribe, bus.close

        async def subscribing(subject: str, handler: Handler, **named: Any) -> Subscription:
            if self.subscribing:
                raise self.subscribing.pop(0)
            made = await subscribe(subject, handler, **named)
            self.subscribed.add(subject)
            return made

        async def closing() -> None:
            self.closed += 1
            await close()

        bus.subscribe, bus.close = subscribing, closing  # type: ignore[method-assign]
        return bus

    async def tell(self, cell: str) -> None:
        load = CellLoad(cell=cell, gateway="g", incarnation="1", workers=3)
        await self.broker.connect("cell").publish(subjects.cell_load(cell, "g"), encode(load))


@pytest.fixture
def use_hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Hub], Hub]:
    def use(hub: Hub) -> Hub:
        monkeypatch.setattr(feed, "connect_with", hub.connect_with)
        monkeypatch.setattr(feed, "FIRST_S", 0.001)
        monkeypatch.setattr(feed, "SWEEP_S", 0.001)
        return hub

    return use


def router(**settings: Any) -> Router:
    return compose(RouterConfig(cells=CELLS, **settings))


@pytest.mark.parametrize(
    "hub",
    [
        Hub(connecting=(Unavailable("it is away"), Unavailable("it is away"))),
        Hub(connecting=(nats.errors.TimeoutError(),)),
        Hub(subscribing=(Unavailable("it died"), Unavailable("it hangs"))),
        Hub(connecting=(ConfigError("it refuses us"),), subscribing=(ConfigError("it does not let us subscribe"),)),
    ],
    ids=["away", "hangs", "dies", "refuses"],
)
async def test_a_hub_that_fails_is_asked_again(hub: Hub, use_hub: Callable[[Hub], Hub]) -> None:
    """While a router serves: whatever failed is closed, and once the hub is well its reports arrive."""
    use_hub(hub)
    listening = Feed(found := router())
    running = asyncio.create_task(listening.run())
    await until(lambda: hub.is_heard)
    await hub.tell("a")
    await until(lambda: found.cells.by_name["a"].load is not None)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert running.cancelled()
    assert hub.closed == len(hub.made)


@pytest.mark.parametrize(
    "hub",
    [Hub(connecting=(ConfigError("it refuses us"),)), Hub(subscribing=(ConfigError("it refuses us"),))],
    ids=["credentials", "permissions"],
)
async def test_a_hub_that_refuses_at_the_start_is_a_fault_of_the_settings(
    hub: Hub, use_hub: Callable[[Hub], Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One typed error, before the router says that it is ready: the process ends with exit code 2."""
    use_hub(hub)
    ready: list[str] = []
    monkeypatch.setattr("services.gateway.router.bootstrap.progress.ready", lambda: ready.append("ready"))
    gateway = ScriptedGateway()
    await gateway.start()
    config = RouterConfig(cells=(f"a={gateway.url}",), port=free_port(), log_level="error")
    try:
        with pytest.raises(ConfigError, match="it refuses us"):
            await bootstrap.run(config, Lifecycle())
    finally:
        await gateway.stop()

    assert ready == []
    assert hub.closed == len(hub.made)


async def test_a_defect_of_a_part_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not within a group of errors, which no handler of the process would know."""

    async def broken(self: Feed) -> None:
        raise ConfigError("a fault")

    monkeypatch.setattr(Feed, "_sweep", broken)

    with pytest.raises(ConfigError, match="a fault"):
        await Feed(router(summaries=False)).run()


async def test_a_cell_that_never_published_has_an_age_and_an_error(
    use_hub: Callable[[Hub], Hub], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the router's start; one that has published counts from then. The log has one line for each silence."""
    hub = use_hub(Hub())
    now = [100.0]
    found = router()
    found.clock, found.started_s = (lambda: now[0]), 100.0
    listening = Feed(found)
    sweep, sweeps = found.cells.sweep, list[float]()

    def noted(now_s: float) -> None:
        sweeps.append(now_s)
        sweep(now_s)

    monkeypatch.setattr(found.cells, "sweep", noted)
    running = asyncio.create_task(listening.run())
    await until(lambda: hub.is_heard)
    await hub.tell("b")
    await until(lambda: found.cells.by_name["b"].load is not None)
    before = {cell.name: cell.error for cell in cells_view(found).data}
    now[0] = 100.0 + 2 * STALE_S
    await until(lambda: sweeps.count(now[0]) > 5)
    age_s = _age("a")
    after = {cell.name: (cell.summary_age_s, cell.error[:26]) for cell in cells_view(found).data}
    warned = capsys.readouterr().out
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert age_s == 2 * STALE_S
    assert before == {"a": "", "b": ""}
    assert after == {"a": (None, "its gateways have reported"), "b": (2 * STALE_S, "its gateways have reported")}
    assert (warned.count("cell_reports_nothing"), sorted(listening.silent)) == (2, ["a", "b"])


def _age(cell: str) -> float:
    name = f'thermocline_router_summary_age_seconds{{cell="{cell}"}}'
    lines = render("router_").decode().splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith(name)), -1.0)


async def test_without_summaries_no_cell_is_silent() -> None:
    """Nothing is expected of it."""
    found = router(summaries=False)
    found.clock, found.started_s = (lambda: 1e6), 0.0

    assert [cell.error for cell in cells_view(found).data] == ["", ""]
    assert health_view(found).status == "ready"
