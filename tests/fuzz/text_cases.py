"""Texts that are hard to cut, and random changes of them."""

from __future__ import annotations

import random
from collections.abc import Sequence

FRAGMENTS = (
    "the", "keeper", "harbour", "it's", "they'll", "WE'VE", "'S", "x", "A", "12345", "3.14", "0", "_", "__",
    "clé", "cle\u0301", "a\u030a\u0323", "\u0301", "\u0323\u0301", "мост", "ещё", "ǅ", "ﬁ", "ß", "İ", "ſ",
    "\u212a", "\u212b", "東京", "你好", "へ行く", "が", "か\u3099", "한국어", "\u1100\u1161\u11a8", "가\u11a8",
    "สวัสดี", "हिन्दी", "שלום", "مرحبا", "①", "Ⅷ", "²", "🙂", "👩\u200d👩\u200d👧", "🇫🇷", "👍🏽", "\ufe0f",
    "\u200d", "\u200b", "\ufeff", "\u00ad", "\u2028", "\u0085", "\u00a0", "\u3000", " ", " ", " ", " ", "  ",
    "   ", "       ", "\n", "\n", "\n\n", "\n\n\n\n", " \n", "\n ", "\r\n", "\r", "\t", "\t\t", "\x0b", "\x00",
    ".", ",", "!", "?!", "...", "，", "。", "、", "「", "」", "'", '"', "`", "-", "—", "/", "\\", "(", ")",
    "[", "]", "{", "}", "=", "==", "<", ">", "|", "<|", "|>", "<0x20>", "▁", "▁▁", "Ġ", "Ċ", "#", "##", "$",
    "%", "\ue000", "\U0010ffff", "\ue100",
)  # fmt: skip


def fragment(rng: random.Random, tokens: Sequence[str]) -> str:
    """A word, white space, a mark, or one of the tokenizer's own ``tokens``, whole or broken."""
    drawn = rng.random()
    if drawn < 0.08:
        return rng.choice(tokens)
    if drawn < 0.11:
        token = rng.choice(tokens)
        return token[: rng.randint(1, len(token))] if rng.random() < 0.5 else token[rng.randrange(len(token)) :]
    if drawn < 0.13:
        return rng.choice(" \n\t") * rng.randint(1, 40)
    if drawn < 0.14:
        return chr(rng.choice((rng.randrange(0x80), rng.randrange(0xD800), rng.randrange(0xE000, 0x110000))))
    return rng.choice(FRAGMENTS)


def phrase(rng: random.Random, tokens: Sequence[str], most: int) -> str:
    """Fragments one behind the other, half of the time with spaces between them."""
    between = rng.choice(("", " "))
    return between.join(fragment(rng, tokens) for _ in range(rng.randint(1, most)))


def changed(text: str, rng: random.Random, tokens: Sequence[str], most_characters: int) -> str:
    """``text`` with something appended, taken from its end, or put, taken away or put instead within it."""
    drawn = rng.random()
    if drawn < 0.35:
        text += phrase(rng, tokens, 12)
    elif drawn < 0.5:
        text = (
            text[: rng.randrange(len(text) + 1)]
            if rng.random() < 0.3
            else text[: max(0, len(text) - rng.randint(1, 9))]
        )
    else:
        start = rng.randrange(len(text) + 1)
        end = min(len(text), start + rng.choice((0, 0, 1, 2, 12)))
        text = text[:start] + (phrase(rng, tokens, 3) if rng.random() < 0.8 else "") + text[end:]
    return text[-most_characters:] if len(text) > most_characters else text
