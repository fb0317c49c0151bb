"""What is wrong with a scheduler's settings that their types do not show. Run before it starts, and by
``thermocline up`` before anything is.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.scheduler.config import SchedulerConfig
from shared.errors import ConfigError
from shared.ids import is_valid_name

_DEFAULT = SchedulerConfig()


def check(config: SchedulerConfig) -> None:
    """Check the settings. Raises ConfigError with every fault. Reads and changes nothing."""
    faults = list(_faults(config))
    if faults:
        raise ConfigError.of(faults)


def _faults(config: SchedulerConfig) -> Iterator[str]:
    if not is_valid_name(config.id):
        yield f"--id {config.id!r} may hold letters, digits, _ and - only"
    # The core is imported only for settings that need it to be judged: the defaults do not, and it takes a while.
    if config.policy != _DEFAULT.policy:
        yield from _policy_faults(config.policy)
    for name in ("eviction_expression", "hotness_expression"):
        if getattr(config, name) != getattr(_DEFAULT, name):
            yield from _expression_faults("--" + name.replace("_", "-"), getattr(config, name))
    if config.hidden_form != _DEFAULT.hidden_form:
        yield from _form_faults(config.hidden_form)


def _policy_faults(policy: str) -> Iterator[str]:
    import services.scheduler.policies  # noqa: F401  Its policies can be named, too.
    from services.scheduler.core.cache.eviction import POLICIES
    from shared.config import fault_of_choice

    if policy not in POLICIES:
        yield f"--policy: {fault_of_choice(policy, sorted(POLICIES))}"


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
