"""Who gets /metrics at the API's own port."""

from __future__ import annotations

import pytest

from services.gateway import metrics
from services.gateway.config import GatewayConfig
from tests.unit.gateway.running_gateway import running_gateway

KEY = "an-admin-key-of-some-length"


async def test_by_default_everybody_does() -> None:
    """As with other servers; an API key neither opens nor closes it."""
    async with running_gateway(api_keys=("key",)) as harness:
        response = await harness.client.get("/metrics")

    assert response.status_code == 200
    assert "thermocline_http_requests_open" in response.text


async def test_it_can_take_the_admin_key() -> None:
    """Nobody else's, in either header; health stays open."""
    async with running_gateway(api_keys=("key",), admin_key=KEY, api_metrics="admin") as harness:
        ask = harness.client.get
        refused = [await ask("/metrics", headers=headers) for headers in ({}, {"authorization": "Bearer key"})]
        allowed = [await ask("/metrics", headers=h) for h in ({"x-admin-key": KEY}, {"authorization": f"Bearer {KEY}"})]
        health = await ask("/health/live")
        page = await ask("/")

    assert [response.status_code for response in refused] == [401, 401]
    assert refused[0].json()["error"]["code"] == "invalid_admin_key"
    assert [response.status_code for response in allowed] == [200, 200]
    assert health.status_code == 200
    assert "Prometheus metrics; for operators" in page.text


async def test_it_can_be_closed() -> None:
    """Then there is no such route, under whatever key, and nothing speaks of it."""
    async with running_gateway(admin_key=KEY, api_metrics="closed") as harness:
        response = await harness.client.get("/metrics", headers={"x-admin-key": KEY})
        described = (await harness.client.get("/openapi.json")).json()["paths"]
        page = (await harness.client.get("/")).text

    assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")
    assert "/metrics" not in described
    assert "/metrics" not in page


def test_what_takes_the_admin_key_needs_one() -> None:
    """A gateway that could show its metrics to nobody does not start, and says why."""
    with pytest.raises(ValueError, match="--api-metrics admin needs --admin-key"):
        GatewayConfig(model="m", api_metrics="admin")


def test_times_of_requests_are_told_apart_to_half_an_hour() -> None:
    """A request may live that long: with buckets up to a minute, every slow percentile was a minute."""
    whole = (
        metrics.TIME_TO_FIRST_TOKEN,
        metrics.E2E_LATENCY,
        metrics.QUEUE_TIME,
        metrics.PREFILL_TIME,
        metrics.DECODE_TIME,
        metrics.INFERENCE_TIME,
    )
    bounds = [
        [float(sample.labels["le"]) for family in time.collect() for sample in family.samples if "le" in sample.labels]
        for time in whole
    ]

    assert all(found[-7:] == [60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, float("inf")] for found in bounds)
