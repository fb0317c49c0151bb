"""A stand-in for a model whose answers copy: behind the same two tokens it says the same, now and then another."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from services.worker.engine.forward_meta import ForwardMeta
from tests.unit.worker.fake_model import VOCAB_SIZE, FakeRunner

SURPRISE = 13
"""At every so many tokens it says what depends on all that it has read."""
LETTERS = 6
"""What it says otherwise is one of so many, so that it soon repeats itself."""


class CopyingRunner(FakeRunner):
    """Reads all of its KV, as its parent: what stands at a place that is not its own changes tokens.

    ``sharpness`` is the logit of what it says; the others have those of a digest, below 2.
    """

    def __init__(self, pages: int = 64, sharpness: float = 10.0) -> None:
        super().__init__(pages)
        self.sharpness = sharpness

    def say_after(self, layers: Sequence[np.ndarray]) -> int:
        count = len(layers[0])
        are_in_place = all((layer[:, 1] == np.arange(count)[:, None]).all() for layer in layers)
        if not are_in_place or count % SURPRISE == 0:
            return super().say_after(layers)
        return _of(np.stack([layer[-2:, 0] for layer in layers]))

    def logits(self, meta: ForwardMeta, last_rows: torch.Tensor) -> torch.Tensor:
        said = super().logits(meta, last_rows)
        places = said.argmax(dim=1)
        others = torch.arange(VOCAB_SIZE).float()[None] * (1 + places[:, None]) % 2.0
        return torch.where(said > 0, self.sharpness, others)


def _of(keys: np.ndarray) -> int:
    digest = hashlib.blake2b(keys.tobytes(), digest_size=8).digest()
    return 20 + int.from_bytes(digest, "little") % LETTERS
