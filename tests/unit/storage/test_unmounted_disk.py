"""A directory whose file system is unmounted while a storage runs: what is below is neither filled nor trusted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chunk_makers import make_chain
from tests.disk_node import Node, running
from tests.mountable_disks import KINDS, Disk, PretendedDisk, opened_disk

QUOTA = 2**20


@pytest.fixture(params=KINDS)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    with opened_disk(request.param, tmp_path) as made:
        yield made


async def left_and_taken(node: Node) -> None:
    """One look leaves the directory out, one reports its chunks, and one tries it again."""
    for _ in range(3):
        await node.watch.look()


@pytest.mark.parametrize("is_idle", [True, False])
async def test_nothing_is_written_below_a_mount_point(disk: Disk, *, is_idle: bool) -> None:
    """The directory is left out, whether or not it is used meanwhile, and comes back whole with its file system."""
    chain, more = make_chain(4, seed=1), make_chain(4, seed=2)
    async with running([disk.path], QUOTA, disk.calls) as node:
        await node.save(chain)
        disk.unmount()
        saved = [] if is_idle else await node.save(more)
        was_read = [] if is_idle else [await node.can_read(chunk) for chunk in chain]
        first, below = list(node.watch.faults()), os.listdir(disk.path)
        await left_and_taken(node)
        faults, below_later = list(node.watch.faults()), os.listdir(disk.path)
        disk.mount()
        await node.watch.look()

        assert "stored" not in saved
        assert not any(was_read)
        assert bool(first) is not is_idle
        assert (below, below_later) == ([], [])
        assert [(what, setting) for what, _, setting in faults] == [("disk", "--disk-dir")]
        assert "is not mounted" in faults[0][1]
        assert list(node.watch.faults()) == []
        assert node.usable(chain) == (4, 4)
        assert await node.can_read(chain[3])


async def test_what_an_earlier_start_left_below_a_mount_point_is_not_used(disk: Disk) -> None:
    """A storage that once started before the mount made its directories there, in which files could be written."""
    chain, more = make_chain(4, seed=1), make_chain(4, seed=2)
    disk.unmount()
    async with running([disk.path], QUOTA, disk.calls) as node:
        await node.save(make_chain(1, seed=3))
    disk.mount()
    async with running([disk.path], QUOTA, disk.calls) as node:
        await node.save(chain)
        disk.unmount()
        saved = await node.save(more)
        was_read = await node.can_read(chain[0])
        files = list(Path(disk.path).rglob("*.chunk"))
        disk.mount()
        await left_and_taken(node)

        assert "stored" not in saved
        assert (was_read, len(files)) == (False, 1)
        assert node.usable(chain) == (4, 4)


async def test_another_disk_in_the_place_of_one_is_used(tmp_path: Path) -> None:
    """It was broken, and is replaced by an empty one."""
    disk = PretendedDisk(tmp_path)
    async with running([disk.path], QUOTA, disk) as node:
        await node.save(make_chain(4, seed=1))
        disk.unmount()
        other = tmp_path / "other"
        other.mkdir()
        (other / "disk").write_text("8")
        disk.mount(other)
        await left_and_taken(node)

        assert list(node.watch.faults()) == []
        assert await node.save(make_chain(1, seed=2)) == ["stored"]


@pytest.mark.parametrize("part", ["", "writing", "chunks"])
async def test_a_directory_that_was_emptied_is_used_anew(paths: list[str], part: str) -> None:
    """Its chunks are gone, and it is made again as far as it lacks something."""
    chain = make_chain(4, seed=1)
    async with running(paths[:1], QUOTA) as node:
        await node.save(chain)
        shutil.rmtree(Path(paths[0], part))
        Path(paths[0]).mkdir(exist_ok=True)
        await left_and_taken(node)

        assert list(node.watch.faults()) == []
        assert await node.save(make_chain(1, seed=2)) == ["stored"]
        assert node.usable(chain) == ((4, 4) if part == "writing" else (0, 0))
