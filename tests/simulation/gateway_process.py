"""A simulated gateway: the real assembly, timeouts and cursor of notices, and what a client sees of each request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.gateway.assembly import Placement
from services.gateway.failures import error_of_notice
from services.gateway.notices import NoticeCursor
from services.gateway.pending import Choice
from services.gateway.prompt_bases import PromptBases
from services.gateway.timeouts import WaitLimits, needs_probe, needs_search, overdue
from shared.codec import Published
from shared.errors import RequestCancelled
from shared.messages.base import pack_int32
from shared.messages.gateway_notices import GatewayNotice, PromptWanted, RequestFailed, ResumeNeeded
from shared.messages.requests import CancelRequest, ReclaimRequest, ResumeRequest, SubmitRequest
from shared.messages.tokens import TokenBatch
from shared.prompt_chain import block_digests
from tests.simulation.contents import require
from tests.simulation.process import Process

if TYPE_CHECKING:
    from tests.simulation.cell import Cell

LIMITS = WaitLimits(request_s=240.0, first_token_s=180.0, idle_s=120.0, probe_s=5.0)
FETCH_TRIES = 5
FETCH_RETRY_US = 200_000


class GatewayProcess(Process):
    """One incarnation, whose name nobody had before: notices are numbered by it."""

    kind = "gateway"

    def __init__(self, cell: Cell, name: str, incarnation: str, node: str = "") -> None:
        super().__init__(cell, incarnation, incarnation)
        self.place = name
        self.choices: dict[str, Choice] = {}  # Not over yet.
        self.ended: dict[str, Choice] = {}
        self._bases = PromptBases()
        self._cursor = NoticeCursor()
        self._read_to = 0

    # Requests.

    def submit(self, message: SubmitRequest) -> None:
        """A client asks."""
        choice = self.choices[message.request_id] = Choice(message, 0, 0, self.cell.clock.now_s)
        self.cell.submitted[message.request_id] = message
        choice.blocks = block_digests(message.namespace, message.prompt)
        abridged = self._bases.abridged(message, choice.blocks)
        choice.base = abridged.base
        self.cell.inputs.append(abridged, message.request_id)

    def cancel(self, request_id: str) -> None:
        """The client goes away."""
        choice = self.choices.get(request_id)
        if choice is not None:
            choice.fail(RequestCancelled("the client went away"))
            self._settle(choice)

    def _settle(self, choice: Choice) -> None:
        """A request that is over is over once; the cell is told where it does not know."""
        if not choice.is_over or choice.request_id not in self.choices:
            return
        require(choice.request_id not in self.ended, f"{choice.request_id} ends twice")
        self.ended[choice.request_id] = self.choices.pop(choice.request_id)
        if choice.failure is None:
            self._bases.answered(choice.request, choice.blocks, choice.assembly.tokens)
        self.cell.note_ended(self, choice)
        if not choice.is_settled:
            self.say(CancelRequest(request_id=choice.request_id, gateway_id=self.name))

    # Tokens.

    def hear_tokens(self, batch: TokenBatch) -> None:
        """Tokens of one step."""
        for item in batch.items:
            choice = self.choices.get(item.request_id)
            if choice is None:
                continue
            if choice.accept(batch.worker_id, item, self.cell.clock.now_s) is Placement.GAP:
                self._fetch(choice, [batch.worker_id])
            self._settle(choice)

    def _fetch(self, choice: Choice, workers: list[str], tries: int = FETCH_TRIES) -> None:
        if choice.is_fetching:
            return
        choice.is_fetching = True
        choice.probed_s = self.cell.clock.now_s
        self.later(300, lambda: self._ask(choice, workers, tries))

    def _ask(self, choice: Choice, workers: list[str], tries: int) -> None:
        """Ask the workers of a request, newest first, until one brings it forward."""
        choice.is_fetching = False
        if choice.is_over or not tries:
            return
        before = choice.assembly.next_index
        is_known = False
        for name in dict.fromkeys([*reversed(choice.workers.values()), *workers]):
            if self._question(choice, name) not in (None, Placement.GAP, Placement.FENCED):
                is_known = True
                break
        self._settle(choice)
        if not choice.is_over and (choice.assembly.has_gap or not is_known) and choice.assembly.next_index == before:
            choice.is_fetching = True
            self.later(FETCH_RETRY_US, lambda: self._ask(choice, workers, tries - 1))

    def _question(self, choice: Choice, name: str) -> Placement | None:
        """Ask one worker. None where it cannot be reached or does not know the request."""
        worker = self.cell.workers.get(name)
        if worker is None or not worker.can_answer or self.is_cut_off:
            return None
        item = worker.outputs_of(choice.request_id, choice.assembly.next_index)
        return None if item is None else choice.accept(name, item, self.cell.clock.now_s, asked=True)

    def _search(self, choice: Choice) -> None:
        """Ask every worker, until one brings a request forward."""
        choice.probed_s = choice.searched_s = self.cell.clock.now_s
        before = choice.assembly.next_index
        is_known = False
        for name in dict.fromkeys([*reversed(choice.workers.values()), *self.cell.workers]):
            if choice.is_over or choice.assembly.next_index > before:
                break
            is_known |= self._question(choice, name) is not None
        self._settle(choice)
        if choice.assembly.next_index > before:
            self._fetch(choice, [])
        elif not is_known and not choice.is_over and not self.is_cut_off:
            self._reclaim_if_forgotten(choice)

    def _reclaim_if_forgotten(self, choice: Choice) -> None:
        """Have a request begun again that its worker ended and nobody can tell the end of."""
        scheduler = self.cell.scheduler
        if scheduler.can_answer and choice.request_id not in scheduler.fold.state.requests:
            choice.reclaims += 1
            self.cell.seen["reclaims"] += 1
            self.say(ReclaimRequest(submit=choice.request))

    # Notices.

    def hear(self, notice: Published) -> None:
        """A notice came over core NATS."""
        assert isinstance(notice, GatewayNotice)
        if self._cursor.place(notice) == "gap":
            self.catch_up()
        self._act(notice)

    def catch_up(self) -> None:
        """Read what was missed."""
        said = self.cell.outputs.said.get(f"gateway/{self.name}", [])
        fresh, self._read_to = said[self._read_to :], len(said)
        for notice in fresh:
            assert isinstance(notice, GatewayNotice)
            self._act(notice)

    def _act(self, notice: GatewayNotice) -> None:
        place = self._cursor.place(notice)
        is_next = notice.number == self._cursor.last + 1 or (
            notice.number == 1 and notice.epoch > self._cursor.term[0]  # Of a scheduler that began anew.
        )
        require(place == "repeated" or is_next, f"notice {notice.number} of {self.name} follows {self._cursor.last}")
        if place == "repeated":
            return
        self._cursor.take(notice)
        word = notice.word
        choice = self.choices.get(word.request_id)
        if isinstance(word, PromptWanted):
            if choice is not None and choice.base is not None:
                self._bases.gone(choice.blocks, choice.base)
                choice.base = None
                self.append(choice.request, f"{choice.request_id}.whole")
        elif isinstance(word, RequestFailed):
            if choice is not None:
                choice.fail(error_of_notice(word), is_settled=True)
                self._settle(choice)
        elif isinstance(word, ResumeNeeded):
            if choice is None:
                self.say(CancelRequest(request_id=word.request_id, gateway_id=self.name, reason="not_wanted"))
            elif word.attempt >= choice.assembly.attempt:
                choice.assembly.fence(word.attempt)
                output = pack_int32(choice.assembly.tokens)
                self.say(
                    ResumeRequest(request_id=word.request_id, gateway_id=self.name, attempt=word.attempt, output=output)
                )

    def reconnect(self) -> None:
        """Have the connection again, and ask everybody for what may have been lost meanwhile."""
        super().reconnect()
        if self.is_cut_off:
            return
        for choice in list(self.choices.values()):
            self._fetch(choice, list(self.cell.workers))
            choice.searched_s = choice.progress_s

    def tick(self) -> None:
        """End what waits for too long, and ask for what may be lost."""
        now_s = self.cell.clock.now_s
        for choice in list(self.choices.values()):
            error = overdue(choice, now_s, LIMITS)
            if error is not None:
                choice.fail(error)
                self._settle(choice)
            elif needs_search(choice, now_s, LIMITS) and not choice.is_fetching:
                self._search(choice)
            elif needs_probe(choice, now_s, LIMITS):
                self._fetch(choice, [])
