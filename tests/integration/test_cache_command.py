"""``thermocline cache``: what operators see of a running cell's cache, and what they do to it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from shared.ids import chain_pages, chain_root
from shared.messages.base import pack_int32
from tests.cell import Cell, running_cell
from tests.checkpoints import VOCAB_SIZE
from tests.idle import hears_of_chunks
from tests.integration.conftest import Checkpoints
from tests.nats_server import NatsServer
from thermocline.cache.__main__ import main
from thermocline.supervisor.ports import free_port

PAGE_SIZE = 16
PAGES = 64
PAGE_BYTES = 3 * 2 * PAGE_SIZE * 2 * 16 * 4  # Of the checkpoint: layers, K and V, tokens, heads, head size, float32.
DOCUMENT_TOKENS = 192
ADMIN_KEY = "an-admin-key-of-some-length"


class Operated:
    """A cell, prompts for it, and the command that looks at it."""

    def __init__(self, cell: Cell, nats: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.cell = cell
        self._nats = nats
        self._capsys = capsys
        self._rng = random.Random(5)
        self.error = ""

    def tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(8, VOCAB_SIZE) for _ in range(count)]

    async def ask(self, prompt: list[int], **extra: Any) -> dict[str, int]:
        """Where the prompt was found."""
        answer = await self.cell.complete(prompt, 2, **extra)
        await self.cell.settle()
        details: dict[str, int] = answer["usage"]["prompt_tokens_details"]
        return details

    async def churn(self) -> None:
        """Ask for other things, until neither pool has room left for what was there before."""
        for _ in range(2 * 2 * PAGES * PAGE_SIZE // 600 + 1):
            await self.ask(self.tokens(600))

    async def saved(self, chunks: int) -> None:
        """Wait until so many chunks are on the disk."""
        await hears_of_chunks(self.cell.status, chunks)

    async def run(self, *argv: str, over_nats: bool = True) -> tuple[int, str]:
        """Exit code and output of a command line; what it said on stderr is in ``error``."""
        self._capsys.readouterr()
        nats = ("--nats", self._nats) if over_nats else ()
        code = await asyncio.to_thread(main, [*argv, *nats])
        captured = self._capsys.readouterr()
        self.error = captured.err
        return code, captured.out

    async def json(self, *argv: str, over_nats: bool = True) -> dict[str, Any]:
        """The object that a command line prints with --json."""
        code, out = await self.run(*argv, "--json", over_nats=over_nats)
        assert code == 0, self.error
        # The cell of this test logs to the same standard output.
        (line,) = [line for line in out.splitlines() if line.startswith('{"')]
        printed: dict[str, Any] = json.loads(line)
        return printed


@asynccontextmanager
async def operated(
    url: str, model: Path, capsys: pytest.CaptureFixture[str], *, disk: Path | None = None
) -> AsyncIterator[Operated]:
    """A cell whose pools are small enough to be churned; ``disk`` is the directory of its disk tier."""
    async with running_cell(
        url,
        model,
        worker_settings={"page_size": PAGE_SIZE, "device_pages": PAGES},
        # A model as small as this computes faster than a disk answers, and would not wait for it.
        scheduler_settings={"policy": "lru", "prefetch_wait": "full"},
        gateway_settings={"admin_key": ADMIN_KEY},
        storage_settings={"disk_dir": (str(disk),)} if disk else None,
        # Room for identities and checksums too.
        host_kv_bytes=PAGES * (PAGE_BYTES + 64),
    ) as cell:
        yield Operated(cell, url, capsys)


@pytest.mark.integration
async def test_a_pinned_prefix_outlives_a_churn_and_an_unpinned_one_does_not(
    checkpoints: Checkpoints, tmp_path: Path, nats_server: NatsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pinned over NATS by its tokens, it is a host hit after everything else has gone; unpinned, it goes too. A text is
    pinned through the gateway, which tokenises it; without the admin key it refuses, and a prefix below a page is
    refused with the reason.
    """
    text = "the tide rises and the cold water sinks " * 4
    async with operated(nats_server.url, checkpoints["llama"][0], capsys) as run:
        document = run.tokens(DOCUMENT_TOKENS)
        file = tmp_path / "document.json"
        file.write_text(json.dumps(document))
        await run.ask([*document, 9, 9])
        pin = await run.json("pin", "--tokens-file", str(file), "--ttl", "10m", "--name", "document")
        await run.churn()
        pinned = await run.ask([*document, 10, 10])
        await run.churn()
        listed = await run.json("ls", "--pins")
        shown = await run.run("ls", "--pins")
        unpinned = await run.run("unpin", "document")
        await run.churn()
        gone = await run.ask([*document, 11, 11])
        again = await run.run("unpin", "document")
        again_error = run.error

        base = ("--url", run.cell.base_url)
        key = ("--admin-key", ADMIN_KEY)
        answer = await run.cell.http.post("/v1/completions", json={"prompt": text, "max_tokens": 2, "temperature": 0})
        await run.cell.settle()
        closed = await run.run("pin", "--prompt", text, *base)
        closed_error = run.error
        pinned_text = await run.json("pin", "--prompt", text, *base, *key, "--name", "tide")
        short = await run.run("pin", "--prompt", "a", *base, *key)
        short_error = run.error
        unpinned_text = await run.json("unpin", "tide", *base, *key)

    assert (pin["name"], pin["tokens"]) == ("document", DOCUMENT_TOKENS)
    assert pinned["host_tokens"] == DOCUMENT_TOKENS
    assert [(p["name"], p["held_tokens"]) for p in listed["pins"]] == [("document", DOCUMENT_TOKENS)]
    assert "document" in shown[1]
    assert unpinned[0] == 0
    assert gone["cached_tokens"] == 0
    assert again[0] == 1
    assert "there is no pin 'document'" in again_error
    assert pinned_text["tokens"] == answer.json()["usage"]["prompt_tokens"]
    assert (closed[0], short[0]) == (1, 1)
    assert "admin key is required" in closed_error
    assert "shorter than one page" in short_error
    assert unpinned_text == {"name": "tide", "deleted": True}


async def prewarmed(run: Operated, file: Path) -> None:
    """What was prewarmed is a hit of the next request, each prompt under its own salt; a file with a malformed line
    sends nothing.
    """
    one, other = run.tokens(100), run.tokens(100)
    lines = [json.dumps({"tokens": one}), "", json.dumps({"tokens": other, "cache_salt": "tenant"})]
    file.write_text("\n".join([*lines, "{"]))
    base = ("--url", run.cell.base_url)
    assert (await run.run("prewarm", str(file), *base, over_nats=False))[0] == 2
    assert "line 4" in run.error
    assert (await run.json("stat"))["nodes"] == 0

    file.write_text("\n".join([*lines, json.dumps({"messages": [{"role": "user", "content": "hello"}]})]))
    report = await run.json("prewarm", str(file), *base, over_nats=False)
    await run.cell.settle()
    assert report["failed"] == 0
    assert [(p["line"], p["prompt_tokens"]) for p in report["prompts"][:2]] == [(1, 100), (3, 100)]
    hits = [await run.ask(one), await run.ask(other, cache_salt="tenant"), await run.ask(other)]
    assert [hit["device_tokens"] for hit in hits] == [96, 96, 0]

    file.write_text(json.dumps({"tokens": run.tokens(3000)}))
    code, told = await run.run("prewarm", str(file), *base, over_nats=False)
    assert code == 1
    assert "line 1 failed" in told


@pytest.mark.integration
async def test_what_was_prewarmed_is_hit_and_the_tree_is_listed_and_emptied(
    checkpoints: Checkpoints, tmp_path: Path, nats_server: NatsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fork has two children; what was cached is hit before the flush and computed again after it."""
    async with operated(nats_server.url, checkpoints["llama"][0], capsys) as run:
        await prewarmed(run, tmp_path / "prompts.jsonl")
        await run.json("flush")
        trunk = run.tokens(96)
        for branch in (9, 10):
            await run.ask([*trunk, *[branch] * 40])
        hit = await run.ask([*trunk, 11])
        listed = await run.json("ls", "--model", str(checkpoints["llama"][0]))
        shown = await run.run("ls")
        cut = await run.run("ls", "--limit", "1")
        own = await run.json("ls", "--namespace", listed["nodes"][0]["namespace"])
        none = await run.run("ls", "--namespace", "0" * 32)
        stats = await run.json("stat")
        drawn = await run.run("stat")
        flushed = await run.json("flush")
        missed = await run.ask([*trunk, 11])
        told = await run.run("flush", "--tier", "device", "--salt", "nobody")

    top = next(node for node in listed["nodes"] if node["parent"] is None)
    children = [node for node in listed["nodes"] if node["parent"] == top["id"]]
    assert (top["depth"], top["tokens"], top["head"]) == (0, 96, trunk[:16])
    assert top["head_text"]
    assert sorted(child["head"][0] for child in children) == [9, 10]
    assert listed["has_more"] is False
    assert own["nodes"] == [{**node, "head_text": None} for node in listed["nodes"]]
    assert len(shown[1].splitlines()) == 2 + len(listed["nodes"])
    assert max(map(len, (shown[1] + drawn[1]).splitlines())) <= 100
    assert "--limit 1 was reached" in cut[1]
    assert none[1] == "nothing is cached\n"
    assert stats["hit_tokens"]["device"] >= hit["device_tokens"] == 96
    assert "worker-0" in drawn[1]
    assert sum(pool["cached"] for pool in flushed["pools"]) == 0
    assert flushed["dropped"]["device_pages"] > 0
    assert missed["cached_tokens"] == 0
    assert "device: dropped 0 pages" in told[1]


@pytest.mark.integration
async def test_a_disk_is_checked_and_emptied(
    checkpoints: Checkpoints, tmp_path: Path, nats_server: NatsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """A chunk whose bytes were changed is found, never served, and computed again; a flush leaves no chunk."""
    disk = tmp_path / "chunks"
    disk.mkdir()
    async with operated(nats_server.url, checkpoints["llama"][0], capsys, disk=disk) as run:
        document = run.tokens(DOCUMENT_TOKENS)
        await run.ask([*document, 9])
        await run.saved(3)
        good = await run.json("verify")
        listed = await run.json("ls")
        root = chain_root(listed["nodes"][0]["namespace"])
        name = chain_pages(root, pack_int32(document), 4 * PAGE_SIZE)[-16:].hex()
        (file,) = disk.rglob(f"{name}.chunk")
        blob = bytearray(file.read_bytes())
        blob[4096 + 100] ^= 1  # Behind the header.
        file.write_bytes(blob)
        found = await run.run("verify")
        stats = await run.json("stat")
        drawn = await run.run("stat")
        await run.json("flush")
        hit = await run.ask([*document, 10])
        await run.saved(3)  # What a save reads is in use, and stays.
        flushed = await run.json("flush", "--tier", "disk", "--tier", "device", "--tier", "host")
        missed = await run.ask([*document, 11])

    assert (good["ok"], good["storages"][0]["checked"]) == (True, 3)
    assert sum(node["disk"].get("storage-0", 0) for node in listed["nodes"]) == 3
    assert found[0] == 1
    assert f"bad: {name}" in found[1]
    assert stats["storages"]["storage-0"]["chunks_quarantined"] == 1
    assert "storage-0  disk" in drawn[1]
    assert (hit["disk_tokens"], hit["cached_tokens"]) == (128, 128)
    assert flushed["dropped"]["disk_chunks"] >= 2
    assert flushed["chunks"] == 0
    assert missed["cached_tokens"] == 0


@pytest.mark.integration
def test_no_cell_is_a_plain_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no broker or gateway answers, one line says so and the exit code is 1."""
    monkeypatch.setattr("thermocline.cache.connection.CONNECT_S", 0.3)
    port = free_port()
    for argv in (["stat"], ["ls"], ["flush"], ["unpin", "x"], ["verify"]):
        assert main([*argv, "--nats", f"nats://127.0.0.1:{port}"]) == 1
        error = capsys.readouterr().err
        assert error.startswith("thermocline cache: ")
        assert error.count("\n") == 1

    assert main(["pin", "--prompt", "x", "--url", f"http://127.0.0.1:{port}"]) == 1
    assert "cannot be reached" in capsys.readouterr().err
