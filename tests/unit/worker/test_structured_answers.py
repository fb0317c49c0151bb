"""500 drawn schemas, each answered by a random model of its own through the sampler."""

from __future__ import annotations

import json
import re
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jsonschema import Draft202012Validator, FormatChecker  # type: ignore[import-untyped]

from services.gateway.grammars.schemas import json_schema_grammar
from services.worker.engine.sample_row import SampleRow
from services.worker.engine.sampler import sample
from shared.errors import InvalidRequest
from shared.grammars import compile_grammar, token_table
from shared.messages.requests import SamplingParams
from tests.unit.worker.random_schemas import SchemaDraw

SCHEMAS = 500
LONGEST = 300
VOCAB_SIZE, EOS = 2560, 2
TOKENIZER = (Path(__file__).parents[3] / "models/thermocline-mha/tokenizer.json").read_text()
TOKENS = token_table(TOKENIZER, VOCAB_SIZE, (EOS,))
_FORMATS = FormatChecker(formats=("date", "ipv4", "uuid", "email"))


def _is_time(value: object) -> bool:
    return not isinstance(value, str) or _is_moment(f"2024-01-01T{value}")


def _is_moment(value: object) -> bool:
    """RFC 3339: the offset is not optional, and a second may be a leap second."""
    if not isinstance(value, str):
        return True
    try:
        datetime.fromisoformat(re.sub(r":60", ":59", value.upper(), count=1))
    except ValueError:
        return False
    return re.search(r"(Z|[+-]\d\d:\d\d)$", value.upper()) is not None


_FORMATS.checks("time")(_is_time)
_FORMATS.checks("date-time")(_is_moment)


class RandomModel:
    """Logits that depend on the last token, and favour what ends strings, objects and answers."""

    def __init__(self, seed: int) -> None:
        self._logits = np.random.default_rng(seed).standard_normal((64, VOCAB_SIZE), dtype=np.float32)
        self._logits += _favour()

    def logits(self, output: list[int]) -> torch.Tensor:
        return torch.from_numpy(self._logits[((output or [0])[-1] + len(output)) % 64][None])


def _favour() -> np.ndarray:
    favour = np.zeros(VOCAB_SIZE, dtype=np.float32)
    for token in range(VOCAB_SIZE):
        if TOKENS.decode_str([token]) in ('"', "}", "]", ",", ":"):
            favour[token] = 7
    favour[EOS] = 6
    return favour


def answer(schema: dict[str, Any], seed: int) -> tuple[str, list[int]]:
    """Why the answer ended, and its tokens."""
    matcher = compile_grammar(TOKENS, json_schema_grammar(schema, param="schema"))
    model, output = RandomModel(seed), list[int]()
    params = SamplingParams(max_tokens=LONGEST, seed=seed)
    while len(output) < LONGEST:
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)
        (drawn,) = sample(model.logits(output), [SampleRow(params, len(output), allowed=mask)])
        assert drawn.error is None, drawn.error
        if drawn.token == EOS:
            return "stop", output
        output.append(drawn.token)
        assert matcher.consume_token(drawn.token), matcher.get_error()
    return "length", output


def test_every_answer_that_ends_by_itself_is_valid() -> None:
    """A random model under a drawn schema, unless that is refused, ends with JSON that is valid under it."""
    ends, invalid = Counter[str](), []
    for seed in range(SCHEMAS):
        schema = SchemaDraw(seed).schema()
        Draft202012Validator.check_schema(schema)
        try:
            why, output = answer(schema, seed)
        except InvalidRequest as refusal:
            why, output = refusal.code or refusal.message, []
        ends[why] += 1
        if why == "stop":
            said = json.loads(TOKENS.decode_str(output))
            validator = Draft202012Validator(schema, format_checker=_FORMATS)
            invalid += [(seed, error.message) for error in validator.iter_errors(said)]

    assert not invalid
    assert set(ends) == {"stop", "length", "unsupported_schema"}
    assert ends["unsupported_schema"] <= 0.1 * SCHEMAS, ends
    assert ends["stop"] >= 0.9 * (SCHEMAS - ends["unsupported_schema"]), ends


def test_a_grammar_is_where_its_tokens_are() -> None:
    """A matcher that is fed the tokens of an answer at once allows what the one allows that saw each being chosen."""
    for seed in range(40):
        try:
            grammar = json_schema_grammar(SchemaDraw(seed).schema(), param="schema")
        except InvalidRequest:
            continue
        followed, (_, output) = compile_grammar(TOKENS, grammar), answer(SchemaDraw(seed).schema(), seed)
        for place, token in enumerate(output):
            if place % 7 == seed % 7:
                resumed = compile_grammar(TOKENS, grammar).deep_copy()
                resumed.consume_tokens(output[:place])

                assert resumed.compute_bitmask() == followed.compute_bitmask()
            followed.consume_token(token)
