"""What every system is asked: the same prompts in the same order, in passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from bench.peers.agents import TURNS, AgentSessions
from bench.peers.systems import Tier
from thermocline.load.workloads import UnsharedOptions, UnsharedWorkload
from thermocline.simulate.tokens import Span
from thermocline.simulate.workloads import Asked, Workload
from thermocline.simulate.workloads.asked import OUTPUT, QUESTION, SHARED, name
from thermocline.simulate.workloads.chat import ChatOptions, ChatWorkload

DOCUMENT_TOKENS = 2048
QUESTION_TOKENS = 32
ANSWER_TOKENS = 16

BURST_TOKENS = {"burst": DOCUMENT_TOKENS, "burst_1024": 1024, "burst_512": 512}
"""Lengths of new documents by the name of their pass."""

_MOST_TURNS = 64  # Conversations end by their length long before.


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """``places`` requests are under way at once. ``emptied`` tiers are empty when it begins.

    ``needs`` is the tier without which a system is not asked. ``firsts`` are the requests that are the first on their
    document, by their number. ``content`` tells passes of one round apart that share no prompt.
    """

    name: str
    workload: Workload
    requests: int
    places: int
    emptied: tuple[Tier, ...] = ()
    needs: Tier | None = None
    firsts: frozenset[int] = frozenset()
    content: int = 0


class DocumentQuestions:
    """Every document is asked about equally often, in an order drawn anew for each pass.

    Another ``number`` asks other questions about the same documents. ``tokens`` is the length of a document.
    """

    def __init__(
        self, documents: int, questions: int, *, number: int, seed: int, tokens: int = DOCUMENT_TOKENS
    ) -> None:
        self._tokens = tokens
        self._order = [document for document in range(documents) for _ in range(questions)]
        self._first_name = number * len(self._order)
        Random(f"peers-{seed}-{number}").shuffle(self._order)

    def requests(self) -> Iterator[Asked]:
        for number, document in enumerate(self._order, self._first_name):
            spans = (Span(name(SHARED, document), self._tokens), Span(name(QUESTION, number), QUESTION_TOKENS))
            yield Asked(spans, Span(name(OUTPUT, number), ANSWER_TOKENS))

    def follow_up(self, asked: Asked) -> tuple[float, Asked] | None:
        return None

    def firsts(self) -> frozenset[int]:
        """Numbers of the requests before which nobody asked about their document."""
        return frozenset({document: number for number, document in reversed(list(enumerate(self._order)))}.values())


def documents_passes(seed: int, share: float) -> list[Pass]:
    """Documents several times larger than device memory: new, then kept in host memory, then kept on the disk only.

    The order in which passes are asked does not change where documents are: each of them makes sure of that.
    """
    documents, questions = _part(16, share, 4), 4
    passes = []
    for number, (title, emptied, needs) in enumerate(
        (("cold", (), None), ("host", (), "host"), ("disk", ("device", "host"), "disk"))
    ):
        workload = DocumentQuestions(documents, questions, number=number, seed=seed)
        firsts = workload.firsts() if title == "cold" else frozenset()
        made: dict[str, Any] = {"emptied": emptied, "needs": needs, "firsts": firsts}
        passes.append(Pass(name=title, workload=workload, requests=documents * questions, places=4, **made))
    return passes


def burst_passes(seed: int, share: float) -> list[Pass]:
    """Eight at once on a new document, several times, for documents of three lengths: a batch of 2,048 tokens
    has room for four copies of the shortest, and for one of the longest.
    """
    repeats = _part(4, share, 1)
    return [
        Pass(
            name=title,
            workload=DocumentQuestions(1, 8, number=0, seed=seed, tokens=tokens),
            requests=8,
            places=8,
            content=size * repeats + number,
        )
        for size, (title, tokens) in enumerate(BURST_TOKENS.items())
        for number in range(repeats)
    ]


def chat_passes(seed: int, share: float) -> list[Pass]:
    """Conversations that together do not fit device memory; each turn repeats what was really answered."""
    sessions = _part(16, share, 4)
    options = ChatOptions(
        sessions=sessions,
        turns=5,
        system_prompts=2,
        system_tokens=128,
        question_tokens=256,
        answer_tokens=32,
        think_s=2.0,
        spread=0.25,
        max_tokens=2048,
    )
    return [Pass(name="chat", workload=ChatWorkload(options, seed), requests=sessions * _MOST_TURNS, places=sessions)]


def agents_passes(seed: int, share: float) -> list[Pass]:
    """All sessions at once, one turn of each at a time: together ten times what 8,704 tokens on the device hold."""
    sessions, turns = _part(14, share, 4), _part(TURNS, share, 4)
    workload = AgentSessions(sessions, turns, seed=seed)
    return [Pass(name="agents", workload=workload, requests=sessions * turns, places=sessions)]


def fits_passes(seed: int, share: float) -> list[Pass]:
    """Everything fits device memory: a tier below it cannot help."""
    workload = DocumentQuestions(4, _part(16, share, 2), number=0, seed=seed)
    requests = 4 * _part(16, share, 2)
    return [Pass(name="fits", workload=workload, requests=requests, places=4, firsts=workload.firsts())]


def unshared_passes(seed: int, share: float) -> list[Pass]:
    """Prompts that share nothing: the speed of the engine, and what a cache costs where it cannot help."""
    passes = []
    for content, (title, prompt, answer, requests, places) in enumerate(
        (
            ("single_512", 512, 65, _part(6, share, 2), 1),
            ("single_2048", 2048, 65, _part(6, share, 2), 1),
            ("eight_512", 512, 65, _part(32, share, 8), 8),
        )
    ):
        workload = UnsharedWorkload(UnsharedOptions(prompt_tokens=prompt, answer_tokens=answer, spread=0), seed)
        passes.append(Pass(name=title, workload=workload, requests=requests, places=places, content=content))
    return passes


def warm_up_passes(seed: int, share: float) -> list[Pass]:
    """Long and short prompts, alone and together, so that no measured request is the first of its kind."""
    sizes = ((2048, 1), (256, 4), (1024, 8))
    return [
        Pass(
            name="warm-up",
            workload=UnsharedWorkload(UnsharedOptions(prompt_tokens=prompt, answer_tokens=8, spread=0), seed),
            requests=places,
            places=places,
            content=content,
        )
        for content, (prompt, places) in enumerate(sizes)
    ]


PASSES: dict[str, Callable[[int, float], list[Pass]]] = {
    "documents": documents_passes,
    "burst": burst_passes,
    "chat": chat_passes,
    "agents": agents_passes,
    "fits": fits_passes,
    "unshared": unshared_passes,
}


def _part(count: int, share: float, least: int) -> int:
    return max(least, round(count * share))
