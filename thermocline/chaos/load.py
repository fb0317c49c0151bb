"""Steady load: conversations begin at random times, independent of earlier ones (open loop), up to a bound."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx

from thermocline.chaos.client import Manner, Reply, ask
from thermocline.chaos.verdicts import ClientError, Windows, excuse
from thermocline.chaos.workload import Conversation, Known

PATIENCE_S = 240.0
"""A request that is not answered by then, retries included, is stuck."""

_FIRST_RETRY_S = 0.25
_MOST_RETRY_S = 4.0
_CONNECT_S = 5.0
_READ_S = PATIENCE_S
_MAX_REPLIES = 500_000


@dataclass(slots=True)
class Tally:
    """What clients saw. ``streams`` holds the attempts with a TTFT; ``held_back`` counts skipped arrivals."""

    endings: Counter[str] = field(default_factory=Counter)
    excused: Counter[str] = field(default_factory=Counter)
    retries: int = 0
    held_back: int = 0
    tokens: int = 0
    streams: list[Reply] = field(default_factory=list)


class Load:
    """The clients of a run."""

    def __init__(
        self,
        base_url: str,
        conversations: list[Conversation],
        windows: Windows,
        complain: Callable[[str, str], None],
        *,
        seed: int,
        requests_per_s: float,
        max_in_flight: int,
        workers: int,
        origin_s: float,
    ) -> None:
        """Take the conversations to hold with the gateway at ``base_url``; no request is sent before :meth:`run`.

        ``requests_per_s`` is the mean rate, later turns of conversations included. An arrival beyond ``max_in_flight``
        open conversations is skipped. ``complain`` is called with the kind of each violation and what was seen.
        ``windows`` has the faults that may excuse an error, in seconds since ``origin_s`` (``time.monotonic``);
        ``workers`` is the number of workers in the cell. ``seed`` decides arrivals, conversations and how clients
        behave.
        """
        self.tally = Tally()
        self.in_flight = 0
        self._base_url = base_url
        self._conversations = conversations
        self._windows = windows
        self._complain = complain
        self._rng = random.Random(f"chaos-load-{seed}")
        self._requests_per_s = requests_per_s
        self._max_in_flight = max_in_flight
        self._workers = workers
        self._origin_s = origin_s

    async def run(self, stop: asyncio.Event) -> None:
        """Send requests until ``stop``, then wait for the outstanding answers."""
        # A connection for each request, as clients behind many load balancers have: no request may inherit
        # another's broken one.
        limits = httpx.Limits(max_connections=self._max_in_flight + 4, max_keepalive_connections=0)
        timeout = httpx.Timeout(_READ_S, connect=_CONNECT_S)
        turns = sum(len(each.asks) for each in self._conversations) / len(self._conversations)
        async with (
            httpx.AsyncClient(base_url=self._base_url, timeout=timeout, limits=limits, trust_env=False) as client,
            asyncio.TaskGroup() as group,
        ):
            while not stop.is_set():
                try:
                    async with asyncio.timeout(self._rng.expovariate(self._requests_per_s / turns)):
                        await stop.wait()
                        break
                except TimeoutError:
                    pass  # The next one is due.
                chosen = self._rng.choice(self._conversations)
                draw = self._rng.getrandbits(32)
                if self.in_flight >= self._max_in_flight:
                    self.tally.held_back += 1
                    continue
                self.in_flight += 1
                group.create_task(self._talk(client, chosen, random.Random(draw)))

    async def _talk(self, client: httpx.AsyncClient, conversation: Conversation, rng: random.Random) -> None:
        try:
            for known in conversation.asks:
                if not await self._until_answered(client, known, rng):
                    return
        finally:
            self.in_flight -= 1

    async def _until_answered(self, client: httpx.AsyncClient, known: Known, rng: random.Random) -> bool:
        """Send a request, and retry where an error allows it; return whether the conversation can go on."""
        manner = _manner(rng, len(known.token_ids))
        first_s = time.monotonic()
        attempt = 0
        while True:
            reply = await ask(client, known, manner)
            self._note(reply)
            if reply.ending == "wrong":
                self._complain("wrong answer", f"{known.name}: {reply.wrong} ({manner})")
                return False
            if reply.ending != "error":
                return reply.ending == "answered"
            assert reply.error is not None
            if not self._is_excused(known, manner, reply, reply.error):
                return False
            if reply.error.code == "deadline_exceeded":
                return False
            if time.monotonic() - first_s > PATIENCE_S:
                self._complain("stuck", f"{known.name}: no answer in {PATIENCE_S:.0f} s, at last {reply.error}")
                return False
            await asyncio.sleep(_retry_in_s(rng, attempt, reply.error))
            attempt += 1
            self.tally.retries += 1

    def _note(self, reply: Reply) -> None:
        self.tally.endings[reply.ending] += 1
        self.tally.tokens += reply.tokens
        if reply.ttft_s and len(self.tally.streams) < _MAX_REPLIES:
            self.tally.streams.append(reply)

    def _is_excused(self, known: Known, manner: Manner, reply: Reply, error: ClientError) -> bool:
        since_s, until_s = reply.started_s - self._origin_s, reply.ended_s - self._origin_s
        felt = self._windows.felt(since_s, until_s)
        why = excuse(error, felt, has_deadline=manner.deadline_ms is not None, workers=self._workers)
        if why:
            self.tally.excused[f"{error.code}: {why}"] += 1
            return True
        nearby = "; ".join(str(fault) for fault in felt) or "no fault"
        self._complain("error without excuse", f"{known.name} after {reply.tokens} tokens: {error} ({nearby})")
        return False


def _retry_in_s(rng: random.Random, attempt: int, error: ClientError) -> float:
    """Return an exponential backoff in seconds with jitter, at least as long as the server asked for."""
    backoff_s = min(_MOST_RETRY_S, _FIRST_RETRY_S * 2.0 ** min(attempt, 16)) * rng.uniform(0.5, 1.0)
    return max(backoff_s, float(min(error.retry_after_s or 0, PATIENCE_S)))


def _manner(rng: random.Random, tokens: int) -> Manner:
    """Draw a manner: most clients stream, some disconnect half-way, some set a deadline, long or too short."""
    is_stream = rng.random() < 0.75
    leaves = is_stream and tokens > 2 and rng.random() < 0.12
    has_deadline = rng.random() < 0.12
    return Manner(
        is_stream,
        leaves_after=rng.randrange(1, tokens - 1) if leaves else None,
        deadline_ms=rng.choice((150, 800, 3_000, 60_000)) if has_deadline else None,
    )
