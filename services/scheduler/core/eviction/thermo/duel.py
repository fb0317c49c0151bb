"""Which rule serves best, told by small shadow caches of metadata, one a rule."""

from __future__ import annotations

import msgspec

from services.scheduler.core.eviction.thermo.law import Law
from services.scheduler.core.eviction.thermo.rules import ROUND, RULES
from services.scheduler.core.eviction.thermo.shadows import Shadows

MOST_HELD = 1024
PER_REQUEST = 4.0
HORIZON = 8.0  # Turnovers
SCOUT = 0.25
LEAST_HORIZON = 300
HANDOVER = 20.0
Z = 1.0
LEAST = 2.0


class Duel(msgspec.Struct):
    rule: int = ROUND
    spacing: float = 1.0  # Tokens
    to_sample: float = 0.0
    pending: list[int] = []
    main: Shadows = msgspec.field(default_factory=Shadows)
    scouts: Shadows | None = msgspec.field(default_factory=Shadows)

    def space(self, mean, capacity):
        share = min(PER_REQUEST, MOST_HELD * mean / max(capacity, 1))
        self.spacing = mean / share

    def enter(self, digest, last, code):
        self.reused(digest)
        self.main.enter(digest, last, code)
        if self.scouts is not None:
            self.scouts.enter(digest, last, code)

    def reused(self, digest):
        self.main.reused(digest)
        if self.scouts is not None:
            self.scouts.reused(digest)

    def changed(self, digest, code):
        self.main.changed(digest, code)
        if self.scouts is not None:
            self.scouts.changed(digest, code)

    def settle(self, capacity, mean, now, law) -> int:
        fading = 1 - 1 / max(HORIZON * capacity / mean, LEAST_HORIZON)
        self.main.settle(capacity / self.spacing, now, law, fading)
        if self.scouts is not None:
            self.scouts.settle(capacity / self.spacing * SCOUT, now, law, fading)
            if self.main.is_full:
                part = min(1.0, HANDOVER / max(sum(self.scouts.wins) / RULES, 1.0))
                self.main.wins = [count * part for count in self.scouts.wins]
                self.scouts = None
        wins = self.main.wins if self.scouts is None else self.scouts.wins
        best, margin = self.rule, 0.0
        for other in range(RULES):
            a, b = wins[other * RULES + self.rule], wins[self.rule * RULES + other]
            lead = a - b - LEAST - Z * (a + b) ** 0.5
            if lead > margin:
                best, margin = other, lead
        self.rule = best
        return best
