"""What clusters ask of pods: where they run, before whom, under which identity, what they are told, and who gets in."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("helm_python", reason="Helm's engine has no wheel for this platform")

from tests.unit.infra.chart_rendering import Manifest, Refused, containers, find, pod_specs, render
from tests.unit.infra.chart_variants import EVERYTHING

AFFINITY = {
    "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["H100", "H200"]}]}]
        }
    }
}


def templates(manifests: list[Manifest]) -> dict[str, dict[str, Any]]:
    """The templates of pods, with their labels and annotations, by the name of what makes them."""
    made = [each for each in manifests if each["kind"] in ("Deployment", "StatefulSet")]
    return {each["metadata"]["name"]: each["spec"]["template"] for each in made}


@pytest.mark.parametrize("place", ["gateway", "scheduler", "poolDefaults"])
def test_each_kind_of_pod_is_placed_by_its_own_values(place: str) -> None:
    """Affinity and priority are those of its part of the values, and the others have none."""
    given = {place: {"affinity": AFFINITY, "priorityClassName": "serving"}}
    name = {"poolDefaults": "cell-cpu"}.get(place, f"cell-{place}")

    pods = pod_specs(render(given))

    assert (pods[name]["affinity"], pods[name]["priorityClassName"]) == (AFFINITY, "serving")
    assert not any({"affinity", "priorityClassName"} & set(pod) for other, pod in pods.items() if other != name)


def test_a_pool_overrides_the_placement_of_its_defaults() -> None:
    """As it does every other value."""
    pools = [{"name": "cpu"}, {"name": "big", "priorityClassName": "high"}]

    pods = pod_specs(render({"poolDefaults": {"priorityClassName": "serving"}, "pools": pools}))

    assert [pods[name]["priorityClassName"] for name in ("cell-cpu", "cell-big")] == ["serving", "high"]


def test_a_scheduler_waits_briefly_for_a_lost_machine_whatever_else_it_tolerates() -> None:
    """Its own tolerations come beside those of the values."""
    given = {"key": "front", "operator": "Exists"}

    pods = pod_specs(render({"scheduler": {"tolerations": [given]}}))

    tolerated = pods["cell-scheduler"]["tolerations"]
    assert given in tolerated
    assert {each.get("tolerationSeconds") for each in tolerated if each != given} == {15}
    assert len(tolerated) == 3


def test_every_container_gets_the_variables_of_the_values() -> None:
    """As they are, secrets included; the chart's own come later, and so win."""
    given = [
        {"name": "NCCL_SOCKET_IFNAME", "value": "eth1"},
        {"name": "HEADERS", "valueFrom": {"secretKeyRef": {"name": "otel", "key": "headers"}}},
        {"name": "POD_NAME", "value": "mine"},
    ]

    pods = pod_specs(render(EVERYTHING | {"env": given}))

    ours = [each for pod in pods.values() for each in containers(pod).values() if "args" in each]
    assert len(ours) > 5
    for container in ours:
        assert container["env"][:3] == given
        assert container["env"][-1]["name"] != "HEADERS"


def test_every_pod_gets_the_labels_and_annotations_of_the_values() -> None:
    """Those of the chart stay, and nothing selects by what is given."""
    given = {"podLabels": {"azure.workload.identity/use": "true"}, "podAnnotations": {"linkerd.io/inject": "disabled"}}
    plain = templates(render())

    found = templates(render(given))

    for name, template in found.items():
        metadata, before = template["metadata"], plain[name]["metadata"]
        assert metadata["labels"] == before["labels"] | given["podLabels"]
        assert metadata["annotations"] == before["annotations"] | given["podAnnotations"]


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"podLabels": {"app.kubernetes.io/name": "mine"}}, "app.kubernetes.io/name"),
        ({"podLabels": {"thermocline/pool": "mine"}}, "thermocline/pool"),
        ({"podAnnotations": {"checksum/settings": "mine"}}, "checksum/settings"),
        ({"env": [{"value": "nameless"}]}, "env/0.*name"),
    ],
    ids=["selected-by", "pool", "checksum", "nameless"],
)
def test_what_the_chart_itself_sets_is_refused(values: dict[str, Any], complaint: str) -> None:
    """Two keys of one name are no YAML, and a pod with another's labels is not found."""
    with pytest.raises(Refused, match=complaint):
        render(values)


def test_an_existing_service_account_is_used_and_not_made() -> None:
    """Where administrators make the identities."""
    manifests = render({"serviceAccount": {"name": "kv"}})

    assert {pod["serviceAccountName"] for pod in pod_specs(manifests).values()} == {"kv"}
    assert not [each for each in manifests if each["kind"] == "ServiceAccount"]


def test_without_an_ingress_there_is_none() -> None:
    """Whether clients come from outside is the operator's choice."""
    assert not [each for each in render() if each["kind"] == "Ingress"]


@pytest.mark.parametrize(("tls", "port"), [({}, "http"), ({"secretName": "api-tls"}, "https")], ids=["plain", "tls"])
def test_an_ingress_leads_to_the_gateways(tls: dict[str, str], port: str) -> None:
    """Every path of every host, to the service's port by its name, whatever is spoken there."""
    hosts = ["llm.example.com", "api.example.com"]
    ingress = {
        "enabled": True,
        "className": "nginx",
        "annotations": {"nginx.ingress.kubernetes.io/proxy-body-size": "16m"},
        "hosts": hosts,
        "tlsSecretName": "llm-tls",
    }

    manifests = render({"gateway": {"ingress": ingress, "tls": tls}})

    made = find(manifests, "Ingress", "cell-gateway")
    backend = {"service": {"name": "cell-gateway", "port": {"name": port}}}
    path = {"paths": [{"path": "/", "pathType": "Prefix", "backend": backend}]}
    assert made["metadata"]["annotations"] == ingress["annotations"]
    assert made["spec"] == {
        "ingressClassName": "nginx",
        "tls": [{"hosts": hosts, "secretName": "llm-tls"}],
        "rules": [{"host": host, "http": path} for host in hosts],
    }
    assert [each["name"] for each in find(manifests, "Service", "cell-gateway")["spec"]["ports"]] == [port]


def test_an_ingress_without_hosts_takes_all() -> None:
    """As with a load balancer whose name is not known yet."""
    (rule,) = find(render({"gateway": {"ingress": {"enabled": True}}}), "Ingress", "cell-gateway")["spec"]["rules"]

    assert list(rule) == ["http"]


def test_prometheus_names_targets_by_their_pods() -> None:
    """An alert says which pod and port; an address says nothing to people."""
    monitors = [each for each in render({"podMonitor": {"enabled": True}}) if each["kind"] == "PodMonitor"]
    endpoints = [each for monitor in monitors for each in monitor["spec"]["podMetricsEndpoints"]]

    assert len(endpoints) == 4
    for endpoint in endpoints:
        assert {
            "sourceLabels": ["__meta_kubernetes_pod_name", "__meta_kubernetes_pod_container_port_number"],
            "separator": ":",
            "targetLabel": "instance",
        } in endpoint["relabelings"]
