"""List what is cached: the radix tree, with the pages of each node on each tier, or the pins."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence

import msgspec

from services.gateway.cache_calls import Listing
from services.gateway.openai_schema.cache import Pin
from services.gateway.views.cache_view import node_view, pin_view
from shared.arguments import whole_number
from shared.broker import add_broker_flags, broker_of
from shared.messages.base import unpack_int32
from thermocline.cache import argument_types
from thermocline.cache.connection import cell
from thermocline.cache.model_text import text_reader
from thermocline.cache.tables import shortened, table
from thermocline.cache.tree import tree_lines

SUMMARY = "list the nodes of the radix tree, or the pins"
LIMIT = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this verb."""
    add_broker_flags(parser)
    parser.add_argument(
        "--namespace", metavar="ID", type=argument_types.namespace, help="only this namespace (32 hex digits)"
    )
    parser.add_argument(
        "--limit",
        type=whole_number(1_000_000),
        metavar="N",
        default=LIMIT,
        help="nodes to list",
    )
    parser.add_argument("--pins", action="store_true", help="list the pins instead of the nodes")
    parser.add_argument("--model", metavar="DIR", help="model directory, to show first tokens as text")


async def run(arguments: argparse.Namespace) -> bool:
    """Print the nodes, or with ``--pins`` the pins, as text or JSON."""
    text_of = text_reader(arguments.model) if arguments.model else None
    async with cell(broker_of(arguments)) as calls:
        listing = await calls.listing(arguments.namespace or "", limit=1 if arguments.pins else arguments.limit)
    print(_as_json(listing, text_of) if arguments.json else _as_text(listing, text_of, only_pins=arguments.pins))
    return True


def _as_json(listing: Listing, text_of: Callable[[Sequence[int]], str] | None) -> str:
    nodes = [node_view(node, text_of(unpack_int32(node.head)) if text_of else None) for node in listing.nodes]
    return json.dumps(
        {
            "nodes": msgspec.to_builtins(nodes),
            "pins": msgspec.to_builtins([pin_view(pin) for pin in listing.pins]),
            "has_more": bool(listing.next_after),
        }
    )


def _as_text(listing: Listing, text_of: Callable[[Sequence[int]], str] | None, *, only_pins: bool) -> str:
    if only_pins:
        return "\n".join(pin_lines([pin_view(pin) for pin in listing.pins], time.time()))
    nodes = [node_view(node, text_of(unpack_int32(node.head)) if text_of else None) for node in listing.nodes]
    lines = tree_lines(nodes) or ["nothing is cached"]
    if listing.next_after:
        lines.append(f"… and more: --limit {len(nodes)} was reached")
    held = sum(not pin.refusal for pin in listing.pins)
    if held:
        lines.append(f"{held} {'pin' if held == 1 else 'pins'}; `thermocline cache ls --pins` tells more")
    return "\n".join(lines)


def pin_lines(pins: Sequence[Pin], now_s: float) -> list[str]:
    """Return a table of pins, then a line for each refused pin with the reason. ``now_s`` is Unix time."""
    rows = [
        (
            shortened(pin.name, 28),
            pin.namespace[:12],
            f"{pin.tokens:,}",
            f"{pin.held_tokens:,}",
            f"{pin.pages:,}",
            f"{max(0.0, pin.expires_at - now_s):,.0f} s",
            "refused" if pin.refusal else "",
        )
        for pin in pins
    ]
    if not rows:
        return ["there are no pins"]
    refused = [shortened(f"{pin.name} was refused: {pin.refusal}", 100) for pin in pins if pin.refusal]
    return table(("pin", "namespace", "tokens", "held", "pages", "ends in", ""), rows) + refused
