"""The Compose file that watches a cell: every process is scraped where it listens, and every file is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.unit.infra.deployed_code import SETTINGS, settings_from
from tests.unit.infra.test_compose import FOLDER, project, services
from tools.dashboards import DASHBOARDS, GRAFANA

OBSERVE = "compose.observe.yaml"
DOCKERFILE = FOLDER.parent / "containers" / "Dockerfile"
PROMETHEUS = FOLDER.parent / "observability" / "prometheus" / "prometheus.yaml"


def observed() -> dict[str, dict[str, Any]]:
    """Its services."""
    return services(OBSERVE, GRAFANA_PASSWORD="secret")


def test_every_process_is_scraped_where_it_listens() -> None:
    """Prometheus asks each service at the port that its container is told, which only the cell's networks reach."""
    jobs = {
        job["job_name"]: job["dns_sd_configs"][0] for job in yaml.safe_load(PROMETHEUS.read_text())["scrape_configs"]
    }

    assert set(jobs) == set(SETTINGS)
    for process, job in jobs.items():
        given = services()[process]["environment"] | observed()[process]["environment"]
        settings: Any = settings_from(process, [], given)
        assert job["names"] == [process]
        assert job["port"] == settings.metrics_port
        assert settings.metrics_host == "0.0.0.0"
        if process != "gateway":
            # The image's health check asks there.
            assert f"THERMOCLINE_METRICS_PORT={settings.metrics_port}\n" in DOCKERFILE.read_text()


def test_every_series_has_the_label_of_its_cell() -> None:
    """By which alerts and dashboards tell it from other cells."""
    jobs = yaml.safe_load(PROMETHEUS.read_text())["scrape_configs"]

    cell = [{"target_label": "cell", "replacement": project()["name"]}]
    assert [job["relabel_configs"] for job in jobs] == [cell] * len(SETTINGS)


def test_only_watchers_come_along() -> None:
    """The file changes what is there and adds two services, which have as few rights as the others."""
    added = set(observed()) - set(services())

    assert added == {"prometheus", "grafana"}
    for name in added:
        service = observed()[name]
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_what_is_mounted_is_there() -> None:
    """Every file that a watcher is given exists, and every dashboard is given to Grafana."""
    mounts = [mount for service in observed().values() for mount in service.get("volumes", ())]
    files = [mount.split(":")[0] for mount in mounts if mount.startswith(".")]

    assert files
    assert all((FOLDER / file).is_file() for file in files)
    assert {GRAFANA / name for name in DASHBOARDS} <= {(FOLDER / file).resolve() for file in map(Path, files)}
