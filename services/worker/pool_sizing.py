"""The size of a worker's device pool where its settings name none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from services.worker.config import WorkerConfig
from services.worker.device_bounds import batch_tokens
from services.worker.engine.gpu_room import CudaMemory, DeviceMemory, RoomWish, RunnerOf, measure_room
from services.worker.engine.model_runner import PoolSizer
from services.worker.kv.planes import PlaneMap
from shared.memory.machine_memory import MachineMemory, machine_memory
from shared.memory.pool_sizes import ModelDemand, Node, on_cpu, wanted_on_cpu


def cpu_sizer(config: WorkerConfig, memory: Callable[[], MachineMemory] = machine_memory) -> PoolSizer:
    """Return the sizer of a pool in shared memory: the size that the model wants, within a bound.

    The bound is ``cpu_kv_bytes``, or else this worker's part of the memory that is free now that the weights are
    loaded.
    """

    def pages(model: Any, planes: PlaneMap, max_context: int, runner_of: RunnerOf) -> int:
        geometry = planes.geometry
        demand = ModelDemand(token_bytes=geometry.token_bytes, context_tokens=max_context, kv_heads=geometry.kv_heads)
        if config.cpu_kv_bytes:
            size = min(config.cpu_kv_bytes, wanted_on_cpu(geometry.token_bytes, max_context))
        else:
            node = Node(workers=config.node_workers, ranks=config.tensor_parallel, is_on_cpu=True)
            size = on_cpu(memory(), demand, node)
        return size // geometry.page_bytes

    return pages


def gpu_sizer(config: WorkerConfig, memory: Callable[[torch.device], DeviceMemory] = CudaMemory) -> PoolSizer:
    """Return the sizer of a pool on a GPU: the memory that weights and the largest prefill leave."""

    def pages(model: Any, planes: PlaneMap, max_context: int, runner_of: RunnerOf) -> int:
        device = memory(model.device)
        wish = room_wish(config, device.total_bytes())
        room = measure_room(runner_of, planes, max_context, model.device, wish, device)
        return room.pages(planes.geometry.page_bytes)

    return pages


def room_wish(config: WorkerConfig, device_bytes: int) -> RoomWish:
    """Return the memory to be left free, and its uses, on a GPU of so much memory."""
    return RoomWish(
        fraction=config.device_memory_fraction,
        tokens=config.max_batch_tokens or batch_tokens(device_bytes),
        reserve_bytes=config.restore_staging_bytes,
    )
