"""Settings of a gateway and what it reads of its model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.gateway.__main__ import main
from services.gateway.config import GatewayConfig
from services.gateway.model_facts import SamplingDefaults, read_model_facts, sampling_defaults
from shared.config import from_command_line
from shared.errors import ConfigError, OperatorError, UnsupportedModel
from shared.lifecycle import EXIT_REFUSED
from shared.model_files import fingerprint, load_config
from tests.unit.gateway.running_gateway import MODEL_DIR


def test_flags_of_the_house_are_understood() -> None:
    """The names that every service shares."""
    argv = ["--nats", "nats://a:1,nats://b:2", "--id", "g1", "--model", "m", "--host", "0.0.0.0", "--port", "9",
            "--metrics-port", "1", "--log-level", "debug", "--data-dir", "d", "--threads", "3",
            "--max-body-bytes", "1MiB"]  # fmt: skip
    config = from_command_line(GatewayConfig, "gateway", argv, environ={})

    assert config.nats == ("nats://a:1", "nats://b:2")
    assert (config.id, config.host, config.port, config.threads) == ("g1", "0.0.0.0", 9, 3)
    assert (config.max_body_bytes, config.cache_dir) == (1024**2, Path("d"))


@pytest.mark.parametrize("argv", [["--model", "m", "--id", "a.b"], ["--model", "m", "--log-level", "loud"], []])
def test_wrong_settings_are_refused(argv: list[str]) -> None:
    """An id that is no subject token, an unknown level, a missing model."""
    with pytest.raises(ConfigError):
        from_command_line(GatewayConfig, "gateway", argv, environ={})


def test_the_process_refuses_wrong_settings_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, so that a supervisor does not try again."""
    assert main(["--model", "m", "--port", "70000"]) == EXIT_REFUSED
    assert "--port" in capsys.readouterr().err


def test_facts_of_the_bundled_model() -> None:
    """Name, vocabulary, context and fingerprint."""
    facts, config = read_model_facts(MODEL_DIR), load_config(MODEL_DIR)

    assert (facts.name, facts.vocab_size) == ("thermocline-mha", config["vocab_size"])
    assert facts.max_context == config["max_position_embeddings"]
    assert facts.fingerprint == fingerprint(MODEL_DIR)
    assert read_model_facts(MODEL_DIR, served_name="x", max_context_tokens=100).max_context == 100
    assert read_model_facts(MODEL_DIR, max_context_tokens=10**6).max_context == facts.max_context


def test_a_directory_that_says_too_little_is_refused(tmp_path: Path) -> None:
    """No vocabulary or no context; a text model inside a larger one is found."""
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    config = tmp_path / "config.json"
    config.write_text("{}")
    with pytest.raises(UnsupportedModel, match="vocab_size"):
        read_model_facts(tmp_path)
    config.write_text(json.dumps({"vocab_size": 5}))
    with pytest.raises(UnsupportedModel, match="context"):
        read_model_facts(tmp_path)
    config.write_text(json.dumps({"text_config": {"vocab_size": 5, "max_position_embeddings": 7}}))

    assert read_model_facts(tmp_path).max_context == 7
    with pytest.raises(OperatorError):
        read_model_facts(tmp_path / "nowhere")


def test_sampling_defaults_come_from_the_generation_config() -> None:
    """Only numbers; everything else is OpenAI's."""
    given = {"temperature": 0.6, "top_k": 20.0, "top_p": None, "do_sample": True, "min_p": "x"}

    assert sampling_defaults(given) == SamplingDefaults(temperature=0.6, top_k=20)
