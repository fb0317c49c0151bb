"""The cache is handed to a model by the name that its release of Transformers has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import Cache

from services.worker.engine.cache_argument import cache_argument, given_cache


def _since_5_24(hidden_states: Any, cache: Cache | None = None, **kwargs: Any) -> None:
    """The names before arrive in the keywords, with a warning."""


def _of_states(hidden_states: Any, cache_params: Any = None) -> None:
    pass


def _before(hidden_states: Any, past_key_values: Any = None) -> None:
    pass


def _of_its_own(hidden_states: Any, cache: dict[str, Any] | None = None) -> None:
    """As XLM."""


def _without(hidden_states: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("forward", "name"),
    [
        (_since_5_24, "cache"),
        (_of_states, "cache_params"),
        (_before, "past_key_values"),
        (_of_its_own, ""),
        (_without, ""),
    ],
)
def test_the_name_follows_from_the_signature(forward: Callable[..., None], name: str) -> None:
    kept = object()

    assert cache_argument(forward) == name
    assert given_cache(forward, kept) == ({name: kept} if name else {})
