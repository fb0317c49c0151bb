"""Responses are found by whom they belong to, for as long as they are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import pytest

from services.gateway.accounts import OPEN, Account
from services.gateway.responses.ids import cell_of, is_response_id, new_response_id
from services.gateway.responses.items import Item, ItemPart, MessageItem, OutputText
from services.gateway.responses.kept import KeptResponses
from services.gateway.responses.schema import ReasoningOptions, ResponseObject, TextOptions
from shared.bus.protocol import StreamLimits
from shared.errors import InvalidRequest, NotFound, TransportError
from tests.memory_bus import MemoryBroker

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
    assert await KeptResponses(one, here).keep(account(), None, made, ASKED)
    found = await KeptResponses(other, here).find(account(), None, made.id)

    said = found.conversation()
    assert [(item.role, [part.text for part in item.content or () if isinstance(part, ItemPart)]) for item in said] == [
        ("user", ["hi"]),
        ("assistant", ["there"]),
    ]
    assert all(item.id for item in said)
    assert msgspec.json.decode(found.response, type=ResponseObject) == made


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
    kept, mine, made = KeptResponses(bus, here), account("acme", "0" * 16), response()
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
    kept, made = KeptResponses(bus, here), response()
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
    kept = KeptResponses(bus, here)
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
    kept, made = KeptResponses(bus, here), response()
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
