"""Numbers and tables look alike on all pages."""

from __future__ import annotations

from math import inf

from tools.pages.formats import cell, head, row, signed, spread, times, to


def test_numbers_are_as_long_as_they_are_sure() -> None:
    """Small floats keep two decimals, large ones none, and counts have separators."""
    assert [cell(value) for value in (1.234, 56.78, 4321.9, 12_345, "x")] == ["1.23", "56.8", "4,322", "12,345", "x"]
    assert [times(value) for value in (1.234, 12.34, inf)] == ["1.23×", "12×", "∞"]


def test_differences_have_a_sign() -> None:
    """Nothing is a gain of nothing."""
    assert [signed(value) for value in (0.0123, -0.5, -0.0001)] == ["+1.2%", "-50.0%", "+0.0%"]


def test_a_table_is_its_titles_a_line_and_rows() -> None:
    """As many cells in each."""
    assert head(["a", "b"]) == "| a | b |\n|---|---|"
    assert row([1, 2.0]) == "| 1 | 2.00 |"


def test_equal_ratios_are_written_once() -> None:
    """A range needs two ends that look different."""
    assert spread([1.201, 1.204]) == "1.20×"
    assert spread([3.4, 1.2]) == "1.20 to 3.40×"
    assert to([2, 1], 0, " s") == "1 to 2 s"
