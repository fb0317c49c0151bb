"""Flags that several commands share, with the same name and help in each."""

from __future__ import annotations

import argparse

from shared.arguments import JSON_HELP, add_old_name

DEFAULT_URL = "http://127.0.0.1:8000"
"""Where the gateway of `thermocline up` listens by default."""


def add_url(to: argparse._ActionsContainer, what: str, default: str | None = DEFAULT_URL) -> None:
    """Add ``--url``, the address of a server, and its old name ``--base-url`` of release 0.2."""
    add_old_name(to, "--base-url", to.add_argument("--url", metavar="URL", default=default, help=what))


def add_json(to: argparse._ActionsContainer) -> None:
    """Add ``--json``, with which the command prints its result as one JSON object."""
    to.add_argument("--json", action="store_true", help=JSON_HELP)


def policies_line() -> str:
    """Return a sentence that lists the eviction policies."""
    import services.scheduler.policies  # noqa: F401  Its policies register themselves.
    from services.scheduler.core.cache.eviction import POLICIES

    return f"Eviction policies: {', '.join(sorted(POLICIES))}."
