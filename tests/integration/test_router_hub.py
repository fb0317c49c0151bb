"""A router's process and its hub: refusals end it before it serves, with one message, and an absent hub does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from shared.lifecycle import EXIT_REFUSED
from tests.nats_server import NatsServer
from tests.several_cells import hub_config
from tests.waiting import holds
from thermocline.supervisor.ports import free_port

pytestmark = pytest.mark.integration

CELLS = f"a=http://127.0.0.1:{free_port()}"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path / "hub", config=hub_config(("a",), free_port())) as server:
        yield server


@contextmanager
def started(url: str, port: int, *flags: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "services.gateway.router", "--cells", CELLS, "--nats", url, "--port", str(port)]
    process = subprocess.Popen(
        [*command, "--health-ms", "100", *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("user", "flags", "reason"),
    [
        ("router:wrong", (), "does not accept our credentials"),
        ("a:a", (), "does not let us subscribe"),
        ("router:router", ("--nats-ca", "/none.pem"), "/none.pem"),
        ("router:router", ("--nats-server-name", "hub"), "TLS"),
    ],
    ids=["credentials", "permissions", "authority", "no_tls"],
)
def test_a_refusal_is_told_in_one_line(hub: NatsServer, user: str, flags: tuple[str, ...], reason: str) -> None:
    """Exit code 2, which a supervisor takes as final, and the router never says that it serves."""
    with started(f"nats://{user}@127.0.0.1:{hub.port}", free_port(), *flags) as process:
        output, _ = process.communicate(timeout=60)
    refused = [line for line in output.splitlines() if "refused_to_start" in line]

    assert process.returncode == EXIT_REFUSED, output
    assert len(refused) == 1
    assert reason in refused[0]
    assert "Traceback" not in output
    assert "router_serving" not in output


def test_a_hub_that_hangs_or_dies_ends_no_router(hub: NatsServer) -> None:
    """Neither at its start nor while it serves; a refusal that comes later is the hub's fault, too."""
    port = free_port()
    assert hub._process is not None
    os.kill(hub._process.pid, signal.SIGSTOP)
    with started(f"nats://router:router@127.0.0.1:{hub.port}", port) as process:
        served = holds(lambda: _lives(port), 60)
        os.kill(hub._process.pid, signal.SIGCONT)
        hub.kill()
        hub.configure(hub_config(("a",), free_port()).replace('password: "router"', 'password: "another"'))
        hub.start()
        was_refused = holds(lambda: _refusals(port) > 0, 60)
        lives = _lives(port) and process.poll() is None
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)

    assert (served, was_refused, lives) == (True, True, True), output
    assert process.returncode == 0, output


def _lives(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health/live", timeout=10, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _refusals(port: int) -> float:
    page = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10, trust_env=False).text
    name = "thermocline_bus_connections_refused_total "
    return next((float(line.split()[1]) for line in page.splitlines() if line.startswith(name)), 0.0)
