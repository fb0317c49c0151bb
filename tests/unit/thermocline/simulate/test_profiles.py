"""Profiles: those that come along are whole and plausible, and a user's file is checked as a whole."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shared.errors import ConfigError
from thermocline.simulate.profiles import hardware_names, load_hardware, load_model, model_names

_HARDWARE = Path(__file__).parents[4] / "thermocline" / "simulate" / "profiles" / "hardware"
_MODELS = _HARDWARE.parent / "models"


@pytest.mark.parametrize("name", hardware_names())
def test_hardware_profile_loads_under_its_own_name(name: str) -> None:
    """Every hardware profile that comes along passes its checks and says its own name."""
    assert load_hardware(name).name == name


@pytest.mark.parametrize("name", model_names())
def test_model_profile_loads_under_its_own_name(name: str) -> None:
    """Every model profile that comes along passes its checks and says its own name."""
    assert load_model(name).name == name


def test_the_machines_and_models_of_the_papers_are_there() -> None:
    """What the papers ran on, and what they ran, has a profile."""
    assert {"cpu-2core", "a6000-pcie3", "a100-pcie4", "h200-pcie5", "gh200"} <= set(hardware_names())
    wanted = {
        "llama-2-7b",
        "llama-2-13b",
        "llama-3.1-8b",
        "llama-3.1-70b",
        "qwen2.5-14b",
        "qwen2-72b",
        "opt-6.7b",
        "opt-13b",
        "opt-30b",
        "gemma-9b",
    }
    assert wanted <= set(model_names())


@pytest.mark.parametrize("name", model_names())
def test_parameters_follow_from_geometry(name: str) -> None:
    """A gated model's parameter count is what its matrices add up to, but for norms and biases (0.2%).

    OPT's feed-forward part has two matrices, and learned positions and biases add less than a percent.
    """
    model = load_model(name)
    feed_forward, tolerance = (2, 1e-2) if name.startswith("opt") else (3, 2e-3)
    attention = model.hidden * model.head_dim * (2 * model.heads + 2 * model.kv_heads)
    matrices = model.layers * (attention + feed_forward * model.hidden * model.intermediate)
    assert model.layer_parameters == pytest.approx(matrices, rel=tolerance)


def test_every_fault_of_a_hardware_file_is_named(tmp_path: Path) -> None:
    """Missing, unknown, senseless and mistyped fields are all in one error, with their sections."""
    text = (_HARDWARE / "h200-pcie5.toml").read_text()
    text = text.replace("bandwidth_gb_s = 4800", "bandwidth_gb_s = -1").replace("overlap = 1.0\n", "")
    text = text.replace("gateway_us = 3000", 'gateway_us = "soon"').replace("[disk]", "[discs]")
    path = tmp_path / "mine.toml"
    path.write_text(text)

    with pytest.raises(ConfigError) as raised:
        load_hardware(str(path))

    message = raised.value.message
    for place in (
        "memory.bandwidth_gb_s",
        "link.overlap: missing",
        "cell.gateway_us",
        "disk: missing",
        "discs: unknown",
    ):
        assert place in message


def test_contradictions_between_fields_are_named(tmp_path: Path) -> None:
    """Fields that are well-formed one by one can still contradict each other."""
    hardware = (_HARDWARE / "h200-pcie5.toml").read_text()
    hardware = hardware.replace("[16, 0.2]", "[1, 0.2]").replace(
        "assisted_efficiency = 0.77", "assisted_efficiency = 0.99"
    )
    (tmp_path / "hardware.toml").write_text(hardware)
    model = (_MODELS / "llama-3.1-8b.toml").read_text()
    model = model.replace("kv_heads = 8", "kv_heads = 7").replace("8_030_261_248", "1_000_000")
    (tmp_path / "model.toml").write_text(model)

    with pytest.raises(ConfigError, match=r"efficiency: rows must rise.*assisted_efficiency"):
        load_hardware(str(tmp_path / "hardware.toml"))
    with pytest.raises(ConfigError, match=r"kv_heads: must divide heads.*parameters"):
        load_model(str(tmp_path / "model.toml"))


def test_unknown_name_lists_what_exists() -> None:
    """A name that is no profile is answered with the names that are."""
    with pytest.raises(ConfigError, match=r"no hardware profile 'h300'.*gh200.*h200-pcie5"):
        load_hardware("h300")


@pytest.mark.parametrize("content", [b"name = ", b"\xff\xfe"])
def test_what_is_no_toml_is_refused(tmp_path: Path, content: bytes) -> None:
    """Broken TOML and bytes that are no text are errors of the operator, as a missing file is."""
    path = tmp_path / "broken.toml"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=r"is no TOML"):
        load_model(str(path))
    with pytest.raises(ConfigError, match=r"cannot read"):
        load_model(str(tmp_path / "missing.toml"))


def test_a_model_with_kv_of_eight_bits_has_the_pages_that_workers_announce() -> None:
    """A profile need not say so; KV then takes what it takes in the model's own type.

    Llama-3.1-8B keeps 128 KiB of KV a token: 32 layers, K and V, 8 heads of 128, two bytes.
    """
    plain = load_model("llama-3.1-8b")

    rounded = msgspec.structs.replace(plain, kv_dtype="fp8")

    assert plain.kv_dtype == "auto"
    assert plain.kv_token_bytes == 128 * 1024
    assert rounded.kv_token_bytes == rounded.geometry(16).token_bytes == 2 * 32 * 8 * (128 + 4)
    assert rounded.weight_bytes == plain.weight_bytes
