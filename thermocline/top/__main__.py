"""``thermocline top``: watch a running cell in a terminal."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx
import msgspec
from rich.console import Console

from services.gateway.openai_schema.cell import PageLink
from shared.arguments import ArgumentParser
from shared.config import ENVIRONMENT_PREFIX
from shared.errors import OperatorError, ThermoclineError, reason_of
from shared.guard import guarded
from thermocline.cache.gateway_client import admin_headers, client, post
from thermocline.flags import DEFAULT_URL
from thermocline.top.frames import VIEWS, frame
from thermocline.top.screen import Screen
from thermocline.top.source import ASK_S, Snapshot, look

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
KEY_VARIABLE = ENVIRONMENT_PREFIX + "ADMIN_KEY"


def parser() -> ArgumentParser:
    """Return the command line."""
    made = ArgumentParser(
        prog="thermocline top",
        description="Watch a running cell in a terminal: tiers, radix tree, requests and workers.",
        epilog=f"The admin key is read from --admin-key-file, or from {KEY_VARIABLE}; "
        "without either it is the one that `thermocline up` made for a gateway of this machine.",
    )
    made.add_argument("--url", metavar="URL", default=DEFAULT_URL, help="a gateway of the cell")
    made.add_argument("--admin-key-file", metavar="FILE", help="file with the gateway's admin key")
    made.add_argument("--view", choices=VIEWS, default="overview", help="view to begin with")
    made.add_argument("--interval", type=_seconds, default=1.0, metavar="S", help="seconds between two updates")
    once = made.add_mutually_exclusive_group()
    once.add_argument("--once", action="store_true", help="print one frame")
    once.add_argument("--link", action="store_true", help="print a link that opens the page at /ui once")
    once.add_argument("--json", action="store_true", help="print the data of one frame as one JSON object")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run. Exit codes: 0 shown, 1 no answer from the cell (never for a live screen), 2 bad arguments or no terminal."""
    options = parser().parse_args(argv)
    try:
        return asyncio.run(_run(options))
    except OperatorError as error:
        print(f"thermocline top: {error.message}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_OK


async def _run(options: argparse.Namespace) -> int:
    headers = admin_headers(options.url, _admin_key(options.admin_key_file))
    async with client(options.url, headers, timeout_s=ASK_S) as http:
        if options.link:
            return await _print_link(options.url, http)
        if options.once or options.json:
            return await _print_once(options, http)
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise OperatorError("there is no terminal to show a live screen on; ask for --once or --json")
        await Screen(Console(), http, options.view, options.interval).run(sys.stdin.fileno())
        return EXIT_OK


async def _print_once(options: argparse.Namespace, http: httpx.AsyncClient) -> int:
    snapshot = await look(http, Snapshot(), with_nodes=options.view == "tree")
    if options.json:
        print(json.dumps(msgspec.to_builtins(snapshot)))
    elif snapshot.link != "live":
        print(f"thermocline top: {snapshot.error}", file=sys.stderr)
    else:
        console = Console(highlight=False)
        for line in frame(snapshot, options.view, width=console.width, height=console.height, address=options.url):
            console.print(line, no_wrap=True)
    return EXIT_OK if snapshot.link == "live" else EXIT_FAILED


async def _print_link(url: str, http: httpx.AsyncClient) -> int:
    try:
        link = msgspec.convert(await post(http, "/v1/cell/page-link", {}), PageLink)
    except (ThermoclineError, msgspec.ValidationError) as error:
        print(f"thermocline top: {error}", file=sys.stderr)
        return EXIT_FAILED
    print(f"{url.rstrip('/')}{link.path}")
    return EXIT_OK


def _admin_key(file: str | None) -> str:
    if file is None:
        return os.environ.get(KEY_VARIABLE, "").strip()
    try:
        return Path(file).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise OperatorError(f"--admin-key-file {file} cannot be read: {reason_of(error)}") from error


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 3600")
    return seconds


if __name__ == "__main__":
    sys.exit(guarded(main))
