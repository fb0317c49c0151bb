"""The page of runs under faults, from the committed results of ``bench/chaos.py``."""

from __future__ import annotations

from typing import Any

_INTRODUCTION = """\
# A cell under faults

Made by `python -m tools.reference_docs` from `bench/results/chaos.json` and `chaos_soak.json`.

[Hurt a cell](../how-to/chaos.md) says what is done to it, what is asked meanwhile, and what must hold. Every token of
every answer is compared with that of a run without faults.
"""

_RECOVERY = """\
## How long it takes

From the fault to the first moment at which its target serves again, as seen from outside; a stop or a stall includes
the time for which it was held. A worker has to load PyTorch and the model; on busy cores that is most of it.
"""

_SOAK = """\
## Steady load without faults

Private memory of each process, a minute after its start and at the end (medians of a quarter of the time each), and the
time to first token at the beginning and at the end.
"""


def page(chaos: tuple[dict[str, Any], str], soak: tuple[dict[str, Any], str]) -> str:
    """The whole page, from pairs of results and a line that says what they were measured on and how."""
    figures, origin = chaos
    steady, steady_origin = soak
    parts = [_INTRODUCTION, *_overview(figures), "", origin, "", _RECOVERY, *_recoveries(figures), ""]
    return "\n".join([*parts, _SOAK, *_soak(steady), "", steady_origin, ""])


def _overview(figures: dict[str, Any]) -> list[str]:
    pause = figures["stream_pause_s_on_worker_loss"]
    endings = ", ".join(f"{count:,} {ending}" for ending, count in figures["endings"].items())
    excused = "; ".join(f"{count:,} × {why}" for why, count in figures["excused_errors"].items())
    rows = [
        ("faults", f"{figures['faults']} in {figures['seconds']:,.0f} s"),
        ("violations", str(len(figures["violations"]))),
        ("requests sent", f"{figures['attempts']:,}: {endings}"),
        ("tokens compared", f"{figures['tokens']:,}"),
        ("errors, each excused by a fault", excused or "none"),
        ("tried again by clients", f"{figures['retried']:,}"),
        ("gone on with at another worker", f"{figures['requests_resumed']:,}"),
        (
            "longest pause of a stream while a worker was lost",
            f"p50 {pause['p50']:.2f} s, p99 {pause['p99']:.2f} s, of {pause['count']:,} that paused for 0.25 s or more",
        ),
        ("looks at what was left over", f"{figures['rests']}"),
    ]
    return ["| what | measured |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]


def _recoveries(figures: dict[str, Any]) -> list[str]:
    rows = [
        f"| {kind} | {spread['count']} | {spread['p50']:.1f} s | {spread['p99']:.1f} s | {spread['max']:.1f} s |"
        for kind, spread in figures["recovery_s"].items()
    ]
    return ["| fault | times | p50 | p99 | longest |", "|---|---|---|---|---|", *rows]


def _soak(figures: dict[str, Any]) -> list[str]:
    ttft = figures["ttft_ms"]
    rows = [
        f"| {name.partition(' ')[0]} | {found['first_mib']:.1f} | {found['last_mib']:.1f} "
        f"| {found['mib_an_hour']:+.1f} |"
        for name, found in figures["memory"].items()
    ]
    return [
        f"{figures['seconds']:,.0f} s, {figures['attempts']:,} requests, {len(figures['violations'])} violations. "
        f"TTFT p99 in the first sixth {ttft['p99_first_sixth']:.0f} ms, in the last {ttft['p99_last_sixth']:.0f} ms.",
        "",
        "| process | at first, MiB | at the end, MiB | slope, MiB an hour |",
        "|---|---|---|---|",
        *rows,
    ]
