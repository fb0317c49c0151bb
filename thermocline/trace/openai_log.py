"""Lines of OpenAI-style logs: chat completions and completions, with times and lengths of answers.

A line is one JSON object. The request's fields (``messages`` or ``prompt``) are at its top, or in ``request`` or
``body``, as an object or as text that holds one; those of the answer (``usage``, ``choices``) at its top, or in
``response``; either may be one level deeper, in ``body``. Faults are described without any text of the line.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from shared.errors import InvalidRequest
from shared.undecodable import UNDECODABLE

TIME_FIELDS = ("timestamp", "time", "start_time", "created_at", "created", "ts")
_REQUEST_FIELDS, _ANSWER_FIELDS = ("request", "body"), ("response",)
_NAMED_FIELDS = ("tool_calls", "function_call", "tool_call_id", "name", "reasoning_content", "refusal")

# Numbers above these are milliseconds, microseconds and nanoseconds: in seconds they would lie beyond the year 5000.
_UNITS = ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3))
_LATEST = 1e20
_MOST_TOKEN_ID = 2**31

Prompt = str | tuple[int, ...]
"""Text, or token ids."""


class LogFault(InvalidRequest):
    """A malformed line, with the reason."""


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One line. Its ``prompts`` are simultaneous; each is a sequence of texts, or one sequence of token ids."""

    time_s: float
    model: str
    prompts: tuple[tuple[Prompt, ...], ...]
    prompt_tokens: int | None  # The server's count for all prompts.
    output_tokens: int | None  # The server's count for one answer.
    answer: str | None  # Text of the first answer, if the line has it.
    max_tokens: int | None
    other_parts: int  # Images and other parts, which count by their digest and have no length.


def read_line(line: bytes) -> LoggedRequest:
    """Parse one line. Raises LogFault where it is no request with a time."""
    record = _object(line, "no JSON object")
    request = _request(record)
    answer = _answer(record)
    found = _Prompts()
    prompts = (tuple(found.chat(request)),) if "messages" in request else tuple(found.plain(request["prompt"]))
    choices = answer.get("choices")
    texts = [_text_of(choice) for choice in choices] if isinstance(choices, list) else []
    answers = len(texts) or len(prompts) * (_count(request, "n") or 1)
    usage = answer.get("usage")
    usage = usage if isinstance(usage, Mapping) else {}
    output = _count(usage, "completion_tokens", "output_tokens")
    model = request.get("model")
    return LoggedRequest(
        time_s=_time(record, request, answer),
        model=model if isinstance(model, str) else "",
        prompts=prompts,
        prompt_tokens=_count(usage, "prompt_tokens", "input_tokens") or None,
        output_tokens=None if output is None else -(-output // answers),
        answer=texts[0] if texts else None,
        max_tokens=_count(request, "max_completion_tokens", "max_tokens"),
        other_parts=found.other_parts,
    )


class _Prompts:
    """The prompts of a request as sequences of texts; equal messages give equal sequences."""

    def __init__(self) -> None:
        self.other_parts = 0

    def chat(self, request: Mapping[str, Any]) -> Iterator[str]:
        """Yield the tools, then each message with its role, about as a chat template writes them."""
        messages = request["messages"]
        if not isinstance(messages, list) or not messages:
            raise LogFault("messages must be a list that is not empty")
        for field in ("tools", "functions"):
            if request.get(field):
                yield _json(request[field])
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise LogFault("each of messages must be an object with a role")
            yield f"\n<{message['role']}>\n"
            yield from self._content(message.get("content"))
            for field in _NAMED_FIELDS:
                if message.get(field):
                    yield f"\n{field}: {_json(message[field])}"

    def _content(self, content: Any) -> Iterator[str]:
        if content is None:
            return
        if isinstance(content, str):
            yield content
            return
        if not isinstance(content, list):
            raise LogFault("content of a message must be text or a list of parts")
        for part in content:
            text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
            if isinstance(text, str):
                yield text
            else:
                self.other_parts += 1
                yield f"<{hashlib.blake2b(_json(part).encode(), digest_size=8).hexdigest()}>"

    def plain(self, prompt: Any) -> Iterator[tuple[Prompt, ...]]:
        """Yield the prompts of ``/v1/completions``: text or token ids, one or several of them."""
        if isinstance(prompt, str) and prompt:
            yield (prompt,)
        elif isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
            if not all(0 <= token < _MOST_TOKEN_ID for token in prompt):
                raise LogFault("token ids of prompt must be from 0 to 2**31 - 1")
            yield (tuple(prompt),)
        elif isinstance(prompt, list) and prompt and not any(isinstance(one, int) for one in prompt):
            for one in prompt:
                if isinstance(one, list) and any(isinstance(token, list) for token in one):
                    raise LogFault("prompt must be text, token ids, or a list of either")
                yield from self.plain(one)
        else:
            raise LogFault("prompt must be text, token ids, or a list of either, and not empty")


def _object(text: bytes | str, fault: str) -> Mapping[str, Any]:
    try:
        found = msgspec.json.decode(text)
    except UNDECODABLE as error:
        raise LogFault(fault) from error
    if not isinstance(found, Mapping):
        raise LogFault(fault)
    return found


def _layers(record: Mapping[str, Any], fields: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """Yield the line's own object, then the objects in ``fields``, and in their ``body``."""
    yield record
    for field in fields:
        inner = record.get(field)
        if isinstance(inner, str):
            inner = _object(inner, f"{field} is text without a JSON object")
        if isinstance(inner, Mapping):
            yield inner
            body = inner.get("body")
            if isinstance(body, str):
                body = _object(body, f"body of {field} is text without a JSON object")
            if isinstance(body, Mapping):
                yield body


def _request(record: Mapping[str, Any]) -> Mapping[str, Any]:
    for layer in _layers(record, _REQUEST_FIELDS):
        if layer.get("messages") is not None or layer.get("prompt") is not None:
            return {name: value for name, value in layer.items() if name != "messages" or value is not None}
    raise LogFault("neither messages nor prompt")


def _answer(record: Mapping[str, Any]) -> Mapping[str, Any]:
    for layer in _layers(record, _ANSWER_FIELDS):
        if layer.get("usage") is not None or layer.get("choices") is not None:
            return layer
    return {}


def _time(*layers: Mapping[str, Any]) -> float:
    """Return the time in seconds since a moment that is the same for the whole log."""
    for layer in layers:
        for field in TIME_FIELDS:
            if layer.get(field) is not None:
                return _seconds(layer[field], field)
    raise LogFault(f"no time: none of {', '.join(TIME_FIELDS)}")


def _seconds(value: Any, field: str) -> float:
    if isinstance(value, str):
        try:
            return _seconds(float(value), field)
        except ValueError:
            pass
        try:
            moment = datetime.fromisoformat(value)
        except ValueError as error:
            raise LogFault(f"{field} is neither a number nor ISO 8601") from error
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    # JSON has integers of any length; one beyond a double is no time.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _LATEST:
        raise LogFault(f"{field} is neither a number of at least 0 nor ISO 8601")
    return value / next((unit for bound, unit in _UNITS if value > bound), 1.0)


def _count(layer: Mapping[str, Any], *fields: str) -> int | None:
    """Return the first of the fields that is a whole number from 0 to 2^31 - 1; None without one."""
    for field in fields:
        value = layer.get(field)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST_TOKEN_ID:
            return value
    return None


def _text_of(choice: Any) -> str:
    """Return the text of one choice, or its message with its calls; "" for neither. Raises LogFault for no object."""
    if not isinstance(choice, Mapping):
        raise LogFault("each of choices must be an object")
    message = choice.get("message")
    if isinstance(message, Mapping):
        said = (message.get(field) for field in ("reasoning_content", "content", "tool_calls"))
        return "".join(part if isinstance(part, str) else _json(part) for part in said if part)
    text = choice.get("text")
    return text if isinstance(text, str) else ""


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
