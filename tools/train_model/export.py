"""Write a model as a Hugging Face Llama folder: bfloat16 weights, configuration and tokenizer."""

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save

from tools.train_model.model import LanguageModel, ModelConfig
from tools.train_model.tokenizer import BEGIN, END, PAD, save_tokenizer


def llama_config(config: ModelConfig, special_ids: dict[str, int]) -> dict[str, Any]:
    """The ``config.json`` of a model of these sizes."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocabulary,
        "hidden_size": config.hidden,
        "intermediate_size": config.feed_forward,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "max_position_embeddings": config.context_tokens,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        **special_ids,
    }


def export_model(model: LanguageModel, tokenizer: tokenizers.Tokenizer, folder: Path) -> None:
    """Write everything that ``AutoModelForCausalLM`` and ``AutoTokenizer`` need to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = tokenizer.get_vocab()
    special_ids = {
        name: vocabulary[token]
        for name, token in (("bos_token_id", BEGIN), ("eos_token_id", END), ("pad_token_id", PAD))
    }
    weights = {
        name: weight.detach().to("cpu", torch.bfloat16).contiguous() for name, weight in model.state_dict().items()
    }
    (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    config = llama_config(model.config, special_ids)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    generation = {**special_ids, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    save_tokenizer(tokenizer, folder, model.config.context_tokens)
