"""The resources that one HTTP request holds while it is answered, released exactly once."""

from __future__ import annotations

from services.gateway import metrics, tenant_metrics
from services.gateway.accounts import Account
from services.gateway.body import Body
from services.gateway.disconnect import DisconnectWatch
from services.gateway.gateway import Gateway
from services.gateway.pending import Generation
from services.gateway.prompt_heads import Head
from services.gateway.request_spans import record_generation
from services.gateway.turns.turns import Turn
from shared.errors import CapacityError, InvalidRequest, RequestCancelled, TooManyConnections


class Ticket:
    """Slots, and later a generation with its watch. Created after the body was read: slow senders hold no slot."""

    def __init__(self, gateway: Gateway, account: Account, received_ns: int) -> None:
        """Take one slot for a request that was read at ``received_ns`` of the wall clock.

        Raises TooManyConnections, RateLimited, or Unavailable while the gateway is closed.
        """
        gateway.check_open()
        self.received_ns = received_ns
        self.body_bytes = 0
        self._gateway = gateway
        self._account = account
        self._slots = 0
        self._prompt_tokens = 0  # Spent for its prompts.
        self._take(1)
        self._generation: Generation | None = None
        self._watch: DisconnectWatch | None = None
        self._head: Head | None = None
        self.turn: Turn | None = None  # For a conversation: where its answer stands.
        self._is_closed = False

    def __enter__(self) -> Ticket:
        """Return this ticket; it took its slot when it was made."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """Close when an exception leaves the block; else the answer owns the ticket by now."""
        if kind is not None:
            self.close()

    def extend(self, choices: int) -> None:
        """Hold ``choices`` slots in total. Raises TooManyConnections, RateLimited, InvalidRequest."""
        limit = self._account.tenant.max_concurrent
        if limit and choices > limit:
            raise InvalidRequest(
                f"{choices} choices are more than the {limit} that this key's tenant may have in progress", param="n"
            )
        self._take(choices - self._slots)

    def hold(self, generation: Generation, watch: DisconnectWatch | None = None) -> None:
        """Own a generation, and the watch on its client, until closed."""
        self._generation, self._watch = generation, watch
        if self._gateway.reports is not None:
            self._gateway.reports.sent(generation)

    def read(self, body: Body) -> None:
        """Note the body's size, and compute the prompt's head from it if this gateway reports heads to routers."""
        self.body_bytes = len(body)
        if self._gateway.reports is not None:
            self._head = self._gateway.reports.head_of(body)

    def spend_prompts(self, generation: Generation) -> None:
        """Spend the tenant's tokens for its prompts, each once for all choices that share it. Raises RateLimited."""
        tokens = computed_prompt_tokens(generation)
        self._account.spend_prompt(tokens)
        self._prompt_tokens = tokens

    def close(self) -> None:
        """Cancel choices that still run, count the generation, and release everything; idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._watch is not None:
            self._watch.close()
        if self._generation is not None:
            reason = self._generation.abandoned or RequestCancelled("", code="client_disconnected")
            self._gateway.dispatcher.end(self._generation, reason.code)
            self._gateway.recent.end(self._generation)
            if self._gateway.reports is not None:
                self._gateway.reports.ended(self._generation)
                if self._head is not None:
                    self._gateway.reports.note(self._head, self._generation)
            if self.turn is not None:
                self._gateway.turns.ended(self.turn, self._generation)
            metrics.observe_end(self._generation, self._gateway.clock())
            tenant_metrics.observe_end(self._account.label, self._generation)
            if self._gateway.tracer is not None:
                record_generation(self._gateway.tracer, self._generation)
            answered = sum(len(choice.assembly.tokens) for choice in self._generation.choices)
            returned = self._prompt_tokens if _was_refused(self._generation) else 0
            self._account.spend_tokens(answered - returned)
        self._gateway.slots.give_back(self._slots)
        self._account.give_back(self._slots)

    def _take(self, choices: int) -> None:
        self._account.take(choices)
        try:
            self._gateway.slots.take(choices)
        except TooManyConnections:
            self._account.give_back(choices)
            tenant_metrics.turned_away(self._account.label, tenant_metrics.GATEWAY)
            raise
        self._slots += choices


def _was_refused(generation: Generation) -> bool:
    """Return whether the cell had no room for it, before a worker had sent anything: its prompts cost nothing."""
    choices = generation.choices
    had_no_room = any(isinstance(choice.failure, CapacityError) for choice in choices)
    return had_no_room and not any(choice.workers for choice in choices)


def computed_prompt_tokens(generation: Generation) -> int:
    """Return the tokens of the prompts that its choices are computed from.

    A prompt counts once for choices that find it in the cache, where the first of them leaves it, and otherwise once
    for each choice.
    """
    shared: dict[int, int] = {}
    apart = 0
    for choice in generation.choices:
        request = choice.request
        if request.cache.read and request.cache.write and request.sampling.prompt_logprobs is None:
            shared[choice.prompt] = request.prompt_tokens
        else:
            apart += request.prompt_tokens
    return apart + sum(shared.values())
