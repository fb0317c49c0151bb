"""The messages: those of vLLM 0.32 (``vllm/distributed/kv_events.py``), which llm-d's and Dynamo's routers read.

A batch is a MessagePack array ``[time, events, data_parallel_rank]``, an event a map with its class in ``type``. Blocks
are pages; their hashes are the page identities of :mod:`shared.ids`, 16 bytes each.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Medium = Literal["GPU", "CPU"]
"""Device memory of any worker of the cell, and host memory of any of its nodes."""

DEVICE: Medium = "GPU"
HOST: Medium = "CPU"


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Consecutive blocks of one sequence, behind the block ``parent_block_hash`` (None at its beginning)."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: Medium
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Blocks that this medium does not hold any more."""

    block_hashes: list[bytes]
    medium: Medium


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """An event that takes back all blocks of all media; the events that follow announce those that are held."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """Events that belong together. ``ts`` is in seconds since 1970."""

    ts: float
    events: list[Event]
    data_parallel_rank: int = 0


_ENCODER = msgspec.msgpack.Encoder()


def encode_batch(batch: Batch) -> bytes:
    """Return the payload of a message (MessagePack)."""
    return _ENCODER.encode(batch)
