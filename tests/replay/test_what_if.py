"""What a recorded run would have been under other settings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from services.scheduler.recording import End, Header, InputFrame, OutputFrame, RecordingFrames, read_frames
from shared.codec import decode_input, decode_published, encode
from shared.errors import RecordingError
from shared.messages.storage_events import HostPoolCreated
from shared.messages.worker_plans import RestoreChunk, RunBatch, WorkerPlan
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


def with_hidden_states(path: Path) -> str:
    """Write DOCUMENTS with a hidden pool of 4,000 pages and 32 tokens restored; return the request that has them."""
    frames, written, restored = RecordingFrames(), bytearray(), ""
    for frame in read_frames(DOCUMENTS):
        match frame:
            case Header():
                written += frames.begin(frame)
            case InputFrame():
                written += frames.input(frame.message())
                made = decode_input(frame.data)
                if isinstance(made, HostPoolCreated) and made.handle is not None:
                    handle = msgspec.structs.replace(made.handle, pages=4000)
                    hidden = msgspec.structs.replace(made, handle=handle, form="state")
                    written += frames.input(replace(frame.message(), data=encode(hidden)))
            case OutputFrame():
                output = decode_published(frame.data)
                if not restored and isinstance(output, WorkerPlan) and isinstance(output.order, RunBatch):
                    restored = output.order.chunks[0].request_id
                    chunk = RestoreChunk(
                        request_id=restored,
                        attempt=1,
                        start=0,
                        end=32,
                        storage_id="s",
                        hidden_pages=b"",
                        identities=b"",
                    )
                    order = msgspec.structs.replace(output.order, restores=(chunk,))
                    output = msgspec.structs.replace(output, order=order)
                written += frames.output(encode(output))
            case End():
                written += frames.end()
    path.write_bytes(written)
    return restored


def test_hidden_states_are_hits_and_no_host_memory(tmp_path: Path) -> None:
    """The pool through which they travel caches nothing, so the simulated cell has only the recorded host memory."""
    changed = tmp_path / "hidden.tcrec"
    request_id = with_hidden_states(changed)

    run, before = read_run(changed), read_run(DOCUMENTS)

    assert run.host_pages == before.host_pages < 4000
    assert run.requests[request_id].disk_tokens == before.requests[request_id].disk_tokens + 32
    answers = [what_if(path, {}) for path in (changed, DOCUMENTS)]
    assert answers[0].baseline == answers[1].baseline
    assert answers[0].recorded["hit tokens, below host"] == answers[1].recorded["hit tokens, below host"] + 32


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "nonsense"], "nonsense"),
        (["--set", "no_such_setting=1"], "no_such_setting"),
        (["--set", "max_batch_tokens=many"], "max_batch_tokens"),
        (["--set", "eviction_expression=clock ^ 2"], "eviction_expression"),
        (["--policy", "lru", "--set", "policy=fifo"], "policy is given twice: --set policy=fifo and --policy lru"),
        (["--set", "lease_tokens=1", "--set", "lease_tokens=64"], "lease_tokens is given twice"),
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
