"""What is committed of a run, merged into the file of its workload."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import results_file
from bench.peers.figures import Figures, agreement, medians, ratio
from bench.peers.rounds import Measured
from bench.peers.systems import SYSTEMS, Bounds
from bench.peers.targets import judged

_DIGITS = 5


def results_of(workload: str, measured: Measured, bounds: Bounds, *, model: str) -> dict[str, Any]:
    """Medians, each round, ratios of each of ours to each peer, targets, and how far greedy answers agree."""
    ours = [name for name in measured.figures if name.startswith("ours")]
    peers = [name for name in measured.figures if name not in ours]
    first = next(iter(measured.figures.values()))
    return {
        "model": model,
        "bounds": {
            "threads": bounds.threads,
            "device_tokens": bounds.device_tokens,
            "host_bytes": bounds.host_bytes,
            "max_running": bounds.max_running,
            "dtype": "bfloat16",
        },
        "repeats": len(next(iter(first.values()))),
        "systems": {
            name: {
                "title": SYSTEMS[name].title,
                "passes": {
                    passed: {"median": _rounded(medians(rounds)), "rounds": [_rounded(each) for each in rounds]}
                    for passed, rounds in passes.items()
                },
            }
            for name, passes in measured.figures.items()
        },
        "ratios": {
            f"{mine} to {peer}": _ratios(measured.figures[mine], measured.figures[peer])
            for mine in ours
            for peer in peers
        },
        "targets": judged(workload, measured.figures),
        "greedy_answers_equal": {
            f"{mine} to {peer}": _agreements(measured, mine, peer) for mine in ours for peer in peers
        },
    }


def _rounded(figures: Figures) -> Figures:
    return {name: float(f"{value:.{_DIGITS}g}") for name, value in figures.items()}


def _ratios(ours: dict[str, list[Figures]], theirs: dict[str, list[Figures]]) -> dict[str, Any]:
    """Of every figure that is better or worse, in passes that both were asked."""
    found: dict[str, Any] = {}
    for passed, mine in ours.items():
        if passed in theirs:
            names: Sequence[str] = [name for name in mine[0] if name.endswith(("_per_s", "_ms"))]
            ratios = {name: ratio(name, mine, theirs[passed]) for name in names}
            found[passed] = {name: _rounded(asdict(each)) for name, each in ratios.items() if each is not None}
    return found


def _agreements(measured: Measured, mine: str, peer: str) -> dict[str, Any]:
    answers, others = measured.answers[mine], measured.answers[peer]
    found = {passed: agreement(answers[passed], others[passed]) for passed in answers if passed in others}
    return {passed: each for passed, each in found.items() if each is not None}


def merged(document: dict[str, Any] | None, run: dict[str, Any]) -> dict[str, Any]:
    """A file's document with one more run; an earlier run of the same model and systems is replaced.

    A run is a whole document of ``bench.results_file``: each keeps its own commit, date and command.
    """
    results = run["results"]
    key = f"{results['model']}: {', '.join(results['systems'])}"
    runs = dict(document["runs"]) if document is not None else {}
    return {"benchmark": run["benchmark"], "runs": {**runs, key: run}}


def save(workload: str, results: dict[str, Any], *, seed: int, folder: Path = results_file.RESULTS) -> Path:
    """Merge into ``peers_<workload>.json`` and return its path."""
    name = f"peers_{workload}"
    with tempfile.TemporaryDirectory() as scratch:
        written = results_file.write(name, results, seed=seed, out=Path(scratch) / "run.json")
        run = json.loads(written.read_text(encoding="utf-8"))
    path = folder / f"{name}.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    path.write_text(json.dumps(merged(known, run), indent=1) + "\n", encoding="utf-8")
    return path
