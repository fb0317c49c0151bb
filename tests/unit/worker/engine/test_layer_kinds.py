"""Models with sinks, chunks and positions of their own: what they answer, and what the checks at load find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.worker.engine import chunks, told_positions
from services.worker.engine.attention import AttentionCall
from services.worker.engine.chunks import expected_chunks, shortened, tell_chunks
from services.worker.engine.cpu_attention import CpuAttention
from services.worker.engine.forward_meta import ForwardMeta
from services.worker.engine.model_loading import load_config, load_model, max_context_tokens
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.probe import Verification, layout_of
from shared.errors import UnsupportedModel
from tests.checkpoints import MAX_POSITIONS, SLIDING_WINDOW, make_checkpoint, save_checkpoint
from tests.run_name import shm_prefix
from tests.unit.worker.engine.answers import assert_answers_as

KINDS = ("gpt_oss", "llama4", "roberta")


def load(path: Path, page_size: int = 16) -> ModelRunner:
    return ModelRunner.load(
        path, dtype="float32", device="cpu", page_size=page_size, device_kv_bytes=None, pages=400 // page_size,
        threads=1, shm_prefix=shm_prefix("layer-kinds"),
    )  # fmt: skip


@pytest.mark.usefixtures("decode_kernel")
@pytest.mark.parametrize(
    ("page_size", "decode_kernel"), [(1, "native"), (16, "native"), (16, "portable")], indirect=["decode_kernel"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_the_librarys(
    kind: str, page_size: int, checkpoint: Callable[[str], Path], reference: Callable[..., Any]
) -> None:
    """However their prompts are cut and placed, and whatever computes attention."""
    assert_answers_as(reference(kind), load(checkpoint(kind), page_size))


def without(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    """Attention that knows nothing of a field of its calls."""
    real = CpuAttention.for_step
    changes: dict[str, Any] = {field: None}

    def for_step(self: CpuAttention, meta: ForwardMeta) -> Callable[[AttentionCall], torch.Tensor]:
        attend = real(self, meta)
        return lambda call: attend(replace(call, **changes))

    monkeypatch.setattr(CpuAttention, "for_step", for_step)


@pytest.mark.parametrize(("kind", "field"), [("gpt_oss", "sinks"), ("llama4", "chunk")])
def test_what_attention_ignores_is_found_at_load(
    kind: str, field: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits differ from those of the model's own attention."""
    without(monkeypatch, field)

    with pytest.raises(UnsupportedModel, match="other logits than its own attention"):
        load(checkpoint(kind))


def test_a_chunk_longer_than_the_check_is_found_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, and the positions from which queries are scaled, are shortened for the check."""
    config = load_config(make_checkpoint("llama4", tmp_path / "short"))
    config.attention_chunk_size, config.floor_scale = 1024, 1024
    path = save_checkpoint(config, tmp_path / "long")
    load(path).close()
    monkeypatch.setattr(
        told_positions, "_counting", lambda forward, cache, /, *args, **kwargs: forward(*args, **kwargs)
    )
    with pytest.raises(UnsupportedModel, match="other logits than its own attention"):
        load(path)
    monkeypatch.undo()
    without(monkeypatch, "chunk")

    with pytest.raises(UnsupportedModel, match="other logits than its own attention"):
        load(path)


def test_a_mask_that_is_not_of_chunks_is_refused(checkpoint: Callable[[str], Path]) -> None:
    """What the configuration says of a layer, and its mask does not show, is not taken for true."""
    path = checkpoint("llama4")
    config = load_config(path)
    model = load_model(path, config, dtype="float32", device="cpu")
    tell_chunks(model, [SLIDING_WINDOW] * 3)  # The third attends to everything.

    with pytest.raises(UnsupportedModel, match="the mask of layer 2 of llama4_text is not that of its chunk 24"):
        Verification(model, 64, [None] * 3)


def test_chunks_are_as_long_as_before_after_the_check(checkpoint: Callable[[str], Path]) -> None:
    """In the configuration and in the modules."""
    path = checkpoint("llama4")
    config = load_config(path)
    model = load_model(path, config, dtype="float32", device="cpu")

    with shortened(model, 20):
        assert chunks.chunks_of(model) == {0: 9, 1: 9}
        assert model.config.attention_chunk_size == 9

    assert chunks.chunks_of(model) == {0: SLIDING_WINDOW, 1: SLIDING_WINDOW}
    assert model.config.attention_chunk_size == SLIDING_WINDOW
    assert expected_chunks(config) == [SLIDING_WINDOW, SLIDING_WINDOW, None]


@pytest.mark.parametrize(("kind", "expected"), [("gpt_oss", True), ("llama4", False)])
def test_sinks_are_found_by_running_the_model(kind: str, expected: bool, checkpoint: Callable[[str], Path]) -> None:
    """A configuration does not tell."""
    path = checkpoint(kind)

    calls = layout_of(load_model(path, load_config(path), dtype="float32", device="cpu"), (1, 2))

    assert any(call.sinks is not None for call in calls) is expected


def test_positions_in_front_of_the_first_are_no_context(checkpoint: Callable[[str], Path]) -> None:
    """RoBERTa has one more than it can serve here, where the padding token is number 0."""
    config: Any = load_config(checkpoint("roberta"))

    assert config.max_position_embeddings == MAX_POSITIONS + 1
    assert max_context_tokens(config) == MAX_POSITIONS


def test_roberta_is_called_with_positions_as_it_was_trained(checkpoint: Callable[[str], Path]) -> None:
    """Called with positions from 0, it gives the logits that it gives when it is called without any."""
    path = checkpoint("roberta")
    told = load_model(path, load_config(path), dtype="float32", device="cpu")
    told.set_attn_implementation("eager")
    plain = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    ids = torch.tensor([[7, 8, 9, 10]])

    with torch.inference_mode():
        found = told(input_ids=ids, position_ids=torch.arange(4)[None]).logits
        expected = plain(input_ids=ids).logits

    assert torch.equal(found, expected)
