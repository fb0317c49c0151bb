"""Exact mode over whole models, in Triton's interpreter: what is promised is tried, and what is not known refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, Qwen3MoeConfig

from services.worker.engine.model_loading import load_config
from tests.checkpoints import VOCAB_SIZE, save_checkpoint
from tests.run_name import shm_prefix
from tests.unit.worker.engine.exact_models import try_model, unknown_operators
from tests.unit.worker.kernels.interpreted import Interpreter, running_interpreter
from tests.unit.worker.kernels.ordered_dot import order_products


@pytest.fixture(scope="module")
def ordered() -> Iterator[Interpreter]:
    with running_interpreter() as running:
        running.call(order_products)
        yield running


def shallow(path: Path, into: Path) -> str:
    """Where a checkpoint lies that is like the one in ``path``, with two layers: one of each kind that it has."""
    config: Any = load_config(path)
    config.num_hidden_layers = 2
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:2]
    return str(save_checkpoint(config, into))


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("qwen2", "float32"), ("qwen3", "bfloat16"), ("gemma2", "bfloat16")],
)
def test_models_are_exact(
    ordered: Interpreter, checkpoint: Callable[[str], Path], tmp_path: Path, family: str, dtype: str
) -> None:
    """Biases, norms of heads, windows and soft caps: the same bits whole, beside others, in chunks, one token at a time
    and in batches.
    """
    assert ordered.call(try_model, shallow(checkpoint(family), tmp_path), dtype, shm_prefix("exact")) == ""


def test_layer_norms_and_transposed_weights_are_exact(ordered: Interpreter, tmp_path: Path) -> None:
    """GPT-2 has layer norms with biases, and multiplies with weights that lie the other way round."""
    config = GPT2Config(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=1, n_head=2, n_positions=128)

    assert ordered.call(try_model, str(save_checkpoint(config, tmp_path)), "bfloat16", shm_prefix("exact")) == ""


def test_default_attention_is_found_out(ordered: Interpreter, checkpoint: Callable[[str], Path]) -> None:
    """Behind a window its decode rows begin at another key than its chunks."""
    reason = ordered.call(
        try_model, str(checkpoint("mistral")), "float32", shm_prefix("exact"), "default attention"
    )  # fmt: skip

    assert reason.startswith("--exact: a prompt of 80 tokens has other bits")


def test_torch_s_operators_are_found_out(ordered: Interpreter, checkpoint: Callable[[str], Path]) -> None:
    """Products of a BLAS round by the number of rows."""
    reason = ordered.call(
        try_model, str(checkpoint("llama")), "float32", shm_prefix("exact"), "torch's operators"
    )  # fmt: skip

    assert reason.startswith("--exact: a prompt of 80 tokens has other bits")


def test_operators_of_which_nothing_is_known_are_named(ordered: Interpreter, checkpoint: Callable[[str], Path]) -> None:
    """Without replacements, those are the products and means of a Llama."""
    names = ordered.call(unknown_operators, str(checkpoint("llama")), "float32", shm_prefix("exact"))

    assert "aten::mean.dim" in names
    assert "aten::mm" in names
    assert "aten::mul.Tensor" not in names


def test_a_mixture_of_experts_is_refused(ordered: Interpreter, tmp_path: Path) -> None:
    """Which experts a row goes to is chosen by operators that may depend on the batch, so the reason names them."""
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, intermediate_size=32,
        max_position_embeddings=128,
    )  # fmt: skip

    reason = ordered.call(try_model, str(save_checkpoint(config, tmp_path)), "float32", shm_prefix("exact"))

    assert "whose results may depend on the batch" in reason
    assert "aten::topk" in reason
