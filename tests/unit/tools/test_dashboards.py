"""Dashboards and alerts ask for what the processes export, in queries that Prometheus can parse."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from shared.errors import ThermoclineError
from tests.unit.tools.promql import asked_by, faults_of
from tools.dashboard_panels import RATE
from tools.dashboards import DASHBOARDS, GRAFANA, ROOT, rendered
from tools.metric_docs import PROCESSES, exported_by

RULES = ROOT / "infra" / "observability" / "prometheus" / "rules.yaml"

EXPORTED = {name: facts for process in PROCESSES for name, facts in exported_by(process).items()}


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
