"""The view of an answer of the Responses API. Pure, with time as an argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from services.gateway import sse
from services.gateway.assembly import Delta
from services.gateway.openai_schema.chat import ChatLogprob
from services.gateway.openai_schema.explanation import Explanation
from services.gateway.pending import Choice, Generation
from services.gateway.replies.blocks import BlockList, Change
from services.gateway.responses import events
from services.gateway.responses.items import OutputItem
from services.gateway.responses.output import ItemWriter
from services.gateway.responses.schema import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseFailure,
    ResponseObject,
    ResponseUsage,
)
from services.gateway.responses.tools import Names
from services.gateway.token_text import TokenTexts
from services.gateway.views.logprobs import chat_logprobs
from services.gateway.views.usage import usage_report
from shared.errors import CapacityError, ThermoclineError


class ResponsesView:
    """The view of an answer with one choice, the only kind of this API. Implements ``AnswerView``."""

    framing = sse.NAMED
    wants_explanation = False

    def __init__(
        self,
        generation: Generation,
        response: ResponseObject,
        *,
        logprobs: int | None,
        texts: TokenTexts,
        names: Names | None = None,
        now_ns: Callable[[], int],
    ) -> None:
        """``response`` is in progress and has no output yet.

        ``logprobs`` is the number of alternatives for each token, None if none were asked for. ``names`` are those of
        functions in namespaces. ``now_ns`` is the wall clock.
        """
        self._generation = generation
        self.response = response
        self._top = logprobs
        self._texts = texts
        self._now_ns = now_ns
        self._list = BlockList()
        self._items = ItemWriter(response.id, names or {})
        self._logprobs: list[ChatLogprob] = []
        self._number = 0
        self.explanation: Explanation | None = None

    def prepare(self) -> None:
        """Make nothing: the first events have the time and what is known of the prompt."""

    def opening(self) -> list[bytes]:
        """Return the events ``response.created`` and ``response.in_progress``."""
        return [
            self._event(events.ResponseCreated, response=self.response),
            self._event(events.ResponseInProgress, response=self.response),
        ]

    def chunk(self, choice: Choice, delta: Delta) -> bytes | None:
        """Return all events of the new parts; those of the end come with ``closing``."""
        data = b"".join(self._change(change) for change in self._take(choice, delta))
        return data or None

    def closing(self) -> list[bytes]:
        """Return the event of the end. Call ``finish`` before."""
        kind = events.ResponseCompleted if self.response.status == "completed" else events.ResponseIncomplete
        return [self._event(kind, response=self.response)]

    def failed(self, error: ThermoclineError) -> bytes:
        """Return the event ``response.failed``, with the output so far."""
        is_limit = isinstance(error, CapacityError) and error.status == 429
        failed = msgspec.structs.replace(
            self.response,
            status="failed",
            error=ResponseFailure(code="rate_limit_exceeded" if is_limit else "server_error", message=error.message),
            output=self._output("incomplete"),
            store=False,
        )
        return self._event(events.ResponseFailed, response=failed)

    def finish(self) -> None:
        """Complete ``response``, after the last token."""
        choice = self._generation.choices[0]
        for change in self._take(choice, choice.assembly.take()):  # The whole answer, where it is not streamed.
            if change.kind == "grew" and change.block.kind == "text":
                self._told(change)
        is_cut = choice.assembly.finish == "length"
        self.response = msgspec.structs.replace(
            self.response,
            status="incomplete" if is_cut else "completed",
            incomplete_details=IncompleteDetails(reason="max_output_tokens") if is_cut else None,
            completed_at=None if is_cut else self._now_ns() // 10**9,
            output=self._output("incomplete" if is_cut else "completed"),
            usage=response_usage(self._generation),
        )

    def whole(self) -> bytes:
        """Return ``response`` as JSON. Call ``finish`` before."""
        return msgspec.json.encode(self.response)

    def _output(self, last: Any) -> list[OutputItem]:
        """Return all items; ``last`` is the status of the one that ended with the answer."""
        blocks = self._list.blocks
        return [self._items.item(block, last if block is blocks[-1] else "completed") for block in blocks]

    def _take(self, choice: Choice, delta: Delta) -> list[Change]:
        if self._top is not None:
            self._logprobs += chat_logprobs(delta.logprobs, self._top, self._texts).content
        changes = self._list.take(choice.reply.read(delta)) if not delta.is_empty else []
        if delta.finish is not None:
            changes += self._list.end()
        return changes

    def _change(self, change: Change) -> bytes:
        block = change.block
        at: dict[str, Any] = {"output_index": block.index, "item_id": self._items.id_of(block)}
        if change.kind == "began":
            return self._began(change, at)
        if change.kind == "ended":
            return self._ended(change, at)
        if block.kind == "call":
            return self._event(events.ArgumentsDelta, **at, delta=change.text)
        if block.kind == "reasoning":
            return self._event(events.ReasoningTextDelta, **at, delta=change.text)
        return self._event(events.OutputTextDelta, **at, delta=change.text, logprobs=self._told(change))

    def _began(self, change: Change, at: dict[str, Any]) -> bytes:
        block = change.block
        added = self._event(events.OutputItemAdded, output_index=block.index, item=self._items.begun(block))
        if block.kind == "call":
            return added
        return added + self._event(events.ContentPartAdded, **at, part=self._items.part(block, ""))

    def _ended(self, change: Change, at: dict[str, Any]) -> bytes:
        block = change.block
        text = block.text
        if block.kind == "call":
            data = self._event(events.ArgumentsDone, **at, name=self._items.name_of(block), arguments=text)
        elif block.kind == "reasoning":
            data = self._event(events.ReasoningTextDone, **at, text=text)
        else:
            data = self._event(events.OutputTextDone, **at, text=text, logprobs=self._items.logprobs(block))
        if block.kind != "call":
            data += self._event(events.ContentPartDone, **at, part=self._items.part(block, text))
        is_cut = self._generation.choices[0].assembly.finish == "length" and block is self._list.blocks[-1]
        item = self._items.item(block, "incomplete" if is_cut else "completed")
        return data + self._event(events.OutputItemDone, output_index=block.index, item=item)

    def _told(self, change: Change) -> list[ChatLogprob]:
        """Return the unsent logprobs of all tokens up to this text, those of calls and reasoning before it included."""
        told, self._logprobs = self._logprobs, []
        self._items.note_logprobs(change.block, told)
        return told

    def _event(self, kind: type[events.ResponseEvent], **fields: Any) -> bytes:
        event = kind(sequence_number=self._number, **fields)
        self._number += 1
        return named(event)


def named(event: events.ResponseEvent) -> bytes:
    """Return an event framed under its type's name."""
    name = event.__struct_config__.tag
    assert isinstance(name, str)
    return sse.named_event(name, msgspec.json.encode(event))


def response_usage(generation: Generation) -> ResponseUsage:
    """Return the numbers of tokens so far."""
    report = usage_report(generation)
    return ResponseUsage(
        input_tokens=report.prompt_tokens,
        input_tokens_details=InputTokensDetails(
            cached_tokens=report.prompt_tokens_details.cached_tokens,
            cache_write_tokens=report.prompt_tokens_details.cache_write_tokens,
        ),
        output_tokens=report.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=generation.choices[0].reply.reasoning_tokens or 0),
        total_tokens=report.total_tokens,
    )
