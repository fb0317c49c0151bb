"""The kernels compile for sm_90 on a machine without a GPU, and read 16 bytes at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from services.worker.engine.key_splits import MAX_SPLITS, SPLIT_KEYS
from services.worker.engine.shared_prefixes import MEMBERS
from services.worker.kernels.block_sizes import block_sizes
from services.worker.kernels.decode import decode_join_kernel, decode_shared_kernel, decode_split_kernel
from services.worker.kernels.exact.attention import exact_attention_kernel, exact_join_kernel
from services.worker.kernels.exact.matmul import matmul_kernel, tile_for
from services.worker.kernels.exact.rows import layer_norm_kernel, log_softmax_kernel, mean_kernel
from services.worker.kernels.extend import extend_kernel
from services.worker.kernels.kv_write import kv_write_kernel
from services.worker.kernels.rms_norm import add_rms_norm_kernel, norm_warps
from services.worker.kernels.rope_write import rope_warps, rope_write_kernel
from services.worker.kernels.silu_mul import silu_mul_kernel

H100 = GPUTarget("cuda", 90, 32)
# What one program may have of shared memory on sm_90.
SHARED_BYTES = 227 * 1024

POINTERS = {
    "out": "*{kv}", "q": "*{kv}", "k_pool": "*{kv}", "v_pool": "*{kv}", "k": "*{kv}", "v": "*{kv}",
    "partial": "*fp32", "partial_lse": "*fp32", "cu_rows": "*i32", "context": "*i32", "page_table": "*i32",
    "slots": "*i64", "scaling": "fp32", "softcap": "fp32",
    "row_keys": "*i32", "tile_rows": "*i32", "tile_keys": "*i32",
    "x": "*{kv}", "delta": "*{kv}", "weight": "*{kv}", "qkv": "*{kv}", "cosines": "*{kv}", "sines": "*{kv}",
    "q_weight": "*{kv}", "k_weight": "*{kv}", "gate_up": "*{kv}", "positions": "*i64", "eps": "fp32",
    "a": "*{kv}", "b": "*{kv}", "bias": "*{kv}", "means": "*fp32", "deviations": "*fp32", "alpha": "fp32",
    "beta": "fp32",
}  # fmt: skip
# Arguments that are multiples of 16 for every pool of a real model; Triton learns that at launch.
DIVISIBLE = {"q", "k", "v", "k_pool", "v_pool", "out", "partial", "stride_q_row", "stride_q_head", "stride_page",
             "stride_slot", "stride_kv_head", "stride_row", "stride_head", "stride_pool_head", "x", "delta", "weight",
             "qkv", "cosines", "sines", "q_weight", "k_weight", "gate_up", "width",
             "a", "b", "bias", "depth", "stride_a_row", "stride_b_column", "stride_a_batch",
             "stride_b_batch", "stride_out_batch", "stride_out_row"}  # fmt: skip


def _compile(kernel: Any, dtype: str, constants: dict[str, Any], *, num_warps: int = 4, num_stages: int = 2) -> Any:
    signature = {
        name: "constexpr" if name in constants else POINTERS.get(name, "i32").format(kv=dtype)
        for name in kernel.arg_names
    }
    attributes = {
        (index,): [["tt.divisibility", 16]] for index, name in enumerate(kernel.arg_names) if name in DIVISIBLE
    }
    source = ASTSource(kernel, signature, constants, attributes)
    return compile(source, target=H100, options={"num_warps": num_warps, "num_stages": num_stages})


@pytest.mark.parametrize(
    ("dtype", "itemsize", "head_dim", "group", "page_size", "window", "softcap"),
    [
        ("bf16", 2, 128, 4, 16, False, False),
        ("bf16", 2, 256, 2, 64, True, True),
        ("fp16", 2, 80, 1, 1, True, False),
        ("fp32", 4, 64, 8, 32, False, True),
        ("fp32", 4, 256, 1, 16, False, False),
    ],
)
def test_attention_compiles(
    dtype: str, itemsize: int, head_dim: int, group: int, page_size: int, window: bool, softcap: bool
) -> None:
    """All attention kernels give machine code that fits into shared memory and loads K and V in 16-byte pieces."""
    sizes = block_sizes(head_dim, group, itemsize)
    common = {
        "HAS_WINDOW": window, "HAS_SOFTCAP": softcap, "GROUP": group, "PAGE_SIZE": page_size, "HEAD_DIM": head_dim,
        "BLOCK_D": sizes.block_d, "BLOCK_N": sizes.block_n,
    }  # fmt: skip
    split = {"SPLIT_KEYS": SPLIT_KEYS, "MAX_SPLITS": MAX_SPLITS, "IS_ONLY_SPLIT": False}
    members = min(MEMBERS, sizes.extend_rows // sizes.group)
    plain = {key: value for key, value in common.items() if key != "HAS_WINDOW"}
    shared = {
        "PADDED_GROUP": sizes.group, "MEMBERS": MEMBERS, "PARTS": MEMBERS // members, "SPLIT_KEYS": SPLIT_KEYS,
        "BLOCK_M": members * sizes.group, "MAX_SPLITS": MAX_SPLITS,
    }  # fmt: skip
    compiled = [_compile(decode_shared_kernel, dtype, plain | shared, num_warps=sizes.num_warps)]
    compiled += [
        _compile(kernel, dtype, common | own, num_warps=sizes.num_warps)
        for kernel, own in (
            (decode_split_kernel, split | {"BLOCK_M": sizes.decode_rows}),
            (extend_kernel, {"BLOCK_M": sizes.extend_rows, "PADDED_GROUP": sizes.group}),
            (
                exact_attention_kernel,
                {"BLOCK_M": sizes.extend_rows, "PADDED_GROUP": sizes.group, "SPLIT_KEYS": SPLIT_KEYS},
            ),
        )
    ]

    for kernel in compiled:
        assert len(kernel.asm["cubin"]) > 0
        assert kernel.metadata.shared <= SHARED_BYTES
        assert "ld.global.v4.b32" in kernel.asm["ptx"] or "cp.async.cg.shared.global" in kernel.asm["ptx"]


def test_joining_and_writing_compile() -> None:
    """So do the kernels beside them."""
    join = _compile(
        decode_join_kernel,
        "bf16",
        {"HAS_WINDOW": True, "HEAD_DIM": 128, "BLOCK_D": 128, "SPLIT_KEYS": SPLIT_KEYS, "MAX_SPLITS": MAX_SPLITS},
    )
    write = _compile(kv_write_kernel, "bf16", {"HEAD_DIM": 128, "BLOCK_H": 8, "BLOCK_D": 128})

    assert len(join.asm["cubin"]) > 0
    assert "ld.global.v4.b32" in write.asm["ptx"]
    assert "st.global.v4.b32" in write.asm["ptx"]


@pytest.mark.parametrize(("dtype", "name"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")])
@pytest.mark.parametrize("weight_rows", [4096, 32_768])
def test_exact_products_compile(dtype: str, name: str, weight_rows: int) -> None:
    """Within shared memory, without spilling, with the instructions of tensor cores for 16-bit types."""
    tile = tile_for(getattr(torch, name), weight_rows)
    constants = {
        "HAS_BIAS": True, "IS_SCALED": False, "BAND": 8, "stride_a_depth": 1, "stride_b_depth": 1,
        "BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": tile.depth,
    }  # fmt: skip

    compiled = _compile(matmul_kernel, dtype, constants, num_warps=tile.num_warps, num_stages=tile.num_stages)

    assert compiled.metadata.shared <= SHARED_BYTES
    assert ".local" not in compiled.asm["ptx"]
    assert ("wgmma" in compiled.asm["ptx"]) == (dtype != "fp32")
    assert "cp.async" in compiled.asm["ptx"]


def test_exact_reductions_and_joining_compile() -> None:
    """So do the kernels beside them, whose multiply-adds in joining are spelled out."""
    join = _compile(
        exact_join_kernel, "bf16", {"HAS_WINDOW": True, "HEAD_DIM": 128, "BLOCK_D": 128, "SPLIT_KEYS": SPLIT_KEYS}
    )
    compiled = [
        _compile(mean_kernel, "bf16", {"BLOCK": 1024}),
        _compile(layer_norm_kernel, "bf16", {"BLOCK": 1024, "HAS_WEIGHT": True, "HAS_BIAS": False}),
        _compile(log_softmax_kernel, "fp32", {"BLOCK": 1024}),
    ]

    assert all(len(kernel.asm["cubin"]) > 0 for kernel in compiled)
    assert "fma.rn.f32" in join.asm["ptx"]


@pytest.mark.parametrize(("dtype", "width"), [("bf16", 4096), ("fp16", 896), ("fp32", 5120), ("bf16", 16_384)])
def test_norms_and_gates_compile(dtype: str, width: int) -> None:
    """With and without an addition, for hidden sizes that are powers of two and others; rows go in 16-byte pieces."""
    block = 1 << (width - 1).bit_length()
    compiled = [
        _compile(add_rms_norm_kernel, dtype, {"HAS_DELTA": added, "BLOCK": block}, num_warps=norm_warps(block))
        for added in (False, True)
    ]
    compiled.append(_compile(silu_mul_kernel, dtype, {"BLOCK": 1024}))

    for kernel in compiled:
        assert len(kernel.asm["cubin"]) > 0
        assert kernel.metadata.shared <= SHARED_BYTES
        assert "ld.global.v4.b32" in kernel.asm["ptx"]
        assert "st.global.v4.b32" in kernel.asm["ptx"]


@pytest.mark.parametrize(
    ("dtype", "head_dim", "group"), [("bf16", 128, 4), ("fp16", 64, 7), ("fp32", 96, 1), ("bf16", 256, 8)]
)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("writes", [False, True])
def test_rotating_and_writing_compile(dtype: str, head_dim: int, group: int, has_norm: bool, writes: bool) -> None:
    """For heads of all widths, groups that are no powers of two, normed or not, with a pool or without."""
    half = head_dim // 2
    constants = {
        "HAS_NORM": has_norm, "WRITES": writes, "GROUP": group, "HALF": half,
        "BLOCK_G": 1 << (group - 1).bit_length(), "BLOCK_HALF": 1 << (half - 1).bit_length(),
    }  # fmt: skip
    compiled = _compile(rope_write_kernel, dtype, constants, num_warps=rope_warps(group, half))

    assert len(compiled.asm["cubin"]) > 0
    assert compiled.metadata.shared <= SHARED_BYTES
    if dtype != "fp32" and not has_norm:  # Products are rounded before they are added, as the models round them.
        assert "fma.rn.f32" not in compiled.asm["ptx"]
