"""Grammars of answers, compiled and followed in threads of their own, beside the steps.

The tokens that may follow an answer are a function of its grammar and its output tokens. So a request that is resumed,
or begins again elsewhere, is fed the tokens of earlier attempts and goes on alike. Compiling begins when the request is
admitted, while the prompt is computed; after each token the mask of the next is computed while the model runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from shared import logs
from shared.errors import InternalError, InvalidRequest
from shared.fair_cache import FairCache
from shared.grammars import compile_grammar, compiling_thread, grammar_fault, token_table
from shared.messages.requests import Grammar

_log = logs.get_logger("worker")

LIGHTEST_BYTES = 8 * 1024
"""A shorter grammar counts as one of so many bytes."""

COMPILED_BYTES = 64 * LIGHTEST_BYTES
"""Text of the grammars that are kept compiled, of all callers together. A compiled one takes up to 130 times its text.
"""

MASK_WAIT_S = 10.0
"""Longest wait for a mask, which takes 10 ms at most (``shared.grammars``); a later one never comes."""


@dataclass(frozen=True, slots=True)
class NextTokens:
    """Tokens that may come next: bit ``t % 32`` of int32 ``words[t // 32]`` is token t.

    ``words`` is empty where there is a ``fault``.
    """

    words: npt.NDArray[np.int32]
    fault: str = ""


_Results = Future[list[NextTokens]]
"""Masks of answers that are followed together."""


class AnswerGrammar:
    """The grammar of one answer, at its end so far. Used by the compute thread only."""

    def __init__(
        self,
        begun: _Results,
        step: Callable[[Sequence[int]], tuple[_Results, int]],
        ahead: Callable[[Sequence[int]], _Results],
    ) -> None:
        """Prepare; ``begun`` holds the first mask.

        ``step`` takes tokens in once the grammars of all answers are followed; it returns the results of that and this
        answer's place in them. ``ahead`` returns the masks behind each of some tokens that may not follow.
        """
        self._results, self._place, self._step, self._ahead = begun, 0, step, ahead
        self._looking: _Results | None = None

    @property
    def is_ready(self) -> bool:
        """Whether :meth:`next_tokens` would return at once."""
        return self._results.done()

    def next_tokens(self) -> NextTokens:
        """Return the tokens that may come next. Waits for them; raises InternalError where they never come."""
        return _awaited(self._results)[self._place]

    def look_ahead(self, tokens: Sequence[int]) -> None:
        """Begin to compute :meth:`tokens_ahead` of ``tokens``, which may follow or not. Does not wait."""
        self._looking = self._ahead(tokens)

    def tokens_ahead(self) -> list[NextTokens]:
        """Return the masks behind each of the tokens last given to :meth:`look_ahead`.

        They end at the first token that is not allowed. Waits; raises InternalError where they never come.
        """
        return [] if self._looking is None else _awaited(self._looking)

    def accept(self, tokens: Sequence[int]) -> None:
        """Extend the answer by ``tokens``, at least one; the first is one of :meth:`next_tokens`."""
        self._looking = None
        self._results, self._place = self._step(tokens)


class AnswerGrammars:
    """Compiles grammars in one thread and follows answers in another. Used by the compute thread."""

    def __init__(
        self,
        tokenizer_json: Callable[[], str],
        vocab_size: int,
        eos_token_ids: Sequence[int],
        wake: Callable[[], None],
        *,
        compiling: Executor | None = None,
        following: Executor | None = None,
    ) -> None:
        """Prepare; ``wake`` is called, from another thread, whenever a grammar is compiled.

        The executors are threads that start with the first grammar.
        """
        self._tokenizer_json, self._vocab_size = tokenizer_json, vocab_size
        self._eos_token_ids, self._wake = tuple(eos_token_ids), wake
        self._compiling, self._following = compiling, following
        self._accepted: list[tuple[_Follower, Sequence[int]]] = []
        self._results: _Results = Future()  # Results of following the accepted tokens.
        # Used by the compiling thread only.
        self._tokens: LLTokenizer | None = None
        self._compiled: FairCache[tuple[str, str], LLMatcher] = FairCache(COMPILED_BYTES)  # By ``Grammar.scope``.

    def begin(self, grammar: Grammar, output: Sequence[int]) -> AnswerGrammar:
        """Return the grammar of an answer that has the tokens ``output`` so far. Does not wait."""
        compiling = self._compiling = self._compiling or compiling_thread("grammars")
        follower = _Follower(self._vocab_size)
        tokens = list(output)
        begun = compiling.submit(follower.begin, lambda: self._compile(grammar), tokens)
        begun.add_done_callback(lambda _: self._wake())
        return AnswerGrammar(begun, partial(self._accept, follower), partial(self._look_ahead, follower))

    def follow(self) -> None:
        """Compute the masks behind the tokens that answers have accepted in the step that is over."""
        if self._accepted:
            # One piece of work, because each would make this thread wait for the interpreter's lock.
            self._follower_thread().submit(_follow, self._accepted, self._results)
            self._accepted, self._results = [], Future()

    def _accept(self, follower: _Follower, tokens: Sequence[int]) -> tuple[_Results, int]:
        self._accepted.append((follower, tokens))
        return self._results, len(self._accepted) - 1

    def _look_ahead(self, follower: _Follower, tokens: Sequence[int]) -> _Results:
        # Behind the tokens that the answer has accepted, which the same thread follows.
        return self._follower_thread().submit(follower.ahead, tokens)

    def _follower_thread(self) -> Executor:
        following = self._following = self._following or compiling_thread("masks")
        return following

    def close(self) -> None:
        """Cancel the work that has not begun."""
        for executor in (self._compiling, self._following):
            if executor is not None:
                executor.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        """Return a new matcher of the grammar; runs on the compiling thread. Raises InvalidRequest."""
        if self._tokens is None:
            self._tokens = token_table(self._tokenizer_json(), self._vocab_size, self._eos_token_ids)
        key = (grammar.kind, grammar.text)
        if (grammar.scope, key) not in self._compiled:
            weight = max(LIGHTEST_BYTES, len(grammar.text.encode()))
            self._compiled.keep(grammar.scope, key, compile_grammar(self._tokens, grammar), weight)
        return self._compiled.use(grammar.scope, key).deep_copy()


class _Follower:
    """A matcher of one answer and the mask that it writes. Its calls come one after another, from any thread."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._matcher: LLMatcher | None = None

    def begin(self, make: Callable[[], LLMatcher], output: list[int]) -> list[NextTokens]:
        try:
            self._matcher = make()
        except InvalidRequest as error:
            _log.error("grammar_refused", reason=error.message)
            return [self._nothing(error.message)]
        self._matcher.consume_tokens(output)
        return [self._next(self._matcher)]

    def step(self, tokens: Sequence[int]) -> NextTokens:
        if self._matcher is None:
            return self._nothing("its grammar never began")
        for token in tokens:
            self._matcher.consume_token(token)
        return self._next(self._matcher)

    def ahead(self, tokens: Sequence[int]) -> list[NextTokens]:
        """Return ``AnswerGrammar.tokens_ahead``; the answer's position does not change."""
        masks: list[NextTokens] = []
        if self._matcher is None:
            return masks
        matcher = self._matcher.deep_copy()
        for token in tokens:
            if matcher.is_stopped() or not matcher.try_consume_tokens([token]):
                break
            masks.append(self._next(matcher))
        return masks

    def _next(self, matcher: LLMatcher) -> NextTokens:
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            # Its mask would allow the end of the answer.
            return self._nothing(f"its grammar cannot be kept to: {grammar_fault(matcher)}")
        return NextTokens(np.frombuffer(mask, dtype=np.int32))

    def _nothing(self, fault: str) -> NextTokens:
        return NextTokens(np.zeros(-(-self._vocab_size // 32), dtype=np.int32), fault)


def _awaited(results: _Results) -> list[NextTokens]:
    try:
        return results.result(MASK_WAIT_S)
    except TimeoutError as error:
        raise InternalError("the mask of a grammar took too long") from error


def _follow(steps: Sequence[tuple[_Follower, Sequence[int]]], results: _Results) -> None:
    try:
        results.set_result([follower.step(tokens) for follower, tokens in steps])
    except BaseException as error:  # A panic of Rust code is no Exception, and would leave others waiting.
        results.set_exception(error)
