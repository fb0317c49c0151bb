"""``python -m services.storage --nats URL --id NAME ...``; ``--help`` prints every setting."""

from __future__ import annotations

import os
import sys

from services.storage.bootstrap import serve
from services.storage.config import StorageConfig
from shared import logs
from shared.config import from_command_line
from shared.errors import ConfigError
from shared.lifecycle import EXIT_REFUSED, run_process


def main(argv: list[str] | None = None) -> int:
    """Run one storage until it is stopped. Returns the exit code (see ``shared.lifecycle.run_process``)."""
    try:
        config = from_command_line(
            StorageConfig,
            "storage",
            sys.argv[1:] if argv is None else argv,
            environ=os.environ,
            description="Owns this node's host pool and copies pages between tiers.",
        )
    except ConfigError as error:
        print(f"storage: {error.message}", file=sys.stderr)
        return EXIT_REFUSED
    logs.configure("storage", config.id, level=config.log_level)
    return run_process("storage", lambda life: serve(config, life))


if __name__ == "__main__":
    sys.exit(main())
