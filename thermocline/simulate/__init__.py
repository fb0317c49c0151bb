"""The scheduler's real core under virtual time, with modelled workers, storage and links."""

import services.scheduler.policies  # noqa: F401  So that simulated cells can be told to use its policies and schedules.
