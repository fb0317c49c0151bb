"""Do heads, and neighbouring layers, look at the same tokens of a prefix, and what does it cost to load only those?

    python -m bench.importance_similarity [--models mha,gqa] [--document-tokens 1024] [--prefixes 6] [--questions 5]
    [--name importance_similarity] [--save]

After IMPRESS (Figures 7, 8, 11 and 15) and HyperInfer (Figure 12), in float32, on the bundled models or on others of
the same tokenizer (``--models deep-mha=DIR``, see ``models/README.md``): documents, and
few-shot examples after a document. Similarity is the mean Jaccard index of the KV heads' sets of important tokens, and
of the voted sets of neighbouring layers. Loading is the real thing: a forward pass over what was chosen, and greedy
decoding after it; bytes are counted, and the answer is compared with the one that is
right. Nothing here is a time. ``--save`` writes ``bench/results/NAME.json``, and ``python -m tools.reference_docs``
then makes the page.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from bench import results_file
from bench.importance_asking import COMPARED_METRICS, Asker, Watching
from bench.importance_prompts import WORKLOADS, Prefix, prefixes, weights_sha256
from bench.stored_prefix import StoredPrefix
from services.worker.importance.identification import ProbeHeads, heads_read, identify
from services.worker.importance.important_prefix import ImportantPrefix, LoadingRule
from services.worker.importance.selection import Budget, most_important, vote
from services.worker.importance.similarity import ALPHA, expected_jaccard, jaccard, mean_similarity

ROOT = Path(__file__).parents[1]
SEED = 1
PROBES_RATIO = 0.25
SIMILARITY_RATIOS = (0.05, 0.1, 0.25, 0.4, 0.5)
LOADING_RATIOS = (0.1, 0.25, 0.5)
RULES = {"paper": ALPHA, "always_vote": 1e9, "each_head": 0.0}
"""Exponents of the threshold: IMPRESS's; so large that every layer accepts; 0, with which none does."""

LOADED_METRICS = ("h2o", "last", "h2o_pooled", "last_pooled")
PROBES = tuple(map(ProbeHeads, (1, 2, 3)))

Figures = dict[str, list[float]]


def watch(asker: Asker, question: list[int], prefix: int, figures: dict[tuple[Any, ...], Figures]) -> Watching:
    """Similarity of what heads, and neighbouring layers, find important, under ``(metric, ratio, layer)``."""
    watching = Watching(asker, len(question), prefix)
    asker.run(question, prefix, watching)
    paid = watching.paid
    for metric, layers in watching.importance.items():
        for ratio in SIMILARITY_RATIOS:
            count = Budget(ratio).over(0, prefix).count
            voted = []
            for layer, importance in enumerate(layers):
                sets = most_important(importance, count)
                voted.append(vote(sets, importance))
                into = figures[metric, ratio, layer]
                into["heads"].append(mean_similarity(sets))
                if metric == "h2o":  # What is paid is what this metric sums.
                    into["query_heads"].append(mean_similarity(most_important(paid[layer], count)))
                into["chance"].append(expected_jaccard(count, prefix))
                into["mass"].append(_share(paid[layer], voted[-1]))
                if layer:
                    into["adjacent"].append(jaccard(voted[-2], voted[-1]))
    return watching


def compare_probes(watching: Watching, figures: dict[tuple[Any, ...], Figures]) -> None:
    """What several choices of probe heads find at :data:`PROBES_RATIO`, under ``(metric, count)``."""
    for metric in COMPARED_METRICS:
        for importance, paid in zip(watching.importance[metric], watching.paid, strict=True):
            choice = Budget(PROBES_RATIO).over(0, importance.shape[1])
            everyone = vote(most_important(importance, choice.count), importance)
            for probes in PROBES:
                units = probes.units(len(paid), len(importance))
                found = identify(importance[: len(units)], 0, choice)
                into = figures[metric, probes.count]
                into["probe_keys"].append(len(heads_read(units)) / (2 * len(importance)))
                into["similarity"].append(found.similarity)
                into["fallback"].append(float(not found.accepted))
                into["mass"].append(_share(paid, found.tokens))
                into["like_everyone"].append(jaccard(found.tokens, everyone))


def _share(paid: torch.Tensor, tokens: torch.Tensor) -> float:
    """How much of the attention that the prefix gets these tokens get; paid ``[heads, prefix]``."""
    return float(paid[:, tokens].sum() / paid.sum())


def load(asker: Asker, source: StoredPrefix, question: list[int], rule: LoadingRule, into: Figures) -> str:
    """The answer over what ``rule`` loads; what was read, as shares of all KV, goes into ``into``.

    ``recall``, ``precision`` and ``wasted`` are of a guess that nothing acts on: that a layer chooses what the layer
    before it chose.
    """
    layers = asker.runner.geometry.layers
    prefix = ImportantPrefix(source, rule, layers)
    answer = asker.answer(question, source.tokens, prefix)
    everything = layers * source.tokens * source.token_bytes
    outcomes = prefix.outcomes
    read = prefix.bytes_read.by_kind()
    keys = read["probe_keys"] + read["fallback_keys"]
    into["probe_keys"].append(read["probe_keys"] / everything)
    into["fallback_keys"].append(read["fallback_keys"] / everything)
    into["needed"].append(sum(outcome.needed_bytes for outcome in outcomes) / everything)
    into["read"].append((keys + sum(outcome.needed_bytes for outcome in outcomes)) / everything)
    found = [prefix.identifications[layer] for layer in range(layers)]
    into["fallback"] += [float(not each.accepted) for each in found]
    wasted = 0.0
    for layer, before in enumerate(found[:-1], start=1):
        chosen = prefix.positions[layer]
        into["recall"].append(_recall(before.tokens, chosen))
        into["precision"].append(statistics.mean(_recall(of_head, before.tokens) for of_head in chosen))
        wasted += (1 - into["precision"][-1]) * len(before.tokens) * source.token_bytes
    into["wasted"].append(wasted / everything)
    into["token_recall"] += [_recall(guess.tokens, each.tokens) for guess, each in pairwise(found)]
    generator = torch.Generator().manual_seed(SEED + len(into["random_recall"]))
    for each in found[1:]:
        guess = torch.randperm(source.tokens, generator=generator)[: len(each.tokens)]
        into["random_recall"].append(_recall(guess, each.tokens))
    return answer


def _recall(guess: torch.Tensor, needed: torch.Tensor) -> float:
    return float(torch.isin(needed, guess).float().mean())


def loading_rules() -> Iterator[tuple[str, float, str, LoadingRule]]:
    """(metric, ratio, rule, LoadingRule) of everything that is loaded and answered."""
    for ratio in LOADING_RATIOS:
        for metric in LOADED_METRICS:
            for rule, alpha in RULES.items():
                if rule == "paper" or metric in COMPARED_METRICS:
                    yield metric, ratio, rule, LoadingRule(Budget(ratio), metric, ProbeHeads(3), alpha)


def bench_workload(asker: Asker, made: list[Prefix]) -> dict[str, Any]:
    """Everything about one model and workload."""
    similar: dict[tuple[Any, ...], Figures] = defaultdict(lambda: defaultdict(list))
    loaded: dict[tuple[Any, ...], Figures] = defaultdict(lambda: defaultdict(list))
    probes: dict[tuple[Any, ...], Figures] = defaultdict(lambda: defaultdict(list))
    exact: list[bool] = []
    for prefix in made:
        source = asker.take(prefix)
        for question, answer in prefix.questions:
            exact.append(asker.answer(question, source.tokens) == answer)
            compare_probes(watch(asker, question, source.tokens, similar), probes)
            for *key, rule in loading_rules():
                into = loaded[tuple(key)]
                into["exact"].append(load(asker, source, question, rule, into) == answer)
    return {
        "prefix_tokens": round(statistics.mean(len(prefix.tokens) for prefix in made)),
        "question_tokens": round(statistics.mean(len(ids) for prefix in made for ids, _ in prefix.questions), 1),
        "questions": len(exact),
        "exact_full": statistics.mean(exact),
        "similarity": [
            {"metric": key[0], "ratio": key[1], "layer": key[2], **_means(each)} for key, each in similar.items()
        ],
        "probes": [{"metric": key[0], "count": key[1], **_means(each)} for key, each in probes.items()],
        "loading": [
            {"metric": key[0], "ratio": key[1], "rule": key[2], **_means(each)} for key, each in loaded.items()
        ],
    }


def _means(figures: Figures) -> dict[str, float]:
    return {name: round(statistics.mean(values), 4) for name, values in figures.items()}


def folder_of(model: str) -> tuple[str, Path]:
    """(Name, folder) of what ``--models`` says of a model: a bundled one's name, or NAME=DIR."""
    name, _, folder = model.partition("=")
    return name, Path(folder) if folder else ROOT / "models" / f"thermocline-{name}"


def bench_model(folder: Path, document_tokens: int, count: int, questions: int) -> dict[str, Any]:
    """One model under all workloads."""
    asker = Asker(folder, 2 * document_tokens + 512)
    try:
        heads = int(asker.runner.model.config.num_attention_heads)
        geometry = asker.runner.geometry
        figures: dict[str, Any] = {"layers": geometry.layers, "query_heads": heads, "kv_heads": geometry.kv_heads}
        figures["weights_sha256"] = weights_sha256(folder)
        for workload in WORKLOADS:
            made = prefixes(workload, count, document_tokens, questions, asker.tokenizer, SEED)
            figures[workload] = bench_workload(asker, made)
        return figures
    finally:
        asker.runner.close()


def main(argv: list[str] | None = None) -> int:
    parser = results_file.arguments(__doc__, "--save")
    parser.add_argument("--models", default="mha,gqa")
    parser.add_argument("--document-tokens", type=int, default=1024)
    parser.add_argument("--prefixes", type=int, default=6)
    parser.add_argument("--questions", type=int, default=5, help="about each prefix")
    parser.add_argument("--name", default="importance_similarity", help="of the file in bench/results")
    options = parser.parse_args(argv)
    results = {
        name: bench_model(folder, options.document_tokens, options.prefixes, options.questions)
        for name, folder in map(folder_of, options.models.split(","))
    }
    sys.stdout.write(json.dumps(results, indent=1) + "\n")
    if options.save:
        results_file.write(options.name, results, seed=SEED)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
