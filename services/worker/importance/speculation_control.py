"""Whether reading ahead for a layer pays, by what it saved and wasted there lately. Pure but for the clock handed in.

What is read ahead and used saves the time that reading it on demand would have taken, less the wait for it. What is
read ahead and not used occupies the link for nothing, at the expense of others' loads. HyperInfer speculates always;
where neighbouring layers disagree that reads much for nothing, so here a layer stops while its saving is below its
waste, and tries again after a pause, which doubles each time that the trial fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from services.worker.importance.speculation import LayerOutcome


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """``trial_outcomes`` are looked at before a verdict. ``recency`` is the weight of the newest in the averages.

    ``waste_weight``: what a second of the link is worth, in seconds of stall; 0 where it has no other users.
    """

    trial_outcomes: int = 4
    recency: float = 0.25
    waste_weight: float = 1.0
    pause_s: float = 5.0
    longest_pause_s: float = 80.0


class _LayerRecord:
    """What is known of one layer: seconds saved and wasted on average, and until when it rests."""

    def __init__(self, pause_s: float) -> None:
        self.outcomes = 0
        self.saving_s = self.waste_s = 0.0
        self.pause_s = pause_s
        self.rests_until: float | None = None


class SpeculationControl:
    """One for all requests of a worker; used by the thread that computes."""

    def __init__(self, settings: ControlSettings | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings or ControlSettings()
        self._clock = clock
        self._layers: dict[int, _LayerRecord] = {}
        self._demand_s_per_byte: float | None = None

    def wants(self, layer: int) -> bool:
        """Whether to read ahead for ``layer``. The first time after a pause, a new trial begins."""
        record = self._record(layer)
        if record.rests_until is None:
            return True
        if self._clock() < record.rests_until:
            return False
        record.rests_until, record.outcomes = None, 0
        return True

    @property
    def resting(self) -> int:
        """Layers for which nothing is read ahead at the moment."""
        now = self._clock()
        return sum(each.rests_until is not None and now < each.rests_until for each in self._layers.values())

    def record(self, outcome: LayerOutcome) -> None:
        """Take note of one layer of one request, whether anything was read ahead for it or not."""
        if outcome.on_demand_bytes:
            rate = outcome.on_demand_s / outcome.on_demand_bytes
            known = self._demand_s_per_byte
            self._demand_s_per_byte = rate if known is None else self._blend(known, rate)
        record = self._record(outcome.layer)
        if not outcome.speculated_bytes or record.rests_until is not None:
            return
        self._weigh(record, *self._saving_and_waste(outcome))

    def _saving_and_waste(self, outcome: LayerOutcome) -> tuple[float, float]:
        """Seconds. What never arrived kept the thread busy for as long as it was waited for, at least."""
        ahead = max(outcome.ahead_s, outcome.wait_s) / outcome.speculated_bytes
        # Before anything was read on demand, reading ahead is the only hint of how long that takes.
        demand = ahead if self._demand_s_per_byte is None else self._demand_s_per_byte
        waste = outcome.wasted_bytes * ahead * self._settings.waste_weight
        return outcome.hit_bytes * demand - outcome.wait_s, waste

    def _weigh(self, record: _LayerRecord, saving_s: float, waste_s: float) -> None:
        settings, is_first = self._settings, record.outcomes == 0
        record.saving_s = saving_s if is_first else self._blend(record.saving_s, saving_s)
        record.waste_s = waste_s if is_first else self._blend(record.waste_s, waste_s)
        record.outcomes += 1
        if record.outcomes < settings.trial_outcomes:
            return
        if record.saving_s >= record.waste_s:
            record.pause_s = settings.pause_s
            return
        record.rests_until = self._clock() + record.pause_s
        record.pause_s = min(2 * record.pause_s, settings.longest_pause_s)

    def _blend(self, known: float, new: float) -> float:
        return known + self._settings.recency * (new - known)

    def _record(self, layer: int) -> _LayerRecord:
        if layer not in self._layers:
            self._layers[layer] = _LayerRecord(self._settings.pause_s)
        return self._layers[layer]
