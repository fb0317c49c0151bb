"""The composition root: makes the real parts and joins them."""

from __future__ import annotations

import asyncio
import os
import signal

from services.storage.checks import check
from services.storage.config import StorageConfig
from services.storage.disk_check import check_tiers
from services.storage.media import open_media
from services.storage.pools import Pools
from services.storage.shell import StorageShell
from shared import ids, logs, metrics, tracing
from shared.bus import nats_bus
from shared.lifecycle import Lifecycle
from shared.membership import Readiness
from shared.memory import reap
from shared.native.page_units import native_hash
from shared.tracing import Tracer

_log = logs.get_logger("storage")


async def serve(config: StorageConfig, life: Lifecycle) -> None:
    """Run one storage until ``life`` stops.

    Raises Unavailable when no broker answers at the start, and ConfigError when there are no keys where some are named.
    """
    check(config)
    async with tracing.running(config.traces, "storage", config.id) as tracer:
        await _serve(config, life, tracer)


async def _serve(config: StorageConfig, life: Lifecycle, tracer: Tracer | None) -> None:
    reaped = reap(config.shm_prefix)
    if reaped:
        _log.info("leftovers_reaped", segments=reaped)
    readiness = Readiness()
    metrics.serve(config.metrics_port, config.metrics_host, lambda: readiness.reason)
    if not os.environ.get("THERMOCLINE_SUPERVISED"):
        # A supervisor has checked it before the first start; a later start must not end a cell that can serve.
        await life.in_thread(check_tiers, config)
    # Compiled now, at this machine's first start, and not when the first chunk is waited for.
    await life.in_thread(native_hash)
    media = await life.in_thread(open_media, config)
    loop = asyncio.get_running_loop()
    # Always handled: the signal to read keys again must not end a storage that has none.
    loop.add_signal_handler(signal.SIGHUP, media.cipher.reload if media.cipher is not None else lambda: None)
    try:
        bus = await nats_bus.connect_with(config, f"storage {config.id}")
        try:
            pools = Pools(
                config.shm_prefix, config.host_kv_bytes, config.hidden_bytes, backup_share=config.backup_share
            )
            incarnation = ids.new_id("storage")
            shell = StorageShell(config, bus, pools, media, incarnation=incarnation, tracer=tracer, readiness=readiness)
            await shell.run(life)
        finally:
            await bus.close()
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        await asyncio.to_thread(media.close)
