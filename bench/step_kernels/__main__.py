"""Count the kernels of a step of every model type that a GPU serves: ``python -m bench.step_kernels``. Needs no GPU.

The result is also the budget: ``tests/unit/bench/test_step_kernels.py`` fails when a step launches more than this says,
or reads or is sent anything in the middle of a captured step that it was not.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch
import transformers

from bench import results_file
from bench.step_kernels.families import count_type, served_types
from shared.errors import UnsupportedModel


def main() -> None:
    """Write ``bench/results/step_kernels.json``."""
    parser = results_file.arguments(__doc__, "--out")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    types: dict[str, dict[str, Any]] = {}
    for name in served_types():
        with suppress(UnsupportedModel):  # Not counted.
            types[name] = {kind: asdict(step) for kind, step in count_type(name).items()}
    results = {
        "transformers": transformers.__version__,
        "torch": torch.__version__.partition("+")[0],
        "types": types,
    }
    print(results_file.write("step_kernels", results, seed=0, out=options.out))


if __name__ == "__main__":
    main()
