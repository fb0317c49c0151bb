"""Proof of collectives: the processes that prove for the ranks of a group join a group of their own."""

from __future__ import annotations

import torch

from services.worker.parallel.collectives import Collectives, join_store, separate_store
from services.worker.proving.cases import speed_of
from services.worker.proving.part import WrongResult
from services.worker.proving.table import ServedShape, Speed

JOIN_SECONDS = 45.0
"""Longest wait for the other ranks' processes, which start at the same time."""

SPEED_VALUES = 2**22


def prove_collectives(shape: ServedShape) -> Speed | None:
    """Prove that sums and joined tensors of all ranks are right, in the model's type and in float32.

    They are computed by NCCL on a GPU and by gloo on a CPU. The speed is that of a sum. The process stays in the group
    until it ends.
    """
    device = torch.device(shape.device)
    store = separate_store("proof", join_store(shape.store_port, JOIN_SECONDS))
    group = Collectives.join(store, shape.rank, shape.ranks, device, JOIN_SECONDS)
    for dtype in (torch.float32, getattr(torch, shape.computed_dtype)):
        # Small integers, which every type has exactly, whatever the order of the sum.
        values = torch.arange(64, dtype=dtype).remainder(7)
        found = group.sum((values * (shape.rank + 1)).to(device))
        if not torch.equal(found.cpu(), values * sum(range(1, shape.ranks + 1))):
            raise WrongResult(f"the sum over {shape.ranks} ranks is wrong in {dtype}")
        joined = group.concatenate((values + shape.rank).to(device))
        if not torch.equal(joined.cpu(), torch.cat([values + rank for rank in range(shape.ranks)])):
            raise WrongResult(f"tensors of {shape.ranks} ranks are joined wrongly in {dtype}")
    large = torch.zeros(SPEED_VALUES, dtype=torch.float32, device=device)
    return speed_of(lambda: group.sum(large), large.nbytes, shape.device)
