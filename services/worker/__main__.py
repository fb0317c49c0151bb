"""``python -m services.worker --model DIR --nats URL``: one worker."""

from __future__ import annotations

import sys

import msgspec

from services.worker.checks import check
from services.worker.config import WorkerConfig
from services.worker.device_choice import DeviceChoice
from shared import config, ids, logs, progress
from shared.arguments import ArgumentParser
from shared.guard import guarded
from shared.lifecycle import EXIT_REFUSED, Lifecycle, importing, run_process

DESCRIPTION = "Run the model with continuous batching, and own one device KV pool."


def parser() -> ArgumentParser:
    """Return the command line's parser."""
    return config.parser_of(WorkerConfig, "worker", DESCRIPTION)


def main(argv: list[str] | None = None) -> int:
    """Run a worker until it is stopped; return the exit code (see ``shared.lifecycle``)."""
    settings = config.for_service(WorkerConfig, "worker", argv, DESCRIPTION)
    if settings is None:
        return EXIT_REFUSED
    named = settings if settings.id else msgspec.structs.replace(settings, id=ids.new_id("worker"))
    logs.configure("worker", named.id, level=named.log_level)

    choice: DeviceChoice | None = None

    def prepare() -> None:
        nonlocal choice
        check(named)
        # Imported here so that --help and faulty settings do not wait for torch.
        with importing(), progress.phase("importing PyTorch"):
            from services.worker.torch_gpus import choose

            # Before the imports that serve a model, which take seconds, so that a missing device is reported at once.
            choice = choose(named)
            import services.worker.bootstrap  # noqa: F401

    async def body(life: Lifecycle) -> None:
        from services.worker.bootstrap import serve

        await serve(named, life, choice)

    return run_process("worker", body, prepare)


if __name__ == "__main__":
    sys.exit(guarded(main))
