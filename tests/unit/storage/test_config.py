"""Settings of a storage."""

import pytest

from services.storage.config import StorageConfig
from shared.config import load
from shared.errors import ConfigError


def test_sizes_and_servers_are_read_from_flags() -> None:
    """Sizes may be written with units, and servers as a list."""
    config = load(StorageConfig, "storage", flags={"host_kv_bytes": "64MiB", "nats": "nats://a:1, nats://b:2"})

    assert config.host_kv_bytes == 64 * 2**20
    assert config.nats == ("nats://a:1", "nats://b:2")
    assert config.node_name


def test_every_fault_is_reported_at_once() -> None:
    """Two bad names and a bad level come in one error."""
    with pytest.raises(ConfigError) as caught:
        load(StorageConfig, "storage", flags={"id": "a.b", "shm_prefix": "x/y", "log_level": "loud"})

    assert all(word in caught.value.message for word in ("--id", "--shm-prefix", "--log-level"))
