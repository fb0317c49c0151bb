"""Events of a streamed response. Each has a number of its own, counted from 0."""

from __future__ import annotations

import msgspec

from services.gateway.openai_schema.chat import ChatLogprob
from services.gateway.responses.items import OutputItem, OutputText, ReasoningText
from services.gateway.responses.schema import ResponseObject


class ResponseEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The base of all events."""

    sequence_number: int


class ResponseCreated(ResponseEvent, frozen=True, kw_only=True, tag="response.created"):
    """The first event; the response has no output."""

    response: ResponseObject


class ResponseInProgress(ResponseEvent, frozen=True, kw_only=True, tag="response.in_progress"):
    """The second event; the response has no output."""

    response: ResponseObject


class ResponseCompleted(ResponseEvent, frozen=True, kw_only=True, tag="response.completed"):
    """The last event of a whole answer, with all of its output."""

    response: ResponseObject


class ResponseIncomplete(ResponseEvent, frozen=True, kw_only=True, tag="response.incomplete"):
    """The last event of an answer that was cut off, with its output so far."""

    response: ResponseObject


class ResponseFailed(ResponseEvent, frozen=True, kw_only=True, tag="response.failed"):
    """The last event of an answer that failed, with its error and its output so far."""

    response: ResponseObject


class OutputItemAdded(ResponseEvent, frozen=True, kw_only=True, tag="response.output_item.added"):
    """The event that begins an item, without its content."""

    output_index: int
    item: OutputItem


class OutputItemDone(ResponseEvent, frozen=True, kw_only=True, tag="response.output_item.done"):
    """The event that ends an item, with all of its content."""

    output_index: int
    item: OutputItem


class OfItem(ResponseEvent, frozen=True, kw_only=True):
    """The base of events within an item."""

    item_id: str
    output_index: int


class ContentPartAdded(OfItem, frozen=True, kw_only=True, tag="response.content_part.added"):
    """The event that begins the only part of a message or of reasoning."""

    content_index: int = 0
    part: OutputText | ReasoningText


class ContentPartDone(OfItem, frozen=True, kw_only=True, tag="response.content_part.done"):
    """The event that ends the part, with all of its text."""

    content_index: int = 0
    part: OutputText | ReasoningText


class OutputTextDelta(OfItem, frozen=True, kw_only=True, tag="response.output_text.delta"):
    """Visible text that a message grew by, and its tokens' logprobs if asked for."""

    content_index: int = 0
    delta: str
    logprobs: list[ChatLogprob]


class OutputTextDone(OfItem, frozen=True, kw_only=True, tag="response.output_text.done"):
    """The whole text of a message, and all of its logprobs."""

    content_index: int = 0
    text: str
    logprobs: list[ChatLogprob]


class ReasoningTextDelta(OfItem, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    """Text that reasoning grew by."""

    content_index: int = 0
    delta: str


class ReasoningTextDone(OfItem, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    """The whole text of reasoning."""

    content_index: int = 0
    text: str


class ArgumentsDelta(OfItem, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"):
    """JSON text that a call's arguments grew by."""

    delta: str


class ArgumentsDone(OfItem, frozen=True, kw_only=True, tag="response.function_call_arguments.done"):
    """All arguments of a call."""

    name: str
    arguments: str


class StreamError(ResponseEvent, frozen=True, kw_only=True, tag="error"):
    """The last event of a stream that ends for a reason outside of the response."""

    code: str | None
    message: str
    param: str | None = None


EVENTS = (
    ResponseCreated, ResponseInProgress, OutputItemAdded, ContentPartAdded, OutputTextDelta, OutputTextDone,
    ReasoningTextDelta, ReasoningTextDone, ArgumentsDelta, ArgumentsDone, ContentPartDone, OutputItemDone,
    ResponseCompleted, ResponseIncomplete, ResponseFailed, StreamError,
)  # fmt: skip
