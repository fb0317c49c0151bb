"""Contexts: facts of requests that the prefixes used last by one share; a row for each request."""

from __future__ import annotations

import msgspec

from services.scheduler.policies.thermo.columns import ROWS, Reals, Wholes, grow, reals, wholes
from services.scheduler.policies.thermo.index import Index

NO_ANSWER = -1


class Contexts(msgspec.Struct):
    """Columns by row, from 1 on. Sizes in tokens, times in policy seconds. A row without users is free."""

    number: Wholes = wholes("Q")  # Number of the request's admission.
    last: Reals = reals("d")  # When it was admitted.
    prompt: Wholes = wholes("I")
    known: Wholes = wholes("I")  # Prompt tokens that had been seen before, resident or not.
    turn: Wholes = wholes("H")  # Number of requests before it in a chain, each of them extended by the next.
    pace: Reals = reals("f")  # Smoothed time between uses of the deepest known prefix; -1 when it was not known.
    branches: Wholes = wholes("H")  # Known continuations of the deepest known prefix, this one among them.
    answer: Wholes = wholes("i")  # Tokens that were sampled for it; NO_ANSWER until that is known.
    users: Wholes = wholes("I")  # Prefixes and holders that refer to it.
    by_number: Index = msgspec.field(default_factory=Index)
    free: Wholes = wholes("I")

    def find(self, number: int) -> int:
        """Return the row of this admission, or 0."""
        return self.by_number.find(self.number, number)

    def open(self, number: int, last: float, prompt: int, users: int) -> int:
        """Return a new row for an admission that has none yet."""
        if len(self.free) == 1:
            first = len(self.number)
            columns = (self.number, self.last, self.prompt, self.known, self.turn, self.pace)
            grow((*columns, self.branches, self.answer, self.users), ROWS)
            self.free.extend(range(first + ROWS - 1, first - 1, -1))
        row = self.free.pop()
        self.number[row], self.last[row], self.prompt[row], self.known[row] = number, last, prompt, 0
        self.turn[row], self.pace[row], self.branches[row] = 0, -1.0, 0
        self.answer[row], self.users[row] = NO_ANSWER, users
        self.by_number.add(self.number, row)
        return row

    def release(self, row: int) -> None:
        """Count one prefix or holder less that refers to the request; with the last one it is forgotten.

        Row 0 is ignored.
        """
        if row:
            users = self.users[row] - 1
            self.users[row] = users
            if not users:
                self.by_number.remove(self.number, row)
                self.free.append(row)
