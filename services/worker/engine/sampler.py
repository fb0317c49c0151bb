"""From logits to tokens, for all rows of a step at once.

A token is a pure function of (logits, params, output position, tokens so far): rows do not influence one another,
and a request resumed elsewhere goes on alike. See :mod:`~services.worker.engine.uniform` and
:mod:`~services.worker.engine.token_choice`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from services.worker.engine.logit_edits import edit_logits, is_edited
from services.worker.engine.logprobs import token_logprobs
from services.worker.engine.row_choice import choose_by_row
from services.worker.engine.sample_row import Sampled, SampleRow
from services.worker.engine.token_choice import choose
from services.worker.engine.uniform import uniform
from shared.errors import InternalError
from shared.messages.tokens import TokenLogprob

__all__ = ["SampleRow", "Sampled", "prompt_logprobs", "sample"]


@torch.inference_mode()
def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
    """Choose one token for each row of ``logits`` float32 [R, vocab], which stays as it is.

    A row whose logits are NaN or infinite, or whose every token is banned, gets ``Sampled.error``; the others
    are not affected. Greedy rows get the smallest id among equally likely tokens.
    """
    if not rows:
        return []
    edited = [number for number, row in enumerate(rows) if is_edited(row)]
    final = logits
    if edited:
        final = logits.clone()
        if len(edited) == len(rows):
            edit_logits(final, rows)
        else:
            which = torch.tensor(edited, device=logits.device)
            changed = final[which]
            edit_logits(changed, [rows[number] for number in edited])
            final[which] = changed
    best, tokens, usable = _likeliest(final)
    drawn = [number for number, row in enumerate(rows) if usable[number] and row.params.temperature > 0]
    if drawn:
        uniforms = [uniform(rows[number].params.seed, rows[number].output_position) for number in drawn]
        if len(drawn) < len(rows):
            which = torch.tensor(drawn, device=logits.device)
            final_drawn, best = final[which], best[which]
        else:
            final_drawn = final
        params = [rows[number].params for number in drawn]
        if logits.device.type == "cpu":
            chosen = choose_by_row(final_drawn, best, params, uniforms)
        else:
            chosen = choose(final_drawn, best, params, uniforms).tolist()
        for number, token in zip(drawn, chosen, strict=True):
            tokens[number] = token
    logprobs = _logprobs(logits, rows, tokens, usable)
    return [
        Sampled(token, logprobs.get(number)) if usable[number] else _unusable(final[number], rows[number].fault)
        for number, token in enumerate(tokens)
    ]


@torch.inference_mode()
def prompt_logprobs(logits: torch.Tensor, next_ids: Sequence[int] | torch.Tensor, k: int) -> list[TokenLogprob]:
    """Logprobs of the prompt's own tokens: row t of ``logits`` [T, vocab] is asked about ``next_ids[t]``, the token
    that follows it, and gives the ``k`` most likely ones beside.
    """
    tokens = torch.as_tensor(next_ids).tolist()
    return token_logprobs(logits, tokens, [k] * len(tokens))


def _likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, list[int], list[bool]]:
    """Each row's largest logit, the smallest id that has it, and whether it is finite.

    The maximum is NaN if any logit is, +inf if any is, and -inf if no token is left.
    """
    if logits.device.type != "cpu":
        best, greedy = logits.max(dim=1)
        # In one read, because each of them waits for the device.
        tokens_there, finite = torch.stack([greedy, torch.isfinite(best).to(greedy.dtype)]).tolist()
        return best, tokens_there, [bool(each) for each in finite]
    # Ten times sooner than torch finds it, which is a millisecond for 8 rows of 131,072 tokens.
    array = logits.numpy()
    tokens = array.argmax(axis=1)
    largest = array[np.arange(len(array)), tokens]
    return torch.from_numpy(largest), tokens.tolist(), np.isfinite(largest).tolist()


def _logprobs(
    logits: torch.Tensor, rows: Sequence[SampleRow], tokens: list[int], usable: list[bool]
) -> dict[int, TokenLogprob]:
    asked = [
        (number, row.params.logprobs)
        for number, row in enumerate(rows)
        if usable[number] and row.params.logprobs is not None
    ]
    if not asked:
        return {}
    numbers = [number for number, _ in asked]
    found = token_logprobs(
        logits[torch.tensor(numbers, device=logits.device)],
        [tokens[number] for number in numbers],
        [count for _, count in asked],
    )
    return dict(zip(numbers, found, strict=True))


def _unusable(logits: torch.Tensor, fault: str) -> Sampled:
    banned = bool(torch.isneginf(logits).all())
    why = (fault or "every token is banned") if banned else "the model's logits are not finite"
    return Sampled(-1, error=InternalError(f"no token can be chosen: {why}", code="unusable_logits"))
