"""Cells whose KV is kept in eight bits answer as a runner that computes every prompt whole, wherever a prefix comes
from, and share no KV with cells that keep it as it is computed. That such a runner gives what the library's model gives
over rounded K and V is in ``tests/unit/worker/engine/test_rounded_kv.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.model_files import fingerprint
from shared.quality_gate import KV_METHOD, UNMEASURED, write_gate
from tests.cell import running_cell
from tests.checkpoints import make_checkpoint
from tests.cold_runs import ColdRuns
from tests.idle import settled, status_at
from tests.integration.exact_scenario import DEVICE_TOKENS, SCHEDULER, Scenario, survive_all
from tests.integration.test_tensor_parallel import FEW_TOKENS, READY_TIMEOUT_S, ask, prompt_of
from tests.integration.test_tensor_parallel import settings as group_settings
from tests.integration.test_tier_paths import (
    CHUNKED,
    COMPUTED,
    Document,
    copied_from_neighbour,
    found_again,
    found_in,
    storage_settings,
)
from tests.nats_server import NatsServer
from tests.rounded_reference import RoundedReference
from tests.unit.shared.quality_gates import quality_gate
from thermocline.supervisor.api import running

GATEWAY = {"kv_dtype": "fp8", "kv_gate": UNMEASURED}
WRITTEN_THROUGH = {"host_writes": "through", "prefetch_wait": "full", "max_batch_tokens": 90}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, ColdRuns]]]:
    """Checkpoints with what they answer."""
    folder = tmp_path_factory.mktemp("rounded")
    made = {family: make_checkpoint(family, folder / family) for family in ("llama", "qwen3", "mistral")}
    runs = {family: (path, ColdRuns(path, "fp8")) for family, path in made.items()}
    yield runs
    for _, cold in runs.values():
        cold.close()


def worker_settings(page_size: int) -> dict[str, Any]:
    """A small pool of rounded KV."""
    return {"page_size": page_size, "device_pages": DEVICE_TOKENS // page_size, "kv_dtype": "fp8"}


@pytest.mark.integration
@pytest.mark.parametrize(("family", "page_size"), [("llama", 1), ("qwen3", 16), ("mistral", 64)])
async def test_served_tokens_are_those_over_rounded_keys_and_values(
    family: str, page_size: int, served: dict[str, tuple[Path, ColdRuns]], nats_server: NatsServer
) -> None:
    """Alone and in chunks, on device and host hits, in mixed batches with cancelled neighbours, through preemption."""
    model, reference = served[family]
    async with running_cell(
        nats_server.url,
        model,
        worker_settings=worker_settings(page_size),
        scheduler_settings=SCHEDULER,
        gateway_settings=GATEWAY,
    ) as cell:
        await survive_all(Scenario(cell, reference, page_size))


@pytest.mark.integration
@pytest.mark.parametrize("page_size", [1, 64])
async def test_every_way_back_gives_the_same_answer(
    page_size: int, served: dict[str, tuple[Path, ColdRuns]], nats_server: NatsServer, tmp_path: Path
) -> None:
    """Computed in chunks, then found on the device, in host memory and on the disk, by a gateway with the gate of this
    model. What it refuses is in ``tests/unit/gateway/test_kv_gate.py``.
    """
    model, reference = served["llama"]
    gate = tmp_path / "gate.json"
    write_gate(quality_gate({1.0: 0.0}, method=KV_METHOD, model=fingerprint(model, kv_dtype="fp8")), gate)
    async with running_cell(
        nats_server.url,
        model,
        worker_settings=worker_settings(page_size),
        scheduler_settings=WRITTEN_THROUGH,
        storage_settings=storage_settings(tmp_path) | {"remote": ""},
        gateway_settings={"kv_dtype": "fp8", "kv_gate": str(gate)},
    ) as cell:
        document = Document(cell, reference, page_size)

        assert await document.ask() == COMPUTED
        await found_again(document, page_size)


@pytest.mark.integration
async def test_a_disk_is_shared_with_the_next_cell_and_with_none_that_does_not_round(
    served: dict[str, tuple[Path, ColdRuns]],
    nats_server: NatsServer,
    second_broker: NatsServer,
    tmp_path: Path,
) -> None:
    """A new cell goes on with the chunks of the last, which has found them in every way; one that keeps KV as it is
    computed finds nothing of them.
    """
    model, reference = served["llama"]
    saved = 0
    details: dict[str, int] = {}
    for server, kv_dtype in ((nats_server, "fp8"), (second_broker, "fp8"), (nats_server, "auto")):
        async with running_cell(
            server.url,
            model,
            worker_settings={"page_size": 16, "device_kv_bytes": 4 * 2**20, "kv_dtype": kv_dtype},
            scheduler_settings=WRITTEN_THROUGH,
            storage_settings=storage_settings(tmp_path) | {"remote": ""},
            gateway_settings=GATEWAY if kv_dtype == "fp8" else {},
        ) as cell:
            document = Document(cell, reference, 7)
            if kv_dtype == "auto":
                details = (await cell.complete(document.question(), 1))["usage"]["prompt_tokens_details"]
                continue
            await cell.hears_of_chunks(saved)
            assert await document.ask() == (found_in("disk", CHUNKED) if saved else COMPUTED)
            if not saved:
                await found_again(document, 16)
            saved = (await cell.settle()).chunks_in_all

    assert details["cached_tokens"] == 0


@pytest.mark.integration
async def test_a_prefix_is_copied_from_a_neighbours_device(
    served: dict[str, tuple[Path, ColdRuns]], nats_server: NatsServer
) -> None:
    """A burst on one document spreads over two workers; the second copies rounded pages instead of computing them."""
    model, reference = served["llama"]
    async with running_cell(
        nats_server.url,
        model,
        workers=2,
        worker_settings={**worker_settings(16), "device_pages": 2 * DEVICE_TOKENS // 16},
        scheduler_settings={"host_tier": False, "max_running": 2},
        gateway_settings=GATEWAY,
    ) as cell:
        await copied_from_neighbour(Document(cell, reference, 5), 16)


@pytest.mark.integration
@pytest.mark.timeout(1800)
def test_a_group_of_two_ranks_answers_the_same(served: dict[str, tuple[Path, ColdRuns]]) -> None:
    """Started by ``up``'s settings: computed, and found again on the devices of both ranks. Their sums are others than
    those of one, so the truth is the library's.
    """
    model, _ = served["llama"]
    reference = RoundedReference(model)
    prompt = prompt_of(reference, 100, FEW_TOKENS, seed=4)
    with running(group_settings(model, kv_dtype="fp8", kv_gate=UNMEASURED), ready_timeout_s=READY_TIMEOUT_S) as cell:
        first = asyncio.run(ask(cell, model, prompt, FEW_TOKENS))
        asyncio.run(settled(lambda: status_at(cell.nats_url), timeout_s=READY_TIMEOUT_S))
        second = asyncio.run(ask(cell, model, prompt, FEW_TOKENS))

    expected = reference.greedy(prompt, FEW_TOKENS, ignore_eos=True)
    assert (first.cached_tokens, first.token_ids) == (0, expected)
    assert (second.device_tokens, second.token_ids) == (96, expected)
