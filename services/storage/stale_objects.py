"""Which objects of a store are replaced when the chunk that belongs there is uploaded."""

from __future__ import annotations

from services.storage.backends import IsStale
from services.storage.chunk_format import read_fixed
from shared.errors import IntegrityError


def stale_check(blob: bytes, *, is_bad: bool) -> IsStale:
    """Tell what does not belong under the name of ``blob``, a whole chunk, sealed or not.

    That is an object that failed verification when it was read (``is_bad``), one whose header is damaged, and one whose
    header names another chunk or another key, such as a chunk in the clear where chunks are sealed. Two exceptions
    stay: a sealed object where ``blob`` is in the clear, since a storage without keys must not undo encryption, and
    one of another version of the format, which another release wrote.
    """
    ours = read_fixed(memoryview(blob), len(blob))

    def is_stale(nbytes: int, front: bytes) -> bool:
        try:
            theirs = read_fixed(memoryview(front), nbytes)
        except IntegrityError as error:
            return error.code != "unknown_version"
        if theirs.is_sealed and not ours.is_sealed:
            return False
        return is_bad or theirs != ours

    return is_stale
