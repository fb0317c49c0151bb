"""The sessions of :mod:`bench.agents_day` in simulation: forty turns that grow beyond 100,000 tokens.

``simulated``: device KV for a tenth of all, host memory for the rest; ``simulated, 2 workers``: such a device each.
``simulated, little host memory``: host memory for two fifths, a disk for the rest.
"""

from __future__ import annotations

import statistics
from typing import Any

from bench.peers.agents import AgentSessions, Sizes
from services.scheduler.policies import thermocline  # noqa: F401  It registers the default policy.
from shared.messages.worker_plans import AdmitRequest
from thermocline.simulate.profiles import load_hardware, load_model
from thermocline.simulate.simulation import Setup, Simulation
from thermocline.simulate.workloads import Asked

TARGET = 0.99
HARDWARE, MODEL = "h800", "llama-3.1-8b"
SESSIONS, TURNS = 12, 40
SIZES = Sizes(instructions=12_288, result=2_048, answer=256)
TOOL_S = 10.0
DEVICE_TOKENS = 114_688
"""A tenth of what all sessions come to: twelve of about 92,000 tokens of their own, and the instructions once."""
ENOUGH_TOKENS, LITTLE_TOKENS = 1_310_720, 524_288
DISK_TOKENS = 2_097_152

CASES: dict[str, tuple[int, int, int]] = {
    "simulated": (1, ENOUGH_TOKENS, 0),
    "simulated, 2 workers": (2, ENOUGH_TOKENS, 0),
    "simulated, little host memory": (1, LITTLE_TOKENS, DISK_TOKENS),
}
"""Workers, and tokens that host memory and the disk hold."""


def reused_by_turn(seed: int, workers: int, host_tokens: int, disk_tokens: int) -> tuple[list[float], int]:
    """Of every turn but first ones, the part of the turn before that was found; and the longest prompt's tokens.

    A turn that is admitted again counts with what its first admission found.
    """
    setup = Setup(
        hardware=load_hardware(HARDWARE),
        model=load_model(MODEL),
        workers=workers,
        device_tokens=DEVICE_TOKENS,
        host_tokens=host_tokens,
        disk_tokens=disk_tokens,
        seed=seed,
    )
    workload = AgentSessions(SESSIONS, TURNS, seed=seed, tool_s=TOOL_S, sizes=SIZES)
    simulation = Simulation(setup, workload)
    cell, admitted = simulation.cell, simulation.cell._admitted
    said: dict[int, int] = {}  # By session: tokens of its latest turn.
    found: list[float] = []
    seen: set[str] = set()
    longest = 0

    def note(order: AdmitRequest) -> None:
        nonlocal longest
        if order.request_id not in seen:
            seen.add(order.request_id)
            asked: Asked = cell.open[order.request_id].asked
            cached = order.device_tokens + order.host_tokens + order.disk_tokens + order.neighbour_tokens
            before = said.get(asked.session.session)
            if before is not None:
                found.append(cached / before)
            said[asked.session.session] = order.prompt_tokens + asked.answer.tokens
            longest = max(longest, order.prompt_tokens)
        admitted(order)

    cell._admitted = note  # type: ignore[method-assign]
    simulation.run()
    return found, longest


def simulated(case: str, seed: int) -> dict[str, Any]:
    """Figures as those of the real days."""
    workers, host_tokens, disk_tokens = CASES[case]
    found, longest = reused_by_turn(seed, workers, host_tokens, disk_tokens)
    found.sort()
    return {
        "turns": SESSIONS * TURNS,
        "device_tokens": DEVICE_TOKENS,
        "host_tokens": host_tokens,
        "disk_tokens": disk_tokens,
        "longest_prompt_tokens": longest,
        "reused_least": found[0],
        "reused_median": statistics.median(found),
        "turns_below_target": sum(share < TARGET for share in found),
    }
