"""The gateway's background work: tokens and notices in, heartbeats out, bounded waits, and a graceful end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

from services.gateway.gateway import Gateway
from services.gateway.http_server import HttpServer
from services.gateway.notices import NoticeHandler
from services.gateway.relay import TokenRelay
from services.gateway.timeouts import WaitLimits, needs_probe, needs_search, overdue
from shared import logs, progress, subjects
from shared.bus.protocol import Delivery
from shared.codec import decode
from shared.errors import CodecError, Unavailable
from shared.lifecycle import Lifecycle, beat
from shared.messages.status import CellStatus

SWEEP_S = 0.25
NOTICE_CHECK_S = 10.0
OUTBOX_DRAIN_S = 5.0
ANSWERS_DRAIN_S = 1.0

_log = logs.get_logger("gateway")


class GatewayShell:
    """The background work of one gateway, beside its routes."""

    def __init__(self, gateway: Gateway, incarnation: str) -> None:
        """Prepare the work, which :meth:`running` and :meth:`serve` begin.

        ``incarnation`` is announced in heartbeats.
        """
        config = gateway.config
        self._gateway = gateway
        self._incarnation = incarnation
        self._relay = TokenRelay(gateway.bus, gateway.dispatcher.pending, gateway.clock, gateway.dispatcher.reclaim)
        self._notices = NoticeHandler(gateway.bus, gateway.gateway_id, gateway.dispatcher)
        self._limits = WaitLimits(
            request_s=config.request_timeout_ms / 1000,
            first_token_s=config.first_token_timeout_ms / 1000,
            idle_s=config.idle_timeout_ms / 1000,
            probe_s=config.probe_ms / 1000,
        )
        self._recover = asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        """Subscribe and run the background work; yield the task that ends if any of it fails."""
        bus, gateway_id = self._gateway.bus, self._gateway.gateway_id
        subscriptions = [
            await bus.hear(subjects.tokens(gateway_id), self._relay.on_tokens),
            await bus.subscribe(subjects.gateway_output(gateway_id), self._notices.on_notice),
            await bus.subscribe(subjects.STATUS, self._on_status),
        ]
        bus.on_reconnect(self._recover.set)
        work = asyncio.create_task(self._work())
        try:
            yield work
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await self._relay.close()
            await self._gateway.dispatcher.close()
            for subscription in subscriptions:
                await subscription.close()

    async def serve(self, server: HttpServer, sock: socket.socket, life: Lifecycle) -> None:
        """Answer until ``life`` stops; then let running answers finish within ``grace_ms``."""
        async with self.running() as work:
            serving = asyncio.create_task(server.serve(sockets=[sock]))
            host, port = sock.getsockname()[:2]
            progress.ready()
            _log.info("gateway_serving", host=host, port=port, gateway_id=self._gateway.gateway_id)
            try:
                await life.watch(work, serving)
                await self._drain()
            finally:
                server.should_exit = True
                await serving
                await self._gateway.dispatcher.outbox.drain(OUTBOX_DRAIN_S)
                await self._gateway.turns.drain(ANSWERS_DRAIN_S)

    async def _work(self) -> None:
        gateway = self._gateway
        async with asyncio.TaskGroup() as group:
            group.create_task(
                beat(gateway.bus, "gateway", gateway.gateway_id, self._incarnation, degraded=gateway.own_degraded)
            )
            group.create_task(gateway.dispatcher.outbox.run())
            group.create_task(gateway.adapters.tell(gateway.bus))
            group.create_task(gateway.turns.run())
            group.create_task(self._sweep())
            group.create_task(gateway.callers.watch())
            if gateway.reports is not None:
                group.create_task(gateway.reports.run())
            group.create_task(self._recover_after_loss())

    async def _on_status(self, delivery: Delivery) -> None:
        try:
            status = decode(delivery.data, CellStatus)
        except CodecError as error:
            _log.error("status_unreadable", reason=error.message)
            return
        self._gateway.cell.hear(status, self._gateway.clock())
        self._notices.see(status.epoch, status.seq)

    async def _sweep(self) -> None:
        """End choices that waited too long, and request tokens that may have been lost."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now_s = self._gateway.clock()
            quiet, silent = [], []
            for choice in self._gateway.dispatcher.pending:
                error = overdue(choice, now_s, self._limits)
                if error is not None:
                    choice.fail(error)
                    continue
                if needs_search(choice, now_s, self._limits):
                    silent.append(choice)
                if needs_probe(choice, now_s, self._limits):
                    quiet.append(choice)
            self._relay.search(silent, self._gateway.cell.worker_ids())
            self._relay.probe(quiet)

    async def _recover_after_loss(self) -> None:
        """Request tokens and notices after a reconnect or dropped messages; every NOTICE_CHECK_S, notices."""
        while True:
            try:
                async with asyncio.timeout(NOTICE_CHECK_S):
                    await self._recover.wait()
            except TimeoutError:
                if len(self._gateway.dispatcher.pending) and self._gateway.bus.is_connected:
                    await self._notices.catch_up()
                continue
            self._recover.clear()
            # Workers reply at once; while a broker elects a leader, its streams cannot be read for seconds.
            self._relay.recover(self._gateway.dispatcher.pending, self._gateway.cell.worker_ids())
            await self._notices.catch_up()

    async def _drain(self) -> None:
        """Answer new requests with 503 from now on; those that outlast the grace end with a typed error."""
        gateway = self._gateway
        gateway.cell.is_draining = True
        _log.info("gateway_draining", running=len(gateway.dispatcher.pending))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(gateway.config.grace_ms / 1000):
                await gateway.slots.idle.wait()
        for choice in gateway.dispatcher.pending:
            choice.fail(Unavailable("the gateway is shutting down", retry_after_ms=1_000))
