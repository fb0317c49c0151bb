"""Groups of two ranks that serve one model of each kind: greedy answers are ``model.generate``'s, and what is on a disk
is that of single workers.

Every case is a whole cell behind its HTTP API, with real ranks. Tokens really computed are counted at the worker.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cell import running_cell
from tests.checkpoints import make_checkpoint
from tests.integration.exact_scenario import DEVICE_TOKENS, SCHEDULER, Scenario, survive_all
from tests.integration.test_tier_paths import DOCUMENT_TOKENS, Document, storage_settings
from tests.nats_server import NatsServer
from tests.reference import Reference
from tests.state_checkpoints import make_state_checkpoint

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]

KINDS: dict[str, Callable[..., Path]] = {
    "gpt_oss": make_checkpoint,
    "mla": make_checkpoint,
    "gemma4": make_checkpoint,
    "mimo": make_checkpoint,
    "qwen3_next": make_state_checkpoint,
    "bamba": make_state_checkpoint,
    "lfm2": make_state_checkpoint,
}
"""Sinks; latents; other heads from layer to layer; all of that but latents; linear attention, a state-space model and
short convolutions.
"""


@pytest.fixture(scope="session")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Reference]]:
    """The checkpoints of this run with what the library says of them."""
    folder = tmp_path_factory.mktemp("kinds")
    made = {family: make(family, folder / family) for family, make in KINDS.items()}
    return {family: (path, Reference(path)) for family, path in made.items()}


def worker_of(ranks: int, page_size: int) -> dict[str, Any]:
    """Settings of a worker whose device holds little."""
    return {"tensor_parallel": ranks, "page_size": page_size, "device_pages": DEVICE_TOKENS // page_size}


@pytest.mark.parametrize(("family", "page_size"), [("gpt_oss", 16), ("mla", 16), ("gemma4", 16), ("qwen3_next", 16)])
async def test_served_tokens_equal_generate(
    family: str, page_size: int, kinds: dict[str, tuple[Path, Reference]], nats_server: NatsServer
) -> None:
    """Alone and in chunks, on device and host hits, in mixed batches with cancelled neighbours, through preemption."""
    model, reference = kinds[family]

    async with running_cell(
        nats_server.url, model, worker_settings=worker_of(2, page_size), scheduler_settings=SCHEDULER
    ) as cell:
        await survive_all(Scenario(cell, reference, page_size))


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("family", KINDS)
async def test_a_disk_is_shared_with_single_workers(
    family: str,
    before: int,
    after: int,
    kinds: dict[str, tuple[Path, Reference]],
    nats_server: NatsServer,
    second_broker: NatsServer,
    tmp_path: Path,
) -> None:
    """What one cell left is read by the next, in which all processes and the number of ranks are others; then prefixes
    are found on the device and in host memory.
    """
    model, reference = kinds[family]
    cached, chunked = DOCUMENT_TOKENS // 16 * 16, DOCUMENT_TOKENS // 64 * 64
    whole, saved = DOCUMENT_TOKENS + 9, 0
    found = []
    for server, ranks in ((nats_server, before), (second_broker, after)):
        async with running_cell(
            server.url,
            model,
            worker_settings=worker_of(ranks, 16),
            scheduler_settings={"host_writes": "through", "prefetch_wait": "full", "max_batch_tokens": 90},
            storage_settings=storage_settings(tmp_path) | {"remote": ""},
        ) as cell:
            await cell.hears_of_chunks(saved)
            document = Document(cell, reference, 7)
            asked = [await document.ask(), await document.ask()]
            await cell.flush("device")
            found.append([*asked, await document.ask()])
            saved = (await cell.settle()).chunks_in_all

    on_device = {"cached_tokens": cached, "device_tokens": cached, "computed": whole - cached}
    on_host = {"cached_tokens": cached, "host_tokens": cached, "computed": whole - cached}
    from_disk = {"cached_tokens": chunked, "disk_tokens": chunked, "computed": whole - chunked}
    assert found == [[{"computed": whole}, on_device, on_host], [from_disk, on_device, on_host]]
