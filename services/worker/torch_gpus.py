"""The GPUs that torch finds. ``python -m services.worker.torch_gpus`` prints as JSON the choice of ``--device auto``.

The parts that touch a GPU have not run on one.
"""

from __future__ import annotations

import json
import os
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from services.worker.checks import driver_shows_gpus
from services.worker.config import NOT_ON_CPUS, WorkerConfig
from services.worker.device_choice import DeviceChoice, Gpus, choose_device
from services.worker.engine.gpu_needs import GpuFacts
from shared.errors import ConfigError
from shared.guard import guarded

# torch leaves these functions without types.
_cuda: Any = torch.cuda

_DRIVER_NODES = Path("/dev")


class TorchGpus:
    """The GPUs of this machine through torch; see :class:`services.worker.device_choice.Gpus`."""

    @cached_property
    def count(self) -> int:
        """GPUs that torch can address; 0 where CUDA cannot be initialised."""
        return int(_cuda.device_count()) if torch.cuda.is_available() else 0

    @cached_property
    def absence(self) -> str:
        """The driver's own words where it cannot be initialised, or that torch is built without CUDA."""
        if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
            return f"torch {torch.__version__} is built without CUDA"
        try:
            _cuda.init()
        except Exception as error:  # Of any kind: the operator needs the driver's words.
            return _first_line(error)
        return "torch finds no GPU here"

    @property
    def are_installed(self) -> bool:
        """Whether NVIDIA's driver shows devices."""
        return driver_shows_gpus(_DRIVER_NODES)

    @property
    def mig_instances(self) -> int:
        """Number of MIG instances named in CUDA_VISIBLE_DEVICES."""
        return len(_instances())

    def uuid(self, index: int) -> str:
        """Return the GPU's UUID, or that of the first visible MIG instance."""
        instances = _instances()
        if instances:  # Drivers differ in whether an instance has the UUID of its GPU, which others share.
            return instances[0]
        return str(_cuda.get_device_properties(index).uuid)

    def name(self, index: int) -> str:
        """Return the driver's name of the GPU."""
        return str(_cuda.get_device_name(index))

    def memory_bytes(self, index: int) -> int:
        """Return the total memory of one GPU."""
        return int(_cuda.get_device_properties(index).total_memory)

    def fault(self, index: int) -> str:
        """Multiply a small matrix on the GPU; return why that failed or was wrong, or ""."""
        try:
            ones = torch.ones((64, 64), device=f"cuda:{index}")
            total = float((ones @ ones).sum().item())
        except Exception as error:  # Of whatever kind: the driver's words are what the operator needs.
            return _first_line(error)
        return "" if total == 64.0**3 else f"it computes {total} where {64.0**3} is right"


def gpu_facts(index: int) -> GpuFacts:
    """Return the name and memory of a GPU, and how many there are."""
    gpus = TorchGpus()
    return GpuFacts(gpus.name(index), gpus.memory_bytes(index), gpus.count)


def _instances() -> list[str]:
    named = (each.strip() for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","))
    return [each for each in named if each.startswith("MIG-")]


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def choose(config: WorkerConfig, gpus: Gpus | None = None) -> DeviceChoice:
    """Return the device of this worker's model. Raises ConfigError with the reason why it cannot run as configured."""
    choice = choose_device(
        config.device,
        gpus or TorchGpus(),
        first_gpu=config.gpu,
        ranks=config.tensor_parallel,
        workers=config.node_workers,
    )
    if choice.kind == "cpu" and config.attention == "flashinfer":
        raise ConfigError("--attention flashinfer: on a GPU only, and there is none that can be used here")
    if choice.kind == "cpu" and config.exact:
        raise ConfigError(f"--exact: {NOT_ON_CPUS}{f' ({choice.note})' if choice.note else ''}")
    return choice


def device_bytes(choice: DeviceChoice) -> int:
    """Return the total memory of the first chosen GPU; 0 on a CPU."""
    return TorchGpus().memory_bytes(choice.first_gpu) if choice.kind == "cuda" else 0


def main() -> int:
    """Print torch's version, all GPUs, and the choice of ``auto`` for one worker, as JSON."""
    gpus = TorchGpus()
    choice = choose_device("auto", gpus)
    found = {
        "version": torch.__version__,
        "gpus": [[gpus.name(index), gpus.memory_bytes(index)] for index in range(gpus.count)],
        "auto": choice.kind,
        "reason": choice.note or ("" if gpus.count else gpus.absence),
    }
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
