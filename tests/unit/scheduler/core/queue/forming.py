"""Candidates of whom only names and counts matter, and the order in which a schedule takes them."""

from services.scheduler.core.cache.prefix_match import PrefixMatch
from services.scheduler.core.queue.batch_builder import BatchBuilder, Candidate
from services.scheduler.core.request import Request
from services.scheduler.core.state import Worker
from shared.messages.requests import SamplingParams, SubmitRequest
from tests.stateful.cell_model import namespace


def candidate(name, load, compute, *, priority=0, pages=0):
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


class Waiting:
    """Candidates without anything in the tree."""

    def __init__(self, items):
        self.items = iter(items)

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.items)

    def bundle_hits(self):
        return []


def form(state, schedule, waiting, *, budget=10_000, places=100):
    """Names in the order in which a batch takes them."""
    draft = BatchBuilder(budget, places)
    worker = Worker("w", "1", "n", None, 1, None)
    taken = []
    for item in schedule(state, worker, draft, Waiting(waiting)):
        taken.append(item.request.request_id)
        draft.loaded += item.load
        draft.computed += item.compute
        draft.budget -= item.compute
        draft.places -= 1
        if draft.is_full:
            break
    return taken
