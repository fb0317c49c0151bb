"""The figures of ``bench/core_speed.py`` as rows: what, how much, and the target."""

from __future__ import annotations

from typing import Any

MATCH_MS = 0.5
STEP_P99_MS = 2.0
ALLOCATION_MS = 0.1
KV_PERCENT = 0.05

Row = tuple[str, str, str]


def rows(results: dict[str, Any]) -> list[Row]:
    """All of them. Times are medians by the wall's clock, and processor time where that says more."""
    return [*_tree(results), *_steps(results), *_evictions(results), *_state(results), *_memory(results)]


def _times(times: dict[str, float]) -> str:
    return f"{times['p50_ms']:.3f} ms (processor {times['cpu_p50_ms']:.3f})"


def _tree(results: dict[str, Any]) -> list[Row]:
    insert = results["insert"]
    return [
        *(
            (f"match of 131,072 tokens, {shape}, {kind}", _times(times), f"≤ {MATCH_MS} ms")
            for shape, kinds in results["match"].items()
            for kind, times in kinds.items()
        ),
        ("insert of 131,072 tokens", _times(insert["insert"]), ""),
        ("split of a node of 131,072 tokens", _times(insert["split"]), ""),
        *(
            (f"allocation of {size} pages", _times(times), f"≤ {ALLOCATION_MS} ms")
            for size, times in insert["allocate"].items()
        ),
    ]


def _steps(results: dict[str, Any]) -> list[Row]:
    table = []
    for name, times in results["step"].items():
        processor = f"processor {times['cpu_p50_ms']:.2f}, {times['cpu_p99_ms']:.2f}"
        figures = f"{times['p50_ms']:.2f}, {times['p99_ms']:.2f} ms ({processor})"
        table.append((f"step with {name}, p50 and p99 of {times['count']}", figures, f"p99 ≤ {STEP_P99_MS} ms"))
    return table


def _evictions(results: dict[str, Any]) -> list[Row]:
    return [
        (
            f"one eviction by {policy}, p50 and p99",
            f"processor {times['cpu_p50_ms']:.3f}, {times['cpu_p99_ms']:.3f} ms",
            "",
        )
        for policy, times in results["evictions"].items()
    ]


def _state(results: dict[str, Any]) -> list[Row]:
    snapshot = results["snapshot"]
    return [
        ("snapshot: encode", f"processor {snapshot['encode_s']} s, {snapshot['encoded_bytes'] / 2**20:.0f} MiB", ""),
        *_pause(snapshot),
        ("snapshot: decode", f"processor {snapshot['decode_s']} s", ""),
        *(
            (
                f"loss of a {who} with {loss['nodes']:,} nodes",
                f"{loss['ms']:.0f} ms (processor {loss['cpu_ms']:.0f})",
                "",
            )
            for who, loss in results["losses"].items()
        ),
    ]


def _pause(snapshot: dict[str, Any]) -> list[Row]:
    """Results from before a snapshot was encoded by a copy of the process have no such row."""
    fork = snapshot.get("fork")
    if fork is None:
        return []
    figures = f"{fork['p50_ms']:.0f}, {fork['max_ms']:.0f} ms (processor {fork['cpu_p50_ms']:.0f})"
    return [("snapshot: pause for a copy of the process that encodes, median and longest of 3", figures, "")]


def _memory(results: dict[str, Any]) -> list[Row]:
    limit = round(results["kv_bytes_per_token"] * results["page_size"] * KV_PERCENT / 100)
    return [
        ("nodes", f"{results['nodes']:,}, of {results['pages_per_node']} pages", ""),
        ("bytes a node: tokens, pools and policies included", f"{results['resident_bytes_per_node']:,}", ""),
        ("the same after a snapshot", f"{results['snapshot']['decoded_bytes_per_node']:,}", ""),
        ("bytes a token", f"{results['resident_bytes_per_token']}", ""),
        ("metadata, of the KV that it describes", f"{results['kv_percent']} %", f"≤ {KV_PERCENT} %"),
        ("bytes a node where each is one page", f"{results['bytes_per_single_page_node']:,}", f"≤ {limit:,}"),
    ]
