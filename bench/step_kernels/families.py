"""Steps of every model type that is served, by the tiny models that its support was found with."""

from __future__ import annotations

import json
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.model_support.tiny_configs import tiny_configs
from bench.results_file import RESULTS
from bench.step_kernels.counting import counting
from bench.step_kernels.steps import StepCounts, count_steps, runner_of
from services.worker.engine.attention import ATTENTION_NAME
from services.worker.engine.text_parts import text_part


def served_types() -> list[str]:
    """Those of the committed sweep that attend through the interface: others take as many passes as requests."""
    document = json.loads((RESULTS / "model_support.json").read_text(encoding="utf-8"))
    types: dict[str, Any] = document["results"]["types"]
    return sorted(
        name
        for name, row in types.items()
        if row["outcome"] == "served" and not row.get("reason", "").startswith("attends by code of its own")
    )


def count_type(model_type: str) -> dict[str, StepCounts]:
    """Steps of the smallest model of ``model_type`` that the library can run, in bfloat16.

    Raises UnsupportedModel for a type whose steps are not counted.
    """
    fault: Exception | None = None
    for config in tiny_configs(model_type):
        try:
            model = AutoModelForCausalLM.from_config(
                text_part(config), dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME
            )
            with counting() as counter:
                return count_steps(counter, runner_of(model))
        except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError) as error:
            fault = error  # The library's own fault with this size; another may do.
    raise ValueError(f"no tiny model of {model_type} can be counted") from fault
