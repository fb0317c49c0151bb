"""``--sweep KEY=A,B ...``: every combination of the values of several settings, the last one changing fastest.

A key is a flag of ``thermocline simulate`` (``device_tokens``, also with dashes), ``capacity``, which is
``device_tokens``, or a key of ``--set``.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import isfinite, prod
from typing import Any, get_args

from shared.errors import ConfigError
from shared.messages.pools import KvDtype
from shared.spelling import fault_of_choice
from thermocline.simulate.cost import Io
from thermocline.simulate.settings import without

MOST_RUNS = 1000

Row = dict[str, Any]
"""The settings and figures of one simulation, by name."""

ERROR = "error"
"""Name in a row of the reason for which its simulation failed. Only sweeps with a failed one have it."""

INTERRUPTED = "interrupted"
"""Reason in the rows of simulations that Ctrl-C ended, or kept from beginning."""

OPTIONS: Mapping[str, type] = {
    "policy": str,
    "hardware": str,
    "model": str,
    "workers": int,
    "workers_per_node": int,
    "tensor_parallel": int,
    "page_size": int,
    "kv_dtype": str,
    "device_tokens": int,
    "host_tokens": int,
    "disk_tokens": int,
    "network_gb_s": float,
    "io": str,
    "backup_share": float,
    "rate": float,
    "concurrency": int,
    "time_scale": float,
    "seed": int,
}
"""Flags of the command that can be swept, by their names without dashes; other keys are for ``--set``."""

FIXED = (
    *("trace", "workload", "requests", "profile", "settings"),
    *("json", "sweep", "jobs", "csv", "parquet", "plot", "plot_figure"),
)
"""The command's other flags: all simulations of a sweep have one workload and one report."""

_CHOICES = {"io": get_args(Io), "kv_dtype": get_args(KvDtype)}

_OTHER_NAMES = {"capacity": "device_tokens"}


@dataclass(frozen=True, slots=True)
class Axis:
    """One setting and its values, which are numbers where all of them look like numbers."""

    key: str
    values: tuple[Any, ...]

    @property
    def is_number(self) -> bool:
        """Whether the values fit the axis of a chart: at least two finite numbers of 0 or more."""
        return len(self.values) > 1 and all(
            isinstance(value, int | float) and value >= 0 and isfinite(value) for value in self.values
        )


@dataclass(frozen=True, slots=True)
class Run:
    """One combination: its values by key, and the command's options with them."""

    settings: Mapping[str, Any]
    options: argparse.Namespace

    def __str__(self) -> str:
        """Return the combination as ``key=value``, separated by commas."""
        return ", ".join(f"{key}={value}" for key, value in self.settings.items())


def read_axes(assignments: Sequence[str]) -> tuple[Axis, ...]:
    """Read ``KEY=A,B`` texts. Raises ConfigError that names every fault, also more than MOST_RUNS combinations."""
    faults: list[str] = []
    axes: dict[str, Axis] = {}
    for assignment in assignments:
        given, equals, text = assignment.partition("=")
        key = given.replace("-", "_")
        key = _OTHER_NAMES.get(key, key)
        texts = text.split(",")
        if not equals or not key or not all(texts):
            faults.append(f"--sweep {assignment}: must be key=value,value")
        elif key in FIXED:
            faults.append(f"--sweep {assignment}: {key} cannot be swept; of the flags only {', '.join(OPTIONS)} can")
        elif key in axes:
            faults.append(f"--sweep {assignment}: {key} is swept twice")
        else:
            axes[key] = Axis(key, _values(assignment, key, texts, faults))
            if len(set(axes[key].values)) < len(texts):
                faults.append(f"--sweep {assignment}: a value is given twice")
    runs = prod(len(axis.values) for axis in axes.values())
    if runs > MOST_RUNS:
        faults.append(f"--sweep asks for {runs:,} simulations; {MOST_RUNS:,} are the most")
    if faults:
        raise ConfigError("; ".join(faults))
    return tuple(axes.values())


def _values(assignment: str, key: str, texts: Sequence[str], faults: list[str]) -> tuple[Any, ...]:
    """Return the values of an axis. Those for ``--set`` become numbers where all look like numbers."""
    kind, choices = OPTIONS.get(key), _CHOICES.get(key)
    if kind is None:
        for number in (int, float):
            try:
                return tuple(number(text) for text in texts)
            except ValueError:
                continue
        return tuple(texts)
    try:
        values = tuple(kind(text) for text in texts)
    except ValueError:
        faults.append(f"--sweep {assignment}: must be {'whole numbers' if kind is int else 'numbers'}")
        return tuple(texts)
    unknown = [value for value in values if choices is not None and value not in choices]
    if choices is not None and unknown:
        faults.append(f"--sweep {assignment}: {fault_of_choice(unknown[0], choices)}")
    return values


def runs_of(options: argparse.Namespace, axes: Sequence[Axis]) -> list[Run]:
    """Return every combination. A swept value replaces that of the command line."""
    runs = []
    for values in product(*(axis.values for axis in axes)):
        settings = {axis.key: value for axis, value in zip(axes, values, strict=True)}
        changed = {key: value for key, value in settings.items() if key in OPTIONS}
        added = [f"{key}={value}" for key, value in settings.items() if key not in OPTIONS]
        kept = without(options.settings, settings)
        given = {**vars(options), **changed, "settings": [*kept, *added], "sweep": []}
        runs.append(Run(settings, argparse.Namespace(**given)))
    return runs
