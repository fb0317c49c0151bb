"""How a model's heads and rows divide among ranks: pure arithmetic.

Rank r of n has the query heads ``[r * heads / n, (r + 1) * heads / n)`` and the KV heads that they read. With more
ranks than KV heads, several ranks have the same one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shared.errors import ConfigError

_WIDTHS = (
    "intermediate_size",
    "intermediate_size_mlp",
    "ffn_dim",
    "n_inner",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "shared_intermediate_size",
)
"""Names of inner widths of MLPs, of experts, and of shared experts, by model."""

_BY_LAYER = ("num_attention_heads_per_layer",)
"""Names of numbers of query heads, one for each layer, by model."""

_DOUBLED = {"mimo_v2_flash": "sliding_attention"}
"""Types whose code gives layers of one kind twice the KV heads that the configuration names."""


@dataclass(frozen=True, slots=True)
class Share:
    """The share of ``rank`` among ``ranks``."""

    rank: int
    ranks: int

    def query_heads(self, total: int) -> range:
        """Return the query heads of this rank, of ``total`` that are divisible."""
        each = total // self.ranks
        return range(self.rank * each, (self.rank + 1) * each)

    def kv_heads(self, total: int) -> range:
        """Return the KV heads of this rank, of ``total`` that are divisible, see :func:`check_divisible`."""
        if total >= self.ranks:
            each = total // self.ranks
            return range(self.rank * each, (self.rank + 1) * each)
        first = self.rank * total // self.ranks
        return range(first, first + 1)

    def rows(self, total: int, mine: int, kv_heads: int) -> range | None:
        """Return which of ``total`` rows of a weight are this rank's, given that it has ``mine``.

        Return None if neither division nor repeated KV heads explain it.
        """
        if mine * self.ranks == total:
            return range(self.rank * mine, (self.rank + 1) * mine)
        if self.ranks > kv_heads and total == kv_heads * mine:
            first = self.kv_heads(kv_heads).start * mine
            return range(first, first + mine)
        return None


def layer_configs(config: Any) -> list[Any]:
    """Return the configuration of each layer: where layers differ, the library has one for each.

    A single one is for all layers where ``config`` does not say how many there are.
    """
    if getattr(config, "is_heterogeneous", False):
        return list(config.per_layer_config)
    return [config] * int(getattr(config, "num_hidden_layers", 1))


def head_dim_of(config: Any) -> int:
    """Return the width of one head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def kv_heads_of(config: Any) -> int:
    """Return the KV heads of a layer; a model that names none has one for every query head."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def kv_heads_by_layer(config: Any) -> tuple[int, ...]:
    """Return the KV heads of each layer."""
    doubled = _DOUBLED.get(config.model_type)
    kinds = getattr(config, "layer_types", None) or [None] * int(config.num_hidden_layers)
    return tuple(
        kv_heads_of(layer) * (2 if kind is not None and kind == doubled else 1)
        for layer, kind in zip(layer_configs(config), kinds, strict=True)
    )


def keeps_latents(config: Any) -> bool:
    """Return whether layers that attend do so by latents, which every rank has whole."""
    return bool(getattr(config, "kv_lora_rank", None))


def check_divisible(config: Any, ranks: int) -> None:
    """Raise ConfigError, with everything that does not divide, unless ``ranks`` can share the model of ``config``."""
    if any(getattr(layer, "num_attention_heads", None) is None for layer in layer_configs(config)):
        raise ConfigError(f"--tensor-parallel {ranks}: {config.model_type} has no attention heads, which ranks divide")
    faults = list(dict.fromkeys(fault for layer in layer_configs(config) for fault in _faults(layer, ranks)))
    if faults:
        raise ConfigError(
            f"--tensor-parallel {ranks}: {config.model_type} has {', '.join(faults)}, which do not divide"
        )


def _faults(config: Any, ranks: int) -> Iterator[str]:
    heads, kv_heads = int(config.num_attention_heads), kv_heads_of(config)
    if heads % ranks:
        yield f"{heads} attention heads"
    if not keeps_latents(config) and kv_heads % ranks and ranks % kv_heads:
        yield f"{kv_heads} KV heads"
    for name, width in _widths(config):
        yield from (f"{name} = {each}" for each in _each(width) if each % ranks)


def config_of_rank(config: Any, ranks: int) -> Any:
    """Return the configuration of a model as large as one rank's share. ``config`` stays as it is."""
    mine = copy.deepcopy(config)
    if not getattr(config, "is_heterogeneous", False):
        for name, value in _sizes_of_rank(config, ranks).items():
            derived = getattr(type(config), name, None)
            if not isinstance(derived, property) or derived.fset is not None:  # Falcon's head_dim follows from others.
                setattr(mine, name, value)
        return mine
    layers = list(config.per_layer_config)
    # Layers have sizes of their own where they differ; the other sizes are those of any layer.
    differing = set(config.per_layer_attributes)
    for name, value in _sizes_of_rank(layers[0], ranks).items():
        setattr(mine, name, value)
    mine.per_layer_config = {
        number: {name: getattr(layer, name) for name in differing}
        | {name: value for name, value in _sizes_of_rank(layer, ranks).items() if name in differing}
        for number, layer in enumerate(layers)
    }
    return mine


def narrowed(mine: Any, ranks: int) -> Any:
    """Return the configuration of a rank's share with its part of the hidden size, too. ``mine`` stays as it is."""
    narrow = copy.deepcopy(mine)
    narrow.hidden_size = mine.hidden_size // ranks
    return narrow


def _sizes_of_rank(config: Any, ranks: int) -> dict[str, Any]:
    """Return the fields of a rank's share of the configuration that differ from those of the whole layer."""
    sizes: dict[str, Any] = {
        "head_dim": head_dim_of(config),  # Otherwise models derive it from the number of heads, which is another now.
        "num_key_value_heads": max(1, kv_heads_of(config) // ranks),
        "num_attention_heads": config.num_attention_heads // ranks,
    }
    for name, width in _widths(config):
        sizes[name] = width // ranks if isinstance(width, int) else [each // ranks for each in width]
    return sizes


def _widths(config: Any) -> list[tuple[str, int | list[int]]]:
    """Return the inner widths of MLPs and experts, and numbers of heads by layer, with their names.

    The names are those in the configuration, as far as it has them. A value is one for all layers, or one for each.
    """
    found = [(name, getattr(config, name, None)) for name in (*_WIDTHS, *_BY_LAYER)]
    return [(name, width) for name, width in found if width and all(isinstance(each, int) for each in _each(width))]


def _each(width: Any) -> Sequence[Any]:
    return width if isinstance(width, list | tuple) else [width]
