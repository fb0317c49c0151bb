"""POST /v1/completions."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from services.gateway import admission
from services.gateway.cache_hints import keeps_text
from services.gateway.callers import caller_of
from services.gateway.gateway import Gateway
from services.gateway.grammars.checking import scope_of
from services.gateway.grammars.requested import asked_grammar
from services.gateway.openai_schema.completions import CompletionRequest, CompletionResponse
from services.gateway.openapi import describes
from services.gateway.request_spans import trace_of
from services.gateway.serving import Asked, make_generation, serve
from services.gateway.ticket import Ticket
from services.gateway.views.answer import head_of, wanted_by
from services.gateway.views.completion_view import CompletionView
from shared.errors import InvalidRequest
from shared.ids import new_id
from shared.messages.requests import Grammar, SamplingParams


def completions_router(gateway: Gateway) -> APIRouter:
    """Return the route of completions."""
    router = APIRouter(tags=["completions"])

    @router.post(
        "/v1/completions",
        response_model=None,
        openapi_extra=describes(CompletionRequest, CompletionResponse, streams=CompletionResponse),
        summary="Continue a text",
    )
    async def create_completion(http: Request) -> Response:
        return await serve(gateway, http, CompletionRequest, _ask)

    return router


async def _ask(gateway: Gateway, http: Request, request: CompletionRequest, ticket: Ticket) -> Asked:
    facts = gateway.facts
    model = gateway.model(request.model)
    admission.check_completion(request)
    prompts = admission.split_prompts(request, facts.max_context)
    choices = len(prompts) * (request.n or 1)
    if choices > gateway.slots.limit:
        raise InvalidRequest(f"{choices} choices are more than {gateway.slots.limit}", param="n")
    ticket.extend(choices)
    scope = scope_of(caller_of(http).tenant, request.cache_salt)
    grammar = await gateway.grammars.made(asked_grammar(request, request.response_format), scope=scope)
    namespace = gateway.namespace(caller_of(http).tenant, request.cache_salt, model.adapter)
    tokenised = await _tokenise(gateway, request, prompts, namespace if keeps_text(request) else None)
    answer_id = new_id("cmpl")
    generation = make_generation(
        gateway,
        request,
        model=model,
        answer_id=answer_id,
        account=caller_of(http),
        trace=trace_of(http),
        received_ns=ticket.received_ns,
        seed=request.seed if request.seed is not None else secrets.randbits(63),
        prompts=[(tokens, _params(gateway, request, len(tokens), grammar)) for tokens in tokenised],
    )
    view = CompletionView(
        generation,
        head_of(answer_id, ticket.received_ns // 10**9, facts, model.name),
        wanted_by(request, request.logprobs),
        gateway.tokenizer.texts,
        gateway.wall_ns,
        echoes=[await _echo(gateway, request, prompt) for prompt in prompts] if request.echo else (),
        hides_output=request.max_tokens == 0,
        special=gateway.tokenizer.special_ids,
        skips_special=request.skip_special_tokens is not False,
    )
    return Asked(ticket, generation, view)


async def _tokenise(
    gateway: Gateway, request: CompletionRequest, prompts: list[str | list[int]], known_in: str | None
) -> Sequence[Sequence[int]]:
    """Return the token ids of every prompt; texts and token ids are never mixed.

    Raises InvalidRequest and ContextTooLong.
    """
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    tokenised: Sequence[Sequence[int]] = [prompt for prompt in prompts if not isinstance(prompt, str)]
    for text in texts:
        longest = gateway.tokenizer.longest_token_characters
        admission.check_prompt_characters(len(text), longest, gateway.facts.max_context)
    if texts:
        special = request.add_special_tokens is not False
        most = gateway.facts.max_context
        tokenised = await gateway.tokenizer.encode(texts, add_special_tokens=special, most=most, known_in=known_in)
    for place, tokens in enumerate(tokenised):
        if not texts:
            admission.check_prompt_length(len(tokens), gateway.facts.max_context)
        admission.check_prompt_tokens(tokens, gateway.facts.vocab_size, place=place, count=len(prompts))
    return tokenised


def _params(
    gateway: Gateway, request: CompletionRequest, prompt_tokens: int, grammar: Grammar | None
) -> SamplingParams:
    asked = request.max_tokens
    room = admission.output_room(prompt_tokens, asked, admission.COMPLETION_MAX_TOKENS, gateway.context_limit)
    # An echoed prompt has logprobs where the answer has them, and as many.
    asked_for = (request.prompt_logprobs, request.logprobs if request.echo else None)
    prompt_logprobs = max((count for count in asked_for if count is not None), default=None)
    return admission.sampling_params(
        request,
        gateway.facts,
        max_tokens=max(1, room),  # A worker generates at least one token; the view hides it where none is wanted.
        logprobs=request.logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
    )


async def _echo(gateway: Gateway, request: CompletionRequest, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    skip = request.skip_special_tokens is not False
    tokenizer = gateway.tokenizer
    return await tokenizer.run(lambda: tokenizer.decode(prompt, skip_special_tokens=skip), len(prompt))
