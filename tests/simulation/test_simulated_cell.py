"""The real core in simulated cells of many kinds: the protocol holds, everything is answered, nothing leaks."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from services.scheduler.core import Stamped, encode_state
from shared.messages.base import unpack_int32
from shared.messages.worker_plans import AdmitRequest, WorkerPlan
from tests.simulation.watched_cell import Watch, simulation

_SMALL = ("--profile", "h200-pcie5/llama-3.1-8b", "--page-size", "16")

CELLS = {
    "one worker": (
        "--workload",
        "documents",
        "--requests",
        "120",
        "--device-tokens",
        "100000",
        "--host-tokens",
        "300000",
    ),
    "four workers, two nodes": (
        *("--workload", "chat", "--requests", "160", "--rate", "20", "--workers", "4", "--workers-per-node", "2"),
        *("--device-tokens", "8000", "--host-tokens", "16000", "--set", "think_s=2"),
    ),
    "no host tier": ("--workload", "few-shot", "--requests", "200", "--device-tokens", "8000", "--host-tokens", "0"),
    "tight memory and small leases": (
        *("--workload", "chat", "--requests", "150", "--concurrency", "24", "--device-tokens", "5000"),
        *("--host-tokens", "9000", "--set", "think_s=0", "--set", "lease_tokens=16", "--set", "max_tokens=3000"),
    ),
    "pages of one token, copied one by one": (
        *("--workload", "few-shot", "--requests", "150", "--device-tokens", "6000", "--host-tokens", "20000"),
        *("--io", "per-page", "--page-size", "1"),
    ),
    "most of it on disk": (
        *("--workload", "chat", "--requests", "200", "--concurrency", "12", "--device-tokens", "8000"),
        *("--host-tokens", "12000", "--disk-tokens", "400000", "--set", "think_s=20", "--set", "turns=8"),
    ),
    "a disk that forgets, and nobody waits for it": (
        *("--workload", "documents", "--requests", "120", "--device-tokens", "100000", "--host-tokens", "150000"),
        *("--disk-tokens", "300000", "--set", "prefetch_wait=best_effort", "--set", "disk_writes=on_evict"),
    ),
    "hotness everywhere": (
        *("--workload", "few-shot", "--requests", "200", "--device-tokens", "8000", "--host-tokens", "30000"),
        *("--set", "admission=selective", "--set", "promotion=hotness", "--set", "answer_tokens=20"),
    ),
}


@pytest.mark.parametrize("name", CELLS)
def test_a_simulated_cell_keeps_the_protocol_and_ends_at_rest(name: str) -> None:
    """Plans are numbered without a gap, each batch, backup and promotion is answered, and all pages come back."""
    watched = simulation(*_SMALL, *CELLS[name])
    watch = Watch(watched, invariants_every=41)

    watched.run()

    watch.check_end()
    figures = watched.figures()
    assert figures["requests"] == figures["finished"] > 100
    assert 0 < figures["hit_ratio"] < 1


def _trace(path: Path, requests: int) -> Path:
    """Documents with questions, a request every 300 ms, in the Mooncake format."""
    rng = Random(7)
    with path.open("w") as lines:
        for number in range(requests):
            document = rng.randrange(12)
            hash_ids = [document * 100 + block for block in range(4 + document)] + [10_000 + number]
            length = 512 * (len(hash_ids) - 1) + rng.randrange(1, 513)
            line = {"timestamp": 300 * number, "input_length": length, "output_length": rng.randrange(1, 80)}
            lines.write(json.dumps(line | {"hash_ids": hash_ids}) + "\n")
    return path


def test_a_trace_of_two_hundred_requests(tmp_path: Path) -> None:
    """All are answered with as many tokens as the trace says, and hits are what the trace shares at most."""
    path = _trace(tmp_path / "trace.jsonl", 200)
    watched = simulation(
        *_SMALL, "--trace", str(path), "--workers", "2", "--device-tokens", "20000", "--host-tokens", "40000"
    )
    watch = Watch(watched, invariants_every=50)

    watched.run()

    watch.check_end()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    figures = watched.figures()
    assert figures["requests"] == figures["finished"] == 200
    assert figures["output_tokens"] == sum(line["output_length"] for line in lines)
    assert figures["input_tokens"] == sum(line["input_length"] for line in lines)
    seen: set[int] = set()
    shareable = 0
    for line in lines:
        shareable += 512 * sum(block in seen for block in line["hash_ids"])
        seen.update(line["hash_ids"])
    assert 0.2 * shareable < sum(figures["hit_tokens"].values()) <= shareable
    assert figures["simulated_seconds"] >= 0.3 * 199


def test_hits_are_of_the_very_tokens_that_were_computed(tmp_path: Path) -> None:
    """With one request at a time and room for everything, hits are exactly the blocks that were asked before."""
    lines = [(0, 1200, [1, 2, 3]), (1, 1200, [1, 2, 3]), (2, 1500, [1, 2, 9]), (3, 600, [4, 5])]
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "".join(
            json.dumps({"timestamp": time_s * 10_000, "input_length": length, "output_length": 2, "hash_ids": ids})
            + "\n"
            for time_s, length, ids in lines
        )
    )
    watched = simulation(*_SMALL, "--trace", str(path), "--device-tokens", "100000", "--host-tokens", "0")
    admitted: list[AdmitRequest] = []
    watched.cell.watch = lambda stamped, outputs: admitted.extend(
        output.order for output in outputs if isinstance(output, WorkerPlan) and isinstance(output.order, AdmitRequest)
    )

    watched.run()

    # Whole pages of 16, and at least one token is always computed.
    assert [order.device_tokens for order in admitted] == [0, 1184, 1024, 0]
    assert len(unpack_int32(admitted[0].tokens)) == 1200


def test_a_slower_link_and_a_slower_device_give_longer_times() -> None:
    """The same requests take longer on an A6000 than on an H200, and stall more with page-wise copies."""
    asked = ("--workload", "documents", "--requests", "80", "--model", "llama-3.1-8b", "--device-tokens", "60000")
    fast, slow, paged = (
        simulation(*asked, "--host-tokens", "2000000", "--set", "contexts=6", "--set", "bubble_filling=off", *more)
        for more in (
            ("--hardware", "h200-pcie5"),
            ("--hardware", "a6000-pcie3"),
            ("--hardware", "h200-pcie5", "--io", "per-page"),
        )
    )
    figures = []
    for each in (fast, slow, paged):
        each.run()
        figures.append(each.figures())

    assert figures[0]["hit_tokens"]["host"] > 0
    assert figures[1]["ttft_ms"]["mean"] > 2 * figures[0]["ttft_ms"]["mean"]
    assert figures[2]["stall_seconds"] > 2 * figures[0]["stall_seconds"]


def test_the_same_seed_gives_the_same_figures() -> None:
    """Two runs are identical to the last digit of every figure; another seed is another run."""

    def figures(seed: int) -> str:
        arguments = (*_SMALL, *CELLS["four workers, two nodes"], "--requests", "60", "--seed", str(seed))
        repeated = simulation(*arguments)
        repeated.run()
        return json.dumps(repeated.figures())

    assert figures(1) == figures(1)
    assert figures(1) != figures(2)


def test_a_full_queue_refuses_and_the_simulation_goes_on() -> None:
    """Refusals are counted by code, and what was accepted is answered."""
    watched = simulation(
        *_SMALL, "--workload", "few-shot", "--requests", "200", "--rate", "5000", "--set", "max_queued=20"
    )
    watch = Watch(watched, invariants_every=50)

    watched.run()

    watch.check_end()
    figures = watched.figures()
    assert figures["failed"]["queue_full"] > 50
    assert figures["finished"] + sum(figures["failed"].values()) == 200


def test_memory_is_bounded_by_the_tree_and_not_by_the_requests() -> None:
    """Over 2,000 requests nothing in core or simulator grows beyond what the pools and the open requests need."""
    watched = simulation(
        *(*_SMALL, "--workload", "few-shot", "--requests", "2000", "--concurrency", "32"),
        *("--device-tokens", "3000", "--host-tokens", "3000"),
        *("--set", "questions=4000", "--set", "prompt_tokens=160", "--set", "subjects=16"),
    )
    cell, sizes = watched.cell, []

    def measure(stamped: Stamped, _: list[Any]) -> None:
        if stamped.seq % 100 == 0:
            requests = len(cell.open) + len(cell.state.requests)
            sizes.append((len(cell.state.tree.nodes), requests, len(watched.queue), len(encode_state(cell.state))))

    cell.watch = measure
    watched.run()

    nodes, requests, events, snapshot = (max(column) for column in zip(*sizes, strict=True))
    pages = 2 * 3000 // 16
    assert nodes <= pages + 1
    assert requests <= 2 * 32
    assert events < 200
    # Besides the tree the core remembers ids that ended lately (at most 4,096) and prefixes that left, in the
    # filter and in the policy's ghosts and samples, all bounded in number.
    early = max(size for *_, size in sizes[: len(sizes) // 4])
    assert snapshot < early + 1500 * 400
    assert len(cell.figures.ttft_ms.buckets) < 5000
