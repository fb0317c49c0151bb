"""Long texts that begin as others did are compared with them, and what is known of these is theirs."""

from __future__ import annotations

import random
import re
import sys
import threading

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.known_texts.boundaries import Boundaries, prove
from services.gateway.known_texts.encoding import encode_known
from services.gateway.known_texts.fronts import CUT_BYTES, NOTHING, Fronts
from services.gateway.known_texts.index import KnownTexts
from services.gateway.known_texts.segments import segments
from tests.fuzz.text_tokenizers import KINDS
from tests.unit.gateway.known_texts.test_encoding import BACKEND, BOUNDARIES, Encoder, prose

SMALL = Boundaries(
    re.compile("<end>"), re.compile("[a-z](?= )"), least_characters=4, usual_characters=12, ahead_characters=5
)
TEXTS = st.lists(st.sampled_from(["word", " ", "x", "<end>", "<e", "nd>", "........"]), max_size=60).map("".join)


def kept(fronts: Fronts, text: str, namespace: str = "n") -> None:
    """Keep a text of which each character is a token."""
    known = fronts.find(namespace, text, SMALL.ahead_characters)
    cut = segments(text, SMALL, known.end, known.start)
    parts = [b"".join(ord(each).to_bytes(4, "little") for each in text[start:end]) for start, end in cut.closed]
    fronts.keep(namespace, text, known, cut, parts)


@given(front=TEXTS, one=TEXTS, other=TEXTS)
def test_what_is_known_is_a_front_of_both_that_is_cut_in_both(front: str, one: str, other: str) -> None:
    """With the tokens of that front; and the rest is cut as it would be behind that cut."""
    fronts = Fronts(2**20, least_characters=8)
    kept(fronts, front + one)

    known = fronts.find("n", front + other, SMALL.ahead_characters)

    text = front + other
    assert text[: known.end] == (front + one)[: known.end]
    assert bytes(known.tokens).decode("utf-32-le") == text[: known.end]
    behind = segments(text, SMALL, known.end, known.start)
    assert text[: known.end] + "".join(text[start:end] for start, end in [*behind.closed, behind.tail]) == text
    if known.segments:
        following = text[known.end :]
        assert following.startswith("<end>") or (text[known.end - 1].isalpha() and following[0] == " ")


def test_a_long_text_that_is_known_is_not_hashed() -> None:
    """But for its end, also behind a difference there."""
    index, encode = KnownTexts(2**22, fronts=Fronts(2**22)), Encoder()
    document = prose(30_000)
    encode_known(document + " What is it?", "n", BOUNDARIES, index, encode)
    hashed: list[int] = []
    digests = index.digests
    index.digests = lambda namespace, texts: (hashed.append(sum(map(len, texts))), digests(namespace, texts))[1]  # type: ignore[method-assign, func-returns-value]

    tokens = encode_known(document + " And why?", "n", BOUNDARIES, index, encode)

    assert tokens == BACKEND.encode(document + " And why?", add_special_tokens=False).ids
    assert sum(hashed) < 4 * BOUNDARIES.usual_characters < len(document) // 10


def test_texts_of_every_kind_of_tokenizer_that_grow_and_branch_have_the_tokens_of_a_full_encode() -> None:
    """Without an index, so that all that is known is of fronts."""
    rng = random.Random(3)
    for kind in KINDS.values():
        backend = kind()
        boundaries = prove(msgspec.json.decode(backend.to_str()))
        index = KnownTexts(0, fronts=Fronts(2**22, least_characters=2_048))
        encode = Encoder(backend)
        texts = [prose(1_500, seed) for seed in range(2)]
        for step in range(12):
            text = rng.choice(texts)
            text = text[: rng.randrange(len(text) // 2, len(text) + 1)] + " " + prose(400, 100 + step)
            texts.append(text)

            tokens = encode_known(text, "n", boundaries, index, encode)

            assert tokens == backend.encode(text, add_special_tokens=False).ids
        assert boundaries.others is None or index.fronts.texts.nbytes > 0


def test_namespaces_know_nothing_of_one_another() -> None:
    """Tenants with salts are kept apart."""
    fronts = Fronts(2**20, least_characters=8)
    kept(fronts, "word word word word word word", "one")

    assert fronts.find("other", "word word word word word word", 5) is NOTHING
    assert fronts.find("one", "word word word word word word", 5).segments


def test_fronts_are_bounded_and_say_what_they_take() -> None:
    """Those unused for longest go first."""
    told: list[int] = []
    fronts = Fronts(8_000, told.append, least_characters=8)
    for number in range(20):
        kept(fronts, f"number {number} " * 8)

    assert 0 < told[-1] == fronts.texts.nbytes <= 8_000
    assert fronts.find("n", f"number {19} " * 8, 5).segments
    assert not fronts.find("n", f"number {0} " * 8, 5).segments


def test_a_text_that_goes_on_takes_the_place_of_what_it_goes_on_from() -> None:
    """So that a conversation is kept once."""
    fronts = Fronts(2**20, least_characters=8)
    text = ""
    for number in range(6):
        text += f"turn {number} word word word <end>"
        kept(fronts, text)

    assert fronts.texts.nbytes < 2 * (sys.getsizeof(text) + 4 * len(text) + CUT_BYTES * len(text) // 4)


def test_threads_share_fronts() -> None:
    """Each finds its own text, whatever the others keep meanwhile."""
    fronts = Fronts(20_000, least_characters=8)
    found: list[bool] = []

    def work(number: int) -> None:
        for turn in range(200):
            text = f"thread {number} turn {turn} " * 6
            kept(fronts, text)
            known = fronts.find("n", text, 5)
            found.append(bytes(known.tokens).decode("utf-32-le") == text[: known.end])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(found) == 800
    assert all(found)
    assert fronts.texts.nbytes <= 20_000
