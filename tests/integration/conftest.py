"""Fixtures of several integration tests."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.memory import unlink_all
from tests.checkpoints import make_checkpoint
from tests.nats_server import NatsServer
from tests.reference import Reference
from tests.run_name import RUN
from tests.state_checkpoints import STATE_FAMILIES, make_state_checkpoint


class Checkpoints(dict[str, tuple[Path, Reference]]):
    """A checkpoint and its reference by family, made when first asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, family: str) -> tuple[Path, Reference]:
        make = make_state_checkpoint if family in STATE_FAMILIES else make_checkpoint
        made = make(family, self._folder / family)
        self[family] = made, Reference(made)
        return self[family]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """The checkpoints of this run: what Hugging Face once generated, no other test generates again."""
    return Checkpoints(tmp_path_factory.mktemp("families"))


@pytest.fixture
def second_broker(tmp_path: Path) -> Iterator[NatsServer]:
    """A broker that knows nothing of the first one's streams."""
    with NatsServer(tmp_path / "second-broker") as server:
        yield server


@pytest.fixture
def prefix() -> Iterator[str]:
    """A prefix for shared segments that nobody else uses; what is left of it goes at the end."""
    name = f"{RUN}-{secrets.token_hex(4)}"
    yield name
    unlink_all(name)
