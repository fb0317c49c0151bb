"""A window of a busy cell's life, recorded: the scheduler's state at its start, and all inputs and outputs behind it.

The cell is simulated, with the scheduler's real core under its default settings. Conversations run until every device
pool has evicted for a while; then the inputs of the next requests are kept as they would lie in the stream.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from services.scheduler import core
from services.scheduler.core import CancelTimer, SetTimer, Stamped
from shared.codec import encode
from shared.messages.cell_events import CellConfig
from shared.messages.requests import SubmitRequest
from thermocline.simulate.profiles import load_hardware, load_model
from thermocline.simulate.simulation import Setup, Simulation
from thermocline.simulate.workloads import TraceWorkload, Workload, make_workload
from thermocline.simulate.workloads.chat import ChatOptions


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of the simulated cell. ``rate`` is requests a second and worker, about."""

    trace: Path | None = None
    speed: float = 1.0
    workers: int = 64
    device_tokens: int = 50_000
    rate: float = 4.7
    warm: int = 20_000
    measured: int = 4_000
    seed: int = 1
    config: CellConfig = field(default_factory=CellConfig)


@dataclass(slots=True)
class Recorded:
    """``state`` is a snapshot; ``inputs`` are (sequence, time, encoded); ``outputs`` are encoded, input by input."""

    state: bytes = b""
    inputs: list[tuple[int, int, bytes]] = field(default_factory=list)
    outputs: list[list[bytes]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)


class _Enough(Exception):
    """All that was wanted is recorded."""


def record(load: Load) -> Recorded:
    """Run the cell until ``load.measured`` requests behind the first ``load.warm`` were submitted."""
    simulation = Simulation(setup_of(load), workload_of(load))
    recorded, submitted = Recorded(), 0
    before: dict[str, int] = {}
    counters = simulation.cell.state.counters

    def watch(stamped: Stamped, outputs: list[Any]) -> None:
        nonlocal submitted
        if recorded.state:
            recorded.inputs.append((stamped.seq, stamped.time_ns, encode(stamped.input)))
            published = [one for one in outputs if not isinstance(one, SetTimer | CancelTimer)]
            recorded.outputs.append([encode(one) for one in published])
        submitted += isinstance(stamped.input, SubmitRequest)
        if submitted == load.warm and not recorded.state:
            recorded.state = core.encode_state(simulation.cell.state)
            before.update(counters)
        elif submitted == load.warm + load.measured:
            raise _Enough

    simulation.cell.watch = watch
    try:
        simulation.run()
    except _Enough:
        pass
    else:
        raise SystemExit(f"the load ended after {submitted} requests")
    changed = {name: value - before.get(name, 0) for name, value in sorted(counters.items())}
    recorded.figures = {
        "simulated_requests_per_s": load.measured / ((recorded.inputs[-1][1] - recorded.inputs[0][1]) / 1e9),
        "nodes": len(simulation.cell.state.tree.nodes),
        "queued": simulation.cell.state.queued,
        "counters": {name: value for name, value in changed.items() if value},
    }
    return recorded


def setup_of(load: Load) -> Setup:
    """Simulated A100s that serve Llama-3.1-8B, eight to a node, whose host memory holds as much as its devices."""
    return Setup(
        hardware=load_hardware("a100-pcie4"),
        model=load_model("llama-3.1-8b"),
        config=load.config,
        workers=load.workers,
        device_tokens=load.device_tokens,
        host_tokens=8 * load.device_tokens,
        rate=None if load.trace else load.workers * load.rate / ChatOptions().turns,
        seed=load.seed,
        remembers=True,
    )


def workload_of(load: Load) -> Workload:
    """The trace, as often as it takes, or conversations whose users think for 20 s."""
    if load.trace is not None:
        return TraceWorkload(load.trace, limit=load.warm + load.measured, is_timed=True, speed=load.speed)
    return make_workload("chat", ChatOptions(think_s=20.0), load.seed)


def kind_of(encoded: bytes) -> str:
    """The type of an encoded message, without decoding the rest of it."""
    return _TAG.decode(encoded).type


class _Tagged(msgspec.Struct):
    type: str


_TAG = msgspec.msgpack.Decoder(_Tagged)
