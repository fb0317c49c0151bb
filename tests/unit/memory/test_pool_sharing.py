"""Pools between processes: a handle is all that travels, and neither side's death leaks memory or harms the other."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from shared.codec import decode, encode
from shared.errors import IntegrityError, TransportError
from shared.memory import DevicePoolView, HostPoolView, SharedSegment, reap
from shared.memory.segment import SHM_DIRECTORY
from shared.messages.pools import KvGeometry, PoolHandle

GEOMETRY = KvGeometry(layers=2, kv_heads=2, head_dim=8, page_size=4, dtype="float16")
PAGES = 5
IDENTITY = bytes(range(1, 17))

OWNER = """
import base64, sys
from shared.codec import encode
from shared.memory import HostPoolView
from shared.messages.pools import KvGeometry
geometry = KvGeometry(layers=2, kv_heads=2, head_dim=8, page_size=4, dtype="float16")
pool = HostPoolView.create(sys.argv[1], geometry, 5)
pool.pages[3] = 42
pool.seal_page(3, bytes(range(1, 17)))
pool.pages[4] = 43  # Never sealed: this process dies in the midst of it.
print(base64.b64encode(encode(pool.handle)).decode(), flush=True)
sys.stdin.readline()
"""

CONSUMER = """
import base64, sys
from shared.codec import decode
from shared.memory import DevicePoolView, HostPoolView
from shared.messages.pools import PoolHandle
host, device = (decode(base64.b64decode(each), PoolHandle) for each in sys.argv[1:3])
host, device = HostPoolView.attach(host), DevicePoolView.attach(device)
host.pages[0, :, :] = device.halves[:, :, 2].reshape(2, -1)
host.seal_page(0, bytes(range(1, 17)))
print("done", flush=True)
sys.stdin.readline()
"""


@contextmanager
def process(program: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process of its own and the first line that it printed."""
    command = [sys.executable, "-c", textwrap.dedent(program), *arguments]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        yield child, child.stdout.readline().strip()
    finally:
        child.kill()
        child.communicate()


def in_transit(handle: PoolHandle) -> str:
    return base64.b64encode(encode(handle)).decode()


def device_pool(prefix: str) -> tuple[SharedSegment, PoolHandle]:
    segment = SharedSegment.create(prefix, "device", PAGES * GEOMETRY.page_bytes)
    segment.array[:] = np.random.default_rng(0).integers(0, 256, segment.nbytes, dtype=np.uint8)
    handle = PoolHandle(
        kind="shm", layout="layer_first", name=segment.name, nbytes=segment.nbytes, pages=PAGES, geometry=GEOMETRY
    )
    return segment, handle


def test_a_consumer_that_is_killed_takes_nothing_with_it(shm_prefix: str) -> None:
    """What it wrote stays, the pools stay mapped here, and reaping at the next start spares them: we live."""
    host = HostPoolView.create(shm_prefix, GEOMETRY, PAGES)
    segment, handle = device_pool(shm_prefix)
    with process(CONSUMER, in_transit(host.handle), in_transit(handle)) as (child, said):
        assert said == "done"
        os.kill(child.pid, signal.SIGKILL)
        child.wait(30)

    view = DevicePoolView.attach(handle)
    host.verify_layer(0, 1, IDENTITY)
    assert host.pages[0].reshape(2, 2, -1).tobytes() == view.halves[:, :, 2].tobytes()
    assert reap(shm_prefix) == []
    host.pages[1] = 1
    segment.array[0] = 1


def test_an_owner_that_is_killed_leaves_what_its_consumers_need_and_nothing_after_the_next_start(
    shm_prefix: str,
) -> None:
    """Attached before or after its death, sealed pages verify and others do not; the next start removes the name."""
    with process(OWNER, shm_prefix) as (child, said):
        handle = decode(base64.b64decode(said), PoolHandle)
        before = HostPoolView.attach(handle, writable=False)
        os.kill(child.pid, signal.SIGKILL)
        child.wait(30)
    after = HostPoolView.attach(handle, writable=False)

    for view in (before, after):
        view.verify_layer(3, 1, IDENTITY)
        assert (view.pages[3] == 42).all()
        with pytest.raises(IntegrityError):
            view.verify_layer(4, 0, IDENTITY)
    assert reap(shm_prefix) == [handle.name]
    assert not (SHM_DIRECTORY / handle.name).exists()
    with pytest.raises(TransportError, match="cannot attach"):
        HostPoolView.attach(handle)
    assert (before.pages[3] == 42).all()


def test_a_revoked_pool_cannot_be_attached_again(shm_prefix: str) -> None:
    """Once its owner has taken the name away; whoever has it mapped keeps reading until told to detach."""
    host = HostPoolView.create(shm_prefix, GEOMETRY, PAGES)
    mapped = HostPoolView.attach(host.handle)
    host.pages[2] = 9

    host.unlink()

    with pytest.raises(TransportError, match="cannot attach"):
        HostPoolView.attach(host.handle)
    assert (mapped.pages[2] == 9).all()
    mapped.close()
    with pytest.raises(TransportError, match="closed"):
        mapped.flat_pages()
