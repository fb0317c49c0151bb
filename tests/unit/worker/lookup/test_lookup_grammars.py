"""Proposals of answers that keep to a grammar."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.answer_grammars import AnswerGrammars
from shared.messages.requests import Grammar, SamplingParams
from tests.unit.worker.driven_executor import Driven, admit, batch, chunk
from tests.unit.worker.fake_model import EOS, VOCAB_SIZE
from tests.unit.worker.lookup.copying_model import CopyingRunner
from tests.unit.worker.test_executor_grammars import Deferred, letters

PATTERNS = ("(ab|ba|cc)*", "a+b*", "([a-f]{1,5}f)*", "(abc){2,9}d", "[a-t]*", "ab")
MOST = 8


@contextmanager
def driven(lookup_tokens: int) -> Iterator[Driven]:
    words = letters()
    grammars = AnswerGrammars(
        words.tokenizer_json,
        VOCAB_SIZE,
        (EOS,),
        lambda: None,
        compiling=Deferred(at_once=True),
        following=Deferred(at_once=True),
    )
    made = Driven(CopyingRunner(sharpness=4.0), words, grammars=grammars, lookup_tokens=lookup_tokens)
    try:
        yield made
    finally:
        made.close()


def answer(made: Driven, prompt: list[int], params: SamplingParams) -> list[tuple[object, ...]]:
    made.give(admit(prompt, range(20), params=params), batch(chunk(0, len(prompt))))
    made.run()
    return [(item.index, item.tokens, item.text, item.logprobs, item.finish, item.error) for item in made.items()]


@given(
    pattern=st.sampled_from(PATTERNS),
    prompt=st.lists(st.integers(20, 25), min_size=2, max_size=24),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 2**63 - 1),
    min_tokens=st.integers(0, 5),
    logprobs=st.sampled_from([None, 2]),
)
def test_answers_are_those_without_proposals(
    pattern: str, prompt: list[int], temperature: float, seed: int, min_tokens: int, logprobs: int | None
) -> None:
    """Whatever the grammar allows, and whatever of the proposals it does not."""
    params = SamplingParams(
        max_tokens=40,
        temperature=temperature,
        seed=seed,
        min_tokens=min_tokens,
        logprobs=logprobs,
        grammar=Grammar(kind="regex", text=pattern),
    )
    with driven(0) as without, driven(MOST) as with_lookup:
        assert answer(with_lookup, prompt, params) == answer(without, prompt, params)


def test_a_grammar_follows_several_tokens_a_step() -> None:
    """Proposals that it allows are accepted: what a loop allows is said in fewer steps than it has tokens."""
    params = SamplingParams(max_tokens=40, temperature=0, grammar=Grammar(kind="regex", text="(abc){12}"))
    with driven(0) as without, driven(MOST) as with_lookup:
        prompt = [20, 21, 22] * 4

        assert answer(with_lookup, prompt, params) == answer(without, prompt, params)
        assert with_lookup.executor.counters.tokens_accepted > 10


@pytest.mark.parametrize("proposed", [[21], [20, 20, 20], [20, 21, EOS, 20]])
def test_a_proposal_that_is_forbidden_ends_what_is_looked_at(proposed: list[int]) -> None:
    """There are masks behind tokens that may come, up to the first that may not; the answer stays where it is."""
    with driven(MOST) as made:
        grammar = made.executor._grammars.begin(Grammar(kind="regex", text="ab"), [])
        before = grammar.next_tokens().words.tolist()

        grammar.look_ahead(proposed)

        assert len(grammar.tokens_ahead()) == [[21], [20, 20, 20], [20, 21, EOS, 20]].index(proposed)
        assert grammar.next_tokens().words.tolist() == before
