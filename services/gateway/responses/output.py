"""Conversion of an answer's blocks to items of a response. Pure."""

from __future__ import annotations

from msgspec import UNSET

from services.gateway.openai_schema.chat import ChatLogprob
from services.gateway.replies.blocks import Block
from services.gateway.responses.ids import suffix_of
from services.gateway.responses.items import (
    FunctionCallItem,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
)
from services.gateway.responses.tools import Names

_PREFIX = {"text": "msg", "reasoning": "rs", "call": "fc"}


class ItemWriter:
    """A writer of one response's items."""

    def __init__(self, response_id: str, names: Names) -> None:
        """Take the unique part of ``response_id`` for the ids of the items; ``names`` are those in namespaces."""
        self._suffix = suffix_of(response_id)
        self._names = names
        self._logprobs: dict[int, list[ChatLogprob]] = {}

    def id_of(self, block: Block) -> str:
        """Return the item's id: a prefix by kind, the response's unique part, and the block's index."""
        return f"{_PREFIX[block.kind]}_{self._suffix}{block.index}"

    def name_of(self, block: Block) -> str:
        """Return the name of the called function, without that of its namespace."""
        return self._names[block.name][1] if block.name in self._names else block.name

    def note_logprobs(self, block: Block, told: list[ChatLogprob]) -> None:
        """Keep logprobs sent with a part of a text, for the whole of it."""
        if told:
            self._logprobs.setdefault(block.index, []).extend(told)

    def logprobs(self, block: Block) -> list[ChatLogprob]:
        """Return all logprobs noted for the block."""
        return self._logprobs.get(block.index, [])

    def part(self, block: Block, text: str) -> OutputText | ReasoningText:
        """Return the only part of a message or of reasoning; ``text`` is "" at its beginning."""
        if block.kind == "reasoning":
            return ReasoningText(text=text)
        return OutputText(text=text, logprobs=self.logprobs(block) if text else [])

    def begun(self, block: Block) -> OutputItem:
        """Return an item without content yet."""
        if block.kind == "call":
            return self._call(block, "", "in_progress")
        if block.kind == "reasoning":
            return ReasoningItem(id=self.id_of(block), status="in_progress", content=[])
        return MessageItem(id=self.id_of(block), status="in_progress", content=[])

    def item(self, block: Block, status: ItemStatus) -> OutputItem:
        """Return the item with its content so far."""
        text = block.text
        if block.kind == "call":
            return self._call(block, text, status)
        if block.kind == "reasoning":
            return ReasoningItem(id=self.id_of(block), status=status, content=[ReasoningText(text=text)])
        return MessageItem(
            id=self.id_of(block), status=status, content=[OutputText(text=text, logprobs=self.logprobs(block))]
        )

    def _call(self, block: Block, arguments: str, status: ItemStatus) -> FunctionCallItem:
        return FunctionCallItem(
            id=self.id_of(block),
            status=status,
            call_id=block.call_id,
            name=self.name_of(block),
            namespace=self._names[block.name][0] if block.name in self._names else UNSET,
            arguments=arguments,
        )
