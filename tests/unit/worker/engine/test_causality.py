"""A model that sees later tokens is refused in every data type; every causal one passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral

from services.worker.engine.model_runner import ModelRunner
from shared.errors import UnsupportedModel
from tests.checkpoints import FAMILIES, save_checkpoint
from tests.unit.worker.engine.test_model_loading import SMALL, load

DTYPES = ("float32", "bfloat16", "float16")
"""Where a fault shows in numbers alone: rounding must not hide it."""


def see_everything(make: Callable[..., Any]) -> Callable[..., Any]:
    """Masks of ``make`` in which every row sees every key."""

    def bidirectional(*args: Any, **kwargs: Any) -> Any:
        mask = make(*args, **kwargs)
        return None if mask is None else torch.zeros_like(mask)

    return bidirectional


@pytest.mark.parametrize("family", FAMILIES)
def test_causal_models_pass(family: str, checkpoint: Callable[[str], Path]) -> None:
    """Windows, soft caps and learned positions too: equal to the bit is not too much. In other data types, and through
    both kinds of kernels, ``test_model_runner.py`` loads them all.
    """
    runner = load(checkpoint(family), dtype="float16")

    assert runner.geometry.dtype == "float16"
    runner.close()


def test_a_bidirectional_model_is_refused(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A Llama whose masks hide nothing differs too little from a causal one for a tolerance in half precision."""
    monkeypatch.setattr(modeling_llama, "create_causal_mask", see_everything(modeling_llama.create_causal_mask))

    with pytest.raises(UnsupportedModel, match="llama is not causal: tokens see later ones in layer 0"):
        load(checkpoint("llama"), dtype="bfloat16")


def test_a_window_that_reaches_forward_is_refused(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks of sliding windows are looked at as well."""
    name = "create_sliding_window_causal_mask"
    monkeypatch.setattr(modeling_mistral, name, see_everything(getattr(modeling_mistral, name)))

    with pytest.raises(UnsupportedModel, match="mistral is not causal"):
        load(checkpoint("mistral"), dtype="bfloat16")


def test_a_mask_of_another_window_is_refused(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A causal mask that hides less than the layer's window is another model than attention is told of."""
    monkeypatch.setattr(modeling_mistral, "create_sliding_window_causal_mask", modeling_mistral.create_causal_mask)

    with pytest.raises(UnsupportedModel, match="mask of layer 0 of mistral is not that of its window 24"):
        load(checkpoint("mistral"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_leaks_past_the_masks_is_refused(
    dtype: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundredth of the last token, mixed into all rows after attention, moves logits before it."""
    forward = modeling_llama.LlamaAttention.forward

    def leak(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        output, weights = forward(self, hidden_states, **kwargs)
        return output + hidden_states[:, -1:] / 100, weights

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", leak)

    with pytest.raises(UnsupportedModel, match="other tokens at the end of a prompt move logits before them"):
        load(checkpoint("llama"), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_paged_path_that_leaks_is_refused(
    dtype: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is causal and its paged forward is not: a millionth of a logit is enough to tell."""
    forward = ModelRunner.forward

    def leak(self: ModelRunner, ids: torch.Tensor, positions: torch.Tensor, meta: Any, rows: torch.Tensor) -> Any:
        logits = forward(self, ids, positions, meta, rows)
        return logits + ids.sum() * 1e-8

    monkeypatch.setattr(ModelRunner, "forward", leak)

    with pytest.raises(UnsupportedModel, match="not causal"):
        load(checkpoint("llama"), dtype=dtype)


def test_attention_that_calls_itself_bidirectional_is_refused(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``is_causal`` of a module counts where the library hands over no mask at all."""
    init = modeling_llama.LlamaAttention.__init__

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.is_causal = False

    monkeypatch.setattr(modeling_llama.LlamaAttention, "__init__", make)

    with pytest.raises(UnsupportedModel, match="needs both directions"):
        load(checkpoint("llama"))


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    """BERT has a language model's head in the library, and sees both ways unless it is configured as a decoder."""
    sizes = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
    path = save_checkpoint(BertConfig(**sizes), tmp_path)

    with pytest.raises(UnsupportedModel, match="attention of bert needs both directions"):
        load(path)
