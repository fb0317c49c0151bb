"""The worker's composition root: everything that one process consists of is made and taken down here."""

from __future__ import annotations

import asyncio
import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import torch

from services.worker.config import WorkerConfig
from services.worker.detokenizer import Vocabulary
from services.worker.device_choice import DeviceChoice
from services.worker.engine.model_runner import ModelRunner
from services.worker.importance.disk_reads import DiskReads
from services.worker.importance.read_buffers import ReadBuffers
from services.worker.importance.storage_calls import StorageCalls
from services.worker.kv.loads import Loads
from services.worker.kv.movers.choice import choose_mover
from services.worker.kv.movers.protocol import PageMover
from services.worker.kv.pinning import cuda_pins
from services.worker.kv.profile import this_machine
from services.worker.kv.verification import Verification
from services.worker.native.build import missing
from services.worker.parallel.group_lost import GroupLost
from services.worker.parallel.group_runner import GroupRunner, load_group
from services.worker.parallel.orders import StartRank
from services.worker.parallel.parts_mover import PartsMover
from services.worker.pool_sizing import cpu_sizer, gpu_sizer, room_wish
from services.worker.request_spans import RequestSpans
from services.worker.restore.measured_costs import measured_costs, prove_projection
from services.worker.restore.projection import KvProjection
from services.worker.shell import WorkerIdentity, WorkerShell
from services.worker.shortfalls import profile_fault, shortfalls
from services.worker.state_saving import StateSaving
from services.worker.thread_device import use_device
from services.worker.torch_gpus import choose
from shared import ids, logs, metrics, progress, tracing
from shared.bus.nats_bus import connect_with
from shared.bus.protocol import Bus
from shared.lifecycle import EXIT_FAILED, Lifecycle, Stopping
from shared.memory import reap, unlink_own
from shared.memory.life import LifeSign
from shared.messages.worker_events import DeviceFacts, RestorationCosts
from shared.model_files import fingerprint
from shared.tracing import Tracer

_log = logs.get_logger("worker")


def device_facts(config: WorkerConfig, choice: DeviceChoice) -> DeviceFacts:
    """What the cell is told of the device."""
    name = choice.name or this_machine().processor
    return DeviceFacts(kind=choice.kind, name=name, ranks=config.tensor_parallel, note=choice.note)


def load_runner(config: WorkerConfig, choice: DeviceChoice) -> ModelRunner | GroupRunner:
    """The model, proven and warm. Raises OperatorError with the reason why it cannot be served."""
    if config.tensor_parallel > 1:
        return _load_group(config, choice)
    runner = ModelRunner.load(
        config.model_dir,
        dtype=config.dtype_on(choice.kind),
        device=choice.device,
        page_size=config.page_size,
        device_kv_bytes=config.device_kv_bytes or None,
        pages=config.device_pages or None,
        threads=config.threads,
        shm_prefix=config.shm_prefix,
        forward=config.forward,
        sizer=cpu_sizer(config) if choice.kind == "cpu" else gpu_sizer(config),
        context_tokens=config.max_context_tokens,
    )
    with progress.phase("warming up"):
        runner.warm_up()
    if choice.kind == "cuda" and config.decode_graph_rows:
        with progress.phase("capturing CUDA graphs"):
            runner.capture_decode(config.decode_graph_rows)
    return runner


def _load_group(config: WorkerConfig, choice: DeviceChoice) -> GroupRunner:
    """The same over several ranks, of which this process is the first."""
    group = load_group(
        StartRank(
            rank=0,
            ranks=config.tensor_parallel,
            model_dir=str(config.model_dir),
            dtype=config.dtype_on(choice.kind),
            device=choice.kind,
            threads=config.rank_threads,
            page_size=config.page_size,
            shm_prefix=config.shm_prefix,
            store_port=0,
            timeout_ms=config.rank_timeout_ms,
            worker_id=config.id,
            log_level=config.log_level,
            first_gpu=choice.first_gpu,
            max_context_tokens=config.max_context_tokens,
        ),
        device_kv_bytes=config.device_kv_bytes or None,
        pages=config.device_pages or None,
        sizer=cpu_sizer(config) if choice.kind == "cpu" else None,
        room=room_wish(config),
    )
    try:
        group.warm_up()
    except BaseException:
        group.close()
        raise
    _log.info("group_loaded", ranks=config.tensor_parallel, pids=group.rank_pids, weight_bytes=group.weight_bytes)
    return group


def _choose_mover(config: WorkerConfig, runner: ModelRunner | GroupRunner) -> PageMover:
    choose = partial(
        choose_mover,
        name=config.mover,
        programs=config.mover_programs,
        profile=config.profile,
        verified=config.verify_host == "always",
    )
    if isinstance(runner, GroupRunner):
        # Each part has the mover that a worker with such a pool would have.
        return PartsMover(runner.geometry, runner.parts.parts, choose)
    return choose(runner.pool)


def make_loads(config: WorkerConfig, runner: ModelRunner | GroupRunner) -> Loads:
    """What moves pages into the device pool of this worker. Raises ConfigError for a mover that cannot serve it."""
    return Loads(
        runner.geometry,
        runner.pool.pages,
        _choose_mover(config, runner),
        timeout_s=config.load_timeout_ms / 1e3,
        clock_ns=time.time_ns,
        verification=Verification(config.verify_host, config.verify_host_share),
        pins=cuda_pins(runner.pool.device),
        device_type=runner.pool.device.type,
        on_thread=partial(use_device, runner.pool.device),
    )


def make_saving(
    config: WorkerConfig, runner: ModelRunner | GroupRunner, projection: KvProjection | None
) -> StateSaving:
    """What saves the state of this worker's requests."""
    return StateSaving(
        runner.pool,
        projection,
        ring_bytes=config.state_ring_bytes,
        shm_prefix=config.shm_prefix,
        pins=cuda_pins(runner.pool.device),
    )


def make_disk_reads(config: WorkerConfig, runner: ModelRunner | GroupRunner, bus: Bus) -> DiskReads | None:
    """What reads parts of prefixes from the disk, for the running event loop; None where that is switched off, and
    for a group, no rank of which sees the scores of all heads.

    Raises ConfigError when --sparse-buffer-bytes is too small for this model.
    """
    if not config.sparse_buffer_bytes or isinstance(runner, GroupRunner):
        return None
    return DiskReads(
        ReadBuffers(config.shm_prefix, config.sparse_buffer_bytes),
        StorageCalls(bus),
        runner.geometry,
        runner.pool.device,
        timeout_s=config.load_timeout_ms / 1e3,
    )


def _prove_restoring(
    config: WorkerConfig, runner: ModelRunner | GroupRunner
) -> tuple[KvProjection | None, RestorationCosts | None]:
    """What restores KV from hidden states, and what the cell is told that it costs; None where nothing does.

    The cell plans no restoration, and asks for no state, at a worker that announces no costs.
    """
    if isinstance(runner, GroupRunner):
        _log.info("group_restores_nothing", advice="hidden states and parts of prefixes need a worker of one rank")
        return None, None
    profile = Path(config.profile) if config.profile else None
    with progress.phase("proving the restoration of KV"):
        projection = prove_projection(runner)
        return projection, measured_costs(profile, runner, projection, threads=config.threads)


def _end_with_group(runner: ModelRunner | GroupRunner, life: Lifecycle) -> None:
    """A group that cannot compute any more takes this process with it, which a supervisor starts anew. There is
    nothing to drain: what runs goes on at another worker.
    """
    if not isinstance(runner, GroupRunner):
        return
    loop = asyncio.get_running_loop()

    def end() -> None:
        life.hurrying.set()
        life.stop(EXIT_FAILED)

    def on_lost(_: GroupLost) -> None:
        # A loop that has ended meanwhile has nothing left to be told.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(end)

    runner.on_lost(on_lost)


def _have_threads_use(device: torch.device) -> None:
    """What this loop hands to threads runs on ``device``, and so does what this thread does itself."""
    use_device(device)
    asyncio.get_running_loop().set_default_executor(
        ThreadPoolExecutor(thread_name_prefix="asyncio", initializer=partial(use_device, device))
    )


async def serve(config: WorkerConfig, life: Lifecycle, choice: DeviceChoice | None = None) -> None:
    """Load, join, work until told to stop, leave. Where no device was chosen yet, it is now."""
    if choice is None:
        choice = await asyncio.to_thread(choose, config)
    _log.info("device_chosen", asked=config.device, device=choice.device, name=choice.name, note=choice.note)
    async with tracing.running(config.traces, "worker", config.id) as tracer:
        try:
            await _serve(config, life, choice, tracer)
        except Stopping:
            unlink_own(config.shm_prefix)  # What the thread that is given up has made.
            raise


async def _serve(config: WorkerConfig, life: Lifecycle, choice: DeviceChoice, tracer: Tracer | None) -> None:
    metrics.serve(config.metrics_port, config.metrics_host)
    reap(config.shm_prefix)
    started = time.monotonic()
    cache_dir = Path(config.data_dir) if config.data_dir else None
    model = await life.in_thread(fingerprint, config.model_dir, cache_dir, context_tokens=config.max_context_tokens)
    vocabulary = await life.in_thread(Vocabulary.from_directory, config.model_dir)
    if choice.kind == "cuda":
        _have_threads_use(torch.device(choice.device))
    runner = await life.in_thread(load_runner, config, choice)
    _end_with_group(runner, life)
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
        projection, costs = await life.in_thread(_prove_restoring, config, runner)
        loads = await life.in_thread(make_loads, config, runner)
        unusable_profile = await life.in_thread(profile_fault, config.profile)
        saving = make_saving(config, runner, projection)
        bus = await connect_with(config, config.id)
        disk_reads: DiskReads | None = None
        try:
            disk_reads = make_disk_reads(config, runner, bus)
            identity = WorkerIdentity(
                worker_id=config.id,
                incarnation=ids.new_id("inc"),
                node=config.node_name,
                model=model,
                device=device_facts(config, choice),
            )
            shell = WorkerShell(
                msgspec.structs.replace(config, threads=config.rank_threads),
                identity,
                bus,
                runner,
                vocabulary,
                loads,
                projection=projection,
                restoration=costs,
                saving=saving,
                disk_reads=disk_reads,
                spans=None if tracer is None else RequestSpans(tracer),
                degraded=partial(shortfalls, config.id, loads.pools, unusable_profile, missing),
            )
            # From before the join until WorkerLeft is stored.
            with LifeSign.show(config.shm_prefix, "worker", config.id, identity.incarnation):
                await shell.run(life)
        finally:
            if disk_reads is not None:
                await disk_reads.close()
            saving.close()
            loads.close()
            await bus.close()
    finally:
        runner.close()
