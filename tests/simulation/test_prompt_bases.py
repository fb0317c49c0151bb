"""Conversations by reference in simulated cells in which much goes wrong: no answer changes, no request is lost."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from tests.simulation.drawing import draw
from tests.simulation.running import Outcome, run
from tests.simulation.scenario import Arrival, Scenario
from tests.simulation.submission import submission
from tests.stateful.model_pages import expected_output

SEEDS = range(40)
TURNS = 12
GAP_US = (20_000, 300_000, 3_000_000)
"""Between a turn and the next: most answers are there by then, some are not."""


def conversations(scenario: Scenario) -> Scenario:
    """The same cell and faults, where two clients go on from turn to turn and now and then change the gateway."""
    chance = random.Random(f"{scenario.seed}/conversations")
    room = scenario.shape.device_pages * scenario.shape.page_size
    arrivals: list[Arrival] = []
    for name, salt in (("a", ""), ("b", chance.choice(["", "other"]))):
        prompt = tuple(chance.randrange(100) for _ in range(chance.choice([20, 100])))
        at_us, gateway = chance.randint(0, 10_000), chance.randrange(2)
        for turn in range(TURNS):
            arrival = Arrival(
                at_us=at_us,
                request_id=f"{name}-{turn}",
                gateway=gateway,
                prompt=prompt,
                max_tokens=chance.choice([1, 4, 20]),
                seed=turn,
                salt=salt,
                cancel_after_us=chance.choice([0] * 9 + [100, 5_000]),
                deadline_ms=chance.choice([0] * 9 + [50]),
                write=chance.random() < 0.95,
                ignore_eos=True,
            )
            arrivals.append(arrival)
            prompt += (*expected_output(submission(arrival, "")), *range(30, 30 + chance.randint(1, 20)))
            if len(prompt) > room // 2 or chance.random() < 0.1:
                prompt = prompt[: len(prompt) // 2]  # The client edits what it said.
            at_us += chance.choice(GAP_US)
            gateway = chance.choice([gateway, gateway, gateway, 1 - gateway])
    arrivals.sort(key=lambda arrival: arrival.at_us)
    last_us = arrivals[-1].at_us
    faults = tuple(replace(fault, at_us=fault.at_us % last_us) for fault in scenario.faults)
    faults = tuple(sorted(faults, key=lambda fault: fault.at_us))
    return replace(scenario, arrivals=tuple(arrivals), faults=faults)


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    """How every seed ended."""
    return [run(conversations(draw(seed))) for seed in SEEDS]


def test_no_conversation_breaks_a_property(outcomes: list[Outcome]) -> None:
    """Schedulers die and are replaced, gateways restart, workers go, caches are flushed: answers are the model's."""
    assert [(outcome.scenario.seed, outcome.broken) for outcome in outcomes if outcome.broken] == []


def test_the_conversations_meet_what_they_are_for(outcomes: list[Outcome]) -> None:
    """Most turns came by reference, many of those had to be told whole, and everything died now and then."""
    counters: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    for outcome in outcomes:
        counters.update(outcome.counters)
        faults.update(fault.kind for fault in outcome.scenario.faults)

    assert counters["bases_resolved"] > 100
    assert counters["prompts_wanted"] > 10
    for kind in ("scheduler_crashes", "scheduler_is_replaced", "gateway_crashes", "worker_crashes", "flush"):
        assert faults[kind]
