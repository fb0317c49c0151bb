"""The choice of the rule that ranks the pool: the one whose shadow cache hits most, beyond chance.

While the pool has not been full yet, smaller caches that fill sooner decide (scouts), and before those have seen
anything the rule is rounds: where nothing came back so far, an old prefix is nearer to its return than a new one.

The idea of experts that learn from what they would have lost is that of LeCaR (Vietri et al., HotStorage 2018) and
CACHEUS (Rodriguez et al., FAST 2021); here each has a cache of its own, and one of them decides at a time.
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING

import msgspec

from services.scheduler.policies.thermo.features import code_of
from services.scheduler.policies.thermo.rules import LEARNED, ROUNDS, RULES
from services.scheduler.policies.thermo.shadows import Shadows
from services.scheduler.policies.thermo.spacing import Spacing

if TYPE_CHECKING:
    from services.scheduler.policies.thermo.law import Law
    from services.scheduler.policies.thermo.prefixes import Prefixes

SAMPLES_PER_REQUEST = 4.0  # At most.
MOST_HELD = 2048  # Samples in the pool; where there would be more, fewer are taken per request.
SCOUT_SHARE = 0.25  # Capacity of the scouts as a share of the pool's.
MOST_ENTERING = 64  # Samples of one request. Many nodes can be added without a request.
HANDED_OVER = 20.0  # The scouts' evidence (in squared samples) that the full caches begin with, at most.
TURNOVERS = 4.0  # Turnovers of the pool after which a hit counts by 1 / e.
LEAST_HORIZON = 300.0  # Requests that must pass at least until it does.
DEVIATIONS = 1.0  # Standard deviations by which the lead of a simple rule must exceed chance.
LEAST_LEAD = 2.0  # Samples that its lead must have on top.
LEARNED_DEVIATIONS = 0.5  # The same for the law, which gets better, so that the past understates it.


class Duel(msgspec.Struct):
    """The duel of the rules. ``rule`` is the one in force.

    Samples of a request are entered after it, when most of their features are known.
    """

    rule: int = ROUNDS
    spacing: Spacing = msgspec.field(default_factory=Spacing)
    tokens: float = 0.0  # Tokens for which one sample stands; 0 before that is known.
    entering: list[tuple[int, float]] = []  # Digests of the newest request's samples, and the weight of each.
    shadows: Shadows = msgspec.field(default_factory=Shadows)
    scouts: Shadows | None = msgspec.field(default_factory=Shadows)  # None once ``shadows`` have evicted.

    def used(self, digest: int, size: int) -> None:
        """Note that ``size`` tokens at the end of this prefix were used; some may be sampled."""
        if self.spacing.picks(size, self.tokens) and len(self.entering) < MOST_ENTERING:
            self.entering.append((digest, max(size / self.tokens, 1.0) if self.tokens else 1.0))

    def enter(self, digest: int, last: float, code: int, weight: float) -> None:
        """Enter one of ``entering`` into the shadow caches, with the features that its prefix has by now."""
        self.reused(digest)
        self.shadows.enter(digest, last, code, weight)
        if self.scouts is not None:
            self.scouts.enter(digest, last, code, weight)

    def reused(self, digest: int) -> None:
        """Note the reuse of a prefix that may be sampled."""
        self.shadows.reused(digest)
        if self.scouts is not None:
            self.scouts.reused(digest)

    def changed(self, prefixes: Prefixes, row: int) -> None:
        """Note changed features of a prefix that may be sampled."""
        digest = prefixes.digest[row]
        is_watched = digest in self.shadows.rows
        if is_watched or (self.scouts is not None and digest in self.scouts.rows):
            code = code_of(prefixes, row)
            self.shadows.changed(digest, code)
            if self.scouts is not None:
                self.scouts.changed(digest, code)

    def settle(self, capacity: int, request_tokens: float, request_s: float, now: float, law: Law) -> int:
        """Settle the duel after a request; return the rule from now on.

        ``capacity`` is in tokens, as is the average prompt, ``request_tokens``. ``request_s`` is the average time from
        one request to the next.
        """
        self.tokens = request_tokens / min(SAMPLES_PER_REQUEST, MOST_HELD * request_tokens / max(capacity, 1))
        held = capacity / self.tokens
        fading = 1 - 1 / max(TURNOVERS * capacity / request_tokens, LEAST_HORIZON)
        turnover_s = capacity / request_tokens * request_s
        is_changed = self.shadows.settle(held, now, law, fading, turnover_s)
        scouts = self.scouts
        if scouts is not None:
            is_changed |= scouts.settle(held * SCOUT_SHARE, now, law, fading, turnover_s * SCOUT_SHARE)
            if self.shadows.is_full:
                part = min(1.0, HANDED_OVER * scouts.unit / max(scouts.unit, *scouts.squares)) / scouts.unit
                part *= self.shadows.unit
                self.shadows.leads = [part * lead for lead in scouts.leads]
                self.shadows.squares = [part * square for square in scouts.squares]
                self.scouts = None
        if is_changed or (self.rule != LEARNED and bool(law.index)):
            self.rule = self._winner(self.shadows if self.scouts is None else self.scouts, bool(law.index))
        return self.rule

    def evict(self, capacity: int, now: float, law: Law) -> bool:
        """Let shadow caches evict what fell due with the last request; return whether that was anything.

        ``capacity`` is in tokens.
        """
        if not self.tokens:
            return False
        held = capacity / self.tokens
        is_any = self.shadows.evict(held, now, law)
        if self.scouts is not None:
            is_any |= self.scouts.evict(held * SCOUT_SHARE, now, law)
        return is_any

    def _winner(self, shadows: Shadows, is_learned: bool) -> int:
        best, most = self.rule, 0.0
        for other in range(RULES):
            if other == LEARNED and not is_learned:
                continue  # The law is recency until something is learned.
            lead, square = shadows.lead(other, self.rule)
            deviations, least = (LEARNED_DEVIATIONS, 0.0) if other == LEARNED else (DEVIATIONS, LEAST_LEAD)
            surplus = lead - least - deviations * sqrt(square)
            if surplus > most:
                best, most = other, surplus
        return best
