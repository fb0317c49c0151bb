"""Tokens of texts of which parts are known are those of a full encode."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from services.gateway.known_texts.boundaries import prove
from services.gateway.known_texts.encoding import encode_known
from services.gateway.known_texts.index import KnownTexts
from services.gateway.known_texts.special_ids import special_ids
from shared.packed_tokens import PackedTokens
from tests.fuzz.text_run import SESSION, TextFigures, run_texts
from tests.fuzz.text_tokenizers import KINDS

BACKEND = KINDS["llama3"]()
BOUNDARIES = prove(msgspec.json.decode(BACKEND.to_str()))


class Encoder:
    """The tokenizer, and which texts it was asked for."""

    def __init__(self, backend: Any = BACKEND) -> None:
        self._backend = backend
        self.asked: list[list[str]] = []

    def __call__(self, texts: Sequence[str]) -> list[PackedTokens]:
        self.asked.append(list(texts))
        return [PackedTokens.of(each.ids) for each in self._backend.encode_batch_fast(texts, add_special_tokens=False)]


def prose(words: int, seed: int = 1) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choices(["the", "keeper", "of", "light", "12", "ships,", "東京"], k=words))


def test_random_changes_of_texts_and_chats_have_the_tokens_of_a_full_encode() -> None:
    """For each kind of tokenizer and template; ``python -m tests.fuzz texts`` tries more."""
    figures = TextFigures()

    run_texts(4, 0, 24 * SESSION, figures)

    assert figures.found == []
    assert figures.cases == 24 * SESSION
    assert len(figures.by_kind) == len(KINDS) + 3
    assert figures.known > 4 * figures.cases


def test_only_what_is_new_is_encoded() -> None:
    """In one call, and at most a segment beside it."""
    index, encode = KnownTexts(2**20), Encoder()
    text = prose(5_000)
    encode_known(text, "n", BOUNDARIES, index, encode)
    encode.asked.clear()

    tokens = encode_known(text + " and more", "n", BOUNDARIES, index, encode)

    assert tokens == BACKEND.encode(text + " and more", add_special_tokens=False).ids
    ((asked,),) = encode.asked
    assert asked.endswith(" and more")
    assert len(asked) < BOUNDARIES.usual_characters + 20


def test_a_change_in_one_message_leaves_the_others_known() -> None:
    """Wherever they stand."""
    index, encode = KnownTexts(2**20), Encoder()
    messages = [f"<|start_header_id|>user<|end_header_id|>\n\n{prose(800, seed)}<|eot_id|>" for seed in range(8)]
    encode_known("".join(messages), "n", BOUNDARIES, index, encode)
    encode.asked.clear()
    changed = [messages[0].replace("keeper", "captain"), *messages[1:]]

    tokens = encode_known("".join(changed), "n", BOUNDARIES, index, encode)

    assert tokens == BACKEND.encode("".join(changed), add_special_tokens=False).ids
    assert sum(map(len, encode.asked[0])) < len(messages[0]) + len(messages[1])


def test_another_namespace_finds_nothing() -> None:
    """Tenants with salts are kept apart."""
    index, encode = KnownTexts(2**20), Encoder()
    text = prose(2_000)
    for namespace in ("one", "other"):
        encode_known(text, namespace, BOUNDARIES, index, encode)

    assert encode.asked[0] == encode.asked[1]


def test_an_index_without_room_changes_nothing() -> None:
    """Everything is encoded each time."""
    index, encode = KnownTexts(1), Encoder()
    text = prose(2_000)
    made = [encode_known(text, "n", BOUNDARIES, index, encode) for _ in range(2)]

    assert made[0] == made[1] == BACKEND.encode(text, add_special_tokens=False).ids
    assert encode.asked[0] == encode.asked[1]
    assert index.nbytes == 0


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_around_a_text_are_those_of_the_post_processor(kind: str) -> None:
    """So they need not be asked for."""
    backend = KINDS[kind]()
    around = special_ids(msgspec.json.decode(backend.to_str())["post_processor"])

    assert around is not None
    assert [*around[0], *backend.encode("the light", add_special_tokens=False).ids, *around[1]] == (
        backend.encode("the light").ids
    )


@pytest.mark.parametrize(
    "told",
    [
        {"type": "Other"},
        {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A"}}] * 2, "special_tokens": {}},
        {"type": "Sequence", "processors": [{"type": "ByteLevel"}, {"type": "Other"}]},
    ],
)
def test_an_unknown_post_processor_is_asked_each_time(told: dict[str, object]) -> None:
    """What it puts around texts is not known."""
    assert special_ids(told) is None
