"""IMPRESS's Figures 4, 5, 11, 19, 20 and 22 on small models: real attention, real answers, and nothing timed.

Its models have 32 to 56 heads and prefixes of some thousand tokens. The bundled models have six heads in four layers,
those of ``tools.train_model --variant deep-mha`` and ``deep-gqa`` have twelve layers, and documents have a thousand
tokens. What is chosen in a layer is what all KV heads vote for. What was important to *other* questions on the same
document stands for what was known before: for the static way (Figure 4), and for the order of a repacked prefix (Figure
20). Thresholds are swept over real loads with three probe heads and 25% kept (Figures 11, 19 and 22).

``python -m bench.papers.impress_measured [--models mha,gqa] [--prefixes N] [--questions N] [--name NAME] [--json]``;
the whole run writes ``bench/results/NAME.json``, takes some minutes, and ``python -m tools.reference_docs`` then makes
the page. A model outside of ``models/`` is ``NAME=DIR``. Nothing in it is a time, so nothing depends on the machine.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from bench import results_file
from bench.importance_asking import COMPARED_METRICS, Asker, Watching
from bench.importance_prompts import Prefix, prefixes, weights_sha256
from bench.importance_similarity import Figures, folder_of, load
from bench.stored_prefix import StoredPrefix
from services.worker.importance.identification import ProbeHeads
from services.worker.importance.important_prefix import LoadingRule
from services.worker.importance.selection import Budget, most_important, vote

SEED = 1
DOCUMENT_TOKENS = 1024
PREFIXES, QUESTIONS = 6, 5
RATIOS = (0.1, 0.25, 0.5)
CHUNK_SIZES = (8, 16, 64)
"""64 is the paper's; 16 stands to a document of a thousand tokens as 64 to one of four thousand; 8 is a block here."""

ALPHAS = (0.0, 0.4, 0.6, 0.8, 1.0, 2.0)  # Figure 22
SWEPT_RATIO = 0.25  # Figure 11
PROBE_HEADS = 3

Importance = list[torch.Tensor]
"""Of a question: ``[kv_heads, prefix]`` for each layer."""


def chosen(importance: torch.Tensor, ratio: float) -> torch.Tensor:
    """The voted tokens of a layer, int64 ``[count]``, ascending; importance float32 ``[kv_heads, prefix]``."""
    count = Budget(ratio).over(0, importance.shape[1]).count
    return vote(most_important(importance, count), importance)


def shares(tokens: torch.Tensor, prefix: int, chunk_tokens: int, order: torch.Tensor | None = None) -> torch.Tensor:
    """The important share of each chunk, float64 ``[chunks]``. ``order[i]`` is the token in place i."""
    if order is not None:
        place = torch.empty(prefix, dtype=torch.int64)
        place[order] = torch.arange(prefix)
        tokens = place[tokens]
    counts = torch.bincount(tokens // chunk_tokens, minlength=-(-prefix // chunk_tokens))
    lengths = torch.full_like(counts, chunk_tokens)
    if prefix % chunk_tokens:
        lengths[-1] = prefix % chunk_tokens
    return counts.double() / lengths


def known_before(others: list[Importance], layer: int) -> torch.Tensor:
    """Average importance to other questions, each of which counts as much: float32 ``[kv_heads, prefix]``."""
    scaled = [one[layer] / one[layer].sum(dim=1, keepdim=True).clamp_min(1e-12) for one in others]
    return torch.stack(scaled).mean(dim=0)


def of_prefix(questions: list[Importance], into: dict[tuple[Any, ...], Figures]) -> None:
    """Static recall, chunks and orders of one prefix, under ``(ratio, chunk_tokens or 0)``."""
    for ratio in RATIOS:
        asked: dict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)
        for number, importance in enumerate(questions):
            others = [each for at, each in enumerate(questions) if at != number]
            for layer, found in enumerate(importance):
                prefix = found.shape[1]
                tokens, before = chosen(found, ratio), known_before(others, layer)
                static = chosen(before, ratio)
                into[ratio, 0]["static_recall"].append(float(torch.isin(tokens, static).double().mean()))
                order = before.sum(dim=0).argsort(descending=True, stable=True)
                for chunk_tokens in CHUNK_SIZES:
                    plain = shares(tokens, prefix, chunk_tokens)
                    packed = shares(tokens, prefix, chunk_tokens, order)
                    figures = into[ratio, chunk_tokens]
                    figures["important_in_read"].append(float(plain[plain > 0].mean()))
                    figures["chunks_read"].append(float((plain > 0).double().mean()))
                    figures["chunks_read_reordered"].append(float((packed > 0).double().mean()))
                    asked[layer, chunk_tokens].append(plain)
        for (_, chunk_tokens), each_asked in asked.items():
            correlation = hot_and_important(torch.stack(each_asked))
            if correlation is not None:
                into[ratio, chunk_tokens]["hot_is_important"].append(correlation)


def hot_and_important(found: torch.Tensor) -> float | None:
    """Correlation over chunks of how many questions read one, and its important share when read (Figure 5 (b)).

    found float64 ``[questions, chunks]``. None where every chunk is read equally often, or nothing differs.
    """
    uses = (found > 0).double().sum(dim=0)
    is_read = uses > 0
    share = found.sum(dim=0)[is_read] / uses[is_read]
    uses = uses[is_read]
    if len(uses) < 3 or float(uses.std()) == 0 or float(share.std()) == 0:
        return None
    return float(torch.corrcoef(torch.stack([uses, share]))[0, 1])


def sweep(
    asker: Asker, source: StoredPrefix, question: list[int], answer: str, into: dict[tuple[str, float], Figures]
) -> None:
    """One question under every threshold."""
    for metric in COMPARED_METRICS:
        for alpha in ALPHAS:
            figures: Figures = defaultdict(list)
            rule = LoadingRule(Budget(SWEPT_RATIO), metric, ProbeHeads(PROBE_HEADS), alpha)
            exact = load(asker, source, question, rule, figures) == answer
            to = into[metric, alpha]
            to["exact"].append(float(exact))
            to["keys"].append(2 * (figures["probe_keys"][0] + figures["fallback_keys"][0]))
            to["read"] += figures["read"]
            to["fallback"].append(statistics.mean(figures["fallback"]))
            for layer, fell_back in enumerate(figures["fallback"]):
                to[f"fallback {layer}"].append(fell_back)


def layer_read(fallback: float, kv_heads: int) -> float:
    """The share of a layer's KV that is read: probe keys and the chosen K and V, or all K and the chosen V."""
    probes = min(PROBE_HEADS, kv_heads) / kv_heads
    return fallback * (0.5 + SWEPT_RATIO / 2) + (1 - fallback) * (probes / 2 + SWEPT_RATIO)


def bench_model(name: str, folder: Path, count: int, questions: int) -> dict[str, Any]:
    """One model on documents."""
    asker = Asker(folder, 2 * DOCUMENT_TOKENS + 512)
    try:
        kv_heads = asker.runner.geometry.kv_heads
        made = prefixes("documents", count, DOCUMENT_TOKENS, questions, asker.tokenizer, SEED)
        by_metric: dict[str, dict[tuple[Any, ...], Figures]] = {
            metric: defaultdict(lambda: defaultdict(list)) for metric in COMPARED_METRICS
        }
        swept: dict[tuple[str, float], Figures] = defaultdict(lambda: defaultdict(list))
        full: list[float] = []
        for prefix in made:
            source = asker.take(prefix)
            _watch(asker, prefix, source.tokens, by_metric)
            for question, answer in prefix.questions:
                full.append(float(asker.answer(question, source.tokens) == answer))
                sweep(asker, source, question, answer, swept)
            print(f"{name}: a document of {source.tokens} tokens", file=sys.stderr, flush=True)
        layers = asker.runner.geometry.layers
        return {
            "kv_heads": kv_heads,
            "weights_sha256": weights_sha256(folder),
            "questions": len(full),
            "prefix_tokens": round(statistics.mean(len(prefix.tokens) for prefix in made)),
            "exact_full": statistics.mean(full),
            "chunks": [
                {"metric": metric, "ratio": key[0], "chunk_tokens": key[1], **_means(figures)}
                for metric, found in by_metric.items()
                for key, figures in found.items()
            ],
            "thresholds": [
                {
                    "metric": metric,
                    "alpha": alpha,
                    **{key: value for key, value in _means(figures).items() if " " not in key},
                    "layers": [
                        layer_read(statistics.mean(figures[f"fallback {layer}"]), kv_heads) for layer in range(layers)
                    ],
                }
                for (metric, alpha), figures in swept.items()
            ],
        }
    finally:
        asker.runner.close()


def _watch(asker: Asker, prefix: Prefix, tokens: int, by_metric: dict[str, dict[tuple[Any, ...], Figures]]) -> None:
    """What all questions on a prefix find important, and all that follows from it."""
    watched = []
    for question, _ in prefix.questions:
        watching = Watching(asker, len(question), tokens)
        asker.run(question, tokens, watching)
        watched.append(watching)
    for metric, into in by_metric.items():
        of_prefix([watching.importance[metric] for watching in watched], into)


def _means(figures: Figures) -> dict[str, float]:
    return {name: round(statistics.mean(values), 4) for name, values in figures.items()}


def main() -> None:
    parser = results_file.arguments(__doc__)
    parser.add_argument("--models", default="mha,gqa")
    parser.add_argument("--prefixes", type=int, default=PREFIXES)
    parser.add_argument("--questions", type=int, default=QUESTIONS, help="about each prefix")
    parser.add_argument("--name", default="papers_impress_measured", help="of the file in bench/results")
    parser.add_argument("--json", action="store_true", help="print the results, write nothing")
    options = parser.parse_args()
    if options.prefixes < 1 or options.questions < 2:
        print("impress_measured: it takes one prefix and two questions on it at least", file=sys.stderr)
        raise SystemExit(2)
    models = dict(map(folder_of, options.models.split(",")))
    results = {name: bench_model(name, folder, options.prefixes, options.questions) for name, folder in models.items()}
    is_whole = len(models) == 2 and (options.prefixes, options.questions) == (PREFIXES, QUESTIONS)
    if options.json or not is_whole:
        print(json.dumps(results, indent=2))
        return
    print(results_file.write(options.name, results, seed=SEED))


if __name__ == "__main__":
    main()
