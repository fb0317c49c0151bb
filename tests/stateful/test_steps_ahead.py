"""Steps that are launched ahead give the tokens of the ordinary order, and leave alone what is not theirs any more.

The device does everything as late as it may. Requests come, end in every way, are aborted and preempted, run out of
pages and get some; whatever pages are given back are written by others at once, and nothing may land on them later.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.worker.engine.sample_row import forbidden_ids
from services.worker.engine.sampler import SampleRow, sample
from services.worker.reports import Event
from shared.messages.requests import SamplingParams
from shared.messages.worker_events import FinishedToo, LeaseRequested, RequestFinished, RequestPreempted
from tests.cuda.late_device import LateMover, LateRunner
from tests.unit.worker.driven_executor import Driven, abort, admit, batch, chunk, extend, preempt
from tests.unit.worker.fake_model import EOS, GEOMETRY, PAGE_SIZE, VOCAB_SIZE, kv_of, next_token

PAGES = 24
OTHERS = -7.0
"""What is written to pages that were given back."""

LETTERS = "abcdefghijklmnopqrst"
"""Tokens from 20 on."""


def answer(tokens: list[int], params: SamplingParams, count: int) -> list[int]:
    """The first ``count`` tokens of the answer to ``tokens``, each chosen by itself."""
    known = list(tokens)
    for position in range(count):
        forbid = forbidden_ids(params, position, (EOS,))
        known.append(_next(tuple(known), position, params.temperature, params.seed, params.top_p, forbid))
    return known[len(tokens) :]


@cache
def _next(
    known: tuple[int, ...], position: int, temperature: float, seed: int, top_p: float, forbid: tuple[int, ...]
) -> int:
    logits = torch.zeros((1, VOCAB_SIZE))
    logits[0, next_token(known)] = 10.0
    params = SamplingParams(max_tokens=1, temperature=temperature, seed=seed, top_p=top_p)
    return sample(logits, [SampleRow(params, position, forbid=forbid)])[0].token


PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 14),
    temperature=st.sampled_from([0.0, 0.0, 3.0, 8.0]),
    seed=st.integers(0, 3),
    top_p=st.sampled_from([1.0, 0.7]),
    stop=st.lists(st.sampled_from(LETTERS), max_size=2).map(tuple),
    stop_token_ids=st.lists(st.integers(20, 39), max_size=2).map(tuple),
    # These have steps of their own.
    min_tokens=st.sampled_from([0, 0, 0, 3]),
    logprobs=st.sampled_from([None, None, None, 1]),
)


class AheadCell(RuleBasedStateMachine):
    """A worker on a late device, and who owns its pages."""

    def __init__(self) -> None:
        super().__init__()
        runner = LateRunner(PAGES)
        self.driven = Driven(runner, mover=LateMover(runner.pool))
        self.runner = runner
        self.free = list(range(PAGES))
        self.running: dict[str, tuple[list[int], SamplingParams, list[int]]] = {}  # Prompt, parameters, pages.
        self.wanting: set[str] = set()
        self.seen = self.count = 0
        self._write(self.free)

    def teardown(self) -> None:
        self.driven.run()
        self._look()
        assert self.driven.executor.counters.steps_repeated == 0
        # Whoever still runs lacks pages, and those were asked for.
        for name in self.running:
            assert name in self.wanting
        self.driven.close()

    def _write(self, pages: list[int]) -> None:
        """By somebody else, on a stream of its own."""
        for layer in range(GEOMETRY.layers):
            for half in (self.runner.pool.k(layer), self.runner.pool.v(layer)):
                half[torch.tensor(pages, dtype=torch.int64)] = OTHERS

    def _take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    @precondition(lambda self: len(self.free) >= 3)
    @rule(first=st.integers(3, 9), length=st.integers(1, 7), params=PARAMS, spare=st.integers(0, 2))
    def arrive(self, first: int, length: int, params: SamplingParams, spare: int) -> None:
        self.count += 1
        name, tokens = f"r{self.count}", [first, *range(5, 4 + length)]
        pages = self._take(-(-length // PAGE_SIZE) + spare if spare else -(-length // PAGE_SIZE))
        self.running[name] = tokens, params, pages
        self.driven.give(admit(tokens, pages, request_id=name, params=params))
        self.driven.give(batch(chunk(0, len(tokens), request_id=name)))

    @rule(steps=st.integers(1, 3))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.driven.executor.run_one_step()
            self._look()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), is_preempted=st.booleans())
    def stop(self, data: st.DataObject, is_preempted: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        self.driven.give(preempt(name) if is_preempted else abort(name))

    @precondition(lambda self: self.wanting and self.free)
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.wanting)))
        self.wanting.remove(name)
        pages = self._take(1)
        self.running[name][2].extend(pages)
        self.driven.give(extend(pages, request_id=name))

    def _look(self) -> None:
        """At what was reported, as the scheduler does at any time after."""
        events = self.driven.events
        for event in events[self.seen :]:
            self._hear(event)
        self.seen = len(events)

    def _hear(self, event: Event) -> None:
        match event:
            case RequestFinished():
                ends: list[RequestFinished | FinishedToo] = [event, *event.others]
                for end in ends:
                    self._end(end.request_id, np.frombuffer(end.output, dtype="<i4").tolist())
            case RequestPreempted():
                self._end(event.request_id, np.frombuffer(event.output, dtype="<i4").tolist())
            case LeaseRequested():
                names = {event.request_id, *(each.request_id for each in event.others)}
                self.wanting |= names & self.running.keys()
            case _:
                pass

    def _end(self, name: str, output: list[int]) -> None:
        """Its output is right, what is full of its pages is there, and all are somebody else's from now on."""
        if name not in self.running:
            assert not output  # Stopped when it was over.
            return
        tokens, params, pages = self.running.pop(name)
        self.wanting.discard(name)
        assert output == answer(tokens, params, len(output))
        assert self.driven.tokens(name) == output
        known = tokens + output
        expected = kv_of(known)
        for index in range((len(known) - 1) // PAGE_SIZE if output else 0):
            rows = slice(index * PAGE_SIZE, (index + 1) * PAGE_SIZE)
            for layer in range(GEOMETRY.layers):
                assert np.array_equal(self.runner.pool.k(layer)[pages[index], :, 0].numpy(), expected[rows, 0])
                assert np.array_equal(self.runner.pool.v(layer)[pages[index], :, 0].numpy(), expected[rows, 1])
        self._write(pages)
        self.free += pages

    @invariant()
    def nothing_lands_on_pages_that_were_given_back(self) -> None:
        pages = torch.tensor(self.free, dtype=torch.int64)
        for layer in range(GEOMETRY.layers):
            assert bool((self.runner.pool.k(layer)[pages] == OTHERS).all())
            assert bool((self.runner.pool.v(layer)[pages] == OTHERS).all())

    @invariant()
    def what_was_told_is_right(self) -> None:
        for name, (tokens, params, _) in self.running.items():
            told = self.driven.tokens(name)
            assert told == answer(tokens, params, len(told))


AheadCell.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAheadCell = AheadCell.TestCase
