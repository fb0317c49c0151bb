"""The settings that a child comes to by its flags, its environment and the settings file, read before it is started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from shared.config import from_command_line
from thermocline.supervisor.cell import Cell
from thermocline.supervisor.commands import FLAGS_FROM, service_children, service_of

C = TypeVar("C", bound=msgspec.Struct)


def child_settings(kind: type[C], service: str, cell: Cell, environ: Mapping[str, str]) -> C:
    """Return the settings of the first child of ``service``. Raises ConfigError where they have a fault."""
    children = service_children(cell, environ)
    child = next(child for child in children if service_of(child) == service)
    return from_command_line(kind, service, child.argv[FLAGS_FROM:], environ={**environ, **child.env})
