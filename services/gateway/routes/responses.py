"""POST /v1/responses and /v1/responses/input_tokens, in OpenAI's shapes."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response

from services.gateway.callers import caller_of
from services.gateway.chat_prompt import count_chat
from services.gateway.field_names import fields_named
from services.gateway.gateway import Gateway
from services.gateway.json_response import json_response
from services.gateway.openai_schema.chat import ChatRequest
from services.gateway.openapi import describes
from services.gateway.pending import Generation
from services.gateway.responses.conversion import (
    RENAMES,
    chat_request,
    check_responses,
    own_items,
    references,
    repeated_format,
)
from services.gateway.responses.events import EVENTS
from services.gateway.responses.ids import new_response_id
from services.gateway.responses.items import Item
from services.gateway.responses.schema import (
    InputTokens,
    InputTokensRequest,
    ReasoningOptions,
    ResponseObject,
    ResponsesRequest,
    TextOptions,
)
from services.gateway.responses.tools import names_of, repeated_choice, repeated_tools
from services.gateway.responses.view import ResponsesView
from services.gateway.routes.chat import chat_generation
from services.gateway.serving import Asked, serve
from services.gateway.ticket import Ticket


def responses_router(gateway: Gateway) -> APIRouter:
    """Return the routes of responses and of their token count."""
    router = APIRouter(tags=["responses"])

    @router.post(
        "/v1/responses",
        response_model=None,
        openapi_extra=describes(ResponsesRequest, ResponseObject, streams=EVENTS),
        summary="Continue a conversation, in OpenAI's newer API",
    )
    async def create_response(http: Request) -> Response:
        return await serve(gateway, http, ResponsesRequest, _ask)

    @router.post(
        "/v1/responses/input_tokens",
        response_model=None,
        openapi_extra=describes(InputTokensRequest, InputTokens),
        summary="Number of tokens of a conversation, in OpenAI's newer API",
    )
    async def count_input_tokens(http: Request) -> Response:
        account = caller_of(http)
        async with gateway.bodies.read(http) as body:
            request = await gateway.bodies.decode(body, InputTokensRequest)
        with account.taken(), gateway.slots.taken():
            _, chat = await _conversation(gateway, http, request, len(body))
            with fields_named(RENAMES):
                tokens = await count_chat(gateway, account, chat)
        return json_response(InputTokens(input_tokens=tokens))

    return router


async def _ask(gateway: Gateway, http: Request, request: ResponsesRequest, ticket: Ticket) -> Asked:
    account, answer_id = caller_of(http), new_response_id(gateway.config.cell)
    items, chat = await _conversation(gateway, http, request, ticket.body_bytes)
    with fields_named(RENAMES):
        generation = await chat_generation(gateway, http, chat, ticket, answer_id=answer_id)
    view = ResponsesView(
        generation,
        _begun(gateway, request, generation, answer_id, ticket.received_ns // 10**9),
        logprobs=(chat.top_logprobs or 0) if chat.logprobs else None,
        texts=gateway.tokenizer.texts,
        names=names_of(request.tools),
        now_ns=gateway.wall_ns,
    )

    async def finish() -> None:
        view.finish()
        if view.response.store and not await gateway.kept.keep(account, request.cache_salt, view.response, items):
            view.response = msgspec.structs.replace(view.response, store=False)

    return Asked(ticket, generation, view, finish, conversation=chat)


async def _conversation(
    gateway: Gateway, http: Request, request: InputTokensRequest, nbytes: int
) -> tuple[list[Item], ChatRequest]:
    """Return all items, those that were kept first, and the chat request made from them. The body had ``nbytes`` bytes.

    Raises InvalidRequest, Unavailable.
    """
    check_responses(request)
    account, salt = caller_of(http), request.cache_salt
    earlier: list[Item] = []
    if request.previous_response_id is not None:
        kept = await gateway.kept.find_previous(account, salt, request.previous_response_id)
        nbytes += kept.weight
        earlier = await gateway.tokenizer.run(kept.conversation, kept.weight)
    known, weight = await gateway.kept.find_items(account, salt, references(request), earlier)
    nbytes += weight

    def convert() -> tuple[list[Item], ChatRequest]:
        items = [*earlier, *own_items(request, known)]
        return items, chat_request(request, items, earlier=len(earlier))

    return await gateway.tokenizer.run(convert, nbytes)


def _begun(
    gateway: Gateway, request: ResponsesRequest, generation: Generation, answer_id: str, created: int
) -> ResponseObject:
    """Return the response before any output."""
    sampling = generation.choices[0].request.sampling
    return ResponseObject(
        id=answer_id,
        created_at=created,
        status="in_progress",
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
        model=generation.model,
        output=[],
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning=request.reasoning or ReasoningOptions(),
        safety_identifier=request.safety_identifier,
        store=request.store is not False and gateway.config.keep_responses,
        temperature=sampling.temperature,
        text=TextOptions(format=repeated_format(request.text)),
        tool_choice=repeated_choice(request.tool_choice),
        tools=repeated_tools(request.tools),
        top_logprobs=request.top_logprobs or 0,
        top_p=sampling.top_p,
        user=request.user,
    )
