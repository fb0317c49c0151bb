"""The contracts of schedules and admissions: what is right passes, what is wrong is found."""

from __future__ import annotations

from typing import Any

import pytest

from shared.errors import InvariantViolated
from thermocline.policies import Admission, BatchBuilder, Candidate, CellState, Moment, Node, Schedule, Worker
from thermocline.testing import AdmissionContract, ContractBroken, ScheduleContract


class ShortestFirst(Schedule):
    """What has the least to compute goes first."""

    name = "shortest-first"

    def puts_aside(
        self, state: CellState, worker: Worker, builder: BatchBuilder, candidate: Candidate, *, is_first: bool
    ) -> bool:
        return True

    def order(self, put_aside: list[Candidate]) -> list[Candidate]:
        return sorted(put_aside, key=lambda one: (one.compute, one.request.accepted_seq))


class Used(Admission):
    """What was used twice gets a copy."""

    name = "used-twice"

    def admits(self, node: Node, pages: int, moment: Moment) -> bool:
        return moment.hotness.lookup(node.digest)[0] >= 2


class TestShortestFirst(ScheduleContract):
    """It keeps the contract."""

    schedule = ShortestFirst


class TestUsed(AdmissionContract):
    """It keeps the contract."""

    admission = Used


class Counts(Used):
    """Keeps a number."""

    name = "counts"

    def admits(self, node: Node, pages: int, moment: Moment) -> bool:
        self.count = getattr(self, "count", 0) + 1
        return self.count % 2 == 0


class Marks(Used):
    """Changes a node."""

    name = "marks"

    def admits(self, node: Node, pages: int, moment: Moment) -> bool:
        node.hits += 1
        return True


class Unsure(Used):
    """Gives no answer."""

    name = "unsure"

    def admits(self, node: Node, pages: int, moment: Moment) -> Any:
        return None


class Drops(ShortestFirst):
    """Loses a candidate."""

    name = "drops"

    def order(self, put_aside: list[Candidate]) -> list[Candidate]:
        return put_aside[1:]


class Remembers(ShortestFirst):
    """Keeps what it saw last."""

    name = "remembers"

    def puts_aside(
        self, state: CellState, worker: Worker, builder: BatchBuilder, candidate: Candidate, *, is_first: bool
    ) -> bool:
        self.last = candidate.request.request_id
        return False


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Counts, "counts: admits() keeps something"),
        (Marks, "marks: admits() changes a node"),
        (Unsure, "unsure: admits() returns None, which is neither True nor False"),
    ],
)
def test_an_admission_that_breaks_the_contract_is_found(kind: type[Admission], said: str) -> None:
    """In a cell whose devices are too small."""
    contract = type("Contract", (AdmissionContract,), {"admission": kind})()

    with pytest.raises(ContractBroken) as caught:
        contract.test_it_keeps_nothing_and_changes_nothing()

    assert said in str(caught.value)


def test_a_schedule_that_keeps_something_is_found() -> None:
    """At its first question."""
    contract = type("Contract", (ScheduleContract,), {"schedule": Remembers})()

    with pytest.raises(ContractBroken, match=r"remembers: puts_aside\(\) keeps something"):
        contract.test_it_keeps_nothing_and_changes_nothing()


def test_a_schedule_that_loses_candidates_is_stopped_by_the_core() -> None:
    """As in a live cell, where its input is fatal."""
    contract = type("Contract", (ScheduleContract,), {"schedule": Drops})()

    with pytest.raises(InvariantViolated, match="schedule 'drops' orders other candidates than those put aside"):
        contract.test_it_keeps_nothing_and_changes_nothing()
