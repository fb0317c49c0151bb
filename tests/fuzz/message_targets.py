"""The codecs of messages, snapshots and recordings."""

from __future__ import annotations

import importlib
import pkgutil
import random
import struct
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from services.scheduler import core
from services.scheduler.recording import MAGIC, read_frames
from services.scheduler.snapshots import Snapshot, decode_snapshot, encode_snapshot, take_snapshot
from shared import messages
from shared.codec import Input, Published, decode, decode_input, decode_published
from shared.errors import CodecError, RecordingError, TransportError
from shared.memory.cuda_ipc import CudaExport, read_export
from shared.memory.device_parts import DevicePartsView
from shared.memory.device_pool_view import DevicePoolView, check_device_handle
from shared.memory.host_pool import HostPoolView
from shared.messages.base import Message
from shared.messages.pools import KvGeometry, PartSpan, PoolHandle, PoolPart
from tests.fuzz.made_values import packed_samples
from tests.fuzz.scratch import through_file
from tests.fuzz.targets import Target
from tests.scripted_cell import scripted_cell, write_recording

SAMPLES = 12
_FRAME = struct.Struct("<IIB")


def message_targets() -> list[Target]:
    """Every message by itself, and the two unions that streams hold."""
    chance = random.Random("samples of messages")
    targets = [
        Target("input", decode_input, (CodecError,), tuple(packed_samples(Input, 80, chance)), weight=30),
        Target("published", decode_published, (CodecError,), tuple(packed_samples(Published, 60, chance)), weight=20),
    ]
    for kind in message_kinds():
        samples = tuple(packed_samples(kind, SAMPLES, chance))
        targets.append(Target(f"message.{kind.__name__}", _decoder(kind), (CodecError,), samples))
    return targets


def message_kinds() -> list[type[Message]]:
    """Every message type of ``shared.messages``, in order of module and name."""
    kinds: dict[str, type[Message]] = {}
    for module in pkgutil.iter_modules(messages.__path__):
        loaded = importlib.import_module(f"{messages.__name__}.{module.name}")
        for kind in vars(loaded).values():
            if isinstance(kind, type) and issubclass(kind, Message) and kind is not Message:
                kinds[kind.__name__] = kind
    return [kinds[name] for name in sorted(kinds)]


def _decoder(kind: type[Message]) -> Any:
    return lambda data: decode(data, kind)


def state_targets() -> list[Target]:
    """The scheduler's snapshots, and recordings of its streams."""
    cells = [scripted_cell(requests) for requests in (0, 2, 12)]
    states = tuple(core.encode_state(cell.fold.state) for cell in cells)
    snapshots = tuple(encode_snapshot(take_snapshot(cell.fold)) for cell in cells)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recording"
        write_recording(cells[1], path)
        recording = path.read_bytes()
    return [
        Target("state", core.decode_state, (CodecError,), states, weight=12),
        Target("snapshot", _state_of_snapshot, (RecordingError, CodecError), snapshots, _reseal_snapshot, weight=8),
        Target(
            "recording",
            through_file(lambda path: _read_recording(path)),
            (RecordingError,),
            (recording,),
            _reseal_recording,
            weight=12,
        ),
    ]


def _state_of_snapshot(data: bytes) -> None:
    core.decode_state(decode_snapshot(data).state)


def _reseal_snapshot(data: bytearray) -> None:
    """The digest of what was changed, where it still looks like a snapshot."""
    try:
        snapshot = msgspec.msgpack.decode(data, type=Snapshot)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return
    digest = xxhash.xxh3_64_intdigest(snapshot.state)
    data[:] = encode_snapshot(msgspec.structs.replace(snapshot, digest=digest))


def _read_recording(path: Path) -> None:
    for _ in read_frames(path):
        pass


def _reseal_recording(data: bytearray) -> None:
    """The checksum of each frame, as far as lengths lead from one to the next."""
    for at, end in _frames(data):
        kind = data[at + 8]
        checksum = zlib.crc32(data[at + _FRAME.size : end], zlib.crc32(bytes([kind])))
        data[at + 4 : at + 8] = struct.pack("<I", checksum)


def _frames(data: bytearray) -> Iterator[tuple[int, int]]:
    at = len(MAGIC)
    while at + _FRAME.size <= len(data):
        end = at + _FRAME.size + _FRAME.unpack_from(data, at)[0]
        if end > len(data):
            return
        yield at, end
        at = end


def pool_targets() -> list[Target]:
    """Handles of pools that another process sent: decoded, checked and, where nothing speaks against it, mapped."""
    geometry = KvGeometry(layers=2, kv_heads=4, head_dim=2, page_size=16, dtype="float16")
    device = PoolHandle(
        kind="shm", layout="layer_first", name="fuzzed-none", nbytes=4 * geometry.page_bytes, pages=4, geometry=geometry
    )
    halves = tuple(
        PoolPart(name=f"fuzzed-none-{first}", nbytes=device.nbytes // 2, first_head=first, kv_heads=2)
        for first in (0, 2)
    )
    spans = tuple(
        PoolPart(
            name=f"fuzzed-none-{first}",
            nbytes=device.nbytes,
            first_head=0,
            kv_heads=0,
            geometry=geometry,
            spans=(PartSpan(first=first, own_first=0, planes=2, offset=0, own_offset=8, nbytes=8, rows=16),),
        )
        for first in (0, 2)
    )
    handles = (
        device,
        msgspec.structs.replace(device, parts=halves),
        msgspec.structs.replace(device, parts=spans),
        msgspec.structs.replace(device, layout="page_first", nbytes=64 * 1024, table_offset=4 * geometry.page_bytes),
        msgspec.structs.replace(device, kind="cuda_ipc", name="", ipc=msgspec.msgpack.encode(_export(device))),
    )
    samples = tuple(msgspec.msgpack.encode(handle) for handle in handles)
    return [Target("pool_handle", _attach, (CodecError, TransportError), samples, weight=15)]


def _export(device: PoolHandle) -> CudaExport:
    return CudaExport(
        device_uuid="3f5b0e0c", handle=bytes(66), storage_bytes=device.nbytes, storage_offset_bytes=0,
        counter_file=b"/torch_12_34_0", counter=0, event=bytes(64), waits_for_event=True, offset=0,
        shape=(2, 2, 4, 256), stride=(2048, 1024, 256, 1),
    )  # fmt: skip


def _attach(data: bytes) -> None:
    """Each way to take a handle; the segments of the samples do not exist, so none is mapped."""
    handle = decode(data, PoolHandle)
    ways = (
        lambda: HostPoolView.attach(handle),
        lambda: DevicePoolView.attach(handle),
        lambda: DevicePartsView.attach(handle, DevicePoolView.attach),
        lambda: check_device_handle(handle),
        lambda: read_export(handle.ipc),
    )
    for attach in ways:
        try:
            attach()
        except TransportError:
            continue
