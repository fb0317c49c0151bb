"""When a tier that failed is tried again: at growing intervals, so that requests do not wait for it each time."""

from __future__ import annotations


class TierHealth:
    """Failures of a tier, which is left alone for a while after each. Times are seconds of one clock."""

    def __init__(self, *, first_s: float, most_s: float) -> None:
        """Begin without failures; the pause after the first one lasts ``first_s`` seconds.

        It is twice as long after each further failure in a row, up to ``most_s`` seconds.
        """
        self._first_s = first_s
        self._most_s = most_s
        self._pause_s = 0.0
        self._until_s = 0.0

    @property
    def is_failing(self) -> bool:
        """Whether its last try failed."""
        return self._pause_s > 0

    def may_try(self, now_s: float) -> bool:
        """Return whether to use the tier now."""
        return not self._pause_s or now_s >= self._until_s

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until it may be tried."""
        return 0.0 if self.may_try(now_s) else self._until_s - now_s

    def failed(self, now_s: float) -> bool:
        """Record a failure; return True if it had worked before, which is worth a line in the log."""
        is_news = not self._pause_s
        # Calls that were under way together count as one failure.
        if now_s >= self._until_s or is_news:
            self._pause_s = min(self._most_s, self._pause_s * 2) if self._pause_s else self._first_s
            self._until_s = now_s + self._pause_s
        return is_news

    def worked(self) -> bool:
        """Record a success; return True if it had failed before."""
        is_news = self._pause_s > 0
        self._pause_s = self._until_s = 0.0
        return is_news
