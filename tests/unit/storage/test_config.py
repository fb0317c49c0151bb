"""Settings of a storage."""

import pytest

from services.storage.config import StorageConfig
from shared.config import load
from shared.errors import ConfigError


def test_sizes_and_servers_are_read_from_flags() -> None:
    """Sizes may be written with units, and servers as a list."""
    flags = {"host_kv_bytes": "64MiB", "disk_read_bytes_per_s": "500MB", "nats": "nats://a:1, nats://b:2"}
    config = load(StorageConfig, "storage", flags=flags)

    assert (config.host_kv_bytes, config.disk_read_bytes_per_s) == (64 * 2**20, 500_000_000)
    assert config.nats == ("nats://a:1", "nats://b:2")
    assert config.node_name


def test_every_fault_is_reported_at_once() -> None:
    """Two bad names, a bad level and blocks of no power of two come in one error."""
    flags = {"id": "a.b", "shm_prefix": "x/y", "log_level": "loud", "sparse_block_tokens": "48"}
    with pytest.raises(ConfigError) as caught:
        load(StorageConfig, "storage", flags=flags)

    words = ("--id", "--shm-prefix", "--log-level", "--sparse-block-tokens 48 is not a power of two")
    assert all(word in caught.value.message for word in words)


@pytest.mark.parametrize("tokens", [0, 1, 64])
def test_blocks_may_have_any_power_of_two_of_tokens(tokens: int) -> None:
    """All of these divide every chunk; 0 leaves it to the rule."""
    assert StorageConfig(sparse_block_tokens=tokens).sparse_block_tokens == tokens


def test_hidden_states_are_kept_unless_told_otherwise() -> None:
    """Its memory may be written with units, or be none at all."""
    assert load(StorageConfig, "storage", flags={}).hidden_bytes == 256 * 2**20
    assert load(StorageConfig, "storage", flags={"hidden_bytes": "0"}).hidden_bytes == 0
    assert load(StorageConfig, "storage", flags={"hidden_bytes": "64MiB"}).hidden_bytes == 64 * 2**20
    with pytest.raises(ConfigError, match="hidden-bytes"):
        load(StorageConfig, "storage", flags={"hidden_bytes": "-1"})
