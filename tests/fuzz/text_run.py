"""Compare the tokens of texts of which parts are known with those of a full encode, over random changes of texts."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from services.gateway.known_texts.boundaries import prove
from services.gateway.known_texts.encoding import encode_known
from services.gateway.known_texts.fronts import Fronts
from services.gateway.known_texts.index import KnownTexts
from services.gateway.known_texts.segments import segments
from services.gateway.known_texts.special_ids import special_ids
from shared.packed_tokens import PackedTokens
from tests.fuzz.text_cases import changed, phrase
from tests.fuzz.text_chats import FORMS, NAMESPACE, ChatSubject
from tests.fuzz.text_tokenizers import KINDS

SESSION = 250
"""Changes of one text, or one conversation, before another is begun."""

INDEX_BYTES = 60_000
FRONT_BYTES, FRONT_CHARACTERS = 20_000, 24
MOST_CHARACTERS = 600
SIZES = ((1, 1), (1, 1), (4, 16), (16, 64))
"""Least and usual characters of a segment: most often a text is cut wherever it may be."""

CHAT_EVERY = 8
"""One session of so many is of conversations."""


class FoundText(msgspec.Struct):
    """A text whose tokens were not those of a full encode."""

    kind: str
    case: int
    text: str


class TextFigures(msgspec.Struct):
    """``cuts`` counts segments of all texts, ``known`` those whose tokens were not computed."""

    cases: int = 0
    chats: int = 0
    characters: int = 0
    cuts: int = 0
    known: int = 0
    by_kind: dict[str, int] = {}
    found: list[FoundText] = []
    seconds: float = 0.0

    def per_second(self) -> float:
        return self.cases / max(self.seconds, 1e-9)


class TextSubject:
    """One kind of tokenizer with an index that is too small for all that it is told."""

    def __init__(self, kind: str) -> None:
        self.backend: Any = KINDS[kind]()
        told = msgspec.json.decode(self.backend.to_str())
        self._boundaries = prove(told)
        around = special_ids(told["post_processor"])
        assert around is not None
        self._around = around
        self._index = KnownTexts(INDEX_BYTES, fronts=Fronts(FRONT_BYTES, least_characters=FRONT_CHARACTERS))
        self._asked = 0
        self.tokens = sorted(each["content"] for each in told["added_tokens"])

    def differs(self, text: str, sizes: tuple[int, int], figures: TextFigures) -> bool:
        """Whether the tokens of ``text`` are others than a full encode's, bare or with special tokens around."""
        boundaries = replace(self._boundaries, least_characters=sizes[0], usual_characters=sizes[1])
        self._asked = 0
        tokens = encode_known(text, NAMESPACE, boundaries, self._index, self._encode)
        closed = len(segments(text, boundaries).closed)
        figures.cuts += closed
        figures.known += max(0, closed + 1 - self._asked)
        whole = [self.backend.encode(text, add_special_tokens=around).ids for around in (False, True)]
        return [tokens, PackedTokens.joined([self._around[0], tokens, self._around[1]])] != whole

    def _encode(self, texts: Sequence[str]) -> list[PackedTokens]:
        self._asked += len(texts)
        return [PackedTokens.of(each.ids) for each in self.backend.encode_batch_fast(texts, add_special_tokens=False)]


class TextRun:
    """All subjects, made as they are needed."""

    def __init__(self, seed: int, folder: Path) -> None:
        self._seed = seed
        self._folder = folder
        self._texts: dict[str, TextSubject] = {}
        self._chats: dict[tuple[str, bool], ChatSubject] = {}

    def sessions(self, first: int, last: int, figures: TextFigures) -> None:
        """Sessions ``first`` to ``last``, of :data:`SESSION` cases each."""
        begun = time.perf_counter()
        for number in range(first, last):
            rng = random.Random(f"texts-{self._seed}-{number}")
            if number % CHAT_EVERY == CHAT_EVERY - 1:
                self._chat(number, rng, figures)
            else:
                self._text(number, rng, figures)
        figures.seconds += time.perf_counter() - begun

    def _text(self, number: int, rng: random.Random, figures: TextFigures) -> None:
        kind = [*KINDS][number % len(KINDS)]
        if kind not in self._texts:
            self._texts[kind] = TextSubject(kind)
        subject, sizes = self._texts[kind], rng.choice(SIZES)
        text = phrase(rng, subject.tokens, 80)
        for case in range(number * SESSION, (number + 1) * SESSION):
            text = changed(text, rng, subject.tokens, MOST_CHARACTERS)
            if subject.differs(text, sizes, figures):
                figures.found.append(FoundText(kind, case, text))
            figures.cases += 1
            figures.characters += len(text)
        figures.by_kind[kind] = figures.by_kind.get(kind, 0) + SESSION

    def _chat(self, number: int, rng: random.Random, figures: TextFigures) -> None:
        kind, plain = [*FORMS][number // CHAT_EVERY % len(FORMS)], rng.random() < 0.3
        if (kind, plain) not in self._chats:
            folder = self._folder / f"{kind}-{plain}"
            self._chats[kind, plain] = ChatSubject(folder, kind, plain_content=plain)
        subject = self._chats[kind, plain]
        messages = subject.begin(rng)
        for case in range(number * SESSION, (number + 1) * SESSION):
            messages = subject.go_on(messages, rng)
            known, whole = subject.tokens(messages)
            if known != whole:
                figures.found.append(FoundText(f"chat {kind}", case, msgspec.json.encode(messages).decode()))
            figures.cases += 1
            figures.chats += 1
        name = f"chat {kind}"
        figures.by_kind[name] = figures.by_kind.get(name, 0) + SESSION


def run_texts(seed: int, first: int, cases: int, figures: TextFigures) -> None:
    """Cases from ``first`` on; both are rounded to whole sessions."""
    with tempfile.TemporaryDirectory(prefix="texts-") as folder:
        run = TextRun(seed, Path(folder))
        run.sessions(first // SESSION, (first + cases + SESSION - 1) // SESSION, figures)
