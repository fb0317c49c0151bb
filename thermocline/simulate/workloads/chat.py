"""Conversations: each turn repeats all earlier ones, and the user thinks between turns.

On average a prompt has about 681 tokens and an answer 261, and a user thinks for 60 s, as in Strata's Table 1 and
section 5.1 for ShareGPT. How a prompt divides into system prompt, turns and questions is an assumption, and a setting.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Annotated

import msgspec
from msgspec import Meta

from thermocline.simulate.tokens import Span
from thermocline.simulate.workloads.asked import OUTPUT, QUESTION, SHARED, Asked, name
from thermocline.simulate.workloads.lengths import around

Count = Annotated[int, Meta(ge=1)]


class ChatOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of conversations: averages; turns and think times are geometric and exponential, lengths log-normal."""

    sessions: Annotated[int, Meta(ge=0)] = 0  # 0 is without an end.
    turns: Annotated[float, Meta(ge=1)] = 2.5
    system_prompts: Count = 8  # Shared ones; each session has one of them.
    system_tokens: Count = 90
    question_tokens: Count = 80
    answer_tokens: Count = 261
    think_s: Annotated[float, Meta(ge=0)] = 60.0
    spread: Annotated[float, Meta(ge=0)] = 0.8
    max_tokens: Count = 32_768  # A conversation ends before a prompt would be longer.


@dataclass(frozen=True, slots=True)
class _Session:
    number: int
    turns_left: int


class ChatWorkload:
    """Conversations. Their state is in the requests themselves, so none is kept here."""

    def __init__(self, options: ChatOptions, seed: int) -> None:
        """Draw all sessions by ``seed``; equal arguments give equal conversations."""
        self._options = options
        self._seed = seed

    def requests(self) -> Iterator[Asked]:
        """Yield the first turn of each session."""
        number = 0
        while not self._options.sessions or number < self._options.sessions:
            rng = self._rng(number, 0)
            turns = 1
            while rng.random() < 1 - 1 / self._options.turns:
                turns += 1
            system = Span(name(SHARED, rng.randrange(self._options.system_prompts)), self._options.system_tokens)
            yield self._turn((system,), _Session(number, turns - 1), rng)
            number += 1

    def follow_up(self, asked: Asked) -> tuple[float, Asked] | None:
        """Return a think time and the next turn; None after the last turn or beyond ``max_tokens``."""
        session: _Session = asked.session
        if session.turns_left < 1 or asked.prompt_tokens + asked.answer.tokens > self._options.max_tokens:
            return None
        # Draws depend only on the session and the turn, not on when the answer comes.
        rng = self._rng(session.number, session.turns_left)
        think_s = rng.expovariate(1 / self._options.think_s) if self._options.think_s else 0.0
        said = (*asked.spans, asked.answer)
        return think_s, self._turn(said, _Session(session.number, session.turns_left - 1), rng)

    def _turn(self, said: tuple[Span, ...], session: _Session, rng: Random) -> Asked:
        number = session.number * 4096 + session.turns_left % 4096
        question = Span(name(QUESTION, number), around(rng, self._options.question_tokens, self._options.spread))
        answer = Span(name(OUTPUT, number), around(rng, self._options.answer_tokens, self._options.spread))
        return Asked((*said, question), answer, session=session)

    def _rng(self, session: int, turns_left: int) -> Random:
        return Random((self._seed * 1_000_003 + session) * 4099 + turns_left)
