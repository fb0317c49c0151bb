"""Calls that look into the state: a request whose end its caller has seen is told whole."""

from __future__ import annotations

import asyncio

import pytest

from services.scheduler import inspection
from services.scheduler.core import new_state
from services.scheduler.core.request import Request
from services.scheduler.inspection import Inspection
from shared import subjects
from shared.codec import decode, encode
from shared.messages.explanations import (
    Admission,
    Admissions,
    DivergencePoint,
    Divergences,
    GetAdmissions,
    GetDivergences,
    PromptSpan,
)
from tests.scripted_cell import submit

RESTORED = PromptSpan(start=0, end=16, source="hidden")
COMPUTED = PromptSpan(start=0, end=16, source="computed", reason="evicted")


class Folding:
    """A state in which request "r" runs, and what its scheduler answers about it."""

    def __init__(self) -> None:
        self.state = new_state()
        self.state.requests["r"] = Request(submit=submit("r", [1]), accepted_seq=1, accepted_ns=0)
        self._moves: asyncio.Queue[None] = asyncio.Queue()
        self.waits = 0
        self.tell(COMPUTED)
        handlers = dict(Inspection(asyncio.Lock(), lambda: self.state, self._moved).handlers())
        self._answer = handlers[subjects.rpc("scheduler", "admissions")]
        self.divergences = handlers[subjects.rpc("scheduler", "divergences")]

    def tell(self, span: PromptSpan) -> None:
        """The one admission of the request, as it is known by now."""
        admission = Admission(
            request_id="r", attempt=1, worker_id="w", accepted_ns=0, admitted_ns=1, prompt=(span,)
        )  # fmt: skip
        assert self.state.recollection is not None
        self.state.recollection.admissions["r"] = [admission]

    def move(self) -> None:
        """An input is folded."""
        self._moves.put_nowait(None)

    async def ask(self, *ended: str) -> PromptSpan:
        answer = await self._answer(encode(GetAdmissions(request_ids=("r",), ended=ended)))
        return decode(answer, Admissions).admissions[0].prompt[0]

    async def _moved(self) -> None:
        self.waits += 1
        await self._moves.get()


async def test_an_end_that_the_caller_has_seen_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was restored before it is in the answer."""
    monkeypatch.setattr(inspection, "END_S", 60.0)
    folding = Folding()
    asked = asyncio.create_task(folding.ask("r"))
    while folding.waits < 1:
        await asyncio.sleep(0)
    folding.tell(RESTORED)
    folding.move()
    while folding.waits < 2:
        await asyncio.sleep(0)
    assert not asked.done()  # It still runs.
    del folding.state.requests["r"]
    folding.move()

    assert await asked == RESTORED


async def test_a_running_request_is_told_at_once() -> None:
    """As far as it has come."""
    folding = Folding()

    assert await folding.ask() == COMPUTED
    assert folding.waits == 0


async def test_an_end_that_does_not_come_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known is told."""
    monkeypatch.setattr(inspection, "END_S", 0.0)

    assert await Folding().ask("r") == COMPUTED


async def test_the_costliest_divergence_points_are_told() -> None:
    """As many as were asked for."""
    folding = Folding()
    assert folding.state.recollection is not None
    for place in (16, 32):
        point = DivergencePoint(kind="diverged", position=place, page_start=place, lost_tokens=place)
        folding.state.recollection.note_point("n", point, "r", 5)

    found = decode(await folding.divergences(encode(GetDivergences(most=1))), Divergences)

    assert [each.point.position for each in found.points] == [32]
    assert found.since_ns == 5
