"""The rules for every schedule and every admission, as tests that pytest collects from a subclass.

Both keep no state of their own and change nothing: their answers depend only on the arguments.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from services.scheduler.core import encode_state
from services.scheduler.core.cache.eviction import Moment
from services.scheduler.core.cache.prefix_tree import Node
from services.scheduler.core.queue.batch_builder import BatchBuilder, Candidate
from services.scheduler.core.queue.schedules import Schedule
from services.scheduler.core.state import CellState, Worker
from services.scheduler.core.tiers.host_admission import Admission
from thermocline.testing.broken import require
from thermocline.testing.forbidden import faults_in_source, no_clock_and_no_chance
from thermocline.testing.other_process import digest_elsewhere, digest_of
from thermocline.testing.registered import Decides
from thermocline.testing.simulated import run_cell


class _Contract:
    """Tests of a class that keeps no state."""

    may_import: ClassVar[tuple[str, ...]] = ()
    """Modules that the class's own module may import, although code that decides should not."""

    def kind(self) -> type[Decides]:
        """Return the class that is tested."""
        raise NotImplementedError

    def test_its_module_imports_no_clock_no_chance_and_no_files(self) -> None:
        """Its source imports none of these, iterates over no set, and calls neither hash() nor id()."""
        kind = self.kind()
        faults = [each for each in faults_in_source(kind) if each.rpartition(" ")[2] not in self.may_import]
        require(not faults, f"{kind.__module__}: {'; '.join(faults)}")

    def test_the_same_inputs_give_the_same_cell(self) -> None:
        """Repeated runs end with the same state, also in a process with another hash seed."""
        kind = self.kind()
        here = digest_of(kind)

        require(digest_of(kind) == here, f"{kind.name}: decides otherwise when repeated")
        require(digest_elsewhere(kind) == here, f"{kind.name}: decides otherwise with another hash seed")

    def test_a_cell_goes_on_from_a_snapshot_alike(self) -> None:
        """A run that is restored from a snapshot ends with the same state: all it decides by is in the state."""
        kind = self.kind()

        require(
            run_cell(kind)[0] == run_cell(kind, restored_at=200)[0], f"{kind.name}: decides otherwise when restored"
        )


class ScheduleContract(_Contract):
    """Subclass it, name it ``Test...`` and set ``schedule``; pytest runs the rest."""

    schedule: ClassVar[type[Schedule]]

    def kind(self) -> type[Schedule]:
        """Return the class that is tested."""
        return self.schedule

    def test_it_keeps_nothing_and_changes_nothing(self) -> None:
        """No call changes the class or its arguments, and every request of a simulated cell ends."""
        watched = _watched_schedule(self.schedule)
        with no_clock_and_no_chance():
            _, figures = run_cell(watched)

        require(not figures["failed"], f"{self.schedule.name}: requests fail: {figures['failed']}")


class AdmissionContract(_Contract):
    """Subclass it, name it ``Test...`` and set ``admission``; pytest runs the rest."""

    admission: ClassVar[type[Admission]]

    def kind(self) -> type[Admission]:
        """Return the class that is tested."""
        return self.admission

    def test_it_keeps_nothing_and_changes_nothing(self) -> None:
        """No call changes the class or its arguments, and every request of a cell with small devices ends."""
        asked: list[bool] = []
        watched = _watched_admission(self.admission, asked)
        with no_clock_and_no_chance():
            _, figures = run_cell(watched)

        require(bool(asked), f"{self.admission.name}: was never asked")
        require(not figures["failed"], f"{self.admission.name}: requests fail: {figures['failed']}")


def _watched_schedule(schedule: type[Schedule]) -> type[Schedule]:
    class Watched(schedule):  # type: ignore[valid-type,misc]
        """The class under test, with a comparison before and after each call."""

        def puts_aside(
            self, state: CellState, worker: Worker, builder: BatchBuilder, candidate: Candidate, *, is_first: bool
        ) -> bool:
            before, mine = encode_state(state), dict(vars(self))
            told = super().puts_aside(state, worker, builder, candidate, is_first=is_first)
            require(encode_state(state) == before, f"{self.name}: puts_aside() changes the state")
            _check(self, told, mine, "puts_aside")
            return bool(told)

        def order(self, put_aside: list[Candidate]) -> list[Candidate]:
            mine, given = dict(vars(self)), list(put_aside)
            ordered: list[Candidate] = super().order(put_aside)
            require(vars(self) == mine, f"{self.name}: order() keeps something")
            require(
                put_aside == given or ordered is put_aside, f"{self.name}: order() changes the list that it is given"
            )
            return ordered

    return Watched


def _watched_admission(admission: type[Admission], asked: list[bool]) -> type[Admission]:
    class Watched(admission):  # type: ignore[valid-type,misc]
        """The class under test, with a comparison before and after each call."""

        def admits(self, node: Node, pages: int, moment: Moment) -> bool:
            before, mine = msgspec.msgpack.encode(node), dict(vars(self))
            told = super().admits(node, pages, moment)
            require(msgspec.msgpack.encode(node) == before, f"{self.name}: admits() changes a node")
            _check(self, told, mine, "admits")
            asked.append(told)
            return bool(told)

    return Watched


def _check(decider: Any, told: Any, mine: dict[str, Any], method: str) -> None:
    require(isinstance(told, bool), f"{decider.name}: {method}() returns {told!r}, which is neither True nor False")
    require(vars(decider) == mine, f"{decider.name}: {method}() keeps something")
