"""The page of what restoration costs and saves: TTFT from a limited disk, speed by method, time between tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_HEAD = """\
# Restoration: from KV, from hidden states, or anew

Made by `python -m tools.reference_docs` from `bench/results/{restoration,hidden_states,hidden_saving}.json`. One
machine with two cores; nothing here was measured on a GPU. What the paper's own figures look like under the planner's
cost model, on the paper's hardware, is in [HCache's figures](hcache.md).
"""

_TTFT = """\
## TTFT of a history on a limited disk

Whole cells behind their HTTP API; storage reads its disk through a token bucket. Every tier above the disk is empty,
then a question of 32 tokens is asked. *Recompute* fetches nothing; *KV* keeps KV; *hidden* keeps hidden states of all
layers; *half* is the naive hybrid, the first half of the layers recomputed and the rest kept as KV; *planned* is the
planner, which knows only what `thermocline doctor --profile` measured and what it observes. *Form* is the form of state
that it chose: layers computed from tokens / from hidden states / as KV. The last column is its time over that of the
best other method. Runs are joined (`--add`), and the line below is the last. Cells of all methods were asked in turn at
200 MB/s; at 50 MB/s one after the other, before it asked more of a mix of methods, and without taking down the form.
"""

_SPEED = """\
## Restoration speed by method

Tokens a second of the worker's part alone, layer by layer over a link of the given bandwidth (HCache sections 6.2 and
6.3.1). *Best* is the mix of layers that the measured profile predicts to be fastest; its layers are recomputed, from
hidden states, as KV.
"""

_SAVING = """\
## What saving costs decoding (HCache, Figure 14)

Time between tokens of a decode batch whose every sequence is saved, over that of one that is not. *Two stages* copies
rows to a ring within the step and assembles beside it; *direct* writes every row of every layer at once, *direct I/O*
past the page cache.
"""

_METHODS = ("recompute", "kv", "hidden", "half", "planned")
_LAYER_METHODS = ("recompute", "kv", "hidden", "half", "best")

Result = tuple[dict[str, Any], str]


def page(ttft: Result, speed: Result, saving: Result) -> str:
    """The whole page. Each argument is a result and the line that says where it comes from."""
    parts = [_HEAD, _TTFT, *_ttft(*ttft), _SPEED, *_speed(*speed), _SAVING, *_saving(*saving)]
    return "\n".join(parts)


def _ttft(results: dict[str, Any], origin: str) -> list[str]:
    lines: list[str] = []
    for model, name in (("mha", "Multi-head attention"), ("gqa", "Grouped queries")):
        heads, kv_heads = results["heads"], results["kv_heads"][model]
        lines += [f"### {name}: {results['layers']} layers, {heads} heads, {kv_heads} with K and V\n"]
        lines += [
            "| history | MB/s | recompute, ms | KV | hidden | half | planned | form | tokens/s | over the best other |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        lines += _ttft_rows([each for each in results["figures"] if each["model"] == model])
        lines.append("")
    return [*lines, origin + "\n"]


def _ttft_rows(figures: list[dict[str, Any]]) -> Iterable[str]:
    for tokens, mb_per_s in sorted({(each["tokens"], each["mb_per_s"]) for each in figures}):
        found = {each["method"]: each for each in figures if (each["tokens"], each["mb_per_s"]) == (tokens, mb_per_s)}
        times = {method: found[method]["ttft_ms"] for method in _METHODS if method in found}
        others = [time for method, time in times.items() if method != "planned"]
        shown = [f"{times[method]:.0f}" if method in times else "" for method in _METHODS]
        if "planned" in times and others:
            shown += [
                _form(found["planned"]),
                f"{found['planned']['tokens_per_s']:.0f}",
                f"{times['planned'] / min(others):.2f}",
            ]
        yield f"| {tokens:,} | {mb_per_s:g} | {' | '.join(shown)} |"


def _form(figure: dict[str, Any]) -> str:
    """Of state, or that there was none; unknown where a run did not take it down."""
    return (figure["form"] or "KV") if "form" in figure else ""


def _speed(results: dict[str, Any], origin: str) -> list[str]:
    lines: list[str] = []
    for model, name in (("mha", "Multi-head attention"), ("gqa", "Grouped queries")):
        figures = results[model]["figures"]
        lines += [
            f"### {name}\n",
            "| history | GB/s | recompute | KV | hidden | half | best | its layers | over KV | over recomputing |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        for tokens, bandwidth in sorted({(each["tokens"], each["gb_per_s"]) for each in figures}, key=_unlimited_last):
            found = {
                each["method"]: each for each in figures if (each["tokens"], each["gb_per_s"]) == (tokens, bandwidth)
            }
            best = found["best"]["tokens_per_s"]
            cells = [
                f"{found[method]['tokens_per_s']:,.0f}" for method in ("recompute", "kv", "hidden", "half", "best")
            ]
            cells += [" + ".join(str(count) for count in found["best"]["mix"])]
            cells += [f"{best / found[method]['tokens_per_s']:.2f}×" for method in ("kv", "recompute")]
            lines.append(f"| {tokens:,} | {bandwidth or 'memory'} | {' | '.join(cells)} |")
        lines.append("")
    return [*lines, origin + "\n"]


def _unlimited_last(key: tuple[int, float]) -> tuple[int, float]:
    tokens, bandwidth = key
    return tokens, bandwidth or float("inf")


def _saving(results: dict[str, Any], origin: str) -> list[str]:
    lines = ["| batch | not saved, ms | two stages | direct | direct I/O |", "|---|---|---|---|---|"]
    for batch in sorted({each["batch"] for each in results["figures"]}):
        found = {each["way"]: each for each in results["figures"] if each["batch"] == batch}
        ratios = [f"{found[way]['against_off']:.3f}×" for way in ("two_stage", "direct", "direct_io")]
        lines.append(f"| {batch} | {found['off']['tbt_ms']:.1f} | {' | '.join(ratios)} |")
    return [*lines, "", origin + "\n"]
