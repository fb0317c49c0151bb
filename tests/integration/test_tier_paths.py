"""Greedy answers are the same whichever way a prefix came back: device, host, disk, object store or a neighbour.

Each case is a whole cell behind its HTTP API. Usage says where the prefix was found, the worker says how many
tokens it computed, and where the way is a copy the KV itself is compared, bit for bit.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shared.memory import SharedSegment
from tests.cell import Cell, running_cell
from tests.checkpoints import VOCAB_SIZE
from tests.cold_runs import ColdRuns
from tests.held_steps import held_steps
from tests.nats_server import NatsServer
from tests.reference import Reference

DEVICE_TOKENS = 512
DOCUMENT_TOKENS = 200
ANSWER_TOKENS = 8
WAYS = [("llama", 1), ("opt", 64), ("mla", 1), ("gemma4", 16)]
KEPT = [
    *(("llama", 16), ("opt", 32), ("mla", 64), ("gemma4_padded", 16)),
    *(("gpt_oss", 1), ("llama4", 16), ("bloom", 1), ("indexed", 16)),
]
"""Llama here has grouped-query attention, OPT as many KV heads as query heads. Pages of the next hold latents, and K
and V of other heads from layer to layer. gpt-oss has sinks, Llama 4 chunks, BLOOM attends by code of its own, and GLM 5
to what index keys beside its latents choose.
"""
CHUNKED = DOCUMENT_TOKENS // 64 * 64
COMPUTED = {"computed": DOCUMENT_TOKENS + 9}
"""What :meth:`Document.ask` says where nothing was found."""
THROUGH = {"host_writes": "through", "prefetch_wait": "full"}
UNITS = {"mla": 2, "gemma4_padded": 4, "indexed": 2}
"""Of a page, each of which has a checksum; 3 of those not named."""


def segment(cell: Cell, kind: str) -> SharedSegment:
    """A mapping of one of this cell's pools, found as any process of this user could."""
    (file,) = [p for p in Path("/dev/shm").iterdir() if p.name.startswith(cell.shm_prefix) and f".{kind}." in p.name]
    return SharedSegment.attach(file.name, file.stat().st_size, writable=False)


class Document:
    """A document, questions about it, and where each answer's prefix was found."""

    def __init__(self, cell: Cell, reference: Reference | ColdRuns, seed: int) -> None:
        self._rng = random.Random(seed)
        self.cell, self.reference = cell, reference
        self.tokens = [self._rng.randrange(8, VOCAB_SIZE) for _ in range(DOCUMENT_TOKENS)]

    def question(self, max_tokens: int = ANSWER_TOKENS) -> list[int]:
        """The document and a question whose answer does not hang on how sums are rounded."""
        return self.reference.decided(
            lambda: self.tokens + [self._rng.randrange(8, VOCAB_SIZE) for _ in range(9)], max_tokens
        )

    async def ask(self) -> dict[str, Any]:
        """Ask a new question, compare the answer with the reference, and let everything come to rest.

        Returns the usage details that are not 0, and ``computed``: the prefill tokens of the workers.
        """
        prompt = self.question()
        before = await self._computed()
        answer = await self.cell.complete(prompt, ANSWER_TOKENS)
        assert answer["choices"][0]["token_ids"] == self.reference.greedy(prompt, ANSWER_TOKENS)
        await self.cell.settle()
        details = {name: count for name, count in answer["usage"]["prompt_tokens_details"].items() if count}
        details.pop("cache_write_tokens", None)  # Those that were not found, once more.
        return details | {"computed": await self._computed() - before}

    async def _computed(self) -> int:
        workers = [worker.worker_id for worker in (await self.cell.status()).workers]
        inventories = [await self.cell.inventory(worker_id) for worker_id in workers]
        return sum(inventory.counters.get("prefill_tokens_computed", 0) for inventory in inventories)


def found_in(tier: str, tokens: int) -> dict[str, int]:
    """What :meth:`Document.ask` says where so many tokens were found in one tier."""
    return {"cached_tokens": tokens, f"{tier}_tokens": tokens, "computed": DOCUMENT_TOKENS + 9 - tokens}


async def found_again(document: Document, page_size: int) -> None:
    """What was computed once is found on the device, in host memory and on the disk, one after the other."""
    cached = DOCUMENT_TOKENS // page_size * page_size
    assert await document.ask() == found_in("device", cached)
    await document.cell.flush("device")
    assert await document.ask() == found_in("host", cached)
    await document.cell.flush("device", "host")
    assert await document.ask() == found_in("disk", CHUNKED)


async def found_in_store(document: Document) -> None:
    """In the object store, and on the disk again: what came from the store is written there."""
    await document.cell.flush("device", "host", "disk")
    assert await document.ask() == found_in("remote", CHUNKED)
    await document.cell.flush("device", "host")
    assert await document.ask() == found_in("disk", CHUNKED)


async def copied_from_neighbour(document: Document, page_size: int) -> None:
    """A burst spreads over two workers; whoever is second copies the document from the other's device, once."""
    await document.ask()
    prompts = [document.question(24) for _ in range(12)]

    with held_steps():  # One that came when others are answered could wait for the worker that has the document.
        asked = asyncio.gather(*(document.cell.complete(prompt, 24) for prompt in prompts))
        await document.cell.knows_of(len(prompts))
    answers = await asked
    await document.cell.settle()

    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer["choices"][0]["token_ids"] == document.reference.greedy(prompt, 24)
    details = [answer["usage"]["prompt_tokens_details"] for answer in answers]
    cached = DOCUMENT_TOKENS // page_size * page_size
    assert all(detail["cached_tokens"] == cached for detail in details)
    assert [detail["neighbour_tokens"] for detail in details if detail["neighbour_tokens"]] == [cached]


def pages_of(cell: Cell, units: int, pages: int) -> dict[bytes, npt.NDArray[np.uint8]]:
    """What the host pool holds now, by identity."""
    mapped = segment(cell, "host")
    tables = mapped.nbytes - pages * (16 + 8 * units)
    identities = mapped.array[tables : tables + pages * 16].reshape(pages, 16).copy()
    page_bytes = tables // pages  # They begin on the first multiple of 64 after the pages.
    kv = mapped.array[: pages * page_bytes].reshape(pages, page_bytes).copy()
    mapped.close()
    return {row.tobytes(): kv[index] for index, row in enumerate(identities) if row.any()}


def storage_settings(folder: Path) -> dict[str, Any]:
    """A disk of two directories and an object store in a third."""
    for name in ("disk-a", "disk-b", "remote"):
        (folder / name).mkdir(exist_ok=True)
    return {
        "disk_dir": (str(folder / "disk-a"), str(folder / "disk-b")),
        "disk_kv_bytes": 64 * 2**20,
        "remote": f"file://{folder / 'remote'}",
    }


@pytest.mark.integration
@pytest.mark.parametrize(("family", "page_size"), WAYS)
async def test_every_way_back_gives_the_same_answer(
    family: str,
    page_size: int,
    checkpoints: dict[str, tuple[Path, Reference]],
    nats_server: NatsServer,
    tmp_path: Path,
) -> None:
    """Computed, then found on the device, in host memory, on the disk and in the object store."""
    model, reference = checkpoints[family]
    async with running_cell(
        nats_server.url,
        model,
        worker_settings={"page_size": page_size, "device_pages": DEVICE_TOKENS // page_size},
        scheduler_settings=THROUGH,
        storage_settings=storage_settings(tmp_path),
    ) as cell:
        document = Document(cell, reference, page_size)

        assert await document.ask() == COMPUTED
        await found_again(document, page_size)
        await found_in_store(document)


@pytest.mark.integration
@pytest.mark.parametrize(("family", "page_size"), KEPT)
async def test_a_new_cell_finds_what_the_last_one_left_on_the_disk(
    family: str,
    page_size: int,
    checkpoints: dict[str, tuple[Path, Reference]],
    nats_server: NatsServer,
    second_broker: NatsServer,
    tmp_path: Path,
) -> None:
    """After all that every process and the broker are new; the first request is a disk hit, and its KV is the one
    that was computed, to the bit.
    """
    model, reference = checkpoints[family]
    kept: list[dict[bytes, npt.NDArray[np.uint8]]] = []
    saved, storage = 0, storage_settings(tmp_path)
    for server, found in ((nats_server, COMPUTED), (second_broker, found_in("disk", CHUNKED))):
        async with running_cell(
            server.url,
            model,
            worker_settings={"page_size": page_size, "device_pages": DEVICE_TOKENS // page_size},
            scheduler_settings=THROUGH,
            storage_settings=storage,
        ) as cell:
            await cell.hears_of_chunks(saved)
            document = Document(cell, reference, 7)
            assert await document.ask() == found
            pages = next(pool.total for pool in (await cell.status()).pools if pool.tier == "host")
            kept.append(pages_of(cell, UNITS.get(family, 3), pages))
            if found == COMPUTED:
                await found_again(document, page_size)
                await found_in_store(document)
            saved = (await cell.settle()).chunks_in_all
        storage |= {"remote": ""}

    shared = [identity for identity in kept[1] if identity in kept[0]]
    assert len(shared) >= CHUNKED // page_size
    assert all(np.array_equal(kept[0][identity], kept[1][identity]) for identity in shared)


def chunk_files(folder: Path) -> list[Path]:
    """The chunks of the disk tier, in order of their names."""
    return sorted(p for name in ("disk-a", "disk-b") for p in (folder / name).rglob("*.chunk") if p.is_file())


def damage(files: list[Path], kind: str) -> None:
    """Spoil every chunk in one way."""
    if kind == "swap":
        contents = [file.read_bytes() for file in files]
        for file, other in zip(files, contents[1:] + contents[:1], strict=True):
            file.write_bytes(other)
        return
    for number, file in enumerate(files):
        data = bytearray(file.read_bytes())
        at = len(data) // 7 * (1 + number % 5)
        if kind == "flip":
            data[at] ^= 1 << number % 8
        elif kind == "zero":
            data[at : at + 512] = bytes(512)
        else:
            del data[at:]
        file.write_bytes(bytes(data))


@pytest.mark.integration
async def test_damaged_chunks_are_never_served(
    checkpoints: dict[str, tuple[Path, Reference]], nats_server: NatsServer, tmp_path: Path
) -> None:
    """Every chunk on the disk is spoiled, in one way after another: the answer is right, computed anew, and the chunks
    are written anew.
    """
    model, reference = checkpoints["llama"]
    worker = {"page_size": 16, "device_pages": DEVICE_TOKENS // 16}
    scheduler = {"prefetch_wait": "full"}
    settings = storage_settings(tmp_path) | {"remote": ""}
    async with running_cell(
        nats_server.url,
        model,
        worker_settings=worker,
        scheduler_settings=scheduler,
        storage_settings=settings,
    ) as cell:
        quarantined = 0
        for seed, kind in enumerate(("flip", "zero", "truncate", "swap")):
            document = Document(cell, reference, seed)
            await document.ask()
            await cell.flush("device", "host")
            files = chunk_files(tmp_path)
            assert len(files) == CHUNKED // 64, kind
            damage(files, kind)

            assert await document.ask() == COMPUTED, kind
            before, quarantined = quarantined, (await cell.storage_inventory()).counters["chunks_quarantined"]
            assert quarantined > before, kind
            await cell.flush("device", "host")
            found = await document.ask()
            assert found["disk_tokens"] + found["computed"] == DOCUMENT_TOKENS + 9, kind
            assert found["disk_tokens"] <= CHUNKED, kind
            await cell.flush("device", "host", "disk")


@pytest.mark.integration
@pytest.mark.parametrize(("family", "page_size"), [("opt", 1), ("llama", 32), ("mla", 16), ("gemma4", 16)])
async def test_a_prefix_is_copied_from_a_neighbours_device(
    family: str, page_size: int, checkpoints: dict[str, tuple[Path, Reference]], nats_server: NatsServer
) -> None:
    """A burst on one document spreads over two workers; the second copies the document instead of computing it."""
    model, reference = checkpoints[family]
    worker = {"page_size": page_size, "device_pages": 2 * DEVICE_TOKENS // page_size}
    async with running_cell(
        nats_server.url,
        model,
        workers=2,
        worker_settings=worker,
        scheduler_settings={"host_tier": False, "max_running": 2},
    ) as cell:
        await copied_from_neighbour(Document(cell, reference, 5), page_size)
