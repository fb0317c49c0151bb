"""Figures of a pass, their medians over rounds, and ratios of systems within a round. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.peers.passes import Pass
from thermocline.client.figures import quantile
from thermocline.load.driver import Outcome
from thermocline.load.reply import Reply

Figures = dict[str, float]
"""Of one pass of one system in one round."""

RATES = frozenset(
    {"requests_per_s", "output_tokens_per_s", "prefill_tokens_per_s", "decode_tokens_per_s", "cached_part"}
)
"""Figures of which more is better; of all others less is."""


@dataclass(frozen=True, slots=True)
class Processor:
    """Seconds of processor time during a pass: of the server, of the servers that waited, and of the client."""

    own_s: float
    others_s: float
    client_s: float


def figures_of(made: Pass, outcome: Outcome, processor: Processor) -> Figures:
    """TTFT and end-to-end times in ms. All requests were answered."""
    replies = outcome.replies
    seconds = max(1e-9, outcome.ended_s - outcome.began_s)
    ttft_ms = [reply.ttft_s * 1e3 for reply in replies]
    token_ms = [reply.token_s * 1e3 for reply in replies if reply.token_s is not None]
    cached = [reply.cached_tokens for reply in replies]
    found: Figures = {
        "requests": len(replies),
        "seconds": seconds,
        "requests_per_s": len(replies) / seconds,
        "output_tokens_per_s": sum(reply.output_tokens for reply in replies) / seconds,
        "ttft_mean_ms": statistics.fmean(ttft_ms),
        "ttft_p50_ms": statistics.median(ttft_ms),
        "ttft_p99_ms": quantile(ttft_ms, 0.99),
        "end_to_end_mean_ms": statistics.fmean(reply.end_to_end_s * 1e3 for reply in replies),
        "prefill_tokens_per_s": statistics.median(reply.prompt_tokens / reply.ttft_s for reply in replies),
        "processor_own_s": processor.own_s,
        "processor_others_s": processor.others_s,
        "processor_client_s": processor.client_s,
    }
    if token_ms:
        found["token_p50_ms"] = statistics.median(token_ms)
        found["decode_tokens_per_s"] = 1e3 / max(1e-9, found["token_p50_ms"])
    if all(count is not None for count in cached):
        found["cached_part"] = sum(count or 0 for count in cached) / sum(reply.prompt_tokens for reply in replies)
    if made.firsts:
        found["first_ttft_mean_ms"] = statistics.fmean(_ttft_ms(replies, made.firsts))
        repeats = frozenset(reply.number for reply in replies) - made.firsts
        found["repeat_ttft_mean_ms"] = statistics.fmean(_ttft_ms(replies, repeats))
        found["repeat_ttft_p50_ms"] = statistics.median(_ttft_ms(replies, repeats))
    return found


def _ttft_ms(replies: Sequence[Reply], numbers: frozenset[int]) -> list[float]:
    return [reply.ttft_s * 1e3 for reply in replies if reply.number in numbers]


def medians(rounds: Sequence[Figures]) -> Figures:
    """Of each figure that every round has."""
    names = [name for name in rounds[0] if all(name in each for each in rounds)]
    return {name: statistics.median(each[name] for each in rounds) for name in names}


def times_better(figure: str, ours: float, theirs: float) -> float:
    """Above 1 ours is the better one: the larger rate, the shorter time."""
    more, less = (ours, theirs) if figure in RATES else (theirs, ours)
    return more / less if less else float("inf")


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median of the rounds' own ratios, and the least and the most of them."""

    median: float
    least: float
    most: float


def ratio(figure: str, ours: Sequence[Figures], theirs: Sequence[Figures]) -> Ratio | None:
    """Of neighbouring runs; None where a round lacks the figure. Both have as many rounds."""
    if not all(figure in each for each in (*ours, *theirs)):
        return None
    ratios = [times_better(figure, mine[figure], other[figure]) for mine, other in zip(ours, theirs, strict=True)]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))


def agreement(ours: Mapping[int, Sequence[int]], theirs: Mapping[int, Sequence[int]]) -> dict[str, float] | None:
    """Of greedy answers by request: the part that is equal to the end, and the mean part of equal leading tokens.

    None where one of them does not say its tokens.
    """
    shared = [number for number in sorted(ours) if number in theirs and ours[number] and theirs[number]]
    if not shared:
        return None
    equal, leading = 0, 0.0
    for number in shared:
        mine, other = list(ours[number]), list(theirs[number])
        equal += mine == other
        length = next(
            (i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), min(len(mine), len(other))
        )
        leading += length / max(len(mine), len(other))
    return {"requests": len(shared), "equal": equal / len(shared), "leading": leading / len(shared)}
