"""``--set key=value``: settings of the cell (every field of CellConfig) and options of the workload's generator."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, get_type_hints

import msgspec

from services.scheduler.config import KINDS, SchedulerConfig
from services.scheduler.core.cache.heat import parse
from services.scheduler.core.hidden.hidden_form import parse_form
from services.scheduler.outside import name_of
from shared.config import choices_of
from shared.errors import ConfigError
from shared.messages.cell_events import CellConfig
from shared.messages.pools import form_word
from shared.renamed_settings import by_new_value, new_name, old_names
from shared.spelling import fault_of_choice

_CHECKED: Mapping[str, Callable[[str], object]] = {
    "eviction_expression": parse,
    "hotness_expression": parse,
    "hidden_form": parse_form,
}
"""Settings whose text has a form of its own, and what raises ConfigError for text without it."""

_FLAGS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def divide(
    assignments: Sequence[str], options: type[msgspec.Struct] | None, *, policy: str | None = None
) -> tuple[CellConfig, msgspec.Struct | None]:
    """Return the cell's configuration and the generator's options.

    Raises ConfigError that names every fault; a setting that is given twice, also by its old name or by ``policy``, is
    one. ``options`` is the struct of the chosen generator, None for a trace. Bounds of the cell's settings are those
    of ``thermocline scheduler``.
    """
    own = {} if options is None else get_type_hints(options, include_extras=True)
    cell_values, own_values = _read(assignments, own, policy)
    return CellConfig(**cell_values), None if options is None else options(**own_values)


def without(assignments: Sequence[str], keys: Collection[str]) -> list[str]:
    """Return the assignments to settings other than ``keys``; one by an old name counts as one by the new name."""
    renamed = dict(old_names(keys))
    given = ((assignment, assignment.partition("=")[0]) for assignment in assignments)
    return [assignment for assignment, key in given if renamed.get(key, key) not in keys]


def changes_of(assignments: Sequence[str], *, policy: str | None = None) -> dict[str, Any]:
    """Return the given settings of the cell, by field of CellConfig.

    Raises ConfigError that names every fault; a setting that is given twice is one.
    """
    return _read(assignments, {}, policy)[0]


def _read(
    assignments: Sequence[str], own: Mapping[str, Any], policy: str | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return values for the cell and for the generator, whose options have the types ``own``."""
    bounds = get_type_hints(SchedulerConfig, include_extras=True)
    cell = {field: bounds[field] for field in CellConfig.__struct_fields__}
    faults: list[str] = []
    cell_values: dict[str, Any] = {}
    own_values: dict[str, Any] = {}
    places: dict[str, list[str]] = {}
    for assignment in assignments:
        given, equals, text = assignment.partition("=")
        key = new_name(given, (*own, *cell), lambda name: f"--set {name}")
        if not equals:
            faults.append(f"--set {assignment}: must be key=value")
            continue
        places.setdefault(key, []).append(f"--set {assignment}")
        if key in own:
            _convert(key, text, own, own_values, faults)
        elif key in cell:
            _convert(key, by_new_value(key, text, f"--set {key}"), cell, cell_values, faults)
        else:
            workload = f"; of the workload {', '.join(sorted(own))}" if own else ""
            faults.append(f"--set {key}: unknown setting; of the cell there are {', '.join(sorted(cell))}{workload}")
    if "restoring" in cell_values:
        cell_values["restoring"] = form_word(cell_values["restoring"])
    if policy is not None:
        cell_values["policy"] = policy
        places.setdefault("policy", []).append(f"--policy {policy}")
    faults += [f"{key} is given twice: {' and '.join(given)}" for key, given in places.items() if len(given) > 1]
    for kind in KINDS:
        if kind in cell_values:
            try:
                cell_values[kind] = name_of(kind, cell_values[kind])
            except ConfigError as error:
                faults.append(f"{kind}: {error.message}")
    for name, check in _CHECKED.items():
        if name in cell_values:
            try:
                check(cell_values[name])
            except ConfigError as error:
                faults.append(f"--set {name}: {error.message}")
    if faults:
        raise ConfigError("; ".join(faults))
    return cell_values, own_values


def _convert(key: str, text: str, types: Mapping[str, Any], into: dict[str, Any], faults: list[str]) -> None:
    kind = types[key]
    choices = choices_of(kind)
    if choices and text not in choices:
        faults.append(f"--set {key}: {fault_of_choice(text, choices)}")
        return
    is_flag = bool in (kind, getattr(kind, "__origin__", None))
    try:
        into[key] = msgspec.convert(_FLAGS.get(text.lower(), text) if is_flag else text, kind, strict=False)
    except msgspec.ValidationError as error:
        faults.append(f"--set {key}={text}: {error}")
