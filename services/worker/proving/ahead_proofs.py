"""Proof of steps launched ahead: tokens that the device chooses, keeps, and copies to the host behind an event."""

from __future__ import annotations

import torch

from services.worker.engine.sampler import SampleRow, choose_unread, sample
from services.worker.engine.unread_tokens import Following, UnreadTokens, send_home
from services.worker.proving.part import WrongResult
from services.worker.proving.table import ServedShape, Speed
from shared.messages.requests import SamplingParams

VOCAB_SIZE = 2053
TURNS = 4
"""How often tokens are chosen from logits that depend on the tokens before, with nothing read in between."""

PARAMS = (
    SamplingParams(max_tokens=1, temperature=0),
    SamplingParams(max_tokens=1, temperature=1.5, seed=1),
    SamplingParams(max_tokens=1, temperature=0.8, seed=2, top_p=0.9),
    SamplingParams(max_tokens=1, temperature=1.1, seed=3, top_k=40, min_p=0.01),
)
NEXT_ROWS = (1, 2, 3, 0)
"""Requests change rows at each turn, as they do where others have ended."""


def prove_ahead(shape: ServedShape) -> Speed | None:
    """Prove that requests get the same tokens as where each turn is read before the next. No speed is measured."""
    device, random = torch.device(shape.device), torch.Generator().manual_seed(0)
    # A row of logits for each token that may be the one before.
    logits = (torch.randn((VOCAB_SIZE, VOCAB_SIZE), generator=random) * 4).to(device)
    unread: list[UnreadTokens] = []
    ids = torch.arange(len(PARAMS), device=device)
    for turn in range(TURNS):
        unread.append(send_home(choose_unread(logits.index_select(0, ids), _rows(turn))))
        ids = Following(unread[-1], NEXT_ROWS).ids()
    known = list(range(len(PARAMS)))
    for turn, tokens in enumerate(unread):
        found, are_right = tokens.read()
        expected = [each.token for each in sample(logits[torch.tensor(known, device=device)], _rows(turn))]
        if found != expected or not all(are_right):
            raise WrongResult(f"turn {turn}: tokens {found}, {are_right}, in the place of {expected}")
        known = [expected[row] for row in NEXT_ROWS]
    return None


def _rows(turn: int) -> list[SampleRow]:
    order = list(range(len(PARAMS)))
    for _ in range(turn):
        order = [order[row] for row in NEXT_ROWS]
    return [SampleRow(PARAMS[number], turn) for number in order]
