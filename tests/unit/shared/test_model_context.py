"""The longest context of a model, as its configuration has it."""

from __future__ import annotations

from typing import Any

import pytest

from shared.model_context import named_in


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
    ],
    ids=str,
)
def test_the_context_is_what_the_configuration_names(config: dict[str, Any], tokens: int) -> None:
    """Less the positions before a prompt's first token; 0 where there is none."""
    assert named_in(config) == tokens
