"""POST /v1/chat/completions."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import msgspec
from fastapi import APIRouter, Request, Response

from services.gateway import admission, prompt_weight
from services.gateway.callers import caller_of
from services.gateway.chat_prompt import chat_prompt
from services.gateway.gateway import Gateway
from services.gateway.grammars.checking import scope_of
from services.gateway.grammars.requested import Asked as AskedGrammar
from services.gateway.grammars.requested import asked_grammar
from services.gateway.grammars.schemas import json_schema_grammar
from services.gateway.openai_schema.chat import ChatChunk, ChatRequest, ChatResponse
from services.gateway.openapi import describes
from services.gateway.pending import Generation
from services.gateway.replies.asking import AskedReply, ask_reply
from services.gateway.replies.tool_choice import asked_tools
from services.gateway.request_spans import trace_of
from services.gateway.serving import Asked, make_generation, serve
from services.gateway.ticket import Ticket
from services.gateway.views.answer import head_of, wanted_by
from services.gateway.views.chat_view import ChatView
from shared.errors import InvalidRequest
from shared.ids import new_id
from shared.messages.requests import MAX_GRAMMAR_BYTES, Grammar


def chat_router(gateway: Gateway) -> APIRouter:
    """Return the route of chat completions."""
    router = APIRouter(tags=["chat"])

    @router.post(
        "/v1/chat/completions",
        response_model=None,
        openapi_extra=describes(ChatRequest, ChatResponse, streams=ChatChunk),
        summary="Continue a conversation",
    )
    async def create_chat_completion(http: Request) -> Response:
        return await serve(gateway, http, ChatRequest, _ask)

    return router


async def _ask(gateway: Gateway, http: Request, request: ChatRequest, ticket: Ticket) -> Asked:
    answer_id = new_id("chatcmpl")
    generation = await chat_generation(gateway, http, request, ticket, answer_id=answer_id)
    view = ChatView(
        generation,
        head_of(answer_id, ticket.received_ns // 10**9, gateway.facts, generation.model),
        wanted_by(request, _logprobs(request)),
        gateway.tokenizer.texts,
        gateway.wall_ns,
    )
    return Asked(ticket, generation, view, conversation=request)


async def chat_generation(
    gateway: Gateway,
    http: Request,
    request: ChatRequest,
    ticket: Ticket,
    *,
    answer_id: str,
    is_clipped: bool = False,
) -> Generation:
    """Return the generation of a chat, not yet submitted; all APIs of conversations use this.

    ``is_clipped``: an answer longer than the context has room for is shortened to that room. Raises InvalidRequest,
    NotFound, ContextTooLong, TooManyConnections, RateLimited, and Unavailable for too many grammars.
    """
    facts = gateway.facts
    model = gateway.model(request.model)
    admission.check_chat(request)
    ticket.extend(request.n or 1)
    scope = scope_of(caller_of(http).tenant, request.cache_salt)
    grammar = await gateway.grammars.made(asked_grammar(request, request.response_format), scope=scope)
    namespace = gateway.namespace(caller_of(http).tenant, request.cache_salt, model.adapter)
    tokens, leases = await chat_prompt(gateway, request, namespace=namespace, ticket=ticket)
    asked = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    if is_clipped and asked is not None:
        asked = min(asked, max(1, gateway.max_context - len(tokens)))
    params = admission.sampling_params(
        request,
        facts,
        max_tokens=admission.output_room(len(tokens), asked, None, gateway.context_limit),
        logprobs=_logprobs(request),
        prompt_logprobs=request.prompt_logprobs,
        grammar=grammar,
    )
    reply = await asked_reply(gateway, request, tokens, grammar, scope)
    params = msgspec.structs.replace(params, grammar=reply.grammar, shown_special_tokens=reply.shown_special_tokens)
    return make_generation(
        gateway,
        request,
        model=model,
        answer_id=answer_id,
        account=caller_of(http),
        trace=trace_of(http),
        received_ns=ticket.received_ns,
        seed=request.seed if request.seed is not None else secrets.randbits(63),
        prompts=[(tokens, params)],
        new_reply=reply.new_reply,
        leases=leases,
    )


def _logprobs(request: ChatRequest) -> int | None:
    return (request.top_logprobs or 0) if request.logprobs else None


async def asked_reply(
    gateway: Gateway, request: ChatRequest, tokens: Sequence[int], grammar: Grammar | None, scope: str
) -> AskedReply:
    """Return how to read the answers to a conversation of these tokens, with this grammar.

    ``scope`` is that of its grammars. Raises InvalidRequest.
    """

    def work() -> AskedReply:
        return ask_reply(gateway.replies, gateway.tokenizer, request, tokens, text_grammar=grammar)

    # Without tools only the prompt's last tokens are read, which takes less time than a thread's handover.
    reply = await gateway.tokenizer.run(work, prompt_weight.weight(request) if request.tools else 0)
    if reply.grammar is None or reply.grammar is grammar:
        return reply
    try:
        return replace(reply, grammar=await gateway.grammars.checked(reply.grammar, param="tools", scope=scope))
    except InvalidRequest:
        if len(reply.grammar.text.encode()) <= MAX_GRAMMAR_BYTES:  # One that is too long has not been compiled.
            await _check_tools(gateway, request, scope)
        raise


async def _check_tools(gateway: Gateway, request: ChatRequest, scope: str) -> None:
    """Raise InvalidRequest, which names the tool, for the first schema that binds an answer and does not compile."""
    ask = asked_tools(request.tools, request.tool_choice, request.parallel_tool_calls)
    if ask is None:  # The grammar is of reasoning and a text.
        return
    for tool in ask.tools:
        if ask.is_forced or tool.is_strict:
            param = f"{tool.param}.function.parameters"
            make = partial(json_schema_grammar, tool.parameters, param=param)
            await gateway.grammars.made(AskedGrammar(param, make), scope=scope)
