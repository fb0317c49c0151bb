"""What a starting process tells of its phases."""

from __future__ import annotations

import os

import pytest

from shared import progress
from shared.progress import READY, TOLD_EVERY_S, Phase, Reporter, parse


class Told:
    """Takes lines, and has the clock that they are told by."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.phases: list[Phase | None] = []
        self.reporter = Reporter(lambda line: self.phases.append(parse(line)), lambda: self.now_s)


def test_a_phase_is_told_at_its_start_and_now_and_then() -> None:
    """However often it advances."""
    told = Told()

    with told.reporter.phase("loading weights", total=100, unit="tensors") as advance:
        for _ in range(100):
            told.now_s += TOLD_EVERY_S / 10
            advance(1)

    first, *others = told.phases
    assert first == Phase(name="loading weights", total=100, unit="tensors")
    assert 9 <= len(others) <= 10
    assert others[-1] is not None
    assert 90 <= others[-1].done <= 100


def test_a_process_that_was_ready_is_so_again_after_a_later_phase() -> None:
    """A pool may be made when the cell asks for it."""
    told = Told()
    with told.reporter.phase("a"):
        pass
    told.reporter.tell(READY)

    with told.reporter.phase("b"):
        pass

    assert [phase.name for phase in told.phases if phase] == ["a", "", "b", ""]


def test_a_failed_phase_is_the_last_that_is_told() -> None:
    """So that whoever reads it knows in which one the process ended."""
    told = Told()
    told.reporter.tell(READY)

    with pytest.raises(ValueError, match="wrong"), told.reporter.phase("b"):
        raise ValueError("wrong")

    assert told.phases[-1] == Phase(name="b")


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b'{"name": 1}', b"\xff", b'"text"'])
def test_what_is_no_phase_is_none(line: bytes) -> None:
    """Whatever a process writes."""
    assert parse(line) is None


def test_a_full_pipe_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has no room for is dropped; processes that this one starts are not told of the pipe."""
    reader, writer = os.pipe()
    monkeypatch.setenv(progress.VARIABLE, str(writer))
    try:
        write = progress._pipe()
        for _ in range(2000):
            write(b"x" * 1000)

        assert progress.VARIABLE not in os.environ
        assert not os.get_inheritable(writer)
        assert os.read(reader, 10) == b"x" * 10
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("number", ["", "9999", "first"])
def test_without_a_pipe_nothing_is_told(monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    """A process that no supervisor started, or one that does not know of phases."""
    monkeypatch.setenv(progress.VARIABLE, number)

    progress._pipe()(b"line\n")
