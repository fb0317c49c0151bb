"""Health checks of all gateways, for ever, those that are away included."""

from __future__ import annotations

import asyncio

import msgspec

from services.gateway.router.parts import Router
from services.gateway.router.upstream import Upstream, UpstreamLost
from shared import logs

PATH = b"/health/ready"
MOST_FAILURES = 2
"""Consecutive checks without an answer in time after which a gateway is lost; a refused connection counts at once."""


class _Told(msgspec.Struct):
    """What a gateway's health says of its cell; None in answers of earlier releases."""

    cell: str | None = None
    model: str | None = None


_BODY_BYTES = 2**20
_log = logs.get_logger("router.health")


async def watch_gateways(router: Router) -> None:
    """Check all gateways concurrently."""
    async with asyncio.TaskGroup() as group:
        for cell, gateways in router.gateways.items():
            for gateway in gateways:
                group.create_task(_watch(router, cell, gateway))


async def _watch(router: Router, cell: str, gateway: Upstream) -> None:
    while True:
        was_open = gateway.is_open
        await ask(router, cell, gateway)
        if gateway.is_open is not was_open:
            if gateway.is_open:
                _log.info("gateway_is_back", cell=cell, gateway=gateway.url)
            else:
                _log.warning("gateway_is_away", cell=cell, gateway=gateway.url, reason=gateway.error)
        await asyncio.sleep(router.config.health_ms / 1000)


async def ask(router: Router, cell: str, gateway: Upstream) -> None:
    """Check one gateway once, and record the result."""
    try:
        async with asyncio.timeout(router.config.health_timeout_ms / 1000):
            exchange = await gateway.send("GET", PATH, ())
            try:
                body = await exchange.whole(_BODY_BYTES)
            finally:
                exchange.close()
    except UpstreamLost as error:
        router.lost(cell, gateway, error.message)
    except TimeoutError:
        gateway.failures += 1
        if gateway.failures >= MOST_FAILURES:
            router.lost(cell, gateway, f"{gateway.url} does not answer in time")
    else:
        _hear(router, cell, gateway, body)
        if exchange.head.status == 200:
            router.reached(cell, gateway)
        else:
            router.not_ready(cell, gateway, exchange.head.status)


def _hear(router: Router, cell: str, gateway: Upstream, body: bytes) -> None:
    """Compare the name that the gateway gives its cell with the router's: ids of kept responses are made of it."""
    try:
        told = msgspec.json.decode(body, type=_Told)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return
    gateway.model = told.model or ""
    router.cells.by_name[cell].model = gateway.model
    if told.cell is None or told.cell == cell:
        gateway.misnamed = ""
        return
    has = f"with --cell {told.cell[:64]}" if told.cell else "without --cell"
    misnamed = f"{gateway.url} was started {has}, and not with --cell {cell}"
    if misnamed != gateway.misnamed:
        gateway.misnamed = misnamed
        _log.warning("gateway_has_another_cell", cell=cell, gateway=gateway.url, reason=misnamed)
