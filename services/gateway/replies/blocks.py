"""An answer as a list of blocks: consecutive parts of one kind together, and each tool call by itself.

Both APIs with typed content write answers so: a block begins, grows, and ends before the next one begins.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from services.gateway.replies.parts import CallArguments, CallBegun, ReplyPart, Text

BlockKind = Literal["text", "reasoning", "call"]


@dataclass(slots=True)
class Block:
    """One block. ``text`` is visible text, reasoning, or a call's arguments as JSON text, by its kind."""

    kind: BlockKind
    index: int
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of its text so far."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the list: ``block`` began, grew by ``text``, or ended."""

    kind: Literal["began", "grew", "ended"]
    block: Block
    text: str = ""


class BlockList:
    """The blocks of one choice, built from its parts. All methods but the properties change it."""

    def __init__(self) -> None:
        """Begin with no blocks."""
        self.blocks: list[Block] = []
        self._open: Block | None = None
        self._calls: dict[int, Block] = {}

    @property
    def has_calls(self) -> bool:
        """Whether a tool call has begun."""
        return bool(self._calls)

    def take(self, parts: Iterable[ReplyPart]) -> list[Change]:
        """Add ``parts``; return the changes, in order."""
        changes: list[Change] = []
        for part in parts:
            if isinstance(part, CallBegun):
                block = self._begin("call", changes, call_id=part.call_id, name=part.name)
                self._calls[part.index] = block
            elif isinstance(part, CallArguments):
                self._grow(self._calls[part.index], part.text, changes)
            elif part.text:
                kind: BlockKind = "text" if isinstance(part, Text) else "reasoning"
                block = self._open if self._open and self._open.kind == kind else self._begin(kind, changes)
                self._grow(block, part.text, changes)
        return changes

    def end(self) -> list[Change]:
        """Close the open block, if any; return the change."""
        changes: list[Change] = []
        self._close(changes)
        return changes

    def _begin(self, kind: BlockKind, changes: list[Change], *, call_id: str = "", name: str = "") -> Block:
        self._close(changes)
        block = self._open = Block(kind, len(self.blocks), call_id, name)
        self.blocks.append(block)
        changes.append(Change("began", block))
        return block

    def _grow(self, block: Block, text: str, changes: list[Change]) -> None:
        block.pieces.append(text)
        changes.append(Change("grew", block, text))

    def _close(self, changes: list[Change]) -> None:
        if self._open is not None:
            changes.append(Change("ended", self._open))
            self._open = None
