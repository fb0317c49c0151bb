"""When a choice has waited for too long. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from services.gateway.pending import Choice
from shared.errors import DeadlineExceeded

DEADLINE_SLACK_S = 2.0
"""The scheduler and the worker end a request at its deadline; the gateway, so much later, only those they missed."""


@dataclass(frozen=True, slots=True)
class WaitLimits:
    """Longest waits, in seconds."""

    request_s: float
    first_token_s: float
    idle_s: float
    probe_s: float


def overdue(choice: Choice, now_s: float, limits: WaitLimits) -> DeadlineExceeded | None:
    """Return the error with which this choice must end now, or None. Does not change the state."""
    age_s = now_s - choice.started_s
    deadline_ms = choice.request.deadline_ms
    if deadline_ms and age_s > deadline_ms / 1000 + DEADLINE_SLACK_S:
        return DeadlineExceeded(f"the request's deadline_ms of {deadline_ms} passed")
    if age_s > limits.request_s:
        return DeadlineExceeded(f"no whole answer within {limits.request_s:g} s", code="request_timeout")
    if not choice.assembly.tokens and age_s > limits.first_token_s:
        return DeadlineExceeded(f"no token within {limits.first_token_s:g} s", code="first_token_timeout")
    if choice.assembly.tokens and now_s - choice.progress_s > limits.idle_s:
        return DeadlineExceeded(f"no further token within {limits.idle_s:g} s", code="idle_timeout")
    return None


def needs_probe(choice: Choice, now_s: float, limits: WaitLimits) -> bool:
    """Return whether to ask its workers: one sent tokens, has been quiet for ``probe_s``, and was not asked since."""
    quiet_s = now_s - max(choice.progress_s, choice.probed_s)
    return bool(choice.workers) and not choice.is_over and quiet_s > limits.probe_s


def needs_search(choice: Choice, now_s: float, limits: WaitLimits) -> bool:
    """Return whether to ask all workers: no token has come for ``probe_s``, or for twice as long as at the last search.

    All items of an attempt may be lost, and then nothing shows which worker runs it. Most requests that wait are in the
    queue, though, and no worker knows them. So each is searched for less and less often: about seven times in ten
    minutes, and an existing answer is found about when its wait has doubled.
    """
    waited_s = choice.searched_s - choice.progress_s
    quiet_s = now_s - max(choice.progress_s, choice.searched_s)
    return not choice.is_over and quiet_s > max(limits.probe_s, waited_s)
