"""Fixtures for every test: a quiet, offline process and a real NATS server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# Set before any library that reads them is imported.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest

from tests.nats_server import NatsServer


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
