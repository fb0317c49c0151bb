"""What is learned of a worker's speed."""

import random
from typing import Any

import pytest

from services.scheduler.core.hidden.partition import layer_costs
from services.scheduler.core.rates import (
    PAPERS_RATIO,
    UNMEASURED_DISK_BYTES_PER_US,
    count_saved_prefill,
    disk_bytes_per_us,
    lent_cost,
    load_compute_ratio,
    load_us,
    observe,
    recompute_us,
)
from services.scheduler.core.speed_fit import Rate, SpeedFit
from services.scheduler.core.state import Worker
from services.scheduler.core.tiers.under_way import Batch, Chunk
from shared.messages.worker_events import BatchDone, RestorationCosts
from tests.present import present
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell


def learn(
    fit: SpeedFit,
    *,
    flat: float = 50.0,
    slope: float = 20.0,
    steps: int = 40,
    seed: int = 1,
    noise: float = 0.05,
    pause: tuple[int, ...] = (),
) -> None:
    """Report prefill steps of a machine with these costs, some of them with a pause."""
    chance = random.Random(seed)
    for number in range(steps):
        tokens, depth = chance.randrange(64, 2048), chance.randrange(0, 16384)
        time = tokens * (flat + slope * (depth + tokens / 2) / 1024) * (1 + chance.uniform(-noise, noise))
        time *= 1000 if number in pause else 1
        fit.note_compute(tokens, tokens * depth + tokens * tokens // 2, round(time))


def test_both_parts_of_a_steps_time_are_found() -> None:
    """A token's own cost, and what each 1,024 tokens of context add to it."""
    fit = SpeedFit()
    learn(fit)

    assert fit.flat == pytest.approx(50, rel=0.2)
    assert fit.slope == pytest.approx(20, rel=0.1)
    assert fit.compute_us(8192, 1024) == pytest.approx(1024 * (50 + 20 * 8.5), rel=0.05)


def test_a_pause_of_the_machine_does_not_spoil_the_fit() -> None:
    """One step that took a thousand times as long counts as eight times, and is soon forgotten."""
    fit = SpeedFit()
    learn(fit, steps=120, pause=(20,))

    assert fit.compute_us(4096, 512) == pytest.approx(512 * (50 + 20 * 4.25), rel=0.1)


def test_equal_contexts_put_all_time_down_to_tokens() -> None:
    """What the reports do not tell apart is not guessed."""
    fit = SpeedFit()
    for _ in range(10):
        fit.note_compute(100, 100 * 500, 7000)

    assert fit.flat == pytest.approx(70)
    assert fit.slope == 0


@pytest.mark.parametrize("report", [(0, 0, 100), (100, 0, 0), (-5, 0, 100), (100, 0, -1), (100, -1, 100)])
def test_senseless_reports_teach_nothing(report: tuple[int, int, int]) -> None:
    """Zero and negative values leave the fit as it is."""
    fit = SpeedFit()
    fit.note_compute(*report)
    fit.note_load(min(report[0], 0), report[2])

    assert fit == SpeedFit()


def report(
    cell: CellModel, *, compute_us: int = 1000, computed: int = 100, load_us: int = 0, loaded: int = 0, **changes: Any
) -> Worker:
    """Let the core observe one batch of 100 tokens on the first worker."""
    worker = cell.state.workers["worker-0"]
    batch = Batch(1, [Chunk("a", 1, 0, 100)], [], 100)
    times = {"compute_us": compute_us, "computed_tokens": computed, "load_us": load_us, "loaded_tokens": loaded}
    observe(cell.state, worker, batch, BatchDone(worker_id="w", incarnation="1", plan=1, **(times | changes)))
    return worker


def test_the_ratio_is_the_papers_until_both_sides_are_measured(make_cell: MakeCell) -> None:
    """Then it is what the reports say, and a configured one beats both."""
    cell = make_cell()
    worker = cell.state.workers["worker-0"]
    assert load_compute_ratio(cell.state, worker, 0) == PAPERS_RATIO

    report(cell)
    assert load_compute_ratio(cell.state, worker, 0) == PAPERS_RATIO
    report(cell, load_us=500, loaded=1000)

    assert load_compute_ratio(cell.state, worker, 0) == pytest.approx(20)
    assert recompute_us(cell.state, worker, 0, 50) == pytest.approx(500)
    assert load_us(cell.state, worker, 50) == pytest.approx(25)
    fixed = make_cell(load_compute_ratio=7.0)
    assert load_compute_ratio(fixed.state, report(fixed, load_us=500, loaded=1000), 0) == 7.0


@pytest.mark.parametrize("changes", [{"failed": ("a",)}, {"computed_tokens": 60}])
def test_a_batch_that_was_not_just_computed_says_nothing_of_speed(make_cell: MakeCell, changes: dict[str, Any]) -> None:
    """Repeated or partial work would be taken for a slow machine."""
    cell = make_cell()

    assert report(cell, **changes).speed.reports == 0


def test_waiting_for_loads_is_not_computing(make_cell: MakeCell) -> None:
    """Stalls are subtracted from a step's time."""
    cell = make_cell()

    assert report(cell, compute_us=5000, stall_us=4000).speed.flat == pytest.approx(10)


def test_a_worker_without_reports_is_taken_to_be_like_the_others(make_cell: MakeCell) -> None:
    """They run the same model."""
    cell = make_cell(workers=2)
    report(cell, compute_us=7000)

    assert recompute_us(cell.state, cell.state.workers["worker-1"], 0, 10) == pytest.approx(700)


def test_restoration_costs_are_neutral_until_measured_and_then_ratios() -> None:
    """Depth doubles the cost where measured context says so; a load costs its measured share of computing."""
    fit = SpeedFit()
    assert fit.restoration_costs() == (0.0, 1.0)

    # 10 us a token, and as much again for every 2,048 tokens of context.
    for tokens, context in ((100, 0), (100, 4096), (200, 1024), (50, 2048), (400, 512)):
        elapsed = round(tokens * (10 + 10 * context / 2048))
        fit.note_compute(tokens, tokens * context, elapsed)
    assert fit.restoration_costs()[1] == 1.0
    fit.note_load(1000, 2500)
    depth, host = fit.restoration_costs()

    assert depth == pytest.approx(2048, rel=0.05)
    assert host == pytest.approx(0.25, rel=0.05)


def test_what_is_lent_costs_its_share_of_computing_as_measured(make_cell: MakeCell) -> None:
    """Nothing less than computing before both were measured, and never more."""
    cell = make_cell(host_pages=8)
    storage, token_bytes = cell.state.storages["storage"], present(cell.state.geometry).token_bytes
    assert lent_cost(cell.state, storage) == 1.0
    storage.fetching.lender_rate.note(token_bytes * 100.0, 400.0)
    assert lent_cost(cell.state, storage) == 1.0
    cell.state.speed.note_compute(100, 0, 1000)
    cell.state.speed.note_load(100, 200)
    assert lent_cost(cell.state, storage) == pytest.approx(0.4 + 0.2)

    storage.fetching.lender_rate = Rate(observations=1, amount=1.0, elapsed_us=1e9)
    assert lent_cost(cell.state, storage) == 1.0


def test_restored_tokens_teach_how_fast_is_restored_and_nothing_of_computing(make_cell: MakeCell) -> None:
    """A batch of both: its computed tokens and their time count for the one, the others for the other."""
    cell = make_cell()
    worker = cell.state.workers["worker-0"]
    batch = Batch(1, [Chunk("a", 1, 0, 640, is_restored=True), Chunk("b", 1, 0, 100)], [], 740)
    done: dict[str, Any] = {"compute_us": 1000, "computed_tokens": 100, "restored_tokens": 640, "restore_us": 3200}

    observe(cell.state, worker, batch, BatchDone(worker_id="w", incarnation="1", plan=1, **done))

    assert worker.speed.flat == pytest.approx(10)
    assert worker.restoring.elapsed_us / worker.restoring.amount == pytest.approx(5)


def test_refused_restorations_teach_nothing(make_cell: MakeCell) -> None:
    """Part of their time went into what was thrown away."""
    cell = make_cell()
    worker = report(cell, restored_tokens=64, restore_us=100, restores_refused=("a",))

    assert worker.restoring.observations == 0


def test_costs_of_a_layer_are_the_profiles_until_computing_was_observed(make_cell: MakeCell) -> None:
    """Bytes follow from the geometry, and computing from whatever is known best."""
    cell = make_cell(costs=RestorationCosts(hidden=2, hidden_us=3, token_us=20, pair_us=0.5, link_bytes_per_us=100))
    worker = cell.state.workers["worker-0"]
    profiled = layer_costs(cell.state, worker)
    assert profiled is not None
    assert (profiled.layers, profiled.kv_bytes, profiled.hidden_bytes) == (1, 8, 8)
    assert (profiled.hidden_us, profiled.token_us, profiled.pair_us) == (3, 20, 0.5)

    learn(worker.speed, flat=50.0, slope=20.0, noise=0.0)

    observed = layer_costs(cell.state, worker)
    assert observed is not None
    assert observed.hidden_us == 3
    assert observed.recompute_us(1000, 1500) == pytest.approx(recompute_us(cell.state, worker, 1000, 500))


def test_a_worker_without_a_profile_has_no_costs(make_cell: MakeCell) -> None:
    """Nothing is guessed of what restoring takes."""
    cell = make_cell()

    assert layer_costs(cell.state, cell.state.workers["worker-0"]) is None


def test_hidden_states_of_a_model_that_cannot_use_them_save_no_bytes(make_cell: MakeCell) -> None:
    """So they are never the better form."""
    cell = make_cell(costs=RestorationCosts(hidden=0, hidden_us=0, token_us=20, pair_us=0, link_bytes_per_us=100))

    assert not present(layer_costs(cell.state, cell.state.workers["worker-0"])).hidden_is_smaller


@pytest.mark.parametrize(("limit", "expected"), [(0.0, UNMEASURED_DISK_BYTES_PER_US), (5e6, 5.0)])
def test_a_disk_is_as_fast_as_its_limit_until_it_was_read(make_cell: MakeCell, limit: float, expected: float) -> None:
    """A gigabyte a second where there is none."""
    cell = make_cell(host_pages=8)
    storage = cell.state.storages["storage"]
    storage.fetching.disk_bytes_per_s = limit
    assert disk_bytes_per_us(storage) == expected

    storage.fetching.disk_rate.note(600.0, 300.0)

    assert disk_bytes_per_us(storage) == 2.0


def test_saved_prefill_is_counted_by_the_measured_speed_once_there_is_one(make_cell: MakeCell) -> None:
    """A prefix that is reused before any report says nothing of time."""
    cell = make_cell(page_size=16, pages=32)
    worker = cell.state.workers["worker-0"]
    count_saved_prefill(cell.state, worker, 50)
    assert "prefill_saved_us" not in cell.state.counters

    report(cell)
    count_saved_prefill(cell.state, worker, 50)

    assert cell.state.counters["prefill_saved_us"] == 500


def test_an_admission_counts_what_its_hit_saved(make_cell: MakeCell) -> None:
    """Once for the whole reused prefix, wherever it was found."""
    cell = make_cell(page_size=16, pages=32)
    cell.serve([7] * 100, max_tokens=1)
    report(cell)
    assert cell.state.counters.get("prefill_saved_us", 0) == 0

    cell.serve([7] * 100, max_tokens=1)

    assert cell.state.counters["hit_tokens_device"] == 96
    assert cell.state.counters["prefill_saved_us"] > 0
