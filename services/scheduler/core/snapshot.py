"""Snapshots: the state as bytes and back. Equal states give equal bytes."""

from __future__ import annotations

import msgspec

from services.scheduler.core.state import CellState
from shared.errors import CodecError

_VERSION = 2


class _Snapshot(msgspec.Struct):
    version: int
    state: CellState


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Snapshot)


def encode_state(state: CellState) -> bytes:
    """The whole state. A fold that goes on from it gives the same outputs as one that never stopped."""
    return _ENCODER.encode(_Snapshot(_VERSION, state))


def decode_state(data: bytes) -> CellState:
    """Undo :func:`encode_state`; raises CodecError for bytes that are no snapshot of this version."""
    try:
        snapshot = _DECODER.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise CodecError(f"not a snapshot: {error}") from error
    if snapshot.version != _VERSION:
        raise CodecError(f"snapshot of version {snapshot.version}, not {_VERSION}")
    return snapshot.state
