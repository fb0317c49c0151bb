"""Seeded workloads as requests for blocks, made by the simulator's generators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from itertools import count
from random import Random

from bench.blocks import BlockRequest, BlockRequests
from thermocline.simulate.tokens import Span
from thermocline.simulate.workloads.asked import Asked, Workload
from thermocline.simulate.workloads.chat import ChatOptions, ChatWorkload
from thermocline.simulate.workloads.documents import DocumentOptions, DocumentWorkload
from thermocline.simulate.workloads.few_shot import FewShotOptions, FewShotWorkload

SHORT_BLOCK, LONG_BLOCK = 64, 512  # Tokens.

_NS_PER_S = 1e9
_SESSION_EVERY_S = 0.5  # On average.
_DOCUMENT_QUERIES = 600
_QUESTIONS = 3_000
_SESSIONS = 600


def few_shot(seed: int) -> list[BlockRequest]:
    """MMLU's subjects with their examples, questions shuffled; blocks of 64 tokens."""
    return _blocks(FewShotWorkload(FewShotOptions(questions=_QUESTIONS), seed).requests(), SHORT_BLOCK)


def documents(distance: str) -> Callable[[int], list[BlockRequest]]:
    """LooGLE's contexts, queries in a row, shuffled or as far apart as can be; blocks of 512 tokens."""

    def make(seed: int) -> list[BlockRequest]:
        options = DocumentOptions(distance=distance, queries=_DOCUMENT_QUERIES)  # type: ignore[arg-type]
        return _blocks(DocumentWorkload(options, seed).requests(), LONG_BLOCK)

    return make


def chat(seed: int) -> list[BlockRequest]:
    """Sessions that begin at random and think between turns, in order of time; blocks of 64 tokens."""
    return blocks_in_time(ChatWorkload(ChatOptions(sessions=_SESSIONS), seed), seed, SHORT_BLOCK)


WORKLOADS: dict[str, tuple[int, Callable[[int], list[BlockRequest]]]] = {
    "few-shot": (SHORT_BLOCK, few_shot),
    "documents min": (LONG_BLOCK, documents("min")),
    "documents shuffled": (LONG_BLOCK, documents("shuffled")),
    "documents max": (LONG_BLOCK, documents("max")),
    "chat": (SHORT_BLOCK, chat),
}
"""The tokens of a block, and what makes the requests from a seed."""


def blocks_in_time(workload: Workload, seed: int, block_tokens: int) -> list[BlockRequest]:
    """All requests of a workload in order of time; sessions without a time of their own begin at random."""
    return _blocks(_in_time(workload, seed), block_tokens)


def _in_time(workload: Workload, seed: int) -> Iterator[Asked]:
    """All turns in order; an answer takes no time here."""
    rng, numbers = Random(seed), count()
    waiting: list[tuple[float, int, Asked]] = []
    now_s = 0.0
    for first in workload.requests():
        now_s += rng.expovariate(1 / _SESSION_EVERY_S)
        heappush(waiting, (now_s if first.time_s is None else first.time_s, next(numbers), first))
    while waiting:
        time_s, _, asked = heappop(waiting)
        yield Asked(asked.spans, asked.answer, time_s, asked.session)
        following = workload.follow_up(asked)
        if following is not None:
            heappush(waiting, (time_s + following[0], next(numbers), following[1]))


def _blocks(asked: Iterator[Asked], block_tokens: int) -> list[BlockRequest]:
    """Prompts as whole blocks; a prompt that is shorter than one is left out."""
    found = BlockRequests(block_tokens)
    for request in asked:
        names = list(_names(request.spans, block_tokens))
        if names:
            time_ns = int((request.time_s or 0.0) * _NS_PER_S)
            answer_tokens = request.answer.tokens
            found.append(names, time_ns=time_ns, prompt_tokens=request.prompt_tokens, answer_tokens=answer_tokens)
    return found.requests


def _names(spans: tuple[Span, ...], block_tokens: int) -> Iterator[tuple[tuple[int, int, int], ...]]:
    """What each whole block is made of: parts of spans, each with where it begins in the span and its length."""
    parts: list[tuple[int, int, int]] = []
    room = block_tokens
    for name, tokens in spans:
        start = 0
        while start < tokens:
            taken = min(room, tokens - start)
            parts.append((name, start, taken))
            start += taken
            room -= taken
            if not room:
                yield tuple(parts)
                parts, room = [], block_tokens
