"""Files of prompts: JSON lines, or with ``.txt`` plain text, one prompt a line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shared.errors import OperatorError, reason_of
from shared.undecodable import UNDECODABLE

MAX_BYTES = 256 * 2**20
MAX_PROMPTS = 100_000
_FAULTS_SHOWN = 10


class _Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompt: Annotated[str, Meta(min_length=1)] | None = None
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)] | None = None
    tokens: Annotated[list[Annotated[int, Meta(ge=0, lt=2**31)]], Meta(min_length=1)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt: its line in the file, and the endpoint and body of its request to a gateway."""

    line: int
    path: str
    body: dict[str, Any]


def read_prompts(path: Path) -> list[Prompt]:
    """Return all prompts of a file, in order. Raises OperatorError, which names the first malformed lines by number."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise OperatorError(f"{path} is larger than {MAX_BYTES} bytes")
        raw = path.read_bytes()
    except OSError as error:
        raise OperatorError(f"cannot read {path}: {reason_of(error)}") from error
    prompts: list[Prompt] = []
    faults: list[str] = []
    is_text = path.suffix == ".txt"
    for number, line in enumerate(raw.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            if is_text:
                body = {"prompt": line.decode().rstrip("\r")}
                prompts.append(Prompt(line=number, path="/v1/completions", body=body))
            else:
                prompts.append(_json_prompt(number, line))
        except (*UNDECODABLE, ValueError) as error:
            faults.append(f"line {number}: {error}")
    if faults:
        more = f"; and {len(faults) - _FAULTS_SHOWN} more" if len(faults) > _FAULTS_SHOWN else ""
        raise OperatorError(f"{path}, nothing was sent: " + "; ".join(faults[:_FAULTS_SHOWN]) + more)
    if not prompts:
        raise OperatorError(f"{path} holds no prompt")
    if len(prompts) > MAX_PROMPTS:
        raise OperatorError(f"{path} holds {len(prompts)} prompts, more than {MAX_PROMPTS}")
    return prompts


def _json_prompt(number: int, line: bytes) -> Prompt:
    given = msgspec.json.decode(line, type=_Line)
    if [given.prompt, given.messages, given.tokens].count(None) != 2:
        raise ValueError("exactly one of prompt, messages and tokens is wanted")
    body: dict[str, Any] = {"cache_salt": given.cache_salt} if given.cache_salt else {}
    if given.messages is not None:
        return Prompt(line=number, path="/v1/chat/completions", body=body | {"messages": given.messages})
    return Prompt(line=number, path="/v1/completions", body=body | {"prompt": given.prompt or given.tokens})
