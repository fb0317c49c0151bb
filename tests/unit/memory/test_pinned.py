"""Memory is registered with the driver once, and no launch hears of what was refused."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from shared import progress
from shared.errors import TransportError
from shared.memory import pinned
from shared.memory.pinned import PinnedMemory
from tests.cuda.runtime import FakeRuntime

ARRAY = np.zeros(8192, dtype=np.uint8)


def test_the_whole_array_is_registered_portable_and_mapped_once() -> None:
    """Address, size and flags 1 | 2; whoever registers it again is counted, and the last one unregisters it."""
    runtime = FakeRuntime()
    memory = PinnedMemory(lambda: runtime)

    memory.register(ARRAY)
    memory.register(ARRAY)
    memory.unregister(ARRAY)

    assert runtime.registered == {ARRAY.ctypes.data: 8192}
    assert (runtime.flags, runtime.calls) == ([3], 1)
    memory.unregister(ARRAY)
    memory.unregister(ARRAY)
    assert runtime.registered == {}


def test_what_overlaps_is_refused_before_the_driver_is_asked() -> None:
    """A range that is partly pinned would stay so when its other part goes."""
    runtime = FakeRuntime()
    memory = PinnedMemory(lambda: runtime)
    memory.register(ARRAY[:4096])

    with pytest.raises(TransportError, match="overlap"):
        memory.register(ARRAY[100:200])
    assert runtime.calls == 1
    memory.register(ARRAY[4096:])


def test_a_refusal_is_typed_and_taken_back() -> None:
    """Out of lockable memory is the usual reason; the thread's next kernel launch is not blamed for it."""
    runtime = FakeRuntime(limit_bytes=4096)
    memory = PinnedMemory(lambda: runtime)

    with pytest.raises(TransportError, match="ulimit -l"):
        memory.register(ARRAY)

    runtime.launch()
    assert not memory.covers(ARRAY)


def test_memory_that_others_have_registered_is_pinned() -> None:
    """Code 712 says so; the last error that it leaves is taken back."""
    runtime = FakeRuntime()
    runtime.cudaHostRegister(ARRAY.ctypes.data, 8192, 3)
    memory = PinnedMemory(lambda: runtime)

    memory.register(ARRAY)
    runtime.launch()

    assert memory.covers(ARRAY)
    runtime.cudaHostUnregister(ARRAY.ctypes.data)
    memory.unregister(ARRAY)
    runtime.launch()


def test_parts_of_what_is_pinned_are_pinned() -> None:
    """A copy may go straight to any part, and to nothing that sticks out."""
    runtime = FakeRuntime()
    memory = PinnedMemory(lambda: runtime)
    memory.register(ARRAY[1000:5000])

    assert memory.covers(ARRAY[1000:5000])
    assert memory.covers(ARRAY[2000:3000])
    assert not memory.covers(ARRAY[999:2000])
    assert not memory.covers(ARRAY[4000:5001])


def test_nobody_waits_while_a_pool_is_pinned() -> None:
    """The driver takes minutes for a large one: what is asked meanwhile is answered, and it is not pinned yet."""
    asked, answer = threading.Event(), threading.Event()

    class SlowRuntime(FakeRuntime):
        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name.
            asked.set()
            assert answer.wait(60)
            return super().cudaHostRegister(address, nbytes, flags)

    runtime = SlowRuntime()
    memory = PinnedMemory(lambda: runtime)
    thread = threading.Thread(target=memory.register, args=(ARRAY,))
    thread.start()
    assert asked.wait(60)
    early = memory.covers(ARRAY)
    answer.set()
    thread.join()

    assert not early
    assert memory.covers(ARRAY)


def test_a_large_pool_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every page is touched before the driver is asked, a piece at a time."""
    told: list[int] = []

    class Phase:
        def __enter__(self) -> object:
            return told.append

        def __exit__(self, *error: object) -> None:
            pass

    monkeypatch.setattr(pinned, "TOUCHED_BYTES", 2 * 2**20)
    monkeypatch.setattr(progress, "phase", lambda *_, **__: Phase())

    PinnedMemory(FakeRuntime).register(np.zeros(5 * 2**20, dtype=np.uint8))

    assert told == [2, 2, 1]
