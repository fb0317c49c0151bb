"""The engine's checkpoints, and two Llamas with a K and a V for every head: one random, one whose heads agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.worker.detokenizer import Vocabulary
from services.worker.sparse_prefixes import ImportanceSettings
from tests.checkpoints import make_checkpoint
from tests.run_name import shm_prefix
from tests.unit.worker.engine.conftest import _one_thread, _own_cache
from tests.unit.worker.importance.sparse_cell import MakeCell, SparseCell
from tests.unit.worker.runners import LoadRunner, runners_of

__all__ = ["_one_thread", "_own_cache"]

HEAD_DIM = 16


def _agreeing(path: Path) -> Path:
    """Heads 1 and 2 look at what head 0 looks at, because they have its query and key weights; head 3 does not."""
    make_checkpoint("llama_mha", path)
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        for layer in model.model.layers:
            for weights in (layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight):
                for head in (1, 2):
                    weights[head * HEAD_DIM : (head + 1) * HEAD_DIM] = weights[:HEAD_DIM]
    for stale in path.glob("model*"):  # Shards, and the index that names them.
        stale.unlink()
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of one checkpoint: a family of the engine's, ``llama_mha`` or ``agreeing``."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            path = tmp_path_factory.mktemp(family)
            made[family] = _agreeing(path) if family == "agreeing" else make_checkpoint(family, path)
        return made[family]

    return get


@pytest.fixture
def load_runner(checkpoint_of: Callable[[str], Path]) -> Iterator[LoadRunner]:
    """Load runners by family; their pools are closed at the end of the test."""
    with runners_of(checkpoint_of, shm_prefix("tiny")) as load:
        yield load


@pytest.fixture
def make_cell(load_runner: LoadRunner, checkpoint_of: Callable[[str], Path]) -> Iterator[MakeCell]:
    """Cells by family and page size, closed at the end of the test."""
    made: list[SparseCell] = []

    def make(family: str, page_size: int = 16, importance: ImportanceSettings | None = None, **more: Any) -> SparseCell:
        words = Vocabulary.from_directory(checkpoint_of(family))
        made.append(SparseCell(load_runner(family, page_size=page_size), words, importance, **more))
        return made[-1]

    yield make
    for each in made:
        each.driven.close()
