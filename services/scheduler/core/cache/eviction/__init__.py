"""Eviction policies, one a file, behind one protocol, found by name."""

from services.scheduler.core.cache.eviction.policy import Evictable, Hotness, Moment, Policy
from services.scheduler.core.cache.eviction.registry import POLICIES, AnyPolicy, make_policy

__all__ = ["POLICIES", "AnyPolicy", "Evictable", "Hotness", "Moment", "Policy", "make_policy"]
