"""Metrics of importance."""

from __future__ import annotations

import pytest
import torch

from services.worker.importance.metrics import METRICS, metric_named
from shared import importance

WEIGHTS = torch.tensor([[[[0.1, 0.6, 0.0], [0.2, 0.1, 0.3]], [[0.0, 0.5, 0.1], [0.4, 0.0, 0.0]]]])
"""One unit of two query heads, two rows, three tokens."""


def measured(name: str, weights: torch.Tensor, blocks: int = 1) -> torch.Tensor:
    metric = metric_named(name)
    importance = weights.new_zeros(weights.shape[0], weights.shape[-1])
    for block in weights.chunk(blocks, dim=2):
        importance = metric.fold(importance, block)
    return metric.finish(importance)


def test_h2o_sums_columns_over_the_group() -> None:
    """Every query head and row of the group counts."""
    torch.testing.assert_close(measured("h2o", WEIGHTS), torch.tensor([[0.7, 1.2, 0.4]]))


def test_last_looks_at_the_last_row_alone() -> None:
    """Earlier rows do not count."""
    torch.testing.assert_close(measured("last", WEIGHTS), torch.tensor([[0.6, 0.1, 0.3]]))


def test_max_is_the_surest_row() -> None:
    """One row that is sure is enough."""
    torch.testing.assert_close(measured("max", WEIGHTS), torch.tensor([[0.4, 0.6, 0.3]]))


def test_pooling_averages_over_the_neighbours_that_exist() -> None:
    """A token at the end of the prefix has fewer neighbours and loses nothing by it."""
    weights = torch.zeros(1, 1, 1, 20)
    weights[..., 0] = 1.0

    pooled = measured("last_pooled", weights)[0]

    assert pooled[0] == pytest.approx(1 / 5)  # Itself and four to its right.
    assert pooled[4] == pytest.approx(1 / 9)
    assert pooled[5] == 0


@pytest.mark.parametrize("name", METRICS)
def test_blocks_of_rows_change_nothing(name: str) -> None:
    """A metric over rows in blocks is the metric over all of them."""
    weights = torch.rand(2, 3, 7, 30, generator=torch.Generator().manual_seed(0))

    torch.testing.assert_close(measured(name, weights, blocks=3), measured(name, weights))


def test_the_cell_knows_the_names() -> None:
    """What a gateway lets through, a worker implements."""
    assert tuple(METRICS) == importance.METRICS
    assert importance.DEFAULT_METRIC in METRICS
