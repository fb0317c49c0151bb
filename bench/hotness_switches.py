"""HotPrefix's switches beside the default policy, simulated: selective admission, promotion and loads on demand.

Every case is run with everything that is evicted copied to host memory (``all``, as a cell does by default), with each
switch alone, with several and with all of them, and with the policy ``hotprefix`` in the place of the default one.
``loads`` is the way back from host memory on demand: a request hits a copy, and its batch waits for it layer by layer.
``no loads`` recomputes such hits, so that copies come back by promotion alone, as in the paper (3.4).

A group of cases is

- ``papers``: the datasets of HotPrefix's Figures 8 and 9 on one A6000 with Llama-2-13B, one question in ten with the
  paper's batches in flight, at what fits on the device and where half of the examples do;
- ``ablations``: those of its Figures 13 to 16, and MMLU on two machines of Figure 12;
- ``generated``: the families that policies are developed with (``bench/held_out.py``), eight in flight, with as much
  host memory as the device has and with four times as much;
- ``trace``: the first requests of a trace (``--trace``), Llama-3.1-8B on one H100;
- ``held-out``: families and seeds that nothing was chosen by, with as much host memory as the device has. They are run
  last, for the report.

``python -m bench.hotness_switches GROUP [--trace FILE] [--requests 250] [--seed 1]``
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bench import results_file
from bench.held_out import HELD_OUT_FAMILIES, HELD_OUT_SEEDS, HeldOutError, is_held_out
from bench.papers.hotprefix import (
    ABLATION_BATCH,
    BATCH,
    HARDWARE,
    MODEL,
    NEVER_LOAD,
    Scale,
    workload_of,
)
from bench.papers.hotprefix_machines import devices, half_tokens
from bench.papers.simulated import Row, run
from shared.messages.cell_events import CellConfig
from thermocline.simulate.cost import device_kv_tokens
from thermocline.simulate.profiles import HardwareProfile, ModelProfile, load_hardware, load_model
from thermocline.simulate.simulation import Setup
from thermocline.simulate.workloads import WORKLOADS, TraceWorkload, Workload, make_workload
from thermocline.simulate.workloads.agents import AgentOptions
from thermocline.simulate.workloads.documents import DocumentOptions
from thermocline.simulate.workloads.few_shot import FewShotOptions

ALL = {"admission": "all"}
SELECTIVE, PROMOTION = {"admission": "selective"}, {"promotion": "hotness"}
NO_LOADS = {"min_host_load_tokens": NEVER_LOAD}
HOTPREFIX = {"policy": "hotprefix"}
SWITCHES: dict[str, dict[str, Any]] = {
    "all": ALL,
    "admission": SELECTIVE,
    "promotion": ALL | PROMOTION,
    "both": SELECTIVE | PROMOTION,
    "no loads": ALL | NO_LOADS,
    "promotion, no loads": ALL | PROMOTION | NO_LOADS,
    "hotprefix, both, no loads": HOTPREFIX | SELECTIVE | PROMOTION | NO_LOADS,
}
"""Settings by name of an arrangement; ``both`` is selective admission and promotion. The last is the paper's own."""

PART = 10
"""One question in so many of HotPrefix's datasets."""

IN_FLIGHT = 8
TRACE_HARDWARE, TRACE_MODEL, TRACE_IN_FLIGHT = "h200-pcie5", "llama-3.1-8b", 16
GROUPS = ("papers", "ablations", "generated", "trace", "held-out")
HOST_SHARES = (1, 4)
"""Host memory over the device's part for KV."""


@dataclass(frozen=True, slots=True)
class Case:
    """A workload on a machine. ``workload`` makes it anew for every run."""

    group: str
    label: str
    hardware: HardwareProfile
    model: ModelProfile
    device_tokens: int
    in_flight: int
    workload: Callable[[], Workload]
    host_share: int = 1
    requests: int | None = None

    def run(self, settings: dict[str, Any], seed: int) -> Row:
        """Simulate with these settings in the place of a cell's defaults."""
        setup = Setup(
            hardware=self.hardware,
            model=self.model,
            config=CellConfig(**settings),
            device_tokens=self.device_tokens,
            host_tokens=self.host_share * self.device_tokens,
            in_flight=self.in_flight,
            requests=self.requests,
            seed=seed,
        )
        return run(setup, self.workload())


def papers(seed: int) -> Iterator[Case]:
    """The workloads of HotPrefix's Figures 8 and 9, as a cell would serve them: all defaults, pages of 16 tokens."""
    scale, a6000, llama = Scale(PART, seed), load_hardware(HARDWARE), load_model(MODEL)
    fitting = device_kv_tokens(a6000, llama)
    for dataset, batch in BATCH.items():
        half, asked = half_tokens(dataset, scale), _datasets(dataset, scale)
        yield Case("papers", f"{dataset}, {batch} in flight", a6000, llama, fitting, batch, asked)
        yield Case("papers", f"{dataset}, half fits", a6000, llama, half, batch, asked)


def ablations(seed: int) -> Iterator[Case]:
    """Those of its Figures 13 to 16, with smaller batches, and MMLU on the slowest and the fastest of Figure 12."""
    scale, a6000, llama = Scale(PART, seed), load_hardware(HARDWARE), load_model(MODEL)
    fitting = device_kv_tokens(a6000, llama)
    for dataset, batch in ABLATION_BATCH.items():
        asked = _datasets(dataset, scale)
        yield Case("ablations", f"{dataset}, {batch} in flight", a6000, llama, fitting, batch, asked)
    half, batch, asked = half_tokens("mmlu", scale), BATCH["mmlu"], _datasets("mmlu", scale)
    for name in ("rtx-3090", "a100-40g-sxm4"):
        label, model = f"mmlu, Llama-3-8B on {name}", load_model("llama-3.1-8b")
        yield Case("ablations", label, devices()[name], model, half, batch, asked)


def _datasets(dataset: str, scale: Scale) -> Callable[[], Workload]:
    return lambda: workload_of(dataset, scale)


def generated(seed: int, requests: int, families: tuple[str, ...], group: str = "generated") -> Iterator[Case]:
    """Families of the simulator, of such sizes that the longest prompt fits on the device."""
    a6000, llama = load_hardware(HARDWARE), load_model(MODEL)
    tokens = device_kv_tokens(a6000, llama)
    own: dict[str, msgspec.Struct] = {
        "agents": AgentOptions(max_tokens=12_000),
        "documents": DocumentOptions(prompt_tokens=6000),
    }
    named = {f"few-shot {name}": ("few-shot", FewShotOptions(dataset=name)) for name in BATCH}  # type: ignore[arg-type]
    for share in HOST_SHARES if group == "generated" else HOST_SHARES[:1]:
        for family in families:
            chosen = named if family == "few-shot" else {family: (family, own.get(family) or WORKLOADS[family][0]())}
            for label, (kind, options) in chosen.items():
                asked = _made(kind, options, seed)
                text = f"{label}, seed {seed}" if group == "held-out" else label
                yield Case(group, text, a6000, llama, tokens, IN_FLIGHT, asked, share, requests)


def _made(kind: str, options: msgspec.Struct, seed: int) -> Callable[[], Workload]:
    return lambda: make_workload(kind, options, seed)


def trace(path: Path, requests: int) -> Iterator[Case]:
    """The first requests of a trace, as fast as answers come."""
    hardware, model = load_hardware(TRACE_HARDWARE), load_model(TRACE_MODEL)
    tokens = device_kv_tokens(hardware, model)

    def asked() -> Workload:
        return TraceWorkload(path, limit=requests, is_timed=False)

    for share in HOST_SHARES:
        yield Case("trace", path.stem, hardware, model, tokens, TRACE_IN_FLIGHT, asked, share, requests)


def held_out(seed: int, requests: int) -> Iterator[Case]:
    """Families and a seed that are held out."""
    yield from generated(seed, requests, HELD_OUT_FAMILIES, "held-out")
    families = tuple(family for family in WORKLOADS if family not in HELD_OUT_FAMILIES)
    yield from generated(HELD_OUT_SEEDS * seed, requests, families, "held-out")


def cases_of(options: argparse.Namespace) -> list[Case]:
    """Those of the group that is asked for. Raises HeldOutError where a seed is not for development."""
    if is_held_out("few-shot", options.seed):
        raise HeldOutError(f"seed {options.seed} is held out")
    families = tuple(family for family in WORKLOADS if family not in HELD_OUT_FAMILIES)
    if options.group == "papers":
        return list(papers(options.seed))
    if options.group == "ablations":
        return list(ablations(options.seed))
    if options.group == "generated":
        return list(generated(options.seed, options.requests, families))
    if options.group == "trace":
        return list(trace(options.trace, options.requests))
    return list(held_out(options.seed, options.requests))


def main() -> None:
    known = results_file.arguments(__doc__, "--seed")
    known.add_argument("group", choices=GROUPS)
    known.add_argument("--requests", type=int, default=250, help="of each case but those of the papers")
    known.add_argument("--trace", type=Path, help="trace in the Mooncake format")
    options = known.parse_args()
    if (options.group == "trace") != (options.trace is not None):
        known.error("--trace goes with the group trace")
    results: dict[str, Any] = {"requests": options.requests, "rows": []}
    name = f"hotness_switches_{options.group.replace('-', '_')}"
    for case in cases_of(options):  # Each is kept as soon as it is over.
        results["rows"].append(measured(case, options.seed))
        print(results_file.write(name, results, seed=options.seed))


def measured(case: Case, seed: int) -> dict[str, Any]:
    """A case with every arrangement, and one line of progress for each."""
    found: dict[str, Any] = {
        "group": case.group,
        "workload": case.label,
        "device_tokens": case.device_tokens,
        "host_share": case.host_share,
    }
    for name, settings in SWITCHES.items():
        row = case.run(settings, seed)
        found[name] = figures(row)
        base = found["all"]
        print(
            f"{case.group:9} {case.label:34} {case.host_share}x {name:26} hits {found[name]['hit_ratio']:.3f}"
            f"  {found[name]['hit_ratio'] / base['hit_ratio']:.2f}x"
            f"  TTFT {found[name]['ttft_mean_ms'] / base['ttft_mean_ms']:.2f}x"
            f"  time {found[name]['seconds'] / base['seconds']:.2f}x",
            flush=True,
        )
    return found


def figures(row: Row) -> dict[str, float]:
    """Hit tokens of all prompt tokens, by tier; times; and tokens that were computed and moved."""
    return {
        "hit_ratio": row["device_hit_ratio"] + row["host_hit_ratio"],
        "device_hit_ratio": row["device_hit_ratio"],
        "ttft_mean_ms": row["ttft_ms"],
        "ttft_p99_ms": row["ttft_p99_ms"],
        "seconds": row["seconds"],
        "computed_tokens": row["computed_tokens"],
        "backed_up_tokens": row["backed_up_tokens"],
        "loaded_tokens": row["loaded_tokens"],
        "promoted_tokens": row["promoted_tokens"],
    }


if __name__ == "__main__":
    main()
