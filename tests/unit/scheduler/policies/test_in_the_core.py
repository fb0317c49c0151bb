"""Every policy in a whole cell: right answers, invariants, and a fold that goes on from a snapshot alike."""

from __future__ import annotations

from random import Random

import pytest

from services.scheduler.core import decode_state, encode_state
from services.scheduler.core.cache.eviction import POLICIES
from services.scheduler.policies.thermocline import ThermoclinePolicy
from shared.messages.cell_events import CellConfig
from tests.stateful.cell_model import CellModel


def crowded_cell(policy: str, *, restored_at: int = -1) -> CellModel:
    """Thirty conversations' prompts over pools that hold a few; at one of them the state is read from its bytes."""
    cell = CellModel(CellConfig(policy=policy, lease_tokens=4, reserve_fraction=0.0), page_size=2)
    cell.add_storage("storage", pages=24)
    cell.add_worker("worker", pages=30)
    cell.drain()
    rng, prompts = Random(5), [[1, 2, 3, 4]]
    for number in range(30):
        prompt = [*rng.choice(prompts[-12:]), *(rng.randrange(1, 9) for _ in range(rng.randrange(3, 8)))][:24]
        prompts.append(prompt)
        cell.submit(prompt, max_tokens=3)
        if number % 3 == 0:
            cell.drain()
        if number == restored_at:
            cell.state = decode_state(encode_state(cell.state))
    cell.drain()
    return cell


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_crowded_cell_stays_right_and_evicts(policy: str) -> None:
    """The model cell checks every read of KV, every answer and every invariant; something must have been evicted."""
    cell = crowded_cell(policy)

    assert cell.state.policy == policy
    assert cell.state.counters["evicted_pages_device"] > 0
    assert cell.state.counters["hit_tokens_device"] > 0


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_fold_from_a_snapshot_ends_in_the_same_bytes(policy: str) -> None:
    """The policy's records are in the snapshot, all of them."""
    assert encode_state(crowded_cell(policy, restored_at=17).state) == encode_state(crowded_cell(policy).state)


def test_steps_without_a_batch_let_policies_work_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """An input that admits and evicts nothing does a little of what admissions would wait for; one that does, none."""
    cell = CellModel(CellConfig(reserve_fraction=0.0, max_running=1), page_size=2)
    cell.add_worker("worker", pages=30)
    cell.drain()
    prepared = []

    def prepare(policy: ThermoclinePolicy) -> bool:
        prepared.append(policy)
        return True

    monkeypatch.setattr(ThermoclinePolicy, "prepare", prepare)

    cell.submit([1] * 8, max_tokens=2)
    assert not prepared
    cell.submit([2] * 8, max_tokens=2)  # There is no place for it yet.
    assert prepared == [cell.state.orders["device/worker"]]
