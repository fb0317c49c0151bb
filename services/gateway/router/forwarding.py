"""Forwarding of one request: choose a cell, send it there, and to the next where that cell refuses it.

A request without any answer sent to its client may be tried elsewhere: it leaves nothing in a cell but cached KV. A
cell refuses with 503, or with 429 because its queue or a gateway is full; a tenant's own limit (429 with another code)
is an answer like any other, since asking the next cell would multiply the limit by the number of cells.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Any

import msgspec
import xxhash
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from services.gateway.body import Body
from services.gateway.disconnect import DisconnectWatch
from services.gateway.error_answers import MESSAGES, is_messages_path
from services.gateway.keys import KEY_HEADER
from services.gateway.messages_api.errors import OVERLOADED
from services.gateway.prompt_heads import Asked, asked_of
from services.gateway.responses.ids import cell_of
from services.gateway.responses.kept import REPEATED_HEADER
from services.gateway.router import metrics
from services.gateway.router.choice import Choice
from services.gateway.router.parts import Router
from services.gateway.router.paths import PROMPTS, RESPONSES, response_id_of, target_of
from services.gateway.router.relay import Relay, StreamLost, sent_headers
from services.gateway.router.upstream import Exchange, Header, Unreachable, Upstream, UpstreamLost
from shared import logs
from shared.errors import DeadlineExceeded, NotFound, QueueFull, RequestCancelled, ThermoclineError, Unavailable

_KEYS = (b"authorization", KEY_HEADER.encode())

FULL_CODES = ("queue_full", "too_many_requests")
"""Codes of 429 for which another cell may accept the request."""

REFUSAL_BYTES = 16 * 1024
GATEWAYS_OF_A_CELL = 2
"""Most gateways of one cell that are tried before the next cell."""

_DROPPED = (b"host", b"content-length", b"content-encoding", b"expect", b"accept-encoding")
REPEATED: Header = (REPEATED_HEADER.encode(), b"1")

_log = logs.get_logger("router.http")


class _Refusal(Exception):
    """A cell refused the request: ``error`` says why. ``is_full``: its other gateways will refuse it too."""

    def __init__(self, error: ThermoclineError, *, is_full: bool) -> None:
        super().__init__(error.message)
        self.error = error
        self.is_full = is_full


class _ErrorDetail(msgspec.Struct):
    code: str | None = None
    message: str = ""


class _ErrorBody(msgspec.Struct):
    error: _ErrorDetail = msgspec.field(default_factory=_ErrorDetail)


@dataclass(slots=True, eq=False)
class _Sent:
    """The request as it is sent to a gateway.

    ``over`` is set when it is ended before its answer is: its client went, it took too long, or the router shuts down.
    ``why`` says so.
    """

    method: str
    path: str
    target: bytes
    headers: list[Header]
    body: Body
    asked: Asked
    session: str
    cell: str  # The cell that keeps the response or thread it refers to, "" if any cell can answer.
    over: asyncio.Event = field(default_factory=asyncio.Event)
    why: ThermoclineError | None = None
    exchange: Exchange | None = None

    def end(self, why: ThermoclineError) -> None:
        """End the exchange; the first reason stays."""
        self.why = self.why or why
        self.over.set()
        if self.exchange is not None:
            self.exchange.close()

    def repeat(self) -> None:
        """Note that a gateway was lost that may have done what is asked."""
        if REPEATED not in self.headers:
            self.headers.append(REPEATED)

    def check(self) -> None:
        """Raise what ended the request, if anything has."""
        if self.why is not None:
            raise self.why


async def forward(router: Router, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer one request.

    Raises ThermoclineError; after the first bytes, the client has the error already where it can.
    """
    router.check_open()
    config = router.config
    router.slots.check(1)
    async with contextlib.AsyncExitStack() as held:
        body = await held.enter_async_context(router.bodies.read(Request(scope, receive)))
        held.enter_context(router.slots.taken())
        asked = await router.bodies.parsed(body, lambda: _asked(router, body))
        started_s = router.clock()
        sent = _sent(router, scope, body, asked)
        watch = DisconnectWatch(
            receive, lambda: sent.end(RequestCancelled("the client went away", code="client_disconnected"))
        )
        request_s = config.request_timeout_ms / 1000
        late = DeadlineExceeded(f"no whole answer within {request_s:g} s", code="request_timeout")
        timer = asyncio.get_running_loop().call_later(request_s, sent.end, late)
        relay = Relay(
            send,
            idle_s=config.idle_timeout_ms / 1000,
            send_s=config.send_timeout_ms / 1000,
            why_ended=lambda: sent.why,
            path=sent.path,
        )
        router.running[sent.end] = None
        try:
            await _try_cells(router, sent, relay, started_s)
        finally:
            del router.running[sent.end]
            timer.cancel()
            watch.close()


def _asked(router: Router, body: Body) -> Asked:
    with metrics.CHOICE_TIME.time():
        return asked_of(body, router.default_model)


def _sent(router: Router, scope: Scope, body: Body, asked: Asked) -> _Sent:
    path: str = scope["path"]
    kept_id = response_id_of(path) or (asked.previous if path.startswith((RESPONSES, MESSAGES)) else "")
    if path not in PROMPTS:
        asked = Asked(model=asked.model)
    headers = sent_headers(scope)
    wanted = router.config.session_header.lower().encode()
    session = next((value.decode("latin-1") for key, value in headers if key == wanted), "") or asked.session
    return _Sent(
        method=scope["method"],
        path=path,
        target=target_of(scope),
        headers=[(key, value) for key, value in headers if key not in _DROPPED],
        body=body,
        asked=asked,
        session=_own_session(session, headers),
        cell=cell_of(kept_id, router.gateways),
    )


def _own_session(session: str, headers: list[Header]) -> str:
    """Return a session's name apart from those of other keys' holders, in 16 digits; "" for none."""
    if not session:
        return ""
    keys = [value for name, value in headers if name in _KEYS]
    return xxhash.xxh3_64_hexdigest(b"\n".join([*keys, session.encode("utf-8", "surrogatepass")]))


async def _try_cells(router: Router, sent: _Sent, relay: Relay, started_s: float) -> None:
    """Try one cell after another; only the one that keeps the response to which the request refers, if there is one.

    Raises what ended the request, StreamEnded, or QueueFull or Unavailable when none accepts the request.
    """
    refusals: list[ThermoclineError] = []
    refused = {name for name in router.gateways if name != sent.cell} if sent.cell else set()
    while len(refusals) < router.config.tries:
        choice = router.cells.choose(sent.asked, session=sent.session, without=refused)
        if choice is None:
            break
        refused.add(choice.name)
        for gateway in router.open_gateways(choice.name)[:GATEWAYS_OF_A_CELL]:
            try:
                await _try(router, sent, relay, choice, gateway, started_s)
                return
            except _Refusal as refusal:
                refusals.append(refusal.error)
                metrics.FALLBACKS.labels(choice.name, refusal.error.code).inc()
                _log.info("fell_back", cell=choice.name, gateway=gateway.url, reason=refusal.error.message)
                if isinstance(refusal.error, UpstreamLost) and not isinstance(refusal.error, Unreachable):
                    sent.repeat()
                if refusal.is_full or len(refusals) >= router.config.tries:
                    break
    raise _nobody(refusals, sent)


async def _try(router: Router, sent: _Sent, relay: Relay, cell: Choice, gateway: Upstream, started_s: float) -> None:
    """Ask one gateway and relay its answer. Raises _Refusal if nothing has been sent to the client."""
    cells = router.cells
    cells.begin(cell, sent.asked.head, router.clock(), session=sent.session)
    gateway.in_flight += 1
    metrics.IN_FLIGHT.labels(cell.name).inc()
    outcome = "cancelled"
    try:
        exchange = await _head(sent, gateway)
        refusal = await _refusal_of(exchange)
        if refusal is not None:
            outcome = "refused"
            raise refusal
        metrics.TIME_TO_HEAD.observe(router.clock() - started_s)
        await relay.relay(exchange, cell.name)
        outcome = "ok" if exchange.head.status < 400 else "error"
    except UpstreamLost as error:
        outcome = "lost"
        if not error.has_answered and not gateway.lost.is_set():
            router.lost(cell.name, gateway, error.message)
        raise _Refusal(error, is_full=False) from error
    except StreamLost:
        outcome = "broken"
        metrics.BROKEN_STREAMS.labels(cell.name).inc()
        raise
    finally:
        if sent.exchange is not None:
            sent.exchange.close()
            sent.exchange = None
        gateway.in_flight -= 1
        cells.end(cell.name, answered_bytes=sent.asked.head.nbytes if outcome == "ok" else 0)
        metrics.IN_FLIGHT.labels(cell.name).dec()
        metrics.REQUESTS.labels(cell.name, outcome).inc()
        if outcome == "ok":
            metrics.PROMPT_BYTES.labels(cell.name).inc(sent.asked.head.nbytes)
            metrics.MATCHED_BYTES.labels(cell.name).inc(cell.matched)


async def _head(sent: _Sent, gateway: Upstream) -> Exchange:
    """Wait for the head of an answer; the request has its exchange from then on.

    Raises UpstreamLost, also as soon as health checks find the gateway lost, and what ended the request.
    """
    sent.check()
    asking: asyncio.Task[Exchange] = asyncio.create_task(
        gateway.send(sent.method, sent.target, sent.headers, sent.body)
    )
    lost: asyncio.Task[Any] = asyncio.create_task(gateway.lost.wait())
    over: asyncio.Task[Any] = asyncio.create_task(sent.over.wait())
    try:
        await asyncio.wait({asking, lost, over}, return_when=asyncio.FIRST_COMPLETED)
        if asking.done():
            sent.exchange = asking.result()
            sent.check()
            return sent.exchange
        sent.check()
        raise UpstreamLost(f"{gateway.url} no longer answers")
    finally:
        for wait in (lost, over):
            wait.cancel()
        if not asking.done():
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)


async def _refusal_of(exchange: Exchange) -> _Refusal | None:
    """Return the cell's refusal of a request that another cell may accept; otherwise None, with the body unread.

    Raises UpstreamLost.
    """
    status = exchange.head.status
    if status not in (429, 503, OVERLOADED):
        return None
    if status != 503 and not exchange.head.header(b"content-type").startswith(b"application/json"):
        return None
    body = await exchange.whole(REFUSAL_BYTES)
    try:
        detail = msgspec.json.decode(body, type=_ErrorBody).error
    except msgspec.DecodeError:
        detail = _ErrorDetail()
    if status == 429 and detail.code not in FULL_CODES:
        exchange.unread(body)
        return None
    retry = exchange.head.header(b"retry-after")
    retry_after_ms = int(retry) * 1000 if retry.isdigit() and len(retry) < 7 else 0
    is_full = detail.code in FULL_CODES
    kind = QueueFull if is_full else Unavailable
    error = kind(detail.message[:500] or f"the cell answered {status}", retry_after_ms=retry_after_ms)
    return _Refusal(error, is_full=is_full)


def _nobody(refusals: list[ThermoclineError], sent: _Sent) -> ThermoclineError:
    """Return the client's error when no cell accepts its request: 429 where one is only full, else 503.

    That the only cell that could is away, because it keeps a response, is no outage of all cells, and has a code of its
    own. A thread that it keeps is not found: its client sends the whole conversation then, which any cell can answer.
    """
    wait_ms = min((refusal.retry_after_ms for refusal in refusals if refusal.retry_after_ms), default=1_000)
    last = f"; the last error: {refusals[-1].message}" if refusals else ""
    if any(isinstance(refusal, QueueFull) for refusal in refusals):
        error: ThermoclineError = QueueFull(f"no cell accepts the request now{last}", retry_after_ms=wait_ms)
    elif sent.cell and is_messages_path(sent.path):
        text = f"the cell {sent.cell}, which keeps this thread, does not answer now{last}; send the whole conversation"
        error = NotFound(text, param="thread.previous_message_id", code="thread_not_found")
    elif sent.cell:
        text = f"the cell {sent.cell}, which keeps this response, does not answer now{last}"
        error = Unavailable(text, retry_after_ms=wait_ms, code="response_cell_away")
    elif refusals:
        error = Unavailable(f"no cell accepts the request now{last}", retry_after_ms=wait_ms)
    else:
        error = Unavailable("no cell is available", retry_after_ms=wait_ms, code="no_cell")
    metrics.REFUSED.labels(error.code).inc()
    return error
