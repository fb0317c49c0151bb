"""Dashboards and alerts ask for what the processes export, in queries that Prometheus can parse."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import yaml

from services.scheduler.cell_families import cell_facts
from shared.errors import ThermoclineError
from tests.unit.tools.promql import asked_by, faults_of
from tools.dashboard_panels import RATE
from tools.dashboards import DASHBOARDS, GRAFANA, ROOT, rendered
from tools.metric_docs import COMMON, PROCESSES, exported_by

RULES = ROOT / "infra" / "observability" / "prometheus" / "rules.yaml"

EXPORTED = {
    name: replace(facts, labels=(*facts.labels, "cell"))
    for process in PROCESSES
    for name, facts in exported_by(process).items()
}
"""All metrics by name, with the label that a scrape adds for each cell."""


def panels(name: str) -> list[dict[str, Any]]:
    """The graphs of a dashboard."""
    document = json.loads(rendered(DASHBOARDS[name]))
    return [panel for panel in document["panels"] if panel["type"] != "row"]


def rules() -> list[dict[str, Any]]:
    """All alerts."""
    document = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    return [rule for group in document["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_committed_dashboards_are_current(name: str) -> None:
    """After a change, ``python -m tools.dashboards`` must be run and its files committed."""
    assert (GRAFANA / name).read_text(encoding="utf-8") == rendered(DASHBOARDS[name])


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_ask_for_what_is_exported(name: str) -> None:
    """Names and labels of every query exist, counters are asked for as rates, and legends show labels that are kept."""
    faults = []
    for panel in panels(name):
        for target in panel["targets"]:
            query = target["expr"].replace(RATE, "5m")
            faults += faults_of(query, EXPORTED)
            kept = {label for asked in asked_by(query) for label in asked.kept}
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            faults += [f"{panel['title']}: the legend shows {label}" for label in sorted(shown - kept)]

    assert faults == []


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_show_the_chosen_cells(name: str) -> None:
    """Every series is of the cells that the variable holds; all of them are also those without the label."""
    (cell,) = [one for one in json.loads(rendered(DASHBOARDS[name]))["templating"]["list"] if one["name"] == "cell"]
    queries = [target["expr"] for panel in panels(name) for target in panel["targets"]]

    assert (cell["includeAll"], cell["allValue"], cell["current"]["value"]) == (True, ".*", ["$__all"])
    for query in queries:
        assert all("cell" in asked.compared for asked in asked_by(query.replace(RATE, "5m"))), query
        assert query.count('cell=~"$cell"') == len(asked_by(query.replace(RATE, "5m")))


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_do_not_overlap(name: str) -> None:
    """Every cell of the grid belongs to one panel, within its 24 columns; ids are unique."""
    taken: set[tuple[int, int]] = set()
    document = json.loads(rendered(DASHBOARDS[name]))
    for panel in document["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells

    assert len({panel["id"] for panel in document["panels"]}) == len(document["panels"])


def test_dashboards_have_names_of_their_own() -> None:
    """Grafana keeps one dashboard a uid."""
    assert len({dashboard.uid for dashboard in DASHBOARDS.values()}) == len(DASHBOARDS)


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_alerts_ask_for_what_is_exported(rule: dict[str, Any]) -> None:
    """An alert has a query about metrics that exist, a severity, a time that Prometheus reads, and words for people."""
    assert faults_of(rule["expr"], EXPORTED) == []
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))
    assert rule["annotations"]["summary"]
    assert rule["annotations"]["description"]
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_alerts_speak_of_labels_that_are_there(rule: dict[str, Any]) -> None:
    """What an annotation shows of an alert's labels is kept by its query."""
    shown = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
    asked = asked_by(rule["expr"])
    kept = {label for one in asked for label in one.kept}
    is_bare = not any(one.kept for one in asked) and "sum(" not in rule["expr"]

    assert shown <= kept | ({"instance", "job"} if is_bare else set())


@cache
def at_the_start() -> set[str]:
    """The names of all series that a new process exports before anything has happened."""
    modules = sorted({*COMMON, *(module for modules in PROCESSES.values() for module in modules)})
    program = f"""
import importlib
for module in {modules}:
    importlib.import_module(module)
from services.scheduler.cell_families import counter_families
from shared.metrics import REGISTRY
for family in [*REGISTRY.collect(), *counter_families({{}})]:
    for sample in family.samples:
        print(sample.name)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    return set(ended.stdout.split())


@pytest.mark.parametrize(
    "rule", [rule for rule in rules() if "increase(" in rule["expr"]], ids=lambda rule: rule["alert"]
)
def test_alerts_see_the_first_event(rule: dict[str, Any]) -> None:
    """What an alert wants to increase is there at 0 before: a series that begins at 1 has not increased."""
    assert {asked.name for asked in asked_by(rule["expr"])} <= at_the_start()


@pytest.mark.parametrize(
    "rule", [rule for rule in rules() if "increase(" in rule["expr"]], ids=lambda rule: rule["alert"]
)
def test_alerts_see_what_happens_as_a_scheduler_takes_over(rule: dict[str, Any]) -> None:
    """The next scheduler continues the cell's counters in series of its own, whose first value has not increased."""
    of_the_cell = {asked.name for asked in asked_by(rule["expr"])} & {facts.series for facts in cell_facts()}

    for name in of_the_cell:
        assert re.search(rf"increase\(\(max by \([\w, ]+\) \({name}\)\)\[\d+[mh]:\]\)", rule["expr"])


def test_the_alert_about_failures_sees_a_gateway_that_has_only_failed() -> None:
    """What it adds to the failures is there at 0 before the first success: a sum with nothing is nothing."""
    assert "thermocline_request_success_total" in at_the_start()


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_alerts_add_up_one_cell(rule: dict[str, Any]) -> None:
    """Several cells may share a Prometheus; where the label is absent, all is one cell."""
    mixed = re.findall(r"\b(?:sum|max|min|avg|count|group)\b(?! by \(cell\b).*", rule["expr"])

    assert mixed == []


def test_alerts_have_names_of_their_own() -> None:
    """One name, one alert."""
    names = [rule["alert"] for rule in rules()]

    assert len(set(names)) == len(names)


def test_names_in_the_guide_exist() -> None:
    """Each name of a metric in its table is one that a process exports."""
    text = (ROOT / "docs" / "how-to" / "observe.md").read_text(encoding="utf-8")
    rows = [row.split(" | ")[1] for row in text.splitlines() if row.startswith("| ") and "?" in row.split(" | ")[0]]
    named = {name for row in rows for name in re.findall(r"`(\w+_\w+)`", row)} - {"no_worker"}

    assert len(named) > 20
    assert named <= {facts.series.removeprefix("thermocline_") for facts in EXPORTED.values()}


def test_error_codes_in_alerts_exist() -> None:
    """An alert that leaves error codes out names codes that there are."""
    codes = {kind.code for kind in _errors(ThermoclineError)} | {"client_.*"}

    for rule in rules():
        for pattern in re.findall(r'code!~"([^"]+)"', rule["expr"]):
            assert set(pattern.split("|")) <= codes


def _errors(kind: type[ThermoclineError]) -> set[type[ThermoclineError]]:
    return {kind}.union(*(_errors(one) for one in kind.__subclasses__()))
