"""Workers' memory as storage maps it: bounded, and let go of when its owner has removed it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.storage import lent_buffers
from services.storage.lent_buffers import LentBuffers
from shared.errors import TransportError
from shared.memory import SharedSegment
from shared.messages.sparse_reads import BUFFER_KIND


def is_mapped(name: str) -> bool:
    return name in Path("/proc/self/maps").read_text(encoding="utf-8")


async def test_a_mapping_serves_all_calls(shm_prefix: str) -> None:
    """Both sides see the same bytes, and a segment is mapped once."""
    segment = SharedSegment.create(shm_prefix, BUFFER_KIND, 4096)
    buffers = LentBuffers(shm_prefix)

    (await buffers.memory(segment.name, 10, 5))[:] = b"hello"
    (await buffers.memory(segment.name, 0, 4))[:] = b"dear"

    assert segment.array[:15].tobytes() == b"dear" + bytes(6) + b"hello"
    assert len(buffers) == 1
    buffers.close()


async def test_what_its_owner_removed_is_let_go_of(shm_prefix: str) -> None:
    """A view that somebody still holds stays readable; the memory goes with it."""
    kept, removed = (SharedSegment.create(shm_prefix, BUFFER_KIND, 4096) for _ in range(2))
    buffers = LentBuffers(shm_prefix)
    await buffers.memory(kept.name, 0, 1)
    view = await buffers.memory(removed.name, 0, 4)

    removed.unlink()
    removed.close()
    buffers.let_go_of_removed()
    held = is_mapped(removed.name)
    view[:] = b"last"
    value = view.tobytes()
    del view

    assert (held, value) == (True, b"last")
    assert not is_mapped(removed.name)
    assert len(buffers) == 1
    with pytest.raises(TransportError):
        await buffers.memory(removed.name, 0, 4)
    buffers.close()


async def test_no_more_are_mapped_than_allowed(shm_prefix: str) -> None:
    """The one that was used longest ago goes, and is mapped again when it is named again."""
    first, second, third = (SharedSegment.create(shm_prefix, BUFFER_KIND, 4096) for _ in range(3))
    buffers = LentBuffers(shm_prefix, mapped_most=2)
    for segment in (first, second, first, third):
        (await buffers.memory(segment.name, 0, 1))[:] = b"x"

    assert len(buffers) == 2
    (await buffers.memory(second.name, 0, 1))[:] = b"y"
    assert bytes(second.array[:1]) == b"y"
    buffers.close()
    assert len(buffers) == 0


async def test_removed_segments_are_looked_for(shm_prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without another call; and while nothing is mapped, nothing is looked for."""
    monkeypatch.setattr(lent_buffers, "LOOK_S", 0.0)
    buffers = LentBuffers(shm_prefix)
    for _ in range(2):
        segment = SharedSegment.create(shm_prefix, BUFFER_KIND, 4096)
        await buffers.memory(segment.name, 0, 1)
        mapped = len(buffers)
        segment.unlink()

        async with asyncio.timeout(20):
            while len(buffers):
                await asyncio.sleep(0)
        assert mapped == 1
    buffers.close()
