"""What pages say of the code: arrows of lifecycles from transition tables, settings from their structs."""

from __future__ import annotations

import importlib
import typing
from enum import Enum
from typing import Any

import msgspec

from shared.config import ENVIRONMENT_PREFIX
from thermocline.settings import SECTIONS

PREFIX = ENVIRONMENT_PREFIX
"""What an environment variable that sets something begins with."""


def arrows(file: str, table: str) -> dict[tuple[str, str], list[str]]:
    """Find which events lead from a state to another, in a table of a file of this repository."""
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    found: dict[tuple[str, str], list[str]] = {}
    for (state, event), target in getattr(module, table).items():
        found.setdefault((_name(state), _name(target)), []).append(_name(event))
    return found


def _name(value: Any) -> str:
    return str(value.value) if isinstance(value, Enum) else str(value)


def settings(command: str) -> list[tuple[str, str, str, str]]:
    """List a command's settings: flag, type, default and meaning."""
    return [
        (
            "--" + field.name.replace("_", "-"),
            _type_of(field.type),
            _default(field),
            next((meta.description or "" for meta in getattr(field.type, "__metadata__", ())), ""),
        )
        for field in msgspec.structs.fields(SECTIONS[command])
    ]


def _type_of(kind: Any) -> str:
    """Name a type as a reader wants it: ``int``, ``text``, ``cpu or cuda``."""
    if typing.get_origin(kind) is typing.Annotated:
        kind = kind.__origin__
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return "list"
    options = [arg for arg in typing.get_args(kind) if arg is not type(None)]
    kind = options[0] if options else kind
    names: dict[Any, str] = {str: "text", bool: "true or false"}
    return names.get(kind, getattr(kind, "__name__", str(kind)))


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "(required)"
    if field.default in (None, "", ()):
        return ""
    return f"`{', '.join(field.default) if isinstance(field.default, tuple) else field.default}`"
