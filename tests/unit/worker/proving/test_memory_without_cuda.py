"""Proofs of host registration and of CUDA IPC, over the stand-ins for CUDA's runtime and for its processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from services.worker.kv.device_pool import DevicePool
from services.worker.proving import ipc_proofs, memory_proofs
from services.worker.proving.ipc_proofs import PoolSeen, PoolShared, SharePool, prove_ipc
from services.worker.proving.memory_proofs import prove_registration
from services.worker.proving.part import WrongResult
from shared.errors import TransportError
from shared.messages.pools import KvGeometry, PoolHandle
from tests.cuda.machine import CudaMachine, CudaProcess
from tests.cuda.runtime import FakeRuntime
from tests.unit.worker.proving.test_process import SHAPE


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is none to wait for."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda *_: None)


def test_memory_is_registered_used_and_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the proof finds, nothing stays registered."""
    runtime = FakeRuntime()
    monkeypatch.setattr(memory_proofs, "loaded_runtime", lambda: runtime)

    assert prove_registration(SHAPE) is None
    assert (runtime.calls, runtime.registered) == (1, {})


def test_a_limit_on_locked_memory_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the words of what registers host pools."""
    monkeypatch.setattr(memory_proofs, "loaded_runtime", lambda: FakeRuntime(limit_bytes=1000))

    with pytest.raises(TransportError, match="cudaHostRegister of 16777216 bytes failed with code 2: see ulimit -l"):
        prove_registration(SHAPE)


def test_a_device_that_writes_other_bytes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it wrote is read back by it and compared in host memory."""
    monkeypatch.setattr(memory_proofs, "loaded_runtime", FakeRuntime)
    monkeypatch.setattr(torch.Tensor, "flip", lambda tensor, *_: tensor.clone())

    with pytest.raises(WrongResult, match="written other bytes"):
        prove_registration(SHAPE)


class PlayedPeer:
    """The other process, in this one: ``spoil`` changes its answer."""

    def __init__(self, process: CudaProcess, spoil: Callable[[PoolShared], PoolShared]) -> None:
        self._process, self._spoil = process, spoil
        self._answer: PoolShared | None = None
        self.held: list[Any] = []
        self.is_let_go = False

    def send(self, message: SharePool | PoolSeen) -> None:
        if isinstance(message, PoolSeen):
            self.is_let_go = True
            return
        with self._process:
            answer, self.held = ipc_proofs._share(message)
        self._answer = self._spoil(answer)

    def receive(self, timeout_s: float) -> PoolShared | None:
        return self._answer


@pytest.fixture
def prove(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., PlayedPeer]]:
    """Prove with a peer of a machine with one GPU."""
    machine = CudaMachine(["GPU-1"])

    def filled(geometry: KvGeometry, device: str, *, seed: int) -> DevicePool:
        content = torch.from_numpy(ipc_proofs._content(geometry, seed=seed))
        return DevicePool(geometry, ipc_proofs.PAGES, content)

    monkeypatch.setattr(ipc_proofs, "_filled_pool", filled)

    def run(spoil: Callable[[PoolShared], PoolShared] = lambda answer: answer) -> PlayedPeer:
        peer = PlayedPeer(machine.process("peer"), spoil)

        @contextmanager
        def play() -> Iterator[PlayedPeer]:
            yield peer

        monkeypatch.setattr(ipc_proofs, "_peer", play)
        prove_ipc(SHAPE)
        return peer

    with machine.process("child"):
        yield run


def test_both_processes_read_and_write_one_anothers_memory(prove: Callable[..., PlayedPeer]) -> None:
    """And the peer may end when its memory was seen."""
    assert prove().is_let_go


def test_a_peer_that_reads_other_bytes_is_found(prove: Callable[..., PlayedPeer]) -> None:
    """By their digest."""
    with pytest.raises(WrongResult, match="another process reads other bytes"):
        prove(lambda answer: PoolShared(digest=b"of other bytes", handle=answer.handle))


def test_memory_of_a_peer_with_other_bytes_is_found(
    prove: Callable[..., PlayedPeer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though this process's own arrived."""
    real = ipc_proofs._content
    monkeypatch.setattr(ipc_proofs, "_content", lambda geometry, *, seed: real(geometry, seed=seed) ^ (seed == 3))

    def spoil(answer: PoolShared) -> PoolShared:
        monkeypatch.setattr(ipc_proofs, "_content", real)
        return answer

    with pytest.raises(WrongResult, match="this process reads other bytes"):
        prove(spoil)


def test_a_write_that_does_not_arrive_is_found(
    prove: Callable[..., PlayedPeer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one to a copy."""
    monkeypatch.setattr(torch.Tensor, "copy_", lambda tensor, *_, **__: tensor)

    with pytest.raises(WrongResult, match="does not arrive"):
        prove()


def test_the_peers_reason_is_told(prove: Callable[..., PlayedPeer]) -> None:
    """CUDA's own words."""
    with pytest.raises(TransportError, match="cannot open memory of this one: RuntimeError: CUDA error: invalid"):
        prove(lambda answer: PoolShared(fault="RuntimeError: CUDA error: invalid device context"))


def test_a_real_peer_says_why_it_cannot() -> None:
    """The process as it is started on a machine with a GPU, here without one."""
    handle = PoolHandle(kind="cuda_ipc", layout="layer_first", name="", nbytes=1, pages=1, geometry=SHAPE.geometry)

    with ipc_proofs._peer() as channel:
        channel.send(SharePool(handle=handle, device="cuda:0"))
        answer = channel.receive(60)

    assert answer.handle is None
    assert answer.fault
