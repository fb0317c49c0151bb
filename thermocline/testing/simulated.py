"""A small simulated cell with pools that are far too small, to run a class in the real core."""

from __future__ import annotations

from typing import Any

from services.scheduler.core import check_invariants, decode_state, encode_state
from services.scheduler.core.cache.eviction import Policy
from services.scheduler.core.queue.schedules import Schedule
from shared.messages.cell_events import CellConfig
from thermocline.simulate.profiles import load_hardware, load_model
from thermocline.simulate.simulation import Setup, Simulation
from thermocline.simulate.workloads import WORKLOADS, make_workload
from thermocline.testing.registered import Decides, registered

REQUESTS = 60
_CHECKED_EVERY = 16
_WORKLOAD = "chat"


def run_cell(kind: type[Decides], *, restored_at: int = 0) -> tuple[bytes, dict[str, Any]]:
    """Run 60 requests of conversations with checks of invariants; return the final state's bytes and the figures.

    At input ``restored_at`` (0: never) the cell is restored from a snapshot. Raises what the class or a check raises.
    """
    if issubclass(kind, Policy):
        config = CellConfig(policy=kind.name)
    elif issubclass(kind, Schedule):
        config = CellConfig(schedule=kind.name)
    else:
        config = CellConfig(admission=kind.name)
    with registered(kind):
        setup = Setup(
            hardware=load_hardware("a100-pcie4"),
            model=load_model("llama-3.1-8b"),
            config=config,
            device_tokens=12_000,
            host_tokens=12_000,
            in_flight=6,
            requests=REQUESTS,
        )
        simulation = Simulation(setup, make_workload(_WORKLOAD, WORKLOADS[_WORKLOAD][0](), setup.seed))
        cell = simulation.cell

        def watch(stamped: Any, outputs: Any) -> None:
            if stamped.seq % _CHECKED_EVERY == 0:
                check_invariants(cell.state)
            if stamped.seq == restored_at:
                cell.state = decode_state(encode_state(cell.state))

        cell.watch = watch
        simulation.run()
        return encode_state(cell.state), simulation.figures()
