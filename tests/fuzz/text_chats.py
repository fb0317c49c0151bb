"""Conversations that change, in three published forms of chat templates, with earlier answers in their own ids."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.gateway.tokenizer import Tokenizer
from services.gateway.turns.memory import AnswerMemory, Said
from services.gateway.turns.turns import Turns
from shared.packed_tokens import PackedTokens
from tests.fuzz.text_cases import changed, phrase
from tests.fuzz.text_tokenizers import CHAT_TOKENS, HEADER_TOKENS, INST_TOKENS, KINDS

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
HEADERS = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
INST = (
    "{{ '<s>' }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + '</s>' }}{% endif %}{% endfor %}"
)
FORMS = {"qwen2": (CHATML, CHAT_TOKENS), "llama3": (HEADERS, HEADER_TOKENS), "llama2": (INST, INST_TOKENS)}
"""Template and special tokens by kind of tokenizer."""

NAMESPACE = "fuzz"
MOST = 100_000
INDEX_BYTES = 200_000
MEMORY_BYTES = 2**20
MOST_MESSAGES = 12


def chat_tokenizer(folder: Path, kind: str, *, known_bytes: int, plain_content: bool = False) -> Tokenizer:
    """A gateway's tokenizer of a kind with its template; ``known_bytes`` as it takes them, cut into small segments."""
    template, _ = FORMS[kind]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(KINDS[kind]().to_str())
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(told | {"clean_up_tokenization_spaces": False}))
    made = Tokenizer(folder, threads=1, plain_content=plain_content, known_bytes=known_bytes)
    if known_bytes:
        made._boundaries = replace(made._boundaries, least_characters=8, usual_characters=32)
    return made


class ChatSubject:
    """Two gateways' ways from a conversation to tokens, with an index of known texts and without, and one memory."""

    def __init__(self, folder: Path, kind: str, *, plain_content: bool) -> None:
        self._tokens = FORMS[kind][1]
        self._memory = AnswerMemory(MEMORY_BYTES)
        self._ways = [
            (tokenizer, Turns(tokenizer, self._memory, None))
            for tokenizer in (
                chat_tokenizer(folder, kind, known_bytes=known_bytes, plain_content=plain_content)
                for known_bytes in (INDEX_BYTES, 0)
            )
        ]

    def begin(self, rng: random.Random) -> list[dict[str, Any]]:
        """A question."""
        return [{"role": "user", "content": phrase(rng, self._tokens, 12)}]

    def go_on(self, messages: list[dict[str, Any]], rng: random.Random) -> list[dict[str, Any]]:
        """The conversation with one message more, changed, or with less."""
        drawn = rng.random()
        place = rng.randrange(len(messages))
        if drawn < 0.5 and len(messages) < MOST_MESSAGES:
            role = "user" if messages[-1]["role"] == "assistant" else "assistant"
            if role == "assistant" and rng.random() < 0.7:
                return [*messages, {"role": role, "content": self._answer(messages, rng)}]
            return [*messages, {"role": role, "content": phrase(rng, self._tokens, 12)}]
        if drawn < 0.7:
            return messages[: place + 1]
        content = changed(messages[place]["content"], rng, self._tokens, 400)
        return [*messages[:place], {**messages[place], "content": content}, *messages[place + 1 :]]

    def tokens(self, messages: Sequence[dict[str, Any]]) -> tuple[PackedTokens, PackedTokens]:
        """The prompt's tokens with the index and without."""
        found = []
        for tokenizer, turns in self._ways:
            text = tokenizer.render(messages)
            opened = turns.open(text, tokenizer.shape({}), NAMESPACE, sum(m["role"] == "assistant" for m in messages))
            found.append(turns.tokens(opened, MOST, known_in=NAMESPACE).tokens)
        return found[0], found[1]

    def _answer(self, messages: Sequence[dict[str, Any]], rng: random.Random) -> str:
        """An answer of ids that no tokenizer would give back, which the memory holds."""
        tokenizer, turns = self._ways[1]
        words = [number for number in range(400) if number not in tokenizer.added_ids]
        said = PackedTokens.of(rng.choices(words, k=rng.randint(1, 12)))
        opened = turns.open(tokenizer.render(messages), tokenizer.shape({}), NAMESPACE, MOST_MESSAGES)
        text = tokenizer.rendered_text(said)
        if opened.places:
            self._memory.remember(opened.places[-1].name, Said(said.packed, text))
        return text
