"""Served greedy answers are ``model.generate``'s for models whose attention is of another kind, too.

A file of its own beside ``test_exactness.py``: files are what test processes share out.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.integration.test_exactness import serve_exactly
from tests.nats_server import NatsServer
from tests.reference import Reference

SIZES = (1, 16)
KINDS = [
    *itertools.product(["gpt_oss", "llama4"], SIZES),
    ("roberta", 16),
    *itertools.product(["bloom", "indexed"], SIZES),
]
"""Sinks; chunks and queries scaled by position; positions of its own; attention of its own, and with index keys."""


@pytest.mark.integration
@pytest.mark.parametrize(("family", "page_size"), KINDS)
async def test_served_tokens_equal_generate(
    family: str, page_size: int, checkpoints: dict[str, tuple[Path, Reference]], nats_server: NatsServer
) -> None:
    """All that ``test_exactness.py`` does with a family."""
    await serve_exactly(*checkpoints[family], page_size, nats_server)
