"""Items of the Responses API: the parts of a conversation as it is sent, kept and listed."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from services.gateway.openai_schema.chat import ChatLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class ItemPart(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """One part of an item's content.

    Its ``type`` is ``input_text``, ``output_text``, ``text``, ``refusal``, ``reasoning_text`` or ``summary_text``.
    """

    type: str
    text: str | None = None
    refusal: str | None = None


class Item(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """One item of a conversation.

    Its ``type`` is ``message`` (also without a type), ``function_call``, ``function_call_output`` or ``reasoning``; or
    ``item_reference``, which stands for the item of an earlier response that has its ``id``. Other ids are ignored.
    """

    type: str | None = None
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[ItemPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    output: str | list[ItemPart] | None = None
    summary: list[ItemPart] | None = None
    status: str | None = None


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag="output_text"):
    """The text of a message of the answer; ``annotations`` is always empty."""

    text: str
    annotations: list[Any] = []
    logprobs: list[ChatLogprob] = []


class ReasoningText(msgspec.Struct, frozen=True, kw_only=True, tag="reasoning_text"):
    """The text of reasoning."""

    text: str


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag="message"):
    """A message of the answer, with one part."""

    id: str
    role: Literal["assistant"] = "assistant"
    status: ItemStatus
    content: list[OutputText]


class FunctionCallItem(msgspec.Struct, frozen=True, kw_only=True, tag="function_call"):
    """A call of a function, of a namespace or of none; ``arguments`` is JSON text as the model wrote it."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag="reasoning"):
    """The reasoning as the model wrote it; ``summary`` is always empty."""

    id: str
    status: ItemStatus
    summary: list[Any] = []
    content: list[ReasoningText]


OutputItem = MessageItem | FunctionCallItem | ReasoningItem


class ItemList(msgspec.Struct, frozen=True, kw_only=True):
    """One page of items."""

    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str
    last_id: str
    has_more: bool
