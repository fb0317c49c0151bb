"""What ``thermocline up`` chooses by itself on machines with GPUs that are only imagined.

Everything is computed by the functions that choose in service: the shares of memory (``shared.memory.pool_sizes``),
the check of the weights (``services.worker.engine.gpu_needs``), the room on a GPU (``services.worker.engine.gpu_room``)
and the lines that ``up`` prints. Imagined are the machine, and the peak of the largest prefill, which a real GPU
measures and ``ModelShape.prefill_bytes`` estimates here.

Usage: ``python -m bench.defaults_on_gpus`` (writes bench/results/defaults_on_gpus.json, or ``--out``)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bench import results_file
from services.gateway.context_limit import ContextLimit
from services.gateway.openai_schema.models import Serving, ServingDevice, ServingPool
from services.worker.config import WorkerConfig
from services.worker.device_bounds import most_running
from services.worker.device_choice import choose_device
from services.worker.engine.gpu_needs import GpuFacts, ModelShape, check_weights
from services.worker.engine.gpu_room import Room
from services.worker.engine.states.page_sizes import PAGE_TOKENS
from services.worker.pool_sizing import room_wish
from shared.errors import ConfigError
from shared.memory.machine_memory import MachineMemory
from shared.memory.pool_sizes import ModelDemand, PoolSizes, choose_sizes
from shared.messages.pools import KvGeometry
from thermocline.supervisor.cell import node_of
from thermocline.supervisor.config import SupervisorConfig
from thermocline.supervisor.ready_lines import ReadyFacts, ready_lines

MIB, GIB = 2**20, 2**30

CONTEXT_BYTES = 512 * MIB
"""Assumed for the driver's context with the libraries that PyTorch loads; a GPU measures it."""


@dataclass(frozen=True, slots=True)
class Machine:
    """``gpu_bytes`` are what CUDA gives of such a card, ``memory`` what is available before anything starts."""

    name: str
    gpu: str
    gpus: int
    gpu_bytes: int
    memory: MachineMemory


@dataclass(frozen=True, slots=True)
class Model:
    """A geometry: what the configuration says, and ``parameters`` counted from it."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    parameters: int

    @property
    def shape(self) -> ModelShape:
        """In bfloat16."""
        return ModelShape(
            weight_bytes=2 * self.parameters, itemsize=2, hidden=self.hidden, intermediate=self.intermediate,
            heads=self.heads, kv_heads=self.kv_heads, vocab=self.vocab,
        )  # fmt: skip

    def geometry(self, page_size: int, ranks: int = 1) -> KvGeometry:
        """Of a rank's part of a page."""
        kv_heads = max(1, self.kv_heads // ranks)
        return KvGeometry(
            layers=self.layers, kv_heads=kv_heads, head_dim=self.head_dim, page_size=page_size, dtype="bfloat16"
        )


MODELS = (
    Model("Llama-3.2-1B", 16, 2048, 8192, 32, 8, 64, 128_256, 131_072, 1_235_814_400),
    Model("Llama-3.1-8B", 32, 4096, 14_336, 32, 8, 128, 128_256, 131_072, 8_030_261_248),
    Model("Qwen3-32B", 64, 5120, 25_600, 64, 8, 128, 151_936, 40_960, 32_762_123_264),
    Model("Llama-3.1-70B", 80, 8192, 28_672, 64, 8, 128, 128_256, 131_072, 70_553_706_496),
)


def _machines() -> Iterator[Machine]:
    """Each with half of memory as ``/dev/shm``, as Linux mounts it, and with the 64 MiB that a container gets."""
    for name, gpu, gpus, gpu_gib, memory_gib in (
        ("one 24 GB", "RTX 4090", 1, 23.6, 58),
        ("one 80 GB", "H100", 1, 79.1, 240),
        ("eight 141 GB", "H200", 8, 139.8, 1900),
    ):
        for shm_bytes in (memory_gib * GIB // 2, 64 * MIB):
            memory = MachineMemory(memory_gib * GIB, shm_bytes)
            yield Machine(name, gpu, gpus, int(gpu_gib * GIB), memory)


MACHINES = tuple(_machines())


class _Gpus:
    """See ``services.worker.device_choice.Gpus``."""

    absence, are_installed, mig_instances = "", True, 0

    def __init__(self, machine: Machine) -> None:
        self.count, self._name = machine.gpus, machine.gpu

    def name(self, index: int) -> str:
        return self._name

    def uuid(self, index: int) -> str:
        return f"GPU-{index}"

    def fault(self, index: int) -> str:
        return ""


def table() -> list[dict[str, Any]]:
    """A row for each machine and model with no flag at all; then for what the messages advise there."""
    rows = []
    for machine in MACHINES:
        for model in MODELS:
            first = row(machine, model)
            rows.append(first)
            if first["advised"]:
                flags = dict(pair.split(" ") for pair in first["advised"])
                rows.append(row(machine, model, **{name: int(value) for name, value in flags.items()}))
    return rows


def row(machine: Machine, model: Model, *, tensor_parallel: int = 1, workers: int = 1) -> dict[str, Any]:
    """What is chosen, as figures and in the words of ``up``; or ``refused``, in the worker's. ``advised`` are flags
    that those words name and that this machine has GPUs for.
    """
    config = SupervisorConfig(workers=workers, tensor_parallel=tensor_parallel)
    flags = [f"--{name.replace('_', '-')} {value}" for name, value in
             (("tensor_parallel", tensor_parallel), ("workers", workers)) if value > 1]  # fmt: skip
    named: dict[str, Any] = {
        "machine": machine.name, "shm_bytes": machine.memory.shm_bytes, "model": model.name, "flags": flags,
    }  # fmt: skip
    try:
        chosen, lines = _chosen(machine, model, config)
    except ConfigError as error:
        text = str(error)
        return named | {"refused": text, "advised": _advised(text, machine)}
    return named | {"refused": "", "advised": _advised("\n".join(lines), machine), **chosen, "lines": lines}


def _chosen(machine: Machine, model: Model, config: SupervisorConfig) -> tuple[dict[str, Any], list[str]]:
    ranks = config.tensor_parallel or 1
    whole = model.geometry(PAGE_TOKENS)
    demand = ModelDemand(model.shape.weight_bytes, whole.token_bytes, model.context, model.kv_heads)
    sizes = choose_sizes(PoolSizes(), machine.memory, demand, node_of(config, sees_gpus=True))
    worker = WorkerConfig(model="", tensor_parallel=ranks, node_workers=config.workers)
    choice = choose_device(worker.device, _Gpus(machine), ranks=ranks, workers=config.workers)
    wish = room_wish(worker, machine.gpu_bytes)
    check_weights(model.shape, ranks, GpuFacts(machine.gpu, machine.gpu_bytes, machine.gpus), wish)
    peak = model.shape.rank_weight_bytes(ranks) + model.shape.prefill_bytes(wish, ranks)
    room = Room(machine.gpu_bytes, CONTEXT_BYTES, peak, wish.reserve_bytes, wish.fraction)
    pages = room.pages(model.geometry(whole.page_size, ranks).page_bytes)
    limit = ContextLimit(model.context, pages * whole.page_size)
    pools = [
        ServingPool(
            tier="device", owner=f"worker-{number}", tokens=pages * whole.page_size, bytes=pages * whole.page_bytes
        )
        for number in range(config.workers)
    ]
    host_pages = sizes.host // whole.page_bytes  # Without its tables.
    pools.append(ServingPool(tier="host", owner="storage", tokens=host_pages * whole.page_size, bytes=sizes.host))
    device = ServingDevice(worker_id="worker-0", kind=choice.kind, name=choice.name, ranks=ranks, note=choice.note)
    serving = Serving(
        devices=[device] * config.workers, dtype="bfloat16", context_tokens=limit.tokens,
        model_context_tokens=model.context, page_size=whole.page_size, page_bytes=whole.page_bytes, pools=pools,
    )  # fmt: skip
    facts = ReadyFacts(
        base_url="", model=model.name, workers=config.workers, page="", serving=serving, gpus=machine.gpus
    )
    figures = {
        "device_pages": pages, "device_tokens": pages * whole.page_size, "device_bytes": pages * whole.page_bytes,
        "host_tokens": host_pages * whole.page_size, "host_bytes": sizes.host, "context_tokens": limit.tokens,
        "page_size": whole.page_size, "disk_bytes": 0, "max_batch_tokens": wish.tokens,
        "max_running": most_running(pages * whole.page_size, limit.tokens),
    }  # fmt: skip
    return figures, ready_lines(facts)[1:-2]  # Without addresses.


def _advised(text: str, machine: Machine) -> list[str]:
    found = re.findall(r"--(tensor-parallel|workers) (\d+)", text)
    return [f"{name.replace('-', '_')} {number}" for name, number in found if 1 < int(number) <= machine.gpus]


def main() -> None:
    options = results_file.arguments(__doc__, "--out").parse_args()
    rows = table()
    for each in rows:
        print(
            each["machine"], each["shm_bytes"] // MIB, each["model"], *each["flags"], each["refused"] or each["lines"]
        )
    results_file.write("defaults_on_gpus", {"context_bytes": CONTEXT_BYTES, "rows": rows}, seed=0, out=options.out)


if __name__ == "__main__":
    main()
