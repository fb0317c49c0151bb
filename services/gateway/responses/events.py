"""Events of a streamed response. Each has a number of its own, counted from 0."""

from __future__ import annotations

import msgspec

from services.gateway.openai_schema.chat import ChatLogprob
from services.gateway.responses.items import OutputItem, OutputText, ReasoningText
from services.gateway.responses.schema import ResponseObject


class ResponseEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all."""

    sequence_number: int


class ResponseCreated(ResponseEvent, frozen=True, kw_only=True, tag="response.created"):
    response: ResponseObject


class ResponseInProgress(ResponseEvent, frozen=True, kw_only=True, tag="response.in_progress"):
    response: ResponseObject


class ResponseCompleted(ResponseEvent, frozen=True, kw_only=True, tag="response.completed"):
    response: ResponseObject


class ResponseIncomplete(ResponseEvent, frozen=True, kw_only=True, tag="response.incomplete"):
    response: ResponseObject


class ResponseFailed(ResponseEvent, frozen=True, kw_only=True, tag="response.failed"):
    response: ResponseObject


class OutputItemAdded(ResponseEvent, frozen=True, kw_only=True, tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class OutputItemDone(ResponseEvent, frozen=True, kw_only=True, tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class OfItem(ResponseEvent, frozen=True, kw_only=True):
    """Base of what happens within an item."""

    item_id: str
    output_index: int


class ContentPartAdded(OfItem, frozen=True, kw_only=True, tag="response.content_part.added"):
    content_index: int = 0
    part: OutputText | ReasoningText


class ContentPartDone(OfItem, frozen=True, kw_only=True, tag="response.content_part.done"):
    content_index: int = 0
    part: OutputText | ReasoningText


class OutputTextDelta(OfItem, frozen=True, kw_only=True, tag="response.output_text.delta"):
    content_index: int = 0
    delta: str
    logprobs: list[ChatLogprob]


class OutputTextDone(OfItem, frozen=True, kw_only=True, tag="response.output_text.done"):
    content_index: int = 0
    text: str
    logprobs: list[ChatLogprob]


class ReasoningTextDelta(OfItem, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    content_index: int = 0
    delta: str


class ReasoningTextDone(OfItem, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    content_index: int = 0
    text: str


class ArgumentsDelta(OfItem, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(OfItem, frozen=True, kw_only=True, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


class StreamError(ResponseEvent, frozen=True, kw_only=True, tag="error"):
    """What ends a stream from outside of the response."""

    code: str | None
    message: str
    param: str | None = None


EVENTS = (
    ResponseCreated, ResponseInProgress, OutputItemAdded, ContentPartAdded, OutputTextDelta, OutputTextDone,
    ReasoningTextDelta, ReasoningTextDone, ArgumentsDelta, ArgumentsDone, ContentPartDone, OutputItemDone,
    ResponseCompleted, ResponseIncomplete, ResponseFailed, StreamError,
)  # fmt: skip
