"""Copy pages between pinned host memory and the device pool, changing their layout in the copy (Strata section 4.2).

A program is 1,024 threads and takes a tile of rows at a time, then the next that no other program takes (grid stride).
Each thread moves 16 bytes per access. The bytes in flight decide the bandwidth of a link with long latency (Little's
law, Strata section 3.1), so they never run out: tiles arrive in shared memory by asynchronous copies, and while one is
written on, the next ones, as many as fit, and their page numbers are in flight. Reads bypass the first-level cache and
writes are marked for early eviction: nothing here is read twice, and the cached data of the model's kernels should stay
there.
"""

# Compile-time arguments are in capitals, as everywhere in Triton; the arguments of kernels have no Python types.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch
import triton
import triton.language as tl

from services.worker.kernels.block_sizes import next_power_of_two

NUM_WARPS = 32
"""1,024 threads: the hardware puts such a program on a multiprocessor of its own."""

TILE_WORDS = 16_384
"""32-bit words of one tile: 64 KiB, four 16-byte accesses per thread."""

MOST_AHEAD = 3
"""Tiles in flight at a time. Those of an H100 fill 192 KiB of its 227 KiB; two programs keep 384 KiB in flight."""

MOST_ROWS_AHEAD = 512
"""Rows of a tile whose page numbers have room beside it; tiles with more, of rows under 128 bytes, come one by one."""

ALIGNMENT_BYTES = 1024
"""Largest alignment of a buffer in shared memory, in bytes."""

MAX_PROGRAMS = 32


class Layout(Protocol):
    """Byte strides; see ``services.worker.kv.page_memory.PageLayout``."""

    @property
    def half_bytes(self) -> int:
        """Bytes of the K, or the V, of one page and layer."""

    @property
    def page_stride(self) -> int:
        """Bytes from one page to the next."""

    @property
    def layer_stride(self) -> int:
        """Bytes from one layer to the next."""

    @property
    def half_stride(self) -> int:
        """Bytes from the K of a page and layer to its V."""


# Nothing is specialised on numbers that differ from load to load: each variant would be compiled while a load waits.
@triton.jit(
    do_not_specialize=["count", "first_layer", "layers"],
    do_not_specialize_on_alignment=["source_pages", "target_pages"],
)
def copy_pages_kernel(
    source,
    target,
    source_pages,
    target_pages,
    count,
    first_layer,
    layers,
    SOURCE_PAGE: tl.constexpr,
    SOURCE_LAYER: tl.constexpr,
    SOURCE_HALF: tl.constexpr,
    TARGET_PAGE: tl.constexpr,
    TARGET_LAYER: tl.constexpr,
    TARGET_HALF: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Copy tiles; grid (programs,). Strides and sizes are in the tensors' words; rows are ordered layer, page, half."""
    columns: tl.constexpr = (ROW_WORDS + BLOCK_WORDS - 1) // BLOCK_WORDS
    rows = layers * count * 2
    tiles = tl.cdiv(rows, BLOCK_ROWS) * columns
    row_in_tile = tl.arange(0, BLOCK_ROWS)
    word_in_tile = tl.arange(0, BLOCK_WORDS)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        row = (tile // columns) * BLOCK_ROWS + row_in_tile
        word = (tile % columns) * BLOCK_WORDS + word_in_tile
        is_row = row < rows
        half = (row % 2).to(tl.int64)  # A half's stride may exceed 32 bits: planes of 8 GiB and more.
        entry = (row // 2) % count
        layer = (first_layer + row // (2 * count)).to(tl.int64)
        from_page = tl.load(source_pages + entry, mask=is_row, other=0).to(tl.int64)
        to_page = tl.load(target_pages + entry, mask=is_row, other=0).to(tl.int64)
        begin = from_page * SOURCE_PAGE + layer * SOURCE_LAYER + half * SOURCE_HALF
        end = to_page * TARGET_PAGE + layer * TARGET_LAYER + half * TARGET_HALF
        is_real = is_row[:, None] & (word < ROW_WORDS)[None, :]
        moved = tl.load(source + begin[:, None] + word[None, :], mask=is_real, other=0, cache_modifier=".cg")
        tl.store(target + end[:, None] + word[None, :], moved, mask=is_real, cache_modifier=".cs")


def tile_shape(row_words: int) -> tuple[int, int]:
    """Return (rows, words) of a tile: together ``TILE_WORDS``, and no wider than a row, padded."""
    words = min(next_power_of_two(row_words), TILE_WORDS)
    return TILE_WORDS // words, words


def stages(shared_bytes: int, block_rows: int) -> int:
    """Return what Triton calls stages, one more than the tiles in flight, for a program with so much shared memory."""
    if block_rows > MOST_ROWS_AHEAD:
        return 1
    # Page numbers of source and target are in flight with the tiles.
    ahead = shared_bytes // (4 * TILE_WORDS + 2 * 4 * block_rows + ALIGNMENT_BYTES)
    return 1 + max(0, min(MOST_AHEAD, ahead))


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    """Return a program's shared memory on ``device``, in bytes; 0 for the interpreter, or where torch has no figure."""
    if device.type != "cuda":
        return 0
    properties: Any = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0))


def copy_pages(
    source: torch.Tensor,
    source_layout: Layout,
    target: torch.Tensor,
    target_layout: Layout,
    numbers: torch.Tensor,
    layers: range,
    *,
    programs: int,
) -> None:
    """Copy ``layers`` of pages ``numbers[0]`` of ``source`` to pages ``numbers[1]`` of ``target``.

    ``source`` and ``target`` are flat uint8, either of them on the device or an alias of pinned host memory;
    ``numbers`` is int32 [2, count] on the device. Launched on the current stream.
    """
    half_bytes = source_layout.half_bytes
    kind = torch.int32 if half_bytes % 4 == 0 else torch.int16 if half_bytes % 2 == 0 else torch.uint8
    size = kind.itemsize
    block_rows, block_words = tile_shape(half_bytes // size)
    copy_pages_kernel[(programs,)](
        source.view(kind), target.view(kind), numbers[0], numbers[1], numbers.shape[1], layers.start, len(layers),
        SOURCE_PAGE=source_layout.page_stride // size, SOURCE_LAYER=source_layout.layer_stride // size,
        SOURCE_HALF=source_layout.half_stride // size, TARGET_PAGE=target_layout.page_stride // size,
        TARGET_LAYER=target_layout.layer_stride // size, TARGET_HALF=target_layout.half_stride // size,
        ROW_WORDS=half_bytes // size, BLOCK_ROWS=block_rows, BLOCK_WORDS=block_words,
        STAGES=stages(_shared_bytes(numbers.device), block_rows), num_warps=NUM_WARPS,
    )  # fmt: skip
