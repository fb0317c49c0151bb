"""Weights for llama.cpp: names, order of rows, and the vocabulary. Writing them needs the gguf package."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bench.make_model import make_model
from bench.peers.gguf_layout import CONTROL, NORMAL, gguf_name, interleaved, merges, vocabulary


def test_every_tensor_of_a_llama_has_a_name() -> None:
    """And anything else is refused."""
    assert gguf_name("model.layers.11.self_attn.q_proj.weight") == "blk.11.attn_q.weight"
    assert gguf_name("model.layers.0.post_attention_layernorm.weight") == "blk.0.ffn_norm.weight"
    assert gguf_name("model.embed_tokens.weight") == "token_embd.weight"
    with pytest.raises(ValueError, match="q_norm"):
        gguf_name("model.layers.0.self_attn.q_norm.weight")


def test_rows_that_are_turned_together_become_neighbours() -> None:
    """Row i and row i + half of each head."""
    weight = torch.arange(8).reshape(8, 1)
    assert interleaved(weight, heads=2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_every_token_has_a_text_of_its_own() -> None:
    """Those of the tokenizer theirs, the others one that no merge makes."""
    tokenizer = {"model": {"vocab": {"a": 0, "b": 2}}, "added_tokens": [{"id": 1, "content": "<s>", "special": True}]}
    texts, kinds = vocabulary(tokenizer, 5)

    assert texts == ["a", "<s>", "b", "[3]", "[4]"]
    assert kinds == [NORMAL, CONTROL, NORMAL, NORMAL, NORMAL]


def test_merges_are_read_in_both_forms() -> None:
    """Pairs, or texts with a space."""
    assert merges({"model": {"merges": [["a", "b"], "c d"]}}) == ["a b", "c d"]


def test_llama_cpp_turns_the_same_pairs_by_the_same_angles() -> None:
    """Its rotary embedding of the rows in its order is Hugging Face's of the rows in theirs."""
    heads, dim, hidden = 3, 8, 16
    rng = torch.Generator().manual_seed(1)
    weight = torch.randn(heads * dim, hidden, generator=rng, dtype=torch.float64)
    state = torch.randn(hidden, generator=rng, dtype=torch.float64)
    angles = 7 * 10_000.0 ** (-torch.arange(dim // 2, dtype=torch.float64) / (dim // 2))
    cos, sin = angles.cos(), angles.sin()

    low, high = (weight @ state).reshape(heads, 2, dim // 2).unbind(1)
    theirs = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=1)
    even, odd = (interleaved(weight, heads) @ state).reshape(heads, dim // 2, 2).unbind(2)
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=2).reshape(heads * dim)
    assert torch.allclose(interleaved(theirs.reshape(-1, 1), heads).flatten(), turned)


def test_a_written_file_holds_the_same_bits(tmp_path: Path) -> None:
    """Matrices stay bfloat16, and the shape is the model's."""
    gguf = pytest.importorskip("gguf")
    from bench.peers.gguf_weights import write_gguf

    model = make_model(tmp_path / "model", vocab_size=2600, layers=1, heads=2, kv_heads=1)
    reader = gguf.GGUFReader(write_gguf(model, tmp_path / "weights.gguf"))

    assert (gguf.TokenType.NORMAL, gguf.TokenType.CONTROL) == (NORMAL, CONTROL)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    expected = load_file(model / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    written = torch.from_numpy(tensors["blk.0.ffn_up.weight"].data.copy()).view(torch.bfloat16)
    assert torch.equal(written.reshape(expected.shape), expected)
    assert tensors["blk.0.ffn_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32
    assert len(reader.fields["tokenizer.ggml.tokens"].data) == 2600
    assert json.loads((model / "config.json").read_text())["vocab_size"] == 2600
