"""``thermocline scheduler``: run the scheduler of one cell."""

from __future__ import annotations

import os
import sys

from services.scheduler import bootstrap
from services.scheduler.config import SchedulerConfig
from shared import config, lifecycle, logs, metrics
from shared.errors import ConfigError


def main(argv: list[str] | None = None) -> int:
    """Returns the process's exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        settings = config.from_command_line(
            SchedulerConfig, "scheduler", arguments, environ=os.environ, description="Run the scheduler of one cell."
        )
    except ConfigError as error:
        print(f"thermocline scheduler: {error.message}", file=sys.stderr)
        return lifecycle.EXIT_REFUSED
    logs.configure("scheduler", settings.id, level=settings.log_level)
    metrics.serve(settings.metrics_port)
    return lifecycle.run_process("scheduler", lambda life: bootstrap.run(settings, life))


if __name__ == "__main__":
    sys.exit(main())
