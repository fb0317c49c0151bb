"""The official OpenAI client streams chats while a worker and the scheduler are killed, and does not notice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import openai
import pytest

from thermocline.supervisor.api import RunningCell, running
from thermocline.supervisor.config import SupervisorConfig

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

SETTINGS = SupervisorConfig(
    port=0, workers=2, threads=1, device_kv_bytes=12 * 2**20, host_kv_bytes=24 * 2**20, grace_s=20.0
)
QUESTIONS = ("What is the password of the Tujer warehouse?", "Say something.", "Who lives in Braxol?", "And then?")
TOKENS = 160


@pytest.fixture(scope="module")
def cell() -> Iterator[RunningCell]:
    """Two workers of the bundled model."""
    with running(SETTINGS) as running_cell:
        yield running_cell


def client_of(cell: RunningCell) -> openai.AsyncOpenAI:
    """It may not retry: a stream that broke would be seen."""
    return openai.AsyncOpenAI(base_url=f"{cell.base_url}/v1", api_key="none", max_retries=0, timeout=240)


async def chat(client: openai.AsyncOpenAI, model: str, question: str, on_piece: Callable[[], None]) -> tuple[str, str]:
    """Text and finish reason of one streamed chat."""
    stream = await client.chat.completions.create(
        model=model,
        messages=[
            {"role": "system", "content": "The password of the Tujer warehouse is topaz."},
            {"role": "user", "content": question},
        ],
        stream=True,
        max_tokens=TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    text, reason = "", ""
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
            if choice.delta.content:
                on_piece()
    return text, reason


async def all_chats(cell: RunningCell, victim: str | None) -> list[set[tuple[str, str]]]:
    """What each question is answered with, all asked at once. ``victim`` dies when each stream has brought a few
    pieces; until then every question is asked again once it is answered.
    """
    pieces = [0] * len(QUESTIONS)
    are_streaming, is_over = asyncio.Event(), asyncio.Event()

    def counter(place: int) -> Callable[[], None]:
        def count() -> None:
            pieces[place] += 1
            if min(pieces) >= 3:
                are_streaming.set()

        return count

    async with client_of(cell) as client:
        model = (await client.models.list()).data[0].id

        async def repeat(place: int, question: str) -> set[tuple[str, str]]:
            answers = {await chat(client, model, question, counter(place))}
            while not is_over.is_set():
                answers.add(await chat(client, model, question, counter(place)))
            return answers

        if victim is None:
            is_over.set()
        chats = asyncio.gather(*(repeat(place, question) for place, question in enumerate(QUESTIONS)))
        if victim is not None:
            await are_streaming.wait()
            pid = cell.kill(victim)
            is_over.set()
            answers = await chats
            await asyncio.to_thread(cell.wait_restarted, victim, pid, 120.0)
            return answers
        return await chats


def test_streams_of_the_official_client_survive_kills(cell: RunningCell) -> None:
    """The same texts as without them, each ended for its length, and no exception, whichever process dies."""
    calm = asyncio.run(all_chats(cell, None))

    fired = {victim: asyncio.run(all_chats(cell, victim)) for victim in ("worker-0", "scheduler")}

    assert fired == dict.fromkeys(fired, calm)
    assert [[reason for _, reason in answers] for answers in calm] == [["length"]] * len(QUESTIONS)
