"""The queue of transfers: bounded, in order, each ends once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.storage.core.backup_check import Transfer
from services.storage.core.transfer_queue import TransferQueue
from shared.errors import InvariantViolated, QueueFull


def _transfer(number: int, worker: str = "w0") -> Transfer:
    page = np.array([number], dtype=np.int32)
    return Transfer(number, worker, "i0", page, page, (bytes([number % 255 + 1]) * 16,))


def test_transfers_start_in_order_of_arrival() -> None:
    """The one that waits longest starts first; an empty queue starts none."""
    queue = TransferQueue(4)
    for number in (7, 3, 5):
        queue.add(_transfer(number))

    started = [queue.start() for _ in range(4)]

    assert [transfer and transfer.transfer_id for transfer in started] == [7, 3, 5, None]
    assert len(queue) == 3
    assert queue.waiting == 0


def test_running_transfers_count_against_the_bound() -> None:
    """One more than the bound is refused until one has ended."""
    queue = TransferQueue(2)
    queue.add(_transfer(1))
    queue.add(_transfer(2))
    queue.start()

    with pytest.raises(QueueFull):
        queue.add(_transfer(3))
    queue.finish(1)
    assert queue.add(_transfer(3))


def test_a_repeated_transfer_is_answered_once() -> None:
    """While a transfer has not ended, its id is not queued again; afterwards it may be."""
    queue = TransferQueue(4)
    queue.add(_transfer(1))

    assert not queue.add(_transfer(1))
    queue.start()
    assert not queue.add(_transfer(1))
    queue.finish(1)
    assert queue.add(_transfer(1))


def test_revoking_fails_what_waits_and_dooms_what_runs() -> None:
    """Of the worker's transfers the waiting fail at once, the running when they end; others go on."""
    queue = TransferQueue(8)
    for number, worker in ((1, "w0"), (2, "w0"), (3, "w1"), (4, "w0")):
        queue.add(_transfer(number, worker))
    queue.start()

    ended = queue.revoke("w0", "detached")

    assert [(end.transfer.transfer_id, end.reason) for end in ended] == [(2, "detached"), (4, "detached")]
    doomed = queue.finish(1)
    assert (doomed.ok, doomed.reason) == (False, "detached")
    assert queue.revoke("w0", "detached") == []
    following = queue.start()
    assert following is not None
    assert following.transfer_id == 3
    assert queue.finish(3).ok


def test_revoking_twice_under_a_copy_is_harmless() -> None:
    """A second revocation leaves a doomed copy to end as it would."""
    queue = TransferQueue(2)
    queue.add(_transfer(1))
    queue.start()
    queue.revoke("w0", "first")

    assert queue.revoke("w0", "second") == []
    assert queue.finish(1, "raised").reason == "first"
    assert len(queue) == 0


def test_stopping_leaves_running_copies_alone() -> None:
    """revoke_waiting fails only what has not started."""
    queue = TransferQueue(4)
    queue.add(_transfer(1))
    queue.add(_transfer(2))
    queue.start()

    ended = queue.revoke_waiting("stopping")

    assert [end.transfer.transfer_id for end in ended] == [2]
    assert queue.finish(1).ok


def test_an_end_without_a_copy_is_an_invariant_violation() -> None:
    """Finishing what is unknown is our fault, loudly."""
    with pytest.raises(InvariantViolated):
        TransferQueue(1).finish(9)


@given(st.lists(st.tuples(st.sampled_from(["add", "start", "finish", "raise", "revoke", "stop"]), st.integers(0, 5))))
def test_whatever_happens_each_added_transfer_ends_once(steps: list[tuple[str, int]]) -> None:
    """Over any history: added = ended + outstanding, nothing ends twice, and the bound holds."""
    queue, running = TransferQueue(3), []
    added: list[int] = []
    ended: list[int] = []
    for step, number in steps:
        if step == "add" and number not in set(added) and len(queue) < 3:
            queue.add(_transfer(number, f"w{number % 2}"))
            added.append(number)
        elif step == "start" and (transfer := queue.start()) is not None:
            running.append(transfer.transfer_id)
        elif step in ("finish", "raise") and running:
            chosen = running.pop(number % len(running))
            end = queue.finish(chosen, "broken" if step == "raise" else "")
            ended.append(end.transfer.transfer_id)
        elif step == "revoke":
            ended += [end.transfer.transfer_id for end in queue.revoke(f"w{number % 2}", "gone")]
        elif step == "stop":
            ended += [end.transfer.transfer_id for end in queue.revoke_waiting("stop")]

        assert len(queue) <= 3
        assert len(queue) == len(running) + queue.waiting

    assert len(ended) == len(set(ended))
    assert len(added) == len(ended) + len(queue)
