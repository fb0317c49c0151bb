"""Whatever the chart says to a process, the process understands: flags, variables, ports, probes, times, metrics."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.present import present

pytest.importorskip("helm_python", reason="Helm's engine has no wheel for this platform")

from services.gateway.config import GatewayConfig
from services.gateway.shell import OUTBOX_DRAIN_S
from services.scheduler import cell_families
from services.storage.config import StorageConfig
from services.worker.config import WorkerConfig
from services.worker.shell import LEAVE_TIMEOUT_S
from shared.config import load
from shared.metrics import READY_PATH
from tests.unit.infra.chart_rendering import CHART, Manifest, containers, find, pod_specs, render
from tests.unit.infra.chart_variants import EVERYTHING, USERS, VARIANTS
from tests.unit.infra.deployed_code import SETTINGS, gateway_series, metric_names, settings_from
from thermocline.commands import commands
from thermocline.supervisor.nats_program import find_nats_program


def processes(manifests: list[Manifest]) -> list[tuple[str, dict[str, Any]]]:
    """``(process, container)`` of every container that runs one of ours."""
    found = [each for pod in pod_specs(manifests).values() for each in containers(pod).values()]
    return [(each["args"][0], each) for each in found if "args" in each]


def environment(container: dict[str, Any]) -> dict[str, str]:
    """Variables as the process sees them; what comes from elsewhere is made up."""
    return {each["name"]: each.get("value", f"secret of {each['name']}") for each in container["env"]}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_process_accepts_its_flags_and_variables(variant: str) -> None:
    """They are settings of that very process, with values that it takes."""
    manifests = render(VARIANTS[variant])

    for process, container in processes(manifests):
        assert process in commands()
        assert container["args"][1] == "--config=/etc/thermocline/settings.toml"
        settings_from(process, container["args"][1:], environment(container))
    assert {"gateway", "scheduler"} <= {process for process, _ in processes(manifests)}


@pytest.mark.parametrize("process", SETTINGS)
def test_settings_of_the_values_arrive_in_the_file(process: str, tmp_path: Any) -> None:
    """The file is valid TOML, numbers keep their type, and each process reads its own table of it."""
    text = find(render(EVERYTHING), "ConfigMap", "cell")["data"]["settings.toml"]
    file = tmp_path / "settings.toml"
    file.write_text(text)
    required = {"model": "/models/qwen"} if process in ("gateway", "worker") else {}

    settings = load(SETTINGS[process], process, file=file, flags=required)

    wanted = EVERYTHING["settings"][process] | EVERYTHING["settings"]["common"]
    assert {name: getattr(settings, name) for name in wanted} == wanted
    assert set(tomllib.loads(text)) == {"log_level", "traces", *SETTINGS}


def test_the_file_is_empty_without_settings() -> None:
    """Then every process keeps its defaults."""
    assert tomllib.loads(find(render(), "ConfigMap", "cell")["data"]["settings.toml"]) == {}


def test_probes_ask_where_the_process_listens() -> None:
    """The port of each probe is the one that the process is told to serve."""
    for process, container in processes(render(EVERYTHING)):
        if process == "gateway":
            continue
        port = next(flag.partition("=")[2] for flag in container["args"] if flag.startswith("--metrics-port="))
        for probe in ("startupProbe", "livenessProbe"):
            assert container[probe]["httpGet"] == {"path": "/metrics", "port": int(port)}
        # A rolling update waits for each worker's model. A standby of another release is never ready to take over.
        ready = None if process == "scheduler" else {"path": READY_PATH, "port": int(port)}
        assert container.get("readinessProbe", {}).get("httpGet") == ready
        assert "--metrics-host=0.0.0.0" in container["args"]
        assert [each["containerPort"] for each in container["ports"]] == [int(port)]


@pytest.mark.parametrize(("values", "spoken"), [({}, "http"), (EVERYTHING, "https")], ids=["plain", "tls"])
def test_probes_and_service_speak_as_the_gateway_does(values: dict[str, Any], spoken: str) -> None:
    """The API's port is named for HTTP, or for HTTPS where there is a certificate; that of metrics is beside it."""
    manifests = render(values)
    container = containers(pod_specs(manifests)["cell-gateway"])["gateway"]
    settings = settings_from("gateway", container["args"][1:], environment(container))
    assert isinstance(settings, GatewayConfig)
    probes = [container[probe]["httpGet"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")]

    assert bool(settings.tls_cert) == (spoken == "https")
    assert container["ports"] == [
        {"name": spoken, "containerPort": settings.port},
        {"name": "metrics", "containerPort": settings.metrics_port},
    ]
    assert [probe["path"] for probe in probes] == ["/health/live", "/health/live", "/health/ready"]
    assert {(probe["port"], probe["scheme"]) for probe in probes} == {(spoken, spoken.upper())}
    (port,) = find(manifests, "Service", "cell-gateway")["spec"]["ports"]
    assert (port["targetPort"], port["appProtocol"]) == (spoken, spoken)
    assert settings.metrics_host == "0.0.0.0"


def test_files_of_secrets_are_where_the_gateway_looks() -> None:
    """Tenants and certificate are whole volumes, whose files change with their secrets; no sub-path would."""
    pod = pod_specs(render(EVERYTHING))["cell-gateway"]
    container = containers(pod)["gateway"]
    settings = settings_from("gateway", container["args"][1:], environment(container))
    assert isinstance(settings, GatewayConfig)
    volumes = {each["name"]: each["secret"] for each in pod["volumes"] if "secret" in each}

    mounted = {}
    for mount in container["volumeMounts"]:
        if mount["name"] in volumes:
            assert "subPath" not in mount
            secret = volumes[mount["name"]]
            # A group may read such files, and nobody else; both readers refuse or would warn of more.
            assert secret["defaultMode"] == 0o440
            for item in secret["items"]:
                mounted[f"{mount['mountPath']}/{item['path']}"] = (secret["secretName"], item["key"])
    assert mounted == {
        settings.tls_cert: ("api-tls", "tls.crt"),
        settings.tls_key: ("api-tls", "tls.key"),
        settings.tenants: ("tenants", "tenants.toml"),
    }
    assert settings.tls_min_version == "1.3"


def test_metrics_of_the_public_port_are_closed_unless_opened() -> None:
    """Whom the chart's service lets in may be everybody; the other port is for who reads metrics."""
    for values, access in (({}, "closed"), ({"gateway": {"apiMetrics": "open"}}, "open"), (EVERYTHING, "admin")):
        container = containers(pod_specs(render(values))["cell-gateway"])["gateway"]
        settings = settings_from("gateway", container["args"][1:], environment(container))
        assert isinstance(settings, GatewayConfig)
        assert settings.api_metrics == access


@pytest.mark.parametrize("values", [{}, USERS], ids=["one-user", "users"])
def test_processes_show_users_that_the_broker_knows(values: dict[str, Any]) -> None:
    """With the password that the broker is given for that user: the same key of the same secret."""
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())["nats"]
    own = values.get("nats", defaults)
    users = own["config"]["merge"]["authorization"]["users"]
    variables = {user["user"]: present(re.fullmatch(r"<< \$(\w+) >>", user["password"]))[1] for user in users}
    given = own["container"]["env"]

    for process, container in processes(render(values)):
        told = {each["name"]: each for each in container["env"]}
        user = told["THERMOCLINE_NATS_USER"]["value"]
        assert user == (process if values else "thermocline")
        (secret,) = re.findall(r"\$\((\w+)\)", given[variables[user]])
        assert told["THERMOCLINE_NATS_PASSWORD"]["valueFrom"] == given[secret]["valueFrom"]
        # Kubernetes fills in what stands before it, and the chart of NATS sorts by name.
        assert secret < variables[user]


@pytest.mark.parametrize("password", ["87e70b91", "1234567890", "12kb", "true", "-1", '"#{ $'])
def test_the_server_reads_every_password_as_text(password: str, tmp_path: Path) -> None:
    """``openssl rand -hex`` gives one that begins as a number with an exponent every fifteenth time."""
    nats = yaml.safe_load((CHART / "values.yaml").read_text())["nats"]
    (user,) = nats["config"]["merge"]["authorization"]["users"]
    name = present(re.fullmatch(r"<< \$(\w+) >>", user["password"]))[1]
    value = nats["container"]["env"][name].replace("$(TC_NATS_PASSWORD)", password)
    file = tmp_path / "nats.conf"
    file.write_text(f"authorization {{ users: [{{user: thermocline, password: ${name}}}] }}")
    command: list[Any] = [find_nats_program().path, "-t", "-c", file]

    done = subprocess.run(command, env=os.environ | {name: value}, capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("values", [{}, USERS], ids=["one-user", "users"])
def test_the_server_accepts_what_the_chart_of_nats_makes_of_it(values: dict[str, Any], tmp_path: Path) -> None:
    """What is merged becomes JSON there, in which what stands between << and >> is not quoted."""
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())["nats"]
    merged = defaults["config"]["merge"] | values.get("nats", {}).get("config", {}).get("merge", {})
    file = tmp_path / "nats.conf"
    file.write_text(re.sub(r'"<<\s+(.*?)\s+>>"', r"\1", json.dumps(merged)))
    names = {name for own in (defaults, values.get("nats", defaults)) for name in own["container"]["env"]}
    environment = os.environ | dict.fromkeys(names, "of-letters")

    command: list[Any] = [find_nats_program().path, "-t", "-c", str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr


def test_no_two_containers_of_a_pod_listen_on_one_port() -> None:
    """They share a network, so each has a port of its own for metrics."""
    for pod in pod_specs(render(EVERYTHING)).values():
        flags = [flag for each in containers(pod).values() for flag in each.get("args", [])]
        ports = [flag for flag in flags if flag.startswith("--metrics-port=")]
        assert len(ports) == len(set(ports))


def test_pods_outlast_what_their_processes_wait_for() -> None:
    """Kubernetes kills nobody who is still within the time that his own settings give him."""
    manifests = render(EVERYTHING)
    for process, container in processes(manifests):
        pod = next(pod for pod in pod_specs(manifests).values() if container in containers(pod).values())
        settings = settings_from(process, container["args"][1:], environment(container))
        needed = 0.0
        if isinstance(settings, GatewayConfig):
            needed = settings.grace_ms / 1e3 + OUTBOX_DRAIN_S + container["lifecycle"]["preStop"]["sleep"]["seconds"]
        if isinstance(settings, WorkerConfig):
            # The storage stops after it, and flushes what it has to say.
            needed = (settings.drain_timeout_ms + settings.stop_timeout_ms) / 1e3 + LEAVE_TIMEOUT_S + 10
        assert pod["terminationGracePeriodSeconds"] > needed


def test_autoscaling_asks_for_metrics_that_a_gateway_has() -> None:
    """Queries, external metrics and the scraped endpoint name what ``/metrics`` of a gateway holds."""
    manifests = render(EVERYTHING)
    keda = find(manifests, "ScaledObject", "cell-h100")
    plain = find(manifests, "HorizontalPodAutoscaler", "cell-cpu")

    queries = [trigger["metadata"]["query"] for trigger in keda["spec"]["triggers"]]
    asked = {name for query in queries for name in metric_names(query)}
    asked |= {metric["external"]["metric"]["name"] for metric in plain["spec"]["metrics"]}
    assert len(asked) == 3
    assert asked - gateway_series() == {"thermocline_queued_requests"}
    assert "thermocline_queued_requests" in {facts.series for facts in cell_families.cell_facts()}


def test_every_process_is_scraped() -> None:
    """Endpoints of a PodMonitor are the named ports of the containers that it selects, but for the API's."""
    manifests = render(EVERYTHING)
    for name, pod in pod_specs(manifests).items():
        ports = [port["name"] for each in containers(pod).values() for port in each.get("ports", [])]
        ports = [name for name in ports if name != "https"]
        endpoints = find(manifests, "PodMonitor", name)["spec"]["podMetricsEndpoints"]
        assert sorted(endpoint["port"] for endpoint in endpoints) == sorted(ports)
        assert {endpoint["path"] for endpoint in endpoints} == {"/metrics"}
        # By which alerts and dashboards tell cells apart: namespace and release.
        cell = {"targetLabel": "cell", "replacement": "llm/cell"}
        assert all(cell in endpoint["relabelings"] for endpoint in endpoints)


def test_autoscalers_own_the_number_of_pods() -> None:
    """Where one is on, the manifest names no number that an upgrade would set back; where none is, it does."""
    manifests = render(EVERYTHING)

    scaled = {each["spec"]["scaleTargetRef"]["name"] for each in manifests if "scaleTargetRef" in each.get("spec", {})}
    makers = [each for each in manifests if each["kind"] in ("Deployment", "StatefulSet")]
    assert scaled == {"cell-gateway", "cell-cpu", "cell-h100"}
    for maker in makers:
        assert ("replicas" in maker["spec"]) == (maker["metadata"]["name"] not in scaled)


def test_memory_holds_every_pool() -> None:
    """Shared memory has room for all segments of a pod, and each container's limit for those that it makes."""
    mib = 2**20
    for values in ({}, EVERYTHING):
        for name, pod in pod_specs(render(values)).items():
            shm = next((volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "shm"), None)
            if shm is None:
                assert name in ("cell-gateway", "cell-scheduler")
                continue
            in_shm = 0
            for container in containers(pod).values():
                if "args" not in container:
                    continue
                settings = settings_from(container["args"][0], container["args"][1:], environment(container))
                limit = int(container["resources"]["limits"]["memory"].removesuffix("Mi")) * mib
                if isinstance(settings, StorageConfig):
                    made = settings.host_kv_bytes + settings.hidden_bytes
                    assert limit >= made + 2 * settings.staging_bytes
                else:
                    assert isinstance(settings, WorkerConfig)
                    made = settings.device_kv_bytes if settings.device == "cpu" else 0
                    assert limit >= made
                in_shm += made
            assert int(shm["sizeLimit"].removesuffix("Mi")) * mib >= in_shm


def test_ids_are_unique_and_legal() -> None:
    """Storages and workers are named by their pods, within the 64 characters that a subject allows."""
    pool = "p" * 20
    manifests = render({"fullnameOverride": "n" * 30, "pools": [{"name": pool, "workers": 3}]})
    longest = f"{'n' * 30}-{pool}-1234"

    ids = []
    for process, container in processes(manifests):
        if process in ("storage", "worker"):
            flag = next(flag for flag in container["args"] if flag.startswith("--id="))
            ids.append(flag.removeprefix("--id=").replace("$(POD_NAME)", longest))
    assert len(set(ids)) == 4
    assert max(map(len, ids)) <= 64
