"""The faults of a run: kind, target, time and duration. Pure: all of it follows from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "kill",
    "restart",
    "stop_short",
    "stop_long",
    "delay",
    "stall",
    "swallow",
    "cut",
    "refuse",
    "disk_full",
    "flip",
    "truncate",
    "delete",
    "swap",
]
Direction = Literal["to_broker", "from_broker"]

DISK_KINDS: frozenset[Kind] = frozenset({"disk_full", "flip", "truncate", "delete", "swap"})
PROCESS_KINDS: frozenset[Kind] = frozenset({"kill", "restart", "stop_short", "stop_long"})

# How often each kind hits each group of processes, in parts. Workers come and go most often in real cells. A dead
# broker stops the whole cell for a while, so its deaths are rare enough that the cell serves in between.
WEIGHTS: tuple[tuple[Kind, str, int], ...] = (
    ("kill", "worker", 12),
    ("kill", "scheduler", 8),
    ("kill", "storage", 7),
    ("kill", "gateway", 5),
    ("kill", "nats", 4),
    ("restart", "worker", 4),
    ("restart", "scheduler", 3),
    ("restart", "storage", 3),
    ("restart", "gateway", 2),
    ("restart", "nats", 1),
    ("stop_short", "worker", 4),
    ("stop_short", "scheduler", 3),
    ("stop_short", "storage", 3),
    ("stop_short", "gateway", 2),
    ("stop_short", "nats", 2),
    ("stop_long", "worker", 4),
    ("stop_long", "scheduler", 3),
    ("stop_long", "storage", 3),
    ("stop_long", "gateway", 2),
    ("stop_long", "nats", 1),
    *((kind, group, 1) for kind in ("delay", "stall", "swallow", "refuse") for group in ("scheduler", "storage")),
    *((kind, group, 2) for kind in ("delay", "stall", "swallow", "refuse") for group in ("worker", "gateway")),
    ("cut", "worker", 3),
    ("cut", "scheduler", 2),
    ("cut", "storage", 2),
    ("cut", "gateway", 3),
    ("disk_full", "storage", 3),
    ("flip", "storage", 4),
    ("truncate", "storage", 2),
    ("delete", "storage", 2),
    ("swap", "storage", 2),
)

PAUSE_S = 2.5
"""The mean pause between the starts of two faults."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. ``at_s`` counts from the first request; ``seconds`` is its duration, 0 if it has none.

    ``direction`` is the way that a stalled connection holds back. ``draw`` seeds what can be chosen only when it
    happens, such as which of the existing chunks are damaged.
    """

    index: int
    at_s: float
    kind: Kind
    target: str
    seconds: float = 0.0
    direction: Direction = "to_broker"
    draw: int = 0

    def __str__(self) -> str:
        """Return kind, target and duration, such as ``stall to_broker worker-0 for 1.2 s``."""
        lasts = f" for {self.seconds:.1f} s" if self.seconds else ""
        way = f" {self.direction}" if self.kind in ("stall", "swallow") else ""
        return f"{self.kind}{way} {self.target}{lasts}"


def group_of(name: str) -> str:
    """Return the kind of process, such as ``worker`` for ``worker-3``."""
    return name.partition("-")[0]


def draw_plan(
    seed: int, count: int, names: Sequence[str], *, heartbeat_lost_s: float, pause_s: float = PAUSE_S
) -> tuple[Fault, ...]:
    """Draw ``count`` faults for the processes ``names``, in order of time.

    A long stop is longer than ``heartbeat_lost_s``, after which a silent process counts as dead; a short one is
    at most half as long.
    """
    rng = random.Random(f"chaos-plan-{seed}")
    choices = [(kind, group) for kind, group, _ in WEIGHTS]
    weights = [weight for _, _, weight in WEIGHTS]
    members: dict[str, list[str]] = {}
    for name in names:
        members.setdefault(group_of(name), []).append(name)
    faults: list[Fault] = []
    at_s = 0.0
    while len(faults) < count:
        kind, group = rng.choices(choices, weights)[0]
        if group not in members:
            continue
        at_s += pause_s * rng.uniform(0.4, 1.6)
        faults.append(
            Fault(
                index=len(faults),
                at_s=at_s,
                kind=kind,
                target=rng.choice(members[group]),
                seconds=_duration_s(rng, kind, heartbeat_lost_s),
                direction="to_broker" if rng.random() < 0.5 else "from_broker",
                draw=rng.getrandbits(32),
            )
        )
    return tuple(faults)


def _duration_s(rng: random.Random, kind: Kind, heartbeat_lost_s: float) -> float:
    match kind:
        case "stop_short":
            return rng.uniform(0.2, 0.5 * heartbeat_lost_s)
        case "stop_long":
            return rng.uniform(1.3, 2.0) * heartbeat_lost_s
        case "delay" | "disk_full":
            return rng.uniform(1.0, 6.0)
        case "stall" | "swallow" | "refuse":
            # On both sides of the limit: some processes count as dead, others only wait.
            return rng.uniform(0.2, 2.0) * heartbeat_lost_s
        case _:
            return 0.0
