"""Figures at a glance show what was missed beside what was reached."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.pages import targets
from tools.pages.renderer import RESULTS, render


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A copy of the committed results, to be changed."""
    return shutil.copytree(RESULTS, tmp_path / "results")


def change(results: Path, name: str, edit: Callable[[dict[str, Any]], None]) -> None:
    file = results / f"{name}.json"
    document = json.loads(file.read_text(encoding="utf-8"))
    edit(document)
    file.write_text(json.dumps(document), encoding="utf-8")


def row(text: str, start: str) -> str:
    """The one row of a table whose first cell begins with this."""
    (found,) = [line for line in text.splitlines() if line.startswith((f"| [{start}", f"| `{start}`"))]
    return found


def test_five_figures_stand_in_the_readme_each_with_where_it_falls_short() -> None:
    """Each has conditions, too; hit ratios need no model."""
    head, _, *rows, _, counted = render("parts/readme.md").splitlines()

    assert head == "| measured | result | falls short |"
    assert len(rows) == 5
    assert all(cell.strip(" -") for line in rows for cell in line.strip("|").split(" | "))
    assert all("weights" in line or "trained" in line or "no model" in line for line in rows)
    read = targets.read(RESULTS)
    assert counted.startswith(f"{sum(target.is_met for target in read)} of {len(read)} [targets]")


def test_errors_and_pauses_of_the_run_of_faults_stand_beside_its_zero() -> None:
    """How many requests ended in an error, of how many, why, and the longest pauses; beside the single kills, too."""
    text = render("parts/readme.md")

    chaos = row(text, "500 faults")
    assert "| 0 answers lost, doubled or changed |" in chaos
    assert "2,354 of 6,689 requests ended in an error (1,546 its gateway died, 455 no way" in chaos
    assert "p99 13.5 s" in row(text, "longest pause")


def test_nodes_of_a_ladder_are_said_to_be_on_one_machine(results: Path) -> None:
    """A reader of a neighbour's figure would take it for one across a network."""

    def add(document: dict[str, Any]) -> None:
        document["results"]["network"] = "network namespaces of one machine"

    change(results, "ttft_ladder", add)

    found = row(render("results/headlines.md", results), "TTFT by the tier")
    assert "| nodes are network namespaces of one machine |" in found


def test_an_answer_that_changed_is_counted(results: Path) -> None:
    """The zero is the length of the list of violations, not a word."""
    change(results, "chaos", lambda chaos: chaos["results"]["violations"].append("[1] an answer was doubled"))

    assert "| 1 answers lost, doubled or changed |" in row(render("parts/readme.md", results), "500 faults")


def test_a_target_that_is_missed_appears_as_a_miss(results: Path) -> None:
    """Among what falls short of the run and of the README's row, and in the count of targets."""

    def miss(document: dict[str, Any]) -> None:
        target = document["runs"]["generated: ours-disk, lmcache-disk"]["results"]["targets"][0]
        target.update(ratio=0.5, is_met=False)

    change(results, "peers_documents", miss)

    text = render("parts/readme.md", results)
    shown, short = row(text, "documents of twice").rstrip(" |").split(" | ")[1:]
    assert "requests/s" not in shown
    assert "cold, requests/s 0.50×, target 1.1×" in short
    met, of = sum(target.is_met for target in targets.read(RESULTS)), len(targets.read(RESULTS))
    assert f"{met - 1} of {of} [targets]" in text


def test_a_peer_that_is_faster_appears_as_a_miss(results: Path) -> None:
    """Also where no target was set: llama.cpp's decode is one, and a slower conversation becomes one."""
    pair = "ours to lmcache"

    def slow(document: dict[str, Any]) -> None:
        (run,) = document["runs"].values()
        run["results"]["ratios"][pair]["chat"]["requests_per_s"]["median"] = 0.7

    change(results, "peers_chat", slow)

    assert "decode after 512 tokens 0.87× llama.cpp's" in row(render("parts/readme.md", results), "documents of twice")
    assert row(render("results/headlines.md", results), "conversations").endswith("| chat, requests/s 0.70× |")


def test_a_policy_that_is_better_at_one_size_appears_as_a_miss(results: Path) -> None:
    """All sizes of the pool are shown, and the one at which ours is behind is named."""
    assert row(render("parts/readme.md", results), "hit ratio").count(" / 0.") == 10

    change(
        results,
        "policy_hit_ratio",
        lambda found: found["results"]["by_blocks"]["60000"]["arc"].update(ratio=0.365),
    )

    assert "arc is better at 60,000 blocks: 0.365 to 0.363" in row(render("parts/readme.md", results), "hit ratio")


def places_of_targets(value: Any) -> Iterator[str]:
    """The name of every key that holds one target, however deep."""
    if isinstance(value, list):
        for one in value:
            yield from places_of_targets(one)
    elif isinstance(value, dict):
        for name, one in value.items():
            if name == "target" or name.startswith("target_"):
                yield name
            yield from places_of_targets(one)


def test_no_committed_target_is_left_out() -> None:
    """As many are read as there are keys with that name in all results."""
    files = sorted(RESULTS.glob("*.json"))

    places = [name for file in files for name in places_of_targets(json.loads(file.read_text(encoding="utf-8")))]

    assert len(targets.read(RESULTS)) == len(places)


def test_a_target_in_milliseconds_is_met_up_to_itself() -> None:
    """Above it, it is not; the page lists what is missed first."""
    found = [
        next(targets.of("take_over", {"target_take_over_p99_ms": 1000.0, "take_over_ms": {"p99": p99}}))
        for p99 in (1000.0, 1000.5)
    ]

    assert [target.is_met for target in found] == [True, False]
    verdicts = render("results/headlines.md").partition("## Targets")[2].splitlines()[6:]
    assert [line.endswith("**not met** |") for line in verdicts] == sorted(
        (line.endswith("**not met** |") for line in verdicts), reverse=True
    )
