"""Steps over states on fake CUDA tensors: no number comes back to the host, and a captured step is sent nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.step_kernels.counting import Counted, DeviceCounter, HostRead, counting, on_device
from services.worker import kernels
from services.worker.engine.decode_shapes import DecodeShape
from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.engine.found_model import find_model
from services.worker.engine.model_loading import expected_windows, load_config
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.own_attention import own_forward
from services.worker.engine.states.captured import StaticStates
from services.worker.engine.states.layers import carrying
from services.worker.engine.static_batch import StaticBatch
from services.worker.engine.static_planes import StaticPlanesStep
from services.worker.kv.device_pool import DevicePool
from tests.checkpoints import VOCAB_SIZE
from tests.unit.worker.engine.states.test_captured_states import CAPTURED

PAGES, PAGE_SIZE = 64, 16
CUDA = torch.device("cuda")


def runner_of(directory: Path) -> ModelRunner:
    """A runner of a checkpoint, which is found on the host, with its weights, pool and slots on a fake GPU."""
    config = load_config(directory)
    found = find_model(
        directory, config, expected_windows(config), dtype="bfloat16", device="cpu", context=512, page_size=PAGE_SIZE
    )
    on_device(found.model)
    storage = torch.empty(PAGES * found.planes.geometry.page_bytes, dtype=torch.uint8, device=CUDA)
    pool = DevicePool(found.planes.geometry, PAGES, storage, planes=found.planes)
    fused = own_forward(found.model, pool, found.states, model_bytes=found.model_bytes)
    return ModelRunner(found.model, pool, vocab_size=VOCAB_SIZE, fused=fused, states=found.states)


def launched(counter: DeviceCounter, step: Callable[[], object]) -> Counted:
    """What a step launches."""
    counter.counted = Counted()
    step()
    return counter.counted


def segments_of(contexts: list[int], rows: int = 1) -> list[Segment]:
    each = PAGES // len(contexts)
    return [
        Segment(rows, context, np.arange(number * each, (number + 1) * each, dtype=np.int32), running=number)
        for number, context in enumerate(contexts)
    ]


def forward(runner: ModelRunner, segments: list[Segment]) -> None:
    positions = torch.cat([torch.arange(each.context, each.length) for each in segments])
    last_rows = torch.tensor([each.rows for each in segments]).cumsum(0) - 1
    runner.forward(torch.zeros_like(positions), positions, ForwardMeta.build(segments, PAGE_SIZE, CUDA), last_rows)


@pytest.mark.parametrize("family", [*CAPTURED, "deepseek_v4"])
def test_the_host_reads_nothing(family: str, checkpoint: Callable[[str], Path]) -> None:
    """Chunks over the ends of pages, and decode steps within and at them: a read would stall every step."""
    directory = checkpoint(family)

    with counting() as counter, torch.inference_mode():
        runner = runner_of(directory)
        chunk = launched(counter, lambda: forward(runner, segments_of([24], rows=40)))
        decode = launched(counter, lambda: forward(runner, segments_of([24, 25, 31, 32])))

    assert chunk.total
    assert decode.total


@pytest.mark.parametrize("family", CAPTURED)
def test_captured_steps_are_sent_nothing(family: str, checkpoint: Callable[[str], Path]) -> None:
    """All that a graph works on is on the device; what moves states around it sends two lists of numbers at once."""
    directory = checkpoint(family)

    with counting() as counter, torch.inference_mode():
        runner = runner_of(directory)
        slotted = runner.slotted_steps
        assert slotted is not None
        batch = StaticBatch(4, PAGES, VOCAB_SIZE, CUDA, padding_slot=slotted.padding)
        assert batch.running is not None
        step = StaticPlanesStep(batch, DecodeShape(4, 512), runner.pool, kernels)
        states = StaticStates(slotted.slots, batch.running)

        def captured() -> None:
            with carrying(states):
                runner.run(batch.ids, batch.positions, step, batch.last_rows)

        inside = launched(counter, captured)
        ends = segments_of([31, 32, 40])
        around = [launched(counter, partial(move, ends)) for move in (slotted.bring, slotted.keep)]
        within = launched(counter, lambda: slotted.keep(segments_of([40])))

    assert inside.total
    assert inside.uploads.total() == 0
    assert [each.uploads.total() for each in around] == [1, 1]
    assert within.total == 0


def test_a_step_that_reads_the_device_is_found(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake GPU notices it."""
    monkeypatch.setattr("services.worker.engine.states.step.pack", lambda left, parts: next(iter(left.values())).cpu())
    directory = checkpoint("lfm2")

    with counting(), torch.inference_mode(), pytest.raises(HostRead):
        forward(runner_of(directory), segments_of([24]))
