"""A worker tells what it was asked for and lacks (services/worker/shortfalls.py)."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from services.worker.kv.host_pools import HostPools
from services.worker.proving.table import ProofTable
from services.worker.shortfalls import profile_fault, shortfalls
from services.worker.step_rows import StepRows
from shared import library_versions
from shared.messages.status import Degradation
from tests.unit.worker.pools import GEOMETRY, host_pool


def test_a_pool_that_is_not_there_is_told_until_it_goes() -> None:
    """Its storage died before this worker mapped it; what takes its place is mapped, and nothing is lacking."""
    pools = HostPools(GEOMETRY)
    with host_pool(4) as gone:
        pass
    pools.attach("s", gone.handle)
    found = list(shortfalls("worker-0", pools, "", {}, StepRows(), ProofTable()))
    with host_pool(4) as there:
        pools.attach("s", there.handle)
        later = list(shortfalls("worker-0", pools, "", {}, StepRows(), ProofTable()))
        pools.close()

    assert [(each.component, each.what, each.setting) for each in found] == [
        ("worker-0", "host pool", "--host-kv-bytes")
    ]
    assert found[0].reason.startswith("that of s is not mapped: ")
    assert later == []


def test_a_library_that_was_never_tried_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer PyTorch is served with, and the cell says so."""
    monkeypatch.setattr(library_versions, "untried", lambda: iter(["torch 9.9 was never tried"]))

    assert list(shortfalls("worker-0", HostPools(GEOMETRY), "", {}, StepRows(), ProofTable())) == [
        Degradation(component="worker-0", what="libraries", reason="torch 9.9 was never tried")
    ]


def test_a_named_profile_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    """One that none has named is not."""
    faulty = tmp_path / "profile.json"
    faulty.write_bytes(msgspec.json.encode({"version": "of another program"}))
    reason = profile_fault(str(faulty))

    assert str(faulty) in reason
    assert list(shortfalls("w", HostPools(GEOMETRY), reason, {}, StepRows(), ProofTable())) == [
        Degradation(component="w", what="profile", reason=reason, setting="--profile")
    ]
    assert profile_fault("") == ""


def test_kernels_that_could_not_be_compiled_are_told() -> None:
    """One entry for each reason, with all that it keeps from being native."""
    missing = {"decode": "no compiler", "fused": "other fault", "page_rows": "no compiler"}

    found = list(shortfalls("w", HostPools(GEOMETRY), "", missing, StepRows(), ProofTable()))

    assert [(each.what, each.reason) for each in found] == [
        ("native code", "portable paths replace decode, page_rows: no compiler"),
        ("native code", "portable paths replace fused: other fault"),
    ]
