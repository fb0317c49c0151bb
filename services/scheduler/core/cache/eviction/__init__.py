"""What an eviction policy is, and how a cell finds it by name. LRU is here, because quotas rank by it."""

from services.scheduler.core.cache.eviction.policy import Evictable, Hotness, Moment, Policy, size_of
from services.scheduler.core.cache.eviction.ranked import LruPolicy, Rank, RankedPolicy
from services.scheduler.core.cache.eviction.registry import POLICIES, make_policy, register_policy

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
