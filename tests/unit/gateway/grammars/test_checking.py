"""Grammars of requests to a real gateway beside a scripted cell."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from services.gateway.accounts import OPEN
from services.gateway.grammars.checking import REMEMBERED, GrammarChecks, scope_of
from services.gateway.grammars.requested import Asked
from services.gateway.keys import key_hash, new_key
from services.gateway.tenants import Tenant, render_tenants
from shared.errors import InvalidRequest, Unavailable
from shared.messages.requests import Grammar
from tests.unit.gateway.running_gateway import FACTS, running_gateway, says, tokenizer

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def checks(**given: Any) -> GrammarChecks:
    return GrammarChecks(tokenizer().definition, FACTS.vocab_size, (2,), **given)


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}}}},
            "response_format.json_schema.schema",
            "not",
        ),
        ({"guided_regex": "("}, "guided_regex", "unclosed"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar", "unknown name"),
        (
            {"structured_outputs": {"grammar": 'start: %json {"multipleOf": 1000003}'}},
            "structured_outputs.grammar",
            "multipleOf",
        ),
        ({"guided_choice": []}, "guided_choice", "length"),
        ({"guided_json": 5}, "guided_json", ""),
        ({"structured_outputs": {"json": "{}", "regex": "a"}}, "structured_outputs.regex", "exclude"),
    ],
)
async def test_faulty_grammars_are_bad_requests(change: dict[str, Any], param: str, said: str) -> None:
    """With 400, the field and the reason, and nothing reaches the cell."""
    async with running_gateway(says("x")) as harness:
        answers = [
            await harness.client.post("/v1/chat/completions", json=CHAT | change),
            await harness.client.post("/v1/completions", json={"prompt": "hi"} | change),
        ]

        for answer in answers:
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
            assert error["param"] == param
            assert said in error["message"]
        assert harness.cell.submitted == []
        assert harness.gateway.slots.used == 0


async def test_a_grammar_goes_to_the_worker_with_every_choice() -> None:
    """Each of ``n`` choices is held to it, under a seed of its own."""
    async with running_gateway(says("x")) as harness:
        answer = await harness.client.post("/v1/chat/completions", json=CHAT | {"guided_regex": "[ab]+", "n": 2})

        assert answer.status_code == 200
        assert [each.sampling.grammar for each in harness.cell.submitted] == [Grammar(kind="regex", text="[ab]+")] * 2
        assert len({each.sampling.seed for each in harness.cell.submitted}) == 2


async def test_a_model_without_an_end_has_no_grammars() -> None:
    """A request is told why."""
    unending = checks()
    unending._eos_token_ids = ()
    with pytest.raises(InvalidRequest, match="no token that ends"):
        await unending.checked(Grammar(kind="regex", text="a"), param="guided_regex")
    unending.close()


async def test_a_grammar_is_compiled_once() -> None:
    """Whether it compiles is remembered, for as many grammars as are kept."""
    made = checks()
    for number in [*range(REMEMBERED + 2), 5]:
        await made.checked(Grammar(kind="regex", text=f"a{number}"), param="x")
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="unclosed"):
            await made.checked(Grammar(kind="regex", text="("), param="x")
    made.close()

    assert len(made._faults) == REMEMBERED
    assert ("", ("regex", "a0")) not in made._faults
    assert ("", ("regex", "a5")) in made._faults


async def test_a_tenant_does_not_learn_which_grammars_others_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar that is known would be checked faster: each tenant's, and each salt's, is compiled anew."""
    compiled: list[str] = []

    def compile_noted(tokens: Any, grammar: Grammar) -> None:
        compiled.append(grammar.scope)

    monkeypatch.setattr("services.gateway.grammars.checking.compile_grammar", compile_noted)
    made, grammar = checks(), Grammar(kind="regex", text="a")
    acme, other = Tenant(salt="a" * 16), Tenant(salt="b" * 16)
    scopes = [scope_of(acme, None), scope_of(acme, "s"), scope_of(other, "s"), scope_of(OPEN, "s"), scope_of(OPEN, "")]
    for scope in scopes * 2:
        assert (await made.checked(grammar, param="x", scope=scope)).scope == scope
    made.close()

    assert compiled == scopes
    assert len(set(scopes)) == 5
    assert scopes[-1] == ""


async def test_a_tenants_grammars_go_to_the_worker_under_its_scope(tmp_path: Path) -> None:
    """Those of fields, and those that allow for reasoning as well, in both APIs."""
    key = new_key()
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(render_tenants({"a": Tenant(salt="a" * 16, keys=(key_hash(key.encode()),))}))
    tenants.chmod(0o600)
    headers = {"authorization": f"Bearer {key}"}
    async with running_gateway(says("x"), tenants=str(tenants), reasoning_parser="think") as harness:
        for path, body in (
            ("/v1/chat/completions", CHAT | {"guided_regex": "a"}),
            ("/v1/completions", {"prompt": "hi", "guided_regex": "a"}),
        ):
            await harness.client.post(path, json=body, headers=headers)
        grammars = [each.sampling.grammar for each in harness.cell.submitted]

    assert [grammar.kind for grammar in grammars if grammar] == ["lark", "regex"]
    assert {grammar.scope for grammar in grammars if grammar} == {scope_of(Tenant(salt="a" * 16), None)}


async def test_the_event_loop_goes_on_while_a_grammar_is_checked() -> None:
    """Checking is done in another thread, and who waits too long is told to come back."""
    release = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        made = checks(executor=thread, timeout_s=0.01)

        def slow() -> Grammar:
            release.wait()
            return Grammar(kind="regex", text="a")

        waiting = asyncio.ensure_future(made.made(Asked("x", slow)))
        with pytest.raises(Unavailable, match="being checked"):
            await waiting
        release.set()
