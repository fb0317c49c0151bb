"""A request at a virtual worker. Decoding is counted, not carried out token by token.

While a request decodes, its number of output tokens follows from the worker's count of decode steps; so a worker
can run thousands of steps without touching its requests.
"""

from __future__ import annotations

from shared.messages.worker_plans import AdmitRequest

LEASE_LOW_TOKENS = 32
"""Decode room below which a worker asks for pages, as the real worker's default."""

NEVER = 1 << 62


class RunningRequest:
    """One attempt. ``generated`` counts the output tokens of all attempts; it is current while not decoding."""

    __slots__ = (
        "admit",
        "asked_lease",
        "capacity",
        "computed",
        "generated",
        "has_sampled",
        "joined_step",
        "lease_tokens",
        "max_tokens",
        "prompt_tokens",
        "stop_step",
        "tokens",
    )

    def __init__(self, admit: AdmitRequest, page_size: int) -> None:
        """Begin an attempt as ordered by ``admit``; each of its pages has ``page_size`` tokens."""
        self.admit = admit
        self.tokens = len(admit.tokens) // 4  # Prompt, and output of earlier attempts.
        self.prompt_tokens = admit.prompt_tokens
        self.generated = self.tokens - admit.prompt_tokens
        self.max_tokens = admit.sampling.max_tokens
        self.computed = admit.cached_tokens
        self.capacity = len(admit.pages) // 4 * page_size
        self.lease_tokens = max(0, self.capacity - self.tokens)
        self.asked_lease = False
        self.has_sampled = False
        self.joined_step = -1  # The worker's count of steps when it began to decode; -1 while it does not.
        self.stop_step = NEVER

    @property
    def is_over(self) -> bool:
        """Whether the answer has ``max_tokens``; current while it does not decode."""
        return self.generated >= self.max_tokens

    @property
    def length(self) -> int:
        """Tokens of prompt and answer; current while it does not decode."""
        return self.prompt_tokens + self.generated

    @property
    def has_room(self) -> bool:
        """Whether its page table has a slot for the next token to compute."""
        return self.length <= self.capacity

    def grant(self, pages: int, page_size: int) -> None:
        """Add the pages of a granted lease."""
        self.capacity += pages * page_size
        self.lease_tokens = pages * page_size
        self.asked_lease = False

    def wants_lease(self, page_size: int) -> bool:
        """Return whether to ask for pages now; see the real worker's ``RunningRequest.needs_lease``."""
        if self.asked_lease or not self.has_sampled:
            return False
        return self.generated >= self._lease_at(page_size)

    def next_stop(self, page_size: int) -> int:
        """Return the number of tokens until it has to send a message or has no room left."""
        stop = min(self.max_tokens, self.capacity - self.prompt_tokens + 1)
        if not self.asked_lease:
            stop = min(stop, self._lease_at(page_size))
        return stop - self.generated

    def may_join_lease(self, generated: int) -> bool:
        """Return whether a decoding request with ``generated`` tokens may join another's request for pages."""
        if self.asked_lease or self.capacity + 1 >= self.prompt_tokens + self.max_tokens:
            return False
        return self.capacity - self.prompt_tokens + 1 - generated <= min(self.lease_tokens // 2, 2 * LEASE_LOW_TOKENS)

    def _lease_at(self, page_size: int) -> int:
        """Return the ``generated`` at which it asks for pages, or NEVER where its room suffices for ``max_tokens``."""
        if self.capacity + 1 >= self.prompt_tokens + self.max_tokens:
            return NEVER
        low = max(min(self.lease_tokens // 2, LEASE_LOW_TOKENS), min(LEASE_LOW_TOKENS, self.lease_tokens - page_size))
        return self.capacity - self.prompt_tokens + 1 - low
