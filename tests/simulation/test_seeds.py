"""Some seeds of the simulation of a whole cell. ``./task test:simulate`` runs as many as you like."""

from __future__ import annotations

import pytest

from tests.simulation.__main__ import main
from tests.simulation.drawing import draw
from tests.simulation.faults import KINDS
from tests.simulation.running import Outcome, run_seed

SEEDS = (*range(60), 5112, 6744, 8608)
"""Beyond the first: a promotion fails, and only what it was to hang below keeps a request waiting (5112); a worker ends
with the last copy of an answer that got lost while the broker was away (6744, 8608).
"""

MUST_HAPPEN = (
    "backups_done",
    "bases_resolved",
    "backups_failed",
    "chunks_failed",
    "evicted_pages_host",
    "failed_cancelled",
    "failed_deadline_exceeded",
    "fetches_done",
    "finished_stop",
    "hit_tokens_device",
    "hit_tokens_host",
    "hit_tokens_neighbour",
    "loads_failed",
    "pins_set",
    "members_that_learnt_their_end",
    "plans_repeated",
    "preemptions",
    "promoted_pages",
    "referred_tokens",
    "prompts_wanted",
    "requests_reclaimed",
    "requests_resumed",
    "restored_tokens",
    "saves_done",
    "saves_failed",
    "schedulers_fenced",
    "sparse_prefixes",
    "stale_inputs",
    "hidden_leases_answered",
    "storages_lost",
    "victims_cut",
    "warmings_started",
    "workers_lost",
)
"""What the seeds together must have met; otherwise they would prove nothing about it."""


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    """How every seed ended."""
    return [run_seed(seed) for seed in SEEDS]


def test_no_seed_breaks_a_property(outcomes: list[Outcome]) -> None:
    """Whatever goes wrong, answers are right, everything ends, nothing leaks, and a replay says the same bytes."""
    assert [(outcome.scenario.seed, outcome.broken) for outcome in outcomes if outcome.broken] == []


def test_the_seeds_meet_what_they_are_for(outcomes: list[Outcome]) -> None:
    """Among the counters of all seeds is what has to happen for the properties to mean anything."""
    met = {name for outcome in outcomes for name, count in (outcome.counters | outcome.seen).items() if count}

    assert set(MUST_HAPPEN) - met == set()


def test_a_seed_is_always_the_same_run(outcomes: list[Outcome]) -> None:
    """Nothing but the seed decides what happens."""
    again = run_seed(7)

    assert again == outcomes[7]


def test_every_kind_of_fault_is_drawn() -> None:
    """No kind of fault is left out by accident."""
    drawn = {fault.kind for seed in range(300) for fault in draw(seed).faults}

    assert drawn == set(KINDS)


def test_the_command_says_how_requests_ended_and_how_fast_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    """A run without a failure exits with 0 and a summary."""
    status = main(["--seeds", "0-2"])

    told = capsys.readouterr().out
    assert status == 0
    assert told.startswith("3 seeds, ")
    assert "requests ended with: " in told
