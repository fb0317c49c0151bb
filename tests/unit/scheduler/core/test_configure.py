"""CellConfigured."""

from shared.messages.cell_events import CellConfig, CellConfigured


def test_an_unknown_policy_leaves_the_old_one_in_force(make_cell):
    """It is counted, and the other settings apply."""
    cell = make_cell()
    cell.feed(CellConfigured(config=CellConfig(policy="crystal-ball", max_running=3)))

    assert cell.state.policy == "lru"
    assert cell.state.counters["unknown_policies"] == 1
    assert cell.state.config.max_running == 3


def test_zeros_cannot_stall_the_cell(make_cell):
    """Settings of which none would mean that nothing ever runs are at least 1."""
    cell = make_cell()
    cell.feed(
        CellConfigured(
            config=CellConfig(max_batch_tokens=0, max_running=0, batches_ahead=0, lease_tokens=0, max_attempts=0)
        )
    )
    name = cell.submit([1, 2, 3])
    cell.drain()

    assert cell.gateways["gateway"].ended == {name: "finished"}
