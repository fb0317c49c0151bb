"""The room for a pool on a GPU, measured by running the largest prefill: here on a CPU, with a stand-in for memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.config import WorkerConfig
from services.worker.engine.gpu_room import PrefillRunner, Room, RoomWish, RunnerOf, measure_room, prefill_segments
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.states.running import RUNNING_SLOTS
from services.worker.kv.device_pool import DevicePool
from services.worker.kv.planes import PlaneMap, identity_map
from services.worker.pool_sizing import cpu_sizer, gpu_sizer
from shared.errors import ConfigError
from shared.memory.machine_memory import MachineMemory
from shared.messages.pools import KvGeometry
from tests.run_name import shm_prefix

GIB, MIB = 2**30, 2**20
CPU = torch.device("cpu")
GEOMETRY = KvGeometry(layers=4, kv_heads=6, head_dim=32, page_size=16, dtype="float32")  # 96 KiB a page.

LoadRunner = Callable[..., ModelRunner]


@dataclass
class StandIn:
    """A device of 80 GiB on which others have 2; weights and computing take 20 besides the pool of the measured run."""

    pool_bytes: int = 0
    started: int = 0
    calls: list[str] = field(default_factory=list)

    def start(self) -> None:
        self.calls.append("start")

    def peak_bytes(self) -> int:
        self.calls.append("peak")
        return 20 * GIB + self.pool_bytes

    def foreign_bytes(self) -> int:
        return 2 * GIB

    def total_bytes(self) -> int:
        return 80 * GIB


def over(runner: ModelRunner) -> RunnerOf:
    """The model of a runner over another pool."""
    return lambda pool: ModelRunner(runner.model, pool, vocab_size=0)


def test_the_pool_gets_what_the_fraction_leaves() -> None:
    """Nine tenths of the device, less others, less the peak with its weights, less buffers that come later."""
    room = Room(total=80 * GIB, foreign=2 * GIB, peak=20 * GIB, reserve=GIB, fraction=0.5)

    assert room.pool_bytes == 17 * GIB
    assert room.pages(MIB) == 17 * 1024


def test_slots_of_states_take_their_part() -> None:
    """As many as requests may run, and the one of padding."""
    room = Room(total=80 * GIB, foreign=2 * GIB, peak=20 * GIB, reserve=GIB, fraction=0.5, slot_bytes=MIB)

    assert room.pages(MIB) == 17 * 1024 - RUNNING_SLOTS - 1


def test_a_device_that_is_full_is_refused_with_figures() -> None:
    """What takes the memory is named, and what helps."""
    room = Room(total=16 * GIB, foreign=GIB, peak=15 * GIB, reserve=0, fraction=0.9)

    assert room.pool_bytes == 0
    with pytest.raises(
        ConfigError, match=r"of 16384 MiB.*0.9 allows 14745.*prefill take 15360.*others.*1024.*fraction"
    ):
        room.pages(MIB)


def test_a_prefill_longer_than_the_context_is_several_prompts() -> None:
    """Each in pages of its own, the last one shorter."""
    segments, pages = prefill_segments(100, 40, 16)

    assert [segment.rows for segment in segments] == [40, 40, 20]
    assert [list(segment.pages) for segment in segments] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert pages == 8


def test_the_largest_prefill_is_run(load_runner: LoadRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the model itself, between the start of the measurement and its peak; its own pool does not count."""
    runner = load_runner("llama3")
    page_bytes = runner.geometry.page_bytes
    memory = StandIn(pool_bytes=19 * page_bytes)  # 300 tokens in pages of 16.
    rows: list[int] = []
    forward = ModelRunner.forward

    def spy(self: ModelRunner, ids: torch.Tensor, *others: object) -> torch.Tensor:
        memory.calls.append("forward")
        rows.append(len(ids))
        logits = forward(self, ids, *others)  # type: ignore[arg-type]
        rows.append(len(logits))
        return logits

    monkeypatch.setattr(ModelRunner, "forward", spy)

    room = measure_room(over(runner), runner.pool.planes, 2048, CPU, RoomWish(0.9, 300, 7, GIB), memory)

    assert memory.calls == ["start", "forward", "peak"]
    assert rows == [300, 7]
    assert room == Room(total=80 * GIB, foreign=2 * GIB, peak=20 * GIB, reserve=GIB, fraction=0.9)


def test_the_measured_runner_attends_as_the_served_one(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the proven way: another may need what this machine lacks, or leave the device in an error for good."""
    made: list[dict[str, Any]] = []
    begin = ModelRunner.__init__

    def spy(self: ModelRunner, model: Any, pool: DevicePool, **settings: Any) -> None:
        made.append(settings)
        begin(self, model, pool, **settings)

    def sizer(model: Any, planes: PlaneMap, context: int, runner_of: RunnerOf) -> int:
        room = measure_room(runner_of, planes, context, CPU, RoomWish(0.9, 40), StandIn())
        return 64 if room.pool_bytes else 0

    monkeypatch.setattr(ModelRunner, "__init__", spy)
    runner = ModelRunner.load(
        checkpoint("llama3"),
        dtype="float32",
        device="cpu",
        page_size=16,
        device_kv_bytes=None,
        pages=None,
        threads=1,
        shm_prefix=shm_prefix("room"),
        sizer=sizer,
        attention="torch",
    )
    runner.close()

    measured, served = ({name: each[name] for name in ("attention", "proofs", "operators")} for each in made)
    assert measured == served
    assert measured["attention"] == "torch"


def test_a_prefill_that_does_not_fit_is_refused(load_runner: LoadRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the flag that makes it smaller."""
    runner = load_runner("llama3")

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried\nto allocate")

    monkeypatch.setattr(ModelRunner, "forward", full)

    with pytest.raises(
        ConfigError, match=r"300 tokens does not fit.*--max-batch-tokens.*\(CUDA out of memory. Tried\)"
    ):
        measure_room(over(runner), runner.pool.planes, 2048, CPU, RoomWish(0.9, 300), StandIn())


def test_the_settings_of_a_worker_reach_the_measurement(load_runner: LoadRunner) -> None:
    """Fraction, batch and staging: half of 80 GiB, less 2 of others, 20 of the peak, 1 of staging."""
    runner = load_runner("llama3")
    page_bytes = runner.geometry.page_bytes
    config = WorkerConfig(
        model="m", device_memory_fraction=0.5, max_batch_tokens=64, restore_staging_bytes=GIB, device="cuda"
    )

    sizer = gpu_sizer(config, lambda device: StandIn(pool_bytes=4 * page_bytes))

    pages = sizer(runner.model, runner.pool.planes, 2048, over(runner))

    assert pages == 17 * GIB // page_bytes


def test_a_pool_on_a_cpu_is_what_the_model_wants_within_what_was_handed_to_the_worker() -> None:
    """Eight contexts of 4,096 tokens are 192 MiB of this geometry."""
    wanted = 8 * 4096 * GEOMETRY.token_bytes // GEOMETRY.page_bytes

    def pages(cpu_kv_bytes: int) -> int:
        return cpu_sizer(WorkerConfig(model="m", cpu_kv_bytes=cpu_kv_bytes), _no_look)(
            None, identity_map(GEOMETRY), 4096, _no_run
        )

    assert pages(GIB) == wanted
    assert pages(96 * MIB) == 1024


def test_a_worker_alone_takes_its_part_of_what_is_free() -> None:
    """A quarter of shared memory, divided by the workers of the machine."""
    config = WorkerConfig(model="m", node_workers=2)

    pages = cpu_sizer(config, lambda: MachineMemory(64 * GIB, 96 * 8 * MIB))(
        None, identity_map(GEOMETRY), 4096, _no_run
    )

    assert pages == 1024


def _no_look() -> MachineMemory:
    raise AssertionError("the size is given")


def _no_run(pool: DevicePool) -> PrefillRunner:
    raise AssertionError("nothing is measured")
