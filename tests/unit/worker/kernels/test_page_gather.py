"""The copy kernel compiles for GPUs on a machine without one, with 16-byte accesses that spare the caches."""

from __future__ import annotations

import re
from typing import Any

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from services.worker.kernels.page_gather import (
    MOST_AHEAD,
    NUM_WARPS,
    TILE_WORDS,
    copy_pages_kernel,
    stages,
    tile_shape,
)

SHARED_BYTES = 227 * 1024
"""Of one program on sm_90; what other GPUs have is in ``compile_bounds.json``."""

POINTERS = {"source": "*i32", "target": "*i32", "source_pages": "*i32", "target_pages": "*i32"}


def compiled(page_size: int, kv_heads: int, head_dim: int, *, is_load: bool = True) -> Any:
    """For bfloat16 pages of this shape, between page-first and layer-first memory."""
    row, pages, layers = page_size * kv_heads * head_dim * 2 // 4, 8192, 32
    block_rows, block_words = tile_shape(row)
    host = {"PAGE": 2 * layers * row, "LAYER": 2 * row, "HALF": row}
    device = {"PAGE": row, "LAYER": 2 * pages * row, "HALF": pages * row}
    begin, end = (host, device) if is_load else (device, host)
    constants = {
        **{f"SOURCE_{name}": stride for name, stride in begin.items()},
        **{f"TARGET_{name}": stride for name, stride in end.items()},
        "ROW_WORDS": row, "BLOCK_ROWS": block_rows, "BLOCK_WORDS": block_words,
        "STAGES": stages(SHARED_BYTES, block_rows),
    }  # fmt: skip
    names = copy_pages_kernel.arg_names
    signature = {name: "constexpr" if name in constants else POINTERS.get(name, "i32") for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in ("source", "target")}
    source = ASTSource(copy_pages_kernel, signature, constants, attributes)
    return compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": NUM_WARPS})


@pytest.mark.parametrize("is_load", [True, False])
@pytest.mark.parametrize(("page_size", "kv_heads", "head_dim"), [(1, 1, 64), (32, 3, 80), (256, 8, 128)])
def test_tiles_are_on_their_way_while_one_is_written(
    page_size: int, kv_heads: int, head_dim: int, is_load: bool
) -> None:
    """Every access to pages is 16 bytes; reads go to shared memory past the first cache, ``MOST_AHEAD`` tiles ahead."""
    made = compiled(page_size, kv_heads, head_dim, is_load=is_load)
    ptx = made.asm["ptx"]

    ahead = re.findall(r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x10", ptx)
    stores = re.findall(r"st\.global\.\S+", ptx)
    # As many before the loop as in it.
    assert len(ahead) == (MOST_AHEAD + 1) * TILE_WORDS // (32 * NUM_WARPS * 4)
    assert stores
    assert all(".cs.v4.b32" in store for store in stores)
    assert f".reqntid {32 * NUM_WARPS}" in ptx
    assert made.metadata.shared <= SHARED_BYTES


@pytest.mark.parametrize(("page_size", "kv_heads", "head_dim"), [(1, 3, 10), (1, 1, 2)])
def test_short_rows_compile_too(page_size: int, kv_heads: int, head_dim: int) -> None:
    """One tile at a time, and with narrower accesses where rows are no multiple of sixteen bytes."""
    made = compiled(page_size, kv_heads, head_dim)

    assert len(made.asm["cubin"]) > 0
    assert not re.search(r"(ld|st)\.global\.\S*v4", made.asm["ptx"])
    assert made.metadata.shared <= SHARED_BYTES


@pytest.mark.parametrize(
    ("row_words", "expected"), [(1, (16384, 1)), (512, (32, 512)), (640, (16, 1024)), (65_536, (1, 16_384))]
)
def test_a_tile_is_never_wider_than_a_row(row_words: int, expected: tuple[int, int]) -> None:
    """Short rows share a tile, long ones are cut; a tile has the same size either way."""
    assert tile_shape(row_words) == expected
