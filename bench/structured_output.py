"""What a grammar costs: decode steps of eight requests that keep to a JSON schema, beside steps of eight that do not.

    python -m bench.structured_output [--rounds 12] [--steps 64] [--threads 2] [--model DIR] [--save]

Both run through the worker's own executor on the random 88M-parameter Llama of :mod:`bench.make_model`, with a
tokenizer of as many tokens as it has logits, trained on this repository's text. A round is free, held, held, free: each
turn admits eight requests, computes their prompts and then decodes; its figure is the median step. A round's ratio is
that of the means of its turns, the median of the rounds counts, and its 95 % interval is drawn from the rounds by
resampling. ``decode_speed_under_a_json_schema_over_without`` is the free step over the held one. ``cpu`` is the same of
the process's CPU time, which does not depend on who else had the cores.

``masks`` are times of single calls, in one thread and on the answers of the last held turn: the mask of a token, taking
a token in, compiling the schema, and following an answer again from its beginning, as resumption does.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import get_version
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from bench import results_file
from bench.make_model import save_llama
from bench.resampling import median_interval
from services.worker.bootstrap import make_executor
from services.worker.detokenizer import Vocabulary
from services.worker.engine.model_runner import ModelRunner
from services.worker.hidden_saving import HiddenSaving
from services.worker.identity import WorkerIdentity
from services.worker.inbox import Arrival, Inbox
from services.worker.kv.loads import Loads
from services.worker.kv.movers.batched import BatchedMover
from services.worker.reports import Report
from services.worker.restoring import Restoring
from services.worker.sparse_prefixes import SparsePrefixes
from shared.grammars import compile_grammar, token_table
from shared.messages.base import pack_int32, unpack_int32
from shared.messages.requests import Grammar, SamplingParams
from shared.messages.worker_events import RequestPreempted
from shared.messages.worker_plans import AdmitRequest, PreemptRequest, PrefillChunk, RunBatch, WorkerOrder

ROOT = Path(__file__).parents[1]
BATCH = 8
PROMPT_TOKENS = 128
PAGE_SIZE = 16
SEED = 1
EOS = 2
TARGET = 0.95
FOLLOWED = (1_000, 4_000)
PERSON = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 1, "maximum": 99_999},
        "name": {"type": "string", "minLength": 4, "maxLength": 24},
        "kind": {"enum": ["person", "place", "thing"]},
        "born": {"type": "string", "format": "date"},
        "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
        "parent": {"anyOf": [{"$ref": "#/$defs/person"}, {"type": "null"}]},
    },
    "required": ["id", "name", "kind", "born", "code", "tags", "parent"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": {"$ref": "#/$defs/person"}, "minItems": 1000, "$defs": {"person": PERSON}}


def train_tokenizer(vocab_size: int, special: Sequence[str] = ("<pad>", "<s>", "</s>")) -> Tokenizer:
    """A byte-level BPE tokenizer of ``vocab_size`` tokens, trained on the repository's own text.

    ``special`` tokens come first, numbered from 0.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(name, special=True) for name in special],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    files = sorted(
        str(file) for kind in ("py", "md") for file in ROOT.rglob(f"[!.]*.{kind}") if ".venv" not in str(file)
    )
    tokenizer.train(files, trainer)
    return tokenizer


class Bench:
    """A worker's executor on one model, driven by hand."""

    def __init__(self, model_dir: Path, tokenizer: Tokenizer, threads: int, steps: int) -> None:
        self.steps = steps
        self._pages = -(-(PROMPT_TOKENS + steps + 2) // PAGE_SIZE)
        self.runner = ModelRunner.load(
            model_dir, dtype="bfloat16", device="cpu", page_size=PAGE_SIZE, device_kv_bytes=None,
            pages=BATCH * self._pages, threads=threads, shm_prefix="bench", forward="fused",
        )  # fmt: skip
        pool, clock = self.runner.pool, time.time_ns
        self._reports: list[Report] = []
        self._loads = Loads(self.runner.geometry, pool.pages, BatchedMover(pool), timeout_s=5, clock_ns=clock)
        self._saving = HiddenSaving(pool, None, ring_bytes=2**20, shm_prefix="bench")
        self._executor = make_executor(
            WorkerIdentity(worker_id="w", incarnation="i", node="n", model="m"),
            self.runner,
            Vocabulary(tokenizer),
            Inbox(),
            self._reports.append,
            loads=self._loads,
            saving=self._saving,
            sparse=SparsePrefixes(pool, None, clock),
            restoring=Restoring(
                self.runner, None, self._saving.pools, staging_bytes=2**20, timeout_s=5, clock_ns=clock
            ),
            lease_low_tokens=2,
        )
        self._turns = 0

    def close(self) -> None:
        self._saving.close()
        self._loads.close()
        self.runner.close()

    def turn(self, grammar: Grammar | None, seed: int) -> tuple[float, float, list[list[int]]]:
        """Median wall time and CPU time of a decode step, seconds, and the answers."""
        self._turns += 1
        rng, names = random.Random(seed), [f"{self._turns}-{row}" for row in range(BATCH)]
        for row, name in enumerate(names):
            params = SamplingParams(max_tokens=10_000, ignore_eos=grammar is None, seed=seed + row, grammar=grammar)
            self._admit(name, [rng.randrange(3, self.runner.vocab_size) for _ in range(PROMPT_TOKENS)], row, params)
        decoding = 0
        while decoding < 2:  # The first step after the prompts warms up.
            decoding += self._executor.run_one_step() and not len(self._executor.inbox)
        wall, cpu = [], []
        for _ in range(self.steps - 2):
            began, began_cpu = time.perf_counter(), time.process_time()
            self._executor.run_one_step()
            wall.append(time.perf_counter() - began)
            cpu.append(time.process_time() - began_cpu)
        return statistics.median(wall), statistics.median(cpu), self._end(names)

    def _admit(self, name: str, prompt: list[int], row: int, params: SamplingParams) -> None:
        pages = range(row * self._pages, (row + 1) * self._pages)
        self._give(
            AdmitRequest(
                request_id=name, attempt=1, gateway_id="g", tokens=pack_int32(prompt), prompt_tokens=len(prompt),
                sampling=params, pages=pack_int32(pages), cached_tokens=0,
            ),
            RunBatch(chunks=(PrefillChunk(request_id=name, attempt=1, start=0, end=len(prompt)),)),
        )  # fmt: skip

    def _give(self, *orders: WorkerOrder) -> None:
        for order in orders:
            self._executor.inbox.put(Arrival(self._turns, order, time.time_ns()))

    def _end(self, names: list[str]) -> list[list[int]]:
        self._give(*(PreemptRequest(request_id=name, attempt=1) for name in names))
        self._executor.run_one_step()
        events = [event for report in self._reports for event in report.events]
        self._reports.clear()
        answers = [unpack_int32(each.output) for each in events if isinstance(each, RequestPreempted)]
        if len(answers) != len(names) or any(len(answer) < self.steps - 1 for answer in answers):
            raise RuntimeError("an answer ended before its turn did")
        return answers


def measure(bench: Bench, grammar: Grammar, rounds: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Rounds of turns, free, held, held, free, after one that warms up."""
    found: list[dict[str, list[tuple[float, float]]]] = []
    answers: list[list[int]] = []
    for number in range(rounds + 1):
        turns: dict[str, list[tuple[float, float]]] = {"free": [], "held": []}
        for place, way in enumerate(("free", "held", "held", "free")):
            wall, cpu, said = bench.turn(grammar if way == "held" else None, SEED + 100 * number + 10 * place)
            turns[way].append((wall, cpu))
            answers = said if way == "held" else answers
        if number:
            found.append(turns)
            tell(f"round {number}: {_ratio(turns, 0):.3f} wall, {_ratio(turns, 1):.3f} CPU")
    result: dict[str, Any] = {
        "step_ms": {
            way: round(statistics.median(wall for turns in found for wall, _ in turns[way]) * 1e3, 2)
            for way in ("free", "held")
        },
        "answers": answers,
    }
    for name, which in (("decode_speed_under_a_json_schema_over_without", 0), ("cpu", 1)):
        ratios = [_ratio(turns, which) for turns in found]
        low, high = median_interval(ratios, SEED)
        result[name] = {"ratio": round(statistics.median(ratios), 4), "interval": [round(low, 4), round(high, 4)]}
    return result


def _ratio(turns: dict[str, list[tuple[float, float]]], which: int) -> float:
    return sum(each[which] for each in turns["free"]) / sum(each[which] for each in turns["held"])


def time_masks(tokenizer: Tokenizer, vocab_size: int, grammar: Grammar, answers: list[list[int]]) -> dict[str, Any]:
    """Times of single calls."""
    began = time.perf_counter()
    tokens = token_table(tokenizer.to_str(), vocab_size, (EOS,))
    table_s = time.perf_counter() - began
    compiled = [_seconds(lambda: compile_grammar(tokens, grammar)) for _ in range(5)]
    masks, taken = [], []
    for answer in answers:
        matcher = compile_grammar(tokens, grammar).deep_copy()
        for token in answer:
            masks.append(_seconds(matcher.compute_bitmask))
            taken.append(_seconds(partial(matcher.consume_token, token)))
    long = list(_long_answer(compile_grammar(tokens, grammar), max(FOLLOWED)))
    followed = {}
    for count in FOLLOWED:
        follow = partial(compile_grammar(tokens, grammar).consume_tokens, long[:count])
        followed[f"follow_{count}_tokens_ms"] = round(_seconds(follow) * 1e3, 2)
    return {
        "vocabulary": tokens.vocab_size,
        "token_table_ms": round(table_s * 1e3, 1),
        "compile_ms": round(statistics.median(compiled) * 1e3, 2),
        "mask_us": _spread(masks),
        "take_token_us": _spread(taken),
        **followed,
    }


def _long_answer(matcher: Any, count: int) -> Iterator[int]:
    rng = random.Random(SEED)
    for _ in range(count):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        token = rng.choice(np.flatnonzero(bits).tolist())
        matcher.consume_token(token)
        yield token


def _spread(seconds: list[float]) -> dict[str, float]:
    return {
        name: round(float(np.quantile(seconds, share)) * 1e6, 1)
        for name, share in (("p50", 0.5), ("p99", 0.99), ("p100", 1))
    }


def _seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def main(argv: list[str] | None = None) -> int:
    parser = results_file.arguments(__doc__, "--save")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(argv)
    grammar = Grammar(kind="json_schema", text=json.dumps(SCHEMA))
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = options.model or save_llama(Path(scratch))
        vocab_size = json.loads((model_dir / "config.json").read_text("utf-8"))["vocab_size"]
        tokenizer = train_tokenizer(vocab_size)
        bench = Bench(model_dir, tokenizer, options.threads, options.steps)
        try:
            results = measure(bench, grammar, options.rounds, lambda line: print(line, file=sys.stderr))
        finally:
            bench.close()
    answers = results.pop("answers")
    results["decode_speed_under_a_json_schema_over_without"]["target"] = TARGET
    results |= {
        "masks": time_masks(tokenizer, vocab_size, grammar, answers),
        "batch": BATCH,
        "prompt_tokens": PROMPT_TOKENS,
        "steps": options.steps,
        "rounds": options.rounds,
        "threads": options.threads,
        "model": "Llama, 88M parameters, random weights, bfloat16",
        "llguidance": get_version(),
    }
    sys.stdout.write(json.dumps(results, indent=1) + "\n")
    if options.save:
        results_file.write("structured_output", results, seed=SEED)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
