"""``--set``: every field of the cell's configuration and every option of a generator, typed and bounded."""

from __future__ import annotations

import msgspec
import pytest

from shared.errors import ConfigError
from shared.messages.cell_events import CellConfig
from thermocline.simulate.settings import changes_of, divide
from thermocline.simulate.workloads import WORKLOADS
from thermocline.simulate.workloads.documents import DocumentOptions


@pytest.mark.parametrize("name", CellConfig.__struct_fields__)
def test_every_field_of_the_cell_can_be_set(name: str) -> None:
    """Its default, written as text, is taken and gives the default again."""
    default = getattr(CellConfig(), name)
    config, _ = divide([f"{name}={default}"], None)

    assert config == CellConfig()


def test_values_are_converted_to_their_types() -> None:
    """Numbers, flags and words each become what the field holds, and a generator's options go to it."""
    config, options = divide(
        [
            "lease_tokens=256",
            "bubble_filling=off",
            "reserve_fraction=0.25",
            "schedule=lpm",
            "distance=max",
            "contexts=7",
        ],
        DocumentOptions,
        policy="lru",
    )

    assert (config.lease_tokens, config.bubble_filling, config.reserve_fraction) == (256, False, 0.25)
    assert (config.schedule, config.policy) == ("lpm", "lru")
    assert options == DocumentOptions(distance="max", contexts=7)


def test_changes_are_only_what_was_named() -> None:
    """What is not named stays out, so that it can be laid over any configuration."""
    assert changes_of(["lease_tokens=8", "fair_share=no"]) == {"lease_tokens": 8, "fair_share": False}
    assert changes_of([], policy="lru") == {"policy": "lru"}


@pytest.mark.parametrize(
    ("assignment", "complaint"),
    [
        ("lease_tokens", "must be key=value"),
        ("leese_tokens=3", "unknown setting; of the cell there are admission"),
        ("lease_tokens=many", "lease_tokens=many: Expected `int`"),
        ("lease_tokens=0", "lease_tokens=0: Expected `int` >= 1"),
        ("reserve_fraction=1.5", "Expected `float` < 1"),
        ("schedule=random", "schedule: 'random' is none of"),
        ("bubble_filling=perhaps", "Expected `bool`"),
        ("policy=clairvoyant", "policy: 'clairvoyant' is none of"),
        ("eviction_expression=frequency **", "eviction_expression"),
        ("promotion=on", "--set promotion: 'on' is none of off, hotness, recency, frequency, depth"),
        ("hidden_form=half", "--set hidden_form: 'half' is no layer mix; write off, auto, or numbers of layers"),
    ],
)
def test_what_makes_no_sense_is_refused(assignment: str, complaint: str) -> None:
    """Each error names the setting and what would have been right."""
    with pytest.raises(ConfigError) as raised:
        divide([assignment], None)

    assert complaint in raised.value.message


def test_words_of_a_generator_are_named() -> None:
    """Where an option has fixed ones."""
    with pytest.raises(ConfigError, match="--set distance: 'far' is none of min, shuffled, max"):
        divide(["distance=far"], DocumentOptions)


def test_every_fault_is_named_at_once() -> None:
    """Two wrong settings, one message."""
    with pytest.raises(ConfigError, match=r"lease_tokens=x.*speed: unknown setting.*of the workload"):
        divide(["lease_tokens=x", "speed=2"], DocumentOptions)


@pytest.mark.parametrize(
    ("assignments", "policy", "complaint"),
    [
        (["lease_tokens=1", "lease_tokens=64"], None, "lease_tokens is given twice: --set lease_tokens=1 and --set"),
        (["lease_tokens=8", "lease_tokens=8"], None, "lease_tokens is given twice"),
        (["policy=fifo"], "lru", "policy is given twice: --set policy=fifo and --policy lru"),
        (
            ["state_form=off", "hidden_form=on"],
            None,
            "hidden_form is given twice: --set state_form=off and --set hidden_form=on",
        ),
        (["contexts=1", "contexts=2"], None, "contexts is given twice"),
        (["lease_tokens=1", "lease_tokens=many"], None, "lease_tokens=many: Expected `int`"),
    ],
)
def test_a_setting_that_is_given_twice_is_refused(assignments: list[str], policy: str | None, complaint: str) -> None:
    """One of the two values would be dropped without a word."""
    with pytest.raises(ConfigError) as raised:
        divide(assignments, DocumentOptions, policy=policy)

    assert complaint in raised.value.message


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_no_option_of_a_generator_hides_a_setting_of_the_cell(name: str) -> None:
    """A name means one thing only."""
    options: type[msgspec.Struct] = WORKLOADS[name][0]

    assert not set(options.__struct_fields__) & set(CellConfig.__struct_fields__)
