"""From a worker's settings to its model, on one device or over several ranks."""

from __future__ import annotations

from functools import partial

from services.worker.config import WorkerConfig
from services.worker.device_choice import DeviceChoice
from services.worker.engine.gpu_needs import GpuFacts, check_weights, shape_of
from services.worker.engine.model_runner import ModelRunner
from services.worker.parallel.group_runner import GroupRunner, load_group
from services.worker.parallel.orders import StartRank
from services.worker.pool_sizing import cpu_sizer, gpu_sizer, room_wish
from services.worker.proving.device import find_fault, prove_device
from services.worker.proving.parts import ATTENTION, FLASHINFER, GRAPHS, parts_of
from services.worker.torch_gpus import device_bytes, gpu_facts
from shared import logs, progress

_log = logs.get_logger("worker")


def load_runner(config: WorkerConfig, choice: DeviceChoice) -> ModelRunner | GroupRunner:
    """Load the model, proven and warm. Raises OperatorError with the reason why it cannot be served."""
    if choice.kind == "cuda":
        check_fit(config, gpu_facts(choice.first_gpu))
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
        exact=config.exact,
        attention=config.attention,
        kv_dtype=config.kv_dtype,
        prove=partial(
            prove_device,
            parts=parts_of(has_graphs=config.decode_graph_rows > 0, is_exact=config.exact, attention=config.attention),
        ),
    )
    with progress.phase("warming up"):
        runner.warm_up()
    has_graphs = config.decode_graph_rows > 0 and runner.proofs.way(GRAPHS) == "graphs"
    if choice.kind == "cuda" and has_graphs and not runner.attends_itself:
        with progress.phase("capturing CUDA graphs"):
            capture(runner, config.decode_graph_rows)
    return runner


def capture(runner: ModelRunner, most_rows: int) -> None:
    """Capture decode steps in CUDA graphs.

    A model whose steps cannot all be captured goes on without, with a line in the log. Where FlashInfer is the
    obstacle, the next attention that was proven takes its place.
    """
    graphs = runner.capture_decode(most_rows)
    others = [way for way in runner.proofs.passed(ATTENTION) or () if way != FLASHINFER]
    if graphs.fault and others and runner.proofs.way(ATTENTION) == FLASHINFER:
        fault = f"the model in CUDA graphs: {graphs.fault}"
        runner.proofs = find_fault(runner.proofs, ATTENTION, FLASHINFER, fault, others[0])
        runner.attend_by(others[0])
        graphs = runner.capture_decode(most_rows)
    if graphs.fault:
        runner.proofs = find_fault(
            runner.proofs, GRAPHS, "graphs", graphs.fault, "graphs" if graphs.shapes else "eager"
        )


def _load_group(config: WorkerConfig, choice: DeviceChoice) -> GroupRunner:
    """Load the same model over several ranks; this process is the first."""
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
            kv_dtype=config.kv_dtype,
        ),
        device_kv_bytes=config.device_kv_bytes or None,
        pages=config.device_pages or None,
        sizer=cpu_sizer(config) if choice.kind == "cpu" else None,
        room=room_wish(config, device_bytes(choice)),
    )
    try:
        group.warm_up()
    except BaseException:
        group.close()
        raise
    _log.info("group_loaded", ranks=config.tensor_parallel, pids=group.rank_pids, weight_bytes=group.weight_bytes)
    return group


def check_fit(config: WorkerConfig, gpu: GpuFacts) -> None:
    """Raise ConfigError where it is known before any weight is read that the model does not fit."""
    shape = shape_of(config.model_dir, config.dtype)
    if shape is not None:
        check_weights(shape, config.tensor_parallel, gpu, room_wish(config, gpu.total))
