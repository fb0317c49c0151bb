"""Settings that were renamed or removed since an earlier release.

An old name still works, with one warning that names the new one. A removed setting is refused as a flag and in a file,
with its history; as a variable it is ignored with a warning, because processes of several releases may share it.

:mod:`shared.config` reads flags, environment and file through this table, so no process knows of old names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

RENAMED_BY_RELEASE = {
    "0.2.0": {
        "lease_ms": "lead_ms",
        "state_form": "hidden_form",
        "state_bytes": "hidden_bytes",
        "state_ring_bytes": "hidden_ring_bytes",
    },
    "0.3.0": {"speculation": "prefetch_keys"},
}
"""New names of settings by the release that renamed them, and by old name."""

RENAMED = {old: new for names in RENAMED_BY_RELEASE.values() for old, new in names.items()}
"""New names of settings by old ones."""

RENAMED_VALUES_BY_RELEASE = {
    "0.2.0": {("restoring", "state"): "hidden"},
    "0.3.0": {("prefetch_keys", "auto"): "true"},
}
"""New values by the release that renamed them, and by setting and old value."""

RENAMED_VALUES = {old: new for values in RENAMED_VALUES_BY_RELEASE.values() for old, new in values.items()}
"""New values by setting and old value."""


@dataclass(frozen=True, slots=True)
class Removed:
    """A setting that no process has any more: the first release without it, what it was, and what to do."""

    since: str
    was: str
    advice: str

    @property
    def told(self) -> str:
        """The history as the end of a sentence whose subject is the setting."""
        return f"was removed in {self.since}; it was {self.was}: {self.advice}"


REMOVED = {
    "sparse_reorder_bytes_per_s": Removed(
        since="0.3.0",
        was="the disk bandwidth with which storages brought important tokens of sparse copies together",
        advice="leave it out, because rows keep their order now",
    ),
}
"""Removed settings by name."""


def old_names(known: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield old and new name of each renamed setting whose new name is in ``known``."""
    return ((old, new) for old, new in RENAMED.items() if new in known and old not in known)


def by_new_names(
    given: Mapping[str, Any], known: Collection[str], shown: Callable[[str], str], faults: list[str]
) -> dict[str, tuple[str, Any]]:
    """Return the ``known`` settings that one source gives, by name: (where it was given, its value).

    ``shown`` returns a name in the source's spelling. A setting that is given by both of its names goes to ``faults``.
    """
    found = {name: (shown(name), value) for name, value in given.items() if name in known}
    for old, new in old_names(known):
        if old not in given:
            continue
        if new in given:
            faults.append(f"{shown(old)} is the old name of {shown(new)}, and both are given: give the new one alone")
        else:
            found[new] = (shown(old), given[old])
            _warn(f"{shown(old)} is called {shown(new)} now; the old name still works")
    return found


def new_name(name: str, known: Collection[str], shown: Callable[[str], str]) -> str:
    """Return the present name of a single setting, where there is no source to read as a whole."""
    new = dict(old_names(known)).get(name)
    if new is None:
        return name
    _warn(f"{shown(name)} is called {shown(new)} now; the old name still works")
    return new


def by_new_value(name: str, value: Any, source: str) -> Any:
    """Return the present value for a setting's old one; warns for it."""
    if not isinstance(value, str) or (name, value) not in RENAMED_VALUES:
        return value
    new = RENAMED_VALUES[name, value]
    _warn(f"{source} {value} is called {new} now; the old value still works")
    return new


@cache
def _warn(line: str) -> None:
    """Print a line to stderr, once in the life of a process: one that starts others reads their settings, too."""
    print(line, file=sys.stderr)
