"""The library's client for a location, with settings from the environment of the process.

The client neither retries nor waits by itself: that is decided in :mod:`services.storage.backends.guarded_calls`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, LocalStore, MemoryStore, S3Store

from services.storage.backends.remote_location import RemoteLocation, check_transport
from services.storage.backends.store_errors import fault_of
from shared.errors import ConfigError

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

STALL_SHARE = 0.5
"""Part of the time-out after which a connection that moves nothing counts as broken, so that a second attempt has time
left.
"""

CONNECT_SHARE = 0.25


def connect(location: RemoteLocation, *, timeout_s: float, environ: Mapping[str, str]) -> ObjectStore:
    """Return a client for the store. No request is sent yet: an unreachable store is not a fault of the settings.

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
    # Options given here replace those that the library would read from the environment.
    options: ClientConfig = {
        "timeout": timedelta(seconds=timeout_s),
        "connect_timeout": timedelta(seconds=timeout_s * CONNECT_SHARE),
        "read_timeout": timedelta(seconds=timeout_s * STALL_SHARE),
        "allow_http": check_transport(location.scheme, environ),
    }
    retries: RetryConfig = {"max_retries": 0, "retry_timeout": timedelta(seconds=timeout_s)}
    prefix = location.prefix or None
    if location.scheme == "s3":
        return S3Store(location.bucket, prefix=prefix, client_options=options, retry_config=retries)
    if location.scheme == "gs":
        return GCSStore(location.bucket, prefix=prefix, client_options=options, retry_config=retries)
    return AzureStore(location.bucket, prefix=prefix, client_options=options, retry_config=retries)
