"""``thermocline eval``: flags, and the run of one evaluation with its gate."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from shared.arguments import ArgumentParser, not_negative, whole_number
from shared.errors import OperatorError, ThermoclineError
from shared.guard import guarded
from shared.logs import kept_off_stdout
from shared.model_folder import check_model, find_model
from shared.progress_line import shown
from shared.quality_gate import KV_METHOD, write_gate
from thermocline.evaluation.gate import faults, judge
from thermocline.evaluation.generated_tasks import GENERATED, generate
from thermocline.evaluation.report import table
from thermocline.evaluation.task_file import Task, load_task, save_task
from thermocline.flags import add_json
from thermocline.supervisor.config import bundled_model

EXIT_EXCEEDED = 1
EXIT_USAGE = 2
DEFAULT_RATIOS = "0.5,0.25,0.1,0.05"
DEFAULT_METHODS = "importance,h2o,static,random,recent"


def parser() -> ArgumentParser:
    """Return the command line."""
    made = ArgumentParser(
        prog="thermocline eval",
        description="Measure what answers lose when only a part of a shared prefix is loaded.",
    )
    made.add_argument(
        "--model", type=Path, metavar="DIR", help="Hugging Face model folder (default: the bundled model)"
    )
    made.add_argument(
        "--task", default="documents", metavar="NAME", help=f"one of {', '.join(GENERATED)}, or a task file"
    )
    ratios, methods = f"(default: {DEFAULT_RATIOS})", f"(default: {DEFAULT_METHODS})"
    made.add_argument("--ratios", metavar="X,…", help=f"parts of the prefix's tokens to keep {ratios}")
    made.add_argument("--methods", metavar="NAME,…", help=f"methods, as NAME or NAME:METRIC {methods}")
    made.add_argument(
        "--kv-dtype",
        choices=("auto", "fp8"),
        default="auto",
        help="fp8 compares whole prefixes, with KV in eight bits and as it is computed, and no parts",
    )
    made.add_argument("--limit", type=whole_number(10**9), metavar="N", help="ask at most N questions of the task")
    made.add_argument("--probe-heads", type=int, default=3, metavar="N", help="heads of a layer that vote")
    made.add_argument(
        "--alpha", type=not_negative, default=0.6, metavar="X", help="exponent of the similarity threshold"
    )
    made.add_argument("--first-tokens", type=int, default=0, metavar="N", help="first tokens of a prefix always kept")
    made.add_argument("--recent-tokens", type=int, default=0, metavar="N", help="last tokens of a prefix always kept")
    made.add_argument("--seed", type=int, default=0, metavar="N", help="seed of generated tasks and of random tokens")
    made.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="float32",
        help="data type of the model; auto is the checkpoint's own",
    )
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the model runs")
    made.add_argument("--threads", type=int, default=0, metavar="N", help="CPU threads; 0 is PyTorch's default")
    add_json(made)
    generated = made.add_argument_group("generated tasks")
    generated.add_argument("--questions", type=int, default=2000, metavar="N", help="questions in all")
    generated.add_argument("--document-tokens", type=int, default=1024, metavar="N", help="tokens per document")
    generated.add_argument("--save-task", type=Path, metavar="FILE", help="write the task to FILE")
    gate = made.add_argument_group("gate")
    gate.add_argument(
        "--max-drop", type=not_negative, metavar="X", help="percentage points of accuracy that may be lost"
    )
    gate.add_argument("--gate-method", metavar="NAME", help="the method that is judged (default: importance)")
    gate.add_argument("--gate", type=Path, metavar="FILE", help="write the outcome to FILE")
    return made


def main(argv: list[str] | None = None) -> int:
    """Run an evaluation. Exit codes: 0 passed, 1 a ratio exceeds ``--max-drop``, 2 an invalid flag, task or model."""
    options = parser().parse_args(argv)
    try:
        with kept_off_stdout():
            return _evaluate(options)
    except ThermoclineError as error:
        print(f"thermocline eval: {error.message}", file=sys.stderr)
        return EXIT_USAGE


def _evaluate(options: argparse.Namespace) -> int:
    # PyTorch takes seconds to import, so flags are checked first.
    from thermocline.evaluation.run import Order, run

    _settle_methods(options)
    _check_gate(options)
    model_dir = options.model or bundled_model()
    if model_dir is None:
        raise OperatorError("there is no bundled model here; name one with --model")
    model_dir = find_model(str(model_dir))
    check_model(model_dir)
    order = Order(
        model_dir=model_dir,
        task=_task(options, model_dir),
        methods=_names(options.methods),
        ratios=_ratios(options.ratios),
        probe_heads=options.probe_heads,
        alpha=options.alpha,
        first_tokens=options.first_tokens,
        recent_tokens=options.recent_tokens,
        seed=options.seed,
        dtype=options.dtype,
        device=options.device,
        threads=options.threads,
        kv_dtype=options.kv_dtype,
    )
    with shown("prefixes") as bar:
        evaluation = run(order, on_group=bar.update)
    print(msgspec.json.encode(evaluation).decode() if options.json else table(evaluation))
    if options.max_drop is None:
        return 0
    if options.gate is not None:
        write_gate(judge(evaluation, options.gate_method, options.max_drop), options.gate)
    exceeded = faults(evaluation, options.gate_method, options.max_drop)
    for fault in exceeded:
        print(f"thermocline eval: {fault}", file=sys.stderr)
    return EXIT_EXCEEDED if exceeded else 0


def _settle_methods(options: argparse.Namespace) -> None:
    """Set the defaults of methods and ratios. Raises OperatorError for them together with ``--kv-dtype``."""
    given = [name for name in ("methods", "ratios", "gate_method") if getattr(options, name) is not None]
    if options.kv_dtype != "auto":
        if given:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise OperatorError(f"--kv-dtype {options.kv_dtype} compares whole prefixes, and {flags} are of parts")
        options.methods, options.ratios, options.gate_method = "", "", KV_METHOD
        return
    options.methods = DEFAULT_METHODS if options.methods is None else options.methods
    options.ratios = DEFAULT_RATIOS if options.ratios is None else options.ratios
    options.gate_method = "importance" if options.gate_method is None else options.gate_method


def _check_gate(options: argparse.Namespace) -> None:
    """Raise OperatorError for a gate without a limit, or on a method that is not measured."""
    if options.gate is not None and options.max_drop is None:
        raise OperatorError("--gate needs --max-drop")
    judged = (KV_METHOD,) if options.kv_dtype != "auto" else _names(options.methods)
    if options.max_drop is not None and options.gate_method not in judged:
        raise OperatorError(f"--gate-method {options.gate_method} is not among --methods")


def _task(options: argparse.Namespace, model_dir: Path) -> Task:
    if options.task in GENERATED:
        task = generate(
            options.task,
            questions=options.questions,
            tokens=options.document_tokens,
            seed=options.seed,
            tokenizer=_TokenCounter(model_dir),
        )
    else:
        task = load_task(Path(options.task))
    if options.save_task is not None:
        save_task(task, options.save_task)
    return task if options.limit is None else task.limited(options.limit)


class _TokenCounter:
    """A model's tokenizer as the document maker needs it."""

    def __init__(self, model_dir: Path) -> None:
        from services.gateway.tokenizer import Tokenizer

        self._tokenizer = Tokenizer(model_dir)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode_now(text, add_special_tokens=False)


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _ratios(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in _names(text))
    except ValueError as error:
        raise OperatorError(f"--ratios must be numbers separated by commas, not {text!r}") from error


if __name__ == "__main__":
    sys.exit(guarded(main))
