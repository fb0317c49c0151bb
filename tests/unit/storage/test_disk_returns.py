"""What a disk has is there again: after restarts, with unreadable chunks, with directories that go and come."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from services.storage import used_directories
from services.storage.backends.disk import DiskBackend
from services.storage.core.chunk_index import Arrival
from services.storage.disk_tier import DiskTier
from services.storage.io_threads import IoThreads
from tests.chunk_makers import aligned, make_chain
from tests.disk_node import NBYTES, Faults, running


async def test_a_full_disk_that_restarts_keeps_beginnings(paths: list[str]) -> None:
    """What has to go for newcomers is the ends of sequences, and what leads to a hot end stays: all that is left of the
    old can be used.
    """
    old = [make_chain(16, seed=seed) for seed in range(8)]
    quota = 8 * 16 * NBYTES
    async with running(paths, quota) as node:
        for chain in old:
            await node.save(chain)
        for chain in old[:3] * 9:
            node.tier.index.touch([chunk.key for chunk in chain[12:]], 12, chain[11].key, node.tier.now_s())
    async with running(paths, quota) as node:
        for seed in range(100, 105):
            assert set(await node.save(make_chain(16, seed=seed), value=2.0)) == {"stored"}
        there, usable = map(sum, zip(*(node.usable(chain) for chain in old), strict=True))

    assert (there, usable) == (3 * 16, 3 * 16)


async def test_what_was_hot_is_hot_after_a_restart(paths: list[str]) -> None:
    """Uses outlive the process: of old chunks the hot stay, and newcomers do not drive them out."""
    hot, cold = make_chain(8, seed=1), make_chain(8, seed=2)
    quota = 16 * NBYTES
    async with running(paths, quota) as node:
        await node.save(hot)
        await node.save(cold)
        for _ in range(20):
            node.tier.index.touch([chunk.key for chunk in hot], 0, None, node.tier.now_s())
    async with running(paths, quota) as node:
        for seed in range(3, 6):
            await node.save(make_chain(8, seed=seed))
        there = [node.usable(chain)[0] for chain in (hot, cold)]

    assert there == [8, 0]


async def test_heats_that_are_torn_say_nothing(paths: list[str]) -> None:
    """The start goes on without them."""
    chain = make_chain(4, seed=1)
    async with running(paths, 2**20) as node:
        await node.save(chain)
    for path in paths:
        file = Path(path) / "heats"
        file.write_bytes(file.read_bytes()[:-1])
    async with running(paths, 2**20) as node:
        assert node.usable(chain) == (4, 4)


async def test_a_chunk_that_cannot_be_read_is_written_anew(paths: list[str]) -> None:
    """Its file goes, the others serve on, and a save brings it back to where it can be read."""
    chain, calls = make_chain(6, seed=1), Faults()
    async with running(paths, 2**20, calls) as node:
        await node.save(chain)
        bad = chain[2].key.identity.hex()
        calls.is_bad = lambda path: path.startswith("reading") and f"{bad}.chunk" in path and "/chunks/" in path
        was_read = await node.can_read(chain[2])
        others = [await node.can_read(chunk) for chunk in chain[3:]]
        calls.is_bad = lambda path: False
        again = await node.save(chain)
        kept = sum(len(list(Path(path).glob("quarantine/*"))) for path in paths)

        assert (was_read, others) == (False, [True] * 3)
        assert again == ["there", "there", "stored", "there", "there", "there"]
        assert await node.can_read(chain[2])
        assert (kept, node.tier.index.used) == (1, 6 * NBYTES)


@pytest.mark.parametrize("fault", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN])
async def test_a_process_without_means_loses_no_chunk(paths: list[str], fault: int) -> None:
    """A read that fails for want of descriptors or memory says nothing about the file, though another one succeeds."""
    chain, calls = make_chain(4, seed=1), Faults()
    async with running(paths, 2**20, calls) as node:
        await node.save(chain)
        calls.errno, lacking = fault, f"{chain[2].key.identity.hex()}.chunk"
        calls.is_bad = lambda path: lacking in path
        was_read = await node.can_read(chain[2])
        calls.is_bad = lambda path: False

        assert (was_read, node.tier.take_lost(), node.usable(chain)) == (False, [], (4, 4))
        assert await node.can_read(chain[2])


async def test_a_file_that_cannot_go_either_still_counts(paths: list[str]) -> None:
    """It takes room until it is gone, and the chunk is written elsewhere meanwhile."""
    chain, calls = make_chain(6, seed=1), Faults()
    async with running(paths, 7 * NBYTES, calls) as node:
        await node.save(chain)
        bad = chain[2].key.identity.hex()
        calls.is_bad = lambda path: f"{bad}.chunk" in path and path.split()[0] in ("reading", "renaming")
        assert not await node.can_read(chain[2])
        calls.is_bad = lambda path: False
        used, again = node.tier.index.used, await node.save(chain[:3], first=2)

        assert (used, again, node.tier.index.used) == (6 * NBYTES, ["stored"], 7 * NBYTES)
        assert await node.can_read(chain[2])


async def test_a_file_that_could_not_be_deleted_counts_until_it_is(paths: list[str]) -> None:
    """What was evicted and stays makes no room."""
    calls = Faults()
    async with running(paths, 2**20, calls) as node:
        await node.save(make_chain(4, seed=1))
        calls.is_bad = lambda path: path.endswith(".chunk") and "writing" not in path
        await node.tier.drop(node.tier.index.keys())
        await node.tier.removals.drained()
        before = node.tier.index.used
        calls.is_bad = lambda path: False
        await node.watch.look()
        await node.tier.removals.drained()

        assert (before, node.tier.index.used) == (4 * NBYTES, 0)
        assert [list(Path(path).rglob("*.chunk")) for path in paths] == [[], []]


async def test_a_file_that_cannot_be_deleted_keeps_none_of_another_directory(
    paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has its turn, however many fail before it."""
    monkeypatch.setattr(used_directories, "UNDELETED_AT_ONCE", 2)
    chain, calls = make_chain(8, seed=1), Faults()
    async with running(paths, 2**20, calls) as node:
        await node.save(chain)
        calls.is_bad = lambda path: path.endswith(".chunk") and "writing" not in path
        for directory in range(2):
            await node.tier.drop([chunk.key for chunk in chain[directory::2]])
            await node.tier.removals.drained()
        calls.is_bad = lambda path: path.endswith(".chunk") and paths[0] in path
        for _ in range(4):
            await node.watch.look()
            await node.tier.removals.drained()

        assert [len(list(Path(path).rglob("*.chunk"))) for path in paths] == [4, 0]
        assert node.tier.index.used == 4 * NBYTES


async def test_damaged_chunks_are_set_aside_without_their_folder(paths: list[str]) -> None:
    """It is made again; none keeps its name uncounted."""
    chain = make_chain(4, seed=1)
    async with running(paths[:1], 2**20) as node:
        await node.save(chain)
        (Path(paths[0]) / "quarantine").rmdir()
        for file in Path(paths[0]).glob("chunks/*/*/*/*.chunk"):
            file.write_bytes(bytes(NBYTES))
        was_read = [await node.can_read(chunk) for chunk in chain]
        await node.tier.removals.drained()

        assert was_read == [False] * 4
        assert (list(Path(paths[0]).glob("chunks/*/*/*/*.chunk")), node.tier.index.used) == ([], 0)
        assert len(list(Path(paths[0]).glob("quarantine/*"))) == 4


async def test_a_file_to_be_deleted_that_could_not_be_replaced_counts_until_it_is_gone(paths: list[str]) -> None:
    """A save takes it off the queue, and fails because other data fills the disk."""
    chain, calls = make_chain(4, seed=1), Faults()
    backend = DiskBackend(paths[:1], calls=calls)
    tier = DiskTier(backend, 2**20, IoThreads(2))
    arrivals = [Arrival(chunk.key, NBYTES, place, None) for place, chunk in enumerate(chain)]
    for arrival, chunk in zip(arrivals, chain, strict=True):
        assert (await tier.write(arrival, chunk.blob)).outcome == "stored"
    await tier.drop([chain[3].key])  # Its deletion waits.
    calls.errno = errno.ENOSPC
    calls.is_bad = lambda path: "/writing/" in path
    removing = asyncio.create_task(tier.removals.run())
    outcome = (await tier.write(arrivals[3], chain[3].blob)).outcome
    files, used = len(list(Path(paths[0]).rglob("*.chunk"))), tier.index.used
    await tier.delete_again()
    await tier.removals.drained()

    assert (outcome, files, used) == ("full", 3, 3 * NBYTES)
    assert (len(list(Path(paths[0]).rglob("*.chunk"))), tier.index.used) == (2, 2 * NBYTES)
    tier.removals.stop()
    await removing
    backend.close()


async def test_a_file_that_nobody_knows_of_is_replaced(paths: list[str]) -> None:
    """Saving never says "stored" for what it did not write."""
    (chunk,) = make_chain(1, seed=1)
    async with running(paths, 2**20) as node:
        garbage = aligned(NBYTES)
        assert node.backend.put(chunk.key, garbage, stripe=0, timeout_s=1.0)
        outcomes = await node.save([chunk])

        assert outcomes == ["stored"]
        assert await node.can_read(chunk)


async def test_a_dead_directory_takes_only_its_own_chunks_along(paths: list[str]) -> None:
    """The other one serves reads and writes at once; it is told, and over when the directory is back, whole."""
    chain, more, calls = make_chain(8, seed=1), make_chain(4, seed=2), Faults()
    async with running(paths, 2**20, calls) as node:
        await node.save(chain)
        node.told.catalogue = dict.fromkeys(chunk.key for chunk in chain)
        calls.is_bad = lambda path: paths[0] in path
        was_read = [await node.can_read(chunk) for chunk in chain]
        outcomes = await node.save(more)
        await node.watch.look()
        faults, told = list(node.watch.faults()), list(node.told.catalogue)
        used = node.tier.index.used
        calls.is_bad = lambda path: False
        await node.watch.look()

        assert was_read == [False, True] * 4
        assert outcomes == ["stored"] * 4
        assert [(what, setting) for what, _, setting in faults] == [("disk", "--disk-dir")]
        assert told == [chunk.key for chunk in chain[1::2]]
        assert used == 12 * NBYTES
        assert list(node.watch.faults()) == []
        assert set(node.told.catalogue) >= {chunk.key for chunk in chain}
        assert node.usable(chain) == (8, 8)
        assert all([await node.can_read(chunk) for chunk in [*chain, *more]])


async def test_what_leads_on_from_a_dead_directory_is_kept_for_its_return(paths: list[str]) -> None:
    """On a full disk newcomers take the ends of sequences, though half of each is away."""
    old, calls = [make_chain(8, seed=seed) for seed in range(6)], Faults()
    quota = 6 * 8 * NBYTES
    async with running(paths, quota, calls) as node:
        for chain in old:
            await node.save(chain)
        calls.is_bad = lambda path: paths[1] in path
        assert not await node.can_read(old[0][1])
        await node.save(make_chain(8, seed=10), value=2.0)
        used = node.tier.index.used
        calls.is_bad = lambda path: False
        await node.watch.look()
        await node.watch.look()
        there, usable = map(sum, zip(*(node.usable(chain) for chain in old), strict=True))

        assert used <= quota
        assert node.tier.index.used <= quota
        assert there >= 5 * 8 - 8
        assert usable >= 0.95 * there


async def test_what_a_lost_chunk_leads_to_goes_first(paths: list[str]) -> None:
    """Chunks behind a damaged one take the place of no chunk that can be used."""
    damaged, sound = make_chain(8, seed=1), make_chain(8, seed=2)
    async with running(paths, 16 * NBYTES) as node:
        await node.save(damaged, value=50.0)
        await node.save(sound)
        node.tier.index.forget(damaged[0].key)
        await node.save(make_chain(8, seed=3))

        assert (node.usable(damaged), node.usable(sound)) == ((0, 0), (8, 8))
