"""LoRA adapters in whole cells: exact answers from every tier, nothing shared, and adapters that come and go."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from services.gateway.keys import key_hash
from services.gateway.tenant_file import write_tenants
from services.gateway.tenants import Tenant
from tests.adapters import ATTENTION, MLP, make_adapter, merged_model
from tests.cell import Cell, running_cell
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.held_steps import held_steps
from tests.nats_server import NatsServer
from tests.reference import Reference

pytestmark = pytest.mark.integration

ADMIN_KEY = "key-of-operators"
PROMPT_TOKENS = 200
ANSWER_TOKENS = 8
BASE, ONE, TWO = "model", "tuned/one", "two"


class Models:
    """A checkpoint with two adapters, and what each answers."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint = make_checkpoint("llama", folder / BASE)
        self.folders = {
            ONE: make_adapter(self.checkpoint, folder / "one", seed=1, targets=(*ATTENTION, *MLP)),
            TWO: make_adapter(self.checkpoint, folder / "two", seed=2, rank=8, targets=("q_proj", "v_proj")),
        }
        self.references = {BASE: Reference(self.checkpoint)} | {
            name: Reference(merged_model(self.checkpoint, adapter)) for name, adapter in self.folders.items()
        }
        rng = random.Random("adapters:1")
        self.document = [rng.randrange(8, VOCAB_SIZE) for _ in range(PROMPT_TOKENS)]
        self._rng = rng

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple(f"{name}={folder}" for name, folder in self.folders.items())

    def question(self, name: str) -> list[int]:
        """The document and a question that this model answers with decided tokens."""
        return self.references[name].decided(
            lambda: self.document + [self._rng.randrange(8, VOCAB_SIZE) for _ in range(9)],
            ANSWER_TOKENS,
            ignore_eos=True,
        )

    def answer(self, name: str, prompt: list[int], tokens: int = ANSWER_TOKENS) -> list[int]:
        return self.references[name].greedy(prompt, tokens, ignore_eos=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("adapters"))


async def ask(cell: Cell, models: Models, name: str, prompt: list[int]) -> dict[str, int]:
    """Ask one model, compare its answer with the reference; the usage details that are not 0."""
    answer = await cell.complete(prompt, ANSWER_TOKENS, model=name, ignore_eos=True)
    assert answer["model"] == name
    assert answer["choices"][0]["token_ids"] == models.answer(name, prompt), name
    details = answer["usage"]["prompt_tokens_details"]
    return {key: count for key, count in details.items() if count and key != "cache_write_tokens"}


async def ask_all(cell: Cell, models: Models) -> dict[str, dict[str, int]]:
    """Ask all models at once, so that steps have rows of all of them."""
    prompts = {name: models.question(name) for name in models.references}
    found = await asyncio.gather(*(ask(cell, models, name, prompt) for name, prompt in prompts.items()))
    await cell.settle()
    return dict(zip(prompts, found, strict=True))


def disk(folder: Path) -> dict[str, Any]:
    (folder / "disk").mkdir(exist_ok=True)
    return {"disk_dir": (str(folder / "disk"),), "disk_kv_bytes": 2**26}


@pytest.mark.parametrize("forward", ["auto", "portable"])
async def test_answers_are_exact_from_every_tier(
    models: Models, nats_server: NatsServer, tmp_path: Path, forward: str
) -> None:
    """The base model and two adapters over one document, in common batches: computed, then found on the device, in host
    memory, on the disk, and after a restart, by each of them what it computed itself, and nothing else.
    """
    settings: dict[str, Any] = {
        "gateway_settings": {"adapter": models.flags},
        "worker_settings": {"forward": forward},
        "scheduler_settings": {"host_writes": "through", "prefetch_wait": "full"},
        "storage_settings": disk(tmp_path),
    }
    whole, chunks = PROMPT_TOKENS // 16 * 16, PROMPT_TOKENS // 64 * 64
    async with running_cell(nats_server.url, models.checkpoint, **settings) as cell:
        listed = (await cell.http.get("/v1/models")).json()["data"]
        assert [(each["id"], each["parent"]) for each in listed] == [(BASE, None), (ONE, BASE), (TWO, BASE)]
        assert await ask_all(cell, models) == {name: {} for name in models.references}
        on_device = {"cached_tokens": whole, "device_tokens": whole}
        assert await ask_all(cell, models) == dict.fromkeys(models.references, on_device)
        await cell.flush("device")
        in_host = {"cached_tokens": whole, "host_tokens": whole}
        assert await ask_all(cell, models) == dict.fromkeys(models.references, in_host)
        await cell.flush("device", "host")
        on_disk = {"cached_tokens": chunks, "disk_tokens": chunks}
        assert await ask_all(cell, models) == dict.fromkeys(models.references, on_disk)

    async with running_cell(nats_server.url, models.checkpoint, **settings) as cell:
        assert await ask_all(cell, models) == dict.fromkeys(models.references, on_disk)


async def post(cell: Cell, path: str, **body: Any) -> httpx.Response:
    return await cell.http.post(path, json=body, headers={"X-Admin-Key": ADMIN_KEY})


async def test_adapters_come_and_go_under_load(models: Models, nats_server: NatsServer, tmp_path: Path) -> None:
    """Requests that began before an adapter was unloaded get all their tokens; those that come behind get 404. Another
    adapter under the same name finds nothing of the first. Everybody else is served meanwhile. Files that PEFT could
    mean otherwise, a rank above the bound, and files that would change under the workers are refused.
    """
    long, tokens = models.question(BASE), 200
    dora = make_adapter(models.checkpoint, tmp_path / "dora", use_dora=True)
    wide = make_adapter(models.checkpoint, tmp_path / "wide", rank=16)
    async with running_cell(
        nats_server.url,
        models.checkpoint,
        workers=2,
        worker_settings={"max_adapter_rank": 8},
        gateway_settings={"admin_key": ADMIN_KEY},
    ) as cell:
        unknown = await cell.http.post("/v1/completions", json={"model": "tuned", "prompt": [9], "max_tokens": 1})
        assert unknown.status_code == httpx.codes.NOT_FOUND
        assert unknown.json()["error"]["code"] == "model_not_found"
        assert (await cell.http.post("/v1/load_lora_adapter", json={})).status_code == httpx.codes.UNAUTHORIZED
        beside = asyncio.create_task(cell.complete(long, tokens, ignore_eos=True))

        loaded = await post(cell, "/v1/load_lora_adapter", lora_name="tuned", lora_path=str(models.folders[ONE]))
        assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'tuned' added successfully.")
        again = await post(cell, "/v1/load_lora_adapter", lora_name="tuned", lora_path=str(models.folders[TWO]))
        assert again.json()["error"]["code"] == "adapter_exists"
        prompt = models.question(ONE)
        with held_steps():
            running = asyncio.create_task(cell.complete(prompt, tokens, model="tuned", ignore_eos=True))
            while not (await cell.status()).adapters[0].requests:
                await asyncio.sleep(0.01)

            gone = await post(cell, "/v1/unload_lora_adapter", lora_name="tuned")
            assert gone.text == "Success: LoRA adapter 'tuned' removed successfully."
            late = await cell.http.post("/v1/completions", json={"model": "tuned", "prompt": prompt, "max_tokens": 1})
            assert late.status_code == httpx.codes.NOT_FOUND
            again = await post(cell, "/v1/unload_lora_adapter", lora_name="tuned")
            assert again.status_code == httpx.codes.NOT_FOUND
        answer = await running
        assert len(answer["choices"][0]["token_ids"]) == tokens
        assert answer["choices"][0]["token_ids"][:ANSWER_TOKENS] == models.answer(ONE, prompt)

        await post(cell, "/v1/load_lora_adapter", lora_name="tuned", lora_path=str(models.folders[TWO]))
        asked = models.question(TWO)
        other = await cell.complete(asked, ANSWER_TOKENS, model="tuned", ignore_eos=True)
        assert other["choices"][0]["token_ids"] == models.answer(TWO, asked)
        assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert (await beside)["choices"][0]["token_ids"][:ANSWER_TOKENS] == models.answer(BASE, long)

        refused = await post(cell, "/v1/load_lora_adapter", lora_name="x", lora_path=str(dora))
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "adapter_refused")
        assert "use_dora is not served" in refused.json()["error"]["message"]
        refused = await post(cell, "/v1/load_lora_adapter", lora_name="x", lora_path=str(wide))
        assert "its rank 16 is above 8" in refused.json()["error"]["message"]
        await post(cell, "/v1/load_lora_adapter", lora_name="x", lora_path=str(models.folders[ONE]))
        refused = await post(cell, "/v1/load_lora_adapter", lora_name="x", lora_path=str(wide), load_inplace=True)

        assert refused.status_code == httpx.codes.BAD_REQUEST
        # What was there before an order that failed is there again.
        answer = await cell.complete(prompt, ANSWER_TOKENS, model="x", ignore_eos=True)
        assert answer["choices"][0]["token_ids"] == models.answer(ONE, prompt)


async def test_tenants_share_an_adapter_and_no_kv(models: Models, nats_server: NatsServer, tmp_path: Path) -> None:
    """Two tenants and two models make four namespaces: each caller finds what it left itself. OpenAI's client asks by
    name, and every API says whose answer it is.
    """
    tenants = {name: Tenant(salt=f"salt-of-tenant-{name}-0", keys=(key_hash(f"key-{name}".encode()),)) for name in "ab"}
    write_tenants(tmp_path / "tenants.toml", tenants)
    settings = {"adapter": models.flags, "tenants": str(tmp_path / "tenants.toml")}
    async with (
        running_cell(nats_server.url, models.checkpoint, gateway_settings=settings) as cell,
        AsyncOpenAI(base_url=f"{cell.base_url}/v1", api_key="key-a", max_retries=0) as client,
    ):
        prompts = {name: models.question(name) for name in (BASE, ONE)}
        cached = []
        for _ in range(2):
            for tenant in "ab":
                cell.http.headers["authorization"] = f"Bearer key-{tenant}"
                found = [await ask(cell, models, name, prompt) for name, prompt in prompts.items()]
                cached += [details.get("cached_tokens", 0) for details in found]

        assert cached == [0] * 4 + [208] * 4
        messages: Any = [{"role": "user", "content": "the sea"}]
        stream = await client.chat.completions.create(
            model=ONE, messages=messages, max_tokens=8, temperature=0, stream=True
        )
        pieces = [chunk async for chunk in stream]
        whole = await client.chat.completions.create(model=ONE, messages=messages, max_tokens=8, temperature=0)
        base = await client.chat.completions.create(model=BASE, messages=messages, max_tokens=8, temperature=0)
        response = await client.responses.create(model=TWO, input="the sea", max_output_tokens=4)

        assert {piece.model for piece in pieces} == {ONE}
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole.choices[0].message.content
        assert base.choices[0].message.content != whole.choices[0].message.content
        assert response.model == TWO
        card = await client.models.retrieve(ONE)
        assert json.loads(card.model_dump_json())["parent"] == BASE
