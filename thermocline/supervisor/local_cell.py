"""The cell on this machine, for commands without an address: its broker, and its admin key.

``thermocline up`` gives its broker a password at every start, which users need not copy: it is in the record of the
run, which this user may read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from shared.config import ENVIRONMENT_PREFIX
from shared.errors import ConfigError
from shared.memory.segment_name import process_start_time
from thermocline.supervisor.records import CellRecord, all_records, runs_dir

_FLAG = "--nats"
_VARIABLES = tuple(ENVIRONMENT_PREFIX + name for name in ("NATS", "NATS_USER", "NATS_TOKEN_FILE", "NATS_CREDENTIALS"))


class SeveralCells(ValueError):
    """Several cells run on this machine, so that a command must name one."""


def broker_flags(arguments: Sequence[str], environ: Mapping[str, str], folder: Path | None = None) -> list[str]:
    """Return flags to add to a command: none where it or the environment names a broker, or no cell runs here.

    ``folder`` has the records of runs; by default it is this user's. Raises SeveralCells, and ConfigError where that
    folder cannot be trusted.
    """
    is_told = any(argument == _FLAG or argument.startswith((f"{_FLAG}=", f"{_FLAG}-")) for argument in arguments)
    if is_told or "-h" in arguments or "--help" in arguments or any(environ.get(name) for name in _VARIABLES):
        return []
    cells = [record for _, record in all_records(folder or runs_dir()) if _runs(record)]
    if len(cells) > 1:
        places = ", ".join(f"{record.base_url} ({record.data_dir})" for record in cells)
        raise SeveralCells(
            f"several cells run here: {places}. Give the flags that `thermocline up` printed behind Broker:"
        )
    return [_FLAG, cells[0].nats_url] if cells else []


def admin_key(base_url: str) -> str:
    """Return the admin key that a cell of this machine drew for the gateway at ``base_url``; "" without such a cell.

    The address must be that of the record, so that no other gets the key. A folder of records that cannot be trusted
    has no keys.
    """
    origin = _origin(base_url)
    try:
        folder = runs_dir()
    except ConfigError:
        return ""
    found = (record for _, record in all_records(folder) if _runs(record))
    return next((record.admin_key for record in found if _origin(record.base_url) == origin), "")


def _origin(url: str) -> tuple[str, str, int | None]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return "", url, None
    return parts.scheme, "127.0.0.1" if host == "localhost" else host, port


def _runs(record: CellRecord) -> bool:
    return process_start_time(record.owner_pid) == record.owner_started
