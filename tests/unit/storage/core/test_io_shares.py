"""Who may use an I/O thread."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.storage.core.io_shares import IoShares


def test_fetches_may_use_every_thread() -> None:
    """Without anything in the background, the whole depth is theirs, in order of arrival."""
    shares: IoShares[int] = IoShares(3)
    for turn in range(5):
        shares.ask(turn, is_urgent=True)

    assert shares.due() == [(True, 0), (True, 1), (True, 2)]
    shares.done(is_urgent=True)
    assert shares.due() == [(True, 3)]


def test_the_background_never_takes_all() -> None:
    """Half of the threads at the most, however much waits."""
    shares: IoShares[int] = IoShares(4)
    for turn in range(5):
        shares.ask(turn, is_urgent=False)

    assert shares.due() == [(False, 0), (False, 1)]


def test_the_background_yields_but_does_not_starve() -> None:
    """While fetches wait, it keeps one thread and begins no second."""
    shares: IoShares[str] = IoShares(4)
    for turn in range(9):
        shares.ask(f"fetch {turn}", is_urgent=True)
    for turn in range(2):
        shares.ask(f"save {turn}", is_urgent=False)

    assert [turn for _, turn in shares.due()] == ["fetch 0", "fetch 1", "fetch 2", "fetch 3", "save 0"]
    shares.done(is_urgent=False)
    assert shares.due() == [(False, "save 1")]
    shares.done(is_urgent=True)
    assert shares.due() == [(True, "fetch 4")]


@given(st.integers(1, 9), st.lists(st.sampled_from(["fetch", "save", "fetch ends", "save ends"]), max_size=60))
def test_somebody_always_runs_and_never_too_many(depth: int, steps: list[str]) -> None:
    """What waits starts as soon as there is room; bounds hold after every step."""
    shares: IoShares[int] = IoShares(depth)
    for number, step in enumerate(steps):
        is_urgent = step.startswith("fetch")
        if not step.endswith("ends"):
            shares.ask(number, is_urgent=is_urgent)
        elif shares.running(is_urgent=is_urgent):
            shares.done(is_urgent=is_urgent)
        shares.due()
        urgent, background = shares.running(is_urgent=True), shares.running(is_urgent=False)

        assert urgent + max(0, background - 1) <= depth
        assert background <= max(1, depth // 2)
        assert background or not shares.waiting(is_urgent=False)
        assert urgent or not shares.waiting(is_urgent=True) or background >= depth
