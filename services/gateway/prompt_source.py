"""From a prompt in any of its three forms to tokens, for the administration of the cache."""

from __future__ import annotations

from collections.abc import Sequence

from services.gateway import admission
from services.gateway.chat_prompt import tokenize_chat
from services.gateway.gateway import Gateway
from services.gateway.openai_schema.cache import PromptSource
from services.gateway.openai_schema.chat import ChatRequest
from shared.errors import CallerError, InvalidRequest


async def tokenize_source(gateway: Gateway, source: PromptSource, namespace: str, *, path: str = "") -> Sequence[int]:
    """Return the token ids that the API's own endpoints would make of the same prompt in this namespace.

    Raises InvalidRequest or ContextTooLong; ``path`` is put before the name of the field at fault.
    """
    try:
        tokens = await _tokenize(gateway, source, namespace)
        limit = gateway.context_limit
        if len(tokens) >= limit.tokens:
            raise limit.refusal(len(tokens) + 1, f"; the prompt has {len(tokens)}.", param=_given(source))
    except CallerError as error:
        error.param = f"{path}{error.param or _given(source)}"
        raise
    return tokens


async def _tokenize(gateway: Gateway, source: PromptSource, namespace: str) -> Sequence[int]:
    given = [name for name in ("prompt", "messages", "tokens") if getattr(source, name) is not None]
    if len(given) != 1:
        raise InvalidRequest("give exactly one of prompt, messages and tokens", param=given[1] if given else "prompt")
    if source.tools is not None and source.messages is None:
        raise InvalidRequest("tools need messages", param="tools")
    if source.messages is not None:
        chat = ChatRequest(messages=source.messages, tools=source.tools)
        admission.check_chat(chat)
        return await tokenize_chat(gateway, chat, namespace=namespace)
    tokens: Sequence[int]
    if source.prompt is not None:
        longest = gateway.tokenizer.longest_token_characters
        admission.check_prompt_characters(len(source.prompt), longest, gateway.facts.max_context)
        most = gateway.facts.max_context
        (tokens,) = await gateway.tokenizer.encode(
            [source.prompt], add_special_tokens=True, most=most, known_in=namespace
        )
    else:
        tokens = source.tokens or ()
    try:
        admission.check_prompt_tokens(tokens, gateway.facts.vocab_size)
    except CallerError as error:
        error.param = _given(source)
        raise
    return tokens


def _given(source: PromptSource) -> str:
    return next((name for name in ("prompt", "messages", "tokens") if getattr(source, name) is not None), "prompt")
