"""Filler for training only: sentences with words exchanged, so that no finite list can be learned.

A model that has seen a hundred filler sentences ten thousand times knows them by heart and is lost
when a document brings another one: with unseen filler its exact match fell from 0.99 to 0.6.
"""

import random

from thermocline.documents import filler, grammar
from thermocline.documents.words import WORDS

EXCHANGED_SHARE = 0.3
"""The chance that a word of a sentence is exchanged for another."""


def _words_of(sentences: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted({word.lower() for s in sentences for word in s.strip(".").split()}))


TRAINING_FILLER = grammar.FILLER[grammar.Split.TRAINING]
FILLER_WORDS = _words_of(TRAINING_FILLER)


def _other_word(rng: random.Random) -> str:
    """Any word at all: from filler, from the values, a made-up name or a number."""
    kind = rng.random()
    if kind < 0.45:
        return rng.choice(FILLER_WORDS)
    if kind < 0.80:
        return rng.choice(WORDS)
    if kind < 0.90:
        return grammar.make_name(rng, grammar.Split.TRAINING)
    return str(rng.randrange(10 ** rng.randrange(1, 6)))


def noisy_sentence(rng: random.Random) -> str:
    """Draw a training sentence as it is, with words exchanged, or of random words altogether."""
    kind = rng.random()
    if kind < 0.4:
        return filler.filler_sentence(rng, TRAINING_FILLER)
    if kind < 0.8:
        words = filler.filler_sentence(rng, TRAINING_FILLER).strip(".").split()
        words = [_other_word(rng) if rng.random() < EXCHANGED_SHARE else word for word in words]
    else:
        words = [_other_word(rng) for _ in range(rng.randrange(4, 12))]
    text = " ".join(words)
    return text[0].upper() + text[1:] + "."
