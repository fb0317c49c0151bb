"""Subject patterns."""

from __future__ import annotations

import pytest

from shared.bus.subject_match import matches


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("tc.in.cell", "tc.in.cell", True),
        ("tc.in.cell", "tc.in", False),
        ("tc.in", "tc.in.cell", False),
        ("tc.*.cell", "tc.in.cell", True),
        ("tc.*", "tc.in.cell", False),
        ("tc.>", "tc.in.cell", True),
        ("tc.>", "tc", False),
        (">", "tc", True),
        ("*", "tc", True),
        ("*", "tc.in", False),
    ],
)
def test_pattern_matches_as_nats_defines_it(pattern: str, subject: str, expected: bool) -> None:
    """``*`` stands for exactly one token and ``>`` for one or more at the end."""
    assert matches(pattern, subject) is expected
