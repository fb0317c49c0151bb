"""Faults of a scheduler's settings that their types do not show.

They are looked for before the scheduler starts, and by ``thermocline up`` before any process starts.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.scheduler.config import KINDS, Kind, SchedulerConfig
from shared.errors import ConfigError
from shared.ids import is_valid_name

_DEFAULT = SchedulerConfig()


def check(config: SchedulerConfig) -> None:
    """Check the settings. Raises ConfigError with every fault. Changes nothing."""
    faults = list(_faults(config))
    if faults:
        raise ConfigError.of(faults)


def _faults(config: SchedulerConfig) -> Iterator[str]:
    if not is_valid_name(config.id):
        yield f"--id {config.id!r} may hold letters, digits, _ and - only"
    # The core is imported only for settings that need it to be judged: the defaults do not, and it takes a while.
    for kind in KINDS:
        if getattr(config, kind) != getattr(_DEFAULT, kind):
            yield from _faults_of_name(kind, getattr(config, kind))
    for name in ("eviction_expression", "hotness_expression"):
        if getattr(config, name) != getattr(_DEFAULT, name):
            yield from _expression_faults("--" + name.replace("_", "-"), getattr(config, name))
    if config.hidden_form != _DEFAULT.hidden_form:
        yield from _form_faults(config.hidden_form)


def _faults_of_name(kind: Kind, given: str) -> Iterator[str]:
    from services.scheduler.outside import name_of

    try:
        name_of(kind, given)
    except ConfigError as fault:
        yield f"--{kind}: {fault.message}"


def _expression_faults(flag: str, text: str) -> Iterator[str]:
    from services.scheduler.core.cache.heat import parse

    try:
        parse(text)
    except ConfigError as fault:
        yield f"{flag}: {fault.message}"


def _form_faults(text: str) -> Iterator[str]:
    from services.scheduler.core.hidden.hidden_form import parse_form

    try:
        parse_form(text)
    except ConfigError as fault:
        yield f"--hidden-form: {fault.message}"
