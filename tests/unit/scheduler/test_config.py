"""Settings of the scheduler."""

from __future__ import annotations

from typing import Any

import pytest

from services.scheduler.checks import check
from services.scheduler.config import SchedulerConfig
from shared.config import load
from shared.errors import ConfigError
from shared.messages.cell_events import CellConfig
from shared.messages.pools import HIDDEN

BY_DEVICE: dict[str, Any] = {"max_running": 0, "max_batch_tokens": 0}
"""What the flags leave to each device. The core's own defaults are those of recordings that do not say."""


def test_defaults_are_those_of_the_cell_config() -> None:
    """A setting of the core is declared once; the flags only repeat its name."""
    assert SchedulerConfig().cell_config() == CellConfig(**BY_DEVICE)
    assert set(CellConfig.__struct_fields__) <= set(SchedulerConfig.__struct_fields__)


def test_settings_reach_the_cell_config() -> None:
    """Flags are text and end up typed."""
    flags = {"max_running": "7", "host_tier": "off", "reserve_fraction": "0.25", "nats": "nats://a:1,nats://b:2"}

    config = load(SchedulerConfig, "scheduler", flags=flags)

    assert config.nats == ("nats://a:1", "nats://b:2")
    assert config.cell_config() == CellConfig(max_running=7, max_batch_tokens=0, host_tier=False, reserve_fraction=0.25)


def test_faults_of_values_are_reported_together() -> None:
    """A process refuses to start with all that is wrong."""
    with pytest.raises(ConfigError) as caught:
        check(
            SchedulerConfig(
                id="not a name",
                policy="nonsense",
                eviction_expression="frequency - clock",
                hotness_expression="heat",
            )
        )

    assert "--id" in caught.value.message
    assert "nonsense" in caught.value.message
    assert "--eviction-expression: expression 'frequency - clock', column 11" in caught.value.message
    assert "--hotness-expression: expression 'heat', column 1" in caught.value.message


def test_every_expression_of_the_papers_form_is_accepted() -> None:
    """Three of clock, frequency and length with two operators between them."""
    check(SchedulerConfig(eviction_expression="clock + freq / length", hotness_expression="frequency * clock"))


@pytest.mark.parametrize("flags", [{"max_running": "-1"}, {"reserve_fraction": "1.5"}, {"snapshot_every_inputs": "-1"}])
def test_values_out_of_range_are_refused(flags: dict[str, str]) -> None:
    """A cell that could not move is not started."""
    with pytest.raises(ConfigError):
        load(SchedulerConfig, "scheduler", flags=flags)


def test_a_bad_form_of_state_is_refused_at_the_start() -> None:
    """With what may stand there; good ones and ablations reach the core."""
    with pytest.raises(ConfigError, match="--hidden-form: 'most'"):
        check(SchedulerConfig(hidden_form="most"))

    config = load(SchedulerConfig, "scheduler", flags={"hidden_form": "8/24/0", "restoring": "hidden"})
    check(config)
    assert config.cell_config() == CellConfig(hidden_form="8/24/0", restoring=HIDDEN, **BY_DEVICE)
    with pytest.raises(ConfigError):
        load(SchedulerConfig, "scheduler", flags={"restoring": "somehow"})
