"""Pods whose storages read one another's host memory: what they are told, how they are found, and who reaches them."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("helm_python", reason="Helm's engine has no wheel for this platform")

from services.storage.config import StorageConfig
from tests.unit.infra.chart_rendering import Manifest, containers, find, pod_specs, render
from tests.unit.infra.chart_variants import EVERYTHING, THREE_NODES
from tests.unit.infra.deployed_code import settings_from


def storage_of(manifests: list[Manifest], pool: str) -> dict[str, Any]:
    return containers(pod_specs(manifests)[f"cell-{pool}"])["storage"]


def told(container: dict[str, Any]) -> dict[str, str]:
    """Variables with a plain value."""
    return {each["name"]: each["value"] for each in container["env"] if "value" in each}


def sharing_policies(manifests: list[Manifest]) -> list[Manifest]:
    policies = [each for each in manifests if each["kind"] == "NetworkPolicy"]
    return [each for each in policies if each["metadata"]["name"].endswith("-sharing")]


def test_nothing_is_shared_by_default() -> None:
    """No flag, no port, no label and no policy."""
    manifests = render()

    storage = storage_of(manifests, "cpu")
    assert settings_from("storage", storage["args"][1:], {}) == settings_from(
        "storage", [*storage["args"][1:], "--share=off"], {}
    )
    assert not [name for name in told(storage) if name.startswith("UCX")]
    assert "ports" not in find(manifests, "Service", "cell-cpu")["spec"]
    assert not sharing_policies(manifests)


def test_the_example_is_three_nodes_that_share() -> None:
    """Three pods, whose storages are told to, with a scheduler that copies to host memory at once."""
    manifests = render(THREE_NODES)

    settings = settings_from("storage", storage_of(manifests, "h100")["args"][1:], {})
    assert isinstance(settings, StorageConfig)
    assert settings.share == "nixl"
    assert find(manifests, "StatefulSet", "cell-h100")["spec"]["replicas"] == 3
    assert 'host_writes = "through"' in find(manifests, "ConfigMap", "cell")["data"]["settings.toml"]


@pytest.mark.parametrize("values", [EVERYTHING, THREE_NODES], ids=["everything", "three-nodes"])
def test_the_policy_opens_the_ports_that_ucx_is_told_to_take(values: dict[str, Any]) -> None:
    """To pods of this release that share by the same engine, and to nobody else; those may be called by it."""
    manifests = render(values)
    ports = told(storage_of(manifests, "h100"))["UCX_TCP_PORT_RANGE"].split("-")
    labels = find(manifests, "StatefulSet", "cell-h100")["spec"]["template"]["metadata"]["labels"]

    (policy,) = [each["spec"] for each in sharing_policies(manifests)]
    (ingress,), (egress,) = policy["ingress"], policy["egress"]
    assert [ingress["ports"][0]["port"], ingress["ports"][0]["endPort"]] == [int(port) for port in ports]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    for (peer,) in (ingress["from"], egress["to"]):
        assert peer["podSelector"]["matchLabels"].items() <= labels.items()
        assert peer["podSelector"]["matchLabels"]["thermocline/shares"] == "nixl"
        assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/instance"] == "cell"


def test_pods_that_do_not_share_are_not_let_in() -> None:
    """Others of the same release lack the label that the policy asks for."""
    manifests = render(EVERYTHING)
    (policy,) = sharing_policies(manifests)
    (peer,) = policy["spec"]["ingress"][0]["from"]

    for name in ("cell-cpu", "cell-single"):
        labels = find(manifests, "StatefulSet", name)["spec"]["template"]["metadata"]["labels"]
        assert not peer["podSelector"]["matchLabels"].items() <= labels.items()


def test_storages_that_share_are_found_by_name() -> None:
    """The headless service lists them, also while their pods are not ready."""
    service = find(render(THREE_NODES), "Service", "cell-h100")["spec"]

    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True
    assert service["ports"] == [{"name": "nixl", "port": 21000, "protocol": "TCP"}]


def test_rdma_is_the_storages_alone() -> None:
    """It takes the device plugin's resource and the devices; workers copy nothing over the network."""
    manifests = render(EVERYTHING)
    pod = containers(pod_specs(manifests)["cell-h100"])

    assert pod["storage"]["resources"]["limits"]["rdma/hca"] == 2
    assert "rdma/hca" not in pod["worker-0"]["resources"]["limits"]
    assert told(pod["storage"])["UCX_NET_DEVICES"] == "mlx5_0:1,eth0"
    assert told(pod["storage"])["UCX_TLS"] == "rc,tcp"
    assert not [name for name in told(pod["worker-0"]) if name.startswith("UCX")]
