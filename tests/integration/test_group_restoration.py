"""Whole cells over HTTP whose worker is a group of two ranks: greedy answers are the same when a prefix comes back from
hidden states, read in disjoint shards, or from a neighbour's devices. Every answer is compared with Hugging Face's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cell import running_cell
from tests.integration.test_restoration_paths import hidden_cell, settings
from tests.integration.test_tier_paths import (
    CHUNKED,
    COMPUTED,
    DEVICE_TOKENS,
    Document,
    copied_from_neighbour,
    found_in,
)
from tests.nats_server import NatsServer
from tests.reference import Reference

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No profile of this machine's user is read: workers measure at their first start."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def of_ranks(folder: Path, ranks: int, form: str) -> dict[str, Any]:
    """Settings of a cell whose worker has so many ranks and measures for itself what restoring costs."""
    config = settings(folder / "none", folder, 16, form)
    config["worker_settings"] |= {"profile": "", "measure_at_start": True, "tensor_parallel": ranks}
    return config


@pytest.mark.parametrize(("form", "ranks"), [("0/3/0", (2, 1)), ("1/1/1", (2, 2)), ("0/2/1", (1, 2))])
async def test_groups_and_single_workers_restore_what_the_others_kept(
    form: str,
    ranks: tuple[int, int],
    checkpoints: dict[str, tuple[Path, Reference]],
    nats_server: NatsServer,
    second_broker: NatsServer,
    tmp_path: Path,
) -> None:
    """Within a cell and in the next one: hidden chunks know nothing of ranks."""
    model, reference = checkpoints["llama_mha"]
    async with hidden_cell(nats_server.url, model, of_ranks(tmp_path, ranks[0], form)) as cell:
        document = Document(cell, reference, 7)
        usage = [await document.ask()]
        await cell.flush("device", "host")
        usage.append(await document.ask())
        saved = (await cell.settle()).chunks_in_all
    async with hidden_cell(second_broker.url, model, of_ranks(tmp_path, ranks[1], form)) as cell:
        await cell.hears_of_chunks(saved)
        usage.append(await Document(cell, reference, 7).ask())

    restored = found_in("hidden", CHUNKED)
    assert usage == [COMPUTED, restored, restored]


async def test_a_group_computes_what_it_cannot_trust(
    checkpoints: dict[str, tuple[Path, Reference]], nats_server: NatsServer, tmp_path: Path
) -> None:
    """Chunks on the disk are gone: the answer is right, and hidden states are kept anew."""
    model, reference = checkpoints["llama_mha"]
    async with hidden_cell(nats_server.url, model, of_ranks(tmp_path, 2, "0/3/0")) as cell:
        document = Document(cell, reference, 3)
        await document.ask()
        await cell.flush("device", "host")
        for file in (tmp_path / "disk-a").rglob("*.chunk"):
            file.unlink()

        assert await document.ask() == COMPUTED
        await cell.flush("device", "host")
        found = await document.ask()

    assert found.get("hidden_tokens", 0) > 0


async def test_a_group_and_a_single_worker_of_its_node_lend_pages_to_one_another(
    checkpoints: dict[str, tuple[Path, Reference]], nats_server: NatsServer
) -> None:
    """A burst on one document spreads over both; whoever is second copies it instead of computing it."""
    model, reference = checkpoints["llama_mha"]
    worker = {"page_size": 16, "device_pages": 2 * DEVICE_TOKENS // 16}
    async with running_cell(
        nats_server.url,
        model,
        workers=2,
        worker_settings=worker,
        first_worker={"tensor_parallel": 2},
        scheduler_settings={"host_tier": False, "max_running": 2},
    ) as cell:
        await copied_from_neighbour(Document(cell, reference, 5), 16)
