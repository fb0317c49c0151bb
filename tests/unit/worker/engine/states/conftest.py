"""Tiny checkpoints of models whose layers carry states, as the library runs them and as a worker does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.reference import Reference
from tests.run_name import shm_prefix
from tests.state_checkpoints import make_state_checkpoint
from tests.unit.worker.runners import LoadRunner, runners_of


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of one random checkpoint of a family, made once."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = make_state_checkpoint(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get


@pytest.fixture(scope="session")
def truth(checkpoint: Callable[[str], Path]) -> Callable[[str], Reference]:
    """Greedy answers of the library's own model, generated once for all cases."""
    made: dict[str, Reference] = {}

    def get(family: str) -> Reference:
        if family not in made:
            made[family] = Reference(checkpoint(family))
        return made[family]

    return get


@pytest.fixture
def load_runner(checkpoint: Callable[[str], Path]) -> Iterator[LoadRunner]:
    """Load runners by family; their pools are closed after the test."""
    with runners_of(checkpoint, shm_prefix("states")) as load:
        yield load
