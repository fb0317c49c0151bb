"""A quick look at a model in training: the share of answers it gets wholly right.

Teacher-forced on held-out conversations with seeds of their own; ``evaluate`` is the real measure.
"""

import random

import torch

from thermocline.documents.grammar import Split
from tools.train_model.model import LanguageModel
from tools.train_model.rows import Role, RowMix, make_batch
from tools.train_model.tokenizer import PieceEncoder

PROBE_TOKENS = 8192
VALIDATION_SEED = 900_000


@torch.no_grad()
def probe(model: LanguageModel, encoder: PieceEncoder, length: int, easy: float = 1.0) -> float:
    """Exact match over the answers in about ``PROBE_TOKENS`` tokens of rows of ``length``."""
    rng = random.Random(VALIDATION_SEED + length)
    mix = RowMix(easy=easy, repetition=0.0, gapped=0.0)
    batch = make_batch(rng, encoder, max(2, PROBE_TOKENS // length), length, mix, Split.HELDOUT)
    device = model.model.embed_tokens.weight.device
    ids, roles, positions = (torch.from_numpy(array).to(device) for array in batch)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        guesses = model(ids[:, :-1], positions[:, :-1]).argmax(-1)
    right = (guesses == ids[:, 1:]).tolist()
    is_answer = (roles[:, 1:] == Role.ANSWER).tolist()
    total = correct = 0
    for row_right, row_answer in zip(right, is_answer, strict=True):
        start: int | None = None
        for index, inside in enumerate(row_answer):
            if inside and start is None:
                start = index
            elif not inside and start is not None:
                total += 1
                correct += all(row_right[start:index])
                start = None
    return correct / max(1, total)
