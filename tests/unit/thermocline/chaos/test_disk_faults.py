"""Damage to chunks, and a disk that takes no more."""

import errno
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from thermocline.chaos.disk_faults import FULL_AT_BYTES, chunk_files, damage, fill, make_room
from thermocline.chaos.plan import Kind

SIZE = 8192


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A directory of a disk tier with ten chunks."""
    folder = tmp_path / "chunks" / "namespace" / "geometry" / "ab"
    folder.mkdir(parents=True)
    for number in range(10):
        (folder / f"{number}.chunk").write_bytes(bytes([number]) * SIZE)
    return tmp_path


def contents(disk: Path) -> dict[str, bytes]:
    """Every chunk's bytes by name."""
    return {path.name: path.read_bytes() for path in chunk_files(disk)}


@pytest.mark.parametrize("kind", ["flip", "truncate", "delete", "swap"])
def test_the_same_draw_damages_the_same_chunks(
    disk: Path, kind: Kind, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Some of them, in the way that was asked for, and it says how many."""
    before = contents(disk)

    said = damage(disk, kind, draw=7)

    after = contents(disk)
    changed = [name for name in before if after.get(name) != before[name]]
    assert said == f"{len(changed)} of 10 chunks"
    assert changed
    for name in changed:
        if kind == "flip":
            differing = [one ^ other for one, other in zip(before[name], after[name], strict=True) if one != other]
            assert len(differing) == 1
            assert differing[0].bit_count() == 1
        elif kind == "truncate":
            assert len(after[name]) < SIZE
        elif kind == "delete":
            assert name not in after
        else:
            assert after[name] in before.values()


def test_an_empty_disk_cannot_be_damaged(tmp_path: Path) -> None:
    """Nor is that an error."""
    assert damage(tmp_path, "flip", 1) == "0 of 0 chunks"


def test_a_full_disk_cuts_a_write_off_and_has_room_again(tmp_path: Path) -> None:
    """A running process's write ends short and then fails, until there is room; its log is emptied, not lost."""
    program = f"""
import sys
for line in sys.stdin:
    try:
        with open({str(tmp_path / "chunk")!r}, "wb", buffering=0) as file:
            size = 4 * {FULL_AT_BYTES}
            while size:
                size -= file.write(bytes(size))
        print("written", flush=True)
    except OSError as error:
        print(error.errno, flush=True)
"""
    log = tmp_path / "storage.log"
    log.write_text("said before\n", encoding="utf-8")
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None

    def attempt() -> str:
        child.stdin.write("\n")  # type: ignore[union-attr]
        child.stdin.flush()  # type: ignore[union-attr]
        return child.stdout.readline().strip()  # type: ignore[union-attr]

    try:
        roomy = attempt()
        fill(child.pid, log)
        full = attempt()
        left = (tmp_path / "chunk").stat().st_size
        make_room(child.pid)

        assert (roomy, full, left) == ("written", str(errno.EFBIG), FULL_AT_BYTES)
        assert attempt() == "written"
        assert log.read_text(encoding="utf-8") == ""
        assert (tmp_path / "storage.earlier.log").read_text(encoding="utf-8") == "said before\n"
    finally:
        child.stdin.close()
        child.send_signal(signal.SIGTERM)
        child.wait()
        child.stdout.close()
