"""Asks a gateway whether the cell can serve, and by which name it serves the model."""

from __future__ import annotations

import asyncio

import httpx
import msgspec

from services.gateway.admin_key import ADMIN_HEADER
from services.gateway.openai_schema.models import Health, Serving
from shared.undecodable import UNDECODABLE

_POLL_S = 0.1

POOLS_S = 10.0
"""Longest wait for pools before the cell is announced: it serves without a host pool, which is named as being made."""


def client(admin_key: str = "") -> httpx.AsyncClient:
    """For calls to a gateway of this machine, as its operator where its admin key is given."""
    # A proxy from the environment has no business between two processes of one machine. Nor need the certificate of our
    # own child name this address: it is made for clients elsewhere, and what is sent does not leave this machine.
    headers = {ADMIN_HEADER: admin_key} if admin_key else {}
    return httpx.AsyncClient(timeout=2.0, trust_env=False, verify=False, headers=headers)


async def wait_until_ready(base_url: str) -> None:
    """Return when ``GET /health/ready`` answers 200; the caller bounds the wait."""
    async with client() as http:
        while True:
            try:
                response = await http.get(f"{base_url}/health/ready")
                if response.status_code == httpx.codes.OK:
                    return
            except httpx.HTTPError:
                pass  # Nobody listens yet.
            await asyncio.sleep(_POLL_S)


async def served_model(base_url: str) -> str | None:
    """The model's name in the API, or None if the gateway wants a key to tell."""
    async with client() as http:
        try:
            response = await http.get(f"{base_url}/v1/models")
            return str(response.json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError):
            return None


async def serving(base_url: str, timeout_s: float = POOLS_S) -> Serving | None:
    """What the cell serves with, once its host pools are made or ``timeout_s`` are over; None where nothing is said."""
    found: Serving | None = None
    try:
        async with asyncio.timeout(timeout_s), client() as http:
            while True:
                health = await health_of(http, base_url)
                found = (health.serving if health is not None else None) or found
                if found is not None and all(pool.is_ready for pool in found.pools):
                    return found
                await asyncio.sleep(_POLL_S)
    except (TimeoutError, httpx.HTTPError):
        return found


async def health_of(http: httpx.AsyncClient, base_url: str) -> Health | None:
    """What the gateway says of its readiness; None where it is not in our words. Raises httpx.HTTPError."""
    response = await http.get(f"{base_url}/health/ready")
    try:
        return msgspec.json.decode(response.content, type=Health)
    except UNDECODABLE:
        return None
