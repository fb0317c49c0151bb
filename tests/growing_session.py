"""A growing session, folded turn by turn: what each turn costs, in bytecodes.

One session sends everything again each turn, with so many new tokens behind it, to a cell of one worker and one
storage that do at once what they are told. Inputs come as a gateway and a worker send them: a prompt as a base and a
tail, in compact form. Bytecodes do not depend on the machine's load, so tests can compare turns by them; what C does
within one bytecode, such as copying a prompt, does not show.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from msgspec import structs

import services.scheduler.policies  # noqa: F401  The default policy and schedule are among them.
from services.gateway.prompt_bases import PromptBases
from services.scheduler.core import CellState, Output, Stamped, new_state, step
from shared.codec import Input, decode_input, encode
from shared.compact_messages import compact_request
from shared.messages.base import pack_int32
from shared.messages.cell_events import CellConfig, CellConfigured
from shared.messages.pools import KvGeometry, PoolHandle
from shared.messages.requests import SamplingParams, SubmitRequest
from shared.messages.storage_events import BackupDone, ChunksSaved, HostPoolCreated, StorageJoined
from shared.messages.storage_plans import BackupPages, CreateHostPool, SaveChunks, SaveTokens, StoragePlan
from shared.messages.worker_events import BatchDone, RequestFinished, WorkerJoined
from shared.messages.worker_plans import RunBatch, WorkerPlan
from shared.prompt_chain import block_digests

NAMESPACE = "0" * 32
PAGE = 16
ANSWER_TOKENS = 64
VOCABULARY = 16_384
STEP_NS = 50_000_000
DISK_BYTES = 2**34
KEPT_TOKENS = 1_048_576
"""As a worker says that it keeps."""

Measured = Callable[[Callable[[], None]], None]
"""Calls the fold of one input, and measures it."""


def unmeasured(call: Callable[[], None]) -> None:
    """Call it."""
    call()


def bytecodes(call: Callable[[], Any]) -> int:
    """How many bytecodes a call executes in Python functions."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that runs, the digests of its prompt's blocks, and that prompt."""

    request: SubmitRequest
    digests: bytes
    prompt: list[int]


class GrowingSession:
    """A fold, the session's tokens so far, and the gateway's knowledge of what the scheduler holds.

    ``outputs`` are those of the last turn. Others may be asked and answered meanwhile.
    """

    def __init__(self, *, pages: int, host_pages: int = 2_000, disk_bytes: int = 0, seed: int = 1) -> None:
        self.state: CellState = new_state()
        self.tokens: list[int] = []
        self.outputs: list[Output] = []
        self._bases = PromptBases()
        self._rng = random.Random(seed)
        self._turns, self._host_pages = 0, host_pages
        geometry = KvGeometry(layers=2, kv_heads=1, head_dim=64, page_size=PAGE, dtype="bfloat16")
        self._fold_all(CellConfigured(config=CellConfig()))
        joined = StorageJoined(storage_id="s", incarnation="1", node="n", host_bytes=2**29, takes_compact=True)
        self._fold_all(structs.replace(joined, disk_bytes=disk_bytes))
        pool = PoolHandle(kind="shm", layout="layer_first", name="pool", nbytes=0, pages=pages, geometry=geometry)
        self._fold_all(
            WorkerJoined(
                worker_id="w",
                incarnation="1",
                node="n",
                model="m",
                pool=pool,
                max_context=pages * PAGE,
                kept_tokens=KEPT_TOKENS,
                takes_compact=True,
            )
        )

    def turn(self, new_tokens: int, measured: Measured = unmeasured) -> None:
        """Ask with so many new tokens, and be answered. ``measured`` calls the fold of each input."""
        self.outputs = []
        self.tokens = self.answer(self.ask(self.tokens, new_tokens, measured), measured)

    def ask(self, tokens: list[int], new_tokens: int, measured: Measured = unmeasured) -> Asked:
        """Ask with these tokens and so many new ones behind them."""
        self._turns += 1
        prompt = [*tokens, *self._draw(new_tokens)]
        request = SubmitRequest(
            request_id=f"turn-{self._turns}",
            gateway_id="gateway",
            namespace=NAMESPACE,
            prompt=pack_int32(prompt),
            sampling=SamplingParams(max_tokens=ANSWER_TOKENS),
        )
        digests = block_digests(NAMESPACE, request.prompt)
        self._fold_all(compact_request(self._bases.abridged(request, digests)), measured)
        return Asked(request, digests, prompt)

    def answer(self, asked: Asked, measured: Measured = unmeasured) -> list[int]:
        """Answer what was asked; returns the prompt with the answer behind it."""
        answer = self._draw(ANSWER_TOKENS)
        finished = RequestFinished(
            worker_id="w",
            incarnation="1",
            request_id=asked.request.request_id,
            attempt=1,
            reason="length",
            output=pack_int32(answer),
        )
        self._fold_all(finished, measured)
        self._bases.answered(asked.request, asked.digests, answer)
        return asked.prompt + answer

    def _draw(self, count: int) -> list[int]:
        return [self._rng.randrange(VOCABULARY) for _ in range(count)]

    def _fold_all(self, message: Input, measured: Measured = unmeasured) -> None:
        """Fold an input, and what worker and storage answer to it."""
        seq = self.state.last_seq + 1
        stamped = Stamped(seq, seq * STEP_NS, decode_input(encode(message)))
        outputs: list[Output] = []
        measured(lambda: outputs.extend(step(self.state, stamped)))
        self.outputs += outputs
        for output in outputs:
            for answer in self._answers(output):
                self._fold_all(answer, measured)

    def _answers(self, output: Output) -> Iterator[Input]:
        if isinstance(output, WorkerPlan) and isinstance(output.order, RunBatch):
            tokens = sum(chunk.end - chunk.start for chunk in output.order.chunks)
            yield BatchDone(
                worker_id="w", incarnation="1", plan=output.number, computed_tokens=tokens, compute_us=10 * tokens
            )
        elif isinstance(output, StoragePlan) and isinstance(output.order, CreateHostPool):
            pool = PoolHandle(
                kind="shm",
                layout="page_first",
                name="host",
                nbytes=0,
                pages=self._host_pages,
                geometry=output.order.geometry,
            )
            yield HostPoolCreated(storage_id="s", incarnation="1", handle=pool)
        elif isinstance(output, StoragePlan) and isinstance(output.order, BackupPages):
            yield BackupDone(storage_id="s", incarnation="1", transfer_id=output.order.transfer_id, ok=True)
        elif isinstance(output, StoragePlan) and isinstance(output.order, SaveChunks | SaveTokens):
            yield ChunksSaved(storage_id="s", incarnation="1", save_id=output.order.save_id, is_all=True)
