"""A cell driven by a script: the real core, answered by a worker that does what it is told at once.

Everything is a function of the script, so the inputs that come out can be recorded, stored in a stream, replayed,
or tampered with.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec

from services.scheduler import core
from services.scheduler.fold import Fold
from services.scheduler.recording import Header
from shared.bus.protocol import StreamMessage
from shared.codec import Input, Published, encode
from shared.ids import namespace_digest
from shared.kept_texts import KeptTexts
from shared.messages.base import pack_int32
from shared.messages.cell_events import CellConfig, CellConfigured, SchedulerStarted
from shared.messages.pools import KvGeometry, PoolHandle
from shared.messages.requests import CancelRequest, SamplingParams, SubmitRequest
from shared.messages.worker_events import BatchDone, RequestFinished, WorkerJoined
from shared.messages.worker_plans import AbortRequest, AdmitRequest, PreemptRequest, RunBatch, WorkerPlan
from tests.recording_files import writing

GEOMETRY = KvGeometry(layers=2, kv_heads=2, head_dim=8, page_size=16, dtype="float32")
START_NS = 1_700_000_000 * 10**9
STEP_NS = 1_000_000


def worker_joined(worker_id: str = "w1", incarnation: str = "one", pages: int = 64) -> WorkerJoined:
    """A worker with a device pool of its own."""
    handle = PoolHandle(
        kind="shm",
        layout="layer_first",
        name=f"test.{worker_id}",
        nbytes=pages * GEOMETRY.page_bytes,
        pages=pages,
        geometry=GEOMETRY,
    )
    return WorkerJoined(
        worker_id=worker_id, incarnation=incarnation, node="node", model="model", pool=handle, max_context=512
    )


def submit(request_id: str, prompt: list[int], max_tokens: int = 8) -> SubmitRequest:
    """A greedy request of gateway ``gw``."""
    return SubmitRequest(
        request_id=request_id,
        gateway_id="gw",
        namespace=namespace_digest("model"),
        prompt=pack_int32(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
    )


class ScriptedCell:
    """Folds inputs, and lets the worker's answers be the next inputs. Keeps both sides of the conversation."""

    def __init__(self) -> None:
        self.fold = Fold(core.new_state())
        self.messages: list[StreamMessage] = []
        self.outputs: list[list[Published]] = []
        self._admitted: dict[str, AdmitRequest] = {}
        self._texts: dict[tuple[str, str], KeptTexts] = {}  # By worker and incarnation.

    def put(self, message: Input) -> None:
        """Fold one input and everything that the worker answers to its outputs."""
        waiting = [message]
        while waiting:
            published = self._fold(encode(waiting.pop(0)))
            for output in published:
                if isinstance(output, WorkerPlan):
                    waiting += self._answers(output)

    def put_raw(self, data: bytes) -> None:
        """Put bytes into the stream that may be no input."""
        self._fold(data)

    def _fold(self, data: bytes) -> list[Published]:
        seq = len(self.messages) + 1
        message = StreamMessage(seq, START_NS + seq * STEP_NS, "tc.in.cell", data)
        published = self.fold.apply(message).published
        self.messages.append(message)
        self.outputs.append(published)
        core.check_invariants(self.fold.state)
        return published

    def _answers(self, plan: WorkerPlan) -> list[Input]:
        order = plan.order
        place: dict[str, Any] = {"worker_id": plan.worker_id, "incarnation": plan.incarnation}
        if isinstance(order, AdmitRequest):
            whole = self._texts.setdefault((plan.worker_id, plan.incarnation), KeptTexts()).take(order)
            assert whole is not None, "an admission refers to a text that is not kept"
            self._admitted[order.request_id] = whole
        elif isinstance(order, AbortRequest):
            self._admitted.pop(order.request_id, None)
            return [
                RequestFinished(
                    **place, request_id=order.request_id, attempt=order.attempt, reason="cancelled", output=b""
                )
            ]
        elif isinstance(order, PreemptRequest):
            raise AssertionError("the script never needs more pages than there are")
        elif isinstance(order, RunBatch):
            answers: list[Input] = [BatchDone(**place, plan=plan.number)]
            for chunk in order.chunks:
                admitted = self._admitted[chunk.request_id]
                if chunk.end == len(admitted.tokens) // 4:
                    del self._admitted[chunk.request_id]
                    output = pack_int32(range(admitted.sampling.max_tokens))
                    answers.append(
                        RequestFinished(
                            **place,
                            request_id=chunk.request_id,
                            attempt=chunk.attempt,
                            reason="length",
                            output=output,
                        )
                    )
            return answers
        return []


def scripted_cell(requests: int = 30, *, pages: int = 64, seed: int = 7) -> ScriptedCell:
    """A small cell's day: it starts, a worker joins, prompts with shared prefixes come, one is cancelled."""
    chance = random.Random(seed)
    cell = ScriptedCell()
    cell.put(SchedulerStarted(scheduler_id="scripted", epoch=1))
    cell.put(CellConfigured(config=CellConfig(max_batch_tokens=128)))
    cell.put(worker_joined(pages=pages))
    prefixes = [[chance.randrange(1000) for _ in range(48)] for _ in range(3)]
    for number in range(requests):
        tail = [chance.randrange(1000) for _ in range(chance.randrange(1, 80))]
        cell.put(submit(f"request-{number}", chance.choice(prefixes) + tail))
        if number == requests // 2:
            cell.put(CancelRequest(request_id=f"request-{number}", gateway_id="gw"))
            cell.put_raw(b"\xc1 not an input")
    return cell


def write_recording(cell: ScriptedCell, path: Path, *, replaced: dict[int, Input] | None = None) -> None:
    """Record a scripted cell; ``replaced`` puts other inputs at some sequences, outputs stay as they were."""
    with writing(path, Header(first_seq=1, complete_to_seq=len(cell.messages))) as writer:
        for message, published in zip(cell.messages, cell.outputs, strict=True):
            if replaced and message.seq in replaced:
                message = StreamMessage(message.seq, message.time_ns, message.subject, encode(replaced[message.seq]))
            writer.write_input(message)
            for output in published:
                writer.write_output(encode(output))


def with_changed_token(message: SubmitRequest) -> SubmitRequest:
    """The same request with another first token."""
    first = int.from_bytes(message.prompt[:4], "little")
    return msgspec.structs.replace(message, prompt=pack_int32([first + 1]) + message.prompt[4:])
