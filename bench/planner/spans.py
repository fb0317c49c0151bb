"""What exists of a prefix: consecutive spans, and for each the layers that are on the device or have copies.

Sets of layers are integers, bit l for layer l: a span of eighty layers is then compared in one operation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator

Form = Literal["kv", "hidden"]


@dataclass(frozen=True, slots=True)
class Copy:
    """Some layers of a span in one form at one source: host, disk, remote, or a neighbour's device.

    A hidden state is the input of its layer.
    """

    source: str
    form: Form
    layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Consecutive tokens that were kept alike: a node's. ``device`` is the set of layers whose KV is there already."""

    tokens: int
    device: int = 0
    copies: tuple[Copy, ...] = ()


def all_layers(layers: int) -> int:
    """The set of layers [0, layers)."""
    return (1 << layers) - 1


def layer_mask(start: int, end: int) -> int:
    """The set of layers [start, end)."""
    return ((1 << end) - 1) & ~((1 << start) - 1)


def lowest(layers: int, count: int) -> int:
    """The ``count`` lowest layers of a set, or all of it."""
    found, left = 0, layers
    for _ in range(min(count, layers.bit_count())):
        bit = left & -left
        found |= bit
        left ^= bit
    return found


def ranges(layers: int) -> Iterator[tuple[int, int]]:
    """A set of layers as ranges [start, end), lowest first."""
    start = 0
    while layers >> start:
        rest = layers >> start
        start += (rest & -rest).bit_length() - 1
        length = (~(layers >> start) & ((layers >> start) + 1)).bit_length() - 1
        yield start, start + length
        start += length
