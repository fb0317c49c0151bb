"""Prefixes that bundled models understand, with questions whose answers are known: documents, and few-shot examples.

``documents``: a document, and a question about it. ``few_shot``: the document is followed by examples, questions about
other facts of it with their answers, and all of that is the prefix: what a benchmark with shuffled questions shares.
``linked``: a document whose questions may take several sentences to answer (:mod:`thermocline.documents.linked`).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thermocline.documents.grammar import Question, make_document
from thermocline.documents.linked import make_linked_document

WORKLOADS = ("documents", "few_shot")
EXAMPLES = 8


@dataclass(frozen=True, slots=True)
class Prefix:
    """``tokens`` that all questions share; each question is the tokens that follow, with the answer's text."""

    tokens: list[int]
    questions: list[tuple[list[int], str]]


def weights_sha256(model: Path) -> str:
    """Tells a model from others of its name: those that are made where they are needed differ from run to run."""
    return hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()


def prefixes(
    workload: str, count: int, document_tokens: int, questions: int, tokenizer: Any, seed: int
) -> list[Prefix]:
    """``count`` prefixes with ``questions`` questions each; the same arguments give the same.

    Raises ValueError where documents are too short for so many questions.
    """
    rng = random.Random(f"{seed} {workload} {document_tokens}")
    return [_prefix(workload, document_tokens, questions, tokenizer, rng) for _ in range(count)]


def _prefix(workload: str, document_tokens: int, questions: int, tokenizer: Any, rng: random.Random) -> Prefix:
    if workload == "linked":
        document, found = make_linked_document(rng, document_tokens, tokenizer)
        asked = [each.question for each in found]
    else:
        document, asked = make_document(rng, document_tokens, tokenizer)
    examples = asked[:EXAMPLES] if workload == "few_shot" else []
    targets = asked[len(examples) : len(examples) + questions]
    if len(targets) < questions:
        raise ValueError(f"a document of {document_tokens} tokens states only {len(asked)} facts to ask about")
    shared = [{"role": "system", "content": document}, *_turns(examples)]
    prompts = [_tokens(tokenizer, [*shared, {"role": "user", "content": target.text}]) for target in targets]
    # What all prompts share, whatever the tokenizer does at the seam; each question has a token of its own at least.
    length = _tokens_in_common(prompts)
    return Prefix(
        prompts[0][:length],
        [(prompt[length:], target.answer) for prompt, target in zip(prompts, targets, strict=True)],
    )


def _turns(examples: list[Question]) -> Iterator[dict[str, str]]:
    for example in examples:
        yield {"role": "user", "content": example.text}
        yield {"role": "assistant", "content": example.answer}


def _tokens(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])


def _tokens_in_common(prompts: list[list[int]]) -> int:
    shortest = min(len(prompt) for prompt in prompts) - 1
    return next((at for at in range(shortest) if len({prompt[at] for prompt in prompts}) > 1), shortest)
