"""One-time links that open the page at ``/ui``: each has a code that is exchanged once for the admin key."""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

MOST_LINKS = 16
KEPT_S = 24 * 3600.0
CODE_BYTES = 24


@dataclass(slots=True)
class PageLinks:
    """Codes that were made and not yet used, oldest first. ``clock`` is monotonic, in seconds."""

    clock: Callable[[], float]
    _made: OrderedDict[bytes, float] = field(
        default_factory=OrderedDict
    )  # Time of creation, by the digest of the code.

    def make(self) -> str:
        """Return a new code. The oldest is forgotten beyond ``MOST_LINKS``."""
        code = secrets.token_urlsafe(CODE_BYTES)
        self._made[_digest(code)] = self.clock()
        while len(self._made) > MOST_LINKS:
            self._made.popitem(last=False)
        return code

    def use(self, code: str) -> bool:
        """Return whether ``code`` was made within ``KEPT_S`` and not used before; it cannot be used again."""
        # A digest is looked up, so that response times reveal nothing about similar codes.
        made_s = self._made.pop(_digest(code), None)
        return made_s is not None and self.clock() - made_s <= KEPT_S


def _digest(code: str) -> bytes:
    return hashlib.blake2b(code.encode(), digest_size=32).digest()
