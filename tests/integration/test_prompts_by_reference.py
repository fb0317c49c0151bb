"""Sessions of long prompts over HTTP: a turn tells the scheduler what is new, and whatever dies no answer changes."""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import LlamaConfig

from shared import subjects
from shared.bus.nats_bus import connect
from shared.bus.protocol import StreamLimits
from shared.codec import decode_input, encode
from shared.errors import PayloadTooLarge
from shared.messages.base import pack_int32
from shared.messages.requests import SamplingParams, SubmitRequest
from tests.checkpoints import BOS, EOS, PAD, SPECIAL_TOKENS, VOCAB_SIZE, save_checkpoint
from tests.integration import test_survival
from tests.nats_server import NatsServer
from tests.waiting import holds, is_ready
from thermocline.supervisor.api import RunningCell, running
from thermocline.supervisor.config import SupervisorConfig
from thermocline.supervisor.nats_config import MAX_PAYLOAD_BYTES

pytestmark = pytest.mark.integration

FIRST_TOKENS = 2_500
LARGEST = 1_048_576
ADMIN_KEY = "key-of-the-operator"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of 16,384 positions."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16_384,
        initializer_range=0.2,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return save_checkpoint(config, tmp_path_factory.mktemp("long") / "long")


@dataclass
class Session:
    """A client that goes on from turn to turn, and what it was answered."""

    http: httpx.Client
    name: str
    chance: random.Random = field(default_factory=lambda: random.Random(3))
    tokens: list[int] = field(default_factory=list)
    turns: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def go_on(self, count: int = 1, new: int = 150) -> None:
        """Ask with so many new tokens, so many times."""
        for _ in range(count):
            self.tokens += [self.chance.randrange(len(SPECIAL_TOKENS), VOCAB_SIZE) for _ in range(new)]
            answer = self.ask(self.tokens)
            self.turns.append((list(self.tokens), answer))
            self.tokens += answer

    def ask(self, prompt: list[int], **cache: bool) -> list[int]:
        body: dict[str, Any] = {
            "model": self.name,
            "prompt": prompt,
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "cache": cache or {},
        }
        answer = self.http.post("/v1/completions", json=body)
        assert answer.status_code == httpx.codes.OK, answer.text
        tokens: list[int] = answer.json()["choices"][0]["token_ids"]
        assert len(tokens) == 8
        return tokens


async def submissions(nats_url: str) -> list[tuple[SubmitRequest, int]]:
    """Every request in the stream of inputs, with its bytes there."""
    bus = await connect(tuple(nats_url.split(",")), "test")
    try:
        stored = [each.data async for each in bus.follow(subjects.INPUTS_STREAM, live=False)]
    finally:
        await bus.close()
    found = [(decode_input(data), len(data)) for data in stored]
    return [(message, nbytes) for message, nbytes in found if isinstance(message, SubmitRequest)]


async def kill_active(cell: RunningCell) -> None:
    """Kill the scheduler that leads once another stands by, and wait until that one leads."""
    await test_survival.standing_by(cell)
    await test_survival.kill_active(cell)


def two_schedulers(model: Path) -> SupervisorConfig:
    """A cell with a standby and 64 MiB of KV on its device."""
    return SupervisorConfig(
        model=str(model),
        port=0,
        schedulers=len(test_survival.SCHEDULERS),
        page_size=16,
        dtype="float32",
        threads=1,
        device_kv_bytes=64 * 2**20,
        host_kv_bytes=64 * 2**20,
    )


def test_a_session_survives_its_cell(model: Path) -> None:
    """Its prefix is flushed, its gateway restarted and its scheduler killed: answers are those of an empty cache, every
    request is answered, and all but the turns behind a flush or a new gateway are told by reference.
    """
    with (
        running(two_schedulers(model), environ=test_survival.UNHURRIED | {"THERMOCLINE_ADMIN_KEY": ADMIN_KEY}) as cell,
        httpx.Client(base_url=cell.base_url, timeout=240, trust_env=False) as http,
    ):
        session = Session(http, model.name)
        session.go_on(new=FIRST_TOKENS)
        session.go_on(3)
        flush, key = {"tiers": ["device", "host"]}, {"Authorization": f"Bearer {ADMIN_KEY}"}
        http.post("/v1/cache/flush", json=flush, headers=key).raise_for_status()
        session.go_on(2)
        pid = cell.kill("gateway")
        cell.wait_restarted("gateway", pid)
        assert holds(lambda: is_ready(cell.base_url)), cell.logs("gateway")
        session.go_on(2)
        asyncio.run(kill_active(cell))
        assert holds(lambda: is_ready(cell.base_url)), cell.logs("gateway")
        session.go_on(2)
        told = asyncio.run(submissions(cell.nats_url))
        again = [session.ask(prompt, read=False, write=False) for prompt, _ in session.turns]

    assert again == [answer for _, answer in session.turns]
    whole = [message.base is None for message, _ in told]
    #              first   turns            gone, whole     turn   gateway  turns; another scheduler
    assert whole == [True, False, False, False, False, True, False, True, False, False, False]
    assert all(nbytes <= 10_000 + 4 * 150 for message, nbytes in told if message.base is not None)
    names = [message.request_id for message, _ in told]
    assert [len(list(group)) for _, group in itertools.groupby(names)] == [1, 1, 1, 1, 2, 1, 1, 1, 1, 1]


async def test_a_million_tokens_pass_through_the_broker(tmp_path: Path) -> None:
    """A broker as ``thermocline up`` starts it stores and returns the longest prompt; a smaller one refuses it."""
    request = SubmitRequest(
        request_id="long",
        gateway_id="gateway",
        namespace="0" * 32,
        prompt=pack_int32(range(LARGEST)),
        sampling=SamplingParams(max_tokens=1),
    )
    larger = NatsServer(tmp_path / "large", max_payload=MAX_PAYLOAD_BYTES)
    with larger, NatsServer(tmp_path / "small") as smaller:
        buses = [await connect([server.url], "test") for server in (larger, smaller)]
        for bus in buses:
            await bus.ensure_streams(StreamLimits(max_bytes=2**26))
        subject = subjects.request_input("gateway")
        await buses[0].append(subject, encode(request), message_id="long")
        (stored,) = [each.data async for each in buses[0].follow(subjects.INPUTS_STREAM, live=False)]
        with pytest.raises(PayloadTooLarge):
            await buses[1].append(subject, encode(request), message_id="long")
        for bus in buses:
            await bus.close()

    assert decode_input(stored) == request
