"""All policies by name, and how one is made for a pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.eviction.arc import ArcPolicy
from services.scheduler.core.cache.eviction.fifo import FifoPolicy
from services.scheduler.core.cache.eviction.gdsf import GdsfPolicy
from services.scheduler.core.cache.eviction.hotprefix import HotPrefixPolicy
from services.scheduler.core.cache.eviction.lfu import LfuPolicy
from services.scheduler.core.cache.eviction.lru import LruPolicy
from services.scheduler.core.cache.eviction.s3fifo import S3FifoPolicy
from services.scheduler.core.cache.eviction.sieve import SievePolicy
from services.scheduler.core.cache.eviction.slru import SlruPolicy
from services.scheduler.core.cache.eviction.thermocline import ThermoclinePolicy
from services.scheduler.core.cache.eviction.two_q import TwoQueuePolicy
from services.scheduler.core.cache.eviction.w_tinylfu import WTinyLfuPolicy

if TYPE_CHECKING:
    from shared.messages.cell_events import CellConfig

AnyPolicy = (
    FifoPolicy
    | LruPolicy
    | LfuPolicy
    | TwoQueuePolicy
    | SlruPolicy
    | S3FifoPolicy
    | SievePolicy
    | ArcPolicy
    | GdsfPolicy
    | WTinyLfuPolicy
    | HotPrefixPolicy
    | ThermoclinePolicy
)
"""Every policy that a snapshot can hold, as a union of tagged structs."""

POLICIES: dict[str, type[AnyPolicy]] = {
    "fifo": FifoPolicy,
    "lru": LruPolicy,
    "lfu": LfuPolicy,
    "2q": TwoQueuePolicy,
    "slru": SlruPolicy,
    "s3-fifo": S3FifoPolicy,
    "sieve": SievePolicy,
    "arc": ArcPolicy,
    "gdsf": GdsfPolicy,
    "w-tinylfu": WTinyLfuPolicy,
    "hotprefix": HotPrefixPolicy,
    "thermocline": ThermoclinePolicy,
}


def make_policy(name: str, capacity: int, config: CellConfig) -> AnyPolicy:
    """A fresh policy for a pool of ``capacity`` tokens. Raises KeyError for a name that is not in POLICIES."""
    return POLICIES[name].make(capacity, config)
