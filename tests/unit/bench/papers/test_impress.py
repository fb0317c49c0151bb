"""The model of IMPRESS: which tokens matter, what three tiers keep, and when a request's first token is there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from bench.papers.impress import OPT, asked_for, breakdown, lengths_of, machine_of, simulate
from bench.papers.impress_measured import chosen, hot_and_important, known_before, layer_read, shares
from bench.papers.impress_systems import SYSTEMS
from bench.papers.impress_tiers import Tiers
from bench.papers.impress_timeline import LayerReads, timeline
from bench.papers.impress_tokens import CLUSTERED, PrefixTokens, in_chunks


def test_what_is_worth_least_leaves_the_device_for_host_memory() -> None:
    """Two fit on the device and one below it; whoever is used more often than they are pushes one of them down."""
    tiers = Tiers("lfu", device_bytes=2, host_bytes=1)
    for key in "aabb":
        tiers.ask(key, 1, 1.0)

    assert [tiers.ask("c", 1, 1.0) for _ in range(4)] == ["disk", "host", "host", "device"]
    assert tiers.ask("b", 1, 1.0) == "device"
    assert tiers.ask("a", 1, 1.0) == "host"


def test_the_latest_is_on_the_device_under_lru() -> None:
    """Whoever was asked for last pushes the oldest down."""
    tiers = Tiers("lru", device_bytes=1, host_bytes=1)

    places = [tiers.ask(key, 1, 1.0) for key in "abacb"]

    assert places == ["disk", "disk", "host", "disk", "disk"]


def test_a_score_prefers_what_is_important() -> None:
    """Used as often, the dense chunk is on the device and the other is not."""
    tiers = Tiers("score", device_bytes=1, host_bytes=1)
    for _ in range(3):
        tiers.ask("dense", 1, 0.9)
        tiers.ask("thin", 1, 0.1)

    assert tiers.ask("dense", 1, 0.9) == "device"
    assert tiers.ask("thin", 1, 0.1) == "host"


def test_reads_that_are_known_before_overlap_and_those_that_are_chosen_do_not() -> None:
    """Three layers of 2 s reading and 1 s computing: ahead they take turns, on demand they add up."""
    ahead = timeline([LayerReads(2.0, 0.0)] * 3, compute_s=1.0, choose_s=0.0)
    chosen_only = timeline([LayerReads(0.0, 2.0)] * 3, compute_s=1.0, choose_s=0.0)

    assert ahead.ttft_s == pytest.approx(3 * 2 + 1)
    assert chosen_only.ttft_s == pytest.approx(3 * (2 + 1))
    assert (ahead.waited_s, chosen_only.waited_s) == pytest.approx((4.0, 6.0))


def test_keys_that_are_read_ahead_wait_for_what_is_wanted_now() -> None:
    """The first layer's values go before the second one's keys, which had not begun when they were wanted."""
    found = timeline([LayerReads(1.0, 1.0)] * 2, compute_s=5.0, choose_s=0.0)

    assert found.ttft_s == pytest.approx(1 + 1 + 5 + 1 + 5)


def test_right_guesses_hide_reads_and_wrong_ones_double_them() -> None:
    """A guess is read while the layer computes; of a wrong one nothing is of use."""
    reads = [LayerReads(0.0, 2.0)] * 3
    without = timeline(reads, compute_s=2.0, choose_s=0.0)
    right = timeline(reads, compute_s=2.0, choose_s=0.0, recall=1.0)
    wrong = timeline(reads, compute_s=0.0, choose_s=0.0, recall=0.0)

    assert without.ttft_s == pytest.approx(12.0)
    assert right.ttft_s == pytest.approx(2 + 2 + 2 + 2)
    assert wrong.ttft_s == pytest.approx(2 + 2 * 4)


def test_repacking_by_importance_leaves_fewer_chunks_to_read() -> None:
    """What matters to everybody stands together, and all that was chosen is still in some chunk."""
    rng = np.random.default_rng(1)
    tokens = PrefixTokens(4096, CLUSTERED, rng)
    picked = tokens.chosen(0.1, rng)

    plain, packed = in_chunks(picked, 4096, 64), in_chunks(picked, 4096, 64, tokens.order)

    assert np.count_nonzero(packed) < np.count_nonzero(plain)
    assert plain.sum() == pytest.approx(packed.sum()) == pytest.approx(len(picked) / 64)
    assert len(tokens.chosen(0.1, rng, heads=3)) > len(picked)


def test_datasets_have_their_bytes_and_requests_favour_the_middle() -> None:
    """Prefixes fill a dataset and are no longer than the paper's; the normal distribution is centred."""
    rng = np.random.default_rng(1)
    lengths = lengths_of("opt-30b", 57.0, rng)
    order = asked_for(len(lengths), 2000, rng)

    assert max(lengths) <= 4_000
    assert 57e9 <= sum(lengths) * machine_of("opt-30b").key_bytes * 2 * 48 < 57e9 * 1.2
    assert abs(np.mean(order) - (len(lengths) - 1) / 2) < 0.5
    assert {min(order), max(order)} <= set(range(len(lengths)))


def test_reading_less_takes_less_time() -> None:
    """IMPRESS reads less than everything, and a request answers sooner; equal seeds give equal figures."""
    systems = {name: SYSTEMS[name] for name in ("everything", "score")}
    found = simulate("opt-6.7b", 57.0, 0.1, systems, requests=12, seed=1)

    assert found["score"]["ttft_ms"] < found["everything"]["ttft_ms"]
    assert found["score"]["io_ms"] < found["everything"]["io_ms"]
    assert found == simulate("opt-6.7b", 57.0, 0.1, systems, requests=12, seed=1)


def test_wrong_guesses_cost_time_here() -> None:
    """Whatever is guessed wrong keeps the disk from what is wanted."""
    systems = {"without": SYSTEMS["score"], "wrong": replace(SYSTEMS["score"], recall=0.0)}
    found = simulate("opt-6.7b", 57.0, 0.25, systems, requests=8, seed=1)

    assert found["wrong"]["ttft_ms"] > found["without"]["ttft_ms"]


def test_a_longer_prefix_waits_for_more_of_its_time() -> None:
    """For every model, from the disk more than from host memory."""
    for model in OPT:
        rows = [row for row in breakdown() if row["model"] == model]
        waits = [row["disk_waiting"] for row in rows]
        assert waits == sorted(waits)
        assert all(row["disk_waiting"] >= row["host_waiting"] for row in rows)


def test_the_share_of_a_chunk_counts_what_the_chunk_has() -> None:
    """The last chunk of a prefix is shorter; an order moves tokens, and loses none."""
    picked = torch.tensor([0, 1, 17, 39])

    assert shares(picked, 40, 16).tolist() == [0.125, 0.0625, 0.125]
    assert shares(picked, 40, 16, torch.arange(39, -1, -1)).tolist() == [0.0625, 0.0625, 0.25]


def test_what_others_want_counts_each_of_them_alike() -> None:
    """Ten times the attention does not make a question ten times as important."""
    one = [torch.tensor([[1.0, 0.0]])]
    other = [torch.tensor([[0.0, 10.0]])]

    assert known_before([one, other], 0).tolist() == [[0.5, 0.5]]
    assert chosen(torch.tensor([[0.1, 0.9, 0.0, 0.0]]), 0.25).tolist() == [1]


def test_a_correlation_needs_chunks_that_differ() -> None:
    """Where all are read equally often nothing can be said."""
    assert hot_and_important(torch.ones(3, 4, dtype=torch.float64)) is None
    rising = torch.tensor([[0.1, 0.2, 0.3], [0.0, 0.2, 0.3], [0.0, 0.0, 0.3]], dtype=torch.float64)
    assert hot_and_important(rising) == pytest.approx(1.0)


def test_a_layer_that_falls_back_reads_all_keys() -> None:
    """Half of its KV and the chosen values; one that accepts reads probe keys, and the chosen keys and values."""
    assert layer_read(1.0, 6) == pytest.approx(0.5 + 0.125)
    assert layer_read(0.0, 6) == pytest.approx(0.25 + 0.25)
    assert layer_read(0.0, 3) > layer_read(1.0, 3)
