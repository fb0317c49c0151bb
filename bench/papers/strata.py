"""Strata's Figures 9 and 11, and a burst on one new document, simulated: Qwen2.5-14B on one H200 (section 5.3).

LooGLE as in Table 1: 105 documents of 21,613 tokens on average and 2,410 questions; at most 128 in flight, Poisson
arrivals (5.1), a cold start. The baseline stands for SGLang-HiCache: pages of 32 tokens copied one by one, layer by
layer beside the computation, first come, first served, without any of Strata's scheduling. All runs have pages of 32
tokens; the paper's page of one token takes five times as long to simulate and changes little (``--page-size 1``).

``python -m bench.papers.strata [--queries N] [--seed N] [--page-size N] [--json]``; the whole run writes
``bench/results/papers_strata.json``, and ``python -m tools.reference_docs`` then makes the page.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any, Literal

from bench import results_file
from bench.papers.simulated import Row, run
from shared.messages.cell_events import CellConfig
from thermocline.simulate.cost import Io
from thermocline.simulate.profiles import HardwareProfile, ModelProfile, load_hardware, load_model
from thermocline.simulate.simulation import Setup
from thermocline.simulate.workloads import Workload
from thermocline.simulate.workloads.documents import DocumentOptions, DocumentWorkload

Distance = Literal["min", "shuffled", "max"]

HARDWARE, MODEL = "h200-pcie5", "qwen2.5-14b"
QUERIES = 2_410
IN_FLIGHT = 128  # 5.1
HOST_BYTES = 10**12  # 5.1
PREFILL_TOKENS = 8192  # The chunked-prefill budget that SGLang takes on such a device.
RATES = (1.0, 2.0, 3.0, 4.0, 6.0, 10.0)
DISTANCES: tuple[Distance, ...] = ("min", "shuffled", "max")
BURST = 32
BURST_TOKENS = (2_000, 21_613)


@dataclass(frozen=True, slots=True)
class Variant:
    """What is switched on. The defaults are the baseline's."""

    io: Io = "per-page"
    schedule: str = "fcfs"
    defer_tokens: int = 0
    bubble_filling: bool = False


DEFERRED = 100  # 4.3.1
FULL = Variant("assisted", "balanced", DEFERRED, bubble_filling=True)

FIGURE_9 = {
    "HiCache": Variant(),
    "+ schedule": Variant("per-page", "balanced", DEFERRED, bubble_filling=True),
    "+ IO": Variant("assisted"),
    "+ IO + LPM": Variant("assisted", "lpm"),
    "full": FULL,
}
FIGURE_11 = {
    "baseline": Variant(),
    "+ deferral": Variant(defer_tokens=DEFERRED),
    "+ IO": Variant("assisted", defer_tokens=DEFERRED),
    "+ balanced batches": Variant("assisted", "balanced", DEFERRED),
    "+ bubble filling": FULL,
}
"""Each adds to the one before (5.3.3)."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is run, and how."""

    queries: int
    seed: int
    page_size: int


@dataclass(frozen=True, slots=True)
class Machine:
    """What serves: one group of ``tensor_parallel`` devices, with ``host_bytes`` of host memory for KV."""

    hardware: HardwareProfile
    model: ModelProfile
    tensor_parallel: int = 1
    host_bytes: int = HOST_BYTES
    device_tokens: int | None = None  # None is what fits.


def h200() -> Machine:
    """That of the in-depth analysis (5.3)."""
    return Machine(load_hardware(HARDWARE), load_model(MODEL))


def measure(
    variant: Variant, options: DocumentOptions, scale: Scale, *, rate: float | None = None, on: Machine | None = None
) -> Row:
    """One run; without a rate the next question comes when one of those in flight is answered."""
    return measure_workload(variant, DocumentWorkload(options, scale.seed), scale, on or h200(), rate=rate)


def measure_workload(variant: Variant, workload: Workload, scale: Scale, on: Machine, *, rate: float | None) -> Row:
    """The same for any workload."""
    setup = Setup(
        hardware=on.hardware,
        model=on.model,
        config=CellConfig(
            schedule=variant.schedule,
            defer_tokens=variant.defer_tokens,
            bubble_filling=variant.bubble_filling,
            max_batch_tokens=PREFILL_TOKENS,
            max_running=IN_FLIGHT,
        ),
        tensor_parallel=on.tensor_parallel,
        page_size=scale.page_size,
        device_tokens=on.device_tokens,
        host_tokens=on.host_bytes // on.model.kv_token_bytes,
        io=variant.io,
        rate=rate,
        in_flight=IN_FLIGHT,
        seed=scale.seed,
    )
    return run(setup, workload)


def curves(scale: Scale) -> dict[str, list[Row]]:
    """Figure 9: each variant at every rate."""
    found: dict[str, list[Row]] = {}
    for name, variant in FIGURE_9.items():
        found[name] = []
        for rate in RATES:
            row = measure(variant, DocumentOptions(queries=scale.queries), scale, rate=rate)
            found[name].append({"rate": rate} | row)
            say(f"figure 9, {rate:g}/s", name, row)
    return found


def distances(scale: Scale) -> dict[str, dict[str, Row]]:
    """Figure 11: peak throughput, with 128 always in flight, as one thing after another is switched on."""
    found: dict[str, dict[str, Row]] = {}
    for distance in DISTANCES:
        found[distance] = {}
        for name, variant in FIGURE_11.items():
            row = measure(variant, DocumentOptions(queries=scale.queries, distance=distance), scale)
            found[distance][name] = row
            say(f"figure 11, {distance}", name, row)
    return found


def bursts(scale: Scale) -> dict[str, dict[str, Row]]:
    """Requests that all ask about one new document at once."""
    found: dict[str, dict[str, Row]] = {}
    for tokens in BURST_TOKENS:
        options = DocumentOptions(contexts=1, queries=BURST, prompt_tokens=tokens)
        document, least = burst_tokens(options, scale)
        found[str(tokens)] = {}
        for name, deferred in (("without deferral", 0), ("with deferral", DEFERRED)):
            row = measure(Variant("assisted", "balanced", deferred, bubble_filling=True), options, scale)
            found[str(tokens)][name] = row | {"document_tokens": document, "least_tokens": least}
            say(f"burst on {tokens} tokens", name, row)
    return found


def burst_tokens(options: DocumentOptions, scale: Scale) -> tuple[int, int]:
    """Tokens of the document, and the fewest that can be computed: it once, each question, and each page cut short."""
    asked = list(DocumentWorkload(options, scale.seed).requests())
    document = asked[0].spans[0].tokens
    questions = sum(one.spans[1].tokens for one in asked)
    return document, document + questions + (len(asked) - 1) * (document % scale.page_size)


def say(title: str, name: str, row: Row) -> None:
    """One line of progress, readable as a table."""
    print(
        f"{title:22} {name:20} {row['output_tokens_per_s']:7.1f} output tokens/s  TTFT {row['ttft_ms']:9.0f} ms  "
        f"hits {row['device_hit_ratio']:.3f} + {row['host_hit_ratio']:.3f}  stall {row['stall_s']:7.1f} s",
        file=sys.stderr,
        flush=True,
    )


def main() -> None:
    parser = results_file.arguments(__doc__, "--seed")
    parser.add_argument("--queries", type=int, default=QUERIES, help="fewer make a shorter run, written nowhere")
    parser.add_argument("--page-size", type=int, default=32)
    parser.add_argument("--json", action="store_true", help="print the results, write nothing")
    options = parser.parse_args()
    faults = [f"--{name} must be at least 1" for name in ("queries", "page-size") if vars(options)[_key(name)] < 1]
    if faults:
        print(f"strata: {'; '.join(faults)}", file=sys.stderr)
        raise SystemExit(2)
    scale = Scale(options.queries, options.seed, options.page_size)
    results: dict[str, Any] = {
        "simulated": True,
        "hardware": HARDWARE,
        "model": MODEL,
        "queries": scale.queries,
        "page_size": scale.page_size,
        "in_flight": IN_FLIGHT,
        "prefill_tokens": PREFILL_TOKENS,
        "curves": curves(scale),
        "distances": distances(scale),
        "bursts": bursts(scale),
    }
    if options.json or scale.queries != QUERIES:
        print(json.dumps(results, indent=2))
        return
    print(results_file.write("papers_strata", results, seed=scale.seed))


def _key(name: str) -> str:
    return name.replace("-", "_")


if __name__ == "__main__":
    main()
