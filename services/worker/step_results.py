"""Results of a step for its requests: further tokens, an end, a request for pages, or the blame for an exception."""

from __future__ import annotations

from services.worker.answer_grammars import AnswerGrammars
from services.worker.compute import Computed
from services.worker.counters import Counters
from services.worker.engine.sample_row import Sampled
from services.worker.outcome import Outcome
from services.worker.reports import Reporter
from services.worker.requests import RunningRequest
from services.worker.roster import Roster

REQUEST_FAILURES = 3
"""Failed computations of one request before it is ended with an error."""


class StepResults:
    """Moves requests on. Used by the compute thread only."""

    def __init__(
        self,
        roster: Roster,
        reporter: Reporter,
        counters: Counters,
        grammars: AnswerGrammars,
        *,
        lease_low_tokens: int,
    ) -> None:
        """Ask for pages at a decode room of ``lease_low_tokens``, as ``RunningRequest.needs_lease`` has it."""
        self._grammars = grammars
        self._roster, self._reporter, self._counters = roster, reporter, counters
        self._lease_low_tokens = lease_low_tokens

    def take_in(self, outcome: Outcome, now_ns: int) -> None:
        """Add the computed tokens to their requests, and handle what raised."""
        for computed in outcome.done:
            self._advance(computed, now_ns)
        self._grammars.follow()
        self._blame(outcome)
        self._ask_for_leases()

    def _advance(self, computed: Computed, now_ns: int) -> None:
        work, request = computed.work, computed.work.request
        request.reach(work.end - len(work.proposed))
        request.compute_failures = 0
        if work.is_chunk:
            request.change("compute")
            request.computed_tokens += work.rows
            request.prompt_logprobs.update(computed.prompt_logprobs)
        request.held_logits = computed.held_logits
        for place, sampled in enumerate(computed.sampled):
            if place:  # The row holds the KV of the token before, a proposal that was right.
                request.reach(len(request.tokens))
            self._append(request, sampled, now_ns)
            if not request.is_decoding:
                return  # Tokens chosen behind the end of the answer are void.
        if request.grammar is not None and computed.sampled:
            request.grammar.accept([sampled.token for sampled in computed.sampled])

    def _append(self, request: RunningRequest, sampled: Sampled, now_ns: int) -> None:
        """Add a token to the answer, or end it where none could be chosen."""
        if sampled.error is not None:
            # The KV is right, but the parameters or the logits leave no token: trying again would not help.
            self._roster.fail(request, sampled.error.message)
            return
        request.change("sample")
        at = request.milestones
        at.first_token_ns = at.first_token_ns or now_ns
        request.tokens.append(sampled.token)
        growth = request.answer.grow(sampled.token)
        self._reporter.item(request, (sampled.token,), growth, logprob=sampled.logprob)
        if growth.finish is not None:
            self._roster.close(request, growth)

    def _ask_for_leases(self) -> None:
        """Ask for pages for the requests that need them now, and for those that would ask soon."""
        requests, low = self._roster.requests.values(), self._lease_low_tokens
        if not any(request.needs_lease(low) for request in requests):
            return
        asking = [request for request in requests if request.may_join_lease(low)]
        for request in asking:
            request.lease_requested = True
        self._counters.leases_requested += len(asking)
        self._reporter.leases_requested(asking)

    def _blame(self, outcome: Outcome) -> None:
        for item, error in outcome.broken:
            request = item.request
            request.compute_failures += 1
            self._counters.compute_failures += 1
            if not item.is_chunk or request.compute_failures >= REQUEST_FAILURES:
                self._roster.fail(request, f"{type(error).__name__}: {error}")
