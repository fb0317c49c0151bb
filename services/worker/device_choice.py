"""The device of a worker's model: how ``--device`` resolves on this machine. Pure, over :class:`Gpus`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from shared.errors import ConfigError

Asked = Literal["auto", "cpu", "cuda"]


class Gpus(Protocol):
    """The GPUs of this machine as torch numbers them (``services.worker.torch_gpus``)."""

    @property
    def count(self) -> int:
        """GPUs that torch can address."""
        ...

    @property
    def absence(self) -> str:
        """Why there are no GPUs for torch."""
        ...

    @property
    def are_installed(self) -> bool:
        """Whether the machine has GPUs, even if torch cannot use them."""
        ...

    @property
    def mig_instances(self) -> int:
        """Instances of partitioned GPUs (MIG) that CUDA_VISIBLE_DEVICES names; CUDA shows a process only the first."""
        ...

    def name(self, index: int) -> str:
        """Return the GPU's product name, for messages."""

    def uuid(self, index: int) -> str:
        """Return the GPU's UUID, which names it in every process."""
        ...

    def fault(self, index: int) -> str:
        """Return why computing on a GPU fails, or ""."""
        ...


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """The device of a worker. ``first_gpu`` is the first of the GPUs that its ranks take.

    ``note`` says why a GPU that is there is not used, and ``uuids`` name the GPUs that are used.
    """

    kind: Literal["cpu", "cuda"]
    first_gpu: int = 0
    name: str = ""
    note: str = ""
    uuids: tuple[str, ...] = ()

    @property
    def device(self) -> str:
        """The device as torch names it."""
        return self.kind if self.kind == "cpu" else f"cuda:{self.first_gpu}"


def choose_device(asked: Asked, gpus: Gpus, *, first_gpu: int = 0, ranks: int = 1, workers: int = 1) -> DeviceChoice:
    """Return the device of a worker of ``ranks`` ranks, one of ``workers`` on this machine. A GPU is never shared.

    Raises ConfigError where a GPU was asked for and none can be used, and where there are fewer GPUs than ranks.
    """
    if asked == "cpu":
        return DeviceChoice("cpu")
    if not gpus.count:
        if asked == "cuda":
            raise ConfigError(
                f"--device cuda: no usable GPU: {gpus.absence}; choose --device cpu, or auto to take what there is"
            )
        return DeviceChoice(
            "cpu", note=f"a GPU is there but cannot be used: {gpus.absence}" if gpus.are_installed else ""
        )
    needed = max(workers * ranks, first_gpu + ranks)
    if needed > gpus.count and gpus.mig_instances:
        raise ConfigError(_too_few_instances(needed, gpus.mig_instances))
    if needed > gpus.count:
        raise ConfigError(_too_few(gpus.count, needed, first_gpu, ranks, workers))
    for index in range(first_gpu, first_gpu + ranks):
        fault = gpus.fault(index)
        # Workers of one cell compute alike, so none falls back to a CPU beside others on GPUs.
        if fault and (asked == "cuda" or workers > 1):
            raise ConfigError(
                f"--device {asked}: GPU {index} ({gpus.name(index)}) cannot be used: {fault}; choose --device cpu, or "
                "other GPUs with CUDA_VISIBLE_DEVICES"
            )
        if fault:
            return DeviceChoice("cpu", note=f"GPU {index} ({gpus.name(index)}) is there but cannot be used: {fault}")
    taken = range(first_gpu, first_gpu + ranks)
    return DeviceChoice(
        "cuda", first_gpu, gpus.name(first_gpu), uuids=tuple(dict.fromkeys(gpus.uuid(index) for index in taken))
    )


def _too_few_instances(needed: int, named: int) -> str:
    """Return the error for too few MIG instances.

    Memory of an instance cannot be mapped by a process that has another, so a storage serves workers of one.
    """
    return (
        f"{needed} GPUs are needed, and CUDA_VISIBLE_DEVICES names {named} MIG instances, and CUDA shows a "
        "process one: start a cell of one worker for each, with that instance alone in CUDA_VISIBLE_DEVICES, and "
        "spread requests with thermocline router"
    )


def _too_few(count: int, needed: int, first_gpu: int, ranks: int, workers: int) -> str:
    seen = f"torch sees {count} GPU{'s' if count > 1 else ''} here"
    if workers > 1:
        of_each = f" with --tensor-parallel {ranks}" if ranks > 1 else ""
        return (
            f"--workers {workers}{of_each} need {needed} GPUs, which workers do not share, and {seen}: choose fewer "
            "--workers, --device cpu, or make more GPUs visible with CUDA_VISIBLE_DEVICES"
        )
    if first_gpu:
        return f"--gpu {first_gpu}: {seen}, numbered from 0, and the worker needs {ranks}"
    return (
        f"--tensor-parallel {ranks} needs {ranks} GPUs and {seen}: choose fewer ranks, --device cpu, or make more GPUs "
        "visible with CUDA_VISIBLE_DEVICES"
    )
