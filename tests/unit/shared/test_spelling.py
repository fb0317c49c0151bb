"""Suggestions name what was meant, or nothing."""

from __future__ import annotations

import pytest

from shared.spelling import nearest

KNOWN = ("disk-read-bytes-per-s", "hidden-bytes", "host-kv-bytes", "idle-timeout-ms", "model")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("modle", "; did you mean --model?"),
        ("disk-reed-bytes-per-s", "; did you mean --disk-read-bytes-per-s?"),
        ("hiden-bytes", "; did you mean --hidden-bytes?"),
        ("host-kv-byte", "; did you mean --host-kv-bytes?"),
        ("sparse-reorder-bytes-per-s", ""),
        ("zzz", ""),
    ],
)
def test_a_common_unit_makes_names_no_likelier(name: str, told: str) -> None:
    """Of two sizes that share nothing but their unit, neither is the other misspelt."""
    assert nearest(name, KNOWN, "--") == told


def test_units_are_known_in_each_spelling() -> None:
    """Keys, flags and variables."""
    assert nearest("sparse_reorder_bytes_per_s", ["disk_read_bytes_per_s"]) == ""
    assert nearest("SPARSE_REORDER_BYTES_PER_S", ["DISK_READ_BYTES_PER_S"]) == ""
