"""``python -m services.gateway --model DIR [flags]``."""

from __future__ import annotations

import os
import sys

from services.gateway.bootstrap import run
from services.gateway.config import GatewayConfig
from shared import logs
from shared.config import from_command_line
from shared.errors import ConfigError
from shared.lifecycle import EXIT_REFUSED, Lifecycle, run_process


def main(argv: list[str] | None = None) -> int:
    """Run one gateway until it is told to stop; returns the exit code."""
    try:
        config = from_command_line(
            GatewayConfig,
            "gateway",
            sys.argv[1:] if argv is None else argv,
            environ=os.environ,
            description="OpenAI-compatible HTTP front of a cell",
        )
    except ConfigError as error:
        print(f"gateway: {error.message}", file=sys.stderr)
        return EXIT_REFUSED
    logs.configure("gateway", config.id, level=config.log_level)

    async def serve(life: Lifecycle) -> None:
        await run(config, life)

    return run_process("gateway", serve)


if __name__ == "__main__":
    sys.exit(main())
