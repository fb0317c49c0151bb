"""How many tokens are proposed for one request, from what became of earlier proposals. Pure, and without a clock.

A rejected row is computed for nothing, so there is an account of rows: what is proposed is drawn from it, and comes
back with interest where it is accepted. An answer that copies nothing proposes one row in ``STEPS_A_ROW`` steps, which
bounds what it may lose; one that copies earns more than it draws. Within that the length doubles while all is accepted
and falls back to what was.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_LENGTH = 2
STEPS_A_ROW = 16
"""Steps that earn a row where nothing is accepted."""
ACCEPTED_EARNS = 3
"""Rows that an accepted one earns, itself among them: proposals pay for themselves from one in three accepted on."""
FIRST_ROWS, MOST_ROWS = 4, 64
"""On the account of a request at its first step, and at any time."""


@dataclass(slots=True)
class ProposalLength:
    """Of one request. ``most``: tokens of a proposal at most."""

    most: int
    _length: int = FIRST_LENGTH
    _account: int = FIRST_ROWS * STEPS_A_ROW  # In parts of a row.

    @property
    def tokens(self) -> int:
        """How many to propose in the next step."""
        return min(self._length, self.most, self._account // STEPS_A_ROW)

    def note(self, proposed: int, accepted: int) -> None:
        """A step is over that had ``proposed`` tokens to verify, of which the first ``accepted`` were right."""
        earned = 1 + (accepted * ACCEPTED_EARNS - proposed) * STEPS_A_ROW
        self._account = min(max(0, self._account + earned), MOST_ROWS * STEPS_A_ROW)
        if not proposed:
            return
        self._length = min(2 * self._length, self.most) if accepted == proposed else max(1, accepted)
