"""The page of what watching a cell costs, how true its explanations are, and what tenants can find out."""

from __future__ import annotations

from typing import Any

from tools.result_sections import Result, Section, cost_ratios, sections

_INTRODUCTION = """\
# Watching, explaining, keeping apart

Made by `python -m tools.reference_docs` from `bench/results/`. How to do it: [observe](../how-to/observe.md),
[explain](../how-to/explain.md), [secure](../how-to/secure.md), [fuzz](../how-to/fuzz.md).
"""

_COST = """\
## What watching costs

Cells side by side, asked in turns; ratios are of neighbouring turns, medians with the interval that holds 95 % of the
medians of resampled rounds. In `none` no metric counts anything; `off` is a cell as it is by default, with all metrics
counted and nothing traced. Target: at most 1 % of throughput with traces off.
"""

_CALLS = """\
Such a comparison cannot tell 1 % from nothing on shared cores. What counting itself takes can be told: the calls of all
metrics in all processes, times what a call takes by itself, against the CPU time of a token.
"""

_WAYS = {
    "none": "metrics do nothing",
    "off": "the default: metrics counted, not asked for",
    "scraped": "metrics of all processes asked for every second",
    "traced_none": "a tracer that traces no request",
    "traced": "every request traced to a file",
    "explained": "an explanation with every answer",
}

_EXPLAINED = """\
## Parts of the time to first token

What the parts of an explanation leave of the time that the gateway measured, and of the time that a client measured,
from its first byte to the first piece of the body; the client's has the way there and back in it. Target: the parts
make up the measured time within 5 %.
"""

_TIMED = """\
## Whether a tenant can tell what another has cached

Time to first token of a prompt that another tenant has cached, of one that nobody asked, and of one that was cached for
the asking tenant, in random order. Two-sided rank tests compare the first and the last with the second.
"""

_FUZZED = """\
## Requests and bytes that nobody should send
"""


def page(found: dict[str, Result]) -> str:
    """The page, with a section for each of the results that are there."""
    known: tuple[Section, ...] = (
        ("observability_cost", _COST, _costs),
        ("metric_calls", _CALLS, _calls),
        ("explain_sums", _EXPLAINED, _sums),
        ("tenant_timing", _TIMED, _timing),
        ("fuzz", _FUZZED, _fuzzed),
    )
    return "\n".join([_INTRODUCTION, *sections(found, known)])


def _costs(figures: dict[str, Any]) -> list[str]:
    rows = []
    for name, way in figures["ways"].items():
        ratios = cost_ratios(way, is_base=name == "none")
        rows.append(f"| `{name}`: {_WAYS[name]} | {way['tokens_per_s']:,.0f} | {' | '.join(ratios)} |")
    return [
        f"{figures['rounds']} rounds of {figures['requests_a_round']} requests, {figures['at_once']} at once.",
        "",
        "| cell | tokens/s | throughput against `none` | CPU time of a token against `none` |",
        "|---|---|---|---|",
        *rows,
    ]


def _calls(figures: dict[str, Any]) -> list[str]:
    rows = [
        f"| `{kind}` | {count:.2f} | {figures['us_a_call'][kind]:.2f} µs |"
        for kind, count in figures["calls_a_token"].items()
    ]
    return [
        "| call | a token | takes |",
        "|---|---|---|",
        *rows,
        "",
        f"Together **{figures['share_of_cpu']:.2%}** of the CPU time of a token, {figures['cpu_us_a_token']:,.0f} µs.",
    ]


def _sums(figures: dict[str, Any]) -> list[str]:
    rows = []
    for kind, one in figures["by_kind"].items():
        client = one["client_residual"]
        rows.append(
            f"| {kind} | {one['requests']} | {one['ttft_ms']:,.0f} ms | {one['gateway_residual']['largest']:.1%} "
            f"| {client['p50']:.1%} | {client['p95']:.1%} | {one['client_within_5_percent']:.0%} |"
        )
    whole = figures["all"]
    return [
        "| prefix | requests | TTFT p50 | left of the gateway's, at most | left of the client's, p50 | p95 "
        "| client's within 5 % |",
        "|---|---|---|---|---|---|---|",
        *rows,
        "",
        f"Of all {whole['requests']} requests {whole['client_within_5_percent']:.1%} are within 5 % as the client saw "
        f"them. What the client sees beyond is {whole['client_beyond_ms']['p50']:.1f} ms in the median.",
    ]


def _timing(figures: dict[str, Any]) -> list[str]:
    rows = [
        f"| {title} | {figures['ttft_ms'][name]['p25']:.1f} ms | {figures['ttft_ms'][name]['p50']:.1f} ms "
        f"| {figures['ttft_ms'][name]['p75']:.1f} ms |"
        for name, title in (("other", "cached for another tenant"), ("fresh", "fresh"), ("own", "cached for oneself"))
    ]
    other, own = figures["other_against_fresh"], figures["own_against_fresh"]
    power = ", ".join(
        f"{float(leak):.0%} of it with {chance:.0%}"
        for leak, chance in figures["power_by_leaked_share_of_gain"].items()
    )
    return [
        f"{figures['rounds']} rounds of prompts of {figures['tokens']} tokens.",
        "",
        "| prompt | p25 | p50 | p75 |",
        "|---|---|---|---|",
        *rows,
        "",
        f"Cached for another against fresh: p = {other['p']:.2f}, and a random pair is in order with chance "
        f"{other['auc']:.3f} (a half says nothing). Cached for oneself against fresh: p = {own['p']:.0e}.",
        f"Power at p < {figures['alpha']:g}: were a share of what caching saves ({figures['cached_gain_ms']:.1f} ms) "
        f"to show, the test would find {power} chance.",
    ]


def _fuzzed(figures: dict[str, Any]) -> list[str]:
    rows = []
    if "api" in figures:
        api = figures["api"]
        answers = ", ".join(f"{count:,} × {status}" for status, count in sorted(api["statuses"].items()))
        rows.append(
            f"HTTP API, seed {api['seed']}: {api['cases']:,} cases of {len(api['by_kind'])} kinds; answered {answers}; "
            f"found wrong: {len(api['found'])}."
        )
    if "bytes" in figures:
        of_bytes = figures["bytes"]
        rows.append(
            f"\nCodecs and chunks, seed {of_bytes['seed']}: {of_bytes['inputs']:,} inputs; "
            f"found wrong: {len(of_bytes['found'])}."
        )
    return rows
