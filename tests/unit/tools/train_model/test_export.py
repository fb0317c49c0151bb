"""An exported model is the trained model: Hugging Face computes the same logits."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.train_model.checkpoint import load_exported, read_config
from tools.train_model.export import export_model
from tools.train_model.init import build_model
from tools.train_model.model import ModelConfig
from tools.train_model.tokenizer import PieceEncoder


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_exported_logits_equal_the_trainers(encoder: PieceEncoder, tmp_path: Path, kv_heads: int) -> None:
    """A tiny model, exported and loaded by transformers, gives the trainer's logits."""
    tokenizer = encoder.tokenizer
    config = ModelConfig(
        vocabulary=tokenizer.get_vocab_size(), hidden=64, layers=2, heads=4, kv_heads=kv_heads,
        head_size=16, feed_forward=96,
    )  # fmt: skip
    export_model(build_model(config, tokenizer.get_vocab(), 0), tokenizer, tmp_path)
    ids = torch.randint(6, 2000, (2, 70), generator=torch.Generator().manual_seed(1))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours = load_exported(tmp_path, kv_heads)

    assert read_config(tmp_path) == config
    torch.testing.assert_close(loaded(ids).logits, ours(ids), atol=1e-4, rtol=1e-4)


def test_the_chat_template_is_the_trainers_format(encoder: PieceEncoder, tmp_path: Path) -> None:
    """The exported tokenizer renders a conversation as the training rows are written."""
    tokenizer = encoder.tokenizer
    config = ModelConfig(vocabulary=tokenizer.get_vocab_size(), hidden=64, layers=1, heads=2,
                         kv_heads=2, feed_forward=32)  # fmt: skip
    export_model(build_model(config, tokenizer.get_vocab(), 0), tokenizer, tmp_path)
    messages = [
        {"role": "system", "content": "The sky is blue."},
        {"role": "user", "content": "What is it?"},
    ]
    loaded = AutoTokenizer.from_pretrained(tmp_path)

    assert loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<s><|system|>The sky is blue.<|end|><|user|>What is it?<|end|><|assistant|>"
    )
    assert loaded.encode("The sky") == tokenizer.encode("The sky").ids
