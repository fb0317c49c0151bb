"""Compilation checks of grammars, in a thread of their own before anything of the request is submitted."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Final

from llguidance import LLTokenizer

from services.gateway.grammars.conjunctions import MAX_CONJUNCTS, lark_conjuncts
from services.gateway.grammars.requested import Asked
from services.gateway.grammars.schemas import schemas_in_lark
from shared.errors import InvalidRequest, Unavailable
from shared.grammars import compile_grammar, compiling_thread, token_table
from shared.messages.requests import Grammar

REMEMBERED: Final = 256
"""Limit on the grammars whose result is remembered; each is at most 64 KiB."""

CHECK_TIMEOUT_S: Final = 10.0
"""Longest wait of a request for its check, behind those of others: each takes a second at most."""


class GrammarChecks:
    """Checks of grammars against the model's tokens. Owned by the event loop."""

    def __init__(
        self,
        tokenizer_json: Callable[[], str],
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        executor: Executor | None = None,
        timeout_s: float = CHECK_TIMEOUT_S,
    ) -> None:
        """Prepare for checks; the first one reads ``tokenizer_json`` and starts the thread.

        ``tokenizer_json`` returns the text of the model's ``tokenizer.json``, and ``vocab_size`` is the number of the
        model's logits. ``executor`` must have one thread, and :meth:`close` shuts it down, too; with None one is made.
        ``timeout_s`` bounds a request's wait for its check.
        """
        self._tokenizer_json, self._vocab_size = tokenizer_json, vocab_size
        self._eos_token_ids, self._timeout_s = tuple(eos_token_ids), timeout_s
        self._executor = executor
        # Used only by the executor's one thread.
        self._tokens: LLTokenizer | None = None
        self._faults: OrderedDict[tuple[str, str], str | None] = OrderedDict()

    async def made(self, asked: Asked | None) -> Grammar | None:
        """Return the grammar of a request once it compiles, or None without one.

        Raises InvalidRequest, and Unavailable where too many others are being checked.
        """
        return None if asked is None else await self._in_thread(lambda: self._made(asked))

    async def check(self, grammar: Grammar, *, param: str) -> None:
        """Raise as :meth:`made` does, with ``param`` as the field at fault."""
        await self.made(Asked(param, lambda: grammar))

    def close(self) -> None:
        """Stop the thread; checks that wait for it are dropped."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[[], Grammar]) -> Grammar:
        self._executor = self._executor or compiling_thread("grammar-checks")
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        except TimeoutError as error:
            raise Unavailable("too many grammars are being checked", retry_after_ms=1000) from error

    def _made(self, asked: Asked) -> Grammar:
        """Return the grammar if it compiles. Runs in the executor's thread. Raises InvalidRequest."""
        grammar = asked.make()
        key = (grammar.kind, grammar.text)
        if key not in self._faults:
            self._faults[key] = self._fault(grammar)
            if len(self._faults) > REMEMBERED:
                self._faults.popitem(last=False)
        self._faults.move_to_end(key)
        fault = self._faults[key]
        if fault is not None:
            raise InvalidRequest(fault, param=asked.param, code="invalid_grammar")
        return grammar

    def _fault(self, grammar: Grammar) -> str | None:
        try:
            if grammar.kind == "lark":
                check_lark(grammar.text)
            if self._tokens is None:
                self._tokens = token_table(self._tokenizer_json(), self._vocab_size, self._eos_token_ids)
            compile_grammar(self._tokens, grammar)
        except InvalidRequest as error:
            return error.message
        return None


def check_lark(lark: str) -> None:
    """Check a Lark grammar's intersections and the schemas behind its ``%json``. Raises InvalidRequest."""
    if lark_conjuncts(lark) > MAX_CONJUNCTS:
        raise InvalidRequest(f"a grammar may have at most {MAX_CONJUNCTS} of & and ~")
    for _ in schemas_in_lark(lark, param=""):
        pass
