"""What keeps a worker from reading parts of prefixes, found once at its start and announced to the cell.

Whether a step can attend over a part of a prefix follows from the model and from settings alone, so no request need
find out by failing.
"""

from __future__ import annotations

import torch

from services.worker.engine.attention import CHUNK
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.probe import LayoutProbe
from services.worker.importance.identification import SINKS_OR_CHUNKS
from services.worker.parallel.group_runner import GroupRunner


def obstacle_to_parts(runner: ModelRunner | GroupRunner, buffer_bytes: int) -> str:
    """Return why this worker reads no parts of prefixes, or "". ``buffer_bytes`` is the memory for such reads.

    Computes a token with a runner of one device. Raises whatever the model raises.
    """
    if not buffer_bytes:
        return "--sparse-buffer-bytes is 0"
    if isinstance(runner, ModelRunner) and runner.attends_itself:
        return "the model attends by code of its own"
    if not runner.pool.planes.is_identity:
        return f"pages hold {runner.pool.planes.contents}"
    if runner.geometry.is_rounded:
        return "pages hold K and V rounded to eight bits"
    return SINKS_OR_CHUNKS if _has_sinks_or_chunks(runner) else ""


def _has_sinks_or_chunks(runner: ModelRunner | GroupRunner) -> bool:
    if isinstance(runner, GroupRunner):  # A pass would need the other ranks, so that the modules have to tell.
        names = (name.rpartition(".")[2] for name, _ in runner.model.named_parameters())
        return any("sink" in name for name in names) or any(hasattr(each, CHUNK) for each in runner.model.modules())
    probe, start = LayoutProbe(), torch.zeros(1, dtype=torch.int64)
    runner.run(start, start, probe, start)
    return any(call.sinks is not None or call.chunk is not None for call in probe.calls)
