"""Of long work one at a time is in Python's code."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from services.gateway.one_at_a_time import OneAtATime

PATIENCE_S = 20.0


def test_another_goes_on_while_native_code_runs_and_not_before() -> None:
    """The second begins once the first lets go; the first goes on once the second is over."""
    turn, begun, native = OneAtATime(), threading.Event(), threading.Event()
    order: list[str] = []

    def first() -> None:
        order.append("first")
        begun.set()
        native.wait(PATIENCE_S)
        with turn.let_go():
            second_is_over.wait(PATIENCE_S)
        order.append("first again")

    def second() -> None:
        order.append("second")
        second_is_over.set()

    second_is_over = threading.Event()
    with ThreadPoolExecutor(2) as threads:
        one = threads.submit(turn.done, first)
        begun.wait(PATIENCE_S)
        other = threads.submit(turn.done, second)
        before = list(order)
        native.set()
        one.result(PATIENCE_S)
        other.result(PATIENCE_S)

    assert before == ["first"]
    assert order == ["first", "second", "first again"]


def test_an_error_lets_the_next_one_go_on() -> None:
    """As a result does, also from within native code."""
    turn = OneAtATime()

    def fails() -> None:
        with turn.let_go():
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        turn.done(fails)

    assert turn.done(lambda: "next") == "next"


def test_short_work_lets_go_of_nothing() -> None:
    """A thread that does not hold the turn cannot give away that of another."""
    turn = OneAtATime()

    def holds() -> bool:
        with ThreadPoolExecutor(1) as threads:
            return threads.submit(enters).result(PATIENCE_S)

    def enters() -> bool:
        with turn.let_go():
            return turn.is_held

    assert turn.done(holds)
    assert not turn.is_held
