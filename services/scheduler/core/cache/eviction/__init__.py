"""The interface of eviction policies, and how a cell finds one by name. LRU is here, because quotas rank by it."""

from services.scheduler.core.cache.eviction.policy import (
    POLICIES,
    Evictable,
    Hotness,
    Moment,
    Policy,
    make_policy,
    register_policy,
    size_of,
)
from services.scheduler.core.cache.eviction.ranked import LruPolicy, Rank, RankedPolicy

__all__ = [
    "POLICIES",
    "Evictable",
    "Hotness",
    "LruPolicy",
    "Moment",
    "Policy",
    "Rank",
    "RankedPolicy",
    "make_policy",
    "register_policy",
    "size_of",
]
