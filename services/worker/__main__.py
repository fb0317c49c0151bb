"""``python -m services.worker --model DIR --nats URL``: one worker."""

from __future__ import annotations

import gc
import sys

import msgspec

from services.worker.config import WorkerConfig
from shared import config, ids, logs
from shared.lifecycle import EXIT_REFUSED, Lifecycle, quiet_collector, run_process


def main(argv: list[str] | None = None) -> int:
    """Run until stopped; returns the exit code (see ``shared.lifecycle``)."""
    settings = config.for_service(
        WorkerConfig, "worker", argv, "Runs a model with continuous batching and owns one device KV pool."
    )
    if settings is None:
        return EXIT_REFUSED
    named = settings if settings.id else msgspec.structs.replace(settings, id=ids.new_id("worker"))
    logs.configure("worker", named.id, level=named.log_level)

    async def body(life: Lifecycle) -> None:
        # Imported here so that --help and faulty settings do not wait for torch; and without the collector, which
        # would look again and again through what torch and transformers make, all of which lives for ever.
        gc.disable()
        from services.worker.bootstrap import serve

        quiet_collector()
        gc.enable()
        await serve(named, life)

    return run_process("worker", body)


if __name__ == "__main__":
    sys.exit(main())
