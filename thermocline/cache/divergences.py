"""List where prompts leave the cache: the divergence points that cost most prefill, with both sides as text."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import msgspec

from services.gateway.openai_schema.explanation import CostlyDivergence, CostlyDivergences
from services.gateway.views.divergence import divergences_view
from shared.arguments import whole_number
from shared.broker import add_broker_flags, broker_of
from thermocline.cache.connection import cell
from thermocline.cache.model_text import text_reader
from thermocline.cache.tables import WIDTH, shortened, table

SUMMARY = "list where prompts leave the cache, and what that costs"
LIMIT = 10
MOST = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this verb."""
    add_broker_flags(parser)
    parser.add_argument(
        "--limit",
        type=whole_number(MOST),
        metavar="N",
        default=LIMIT,
        help="points to list",
    )
    parser.add_argument("--model", metavar="DIR", help="model directory, to show texts and usual causes")


async def run(arguments: argparse.Namespace) -> bool:
    """Print the costliest divergence points."""
    text_of = text_reader(arguments.model) if arguments.model else None
    async with cell(broker_of(arguments)) as calls:
        found = divergences_view(await calls.divergences(arguments.limit), text_of)
    print(json.dumps(msgspec.to_builtins(found)) if arguments.json else "\n".join(divergence_lines(found)))
    return True


def divergence_lines(found: CostlyDivergences) -> list[str]:
    """Return a table of the points; below each row the texts of both sides, where known."""
    if not found.data:
        return ["no prompt has lost cached tokens to a divergence since the scheduler started"]
    heads = ("cause", "lost tokens", "lost time", "requests", "at token", "namespace")
    rows = table(heads, [_row(each) for each in found.data])
    lines = rows[:1]
    for row, each in zip(rows[1:], found.data, strict=True):
        lines.append(row)
        if each.before is not None:
            lines += [_side("prompt", each.before, each.prompt), _side("cached", each.before, each.cached)]
    return lines


def _row(each: CostlyDivergence) -> Sequence[str]:
    return (
        (each.cause or "-").replace("_", " "),
        f"{each.lost_tokens:,}{' at most' if each.error_tokens else ''}",
        "-" if each.lost_ms is None else f"{each.lost_ms:,.0f} ms",
        f"{each.requests:,}",
        f"{each.token:,}",
        each.namespace[:12],
    )


def _side(name: str, before: str, text: str | None) -> str:
    return shortened(f"  {name}  …{before}│{text or ''}…", WIDTH)
