"""Damage to chunks on the disk while the storage runs, and a disk that takes no more. Any user can do all of it.

A full disk is made with the kernel's bound on file sizes (``RLIMIT_FSIZE``), set from outside on the running storage:
a write of a chunk is cut off half way and then fails, as on a full disk, though with EFBIG in place of ENOSPC. A file
system of its own that could really be full takes privileges.
"""

from __future__ import annotations

import os
import random
import resource
from pathlib import Path

from thermocline.chaos.plan import Kind

FULL_AT_BYTES = 128 * 1024
"""No file may grow beyond it on a full disk. A chunk of the bundled models is larger, in either form."""

_BLOCK = 512


def chunk_files(disk: Path) -> list[Path]:
    """Every chunk on the disk, by name."""
    return sorted((disk / "chunks").glob("*/*/*/*.chunk"))


def damage(disk: Path, kind: Kind, draw: int) -> str:
    """Damage some chunks of those that are there and say what was done. Kinds: flip, truncate, delete, swap."""
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
    """Let each of two chunks have the other's bytes: each is whole, and under the wrong name."""
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
    """From now on no write of this process goes beyond FULL_AT_BYTES of a file.

    Its log is a file too, though where it really runs it would be a pipe: what is in it moves aside first.
    """
    with log.open("rb+") as file, log.with_suffix(".earlier.log").open("ab") as earlier:
        earlier.write(file.read())
        file.truncate(0)
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (FULL_AT_BYTES, hard))


def make_room(pid: int) -> None:
    """Take the bound away again."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
