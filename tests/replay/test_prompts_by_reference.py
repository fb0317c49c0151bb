"""Recordings of requests that refer to fronts of prompts: they replay, and other settings see whole prompts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.scheduler.core import new_state
from services.scheduler.fold import Fold
from services.scheduler.recording import Header
from services.scheduler.replay import replay
from services.scheduler.snapshots import encode_snapshot, take_snapshot
from shared.bus.protocol import StreamMessage
from shared.codec import encode
from shared.messages.cell_events import CellConfig, FlushCache
from tests.recording_files import writing
from tests.small_blocks import small_blocks
from tests.stateful.cell_model import CellModel
from thermocline.replay.recorded_run import read_run

PROMPT = list(range(1, 41))


@pytest.fixture(autouse=True)
def blocks() -> Iterator[None]:
    """Blocks of 16 tokens."""
    with small_blocks(16):
        yield


@pytest.fixture(params=[False, True], ids=["plain", "compact"])
def cell(request: pytest.FixtureRequest) -> CellModel:
    """A cell that was asked five times, of which once for what had gone and twice by what an answer ended with."""
    made = CellModel(CellConfig())
    made.takes_compact = request.param
    made.add_worker("worker-0", pages=64)
    made.serve(PROMPT, max_tokens=12, ignore_eos=True)
    history = PROMPT + made.gateways["gateway"].tokens["request-1"]
    made.serve([*history, 5], base_tokens=48)
    made.submit([*history, 5, 6], base_tokens=48)
    made.feed(FlushCache(call_id="all"))
    made.drain()
    made.feed(FlushCache(call_id="again"))
    made.serve([*history, 5, 6, 7], base_tokens=48)
    made.serve([*history, 5, 6, 7, 8], base_tokens=48)
    return made


def record(cell: CellModel, path: Path, first: int) -> None:
    """Write a recording of what the cell folded from input ``first`` on."""
    fold = Fold(new_state())
    messages = [StreamMessage(each.seq, each.time_ns, "tc.in.cell", encode(each.input)) for each in cell.log]
    for message in messages[: first - 1]:
        fold.apply(message)
    with writing(path, Header(first_seq=first)) as writer:
        if first > 1:
            writer.write_snapshot(encode_snapshot(take_snapshot(fold)))
        for message in messages[first - 1 :]:
            writer.write_input(message)
            for output in fold.apply(message).published:
                writer.write_output(encode(output))


def test_every_part_replays_and_has_whole_prompts(cell: CellModel, tmp_path: Path) -> None:
    """From the start, and from a snapshot before any input: what it holds is what bases refer to."""
    path = tmp_path / "a.tcrec"
    assert cell.state.counters["bases_resolved"] == 3
    assert cell.state.counters["prompts_wanted"] == 1

    last = max(each.seq for each in cell.log if type(each.input).__name__ == "SubmitRequest")
    for first in range(1, last + 1):
        record(cell, path, first)
        assert replay(path).difference is None
        run = read_run(path)
        for request_id, request in run.requests.items():
            assert request.submit == cell.submitted[request_id]
        assert list(run.requests) == list(cell.submitted)[-len(run.requests) :]
