"""The answer of one request as it grows: tokens in, text, finish reason and resumption state out. Pure.

An answer is a function of its parameters and its tokens alone, so one that is resumed elsewhere is fed the
tokens of earlier attempts, and then goes on as if it had never been interrupted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from services.worker.detokenizer import TokenStream
from services.worker.stopping import StopMatcher, stop_by_token
from shared.messages.requests import SamplingParams
from shared.messages.worker_events import FinishReason


@dataclass(frozen=True, slots=True)
class Growth:
    """Text, finish reason and matched stop of one token. ``finish`` is None while the answer goes on."""

    text: str
    finish: FinishReason | None = None
    stop_match: str | int | None = None


class Answer:
    """Output tokens of one request, over all its attempts, and the state of their text."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt_tokens: int,
        max_context: int,
        eos_token_ids: Collection[int],
        stream: TokenStream,
    ) -> None:
        """Begin without output tokens; ``stream``, which no other answer uses, turns them into text.

        The answer ends at ``params.max_tokens`` tokens, or where it fills ``max_context`` tokens together with the
        prompt; at least one token always fits. ``eos_token_ids`` are the model's own end-of-text tokens.
        """
        self._params = params
        self._eos_token_ids = eos_token_ids
        self._stream = stream
        self._matcher = StopMatcher(params.stop, include_stop=params.include_stop)
        # The context ends the answer as max_tokens does, whichever comes first. A prompt that fills the
        # context still gets the one token that its last position predicts.
        self.max_tokens = max(1, min(params.max_tokens, max_context - prompt_tokens))
        self.tokens: list[int] = []
        self.finish: FinishReason | None = None

    def replay(self, tokens: Iterable[int]) -> list[Growth]:
        """Feed the tokens of earlier attempts, which the gateway has, up to the one that ends the answer, if any."""
        growths: list[Growth] = []
        for token in tokens:
            growths.append(self.grow(token))
            if self.finish is not None:
                break
        return growths

    def grow(self, token: int) -> Growth:
        """Append one sampled token."""
        assert self.finish is None, "an ended answer does not grow"
        position = len(self.tokens)
        self.tokens.append(token)
        by_token = stop_by_token(self._params, self._eos_token_ids, token, position)
        if by_token is not None:
            # The text of the token that stops is shown only on request, like that of a stop string.
            text = self._see(self._stream.feed(token), position) if self._params.include_stop else ""
            text += self.end("stop")
            match = self._matcher.matched if self._matcher.matched is not None else by_token.match
            return Growth(text, "stop", match)
        text = self._see(self._stream.feed(token), position)
        if self._matcher.matched is None and len(self.tokens) >= self.max_tokens:
            text += self.end("length")
        if self._matcher.matched is not None:
            self.finish = "stop"
            return Growth(text, "stop", self._matcher.matched)
        return Growth(text, self.finish)

    def end(self, reason: FinishReason) -> str:
        """End the answer for ``reason``; return the text that was still withheld."""
        text = self._see(self._stream.finish(), len(self.tokens) - 1)
        self.finish = reason
        return text if self._matcher.matched is not None else text + self._matcher.flush()

    def _see(self, piece: str, position: int) -> str:
        return self._matcher.skip(piece) if position < self._params.min_tokens else self._matcher.feed(piece)
