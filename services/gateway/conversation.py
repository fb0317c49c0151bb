"""From a chat request's messages to what a chat template takes. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from services.gateway.cache_hints import without_controls
from services.gateway.openai_schema.chat import ChatMessage, ChatRequest, ContentPart
from shared.errors import InvalidRequest

_RESERVED_ARGUMENTS = frozenset(
    {
        "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
        "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors",
        "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
    }
)  # fmt: skip


def template_messages(messages: Sequence[ChatMessage], *, knows_developer: bool = False) -> list[dict[str, Any]]:
    """Messages as dictionaries. A template without a ``developer`` role gets ``system`` in its place.

    Raises InvalidRequest for content that is not text and for tool calls that are malformed.
    """
    converted = []
    for place, message in enumerate(messages):
        role = "system" if message.role == "developer" and not knows_developer else message.role
        entry: dict[str, Any] = {"role": role, "content": _text(message.content, f"messages[{place}].content")}
        if message.name is not None:
            entry["name"] = message.name
        if message.tool_call_id is not None:
            entry["tool_call_id"] = message.tool_call_id
        if message.tool_calls is not None:
            entry["tool_calls"] = [
                _tool_call(call, f"messages[{place}].tool_calls[{number}]")
                for number, call in enumerate(message.tool_calls)
            ]
        converted.append(entry)
    return converted


def template_tools(
    tools: list[dict[str, Any]] | None, tool_choice: str | dict[str, Any] | None, variables: Collection[str]
) -> list[dict[str, Any]] | None:
    """The tools to render, or None. The answer carries tool calls as text, so a call cannot be forced."""
    if not tools:
        if tool_choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice needs tools", param="tool_choice")
        return None
    if "tools" not in variables:
        raise InvalidRequest(
            "this model's chat template has no place for tools", param="tools", code="unsupported_parameter"
        )
    if tool_choice == "none":
        return None
    if tool_choice not in (None, "auto"):
        raise InvalidRequest(
            "tool_choice can be none or auto; a call cannot be forced here",
            param="tool_choice",
            code="unsupported_parameter",
        )
    for place, tool in enumerate(tools):
        if tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
            raise InvalidRequest("a tool must be of type function", param=f"tools[{place}]")
    return without_controls(tools)


def template_arguments(request: ChatRequest, variables: Collection[str]) -> dict[str, Any]:
    """``chat_template_kwargs`` without a name that means something else to the renderer, and ``reasoning_effort`` where
    the template has a variable of that name.
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


def _tool_call(call: dict[str, Any], param: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest("a tool call needs a function with a name", param=param)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        # Templates expect an object where OpenAI's API carries JSON text.
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest(f"arguments are no JSON: {error}", param=f"{param}.function.arguments") from error
    return {**call, "function": {**function, "arguments": arguments}}
