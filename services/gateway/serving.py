"""From a prepared generation to an HTTP response, whole or streamed."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.accounts import Account
from services.gateway.admin_key import holds_admin_key
from services.gateway.admission import cache_hints, check_priority, derive_seed
from services.gateway.cache_hints import returns_in_ms, session_lease, with_leases
from services.gateway.callers import caller_of
from services.gateway.disconnect import DisconnectWatch
from services.gateway.event_stream import EventStream, StreamTimes
from services.gateway.gateway import Gateway, ServedModel
from services.gateway.openai_schema.chat import ChatRequest
from services.gateway.openai_schema.sampling import CacheOptions, SamplingFields
from services.gateway.pending import Choice, Generation
from services.gateway.replies.reading import Reply
from services.gateway.ticket import Ticket
from services.gateway.views.answer import AnswerView
from shared.errors import RequestCancelled
from shared.ids import key_digest
from shared.messages.base import pack_int32
from shared.messages.requests import Lease, SamplingParams, SubmitRequest

R = TypeVar("R")


def make_generation(
    gateway: Gateway,
    fields: SamplingFields,
    *,
    model: ServedModel,
    answer_id: str,
    account: Account,
    trace: str = "",
    received_ns: int,
    seed: int,
    prompts: Sequence[tuple[Sequence[int], SamplingParams]],
    new_reply: Callable[[str], Reply] | None = None,
    leases: tuple[Lease, ...] = (),
) -> Generation:
    """Return one choice per prompt and ``n``, in OpenAI's order: all choices of the first prompt come first.

    ``new_reply`` makes each choice's reader from its request id (:mod:`services.gateway.replies.asking`), and
    ``leases`` are those of breakpoints in the only prompt. Raises InvalidRequest for a fidelity that this deployment or
    an adapter does not allow, and for a priority above the tenant's.
    """
    count = fields.n or 1
    tenant = account.tenant
    namespace, quota = gateway.namespace(tenant, fields.cache_salt, model.adapter), tenant.quota()
    priority = check_priority(fields.priority, tenant.max_priority)
    choices = []
    for prompt, (tokens, params) in enumerate(prompts):
        packed = pack_int32(tokens)
        is_scored = params.prompt_logprobs is not None
        importance = gateway.fidelity.importance(
            fields.cache or CacheOptions(),
            is_scored=is_scored,
            is_adapted=bool(model.adapter),
            tenant=account.name,
        )
        hints = cache_hints(fields, params, importance)
        asked = (*leases, *session_lease(fields, len(tokens), prompt))
        for number in range(count):
            kept = asked if not number else ()  # A prompt is leased once, however many answers it has.
            position = prompt * count + number
            request = SubmitRequest(
                request_id=f"{answer_id}-{position}",
                gateway_id=gateway.gateway_id,
                namespace=namespace,
                prompt=packed,
                sampling=msgspec.structs.replace(params, seed=derive_seed(seed, number)),
                tenant=account.name,
                priority=priority,
                deadline_ms=fields.deadline_ms or 0,
                cache=with_leases(hints, kept, tenant.max_leased_tokens, returns_in_ms(fields)),
                # One key for all of a tenant, so that deleting it makes all of the tenant unreadable.
                key_id=key_digest(tenant.salt or fields.cache_salt or ""),
                max_queued=tenant.max_queued,
                quota=quota,
                trace=trace,
                received_ns=received_ns,
                adapter=model.adapter,
            )
            reply = new_reply(request.request_id) if new_reply is not None else None
            choices.append(Choice(request, position, prompt, gateway.clock(), reply))
    return Generation(choices, is_streaming=bool(fields.stream), model=model.name)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that is ready to be submitted, the view that writes its answer, and the ticket that it holds meanwhile.

    ``before_closing`` is awaited between the last token and the end of the answer. ``conversation`` is the chat that
    the prompt was rendered from, if it was.
    """

    ticket: Ticket
    generation: Generation
    view: AnswerView
    before_closing: Callable[[], Awaitable[None]] | None = None
    conversation: ChatRequest | None = None


async def serve(
    gateway: Gateway, http: Request, schema: type[R], ask: Callable[[Gateway, Request, R, Ticket], Awaitable[Asked]]
) -> Response:
    """Read a request of this schema, have ``ask`` prepare it, submit, wait and respond.

    On return the ticket is closed, or the response owns it. A stream starts with its first token (or a while later
    without one), so that a failure before it is an HTTP error with a status of its own.
    """
    gateway.check_open()
    async with gateway.bodies.read(http) as body:
        received_ns = gateway.wall_ns()
        request = await gateway.bodies.decode(body, schema)
        with Ticket(gateway, caller_of(http), received_ns) as ticket:
            ticket.read(body)
            asked = await ask(gateway, http, request, ticket)
    with ticket:
        return await _answer(gateway, http, asked)


async def _answer(gateway: Gateway, http: Request, asked: Asked) -> Response:
    config, ticket, generation, view = gateway.config, asked.ticket, asked.generation, asked.view
    watch = DisconnectWatch(http.receive, lambda: generation.abandon(_gone()))
    ticket.hold(generation, watch)
    ticket.spend_prompts(generation)
    _begin(gateway, http, asked)
    await gateway.dispatcher.start(generation)
    before_closing = asked.before_closing
    if view.wants_explanation:
        before_closing = functools.partial(_explain, gateway, http, generation, view)
    stream: EventStream | None = None
    if generation.is_streaming:
        times = StreamTimes(keepalive_s=config.keepalive_ms / 1000, send_s=config.send_timeout_ms / 1000)
        # All of this is ready when the first token comes.
        stream = EventStream(generation, view, ticket, times, before_closing)
        view.prepare()
        await generation.changed(config.stream_start_ms / 1000)
    else:
        await generation.finished(config.request_timeout_ms / 1000 + 5)
    failure = generation.first_failure()
    if failure is not None:
        raise failure
    if stream is not None:
        return stream
    if before_closing is not None:
        await before_closing()
    body = view.whole()
    ticket.close()
    return Response(body, media_type="application/json")


def _begin(gateway: Gateway, http: Request, asked: Asked) -> None:
    """Note the time of submission of the choices, so that they can be explained."""
    generation = asked.generation
    for choice in generation.choices:
        choice.started_s, choice.submitted_ns = gateway.clock(), gateway.wall_ns()
    http_id = http.scope.get("state", {}).get("request_id", "")
    gateway.recent.begin(generation, http_id=http_id, endpoint=http.scope["path"], conversation=asked.conversation)


async def _explain(gateway: Gateway, http: Request, generation: Generation, view: AnswerView) -> None:
    """Give the view an explanation of the first choice; with the admin key, the operators' form."""
    is_admin = holds_admin_key(http.headers, gateway.config.admin_key)
    view.explanation = await gateway.explainer.explain_first(generation, is_admin=is_admin)


def _gone() -> RequestCancelled:
    return RequestCancelled("the client went away", code="client_disconnected")
