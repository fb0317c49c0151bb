"""Experts in oneDNN's layout: what the library's compute, and the same bits in any batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from services.worker.engine.packed_experts import PackedExperts, pack_experts
from services.worker.engine.packed_linear import pack_linears, packed_dtypes
from tests.checkpoints import PAD, VOCAB_SIZE

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="oneDNN packs for CPUs only")  # type: ignore[no-untyped-call]

WIDTH = 256
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "head_dim": 64,
    "pad_token_id": PAD,
    "num_experts_per_tok": 2,
}
TYPES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32},
    "glm4_moe": {
        "n_routed_experts": 4,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
    },
    # Weights lie the other way round, have biases, and gate and up alternate.
    "gpt_oss": {"num_local_experts": 4},
}


def block_of(model_type: str, dtype: torch.dtype) -> Any:
    """The experts of a random layer, with what chooses among them."""
    torch.manual_seed(len(model_type))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(SMALL | TYPES[model_type])))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model.to(dtype).eval().model.layers[0].mlp


def output_of(block: Any, rows: torch.Tensor) -> torch.Tensor:
    """Of rows [T, width]: [T, width]."""
    found = block(rows[None])
    output: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return output.view(rows.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", TYPES)
@torch.inference_mode()
def test_packed_experts_compute_what_the_librarys_do(model_type: str, dtype: torch.dtype) -> None:
    """Whole blocks, chosen experts included; one block of one expert a row among them."""
    if dtype not in packed_dtypes():
        pytest.skip("this processor cannot run it")
    block, rows = block_of(model_type, dtype), torch.randn(9, WIDTH).to(dtype)
    expected = output_of(block, rows)

    assert pack_experts(block) == 1

    assert isinstance(block.experts, PackedExperts)
    rounding = 1e-5 if dtype is torch.float32 else 0.05
    torch.testing.assert_close(output_of(block, rows), expected, rtol=10 * rounding, atol=rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", TYPES)
@torch.inference_mode()
def test_a_row_has_the_same_bits_in_every_batch(model_type: str, dtype: torch.dtype) -> None:
    """Alone, and beside rows that go to the same experts and to others."""
    block = block_of(model_type, dtype)
    pack_experts(block)
    pack_linears(block)
    rows = torch.randn(70, WIDTH).to(dtype)
    together = output_of(block, rows)

    for count in (1, 2, 3, 5, 64):
        assert torch.equal(output_of(block, rows[:count]), together[:count])
    for row in (7, 33):
        assert torch.equal(output_of(block, rows[row : row + 1]), together[row : row + 1])


def test_weights_are_moved_and_not_copied() -> None:
    """A model of experts would take twice its memory otherwise."""
    block = block_of("qwen3_moe", torch.float32)

    pack_experts(block)

    assert sum(parameter.numel() for name, parameter in block.named_parameters() if "experts" in name) == 0


def test_other_modules_are_left_alone() -> None:
    """A layer without experts, whose down projection is a linear layer."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SMALL))

    assert pack_experts(model) == 0
