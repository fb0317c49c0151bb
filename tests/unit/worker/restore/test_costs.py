"""Costs of one token follow from figures at a few lengths."""

from __future__ import annotations

import msgspec
import pytest

from services.scheduler.core.hidden.partition import LayerCosts
from services.worker.restore.costs import costs_of
from services.worker.restore.figures import RestorationFigure, RestorationProfile
from shared.errors import ConfigError
from shared.messages.pools import KvGeometry

GEOMETRY = KvGeometry(layers=4, kv_heads=2, head_dim=16, page_size=16, dtype="float32")
COSTS = LayerCosts(layers=4, kv_bytes=256, hidden_bytes=256, hidden_us=2.0, token_us=10.0, pair_us=0.01)


def figure(tokens: int, costs: LayerCosts = COSTS) -> RestorationFigure:
    """What would be measured of a model that costs just this: its last layer ends with K and V."""
    whole_us = (costs.layers - 1) * costs.recompute_us(0, tokens) + tokens * costs.hidden_us
    return RestorationFigure(
        tokens=tokens,
        io_hidden_s=1e-7,
        io_kv_s=256e-9,
        compute_hidden_s=costs.hidden_us * 1e-6,
        compute_token_s=whole_us * 1e-6 / (tokens * costs.layers),
    )


def profile(*figures: RestorationFigure) -> RestorationProfile:
    return RestorationProfile(geometry=GEOMETRY, hidden=64, device="cpu", figures=figures)


@pytest.mark.parametrize("lengths", [(256, 1024), (256, 1024, 4096), (100, 200, 300, 400)])
def test_what_a_planner_calculates_is_what_was_measured(lengths: tuple[int, ...]) -> None:
    """Costs that made the figures are found again, to within rounding."""
    costs = costs_of(profile(*map(figure, lengths)))

    assert costs.hidden == 64
    assert costs.hidden_us == pytest.approx(2.0)
    assert costs.token_us == pytest.approx(10.0)
    assert costs.pair_us == pytest.approx(0.01)
    assert costs.link_bytes_per_us == pytest.approx(1000.0)


def test_one_length_says_nothing_of_attention() -> None:
    """All of its time is the token's own."""
    costs = costs_of(profile(figure(256)))

    assert costs.token_us == pytest.approx(10.0 + 0.01 * 128)
    assert costs.pair_us == 0.0


def test_no_cost_is_negative() -> None:
    """Figures that fall with the length are noise about a mean; figures that leave nothing for the token are all
    attention.
    """
    falling = costs_of(profile(figure(256, costs_with(token_us=12.0)), figure(1024, costs_with(pair_us=0.0))))
    steep = costs_of(profile(figure(256, costs_with(token_us=0.0)), figure(1024, costs_with(pair_us=0.1))))

    assert falling.pair_us == 0.0
    assert falling.token_us == pytest.approx((12.0 + 1.28 + 10.0) / 2)
    assert steep.token_us == 0.0
    assert 0.01 < steep.pair_us < 0.12


def test_disturbed_figures_do_not_make_computing_cheaper_than_nothing() -> None:
    """K and V alone cannot take longer than the layers that they are a part of; where that was measured, the mean is
    what a layer takes.
    """
    disturbed = [msgspec.structs.replace(figure(tokens), compute_hidden_s=1e-3) for tokens in (256, 1024)]
    costs = costs_of(profile(*disturbed))

    assert costs.token_us + costs.pair_us * 256 / 2 == pytest.approx(disturbed[0].compute_token_s * 1e6)
    assert costs.token_us + costs.pair_us * 1024 / 2 == pytest.approx(disturbed[1].compute_token_s * 1e6)


def costs_with(**changes: float) -> LayerCosts:
    fields = {"token_us": 10.0, "pair_us": 0.01, **changes}
    return LayerCosts(layers=4, kv_bytes=256, hidden_bytes=256, hidden_us=2.0, **fields)


def test_a_model_without_hidden_states_has_costs_of_the_rest() -> None:
    """KV and recomputation can still be planned."""
    bare = msgspec.structs.replace(figure(256), io_hidden_s=0.0, compute_hidden_s=0.0)
    costs = costs_of(msgspec.structs.replace(profile(bare), hidden=0))

    assert (costs.hidden, costs.hidden_us) == (0, 0.0)
    assert costs.token_us > 0


@pytest.mark.parametrize("figures", [(), (RestorationFigure(
    tokens=64, io_hidden_s=0.0, io_kv_s=0.0, compute_hidden_s=0.0, compute_token_s=1.0),)])  # fmt: skip
def test_a_profile_without_figures_is_refused(figures: tuple[RestorationFigure, ...]) -> None:
    """Rather than dividing by nothing."""
    with pytest.raises(ConfigError):
        costs_of(profile(*figures))
