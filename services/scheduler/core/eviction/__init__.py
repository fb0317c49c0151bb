"""Eviction policies, one a file, behind one protocol, found by name."""

from services.scheduler.core.eviction.policy import EvictionPolicy
from services.scheduler.core.eviction.registry import POLICIES
from services.scheduler.core.eviction.victims import VictimQueues

__all__ = ["POLICIES", "EvictionPolicy", "VictimQueues"]
