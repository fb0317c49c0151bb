"""Parsing goes on whatever a garbage collection does meanwhile."""

from __future__ import annotations

import ast
import gc
import inspect
from collections.abc import Iterator

import pytest


class Parses:
    """Garbage that parses when it is collected, as the log of a lost exception does."""

    collected = 0

    def __init__(self) -> None:
        self.cycle = self

    def __del__(self) -> None:
        ast.parse("f(1 + 2, (3, 4))")
        Parses.collected += 1


@pytest.fixture
def many_collections() -> Iterator[None]:
    thresholds = gc.get_threshold()
    gc.set_threshold(50, 2, 2)
    yield
    gc.set_threshold(*thresholds)


@pytest.mark.usefixtures("many_collections")
def test_what_a_collection_parses_breaks_no_parse() -> None:
    """Its garbage is collected before the parse or after it."""
    source = inspect.getsource(ast)
    for _ in range(20):
        for _ in range(20):
            Parses()
        assert isinstance(ast.parse(source), ast.Module)

    gc.collect()
    assert Parses.collected == 400
