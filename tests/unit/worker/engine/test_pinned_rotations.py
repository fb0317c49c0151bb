"""RoPE whose angles could depend on the batch answers as the library does, and does not depend on the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from services.worker.engine.model_loading import load_config, load_model
from services.worker.engine.pinned_rotations import pin_rotations
from services.worker.restore.projection import KvProjection
from shared.errors import UnsupportedModel
from tests.checkpoints import save_checkpoint
from tests.unit.worker.engine.answers import generated, paged
from tests.unit.worker.engine.test_model_loading import SMALL, load

HALF_HEAD = 8
CONTEXT = 256
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + number / 4 for number in range(HALF_HEAD)],
    "long_factor": [2.0 + number for number in range(HALF_HEAD)],
}


def rope_checkpoint(path: Path, rope: dict[str, Any]) -> Path:
    """A Llama that the fused forward can compute, with such rotary embeddings."""
    config = LlamaConfig(
        **{
            **SMALL,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "max_position_embeddings": CONTEXT,
        },
        initializer_range=0.2,
        rope_parameters={"rope_theta": 1e4, **rope},
    )
    return save_checkpoint(config, path)


@pytest.mark.parametrize("forward", ["auto", "portable"])
@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({"rope_type": "proportional", "partial_rotary_factor": 0.5}, 0),
        ({"rope_type": "dynamic", "factor": 4.0}, 0),
        ({**LONGROPE, "original_max_position_embeddings": 32}, 0),
        ({**LONGROPE, "original_max_position_embeddings": 64}, 64),
        ({**LONGROPE, "original_max_position_embeddings": CONTEXT}, 0),
    ],
    ids=["proportional", "dynamic", "longrope long", "longrope short by the bound", "longrope short by itself"],
)
def test_answers_are_the_librarys(rope: dict[str, Any], context: int, forward: str, tmp_path: Path) -> None:
    """In chunks and whole, by the fused forward where it can be had and without it."""
    path = rope_checkpoint(tmp_path, rope)

    assert paged(path, context=context, forward=forward) == generated(path)


@pytest.mark.parametrize("bound", [0, 64])
def test_longrope_is_chosen_by_the_context(bound: int, tmp_path: Path) -> None:
    """Angles are those of the long factors, or of the short ones under a bound, however short the batch is."""
    path = rope_checkpoint(tmp_path, {**LONGROPE, "original_max_position_embeddings": 64})
    config = load_config(path)
    model = load_model(path, config, dtype="float32", device="cpu", context=bound)
    plain = type(model)(config).model.rotary_emb
    positions = torch.arange(5)[None]

    found = model.model.rotary_emb(torch.empty(0), positions)

    far = torch.tensor([[63 if bound else CONTEXT - 1]])
    expected = plain(torch.empty(0), torch.cat([positions, far], dim=1))
    assert all(torch.equal(mine, theirs[:, :5]) for mine, theirs in zip(found, expected, strict=True))


def test_hidden_states_restore_the_same_kv(tmp_path: Path) -> None:
    """Projection from hidden states asks the same rotary embedding, and is proven where it is pinned."""
    runner = load(rope_checkpoint(tmp_path, {**LONGROPE, "original_max_position_embeddings": 64}))

    projection = KvProjection(runner)

    one, other = (projection.position_embeddings(torch.tensor(positions)) for positions in ([3, 4], [3, CONTEXT - 1]))
    assert one is not None
    assert other is not None
    assert all(torch.equal(mine[:, 0], theirs[:, 0]) for mine, theirs in zip(one, other, strict=True))
    runner.close()


def test_rope_that_is_left_to_the_batch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where pinning misses a rotary embedding, the probe sees that KV depends on the rest of the batch."""
    path = rope_checkpoint(tmp_path, {**LONGROPE, "original_max_position_embeddings": 64})
    monkeypatch.setattr("services.worker.engine.model_loading.pin_rotations", lambda model, context: None)

    with pytest.raises(UnsupportedModel, match="KV of llama depends on the longest position of the batch"):
        load(path)


def test_other_rotary_embeddings_are_left_alone(tmp_path: Path) -> None:
    """Only types that look at the batch are touched."""
    path = rope_checkpoint(tmp_path, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64})
    model = load_model(path, load_config(path), dtype="float32", device="cpu")

    pin_rotations(model, 32)

    assert "forward" not in vars(model.model.rotary_emb)
