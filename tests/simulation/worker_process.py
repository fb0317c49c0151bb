"""A simulated worker: takes plans in order, and runs steps that last a while, on pages that hold tokens."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from services.worker.retained import RetainedOutputs
from shared.codec import Input, Published
from shared.kept_texts import KeptTexts
from shared.messages import worker_events
from shared.messages import worker_plans as plans
from shared.messages.pools import PoolHandle
from shared.messages.tokens import TokenBatch, TokenItem
from shared.messages.worker_events import FinishReason
from tests.simulation.contents import HostPool, Page, WrongContent, require, sampled
from tests.simulation.process import Process, Receiver
from tests.simulation.sequence import Sequence
from tests.simulation.steps import run_batch
from tests.simulation.worker_orders import carry_out, end_sequence
from tests.stateful.model_hidden import COSTS
from tests.stateful.model_pages import EOS, MODEL, geometry

if TYPE_CHECKING:
    from tests.simulation.cell import Cell

LEASE_THRESHOLD = 4
WRONG_TOKEN = 1_000_000
GRACES_MS = (0, 300, 3_000, 20_000)
TOLD_GRACE = 0.9  # Of its time for draining, what a worker tells the scheduler.
STEP_US, DECODED_US = 150, 30
RETAINED, MOST_BYTES = 64, 1 << 20
KEPT_TOKENS = 2_000  # A few prompts, so that some are dropped.


class WorkerProcess(Process):
    """One incarnation. What it reports of time is virtual time."""

    kind = "worker"

    def __init__(self, cell: Cell, name: str, incarnation: str, node: str) -> None:
        super().__init__(cell, name, incarnation)
        self.node = node
        self.memory: dict[int, Page] = {}
        self.sequences: dict[str, Sequence] = {}
        self.hosts: dict[str, HostPool] = {}
        self.hidden_pools: dict[str, HostPool] = {}
        self.neighbours: dict[str, WorkerProcess] = {}
        self.promoting: dict[int, None] = {}  # Device pages under a promotion.
        self.texts = KeptTexts()
        self.fails_next_chunk = False
        self.begun = 0  # Number of the last batch that was begun.
        self._retained = RetainedOutputs(RETAINED)
        self._inbox: deque[plans.WorkerPlan] = deque()
        self._is_busy = self._is_stopping = False
        self._steps = 0
        self._receiver = Receiver(self)
        self._items: dict[str, list[TokenItem]] = {}  # Of the step under way, by gateway.

    @property
    def is_listed(self) -> bool:
        """Whether the cell still counts on it: what it does after it was given up is nobody's promise."""
        return self.cell.lists("worker", self.name, self.incarnation)

    def start(self) -> None:
        """Join the cell."""
        shape = self.cell.scenario.shape
        handle = PoolHandle(
            kind="shm",
            layout="layer_first",
            name=self.incarnation,
            nbytes=0,
            pages=shape.device_pages,
            geometry=geometry(shape.page_size),
        )
        self.say(
            worker_events.WorkerJoined(
                **self.who(),
                node=self.node,
                model=MODEL,
                pool=handle,
                max_context=1_000_000,
                restoration=COSTS if shape.knows_costs else None,
                kept_tokens=KEPT_TOKENS,
                takes_compact=True,
            )
        )

    def who(self) -> dict[str, Any]:
        """The fields that every event has."""
        return {"worker_id": self.name, "incarnation": self.incarnation}

    def hear(self, plan: Published) -> None:
        """A plan came over core NATS."""
        self.take(self._receiver.hear(plan))

    def catch_up(self) -> None:
        """Look whether the last plans were missed."""
        self.take(self._receiver.read())

    def take(self, due: list[Published]) -> None:
        """Plans in order."""
        for plan in due:
            assert isinstance(plan, plans.WorkerPlan)
            self._inbox.append(plan)
        if due:
            self._go()

    def drain(self) -> None:
        """Be asked to end: go on until the cell lets it go or its time is over, which may be at once."""
        grace_ms = self.chance.choice(GRACES_MS)
        if not grace_ms:
            self.leave()
            return
        self.say(worker_events.WorkerDraining(**self.who(), grace_ms=int(grace_ms * TOLD_GRACE)))
        self.later(grace_ms * 1_000, self.leave)

    def leave(self) -> None:
        """End gracefully after the step under way: nothing of this incarnation runs any more."""
        self._is_stopping = True
        if not self._is_busy:
            self._leave()

    def _leave(self) -> None:
        self.append(worker_events.WorkerLeft(**self.who()))
        self.end()

    def end(self) -> None:
        """Do nothing any more, however it came to that; the process shows no sign of life then."""
        was_running = self.is_running
        super().end()
        if was_running:
            self.cell.note_end(self)

    # Steps.

    def _go(self) -> None:
        if self._is_busy:
            return
        if self._is_stopping:
            self._leave()
            return
        batch: plans.WorkerPlan | None = None
        while self._inbox and batch is None:
            plan = self._inbox.popleft()
            if isinstance(plan.order, plans.RunBatch):
                batch = plan
            else:
                carry_out(self, plan.order)
                if not self.is_running:
                    return
        decoding = [name for name, sequence in self.sequences.items() if sequence.is_decoding and sequence.has_room()]
        self._flush_items()
        if batch is None and not decoding:
            return
        self._is_busy = True
        self.begun = batch.number if batch is not None else self.begun
        order = batch.order if batch is not None else None
        assert order is None or isinstance(order, plans.RunBatch)
        tokens = sum(chunk.end - chunk.start for chunk in order.chunks) if order is not None else 0
        shape = self.cell.scenario.shape
        duration_us = STEP_US + shape.token_us * tokens + DECODED_US * len(decoding)
        early = run_batch(self, order) if order is not None and not shape.reads_late else None
        self.later(duration_us, lambda: self._end_step(batch, early, decoding, tokens, duration_us))

    def _end_step(
        self,
        batch: plans.WorkerPlan | None,
        early: worker_events.BatchDone | None,
        decoding: list[str],
        tokens: int,
        duration_us: int,
    ) -> None:
        self._is_busy = False
        said: list[Input] = []
        done = early
        if batch is not None and isinstance(batch.order, plans.RunBatch):
            done = done or run_batch(self, batch.order)
            done = worker_events.BatchDone(
                **self.who(),
                plan=batch.number,
                failed=done.failed,
                load_failures=done.load_failures,
                compute_us=duration_us,
                computed_tokens=tokens,
                loaded_tokens=done.loaded_tokens,
                load_us=done.loaded_tokens,
                restored_tokens=done.restored_tokens,
                restore_us=done.restored_tokens // 10 + 1 if done.restored_tokens else 0,
                restores_refused=done.restores_refused,
                sparse_refused=done.sparse_refused,
                sparse_loaded=done.sparse_loaded,
            )
            for chunk in batch.order.chunks:
                sequence = self.known(chunk.request_id, chunk.attempt)
                if sequence is not None and not sequence.has_failed and chunk.end == len(sequence.tokens):
                    self._sample(sequence, said)
        for name in decoding:
            self._decode(name, said)
        if done is not None:
            said.insert(0 if self.chance.random() < 0.5 else len(said), done)
        for event in said:
            self.say(event)
        self._flush_items()
        self._go()

    def _decode(self, name: str, said: list[Input]) -> None:
        sequence = self.sequences.get(name)
        if sequence is None or not sequence.is_decoding:
            return
        position = sequence.computed
        self.attend(sequence, position)
        self.write(sequence, position, position + 1)
        self._sample(sequence, said)

    def _sample(self, sequence: Sequence, said: list[Input]) -> None:
        admit = sequence.admit
        token = sampled(admit.sampling.seed, sequence.tokens, is_lossy=sequence.is_lossy)
        if sequence.is_wrong:
            token = WRONG_TOKEN
            self.cell.seen["wrong_tokens_of_the_given_up"] += 1
        index = len(sequence.output)
        sequence.tokens.append(token)
        sequence.sampled += 1
        is_eos = token == EOS and not admit.sampling.ignore_eos
        is_over = is_eos or len(sequence.output) >= admit.sampling.max_tokens
        reason: FinishReason | None = ("stop" if is_eos else "length") if is_over else None
        self.tell_gateway(
            sequence,
            TokenItem(
                request_id=sequence.request_id, attempt=admit.attempt, index=index, tokens=(token,), finish=reason
            ),
        )
        if reason is not None:
            said += end_sequence(self, sequence, reason)
        elif sequence.wants_lease(LEASE_THRESHOLD):
            sequence.asked_at = len(sequence.pages)
            said.append(
                worker_events.LeaseRequested(
                    **self.who(),
                    request_id=sequence.request_id,
                    attempt=admit.attempt,
                    generated=len(sequence.output),
                )
            )

    def attend(self, sequence: Sequence, end: int) -> None:
        """Read the KV of tokens [0, end). Only what the cell has given up may read anything else, and says nonsense."""
        try:
            sequence.check_prefix(end)
        except WrongContent:
            if self.is_listed:
                raise
            sequence.is_wrong = True

    def write(self, sequence: Sequence, start: int, end: int) -> None:
        """Compute the KV of tokens [start, end) of a sequence."""
        size = self.cell.scenario.shape.page_size
        self.forbid_promoting(sequence.pages[start // size : -(-end // size)])
        sequence.write(start, end)
        if sequence.saving is not None:
            sequence.saving.is_late = not self.is_listed
            sequence.saving.capture(start, sequence.tokens[start:end])
        sequence.computed = end

    def forbid_promoting(self, pages: list[int]) -> None:
        """Nothing but its promotion touches a page that is being promoted."""
        both = [page for page in pages if page in self.promoting]
        require(not both, f"{self.name} uses pages {both} under a promotion")

    # Plans.

    def known(self, request_id: str, attempt: int) -> Sequence | None:
        """The sequence of this attempt, if it runs here."""
        sequence = self.sequences.get(request_id)
        return sequence if sequence is not None and sequence.admit.attempt == attempt else None

    # Tokens.

    def tell_gateway(self, sequence: Sequence, item: TokenItem) -> None:
        """Have an item sent with those of its step, and remember it."""
        self._items.setdefault(sequence.admit.gateway_id, []).append(item)
        self._retained.add(item)

    def recall(self, sequence: Sequence) -> None:
        """Remember what earlier attempts said, for a gateway that missed some of it."""
        who, attempt = sequence.request_id, sequence.admit.attempt
        for index, token in enumerate(sequence.output):
            self._retained.recall(TokenItem(request_id=who, attempt=attempt, index=index, tokens=(token,)))

    def retire(self, request_id: str) -> None:
        """A request is forgotten here; what it was told stays for a while."""
        self._retained.retire(request_id)

    def _flush_items(self) -> None:
        self._steps += 1
        for gateway_id, items in self._items.items():
            batch = TokenBatch(**self.who(), step=self._steps, items=tuple(items))
            self.cell.send_tokens(gateway_id, batch)
        self._items = {}

    def outputs_of(self, request_id: str, index: int) -> TokenItem | None:
        """Everything from an output position on, as one item; None where the request is not known here."""
        return self._retained.find(request_id, index, max_bytes=MOST_BYTES)
