"""Instructor: typed answers."""

from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel

from bench.clients.harness import BASE_URL, KEY, MODEL, QUESTION, case, check, run

client = OpenAI(base_url=f"{BASE_URL}/v1", api_key=KEY, max_retries=0)
ASK = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 300, "max_retries": 0}


class Weather(BaseModel, extra="forbid"):
    """Else a model without sense would write properties of its own for ever."""

    city: Literal["Paris", "Rome"]
    days: Literal[1, 7, 14]  # Strict schemas of this client have no bounds of numbers.


def typed(mode):
    return instructor.from_openai(client, mode=mode)


@case("Mode.TOOLS")
def tools() -> None:
    check(isinstance(typed(instructor.Mode.TOOLS).create(response_model=Weather, **ASK), Weather), "typed")


@case("Mode.TOOLS_STRICT")
def tools_strict() -> None:
    check(isinstance(typed(instructor.Mode.TOOLS_STRICT).create(response_model=Weather, **ASK), Weather), "typed")


@case("Mode.JSON_SCHEMA")
def json_schema() -> None:
    check(isinstance(typed(instructor.Mode.JSON_SCHEMA).create(response_model=Weather, **ASK), Weather), "typed")


@case("Mode.TOOLS, partial answers as they stream")
def partial() -> None:
    parts = list(typed(instructor.Mode.TOOLS).create_partial(response_model=Weather, **ASK))
    check(parts[-1].city in ("Paris", "Rome"), str(parts[-1]))


if __name__ == "__main__":
    run()
