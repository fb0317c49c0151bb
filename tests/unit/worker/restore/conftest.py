"""Runners and cells of the families whose hidden states are restored, llama_mha (a K and a V for every head) among
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.worker.detokenizer import Vocabulary
from tests.checkpoints import make_checkpoint
from tests.run_name import shm_prefix
from tests.unit.worker.engine.conftest import _one_thread, _own_cache
from tests.unit.worker.restore.hidden_pages import hidden_geometry
from tests.unit.worker.restore.restoring_cell import Cell, MakeCell
from tests.unit.worker.runners import LoadRunner, runners_of

__all__ = ["_one_thread", "_own_cache"]


@pytest.fixture(scope="session")
def restore_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of one random checkpoint of a family of :data:`tests.unit.worker.restore.saved.FAMILIES`."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = make_checkpoint(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get


@pytest.fixture
def load_runner(restore_checkpoint: Callable[[str], Path]) -> Iterator[LoadRunner]:
    """Load runners by family; their pools are closed at the end of the test."""
    with runners_of(restore_checkpoint, shm_prefix("restore")) as load:
        yield load


@pytest.fixture
def make_cell(load_runner: LoadRunner, restore_checkpoint: Callable[[str], Path]) -> Iterator[MakeCell]:
    """A cell of a family; ``form`` is (absent, from_hidden), by default all layers from hidden states."""
    made: list[Cell] = []

    def make(
        family: str = "llama_mha", form: tuple[int, int] | None = None, *, page_size: int = 16, dtype: str = "auto",
        **more: Any,
    ) -> Cell:  # fmt: skip
        runner = load_runner(family, page_size=page_size, dtype=dtype)
        kv = runner.geometry
        geometry = hidden_geometry(kv, *(form or (0, kv.layers)), int(runner.model.config.hidden_size))
        words = Vocabulary.from_directory(restore_checkpoint(family))
        made.append(Cell(runner, words, geometry, **more))
        return made[-1]

    yield make
    for cell in made:
        cell.driven.close()
