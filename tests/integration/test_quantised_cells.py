"""A cell over a quantised checkpoint answers as ``model.generate`` does over the weights that it means."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.integration.test_exactness import serve_exactly
from tests.nats_server import NatsServer
from tests.quantised_checkpoints import mxfp4_checkpoint, quantise_checkpoint
from tests.reference import Reference


@pytest.mark.integration
@pytest.mark.parametrize(("scheme", "page_size", "ranks"), [("awq", 16, 1), ("fp8_blocks", 32, 1), ("gptq", 16, 2)])
async def test_quantised_weights_are_served_exactly(
    scheme: str, page_size: int, ranks: int, tmp_path: Path, nats_server: NatsServer
) -> None:
    """From int4 codes where kernels compute with such, and dequantised, from fp8 and by ranks: on device and host hits,
    in mixed batches, and through preemption.
    """
    quantised, plain = quantise_checkpoint(make_checkpoint("llama", tmp_path / "model"), tmp_path, scheme)

    await serve_exactly(quantised, Reference(plain), page_size, nats_server, ranks=ranks)


@pytest.mark.integration
async def test_experts_in_mxfp4_are_served_exactly(tmp_path: Path, nats_server: NatsServer) -> None:
    """As gpt-oss is published: with experts of four bits, sinks and windows."""
    quantised, plain = mxfp4_checkpoint(make_checkpoint("gpt_oss", tmp_path / "model"), tmp_path)

    await serve_exactly(quantised, Reference(plain), 16, nats_server)
