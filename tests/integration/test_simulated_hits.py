"""A simulated cell hits what a real one hits, token for token, where no time has a say.

That is with one request at a time, in a device pool with nothing below it, and under a policy that looks at no times.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import httpx
import pytest

from services.scheduler.core import Stamped
from shared.messages.base import unpack_int32
from shared.messages.cell_events import CellConfig
from shared.messages.worker_plans import AdmitRequest, WorkerPlan
from thermocline.client import served_model, stream_answer
from thermocline.simulate.profiles import load_hardware, load_model
from thermocline.simulate.simulation import Setup, Simulation
from thermocline.simulate.tokens import Span, span_tokens
from thermocline.simulate.workloads import Asked, Workload
from thermocline.simulate.workloads.asked import OUTPUT, QUESTION, SHARED, name
from thermocline.supervisor.api import running
from thermocline.supervisor.config import SupervisorConfig

MODEL = load_model("thermocline-mha")
FIRST_ORDINARY_TOKEN = 8
DEVICE_TOKENS = 2048


def asked(number: int, rng: Random) -> Asked:
    """Return a question about one of six documents, of which the pool holds a part, popular ones more often."""
    document = min(rng.randrange(6), rng.randrange(6))
    spans = (Span(name(SHARED, 99), 48), Span(name(SHARED, document), 400), Span(name(QUESTION, number), 37))
    return Asked(spans=spans, answer=Span(name(OUTPUT, number), 3))


class Listed(Workload):
    """Requests that were drawn before."""

    def __init__(self, requests: Sequence[Asked]) -> None:
        self._requests = requests

    def requests(self) -> Iterator[Asked]:
        yield from self._requests


def token_ids(request: Asked, vocabulary: int) -> list[int]:
    """Return a prompt in the model's vocabulary; spans stay what they share."""
    ids = [each for span in request.spans for each in unpack_int32(span_tokens(span))]
    return [each % (vocabulary - FIRST_ORDINARY_TOKEN) + FIRST_ORDINARY_TOKEN for each in ids]


async def real_hits(url: str, requests: Sequence[Asked]) -> list[int]:
    """Ask one question after another; return the tokens that each found in the device pool."""
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:
        served = await served_model(client)
        body = {"model": served["id"], "temperature": 0, "ignore_eos": True}
        found = []
        for request in requests:
            prompt = token_ids(request, served["vocab_size"])
            answer = await stream_answer(
                client, "/v1/completions", body | {"prompt": prompt, "max_tokens": request.answer.tokens}
            )
            found.append(answer.device_tokens)
        return found


def simulated_hits(requests: Sequence[Asked], policy: str, page_size: int) -> list[int]:
    """Return the tokens that each of the same requests finds in a simulated device pool."""
    setup = Setup(
        hardware=load_hardware("cpu-2core"),
        model=MODEL,
        config=CellConfig(policy=policy),
        page_size=page_size,
        device_tokens=DEVICE_TOKENS,
        host_tokens=0,
        in_flight=1,
    )
    simulation = Simulation(setup, Listed(requests))
    found: list[int] = []

    def watch(_: Stamped, outputs: list[Any]) -> None:
        orders = (output.order for output in outputs if isinstance(output, WorkerPlan))
        found.extend(order.device_tokens for order in orders if isinstance(order, AdmitRequest))

    simulation.cell.watch = watch
    simulation.run()
    return found


@pytest.mark.parametrize(("policy", "page_size"), [("lru", 16), ("s3-fifo", 32)])
def test_a_simulated_cell_hits_what_a_real_one_hits(policy: str, page_size: int) -> None:
    """Of every request, with evictions in nearly each."""
    rng = Random(1)
    requests = [asked(number, rng) for number in range(30)]
    config = SupervisorConfig(
        port=0,
        threads=1,
        dtype="float32",
        page_size=page_size,
        policy=policy,
        device_kv_bytes=DEVICE_TOKENS * MODEL.kv_token_bytes,
        host_kv_bytes=1,
    )
    with running(config) as cell:
        real = asyncio.run(real_hits(cell.base_url, requests))

    assert simulated_hits(requests, policy, page_size) == real
    assert 0 < sum(real) < 0.9 * sum(request.prompt_tokens for request in requests)
