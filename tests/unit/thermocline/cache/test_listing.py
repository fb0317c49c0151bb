"""What ``thermocline cache`` prints: trees, tables, sizes."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from services.gateway.cache_calls import Flushed
from services.gateway.openai_schema.cache import CacheNode, Pin
from services.gateway.openai_schema.explanation import CostlyDivergence, CostlyDivergences
from services.gateway.views.cache_view import node_view, stats_view
from shared.messages.status import CellStatus, Inventory, PoolStatus
from tests.unit.gateway.scripted_cache import node
from thermocline.cache.divergences import divergence_lines
from thermocline.cache.flush import flush_lines
from thermocline.cache.hit_ratios import rates_of, ratio_lines, ratios_of
from thermocline.cache.ls import pin_lines
from thermocline.cache.pin import pin_text
from thermocline.cache.stat import stat_lines
from thermocline.cache.tables import WIDTH, shortened, table
from thermocline.cache.tree import DEEPEST, tree_lines

STATUS = CellStatus(
    scheduler_id="s", epoch=1, seq=9, model="m", page_size=16, queued=0, running=0, max_queued=1, max_context=1,
    pools=(
        PoolStatus(owner="worker-0", tier="device", total=1000, free=900, cached=100, leased=0),
        PoolStatus(owner="storage-0", tier="host", total=4000, free=3999, cached=1, leased=0),
    ),
    counters={"hit_tokens_device": 12345, "hit_tokens_disk": 64, "saves_done": 3, "quarantined_pages": 2, "batches": 1},
    nodes=7, pins=1, pinned_pages=2, chunks=5,
)  # fmt: skip


def view(number: int, parent: int = 0, **changes: Any) -> CacheNode:
    return node_view(node(number, parent, **changes))


def test_nodes_stand_below_their_parents() -> None:
    """Whatever the order in which they were made: a split makes parents after their children."""
    lines = tree_lines([view(1, parent=4), view(2, parent=1), view(3, parent=4), view(4)])

    assert [line.split()[0] for line in lines[2:]] == ["4", "1", "2", "3"]
    assert [len(line) - len(line.lstrip()) for line in lines[2:]] == [0, 2, 4, 2]


def test_a_node_whose_parent_was_not_listed_is_still_shown() -> None:
    """At the left edge; namespaces have headings of their own."""
    lines = tree_lines([view(7, parent=3), view(8, namespace="cd" * 16)])

    assert lines[0] == f"namespace {'ab' * 16}: 1 nodes, 16 tokens"
    assert lines[3] == f"namespace {'cd' * 16}: 1 nodes, 16 tokens"
    assert [line.split()[0] for line in (lines[2], lines[5])] == ["7", "8"]


def test_a_row_tells_tiers_pins_and_first_tokens() -> None:
    """Pages are added up over the pools of a tier; a tier without any is a dash."""
    shown = view(1, device={"w0": 2, "w1": 3}, host={}, disk={"s0": 1}, hidden={"s0": 4}, pins=("docs", "faq"))
    row = tree_lines([shown])[2]

    assert row.split()[:8] == ["1", "0", "16", "2", "5", "-", "1", "4"]
    assert row.endswith("[pins: docs, faq] 1 2 3")
    assert tree_lines([node_view(node(1), "a\nb\x1b[31m")])[2].endswith("a\\nb\\x1b[31m")


def test_deep_and_wide_trees_stay_within_the_terminal() -> None:
    """A chain deeper than Python's stack is listed, and no line is longer than 100 columns."""
    chain = [node_view(node(number, number - 1, pins=("p" * 64,)), "x" * 500) for number in range(1, 5001)]
    lines = tree_lines(chain)

    assert len(lines) == 5002
    assert max(map(len, lines)) <= WIDTH
    assert f"{'  ' * DEEPEST}…" in lines[-1]


def test_statistics_fit_the_terminal_and_name_every_tier() -> None:
    """Pools, disks against their quota, object stores, hits by tier, what a storage that is silent is."""
    counters = {
        "disk_chunks": 5, "disk_bytes": 3 * 2**20, "disk_quota_bytes": 10 * 2**30, "chunks_saved": 6,
        "chunks_fetched_disk": 4, "chunks_quarantined": 1, "chunks_uploaded": 9, "chunks_fetched_remote": 8,
    }  # fmt: skip
    found = Inventory(id="storage-0", incarnation="i", last_plan=1, counters=counters)
    lines = stat_lines(stats_view(STATUS, {"storage-0": found, "storage-1": None}))
    text = "\n".join(lines)

    assert max(map(len, lines)) <= WIDTH
    disk, remote = (next(line.split() for line in lines if f" {tier} " in line) for tier in ("disk", "remote"))
    assert disk == ["storage-0", "disk", "5", "3.0", "MiB", "10.0", "GiB", "6", "4", "0", "1"]
    assert remote == ["storage-0", "remote", "-", "-", "-", "9", "8", "-", "-"]
    assert "storage storage-1 does not answer" in text
    assert "12,345" in text
    assert "saves_done" in text
    assert "batches" not in text


def test_hit_ratios_are_told_by_tier_with_rates() -> None:
    """Of all prompt tokens and of those of the interval. Restored tokens are hits; no token, no ratio."""
    before = {"hit_tokens_device": 100, "prefill_tokens_planned": 300}
    after = {
        "hit_tokens_device": 400,
        "hit_tokens_disk": 100,
        "restored_tokens_planned": 100,
        "prefill_tokens_planned": 400,
    }
    rates = rates_of(before, after, 2.0)

    assert ratios_of(after).hit_ratio == 0.6
    assert (rates.recent.tokens["device"], rates.recent.tokens["computed"]) == (300, 100)
    assert rates.recent.hit_ratio == pytest.approx(500 / 600)
    assert rates.per_second == {
        "hit_tokens_device": 150.0, "hit_tokens_disk": 50.0, "restored_tokens_planned": 50.0,
        "prefill_tokens_planned": 50.0,
    }  # fmt: skip
    lines = ratio_lines(ratios_of(after), rates)
    assert lines[1].split() == ["device", "400", "40.0%", "150/s", "50.0%"]
    assert lines[-1].split() == ["hit", "ratio", "60.0%", "83.3%"]
    assert ratio_lines(ratios_of({}), None)[-1].split() == ["hit", "ratio", "-"]
    assert max(map(len, lines)) <= 80


def test_counters_of_a_cell_that_began_anew_are_not_negative() -> None:
    """They count from 0."""
    assert rates_of({"saves_done": 50}, {"saves_done": 4}, 1.0).per_second == {"saves_done": 4.0}


def test_what_is_still_to_go_to_the_object_store_is_told() -> None:
    """While there is any; so an operator sees how far a storage is that was given a store."""
    counters = {"chunks_uploaded": 9, "reconcile_outstanding": 12_345, "uploads_outstanding": 67}
    moving, still = (
        stat_lines(stats_view(STATUS, {"storage-0": Inventory(id="s", incarnation="i", last_plan=1, counters=each)}))
        for each in (counters, counters | {"reconcile_outstanding": 0, "uploads_outstanding": 0})
    )

    line = "storage storage-0: 12,345 chunks to compare with the object store, 67 to upload"
    assert line in moving
    assert max(map(len, moving)) <= WIDTH
    assert "to compare" not in "\n".join(still)


def test_a_cell_without_lower_tiers_says_so() -> None:
    """Rather than an empty table."""
    found = Inventory(id="storage-0", incarnation="i", last_plan=1, counters={"backups_done": 1})

    assert "no storage has a disk or an object store" in stat_lines(stats_view(STATUS, {"storage-0": found}))


def test_sparse_chunks_and_leases_are_told_where_there_are_any() -> None:
    """Chunks of KV that are kept a second time; how many leases there are, and how much they keep."""
    status = structs.replace(STATUS, sparse_chunks=4, cache_leases=3, leased_pages=2, page_size=16)
    told = {"4 of these chunks of KV can be read in part", "3 leases keep 32 tokens that callers asked for"}

    assert told <= set(stat_lines(stats_view(status, {})))
    assert not any("in part" in line or "leases keep" in line for line in stat_lines(stats_view(STATUS, {})))


def test_pins_are_listed_with_what_they_hold() -> None:
    """Their time in seconds, and why a refused one holds nothing."""
    good = Pin(name="docs", namespace="ab" * 16, tokens=4096, held_tokens=4000, pages=250, expires_at=160.0)
    bad = Pin(name="x", namespace="ab" * 16, tokens=0, held_tokens=0, pages=0, expires_at=0.0, refusal="too short")
    lines = pin_lines([good, bad], now_s=100.0)

    assert lines[1].split() == ["docs", "ab" * 6, "4,096", "4,000", "250", "60", "s"]
    assert lines[2].endswith("refused")
    assert lines[3] == "x was refused: too short"
    assert pin_lines([], 0.0) == ["there are no pins"]
    assert pin_text(good).startswith("pin docs: holds 4,000 of 4,096 tokens in 250 host pages\nThe rest")


def test_divergence_points_are_listed_with_both_sides() -> None:
    """One line for each side, of the terminal's width, and figures alone where there is no tokenizer."""
    told = CostlyDivergence(
        namespace="ab" * 16, token=18, before="It is 12:0", prompt="5 now.\nBe brief." + "x" * 200, cached="4 now.",
        cause="date_or_time", requests=41, lost_tokens=33_292, error_tokens=0, lost_ms=3817.2, request_id="r",
        last_ms=1,
    )  # fmt: skip
    bare = structs.replace(told, before=None, prompt=None, cached=None, cause=None, lost_ms=None, error_tokens=2)
    lines = divergence_lines(CostlyDivergences(data=[told, bare], since_ms=1))

    assert lines[1].split() == ["date", "or", "time", "33,292", "3,817", "ms", "41", "18", "ab" * 6]
    assert lines[2].startswith("  prompt  …It is 12:0│5 now.\\nBe brief.xxx")
    assert lines[3] == "  cached  …It is 12:0│4 now.…"
    assert lines[4].split() == ["-", "33,292", "at", "most", "-", "41", "18", "ab" * 6]
    assert max(map(len, lines)) <= WIDTH
    assert divergence_lines(CostlyDivergences(data=[], since_ms=None))[0].startswith("no prompt has lost cached tokens")


def test_a_flush_tells_of_its_tiers_only() -> None:
    """What went and what stays."""
    flushed = Flushed(device_pages=7, host_pages=0, disk_chunks=2, status=STATUS)

    assert flush_lines(flushed, ("device", "disk")) == [
        "device: dropped 7 pages, 100 cached pages stay", "disk: dropped 2 chunks, 5 stay",
    ]  # fmt: skip
    assert flush_lines(flushed, ("remote",))[0].startswith("remote: ")


def test_cells_are_short() -> None:
    """Aligned columns, one line each."""
    assert (shortened("abcdef", 4), shortened("abc", 4), shortened("abc", 0)) == ("abc…", "abc", "…")
    assert table(("a", "n"), [("xyz", "1"), ("b", "222")]) == ["a      n", "xyz    1", "b    222"]
