"""Deleting behind everybody's back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

from structlog.testing import capture_logs

from services.storage.backends import ChunkKey
from services.storage.removals import Removals
from shared.errors import TransportError


def _key(number: int) -> ChunkKey:
    return ChunkKey("aa" * 16, b"g" * 8, number.to_bytes(16, "big"))


class _Files:
    """Notes what is deleted; waits for a gate."""

    def __init__(self) -> None:
        self.deleted: list[ChunkKey] = []
        self.quarantined: list[ChunkKey] = []
        self.entered, self.gate = threading.Event(), threading.Event()
        self.gate.set()

    def delete(self, key: ChunkKey) -> None:
        self.entered.set()
        assert self.gate.wait(20.0)
        if key == _key(13):
            raise TransportError("broken")
        self.deleted.append(key)

    def deleting(
        self, set_aside: Callable[[ChunkKey], None]
    ) -> Callable[[dict[ChunkKey, bool]], Awaitable[dict[ChunkKey, str]]]:
        def all_of(batch: dict[ChunkKey, bool]) -> dict[ChunkKey, str]:
            failed = {}
            for key, is_bad in batch.items():
                try:
                    (set_aside if is_bad else self.delete)(key)
                except TransportError as error:
                    failed[key] = error.message
            return failed

        return lambda batch: asyncio.to_thread(all_of, batch)


async def test_what_stands_in_line_is_deleted_before_the_end() -> None:
    """Stopping empties the line first; a file that cannot be deleted does not stop the others."""
    files = _Files()
    removals = Removals(files.deleting(files.quarantined.append))
    await removals.add([_key(1), _key(13), _key(2)])
    removals.add_bad(_key(3))
    removals.stop()
    await removals.run()

    assert files.deleted == [_key(1), _key(2)]
    assert files.quarantined == [_key(3)]
    assert len(removals) == 0


async def test_who_writes_waits_when_the_line_is_full() -> None:
    """The line is bounded; it goes on when there is room."""
    files = _Files()
    files.gate.clear()
    removals = Removals(files.deleting(files.delete), most=2)
    running = asyncio.create_task(removals.run())
    adding = asyncio.create_task(removals.add([_key(number) for number in range(5)]))
    await asyncio.to_thread(files.entered.wait, 20.0)
    await asyncio.sleep(0)
    was_waiting = not adding.done() and len(removals) <= 2
    files.gate.set()
    await adding
    await removals.drained()
    removals.stop()
    await running

    assert was_waiting
    assert files.deleted == [_key(number) for number in range(5)]


async def test_a_chunk_that_is_wanted_again_is_taken_out_of_the_line() -> None:
    """Its file stays if deleting it had not begun; else, or if it is bad, whoever wants it waits until it is gone."""
    files = _Files()
    removals = Removals(files.deleting(files.quarantined.append))
    await removals.add([_key(1)])
    await removals.settle(_key(1))
    removals.add_bad(_key(2))
    settling = asyncio.create_task(removals.settle(_key(2)))
    await asyncio.sleep(0)
    was_waiting = not settling.done()
    running = asyncio.create_task(removals.run())
    await settling
    removals.stop()
    await running

    assert was_waiting
    assert files.deleted == []
    assert files.quarantined == [_key(2)]


async def test_a_deletion_that_runs_is_waited_for() -> None:
    """A chunk is not written while its old file is being deleted."""
    files = _Files()
    files.gate.clear()
    removals = Removals(files.deleting(files.delete))
    running = asyncio.create_task(removals.run())
    await removals.add([_key(1)])
    await asyncio.to_thread(files.entered.wait, 20.0)
    settling = asyncio.create_task(removals.settle(_key(1)))
    await asyncio.sleep(0)
    was_waiting = not settling.done()
    files.gate.set()
    await settling
    removals.stop()
    await running

    assert was_waiting
    assert files.deleted == [_key(1)]


async def test_a_file_that_cannot_be_deleted_is_logged_once_until_it_is_gone() -> None:
    """It is tried every few seconds for as long as a file system is read-only."""
    failing = {_key(1): "read-only", _key(2): "read-only"}

    async def delete(batch: dict[ChunkKey, bool]) -> dict[ChunkKey, str]:
        return {key: failing[key] for key in batch if key in failing}

    removals = Removals(delete)
    running = asyncio.create_task(removals.run())

    async def told(*numbers: int) -> list[int]:
        with capture_logs() as logs:
            await removals.add(_key(number) for number in numbers)
            await removals.drained()
        return [log["chunks"] for log in logs]

    first, again, more = await told(1), await told(1), await told(1, 2)
    was_failing = failing.copy()
    failing.clear()
    gone = await told(1, 2)
    failing |= was_failing
    anew = await told(1)
    removals.stop()
    await running

    assert (first, again, more, gone, anew) == ([1], [], [1], [], [1])
