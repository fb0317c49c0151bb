"""What imagined GPUs take at once where no setting says so, and what the cell is told of them."""

from __future__ import annotations

from functools import partial

import pytest

from services.worker.bootstrap import device_facts
from services.worker.config import WorkerConfig
from services.worker.device_bounds import GIB, LEAST_RUNNING, MOST_RUNNING, batch_tokens, most_running
from services.worker.device_choice import DeviceChoice


@pytest.mark.parametrize(
    ("name", "gib", "tokens"),
    [("T4", 14.6, 2048), ("RTX 4090", 23.5, 4096), ("L40S", 44.4, 4096), ("H100", 79.2, 8192), ("H200", 139.8, 8192),
     ("an instance of an H100", 9.8, 2048)],
)  # fmt: skip
def test_batches_by_memory(name: str, gib: float, tokens: int) -> None:
    """Cards have somewhat less than they are sold with."""
    assert batch_tokens(int(gib * GIB)) == tokens, name


@pytest.mark.parametrize(
    ("pool_tokens", "max_context", "requests"),
    [(110_000, 131_072, 214), (440_000, 131_072, MOST_RUNNING), (7_000, 131_072, LEAST_RUNNING), (0, 4096, 16),
     (10_000, 128, 78), (65_536, 1, MOST_RUNNING)],
)  # fmt: skip
def test_requests_by_the_pool(pool_tokens: int, max_context: int, requests: int) -> None:
    """As many as are likely to fit; none is longer than the context."""
    assert most_running(pool_tokens, max_context) == requests


def test_the_cell_is_told_of_a_device_s_bounds() -> None:
    """A setting of the worker wins; a CPU leaves the size of batches to the cell, and runs 64 requests at least."""
    facts_of = partial(device_facts, pool_tokens=110_000, max_context=131_072)
    gpu, auto = DeviceChoice("cuda", 0, "H100"), WorkerConfig(model="m")

    facts = facts_of(auto, gpu, memory_bytes=79 * GIB)
    own = facts_of(WorkerConfig(model="m", max_batch_tokens=100), gpu, memory_bytes=79 * GIB)
    cpu = facts_of(auto, DeviceChoice("cpu"), memory_bytes=0, dtype="bfloat16")

    assert (facts.max_batch_tokens, facts.max_running) == (8192, 214)
    assert own.max_batch_tokens == 100
    small = device_facts(auto, DeviceChoice("cpu"), memory_bytes=0, pool_tokens=7_000, max_context=131_072)
    assert (cpu.max_batch_tokens, cpu.max_running, cpu.dtype) == (0, 214, "bfloat16")
    assert (small.max_batch_tokens, small.max_running) == (0, 64)
