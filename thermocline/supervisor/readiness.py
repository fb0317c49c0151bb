"""Asks a gateway whether the cell can serve, what it lacks, and for the model's name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

import httpx
import msgspec

from services.gateway.admin_key import ADMIN_HEADER
from services.gateway.openai_schema.models import Health, Serving
from shared.degradations import line
from shared.undecodable import UNDECODABLE

_POLL_S = 0.1

SERVES = ("ready", "degraded")
"""Statuses of a gateway that answers requests."""

POOLS_S = 10.0
"""Longest wait for pools before the cell is announced: it serves without a host pool, shown as being made."""

MEMBERS = ("storage", "worker")
"""Kinds of degradations by processes that have not joined or not reported yet."""

HEARD_S = 10.0


def client(admin_key: str = "") -> httpx.AsyncClient:
    """Return a client for a gateway on this machine, with the operator's rights if the admin key is given."""
    # No proxy between two processes of one machine. The certificate of our own child need not name this address: it
    # is for clients elsewhere, and the traffic does not leave this machine.
    headers = {ADMIN_HEADER: admin_key} if admin_key else {}
    return httpx.AsyncClient(timeout=2.0, trust_env=False, verify=False, headers=headers)


async def wait_until_ready(base_url: str) -> None:
    """Wait until the gateway is ready and a worker has sent a heartbeat; the caller bounds the wait.

    A cell that starts on the state of a killed one lists the old workers at first, which will not answer.
    """
    async with aclosing(told(base_url)) as answers:
        async for health in answers:
            if health.status in SERVES and _is_heard(health):
                return


async def told(base_url: str, admin_key: str = "") -> AsyncGenerator[Health]:
    """Poll a gateway and yield its readiness without an end; the caller bounds the wait and closes this."""
    async with client(admin_key) as http:
        while True:
            health: Health | None = None
            with suppress(httpx.HTTPError, *UNDECODABLE):  # No listener yet, or an answer in another format.
                response = await http.get(f"{base_url}/health/ready")
                health = msgspec.json.decode(response.content, type=Health)
            if health is not None:
                yield health
            await asyncio.sleep(_POLL_S)


def _is_heard(health: Health) -> bool:
    """Return whether a worker has sent a heartbeat; True where the gateway lists no workers."""
    silent = {each.component for each in health.degraded or () if each.what == "worker"}
    serving = health.serving or None
    return serving is None or not serving.devices or any(each.worker_id not in silent for each in serving.devices)


async def served_model(base_url: str) -> str | None:
    """Return the model's name in the API; None on failure, also where the gateway wants a key."""
    async with client() as http:
        try:
            response = await http.get(f"{base_url}/v1/models")
            return str(response.json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError):
            return None


async def serving(base_url: str) -> Serving | None:
    """Return the cell's devices and pools, once all pools are ready or after POOLS_S; None without an answer."""
    found: Serving | None = None
    with suppress(TimeoutError):
        async with asyncio.timeout(POOLS_S), aclosing(told(base_url)) as answers:
            async for health in answers:
                found = health.serving or found
                if found is not None and all(pool.is_ready for pool in found.pools):
                    break
    return found


async def degraded_lines(base_url: str, admin_key: str = "") -> list[str]:
    """Return a line for each degradation, once every process has reported, or after HEARD_S.

    The gateway gives reasons only with the admin key.
    """
    health = Health(status="unknown")
    with suppress(TimeoutError):  # Missing processes are reported like the rest.
        async with asyncio.timeout(HEARD_S), aclosing(told(base_url, admin_key)) as answers:
            async for health in answers:
                if health.status in SERVES and not any(each.what in MEMBERS for each in health.degraded or ()):
                    break
    return [f"Degraded: {line(each)}" for each in health.degraded or ()]
