"""Figures are found by what tells them from others."""

from __future__ import annotations

import pytest

from tools.pages.rows import aligned, by, column, nested, places, where

ROWS = [
    {"disk": 50, "way": "kv", "ms": 3.0},
    {"disk": 20, "way": "kv", "ms": 6.0},
    {"disk": 20, "way": "hidden", "ms": 4.0, "form": "2/6/0"},
]


def test_rows_are_chosen_by_all_that_they_hold() -> None:
    """In their order; a column has only the rows that have the figure."""
    assert column(where(ROWS, disk=20, way="kv"), "ms") == [6.0]
    assert column(ROWS, "form") == ["2/6/0"]
    assert by(where(ROWS, disk=20), "way")["hidden"] == ROWS[2]


def test_rows_of_one_place_stand_together() -> None:
    """Places in their order, whatever that of the rows."""
    assert places(ROWS, "disk", "way") == [{"kv": ROWS[1], "hidden": ROWS[2]}, {"kv": ROWS[0]}]
    assert places(ROWS, ("disk", "ms"), "way")[0] == {"hidden": ROWS[2]}


def test_curves_are_compared_point_by_point() -> None:
    """All have as many."""
    assert aligned({"a": [{"x": 1}], "b": [{"x": 2}]}) == [{"a": {"x": 1}, "b": {"x": 2}}]
    with pytest.raises(ValueError, match="shorter"):
        aligned({"a": [{"x": 1}], "b": []})


def test_what_led_to_a_row_is_in_it() -> None:
    """One name for each mapping around it."""
    assert nested({"opt": {"rte": {"ms": 1}}}, "model", "dataset") == [{"model": "opt", "dataset": "rte", "ms": 1}]
