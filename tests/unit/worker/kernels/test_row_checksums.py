"""The checksum kernels give xxhash's verdicts bit by bit, and compile for sm_90 into wide reads without detours."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from services.worker.kv.page_memory import PageLayout
from tests.unit.worker.kernels.interpreted import Interpreter

H100 = GPUTarget("cuda", 90, 32)
POINTERS = {
    "pool": "*i64", "pages": "*i32", "seeds": "*i64", "constants": "*i64", "sums": "*i64", "expected": "*i64",
    "wrong": "*u8",
}  # fmt: skip
SEEDS = (0, 1, 2**63, 2**64 - 1, 0x9E3779B185EBCA87, 0xFEDCBA9876543210)
LAYERS, PAGES = 3, 8


def verdicts(
    half_bytes: int, contents: np.ndarray, pages: list[int], seeds: list[int], expected: list[int]
) -> list[int]:
    """What the kernels say of layer 1 of ``pages`` of a layer-first pool, uint8 [layers, 2, pages, half_bytes]."""
    from services.worker.kernels.row_checksums import check_rows, constants_on, sums_for

    on = torch.device("cpu")
    layout = PageLayout(PAGES, LAYERS, half_bytes, half_bytes, 2 * PAGES * half_bytes, PAGES * half_bytes)
    wrong = torch.full((len(pages),), 7, dtype=torch.uint8)
    check_rows(
        torch.from_numpy(contents.reshape(-1)),
        layout,
        1,
        torch.tensor(pages, dtype=torch.int32),
        torch.from_numpy(np.array(seeds, dtype=np.uint64).view(np.int64)),
        torch.from_numpy(np.array(expected, dtype=np.uint64).view(np.int64)),
        wrong,
        constants=constants_on(on),
        sums=sums_for(half_bytes, len(pages), on),
    )
    return [int(each) for each in wrong]


@pytest.mark.parametrize(
    "half_bytes",
    [128, 136, 192, 248, 504, 512, 520, 1016, 1024, 1032, 2560, 5000, 32_768],
)
def test_it_agrees_with_xxhash(half_bytes: int, interpreter: Interpreter) -> None:
    """Rows of one stripe more or less than blocks have, with K apart from V, for seeds of all kinds: a right checksum
    passes, and one of which any single bit differs does not.
    """
    random = np.random.default_rng(half_bytes)
    contents = random.integers(0, 256, (LAYERS, 2, PAGES, half_bytes), dtype=np.uint8)
    pages = [int(page) for page in random.permutation(PAGES)[: len(SEEDS)]]
    right = [
        xxhash.xxh3_64_intdigest(contents[1, :, page].tobytes(), seed=seed)
        for page, seed in zip(pages, SEEDS, strict=True)
    ]
    other = [digest ^ (1 << int(random.integers(64))) for digest in right]

    assert interpreter.call(verdicts, half_bytes, contents, pages, list(SEEDS), right) == [0] * len(SEEDS)
    assert interpreter.call(verdicts, half_bytes, contents, pages, list(SEEDS), other) == [1] * len(SEEDS)


@pytest.mark.parametrize("byte", [0, 1023, 1024, 1599, 1600, 3135, 3136, 3199])
def test_one_wrong_bit_anywhere_is_found(byte: int, interpreter: Interpreter) -> None:
    """In the first and last stripe, at the edges of blocks, and where K ends and V begins."""
    half_bytes = 1600
    contents = np.random.default_rng(5).integers(0, 256, (LAYERS, 2, PAGES, half_bytes), dtype=np.uint8)
    right = [xxhash.xxh3_64_intdigest(contents[1, :, page].tobytes(), seed=9) for page in range(PAGES)]
    contents[1, byte // half_bytes, 3, byte % half_bytes] ^= 16

    found = interpreter.call(verdicts, half_bytes, contents, list(range(PAGES)), [9] * PAGES, right)

    assert found == [int(page == 3) for page in range(PAGES)]


def test_more_rows_than_programs_take_at_a_time(interpreter: Interpreter) -> None:
    """Tiles of blocks and of rows that are full, and one that is not."""
    pages = [page % PAGES for page in range(150)]
    contents = np.random.default_rng(6).integers(0, 256, (LAYERS, 2, PAGES, 1024), dtype=np.uint8)
    right = [xxhash.xxh3_64_intdigest(contents[1, :, page].tobytes(), seed=at) for at, page in enumerate(pages)]
    for at in (0, 100, 149):
        right[at] ^= 1

    found = interpreter.call(verdicts, 1024, contents, pages, list(range(150)), right)

    assert np.flatnonzero(found).tolist() == [0, 100, 149]


def tried(half_bytes: int, pages: int, fault: int) -> tuple[bool, bool]:
    """Whether checks of a pool are found to agree with xxhash, and whether the pool is as it was; the secret has one
    bit wrong if ``fault`` is 1.
    """
    from services.worker.kv.movers.device_checks import DeviceChecks
    from services.worker.kv.page_memory import PageMemory

    layout = PageLayout(pages, LAYERS, half_bytes, half_bytes, 2 * pages * half_bytes, pages * half_bytes)
    pool = torch.from_numpy(np.random.default_rng(2).integers(0, 256, layout.nbytes, dtype=np.uint8))
    before = pool.clone()
    checks: Any = DeviceChecks(PageMemory(layout, tensor=pool), pool, 8)
    checks._constants[5] ^= fault
    return checks.agree_with_xxhash(), bool((pool == before).all())


@pytest.mark.parametrize(("half_bytes", "pages"), [(128, 1), (2048, 9)])
def test_it_is_tried_before_it_is_used(half_bytes: int, pages: int, interpreter: Interpreter) -> None:
    """On the pool itself, which is as before; a kernel that is wrong by a bit is not used."""
    assert interpreter.call(tried, half_bytes, pages, 0) == (True, True)
    assert interpreter.call(tried, half_bytes, pages, 1) == (False, True)


def test_other_lengths_are_not_for_it() -> None:
    """XXH3 has other formulas for 240 bytes and fewer, and a row whose K ends within a word is read by the host."""
    from services.worker.kernels.row_checksums import can_check

    assert [half for half in (8, 112, 120, 124, 128, 129, 130, 132, 136) if can_check(half)] == [128, 136]


@pytest.mark.parametrize("half_bytes", [2048, 480])
def test_it_compiles_into_wide_reads(half_bytes: int) -> None:
    """Sixteen reads of 16 bytes for each thread, and neither a barrier nor an exchange between threads in the sums."""
    from services.worker.kernels import row_checksums as kernels

    blocks, last = kernels.row_blocks(half_bytes)
    words, pages = half_bytes // 8, 8192
    shape = {"PAGE": words, "LAYER": 2 * pages * words, "HALF": pages * words, "HALF_WORDS": words, "BLOCKS": blocks}
    sums = _compiled(
        kernels.block_sums_kernel,
        {**shape, "LAST_STRIPES": last, "TILE": kernels.TILE_BLOCKS},
        kernels.SUM_WARPS,
    )
    join = _compiled(kernels.join_sums_kernel, {**shape, "TILE": kernels.TILE_ROWS}, kernels.JOIN_WARPS)

    wide = re.findall(r"ld\.global\.cg\.v2\.b64", sums.asm["ptx"])
    assert len(wide) == (16 if blocks > 1 else last)
    assert not re.findall(r"bar\.sync|shfl", sums.asm["ptx"])
    assert "mul.hi.u64" in join.asm["ptx"]
    assert len(join.asm["cubin"]) > 0


def _compiled(kernel: Any, constants: dict[str, int], num_warps: int) -> Any:
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else POINTERS.get(name, "i32") for name in names}
    aligned = [name for name in ("pool", "constants", "sums", "wrong") if name in names]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    return compile(ASTSource(kernel, signature, constants, attributes), target=H100, options={"num_warps": num_warps})
