"""The fold as shell and replay share it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.scheduler import core
from services.scheduler.core.cache.eviction import POLICIES, Evictable, LruPolicy, Moment
from services.scheduler.core.cache.prefix_tree import Node
from services.scheduler.fold import Fold, StepFailed, load_state
from shared.bus.protocol import StreamMessage
from shared.codec import encode
from shared.errors import InternalError, TransportError
from shared.messages.cell_events import CellConfig, CellConfigured, SchedulerStarted
from tests.scripted_cell import ScriptedCell, scripted_cell, submit, worker_joined


def started(seq: int) -> StreamMessage:
    return StreamMessage(seq, seq, "tc.in.cell", encode(SchedulerStarted(scheduler_id="s", epoch=seq)))


def test_undecodable_message_is_skipped_and_counted() -> None:
    """It moves the position and nothing else."""
    fold = Fold(core.new_state())
    fold.apply(started(1))

    skipped = fold.apply(StreamMessage(2, 2, "tc.in.cell", b"\xc1"))
    after = fold.apply(started(3))

    assert skipped.input is None
    assert skipped.outputs == []
    assert skipped.fault
    assert after.input is not None
    assert (fold.position, fold.skipped, fold.state.epoch) == (3, 1, 3)


def test_gap_in_the_stream_is_an_error() -> None:
    """Folding across lost inputs would give a state that no replay can reproduce."""
    fold = Fold(core.new_state())
    fold.apply(started(1))

    with pytest.raises(TransportError, match="goes on with 3 where 2"):
        fold.apply(started(3))


def test_invariants_are_checked_every_so_many_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check runs at the sequences that the setting names."""
    checked: list[int] = []
    monkeypatch.setattr(core, "check_invariants", lambda state: checked.append(state.last_seq))
    fold = Fold(core.new_state(), check_invariants_every=3)

    for seq in range(1, 8):
        fold.apply(started(seq))

    assert checked == [3, 6]


def test_fold_goes_on_from_an_encoded_state_as_if_it_had_never_stopped() -> None:
    """Outputs behind a snapshot are the same bytes as without it, wherever it is taken."""
    cell = scripted_cell(12)
    for stop in range(5, len(cell.messages), 7):
        first = Fold(core.new_state())
        for message in cell.messages[:stop]:
            first.apply(message)
        second = Fold(load_state(core.encode_state(first.state)), position=first.position, time_ns=first.time_ns)

        outputs = [second.apply(message).published for message in cell.messages[stop:]]

        assert [list(map(encode, each)) for each in outputs] == [list(map(encode, e)) for e in cell.outputs[stop:]]


def test_garbage_is_no_state() -> None:
    """Whatever is wrong with the bytes, the error is ours, so that an older snapshot is tried."""
    with pytest.raises(InternalError):
        load_state(b"garbage")


class Restless(LruPolicy):
    """Does in ``victim`` what a test wants."""

    name = "restless"

    def victim(self, evictable: Evictable, moment: Moment) -> Node | None:
        return acts["restless"](evictable)


acts: dict[str, Callable[[Evictable], Node | None]] = {}


def leave(evictable: Evictable) -> Node | None:
    """What a careless policy may do."""
    raise SystemExit("enough")


def fail(evictable: Evictable) -> Node | None:
    raise ZeroDivisionError


def name_a_root(evictable: Evictable) -> Node | None:
    """The first node of all, which never leaves."""
    return Node(1, 0, b"")


def name_none(evictable: Evictable) -> Node | None:
    """The request that needs pages would wait for ever, without a word."""
    return None


@pytest.mark.parametrize("act", [leave, fail, name_a_root, name_none])
def test_a_policy_that_raises_is_a_fatal_input(
    act: Callable[[Evictable], Node | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it raises, and where it names what may not leave, or nothing though a node may leave.

    The input can be counted, and put in quarantine.
    """
    monkeypatch.setitem(POLICIES, Restless.name, Restless)
    monkeypatch.setitem(acts, Restless.name, act)
    cell = ScriptedCell()
    cell.put(CellConfigured(config=CellConfig(policy=Restless.name, host_tier=False)))
    cell.put(worker_joined(pages=8))
    cell.put(submit("first", [1] * 96, max_tokens=1))

    with pytest.raises(StepFailed, match=r"input \d+ \(SubmitRequest"):
        cell.put(submit("second", [2] * 96, max_tokens=1))


def test_a_policy_that_begins_anew_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """With both versions; one whose bytes are read is not."""
    cell = ScriptedCell()
    cell.put(CellConfigured(config=CellConfig(policy="lru")))
    cell.put(worker_joined())
    cell.put(submit("first", [1] * 40, max_tokens=1))
    encoded = core.encode_state(cell.fold.state)
    told: list[str] = []

    load_state(encoded, told.append)
    monkeypatch.setattr(LruPolicy, "state_version", 2)
    load_state(encoded, told.append)

    assert told == ["policy 'lru' begins anew: the snapshot has version 1 of its state, this is 2"]
