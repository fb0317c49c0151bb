"""Encoding and decoding of messages, at the edge of every process.

Encoding is deterministic (msgpack, fields in order of declaration, dictionaries in insertion order), which replay
relies on. Decoding checks types; anything wrong is a :class:`~shared.errors.CodecError`.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from shared.errors import CodecError
from shared.messages import (
    cell_events,
    gateway_notices,
    requests,
    storage_events,
    storage_plans,
    worker_events,
    worker_plans,
)
from shared.undecodable import UNDECODABLE

Input = requests.RequestInput | worker_events.WorkerEvent | storage_events.StorageEvent | cell_events.CellEvent
"""Every message that the scheduler's core folds."""

Published = worker_plans.WorkerPlan | storage_plans.StoragePlan | gateway_notices.GatewayNotice
"""Every message that the scheduler publishes."""

M = TypeVar("M")

_ENCODER = msgspec.msgpack.Encoder()
_INPUT = msgspec.msgpack.Decoder(Input)
_PUBLISHED = msgspec.msgpack.Decoder(Published)
_DECODERS: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def encode(message: msgspec.Struct) -> bytes:
    """Return the bytes of a message; equal messages give equal bytes."""
    return _ENCODER.encode(message)


def decode_input(data: bytes) -> Input:
    """Return one message of ``TC_INPUTS``. Raises CodecError for other bytes."""
    try:
        decoded: Input = _INPUT.decode(data)
    except UNDECODABLE as error:
        raise CodecError(f"not an input: {error}") from error
    return decoded


def decode_published(data: bytes) -> Published:
    """Return one message of ``TC_OUTPUTS``. Raises CodecError for other bytes."""
    try:
        decoded: Published = _PUBLISHED.decode(data)
    except UNDECODABLE as error:
        raise CodecError(f"not a plan or notice: {error}") from error
    return decoded


def decode(data: bytes, expected: type[M]) -> M:
    """Return a message of type ``expected``. Raises CodecError for other bytes."""
    decoder = _DECODERS.get(expected)
    if decoder is None:
        decoder = _DECODERS[expected] = msgspec.msgpack.Decoder(expected)
    try:
        message: M = decoder.decode(data)
    except UNDECODABLE as error:
        raise CodecError(f"not a {expected.__name__}: {error}") from error
    return message
