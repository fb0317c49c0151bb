"""What a checkpoint takes, read off its files."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shared.memory.pool_sizes import ModelDemand
from thermocline.supervisor.config import BUNDLED_MODEL, PACKAGE_ROOT
from thermocline.supervisor.model_demand import demand_of

NO_HEADS = b'{"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 0}'


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A bfloat16 checkpoint of two weight files with 300 bytes."""
    config = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
        "torch_dtype": "bfloat16", "max_position_embeddings": 512,
    }  # fmt: skip
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    (tmp_path / "model-1.safetensors").write_bytes(b"x" * 100)
    (tmp_path / "model-2.safetensors").write_bytes(b"x" * 200)
    return tmp_path


def test_a_checkpoint_tells_what_it_takes(model: Path) -> None:
    """K and V of two layers with four heads of eight values of two bytes."""
    assert demand_of(model) == ModelDemand(300, 2 * 2 * 4 * 8 * 2, 512, 4)


def test_another_type_takes_more(model: Path) -> None:
    """Weights in half precision become twice as large in float32, and so does KV."""
    assert demand_of(model, "float32") == ModelDemand(600, 2 * 2 * 4 * 8 * 4, 512, 4)
    assert demand_of(model, "float32", "fp8") == ModelDemand(600, 2 * 2 * 4 * (8 + 4), 512, 4)


def test_a_context_that_yarn_extends_has_room(model: Path) -> None:
    """As long as the model is served with."""
    config = msgspec.json.decode((model / "config.json").read_bytes())
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    (model / "config.json").write_bytes(msgspec.json.encode(config | {"rope_scaling": yarn}))

    assert demand_of(model).context_tokens == 2048


@pytest.mark.parametrize(("config", "weight_bytes"), [(b"{}", 300), (b"no json", 0), (NO_HEADS, 300)])
def test_what_is_not_told_is_unknown(model: Path, config: bytes, weight_bytes: int) -> None:
    """A readable configuration may name the files of the weights; the worker says what is wrong with the rest."""
    (model / "config.json").write_bytes(config)

    assert demand_of(model) == ModelDemand(weight_bytes=weight_bytes)


def test_a_folder_without_weights_takes_none(tmp_path: Path) -> None:
    """Nor does an unknown type of data end the start here."""
    (tmp_path / "config.json").write_bytes(b"{}")

    assert demand_of(tmp_path, "int3") == ModelDemand()


def test_the_bundled_model_is_understood() -> None:
    """6 KiB a token in float32: four layers with six heads of 32."""
    found = demand_of(PACKAGE_ROOT / "models" / BUNDLED_MODEL, "float32")

    assert (found.token_bytes, found.context_tokens) == (6144, 4096)
    assert found.weight_bytes > 0
