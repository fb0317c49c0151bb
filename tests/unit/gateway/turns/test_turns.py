"""Answers keep their ids from turn to turn, whatever the template writes around them."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import msgspec
import pytest

from services.gateway.pending import Generation
from services.gateway.tokenizer import Tokenizer
from services.gateway.turns.answer_store import AnswerStore
from services.gateway.turns.memory import AnswerMemory
from services.gateway.turns.splicing import Fate
from services.gateway.turns.template_shape import TemplateShape
from services.gateway.turns.turns import MOST_LOOKUPS, SHORT_TOKENS, Turns
from shared.messages.requests import CacheHints
from shared.messages.tokens import Usage
from tests.memory_bus import MemoryBroker
from tests.unit.gateway.turns.chats import (
    CHATML,
    CHATML_THINKS,
    HEADERS,
    INST,
    MOST,
    NAMESPACE,
    PLAIN,
    Prompt,
    choice_of,
    make_tokenizer,
    talk,
    words_of,
)

MEMORY_BYTES = 2**24


def fresh(tokenizer: Tokenizer) -> Turns:
    return Turns(tokenizer, AnswerMemory(MEMORY_BYTES), None)


def without(tokenizer: Tokenizer) -> Turns:
    return Turns(tokenizer, None, None)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def spelt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of single letters, which the tokenizer would not give back."""
    return [token for letter in text for token in tokenizer.encode_rendered(letter)]


def goes_on(turns: Turns, tokenizer: Tokenizer, text: str, **more: str) -> Prompt:
    """The prompt of a client who asked who, keeps this text as the answer, and asks on."""
    return Prompt(turns, tokenizer, [user("who?"), assistant(text), user("and then?")], **more)


def is_kept(following: Prompt, first: Prompt, said: list[int]) -> bool:
    """Whether a prompt goes on from the one before it, and from all ids that were said."""
    expected = first.tokens + said
    return following.fates == (Fate.KEPT,) and following.tokens[: len(expected)] == expected


@pytest.mark.parametrize("template", [CHATML, CHATML_THINKS, INST, PLAIN], ids=["chatml", "thinks", "inst", "plain"])
@pytest.mark.parametrize("plain_content", [False, True], ids=["tokens", "text"])
def test_every_prompt_goes_on_from_the_last_prompt_and_its_answer(
    tmp_path: Path, template: str, plain_content: bool
) -> None:
    """In forty turns of random ids, which no tokenizer would give back."""
    tokenizer = make_tokenizer(tmp_path, template, plain_content=plain_content)

    told = talk(fresh(tokenizer), tokenizer, 40, random.Random(1))

    for prompt, answer, following in told:
        assert following.fates[-1] is Fate.KEPT
        expected = prompt.tokens + words_of(tokenizer, answer)
        assert following.tokens[: len(expected)] == expected
        assert tokenizer.rendered_text(following.tokens) == tokenizer.rendered_text(
            tokenizer.encode_rendered(following.text)
        )
    usual = talk(without(tokenizer), tokenizer, 40, random.Random(1))
    assert any(
        following.tokens[: len(prompt.tokens) + len(answer) - 1] != prompt.tokens + answer[:-1]
        for prompt, answer, following in usual
    )


def test_pieces_with_spaces_put_before_are_kept_where_the_text_is_the_same(tmp_path: Path) -> None:
    """A tokenizer whose texts cannot be cut anywhere: kept or told, and never another text."""
    tokenizer = make_tokenizer(tmp_path, CHATML, pieces=True)
    assert not tokenizer.joins_exactly

    told = talk(fresh(tokenizer), tokenizer, 20, random.Random(2))

    kept = 0
    for prompt, answer, following in told:
        usual = tokenizer.encode_rendered(following.text)
        assert tokenizer.decode_exactly(following.tokens) == tokenizer.decode_exactly(usual)
        expected = prompt.tokens + words_of(tokenizer, answer)
        if following.fates[-1] is Fate.KEPT:
            kept += 1
            assert following.tokens[: len(expected)] == expected
    assert kept


def test_trimmed_answer_keeps_all_but_its_last_word(tmp_path: Path) -> None:
    """Llama 3's template trims; what stands before the trimmed space is as it was said."""
    tokenizer = make_tokenizer(tmp_path, HEADERS)
    turns = fresh(tokenizer)
    first = Prompt(turns, tokenizer, [user("who?")])
    said = spelt(tokenizer, "the keeper of the light ")
    first.answer(said)

    following = goes_on(turns, tokenizer, tokenizer.decode(said))

    assert following.fates == (Fate.CUT,)
    kept = said[: len("the keeper of the")]
    assert following.tokens[: len(first.tokens) + len(kept)] == first.tokens + kept
    assert tokenizer.decode(following.tokens) == following.text


def test_answer_cut_by_its_client_is_kept_as_far_as_it_goes(tmp_path: Path) -> None:
    """As a stop string does, or somebody who stops reading."""
    tokenizer = make_tokenizer(tmp_path, CHATML)
    turns = fresh(tokenizer)
    first = Prompt(turns, tokenizer, [user("who?")])
    said = spelt(tokenizer, "it is crimson and then")
    first.answer(said)

    following = goes_on(turns, tokenizer, "it is crims")

    assert following.fates == (Fate.CUT,)
    kept = said[: len("it is")]
    assert following.tokens[: len(first.tokens) + len(kept)] == first.tokens + kept
    assert tokenizer.decode(following.tokens) == following.text


@pytest.mark.parametrize(
    ("content", "fate"),
    [
        ("<think>hm</think>\n\nit is crimson", Fate.FRONT_CUT),
        ("it is blue", Fate.UNKNOWN),
    ],
    ids=["reasoning", "another"],
)
def test_lost_ids_are_counted_with_their_reason(tmp_path: Path, content: str, fate: Fate) -> None:
    """Stripped reasoning is no fault of the memory's, and an answer that nobody gave is unknown."""
    tokenizer = make_tokenizer(tmp_path, CHATML_THINKS)
    turns = fresh(tokenizer)
    first = Prompt(turns, tokenizer, [user("who?")])
    if fate is not Fate.UNKNOWN:
        first.answer(tokenizer.encode_rendered(content))

    following = goes_on(turns, tokenizer, content)

    assert following.fates == (fate,)
    assert following.tokens == tokenizer.encode_rendered(following.text)


def test_edited_answer_is_changed_and_one_behind_an_edit_has_moved(tmp_path: Path) -> None:
    """What stands before an answer belongs to it."""
    tokenizer = make_tokenizer(tmp_path, CHATML)
    turns = fresh(tokenizer)
    Prompt(turns, tokenizer, [user("who?")]).answer(tokenizer.encode_rendered("the keeper"))

    edited = goes_on(turns, tokenizer, "a crane")
    moved = Prompt(turns, tokenizer, [user("what?"), assistant("the keeper"), user("and then?")])

    assert edited.fates == (Fate.CHANGED,)
    assert moved.fates == (Fate.MOVED,)


def test_namespaces_never_meet(tmp_path: Path) -> None:
    """The same words, said to another tenant, are tokenised anew."""
    tokenizer = make_tokenizer(tmp_path, CHATML)
    turns = fresh(tokenizer)
    said = spelt(tokenizer, "the keeper")
    Prompt(turns, tokenizer, [user("who?")]).answer(said)

    own = goes_on(turns, tokenizer, "the keeper")
    other = goes_on(turns, tokenizer, "the keeper", namespace="f" * 32)

    assert own.fates == (Fate.KEPT,)
    assert other.fates == (Fate.UNKNOWN,)
    assert other.tokens == tokenizer.encode_rendered(other.text) != own.tokens


def test_the_choice_that_the_client_goes_on_with_is_kept(tmp_path: Path) -> None:
    """Of several answers to one question, also where one is another's beginning."""
    tokenizer = make_tokenizer(tmp_path, CHATML)
    turns = fresh(tokenizer)
    first = Prompt(turns, tokenizer, [user("who?")])
    answers = [spelt(tokenizer, text) for text in ("the", "the keeper", "a crane")]
    first.answer(*answers)

    for answer in answers:
        assert is_kept(goes_on(turns, tokenizer, tokenizer.decode(answer)), first, answer)


def test_broken_characters_stay_as_they_were_said(tmp_path: Path) -> None:
    """Their text is U+FFFD, which the tokenizer would write as three bytes of its own."""
    tokenizer = make_tokenizer(tmp_path, CHATML)
    turns = fresh(tokenizer)
    first = Prompt(turns, tokenizer, [user("who?")])
    said = tokenizer.encode_rendered("é")
    byte = tokenizer._tokenizer.convert_tokens_to_ids("Ã")
    answer = [*said, byte, *tokenizer.encode_rendered(" then")]
    first.answer(answer)

    text = tokenizer.decode(answer)

    assert "\ufffd" in text
    assert is_kept(goes_on(turns, tokenizer, text), first, answer)


def test_special_token_in_an_answers_text_is_what_the_model_said(tmp_path: Path) -> None:
    """Spelt out in ordinary tokens it stays so, and does not become the template's token."""
    tokenizer = make_tokenizer(tmp_path, CHATML)
    turns = fresh(tokenizer)
    first = Prompt(turns, tokenizer, [user("who?")])
    answer = spelt(tokenizer, "<|im_end|> no")
    first.answer(answer)

    assert is_kept(goes_on(turns, tokenizer, tokenizer.decode(answer)), first, answer)


@pytest.mark.parametrize("case", ["write", "lossy", "room"])
def test_what_is_not_to_be_kept_is_not_remembered(tmp_path: Path, case: str) -> None:
    """Answers of requests that write no KV, or build on a part of their prefix; and all where there is no room."""
    tokenizer = make_tokenizer(tmp_path, CHATML)
    turns = Turns(tokenizer, AnswerMemory(1 if case == "room" else MEMORY_BYTES), None)
    prompt = Prompt(turns, tokenizer, [user("who?")])
    choice = choice_of(prompt.tokens, spelt(tokenizer, "keeper"))
    if case == "write":
        choice.request = msgspec.structs.replace(choice.request, cache=CacheHints(write=False))
    if case == "lossy":
        choice.assembly.lossy = {1: Usage()}

    turns.ended(prompt.turn, Generation([choice]))

    following = goes_on(turns, tokenizer, "keeper")
    assert following.fates == (Fate.UNKNOWN,)
    assert following.tokens == tokenizer.encode_rendered(following.text)


def test_too_many_ids_for_the_context_are_the_tokenizers_own(tmp_path: Path) -> None:
    """A conversation that fits is not refused for the way in which its answers were said."""
    tokenizer = make_tokenizer(tmp_path, CHATML)
    turns = fresh(tokenizer)
    Prompt(turns, tokenizer, [user("who?")]).answer(spelt(tokenizer, "the keeper"))
    messages = [user("who?"), assistant("the keeper"), user("and then?")]
    usual = tokenizer.encode_chat(messages)
    opened = turns.open(tokenizer.render(messages), tokenizer.shape({}), NAMESPACE, 1)

    assert turns.tokens(opened, len(usual) + 1).tokens == usual
    assert len(turns.tokens(opened, 2 * len(usual)).tokens) > len(usual) + 1
    assert turns.tokens(opened, len(usual) + 1).fates == (Fate.REFUSED,)


async def test_a_long_answer_is_known_a_moment_later(tmp_path: Path) -> None:
    """It is decoded in a thread."""
    tokenizer = make_tokenizer(tmp_path, CHATML)
    turns = fresh(tokenizer)
    first = Prompt(turns, tokenizer, [user("who?")])
    said = spelt(tokenizer, "keeper " * (SHORT_TOKENS // 7 + 1))
    first.answer(said)
    running = asyncio.create_task(turns.run())
    await turns.drain(60)
    running.cancel()

    assert is_kept(goes_on(turns, tokenizer, tokenizer.decode(said)), first, said)


def test_many_who_ask_the_same_each_go_on_from_their_own(tmp_path: Path) -> None:
    """Openings of conversations are alike; an answer of the same text is the one that was said first."""
    tokenizer = make_tokenizer(tmp_path, CHATML)
    turns, rng = fresh(tokenizer), random.Random(3)
    first = Prompt(turns, tokenizer, [user("who?")])
    answers = [spelt(tokenizer, f"the keeper {number}") for number in range(60)]
    first.answer(*answers)
    first.answer(tokenizer.encode_rendered("the keeper 7"))

    for answer in [*rng.sample(answers, 20), answers[7]]:
        assert is_kept(goes_on(turns, tokenizer, tokenizer.decode(answer)), first, answer)


@pytest.mark.parametrize(("answer", "stored"), [("the keeper", 0), ("\n the keeper", 1)], ids=["usual", "joins"])
async def test_what_the_tokenizer_gives_back_is_not_stored(tmp_path: Path, answer: str, stored: int) -> None:
    """An answer that begins with a line break would join the template's, where the tokenizer has a token for two."""
    tokenizer, broker = make_tokenizer(tmp_path, CHATML), MemoryBroker()
    (pair,) = tokenizer.encode_rendered("\n\n")
    turns = Turns(tokenizer, AnswerMemory(MEMORY_BYTES), AnswerStore(broker.connect("one"), 1.0, lambda: 0.0))
    running = asyncio.create_task(turns.run())
    Prompt(turns, tokenizer, [user("who?")]).answer([*tokenizer.encode_rendered(answer), max(tokenizer.special_ids)])

    await turns.drain(60)
    running.cancel()

    assert pair != tokenizer.encode_rendered("\n")[0]
    assert len(broker.answers) == stored


async def test_as_many_answers_are_looked_up_as_is_bounded(tmp_path: Path) -> None:
    """The earliest ones; and none where the template does not tell what ends an answer."""
    tokenizer = make_tokenizer(tmp_path, CHATML)
    turns = Turns(tokenizer, AnswerMemory(MEMORY_BYTES), AnswerStore(MemoryBroker().connect("one"), 60.0, lambda: 0.0))
    messages = [user("who?"), assistant("the keeper")] * (MOST_LOOKUPS + 5)
    text = tokenizer.render([*messages, user("and then?")])
    shape = tokenizer.shape({})
    opened = turns.open(text, shape, NAMESPACE, len(messages) // 2)

    assert [entry.place for entry in opened.unknown] == opened.places[:MOST_LOOKUPS]
    await turns.look_up(opened)
    assert turns.tokens(opened, MOST).tokens == tokenizer.encode_rendered(text)
    again = turns.open(text, shape, NAMESPACE, len(messages) // 2)
    assert [entry.place for entry in again.unknown] == opened.places[MOST_LOOKUPS:-1]
    assert turns.open(text, TemplateShape(shape.opening), NAMESPACE, len(messages) // 2).unknown == []
