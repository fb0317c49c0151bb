"""Greedy answers are the same when a prefix comes back from hidden states, from KV of some layers, or from both.

Each case is a whole cell behind its HTTP API. Usage says how much was restored, the worker says how many tokens it
computed, and every answer is compared with Hugging Face's own, token for token.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from services.storage import media
from services.worker.engine.model_runner import ModelRunner
from services.worker.kv.movers.choice import machine_here
from services.worker.kv.profile import Profile, write_profile
from services.worker.restore import measured_costs
from services.worker.restore.figures import RestorationFigure, RestorationProfile
from services.worker.restore.measured_costs import prove_projection
from services.worker.restore.profile import subject
from services.worker.restore.refusals import HiddenStatesUnsupported
from shared.disk_speed import DiskFigures, remember
from shared.messages.pools import HIDDEN, KvGeometry
from tests.cell import Cell, running_cell
from tests.checkpoints import VOCAB_SIZE
from tests.integration.test_tier_paths import (
    CHUNKED,
    COMPUTED,
    DEVICE_TOKENS,
    DOCUMENT_TOKENS,
    Document,
    damage,
    found_in,
)
from tests.nats_server import NatsServer
from tests.reference import Reference
from tests.run_name import shm_prefix

pytestmark = pytest.mark.integration

RESTORED = found_in("hidden", CHUNKED)
FIGURE = RestorationFigure(tokens=256, io_hidden_s=1e-7, io_kv_s=2e-7, compute_hidden_s=1e-7, compute_token_s=1e-3)
"""Computing is what takes longest, so that a planner restores whatever it can."""

CASES = [
    ("llama_mha", 1, "0/3/0"),
    ("llama_mha", 32, "1/1/1"),
    ("opt", 16, "1/2/0"),
    ("qwen2", 16, "0/3/0"),
    ("qwen3", 16, "1/2/0"),
    ("mistral", 16, "0/3/0"),
]
KEPT = [("llama_mha", 64, "0/2/1"), ("llama", 16, "1/0/2")]
"""OPT and llama_mha have as many KV heads as query heads, the others grouped queries."""


def described(model: Path, page_size: int) -> RestorationProfile:
    """What a profile of this model on this machine would be of, without figures."""
    runner = ModelRunner.load(
        model, dtype="float32", device="cpu", page_size=page_size, device_kv_bytes=None, pages=16, threads=1,
        shm_prefix=shm_prefix("costs"),
    )  # fmt: skip
    try:
        return subject(runner, prove_projection(runner), threads=1)
    finally:
        runner.close()


def write_costs(
    model: Path, path: Path, page_size: int, *, model_bytes: int = 0, figure: RestorationFigure = FIGURE
) -> Path:
    """A profile of this model on this machine, or of one with so many ``model_bytes``."""
    here = described(model, page_size)
    measured: dict[str, Any] = {"figures": (figure,)} | ({"model_bytes": model_bytes} if model_bytes else {})
    profile = Profile(
        made="2026-01-01",
        machine=machine_here(),
        software={},
        geometry=KvGeometry(layers=3, kv_heads=2, head_dim=16, page_size=page_size, dtype="float32"),
        tokens=512,
        memcpy_bytes_per_s=1e9,
        checksum_bytes_per_s=1e9,
        matmul_flops_per_s=1e9,
        restorations=(structs.replace(here, **measured),),
    )
    write_profile(profile, path)
    return path


def disk_figures(directory: Path) -> DiskFigures:
    """Of a disk that gives 1 GB/s, whatever this machine has."""
    speeds = {"write_bytes_per_s": 1e9, "read_bytes_per_s": 1e9, "small_read_bytes_per_s": 1e9}
    return DiskFigures(directory=str(directory), is_direct=True, **speeds)


def settings(profile: Path, folder: Path, page_size: int, form: str, **scheduler: Any) -> dict[str, Any]:
    """Of a cell that keeps hidden states of this form on a disk in ``folder``."""
    (folder / "disk-a").mkdir(exist_ok=True)
    remember(disk_figures(folder / "disk-a"))
    return {
        "worker_settings": {
            "page_size": page_size,
            "device_pages": DEVICE_TOKENS // page_size,
            "profile": str(profile),
        },
        "scheduler_settings": {"prefetch_wait": "full", "hidden_form": form, "restoring": "hidden"} | scheduler,
        "storage_settings": {
            "disk_dir": (str(folder / "disk-a"),),
            "disk_kv_bytes": 64 * 2**20,
            "hidden_bytes": 8 * 2**20,
        },
    }


@asynccontextmanager
async def hidden_cell(nats_url: str, model: Path, config: dict[str, Any]) -> AsyncIterator[Cell]:
    """A cell that has a hidden pool; what is asked before there is one is kept as KV."""
    async with running_cell(nats_url, model, **config) as cell:
        async with asyncio.timeout(60):
            while not any(pool.tier == HIDDEN for pool in (await cell.status()).pools):
                await asyncio.sleep(0.02)
        yield cell


async def computed_and_restored(document: Document, page_size: int) -> None:
    """Kept as hidden states when it is computed, then restored from the disk but for what fills no chunk."""
    on_device = found_in("device", DOCUMENT_TOKENS // page_size * page_size)

    assert await document.ask() == COMPUTED
    assert await document.ask() == on_device
    await document.cell.flush("device", "host")
    assert await document.ask() == RESTORED
    # What was restored is cached like anything that was computed.
    assert await document.ask() == on_device


@pytest.mark.parametrize(("family", "page_size", "form"), CASES)
async def test_a_prefix_is_restored_from_hidden_states(
    family: str,
    page_size: int,
    form: str,
    checkpoints: dict[str, tuple[Path, Reference]],
    nats_server: NatsServer,
    tmp_path: Path,
) -> None:
    """Within one cell, whatever the family, the size of pages and the layers that are restored so."""
    model, reference = checkpoints[family]
    profile = write_costs(model, tmp_path / "profile.json", page_size)
    async with hidden_cell(nats_server.url, model, settings(profile, tmp_path, page_size, form)) as cell:
        await computed_and_restored(Document(cell, reference, page_size), page_size)


@pytest.mark.parametrize("restoring", ["planned", "hidden"])
async def test_a_conversation_is_restored_behind_the_holes_of_its_turns(
    restoring: str, checkpoints: dict[str, tuple[Path, Reference]], nats_server: NatsServer, tmp_path: Path
) -> None:
    """Five turns, each of which leaves a hole of a chunk: the others are restored, and the answer is the same."""
    model, reference = checkpoints["llama_mha"]
    profile = write_costs(model, tmp_path / "profile.json", 16)
    config = settings(profile, tmp_path, 16, "0/3/0", restoring=restoring)
    config["worker_settings"]["device_pages"] = 2 * DEVICE_TOKENS // 16
    chance = random.Random(5)
    async with hidden_cell(nats_server.url, model, config) as cell:
        conversation: list[int] = []

        def turn() -> list[int]:
            return conversation + [chance.randrange(8, VOCAB_SIZE) for _ in range(170)]

        for _ in range(5):
            prompt = reference.decided(turn, 12)
            answer = (await cell.complete(prompt, 12))["choices"][0]["token_ids"]
            assert answer == reference.greedy(prompt, 12)
            await cell.settle()
            conversation = prompt + answer
        await cell.flush("device", "host")

        again = await cell.complete(prompt, 12)

    assert again["choices"][0]["token_ids"] == answer
    restored = again["usage"]["prompt_tokens_details"]["hidden_tokens"]
    assert restored >= 0.6 * len(prompt), again["usage"]


@pytest.mark.parametrize(("family", "page_size", "form"), KEPT)
async def test_a_new_cell_restores_what_the_last_one_kept(
    family: str,
    page_size: int,
    form: str,
    checkpoints: dict[str, tuple[Path, Reference]],
    nats_server: NatsServer,
    second_broker: NatsServer,
    tmp_path: Path,
) -> None:
    """The same, and then every process and the broker are new; the hidden states on the disk are announced and used."""
    model, reference = checkpoints[family]
    profile = write_costs(model, tmp_path / "profile.json", page_size)
    saved = 0
    for server in (nats_server, second_broker):
        async with hidden_cell(server.url, model, settings(profile, tmp_path, page_size, form)) as cell:
            await cell.hears_of_chunks(saved)
            document = Document(cell, reference, 7)
            if saved:
                assert await document.ask() == RESTORED
            else:
                await computed_and_restored(document, page_size)
            saved = (await cell.settle()).chunks_in_all


async def test_a_new_cell_keeps_the_form_of_the_disk(
    checkpoints: dict[str, tuple[Path, Reference]],
    nats_server: NatsServer,
    second_broker: NatsServer,
    tmp_path: Path,
) -> None:
    """By the second cell's figures nothing would be kept at all: what the first one kept is found and restored."""
    model, reference = checkpoints["llama_mha"]
    usage, saved = [], 0
    for server, figure in ((nats_server, FIGURE), (second_broker, structs.replace(FIGURE, compute_token_s=1e-12))):
        profile = write_costs(model, tmp_path / "profile.json", 16, figure=figure)
        async with hidden_cell(server.url, model, settings(profile, tmp_path, 16, "auto")) as cell:
            await cell.hears_of_chunks(saved)
            usage.append(await Document(cell, reference, 7).ask())
            saved = (await cell.settle()).chunks_in_all

    assert saved > 0
    assert usage == [COMPUTED, RESTORED]


async def test_a_cell_keeps_hidden_states_without_a_manual_step(
    checkpoints: dict[str, tuple[Path, Reference]],
    nats_server: NatsServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody has run the doctor: worker and storage measure when they start, and all settings are the defaults."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model, reference = checkpoints["llama_mha"]
    figures = structs.replace(described(model, 16), figures=(FIGURE,))
    monkeypatch.setattr(measured_costs, "measure_first", lambda runner, here, *, said: figures)
    monkeypatch.setattr(media, "disk_bytes_per_s", lambda config, **_: 1e9 if config.measure_at_start else 0.0)
    config = settings(tmp_path / "none", tmp_path, 16, "auto", restoring="planned")
    for section in ("worker_settings", "storage_settings"):
        config[section]["measure_at_start"] = True
    config["worker_settings"]["profile"] = ""
    async with hidden_cell(nats_server.url, model, config) as cell:
        document = Document(cell, reference, 3)
        await document.ask()
        await cell.flush("device", "host")

        found = await document.ask()

    assert found == RESTORED


async def test_hidden_states_that_are_torn_or_missing_are_never_used(
    checkpoints: dict[str, tuple[Path, Reference]], nats_server: NatsServer, tmp_path: Path
) -> None:
    """Every chunk on the disk is spoiled or gone, in one way after another: the answer is right, computed anew, and the
    hidden states are kept anew.
    """
    model, reference = checkpoints["llama_mha"]
    profile = write_costs(model, tmp_path / "profile.json", 16)
    async with hidden_cell(nats_server.url, model, settings(profile, tmp_path, 16, "0/3/0")) as cell:
        for seed, kind in enumerate(("flip", "zero", "truncate", "swap", "missing")):
            document = Document(cell, reference, seed)
            await document.ask()
            await cell.flush("device", "host")
            files = sorted((tmp_path / "disk-a").rglob("*.chunk"))
            assert len(files) == CHUNKED // 64, kind
            if kind == "missing":
                for file in files:
                    file.unlink()
            else:
                damage(files, kind)

            assert await document.ask() == COMPUTED, kind
            await cell.flush("device", "host")
            found = await document.ask()
            assert found.get("hidden_tokens", 0) + found["computed"] == DOCUMENT_TOKENS + 9, kind
            await cell.flush("device", "host", "disk")


@pytest.mark.parametrize("reason", ["foreign", "unsupported"])
async def test_where_hidden_states_cannot_be_used_prefixes_are_kept_as_kv(
    reason: str,
    checkpoints: dict[str, tuple[Path, Reference]],
    nats_server: NatsServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A profile of another model, or one whose hidden states do not give its KV: served as ever, from KV."""
    model, reference = checkpoints["llama_mha"]
    profile = write_costs(model, tmp_path / "profile.json", 16, model_bytes=7 if reason == "foreign" else 0)
    if reason == "unsupported":

        def refuse(runner: ModelRunner) -> None:
            raise HiddenStatesUnsupported("KV does not follow from its hidden states")

        monkeypatch.setattr(measured_costs, "KvProjection", refuse)
    config = settings(profile, tmp_path, 16, "0/3/0", restoring="planned")
    async with running_cell(nats_server.url, model, **config) as cell:
        document = Document(cell, reference, 3)
        await document.ask()
        await cell.flush("device", "host")

        assert await document.ask() == found_in("disk", CHUNKED)


async def test_the_planner_restores_beside_others_that_decode(
    checkpoints: dict[str, tuple[Path, Reference]], nats_server: NatsServer, tmp_path: Path
) -> None:
    """Left to itself, with answers under way and several questions at once: all of them are exact."""
    model, reference = checkpoints["llama_mha"]
    profile = write_costs(model, tmp_path / "profile.json", 16)
    config = settings(profile, tmp_path, 16, "auto", restoring="planned")
    config["worker_settings"]["device_pages"] = 4 * DEVICE_TOKENS // 16
    async with hidden_cell(nats_server.url, model, config) as cell:
        documents = [Document(cell, reference, seed) for seed in range(3)]
        for document in documents:
            await document.ask()
        for _ in range(3):
            await cell.flush("device", "host")
            prompts = [document.question(24) for document in documents for _ in range(2)]
            answers = await asyncio.gather(*(cell.complete(prompt, 24) for prompt in prompts))
            for prompt, answer in zip(prompts, answers, strict=True):
                assert answer["choices"][0]["token_ids"] == reference.greedy(prompt, 24)
            await cell.settle()
        status = await cell.status()

    planned = {name: count for name, count in status.counters.items() if name.startswith("restorations_planned_")}
    assert sum(planned.values()) > 0, status.counters
