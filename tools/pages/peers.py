"""Runs beside other servers as tables and lists of ratios, from the results of ``bench.peers``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tools.pages.formats import to

Run = Mapping[str, Any]
"""The ``results`` of one run: systems, ratios of ours to theirs, targets."""

_LENGTH = re.compile(r"([\d,]+)(?= tokens)")


def tables(run: Run, columns: Mapping[str, str]) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Yield titles and rows for each pass: medians of every system, then ratios to every peer.

    ``columns`` has a title for each figure; those that no system has in a pass are left out.
    """
    systems = run["systems"].values()
    for passed in dict.fromkeys(name for system in systems for name in system["passes"]):
        medians = {each["title"]: each["passes"][passed]["median"] for each in systems if passed in each["passes"]}
        names = [name for name in columns if any(name in median for median in medians.values())]
        rows = [
            [title, *(rounded(median[name]) if name in median else "" for name in names)]
            for title, median in medians.items()
        ]
        for pair, passes in run["ratios"].items():
            if passed in passes:
                ratios = passes[passed]
                rows.append([f"*{pair_title(run, pair)}*", *(_ratio(ratios.get(name)) for name in names)])
        yield [passed, *(columns[name] for name in names)], rows


def rounded(value: float) -> str:
    """Write two or three digits that mean something."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _ratio(found: Mapping[str, float] | None) -> str:
    return "" if found is None else f"{found['median']:.2f} ({to((found['least'], found['most']))})"


def pair_title(run: Run, pair: str) -> str:
    """Name two systems as a reader knows them: ``Thermocline to vLLM`` of ``ours to vllm``."""
    return " to ".join(run["systems"][name]["title"] for name in pair.split(" to "))


def tokens_in(says: str) -> int:
    """Find the length that a target names: 2048 in ``burst on a new document of 2,048 tokens``."""
    found = _LENGTH.search(says)
    if found is None:
        raise ValueError(f"no length in {says!r}")
    return int(found[1].replace(",", ""))


def medians(run: Run, titles: Mapping[str, str]) -> dict[str, float]:
    """Find the ratios of the first system to the second in every pass, by words for pass and figure."""
    ours, peer = list(run["systems"])[:2]
    return {
        f"{_pass_title(passed)}, {titles[name]}": ratio["median"]
        for passed, figures in run["ratios"][f"{ours} to {peer}"].items()
        for name, ratio in figures.items()
        if name in titles
    }


def _pass_title(passed: str) -> str:
    """Name a pass: ``one at a time, 512 tokens`` of ``single_512``."""
    kind, _, size = passed.partition("_")
    title = {"single": "one at a time", "eight": "eight at once"}.get(kind, kind)
    return f"{title}, {int(size):,} tokens" if size else title


def missed_together(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """Group missed targets that differ in a length alone: model, target, says (with all lengths) and ratios of each."""
    grouped: dict[tuple[str, float, str, str], list[tuple[str, float]]] = {}
    for run in runs:
        for row in run["targets"]:
            if not row["is_met"]:
                before, length, after = [*_LENGTH.split(row["says"], maxsplit=1), "", ""][:3]
                key = (run["model"], row["target"], before, after)
                grouped.setdefault(key, []).append((length, row["ratio"]))
    return [
        {
            "model": model,
            "target": target,
            "says": before + ", ".join(length for length, _ in rows) + after,
            "ratios": [ratio for _, ratio in rows],
        }
        for (model, target, before, after), rows in grouped.items()
    ]


def slower_decode(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """Find where another server decodes a single stream faster: tokens before it, ratio, and the peer's title."""
    return [
        {"tokens": int(passed.removeprefix("single_")), "ratio": ratio, "peer": pair_title(run, pair).split(" to ")[1]}
        for run in runs
        for pair, passes in run["ratios"].items()
        for passed, figures in passes.items()
        if passed.startswith("single_") and (ratio := figures["decode_tokens_per_s"]["median"]) < 1
    ]
