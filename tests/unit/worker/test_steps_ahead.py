"""Steps that are launched before the tokens of the step before are read: which ones, what waits for them, what is lost.

On a device that does everything as late as it may, so that ``read`` is where the host waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
import torch

from services.worker.engine.forward_meta import ForwardMeta
from services.worker.engine.sampler import SampleRow
from services.worker.engine.unread_tokens import Event, Following, UnreadTokens
from services.worker.hidden_saving import HiddenSaving
from services.worker.step_rows import StepRows
from shared.errors import DeviceFailed
from shared.messages.requests import SamplingParams
from tests.cuda.late_device import LateMover, LateRunner
from tests.unit.worker.driven_executor import Driven, abort, admit, batch, chunk, extend
from tests.unit.worker.fake_model import EOS, VOCAB_SIZE, continuation, next_token

PROMPT = [5, 6, 7]
OTHER = [9, 9]
TABLE, OTHER_TABLE = [4, 5, 6, 7], [0, 1, 2, 3]


class NotedRunner(LateRunner):
    """``done`` is what the host did, in its order: launches by how many tokens their rows stand behind, and reads.
    By the length of the first request, once: ``said`` are tokens in the place of what the model says, and of ``is_nan``
    there are none. By the number of a launch: errors of launches that are ``broken``, and of reads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str] = []
        self.said: dict[int, int] = {}
        self.broken: dict[int, Exception] = {}
        self.unreadable: dict[int, Exception] = {}
        self.is_nan: set[int] = set()
        self.launches = 0

    def launch(
        self, ids: torch.Tensor | Following, positions: torch.Tensor, meta: ForwardMeta, rows: Sequence[SampleRow]
    ) -> UnreadTokens:
        number, self.launches = self.launches, self.launches + 1
        if number in self.broken:
            raise self.broken[number]
        self.done.append("launch " + " and ".join(str(each) for each in positions.tolist()))
        tokens = super().launch(ids, positions, meta, rows)
        tokens._event = NotedEvent(tokens._event, partial(self._reading, number))
        return tokens

    def _reading(self, number: int) -> None:
        self.done.append("read")
        if number in self.unreadable:
            raise self.unreadable[number]

    def logits(self, meta: ForwardMeta, last_rows: torch.Tensor) -> torch.Tensor:
        logits = super().logits(meta, last_rows)
        length = meta.segments[0].length
        if length in self.said:
            logits[0] = torch.arange(VOCAB_SIZE) == self.said.pop(length)
        if length in self.is_nan:
            self.is_nan.remove(length)
            logits[0] = float("nan")
        return logits

    def settle(self) -> None:
        self.done.append("settle")
        super().settle()


class NotedEvent:
    def __init__(self, event: Event, note: Callable[[], None]) -> None:
        self._event, self._note = event, note

    def synchronize(self) -> None:
        self._note()
        self._event.synchronize()


@pytest.fixture
def runner() -> NotedRunner:
    return NotedRunner()


@pytest.fixture
def driven(runner: NotedRunner) -> Iterator[Driven]:
    made = Driven(runner, mover=LateMover(runner.pool))
    yield made
    made.close()


def begin(driven: Driven, *, params: SamplingParams | None = None, both: bool = True, max_tokens: int = 8) -> None:
    """Compute the prompts, and forget what was done until then."""
    driven.give(admit(PROMPT, TABLE, params=params, max_tokens=max_tokens))
    driven.give(batch(chunk(0, 3)))
    if both:
        driven.give(admit(OTHER, OTHER_TABLE, request_id="q"), batch(chunk(0, 2, request_id="q")))
    while len(driven.executor.inbox):
        driven.executor.run_one_step()
    driven.runner.done.clear()


def step(driven: Driven) -> list[str]:
    """What the host does in one step."""
    driven.runner.done.clear()
    driven.executor.run_one_step()
    return list(driven.runner.done)


def test_the_next_step_is_launched_before_the_tokens_of_this_one_are_read(driven: Driven) -> None:
    """From the first step on that decodes alone, and nothing else is waited for."""
    begin(driven, both=False)

    assert step(driven) == ["launch 3", "launch 4", "read"]
    assert step(driven) == ["launch 5", "read"]
    assert driven.tokens() == continuation(PROMPT, 3)
    driven.run()
    assert driven.tokens() == continuation(PROMPT, 8)


def test_nothing_is_computed_behind_an_end_that_is_known(driven: Driven) -> None:
    """The last token that was asked for needs no step behind it."""
    begin(driven, both=False, max_tokens=3)

    assert step(driven) == ["launch 3", "launch 4", "read"]
    assert step(driven) == ["read"]
    assert not driven.executor._ahead.is_under_way
    assert [end.reason for end in driven.finished()] == ["length"]


def test_a_row_that_ends_unexpectedly_is_discarded_and_its_end_told_when_nothing_writes_for_it(
    driven: Driven, runner: NotedRunner
) -> None:
    """The gateway has its last token at once; the scheduler, which gives pages away, hears of it a step later."""
    begin(driven)
    length = driven.executor._roster.requests["r"].computed + 1
    runner.said = {length: EOS}

    step(driven)

    assert driven.items()[-1].finish == "stop"
    assert driven.finished() == []
    assert step(driven)[-1] == "read"
    (end,) = driven.finished()
    assert (end.request_id, end.reason) == ("r", "stop")
    assert driven.tokens()[-1] == EOS
    driven.run()
    assert driven.tokens("q") == continuation(OTHER, 8)


def test_the_end_of_the_last_request_is_told_without_another_order(driven: Driven, runner: NotedRunner) -> None:
    """The step that computes nobody is read, and then there is nothing to do."""
    begin(driven, both=False)
    runner.said = {4: EOS}
    assert driven.executor.run_one_step()
    assert driven.finished() == []

    assert not driven.executor.run_one_step()

    assert [end.reason for end in driven.finished()] == ["stop"]
    assert driven.executor.counters.decode_tokens == 1


def test_orders_wait_for_the_step_under_way_and_no_other_is_launched_before_them(driven: Driven) -> None:
    """Here an abort: it finds every token that was computed told."""
    begin(driven)
    step(driven)
    driven.give(abort())

    assert step(driven) == ["read"]
    assert driven.finished() == []
    driven.executor.run_one_step()

    assert [end.request_id for end in driven.finished()] == ["r"]
    assert len(driven.tokens()) == 4 or driven.tokens() == continuation(PROMPT, len(driven.tokens()))
    driven.run()
    assert driven.tokens("q") == continuation(OTHER, 8)


def test_a_request_without_page_room_pauses_and_the_others_go_on_ahead(driven: Driven) -> None:
    """It goes on where it was when it has a page."""
    driven.give(admit(OTHER, OTHER_TABLE, request_id="q"), batch(chunk(0, 2, request_id="q")))
    driven.give(admit([5, 6, 7], [4], max_tokens=4), batch(chunk(0, 3)))
    while len(driven.executor.inbox):
        driven.executor.run_one_step()
    assert step(driven) == ["launch 3 and 3", "launch 4", "read"]
    assert step(driven) == ["launch 5", "read"]
    assert driven.tokens() == continuation(PROMPT, 2)

    driven.give(extend([5]))
    driven.run()

    assert driven.tokens() == continuation(PROMPT, 4)
    assert driven.tokens("q") == continuation(OTHER, 8)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=4, temperature=0, logprobs=1),
        SamplingParams(max_tokens=4, temperature=0, presence_penalty=1.0),
        SamplingParams(max_tokens=4, temperature=0, logit_bias={3: -100.0}),
        SamplingParams(max_tokens=4, temperature=0, min_tokens=4),
    ],
    ids=["logprobs", "a penalty", "a bias", "no end allowed yet"],
)
def test_steps_in_which_the_host_chooses_are_taken_in_the_ordinary_order(
    driven: Driven, params: SamplingParams
) -> None:
    """One such request decides for all of the step."""
    begin(driven, params=params)

    assert step(driven) == ["settle"]
    while "r" in driven.executor._roster.requests:
        assert step(driven) == ["settle"]
    assert any(each.startswith("launch") for each in step(driven))
    driven.run()
    assert driven.tokens("q") == continuation(OTHER, 8)


def test_steps_whose_hidden_states_are_saved_are_taken_in_the_ordinary_order(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is taken down within a step is void if the step is."""
    begin(driven)
    monkeypatch.setattr(HiddenSaving, "is_idle", False)

    assert step(driven) == ["settle"]


def test_a_token_that_waits_for_its_grammar_is_looked_for_between_steps(driven: Driven) -> None:
    """No step is launched behind the one under way while there may be one."""
    begin(driven)
    assert step(driven)[-2:] == ["launch 5 and 3", "read"]
    driven.executor._roster.requests["q"].held_logits = torch.zeros(VOCAB_SIZE)

    assert step(driven) == ["read"]


def test_seeded_tokens_are_those_of_the_ordinary_order(driven: Driven) -> None:
    """Each is drawn for its own place in the answer."""
    params = SamplingParams(max_tokens=8, temperature=6.0, seed=3, top_p=0.9)
    plain = Driven(LateRunner(is_ahead=False))
    for each in (driven, plain):
        begin(each, params=params, both=False) if each is driven else plain.give(
            admit(PROMPT, TABLE, params=params), batch(chunk(0, 3))
        )
        each.run()

    assert driven.tokens() == plain.tokens() != continuation(PROMPT, 8)
    assert driven.runner.launches
    plain.close()


def test_a_launch_that_fails_is_taken_in_the_ordinary_order(driven: Driven, runner: NotedRunner) -> None:
    """What is under way is read, what was launched of the other is waited for; the next tries are further apart."""
    begin(driven, both=False)
    runner.broken = {1: RuntimeError("no kernel image is available")}

    assert step(driven) == ["launch 3", "settle", "read"]
    assert step(driven) == ["settle"]
    assert step(driven)[0] == "launch 5"
    driven.run()
    assert driven.tokens() == continuation(PROMPT, 8)


@pytest.mark.parametrize("fault", ["nan", "error"])
def test_a_step_that_cannot_be_read_is_taken_again(driven: Driven, runner: NotedRunner, fault: str) -> None:
    """With the one behind it, which nobody writes for any more when it is taken."""
    begin(driven, both=False)
    if fault == "nan":
        runner.is_nan = {4}
    else:
        runner.unreadable = {0: RuntimeError("something passing")}

    done = step(driven)

    assert done[:4] == ["launch 3", "launch 4", "read", "settle"]
    assert driven.executor.counters.steps_repeated == 1
    assert driven.tokens() == continuation(PROMPT, 2)
    driven.run()
    assert driven.tokens() == continuation(PROMPT, 8)


def test_a_device_that_fails_in_a_step_ahead_ends_the_worker(driven: Driven, runner: NotedRunner) -> None:
    """Nothing is tried again."""
    begin(driven)
    runner.unreadable = {0: RuntimeError("CUDA error: unspecified launch failure")}

    with pytest.raises(DeviceFailed):
        driven.run()


def test_a_step_that_fails_again_and_again_is_rarely_tried(driven: Driven, runner: NotedRunner) -> None:
    """A step is given up after 1, 2, 4 and so on steps of the ordinary order."""
    runner.broken = {number: RuntimeError("never") for number in range(100)}
    begin(driven, both=False, max_tokens=60)

    driven.give(extend(range(10, 25)))
    driven.run()

    assert driven.tokens() == continuation(PROMPT, 60)
    assert runner.launches == 6


def test_a_pass_that_is_bounded_is_not_launched_ahead(runner: NotedRunner) -> None:
    """Two rows of which the device has memory for one at a time are two passes."""
    rows = StepRows()
    rows.shrink(2)
    driven = Driven(runner, rows=rows, mover=LateMover(runner.pool))
    begin(driven)

    driven.run()

    assert driven.tokens() == continuation(PROMPT, 8)
    assert not any("and" in each for each in runner.done)
    driven.close()


def test_a_worker_that_ends_reads_what_is_under_way(driven: Driven) -> None:
    """Nothing writes to the pool when it is given back."""
    begin(driven)
    stream = driven.runner.stream
    driven.executor.run_one_step()
    assert stream._launched > stream._done
    driven.executor.inbox.close()

    driven.executor.run()

    assert stream._launched == stream._done


def test_the_time_of_a_step_ahead_is_that_of_the_device(runner: NotedRunner) -> None:
    """It begins when the step before has ended, not when it was launched."""
    driven = Driven(runner, mover=LateMover(runner.pool))
    runner.stream._on_work = lambda: driven.spend(1_000_000)
    begin(driven, both=False, max_tokens=6)
    driven.run()

    pieces = 5  # Three layers, the choice, and the way home.
    assert driven.executor._pace.decode_ns == pytest.approx(pieces * 1_000_000, rel=0.01)
    assert next_token(PROMPT) == driven.tokens()[0]
    driven.close()
