"""``python -m services.storage --nats URL --id NAME ...``; ``--help`` prints every setting."""

from __future__ import annotations

import sys

from services.storage.config import StorageConfig
from shared import config, logs
from shared.arguments import ArgumentParser
from shared.guard import guarded
from shared.lifecycle import EXIT_REFUSED, run_service

DESCRIPTION = "Own the host pool of this node, and copy pages between tiers."


def parser() -> ArgumentParser:
    """Return the command line's parser."""
    return config.parser_of(StorageConfig, "storage", DESCRIPTION)


def main(argv: list[str] | None = None) -> int:
    """Run one storage until it is stopped. Returns the exit code (see ``shared.lifecycle.run_process``)."""
    settings = config.for_service(StorageConfig, "storage", argv, DESCRIPTION)
    if settings is None:
        return EXIT_REFUSED
    logs.configure("storage", settings.id, level=settings.log_level)
    return run_service("storage", "services.storage.bootstrap:serve", settings)


if __name__ == "__main__":
    sys.exit(guarded(main))
