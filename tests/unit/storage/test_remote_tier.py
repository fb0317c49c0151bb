"""The object store as a tier: what is written over what is there, and within which quota."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.storage.chunk_keys import NoCipher
from services.storage.chunk_reading import VerifiedRead
from services.storage.chunk_sealing import seal_blob
from services.storage.io_threads import IoThreads
from services.storage.keys import DEFAULT_KEY_ID
from services.storage.remote_tier import OVER_QUOTA, RemoteTier
from shared.errors import IntegrityError, TransportError
from shared.ids import key_digest
from tests.chunk_makers import SMALL, aligned, make_chain
from tests.memory_backend import MemoryBackend
from tests.unit.storage.made_ciphers import make_cipher

CHAIN = make_chain(3, seed=2)
NBYTES = CHAIN[0].blob.nbytes
KEY = CHAIN[0].key
CIPHER = make_cipher(default=1, another=2, nonces=bytes)  # The same bytes each time.


def _plain() -> bytes:
    return bytes(CHAIN[0].blob)


def _damaged() -> bytes:
    return _plain()[:5000] + bytes([_plain()[5000] ^ 1]) + _plain()[5001:]


def _damaged_header() -> bytes:
    return _plain()[:40] + bytes([_plain()[40] ^ 1]) + _plain()[41:]


def _of_a_later_release() -> bytes:
    return _plain()[:8] + bytes([99]) + _plain()[9:]


def _sealed(key_id: str = DEFAULT_KEY_ID) -> bytes:
    blob = memoryview(bytearray(_plain()))
    seal_blob(blob, CHAIN[0].header, key_id, CIPHER)
    return bytes(blob)


def _tier(there: bytes) -> tuple[RemoteTier, MemoryBackend]:
    store = MemoryBackend(max_bytes=2**30)
    store.put(KEY, memoryview(there), stripe=0, timeout_s=1.0)
    return RemoteTier(store, IoThreads(2), timeout_s=1.0), store


def _held(store: MemoryBackend) -> bytes:
    into = aligned(2 * NBYTES)
    return bytes(into[: store.get(KEY, into, timeout_s=1.0)])


async def _read(remote: RemoteTier) -> None:
    await remote.read(KEY, VerifiedRead(SMALL, NoCipher(), ""), aligned(NBYTES), 1.0)


@pytest.mark.parametrize(
    ("there", "ours", "is_replaced"),
    [
        (_plain, _plain, False),
        (_damaged_header, _plain, True),
        (lambda: _plain()[:4096], _plain, True),
        (lambda: b"something else" + bytes(NBYTES - 14), _plain, True),
        (_plain, _sealed, True),
        (_sealed, _sealed, False),
        (lambda: _sealed(key_digest("another")), _sealed, True),
        (_sealed, _plain, False),
        (_of_a_later_release, _plain, False),
    ],
    ids=[
        "the same",
        "damaged header",
        "cut short",
        "no chunk",
        "in the clear",
        "sealed alike",
        "sealed with another key",
        "sealed, and ours is not",
        "of a later release",
    ],
)
async def test_an_upload_replaces_what_is_not_this_chunk(
    there: Callable[[], bytes], ours: Callable[[], bytes], is_replaced: bool
) -> None:
    """Its size and its header tell; nothing is read whole for it, and encryption is never undone."""
    remote, store = _tier(there())

    error = await remote.write(KEY, ours())

    assert error == ""
    assert _held(store) == (ours() if is_replaced else there())
    assert remote.replaced == is_replaced


async def test_what_failed_verification_is_replaced_once() -> None:
    """A payload that rotted cannot be seen by the header: whoever read it writes over it, and then no more."""
    remote, store = _tier(_damaged())

    unread = await remote.write(KEY, _plain()), _held(store)
    with pytest.raises(IntegrityError, match="wrong checksum"):
        await _read(remote)
    read = await remote.write(KEY, _plain()), _held(store)
    again = await remote.write(KEY, _plain())

    assert (unread, read, again) == (("", _damaged()), ("", _plain()), "")
    assert (remote.refused, remote.replaced, remote.uploaded) == (1, 1, 3)


async def test_what_is_replaced_takes_no_more_of_a_quota() -> None:
    """Its bytes were counted already."""
    remote, _ = _tier(_damaged_header())
    remote.owners.learn(KEY.namespace, "acme", 2 * NBYTES)

    replaced = await remote.write(KEY, _plain())
    second = await remote.write(CHAIN[1].key, CHAIN[1].blob)
    third = await remote.write(CHAIN[2].key, CHAIN[2].blob)

    assert (replaced, second, third) == ("", "", OVER_QUOTA)


async def test_what_was_deleted_leaves_room_once_it_is_counted_again() -> None:
    """A flush of the namespace makes the count void."""
    store, threads = MemoryBackend(max_bytes=2**30), IoThreads(2)
    remote = RemoteTier(store, threads, timeout_s=1.0)
    remote.owners.learn(CHAIN[0].key.namespace, "acme", NBYTES)
    assert await remote.write(CHAIN[0].key, CHAIN[0].blob) == ""
    assert await remote.write(CHAIN[1].key, CHAIN[1].blob) == OVER_QUOTA

    store.delete(CHAIN[0].key, timeout_s=1.0)
    remote.forget(CHAIN[0].key.namespace)

    assert await remote.write(CHAIN[1].key, CHAIN[1].blob) == ""


async def test_a_store_that_cannot_be_counted_gets_nothing_of_a_bounded_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound that cannot be checked is not passed over; the upload counts as failed, and may be tried again."""
    store, threads = MemoryBackend(max_bytes=2**30), IoThreads(2)
    remote = RemoteTier(store, threads, timeout_s=1.0)
    remote.owners.learn(CHAIN[0].key.namespace, "acme", 10 * NBYTES)

    def lost(namespace: str = "") -> object:
        raise TransportError("no route")

    monkeypatch.setattr(store, "entries", lost)

    assert await remote.write(CHAIN[0].key, CHAIN[0].blob) == "no route"
    assert (remote.uploaded, remote.upload_failures) == (0, 1)
