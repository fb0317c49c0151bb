"""Candidates of whom only names and counts matter, and the order in which a schedule takes them."""

from typing import Any

from services.scheduler.core.cache.prefix_match import PrefixMatch
from services.scheduler.core.queue.batch_builder import BatchBuilder, Candidate
from services.scheduler.core.queue.schedules import Schedule
from services.scheduler.core.request import Request
from services.scheduler.core.state import CellState, Worker
from shared.messages.requests import SamplingParams, SubmitRequest
from tests.stateful.cell_model import namespace


def candidate(name: str, load: int, compute: int, *, priority: int = 0, pages: int = 0) -> Candidate:
    """A candidate of whom only the name, the counts and the priority matter."""
    submit = SubmitRequest(
        request_id=name,
        gateway_id="g",
        namespace=namespace(),
        prompt=bytes(4 * (load + compute)),
        sampling=SamplingParams(max_tokens=1),
        priority=priority,
    )
    return Candidate(Request(submit, 1, 1), [], PrefixMatch(loaded_pages=pages), load, compute, 0)


def form(
    state: CellState, schedule: Schedule, waiting: list[Candidate], *, budget: int = 10_000, places: int = 100
) -> list[str]:
    """Names in the order in which a batch takes them, nothing of it in the tree."""
    builder = BatchBuilder(budget, places)
    nothing: Any = None  # No decision here looks into a pool.
    worker = Worker("w", "1", "n", nothing, 1, nothing)
    taken, put_aside = [], []

    def take(item: Candidate) -> None:
        if not builder.is_full:
            taken.append(item.request.request_id)
            builder.loaded += item.load
            builder.computed += item.compute
            builder.budget -= item.compute
            builder.places -= 1

    for item in waiting:
        if schedule.puts_aside(state, worker, builder, item, is_first=not taken):
            put_aside.append(item)
        else:
            take(item)
        if builder.is_full:
            return taken
    for item in schedule.order(put_aside):
        take(item)
    return taken
