"""Conversations of forty turns at temperature 1: each turn finds the KV of the turn before, but for its last page.

The gateway is killed in the middle, and later everything at once, the broker included.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.chunks import CHUNK_TOKENS
from tests.checkpoints import EOS, SPECIAL_TOKENS, make_checkpoint
from tests.idle import hears_of_chunks, settled, status_at
from tests.waiting import holds, is_ready
from thermocline.supervisor.api import RunningCell, running
from thermocline.supervisor.config import SupervisorConfig
from thermocline.supervisor.process_identity import start_time

pytestmark = pytest.mark.integration

PAGE_SIZE = 16
TURNS_BEFORE, TURNS_BETWEEN, TURNS_AFTER = 14, 6, 20
QUESTIONS = ("Who keeps the keys?", "And then?", "Name a colour, a river and a ship.", "What is the code?")
NO_ROLES = {str(token): -100 for token in range(len(SPECIAL_TOKENS)) if token != EOS}
"""A random model would write the template's tokens of its own, whose text no client sees."""


ALWAYS_FROM_DISK = {"THERMOCLINE_PREFETCH_WAIT": "full"}
"""Together with ``restoring`` kv: a busy machine may compute a tiny model's KV sooner than it reads it."""


@dataclass
class Conversation:
    """What a client keeps, and for each turn: prompt tokens, answer tokens, and how many of the prompt were cached."""

    body: dict[str, Any]
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def whole_chunks(self) -> int:
        """Chunks of the disk that the last turn has left."""
        prompt, answer, _ = self.turns[-1]
        return (prompt + answer - 1) // CHUNK_TOKENS

    def go_on(self, cell: RunningCell, count: int) -> None:
        """Ask ``count`` more questions, with the answers' texts as they came.

        Each is asked once the scheduler has heard that the answer before it is over: before that its end is not found.
        """
        with httpx.Client(base_url=cell.base_url, timeout=120, trust_env=False) as client:
            for _ in range(count):
                self.messages.append({"role": "user", "content": QUESTIONS[len(self.turns) % len(QUESTIONS)]})
                body = self.body | {"messages": self.messages, "temperature": 1.0, "seed": len(self.turns)}
                answer = client.post("/v1/chat/completions", json=body)
                assert answer.status_code == httpx.codes.OK, answer.text
                told = answer.json()
                self.messages.append(told["choices"][0]["message"])
                usage = told["usage"]
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                self.turns.append((usage["prompt_tokens"], usage["completion_tokens"], cached))
                asyncio.run(settled(partial(status_at, cell.nats_url)))

    def shortfalls(self, restarted_at: int) -> list[tuple[int, int, int]]:
        """Turns that found less than every full page of the turn before: number, cached, and what was to be found.

        The last token of an answer was never computed. What a disk brings back are whole chunks.
        """
        found = []
        for number, (before, now) in enumerate(zip(self.turns, self.turns[1:], strict=False), 1):
            grid = CHUNK_TOKENS if number == restarted_at else PAGE_SIZE
            expected = (before[0] + before[1] - 1) // grid * grid
            if now[2] < expected:
                found.append((number, now[2], expected))
        return found


def kill_everything(cell: RunningCell) -> None:
    """The supervisor first, so that it starts nothing again."""
    children = cell.record.children
    for pid in (cell.supervisor_pid, *cell.pids().values()):
        with contextlib.suppress(ProcessLookupError):  # The kernel ends them with their supervisor.
            os.kill(pid, signal.SIGKILL)
    assert holds(lambda: not any(start_time(child.pid) == child.started for child in children))


def turn_fates(cell: RunningCell) -> dict[str, float]:
    """Turns of a gateway's life by what became of their latest answer."""
    text = httpx.get(f"{cell.base_url}/metrics", trust_env=False).text
    lines = [line for line in text.splitlines() if line.startswith("thermocline_gateway_turns_total{")]
    return {line.partition('fate="')[2].partition('"')[0]: float(line.rpartition(" ")[2]) for line in lines}


def shared_answers(cell: RunningCell) -> int:
    """Answers of a gateway's life that another one knows of, or needs not be told of."""
    text = httpx.get(f"{cell.base_url}/metrics", trust_env=False).text
    wanted = [f'thermocline_gateway_answers_total{{outcome="{outcome}"}}' for outcome in ("stored", "usual")]
    return sum(int(float(line.rpartition(" ")[2])) for line in text.splitlines() if line.startswith(tuple(wanted)))


def settings(model: Path | None, folder: Path) -> SupervisorConfig:
    """A small cell whose broker and disk outlive it; without a model the bundled one."""
    return SupervisorConfig(
        model=str(model or ""),
        port=0,
        page_size=PAGE_SIZE,
        dtype="float32",
        threads=1,
        device_kv_bytes=64 * 2**20,
        host_kv_bytes=64 * 2**20,
        restoring="kv",
        disk_dir=(str(folder / "disk"),),
        data_dir=str(folder / "data"),
    )


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It says hardly anything as its tokenizer would."""
    return make_checkpoint("llama", tmp_path_factory.mktemp("model") / "llama")


@pytest.mark.parametrize("is_random", [True, False], ids=["random", "bundled"])
def test_forty_turns_lose_nothing_to_kills(is_random: bool, random_model: Path, tmp_path: Path) -> None:
    """Neither with a random model nor with the bundled one, whose answers are nearly all their tokenizer's own."""
    config = settings(random_model if is_random else None, tmp_path)
    conversation = Conversation({"max_tokens": 24} | ({"logit_bias": NO_ROLES} if is_random else {}))
    with running(config, environ=ALWAYS_FROM_DISK) as cell:
        conversation.go_on(cell, TURNS_BEFORE)
        # What is still on its way to the bucket is lost with its process.
        assert holds(lambda: shared_answers(cell) == TURNS_BEFORE)
        pid = cell.kill("gateway")
        cell.wait_restarted("gateway", pid)
        assert holds(lambda: is_ready(cell.base_url))
        conversation.go_on(cell, TURNS_BETWEEN)
        kept_before = turn_fates(cell)["kept"]
        # The same is true of what is on its way to the disk.
        assert holds(lambda: shared_answers(cell) == TURNS_BETWEEN)
        asyncio.run(hears_of_chunks(partial(status_at, cell.nats_url), conversation.whole_chunks, timeout_s=60.0))
        kill_everything(cell)
    with running(config, environ=ALWAYS_FROM_DISK) as cell:
        asyncio.run(hears_of_chunks(partial(status_at, cell.nats_url), conversation.whole_chunks, timeout_s=60.0))
        conversation.go_on(cell, TURNS_AFTER)
        kept_after = turn_fates(cell)["kept"]

    assert conversation.shortfalls(TURNS_BEFORE + TURNS_BETWEEN) == []
    if is_random:
        # All of them, also the first one of each life.
        assert (kept_before, kept_after) == (TURNS_BETWEEN, TURNS_AFTER)


def test_without_memory_turns_lose_what_was_said(random_model: Path, tmp_path: Path) -> None:
    """Which shows that the test above would see it."""
    conversation = Conversation({"max_tokens": 24, "logit_bias": NO_ROLES})
    with running(settings(random_model, tmp_path), environ={"THERMOCLINE_ANSWER_MEMORY_BYTES": "0"}) as cell:
        conversation.go_on(cell, 4)

    assert conversation.shortfalls(0) != []
