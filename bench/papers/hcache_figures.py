"""What became of each figure of HCache: the list that its page and the index are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.papers.claims import percent, ratio, times
from bench.papers.figures import Direction, Documents, Entry, Paper, judged, spread

PAPER = Paper(
    name="HCache",
    page="hcache.md",
    title="HCache's figures, by the restoration planner's cost model",
    figures=15,
    tables=3,
    drawings={
        "Figure 2": "transformer",
        "Figure 5": "pipelined restoration",
        "Figure 6": "orders of generation and restoration",
        "Figure 7": "overview",
        "Figure 8": "partitions",
    },
    results=("papers_hcache", "hidden_states", "restoration", "hidden_saving"),
)

RUN = "python -m bench.papers.hcache"
WORKER = "python -m bench.hidden_states --save"
CELLS = "python -m bench.restoration --save"
SAVING = "python -m bench.hidden_saving --save"

SPEED_PAGE = "restoration.md#restoration-speed-by-method"
TTFT_PAGE = "restoration.md#ttft-of-a-history-on-a-limited-disk"
_NO_WORSE = 1.05
_RECOMPUTING = "The question's own step is short here, so that what it is compared with weighs more in every ratio."

Part = dict[str, Any]


def entries(documents: Documents) -> list[Entry]:
    """Every figure, table and stated number, in the paper's order."""
    found = documents["papers_hcache"]["results"]
    return [
        _resources(found["resources"]),
        *_statistics(found["conversations"]),
        *_overhead(found["ttft"]),
        _hardware(),
        *_conversations(found["conversations"]),
        *_long_contexts(found["ttft"]),
        _storage(found["storage"]),
        _balanced(found["balanced"]),
        *_sensitivity(found),
        _on_a_cpu(documents["hidden_states"]["results"]["mha"]["figures"]),
        _cells_on_a_cpu(documents["restoration"]["results"]["figures"]),
        *_ablation(found["ablation"]),
        _partitions(found["partitions"]),
        _saving(documents["hidden_saving"]["results"]["figures"]),
        *_reuse(found["reuse"]),
    ]


def over(rows: Sequence[Part], better: str, worse: str) -> list[float]:
    """Speeds: of one method over another's."""
    return [ratio(row[better], row[worse]) for row in rows]


def faster(rows: Sequence[Part], better: str, worse: str) -> list[float]:
    """Times: how many times less of one method."""
    return [ratio(row[worse], row[better]) for row in rows]


def _simulated(figure: str, what: str, paper: str, here: str, direction: Direction, where: str, why: str = "") -> Entry:
    return Entry(
        figure=figure,
        what=what,
        paper=paper,
        marking="simulated",
        here=here,
        direction=direction,
        command=RUN,
        where=where,
        why="" if direction == "yes" else why,
    )


def _resources(rows: list[Part]) -> Entry:
    compute, nbytes = [row["compute"] for row in rows], [row["bytes"] for row in rows]
    return _simulated(
        "Figure 1",
        "arithmetic and bytes that hidden states save (3.2), 1K to 16K tokens",
        "at least 6×, 2×",
        f"{spread(compute)}, {spread(nbytes)}",
        "yes" if min(compute) >= 6 and min(nbytes) >= 2 else "partly",
        "#figures-1-4-and-10-costs-of-restoring-and-ttft",
        "Grouped queries have less KV for the same hidden states.",
    )


def _statistics(conversations: dict[str, Any]) -> list[Entry]:
    history = conversations["llama-2-7b"]["ideal"][0]["history_tokens"]
    return [
        _simulated(
            "Figure 3",
            "statistics of ShareGPT4: tokens a round, history",
            "66.8 in, 358.8 out, median history above 2.5K",
            f"drawn around these; mean history of a round {history:,.0f}",
            "-",
            "#figure-9-conversations",
            "An input of Figure 9. Spreads and the number of rounds are assumptions.",
        ),
        _simulated(
            "Table 1",
            "statistics of L-Eval: context, input and output of three tasks and all",
            "5,451.7 to 16,340.2 tokens of context",
            "drawn around these",
            "-",
            "#figures-1-4-and-10-costs-of-restoring-and-ttft",
            "An input of Figures 4, 10 and 15.",
        ),
    ]


def _overhead(rows: list[Part]) -> list[Entry]:
    slower = [ratio(row["recomputed"], row["ideal"]) for row in rows]
    loading = [ratio(row["kv"], row["ideal"]) for row in rows]
    why = _RECOMPUTING + " Nothing is lost between steps in the model."
    return [
        _simulated(
            "Figure 4",
            f"TTFT of {name} over that without restoring, L-Eval, three models",
            said,
            spread(found),
            judged(found),
            "#figures-1-4-and-10-costs-of-restoring-and-ttft",
            why,
        )
        for name, said, found in (("recomputing", "20.0 to 26.0×", slower), ("KV offload", "6.5 to 13.0×", loading))
    ]


def _hardware() -> Entry:
    return _simulated(
        "Table 2",
        "devices: memory, arithmetic, link",
        "A100, A30, 4090, L20, H800",
        "profiles with these numbers",
        "-",
        "../how-to/simulate.md#what-it-runs-on",
        "An input: datasheets, and efficiencies that are the same for all devices.",
    )


def _conversations(found: dict[str, Any]) -> list[Entry]:
    over_kv, over_tokens, tbt = [], [], []
    for methods in found.values():
        over_kv += faster_at(methods, "kv")
        over_tokens += faster_at(methods, "recomputed")
        tbt += [ratio(a["tbt_ms"], b["tbt_ms"]) for a, b in zip(methods["hcache"], methods["ideal"], strict=True)]
    where = "#figure-9-conversations"
    return [
        _simulated("Figure 9 a-c", "TTFT of KV offload over HCache's, ShareGPT4, three models, by rate",
                   "1.27 to 1.90×", spread(over_kv), judged(over_kv), where,
                   "At the highest rates everybody waits for memory, not for restoring, and small differences in when "
                   "a round ends decide who waits longer."),
        _simulated("Figure 9 a-c", "TTFT of recomputing over HCache's", "2.21 to 3.57×", spread(over_tokens),
                   judged(over_tokens), where, "The same."),
        _simulated("Figure 9 d-f", "time between tokens over that without restoring", "at most 1.04×",
                   f"at most {times(max(tbt))}", "yes" if max(tbt) <= _NO_WORSE else "partly", where,
                   "Projection takes steps' time; at high rates it is a larger part of it here than 4%."),
    ]  # fmt: skip


def faster_at(methods: dict[str, list[Part]], worse: str) -> list[float]:
    """TTFT of a method over HCache's at every rate."""
    return [ratio(a["ttft_ms"], b["ttft_ms"]) for a, b in zip(methods[worse], methods["hcache"], strict=True)]


def _long_contexts(rows: list[Part]) -> list[Entry]:
    where = "#figures-1-4-and-10-costs-of-restoring-and-ttft"
    return [
        _simulated("Figure 10", f"TTFT of {name} over HCache's, L-Eval, three models", said, spread(found),
                   judged(found), where)
        for name, said, found in (
            ("KV offload", "1.62 to 1.93×", faster(rows, "hcache", "kv")),
            ("recomputing", "2.66 to 5.73×", faster(rows, "hcache", "recomputed")),
        )
    ]  # fmt: skip


def _storage(rows: list[Part]) -> Entry:
    testbed = [ratio(row["kv_kib"], row["kib"]) for row in rows if row["disks"]]
    return _simulated(
        "Table 3", "layers by method on the testbed; bytes of KV offload over HCache's", "1.92 to 2.40×",
        spread(testbed), judged(testbed), "#table-3-what-is-kept-of-a-layer-and-what-it-takes",
    )  # fmt: skip


def _balanced(rows: list[Part]) -> Entry:
    said = {"llama-2-7b": 24, "llama-2-13b": 21, "opt-30b": 37}
    found = ", ".join(f"{row['gb_s']:.0f}" for row in rows)
    is_near = all(2 / 3 <= row["gb_s"] / said[row["model"]] <= 3 / 2 for row in rows)
    return _simulated(
        "6.1.3", "storage bandwidth at which transfer and projection take equally long, 7B, 13B, 30B",
        "24, 21, 37 GB/s", f"{found} GB/s", "yes" if is_near else "partly",
        "#figures-1-4-and-10-costs-of-restoring-and-ttft",
        "Projection reaches 62% of the peak by every profile; the paper's numbers mean 43 to 69%.",
    )  # fmt: skip


def _sensitivity(found: Part) -> list[Entry]:
    parts = (
        ("Figure 11 a-c", "restoration speed on five devices, host memory", "by_gpu", "1.33 to 1.81×", "5.04 to 9.05×",
         "#figure-11-a-c-restoration-speed-by-device-from-host-memory"),
        ("Figure 11 d-f", "restoration speed by number of disks", "by_disks", "1.33 to 2.66×", "2.3 to 6.1×",
         "#figure-11-d-f-restoration-speed-by-disks"),
        ("Figure 11 g-i", "restoration speed, 1K to 16K of history", "by_length", "above 1; no number",
         "above 1; no number", "#figure-11-g-i-restoration-speed-by-history-length"),
    )  # fmt: skip
    return [
        _simulated(
            figure, f"{what}: over KV offload, over recomputing", f"{kv}; {tokens}",
            f"{spread(over(found[part], 'planner', 'kv'))}; {spread(over(found[part], 'planner', 'tokens'))}",
            judged([*over(found[part], "planner", "kv"), *over(found[part], "planner", "tokens")]), where,
        )
        for figure, what, part, kv, tokens, where in parts
    ]  # fmt: skip


def _on_a_cpu(rows: list[Part]) -> Entry:
    """The worker's part alone, at bandwidths below memory's: there nothing is left to be hidden."""
    limited = [row for row in rows if row["gb_per_s"]]
    found = {(row["tokens"], row["gb_per_s"], row["method"]): row["tokens_per_s"] for row in limited}
    places = sorted({(row["tokens"], row["gb_per_s"]) for row in limited})
    over_kv = [ratio(found[*place, "best"], found[*place, "kv"]) for place in places]
    over_tokens = [ratio(found[*place, "best"], found[*place, "recompute"]) for place in places]
    direction = judged([*over_kv, *over_tokens])
    return Entry(
        figure="Figure 11",
        what="restoration speed on a CPU, 12 layers, 0.1 to 5 GB/s: over KV, over recomputing",
        paper="1.33 to 2.66×; 2.3 to 9.05×",
        marking="measured",
        here=f"{spread(over_kv)}; {spread(over_tokens)}",
        direction=direction,
        command=WORKER,
        where=SPEED_PAGE,
        why=""
        if direction == "yes"
        else "A CPU projects slowly beside its memory: from 2 GB/s on loading KV is as "
        "fast, and the planner then does that.",
    )


def _cells_on_a_cpu(rows: list[Part]) -> Entry:
    found = {(row["tokens"], row["mb_per_s"], row["method"]): row["ttft_ms"] for row in rows if row["model"] == "mha"}
    places = sorted({(tokens, rate) for tokens, rate, _ in found})
    over_kv = [ratio(found[*place, "kv"], found[*place, "planned"]) for place in places]
    over_tokens = [ratio(found[*place, "recompute"], found[*place, "planned"]) for place in places]
    return Entry(
        figure="Figure 10",
        what="TTFT of whole cells on a CPU, disk of 50 and 200 MB/s, multi-head attention: of KV, of recomputing",
        paper="1.62 to 1.93×; 2.66 to 5.73×",
        marking="measured",
        here=f"{spread(over_kv)}; {spread(over_tokens)}",
        direction=judged([*over_kv, *over_tokens]),
        command=CELLS,
        where=TTFT_PAGE,
    )


def _ablation(rows: list[Part]) -> list[Entry]:
    where = "#figure-12-the-scheduler-against-its-parts"
    skewed = [row for row in rows if row["setting"] != "balanced"]
    naive, hidden, kv = (over(rows, "planner", "naive"), over(skewed, "planner", "hidden"), over(rows, "planner", "kv"))
    return [
        _simulated("Figure 12", "over a hybrid without hidden states; over hidden states alone; over KV offload",
                   "1.28 to 1.42×; 1.35 to 1.64×; 1.45 to 2.66×", f"{spread(naive)}; {spread(hidden)}; {spread(kv)}",
                   judged([*naive, *hidden, *kv]), where),
        _simulated("Figure 12", "hidden states alone are slower than KV offload where I/O is sufficient", "by 13%",
                   f"by {percent(1 - rows[0]['hidden'] / rows[0]['kv'])}",
                   "yes" if rows[0]["hidden"] < rows[0]["kv"] else "no", where),
    ]  # fmt: skip


def _partitions(found: Part) -> Entry:
    slower = [1 - found[name] / found["layer_speed"] for name in ("naive_speed", "rounded_speed")]
    return _simulated(
        "Figure 13", "partition by token instead of by layer: slower, naive and rounded", "12%, 7%",
        ", ".join(percent(each) for each in slower), "yes" if min(slower) > 0.005 else "partly",
        "#figure-13-partition-by-layer-or-by-token",
    )  # fmt: skip


def _saving(rows: list[Part]) -> Entry:
    ways: dict[str, dict[int, float]] = {}
    for row in rows:
        ways.setdefault(row["way"], {})[row["batch"]] = row["against_off"]
    most = max(ways["two_stage"])
    two, direct = ways["two_stage"], ways["direct_io"]
    return Entry(
        figure="Figure 14",
        what=f"time between tokens while saving: in two stages, and directly at a batch of {most}",
        paper="as without; up to 1.34× (7B), 1.13× (13B)",
        marking="measured",
        here=f"at most {times(max(two.values()))}; {times(direct[most])}",
        direction="yes" if max(two.values()) <= _NO_WORSE and direct[most] > two[most] else "partly",
        command=SAVING,
        where="restoration.md#what-saving-costs-decoding-hcache-figure-14",
    )


def _reuse(rows: list[Part]) -> list[Entry]:
    few = {row["skew"]: row for row in rows if row["contexts"] == min(one["contexts"] for one in rows)}
    uniform, skewed = few[0.0], few[2.0]
    values = [
        ratio(uniform["ttft_ms"]["kv"], uniform["ttft_ms"]["hcache"]),
        ratio(skewed["ttft_ms"]["kv"], skewed["ttft_ms"]["hcache"]),
        ratio(skewed["ttft_ms"]["tokens"], skewed["ttft_ms"]["hcache"]),
    ]
    where = "#figure-15-with-kv-that-stays-on-the-device"
    return [
        _simulated("Figure 15", "over KV, uniform and at skew 2; over recomputing at skew 2", "1.67×, 1.15×; 1.98×",
                   f"{times(values[0])}, {times(values[1])}; {times(values[2])}", judged(values), where),
        _simulated("Figure 15", "device hits, uniform and at skew 2", "15%, 94%",
                   f"{percent(uniform['hit_ratio'])}, {percent(skewed['hit_ratio'])}",
                   "yes" if skewed["hit_ratio"] > uniform["hit_ratio"] else "no", where),
    ]  # fmt: skip
