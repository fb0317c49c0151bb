"""One evaluation from end to end: model, task, scorer, figures. What imports PyTorch is imported when it runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.worker.engine.model_runner import ModelRunner
from services.worker.evaluation.methods import Full, Method, MethodSettings
from services.worker.evaluation.recomputing_scorer import RecomputingScorer
from services.worker.evaluation.runner_scorer import RunnerScorer, check_context
from services.worker.importance.identification import ProbeHeads
from shared.errors import ConfigError, IntegrityError
from shared.memory.segment import reap
from shared.messages.pools import KvDtype
from shared.model_files import fingerprint, model_name
from shared.quality_gate import KV_METHOD
from thermocline.evaluation.evaluation import Compared, Plan, evaluate
from thermocline.evaluation.figures import Evaluation, accuracy_error_points, accuracy_of, compare
from thermocline.evaluation.prompts import PromptMaker, Prompts
from thermocline.evaluation.task_file import Task

PAGE_SIZE = 16
SHM_PREFIX = "thermocline-eval"
PROBE_PAGES = 16
"""Pages for the two short prompts by which a model is verified when it is loaded."""

CHECKED_QUESTIONS = 3
MAX_DEVIATION_NATS = {"float32": 0.01}
"""A larger deviation is not rounding. Half precision rounds differently wherever sums are split."""

MAX_DEVIATION_HALF_NATS = 1.0


@dataclass(frozen=True, slots=True)
class Order:
    """One evaluation to run, as given on the command line."""

    model_dir: Path
    task: Task
    methods: tuple[str, ...]
    ratios: tuple[float, ...]
    probe_heads: int
    alpha: float
    first_tokens: int
    recent_tokens: int
    seed: int
    dtype: str
    device: str
    threads: int
    kv_dtype: KvDtype = "auto"
    """Other than ``auto``: compare answers over whole prefixes, with KV as computed and with KV of this type."""


def run(order: Order, *, on_group: Callable[[int, int], None] = lambda done, groups: None) -> Evaluation:
    """Run an evaluation; ``on_group(done, groups)`` is called after each group.

    Raises ConfigError, UnsupportedModel or ContextTooLong for an order that cannot be evaluated, and IntegrityError
    when scoring does not agree with recomputation.
    """
    began = time.perf_counter()
    plan = _plan(order)
    if any(method.needs_record for method in plan.methods):
        _check_records(order.task)
    maker = PromptMaker(order.model_dir)
    try:
        groups = maker.prompts(order.task)
    finally:
        maker.close()
    done, passes = 0, 1 if order.kv_dtype == "auto" else 2

    def count() -> None:
        nonlocal done
        done += 1
        on_group(done, passes * len(groups))

    scored = _score(order, groups, plan, "auto", count)
    compared, deviation, methods = scored.compared, scored.deviation_nats, scored.compared.methods
    if order.kv_dtype != "auto":
        again = _score(order, groups, plan, order.kv_dtype, count)
        deviation = max(deviation, again.deviation_nats)
        methods = (compare(KV_METHOD, 1.0, compared.whole, again.compared.whole, again.seconds),)
    accuracy, questions = accuracy_of(compared.whole), len(compared.whole)
    return Evaluation(
        task=order.task.name,
        task_digest=order.task.digest(),
        model=model_name(order.model_dir),
        model_fingerprint=fingerprint(order.model_dir, kv_dtype=order.kv_dtype),
        dtype=scored.dtype,
        seed=order.seed,
        questions=questions,
        prefixes=len(groups),
        prefix_tokens=round(sum(len(group.prefix) for group in groups) / len(groups)),
        chance=_chance(order.task),
        accuracy=accuracy,
        standard_error_points=accuracy_error_points(accuracy, questions),
        deviation_nats=deviation,
        probe_heads=order.probe_heads,
        alpha=order.alpha,
        first_tokens=order.first_tokens,
        recent_tokens=order.recent_tokens,
        seconds=round(time.perf_counter() - began, 3),
        methods=methods,
    )


@dataclass(frozen=True, slots=True)
class _Scored:
    """Results of all questions with one runner, whose K and V are computed in ``dtype``."""

    compared: Compared
    deviation_nats: float
    dtype: str
    seconds: float


def _score(
    order: Order, groups: Sequence[Prompts], plan: Plan, kv_dtype: KvDtype, on_group: Callable[[], None]
) -> _Scored:
    began = time.perf_counter()
    runner = _runner(order, max(group.longest for group in groups), kv_dtype)
    try:
        for group in groups:  # Before any is scored, so that a long one does not end a run late.
            check_context(runner, group.prefix, group.asked)
        deviation = _deviation(runner, groups[0])
        compared = evaluate(groups, plan, RunnerScorer(runner), on_group=on_group)
        return _Scored(compared, deviation, runner.geometry.dtype, round(time.perf_counter() - began, 3))
    finally:
        runner.close()


def _plan(order: Order) -> Plan:
    """Return the plan. Raises ConfigError for invalid names and numbers, before any model is loaded."""
    if (not order.ratios and order.methods) or any(not 0 < ratio <= 1 for ratio in order.ratios):
        raise ConfigError("ratios must be above 0 and at most 1")
    for what, several in (("ratio", order.ratios), ("method", order.methods)):
        if len(dict.fromkeys(several)) < len(several):
            raise ConfigError(f"a {what} is given twice")
    settings = MethodSettings(
        probes=ProbeHeads(order.probe_heads),
        alpha=order.alpha,
        first_tokens=order.first_tokens,
        recent_tokens=order.recent_tokens,
        seed=order.seed,
    )
    methods = tuple(Method.named(name) for name in order.methods)
    return Plan(methods, order.ratios, settings, multiple_choice=order.task.kind == "multiple_choice")


def _check_records(task: Task) -> None:
    """Raise ConfigError for a prefix with a single question: static pre-identification learns from the others."""
    lonely = sum(len(group.questions) < 2 for group in task.groups)
    if lonely:
        raise ConfigError(
            f"{lonely} of {len(task.groups)} prefixes have a single question, and static pre-identification needs two; "
            "leave it out of --methods"
        )


def _runner(order: Order, longest: int, kv_dtype: KvDtype) -> ModelRunner:
    reap(SHM_PREFIX)  # Pools of killed evaluations would stay in memory for ever.
    return ModelRunner.load(
        order.model_dir,
        dtype=order.dtype,
        device=order.device,
        page_size=PAGE_SIZE,
        device_kv_bytes=None,
        pages=PROBE_PAGES + -(-longest // PAGE_SIZE),
        threads=order.threads,
        shm_prefix=SHM_PREFIX,
        kv_dtype=kv_dtype,
    )


def _deviation(runner: ModelRunner, group: Prompts) -> float:
    """Return the largest difference to recomputation over the first questions, in nats.

    Raises IntegrityError when it is beyond rounding.
    """
    asked = group.asked[:CHECKED_QUESTIONS]
    recomputed = RecomputingScorer(runner).score(group.prefix, asked)
    scored = RunnerScorer(runner).score(group.prefix, asked, Full())
    largest = max(
        abs(one.log_probability - other.log_probability)
        for question, again in zip(scored, recomputed, strict=True)
        for one, other in zip(question.answers, again.answers, strict=True)
    )
    if not largest <= MAX_DEVIATION_NATS.get(runner.geometry.dtype, MAX_DEVIATION_HALF_NATS):
        raise IntegrityError(f"answers scored over a shared prefix are {largest:.2g} nats off those recomputed")
    return largest


def _chance(task: Task) -> float:
    """Return the expected accuracy of guessing, 0 to 1."""
    if task.kind == "exact_match":
        return 0.0
    chances: Sequence[float] = [1 / len(one.choices) for group in task.groups for one in group.questions]
    return sum(chances) / len(chances)
