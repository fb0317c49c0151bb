"""``python -m services.gateway.router --cells NAME=URL,... [flags]``."""

from __future__ import annotations

import sys

from services.gateway.router.config import RouterConfig
from shared import config, logs
from shared.arguments import ArgumentParser
from shared.guard import guarded
from shared.lifecycle import EXIT_REFUSED, run_service

DESCRIPTION = "Serve HTTP in front of several cells, and send each request to one of them."


def parser() -> ArgumentParser:
    """Return the parser of the router's command line."""
    return config.parser_of(RouterConfig, "router", DESCRIPTION)


def main(argv: list[str] | None = None) -> int:
    """Run one router until it is told to stop; return the exit code."""
    settings = config.for_service(RouterConfig, "router", argv, DESCRIPTION)
    if settings is None:
        return EXIT_REFUSED
    logs.configure("router", settings.id, level=settings.log_level)
    return run_service("router", "services.gateway.router.bootstrap:run", settings)


if __name__ == "__main__":
    sys.exit(guarded(main))
