"""Training rows: shapes, roles and positions."""

import random

import numpy as np
import pytest

from thermocline.documents.grammar import Split, make_document
from tools.train_model.rows import Role, RowMix, make_batch
from tools.train_model.tokenizer import PieceEncoder, train_tokenizer


def test_pieces_encode_as_the_tokenizer_does(encoder: PieceEncoder) -> None:
    """The memorising encoder gives the tokenizer's own ids."""
    document, _ = make_document(random.Random(1), 400, encoder, split=Split.TRAINING)

    assert encoder.encode(document) == encoder.tokenizer.encode(document).ids


def test_the_tokenizer_is_repeatable_and_splits_digits(encoder: PieceEncoder) -> None:
    """Training the tokenizer twice gives one vocabulary, in which digits stand alone."""
    vocabulary = encoder.tokenizer.get_vocab()

    assert train_tokenizer().get_vocab() == vocabulary
    assert not [t for t in vocabulary if len(t) > 1 and any(c.isdigit() for c in t)]


@pytest.mark.parametrize("repetition", [0.0, 1.0])
def test_a_batch_has_answers_and_rising_positions(encoder: PieceEncoder, repetition: float) -> None:
    """Every row has answer tokens, and its positions rise and stay inside the context."""
    mix = RowMix(repetition=repetition, gapped=1.0, context_tokens=1000)
    ids, roles, positions = make_batch(random.Random(2), encoder, 6, 255, mix)

    assert ids.shape == roles.shape == positions.shape == (6, 256)
    assert ((roles == Role.ANSWER).sum(1) > 0).all()
    assert (np.diff(positions) >= 1).all()
    assert positions.max() < 1000


def test_answers_end_with_the_end_token(encoder: PieceEncoder) -> None:
    """In a conversation each answer span's last token is the end token, so replies stop."""
    mix = RowMix(repetition=0.0, gapped=0.0)
    ids, roles, _ = make_batch(random.Random(3), encoder, 4, 300, mix)
    ends = (roles[:, :-1] == Role.ANSWER) & (roles[:, 1:] != Role.ANSWER)

    assert set(ids[:, :-1][ends].tolist()) == {encoder.special["<|end|>"]}
