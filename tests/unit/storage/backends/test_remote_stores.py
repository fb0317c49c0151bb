"""Clients of object stores, from settings and environment."""

from __future__ import annotations

from pathlib import Path

import pytest
from obstore.store import AzureStore, GCSStore, LocalStore, MemoryStore, S3Store

from services.storage.backends.remote_location import parse_remote
from services.storage.backends.remote_stores import connect
from shared.errors import ConfigError


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what a test sets counts."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_ALLOW_HTTP", "AZURE_STORAGE_ACCOUNT_NAME"):
        monkeypatch.delenv(name, raising=False)


def test_a_directory_is_made(tmp_path: Path) -> None:
    """The directory of a file URL need not be there."""
    store = connect(parse_remote((tmp_path / "a" / "b").as_uri()), timeout_s=1.0, environ={})

    assert isinstance(store, LocalStore)
    assert (tmp_path / "a" / "b").is_dir()


def test_a_directory_that_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    """A file in its place is told at the start."""
    (tmp_path / "a").write_text("")

    with pytest.raises(ConfigError, match="--remote file://"):
        connect(parse_remote((tmp_path / "a" / "b").as_uri()), timeout_s=1.0, environ={})


def test_memory_needs_nothing() -> None:
    """It is made without settings."""
    assert isinstance(connect(parse_remote("memory://"), timeout_s=1.0, environ={}), MemoryStore)


def test_a_store_that_nobody_answers_for_is_no_fault_of_the_settings() -> None:
    """Making a client asks nothing of the server."""
    environ = {"AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_ALLOW_HTTP": "true"}

    store = connect(parse_remote("s3://bucket/p"), timeout_s=1.0, environ=environ)

    assert isinstance(store, S3Store)
    assert store.prefix == "p"


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"])
def test_an_endpoint_without_encryption_must_be_meant(variable: str) -> None:
    """http:// needs the provider's own word for it, and the error names both variables."""
    with pytest.raises(ConfigError, match=f"{variable} is not encrypted.*AWS_ALLOW_HTTP=true"):
        connect(parse_remote("s3://bucket"), timeout_s=1.0, environ={variable: "http://minio:9000"})


def test_what_the_library_finds_wrong_is_a_config_error() -> None:
    """Azure without an account cannot work."""
    with pytest.raises(ConfigError, match="Account must be specified"):
        connect(parse_remote("az://container"), timeout_s=1.0, environ={})


def test_each_cloud_has_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bucket and prefix arrive at the client of the provider whose scheme it is."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")

    azure, google = (
        connect(parse_remote(f"{scheme}://bucket/p"), timeout_s=1.0, environ={}) for scheme in ("az", "gs")
    )

    assert isinstance(azure, AzureStore)
    assert isinstance(google, GCSStore)
    assert azure.prefix == google.prefix == "p"
