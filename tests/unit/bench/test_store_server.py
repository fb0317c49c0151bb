"""The benchmarks' object store speaks what a storage asks of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.store_server import Bucket, Latency, serve, tls_context
from services.storage.backends.object_store import open_remote
from services.storage.config import StorageConfig
from tests.certificates import Authority
from tests.chunk_makers import make_chain

CHAIN = make_chain(8, seed=1)
NBYTES = CHAIN[0].blob.nbytes


def is_stale(nbytes: int, front: bytes) -> bool:
    """Whatever is there does not belong there."""
    return True


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_storage_writes_finds_reads_and_deletes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scheme: str
) -> None:
    """Conditional writes, replacements, listings from a name on, ranges, and deletions of many."""
    context = None
    if scheme == "https":
        authority = Authority(tmp_path)
        context = tls_context(*authority.issue("store"))
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca))
    server = await serve(Bucket(), Latency(), tls=context)
    port = server.sockets[0].getsockname()[1]
    for name, value in {
        "AWS_ENDPOINT_URL": f"{scheme}://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
    }.items():
        monkeypatch.setenv(name, value)
    store = open_remote(StorageConfig(remote="s3://bucket/prefix"))
    assert store is not None
    keys = sorted(chunk.key for chunk in CHAIN)

    stored = [await store.store(chunk.key, bytes(chunk.blob), is_stale, timeout_s=5.0) for chunk in CHAIN[1:]]
    stored.append(await store.store(CHAIN[1].key, bytes(CHAIN[1].blob), is_stale, timeout_s=5.0))
    sizes = await store.sizes(keys)
    bodies = [await store.fetch(chunk.key, NBYTES, timeout_s=5.0) for chunk in CHAIN]
    await store.remove(keys[:6], timeout_s=5.0)
    left = await store.sizes(keys)
    store.close()
    server.close()

    assert stored == ["new"] * 7 + ["replaced"]
    assert sizes == [0 if key == CHAIN[0].key else NBYTES for key in keys]
    assert bodies == [None, *(chunk.blob for chunk in CHAIN[1:])]
    assert left[:6] == [0] * 6
