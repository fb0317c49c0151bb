"""Which tokens probe heads find, and when their vote serves all heads."""

from __future__ import annotations

import pytest
import torch

from services.worker.importance import identification
from services.worker.importance.identification import (
    ProbeHeads,
    ProbeUnit,
    Rows,
    choose_by_head,
    head_units,
    heads_read,
    identify,
    measure_importance,
)
from services.worker.importance.metrics import Pooled, metric_named
from services.worker.importance.selection import Budget
from shared.errors import ConfigError


def test_a_probe_head_is_a_kv_head_with_its_group() -> None:
    """With 12 query and 4 KV heads, three probe heads are nine query heads and three heads of keys."""
    units = ProbeHeads(3).units(12, 4)

    assert units == (ProbeUnit(0, 3, 0), ProbeUnit(3, 6, 1), ProbeUnit(6, 9, 2))
    assert heads_read(units) == (0, 1, 2)


def test_without_groups_every_head_votes_for_itself() -> None:
    """In multi-head attention, the models of the paper."""
    assert head_units(2, 2) == (ProbeUnit(0, 1, 0), ProbeUnit(1, 2, 1))


def test_there_is_a_probe_head() -> None:
    """None cannot vote, and a model with fewer heads than asked for uses all that it has."""
    with pytest.raises(ConfigError, match="probe head"):
        ProbeHeads(0)
    assert len(ProbeHeads(3).units(4, 2)) == 2


@pytest.mark.parametrize("metric", ["h2o", "last", "max"])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (9, None), (None, 5.0)])
def test_importance_is_the_attention_that_is_paid(
    window: int | None, softcap: float | None, metric: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores equal those of causal attention written out, the request's own tokens included in the softmax, whatever
    part of the weights is in memory at a time.
    """
    generator = torch.Generator().manual_seed(0)
    prefix, new = 12, 31
    monkeypatch.setattr(identification, "MOST_WEIGHTS", 4 * 4 * (prefix + new))  # Four rows of four heads.
    query = torch.randn(4, new, 8, generator=generator)
    keys = torch.randn(2, prefix + new, 8, generator=generator)
    rows = Rows(query, prefix, 0.5, window, softcap)

    found = measure_importance(rows, keys, torch.arange(prefix + new), prefix, head_units(4, 2), metric_named(metric))

    scores = torch.einsum("htd,hsd->hts", query, keys.repeat_interleave(2, 0)) * 0.5
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    at, position = torch.arange(prefix, prefix + new)[:, None], torch.arange(prefix + new)
    hidden = (position > at) | (position <= at - (window or 10_000))
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)[:, :, :prefix]
    by_unit = weights.view(2, 2, new, prefix)
    expected = {"h2o": by_unit.sum((1, 2)), "last": by_unit[:, :, -1].sum(1), "max": by_unit.amax((1, 2))}
    torch.testing.assert_close(found, expected[metric], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("metric", "largest"), [("h2o", 4 * 4), ("last", 4), ("last_pooled", 4)])
def test_weights_in_memory_are_bounded(metric: str, largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long question some rows at a time; of metrics of the last token, its row alone."""
    monkeypatch.setattr(identification, "MOST_WEIGHTS", 4 * 4 * 62)
    seen: list[int] = []

    class Spy(Pooled):
        def fold(self, importance: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            seen.append(weights[..., 0].numel())
            return super().fold(importance, weights)

    plain = metric_named(metric)
    rows = Rows(torch.randn(4, 50, 8), 12, 0.5, None, None)
    measure_importance(rows, torch.randn(2, 62, 8), torch.arange(62), 12, head_units(4, 2), Spy(plain))

    assert max(seen) == largest
    assert sum(seen) == (4 * 50 if metric == "h2o" else 4)


def test_heads_that_agree_share_the_voted_set() -> None:
    """Above the threshold, one set of positions in the prefix serves all."""
    importance = torch.zeros(3, 20)
    importance[:, [3, 7, 11, 15, 19]] = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0])

    found = identify(importance, 100, Budget(0.25).over(100, 120))

    assert (found.accepted, found.similarity) == (True, 1.0)
    assert found.tokens.tolist() == [103, 107, 111, 115, 119]


def test_heads_that_disagree_choose_for_themselves() -> None:
    """Below the threshold every head keeps its own set, sorted."""
    importance = torch.eye(3).repeat_interleave(2, dim=1).repeat(1, 4)
    choice = Budget(0.25).over(0, 24)

    found = identify(importance, 0, choice)

    assert (found.accepted, found.similarity) == (False, 0.0)
    assert choose_by_head(importance, 0, choice).tolist() == [
        [0, 1, 6, 7, 12, 13],
        [2, 3, 8, 9, 14, 15],
        [4, 5, 10, 11, 16, 17],
    ]


def test_kept_tokens_do_not_make_heads_look_alike() -> None:
    """Heads that share only what is kept regardless have no similarity, and the threshold leaves it out too."""
    importance = torch.zeros(2, 20)
    importance[0, 4:6], importance[1, 8:10] = 1.0, 1.0

    found = identify(importance, 0, Budget(0.5, recent_tokens=8).over(0, 20))

    assert (found.similarity, found.accepted) == (0.0, False)
    assert found.threshold == pytest.approx((1 / 11) ** 0.6)
    assert found.tokens.tolist()[-8:] == list(range(12, 20))


def test_all_of_the_prefix_is_accepted() -> None:
    """At ratio 1 the threshold is 1 and nothing can exceed it, but there is nothing to vote about."""
    assert identify(torch.rand(3, 9), 0, Budget(1.0).over(0, 9)).accepted


def test_alpha_decides_how_much_agreement_is_enough() -> None:
    """The same sets are refused at a low alpha and accepted at a high one."""
    importance = torch.zeros(3, 40)
    for head, first in enumerate((0, 3, 6)):
        importance[head, first : first + 10] = 1.0
    choice = Budget(0.25).over(0, 40)

    assert not identify(importance, 0, choice, alpha=0.3).accepted
    assert identify(importance, 0, choice, alpha=0.9).accepted
