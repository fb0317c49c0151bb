"""Eviction policies, one a file, behind one protocol, found by name. Those that the core needs register here."""

from services.scheduler.core.cache.eviction.hotprefix import HotPrefixPolicy
from services.scheduler.core.cache.eviction.lru import LruPolicy
from services.scheduler.core.cache.eviction.policy import Evictable, Hotness, Moment, Policy, size_of
from services.scheduler.core.cache.eviction.ranked import Rank, RankedPolicy
from services.scheduler.core.cache.eviction.registry import POLICIES, make_policy, register_policy
from services.scheduler.core.cache.eviction.thermocline import ThermoclinePolicy

__all__ = [
    "POLICIES",
    "Evictable",
    "HotPrefixPolicy",
    "Hotness",
    "LruPolicy",
    "Moment",
    "Policy",
    "Rank",
    "RankedPolicy",
    "ThermoclinePolicy",
    "make_policy",
    "register_policy",
    "size_of",
]
