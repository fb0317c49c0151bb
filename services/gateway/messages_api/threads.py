"""Message threads: conversations kept under the id of their last answer, so that a turn sends only what is new.

A thread is kept as responses are, and as well as they can be: where it is not found, its client sends the whole
conversation again. An answer is continued once; its entry goes when that of the next turn is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec

from services.gateway.accounts import Account
from services.gateway.kept_entries import KeptEntries
from services.gateway.messages_api.answers import OutputBlock
from services.gateway.messages_api.schema import (
    InputBlock,
    InputMessage,
    MessagesRequest,
    MessagesTool,
    MessageThread,
    ResultPart,
    SystemPart,
)
from services.gateway.prompt_weight import MESSAGE_CHARACTERS
from services.gateway.responses.ids import is_message_id
from services.gateway.responses.kept import Run
from shared import logs
from shared.errors import InvalidRequest, NotFound, ThermoclineError, TransportError
from shared.undecodable import UNDECODABLE

_log = logs.get_logger("gateway.kept")


class KeptThread(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation up to an answer, that included. Breakpoints of earlier turns are left out of ``messages``."""

    version: int = 1
    system: str | list[SystemPart] | None = None
    tools: list[MessagesTool] | None = None
    messages: list[InputMessage]


class KeptThreads:
    """The threads of the cell."""

    def __init__(self, entries: KeptEntries, run: Run) -> None:
        """Keep threads as ``entries``; ``run`` does the encoding and decoding."""
        self._entries = entries
        self._run = run

    async def whole(
        self, account: Account, request: MessagesRequest, thread: MessageThread
    ) -> tuple[MessagesRequest, int]:
        """Return the request with its whole conversation in place of its ``thread``, and the characters that were read.

        Raises InvalidRequest, NotFound, Unavailable, and TransportError for an entry that cannot be read.
        """
        _check(request, thread)
        previous = thread.previous_message_id
        if previous is None:
            return msgspec.structs.replace(request, thread=None), 0
        data = await self._entries.read(account, request.cache_salt, previous) if is_message_id(previous) else None
        if data is None:
            raise NotFound(
                f"No thread is kept for the message {previous[:64]!r}: it is another caller's, was continued already, "
                "was not kept, or has expired. Send the whole conversation with `thread` of type `create`.",
                param="thread.previous_message_id",
                code="thread_not_found",
            )
        try:
            kept = await self._run(partial(msgspec.json.decode, data, type=KeptThread), len(data))
        except UNDECODABLE as error:
            raise TransportError(f"the thread at {previous} cannot be read") from error
        messages = [*kept.messages, *request.messages]
        found = msgspec.structs.replace(request, system=kept.system, tools=kept.tools, messages=messages, thread=None)
        return found, len(data)

    async def keep(
        self,
        account: Account,
        answer_id: str,
        request: MessagesRequest,
        reply: Sequence[OutputBlock],
        *,
        previous: str | None,
    ) -> None:
        """Keep the whole conversation of a request and its answer, in place of that of the ``previous`` answer."""
        data = await self._run(partial(_entry, request, reply), MESSAGE_CHARACTERS * len(request.messages))
        if not await self._entries.keep(account, request.cache_salt, answer_id, data) or previous is None:
            return
        try:
            await self._entries.erase(account, request.cache_salt, previous)
        except ThermoclineError as error:  # It expires as all do.
            _log.warning("thread_not_erased", message_id=previous, reason=error.message)


def _check(request: MessagesRequest, thread: MessageThread) -> None:
    """Raise InvalidRequest unless the fields beside ``thread`` go with it."""
    if (thread.type == "continue") != (thread.previous_message_id is not None):
        raise InvalidRequest(
            "previous_message_id belongs to a thread that is continued, and only to that",
            param="thread.previous_message_id",
        )
    if thread.type == "continue":
        for name in ("system", "tools"):
            if getattr(request, name):
                raise InvalidRequest(f"the thread keeps its {name}: leave them out to continue it", param=name)
    if request.messages[-1].role == "assistant" or not request.max_tokens:
        raise InvalidRequest(
            "an answer that continues the assistant's last message, or has no token, cannot be kept as a thread: send "
            "the whole conversation without `thread`",
            param="thread",
            code="thread_unsupported_request",
        )


def _entry(request: MessagesRequest, reply: Sequence[OutputBlock]) -> bytes:
    """Return a conversation and its answer in their stored form."""
    said = InputMessage(role="assistant", content=msgspec.convert(msgspec.to_builtins(reply), list[InputBlock]))
    messages = [*map(_unmarked, request.messages), said]
    return msgspec.json.encode(KeptThread(system=request.system, tools=request.tools, messages=messages))


def _unmarked(message: InputMessage) -> InputMessage:
    """Return a message without breakpoints: each was for the turn that sent it, and a request has only a few."""
    if isinstance(message.content, str):
        return message
    blocks = [
        msgspec.structs.replace(block, content=_unmarked_parts(block.content), cache_control=None)
        for block in message.content
    ]
    return msgspec.structs.replace(message, content=blocks)


def _unmarked_parts(content: str | list[ResultPart] | None) -> str | list[ResultPart] | None:
    if not isinstance(content, list):
        return content
    return [msgspec.structs.replace(part, cache_control=None) for part in content]
