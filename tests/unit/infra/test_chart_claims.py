"""An upgrade that would change the claims of a pool's disk says so before Kubernetes refuses it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("helm_python", reason="Helm's engine has no wheel for this platform")

from tests.unit.infra.chart_rendering import CHART, Refused, files_of, find, render

LIVE = 'index .root.Values.global.live (printf "%s/%s" .root.Release.Namespace $name)'
LOOKUP = 'lookup "apps/v1" "StatefulSet" .root.Release.Namespace $name'
PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "kubernetes.md"


def upgrade(folder: Path, live: dict[str, Any], disk: dict[str, Any]) -> dict[str, str]:
    """Render for a cluster with this StatefulSet: a copy of the chart finds it among its values instead of asking."""
    chart = folder / CHART.name
    shutil.copytree(CHART, chart)
    checks = chart / "templates" / "_checks.tpl"
    text = checks.read_text()
    assert text.count(LOOKUP) == 1
    checks.write_text(text.replace(LOOKUP, LIVE))
    values = {"global": {"live": {"llm/cell-cpu": live}}, "pools": [{"name": "cpu", "disk": disk}]}
    return files_of(chart, values)


def live(disk: dict[str, Any], size: str | None = None) -> dict[str, Any]:
    """Return the StatefulSet that the chart makes with these values, with its size as the API server writes it."""
    found = find(render({"pools": [{"name": "cpu", "disk": disk}]}), "StatefulSet", "cell-cpu")
    if size is not None:
        (claim,) = found["spec"]["volumeClaimTemplates"]
        claim["spec"]["resources"]["requests"]["storage"] = size
    return found


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ({}, {"claimGib": 50}, "has claims of 12 GiB of the default class and the values want claims of 50 GiB"),
        ({}, {"storageClassName": "fast"}, "want claims of 12 GiB of class fast"),
        ({"storageClassName": "fast"}, {}, "has claims of 12 GiB of class fast"),
        ({}, {"enabled": False}, "want no claim"),
        ({"enabled": False}, {}, "has no claim"),
    ],
    ids=["size", "class", "default-class", "off", "on"],
)
def test_other_claims_are_refused(
    before: dict[str, Any], after: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    """The message names both, and the page that says how to change them."""
    with pytest.raises(Refused, match=complaint) as refused:
        upgrade(tmp_path, live(before), after)

    (anchor,) = re.findall(r"docs/how-to/kubernetes\.md#([a-z-]+)", str(refused.value))
    headings = re.findall(r"^#+ (.+)$", PAGE.read_text(), re.MULTILINE)
    assert anchor in {heading.lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    ("disk", "size"),
    [
        ({}, None),
        ({"enabled": False}, None),
        ({"storageClassName": "fast", "kvGib": 1}, None),
        ({"claimGib": 2048}, "2Ti"),
        ({"claimGib": 1000}, "1000Gi"),
        ({"claimGib": 1048576}, "1Pi"),
    ],
    ids=["default", "off", "class", "tebibytes", "gibibytes", "pebibytes"],
)
def test_the_same_claims_pass(disk: dict[str, Any], size: str | None, tmp_path: Path) -> None:
    """Also where the API server writes the size with another unit."""
    assert upgrade(tmp_path, live(disk, size), disk)


def test_a_larger_disk_within_the_claim_passes(tmp_path: Path) -> None:
    """``kvGib`` is a flag of the storage, and no part of the claim."""
    assert upgrade(tmp_path, live({}), {"kvGib": 12})


def test_without_a_cluster_nothing_is_refused() -> None:
    """``helm template`` and a first installation find no StatefulSet."""
    assert render({"pools": [{"name": "cpu", "disk": {"claimGib": 50}}]})
