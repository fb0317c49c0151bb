"""The host's part of a step is measured on the worker's own executor, over every request in every step."""

from __future__ import annotations

import pytest
import torch

from bench import step_host
from services.worker.engine.forward_meta import ForwardMeta


def test_steps_are_cut_where_the_device_begins_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both parts take time; tables of the next step are made in the second, which begins with the launch."""
    monkeypatch.setattr(step_host, "STEPS", 6)
    monkeypatch.setattr(step_host, "WARM_UP", 2)
    made: list[tuple[int, int]] = []  # Launches and reads of steps before tables of a step are made, in ordinary order.
    models: list[step_host.NoModel] = []  # Of the orders that have begun; the ordinary one is the first.
    decode, build = step_host._decode, ForwardMeta.build

    def decoding(model: step_host.NoModel, requests: int) -> None:
        models.append(model)
        decode(model, requests)

    def building(*arguments: object) -> ForwardMeta:
        if len(models) == 1:
            made.append((len(models[0].launched_ns), len(models[0].asked_ns)))
        return build(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(step_host, "_decode", decoding)
    monkeypatch.setattr(ForwardMeta, "build", building)

    found = step_host.measure(2)

    assert found["requests"] == 2
    assert found["before_us"] > 0 < found["beside_us"]
    assert found["ahead_us"] > 0
    assert made[-5:] == [(step + 1, step) for step in range(1, 6)]


def test_the_model_says_one_token_to_everybody() -> None:
    """It computes nothing, and answers as many rows as it is asked."""
    model = step_host.NoModel(3)
    nothing = torch.empty(0, dtype=torch.int64)

    class Chunk:
        segments, rows = (None,), 8

    logits = model.forward(nothing, nothing, Chunk(), torch.arange(2))  # type: ignore[arg-type]

    assert logits.argmax(dim=1).tolist() == [40, 40]
    assert model.launched_ns == []
