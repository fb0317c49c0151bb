"""Checksums of rows that have arrived on the device: XXH3 with 64 bits and a seed (xxhash's ``doc/xxhash_spec.md``).

XXH3 reads blocks of 16 stripes of 64 bytes into eight 64-bit accumulators. Within a block it only adds, in any order;
between blocks it scrambles. So one kernel sums every block of every row, as parallel as a copy, and a second one walks
the few sums of each row in order, which are a sixteenth of the bytes, and compares the result with the expected one.

Rows are longer than 240 bytes (XXH3 takes other branches for shorter ones), and K and V are whole words of 8 bytes
each: see ``can_check``. Arithmetic is modulo 2^64: additions may be signed, shifts and products are not.
"""

# Compile-time arguments are in capitals, as everywhere in Triton; the arguments of kernels have no Python types.
# ruff: noqa: ANN202, N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from services.worker.kernels.page_gather import Layout

WORD_BYTES = 8
BLOCK_BYTES = 1024
STRIPE_BYTES = 64

MIN_ROW_BYTES = 241

TILE_BLOCKS = 64
"""Blocks that a program sums at a time: 64 KiB, sixteen 16-byte reads for each of its threads."""

SUM_WARPS = 8
SUM_PROGRAMS = 4

TILE_ROWS = 16
JOIN_WARPS = 4
JOIN_PROGRAMS = 8

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
"""XXH3's default secret, 192 bytes."""

_START = (
    0x00000000C2B2AE3D, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
    0x85EBCA77C2B2AE63, 0x0000000085EBCA77, 0x27D4EB2F165667C5, 0x000000009E3779B1,
)  # fmt: skip
"""First values of the accumulators."""


@triton.jit
def _secret_at(constants, word, seed, BYTE: tl.constexpr):
    """Return the seeded secret's 8 bytes that begin ``BYTE`` (0 to 7) bytes behind ``word``."""
    seed = tl.where(word % 2 == 0, seed, 0 - seed)
    low = (tl.load(constants + word) + seed).to(tl.uint64, bitcast=True)
    if BYTE == 0:
        return low
    else:  # noqa: RET505 - Triton compiles what follows an if that returns.
        high = (tl.load(constants + word + 1) - seed).to(tl.uint64, bitcast=True)
        return (low >> (8 * BYTE)) | (high << (64 - 8 * BYTE))


# Nothing is specialised on numbers that differ from load to load: each variant would be compiled while a load waits.
@triton.jit(do_not_specialize=["count", "layer"], do_not_specialize_on_alignment=["pages", "seeds"])
def block_sums_kernel(
    pool,
    pages,
    seeds,
    constants,
    sums,
    count,
    layer,
    PAGE: tl.constexpr,
    LAYER: tl.constexpr,
    HALF: tl.constexpr,
    HALF_WORDS: tl.constexpr,
    BLOCKS: tl.constexpr,
    LAST_STRIPES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Sum the blocks of rows; grid (programs,).

    Strides and sizes are in words of 8 bytes; ``sums`` is [count, BLOCKS, 8]. The last block of a row has
    ``LAST_STRIPES`` stripes, and the row's last stripe is left to ``join_sums_kernel``.
    """
    lane = tl.arange(0, 8)[None, :]
    blocks = count * BLOCKS
    for tile in range(tl.program_id(0), tl.cdiv(blocks, TILE), tl.num_programs(0)):
        block = tile * TILE + tl.arange(0, TILE)
        is_block = (block < blocks)[:, None]
        row = block // BLOCKS
        in_row = (block % BLOCKS)[:, None]
        page = tl.load(pages + row, mask=block < blocks, other=0).to(tl.int64)[:, None]
        seed = tl.load(seeds + row, mask=block < blocks, other=0)[:, None]
        begin = page * PAGE + layer.to(tl.int64) * LAYER
        data_sum = tl.zeros([TILE, 8], dtype=tl.int64)
        product_sum = tl.zeros([TILE, 8], dtype=tl.uint64)
        for stripe in tl.static_range(16):
            word = in_row * 128 + stripe * 8 + lane
            is_real = is_block & ((in_row < BLOCKS - 1) | (stripe < LAST_STRIPES))
            at = begin + (word // HALF_WORDS).to(tl.int64) * (HALF - HALF_WORDS) + word
            data = tl.load(pool + at, mask=is_real, other=0, cache_modifier=".cg")
            key = data.to(tl.uint64, bitcast=True) ^ _secret_at(constants, stripe + lane, seed, 0)
            product_sum += tl.where(is_real, (key & 0xFFFFFFFF) * (key >> 32), 0)
            data_sum += data
        # Each lane takes its neighbour's data, which may change places after it was summed.
        left, right = tl.split(tl.reshape(data_sum, [TILE, 4, 2]))
        total = product_sum.to(tl.int64, bitcast=True) + tl.reshape(tl.join(right, left), [TILE, 8])
        tl.store(sums + block[:, None].to(tl.int64) * 8 + lane, total, mask=is_block)


@triton.jit(
    do_not_specialize=["count", "layer"],
    do_not_specialize_on_alignment=["pages", "seeds", "expected"],
)
def join_sums_kernel(
    pool,
    pages,
    seeds,
    expected,
    constants,
    sums,
    wrong,
    count,
    layer,
    PAGE: tl.constexpr,
    LAYER: tl.constexpr,
    HALF: tl.constexpr,
    HALF_WORDS: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Finish the rows' checksums; grid (programs,). ``wrong`` uint8 [count]: 1 where one is not the ``expected``."""
    length_term: tl.constexpr = (HALF_WORDS * 16 * 0x9E3779B185EBCA87) % 2**64
    lane = tl.arange(0, 8)[None, :]
    start = tl.load(constants + 24 + lane).to(tl.uint64, bitcast=True)
    for tile in range(tl.program_id(0), tl.cdiv(count, TILE), tl.num_programs(0)):
        row = tile * TILE + tl.arange(0, TILE)
        is_row = row < count
        page = tl.load(pages + row, mask=is_row, other=0).to(tl.int64)[:, None]
        seed = tl.load(seeds + row, mask=is_row, other=0)[:, None]
        place = row[:, None].to(tl.int64) * (BLOCKS * 8) + lane
        scramble = _secret_at(constants, 16 + lane, seed, 0)
        state = start + tl.zeros([TILE, 8], dtype=tl.uint64)
        for block in range(BLOCKS - 1):
            state += tl.load(sums + place + block * 8, mask=is_row[:, None], other=0).to(tl.uint64, bitcast=True)
            state = (state ^ (state >> 47) ^ scramble) * 0x9E3779B1
        state += tl.load(sums + place + (BLOCKS - 1) * 8, mask=is_row[:, None], other=0).to(tl.uint64, bitcast=True)
        # The last 64 bytes, which may have been read before as part of a block, have a secret of their own.
        word = 2 * HALF_WORDS - 8 + lane
        half = (word // HALF_WORDS).to(tl.int64)
        at = page * PAGE + layer.to(tl.int64) * LAYER + half * (HALF - HALF_WORDS) + word
        data = tl.load(pool + at, mask=is_row[:, None], other=0).to(tl.uint64, bitcast=True)
        left, right = tl.split(tl.reshape(data, [TILE, 4, 2]))
        key = data ^ _secret_at(constants, 15 + lane, seed, 1)
        state += (key & 0xFFFFFFFF) * (key >> 32) + tl.reshape(tl.join(right, left), [TILE, 8])
        # Pairs of accumulators are multiplied to 128 bits and folded.
        state ^= _secret_at(constants, 1 + lane, seed, 3)
        left, right = tl.split(tl.reshape(state, [TILE, 4, 2]))
        folded = ((left * right) ^ tl.umulhi(left, right)).to(tl.int64, bitcast=True)
        digest = tl.sum(folded, axis=1).to(tl.uint64, bitcast=True) + length_term
        digest = (digest ^ (digest >> 37)) * 0x165667919E3779F9
        digest = (digest ^ (digest >> 32)).to(tl.int64, bitcast=True)
        is_wrong = digest != tl.load(expected + row, mask=is_row, other=0)
        tl.store(wrong + row, is_wrong.to(tl.uint8), mask=is_row)


def can_check(half_bytes: int) -> bool:
    """Return whether the kernels can check rows of K and V of ``half_bytes`` each."""
    return half_bytes % WORD_BYTES == 0 and 2 * half_bytes >= MIN_ROW_BYTES


def row_blocks(half_bytes: int) -> tuple[int, int]:
    """Return the blocks of a row, and the stripes of the last of them, which is never a whole one."""
    behind = 2 * half_bytes - 1
    return behind // BLOCK_BYTES + 1, behind % BLOCK_BYTES // STRIPE_BYTES


def constants_on(device: torch.device) -> torch.Tensor:
    """Return the kernels' ``constants``, int64 [32]: the secret and the first values of the accumulators."""
    words = [int.from_bytes(_SECRET[at : at + 8], "little") for at in range(0, len(_SECRET), 8)]
    signed = [word - 2**64 if word >= 2**63 else word for word in (*words, *_START)]
    return torch.tensor(signed, dtype=torch.int64, device=device)


def sums_for(half_bytes: int, rows: int, device: torch.device) -> torch.Tensor:
    """Return room for the block sums of ``rows`` rows, int64 [rows, blocks, 8]."""
    return torch.empty((rows, row_blocks(half_bytes)[0], 8), dtype=torch.int64, device=device)


def check_rows(
    pool: torch.Tensor,
    layout: Layout,
    layer: int,
    pages: torch.Tensor,
    seeds: torch.Tensor,
    expected: torch.Tensor,
    wrong: torch.Tensor,
    *,
    constants: torch.Tensor,
    sums: torch.Tensor,
) -> None:
    """Write to ``wrong`` whether ``layer`` of each of ``pages`` of ``pool`` has another checksum than expected.

    ``wrong`` is uint8 [count]. ``pool`` is flat uint8 on the device, ``pages`` int32 [count]; ``seeds`` and
    ``expected`` are int64 [count], bit for bit the unsigned numbers. ``constants`` and ``sums`` are of the functions
    above. Launched on the current stream.
    """
    count, half = len(pages), layout.half_bytes
    assert can_check(half)
    assert count <= len(sums)
    blocks, last_stripes = row_blocks(half)
    shape: dict[str, Any] = {
        "PAGE": layout.page_stride // WORD_BYTES, "LAYER": layout.layer_stride // WORD_BYTES,
        "HALF": layout.half_stride // WORD_BYTES, "HALF_WORDS": half // WORD_BYTES, "BLOCKS": blocks,
    }  # fmt: skip
    words = pool.view(torch.int64)
    block_sums_kernel[(SUM_PROGRAMS,)](
        words, pages, seeds, constants, sums, count, layer,
        **shape, LAST_STRIPES=last_stripes, TILE=TILE_BLOCKS, num_warps=SUM_WARPS,
    )  # fmt: skip
    join_sums_kernel[(JOIN_PROGRAMS,)](
        words, pages, seeds, expected, constants, sums, wrong, count, layer,
        **shape, TILE=TILE_ROWS, num_warps=JOIN_WARPS,
    )  # fmt: skip
