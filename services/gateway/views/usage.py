"""Usage and timing of an answer. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from services.gateway.assembly import Assembly
from services.gateway.openai_schema.leases import CacheLeaseReport
from services.gateway.openai_schema.usage import (
    CompletionTokensDetails,
    ImportanceReport,
    PromptTokensDetails,
    TimingReport,
    UsageReport,
)
from services.gateway.pending import Choice, Generation
from shared.messages.tokens import ImportanceUsage, Timing, Usage
from shared.messages.worker_plans import LeaseGrant

_TIERS = (
    "device_tokens",
    "host_tokens",
    "disk_tokens",
    "remote_tokens",
    "neighbour_tokens",
    "hidden_tokens",
    "sparse_tokens",
    "lent_tokens",
)


def usage_report(generation: Generation, *, count_output: bool = True) -> UsageReport:
    """Return the tokens so far. Cached tokens are those of each prompt's first choice, since a prompt counts once."""
    by_prompt: dict[int, Choice] = {}
    for choice in generation.choices:
        by_prompt.setdefault(choice.prompt, choice)
    firsts = list(by_prompt.values())
    prompt_tokens = sum(choice.request.prompt_tokens for choice in firsts)
    output = sum(len(choice.assembly.tokens) for choice in generation.choices) if count_output else 0
    counts = [choice.reply.reasoning_tokens for choice in generation.choices]
    reasoning = sum(count for count in counts if count is not None) if counts[0] is not None else None
    usages = [choice.assembly.usage or Usage() for choice in firsts]
    found = {name: sum(getattr(usage, name) for usage in usages) for name in _TIERS}
    return UsageReport(
        prompt_tokens=prompt_tokens,
        completion_tokens=output,
        total_tokens=prompt_tokens + output,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=sum(found.values()), cache_write_tokens=sum(map(_written_tokens, firsts)), **found
        ),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=reasoning)
        if reasoning is not None
        else UNSET,
        importance=importance_report(generation),
        cache_lease=lease_report([usage.leases for usage in usages]),
    )


def lease_report(answered: Sequence[tuple[LeaseGrant, ...]]) -> CacheLeaseReport | UnsetType:
    """Return the outcome of each prompt's leases: the longest of each counts. Unset where none was asked for."""
    longest = [max(grants, key=lambda grant: grant.tokens) for grants in answered if grants]
    if not longest:
        return UNSET
    ends = [grant.expires_ns for grant in longest if not grant.refusal]
    refusals = [grant.refusal for grants in answered for grant in grants if grant.refusal]
    return CacheLeaseReport(
        granted_tokens=sum(grant.tokens for grant in longest),
        expires_at=min(ends) // 10**9 if ends else None,
        refused=refusals[0] if refusals else None,
    )


def _written_tokens(choice: Choice) -> int:
    """Return the prompt's tokens that were no hits, and that a later prompt may find; 0 before its usage is known."""
    usage = choice.assembly.usage
    if usage is None or not choice.request.cache.write or usage.sparse_tokens:
        return 0
    found: int = sum(getattr(usage, name) for name in _TIERS)
    return max(0, choice.request.prompt_tokens - found)


def importance_report(generation: Generation) -> ImportanceReport | None:
    """Return what was loaded lossily so far, by any attempt of any choice; None where everything is exact."""
    lossy = [
        (usage, usage.importance)
        for choice in generation.choices
        for usage in choice.assembly.lossy.values()
        if usage.importance is not None
    ]
    return _summed(lossy)


def choice_importance(assembly: Assembly) -> ImportanceReport | None:
    """Return what one choice loaded lossily so far; None where everything is exact."""
    return _summed([(usage, usage.importance) for usage in assembly.lossy.values() if usage.importance is not None])


def _summed(lossy: Sequence[tuple[Usage, ImportanceUsage]]) -> ImportanceReport | None:
    """Return the sum of several loads; None of none."""
    if not lossy:
        return None
    # All choices of a request have the same ratio and metric.
    _, first = lossy[0]
    return ImportanceReport(
        ratio=first.ratio,
        metric=first.metric,
        loaded_tokens=sum(loaded.loaded_tokens for _, loaded in lossy),
        prefix_tokens=sum(usage.sparse_tokens for usage, _ in lossy),
        layers=sum(loaded.layers for _, loaded in lossy),
        layers_fallen_back=sum(loaded.layers_fallen_back for _, loaded in lossy),
        disk_bytes=sum(loaded.disk_bytes for _, loaded in lossy),
    )


def timing_report(timing: Timing | None, received_ns: int, now_ns: int) -> TimingReport:
    """Return the timing of one choice up to its first token.

    Its times are of the wall clock, from several processes of one node or cell.
    """
    timing = timing or Timing()
    received = timing.received_ns or received_ns
    computing_from = max(timing.started_ns, timing.loaded_ns)
    return TimingReport(
        accept_ms=_between_ms(received, timing.accepted_ns),
        admit_ms=_between_ms(timing.accepted_ns, timing.admitted_ns),
        queue_ms=_between_ms(timing.admitted_ns, timing.started_ns),
        load_ms=_between_ms(timing.started_ns, timing.loaded_ns) if timing.loaded_ns else 0.0,
        compute_ms=_between_ms(computing_from, timing.first_token_ns),
        first_token_ms=_between_ms(received, timing.first_token_ns),
        total_ms=_between_ms(received, now_ns),
    )


def _between_ms(start_ns: int, end_ns: int) -> float | None:
    """Return the milliseconds between two times, None when one is unknown. Clocks may disagree, so never below 0."""
    if not start_ns or not end_ns:
        return None
    return max(0, end_ns - start_ns) / 1e6
