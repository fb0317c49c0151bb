"""Every way of every part passes its proof on this GPU."""

from __future__ import annotations

import pytest
import torch

from services.worker.proving.device import proofs_of
from services.worker.proving.parts import parts_of
from thermocline.doctor.gpu import DEFAULT_SHAPE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def test_every_way_of_every_part_passes() -> None:
    """As ``thermocline doctor --gpu`` tries them; a way that does not is named with its fault, unless it is absent."""
    table = proofs_of(DEFAULT_SHAPE, parts_of(), proves_all=True)

    assert {
        f"{proof.part} by {each.way}": each.fault
        for proof in table.proofs
        for each in proof.failed
        if not each.is_absent
    } == {}
    assert table.device
