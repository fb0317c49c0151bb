"""What a gateway's health says of its cell: its name, which has to be the router's, and its model."""

from __future__ import annotations

import pytest

from services.gateway.router.bootstrap import compose
from services.gateway.router.config import RouterConfig
from services.gateway.router.health import ask
from services.gateway.router.views import cells_view, health_view
from tests.unit.gateway.router.scripted_gateway import ScriptedGateway, routing


@pytest.mark.parametrize(
    ("health", "error"),
    [
        (b'{"status": "ready", "cell": "lisbon"}', ""),
        (b'{"status": "ready"}', ""),  # A gateway of an earlier release does not tell.
        (b"no json", ""),
        (b'{"cell": 3}', ""),
        (b'{"status": "ready", "cell": ""}', "was started without --cell, and not with --cell lisbon"),
        (b'{"status": "ready", "cell": "porto"}', "was started with --cell porto, and not with --cell lisbon"),
    ],
)
async def test_a_gateway_has_the_name_that_the_router_gives_its_cell(health: bytes, error: str) -> None:
    """Else kept responses are looked for elsewhere: it still gets requests, and operators read why it should not."""
    async with routing({"lisbon": [ScriptedGateway(health=health)]}) as harness:
        (upstream,) = harness.router.gateways["lisbon"]
        for _ in range(2):
            await ask(harness.router, "lisbon", upstream)
        (cell,) = cells_view(harness.router).data
        status = health_view(harness.router)
        response = await harness.chat("x")

    assert response.status_code == 200
    assert (cell.gateways[0].error.endswith(error), cell.error.endswith(error)) == (True, True)
    assert bool(cell.gateways[0].error) is bool(cell.error) is bool(error)
    assert (status.status, status.cells_open) == ("degraded" if error else "ready", 1)


async def test_without_reports_a_request_goes_to_the_cell_whose_health_names_its_model() -> None:
    """Another cell would answer that there is no such model; a name that no cell tells, as an adapter's, fits all."""
    cells = {name: [ScriptedGateway(health=b'{"model": "%s"}' % name.encode())] for name in ("one", "two")}
    async with routing(cells) as harness:
        for name, (upstream,) in harness.router.gateways.items():
            await ask(harness.router, name, upstream)
        asked = [await harness.chat(str(n), model=name) for n in range(4) for name in ("one", "two")]
        tuned = [await harness.chat(str(n) * 300, model="tuned") for n in range(12)]

    assert [response.headers["x-thermocline-cell"] for response in asked] == ["one", "two"] * 4
    assert {response.headers["x-thermocline-cell"] for response in tuned} == {"one", "two"}


async def test_a_gateway_that_was_started_again_with_its_name_is_well() -> None:
    """The fault goes with its cause, also where the gateway is not ready meanwhile."""
    gateway = ScriptedGateway(health=b'{"cell": ""}', is_ready=False)
    await gateway.start()
    router = compose(RouterConfig(cells=(f"a={gateway.url}",)))
    (upstream,) = router.gateways["a"]
    await ask(router, "a", upstream)
    before = upstream.misnamed
    gateway.health, gateway.is_ready = b'{"cell": "a"}', True
    await ask(router, "a", upstream)
    upstream.close()
    await gateway.stop()

    assert before
    assert not upstream.misnamed
    assert health_view(router).status == "ready"


async def test_a_request_without_a_model_is_known_as_one_that_names_it() -> None:
    """The router takes the model that the first of its cells serves; gateways count both as one, too."""
    text = "a shared document " * 200
    health = b'{"model": "m"}'
    async with routing({name: [ScriptedGateway(health=health)] for name in "abc"}) as harness:
        for name, (upstream,) in harness.router.gateways.items():
            await ask(harness.router, name, upstream)
        cells = set()
        for number in range(6):
            body = {"messages": [{"role": "user", "content": text + f" {number}"}]} | (
                {"model": "m"} if number % 2 else {}
            )
            response = await harness.client.post("/v1/chat/completions", json=body)
            cells.add(response.headers["x-thermocline-cell"])

    assert len(cells) == 1
