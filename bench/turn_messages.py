"""What a turn of a long session costs the stream and the scheduler, told whole and by reference.

    python -m bench.turn_messages [--repeats 31] [--save]

A fold of one worker has answered a session; the next turn has 200 new tokens. Its submission is decoded and folded,
from the same snapshot each time, in processor time of this thread. Told whole, its blocks are hashed as well, which the
fold did not do before there were references: that time is told on its own.
"""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

import services.scheduler.policies  # noqa: F401  The default policy and schedule are among them.
from bench import results_file
from bench.core_times import Times
from services.gateway.prompt_bases import PromptBases
from services.scheduler.core import CellState, Stamped, decode_state, encode_state, new_state, step
from shared.codec import decode_input, encode
from shared.messages.base import pack_int32
from shared.messages.cell_events import CellConfig, CellConfigured
from shared.messages.pools import KvGeometry, PoolHandle
from shared.messages.requests import SamplingParams, SubmitRequest
from shared.messages.worker_events import BatchDone, RequestFinished, WorkerJoined
from shared.messages.worker_plans import RunBatch, WorkerPlan
from shared.prompt_chain import block_digests

LENGTHS = (14_730, 59_036, 130_126)
PAGE = 16
NEW = 200
ANSWER = [7, 8, 9]
NAMESPACE = "0" * 32


def submission(name: str, tokens: list[int]) -> SubmitRequest:
    """A request with its whole prompt."""
    sampling = SamplingParams(max_tokens=len(ANSWER))
    return SubmitRequest(
        request_id=name, gateway_id="gateway", namespace=NAMESPACE, prompt=pack_int32(tokens), sampling=sampling
    )


class Scheduler:
    """A fold, and a worker that does at once what it is told."""

    def __init__(self, pages: int) -> None:
        self.state: CellState = new_state()
        geometry = KvGeometry(layers=1, kv_heads=1, head_dim=8, page_size=PAGE, dtype="float32")
        pool = PoolHandle(kind="shm", layout="layer_first", name="pool", nbytes=0, pages=pages, geometry=geometry)
        self.feed(CellConfigured(config=CellConfig()))
        self.feed(
            WorkerJoined(worker_id="w", incarnation="1", node="n", model="m", pool=pool, max_context=pages * PAGE)
        )

    def feed(self, message: Any) -> None:
        """Fold an input, and report every batch that it leads to as done."""
        seq = self.state.last_seq + 1
        for output in step(self.state, Stamped(seq, seq * 1_000_000, message)):
            if isinstance(output, WorkerPlan) and isinstance(output.order, RunBatch):
                tokens = sum(chunk.end - chunk.start for chunk in output.order.chunks)
                done = BatchDone(
                    worker_id="w", incarnation="1", plan=output.number, computed_tokens=tokens, compute_us=tokens
                )
                self.feed(done)

    def answer(self, request: SubmitRequest) -> None:
        """Serve a request to its end."""
        self.feed(request)
        finished = RequestFinished(
            worker_id="w",
            incarnation="1",
            request_id=request.request_id,
            attempt=1,
            reason="length",
            output=pack_int32(ANSWER),
        )
        self.feed(finished)


def measure(length: int, repeats: int) -> dict[str, Any]:
    """Bytes and medians for a session of so many tokens."""
    scheduler, bases = Scheduler(pages=length // PAGE + 1_000), PromptBases()
    tokens = [number % 50_000 for number in range(length)]
    first = submission("first", tokens)
    scheduler.answer(first)
    bases.answered(first, block_digests(NAMESPACE, first.prompt), ANSWER)
    snapshot = encode_state(scheduler.state)

    whole = submission("turn", [*tokens, *ANSWER, *range(NEW)])
    hashing, referring = Times(), Times()
    for _ in range(repeats):
        digests = hashing.take(lambda: block_digests(NAMESPACE, whole.prompt))
        referred = referring.take(lambda: bases.abridged(whole, digests))  # noqa: B023  It is called at once.
    assert referred.base is not None
    row: dict[str, Any] = {
        "tokens": length,
        "hash_ms": hashing.summary()["cpu_p50_ms"],
        "refer_ms": referring.summary()["cpu_p50_ms"],
        "snapshot_bytes": len(snapshot),
        "table_bytes": len(msgspec.msgpack.encode(scheduler.state.blocks)),
    }
    for way, message in (("whole", whole), ("referred", referred)):
        data, decoding, folding = encode(message), Times(), Times()
        for _ in range(repeats):
            state = decode_state(snapshot)
            decoded = decoding.take(lambda: decode_input(data))  # noqa: B023  It is called at once.
            stamped = Stamped(state.last_seq + 1, state.now_ns + 1_000_000, decoded)
            folding.take(lambda: step(state, stamped))  # noqa: B023
            assert state.requests["turn"].submit == whole
        row[way] = {
            "bytes": len(data),
            "decode_ms": decoding.summary()["cpu_p50_ms"],
            "fold_ms": folding.summary()["cpu_p50_ms"],
        }
    return row


def main() -> None:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(prog="python -m bench.turn_messages", description=__doc__)
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--save", action="store_true", help="write bench/results/turn_messages.json")
    asked = parser.parse_args()
    rows = [measure(length, asked.repeats) for length in LENGTHS]
    for row in rows:
        print(row)
    if asked.save:
        results_file.write("turn_messages", {"new_tokens": NEW, "rows": rows}, seed=0)


if __name__ == "__main__":
    main()
