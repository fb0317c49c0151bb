"""After filling, restarts, damage and directories that went and came, what is left of old chunks can be used."""

from __future__ import annotations

from pathlib import Path

from tests.disk_soak import LEAST_USABLE, QUOTA, Soak


async def test_what_survives_can_be_used(tmp_path: Path) -> None:
    """Each kind of fault was met, the disk is full, and at least 95% of its old chunks have all that they continue."""
    outcome = await Soak(tmp_path, seed=1).run(rounds=24)

    assert outcome.used == QUOTA
    assert outcome.events.keys() >= {"dead", "damaged", "unreadable", "restarts"}
    assert outcome.old > outcome.chunks // 2
    assert outcome.old_usable >= LEAST_USABLE * outcome.old
    assert outcome.usable >= LEAST_USABLE * outcome.chunks
