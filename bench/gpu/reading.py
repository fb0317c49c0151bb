"""What the GPU benchmarks have in common: they need a device, say so where there is none, and print JSON."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from bench import results_file
from shared.messages.pools import KvGeometry

PREFIX = "thermocline-bench-gpu"

# Llama-3.1-8B in bfloat16: 128 KiB a token.
LLAMA_8B = KvGeometry(layers=32, kv_heads=8, head_dim=128, page_size=32, dtype="bfloat16")

# For --quick: the same rows in an eighth of the layers.
LLAMA_8B_SHALLOW = KvGeometry(layers=4, kv_heads=8, head_dim=128, page_size=32, dtype="bfloat16")


def begin(description: str | None) -> argparse.Namespace:
    """The options. Exits with code 0 and a clear line on a machine without a GPU: nothing can be measured there."""
    known = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    known.add_argument("--quick", action="store_true", help="small sizes and few rounds: does it run, is it right?")
    known.add_argument("--rounds", type=int, default=9)
    known.add_argument("--out", type=Path, help="results file; by default bench/results/gpu_<name>.json")
    options = known.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: PyTorch sees no GPU on this machine, so nothing was measured")
        sys.exit(0)
    if options.quick:
        options.rounds = min(options.rounds, 3)
    return options


def finish(name: str, options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Print the results, and write them with what is needed to repeat them; a quick run is not kept."""
    properties = torch.cuda.get_device_properties(0)
    results = {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        **results,
    }
    print(json.dumps(results, indent=2))
    if not options.quick or options.out:
        results_file.write(f"gpu_{name}", results, seed=0, out=options.out)
