"""Damage to chunks on the disk while the storage runs, and a full disk. None of it needs privileges.

A full disk is simulated by the kernel's bound on file sizes (``RLIMIT_FSIZE``), set on the running storage:
a write of a chunk is cut off half way and then fails, as on a full disk, though with EFBIG in place of ENOSPC. A file
system that is really full would need privileges to mount.
"""

from __future__ import annotations

import os
import random
import resource
from pathlib import Path

from thermocline.chaos.plan import Kind

FULL_AT_BYTES = 128 * 1024
"""Largest size of a file on a full disk. A chunk of the bundled models is larger, in either form."""

_BLOCK = 512


def chunk_files(disk: Path) -> list[Path]:
    """Return the files of all chunks on the disk, sorted by path."""
    return sorted((disk / "chunks").glob("*/*/*/*.chunk"))


def damage(disk: Path, kind: Kind, draw: int) -> str:
    """Damage up to 6 chunks on the disk, chosen by ``draw``; return how many. Kinds: flip, truncate, delete, swap."""
    rng = random.Random(draw)
    files = chunk_files(disk)
    chosen = rng.sample(files, min(len(files), rng.randint(2, 6)))
    done = 0
    if kind == "swap":
        for one, other in zip(chosen[::2], chosen[1::2], strict=False):
            done += 2 * _swap(one, other)
    else:
        for path in chosen:
            done += _damage_one(path, kind, rng)
    return f"{done} of {len(files)} chunks"


def _damage_one(path: Path, kind: Kind, rng: random.Random) -> bool:
    try:
        if kind == "delete":
            path.unlink()
            return True
        with path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            if kind == "truncate":
                file.truncate(rng.randrange(size) // _BLOCK * _BLOCK)
                return True
            at = rng.randrange(size)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ (1 << rng.randrange(8))]))
        return True
    except (OSError, ValueError, IndexError):
        return False  # The storage removed it, or is truncating it, at this moment.


def _swap(one: Path, other: Path) -> bool:
    """Exchange the contents of two chunks: each is whole, and under the wrong name."""
    aside = one.with_suffix(".swapped")
    try:
        one.rename(aside)
        other.rename(one)
        aside.rename(other)
        return True
    except OSError:
        aside.unlink(missing_ok=True)  # One of them was removed in between; a chunk that is missing is damage too.
        return False


def fill(pid: int, log: Path) -> None:
    """Make every write of this process beyond FULL_AT_BYTES of a file fail from now on.

    Its log is a file too (in production it is a pipe), so the log's contents are moved aside first.
    """
    with log.open("rb+") as file, log.with_suffix(".earlier.log").open("ab") as earlier:
        earlier.write(file.read())
        file.truncate(0)
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (FULL_AT_BYTES, hard))


def make_room(pid: int) -> None:
    """Remove the bound of :func:`fill`."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
