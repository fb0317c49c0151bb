"""The pages for people answer whoever only looks whether they are there."""

from __future__ import annotations

import pytest

from tests.unit.gateway.running_gateway import running_gateway


@pytest.mark.parametrize("path", ["/", "/docs", "/ui", "/ui/", "/ui/main.js"])
async def test_a_head_request_has_the_headers_of_the_page(path: str) -> None:
    """And no body."""
    async with running_gateway(over_http=True) as harness:
        looked, got = await harness.client.head(path), await harness.client.get(path)

    assert looked.status_code == got.status_code
    assert {**looked.headers, "date": "", "x-request-id": ""} == {**got.headers, "date": "", "x-request-id": ""}
    assert looked.content == b""
