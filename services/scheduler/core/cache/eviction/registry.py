"""Eviction policies by name: what a cell can be told to use, and a snapshot can hold.

A policy is registered where it is defined, in the core or in a package that whoever folds imports beforehand. The core
knows no such package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from services.scheduler.core.cache.eviction.policy import Policy

if TYPE_CHECKING:
    from shared.messages.cell_events import CellConfig

P = TypeVar("P", bound=type[Policy])

POLICIES: dict[str, type[Policy]] = {}
"""In order of registration, on which no decision may depend."""


def register_policy(policy: P) -> P:
    """Add a policy under the name that its class has; a decorator. Raises ValueError when another has that name."""
    if POLICIES.setdefault(policy.name, policy) is not policy:
        raise ValueError(f"policies {POLICIES[policy.name].__qualname__} and {policy.__qualname__} are {policy.name!r}")
    return policy


def make_policy(name: str, capacity: int, config: CellConfig) -> Policy:
    """A fresh policy for a pool of ``capacity`` tokens. Raises KeyError for a name that is not in POLICIES."""
    return POLICIES[name].make(capacity, config)
