"""What a store was lately found to lack."""

from services.storage.backends import ChunkKey
from services.storage.core.absence import AbsenceCache


def key(number: int) -> ChunkKey:
    return ChunkKey("ab" * 16, b"geometry", number.to_bytes(16, "big"))


def test_an_absence_is_believed_for_its_time() -> None:
    """It is known up to its end and not from there on."""
    cache = AbsenceCache(max_chunks=4, lifetime_s=10.0)

    cache.note(key(1), asked_s=0.0, now_s=1.0)

    assert cache.is_absent(key(1), 10.9)
    assert not cache.is_absent(key(2), 10.9)
    assert not cache.is_absent(key(1), 11.0)


def test_what_is_written_is_absent_no_more() -> None:
    """Writing a chunk makes its absence forgotten."""
    cache = AbsenceCache(max_chunks=4, lifetime_s=10.0)
    cache.note(key(1), asked_s=0.0, now_s=0.0)

    cache.forget(key(1), 1.0)

    assert not cache.is_absent(key(1), 1.0)


def test_an_answer_from_before_the_write_is_ignored() -> None:
    """A miss that was asked before the chunk was written, and comes after, must not hide the chunk."""
    cache = AbsenceCache(max_chunks=4, lifetime_s=10.0)
    cache.forget(key(1), 2.0)

    cache.note(key(1), asked_s=1.0, now_s=3.0)
    assert not cache.is_absent(key(1), 3.0)
    cache.note(key(1), asked_s=3.0, now_s=4.0)

    assert cache.is_absent(key(1), 4.0)


def test_its_size_is_bounded() -> None:
    """Past the bound, what was noted first is forgotten."""
    cache = AbsenceCache(max_chunks=2, lifetime_s=10.0)

    for number in range(3):
        cache.note(key(number), asked_s=0.0, now_s=0.0)

    assert [cache.is_absent(key(number), 1.0) for number in range(3)] == [False, True, True]
