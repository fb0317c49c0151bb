"""Shared segments: what one process writes another reads, and nothing dangles."""

import gc
import os
import stat
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from shared.errors import ConfigError, OperatorError, TransportError
from shared.memory import SharedSegment, reap, unlink_all
from shared.memory.segment import SHM_DIRECTORY
from shared.memory.segment_name import SegmentName, parse_segment_name


def _run_owner(prefix: str, *, then: str) -> str:
    """Start a process that makes a 1 MiB segment of sevens, prints its name, and ends by ``then``."""
    program = f"""
        import os, signal
        from shared.memory import SharedSegment
        segment = SharedSegment.create({prefix!r}, "device", 2**20)
        segment.array[:] = 7
        print(segment.name, flush=True)
        input()
        {then}
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    name = child.stdout.readline().strip()
    attached = SharedSegment.attach(name, 2**20)
    view = attached.array
    child.communicate("\n")
    assert (view == 7).all()
    return name


def test_two_mappings_share_their_bytes(shm_prefix: str) -> None:
    """What the owner writes is what an attached mapping reads, and the other way round."""
    owner = SharedSegment.create(shm_prefix, "host", 10_000)
    other = SharedSegment.attach(owner.name, owner.nbytes)

    owner.array[123] = 45
    other.array[9_999] = 67

    assert other.array[123] == 45
    assert owner.array[9_999] == 67
    assert not other.array[:123].any()


def test_only_the_user_may_open_it(shm_prefix: str) -> None:
    """The file has mode 0600 whatever the umask."""
    previous = os.umask(0)
    try:
        segment = SharedSegment.create(shm_prefix, "host", 4096)
    finally:
        os.umask(previous)

    assert stat.S_IMODE((SHM_DIRECTORY / segment.name).stat().st_mode) == 0o600


@pytest.mark.parametrize("prefault", [True, False])
def test_prefaulting_takes_the_memory_at_once(shm_prefix: str, prefault: bool) -> None:
    """With prefault every block is allocated at creation; without, none is."""
    segment = SharedSegment.create(shm_prefix, "host", 2**20, prefault=prefault)

    allocated = (SHM_DIRECTORY / segment.name).stat().st_blocks * 512
    assert allocated == (2**20 if prefault else 0)
    assert not segment.array.any()


@pytest.mark.parametrize("nbytes", [0, -1, 2**60])
def test_a_size_that_cannot_be_had_is_the_operators_fault(shm_prefix: str, nbytes: int) -> None:
    """Sizes of nothing or beyond this machine are refused before anything is taken, with the figures."""
    with pytest.raises(OperatorError, match=str(nbytes)) as caught:
        SharedSegment.create(shm_prefix, "host", nbytes)

    assert isinstance(caught.value, ConfigError)
    assert unlink_all(shm_prefix) == []


def test_memory_and_not_only_shm_is_checked(shm_prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment that /dev/shm would grant but the machine's memory would not is refused."""
    monkeypatch.setattr("shared.memory.segment.memory_available_bytes", lambda: 8191)

    with pytest.raises(ConfigError, match="8191 bytes"):
        SharedSegment.create(shm_prefix, "host", 8192)


def test_attaching_what_is_missing_or_of_another_size_fails(shm_prefix: str) -> None:
    """Missing names, wrong sizes and names that are no segment's are TransportErrors that say so."""
    segment = SharedSegment.create(shm_prefix, "host", 4096)

    with pytest.raises(TransportError, match="has 4096 bytes, not 8192"):
        SharedSegment.attach(segment.name, 8192)
    segment.unlink()
    with pytest.raises(TransportError, match=segment.name):
        SharedSegment.attach(segment.name, 4096)
    with pytest.raises(TransportError, match="not the name"):
        SharedSegment.attach("../../etc/passwd", 4096)


def test_a_read_only_mapping_refuses_writes(shm_prefix: str) -> None:
    """An array attached for reading raises instead of writing."""
    owner = SharedSegment.create(shm_prefix, "device", 4096)
    reader = SharedSegment.attach(owner.name, 4096, writable=False)

    with pytest.raises(ValueError, match="read-only"):
        reader.array[0] = 1


def test_closing_with_live_views_defers_the_unmapping(shm_prefix: str) -> None:
    """A view of a view outlives close, unlink and the segment object; the mapping goes with the last view."""
    segment = SharedSegment.create(shm_prefix, "host", 4096)
    segment.array[:] = 255
    name, view = segment.name, segment.array[104:200].view(np.uint64).reshape(3, 4)

    unmapped = segment.close()
    segment.unlink()
    del segment
    gc.collect()

    assert not unmapped
    assert (view == 2**64 - 1).all()
    assert _is_mapped(name)
    del view
    gc.collect()
    assert not _is_mapped(name)


def test_closing_without_views_unmaps_at_once(shm_prefix: str) -> None:
    """Close says that the memory is gone, may be repeated, and leaves no array to reach."""
    segment = SharedSegment.create(shm_prefix, "host", 4096)

    assert segment.close()
    assert segment.close()
    assert segment.is_closed
    assert not _is_mapped(segment.name)
    with pytest.raises(TransportError, match="closed"):
        _ = segment.array


def test_unlinking_twice_is_fine(shm_prefix: str) -> None:
    """Unlink is idempotent, and the bytes stay readable here."""
    segment = SharedSegment.create(shm_prefix, "host", 4096)
    segment.array[0] = 1

    segment.unlink()
    segment.unlink()

    assert segment.array[0] == 1
    assert not (SHM_DIRECTORY / segment.name).exists()


def test_a_killed_owners_segment_is_reaped_and_survivors_keep_reading(shm_prefix: str) -> None:
    """SIGKILL leaves the file; a mapping made before goes on; the next start removes the name."""
    name = _run_owner(shm_prefix, then="os.kill(os.getpid(), signal.SIGKILL)")
    survivor = SharedSegment.attach(name, 2**20)

    reaped = reap(shm_prefix)

    assert reaped == [name]
    assert (survivor.array == 7).all()
    assert reap(shm_prefix) == []


def test_a_living_owners_segment_is_never_reaped(shm_prefix: str) -> None:
    """Reaping spares segments of this process and of other prefixes."""
    mine = SharedSegment.create(shm_prefix, "host", 4096)
    foreign = SharedSegment.create(f"{shm_prefix}-2", "host", 4096)

    assert reap(shm_prefix) == []
    assert (SHM_DIRECTORY / mine.name).exists()
    assert unlink_all(shm_prefix) == [mine.name]
    assert unlink_all(f"{shm_prefix}-2") == [foreign.name]


def test_an_owner_in_another_pid_namespace_is_spared(shm_prefix: str) -> None:
    """A segment whose lock is held is not a leftover, even if its pid means nothing here."""
    mine = SharedSegment.create(shm_prefix, "host", 4096)
    parsed = parse_segment_name(mine.name)
    assert parsed is not None
    stranger = SegmentName(parsed.prefix, 2**22 + 1, 1, parsed.kind, parsed.random)
    (SHM_DIRECTORY / mine.name).rename(SHM_DIRECTORY / str(stranger))

    spared = reap(shm_prefix)
    mine.close()

    assert spared == []
    assert reap(shm_prefix) == [str(stranger)]


def _is_mapped(name: str) -> bool:
    with open("/proc/self/maps", encoding="ascii") as maps:
        return any(name in line for line in maps)
