"""A cell's messages to routers: the heads of prompts that it holds, and how busy it is.

They travel on ``tc.cells.>``, the only subjects that leave a cell, over leaf nodes or gateways of NATS. No scheduler
reads or writes them, and nothing that a core decides depends on them.
"""

from __future__ import annotations

from shared.messages.base import Message

HEAD_BYTES = 8


class CellHeads(Message, frozen=True):
    """Heads of prompts that a cell holds; a gateway publishes them, numbered so that a receiver notices losses.

    ``added`` and ``removed`` are digests of heads (``services.gateway.prompt_heads``), 8 bytes each, little-endian. A
    whole summary comes in parts: with ``is_first`` all earlier ones are void, and ``more`` parts follow.
    """

    cell: str
    gateway: str
    incarnation: str
    number: int
    added: bytes = b""
    removed: bytes = b""
    is_first: bool = False
    more: int = 0


class CellLoad(Message, frozen=True):
    """A cell's load by its scheduler's last status; a gateway publishes it about once a second."""

    cell: str
    gateway: str
    incarnation: str
    models: tuple[str, ...] = ()
    workers: int = 0
    running: int = 0
    queued: int = 0
    max_queued: int = 0
    heads_number: int = 0  # Number of the last CellHeads.
    asked_tokens: int = 0  # Tokens of all prompts that this gateway's scheduler accepted.
    found_tokens: int = 0  # Prompt tokens of the cell that its scheduler found cached so far.
    token_bytes: float = 4.0  # Recent average length of a token's text in bytes.
    fingerprint: str = ""  # The model's fingerprint: all that answers depend on.


class HeadsWanted(Message, frozen=True):
    """A router's request that the gateways of this cell send whole summaries."""

    cell: str
