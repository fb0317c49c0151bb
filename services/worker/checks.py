"""Checks of a worker's settings that their types cannot make.

Run before PyTorch is imported, and by ``thermocline up`` before anything is started. Faults that only the model itself
shows are found when it is loaded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from services.worker.config import WorkerConfig
from shared import library_versions
from shared.errors import ConfigError, OperatorError
from shared.model_folder import check_model

_CUDA_LIBRARIES = ("libcuda.so.1", "libcuda.so")

_DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
"""Fields that a configuration must have itself, since its class may have an unexpected default."""


def check(config: WorkerConfig) -> None:
    """Check the settings; read the model's small files and ask the driver for GPUs.

    Raises ConfigError with every fault.
    """
    faults = list(_faults(config))
    if faults:
        raise ConfigError.of(faults)


def _faults(config: WorkerConfig) -> Iterator[str]:
    yield from library_versions.too_old()
    if config.device == "cuda":
        gpus, needed = gpus_here(), config.node_workers * config.tensor_parallel
        if not gpus:
            yield "--device cuda: there is no GPU here that its driver lets us use; --device cpu needs none"
        elif gpus < config.tensor_parallel:
            yield f"--tensor-parallel {config.tensor_parallel}: there are {gpus} GPUs here"
        elif gpus < needed:
            yield f"--workers {config.node_workers}: they need {needed} GPUs of their own, and there are {gpus} here"
    try:
        described = check_model(config.model_dir)
    except OperatorError as error:
        yield error.message
    else:
        yield from _division_faults(described, config.tensor_parallel)


def _division_faults(described: Mapping[str, Any], ranks: int) -> Iterator[str]:
    if ranks == 1 or not all(isinstance(described.get(name), int) for name in _DIVIDED):
        return
    from services.worker.parallel.division import check_divisible

    try:
        check_divisible(SimpleNamespace(**{"model_type": "the model", **described}), ranks)
    except ConfigError as error:
        yield error.message


def driver_shows_gpus(nodes: Path = Path("/dev")) -> bool:
    """Return whether NVIDIA's driver shows devices, whose names end with a number; they may still be unusable."""
    return any(path.name.removeprefix("nvidia").isdigit() for path in nodes.glob("nvidia[0-9]*"))


def gpus_here() -> int:
    """Return the number of GPUs that this process may use, by NVIDIA's driver; 0 without any. PyTorch is not needed."""
    for name in _CUDA_LIBRARIES:
        try:
            driver = ctypes.CDLL(name)
            count = ctypes.c_int(0)
            if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0:
                return count.value
        except (OSError, AttributeError):
            continue
    return 0
