"""Try every model type of the installed transformers: ``python -m bench.model_support``.

Every type with a causal language model, and every type with a text part of such a type, gets a tiny random checkpoint
in float32. It is served exactly where greedy tokens over paged attention - prefilled in one piece, in chunks, and over
a cached prefix - equal those of the library's own ``generate``. With ``--ranks`` the types that one rank serves are
tried in a group of so many. docs/reference/models.md is made from both results.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from bench import results_file
from bench.model_support.group_trial import try_in_group
from bench.model_support.rope_trials import ROPE_TRIALS
from bench.model_support.sweep import bounded
from bench.model_support.trial import NEW_TOKENS, Outcome, try_type
from bench.model_support.types import swept, with_text_part
from services.worker.engine import text_parts


def main() -> None:
    """Run the sweep and write its result."""
    parser = results_file.arguments(__doc__, "--out")
    parser.add_argument("--types", default="", help="only these, separated by commas; nothing is written then")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu-s", type=int, default=60, help="processor time of one trial")
    parser.add_argument("--jobs", type=int, default=1, help="trials at once")
    parser.add_argument("--ranks", type=int, default=1, help="processes that share the model")
    options = parser.parse_args()
    os.nice(10)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    composite = with_text_part()
    # What this finds to be exact is what that list is made of.
    text_parts.PROVEN = frozenset(composite)
    chosen = [name for name in options.types.split(",") if name]
    names = chosen or swept()
    if options.ranks > 1 and not chosen:
        # A text part is a type of its own.
        served = [name for name, row in _by_one_rank().items() if row["outcome"] == "served"]
        names = sorted(set(served) - set(composite))
    with ThreadPoolExecutor(options.jobs) as trials:
        row = partial(_row, composite=composite, seed=options.seed, cpu_s=options.cpu_s, ranks=options.ranks)
        rows = dict(zip(names, trials.map(row, names), strict=True))
    if chosen:
        return
    if options.ranks > 1:
        found = {"ranks": options.ranks, "new_tokens": NEW_TOKENS, "types": rows}
        results_file.write("group_support", found, seed=options.seed, out=options.out)
        print(Counter(row["outcome"] for row in rows.values()))
        return
    results = {
        "transformers": transformers.__version__,
        "torch": torch.__version__.partition("+")[0],
        "new_tokens": NEW_TOKENS,
        "types": rows,
        "rope": {name: _shown(name, bounded(trial, cpu_s=options.cpu_s)) for name, trial in ROPE_TRIALS.items()},
        "with_text_part": composite,
    }
    results_file.write("model_support", results, seed=options.seed, out=options.out)
    print(Counter(row["outcome"] for row in rows.values()))


def _by_one_rank() -> dict[str, dict[str, Any]]:
    document = json.loads((results_file.RESULTS / "model_support.json").read_text(encoding="utf-8"))
    types: dict[str, dict[str, Any]] = document["results"]["types"]
    return types


def _row(name: str, *, composite: list[str], seed: int, cpu_s: int, ranks: int) -> dict[str, Any]:
    found = bounded(partial(_try, name, seed, ranks), cpu_s=cpu_s)
    if found.outcome == "differs" and name in composite:
        # Not in the list of those proven, so a worker refuses it.
        found = Outcome("refused", f"the text part of {name} answers text otherwise than the whole model does")
    return _shown(name, found)


def _try(name: str, seed: int, ranks: int, folder: Path) -> Outcome:
    return try_type(name, folder, seed) if ranks == 1 else try_in_group(name, ranks, folder, seed)


def _shown(name: str, found: Outcome) -> dict[str, Any]:
    print(f"{time.strftime('%H:%M:%S')} {name}: {found.outcome} {found.reason}"[:300], flush=True)
    return {"outcome": found.outcome, **({"reason": found.reason} if found.reason else {})}


if __name__ == "__main__":
    main()
