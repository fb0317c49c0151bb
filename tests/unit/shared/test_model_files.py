"""The fingerprint follows the files' bytes, is remembered safely, and an incomplete directory is refused."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from shared import model_files, versions
from shared.errors import OperatorError
from shared.numerics import NUMERICS_EPOCH

OLD_NS = 1_600_000_000_000_000_000


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A tiny complete model directory whose weights are long settled."""
    directory = tmp_path / "tiny-model"
    directory.mkdir()
    (directory / "config.json").write_text('{"vocab_size": 8}')
    (directory / "tokenizer.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"weights")
    os.utime(directory / "model.safetensors", ns=(OLD_NS, OLD_NS))
    return directory


def test_equal_files_have_equal_fingerprints_wherever_they_lie(model_dir: Path, tmp_path: Path) -> None:
    """A copy of a model directory has the same fingerprint, and it is 32 hex digits."""
    copy = tmp_path / "elsewhere"
    shutil.copytree(model_dir, copy)

    assert model_files.fingerprint(copy) == model_files.fingerprint(model_dir)
    assert len(bytes.fromhex(model_files.fingerprint(copy))) == 16


def test_exact_mode_and_rounded_kv_have_fingerprints_of_their_own(model_dir: Path) -> None:
    """So their KV is kept apart."""
    settings: list[dict[str, Any]] = [
        {},
        {"is_exact": True},
        {"kv_dtype": "fp8"},
        {"is_exact": True, "kv_dtype": "fp8"},
    ]

    found = {model_files.fingerprint(model_dir, **each) for each in settings}

    assert len(found) == len(settings)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_any_relevant_byte_changes_the_fingerprint(model_dir: Path, name: str) -> None:
    """Configuration, tokenizer and weights are all part of it."""
    before = model_files.fingerprint(model_dir)
    path = model_dir / name
    path.write_bytes((path.read_bytes() if path.exists() else b"") + b" ")

    assert model_files.fingerprint(model_dir) != before


@pytest.mark.parametrize("name", ["generation_config.json", "chat_template.jinja", "chat_template.json"])
def test_what_touches_no_kv_leaves_the_fingerprint_and_changes_that_of_answers(model_dir: Path, name: str) -> None:
    """A new template or another temperature makes other prompts and answers; what is cached stays."""
    before = model_files.fingerprint(model_dir)
    answers = model_files.answer_fingerprint(model_dir, before)
    (model_dir / name).write_text("{}")

    assert model_files.fingerprint(model_dir) == before
    assert model_files.answer_fingerprint(model_dir, before) != answers


def test_a_template_within_the_tokenizer_s_configuration_leaves_the_fingerprint(model_dir: Path) -> None:
    """All else in that file is part of it."""
    path = model_dir / "tokenizer_config.json"
    found, answers = [], []
    for fields in ({"bos": 1}, {"bos": 1, "chat_template": "a"}, {"chat_template": "b", "bos": 1}, {"bos": 2}):
        path.write_text(json.dumps(fields | {"chat_template": fields.get("chat_template", "")}))
        found.append(model_files.fingerprint(model_dir))
        answers.append(model_files.answer_fingerprint(model_dir, found[-1]))

    assert found[0] == found[1] == found[2] != found[3]
    assert len(set(answers)) == 4


def test_another_epoch_of_numerics_is_another_fingerprint(model_dir: Path) -> None:
    """KV of kernels that rounded differently is not found."""
    now = model_files.fingerprint(model_dir)

    assert model_files.fingerprint(model_dir, epoch=NUMERICS_EPOCH) == now
    assert model_files.fingerprint(model_dir, epoch=NUMERICS_EPOCH + 1) != now


def test_the_files_have_a_digest_that_no_epoch_changes(model_dir: Path) -> None:
    """By it a process tells changed kernels from another model; what is no epoch stays part of it."""
    now = model_files.fingerprints(model_dir)
    later = model_files.fingerprints(model_dir, epoch=NUMERICS_EPOCH + 1)
    exact = model_files.fingerprints(model_dir, is_exact=True)

    assert now.model == model_files.fingerprint(model_dir) != later.model
    assert now.kernels.files == later.kernels.files not in (now.model, later.model)
    assert (now.kernels.epoch, later.kernels.epoch) == (NUMERICS_EPOCH, NUMERICS_EPOCH + 1)
    assert now.kernels.release == versions.release()
    assert exact.kernels.files != now.kernels.files


def _much_later_ns() -> int:
    """When a file that was just written is settled."""
    return time.time_ns() + 60 * 10**9


def _reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files whose bytes are digested from now on."""
    read: list[str] = []
    digest = model_files._file_digest

    def noted(path: Path, *rest: Any) -> Any:
        read.append(path.name)
        return digest(path, *rest)

    monkeypatch.setattr(model_files, "_file_digest", noted)
    return read


def test_a_settled_weight_file_is_read_once(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a cache, a file that is the same answers from memory; without one its bytes are read."""
    cache = tmp_path / "cache"
    first = model_files.fingerprint(model_dir, cache, clock_ns=_much_later_ns)
    read = _reads(monkeypatch)

    assert model_files.fingerprint(model_dir, cache, clock_ns=_much_later_ns) == first
    assert "model.safetensors" not in read
    assert model_files.fingerprint(model_dir) == first
    assert "model.safetensors" in read


@pytest.mark.parametrize("how", ["in place", "renamed over it"])
def test_a_file_of_equal_size_and_time_is_read_again(model_dir: Path, tmp_path: Path, how: str) -> None:
    """Another revision of a model may have both, as tools that copy keep times: its KV is not that of the first."""
    cache, path = tmp_path / "cache", model_dir / "model.safetensors"
    first = model_files.fingerprint(model_dir, cache, clock_ns=_much_later_ns)
    new = path if how == "in place" else model_dir / "download"
    new.write_bytes(b"another"[:7])
    os.utime(new, ns=(OLD_NS, OLD_NS))
    new.rename(path)

    assert model_files.fingerprint(model_dir, cache, clock_ns=_much_later_ns) != first


def test_a_file_changed_just_now_is_not_remembered(model_dir: Path, tmp_path: Path) -> None:
    """Within a tick of the file system's clock a file can change unseen, so its digest is not kept. An old time that
    was given to it says nothing.
    """
    (model_dir / "model.safetensors").write_bytes(b"fresh")
    os.utime(model_dir / "model.safetensors", ns=(OLD_NS, OLD_NS))
    changed_ns = (model_dir / "model.safetensors").stat().st_ctime_ns
    model_files.fingerprint(model_dir, tmp_path / "cache", clock_ns=lambda: changed_ns + 1)

    assert not (tmp_path / "cache" / model_files.CACHE_FILE).exists()


def test_a_torn_cache_file_is_ignored(model_dir: Path, tmp_path: Path) -> None:
    """Garbage in the cache costs a read and is replaced."""
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / model_files.CACHE_FILE).write_bytes(b'{"files": {"x"')

    found = model_files.fingerprint(model_dir, cache, clock_ns=_much_later_ns)

    assert found == model_files.fingerprint(model_dir)
    assert json.loads((cache / model_files.CACHE_FILE).read_bytes())["files"]
    assert [path.name for path in cache.iterdir()] == [model_files.CACHE_FILE]


def test_pickles_are_no_weights(model_dir: Path) -> None:
    """They run code when they are read; the refusal says what to do."""
    (model_dir / "model.safetensors").rename(model_dir / "pytorch_model.bin")

    with pytest.raises(OperatorError, match="convert them to safetensors"):
        model_files.weight_files(model_dir)


def test_pointers_of_git_lfs_are_no_weights(model_dir: Path) -> None:
    """A clone without git-lfs has them in the place of files; the refusal says what to do."""
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n"
    (model_dir / "model.safetensors").write_text(pointer)

    with pytest.raises(OperatorError, match=r"model\.safetensors; 1 in all\): git lfs pull"):
        model_files.weight_files(model_dir)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_directory_is_refused_with_a_reason(model_dir: Path, name: str) -> None:
    """Each missing part is named in an OperatorError."""
    (model_dir / name).unlink()

    with pytest.raises(OperatorError, match=r"config\.json|tokenizer|weights"):
        model_files.fingerprint(model_dir)


def test_a_missing_directory_and_a_broken_config_are_refused(model_dir: Path, tmp_path: Path) -> None:
    """The reason names the path."""
    with pytest.raises(OperatorError, match="nowhere"):
        model_files.fingerprint(tmp_path / "nowhere")
    (model_dir / "config.json").write_text("[1]")
    with pytest.raises(OperatorError, match="not a JSON object"):
        model_files.load_config(model_dir)


def _index(directory: Path, *names: str, file: str = "model.safetensors.index.json") -> None:
    """An index that names these files."""
    (directory / file).write_text(json.dumps({"weight_map": {str(at): name for at, name in enumerate(names)}}))


def _names(directory: Path) -> list[str]:
    return [path.name for path in model_files.weight_files(directory)]


def test_a_missing_shard_is_named(model_dir: Path) -> None:
    """An index that names an absent shard makes the directory incomplete."""
    (model_dir / "model.safetensors").rename(model_dir / "model-1.safetensors")
    _index(model_dir, "model-1.safetensors", "model-2.safetensors")

    with pytest.raises(OperatorError, match=r"is incomplete: .*index\.json names model-2\.safetensors$"):
        model_files.fingerprint(model_dir)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_names_no_files_is_refused(model_dir: Path, content: str) -> None:
    """Files beside it may be of another save."""
    (model_dir / "model.safetensors").rename(model_dir / "model-1.safetensors")
    (model_dir / "model.safetensors.index.json").write_text(content)

    with pytest.raises(OperatorError, match=r"index\.json names no files"):
        model_files.weight_files(model_dir)


def test_the_weights_are_the_files_that_the_library_reads(model_dir: Path) -> None:
    """A whole file before the index, and nothing that either leaves out: another save, or another format."""
    for name in ("model_old.safetensors", "consolidated.safetensors", "model-1.safetensors", "model-2.safetensors"):
        (model_dir / name).write_bytes(b"weights")
    _index(model_dir, "gone.safetensors", file="consolidated.safetensors.index.json")

    assert _names(model_dir) == ["model.safetensors"]
    _index(model_dir, "model-2.safetensors", "gone.safetensors")
    assert _names(model_dir) == ["model.safetensors"]
    (model_dir / "model.safetensors").unlink()
    _index(model_dir, "model-2.safetensors", "model-1.safetensors", "model-2.safetensors")
    assert _names(model_dir) == ["model-1.safetensors", "model-2.safetensors"]


def test_a_configuration_may_name_the_file_of_the_weights(model_dir: Path) -> None:
    """Itself, or an index; the library then reads no other, and takes it from the text part of a model with others."""
    (model_dir / "own.safetensors").write_bytes(b"weights")
    _index(model_dir, "own.safetensors", file="own.safetensors.index.json")

    for name in ("own.safetensors", "own.safetensors.index.json"):
        (model_dir / "config.json").write_text(json.dumps({"transformers_weights": name}))
        assert _names(model_dir) == ["own.safetensors"]
    (model_dir / "config.json").write_text(json.dumps({"transformers_weights": "own.safetensors", "text_config": {}}))
    assert _names(model_dir) == ["model.safetensors"]


def test_files_that_the_library_does_not_name_are_all_weights(model_dir: Path) -> None:
    """A quantised checkpoint, which workers read themselves, may have any names."""
    (model_dir / "model.safetensors").rename(model_dir / "gptq_model-4bit-128g.safetensors")

    assert _names(model_dir) == ["gptq_model-4bit-128g.safetensors"]


def test_files_that_are_not_read_are_part_of_the_fingerprint(model_dir: Path) -> None:
    """So it has stayed what it was, and the KV on disks with it."""
    alone = model_files.fingerprint(model_dir, epoch=2)
    (model_dir / "consolidated.safetensors").write_bytes(b"the same, in another format")

    assert alone == "e64141ff2baaa773ecac4d7be553bc76"
    assert model_files.fingerprint(model_dir, epoch=2) == "fcb65b0019447831285fcebdb877f557"


def test_the_served_name_is_the_directory_name(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trailing slash or a relative path makes no difference."""
    monkeypatch.chdir(model_dir)

    assert model_files.model_name(Path(f"{model_dir}/")) == "tiny-model"
    assert model_files.model_name(Path(".")) == "tiny-model"
