"""Chat with OpenAI's own client: an answer, the same again out of the cache, and a stream.

    python examples/openai_client.py --url http://127.0.0.1:8000

The second question shares its system prompt with the first, so most of its prompt is a hit. ``usage`` of every answer
says how many tokens were cached; which tier they came from stands beside it, in fields that OpenAI's API does not have.
"""

from __future__ import annotations

import argparse
from typing import Any

from openai import OpenAI

HANDBOOK = """The access code of the Lisbon office is 4821. The access code of the Porto office is 1907.
Visitors sign the book at the door and wear a badge. The kitchen is cleaned every evening at six.
Parcels are kept behind the counter for two weeks, and are sent back when nobody asks for them.
Meetings begin five minutes after the hour, so that everybody has time to walk from one to the next."""


def messages_of(question: str) -> list[Any]:
    """What all questions share comes first: a prefix can only be reused up to the first token that differs."""
    return [{"role": "system", "content": HANDBOOK}, {"role": "user", "content": question}]


def show(title: str, text: str, usage: Any) -> None:
    """One line about an answer and where its prompt was found."""
    details = usage.prompt_tokens_details
    tiers = {name: count for name, count in (details.model_extra or {}).items() if count and name.endswith("_tokens")}
    print(f"{title}: {text.strip()!r}, {details.cached_tokens} of {usage.prompt_tokens} prompt tokens cached {tiers}")


def chat(client: OpenAI, model: str, question: str) -> None:
    """A whole answer at once."""
    answer = client.chat.completions.create(
        model=model, messages=messages_of(question), temperature=0, max_completion_tokens=16
    )
    show("chat", answer.choices[0].message.content or "", answer.usage)


def stream(client: OpenAI, model: str, question: str) -> None:
    """An answer in pieces; its usage comes in a last chunk that has no choices, because it was asked for."""
    pieces: list[str] = []
    usage = None
    for chunk in client.chat.completions.create(
        model=model,
        messages=messages_of(question),
        temperature=0,
        max_completion_tokens=16,
        stream=True,
        stream_options={"include_usage": True},
    ):
        pieces += [choice.delta.content for choice in chunk.choices if choice.delta.content]
        usage = chunk.usage or usage
    show(f"stream of {len(pieces)} pieces", "".join(pieces), usage)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the gateway")
    parser.add_argument("--api-key", default="none", help="where the cell has tenants")
    options = parser.parse_args()
    with OpenAI(base_url=f"{options.url}/v1", api_key=options.api_key) as client:
        model = client.models.list().data[0].id
        chat(client, model, "What is the access code of the Lisbon office?")
        chat(client, model, "What is the access code of the Porto office?")
        stream(client, model, "What is the access code of the Lisbon office?")


if __name__ == "__main__":
    main()
