"""States of a cell that are worth a picture, told by the scripted gateway: the same ones at each call."""

from __future__ import annotations

import itertools
import random
from typing import Any

from tests.ui.stand_in import (
    DISK,
    NAMESPACES,
    NOW_MS,
    StandIn,
    a_cell,
    a_tree,
    costly,
    divergence,
    explanation,
    flows,
)

BROKER_GONE = "gateway gateway-0 has no connection to the message broker"
DISK_GONE = {
    "component": "storage", "what": "disk", "setting": "--disk-dir",
    "reason": "/var/lib/thermocline cannot be written to (No space left on device): nothing new is kept there",
}  # fmt: skip
STORE = {"chunks_uploaded": 18_000, "uploads_outstanding": 36, "uploads_failed": 0}
FULL_DISK = {**DISK, "disk_chunks": 5_900, "disk_bytes": 790_000_000, "chunks_quarantined": 0}
IDENTIFIER = {
    "cause": "identifier", "token": 112, "before": "\nSession: ", "prompt": "7c1e-b2 Answer in",
    "cached": "90af-41 Answer in", "lost_tokens": 9_480, "lost_ms": 1_120.0, "requests": 17,
}  # fmt: skip
_COUNTERS = {
    "hit_tokens_device": 5_440_000, "hit_tokens_host": 2_100_000, "hit_tokens_disk": 384_000,
    "hit_tokens_remote": 91_000, "evicted_pages_device": 41_200, "evicted_pages_host": 12_800,
}  # fmt: skip
_SAVINGS = {"tokens": 8_015_000, "computed_tokens": 3_240_000, "prefill_seconds": 881.0, "load_seconds": 41.5}
QUESTIONS = (
    "When does the ferry to Tabor leave?",
    "Who holds the key of the east lock?",
    "What is the depth at pier 4?",
)


def busy(requests: int = 240) -> StandIn:
    """A cell with all four tiers at work, whose flows go on as it is watched."""
    return StandIn(
        cell=a_cell(flows=flows(3600), counters=_COUNTERS, savings=_SAVINGS),
        storages={"storage": {**FULL_DISK, **STORE}},
        nodes=a_tree(300),
        requests=asked(requests),
        divergences=[costly(), costly(**IDENTIFIER)],
    )


def empty() -> StandIn:
    """A cell that has just begun: nothing has joined, nothing was asked."""
    cell = a_cell(
        workers=[], storages=[], storage_incarnations={}, pools=[], counters={}, nodes=0, running=0, queued=0, pins=0,
        chunks=0, fetches=0, saves=0, in_flight_nodes=0, pinned_pages=0, leased_pages=0, cache_leases=0,
        savings={"tokens": 0, "computed_tokens": 0, "prefill_seconds": 0.0, "load_seconds": 0.0},
    )  # fmt: skip
    return StandIn(cell=cell, storages={}, nodes=[], requests=[])


def large_tree() -> StandIn:
    """A tree of 3,500 nodes."""
    stand_in = busy()
    stand_in.nodes = a_tree(3_500)
    stand_in.cell["nodes"] = 3_500
    return stand_in


def degraded_disk() -> StandIn:
    """A disk that keeps nothing new, a few chunks that were rotten, and a storage that does not answer."""
    stand_in = busy()
    stand_in.cell |= {"degraded": [DISK_GONE], "storages": ["storage", "storage-b"]}
    stand_in.storages = {"storage": {**FULL_DISK, "disk_bytes": 10**9, "chunks_quarantined": 3}, "storage-b": None}
    return stand_in


def asked(number: int, seed: int = 5) -> list[dict[str, Any]]:
    """So many requests of the last quarter of an hour, the newest first: most find their prefix, some lose it."""
    chance = random.Random(seed)
    return [_asked(place, NOW_MS - round(place * 880_000 / max(number, 240)), chance) for place in range(number)]


def _asked(place: int, created_ms: int, chance: random.Random) -> dict[str, Any]:
    tokens, is_lost = 64 * chance.randrange(8, 96), chance.random() < 0.25
    ends = (1, 2, 3) if is_lost else sorted(chance.sample(range(1, tokens // 16), 3))
    cuts = [0, *(16 * end for end in ends), tokens - 1, tokens]
    below = chance.choice(["disk", "remote", "disk", "lent"])
    reason = chance.choice(["never_stored", "evicted", "pending"]) if is_lost else "never_stored"
    kinds = (("device", None), ("host", None), (below, None), ("computed", reason), ("computed", "last_token"))
    spans = [
        {"start": start, "end": end, "source": source, "reason": why, "detail": None}
        for (start, end), (source, why) in zip(itertools.pairwise(cuts), kinds, strict=True)
    ]
    computed = tokens - 16 * ends[-1]
    question = f"now. {chance.choice(QUESTIONS)}"
    found = divergence(
        lost_tokens=computed - 200, lost_ms=0.11 * computed, before="You are the harbour office. It is 12:0",
        prompt=f"{place % 10} {question}", cached=f"{(place + 3) % 10} {question}",
    )  # fmt: skip
    return explanation(
        place, ttft_ms=12 + 0.11 * computed + chance.paretovariate(2.5), prompt_tokens=tokens, prompt=spans,
        created_ms=created_ms, divergence=found if is_lost else None, model="harbour-8b",
        workers=[f"worker-{place % 2}"], namespace=NAMESPACES[place % 5 == 0],
    )  # fmt: skip
