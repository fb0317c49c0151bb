"""Grafana dashboards, made from tables of panels.

``python -m tools.dashboards`` writes them to ``infra/observability/grafana/``. A test checks that what is committed is
what this makes, that every query can be parsed, and that it asks for metrics and labels that a process exports.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from tools.dashboard_panels import CACHE, CONTROL, SERVING, Dashboard, P, Panel

ROOT = Path(__file__).parents[1]
GRAFANA = ROOT / "infra" / "observability" / "grafana"

WIDTH, HEIGHT, PER_ROW = 8, 8, 3
"""A panel's size in Grafana's grid of 24 columns."""

DASHBOARDS = {"serving.json": SERVING, "cache.json": CACHE, "control.json": CONTROL}


SOURCE = {"type": "prometheus", "uid": "${source}"}

CELL = {
    "name": "cell",
    "type": "query",
    "label": "Cell",
    "datasource": SOURCE,
    "query": f"label_values({P}bus_connected, cell)",
    "refresh": 2,
    "multi": True,
    "includeAll": True,
    "allValue": ".*",
    "current": {"text": ["All"], "value": ["$__all"]},
}
"""The variable of the label that tells cells apart. All of them are also those without the label."""


def rendered(dashboard: Dashboard) -> str:
    """The JSON that Grafana imports or is provisioned with."""
    return json.dumps(_document(dashboard), indent=1) + "\n"


def _document(dashboard: Dashboard) -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    top = 0
    for heading, members in dashboard.rows:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": heading,
                "collapsed": False,
                "gridPos": {"x": 0, "y": top, "w": 24, "h": 1},
                "panels": [],
            }
        )
        top += 1
        for place, panel in enumerate(members):
            position = {"x": place % PER_ROW * WIDTH, "y": top + place // PER_ROW * HEIGHT, "w": WIDTH, "h": HEIGHT}
            panels.append(_panel(len(panels) + 1, panel, position))
        top += -(-len(members) // PER_ROW) * HEIGHT
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["thermocline"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [{"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}, CELL],
        },
        "panels": panels,
    }


def _panel(number: int, panel: Panel, position: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": position,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + place), "datasource": SOURCE, "expr": _of_cells(query), "legendFormat": legend}
            for place, (legend, query) in enumerate(panel.queries)
        ],
    }


def _of_cells(query: str) -> str:
    """A query about the cells that the variable holds."""
    return re.sub(rf"\b(?:{P}\w+|up)\b", r'\g<0>{cell=~"$cell"}', query)


def main() -> None:
    """Write every dashboard."""
    # There are no flags, but --help must not run it.
    argparse.ArgumentParser(description=__doc__).parse_args()
    GRAFANA.mkdir(parents=True, exist_ok=True)
    for name, dashboard in DASHBOARDS.items():
        (GRAFANA / name).write_text(rendered(dashboard), encoding="utf-8")


if __name__ == "__main__":
    main()
