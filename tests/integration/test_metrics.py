"""What the processes of a running cell export is what the reference says, and the other way round."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from shared.metrics import MetricFacts
from tests.waiting import holds, is_ready
from thermocline.supervisor.api import RunningCell, running
from thermocline.supervisor.config import SupervisorConfig
from thermocline.supervisor.ports import free_ports
from tools.metric_docs import PROCESSES, exported_by

pytestmark = pytest.mark.integration

Scraped = dict[str, dict[str, Metric]]


def ask(base_url: str, text: str) -> None:
    """One greedy answer; raises if the server does not give one."""
    with httpx.Client(base_url=base_url, timeout=60, trust_env=False) as client:
        model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        body = {"model": model, "prompt": text, "max_tokens": 8, "temperature": 0}
        client.post("/v1/completions", json=body).raise_for_status()


@contextmanager
def router_of(cell: RunningCell, port: int) -> Iterator[str]:
    """A router in front of the cell, without a broker; yields its URL once it serves."""
    url = f"http://127.0.0.1:{port}"
    flags = ["--cells", f"only={cell.base_url}", "--port", str(port), "--summaries", "false"]
    process = subprocess.Popen([sys.executable, "-m", "services.gateway.router", *flags])
    try:
        assert holds(lambda: process.poll() is not None or is_ready(url))
        assert process.poll() is None
        yield url
    finally:
        process.terminate()
        process.wait(timeout=30)


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    """The families of every process by name, after two requests by a router of which the second hits the cache."""
    folder = tmp_path_factory.mktemp("metrics")
    exporting = [process for process in PROCESSES if process not in ("gateway", "router")]
    *own, router_port = free_ports(len(exporting) + 1)
    ports = dict(zip(exporting, own, strict=True))
    settings = folder / "cell.toml"
    settings.write_text(
        "".join(f"[{process}]\nmetrics_port = {port}\n" for process, port in ports.items()), encoding="utf-8"
    )
    small = SupervisorConfig(port=0, threads=1, device_kv_bytes=16 * 2**20, host_kv_bytes=32 * 2**20)
    with running(small, config_file=Path(settings)) as cell, router_of(cell, router_port) as router:
        for _ in range(2):
            ask(router, "a text that comes twice, and is longer than a page " * 4)
        urls = {process: f"http://127.0.0.1:{port}" for process, port in ports.items()}
        urls |= {"gateway": cell.base_url, "router": router}
        yield {process: scrape(url) for process, url in urls.items()}


def scrape(url: str) -> dict[str, Metric]:
    """The families at a URL, by name."""
    text = httpx.get(f"{url}/metrics", timeout=10, trust_env=False).raise_for_status().text
    return {family.name: family for family in text_string_to_metric_families(text)}


def documented_of(process: str) -> dict[str, MetricFacts]:
    """What the page says that a process of the fixture exports; its router is connected to no broker."""
    families = exported_by(process)
    if process != "router":
        return families
    return {name: facts for name, facts in families.items() if not name.startswith("thermocline_bus_")}


@pytest.mark.parametrize("process", PROCESSES)
def test_a_process_exports_what_is_documented(scraped: Scraped, process: str) -> None:
    """No family is missing on the page, and none on it is missing at the process; types and meanings agree."""
    documented = documented_of(process)

    assert set(scraped[process]) == set(documented)
    for name, family in scraped[process].items():
        assert (family.type, family.documentation) == (documented[name].kind, documented[name].documentation)


@pytest.mark.parametrize("process", PROCESSES)
def test_series_have_the_documented_labels(scraped: Scraped, process: str) -> None:
    """Every series has the labels on the page, all of them and no others."""
    documented = documented_of(process)

    for name, family in scraped[process].items():
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(documented[name].labels), sample


def test_requests_show(scraped: Scraped) -> None:
    """Two requests, one of which found the other's prefix, are counted by every process that had to do with them."""

    def total(process: str, family: str, series: str, **labels: str) -> float:
        samples = scraped[process][f"thermocline_{family}"].samples
        return sum(one.value for one in samples if one.name.endswith(series) and labels.items() <= one.labels.items())

    assert total("gateway", "time_to_first_token_seconds", "_count") == 2
    assert total("gateway", "request_queue_time_seconds", "_count") == 2
    assert total("gateway", "request_decode_time_seconds", "_count") == 2
    queries = total("gateway", "prefix_cache_queries", "_total")
    hits = total("gateway", "prefix_cache_hits", "_total", source="device")
    assert 0 < hits < queries
    assert total("scheduler", "scheduler_inputs", "_total") > 2
    assert total("scheduler", "workers", "workers") == 1
    assert total("worker", "worker_prefill_tokens", "_total") == queries - hits
    assert total("storage", "bus_connected", "bus_connected") == 1
