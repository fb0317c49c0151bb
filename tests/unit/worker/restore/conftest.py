"""Runners and cells of the families whose hidden states are restored, llama_mha (a K and a V for every head) among
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.worker.detokenizer import Vocabulary
from tests.unit.worker.engine.conftest import _one_thread, _own_cache
from tests.unit.worker.importance.conftest import checkpoint_of, load_runner
from tests.unit.worker.restore.hidden_pages import hidden_geometry
from tests.unit.worker.restore.restoring_cell import Cell, MakeCell
from tests.unit.worker.runners import LoadRunner

__all__ = ["_one_thread", "_own_cache", "checkpoint_of", "load_runner"]


@pytest.fixture
def make_cell(load_runner: LoadRunner, checkpoint_of: Callable[[str], Path]) -> Iterator[MakeCell]:
    """A cell of a family; ``form`` is (absent, from_hidden), by default all layers from hidden states."""
    made: list[Cell] = []

    def make(
        family: str = "llama_mha", form: tuple[int, int] | None = None, *, page_size: int = 16, dtype: str = "auto",
        **more: Any,
    ) -> Cell:  # fmt: skip
        runner = load_runner(family, page_size=page_size, dtype=dtype)
        kv = runner.geometry
        geometry = hidden_geometry(kv, *(form or (0, kv.layers)), int(runner.model.config.hidden_size))
        words = Vocabulary.from_directory(checkpoint_of(family))
        made.append(Cell(runner, words, geometry, **more))
        return made[-1]

    yield make
    for cell in made:
        cell.driven.close()
