"""From a chat request's messages to the arguments of a chat template. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from services.gateway.admission import unsupported
from services.gateway.openai_schema.chat import ChatMessage, ChatRequest, ContentPart
from services.gateway.replies.template_traits import NO_TRAITS, TemplateTraits
from services.gateway.verbatim import Verbatim
from shared.errors import InvalidRequest

_RESERVED_ARGUMENTS = frozenset(
    {
        "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
        "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors",
        "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
    }
)  # fmt: skip


def template_messages(messages: Sequence[ChatMessage], *, traits: TemplateTraits = NO_TRAITS) -> list[dict[str, Any]]:
    """Return the messages as dictionaries, in the form that a template with these traits takes.

    ``developer`` becomes ``system`` where the template does not know that role. Raises InvalidRequest for content that
    is not text, for malformed tool calls, and for a ``function_call`` or ``prefix``.
    """
    return [_message(message, f"messages[{place}]", traits) for place, message in enumerate(messages)]


def _message(message: ChatMessage, param: str, traits: TemplateTraits) -> dict[str, Any]:
    if message.function_call is not None:
        raise unsupported(f"{param}.function_call", "give it as one of tool_calls")
    if message.audio is not None:
        raise unsupported(f"{param}.audio", "only text is served")
    if message.prefix:
        instead = "to continue the last message, set continue_final_message and no add_generation_prompt"
        raise unsupported(f"{param}.prefix", instead)
    role = "system" if message.role == "developer" and not traits.knows_developer else message.role
    content: str | None = _text(message.content, f"{param}.content") or message.refusal or ""
    if message.tool_calls and not content and traits.needs_null_content:
        content = None
    entry: dict[str, Any] = {"role": role, "content": content}
    if message.name is not None:
        entry["name"] = message.name
    if message.tool_call_id is not None:
        entry["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        entry["tool_calls"] = [
            _tool_call(call, f"{param}.tool_calls[{number}]", traits) for number, call in enumerate(message.tool_calls)
        ]
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    if reasoning is not None:
        entry.update(dict.fromkeys(traits.reasoning_fields, reasoning))
    return entry


def template_arguments(request: ChatRequest, variables: Collection[str]) -> dict[str, Any]:
    """Return ``chat_template_kwargs``, and ``reasoning_effort`` where the template has a variable of that name.

    Raises InvalidRequest for a name that means something else to the renderer.
    """
    arguments = request.chat_template_kwargs or {}
    reserved = sorted(_RESERVED_ARGUMENTS.intersection(arguments))
    if reserved:
        raise InvalidRequest(f"{reserved[0]} cannot be set here", param=f"chat_template_kwargs.{reserved[0]}")
    if request.reasoning_effort is not None and "reasoning_effort" in variables:
        arguments = {"reasoning_effort": request.reasoning_effort, **arguments}
    return arguments


def _text(content: str | list[ContentPart] | None, param: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for place, part in enumerate(content):
        if part.type == "refusal" and part.refusal is not None:
            texts.append(part.refusal)
            continue
        if part.type != "text":
            raise InvalidRequest(
                f"content of type {part.type!r} is not served; only text is",
                param=f"{param}[{place}].type",
                code="unsupported_content",
            )
        if part.text is None:
            raise InvalidRequest("a text part needs text", param=f"{param}[{place}].text")
        texts.append(part.text)
    return "\n".join(texts)


def _tool_call(call: dict[str, Any], param: str, traits: TemplateTraits) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest("a tool call needs a function with a name", param=param)
    # Some templates write the whole as JSON: fields are in the order that models use, not the client's.
    told = {"name": function["name"], "arguments": _arguments(function.get("arguments"), traits)}
    named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**named, "type": "function", "function": told}


def _arguments(said: Any, traits: TemplateTraits) -> Any:
    """Return arguments in the form that the template takes.

    Text stays in the prompt as the model wrote it, JSON or not.
    """
    if not isinstance(said, str):
        given = said if said is not None else {}
        return json.dumps(given, ensure_ascii=False) if traits.arguments == "text" else given
    said = said or "{}"
    if traits.arguments == "text":
        return said
    if traits.arguments == "verbatim":
        return Verbatim(said)
    try:
        return msgspec.json.decode(said)
    except (msgspec.DecodeError, RecursionError):
        return said  # The template may accept it, or refuse it.
