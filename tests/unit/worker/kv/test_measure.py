"""The measurement measures loads that are right, and prints what workers read."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from services.worker.kv import measure
from services.worker.kv.measured_loads import load_scene, medians
from services.worker.kv.movers.batched import BatchedMover
from services.worker.kv.profile import Profile
from shared.memory.segment import SHM_DIRECTORY
from shared.messages.pools import KvGeometry
from tests.run_name import shm_prefix

PREFIX = shm_prefix("measure")


GEOMETRY = KvGeometry(layers=2, kv_heads=1, head_dim=32, page_size=4, dtype="float32")


def test_what_is_timed_is_a_whole_load() -> None:
    """Every page of the scene arrives in every layer, checked; and nothing is left in /dev/shm."""
    with load_scene(GEOMETRY, 64, device="cpu", shm_prefix=PREFIX) as scene:
        scene.load(BatchedMover(scene.device), verified=True)

        halves = scene.device.bytes_view()
        for page, device_page in zip(scene.pages, scene.device_pages, strict=True):
            expected = scene.host.view.pages[page].reshape(2, 2, -1)
            np.testing.assert_array_equal(halves[:, :, device_page], expected)
    assert not list(SHM_DIRECTORY.glob(f"{PREFIX}.*"))


def test_rounds_take_turns_and_the_first_does_not_count() -> None:
    """Each work runs once more than there are rounds."""
    order: list[str] = []

    found = medians({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2)

    assert order == ["a", "b"] * 3
    assert set(found) == {"a", "b"}


def test_it_prints_a_profile(capsys: pytest.CaptureFixture[str]) -> None:
    """One figure for each mover, page size and transfer size."""
    geometry = msgspec.json.encode(GEOMETRY).decode()
    arguments = ["--geometry", geometry, "--tokens", "64", "--small-tokens", "16", "--page-sizes", "1,4"]

    code = measure.main([*arguments, "--rounds", "1"])

    profile = msgspec.json.decode(capsys.readouterr().out, type=Profile)
    assert code == 0
    assert [(each.mover, each.page_size) for each in profile.movers] == [
        *[("batched", 1), ("per_page", 1)] * 2,
        *[("batched", 4), ("per_page", 4)] * 2,
    ]
    assert all(each.bytes_per_s > 0 and each.verified_bytes_per_s > 0 for each in profile.movers)
    assert min(profile.memcpy_bytes_per_s, profile.checksum_bytes_per_s, profile.matmul_flops_per_s) > 0


def test_what_cannot_be_measured_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Fewer tokens than a page: exit code 1 and a reason."""
    code = measure.main(["--geometry", msgspec.json.encode(GEOMETRY).decode(), "--tokens", "2", "--page-sizes", "4"])

    assert code == 1
    assert "do not fill a page" in capsys.readouterr().err
