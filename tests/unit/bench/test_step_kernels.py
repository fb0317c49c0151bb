"""No step launches more kernels than its budget, and what is captured neither reads the device nor is sent anything."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers

from bench.results_file import RESULTS
from bench.step_kernels.counting import HostRead, counting
from bench.step_kernels.families import count_type, served_types
from bench.step_kernels.steps import count_around
from shared.errors import UnsupportedModel

NOT_CAPTURED = {"jetmoe", "phimoe", "xmod"}
"""Their own code reads the device in every step (sizes of experts, rows of a language), or sends it frequencies."""


@cache
def _results() -> dict[str, Any]:
    document = json.loads((RESULTS / "step_kernels.json").read_text(encoding="utf-8"))
    results: dict[str, Any] = document["results"]
    return results


IS_COUNTED = transformers.__version__ == _results()["transformers"]
"""Whether this library's modules are those that were counted: those of other versions launch otherwise."""
FUSED = ("llama", "mistral", "qwen2", "qwen3")
"""Types whose kernels are our own, whatever the library's version."""


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> None:
    transformers.logging.set_verbosity_error()


def _types_to_count() -> list[str]:
    """One type of each budget, those of our own kernels, and all without a budget; the sweep counts every type."""
    alike: dict[str, str] = {}
    for model_type in served_types():
        budget = _results()["types"].get(model_type)
        alike.setdefault(
            json.dumps(budget, sort_keys=True) if budget and model_type not in FUSED else model_type, model_type
        )
    return sorted(alike.values())


@pytest.mark.parametrize("model_type", _types_to_count() if IS_COUNTED else FUSED)
def test_steps_are_within_their_budgets(model_type: str) -> None:
    """A prefill chunk, a decode step, both together, and a captured step of every model type that is served; types
    without a budget are not counted.
    """
    budget = _results()["types"].get(model_type)
    if budget is None:
        with pytest.raises(UnsupportedModel):
            count_type(model_type)
        return

    counts = count_type(model_type)

    assert set(counts) == set(budget)
    for kind, step in counts.items():
        assert step.kernels <= budget[kind]["kernels"], kind
        assert step.uploads <= budget[kind]["uploads"], kind
        assert step.read == budget[kind]["read"], kind
    assert counts["captured"].can_be_captured == (model_type not in NOT_CAPTURED)


def test_reads_of_the_device_are_found() -> None:
    """Whatever they are made by: none of these can be in a captured step."""
    with counting():
        numbers = torch.zeros(4, device="cuda")
        reads: list[Callable[[], object]] = [
            numbers.tolist, numbers[0].item, numbers.cpu, numbers.nonzero, lambda: numbers[numbers > 0],
            lambda: bool(numbers.any()), lambda: torch.equal(numbers, numbers), lambda: numbers.to("cpu"),
            lambda: torch.zeros(4).copy_(numbers),
        ]  # fmt: skip

        for read in reads:
            with pytest.raises(HostRead):
                read()


def test_kernels_and_uploads_are_told_apart() -> None:
    """Views launch nothing, arithmetic one kernel each, a composite one for each part; host memory is uploaded."""
    with counting() as counter:
        numbers = torch.zeros(4, 4, device="cuda")
        numbers.view(2, 2, 4).transpose(1, 2)[None, :, 1:].expand(3, 2, 3, 2)
        assert dict(counter.counted.kernels) == {"aten::zeros": 1}
        torch.nn.functional.linear(numbers + 1, numbers)
        numbers[:2].copy_(torch.ones(2, 4))
        torch.tensor([1, 2]).to("cuda")
        torch.ones(3) * 2

    assert dict(counter.counted.kernels) == {"aten::zeros": 1, "aten::add": 1, "aten::mm": 1}
    assert counter.counted.uploads.total() == 2


def test_what_is_launched_around_a_graph_ends_with_one_read() -> None:
    """Copies of a step's inputs, one upload of them, and the choice of greedy tokens; however many requests."""
    with counting() as counter:
        alone, many = (count_around(counter, rows, 300) for rows in (1, 64))

    assert alone == many
    assert many.read
    assert many.uploads == 1
    assert 5 < many.kernels < 20


def test_a_triton_kernel_is_given_no_memory_of_the_host() -> None:
    """It would be launched with an address that the GPU cannot read."""
    from services.worker.kernels import kv_write

    with counting() as counter:
        rows, pool = torch.zeros(2, 1, 16, device="cuda"), torch.zeros(4, 16, 1, 16, device="cuda")
        kv_write(rows, rows, pool, pool, torch.zeros(2, dtype=torch.int64, device="cuda"))
        assert counter.counted.kernels["kv_write_kernel"] == 1
        with pytest.raises(AssertionError, match="memory of the host"):
            kv_write(rows, rows, pool, pool, torch.zeros(2, dtype=torch.int64))
