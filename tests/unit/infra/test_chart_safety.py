"""Nothing in the chart asks for more than a process needs, and what a node shares stays within its pod."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

pytest.importorskip("helm_python", reason="Helm's engine has no wheel for this platform")

from tests.unit.infra.chart_rendering import CHART, containers, find, pod_specs, render
from tests.unit.infra.chart_variants import EVERYTHING, SMALL, VARIANTS

UNPRIVILEGED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def mounts(container: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {mount["mountPath"]: mount for mount in container["volumeMounts"]}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_pod_passes_the_restricted_pod_security_standard(variant: str) -> None:
    """No host namespace, host path, root, privilege or capability; only the volumes that the standard allows."""
    allowed = {"configMap", "emptyDir", "persistentVolumeClaim", "secret", "projected", "csi", "ephemeral", "image"}
    for pod in pod_specs(render(VARIANTS[variant])).values():
        assert not {"hostIPC", "hostPID", "hostNetwork", "hostUsers"} & set(pod)
        assert all(set(volume) - {"name"} <= allowed for volume in pod["volumes"])
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 10001
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        for container in containers(pod).values():
            assert container["securityContext"] == UNPRIVILEGED


def test_the_brokers_pods_are_told_to_pass_it_too() -> None:
    """The NATS chart makes them, and its defaults do not pass: in a namespace that enforces it there was no broker."""
    nats = yaml.safe_load((CHART / "values.yaml").read_text())["nats"]
    pod = nats["podTemplate"]["merge"]["spec"]["securityContext"]

    assert (pod["runAsNonRoot"], pod["runAsUser"], pod["fsGroup"]) == (True, 10001, 10001)
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in ("container", "reloader"):
        assert nats[container]["merge"]["securityContext"] == UNPRIVILEGED


def test_a_small_cell_fits_a_small_machine() -> None:
    """What all its pods request together is what its file says: less than two CPUs and 4 GiB, with the broker's."""
    ours = [each["resources"] for pod in pod_specs(render(SMALL)).values() for each in containers(pod).values()]
    reloader = yaml.safe_load((CHART / "values.yaml").read_text())["nats"]["reloader"]["merge"]["resources"]
    cpus, mebibytes = 0.0, 0
    for resources in (*ours, SMALL["nats"]["container"]["merge"]["resources"], reloader):
        requests = resources["requests"]
        cpu = str(requests["cpu"])
        cpus += float(cpu.removesuffix("m")) / 1000 if cpu.endswith("m") else float(cpu)
        mebibytes += int(requests["memory"].removesuffix("Mi"))

    assert round(cpus, 1) == 1.4
    assert mebibytes <= 4 * 1024


def test_the_broker_does_not_yield_to_everybody() -> None:
    """The NATS chart requests nothing, and such a pod gets what others leave: a busy node cost the cell its broker."""
    nats = yaml.safe_load((CHART / "values.yaml").read_text())["nats"]

    for container in ("container", "reloader"):
        assert {"cpu", "memory"} <= set(nats[container]["merge"]["resources"]["requests"])
    # A limit would end it where memory is short, and with it the cell.
    assert "limits" not in nats["container"]["merge"]["resources"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_container_is_bounded(variant: str) -> None:
    """Each requests CPU and memory, and has no more memory than it requested."""
    for pod in pod_specs(render(VARIANTS[variant])).values():
        for container in containers(pod).values():
            resources = container["resources"]
            assert {"cpu", "memory"} <= set(resources["requests"])
            assert resources["limits"]["memory"] == resources["requests"]["memory"]


def test_passwords_and_keys_come_from_secrets() -> None:
    """None stands in a manifest as text."""
    for pod in pod_specs(render(EVERYTHING)).values():
        for container in containers(pod).values():
            for variable in container.get("env", []):
                if variable["name"] in ("THERMOCLINE_NATS_PASSWORD", "THERMOCLINE_API_KEYS", "THERMOCLINE_ADMIN_KEY"):
                    assert set(variable) == {"name", "valueFrom"}
                    assert "secretKeyRef" in variable["valueFrom"]
    gateway = containers(pod_specs(render(EVERYTHING))["cell-gateway"])["gateway"]
    assert {"THERMOCLINE_API_KEYS", "THERMOCLINE_ADMIN_KEY"} <= {each["name"] for each in gateway["env"]}


def test_every_process_verifies_the_broker_and_shows_who_it_is() -> None:
    """With TLS and credentials all mount their files; no URL has a password in it."""
    broker = {"tls": {"secretName": "nats-tls", "clientCertificate": True}, "credentials": {"secretName": "nats-user"}}
    values = EVERYTHING | {"broker": EVERYTHING["broker"] | broker}
    for pod in pod_specs(render(values)).values():
        sources = [each["projected"]["sources"] for each in pod["volumes"] if each["name"] == "broker"]
        assert [source["secret"]["name"] for source in sources[0]] == ["nats-tls", "nats-user"]
        for container in containers(pod).values():
            told = {each["name"]: each.get("value", "") for each in container.get("env", [])}
            if "THERMOCLINE_NATS" not in told:
                continue
            (folder,) = [each["mountPath"] for each in container["volumeMounts"] if each["name"] == "broker"]
            for name in ("CA", "CERT", "KEY", "CREDENTIALS"):
                assert told[f"THERMOCLINE_NATS_{name}"].startswith(f"{folder}/")
            assert "THERMOCLINE_NATS_PASSWORD" not in told
            assert "@" not in told["THERMOCLINE_NATS"]


def test_storage_and_workers_of_a_pod_share_memory_and_see_one_another() -> None:
    """One tmpfs is /dev/shm of all of them, and they are in one PID namespace; nobody else is."""
    for name, pod in pod_specs(render(EVERYTHING)).items():
        if name in ("cell-gateway", "cell-scheduler"):
            assert "shareProcessNamespace" not in pod
            continue
        sharing = [each for each in containers(pod).values() if "args" in each]
        assert len(sharing) >= 2
        assert all(mounts(container)["/dev/shm"]["name"] == "shm" for container in sharing)
        assert pod["shareProcessNamespace"] is True
        (shm,) = [volume for volume in pod["volumes"] if volume["name"] == "shm"]
        assert shm["emptyDir"]["medium"] == "Memory"


def test_the_storage_starts_before_the_workers_and_stops_after_them() -> None:
    """It is a sidecar: an initial container that is restarted for as long as the pod lives."""
    pod = pod_specs(render())["cell-cpu"]

    (storage,) = pod["initContainers"]
    assert storage["args"][0] == "storage"
    assert storage["restartPolicy"] == "Always"
    assert [each["args"][0] for each in pod["containers"]] == ["worker"]


def test_every_rank_of_a_worker_gets_a_gpu() -> None:
    """A pool whose workers are groups of two claims two, and says two to the worker."""
    rendered = render(EVERYTHING)
    pod = pod_specs(rendered)["cell-h100"]
    (claim,) = pod["resourceClaims"]
    template = find(rendered, "ResourceClaimTemplate", claim["resourceClaimTemplateName"])

    (request,) = template["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"]["count"] == 2
    assert "--tensor-parallel=2" in containers(pod)["worker-0"]["args"]


def test_a_claimed_gpu_is_that_of_the_storage_too() -> None:
    """A handle of CUDA memory names a device by number, so both must see the same ones."""
    pod = pod_specs(render(EVERYTHING))["cell-h100"]

    (claim,) = pod["resourceClaims"]
    assert find(render(EVERYTHING), "ResourceClaimTemplate", claim["resourceClaimTemplateName"])
    for name in ("storage", "worker-0"):
        assert containers(pod)[name]["resources"]["claims"] == [{"name": claim["name"]}]


def test_a_gpu_of_the_device_plugin_is_the_workers_and_visible_to_the_storage() -> None:
    """A plugin gives a device to one container only."""
    pod = pod_specs(render(EVERYTHING))["cell-single"]

    worker, storage = containers(pod)["worker-0"], containers(pod)["storage"]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert "nvidia.com/gpu" not in storage["resources"]["limits"]
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"} in storage["env"]
    assert "resourceClaims" not in pod


def test_keys_are_readable_by_their_storage_alone() -> None:
    """They are copied to a file of mode 0600 before the storage starts, because a mounted secret is its group's too."""
    pod = pod_specs(render(EVERYTHING))["cell-h100"]

    first, storage = pod["initContainers"]
    assert first["command"][:2] == ["install", "--mode=0600"]
    target = first["command"][-1]
    assert f"--keys={target}" in storage["args"]
    assert mounts(first)["/run/thermocline"]["name"] == mounts(storage)["/run/thermocline"]["name"] == "keys"
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "keys"]
    assert volume["emptyDir"]["medium"] == "Memory"


def test_only_gateways_can_be_reached() -> None:
    """Every pod of ours is selected by a policy; those of scheduler and nodes let nobody in."""
    manifests = render(EVERYTHING)
    policies = {
        each["spec"]["podSelector"]["matchLabels"].get("app.kubernetes.io/component"): each["spec"]
        for each in manifests
        if each["kind"] == "NetworkPolicy"
    }

    for maker in manifests:
        if maker["kind"] in ("Deployment", "StatefulSet"):
            labels = maker["spec"]["template"]["metadata"]["labels"]
            policy = policies[labels["app.kubernetes.io/component"]]
            assert policy["podSelector"]["matchLabels"].items() <= labels.items()
            assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    readers = [{"from": EVERYTHING["networkPolicy"]["metricsFrom"]}]
    assert policies["scheduler"]["ingress"] == policies["node"]["ingress"] == readers
    assert find(render(), "NetworkPolicy", "cell-node")["spec"]["ingress"] == []
    api, metrics = policies["gateway"]["ingress"]
    assert api["ports"] == [{"port": "https", "protocol": "TCP"}]
    assert api["from"] == EVERYTHING["networkPolicy"]["gatewayFrom"]
    assert metrics == {"ports": [{"port": "metrics", "protocol": "TCP"}], **readers[0]}
    (api,) = find(render(), "NetworkPolicy", "cell-gateway")["spec"]["ingress"]
    assert api == {"ports": [{"port": "http", "protocol": "TCP"}]}


def test_only_nodes_may_go_to_an_object_store() -> None:
    """Everybody resolves names and speaks to the broker; more is allowed to node pools alone."""
    manifests = render(EVERYTHING)

    extra, collector = (EVERYTHING["networkPolicy"][name][0] for name in ("poolEgress", "egress"))
    for component in ("gateway", "scheduler", "node"):
        egress = find(manifests, "NetworkPolicy", f"cell-{component}")["spec"]["egress"]
        ports = [port["port"] for rule in egress for port in rule["ports"]]
        assert {53, 4222} <= set(ports)
        assert (extra in egress) == (component == "node")
        assert collector in egress


def test_the_broker_listens_to_this_release_alone() -> None:
    """Whoever can publish there could answer requests."""
    policy = find(render(), "NetworkPolicy", "cell-nats")["spec"]

    clients, servers = policy["ingress"]
    assert clients["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/instance"] == "cell"
    assert servers["from"][0]["podSelector"] == policy["podSelector"]
