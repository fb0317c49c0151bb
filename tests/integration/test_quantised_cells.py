"""A cell over a quantised checkpoint answers as ``model.generate`` does over the weights that it means."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.integration.test_exactness import serve_exactly
from tests.nats_server import NatsServer
from tests.quantised_checkpoints import quantise_checkpoint
from tests.reference import Reference


@pytest.mark.integration
@pytest.mark.parametrize(("scheme", "page_size"), [("awq", 16), ("fp8_blocks", 32)])
async def test_quantised_weights_are_served_exactly(
    scheme: str, page_size: int, tmp_path: Path, nats_server: NatsServer
) -> None:
    """From int4 codes where kernels compute with such, and dequantised from fp8: on device and host hits, in mixed
    batches, and through preemption.
    """
    quantised, plain = quantise_checkpoint(make_checkpoint("llama", tmp_path / "model"), tmp_path, scheme)

    await serve_exactly(quantised, Reference(plain), page_size, nats_server)
