"""What a runner of ours answers to a prompt that it computes whole and alone, token by token from there: the truth for
cells that must not change a bit, whatever a prefix went through.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from services.worker.engine.model_runner import ModelRunner
from shared.messages.pools import KvDtype
from tests.checkpoints import EOS
from tests.engine_driver import Request, decode_greedily, page_tables
from tests.run_name import shm_prefix

_PAGE_SIZE = 16
_TOKENS = 1024


class ColdRuns:
    """In the place of :class:`~tests.reference.Reference`: rounding decides nothing here, so every prompt will do."""

    def __init__(self, model: Path, kv_dtype: KvDtype) -> None:
        self._runner = ModelRunner.load(
            model,
            dtype="float32",
            device="cpu",
            page_size=_PAGE_SIZE,
            device_kv_bytes=None,
            pages=_TOKENS // _PAGE_SIZE,
            threads=1,
            shm_prefix=shm_prefix("cold"),
            kv_dtype=kv_dtype,
        )
        self._greedy: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def greedy(self, prompt: list[int], max_tokens: int, *, ignore_eos: bool = False) -> list[int]:
        """The answer's token ids; it ends after ``max_tokens``, or an end-of-sequence token that is not ignored."""
        key = tuple(prompt), max_tokens
        if key not in self._greedy:
            (table,) = page_tables(self._runner, [len(prompt) + max_tokens], seed=0)
            request = Request(list(prompt), table)
            decode_greedily(self._runner, [request], chunks=[len(prompt)], new_tokens=max_tokens)
            self._greedy[key] = request.output
        tokens = self._greedy[key]
        return tokens if ignore_eos or EOS not in tokens else tokens[: tokens.index(EOS) + 1]

    def decided(self, draw: Callable[[], list[int]], max_tokens: int, *, ignore_eos: bool = False) -> list[int]:
        """The first prompt from ``draw``."""
        del max_tokens, ignore_eos
        return draw()

    def close(self) -> None:
        """Give the pool back."""
        self._runner.close()
