"""What the host does between two decode steps on a GPU, measured without one, over a model that takes no time.

Executor, tables, batch of a captured step, choice of tokens, answers and reports are the worker's own. The pool lies on
``meta``, so tables are made and sent as for a GPU, and the copies themselves take nothing; logits are those of a tiny
vocabulary on the host, so that choosing greedy tokens is negligible. Not in it: launches by the driver, the kernels
that choose tokens and the wait for them, and the event loop, which encodes and sends what is reported on another thread
of the same interpreter. Processor time of this thread, so a loaded machine does not count.

In the ordinary order a step is cut where a GPU would begin and end to work:

- ``before_us``: from the tokens of the last step to the launch of this one. The GPU waits.
- ``beside_us``: from the launch to where the tokens are asked for. The GPU computes.

Where steps are launched ahead of their tokens:

- ``ahead_us``: from tokens to tokens. The GPU computes, and waits only where this is longer than a step.

Usage: ``python -m bench.step_host`` (writes bench/results/step_host.json)
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch

from bench import results_file
from services.worker import compute
from services.worker.bootstrap import make_executor
from services.worker.detokenizer import Vocabulary
from services.worker.engine.forward_meta import ForwardMeta
from services.worker.engine.model_runner import NOTHING_TO_PROVE
from services.worker.engine.sample_row import Sampled, SampleRow
from services.worker.engine.sampler import choose_unread, sample
from services.worker.engine.states.running import NoSlots
from services.worker.engine.static_batch import StaticBatch
from services.worker.engine.unread_tokens import Following, UnreadTokens
from services.worker.hidden_saving import HiddenSaving
from services.worker.identity import WorkerIdentity
from services.worker.inbox import Arrival, Inbox
from services.worker.kv.device_pool import DevicePool
from services.worker.kv.loads import Loads
from services.worker.kv.movers.batched import BatchedMover
from services.worker.reports import Report
from services.worker.restoring import Restoring
from services.worker.sparse_prefixes import SparsePrefixes
from shared.messages.base import pack_int32
from shared.messages.pools import KvGeometry
from shared.messages.requests import SamplingParams
from shared.messages.worker_plans import AdmitRequest, PrefillChunk, RunBatch

MODEL = Path(__file__).parents[1] / "models" / "thermocline-gqa"
"""The tokenizer is its."""

GEOMETRY = KvGeometry(layers=1, kv_heads=1, head_dim=2, page_size=16, dtype="bfloat16")
REQUESTS = (1, 64)
CONTEXT, STEPS, WARM_UP = 1024, 300, 50
ANSWER = STEPS + max(REQUESTS) + 1
"""Tokens: requests are admitted one step after another, and the first ones decode meanwhile."""
VOCAB_SIZE = 64
PREFIX = "thermocline-step-host"


class NoModel:
    """Satisfies ``compute.Runner``: fills the batch of a captured step and says the same token to everybody.

    ``launched_ns`` and ``asked_ns`` have a time for each step: when a graph would be launched, and when its tokens are
    asked for.
    """

    max_context = CONTEXT + ANSWER
    vocab_size = VOCAB_SIZE
    eos_token_ids = ()
    proofs = NOTHING_TO_PROVE
    state_slots = NoSlots()
    lookup_obstacle = ""
    mixes_adapters = True

    def __init__(self, requests: int, *, is_ahead: bool = False) -> None:
        self.launcher = self if is_ahead else None
        pages = -(-self.max_context // GEOMETRY.page_size)
        self.geometry = GEOMETRY
        storage = torch.empty(requests * pages * GEOMETRY.page_bytes, dtype=torch.uint8, device="meta")
        self.pool = DevicePool(GEOMETRY, requests * pages, storage)
        self.attention = None
        self.launched_ns: list[int] = []
        self.asked_ns: list[int] = []
        self._batch = StaticBatch(requests, pages, VOCAB_SIZE, self.pool.device)
        self._logits = torch.zeros((requests, VOCAB_SIZE))
        self._logits[:, 40] = 1.0

    @torch.inference_mode()
    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, meta: ForwardMeta, last_rows: torch.Tensor
    ) -> torch.Tensor:
        """The host's part of a captured step; of chunks nothing."""
        if len(meta.segments) == meta.rows:
            self._batch.fill(ids, positions, meta, meta.rows)
            self.launched_ns.append(time.thread_time_ns())
        return self._logits[: len(last_rows)]

    @torch.inference_mode()
    def launch(
        self, ids: torch.Tensor | Following, positions: torch.Tensor, meta: ForwardMeta, rows: Sequence[SampleRow]
    ) -> UnreadTokens:
        """The host's part of a captured step whose tokens nobody waits for."""
        given = ids.ids() if isinstance(ids, Following) else ids
        chosen = choose_unread(self.forward(given, positions, meta, torch.arange(len(rows))), rows)
        return UnreadTokens(chosen, chosen, _Asked(self.asked_ns))

    def ask(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
        """As ``sample``, which is where the host waits for the device."""
        self.asked_ns.append(time.thread_time_ns())
        return sample(logits, rows)

    def settle(self) -> None:
        """There is nothing to wait for."""


class _Asked:
    """An event that has passed, and notes when it was waited for."""

    def __init__(self, asked_ns: list[int]) -> None:
        self._asked_ns = asked_ns

    def synchronize(self) -> None:
        self._asked_ns.append(time.thread_time_ns())


def measure(requests: int) -> dict[str, Any]:
    """Medians of one step of so many requests behind ``CONTEXT`` tokens, in microseconds."""
    ordinary, ahead = NoModel(requests), NoModel(requests, is_ahead=True)
    for runner in (ordinary, ahead):
        _decode(runner, requests)
    launched, asked = ordinary.launched_ns, ordinary.asked_ns
    before = [launch - ask for launch, ask in zip(launched[1:], asked, strict=False)]
    beside = [ask - launch for launch, ask in zip(launched, asked, strict=True)]
    whole = [later - ask for ask, later in itertools.pairwise(ahead.asked_ns)]
    return {
        "requests": requests,
        "before_us": statistics.median(before) / 1e3,
        "beside_us": statistics.median(beside) / 1e3,
        "ahead_us": statistics.median(whole) / 1e3,
    }


def _decode(runner: NoModel, requests: int) -> None:
    """Run the worker's executor over a runner, which has the times of the steps behind the first ones then."""
    inbox, reports = Inbox(), list[Report]()
    pool = runner.pool
    loads = Loads(
        GEOMETRY,
        pool.pages,
        BatchedMover(pool, native=False),
        timeout_s=5,
        clock_ns=time.time_ns,
        submit=lambda work: work(),
    )
    saving = HiddenSaving(pool, None, ring_bytes=2**20, shm_prefix=PREFIX, submit=lambda work: work())
    restoring = Restoring(
        cast("Any", runner), None, saving.pools, staging_bytes=2**20, timeout_s=5, clock_ns=time.time_ns
    )
    executor = make_executor(
        WorkerIdentity(worker_id="w", incarnation="i", node="n", model="m"), cast("Any", runner),
        Vocabulary.from_directory(MODEL), inbox, reports.append, loads=loads, saving=saving,
        sparse=SparsePrefixes(pool, None, time.time_ns), restoring=restoring, lease_low_tokens=2,
    )  # fmt: skip
    each = pool.pages // requests
    params = SamplingParams(max_tokens=ANSWER, temperature=0)
    numbers = itertools.count(1)
    with patch.object(compute, "sample", runner.ask):
        for request in range(requests):
            name = f"r{request}"
            admit = AdmitRequest(
                request_id=name, attempt=1, gateway_id="g", tokens=pack_int32([7] * CONTEXT), prompt_tokens=CONTEXT,
                sampling=params, pages=pack_int32(range(request * each, (request + 1) * each)),
                cached_tokens=0, host_tokens=0, disk_tokens=0, received_ns=1, accepted_ns=2,
            )  # fmt: skip
            batch = RunBatch(chunks=(PrefillChunk(request_id=name, attempt=1, start=0, end=CONTEXT),), loads=())
            for order in (admit, batch):
                inbox.put(Arrival(next(numbers), order, time.time_ns()))
            executor.run_one_step()
        runner.launched_ns.clear()
        runner.asked_ns.clear()
        for _ in range(STEPS):
            executor.run_one_step()
    launched, asked = len(runner.launched_ns), len(runner.asked_ns)
    # A step that is launched ahead is asked for one step later.
    if asked != STEPS or launched != STEPS + (runner.launcher is not None):
        raise RuntimeError(f"{launched} launches and {asked} reads of {STEPS} steps")
    del runner.launched_ns[:WARM_UP], runner.asked_ns[:WARM_UP]


def main() -> None:
    """Write ``bench/results/step_host.json``."""
    parser = results_file.arguments(__doc__, "--out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    points = [measure(requests) for requests in REQUESTS]
    for point in points:
        print(point)
    results = {"context": CONTEXT, "steps": STEPS - WARM_UP, "points": points}
    print(results_file.write("step_host", results, seed=0, out=options.out))


if __name__ == "__main__":
    main()
