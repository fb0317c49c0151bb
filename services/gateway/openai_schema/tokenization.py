"""POST /tokenize and /detokenize, and GET /tokenizer_info, in vLLM's shapes."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from services.gateway.openai_schema.chat import ChatMessage


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A text or conversation to tokenise: either ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens, their number, and their texts if asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TokenizerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The tokenizer, as far as clients need it to render and cut texts themselves; null is absent.

    ``chat_template`` is Jinja; ``model_max_length`` counts tokens of prompt and answer.
    """

    tokenizer_class: str
    model_max_length: int
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids to decode."""

    tokens: list[int]
    model: str | None = None


class DetokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The text of the tokens."""

    prompt: str
