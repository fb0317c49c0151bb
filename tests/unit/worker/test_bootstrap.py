"""The settings of movers and verification reach what moves pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.worker.bootstrap import make_disk_reads, make_loads, make_stores, proposal_tokens
from services.worker.config import WorkerConfig
from services.worker.importance.disk_reads import DiskReads
from services.worker.parallel.group_runner import GroupRunner
from shared.errors import ConfigError
from shared.memory import HostPoolView
from tests.memory_bus import MemoryBroker
from tests.unit.worker.fake_model import FakeRunner
from tests.unit.worker.pools import host_pool, page_load


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRunner]:
    """With no profile of this machine's user in sight."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = FakeRunner()
    yield made
    made.close()


@pytest.fixture
def flipped(runner: FakeRunner) -> Iterator[HostPoolView]:
    """A host pool whose page 0 has one wrong bit."""
    with host_pool(2, runner.geometry, "a") as host:
        host.pages[0, 0, 0] ^= 1
        yield host


@pytest.mark.parametrize("mover", ["auto", "per_page", "batched"])
@pytest.mark.parametrize(("verify", "failures"), [("always", 1), ("sampled", 1), ("never", 0)])
def test_loads_are_verified_as_configured(
    runner: FakeRunner, flipped: HostPoolView, mover: str, verify: str, failures: int
) -> None:
    """By every mover: a flipped bit passes where nobody looks, and only there."""
    config = WorkerConfig(model="unused", mover=mover, verify_host=verify, verify_host_share=1.0)  # type: ignore[arg-type]
    loads = make_loads(config, runner)  # type: ignore[arg-type]
    loads.attach("s", flipped.handle)

    result = loads.start([page_load([0], [1], ["a"])]).finish()

    assert len(result.failures) == failures
    loads.close()


def test_pages_are_stored_for_backups_by_the_kernel_alone(runner: Any) -> None:
    """Where another mover was chosen the storage copies as well as the worker would; a group's pool is in parts."""
    kernel: Any = SimpleNamespace(name="gpu_assisted")
    plain: Any = SimpleNamespace(name="batched")
    group: Any = GroupRunner.__new__(GroupRunner)

    stores = make_stores(kernel, runner)

    assert make_stores(plain, runner) is None
    assert make_stores(kernel, group) is None
    assert stores is not None
    stores.close()


def test_a_mover_that_cannot_serve_here_ends_the_start(runner: FakeRunner) -> None:
    """With the setting in the message."""
    with pytest.raises(ConfigError, match="--mover gpu_assisted"):
        make_loads(WorkerConfig(model="unused", mover="gpu_assisted"), runner)  # type: ignore[arg-type]


async def test_parts_of_prefixes_are_read_where_there_is_memory_for_it(runner: FakeRunner) -> None:
    """Too little for one token is said when the worker starts; memory is taken when it is needed."""
    bus = MemoryBroker().connect("worker")

    def made(nbytes: int, obstacle: str = "") -> DiskReads | None:
        config = WorkerConfig(model="unused", sparse_buffer_bytes=nbytes)
        return make_disk_reads(config, runner, bus, obstacle)  # type: ignore[arg-type]

    reads = made(1024 * 1024)
    assert reads is not None
    assert reads.slot_bytes == 65_536
    await reads.close()
    assert made(1024 * 1024, "the model cannot") is None
    with pytest.raises(ConfigError, match="slots"):
        made(1023)


@pytest.mark.parametrize(("obstacle", "tokens"), [("", 5), ("rows change one another", 0)])
def test_proposals_are_off_where_something_stands_in_the_way(
    runner: FakeRunner, capsys: pytest.CaptureFixture[str], obstacle: str, tokens: int
) -> None:
    """What a runner names as an obstacle counts more than the setting, and is said."""
    runner.lookup_obstacle = obstacle
    config = WorkerConfig(model="unused", prompt_lookup_tokens=5)

    assert proposal_tokens(config, runner) == tokens  # type: ignore[arg-type]
    assert capsys.readouterr().out.count(f"reason={obstacle!r}") == (obstacle != "")
