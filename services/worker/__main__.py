"""``python -m services.worker --model DIR --nats URL``: one worker."""

from __future__ import annotations

import os
import sys

import msgspec

from services.worker.config import WorkerConfig
from shared import ids, logs
from shared.config import from_command_line
from shared.errors import ConfigError
from shared.lifecycle import EXIT_REFUSED, Lifecycle, run_process


def main(argv: list[str] | None = None) -> int:
    """Run until stopped; returns the exit code (see ``shared.lifecycle``)."""
    try:
        config = from_command_line(
            WorkerConfig,
            "worker",
            sys.argv[1:] if argv is None else argv,
            environ=os.environ,
            description="Runs a model with continuous batching and owns one device KV pool.",
        )
    except ConfigError as error:
        print(f"thermocline worker: {error.message}", file=sys.stderr)
        return EXIT_REFUSED
    if not config.id:
        config = msgspec.structs.replace(config, id=ids.new_id("worker"))
    logs.configure("worker", config.id, level=config.log_level)

    async def body(life: Lifecycle) -> None:
        # Imported here so that --help and faulty settings do not wait for torch.
        from services.worker.bootstrap import serve

        await serve(config, life)

    return run_process("worker", body)


if __name__ == "__main__":
    sys.exit(main())
