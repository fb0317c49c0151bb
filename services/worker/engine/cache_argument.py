"""The argument by which models of Transformers, and modules in them, are given their cache.

It is ``cache`` since release 5.24, where the names before it are deprecated.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

_EARLIER_NAMES = ("cache_params", "past_key_values")


def cache_argument(forward: Callable[..., Any]) -> str:
    """Return the name of the argument of ``forward`` that is its cache, or ""."""
    parameters = inspect.signature(forward).parameters
    # Some models have a cache of their own by that name, a dictionary.
    if "cache" in parameters and "Cache" in str(parameters["cache"].annotation):
        return "cache"
    return next((name for name in _EARLIER_NAMES if name in parameters), "")


def given_cache(forward: Callable[..., Any], cache: Any) -> dict[str, Any]:
    """Return the keyword that hands ``cache`` to ``forward``; none where it takes no cache."""
    name = cache_argument(forward)
    return {name: cache} if name else {}
