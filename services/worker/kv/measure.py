"""Measurement of this machine's movers, printed as JSON: ``python -m services.worker.kv.measure``.

``thermocline doctor --profile`` runs this in a process of its own, because only workers import torch.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

from services.worker.kv.measured_loads import LoadScene, load_scene, medians, plain_copy
from services.worker.kv.movers import make_mover
from services.worker.kv.movers.choice import machine_here
from services.worker.kv.movers.protocol import MoverName, PageMover
from services.worker.kv.profile import MoverFigure, Profile
from services.worker.native.page_rows import native_rows
from shared.errors import OperatorError
from shared.guard import guarded
from shared.messages.pools import KvGeometry

PREFIX = "thermocline-measure"

PROGRAMS = (1, 2, 4, 8)
"""Sizes of the GPU kernel that are tried; more take multiprocessors from the model (Strata figure 5)."""

PER_PAGE_MOST = 4096
"""Most copies of one page and half in a round: that mover is slow, and its speed is known after this many."""

CHECKSUM_BYTES = 64 * 2**20
MATMUL_SIZE = 1024


def measure(
    geometry: KvGeometry, *, device: str, tokens: int, page_sizes: Sequence[int], small_tokens: int, rounds: int
) -> Profile:
    """Return a profile of all but the disk: ``geometry`` at the first of ``page_sizes``, two transfer sizes each."""
    geometry = msgspec.structs.replace(geometry, page_size=page_sizes[0])
    figures: list[MoverFigure] = []
    plain: list[float] = []
    for page_size in page_sizes:
        of_size = msgspec.structs.replace(geometry, page_size=page_size)
        with load_scene(of_size, tokens, device=device, shm_prefix=PREFIX) as scene:
            for amount in sorted({min(small_tokens, tokens), tokens}):
                figures += _movers(scene, max(1, amount // page_size), rounds)
            plain.append(scene.nbytes / medians({"copy": plain_copy(scene)}, rounds)["copy"])
    return Profile(
        made=datetime.datetime.now(datetime.UTC).date().isoformat(),
        machine=machine_here(),
        software={"python": platform.python_version(), "torch": str(torch.__version__), "numpy": np.__version__},
        geometry=geometry,
        tokens=tokens,
        memcpy_bytes_per_s=_memcpy(rounds),
        checksum_bytes_per_s=_checksum(rounds),
        matmul_flops_per_s=_matmul(device, geometry.dtype, rounds),
        link_bytes_per_s=max(plain) if device == "cuda" else 0.0,
        movers=tuple(figures),
    )


def _movers(scene: LoadScene, count: int, rounds: int) -> list[MoverFigure]:
    """Measure each mover of this device in turns, with ``count`` pages, unverified and verified."""
    pool = scene.device
    is_cuda = pool.device.type == "cuda"
    entries: list[tuple[MoverName, int, PageMover]] = [("batched", 0, make_mover(pool, "batched", programs=1))]
    entries.append(("per_page", 0, make_mover(pool, "per_page", programs=1)))
    if is_cuda:
        entries += [("gpu_assisted", n, make_mover(pool, "gpu_assisted", programs=n)) for n in PROGRAMS]
    most = max(1, PER_PAGE_MOST // (2 * pool.geometry.layers))
    counts = {name: min(count, most) if name == "per_page" else count for name, _, _ in entries}
    works: dict[str, Callable[[], object]] = {}
    for name, programs, mover in entries:
        for verified in (False, True):
            key = f"{name} {programs} {verified}"
            works[key] = partial(scene.load, mover, verified=verified, count=counts[name])
    spent = medians(works, rounds)

    def speed(name: MoverName, programs: int, verified: bool) -> float:
        return counts[name] * pool.geometry.page_bytes / spent[f"{name} {programs} {verified}"]

    return [
        MoverFigure(
            mover=name,
            device="cuda" if is_cuda else "cpu",
            dtype=pool.geometry.dtype,
            page_size=pool.geometry.page_size,
            transfer_bytes=count * pool.geometry.page_bytes,
            bytes_per_s=speed(name, programs, False),
            verified_bytes_per_s=speed(name, programs, True),
            programs=programs,
        )
        for name, programs, _ in entries
    ]


def _memcpy(rounds: int) -> float:
    source, target = (np.ones(CHECKSUM_BYTES, dtype=np.uint8) for _ in range(2))
    return CHECKSUM_BYTES / medians({"copy": partial(np.copyto, target, source)}, rounds)["copy"]


def _checksum(rounds: int) -> float:
    """Return the bandwidth of checksums of rows of 64 KiB, as movers compute them, in bytes a second."""
    row = np.ones(64 * 2**10, dtype=np.uint8)
    native, repeats = native_rows(), CHECKSUM_BYTES // (64 * 2**10)

    def check() -> None:
        for seed in range(repeats):
            if native is not None:
                native.checksum(row, seed)
            else:
                xxhash.xxh3_64_intdigest(row.data, seed=seed)

    return CHECKSUM_BYTES / medians({"check": check}, rounds)["check"]


def _matmul(device: str, dtype: str, rounds: int) -> float:
    size = MATMUL_SIZE * (8 if device == "cuda" else 1)
    left, right = (torch.ones((size, size), dtype=getattr(torch, dtype), device=device) for _ in range(2))

    def multiply() -> None:
        torch.matmul(left, right)
        if device == "cuda":
            torch.cuda.synchronize()

    return 2 * float(size) ** 3 / medians({"multiply": multiply}, rounds)["multiply"]


def main(argv: list[str] | None = None) -> int:
    """Print a profile; exit code 1, with the reason, where nothing can be measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--geometry", required=True, help="KvGeometry as JSON; its page size does not matter")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the large transfer")
    parser.add_argument("--small-tokens", type=int, default=512, help="tokens of the small transfer")
    parser.add_argument("--page-sizes", default="1,16,32,64")
    parser.add_argument("--rounds", type=int, default=5)
    options: Any = parser.parse_args(argv)
    try:
        profile = measure(
            msgspec.json.decode(options.geometry, type=KvGeometry),
            device=options.device,
            tokens=options.tokens,
            page_sizes=[int(size) for size in options.page_sizes.split(",")],
            small_tokens=options.small_tokens,
            rounds=options.rounds,
        )
    except (OperatorError, msgspec.DecodeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(msgspec.json.encode(profile).decode())
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
