"""HotPrefix's Figures 8, 9 and 13 to 16, simulated: Llama-2-13B on one A6000 behind PCIe 3.0 (section 5).

Every run is a dataset's shuffled questions from a closed loop that keeps the paper's batch size in flight. The
rows of the paper compute first come, first served and never load on demand: host copies come back by promotion
alone (3.4). Pages have one token and are copied one by one, as in the SGLang that the paper extends (section 4).
``--part`` shortens every dataset, and the frequency threshold and the aging period with it.

``python -m bench.papers.hotprefix [--full] [--seed N] [--json]``; the whole run writes
``bench/results/papers_hotprefix.json``, and ``python -m tools.reference_docs`` then makes the page.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

from bench import results_file
from bench.papers.simulated import Row, run
from services.scheduler.core.cache.eviction import POLICIES
from shared.messages.cell_events import CellConfig, Promotion
from thermocline.simulate.cost import Io, device_kv_tokens
from thermocline.simulate.profiles import HardwareProfile, ModelProfile, load_hardware, load_model
from thermocline.simulate.simulation import Setup
from thermocline.simulate.workloads.few_shot import FewShotOptions, FewShotWorkload

HARDWARE, MODEL = "a6000-pcie3", "llama-2-13b"
QUESTIONS = {"mmlu": 14_042, "hellaswag": 10_042, "bbh": 6_511, "ceval": 12_342}
BATCH = {"mmlu": 64, "hellaswag": 32, "bbh": 64, "ceval": 32}  # 5.2
ABLATION_BATCH = {"mmlu": 32, "hellaswag": 32, "ceval": 4}  # 5.3
ADMISSION_FREQUENCY = 10  # 5.2
AGING_REQUESTS = 64  # The paper does not say.
NEVER_LOAD = 1 << 30  # Tokens: no host hit is as long.
DEFAULT_PART, DEFAULT_FRACTIONS, FULL_FRACTIONS = 5, (0.5,), (0.25, 0.5, 0.75)
OURS = "thermocline"


@dataclass(frozen=True, slots=True)
class Arrangement:
    """One bar of a figure. ``is_ours`` means the cell's own defaults, on-demand loads and scheduling included."""

    policy: str
    host: bool = False
    admission: str = "selective"
    promotion: Promotion = "hotness"
    page_size: int = 1
    io: Io = "per-page"
    is_ours: bool = False


@dataclass(frozen=True, slots=True)
class Machine:
    """What serves: ``workers`` groups of ``tensor_parallel`` devices each."""

    hardware: HardwareProfile
    model: ModelProfile
    tensor_parallel: int = 1
    workers: int = 1

    @property
    def fitting_tokens(self) -> int:
        """Of KV on each worker: 90% of device memory less the weights."""
        return device_kv_tokens(self.hardware, self.model, self.tensor_parallel)


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of each dataset is run."""

    part: int  # One in so many questions.
    seed: int

    def questions(self, dataset: str) -> int:
        return QUESTIONS[dataset] // self.part


def device_only() -> dict[str, Arrangement]:
    """The baselines of Figure 8 (5.1): one pool, on the device. vLLM is LRU with whole blocks of 16 tokens."""
    names = {name: Arrangement(name) for name in ("lru", "lfu", "fifo", "2q")}
    return names | {"vllm": Arrangement("lru", page_size=16)}


def ours() -> dict[str, Arrangement]:
    """Our policy alone on the device, and the whole cell as it is by default with as much host memory."""
    policy = OURS if OURS in POLICIES else CellConfig().policy
    whole = Arrangement(policy, host=True, admission="all", promotion="off", page_size=16, io="assisted", is_ours=True)
    return {f"{policy}, device only": Arrangement(policy), "our defaults": whole}


def end_to_end() -> dict[str, Arrangement]:
    """Figures 8 and 9."""
    return device_only() | {"hotprefix": Arrangement("hotprefix", host=True)} | ours()


def ablations() -> dict[str, Arrangement]:
    """Figures 13 to 16. The names say what is switched on: eviction, admission and promotion by hotness."""
    bars = {
        "baseline": Arrangement("lru"),
        "E": Arrangement("hotprefix"),
        "A+P": Arrangement("lru", host=True),
        "E+A+P": Arrangement("hotprefix", host=True),
        "E+P, all admitted": Arrangement("hotprefix", host=True, admission="all"),
    }
    bars |= {f"{name}, A+P": Arrangement(name, host=True) for name in ("lfu", "fifo", "2q")}
    bars |= {
        f"promotion by {by}": Arrangement("hotprefix", host=True, promotion=by)
        for by in ("recency", "frequency", "depth")
    }
    if OURS in POLICIES:
        bars[f"{OURS}, A+P"] = Arrangement(OURS, host=True)
    return bars | {"our defaults": ours()["our defaults"]}


def config_of(arrangement: Arrangement, part: int) -> CellConfig:
    """The cell's settings; thresholds in uses and periods in requests shrink with the run.

    The paper keeps no pages free ahead of need, so its rows have no reserve.
    """
    if arrangement.is_ours:
        return CellConfig(policy=arrangement.policy)
    return CellConfig(
        policy=arrangement.policy,
        admission=arrangement.admission,
        promotion=arrangement.promotion if arrangement.host else "off",
        admission_frequency=max(2, round(ADMISSION_FREQUENCY / part)),
        aging_requests=max(1, round(AGING_REQUESTS / part)),
        schedule="fcfs",
        defer_tokens=0,
        bubble_filling=False,
        min_host_load_tokens=NEVER_LOAD,
        reserve_fraction=0.0,
        max_running=max(BATCH.values()),
    )


def measure(
    dataset: str,
    arrangement: Arrangement,
    scale: Scale,
    *,
    batch: int,
    device_tokens: int,
    machine: Machine | None = None,
) -> Row:
    """One bar, on the paper's A6000 unless said otherwise.

    Host memory is as large as the devices' part for KV (3.3.2). ``batch`` and ``device_tokens`` are of each worker.
    """
    on = machine or Machine(load_hardware(HARDWARE), load_model(MODEL))
    setup = Setup(
        hardware=on.hardware,
        model=on.model,
        config=config_of(arrangement, scale.part),
        workers=on.workers,
        tensor_parallel=on.tensor_parallel,
        page_size=arrangement.page_size,
        device_tokens=device_tokens,
        host_tokens=device_tokens * on.workers if arrangement.host else 0,
        io=arrangement.io,
        in_flight=batch * on.workers,
        seed=scale.seed,
    )
    return run(setup, workload_of(dataset, scale))


def workload_of(dataset: Any, scale: Scale) -> FewShotWorkload:
    return FewShotWorkload(FewShotOptions(dataset=dataset, questions=scale.questions(dataset)), scale.seed)


def tokens_of(dataset: str, scale: Scale) -> tuple[int, float]:
    """Tokens of all examples together, and what a running request has of its own on average."""
    examples, own, requests = {}, 0, 0
    for asked in workload_of(dataset, scale).requests():
        examples[asked.spans[0].name] = asked.spans[0].tokens
        own += asked.spans[1].tokens + asked.answer.tokens
        requests += 1
    return sum(examples.values()), own / requests


def end_to_end_part(dataset: str, scale: Scale, fractions: tuple[float, ...]) -> dict[str, Any]:
    """Figure 8 and 9 for a dataset: at what fits on the device, and at fractions of the examples."""
    batch = BATCH[dataset]
    fitting = device_kv_tokens(load_hardware(HARDWARE), load_model(MODEL))
    examples, own = tokens_of(dataset, scale)
    rows = {}
    for name, arrangement in end_to_end().items():
        rows[name] = measure(dataset, arrangement, scale, batch=batch, device_tokens=fitting)
        say(dataset, name, rows[name])
    by_fraction = {}
    for fraction in fractions:
        device_tokens = round(examples * fraction + own * batch)
        bars = {"lru": Arrangement("lru"), "lfu": Arrangement("lfu"), "hotprefix": Arrangement("hotprefix", host=True)}
        found = {}
        for name, arrangement in bars.items():
            found[name] = measure(dataset, arrangement, scale, batch=batch, device_tokens=device_tokens)
            say(f"{dataset} at {fraction:.0%}", name, found[name])
        by_fraction[f"{fraction:.0%}"] = {"device_tokens": device_tokens, "rows": found}
    return {
        "questions": scale.questions(dataset),
        "batch": batch,
        "device_tokens": fitting,
        "examples_tokens": examples,
        "own_tokens": own,
        "rows": rows,
        "by_fraction": by_fraction,
    }


def ablation_part(dataset: str, scale: Scale) -> dict[str, Any]:
    """Figures 13 to 16 for a dataset."""
    device_tokens = device_kv_tokens(load_hardware(HARDWARE), load_model(MODEL))
    batch = ABLATION_BATCH[dataset]
    rows = {}
    for name, arrangement in ablations().items():
        rows[name] = measure(dataset, arrangement, scale, batch=batch, device_tokens=device_tokens)
        say(f"{dataset}, batch {batch}", name, rows[name])
    return {"questions": scale.questions(dataset), "batch": batch, "device_tokens": device_tokens, "rows": rows}


def say(title: str, name: str, row: Row) -> None:
    """One line of progress, readable as a table."""
    print(
        f"{title:22} {name:26} device hits {row['device_hit_ratio']:.3f}  host {row['host_hit_ratio']:.3f}  "
        f"{row['seconds']:9.1f} s  backups {row['backup_s']:7.1f} s  promotions {row['promotion_s']:7.1f} s",
        file=sys.stderr,
        flush=True,
    )


def main() -> None:
    parser = results_file.arguments(__doc__, "--seed")
    parser.add_argument("--full", action="store_true", help="whole datasets, and more capacities")
    parser.add_argument("--part", type=int, default=DEFAULT_PART, help="one in so many questions of each dataset")
    parser.add_argument("--datasets", default=",".join(QUESTIONS))
    parser.add_argument("--json", action="store_true", help="print the results, write nothing")
    options = parser.parse_args()
    datasets = options.datasets.split(",")
    faults = [f"there is no dataset {name!r}" for name in datasets if name not in QUESTIONS]
    if options.part < 1:
        faults.append("--part must be at least 1")
    if faults:
        print(f"hotprefix: {'; '.join(faults)}; known are {', '.join(QUESTIONS)}", file=sys.stderr)
        raise SystemExit(2)
    scale = Scale(1 if options.full else options.part, options.seed)
    fractions = FULL_FRACTIONS if options.full else DEFAULT_FRACTIONS
    results: dict[str, Any] = {
        "simulated": True,
        "hardware": HARDWARE,
        "model": MODEL,
        "one_in": scale.part,
        "admission_frequency": config_of(Arrangement("hotprefix", host=True), scale.part).admission_frequency,
        "aging_requests": config_of(Arrangement("hotprefix", host=True), scale.part).aging_requests,
        "our_policy": ours()["our defaults"].policy,
        "end_to_end": {dataset: end_to_end_part(dataset, scale, fractions) for dataset in datasets},
        "ablations": {dataset: ablation_part(dataset, scale) for dataset in datasets if dataset in ABLATION_BATCH},
    }
    if options.json or len(datasets) < len(QUESTIONS):
        print(json.dumps(results, indent=2))
        return
    print(results_file.write("papers_hotprefix", results, seed=scale.seed))


if __name__ == "__main__":
    main()
