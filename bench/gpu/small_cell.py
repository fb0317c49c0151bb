"""A whole cell with the bundled model, which is trained, so that answers can be compared, and small, so that it starts
soon.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import msgspec

from services.worker.config import WorkerConfig
from shared.errors import ConfigError
from thermocline.client import Answer, stream_answer
from thermocline.demo.workload import Ask, build
from thermocline.supervisor.api import RunningCell, running
from thermocline.supervisor.config import SupervisorConfig, bundled_model

MIB = 2**20
READY_S = 120.0
ANSWER_TOKENS = 48
DOCUMENT_TOKENS = 900


@contextmanager
def small_cell(device: str, dtype: str, **worker: str) -> Iterator[RunningCell]:
    """One worker on ``device``. ``worker`` are settings by name that ``thermocline up`` has no flag for."""
    config = SupervisorConfig(
        port=0, device=device, dtype=dtype, device_kv_bytes=192 * MIB, host_kv_bytes=256 * MIB,
        threads=1 if device == "cpu" else None,
    )  # fmt: skip
    environ = {f"THERMOCLINE_{name.upper()}": value for name, value in worker.items()}
    with running(config, environ=environ, ready_timeout_s=READY_S) as cell:
        yield cell


def worker_has(setting: str) -> bool:
    """Whether workers of this version know a setting."""
    return setting in {each.name for each in msgspec.structs.fields(WorkerConfig)}


def questions(count: int, seed: int) -> list[Ask]:
    """``count`` questions, each about a document of its own. Raises ConfigError without the bundled model."""
    model = bundled_model()
    if model is None:
        raise ConfigError("there is no bundled model here")
    return build(model, documents=count, questions=1, tokens=DOCUMENT_TOKENS, turns=1, seed=seed).asks


async def answer(client: httpx.AsyncClient, model: str, ask: Ask) -> Answer:
    """Greedy, and as long whatever it says."""
    body: dict[str, Any] = {"model": model, "messages": ask.messages, "max_tokens": ANSWER_TOKENS, "temperature": 0}
    return await stream_answer(client, "/v1/chat/completions", body | {"ignore_eos": True, "return_token_ids": True})
