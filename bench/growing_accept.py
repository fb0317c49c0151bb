"""What each turn of a growing session costs the gateway until it is submitted: processor time, by what is done.

    python -m bench.growing_accept [--turns 40] [--turn-tokens 3436] [--profile TURNS]

One session sends everything again each turn, with so many new tokens behind it; answers are random ids, which no
tokenizer would give back. The parts are those that a request for a chat runs through, in one thread: *body* decodes
JSON, *render* applies the chat template, *tokens* puts the prompt's ids together, *submit* finds what the scheduler has
of it and encodes the message.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from bench.long_prompts.model import CONTEXT, VOCABULARY, Texts, save_tokenizer
from services.gateway import admission, conversation
from services.gateway.body import decode_body
from services.gateway.known_prompts import KnownPrompts
from services.gateway.openai_schema.chat import ChatRequest
from services.gateway.pending import Choice, Generation
from services.gateway.prompt_bases import PromptBases
from services.gateway.tokenizer import Tokenizer
from services.gateway.turns.front_hash import HashedTexts
from services.gateway.turns.memory import AnswerMemory
from services.gateway.turns.spliced_texts import SplicedTexts
from services.gateway.turns.splicing import Spliced
from services.gateway.turns.turns import OpenPrompt, Turns
from shared.codec import encode
from shared.compact_messages import compact_request
from shared.messages.base import pack_int32
from shared.messages.requests import SamplingParams, SubmitRequest

NAMESPACE = "0" * 32
ANSWER_TOKENS = 64
MEMORY_BYTES = 64 * 2**20
PARTS = ("body", "render", "tokens", "submit")

R = TypeVar("R")


class Run(Protocol):
    """Does one part of a turn."""

    def __call__(self, part: str, work: Callable[[], R]) -> R:
        """What ``work`` returns."""


class Gateway:
    """The parts of a gateway that a chat runs through, and the conversation so far."""

    def __init__(self, folder: Path, seed: int) -> None:
        save_tokenizer(folder)
        self.tokenizer = Tokenizer(folder, threads=1, known_bytes=MEMORY_BYTES)
        self.messages: list[dict[str, Any]] = []
        self.prompt_tokens = 0
        self._texts, self._rng = Texts(folder, seed), random.Random(seed)
        share = MEMORY_BYTES // 4
        self._turns = Turns(self.tokenizer, AnswerMemory(2 * share), None, HashedTexts(share), SplicedTexts(share))
        self._known, self._bases = KnownPrompts(), PromptBases()

    def turn(self, new_tokens: int, run: Run) -> None:
        """Ask with so many new tokens, and be answered; ``run`` does each part."""
        tokenizer = self.tokenizer
        self.messages.append({"role": "user", "content": self._texts.text(new_tokens)})
        body = json.dumps({"model": "m", "messages": self.messages, "stream": True}).encode()
        request = run("body", lambda: decode_body(body, ChatRequest))

        def render() -> str:
            return tokenizer.render(conversation.template_messages(request.messages), add_generation_prompt=True)

        text = run("render", render)
        said = sum(message.role == "assistant" for message in request.messages)
        latest = next((each.content for each in reversed(request.messages) if each.role == "assistant"), None)

        def tokens() -> tuple[OpenPrompt, Spliced]:
            opened = self._turns.open(text, tokenizer.shape({}), NAMESPACE, said)
            spliced = self._turns.tokens(opened, CONTEXT, known_in=NAMESPACE)
            admission.check_prompt_tokens(spliced.tokens, VOCABULARY)
            return opened, spliced

        opened, spliced = run("tokens", tokens)
        asked = SubmitRequest(
            request_id=f"turn-{said}",
            gateway_id="gateway",
            namespace=NAMESPACE,
            prompt=pack_int32(spliced.tokens),
            sampling=SamplingParams(max_tokens=ANSWER_TOKENS),
        )

        def submit() -> bytes:
            digests = self._known.block_digests(NAMESPACE, asked.prompt, keep=True)
            encode(compact_request(self._bases.abridged(asked, digests)))
            return digests

        digests = run("submit", submit)
        choice = Choice(asked, 0, 0, 0.0)
        choice.assembly.tokens = [self._rng.randrange(300, VOCABULARY) for _ in range(ANSWER_TOKENS)]
        turn = self._turns.turn(opened, spliced, latest if isinstance(latest, str) else None)
        self._turns.ended(turn, Generation([choice]))
        self._bases.answered(asked, digests, choice.assembly.tokens)
        answer = tokenizer.decode(choice.assembly.tokens, skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": answer})
        self.prompt_tokens = len(spliced.tokens)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.growing_accept", description=__doc__)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--turn-tokens", type=int, default=3_500 - ANSWER_TOKENS)
    parser.add_argument("--profile", type=int, default=0, metavar="TURNS", help="profile the last so many turns")
    asked = parser.parse_args()
    profile = cProfile.Profile(time.thread_time)
    with tempfile.TemporaryDirectory() as folder:
        gateway = Gateway(Path(folder), seed=1)
        for number in range(1, asked.turns + 1):
            taken: dict[str, float] = {}

            def run(
                part: str,
                work: Callable[[], R],
                taken: dict[str, float] = taken,
                is_profiled: bool = number > asked.turns - asked.profile,
            ) -> R:
                begun = time.thread_time_ns()
                made = profile.runcall(work) if is_profiled else work()
                taken[part] = (time.thread_time_ns() - begun) / 1e6
                return made

            gateway.turn(asked.turn_tokens, run)
            parts = ", ".join(f"{part} {taken[part]:.2f}" for part in PARTS if part in taken)
            print(f"turn {number}: {gateway.prompt_tokens} tokens, {sum(taken.values()):.2f} ms ({parts})")
    if asked.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)


if __name__ == "__main__":
    main()
