"""Prompt lookup on and off, over the worker's own executor: what it gains where answers copy, what it costs elsewhere.

An 88M-parameter Llama with random weights computes every step, prompt and answer. What it says is a text that is given:
the logits of each row are real, and the token that the text has there is put on top of them. So speed is that of the
model, and what is accepted is what these texts repeat. They are this repository's own, in a tokenizer of 16,384 tokens
that is trained on it:

- ``edit``: a module, and then the same with three names exchanged;
- ``quotes``: a page, and then every third of its sentences, each behind a sentence of another page;
- ``prose``: a page, and then another, which is not in the prompt;
- ``random``: tokens drawn at random.

``bundled`` is the bundled trained model instead, which goes on with one of its documents by itself, greedily.

Pairs of one run with proposals and one without, in alternating order; ratios are medians over pairs. Tokens a second
are those of the decode steps, wall time; ``cpu`` ratios are of processor time, which the load of a machine moves less.
Prompts are cached but for their last page. Tokens are compared in every pair. ``rows`` is what further rows of a
request cost in one step.

Usage: ``python -m bench.prompt_lookup --threads 2 --rounds 9`` (writes bench/results/prompt_lookup.json)
"""

from __future__ import annotations

import itertools
import random
import re
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bench import results_file
from bench.make_model import make_model
from services.worker.bootstrap import make_executor
from services.worker.detokenizer import Vocabulary
from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.engine.model_runner import ModelRunner
from services.worker.hidden_saving import HiddenSaving
from services.worker.identity import WorkerIdentity
from services.worker.inbox import Arrival, Inbox
from services.worker.kv.loads import Loads
from services.worker.kv.movers.batched import BatchedMover
from services.worker.reports import Report
from services.worker.restoring import Restoring
from services.worker.sparse_prefixes import SparsePrefixes
from shared.messages.base import pack_int32
from shared.messages.requests import SamplingParams
from shared.messages.worker_plans import AdmitRequest, PrefillChunk, RunBatch
from thermocline.documents.grammar import make_document

ROOT = Path(__file__).parents[1]
BUNDLED = ROOT / "models" / "thermocline-gqa"
PREFIX = "thermocline-prompt-lookup"
PAGE_SIZE, PAGES = 16, 2048
VOCAB_SIZE = 16_384
PROMPT, ANSWER = 1200, 160
"""Tokens at most. A longer answer says the same more precisely, and takes longer."""
LOOKUP = 8
ROWS = (1, 2, 3, 5, 9, 13, 16)
CONTEXTS = (200, 1500, 6000)
EDITED = "services/worker/bubble.py"
NAMES = {"transfer": "movement", "decode": "advance", "order": "command"}
PAGE, OTHER_PAGE = "docs/concepts/scheduling.md", "docs/concepts/tiers.md"


@dataclass(frozen=True)
class Workload:
    """Prompts and what is said to each; without ``answers`` the model says it."""

    name: str
    prompts: list[list[int]]
    answers: list[list[int]] | None


class Scripted:
    """A model that computes, and says what the requests' texts say. Requests are told apart by their first page."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.texts: dict[int, list[int]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    @torch.inference_mode()
    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, meta: ForwardMeta, last_rows: torch.Tensor
    ) -> torch.Tensor:
        logits = self._runner.forward(ids, positions, meta, last_rows)
        if self.texts:
            starts = np.cumsum([0, *(segment.rows for segment in meta.segments)])
            for number, row in enumerate(last_rows.tolist()):
                segment = meta.segments[int(np.searchsorted(starts, row, side="right")) - 1]
                text = self.texts[int(segment.pages[0])]
                logits[number, text[int(positions[row]) + 1]] = 1e4
        return logits


@dataclass(frozen=True)
class Run:
    """One run of some requests together; times in seconds."""

    tokens: list[list[int]]
    ttft_s: float
    decode_s: float
    decode_cpu_s: float
    steps: int
    proposed: int
    accepted: int


@contextmanager
def loaded(model: Path, threads: int) -> Iterator[ModelRunner]:
    runner = ModelRunner.load(
        model, dtype="bfloat16", device="cpu", page_size=PAGE_SIZE, device_kv_bytes=None, pages=PAGES,
        threads=threads, shm_prefix=PREFIX,
    )  # fmt: skip
    try:
        yield runner
    finally:
        runner.close()


def run(
    runner: ModelRunner,
    words: Vocabulary,
    workload: Workload,
    requests: int,
    lookup_tokens: int,
    *,
    is_cached: bool = False,
) -> Run:
    """Prefill so many of the workload's requests, and decode them together. ``is_cached``: the run before had the same
    requests, so that whole pages of their prompts are there.
    """
    scripted = Scripted(runner)
    pool = runner.pool
    inbox, reports = Inbox(), list[Report]()
    loads = Loads(
        runner.geometry, pool.pages, BatchedMover(pool), timeout_s=5, clock_ns=time.time_ns, submit=lambda work: work()
    )
    saving = HiddenSaving(pool, None, ring_bytes=2**20, shm_prefix=PREFIX, submit=lambda work: work())
    restoring = Restoring(
        cast("Any", runner), None, saving.pools, staging_bytes=2**20, timeout_s=5, clock_ns=time.time_ns
    )
    executor = make_executor(
        WorkerIdentity(worker_id="w", incarnation="i", node="n", model="m"), cast("Any", scripted), words, inbox,
        reports.append, loads=loads, saving=saving, sparse=SparsePrefixes(pool, None, time.time_ns),
        restoring=restoring, lease_low_tokens=2, lookup_tokens=lookup_tokens,
    )  # fmt: skip
    numbers = itertools.count(1)
    each = pool.pages // requests
    chunks = []
    for number, prompt in enumerate(workload.prompts[:requests]):
        count = ANSWER
        if workload.answers is not None:
            scripted.texts[number * each] = prompt + workload.answers[number]
            count = len(workload.answers[number])
        cached = (len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE if is_cached else 0
        params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
        admit = AdmitRequest(
            request_id=f"r{number}", attempt=1, gateway_id="g", tokens=pack_int32(prompt), prompt_tokens=len(prompt),
            sampling=params, pages=pack_int32(range(number * each, (number + 1) * each)),
            cached_tokens=cached, host_tokens=0, disk_tokens=0, received_ns=1, accepted_ns=2,
        )  # fmt: skip
        inbox.put(Arrival(next(numbers), admit, time.time_ns()))
        chunks.append(PrefillChunk(request_id=f"r{number}", attempt=1, start=cached, end=len(prompt)))
    inbox.put(Arrival(next(numbers), RunBatch(chunks=tuple(chunks), loads=()), time.time_ns()))
    begun = time.perf_counter()
    executor.run_one_step()
    first, first_cpu = time.perf_counter(), time.process_time()
    while executor.request_ids:
        executor.run_one_step()
    ended, ended_cpu = time.perf_counter(), time.process_time()
    said: dict[str, list[int]] = {f"r{number}": [] for number in range(requests)}
    for report in reports:
        for item in report.items.get("g", ()):
            said[item.request_id] += item.tokens
    for closed in (saving, loads, restoring):
        closed.close()
    return Run(
        tokens=list(said.values()), ttft_s=first - begun, decode_s=ended - first, decode_cpu_s=ended_cpu - first_cpu,
        steps=executor.counters.steps - 1, proposed=executor.counters.tokens_proposed,
        accepted=executor.counters.tokens_accepted,
    )  # fmt: skip


def compare(runner: ModelRunner, words: Vocabulary, workload: Workload, requests: int, rounds: int) -> dict[str, Any]:
    """Pairs of runs with and without proposals. Raises RuntimeError where their tokens differ."""
    run(runner, words, workload, requests, LOOKUP)
    pairs: list[tuple[Run, Run]] = []
    for round_ in range(rounds):
        found = {
            on: run(runner, words, workload, requests, LOOKUP if on else 0, is_cached=True)
            for on in (round_ % 2 == 0, round_ % 2 == 1)
        }
        if found[True].tokens != found[False].tokens:
            raise RuntimeError(f"{workload.name}: tokens differ")
        pairs.append((found[True], found[False]))
    on, _ = pairs[0]
    count = sum(map(len, on.tokens)) - requests
    speeds = [without.decode_s / with_.decode_s for with_, without in pairs]
    return {
        "workload": workload.name,
        "requests": requests,
        "rounds": rounds,
        "answer_tokens": count + requests,
        "steps": on.steps,
        "proposed": on.proposed,
        "accepted": on.accepted,
        "tokens_per_s": statistics.median(count / with_.decode_s for with_, _ in pairs),
        "tokens_per_s_without": statistics.median(count / without.decode_s for _, without in pairs),
        "speedup": statistics.median(speeds),
        "speedup_min_max": [min(speeds), max(speeds)],
        "cpu_speedup": statistics.median(without.decode_cpu_s / with_.decode_cpu_s for with_, without in pairs),
        "ttft_ms": statistics.median(with_.ttft_s for with_, _ in pairs) * 1e3,
        "ttft_ms_without": statistics.median(without.ttft_s for _, without in pairs) * 1e3,
    }


def row_costs(runner: ModelRunner, rounds: int) -> list[dict[str, Any]]:
    """What a step of so many rows of one request takes, each a segment, behind so many tokens."""
    found = []
    for context in CONTEXTS:
        pages: npt.NDArray[np.int32] = np.arange(-(-(context + max(ROWS)) // PAGE_SIZE), dtype=np.int32)
        times: dict[int, list[float]] = {rows: [] for rows in ROWS}
        for _ in range(rounds):
            for rows in ROWS:
                segments = [Segment(1, context + row, pages) for row in range(rows)]
                begun = time.perf_counter()
                meta = ForwardMeta.build(segments, PAGE_SIZE, "cpu")
                runner.forward(torch.full((rows,), 7), torch.arange(context, context + rows), meta, torch.arange(rows))
                times[rows].append(time.perf_counter() - begun)
        medians = {rows: statistics.median(each) * 1e3 for rows, each in times.items()}
        found.append({"context": context, "ms": {str(rows): ms for rows, ms in medians.items()}})
    return found


def _train(texts: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _read(*patterns: str) -> list[str]:
    return [path.read_text("utf-8") for pattern in patterns for path in sorted(ROOT.glob(pattern))]


def workloads(requests: int) -> list[Workload]:
    """Of each kind as many prompts and answers as there may be requests, which begin at different places."""
    tokenizer = _train(_read("services/**/*.py", "docs/**/*.md"))

    def ids(text: str) -> list[int]:
        encoded: list[int] = tokenizer.encode(text).ids
        return encoded

    code = (ROOT / EDITED).read_text("utf-8")
    edited = re.sub(r"\b(" + "|".join(NAMES) + r")\b", lambda match: NAMES[match[1]], code)
    page, other = ((ROOT / path).read_text("utf-8") for path in (PAGE, OTHER_PAGE))
    quoted, glue = (re.split(r"(?<=[.:])\s+", text) for text in (page, other))
    quotes = " ".join(f"{ours} {theirs}" for ours, theirs in zip(glue, quoted[::3], strict=False))
    rng = np.random.default_rng(0)

    def cut(name: str, prompt: list[int], answer: list[int]) -> Workload:
        starts = [number * 40 for number in range(requests)]
        prompts = [(prompt * 2)[start : start + PROMPT] for start in starts]
        return Workload(name, prompts, [answer[start : start + ANSWER] for start in starts])

    drawn: list[list[int]] = rng.integers(3, VOCAB_SIZE, (2, PROMPT + 40 * requests)).tolist()
    return [
        cut("edit", ids(code), ids(edited)),
        cut("quotes", ids(page), ids(quotes)),
        cut("prose", ids(page), ids(other)),
        cut("random", drawn[0], drawn[1]),
    ]


def bundled(words: Any, requests: int) -> Workload:
    """Documents that the bundled model goes on with by itself."""
    documents = [make_document(random.Random(number), 600, cast("Any", words))[0] for number in range(requests)]
    return Workload("bundled", [words.encode(document).ids for document in documents], None)


def main() -> None:
    """Write ``bench/results/prompt_lookup.json``."""
    parser = results_file.arguments(__doc__, "--out")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--only", nargs="*", default=[], help="names of workloads")
    options = parser.parse_args()
    cases: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []

    def measure(runner: ModelRunner, words: Vocabulary, workload: Workload) -> None:
        if options.only and workload.name not in options.only:
            return
        for requests in options.requests:
            cases.append(compare(runner, words, workload, requests, options.rounds))
            print(cases[-1], flush=True)

    with tempfile.TemporaryDirectory() as folder, loaded(make_model(Path(folder)), options.threads) as runner:
        if not options.only:
            rows = row_costs(runner, options.rounds)
            print(rows, flush=True)
        for workload in workloads(max(options.requests)):
            measure(runner, Vocabulary.from_directory(Path(folder)), workload)
    with loaded(BUNDLED, options.threads) as runner:
        words = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
        measure(runner, Vocabulary.from_directory(BUNDLED), bundled(words, max(options.requests)))
    results = {
        "threads": options.threads, "dtype": "bfloat16", "lookup_tokens": LOOKUP, "prompt_tokens": PROMPT,
        "rows": rows, "cases": cases,
    }  # fmt: skip
    print(results_file.write("prompt_lookup", results, seed=0, out=options.out))


if __name__ == "__main__":
    main()
