"""Bandwidth of the three movers by page size, against the link's measured peak (Strata figure 3).

8,192 tokens of Llama-3.1-8B's KV in random order, from a pinned page-first host pool to a layer-first device pool,
layer by layer as a batch loads them. First the bytes are compared, then the time is taken; the peak is one copy of the
same bytes in one piece. Verified figures include the checksums, which the GPU-assisted mover computes on the device
behind each copy, the others on the processor before it. The target is 90% of the peak, verified, at pages of 1 to 32
tokens. Copies of ``per_page`` are issued by Python, so at small pages it shows what a copy costs to issue here, not the
copy engine.

Without a GPU there is no kernel among them: it is interpreted elsewhere (``bench.gpu.interference``).

``python -m bench.gpu.movers [--quick] [--rounds 9]``
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch

from bench.gpu import reading
from services.worker.kv.measured_loads import LoadScene, load_scene, medians, plain_copy
from services.worker.kv.movers import make_mover
from services.worker.kv.movers.protocol import PageMover

PAGE_SIZES = (16, 1, 64, 32, 256)
"""The default first: there may be no time for all."""

PROGRAMS = (1, 2, 4, 8)


def movers_of(scene: LoadScene) -> dict[str, PageMover]:
    """One of each kind, and one kernel for every number of programs."""
    pool = scene.device
    made = {name: make_mover(pool, name, programs=1) for name in ("per_page", "batched")}
    for programs in PROGRAMS if pool.device.type == "cuda" else ():
        made[f"gpu_assisted_{programs}"] = make_mover(pool, "gpu_assisted", programs=programs)
    return made


def check(scene: LoadScene, name: str, mover: PageMover) -> None:
    """Every byte of every page is where it belongs; raises SystemExit if not."""
    pool = scene.device
    bytes_now = pool.tensor.view(torch.uint8).reshape(-1)
    bytes_now.zero_()
    if pool.device.type == "cuda":
        torch.cuda.synchronize()
    scene.load(mover, verified=True)
    geometry = pool.geometry
    device = bytes_now.cpu().numpy().reshape(geometry.layers, 2, pool.pages, geometry.half_bytes)
    host = scene.host.view.pages.reshape(pool.pages, geometry.layers, 2, geometry.half_bytes)
    for page, device_page in zip(scene.pages.tolist(), scene.device_pages.tolist(), strict=True):
        if not np.array_equal(device[:, :, device_page], host[page]):
            raise SystemExit(f"{name} moved page {page} wrongly at page size {geometry.page_size}")


def measure(scene: LoadScene, rounds: int) -> dict[str, Any]:
    """GB/s of each mover, and its share of the peak."""
    made = movers_of(scene)
    for name, mover in made.items():
        check(scene, name, mover)
    found: dict[str, Any] = {}
    peak = scene.nbytes / medians({"peak": plain_copy(scene)}, rounds)["peak"]
    for name, mover in made.items():
        # A copy for every page and half takes seconds where pages are a token each; its speed shows sooner.
        count = max(1, len(scene.pages) // 16) if name == "per_page" else len(scene.pages)
        works: dict[str, Callable[[], object]] = {
            str(verified): partial(scene.load, mover, verified=verified, count=count) for verified in (False, True)
        }
        spent = medians(works, rounds)
        nbytes = count * scene.device.geometry.page_bytes
        found[name] = {
            "gb_s": nbytes / spent["False"] / 1e9,
            "of_peak": nbytes / spent["False"] / peak,
            "verified_gb_s": nbytes / spent["True"] / 1e9,
            "verified_of_peak": nbytes / spent["True"] / peak,
        }
    return {"peak_gb_s": peak / 1e9, "movers": found}


def headline(results: dict[str, Any]) -> reading.Headline:
    """The fastest mover of each page size, everything verified, beside the peak."""
    lines: list[tuple[str, float | None, str]] = []
    for page_size, found in results.items():
        name, best = max(found["movers"].items(), key=lambda each: each[1]["verified_gb_s"])
        what = f"pages of {page_size}, verified: {name}"
        lines.append((what, best["verified_gb_s"], f"GB/s of {found['peak_gb_s']:.3g}"))
    return lines


def main() -> None:
    run = reading.begin("movers", __doc__)
    geometry = run.choose(reading.LLAMA_8B, reading.LLAMA_8B_SHALLOW, reading.TINY)
    tokens = run.choose(8192, 1024, 512)
    results: dict[str, Any] = {}
    found = {"tokens": tokens, "layers": geometry.layers, "page_sizes": results}
    for page_size in run.each(PAGE_SIZES):
        of_size = msgspec.structs.replace(geometry, page_size=page_size)
        with load_scene(of_size, tokens, device=run.device.type, shm_prefix=reading.PREFIX) as scene:
            results[str(page_size)] = measure(scene, run.rounds)
        run.keep(found)
    run.finish(found, headline(results))


if __name__ == "__main__":
    main()
