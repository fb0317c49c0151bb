"""Changes that a request's use of a path makes to each of its prefixes, computed for all of them together.

Nearly all prefixes of a session's turn were used before and nothing but the use happens there; one by one they would
cost more than the rest of an admission. Numbers are those of one use after the other, to the bit.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from services.scheduler.policies.thermo.columns import column
from services.scheduler.policies.thermo.prefixes import NO_SAMPLE
from services.scheduler.policies.thermo.rules import MOST_USES

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

    from services.scheduler.policies.thermo.contexts import Contexts
    from services.scheduler.policies.thermo.prefixes import Prefixes

MEMORY = 12  # Uses over which the pace of a prefix is smoothed.


class PathUses:
    """Uses of the prefixes in ``rows``, top first; each continues the one before. ``digests`` are theirs.

    None of them refers to the row ``context`` yet, that of the request which uses them at ``clock``.
    """

    def __init__(self, prefixes: Prefixes, rows: NDArray[np.int64], context: int, clock: float) -> None:
        """Read the state, and change nothing."""
        self.rows: list[int] = rows.tolist()
        self.digests: list[int] = column(prefixes.digest)[rows].tolist()
        self._all, self._context = rows, context
        befores = column(prefixes.context)[rows]
        self.befores: list[int] = befores.tolist()
        gaps = np.maximum(clock - column(prefixes.contexts.last)[befores], 0.0)
        counts = column(prefixes.count)[rows].astype(np.int64)
        turns, paces = column(prefixes.turn)[rows].astype(np.int64), column(prefixes.pace)[rows].astype(np.float64)
        uses = np.maximum(counts, turns + 1)
        shares = np.where(uses < MEMORY, 1 / uses, 1 / MEMORY)
        self._paces = np.where(paces < 0, gaps, paces + shares * (gaps - paces))
        self._counts = np.minimum(counts + 1, MOST_USES)

    def noted(self, prefixes: Prefixes, watched: Sequence[Collection[int]]) -> list[int]:
        """Return the places, in order, at which more happens than a use; the end of the path is the last.

        There the prefix is sampled or among the digests in ``watched``, or the last request continued it otherwise.
        """
        stands_out = column(prefixes.sample)[self._all] != NO_SAMPLE
        went = column(prefixes.latest)[self._all[:-1]]
        stands_out[1:] |= went != np.array(self.digests[1:], np.uint64)
        for held in watched:
            stands_out |= np.fromiter(map(held.__contains__, self.digests), np.bool_, len(self.digests))
        return [*np.flatnonzero(stands_out).tolist(), len(self.rows)]

    def take(self, prefixes: Prefixes, place: int) -> None:
        """Write the new values of one prefix, and of its request as far as it is known down to there."""
        row = self.rows[place]
        prefixes.pace[row], prefixes.count[row] = float(self._paces[place]), int(self._counts[place])
        prefixes.passed[row], prefixes.context[row] = 0, self._context
        self._tell(prefixes, row)

    def take_all(self, prefixes: Prefixes) -> None:
        """Write the new values of all prefixes, and count the references to each request."""
        rows = self._all
        column(prefixes.pace)[rows], column(prefixes.count)[rows] = self._paces, self._counts
        column(prefixes.passed)[rows], column(prefixes.context)[rows] = 0, self._context
        self._rebind(prefixes.contexts)
        self._tell(prefixes, self.rows[-1])

    def _tell(self, prefixes: Prefixes, row: int) -> None:
        contexts, context = prefixes.contexts, self._context
        if prefixes.end[row] > contexts.known[context]:
            contexts.known[context] = prefixes.end[row]
            contexts.turn[context] = min(prefixes.turn[row] + 1, MOST_USES)
            contexts.pace[context] = prefixes.pace[row]
            contexts.branches[context] = min(prefixes.children[row] + 1, MOST_USES)

    def _rebind(self, contexts: Contexts) -> None:
        contexts.users[self._context] += len(self.befores)
        referred = Counter(self.befores)
        # A request without any more references is released at the last prefix that had one.
        for before in reversed(dict.fromkeys(reversed(self.befores))):
            contexts.users[before] -= referred[before] - 1
            contexts.release(before)
