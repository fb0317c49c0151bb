"""From a request of the Responses API to a chat request. Pure; every refusal names the field at fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from services.gateway.admission import refuse, unserved_content, unsupported
from services.gateway.openai_schema.chat import ChatMessage, ChatRequest, ContentPart
from services.gateway.responses.items import Item, ItemPart
from services.gateway.responses.schema import (
    INSTEAD,
    REFUSED_FIELDS,
    InputTokensRequest,
    ResponsesRequest,
    TextFormat,
    TextOptions,
)
from services.gateway.responses.tools import chat_choice, chat_tools, flat_name
from services.gateway.shared_fields import check_shared, shared_fields
from shared.errors import InvalidRequest
from shared.messages.requests import MAX_GRAMMAR_BYTES

RENAMES = (
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("messages", "input"),
    ("reasoning_effort", "reasoning.effort"),
    ("max_tokens", "max_output_tokens"),
    ("max_completion_tokens", "max_output_tokens"),
    ("tool_choice.function", "tool_choice"),
    ("tool_choice.allowed_tools", "tool_choice"),
)
"""Names of a chat's fields, and of the request's fields that they were made from."""

LOGPROBS = "message.output_text.logprobs"

REFERENCE = "item_reference"
"""Type of an item that only names one of an earlier response."""

_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def check_responses(request: InputTokensRequest) -> None:
    """Raise InvalidRequest for fields that are not served."""
    refuse(request, REFUSED_FIELDS)
    check_shared(request, INSTEAD)
    if request.truncation not in (None, "disabled"):
        raise unsupported("truncation", "only 'disabled' is served: the conversation is used as it is sent")


def references(request: InputTokensRequest) -> list[str]:
    """Return the ids by which the request's input refers to items of earlier responses."""
    items = () if isinstance(request.input, str) else request.input
    return [item.id for item in items if item.type == REFERENCE and item.id]


def own_items(request: InputTokensRequest, known: Mapping[str, Item]) -> list[Item]:
    """Return the request's input as items with a type; ``known`` are those that it may refer to, by their ids.

    Raises InvalidRequest.
    """
    if isinstance(request.input, str):
        return [Item(type="message", role="user", content=[ItemPart(type="input_text", text=request.input)])]
    return [
        _referred(item.id or "", known, place) if item.type == REFERENCE else _typed(item, place)
        for place, item in enumerate(request.input)
    ]


def _referred(item_id: str, known: Mapping[str, Item], place: int) -> Item:
    found = known.get(item_id)
    if found is None:
        raise InvalidRequest(
            f"Item with id {item_id[:80]!r} not found: it is another caller's, was not kept, or has expired. Send the "
            "item itself.",
            param=f"input[{place}].id",
            code="item_not_found",
            status=404,
        )
    return found


def chat_request(request: InputTokensRequest, items: Sequence[Item], *, earlier: int = 0) -> ChatRequest:
    """Return the equivalent chat request. ``items`` is the whole conversation; its first ``earlier`` items were kept.

    Raises InvalidRequest.
    """
    messages = [ChatMessage(role="system", content=request.instructions)] if request.instructions else []
    messages += _messages(items, earlier)
    more: dict[str, Any] = {}
    if isinstance(request, ResponsesRequest):
        wants_logprobs = request.top_logprobs is not None or LOGPROBS in (request.include or ())
        more = {
            "max_completion_tokens": request.max_output_tokens,
            "logprobs": True if wants_logprobs else None,
            "top_logprobs": request.top_logprobs,
        }
    return ChatRequest(
        messages=messages,
        tools=chat_tools(request.tools) if request.tools else None,
        tool_choice=chat_choice(request.tool_choice),
        response_format=_format(request.text),
        reasoning_effort=request.reasoning.effort if request.reasoning else None,
        **shared_fields(request),
        **more,
    )


def _typed(item: Item, place: int) -> Item:
    kind = item.type or ("message" if item.role else None)
    if kind not in ("message", "function_call", "function_call_output", "reasoning"):
        raise InvalidRequest(
            f"items of type {(kind or 'none')[:64]!r} are not served here",
            param=f"input[{place}].type",
            code="unsupported_content",
        )
    if kind == "message" and item.role is None:
        raise InvalidRequest("a message needs a role", param=f"input[{place}].role")
    if kind == "function_call" and (not item.call_id or not item.name):
        raise InvalidRequest("a function_call needs a call_id and a name", param=f"input[{place}]")
    if kind == "function_call_output" and not item.call_id:
        raise InvalidRequest("a function_call_output needs a call_id", param=f"input[{place}].call_id")
    return Item(
        type=kind,
        id=item.id,
        role=item.role,
        content=_parts(item, f"input[{place}].content"),
        call_id=item.call_id,
        name=item.name,
        namespace=item.namespace,
        arguments=item.arguments,
        output=item.output if isinstance(item.output, str) else _text_parts(item.output, f"input[{place}].output"),
        summary=_text_parts(item.summary, f"input[{place}].summary"),
    )


def _parts(item: Item, param: str) -> list[ItemPart] | None:
    if isinstance(item.content, str):
        return [ItemPart(type="output_text" if item.role == "assistant" else "input_text", text=item.content)]
    return _text_parts(item.content, param)


def _text_parts(parts: list[ItemPart] | None, param: str) -> list[ItemPart] | None:
    for place, part in enumerate(parts or ()):
        if part.type not in (*_TEXTS, "refusal"):
            raise unserved_content(part.type, f"{param}[{place}]")
        if (part.refusal if part.type == "refusal" else part.text) is None:
            raise InvalidRequest("a part needs a text", param=f"{param}[{place}].text")
    return parts


class _Turn:
    """One turn of the assistant while its items are collected.

    Texts, calls and reasoning become one message of a chat.
    """

    def __init__(self) -> None:
        self.parts: list[ContentPart] = []
        self.calls: list[dict[str, Any]] = []
        self.thoughts: list[str] = []

    def message(self) -> ChatMessage | None:
        """Return the turn's message, or None without text and calls: reasoning alone is left out."""
        if not self.parts and not self.calls:
            return None
        return ChatMessage(
            role="assistant",
            content=self.parts or None,
            tool_calls=self.calls or None,
            reasoning_content="\n".join(self.thoughts) or None,
        )


def _messages(items: Sequence[Item], earlier: int) -> list[ChatMessage]:
    messages: list[ChatMessage] = []
    turn = _Turn()

    def end_turn() -> None:
        nonlocal turn
        message = turn.message()
        if message is not None:
            messages.append(message)
        turn = _Turn()

    for item in items:
        if item.type == "function_call":
            turn.calls.append(_call(item))
        elif item.type == "message" and item.role == "assistant":
            if turn.calls:
                end_turn()
            turn.parts += _content(item.content)
        elif item.type == "reasoning":
            if turn.parts or turn.calls:
                end_turn()
            turn.thoughts += [part.text or "" for part in _content(item.content or item.summary)]
        else:
            end_turn()
            messages.append(_other(item))
    end_turn()
    return messages


def _other(item: Item) -> ChatMessage:
    if item.type == "function_call_output":
        content = item.output if isinstance(item.output, str) else _content(item.output)
        return ChatMessage(role="tool", tool_call_id=item.call_id, content=content)
    assert item.role is not None
    return ChatMessage(role=item.role, content=_content(item.content))


def _content(parts: str | list[ItemPart] | None) -> list[ContentPart]:
    return [
        ContentPart(type="text", text=part.refusal if part.type == "refusal" else part.text)
        for part in parts or ()
        if isinstance(part, ItemPart)
    ]


def _call(item: Item) -> dict[str, Any]:
    return {
        "id": item.call_id,
        "type": "function",
        "function": {"name": flat_name(item.namespace, item.name or ""), "arguments": item.arguments or "{}"},
    }


def _format(text: TextOptions | None) -> dict[str, Any] | None:
    if text is None or text.format is None:
        return None
    wanted = text.format
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    if len(msgspec.json.encode(wanted.schema)) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"a JSON schema may have at most {MAX_GRAMMAR_BYTES} bytes", param="text.format.schema")
    told = msgspec.to_builtins(wanted)
    return {"type": "json_schema", "json_schema": {name: told[name] for name in told if name != "type"}}


def repeated_format(text: TextOptions | None) -> TextFormat:
    """Return the format that a response repeats, with the fields that belong to its type."""
    if text is None or text.format is None:
        return TextFormat(type="text")
    return text.format if text.format.type == "json_schema" else TextFormat(type=text.format.type)
