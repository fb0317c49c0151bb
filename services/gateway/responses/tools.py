"""Tools of the Responses API as functions of a chat, and their names on the way back. Pure.

A namespace is a group of functions, as agents make of each MCP server. A chat has no groups, so the model sees each of
its functions under a name that begins with that of the namespace; calls say both names again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.gateway.admission import unsupported
from shared.errors import InvalidRequest

NAMESPACE = "namespace"
SEPARATOR = "__"

OF_A_TOOL = ("name", "description", "parameters", "strict")

Names = Mapping[str, tuple[str, str]]
"""Namespace and name of each function of a namespace, by the name that the model sees."""


def chat_tools(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the functions that the model sees. Raises InvalidRequest."""
    made: list[dict[str, Any]] = []
    for place, tool in enumerate(tools):
        if tool.get("type") != NAMESPACE:
            made.append(_function(tool, f"tools[{place}]"))
            continue
        for inner, member in enumerate(_members(tool, place)):
            function = _function(member, f"tools[{place}].tools[{inner}]")
            own = function["function"]
            own["name"] = flat_name(tool["name"], own["name"])
            if not inner and isinstance(tool.get("description"), str):
                own["description"] = f"{tool['description']}\n\n{own.get('description', '')}".rstrip()
            made.append(function)
    return made


def names_of(tools: Sequence[dict[str, Any]] | None) -> Names:
    """Return the names of tools that :func:`chat_tools` accepts."""
    return {
        flat_name(tool["name"], member["name"]): (tool["name"], member["name"])
        for tool in tools or ()
        if tool.get("type") == NAMESPACE
        for member in tool["tools"]
    }


def flat_name(namespace: str | None, name: str) -> str:
    """Return the name under which the model sees a function, of a namespace or of none."""
    return f"{namespace}{SEPARATOR}{name}" if namespace else name


def chat_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """Return the choice of tools as a chat has it. Raises InvalidRequest."""
    if not isinstance(choice, dict):
        return choice
    match choice:
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": flat_name(choice.get(NAMESPACE), name)}}
        case {"type": "allowed_tools", "mode": mode, "tools": list(tools)}:
            allowed = [_allowed(tool) for tool in tools]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
        case _:
            raise unsupported("tool_choice", "it can be none, auto, required, a function by its name, or allowed_tools")


def repeated_tools(tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Return the tools that a response repeats, with the fields that were read."""
    return [
        {name: tool[name] for name in ("type", *OF_A_TOOL) if name in tool}
        | ({"tools": repeated_tools(tool["tools"])} if tool.get("type") == NAMESPACE else {})
        for tool in tools or ()
    ]


def repeated_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any]:
    """Return the choice of tools that a response repeats, with the fields that were read."""
    if not isinstance(choice, dict):
        return "auto" if choice is None else choice
    return {name: choice[name] for name in ("type", "name", NAMESPACE, "mode", "tools") if name in choice}


def _allowed(tool: Any) -> Any:
    match tool:
        case {"name": str(name), "namespace": str(namespace)}:
            return {**tool, "name": flat_name(namespace, name)}
        case _:
            return tool


def _members(tool: dict[str, Any], place: int) -> Sequence[dict[str, Any]]:
    if not isinstance(tool.get("name"), str) or not tool["name"]:
        raise InvalidRequest("a namespace needs a name", param=f"tools[{place}].name")
    members = tool.get("tools")
    if not isinstance(members, list) or not members or not all(isinstance(member, dict) for member in members):
        raise InvalidRequest("a namespace needs a list of tools", param=f"tools[{place}].tools")
    return members


def _function(tool: dict[str, Any], param: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        kind = str(tool.get("type"))[:64]
        raise unsupported(f"{param}.type", f"{kind!r} runs at OpenAI; only function tools are served")
    if not isinstance(tool.get("name"), str) or not tool["name"]:
        raise InvalidRequest("a function tool needs a name", param=f"{param}.name")
    return {"type": "function", "function": {name: tool[name] for name in OF_A_TOOL if tool.get(name) is not None}}
