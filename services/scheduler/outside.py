"""Policies, schedules and admissions of other people's packages: how they are found, loaded and told apart.

A package offers classes as entry points of the group ``thermocline.policies``, each under the ``name`` of its class.
All that are installed are loaded before anything is folded, so that schedulers with the same packages know the same
names whatever their settings are. A class that no entry point offers is named by a setting, ``module:Class``. No
stream, snapshot or recording causes an import: a name in there counts only where it is registered.

Loaded code decides the core's outputs, so the sources of those packages are part of ``fold_release``. Every class in
the core's registries that is not defined in our own packages is from outside.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import services.scheduler.policies  # noqa: F401  Ours are registered first, so that no other takes their names.
from services.scheduler.config import KINDS, Kind
from services.scheduler.core.cache.eviction import POLICIES, Policy, register_policy
from services.scheduler.core.queue.schedules import SCHEDULES, Schedule, register_schedule
from services.scheduler.core.tiers.host_admission import (
    ADMISSIONS,
    BUILT_IN_ADMISSIONS,
    Admission,
    register_admission,
)
from shared.errors import ConfigError
from shared.messages.cell_events import CellConfig
from shared.spelling import fault_of_choice

GROUP = "thermocline.policies"
"""Group of entry points; in a package's ``pyproject.toml``, ``[project.entry-points."thermocline.policies"]``."""

MOST_FILES = 2000
"""Source files of one package that are compared between schedulers; a package with more is refused."""


@dataclass(frozen=True, slots=True)
class _Registry:
    """The core's registry of one kind: ``registered`` classes or objects by name, beside the ``built_in`` names."""

    base: type[Any]
    registered: Mapping[str, Any]
    register: Callable[[type[Any]], object]
    built_in: tuple[str, ...] = ()


_REGISTRIES: dict[Kind, _Registry] = {
    "policy": _Registry(Policy, POLICIES, register_policy),
    "schedule": _Registry(Schedule, SCHEDULES, register_schedule),
    "admission": _Registry(Admission, ADMISSIONS, register_admission, tuple(BUILT_IN_ADMISSIONS)),
}

_OURS = ("services.", "shared.", "thermocline.")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_SOURCES = (".py", ".so")


@cache
def load_installed() -> Mapping[str, str]:
    """Load what installed packages offer, once per process; return name to reason for each that could not be loaded."""
    faults: dict[str, str] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda each: (each.name, each.value)):
        try:
            _load_point(point)
        except ConfigError as error:
            faults[point.name] = error.message
    return faults


def name_of(kind: Kind, given: str) -> str:
    """Return the name that a setting gives: a registered name as it is, or that of a ``module:Class``, now loaded.

    Raises ConfigError, with the reason, for an unknown name and for a class that cannot be used.
    """
    faults = load_installed()
    if ":" in given:
        found = _load_class(given, importable=_import_from_here)
        if _kind_of(found) != kind:
            raise ConfigError(f"{given!r} is a class of the kind {_kind_of(found)}, not {kind}")
        return str(found.name)
    if given not in _known(kind):
        if given in faults:
            raise ConfigError(faults[given])
        raise ConfigError(f"{fault_of_choice(given, sorted(_known(kind)))}; or name a class as module:Class")
    return given


def load_all(specifications: Iterable[str]) -> None:
    """Load classes, each given as ``module:Class``. Raises ConfigError for one that cannot be used."""
    load_installed()
    for each in specifications:
        _load_class(each, importable=_import_from_here)


def of_config(config: CellConfig) -> tuple[str, ...]:
    """Return labels, as ``policy NAME``, of the policies, schedules and admissions from outside that settings name."""
    outside = dict(_outside())
    named = (f"{kind} {getattr(config, kind)}" for kind in KINDS)
    return tuple(label for label in named if label in outside)


def missing(labels: Iterable[str]) -> list[str]:
    """Return which labels, as :func:`of_config` of another process gave them, are not registered here."""
    load_installed()
    known = {f"{kind} {name}" for kind in KINDS for name in _known(kind)}
    return [label for label in labels if label not in known]


def unknown_in(config: CellConfig) -> list[str]:
    """Return labels of what these settings, which another process wrote, name and is not registered here."""
    return missing(f"{kind} {getattr(config, kind)}" for kind in KINDS)


def digest() -> bytes:
    """Return a digest of 16 bytes of all that is loaded from outside: names, versions and sources of the packages.

    Raises ConfigError where a package's sources cannot be read.
    """
    load_installed()
    whole = hashlib.blake2b(digest_size=16)
    for label, found in sorted(_outside(), key=lambda each: each[0]):
        whole.update(f"{label} {getattr(found, 'state_version', 0)} {found.__module__}:{found.__qualname__}\n".encode())
        for name, content in _sources(found.__module__):
            whole.update(f"{name} {len(content)}\n".encode() + content)
    return whole.digest()


def _known(kind: Kind) -> list[str]:
    registry = _REGISTRIES[kind]
    return [*registry.built_in, *registry.registered]


def _outside() -> Iterator[tuple[str, type[Any]]]:
    """Label and class of everything registered that is not defined in our packages."""
    load_installed()
    for kind, registry in _REGISTRIES.items():
        for name, each in registry.registered.items():
            found = each if isinstance(each, type) else type(each)
            if not found.__module__.startswith(_OURS):
                yield f"{kind} {name}", found


def _load_point(point: EntryPoint) -> None:
    origin = f"{point.name!r} of package {point.dist.name if point.dist is not None else '?'}"
    try:
        found = _load_class(point.value)
    except ConfigError as error:
        raise ConfigError(f"{origin} cannot be loaded: {error.message}") from error
    if found.name != point.name:
        raise ConfigError(f"{origin} cannot be loaded: the class calls itself {found.name!r}")


def _load_class(given: str, importable: Any = importlib.import_module) -> type[Any]:
    """Return the class that ``module:Class`` names, registered."""
    module_name, _, attribute = given.partition(":")
    try:
        module = importable(module_name)
        found = getattr(module, attribute)
    except Exception as error:  # Anything can be raised by code that is not ours.
        raise ConfigError(f"{given!r} cannot be imported: {error!r}") from error
    if not isinstance(found, type) or not issubclass(found, Policy | Schedule | Admission):
        raise ConfigError(f"{given!r} is no subclass of Policy, Schedule or Admission of thermocline.policies")
    name = getattr(found, "name", "")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{given!r} has the name {name!r}; it may hold a-z, 0-9, '.', '_' and '-', 64 at most")
    version = getattr(found, "state_version", 1)
    if not isinstance(version, int) or version < 1:
        raise ConfigError(f"{given!r} has the state_version {version!r}, which must be a number from 1 on")
    try:
        _REGISTRIES[_kind_of(found)].register(found)
        _sources(found.__module__)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{given!r} cannot be registered: {error}") from error
    return found


def _kind_of(found: type[Any]) -> Kind:
    return next(kind for kind, registry in _REGISTRIES.items() if issubclass(found, registry.base))


def _import_from_here(module_name: str) -> Any:
    """Import a module that a setting names: from Python's path, and then from the working directory."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
        importlib.invalidate_caches()
    return importlib.import_module(module_name)


@cache
def _sources(module_name: str) -> tuple[tuple[str, bytes], ...]:
    """Name and content of every source of the package that a module is of. Raises ConfigError where there is none."""
    package = sys.modules[module_name.partition(".")[0]]
    folders = [Path(folder) for folder in getattr(package, "__path__", ())]
    files = [(folder, file) for folder in folders for file in sorted(folder.rglob("*")) if file.suffix in _SOURCES]
    single = getattr(package, "__file__", None)
    if not folders and single is not None:
        files = [(Path(single).parent, Path(single))]
    if not files or len(files) > MOST_FILES:
        raise ConfigError(
            f"package {package.__name__!r} has {len(files)} sources; schedulers compare them, so there must be 1 to "
            f"{MOST_FILES}, as files"
        )
    try:
        return tuple((file.relative_to(folder).as_posix(), file.read_bytes()) for folder, file in files)
    except OSError as error:
        raise ConfigError(f"the sources of package {package.__name__!r} cannot be read: {error}") from error
