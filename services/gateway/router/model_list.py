"""The models of all cells: one cell per set of models is asked, with the caller's own headers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.types import Scope

from services.gateway.messages_api.models import ANTHROPIC_VERSION
from services.gateway.router.parts import Router
from services.gateway.router.paths import target_of
from services.gateway.router.relay import CELL_HEADER, CLIENT_HEADER, forwardable, sent_headers
from services.gateway.router.upstream import Header, Upstream, UpstreamLost
from shared.errors import Unavailable

MOST_BYTES = 2**20
ANSWER_S = 5.0

_PASSED = (b"authorization", b"x-api-key", ANTHROPIC_VERSION.encode(), b"accept", CLIENT_HEADER)

Answer = tuple[int, list[Header], bytes]


async def model_list(router: Router, scope: Scope) -> Answer:
    """Return status, headers and body; the length is not among the headers.

    A refusal by every cell, as for a wrong key, is passed on; a single model is looked up in one cell of each set.
    Raises Unavailable when no cell answers.
    """
    path, target = scope["path"], target_of(scope)
    sent = [(key, value) for key, value in sent_headers(scope) if key in _PASSED]
    asked = [
        _get(cell, gateway, target, sent) for cell in _one_of_each(router) for gateway in router.open_gateways(cell)[:1]
    ]
    answers = [answer for answer in await asyncio.gather(*asked) if answer is not None]
    if not answers:
        raise Unavailable("no cell is available", retry_after_ms=1_000, code="no_cell")
    good = [answer for answer in answers if answer[0] == 200]
    if not good or path != "/v1/models" or len(good) == 1:
        return (good or answers)[0]
    page: dict[str, Any] = {}
    models: dict[str, Any] = {}
    for _, _, body in good:
        try:
            told = msgspec.json.decode(body)
            page = page or told
            for card in told["data"]:
                models.setdefault(str(card["id"]), card)
        except (msgspec.DecodeError, KeyError, TypeError):
            continue  # Not an answer of a gateway; the others' models are listed.
    ids = {"first_id": next(iter(models), None), "last_id": next(reversed(models), None)}
    page |= {"data": list(models.values()), **(ids if "first_id" in page else {})}
    return 200, [(b"content-type", b"application/json")], msgspec.json.encode(page)


def _one_of_each(router: Router) -> list[str]:
    """Return open cells, one for each set of models; cells without a report are all included."""
    told = router.cells.models()
    by_models: dict[tuple[str, ...], str] = {}
    for cell, models in told.items():
        by_models.setdefault(models or (cell, ""), cell)
    return list(by_models.values())


async def _get(cell: str, gateway: Upstream, target: bytes, headers: Sequence[Header]) -> Answer | None:
    try:
        async with asyncio.timeout(ANSWER_S):
            exchange = await gateway.send("GET", target, headers)
            try:
                body = await exchange.whole(MOST_BYTES)
            finally:
                exchange.close()
    except (UpstreamLost, TimeoutError):
        return None
    own = (b"content-length", b"date")  # Of the answer here.
    told = [(key, value) for key, value in forwardable(exchange.head.headers) if key not in own]
    return exchange.head.status, [*told, (CELL_HEADER, cell.encode())], body
