"""What three of Strata's mechanisms bring or cost with everything else as it is by default, simulated.

* ``bubbles`` (4.3.3): a loading-bound batch's bubble is filled by nothing, by decoding, or by prefill as well.
* ``waits`` (4.2.1): a request whose prefix is being fetched from the disk is dispatched when its turn comes
  (``best_effort``, the paper's way), waits for a time (``deadline``), or waits to the end (``full``).
* ``backups`` (4.2): copies to host memory take all of the link's time, or half of it: one block of two.

Each on datasets of the paper, a recorded trace (``--trace``, in the Mooncake format) and generators whose shapes their
seed draws. Nothing was chosen by the generators and the trace: the rule by which prefill may fill a bubble was tried on
LooGLE alone.

``python -m bench.papers.strata_switches --trace FILE [--parts bubbles,waits,backups] [--cases NAME;...] [--keep FILE]
[--add FILE,...]`` writes ``bench/results/papers_strata_switches.json``. Runs of some cases keep what ``--add`` joins.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace as struct_replace

from bench import results_file
from bench.papers import simulated
from bench.papers.simulated import Row
from shared.messages.cell_events import CellConfig
from thermocline.simulate.__main__ import GC_THRESHOLDS
from thermocline.simulate.profiles import load_hardware, load_model
from thermocline.simulate.simulation import Setup, Simulation
from thermocline.simulate.workloads import TraceWorkload, Workload
from thermocline.simulate.workloads.agents import AgentOptions, AgentWorkload
from thermocline.simulate.workloads.chat import ChatOptions, ChatWorkload
from thermocline.simulate.workloads.diurnal import DiurnalOptions, DiurnalWorkload
from thermocline.simulate.workloads.documents import DocumentOptions, DocumentWorkload
from thermocline.simulate.workloads.retrieval import RetrievalOptions, RetrievalWorkload

IN_FLIGHT = 128  # 5.1
PREFILL_TOKENS = 8192
SEEDS = (1, 2)
"""Of workloads whose shape the seed draws; the others have the first only."""

TRACED = 300  # Requests of the trace.

COUNTERS = (
    "batches_in_bubbles",
    "batches_loading_bound",
    "batches_planned",
    "batches_split",
    "fetched_tokens",
    "fetches_cancelled",
    "fetches_done",
    "fetches_started",
    "prefetch_deadlines",
    "prefetch_waits",
)

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "bubbles": {
        "none": {"bubble_filling": False},
        "decode": {},
        "decode and prefill": {"bubble_prefill": True},
    },
    "waits": {
        "best_effort": {"prefetch_wait": "best_effort"},
        "deadline 2 s": {},
        "full": {"prefetch_wait": "full"},
    },
    "backups": {"all of the time": {}, "half of the time": {"backup_share": 0.5}},
}


@dataclass(frozen=True, slots=True)
class Case:
    """Who asks for what, and on which machine. Tokens are of KV; None is what fits."""

    workload: Callable[[int, Path | None], Workload | None]
    hardware: str = "h200-pcie5"
    model: str = "qwen2.5-14b"
    rate: float | None = None
    in_flight: int | None = IN_FLIGHT
    requests: int | None = None
    device_tokens: int | None = None
    host_tokens: int | None = None
    disk_tokens: int = 0
    disk_slower: float = 1.0  # Times slower than the machine's own.
    seeds: tuple[int, ...] = SEEDS[:1]


def documents(**options: Any) -> Callable[[int, Path | None], Workload]:
    """Questions about a dataset's documents."""
    return lambda seed, trace: DocumentWorkload(DocumentOptions(**options), seed)


def traced(seed: int, trace: Path | None) -> Workload | None:
    """The recorded trace, as fast as it was, or as there is room."""
    return None if trace is None else TraceWorkload(trace, limit=TRACED)


def traced_slowly(seed: int, trace: Path | None) -> Workload | None:
    """The same in four times the time."""
    return None if trace is None else TraceWorkload(trace, limit=TRACED, speed=0.25)


def agents(seed: int, trace: Path | None) -> Workload:
    return AgentWorkload(AgentOptions(sessions=16), seed)


def diurnal(seed: int, trace: Path | None) -> Workload:
    return DiurnalWorkload(DiurnalOptions(queries=250), seed)


def retrieval(seed: int, trace: Path | None) -> Workload:
    return RetrievalWorkload(RetrievalOptions(queries=250), seed)


def chats(seed: int, trace: Path | None) -> Workload:
    return ChatWorkload(ChatOptions(sessions=100, think_s=20.0), seed)


LOOGLE: dict[str, Any] = {"contexts": 30, "queries": 250}
"""So few documents that most of a short run finds its own."""

CASES: dict[str, dict[str, Case]] = {
    "bubbles": {
        "LooGLE, shuffled": Case(documents(queries=800)),
        "LooGLE, max": Case(documents(queries=800, distance="max")),
        "LooGLE, 6/s": Case(documents(**LOOGLE), rate=6.0, device_tokens=200_000),
        "LooGLE, Llama-3.1-8B": Case(documents(**LOOGLE), model="llama-3.1-8b", device_tokens=200_000),
        "NarrativeQA": Case(documents(dataset="narrativeqa", contexts=12, queries=120), device_tokens=300_000),
        "trace, slowly": Case(traced_slowly, model="llama-3.1-8b", in_flight=None, device_tokens=200_000),
        "agents": Case(agents, device_tokens=100_000, seeds=SEEDS),
        "chats": Case(chats, "4090", "llama-2-7b", rate=4.0, in_flight=None, device_tokens=30_000),
        "diurnal": Case(diurnal, device_tokens=60_000, seeds=SEEDS),
        "retrieval": Case(retrieval, device_tokens=60_000, seeds=SEEDS),
        "retrieval, two cores": Case(retrieval, "cpu-2core", "llama-88m", in_flight=8, device_tokens=16_384),
    },
    "waits": {
        "LooGLE, 1/s": Case(
            documents(**LOOGLE), rate=1.0, device_tokens=150_000, host_tokens=200_000, disk_tokens=4_000_000
        ),
        "LooGLE, busy": Case(documents(**LOOGLE), device_tokens=150_000, host_tokens=200_000, disk_tokens=4_000_000),
        "LooGLE, slow disk": Case(
            documents(**LOOGLE),
            rate=1.0,
            device_tokens=150_000,
            host_tokens=200_000,
            disk_tokens=4_000_000,
            disk_slower=6.0,
        ),
        "ReviewMT": Case(
            documents(dataset="reviewmt", contexts=12, queries=150),
            rate=3.0,
            device_tokens=100_000,
            host_tokens=100_000,
            disk_tokens=4_000_000,
        ),
        "trace, slowly": Case(
            traced_slowly,
            model="llama-3.1-8b",
            in_flight=None,
            device_tokens=400_000,
            host_tokens=400_000,
            disk_tokens=60_000_000,
        ),
        "agents": Case(agents, device_tokens=100_000, host_tokens=100_000, disk_tokens=9_000_000, seeds=SEEDS),
        "chats": Case(
            chats,
            "4090",
            "llama-2-7b",
            rate=4.0,
            in_flight=None,
            device_tokens=30_000,
            host_tokens=40_000,
            disk_tokens=2_000_000,
        ),
        "diurnal": Case(diurnal, device_tokens=60_000, host_tokens=60_000, disk_tokens=4_000_000, seeds=SEEDS),
        "retrieval": Case(retrieval, device_tokens=60_000, host_tokens=60_000, disk_tokens=4_000_000, seeds=SEEDS),
        "retrieval, two cores": Case(
            retrieval,
            "cpu-2core",
            "llama-88m",
            in_flight=8,
            device_tokens=16_384,
            host_tokens=16_384,
            disk_tokens=500_000,
        ),
    },
}
BACKED_UP = ("LooGLE, 6/s", "trace, slowly", "agents", "retrieval, two cores")
CASES["backups"] = {name: CASES["bubbles"][name] for name in BACKED_UP}


def measure(case: Case, changes: dict[str, Any], seed: int, trace: Path | None) -> Row | None:
    """One run; None where it needs a trace and there is none."""
    workload = case.workload(seed, trace)
    if workload is None:
        return None
    gc.set_threshold(*GC_THRESHOLDS)
    hardware = load_hardware(case.hardware)
    disk = struct_replace(hardware.disk, bandwidth_gb_s=hardware.disk.bandwidth_gb_s / case.disk_slower)
    setup_changes = {"backup_share": changes["backup_share"]} if "backup_share" in changes else {}
    cell = {name: value for name, value in changes.items() if name not in setup_changes}
    setup = Setup(
        hardware=struct_replace(hardware, disk=disk),
        model=load_model(case.model),
        config=CellConfig(**({"max_batch_tokens": PREFILL_TOKENS, "max_running": IN_FLIGHT} | cell)),
        page_size=32,
        device_tokens=case.device_tokens,
        host_tokens=case.host_tokens,
        disk_tokens=case.disk_tokens,
        rate=case.rate,
        in_flight=case.in_flight,
        requests=case.requests,
        seed=seed,
        **setup_changes,
    )
    simulation = Simulation(setup, workload)
    simulation.run()
    row = simulated.row_of(simulation)
    figures = simulation.figures()
    row["ttft_p50_ms"] = simulation.cell.figures.ttft_ms.quantile(0.5)
    row["disk_hit_ratio"] = figures["hit_tokens"].get("disk", 0) / max(1, figures["input_tokens"])
    row["counters"] = {name: figures["counters"][name] for name in COUNTERS if figures["counters"].get(name)}
    return row


def compare(part: str, name: str, case: Case, trace: Path | None) -> dict[str, list[Row]]:
    """A case with each variant, at each seed."""
    found: dict[str, list[Row]] = {}
    for variant, changes in VARIANTS[part].items():
        rows = [measure(case, changes, seed, trace) for seed in case.seeds]
        found[variant] = [row for row in rows if row is not None]
        for row in found[variant]:
            say(part, name, variant, row)
    return found


def say(part: str, name: str, variant: str, row: Row) -> None:
    """One line of progress."""
    print(
        f"{part:8} {name:24} {variant:19} {row['output_tokens_per_s']:8.1f} tokens/s  TTFT {row['ttft_ms']:8.0f} "
        f"p50 {row['ttft_p50_ms']:8.0f} p99 {row['ttft_p99_ms']:8.0f} ms  computed {row['computed_tokens']:9}  "
        f"stall {row['stall_s']:6.1f} s",
        file=sys.stderr,
        flush=True,
    )


def main() -> None:
    parser = results_file.arguments(__doc__)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="without one its cases are left out")
    parser.add_argument("--parts", default=",".join(VARIANTS))
    parser.add_argument("--cases", default="", metavar="NAME;...", help="only these")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="write here, after each case, and nowhere else")
    parser.add_argument("--add", default="", metavar="FILE,...", help="cases that were kept before")
    options = parser.parse_args()
    parts = [name for name in options.parts.split(",") if name]
    names = [name for name in options.cases.split(";") if name]
    faults = [f"there is no part {name!r}" for name in parts if name not in VARIANTS]
    faults += [f"there is no case {name!r}" for name in names if not any(name in cases for cases in CASES.values())]
    if faults:
        print(f"strata_switches: {'; '.join(faults)}", file=sys.stderr)
        raise SystemExit(2)
    found: dict[str, Any] = {}
    for name in filter(None, options.add.split(",")):
        for part, cases in json.loads(Path(name).read_text(encoding="utf-8")).items():
            found.setdefault(part, {}).update(cases)
    for part in parts:
        for name, case in CASES[part].items():
            if name in names or not names:
                found.setdefault(part, {})[name] = compare(part, name, case, options.trace)
                if options.keep is not None:
                    options.keep.write_text(json.dumps(found), encoding="utf-8")
    if options.keep is None:
        print(results_file.write("papers_strata_switches", {"simulated": True} | found, seed=SEEDS[0]))


if __name__ == "__main__":
    main()
