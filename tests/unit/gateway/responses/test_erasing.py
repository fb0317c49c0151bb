"""A response is erased once, and a router that must ask again is told so."""

from __future__ import annotations

from services.gateway.responses.kept import REPEATED_HEADER
from tests.unit.gateway.running_gateway import running_gateway, says


async def test_a_response_that_the_lost_half_of_a_retry_erased_is_erased() -> None:
    """By the router's word that a gateway was lost with the same request; without it there is nothing to erase."""
    async with running_gateway(says("hello")) as harness:
        made = (await harness.client.post("/v1/responses", json={"input": "hi"})).json()["id"]
        path = f"/v1/responses/{made}"
        erased = await harness.client.delete(path)
        repeated = await harness.client.delete(path, headers={REPEATED_HEADER: "1"})
        again = await harness.client.delete(path)

    assert erased.status_code == repeated.status_code == 200
    assert repeated.json() == erased.json() == {"id": made, "object": "response", "deleted": True}
    assert (again.status_code, again.json()["error"]["code"]) == (404, "response_not_found")
