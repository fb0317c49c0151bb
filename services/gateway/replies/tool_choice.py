"""The tools of a request: which may be called, and whether one must be. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shared.errors import InvalidRequest

MAX_TOOLS = 1024

_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,256}")
_ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: dict[str, Any]  # A JSON schema of an object.
    is_strict: bool
    param: str  # Its field in the request, for errors.


@dataclass(frozen=True, slots=True)
class ToolAsk:
    """The tools that may be called.

    ``mode`` named: exactly one call, of the only tool; required: at least one, of any.
    """

    tools: tuple[Tool, ...]
    mode: Literal["auto", "required", "named"] = "auto"
    is_parallel: bool = True

    @property
    def is_forced(self) -> bool:
        """Whether the answer must have a call."""
        return self.mode != "auto"


def asked_tools(
    tools: Sequence[dict[str, Any]] | None, tool_choice: str | dict[str, Any] | None, parallel: bool | None
) -> ToolAsk | None:
    """Return the tools that may be called, or None without any.

    Raises InvalidRequest for malformed tools and choices.
    """
    if not tools:
        if tool_choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice needs tools", param="tool_choice")
        return None
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"{len(tools)} tools are more than {MAX_TOOLS}", param="tools")
    known = tuple(_tool(tool, f"tools[{place}]") for place, tool in enumerate(tools))
    if len({tool.name for tool in known}) < len(known):
        raise InvalidRequest("two tools have the same name", param="tools")
    is_parallel = parallel is not False
    match tool_choice:
        case None | "auto":
            return ToolAsk(known, "auto", is_parallel)
        case "none":
            return None
        case "required" | "any":  # The second is the name of Mistral's clients.
            return ToolAsk(known, "required", is_parallel)
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolAsk(_chosen(known, [name], "tool_choice.function.name"), "named", is_parallel=False)
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(allowed)}}:
            names = [_allowed_name(tool) for tool in allowed]
            return ToolAsk(_chosen(known, names, "tool_choice.allowed_tools.tools"), mode, is_parallel)
        case _:
            raise InvalidRequest(
                "tool_choice must be none, auto, required, a function by name, or allowed_tools", param="tool_choice"
            )


def check_rendered(tools: Sequence[Any] | None, variables: Collection[str]) -> None:
    """Raise InvalidRequest for tools that the template does not render."""
    if tools and "tools" not in variables:
        raise InvalidRequest(
            "this model's chat template has no place for tools", param="tools", code="unsupported_parameter"
        )


def _tool(tool: dict[str, Any], param: str) -> Tool:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise InvalidRequest("a tool must be of type function", param=param)
    name, parameters, strict = function.get("name"), function.get("parameters"), function.get("strict")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(
            "a function needs a name of at most 256 letters, digits, -, _ or .", param=f"{param}.function.name"
        )
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequest("parameters must be a JSON schema", param=f"{param}.function.parameters")
    if strict not in (None, True, False):
        raise InvalidRequest("strict must be true or false", param=f"{param}.function.strict")
    schema = parameters or _ANY_OBJECT
    if schema.get("type", "object") != "object":
        raise InvalidRequest("parameters must be the schema of an object", param=f"{param}.function.parameters")
    return Tool(name, {"type": "object", **schema}, strict is True, param)


def _allowed_name(tool: Any) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return name
        case _:
            raise InvalidRequest("an allowed tool is a function by name", param="tool_choice.allowed_tools.tools")


def _chosen(known: tuple[Tool, ...], names: Sequence[str], param: str) -> tuple[Tool, ...]:
    by_name = {tool.name: tool for tool in known}
    missing = [name for name in names if name not in by_name]
    if missing or not names:
        raise InvalidRequest(f"there is no tool {missing[0][:64]!r}" if missing else "no tool is allowed", param=param)
    return tuple(by_name[name] for name in dict.fromkeys(names))
