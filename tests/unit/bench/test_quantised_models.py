"""Quantised copies for measurements are real checkpoints, which round the weights that they are made of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.quantised_models import quantise
from services.worker.engine.model_loading import load_config, load_model
from services.worker.engine.quantised.codes import codes_of
from tests.checkpoints import make_checkpoint
from tests.present import present


@pytest.mark.parametrize(("bits", "group"), [(8, None), (8, 32), (4, 32)])
def test_copies_are_read_as_codes_near_the_weights(bits: int, group: int | None, tmp_path: Path) -> None:
    """Each weight is off by half a step of its group at most."""
    plain = make_checkpoint("llama", tmp_path / "plain", dtype="bfloat16")

    copy = quantise(plain, tmp_path / "copy", bits=bits, group=group)

    source = load_model(plain, load_config(plain), dtype="float32", device="cpu")
    model = load_model(copy, load_config(copy), dtype="float32", device="cpu", keeps_codes=True)
    for name, module in model.named_modules():
        if not name.endswith("_proj"):
            continue
        codes = present(codes_of(module))
        step = codes.scales.float().repeat_interleave(codes.group, 1)
        off = (module.weight - source.get_submodule(name).weight).abs()
        assert (codes.bits, codes.group) == (bits, group or codes.inputs)
        assert torch.all(off <= step * 0.501)
