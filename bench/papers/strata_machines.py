"""Strata's other figures, simulated: 1 to 3, 8, 10, 13 and 14 (its sections 1, 3.1, 5.2, 5.3.2 and 5.4).

Systems are variants of one cell, as in :mod:`bench.papers.strata`: ``SGLang`` has no host tier, ``HiCache`` copies
pages of 32 tokens one by one, ``+ IO`` copies GPU-assisted, ``Strata`` also schedules. vLLM-LMCache and
TensorRT-HiCache are engines of their own and are not modelled. ``oracle`` is Strata on a link without latency and a
thousand times as fast (5.4: infinite bandwidth).

``python -m bench.papers.strata_machines [--parts NAME,...] [--queries N] [--seed N] [--json] [--add FILE,...]``; the
whole run writes ``bench/results/papers_strata_machines.json``, takes some minutes, and ``python -m
tools.reference_docs`` then makes the page. Parts that were run with ``--json`` are joined by ``--add``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from bench import results_file
from bench.papers.simulated import Row
from bench.papers.strata import FULL, QUERIES, Machine, Scale, Variant, h200, measure, measure_workload, say
from thermocline.simulate.cost import Io, costs_of, load_s, overlapped_s, step_s
from thermocline.simulate.profiles import HardwareProfile, ModelProfile, load_hardware, load_model
from thermocline.simulate.workloads.chat import ChatOptions, ChatWorkload
from thermocline.simulate.workloads.documents import DocumentOptions

PAGE_SIZE = 32
HICACHE, PLUS_IO = Variant(), Variant("assisted")
NO_HOST_BYTES = 0

WAYS: tuple[Io, ...] = ("per-page", "assisted")

LOAD_RATIOS = (1, 3, 10, 30, 100, 300, 1000)
NEW_TOKENS = (32, 256)
"""Of a batch, at each ratio of loaded tokens to new ones (Figure 1): a question of LooGLE's, and several."""

COPIED_TOKENS = 8192  # Figure 3
PAGE_SIZES = (1, 32, 128, 512, 1024)
LARGE_PAGE_SIZES = PAGE_SIZES[2:]
CHAT_PAGE_SIZES = (1, 16, 64, 256, 1024)
CHAT_TOKENS = 500_000
"""Of the device. The paper does not say Figure 2's; for ShareGPT it has 500 thousand elsewhere (5.1)."""

SHORT_TOKENS = 100_000
"""The same for a run of so many conversations, instead of the paper's 500 thousand for a hundred thousand of them."""

CHATS = 800
CHAT_RATE = 8.0  # Conversations a second. The paper does not give the rate of Figure 2.

RATES: dict[str, tuple[float, ...]] = {"llama-3.1-8b": (1.0, 6.0, 12.0), "llama-3.1-70b": (0.5, 2.0, 6.0)}
"""Figure 8. Qwen2.5-14B's are Figure 9's (:mod:`bench.papers.strata`)."""

NO_HOST_MODEL = "llama-3.1-8b"
"""Of which a system without a host tier is shown, too: all others would recompute as much."""

LINK_RATE = 6.0
GH200_HOST_BYTES = 400 * 10**9  # 5.1

MISTRAL = ModelProfile(
    name="mistral-24b",
    layers=40,
    heads=32,
    kv_heads=8,
    head_dim=128,
    hidden=5120,
    intermediate=32_768,
    vocabulary=131_072,
    parameters=23_572_403_200,
    tied_embeddings=False,
    dtype="bfloat16",
)
"""Mistral Small, of which no other simulation has need."""


def machine(model: str) -> Machine:
    """The H200 platform: the 70B model on four devices (5.1)."""
    return Machine(load_hardware("h200-pcie5"), load_model(model), tensor_parallel=4 if "70b" in model else 1)


def stalls() -> list[dict[str, float]]:
    """Figure 1: what of a prefill batch waits for its loads, by the ratio of loaded tokens to new ones."""
    on, rows = h200(), []
    for new in NEW_TOKENS:
        for ratio in LOAD_RATIOS:
            loaded = ratio * new
            row: dict[str, float] = {"new_tokens": float(new), "ratio": float(ratio)}
            for io in WAYS:
                costs = costs_of(on.hardware, on.model, page_size=PAGE_SIZE, io=io)
                computing = step_s(costs, [(loaded, loaded + new)], 0, 0)
                wall, stall = overlapped_s(costs, computing, load_s(costs, loaded))
                row[io] = stall / wall
            rows.append(row)
    return rows


def copies() -> list[dict[str, Any]]:
    """Figure 3: 8,192 tokens of Llama-3.1-8B, by page size, as the link model has them."""
    model, rows = load_model("llama-3.1-8b"), []
    for hardware in (load_hardware("h200-pcie5"), load_hardware("gh200")):
        peak = hardware.link.bandwidth_gb_s * 1e9
        for page_size in PAGE_SIZES:
            seconds = {io: load_s(costs_of(hardware, model, page_size=page_size, io=io), COPIED_TOKENS) for io in WAYS}
            nbytes = COPIED_TOKENS * model.kv_token_bytes
            rows.append(
                {
                    "hardware": hardware.name,
                    "page_size": page_size,
                    "per_page_ms": seconds["per-page"] * 1e3,
                    "per_page_share": nbytes / seconds["per-page"] / peak,
                    "assisted_ms": seconds["assisted"] * 1e3,
                    "assisted_share": nbytes / seconds["assisted"] / peak,
                }
            )
    return rows


def page_sizes_of_chats(scale: Scale) -> dict[str, Row]:
    """Figure 2: conversations on a device alone, with larger and larger pages."""
    on = Machine(load_hardware("h200-pcie5"), MISTRAL, host_bytes=NO_HOST_BYTES, device_tokens=CHAT_TOKENS)
    found = {}
    for page_size in CHAT_PAGE_SIZES:
        workload = ChatWorkload(ChatOptions(sessions=min(CHATS, scale.queries)), scale.seed)
        at = Scale(scale.queries, scale.seed, page_size)
        found[str(page_size)] = measure_workload(HICACHE, workload, at, on, rate=CHAT_RATE)
        say("figure 2", f"page size {page_size}", found[str(page_size)])
    return found


def curves_on(scale: Scale, model: str) -> dict[str, list[Row]]:
    """Figure 8, LooGLE: each system at every rate. Without a host tier the highest will do: its peak is compared."""
    on = machine(model)
    rates = RATES[model]
    systems = {"HiCache": (HICACHE, on, rates), "Strata": (FULL, on, rates)}
    if model == NO_HOST_MODEL:
        systems["SGLang"] = (HICACHE, replace_host(on, NO_HOST_BYTES), rates[-1:])
    found: dict[str, list[Row]] = {}
    for name, (variant, where, asked) in systems.items():
        found[name] = []
        for rate in asked:
            row = measure(variant, DocumentOptions(queries=scale.queries), scale, rate=rate, on=where)
            found[name].append({"rate": rate} | row)
            say(f"{model}, loogle, {rate:g}/s", name, row)
    return found


def replace_host(on: Machine, host_bytes: int) -> Machine:
    return Machine(on.hardware, on.model, on.tensor_parallel, host_bytes, on.device_tokens)


def peaks_on(dataset: Any, scale: Scale, model: str) -> dict[str, Row]:
    """A panel of which only peaks are compared: always as many in flight as may be."""
    options = DocumentOptions(dataset=dataset, queries=0 if scale.queries == QUERIES else scale.queries)
    found = {}
    for name, variant in (("HiCache", HICACHE), ("Strata", FULL)):
        found[name] = measure(variant, options, scale, on=machine(model))
        say(f"{model}, {dataset}", name, found[name])
    return found


def short_contexts(scale: Scale, model: str) -> dict[str, Row]:
    """Figure 8, last row: ShareGPT, with so little memory on the device that conversations leave it (5.1)."""
    on = machine(model)
    on = Machine(on.hardware, on.model, on.tensor_parallel, on.host_bytes, SHORT_TOKENS)
    found = {}
    systems = {"SGLang": (HICACHE, replace_host(on, NO_HOST_BYTES)), "HiCache": (HICACHE, on), "Strata": (FULL, on)}
    for name, (variant, where) in systems.items():
        workload = ChatWorkload(ChatOptions(sessions=min(CHATS, scale.queries)), scale.seed)
        found[name] = measure_workload(variant, workload, scale, where, rate=CHAT_RATE)
        say(f"{model}, ShareGPT", name, found[name])
    return found


def page_sizes(scale: Scale) -> dict[str, Row]:
    """Figure 10: HiCache with larger and larger pages. Its 32, and GPU-assisted copies, are Figure 9's."""
    options = DocumentOptions(queries=scale.queries)
    found = {}
    for page_size in LARGE_PAGE_SIZES:
        found[str(page_size)] = measure(HICACHE, options, Scale(scale.queries, scale.seed, page_size))
        say("figure 10", f"HiCache, {page_size}", found[str(page_size)])
    return found


def links(scale: Scale) -> dict[str, Row]:
    """Figures 13 and 14: PCIe 5.0 against Grace Hopper, and a link that takes no time."""
    model = load_model("llama-3.1-8b")
    pcie, hopper = load_hardware("h200-pcie5"), load_hardware("gh200")
    systems = {
        "HiCache, PCIe": (HICACHE, pcie),
        "+ IO, PCIe": (PLUS_IO, pcie),
        "Strata, PCIe": (FULL, pcie),
        "HiCache, GH": (HICACHE, hopper),
        "+ IO, GH": (PLUS_IO, hopper),
        "Strata, GH": (FULL, hopper),
        "oracle, GH": (FULL, _unlimited(hopper)),
    }
    found = {}
    for name, (variant, hardware) in systems.items():
        host = GH200_HOST_BYTES if hardware.name == "gh200" else Machine(hardware, model).host_bytes
        on = Machine(hardware, model, 1, host)
        row = measure(variant, DocumentOptions(queries=scale.queries), scale, rate=LINK_RATE, on=on)
        sustained = row["loaded_tokens"] * model.kv_token_bytes / row["load_s"] / 1e9 if row["load_s"] else 0.0
        found[name] = row | {"sustained_gb_s": sustained}
        say(f"links, {LINK_RATE:g}/s", name, row)
    return found


def _unlimited(hardware: HardwareProfile) -> HardwareProfile:
    faster = replace(hardware.link, bandwidth_gb_s=hardware.link.bandwidth_gb_s * 1000, latency_us=0.0)
    return replace(hardware, link=faster)


PARTS: dict[str, Callable[[Scale], Any]] = {
    "stalls": lambda scale: stalls(),
    "copies": lambda scale: copies(),
    "chat_page_sizes": lambda scale: page_sizes_of_chats(scale),
    "loogle": lambda scale: {model: curves_on(scale, model) for model in RATES},
    "reviewmt": lambda scale: {NO_HOST_MODEL: peaks_on("reviewmt", scale, NO_HOST_MODEL)},
    "narrativeqa": lambda scale: {model: peaks_on("narrativeqa", scale, model) for model in RATES},
    "sharegpt": lambda scale: {NO_HOST_MODEL: short_contexts(scale, NO_HOST_MODEL)},
    "page_sizes": page_sizes,
    "links": links,
}


def main() -> None:
    parser = results_file.arguments(__doc__, "--seed")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--queries", type=int, default=QUERIES, help="fewer make a shorter run, written nowhere")
    parser.add_argument("--json", action="store_true", help="print the results, write nothing")
    parser.add_argument("--add", default="", metavar="FILE,...", help="parts that were printed before")
    options = parser.parse_args()
    parts = [name for name in options.parts.split(",") if name]
    faults = [f"there is no part {name!r}" for name in parts if name not in PARTS]
    if options.queries < 1:
        faults.append("--queries must be at least 1")
    if faults:
        print(f"strata_machines: {'; '.join(faults)}; parts are {', '.join(PARTS)}", file=sys.stderr)
        raise SystemExit(2)
    found: dict[str, Any] = {}
    for name in filter(None, options.add.split(",")):
        found |= json.loads(Path(name).read_text(encoding="utf-8"))
    scale = Scale(options.queries, options.seed, PAGE_SIZE)
    found |= {name: PARTS[name](scale) for name in parts}
    if options.json or scale.queries != QUERIES or set(found) != set(PARTS):
        print(json.dumps(found, indent=2))
        return
    print(results_file.write("papers_strata_machines", {"simulated": True} | found, seed=scale.seed))


if __name__ == "__main__":
    main()
