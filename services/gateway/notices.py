"""The scheduler's notices to this gateway: numbered, each handled once and in order."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Literal

from services.gateway import metrics
from services.gateway.dispatcher import Dispatcher
from services.gateway.failures import error_of_notice
from shared import logs, subjects
from shared.bus.protocol import Bus, Delivery
from shared.codec import decode_published
from shared.errors import CodecError, InvalidRequest, ThermoclineError, Unavailable
from shared.membership import SUPERSEDED_MOST
from shared.messages.gateway_notices import GatewayNotice, PromptWanted, RequestFailed, ResumeNeeded

READ_S = 10.0

_log = logs.get_logger("gateway.notices")


@dataclass(slots=True)
class NoticeCursor:
    """The last notice that this gateway handled. Pure.

    A scheduler that starts again numbers from 1 again, in a later term. So the first notice of a term may follow any.
    """

    last: int = 0
    term: tuple[int, int] = (0, 0)  # The epoch in which the last one was folded, and the input that caused it.

    def place(self, notice: GatewayNotice) -> Literal["next", "repeated", "gap"]:
        """Return where the notice lies, without a change of the state.

        After a gap, the stream has the notices before this one.
        """
        term = (notice.epoch, notice.cause)
        if term < self.term or (term == self.term and notice.number <= self.last):
            return "repeated"
        if notice.number == 1 and not self.last:
            return "next"
        is_next = notice.number == self.last + 1 and notice.epoch == self.term[0]
        return "next" if is_next else "gap"

    def take(self, notice: GatewayNotice) -> None:
        """Advance to this notice, which was handled."""
        self.last, self.term = notice.number, (notice.epoch, notice.cause)


class NoticeHandler:
    """Handler of ``tc.out.gateway.<id>``; gaps are filled from the outputs stream."""

    def __init__(self, bus: Bus, gateway_id: str, dispatcher: Dispatcher) -> None:
        """Begin with no notice handled; the caller subscribes :meth:`on_notice`."""
        self.cursor = NoticeCursor()
        self._bus = bus
        self._subject = subjects.gateway_output(gateway_id)
        self._dispatcher = dispatcher
        self._from_seq = 1
        self._older = 0
        self._reading = asyncio.Lock()

    def see(self, epoch: int, seq: int) -> None:
        """Take the epoch and position of a scheduler's status.

        Where those go on that are older than the last notice, the streams and all schedulers were lost together, and
        notices are numbered from the beginning again.
        """
        self._older = self._older + 1 if (epoch, seq) < self.cursor.term else 0
        if self._older >= SUPERSEDED_MOST:
            _log.error("notices_begin_again", epoch=epoch, last_epoch=self.cursor.term[0])
            self.cursor, self._from_seq, self._older = NoticeCursor(), 1, 0

    async def on_notice(self, delivery: Delivery) -> None:
        """Handle a notice, after those that a gap skipped if the stream still has them."""
        notice = self._decode(delivery.data)
        if notice is None:
            return
        if self.cursor.place(notice) == "gap" and not await self.catch_up():
            # The stream cannot be read now, but has this notice too: the next read handles all.
            return
        if self.cursor.place(notice) == "gap":
            # Notices that the stream no longer has cannot arrive; idle timeouts end what depended on them.
            _log.error("notices_lost", first=self.cursor.last + 1, last=notice.number - 1)
        self._act(notice)

    async def catch_up(self) -> bool:
        """Handle notices published while none were received; return False when the stream could not be read.

        A notice that arrives meanwhile and is the next one is handled at once; reading then skips it.
        """
        async with self._reading:
            try:
                async with asyncio.timeout(READ_S):
                    if (await self._bus.stream_info(subjects.OUTPUTS_STREAM)).last_seq < self._from_seq - 1:
                        self._from_seq = 1  # The broker lost its store, and this is another stream.
                    messages = self._bus.follow(
                        subjects.OUTPUTS_STREAM, from_seq=self._from_seq, subject=self._subject, live=False
                    )
                    async for message in messages:
                        notice = self._decode(message.data)
                        if notice is not None:
                            self._act(notice)
                        self._from_seq = message.seq + 1
            except (Unavailable, TimeoutError) as error:
                _log.warning("notices_not_read", reason=str(error) or f"not within {READ_S:.0f} s")
                return False
            except ThermoclineError as error:
                _log.error("notices_not_read", reason=str(error))
        return True

    def _decode(self, data: bytes) -> GatewayNotice | None:
        try:
            message = decode_published(data)
        except CodecError as error:
            _log.error("notice_unreadable", reason=error.message)
            return None
        return message if isinstance(message, GatewayNotice) else None

    def _act(self, notice: GatewayNotice) -> None:
        if self.cursor.place(notice) == "repeated":
            return
        self.cursor.take(notice)
        word = notice.word
        metrics.NOTICES.labels(type(word).__name__).inc()
        choice = self._dispatcher.pending.get(word.request_id)
        if isinstance(word, PromptWanted):
            if choice is not None:  # Else the client is gone, and the scheduler has no such request.
                self._dispatcher.send_whole(choice)
        elif isinstance(word, RequestFailed):
            if choice is not None and choice.is_abridged and word.code == InvalidRequest.code:
                # A scheduler of an older release took over that accepts no bases, or no compact form.
                self._dispatcher.send_whole(choice)
            elif choice is not None:
                choice.fail(error_of_notice(word), is_settled=True)
        elif isinstance(word, ResumeNeeded):
            if choice is None or choice.is_over:
                # The client is gone or has its whole answer: nothing is left to resume.
                self._dispatcher.cancel(word.request_id, "not_wanted")
            elif word.attempt >= choice.assembly.attempt:
                self._dispatcher.resume(choice, word.attempt)
