"""The pages on deployment name values, files and objects that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.scheduler import cell_metrics
from services.storage import measures
from tests.unit.infra.deployed_code import gateway_series, metric_names
from tools.chart_values import CHART

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "docs" / "how-to" / f"{name}.md" for name in ("containers", "kubernetes", "scale")]
OTHERS = [
    ROOT / "infra" / "containers" / "README.md",
    CHART / "README.md",
    ROOT / "infra" / "adr" / "0016-a-pod-is-a-node.md",
]

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


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Each relative link is a file of the repository."""
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())

    assert targets or page.parent.name == "adr"
    assert all((page.parent / target).exists() for target in targets), targets


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
    """Each name is a series of the gateway or the storage, or one that the scheduler makes from its status."""
    # Importing a module of metrics puts them into the registry.
    assert measures.FAILURES
    made_by_scheduler = set(re.findall(r'"(?:thermocline_)?(\w+)"', Path(cell_metrics.__file__).read_text()))
    for name in metric_names(page.read_text()):
        in_registry = name in gateway_series() or name.removesuffix("_total") in gateway_series()
        assert in_registry or name.removeprefix("thermocline_") in made_by_scheduler, name
