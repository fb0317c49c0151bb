"""Fields by which callers ask for prefixes to be kept, with the names of the APIs that they come from."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MAX_KEY_CHARACTERS = 256
MAX_RETURN_S = 86_400

CacheKey = Annotated[str, Meta(min_length=1, max_length=MAX_KEY_CHARACTERS)]
Retention = Literal["in_memory", "in-memory", "24h"]
ReturnsIn = Annotated[float, Meta(gt=0, le=MAX_RETURN_S)]


class CacheControl(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Anthropic's breakpoint: the prompt up to the end of the part that has it is kept for ``ttl``."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class CacheLeaseReport(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of the leases that a request asked for; the longest of each prompt counts.

    ``granted_tokens`` of the prompts are kept until ``expires_at`` (Unix seconds; each use defers it), or ``refused``
    says why not (``shared.messages.worker_plans.LeaseGrant``).
    """

    granted_tokens: int
    expires_at: int | None
    refused: str | None
