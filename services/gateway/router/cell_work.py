"""The recent work of a cell, from its gateways' reports and what a router sent since. Pure: time is an argument.

Each gateway of a cell reports how many tokens of prompts it asked for, and how many tokens of all prompts the cell's
scheduler found in its caches. The difference is the real number of misses, of all requests, known as soon as a request
is admitted. A router's own estimate (the prompt's bytes that the cell is not known to hold) counts until that is
reported, and permanently where a cell reports nothing.
"""

from __future__ import annotations

from math import exp

WORK_S = 600.0
"""Time constant with which past work decays, by 1/e."""

UNTOLD_SWEEPS = 2
"""Sweeps until sent work is reported: status and load take up to 1.5 s."""


class CellWork:
    """The work of one cell, in bytes of prompt."""

    def __init__(self) -> None:
        """Begin with no work, before the first report."""
        self._told = 0.0
        self._sent = [0.0] * UNTOLD_SWEEPS  # By sweep, the newest first.
        self._found_tokens: int | None = None
        self._does_tell = False

    @property
    def level(self) -> float:
        """Work of the last minutes, in bytes of prompt."""
        return max(0.0, self._told + sum(self._sent))

    def begin(self, nbytes: int) -> None:
        """Note a sent request with about so many bytes to compute."""
        self._sent[0] += nbytes

    def hear(self, more_asked_tokens: int, found_tokens: int, token_bytes: float) -> None:
        """Take in a gateway's report.

        The gateway asked for ``more_asked_tokens`` more than at its last report, and ``found_tokens`` is the cell's
        count of found tokens. Gateways report that count in turn, so one that is a little lower is only older; one of
        less than half comes from a scheduler that counts from 0 again.
        """
        before = self._found_tokens
        if before is None or found_tokens > before or found_tokens < before / 2:
            self._found_tokens = found_tokens
        more_found = 0 if before is None else max(0, found_tokens - before)
        self._does_tell |= bool(more_asked_tokens or found_tokens)
        self._told += (more_asked_tokens - more_found) * token_bytes

    def sweep(self, passed_s: float) -> None:
        """Let work decay.

        Sent work is dropped once it must have been reported, and kept where a cell reports nothing.
        """
        late = self._sent.pop()
        self._sent.insert(0, 0.0)
        self._told = (self._told if self._does_tell else self._told + late) * exp(-passed_s / WORK_S)
