"""HCache's Figure 9: conversations that are restored at every round, on a device that serves others meanwhile.

One server in virtual time, step by step: a step decodes a token of every request that generates, and computes a chunk
of the one that is being prefilled (SplitFuse, the paper's section 5). Requests are restored one after the other, in
order, by streams of their own (5): a restoration takes as long as alone, and what it computes meanwhile makes steps
longer (6.1.1: "GPU time spent on the restoration"). KV is dropped when a round ends, and history, question and answer
must fit beside the others' (6.1.1). Rounds of a session are 30 s apart, sessions arrive by Poisson's law; lengths have
ShareGPT4's averages (2.3), with an assumed spread and number of rounds.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from random import Random
from statistics import fmean
from typing import Any

from bench.papers.hcache_platform import Platform, pipelined_us
from services.scheduler.core.hidden.partition import best_two_way, kv_only
from thermocline.simulate.cost import device_kv_tokens, step_s
from thermocline.simulate.workloads.lengths import around

INPUT_TOKENS, ANSWER_TOKENS = 66.8, 358.8  # 2.3
MOST_TOKENS = 16_384  # 2.3
ROUNDS = 12.0
"""On average. With it half of the rounds have a history of about 2.5 thousand tokens or more (2.3)."""

SPREAD = 0.7
PAUSE_S = 30.0  # 6.1.1
CHUNK_TOKENS = 512  # Of prefill in a step.
WARM_S, END_S = 450.0, 1050.0
"""Rounds that arrive between these count: before, histories are young."""

METHODS = ("ideal", "recomputed", "kv", "hcache")


@dataclass(slots=True)
class Round:
    """A round of a session, and what became of it. Times in seconds."""

    session: int
    number: int
    arrived: float
    history: int
    question: int
    answer: int
    restore_s: float = 0.0
    """Until it is restored."""

    busy: float = 0.0
    """Of that time, in which restoring computes."""

    prefilled: int = 0
    first: float = 0.0
    generated: int = 0

    @property
    def tokens(self) -> int:
        return self.history + self.question + self.answer


@dataclass(slots=True)
class Server:
    """State between two steps."""

    platform: Platform
    method: str
    room: int
    now: float = 0.0
    waiting: deque[Round] = field(default_factory=deque)
    restoring: Round | None = None
    restored: deque[Round] = field(default_factory=deque)
    """In order; the first of them is being prefilled."""

    decoding: list[Round] = field(default_factory=list)
    over: list[tuple[Round, float]] = field(default_factory=list)
    """With the time of the last token."""

    def step(self, next_arrival: float) -> list[Round]:
        """Go on by a step, or to what comes next; the rounds that ended."""
        self._begin()
        chunk = self._chunk()
        if not chunk and not self.decoding:
            # Something is being restored, or there is nothing at all.
            restoring = self.restoring.restore_s if self.restoring else float("inf")
            self._pass(max(1e-6, min(restoring, next_arrival - self.now)))
            return []
        context = sum(each.history + each.question + each.generated for each in self.decoding)
        self._pass(self._stretched(step_s(self.platform.costs, [chunk] if chunk else [], len(self.decoding), context)))
        return self._tokens(chunk)

    def _begin(self) -> None:
        """The next in order, if there is room for it."""
        if self.restoring or not self.waiting or self.waiting[0].tokens > self.room:
            return
        one = self.waiting.popleft()
        self.room -= one.tokens
        self.restoring = one
        if self.method in ("kv", "hcache") and one.history:
            self._plan(one)
        if self.method != "recomputed":
            one.prefilled = one.history
        self._pass(0.0)

    def _plan(self, one: Round) -> None:
        times = self.platform.times(one.history)
        partition = (kv_only if self.method == "kv" else best_two_way)(self.platform.layers, times)
        computing = partition.hidden * times.compute_hidden + partition.tokens * times.compute_tokens
        alone = pipelined_us(partition, times)
        one.restore_s, one.busy = alone / 1e6, min(1.0, computing / alone)

    def _stretched(self, seconds: float) -> float:
        """A step beside which something is being restored."""
        one = self.restoring
        if one is None or not one.busy:
            return seconds
        until_restored = seconds + one.busy * one.restore_s
        return until_restored if one.busy >= 1.0 else min(until_restored, seconds / (1.0 - one.busy))

    def _chunk(self) -> tuple[int, int] | None:
        if not self.restored:
            return None
        one = self.restored[0]
        return one.prefilled, min(one.history + one.question, one.prefilled + CHUNK_TOKENS)

    def _tokens(self, chunk: tuple[int, int] | None) -> list[Round]:
        """Everybody who decodes has a token; so has who was prefilled."""
        ended = []
        for each in self.decoding:
            each.generated += 1
            if each.generated >= each.answer:
                ended.append(each)
        for each in ended:
            self.decoding.remove(each)
            self.room += each.tokens
            self.over.append((each, self.now))
        if chunk is not None:
            one = self.restored[0]
            one.prefilled = chunk[1]
            if one.prefilled == one.history + one.question:
                one.first, one.generated = self.now, 1
                self.decoding.append(self.restored.popleft())
        return ended

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.restoring or self.restored or self.decoding)

    def _pass(self, seconds: float) -> None:
        """Time goes by, and so does a restoration. What is restored waits for its prefill."""
        self.now += seconds
        if self.restoring is not None:
            self.restoring.restore_s -= seconds
            if self.restoring.restore_s <= 0:
                self.restored.append(self.restoring)
                self.restoring = None


def serve(platform: Platform, method: str, rate: float, seed: int, end_s: float = END_S) -> dict[str, Any]:
    """Mean TTFT and time between tokens, in ms, at so many rounds a second. Raises KeyError for no such method.

    Raises ValueError where no round arrives in the time that counts.
    """
    if method not in METHODS:
        raise KeyError(method)
    room = device_kv_tokens(platform.hardware_profile, platform.model_profile, platform.degree)
    server = Server(platform, method, room)
    coming = _sessions(seed, rate / ROUNDS, end_s)
    histories = [0] * len(coming)
    while coming or not server.is_idle:
        while coming and coming[0][0] <= server.now:
            arrived, session, number = heapq.heappop(coming)
            server.waiting.append(_round(seed, session, number, arrived, histories[session], room))
        for ended in server.step(coming[0][0] if coming else float("inf")):
            histories[ended.session] = ended.tokens
            if server.now + PAUSE_S < end_s and _goes_on(seed, ended, room):
                heapq.heappush(coming, (server.now + PAUSE_S, ended.session, ended.number + 1))
    counted = [(one, end) for one, end in server.over if WARM_S * end_s / END_S <= one.arrived]
    if not counted:
        raise ValueError(f"at {rate:g} rounds a second none arrives within {end_s:g} s after the beginning")
    return {
        "rate": rate,
        "rounds": len(counted),
        "history_tokens": fmean(one.history for one, _ in counted),
        "ttft_ms": fmean(one.first - one.arrived for one, _ in counted) * 1e3,
        "tbt_ms": fmean((end - one.first) / max(1, one.answer - 1) for one, end in counted) * 1e3,
    }


def _sessions(seed: int, rate: float, end_s: float) -> list[tuple[float, int, int]]:
    """(When, session, round 0), by Poisson's law."""
    rng, at = Random(f"{seed} sessions"), 0.0
    found: list[tuple[float, int, int]] = []
    while (at := at + rng.expovariate(rate)) < end_s:
        found.append((at, len(found), 0))
    return found


def _round(seed: int, session: int, number: int, arrived: float, history: int, room: int) -> Round:
    rng = Random(f"{seed} {session} {number}")
    question, answer = around(rng, INPUT_TOKENS, SPREAD), around(rng, ANSWER_TOKENS, SPREAD)
    return Round(session, number, arrived, min(history, MOST_TOKENS, room - question - answer), question, answer)


def _goes_on(seed: int, ended: Round, room: int) -> bool:
    """By a law of its own for each round, whenever it ends; a session stops before its history is too long."""
    rng = Random(f"{seed} {ended.session} {ended.number} on")
    return rng.random() < 1 - 1 / ROUNDS and ended.tokens < min(MOST_TOKENS, room // 2)
