"""An agent whose conversation grows turn by turn: each turn reuses what all earlier ones computed.

    python examples/agent_many_turns.py --url http://127.0.0.1:8000 --turns 8

Every turn appends what the model said and what its tool gave, and nothing before is touched. So a turn computes little
more than was added since the last one, however long the conversation is. An agent that rewrites its system prompt (the
time, a summary, a list of what is done) or drops old turns loses everything behind the change.

The bundled model is far too small to choose tools, so the tools are called in turn; all else is as an agent does it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from openai import OpenAI

TASK = "You look after a weather station. Call a tool, read its result, and say what it means in one sentence."
READINGS = [(8 + 3 * day % 11, 990 + 7 * day % 40, 2 * day % 9) for day in range(30)]


def temperatures(turn: int) -> str:
    """A tool: degrees of the days up to now."""
    return "; ".join(f"day {day}: {READINGS[day][0]} degrees" for day in range(turn, turn + 12))


def pressures(turn: int) -> str:
    """A tool: hectopascals of the days up to now."""
    return "; ".join(f"day {day}: {READINGS[day][1]} hectopascals" for day in range(turn, turn + 12))


def rain(turn: int) -> str:
    """A tool: millimetres of the days up to now."""
    return "; ".join(f"day {day}: {READINGS[day][2]} millimetres" for day in range(turn, turn + 12))


TOOLS: list[Callable[[int], str]] = [temperatures, pressures, rain]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the gateway")
    parser.add_argument("--api-key", default="none", help="where the cell has tenants")
    parser.add_argument("--turns", type=int, default=6, choices=range(2, 17), metavar="2..16")
    options = parser.parse_args()
    messages: list[Any] = [{"role": "system", "content": TASK}]
    prompt_tokens = cached_tokens = 0
    with OpenAI(base_url=f"{options.url}/v1", api_key=options.api_key) as client:
        model = client.models.list().data[0].id
        for turn in range(options.turns):
            tool = TOOLS[turn % len(TOOLS)]
            messages.append({"role": "assistant", "content": f"call {tool.__name__}({turn})"})
            messages.append({"role": "tool", "tool_call_id": f"call-{turn}", "content": tool(turn)})
            answer = client.chat.completions.create(
                model=model, messages=messages, temperature=0, max_completion_tokens=24
            )
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            usage = answer.usage
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            cached = usage.prompt_tokens_details.cached_tokens or 0
            print(
                f"turn {turn + 1}: {tool.__name__}, {usage.prompt_tokens} prompt tokens, "
                f"{cached} cached, {usage.prompt_tokens - cached} computed"
            )
            prompt_tokens += usage.prompt_tokens
            cached_tokens += cached
    share = cached_tokens / prompt_tokens
    print(f"{options.turns} turns: {cached_tokens} of {prompt_tokens} prompt tokens cached ({share:.0%})")


if __name__ == "__main__":
    main()
