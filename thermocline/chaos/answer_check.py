"""Compares an answer, while it arrives, with the known right answer. Pure.

A stream must have every token once, in order and unchanged, then one reason to end, then at most its usage, and
``[DONE]`` once. An answer that breaks off must be a prefix of the right one.
"""

from __future__ import annotations

from typing import Any

from thermocline.chaos.workload import Known


class WrongAnswer(Exception):
    """An answer that no client may get; the message says where it differs."""


class AnswerCheck:
    """The check of one answer. Each method raises WrongAnswer at the first difference."""

    def __init__(self, known: Known) -> None:
        """Expect ``known``, from its first token on."""
        self._known = known
        self._tokens: list[int] = []
        self._text: list[str] = []
        self._finish_reason = ""
        self._is_done = False

    @property
    def received(self) -> int:
        """Number of tokens so far."""
        return len(self._tokens)

    @property
    def is_done(self) -> bool:
        """Whether :meth:`done` has accepted the whole answer."""
        return self._is_done

    def event(self, event: dict[str, Any]) -> int:
        """Check one event of a stream, or a whole answer; return its number of tokens."""
        if self._is_done:
            raise WrongAnswer("something follows [DONE]")
        brought = 0
        for choice in event.get("choices", ()):
            if choice.get("index") != 0:
                raise WrongAnswer(f"choice {choice.get('index')} where one was asked for")
            message = choice.get("delta") or choice.get("message") or {}
            token_ids = choice.get("token_ids") or []
            text = choice.get("text") or message.get("content") or ""
            if self._finish_reason and (token_ids or text or choice.get("finish_reason")):
                raise WrongAnswer("the answer goes on after its end")
            self._take(token_ids, text)
            brought += len(token_ids)
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
        usage = event.get("usage")
        if usage and usage.get("completion_tokens") != len(self._tokens):
            raise WrongAnswer(f"usage counts {usage.get('completion_tokens')} tokens and {len(self._tokens)} came")
        return brought

    def _take(self, token_ids: list[int], text: str) -> None:
        start = len(self._tokens)
        expected = list(self._known.token_ids[start : start + len(token_ids)])
        if token_ids != expected:
            differing = (n for n, pair in enumerate(zip(token_ids, expected, strict=False)) if pair[0] != pair[1])
            at = next(differing, len(expected))
            raise WrongAnswer(f"token {start + at} differs: {token_ids[at:]} came for {expected[at:]}")
        self._tokens += token_ids
        self._text.append(text)
        if not self._known.text.startswith("".join(self._text)):
            raise WrongAnswer(f"the text differs around token {start}")

    def done(self) -> None:
        """Check, at ``[DONE]`` or after a whole answer, that the answer is complete."""
        if self._is_done:
            raise WrongAnswer("[DONE] came twice")
        self._is_done = True
        if not self._finish_reason:
            raise WrongAnswer(f"the answer ended without a reason after {len(self._tokens)} tokens")
        if self._finish_reason != self._known.finish_reason:
            raise WrongAnswer(f"it ended for {self._finish_reason}, which should be {self._known.finish_reason}")
        if len(self._tokens) != len(self._known.token_ids):
            raise WrongAnswer(f"{len(self._tokens)} of {len(self._known.token_ids)} tokens came")
        if "".join(self._text) != self._known.text:
            raise WrongAnswer("the text differs")
