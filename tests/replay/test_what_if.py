"""What a recorded run would have been under other settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shared.errors import RecordingError
from thermocline.replay.__main__ import EXIT_BAD, EXIT_OK, main
from thermocline.replay.recorded_run import read_run
from thermocline.replay.what_if import what_if

RECORDINGS = Path(__file__).parent / "recordings"
DOCUMENTS = RECORDINGS / "shared-documents.tcrec"


def test_a_run_is_read_from_its_recording() -> None:
    """Requests with their times and answers, the cell's pools, and what the workers reported."""
    run = read_run(DOCUMENTS)

    assert len(run.played) == len(run.requests) == 24
    assert run.device_pages == {"worker-0": 64}
    assert run.host_pages > 0
    assert run.geometry.page_size == 16
    assert all(request.first_token_ns > request.at_ns for request in run.played)
    assert sum(batch.computed_tokens for batch in run.batches) > 0


def test_the_recorded_settings_give_about_the_recorded_hits() -> None:
    """The simulated baseline reuses what the real run reused, to a tenth of the prompt tokens."""
    answer = what_if(DOCUMENTS, {})

    assert answer.baseline == answer.changed_figures
    assert answer.baseline["input tokens"] == answer.recorded["input tokens"]
    for figures in (answer.recorded, answer.baseline):
        assert figures["hit tokens, device"] + figures["hit tokens, host"] > 0
    hits = [
        figures["hit tokens, device"] + figures["hit tokens, host"] for figures in (answer.recorded, answer.baseline)
    ]
    assert abs(hits[0] - hits[1]) < 0.1 * answer.recorded["input tokens"]


def test_a_changed_setting_changes_the_figures() -> None:
    """Without a host tier nothing is hit there, and less in all."""
    without_host = what_if(DOCUMENTS, {"host_tier": False})

    assert without_host.baseline["hit tokens, host"] > 0
    assert without_host.changed_figures["hit tokens, host"] == 0
    # What is not found anywhere is computed, at some cost.
    assert without_host.changed_figures["hit tokens, device"] < sum(
        without_host.baseline[name] for name in ("hit tokens, device", "hit tokens, host")
    )


def test_the_command_shows_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Both name the recorded and the simulated figures."""
    assert main([str(DOCUMENTS), "--policy", "fifo"]) == EXIT_OK
    table = capsys.readouterr().out
    assert main([str(DOCUMENTS), "--set", "max_batch_tokens=32", "--json"]) == EXIT_OK
    answer = json.loads(capsys.readouterr().out)

    assert "hit tokens, host" in table
    assert "policy=fifo" in table
    assert answer["changed"] == {"max_batch_tokens": 32}
    assert answer["requests"] == 24


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "nonsense"], "nonsense"),
        (["--set", "no_such_setting=1"], "no_such_setting"),
        (["--set", "max_batch_tokens=many"], "max_batch_tokens"),
        (["--set", "eviction_expression=clock ^ 2"], "eviction_expression"),
    ],
)
def test_settings_without_sense_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and a line that names the setting."""
    assert main([str(DOCUMENTS), *arguments]) == EXIT_BAD
    assert words in capsys.readouterr().err


def test_a_damaged_recording_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither a torn nor a tampered file gives figures."""
    torn = tmp_path / "torn.tcrec"
    torn.write_bytes(DOCUMENTS.read_bytes()[:-20])

    with pytest.raises(RecordingError, match="truncated"):
        what_if(torn, {})
    assert main([str(torn), "--policy", "lru"]) == EXIT_BAD
    assert "truncated" in capsys.readouterr().err
