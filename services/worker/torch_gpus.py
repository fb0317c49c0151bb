"""The GPUs that torch finds. ``python -m services.worker.torch_gpus`` says as JSON what ``--device auto`` would take.

What touches a GPU here has not run on one.
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
    """See :class:`services.worker.device_choice.Gpus`."""

    @cached_property
    def count(self) -> int:
        return int(_cuda.device_count()) if torch.cuda.is_available() else 0

    @cached_property
    def absence(self) -> str:
        if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
            return f"torch {torch.__version__} is built without CUDA"
        try:
            _cuda.init()
        except Exception as error:  # Of whatever kind: the driver's words are what the operator needs.
            return _first_line(error)
        return "torch finds no GPU here"

    @property
    def are_installed(self) -> bool:
        """Whether NVIDIA's driver shows devices."""
        return driver_shows_gpus(_DRIVER_NODES)

    @property
    def mig_instances(self) -> int:
        return len(_instances())

    def uuid(self, index: int) -> str:
        instances = _instances()
        if instances:  # Drivers differ in whether an instance has the UUID of its GPU, which others share.
            return instances[0]
        return str(_cuda.get_device_properties(index).uuid)

    def name(self, index: int) -> str:
        return str(_cuda.get_device_name(index))

    def memory_bytes(self, index: int) -> int:
        """All memory of one."""
        return int(_cuda.get_device_properties(index).total_memory)

    def fault(self, index: int) -> str:
        try:
            ones = torch.ones((64, 64), device=f"cuda:{index}")
            total = float((ones @ ones).sum().item())
        except Exception as error:  # Of whatever kind: the driver's words are what the operator needs.
            return _first_line(error)
        return "" if total == 64.0**3 else f"it computes {total} where {64.0**3} is right"


def gpu_facts(index: int) -> GpuFacts:
    """Its name and memory, beside how many there are."""
    gpus = TorchGpus()
    return GpuFacts(gpus.name(index), gpus.memory_bytes(index), gpus.count)


def _instances() -> list[str]:
    named = (each.strip() for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","))
    return [each for each in named if each.startswith("MIG-")]


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def choose(config: WorkerConfig, gpus: Gpus | None = None) -> DeviceChoice:
    """Where this worker's model runs. Raises ConfigError with the reason why it can run nowhere as configured."""
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
    """All memory of the first GPU that was chosen; 0 on a CPU."""
    return TorchGpus().memory_bytes(choice.first_gpu) if choice.kind == "cuda" else 0


def main() -> int:
    """Print torch's version, all GPUs, and what ``auto`` takes for one worker."""
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
