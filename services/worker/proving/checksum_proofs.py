"""Proof of checksums that are verified on the device."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch
import xxhash

from services.worker.kv.page_memory import PageLayout
from services.worker.proving.cases import is_timed, speed_of
from services.worker.proving.part import WrongResult
from services.worker.proving.table import ServedShape, Speed
from shared.errors import ConfigError

PAGES, LAYERS = 40, 2
SPEED_BYTES = 16 * 2**20
PROGRAM_ROWS = 4096


def prove_device_checksums(shape: ServedShape) -> Speed | None:
    """Prove that exactly the rows with wrong checksums are refused, by xxhash's checksums, seeded with any identity.

    The speed is that of one layer's rows.
    """
    kernels: Any = importlib.import_module("services.worker.kernels.row_checksums")
    half = shape.geometry.half_bytes
    if not kernels.can_check(half):
        raise ConfigError(f"rows of twice {half} bytes are checked in host memory")
    layout = PageLayout(PAGES, LAYERS, half, half, 2 * PAGES * half, PAGES * half)
    random, device = np.random.default_rng(11), torch.device(shape.device)
    content = random.integers(0, 256, layout.nbytes, dtype=np.uint8)
    pages = random.permutation(PAGES)[: PAGES - 3].astype(np.int32)
    seeds = random.integers(0, 2**64, len(pages), dtype=np.uint64)
    seeds[:2] = 0, 2**64 - 1
    halves = content.reshape(LAYERS, 2, PAGES, half)
    expected = np.array(
        [
            xxhash.xxh3_64_intdigest(halves[1, :, page].tobytes(), seed=int(seed))
            for page, seed in zip(pages.tolist(), seeds, strict=True)
        ],
        dtype=np.uint64,
    )
    # In some the last bit is wrong, in others the first.
    expected[3::7] ^= np.uint64(1)
    expected[5::11] ^= np.uint64(2**63)
    wrong = torch.full((len(pages),), 2, dtype=torch.uint8, device=device)
    pool = torch.from_numpy(content).to(device)
    arguments = (
        pool, layout, 1, torch.from_numpy(pages).to(device), _words(seeds, device), _words(expected, device), wrong
    )  # fmt: skip
    room = {"constants": kernels.constants_on(device), "sums": kernels.sums_for(half, len(pages), device)}
    kernels.check_rows(*arguments, **room)
    marked = np.zeros(len(pages), dtype=np.uint8)
    marked[3::7] = 1
    marked[5::11] = 1
    if wrong.cpu().numpy().tolist() != marked.tolist():
        raise WrongResult(f"of {len(pages)} rows {int((wrong.cpu().numpy() != marked).sum())} are judged wrongly")
    return _speed(kernels, shape, device) if is_timed(shape.device) else None


def _speed(kernels: Any, shape: ServedShape, device: torch.device) -> Speed | None:
    half = shape.geometry.half_bytes
    count = min(PROGRAM_ROWS, max(1, SPEED_BYTES // (2 * half)))
    layout = PageLayout(count, 1, half, half, 2 * count * half, count * half)
    pool = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
    numbers = torch.zeros(count, dtype=torch.int64, device=device)
    pages, wrong = torch.arange(count, dtype=torch.int32, device=device), numbers.to(torch.uint8)
    room = {"constants": kernels.constants_on(device), "sums": kernels.sums_for(half, count, device)}
    arguments = pool, layout, 0, pages, numbers, numbers, wrong
    return speed_of(lambda: kernels.check_rows(*arguments, **room), layout.nbytes, shape.device)


def _words(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return unsigned numbers as int64 on the device, bit for bit."""
    return torch.from_numpy(numbers.view(np.int64)).to(device)
