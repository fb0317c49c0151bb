"""Asks a gateway whether the cell can serve, and by which name it serves the model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

import httpx
import msgspec

from services.gateway.admin_key import ADMIN_HEADER
from services.gateway.openai_schema.models import Health, Serving
from shared.undecodable import UNDECODABLE

_POLL_S = 0.1

SERVES = ("ready", "degraded")
"""What a gateway says while requests are answered."""

POOLS_S = 10.0
"""Longest wait for pools before the cell is announced: it serves without a host pool, which is named as being made."""


def client(admin_key: str = "") -> httpx.AsyncClient:
    """For calls to a gateway of this machine, as its operator where its admin key is given."""
    # A proxy from the environment has no business between two processes of one machine. Nor need the certificate of our
    # own child name this address: it is made for clients elsewhere, and what is sent does not leave this machine.
    headers = {ADMIN_HEADER: admin_key} if admin_key else {}
    return httpx.AsyncClient(timeout=2.0, trust_env=False, verify=False, headers=headers)


async def wait_until_ready(base_url: str) -> None:
    """Return when the gateway says so and a worker has been heard; the caller bounds the wait.

    A cell that begins where another was killed has that one's workers at first, and none will answer.
    """
    async with aclosing(told(base_url)) as answers:
        async for health in answers:
            if health.status in SERVES and _is_heard(health):
                return


async def told(base_url: str, admin_key: str = "") -> AsyncGenerator[Health]:
    """Yield a gateway's readiness, again and again, for ever; the caller bounds the wait and closes this."""
    async with client(admin_key) as http:
        while True:
            try:
                health = await health_of(http, base_url)
            except httpx.HTTPError:
                health = None  # No listener yet.
            if health is not None:
                yield health
            await asyncio.sleep(_POLL_S)


def _is_heard(health: Health) -> bool:
    """Whether a worker has sent a heartbeat; True where nothing is known of workers."""
    silent = {each.component for each in health.degraded or () if each.what == "worker"}
    serving = health.serving or None
    return serving is None or not serving.devices or any(each.worker_id not in silent for each in serving.devices)


async def served_model(base_url: str) -> str | None:
    """Return the model's name in the API, or None if the gateway wants a key to tell."""
    async with client() as http:
        try:
            response = await http.get(f"{base_url}/v1/models")
            return str(response.json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError):
            return None


async def serving(base_url: str, timeout_s: float = POOLS_S) -> Serving | None:
    """Return what the cell serves with, once its host pools are made or ``timeout_s`` are over; None without an
    answer.
    """
    found: Serving | None = None
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s), aclosing(told(base_url)) as answers:
            async for health in answers:
                found = health.serving or found
                if found is not None and all(pool.is_ready for pool in found.pools):
                    break
    return found


async def health_of(http: httpx.AsyncClient, base_url: str) -> Health | None:
    """Return the gateway's readiness; None where it is not in our words. Raises httpx.HTTPError."""
    response = await http.get(f"{base_url}/health/ready")
    try:
        return msgspec.json.decode(response.content, type=Health)
    except UNDECODABLE:
        return None
