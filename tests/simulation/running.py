"""One scenario, run to its end: what it did, or which property it broke."""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass

from shared.codec import decode_input
from tests.simulation.cell import Cell
from tests.simulation.drawing import draw
from tests.simulation.properties import check_end
from tests.simulation.scenario import Scenario
from tests.small_blocks import small_blocks

LAST_INPUTS = 12
BLOCK_TOKENS = 16
"""Of the blocks by which prompts are referred to."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended. ``counters`` are the core's, ``seen`` the simulation's own.

    ``broken`` is empty where every property held; ``where`` is the line that found it.
    """

    scenario: Scenario
    inputs: int
    virtual_s: float
    counters: dict[str, int]
    endings: dict[str, int]
    seen: dict[str, int]
    broken: str = ""
    where: str = ""
    last_inputs: tuple[str, ...] = ()

    @property
    def signature(self) -> str:
        """What tells one defect from another: where it was found."""
        return f"{self.broken.partition(':')[0]} at {self.where}" if self.broken else ""


def run(scenario: Scenario) -> Outcome:
    """Run a scenario. Whatever is raised is an outcome, for a core that raises would take the cell down."""
    cell = Cell(scenario)
    begun_ns = cell.clock.now_ns
    broken = where = ""
    try:
        with small_blocks(BLOCK_TOKENS):
            cell.run()
            check_end(cell)
    except Exception as error:
        broken = f"{type(error).__name__}: {error}"
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{'/'.join(frame.filename.split('/')[-2:])}:{frame.name}"
    endings = Counter(
        choice.failure.code if choice.failure is not None else str(choice.assembly.finish)
        for _, choice in cell.outcomes.values()
    )
    last = [f"{item.seq} {decode_input(item.data)}" for item in cell.inputs.messages[-LAST_INPUTS:]] if broken else []
    return Outcome(
        scenario=scenario,
        inputs=len(cell.inputs.messages),
        virtual_s=(cell.clock.now_ns - begun_ns) / 1e9,
        counters=dict(cell.state.counters),
        endings=dict(endings),
        seen=dict(cell.seen),
        broken=broken,
        where=where,
        last_inputs=tuple(last),
    )


def run_seed(seed: int) -> Outcome:
    """Run the scenario of a seed."""
    return run(draw(seed))
