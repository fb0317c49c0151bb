"""The list of mutants: ``mutants.toml`` beside this file."""

from __future__ import annotations

from pathlib import Path

import msgspec

LIST = Path(__file__).with_name("mutants.toml")


class Mutant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One change; ``survives`` says why no test can tell, and is "" where one must fail."""

    name: str
    old: str
    new: str
    survives: str = ""


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Mutants of one file, and the tests that must see them. Paths are relative to the repository."""

    file: str
    tests: tuple[str, ...]
    mutants: tuple[Mutant, ...]


class _List(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    group: tuple[Group, ...]


def read(path: Path = LIST) -> tuple[Group, ...]:
    """All groups, in the order of the file. Raises msgspec.ValidationError."""
    return msgspec.toml.decode(path.read_bytes(), type=_List).group


def mutated(source: str, mutant: Mutant) -> str:
    """The source with the fault in it. Raises ValueError where the list has rotted."""
    found = source.count(mutant.old)
    if found != 1:
        raise ValueError(f"{mutant.name}: its old text occurs {found} times, not once: {mutant.old!r}")
    return source.replace(mutant.old, mutant.new)
