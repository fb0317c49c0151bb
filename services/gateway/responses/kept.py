"""Responses that are kept in the cell, so that any of its gateways can continue them.

An entry holds the whole conversation, so that continuing it takes one read, and its lifetime begins with its own
answer. Its name contains its owner, which is the caller's tenant, and the digest of the request's salt: other callers'
names do not lead to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from typing import Protocol, TypeVar

import msgspec

from services.gateway import metrics
from services.gateway.accounts import Account
from services.gateway.prompt_weight import MESSAGE_CHARACTERS
from services.gateway.responses.ids import is_response_id, suffix_of
from services.gateway.responses.items import Item
from services.gateway.responses.schema import ResponseObject
from shared import logs
from shared.bus.protocol import Bus
from shared.errors import InvalidRequest, NotFound, PayloadTooLarge, ThermoclineError, TransportError
from shared.undecodable import UNDECODABLE

T = TypeVar("T")

_log = logs.get_logger("gateway.responses")


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
    """The kept responses of the cell. Each call is one round trip to the broker."""

    def __init__(self, bus: Bus, run: Run) -> None:
        """Keep responses over ``bus``; ``run`` does the encoding and decoding."""
        self._bus = bus
        self._run = run

    async def keep(self, account: Account, salt: str | None, response: ResponseObject, items: list[Item]) -> bool:
        """Keep a response; return False if it is too large, or the broker does not answer."""
        data = await self._run(partial(_entry, response, items), _items_weight(items))
        try:
            await self._bus.keep(_name(account, salt, response.id), data)
        except ThermoclineError as error:
            reason = "too_large" if isinstance(error, PayloadTooLarge) else "unavailable"
            metrics.RESPONSES_NOT_KEPT.labels(reason).inc()
            _log.warning("response_not_kept", response_id=response.id, reason=error.message)
            return False
        return True

    async def find(self, account: Account, salt: str | None, response_id: str) -> KeptResponse:
        """Return the kept response.

        Raises NotFound, Unavailable, and TransportError for an entry that cannot be read.
        """
        data = await self._bus.kept(_name(account, salt, response_id))
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
            absent = InvalidRequest(
                f"Previous response with id {response_id[:64]!r} not found: it is another caller's, was not kept, or "
                "has expired.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
            absent.status = 404
            raise absent from error

    async def erase(self, account: Account, salt: str | None, response_id: str) -> None:
        """Erase a response. Raises NotFound, Unavailable."""
        if not await self._bus.forget(_name(account, salt, response_id)):
            raise _absent(response_id)

    async def erase_all(self, account: Account | None, salt: str | None) -> int:
        """Erase all responses of a caller, of a salt, or of both; return how many there were. Raises Unavailable."""
        return await self._bus.forget(f"{_owner(account) if account else '*'}.{_digest(salt) if salt else '*'}.*")


def _entry(response: ResponseObject, items: list[Item]) -> bytes:
    """Return a response in its stored form."""
    kept = KeptResponse(response=msgspec.Raw(msgspec.json.encode(response)), items=_identified(items, response.id))
    return msgspec.json.encode(kept)


def _items_weight(items: Sequence[Item]) -> int:
    return MESSAGE_CHARACTERS * len(items)


def _identified(items: list[Item], response_id: str) -> list[Item]:
    """Return ``items`` with an id and a status each, for listing."""
    suffix = suffix_of(response_id)
    return [
        msgspec.structs.replace(item, id=item.id or f"item_{suffix}{place}", status=item.status or "completed")
        for place, item in enumerate(items)
    ]


def _absent(response_id: str) -> NotFound:
    return NotFound(f"Response with id {response_id[:64]!r} not found.", param="response_id", code="response_not_found")


def _name(account: Account, salt: str | None, response_id: str) -> str:
    """Return the entry's name. Raises NotFound for an id of another form, which may contain anything."""
    if not is_response_id(response_id):
        raise _absent(response_id)
    return f"{_owner(account)}.{_digest(salt or '')}.{response_id}"


def _owner(account: Account) -> str:
    # With its salt: a tenant whose salt was changed loses its earlier responses, as it loses its cache.
    return _digest(f"{account.name}\0{account.tenant.salt}")


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
