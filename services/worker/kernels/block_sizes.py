"""Sizes of the blocks in which the attention kernels work. Arithmetic only.

A tensor core takes nothing smaller than 16, and arrays in Triton have sizes that are powers of two. The parts of Q, K
and V in one program must fit into shared memory (99 KiB on sm_89, 227 KiB on sm_90) and its accumulators into
registers: exact products in float32 take no tensor core and hold most. The compiled results on each architecture are in
tests/unit/worker/kernels/compile_bounds.json; no size has been tuned by measurement.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_BLOCK = 16


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """Sizes of one shape.

    block_d: head_dim, padded. group: query heads of one KV head, padded. decode_rows: rows of a decode tile.
    extend_rows: rows of an extend tile, a multiple of ``group``. block_n: keys at a time.
    """

    block_d: int
    group: int
    decode_rows: int
    extend_rows: int
    block_n: int
    num_warps: int
    num_stages: int


def next_power_of_two(value: int) -> int:
    """Return the least power of two that is not below ``value``, which is 1 or more."""
    return 1 << (value - 1).bit_length()


def block_sizes(head_dim: int, group: int, itemsize: int, *, is_rounded: bool = False) -> BlockSizes:
    """Return sizes for this shape; ``itemsize`` is that of the queries' dtype, bytes.

    K and V that are ``is_rounded`` pass through registers on their way to it, so more warps share them, and fewer keys
    at a time in float32.
    """
    block_d = max(MIN_BLOCK, next_power_of_two(head_dim))
    row_bytes = block_d * itemsize
    padded_group = next_power_of_two(group)
    is_small = row_bytes <= 256 and itemsize < 4
    extend_rows = 64 if row_bytes <= 256 else 32 if row_bytes <= 512 else MIN_BLOCK
    return BlockSizes(
        block_d=block_d,
        group=padded_group,
        decode_rows=max(MIN_BLOCK, padded_group),
        extend_rows=max(extend_rows, padded_group),
        block_n=64 if is_small else 16 if is_rounded and itemsize == 4 else 32 if row_bytes <= 1024 else MIN_BLOCK,
        num_warps=4 if is_small and not is_rounded else 8,
        num_stages=2,
    )


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Sizes for latents.

    block_r and block_p: rank and rope, padded. heads: query heads, padded. rows: rows of a tile, tokens times heads.
    block_n: keys at a time.
    """

    block_r: int
    block_p: int
    heads: int
    rows: int
    block_n: int
    num_warps: int
    num_stages: int


def latent_sizes(rank: int, rope: int, heads: int, itemsize: int) -> LatentSizes:
    """Return sizes for latents of ``rank + rope`` values; ``itemsize`` is that of the pool's dtype, bytes."""
    block_r, padded = max(MIN_BLOCK, next_power_of_two(rank)), next_power_of_two(heads)
    is_small = block_r * itemsize <= 1024
    return LatentSizes(
        block_r=block_r,
        block_p=max(MIN_BLOCK, next_power_of_two(rope)),
        heads=padded,
        rows=max(MIN_BLOCK, min(32 if is_small else MIN_BLOCK, padded)),
        block_n=32 if is_small else 16,
        num_warps=8,
        num_stages=2,
    )
