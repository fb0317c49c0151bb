"""Checks of a storage's settings that their types cannot make.

Run before it starts, and by ``thermocline up`` before any process is started.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from services.storage.backends.remote_location import check_transport, parse_remote
from services.storage.config import DEFAULT_KEY_VARIABLE, StorageConfig
from services.storage.sharing.parts import is_installed
from shared.errors import ConfigError


def check(config: StorageConfig, environ: Mapping[str, str] | None = None) -> None:
    """Check the settings; read the file of keys, but send no request to an object store.

    Raises ConfigError with every fault.
    """
    faults = list(_faults(config, os.environ if environ is None else environ))
    if faults:
        raise ConfigError.of(faults)


def _faults(config: StorageConfig, environ: Mapping[str, str]) -> Iterator[str]:
    if config.remote:
        try:
            check_transport(parse_remote(config.remote).scheme, environ)
        except ConfigError as error:
            yield from error.each()
    if config.share == "nixl" and not is_installed():
        yield "--share nixl: NIXL is not installed: pip install 'thermocline[nixl]'"
    if config.keys or DEFAULT_KEY_VARIABLE in environ:
        from services.storage.cipher import open_cipher

        try:
            open_cipher(config, environ=environ)
        except ConfigError as error:
            yield from error.each()


def directory_faults(flag: str, paths: Sequence[str]) -> list[str]:
    """Return why ``paths`` are not directories that this user can write to. Creates none.

    For the start of a cell, where a wrong path is a slip: a storage that starts again while its disk is broken goes on
    without it.
    """
    return [f"{flag} {path}: {fault}" for path in paths if (fault := _directory_fault(Path(path).expanduser()))]


def _directory_fault(path: Path) -> str:
    there = next((one for one in (path.absolute(), *path.absolute().parents) if os.path.lexists(one)), Path("/"))
    if not there.is_dir():
        return "it is not a directory" if there == path.absolute() else f"{there} is not a directory"
    if not os.access(there, os.W_OK | os.X_OK):
        return "this user cannot write there"
    return ""
