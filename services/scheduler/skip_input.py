"""``thermocline skip-input SEQ``: order every scheduler to leave out an input at which it hangs or dies.

The order is stored behind the input. A scheduler obeys it when it starts, unless an active scheduler has folded the
input before (:mod:`services.scheduler.quarantine`): what workers were told cannot be taken back.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from services.scheduler.quarantine import read_skips
from shared import subjects
from shared.arguments import ArgumentParser, not_negative, whole_number
from shared.broker import BrokerSettings, add_broker_flags, broker_of
from shared.bus.nats_bus import connect_with
from shared.bus.protocol import Bus
from shared.codec import decode, encode
from shared.errors import NotFound, OperatorError, ThermoclineError, Unavailable
from shared.guard import guarded
from shared.messages.cell_events import SkipInput
from shared.messages.status import CellStatus, GetStatus
from shared.progress_line import shown

EXIT_OK, EXIT_FAILED, EXIT_BAD_ARGUMENTS = 0, 1, 2

CONNECT_S = 5.0
WAIT_S = 30.0
POLL_S = 0.25


async def order_skip(bus: Bus, seq: int, reason: str, wait_s: float) -> str:
    """Order the skip, wait until the active scheduler is past input ``seq``, and return the decision's reason.

    Raises NotFound where the stream has no such input, OperatorError where it was folded already, and Unavailable when
    no scheduler came past it in ``wait_s``; the order stays.
    """
    decision = await _decided(bus, seq)
    if decision is not None:
        return decision
    info = await bus.stream_info(subjects.INPUTS_STREAM)
    if not info.first_seq <= seq <= info.last_seq:
        raise NotFound(f"there is no input {seq}: the stream has {info.first_seq} to {info.last_seq}")
    if await _last_folded(bus) >= seq:
        raise OperatorError(f"input {seq} was folded already, and workers obeyed what it led to")
    await bus.append(subjects.skip_orders_input(), encode(SkipInput(seq=seq, reason=reason)), message_id=f"skip-{seq}")
    try:
        async with asyncio.timeout(wait_s):
            while await _last_folded(bus) < seq:  # noqa: ASYNC110 - another process moves it.
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        text = "the order is stored, and the next scheduler that starts obeys it: restart those that hang"
        raise Unavailable(text) from error
    decision = await _decided(bus, seq)
    if decision is None:
        raise OperatorError(f"input {seq} was folded before a scheduler saw the order")
    return decision


async def _decided(bus: Bus, seq: int) -> str | None:
    decision = (await read_skips(bus, seq)).decided.get(seq)
    return None if decision is None else decision.reason


async def _last_folded(bus: Bus) -> int:
    """Return the last input that the active scheduler has folded; 0 where none answers."""
    try:
        return decode(await bus.call(subjects.rpc("scheduler", "status"), encode(GetStatus())), CellStatus).seq
    except Unavailable:
        return 0


async def _order_at(broker: BrokerSettings, seq: int, reason: str, wait_s: float) -> str:
    with shown("connecting to the broker") as bar:
        bus = await connect_with(broker, "skip-input", timeout_s=CONNECT_S)
        try:
            bar.say(f"waiting for a scheduler to pass input {seq}")
            return await order_skip(bus, seq, reason, wait_s)
        finally:
            await bus.close()


def parser() -> ArgumentParser:
    """Return the command line."""
    made = ArgumentParser(
        prog="thermocline skip-input",
        description="Have every scheduler leave out an input at which it hangs or dies.",
    )
    made.add_argument("seq", metavar="SEQ", type=whole_number(2**63 - 1), help="number of the input, as logged")
    made.add_argument("--reason", metavar="TEXT", default="an operator ordered it", help="reason to record")
    made.add_argument(
        "--wait-s",
        metavar="S",
        type=not_negative,
        default=WAIT_S,
        help="longest wait for a scheduler to pass it, in seconds",
    )
    add_broker_flags(made)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0: left out; 1: not yet, or the cell cannot be reached; 2: too late, or bad arguments."""
    parsed = parser().parse_args(argv)
    try:
        reason = asyncio.run(_order_at(broker_of(parsed), parsed.seq, parsed.reason, parsed.wait_s))
    except ThermoclineError as error:
        print(f"thermocline skip-input: {error.message}", file=sys.stderr)
        return EXIT_BAD_ARGUMENTS if isinstance(error, OperatorError | NotFound) else EXIT_FAILED
    print(f"input {parsed.seq} is left out: {reason}")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(guarded(main))
