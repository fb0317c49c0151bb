"""Asks a gateway whether the cell can serve, and by which name it serves the model."""

from __future__ import annotations

import asyncio

import httpx

_POLL_S = 0.1


def _client() -> httpx.AsyncClient:
    # A proxy from the environment has no business between two processes of one machine. Nor need the certificate of our
    # own child name this address: it is made for clients elsewhere, and nothing secret is asked or told here.
    return httpx.AsyncClient(timeout=2.0, trust_env=False, verify=False)


async def wait_until_ready(base_url: str) -> None:
    """Return when ``GET /health/ready`` answers 200; the caller bounds the wait."""
    async with _client() as client:
        while True:
            try:
                response = await client.get(f"{base_url}/health/ready")
                if response.status_code == httpx.codes.OK:
                    return
            except httpx.HTTPError:
                pass  # Nobody listens yet.
            await asyncio.sleep(_POLL_S)


async def served_model(base_url: str) -> str | None:
    """The model's name in the API, or None if the gateway wants a key to tell."""
    async with _client() as client:
        try:
            response = await client.get(f"{base_url}/v1/models")
            return str(response.json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError):
            return None
