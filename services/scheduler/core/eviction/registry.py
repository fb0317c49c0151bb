"""All policies by name."""

from __future__ import annotations

from services.scheduler.core.eviction.lru import LruPolicy
from services.scheduler.core.eviction.policy import EvictionPolicy

POLICIES: dict[str, EvictionPolicy] = {policy.name: policy for policy in (LruPolicy(),)}
