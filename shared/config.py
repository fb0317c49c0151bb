"""Settings: a TOML file, environment variables and flags, in that order of rising precedence.

A service describes its settings as one frozen msgspec struct; names carry their unit (``_bytes``, ``_ms``,
``_tokens``). ``load`` reads all three sources and reports all faults at once, a misspelt name with the nearest valid
one. Sizes may be written ``64MiB``.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tomllib
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from shared import variables
from shared.arguments import ArgumentParser
from shared.errors import ConfigError, reason_of
from shared.renamed_settings import REMOVED, RENAMED, by_new_names, by_new_value, old_names
from shared.spelling import fault_of_choice, nearest
from shared.undecodable import UNPARSABLE

C = TypeVar("C", bound=msgspec.Struct)

ENVIRONMENT_PREFIX = variables.PREFIX

NATS_URL = "nats://127.0.0.1:4222"
"""Default address of the broker."""

SECTIONS = ("up", "gateway", "router", "scheduler", "worker", "storage")
"""Tables that a settings file may have: one for each service, and one for ``thermocline up``."""

_VERY_NEAR = 0.85
"""Likeness from which on a name among others' names is taken for a misspelt one of ours."""

_UNITS = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
}  # fmt: skip


class FaultySettings(ConfigError):
    """Unreadable values or unknown names.

    ``rest`` has defaults in their place, so that further faults can be found at once; None where the defaults are
    missing or invalid, too.
    """

    rest: msgspec.Struct | None = None


def parse_bytes(text: str) -> int:
    """Return the number of bytes of a size such as ``64MiB`` (67108864). Raises ValueError for other text."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is not a size such as 64MiB, 1GB or 4096")
    try:
        return int(float(match[1]) * _UNITS[match[2].upper()])
    except OverflowError as error:
        raise ValueError(f"{text[:20]}... is larger than any size") from error


def choices_of(kind: Any) -> tuple[str, ...]:
    """Return the words that a setting of type ``kind`` may have, where they are fixed; () for any other type."""
    bare = typing.get_args(kind)[0] if typing.get_origin(kind) is typing.Annotated else kind
    if typing.get_origin(bare) is not typing.Literal:
        return ()
    return tuple(choice for choice in typing.get_args(bare) if isinstance(choice, str))


def description_of(kind: Any) -> str:
    """Return the description of a setting of type ``kind``, or ""."""
    if typing.get_origin(kind) is not typing.Annotated:
        return ""
    return next((meta.description or "" for meta in kind.__metadata__ if isinstance(meta, msgspec.Meta)), "")


def _convert(name: str, kind: Any, value: Any) -> Any:
    """Return one raw value (text from flags and environment, TOML values from files) as ``kind``."""
    # A description rides on the type as ``Annotated[tuple[str, ...], Meta(...)]``.
    bare = typing.get_args(kind)[0] if typing.get_origin(kind) is typing.Annotated else kind
    choices = choices_of(kind)
    if choices and value not in choices:
        raise ValueError(fault_of_choice(value, choices))
    if isinstance(value, str):
        if name.endswith(("_bytes", "_bytes_per_s")):
            value = parse_bytes(value)
        elif is_list(kind):
            value = [part.strip() for part in value.split(",") if part.strip()]
        elif bare is bool:
            lowered = value.lower()
            if lowered not in ("1", "0", "true", "false", "yes", "no", "on", "off"):
                raise ValueError(f"{value!r} is not a boolean")
            value = lowered in ("1", "true", "yes", "on")
    return msgspec.convert(value, kind, strict=False)


def load(
    kind: type[C],
    section: str,
    *,
    file: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
    strays: Sequence[str] = (),
) -> C:
    """Return the settings ``kind`` from file, environment and flags. Raises ConfigError with all faults.

    Values come from ``[section]`` (and known top-level keys) of ``file``, then ``THERMOCLINE_<FIELD>``, then ``flags``
    (None values are absent). ``strays`` are arguments of the command line that are no flags of ``kind``.
    """
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    raw: dict[str, tuple[str, Any]] = {}
    faults = _stray_faults(strays, list(fields))
    if file is not None:
        try:
            table = tomllib.loads(Path(file).read_text(encoding="utf-8"))
        except (OSError, *UNPARSABLE) as error:
            raise ConfigError(f"cannot read {file}: {reason_of(error)}") from error
        # Top-level scalars are common to all services, so one that only this service lacks is not a fault.
        raw |= by_new_names(table, fields, lambda key: f"{file}: {key}", faults)
        faults += [
            f"{file}: there is no section [{key}]{nearest(key, SECTIONS)}"
            for key, value in table.items()
            if isinstance(value, dict) and key not in (*SECTIONS, section)
        ]
        own = table.get(section, {})
        if not isinstance(own, dict):
            faults.append(f"{file}: [{section}] is not a table")
            own = {}
        raw |= by_new_names(own, fields, lambda key: f"{file}: {section}.{key}", faults)
        known = [*fields, *(old for old, _ in old_names(fields))]
        somewhere = {*fields, *variables.SETTINGS, *RENAMED}
        faults += [
            f"{file}: {key} {_unknown(key, {*fields, *variables.SETTINGS})}"
            for key, value in table.items()
            if key not in somewhere and not isinstance(value, dict)
        ]
        faults += [f"{file}: {section}.{key} {_unknown(key, fields)}" for key in own if key not in known]
    raw |= by_new_names(_variables(environ or {}), fields, lambda name: ENVIRONMENT_PREFIX + name.upper(), faults)
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    raw |= by_new_names(given, fields, lambda name: "--" + name.replace("_", "-"), faults)
    values: dict[str, Any] = {}
    for name, (source, value) in raw.items():
        try:
            values[name] = _convert(name, fields[name].type, by_new_value(name, value, source))
        except (ValueError, msgspec.ValidationError) as error:
            faults.append(f"{source}: {error}")
    faults += [
        f"--{name.replace('_', '-')} is required (or {ENVIRONMENT_PREFIX}{name.upper()}, or [{section}] {name})"
        for name, field in fields.items()
        if field.required and name not in raw
    ]
    if faults:
        faulty = FaultySettings.of(faults)
        faulty.rest = _without_faults(kind, values)
        raise faulty
    try:
        return kind(**values)  # __post_init__ may check combinations
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return our environment variables by the names of settings; only upper case counts."""
    return {
        variable.removeprefix(ENVIRONMENT_PREFIX).lower(): value
        for variable, value in environ.items()
        if variable.startswith(ENVIRONMENT_PREFIX) and variable == variable.upper()
    }


def _unknown(key: str, known: Iterable[str]) -> str:
    """Return what to say of a key that is no setting: its history, or else the nearest name."""
    removed = REMOVED.get(key)
    return removed.told if removed is not None else f"is not a setting{nearest(key, known)}"


def _without_faults(kind: type[C], values: Mapping[str, Any]) -> C | None:
    try:
        return kind(**values)
    except (TypeError, ValueError):
        return None


def _stray_faults(strays: Sequence[str], known: Sequence[str]) -> list[str]:
    faults = []
    is_behind_flag = False
    for argument in strays:
        is_flag = argument.startswith("--")
        if is_flag:
            name = argument[2:].partition("=")[0]
            flags = [field.replace("_", "-") for field in known]
            removed = REMOVED.get(name.replace("-", "_"))
            told = removed.told if removed is not None else f"is not a flag{nearest(name, flags, '--')}"
            faults.append(f"--{name} {told}")
        elif not is_behind_flag:
            faults.append(f"{argument!r} belongs to no flag: settings are given as --name value")
        is_behind_flag = is_flag and "=" not in argument
    return faults


def misspelt(
    kinds: Mapping[str, type[msgspec.Struct]],
    *,
    file: str | Path | None = None,
    environ: Mapping[str, str],
) -> list[str]:
    """Return a fault for each name in file or environment that is no setting of these services but looks like one.

    A service by itself ignores names that may be meant for another: here all are known, by their sections. ``load``
    tells of an unreadable file, ``variables.warn_of_strangers`` of a variable that is not near to any setting.
    """
    fields = {section: [field.name for field in msgspec.structs.fields(kind)] for section, kind in kinds.items()}
    everything = sorted({name for names in fields.values() for name in names})
    known = {section: {*names, *(old for old, _ in old_names(names))} for section, names in fields.items()}
    anything = set().union(*known.values())
    faults = []
    try:
        table = {} if file is None else tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, *UNPARSABLE):
        table = {}
    for key, value in table.items():
        if not isinstance(value, dict) and key not in anything:
            faults.append(f"{file}: {key} {_unknown(key, {*everything, *variables.SETTINGS})}")
        elif isinstance(value, dict) and key in fields:
            faults += [
                f"{file}: {key}.{name} {_unknown(name, fields[key])}" for name in value if name not in known[key]
            ]
    for variable in sorted(environ):
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if not variable.startswith(ENVIRONMENT_PREFIX) or name in anything or variables.is_known(variable):
            continue
        section, _, rest = name.partition("_")
        # Orchestrators use such names for the ports of services, too.
        if rest in fields.get(section, ()) and not environ[variable].startswith("tcp://"):
            near = f"; did you mean {ENVIRONMENT_PREFIX}{rest.upper()}?"
        else:
            near = nearest(name.upper(), [known.upper() for known in everything], ENVIRONMENT_PREFIX, _VERY_NEAR)
        if near:  # Other names are not ours: an operator chooses those of secrets, for example.
            faults.append(f"{variable} is not a setting{near}")
    return faults


def is_list(kind: Any) -> bool:
    """Return whether a setting of type ``kind`` has several values, separated by commas."""
    bare = typing.get_args(kind)[0] if typing.get_origin(kind) is typing.Annotated else kind
    return typing.get_origin(bare) is tuple


class _Joined(argparse.Action):
    """Joins the values of a flag that is given several times by commas."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, values if before is None else f"{before},{values}")


def add_flags(parser: argparse.ArgumentParser, kind: type[msgspec.Struct]) -> None:
    """Add one optional flag per field of ``kind``, and ``--config``. Values stay text; ``load`` converts them."""
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings")
    add_fields(parser, kind)


def add_fields(
    parser: argparse._ActionsContainer, kind: type[msgspec.Struct], names: Collection[str] | None = None
) -> None:
    """Add one optional flag per field of ``kind``, or per field in ``names``. Values stay text.

    A flag of a list may be given several times.
    """
    for field in msgspec.structs.fields(kind):
        if names is not None and field.name not in names:
            continue
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            dest=field.name,
            action=_Joined if is_list(field.type) else "store",
            metavar=_metavar(field.name, field.type),
            help=help_of(field).replace("%", "%%"),
        )
    added = [field.name for field in msgspec.structs.fields(kind) if names is None or field.name in names]
    for old, _ in old_names(added):
        parser.add_argument("--" + old.replace("_", "-"), dest=old, help=argparse.SUPPRESS)


def help_of(field: Any) -> str:
    """Return a setting's help: its description, its possible words where they are fixed, and its default."""
    choices = choices_of(field.type)
    told = [description_of(field.type), f"one of {', '.join(choices)}" if choices else ""]
    default = default_of(field)
    return "; ".join(filter(None, told)) + (f" (default: {default})" if default else "")


def default_of(field: Any) -> str:
    """Return a setting's default as text, such as ``64 MiB`` or ``true``; "" for a required or empty one."""
    value = field.default
    if field.required or value is None or value in ("", ()):
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(value)
    if field.name.endswith(("_bytes", "_bytes_per_s")) and isinstance(value, int):
        return _size(value)
    return str(value)


def _size(nbytes: int) -> str:
    for unit, scale in ("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10):
        if nbytes and nbytes % scale == 0:
            return f"{nbytes // scale} {unit}"
    return f"{nbytes} bytes"


_METAVARS = {"int": "N", "float": "X", "bool": "BOOL"}
_PATHS = {"dir": "DIR", "model": "DIR", "file": "FILE", "ca": "FILE", "cert": "FILE", "gate": "FILE", "nats": "URL"}


def _metavar(name: str, kind: Any) -> str:
    """Return the placeholder of a value in help: its kind, not the flag's name once more."""
    if name.endswith(("_bytes", "_bytes_per_s")):
        return "SIZE"
    bare = typing.get_args(kind)[0] if typing.get_origin(kind) is typing.Annotated else kind
    for type_ in (bare, *typing.get_args(bare)):
        if getattr(type_, "__name__", "") in _METAVARS:
            return _METAVARS[type_.__name__]
    word = "NAME" if choices_of(kind) else _PATHS.get(name.rpartition("_")[2], "TEXT")
    return f"{word},…" if is_list(kind) else word


def parser_of(kind: type[msgspec.Struct], section: str, description: str) -> ArgumentParser:
    """Return the parser of a process's command line: a flag per setting of ``kind``, and ``--config``."""
    prog = f"thermocline {section}"
    parser = ArgumentParser(prog=prog, usage=f"{prog} [--config FILE] [--SETTING VALUE ...]", description=description)
    add_flags(parser, kind)
    return parser


def from_command_line(
    kind: type[C], section: str, argv: Sequence[str], *, environ: Mapping[str, str], description: str = ""
) -> C:
    """Return the settings of a command line, environment and file. ``--help`` prints every setting and exits.

    Raises ConfigError with all faults.
    """
    parsed, strays = parser_of(kind, section, description).parse_known_args(list(argv))
    flags = vars(parsed)
    return load(kind, section, file=flags.pop("config"), environ=environ, flags=flags, strays=strays)


def for_service(kind: type[C], service: str, argv: Sequence[str] | None, description: str) -> C | None:
    """Return the settings of a process from its flags (``sys.argv`` when None), environment and file.

    None when they are faulty; the faults are on stderr then, and the process should exit with ``EXIT_REFUSED``. So is a
    warning of variables that nothing reads, except below `thermocline up`, which says it for all.
    """
    arguments = sys.argv[1:] if argv is None else argv
    if not os.environ.get(variables.SUPERVISED):
        variables.warn_of_strangers(f"thermocline {service}", kind.__struct_fields__)
    try:
        return from_command_line(kind, service, arguments, environ=os.environ, description=description)
    except ConfigError as error:
        print(f"thermocline {service}: {error.message}", file=sys.stderr)
        return None
