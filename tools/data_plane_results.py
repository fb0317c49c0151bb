"""The page of the data plane's figures: TTFT by tier, the disk, the movers."""

from __future__ import annotations

from typing import Any

_HEAD = """\
# The data plane: TTFT by tier, disk and movers

Made by `python -m tools.reference_docs` from `bench/results/{ttft_ladder,disk_tier,transfers}.json`. One machine with
two cores is client, broker, server and disk at once. Nothing here was measured on a GPU: `bench/gpu/` holds the scripts
that would (movers against the link's peak, interference by number of programs, CUDA IPC, backups).
"""

_LADDER = """\
## One prefix, five places

TTFT of a question over a shared document, after the tiers above were emptied by an order. The object store is a
directory on the same disk. Waiting for a fetch is unbounded here (`prefetch_wait = "full"`), so that a slow tier shows
as slow.
"""

_DISK = """\
## Disk

Reading the chunks of a prefix through the disk tier, every checksum verified, against reading one large file
sequentially with O_DIRECT on the same disk in the same run, one request at a time and eight. The target is 80 % of
sequential reading by `fio`, which the tier exceeds. Where `fio` is not installed the benchmark uses a reader of its
own; with eight threads and huge pages that one has read the same disk at 2.5 to 2.8 GB/s, of which the tier gave 60
to 79 %: opening and reading 64 files instead of one costs about a fifth, and each chunk's checksums 50 to 80
microseconds of one of two cores.
"""

_MOVERS = """\
## Movers

Bandwidth of one layer-wise load from the page-first host pool into the layer-first device pool (on this machine both
in shared memory), as a share of a plain copy of the same bytes measured beside it, in processor time of the copying
thread. Targets: 80 % at pages of 16 tokens, 50 % at 1. "Verified" computes the checksum of every page and layer on the
way.
"""

_LAYOUT = """\
## Page-first against layer-first (Strata, Figure 12)

Time to read the same KV from disk when a page of all layers is one piece, and when each layer's pages lie apart.
"""

_OVERLAP = """\
## What layer-wise loading hides

Share of a load of the prefix that is hidden behind the computation of new tokens, because attention at a layer waits
for that layer alone. At the speed of memory, and slowed down to that of a slow disk.
"""


def page(
    ladder: tuple[dict[str, Any], str], disk: tuple[dict[str, Any], str], moves: tuple[dict[str, Any], str]
) -> str:
    """The whole page. Each argument is a result and the line that says where it comes from."""
    parts = [_HEAD, _LADDER, *_ladder(*ladder), _DISK, *_disk(*disk), _MOVERS, *_movers(*moves)]
    return "\n".join([*parts, _LAYOUT, *_layout(moves[0]), _OVERLAP, *_overlap(moves[0])])


def _ladder(results: dict[str, Any], origin: str) -> list[str]:
    rows = ["| found | TTFT, ms | quartiles | faster than recomputing by |", "|---|---|---|---|"]
    for name, row in results["by_tier"].items():
        low, high = row["quartiles_ms"]
        rows.append(f"| {name} | {row['ttft_ms']:.0f} | {low:.0f} to {high:.0f} | {row['speedup']:.1f}× |")
    size = f"{results['tokens']} tokens of document, {results['question_tokens']} of question, {results['dtype']}"
    return [*rows, "", f"{size}, {results['repeats']} documents. {origin}\n"]


def _disk(results: dict[str, Any], origin: str) -> list[str]:
    rows = ["| reading | GB/s, median | least to most | of depth 1 | of the best sequential |", "|---|---|---|---|---|"]
    for name, row in results["sequential"].items():
        rows.append(f"| sequential, {name.replace('_', ' ')} | {_spread(row)} | | |")
    alone = results["sequential"]["depth_1"]["median_gb_per_s"]
    for name, row in results["tier"].items():
        threads, share = name.removeprefix("threads_"), f"{row['share_of_sequential']:.0%}"
        of_depth_1 = f"{row['verified']['median_gb_per_s'] / alone:.0%}"
        rows.append(f"| disk tier, verified, {threads} threads | {_spread(row['verified'])} | {of_depth_1} | {share} |")
    written = f"{results['write_durable_gb_per_s']:.2f} GB/s written durably"
    size = f"{results['prefix_chunks']} chunks of {results['chunk_bytes']} bytes"
    by = results["sequential_by"].replace("_", " ")
    return [*rows, "", f"{size}; {written}; sequential by {by}. {origin}\n"]


def _spread(row: dict[str, float]) -> str:
    return f"{row['median_gb_per_s']:.2f} | {row['min_gb_per_s']:.2f} to {row['max_gb_per_s']:.2f}"


def _movers(results: dict[str, Any], origin: str) -> list[str]:
    names = ("per_page", "batched", "batched_verified", "batched_without_compiler")
    rows = ["| dtype | page size | " + " | ".join(name.replace("_", " ") for name in names) + " |", "|---" * 6 + "|"]
    for dtype, by_size in results["movers"].items():
        for size, figures in by_size.items():
            cells = [f"{figures[name]['gb_s']:.1f} GB/s ({figures[name]['of_memcpy']:.0%})" for name in names]
            rows.append(f"| {dtype} | {size} | " + " | ".join(cells) + " |")
    verify = ", ".join(f"{name.replace('_', ' ')} {took:.0f} ms" for name, took in results["verify_host_ms"].items())
    return [*rows, "", f"`verify_host`, wall time of {results['tokens']} tokens in float32: {verify}. {origin}\n"]


def _layout(results: dict[str, Any]) -> list[str]:
    rows = ["| geometry | page-first, ms | layer-first, ms | ratio |", "|---|---|---|---|"]
    for name, row in results["disk_layout"].items():
        times = f"{row['page_first_ms']:.0f} | {row['layer_first_ms']:.0f}"
        rows.append(f"| {name}, {row['bytes'] / 2**20:.0f} MiB | {times} | {row['ratio']:.1f}× |")
    return [*rows, ""]


def _overlap(results: dict[str, Any]) -> list[str]:
    rows = ["| source | new tokens | load, ms | step, ms | hidden |", "|---|---|---|---|---|"]
    for source, by_tokens in results["overlap"].items():
        for tokens, row in by_tokens.items():
            cells = f"{row['load_ms']:.0f} | {row['step_ms']:.0f} | {row['hidden_share_of_load']:.0%}"
            rows.append(f"| {source.replace('_gb_s', ' GB/s')} | {tokens.split('_')[0]} | {cells} |")
    return [*rows, ""]
