"""What ours is meant to be better by, and whether it was in a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.peers.figures import Figures, ratio
from bench.peers.passes import BURST_TOKENS

Measured = Mapping[str, Mapping[str, Sequence[Figures]]]
"""System, pass, rounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """``figure`` of ``passed`` is at least ``least`` times better than the peer's. ``says`` is for the reader."""

    says: str
    ours: str
    peer: str
    passed: str
    figure: str
    least: float


def _against(ours: str, peer: str, *rows: tuple[str, str, str, float]) -> list[Target]:
    return [
        Target(says=says, ours=ours, peer=peer, passed=passed, figure=figure, least=least)
        for says, passed, figure, least in rows
    ]


_WARM_HOST = ("warm from host memory, TTFT p50", "host", "ttft_p50_ms", 2.0)
_WARM_DISK = ("warm from the disk, TTFT p50", "disk", "ttft_p50_ms", 2.0)
_COLD = (
    ("cold, requests/s", "cold", "requests_per_s", 1.1),
    ("cold, mean TTFT", "cold", "ttft_mean_ms", 1.3),
    ("cold, mean TTFT of repeated questions", "cold", "repeat_ttft_mean_ms", 2.0),
)
_BURSTS = tuple(
    (f"burst on a new document of {tokens:,} tokens, mean TTFT", passed, "ttft_mean_ms", 3.0)
    for passed, tokens in BURST_TOKENS.items()
)
_AGENTS = (
    ("turns of agents, TTFT p50", "agents", "ttft_p50_ms", 2.0),
    ("turns of agents, TTFT p99", "agents", "ttft_p99_ms", 2.0),
)
_EQUAL = (
    ("prefill of 512 tokens", "single_512", "prefill_tokens_per_s", 1.0),
    ("prefill of 2,048 tokens", "single_2048", "prefill_tokens_per_s", 1.0),
    ("decode after 512 tokens", "single_512", "decode_tokens_per_s", 1.0),
    ("decode after 2,048 tokens", "single_2048", "decode_tokens_per_s", 1.0),
    ("eight at once, output tokens/s", "eight_512", "output_tokens_per_s", 1.0),
)

TARGETS: dict[str, list[Target]] = {
    "documents": [
        *_against(
            "ours",
            "vllm",
            ("cold, mean TTFT", "cold", "ttft_mean_ms", 3.0),
            ("cold, requests/s", "cold", "requests_per_s", 2.0),
        ),
        *_against("ours", "lmcache", *_COLD, _WARM_HOST),
        *_against("ours-disk", "lmcache-disk", *_COLD, _WARM_HOST, _WARM_DISK),
    ],
    "agents": [
        *_against("ours", "lmcache", *_AGENTS),
        *_against("ours-disk", "lmcache-disk", *_AGENTS),
    ],
    "burst": [*_against("ours", "lmcache", *_BURSTS), *_against("ours-disk", "lmcache-disk", *_BURSTS)],
    "unshared": _against("ours", "vllm", *_EQUAL),
}


def judged(workload: str, measured: Measured) -> list[dict[str, Any]]:
    """A row for each target whose two systems were measured, with the ratio and whether it is met."""
    rows = []
    for target in TARGETS.get(workload, []):
        ours = measured.get(target.ours, {}).get(target.passed)
        theirs = measured.get(target.peer, {}).get(target.passed)
        found = ratio(target.figure, ours, theirs) if ours and theirs else None
        if found is None:
            continue
        rows.append(
            {
                "says": target.says,
                "ours": target.ours,
                "peer": target.peer,
                "pass": target.passed,
                "ratio": found.median,
                "ratio_min_max": [found.least, found.most],
                "target": target.least,
                "is_met": found.median >= target.least,
            }
        )
    return rows
