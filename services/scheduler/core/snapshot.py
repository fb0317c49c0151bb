"""Snapshots: the state as bytes and back. Equal states give equal bytes."""

from __future__ import annotations

from typing import Any

import msgspec

from services.scheduler.core.eviction import VictimQueues
from services.scheduler.core.residency import offer_all
from services.scheduler.core.state import CellState
from shared.errors import CodecError

_VERSION = 1


class _Snapshot(msgspec.Struct):
    version: int
    state: CellState


def _leave_out(value: Any) -> None:
    """Encode what is derived as nothing."""
    if not isinstance(value, VictimQueues):
        raise NotImplementedError(f"a snapshot cannot hold a {type(value).__name__}")


def _start_empty(kind: type, value: Any) -> Any:
    if kind is not VictimQueues:
        raise NotImplementedError(f"a snapshot cannot hold a {kind.__name__}")
    return VictimQueues()


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_leave_out)
_DECODER = msgspec.msgpack.Decoder(_Snapshot, dec_hook=_start_empty)


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
    offer_all(snapshot.state)
    return snapshot.state
