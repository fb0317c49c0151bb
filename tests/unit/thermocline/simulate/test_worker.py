"""A virtual worker alone, driven by orders: what it says, when, and in which order."""

from __future__ import annotations

from typing import Any

import pytest

from shared.messages import worker_events as events
from shared.messages import worker_plans as plans
from shared.messages.base import pack_int32
from shared.messages.requests import SamplingParams
from thermocline.simulate.cost import Costs, costs_of, load_s, step_s
from thermocline.simulate.events import NS_PER_S, EventQueue, to_ns
from thermocline.simulate.link import Link
from thermocline.simulate.profiles import load_hardware, load_model
from thermocline.simulate.worker import VirtualWorker

PAGE = 16


class _Alone:
    """A worker and somebody who writes down what it says, with the time in seconds."""

    def __init__(self) -> None:
        self.queue = EventQueue()
        self.said: list[tuple[float, Any]] = []
        self.first_tokens: dict[str, float] = {}
        self.costs: Costs = costs_of(load_hardware("h200-pcie5"), load_model("llama-3.1-8b"), page_size=PAGE)
        self.worker = VirtualWorker("w", "w-1", self.costs, Link(self.queue, full_duplex=True), self.queue, self)
        self.number = 0

    def tell(self, messages: list[Any]) -> None:
        self.said += [(self.queue.now_ns / NS_PER_S, message) for message in messages]

    def sampled_first(self, request_id: str) -> None:
        self.first_tokens[request_id] = self.queue.now_ns / NS_PER_S

    def output_of(self, request_id: str, tokens: int) -> bytes:
        return pack_int32(range(tokens))

    def order(self, *orders: Any, at_s: float = 0.0) -> None:
        numbered = []
        for order in orders:
            self.number += 1
            numbered.append((self.number, order))
        self.queue.at(to_ns(at_s), self.worker.deliver, numbered)

    def run(self) -> None:
        while self.queue.run_next():
            pass

    def of(self, kind: type) -> list[tuple[float, Any]]:
        return [(time_s, message) for time_s, message in self.said if isinstance(message, kind)]


def _admit(name: str, tokens: int, max_tokens: int, *, cached: int = 0, room: int = 64, attempt: int = 1) -> Any:
    pages = -(-(min(tokens + room, tokens + max_tokens)) // PAGE)
    return plans.AdmitRequest(
        request_id=name,
        attempt=attempt,
        gateway_id="g",
        tokens=bytes(4 * tokens),
        prompt_tokens=tokens,
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        pages=bytes(4 * pages),
        cached_tokens=cached,
    )


def _batch(
    *chunks: tuple[str, int, int],
    loaded: dict[str, int] | None = None,
    fill_bubble: bool = False,
    bubble_prefill: bool = False,
) -> Any:
    return plans.RunBatch(
        chunks=tuple(plans.PrefillChunk(request_id=name, attempt=1, start=a, end=b) for name, a, b in chunks),
        loads=tuple(
            plans.PageLoad(
                request_id=name,
                attempt=1,
                storage_id="s",
                host_pages=bytes(4 * pages),
                device_pages=bytes(4 * pages),
                identities=bytes(16 * pages),
            )
            for name, pages in (loaded or {}).items()
        ),
        fill_bubble=fill_bubble,
        bubble_prefill=bubble_prefill,
    )


def test_a_request_of_one_token_takes_one_step() -> None:
    """The batch is answered first, then the request ends, both when the step is over."""
    alone = _Alone()
    alone.order(_admit("a", 1000, 1), _batch(("a", 0, 1000)))
    alone.run()

    step = step_s(alone.costs, [(0, 1000)], 0, 0)
    assert [type(message) for _, message in alone.said] == [events.BatchDone, events.RequestFinished]
    assert [time_s for time_s, _ in alone.said] == pytest.approx([step, step])
    done, finished = (message for _, message in alone.said)
    assert (done.plan, done.computed_tokens, done.loaded_tokens, done.stall_us) == (2, 1000, 0, 0)
    assert done.compute_us == pytest.approx(step * 1e6, abs=1)
    assert (finished.reason, len(finished.output)) == ("length", 4)


def test_decoding_takes_as_long_as_its_steps_one_by_one() -> None:
    """A run of many steps in one event ends when the same steps would end one after another."""
    alone = _Alone()
    alone.order(_admit("a", 1000, 60), _batch(("a", 0, 1000)))
    alone.run()

    expected = step_s(alone.costs, [(0, 1000)], 0, 0)
    expected += sum(step_s(alone.costs, (), 1, 1000 + generated) for generated in range(1, 60))
    assert alone.of(events.RequestFinished)[0][0] == pytest.approx(expected, rel=1e-6)
    assert alone.worker.figures.steps == 60


def test_leases_are_asked_for_in_time_and_an_answer_waits_for_its_pages() -> None:
    """It asks when half of the room is left, stands still when all is used, and goes on with what it is given."""
    alone = _Alone()
    alone.order(_admit("a", 1000, 300, room=56), _batch(("a", 0, 1000)))
    alone.run()

    (asked,) = alone.of(events.LeaseRequested)
    # 1,056 tokens fit; with 32 tokens or fewer of room left it asks.
    assert asked[1].generated == 1056 - 1000 + 1 - 32
    assert not alone.of(events.RequestFinished)
    assert alone.worker.figures.steps == 1 + 56

    start_s = alone.queue.now_ns / NS_PER_S
    pages = bytes(4 * 20)
    alone.order(plans.ExtendLease(request_id="a", attempt=1, pages=pages), at_s=start_s + 1)
    alone.run()

    assert len(alone.of(events.RequestFinished)[0][1].output) == 4 * 300
    assert alone.of(events.RequestFinished)[0][0] > start_s + 1


def test_orders_are_taken_between_steps() -> None:
    """A batch that arrives in the middle of a decode step starts at its end, and the decoding goes on in it."""
    alone = _Alone()
    alone.order(_admit("a", 1000, 200, room=200), _batch(("a", 0, 1000)))
    first = step_s(alone.costs, [(0, 1000)], 0, 0)
    token = step_s(alone.costs, (), 1, 1001)
    alone.order(_admit("b", 500, 1), _batch(("b", 0, 500)), at_s=first + 0.5 * token)
    alone.run()

    both = step_s(alone.costs, [(0, 500)], 1, 1002)
    assert alone.of(events.BatchDone)[1][0] == pytest.approx(first + token + both)
    assert alone.first_tokens["b"] == pytest.approx(first + token + both)
    assert alone.worker.figures.steps == 200


def test_a_load_longer_than_the_computation_stalls_the_step() -> None:
    """Load, stall and tokens are reported, and the step ends with its last layer."""
    alone = _Alone()
    alone.order(_admit("a", 32_000, 1, cached=31_984), _batch(("a", 31_984, 32_000), loaded={"a": 1999}))
    alone.run()

    compute, load = step_s(alone.costs, [(31_984, 32_000)], 0, 0), load_s(alone.costs, 31_984)
    ((time_s, done),) = alone.of(events.BatchDone)
    assert load > compute
    assert time_s == pytest.approx(load + compute / 32)
    assert done.load_us == pytest.approx(load * 1e6, abs=1)
    assert done.stall_us == pytest.approx((load + compute / 32 - compute) * 1e6, abs=2)
    assert done.loaded_tokens == 31_984


@pytest.mark.parametrize("fill_bubble", [False, True])
def test_a_bubble_is_filled_with_decoding(fill_bubble: bool) -> None:
    """Asked to, it decodes while the load runs, reports it, and the stall that is left is shorter than a step."""
    alone = _Alone()
    alone.order(_admit("a", 1000, 2000, room=2000), _batch(("a", 0, 1000)))
    alone.order(
        _admit("b", 32_000, 1, cached=31_984),
        _batch(("b", 31_984, 32_000), loaded={"b": 1999}, fill_bubble=fill_bubble),
        at_s=0.1,
    )
    alone.run()

    done = alone.of(events.BatchDone)[1][1]
    token_us = step_s(alone.costs, (), 1, 1100) * 1e6
    if fill_bubble:
        assert done.bubble_tokens >= 5
        assert done.bubble_us == pytest.approx(done.bubble_tokens * token_us, rel=0.05)
        assert done.stall_us < 1.1 * token_us
    else:
        assert (done.bubble_tokens, done.bubble_us) == (0, 0)
        assert done.stall_us > 10 * token_us


def test_in_a_bubble_orders_about_others_go_ahead() -> None:
    """A lease for a decoding request is not held up by the batch that is loading; its own chunk order is."""
    alone = _Alone()
    alone.order(_admit("a", 1000, 2000, room=64), _batch(("a", 0, 1000)))
    alone.order(
        _admit("b", 64_000, 1, cached=63_984),
        _batch(("b", 63_984, 64_000), loaded={"b": 3999}, fill_bubble=True),
        at_s=0.15,
    )
    alone.order(plans.ExtendLease(request_id="a", attempt=1, pages=bytes(400)), at_s=0.16)
    alone.order(plans.PreemptRequest(request_id="b", attempt=1), at_s=0.17)
    alone.run()

    assert alone.of(events.BatchDone)[1][1].bubble_tokens > 20
    assert alone.of(events.BatchDone)[1][1].failed == ()


@pytest.mark.parametrize(
    ("bubble_prefill", "tokens", "is_ahead"), [(True, 200, True), (False, 200, False), (True, 20_000, False)]
)
def test_a_bubble_is_filled_with_a_batch_that_fits(bubble_prefill: bool, tokens: int, is_ahead: bool) -> None:
    """What loads nothing and is short enough is answered before the batch that loads, which takes no longer for it."""
    alone = _Alone()
    loading = _batch(("b", 63_984, 64_000), loaded={"b": 3999}, fill_bubble=True, bubble_prefill=bubble_prefill)
    alone.order(_admit("a", 16, 1), _batch(("a", 0, 16)))
    alone.order(_admit("b", 64_000, 1, cached=63_984), loading)
    alone.order(_admit("c", tokens, 1), _batch(("c", 0, tokens)))
    alone.run()

    done_s = {done.plan: time_s for time_s, done in alone.of(events.BatchDone)}
    assert list(done_s) == ([2, 6, 4] if is_ahead else [2, 4, 6])
    compute_s, loading_s = step_s(alone.costs, [(63_984, 64_000)], 0, 0), load_s(alone.costs, 63_984)
    assert done_s[4] - done_s[2] == pytest.approx(loading_s + compute_s / alone.costs.layers, rel=0.02)


def test_a_preempted_request_is_forgotten_with_its_output() -> None:
    """It says how far it came, and a chunk that was planned for it fails."""
    alone = _Alone()
    alone.order(_admit("a", 1000, 500, room=500), _batch(("a", 0, 1000)))
    alone.order(plans.PreemptRequest(request_id="a", attempt=1), _batch(("a", 0, 1000)), at_s=0.5)
    alone.run()

    ((_, preempted),) = alone.of(events.RequestPreempted)
    assert 20 < len(preempted.output) // 4 < 500
    assert alone.of(events.BatchDone)[1][1].failed == ("a",)
    assert alone.worker.requests == {}


def test_an_aborted_request_ends_with_its_reason() -> None:
    """The end is reported once; an order for another attempt means nothing."""
    alone = _Alone()
    alone.order(_admit("a", 1000, 500, room=500), _batch(("a", 0, 1000)))
    alone.order(
        plans.AbortRequest(request_id="a", attempt=2, reason="cancelled"),
        plans.AbortRequest(request_id="a", attempt=1, reason="cancelled"),
        at_s=0.5,
    )
    alone.run()

    ((_, finished),) = alone.of(events.RequestFinished)
    assert finished.reason == "cancelled"


def test_a_promotion_runs_beside_decoding_and_waits_for_loads() -> None:
    """It takes link time, not compute time, and a load that comes meanwhile goes first."""
    alone = _Alone()
    promote = plans.PromotePages(
        promotion_id=7, storage_id="s", host_pages=bytes(4000), device_pages=bytes(4000), identities=bytes(16_000)
    )
    alone.order(_admit("a", 1000, 100, room=100), _batch(("a", 0, 1000)), promote)
    alone.order(_admit("b", 8000, 1, cached=7984), _batch(("b", 7984, 8000), loaded={"b": 499}), at_s=0.045)
    alone.run()

    ((time_s, promoted),) = alone.of(events.PagesPromoted)
    begun = step_s(alone.costs, [(0, 1000)], 0, 0)
    assert promoted.promotion_id == 7
    assert promoted.ok
    assert time_s == pytest.approx(begun + load_s(alone.costs, 16_000) + load_s(alone.costs, 7984))
