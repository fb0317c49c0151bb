"""HotPrefix on other machines and models, simulated: its Figures 10 to 12, Gemma 9B (5.2.2) and its section 1.1.

Figure 10 is Qwen2-72B on four A6000, tensor parallel; Figure 11 is Llama-2-13B on one, two and four A6000, each with a
copy of the model; Figure 12 is MMLU with Llama-3-8B on four kinds of devices that have equally much memory for KV. The
paper does not say how much that is. Where all examples fit on the device no policy has anything to choose, so every
comparison is also made at what runs and half of all examples, and Figure 12 at that alone.

``python -m bench.papers.hotprefix_machines [--part N] [--seed N] [--json]``; the whole run writes
``bench/results/papers_hotprefix_machines.json``, takes some minutes, and ``python -m tools.reference_docs`` then makes
the page.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from typing import Any

from msgspec.structs import replace

from bench import results_file
from bench.papers.hotprefix import (
    BATCH,
    DEFAULT_PART,
    HARDWARE,
    MODEL,
    QUESTIONS,
    Arrangement,
    Machine,
    Scale,
    measure,
    say,
    tokens_of,
)
from bench.papers.simulated import Row
from thermocline.simulate.profiles import HardwareProfile, load_hardware, load_model

BASELINES = {
    "lru": Arrangement("lru"),
    "vllm": Arrangement("lru", page_size=16),
    "hotprefix": Arrangement("hotprefix", host=True),
}
ALL_BASELINES = BASELINES | {name: Arrangement(name) for name in ("lfu", "fifo", "2q")}
DATA_PARALLEL = (1, 2, 4)
NAIVE_BATCH = 8  # 1.1
HALF = 0.5


@cache
def devices() -> dict[str, HardwareProfile]:
    """Figure 12's, all on PCIe 3.0 (5.1).

    The RTX 3090 is the A6000's profile with the datasheet's memory, and its rate for products that accumulate in 32
    bits.
    """
    a6000 = load_hardware(HARDWARE)
    smaller = replace(
        a6000,
        name="rtx-3090",
        memory=replace(a6000.memory, device_gib=24, bandwidth_gb_s=936),
        compute=replace(a6000.compute, peak_tflops={"bfloat16": 71.0, "float16": 71.0, "float32": 35.6}),
    )
    others = {name: replace(load_hardware(name), link=a6000.link) for name in ("a30", "a100-40g-sxm4")}
    return {"rtx-3090": smaller, "a30": others["a30"], HARDWARE: a6000, "a100-40g-sxm4": others["a100-40g-sxm4"]}


def half_tokens(dataset: str, scale: Scale) -> int:
    """Of a device on which what runs fits, and half of all examples."""
    examples, own = tokens_of(dataset, scale)
    return round(examples * HALF + own * BATCH[dataset])


def compared(machine: Machine, scale: Scale, title: str) -> dict[str, Any]:
    """Every dataset, at what fits on the devices and at half of its examples."""
    found: dict[str, Any] = {}
    for dataset in QUESTIONS:
        capacities = {"fits": machine.fitting_tokens, "half": half_tokens(dataset, scale)}
        found[dataset] = {}
        for name, tokens in capacities.items():
            rows = {}
            for bar, arrangement in BASELINES.items():
                rows[bar] = measure(
                    dataset, arrangement, scale, batch=BATCH[dataset], device_tokens=tokens, machine=machine
                )
                say(f"{title}, {dataset}, {name}", bar, rows[bar])
            found[dataset][name] = {"device_tokens": tokens, "rows": rows}
    return found


def data_parallel(scale: Scale) -> dict[str, dict[str, Row]]:
    """Figure 11: HotPrefix on more and more devices, each with the paper's batch."""
    hardware, model = load_hardware(HARDWARE), load_model(MODEL)
    found: dict[str, dict[str, Row]] = {}
    for dataset in QUESTIONS:
        found[dataset] = {}
        for workers in DATA_PARALLEL:
            machine = Machine(hardware, model, workers=workers)
            row = measure(
                dataset,
                BASELINES["hotprefix"],
                scale,
                batch=BATCH[dataset],
                device_tokens=machine.fitting_tokens,
                machine=machine,
            )
            found[dataset][str(workers)] = row
            say(f"data parallel, {dataset}", f"{workers} workers", row)
    return found


def by_device(scale: Scale) -> dict[str, dict[str, Row]]:
    """Figure 12: MMLU on each device, with the same memory for KV."""
    model, tokens = load_model("llama-3.1-8b"), half_tokens("mmlu", scale)
    found: dict[str, dict[str, Row]] = {}
    for name, hardware in devices().items():
        machine = Machine(hardware, model)
        found[name] = {}
        for bar, arrangement in ALL_BASELINES.items():
            row = measure("mmlu", arrangement, scale, batch=BATCH["mmlu"], device_tokens=tokens, machine=machine)
            found[name][bar] = row
            say(f"by device, {name}", bar, row)
    return found


def naive_offloading(scale: Scale) -> Row:
    """Section 1.1: an SGLang that copies all that it evicts to host memory, and brings nothing back."""
    machine = Machine(load_hardware(HARDWARE), load_model(MODEL))
    arrangement = Arrangement("lru", host=True, admission="all", promotion="off")
    row = measure("mmlu", arrangement, scale, batch=NAIVE_BATCH, device_tokens=machine.fitting_tokens, machine=machine)
    say("everything offloaded", "lru", row)
    return row


def main() -> None:
    parser = results_file.arguments(__doc__, "--seed")
    parser.add_argument("--part", type=int, default=DEFAULT_PART, help="one in so many questions of each dataset")
    parser.add_argument("--json", action="store_true", help="print the results, write nothing")
    options = parser.parse_args()
    if options.part < 1:
        print("hotprefix_machines: --part must be at least 1", file=sys.stderr)
        raise SystemExit(2)
    scale = Scale(options.part, options.seed)
    four = Machine(load_hardware(HARDWARE), load_model("qwen2-72b"), tensor_parallel=4)
    gemma = Machine(load_hardware(HARDWARE), load_model("gemma-9b"))
    results: dict[str, Any] = {
        "simulated": True,
        "one_in": scale.part,
        "tensor_parallel": compared(four, scale, "tensor parallel"),
        "gemma": compared(gemma, scale, "gemma"),
        "data_parallel": data_parallel(scale),
        "device_tokens": half_tokens("mmlu", scale),
        "by_device": by_device(scale),
        "naive_offloading": naive_offloading(scale),
    }
    if options.json or scale.part != DEFAULT_PART:
        print(json.dumps(results, indent=2))
        return
    print(results_file.write("papers_hotprefix_machines", results, seed=scale.seed))


if __name__ == "__main__":
    main()
