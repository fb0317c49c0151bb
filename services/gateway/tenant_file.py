"""The file of tenants on disk: read whole or not at all, and replaced atomically."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Callable, Container, Iterator
from pathlib import Path

from services.gateway.tenants import Tenant, Tenants, parse_tenants, render_tenants
from shared.errors import ConfigError
from shared.secret_file import BY_OTHERS, WRITTEN_BY_GROUP, Version, read_secrets

MAX_FILE_BYTES = 16 * 2**20
MODE = 0o600

# A user who can write it can admit any caller. A group may read it: secrets that Kubernetes mounts belong to one.
_FORBIDDEN = WRITTEN_BY_GROUP | BY_OTHERS


def read_tenants(
    path: Path, parse: Callable[[str, str], dict[str, Tenant]] = parse_tenants
) -> tuple[Version, dict[str, Tenant]]:
    """Return the file's version and its tenants. Raises ConfigError when it is missing, open to others, or faulty."""
    try:
        return read_secrets(path, "--tenants", parse, forbidden=_FORBIDDEN, max_bytes=MAX_FILE_BYTES)
    except FileNotFoundError as error:
        raise ConfigError(f"--tenants {path} cannot be read: {error.strerror}") from error


def read_distinct_tenants(
    path: Path, *, admin_hash: str, own_hashes: Container[str]
) -> tuple[Version, dict[str, Tenant]]:
    """Return the file's version and tenants.

    Raises ConfigError also for a tenant with the admin key or one of --api-keys, and for an empty file.
    """
    version, tenants = read_tenants(path, _parse_written)
    for name, tenant in tenants.items():
        if admin_hash in tenant.keys:
            raise ConfigError(f"--tenants {path}: tenant {name} has the admin key, which must open nothing else")
        if any(hashed in own_hashes for hashed in tenant.keys):
            raise ConfigError(f"--tenants {path}: tenant {name} has one of --api-keys")
    return version, tenants


def _parse_written(text: str, source: str) -> dict[str, Tenant]:
    """Parse a file that may be about to be written: empty, it would lock every tenant out meanwhile."""
    if not text.strip():
        raise ConfigError(f"{source} is empty; to admit no tenant, it needs the line [tenants]")
    return parse_tenants(text, source)


def write_tenants(path: Path, tenants: Tenants) -> None:
    """Replace the file in one step, the one that a symbolic link leads to.

    It keeps its owner and group, since gateways may run as them, and its mode without access that :func:`read_tenants`
    refuses; a new one has 0600. Raises OSError.
    """
    path = _behind_links(path)
    before = path.stat() if path.exists() else None
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w") as file:
            if before is not None:
                os.fchown(file.fileno(), before.st_uid, before.st_gid)
            os.fchmod(file.fileno(), MODE if before is None else stat.S_IMODE(before.st_mode) & ~_FORBIDDEN)
            file.write(render_tenants(tenants))
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


@contextlib.contextmanager
def sole_writer(path: Path) -> Iterator[None]:
    """Hold a lock for changing the file, so that no process loses another's change. Raises OSError."""
    # The directory is locked, since the file itself is replaced.
    descriptor = os.open(_behind_links(path).parent, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _behind_links(path: Path) -> Path:
    return Path(os.path.realpath(path))
