"""Grammars compiled by llguidance, alike in every process: the gateway checks what the worker will run.

Everything that decides which tokens a grammar allows is here and in ``Grammar.text``, so that a request that is resumed
elsewhere keeps the same grammar.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from shared.errors import InvalidRequest
from shared.messages.requests import MAX_GRAMMAR_BYTES, Grammar

STACK_BYTES: Final = 256 * 2**20
"""Address space for the stack of a compiling thread. Rules that refer to one another cost 4 KiB of it each, and as many
of them as :data:`MAX_GRAMMAR_BYTES` can name overflow the usual 8 MiB, which ends the process."""

JSON_OPTIONS: Final = {
    # A keyword that cannot be enforced is an error.
    "lenient": False,
    "coerce_one_of": False,
    # Whitespace between any two tokens, but bounded: a model that has lost its way would write blanks up to its limit.
    "whitespace_flexible": True,
    "whitespace_pattern": r" |\n(?: {0,32}|\t{0,8})",
    # With \u a key could be spelt in two ways, and its second spelling would follow another schema.
    "json_allowed_escapes": 'nrbtf\\"',
    "json_allow_general_unicode_escapes": False,
}
"""Options for the syntax of JSON, by llguidance's names."""

_LIMITS: Final = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=100_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
"""Limits that allow about 10 ms for the mask of one token, and tens of megabytes for one grammar, at most."""

_SHOWN_CHARACTERS = 400


def token_table(tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Return llguidance's table of a model's tokens; logits have ``vocab_size`` columns. Takes up to a second.

    Raises InvalidRequest where no grammar can be enforced: a model without a token that ends an answer, or whose tokens
    are not bytes of text.
    """
    if not eos_token_ids:
        raise InvalidRequest("this model has no token that ends an answer, so a grammar cannot be kept to")
    try:
        found = LLTokenizer(tokenizer_json, eos_token=list(eos_token_ids))
        if found.vocab_size < vocab_size:
            found = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids))
    except Exception as error:  # PyO3 raises different types, by kind of tokenizer.
        raise InvalidRequest(f"a grammar cannot be kept to with this model's tokenizer: {error}") from error
    return found


def compile_grammar(tokens: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """Return a matcher at the beginning of an answer. Releases the interpreter's lock.

    Must run in a thread of :func:`compiling_thread`. Raises InvalidRequest for a grammar that does not compile, allows
    no token, or is too complex.
    """
    if len(grammar.text.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"a grammar may have {MAX_GRAMMAR_BYTES} bytes")
    try:
        match grammar.kind:
            case "json_schema":
                text = LLMatcher.grammar_from_json_schema(grammar.text, overrides=JSON_OPTIONS)  # type: ignore[arg-type]
            case "regex":
                text = LLMatcher.grammar_from_regex(grammar.text)
            case "lark":
                text = LLMatcher.grammar_from_lark(grammar.text)
        matcher = LLMatcher(tokens, text, log_level=0, limits=_LIMITS)
    except ValueError as error:
        raise InvalidRequest(f"the grammar does not compile: {error}") from error
    if not matcher.is_error() and not any(matcher.compute_bitmask()):
        raise InvalidRequest("the grammar allows no token")
    if matcher.is_error():
        raise InvalidRequest(f"the grammar does not compile: {grammar_fault(matcher)}")
    return matcher


def grammar_fault(matcher: LLMatcher) -> str:
    """Return a matcher's error in one line of bounded length; "" for a valid matcher."""
    lines = (line.strip() for line in matcher.get_error().splitlines())
    fault = " ".join(line for line in lines if line)
    return fault if len(fault) <= _SHOWN_CHARACTERS else f"{fault[:_SHOWN_CHARACTERS]}..."


def compiling_thread(name: str) -> ThreadPoolExecutor:
    """Return an executor of one thread, with the stack that compiling needs."""
    executor = ThreadPoolExecutor(1, thread_name_prefix=name)
    usual = threading.stack_size(STACK_BYTES)
    try:
        executor.submit(int).result()  # The thread starts only now.
    finally:
        threading.stack_size(usual)
    return executor
