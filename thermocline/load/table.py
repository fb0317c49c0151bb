"""Tables of figures for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from thermocline.load.comparison import CONFIDENCE, Ratio
from thermocline.load.figures import Slo, Spread
from thermocline.load.report import Report

BUSY_PART = 0.7
LATE_MS = 10.0
"""A client beyond either bound measures itself rather than the server."""


def show(console: Console, report: Report) -> None:
    """Print the figures of one run: a table of times, then the other lines."""
    table = Table(title=_title(report), title_justify="left")
    for heading in ("", "mean", "p50", "p90", "p99"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, text in rows(report):
        table.add_row(name, *text)
    console.print(table)
    for name, line in lines(report):
        # Long lines are not wrapped: programs may look for their names.
        console.print(f"{name:<22} {line}", highlight=False, markup=False, soft_wrap=True)


def rows(report: Report) -> list[tuple[str, list[str]]]:
    """Return rows of times in milliseconds: (name, [mean, p50, p90, p99])."""
    figures = report.figures
    spreads = (
        ("TTFT, ms", figures.ttft_ms),
        ("between messages, ms", figures.inter_token_ms),
        ("per output token, ms", figures.token_ms),
        ("end to end, ms", figures.end_to_end_ms),
    )
    return [(name, _cells(found)) for name, found in spreads]


def lines(report: Report) -> list[tuple[str, str]]:
    """Return all other figures and the warnings, as (name, text)."""
    figures, server = report.figures, report.server
    errors = ", ".join(f"{count:,} {kind}" for kind, count in figures.errors.items()) or "none"
    length = "as long as asked" if server.is_extended else "may end before they are as long as asked"
    listed = [
        ("requests", f"{figures.answered:,} of {figures.requests:,} answered in {figures.seconds:,.1f} s"),
        ("errors", errors),
        ("throughput", f"{figures.requests_per_s:,.2f} requests/s"),
        ("  input, output", f"{figures.input_tokens_per_s:,.0f}, {figures.output_tokens_per_s:,.0f} tokens/s"),
        ("input tokens", f"{figures.input_tokens:,}, {_cached(report)}"),
        ("output tokens", f"{figures.output_tokens:,}"),
    ]
    if figures.goodput is not None:
        good = f"{figures.goodput.requests_per_s:,.2f} requests/s, {figures.goodput.part:.1%} of all"
        listed.append(("goodput", f"{good} within {_slo(report.slo)}"))
    if figures.retries:
        listed.append(("retries", f"{figures.retries:,}"))
    if figures.cut_prompts:
        listed.append(("cut prompts", f"{figures.cut_prompts:,} did not fit the model's {server.max_context:,} tokens"))
    listed.append(("asked by", f"{server.api} through {server.path}; answers {length}"))
    late = f", sent late by {figures.late_ms.p99:.1f} ms at p99" if figures.late_ms is not None else ""
    listed.append(("client", f"{report.client.cpu_part:.0%} of a core{late}"))
    return listed + [("warning", text) for text in warnings(report)]


def warnings(report: Report) -> list[str]:
    """Return reasons why these figures may not be the server's."""
    figures, found = report.figures, []
    if figures.server_gone_after_s is not None:
        found.append(f"the server stopped answering {figures.server_gone_after_s:,.1f} s after the start")
    if report.client.cpu_part > BUSY_PART:
        found.append(f"the client used {report.client.cpu_part:.0%} of a core: times are partly its own")
    if figures.late_ms is not None and figures.late_ms.p99 > LATE_MS:
        found.append(
            "requests were sent late: the client or its machine was busy, or the limit of requests in flight was "
            "reached (--concurrency); TTFT and end to end include the delay"
        )
    return found


def show_comparison(console: Console, base: Report, other: Report, ratios: Sequence[Ratio], differ: list[str]) -> None:
    """Print the ratios of one run to the first, and what else differs."""
    table = Table(title=f"{other.label} against {base.label}", title_justify="left")
    for heading in ("", base.label, other.label, "ratio", f"{CONFIDENCE:.0%} interval"):
        table.add_column(heading, justify="right" if heading else "left")
    for one in ratios:
        interval = "" if one.low is None or one.high is None else f"{one.low:.3f} to {one.high:.3f}"
        ratio = "" if one.ratio is None else f"{one.ratio:.3f}"
        table.add_row(one.figure, _number(one.base), _number(one.value), ratio, interval)
    console.print(table)
    for line in differ:
        console.print(f"not the same: {line}", highlight=False, markup=False, soft_wrap=True)


def _title(report: Report) -> str:
    return f"{report.label}: {report.workload} on {report.server.model}, seed {report.seed}"


def _cells(found: Spread | None) -> list[str]:
    if found is None:
        return ["-"] * 4
    return [f"{value:,.2f}" for value in (found.mean, found.p50, found.p90, found.p99)]


def _cached(report: Report) -> str:
    figures = report.figures
    if figures.cached_tokens is None:
        return "the server does not say how many were cached"
    return f"{figures.cached_tokens:,} of them cached ({figures.cached_tokens / max(1, figures.input_tokens):.1%})"


def _slo(slo: Slo) -> str:
    bounds = (("TTFT", slo.ttft_ms), ("token time", slo.itl_ms))
    return " and ".join(f"{name} {bound:g} ms" for name, bound in bounds if bound is not None)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3f}"
