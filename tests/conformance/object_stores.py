"""Object stores for the conformance suite: a directory, memory, and an S3-compatible server on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import threading
import urllib.request
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
from moto.server import ThreadedMotoServer
from obstore.exceptions import GenericError

from services.storage.backends import ChunkEntry, ChunkKey, RemoteBackend
from services.storage.backends.guarded_calls import GuardedCalls
from services.storage.backends.object_store import ObjectStoreBackend, open_remote
from services.storage.backends.remote_location import parse_remote
from services.storage.backends.remote_stores import connect
from services.storage.backends.store_calls import StoreCalls
from services.storage.config import StorageConfig
from services.storage.core.circuit_breaker import CircuitBreaker
from services.storage.core.retrying import RetryPolicy
from tests.conformance.faulty_proxy import FaultyProxy

KIND = {"Content-Type": "application/octet-stream"}
THREADS = 8
TIMEOUT_S = 60.0
"""Far more than any call needs. Where a call is to run out of time, its test gives it less."""

T = TypeVar("T")

_names = itertools.count()


@functools.cache
def s3_server() -> tuple[str, int]:
    """Host and port of one S3-compatible server for this process, started when it is first asked for."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    return server.get_host_and_port()


@functools.cache
def loop() -> asyncio.AbstractEventLoop:
    """The event loop of all stores of this process, in a thread of its own."""
    made = asyncio.new_event_loop()
    threading.Thread(target=made.run_forever, daemon=True).start()
    return made


class Blocking:
    """An object store for the suite, whose callers block: what is awaited of it runs on :func:`loop`."""

    name = "remote"

    def __init__(self, remote: RemoteBackend) -> None:
        self.remote = remote

    def put(self, key: ChunkKey, blob: memoryview, *, stripe: int, timeout_s: float) -> bool:
        return self._wait(self.remote.store(key, bytes(blob), keep_all, timeout_s=timeout_s)) == "new"

    def get(self, key: ChunkKey, into: memoryview, *, timeout_s: float) -> int:
        found = self._wait(self.remote.fetch(key, into.nbytes, timeout_s=timeout_s)) or memoryview(b"")
        into[: found.nbytes] = found
        return found.nbytes

    def delete(self, key: ChunkKey, *, timeout_s: float) -> bool:
        is_there = self._wait(self.remote.sizes([key])) != [0]
        self._wait(self.remote.remove([key], timeout_s=timeout_s))
        return is_there

    def entries(self, namespace: str = "") -> Iterator[ChunkEntry]:
        return self.remote.entries(namespace)

    def close(self) -> None:
        self.remote.close()

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, loop()).result()


def keep_all(nbytes: int, front: bytes) -> bool:
    """Whatever is there stays, unless its size tells that it is something else."""
    return False


class S3Place:
    """A bucket of its own, behind a proxy that can misbehave."""

    def __init__(self) -> None:
        host, port = s3_server()
        self.proxy = FaultyProxy((host, port))
        self.bucket = f"bucket-{next(_names)}"
        request = urllib.request.Request(f"http://{host}:{port}/{self.bucket}", method="PUT")
        with urllib.request.urlopen(request, timeout=TIMEOUT_S):
            pass

    @contextlib.contextmanager
    def environment(self, **environ: str) -> Iterator[None]:
        """The variables by which a storage finds the server."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {
                "AWS_ACCESS_KEY_ID": "test",
                "AWS_SECRET_ACCESS_KEY": "test",
                "AWS_REGION": "us-east-1",
                "AWS_ENDPOINT_URL": self.proxy.url,
                "AWS_ALLOW_HTTP": "true",
                **environ,
            }.items():
                patch.setenv(name, value)
            yield

    def config(self, *, timeout_s: float = TIMEOUT_S) -> StorageConfig:
        """Settings of a storage that uses the bucket."""
        remote = f"s3://{self.bucket}/some/prefix"
        return StorageConfig(remote=remote, remote_timeout_ms=int(timeout_s * 1000), io_threads=THREADS)

    def open(self, *, timeout_s: float = TIMEOUT_S, **environ: str) -> Blocking:
        """A backend of the bucket, by settings and environment as a storage makes it."""
        with self.environment(**environ):
            backend = open_remote(self.config(timeout_s=timeout_s))
        assert backend is not None
        return Blocking(backend)

    def open_at(self, clock: Callable[[], float], breaker: CircuitBreaker, policy: RetryPolicy) -> Blocking:
        """A backend of the bucket under a clock of the test's."""
        location = parse_remote(self.config().remote)
        with self.environment():
            store = connect(location, timeout_s=TIMEOUT_S, environ=os.environ)
        calls = GuardedCalls("s3", timeout_s=TIMEOUT_S, slots=THREADS, policy=policy, breaker=breaker, clock=clock)
        return Blocking(ObjectStoreBackend(location, StoreCalls(location, store), calls, clock=clock))

    def write_directly(self, name: str, body: bytes) -> None:
        """An object that some other program put into the bucket."""
        host, port = self.proxy.target
        request = urllib.request.Request(f"http://{host}:{port}/{self.bucket}/{name}", body, KIND, method="PUT")
        with urllib.request.urlopen(request, timeout=TIMEOUT_S):
            pass

    def close(self) -> None:
        self.proxy.close()


class S3Tier:
    """A bucket; its server can be full, or fail."""

    is_durable = True

    def __init__(self, **environ: Any) -> None:
        self._environ = environ
        self._place = S3Place()
        self.backend = self._place.open(**environ)

    def fill(self) -> None:
        self._place.proxy.always = "full"

    def break_down(self) -> None:
        self._place.proxy.always = "drop"

    def mend(self) -> None:
        self._place.proxy.always = ""

    def reopen(self) -> None:
        self.backend.close()
        self.backend = self._place.open(**self._environ)

    def close(self) -> None:
        self.backend.close()
        self._place.close()


class FailingStoreCalls(StoreCalls):
    """Requests that fail with ``failure`` while it is set: writes if that is want of room, all of them otherwise."""

    failure = ""

    def _pass(self, is_write: bool = False) -> None:
        if self.failure and (is_write or "os error 28" not in self.failure):
            raise GenericError(f"Generic LocalFileSystem error: {self.failure}")

    async def put(self, path: str, body: bytes, mode: Any) -> None:
        self._pass(is_write=True)
        await super().put(path, body, mode)

    async def get(self, path: str, most: int) -> Any:
        self._pass()
        return await super().get(path, most)

    async def head(self, path: str) -> int:
        self._pass()
        return await super().head(path)

    async def delete(self, path: str) -> None:
        self._pass()
        await super().delete(path)

    async def page(self, stream: Any) -> Sequence[Any]:
        self._pass()
        return await super().page(stream)


class LocalTier:
    """A directory or memory, whose requests can be made to fail."""

    def __init__(self, url: str) -> None:
        self._location = parse_remote(url)
        self.is_durable = self._location.scheme == "file"
        self._open()

    def _open(self) -> None:
        store = connect(self._location, timeout_s=TIMEOUT_S, environ={})
        self._store = FailingStoreCalls(self._location, store)
        calls = GuardedCalls(str(self._location), timeout_s=TIMEOUT_S, slots=THREADS)
        self.backend = Blocking(ObjectStoreBackend(self._location, self._store, calls))

    def fill(self) -> None:
        self._store.failure = "No space left on device (os error 28)"

    def break_down(self) -> None:
        self._store.failure = "Input/output error (os error 5)"

    def mend(self) -> None:
        self._store.failure = ""

    def reopen(self) -> None:
        self.backend.close()
        self._open()

    def close(self) -> None:
        self.backend.close()


OBJECT_STORES: dict[str, Callable[[Path], S3Tier | LocalTier]] = {
    "object_store_file": lambda folder: LocalTier((folder / "shared").as_uri()),
    "object_store_memory": lambda folder: LocalTier("memory://"),
    "object_store_s3": lambda folder: S3Tier(),
}
"""How to make an empty object store of each kind."""
