"""The figures of a simulation as a table."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def show(console: Console, figures: dict[str, Any], title: str) -> None:
    """Print the figures as a table of two columns."""
    table = Table(title=title, show_header=False, title_justify="left")
    for name, text in rows(figures):
        table.add_row(name, text)
    console.print(table)


def rows(figures: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of the table, as (name, text)."""
    tokens, hits = figures["input_tokens"], figures["hit_tokens"]
    failed = ", ".join(f"{count:,} {code}" for code, count in figures["failed"].items()) or "none"
    throughput, evicted = figures["throughput"], figures["evicted_tokens"]
    listed = [
        ("requests", f"{figures['requests']:,} in {figures['simulated_seconds']:,.1f} simulated seconds"),
        ("refused or failed", failed),
        ("input / output tokens", f"{tokens:,} / {figures['output_tokens']:,}"),
    ]
    listed += [(f"hit tokens, {tier}", f"{count:,} ({count / max(1, tokens):.1%})") for tier, count in hits.items()]
    listed += [("hit ratio", f"{figures['hit_ratio']:.4f}")]
    listed += [
        (
            f"{name} mean / p50 / p99",
            " / ".join(f"{figures[key][part]:,.2f}" for part in ("mean", "p50", "p99")) + " ms",
        )
        for name, key in (("TTFT", "ttft_ms"), ("time per output token", "tpot_ms"), ("latency", "latency_ms"))
    ]
    listed += [
        (
            "requests / input / output tokens a second",
            f"{throughput['requests_per_s']:,.2f} / {throughput['input_tokens_per_s']:,.0f} / "
            f"{throughput['output_tokens_per_s']:,.0f}",
        ),
        (
            "load / compute / stall / bubble",
            " / ".join(f"{figures[f'{name}_seconds']:,.2f}" for name in ("load", "compute", "stall", "bubble")) + " s",
        ),
        ("evicted tokens, device / host", f"{evicted['device']:,} / {evicted['host']:,}"),
        ("backups", f"{figures['backups']:,} of {figures['backed_up_tokens']:,} tokens"),
        ("promotions", f"{figures['promotions']:,} of {figures['promoted_tokens']:,} tokens"),
        (
            "disk",
            f"{figures['saved_chunks']:,} chunks saved, {figures['fetched_tokens']:,} tokens fetched, "
            f"{figures['disk_seconds']:,.2f} s busy",
        ),
        ("deferrals", f"{figures['deferrals']:,}"),
        ("batches / steps", f"{figures['batches']:,} / {figures['steps']:,}"),
        (
            "scheduler",
            f"{figures['scheduler']['inputs']:,} inputs, busy {figures['scheduler']['busy_fraction']:.1%} of the time",
        ),
        ("simulated in", f"{figures['wall_seconds']:,.1f} s"),
    ]
    return listed
