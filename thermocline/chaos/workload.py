"""The requests: conversations and single questions over shared documents. Pure, given a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Literal

from thermocline.documents.grammar import Question, Tokenizer, make_document

Endpoint = Literal["/v1/chat/completions", "/v1/completions"]

DOCUMENTS = 20
_DOCUMENT_TOKENS = (120, 700)
_ANSWER_TOKENS = (12, 120)
_MOST_TURNS = 3


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a script: the user's next message, and how the answer is sampled.

    ``temperature`` 0 is greedy. Sampling keeps few tokens (``top_k``): with fewer boundaries between tokens, the same
    draw is more likely to give the same token whatever the last bits of the logits are.
    """

    text: str
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    top_k: int | None = None


@dataclass(frozen=True, slots=True)
class Script:
    """Requests that follow one another. A chat has the document as its system message; a completion continues it."""

    name: str
    endpoint: Endpoint
    document: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Known:
    """A request and its right answer: the tokens and the text of a run without faults."""

    name: str
    endpoint: Endpoint
    body: dict[str, Any]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


@dataclass(slots=True)
class Conversation:
    """A script with its known answers, turn by turn."""

    name: str
    asks: list[Known] = field(default_factory=list)


def draw_scripts(seed: int, count: int, tokenizer: Tokenizer) -> list[Script]:
    """Draw ``count`` scripts over DOCUMENTS documents, of every kind of request."""
    rng = random.Random(f"chaos-workload-{seed}")
    documents = [make_document(rng, rng.randint(*_DOCUMENT_TOKENS), tokenizer) for _ in range(DOCUMENTS)]
    return [_script(rng, number, documents) for number in range(count)]


def _script(rng: random.Random, number: int, documents: list[tuple[str, list[Question]]]) -> Script:
    # A few documents are asked about far more often than the others, as prompts are.
    place = min(int(rng.expovariate(0.25)), len(documents) - 1)
    text, facts = documents[place]
    is_chat = rng.random() < 0.6
    turns = rng.randint(1, _MOST_TURNS) if is_chat and rng.random() < 0.5 else 1
    questions = [rng.choice(facts).text for _ in range(turns)]
    endpoint: Endpoint = "/v1/chat/completions" if is_chat else "/v1/completions"
    return Script(f"s{number}", endpoint, text, tuple(_turn(rng, question) for question in questions))


def _turn(rng: random.Random, text: str) -> Turn:
    max_tokens = rng.randint(*_ANSWER_TOKENS)
    if rng.random() < 0.6:
        return Turn(text, max_tokens)
    return Turn(text, max_tokens, temperature=rng.choice((0.6, 0.9)), seed=rng.getrandbits(31), top_k=6)


def body_of(script: Script, number: int, answers: list[str], model: str) -> dict[str, Any]:
    """Return the HTTP body of turn ``number``, given the texts of the answers before it."""
    turn = script.turns[number]
    common: dict[str, Any] = {"model": model, "max_tokens": turn.max_tokens, "temperature": turn.temperature}
    common |= {"ignore_eos": True, "return_token_ids": True}
    if turn.seed is not None:
        common |= {"seed": turn.seed, "top_k": turn.top_k}
    if script.endpoint == "/v1/completions":
        return common | {"prompt": f"{script.document} {turn.text}"}
    messages = [{"role": "system", "content": script.document}]
    for earlier, answer in zip(script.turns, answers, strict=False):
        messages += [{"role": "user", "content": earlier.text}, {"role": "assistant", "content": answer}]
    return common | {"messages": [*messages, {"role": "user", "content": turn.text}]}
