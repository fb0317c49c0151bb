"""The memory that a model needs on each GPU, from its configuration and the size of its files: pure arithmetic.

Two uses: a model whose weights alone exceed a GPU is refused before minutes of reading, with the number of ranks that
would hold it, and pools of GPUs that are not at hand are estimated. The pool of a real one is measured
(:mod:`services.worker.engine.gpu_room`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from services.worker.engine.gpu_room import RoomWish
from services.worker.parallel.division import check_divisible
from shared import model_files
from shared.errors import ConfigError, OperatorError
from shared.messages.pools import DTYPE_BYTES
from shared.quantisation import quantisation
from shared.sizes import size

RANKS = (1, 2, 4, 8, 16)
"""Numbers of ranks that error messages advise."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model. ``weight_bytes`` are of the whole model, ``itemsize`` is that of its data type, bytes."""

    weight_bytes: int
    itemsize: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int

    def rank_weight_bytes(self, ranks: int) -> int:
        """Return the weights of each of ``ranks`` ranks, in bytes.

        A rank has all embeddings (see ``parallel.loading``) and its part of the rest.
        """
        embeddings = self.vocab * self.hidden * self.itemsize
        return embeddings + -(-(self.weight_bytes - embeddings) // ranks)

    def prefill_bytes(self, wish: RoomWish, ranks: int) -> int:
        """Return the estimated peak of the largest prefill besides weights and KV, in bytes.

        In an MLP: its gate, its activation and its product, beside the residual and three more of its width; or the
        logits in their own data type and in float32. What models of full size take on meta tensors is within 5% of it.
        """
        mlp = wish.tokens * (3 * self.intermediate // ranks + 4 * self.hidden) * self.itemsize
        return max(mlp, wish.rows * self.vocab * (self.itemsize + 4))

    def divides_by(self, ranks: int) -> bool:
        """Return whether heads and widths can be divided among ``ranks`` ranks."""
        config = SimpleNamespace(
            model_type="", num_attention_heads=self.heads, num_key_value_heads=self.kv_heads,
            hidden_size=self.hidden, intermediate_size=self.intermediate,
        )  # fmt: skip
        try:
            check_divisible(config, ranks)
        except ConfigError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One of ``count`` GPUs, and its memory in bytes, in use or not."""

    name: str
    total: int
    count: int


def shape_of(model_dir: Path, dtype: str) -> ModelShape | None:
    """Return the shape of a checkpoint in ``dtype`` ("auto" is its own); None where its files do not tell.

    Files of a model with parts besides text hold more than is loaded, those of a quantised one less than its
    dequantised weights take.
    """
    try:
        config = model_files.load_config(model_dir)
        if quantisation(config) is not None:
            return None
        stored_bytes = sum(path.stat().st_size for path in model_files.weight_files(model_dir))
        return _shape(config, stored_bytes, dtype)
    except (OperatorError, OSError, KeyError, TypeError, ValueError):
        return None  # Loading will say what is wrong with it.


def _shape(config: Mapping[str, Any], stored_bytes: int, dtype: str) -> ModelShape:
    stored = config.get("dtype") or config.get("torch_dtype") or "float32"
    itemsize = DTYPE_BYTES[stored if dtype == "auto" else dtype]
    heads = int(config["num_attention_heads"])
    return ModelShape(
        weight_bytes=stored_bytes * itemsize // DTYPE_BYTES[stored],
        itemsize=itemsize,
        hidden=int(config["hidden_size"]),
        intermediate=int(config["intermediate_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        vocab=int(config["vocab_size"]),
    )


def check_weights(shape: ModelShape, ranks: int, gpu: GpuFacts, wish: RoomWish) -> None:
    """Raise ConfigError if the weights alone leave no memory for KV, with the number of ranks that would hold them.

    What other processes have of the GPU does not count: that may pass, and a refusal is permanent.
    """
    allowed = int(gpu.total * wish.fraction)
    own = shape.rank_weight_bytes(ranks)
    if own < allowed:
        return
    each = f"{size(own)} in each of {ranks} ranks" if ranks > 1 else size(own)
    raise ConfigError(
        f"the weights take {each}, and of {size(gpu.total)} of a GPU ({gpu.name}) --device-memory-fraction "
        f"{wish.fraction:g} allows {size(allowed)}: {_advice(shape, allowed, gpu, wish)}"
    )


def _advice(shape: ModelShape, allowed: int, gpu: GpuFacts, wish: RoomWish) -> str:
    needed = least_ranks(shape, allowed, wish)
    if needed is None:
        return "choose a smaller model, or GPUs with more memory"
    here = "1 GPU is" if gpu.count == 1 else f"{gpu.count} GPUs are"
    if needed <= gpu.count:
        return f"choose --tensor-parallel {needed} ({here} here)"
    return f"it fits {needed} such GPUs (--tensor-parallel {needed}), and {here} here; choose a smaller model"


def least_ranks(shape: ModelShape, allowed: int, wish: RoomWish) -> int | None:
    """Return the least number of ranks that have room for the model; None where none has.

    Each rank has ``allowed`` bytes of a GPU, which must have room for the weights, the largest prefill and as much as a
    twentieth of ``allowed`` for KV.
    """
    for ranks in RANKS:
        taken = shape.rank_weight_bytes(ranks) + shape.prefill_bytes(wish, ranks) + wish.reserve_bytes
        if shape.divides_by(ranks) and taken + allowed // 20 <= allowed:
            return ranks
    return None
