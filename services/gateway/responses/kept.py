"""Responses that are kept in the cell, so that any of its gateways can continue them.

An entry holds the whole conversation, so that continuing it takes one read, and its lifetime begins with its own
answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

import msgspec

from services.gateway.accounts import Account
from services.gateway.kept_entries import KeptEntries
from services.gateway.prompt_weight import MESSAGE_CHARACTERS
from services.gateway.responses.ids import is_response_id, response_of, suffix_of
from services.gateway.responses.items import Item
from services.gateway.responses.schema import ResponseObject
from shared.errors import InvalidRequest, NotFound, TransportError
from shared.undecodable import UNDECODABLE

T = TypeVar("T")

MOST_READ = 16
"""Most responses that are read for one request's references. The last one of a conversation has all items before it."""


REPEATED_HEADER = "x-thermocline-repeated"
"""Header of a request that another gateway may have carried out already, and was lost before it answered."""


class KeptResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A kept response: the object as it was answered, and the ``items`` of its request, without instructions."""

    version: int = 1
    response: msgspec.Raw
    items: list[Item]

    def conversation(self) -> list[Item]:
        """Return the items that a continuation of this response begins with."""
        return [*self.items, *msgspec.json.decode(self.response, type=_Output).output]

    @property
    def weight(self) -> int:
        """The cost of continuing it, in characters (:mod:`services.gateway.prompt_weight`)."""
        return _items_weight(self.items) + memoryview(self.response).nbytes


class _Output(msgspec.Struct, frozen=True):
    output: list[Item]


class Run(Protocol):
    """A function that does work on about so many characters, in the event loop or, if it is long, in a thread."""

    async def __call__(self, work: Callable[[], T], characters: int) -> T:
        """Return the result of ``work``."""


class KeptResponses:
    """The kept responses of the cell."""

    def __init__(self, entries: KeptEntries, run: Run) -> None:
        """Keep responses as ``entries``; ``run`` does the encoding and decoding."""
        self._entries = entries
        self._run = run

    async def keep(self, account: Account, salt: str | None, response: ResponseObject, items: list[Item]) -> bool:
        """Keep a response; return False if it is too large, or the broker does not answer."""
        data = await self._run(partial(_entry, response, items), _items_weight(items))
        return await self._entries.keep(account, salt, response.id, data)

    async def find(self, account: Account, salt: str | None, response_id: str) -> KeptResponse:
        """Return the kept response.

        Raises NotFound, Unavailable, and TransportError for an entry that cannot be read.
        """
        data = await self._entries.read(account, salt, response_id) if is_response_id(response_id) else None
        if data is None:
            raise _absent(response_id)
        try:
            return await self._run(partial(msgspec.json.decode, data, type=KeptResponse), len(data))
        except UNDECODABLE as error:
            raise TransportError(f"the kept response {response_id} cannot be read") from error

    async def find_previous(self, account: Account, salt: str | None, response_id: str) -> KeptResponse:
        """Return the response that a request continues. Raises InvalidRequest (404, as OpenAI does) and Unavailable."""
        try:
            return await self.find(account, salt, response_id)
        except NotFound as error:
            raise InvalidRequest(
                f"Previous response with id {response_id[:64]!r} not found: it is another caller's, was not kept, or "
                "has expired.",
                param="previous_response_id",
                code="previous_response_not_found",
                status=404,
            ) from error

    async def find_items(
        self, account: Account, salt: str | None, ids: Sequence[str], known: Sequence[Item] = ()
    ) -> tuple[dict[str, Item], int]:
        """Return items by their ids, as far as they are kept, and the cost of what was read, in characters.

        ``known`` are items that were read already. Raises Unavailable and TransportError.
        """
        found = {item.id: item for item in known if item.id}
        asked, weight = set[str](), 0
        for item_id in reversed(ids):
            response_id = response_of(item_id)
            if item_id in found or not response_id or response_id in asked or len(asked) == MOST_READ:
                continue
            asked.add(response_id)
            try:
                kept = await self.find(account, salt, response_id)
            except NotFound:
                continue
            weight += kept.weight
            found |= {item.id: item for item in await self._run(kept.conversation, kept.weight) if item.id}
        return found, weight

    async def erase(self, account: Account, salt: str | None, response_id: str) -> None:
        """Erase a response. Raises NotFound, Unavailable."""
        if not (is_response_id(response_id) and await self._entries.erase(account, salt, response_id)):
            raise _absent(response_id)


def _entry(response: ResponseObject, items: list[Item]) -> bytes:
    """Return a response in its stored form."""
    kept = KeptResponse(response=msgspec.Raw(msgspec.json.encode(response)), items=_identified(items, response.id))
    return msgspec.json.encode(kept)


def _items_weight(items: Sequence[Item]) -> int:
    return MESSAGE_CHARACTERS * len(items)


def _identified(items: list[Item], response_id: str) -> list[Item]:
    """Return ``items`` with an id of its own and a status each, for listing."""
    suffix, named = suffix_of(response_id), dict[str, Item]()
    for place, item in enumerate(items):
        name = item.id if item.id and item.id not in named else f"item_{suffix}{place}"
        named[name] = msgspec.structs.replace(item, id=name, status=item.status or "completed")
    return list(named.values())


def _absent(response_id: str) -> NotFound:
    return NotFound(f"Response with id {response_id[:64]!r} not found.", param="response_id", code="response_not_found")
