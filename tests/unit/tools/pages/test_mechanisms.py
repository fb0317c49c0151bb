"""The table of mechanisms: files, settings and defaults are those of the code."""

from dataclasses import replace

import pytest

from services.scheduler.config import SchedulerConfig
from services.storage.config import StorageConfig
from services.worker.config import WorkerConfig
from tools.pages.mechanisms import (
    ABSENT,
    ALWAYS,
    HOTPREFIX,
    OFF,
    ON,
    STRATA,
    Mechanism,
    by_default,
    default_of,
    defines,
    shown_setting,
)

EVERY = (*HOTPREFIX, *STRATA)
BUILT = [each for each in EVERY if each.where]
SWITCHED = [each for each in EVERY if each.setting]
PROMOTION = next(each for each in HOTPREFIX if each.setting == "scheduler.promotion")


@pytest.mark.parametrize("where", [each.where for each in BUILT])
def test_what_is_named_is_in_the_file(where: str) -> None:
    """A class, function or constant that was moved or renamed fails here."""
    assert defines(where)


@pytest.mark.parametrize("where", ["services/no_such_file.py:promote", "tools/pages/mechanisms.py:no_such_name"])
def test_a_file_or_a_name_that_is_gone_is_found_out(where: str) -> None:
    """Neither is taken for granted."""
    assert not defines(where)


@pytest.mark.parametrize("setting", sorted({each.setting for each in SWITCHED}))
def test_the_default_is_that_of_a_cell_whose_settings_nobody_changed(setting: str) -> None:
    """The table reads the same defaults that a process starts with."""
    command, _, name = setting.partition(".")
    started = {"scheduler": SchedulerConfig(), "worker": WorkerConfig(model="any"), "storage": StorageConfig()}

    assert default_of(setting) == getattr(started[command], name)


@pytest.mark.parametrize("setting", ["scheduler.no_such_setting", "no_such_command.promotion"])
def test_a_setting_that_is_gone_is_an_error(setting: str) -> None:
    """The page is not made with it."""
    with pytest.raises(KeyError):
        by_default(replace(PROMOTION, setting=setting))


def test_another_default_makes_another_table() -> None:
    """On and off follow from the default's value."""
    assert by_default(PROMOTION, lambda _: "off") == OFF
    assert by_default(PROMOTION, lambda _: "hotness") == ON


@pytest.mark.parametrize("mechanism", SWITCHED, ids=lambda each: each.what)
def test_every_switch_shows_its_setting(mechanism: Mechanism) -> None:
    """By its name and its default."""
    name = mechanism.setting.partition(".")[2]

    assert shown_setting(mechanism).startswith(f"`{name} = ")
    assert by_default(mechanism) in (ON, OFF)


def test_what_has_no_switch_is_always_on_and_what_is_not_built_says_so() -> None:
    """Neither needs a setting."""
    lasting = Mechanism(section="1", what="a", differs="b", where="services/worker/bubble.py:fill")

    assert (by_default(lasting), shown_setting(lasting)) == (ALWAYS, "-")
    assert (by_default(replace(lasting, where="")), shown_setting(lasting)) == (ABSENT, "-")


@pytest.mark.parametrize("mechanism", EVERY, ids=lambda each: each.what)
def test_every_row_names_a_section_and_says_how_it_differs(mechanism: Mechanism) -> None:
    """A row without either says nothing of the paper."""
    assert mechanism.section[0].isdigit()
    assert mechanism.differs
