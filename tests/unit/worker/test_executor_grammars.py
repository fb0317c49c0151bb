"""Requests with a grammar in an executor on the fake model, whose tokens are letters."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from services.worker.answer_grammars import LIGHTEST_BYTES, AnswerGrammars
from services.worker.detokenizer import Vocabulary
from shared.grammars import compile_grammar
from shared.messages.requests import Grammar, SamplingParams
from shared.messages.worker_plans import PreemptRequest
from tests.unit.worker.driven_executor import Driven, admit, batch, chunk
from tests.unit.worker.fake_model import EOS, VOCAB_SIZE

PROMPT = list(range(20, 26))


def letters() -> Vocabulary:
    """Token 20 is "a", 21 is "b" and so on, and text is cut into such tokens."""
    pieces = {
        chr(77 + number) if number >= 20 else f"<{number}>": number for number in range(VOCAB_SIZE) if number != EOS
    }
    tokenizer = Tokenizer(models.BPE({**pieces, "</s>": EOS}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return Vocabulary(tokenizer)


class Deferred(Executor):
    """Runs what is submitted when it is told to, or at once."""

    def __init__(self, *, at_once: bool = False) -> None:
        self.at_once = at_once
        self._work: deque[Callable[[], object]] = deque()

    def submit(self, work: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._work.append(lambda: future.set_result(work(*given, **named)))
        if self.at_once:
            self.run()
        return future

    def run(self) -> None:
        while self._work:
            self._work.popleft()()


class Cell:
    """A driven executor whose grammars are compiled when ``compiling`` runs."""

    def __init__(self, *, at_once: bool = True) -> None:
        self.compiling = Deferred(at_once=at_once)
        self.woken = 0
        words = letters()
        self.grammars = AnswerGrammars(
            words.tokenizer_json,
            VOCAB_SIZE,
            (EOS,),
            self._wake,
            compiling=self.compiling,
            following=Deferred(at_once=True),
        )
        self.driven = Driven(words=words, grammars=self.grammars)

    def _wake(self) -> None:
        self.woken += 1

    def begin(
        self, grammar: Grammar | None, output: str = "", *, attempt: int = 1, request_id: str = "r", **given: Any
    ) -> None:
        """Admit a request whose earlier attempts said ``output``, with its prefill."""
        params = SamplingParams(**{"max_tokens": 12, "temperature": 1.5, "seed": 5, "grammar": grammar, **given})
        tokens = PROMPT + [ord(letter) - 77 for letter in output]
        pages = range(10) if request_id == "r" else range(10, 20)
        self.driven.give(
            admit(tokens, pages, prompt_tokens=len(PROMPT), params=params, attempt=attempt, request_id=request_id),
            batch(chunk(0, len(tokens), attempt=attempt, request_id=request_id)),
        )


@pytest.fixture
def cell() -> Iterator[Cell]:
    made = Cell()
    yield made
    made.driven.close()


def regex(text: str) -> Grammar:
    return Grammar(kind="regex", text=text)


def test_an_answer_keeps_to_its_grammar_and_stops(cell: Cell) -> None:
    """The text matches, and the answer ends by itself where nothing more is allowed."""
    cell.begin(regex("[abc]{5}"))
    cell.driven.run()

    assert len(cell.driven.text()) == 5
    assert set(cell.driven.text()) <= set("abc")
    assert [each.reason for each in cell.driven.finished()] == ["stop"]


def test_a_preempted_answer_goes_on_alike(cell: Cell) -> None:
    """What is begun again behind any of its tokens has the same tokens in the end."""
    grammar = regex("(ab|ba|cab)+d")
    cell.begin(grammar)
    cell.driven.run()
    whole = cell.driven.text()
    for place in range(1, len(whole)):
        cell.begin(grammar, whole[:place], request_id="r", attempt=place + 1)
        cell.driven.run()
        told = [item for item in cell.driven.items() if item.attempt == place + 1]

        assert whole[:place] + "".join(item.text for item in told if item.index >= place) == whole


def test_tokens_do_not_depend_on_who_shares_the_step(cell: Cell) -> None:
    """A request has the same tokens alone and beside others, with and without grammars."""
    cell.begin(regex("[abc]{8}"))
    cell.driven.run()
    other = Cell()
    other.begin(None, request_id="free")
    other.begin(regex("[abc]{8}"))
    other.driven.run()
    shared = other.driven.text()
    other.driven.close()

    assert shared == cell.driven.text()


def test_a_request_waits_for_its_grammar_and_others_do_not() -> None:
    """While a grammar compiles, its request has its prompt computed and no token, and others get theirs."""
    cell = Cell(at_once=False)
    cell.begin(regex("[abc]{4}"))
    cell.begin(None, request_id="free")
    cell.driven.run()
    before = cell.driven.tokens()
    done = [event.failed for event in cell.driven.done()]
    free = len(cell.driven.tokens("free"))
    cell.compiling.run()
    woken = cell.woken
    cell.driven.run()
    cell.driven.close()

    assert before == []
    assert done == [(), ()]
    assert free == 12
    assert woken == 1
    assert len(cell.driven.text()) == 4


def test_a_held_token_is_the_one_that_would_have_been(cell: Cell) -> None:
    """Waiting for a grammar changes no token."""
    late = Cell(at_once=False)
    for each in (cell, late):
        each.begin(regex("[a-g]{6}"))
        each.driven.run()
    late.compiling.run()
    late.driven.run()
    text = late.driven.text()
    late.driven.close()

    assert text == cell.driven.text()


def test_a_request_may_be_preempted_while_it_waits() -> None:
    """A request that has no token yet is forgotten like any other."""
    cell = Cell(at_once=False)
    cell.begin(regex("[abc]{4}"))
    cell.driven.run()
    cell.driven.give(PreemptRequest(request_id="r", attempt=1))
    cell.driven.run()
    cell.compiling.run()
    cell.driven.run()
    preempted, tokens = cell.driven.preempted(), cell.driven.tokens()
    cell.driven.close()

    assert len(preempted) == 1
    assert tokens == []


def test_a_grammar_ends_before_min_tokens(cell: Cell) -> None:
    """The grammar outweighs min_tokens: the answer ends where nothing else is allowed, and not before."""
    cell.begin(regex("a{2}|a{4}"), min_tokens=8)
    cell.driven.run()

    assert cell.driven.text() == "aaaa"
    assert [each.reason for each in cell.driven.finished()] == ["stop"]


def test_a_stop_string_ends_a_grammar(cell: Cell) -> None:
    """A stop string ends the answer wherever the grammar is."""
    cell.begin(regex("(abc){3}"), stop=("ca",))
    cell.driven.run()

    assert cell.driven.text() == "ab"
    assert [each.reason for each in cell.driven.finished()] == ["stop"]


def test_what_does_not_compile_here_ends_its_request_alone(cell: Cell) -> None:
    """A grammar of another release's gateway is an error of its request, which says why; others go on."""
    cell.begin(Grammar(kind="lark", text="start: nothing"))
    cell.begin(None, request_id="free")
    cell.driven.run()
    failed = next(each for each in cell.driven.finished() if each.request_id == "r")

    assert failed.reason == "error"
    assert "unknown name" in failed.error
    assert len(cell.driven.tokens("free")) == 12


def test_output_that_contradicts_its_grammar_is_an_error(cell: Cell) -> None:
    """Tokens of an earlier attempt that the grammar does not allow end the request."""
    cell.begin(regex("a+"), "b")
    cell.driven.run()

    assert [each.reason for each in cell.driven.finished()] == ["error"]
    assert "cannot be kept to" in cell.driven.finished()[0].error


def test_grammars_of_callers_that_share_no_cache_are_compiled_apart(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first token that came sooner would show that another caller used the same grammar."""
    compiled: list[str] = []

    def compile_noted(tokens: Any, grammar: Grammar) -> Any:
        compiled.append(grammar.scope)
        return compile_grammar(tokens, grammar)

    monkeypatch.setattr("services.worker.answer_grammars.compile_grammar", compile_noted)
    for scope in ("", "one", "other", "one", ""):
        cell.grammars.begin(Grammar(kind="regex", text="[abc]", scope=scope), []).next_tokens()

    assert compiled == ["", "one", "other"]


def test_long_grammars_displace_one_another(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept compiled is bounded by the text of all, so a few long ones are as many short ones."""
    compiled: list[int] = []

    def compile_noted(tokens: Any, grammar: Grammar) -> Any:
        compiled.append(len(grammar.text))
        return compile_grammar(tokens, Grammar(kind="regex", text="[abc]"))

    monkeypatch.setattr("services.worker.answer_grammars.compile_grammar", compile_noted)
    short = [Grammar(kind="regex", text=f"a{{{count}}}") for count in range(1, 64)]
    for grammar in (*short, *short, Grammar(kind="regex", text="a" * 32 * LIGHTEST_BYTES), *short[-40:]):
        cell.grammars.begin(grammar, []).next_tokens()

    assert len(compiled) == len(short) + 1 + 40
