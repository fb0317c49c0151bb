"""Eviction policies, one a file, behind one protocol, found by name. All register with this package."""

from services.scheduler.core.cache.eviction.arc import ArcPolicy
from services.scheduler.core.cache.eviction.fifo import FifoPolicy
from services.scheduler.core.cache.eviction.gdsf import GdsfPolicy
from services.scheduler.core.cache.eviction.hotprefix import HotPrefixPolicy
from services.scheduler.core.cache.eviction.lfu import LfuPolicy
from services.scheduler.core.cache.eviction.lru import LruPolicy
from services.scheduler.core.cache.eviction.policy import Evictable, Hotness, Moment, Policy, size_of
from services.scheduler.core.cache.eviction.ranked import Rank, RankedPolicy
from services.scheduler.core.cache.eviction.registry import POLICIES, make_policy, register_policy
from services.scheduler.core.cache.eviction.s3fifo import S3FifoPolicy
from services.scheduler.core.cache.eviction.sieve import SievePolicy
from services.scheduler.core.cache.eviction.slru import SlruPolicy
from services.scheduler.core.cache.eviction.thermocline import ThermoclinePolicy
from services.scheduler.core.cache.eviction.two_q import TwoQueuePolicy
from services.scheduler.core.cache.eviction.w_tinylfu import WTinyLfuPolicy

__all__ = [
    "POLICIES",
    "ArcPolicy",
    "Evictable",
    "FifoPolicy",
    "GdsfPolicy",
    "HotPrefixPolicy",
    "Hotness",
    "LfuPolicy",
    "LruPolicy",
    "Moment",
    "Policy",
    "Rank",
    "RankedPolicy",
    "S3FifoPolicy",
    "SievePolicy",
    "SlruPolicy",
    "ThermoclinePolicy",
    "TwoQueuePolicy",
    "WTinyLfuPolicy",
    "make_policy",
    "register_policy",
    "size_of",
]
