"""Trials: a way that lost by its observed speed is taken now and then, or it would never be observed again.

The rates of a disk and of restoring are learned by using them (:mod:`planner.rate`). Once one of them was slow, for
whatever reason, nothing is fetched where computing is faster, and so its recovery would go unnoticed.
So decisions are counted that rest on those observations alone: without them, by the profile and the disk's limit,
another way would have won. The last of every ``TRIED_EVERY`` takes the best other way instead.

A trial costs at most ``MOST_COST`` times the winner, as predicted. Where bringing the whole run would cost more, half
of it is brought, or half of that, and the rest is computed. A request whose deadline a trial would break is spared.

No answer is made lossy to learn something. The observed speed of sparse reads is forgotten instead, once as many
decisions went against them by it alone. So is the speed of other nodes' memory: a link may have been cut.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from services.scheduler.core.rates import expected_disk_bytes_per_us
from services.scheduler.core.restoring.restoration_choice import Choice, Form, Prices, Ways, choose, ways_back
from services.scheduler.core.speed_fit import Rate

if TYPE_CHECKING:
    from services.scheduler.core.request import Request
    from services.scheduler.core.state import CellState, Storage

TRIED_EVERY = 32
MOST_COST = 4.0

_RIVALS: dict[Form, tuple[Form, ...]] = {"recompute": ("kv", "hidden"), "kv": ("hidden",)}
"""Ways that may be tried in the place of a winner: they teach a rate that using the winner does not."""


def is_overruling(storage: Storage, prices: Prices, ways: Ways, choice: Choice) -> bool:
    """Return whether another way would have won without slow observations of disk and restoring. Pure, O(layers)."""
    rivals = _RIVALS.get(choice.form, ())
    unobserved = replace(
        prices,
        disk_bytes_per_us=max(prices.disk_bytes_per_us, expected_disk_bytes_per_us(storage)),
        restored_us=0.0,
    )
    return bool(rivals) and unobserved != prices and choose(unobserved, ways).form in rivals


def is_trial_due(storage: Storage) -> bool:
    """Return whether the next decision that rests on observations alone is to be a trial. Pure."""
    return storage.fetching.overruled >= TRIED_EVERY - 1


def find_trial(prices: Prices, ways: Ways, choice: Choice, *, step: int, least: int, left_us: float) -> Choice | None:
    """Return the best rival of the winner that costs no more than a trial may; None where there is none. Pure.

    ``step``: tokens of a chunk. ``least``: tokens that are worth a fetch. ``left_us``: until its deadline.
    """
    most_us = min(choice.total_us * MOST_COST, left_us)
    chunks = (max(ways.kv_end, ways.hidden_end) - ways.begin) // step
    while chunks > 0:
        end = ways.begin + chunks * step
        if end - ways.covered < max(1, least):
            return None
        part = replace(
            ways,
            kv_end=min(ways.kv_end, end),
            hidden_end=min(ways.hidden_end, end),
            following_end=min(ways.following_end, end),
            later=(),
            following_later=(),
        )
        rivals = [one for one in ways_back(prices, part) if one.form in _RIVALS[choice.form]]
        best = min(rivals, key=lambda one: one.total_us, default=None)
        if best is not None and best.total_us <= most_us:
            return replace(best, is_trial=True, end=part.kv_end if best.form == "kv" else part.hidden_end)
        chunks //= 2
    return None


def left_us(state: CellState, request: Request) -> float:
    """Return the microseconds until a request's deadline; infinite where it has none. Changes nothing."""
    timer = state.timers.get(request.deadline_timer)
    return (timer.at_ns - state.now_ns) / 1000 if timer is not None else float("inf")


def is_sparse_overruled(prices: Prices, ways: Ways, choice: Choice) -> bool:
    """Return whether a sparse read would have won without slow observations of such reads. Pure, O(layers)."""
    sparse = prices.sparse
    if sparse is None or choice.form == "sparse" or not sparse.is_slow:
        return False
    return choose(replace(prices, sparse=sparse.unobserved()), ways).form == "sparse"


def note_decision(storage: Storage, choice: Choice) -> None:
    """Count a decision that is no trial, if it rests on observations alone."""
    if choice.overrules_sparse:
        storage.sparse.overruled += 1
        if storage.sparse.overruled >= TRIED_EVERY:
            storage.sparse.overruled, storage.sparse.pace, storage.sparse.keys_pace = 0, Rate(), Rate()
    if choice.is_overruling:
        storage.fetching.overruled = min(storage.fetching.overruled + 1, TRIED_EVERY - 1)


def note_declined_loan(storage: Storage) -> None:
    """Count a loan that was declined because loans were slow before; every TRIED_EVERY that speed is forgotten."""
    storage.fetching.declined_loans += 1
    if storage.fetching.declined_loans >= TRIED_EVERY:
        storage.fetching.declined_loans, storage.fetching.lender_rate = 0, Rate()


def note_trial(state: CellState, storage: Storage, choice: Choice) -> None:
    """Note that a decision was ordered; after a trial the count starts again."""
    if choice.is_trial:
        storage.fetching.overruled = 0
        state.count("restorations_explored")
