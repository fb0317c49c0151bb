"""Training filler: endless, and never from the held-out split."""

import random
import re

from thermocline.documents.grammar import FILLER, Split, split_of
from thermocline.documents.words import MACHINES, PLACES, WORDS
from tools.train_model.noise import FILLER_WORDS, noisy_sentence


def test_training_filler_does_not_run_out() -> None:
    """A thousand draws are mostly different sentences, each ending in one full stop."""
    rng = random.Random(0)
    drawn = [noisy_sentence(rng) for _ in range(1000)]

    assert len(set(drawn)) > 700
    assert all(sentence.endswith(".") and not sentence.endswith("..") for sentence in drawn)


def test_training_filler_holds_nothing_held_out() -> None:
    """No held-out sentence is drawn, and no made-up name of the held-out split."""
    rng = random.Random(1)
    drawn = [noisy_sentence(rng) for _ in range(2000)]
    plain = {*FILLER_WORDS, *WORDS, *PLACES, *MACHINES}
    made_up = {
        word for sentence in drawn for word in re.findall(r"(?<!^)\b[A-Z][a-z]+", sentence) if word.lower() not in plain
    }

    assert set(drawn).isdisjoint(FILLER[Split.HELDOUT])
    assert len(made_up) > 100
    assert all(split_of(name) is Split.TRAINING for name in made_up)
