"""The worker's composition root: everything that one process consists of is made and taken down here."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import torch

from services.worker.config import WorkerConfig
from services.worker.detokenizer import Vocabulary
from services.worker.engine.model_runner import ModelRunner
from services.worker.importance.disk_reads import DiskReads
from services.worker.importance.read_buffers import ReadBuffers
from services.worker.importance.storage_calls import StorageCalls
from services.worker.kv.loads import Loads
from services.worker.kv.movers.choice import choose_mover
from services.worker.kv.pinning import cuda_pins
from services.worker.kv.verification import Verification
from services.worker.restore.measured_costs import measured_costs, prove_projection
from services.worker.restore.projection import KvProjection
from services.worker.shell import WorkerIdentity, WorkerShell
from services.worker.state_saving import StateSaving
from shared import ids, logs, metrics
from shared.bus.nats_bus import connect
from shared.bus.protocol import Bus
from shared.errors import OperatorError
from shared.lifecycle import Lifecycle
from shared.memory import reap
from shared.model_files import fingerprint

_log = logs.get_logger("worker")


def load_runner(config: WorkerConfig) -> ModelRunner:
    """The model, proven and warm. Raises OperatorError with the reason why it cannot be served."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise OperatorError("--device cuda: torch finds no GPU here")
    runner = ModelRunner.load(
        config.model_dir,
        dtype=config.dtype,
        device=config.device,
        page_size=config.page_size,
        device_kv_bytes=config.device_kv_bytes,
        pages=config.device_pages or None,
        threads=config.threads,
        shm_prefix=config.shm_prefix,
    )
    runner.warm_up()
    return runner


def make_loads(config: WorkerConfig, runner: ModelRunner) -> Loads:
    """What moves pages into the device pool of this worker. Raises ConfigError for a mover that cannot serve it."""
    return Loads(
        runner.geometry,
        runner.pool.pages,
        choose_mover(
            runner.pool,
            config.mover,
            programs=config.mover_programs,
            profile=config.profile,
            verified=config.verify_host == "always",
        ),
        timeout_s=config.load_timeout_ms / 1e3,
        clock_ns=time.time_ns,
        verification=Verification(config.verify_host, config.verify_host_share),
        pins=cuda_pins(runner.pool.device),
        device_type=runner.pool.device.type,
    )


def make_saving(config: WorkerConfig, runner: ModelRunner, projection: KvProjection | None) -> StateSaving:
    """What saves the state of this worker's requests."""
    return StateSaving(
        runner.pool,
        projection,
        ring_bytes=config.state_ring_bytes,
        shm_prefix=config.shm_prefix,
        pins=cuda_pins(runner.pool.device),
    )


def make_disk_reads(config: WorkerConfig, runner: ModelRunner, bus: Bus) -> DiskReads | None:
    """What reads parts of prefixes from the disk, for the running event loop; None where that is switched off.

    Raises ConfigError when --sparse-buffer-bytes is too small for this model.
    """
    if not config.sparse_buffer_bytes:
        return None
    return DiskReads(
        ReadBuffers(config.shm_prefix, config.sparse_buffer_bytes),
        StorageCalls(bus),
        runner.geometry,
        runner.pool.device,
        timeout_s=config.load_timeout_ms / 1e3,
    )


async def serve(config: WorkerConfig, life: Lifecycle) -> None:
    """Load, join, work until told to stop, leave."""
    metrics.serve(config.metrics_port, config.metrics_host)
    reap(config.shm_prefix)
    started = time.monotonic()
    cache_dir = Path(config.data_dir) if config.data_dir else None
    model = await asyncio.to_thread(fingerprint, config.model_dir, cache_dir)
    vocabulary = await asyncio.to_thread(Vocabulary.from_directory, config.model_dir)
    runner = await asyncio.to_thread(load_runner, config)
    try:
        _log.info(
            "model_loaded",
            model=model,
            pages=runner.pool.pages,
            page_bytes=runner.geometry.page_bytes,
            seconds=round(time.monotonic() - started, 2),
        )
        if life.stopping.is_set():
            return
        projection = await asyncio.to_thread(prove_projection, runner)
        profile = Path(config.profile) if config.profile else None
        costs = await asyncio.to_thread(measured_costs, profile, runner, projection, threads=config.threads)
        loads = await asyncio.to_thread(make_loads, config, runner)
        saving = make_saving(config, runner, projection)
        bus = await connect(config.nats, config.id)
        disk_reads: DiskReads | None = None
        try:
            disk_reads = make_disk_reads(config, runner, bus)
            identity = WorkerIdentity(
                worker_id=config.id, incarnation=ids.new_id("inc"), node=ids.node_name(), model=model
            )
            shell = WorkerShell(
                config,
                identity,
                bus,
                runner,
                vocabulary,
                loads,
                projection=projection,
                restoration=costs,
                saving=saving,
                disk_reads=disk_reads,
            )
            await shell.run(life)
        finally:
            if disk_reads is not None:
                await disk_reads.close()
            saving.close()
            loads.close()
            await bus.close()
    finally:
        runner.close()
