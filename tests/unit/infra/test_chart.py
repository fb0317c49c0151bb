"""The chart renders with Helm's own engine into objects that Kubernetes knows, and refuses values without sense."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("helm_python", reason="Helm's engine has no wheel for this platform")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

from tests.unit.infra.chart_rendering import CHART, Refused, files_of, find, lint, render  # noqa: E402
from tests.unit.infra.chart_variants import EVERYTHING, VARIANTS  # noqa: E402

CUSTOM = {"keda.sh/v1alpha1", "monitoring.coreos.com/v1"}
"""API groups of others, whose schemas do not come with Kubernetes."""


@pytest.mark.parametrize("version", ["1.31", "1.34", "1.37"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_kubernetes_knows_every_object_and_field(variant: str, version: str) -> None:
    """Each object passes the strict schema of Kubernetes' own API, in which no unknown field is allowed."""
    manifests = [each for each in render(VARIANTS[variant]) if each["apiVersion"] not in CUSTOM]
    # Claims for a pod came with 1.34, and the chart refuses them before.
    if version == "1.31":
        manifests = [each for each in manifests if each["kind"] != "ResourceClaimTemplate"]

    for manifest in manifests:
        kubernetes_validate.validate(manifest, version, strict=True)
    assert {"Deployment", "ConfigMap", "Service"} <= {each["kind"] for each in manifests}


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_object_is_made_twice(variant: str) -> None:
    """Kind and name tell every object from every other."""
    names = [(each["kind"], each["metadata"]["name"]) for each in render(VARIANTS[variant])]

    assert len(names) == len(set(names))


def test_the_notes_ask_with_a_key_where_one_is_needed() -> None:
    """Without one the command that they print would be answered 401."""
    notes = "thermocline/templates/NOTES.txt"
    closed = files_of(CHART, {"gateway": {"tenants": {"secretName": "tenants"}}})[notes]

    assert "curl --header 'authorization: Bearer KEY' http://127.0.0.1:8000/v1/models" in closed
    assert "curl http://127.0.0.1:8000/v1/models" in files_of(CHART, {})[notes]


def test_helm_finds_nothing_to_complain_about() -> None:
    """``helm lint`` has nothing beyond that the chart of NATS has not been fetched."""
    assert set(lint()) == {"chart directory is missing these dependencies: nats"}
    assert set(lint(EVERYTHING)) <= {"chart directory is missing these dependencies: nats"}


def test_a_fetched_chart_of_nats_changes_nothing_here(tmp_path: Path) -> None:
    """Who has run ``helm dependency update`` tests the same objects as who has not."""
    chart = tmp_path / CHART.name
    shutil.copytree(CHART, chart)
    fetched = chart / "charts" / "fetched"
    (fetched / "templates").mkdir(parents=True)
    (fetched / "Chart.yaml").write_text("apiVersion: v2\nname: fetched\nversion: 1.0.0\n")
    (fetched / "templates" / "one.yaml").write_text("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: of-another}\n")

    files = files_of(chart, {})

    assert files.keys() == files_of(CHART, {}).keys()
    assert not any("of-another" in text for text in files.values())


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"pools": [{"name": "cpu", "worker": 2}]}, "worker"),
        ({"pools": [{"name": "Gpu"}]}, "name"),
        ({"pools": [{"name": "gateway"}]}, "name"),
        ({"pools": [{"name": "cpu", "workers": 0}]}, "workers"),
        ({"poolDefaults": {"device": "tpu"}}, "device"),
        ({"gateway": {"replica": 3}}, "replica"),
        ({"gateway": {"apiMetrics": "off"}}, "apiMetrics"),
        ({"gateway": {"apiMetrics": "admin"}}, "adminKey"),
        ({"gateway": {"tls": {"minVersion": "1.1"}}}, "minVersion"),
        ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
        ({"pools": [{"name": "gpu", "device": "cuda", "workers": 2}]}, "one worker"),
        ({"pools": [{"name": "cpu", "disk": {"kvGib": 50}}]}, "claimGib"),
        ({"pools": [{"name": "cpu", "share": {"engine": "mooncake"}}]}, "engine"),
        ({"pools": [{"name": "cpu", "share": {"firstPort": 22000}}]}, "lastPort"),
        ({"pools": [{"name": "cpu"}, {"name": "gpu"}, {"name": "cpu"}]}, "two have the name cpu"),
        ({"gateway": {"autoscaling": {"enabled": True, "minReplicas": 9}}}, "minReplicas is above maxReplicas"),
        (
            {"pools": [{"name": "cpu", "autoscaling": {"kind": "hpa", "minReplicas": 5}}]},
            r"pool cpu: autoscaling\.minReplicas is above",
        ),
        ({"gateway": {"metricsPort": 8000}}, "port of the API"),
        ({"gateway": {"resources": {"cpuRequest": ""}}}, "cpuRequest"),
        ({"scheduler": {"resources": {"cpuRequest": "one"}}}, "cpuRequest"),
        ({"poolDefaults": {"storageCpu": ""}}, "storageCpu"),
        ({"gateway": {"resources": {"cpuLimit": "500m"}}}, r"gateway\.resources: cpuRequest 1 is above cpuLimit 500m"),
        ({"scheduler": {"resources": {"cpuRequest": 2, "cpuLimit": 1.5}}}, r"scheduler\.resources: cpuRequest"),
        ({"settings": {"common": {"gateway": {"a": 1}}, "gateway": {"b": 2}}}, "same table"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_values_that_make_no_sense_are_refused(values: dict[str, Any], complaint: str) -> None:
    """By the schema or by the templates, with words that name the fault."""
    with pytest.raises(Refused, match=complaint):
        render(values)


@pytest.mark.parametrize(
    "values",
    [
        {"gateway": {"autoscaling": {"minReplicas": 9}}},
        {"gateway": {"resources": {"cpuRequest": "1500m", "cpuLimit": 1.5}}},
        {"gateway": {"resources": {"cpuRequest": 0.5, "cpuLimit": "500m"}}},
        {"settings": {"common": {"gateway": {"max_inflight": 7}}}},
    ],
    ids=["autoscaler-off", "equal", "equal-fraction", "table-once"],
)
def test_what_can_be_installed_is_not_refused(values: dict[str, Any]) -> None:
    """Checks stop at the border: equal amounts pass, and so do bounds of an autoscaler that is off."""
    assert render(values)


def test_a_gpu_is_claimed_for_a_pod_only_where_kubernetes_can() -> None:
    """Before 1.34 the chart says what to do in its place."""
    cuda = {"pools": [{"name": "gpu", "device": "cuda"}]}

    with pytest.raises(Refused, match=r"needs Kubernetes 1\.34"):
        render(cuda | {"kubeVersion": "v1.33.4"})
    assert find(render(cuda | {"kubeVersion": "v1.34.0"}), "ResourceClaimTemplate", "cell-gpu")


def test_two_pools_do_not_share_their_pods() -> None:
    """Selectors of one pool find none of another's."""
    manifests = render({"pools": [{"name": "one"}, {"name": "two"}]})
    one, two = (find(manifests, "StatefulSet", f"cell-{name}") for name in ("one", "two"))

    labels = one["spec"]["template"]["metadata"]["labels"]
    wanted = two["spec"]["selector"]["matchLabels"]
    assert any(labels.get(key) != value for key, value in wanted.items())


@pytest.mark.parametrize("variant", VARIANTS)
def test_whatever_selects_pods_selects_those_of_its_name(variant: str) -> None:
    """A service or a disruption budget is named as what makes its pods, and finds them."""
    manifests = render(VARIANTS[variant])
    made = {
        each["metadata"]["name"]: each["spec"]["template"]["metadata"]["labels"].items()
        for each in manifests
        if each["kind"] in ("Deployment", "StatefulSet")
    }

    selecting = [each for each in manifests if each["kind"] in ("Service", "PodDisruptionBudget")]
    assert selecting
    for each in selecting:
        selector = each["spec"]["selector"]
        assert selector.get("matchLabels", selector).items() <= made[each["metadata"]["name"]]


@pytest.mark.parametrize("variant", VARIANTS)
def test_everything_that_makes_pods_has_a_disruption_budget(variant: str) -> None:
    """A drain of several machines at once takes neither all gateways, all schedulers nor all nodes of a pool."""
    manifests = render(VARIANTS[variant])
    bounded = {each["metadata"]["name"] for each in manifests if each["kind"] == "PodDisruptionBudget"}

    assert bounded == {each["metadata"]["name"] for each in manifests if each["kind"] in ("Deployment", "StatefulSet")}


def test_a_setting_of_the_gateway_does_not_restart_the_caches() -> None:
    """Pods of a pool are made anew only for what they read."""
    key = ["spec", "template", "metadata", "annotations", "checksum/settings"]

    def checksum(values: dict[str, Any], kind: str, name: str) -> Any:
        found: Any = find(render(values), kind, name)
        for part in key:
            found = found[part]
        return found

    changed = {"settings": {"gateway": {"max_inflight": 7}}}
    assert checksum({}, "StatefulSet", "cell-cpu") == checksum(changed, "StatefulSet", "cell-cpu")
    assert checksum({}, "Deployment", "cell-gateway") != checksum(changed, "Deployment", "cell-gateway")


def test_the_chart_of_nats_comes_from_its_makers() -> None:
    """Its repository is the public one, and its condition is a value of ours."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())

    (nats,) = chart["dependencies"]
    assert nats["repository"] == "https://nats-io.github.io/k8s/helm/charts/"
    assert nats["condition"] == "nats.enabled"
