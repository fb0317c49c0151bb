"""Model runners over small pools, closed at the end of whoever asked for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from services.worker.engine.fused.choice import ForwardPath
from services.worker.engine.model_runner import ModelRunner
from shared.messages.pools import KvDtype

LoadRunner = Callable[..., ModelRunner]


@contextmanager
def runners_of(checkpoint: Callable[[str], Path], shm_prefix: str) -> Iterator[LoadRunner]:
    """Load runners by family; their pools are closed at the end of the block."""
    runners: list[ModelRunner] = []

    def load(
        family: str,
        *,
        page_size: int = 16,
        tokens: int = 1024,
        dtype: str = "auto",
        forward: ForwardPath = "auto",
        kv_dtype: KvDtype = "auto",
    ) -> ModelRunner:
        runner = ModelRunner.load(
            checkpoint(family),
            dtype=dtype,
            device="cpu",
            page_size=page_size,
            device_kv_bytes=None,
            pages=tokens // (page_size or 16),
            threads=1,
            shm_prefix=shm_prefix,
            forward=forward,
            kv_dtype=kv_dtype,
        )
        runners.append(runner)
        return runner

    try:
        yield load
    finally:
        for runner in runners:
            runner.close()
