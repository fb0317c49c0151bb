"""Links that open the page at ``/ui`` once: each has a code that is exchanged for the admin key, and then forgotten."""

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
    """Codes that were made and not yet used, the oldest first. ``clock`` gives seconds that never run backwards."""

    clock: Callable[[], float]
    _made: OrderedDict[bytes, float] = field(default_factory=OrderedDict)  # When, by the digest of the code.

    def make(self) -> str:
        """Return a new code. The oldest is forgotten where there are more than ``MOST_LINKS``."""
        code = secrets.token_urlsafe(CODE_BYTES)
        self._made[_digest(code)] = self.clock()
        while len(self._made) > MOST_LINKS:
            self._made.popitem(last=False)
        return code

    def use(self, code: str) -> bool:
        """Return whether ``code`` was made within ``KEPT_S`` and is used for the first time. It is not used again."""
        # A digest is looked up, so that the time of an answer says nothing about codes that are near.
        made_s = self._made.pop(_digest(code), None)
        return made_s is not None and self.clock() - made_s <= KEPT_S


def _digest(code: str) -> bytes:
    return hashlib.blake2b(code.encode(), digest_size=32).digest()
