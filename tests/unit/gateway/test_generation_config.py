"""A field of a model's generation_config.json that is not applied does not go unseen."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.gateway.running_gateway import FACTS, running_gateway


async def test_a_field_that_is_not_applied_is_a_degradation() -> None:
    """The gateway serves, and says which field it is."""
    async with running_gateway(facts=replace(FACTS, unserved=("no_repeat_ngram_size",))) as harness:
        health = await harness.client.get("/health/ready")
        (lack,) = harness.gateway.own_degraded()

    assert (health.status_code, health.json()["status"]) == (200, "degraded")
    assert (lack.what, lack.setting) == ("generation config", "--model")
    assert "no_repeat_ngram_size" in lack.reason
