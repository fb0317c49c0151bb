"""Tokenizers with templates of several families' layouts, and conversations with answers of random tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from services.gateway.pending import Choice, Generation
from services.gateway.tokenizer import Tokenizer
from services.gateway.turns.splicing import Fate
from services.gateway.turns.turns import Turns
from tests.scripted_cell import submit

NAMESPACE = "0" * 32
MOST = 100_000

_TRAINED_ON = [
    "the keys of the harbour are with the keeper of the light, and the ships come in with the tide\n\n",
    "what is the colour of the crane? it is crimson. and then? they write of rivers, grain and 4821 ships.\n",
    "une clé, zwei Brücken, три моста: naïve café, 東京 🙂 and more words of the other hand\n",
]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""As Qwen 2.5 lays conversations out."""

CHATML_THINKS = (
    "{% for m in messages %}{% set c = m.content %}"
    "{% if m.role == 'assistant' and '</think>' in c %}{% set c = c.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\\n' + c + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""As Qwen 3: reasoning is left out of earlier answers."""

HEADERS = (
    "{{ '<|begin|>' }}{% for m in messages %}"
    "{{ '<|head|>' + m.role + '<|end_head|>\\n\\n' + m.content | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|end_head|>\\n\\n' }}{% endif %}"
)
"""As Llama 3: content is trimmed."""

INST = (
    "{{ '<s>' }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ m.content + '</s>' }}{% endif %}{% endfor %}"
)
"""As Mistral: nothing opens an answer but the end of a question, in plain text."""

PLAIN = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
"""Without a single special token."""

SPECIALS = {
    CHATML: ["<|im_start|>", "<|im_end|>"],
    CHATML_THINKS: ["<|im_start|>", "<|im_end|>"],
    HEADERS: ["<|begin|>", "<|head|>", "<|end_head|>", "<|eot|>"],
    INST: ["<s>", "</s>"],
    PLAIN: ["<|end|>"],
}


def make_tokenizer(folder: Path, template: str, *, pieces: bool = False, plain_content: bool = False) -> Tokenizer:
    """A small trained tokenizer: byte-level, or with ``pieces`` as sentencepiece does, with spaces put before texts."""
    specials = SPECIALS.get(template, ["<|end|>"])
    if pieces:
        backend = Backend(models.BPE(unk_token=None, byte_fallback=True))
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=[*specials, *alphabet], show_progress=False)
    else:
        backend = Backend(models.BPE())
        backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=600,
            special_tokens=specials,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
    backend.train_from_iterator(_TRAINED_ON * 20, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    told = json.loads(backend.to_str())
    # Bytes are no special tokens; the trainer knows no other way to have them in.
    told["added_tokens"] = [each for each in told["added_tokens"] if each["content"] in specials]
    (folder / "tokenizer.json").write_text(json.dumps(told))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": specials[-1],
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(folder, threads=1, plain_content=plain_content)


def random_answer(tokenizer: Tokenizer, rng: random.Random, most: int = 24) -> list[int]:
    """Ids that a hot model might say, and an end of turn."""
    words = [number for number in range(len(tokenizer._tokenizer)) if number not in tokenizer.special_ids]
    return [*rng.choices(words, k=rng.randint(1, most)), max(tokenizer.special_ids)]


class Prompt:
    """One turn: ``tokens`` of the prompt, ``fates`` of earlier answers; ``answer`` ends it."""

    def __init__(
        self,
        turns: Turns,
        tokenizer: Tokenizer,
        messages: Sequence[dict[str, Any]],
        *,
        namespace: str = NAMESPACE,
    ) -> None:
        answers = [message["content"] for message in messages if message["role"] == "assistant"]
        text = tokenizer.render(messages, add_generation_prompt=True)
        self.opened = turns.open(text, tokenizer.shape({}), namespace, len(answers))
        spliced = turns.tokens(self.opened, MOST, known_in=namespace)
        self.text = text
        self.tokens = spliced.tokens.tolist()
        self.turn = turns.turn(self.opened, spliced, answers[-1] if answers else None)
        self.fates: tuple[Fate, ...] = self.turn.fates
        self._turns = turns

    def answer(self, *answers: Sequence[int]) -> None:
        """End the turn with these choices."""
        self._turns.ended(self.turn, Generation([choice_of(self.tokens, tokens) for tokens in answers]))


def choice_of(prompt: Sequence[int], tokens: Sequence[int]) -> Choice:
    """A choice that has got these tokens."""
    choice = Choice(submit("r", list(prompt)), 0, 0, 0.0)
    choice.assembly.tokens = list(tokens)
    return choice


def words_of(tokenizer: Tokenizer, answer: Sequence[int]) -> list[int]:
    """An answer without its end of turn."""
    return [token for token in answer if token not in tokenizer.special_ids]


def talk(
    turns: Turns,
    tokenizer: Tokenizer,
    count: int,
    rng: random.Random,
    echo: Callable[[str], str] = lambda text: text,
) -> list[tuple[Prompt, list[int], Prompt]]:
    """A conversation of ``count`` turns: each prompt, its answer, and the next prompt. A client keeps ``echo``."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "what is the colour of the crane?"}]
    told = []
    prompt = Prompt(turns, tokenizer, messages)
    for _ in range(count):
        answer = random_answer(tokenizer, rng)
        prompt.answer(answer)
        text = tokenizer.decode(answer, skip_special_tokens=True)
        messages += [{"role": "assistant", "content": echo(text)}, {"role": "user", "content": "and then?"}]
        following = Prompt(turns, tokenizer, messages)
        told.append((prompt, answer, following))
        prompt = following
    return told
