"""What the scheduler is told of the disk is what the disk holds at that moment."""

from __future__ import annotations

import pytest

from services.storage.backends import ChunkKey
from services.storage.core.fetch_progress import FetchProgress
from services.storage.tier_events import TierEvents
from shared.messages.base import Message
from shared.messages.pools import HIDDEN
from shared.messages.storage_events import LISTED_AT_ONCE, ChunksDropped, ChunksFetched, ChunksListed, ChunksSaved

GEOMETRY, HIDDEN_GEOMETRY = b"g" * 8, b"s" * 8


def _key(number: int, geometry: bytes = GEOMETRY) -> ChunkKey:
    return ChunkKey("aa" * 16, geometry, number.to_bytes(16, "big"))


class _Outbox:
    def __init__(self) -> None:
        self.sent: list[Message] = []

    async def put_when_room(self, event: Message) -> None:
        self.sent.append(event)


@pytest.fixture
def outbox() -> _Outbox:
    return _Outbox()


@pytest.fixture
def events(outbox: _Outbox) -> TierEvents:
    """Even numbers are on the disk."""
    made = TierEvents(
        outbox,  # type: ignore[arg-type]
        lambda key: key.identity[-1] % 2 == 0,
        storage_id="s0",
        incarnation="i0",
    )
    made.forms = {GEOMETRY: "kv", HIDDEN_GEOMETRY: HIDDEN}
    return made


async def test_an_answer_claims_only_what_is_there(events: TierEvents, outbox: _Outbox) -> None:
    """Chunks that went again are not claimed, victims that came back are not dropped."""
    await events.saved(7, form="kv", chunks=[_key(1), _key(2), _key(2)], dropped=[_key(3), _key(4)], error="x" * 2000)

    (saved,) = outbox.sent
    assert isinstance(saved, ChunksSaved)
    assert (saved.save_id, saved.chunks, saved.dropped) == (7, _key(2).identity, _key(3).identity)
    assert len(saved.error) == 500


@pytest.mark.parametrize(
    ("numbers", "is_compact", "named"),
    [((2, 4), True, ()), ((2, 4), False, (2, 4)), ((2, 3), True, (2,)), ((3,), True, ()), ((), True, ())],
)
async def test_all_chunks_of_a_compact_order_need_no_names(
    events: TierEvents, outbox: _Outbox, numbers: tuple[int, ...], is_compact: bool, named: tuple[int, ...]
) -> None:
    """Only where every one of them is there, and whoever ordered it knows the form."""
    await events.saved(7, form="kv", chunks=[_key(number) for number in numbers], is_compact=is_compact)

    (saved,) = outbox.sent
    assert isinstance(saved, ChunksSaved)
    assert saved.chunks == b"".join(_key(number).identity for number in named)
    assert saved.is_all == (numbers == (2, 4) and is_compact)


async def test_what_came_back_is_not_missing(events: TierEvents, outbox: _Outbox) -> None:
    """A chunk that failed and was written since is there."""
    await events.fetched(8, FetchProgress(3, missing=[_key(1), _key(2)]), form="kv", is_over=True)

    (fetched,) = outbox.sent
    assert isinstance(fetched, ChunksFetched)
    assert fetched.missing == _key(1).identity


async def test_lists_come_in_pieces_and_without_strangers(events: TierEvents, outbox: _Outbox) -> None:
    """Pieces are bounded, chunks of another geometry are left out, and what is empty is not sent."""
    keys = [_key(2 * number) for number in range(LISTED_AT_ONCE + 5)]
    await events.listed([*keys, _key(2, b"h" * 8), _key(1)])
    await events.listed([_key(1)])
    await events.dropped([_key(2)])
    await events.dropped([_key(5)])

    first, second, third = outbox.sent
    assert isinstance(first, ChunksListed)
    assert isinstance(second, ChunksListed)
    assert isinstance(third, ChunksDropped)
    assert len(first.chunks) == 16 * LISTED_AT_ONCE
    assert first.chunks + second.chunks == b"".join(key.identity for key in keys)
    assert third.chunks == _key(5).identity


async def test_what_is_of_the_other_form_has_an_event_of_its_own(events: TierEvents, outbox: _Outbox) -> None:
    """An answer speaks of chunks of its form; victims and losses of the other follow it, strangers are left out."""
    mixed = [_key(1, HIDDEN_GEOMETRY), _key(3), _key(5, HIDDEN_GEOMETRY), _key(2, HIDDEN_GEOMETRY), _key(7, b"h" * 8)]
    await events.saved(1, form="kv", dropped=mixed)
    await events.saved(2, form=HIDDEN, chunks=[_key(4, HIDDEN_GEOMETRY), _key(6)], dropped=mixed)
    await events.fetched(3, FetchProgress(3, missing=mixed), form=HIDDEN, is_over=True)

    saved, states, saved_hidden, kv, fetched, kv_again = outbox.sent
    assert isinstance(saved, ChunksSaved)
    assert isinstance(saved_hidden, ChunksSaved)
    assert isinstance(fetched, ChunksFetched)
    of_hidden = _key(1).identity + _key(5).identity
    assert saved.dropped == _key(3).identity
    assert (saved_hidden.chunks, saved_hidden.dropped, fetched.missing) == (_key(4).identity, of_hidden, of_hidden)
    dropped = [event for event in (states, kv, kv_again) if isinstance(event, ChunksDropped)]
    assert [(event.form, event.chunks) for event in dropped] == [
        (HIDDEN, of_hidden),
        ("kv", _key(3).identity),
        ("kv", _key(3).identity),
    ]


async def test_lists_are_of_one_form_each(events: TierEvents, outbox: _Outbox) -> None:
    """What lies side by side under one identity is told apart, and in bounded pieces."""
    keys = [_key(2 * number, geometry) for number in range(LISTED_AT_ONCE) for geometry in (GEOMETRY, HIDDEN_GEOMETRY)]
    await events.listed(keys)

    listed = [event for event in outbox.sent if isinstance(event, ChunksListed)]
    assert [event.form for event in listed] == ["kv", HIDDEN, "kv", HIDDEN]
    assert max(len(event.chunks) for event in listed) <= 16 * LISTED_AT_ONCE
    for form in ("kv", HIDDEN):
        told = b"".join(event.chunks for event in listed if event.form == form)
        assert told == b"".join(_key(2 * number).identity for number in range(LISTED_AT_ONCE))
