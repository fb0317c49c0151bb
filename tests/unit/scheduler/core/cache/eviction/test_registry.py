"""The registry of eviction policies."""

from __future__ import annotations

import pytest

from services.scheduler.core.cache.eviction import POLICIES, LruPolicy, make_policy, register_policy
from shared.messages.cell_events import CellConfig


def test_a_name_has_one_policy() -> None:
    """Another of the same name is refused, and the first stays; registering that one again changes nothing."""

    class Other(LruPolicy):
        """Of a name that is taken."""

    with pytest.raises(ValueError, match=r"LruPolicy and .*Other are 'lru'"):
        register_policy(Other)

    assert POLICIES["lru"] is register_policy(LruPolicy) is LruPolicy


def test_unknown_policy_is_a_key_error() -> None:
    """The registry makes up nothing."""
    with pytest.raises(KeyError):
        make_policy("nonsense", 1, CellConfig())
