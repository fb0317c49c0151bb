"""The port of metrics also says whether a process is ready."""

from __future__ import annotations

import socket

import httpx
import pytest

from shared import metrics
from shared.errors import OperatorError
from thermocline.supervisor.ports import free_port


def test_readiness_is_answered_beside_the_metrics() -> None:
    """With the reason while there is one; Prometheus gets its metrics all the while."""
    reasons = ["it has not joined the cell yet", ""]
    port = free_port("127.0.0.1")
    metrics.serve(port, not_ready=lambda: reasons[0])

    with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        before, scraped = client.get(metrics.READY_PATH), client.get("/metrics")
        del reasons[0]
        after = client.get(metrics.READY_PATH)

    assert (before.status_code, before.text) == (503, "it has not joined the cell yet\n")
    assert (after.status_code, after.text) == (200, "ready\n")
    assert scraped.status_code == 200
    assert "thermocline_" in scraped.text
    assert "text/plain" in scraped.headers["content-type"]


def test_a_port_that_is_taken_is_a_fault_of_the_settings() -> None:
    """One sentence with the setting's name, which no process wraps in a traceback."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OperatorError, match=f"--metrics-port: cannot listen on 127.0.0.1:{port}: "):
            metrics.serve(port)


def test_an_address_that_is_not_of_this_machine_is_one_too() -> None:
    """A name that is none, here."""
    with pytest.raises(OperatorError, match="--metrics-port: cannot listen on an address:"):
        metrics.serve(free_port("127.0.0.1"), "an address")
