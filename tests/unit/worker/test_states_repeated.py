"""Passes that are repeated go on from the right states: whatever failed, tokens equal Hugging Face's generate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.worker.detokenizer import Vocabulary
from services.worker.engine.states.step import StateStep
from shared.messages.base import pack_int32, unpack_int32
from shared.messages.requests import SamplingParams
from shared.messages.worker_plans import PageLoad
from tests.checkpoints import VOCAB_SIZE
from tests.reference import Reference
from tests.state_checkpoints import make_state_checkpoint
from tests.unit.worker.driven_executor import Driven, admit, batch, chunk, preempt
from tests.unit.worker.fake_model import SHM_PREFIX
from tests.unit.worker.pools import identity_of
from tests.unit.worker.runners import runners_of

PAGE_SIZE = 8
ANSWER = 20


@pytest.fixture(scope="module", params=["qwen3_next", "bamba", "lfm2"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_state_checkpoint(request.param, tmp_path_factory.mktemp(request.param), seed=3)


@pytest.fixture(scope="module")
def truth(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


@pytest.fixture
def made(checkpoint: Path) -> Iterator[Driven]:
    with runners_of(lambda _: checkpoint, SHM_PREFIX) as load:
        runner = load("", page_size=PAGE_SIZE, dtype="float32")
        driven = Driven(runner, Vocabulary.from_directory(checkpoint), submit=None)
        yield driven
        driven.close()


@pytest.fixture
def prompts(truth: Reference) -> list[list[int]]:
    """Three prompts, to which rounding decides no token of the answer."""
    rng = np.random.default_rng(7)

    def draw(length: int) -> Callable[[], list[int]]:
        return lambda: rng.integers(8, VOCAB_SIZE, length).tolist()

    return [truth.decided(draw(length), ANSWER, ignore_eos=True) for length in (37, 11, 43)]


def settings() -> SamplingParams:
    return SamplingParams(max_tokens=ANSWER, ignore_eos=True, temperature=0)


def answer(truth: Reference, prompt: list[int]) -> list[int]:
    return truth.greedy(prompt, ANSWER, ignore_eos=True)


def pages_from(first: int) -> range:
    return range(first, first + 10)


class Failing:
    """Passes that fail: each whose number is in ``at``, once states of some layers have been written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: set[int], *, layers: int, error: Exception) -> None:
        self.passes = self.failed = 0
        carry, begin = StateStep.carry, StateStep.__init__
        done = 0

        def beginning(step: StateStep, *args: Any) -> None:
            nonlocal done
            done, self.passes = 0, self.passes + 1
            begin(step, *args)

        def failing(step: StateStep, *args: Any) -> Any:
            nonlocal done
            output, done = carry(step, *args), done + 1
            if self.passes in at and done == layers:
                self.failed += 1
                raise error
            return output

        monkeypatch.setattr(StateStep, "__init__", beginning)
        monkeypatch.setattr(StateStep, "carry", failing)


@pytest.mark.parametrize("layers", [1, 2])
def test_a_pass_that_fails_midway_is_repeated_from_the_page(
    made: Driven, truth: Reference, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, layers: int
) -> None:
    """After one layer, or after all: the next try must not go on from what the failed one has written."""
    failing = Failing(monkeypatch, {2, 6, 11, 17}, layers=layers, error=RuntimeError("broken"))
    made.give(admit(prompts[0], pages_from(0), request_id="a", params=settings()))
    made.give(admit(prompts[1], pages_from(10), request_id="b", params=settings()))
    made.give(batch(chunk(0, 21, request_id="a")), batch(chunk(0, 11, request_id="b"), chunk(21, 37, request_id="a")))

    made.run()

    assert failing.failed == 4
    assert made.executor.counters.steps_repeated >= 4
    assert made.tokens("a") == answer(truth, prompts[0])
    assert made.tokens("b") == answer(truth, prompts[1])


def test_a_step_beside_a_failed_load_is_repeated_from_the_page(
    made: Driven, truth: Reference, prompts: list[list[int]]
) -> None:
    """The first try has computed all, and left its states, when the load of another request turns out bad."""
    host = made.host_pool(2)
    host.seal_page(0, identity_of("another"))
    made.give(admit(prompts[0], pages_from(0), request_id="a", params=settings()))
    made.give(batch(chunk(0, 37, request_id="a")))
    made.run(most=4)
    made.give(admit(prompts[2], pages_from(20), request_id="c", cached=8, host_tokens=8, params=settings()))
    loads = [
        PageLoad(
            request_id="c",
            attempt=1,
            storage_id="s",
            host_pages=pack_int32([0]),
            device_pages=pack_int32([20]),
            identities=identity_of("wanted"),
        )
    ]
    made.give(batch(chunk(8, 43, request_id="c"), loads=loads))
    made.run()
    assert made.done()[-1].failed == ("c",)

    made.give(batch(chunk(0, 20, request_id="c")), batch(chunk(20, 43, request_id="c")))
    made.run()

    assert made.executor.counters.steps_repeated == 1
    assert made.tokens("a") == answer(truth, prompts[0])
    assert made.tokens("c") == answer(truth, prompts[2])


def test_a_step_that_the_device_has_no_memory_for_goes_in_pieces(
    made: Driven, truth: Reference, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Smaller passes, which end within pages, leave the states that the next ones go on from."""
    error = RuntimeError("out of memory")
    monkeypatch.setattr("services.worker.passes.is_out_of_memory", lambda raised: raised is error)
    failing = Failing(monkeypatch, {1, 2}, layers=1, error=error)
    made.give(admit(prompts[0], pages_from(0), request_id="a", params=settings()), batch(chunk(0, 37, request_id="a")))

    made.run()

    assert failing.failed == 2
    assert made.tokens("a") == answer(truth, prompts[0])


def test_a_preempted_request_resumes_behind_its_whole_pages(
    made: Driven, truth: Reference, prompts: list[list[int]]
) -> None:
    """Another attempt has no state within a page: it begins where the pages that are left end."""
    made.give(admit(prompts[0], pages_from(0), request_id="a", params=settings()), batch(chunk(0, 37, request_id="a")))
    made.run(most=9)
    made.give(preempt("a"))
    made.run()
    (told,) = made.preempted()
    known = [*prompts[0], *unpack_int32(told.output)]
    kept = (len(known) - 1) // PAGE_SIZE

    again = admit(
        known,
        [*range(kept), *range(40, 50)],
        request_id="a",
        attempt=2,
        prompt_tokens=len(prompts[0]),
        cached=kept * PAGE_SIZE,
        params=settings(),
    )
    made.give(again, batch(chunk(kept * PAGE_SIZE, len(known), request_id="a", attempt=2)))
    made.run()

    assert unpack_int32(made.finished()[-1].output) == answer(truth, prompts[0])


def test_more_requests_than_slots_are_served_alike(
    made: Driven, truth: Reference, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who finds no slot repeats the rows of its page, and says the same."""
    monkeypatch.setattr(made.executor._passes._computer._states, "_slots", 1)
    for number, prompt in enumerate(prompts):
        made.give(admit(prompt, pages_from(10 * number), request_id=f"r{number}", params=settings()))
        made.give(batch(chunk(0, len(prompt), request_id=f"r{number}")))

    made.run()

    assert [made.tokens(f"r{number}") for number in range(3)] == [answer(truth, prompt) for prompt in prompts]
