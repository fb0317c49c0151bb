"""The pages on deployment name values, files and objects that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.infra.deployed_code import metric_names
from tests.unit.tools.promql import series_of
from tools.chart_values import CHART
from tools.metric_docs import PROCESSES, exported_by

ROOT = Path(__file__).parents[3]
NAMES = ("containers", "kubernetes", "scale", "share-between-nodes")
PAGES = [ROOT / "docs" / "how-to" / f"{name}.md" for name in NAMES]

VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())


def has(path: str) -> bool:
    """Whether the chart has a value of that path, free-form mappings included."""
    node: Any = VALUES
    for part in path.split("."):
        if node == {}:
            return True
        if not isinstance(node, dict) or part not in node:
            return False
        node = node[part]
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_values_in_the_text_are_the_charts(page: Path) -> None:
    """What stands in backticks and looks like a path of values is one."""
    roots = "|".join(VALUES)
    named = re.findall(rf"`((?:{roots})\.[A-Za-z.]+)(?:: [^`]*)?`", page.read_text())

    assert all(has(path) for path in named), [path for path in named if not has(path)]
    assert named or page.name != "kubernetes.md"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_of_values_are_accepted(page: Path) -> None:
    """Each YAML block that is no Compose file renders."""
    pytest.importorskip("helm_python", reason="Helm's engine has no wheel for this platform")
    from tests.unit.infra.chart_rendering import render

    for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL):
        values = yaml.safe_load(block)
        if "services" not in values:
            assert render(values)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_metrics_in_the_text_exist(page: Path) -> None:
    """Each name is a series that a process exports, or the name that several series have in common."""
    exported = {name: facts for process in PROCESSES for name, facts in exported_by(process).items()}
    known = set(exported) | set(series_of(exported)) | {facts.series for facts in exported.values()}

    assert metric_names(page.read_text()) <= known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_objects_of_commands_are_the_charts(page: Path) -> None:
    """What ``kubectl`` is asked about is rendered, with the pool of the examples."""
    pytest.importorskip("helm_python", reason="Helm's engine has no wheel for this platform")
    from tests.unit.infra.chart_rendering import render

    pools = [{"name": "h100", "device": "cpu"}]
    made = {f"{each['kind'].lower()}/{each['metadata']['name']}" for each in [*render(), *render({"pools": pools})]}
    named = set(re.findall(r"\b(?:deployment|statefulset|service)/[a-z0-9-]+", page.read_text()))

    assert named <= made
    assert named or page.name != "kubernetes.md"
