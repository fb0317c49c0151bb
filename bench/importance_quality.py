"""What answers lose when only a part of a prefix is loaded: methods and metrics at equal retention.

    python -m bench.importance_quality [--questions 2000] [--reach-questions 300] [--ratios 0.5,0.25,0.1,0.05] [--save]
    python -m bench.importance_quality --recommended [--models NAME,NAME=DIR] [--questions 2000] [--name NAME] [--save]

After IMPRESS's Figures 4 and 15, on the bundled models and generated tasks, because the paper's models and datasets are
none of ours. ``reach`` is what both models can do of each task with the whole prefix; ``compared`` are all methods on
questions about documents. ``--recommended`` measures the way that is recommended for serving these models, by one probe
head and by three, with questions enough to tell small drops. A drop's standard error is printed with it: below that,
differences mean nothing. ``--save`` writes the results, and ``python -m tools.reference_docs`` then makes the page.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec

from bench import results_file
from services.gateway.tokenizer import Tokenizer
from shared.importance import PROBE_HEADS
from thermocline.evaluation.figures import Evaluation
from thermocline.evaluation.generated_tasks import GENERATED, generate
from thermocline.evaluation.report import table
from thermocline.evaluation.run import Order, run

MODELS = Path(__file__).parents[1] / "models"
SEED = 1
DOCUMENT_TOKENS = 1024
RECOMMENDED = ("importance:last_pooled",)
METHODS = (
    *("importance", "importance:h2o_pooled", "importance:last", "importance:last_pooled"),
    *("h2o", "h2o:h2o_pooled", "static", "random", "recent"),
)


class _TokenCounter:
    def __init__(self, model_dir: Path) -> None:
        self._tokenizer = Tokenizer(model_dir)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode_now(text, add_special_tokens=False)


def measure(
    model: str,
    task: str,
    questions: int,
    methods: tuple[str, ...],
    ratios: tuple[float, ...],
    threads: int,
    probe_heads: int = PROBE_HEADS,
) -> Evaluation:
    """One task of the bundled ``model``; without methods only with the whole prefix."""
    name, _, folder = model.partition("=")
    model_dir = Path(folder) if folder else MODELS / name
    counter = _TokenCounter(model_dir)
    made = generate(task, questions=questions, tokens=DOCUMENT_TOKENS, seed=SEED, tokenizer=counter)
    order = Order(
        model_dir=model_dir,
        task=made,
        methods=methods,
        ratios=ratios,
        probe_heads=probe_heads,
        alpha=0.6,
        first_tokens=0,
        recent_tokens=0,
        seed=SEED,
        dtype="float32",
        device="cpu",
        threads=threads,
    )
    evaluation = run(order)
    print(table(evaluation) + "\n", flush=True)
    return evaluation


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.importance_quality")
    parser.add_argument("--questions", type=int, default=2000, help="of the comparison")
    parser.add_argument("--reach-questions", type=int, default=300, help="of each task with the whole prefix")
    parser.add_argument("--ratios", default="0.5,0.25,0.1,0.05")
    parser.add_argument(
        "--models",
        default="thermocline-mha,thermocline-gqa",
        help="of the tasks with the whole prefix, and of the recommended way; NAME=DIR for one outside of models/",
    )
    parser.add_argument("--compared", default="thermocline-mha", help="models of the comparison")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--recommended", action="store_true", help="only the recommended way, by one and three heads")
    parser.add_argument("--name", default="importance_recommended", help="of the file of the recommended way")
    parser.add_argument("--save", action="store_true", help="write the results")
    options = parser.parse_args()
    ratios = tuple(float(part) for part in options.ratios.split(","))
    if options.recommended:
        found = [
            measure(model, "documents", options.questions, RECOMMENDED, ratios, options.threads, heads)
            for model in options.models.split(",")
            for heads in (1, PROBE_HEADS)
        ]
        if options.save:
            document = {"recommended": [msgspec.to_builtins(one) for one in found]}
            print(results_file.write(options.name, document, seed=SEED))
        return
    reach = [
        measure(model, task, options.reach_questions, (), ratios, options.threads)
        for model in options.models.split(",")
        for task in GENERATED
    ]
    compared = [
        measure(model, "documents", options.questions, METHODS, ratios, options.threads)
        for model in options.compared.split(",")
    ]
    results: dict[str, Any] = {
        "reach": [msgspec.to_builtins(one) for one in reach],
        "compared": [msgspec.to_builtins(one) for one in compared],
    }
    if options.save:
        print(results_file.write("importance_quality", results, seed=SEED))


if __name__ == "__main__":
    main()
