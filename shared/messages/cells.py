"""What a cell tells those who choose between cells: the heads of prompts that it holds, and how busy it is.

These travel on ``tc.cells.>``, the only subjects that leave a cell, over leaf nodes or gateways of NATS. No scheduler
reads or writes them, and nothing that a core decides depends on them.
"""

from __future__ import annotations

from shared.messages.base import Message

HEAD_BYTES = 8


class CellHeads(Message, frozen=True):
    """Published by a gateway of a cell; numbers rise by one, so that a receiver knows what it missed.

    ``added`` and ``removed`` are digests of heads (``services.gateway.prompt_heads``), 8 bytes each, little-endian. A
    whole summary is told in parts: with ``is_first`` what was told before is void, and ``more`` parts follow.
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
    """Published by a gateway of a cell about once a second: what its scheduler said last."""

    cell: str
    gateway: str
    incarnation: str
    models: tuple[str, ...] = ()
    workers: int = 0
    running: int = 0
    queued: int = 0
    max_queued: int = 0
    heads_number: int = 0  # Of the last CellHeads.
    asked_tokens: int = 0  # Of all prompts that this gateway sent to its scheduler, less those that were refused.
    found_tokens: int = 0  # Of all prompts of the cell, those that its scheduler found in a cache, since it began.
    token_bytes: float = 4.0  # Length of a token of text, on average lately.
    fingerprint: str = ""  # Of the model: all that answers follow from.


class HeadsWanted(Message, frozen=True):
    """Published by a router: let the gateways of this cell tell whole summaries."""

    cell: str
