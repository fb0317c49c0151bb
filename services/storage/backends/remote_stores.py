"""Makes the library's client for a location, with its settings taken from the environment of the process.

The client neither retries nor waits by itself: that is decided in :mod:`services.storage.backends.guarded_calls`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, LocalStore, MemoryStore, S3Store

from services.storage.backends.remote_location import RemoteLocation, Scheme
from services.storage.backends.store_errors import fault_of
from shared.errors import ConfigError

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

STALL_SHARE = 0.5
"""A connection that moves nothing for this share of the time-out is broken, so that a second attempt has time left."""

CONNECT_SHARE = 0.25

_ENDPOINTS: Final[dict[Scheme, tuple[str, ...]]] = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
}
_ALLOW_HTTP: Final[dict[Scheme, str]] = {"s3": "AWS_ALLOW_HTTP", "az": "AZURE_ALLOW_HTTP", "gs": "GOOGLE_ALLOW_HTTP"}


def connect(location: RemoteLocation, *, timeout_s: float, environ: Mapping[str, str]) -> ObjectStore:
    """A client for the store. Nothing is asked of it yet: one that cannot be reached is not a fault of the settings.

    Raises ConfigError for settings that cannot work.
    """
    try:
        if location.scheme == "memory":
            return MemoryStore()
        if location.scheme == "file":
            return LocalStore(location.prefix, mkdir=True)
        return _connect_over_http(location, timeout_s, environ)
    except (BaseError, OSError, ValueError, NotImplementedError) as error:
        raise ConfigError(f"--remote {location}: {fault_of(error).text}") from error


def _connect_over_http(location: RemoteLocation, timeout_s: float, environ: Mapping[str, str]) -> ObjectStore:
    # Options that are given here replace the ones that the library would read from the environment.
    options: ClientConfig = {
        "timeout": timedelta(seconds=timeout_s),
        "connect_timeout": timedelta(seconds=timeout_s * CONNECT_SHARE),
        "read_timeout": timedelta(seconds=timeout_s * STALL_SHARE),
        "allow_http": _allows_http(location.scheme, environ),
    }
    retries: RetryConfig = {"max_retries": 0, "retry_timeout": timedelta(seconds=timeout_s)}
    prefix = location.prefix or None
    if location.scheme == "s3":
        return S3Store(location.bucket, prefix=prefix, client_options=options, retry_config=retries)
    if location.scheme == "gs":
        return GCSStore(location.bucket, prefix=prefix, client_options=options, retry_config=retries)
    return AzureStore(location.bucket, prefix=prefix, client_options=options, retry_config=retries)


def _allows_http(scheme: Scheme, environ: Mapping[str, str]) -> bool:
    variable = _ALLOW_HTTP[scheme]
    is_allowed = environ.get(variable, "").strip().lower() in ("1", "true", "yes", "on")
    named = [name for name in _ENDPOINTS.get(scheme, ()) if environ.get(name, "").lower().startswith("http://")]
    if named and not is_allowed:
        raise ConfigError(f"{named[0]} is not encrypted (http://); set {variable}=true if that is meant")
    return is_allowed
