"""Selective admission and promotion by hotness beside the default policy and loads on demand, simulated.

The four datasets of HotPrefix's figures and the families that policies are developed with (``bench/held_out.py``), on
one A6000 with Llama-2-13B's 24,846 tokens of KV and as much host memory again: as a cell is by default, with either
switch and with both.

``python -m bench.hotness_switches [--requests 600] [--seed 1]``
"""

from __future__ import annotations

import argparse
from typing import Any

from bench import results_file
from bench.held_out import HELD_OUT_FAMILIES, HeldOutError, is_held_out
from thermocline.simulate.__main__ import parser as simulate_parser
from thermocline.simulate.__main__ import prepare, run
from thermocline.simulate.workloads import WORKLOADS

DEVICE_TOKENS = 24_846
DATASETS = ("mmlu", "hellaswag", "bbh", "ceval")
SELECTIVE, PROMOTION = "admission=selective", "promotion=hotness"
SWITCHES: dict[str, tuple[str, ...]] = {
    "default": (),
    "admission": (SELECTIVE,),
    "promotion": (PROMOTION,),
    "both": (SELECTIVE, PROMOTION),
}


def workloads() -> dict[str, tuple[str, ...]]:
    """What is asked, by label: the arguments of ``thermocline simulate``."""
    named = {dataset: ("--workload", "few-shot", "--set", f"dataset={dataset}") for dataset in DATASETS}
    families = [family for family in WORKLOADS if family not in (*HELD_OUT_FAMILIES, "few-shot")]
    own = {"agents": ("--set", "max_tokens=12000"), "documents": ("--set", "prompt_tokens=6000")}  # So that they fit.
    return named | {family: ("--workload", family, *own.get(family, ())) for family in families}


def main() -> None:
    known = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known.add_argument("--requests", type=int, default=600)
    known.add_argument("--seed", type=int, default=1)
    options = known.parse_args()
    if is_held_out("few-shot", options.seed):
        raise HeldOutError(f"seed {options.seed} is held out")
    rows = []
    for label, asked in workloads().items():
        row: dict[str, Any] = {"workload": label}
        for name, settings in SWITCHES.items():
            row[name] = measure((*asked, *(part for text in settings for part in ("--set", text))), options)
        rows.append(row)
        print(row, flush=True)
    print(results_file.write("hotness_switches", {"requests": options.requests, "rows": rows}, seed=options.seed))


def measure(asked: tuple[str, ...], options: argparse.Namespace) -> dict[str, float]:
    """Hit tokens of all prompt tokens, those on the device alone, the mean TTFT, and tokens that were backed up."""
    line = [*asked, "--profile", "a6000-pcie3/llama-2-13b", "--device-tokens", str(DEVICE_TOKENS)]
    line += ["--host-tokens", str(DEVICE_TOKENS), "--in-flight", "8"]
    line += ["--requests", str(options.requests), "--seed", str(options.seed)]
    figures = run(prepare(simulate_parser().parse_args(line)))
    return {
        "hit_ratio": figures["hit_ratio"],
        "device_hit_ratio": figures["hit_tokens"]["device"] / figures["input_tokens"],
        "ttft_mean_ms": figures["ttft_ms"]["mean"],
        "simulated_seconds": figures["simulated_seconds"],
        "backed_up_tokens": figures["backed_up_tokens"],
        "finished": figures["finished"],
    }


if __name__ == "__main__":
    main()
