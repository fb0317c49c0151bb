"""POST /tokenize and /detokenize, and GET /tokenizer_info, in vLLM's shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from fastapi import APIRouter, Request, Response

from services.gateway import admission
from services.gateway.callers import caller_of
from services.gateway.chat_prompt import tokenize_chat
from services.gateway.gateway import Gateway
from services.gateway.json_response import json_response
from services.gateway.openai_schema.chat import ChatRequest
from services.gateway.openai_schema.tokenization import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from services.gateway.openapi import describes
from shared.errors import InvalidRequest

PIECE_TOKENS = 8_192


def tokenization_router(gateway: Gateway) -> APIRouter:
    """Return the routes that tokenise and detokenise."""
    router = APIRouter(tags=["tokenization"])

    @router.post(
        "/tokenize",
        response_model=None,
        openapi_extra=describes(TokenizeRequest, TokenizeResponse),
        summary="Token ids of a text or a conversation",
    )
    async def tokenize(http: Request) -> Response:
        account = caller_of(http)
        async with gateway.bodies.read(http) as body:
            request = await gateway.bodies.decode(body, TokenizeRequest)
        with account.taken(), gateway.slots.taken():
            model = gateway.model(request.model)
            tokens = await _tokenize(gateway, request, gateway.namespace(account.tenant, None, model.adapter))
            account.spend_tokens(len(tokens))
            ids = await _json_list(gateway, tokens)
            text = gateway.tokenizer.texts.text
            strings = await _json_list(gateway, tokens, text) if request.return_token_strs else None
        # In the form of TokenizeResponse.
        return json_response(
            {"count": len(tokens), "max_model_len": gateway.max_context, "tokens": ids, "token_strs": strings}
        )

    @router.post(
        "/detokenize",
        response_model=None,
        openapi_extra=describes(DetokenizeRequest, DetokenizeResponse),
        summary="Text of token ids",
    )
    async def detokenize(http: Request) -> Response:
        account, tokenizer = caller_of(http), gateway.tokenizer
        async with gateway.bodies.read(http) as body:
            request = await gateway.bodies.decode(body, DetokenizeRequest)
        with account.taken(), gateway.slots.taken():
            gateway.model(request.model)
            tokens = request.tokens
            admission.check_prompt_length(len(tokens), gateway.facts.max_context, param="tokens")
            account.spend_tokens(len(tokens))
            admission.check_vocabulary(tokens, gateway.facts.vocab_size, param="tokens")
            text = await tokenizer.run(lambda: tokenizer.decode(tokens), len(tokens))
        return json_response(DetokenizeResponse(prompt=text))

    @router.get(
        "/tokenizer_info",
        response_model=None,
        openapi_extra=describes(None, TokenizerInfo),
        summary="The tokenizer's chat template and special tokens",
    )
    async def tokenizer_info() -> Response:
        return json_response(gateway.tokenizer.info(gateway.max_context))

    return router


async def _json_list(gateway: Gateway, tokens: Sequence[int], told: Callable[[int], int | str] = int) -> msgspec.Raw:
    """Return a JSON array of what ``told`` returns for each token.

    It is encoded in pieces: the event loop waits while one is encoded.
    """

    def work() -> msgspec.Raw:
        pieces = (tokens[start : start + PIECE_TOKENS] for start in range(0, len(tokens), PIECE_TOKENS))
        encoded = (msgspec.json.encode([told(token) for token in piece])[1:-1] for piece in pieces)
        return msgspec.Raw(b"[" + b",".join(encoded) + b"]")

    return await gateway.tokenizer.run(work, len(tokens))


async def _tokenize(gateway: Gateway, request: TokenizeRequest, namespace: str) -> Sequence[int]:
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    if request.messages is None:
        text = request.prompt or ""
        longest = gateway.tokenizer.longest_token_characters
        admission.check_prompt_characters(len(text), longest, gateway.facts.max_context)
        special = request.add_special_tokens is not False
        most = gateway.facts.max_context
        (tokens,) = await gateway.tokenizer.encode([text], add_special_tokens=special, most=most, known_in=namespace)
        return tokens
    chat = ChatRequest(
        messages=request.messages,
        tools=request.tools,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        chat_template_kwargs=request.chat_template_kwargs,
    )
    admission.check_chat(chat)
    return await tokenize_chat(gateway, chat, namespace=namespace)
