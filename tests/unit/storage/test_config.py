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


@pytest.mark.parametrize(("written", "bytes_per_s"), [("500MB", 5e8), ("1GiB", 2**30), ("0", 0), (None, 0)])
def test_the_limit_of_the_disk_is_a_size_a_second(written: str | None, bytes_per_s: float) -> None:
    """It may be written with a unit, and by default there is none."""
    config = load(StorageConfig, "storage", flags={"disk_read_bytes_per_s": written})

    assert config.disk_read_bytes_per_s == bytes_per_s


def test_every_fault_is_reported_at_once() -> None:
    """Two bad names and a bad level come in one error."""
    with pytest.raises(ConfigError) as caught:
        load(StorageConfig, "storage", flags={"id": "a.b", "shm_prefix": "x/y", "log_level": "loud"})

    assert all(word in caught.value.message for word in ("--id", "--shm-prefix", "--log-level"))


def test_hidden_states_are_kept_unless_told_otherwise() -> None:
    """Its memory may be written with units, or be none at all."""
    assert load(StorageConfig, "storage", flags={}).hidden_bytes == 256 * 2**20
    assert load(StorageConfig, "storage", flags={"hidden_bytes": "0"}).hidden_bytes == 0
    assert load(StorageConfig, "storage", flags={"hidden_bytes": "64MiB"}).hidden_bytes == 64 * 2**20
    with pytest.raises(ConfigError, match="hidden-bytes"):
        load(StorageConfig, "storage", flags={"hidden_bytes": "-1"})
