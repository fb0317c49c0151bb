"""A failing scenario becomes smaller, and still fails in the same way."""

from __future__ import annotations

import pytest

from tests.simulation.__main__ import tell
from tests.simulation.defects import unlocking_is_skipped
from tests.simulation.running import Outcome, run_seed
from tests.simulation.shrinking import shrink


@pytest.fixture
def failed(monkeypatch: pytest.MonkeyPatch) -> Outcome:
    """A run that breaks a property, because the core has a defect."""
    unlocking_is_skipped(monkeypatch)
    return next(outcome for outcome in map(run_seed, range(40)) if outcome.broken)


def test_what_a_failure_does_not_need_is_left_out(failed: Outcome) -> None:
    """The smaller scenario has fewer requests or faults, and breaks at the same place."""
    smaller = shrink(failed, most_runs=40)

    assert smaller.signature == failed.signature
    before, after = failed.scenario, smaller.scenario
    assert len(after.arrivals) + len(after.faults) < len(before.arrivals) + len(before.faults)


def test_no_more_runs_are_made_than_allowed(failed: Outcome) -> None:
    """Without a run left, the scenario stays as it is."""
    assert shrink(failed, most_runs=0) is failed


def test_a_failure_is_told_with_all_that_reproduces_it(failed: Outcome, capsys: pytest.CaptureFixture[str]) -> None:
    """Seed, property, settings, faults, the last inputs and the command are printed."""
    tell(failed)

    told = capsys.readouterr().out
    scenario = failed.scenario
    assert f"seed {scenario.seed}: {failed.broken}" in told
    assert f"python -m tests.simulation --seeds {scenario.seed} --shrink" in told
    assert str(scenario.config) in told
    assert all(str(fault) in told for fault in scenario.faults)
    assert failed.last_inputs[-1][:100] in told
