"""The file of tenants on disk: read whole or not at all, and replaced whole."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from services.gateway.tenants import Tenant, Tenants, parse_tenants, render_tenants
from shared.errors import ConfigError

MAX_FILE_BYTES = 16 * 2**20
MODE = 0o600

# Who can write it can let anybody in. A group may read it, since secrets that Kubernetes mounts belong to one.
_FORBIDDEN = stat.S_IWGRP | stat.S_IRWXO

Version = tuple[int, int, int, int]


def version_of(path: Path) -> Version | None:
    """What changes whenever the file does; None where there is none, or it cannot be looked at."""
    try:
        status = path.stat()
    except OSError:
        return None
    return _version(status)


def read_tenants(path: Path) -> tuple[Version, dict[str, Tenant]]:
    """The file's version and its tenants. Raises ConfigError when it is missing, open to others, or faulty."""
    try:
        # By the open file and not by its name, so that what is checked is what is read.
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"--tenants {path} cannot be read: {error.strerror}") from error
    faults = []
    if status.st_mode & _FORBIDDEN:
        mode = stat.S_IMODE(status.st_mode)
        faults.append(f"--tenants {path} can be written by its group or used by others (mode {mode:o}); chmod 600 it")
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError("; ".join([*faults, f"--tenants {path} is larger than {MAX_FILE_BYTES} bytes"]))
    tenants: dict[str, Tenant] = {}
    try:
        tenants = parse_tenants(raw.decode(), f"--tenants {path}")
    except UnicodeDecodeError:
        faults.append(f"--tenants {path} is not UTF-8")
    except ConfigError as error:
        faults.append(error.message)
    if faults:
        raise ConfigError("; ".join(faults))
    return _version(status), tenants


def write_tenants(path: Path, tenants: Tenants) -> None:
    """Replace the file in one step, readable by its owner alone (or as it was). Raises OSError."""
    mode = stat.S_IMODE(path.stat().st_mode) & ~_FORBIDDEN if path.exists() else MODE
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w") as file:
            os.fchmod(file.fileno(), mode)
            file.write(render_tenants(tenants))
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


@contextlib.contextmanager
def sole_writer(path: Path) -> Iterator[None]:
    """Let one process at a time change the file, so that neither loses the other's change. Raises OSError."""
    # The directory is locked, since the file itself is replaced.
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _version(status: os.stat_result) -> Version:
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
