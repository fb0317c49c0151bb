"""What a loss of power may leave of the disk tier: whole chunks, and what every reader takes for a miss.

A killed process loses nothing that it wrote, because the kernel still has it. Of what the disk itself had not made
durable a loss of power may leave anything, so files are spoilt as badly as they could be, behind the tier's back.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from services.storage.backends import BLOCK_BYTES
from services.storage.backends.disk import DiskBackend
from services.storage.backends.file_calls import FileCalls
from services.storage.chunk_keys import NoCipher
from services.storage.chunk_reading import VerifiedRead
from shared.errors import IntegrityError
from tests.chunk_makers import SMALL, MadeChunk, aligned, make_chain

CHUNKS = make_chain(3, seed=31)
TIMEOUT_S = 30.0
READ = VerifiedRead(SMALL, NoCipher(), "")


class CountedCalls(FileCalls):
    """How many syncs were asked for."""

    def __init__(self) -> None:
        self.syncs = 0

    def sync_data(self, fd: int) -> None:
        self.syncs += 1
        super().sync_data(fd)


def _file_of(root: Path, chunk: MadeChunk) -> Path:
    return root / "chunks" / f"{chunk.key.path}.chunk"


def _write(file: Path, data: bytes) -> None:
    file.write_bytes(data)


SPOILT: dict[str, Callable[[Path, bytes], object]] = {
    "the name is lost": lambda file, data: file.unlink(),
    "no data": lambda file, data: _write(file, b""),
    "zeros": lambda file, data: _write(file, bytes(len(data))),
    "a block of zeros at the end": lambda file, data: _write(file, data[:-BLOCK_BYTES] + bytes(BLOCK_BYTES)),
    "a block of zeros at the front": lambda file, data: _write(file, bytes(BLOCK_BYTES) + data[BLOCK_BYTES:]),
    "cut off": lambda file, data: _write(file, data[:BLOCK_BYTES]),
    "of another file": lambda file, data: _write(file, bytes(CHUNKS[2].blob)),
}


@pytest.mark.parametrize("how", SPOILT)
def test_what_a_loss_of_power_has_torn_is_a_miss(tmp_path: Path, how: str) -> None:
    """The next start finds the others whole, and nobody gets a byte of it; it can be written anew."""
    backend = DiskBackend([str(tmp_path)])
    for chunk in CHUNKS:
        backend.put(chunk.key, chunk.blob, stripe=0, timeout_s=TIMEOUT_S)
    backend.close()
    torn = CHUNKS[1]
    SPOILT[how](_file_of(tmp_path, torn), bytes(torn.blob))

    again, into, found = DiskBackend([str(tmp_path)]), aligned(torn.blob.nbytes), []
    for entry in again.entries():
        try:
            if READ(again, entry.key, into, timeout_s=TIMEOUT_S) is not None:
                found.append(entry.key)
        except IntegrityError:
            again.quarantine(entry.key, timeout_s=TIMEOUT_S)

    assert sorted(found) == sorted([CHUNKS[0].key, CHUNKS[2].key])
    assert again.put(torn.key, torn.blob, stripe=0, timeout_s=TIMEOUT_S)
    assert READ(again, torn.key, into, timeout_s=TIMEOUT_S) == torn.header
    again.close()


@pytest.mark.parametrize("is_direct", [True, False])
def test_a_chunk_waits_for_no_more_than_its_data(tmp_path: Path, is_direct: bool) -> None:
    """Past the page cache nothing is synced at all; through it each chunk's data is, once."""
    calls = CountedCalls()
    backend = DiskBackend([str(tmp_path)], is_direct_wanted=is_direct, calls=calls)
    if backend.directories[0].is_direct != is_direct:
        pytest.skip("this file system takes nothing past the page cache")
    for chunk in CHUNKS:
        backend.put(chunk.key, chunk.blob, stripe=0, timeout_s=TIMEOUT_S)

    assert calls.syncs == (0 if is_direct else len(CHUNKS))
    backend.close()
