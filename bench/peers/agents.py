"""What agents ask: instructions and tools that all sessions share, then turn after turn with what a tool gave back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from thermocline.simulate.tokens import Span
from thermocline.simulate.workloads import Asked
from thermocline.simulate.workloads.asked import OUTPUT, QUESTION, SHARED, name
from thermocline.simulate.workloads.lengths import around

INSTRUCTION_TOKENS = 2048
RESULT_TOKENS = 128
ANSWER_TOKENS = 16
TURNS = 40
TOOL_S = 4.0
_SPREAD = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Tokens of the instructions and tools, and averages of what a tool gives back and of an answer."""

    instructions: int = INSTRUCTION_TOKENS
    result: int = RESULT_TOKENS
    answer: int = ANSWER_TOKENS


@dataclass(frozen=True, slots=True)
class _Turn:
    session: int
    number: int


class AgentSessions:
    """Every session has ``turns`` turns, each of which repeats all before it; a tool takes ``tool_s`` on average.

    With the defaults the last prompt of a session has about 7,800 tokens, 2,048 of them the same in all sessions.
    """

    def __init__(
        self, sessions: int, turns: int, *, seed: int, tool_s: float = TOOL_S, sizes: Sizes | None = None
    ) -> None:
        self._sizes = sizes or Sizes()
        self._sessions = sessions
        self._turns = turns
        self._seed = seed
        self._tool_s = tool_s

    def requests(self) -> Iterator[Asked]:
        """The first turn of each session."""
        instructions = Span(name(SHARED, 0), self._sizes.instructions)
        for session in range(self._sessions):
            yield self._turn((instructions,), _Turn(session, 0), self._draws(session, 0))

    def follow_up(self, asked: Asked) -> tuple[float, Asked] | None:
        turn: _Turn = asked.session
        if turn.number + 1 == self._turns:
            return None
        # Draws depend on the session and the turn alone, whenever the answer comes.
        rng = self._draws(turn.session, turn.number + 1)
        tool_s = rng.expovariate(1 / self._tool_s) if self._tool_s else 0.0
        return tool_s, self._turn((*asked.spans, asked.answer), _Turn(turn.session, turn.number + 1), rng)

    def _turn(self, said: tuple[Span, ...], turn: _Turn, rng: Random) -> Asked:
        number = turn.session * self._turns + turn.number
        result = Span(name(QUESTION, number), around(rng, self._sizes.result, _SPREAD))
        return Asked((*said, result), Span(name(OUTPUT, number), self._sizes.answer), session=turn)

    def _draws(self, session: int, turn: int) -> Random:
        return Random(f"agents-{self._seed}-{session}-{turn}")
