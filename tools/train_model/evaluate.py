"""``python -m tools.train_model.evaluate``: exact match of an exported model on held-out documents.

The model is run as a user would run it: Hugging Face's ``AutoModelForCausalLM``, the chat template,
greedy decoding until the end token, one document and one question a conversation.  An answer counts
if its text, stripped of surrounding spaces, equals the fact's value.
"""

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from thermocline.documents.grammar import Question, make_document
from thermocline.documents.linked import KINDS, make_linked_document

ANSWER_TOKENS = 32
"""Longer than any answer: a reply cut off here is wrong."""
SETS = ("easy", "hard", *KINDS)
"""Each fact with an entity of its own; entities and attributes that recur; and one kind of question about documents
whose facts are linked."""
PLACEMENTS = ("system", "user")


@dataclass(frozen=True, slots=True)
class Score:
    """How many of the questions were answered exactly."""

    correct: int
    questions: int

    @property
    def accuracy(self) -> float:
        return self.correct / self.questions


@dataclass(frozen=True, slots=True)
class Answerer:
    """An exported model and its tokenizer."""

    model: Any
    tokenizer: Any

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype = torch.float32) -> "Answerer":
        """Load both from ``folder``, on the CPU."""
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        return cls(model.eval(), AutoTokenizer.from_pretrained(folder))

    @torch.no_grad()
    def answer(self, messages: list[dict[str, str]]) -> str:
        """Reply greedily to a conversation."""
        prompt = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        reply = self.model.generate(**prompt, max_new_tokens=ANSWER_TOKENS, do_sample=False)
        new_ids = reply[0, prompt["input_ids"].shape[1] :]
        return str(self.tokenizer.decode(new_ids, skip_special_tokens=True)).strip()


def conversation(document: str, question: Question, placement: str) -> list[dict[str, str]]:
    """The messages that ask ``question``: the document is the system's or opens the user's."""
    if placement == "user":
        return [{"role": "user", "content": f"{document}\n\n{question.text}"}]
    return [
        {"role": "system", "content": document},
        {"role": "user", "content": question.text},
    ]


def score(
    answerer: Answerer,
    document_tokens: int,
    questions: int,
    seed: int,
    *,
    which: str = "easy",
    placement: str = "system",
) -> Score:
    """Ask ``questions`` questions, each of a held-out document of its own."""
    rng = random.Random(f"{seed} {document_tokens} {which == 'hard'}")
    correct = 0
    for _ in range(questions):
        document, question = _asked(rng, document_tokens, answerer.tokenizer, which)
        reply = answerer.answer(conversation(document, question, placement))
        correct += reply == question.answer
    return Score(correct, questions)


def _asked(rng: random.Random, document_tokens: int, tokenizer: Any, which: str) -> tuple[str, Question]:
    """Draw a document and a question about it; documents without a question of that kind are passed over."""
    if which not in KINDS:
        document, asked = make_document(rng, document_tokens, tokenizer, shared=which == "hard")
        return document, asked[0]
    while True:
        document, linked = make_linked_document(rng, document_tokens, tokenizer)
        for each in linked:
            if each.kind == which:
                return document, each.question


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.train_model.evaluate")
    parser.add_argument("--model", type=Path, required=True, help="folder of an exported model")
    parser.add_argument("--lengths", default="128,256,512,1024,2048", help="document tokens")
    parser.add_argument("--questions", type=int, default=100, help="questions for each length")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--set", choices=SETS, default="easy", dest="which")
    parser.add_argument("--placement", choices=PLACEMENTS, default="system")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    answerer = Answerer.load(options.model, getattr(torch, options.dtype))
    scores: dict[str, dict[str, float | int]] = {}
    for length in (int(text) for text in options.lengths.split(",")):
        result = score(
            answerer,
            length,
            options.questions,
            options.seed,
            which=options.which,
            placement=options.placement,
        )
        scores[str(length)] = {"accuracy": round(result.accuracy, 4), "n": result.questions}
        if not options.json:
            print(f"{length:6d} tokens  {result.accuracy:.3f}  (n={result.questions})", flush=True)
    if options.json:
        report = {
            "model": str(options.model),
            "set": options.which,
            "placement": options.placement,
            "dtype": options.dtype,
            "seed": options.seed,
            "by_document_tokens": scores,
        }
        print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
