"""What pages say of the code: lifecycles from transition tables, settings from their structs, versions of formats."""

from __future__ import annotations

import importlib
import json
import tomllib
import typing
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from services.scheduler.core.fold.snapshot import EARLIER_VERSION
from shared.config import ENVIRONMENT_PREFIX
from shared.numerics import NUMERICS_EPOCH
from shared.renamed_settings import REMOVED, RENAMED_BY_RELEASE, RENAMED_VALUES_BY_RELEASE
from shared.versions import FORMATS
from thermocline.settings import SECTIONS

PREFIX = ENVIRONMENT_PREFIX
"""What an environment variable that sets something begins with."""


EARLIER_STATE = EARLIER_VERSION
"""Major version of the scheduler's state that is read besides the present one."""

_EPOCH = "numerics epoch"
_ROOT = Path(__file__).parents[2]

__all__ = [
    "EARLIER_STATE",
    "PREFIX",
    "REMOVED",
    "SECTIONS",
    "arrows",
    "format_versions",
    "renamed_settings",
    "settings",
    "spellings",
    "versions_by_format",
]


def format_versions() -> dict[str, dict[str, str]]:
    """Find every release's versions by format, and its epoch of numerics.

    Those of earlier releases stand beside the bytes that they left for tests, those of this one in the code.
    """
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    this = str(project["version"]).partition(".dev")[0]
    found = {}
    for file in sorted((_ROOT / "tests/compatibility/golden").glob("*/facts.json")):
        told = json.loads(file.read_text(encoding="utf-8"))
        found[str(told["release"])] = {**told["formats"], _EPOCH: "none"}
    found.pop(this, None)
    return {**found, this: {**{each.name: each.version for each in FORMATS}, _EPOCH: str(NUMERICS_EPOCH)}}


def versions_by_format(releases: Mapping[str, Mapping[str, str]]) -> Iterator[tuple[str, list[str]]]:
    """List each format, and the epoch of numerics, as Markdown, with the versions of these releases."""
    for name in (*(each.name for each in FORMATS), _EPOCH):
        yield name if name == _EPOCH else f"`{name}`", [told[name] for told in releases.values()]


def renamed_settings() -> Iterator[tuple[str, str, str]]:
    """List old names and values, the new ones, and the release that renamed them, as Markdown."""
    for since, names in RENAMED_BY_RELEASE.items():
        for old, new in names.items():
            yield spellings(old), spellings(new), since
    for since, values in RENAMED_VALUES_BY_RELEASE.items():
        for (name, old), new in values.items():
            flag = "--" + name.replace("_", "-")
            yield f"`{flag} {old}`", f"`{flag} {new}`", since


def spellings(name: str) -> str:
    """Write a setting as flag, as variable and as key."""
    return f"`--{name.replace('_', '-')}`, `{PREFIX}{name.upper()}`, `{name}`"


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
