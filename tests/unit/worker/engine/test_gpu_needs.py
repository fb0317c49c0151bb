"""What a model needs of each GPU, from its files: pure, and beside what models of full size do on meta tensors."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from bench.defaults_on_gpus import MODELS, Model
from services.worker.config import WorkerConfig
from services.worker.engine.attention import ATTENTION_NAME, AttentionCall, attending
from services.worker.engine.gpu_needs import GpuFacts, ModelShape, check_weights, least_ranks, shape_of
from services.worker.engine.gpu_room import RoomWish
from services.worker.runner_loading import check_fit
from shared.errors import ConfigError

GIB = 2**30
WISH = RoomWish(0.9, 2048)
EIGHT_B, SEVENTY_B = MODELS[1].shape, MODELS[3].shape
CARD = GpuFacts("Card", 24 * GIB, 1)


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes of tensors that are alive at once, of those that operators make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self._now = 0
        self._seen: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor):
                self._note(each.untyped_storage())
        return result

    def _note(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self._seen:
            self._seen[key] = storage.nbytes()
            self._now += self._seen[key]
            self.peak = max(self.peak, self._now)
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._now -= self._seen.pop(key)


class Shapes:
    """Attention of which only the shape is computed, as the kernels give it."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        _, heads, rows, head_dim = call.query.shape
        return torch.empty((rows, heads, head_dim), dtype=call.query.dtype, device=call.query.device)


def on_meta(model: Model) -> Any:
    kind = Qwen3Config if model.name.startswith("Qwen3") else LlamaConfig
    config = kind(
        num_hidden_layers=model.layers, hidden_size=model.hidden, intermediate_size=model.intermediate,
        num_attention_heads=model.heads, num_key_value_heads=model.kv_heads, head_dim=model.head_dim,
        vocab_size=model.vocab, max_position_embeddings=model.context, tie_word_embeddings=model.name.endswith("-1B"),
    )  # fmt: skip
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME)
    return made.eval().requires_grad_(False)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_estimates_are_those_of_the_library_s_models(model: Model) -> None:
    """Parameters exactly, and the peak of the largest prefill within 5%, of the class itself at full size."""
    whole = on_meta(model)
    zeros = torch.zeros((1, WISH.tokens), dtype=torch.int64, device="meta")
    live = LiveBytes()

    with torch.inference_mode(), attending(Shapes()), live:
        output = whole(input_ids=zeros, position_ids=zeros, use_cache=False, logits_to_keep=zeros[0, : WISH.rows])
        output.logits[0].float()

    assert whole.num_parameters() == model.parameters
    assert model.shape.prefill_bytes(WISH, 1) == pytest.approx(live.peak, rel=0.05)


def test_ranks_share_all_but_the_embeddings() -> None:
    """Llama-3.1-8B: 0.98 GiB of embeddings in each of two ranks, and half of the other 13.98 GiB."""
    assert EIGHT_B.rank_weight_bytes(1) == EIGHT_B.weight_bytes
    assert EIGHT_B.rank_weight_bytes(2) / GIB == pytest.approx(0.978 + 13.979 / 2, abs=0.01)


@pytest.mark.parametrize(
    ("shape", "ranks", "gpu", "told"),
    [
        (SEVENTY_B, 1, GpuFacts("H200", 140 * GIB, 8), r"131.4 GiB, and of 140.0 GiB of a GPU \(H200\) "
         r"--device-memory-fraction 0.9 allows 126.0 GiB: choose --tensor-parallel 2 \(8 GPUs are here\)"),
        (SEVENTY_B, 1, CARD, r"it fits 8 such GPUs \(--tensor-parallel 8\), and 1 GPU is here; choose a smaller model"),
        (SEVENTY_B, 4, CARD, r"34.3 GiB in each of 4 ranks"),
        (SEVENTY_B, 1, GpuFacts("Tiny", 4 * GIB, 8), "choose a smaller model, or GPUs with more memory"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_are_refused_with_what_would_hold_them(
    shape: ModelShape, ranks: int, gpu: GpuFacts, told: str
) -> None:
    """The number of ranks, and whether this machine has as many GPUs."""
    with pytest.raises(ConfigError, match=told):
        check_weights(shape, ranks, gpu, WISH)


def test_weights_that_leave_room_are_not_refused() -> None:
    """How much room, the largest prefill measures."""
    check_weights(EIGHT_B, 1, CARD, WISH)
    check_weights(SEVENTY_B, 8, CARD, WISH)


def test_only_ranks_that_divide_the_model_are_advised() -> None:
    """Six heads divide by two, not by four."""
    shape = ModelShape(40 * GIB, 2, hidden=768, intermediate=3072, heads=6, kv_heads=6, vocab=1000)

    assert least_ranks(shape, 24 * GIB, WISH) == 2
    assert least_ranks(shape, 16 * GIB, WISH) is None


def test_the_shape_is_read_from_the_files(tmp_path: Path) -> None:
    """In another data type the weights take as much more, and the same in another format beside them counts nothing. A
    model with other parts than text is not judged.
    """
    config = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 100,
              "torch_dtype": "bfloat16"}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))

    assert shape_of(tmp_path, "auto") == ModelShape(1000, 2, 64, 128, 4, 4, 100)
    assert shape_of(tmp_path, "float32") == ModelShape(2000, 4, 64, 128, 4, 4, 100)
    (tmp_path / "consolidated.safetensors").write_bytes(bytes(1000))
    assert shape_of(tmp_path, "auto") == ModelShape(1000, 2, 64, 128, 4, 4, 100)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config}))
    assert shape_of(tmp_path, "auto") is None
    assert shape_of(tmp_path / "nowhere", "auto") is None


def test_a_worker_refuses_before_it_reads(tmp_path: Path) -> None:
    """The settings reach the check, and what cannot be judged is loaded."""
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    config = WorkerConfig(model=str(tmp_path), device_memory_fraction=0.5)

    check_fit(config, GpuFacts("Card", 1000, 1))
    (tmp_path / "config.json").write_text(
        json.dumps({"hidden_size": 1, "intermediate_size": 1, "num_attention_heads": 1, "vocab_size": 1})
    )
    with pytest.raises(ConfigError, match=r"the weights take 1000 B, and of 1000 B .*fraction 0.5 allows 500 B"):
        check_fit(config, GpuFacts("Card", 1000, 1))
