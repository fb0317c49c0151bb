"""The part that compares backends measures both where FlashInfer is there, and says why where it is not."""

from __future__ import annotations

import sys

import pytest
import torch

from bench.gpu.attention import backends_headline
from bench.gpu.attention_backends import Figures, measure_backends
from bench.gpu.attention_peers import Heads, Problem
from bench.gpu.decode import PlayedCapture
from tests.cuda import flashinfer_stand_in
from tests.cuda.flashinfer_stand_in import Machine
from tests.unit.worker.kernels import oracles


def _found() -> dict[str, Figures]:
    problem = Problem(Heads("tiny", 4, 2, 64), 3, 39, 1, 16, torch.bfloat16, torch.device("cpu"))
    return measure_backends(problem, PlayedCapture(), 1, kernels=oracles.__name__)


@pytest.mark.parametrize("is_wrong", [False, True])
def test_both_are_measured_and_compared(monkeypatch: pytest.MonkeyPatch, *, is_wrong: bool) -> None:
    """By results of the same pages before their time counts."""
    machine = Machine()
    module = flashinfer_stand_in.module(machine)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    if is_wrong:
        monkeypatch.setattr(flashinfer_stand_in, "_attend", lambda plan, q, key, value, out, sums: out.fill_(9.0))

    found = _found()

    if is_wrong:
        assert found["flashinfer"]["error"].startswith("ValueError: its attention is not ours: off by")
    else:
        assert found["flashinfer"].keys() == {"graph_us", "gb_s", "plan_us", "deviation"}
    assert found["triton"].keys() == {"graph_us", "gb_s"}
    (line,) = backends_headline([{"requests": 3, "context": 40, **found}])
    assert (line[1] is None) == is_wrong


def test_what_is_not_installed_is_said() -> None:
    """In the table, in the place of a figure."""
    (line,) = backends_headline([{"requests": 3, "context": 40, **_found()}])

    assert line[1:] == (None, "the package flashinfer-python is not installed")
