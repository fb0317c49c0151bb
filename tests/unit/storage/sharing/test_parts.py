"""Sharing starts with its engine, which may need several tries, or a fault says why there is none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal

import pytest

from services.storage.config import StorageConfig
from services.storage.io_threads import IoThreads
from services.storage.pools import Pools
from services.storage.sharing import parts
from services.storage.sharing.parts import Sharing
from shared.errors import ConfigError, TransportError
from tests.memory_bus import MemoryBroker
from tests.run_name import RUN
from tests.unit.storage.sharing.local_engine import LocalEngine

Start = Callable[[str], LocalEngine]


class Starts:
    """Starts of an engine; the first of them fail."""

    def __init__(self, failures: int, error: Exception) -> None:
        self.names: list[str] = []
        self.threads: list[int] = []
        self._failures = failures
        self._error = error

    def __call__(self, name: str) -> LocalEngine:
        self.names.append(name)
        self.threads.append(threading.get_ident())
        if len(self.names) <= self._failures:
            raise self._error
        return LocalEngine()


@pytest.fixture
def make_sharing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Sharing]:
    """Sharing whose engine starts so; the pauses between its tries take no time."""

    def make(start: Start, share: Literal["off", "nixl"] = "nixl") -> Sharing:
        monkeypatch.setattr(parts, "NixlEngine", start)
        monkeypatch.setattr(parts, "_START_PAUSE_S", 0.0)
        config = StorageConfig(id="a", node="n", shm_prefix=f"{RUN}-parts", share=share)
        return Sharing(config, MemoryBroker().connect("test"), Pools(f"{RUN}-parts", 1 << 20), IoThreads(1), "a-1")

    return make


@pytest.mark.parametrize("failures", [0, 2])
async def test_an_engine_that_does_not_start_is_tried_again(
    make_sharing: Callable[..., Sharing], failures: int
) -> None:
    """A loaded machine refuses what it can do a moment later. No try blocks the event loop."""
    starts = Starts(failures, TransportError("NIXL_ERR_BACKEND"))
    sharing = make_sharing(starts)

    await sharing.start()

    assert starts.names == ["a-a-1"] * (failures + 1)
    assert threading.get_ident() not in starts.threads
    assert sharing.engine_name == "nixl"
    assert sharing.pool is not None
    assert sharing.lenders is not None
    assert list(sharing.faults()) == []


async def test_without_an_engine_nothing_is_shared_and_a_fault_says_why(make_sharing: Callable[..., Sharing]) -> None:
    """After three tries."""
    starts = Starts(9, TransportError("NIXL does not start"))
    sharing = make_sharing(starts)

    await sharing.start()

    assert len(starts.names) == 3
    assert sharing.pool is None
    assert sharing.lenders is None
    assert sharing.engine_name == ""
    assert list(sharing.faults()) == [("sharing", "NIXL does not start", "--share")]


async def test_a_library_that_is_missing_is_an_error_at_once(make_sharing: Callable[..., Sharing]) -> None:
    """It will not be installed a moment later."""
    starts = Starts(9, ConfigError("NIXL is not installed"))

    with pytest.raises(ConfigError):
        await make_sharing(starts).start()

    assert len(starts.names) == 1


async def test_off_starts_no_engine(make_sharing: Callable[..., Sharing]) -> None:
    """Nothing is shared, and that is no fault."""
    starts = Starts(0, TransportError("unused"))
    sharing = make_sharing(starts, share="off")

    await sharing.start()

    assert starts.names == []
    assert list(sharing.faults()) == []
