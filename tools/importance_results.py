"""The page of what importance-informed loading brings in serving: TTFT and bytes by technique."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_HEAD = """\
# Loading less: TTFT and bytes by technique

Made by `python -m tools.reference_docs` from `bench/results/importance_serving.json`, after IMPRESS's Figures 16 to
21. Whole cells with a bundled model behind their HTTP API on one machine with two cores; storage reads its disk through
a token bucket. What the answers lose is on [its own page](quality.md), and which tokens matter on
[another](importance.md).

- *recompute* keeps nothing; *everything* loads all KV (AS-like in the paper).
- *h2o_lru*, *h2o_lfu* read the keys of all heads to choose, and blocks of 64 tokens, the paper's chunks.
- *identification* asks probe heads for that. *blocks* reads blocks as small as the disk allows.
- *reordering* also repacks rows by importance. *policy* evicts by Thermocline's policy instead of LFU; *score* lets
  importance count in it, and brings up what is hot: that is Thermocline as it comes. *on_demand* is the same without
  reading ahead.

*Mean*, *p50* and *p99* are TTFT over all questions, those included whose document is in memory; *lossy* is the share
that was answered lossily, with their mean TTFT and how much of it computation waited for the disk. Bytes are those that
the disk was read for answers, also by token of the prefixes that were found there, and beside answers for repacking and
warming. The last column says how many times less TTFT than *everything*.
"""

_FOLLOWS = """## What follows

- Where the disk is what takes time, loading less brings what it promises, once blocks are small: 64 tokens of one layer
  are almost always touched somewhere. The keys of all heads cost H2O more than it saves.
- Repacking rows adds little here. Questions about facts find their answers in different places of a document, so that
  no order suits them all; it pays where the same tokens matter to everybody.
- *policy* and *score* begin worse than LFU: lossy requests leave nothing in memory, so whatever was there when they
  began stays, and LFU happened to keep the middle of the distribution. Warming then brings up what is asked for, which
  makes up for most of that at 5 MB/s.
- Computing is fast with a model this small, faster than a slow disk. A worker with a profile compares, and would have
  computed; these cells have none, so that every system uses its own way.
- Reading ahead is left to its controller, which seldom allows it here: adjacent layers are hardly alike
  ([recall](importance.md#reading-ahead-for-the-next-layer)). Beside *on_demand* it makes no difference that these
  figures could show.
"""


_SYSTEMS = (
    *("recompute", "everything", "h2o_lru", "h2o_lfu", "identification", "blocks", "reordering"),
    *("policy", "score", "on_demand"),
)

Result = tuple[dict[str, Any], str]


def page(*servings: Result) -> str:
    """The whole page. Each argument is a result and the line that says where it comes from."""
    lines = [_HEAD]
    for serving in servings:
        lines += _section(*serving)
    return "\n".join([*lines, _FOLLOWS])


def _section(results: dict[str, Any], origin: str) -> list[str]:
    lines = [f"## {results['ratio']:.0%} of the tokens\n", *_setting(results), ""]
    for mb_per_s in dict.fromkeys(each["mb_per_s"] for each in results["figures"]):
        figures = [each for each in results["figures"] if each["mb_per_s"] == mb_per_s]
        figures.sort(key=lambda each: _SYSTEMS.index(each["system"]))
        lines += [f"### A disk of {mb_per_s:g} MB/s\n", *_table(figures, results["questions"] * results["rounds"]), ""]
    return [*lines, origin + "\n"]


def _setting(results: dict[str, Any]) -> list[str]:
    tokens = results["prefix_tokens"]
    return [
        f"{results['documents']} documents of {min(tokens):,} to {max(tokens):,} tokens, {results['questions']} "
        f"questions in each of {results['rounds']} rounds, `{results['model']}` in float32, ratio "
        f"{results['ratio']:g}, {results['probe_heads']} of its heads asked."
    ]


def _table(figures: list[dict[str, Any]], questions: int) -> Iterable[str]:
    titles = ["system", "mean, ms", "p50", "p99", "lossy", "their mean, ms", "of it waiting", "fallback"]
    titles += ["MB a question", "KB a token of the disk", "MB beside", "right", "TTFT"]
    yield f"| {' | '.join(titles)} |"
    yield "|---" * len(titles) + "|"
    base = next((each for each in figures if each["system"] == "everything"), None)
    for each in figures:
        found = each["bytes_per_question"]
        is_lossy = bool(each["lossy"])
        for_answers = found["sparse_bytes_read"] + (0 if is_lossy else found["bytes_fetched"])
        cells = [
            each["system"],
            f"{each['ttft_mean_ms']:.0f}",
            f"{each['ttft_p50_ms']:.0f}",
            f"{each['ttft_p99_ms']:.0f}",
            f"{each['lossy']:.0%}" if is_lossy else "",
            f"{each['ttft_lossy_ms']:.0f}" if is_lossy else "",
            f"{each['waited_lossy_ms']:.0f}" if is_lossy else "",
            f"{each['fallen_back']:.0%}" if is_lossy else "",
            f"{for_answers / 1e6:.2f}",
            _by_token(each, for_answers * questions),
            f"{(found['disk_bytes_read'] - for_answers) / 1e6:.2f}",
            f"{each['right']:.1%}",
        ]
        cells.append(f"{base['ttft_mean_ms'] / each['ttft_mean_ms']:.1f}×" if base else "")
        yield f"| {' | '.join(cells)} |"


def _by_token(each: dict[str, Any], nbytes: int) -> str:
    """Kilobytes for each token that was found on the disk."""
    tokens = each["found_tokens"]["sparse"] or each["found_tokens"]["disk"]
    return f"{nbytes / tokens / 1e3:.2f}" if tokens else ""
