"""Files of LoRA adapters: what is read of them, what is refused and why, and when their digest changes."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from shared import adapters
from shared.adapter_patterns import Patterns
from shared.adapters import AdaptedModule, is_adapter_name, load_adapter, read_adapter
from shared.errors import AdapterRefused

Q, K = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.k_proj"

ENDLESS = r"(.*.*.*.*.*.*.*.*)\1(?=!)"
"""A pattern that takes longer than a life to match with a name of thirty characters."""

CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "somebody/model",
    "r": 2,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "k_proj"],
    "lora_dropout": 0.05,
    "bias": "none",
    "inference_mode": True,
    "modules_to_save": None,
    "use_dora": False,
    "loftq_config": {},
}


def pair(module: str, rank: int = 2, inputs: int = 4, outputs: int = 6) -> dict[str, np.ndarray]:
    return {
        f"base_model.model.{module}.lora_A.weight": np.ones((rank, inputs), np.float32),
        f"base_model.model.{module}.lora_B.weight": np.ones((outputs, rank), np.float32),
    }


def write(folder: Path, tensors: dict[str, np.ndarray] | None = None, **changes: Any) -> Path:
    """An adapter of two modules, or of these tensors, whose configuration says this too."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | changes), encoding="utf-8")
    save_file(tensors or pair(Q) | pair(K), folder / "adapter_model.safetensors")
    return folder


def test_modules_have_shapes_ranks_and_scales(tmp_path: Path) -> None:
    """A scale is alpha over the rank."""
    files = read_adapter(write(tmp_path))

    assert files.modules == (AdaptedModule(Q, 2, 4, 6, 4.0), AdaptedModule(K, 2, 4, 6, 4.0))
    assert files.rank == 2
    assert files.nbytes == 2 * 4 * (2 * 4 + 6 * 2)


def test_patterns_count_for_modules_that_end_so(tmp_path: Path) -> None:
    """Ranks and alphas of single modules, and the root of a stabilised rank."""
    folder = write(
        tmp_path,
        pair(Q, rank=3) | pair(K),
        rank_pattern={r"layers\.0\.self_attn\.q_proj": 3, "proj": 9},
        alpha_pattern={"k_proj": 5},
        use_rslora=True,
    )

    scales = [module.scale for module in read_adapter(folder).modules]

    assert scales == [8 / math.sqrt(3), 5 / math.sqrt(2)]


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": "all-linear"},
        {"target_modules": r".*_proj"},
        {"target_modules": [Q, "k_proj"]},
        {"layers_to_transform": [0, 1], "layers_pattern": "layers"},
        {"exclude_modules": ["lm_head"]},
        {"init_lora_weights": "gaussian", "lora_bias": False, "qalora_group_size": 16, "eva_config": None},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0, "tau": 0.99}},
        {"target_modules": "All-Linear"},
        {"layers_to_transform": []},
    ],
)
def test_what_means_nothing_else_is_read(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Other ways to say the same, and settings that are off."""
    files = read_adapter(write(tmp_path, **changes))

    assert [module.name for module in files.modules] == [Q, K]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS'"),
        ({"use_dora": True}, "use_dora is not served"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is not served"),
        ({"bias": "lora_only"}, "it changes biases"),
        ({"lora_bias": True}, "lora_bias is not served"),
        ({"fan_in_fan_out": True}, "its layers are transposed"),
        ({"init_lora_weights": "pissa"}, "'pissa' changes weights of the base model"),
        ({"init_lora_weights": "pissa_niter_16"}, "'pissa_niter_16' changes weights of the base model"),
        ({"init_lora_weights": "brand_new"}, "'brand_new' is not known to leave the base model alone"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is not served"),
        ({"target_parameters": ["experts"]}, "target_parameters is not served"),
        ({"something_new": 1}, "something_new is not served"),
        ({"r": 0}, "r is no rank"),
        ({"r": True}, "r is no rank"),
        ({"lora_alpha": "8"}, "lora_alpha is no number"),
        ({"lora_alpha": math.inf}, "lora_alpha is no number"),
        ({"lora_alpha": 10**400}, "lora_alpha is no number"),
        ({"alpha_pattern": {"q_proj": 10**400}}, "alpha_pattern does not give numbers"),
        ({"r": 10**400}, "r is no rank"),
        ({"target_modules": None}, "target_modules names no modules"),
        ({"target_modules": "("}, "target_modules names no modules"),
        ({"rank_pattern": {"q_proj": "2"}}, "rank_pattern does not give numbers"),
        ({"alpha_pattern": {"(": 2}}, "alpha_pattern has the pattern"),
        ({"rank_pattern": {"(" * 9000: 2}}, "it has more than 8192 characters"),
        ({"target_modules": "(" * 5000 + ")" * 5000}, "target_modules names no modules"),
        ({"layers_to_transform": "all"}, "layers_to_transform are no numbers"),
        ({"target_modules": ["q_proj"]}, "which the configuration does not target"),
        ({"exclude_modules": ["k_proj"]}, "which the configuration does not target"),
        ({"layers_to_transform": [0]}, "which the configuration does not target"),
        ({"r": 3}, "no pair of rank 3"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    """By the name of the setting."""
    folder = write(tmp_path, **changes)

    with pytest.raises(AdapterRefused) as refusal:
        read_adapter(folder)

    assert reason in refusal.value.message


@pytest.mark.parametrize("changes", [{"target_modules": ENDLESS}, {"alpha_pattern": {ENDLESS: 2}}])
def test_patterns_that_never_end_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """Matching ends after its time, and other threads run meanwhile: a gateway goes on answering."""
    folder = write(tmp_path, **changes)
    monkeypatch.setattr(adapters, "Patterns", lambda: Patterns(1.0))
    turns, has_ended = 0, threading.Event()

    def run() -> None:
        nonlocal turns
        while not has_ended.wait(0.001):
            turns += 1

    thread = threading.Thread(target=run)
    thread.start()
    try:
        with pytest.raises(AdapterRefused, match=r"takes more than 1 s"):
            read_adapter(folder)
    finally:
        has_ended.set()
        thread.join()

    assert turns > 10


def test_all_patterns_share_one_bound() -> None:
    """Many patterns, each of them quick, end too."""
    now_s = 0.0
    patterns = Patterns(1.0, lambda: now_s)
    assert patterns.ends_name("q_proj", Q)
    assert not patterns.ends_name("proj", Q)
    assert not patterns.is_name("q_proj", Q)

    now_s = 1.0

    for ask in (patterns.ends_name, patterns.is_name):
        with pytest.raises(AdapterRefused, match="takes more than 1 s"):
            ask("q_proj", Q)


def test_numbers_of_layers_are_plain(tmp_path: Path) -> None:
    """A part of a name that is some other numeral is no number of a layer."""
    odd = "model.layers.²." + "9" * 500 + ".0.q_proj"

    files = read_adapter(write(tmp_path, pair(odd), layers_to_transform=[0]))

    assert [module.name for module in files.modules] == [odd]


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({f"base_model.model.{'a' * 2000}.lora_A.weight": np.ones((2, 2), np.float32)}, "more than 1024 characters"),
        ({"base_model.model.lm_head.weight": np.ones((2, 2), np.float32)}, "no weight of a low-rank pair"),
        ({"model.q_proj.lora_A.weight": np.ones((2, 2), np.float32)}, "no weight of a low-rank pair"),
        (dict(list(pair(Q).items())[:1]), "no pair of rank 2"),
        (pair(Q) | {f"base_model.model.{Q}.lora_A.weight": np.ones((2, 4), np.int64)}, "is of type I64"),
    ],
)
def test_other_tensors_are_refused(tmp_path: Path, tensors: dict[str, np.ndarray], reason: str) -> None:
    """A file holds pairs of floats and nothing else."""
    folder = write(tmp_path, tensors)

    with pytest.raises(AdapterRefused, match=reason):
        read_adapter(folder)


@pytest.mark.parametrize(
    "content", [b"", b"\x00" * 7, b"\xff" * 64, (2**40).to_bytes(8, "little") + b"{}", b"\x02" + b"\x00" * 7 + b"[]"]
)
def test_broken_weights_are_refused(tmp_path: Path, content: bytes) -> None:
    """Bytes that are no safetensors file."""
    folder = write(tmp_path)
    (folder / "adapter_model.safetensors").write_bytes(content)

    with pytest.raises(AdapterRefused, match="is no safetensors file"):
        read_adapter(folder)
    with pytest.raises(AdapterRefused, match="is no safetensors file"):
        load_adapter(folder, 2**20)


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b"[" * 100_000])
def test_broken_configurations_are_refused(tmp_path: Path, content: bytes) -> None:
    """Bytes that are no JSON object."""
    folder = write(tmp_path)
    (folder / "adapter_config.json").write_bytes(content)

    with pytest.raises(AdapterRefused, match="is no JSON"):
        read_adapter(folder)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_missing_files_are_named(tmp_path: Path, name: str) -> None:
    """Both have to be there."""
    folder = write(tmp_path)
    (folder / name).unlink()

    with pytest.raises(AdapterRefused, match=f"holds no readable {name}"):
        read_adapter(folder)


def test_larger_files_than_there_is_room_for_are_refused(tmp_path: Path) -> None:
    """Before they are read."""
    folder = write(tmp_path)
    size = (folder / "adapter_model.safetensors").stat().st_size

    assert len(load_adapter(folder, size)[1]) == size
    with pytest.raises(AdapterRefused, match=f"has {size} bytes, and there is room for {size - 1}"):
        load_adapter(folder, size - 1)


def test_the_digest_is_of_both_files(tmp_path: Path) -> None:
    """It is the same wherever the files lie and however they are read, and another for any other byte."""
    folder = write(tmp_path / "a")
    digest = read_adapter(folder).digest
    other_alpha, other_weight = write(tmp_path / "c", lora_alpha=4), write(tmp_path / "d")
    tensors = pair(Q) | pair(K)
    tensors[f"base_model.model.{Q}.lora_B.weight"][0, 0] = 2
    save_file(tensors, other_weight / "adapter_model.safetensors")

    assert read_adapter(write(tmp_path / "b")).digest == digest == load_adapter(folder, 2**20)[0].digest
    assert len({digest, read_adapter(other_alpha).digest, read_adapter(other_weight).digest}) == 3


@pytest.mark.parametrize(
    ("name", "is_one"),
    [("tuned", True), ("me/tuned-1.0:b", True), ("", False), ("-x", False), ("a b", False), ("x" * 129, False)],
)
def test_names_are_those_of_models(name: str, *, is_one: bool) -> None:
    """Letters, digits and a few signs."""
    assert is_adapter_name(name) == is_one
