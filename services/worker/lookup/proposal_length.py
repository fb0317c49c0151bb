"""How many tokens are proposed for one request, adapted to earlier proposals. Pure, and without a clock.

A rejected row is computed in vain, so there is an account in thousandths of a token's time, which is a step's divided
by its requests: the cost of rows is drawn from it, and each token that was accepted is paid in. An answer that copies
nothing is allowed 0.4% of its time, and so loses no more; one that copies earns more than it draws. Within that the
length doubles while all tokens are accepted, and else falls back to the number accepted.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_LENGTH = 2
TOKEN = 1000
ALLOWANCE = 4
"""Paid in at every step, whether or not tokens were accepted."""
FIRST_BALANCE, MOST_BALANCE = 900, 4 * TOKEN
"""The account at a request's first step, and its upper bound."""


def row_cost(row_bytes: int, step_bytes: int, requests: int) -> int:
    """Return the cost of a row in a step of so many requests, in thousandths of a token's time.

    It is 4% of the step for linear layers, norms and the choice of its token, and five quarters of the share of the
    step's bytes that it reads for itself.

    ``row_bytes`` are the KV before it, ``step_bytes`` the weights and the KV of the step without proposals. An estimate
    on the safe side: what rows really cost is measured by ``bench/prompt_lookup.py``.
    """
    return requests * (40 + TOKEN * row_bytes * 5 // (4 * step_bytes))


@dataclass(slots=True)
class ProposalLength:
    """The length of one request's proposals. ``most``: tokens of a proposal at most."""

    most: int
    _length: int = FIRST_LENGTH
    _balance: int = FIRST_BALANCE

    def tokens(self, cost: int) -> int:
        """Return how many tokens to propose in the next step, where a row costs ``cost`` (:func:`row_cost`)."""
        return min(self._length, self.most, self._balance // cost)

    def note(self, proposed: int, accepted: int, cost: int) -> None:
        """Record a finished step that had ``proposed`` rows at this cost; the first ``accepted`` were right."""
        paid = self._balance + ALLOWANCE + accepted * TOKEN - proposed * cost
        self._balance = min(max(0, paid), MOST_BALANCE)
        if proposed:
            self._length = min(2 * self._length, self.most) if accepted == proposed else max(1, accepted)
