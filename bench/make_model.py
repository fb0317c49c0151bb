"""Make the ~100M-parameter Llama that speed is measured on: random weights, bfloat16 on disk, the bundled tokenizer.

``python -m bench.make_model OUT`` writes a Hugging Face directory. Speed does not depend on what the weights say.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

TOKENIZER = Path(__file__).parent.parent / "models" / "thermocline-mha"


def save_llama(
    out: Path,
    *,
    seed: int = 0,
    vocab_size: int = 16_384,
    dtype: str = "bfloat16",
    kv_heads: int = 4,
    layers: int = 12,
    heads: int = 12,
) -> Path:
    """12 layers, 12 query heads of 64, hidden 768; no tokenizer. With 4 KV heads and a vocabulary of 16,384 it has 88M
    parameters; with 12 KV heads (multi-head attention) 97M.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64 * heads,
        intermediate_size=64 * heads * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=16_384,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(out)
    return out


def make_model(out: Path, *, seed: int = 0, **shape: Any) -> Path:
    """The model that a cell can serve: the weights of :func:`save_llama`, which takes ``shape``, and a tokenizer."""
    save_llama(out, seed=seed, **shape)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, out / name)
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(make_model(options.out, seed=options.seed))
