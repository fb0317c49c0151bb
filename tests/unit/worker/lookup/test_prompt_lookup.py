"""Steps that verify proposals: answers are those of steps that do not, in whatever way requests come and go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.lookup.prompt_lookup import STEP_ROWS, PromptLookup
from services.worker.step_rows import StepRows
from services.worker.steps import Work
from services.worker.token_sequence import TokenSequence
from shared.messages.base import pack_int32
from shared.messages.requests import SamplingParams
from tests.unit.worker.driven_executor import Driven, abort, admit, batch, chunk, extend, preempt
from tests.unit.worker.fake_model import EOS, PAGE_SIZE, VOCAB_SIZE
from tests.unit.worker.lookup.copying_model import CopyingRunner
from tests.unit.worker.made_requests import decoding, made_sparse

MOST = 8
POOL = 512


@dataclass(frozen=True)
class Asked:
    """One request, and after how many steps its worker is told to preempt it: 0 is never."""

    prompt: tuple[int, ...]
    params: SamplingParams
    preempted_after: int = 0


@dataclass
class Life:
    """The pages of a request, and what its attempts have said."""

    pages: list[int]
    attempt: int = 1


@contextmanager
def driven(lookup_tokens: int, sharpness: float = 10.0, **given_: Any) -> Iterator[Driven]:
    made = Driven(CopyingRunner(POOL, sharpness), lookup_tokens=lookup_tokens, **given_)
    try:
        yield made
    finally:
        made.close()


def serve(made: Driven, asked: Sequence[Asked], lease_pages: int = 2) -> None:
    """Ask all at once, with pages for the prompt and a small lease; grant a page whenever more are asked for."""
    # Pages of requests lie among one another, and no page is given away twice.
    free = iter([(page * 37) % POOL for page in range(POOL)])
    lives: dict[str, Life] = {}
    for number, each in enumerate(asked):
        name = f"r{number}"
        count = -(-len(each.prompt) // PAGE_SIZE) + lease_pages
        lives[name] = Life([next(free) for _ in range(count)])
        made.give(admit(each.prompt, lives[name].pages, request_id=name, params=each.params))
    made.give(batch(*(chunk(0, len(each.prompt), request_id=f"r{number}") for number, each in enumerate(asked))))
    granted = 0
    for step in range(2000):
        for number, each in enumerate(asked):
            if step and step == each.preempted_after:
                made.give(preempt(f"r{number}"))
        has_computed = made.executor.run_one_step()
        for event in made.preempted():
            resume(made, lives, asked, event.request_id, event.attempt, free)
        wanted = list[tuple[str, int]]()
        for asking in made.lease_requests():
            wanted.append((asking.request_id, asking.attempt))
            wanted += [(other.request_id, other.attempt) for other in asking.others]
        for name, attempt in wanted[granted:]:
            page = next(free)
            lives[name].pages.append(page)
            made.give(extend([page], request_id=name, attempt=attempt))
        if not has_computed and len(wanted) == granted and not len(made.executor.inbox):
            return
        granted = len(wanted)
    raise AssertionError("requests never came to rest")


def resume(
    made: Driven, lives: dict[str, Life], asked: Sequence[Asked], name: str, attempt: int, free: Iterator[int]
) -> None:
    """Begin the next attempt of a preempted request, behind what it has said, on other pages."""
    life = lives[name]
    if life.attempt != attempt or name in {each.request_id for each in made.finished()}:
        return
    life.attempt += 1
    each = asked[int(name[1:])]
    tokens = [*each.prompt, *made.tokens(name)]
    life.pages = [next(free) for _ in range(len(tokens) // PAGE_SIZE + 2)]
    made.give(
        admit(
            tokens,
            life.pages,
            request_id=name,
            attempt=life.attempt,
            prompt_tokens=len(each.prompt),
            params=each.params,
        ),
        batch(chunk(0, len(tokens), request_id=name, attempt=life.attempt)),
    )


def told(made: Driven, name: str) -> dict[str, Any]:
    """What the gateway has been told of a request, without times."""
    items = made.items(name)
    return {
        "tokens": made.tokens(name),
        "text": made.text(name),
        "logprobs": [logprob for item in items for logprob in item.logprobs],
        "end": [(item.finish, item.stop_match, item.error) for item in items if item.finish is not None],
        "usage": [msgspec.to_builtins(item.usage) for item in items if item.usage is not None and item.attempt == 1],
        "finished": [(each.reason, each.output) for each in made.finished() if each.request_id == name],
    }


letters = st.integers(20, VOCAB_SIZE - 1)
prompts = st.lists(st.integers(20, 23) | letters, min_size=1, max_size=30).map(tuple)
sampling = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 40),
    temperature=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
    seed=st.integers(0, 2**63 - 1),
    top_p=st.sampled_from([1.0, 0.9]),
    top_k=st.sampled_from([0, 5]),
    min_tokens=st.integers(0, 6),
    stop=st.lists(st.text("abcdefgh", min_size=1, max_size=3), max_size=2).map(tuple),
    stop_token_ids=st.lists(letters, max_size=1).map(tuple),
    logprobs=st.sampled_from([None, 0, 3]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.2]),
    logit_bias=st.sampled_from([{}, {25: 3.0}, {EOS: 8.0}]),
)
requests = st.builds(Asked, prompts, sampling, st.sampled_from([0, 0, 3, 9]))


@given(asked=st.lists(requests, min_size=1, max_size=4), sharpness=st.sampled_from([3.0, 6.0, 10.0]))
def test_answers_are_those_without_proposals(asked: list[Asked], sharpness: float) -> None:
    """Tokens, text, logprobs, ends and usage are the same for any parameters, in batches, with small leases, and where
    requests are preempted and begin again.
    """
    with driven(0, sharpness) as without, driven(MOST, sharpness) as with_lookup:
        serve(without, asked)
        serve(with_lookup, asked)

        for number, each in enumerate(asked):
            expected, got = told(without, f"r{number}"), told(with_lookup, f"r{number}")
            if each.preempted_after:  # Where an attempt ended depends on what a step brings, and so does its usage.
                del expected["usage"], got["usage"]
            assert got == expected


LOOP = tuple([20, 21, 22, 23] * 6)


def loop_answer(made: Driven, **given_: Any) -> list[int]:
    serve(made, [Asked(LOOP, SamplingParams(max_tokens=60, temperature=0, **given_))], lease_pages=20)
    return made.tokens("r0")


def test_steps_are_fewer_where_an_answer_repeats() -> None:
    """An answer that repeats itself takes fewer steps than it has tokens, and counts them."""
    with driven(0) as without, driven(MOST) as with_lookup:
        assert loop_answer(with_lookup) == loop_answer(without)

        counters = with_lookup.executor.counters
        assert counters.steps < 0.75 * without.executor.counters.steps
        assert counters.decode_tokens == without.executor.counters.decode_tokens == 59
        assert counters.tokens_accepted == without.executor.counters.steps - counters.steps
        assert counters.tokens_proposed > counters.tokens_accepted
        assert without.executor.counters.tokens_proposed == 0


def test_every_row_is_a_segment_of_its_own() -> None:
    """Rows of proposals go through the kernels of decode rows: no segment of a decode step is longer than one."""
    with driven(MOST) as made:
        loop_answer(made)

        steps = made.runner.steps[1:]
        assert max(len(step) for step in steps) > 2
        for step in steps:
            first = step[0][0]
            assert step == [(first + place, 1) for place in range(len(step))]


def test_rejected_rows_touch_no_page_but_the_request_s_own() -> None:
    """Every page that is not the request's, and its own before the computed tokens, has the bytes from before."""
    with driven(MOST) as made:
        prompt, pages = LOOP, list(range(100, 125))
        made.runner.pool.tensor.fill_(float("nan"))
        made.give(admit(prompt, pages, params=SamplingParams(max_tokens=60, temperature=0)), batch(chunk(0, 24)))
        made.run(most=1)
        rejected = 0
        while made.executor.request_ids:
            request = made.executor._roster.requests["r"]
            computed = request.computed
            before = made.runner.pool.tensor.clone()
            proposed = made.executor.counters.tokens_proposed - made.executor.counters.tokens_accepted
            made.run(most=1)
            rejected += made.executor.counters.tokens_proposed - made.executor.counters.tokens_accepted - proposed
            after = made.runner.pool.tensor
            same = (before == after) | (before.isnan() & after.isnan())
            changed = set((~same).flatten(3).any(dim=3).any(dim=0).any(dim=0).nonzero().flatten().tolist())
            own = pages[computed // PAGE_SIZE : -(-(computed + 1 + MOST) // PAGE_SIZE)]
            assert changed <= set(own)
            begun = computed % PAGE_SIZE
            assert same[:, :, own[0], :begun].all()

        assert rejected


def test_nothing_is_proposed_beyond_the_pages() -> None:
    """A request that has room for a few tokens proposes so many, and waits for its lease as ever."""
    with driven(MOST) as made:
        made.give(admit(LOOP, range(8), params=SamplingParams(max_tokens=60, temperature=0)), batch(chunk(0, 24)))
        made.run()

        assert max(context for step in made.runner.steps for context, _ in step) == 8 * PAGE_SIZE - 1
        assert len(made.tokens()) == 9
        assert len(made.lease_requests()) == 1


def test_nothing_is_proposed_beyond_the_answer() -> None:
    """No row is computed behind the last token that an answer may have."""
    with driven(MOST) as made:
        serve(made, [Asked(LOOP, SamplingParams(max_tokens=12, temperature=0))], lease_pages=20)

        assert len(made.tokens("r0")) == 12
        assert max(context for step in made.runner.steps for context, _ in step) == len(LOOP) + 10


def test_a_large_batch_proposes_nothing() -> None:
    """Where a step has as many rows as it may have without proposals, it gets no more."""
    asked = [Asked(LOOP[n % 4 :], SamplingParams(max_tokens=9, temperature=0)) for n in range(STEP_ROWS)]
    with driven(MOST) as made:
        serve(made, asked)

        assert made.executor.counters.tokens_proposed == 0


def test_the_rows_of_a_step_are_bounded_and_shared() -> None:
    """A few requests propose each its part of what a step has room for."""
    asked = [Asked(LOOP[n:], SamplingParams(max_tokens=40, temperature=0)) for n in range(4)]
    with driven(MOST) as made:
        serve(made, asked, lease_pages=20)

        decode_steps = made.runner.steps[1:]
        assert max(len(step) for step in decode_steps) <= STEP_ROWS
        assert max(len(step) for step in decode_steps) > 3 * len(asked)


def test_a_bound_of_rows_cuts_proposals() -> None:
    """Where the device had memory for few rows only, proposals keep to that, and answers are the same."""
    rows = StepRows()
    rows.most = 3
    with driven(0) as without, driven(MOST, rows=rows) as bounded:
        expected = loop_answer(without)

        assert loop_answer(bounded) == expected
        assert max(len(step) for step in bounded.runner.steps[-10:]) == 3


def test_a_row_that_raises_fails_its_request_alone() -> None:
    """A step that raises is repeated one by one, proposals included, and only what raises then ends in an error."""
    with driven(0) as without, driven(MOST) as made:
        expected = loop_answer(without)
        calls = iter([None, None, None, None, RuntimeError("lost a core")])

        def fail_once() -> None:
            error = next(calls, None)
            if error is not None:
                raise error

        made.runner.on_forward = fail_once

        assert loop_answer(made) == expected
        assert made.executor.counters.steps_repeated == 1


def test_an_aborted_request_says_what_was_accepted() -> None:
    """What is told to the scheduler at an abort are the tokens that the gateway has, and not one proposal."""
    with driven(MOST) as made:
        made.give(admit(LOOP, range(30), params=SamplingParams(max_tokens=60, temperature=0)), batch(chunk(0, 24)))
        made.run(most=20)
        made.give(abort())
        made.run()

        (end,) = made.finished()
        assert len(made.tokens()) > 20
        assert end.output == pack_int32(made.tokens())


@pytest.mark.parametrize("lookup_tokens", [1, 3, 64])
def test_any_bound_gives_the_same_answers(lookup_tokens: int) -> None:
    """However long proposals may be."""
    with driven(0) as without, driven(lookup_tokens) as made:
        assert loop_answer(made) == loop_answer(without)
        assert made.executor.counters.tokens_accepted


class Saving:
    """Saves hidden states of everybody, or of nobody."""

    def __init__(self, *, is_saving: bool) -> None:
        self._is_saving = is_saving

    def is_saving(self, request_id: str) -> bool:
        return self._is_saving


@pytest.mark.parametrize(("is_saving", "is_sparse"), [(False, False), (True, False), (False, True)])
def test_some_requests_propose_nothing(*, is_saving: bool, is_sparse: bool) -> None:
    """Rows of proposals are no hidden states that may be saved, and no rows of a step that attends to a part."""
    request = decoding(tokens=10)
    request.tokens = TokenSequence([1, 2, 3, 1, 2, 3, 1, 2, 3, 1])
    request.computed = 9
    request.sparse = made_sparse().sparse if is_sparse else None
    lookup = PromptLookup(MOST, cast("Any", Saving(is_saving=is_saving)), weight_bytes=1000, token_bytes=1)

    (work,) = lookup.propose([Work(request, 9, 10, samples=True, is_chunk=False)])

    assert work.proposed == (() if is_saving or is_sparse else (2, 3))
    assert work.rows == 1 + len(work.proposed)
