"""Measurement of restoration with a model on this machine: ``python -m services.worker.restore.measure``.

Prints its progress line by line, and a profile of restoration (JSON) in the last one. ``thermocline doctor --profile
--model DIR`` runs this in a process of its own, because only workers import torch.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from services.worker.engine.model_runner import ModelRunner
from services.worker.restore.figures import RestorationProfile
from services.worker.restore.profile import PREFIX, measure_restoration
from shared.errors import ConfigError, OperatorError
from shared.guard import guarded
from shared.memory import reap


def measure(
    model_dir: Path,
    *,
    device: str,
    dtype: str,
    page_size: int,
    threads: int,
    lengths: list[int],
    rounds: int,
    enough_s: float,
) -> RestorationProfile:
    """Load the model as a worker does and measure prefixes of ``lengths``, as far as its context goes.

    Raises OperatorError with the reason why nothing can be measured.
    """
    if not lengths:
        raise ConfigError("no lengths to measure")
    reap(PREFIX)  # Remove segments of a measurement that was killed.
    _say(f"loading {model_dir}")
    runner = ModelRunner.load(
        model_dir,
        dtype=dtype,
        device=device,
        page_size=page_size,
        device_kv_bytes=None,
        pages=max(1, -(-max(lengths) // page_size)),
        threads=threads,
        shm_prefix=PREFIX,
    )
    try:
        runner.warm_up()
        fitting = {min(length, runner.max_context // page_size * page_size) for length in lengths}
        return measure_restoration(
            runner, sorted(fitting), rounds=rounds, threads=threads, enough_s=enough_s, said=_say
        )  # fmt: skip
    finally:
        runner.close()


def main(argv: list[str] | None = None) -> int:
    """Measure, and print the profile; return 1, with the reason printed, where nothing can be measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, type=Path, help="directory of a checkpoint")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--lengths", default="256,1024,4096", help="tokens of the prefixes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--enough-s", type=float, default=20.0, help="seconds after which no longer prefix is begun")
    options: Any = parser.parse_args(argv)
    try:
        profile = measure(
            options.model,
            device=options.device,
            dtype=options.dtype,
            page_size=options.page_size,
            threads=options.threads,
            lengths=[int(length) for length in options.lengths.split(",")],
            rounds=options.rounds,
            enough_s=options.enough_s,
        )
    except (OperatorError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(profile.to_json().decode())
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(guarded(main))
