"""What compiles, what does not, and that nothing that is asked for ends the process."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from shared.errors import InvalidRequest
from shared.grammars import compile_grammar, compiling_thread, token_table
from shared.messages.requests import MAX_GRAMMAR_BYTES, Grammar

TOKENIZER = (Path(__file__).parents[3] / "models/thermocline-mha/tokenizer.json").read_text()
TOKENS = token_table(TOKENIZER, 2600, (2, 1))


@pytest.fixture(scope="module")
def thread() -> Iterator[Executor]:
    executor = compiling_thread("test")
    yield executor
    executor.shutdown()


def schema(text: object) -> Grammar:
    return Grammar(kind="json_schema", text=json.dumps(text))


def accepts(grammar: Grammar, text: str) -> bool:
    matcher = compile_grammar(TOKENS, grammar)
    tokens = TOKENS.tokenize_str(text)
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


def allowed(grammar: Grammar, said: str) -> list[int]:
    matcher = compile_grammar(TOKENS, grammar)
    assert matcher.consume_tokens(TOKENS.tokenize_str(said)), matcher.get_error()
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


@pytest.mark.parametrize(
    ("grammar", "valid", "invalid"),
    [
        (schema({"type": "object"}), '{"a": [1, {"b": null}]}', "[1]"),
        (schema({"type": "array", "items": {"type": "integer"}}), "[\n    1,\n    2\n]", "[\n\n1]"),
        (schema({"type": "object"}), '{"a":1}', '{"a":  1}'),
        (Grammar(kind="regex", text="^[a-c]+$"), "abc", "abd"),
        (Grammar(kind="lark", text='start: "x" | "xy" r\nr: %json {"type": "integer"}'), "xy12", "y"),
        (Grammar(kind="lark", text='start: %regex {"substring_words": "a b c"}'), "b c", "a c"),
    ],
)
def test_grammars_of_every_kind(grammar: Grammar, valid: str, invalid: str) -> None:
    """A JSON schema, a regular expression and a Lark grammar allow what they say, and bounded whitespace in JSON."""
    assert accepts(grammar, valid)
    assert not accepts(grammar, invalid)


def test_a_key_has_one_spelling() -> None:
    """A key cannot be written with an escape, under which it would be held to the schema of unknown keys."""
    grammar = schema({"type": "object", "properties": {"a": {"type": "string"}}})

    assert accepts(grammar, '{"a": "x"}')
    assert not accepts(grammar, '{"a": 1}')
    assert not accepts(grammar, '{"\\u0061": 1}')


def test_special_tokens_stand_by_name_or_number() -> None:
    """A Lark grammar can ask for special tokens."""
    assert allowed(Grammar(kind="lark", text='start: <|end|> "a"'), "") == [2]
    assert allowed(Grammar(kind="lark", text='start: <[5]> "a"'), "") == [5]


def test_the_end_is_any_token_that_ends_answers() -> None:
    """A finished answer allows every EOS token and nothing else; no token beyond the tokenizer is ever allowed."""
    grammar = schema({"enum": [1]})

    assert allowed(grammar, "1") == [1, 2]
    assert max(allowed(schema({"type": "string"}), '"')) < 2560


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (schema({"not": {"type": "string"}}), "not"),
        (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema({"type": "string", "format": "iri"}), "iri"),
        (schema({"oneOf": [{"type": "string"}, {"minLength": 2}]}), "oneOf"),
        (schema({"type": "integer", "minimum": 3, "maximum": 2}), "Unsatisfiable"),
        (schema({"$ref": "http://example.com/x"}), "example.com"),
        (schema({"$ref": "#/$defs/a"}), "a"),
        (schema({"type": "strin"}), "strin"),
        (Grammar(kind="json_schema", text="{"), "EOF"),
        (Grammar(kind="json_schema", text="[]"), "object"),
        (Grammar(kind="regex", text="("), "unclosed"),
        (Grammar(kind="regex", text="(?=a)a"), "look-around"),
        (Grammar(kind="lark", text="start: a"), "unknown name"),
        (Grammar(kind="lark", text="start: <|nothing|>"), "special token"),
        (Grammar(kind="regex", text=r"[^\s\S]"), ""),
        (Grammar(kind="regex", text="a" * (MAX_GRAMMAR_BYTES + 1)), "65536"),
    ],
)
def test_what_does_not_compile(grammar: Grammar, said: str) -> None:
    """What cannot be kept to is refused, and the message names it."""
    with pytest.raises(InvalidRequest) as refusal:
        compile_grammar(TOKENS, grammar)

    assert said in refusal.value.message
    assert len(refusal.value.message) < 600


def test_a_model_without_an_end_keeps_to_no_grammar() -> None:
    """Without an EOS token an answer under a grammar could not end."""
    with pytest.raises(InvalidRequest, match="no token that ends"):
        token_table(TOKENIZER, 2560, ())


def test_a_tokenizer_of_another_kind_keeps_to_no_grammar() -> None:
    """A tokenizer that llguidance cannot read is refused with its reason."""
    with pytest.raises(InvalidRequest, match="tokenizer"):
        token_table("{}", 10, (1,))


def _chain() -> str:
    rules, length, number = ["start: r0"], 9, 0
    while length < MAX_GRAMMAR_BYTES - 40:
        rules.append(f"r{number}:r{number + 1}")
        number, length = number + 1, length + len(rules[-1]) + 1
    return "\n".join([*rules, f'r{number}:"a"'])


def _references() -> str:
    number = 1250
    definitions = {f"d{each}": {"items": {"$ref": f"#/$defs/d{each + 1}"}} for each in range(number)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{number}": {}}})


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("lark", _chain()),
        ("lark", _chain().replace("r", "R").replace("staRt", "start")),
        ("lark", "start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
        ("json_schema", _references()),
        ("json_schema", '{"items":' * 6000 + "{}" + "}" * 6000),
        ("regex", "(" * 30_000 + "a" + ")" * 30_000),
        ("regex", "((a{1000}){1000}){1000}"),
    ],
)
def test_deep_texts_end_no_process(thread: Executor, kind: Literal["json_schema", "regex", "lark"], text: str) -> None:
    """The deepest texts that are short enough compile or are refused, and what compiled is dropped in any thread."""
    assert len(text) <= MAX_GRAMMAR_BYTES
    compiling = thread.submit(compile_grammar, TOKENS, Grammar(kind=kind, text=text))
    error = compiling.exception()
    if error is None:
        matcher = compiling.result().deep_copy()
        thread.submit(matcher.compute_bitmask).result()
        del matcher
    del compiling
    gc.collect()

    assert error is None or isinstance(error, InvalidRequest)
