"""Recordings of real runs fold to the recorded outputs, byte for byte, whole or from any snapshot in between.

``python -m tests.replay.make_recordings`` made them. Where one of these tests fails after a change of the core on
purpose, look at what ``thermocline replay FILE`` says of the first difference, and make the recordings anew.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from services.scheduler import core
from services.scheduler.fold import Fold, load_state
from services.scheduler.recording import InputFrame, read_frames
from services.scheduler.replay import replay
from shared.codec import encode

RECORDINGS = sorted((Path(__file__).parent / "recordings").glob("*.tcrec"))

# What each run must have met, so that a recording which no longer shows its subject is noticed.
SUBJECTS = {
    "shared-documents": ("hit_tokens_device", "hit_tokens_host", "loads_started", "backups_done"),
    "multi-turn-chat": ("hit_tokens_device",),
    "cancellations": ("finished_cancelled",),
    "memory-pressure": ("preemptions", "evicted_pages_device", "evicted_pages_host"),
    "admin-calls": ("flushed_pages_device", "flushed_pages_host", "unknown_policies"),
    "disk": ("saved_chunks", "fetches_done", "hit_tokens_disk", "pins_set", "copied_ahead_pages"),
    "neighbours": ("neighbour_loads_started", "hit_tokens_neighbour"),
    "burst": ("requests_deferred", "hit_tokens_device"),
    "promotion": ("promotions_started", "promoted_pages"),
    "worker-loss": ("workers_lost", "hit_tokens_device"),
}


def name_of(path: Path) -> str:
    """The scenario that a file holds."""
    return path.stem


@pytest.mark.parametrize("path", RECORDINGS, ids=name_of)
def test_a_real_run_replays_to_the_byte(path: Path) -> None:
    """Every output of the run comes out again, and nothing of it is missing or new."""
    report = replay(path)

    assert report.difference is None, str(report.difference)
    assert report.outputs > 0
    assert report.unrecorded == 0


@pytest.mark.parametrize("path", RECORDINGS, ids=name_of)
def test_a_recording_shows_what_it_is_named_for(path: Path) -> None:
    """The run met what its scenario is about."""
    counters = replay(path).counters

    assert [name for name in SUBJECTS[path.stem] if not counters.get(name)] == []


def test_every_scenario_is_recorded() -> None:
    """All kinds of runs are there."""
    assert {path.stem for path in RECORDINGS} == set(SUBJECTS)


@pytest.mark.parametrize("path", RECORDINGS, ids=name_of)
def test_a_snapshot_and_the_tail_equal_the_whole(path: Path) -> None:
    """Wherever the fold is stopped and restored, the outputs behind the cut and the last state are the same."""
    frames = [frame for frame in read_frames(path) if isinstance(frame, InputFrame)]
    whole = Fold(core.new_state())
    expected, snapshots = [], {}
    cuts = range(1, len(frames), max(1, len(frames) // 6))
    for number, frame in enumerate(frames):
        if number in cuts:
            snapshots[number] = (core.encode_state(whole.state), whole.position, whole.time_ns)
        expected.append([encode(one) for one in whole.apply(frame.message()).published])
        if number % 16 == 0:
            core.check_invariants(whole.state)
    end = core.encode_state(whole.state)

    for cut, (state, position, time_ns) in snapshots.items():
        fold = Fold(load_state(state), position=position, time_ns=time_ns)
        outputs = [[encode(one) for one in fold.apply(frame.message()).published] for frame in frames[cut:]]

        assert outputs == expected[cut:]
        assert core.encode_state(fold.state) == end
