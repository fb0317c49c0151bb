"""What pages of a simulated cell hold instead of tensors, so that every wrong read is seen.

A page holds the identity of everything before it and its own tokens, which is all that its KV depends on. A copy of a
page in a pool or on a disk also has the identity that was written beside it: whoever reads it checks that one, as real
processes do, and attention checks what the page really holds. So a page that was copied while somebody else wrote to
it is found even though its header is right.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.ids import chain_page, split_digests
from shared.messages.base import pack_int32
from tests.stateful.model_pages import next_token


class Broken(AssertionError):
    """A property of the cell does not hold."""


class WrongContent(Broken):
    """Something used KV that is not what it was taken for."""


def require(claim: bool, text: str) -> None:
    """Raise :class:`Broken` unless the claim holds."""
    if not claim:
        raise Broken(text)


class Page:
    """KV of the tokens of one page behind ``above``, the identity of all before it. Not changed once it is full."""

    __slots__ = ("_identity", "above", "tokens")

    def __init__(self, above: bytes, tokens: tuple[int, ...] = ()) -> None:
        self.above = above
        self.tokens = tokens
        self._identity = b""

    def identity(self) -> bytes:
        """The identity of what the page really holds."""
        if not self._identity:
            self._identity = chain_page(self.above, pack_int32(self.tokens))
        return self._identity

    def __repr__(self) -> str:
        return f"Page({self.above.hex()[:8]}, {list(self.tokens[:4])}...)"


GARBAGE = Page(b"garbage")
"""What a device page holds whose load failed."""


@dataclass
class Copy:
    """A page in a host pool or in a chunk, the identity written beside it, and whether its checksum is wrong."""

    claimed: bytes
    page: Page
    is_corrupt: bool = False

    def is_good(self, identity: bytes) -> bool:
        """Whether it passes the check of identity and checksum."""
        return not self.is_corrupt and self.claimed == identity


@dataclass
class HostPool:
    """A pool of a storage's memory, by page number. A mapping of it outlives the storage."""

    storage_id: str
    name: str
    pages: int
    memory: dict[int, Copy] = field(default_factory=dict)


def lossy_root(request_id: str, attempt: int) -> bytes:
    """What stands for everything before the first page behind a sparse prefix. No exact request has this identity."""
    return chain_page(b"lossy-root", f"{request_id} {attempt}".encode())


def sampled(seed: int, tokens: list[int], *, is_lossy: bool) -> int:
    """The token that follows: a pure function, another one where attention read a part of the prefix only."""
    return next_token(-1 - seed if is_lossy else seed, tokens)


def pieces(packed: bytes) -> list[bytes]:
    """Identities of a packed list."""
    return split_digests(packed)
