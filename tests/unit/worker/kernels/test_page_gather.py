"""The copy kernel compiles for sm_90 on a machine without a GPU, with 16-byte accesses that spare the caches."""

from __future__ import annotations

import re
from typing import Any

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from services.worker.kernels.page_gather import NUM_WARPS, TILE_WORDS, copy_pages_kernel, tile_shape

H100 = GPUTarget("cuda", 90, 32)
POINTERS = {"source": "*i32", "target": "*i32", "source_pages": "*i32", "target_pages": "*i32"}


def compiled(page_size: int, kv_heads: int, head_dim: int, *, layers: int = 32, pages: int = 8192) -> Any:
    """For bfloat16 pages of this shape, page-first to layer-first."""
    row = page_size * kv_heads * head_dim * 2 // 4
    block_rows, block_words = tile_shape(row)
    constants = {
        "SOURCE_PAGE": 2 * layers * row, "SOURCE_LAYER": 2 * row, "SOURCE_HALF": row,
        "TARGET_PAGE": row, "TARGET_LAYER": 2 * pages * row, "TARGET_HALF": pages * row,
        "ROW_WORDS": row, "BLOCK_ROWS": block_rows, "BLOCK_WORDS": block_words,
    }  # fmt: skip
    names = copy_pages_kernel.arg_names
    signature = {name: "constexpr" if name in constants else POINTERS.get(name, "i32") for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in ("source", "target")}
    source = ASTSource(copy_pages_kernel, signature, constants, attributes)
    return compile(source, target=H100, options={"num_warps": NUM_WARPS})


@pytest.mark.parametrize(
    ("page_size", "kv_heads", "head_dim"), [(1, 8, 128), (16, 8, 128), (1, 4, 64), (32, 3, 80), (256, 8, 128)]
)
def test_it_moves_sixteen_bytes_at_a_time(page_size: int, kv_heads: int, head_dim: int) -> None:
    """Every access to pages is a vector of four words, and each of 1,024 threads has eight in flight."""
    made = compiled(page_size, kv_heads, head_dim)
    ptx = made.asm["ptx"]

    loads = re.findall(r"ld\.global\.\S+", ptx)
    wide = [load for load in loads if ".v4.b32" in load]
    stores = re.findall(r"st\.global\.\S+", ptx)
    assert len(made.asm["cubin"]) > 0
    assert len(wide) >= TILE_WORDS // (32 * NUM_WARPS * 4)
    assert all(".cg." in load for load in wide)
    assert stores
    assert all(".cs.v4.b32" in store for store in stores)
    assert f".reqntid {32 * NUM_WARPS}" in ptx


def test_a_page_that_is_not_a_multiple_of_sixteen_bytes_compiles_too() -> None:
    """With narrower accesses."""
    made = compiled(1, 3, 10)

    assert len(made.asm["cubin"]) > 0
    assert ".v4.b32" not in made.asm["ptx"]


@pytest.mark.parametrize(
    ("row_words", "expected"), [(1, (32_768, 1)), (512, (64, 512)), (640, (32, 1024)), (65_536, (1, 32_768))]
)
def test_a_tile_is_never_wider_than_a_row(row_words: int, expected: tuple[int, int]) -> None:
    """Short rows share a tile, long ones are cut; a tile has the same size either way."""
    assert tile_shape(row_words) == expected
