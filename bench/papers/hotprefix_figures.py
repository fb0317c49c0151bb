"""What became of each figure of HotPrefix: the list that its page and the index are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.papers.claims import gain, percent, ratio, speedup
from bench.papers.figures import Direction, Documents, Entry, Paper, judged, spread
from bench.papers.simulated import Row, offload_s

PAPER = Paper(
    name="HotPrefix",
    page="hotprefix.md",
    title="HotPrefix's figures, simulated",
    figures=16,
    tables=1,
    drawings={
        "Figure 1": "workflow",
        "Figure 2": "prefix tree",
        "Figure 3": "cuckoo filter",
        "Figure 4": "updating hotness",
        "Figure 5": "admission",
        "Figure 6": "promotion",
        "Figure 7": "pipeline",
    },
    results=("papers_hotprefix", "papers_hotprefix_machines", "hotness_filter"),
)

RUN = "python -m bench.papers.hotprefix"
MACHINES = "python -m bench.papers.hotprefix_machines"
FILTER = "python -m bench.hotness_filter"
BASELINES = ("lru", "lfu", "fifo", "2q", "vllm")
PROMOTED_BY = ("recency", "frequency", "depth")

Rows = dict[str, Row]
Part = dict[str, Any]


def hits(row: Row) -> float:
    return float(row["device_hit_ratio"])


def seconds(row: Row) -> float:
    return float(row["seconds"])


def entries(documents: Documents) -> list[Entry]:
    """Every figure, table and stated number, in the paper's order."""
    first = documents["papers_hotprefix"]["results"]
    second = documents["papers_hotprefix_machines"]["results"]
    filters = documents["hotness_filter"]["results"]
    return [
        _naive(second["naive_offloading"]),
        _filter(filters),
        *_end_to_end(first["end_to_end"]),
        _gemma(second["gemma"]),
        _offload_time(first["end_to_end"]),
        _tensor_parallel(second["tensor_parallel"]),
        _data_parallel(second["data_parallel"]),
        _devices(second["by_device"]),
        *_ablations(first["ablations"]),
    ]


def offload_share(row: Row) -> float:
    """Of a run whose every backup blocks, which is how the paper counts (5.1)."""
    return offload_s(row) / (seconds(row) + offload_s(row))


def _naive(row: Row) -> Entry:
    share, claimed = offload_share(row), 1200 / 2138
    is_comparable = share >= claimed / 2
    return Entry(
        figure="1.1",
        what="MMLU in batches of 8, everything evicted is offloaded: share of the time",
        paper=f"1,200 of 2,138 s: {percent(claimed)}",
        marking="simulated",
        here=percent(share),
        direction="yes" if is_comparable else "partly",
        command=MACHINES,
        where="#other-machines-and-models",
        why=""
        if is_comparable
        else "It costs here, too, but the link's model copies single tokens faster than 1,200 "
        "s for this dataset means.",
    )


def _filter(filters: Part) -> Entry:
    speed = filters["speed"]
    narrow = next(each for each in filters["by_width"] if each["fingerprint_bits"] == 8 and each["load_factor"] > 0.9)
    return Entry(
        figure="3.2.1",
        what="the hotness filter is small and quick",
        paper="8 bits for each of four fields; no measurement",
        marking="measured",
        here=f"{narrow['bytes_per_entry']:g} bytes an entry, a lookup {speed['lookup_known_us']:.1f} µs, wrong hits "
        f"{narrow['wrong_hits']:.1%} when full",
        command=FILTER,
        where="../concepts/hotness.md",
    )


def _end_to_end(parts: dict[str, Part]) -> list[Entry]:
    rows = [part["rows"] for part in parts.values()]
    of_hits = [gain(each, "hotprefix", base, hits) for each in rows for base in BASELINES]
    of_time = [speedup(each, base, "hotprefix", seconds) for each in rows for base in BASELINES]
    full = "Requests that run hold nearly all of the device on BBH and CEVAL, and LFU is exact: see below."
    return [
        Entry(
            figure="Figure 8",
            what="device hit ratio over SGLang (LRU, LFU, FIFO, 2Q) and vLLM, 4 datasets",
            paper="1.11 to 3.27×",
            marking="simulated",
            here=spread(of_hits),
            direction=judged(of_hits),
            command=RUN,
            where="#figures-8-and-9-device-hit-ratio-and-latency",
            why=_unless(judged(of_hits), full),
        ),
        Entry(
            figure="Figure 9",
            what="latency and throughput of a dataset over the same",
            paper="1.41 to 2.25×",
            marking="simulated",
            here=spread(of_time),
            direction=judged(of_time),
            command=RUN,
            where="#figures-8-and-9-device-hit-ratio-and-latency",
            why=_unless(judged(of_time), full + " Time includes decoding, which no cache shortens."),
        ),
    ]


def _both(found: dict[str, Part], capacity: str, base: str, by: Callable[..., float], measure: Any) -> list[float]:
    """A ratio for each dataset at one capacity."""
    order = (base, "hotprefix") if by is speedup else ("hotprefix", base)
    return [by(part[capacity]["rows"], *order, measure) for part in found.values()]


def _fits(found: dict[str, Part]) -> str:
    """Which datasets fit as a whole, so that nothing is to be compared there."""
    same = [
        name for name, part in found.items() if abs(gain(part["fits"]["rows"], "hotprefix", "lru", hits) - 1) < 0.005
    ]
    return (
        f"At what fits on the devices all examples of {' and '.join(same)} stay, and no policy differs. "
        if same
        else ""
    )


def _gemma(found: dict[str, Part]) -> Entry:
    of_time = [value for base in ("lru", "vllm") for value in _both(found, "half", base, speedup, seconds)]
    return Entry(
        figure="5.2.2",
        what="Gemma 9B: latency and throughput over SGLang-LRU and vLLM",
        paper="1.45 to 1.64×, 1.58 to 1.91×",
        marking="simulated",
        here=f"{spread(of_time)} where half of the examples fit",
        direction=judged(of_time),
        command=MACHINES,
        where="#other-machines-and-models",
        why=_unless(
            judged(of_time),
            _fits(found) + "Where half fits, requests that run hold nearly all of the device on BBH and CEVAL.",
        ),
    )


def _offload_time(parts: dict[str, Part]) -> Entry:
    shares = []
    for part in parts.values():
        others = [seconds(part["rows"][base]) for base in BASELINES]
        shares.append(offload_s(part["rows"]["hotprefix"]) / (sum(others) / len(others)))
    return Entry(
        figure="Table 1",
        what="HotPrefix's offload time, over the average time of the others",
        paper="24.8 to 68.28 s: 1.1 to 5.9%",
        marking="simulated",
        here=f"{percent(min(shares))} to {percent(max(shares))}",
        direction="yes" if max(shares) < 0.1 else "partly" if min(shares) < 0.1 else "no",
        command=RUN,
        where="#table-1-offload-time",
        why=""
        if max(shares) < 0.1
        else "Where little fits beside what runs, much is evicted, promoted and evicted "
        "again; the share is largest on Hellaswag, whose examples are several times what the device holds.",
    )


def _tensor_parallel(found: dict[str, Part]) -> Entry:
    of_hits = [value for base in ("lru", "vllm") for value in _both(found, "half", base, gain, hits)]
    of_time = [value for base in ("lru", "vllm") for value in _both(found, "half", base, speedup, seconds)]
    direction = judged([*of_hits, *of_time])
    return Entry(
        figure="Figure 10",
        what="Qwen2-72B on four A6000: hit ratio, and latency over SGLang and vLLM",
        paper="highest; 1.57 to 2.42×, 1.60 to 2.61×",
        marking="simulated",
        here=f"hits {spread(of_hits)}, latency {spread(of_time)} where half of the examples fit",
        direction=direction,
        command=MACHINES,
        where="#other-machines-and-models",
        why=_unless(
            direction,
            _fits(found) + "Where half fits, requests that run hold nearly all of the device on BBH and "
            "CEVAL. The paper does not say how much memory its KV had.",
        ),
    )


def _data_parallel(found: dict[str, Rows]) -> Entry:
    most = {name: max(rows, key=int) for name, rows in found.items()}
    gains = [ratio(seconds(rows["1"]), seconds(rows[most[name]])) for name, rows in found.items()]
    return Entry(
        figure="Figure 11",
        what="Llama-2-13B on 1, 2 and 4 devices: time falls linearly",
        paper="linear; no number",
        marking="simulated",
        here=f"{spread(gains)} with 4",
        direction="yes" if min(gains) > 3.0 else judged(gains),
        command=MACHINES,
        where="#other-machines-and-models",
        why=""
        if min(gains) > 3.0
        else "Each device has to compute the examples that its own requests need, so short "
        "runs gain less than they have devices.",
    )


def _devices(found: dict[str, Rows]) -> Entry:
    of_hits = [gain(rows, "hotprefix", base, hits) for rows in found.values() for base in BASELINES]
    of_time = [speedup(rows, base, "hotprefix", seconds) for rows in found.values() for base in BASELINES]
    direction = judged([*of_hits, *of_time])
    return Entry(
        figure="Figure 12",
        what="MMLU, Llama-3-8B on RTX 3090, A30, A6000, A100: hit ratio and latency",
        paper="1.06 to 1.53×; 1.16 to 2.27×",
        marking="simulated",
        here=f"{spread(of_hits)}; {spread(of_time)}",
        direction=direction,
        command=MACHINES,
        where="#other-machines-and-models",
        why=_unless(direction, "LFU ranks subjects as well as hotness does; over the others the direction holds."),
    )


def _ablations(parts: dict[str, Part]) -> list[Entry]:
    rows = [part["rows"] for part in parts.values()]
    less_offload = [ratio(offload_s(each["E+P, all admitted"]), offload_s(each["E+A+P"])) for each in rows]
    less_time = [speedup(each, "E+P, all admitted", "E+A+P", seconds) for each in rows]
    steps = [gain(each, bar, "baseline", hits) for each in rows for bar in ("E", "A+P", "E+A+P")]
    faster = [speedup(each, "baseline", bar, seconds) for each in rows for bar in ("E", "A+P", "E+A+P")]
    policies = [
        speedup(each, bar, "E+A+P", seconds) for each in rows for bar in ("A+P", "lfu, A+P", "fifo, A+P", "2q, A+P")
    ]
    promoted = [gain(each, "E+A+P", f"promotion by {by}", hits) for each in rows for by in PROMOTED_BY]
    promoted_time = [speedup(each, f"promotion by {by}", "E+A+P", seconds) for each in rows for by in PROMOTED_BY]
    return [
        Entry(
            figure="Figure 13",
            what="selective admission: offload time and latency against admitting all",
            paper="10 to 65× less; 1.28 to 3.54×",
            marking="simulated",
            here=f"{spread(less_offload)} less; {spread(less_time)}",
            direction=judged([*less_offload, *less_time]),
            command=RUN,
            where="#figure-13-selective-admission",
        ),
        Entry(
            figure="Figure 14",
            what="eviction, admission and promotion over the baseline: hit ratio and latency",
            paper="1.02 to 1.92×; 1.02 to 1.77×",
            marking="simulated",
            here=f"{spread(steps)}; {spread(faster)}",
            direction=judged([*steps, *faster]),
            command=RUN,
            where="#figure-14-the-parts",
        ),
        Entry(
            figure="Figure 15",
            what="latency with LRU, LFU, FIFO, 2Q in place of hotness-aware eviction",
            paper="1.02 to 1.89×",
            marking="simulated",
            here=spread(policies),
            direction=judged(policies),
            command=RUN,
            where="#figure-15-the-eviction-policy-inside-hotprefix",
            why=_unless(
                judged(policies),
                "LFU is as good where popularity is all there is to know, and CEVAL mostly decodes: see below.",
            ),
        ),
        Entry(
            figure="Figure 16",
            what="promotion by recency, frequency and depth: hit ratio and latency",
            paper="1.01 to 2.57×; 1.04 to 2.22×",
            marking="simulated",
            here=f"{spread(promoted)}; {spread(promoted_time)}",
            direction=judged([*promoted, *promoted_time]),
            command=RUN,
            where="#figure-16-what-promotion-goes-by",
            why=_unless(
                judged([*promoted, *promoted_time]),
                "Against frequency there is hardly a difference, here as there: see below.",
            ),
        ),
    ]


def _unless(direction: Direction, why: str) -> str:
    """Only what is not the paper's direction has to be explained."""
    return "" if direction == "yes" else why
