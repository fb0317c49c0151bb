"""Models that cannot be served exactly are refused, with the reason; everything else loads as it was saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from transformers import (
    BertConfig,
    BloomConfig,
    DogeConfig,
    LlamaConfig,
    MistralConfig,
    MllamaConfig,
    PaliGemmaConfig,
    PhiConfig,
    Qwen3MoeConfig,
    T5Config,
)
from transformers.models.llama.modeling_llama import LlamaAttention

from services.gateway.model_facts import check_facts
from services.worker.engine.model_loading import (
    eos_token_ids,
    expected_windows,
    load_config,
    load_model,
    max_context_tokens,
)
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.probe import find_planes
from shared.errors import ConfigError, UnsupportedModel
from tests.adapters import make_adapter
from tests.checkpoints import VOCAB_SIZE, make_checkpoint, save_checkpoint
from tests.run_name import shm_prefix
from tests.unit.worker.engine.answers import generated, paged

Checkpoint = Callable[[str], Path]

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def load(path: Path, **changes: Any) -> ModelRunner:
    settings = {
        "dtype": "auto",
        "device": "cpu",
        "page_size": 16,
        "device_kv_bytes": None,
        "pages": 16,
        "threads": 1,
        "shm_prefix": shm_prefix("engine"),
    }
    return ModelRunner.load(path, **{**settings, **changes})


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (T5Config(), "encoder-decoder"),
        (MllamaConfig(), "mllama takes more than text, and the library has no class .* part, mllama_text_model"),
        # The whole model sees text in both directions.
        (PaliGemmaConfig(), "paligemma takes more than text, and its text part was not proven"),
        (BertConfig(architectures=["BertForMaskedLM"]), "BertForMaskedLM, which answers with no text"),
        (
            LlamaConfig(quantization_config={"quant_method": "awq", "bits": 3}),
            "quantised with AWQ, and codes of 3 bits",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_configurations_that_cannot_be_served_are_refused(config: Any, reason: str, tmp_path: Path) -> None:
    """The configuration alone is enough to refuse, before any weight is read."""
    config.save_pretrained(tmp_path)

    with pytest.raises(UnsupportedModel, match=reason):
        load(tmp_path)


def test_all_reasons_are_given_at_once(tmp_path: Path) -> None:
    """A configuration with two faults names both."""
    config = LlamaConfig(quantization_config={"quant_method": "awq", "bits": 3}, is_encoder_decoder=True)
    config.save_pretrained(tmp_path)

    with pytest.raises(UnsupportedModel, match=r"quantised with AWQ.*encoder-decoder"):
        load_config(tmp_path)


def test_a_layer_that_bypasses_attention_is_refused(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of the attention function are counted: one for each layer, or the model is not served."""
    forward = LlamaAttention.forward

    def bypass(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        return (hidden_states, None) if self.layer_idx == 1 else forward(self, hidden_states, **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", bypass)

    with pytest.raises(UnsupportedModel, match="3 layers but made 2 calls"):
        load(checkpoint("llama"))


def test_what_else_attention_is_asked_for_is_refused(tmp_path: Path) -> None:
    """Doge makes masks of its own from V."""
    config = DogeConfig(**SMALL)
    path = save_checkpoint(config, tmp_path)
    model = load_model(path, config, dtype="float32", device="cpu")

    with pytest.raises(UnsupportedModel, match="attention of doge needs attention_mask, which we lack"):
        find_planes(model, expected_windows(config), 16, 256)


def test_a_context_that_nobody_names_is_asked_for(tmp_path: Path) -> None:
    """BLOOM, whose positions are slopes, knows no longest context by itself; checkpoints may name one."""
    config = BloomConfig(hidden_size=64, n_head=4, vocab_size=300)

    with pytest.raises(ConfigError, match="names no longest context: name it with --max-context-tokens"):
        max_context_tokens(config)

    assert max_context_tokens(config, 100) == 100
    config.seq_length = 2048
    assert max_context_tokens(config) == 2048
    assert max_context_tokens(config, 100) == 100


def test_attention_that_differs_from_the_models_own_is_refused(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the reason, other logits than with eager attention are noticed at load."""
    monkeypatch.setattr("services.worker.engine.cpu_attention.compile_decode", lambda *_: None)
    monkeypatch.setattr(
        "services.worker.engine.cpu_attention.scaled_dot_product_attention",
        lambda q, k, v, **_: torch.nn.functional.scaled_dot_product_attention(q, k, v),
    )

    with pytest.raises(UnsupportedModel, match="other logits"):
        load(checkpoint("llama"))


def test_what_is_asked_for_in_service_is_compared_too(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that errs only where a chunk's last row alone is wanted is noticed at load."""
    forward = ModelRunner.forward

    def err(self: ModelRunner, ids: torch.Tensor, positions: torch.Tensor, meta: Any, rows: torch.Tensor) -> Any:
        logits = forward(self, ids, positions, meta, rows)
        return logits if len(rows) == len(ids) else logits.flip(-1)

    monkeypatch.setattr(ModelRunner, "forward", err)

    with pytest.raises(UnsupportedModel, match="other logits"):
        load(checkpoint("llama"))


def test_a_window_that_does_not_reach_attention_is_refused(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a model's attention does not pass on the configured window, a probe shorter than it could not tell."""
    monkeypatch.setattr("services.worker.engine.model_runner.expected_windows", lambda config: [4096] * 3)

    with pytest.raises(UnsupportedModel, match="window 24, configured is 4096"):
        load(checkpoint("mistral"))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"rope_parameters": {"rope_type": "mrope", "rope_theta": 1e4}}, "rotary embeddings are of kind mrope"),
        (
            {"auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}},
            r"code in the folder \(modeling_own.OwnForCausalLM\)",
        ),
        (
            {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}},
            r"code in the folder \(configuration_own.OwnConfig\)",
        ),
    ],
)
def test_what_the_library_lacks_is_refused(fields: dict[str, Any], reason: str, tmp_path: Path) -> None:
    """Rotary embeddings of an unknown kind, and models whose class is in the folder, known type or not."""
    LlamaConfig(**SMALL).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | fields))

    with pytest.raises(UnsupportedModel, match=reason):
        load_config(tmp_path)


def test_code_in_the_folder_is_no_reason_where_the_library_has_the_class(tmp_path: Path) -> None:
    """Many models bring the code from before the library had theirs; some spell the class otherwise."""
    path = make_checkpoint("llama", tmp_path)
    raw = json.loads((path / "config.json").read_text())
    code = {"AutoConfig": "configuration_llama.LlamaConfig", "AutoModelForCausalLM": "modeling_llama.LLaMAForCausalLM"}
    (path / "config.json").write_text(json.dumps(raw | {"auto_map": code}))

    load(path).close()


def test_weights_without_a_place_are_told(tmp_path: Path) -> None:
    """A bias that the configuration leaves out changes answers, so the log names it."""
    path = make_checkpoint("llama", tmp_path)
    file = sorted(path.glob("*.safetensors"))[0]
    save_file(load_file(file) | {"model.layers.0.self_attn.q_proj.bias": torch.ones(1)}, file, {"format": "pt"})
    index = path / "model.safetensors.index.json"
    named = json.loads(index.read_text())
    named["weight_map"]["model.layers.0.self_attn.q_proj.bias"] = file.name
    index.write_text(json.dumps(named))

    with capture_logs() as lines:
        load_model(path, load_config(path), dtype="auto", device="cpu")

    (told,) = (line for line in lines if line["event"] == "weights_unused")
    assert told["first"] == ["model.layers.0.self_attn.q_proj.bias"]


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    """A checkpoint that lacks a tensor is not filled with random numbers."""
    path = make_checkpoint("llama", tmp_path)
    shard = sorted(path.glob("*.safetensors"))[0]
    tensors = load_file(shard)
    removed = sorted(tensors)[0]
    del tensors[removed]
    save_file(tensors, shard, metadata={"format": "pt"})
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"][removed]
    index.write_text(json.dumps(content))

    with pytest.raises(UnsupportedModel, match=f"lacks weights: {removed}"):
        load(path)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    """By name, with both shapes: here the configuration has a larger vocabulary than the weights."""
    path = make_checkpoint("llama", tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"vocab_size": VOCAB_SIZE + 1}))

    with pytest.raises(UnsupportedModel, match=r"other shapes.*: lm_head\.weight is 300 x 64, not 301 x 64, "):
        load(path)


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"])
def test_weights_that_are_no_numbers_are_refused(name: str, tmp_path: Path) -> None:
    """As such: NaN is unequal to itself, so every comparison of a check fails, whatever that is of."""
    path = make_checkpoint("llama", tmp_path)
    for shard in path.glob("*.safetensors"):
        tensors = load_file(shard)
        if name in tensors:
            tensors[name].view(-1)[0] = torch.nan
            save_file(tensors, shard, metadata={"format": "pt"})

    with pytest.raises(UnsupportedModel, match=r"llama computes NaN in float32: its weights are damaged, or"):
        load(path)


def test_an_adapter_in_the_folder_is_not_part_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With PEFT installed the library would add it to the weights; no digest covers it."""
    path = make_checkpoint("llama", tmp_path / "model")
    expected = load_model(path, load_config(path), dtype="float32", device="cpu").state_dict()
    make_adapter(path, path)
    for module in ("transformers.models.auto.auto_factory", "transformers.integrations.peft"):
        monkeypatch.setattr(f"{module}.is_peft_available", lambda: True)

    found = load_model(path, load_config(path), dtype="float32", device="cpu").state_dict()

    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_yarn_extends_the_context(tmp_path: Path) -> None:
    """By its factor, though the configuration still names the context of pretraining, as model cards have it."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "rope_theta": 10000.0}
    path = save_checkpoint(LlamaConfig(**SMALL, rope_parameters=rope), tmp_path)

    assert check_facts(path) == (VOCAB_SIZE, 1024)
    for bound, context in ((0, 1024), (512, 512)):
        runner = load(path, context_tokens=bound)
        runner.close()
        assert runner.max_context == context


@pytest.mark.parametrize("content", [None, "{", '{"model_type": "nonesuch"}'])
def test_directories_without_a_readable_model_are_refused(content: str | None, tmp_path: Path) -> None:
    """No configuration, a torn one, and an unknown architecture all end in UnsupportedModel."""
    if content is not None:
        (tmp_path / "config.json").write_text(content)

    with pytest.raises(UnsupportedModel, match="no readable model configuration"):
        load(tmp_path)


def test_unreadable_weights_are_refused(tmp_path: Path) -> None:
    """A truncated shard is an UnsupportedModel that names it, not a crash of the library."""
    path = make_checkpoint("llama", tmp_path)
    shard = sorted(path.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:1000])

    with pytest.raises(UnsupportedModel, match=f"{shard.name} cannot be read: "):
        load(path)


def test_nothing_is_left_behind_by_a_refusal(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model refused after its pool was made leaves no segment."""
    monkeypatch.setattr("services.worker.engine.probe._TOLERANCE", {torch.float32: -1.0})

    with pytest.raises(UnsupportedModel):
        load(checkpoint("llama"), shm_prefix=shm_prefix("refused"))
    assert not list(Path("/dev/shm").glob(f"{shm_prefix('refused')}.*"))


def test_settings_that_make_no_sense_are_refused(checkpoint: Checkpoint) -> None:
    """A wrong dtype, page size or pool is the operator's error and says so."""
    for changes in (
        {"dtype": "int8"},
        {"page_size": -1},
        {"context_tokens": 1},
        {"pages": None},
        {"pages": 1, "page_size": 1},
    ):
        with pytest.raises(ConfigError):
            load(checkpoint("llama"), **changes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_auto_is_the_checkpoints_own(dtype: str, tmp_path: Path) -> None:
    """auto keeps the dtype of the file; KV is kept in the same."""
    runner = load(make_checkpoint("llama", tmp_path, dtype=dtype))

    assert runner.geometry.dtype == dtype
    runner.close()


@pytest.mark.parametrize(("eos", "expected"), [(2, (2,)), ([5, 3], (3, 5)), (None, (2,))])
def test_eos_comes_from_the_generation_config(eos: object, expected: tuple[int, ...], tmp_path: Path) -> None:
    """A number, a list, or none, in which case the model's configuration is asked."""
    path = make_checkpoint("llama", tmp_path)
    (path / "generation_config.json").write_text(json.dumps({} if eos is None else {"eos_token_id": eos}))

    model = load_model(path, load_config(path), dtype="auto", device="cpu")

    assert eos_token_ids(model) == expected


@pytest.mark.parametrize(
    ("family", "windows"),
    [("gemma2", [24, None, 24, None]), ("mistral", [24] * 3), ("llama", [None] * 3), ("qwen2", [None] * 3)],
)
def test_expected_windows_follow_the_layer_types(
    family: str, windows: list[int | None], checkpoint: Checkpoint
) -> None:
    """Alternating layers, all layers, or none have windows, as the configuration says."""
    assert expected_windows(load_config(checkpoint(family))) == windows


@pytest.mark.parametrize(
    "config",
    [
        Qwen3MoeConfig(
            **SMALL, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, initializer_range=0.2
        ),
        MistralConfig(**SMALL, head_dim=24, sliding_window=None, initializer_range=0.2),
        PhiConfig(**SMALL, initializer_range=0.2),
    ],
    ids=["qwen3_moe", "mistral without window", "phi"],
)
def test_further_architectures_need_no_code(config: Any, tmp_path: Path) -> None:
    """Models that go through the attention interface, experts and fused layers included, answer as generate does."""
    path = save_checkpoint(config, tmp_path)

    assert paged(path) == generated(path)
