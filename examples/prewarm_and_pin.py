"""Have a system prompt computed before anybody asks, and keep it whatever else is served.

    export THERMOCLINE_ADMIN_KEY=...     # a key of 16 characters or more; the same before `thermocline up`, and here
    python examples/prewarm_and_pin.py --url http://127.0.0.1:8000

Prewarming is a request of one token behind all others. A pin holds a prefix in host memory until its time is over, from
when it first has to leave the device: other requests are sent until that happens. Then all that nothing holds is
flushed, which is what a busy day does, only at once. The pinned prompt is found again, and the one that was only
prewarmed is not.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from typing import Any

import httpx
from openai import OpenAI

RULES = "Be brief, be friendly, and name the page of the handbook that an answer comes from. Do not guess. " * 6
PINNED = f"You answer questions of the harbour office. {RULES}"
UNPINNED = f"You answer questions of the town library. {RULES}"
MOST_REQUESTS = 200


def system(prompt: str) -> list[Any]:
    """The beginning of a chat as the chat's own template renders it."""
    return [{"role": "system", "content": prompt}]


def cached_share(client: OpenAI, model: str, prompt: str, salt: str) -> str:
    """Ask a question behind ``prompt`` and say how much of it was cached. It leaves nothing in the cache itself."""
    answer = client.chat.completions.create(
        model=model,
        messages=[*system(prompt), {"role": "user", "content": "When do you open?"}],
        temperature=0,
        max_completion_tokens=8,
        extra_body={"cache_salt": salt, "cache": {"write": False}},
    )
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    return f"{usage.prompt_tokens_details.cached_tokens} of {usage.prompt_tokens} prompt tokens cached"


def push_out(client: OpenAI, cache: httpx.Client, model: str, name: str) -> tuple[int, int]:
    """Ask for other things until pin ``name`` is in host memory: how many requests it took, and the tokens held."""
    held = 0
    for number in range(1, MOST_REQUESTS + 1):
        other = f"{secrets.token_hex(8)} is not what any other prompt begins with. " + "So it shares nothing. " * 100
        client.completions.create(model=model, prompt=other, max_tokens=1)
        (pin,) = (pin for pin in cache.get("/pins").raise_for_status().json()["data"] if pin["name"] == name)
        held = pin["held_tokens"]
        if held:
            return number, held
    return MOST_REQUESTS, held


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the gateway")
    options = parser.parse_args()
    admin_key = os.environ.get("THERMOCLINE_ADMIN_KEY")
    if not admin_key:
        print("set THERMOCLINE_ADMIN_KEY to the admin key of the gateway", file=sys.stderr)
        return 2
    # A salt of its own: this run shares nothing with earlier ones, and flushes nobody else's prefixes.
    salt = secrets.token_hex(8)
    with (
        OpenAI(base_url=f"{options.url}/v1", api_key="none") as client,
        httpx.Client(base_url=f"{options.url}/v1/cache", headers={"X-Admin-Key": admin_key}, timeout=60) as cache,
    ):
        model = client.models.list().data[0].id
        print(f"nothing prepared: {cached_share(client, model, PINNED, salt)}")

        prompts = [{"messages": system(prompt), "cache_salt": salt} for prompt in (PINNED, UNPINNED)]
        cache.post("/prewarm", json={"prompts": prompts}).raise_for_status()
        print(f"prewarmed: {cached_share(client, model, PINNED, salt)}")

        name = f"example-{salt}"
        body = {"messages": system(PINNED), "cache_salt": salt, "ttl_s": 600, "name": name}
        pin = cache.post("/pins", json=body).raise_for_status().json()
        print(f"pinned: {pin['tokens']} tokens for ten minutes, {pin['held_tokens']} of them held in host memory")

        requests, held = push_out(client, cache, model, name)
        print(f"after {requests} other requests: {held} held in host memory")

        dropped = cache.post("/flush", json={"cache_salt": salt}).raise_for_status().json()
        print(f"flushed: {dropped['device_pages']} pages of devices, {dropped['host_pages']} of host memory")
        print(f"pinned, after the flush: {cached_share(client, model, PINNED, salt)}")
        print(f"not pinned, after the flush: {cached_share(client, model, UNPINNED, salt)}")

        cache.delete(f"/pins/{name}").raise_for_status()
    return 0


if __name__ == "__main__":
    sys.exit(main())
