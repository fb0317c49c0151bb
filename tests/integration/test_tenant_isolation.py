"""Tenants of one real cell: what one has cached, in any tier, another neither reads nor gets a wrong answer from."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from services.gateway.keys import key_hash
from services.gateway.tenant_file import write_tenants
from services.gateway.tenants import Tenant
from tests.cell import Cell, running_cell
from tests.checkpoints import VOCAB_SIZE
from tests.integration.conftest import Checkpoints
from tests.nats_server import NatsServer

pytestmark = pytest.mark.integration

PROMPT_TOKENS = 256
ANSWER_TOKENS = 4
STEPS = 30
SALTS = {"a": "salt-of-tenant-a-0", "b": "salt-of-tenant-b-0"}


def tenants_file(folder: Path) -> str:
    tenants = {name: Tenant(salt=salt, keys=(key_hash(f"key-of-{name}".encode()),)) for name, salt in SALTS.items()}
    write_tenants(folder / "tenants.toml", tenants)
    return str(folder / "tenants.toml")


async def ask(cell: Cell, tenant: str, prompt: list[int], salt: str | None) -> tuple[list[int], int]:
    """The answer's tokens, and how many of the prompt were cached."""
    cell.http.headers["authorization"] = f"Bearer key-of-{tenant}"
    extra: dict[str, Any] = {} if salt is None else {"cache_salt": salt}
    answer = await cell.complete(prompt, ANSWER_TOKENS, ignore_eos=True, **extra)
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_a_random_walk_of_tenants_never_crosses(
    checkpoints: Checkpoints, nats_server: NatsServer, tmp_path: Path
) -> None:
    """The same prompts under the same salts from tenants and from others: found is what that very caller has left,
    from the device, from host memory and from the disk, and every answer is that of the model.
    """
    model, reference = checkpoints["llama"]
    (tmp_path / "disk").mkdir()
    rng = random.Random("tenants:1")
    shared = [rng.randrange(8, VOCAB_SIZE) for _ in range(PROMPT_TOKENS)]

    def question() -> list[int]:
        return shared + [rng.randrange(8, VOCAB_SIZE) for _ in range(16)]

    prompts = [reference.decided(question, ANSWER_TOKENS, ignore_eos=True) for _ in range(2)]
    known: set[tuple[str, str | None]] = set()
    crossed = found = 0
    async with running_cell(
        nats_server.url,
        model,
        gateway_settings={"tenants": tenants_file(tmp_path), "api_keys": ("key-of-plain",)},
        scheduler_settings={"prefetch_wait": "full"},
        storage_settings={"disk_dir": (str(tmp_path / "disk"),), "disk_kv_bytes": 2**26},
    ) as cell:
        for _ in range(STEPS):
            await cell.settle()  # What is being saved is cached nowhere else after a flush.
            match rng.randrange(5):
                case 0:
                    await cell.flush("device")
                case 1:
                    await cell.flush("device", "host")
                case _:
                    caller = rng.choice(["a", "b", "plain"]), rng.choice([None, SALTS["a"], SALTS["b"]])
                    prompt = rng.choice(prompts)
                    tokens, cached = await ask(cell, caller[0], prompt, caller[1])

                    assert tokens == reference.greedy(prompt, ANSWER_TOKENS, ignore_eos=True)
                    assert (cached > 0) == (caller in known), caller
                    crossed += bool(known - {caller})
                    found += caller in known
                    known.add(caller)
    assert crossed > 5
    assert found > 2
