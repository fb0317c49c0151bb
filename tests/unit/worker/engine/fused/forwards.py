"""What tests of both fused forwards do with a runner: prompts in chunks, hooks, and attention that is watched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.engine.model_loading import load_config, load_model
from services.worker.engine.model_runner import ModelRunner
from tests.engine_driver import page_tables, random_prompt

FAMILIES = ("llama", "llama3", "mistral", "qwen2", "qwen3")


def layers_of(runner: ModelRunner) -> Any:
    """Of a model of the Llama family."""
    return runner.model.model.layers


def give_biases(directory: Path) -> None:
    """Random ones: a new checkpoint's are zero."""
    model = load_model(directory, load_config(directory), dtype="float32", device="cpu")
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    model.save_pretrained(directory)


def logits_of(runner: ModelRunner, prompt: list[int], chunks: list[int]) -> torch.Tensor:
    """Of every row of the prompt, computed in these chunks over shuffled pages."""
    (table,) = page_tables(runner, [len(prompt)], seed=1)
    rows, start = [], 0
    for chunk in chunks:
        meta = ForwardMeta.build([Segment(chunk, start, table)], runner.geometry.page_size, "cpu")
        ids, positions = torch.tensor(prompt[start : start + chunk]), torch.arange(start, start + chunk)
        rows.append(runner.forward(ids, positions, meta, torch.arange(chunk)))
        start += chunk
    return torch.cat(rows)


def hooked_states(runner: ModelRunner) -> list[torch.Tensor]:
    """Hidden states that hooks on attention see, by layer; their presence changes no bit of a step."""
    prompt, kept = random_prompt(33, seed=9), list[torch.Tensor]()
    expected = logits_of(runner, prompt, [33])

    def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        kept.append(kwargs["hidden_states"][0].clone())
        assert {"position_embeddings", "attention_mask"} <= set(kwargs)

    handles = [layer.self_attn.register_forward_pre_hook(hook, with_kwargs=True) for layer in layers_of(runner)]
    assert torch.equal(logits_of(runner, prompt, [33]), expected)
    for handle in handles:
        handle.remove()
    return kept


class Watched:
    """Attention of a paged step, whose calls are noted."""

    def __init__(self, runner: ModelRunner, meta: ForwardMeta) -> None:
        self.calls: list[Any] = []
        self._inner = runner.paged_step(meta)

    def attend(self, call: Any) -> torch.Tensor:
        """Note the call, and attend."""
        self.calls.append(call)
        return self._inner.attend(call)

    def assert_kept(self, pool: torch.Tensor, slots: torch.Tensor) -> None:
        """There was a call for each layer, whose keys and values are in ``slots`` of the pool."""
        assert [call.layer for call in self.calls] == list(range(len(pool)))
        for call, halves in zip(self.calls, pool, strict=True):
            for new, half in zip((call.key, call.value), halves, strict=True):
                assert torch.equal(new[0].transpose(0, 1), half.flatten(0, 1)[slots])
