"""The demo's requests: documents, questions with known answers, and a conversation. Pure, given a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from thermocline.documents.grammar import make_document


class TokenCounter:
    """A tokenizer file as :func:`make_document` needs it."""

    def __init__(self, file: Path) -> None:
        """Load ``file``, a model's ``tokenizer.json``."""
        self._tokenizer = Tokenizer.from_file(str(file))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, with the special tokens that the file adds."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids


@dataclass(frozen=True)
class Ask:
    """One question over one document; ``messages`` is the chat request's body."""

    document: int
    question: str
    answer: str
    messages: list[dict[str, Any]]


@dataclass(frozen=True)
class Workload:
    """Requests: ``asks`` in sending order, then ``talk``, a conversation over one more document.

    Its (question, answer) turns are sent one after another, each with all earlier turns before it.
    """

    asks: list[Ask]
    talk_document: str
    talk: list[tuple[str, str]]
    document_tokens: int


def build(model_dir: Path, *, documents: int, questions: int, tokens: int, turns: int, seed: int) -> Workload:
    """Make ``documents`` documents of about ``tokens`` tokens and ``questions`` questions on each, shuffled.

    So a document usually comes back only after others have pushed it out of device memory.
    """
    tokenizer = TokenCounter(model_dir / "tokenizer.json")
    rng = random.Random(seed)
    asks: list[Ask] = []
    total = 0
    for number in range(documents):
        text, facts = make_document(rng, tokens, tokenizer)
        total += len(tokenizer.encode(text))
        for fact in rng.sample(facts, min(questions, len(facts))):
            asks.append(Ask(number, fact.text, fact.answer, [_system(text), {"role": "user", "content": fact.text}]))
    rng.shuffle(asks)
    text, facts = make_document(rng, tokens, tokenizer)
    talk = [(fact.text, fact.answer) for fact in rng.sample(facts, min(turns, len(facts)))]
    return Workload(asks, text, talk, total)


def _system(document: str) -> dict[str, Any]:
    return {"role": "system", "content": document}


def talk_messages(document: str, history: list[tuple[str, str]], question: str) -> list[dict[str, Any]]:
    """Return the conversation so far with the model's own answers, and the next question."""
    messages = [_system(document)]
    for asked, answered in history:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return [*messages, {"role": "user", "content": question}]
