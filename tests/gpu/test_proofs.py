"""Every way of every part passes its proof on this GPU."""

from __future__ import annotations

import msgspec
import pytest
import torch

from services.worker.proving.device import proofs_of
from services.worker.proving.parts import parts_of
from services.worker.proving.table import HeadsShape, LatentsShape, ServedShape
from thermocline.doctor.gpu import DEFAULT_SHAPE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


UNLIKE = msgspec.structs.replace(
    DEFAULT_SHAPE,
    geometry=msgspec.structs.replace(DEFAULT_SHAPE.geometry, kv_heads=1, head_dim=576),
    heads=(
        HeadsShape(query_heads=16, kv_heads=2, head_dim=192, row_values=576),
        HeadsShape(query_heads=8, kv_heads=1, head_dim=512, row_values=576),
    ),
    latents=(
        LatentsShape(query_heads=16, rank=512, rope=64, row_values=576),
        LatentsShape(query_heads=128, rank=512, rope=64, row_values=576),
    ),
)
"""Pages of layers that are not alike: latents of DeepSeek's sizes, K and V as wide as MiMo's and Gemma 4's."""


@pytest.mark.parametrize("shape", [DEFAULT_SHAPE, UNLIKE], ids=["alike", "unlike"])
def test_every_way_of_every_part_passes(shape: ServedShape) -> None:
    """As ``thermocline doctor --gpu`` tries them; a way that does not is named with its fault, unless it is absent."""
    table = proofs_of(shape, parts_of(), proves_all=True)

    assert {
        f"{proof.part} by {each.way}": each.fault
        for proof in table.proofs
        for each in proof.failed
        if not each.is_absent
    } == {}
    assert table.device
