"""Bring prompts into the cache: each is sent to a gateway as a request of one token, at the lowest priority."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from services.gateway.openai_schema.sampling import MAX_PRIORITY
from shared.arguments import whole_number
from shared.errors import ThermoclineError
from shared.progress_line import shown
from thermocline.cache import gateway_client
from thermocline.cache.gateway_client import GatewayRefused
from thermocline.cache.prompt_file import Prompt, read_prompts
from thermocline.cache.tables import shortened, table
from thermocline.client.stream import SOURCES
from thermocline.flags import add_url

SUMMARY = "bring prompts into the cache"
AT_ONCE, MOST_AT_ONCE = 4, 64
TRIES = 5
LONGEST_PAUSE_S = 30.0
TIERS = tuple(source for source in SOURCES if source != "sparse")
"""Sources of a prompt's tokens. Prewarming is exact, so none of them are sparse."""
REQUEST_S = 600.0


class Warmed(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one prompt: its tokens, and how many were cached before, by tier."""

    line: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tiers: dict[str, int] = {}
    error: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this verb."""
    parser.add_argument("file", metavar="FILE", help="prompts as JSON lines, or one per line in a .txt file")
    add_url(parser, "a gateway of the cell")
    gateway_client.add_key(parser, "--api-key", "API_KEY", "one of the gateway's --api-keys")
    parser.add_argument(
        "--concurrency",
        type=whole_number(MOST_AT_ONCE),
        metavar="N",
        default=AT_ONCE,
        help=f"at most N requests at once, up to {MOST_AT_ONCE}",
    )


async def run(arguments: argparse.Namespace) -> bool:
    """Warm all prompts and print the results; return False when one failed."""
    prompts = read_prompts(Path(arguments.file))
    async with gateway_client.client(
        arguments.url, gateway_client.bearer(arguments.api_key), timeout_s=REQUEST_S
    ) as http:
        with shown("prompts", len(prompts)) as bar:
            warmed = await warm_all(http, prompts, arguments.concurrency, bar.advance)
    failed = sum(bool(prompt.error) for prompt in warmed)
    if arguments.json:
        print(json.dumps({"prompts": msgspec.to_builtins(warmed), "failed": failed}))
    else:
        print("\n".join(warmed_lines(warmed)))
    return not failed


async def warm_all(
    http: httpx.AsyncClient, prompts: Sequence[Prompt], at_once: int, on_done: Callable[[], object] = lambda: None
) -> list[Warmed]:
    """Send all prompts, at most ``at_once`` in flight; return the results in order of the file."""
    waiting = iter(prompts)
    found: dict[int, Warmed] = {}

    async def work() -> None:
        for prompt in waiting:
            found[prompt.line] = await _warm(http, prompt)
            on_done()

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(work())
    return [found[prompt.line] for prompt in prompts]


def warmed_lines(warmed: Sequence[Warmed]) -> list[str]:
    """Return a row for each prompt, then the sums, the failures, and how many succeeded."""
    good = [prompt for prompt in warmed if not prompt.error]
    heads = ("line", "tokens", *TIERS, "computed")
    rows = [(str(prompt.line), *_figures([prompt])) for prompt in good]
    lines = table(heads, [*rows, ("all", *_figures(good))])
    failures = [prompt for prompt in warmed if prompt.error]
    lines += [shortened(f"line {prompt.line} failed: {prompt.error}", 300) for prompt in failures]
    return [*lines, f"{len(good):,} of {len(warmed):,} prompts prewarmed"]


def _figures(warmed: Sequence[Warmed]) -> list[str]:
    tokens = sum(prompt.prompt_tokens for prompt in warmed)
    tiers = [sum(prompt.tiers.get(tier, 0) for prompt in warmed) for tier in TIERS]
    return [f"{count:,}" for count in (tokens, *tiers, tokens - sum(tiers))]


async def _warm(http: httpx.AsyncClient, prompt: Prompt) -> Warmed:
    # Nothing lossy is cached, so a deployment whose default is lossy would warm nothing.
    exact = {"fidelity": "exact"}
    body: dict[str, Any] = {**prompt.body, "max_tokens": 1, "temperature": 0, "priority": -MAX_PRIORITY, "cache": exact}
    for attempt in range(TRIES):
        try:
            usage = (await gateway_client.post(http, prompt.path, body))["usage"]
            details = usage["prompt_tokens_details"]
            tiers = {tier: details.get(f"{tier}_tokens", 0) for tier in TIERS}
            return Warmed(
                line=prompt.line,
                prompt_tokens=usage["prompt_tokens"],
                cached_tokens=details["cached_tokens"],
                tiers=tiers,
            )
        except GatewayRefused as error:
            # A full queue is no fault of the prompt's: the gateway says when to retry.
            if not error.retry_after_ms or attempt == TRIES - 1:
                return Warmed(line=prompt.line, error=error.message)
            await asyncio.sleep(min(error.retry_after_ms / 1000, LONGEST_PAUSE_S))
        except ThermoclineError as error:
            return Warmed(line=prompt.line, error=error.message)
        except (KeyError, TypeError) as error:
            return Warmed(line=prompt.line, error=f"the answer has no usage: {error!r}")
    raise AssertionError("the last try returns")
