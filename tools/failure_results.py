"""The page of what failures and changes of size do to a cell, from committed results."""

from __future__ import annotations

from typing import Any

from tools.result_sections import Result, Section, sections

_INTRODUCTION = """\
# Failures and changes of size

Made by `python -m tools.reference_docs` from `bench/results/`.

## A cell under faults

[Hurt a cell](../how-to/chaos.md) says what is done to it, what is asked meanwhile, and what must hold. Every token of
every answer is compared with that of a run without faults.
"""

_RECOVERY = """\
From the fault to the first moment at which its target serves again, as seen from outside; a stop or a stall includes
the time for which it was held. A worker has to load PyTorch and the model; on busy cores that is most of it.
"""

_TAKE_OVER = """\
## A standby takes over

The active scheduler is killed while clients stream; from the signal to the successor's first input, and the longest
time without a token that a client saw. Before each kill the longest pause is measured, too: what the machine does by
itself.
"""

_WORKER_LOSS = """\
## A worker is killed

The worker that runs the most is killed while clients stream; from the signal to its loss in the stream of inputs, and
the longest time between two messages with tokens that a client of its saw. What a stream waits for after the loss is
known is told apart. Before each kill the longest pause of all streams is measured, too.
"""

_BROKER_LOSS = """\
## One of three brokers is killed

A cluster of three keeps three copies of each stream. In turn the server that leads the metadata, which makes consumers,
and the one that leads the stream of inputs, which stores requests, is killed while clients stream, and started again.
The servers that are left elect leaders 4 to 9 s after the last word of one that is gone, which cannot be set; until
then the scheduler learns nothing new. Streams pause where they need its word for more pages. What is sent meanwhile
waits, or is answered 503 with `Retry-After`; the time until it is answered counts the tries.
"""

_SCALING = """\
## Workers come and go

Real processes; a step of a worker sleeps for a set time in the place of computing, since cores are short here, so that
a worker is worth a worker. Hit ratios are of prompt tokens; first questions are those on a document that nobody asked
about since the stretch before.
"""

_SIMULATED = """\
## Simulated faults

The scheduler's core, gateways, workers and storages under virtual time, with messages that are lost, late, doubled and
overtaken, and everything that [the simulation](../how-to/simulate-faults.md) can do to a cell.
"""

_SOAK = """\
## Steady load without faults

Private memory of each process, a minute after its start and at the end (medians of a quarter of the time each), and the
time to first token at the beginning and at the end.
"""


def page(found: dict[str, Result]) -> str:
    """The page, with a section for each of the results that are there; those of ``chaos`` must be."""
    chaos, origin = found["chaos"]
    parts = [_INTRODUCTION, *_overview(chaos), "", origin, "", _RECOVERY, *_recoveries(chaos), ""]
    known: tuple[Section, ...] = (
        ("take_over", _TAKE_OVER, _take_overs),
        ("worker_loss", _WORKER_LOSS, _worker_losses),
        ("broker_loss", _BROKER_LOSS, _broker_losses),
        ("scaling", _SCALING, _stretches),
        ("simulated_faults", _SIMULATED, _seeds),
        ("chaos_soak", _SOAK, _soak),
    )
    return "\n".join([*parts, *sections(found, known)])


def _spreads(figures: dict[str, Any], names: dict[str, str]) -> list[str]:
    rows = []
    for name, title in names.items():
        found = figures[name]
        rows.append(f"| {title} | {found['p50']:,.0f} ms | {found['p99']:,.0f} ms | {found['max']:,.0f} ms |")
    return ["| what | p50 | p99 | longest |", "|---|---|---|---|", *rows]


def _take_overs(figures: dict[str, Any]) -> list[str]:
    names = {
        "take_over_ms": "take-over",
        "longest_pause_ms": "longest pause of a stream",
        "calm_pause_ms": "the same before the kill",
    }
    return [f"{figures['kills']} kills.", "", *_spreads(figures, names)]


def _broker_losses(figures: dict[str, Any]) -> list[str]:
    leaders = {"metadata": "the metadata's leader", "inputs": "the inputs' leader"}
    measures = {
        "longest_pause_ms": "longest pause of a stream",
        "answered_ms": "from the kill until what is sent behind it has its first token",
        "calm_pause_ms": "longest pause of a stream before the kill",
    }
    names = {
        f"{leader}_{measure}": f"{title}: {what}"
        for leader, title in leaders.items()
        for measure, what in measures.items()
    }
    told = (
        f"{figures['kills']} kills; clients were answered 503 {figures['refused_503']} times, and no answer differed."
    )
    return [told, "", *_spreads(figures, names)]


def _worker_losses(figures: dict[str, Any]) -> list[str]:
    names = {
        "noticed_ms": "until the loss is known",
        "longest_pause_ms": "longest pause of a stream",
        "calm_pause_ms": "the same before the kill",
        "asked_ms": "from the loss until its gateway has said where to go on",
        "admitted_ms": "from there until another worker has the request",
        "next_token_ms": "from there until the client has the next token",
    }
    return [
        f"{figures['kills']} kills, of which {figures['noticed_by_silence']} were noticed by missing heartbeats; "
        f"{figures['streams_that_went_on']} streams went on.",
        "",
        *_spreads(figures, names),
    ]


def _stretches(figures: dict[str, Any]) -> list[str]:
    rows = [
        f"| {name} | {found['answers_per_s']:.2f} | {found['hit_ratio']:.2f} "
        f"| {found['hit_ratio_of_first_questions']:.2f} | {found['ttft_median_ms']:,.0f} ms |"
        for name, found in figures["stretches"].items()
    ]
    leaving = figures["leaving"]
    return [
        "| stretch | answers/s | hit ratio | of first questions | TTFT, median |",
        "|---|---|---|---|---|",
        *rows,
        "",
        f"The drain took {leaving['seconds']:.1f} s under load, handed over {leaving['handed_over_pages']} pages "
        f"and moved {leaving['requests_moved_by_drains']} requests.",
    ]


def _seeds(figures: dict[str, Any]) -> list[str]:
    reached = [f"{title} {found['times']:,}" for title, found in figures["reached"].items() if found["times"]]
    missed = [title for title, found in figures["reached"].items() if not found["times"]]
    return [
        f"{figures['seeds']:,} seeds, **{figures['violations']} violations**, {figures['seeds_per_minute']:,} seeds "
        f"a minute; {sum(figures['faults'].values()):,} faults of {len(figures['faults'])} kinds, "
        f"{figures['requests_accepted']:,} requests, {figures['virtual_hours']:,} hours of virtual time.",
        "",
        f"What happened on the way: {', '.join(reached)}.",
        *(["", f"What did not happen: {', '.join(missed)}."] if missed else []),
    ]


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
    table = ["| what | measured |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
    return [*table, *_what_did_not_hold(figures)]


def _what_did_not_hold(figures: dict[str, Any]) -> list[str]:
    found = [f"- {violation.partition('] ')[2]}" for violation in figures["violations"]]
    return ["", "What did not hold:", "", *found] if found else []


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
        f"{figures['seconds']:,.0f} s, {figures['attempts']:,} requests, {figures['tokens']:,} tokens compared. "
        f"TTFT p99 in the first sixth {ttft['p99_first_sixth']:.0f} ms, in the last {ttft['p99_last_sixth']:.0f} ms.",
        "",
        "| process | at first, MiB | at the end, MiB | slope, MiB an hour |",
        "|---|---|---|---|",
        *rows,
        *_what_did_not_hold(figures),
    ]
