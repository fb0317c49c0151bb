"""Write the reference pages that follow from code: lifecycles from their tables, settings from their structs.

``python -m tools.reference_docs`` writes them; a test checks that what is committed is what this makes.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from services.gateway.config import GatewayConfig
from services.scheduler.config import SchedulerConfig
from services.scheduler.core import lifecycle as request_lifecycle
from services.storage.config import StorageConfig
from services.storage.core import transfer_states
from services.worker import requests as worker_requests
from services.worker.config import WorkerConfig
from shared.config import ENVIRONMENT_PREFIX
from thermocline.supervisor import lifecycle as child_lifecycle
from thermocline.supervisor.config import SupervisorConfig

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"

LIFECYCLES: tuple[tuple[str, str, Mapping[Any, Any]], ...] = (
    (
        "A request, as the scheduler sees it",
        "services/scheduler/core/lifecycle.py",
        request_lifecycle.TRANSITIONS,
    ),
    ("A request, as its worker sees it", "services/worker/requests.py", worker_requests.TRANSITIONS),
    ("A transfer in storage", "services/storage/core/transfer_states.py", transfer_states.TRANSITIONS),
    ("A supervised process", "thermocline/supervisor/lifecycle.py", child_lifecycle.TRANSITIONS),
)

SETTINGS: tuple[tuple[str, str, type[msgspec.Struct]], ...] = (
    ("thermocline up", "up", SupervisorConfig),
    ("thermocline gateway", "gateway", GatewayConfig),
    ("thermocline scheduler", "scheduler", SchedulerConfig),
    ("thermocline worker", "worker", WorkerConfig),
    ("thermocline storage", "storage", StorageConfig),
)


def _name(value: Any) -> str:
    return str(value.value) if isinstance(value, Enum) else str(value)


def lifecycles() -> str:
    """One state diagram per table, in Mermaid."""
    parts = [
        "# Lifecycles\n",
        "Made by `python -m tools.reference_docs` from the transition tables that the code follows. What is not drawn",
        "cannot happen: a missing entry is a typed error (`illegal_transition`).\n",
    ]
    for title, file, table in LIFECYCLES:
        parts += [f"## {title}\n", f"`{file}`\n", "```mermaid", "stateDiagram-v2"]
        arrows: dict[tuple[str, str], list[str]] = {}
        for (state, event), target in table.items():
            arrows.setdefault((_name(state), _name(target)), []).append(_name(event))
        parts += [f"    {source} --> {target}: {', '.join(events)}" for (source, target), events in arrows.items()]
        parts += ["```\n"]
    return "\n".join(parts)


def _type_of(kind: Any) -> str:
    """A type as a reader wants it: ``int``, ``text``, ``cpu or cuda``."""
    if typing.get_origin(kind) is typing.Annotated:
        kind = kind.__origin__
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return "list"
    options = [arg for arg in typing.get_args(kind) if arg is not type(None)]
    kind = options[0] if options else kind
    return {str: "text", bool: "true or false"}.get(kind, getattr(kind, "__name__", str(kind)))


def _description(kind: Any) -> str:
    if typing.get_origin(kind) is not typing.Annotated:
        return ""
    return next((meta.description or "" for meta in kind.__metadata__ if isinstance(meta, msgspec.Meta)), "")


def _default(field: Any) -> str:
    if field.required:
        return "(required)"
    if field.default in (None, "", ()):
        return ""
    return f"`{', '.join(field.default) if isinstance(field.default, tuple) else field.default}`"


def settings() -> str:
    """One table per command."""
    parts = [
        "# Settings\n",
        "Made by `python -m tools.reference_docs`. A setting comes from a TOML file (`--config FILE`, table",
        f"`[section]`), an environment variable (`{ENVIRONMENT_PREFIX}<NAME>` in capitals) or a flag; later ones win.",
        "Sizes in bytes may be written `64MiB`. Every fault is reported at once, with exit code 2.\n",
    ]
    for command, section, kind in SETTINGS:
        parts += [
            f"## `{command}`, section `[{section}]`\n",
            "| flag | type | default | meaning |",
            "|---|---|---|---|",
        ]
        for field in msgspec.structs.fields(kind):
            flag = "--" + field.name.replace("_", "-")
            row = (f"`{flag}`", _type_of(field.type), _default(field), _description(field.type))
            parts.append("| " + " | ".join(row) + " |")
        parts.append("")
    return "\n".join(parts)


PAGES = {"lifecycles.md": lifecycles, "settings.md": settings}


def main() -> None:
    """Write every page."""
    for name, make in PAGES.items():
        (REFERENCE / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
