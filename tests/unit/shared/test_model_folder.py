"""What a model's name and folder show before anything is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shared.errors import ConfigError, OperatorError, UnsupportedModel
from shared.model_files import fingerprint, has_short_rope, model_name
from shared.model_folder import check_model, find_model

HUB_ID = "Some-Org/Some.Model-7B"


def make_folder(path: Path, config: dict[str, Any] | None = None) -> Path:
    """A folder with the files that a model needs; its weights are not looked into."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"} if config is None else config))
    (path / "model.safetensors").write_bytes(b"weights")
    (path / "tokenizer.json").write_text("{}")
    return path


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, which alone is looked into."""
    cache = tmp_path / "hub"
    cache.mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(cache))
    return cache


def cache_snapshot(hub: Path) -> Path:
    """What downloading ``HUB_ID`` leaves in the cache."""
    commit = "a" * 40
    repository = hub / f"models--{HUB_ID.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    return make_folder(repository / "snapshots" / commit)


def test_a_folder_is_itself(tmp_path: Path) -> None:
    """A path that exists is taken as it is, whatever it looks like."""
    folder = make_folder(tmp_path / "org" / "model")

    assert find_model(str(folder)) == folder


def test_a_hub_id_that_is_no_folder_says_how_to_fetch_it(hub: Path) -> None:
    """The message has the two commands, complete."""
    with pytest.raises(ConfigError, match=rf"hf download {HUB_ID} --local-dir DIR.*--model DIR"):
        find_model(HUB_ID)


@pytest.mark.parametrize("name", ["nonesuch", "./a/b/c", "/no/where", "a b/c", "../up/there"])
def test_a_path_that_is_nowhere_is_no_hub_id(name: str, hub: Path) -> None:
    """Only names of two plain parts may be models of the hub."""
    with pytest.raises(ConfigError, match=r"there is no such folder$"):
        find_model(name)


def test_the_hubs_cache_is_used_where_it_has_the_model(hub: Path) -> None:
    """The snapshot is the folder, and the model keeps its name."""
    snapshot = cache_snapshot(hub)

    found = find_model(HUB_ID)

    assert found == snapshot
    assert model_name(found) == "Some.Model-7B"
    assert check_model(found) == {"model_type": "llama"}


def test_quantised_checkpoints_that_are_not_served_are_refused(tmp_path: Path) -> None:
    """The method is named; one that is served is none."""
    settings = {"quant_method": "gptq", "bits": 3}
    refused = make_folder(tmp_path / "refused", {"model_type": "llama", "quantization_config": settings})
    served = make_folder(tmp_path / "served", {"model_type": "llama", "quantization_config": {**settings, "bits": 4}})

    with pytest.raises(UnsupportedModel, match="quantised with GPTQ, and codes of 3 bits are not served"):
        check_model(refused)
    check_model(served)


def test_a_gguf_file_is_refused_by_name(tmp_path: Path) -> None:
    """Whether the file itself is named, or its folder, with a configuration beside it or without."""
    folder = tmp_path / "model"
    folder.mkdir()
    file = folder / "model-q4.gguf"
    file.write_bytes(b"GGUF")

    for path in (file, folder):
        with pytest.raises(UnsupportedModel, match="quantised with GGUF, which is not served yet"):
            check_model(path)
    (folder / "config.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match="quantised with GGUF"):
        check_model(folder)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM, which answers with no text"),
        ({"architectures": ["ViTForImageClassification"]}, "ViTForImageClassification, which answers with no text"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
    ],
)
def test_models_that_answer_with_no_text_are_refused(config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    """config.json alone tells encoders and models of images."""
    with pytest.raises(UnsupportedModel, match=reason):
        check_model(make_folder(tmp_path / "model", config))


def test_missing_files_are_named_all_at_once(tmp_path: Path) -> None:
    """Weights and tokenizer that are not there are one message."""
    folder = make_folder(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / "tokenizer.json").unlink()

    with pytest.raises(UnsupportedModel, match=r"holds no weights.*has no tokenizer"):
        check_model(folder)


def test_weights_that_the_library_does_not_find_are_refused(tmp_path: Path) -> None:
    """Shards without their index. A quantised checkpoint is read without one."""
    plain = make_folder(tmp_path / "plain")
    settings = {"quant_method": "gptq", "bits": 4}
    quantised = make_folder(tmp_path / "quantised", {"model_type": "llama", "quantization_config": settings})
    for folder in (plain, quantised):
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")

    with pytest.raises(
        UnsupportedModel,
        match=r"weights are neither in model\.safetensors nor named by model\.safetensors\.index\.json",
    ):
        check_model(plain)
    check_model(quantised)


def test_a_sentencepiece_tokenizer_needs_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the folder has it in no other form. Tokenizers of tiktoken have a file of that name, too."""
    folder = make_folder(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    monkeypatch.setattr("shared.model_folder.find_spec", lambda name: None)

    (folder / "tokenizer.model").write_bytes(b"IQ== 0\n")
    check_model(folder)
    (folder / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>")
    with pytest.raises(UnsupportedModel, match=r"its tokenizer is SentencePiece's: .*pip install sentencepiece"):
        check_model(folder)
    monkeypatch.setattr("shared.model_folder.find_spec", lambda name: object())
    check_model(folder)
    monkeypatch.setattr("shared.model_folder.find_spec", lambda name: None)
    (folder / "tokenizer.json").write_text("{}")
    check_model(folder)


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_folder_without_a_readable_configuration_is_refused(content: str | None, tmp_path: Path) -> None:
    """No config.json, a torn one, and one that is no object."""
    if content is not None:
        (tmp_path / "config.json").write_text(content)

    with pytest.raises(OperatorError, match=r"config\.json"):
        check_model(tmp_path)


def test_a_bound_that_changes_kv_changes_the_fingerprint(tmp_path: Path) -> None:
    """longrope with its short factors has another namespace than with its long ones; other bounds change nothing."""
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 64}
    longrope = make_folder(tmp_path / "longrope", {"max_position_embeddings": 256, "rope_parameters": rope})
    plain = make_folder(tmp_path / "plain", {"max_position_embeddings": 256})

    assert fingerprint(longrope, context_tokens=65) == fingerprint(longrope) != fingerprint(longrope, context_tokens=64)
    assert fingerprint(plain, context_tokens=64) == fingerprint(plain)


def test_older_spellings_of_longrope_are_known() -> None:
    """``rope_scaling``, its type "su", and the original context beside it."""
    config = {
        "max_position_embeddings": 131_072,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": "su"},
    }

    assert [has_short_rope(config, bound) for bound in (0, 4096, 4097)] == [False, True, False]


def test_looking_at_a_folder_needs_no_torch() -> None:
    """What the command line checks before it starts anything imports neither torch nor the library."""
    code = "import sys, shared.model_folder; print(sorted({'torch', 'transformers'} & set(sys.modules)))"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b'{"a": [1,}'])
def test_a_broken_tokenizer_is_refused(tmp_path: Path, content: bytes) -> None:
    """Before anything is loaded: a download that was cut off, or another file under that name."""
    folder = make_folder(tmp_path / "model")
    (folder / "tokenizer.json").write_bytes(content)

    with pytest.raises(UnsupportedModel, match=r"its tokenizer\.json cannot be read"):
        check_model(folder)
