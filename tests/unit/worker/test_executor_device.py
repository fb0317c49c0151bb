"""A device that breaks ends the worker at once; one that has no memory for a step gets smaller ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from services.worker.engine.forward_meta import ForwardMeta
from services.worker.kv import settled
from services.worker.step_rows import StepRows
from shared.errors import DeviceFailed
from shared.messages.requests import SamplingParams
from tests.unit.worker.driven_executor import Driven, admit, back_up, batch, chunk, load
from tests.unit.worker.fake_model import FakeRunner, continuation

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 14, 15]
OTHER = [9, 9, 8, 8, 7, 7, 6]
BROKEN = RuntimeError("CUDA error: unspecified launch failure")


class SmallRunner(FakeRunner):
    """Has memory for passes of up to ``room`` rows."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.refused: list[int] = []

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, meta: ForwardMeta, last_rows: torch.Tensor
    ) -> torch.Tensor:
        if meta.rows > self.room:
            self.refused.append(meta.rows)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return super().forward(ids, positions, meta, last_rows)


@pytest.fixture
def rows() -> StepRows:
    return StepRows()


@pytest.fixture
def small(rows: StepRows) -> Iterator[Driven]:
    made = Driven(SmallRunner(4), rows=rows)
    yield made
    made.close()


def give_two(driven: Driven, params: SamplingParams | None = None) -> None:
    driven.give(
        admit(PROMPT, [7, 2, 5, 6, 9], params=params),
        admit(OTHER, [10, 11, 12, 13], request_id="q"),
        batch(chunk(0, 10), chunk(0, 7, request_id="q")),
    )


@pytest.mark.parametrize("where", ["launch", "settle"])
def test_a_broken_gpu_ends_the_worker_at_once(driven: Driven, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is tried again, and no request is blamed."""
    passes: list[str] = []

    def fail() -> None:
        passes.append(where)
        if where == "settle":  # Which has torch's error in its hands.
            settled.raise_if_failed(BROKEN)
        raise BROKEN

    if where == "settle":
        monkeypatch.setattr(driven.runner, "settle", fail)
    else:
        driven.runner.on_forward = fail
    give_two(driven)

    with pytest.raises(DeviceFailed, match="unspecified launch failure"):
        driven.run()
    assert passes == [where]
    assert (driven.finished(), driven.done()) == ([], [])


def test_a_request_on_its_own_does_not_hide_a_broken_gpu(driven: Driven) -> None:
    """When it breaks while requests are tried one by one, the worker ends there."""
    errors = iter([RuntimeError("shapes do not match"), BROKEN])

    def on_forward() -> None:
        raise next(errors)

    driven.runner.on_forward = on_forward
    give_two(driven)

    with pytest.raises(DeviceFailed):
        driven.run()
    assert next(errors, None) is None


def test_a_step_that_does_not_fit_is_halved_until_it_does(small: Driven, rows: StepRows) -> None:
    """All requests get their answers, and every later step is as small from the start."""
    give_two(small)
    small.run()

    assert (small.tokens(), small.tokens("q")) == (continuation(PROMPT, 8), continuation(OTHER, 8))
    assert small.runner.refused == [17, 8]
    assert small.done()[0].failed == ()
    small.give(admit(PROMPT, [20, 21, 22, 23, 24], request_id="later"), batch(chunk(0, 10, request_id="later")))
    small.run()
    assert small.tokens("later") == continuation(PROMPT, 8)
    assert small.runner.refused == [17, 8]
    assert rows.most == 4
    assert list(rows.faults()) == [("device memory", "it ran out in a step, so that steps have 4 rows at the most")]


def test_prompt_logprobs_do_not_depend_on_the_size_of_steps(small: Driven) -> None:
    """Each prompt position has its own, whatever pieces the prompt was computed in."""
    whole = Driven()
    for driven in (small, whole):
        give_two(driven, SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=1))
        driven.run()

    assert small.runner.refused
    ours, theirs = (
        [item.prompt_logprobs for item in driven.items() if item.prompt_logprobs] for driven in (small, whole)
    )
    assert ours == theirs != []
    whole.close()


def test_loads_are_kept_when_a_step_does_not_fit(small: Driven) -> None:
    """What was loaded beside the pass that failed is computed on by the smaller ones."""
    host = small.host_pool(4)
    back_up(host, 3, PROMPT, 0)
    small.give(admit(PROMPT, [7, 2, 5, 6, 9], cached=4, host_tokens=4))
    small.give(batch(chunk(4, 10), loads=[load(PROMPT, [0], [3], [7])]))

    small.run()

    assert small.tokens() == continuation(PROMPT, 8)
    assert small.done()[0].load_failures == ()
    assert small.runner.refused == [6]


def test_without_memory_for_one_row_a_request_fails_as_before(rows: StepRows) -> None:
    """There is nothing smaller; the request is tried alone, and fails."""
    driven = Driven(SmallRunner(0), rows=rows)
    driven.give(admit(PROMPT, [7, 2, 5, 6, 9]), batch(chunk(0, 10)))

    driven.run()

    assert driven.done()[0].failed == ("r",)
    assert rows.most == 1
    driven.close()
