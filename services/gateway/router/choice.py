"""The choice of a cell for a request: the work left there for its prompt, against the cell's load. Pure.

Every open cell has a cost in bytes of prompt: those that it would have to compute, plus a number of average prompts in
proportion to its excess over its fair share of the requests in progress, and of the recent work. Both are needed:
requests differ a hundredfold in what is left to compute of them, and each that decodes takes a place in every step
however short its prompt was. The work of a cell with next to nothing in progress does not count: where no request
waits, moving gains nothing. A share is fair up to ``spare`` of itself, that of requests also up to the deviation that
chance alone gives so many, so evenly loaded cells differ only in what they hold, and a conversation does not move for a
little less load elsewhere. Where no cell holds more than another, weighted rendezvous hashing of the first digest that
no cell holds decides: routers that have no reports of each other send equal prompts to one cell, and one above its
share passes them on to the next in the same order (bounded loads).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf, log, sqrt

import xxhash


@dataclass(frozen=True, slots=True)
class Rules:
    """Parameters of the choice.

    ``spare``, ``noise`` and ``few`` widen a cell's fair share: by a fraction of it, by so many deviations of chance,
    and by a number of requests that is negligible in an almost idle cell.

    ``price`` is the cost of one fair share of requests more than that, in average prompts, and ``work_price`` that of
    one of work. A session leaves its cell at ``session_over`` fair shares of requests above the bound.
    """

    spare: float = 0.02
    noise: float = 0.25
    few: int = 3
    price: float = 3.0
    work_price: float = 5.0
    session_over: float = 1.0


DEFAULT = Rules()

TAKEN = 0.25
"""Requests in progress per worker from which on the work of a cell counts in full."""


@dataclass(slots=True)
class Candidate:
    """A cell that may be chosen.

    ``busy`` are its requests in progress, of all routers as far as known, and ``work`` is its recent work in bytes of
    prompt, decaying with time.
    """

    name: str
    workers: int = 1
    busy: int = 0
    is_full: bool = False
    work: float = 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen cell, and the bytes of the prompt that it holds."""

    name: str
    matched: int


def choose(
    cells: Iterable[Candidate],
    *,
    nbytes: int,
    matched: Mapping[str, int],
    mean_bytes: float,
    key: int,
    session: str = "",
    rules: Rules = DEFAULT,
) -> Choice | None:
    """Return the best of the cells, None of none. ``session`` names the cell of the conversation, "" for none.

    ``key`` is hashed where cells differ in nothing else, and ``mean_bytes`` is the length of an average prompt. A cell
    whose queue is full is chosen only if all are.
    """
    open_cells = [cell for cell in cells if not cell.is_full] or list(cells)
    if not open_cells:
        return None
    workers = max(1, sum([cell.workers for cell in open_cells]))
    share = sum([cell.busy for cell in open_cells]) / workers
    work_share = sum([cell.work for cell in open_cells]) / workers
    bounds: dict[int, tuple[float, float]] = {}  # By number of workers, which is the same for most cells.
    best: list[Candidate] = []
    least = inf
    for cell in open_cells:
        found = bounds.get(cell.workers)
        if found is None:
            found = bounds[cell.workers] = fair_share(share, cell.workers, rules)
        fair, bound = found
        over = (cell.busy + 1 - bound) / fair
        if cell.name == session and over <= rules.session_over:
            return Choice(session, min(matched.get(session, 0), nbytes))
        cost = float(nbytes - matched.get(cell.name, 0))
        if over > 0:
            cost += rules.price * mean_bytes * over
        fair_work = work_share * cell.workers
        over_work = cell.work - fair_work * (1 + rules.spare)
        if over_work > 0 and cell.busy >= rules.few:
            taken = min(1.0, (cell.busy + 1 - rules.few) / (TAKEN * cell.workers))
            cost += rules.work_price * mean_bytes * taken * over_work / max(fair_work, mean_bytes)
        if cost < least:
            least, best = cost, [cell]
        elif cost == least:
            best.append(cell)
    # Names break ties, so that all routers choose the same.
    chosen = best[0] if len(best) == 1 else min(best, key=lambda cell: (_place(key, cell), cell.name))
    return Choice(chosen.name, min(matched.get(chosen.name, 0), nbytes))


def fair_share(share: float, workers: int, rules: Rules) -> tuple[float, float]:
    """Return a cell's fair share of the requests in progress (each worker has ``share`` of them), and its bound."""
    fair = share * workers
    return max(1.0, fair), fair * (1 + rules.spare) + rules.noise * sqrt(fair) + rules.few


def _place(key: int, cell: Candidate) -> float:
    """Return a cell's position in the order of ``key``, the least first.

    The order is pseudorandom, weighted by the cell's workers.
    """
    drawn = (xxhash.xxh3_64_intdigest(cell.name.encode(), seed=key & (2**64 - 1)) + 0.5) / 2**64
    return -log(drawn) / max(1, cell.workers)
