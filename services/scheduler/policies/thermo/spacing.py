"""Picking tokens out of a stream of them, about evenly spaced and never in step with it."""

from __future__ import annotations

import msgspec

_MODULUS = 2**63


class Spacing(msgspec.Struct):
    """Spacings drawn anew for each pick, from 0.5 to 1.5 times the asked one, by a fixed pseudo-random sequence."""

    left: float = 0.0  # Tokens until the next pick.
    jitter: int = 1  # State of a linear congruential generator.

    def picks(self, size: int, spacing: float) -> bool:
        """Return whether one of the next ``size`` tokens is picked, where one in ``spacing`` is on average."""
        self.left -= size
        if self.left > 0:
            return False
        self.jitter = (self.jitter * 6364136223846793005 + 1442695040888963407) % _MODULUS
        self.left = max(self.left + spacing * (0.5 + self.jitter / _MODULUS), 0.0)
        return True
