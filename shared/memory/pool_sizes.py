"""Sizes of a node's KV pools where no setting gives them. Pure.

Device pools on CPUs, the host pool and the hidden pool lie in ``/dev/shm``, which is memory, too. The free part of
both, less what the processes and the weights will take, is divided: a quarter to the device pools of all workers, at
most half to the host pool, an eighth to the hidden pool. Device pools on GPUs take none of it
(``services.worker.engine.gpu_room``), so beside them the host pool may have half of memory as long as ``/dev/shm``,
which by default is half of memory itself, has room.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shared.errors import ConfigError
from shared.memory.machine_memory import MachineMemory

MIB, GIB = 2**20, 2**30

DEVICE_SHARE, HOST_SHARE, HIDDEN_SHARE = 4, 2, 8
"""Shares of the free memory: one part in so many for all device pools, the host pool, the hidden pool."""

LEAST_WANTED_BYTES, MOST_WANTED_BYTES, CONTEXTS = 64 * MIB, GIB, 8
"""Bounds of a device pool on a CPU, and the number of the model's contexts that it is made for. A single context may
exceed the upper bound.
"""

HOST_FACTOR, LEAST_HOST_BYTES, HOST_BYTES_BESIDE_A_GPU = 4, GIB, 128 * GIB
"""Size of the host pool: a multiple of the device pools, at least the second figure. Beside GPUs, whose pools are not
known when the host pool is sized, it is its share of memory, up to the third figure for each GPU of the workers.
"""

LEFT_OF_SHM = 8
"""Beside GPUs one part in so many of ``/dev/shm`` is left to other uses, such as NCCL; the pools may have the rest."""

HIDDEN_BYTES = 256 * MIB

SMALLEST_BYTES = MIB
"""Least size of a pool; below it the start is refused."""

RANK_BYTES, SERVICES_BYTES, LOWER_TIERS_BYTES = 512 * MIB, 512 * MIB, 512 * MIB
"""Memory besides pools and weights: each process with the model, all other processes, staging for lower tiers."""


@dataclass(frozen=True, slots=True)
class ModelDemand:
    """Sizes of one worker's model by its files; 0 is unknown.

    ``kv_heads`` is of one layer: where a group has more ranks, several of them hold the same head.
    """

    weight_bytes: int = 0
    token_bytes: int = 0
    context_tokens: int = 0
    kv_heads: int = 0


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Bytes of the pools of one node; ``device`` is that of each worker. None asks for a size to be chosen."""

    device: int | None = None
    host: int | None = None
    hidden: int | None = None


@dataclass(frozen=True, slots=True)
class ChosenSizes:
    """Bytes of each worker's device pool where it runs on a CPU, of the host pool, and of the hidden pool."""

    device_on_cpu: int
    host: int
    hidden: int


@dataclass(frozen=True, slots=True)
class Node:
    """The processes that share the memory of a machine. ``is_on_cpu`` is None where the workers will find out."""

    workers: int = 1
    ranks: int = 1  # Ranks of each worker.
    is_on_cpu: bool | None = None
    sees_gpus: bool = False  # The driver shows GPUs.
    has_lower_tiers: bool = False  # There is a disk or an object store.

    @property
    def may_be_on_gpus(self) -> bool:
        """Whether the workers run on GPUs, or will find out and the driver shows some."""
        return self.is_on_cpu is False or (self.is_on_cpu is None and self.sees_gpus)


def wanted_on_cpu(token_bytes: int, context_tokens: int) -> int:
    """Return the bytes of a device pool on a CPU where memory is not short."""
    context = token_bytes * context_tokens
    if not context:
        return MOST_WANTED_BYTES
    return max(LEAST_WANTED_BYTES, min(CONTEXTS * context, MOST_WANTED_BYTES), context)


def room(machine: MachineMemory, model: ModelDemand, node: Node) -> int:
    """Return the bytes that pools may take together once all processes run with their weights."""
    return min(_unused_memory(machine, model, node), machine.shm_bytes)


def _unused_memory(machine: MachineMemory, model: ModelDemand, node: Node) -> int:
    """Return the memory besides processes and weights, at least 0."""
    processes = SERVICES_BYTES + node.workers * node.ranks * RANK_BYTES + node.has_lower_tiers * LOWER_TIERS_BYTES
    # On a GPU weights are in memory only while they are read, before there is a host pool.
    weights = 0 if node.is_on_cpu is False else node.workers * model.weight_bytes
    return max(0, machine.memory_bytes - processes - weights)


def on_cpu(machine: MachineMemory, model: ModelDemand, node: Node) -> int:
    """Return the bytes of each worker's device pool on a CPU where no setting gives them."""
    most = room(machine, model, node) // DEVICE_SHARE // node.workers // _copies(model, node)
    return min(wanted_on_cpu(model.token_bytes, model.context_tokens), most)


def choose_sizes(asked: PoolSizes, machine: MachineMemory, model: ModelDemand, node: Node) -> ChosenSizes:
    """Return the sizes with every one that ``asked`` leaves open chosen. All pools together fit in ``machine``.

    Raises ConfigError with the figures where the requested sizes do not fit, or leave nothing for the rest.
    """
    if node.may_be_on_gpus and room(machine, model, node) == 0:
        node = replace(node, is_on_cpu=False)  # The weights would not fit on CPUs.
    left = room(machine, model, node)
    device = on_cpu(machine, model, node) if asked.device is None else asked.device
    in_shm = device * node.workers * _copies(model, node)
    if node.is_on_cpu is False or (asked.device is not None and node.may_be_on_gpus):
        in_shm = 0  # Device pools are in the GPU's memory.
    hidden = asked.hidden
    if not node.has_lower_tiers:
        hidden = 0
    elif hidden is None:
        hidden = max(0, min(HIDDEN_BYTES, left // HIDDEN_SHARE, left - in_shm - (asked.host or 0)))
    host = asked.host
    if host is None:
        wanted, share = max(LEAST_HOST_BYTES, HOST_FACTOR * device * node.workers), left // HOST_SHARE
        if node.may_be_on_gpus:
            wanted = HOST_BYTES_BESIDE_A_GPU * node.workers * node.ranks
            in_memory = _unused_memory(machine, model, node) // HOST_SHARE
            share = min(in_memory, machine.shm_bytes - machine.shm_bytes // LEFT_OF_SHM)
        host = max(0, min(wanted, share, left - in_shm - hidden))
    sizes = ChosenSizes(device, host, hidden)
    _check(asked, sizes, in_shm, machine, node, left)
    return sizes


def _copies(model: ModelDemand, node: Node) -> int:
    """Return how often a group of ranks holds a page: more than once if it has more ranks than there are KV heads."""
    return max(1, -(-node.ranks // model.kv_heads)) if model.kv_heads else 1


def _check(asked: PoolSizes, sizes: ChosenSizes, in_shm: int, machine: MachineMemory, node: Node, left: int) -> None:
    needed = in_shm + sizes.host + sizes.hidden
    most = min(machine.memory_bytes, machine.shm_bytes)
    if needed > most:
        raise ConfigError(
            f"the pools need {needed // MIB} MiB of shared memory and /dev/shm has {machine.shm_bytes // MIB} MiB "
            f"free, the machine {machine.memory_bytes // MIB} MiB of memory; lower --device-kv-bytes, --host-kv-bytes "
            "or --hidden-bytes, or enlarge /dev/shm (docker run --shm-size)"
        )
    missing = {
        "--device-kv-bytes": asked.device is None and not node.may_be_on_gpus and sizes.device_on_cpu < SMALLEST_BYTES,
        "--host-kv-bytes": asked.host is None and sizes.host < SMALLEST_BYTES,
    }
    if any(missing.values()):
        cure = "enlarge /dev/shm (docker run --shm-size)" if machine.shm_bytes < machine.memory_bytes else "free some"
        raise ConfigError(
            f"no memory is left for pools: {machine.memory_bytes // MIB} MiB of memory and {machine.shm_bytes // MIB} "
            f"MiB of /dev/shm are free; weights and processes leave {left // MIB} MiB; {cure}, or choose "
            f"{' and '.join(flag for flag, is_missing in missing.items() if is_missing)}"
        )
