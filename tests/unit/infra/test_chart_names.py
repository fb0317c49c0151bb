"""Names of the chart's objects, from names of releases that Helm admits."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("helm_python", reason="Helm's engine has no wheel for this platform")

from tests.unit.infra.chart_rendering import Refused, find, render

LABEL = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
"""DNS-1035, which a Service's name follows."""

LONG = "production-thermocline-cell-in-europe"


def services(release: str) -> set[str]:
    return {each["metadata"]["name"] for each in render({}, release) if each["kind"] == "Service"}


@pytest.mark.parametrize(
    "release", ["cell", "my.cell", f"{LONG}-a", "a" * 29 + ".bbb", "n" * 53, "t" * 22 + "-" * 9 + "z"]
)
def test_names_are_legal(release: str) -> None:
    """Each Service's name is a label, also of a release with a dot or a long name."""
    manifests = render({"pools": [{"name": "p" * 20}]}, release)

    assert all(LABEL.fullmatch(name) for name in services(release))
    for each in manifests:
        assert len(each["metadata"]["name"]) <= 30 + 1 + 20


def test_short_names_stay_as_they_are() -> None:
    """An upgrade of a release with at most 30 characters renames nothing."""
    release = "a-name-of-exactly-thirty-chars"

    assert len(release) == 30
    assert services(release) == {f"{release}-gateway", f"{release}-cpu"}


def test_two_long_names_stay_two() -> None:
    """Releases that differ after the cut share no object."""
    first, second = (
        {(each["kind"], each["metadata"]["name"]) for each in render({}, f"{LONG}-{end}")} for end in ("a", "b")
    )

    assert not first & second


def test_a_name_that_begins_with_a_digit_is_refused() -> None:
    """Kubernetes would refuse its Services in the middle of the installation; another name of objects helps."""
    with pytest.raises(Refused, match="fullnameOverride"):
        render({}, "1cell")
    assert find(render({"fullnameOverride": "cell"}, "1cell"), "Service", "cell-gateway")


@pytest.mark.parametrize("release", ["true", "null", "1e3", "007"])
def test_names_stay_text(release: str) -> None:
    """YAML takes such words for other types, and Kubernetes wants text."""
    manifests = render({"fullnameOverride": "no", "pools": [{"name": "yes"}]}, release)

    for each in manifests:
        assert isinstance(each["metadata"]["name"], str)
        assert all(isinstance(value, str) for value in each["metadata"]["labels"].values())
    pool = find(manifests, "StatefulSet", "no-yes")
    wanted = {"app.kubernetes.io/instance": release, "thermocline/pool": "yes"}
    assert wanted.items() <= pool["metadata"]["labels"].items()
    assert wanted.items() <= pool["spec"]["selector"]["matchLabels"].items()
