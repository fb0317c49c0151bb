"""Fixtures for every test: a quiet, offline process and a real NATS server."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Set before any library that reads them is imported.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest

from tests.nats_server import NatsServer


@pytest.fixture(autouse=True, scope="session")
def _own_folder_of_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Cells of this process write themselves down in a folder of its own: a start clears up after every dead cell
    that it finds, and those of another test process are not its to find.
    """
    with pytest.MonkeyPatch.context() as patch:
        folder = str(tmp_path_factory.mktemp("temporary"))
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(scope="session")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a nats-server with JetStream that all tests of this run share, streams included."""
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    server.start()
    try:
        yield server.url
    finally:
        server.stop()


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A running nats-server of this test's own, with no streams yet, which the test may kill and start again."""
    server = NatsServer(tmp_path / "nats")
    server.start()
    try:
        yield server
    finally:
        server.stop()
