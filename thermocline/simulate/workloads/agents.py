"""Agents with tools: long shared instructions, then steps within seconds, each with a tool's result.

A step may fail: then the agent goes back to the prompt before it, and the tokens of the failed try are not used again.
All averages that are left at 0 are drawn by the seed (:mod:`open_loop`).
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
from thermocline.simulate.workloads.open_loop import (
    SPREAD,
    Count,
    Real,
    Zipf,
    between,
    length_of,
    whole_between,
)

_MOST_STEPS = 4096


class AgentOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of agents; 0 is drawn by the seed, but for the two about hints."""

    sessions: Annotated[int, Meta(ge=1)] = 200
    arrivals_s: Real = 0.0  # Sessions a second.
    kinds: Count = 0  # Kinds of agents, each with its own instructions.
    exponent: Real = 0.0  # Zipf exponent of the kinds' popularity.
    instruction_tokens: Count = 0
    steps: Real = 0.0  # Per session, on average; geometric.
    result_tokens: Count = 0  # Tokens of a tool's result, on average.
    answer_tokens: Count = 0  # On average.
    tool_s: Real = 0.0  # Seconds per tool call, on average; exponential.
    failing: Annotated[float, Meta(ge=0, lt=1)] = 0.0  # Share of steps after which the agent goes back by one.
    hinting: Annotated[float, Meta(ge=0, le=1)] = 0.0  # Share of steps that hint when the next one comes.
    hint_error: Annotated[float, Meta(ge=0)] = 0.5  # Spread of the hints, as a log-normal factor.
    max_tokens: Annotated[int, Meta(ge=1)] = 32_768  # A session ends before a prompt would be longer.


@dataclass(frozen=True, slots=True)
class _Session:
    number: int
    steps_left: int


class AgentWorkload:
    """Sessions of agents. Their state is in the requests themselves, so none is kept here."""

    def __init__(self, options: AgentOptions, seed: int) -> None:
        """Draw by ``seed`` the averages that ``options`` leaves at 0; equal arguments give equal sessions."""
        rng = Random(seed)
        self._options = options
        self._seed = seed
        self._arrivals_s = between(rng, options.arrivals_s, 0.05, 1)
        self._kinds = Zipf(whole_between(rng, options.kinds, 3, 40), between(rng, options.exponent, 0.3, 1.3))
        self._instruction_tokens = whole_between(rng, options.instruction_tokens, 1500, 8000)
        self._steps = max(1.0, between(rng, options.steps, 4, 20))
        self._result_tokens = whole_between(rng, options.result_tokens, 80, 1200)
        self._answer_tokens = whole_between(rng, options.answer_tokens, 20, 200)
        self._tool_s = between(rng, options.tool_s, 1, 40)
        self._failing = between(rng, options.failing, 0.02, 0.3)

    def requests(self) -> Iterator[Asked]:
        """Yield the first step of each session, at its time."""
        rng, time_s = Random(self._seed ^ 0xA6E7), 0.0
        for number in range(self._options.sessions):
            time_s += rng.expovariate(self._arrivals_s)
            steps = 1
            while rng.random() < 1 - 1 / self._steps and steps < _MOST_STEPS:
                steps += 1
            kind = self._kinds.draw(rng)
            instructions = Span(name(SHARED, kind), length_of(self._seed, kind, self._instruction_tokens))
            yield self._step((instructions,), _Session(number, steps - 1), self._draws(number, steps), time_s)

    def follow_up(self, asked: Asked) -> tuple[float, Asked] | None:
        """Return the seconds of a tool call and the next step; None after the last step or beyond ``max_tokens``."""
        session: _Session = asked.session
        if session.steps_left < 1 or asked.prompt_tokens + asked.answer.tokens > self._options.max_tokens:
            return None
        # Draws depend only on the session and the step, not on when the answer comes.
        rng = self._draws(session.number, session.steps_left)
        tool_s = rng.expovariate(1 / self._tool_s)
        said = (*asked.spans, asked.answer)
        if len(asked.spans) > 2 and rng.random() < self._failing:
            said = asked.spans[:-2]  # Without the last step's result and what led to it.
        return tool_s, self._step(said, _Session(session.number, session.steps_left - 1), rng, None)

    def _step(self, said: tuple[Span, ...], session: _Session, rng: Random, time_s: float | None) -> Asked:
        number = session.number * _MOST_STEPS + session.steps_left
        result = Span(name(QUESTION, number), around(rng, self._result_tokens, SPREAD))
        answer = Span(name(OUTPUT, number), around(rng, self._answer_tokens, SPREAD))
        return Asked((*said, result), answer, time_s, session, self._returns_in_s(session))

    def _returns_in_s(self, session: _Session) -> float:
        """Return a step's hint in seconds, 0 for none; its draws are separate, so that hints change nothing else."""
        rng = Random((self._seed * 1_000_003 + session.number) * 4099 + session.steps_left + 0x817)
        if session.steps_left < 1 or rng.random() >= self._options.hinting:
            return 0.0
        tool_s = self._draws(session.number, session.steps_left).expovariate(1 / self._tool_s)
        return tool_s * rng.lognormvariate(0, self._options.hint_error)

    def _draws(self, session: int, steps_left: int) -> Random:
        return Random((self._seed * 1_000_003 + session) * 4099 + steps_left)
