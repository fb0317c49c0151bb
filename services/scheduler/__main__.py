"""``thermocline scheduler``: run the scheduler of one cell."""

from __future__ import annotations

import sys

from services.scheduler.config import SchedulerConfig
from shared import config, logs
from shared.arguments import ArgumentParser
from shared.guard import guarded
from shared.lifecycle import EXIT_REFUSED, run_service

DESCRIPTION = "Run the scheduler of one cell."


def parser() -> ArgumentParser:
    """Return the command line."""
    return config.parser_of(SchedulerConfig, "scheduler", DESCRIPTION)


def main(argv: list[str] | None = None) -> int:
    """Run the process; return its exit code."""
    settings = config.for_service(SchedulerConfig, "scheduler", argv, DESCRIPTION)
    if settings is None:
        return EXIT_REFUSED
    logs.configure("scheduler", settings.id, level=settings.log_level)
    return run_service("scheduler", "services.scheduler.bootstrap:run", settings)


if __name__ == "__main__":
    sys.exit(guarded(main))
