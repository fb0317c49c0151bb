"""Figures of a run from its replies, with times in milliseconds. Pure."""

from __future__ import annotations

import collections
import itertools
import statistics
from collections.abc import Iterable, Sequence

import msgspec

from thermocline.client.figures import quantile
from thermocline.load.driver import Outcome
from thermocline.load.reply import Reply

ABANDONED = "abandoned"
"""The error of requests in flight when the server was given up."""


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Mean and nearest-rank quantiles of some values."""

    mean: float
    p50: float
    p90: float
    p99: float


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a good answer; None is no bound. ``itl_ms`` bounds the mean time per token after the first."""

    ttft_ms: float | None = None
    itl_ms: float | None = None


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Rate of answers within the SLO, and their share of all requests, failed ones included."""

    requests_per_s: float
    part: float


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request. ``due_ms`` is from the start; ``token_ms`` is the mean time per token after the first."""

    number: int
    due_ms: float
    ttft_ms: float | None = None
    end_to_end_ms: float | None = None
    token_ms: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    error: str = ""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a run. Token counts and throughput are of answered requests.

    ``inter_token_ms`` is between messages with tokens. ``cached_tokens`` is None where no answer has it. ``late_ms`` is
    the delay of sending behind the due time, without retried requests.
    """

    requests: int
    answered: int
    errors: dict[str, int]
    retries: int
    cut_prompts: int
    seconds: float
    server_gone_after_s: float | None
    ttft_ms: Spread | None
    inter_token_ms: Spread | None
    token_ms: Spread | None
    end_to_end_ms: Spread | None
    late_ms: Spread | None
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    goodput: Goodput | None


def spread(values: Iterable[float]) -> Spread | None:
    """Return mean and quantiles; None for no values."""
    listed = sorted(values)
    if not listed:
        return None
    mean = statistics.fmean(listed)
    return Spread(mean=mean, p50=quantile(listed, 0.5), p90=quantile(listed, 0.9), p99=quantile(listed, 0.99))


def rows(outcome: Outcome) -> list[Row]:
    """Return one row per reply, in order of the intended start."""
    return [_row(reply, outcome.began_s) for reply in sorted(outcome.replies, key=lambda one: (one.due_s, one.number))]


def _row(reply: Reply, began_s: float) -> Row:
    due_ms = (reply.due_s - began_s) * 1e3
    if reply.error:
        return Row(number=reply.number, due_ms=due_ms, error=reply.error)
    return Row(
        number=reply.number,
        due_ms=due_ms,
        ttft_ms=reply.ttft_s * 1e3,
        end_to_end_ms=reply.end_to_end_s * 1e3,
        token_ms=None if reply.token_s is None else reply.token_s * 1e3,
        prompt_tokens=reply.prompt_tokens,
        output_tokens=reply.output_tokens,
        cached_tokens=reply.cached_tokens,
    )


def figures(outcome: Outcome, slo: Slo) -> Figures:
    """Return all figures of a run; ``goodput`` only where ``slo`` has a bound."""
    answered = [reply for reply in outcome.replies if not reply.error]
    errors = collections.Counter(reply.error for reply in outcome.replies if reply.error)
    if outcome.abandoned:
        errors[ABANDONED] += outcome.abandoned
    requests = len(answered) + sum(errors.values())
    # Never 0, so that a run without time has finite rates.
    seconds = max(outcome.ended_s - outcome.began_s, 1e-9)
    input_tokens = sum(reply.prompt_tokens for reply in answered)
    output_tokens = sum(reply.output_tokens for reply in answered)
    cached = [reply.cached_tokens for reply in answered if reply.cached_tokens is not None]
    return Figures(
        requests=requests,
        answered=len(answered),
        errors=dict(sorted(errors.items())),
        retries=sum(reply.retries for reply in outcome.replies),
        cut_prompts=sum(reply.is_cut for reply in outcome.replies),
        seconds=seconds,
        server_gone_after_s=outcome.gone_s,
        ttft_ms=spread(reply.ttft_s * 1e3 for reply in answered),
        inter_token_ms=spread(gap_s * 1e3 for gap_s in itertools.chain.from_iterable(one.gaps_s for one in answered)),
        token_ms=spread(reply.token_s * 1e3 for reply in answered if reply.token_s is not None),
        end_to_end_ms=spread(reply.end_to_end_s * 1e3 for reply in answered),
        late_ms=spread((reply.sent_s - reply.due_s) * 1e3 for reply in outcome.replies if not reply.retries),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cached_tokens=sum(cached) if cached else None,
        requests_per_s=len(answered) / seconds,
        input_tokens_per_s=input_tokens / seconds,
        output_tokens_per_s=output_tokens / seconds,
        goodput=_goodput(answered, requests, seconds, slo),
    )


def _goodput(answered: Sequence[Reply], requests: int, seconds: float, slo: Slo) -> Goodput | None:
    if slo.ttft_ms is None and slo.itl_ms is None:
        return None
    good = sum(is_good(reply, slo) for reply in answered)
    return Goodput(requests_per_s=good / seconds, part=good / max(1, requests))


def is_good(reply: Reply, slo: Slo) -> bool:
    """Return whether an answer is within the SLO; one of a single token has no time between tokens."""
    if slo.ttft_ms is not None and reply.ttft_s * 1e3 > slo.ttft_ms:
        return False
    return slo.itl_ms is None or reply.token_s is None or reply.token_s * 1e3 <= slo.itl_ms
