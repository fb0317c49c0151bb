"""Asks one pass of one server, with the client of ``thermocline load``."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import dataclass

import uvloop

from bench.peers.passes import Pass
from bench.peers.processes import PeerFailed
from bench.peers.systems import Bounds
from thermocline.load.clock import MonotonicClock
from thermocline.load.dialect import Dialect
from thermocline.load.driver import Driver, Outcome, Pace
from thermocline.load.http_client import HttpClient
from thermocline.load.prompts import PromptMaker
from thermocline.load.talker import Talker

REQUEST_S = 300.0
PASS_S = 600.0
_FIRST_TOKEN = 8
_CONTENTS = 16  # Passes of a round that share no prompt.


@dataclass(frozen=True, slots=True)
class Spoken:
    """How one server is talked to: always in token ids, so that lengths and shared prefixes are the same for all."""

    base_url: str
    model: str
    keeps_connections: bool = True


def prompt_seed(seed: int, made: Pass) -> int:
    """Passes of equal content share documents, others nothing."""
    return seed * _CONTENTS + made.content


def ask(spoken: Spoken, bounds: Bounds, made: Pass, seed: int) -> Outcome:
    """All replies. Raises PeerFailed when one request was not answered whole, or the pass took too long."""
    outcome: Outcome = uvloop.run(_ask(spoken, bounds, made, seed))
    return outcome


async def _ask(spoken: Spoken, bounds: Bounds, made: Pass, seed: int) -> Outcome:
    clock = MonotonicClock()
    vocabulary = range(_FIRST_TOKEN, bounds.shape.vocabulary)
    dialect = Dialect(
        model=spoken.model,
        api="tokens",
        is_extended=True,
        returns_tokens=True,
        words_per_token=1.0,
        vocabulary_first=vocabulary.start,
        vocabulary_end=vocabulary.stop,
        max_context=bounds.shape.context,
    )
    prompts = PromptMaker(prompt_seed(seed, made), vocabulary=vocabulary, words_per_token=1.0, length_scale=1.0)
    headers = {"User-Agent": "thermocline-bench", "Accept-Encoding": "identity"}
    if not spoken.keeps_connections:
        headers["Connection"] = "close"
    http = HttpClient(spoken.base_url, headers, clock, connect_timeout_s=REQUEST_S)
    talker = Talker(http, dialect, prompts, clock, timeout_s=REQUEST_S, retries=0, seed=0)
    driver = Driver(made.workload, talker, clock, Pace(made.requests, made.places), lambda reply: None)
    gc.collect()
    try:
        async with asyncio.timeout(PASS_S):
            outcome = await driver.run()
    except TimeoutError as error:
        raise PeerFailed(f"{made.name}: not over within {PASS_S:.0f} s") from error
    finally:
        http.close()
    failed = [reply for reply in outcome.replies if reply.error]
    if failed or outcome.abandoned:
        why = f"{failed[0].error}: {failed[0].message}" if failed else "abandoned"
        raise PeerFailed(f"{made.name}: {len(failed)} of {made.requests} requests failed: {why}")
    return outcome
