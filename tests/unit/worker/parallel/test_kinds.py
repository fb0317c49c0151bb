"""Models of every kind that a group serves, by real ranks: tokens are those of Hugging Face for the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, DiffLlamaConfig

from bench.model_support.tiny_configs import tiny_configs
from bench.model_support.trial import save_random
from services.worker.engine.model_loading import load_config
from services.worker.parallel.division import Share
from services.worker.parallel.loading import has_sinks, load_share
from services.worker.restore.refusals import HiddenStatesUnsupported
from shared.errors import UnsupportedModel
from shared.memory import unlink_all
from tests.checkpoints import _GATED, make_checkpoint, save_checkpoint
from tests.state_checkpoints import make_state_checkpoint
from tests.unit.worker.parallel.groups import SHM_PREFIX, group_of
from tests.unit.worker.parallel.test_group import check_host_prefix, check_tokens, segments
from tests.unit.worker.runners import runners_of


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Whatever a test ends with, its segments do not stay."""
    yield
    unlink_all(SHM_PREFIX)


def rewritten(path: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Path:
    """The checkpoint with every tensor changed, given its name."""
    for file in path.glob("*.safetensors"):
        tensors = {name: change(name, tensor) for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    return path


def with_strong_sinks(path: Path) -> Path:
    """Sinks that a head would notice the lack of, other for each head; and biases of experts that count."""

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name.endswith("sinks"):
            return torch.arange(len(tensor), dtype=tensor.dtype) + 1
        if name.endswith("down_proj_bias"):
            return torch.linspace(-1, 1, tensor.numel(), dtype=tensor.dtype).view_as(tensor)
        return tensor

    return rewritten(path, change)


def test_ranks_with_sinks_answer_as_one_does(tmp_path: Path) -> None:
    """Each has the sinks of its query heads; two share a KV head."""
    model = with_strong_sinks(make_checkpoint("gpt_oss", tmp_path / "model"))

    with group_of(model, 4) as group:
        check_tokens(group, model)

    assert not segments()


def with_uneven_norms(path: Path) -> Path:
    """Norms of queries and keys that are another in each head, so that a rank with another's part answers otherwise."""

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        is_norm = name.endswith(("q_norm.weight", "k_norm.weight"))
        return torch.linspace(0.2, 2.0, len(tensor), dtype=tensor.dtype) if is_norm else tensor

    return rewritten(path, change)


@pytest.mark.parametrize(("family", "ranks"), [("minimax_m2", 2), ("minimax_m2", 4), ("llama4", 2)])
def test_ranks_of_today_s_experts_answer_as_one_does(family: str, ranks: int, tmp_path: Path) -> None:
    """Norms over all heads are computed over those of all ranks, of which two share a KV head where there are four;
    experts whose weights are transposed are divided, too, in a model whose class names another one's base.
    """
    model = with_uneven_norms(make_checkpoint(family, tmp_path / "model"))

    with group_of(model, ranks) as group:
        check_tokens(group, model)
        check_host_prefix(group)

    assert not segments()


@pytest.mark.parametrize("is_by_columns", [False, True])
def test_experts_are_divided_by_rows_or_columns(tmp_path: Path, *, is_by_columns: bool) -> None:
    """Those of Qwen3-VL are published by columns and saved by rows; tokens are those of the whole model."""
    config = next(iter(tiny_configs("qwen3_vl_moe")))
    config.text_config.moe_intermediate_size = 48  # Not square, which would not tell rows from columns.
    model = save_random(config, tmp_path, seed=0)
    if is_by_columns:
        rewritten(model, lambda name, tensor: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor)

    with group_of(model, 2) as group:
        check_tokens(group, AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval())

    assert not segments()


def test_experts_whose_shape_tells_nothing_are_refused(tmp_path: Path) -> None:
    """Square ones may be stored by rows or by columns."""
    model = save_random(next(iter(tiny_configs("qwen3_vl_moe"))), tmp_path, seed=0)

    with pytest.raises(UnsupportedModel, match="does not tell its rows"):
        load_share(model, load_config(model), Share(0, 2), dtype="float32", device=torch.device("cpu"))


def test_keys_that_need_the_heads_of_all_ranks_are_not_restored(tmp_path: Path) -> None:
    """A rank projects K of its own heads from hidden states, without the others."""
    with group_of(make_checkpoint("minimax_m2", tmp_path / "model"), 2) as group:
        with pytest.raises(HiddenStatesUnsupported, match="norms over the heads of all ranks"):
            group.prove_projection(2**20)
        group.warm_up()


@pytest.mark.parametrize(
    ("make", "family", "ranks"),
    [
        (make_checkpoint, "mla", 4),
        (make_checkpoint, "indexed", 2),
        (make_checkpoint, "indexed", 4),
        (make_checkpoint, "gemma4_padded", 4),
        (make_state_checkpoint, "bamba", 4),
        (make_state_checkpoint, "falcon_h1", 2),
    ],
)
def test_ranks_whose_layers_are_not_alike_answer_as_one_does(
    make: Callable[..., Path], family: str, ranks: int, tmp_path: Path
) -> None:
    """Each keeps all latents, with their index keys, and carries all states, and has its heads of K and V; prefixes
    come from the device and from host memory. Two ranks serve more kinds in ``tests/integration/test_group_kinds.py``.
    """
    model = make(family, tmp_path / "model")

    with group_of(model, ranks) as group:
        assert not group.pool.planes.is_identity
        check_tokens(group, model)
        check_host_prefix(group)

    assert not segments()


def test_where_nobody_chose_a_page_is_as_large_as_with_one_rank(tmp_path: Path) -> None:
    """Chunks of a group are those of single workers."""
    model = make_state_checkpoint("qwen3_next", tmp_path / "model")

    with group_of(model, 2, page_size=0) as group, runners_of(lambda _: model, SHM_PREFIX) as load:
        single = load("", page_size=0, dtype="float32", tokens=512)
        assert group.geometry == single.geometry
        assert group.pool.planes == single.pool.planes


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


def test_a_group_does_not_divide_heads_for_attention_of_a_model_s_own(tmp_path: Path) -> None:
    """Code of its own may read numbers of heads anywhere. The reason against our attention is in the refusal."""
    model = save_checkpoint(DiffLlamaConfig(**{**_GATED, "num_key_value_heads": 4}), tmp_path / "model")

    with (
        pytest.raises(UnsupportedModel, match=r"diffllama attends by code of its own to K and V of heads.*: .*calls"),
        group_of(model, 2),
    ):
        pass


@pytest.mark.parametrize(("family", "expected"), [("gpt_oss", True), ("llama", False)])
def test_sinks_are_seen_before_weights_are_read(family: str, expected: bool, tmp_path: Path) -> None:
    """Kernels are proven with what they will compute."""
    config = AutoConfig.from_pretrained(make_checkpoint(family, tmp_path))

    assert has_sinks(config, Share(0, 2)) is expected


@pytest.mark.parametrize("kind", ["gpt_neox", "gptj", "stablelm", "opt"])
def test_ranks_whose_heads_follow_from_the_hidden_size_answer_as_one_does(kind: str, tmp_path: Path) -> None:
    """Heads of a rank are as wide as those of the whole model; two of these classes name no plan to divide them."""
    config = next(iter(tiny_configs(kind)))
    model = save_random(config, tmp_path / "model", seed=0)

    with group_of(model, 2) as group:
        check_tokens(group, model)

    assert not segments()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("deepseek_v4", "attends to compressed blocks of tokens, which no group divides"),
        ("falcon", "attends by code of its own to K and V of heads, which no group divides"),
        ("git", "attends by code of its own to K and V of heads, which no group divides"),
        ("gpt2", "GPT2LMHeadModel does not say how it divides among ranks"),
        ("bitnet", "BitNetForCausalLM does not say how it divides among ranks"),
        ("diffllama", "cannot be made as large as the share of a rank"),
    ],
)
def test_what_no_group_divides_is_refused_with_the_reason(kind: str, reason: str, tmp_path: Path) -> None:
    """Before any weight is looked for; BitNet has norms over all heads behind attention, which names do not tell."""
    config = next(iter(tiny_configs(kind)))
    config.save_pretrained(tmp_path)

    with pytest.raises(UnsupportedModel, match=reason):
        load_share(tmp_path, load_config(tmp_path), Share(0, 2), dtype="float32", device=torch.device("cpu"))


def test_projections_in_an_unknown_order_are_refused(tmp_path: Path) -> None:
    """CodeGen's queries, values and keys lie in groups of their own, which a rank's part would mix up."""
    model = save_random(next(iter(tiny_configs("codegen"))), tmp_path, seed=0)

    with pytest.raises(UnsupportedModel, match="qkv_proj has queries, keys and values in an order"):
        load_share(model, load_config(model), Share(0, 2), dtype="float32", device=torch.device("cpu"))
