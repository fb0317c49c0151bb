"""A deterministic stand-in for the model that really reads its KV: wrong or missing pages change its tokens.

In every layer it writes each token's id as K and its position as V. The next token is a digest of the K and V of
all tokens so far, read back through the page table. So the expected answer is a plain function of the tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import torch

from services.worker.compute import Launcher
from services.worker.engine.forward_meta import ForwardMeta
from services.worker.engine.model_runner import NOTHING_TO_PROVE
from services.worker.engine.states.running import NoSlots
from services.worker.kv.device_pool import DevicePool
from shared.messages.pools import KvGeometry
from tests.run_name import shm_prefix

PAGE_SIZE = 4
VOCAB_SIZE = 40
EOS = 2
POISON = 13
MAX_CONTEXT = 256
GEOMETRY = KvGeometry(layers=3, kv_heads=1, head_dim=2, page_size=PAGE_SIZE, dtype="float32")
SHM_PREFIX = shm_prefix("worker")


def kv_of(tokens: Sequence[int]) -> np.ndarray:
    """K and V that the model writes in one layer, float32 [tokens, 2 (K, V), head_dim]."""
    kv = np.empty((len(tokens), 2, GEOMETRY.head_dim), dtype=np.float32)
    kv[:, 0] = np.asarray(tokens, dtype=np.float32)[:, None]
    kv[:, 1] = np.arange(len(tokens), dtype=np.float32)[:, None]
    return kv


def next_token(tokens: Sequence[int]) -> int:
    """What the model says after ``tokens``: any token from 20 on."""
    return _digest([kv_of(tokens)] * GEOMETRY.layers)


def continuation(tokens: Sequence[int], count: int) -> list[int]:
    """The greedy answer of ``count`` tokens."""
    known = list(tokens)
    for _ in range(count):
        known.append(next_token(known))
    return known[len(tokens) :]


def _digest(layers: Sequence[np.ndarray]) -> int:
    digest = hashlib.blake2b(b"".join(layer.tobytes() for layer in layers), digest_size=8).digest()
    return 20 + int.from_bytes(digest, "little") % (VOCAB_SIZE - 20)


class FakeRunner:
    """Satisfies ``services.worker.compute.Runner``. ``steps`` records the segments of each forward pass."""

    max_context = MAX_CONTEXT
    vocab_size = VOCAB_SIZE
    model_bytes = 1 << 20
    lookup_obstacle = ""
    eos_token_ids = (EOS,)
    proofs = NOTHING_TO_PROVE
    launcher: Launcher | None = None
    state_slots = NoSlots()

    def __init__(self, pages: int = 64) -> None:
        self.pool = DevicePool.create(GEOMETRY, pages, device="cpu", shm_prefix=SHM_PREFIX)
        self.steps: list[list[tuple[int, int]]] = []  # (context, rows) of each segment.
        self.is_broken = False
        self.is_poisonable = False
        self.on_forward: Callable[[], object] = lambda: None  # Called at the start of each forward pass.

    @property
    def geometry(self) -> KvGeometry:
        return self.pool.geometry

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, meta: ForwardMeta, last_rows: torch.Tensor
    ) -> torch.Tensor:
        self.on_forward()
        self.steps.append([(segment.context, segment.rows) for segment in meta.segments])
        if self.is_broken or (self.is_poisonable and POISON in ids.tolist()):
            raise RuntimeError("out of memory")
        for layer in range(GEOMETRY.layers):
            keys = self.pool.k(layer).view(-1, GEOMETRY.head_dim)
            values = self.pool.v(layer).view(-1, GEOMETRY.head_dim)
            keys[meta.slots] = ids.float()[:, None]
            values[meta.slots] = positions.float()[:, None]
            if meta.gate is not None:
                meta.gate.wait(layer)
        return self.logits(meta, last_rows)

    def settle(self) -> None:
        """Steps are done when they return."""

    def logits(self, meta: ForwardMeta, last_rows: torch.Tensor) -> torch.Tensor:
        """What the model says behind these rows, given the KV that is there."""
        said = [self._say(meta, row) for row in last_rows.tolist()]
        logits = torch.zeros((len(said), VOCAB_SIZE))
        for row, token in enumerate(said):
            logits[row, token] = 10.0
        return logits

    def _say(self, meta: ForwardMeta, row: int) -> int:
        first = 0
        for segment in meta.segments:
            if row < first + segment.rows:
                length = segment.context + row - first + 1
                break
            first += segment.rows
        else:
            raise AssertionError(f"row {row} is beyond the batch")
        slots = np.arange(length)
        flat = torch.from_numpy(segment.pages[slots // PAGE_SIZE].astype(np.int64) * PAGE_SIZE + slots % PAGE_SIZE)
        layers = []
        for layer in range(GEOMETRY.layers):
            keys = self.pool.k(layer).view(-1, GEOMETRY.head_dim)[flat]
            values = self.pool.v(layer).view(-1, GEOMETRY.head_dim)[flat]
            layers.append(torch.stack((keys, values), dim=1).numpy())
        return self.say_after(layers)

    def say_after(self, layers: Sequence[np.ndarray]) -> int:
        """The next token, given K and V of each layer, float32 [tokens, 2, head_dim]."""
        return _digest(layers)

    def close(self) -> None:
        self.pool.close()
