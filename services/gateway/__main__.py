"""``python -m services.gateway --model DIR [flags]``."""

from __future__ import annotations

import sys

from services.gateway.config import GatewayConfig
from shared import config, logs
from shared.arguments import ArgumentParser
from shared.guard import guarded
from shared.lifecycle import EXIT_REFUSED, run_service

DESCRIPTION = "Serve the OpenAI-compatible HTTP API of a cell."


def parser() -> ArgumentParser:
    """Return the parser of the gateway's command line."""
    return config.parser_of(GatewayConfig, "gateway", DESCRIPTION)


def main(argv: list[str] | None = None) -> int:
    """Run one gateway until it is told to stop; return the exit code."""
    settings = config.for_service(GatewayConfig, "gateway", argv, DESCRIPTION)
    if settings is None:
        return EXIT_REFUSED
    logs.configure("gateway", settings.id, level=settings.log_level)
    return run_service("gateway", "services.gateway.bootstrap:run", settings)


if __name__ == "__main__":
    sys.exit(guarded(main))
