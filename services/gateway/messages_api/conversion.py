"""From Anthropic's request to a chat request. Pure; every refusal names the field at fault."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from services.gateway.admission import asks, unserved_content, unsupported
from services.gateway.messages_api.answers import UNFINISHED
from services.gateway.messages_api.schema import (
    INSTEAD,
    REFUSED_FIELDS,
    CountTokensRequest,
    InputBlock,
    InputMessage,
    MessagesRequest,
    MessagesTool,
    MessagesToolChoice,
    ResultPart,
    SystemPart,
    Thinking,
)
from services.gateway.openai_schema.chat import ChatMessage, ChatRequest, ContentPart
from services.gateway.openai_schema.leases import CacheControl
from services.gateway.shared_fields import check_shared, shared_fields
from shared.errors import InvalidRequest

BILLING_PREFIX = "x-anthropic-billing-header:"
"""Start of a part of the system prompt that some clients change for each request. It is for Anthropic's billing, not
for the model, and at the front of the prompt it would keep any prefix from being reused.
"""

ERROR_PREFIX = "Error: "
"""Put before the result of a tool that failed: templates have no field for that."""

THINKING_VARIABLES = ("enable_thinking", "thinking")
"""Names of the switch for reasoning in chat templates: of Qwen, GLM and others; then of DeepSeek and Granite."""

RENAMES = (
    ("response_format.json_schema", "output_config.format"),
    ("response_format", "output_config.format"),
    ("reasoning_effort", "output_config.effort"),
    ("stop", "stop_sequences"),
    ("tool_choice.function", "tool_choice"),
    ("parameters", "input_schema"),
)
"""Names of a chat's fields, and of the request's fields that they were made from."""

Said = Callable[[str, dict[str, Any]], str | None]

_HARMLESS_EDITS = "clear_thinking_20251015"


def chat_request(
    request: CountTokensRequest,
    variables: Collection[str],
    *,
    reasons: bool = False,
    said: Said = lambda call_id, given: None,
) -> ChatRequest:
    """Return the equivalent chat request. Raises InvalidRequest.

    ``variables`` are those of the model's template; ``reasons``: the model reasons in any case, or by other variables.
    ``said`` returns the text of a call's arguments as the model wrote it, where it is known.
    """
    _refuse(request)
    messages = _kept([*_system(request.system), *_messages(request.messages, said)], request.cache_control)
    prefilled = _is_prefilled(request.messages[-1])
    tool_choice, parallel = _tool_choice(request.tool_choice)
    fields = shared_fields(request) | {"thinking": None}
    if isinstance(request, MessagesRequest):
        fields |= {
            "max_tokens": max(1, request.max_tokens),  # A worker generates at least one token.
            "stop": request.stop_sequences or None,
            "user": request.metadata.user_id if request.metadata else request.user,
        }
    if parallel is not None:
        fields["parallel_tool_calls"] = parallel
    if prefilled and request.continue_final_message is None:
        fields["continue_final_message"] = True
    switch = _thinking(request.thinking, variables, reasons=reasons)
    if switch is not None:
        fields["chat_template_kwargs"] = switch | (request.chat_template_kwargs or {})
    return ChatRequest(
        messages=messages,
        tools=[_tool(tool, place) for place, tool in enumerate(request.tools)] if request.tools else None,
        tool_choice=tool_choice,
        reasoning_effort=request.output_config.effort if request.output_config else None,
        response_format=_format(request),
        **fields,
    )


def _refuse(request: CountTokensRequest) -> None:
    """Raise InvalidRequest for fields that would change the prompt, or that need Anthropic's own servers."""
    for name in REFUSED_FIELDS:
        if asks(request, name) and getattr(request, name) != []:
            raise unsupported(name)
    check_shared(request, INSTEAD)
    edits = request.context_management
    if edits and not (isinstance(edits, dict) and _changes_nothing(edits.get("edits"))):
        raise unsupported("context_management", "the conversation is served as it is sent")


def _changes_nothing(edits: object) -> bool:
    """Return whether each edit keeps all of the reasoning, as this server does anyway."""
    return not edits or (
        isinstance(edits, list)
        and all(
            isinstance(edit, dict) and edit.get("type") == _HARMLESS_EDITS and edit.get("keep") == "all"
            for edit in edits
        )
    )


def _system(system: str | list[SystemPart] | None) -> list[ChatMessage]:
    if not system:
        return []
    if isinstance(system, str):
        return [ChatMessage(role="system", content=system)]
    parts = [
        _text_part(part.type, part.text, f"system[{place}]", part.cache_control)
        for place, part in enumerate(system)
        if not (part.text or "").startswith(BILLING_PREFIX)
    ]
    return [ChatMessage(role="system", content=parts)] if parts else []


def _messages(messages: Sequence[InputMessage], said: Said) -> list[ChatMessage]:
    converted: list[ChatMessage] = []
    for place, message in enumerate(messages):
        if isinstance(message.content, str):
            converted.append(ChatMessage(role=message.role, content=message.content))
        elif message.role == "assistant":
            converted.append(_assistant(message.content, f"messages[{place}].content", said))
        else:
            converted += _user(message.role, message.content, f"messages[{place}].content")
    return converted


def _kept(messages: list[ChatMessage], control: CacheControl | None) -> list[ChatMessage]:
    """Return ``messages`` with the breakpoint of the request itself, at the end of the last of them."""
    if control is None:
        return messages
    last = messages[-1]
    if isinstance(last.content, list):
        return [*messages[:-1], msgspec.structs.replace(last, content=_marked(last.content, control))]
    return [*messages[:-1], msgspec.structs.replace(last, cache_control=control)]


def _user(role: Any, blocks: Sequence[InputBlock], param: str) -> list[ChatMessage]:
    """Return a user's turn as messages: each result of a tool is one of its own, in the order of the blocks."""
    converted: list[ChatMessage] = []
    parts: list[ContentPart] = []

    def flush() -> None:
        if parts:
            converted.append(ChatMessage(role=role, content=list(parts)))
            parts.clear()

    for place, block in enumerate(blocks):
        if block.type == "tool_result" and role == "user":
            flush()
            converted.append(_tool_result(block, f"{param}[{place}]"))
        else:
            parts.append(_text_part(block.type, block.text, f"{param}[{place}]", block.cache_control))
    flush()
    return converted or [ChatMessage(role=role, content="")]


def _tool_result(block: InputBlock, param: str) -> ChatMessage:
    if not block.tool_use_id:
        raise InvalidRequest("a tool_result needs a tool_use_id", param=f"{param}.tool_use_id")
    given = block.content if isinstance(block.content, list) else [ResultPart(type="text", text=block.content or "")]
    parts = [
        _text_part(part.type, part.text, f"{param}.content[{place}]", part.cache_control)
        for place, part in enumerate(given)
    ]
    if block.is_error:
        first = parts[0] if parts else ContentPart(type="text", text="")
        parts = [msgspec.structs.replace(first, text=f"{ERROR_PREFIX}{first.text}"), *parts[1:]]
    return ChatMessage(role="tool", tool_call_id=block.tool_use_id, content=_marked(parts, block.cache_control))


def _marked(parts: list[ContentPart], control: CacheControl | None) -> list[ContentPart]:
    """Return ``parts`` with a breakpoint at their end."""
    if control is None or not parts:
        return parts
    return [*parts[:-1], msgspec.structs.replace(parts[-1], cache_control=control)]


def _assistant(blocks: Sequence[InputBlock], param: str, said: Said) -> ChatMessage:
    parts: list[ContentPart] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    control: CacheControl | None = None
    for place, block in enumerate(blocks):
        if block.type == "tool_use":
            calls.append(_call(block, f"{param}[{place}]", said))
            control = block.cache_control or control
        elif block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type != "redacted_thinking":
            parts.append(_text_part(block.type, block.text, f"{param}[{place}]", block.cache_control))
    return ChatMessage(
        role="assistant",
        content=_marked(parts, control) or None,
        tool_calls=calls or None,
        cache_control=None if parts else control,
        reasoning_content="\n".join(thoughts) or None,
    )


def _call(block: InputBlock, param: str, said: Said) -> dict[str, Any]:
    if not block.id or not block.name:
        raise InvalidRequest("a tool_use needs an id and a name", param=param)
    given = block.input or {}
    unfinished = given.get(UNFINISHED) if len(given) == 1 else None
    text = unfinished if isinstance(unfinished, str) else said(block.id, given)
    arguments = given if text is None else text
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _text_part(kind: str, text: str | None, param: str, control: CacheControl | None) -> ContentPart:
    if kind != "text":
        raise unserved_content(kind, param)
    if text is None:
        raise InvalidRequest("a text block needs text", param=f"{param}.text")
    return ContentPart(type="text", text=text, cache_control=control)


def _is_prefilled(last: InputMessage) -> bool:
    """Return whether the answer continues the conversation's last message. Raises InvalidRequest where it cannot."""
    if last.role != "assistant":
        return False
    if not isinstance(last.content, str) and any(block.type != "text" for block in last.content):
        raise InvalidRequest("a final assistant message can only be text: the answer continues it", param="messages")
    return True


def _tool(tool: MessagesTool, place: int) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise unsupported(f"tools[{place}].type", f"{tool.type[:64]!r} runs at Anthropic; only custom tools are served")
    if tool.input_schema is None:
        raise InvalidRequest("a tool needs an input_schema", param=f"tools[{place}].input_schema")
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema
    if tool.strict is not None:
        function["strict"] = tool.strict
    made: dict[str, Any] = {"type": "function", "function": function}
    if tool.cache_control is not None:
        made["cache_control"] = msgspec.to_builtins(tool.cache_control)
    return made


def _tool_choice(choice: MessagesToolChoice | None) -> tuple[str | dict[str, Any] | None, bool | None]:
    """Return OpenAI's ``tool_choice`` and ``parallel_tool_calls``."""
    if choice is None:
        return None, None
    parallel = None if choice.disable_parallel_tool_use is None else not choice.disable_parallel_tool_use
    if choice.type == "tool":
        if not choice.name:
            raise InvalidRequest("tool_choice of type tool needs a name", param="tool_choice.name")
        return {"type": "function", "function": {"name": choice.name}}, parallel
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type], parallel


def _thinking(thinking: Thinking | None, variables: Collection[str], *, reasons: bool) -> dict[str, Any] | None:
    """Return the template's switch for reasoning, or None where nothing is to be switched. Raises InvalidRequest."""
    if thinking is None or thinking.type not in ("enabled", "disabled"):
        return None
    name = next((name for name in THINKING_VARIABLES if name in variables), None)
    if name is not None:
        return {name: thinking.type == "enabled"}
    if thinking.type == "enabled" and not reasons:
        raise unsupported("thinking", "this model's chat template has no switch for it")
    return None


def _format(request: CountTokensRequest) -> dict[str, Any] | None:
    wanted = request.output_config.format if request.output_config else None
    if wanted is None:
        return None
    if wanted.type != "json_schema" or wanted.schema is None:
        raise unsupported("output_config.format", "only json_schema with a schema is served")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": wanted.schema, "strict": True}}
