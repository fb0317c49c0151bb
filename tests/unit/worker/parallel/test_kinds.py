"""Models of every kind that a group serves, by real ranks: tokens are those of Hugging Face for the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from services.worker.engine.model_runner import ModelRunner
from services.worker.parallel.division import Share
from services.worker.parallel.loading import has_sinks, load_share
from shared.memory import unlink_all
from tests.checkpoints import make_checkpoint
from tests.state_checkpoints import make_state_checkpoint
from tests.unit.worker.parallel.groups import SHM_PREFIX, group_of
from tests.unit.worker.parallel.test_group import check_host_prefix, check_tokens, segments

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Whatever a test ends with, its segments do not stay."""
    yield
    unlink_all(SHM_PREFIX)


def with_strong_sinks(path: Path) -> Path:
    """Sinks that a head would notice the lack of, other for each head; and biases of experts that count."""
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if name.endswith("sinks"):
                tensors[name] = torch.arange(len(tensor), dtype=tensor.dtype) + 1
            elif name.endswith("down_proj_bias"):
                tensors[name] = torch.linspace(-1, 1, tensor.numel(), dtype=tensor.dtype).view_as(tensor)
        save_file(tensors, file, metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_with_sinks_answer_as_one_does(ranks: int, tmp_path: Path) -> None:
    """Each has the sinks of its query heads; with four ranks, two share a KV head."""
    model = with_strong_sinks(make_checkpoint("gpt_oss", tmp_path / "model"))

    with group_of(model, ranks) as group:
        check_tokens(group, model)

    assert not segments()


@pytest.mark.parametrize(("family", "ranks"), [("mla", 4), ("gemma4", 2), ("gemma4_padded", 4), ("mimo", 2)])
def test_ranks_whose_layers_are_not_alike_answer_as_one_does(family: str, ranks: int, tmp_path: Path) -> None:
    """Each keeps all latents, and of K and V its heads; prefixes come from the device and from host memory."""
    model = make_checkpoint(family, tmp_path / "model")

    with group_of(model, ranks) as group:
        assert not group.pool.planes.is_identity
        check_tokens(group, model)
        check_host_prefix(group)

    assert not segments()


@pytest.mark.parametrize(("family", "ranks"), [("qwen3_next", 2), ("bamba", 4), ("lfm2", 2), ("falcon_h1", 2)])
def test_ranks_whose_layers_carry_states_answer_as_one_does(family: str, ranks: int, tmp_path: Path) -> None:
    """Each carries all states, and attends with its heads."""
    model = make_state_checkpoint(family, tmp_path / "model")

    with group_of(model, ranks) as group:
        check_tokens(group, model)
        check_host_prefix(group)

    assert not segments()


def test_where_nobody_chose_a_page_is_as_large_as_with_one_rank(tmp_path: Path) -> None:
    """Chunks of a group are those of single workers."""
    model = make_state_checkpoint("qwen3_next", tmp_path / "model")

    with group_of(model, 2, page_size=0) as group:
        single = ModelRunner.load(
            model,
            dtype="float32",
            device="cpu",
            page_size=0,
            device_kv_bytes=None,
            pages=32,
            threads=1,
            shm_prefix=SHM_PREFIX,
        )
        assert group.geometry == single.geometry
        assert group.pool.planes == single.pool.planes
        single.close()


def test_each_rank_has_the_sinks_of_its_heads(tmp_path: Path) -> None:
    """And one alone has what is added to a sum over ranks, such as biases of experts."""
    path = with_strong_sinks(make_checkpoint("gpt_oss", tmp_path))
    config = AutoConfig.from_pretrained(path)

    shares = [load_share(path, config, Share(rank, 2), dtype="float32", device=torch.device("cpu")) for rank in (0, 1)]

    sinks = [share.model.layers[1].self_attn.sinks.tolist() for share in shares]
    biases = [share.model.layers[1].mlp.experts.down_proj_bias for share in shares]
    assert sinks == [[1.0, 2.0], [3.0, 4.0]]
    assert biases[0].any()
    assert not biases[1].any()


@pytest.mark.parametrize(("family", "expected"), [("gpt_oss", True), ("llama", False)])
def test_sinks_are_seen_before_weights_are_read(family: str, expected: bool, tmp_path: Path) -> None:
    """Kernels are proven with what they will compute."""
    config = AutoConfig.from_pretrained(make_checkpoint(family, tmp_path))

    assert has_sinks(config, Share(0, 2)) is expected
