"""The sampler's input for one row of logits, and its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.errors import InternalError
from shared.messages.requests import SamplingParams
from shared.messages.tokens import TokenLogprob


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One request that gets a token. The result depends on this, on its row of logits, and on nothing else.

    ``output_position`` counts output tokens of all attempts from 0. ``prompt_ids`` and ``output_ids`` (lists or
    integer arrays) are read only when a penalty asks for them. ``forbid`` are tokens that cannot be chosen here;
    see :func:`forbidden_ids`. ``allowed`` is the mask of those that can (``engine.token_masks``); None allows all, and
    ``fault`` is why a mask allows none.
    """

    params: SamplingParams
    output_position: int
    prompt_ids: Sequence[int] | npt.NDArray[np.int32] = ()
    output_ids: Sequence[int] = ()
    forbid: tuple[int, ...] = ()
    allowed: npt.NDArray[np.int32] | None = None
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The chosen token. When the row's logits allow none, ``error`` says why and ``token`` is -1."""

    token: int
    logprob: TokenLogprob | None = None
    error: InternalError | None = None


def is_penalised(params: SamplingParams) -> bool:
    """Return whether tokens of prompt or output change the logits."""
    return bool(params.presence_penalty or params.frequency_penalty) or params.repetition_penalty != 1.0


def forbidden_ids(params: SamplingParams, output_position: int, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens that would end the answer before ``min_tokens``.

    They are stop tokens, and EOS unless it is ignored anyway. ``ignore_eos`` bans nothing: EOS may be chosen, it just
    does not end the answer.
    """
    if output_position >= params.min_tokens:
        return ()
    return params.stop_token_ids + (() if params.ignore_eos else tuple(eos_token_ids))
