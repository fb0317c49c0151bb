"""How much of an answer the next turn's prompt loses, with answers' ids remembered and without.

    python -m bench.turn_losses [--sessions 4] [--turns 40] [--seed 1] [--save]

The bundled models answer in conversations; a client sends their texts back, whole, trimmed, or cut as a stop string
cuts them. Each next prompt is compared with the prompt before and the tokens that lie wholly within what was sent
back: those behind the first difference are lost, because KV is found by prefix. Answers of which the tokenizer loses
some are unusual; they alone go to the cell's bucket. Then a long conversation is tokenised both ways, in processor
time.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench import results_file
from services.gateway.pending import Choice, Generation
from services.gateway.tokenizer import Tokenizer
from services.gateway.turns.memory import AnswerMemory
from services.gateway.turns.turns import Turns
from shared.messages.base import pack_int32
from shared.messages.requests import SamplingParams, SubmitRequest

MODELS = Path(__file__).parents[1] / "models"
NAMESPACE = "0" * 32
MEMORY_BYTES = 64 * 2**20
EOS = 2
ANSWER_TOKENS = 24
LONG_ANSWER_TOKENS = 300
REPEATS = 20
SYSTEM = "The access code of the Lisbon office is 4821. The colour of the Tabor crane is crimson."
QUESTIONS = (
    "What is the access code of the Lisbon office?",
    "Tell me of the colour of the crane.",
    "Who keeps the keys of the harbour?",
    "And then?",
    "Write of rivers, ships and grain.",
)


def cut(text: str) -> str:
    """As a stop string in the middle of the answer cuts it."""
    found = text.find("e", len(text) // 2)
    return text[:found] if found >= 0 else text


CASES: tuple[tuple[str, bool, Callable[[str], str]], ...] = (
    ("until it ends", False, str),
    ("24 tokens", True, str),
    ("24 tokens, trimmed", True, str.strip),
    ("24 tokens, cut", True, cut),
)
"""Name, whether answers go on past their end, and what a client sends back."""


def in_common(left: list[int], right: list[int]) -> int:
    """How many first tokens are the same."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(left), len(right)))


class Talk:
    """One model's conversations."""

    def __init__(self, name: str, temperature: float) -> None:
        self.tokenizer = Tokenizer(MODELS / name, threads=1)
        self.turns = Turns(self.tokenizer, AnswerMemory(MEMORY_BYTES), None)
        self._model = AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32).eval()
        self._temperature = temperature

    def answer(self, prompt: list[int], *, goes_on: bool) -> list[int]:
        """Sampled from the whole distribution."""
        least = {"min_new_tokens": ANSWER_TOKENS} if goes_on else {}
        ids = torch.tensor([prompt])
        said = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER_TOKENS, do_sample=True,
            temperature=self._temperature, top_k=0, top_p=1.0, eos_token_id=EOS, pad_token_id=0, **least,
        )  # fmt: skip
        tokens: list[int] = said[0].tolist()[len(prompt) :]
        return tokens

    def words(self, said: list[int], sent: str) -> list[int]:
        """An answer's tokens that lie wholly within what the client sends back."""
        words = said[:-1] if said[-1] == EOS else said
        while words and not sent.startswith(self.tokenizer.decode(words)):
            words = words[:-1]
        return words

    def session(self, count: int, rng: random.Random, echo: Callable[[str], str], *, goes_on: bool) -> dict[str, int]:
        """One conversation: answers, their tokens, and how many were lost of them and of what stood before."""
        found = dict.fromkeys(("answers", "tokens", "unusual", "lost_without", "lost_with", "kept"), 0)
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": rng.choice(QUESTIONS)}]
        usual, prompt = self.tokenizer.encode_chat(messages), self.prompt(messages)
        for _ in range(count):
            said = self.answer(prompt.tokens, goes_on=goes_on)
            prompt.ended(said)
            sent = echo(self.tokenizer.decode(said, skip_special_tokens=True))
            words = self.words(said, sent)
            messages.append({"role": "assistant", "content": sent})
            messages.append({"role": "user", "content": rng.choice(QUESTIONS)})
            next_usual, following = self.tokenizer.encode_chat(messages), self.prompt(messages)
            lost = len(usual) + len(words) - in_common(usual + words, next_usual)
            found["answers"] += 1
            found["tokens"] += len(words)
            found["unusual"] += lost > 0
            found["lost_without"] += lost
            found["lost_with"] += len(prompt.tokens) + len(words) - in_common(prompt.tokens + words, following.tokens)
            found["kept"] += following.fate == "kept"
            usual, prompt = next_usual, following
        return found

    def prompt(self, messages: list[dict[str, str]]) -> Prompt:
        return Prompt(self.turns, self.tokenizer, messages)


class Prompt:
    """One turn as a gateway takes it."""

    def __init__(self, turns: Turns, tokenizer: Tokenizer, messages: list[dict[str, str]]) -> None:
        answers = [message["content"] for message in messages if message["role"] == "assistant"]
        text = tokenizer.render(messages)
        opened = turns.open(text, tokenizer.shape({}), NAMESPACE, len(answers))
        spliced = turns.tokens(opened, 0)
        self.tokens = spliced.tokens.tolist()
        self._turn = turns.turn(opened, spliced, answers[-1] if answers else None)
        self.fate = self._turn.fates[-1].value if self._turn.fates else ""
        self._turns = turns

    def ended(self, tokens: list[int]) -> None:
        request = SubmitRequest(
            request_id="r", gateway_id="g", namespace=NAMESPACE, prompt=pack_int32(self.tokens),
            sampling=SamplingParams(max_tokens=1),
        )  # fmt: skip
        choice = Choice(request, 0, 0, 0.0)
        choice.assembly.tokens = tokens
        self._turns.ended(self._turn, Generation([choice]))


def summed(sessions: list[dict[str, int]]) -> dict[str, int]:
    return {name: sum(session[name] for session in sessions) for name in sessions[0]}


def tokenising(turns: int, rng: random.Random) -> dict[str, Any]:
    """Processor time of the last prompt of a long conversation of usual answers, with the memory and without."""
    tokenizer = Tokenizer(MODELS / "thermocline-mha", threads=1)
    memory = Turns(tokenizer, AnswerMemory(MEMORY_BYTES), None)
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    for _ in range(turns):
        prompt = Prompt(memory, tokenizer, messages)
        words = [rng.choice(" ".join(QUESTIONS).split()) for _ in range(LONG_ANSWER_TOKENS)]
        said = tokenizer.encode_now(" ".join(words), add_special_tokens=False)[:LONG_ANSWER_TOKENS]
        prompt.ended(said)
        messages.append({"role": "assistant", "content": tokenizer.decode(said)})
        messages.append({"role": "user", "content": QUESTIONS[1]})
    text = tokenizer.render(messages)

    def remembered() -> list[int]:
        opened = memory.open(text, tokenizer.shape({}), NAMESPACE, turns)
        return memory.tokens(opened, 0).tokens.tolist()

    times = {}

    def anew() -> list[int]:
        return tokenizer.encode_rendered(text).tolist()

    for name, work in (("without", anew), ("with", remembered)):
        begun = time.process_time()
        for _ in range(REPEATS):
            tokens = work()
        times[f"{name}_ms"] = round((time.process_time() - begun) / REPEATS * 1e3, 2)
    assert tokens == tokenizer.encode_rendered(text)
    return {"tokens": len(tokens), "turns": turns, "memory_bytes": memory.memory_bytes, **times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=4)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", action="store_true", help="write bench/results/turn_losses.json")
    asked = parser.parse_args()
    torch.manual_seed(asked.seed)
    rng = random.Random(asked.seed)
    rows = []
    for model in ("thermocline-mha", "thermocline-gqa"):
        for temperature in (0.8, 1.0):
            talk = Talk(model, temperature)
            for name, goes_on, echo in CASES:
                sessions = [talk.session(asked.turns, rng, echo, goes_on=goes_on) for _ in range(asked.sessions)]
                rows.append({"model": model, "temperature": temperature, "answers_are": name, **summed(sessions)})
                print(rows[-1], flush=True)
    results = {"rows": rows, "tokenising": tokenising(asked.turns, rng)}
    print(results["tokenising"])
    if asked.save:
        results_file.write("turn_losses", results, seed=asked.seed)


if __name__ == "__main__":
    main()
