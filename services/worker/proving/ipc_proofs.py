"""Proof of CUDA IPC in both directions: another process reads and writes a pool of this one, and this one a pool of it.

``python -m services.worker.proving.ipc_proofs FD`` is that other process.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import torch

from services.worker.kv.device_pool import DevicePool
from services.worker.parallel.channel import Channel
from services.worker.proving.cases import speed_of
from services.worker.proving.part import WrongResult
from services.worker.proving.table import ServedShape, Speed
from shared.errors import TransportError
from shared.lifecycle import die_with_parent
from shared.memory.cuda_ipc import open_halves
from shared.messages.base import Message
from shared.messages.pools import KvGeometry, PoolHandle

PAGES = 16
PEER_SECONDS = 45.0
"""Longest wait for the other process, which imports torch and makes a context."""

PREFIX = "thermocline-proof"


class SharePool(Message, frozen=True):
    """The order to read and overwrite the pool of ``handle``, and to answer with a pool of its own on that device."""

    handle: PoolHandle
    device: str


class PoolShared(Message, frozen=True):
    """The answer: the ``digest`` of the bytes that were read, and a pool's handle; or the fault."""

    digest: bytes = b""
    handle: PoolHandle | None = None
    fault: str = ""


class PoolSeen(Message, frozen=True):
    """The other process may end."""


def prove_ipc(shape: ServedShape) -> Speed | None:
    """Prove IPC.

    Raises WrongResult for bytes that differ, TransportError for memory that cannot be exported or opened. The speed is
    that of reading the other process's memory on the device.
    """
    geometry = msgspec.structs.replace(shape.geometry, layers=2)
    ours = _filled_pool(geometry, shape.device, seed=1)
    torch.cuda.synchronize()
    with _peer() as channel:
        channel.send(SharePool(handle=ours.handle(), device=shape.device))
        answer = channel.receive(PEER_SECONDS)
        if answer.fault or answer.handle is None:
            raise TransportError(f"another process cannot open memory of this one: {answer.fault}")
        if answer.digest != hashlib.sha256(_content(geometry, seed=1).tobytes()).digest():
            raise WrongResult("another process reads other bytes from this one's memory")
        if not np.array_equal(_bytes_of(ours), _content(geometry, seed=2)):
            raise WrongResult("what another process writes to this one's memory does not arrive")
        theirs: Any = open_halves(answer.handle, torch)
        if not np.array_equal(theirs.cpu().numpy().reshape(-1), _content(geometry, seed=3)):
            raise WrongResult("this process reads other bytes from another one's memory")
        speed = speed_of(theirs.clone, PAGES * geometry.page_bytes, shape.device, rounds=3)
        del theirs
        channel.send(PoolSeen())
    return speed


def _content(geometry: KvGeometry, *, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, PAGES * geometry.page_bytes, dtype=np.uint8)


def _filled_pool(geometry: KvGeometry, device: str, *, seed: int) -> DevicePool:
    pool = DevicePool.create(geometry, PAGES, device=device, shm_prefix=PREFIX)
    memory = pool.memory().tensor
    if memory is None:
        raise TransportError(f"{device} has no memory that CUDA could export")
    memory.copy_(torch.from_numpy(_content(geometry, seed=seed)))
    return pool


def _bytes_of(pool: DevicePool) -> np.ndarray:
    memory = pool.memory().tensor
    assert memory is not None
    return memory.cpu().numpy()


@contextlib.contextmanager
def _peer() -> Iterator[Channel]:
    """Start the other process, which does not outlive the block."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "services.worker.proving.ipc_proofs", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=2,
        )
    channel = Channel(ours, PoolShared, timeout_s=PEER_SECONDS)
    try:
        yield channel
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
    finally:
        process.kill()
        channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)


def main(argv: list[str]) -> int:
    """Run the other process. Return 1 where it failed, which it has reported."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    channel = Channel(socket.socket(fileno=int(argv[0])), SharePool | PoolSeen, timeout_s=PEER_SECONDS)
    order = channel.receive(PEER_SECONDS)
    try:
        answer, held = _share(order)
    except Exception as error:  # Of any kind: it is the reason why IPC cannot be used.
        channel.send(PoolShared(fault=f"{type(error).__name__}: {error}"))
        return 1
    channel.send(answer)
    channel.receive(PEER_SECONDS)
    held.clear()
    return 0


def _share(order: SharePool) -> tuple[PoolShared, list[object]]:
    # torch leaves these functions without types.
    cuda: Any = torch.cuda
    cuda.set_device(order.device)
    geometry = order.handle.geometry
    theirs: Any = open_halves(order.handle, torch)
    digest = hashlib.sha256(theirs.cpu().numpy().tobytes()).digest()
    theirs.copy_(torch.from_numpy(_content(geometry, seed=2)).view(theirs.shape))
    mine = _filled_pool(geometry, order.device, seed=3)
    cuda.synchronize()
    return PoolShared(digest=digest, handle=mine.handle()), [mine, theirs]


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # An orderly end of torch waits for processes that have mapped its memory.
