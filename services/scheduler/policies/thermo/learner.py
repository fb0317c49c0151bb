"""The learning of all pools of one tier: the law of reuse, and the rule by which they rank.

Requests go to the worker that holds their prefix, so one pool sees much the same of a cell as the others: the sample of
a workload by the hash of its prefixes (Waldspurger et al., FAST 2015), drawn by the router. So one pool leads, and
learning costs as much as in one pool however many there are. Another one leads once it has seen twice as many requests,
so that the leader is never without requests for long.
"""

from __future__ import annotations

import msgspec

from services.scheduler.policies.thermo.duel import Duel
from services.scheduler.policies.thermo.fit import Fit
from services.scheduler.policies.thermo.law import Law
from services.scheduler.policies.thermo.spacing import Spacing

SAMPLES_PER_REQUEST = 2
EARLY_SAMPLES = 4  # Samples per request in the first EARLY requests, while the law knows little.
EARLY = 1500
FIRST_FIT = 16  # Requests before the first fit, and between attempts until enough reuses were seen.
FIT_INTERVAL = 128  # Requests between two fits of the law; the first ones come sooner.
MOST_UNLABELLED = 4096  # Samples whose features wait to be corrected; beyond it the oldest keep their first features.
LABELS = 128  # Samples whose features are corrected in one request; a fit waits until all are.
MOST_LATER = 1024  # Samples of running requests that are corrected once more; others stay as they are.
NOBODY = -1


class Learner(msgspec.Struct):
    """The state of learning. ``requests`` are those of the pools that led, while they led."""

    leader: int = 0  # Number of the member whose requests count; NOBODY in the bytes of members that only follow.
    members: int = 0  # The greatest number of a member so far.
    leader_requests: int = 0  # Requests that the leader had seen at its last one.
    began_ns: int = -1  # The stream's time at the first request.
    requests: int = 0
    fit_at: int = FIRST_FIT
    learned_at: int = -1  # Sequence number of the input in which the last slice of learning was done.
    spacing: Spacing = msgspec.field(default_factory=Spacing)
    unlabelled: list[int] = []  # Digests of samples whose features may still change.
    later: list[int] = []  # Digests of such samples left for the next fit because their requests run.
    law: Law = msgspec.field(default_factory=Law)
    fit: Fit = msgspec.field(default_factory=Fit)
    duel: Duel = msgspec.field(default_factory=Duel)

    def is_led_by(self, member: int, requests: int) -> bool:
        """Return whether this member, which has seen ``requests`` requests, leads from now on."""
        if member == self.leader:
            self.leader_requests = requests
            return True
        if requests <= 2 * self.leader_requests + FIRST_FIT:
            return False
        self.hand_over(member, requests)
        return True

    def hand_over(self, member: int, requests: int) -> None:
        """Make this member, which has seen ``requests`` requests, the leader."""
        self.leader, self.leader_requests = member, requests
        self.duel.entering = []  # The new leader has other prefixes.

    def is_fit_due(self) -> bool:
        """Return whether a fit should begin, as soon as all samples have their features."""
        return self.requests >= self.fit_at and not self.fit.stage

    def picks(self, size: int, prompt_tokens: float) -> bool:
        """Return whether one of these ``size`` tokens is sampled; an average prompt has ``prompt_tokens``."""
        rate = EARLY_SAMPLES if self.requests < EARLY else SAMPLES_PER_REQUEST
        return self.spacing.picks(size, prompt_tokens / rate)

    def sample(self, digest: int, now: float, code: int) -> int:
        """Watch a prefix that is used now; return the sample's number."""
        self.unlabelled.append(digest)
        if len(self.unlabelled) > MOST_UNLABELLED:
            del self.unlabelled[: MOST_UNLABELLED // 2]
        return self.law.samples.open(now, now, code)

    def to_label(self) -> list[int]:
        """Return digests of samples whose features are to be corrected now, at most ``LABELS`` for each request."""
        labelled, self.unlabelled = self.unlabelled[:LABELS], self.unlabelled[LABELS:]
        return labelled

    def try_fit(self, now: float) -> None:
        """Begin a fit if the features of all samples are corrected and enough reuses were seen.

        Sets when the next fit or attempt is due.
        """
        if self.unlabelled:
            return
        self.unlabelled, self.later = self.later, []
        is_begun = self.fit.start(self.law, now)
        self.fit_at = self.requests + (min(FIT_INTERVAL, self.requests) if is_begun else FIRST_FIT)
