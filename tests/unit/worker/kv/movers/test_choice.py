"""A worker takes the mover that it is told to, or that was measured here, or the safe one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import structlog
import torch

from services.worker.kv.device_pool import DevicePool
from services.worker.kv.movers import choice
from services.worker.kv.movers.choice import DEFAULT_PROGRAMS, choose_mover, machine_here
from services.worker.kv.profile import (
    Machine,
    MoverFigure,
    Profile,
    default_path,
    read_profile,
    this_machine,
    write_profile,
)
from shared.errors import ConfigError
from shared.messages.pools import KvGeometry
from tests.unit.worker.pools import SHM_PREFIX

GEOMETRY = KvGeometry(layers=2, kv_heads=1, head_dim=4, page_size=16, dtype="float32")


def figure(mover: str, page_size: int, copied: float, verified: float, **fields: Any) -> MoverFigure:
    given = {"device": "cpu", "dtype": "float32", "transfer_bytes": 100, **fields}
    return MoverFigure(mover=mover, page_size=page_size, bytes_per_s=copied, verified_bytes_per_s=verified, **given)  # type: ignore[arg-type]


def profile(*figures: MoverFigure, machine: Machine | None = None) -> Profile:
    return Profile(
        made="2026-01-01",
        machine=machine or machine_here(),
        software={},
        geometry=GEOMETRY,
        tokens=512,
        memcpy_bytes_per_s=1e9,
        checksum_bytes_per_s=1e9,
        matmul_flops_per_s=1e9,
        movers=figures,
    )


@pytest.fixture
def pool() -> Iterator[DevicePool]:
    made = DevicePool.create(GEOMETRY, 4, device="cpu", shm_prefix=SHM_PREFIX)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No profile of this machine's user is read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def choose(pool: DevicePool, name: str = "auto", path: Path | str = "") -> str:
    return choose_mover(pool, name, programs=0, profile=str(path), verified=True).name


def test_without_a_profile_the_safe_default_is_taken(pool: DevicePool) -> None:
    """Nothing was measured, so nothing is assumed."""
    assert choose(pool) == "batched"


@pytest.mark.parametrize(("device", "default", "chosen"), [
    ("cpu", None, "batched"), ("cuda", None, "gpu_assisted"), ("cuda", "batched", "batched"),
])  # fmt: skip
def test_the_default_is_that_of_the_device(
    device: str, default: Any, chosen: str, pool: DevicePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or of the caller, who may know that its pages are never pinned."""
    monkeypatch.setattr(choice, "make_mover", lambda _, name, **options: f"{name} {options['programs']}")
    seen: Any = SimpleNamespace(device=torch.device(device), geometry=GEOMETRY)

    made: Any = choose_mover(seen, "auto", programs=0, profile="", verified=True, default=default)

    assert made == f"{chosen} {DEFAULT_PROGRAMS}"


def test_the_fastest_of_this_machine_is_taken(pool: DevicePool, tmp_path: Path) -> None:
    """From the file that is named, or from where the doctor puts it."""
    measured = profile(figure("batched", 16, 9.0, 2.0), figure("per_page", 16, 1.0, 3.0))
    write_profile(measured, tmp_path / "p.json")
    assert choose(pool, path=tmp_path / "p.json") == "per_page"

    assert choose(pool) == "batched"
    write_profile(measured, default_path())
    assert choose(pool) == "per_page"
    assert choose(pool, "batched") == "batched"


def test_another_machines_profile_is_refused_with_a_clear_line(pool: DevicePool, tmp_path: Path) -> None:
    """The log says what differs, and the safe default serves."""
    elsewhere = msgspec.structs.replace(machine_here(), cores=999)
    write_profile(profile(figure("per_page", 16, 9.0, 9.0), machine=elsewhere), tmp_path / "p.json")

    with structlog.testing.capture_logs() as lines:
        chosen = choose(pool, path=tmp_path / "p.json")

    assert chosen == "batched"
    (refused,) = [line for line in lines if line["event"] == "profile_refused"]
    assert refused["log_level"] == "warning"
    assert "made on another machine: cores 999 is" in refused["reason"]


@pytest.mark.parametrize("content", [b"", b"{}", b"not json", b'{"version": 9}'])
def test_a_file_that_is_no_profile_is_refused(pool: DevicePool, tmp_path: Path, content: bytes) -> None:
    """Never a reason not to start."""
    (tmp_path / "p.json").write_bytes(content)

    assert choose(pool, path=tmp_path / "p.json") == "batched"
    with pytest.raises(ConfigError):
        read_profile(tmp_path / "p.json", this_machine())


def test_a_missing_or_older_profile_is_refused(tmp_path: Path) -> None:
    """With the path, or the version, in the message."""
    with pytest.raises(ConfigError, match=r"gone\.json"):
        read_profile(tmp_path / "gone.json", this_machine())
    write_profile(msgspec.structs.replace(profile(), version=0), tmp_path / "p.json")
    with pytest.raises(ConfigError, match="version 0"):
        read_profile(tmp_path / "p.json", machine_here())


def test_the_nearest_page_size_and_the_largest_transfer_decide() -> None:
    """Figures of other devices do not count, and verification decides which speed does."""
    measured = profile(
        figure("batched", 1, 1.0, 1.0),
        figure("per_page", 32, 5.0, 9.0, transfer_bytes=10),
        figure("per_page", 32, 9.0, 1.0),
        figure("batched", 32, 2.0, 2.0),
        figure("gpu_assisted", 32, 99.0, 99.0, device="cuda", programs=4),
    )

    def best(device: str, page_size: int, *, verified: bool) -> str:
        found = measured.fastest(device, page_size, verified=verified)
        return "" if found is None else f"{found.mover} {found.programs}"

    assert best("cpu", 2, verified=True) == "batched 0"
    assert best("cpu", 64, verified=True) == "batched 0"
    assert best("cpu", 64, verified=False) == "per_page 0"
    assert best("cuda", 16, verified=True) == "gpu_assisted 4"
    assert best("rocm", 16, verified=True) == ""
