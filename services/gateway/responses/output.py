"""Blocks of an answer as items of a response. Pure."""

from __future__ import annotations

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

_PREFIX = {"text": "msg", "reasoning": "rs", "call": "fc"}


class ItemWriter:
    """Writes the items of one response, whose id theirs derive from."""

    def __init__(self, response_id: str) -> None:
        self._suffix = suffix_of(response_id)
        self._logprobs: dict[int, list[ChatLogprob]] = {}

    def id_of(self, block: Block) -> str:
        return f"{_PREFIX[block.kind]}_{self._suffix}{block.index}"

    def note_logprobs(self, block: Block, told: list[ChatLogprob]) -> None:
        """Keep what was told with a part of a text, for the whole of it. Mutates."""
        if told:
            self._logprobs.setdefault(block.index, []).extend(told)

    def logprobs(self, block: Block) -> list[ChatLogprob]:
        return self._logprobs.get(block.index, [])

    def part(self, block: Block, text: str) -> OutputText | ReasoningText:
        """Return the one part of a message or of reasoning; with ``text`` "" it has only begun."""
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
        """Return the item as far as it goes."""
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
            id=self.id_of(block), status=status, call_id=block.call_id, name=block.name, arguments=arguments
        )
