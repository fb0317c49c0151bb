"""How llama.cpp names and orders what a Llama checkpoint holds. Pure.

Prompts are sent as token ids, so how llama.cpp would tokenise a text does not matter. Ids that the tokenizer lacks get
a text each, because a server whose token has no text sends nothing that a client could time.
"""

from __future__ import annotations

import re
from typing import Any

import torch

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
"""Types of a token in a GGUF file."""

_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")


def gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor. Raises ValueError for one that a Llama without biases does not have."""
    if name in _TOP:
        return _TOP[name]
    matched = _LAYER.fullmatch(name)
    if matched is None or matched[2] not in _BLOCK:
        raise ValueError(f"{name} is no tensor of a Llama without biases")
    return f"blk.{matched[1]}.{_BLOCK[matched[2]]}.weight"


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of Q or K, [heads * dim, hidden], in the order of llama.cpp.

    Its rotary embedding turns neighbouring rows together, Hugging Face's a row and the one half a head further on.
    """
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns)


def vocabulary(tokenizer: dict[str, Any], size: int) -> tuple[list[str], list[int]]:
    """Text and type of each of ``size`` tokens, from a ``tokenizer.json``."""
    texts = [f"[{number}]" for number in range(size)]
    kinds = [NORMAL] * size
    for text, number in tokenizer["model"]["vocab"].items():
        texts[number] = text
    for added in tokenizer["added_tokens"]:
        texts[added["id"]] = added["content"]
        kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    return texts, kinds


def merges(tokenizer: dict[str, Any]) -> list[str]:
    """As two parts with a space between, whichever way the file has them."""
    return [each if isinstance(each, str) else " ".join(each) for each in tokenizer["model"]["merges"]]
