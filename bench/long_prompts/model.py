"""A model whose compute is negligible, with a context of 262,144 tokens and a real tokenizer, and texts for it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from bench.structured_output import ROOT, train_tokenizer

CONTEXT = 262_144
VOCABULARY = 16_384
TITLE = "Llama, 2 layers, hidden 128, random weights, bfloat16"
SPECIAL = ("<pad>", "<s>", "</s>", "<|start|>", "<|end|>")
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
_SAMPLE_LINES = 4_000


def make_model(out: Path, *, seed: int, vocab_size: int = VOCABULARY) -> Path:
    """A Hugging Face folder that a cell and vLLM can serve; byte-level BPE trained on this repository's text."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(out)
    save_tokenizer(out, vocab_size)
    return out


def save_tokenizer(out: Path, vocab_size: int = VOCABULARY) -> None:
    """The model's tokenizer and chat template alone."""
    trained = train_tokenizer(vocab_size, SPECIAL)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained, model_max_length=CONTEXT)
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(out)
    # The generic class by the name that every version of transformers knows.
    named = json.loads((out / "tokenizer_config.json").read_text(encoding="utf-8"))
    named |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (out / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")


class Texts:
    """Text of about so many tokens: lines of this repository in an order of its own each time."""

    def __init__(self, model: Path, seed: int) -> None:
        self._rng = random.Random(seed)
        self._lines = _lines()
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(model), local_files_only=True)
        sample = "\n".join(self._rng.choices(self._lines, k=_SAMPLE_LINES))
        self._characters_a_token = len(sample) / len(tokenizer(sample)["input_ids"])

    def text(self, tokens: int) -> str:
        """Begins with a number of its own, so that no two share a prefix."""
        parts, left = [f"{self._rng.getrandbits(64):x}"], tokens * self._characters_a_token
        while left > 0:
            parts.append(self._rng.choice(self._lines)[: max(1, int(left))])
            left -= len(parts[-1]) + 1
        return "\n".join(parts)


def _lines() -> Sequence[str]:
    files = sorted(file for kind in ("md", "py") for file in ROOT.rglob(f"[!.]*.{kind}") if ".venv" not in file.parts)
    found = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return [line for line in found if line.strip()]
