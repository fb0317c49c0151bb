"""The file of a run: its figures, each request, and all that is needed to repeat it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from shared.errors import InvalidRequest
from shared.result_file import write_result
from shared.undecodable import UNDECODABLE
from thermocline.load.dialect import Dialect
from thermocline.load.figures import Figures, Row, Slo

SCHEMA: Literal[1] = 1
"""Version of the file, raised when readers of the last one would misread the next."""


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """The client's machine. The server's can be named in ``--label``."""

    processor: str
    cores: int
    memory_bytes: int
    load_average_1min: float


class Client(msgspec.Struct, frozen=True, kw_only=True):
    """The client itself. ``cpu_part`` is the share of one core that it used while it measured."""

    cpu_part: float
    versions: dict[str, str]
    hardware: Hardware


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run. ``settings`` are the flags that decide the requests and their times."""

    schema: Literal[1] = SCHEMA
    kind: Literal["thermocline load", "thermocline bench"] = "thermocline load"  # "bench" until release 0.2.
    label: str
    date: str
    command: str
    seed: int
    workload: str
    settings: dict[str, Any]
    server: Dialect
    client: Client
    slo: Slo
    figures: Figures
    requests: list[Row]


def save(report: Report, path: Path) -> None:
    """Write the file atomically. Raises OperatorError."""
    write_result(path, f"{as_json(report)}\n".encode())


def as_json(report: Report) -> str:
    """Return the whole report as one JSON object."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1).decode()


def load(path: Path) -> Report:
    """Read a file of :func:`save`. Raises InvalidRequest, which names the file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Report)
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from error
    except UNDECODABLE as error:
        raise InvalidRequest(f"{path} is no result of `thermocline load` with schema {SCHEMA}: {error}") from error
