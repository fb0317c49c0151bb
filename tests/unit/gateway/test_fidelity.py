"""How little of a prefix a request may load: what the caller asks for, within what the deployment allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.gateway.fidelity import FidelityRules
from services.gateway.importance_gate import ImportanceGate
from services.gateway.keys import tenant_id
from services.gateway.openai_schema.sampling import CacheOptions
from shared.errors import InvalidRequest
from shared.messages.requests import CacheHints, Importance
from shared.messages.tokens import ImportanceUsage, Usage
from tests.unit.gateway.quality_gates import gate_file, gate_of
from tests.unit.gateway.running_gateway import Harness, running_gateway, says
from tests.unit.gateway.scripted_cache import ScriptedCache

ASKED = CacheOptions(fidelity="importance", ratio=0.3)
SILENT = CacheOptions()


def chosen(
    rules: FidelityRules, asked: CacheOptions, *, is_scored: bool = False, tenant: str = ""
) -> Importance | None:
    return rules.importance(asked, is_scored=is_scored, tenant=tenant)


def test_a_deployment_allows_nothing_lossy_until_it_is_told_to() -> None:
    """Silence is exact, asking is refused with a word to the operator, and exact can always be asked for."""
    off = FidelityRules()

    assert chosen(off, SILENT) is None
    assert chosen(off, CacheOptions(fidelity="exact")) is None
    with pytest.raises(InvalidRequest, match="--importance gated") as refusal:
        chosen(off, ASKED)
    assert (refusal.value.code, refusal.value.param) == ("importance_off", "cache.fidelity")


def test_what_is_asked_for_is_what_is_loaded() -> None:
    """Where the caller says only the ratio, the rest are the defaults of the message."""
    rules = FidelityRules(mode="on")
    every = CacheOptions(fidelity="importance", ratio=0.5, metric="h2o", first_tokens=4, recent_tokens=8)

    assert chosen(rules, ASKED) == Importance(ratio=0.3)
    assert chosen(rules, every) == Importance(ratio=0.5, metric="h2o", first_tokens=4, recent_tokens=8)
    assert chosen(rules, SILENT) is None


def test_the_scheduler_is_told_how_many_heads_workers_ask() -> None:
    """Reading the keys of three of six heads costs more than it saves where one was enough."""
    rules = FidelityRules(mode="on", probe_heads=1)

    assert chosen(rules, ASKED) == Importance(ratio=0.3, probe_heads=1)


def test_asking_without_a_ratio_takes_the_default() -> None:
    """There must be one."""
    asked = CacheOptions(fidelity="importance")

    assert chosen(FidelityRules(mode="on", default_ratio=0.2), asked) == Importance(ratio=0.2)
    with pytest.raises(InvalidRequest, match="needs a ratio") as refusal:
        chosen(FidelityRules(mode="on"), asked)
    assert refusal.value.param == "cache.ratio"


def test_a_default_holds_for_whoever_says_nothing() -> None:
    """The caller's own ratio and the caller's wish for exact answers both go before it."""
    rules = FidelityRules(mode="on", default_ratio=0.2)

    assert chosen(rules, SILENT) == Importance(ratio=0.2)
    assert chosen(rules, ASKED) == Importance(ratio=0.3)
    assert chosen(rules, CacheOptions(fidelity="exact")) is None


def test_a_key_has_a_default_of_its_own() -> None:
    """Also exact, where everybody else's is not."""
    rules = FidelityRules(mode="on", default_ratio=0.2, ratio_by_tenant={"frugal": 0.1, "exact": 0.0})

    assert chosen(rules, SILENT, tenant="frugal") == Importance(ratio=0.1)
    assert chosen(rules, SILENT, tenant="exact") is None
    assert chosen(rules, SILENT, tenant="other") == Importance(ratio=0.2)


def test_a_default_that_cannot_be_applied_is_no_fault_of_the_callers() -> None:
    """Who reads no cache or wants logprobs of the prompt gets an exact answer; who asks for both is refused."""
    rules = FidelityRules(mode="on", default_ratio=0.2)

    assert chosen(rules, CacheOptions(read=False)) is None
    assert chosen(rules, SILENT, is_scored=True) is None
    with pytest.raises(InvalidRequest, match="logprobs of the prompt") as refusal:
        chosen(rules, ASKED, is_scored=True)
    assert refusal.value.param == "cache.fidelity"


def test_behind_a_gate_silence_means_what_was_measured() -> None:
    """Metric and kept tokens are the gate's, for defaults and for those who say only a ratio."""
    measured = gate_of(method="importance:max", first_tokens=4, recent_tokens=16)
    rules = FidelityRules(mode="gated", gate=ImportanceGate(measured=measured, metric="max"), default_ratio=0.5)

    assert chosen(rules, ASKED) == Importance(ratio=0.3, metric="max", first_tokens=4, recent_tokens=16)
    assert chosen(rules, SILENT) == Importance(ratio=0.5, metric="max", first_tokens=4, recent_tokens=16)


BODIES = [
    ("/v1/completions", {"prompt": [5] * 8, "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
]
LOSSY = {"fidelity": "importance", "ratio": 0.25}


async def refused(harness: Harness, path: str, body: dict[str, Any]) -> tuple[int, str, str | None]:
    """Status, code and field of a refusal; nothing may have been submitted."""
    response = await harness.client.post(path, json=body)
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert harness.cell.submitted == []
    return response.status_code, error["code"], error["param"]


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_options_that_make_no_sense_are_refused(path: str, body: dict[str, Any]) -> None:
    """By both endpoints, with the field at fault, before anything is submitted."""
    cases: list[tuple[dict[str, Any], str]] = [
        ({**LOSSY, "ratio": 1.01}, "cache.ratio"),
        ({**LOSSY, "ratio": 0.009}, "cache.ratio"),
        ({**LOSSY, "ratio": "0.5"}, "cache.ratio"),
        ({**LOSSY, "metric": "l2"}, "cache.metric"),
        ({**LOSSY, "first_tokens": -1}, "cache.first_tokens"),
        ({**LOSSY, "recent_tokens": 2**31}, "cache.recent_tokens"),
        ({**LOSSY, "fidelity": "lossy"}, "cache.fidelity"),
        ({**LOSSY, "read": False}, "cache.read"),
        ({"ratio": 0.25}, "cache.ratio"),
        ({"fidelity": "importance"}, "cache.ratio"),
    ]
    async with running_gateway(says("yes"), importance="on") as harness:
        for cache, param in cases:
            assert await refused(harness, path, {**body, "cache": cache}) == (400, "invalid_request", param), cache


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_logprobs_of_the_prompt_and_importance_exclude_each_other(path: str, body: dict[str, Any]) -> None:
    """An echoed prompt with logprobs is scored as well."""
    scored = {"prompt_logprobs": 1} if "chat" in path else {"echo": True, "logprobs": 1}
    async with running_gateway(says("yes"), importance="on") as harness:
        answer = await refused(harness, path, {**body, **scored, "cache": LOSSY})

    assert answer == (400, "invalid_request", "cache.fidelity")


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_gated_gateway_refuses_what_its_gate_does(path: str, body: dict[str, Any], tmp_path: Path) -> None:
    """And submits what passed, as it was measured."""
    gate = gate_file(tmp_path, first_tokens=4)
    async with running_gateway(says("yes"), importance="gated", importance_gate=gate) as harness:
        for name, value in (("ratio", 0.1), ("metric", "h2o"), ("first_tokens", 0), ("recent_tokens", 1)):
            answer = await refused(harness, path, {**body, "cache": {**LOSSY, name: value}})
            assert answer == (400, "importance_refused", f"cache.{name}")
        response = await harness.client.post(path, json={**body, "cache": LOSSY})

        assert response.status_code == 200
        assert harness.cell.submitted[0].cache.importance == Importance(ratio=0.25, first_tokens=4)


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_what_is_asked_for_is_submitted(path: str, body: dict[str, Any]) -> None:
    """For every choice alike, in the namespace of exact requests: what is cached is exact, and theirs to use."""
    cache = {**LOSSY, "metric": "h2o", "first_tokens": 1, "recent_tokens": 2, "write": False}
    async with running_gateway(says("yes"), importance="on") as harness:
        await harness.client.post(path, json={**body, "n": 2, "cache": cache})
        await harness.client.post(path, json=body)
        lossy, again, exact = harness.cell.submitted

    assert lossy.cache == CacheHints(
        write=False, importance=Importance(ratio=0.25, metric="h2o", first_tokens=1, recent_tokens=2)
    )
    assert again.cache == lossy.cache
    assert exact.cache == CacheHints()
    assert lossy.namespace == exact.namespace


async def test_defaults_follow_the_api_key() -> None:
    """The deployment's, the key's own, and exact for whoever asks for it."""
    settings: dict[str, Any] = {
        "importance": "on",
        "importance_ratio": 0.5,
        "api_keys": ["plain", "frugal=", "exact"],
        "importance_key_ratios": ["frugal==0.1", "exact=0"],
    }
    path, body = BODIES[0]
    async with running_gateway(says("yes"), **settings) as harness:
        for key, cache in (("plain", {}), ("frugal=", {}), ("exact", {}), ("plain", {"fidelity": "exact"})):
            headers = {"authorization": f"Bearer {key}"}
            response = await harness.client.post(path, json={**body, "cache": cache}, headers=headers)
            assert response.status_code == 200
        ratios = [request.cache.importance and request.cache.importance.ratio for request in harness.cell.submitted]

    assert ratios == [0.5, 0.1, None, None]
    assert harness.gateway.fidelity.ratio_by_tenant == {tenant_id(b"frugal="): 0.1, tenant_id(b"exact"): 0.0}


async def test_a_default_leaves_ineligible_requests_exact() -> None:
    """Nobody asked for anything lossy, so nobody is refused."""
    path, body = BODIES[0]
    async with running_gateway(says("yes"), importance="on", importance_ratio=0.5) as harness:
        for extra in ({"prompt_logprobs": 0}, {"echo": True, "logprobs": 0}, {"cache": {"read": False}}):
            assert (await harness.client.post(path, json={**body, **extra})).status_code == 200
        submitted = harness.cell.submitted

    assert [request.cache.importance for request in submitted] == [None] * 3


async def test_prewarming_is_exact_whatever_the_default() -> None:
    """Nothing lossy is cached, so a lossy request would warm nothing."""
    key = "an-admin-key-of-some-length"
    async with (
        running_gateway(says("yes"), importance="on", importance_ratio=0.5, admin_key=key) as harness,
        ScriptedCache(harness.cell.bus),
    ):
        body = {"prompts": ["something to keep"]}
        response = await harness.client.post("/v1/cache/prewarm", json=body, headers={"x-admin-key": key})

    assert response.status_code == 200
    assert harness.cell.submitted[0].cache.importance is None


async def test_usage_and_metrics_tell_what_was_loaded() -> None:
    """In the answer's usage, in the last chunk of a stream, and summed up for the operator."""
    loaded = ImportanceUsage(
        ratio=0.25, metric="last_pooled", loaded_tokens=2, layers=6, layers_fallen_back=1, disk_bytes=300
    )
    path, body = BODIES[0]
    names = {
        'thermocline_prompt_tokens_cached_total{tier="sparse"}': 8,
        'thermocline_importance_choices_total{outcome="lossy"}': 1,
        'thermocline_importance_choices_total{outcome="exact"}': 1,
        "thermocline_importance_prefix_tokens_total": 8,
        "thermocline_importance_loaded_tokens_total": 2,
        'thermocline_importance_layers_total{probes="agreed"}': 5,
        'thermocline_importance_layers_total{probes="disagreed"}': 1,
        "thermocline_importance_disk_bytes_total": 300,
    }

    async def values() -> dict[str, float]:
        lines = (await harness.client.get("/metrics")).text.splitlines()
        found = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(found.get(name, 0)) for name in names}

    async with running_gateway(says("yes"), importance="on") as harness:
        before = await values()
        exact = (await harness.client.post(path, json={**body, "cache": LOSSY})).json()["usage"]
        harness.cell.usage = Usage(sparse_tokens=8, importance=loaded)
        lossy = (await harness.client.post(path, json={**body, "cache": LOSSY})).json()["usage"]
        after = await values()

    assert exact["importance"] is None
    assert lossy["importance"] == {
        "ratio": 0.25, "metric": "last_pooled", "loaded_tokens": 2, "prefix_tokens": 8, "layers": 6,
        "layers_fallen_back": 1, "disk_bytes": 300,
    }  # fmt: skip
    assert lossy["prompt_tokens_details"]["sparse_tokens"] == lossy["prompt_tokens_details"]["cached_tokens"] == 8
    assert {name: after[name] - before[name] for name in names} == names
