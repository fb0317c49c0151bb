"""Turns a workload's requests into the server's dialect, and sends them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from thermocline.client import RequestError
from thermocline.load.clock import Clock
from thermocline.load.dialect import Dialect
from thermocline.load.exchange import Refused, exchange
from thermocline.load.http_client import Http
from thermocline.load.prompts import PromptMaker, Said
from thermocline.load.reply import Reply
from thermocline.simulate.workloads import Asked

_RETRIED_STATUS = (429, 503)
_FIRST_RETRY_S, _MOST_RETRY_S = 0.25, 30.0


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request ready to be sent. ``is_cut`` if its prompt was shortened to fit the model's context."""

    body: bytes
    prompt_tokens: int
    is_cut: bool


class Talker:
    """Prepares requests and sends them, with retries, which count towards latency."""

    def __init__(
        self,
        http: Http,
        dialect: Dialect,
        prompts: PromptMaker,
        clock: Clock,
        *,
        timeout_s: float,
        retries: int,
        seed: int,
    ) -> None:
        """Send through ``http``, which the caller closes, in the server's ``dialect``.

        An attempt may take ``timeout_s`` seconds. Up to ``retries`` more follow where the server refuses for now (429,
        503), or the connection fails before the first token. ``seed`` draws the jitter of the pauses between them.
        """
        self._http = http
        self._dialect = dialect
        self._prompts = prompts
        self._clock = clock
        self._timeout_s = timeout_s
        self._retries = retries
        self._rng = random.Random(f"bench-retries-{seed}")

    def prepare(self, asked: Asked, said: Mapping[int, Said]) -> Prepared:
        """Return the request, whose prompt repeats the answers ``said``; token ids are cut to the context."""
        output = self._prompts.scaled(asked.answer.tokens)
        prompt_tokens = sum(self._prompts.scaled(span.tokens) for span in asked.spans)
        context, is_cut = self._dialect.max_context, False
        if context is not None:
            output = min(output, max(1, context // 2))
        prompt: Any
        if self._dialect.api == "tokens":
            prompt = self._prompts.tokens(asked.spans, said)
            if context is not None and len(prompt) > context - output:
                # The end is cut: prompts share their beginnings.
                prompt, is_cut = prompt[: context - output], True
            prompt_tokens = len(prompt)
        elif self._dialect.api == "text":
            prompt = self._prompts.text(asked.spans, said)
        else:
            prompt = self._prompts.messages(asked.spans, said)
        return Prepared(self._dialect.body(prompt, output), prompt_tokens, is_cut)

    async def send(self, prepared: Prepared, number: int, due_s: float) -> Reply:
        """Send a request, with retries. Faults of the server or network are in the reply and never raised."""
        attempt = 0
        while True:
            reply = Reply(number, due_s, self._clock.now_s(), retries=attempt, is_cut=prepared.is_cut)
            try:
                await exchange(self._http, self._dialect.path, prepared.body, reply, self._clock, self._timeout_s)
            except RequestError as error:
                reply.error, reply.message = error.code, str(error)
                reply.ended_s = self._clock.now_s()
                if attempt < self._retries and _may_be_retried(error, reply):
                    await self._clock.sleep_until(self._clock.now_s() + self._pause_s(error, attempt))
                    attempt += 1
                    continue
            if not reply.prompt_tokens:
                reply.prompt_tokens = prepared.prompt_tokens
            return reply

    def _pause_s(self, error: RequestError, attempt: int) -> float:
        """Return an exponential backoff with jitter, at least what the server asked for, 30 s at most."""
        backoff_s = _FIRST_RETRY_S * 2.0 ** min(attempt, 16) * self._rng.uniform(0.5, 1.0)
        asked_s = error.retry_after_s if isinstance(error, Refused) and error.retry_after_s else 0.0
        return min(_MOST_RETRY_S, max(backoff_s, asked_s))


def _may_be_retried(error: RequestError, reply: Reply) -> bool:
    """Return whether a request was refused for now, or broke before its first token.

    An answer that had begun must not be generated twice.
    """
    if isinstance(error, Refused):
        return error.status in _RETRIED_STATUS
    return error.code in ("connection_refused", "connect_timeout", "connection_broken") and not reply.first_s
