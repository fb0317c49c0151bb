"""The bundled checkpoints answer questions about documents that training never saw."""

from pathlib import Path

import pytest

from tools.train_model.checkpoint import read_config
from tools.train_model.evaluate import Answerer, score

MODELS = Path(__file__).parents[4] / "models"
VARIANTS = ("thermocline-mha", "thermocline-gqa")


@pytest.mark.parametrize("name", VARIANTS)
def test_a_bundled_model_answers_from_its_document(name: str) -> None:
    """At least ten of twelve questions on 256-token held-out documents are answered exactly."""
    answerer = Answerer.load(MODELS / name)

    assert score(answerer, 256, 12, seed=5).correct >= 10


def test_the_variants_differ_in_key_value_heads() -> None:
    """MHA has a key/value head for each query head, GQA fewer; both reach 4,096 positions."""
    mha, gqa = (read_config(MODELS / name) for name in VARIANTS)

    assert mha.kv_heads == mha.heads
    assert gqa.kv_heads < gqa.heads
    assert min(mha.context_tokens, gqa.context_tokens) >= 4096


def test_the_bundle_is_small() -> None:
    """Both models together stay under 16 MB."""
    assert sum(f.stat().st_size for f in MODELS.rglob("*") if f.is_file()) <= 16_000_000
