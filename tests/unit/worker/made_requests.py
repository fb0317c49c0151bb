"""Running requests without a model or a tokenizer."""

from __future__ import annotations

import numpy as np

from services.worker.answers import Answer
from services.worker.requests import RunningRequest
from services.worker.token_sequence import TokenSequence
from shared.messages.base import pack_int32
from shared.messages.requests import Importance, SamplingParams
from shared.messages.worker_plans import SparsePrefix


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
        tokens=TokenSequence(range(tokens)),
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


def made_sparse() -> RunningRequest:
    """Of 26 tokens in pages of four, [8, 20) are sparse: what is chosen of them lies in pages 30 and 31."""
    request = make_request(tokens=26, pages=(5, 6, -1, -1, -1, 7, 8), computed=20)
    request.sparse = SparsePrefix(
        storage_id="s",
        namespace="n",
        start=8,
        end=20,
        depth=0,
        chunks=b"",
        pages=pack_int32([30, 31]),
        importance=Importance(ratio=0.5),
    )
    return request
