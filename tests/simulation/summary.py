"""What many seeds came to, as figures that are kept: violations, endings, faults, and which states were reached."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.simulation.running import Outcome

FAULT = "fault_"

REACHED = {
    "backups": "backups_done",
    "chunks quarantined by scrubbing": "chunks_quarantined_by_scrubbing",
    "deferrals": "requests_deferred",
    "deaths seen by a neighbour and reported": "lost_by_process_gone",
    "drains cut short": "drains_cut_short",
    "drains ended by nothing being left": "drains_done",
    "fetches": "fetches_done",
    "holes between stretches passed": "hidden_holes_passed",
    "loads": "loads_started",
    "loads failed": "loads_failed",
    "members lost: storages": "storages_lost",
    "members lost: workers": "workers_lost",
    "members that learnt that they were given up": "members_that_learnt_their_end",
    "neighbour loads": "neighbour_loads_started",
    "nodes cut for an eviction": "victims_cut",
    "outputs said again": "plans_repeated",
    "pages handed over by drains": "handed_over_pages",
    "pages quarantined": "quarantined_pages",
    "pins": "pins_set",
    "preemptions": "preemptions",
    "promotions": "promotions_started",
    "requests moved by drains": "requests_moved_by_drains",
    "requests reclaimed": "requests_reclaimed",
    "requests resumed": "requests_resumed",
    "requests stolen": "requests_stolen",
    "restorations from hidden states": "restorations_planned_hidden",
    "saves of KV": "saves_done",
    "saves of hidden states": "hidden_saves_done",
    "saves withheld by who was given up": "saves_withheld",
    "schedulers fenced": "schedulers_fenced",
    "sparse prefixes read": "sparse_prefixes",
    "stretches added to a restoration": "hidden_runs_extended",
    "warmings": "warmings_started",
}
"""What a simulation has to meet for its properties to mean anything, and the counter that says so."""


class Summary:
    """Figures of all outcomes that it was told of."""

    def __init__(self) -> None:
        self.seeds = self.inputs = self.requests = 0
        self.virtual_s = 0.0
        self.endings: Counter[str] = Counter()
        self.defects: dict[str, list[int]] = {}  # Seeds by where a property broke.
        self._times: Counter[str] = Counter()
        self._in_seeds: Counter[str] = Counter()

    def add(self, outcome: Outcome) -> bool:
        """Count an outcome; returns whether it is the first that broke a property where it did."""
        self.seeds += 1
        self.inputs += outcome.inputs
        self.requests += outcome.counters.get("requests_accepted", 0)
        self.virtual_s += outcome.virtual_s
        self.endings.update(outcome.endings)
        happened = {name: times for name, times in (outcome.counters | outcome.seen).items() if times}
        self._times.update(happened)
        self._in_seeds.update(happened.keys())
        if not outcome.broken:
            return False
        known = self.defects.setdefault(outcome.signature, [])
        known.append(outcome.scenario.seed)
        return len(known) == 1

    def results(self, wall_s: float) -> dict[str, Any]:
        """Everything, in a form for JSON."""
        faults = sorted(name for name in self._times if name.startswith(FAULT))
        return {
            "seeds": self.seeds,
            "violations": sum(map(len, self.defects.values())),
            "violated": {signature: sorted(seeds) for signature, seeds in self.defects.items()},
            "inputs": self.inputs,
            "requests_accepted": self.requests,
            "virtual_hours": round(self.virtual_s / 3600, 1),
            "wall_seconds": round(wall_s, 1),
            "seeds_per_minute": round(60 * self.seeds / max(1e-9, wall_s)),
            "faults": {name.removeprefix(FAULT): self._times[name] for name in faults},
            "endings": dict(sorted(self.endings.items())),
            "reached": {
                title: {"times": self._times[name], "in_seeds": self._in_seeds[name]} for title, name in REACHED.items()
            },
        }
