"""Bytes to messages and back, at the edge of every process.

Encoding is deterministic (msgpack, fields in order of declaration, dictionaries in insertion order), which
replay relies on. Decoding checks types; anything wrong is a :class:`~shared.errors.CodecError`.
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

Input = (
    requests.SubmitRequest
    | requests.ReclaimRequest
    | requests.CancelRequest
    | requests.ResumeRequest
    | worker_events.WorkerJoined
    | worker_events.WorkerDraining
    | worker_events.WorkerLeft
    | worker_events.BatchDone
    | worker_events.LeaseRequested
    | worker_events.RequestFinished
    | worker_events.RequestPreempted
    | worker_events.PagesPromoted
    | worker_events.HiddenSaved
    | storage_events.StorageJoined
    | storage_events.StorageLeft
    | storage_events.HostPoolCreated
    | storage_events.BackupDone
    | storage_events.ChunksListed
    | storage_events.ChunksSaved
    | storage_events.ChunksFetched
    | storage_events.ChunksDropped
    | cell_events.CellConfigured
    | cell_events.SchedulerStarted
    | cell_events.TimerFired
    | cell_events.WorkerLost
    | cell_events.StorageLost
    | cell_events.GatewayLost
    | cell_events.InputFailed
    | cell_events.SkipInput
    | cell_events.InputSkipped
    | cell_events.FlushCache
    | cell_events.PinPrefix
    | cell_events.UnpinPrefix
)
"""Everything the scheduler's core folds."""

Published = worker_plans.WorkerPlan | storage_plans.StoragePlan | gateway_notices.GatewayNotice
"""Everything the scheduler publishes."""

M = TypeVar("M")

_ENCODER = msgspec.msgpack.Encoder()
_INPUT = msgspec.msgpack.Decoder(Input)
_PUBLISHED = msgspec.msgpack.Decoder(Published)
_DECODERS: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def encode(message: msgspec.Struct) -> bytes:
    """Encode any message."""
    return _ENCODER.encode(message)


def decode_input(data: bytes) -> Input:
    """Decode one message of ``TC_INPUTS``."""
    try:
        decoded: Input = _INPUT.decode(data)
    except UNDECODABLE as error:
        raise CodecError(f"not an input: {error}") from error
    return decoded


def decode_published(data: bytes) -> Published:
    """Decode one message of ``TC_OUTPUTS``."""
    try:
        decoded: Published = _PUBLISHED.decode(data)
    except UNDECODABLE as error:
        raise CodecError(f"not a plan or notice: {error}") from error
    return decoded


def decode(data: bytes, expected: type[M]) -> M:
    """Decode a message that must be of type ``expected``."""
    decoder = _DECODERS.get(expected)
    if decoder is None:
        decoder = _DECODERS[expected] = msgspec.msgpack.Decoder(expected)
    try:
        message: M = decoder.decode(data)
    except UNDECODABLE as error:
        raise CodecError(f"not a {expected.__name__}: {error}") from error
    return message
