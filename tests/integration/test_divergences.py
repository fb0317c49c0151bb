"""A real cell says where prompts leave the cache: a changed time, tools in another order, and a plain next turn."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cell import Cell, running_cell
from tests.nats_server import NatsServer
from thermocline.cache import __main__ as cache_command

pytestmark = pytest.mark.integration

MODEL = Path(__file__).parents[2] / "models" / "thermocline-mha"
KEY = "an-admin-key-of-some-length"
ADMIN = {"x-admin-key": KEY}
WORKER = {"page_size": 16, "device_pages": 256}
RULES = " ".join(f"Rule {number}: answer the harbour's question number {number} in one word." for number in range(12))
WITH_TOOLS = (
    "{{ '<s>' }}{% if tools %}{{ '<|system|># Tools\n' }}{% for t in tools %}{{ t | tojson }}{{ '\n' }}{% endfor %}"
    "{{ '<|end|>' }}{% endif %}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def system(clock: str) -> dict[str, str]:
    return {"role": "system", "content": f"You are the harbour office. It is {clock} now. {RULES}"}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def chat(cell: Cell, messages: list[dict[str, str]], **extra: Any) -> dict[str, Any]:
    """A whole answer; the cell is at rest afterwards."""
    body = {"model": cell.model, "messages": messages, "max_tokens": 8, "temperature": 0, "explain": True, **extra}
    response = await cell.http.post("/v1/chat/completions", json=body, headers=ADMIN)
    assert response.status_code == 200, response.text
    await cell.settle()
    answer: dict[str, Any] = response.json()
    return answer


async def divergence(cell: Cell, messages: list[dict[str, str]], **extra: Any) -> dict[str, Any]:
    answer = await chat(cell, messages, **extra)
    found: dict[str, Any] = answer["explanation"]["divergence"]
    return found


async def test_where_prompts_leave_the_cache_is_named_and_a_next_turn_loses_nothing(
    nats_server: NatsServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Message 0 with both texts, the cause and the cost; the cell's table has it, over HTTP and on the command line.
    Of tools in another order, which the template lists, what follows the first difference is lost.
    """
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": WITH_TOOLS}), encoding="utf-8")
    tools = [
        {
            "type": "function",
            "function": {"name": name, "description": f"It tells the {name} of the harbour. {RULES[:99]}"},
        }
        for name in ("weather", "tide", "traffic")
    ]
    async with running_cell(
        nats_server.url, model, worker_settings=WORKER, gateway_settings={"admin_key": KEY}
    ) as cell:
        first = await chat(cell, [system("12:04"), user("Is the harbour open?")])
        assert first["explanation"]["divergence"]["kind"] == "new"
        changed = await divergence(cell, [system("12:05"), user("Is the harbour open?")])
        said = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
        turn = await divergence(cell, [system("12:04"), user("Is the harbour open?"), said, user("And the pier?")])
        other = await divergence(cell, [system("12:04"), user("Where do I moor?")])
        table = (await cell.http.get("/v1/cache/divergences", headers=ADMIN)).json()
        arguments = cache_command.parser().parse_args(
            ["divergences", "--json", "--nats", nats_server.url, "--model", str(model)]
        )
        assert await arguments.run(arguments)
        printed = json.loads(capsys.readouterr().out.splitlines()[-1])  # Above are the processes' logs.
        await chat(cell, [system("noon"), user("When is it high?")], tools=tools)
        moved = await divergence(cell, [system("noon"), user("When is it high?")], tools=tools[::-1])

    assert (changed["kind"], changed["message"], changed["role"], changed["cause"]) == (
        "diverged", 0, "system", "date_or_time",
    )  # fmt: skip
    assert changed["before"] + changed["prompt"] in f"<s><|system|>{system('12:05')['content']}"
    assert changed["before"] + changed["cached"] in f"<s><|system|>{system('12:04')['content']}"
    assert changed["before"].endswith("harbour office. It is 12:0")
    assert changed["lost_tokens"] > 100
    assert changed["lost_ms"] > 0
    assert (turn["kind"], turn["lost_tokens"], turn["cause"]) == ("continued", 0, None)
    assert (other["kind"], other["message"], other["cause"]) == ("diverged", 1, "other_conversation")
    assert (table["data"][0]["lost_tokens"], table["data"][0]["cause"]) == (changed["lost_tokens"], "date_or_time")
    assert table["data"] == printed["data"]
    assert (moved["kind"], moved["part"], moved["cause"]) == ("diverged", "tools", "tools_reordered")
    assert moved["lost_tokens"] > 100
