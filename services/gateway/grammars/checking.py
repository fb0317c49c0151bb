"""Compilation checks of grammars, in a thread of their own before anything of the request is submitted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Final

import msgspec
from llguidance import LLTokenizer

from services.gateway.grammars.conjunctions import MAX_CONJUNCTS, lark_conjuncts
from services.gateway.grammars.requested import Asked
from services.gateway.grammars.schemas import schemas_in_lark
from services.gateway.tenants import Tenant
from shared.errors import InvalidRequest, Unavailable
from shared.fair_cache import FairCache
from shared.grammars import compile_grammar, compiling_thread, token_table
from shared.ids import key_digest
from shared.messages.requests import Grammar

REMEMBERED: Final = 256
"""Limit on the grammars whose result is remembered, of all tenants together; each is at most 64 KiB."""

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
        self._faults: FairCache[tuple[str, str], str | None] = FairCache(REMEMBERED)

    async def made(self, asked: Asked | None, *, scope: str = "") -> Grammar | None:
        """Return the grammar of a request of this scope (:func:`scope_of`) once it compiles, or None without one.

        Raises InvalidRequest, and Unavailable where too many others are being checked.
        """
        return None if asked is None else await self._in_thread(lambda: self._made(asked, scope))

    async def checked(self, grammar: Grammar, *, param: str, scope: str = "") -> Grammar:
        """Return a grammar as :meth:`made` does, with ``param`` as the field at fault."""
        return await self._in_thread(lambda: self._made(Asked(param, lambda: grammar), scope))

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

    def _made(self, asked: Asked, scope: str) -> Grammar:
        """Return the grammar if it compiles. Runs in the executor's thread. Raises InvalidRequest."""
        grammar = msgspec.structs.replace(asked.make(), scope=scope)
        key = (grammar.kind, grammar.text)
        if (scope, key) not in self._faults:
            self._faults.keep(scope, key, self._fault(grammar))
        fault = self._faults.use(scope, key)
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


def scope_of(tenant: Tenant, cache_salt: str | None) -> str:
    """Return the ``Grammar.scope`` of a tenant's request: requests that share no KV share no compiled grammars."""
    if not tenant.salt and not cache_salt:
        return ""
    return key_digest(f"grammar {len(tenant.salt)} {tenant.salt}{cache_salt or ''}")


def check_lark(lark: str) -> None:
    """Check a Lark grammar's intersections and the schemas behind its ``%json``. Raises InvalidRequest."""
    if lark_conjuncts(lark) > MAX_CONJUNCTS:
        raise InvalidRequest(f"a grammar may have at most {MAX_CONJUNCTS} of & and ~")
    for _ in schemas_in_lark(lark, param=""):
        pass
