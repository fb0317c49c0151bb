"""The port of metrics also says whether a process is ready."""

from __future__ import annotations

import httpx

from shared import metrics
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
