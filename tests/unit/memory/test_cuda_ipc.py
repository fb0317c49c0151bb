"""CUDA IPC handles without a GPU: what torch exports arrives, on the right device, and nothing else is opened."""

from __future__ import annotations

import ast
import inspect
import os
import pickle
import textwrap
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from torch.multiprocessing import reductions

from services.storage.pools import open_device_pool
from services.worker.kv.device_pool import DevicePool
from shared.errors import TransportError
from shared.memory.cuda_ipc import export, find_device, open_halves, read_export
from shared.messages.pools import KvGeometry, PoolHandle
from tests.cuda.machine import CudaMachine, CudaProcess

GEOMETRY = KvGeometry(layers=2, kv_heads=1, head_dim=4, page_size=1, dtype="float32")
PAGES = 3
NBYTES = PAGES * GEOMETRY.page_bytes
SHAPE = (2, 2, PAGES, GEOMETRY.half_bytes)


@pytest.fixture
def machine() -> CudaMachine:
    return CudaMachine(["uuid-a", "uuid-b"])


@pytest.fixture
def worker(machine: CudaMachine) -> CudaProcess:
    return machine.process("worker")


@pytest.fixture
def storage(machine: CudaMachine) -> CudaProcess:
    return machine.process("storage")


@pytest.fixture
def pool() -> Iterator[DevicePool]:
    """Of a worker on a GPU, in this machine's idea of device memory."""
    made = DevicePool(GEOMETRY, PAGES, torch.arange(NBYTES, dtype=torch.int64).to(torch.uint8))
    yield made
    made.close()


def exported(pool: DevicePool, worker: CudaProcess) -> PoolHandle:
    with worker:
        return pool.handle()


def changed(handle: PoolHandle, fields: dict[str, Any]) -> PoolHandle:
    """The handle with other values in its export."""
    found = msgspec.structs.replace(read_export(handle.ipc), **fields)
    return msgspec.structs.replace(handle, ipc=msgspec.msgpack.encode(found))


def names_in(function: Any, call: str) -> list[str]:
    """Names in the tuple that ``function`` unpacks from ``call``, or else that it hands to it."""
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        value, target = node.value, node.targets[0]
        if isinstance(value.func, ast.Attribute) and value.func.attr == call:
            taken = target.elts if isinstance(target, ast.Tuple) else value.args
            return [each.id for each in taken if isinstance(each, ast.Name)]
    raise AssertionError(f"{function.__name__} does not call {call}")


def test_torch_gives_and_takes_these_values_in_this_order() -> None:
    """The installed torch unpacks ``_share_cuda_`` and calls ``_new_shared_cuda`` as exports are written and opened."""
    given = names_in(reductions.reduce_tensor, "_share_cuda_")
    taken = names_in(reductions.rebuild_cuda_tensor, "_new_shared_cuda")

    assert given == [
        "device", "handle", "storage_size_bytes", "storage_offset_bytes", "ref_counter_handle", "ref_counter_offset",
        "event_handle", "event_sync_required",
    ]  # fmt: skip
    assert [name.removeprefix("storage_") for name in taken] == [name.removeprefix("storage_") for name in given]


def test_a_storage_opens_what_a_worker_exports(pool: DevicePool, worker: CudaProcess, storage: CudaProcess) -> None:
    """It sees the worker's very bytes, and every stream may use them: the export's event was waited for."""
    handle = exported(pool, worker)
    with storage:
        halves = open_halves(handle, torch)

    assert (handle.kind, handle.name) == ("cuda_ipc", "")
    assert torch.equal(halves, torch.arange(NBYTES, dtype=torch.int64).to(torch.uint8).view(SHAPE))
    pool.k(1)[2].fill_(7.0)
    assert (halves[1, 0, 2].view(torch.float32) == 7.0).all()
    assert storage.machine.waited == [read_export(handle.ipc).event]
    assert storage.machine.synchronized == [("storage", 0)]


def test_the_device_is_found_by_its_uuid(pool: DevicePool, machine: CudaMachine, worker: CudaProcess) -> None:
    """A process that numbers the GPUs otherwise, or sees one alone, opens a pool on the GPU that it lies on."""
    worker.current = 1
    handle = exported(pool, worker)

    for visible, expected in (([0, 1], 1), ([1, 0], 0), ([1], 0)):
        with machine.process(f"storage {visible}", visible):
            assert find_device("uuid-b", torch) == expected
            assert open_halves(handle, torch).shape == SHAPE


@pytest.mark.parametrize("uuids", [["uuid-c"], [], ["uuid-a", "uuid-a"]], ids=["other", "none", "ambiguous"])
def test_a_pool_on_a_gpu_that_is_not_seen_is_refused(uuids: list[str], pool: DevicePool, worker: CudaProcess) -> None:
    """Whoever cannot tell the GPU opens nothing, and the message says what to change."""
    handle = exported(pool, worker)

    with CudaProcess(worker.machine, "storage", uuids), pytest.raises(TransportError, match="CUDA_VISIBLE_DEVICES"):
        open_halves(handle, torch)
    assert worker.machine.waited == []


def test_an_export_is_opened_by_other_processes_only(pool: DevicePool, worker: CudaProcess) -> None:
    """What the driver refuses is a typed error."""
    handle = exported(pool, worker)

    with worker, pytest.raises(TransportError, match="invalid device context"):
        open_halves(handle, torch)


def test_memory_of_another_process_is_not_exported_again(
    pool: DevicePool, worker: CudaProcess, storage: CudaProcess
) -> None:
    """Torch refuses, and the error is typed."""
    handle = exported(pool, worker)

    with storage, pytest.raises(TransportError, match="received from another process"):
        export(open_halves(handle, torch), torch)


@pytest.mark.parametrize(
    "fields",
    [
        {"handle": b"h" * 63},
        {"event": b"e" * 63},
        {"event": b"e" * 65},
        {"counter_file": b"/etc/passwd"},
        {"counter_file": b"/torch_1_2_3/../x"},
        {"counter": -1},
        {"counter": 10_000},
        {"offset": 1},
        {"offset": -1},
        {"storage_bytes": NBYTES - 1},
        {"storage_bytes": 2**63},
        {"storage_offset_bytes": -1},
        {"storage_offset_bytes": 2**62},
        {"shape": (2, 2, PAGES + 1, GEOMETRY.half_bytes)},
        {"shape": (NBYTES,)},
        {"shape": (2, 2, 0, GEOMETRY.half_bytes)},
        {"stride": (1, 1, 1, 1)},
        {"dtype": "int8"},
    ],
    ids=str,
)
def test_an_export_that_contradicts_itself_or_its_pool_is_refused(
    fields: dict[str, Any], pool: DevicePool, worker: CudaProcess, storage: CudaProcess
) -> None:
    """Torch is given nothing that it would read or write beside the pool by."""
    handle = exported(pool, worker)

    with storage, pytest.raises(TransportError):
        open_halves(changed(handle, fields), torch)
    assert [each.opened for each in storage.machine.exports.values()] == [0]


class _Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("exit 1",)


@pytest.mark.parametrize(
    "ipc",
    [b"", b"nonsense", pickle.dumps(_Evil()), b"\x91" * 2000, msgspec.msgpack.encode({"type": "CudaExport"})],
    ids=["empty", "nonsense", "pickle", "deep", "fields"],
)
def test_bytes_that_are_no_export_are_refused(ipc: bytes, storage: CudaProcess) -> None:
    """They are a TransportError for everybody who opens pools, and nothing that they name is called."""
    handle = PoolHandle(
        kind="cuda_ipc", layout="layer_first", name="", nbytes=NBYTES, pages=PAGES, geometry=GEOMETRY, ipc=ipc
    )  # fmt: skip

    with storage, pytest.raises(TransportError, match="not that of a CUDA tensor"):
        open_device_pool(handle)


@pytest.mark.parametrize("fields", [{"layout": "page_first"}, {"nbytes": 1}, {"pages": 0}], ids=str)
def test_a_handle_that_contradicts_itself_is_not_even_read(fields: dict[str, Any], storage: CudaProcess) -> None:
    """Nothing of the export is looked at."""
    given: dict[str, Any] = {
        "kind": "cuda_ipc", "layout": "layer_first", "name": "", "nbytes": NBYTES, "pages": PAGES, "geometry": GEOMETRY,
    }  # fmt: skip

    with storage, pytest.raises(TransportError, match="pool"):
        open_halves(PoolHandle(**(given | fields)), torch)
