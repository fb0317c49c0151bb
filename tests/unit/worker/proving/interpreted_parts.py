"""The parts of a worker as they can be tried on a CPU: kernels in Triton's interpreter, graphs played, collectives by
gloo. Run in a process with TRITON_INTERPRET=1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from bench.gpu.reading import mend_interpreter
from services.worker.engine.cuda_capture import Graph
from services.worker.kv.movers.gpu_assisted import GpuAssistedMover
from services.worker.proving import attention_proofs, graph_proofs, parts
from services.worker.proving.cases import Step
from services.worker.proving.memory_proofs import prove_mover
from services.worker.proving.part import Part, Prove, Way
from services.worker.proving.table import ServedShape
from tests.cuda.played_capture import Played, PlayedCapture

torch.set_num_threads(1)
mend_interpreter()


class StaleCapture(PlayedCapture):
    """A replay that changes nothing, as one of a graph over memory that has been given away."""

    def graph_of(self, run: Callable[[], None]) -> Graph:
        run()
        return Played(lambda: None)


def _graphs(shape: ServedShape) -> None:
    graph_proofs.REPEATED = 1
    graph_proofs.prove_capture(shape, PlayedCapture())


def _stale_graphs(shape: ServedShape) -> None:
    graph_proofs.REPEATED = 1
    graph_proofs.prove_capture(shape, StaleCapture())


PLAYED: dict[tuple[str, str], Prove] = {
    (parts.GRAPHS, "graphs"): _graphs,
    (parts.MOVER, "gpu_assisted"): partial(prove_mover, "gpu_assisted", make=GpuAssistedMover),
    (parts.REGISTRATION, "registered"): lambda shape: None,
}


def _played(part: Part) -> Part:
    ways = tuple(Way(way.name, PLAYED.get((part.name, way.name), way.prove), way.needs) for way in part.ways)
    return Part(part.name, ways, proves_all=part.proves_all)


PARTS = tuple(_played(part) for part in parts.parts_of() if part.name != parts.IPC)

ATTENDING = tuple(
    part for part in PARTS if part.name in (parts.TRITON, parts.ATTENTION, parts.KV_WRITE, parts.FUSED, parts.GRAPHS)
)


def _without_window(shape: ServedShape) -> None:
    """The kernels, told of no window: their results are plausible, and wrong."""
    from services.worker import kernels

    def attend(step: Step, **settings: object) -> torch.Tensor:
        told = settings | {"window": None}
        return kernels.paged_attention(step.q, step.k, step.v, step.paged, **told)  # type: ignore[arg-type]

    attention_proofs.prove_attention(shape, attend)


def _without_row(shape: ServedShape) -> None:
    """The kernels, but for the last head of the last row."""
    from services.worker import kernels

    def attend(step: Step, **settings: object) -> torch.Tensor:
        found = kernels.paged_attention(step.q, step.k, step.v, step.paged, **settings)  # type: ignore[arg-type]
        found[-1, -1] = 0
        return found

    attention_proofs.prove_attention(shape, attend)


WRONG = tuple(
    Part(prove.__name__, (Way("wrong", prove), Way("none"))) for prove in (_without_window, _without_row, _stale_graphs)
)
