"""The location of an object store, from its URL.

=====================  =============================================================
URL                    store
=====================  =============================================================
s3://bucket/prefix     Amazon S3, or whatever speaks its protocol (MinIO, Ceph, R2)
gs://bucket/prefix     Google Cloud Storage
az://container/prefix  Azure Blob Storage
file:///directory      a directory, usually of a file system that nodes share
memory://              this process; for trying out and for tests
=====================  =============================================================

URLs hold no secrets: credentials and endpoints come from the environment variables that the providers define.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import unquote, urlsplit

from shared.errors import ConfigError

Scheme = Literal["s3", "gs", "az", "file", "memory"]

SCHEMES: Final[tuple[Scheme, ...]] = ("s3", "gs", "az", "file", "memory")

_ENDPOINTS: Final[dict[Scheme, tuple[str, ...]]] = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
}
_ALLOW_HTTP: Final[dict[Scheme, str]] = {"s3": "AWS_ALLOW_HTTP", "az": "AZURE_ALLOW_HTTP", "gs": "GOOGLE_ALLOW_HTTP"}

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}")


@dataclass(frozen=True, slots=True)
class RemoteLocation:
    """A parsed URL: bucket (or container) and the prefix of all names in it; for ``file`` the prefix is absolute."""

    scheme: Scheme
    bucket: str = ""
    prefix: str = ""

    @property
    def lists_in_order(self) -> bool:
        """Whether listings are sorted by name, so that one that broke off continues behind the last name."""
        return self.scheme in ("s3", "gs", "az")

    def __str__(self) -> str:
        """Return the location as a URL, such as ``s3://bucket/prefix``."""
        return f"{self.scheme}://{self.bucket}{'/' if self.bucket and self.prefix else ''}{self.prefix}"


def parse_remote(url: str) -> RemoteLocation:
    """Parse the store that ``--remote`` names. Raises ConfigError with every fault, without repeating a secret."""
    try:
        parts = urlsplit(url)
        is_remote_host = parts.hostname not in (None, "", "localhost")
    except ValueError as error:
        raise ConfigError("--remote is not a URL") from error
    if parts.scheme not in SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES[:-1])
        raise ConfigError(f"--remote begins with {parts.scheme or 'no scheme'}, which is none of {known}")
    scheme: Scheme = parts.scheme
    faults = []
    if "@" in parts.netloc:
        faults.append("--remote holds credentials, which are given by the provider's environment variables")
    elif scheme == "file":
        if is_remote_host:
            faults.append(f"--remote file://{parts.netloc} names a host, but a directory is written file:///directory")
        if not parts.path.strip("/"):
            faults.append("--remote file:// names no directory")
    elif scheme == "memory":
        if parts.netloc or parts.path.strip("/"):
            faults.append("--remote memory:// takes no name")
    elif not _BUCKET.fullmatch(parts.netloc):
        faults.append(f"--remote {scheme}://{parts.netloc!r} is not the name of a bucket")
    if parts.query or parts.fragment:
        faults.append("--remote holds a query or fragment, but settings of a store are environment variables")
    path = unquote(parts.path).strip("/")
    if any(part in ("", ".", "..") or not part.isprintable() for part in path.split("/")) and path:
        faults.append("--remote has a path with empty, '.', '..' or unprintable parts")
    if faults:
        raise ConfigError.of(faults)
    if scheme == "file":
        return RemoteLocation(scheme, prefix="/" + path)
    return RemoteLocation(scheme, bucket=parts.netloc, prefix=path)


def check_transport(scheme: Scheme, environ: Mapping[str, str]) -> bool:
    """Return whether a store of this kind may be reached over plain HTTP.

    Raises ConfigError if ``environ`` names such an endpoint and does not allow it.
    """
    variable = _ALLOW_HTTP.get(scheme, "")
    is_allowed = environ.get(variable, "").strip().lower() in ("1", "true", "yes", "on")
    named = [name for name in _ENDPOINTS.get(scheme, ()) if environ.get(name, "").lower().startswith("http://")]
    if named and not is_allowed:
        raise ConfigError(f"{named[0]} is not encrypted (http://); set {variable}=true if that is meant")
    return is_allowed
