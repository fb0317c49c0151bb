"""Defaults on imagined machines: the committed table is what the code chooses, and it makes sense to a user."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.defaults_on_gpus import table
from bench.results_file import RESULTS


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return table()


def test_the_committed_table_is_what_the_code_chooses(rows: list[dict[str, Any]]) -> None:
    """Renew it with ``python -m bench.defaults_on_gpus`` where a default changes on purpose."""
    committed = json.loads((RESULTS / "defaults_on_gpus.json").read_text())["results"]

    assert committed["rows"] == rows


def test_what_fits_has_room_for_a_long_conversation(rows: list[dict[str, Any]]) -> None:
    """16,384 tokens at least, in one request and in the pool."""
    served = [row for row in rows if not row["refused"]]

    assert [row for row in served if row["context_tokens"] < 16_384 or row["device_tokens"] < 16_384] == []


def test_an_8b_model_on_a_card_of_24_gb_has_tens_of_thousands_of_tokens(rows: list[dict[str, Any]]) -> None:
    """In bfloat16, where weights take 15 GiB of it."""
    found = [row for row in rows if row["machine"] == "one 24 GB" and row["model"] == "Llama-3.1-8B"]

    assert [30_000 < row["device_tokens"] < 50_000 for row in found] == [True, True]


def test_refusals_name_what_would_serve(rows: list[dict[str, Any]]) -> None:
    """A number of ranks; where the machine has as many GPUs, the same model is served with them."""
    refused = [row for row in rows if row["refused"]]

    assert refused
    for row in refused:
        assert "--tensor-parallel" in row["refused"]
        flags = [each.replace("tensor_parallel", "--tensor-parallel") for each in row["advised"]]
        with_it = [each for each in rows if flags and each["flags"] == flags and each["model"] == row["model"]]
        assert all(each["refused"] == "" for each in with_it)
        assert bool(with_it) == bool(flags)


def test_little_shared_memory_is_said(rows: list[dict[str, Any]]) -> None:
    """Where a container leaves 64 MiB the cell is served without a host tier to speak of, and says so."""
    small = [row for row in rows if not row["refused"] and row["shm_bytes"] < 2**30]

    assert small
    assert all(any("--shm-size" in line for line in row["lines"]) for row in small)


def test_the_how_to_shows_what_up_says(rows: list[dict[str, Any]]) -> None:
    """For an 8B model on a card of 24 GB, with shared memory and without."""
    page = (RESULTS.parents[1] / "docs" / "how-to" / "gpu.md").read_text(encoding="utf-8")
    with_it, without = (row for row in rows if row["machine"] == "one 24 GB" and row["model"] == "Llama-3.1-8B")

    assert "\n".join(["```", *with_it["lines"], "```"]) in page
    assert next(line for line in without["lines"] if "host pools" in line).partition(";")[0] in page
