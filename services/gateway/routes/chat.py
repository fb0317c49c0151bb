"""POST /v1/chat/completions."""

from __future__ import annotations

import secrets

from fastapi import APIRouter, Request, Response

from services.gateway import admission, conversation, prompt_weight
from services.gateway.body import Body
from services.gateway.callers import caller_of
from services.gateway.gateway import Gateway
from services.gateway.openai_schema.chat import ChatChunk, ChatRequest, ChatResponse
from services.gateway.openapi import describes
from services.gateway.request_spans import trace_of
from services.gateway.serving import Asked, answer, make_generation
from services.gateway.ticket import Ticket
from services.gateway.views.answer import head_of, wanted_by
from services.gateway.views.chat_view import ChatView
from shared.ids import new_id


def chat_router(gateway: Gateway) -> APIRouter:
    router = APIRouter(tags=["chat"])

    @router.post(
        "/v1/chat/completions",
        response_model=None,
        openapi_extra=describes(ChatRequest, ChatResponse, streams=ChatChunk),
        summary="Continue a conversation",
    )
    async def create_chat_completion(http: Request) -> Response:
        gateway.check_open()
        async with gateway.bodies.read(http) as body:
            asked = await _prepare(gateway, http, body)
        return await answer(gateway, http, asked)

    return router


async def _prepare(gateway: Gateway, http: Request, body: Body) -> Asked:
    received_ns = gateway.wall_ns()
    request = await gateway.bodies.decode(body, ChatRequest)
    with Ticket(gateway, caller_of(http)) as ticket:
        ticket.read(body)
        return await _ask(gateway, http, request, ticket, received_ns)


async def _ask(gateway: Gateway, http: Request, request: ChatRequest, ticket: Ticket, received_ns: int) -> Asked:
    facts = gateway.facts
    admission.check_model(request.model, facts.name)
    admission.check_chat(request)
    ticket.extend(request.n or 1)
    tokens = await tokenize_chat(gateway, request)
    asked = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    params = admission.sampling_params(
        request,
        facts,
        max_tokens=admission.output_room(len(tokens), asked, None, gateway.context_limit),
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs,
    )
    answer_id = new_id("chatcmpl")
    generation = make_generation(
        gateway,
        request,
        answer_id=answer_id,
        account=caller_of(http),
        trace=trace_of(http),
        received_ns=received_ns,
        seed=request.seed if request.seed is not None else secrets.randbits(63),
        prompts=[(tokens, params)],
    )
    view = ChatView(
        generation,
        head_of(answer_id, received_ns // 10**9, facts),
        wanted_by(request, logprobs),
        gateway.tokenizer.texts,
        gateway.wall_ns,
    )
    return Asked(ticket, generation, view, conversation=request)


async def tokenize_chat(gateway: Gateway, request: ChatRequest) -> list[int]:
    """The prompt that the model's template makes of a conversation. Raises InvalidRequest, ContextTooLong."""
    tokenizer, context = gateway.tokenizer, gateway.facts.max_context
    admission.check_messages(len(request.messages), context)
    continues = bool(request.continue_final_message)

    def work() -> list[int]:
        messages = conversation.template_messages(
            request.messages, knows_developer="developer" in tokenizer.template_source
        )
        tools = conversation.template_tools(request.tools, request.tool_choice, tokenizer.template_variables)
        arguments = conversation.template_arguments(request, tokenizer.template_variables)
        characters = prompt_weight.characters(messages, tools, arguments)
        admission.check_prompt_characters(characters, tokenizer.longest_token_characters, context, param="messages")
        tokens = tokenizer.encode_chat(
            messages,
            tools=tools,
            add_generation_prompt=not continues and request.add_generation_prompt is not False,
            continue_final_message=continues,
            template_arguments=arguments,
            most=context,
        )
        admission.check_prompt_tokens(tokens, gateway.facts.vocab_size)
        return tokens

    return await tokenizer.run(work, prompt_weight.weight(request))
