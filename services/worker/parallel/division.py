"""How a model's heads and rows divide among ranks: pure arithmetic.

Rank r of n has the query heads ``[r * heads / n, (r + 1) * heads / n)`` and the KV heads that they read. With more
ranks than KV heads, several ranks have the same one.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from shared.errors import ConfigError
from shared.messages.pools import KvGeometry

_WIDTHS = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
)
"""Inner widths of MLPs, of experts, and of experts that every token goes to, by model."""


@dataclass(frozen=True, slots=True)
class Share:
    """What belongs to ``rank`` of ``ranks``."""

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

    def rows(self, total: int, mine: int, kv_heads: int, head_dim: int) -> range | None:
        """Which of ``total`` rows of a weight are this rank's, given that it has ``mine``; None if neither division
        nor repeated KV heads explain it.
        """
        if mine * self.ranks == total:
            return range(self.rank * mine, (self.rank + 1) * mine)
        if self.ranks > kv_heads and mine == head_dim and total == kv_heads * head_dim:
            first = self.kv_heads(kv_heads).start * head_dim
            return range(first, first + mine)
        return None


def head_dim_of(config: Any) -> int:
    """Width of one head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def kv_heads_of(config: Any) -> int:
    """KV heads of a layer; a model that names none has one for every query head."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def check_divisible(config: Any, ranks: int) -> None:
    """Raise ConfigError, with everything that does not divide, unless ``ranks`` can share the model of ``config``."""
    faults = []
    heads, kv_heads = int(config.num_attention_heads), kv_heads_of(config)
    if heads % ranks:
        faults.append(f"{heads} attention heads")
    if kv_heads % ranks and ranks % kv_heads:
        faults.append(f"{kv_heads} KV heads")
    if not isinstance(getattr(config, "intermediate_size", None), int):
        faults.append("layers whose MLPs are not all of one width")
    faults += [f"{name} = {width}" for name, width in _widths(config) if width % ranks]
    if faults:
        raise ConfigError(
            f"--tensor-parallel {ranks}: {config.model_type} has {', '.join(faults)}, which do not divide"
        )


def config_of_rank(config: Any, ranks: int) -> Any:
    """Return the configuration of a model as large as one rank's share. ``config`` stays as it is."""
    head_dim, kv_heads = head_dim_of(config), kv_heads_of(config)
    mine = copy.deepcopy(config)
    mine.head_dim = head_dim  # Otherwise models derive it from the number of heads, which is another now.
    mine.num_key_value_heads = max(1, kv_heads // ranks)
    mine.num_attention_heads = config.num_attention_heads // ranks
    for name, width in _widths(config):
        setattr(mine, name, width // ranks)
    return mine


def _widths(config: Any) -> list[tuple[str, int]]:
    """Return the inner widths of the configuration's MLPs and experts, as far as it has them, by name."""
    found = [(name, getattr(config, name, None)) for name in _WIDTHS]
    return [(name, width) for name, width in found if isinstance(width, int) and width]


def whole_geometry(part: KvGeometry, config: Any) -> KvGeometry:
    """Return the geometry of the group's pages (``part`` is one rank's): that of a worker with one rank."""
    return KvGeometry(
        layers=part.layers,
        kv_heads=kv_heads_of(config),
        head_dim=part.head_dim,
        page_size=part.page_size,
        dtype=part.dtype,
    )
