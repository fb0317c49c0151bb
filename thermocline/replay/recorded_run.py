"""The run in a recording: the cell, its requests and commands, and their figures."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from services.scheduler.fold import load_state
from services.scheduler.recording import Header, InputFrame, OutputFrame, SnapshotFrame, read_frames
from services.scheduler.replay import recorded_skips, require_policies
from services.scheduler.snapshots import decode_snapshot
from shared.codec import Input, decode_input, decode_published
from shared.errors import CodecError, RecordingError
from shared.messages.cell_events import CellConfig, CellConfigured, FlushCache, PinPrefix, UnpinPrefix
from shared.messages.pools import KvGeometry, PoolHandle
from shared.messages.requests import SubmitRequest
from shared.messages.storage_events import HostPoolCreated, StorageJoined
from shared.messages.worker_events import BatchDone, FinishedToo, RequestFinished, WorkerJoined
from shared.messages.worker_plans import AdmitRequest, RestoreChunk, RunBatch, WorkerPlan
from thermocline.replay.recorded_prompts import RecordedPrompts


@dataclass(slots=True)
class RecordedRequest:
    """One request of the run. Times are the stream's; ``first_token_ns`` is 0 without a token."""

    submit: SubmitRequest
    at_ns: int
    output: bytes = b""
    finished_ns: int = 0
    first_token_ns: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    neighbour_tokens: int = 0
    disk_tokens: int = 0  # Those of the object store included, and those restored from hidden states.


@dataclass(slots=True)
class RecordedRun:
    """A recorded run. ``admin`` holds flushes, pins and changes of settings with their times."""

    config: CellConfig = field(default_factory=CellConfig)
    pool_geometry: KvGeometry | None = None  # None until a worker has joined.
    device_pages: dict[str, int] = field(default_factory=dict)  # By worker id, as of its last join.
    nodes: dict[str, str] = field(default_factory=dict)  # Worker id to node.
    host_pages: int = 0  # Per node.
    disk_bytes: int = 0  # Per node.
    max_context: int = 0
    requests: dict[str, RecordedRequest] = field(default_factory=dict)
    admin: list[tuple[int, Input]] = field(default_factory=list)
    batches: list[BatchDone] = field(default_factory=list)
    start_ns: int = 0
    unplayable: int = 0  # Requests without an end in the recording, or without a token.

    @property
    def geometry(self) -> KvGeometry:
        """Geometry of every pool. Raises RecordingError where no worker joined."""
        if self.pool_geometry is None:
            raise RecordingError("the recording holds no worker, so there is nothing to run under other settings")
        return self.pool_geometry

    @property
    def played(self) -> list[RecordedRequest]:
        """The requests with an answer, which another run can repeat, in order of arrival."""
        return [request for request in self.requests.values() if request.output]


def read_run(path: Path) -> RecordedRun:
    """Read a whole recording.

    Raises RecordingError when it is damaged or holds no run of a cell, PolicyMissing where its policy's code is absent.
    """
    run = RecordedRun()
    now_ns = 0
    prompts = RecordedPrompts()
    batch_chunks: dict[tuple[str, str, int], list[tuple[str, int]]] = {}
    prompt_ends: dict[str, int] = {}
    left_out = recorded_skips(path).decided
    for frame in read_frames(path):
        if isinstance(frame, Header):
            require_policies(frame)
        elif isinstance(frame, SnapshotFrame):
            _take_snapshot(run, prompts, frame.data)
        elif isinstance(frame, InputFrame):
            now_ns = frame.time_ns
            run.start_ns = run.start_ns or now_ns
            if frame.seq in left_out:
                continue
            try:
                message = decode_input(frame.data)
            except CodecError:
                continue  # The live cell skipped it too.
            _take_input(run, prompts, message, now_ns)
            if isinstance(message, BatchDone):
                key = (message.worker_id, message.incarnation, message.plan)
                for request_id, end in batch_chunks.pop(key, []):
                    if end == prompt_ends.get(request_id) and request_id not in message.failed:
                        _first_token(run, request_id, now_ns)
        elif isinstance(frame, OutputFrame):
            output = decode_published(frame.data)
            if isinstance(output, WorkerPlan) and isinstance(output.order, AdmitRequest):
                prompt_ends[output.order.request_id] = output.order.token_count
                _take_admission(run, output.order)
            elif isinstance(output, WorkerPlan) and isinstance(output.order, RunBatch):
                chunks = [(chunk.request_id, chunk.end) for chunk in output.order.chunks]
                batch_chunks[output.worker_id, output.incarnation, output.number] = chunks
                for restore in output.order.restores:
                    _take_restoration(run, restore)
    if run.pool_geometry is None or not run.device_pages:
        raise RecordingError(f"{path} holds no worker, so there is nothing to run under other settings")
    run.unplayable = sum(1 for request in run.requests.values() if not request.output)
    if not run.played:
        raise RecordingError(f"{path} holds no request that ran")
    return run


def _take_snapshot(run: RecordedRun, prompts: RecordedPrompts, data: bytes) -> None:
    """Take over the cell at the beginning of the recording, but for its cached KV."""
    state = load_state(decode_snapshot(data).state)
    prompts.begin(state)
    run.config, run.pool_geometry = state.config, state.geometry
    for worker in state.workers.values():
        run.device_pages[worker.worker_id], run.nodes[worker.worker_id] = worker.pool.total, worker.node
        run.max_context = worker.max_context
    for storage in state.storages.values():
        run.host_pages = storage.pool.total if storage.pool is not None else run.host_pages
        run.disk_bytes = storage.disk.budget_bytes


def _take_input(run: RecordedRun, prompts: RecordedPrompts, message: Input, now_ns: int) -> None:
    match message:
        case CellConfigured():
            if run.requests:
                run.admin.append((now_ns, message))
            else:
                run.config = message.config
        case FlushCache() | PinPrefix() | UnpinPrefix():
            run.admin.append((now_ns, message))
        case WorkerJoined():
            run.device_pages[message.worker_id], run.nodes[message.worker_id] = message.pool.pages, message.node
            run.pool_geometry, run.max_context = message.pool.geometry, message.max_context
        case StorageJoined():
            run.disk_bytes = message.disk_bytes
        case HostPoolCreated(handle=PoolHandle() as handle, form="kv"):  # Another form is of hidden states in transit.
            run.host_pages = handle.pages
        case SubmitRequest():
            whole = prompts.whole(message)
            if whole is not None:
                run.requests.setdefault(message.request_id, RecordedRequest(whole, now_ns))
        case RequestFinished():
            told: tuple[RequestFinished | FinishedToo, ...] = (message, *message.others)
            for ended in told:
                prompts.answered(ended.request_id, ended.output)
                request = run.requests.get(ended.request_id)
                if request is not None and not request.finished_ns:
                    request.output, request.finished_ns = ended.output, now_ns
        case BatchDone():
            run.batches.append(message)


def _take_admission(run: RecordedRun, order: AdmitRequest) -> None:
    request = run.requests.get(order.request_id)
    if request is not None and order.attempt == 1:
        request.device_tokens, request.host_tokens = order.device_tokens, order.host_tokens + order.lent_tokens
        request.neighbour_tokens = order.neighbour_tokens
        request.disk_tokens = order.disk_tokens + order.remote_tokens


def _take_restoration(run: RecordedRun, restore: RestoreChunk) -> None:
    request = run.requests.get(restore.request_id)
    if request is not None and restore.attempt == 1:
        request.disk_tokens += restore.end - restore.start


def _first_token(run: RecordedRun, request_id: str, now_ns: int) -> None:
    request = run.requests.get(request_id)
    if request is not None and not request.first_token_ns:
        request.first_token_ns = now_ns
