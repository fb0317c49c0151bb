"""The memory that a checkpoint needs, from its files, without loading it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from shared import model_files
from shared.errors import ConfigError, OperatorError
from shared.memory.pool_sizes import ModelDemand
from shared.messages.pools import DTYPE_BYTES, FLOAT8, KvGeometry
from shared.model_context import named_in
from shared.undecodable import UNDECODABLE


class _ModelConfig(msgspec.Struct):
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    dtype: str | None = None
    torch_dtype: str | None = None

    @property
    def stored_dtype(self) -> str:
        return self.dtype or self.torch_dtype or "float32"


def geometry_of(model: Path, dtype: str = "auto") -> KvGeometry:
    """Return the shape of a checkpoint's KV in pages of 16 tokens, from its config.json; ``auto`` is its data type.

    Raises ConfigError if the file cannot be read or lacks a field.
    """
    return _geometry(_read(model), dtype, 16)


def query_heads_of(model: Path) -> int:
    """Return the number of query heads, from config.json. Raises ConfigError if it cannot be read or lacks it."""
    return _read(model).num_attention_heads


def hidden_width_of(model: Path) -> int:
    """Return the values of a hidden state, from config.json. Raises ConfigError if it cannot be read or lacks it."""
    return _read(model).hidden_size


def demand_of(model: Path, dtype: str = "auto", kv_dtype: str = "auto") -> ModelDemand:
    """Return the memory that a worker needs for this checkpoint in ``dtype``; what the files do not say is 0.

    ``kv_dtype`` is the setting of workers.
    """
    try:
        weights = sum(path.stat().st_size for path in model_files.weight_files(model))
    except (OperatorError, OSError):
        weights = 0  # The worker refuses it, with the reason.
    try:
        config = _read(model)
        geometry = _geometry(config, dtype, 1)
        kept = msgspec.structs.replace(geometry, dtype=FLOAT8) if kv_dtype == "fp8" else geometry
        token_bytes = kept.token_bytes
        ratio = DTYPE_BYTES[geometry.dtype] / DTYPE_BYTES[config.stored_dtype]
        context = named_in(model_files.load_config(model))
    except (OperatorError, KeyError, ZeroDivisionError):
        return ModelDemand(weight_bytes=weights)
    return ModelDemand(
        weight_bytes=int(weights * ratio),
        token_bytes=max(0, token_bytes),
        context_tokens=context,
        kv_heads=max(0, geometry.kv_heads),
    )


def _read(model: Path) -> _ModelConfig:
    try:
        return msgspec.json.decode((model / "config.json").read_bytes(), type=_ModelConfig)
    except OSError as error:
        raise ConfigError(f"cannot read {model / 'config.json'}: {error.strerror}") from error
    except UNDECODABLE as error:
        raise ConfigError(f"{model / 'config.json'} does not tell the shape of KV: {error}") from error


def _geometry(config: _ModelConfig, dtype: str, page_size: int) -> KvGeometry:
    heads = config.num_attention_heads
    return KvGeometry(
        layers=config.num_hidden_layers,
        kv_heads=config.num_key_value_heads or heads,
        head_dim=config.head_dim or config.hidden_size // heads,
        page_size=page_size,
        dtype=dtype if dtype != "auto" else config.stored_dtype,
    )
