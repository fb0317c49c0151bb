"""POST /v1/messages and /v1/messages/count_tokens, in Anthropic's shapes."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request, Response

from services.gateway import admission
from services.gateway.callers import caller_of
from services.gateway.chat_prompt import count_chat
from services.gateway.field_names import fields_named
from services.gateway.gateway import Gateway
from services.gateway.json_response import json_response
from services.gateway.messages_api.answers import EVENTS, MessagesResponse, TokenCount
from services.gateway.messages_api.conversion import RENAMES, chat_request
from services.gateway.messages_api.errors import MessagesError
from services.gateway.messages_api.schema import CountTokensRequest, MessagesRequest
from services.gateway.messages_api.view import MessagesView
from services.gateway.openai_schema.chat import ChatRequest
from services.gateway.openapi import describes
from services.gateway.responses.ids import new_message_id
from services.gateway.routes.chat import chat_generation
from services.gateway.serving import Asked, serve
from services.gateway.ticket import Ticket
from shared.errors import InvalidRequest


def messages_router(gateway: Gateway) -> APIRouter:
    """Return the routes of Anthropic's messages and of their token count."""
    router = APIRouter(tags=["messages"])

    @router.post(
        "/v1/messages",
        response_model=None,
        openapi_extra=describes(MessagesRequest, MessagesResponse, streams=EVENTS, errors=MessagesError),
        summary="Continue a conversation, in Anthropic's API",
    )
    async def create_message(http: Request) -> Response:
        return await serve(gateway, http, MessagesRequest, _ask)

    @router.post(
        "/v1/messages/count_tokens",
        response_model=None,
        openapi_extra=describes(CountTokensRequest, TokenCount, errors=MessagesError),
        summary="Number of tokens of a conversation, in Anthropic's API",
    )
    async def count_tokens(http: Request) -> Response:
        account = caller_of(http)
        async with gateway.bodies.read(http) as body:
            request = await gateway.bodies.decode(body, CountTokensRequest)
        with account.taken(), gateway.slots.taken():
            chat = await _chat_request(gateway, request, len(body))
            with fields_named(RENAMES):
                tokens = await count_chat(gateway, account, chat)
        return json_response(TokenCount(input_tokens=tokens))

    return router


async def _ask(gateway: Gateway, http: Request, request: MessagesRequest, ticket: Ticket) -> Asked:
    account, answer_id = caller_of(http), new_message_id(gateway.config.cell)
    thread, kept_characters = request.thread, 0
    if thread is not None:
        if not gateway.config.keep_responses:
            raise InvalidRequest(
                "this gateway keeps no conversations: send the whole one without `thread`",
                param="thread",
                code="thread_unsupported_request",
            )
        request, kept_characters = await gateway.threads.whole(account, request, thread)
    chat = await _chat_request(gateway, request, ticket.body_bytes + kept_characters)
    with fields_named(RENAMES):
        generation = await chat_generation(gateway, http, chat, ticket, answer_id=answer_id, is_clipped=True)
    view = MessagesView(
        generation,
        answer_id,
        generation.model,
        max_tokens=request.max_tokens,
        said=gateway.said,
        hides_thinking=request.thinking is not None and request.thinking.display == "omitted",
    )

    async def keep() -> None:
        if thread is not None:
            previous = thread.previous_message_id
            await gateway.threads.keep(account, answer_id, request, view.reply(), previous=previous)

    return Asked(ticket, generation, view, keep, conversation=chat)


async def _chat_request(gateway: Gateway, request: CountTokensRequest, nbytes: int) -> ChatRequest:
    """Return the chat that a body of ``nbytes`` bytes asks for. Raises InvalidRequest, ContextTooLong."""
    variables, reasons = gateway.tokenizer.template_variables, gateway.replies.reasoning is not None
    admission.check_messages(len(request.messages), gateway.facts.max_context)
    convert = partial(chat_request, request, variables, reasons=reasons, said=gateway.said.find)
    return await gateway.tokenizer.run(convert, nbytes)
