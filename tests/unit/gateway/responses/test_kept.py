"""Responses are found by whom they belong to, for as long as they are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import pytest

from services.gateway.accounts import OPEN, Account
from services.gateway.kept_entries import KeptEntries
from services.gateway.responses.ids import cell_of, is_response_id, new_response_id, suffix_of
from services.gateway.responses.items import Item, ItemPart, MessageItem, OutputText
from services.gateway.responses.kept import MOST_READ, KeptResponses
from services.gateway.responses.schema import ReasoningOptions, ResponseObject, TextOptions
from services.gateway.responses.shares import KeptShares
from shared.bus.protocol import KeptRoom, StreamLimits
from shared.errors import InvalidRequest, NotFound, TransportError, Unavailable
from tests.memory_bus import MemoryBroker, MemoryBus

T = TypeVar("T")

DAY_NS = 86_400 * 10**9
ASKED = [Item(type="message", role="user", content=[ItemPart(type="input_text", text="hi")])]


def account(name: str = "", salt: str = "") -> Account:
    return Account(name, msgspec.structs.replace(OPEN, salt=salt), lambda: 0.0)


async def here(work: Callable[[], T], characters: int) -> T:
    """Everything is short."""
    return work()


def response(text: str = "there") -> ResponseObject:
    said = MessageItem(id="msg_1", status="completed", content=[OutputText(text=text)])
    return ResponseObject(
        id=new_response_id("lisbon"), created_at=1, status="completed", instructions=None, max_output_tokens=None,
        metadata={}, model="m", output=[said], parallel_tool_calls=True, previous_response_id=None,
        prompt_cache_key=None, reasoning=ReasoningOptions(), safety_identifier=None, store=True, temperature=1.0,
        text=TextOptions(), tool_choice="auto", tools=[], top_logprobs=0, top_p=1.0, user=None,
    )  # fmt: skip


async def test_another_gateway_goes_on_from_it() -> None:
    """With all that was said, each item under an id."""
    broker = MemoryBroker()
    one, other = broker.connect("one"), broker.connect("other")
    await one.ensure_streams(StreamLimits())
    made = response()
    assert await KeptResponses(KeptEntries(one), here).keep(account(), None, made, ASKED)
    found = await KeptResponses(KeptEntries(other), here).find(account(), None, made.id)

    said = found.conversation()
    assert [(item.role, [part.text for part in item.content or () if isinstance(part, ItemPart)]) for item in said] == [
        ("user", ["hi"]),
        ("assistant", ["there"]),
    ]
    assert all(item.id for item in said)
    assert msgspec.json.decode(found.response, type=ResponseObject) == made


async def test_items_are_found_through_the_last_response_that_has_them() -> None:
    """One read is enough for a conversation; other callers' items and ids of other forms are not there."""
    bus = MemoryBroker().connect("one")
    await bus.ensure_streams(StreamLimits())
    kept, made = KeptResponses(KeptEntries(bus), here), response()
    said = f"msg_{suffix_of(made.id)}0"
    output = [MessageItem(id=said, status="completed", content=[OutputText(text="there")])]
    earlier = msgspec.structs.replace(ASKED[0], id=f"msg_{suffix_of(new_response_id('lisbon'))}0")
    assert earlier.id
    await kept.keep(account(), None, msgspec.structs.replace(made, output=output), [earlier])

    found, weight = await kept.find_items(account(), None, [earlier.id, said, "msg_1", ""])
    others, nothing = await kept.find_items(account("other"), None, [said])

    assert [set(found) >= {earlier.id, said}, weight > 0] == [True, True]
    assert (others, nothing) == ({}, 0)


async def test_few_responses_are_read_for_references() -> None:
    """However many a request names."""
    bus = CountingBus(MemoryBroker(), "one")
    ids = [f"msg_{suffix_of(new_response_id('lisbon'))}0" for _ in range(10 * MOST_READ)]

    await KeptResponses(KeptEntries(bus), here).find_items(account(), None, ids)

    assert bus.reads == MOST_READ


class CountingBus(MemoryBus):
    """A client that counts what it reads."""

    reads = 0

    async def kept(self, name: str, *, timeout_s: float = 2.0) -> bytes | None:
        self.reads += 1
        return None


async def test_items_that_were_sent_twice_have_an_id_each() -> None:
    """A client may send an answer's items again, and a listing goes on behind an id."""
    bus = MemoryBroker().connect("one")
    await bus.ensure_streams(StreamLimits())
    kept, made = KeptResponses(KeptEntries(bus), here), response()
    again = msgspec.structs.replace(ASKED[0], id="msg_1")
    assert await kept.keep(account(), None, made, [again, *ASKED, again])
    found = await kept.find(account(), None, made.id)

    ids = [item.id for item in found.items]
    assert ids[0] == "msg_1"
    assert len(set(ids)) == 3


@pytest.mark.parametrize(
    ("owner", "salt"),
    [
        (account("acme", "0" * 16), None),
        (account("other", "1" * 16), "s"),
        (account("acme", "1" * 16), "s"),
        (account("acme", "0" * 16), "t"),
    ],
)
async def test_nobody_elses_name_leads_to_it(owner: Account, salt: str | None) -> None:
    """Another salt of the request, another tenant, and the same tenant with a new salt find and erase nothing."""
    bus = MemoryBroker().connect("one")
    await bus.ensure_streams(StreamLimits())
    kept, mine, made = KeptResponses(KeptEntries(bus), here), account("acme", "0" * 16), response()
    await kept.keep(mine, "s", made, ASKED)
    with pytest.raises(NotFound):
        await kept.find(owner, salt, made.id)
    with pytest.raises(NotFound):
        await kept.erase(owner, salt, made.id)
    with pytest.raises(InvalidRequest) as refused:
        await kept.find_previous(owner, salt, made.id)

    assert (refused.value.status, refused.value.code) == (404, "previous_response_not_found")
    assert await kept.find(mine, "s", made.id)


async def test_it_is_kept_for_a_time() -> None:
    """Of the broker's clock."""
    now = [0]
    bus = MemoryBroker(clock=lambda: now[0]).connect("one")
    await bus.ensure_streams(StreamLimits(kept_age_s=86_400))
    kept, made = KeptResponses(KeptEntries(bus), here), response()
    await kept.keep(account(), None, made, ASKED)
    now[0] = DAY_NS - 1
    assert await kept.find(account(), None, made.id)
    now[0] = DAY_NS + 1

    with pytest.raises(NotFound):
        await kept.find(account(), None, made.id)


@pytest.mark.parametrize(
    "name", ["", "resp_", "resp_*", "resp_" + "0" * 39, "resp_" + "G" * 40, "resp_" + "0" * 39 + ">"]
)
async def test_what_is_no_id_is_not_asked_for(name: str) -> None:
    """It could name more than one entry."""
    bus = MemoryBroker().connect("one")
    await bus.ensure_streams(StreamLimits())
    kept = KeptResponses(KeptEntries(bus), here)
    await kept.keep(account(), None, response(), ASKED)

    assert not is_response_id(name)
    with pytest.raises(NotFound):
        await kept.find(account(), None, name)
    with pytest.raises(NotFound):
        await kept.erase(account(), None, name)


async def test_an_entry_that_cannot_be_read_says_so() -> None:
    """It is the server's fault."""
    bus = MemoryBroker().connect("one")
    await bus.ensure_streams(StreamLimits())
    kept, made = KeptResponses(KeptEntries(bus), here), response()
    await kept.keep(account(), None, made, ASKED)
    entries: Any = bus._broker._kept
    for entry, (at, _) in list(entries.items()):
        entries[entry] = (at, b"{")

    with pytest.raises(TransportError):
        await kept.find(account(), None, made.id)


def test_an_id_says_its_cell() -> None:
    """To a router that knows the cell's name; no two are alike."""
    made = new_response_id("lisbon")

    assert cell_of(made, ["porto", "lisbon"]) == "lisbon"
    assert cell_of(made, ["porto"]) == ""
    assert cell_of("resp_1", ["lisbon"]) == ""
    assert is_response_id(made)
    assert new_response_id("lisbon") != made


async def test_one_caller_displaces_no_response_of_another() -> None:
    """Where the bucket is nearly full, the oldest responses of the caller with the most are erased."""
    bus = MemoryBroker().connect("one")
    await bus.ensure_streams(StreamLimits(kept_bytes=200_000))
    kept, others, flooding = (
        KeptResponses(KeptEntries(bus), here),
        account("acme", "0" * 16),
        account("other", "1" * 16),
    )
    theirs, floods = response(), []
    await kept.keep(others, None, theirs, ASKED)
    for _ in range(60):
        floods.append(response("x" * 10_000))
        assert await kept.keep(flooding, None, floods[-1], ASKED)

    assert await kept.find(others, None, theirs.id)
    assert await kept.find(flooding, None, floods[-1].id)
    with pytest.raises(NotFound):
        await kept.find(flooding, None, floods[0].id)


async def test_many_small_responses_displace_none_of_another() -> None:
    """The number of responses is bounded, too."""
    bus = MemoryBroker().connect("one")
    await bus.ensure_streams(StreamLimits(kept_entries=40))
    kept, others, flooding = (
        KeptResponses(KeptEntries(bus), here),
        account("acme", "0" * 16),
        account("other", "1" * 16),
    )
    theirs = response()
    await kept.keep(others, None, theirs, ASKED)
    for _ in range(100):
        await kept.keep(flooding, None, response(), ASKED)

    assert await kept.find(others, None, theirs.id)


async def test_a_caller_alone_may_fill_the_bucket() -> None:
    """Its oldest responses then go by the broker's bounds."""
    bus = MemoryBroker().connect("one")
    await bus.ensure_streams(StreamLimits(kept_entries=40))
    kept, made = KeptResponses(KeptEntries(bus), here), [response() for _ in range(40)]
    for each in made:
        await kept.keep(account(), None, each, ASKED)

    for each in made:
        assert await kept.find(account(), None, each.id)


async def test_a_broker_that_does_not_say_how_full_it_is_keeps_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose users have an earlier release's permissions; it is asked again only after some time."""
    asked = []

    async def refuse(self: MemoryBus, *, timeout_s: float = 2.0) -> None:
        asked.append(timeout_s)
        raise Unavailable("no answer")

    monkeypatch.setattr(MemoryBus, "kept_room", refuse)
    bus = MemoryBroker().connect("one")
    await bus.ensure_streams(StreamLimits())
    kept = KeptResponses(KeptEntries(bus), here)
    for _ in range(5):
        assert await kept.keep(account(), None, response(), ASKED)

    assert len(asked) == 1


def test_what_was_erased_is_not_counted() -> None:
    """Nor what more is known than is kept."""
    shares = KeptShares()
    assert shares.is_look_due
    for name in ("a1", "a2", "a3"):
        shares.note("a", name, 100)
    shares.note("b", "b1", 150)
    for name in ("a1", "a2", "none"):
        shares.erased("a", name)
    shares.erased("c", "none")

    assert shares.looked(KeptRoom(250, 250, 2, 100)) == ["b1"]
    assert not shares.is_look_due
