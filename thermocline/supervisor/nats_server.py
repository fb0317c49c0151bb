"""Checks whether a NATS server answers, and which one it is."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

import msgspec

from shared.errors import ConfigError
from thermocline.supervisor.broker_urls import split_urls
from thermocline.supervisor.nats_config import HEALTH_INBOX, HEALTH_SUBJECT

_MOST_HEALTH_BYTES = 64 * 1024


class _Health(msgspec.Struct, frozen=True):
    status: str
    error: str = ""


class _HealthAnswer(msgspec.Struct, frozen=True):
    data: _Health


async def server_info_at(host: str, port: int, *, timeout_s: float = 1.0) -> dict[str, Any] | None:
    """Return the INFO of the NATS server at ``host:port``, or None if none answers.

    A server speaks first: one line ``INFO {json}``, with ``server_name``, ``jetstream`` and ``max_payload``.
    """
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                line = await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError):
        return None
    if not line.startswith(b"INFO "):
        return None
    try:
        info = json.loads(line[5:])
    except ValueError:
        return None
    return info if isinstance(info, dict) else None


async def health_fault_at(host: str, port: int, user: str, password: str, *, timeout_s: float = 2.0) -> str | None:
    """Return what the server at ``host:port`` says is wrong with it: "" for nothing, None without an answer.

    It names streams that cannot be written any more. ``user`` is of the system's account (``nats_config``).
    """
    login = json.dumps({"verbose": False, "pedantic": False, "headers": False, "user": user, "pass": password})
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                ask = f"SUB {HEALTH_INBOX} 1\r\nPUB {HEALTH_SUBJECT} {HEALTH_INBOX} 0\r\n\r\n"
                writer.write(f"CONNECT {login}\r\n{ask}".encode())
                while not (line := await reader.readline()).startswith(b"MSG "):
                    if not line or line.startswith(b"-ERR"):
                        return None
                answer = await reader.readexactly(min(int(line.split()[-1]), _MOST_HEALTH_BYTES))
            finally:
                writer.close()
        health = msgspec.json.decode(answer, type=_HealthAnswer).data
    except (OSError, EOFError, TimeoutError, ValueError):
        return None
    return "" if health.status == "ok" else health.error or health.status


async def wait_until_up(server_name: str, host: str, port: int, *, timeout_s: float) -> None:
    """Wait until the server of that name answers. Raises ConfigError if another answers or none does in time."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while asyncio.get_running_loop().time() < deadline:
        info = await server_info_at(host, port)
        if info is not None:
            if info.get("server_name") != server_name:
                raise ConfigError(f"another NATS server took {host}:{port}; choose another port with --nats-port")
            return
        await asyncio.sleep(0.05)
    raise ConfigError(f"the embedded NATS server did not answer at {host}:{port} within {timeout_s:.0f} s")


async def require_external(urls: tuple[str, ...]) -> None:
    """Raise ConfigError unless a server with JetStream answers at one of ``urls``."""
    addresses = split_urls(urls).bare  # Messages show no password.
    for url in addresses:
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        if parts.scheme not in ("nats", "tls"):
            return  # WebSocket servers do not speak first; the services will report errors.
        info = await server_info_at(parts.hostname or "127.0.0.1", parts.port or 4222, timeout_s=3.0)
        if info is None:
            continue
        if not info.get("jetstream"):
            raise ConfigError(f"the NATS server at {url} runs without JetStream, which holds the input stream")
        return
    raise ConfigError(f"no NATS server answers at {', '.join(addresses)}")
