"""A worker whose steps take a set time: the real process, model and pages, which waits at the end of each forward pass.

For measurements of what workers do together on a machine that has too few cores to run them at their own speed. A pass
takes ``PACED_STEP_MS`` and ``PACED_TOKEN_US`` for each of its tokens, unless computing it takes longer.

``PACED_STEP_MS=40 PACED_TOKEN_US=250 python -m bench.paced_worker --model DIR --nats URL …`` takes a worker's flags.
"""

from __future__ import annotations

import os
import sys
import time
from unittest import mock

import torch

from services.worker import __main__ as worker
from services.worker.config import WorkerConfig
from services.worker.device_choice import DeviceChoice
from services.worker.engine.forward_meta import ForwardMeta
from services.worker.engine.model_runner import ModelRunner
from services.worker.runner_loading import load_runner


def paced(runner: ModelRunner, step_s: float, token_s: float) -> ModelRunner:
    """Let every forward pass of a runner take so long at the least."""
    forward = runner.forward

    def forward_paced(
        ids: torch.Tensor, positions: torch.Tensor, meta: ForwardMeta, last_rows: torch.Tensor
    ) -> torch.Tensor:
        ends_s = time.perf_counter() + step_s + token_s * len(ids)
        logits = forward(ids, positions, meta, last_rows)
        time.sleep(max(0.0, ends_s - time.perf_counter()))
        return logits

    runner.forward = forward_paced  # type: ignore[method-assign]
    return runner


def main() -> int:
    """Run a worker, with its steps paced once its model is loaded and proven."""
    step_s, token_s = float(os.environ["PACED_STEP_MS"]) / 1e3, float(os.environ["PACED_TOKEN_US"]) / 1e6

    def load_paced(config: WorkerConfig, choice: DeviceChoice) -> ModelRunner:
        runner = load_runner(config, choice)
        assert isinstance(runner, ModelRunner)
        return paced(runner, step_s, token_s)

    with mock.patch("services.worker.bootstrap.load_runner", load_paced):
        return worker.main()


if __name__ == "__main__":
    sys.exit(main())
