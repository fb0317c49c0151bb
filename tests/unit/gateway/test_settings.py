"""Settings of a gateway and what it reads of its model."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from services.gateway.__main__ import main
from services.gateway.bootstrap import fidelity_rules, run
from services.gateway.config import GatewayConfig
from services.gateway.fidelity import FidelityRules
from services.gateway.keys import tenant_id
from services.gateway.model_facts import SamplingDefaults, read_model_facts, sampling_defaults, unserved_fields
from shared.config import from_command_line, load
from shared.errors import ConfigError, OperatorError, UnsupportedModel
from shared.lifecycle import EXIT_REFUSED, Lifecycle
from shared.model_files import fingerprint, load_config
from tests.unit.gateway.quality_gates import gate_file, gate_of
from tests.unit.gateway.running_gateway import FACTS, MODEL_DIR


def test_flags_of_the_house_are_understood() -> None:
    """The names that every service shares."""
    argv = ["--nats", "nats://a:1,nats://b:2", "--id", "g1", "--model", "m", "--host", "0.0.0.0", "--port", "9",
            "--metrics-port", "1", "--log-level", "debug", "--data-dir", "d", "--threads", "3",
            "--max-body-bytes", "1MiB"]  # fmt: skip
    config = from_command_line(GatewayConfig, "gateway", argv, environ={})

    assert config.nats == ("nats://a:1", "nats://b:2")
    assert (config.id, config.host, config.port, config.threads) == ("g1", "0.0.0.0", 9, 3)
    assert (config.max_body_bytes, config.cache_dir) == (1024**2, Path("d"))


def test_a_host_may_be_written_as_in_a_url() -> None:
    """An IPv6 address with its brackets; an empty one, as of an unset variable, must not mean every address."""
    host = from_command_line(GatewayConfig, "gateway", ["--model", "m", "--host", "[::1]"], environ={}).host

    assert host == "::1"
    with pytest.raises(ConfigError, match="--host is empty"):
        from_command_line(GatewayConfig, "gateway", ["--model", "m", "--host", ""], environ={})


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


def test_a_bound_beyond_the_models_context_is_said() -> None:
    """Contexts stay the model's; one that a bound shortens is as it was asked for."""
    with capture_logs() as events:
        own, *_ = (read_model_facts(MODEL_DIR, max_context_tokens=bound).max_context for bound in (0, 100, 10**6))

    said = [each for each in events if each["event"] == "context_is_the_models"]
    assert [(each["log_level"], each["asked_tokens"], each["context_tokens"]) for each in said] == [
        ("warning", 10**6, own)
    ]


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

    assert sampling_defaults(given, 100) == SamplingDefaults(temperature=0.6, top_k=20)


def test_tokens_that_a_model_suppresses_are_read() -> None:
    """Those in the vocabulary, alone or as bad words of one token; other forms are no tokens."""
    given = {"suppress_tokens": [7, 3, 500, -1, "x"], "bad_words_ids": [[5], [1, 2], 9, []]}

    assert sampling_defaults(given, 100).suppressed == (3, 5, 7)
    assert sampling_defaults({"suppress_tokens": 7, "bad_words_ids": None}, 100).suppressed == ()


def test_fields_that_would_change_answers_and_are_not_applied_are_named() -> None:
    """Values that change nothing are not."""
    neutral = {"typical_p": 1.0, "no_repeat_ngram_size": 0, "begin_suppress_tokens": [], "forced_bos_token_id": None}
    given = {"no_repeat_ngram_size": 3, "bad_words_ids": [[1, 2]], "forced_bos_token_id": 0}

    assert unserved_fields(neutral | {"bad_words_ids": [[1]], "suppress_tokens": [2]}) == ()
    assert unserved_fields(given) == ("no_repeat_ngram_size", "forced_bos_token_id", "bad_words_ids of several tokens")


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"importance": "sometimes"}, "'sometimes' is none of off, gated, on"),
        ({"importance": "gated"}, "--importance gated and --importance-gate FILE need each other"),
        ({"importance": "on", "importance_gate": "g.json"}, "need each other"),
        ({"importance_gate": "g.json"}, "need each other"),
        ({"importance_ratio": 0.5}, "need --importance gated"),
        ({"importance": "on", "importance_ratio": 0.001}, "--importance-ratio must be 0 or at least 0.01"),
        ({"importance": "on", "importance_ratio": 1.5}, "<= 1.0"),
        ({"importance_key_ratios": "secret-a=0.5"}, "need --importance gated"),
        ({"importance": "on", "importance_key_ratios": "secret-a"}, "entry 1 is no KEY=RATIO"),
        ({"importance": "on", "importance_key_ratios": "secret-a=0.5,secret-z=0.5"}, "entry 2 is no KEY=RATIO"),
        ({"importance": "on", "importance_key_ratios": "secret-a=2"}, "the ratio of entry 1 must be 0, or 0.01 to 1"),
        ({"importance": "on", "importance_key_ratios": "secret-a=much"}, "the ratio of entry 1"),
        ({"importance": "on", "importance_key_ratios": "secret-a=nan"}, "the ratio of entry 1"),
        ({"importance": "on", "importance_key_ratios": "secret-a=0.5,secret-a=0.1"}, "names a key twice"),
    ],
)
def test_faults_of_importance_are_told_without_telling_a_key(settings: dict[str, object], fault: str) -> None:
    """Each at the start, by the setting's name; keys would end up in logs."""
    with pytest.raises(ConfigError) as refusal:
        load(GatewayConfig, "gateway", flags={"model": "m", "api_keys": "secret-a,secret-b", **settings})

    assert fault in refusal.value.message
    assert "secret" not in refusal.value.message


def test_ratios_of_keys_may_have_the_sign_of_equality_in_the_key() -> None:
    """Keys are often base64."""
    flags = {"model": "m", "importance": "on", "api_keys": "a==,b", "importance_key_ratios": "a===0.5,b=0"}

    assert load(GatewayConfig, "gateway", flags=flags).ratio_by_key == {"a==": 0.5, "b": 0.0}


def gated(gate: str, **settings: object) -> GatewayConfig:
    return msgspec.convert({"model": "m", "importance": "gated", "importance_gate": gate, **settings}, GatewayConfig)


def test_rules_follow_the_settings(tmp_path: Path) -> None:
    """Keys as tenants, since the key itself is known at the boundary alone."""
    rules = fidelity_rules(
        gated(gate_file(tmp_path), importance_ratio=0.5, api_keys=["k"], importance_key_ratios=["k=0.25"]),
        FACTS.fingerprint,
    )

    assert (rules.mode, rules.default_ratio, rules.ratio_by_tenant) == ("gated", 0.5, {tenant_id(b"k"): 0.25})
    assert rules.gate is not None
    assert rules.gate.measured == gate_of()
    assert fidelity_rules(msgspec.convert({"model": "m"}, GatewayConfig), FACTS.fingerprint) == FidelityRules()


def test_a_default_beyond_the_gate_is_refused_at_the_start(tmp_path: Path) -> None:
    """The deployment's or a key's: it would refuse callers who asked for nothing. 0 is exact and always passes."""
    gate = gate_file(tmp_path)
    with pytest.raises(ConfigError, match=r"--importance-ratio: .* no ratio below 0\.25"):
        fidelity_rules(gated(gate, importance_ratio=0.1), FACTS.fingerprint)
    with pytest.raises(ConfigError, match=r"--importance-key-ratios: entry 2: .* no ratio below 0\.25"):
        fidelity_rules(
            gated(gate, api_keys=["secret", "b"], importance_key_ratios=["secret=0", "b=0.2"]), FACTS.fingerprint
        )


async def test_a_gate_of_another_model_stops_the_gateway(tmp_path: Path) -> None:
    """At its start, before it looks for a broker: there is none."""
    gate = gate_file(tmp_path, model="another")

    with pytest.raises(ConfigError, match="the quality gate is of model another, not of"):
        await run(gated(gate, model=str(MODEL_DIR), port=0, nats=["nats://127.0.0.1:1"]), Lifecycle())


def test_sizes_that_the_configuration_leaves_out_are_the_librarys(tmp_path: Path) -> None:
    """Configurations of models with a vision part often name only what differs from the library's defaults."""
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "config.json").write_text('{"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}')

    facts = read_model_facts(tmp_path)

    assert (facts.vocab_size, facts.max_context) == (262_208, 131_072)


def test_sizes_that_the_library_does_not_know_are_refused(tmp_path: Path) -> None:
    """The reason is the library's last line, and no traceback."""
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "config.json").write_text('{"model_type": "nonesuch", "text_config": {}}')

    with pytest.raises(UnsupportedModel, match=r"config\.json leaves out sizes.*nonesuch") as refused:
        read_model_facts(tmp_path)
    assert "\n" not in refused.value.message
