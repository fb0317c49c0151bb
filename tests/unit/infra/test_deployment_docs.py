"""The pages on deployment name values, files and objects that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.memory.segment import SHM_DIRECTORY
from tools.chart_values import CHART

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
def test_objects_of_commands_are_the_charts(page: Path) -> None:
    """What ``kubectl`` is asked about is rendered, with the pool of the examples."""
    pytest.importorskip("helm_python", reason="Helm's engine has no wheel for this platform")
    from tests.unit.infra.chart_rendering import render

    pools = [{"name": "h100", "device": "cpu"}]
    made = {f"{each['kind'].lower()}/{each['metadata']['name']}" for each in [*render(), *render({"pools": pools})]}
    named = set(re.findall(r"\b(?:deployment|statefulset|service)/[a-z0-9-]+", page.read_text()))

    assert named <= made
    assert named or page.name != "kubernetes.md"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_volumes_for_shared_memory_are_in_memory(page: Path) -> None:
    """An ordinary volume is a folder of root's on a disk, where a process cannot make its pools."""
    text = page.read_text()
    mounted = set(re.findall(rf"--volume (\w+):{SHM_DIRECTORY}\b", text))
    made = {
        options.split()[-1]: options
        for options in re.findall(r"^docker volume create ([^#\n]+?)(?: +#.*)?$", text, re.MULTILINE)
    }

    assert mounted <= made.keys()
    for name in mounted:
        assert {"type=tmpfs", "device=tmpfs"} <= set(made[name].split())
        assert "mode=1777" in made[name]
    assert mounted or page.name != "containers.md"
