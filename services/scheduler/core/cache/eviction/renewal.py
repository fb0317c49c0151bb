"""A change of policy: the pools' new policies, while they are told of what is resident.

Telling policies of a million nodes takes many seconds, so they are told a slice at a time (see :mod:`eviction_orders`).
The policies before stay in force until then: what leaves a pool meanwhile is what they name, and a pool is never
without a victim because its policy does not know its nodes yet. What happens to a node that the new policies know they
hear as well; of one that they do not know they hear nothing before its turn comes, when they are told of it as it is.
"""

from __future__ import annotations

import msgspec

from services.scheduler.core.cache.eviction.policy import Policy


class Renewal(msgspec.Struct):
    """``left`` are ids of nodes that are to be told of with all below them, the next one at the end."""

    left: list[int] = []
    told: dict[int, None] = {}  # Nodes that the new policies know, by id; some of them may be gone.
    orders: dict[str, Policy] = {}  # The new policies, as in the state; apart in snapshots.
