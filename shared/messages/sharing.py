"""Calls by which a storage learns where another's host memory can be read. None of it is an input of the core."""

from __future__ import annotations

from shared.messages.base import Message
from shared.messages.pools import PoolHandle


class OpenPool(Message, frozen=True):
    """Call ``rpc.storage.<id>.pool`` of another node; answered by ``OpenedPool``. ``engine`` is that of the caller."""

    engine: str
    incarnation: str  # The incarnation that the caller was told to read from.


class OpenedPool(Message, frozen=True):
    """Where the bytes of ``handle``'s segment begin in the lender's memory, for one-sided reads.

    ``metadata`` is the engine's own description of this process and the memory that it opened.
    """

    incarnation: str
    metadata: bytes
    address: int
    handle: PoolHandle
