"""What pools of one tier learn together: the law of reuse, and by which rule they rank.

Requests go to the worker that holds their prefix, so that what one pool sees of a cell is like what the others see:
the sample of a workload by the hash of its prefixes (Waldspurger et al., FAST 2015), drawn by the router. So one pool
leads, and learning costs what it costs in one pool however many there are. Another one leads once it has seen twice as
many requests, so that it is never for long one without requests.
"""

from __future__ import annotations

import msgspec

from services.scheduler.policies.thermo.duel import Duel
from services.scheduler.policies.thermo.fit import Fit
from services.scheduler.policies.thermo.law import Law
from services.scheduler.policies.thermo.spacing import Spacing

SAMPLES_PER_REQUEST = 2
EARLY_SAMPLES = 4  # Instead of that in the first EARLY requests, while the law knows little.
EARLY = 1500
FIRST_FIT = 16  # Requests before the law is fitted, and between the tries to do so until enough reuses were seen.
FIT_INTERVAL = 128  # Requests between two fits of the law; the first ones come sooner.
MOST_UNLABELLED = 4096  # Samples that wait for that; of more, the oldest keep the features that they began with.
LABELS = 128  # Samples whose features are corrected in one request; a fit waits until all are.
MOST_LATER = 1024  # Samples of running requests that are looked at once more; others stay as they are.
NOBODY = -1


class Learner(msgspec.Struct):
    """Requests are those of the pools that led, in their time."""

    leader: int = 0  # The member whose requests count; NOBODY in the bytes of those that only follow.
    members: int = 0  # The greatest number that was given to one.
    leader_requests: int = 0  # That the leader had seen at its last one.
    began_ns: int = -1  # The stream's time at the first request.
    requests: int = 0
    fit_at: int = FIRST_FIT
    learned_at: int = -1  # Sequence number of the input in which the last slice of learning was done.
    spacing: Spacing = msgspec.field(default_factory=Spacing)
    unlabelled: list[int] = []  # Digests of samples whose features may still change.
    later: list[int] = []  # The same, left for the next fit because their requests run.
    law: Law = msgspec.field(default_factory=Law)
    fit: Fit = msgspec.field(default_factory=Fit)
    duel: Duel = msgspec.field(default_factory=Duel)

    def is_led_by(self, member: int, requests: int) -> bool:
        """Whether this member leads from now on, which has seen so many requests."""
        if member == self.leader:
            self.leader_requests = requests
            return True
        if requests <= 2 * self.leader_requests + FIRST_FIT:
            return False
        self.hand_over(member, requests)
        return True

    def hand_over(self, member: int, requests: int) -> None:
        """Let this member lead from now on."""
        self.leader, self.leader_requests = member, requests
        self.duel.entering = []  # Its prefixes are others.

    def is_fit_due(self) -> bool:
        """Whether a fit should begin, as soon as all samples have their features."""
        return self.requests >= self.fit_at and not self.fit.stage

    def picks(self, size: int, prompt_tokens: float) -> bool:
        """Whether one of so many tokens is watched; an average prompt has ``prompt_tokens``."""
        rate = EARLY_SAMPLES if self.requests < EARLY else SAMPLES_PER_REQUEST
        return self.spacing.picks(size, prompt_tokens / rate)

    def sample(self, digest: int, now: float, code: int) -> int:
        """Watch a prefix that is used now; returns the sample's number."""
        self.unlabelled.append(digest)
        if len(self.unlabelled) > MOST_UNLABELLED:
            del self.unlabelled[: MOST_UNLABELLED // 2]
        return self.law.samples.open(now, now, code)

    def to_label(self) -> list[int]:
        """Digests of samples whose features are to be corrected now, a few in each request."""
        labelled, self.unlabelled = self.unlabelled[:LABELS], self.unlabelled[LABELS:]
        return labelled

    def try_fit(self, now: float) -> None:
        """Begin a fit if the features of all samples are as they should be and enough reuses were seen."""
        if self.unlabelled:
            return
        self.unlabelled, self.later = self.later, []
        is_begun = self.fit.start(self.law, now)
        self.fit_at = self.requests + (min(FIT_INTERVAL, self.requests) if is_begun else FIRST_FIT)
