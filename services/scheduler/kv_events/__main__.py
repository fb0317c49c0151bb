"""``thermocline kv-events``: tell routers outside of the cell what it has cached."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence

from services.scheduler.kv_events.following import follow
from services.scheduler.kv_events.publisher import Publisher
from shared import logs
from shared.arguments import ArgumentParser, positive
from shared.broker import BrokerSettings, add_broker_flags, broker_of
from shared.bus.nats_bus import connect_with
from shared.errors import OperatorError, ThermoclineError
from shared.guard import guarded
from shared.progress_line import shown

EXIT_OK, EXIT_FAILED, EXIT_BAD_ARGUMENTS = 0, 1, 2

CONNECT_S = 5.0

_DESCRIPTION = """Publish what the cell has cached, in the messages of vLLM's KV events over ZeroMQ.

Messages hold the token ids of cached prompts in clear: listen only where readers may see them. Prompts of callers with
a salt, and of adapters, are left out."""


def parser() -> ArgumentParser:
    """Return the command line."""
    made = ArgumentParser(prog="thermocline kv-events", description=_DESCRIPTION)
    made.add_argument(
        "--bind", metavar="ADDRESS", default="tcp://127.0.0.1:5557", help="address that subscribers connect to"
    )
    made.add_argument(
        "--bind-replay",
        metavar="ADDRESS",
        default="tcp://127.0.0.1:5558",
        help='address that sends kept batches again; "" is none',
    )
    made.add_argument("--topic", metavar="TEXT", default="kv-events", help="topic of every message")
    made.add_argument(
        "--interval", type=positive, metavar="S", default=0.1, help="seconds between announcements of changes"
    )
    add_broker_flags(made)
    return made


async def _run(broker: BrokerSettings, address: str, replay_address: str, topic: str, interval_s: float) -> None:
    with shown("connecting to the broker"):
        bus = await connect_with(broker, "kv-events", timeout_s=CONNECT_S)
    try:
        async with Publisher(address, replay_address, topic) as publisher:
            again = f", and again at {publisher.replay_address}" if replay_address else ""
            print(f"KV events at {publisher.address}{again}", flush=True)
            following = asyncio.create_task(follow(bus, publisher, interval_s), name="follow")
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, following.cancel)
            await asyncio.wait({following})
            if not following.cancelled():
                following.result()
    finally:
        await bus.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0: stopped by a signal; 1: the cell cannot be reached; 2: bad arguments or address."""
    parsed = parser().parse_args(argv)
    logs.configure("kv-events", "kv-events")
    try:
        asyncio.run(_run(broker_of(parsed), parsed.bind, parsed.bind_replay, parsed.topic, parsed.interval))
    except ThermoclineError as error:
        print(f"thermocline kv-events: {error.message}", file=sys.stderr)
        return EXIT_BAD_ARGUMENTS if isinstance(error, OperatorError) else EXIT_FAILED
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(guarded(main))
