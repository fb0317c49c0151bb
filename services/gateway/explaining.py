"""Explanations of recent choices: this gateway's own records, joined with the scheduler's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from services.gateway.callers import Callers
from services.gateway.openai_schema.explanation import Explanation
from services.gateway.pending import Generation
from services.gateway.prompt_places import place_of
from services.gateway.recent_requests import RecentRequest, RecentRequests
from services.gateway.tokenizer import Tokenizer
from services.gateway.views.explanation import admission_of_first_token, explain
from shared import logs, subjects
from shared.bus.protocol import Bus
from shared.codec import decode, encode
from shared.errors import ThermoclineError
from shared.messages.base import unpack_int32
from shared.messages.explanations import Admission, Admissions, GetAdmissions

CALL_S = 1.0
MOST_AT_ONCE = 128
"""Limit on the requests in one call to the scheduler, whose reply must fit a message."""

LOCATED = ("diverged", "evicted")
CHARACTERS_A_TOKEN = 4
"""Rough average, to estimate a prompt's length in characters."""

_log = logs.get_logger("gateway.explaining")


@dataclass(frozen=True, slots=True)
class Explainer:
    """Explains choices. Where the scheduler does not answer, explanations contain less and are still true."""

    bus: Bus
    recent: RecentRequests
    tokenizer: Tokenizer
    callers: Callers

    async def explain(self, requests: Sequence[RecentRequest], *, is_admin: bool) -> list[Explanation]:
        """Return explanations of these choices, in order; the scheduler is asked about at most MOST_AT_ONCE of them."""
        await self._ask([request for request in requests if not request.admissions or request.choice is not None])
        for request in requests:
            await self._locate(request)
        now_s = self.recent.clock()
        return [
            explain(
                request,
                now_s,
                self.tokenizer.decode,
                is_admin=is_admin,
                sees_cache=self.callers.has_own_cache(request.tenant),
            )
            for request in requests
        ]

    async def explain_first(self, generation: Generation, *, is_admin: bool = False) -> Explanation | None:
        """Return the explanation of an answer's first choice for its own caller, or None where it is forgotten."""
        known = self.recent.find(generation.choices[0].request_id)
        return (await self.explain([known], is_admin=is_admin))[0] if known is not None else None

    async def _locate(self, known: RecentRequest) -> None:
        """Note where in its conversation a prompt left the cache, while the conversation is still kept."""
        choice, conversation = known.choice, known.conversation
        if choice is None or conversation is None:
            return
        admission = admission_of_first_token(known, known.figures(self.recent.clock()))
        point = None if admission is None else admission.point
        if point is None or point.kind not in LOCATED:
            return
        tokens, decode = unpack_int32(choice.request.prompt), self.tokenizer.decode
        for position in {point.position: None, point.page_start: None}:
            if position not in known.places:
                known.places[position] = await self.tokenizer.run(
                    partial(place_of, conversation, tokens, position, decode), CHARACTERS_A_TOKEN * len(tokens)
                )

    async def _ask(self, requests: Sequence[RecentRequest]) -> None:
        """Ask the scheduler about these choices. Admissions that it has forgotten stay as they were."""
        asked = requests[:MOST_AT_ONCE]
        if not asked:
            return
        question = GetAdmissions(
            request_ids=tuple(request.request_id for request in asked),
            ended=tuple(request.request_id for request in asked if request.is_over),
        )
        try:
            data = await self.bus.call(subjects.rpc("scheduler", "admissions"), encode(question), timeout_s=CALL_S)
            found: dict[str, list[Admission]] = {}
            for admission in decode(data, Admissions).admissions:
                found.setdefault(admission.request_id, []).append(admission)
        except ThermoclineError as error:
            _log.info("admissions_not_known", reason=error.message)
            return
        for request in asked:
            request.admissions = tuple(found.get(request.request_id, request.admissions))
