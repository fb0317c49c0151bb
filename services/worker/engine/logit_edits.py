"""Changes to logits before a token is chosen: bans, biases and penalties, for all rows of a step at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from services.worker.engine.sample_row import SampleRow, is_penalised


def is_edited(row: SampleRow) -> bool:
    """Return whether a ban, a bias or a penalty changes this row's logits."""
    params = row.params
    return bool(row.forbid or params.logit_bias) or is_penalised(params)


def edit_logits(logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    """Change ``logits`` float32 [R, vocab] in place.

    In this order, as vLLM does: ban ``forbid``; add ``logit_bias``; divide positive and multiply negative logits
    of all tokens of prompt and output by ``repetition_penalty`` (Keskar et al., arXiv 1909.05858, section 4.1);
    subtract ``frequency_penalty`` times the count, and ``presence_penalty`` once, for tokens of the output
    (OpenAI's definition). Token ids outside the vocabulary are ignored.
    """
    vocab_size = logits.shape[1]
    for number, row in enumerate(rows):
        forbidden = [token for token in row.forbid if 0 <= token < vocab_size]
        if forbidden:
            logits[number, torch.tensor(forbidden, device=logits.device)] = float("-inf")
        bias = {token: value for token, value in row.params.logit_bias.items() if 0 <= token < vocab_size}
        if bias:
            tokens = torch.tensor(list(bias), device=logits.device)
            logits[number, tokens] += torch.tensor(list(bias.values()), dtype=logits.dtype, device=logits.device)
    penalised = [number for number, row in enumerate(rows) if is_penalised(row.params)]
    if penalised:
        which = torch.tensor(penalised, device=logits.device)
        logits[which] = _penalise(logits[which], [rows[number] for number in penalised])


def _penalise(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=logits.dtype, device=logits.device)[:, None]

    outputs = _counts([row.output_ids for row in rows], logits)
    seen = (_counts([row.prompt_ids for row in rows], logits) > 0) | (outputs > 0)
    repetition = column([row.params.repetition_penalty for row in rows])
    logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits = logits - outputs * column([row.params.frequency_penalty for row in rows])
    return logits - (outputs > 0).to(logits.dtype) * column([row.params.presence_penalty for row in rows])


def _counts(ids: Sequence[Sequence[int] | npt.NDArray[np.int32]], like: torch.Tensor) -> torch.Tensor:
    """Return how often each token occurs in each list, ``[len(ids), vocab]`` of dtype and device of ``like``."""
    vocab_size = like.shape[1]
    flat = [np.asarray(tokens, dtype=np.int64) for tokens in ids]
    rows = np.repeat(np.arange(len(flat)), [len(tokens) for tokens in flat])
    tokens = np.concatenate(flat)
    known = (tokens >= 0) & (tokens < vocab_size)
    places = torch.from_numpy((rows * vocab_size + tokens)[known]).to(like.device)
    return torch.bincount(places, minlength=len(flat) * vocab_size).view(-1, vocab_size).to(like.dtype)
