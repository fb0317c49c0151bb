"""What a cell had to compute lately, by what it tells and what a router sent since. Pure: time is an argument.

Each gateway of a cell tells how many tokens of prompts it asked for, and what the cell's scheduler found of all prompts
in its caches. The difference are the real misses, of all requests, known as soon as a request is admitted. A
router's own guess (the prompt's bytes that it does not know to be held there) counts until that is told, and for good
where a cell tells nothing.
"""

from __future__ import annotations

from math import exp

WORK_S = 600.0
"""Time after which work counts by 1/e only."""

UNTOLD_SWEEPS = 2
"""Sweeps during which what was sent may not have been told yet: status and load take up to 1.5 s."""


class CellWork:
    """In bytes of prompt."""

    def __init__(self) -> None:
        self._told = 0.0
        self._sent = [0.0] * UNTOLD_SWEEPS  # By sweep, the newest first.
        self._found_tokens: int | None = None
        self._does_tell = False

    @property
    def level(self) -> float:
        """Work of the last minutes."""
        return max(0.0, self._told + sum(self._sent))

    def begin(self, nbytes: int) -> None:
        """Note a request that was sent and leaves about so many bytes to compute."""
        self._sent[0] += nbytes

    def hear(self, more_asked_tokens: int, found_tokens: int, token_bytes: float) -> None:
        """Hear a gateway: it asked for so many tokens more than at its last report, and the cell's count of found
        tokens is ``found_tokens``.

        Gateways tell that count by turns, so one that is a little lower is only older; one of less than half is of a
        scheduler that counts from the start again.
        """
        before = self._found_tokens
        if before is None or found_tokens > before or found_tokens < before / 2:
            self._found_tokens = found_tokens
        more_found = 0 if before is None else max(0, found_tokens - before)
        self._does_tell |= bool(more_asked_tokens or found_tokens)
        self._told += (more_asked_tokens - more_found) * token_bytes

    def sweep(self, passed_s: float) -> None:
        """Let work grow old. What was sent long ago is told by now; where nothing is told it goes on counting."""
        late = self._sent.pop()
        self._sent.insert(0, 0.0)
        self._told = (self._told if self._does_tell else self._told + late) * exp(-passed_s / WORK_S)
