"""All parts of a worker's use of CUDA. A new one, or a new way, is an entry here and a proof in its module.

Order matters where a way ``needs`` another part. The last way of a part is one that always works, only slower; a part
without such a way ends the worker when its last one fails.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from services.worker.proving.ahead_proofs import prove_ahead
from services.worker.proving.attention_proofs import (
    prove_torch_attention,
    prove_triton,
    prove_triton_attention,
    prove_triton_kv_write,
)
from services.worker.proving.checksum_proofs import prove_device_checksums
from services.worker.proving.collective_proofs import prove_collectives
from services.worker.proving.flashinfer_proofs import prove_flashinfer
from services.worker.proving.fused_proofs import prove_fused
from services.worker.proving.graph_proofs import prove_graphs
from services.worker.proving.ipc_proofs import prove_ipc
from services.worker.proving.memory_proofs import prove_mover, prove_registration
from services.worker.proving.part import Part, Way

TRITON, ATTENTION, KV_WRITE, FUSED, GRAPHS = "triton", "attention", "kv write", "fused operators", "decode graphs"
REGISTRATION, CHECKSUMS, MOVER = "host registration", "checksums of loads", "mover"
IPC, COLLECTIVES = "cuda ipc", "collectives"

AHEAD = "steps ahead"
"""Captured steps that are launched before the tokens of the step before are read."""

FLASHINFER = "flashinfer"
"""Attention by FlashInfer, in ordinary steps and captured ones."""

EXACT_KERNELS = "services.worker.kernels.exact"

_WITH_TRITON = ((TRITON, "compiled"),)

PARTS: tuple[Part, ...] = (
    # First, because the processes of all ranks must reach it at about the same time.
    Part(COLLECTIVES, (Way("nccl", prove_collectives), Way("through the host"))),
    Part(TRITON, (Way("compiled", prove_triton), Way("none"))),
    Part(
        ATTENTION,
        (
            Way(FLASHINFER, prove_flashinfer),
            Way("triton", prove_triton_attention, _WITH_TRITON),
            Way("torch", prove_torch_attention),
        ),
        # A way that fails while serving is replaced by the next, and our kernels' graphs need our attention.
        proves_all=True,
    ),
    Part(KV_WRITE, (Way("triton", prove_triton_kv_write, _WITH_TRITON), Way("torch"))),
    Part(FUSED, (Way("fused", prove_fused, _WITH_TRITON), Way("separate"))),
    Part(
        GRAPHS,
        (Way("graphs", prove_graphs, ((ATTENTION, "triton"), (KV_WRITE, "triton"))), Way("eager")),
    ),
    Part(AHEAD, (Way("ahead", prove_ahead, ((GRAPHS, "graphs"),)), Way("one by one"))),
    Part(REGISTRATION, (Way("registered", prove_registration), Way("staged"))),
    Part(CHECKSUMS, (Way("on the device", prove_device_checksums, _WITH_TRITON), Way("on the host"))),
    Part(
        MOVER,
        (
            Way(
                "gpu_assisted",
                partial(prove_mover, "gpu_assisted"),
                (*_WITH_TRITON, (REGISTRATION, "registered")),
            ),
            Way("batched", partial(prove_mover, "batched")),
            Way("per_page", partial(prove_mover, "per_page")),
        ),
        proves_all=True,
    ),
    Part(IPC, (Way("both ways", prove_ipc), Way("none"))),
)
"""The parts, in the order in which they are proven."""


def parts_of(
    *, ranks: int = 1, has_graphs: bool = True, is_exact: bool = False, attention: str = "auto"
) -> tuple[Part, ...]:
    """Return the parts that a worker of so many ranks uses; without CUDA graphs where none are wanted, or for a group.

    In exact mode attention has one way: no other gives a row the same bits in any step. FlashInfer is left out of
    groups, and where ``attention`` names another way.
    """
    left_out = {FUSED} if is_exact else set()
    if ranks == 1:
        left_out.add(COLLECTIVES)
    if ranks > 1 or not has_graphs:
        left_out |= {KV_WRITE, GRAPHS, AHEAD}
    if ranks > 1:
        left_out.add(FUSED)
    # Rank 0 of a group reaches the other ranks' memory in no other way.
    needed = {IPC} if ranks > 1 else set()
    exact = Part(ATTENTION, (Way("triton", partial(prove_triton_attention, package=EXACT_KERNELS), _WITH_TRITON),))
    parts = (exact if is_exact and part.name == ATTENTION else part for part in PARTS if part.name not in left_out)
    if ranks > 1 or attention == "triton":
        parts = (_without(part, FLASHINFER) if part.name == ATTENTION else part for part in parts)
    return tuple(Part(part.name, part.ways[:1]) if part.name in needed else part for part in parts)


def _without(part: Part, way: str) -> Part:
    return replace(part, ways=tuple(each for each in part.ways if each.name != way))
