"""Choices in progress and recent ones, kept to be explained: bounded in number and in time.

Beyond the number, the tenant with the most of them loses its oldest, so that no tenant displaces those of the others.

A choice that is over leaves its figures here and nothing of its prompt or its answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from services.gateway.openai_schema.chat import ChatRequest
from services.gateway.openai_schema.explanation import State
from services.gateway.openai_schema.usage import ImportanceReport
from services.gateway.pending import Choice, Generation
from services.gateway.prompt_places import Place
from services.gateway.views.usage import choice_importance
from shared.errors import RequestCancelled
from shared.messages.explanations import Admission
from shared.messages.tokens import Timing, Usage

MOST_REQUESTS = 1024
KEPT_S = 900.0


@dataclass(frozen=True, slots=True)
class Figures:
    """The gateway's record of a choice. Times are nanoseconds of its wall clock; 0 is not yet."""

    state: State
    finish_reason: str | None
    error_code: str | None
    completion_tokens: int
    workers: dict[int, str]  # By attempt, for attempts that sent tokens.
    received_ns: int
    submitted_ns: int
    delivered_ns: int
    ended_ns: int
    timing: Timing | None
    usage: Usage | None
    importance: ImportanceReport | None


@dataclass(slots=True)
class RecentRequest:
    """One choice. ``choice`` and the ``conversation`` of its prompt, if it has one, are None once it is over.

    ``admissions`` are requested from the scheduler only for an explanation, and ``places`` of tokens looked up then.
    """

    http_id: str
    answer_id: str
    request_id: str
    namespace: str
    tenant: str
    endpoint: str
    model: str
    prompt_tokens: int
    position: int
    choice: Choice | None
    begun_s: float
    ended: Figures | None = None
    admissions: tuple[Admission, ...] = ()
    conversation: ChatRequest | None = None
    places: dict[int, Place] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether the cell has ended it, as far as the gateway knows."""
        return self.choice is None or self.choice.is_settled

    def figures(self, now_s: float) -> Figures:
        """Return the figures at ``now_s``, on the choice's clock, or those at its end."""
        if self.choice is None:
            assert self.ended is not None, "a choice leaves its figures"
            return self.ended
        return figures_of(self.choice, now_s)


@dataclass(slots=True)
class RecentRequests:
    """Recent choices, by id. ``clock`` is monotonic, in seconds."""

    clock: Callable[[], float]
    most: int = MOST_REQUESTS
    kept_s: float = KEPT_S
    _requests: OrderedDict[str, RecentRequest] = field(default_factory=OrderedDict)  # By id, oldest first.
    _by_tenant: dict[str, OrderedDict[str, None]] = field(default_factory=dict)  # Their ids, oldest first.
    _ids: dict[str, str] = field(default_factory=dict)  # Request id of the first choice, by the ids of its answer.

    def begin(
        self, generation: Generation, *, http_id: str, endpoint: str, conversation: ChatRequest | None = None
    ) -> None:
        """Note the choices of an answer that is about to be submitted."""
        for choice in generation.choices:
            request = choice.request
            answer_id, _, _ = request.request_id.rpartition("-")
            self._requests[request.request_id] = RecentRequest(
                http_id=http_id,
                answer_id=answer_id,
                request_id=request.request_id,
                namespace=request.namespace,
                tenant=request.tenant,
                endpoint=endpoint,
                model=generation.model,
                prompt_tokens=request.prompt_tokens,
                position=choice.position,
                choice=choice,
                begun_s=self.clock(),
                conversation=conversation,
            )
            self._by_tenant.setdefault(request.tenant, OrderedDict())[request.request_id] = None
            if choice.position == 0:
                self._ids[answer_id] = self._ids[http_id] = request.request_id
        self._forget_old()

    def end(self, generation: Generation) -> None:
        """Replace an answer's choices by their final figures."""
        now_s = self.clock()
        for choice in generation.choices:
            known = self._requests.get(choice.request_id)
            if known is not None and known.choice is not None:
                known.ended, known.choice = figures_of(choice, now_s, is_ended=True), None
                known.conversation = None

    def find(self, name: str) -> RecentRequest | None:
        """Return the choice of this id, or the first one of an HTTP request's or answer's id.

        Returns None where it is forgotten.
        """
        self._forget_old()
        return self._requests.get(self._ids.get(name, name))

    def newest_first(self) -> Iterator[RecentRequest]:
        """Return an iterator over all kept choices, newest first."""
        self._forget_old()
        return iter(list(reversed(self._requests.values())))

    def _forget_old(self) -> None:
        oldest_s = self.clock() - self.kept_s
        while self._requests:
            oldest = next(iter(self._requests.values()))
            if oldest.choice is not None or oldest.begun_s >= oldest_s:
                break
            self._forget(oldest)
        while len(self._requests) > self.most:
            largest = max(self._by_tenant.values(), key=len)
            self._forget(self._requests[next(iter(largest))])

    def _forget(self, known: RecentRequest) -> None:
        del self._requests[known.request_id]
        own = self._by_tenant[known.tenant]
        del own[known.request_id]
        if not own:
            del self._by_tenant[known.tenant]
        if known.position == 0:
            del self._ids[known.answer_id], self._ids[known.http_id]


def figures_of(choice: Choice, now_s: float, *, is_ended: bool = False) -> Figures:
    """Return the figures of a choice. Does not change the state."""
    assembly = choice.assembly
    submitted_ns = choice.submitted_ns

    def wall_ns(at_s: float) -> int:
        return submitted_ns + round((at_s - choice.started_s) * 1e9)

    failure = choice.failure
    is_answered = assembly.is_finished and failure is None
    if failure is not None:
        state: State = "cancelled" if isinstance(failure, RequestCancelled) else "failed"
    elif is_answered:
        state = "finished"
    else:
        state = "running" if assembly.tokens else "queued"
    ended_s = (choice.progress_s if is_answered else now_s) if is_ended or choice.is_over else 0.0
    return Figures(
        state=state,
        finish_reason=assembly.finish if is_answered else None,
        error_code=failure.code if failure is not None else None,
        completion_tokens=len(assembly.tokens),
        workers=dict(choice.workers),
        received_ns=choice.request.received_ns,
        submitted_ns=submitted_ns,
        delivered_ns=wall_ns(choice.first_token_s) if choice.first_token_s else 0,
        ended_ns=wall_ns(ended_s) if ended_s else 0,
        timing=assembly.timing,
        usage=assembly.usage,
        importance=choice_importance(assembly),
    )
