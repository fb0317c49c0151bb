"""The longest context of a model, as its configuration has it."""

from __future__ import annotations

from typing import Any

import pytest

from shared.model_context import named_in

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"max_position_embeddings": 4096, "seq_length": 8}, 4096),
        ({"max_seq_len": 2048}, 2048),
        ({"seq_length": 2048, "max_position_embeddings": None}, 2048),
        ({"model_type": "llama"}, 0),
        ({"max_position_embeddings": "many", "n_positions": -1}, 0),
        ({"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1}, 512),
        ({"model_type": "xlm-roberta", "max_position_embeddings": 514}, 512),
        ({"model_type": "camembert", "max_position_embeddings": 514, "pad_token_id": 0}, 513),
        ({"model_type": "bert", "max_position_embeddings": 512, "pad_token_id": 0}, 512),
        ({"max_position_embeddings": 128, "rope_scaling": YARN}, 512),
        ({"max_position_embeddings": 160, "rope_parameters": {"rope_type": "yarn", **YARN}}, 512),
        ({"max_position_embeddings": 1024, "rope_scaling": YARN}, 1024),
        ({"max_position_embeddings": 128, "rope_scaling": {"type": "yarn", "factor": 2.5}}, 320),
        ({"max_position_embeddings": 64, "original_max_position_embeddings": 32, "rope_scaling": YARN}, 128),
        ({"max_position_embeddings": 128, "rope_parameters": {"full_attention": YARN, "sliding_attention": None}}, 512),
        ({"max_position_embeddings": 128, "rope_scaling": YARN | {"type": "linear"}}, 128),
        ({"max_position_embeddings": 128, "rope_scaling": YARN | {"factor": None}}, 128),
        ({"max_position_embeddings": 128, "rope_scaling": "yarn"}, 128),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 0),
    ],
    ids=str,
)
def test_the_context_is_what_the_configuration_names(config: dict[str, Any], tokens: int) -> None:
    """Less the positions before a prompt's first token, and with YaRN what it extends to; 0 where there is none."""
    assert named_in(config) == tokens
