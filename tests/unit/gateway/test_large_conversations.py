"""Large conversations of every API are converted beside the event loop, one like the other within bounds."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from services.gateway import chat_prompt
from services.gateway.responses import kept
from services.gateway.routes import chat, messages, responses
from tests.unit.gateway.running_gateway import running_gateway, says

SAID = [{"role": "user", "content": ""}]
MANY = 3_000
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": SAID * MANY},
    "/v1/messages": {"messages": SAID * MANY, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": SAID * MANY},
    "/v1/responses": {"input": SAID * MANY},
    "/v1/responses/input_tokens": {"input": SAID * MANY},
}


def watched(monkeypatch: pytest.MonkeyPatch, *places: tuple[Any, str]) -> list[str]:
    """Names of the threads in which functions of modules are called from now on."""
    names: list[str] = []

    def put(module: Any, name: str) -> None:
        function = getattr(module, name)

        def noting(*arguments: Any, **named: Any) -> Any:
            names.append(threading.current_thread().name)
            return function(*arguments, **named)

        monkeypatch.setattr(module, name, noting)

    for module, name in places:
        put(module, name)
    return names


@pytest.mark.parametrize("path", BODIES)
async def test_more_messages_than_the_context_has_tokens_are_refused(path: str) -> None:
    """With the same code everywhere, and every slot is given back."""
    async with running_gateway(over_http=True) as harness:
        refused = await harness.client.post(path, json=BODIES[path])
        used = harness.gateway.slots.used

    assert refused.status_code == 400
    assert "maximum context length" in refused.json()["error"]["message"]
    assert used == 0


CONVERTED = ((messages, "chat_request"), (responses, "chat_request"), (responses, "own_items"))


@pytest.mark.parametrize(
    ("path", "body", "work"),
    [
        ("/v1/messages", {"messages": SAID * 100, "max_tokens": 1}, CONVERTED),
        ("/v1/messages/count_tokens", {"messages": SAID * 100}, CONVERTED),
        ("/v1/responses", {"input": SAID * 100}, CONVERTED),
        ("/v1/responses/input_tokens", {"input": SAID * 100}, CONVERTED),
        ("/v1/chat/completions", {"messages": SAID * 100}, [(chat_prompt, "breakpoints")]),
        ("/v1/responses", {"input": SAID * 40, "max_output_tokens": 2}, [(kept, "_identified")]),
    ],
    ids=["messages", "count_tokens", "responses", "input_tokens", "breakpoints", "kept"],
)
async def test_what_grows_with_a_conversation_runs_in_the_tokenising_threads(
    path: str, body: dict[str, Any], work: Sequence[tuple[Any, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the API's own shapes to a chat, of whatever is not short; the search for breakpoints, in every message; and
    the items of a response that is kept.
    """
    names = watched(monkeypatch, *work)
    async with running_gateway(says("hi"), over_http=True) as harness:
        answered = await harness.client.post(path, json=body)

    assert answered.status_code == 200
    assert names
    assert all(name.startswith("tokenise") for name in names)


async def test_without_tools_a_reply_is_asked_for_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it grows with the conversation, and handing it over would take longer."""
    names = watched(monkeypatch, (chat, "ask_reply"))
    async with running_gateway(says("hi"), over_http=True) as harness:
        await harness.client.post("/v1/chat/completions", json={"messages": SAID * 100})

    assert names == [threading.current_thread().name]
