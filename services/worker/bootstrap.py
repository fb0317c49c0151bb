"""The worker's composition root: all parts of one process are made, joined and taken down here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import msgspec
import torch

from services.worker import metrics as measures
from services.worker.adapter_loading import AdapterBounds, AdapterLoading, NoAdapters, WorkerAdapters
from services.worker.admission import ModelLimits
from services.worker.answer_grammars import AnswerGrammars
from services.worker.bubble import Pace
from services.worker.compute import Runner, StepComputer
from services.worker.config import WorkerConfig
from services.worker.counters import Counters
from services.worker.detokenizer import Vocabulary
from services.worker.device_bounds import CPU_LEAST_RUNNING, batch_tokens, most_running
from services.worker.device_choice import DeviceChoice
from services.worker.ending import Ending
from services.worker.engine.model_runner import ModelRunner
from services.worker.executor import Executor
from services.worker.gpu_claims import claimed
from services.worker.hidden_saving import HiddenSaving
from services.worker.identity import WorkerIdentity
from services.worker.importance.disk_prefix import DiskPrefix
from services.worker.importance.disk_reads import DiskReads
from services.worker.importance.obstacles import obstacle_to_parts
from services.worker.importance.read_buffers import ReadBuffers
from services.worker.importance.storage_calls import StorageCalls
from services.worker.inbox import Inbox
from services.worker.kv.device_pool import DTYPE_NAMES
from services.worker.kv.host_stores import HostStores
from services.worker.kv.loads import Loads
from services.worker.kv.movers.choice import choose_mover
from services.worker.kv.movers.protocol import PageMover
from services.worker.kv.pinning import CudaPins, cuda_pins
from services.worker.kv.profile import this_machine
from services.worker.kv.verification import Verification
from services.worker.lookup.prompt_lookup import PromptLookup
from services.worker.native.build import missing
from services.worker.order_intake import OrderIntake
from services.worker.parallel.group_runner import GroupRunner, end_when_lost
from services.worker.parallel.parts_mover import PartsMover
from services.worker.passes import Passes
from services.worker.proving.parts import CHECKSUMS, MOVER, REGISTRATION
from services.worker.report_channel import ReportChannel
from services.worker.report_delivery import ReportDelivery
from services.worker.reports import Report, Reporter
from services.worker.request_spans import RequestSpans
from services.worker.restore.measured_costs import costs_of_first_start, measured_costs, prove_projection
from services.worker.restore.projection import KvProjection
from services.worker.restoring import Restoring
from services.worker.retained import RetainedOutputs
from services.worker.roster import Roster
from services.worker.runner_loading import load_runner
from services.worker.shell import WorkerShell
from services.worker.shortfalls import profile_fault, shortfalls
from services.worker.sparse_prefixes import ImportanceSettings, SparsePrefixes
from services.worker.step_results import StepResults
from services.worker.step_rows import StepRows
from services.worker.steps_ahead import StepsAhead
from services.worker.store_calls import StoreCalls
from services.worker.thread_device import have_threads_use, use_device
from services.worker.token_sender import TokenSender
from services.worker.torch_gpus import choose, device_bytes
from shared import ids, logs, metrics, progress, subjects, tracing
from shared.bus.nats_bus import connect_with
from shared.bus.protocol import Bus
from shared.errors import TransportError
from shared.event_outbox import EventOutbox
from shared.lifecycle import Lifecycle, Stopping
from shared.membership import Membership, Readiness, lists_worker
from shared.memory import reap, unlink_own
from shared.memory.life import LifeSign
from shared.messages.status import Degradation
from shared.messages.worker_events import DeviceFacts, RestorationCosts
from shared.messages.worker_plans import WorkerPlan
from shared.model_files import fingerprints
from shared.plan_receiver import PlanReceiver
from shared.tracing import Tracer

_log = logs.get_logger("worker")


def device_facts(
    config: WorkerConfig,
    choice: DeviceChoice,
    *,
    pool_tokens: int,
    max_context: int,
    memory_bytes: int,
    dtype: str = "",
) -> DeviceFacts:
    """Return the device's announcement to the cell; its pool has ``pool_tokens`` tokens.

    ``memory_bytes`` is 0 on a CPU. ``dtype`` is the type in which the model computes.
    """
    name = choice.name or this_machine().processor
    facts = DeviceFacts(kind=choice.kind, name=name, ranks=config.tensor_parallel, note=choice.note, dtype=dtype)
    if choice.kind == "cpu":
        return msgspec.structs.replace(facts, max_running=most_running(pool_tokens, max_context, CPU_LEAST_RUNNING))
    return msgspec.structs.replace(
        facts,
        max_batch_tokens=config.max_batch_tokens or batch_tokens(memory_bytes),
        max_running=most_running(pool_tokens, max_context),
    )


def _choose_mover(config: WorkerConfig, runner: ModelRunner | GroupRunner) -> PageMover:
    choose = partial(
        choose_mover,
        name=config.mover,
        programs=config.mover_programs,
        profile=config.profile,
        verified=config.verify_host == "always",
        proven=runner.proofs.passed(MOVER),
        checks_on_device=runner.proofs.way(CHECKSUMS) != "on the host",
    )
    if isinstance(runner, GroupRunner):
        # Host pages are divided among the parts in memory that no driver has pinned.
        return PartsMover(runner.geometry, runner.parts.parts, partial(choose, default="batched"))
    return choose(runner.pool)


def make_stores(mover: PageMover, runner: ModelRunner | GroupRunner) -> HostStores | None:
    """Return the copier of pages for the storage's backups.

    None where the storage copies them itself, as without such a kernel.
    """
    if isinstance(runner, GroupRunner) or mover.name != "gpu_assisted":
        return None
    # Imported here because the kernel imports Triton.
    from services.worker.kv.movers.gpu_assisted import GpuAssistedMover

    # Storing checks nothing, so kernels that may not have passed their proof are not tried here.
    stores = GpuAssistedMover(runner.pool, checks_on_device=False)
    return HostStores(stores, runner.pool.pages, on_thread=partial(use_device, runner.pool.device))


def _pins(runner: ModelRunner | GroupRunner) -> CudaPins | None:
    """Return the registration of host memory with the driver; None on a CPU, and where that did not pass its proof."""
    return None if runner.proofs.way(REGISTRATION) == "staged" else cuda_pins(runner.pool.device)


def make_loads(config: WorkerConfig, runner: ModelRunner | GroupRunner) -> Loads:
    """Return the loads into this worker's device pool. Raises ConfigError for a mover that cannot serve it."""
    mover = _choose_mover(config, runner)
    return Loads(
        runner.geometry,
        runner.pool.pages,
        mover,
        timeout_s=config.load_timeout_ms / 1e3,
        clock_ns=time.time_ns,
        verification=Verification(config.verify_host, config.verify_host_share),
        pins=_pins(runner),
        device_type=runner.pool.device.type,
        on_thread=partial(use_device, runner.pool.device),
        stores=make_stores(mover, runner),
    )


def make_saving(
    config: WorkerConfig, runner: ModelRunner | GroupRunner, projection: KvProjection | None
) -> HiddenSaving:
    """Return the saving of hidden states of this worker's requests."""
    return HiddenSaving(
        runner.pool,
        projection,
        ring_bytes=config.hidden_ring_bytes,
        shm_prefix=config.shm_prefix,
        pins=_pins(runner),
        on_detached=runner.let_go_of_hidden if isinstance(runner, GroupRunner) else lambda: None,
    )


def make_disk_reads(
    config: WorkerConfig, runner: ModelRunner | GroupRunner, bus: Bus, obstacle: str
) -> DiskReads | None:
    """Return the reads of parts of prefixes from the disk, for the running event loop.

    None, with a line in the log, where there is an ``obstacle`` (:func:`obstacle_to_parts`). Raises ConfigError when
    --sparse-buffer-bytes is too small for this model.
    """
    if obstacle:
        _log.info("worker_reads_no_parts", reason=obstacle)
        return None
    return DiskReads(
        ReadBuffers(config.shm_prefix, config.sparse_buffer_bytes),
        StorageCalls(bus),
        runner.geometry,
        runner.pool.device,
        timeout_s=config.load_timeout_ms / 1e3,
    )


def proposal_tokens(config: WorkerConfig, runner: Runner) -> int:
    """Return the most tokens of a prompt-lookup proposal; 0, with a line in the log, where there can be none."""
    if runner.lookup_obstacle and config.prompt_lookup_tokens:
        _log.info("prompt_lookup_is_off", reason=runner.lookup_obstacle)
    return 0 if runner.lookup_obstacle else config.prompt_lookup_tokens


def make_adapters(config: WorkerConfig, runner: Runner, inbox: Inbox) -> AdapterLoading:
    """Return the loading of LoRA adapters beside this worker's model, or a stand-in with the reason for none."""
    if not isinstance(runner, ModelRunner):
        return NoAdapters("a tensor-parallel group serves no adapters yet")
    if runner.is_exact:
        return NoAdapters("--exact was not proven with adapters")
    if runner.states or runner.attends_itself:
        return NoAdapters("a model that carries states or attends by code of its own is not computed row by row")
    bounds = AdapterBounds(config.max_adapters, config.max_adapter_rank, config.adapter_bytes)
    return WorkerAdapters(runner.adapters, bounds, inbox.wake)


def make_executor(
    identity: WorkerIdentity,
    runner: Runner,
    vocabulary: Vocabulary,
    inbox: Inbox,
    post: Callable[[Report], None],
    *,
    loads: Loads,
    saving: HiddenSaving,
    sparse: SparsePrefixes,
    restoring: Restoring,
    lease_low_tokens: int,
    rows: StepRows | None = None,
    grammars: AnswerGrammars | None = None,
    lookup_tokens: int = 0,
    adapters: AdapterLoading | None = None,
    clock_ns: Callable[[], int] = time.time_ns,
) -> Executor:
    """Return the executor that the compute thread runs.

    ``post`` hands its reports on and must not block, ``rows`` bounds passes, ``grammars`` are followed in threads by
    default. ``lookup_tokens`` bounds proposals of prompt lookup; 0: there are none. Without ``adapters`` none are
    served.
    """
    adapters = adapters or NoAdapters("this worker serves no adapters")
    geometry = runner.geometry
    limits = ModelLimits(
        page_size=geometry.page_size,
        pages=runner.pool.pages,
        vocab_size=runner.vocab_size,
        max_context=runner.max_context,
        eos_token_ids=tuple(runner.eos_token_ids),
    )
    counters, pace = Counters(), Pace()
    reporter = Reporter(identity.worker_id, identity.incarnation)
    grammars = grammars or AnswerGrammars(
        vocabulary.tokenizer_json, limits.vocab_size, limits.eos_token_ids, inbox.wake
    )
    roster = Roster(limits, vocabulary, reporter, counters, saving, sparse, grammars, adapters.serves)
    computer = StepComputer(runner, sparse, rows=rows)
    passes = Passes(
        computer,
        saving,
        roster.requests,
        counters,
        pace,
        layers=geometry.layers,
        on_refused=sparse.end,
    )
    return Executor(
        inbox,
        roster,
        passes,
        StepResults(roster, reporter, counters, grammars, lease_low_tokens=lease_low_tokens),
        StepsAhead(computer, saving, clock_ns),
        loads=loads,
        saving=saving,
        sparse=sparse,
        restoring=restoring,
        reporter=reporter,
        counters=counters,
        pace=pace,
        grammars=grammars,
        lookup=PromptLookup(lookup_tokens, saving, weight_bytes=runner.model_bytes, token_bytes=geometry.token_bytes)
        if lookup_tokens
        else None,
        adapters=adapters,
        geometry=geometry,
        post=post,
        clock_ns=clock_ns,
    )


def make_shell(
    config: WorkerConfig,
    identity: WorkerIdentity,
    bus: Bus,
    runner: Runner,
    vocabulary: Vocabulary,
    *,
    loads: Loads,
    saving: HiddenSaving,
    projection: KvProjection | None = None,
    restoration: RestorationCosts | None = None,
    disk_reads: DiskReads | None = None,
    spans: RequestSpans | None = None,
    rows: StepRows | None = None,
    degraded: Callable[[], Iterable[Degradation]] = tuple,
    readiness: Readiness | None = None,
) -> WorkerShell:
    """Return a worker for the running event loop.

    Without ``projection`` nothing is restored from hidden states, without ``disk_reads`` no part of a prefix is read
    from the disk. ``restoration`` is the cost of restoring here, as announced to the cell. ``spans`` traces requests.
    ``degraded`` lists features that were asked for and are missing here. ``readiness`` follows the cell's status.
    """
    worker_id, incarnation = identity.worker_id, identity.incarnation
    inbox, ending = Inbox(), Ending()
    orders = OrderIntake(inbox, ending, spans)
    outbox = EventOutbox(
        bus,
        subjects.worker_input(worker_id),
        incarnation,
        capacity=config.pending_events,
        waiting=measures.PENDING_EVENTS,
    )
    tokens = TokenSender(bus, on_too_large=orders.abort_too_large)
    retained = RetainedOutputs(config.retained_outputs)
    reports = ReportDelivery(identity, outbox, tokens, retained, ending, spans)
    channel = ReportChannel(asyncio.get_running_loop(), reports.take)
    plans = PlanReceiver(
        bus,
        subjects.worker_output(worker_id),
        incarnation,
        WorkerPlan,
        lambda plan: plan.worker_id == worker_id,
        orders.deliver,
        delays=measures.PLAN_SECONDS,
        fetched=measures.PLANS_FETCHED,
    )
    membership = Membership(
        lambda status: lists_worker(status, worker_id, incarnation),
        lambda: ending.end(TransportError("the cell has given this incarnation up")),
        lambda: outbox.stored_seq,
        readiness,
    )
    executor = make_executor(
        identity,
        runner,
        vocabulary,
        inbox,
        channel.post,
        loads=loads,
        saving=saving,
        sparse=SparsePrefixes(
            runner.pool,
            None if disk_reads is None else partial(DiskPrefix, reads=disk_reads),
            time.time_ns,
            ImportanceSettings(config.importance_probe_heads, config.importance_alpha, config.prefetch_keys),
            on_closed=runner.let_go_of_prefix if isinstance(runner, GroupRunner) else lambda prefix: None,
        ),
        restoring=Restoring(
            runner,
            projection,
            saving.pools,
            staging_bytes=config.restore_staging_bytes,
            timeout_s=config.load_timeout_ms / 1e3,
            clock_ns=time.time_ns,
            group=runner if isinstance(runner, GroupRunner) else None,
        ),
        lease_low_tokens=config.lease_low_tokens,
        rows=rows,
        lookup_tokens=proposal_tokens(config, runner),
        adapters=make_adapters(config, runner, inbox),
    )
    return WorkerShell(
        config,
        identity,
        bus,
        runner,
        executor,
        plans=plans,
        let_go=orders.let_go,
        channel=channel,
        outbox=outbox,
        tokens=tokens,
        retained=retained,
        ending=ending,
        status_readers=[membership.see] if disk_reads is None else [membership.see, disk_reads.see],
        stores=None if loads.stores is None else StoreCalls(incarnation, loads.pools, loads.stores),
        restoration=restoration,
        degraded=degraded,
    )


def _prove_restoring(
    config: WorkerConfig, runner: ModelRunner | GroupRunner
) -> tuple[KvProjection | None, RestorationCosts | None]:
    """Return the projection that restores KV from hidden states, and its cost for the cell.

    None where neither is there. The cell plans no restoration, and asks for no hidden states, at a worker that
    announces no costs.
    """
    profile = Path(config.profile) if config.profile else None
    with progress.phase("proving the restoration of KV"):
        projection = prove_projection(runner, config.restore_staging_bytes)
        costs = measured_costs(profile, runner, projection, threads=config.rank_threads)
    if costs is None and config.measure_at_start:
        costs = costs_of_first_start(runner, projection, threads=config.rank_threads)
    return projection, costs


async def serve(config: WorkerConfig, life: Lifecycle, choice: DeviceChoice | None = None) -> None:
    """Load, join, work until told to stop, leave. Chooses a device first if none was chosen yet."""
    if choice is None:
        choice = await asyncio.to_thread(choose, config)
    _log.info(
        "device_chosen",
        asked=config.device,
        device=choice.device,
        name=choice.name,
        note=choice.note,
        uuids=choice.uuids,
    )
    async with tracing.running(config.traces, "worker", config.id) as tracer:
        try:
            with claimed(choice.uuids):
                await _serve(config, life, choice, tracer)
        except Stopping:
            unlink_own(config.shm_prefix)  # Results of the loading thread when it is given up.
            raise


async def _serve(config: WorkerConfig, life: Lifecycle, choice: DeviceChoice, tracer: Tracer | None) -> None:
    readiness = Readiness()
    metrics.serve(config.metrics_port, config.metrics_host, lambda: readiness.reason)
    reap(config.shm_prefix)
    started = time.monotonic()
    cache_dir = Path(config.data_dir) if config.data_dir else None
    named = await life.in_thread(
        fingerprints,
        config.model_dir,
        cache_dir,
        context_tokens=config.max_context_tokens,
        is_exact=config.exact,
        kv_dtype=config.kv_dtype,
    )
    vocabulary = await life.in_thread(Vocabulary.from_directory, config.model_dir)
    if choice.kind == "cuda":
        have_threads_use(torch.device(choice.device))
    runner = await life.in_thread(load_runner, config, choice)
    if isinstance(runner, GroupRunner):
        end_when_lost(runner, life)
    try:
        _log.info(
            "model_loaded",
            model=named.model,
            pages=runner.pool.pages,
            page_bytes=runner.geometry.page_bytes,
            padding_bytes=runner.pool.planes.padding_bytes,
            seconds=round(time.monotonic() - started, 2),
        )
        if life.stopping.is_set():
            return
        projection, costs = await life.in_thread(_prove_restoring, config, runner)
        loads = await life.in_thread(make_loads, config, runner)
        unusable_profile = await life.in_thread(profile_fault, config.profile)
        saving, rows = make_saving(config, runner, projection), StepRows()
        obstacle = await life.in_thread(obstacle_to_parts, runner, config.sparse_buffer_bytes)
        bus = await connect_with(config, config.id)
        disk_reads: DiskReads | None = None
        try:
            disk_reads = make_disk_reads(config, runner, bus, obstacle)
            identity = WorkerIdentity(
                worker_id=config.id,
                incarnation=ids.new_id("inc"),
                node=config.node_name,
                model=named.model,
                kernels=named.kernels,
                reads_no_parts=obstacle,
                device=device_facts(
                    config,
                    choice,
                    pool_tokens=runner.pool.pages * runner.geometry.page_size,
                    max_context=runner.max_context,
                    memory_bytes=device_bytes(choice),
                    dtype=DTYPE_NAMES.get(runner.model.dtype, ""),
                ),
            )
            shell = make_shell(
                msgspec.structs.replace(config, threads=config.rank_threads),
                identity,
                bus,
                runner,
                vocabulary,
                loads=loads,
                saving=saving,
                projection=projection,
                restoration=costs,
                disk_reads=disk_reads,
                spans=None if tracer is None else RequestSpans(tracer),
                degraded=partial(shortfalls, config.id, loads.pools, unusable_profile, missing, rows, runner.proofs),
                rows=rows,
                readiness=readiness,
            )
            # From before the join until WorkerLeft is stored.
            with LifeSign.show(config.shm_prefix, "worker", config.id, identity.incarnation):
                try:
                    await shell.run(life)
                finally:
                    # The end of the sign tells the storage that nothing is written to its pool any more.
                    await asyncio.to_thread(loads.end_stores)
        finally:
            if disk_reads is not None:
                await disk_reads.close()
            saving.close()
            loads.close()
            await bus.close()
    finally:
        runner.close()
