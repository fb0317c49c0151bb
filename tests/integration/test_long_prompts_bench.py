"""The bench of long prompts runs on whole cells, at a size that shows only that."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.long_prompts.__main__ import measure, parser, small

pytestmark = pytest.mark.integration


def test_every_part_gives_its_figures(tmp_path: Path) -> None:
    """Cached prompts are cached, every first token was heard, and each turn's bytes were counted."""
    options = parser().parse_args([])
    small(options)

    found = measure(options, tmp_path)

    longest = found["cached"]["1200"]["ours"]
    assert longest["cached_tokens"] > 1_000
    assert longest["parts_ms"]["accept"]["p50"] > 0
    assert found["first_seen"]["ours"]["cached_tokens"] < 100
    fixed = found["fixed"]["ours"]
    assert all(fixed[load]["delivered_known"] == fixed[load]["requests"] == 4 for load in ("idle", "busy"))
    session = found["session"]["ours"]
    assert session["tokens"] > 700
    assert session["bytes_a_turn"]["inputs"]["mean"] > 0
    assert session["stored_bytes"]["outputs"] > 0
    assert set(session["processor_s"]) >= {"scheduler", "scheduler-1", "gateway", "worker-0"}
