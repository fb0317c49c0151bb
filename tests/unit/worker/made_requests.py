"""Running requests without a model or a tokenizer."""

from __future__ import annotations

import numpy as np

from services.worker.answers import Answer
from services.worker.requests import RunningRequest
from shared.messages.requests import SamplingParams


class Silence:
    """A token stream without text."""

    def feed(self, token: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


def make_request(
    *, tokens: int = 10, pages: tuple[int, ...] = (5, 6, 7, 8), computed: int = 0, max_tokens: int = 100
) -> RunningRequest:
    params = SamplingParams(max_tokens=max_tokens)
    return RunningRequest(
        request_id="r",
        attempt=1,
        gateway_id="g",
        prompt_ids=range(tokens),
        tokens=list(range(tokens)),
        pages=np.array(pages, dtype=np.int32),
        page_size=4,
        computed=computed,
        sampling=params,
        answer=Answer(params, prompt_tokens=tokens, max_context=1000, eos_token_ids=(), stream=Silence()),
        lease_tokens=16,
    )


def decoding(*, tokens: int = 10, max_tokens: int = 100) -> RunningRequest:
    """One whose prompt is computed and whose first token has been drawn."""
    request = make_request(tokens=tokens, max_tokens=max_tokens)
    request.change("compute")
    request.change("sample")
    return request
