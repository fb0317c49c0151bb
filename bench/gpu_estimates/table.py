"""The whole table: every estimate, and beside it what a GPU has measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.gpu_estimates import batch, one_request, overlap, prompts, shared_document, transfers
from bench.gpu_estimates.one_request import ATTENTION, CONTEXT
from bench.gpu_estimates.rows import Device, Row, devices
from services.worker.kv.movers.gpu_assisted import LOAD_PROGRAMS


def estimates(device: Device, results: Path) -> Iterator[Row]:
    """Of one device. The comparison with vLLM, its overlap and a shared document are of the H200 alone, which the
    targets name.
    """
    kernels = one_request.kernels_of_a_step(results)
    yield from one_request.estimates(device, kernels)
    if device.name == "H200":
        yield from batch.estimates(device, results)
        yield from shared_document.estimates(device, batch.ours_of(results).systems()[0])
        yield from overlap.estimates(device, min(kernels.values()), results)
    yield from prompts.estimates(device)
    yield from transfers.estimates(device)


def table(found: Mapping[str, Any] | None, results: Path) -> list[Row]:
    """Every row; those of the device that ``found`` was measured on have its figures. Kernels and the host's part are
    read from ``results``.
    """
    known = {} if found is None else measured(found)
    gpu = "" if found is None else str(found.get("gpu") or "")
    return [
        replace(row, measured=known.get(row.key) if device.name in gpu else None)
        for device in devices()
        for row in estimates(device, results)
    ]


def evidence(file: Path) -> Mapping[str, Any] | None:
    """The results of ``bench.gpu``; None where no GPU has been measured yet."""
    if not file.exists():
        return None
    results: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))["results"]
    return results


def measured(found: Mapping[str, Any]) -> dict[str, float]:
    """What a file of ``bench.gpu`` says, by the keys of rows; only parts that a GPU has run."""
    if not found.get("gpu"):
        return {}
    parts = {name: part.get("results", {}) for name, part in found["parts"].items()}
    readers: dict[str, Callable[[], float]] = {
        "decode": lambda: 1e3 / _point(parts["decode"]["points"], requests=1, context=CONTEXT)["graph_ms"],
        "decode_floor": lambda: 1e3 / _point(parts["decode"]["points"], requests=1, context=CONTEXT)["floor_ms"],
        "backups": lambda: _backups(parts["backup"]["page_sizes"]["16"]["movers_gb_s"]),
        **{f"ours_{batch.REQUESTS}_{context}": partial(_ours, parts, context) for context in batch.CONTEXTS},
        **{f"prefill_{rows}": partial(_prefill, parts, rows) for rows in prompts.CHUNKS},
        **{f"loads_{page}": partial(_loads, parts, page) for page in transfers.PAGES},
        **{f"slowdown_{work}": partial(_slowdown, parts, work) for work in ("prefill", "decode")},
        **{f"shared_{requests}_{tokens}": partial(_shared, parts, requests, tokens)
           for requests, tokens in shared_document.POINTS},
        **{f"attention_{requests}_{context}": partial(_attention, parts, requests, context)
           for requests, context in ATTENTION},
    }  # fmt: skip
    known = {}
    for key, read in readers.items():
        try:
            known[key] = read()
        except (KeyError, StopIteration, ValueError):
            continue  # That part was left out, or failed.
    return known


def _point(points: list[dict[str, Any]], **where: int) -> Mapping[str, Any]:
    return next(point for point in points if all(point[name] == value for name, value in where.items()))


def _ours(parts: Mapping[str, Any], context: int) -> float:
    point = _point(parts["decode"]["points"], requests=batch.REQUESTS, context=context)
    return 1e3 * batch.REQUESTS / float(point["graph_ms"])


def _prefill(parts: Mapping[str, Any], rows: int) -> float:
    return float(_point(parts["prefill"]["points"], rows=rows, context=0)["tokens_per_s"])


def _loads(parts: Mapping[str, Any], page: int) -> float:
    """The best mover's verified speed, as a share of the peak."""
    found = parts["movers"]["page_sizes"][str(page)]
    best = max(float(mover["verified_gb_s"]) for mover in found["movers"].values())
    return best / float(found["peak_gb_s"])


def _slowdown(parts: Mapping[str, Any], work: str) -> float:
    return float(parts["interference"]["programs"][f"load_{LOAD_PROGRAMS}"][work]["slowdown"]) - 1.0


def _shared(parts: Mapping[str, Any], requests: int, tokens: int) -> float:
    return float(_point(parts["decode"]["shared"], requests=requests, context=tokens)["speedup"])


def _attention(parts: Mapping[str, Any], requests: int, context: int) -> float:
    return float(_point(parts["attention"]["points"], requests=requests, context=context, rows=1)["of_ceiling"])


def _backups(speeds: Mapping[str, float]) -> float:
    return max(speed for name, speed in speeds.items() if name != "one_piece") / speeds["one_piece"]
