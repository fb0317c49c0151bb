"""Models whose layers are not alike, by the kernels for GPUs in Triton's interpreter, beside the CPU's attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from services.worker.engine.gpu_attention import gpu_attention
from services.worker.engine.latent_attention import LatentAttention
from services.worker.engine.torch_attention import TorchAttention
from shared.errors import ConfigError
from tests.checkpoints import UNLIKE
from tests.unit.worker.engine import interpreted_planes
from tests.unit.worker.kernels.conftest import interpreter
from tests.unit.worker.kernels.interpreted import Interpreter
from tests.unit.worker.runners import LoadRunner

__all__ = ["interpreter"]


@pytest.mark.parametrize(
    ("family", "page_size", "way"),
    [*((family, 16, "triton") for family in UNLIKE), ("mla", 1, "triton"), ("mla", 16, "torch"), ("mimo", 1, "torch")],
)
def test_steps_give_the_logits_of_a_cpu(
    family: str, page_size: int, way: str, checkpoint: Callable[[str], Path], interpreter: Interpreter
) -> None:
    """Chunks that are absorbed and that are expanded, beside decode, write the same rows and see them all."""
    found, expected = interpreter.call(interpreted_planes.logits, checkpoint(family), page_size, way)

    assert len(found) == len(interpreted_planes.STEPS) + 1
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("family", UNLIKE)
def test_captured_steps_give_the_logits_of_ordinary_ones(
    family: str, checkpoint: Callable[[str], Path], interpreter: Interpreter
) -> None:
    """And write what they write, at the beginning of a page."""
    fault, found, expected, difference = interpreter.call(interpreted_planes.captured, checkpoint(family), [48])

    assert fault == ""
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)
    assert difference < 1e-4


def test_latents_are_attended_to_by_whatever_was_proven(load_runner: LoadRunner) -> None:
    """Without Triton by torch; FlashInfer, which has no such kernels, is refused by name."""
    pool = load_runner("mla").pool

    backend = gpu_attention(pool, "torch")

    assert isinstance(backend, LatentAttention)
    assert isinstance(gpu_attention(load_runner("mimo").pool, "torch"), TorchAttention)
    with pytest.raises(ConfigError, match="--attention flashinfer: it reads no latents; choose --attention triton"):
        gpu_attention(pool, "flashinfer")
