"""All policies by name, and how one is made for a pool."""

from __future__ import annotations

from services.scheduler.core.eviction.lru import LruPolicy
from services.scheduler.core.eviction.policy import Policy
from shared.messages.cell_events import CellConfig

AnyPolicy = LruPolicy
"""Every policy that a snapshot can hold, as a union of tagged structs."""

POLICIES: dict[str, type[Policy]] = {"lru": LruPolicy}


def make_policy(name: str, capacity: int, config: CellConfig) -> AnyPolicy:
    """A fresh policy for a pool of ``capacity`` tokens. Raises KeyError for a name that is not in POLICIES."""
    policy = POLICIES[name](capacity=capacity)
    assert isinstance(policy, LruPolicy)
    return policy
