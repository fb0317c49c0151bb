"""The report of a run: a table, and plain figures for JSON."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from thermocline.chaos.journal import Journal
from thermocline.chaos.memory_growth import MOST_GROWTH_BYTES, Growth, growth
from thermocline.chaos.outcome import Outcome
from thermocline.chaos.plan import group_of
from thermocline.client.figures import quantile

_MIB = 2**20
_SHARE = 6
"""The first and the last sixth of a run are compared: ten minutes of an hour."""


def summary(outcome: Outcome, journal: Journal) -> dict[str, Any]:
    """Return all figures for JSON. Times are seconds, or milliseconds in names with ``_ms``."""
    tally = outcome.tally
    counters = outcome.counters
    return {
        "seed": outcome.settings.seed,
        "seconds": round(outcome.seconds, 1),
        "workers": outcome.settings.workers,
        "schedulers": outcome.settings.schedulers,
        "faults": len(outcome.faults),
        "faults_by_kind": dict(sorted(Counter(f"{f.kind} {group_of(f.target)}" for f in outcome.faults).items())),
        "violations": [str(violation) for violation in journal.violations],
        "requests_known": outcome.requests_known,
        "attempts": sum(tally.endings.values()),
        "endings": dict(sorted(tally.endings.items())),
        "tokens": tally.tokens,
        "retried": tally.retries,
        "excused_errors": dict(sorted(tally.excused.items())),
        "held_back": tally.held_back,
        "scheduler_epochs": outcome.epoch,
        "requests_resumed": counters.get("requests_resumed", 0),
        "counters": {name: counters[name] for name in sorted(counters)},
        "recovery_s": {kind: _spread(times) for kind, times in sorted(outcome.recovery_s.items())},
        "stream_pause_s_on_worker_loss": _spread(pauses_on_worker_loss(outcome)),
        "ttft_ms": {key: round(value * 1000, 1) for key, value in _ttft(outcome).items()},
        "ended_by_themselves": dict(sorted(outcome.own_ends.items())),
        "logged_errors": dict(sorted(outcome.logged.errors.items())),
        "rests": outcome.rests,
        "memory": {name: _growth_figures(found) for name, found in memory(outcome).items()},
    }


def memory(outcome: Outcome) -> dict[str, Growth]:
    """Return the memory growth of each process that lived long enough, by "name pid"."""
    found = {f"{name} {pid}": growth(samples) for (name, pid), samples in sorted(outcome.memory.items())}
    return {name: each for name, each in found.items() if each is not None}


def check_memory(outcome: Outcome, journal: Journal) -> None:
    """Record a violation for each process whose memory grew."""
    for name, found in memory(outcome).items():
        if not found.is_flat:
            journal.complain(
                "memory grew",
                f"{name} from {found.first_bytes / _MIB:.1f} to {found.last_bytes / _MIB:.1f} MiB in "
                f"{found.seconds:.0f} s, {found.slope * 3600 / _MIB:.1f} MiB an hour; "
                f"the bound is {MOST_GROWTH_BYTES // _MIB} MiB",
            )


def pauses_on_worker_loss(outcome: Outcome) -> list[float]:
    """Return the longest pause in seconds of each stream during the loss of a worker.

    A client cannot know which worker served a stream, so streams without a recorded pause are not counted.
    """
    losses = [
        window
        for window in outcome.windows.all
        if group_of(window.fault.target) == "worker" and window.fault.kind in ("kill", "stop_long")
    ]
    pauses = []
    for reply in outcome.tally.streams:
        gaps = [
            length
            for began_s, length in reply.gaps
            if any(
                w.start_s <= began_s - outcome.origin_s + length and began_s - outcome.origin_s <= w.end_s
                for w in losses
            )
        ]
        if gaps:
            pauses.append(max(gaps))
    return pauses


def _ttft(outcome: Outcome) -> dict[str, float]:
    """Return TTFT percentiles in seconds: of all streams, and of those in the first and the last sixth."""
    streams = sorted(outcome.tally.streams, key=lambda reply: reply.started_s)
    if not streams:
        return {}
    first_s, last_s = streams[0].started_s, streams[-1].started_s
    part_s = (last_s - first_s) / _SHARE
    early = [reply.ttft_s for reply in streams if reply.started_s <= first_s + part_s]
    late = [reply.ttft_s for reply in streams if reply.started_s >= last_s - part_s]
    every = [reply.ttft_s for reply in streams]
    return {
        "p50": quantile(every, 0.5),
        "p99": quantile(every, 0.99),
        "p99_first_sixth": quantile(early, 0.99),
        "p99_last_sixth": quantile(late, 0.99),
    }


def _spread(times: list[float]) -> dict[str, float]:
    return {
        "count": len(times),
        "p50": round(quantile(times, 0.5), 3),
        "p99": round(quantile(times, 0.99), 3),
        "max": round(max(times, default=0.0), 3),
    }


def _growth_figures(found: Growth) -> dict[str, float]:
    return {
        "seconds": round(found.seconds, 1),
        "first_mib": round(found.first_bytes / _MIB, 2),
        "last_mib": round(found.last_bytes / _MIB, 2),
        "mib_an_hour": round(found.slope * 3600 / _MIB, 2),
    }


def print_summary(console: Console, figures: dict[str, Any]) -> None:
    """Print the figures of :func:`summary` as a table."""
    table = Table(title=f"Chaos, seed {figures['seed']}", show_header=False)
    table.add_row("faults", f"{figures['faults']} in {figures['seconds']:.0f} s")
    ended = ", ".join(f"{count} {ending}" for ending, count in figures["endings"].items())
    table.add_row("requests", f"{figures['attempts']} sent: {ended or 'none'}")
    table.add_row("tokens compared", f"{figures['tokens']:,}")
    excused = ", ".join(f"{count} {why}" for why, count in figures["excused_errors"].items())
    table.add_row("errors that a fault excuses", excused or "none")
    table.add_row("retried by clients", str(figures["retried"]))
    table.add_row("resumed at another worker", str(figures["requests_resumed"]))
    table.add_row("schedulers active in turn", str(figures["scheduler_epochs"]))
    pause = figures["stream_pause_s_on_worker_loss"]
    table.add_row(
        "pauses of streams, worker lost", f"{pause['count']}: p50 {pause['p50']:.2f} s, p99 {pause['p99']:.2f} s"
    )
    for kind, spread in figures["recovery_s"].items():
        table.add_row(
            f"recovery after {kind}", f"{spread['count']}: p50 {spread['p50']:.1f} s, max {spread['max']:.1f} s"
        )
    ttft = figures["ttft_ms"]
    if ttft:
        table.add_row("TTFT p50 / p99", f"{ttft['p50']:.0f} / {ttft['p99']:.0f} ms")
        table.add_row(
            "TTFT p99, first and last sixth", f"{ttft['p99_first_sixth']:.0f}, {ttft['p99_last_sixth']:.0f} ms"
        )
    ended = ", ".join(f"{count} {what}" for what, count in figures["ended_by_themselves"].items())
    table.add_row("ended by themselves", ended or "none")
    for name, growth_figures in figures["memory"].items():
        table.add_row(
            f"memory of {name}",
            f"{growth_figures['first_mib']:.1f} to {growth_figures['last_mib']:.1f} MiB in "
            f"{growth_figures['seconds']:.0f} s ({growth_figures['mib_an_hour']:+.1f} MiB an hour)",
        )
    table.add_row("violations", str(len(figures["violations"])))
    console.print(table)
