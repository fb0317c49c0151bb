"""Numbers of a step go to the device in one copy, whatever they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bench.step_kernels.counting import Counted, HostRead, counting
from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.engine.sampler import SampleRow, sample
from services.worker.engine.static_batch import StaticBatch
from services.worker.engine.uploads import on_device, upload
from shared.messages.requests import SamplingParams

ARRAYS: list[np.ndarray] = [
    np.arange(3),
    np.arange(6, dtype=np.int32).reshape(2, 3),
    np.zeros(0, np.int64),
    np.ones(5, np.int32),
]


def test_all_arrays_go_in_one_copy_and_lie_aligned() -> None:
    """Kernels are compiled for addresses that are multiples of 16 bytes."""
    with counting() as counter:
        sent = upload(ARRAYS, torch.device("cuda"))

    assert counter.counted.uploads.total() == 1
    assert counter.counted.total == 0
    assert [(each.shape, each.dtype) for each in sent] == [
        ((3,), torch.int64), ((2, 3), torch.int32), ((0,), torch.int64), ((5,), torch.int32),
    ]  # fmt: skip
    assert [each.storage_offset() * each.element_size() % 16 for each in sent] == [0] * 4


def test_numbers_arrive_as_they_were() -> None:
    """Through the staged block, too: on ``meta`` nothing could be looked at, so the copy is made to a CPU here."""
    staged: list[torch.Tensor] = []

    class Device:
        type = "elsewhere"

    copy = torch.Tensor.to
    try:
        torch.Tensor.to = lambda tensor, device, non_blocking: staged.append(tensor) or tensor  # type: ignore[method-assign, assignment, func-returns-value]
        sent = upload(ARRAYS, Device())  # type: ignore[arg-type]
    finally:
        torch.Tensor.to = copy  # type: ignore[method-assign]

    assert len(staged) == 1
    for array, tensor in zip(ARRAYS, sent, strict=True):
        assert np.array_equal(tensor.numpy(), array)


def test_what_is_on_the_device_stays_there() -> None:
    """Steps that are captured have everything there, and nothing is sent in them."""
    with counting() as counter:
        there = torch.zeros(2, dtype=torch.int64, device="cuda")
        assert on_device([there, there], torch.device("cuda")) == [there, there]
        assert counter.counted.uploads.total() == 0

        mixed = on_device([torch.arange(2), there, torch.arange(3)], torch.device("cuda"))

    assert mixed[1] is there
    assert [each.device.type for each in mixed] == ["cuda"] * 3
    assert counter.counted.uploads.total() == 1


def test_a_steps_tables_are_sent_together() -> None:
    """Slots, offsets, contexts and page tables."""
    with counting() as counter:
        meta = ForwardMeta.build([Segment(3, 6, np.arange(9, dtype=np.int32))], 4, "cuda")

    assert counter.counted.uploads.total() == 1
    assert meta.paged is not None
    assert {each.device.type for each in (meta.slots, meta.paged.cu_rows, meta.paged.page_table)} == {"cuda"}


def test_greedy_rows_are_read_once() -> None:
    """Tokens and whether they can be trusted come in one read: on fake tensors it is the first that fails."""
    with counting() as counter:
        logits = torch.zeros(4, 300, device="cuda")
        with pytest.raises(HostRead):
            sample(logits, [SampleRow(SamplingParams(max_tokens=1, temperature=0.0), 0)] * 4)

    assert counter.counted.kernels["aten::stack"] + counter.counted.kernels["aten::cat"] == 1


def test_a_graphs_inputs_are_sent_together() -> None:
    """Tokens and positions in one copy; slots and tables are there already."""
    with counting() as counter:
        batch = StaticBatch(4, 8, 300, torch.device("cuda"))
        meta = ForwardMeta.build([Segment(1, 6, np.arange(9, dtype=np.int32))] * 3, 4, "cuda")
        counter.counted = Counted()
        batch.fill(torch.zeros(3, dtype=torch.int64), torch.full((3,), 6), meta, 4)

    assert counter.counted.uploads.total() == 1
