"""Each tenant's present use of this gateway, and its limits. Runs on the event loop; nothing here waits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from services.gateway import metrics, tenant_metrics
from services.gateway.rate_limits import Bucket, duration, full, resized
from services.gateway.tenants import OTHER, Tenant
from shared.errors import RateLimited

RETRY_AFTER_MS = 1_000
"""Retry-After of the concurrency limit, where the wait depends on the tenant's own requests in progress."""

OPEN = Tenant(salt="")
"""The tenant of callers with one of ``--api-keys``, or with no key: without limits, and without a salt of its own."""


@dataclass(slots=True)
class Account:
    """One tenant's rates and choices in progress at this gateway. Counts outlive a change of the limits.

    ``name`` is the tenant's name in the cell. ``is_listed``: it is in the file of tenants, and metrics name it.
    """

    name: str
    tenant: Tenant
    clock: Callable[[], float]
    is_listed: bool = False
    requests: Bucket | None = None
    tokens: Bucket | None = None
    in_progress: int = 0

    def __post_init__(self) -> None:
        """Fill the buckets of the tenant's rates as of now; a rate without a limit has none."""
        now_s = self.clock()
        self.requests = full(self.tenant.requests_per_minute, now_s)
        self.tokens = full(self.tenant.tokens_per_minute, now_s)

    @property
    def label(self) -> str:
        """The tenant's label in metrics: its name, or ``other`` where metrics do not name it."""
        return self.name if self.is_listed else OTHER

    def change(self, tenant: Tenant) -> None:
        """Replace the tenant's limits; requests in progress continue."""
        now_s = self.clock()
        self.requests = resized(self.requests, tenant.requests_per_minute, now_s)
        self.tokens = resized(self.tokens, tenant.tokens_per_minute, now_s)
        self.tenant = tenant

    def begin_request(self) -> None:
        """Count one HTTP request. Raises RateLimited."""
        if self.requests is not None:
            self._take(self.requests, 1, "requests")

    def spend_prompt(self, tokens: int) -> None:
        """Spend the tokens of a prompt that is about to be submitted. Raises RateLimited."""
        if self.tokens is not None:
            self._take(self.tokens, tokens, "tokens")

    def spend_tokens(self, tokens: int) -> None:
        """Spend tokens whose number is known only afterwards: those of an answer, or of a tokenised text.

        Negative ones are given back. Never refuses.
        """
        if self.tokens is not None:
            self.tokens.spend(tokens, self.clock())

    def take(self, choices: int) -> None:
        """Count so many more choices as in progress. Raises RateLimited above the tenant's ``max_concurrent``."""
        limit = self.tenant.max_concurrent
        if limit and self.in_progress + choices > limit:
            self._turned_away("concurrency")
            raise RateLimited(
                f"This key's tenant may have {limit} choices in progress; {self.in_progress} are, "
                f"and {choices} more were asked for.",
                retry_after_ms=RETRY_AFTER_MS,
            )
        self.in_progress += choices

    def give_back(self, choices: int) -> None:
        """Count so many choices as ended; each may be given back only once."""
        self.in_progress -= choices
        assert self.in_progress >= 0, "a choice was given back twice"

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Count one more request as in progress within the block. Raises RateLimited."""
        self.take(1)
        try:
            yield
        finally:
            self.give_back(1)

    def headers(self) -> dict[str, str]:
        """Return OpenAI's ``x-ratelimit-*`` headers of the rates that are limited."""
        now_s = self.clock()
        said = {}
        for what, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                said[f"x-ratelimit-limit-{what}"] = str(bucket.per_minute)
                said[f"x-ratelimit-remaining-{what}"] = str(bucket.remaining(now_s))
                said[f"x-ratelimit-reset-{what}"] = duration(bucket.reset_s(now_s))
        return said

    def _take(self, bucket: Bucket, units: int, what: str) -> None:
        now_s = self.clock()
        wait_s = bucket.wait_s(units, now_s)
        if wait_s > 0:
            self._turned_away(what)
            raise RateLimited(
                f"Rate limit reached on {what} per minute: limit {bucket.per_minute}, "
                f"remaining {bucket.remaining(now_s)}, requested {units}. Try again in {duration(wait_s)}.",
                retry_after_ms=max(1, round(wait_s * 1000)),
            )
        bucket.spend(units, now_s)

    def _turned_away(self, limit: str) -> None:
        metrics.RATE_LIMITED.labels(limit).inc()
        tenant_metrics.turned_away(self.label, limit)
